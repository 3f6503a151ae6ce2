"""Trunks, batches, and the drafter that training starts from."""

import dataclasses

import pytest
import torch

from small import ARCHS, small_target
from small_runs import CONFIG, target_and_references
from support.data import References
from support.prepare import Trunks, batch_rows, fresh_drafter


def test_cached_trunks_equal_fresh_ones():
    target, references = target_and_references()
    rows = torch.tensor([4, 1, 7])
    cached, fresh = (Trunks(target, references, (0, 2), gib)(rows) for gib in (2.0, 0.0))
    assert cached.tap_ids == fresh.tap_ids == (0, 2)
    assert torch.equal(cached.tokens, fresh.tokens) and torch.equal(cached.lengths, fresh.lengths)
    for row, length in enumerate(fresh.lengths.tolist()):
        for name in ("hidden", "taps"):
            pair = (getattr(trunk, name)[row, :length] for trunk in (cached, fresh))
            torch.testing.assert_close(*pair, atol=1e-5, rtol=0)


@pytest.mark.parametrize("arch", ARCHS)
def test_trunks_are_cached_if_they_fit(arch):
    target = small_target(arch=arch)
    references = References.from_lists([[1, 2], [3]], [[5, 6], [7, 8, 9]], 0)
    size = Trunks(target, references, (0,), 1.0).cache.nbytes / 2**30
    assert Trunks(target, references, (0,), size * 1.01).cache
    assert not Trunks(target, references, (0,), size * 0.99).cache


LENGTHS = torch.tensor([9, 30, 12, 50, 11, 31, 10, 52, 29, 51, 28, 49])


@pytest.mark.parametrize("bucket", [1, 3])
def test_every_epoch_sees_every_reference_once(bucket):
    seen = torch.cat([batch_rows(3, step, LENGTHS, 4, bucket) for step in range(6)])
    assert sorted(seen[:12].tolist()) == sorted(seen[12:].tolist()) == list(range(12))
    assert seen[:12].tolist() != seen[12:].tolist()
    assert LENGTHS[seen].view(-1, 4).diff(dim=1).min() >= 0  # each sorted by length


def test_batches_of_a_bucket_hold_texts_of_similar_length():
    longest = [
        [LENGTHS[batch_rows(3, step, LENGTHS, 4, bucket)].max() for step in range(3)]
        for bucket in (1, 3)
    ]
    assert sorted(longest[1]) == [12, 31, 52] and sum(longest[0]) > sum(longest[1])
    # of 11 in batches of 4, later epochs begin within a batch: each still holds every one once
    seen = torch.cat([batch_rows(3, step, LENGTHS[:11], 4, 3) for step in range(11)]).tolist()
    assert sorted(seen) == sorted([*range(11)] * 4)


@pytest.mark.parametrize(
    "flags, kind, size",
    [
        (dict(), "dflash", 8),
        (dict(drafter_kind="dspark", markov_head="rnn"), "dspark", 7),
        (dict(drafter_kind="dspark", block_size=5), "dspark", 5),
        (dict(drafter_kind="dflash2", rank=3), "dflash2", 8),
    ],
    ids=str,
)
def test_a_fresh_drafter_is_of_the_kind_and_size_that_flags_name(flags, kind, size):
    drafter = fresh_drafter(dataclasses.replace(CONFIG, **flags), small_target(), None)
    assert (drafter.config.kind, drafter.config.block_size) == (kind, size)
    assert drafter.config.num_draft_tokens == (size if kind == "dspark" else size - 1)


@pytest.mark.parametrize(
    "flags, word",
    [
        (dict(markov_head="rnn"), "--markov-head"),
        (dict(rank=3), "--rank"),
        (dict(drafter_kind="dflash2", markov_head="rnn"), "--markov-head"),
    ],
    ids=str,
)
def test_a_flag_of_another_kind_is_an_error(flags, word):
    with pytest.raises(ValueError, match=word):
        fresh_drafter(dataclasses.replace(CONFIG, **flags), small_target(), None)
