"""Small models with nothing left at a special value: every norm weight is random, distributions are
peaked."""

import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from drafter import Drafter  # noqa: E402
from hf.tokenizer import write_byte_tokenizer  # noqa: E402
from replay import PER_TOKEN, positional_names  # noqa: E402
from target import Target  # noqa: E402

SMALL = dict(
    vocab_size=24,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=512,
)
MIXED = dict(  # small linear layers beside it; the last layer is one of attention
    num_hidden_layers=4,
    layer_types=(*("linear_attention",) * 3, "full_attention"),
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=12,
    rms_norm_eps=1e-5,
)
SPARSE = dict(
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    indexer_n_heads=4,
    shared_expert_intermediate_size=16,
    indexer_head_dim=8,
    indexer_budget=8,
    hc_lowrank=8,
    indexer_compress_ratio=2,
    ple_embed_dim=16,
    heads_per_ngram=2,
    ngram_vocab_size_base=50,
    eos_token_id=20,
)
SMALL_OF = {"gqa": SMALL, "gdn": SMALL | MIXED, "qsa": SMALL | MIXED | SPARSE}
ARCHS = tuple(SMALL_OF)


def randomise(module: torch.nn.Module, seed: int, std: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * std if parameter.dim() > 1 else 1 + 0.3 * noise)
        for name, parameter in module.named_parameters():  # convolutions see their neighbours
            if name.endswith("conv1d.weight"):
                parameter.mul_(2)


def small_target(seed: int = 0, std: float = 0.0, arch: str = "gqa", **changes) -> Target:
    std = std or (0.25 if arch == "gqa" else 0.12)  # gated norms lift float32's noise
    target = Target.toy(arch, **(SMALL_OF[arch] | changes)).requires_grad_(False)
    randomise(target, seed, std)
    target.num_tokens = target.config.vocab_size - 2
    return target


def small_drafter(target: Target, seed: int = 1, block_size: int = 5, **options) -> Drafter:
    drafter = Drafter.fresh(target, 2, block_size, **options)
    randomise(drafter, seed, 0.25)
    return drafter


def state_gap(trunk, row: int, alone) -> float:
    """The largest difference between what a trunk holds of one row and a trunk of that row alone,
    as a share of the largest value there."""
    length = int(alone.lengths[0])
    pairs = [(trunk.hidden[row, :length], alone.hidden[0, :length])]
    pairs += [(trunk.taps[row, :length], alone.taps[0, :length])]
    for kept, wanted in zip(trunk.states, alone.states):
        assert kept.keys() == wanted.keys()
        for name in positional_names(kept):
            pairs.append((kept[name][row, :length], wanted[name][0, :length]))
        if "states" in kept:
            pairs.append((kept["states"][row, -1], wanted["states"][0, -1]))
            assert kept["after"][row, -1] == wanted["after"][0, -1] == length - 1
        if "base" in kept:
            assert kept["base"][row] == wanted["base"][0]
            pairs += [(kept[name][row], wanted[name][0]) for name in PER_TOKEN]
    return max(
        ((a.double() - b.double()).abs().max() / b.abs().max().clamp(min=1)).item()
        for a, b in pairs
    )


SPARK = dict(architecture="Qwen3DSparkModel", block_size=4, markov_rank=6)
SECOND = dict(
    architecture="DFlash2DraftModel", selector_rank=6, selector_top_k=5, conv_group_size=8
)
SLIDING = dict(layer_types=("sliding_attention",) * 2, sliding_window=5)
DRAFTERS = {  # every kind and every variant of it, four drafts each
    "dflash": {},
    "dflash causal": dict(is_causal=True),
    "dflash sliding in part": SLIDING | dict(layer_types=("sliding_attention", "full_attention")),
    "dflash sliding, causal by it": SLIDING | dict(is_causal=None),
    "dspark vanilla": SPARK,
    "dspark gated": SPARK | dict(markov_head_type="gated"),
    "dspark rnn": SPARK | dict(markov_head_type="rnn", architecture="DSparkDraftModel"),
    "dspark without markov": SPARK | dict(markov_rank=0),
    "dspark sliding": SPARK | SLIDING | dict(confidence_head_with_markov=False),
    "dflash2": SECOND,
    "dflash2 sliding, scaled": SECOND
    | SLIDING
    | dict(
        conv_kernel_size=3,
        output_multiplier=0.5,
        final_logit_softcapping=2.0,
        input_embedding_scale=1.5,
    ),
}


@pytest.fixture
def target():
    return small_target()


@pytest.fixture
def drafter(target):
    return small_drafter(target)


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """A target and a drafter as train.py leaves them, for texts of 64 bytes."""
    root = tmp_path_factory.mktemp("folders")
    target = small_target(vocab_size=264, max_position_embeddings=64)
    target.num_tokens = 258
    write_byte_tokenizer(root / "target")
    target.save_pretrained(root / "target", eos_token_id=256, pad_token_id=257)
    small_drafter(target).save_pretrained(root / "drafter")
    return root
