"""The toy target: a tokenizer whose tokens are bytes, and next-token training.

pytest tests/support/test_toy.py
"""

import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from hf.tokenizer import byte_alphabet
from support.files import write_json
from support.optim import make_optimizers, optimizer_step, set_learning_rate
from target import Target

SPECIAL = {"<|endoftext|>": 256, "<|pad|>": 257}  # after the 256 bytes
BATCH_SIZE = 8
COOLDOWN = 0.4
EVAL_WINDOWS = 64  # stretches of held-out text


def write_byte_tokenizer(folder) -> None:
    """Write tokenizer files that transformers reads, too: 256 bytes, end 256, pad 257."""
    folder = Path(folder)
    flags = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
    byte_level = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=True)
    tokenizer = {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": text} | flags for text, i in SPECIAL.items()],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": byte_alphabet() | SPECIAL, "merges": []},
    }
    write_json(folder / "tokenizer.json", tokenizer)
    end, pad = SPECIAL
    names = {"eos_token": end, "pad_token": pad, "tokenizer_class": "PreTrainedTokenizerFast"}
    write_json(folder / "tokenizer_config.json", names)
    ids = {"eos_token_id": SPECIAL[end], "pad_token_id": SPECIAL[pad]}
    write_json(folder / "generation_config.json", ids)


def next_token_loss(toy: Target, ids: Tensor, starts: Tensor, length: int) -> Tensor:
    """Cross-entropy on stretches of `length` tokens: ids (n,), starts (B,) -> scalar, in nats."""
    windows = ids[starts[:, None] + torch.arange(length + 1)].long()  # (B, length+1)
    windows = windows.to(toy.lm_head.weight.device)
    return F.cross_entropy(toy(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def train_toy(toy: Target, train_ids, held_out_ids, num_steps: int, length: int, seed) -> float:
    """Train a toy on the next token of train_ids (n,) -> held-out bits per token."""
    if min(len(train_ids), len(held_out_ids)) <= length + 1:
        raise ValueError(f"the corpus is too short: each part needs more than {length + 1} tokens")
    optimizers = make_optimizers(toy.requires_grad_(True), matrix_lr=0.02, lr=3e-3)
    generator = torch.Generator().manual_seed(seed)
    bar = tqdm(range(num_steps), desc="target  ", unit="step")
    for step in bar:
        set_learning_rate(optimizers, step, num_steps, cooldown=COOLDOWN)
        starts = torch.randint(len(train_ids) - length, (BATCH_SIZE,), generator=generator)
        loss = next_token_loss(toy, train_ids, starts, length)
        loss.backward()
        optimizer_step(optimizers)
        if step % 10 == 0:
            bar.set_postfix({"bits per token": f"{loss.item() / math.log(2):.3f}"})
    toy.requires_grad_(False)
    return held_out_bits(toy, held_out_ids, length)


@torch.no_grad()
def held_out_bits(toy: Target, ids: Tensor, length: int) -> float:
    """Bits per token on stretches of `length` tokens, evenly spread over ids (n,)."""
    starts = torch.linspace(0, len(ids) - length - 1, EVAL_WINDOWS).long()
    losses = [next_token_loss(toy, ids, part, length).item() for part in starts.split(BATCH_SIZE)]
    return sum(losses) / len(losses) / math.log(2)
