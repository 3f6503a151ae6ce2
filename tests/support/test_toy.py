"""The toy's tokenizer and its training."""

import math

import pytest
import torch

from hf import load_tokenizer
from small import small_target
from support.toy import held_out_bits, train_toy, write_byte_tokenizer


def test_the_byte_tokenizer_is_exact_on_any_text_and_never_crashes(tmp_path):
    write_byte_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    texts = ("def f(x):\n\treturn ¼é", "世界 👩‍💻", "  \n\n   a", "e\u0301", "")
    for text in texts:
        assert tokenizer.encode(text) == list(text.encode())
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("<|endoftext|>") == [256]
    assert tokenizer.encode("<|endoftext|>", special=False) == list(b"<|endoftext|>")
    assert tokenizer.decode([72, 105, 256, 300, 10**9]) == "Hi<|endoftext|>"
    assert tokenizer.num_tokens == 258 and tokenizer.stop_ids == (256,)


def test_a_toy_learns_and_is_frozen_again():
    toy = small_target(std=0.02)
    ids = torch.arange(400) % 7
    before = held_out_bits(toy, ids, 12)
    bits = train_toy(toy, ids, ids, 30, 12, seed=0)
    assert bits < before / 2 and bits == held_out_bits(toy, ids, 12)
    assert not any(p.requires_grad for p in toy.parameters())
    logits = toy(ids[None, :13])[0]
    nats = -logits[:-1].log_softmax(-1)[torch.arange(12), ids[1:13]].mean()
    assert held_out_bits(toy, ids[:13], 12) == pytest.approx(nats.item() / math.log(2), abs=1e-5)
    with pytest.raises(ValueError, match="corpus is too short"):
        train_toy(toy, ids[:13], ids, 1, 12, seed=0)
