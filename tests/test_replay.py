"""The gated delta rule: delta_rule = token by token, gradients too; the state of any position replay_states
from any checkpoint; a tree's nodes = each path alone. `pytest tests/test_replay.py`"""

import pytest
import torch

import kernels
from replay import (
    advance_state,
    chunk_by_chunk,
    delta_rule,
    delta_rule_on_tree,
    l2_normed,
    recurrent,
    replay_states,
)
from tree import build_tree

H_K, H, D_K, D_V = 2, 4, 6, 5


def inputs(B, N, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=dtype)

    q, k = l2_normed(draw(B, N, H_K, D_K)), l2_normed(draw(B, N, H_K, D_K))
    return q, k, draw(B, N, H, D_V), -draw(B, N, H).abs(), draw(B, N, H).sigmoid()


def zero(B, dtype=torch.float64):
    return torch.zeros(B, H, D_K, D_V, dtype=dtype)


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 127, 128, 129, 200])
def test_chunked_equals_token_by_token_with_gradients(length):
    leaves = [x.requires_grad_() for x in (*inputs(2, length), zero(2) + 0.3)]
    weights = torch.randn(2, length, H, D_V, dtype=torch.float64)
    grads, results = [], []
    for rule in (recurrent, delta_rule):
        o, u, state = rule(*leaves)
        state = state[:, -1] if rule is delta_rule else state
        results.append((o, u, state))
        grads.append(torch.autograd.grad((o * weights).sum() + state.square().sum(), leaves))
    for one, other in zip(results[0] + grads[0], results[1] + grads[1]):
        torch.testing.assert_close(one, other, atol=1e-9, rtol=0)


def test_float32_keeps_its_digits_over_a_long_text():
    double = inputs(1, 2000)
    single = [x.float() for x in double]
    exact, fast = recurrent(*double, zero(1))[0], delta_rule(*single, zero(1, torch.float32))[0]
    assert (exact - fast).abs().max() < 1e-5


@pytest.mark.parametrize("every", [1, 7, 64, 1000])
def test_the_state_of_any_position_is_replayed_from_any_checkpoint(every):
    N, B = 90, 2
    q, k, v, g, beta = inputs(B, N)
    checkpoint_tokens = tuple(range(every - 1, N, every))
    _, u, states = delta_rule(q, k, v, g, beta, zero(B), checkpoint_tokens)
    after = torch.tensor([*checkpoint_tokens, N - 1]).expand(B, -1)
    past = {"k": k, "u": u, "g": g, "states": states, "after": after}
    positions = torch.tensor([[-1, 0, 5, 6, 7, 63, 64, 88, 89], [89, 70, 13, 14, 1, 2, -1, 62, 65]])
    found = replay_states(past, positions)
    for b, row in enumerate(positions.tolist()):
        for p, position in enumerate(row):
            part = [x[b : b + 1, : position + 1] for x in (q, k, v, g, beta)]
            slow = recurrent(*part, zero(1))[2][0]
            torch.testing.assert_close(found[b, p], slow, atol=1e-10, rtol=0)
    late = replay_states(past, (positions + 1).clamp(max=N - 1))
    assert (late - found).abs().max() > 1e-2  # one token late is another state


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_nodes_of_a_tree_equal_each_path_alone(merge, seed):
    torch.manual_seed(seed)
    B, T, A, K, W = 2, 30, 3, 2, 6
    tokens, lengths = torch.randint(0, 3, (B, T)), torch.tensor([T, T])
    anchors = torch.tensor([[0, 11, 12], [5, 28, -1]])
    branches = torch.randint(0, 3, (B, A, K, W))
    branches[0, 1, 0, 3:] = -1
    tree = build_tree(tokens, lengths, anchors, branches, merge=merge)
    trunk, nodes = inputs(B, T, seed), inputs(B, tree.tokens.shape[1], seed + 100)
    _, u, states = delta_rule(*trunk, zero(B), (6, 13, 20, 27))
    after = torch.tensor([6, 13, 20, 27, 29]).expand(B, -1)
    past = {"k": trunk[1], "u": u, "g": trunk[3], "states": states, "after": after}
    o, node_u = delta_rule_on_tree(*nodes, past, tree.view())
    checked = 0
    for b in range(B):
        for n in torch.nonzero(tree.valid[b]).flatten().tolist():
            path = [i - T for i in tree.ancestors(W)[b, n].flip(0).tolist() if i >= T]
            end = int(tree.trunk_ends[b, n]) + 1
            alone = [
                torch.cat([x[b : b + 1, :end], y[b : b + 1, path]], 1) for x, y in zip(trunk, nodes)
            ]
            slow_o, slow_u, slow_state = recurrent(*alone, zero(1))
            torch.testing.assert_close(o[b, n], slow_o[0, -1], atol=1e-9, rtol=0)
            torch.testing.assert_close(node_u[b, n], slow_u[0, -1], atol=1e-9, rtol=0)
            # and a commit of this path gets its state
            root = replay_states(past, torch.tensor([[end - 1]] * B))[b : b + 1, 0]
            picked = [x[b : b + 1, path] for x in (nodes[1], node_u, nodes[3])]
            torch.testing.assert_close(advance_state(root, *picked), slow_state, atol=1e-9, rtol=0)
            checked += 1
    assert checked > 15


@pytest.fixture
def by_kernels(monkeypatch):
    """Kernels that are said to run here; what they say, `stretch`, is set by the test."""
    monkeypatch.setattr(kernels, "PLACES", ("cpu",))
    kernels.agree.cache_clear()
    calls = []

    def use(said):
        def stretch(*given):
            calls.append(given[2].shape[1])
            return said(*given)

        kernels.agree.cache_clear()
        calls.clear()
        monkeypatch.setattr(kernels, "stretch", stretch)
        return calls

    yield use
    kernels.agree.cache_clear()


def one_by_one(q, k, v, g, beta, state, checkpoint_tokens, size):
    """What a kernel must say, token by token."""
    o, u, _ = recurrent(q, k, v, g, beta, state)
    upto = [
        [x[:, : end + 1] for x in (q, k, v, g, beta)]
        for end in (*checkpoint_tokens, v.shape[1] - 1)
    ]
    return o, u, torch.stack([recurrent(*part, state)[2] for part in upto], 1)


def test_kernels_that_say_what_ours_says_are_used(by_kernels, capsys):
    calls = by_kernels(one_by_one)
    given, checkpoint_tokens = (*inputs(2, 150), zero(2) + 0.3), (63, 127)
    found = delta_rule(*given, checkpoint_tokens)
    assert calls == [135, 150] and "is used" in capsys.readouterr().out  # asked once, then used
    for one, other in zip(found, chunk_by_chunk(*given, checkpoint_tokens)):
        torch.testing.assert_close(one, other, atol=1e-9, rtol=0)
    delta_rule(*given, (63, 100))  # a mark within a chunk
    delta_rule(*[x.requires_grad_() for x in given], checkpoint_tokens)
    assert calls == [135, 150] and not capsys.readouterr().out


def test_kernels_that_differ_fail_or_are_not_there_are_left_alone(by_kernels, capsys):
    def off(*given):
        o, u, states = one_by_one(*given)
        return o, u * (1 + 3e-5), states

    def failing(*given):
        raise RuntimeError("no such width")

    def absent(*given):
        raise ImportError("fla")

    given = (*inputs(2, 70), zero(2))
    for said, words in ((off, "left alone: 3e-05 from ours"), (failing, "no such"), (absent, "")):
        calls = by_kernels(said)
        found = [delta_rule(*given, (63,)) for _ in range(2)]
        assert calls == [135] and words in capsys.readouterr().out
        for one, other in zip(found[1], chunk_by_chunk(*given, (63,))):
            assert torch.equal(one, other)


def test_kernels_are_not_asked_on_a_cpu(monkeypatch):
    monkeypatch.setattr(kernels, "stretch", None)
    delta_rule(*inputs(1, 70), zero(1), (63,))
