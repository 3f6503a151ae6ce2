"""The tables of a tree against Python's sets and lists. `pytest tests/test_tree.py`

That packed branches get what the target gives on each alone stands in test_target.py.
"""

import pytest
import torch

from small import PRIVATE_AND_MERGED, VOCAB, W, random_case
from tree import build_tree


def histories(tokens, anchors, branches):
    """Yield ((b, a, k, i), x_0 .. x_a y_1 .. y_i) for every i of 0 .. W of every branch."""
    for b, a, k in torch.cartesian_prod(*(torch.arange(n) for n in branches.shape[:3])).tolist():
        trunk = tokens[b, : anchors[b, a] + 1].tolist()
        for i in range(branches.shape[-1] + 1):
            yield (b, a, k, i), trunk + branches[b, a, k, :i].tolist()


def size_of_a_trie(tokens, lengths, anchors, branches) -> int:
    """Distinct histories, neither on the trunk nor unneeded, counted with Python's sets."""
    total = 0
    for b in range(len(tokens)):
        trunk, distinct = tokens[b, : lengths[b]].tolist(), set()
        for a, anchor in enumerate(anchors[b].tolist()):
            for branch in branches[b, a].tolist():
                ids = branch[: branch.index(-1)] if -1 in branch else branch
                for k in range(1, len(ids)) if anchor >= 0 else ():
                    history = trunk[: anchor + 1] + ids[:k]
                    if history != trunk[: len(history)]:
                        distinct.add(tuple(history))
        total += len(distinct)
    return total


@pytest.mark.parametrize("K", [1, 4])
@pytest.mark.parametrize("seed", range(30))
def test_merged_nodes_are_those_of_a_brute_force_trie(K, seed):
    tokens, lengths, anchors, branches = random_case(seed, K)
    merged = build_tree(tokens, lengths, anchors, branches, merge=True)
    assert merged.num_nodes == size_of_a_trie(tokens, lengths, anchors, branches)
    private = build_tree(tokens, lengths, anchors, branches, merge=False)
    counts = (branches >= 0).sum(-1) - 1
    assert private.num_nodes == counts.clamp(min=0)[anchors >= 0].sum()


@PRIVATE_AND_MERGED
@pytest.mark.parametrize("seed", range(10))
def test_ancestors_spell_the_history(seed, merge):
    tokens, lengths, anchors, branches = random_case(seed, 4)
    tree = build_tree(tokens, lengths, anchors, branches, merge=merge)
    table, T = tree.ancestors(W + 4), tree.num_trunk_slots
    packed_tokens = torch.cat([tokens, tree.tokens], 1)
    for index, history in histories(tokens, anchors, branches):
        b, slot = index[0], int(tree.p_index[index])
        if slot < T:
            continue
        assert tree.positions[b, slot - T] == len(history) - 1
        for back, ancestor in enumerate(table[b, slot - T].tolist()):
            assert (ancestor == -1) == (back >= len(history))
            assert ancestor == -1 or packed_tokens[b, ancestor] == history[-1 - back]


def wrong_rows(case, tree, mask) -> int:
    """Nodes whose visible tokens, in the order of their positions, are not the history."""
    tokens, _, anchors, branches = case
    T, wrong = tree.num_trunk_slots, 0
    packed_tokens = torch.cat([tokens, tree.tokens], 1)
    depths = torch.cat([torch.arange(T).expand(len(tokens), T), tree.positions], 1)
    for index, history in histories(tokens, anchors, branches):
        b, slot = index[0], int(tree.p_index[index])
        if slot < T:
            continue
        seen = mask[b, 0, slot - T].nonzero()[:, 0]
        seen = seen[depths[b, seen].argsort()]
        wrong += packed_tokens[b, seen].tolist() != history
    return wrong


@PRIVATE_AND_MERGED
@pytest.mark.parametrize("seed", range(10))
def test_a_node_sees_its_history_and_nothing_else(seed, merge):
    case = random_case(seed, 4)
    tree = build_tree(*case, merge=merge)
    mask = tree.view().mask
    assert wrong_rows(case, tree, mask) == 0
    b, node, column = (mask[:, 0] & tree.valid[..., None]).nonzero()[-1].tolist()
    mask[b, 0, node, column] = False  # one element, and the check fails
    assert wrong_rows(case, tree, mask) > 0


@PRIVATE_AND_MERGED
def test_anchors_may_come_in_any_order(merge):
    tokens, lengths, anchors, branches = random_case(5, 2)
    case = tokens, lengths, anchors.flip(1), branches.flip(1)
    tree = build_tree(*case, merge=merge)
    assert wrong_rows(case, tree, tree.view().mask) == 0
    b, p, _ = (tree.groups >= 0).nonzero().T
    nodes = tree.groups[tree.groups >= 0]
    assert torch.equal(tree.roots[b, nodes], tree.group_roots[b, p])
    assert sorted(zip(b.tolist(), nodes.tolist())) == [*map(tuple, tree.valid.nonzero().tolist())]


@PRIVATE_AND_MERGED
def test_a_decoding_round_has_a_node_for_the_anchor_and_for_every_draft(merge):
    tokens, lengths, _, branches = random_case(3, 1)
    anchors, branches = (lengths - 1)[:, None], branches[:, :1].clamp(min=0)
    tree = build_tree(tokens, lengths - 1, anchors, branches, merge=merge, include_anchor=True)
    assert tree.num_nodes == 3 * (W + 1)
    assert (tree.p_index >= tree.num_trunk_slots).all()  # p_1 .. p_{W+1} all come from nodes


@PRIVATE_AND_MERGED
def test_blocks_of_one_draft_need_no_nodes(merge):
    tokens, lengths, anchors, _ = random_case(4, 1)
    branches = torch.randint(0, VOCAB, (3, 6, 2, 1))
    tree = build_tree(tokens, lengths, anchors, branches, merge=merge)
    assert tree.num_nodes == 0
    assert torch.equal(tree.p_index[..., 0], anchors[..., None].expand(3, 6, 2))


def test_shapes_that_do_not_fit_are_named():
    tokens, anchors = torch.zeros(2, 5).long(), torch.zeros(2, 1).long()
    with pytest.raises(ValueError, match="do not fit"):
        build_tree(tokens, torch.tensor([5]), anchors, torch.zeros(2, 1, 1, 3).long())
