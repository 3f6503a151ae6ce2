"""Fixtures that many tests take; the models are those of small.py. The promises run first."""

import pytest
import torch

from small import small_drafter, small_target
from support.toy import write_byte_tokenizer


def pytest_configure():
    torch.set_num_threads(1)  # small tensors: more threads only wait for one another


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.name != "test_promises.py")


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
