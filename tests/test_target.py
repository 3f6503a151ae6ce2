"""Prefill, score, commit: all state equals that of a fresh prefill. `pytest
tests/test_target.py`"""

import pytest
import torch
from conftest import ARCHS, small_target, state_gap

import replay
from hf.tokenizer import write_byte_tokenizer
from target import Target, default_taps, one_row
from tree import build_tree

W = 4


def text(B, T, seed=0, vocab=20):
    return torch.randint(0, vocab, (B, T), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("every", [0, 1, 5, 64])
@pytest.mark.parametrize("arch", ARCHS)
def test_prefill_of_unequal_lengths_equals_each_row_alone(arch, every):
    target, tokens, lengths = small_target(arch=arch), text(3, 20), torch.tensor([20, 7, 13])
    trunk = target.prefill(tokens, lengths, room=5, checkpoint_every=every)
    for row, length in enumerate(lengths.tolist()):
        one = target.prefill(
            tokens[row : row + 1, :length], torch.tensor([length]), checkpoint_every=every
        )
        assert state_gap(trunk, row, one) < 1e-4
    gap = (target.head(trunk.hidden[0]) - target(tokens)[0]).abs().max()
    assert gap < 1e-5 * target(tokens)[0].abs().max().clamp(min=1)


@pytest.mark.parametrize("room", [0, 40])
@pytest.mark.parametrize("every", [0, 3, 64])
@pytest.mark.parametrize("arch", ARCHS)
def test_after_every_commit_all_state_equals_a_fresh_prefill(arch, every, room):
    """Rounds with 0, 1, W-1 and W accepted drafts, other counts in each row, junk tokens
    rejected."""
    torch.manual_seed(0)
    target = small_target(arch=arch)
    texts = [text(1, n, seed=n)[0].tolist() for n in (9, 3, 14, 6)]
    lengths = torch.tensor([len(t) for t in texts])
    tokens = torch.nn.utils.rnn.pad_sequence([torch.tensor(t) for t in texts], batch_first=True)
    trunk = target.prefill(tokens, lengths, room=room, checkpoint_every=every)
    for counts in ([0, 1, W - 1, W], [W, 0, 1, W - 1], [1, W, 0, 0], [W - 1, W - 1, W, 1]):
        anchors, drafts = torch.randint(0, 20, (4, 1)), torch.randint(0, 20, (4, 1, 1, W))
        at_anchor = trunk.lengths[:, None]
        packed = torch.cat([trunk.tokens, trunk.tokens.new_zeros(4, 1)], 1)
        packed.scatter_(1, at_anchor, anchors)
        tree = build_tree(
            packed[:, : trunk.width + 1], trunk.lengths, at_anchor, drafts, False, True
        )
        scored = target.score(trunk, tree)
        path = torch.arange(W + 1).repeat(4, 1)
        path[path > torch.tensor(counts)[:, None]] = -1
        trunk = target.commit(trunk, tree, scored, path)
        for row, count in enumerate(counts):
            texts[row] += [int(anchors[row, 0]), *drafts[row, 0, 0, :count].tolist()]
        trunk.width = max(map(len, texts))
        for row, committed in enumerate(texts):
            assert trunk.lengths[row] == len(committed)
            assert trunk.tokens[row, : len(committed)].tolist() == committed
            alone = torch.tensor([committed])
            length = torch.tensor([len(committed)])
            fresh = target.prefill(alone, length, checkpoint_every=every)
            assert state_gap(trunk, row, fresh) < 1e-4
    if not every and arch != "gqa":
        return
    anchors, branches = torch.tensor([[2, 5]] * 4), torch.randint(0, 20, (4, 2, 3, W))
    tree = build_tree(trunk.tokens, trunk.lengths, anchors, branches)
    slow = target.prefill(trunk.tokens, trunk.lengths)
    torch.testing.assert_close(
        target.branch_probs(trunk, tree), target.branch_probs(slow, tree), atol=1e-4, rtol=0
    )


@pytest.mark.parametrize("arch", ["gdn", "qsa"])
def test_a_trunk_that_keeps_its_end_alone_says_so(arch):
    target, tokens, lengths = small_target(arch=arch), text(1, 9), torch.tensor([9])
    trunk = target.prefill(tokens, lengths, checkpoint_every=0)
    tree = build_tree(tokens, lengths, torch.tensor([[3]]), text(1, W).view(1, 1, 1, W))
    with pytest.raises(ValueError, match="end alone"):
        target.score(trunk, tree)


@pytest.mark.parametrize("arch", ARCHS)
def test_a_tree_on_fewer_slots_than_the_trunk_holds_does_not_write_into_it(arch):
    target, tokens, lengths = small_target(arch=arch), text(1, 20), torch.tensor([20])
    trunk = target.prefill(tokens, lengths, room=20)
    before = [{name: t.clone() for name, t in state.items()} for state in trunk.states]
    anchors, branches = torch.tensor([[3]]), text(1, W).view(1, 1, 1, W)
    small, whole = (
        build_tree(tokens[:, :n], lengths.clamp(max=n), anchors, branches) for n in (8, 20)
    )
    p = target.branch_probs(trunk, small)
    for old, new in zip(before, trunk.states):
        assert all(torch.equal(old[name][:, :20], new[name][:, :20]) for name in old)
    torch.testing.assert_close(p, target.branch_probs(trunk, whole), atol=1e-5, rtol=0)


def test_a_trunk_without_hidden_states_says_so(target):
    tokens, lengths = text(1, 9), torch.tensor([9])
    trunk = target.prefill(tokens, lengths)
    trunk.hidden = None
    tree = build_tree(tokens, lengths, torch.tensor([[3]]), text(1, W).view(1, 1, 1, W))
    with pytest.raises(ValueError, match="hidden"):
        target.score(trunk, tree)


def test_the_callers_tokens_are_not_written_to(target):
    tokens = torch.full((1, 30), 7)
    trunk = target.prefill(tokens, torch.tensor([9]))
    drafts = text(1, W).view(1, 1, 1, W)
    anchor = trunk.lengths[:, None]
    tree = build_tree(trunk.tokens[:, :10], trunk.lengths, anchor, drafts, False, True)
    target.commit(trunk, tree, target.score(trunk, tree), torch.arange(W + 1)[None])
    assert (tokens == 7).all()


def test_a_tap_is_the_output_of_its_layer_before_the_final_norm(target):
    tokens = text(1, 8)
    outputs = {}
    for index, layer in enumerate(target.model.layers):
        layer.register_forward_hook(
            lambda m, i, out, index=index: outputs.__setitem__(index, out[0])
        )
    target.tap_ids = (0, 2)
    taps = target.prefill(tokens, torch.tensor([8])).taps
    assert torch.equal(taps, torch.cat([outputs[0], outputs[2]], -1))
    final = target.prefill(tokens, torch.tensor([8])).hidden
    assert torch.equal(target.model.norm(outputs[2]), final) and not torch.equal(outputs[2], final)


def test_taps_are_spread_evenly():
    assert default_taps(36) == (1, 9, 17, 25, 33)
    for layers in range(1, 65):
        taps = default_taps(layers)
        assert taps and all(0 <= t < layers for t in taps) and list(taps) == sorted(set(taps))


@pytest.mark.parametrize("arch", ARCHS)
def test_scoring_leaves_the_trunk_as_it_was(arch):
    target, tokens, lengths = small_target(arch=arch), text(2, 12), torch.tensor([12, 9])
    trunk = target.prefill(tokens, lengths, room=30)
    anchors, branches = torch.tensor([[3, 8], [2, 7]]), text(2 * 2 * 2, W, seed=1).view(2, 2, 2, W)
    tree = build_tree(trunk.tokens[:, :12], lengths, anchors, branches)
    first, second = (target.branch_probs(trunk, tree) for _ in range(2))
    assert torch.equal(first, second)
    for kept, fresh in zip(trunk.states, target.prefill(tokens, lengths).states):
        assert all(torch.equal(kept[name][:, :12], fresh[name]) for name in fresh)


def test_lengths_that_do_not_fit_are_named(target):
    with pytest.raises(ValueError, match="lengths"):
        target.prefill(text(2, 5), torch.tensor([5, 6]))


def test_a_fresh_toy_depends_on_its_seed_alone():
    a, b, c = Target.toy(seed=1), Target.toy(seed=1), Target.toy(seed=2)
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters()))
    assert not torch.equal(a.lm_head.weight, c.lm_head.weight)
    with pytest.raises(ValueError, match="gqa"):
        Target.toy("mamba")


def test_rows_beyond_the_tokenizer_are_known(tmp_path):
    target = small_target(vocab_size=264)
    target.save_pretrained(tmp_path)
    # no tokenizer files, no such knowledge
    assert Target.from_pretrained(tmp_path).num_tokens == 264
    write_byte_tokenizer(tmp_path)
    assert Target.from_pretrained(tmp_path).num_tokens == 258


def test_recurrent_states_take_no_more_memory_than_what_is_kept_of_each_token():
    wide = Target.toy("gdn", linear_key_head_dim=256, linear_value_head_dim=256)
    tokens, lengths = text(1, 800), torch.tensor([800])
    state = wide.prefill(tokens, lengths).states[0]
    tokens_take = sum(state[name].nbytes for name in ("qkv", "k", "u", "g"))
    assert 0.5 < state["states"].nbytes / tokens_take < 1.15
    small = Target.toy("gdn")  # and stand at the ends of chunks
    assert replay.checkpoint_spacing(wide.config, 4) % replay.CHUNK == 0
    assert (
        replay.checkpoint_spacing(wide.config, 4)
        > replay.checkpoint_spacing(small.config, 4)
        == replay.CHUNK
    )


@pytest.mark.parametrize("arch", ["gdn", "qsa"])
def test_checkpoints_are_kept_while_committing(arch):
    """A long generation on a trunk that trees may hang on anywhere: replays stay short."""
    target = small_target(arch=arch)
    trunk = target.prefill(text(2, 5), torch.tensor([5, 3]), checkpoint_every=8)
    for _ in range(10):
        at_anchor, drafts = trunk.lengths[:, None], torch.randint(0, 20, (2, 1, 1, W))
        known = torch.cat([trunk.tokens, trunk.tokens.new_zeros(2, 1)], 1)
        known = known.scatter(1, at_anchor, torch.randint(0, 20, (2, 1)))[:, : trunk.width + 1]
        tree = build_tree(known, trunk.lengths, at_anchor, drafts, False, True)
        path = torch.arange(W + 1).repeat(2, 1)
        trunk = target.commit(trunk, tree, target.score(trunk, tree), path)
    after = next(state["after"] for state in trunk.states if "after" in state)
    assert (after.diff(dim=1) <= 8 + W + 1).all() and after.shape[1] > 4
    anchors, branches = torch.tensor([[2, 20, 40], [0, 33, -1]]), torch.randint(0, 20, (2, 3, 2, W))
    tree = build_tree(trunk.tokens, trunk.lengths, anchors, branches)
    fresh = target.prefill(trunk.tokens, trunk.lengths)
    gap = (target.branch_probs(trunk, tree) - target.branch_probs(fresh, tree)).abs().max()
    assert gap < 1e-4


@pytest.mark.parametrize(
    "dtype, rows, drafts, own",
    [
        (torch.bfloat16, 1, 0, True),
        (torch.bfloat16, 2, 0, False),
        (torch.bfloat16, 1, 1, False),
        (torch.bfloat16, 1, 7, False),
        (torch.float32, 1, 0, False),
    ],
)
def test_a_single_row_in_bfloat16_takes_torchs_own_kernel(dtype, rows, drafts, own):
    """In the layers and in the head; whatever happens there, what was chosen before comes back."""
    target, seen = small_target(), []
    target.to(dtype)
    for module in (target.model.layers[1], target.lm_head):
        module.register_forward_hook(lambda *_: seen.append(torch.backends.mkldnn.enabled))
    tokens, lengths = text(rows, 9), torch.full((rows,), 8)
    trunk = target.prefill(tokens[:, :8], lengths, checkpoint_every=0)
    chain = tokens.new_ones(rows, 1, 1, drafts)
    tree = build_tree(tokens, lengths, lengths[:, None], chain, False, True)
    for before in (True, False):
        torch.backends.mkldnn.enabled = before
        try:
            seen.clear()
            target.head(target.score(trunk, tree).hidden[:, 0])
            assert seen == [before and not own] * 2
            assert torch.backends.mkldnn.enabled == before
            with pytest.raises(RuntimeError), one_row(rows, target.lm_head.weight):
                torch.ones(2) @ torch.ones(3)
            assert torch.backends.mkldnn.enabled == before
        finally:
            torch.backends.mkldnn.enabled = True


def test_a_matrix_laid_out_by_columns_stays_with_onednn():
    """Torch's own kernel would take ten times as long."""
    for weight in (torch.zeros(8, 16, dtype=torch.bfloat16), torch.zeros(16, 8).bfloat16().t()):
        with one_row(1, weight):
            assert torch.backends.mkldnn.enabled == (weight.stride(-1) != 1)


def test_a_head_given_a_slice_multiplies_flat_rows():
    """Rows with gaps between them would make torch copy the whole vocabulary's matrix."""
    target, shapes = small_target(), []
    target.lm_head.register_forward_pre_hook(lambda _, given: shapes.append(given[0].shape))
    hidden = torch.randn(3, 7, target.config.hidden_size)
    for part in (hidden[:, -1:], hidden[:1, -4:], hidden[:, -1], hidden[0, 0], hidden[:0]):
        logits = target.head(part)
        assert logits.shape == (*part.shape[:-1], target.config.vocab_size)
        torch.testing.assert_close(logits, part @ target.lm_head.weight.T)
        assert len(shapes.pop()) == 2
