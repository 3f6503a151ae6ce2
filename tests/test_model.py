"""The layers against transformers, and cached against uncached. `pytest tests/test_model.py`"""

import json

import pytest
import torch
from conftest import SMALL, randomise, small_target

from hf.tokenizer import load_tokenizer, write_byte_tokenizer
from model import ModelConfig, rotary, rotate
from target import Target


def test_a_saved_target_opens_in_transformers_with_the_same_logits(tmp_path):
    transformers = pytest.importorskip("transformers")
    for tied in (False, True):
        folder = tmp_path / f"tied{tied}"
        target = small_target(vocab_size=264, tie_word_embeddings=tied, rope_theta=5000.0)
        write_byte_tokenizer(folder)
        target.save_pretrained(folder, eos_token_id=256, pad_token_id=257)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
        assert type(theirs).__name__ == "Qwen3ForCausalLM"
        tokens = torch.randint(0, 256, (2, 50), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            torch.testing.assert_close(target(tokens), theirs(tokens).logits, atol=1e-4, rtol=0)
        text = "def f(x):\n    return 'é 世界'"
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        ours = load_tokenizer(folder)
        assert tokenizer(text)["input_ids"] == ours.encode(text) == list(text.encode())
        special = "a<|endoftext|> b<|pad|>"
        assert tokenizer(special)["input_ids"] == ours.encode(special)
        assert (
            ours.decode(ours.encode(text)) == text
            and ours.stop_ids == (256,)
            and ours.pad_id == 257
        )


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_what_transformers_saved_opens_here_with_the_same_logits(tmp_path, tied, seed):
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(
        **SMALL,
        tie_word_embeddings=tied,
        rope_parameters={"rope_theta": 3000.0 * (seed + 1), "rope_type": "default"},
    )
    torch.manual_seed(seed)
    theirs = transformers.Qwen3ForCausalLM(config).float()
    randomise(theirs, seed, 0.2)
    theirs.save_pretrained(tmp_path)
    names = json.loads((tmp_path / "config.json").read_text())
    assert names["model_type"] == "qwen3"
    ours = Target.from_pretrained(tmp_path)
    assert ours.lm_head.weight is ours.model.embed_tokens.weight or not tied
    tokens = torch.randint(
        0, SMALL["vocab_size"], (3, 40), generator=torch.Generator().manual_seed(seed)
    )
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, atol=1e-4, rtol=0)


def test_saving_and_loading_is_bit_equal(tmp_path, target):
    target.save_pretrained(tmp_path)
    again = Target.from_pretrained(tmp_path)
    assert again.config == target.config and not any(p.requires_grad for p in again.parameters())
    for name, tensor in target.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name


def test_rotary_turns_pairs_by_the_complex_exponential():
    x = torch.randn(1, 5, 2, 8)
    positions = torch.tensor([[0, 3, 4, 7, 100]])
    z = torch.complex(x[..., :4], x[..., 4:])
    angle = positions[..., None] * 10_000.0 ** -(torch.arange(4) / 4)  # (1, 5, 4)
    turned = z * torch.polar(torch.ones_like(angle), angle)[:, :, None]
    torch.testing.assert_close(
        rotate(x, rotary(positions, 8, 10_000.0)), torch.cat([turned.real, turned.imag], -1)
    )


@pytest.mark.parametrize(
    "change, word",
    [
        ({"model_type": "gpt2"}, "gpt2"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"num_attention_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 7}, "head_dim"),
        ({"hidden_size": None}, "hidden_size"),
    ],
)
def test_arithmetic_that_is_not_implemented_is_an_error_that_names_it(change, word):
    found = ModelConfig().to_dict() | change
    found = {k: v for k, v in found.items() if v is not None}
    if "rope_scaling" in change:
        del found["rope_parameters"]
    with pytest.raises(ValueError, match=word):
        ModelConfig.from_dict(found)


def test_unknown_keys_of_a_public_config_are_harmless():
    assert ModelConfig.from_dict(ModelConfig().to_dict() | {"torchscript": True}) == ModelConfig()
