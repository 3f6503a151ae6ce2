"""Trunks are cached as steps use them, and what they hold does not depend on when that was."""

import pytest
import torch

from small import ARCHS, small_target
from small_runs import small_trunks, target_and_references, written_by
from support.prepare import Trunks, tensors_of


def test_a_reference_is_run_once_and_when_it_is_first_used():
    target, references = target_and_references()
    trunks, calls = small_trunks(target, references), []
    target.model.register_forward_hook(lambda *_: calls.append(1))
    assert not trunks.is_cached.any()
    for rows, num_calls in (([4, 1, 7], 3), ([1, 4], 3), ([7, 0], 4)):
        trunks(torch.tensor(rows))
        assert len(calls) == num_calls
    assert trunks.is_cached.nonzero().flatten().tolist() == [0, 1, 4, 7]


@pytest.mark.parametrize("arch", ARCHS)
def test_a_cached_trunk_is_bit_for_bit_the_same_in_whatever_order_it_was_made(arch):
    target = small_target(arch=arch)
    references = written_by(target, 6, 16)
    rows = torch.tensor([2, 5])
    orders = ([2, 5], [5, 4, 3, 2, 1, 0], [0, 2], [5])
    made = []
    for order in orders:
        trunks = Trunks(target, references, target.tap_ids, 1.0)
        trunks(torch.tensor(order))
        made.append(tensors_of(trunks(rows)))
    for other in made[1:]:
        assert all(torch.equal(one, two) for one, two in zip(made[0], other, strict=True))
