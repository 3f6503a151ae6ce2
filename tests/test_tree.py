"""A packed branch gets what the target gives on that branch alone. `pytest tests/test_tree.py`"""

import dataclasses
import random

import pytest
import torch
from conftest import small_target

import replay
import tree as tree_module
from tree import ProposalTree, build_tree, draw_anchors

W, VOCAB = 5, 6  # few tokens, so that branches often repeat the trunk and one another


def random_case(seed: int, K: int):
    """Trunks of unequal length and anchors that are adjacent, first, last, random or absent."""
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


def alone(target, tokens, anchors, branches):
    """Yield ((b, a, k, i), p_{i+1}) from one plain run per branch: the slow twin."""
    for b, a, k in torch.cartesian_prod(*(torch.arange(n) for n in branches.shape[:3])).tolist():
        anchor = int(anchors[b, a])
        ids = branches[b, a, k].tolist()
        count = ids.index(-1) if -1 in ids else W
        if anchor < 0 or count == 0:
            continue
        sequence = torch.tensor([tokens[b, : anchor + 1].tolist() + ids[: count - 1]])
        p = target(sequence).softmax(-1)[0, anchor:]
        for i in range(count):
            yield (b, a, k, i), p[i]


def largest_difference(target, case, merge, every=64) -> float:
    tokens, lengths, anchors, branches = case
    tree = build_tree(tokens, lengths, anchors, branches, merge=merge)
    trunk = target.prefill(tokens, lengths, checkpoint_every=every)
    p = target.branch_probs(trunk, tree)
    return max(
        (p[where] - slow).abs().max().item()
        for where, slow in alone(target, tokens, anchors, branches)
    )


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("K", [1, 4])
@pytest.mark.parametrize("seed", range(12))
def test_packed_branches_equal_the_target_run_on_each_alone(target, merge, K, seed):
    assert largest_difference(target, random_case(seed, K), merge) < 1e-5


OTHERS = {
    "llama": dict(model_type="llama"),
    "linear": dict(arch="gdn"),
    "sparse": dict(arch="qsa"),
    "sparse without n-grams": dict(arch="qsa", ple_layer_ids=()),
    "sparse in blocks of 3": dict(arch="qsa", indexer_compress_ratio=3, indexer_budget=6),
}


@pytest.mark.parametrize("every", [1, 7, 1000])
@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("K", [1, 4])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("family", OTHERS)
def test_so_they_do_in_every_family_and_from_every_checkpoint(family, seed, K, merge, every):
    target = small_target(seed, **OTHERS[family])
    assert largest_difference(target, random_case(seed + 50, K), merge, every) < 1e-4


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("family", OTHERS)
def test_so_they_do_around_the_checkpoints_of_a_long_trunk(family, merge):
    """Checkpoints every 64 tokens: anchors right before, on and behind them, and at the end."""
    target, generator = small_target(7, **OTHERS[family]), torch.Generator().manual_seed(7)
    tokens = torch.randint(0, VOCAB, (2, 133), generator=generator)
    anchors = torch.tensor([[62, 63, 64, 127, 128, 132], [0, 63, 64, 65, 66, -1]])
    branches = torch.randint(0, VOCAB, (2, 6, 2, W), generator=generator)
    branches[0, 1, 0, :3] = tokens[0, 64:67]  # over a checkpoint along the trunk, then off it
    case = tokens, torch.tensor([133, 67]), anchors, branches
    assert largest_difference(target, case, merge, 64) < 1e-4


def late_state(monkeypatch):
    whole = replay.replay_states
    monkeypatch.setattr(replay, "replay_states", lambda past, at: whole(past, at + 1))


def stale_tail(monkeypatch):
    """What looks back along a branch does not see the trunk."""

    def cut(past, new, index, T, base=0):
        return tree_module.fetch(None, new, index.where(index >= T, -1), T)

    monkeypatch.setattr("model.fetch", cut)


def leaking_blocks(monkeypatch):
    """A node chooses among the blocks of other branches, too."""

    def shared(view, r):
        slots, seen = tree_module.block_ends(view, r)
        if view.groups is None:
            return slots, seen
        ends = ((view.positions + 1) % r == 0) & view.valid
        return slots, torch.cat(
            [seen[..., : -ends.shape[1]], ends[:, None].expand_as(seen[..., -ends.shape[1] :])], -1
        )

    monkeypatch.setattr("model.block_ends", shared)


@pytest.mark.parametrize(
    "arch, damage",
    [
        ("gdn", late_state),
        ("gdn", stale_tail),
        ("qsa", stale_tail),
        ("qsa", leaking_blocks),
        ("qsa", late_state),
    ],
)
def test_a_late_state_a_cut_convolution_or_a_shifted_block_is_noticed(arch, damage, monkeypatch):
    target = small_target(arch=arch)
    assert largest_difference(target, random_case(1, 2), False, 7) < 1e-4
    damage(monkeypatch)
    assert largest_difference(target, random_case(1, 2), False, 7) > 1e-3


@pytest.mark.parametrize("seed", range(3))
def test_one_leaking_mask_element_is_noticed(target, seed, monkeypatch):
    whole = ProposalTree.view

    def leaking(tree):
        view = whole(tree)
        nodes = tree.valid[0].nonzero()[-1, 0]
        free = ~view.mask[0, 0, nodes]
        view.mask[0, 0, nodes, free.nonzero()[0, 0]] = True
        return view

    monkeypatch.setattr(ProposalTree, "view", leaking)
    assert largest_difference(target, random_case(seed, 4), False) > 1e-4


def test_index_instead_of_depth_as_position_is_noticed(target):
    tokens, lengths, anchors, branches = random_case(0, 2)
    tree = build_tree(tokens, lengths, anchors, branches, merge=False)
    wrong = dataclasses.replace(
        tree, positions=tree.num_trunk_slots + torch.arange(tree.tokens.shape[1]).expand(3, -1)
    )
    trunk = target.prefill(tokens, lengths)
    gap = (target.branch_probs(trunk, tree) - target.branch_probs(trunk, wrong)).abs().max()
    assert gap > 1e-3


def brute_force_trie(tokens, lengths, anchors, branches) -> int:
    """Distinct histories, neither on the trunk nor unneeded, counted with Python sets."""
    total = 0
    for b in range(len(tokens)):
        trunk, histories = tokens[b, : lengths[b]].tolist(), set()
        for a, anchor in enumerate(anchors[b].tolist()):
            for branch in branches[b, a].tolist():
                ids = branch[: branch.index(-1)] if -1 in branch else branch
                for k in range(1, len(ids)) if anchor >= 0 else ():
                    history = trunk[: anchor + 1] + ids[:k]
                    if history != trunk[: len(history)]:
                        histories.add(tuple(history))
        total += len(histories)
    return total


@pytest.mark.parametrize("K", [1, 4])
@pytest.mark.parametrize("seed", range(30))
def test_merged_nodes_are_those_of_a_brute_force_trie(K, seed):
    tokens, lengths, anchors, branches = random_case(seed, K)
    merged = build_tree(tokens, lengths, anchors, branches, merge=True)
    assert merged.num_nodes == brute_force_trie(tokens, lengths, anchors, branches)
    private = build_tree(tokens, lengths, anchors, branches, merge=False)
    counts = (branches >= 0).sum(-1) - 1
    assert private.num_nodes == counts.clamp(min=0)[anchors >= 0].sum()


@pytest.mark.parametrize("seed", range(10))
def test_ancestors_spell_the_history(seed):
    tokens, lengths, anchors, branches = random_case(seed, 4)
    for merge in (False, True):
        tree = build_tree(tokens, lengths, anchors, branches, merge=merge)
        table, T = tree.ancestors(W + 4), tree.num_trunk_slots
        spelled = torch.cat([tokens, tree.tokens], 1)
        for b, a, k in [(b, a, k) for b in range(3) for a in range(6) for k in range(4)]:
            for i, slot in enumerate(tree.slots[b, a, k].tolist()):
                if slot < T:
                    continue
                history = tokens[b, : anchors[b, a] + 1].tolist() + branches[b, a, k, :i].tolist()
                assert tree.positions[b, slot - T] == len(history) - 1
                for back, index in enumerate(table[b, slot - T].tolist()):
                    assert (index == -1) == (back >= len(history))
                    assert index == -1 or spelled[b, index] == history[-1 - back]


def perturbed(merge: bool, target):
    tokens, lengths, anchors, branches = random_case(1, 2)
    branches = branches.clamp(min=0)
    trunk = target.prefill(tokens, lengths)
    before = target.branch_probs(trunk, build_tree(tokens, lengths, anchors, branches, merge=merge))
    branches[0, 2, 1, 1:] = (branches[0, 2, 1, 1:] + 1) % VOCAB
    after = target.branch_probs(trunk, build_tree(tokens, lengths, anchors, branches, merge=merge))
    others = (anchors >= 0)[..., None].repeat(1, 1, 2)
    others[0, 2, 1] = False
    assert (before[0, 2, 1] - after[0, 2, 1]).abs().max() > 1e-3
    return before[others], after[others]


@pytest.mark.parametrize("arch", ["gqa", "gdn"])
def test_changing_one_branch_leaves_all_others_bit_equal(arch):
    before, after = perturbed(False, small_target(arch=arch))
    assert torch.equal(before, after)


@pytest.mark.parametrize("merge", [False, True])
def test_with_experts_it_leaves_them_alone(merge):
    before, after = perturbed(merge, small_target(arch="qsa"))
    torch.testing.assert_close(before, after, atol=1e-5, rtol=0)


@pytest.mark.parametrize("arch", ["gqa", "gdn"])
def test_changing_one_branch_leaves_all_others_alone_when_merged(arch):
    before, after = perturbed(True, small_target(arch=arch))
    torch.testing.assert_close(before, after, atol=1e-5, rtol=0)


@pytest.mark.parametrize("arch", ["gqa", "gdn", "qsa"])
def test_changing_the_trunk_after_an_anchor_leaves_its_branches_bit_equal(arch):
    target = small_target(arch=arch)
    tokens, lengths, anchors, branches = random_case(2, 2)
    changed = tokens.clone()
    changed[0, 12] = (changed[0, 12] + 1) % VOCAB
    before, after = (
        target.branch_probs(
            target.prefill(t, lengths), build_tree(t, lengths, anchors, branches, merge=False)
        )
        for t in (tokens, changed)
    )
    early = (anchors[0] >= 0) & (anchors[0] < 12)
    assert early.any() and not early.all()
    assert torch.equal(before[0, early], after[0, early])
    assert not torch.equal(before[0, ~early], after[0, ~early])


def test_include_anchor_gives_the_bonus_distribution_too(target):
    tokens, lengths, _, branches = random_case(3, 1)
    anchors, branches = (lengths - 1)[:, None], branches[:, :1].clamp(min=0)
    run = lengths - 1  # the trunk has not run the anchor
    for merge in (False, True):
        tree = build_tree(tokens, run, anchors, branches, merge=merge, include_anchor=True)
        assert tree.num_nodes == 3 * (W + 1)
        hidden = target.score(target.prefill(tokens, run), tree).hidden
        p = target.head(hidden).softmax(-1)[:, 0, 0]  # (B, W+1, V)
        for b in range(3):
            sequence = torch.cat([tokens[b, : lengths[b]], branches[b, 0, 0]])[None]
            slow = target(sequence).softmax(-1)[0, lengths[b] - 1 :]
            torch.testing.assert_close(p[b], slow, atol=1e-5, rtol=0)


def test_blocks_of_one_draft_need_no_nodes(target):
    tokens, lengths, anchors, _ = random_case(4, 1)
    branches = torch.zeros(3, 6, 2, 1, dtype=torch.long)
    for merge in (False, True):
        tree = build_tree(tokens, lengths, anchors, branches, merge=merge)
        assert tree.num_nodes == 0
        trunk = target.prefill(tokens, lengths)
        p = target.branch_probs(trunk, tree)
        torch.testing.assert_close(
            p[0, 1, 0, 0], target(tokens).softmax(-1)[0, anchors[0, 1]], atol=1e-5, rtol=0
        )


def test_anchors_depend_on_seed_step_and_sequence_only():
    prompt, lengths = torch.tensor([4, 6, 5]), torch.tensor([20, 9, 30])
    ids, shape = torch.tensor([11, 12, 13]), (5, 2, W)
    anchors, uniforms, _ = draw_anchors(0, 7, ids, prompt, lengths, shape)
    part, part_uniforms, _ = draw_anchors(
        0, 7, torch.tensor([12]), prompt[1:2], lengths[1:2], (5, 2, W)
    )
    assert torch.equal(anchors[1:2], part) and torch.equal(uniforms[1:2], part_uniforms)
    assert anchors[1].tolist() == [6, 7, -1, -1, -1]  # first response token to the second to last
    other, *_ = draw_anchors(0, 8, torch.tensor([11]), prompt[:1], lengths[:1], (5, 2, W))
    assert not torch.equal(anchors[:1], other)
    seen = torch.cat(
        [
            draw_anchors(0, s, torch.tensor([0]), prompt[:1], lengths[:1], (5, 1, 1))[0]
            for s in range(200)
        ]
    )
    assert seen.min() == 4 and seen.max() == 18


def test_anchors_drawn_by_need_are_weighted_so_that_every_mean_stays_the_same():
    generator = torch.Generator().manual_seed(1)
    chances = torch.rand(1, 20, generator=generator) + 0.2
    values = torch.rand(20, generator=generator)
    prompt, lengths, ids = torch.tensor([4]), torch.tensor([17]), torch.tensor([3])
    found, seen = [], torch.zeros(20)
    for step in range(400):
        anchors, _, weights = draw_anchors(0, step, ids, prompt, lengths, (16, 1, 1), chances)
        found.append((weights * values[anchors]).sum() / 12)  # as 12 anchors count that are there
        seen += torch.bincount(anchors[0], minlength=20)
    found = torch.stack(found)
    assert abs(found.mean() - values[4:16].mean()) < 4 * found.std() / 20
    expected = chances[0, 4:16] / chances[0, 4:16].sum() * 6400
    assert seen[:4].sum() == seen[16:].sum() == 0
    assert ((seen[4:16] - expected).square() / expected).sum() < 11 + 6 * 22**0.5
    none, _, nothing = draw_anchors(0, 0, ids, torch.tensor([16]), lengths, (3, 1, 1), chances)
    assert none.tolist() == [[-1] * 3] and nothing.sum() == 0


def test_shapes_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match="do not fit"):
        build_tree(
            torch.zeros(2, 5).long(),
            torch.tensor([5]),
            torch.zeros(2, 1).long(),
            torch.zeros(2, 1, 1, 3).long(),
        )


def test_large_vocabulary_merges_too():
    target = small_target(vocab_size=40)
    assert largest_difference(target, random_case(99, 4), True) < 1e-5
