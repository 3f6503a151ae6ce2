"""Small models for tests, and what several test files share.

Nothing is left at a special value: every norm weight is random, distributions are peaked.
"""

import json
import os
import random
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafter import Drafter
from replay import positional_names
from support.flags import run_command
from target import Target

ROOT = Path(__file__).parent.parent

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
    """The largest difference between a row's state in a trunk and that of a trunk of that row
    alone, as a share of the largest value there."""
    length = int(alone.lengths[0])
    pairs = [(trunk.hidden[row, :length], alone.hidden[0, :length])]
    pairs += [(trunk.taps[row, :length], alone.taps[0, :length])]
    for state, wanted in zip(trunk.states, alone.states):
        assert state.keys() == wanted.keys()
        for name in positional_names(state):
            pairs.append((state[name][row, :length], wanted[name][0, :length]))
        if "states" in state:
            pairs.append((state["states"][row, -1], wanted["states"][0, -1]))
            assert state["after"][row, -1] == wanted["after"][0, -1] == length - 1
        if "tail_start" in state:
            assert state["tail_start"][row] == wanted["tail_start"][0]
            pairs.append((state["qkv"][row], wanted["qkv"][0]))
    return max(
        ((a.double() - b.double()).abs().max() / b.abs().max().clamp(min=1)).item()
        for a, b in pairs
    )


def random_tokens(B: int, T: int, seed: int = 0, vocab_size: int = 20) -> torch.Tensor:
    """Ids (B, T) drawn evenly from those below `vocab_size`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab_size, (B, T), generator=generator)


def random_prompts(count: int, seed: int = 0, vocab_size: int = 20, longest: int = 12) -> list:
    """Lists of 1 .. longest - 1 random ids."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, longest, (count,), generator=generator).tolist()
    return [torch.randint(0, vocab_size, (n,), generator=generator).tolist() for n in sizes]


# ------------------------------------------------------------------ a trunk and branches, drawn

# random_case's branches: few tokens, so that they often repeat the trunk and one another
W, VOCAB = 5, 6
PRIVATE_AND_MERGED = pytest.mark.parametrize("merge", [False, True], ids=["private", "merged"])


def random_case(seed: int, K: int) -> tuple:
    """-> tokens, lengths, anchors, branches: trunks of unequal length, anchors that are adjacent,
    first, last, random or absent, branches that follow the trunk for a while or end early."""
    rng = random.Random(seed)
    B, T, A = 3, 24, 6
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCAB, (B, T), generator=generator)
    lengths = torch.tensor([T, rng.randint(8, T - 1), rng.randint(6, T - 1)])
    anchors = torch.full((B, A), -1)
    for b, length in enumerate(lengths.tolist()):
        middle = rng.randint(1, length - 4)
        wanted = {0, length - 2, length - 1, middle, middle + 1, rng.randrange(length)}
        chosen = sorted(wanted)[: A - (b == 1)]  # the second row has an absent anchor
        anchors[b, : len(chosen)] = torch.tensor(chosen)
    branches = torch.randint(0, VOCAB, (B, A, K, W), generator=generator)
    for b in range(B):  # some branches follow the trunk for a while, or all the way
        for a, anchor in enumerate(anchors[b].tolist()):
            follow = min(rng.choice([0, 0, 1, 2, W]), int(lengths[b]) - 1 - anchor)
            if anchor >= 0 and follow > 0:
                branches[b, a, 0, :follow] = tokens[b, anchor + 1 : anchor + 1 + follow]
    for b in range(B):  # and some end early, as after a stop token
        if rng.random() < 0.7:
            branches[b, rng.randrange(A), rng.randrange(K), rng.randint(0, W) :] = -1
    return tokens, lengths, anchors, branches


# -------------------------------------------------------------------------------------- commands


def run(*arguments, cwd=ROOT, timeout: int = 300) -> subprocess.CompletedProcess:
    """A Python command in a process of its own, on one thread."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def error_of(main, arguments, monkeypatch, capsys) -> str:
    """The one line in which a command line ends that is wrong, with exit code 2."""
    monkeypatch.setattr(sys, "argv", ["command", *map(str, arguments)])
    try:
        code = run_command(main)
    except SystemExit as stop:  # argparse raises it
        code = stop.code
    lines = capsys.readouterr().err.strip().splitlines()
    assert code == 2 and len(lines) == 1, (code, lines)
    return lines[0]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def peak_memory() -> int:
    """The most bytes that this process has occupied so far (Linux alone)."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))


def reset_peak_memory() -> None:
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


# -------------------------------------------------------------------------------- spoiled folders


def rewrite(change):
    """-> a function of a folder that changes its tensors by `change(tensors)`."""

    def spoil(folder):
        path = folder / "model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, {"format": "pt"})

    return spoil


def reconfigure(**changes):
    """-> a function of a folder that changes fields of its config.json; "gone" removes a field."""

    def spoil(folder):
        path = folder / "config.json"
        fields = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({k: v for k, v in fields.items() if v != "gone"}))

    return spoil


def spoiled_is_refused(folder, spoil, word: str) -> None:
    """A folder that opens does not once it is spoiled, and the error names it and the reason."""
    Target.from_pretrained(folder)
    spoil(folder)
    with pytest.raises((ValueError, FileNotFoundError), match=word) as error:
        Target.from_pretrained(folder)
    assert str(folder) in str(error.value)
