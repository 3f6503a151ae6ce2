"""Packed branches get what the target gives on each alone; prefill, score and commit keep the state
of a fresh prefill. `pytest tests/test_target.py`"""

import dataclasses

import pytest
import torch

import model
import replay
from small import (
    ARCHS,
    PRIVATE_AND_MERGED,
    VOCAB,
    W,
    random_case,
    random_tokens,
    small_target,
    state_gap,
)
from support.toy import write_byte_tokenizer
from target import Target, default_taps
from tree import ProposalTree, build_tree, gather_history

# ----------------------------------------------------------------------------- packed equals alone

OTHERS = {
    "llama": dict(model_type="llama"),
    "gdn": dict(arch="gdn"),
    "qsa": dict(arch="qsa"),
    "qsa without n-grams": dict(arch="qsa", ple_layer_ids=()),
    "qsa in blocks of 3": dict(arch="qsa", indexer_compress_ratio=3, indexer_budget=6),
}


def branches_alone(target, tokens, anchors, branches):
    """Yield ((b, a, k, i), p_{i+1}), the slow twin of packing: each branch with its whole prefix is
    a row of its own, and what fills the row behind it cannot be seen."""
    numbers, rows = [], []
    for b, a, k in torch.cartesian_prod(*(torch.arange(n) for n in branches.shape[:3])).tolist():
        ids = branches[b, a, k].tolist()
        count = ids.index(-1) if -1 in ids else len(ids)
        if anchors[b, a] >= 0 and count:
            numbers.append((b, a, k, count))
            rows.append(torch.cat([tokens[b, : anchors[b, a] + 1], branches[b, a, k, :count]]))
    p = target(torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)).softmax(-1)
    for row, (b, a, k, count) in enumerate(numbers):
        for i in range(count):
            yield (b, a, k, i), p[row, anchors[b, a] + i]


def packed_gap(target, case, merge: bool, checkpoint_every: int = 64) -> float:
    """The largest difference between p of branches packed on their trunk and p of each alone."""
    tokens, lengths, anchors, branches = case
    tree = build_tree(tokens, lengths, anchors, branches, merge=merge)
    trunk = target.prefill(tokens, lengths, checkpoint_every=checkpoint_every)
    packed = target.branch_probs(trunk, tree)
    alone = branches_alone(target, tokens, anchors, branches)
    return max((packed[index] - p).abs().max().item() for index, p in alone)


@PRIVATE_AND_MERGED
@pytest.mark.parametrize("K", [1, 4])
@pytest.mark.parametrize("seed", range(12))
def test_packed_equals_alone(target, merge, K, seed):
    assert packed_gap(target, random_case(seed, K), merge) < 1e-5


@PRIVATE_AND_MERGED
@pytest.mark.parametrize("checkpoint_every", [1, 7, 1000])
@pytest.mark.parametrize("K", [1, 4])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("family", OTHERS)
def test_packed_equals_alone_from_every_checkpoint(family, seed, K, checkpoint_every, merge):
    target = small_target(seed, **OTHERS[family])
    assert packed_gap(target, random_case(seed + 50, K), merge, checkpoint_every) < 1e-4


@PRIVATE_AND_MERGED
@pytest.mark.parametrize("family", OTHERS)
def test_packed_equals_alone_around_the_checkpoints_of_a_long_trunk(family, merge):
    """Checkpoints every 64 tokens: anchors right before, on and behind them, and at the end."""
    target, generator = small_target(7, **OTHERS[family]), torch.Generator().manual_seed(7)
    tokens = torch.randint(0, VOCAB, (2, 133), generator=generator)
    anchors = torch.tensor([[62, 63, 64, 127, 128, 132], [0, 63, 64, 65, 66, -1]])
    branches = torch.randint(0, VOCAB, (2, 6, 2, W), generator=generator)
    branches[0, 1, 0, :3] = tokens[0, 64:67]  # over a checkpoint along the trunk, then off it
    case = tokens, torch.tensor([133, 67]), anchors, branches
    assert packed_gap(target, case, merge, 64) < 1e-4


def test_packed_equals_alone_in_a_large_vocabulary():
    assert packed_gap(small_target(vocab_size=40), random_case(99, 4), merge=True) < 1e-5


def late_state(monkeypatch):
    """A branch starts from the state one token behind its anchor."""
    honest = replay.replay_states
    monkeypatch.setattr(replay, "replay_states", lambda past, at, _: honest(past, at + 1))


def stale_tail(monkeypatch):
    """What looks back along a branch does not see the trunk."""

    def cut(past, new, index, T, base=0):
        return gather_history(None, new, index.where(index >= T, -1), T)

    monkeypatch.setattr(model, "gather_history", cut)


def leaking_blocks(monkeypatch):
    """A node chooses among the blocks of other branches, too."""
    honest = model.index_block_ends

    def shared(view, r):
        slots, seen = honest(view, r)
        if not view.is_tree:
            return slots, seen
        ends = ((view.positions + 1) % r == 0) & view.valid
        on_trunk, among_nodes = seen.tensor_split([seen.shape[-1] - ends.shape[1]], -1)
        return slots, torch.cat([on_trunk, ends[:, None].expand_as(among_nodes)], -1)

    monkeypatch.setattr(model, "index_block_ends", shared)


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
def test_a_late_state_a_cut_convolution_or_a_leaking_block_is_noticed(arch, damage, monkeypatch):
    target = small_target(arch=arch)
    assert packed_gap(target, random_case(1, 2), False, 7) < 1e-4
    damage(monkeypatch)
    assert packed_gap(target, random_case(1, 2), False, 7) > 1e-3


@pytest.mark.parametrize("seed", range(3))
def test_one_leaking_mask_element_is_noticed(target, seed, monkeypatch):
    honest = ProposalTree.view

    def leaking(tree, **how):
        view = honest(tree, **how)
        node = tree.valid[0].nonzero()[-1, 0]
        hidden_slots = (~view.mask[0, 0, node]).nonzero()
        view.mask[0, 0, node, hidden_slots[0, 0]] = True
        return view

    monkeypatch.setattr(ProposalTree, "view", leaking)
    assert packed_gap(target, random_case(seed, 4), False) > 1e-4


def test_index_instead_of_depth_as_position_is_noticed(target):
    tokens, lengths, anchors, branches = random_case(0, 2)
    tree = build_tree(tokens, lengths, anchors, branches, merge=False)
    packed_index = tree.num_trunk_slots + torch.arange(tree.tokens.shape[1])
    wrong = dataclasses.replace(tree, positions=packed_index.expand(3, -1))
    trunk = target.prefill(tokens, lengths)
    gap = (target.branch_probs(trunk, tree) - target.branch_probs(trunk, wrong)).abs().max()
    assert gap > 1e-3


# -------------------------------------------------------------- what one branch does to the others


def other_branches_before_and_after(target, merge: bool):
    """p of all branches but one, before and after that one is changed behind its first token."""
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
    assert torch.equal(*other_branches_before_and_after(small_target(arch=arch), merge=False))


@pytest.mark.parametrize(
    "arch, merge", [("gqa", True), ("gdn", True), ("qsa", True), ("qsa", False)]
)
def test_changing_one_branch_leaves_all_others_alone(arch, merge):
    """Merging moves nodes, and experts regroup rows: equal but for the order of sums."""
    before, after = other_branches_before_and_after(small_target(arch=arch), merge)
    torch.testing.assert_close(before, after, atol=1e-5, rtol=0)


@pytest.mark.parametrize("arch", ARCHS)
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


@PRIVATE_AND_MERGED
def test_a_decoding_round_gives_the_bonus_distribution_too(target, merge):
    tokens, lengths, _, branches = random_case(3, 1)
    anchors, branches = (lengths - 1)[:, None], branches[:, :1].clamp(min=0)
    already_run = lengths - 1  # the trunk has not run the anchor
    tree = build_tree(tokens, already_run, anchors, branches, merge=merge, include_anchor=True)
    hidden = target.score(target.prefill(tokens, already_run), tree).hidden
    p = target.head(hidden).softmax(-1)[:, 0, 0]  # (B, W+1, V)
    for b in range(3):
        sequence = torch.cat([tokens[b, : lengths[b]], branches[b, 0, 0]])[None]
        slow = target(sequence).softmax(-1)[0, lengths[b] - 1 :]
        torch.testing.assert_close(p[b], slow, atol=1e-5, rtol=0)


@PRIVATE_AND_MERGED
def test_p_of_blocks_of_one_draft_comes_from_the_trunk(target, merge):
    tokens, lengths, anchors, _ = random_case(4, 1)
    branches = torch.zeros(3, 6, 2, 1, dtype=torch.long)
    tree = build_tree(tokens, lengths, anchors, branches, merge=merge)
    p = target.branch_probs(target.prefill(tokens, lengths), tree)
    alone = target(tokens).softmax(-1)[0, anchors[0, 1]]
    torch.testing.assert_close(p[0, 1, 0, 0], alone, atol=1e-5, rtol=0)


# ------------------------------------------------------------------ the state of prefill and commit

DRAFTS = 4  # a decoding round's


def round_tree(trunk, drafts, anchor_tokens=None):
    """The tree of a decoding round: drafts (B, W) behind each row's last token."""
    at_anchor = trunk.lengths[:, None]
    tokens = torch.cat([trunk.tokens, trunk.tokens.new_zeros(len(drafts), 1)], 1)
    if anchor_tokens is not None:
        tokens = tokens.scatter(1, at_anchor, anchor_tokens)
    tokens = tokens[:, : trunk.width + 1]
    return build_tree(tokens, trunk.lengths, at_anchor, drafts[:, None, None], False, True)


@pytest.mark.parametrize("checkpoint_every", [0, 1, 5, 64])
@pytest.mark.parametrize("arch", ARCHS)
def test_prefill_of_unequal_lengths_equals_each_row_alone(arch, checkpoint_every):
    target, tokens = small_target(arch=arch), random_tokens(3, 20)
    lengths = torch.tensor([20, 7, 13])
    trunk = target.prefill(tokens, lengths, room=5, checkpoint_every=checkpoint_every)
    for row, length in enumerate(lengths.tolist()):
        alone = target.prefill(
            tokens[row : row + 1, :length],
            torch.tensor([length]),
            checkpoint_every=checkpoint_every,
        )
        assert state_gap(trunk, row, alone) < 1e-4
    logits = target(tokens)[0]
    gap = (target.head(trunk.hidden[0]) - logits).abs().max()
    assert gap < 1e-5 * logits.abs().max().clamp(min=1)


@pytest.mark.parametrize("room", [0, 40])
@pytest.mark.parametrize("checkpoint_every", [0, 3, 64])
@pytest.mark.parametrize("arch", ARCHS)
def test_after_every_commit_all_state_equals_a_fresh_prefill(arch, checkpoint_every, room):
    """Rounds that accept 0, 1, W-1 and W drafts, other counts in each row, the rest is junk."""
    torch.manual_seed(0)
    target, W = small_target(arch=arch), DRAFTS
    texts = [random_tokens(1, n, seed=n)[0].tolist() for n in (9, 3, 14, 6)]
    lengths = torch.tensor([len(text) for text in texts])
    tokens = torch.nn.utils.rnn.pad_sequence([torch.tensor(t) for t in texts], batch_first=True)
    trunk = target.prefill(tokens, lengths, room=room, checkpoint_every=checkpoint_every)
    for counts in ([0, 1, W - 1, W], [W, 0, 1, W - 1], [1, W, 0, 0], [W - 1, W - 1, W, 1]):
        anchors, drafts = torch.randint(0, 20, (4, 1)), torch.randint(0, 20, (4, W))
        tree = round_tree(trunk, drafts, anchors)
        path = torch.arange(W + 1).repeat(4, 1)
        path[path > torch.tensor(counts)[:, None]] = -1
        trunk = target.commit(trunk, tree, target.score(trunk, tree), path)
        for row, count in enumerate(counts):
            texts[row] += [int(anchors[row, 0]), *drafts[row, :count].tolist()]
        trunk.width = max(map(len, texts))
        for row, text in enumerate(texts):
            length = torch.tensor([len(text)])
            assert trunk.lengths[row] == length and trunk.tokens[row, :length].tolist() == text
            fresh = target.prefill(torch.tensor([text]), length, checkpoint_every=checkpoint_every)
            assert state_gap(trunk, row, fresh) < 1e-4
    if not checkpoint_every and arch != "gqa":
        return  # trees do not hang on such a trunk
    anchors, branches = torch.tensor([[2, 5]] * 4), torch.randint(0, 20, (4, 2, 3, W))
    tree = build_tree(trunk.tokens, trunk.lengths, anchors, branches)
    fresh = target.prefill(trunk.tokens, trunk.lengths)
    p, expected = target.branch_probs(trunk, tree), target.branch_probs(fresh, tree)
    torch.testing.assert_close(p, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("arch", ARCHS)
def test_padding_is_not_computed_and_changes_nothing(arch, monkeypatch):
    """Rows of few drafts beside one of many: the MLPs and the head see the real nodes alone."""
    target = small_target(arch=arch)
    tokens = random_tokens(3, 12)
    lengths = torch.tensor([11, 9, 11])
    drafts = random_tokens(3, 6, seed=1)
    drafts[1:] = -1
    tree = build_tree(tokens, lengths, lengths[:, None], drafts[:, None, None], include_anchor=True)
    seen = []
    for layer in target.model.layers:
        layer.mlp.register_forward_hook(lambda _, x, out: seen.append(x[0].shape[:-1].numel()))

    def scored():
        trunk = target.prefill(tokens, lengths, 20)
        seen.clear()
        return target.score(trunk, tree)

    packed = scored()
    assert seen == [9] * len(target.model.layers)  # 7 nodes and two anchors
    monkeypatch.setattr("tree.PADDING_THAT_COSTS", 1.1)
    whole = scored()
    assert seen == [21] * len(target.model.layers)
    real = tree.valid
    gap = (packed.hidden[:, 0, 0] - whole.hidden[:, 0, 0])[real].abs().max()
    assert gap < 1e-5 * whole.hidden.abs().max()
    assert (packed.taps - whole.taps)[real].abs().max() < 1e-5 * whole.taps.abs().max()
    for one, other in zip(packed.states, whole.states):
        for name in one:
            assert torch.allclose(one[name][real], other[name][real], atol=1e-4)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("W", [1, 4])
def test_a_tree_may_have_no_node(arch, W):
    target = small_target(arch=arch)
    tokens = random_tokens(2, 12)
    lengths = torch.tensor([12, 12])
    anchors = torch.tensor([[2, 5]] * 2)
    branches = torch.stack([tokens[:, 3 : 3 + W], tokens[:, 6 : 6 + W]], 1)[:, :, None]
    trunk = target.prefill(tokens, lengths)
    tree = build_tree(tokens, lengths, anchors, branches)
    assert tree.num_nodes == 0
    p = target.branch_probs(trunk, tree)  # (B, A, 1, W, V)
    wanted = target(tokens).softmax(-1)
    for a, anchor in enumerate(anchors[0].tolist()):
        assert (p[:, a, 0] - wanted[:, anchor : anchor + W]).abs().max() < 1e-5


@pytest.mark.parametrize("arch", ARCHS)
def test_scoring_leaves_the_trunk_as_it_was(arch):
    target, tokens, lengths = small_target(arch=arch), random_tokens(2, 12), torch.tensor([12, 9])
    trunk = target.prefill(tokens, lengths, room=30)
    anchors = torch.tensor([[3, 8], [2, 7]])
    branches = random_tokens(8, DRAFTS, seed=1).view(2, 2, 2, DRAFTS)
    tree = build_tree(trunk.tokens[:, :12], lengths, anchors, branches)
    first, second = (target.branch_probs(trunk, tree) for _ in range(2))
    assert torch.equal(first, second)
    for state, fresh in zip(trunk.states, target.prefill(tokens, lengths).states):
        assert all(torch.equal(state[name][:, :12], fresh[name]) for name in fresh)


@pytest.mark.parametrize("arch", ARCHS)
def test_scoring_without_keeping_gives_the_same_and_keeps_nothing(arch):
    target = small_target(arch=arch)
    case = random_case(2, 2)
    tree = build_tree(*case)
    trunk = target.prefill(*case[:2])
    scored = target.score(trunk, tree, keep=False)
    assert torch.equal(scored.hidden, target.score(trunk, tree).hidden)
    assert scored.states == [] and scored.taps is None


def one_branch(tokens, lengths):
    """The tree of one branch at position 3."""
    branches = random_tokens(1, DRAFTS).view(1, 1, 1, DRAFTS)
    return build_tree(tokens, lengths, torch.tensor([[3]]), branches)


@pytest.mark.parametrize("arch", ARCHS)
def test_a_tree_on_fewer_slots_than_the_trunk_has_does_not_write_into_it(arch):
    target, tokens, lengths = small_target(arch=arch), random_tokens(1, 20), torch.tensor([20])
    trunk = target.prefill(tokens, lengths, room=20)
    before = [{name: t.clone() for name, t in state.items()} for state in trunk.states]
    p = target.branch_probs(trunk, one_branch(tokens[:, :8], torch.tensor([8])))
    for old, new in zip(before, trunk.states):
        assert all(torch.equal(old[name][:, :20], new[name][:, :20]) for name in old)
    whole = target.branch_probs(trunk, one_branch(tokens, lengths))
    torch.testing.assert_close(p, whole, atol=1e-5, rtol=0)


@pytest.mark.parametrize("arch", ["gdn", "qsa"])
def test_a_trunk_that_keeps_its_end_alone_says_so(arch):
    target, tokens, lengths = small_target(arch=arch), random_tokens(1, 9), torch.tensor([9])
    trunk = target.prefill(tokens, lengths, checkpoint_every=0)
    with pytest.raises(ValueError, match="only at its end"):
        target.score(trunk, one_branch(tokens, lengths))


def test_a_trunk_without_hidden_states_says_so(target):
    tokens, lengths = random_tokens(1, 9), torch.tensor([9])
    trunk = target.prefill(tokens, lengths)
    trunk.hidden = None
    with pytest.raises(ValueError, match="hidden"):
        target.score(trunk, one_branch(tokens, lengths))


def test_lengths_that_do_not_fit_are_named(target):
    with pytest.raises(ValueError, match="lengths"):
        target.prefill(random_tokens(2, 5), torch.tensor([5, 6]))


def test_the_callers_tokens_are_not_written_to(target):
    tokens = torch.full((1, 30), 7)
    trunk = target.prefill(tokens, torch.tensor([9]))
    tree = round_tree(trunk, random_tokens(1, DRAFTS))
    target.commit(trunk, tree, target.score(trunk, tree), torch.arange(DRAFTS + 1)[None])
    assert (tokens == 7).all()


# --------------------------------------------------------------------------------- taps, head, toys


def test_a_tap_is_the_output_of_its_layer_before_the_final_norm(target):
    tokens, lengths = random_tokens(1, 8), torch.tensor([8])
    outputs = {}
    for index, layer in enumerate(target.model.layers):
        layer.register_forward_hook(
            lambda module, args, out, index=index: outputs.__setitem__(index, out[0])
        )
    trunk = target.prefill(tokens, lengths, tap_ids=(0, 2))
    assert torch.equal(trunk.taps, torch.cat([outputs[0], outputs[2]], -1))
    assert torch.equal(target.model.norm(outputs[2]), trunk.hidden)
    assert not torch.equal(outputs[2], trunk.hidden)
    assert target.tap_ids == default_taps(3)  # what one caller asks for changes nothing


def test_taps_are_spread_evenly():
    assert default_taps(36) == (1, 9, 17, 25, 33)
    for num_layers in range(1, 65):
        taps = default_taps(num_layers)
        assert taps and all(0 <= tap < num_layers for tap in taps)
        assert list(taps) == sorted(set(taps))


def test_a_head_given_a_slice_multiplies_flat_rows(target):
    """Rows with gaps between them would make torch copy the whole vocabulary's matrix."""
    shapes = []
    target.lm_head.register_forward_pre_hook(lambda _, args: shapes.append(args[0].shape))
    hidden = torch.randn(3, 7, target.config.hidden_size)
    for part in (hidden[:, -1:], hidden[:1, -4:], hidden[:, -1], hidden[0, 0], hidden[:0]):
        logits = target.head(part)
        assert logits.shape == (*part.shape[:-1], target.config.vocab_size)
        torch.testing.assert_close(logits, part @ target.lm_head.weight.T)
        assert len(shapes.pop()) == 2


def test_a_fresh_toy_depends_on_its_seed_alone():
    first, second, third = Target.toy(seed=1), Target.toy(seed=1), Target.toy(seed=2)
    assert all(torch.equal(x, y) for x, y in zip(first.parameters(), second.parameters()))
    assert not torch.equal(first.lm_head.weight, third.lm_head.weight)
    with pytest.raises(ValueError, match="gqa"):
        Target.toy("mamba")


def test_rows_beyond_the_tokenizer_are_known(tmp_path):
    small_target(vocab_size=264).save_pretrained(tmp_path)
    # no tokenizer files, no such knowledge
    assert Target.from_pretrained(tmp_path).num_tokens == 264
    write_byte_tokenizer(tmp_path)
    assert Target.from_pretrained(tmp_path).num_tokens == 258


def test_recurrent_states_take_no_more_memory_than_what_is_kept_of_each_token():
    wide = Target.toy("gdn", linear_key_head_dim=256, linear_value_head_dim=256)
    state = wide.prefill(random_tokens(1, 800), torch.tensor([800])).states[0]
    token_bytes = sum(state[name].nbytes for name in ("qkv", "k", "u", "g"))
    assert 0.5 < state["states"].nbytes / token_bytes < 1.15
    spacings = [replay.checkpoint_spacing(t.config, 4) for t in (wide, Target.toy("gdn"))]
    assert spacings[0] > spacings[1] == replay.CHUNK
    assert spacings[0] % replay.CHUNK == 0  # checkpoints stand at the ends of chunks
