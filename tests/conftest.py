"""Small models with nothing left at a special value: every norm weight is random, distributions are
peaked."""

import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from drafter import Drafter  # noqa: E402
from target import Target  # noqa: E402

SMALL = dict(
    vocab_size=24, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=512,
)  # fmt: skip


def randomise(module: torch.nn.Module, seed: int, std: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * std if parameter.dim() > 1 else 1 + 0.3 * noise)


def small_target(seed: int = 0, std: float = 0.25, **changes) -> Target:
    target = Target.toy(**(SMALL | changes)).requires_grad_(False)
    randomise(target, seed, std)
    target.num_tokens = target.config.vocab_size - 2
    return target


def small_drafter(target: Target, seed: int = 1, block_size: int = 5, **options) -> Drafter:
    drafter = Drafter.fresh(target, 2, block_size, **options)
    randomise(drafter, seed, 0.25)
    return drafter


@pytest.fixture
def target():
    return small_target()


@pytest.fixture
def drafter(target):
    return small_drafter(target)
