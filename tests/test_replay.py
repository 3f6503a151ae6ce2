"""The gated delta rule: many tokens at once = token by token, with gradients; the state of any
position from any checkpoint; a tree's nodes = each path alone. `pytest tests/test_replay.py`"""

import pytest
import torch

from replay import (
    CHUNK,
    advance_state,
    chunk_by_chunk,
    delta_rule,
    delta_rule_on_tree,
    head_by_head,
    l2_normed,
    recurrent,
    replay_states,
)
from support import gpu
from tree import build_tree

H_K, H, D_K, D_V = 2, 4, 6, 5


def random_inputs(B, N, seed=0, dtype=torch.float64):
    """q, k, v, g, beta of N tokens."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=dtype)

    q, k = l2_normed(draw(B, N, H_K, D_K)), l2_normed(draw(B, N, H_K, D_K))
    return q, k, draw(B, N, H, D_V), -draw(B, N, H).abs(), draw(B, N, H).sigmoid()


def zero_state(B, dtype=torch.float64):
    return torch.zeros(B, H, D_K, D_V, dtype=dtype)


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 127, 128, 129, 200])
def test_many_tokens_at_once_equal_token_by_token_with_gradients(length):
    leaves = [x.requires_grad_() for x in (*random_inputs(2, length), zero_state(2) + 0.3)]
    weights = torch.randn(2, length, H, D_V, dtype=torch.float64)
    results = []
    for rule in (recurrent, delta_rule):
        o, u, state = rule(*leaves)
        state = state[:, -1] if rule is delta_rule else state
        gradients = torch.autograd.grad((o * weights).sum() + state.square().sum(), leaves)
        results.append((o, u, state, *gradients))
    for slow, fast in zip(*results):
        torch.testing.assert_close(fast, slow, atol=1e-9, rtol=0)


def test_float32_keeps_its_digits_over_a_long_text():
    double = random_inputs(1, 2000)
    single = [x.float() for x in double]
    exact, _, _ = recurrent(*double, zero_state(1))
    fast, _, _ = delta_rule(*single, zero_state(1, torch.float32))
    assert (exact - fast).abs().max() < 1e-5


@pytest.mark.parametrize("num_strong", [1, 20, 63])
def test_strong_gates_leave_the_weak_ones_after_them_their_digits(num_strong):
    double = list(random_inputs(1, 64))
    double[3] = double[3] * 0.05
    double[3][:, :num_strong] = -20.0  # the sum of g grows to -1260; later gates are weak
    single = [x.float() for x in double]
    exact, exact_u, exact_state = recurrent(*double, zero_state(1))
    fast, u, states = delta_rule(*single, zero_state(1, torch.float32))
    assert (exact - fast).abs().max() < 3e-6
    assert (exact_u - u).abs().max() < 3e-6
    assert (exact_state - states[:, -1]).abs().max() < 3e-6


@pytest.mark.parametrize("spacing", [1, 7, 64, 1000])
def test_the_state_of_any_position_is_replayed_from_any_checkpoint(spacing):
    N, B = 90, 2
    tokens = random_inputs(B, N)
    _, k, _, g, _ = tokens
    checkpoint_tokens = tuple(range(spacing - 1, N, spacing))
    _, u, states = delta_rule(*tokens, zero_state(B), checkpoint_tokens)
    after = torch.tensor([*checkpoint_tokens, N - 1]).expand(B, -1)
    past = {"k": k, "u": u, "g": g, "states": states, "after": after}
    positions = torch.tensor([[-1, 0, 5, 6, 7, 63, 64, 88, 89], [89, 70, 13, 14, 1, 2, -1, 62, 65]])
    replayed = replay_states(past, positions)
    for b, row in enumerate(positions.tolist()):
        for p, position in enumerate(row):
            history = [x[b : b + 1, : position + 1] for x in tokens]
            _, _, slow = recurrent(*history, zero_state(1))
            torch.testing.assert_close(replayed[b, p], slow[0], atol=1e-10, rtol=0)
    one_late = replay_states(past, (positions + 1).clamp(max=N - 1))
    assert (one_late - replayed).abs().max() > 1e-2  # one token late is another state


def tree_on_a_trunk(seed, merge):
    """-> a random tree, the rule's inputs of trunk and nodes, the layer's state of the trunk."""
    torch.manual_seed(seed)
    B, T, A, K, W = 2, 30, 3, 2, 6
    tokens, lengths = torch.randint(0, 3, (B, T)), torch.tensor([T, T])
    anchors = torch.tensor([[0, 11, 12], [5, 28, -1]])
    branches = torch.randint(0, 3, (B, A, K, W))
    branches[0, 1, 0, 3:] = -1
    tree = build_tree(tokens, lengths, anchors, branches, merge=merge)
    trunk = random_inputs(B, T, seed)
    nodes = random_inputs(B, tree.tokens.shape[1], seed + 100)
    checkpoint_tokens = (6, 13, 20, 27)
    _, u, states = delta_rule(*trunk, zero_state(B), checkpoint_tokens)
    after = torch.tensor([*checkpoint_tokens, T - 1]).expand(B, -1)
    past = {"k": trunk[1], "u": u, "g": trunk[3], "states": states, "after": after}
    return tree, trunk, nodes, past


def paths(tree, trunk, nodes):
    """Yield b, n, the trunk tokens before node n, the nodes of its path, and the rule's inputs of
    this history alone."""
    T = tree.num_trunk_slots
    ancestors = tree.ancestors(6)
    for b, n in torch.nonzero(tree.valid).tolist():
        path = [index - T for index in ancestors[b, n].flip(0).tolist() if index >= T]
        end = int(tree.roots[b, n]) + 1
        pairs = zip(trunk, nodes)
        yield b, n, end, path, [torch.cat([x[b, :end], y[b, path]])[None] for x, y in pairs]


@pytest.mark.parametrize("merge", [False, True], ids=["private", "merged"])
@pytest.mark.parametrize("seed", range(5))
def test_nodes_of_a_tree_equal_each_path_alone(merge, seed):
    tree, trunk, nodes, past = tree_on_a_trunk(seed, merge)
    o, u = delta_rule_on_tree(*nodes, past, tree.view())
    num_nodes = 0
    for b, n, end, path, history in paths(tree, trunk, nodes):
        slow_o, slow_u, slow_state = recurrent(*history, zero_state(1))
        torch.testing.assert_close(o[b, n], slow_o[0, -1], atol=1e-9, rtol=0)
        torch.testing.assert_close(u[b, n], slow_u[0, -1], atol=1e-9, rtol=0)
        # and a commit of this path gets its state
        root = replay_states(past, torch.tensor([[end - 1]] * 2))[b : b + 1, 0]
        written = head_by_head(*(x[b : b + 1, path] for x in (nodes[1], u, nodes[3])))
        state = advance_state(root, *written)
        torch.testing.assert_close(state, slow_state, atol=1e-9, rtol=0)
        num_nodes += 1
    assert num_nodes > 15


def test_one_leaking_mask_element_is_noticed():
    tree, trunk, nodes, past = tree_on_a_trunk(0, merge=False)
    view = tree.view()
    group = view.groups[0, 1]  # the nodes of two branches at one anchor
    first, second = group[group >= 0][[0, -1]].tolist()
    honest = view.descends
    in_first_row = torch.tensor([True, False])[:, None, None, None]

    def leaking(node, other):
        return honest(node, other) | in_first_row & (node == second) & (other == first)

    view.descends = leaking
    o, _ = delta_rule_on_tree(*nodes, past, view)
    wrong = set()
    for b, n, _, _, history in paths(tree, trunk, nodes):
        slow_o, _, _ = recurrent(*history, zero_state(1))
        if (o[b, n] - slow_o[0, -1]).abs().max() > 1e-4:
            wrong.add((b, n))
    assert wrong == {(0, second)}


# ------------------------------------------------------------------------------- outside kernels


@pytest.fixture
def kernels(monkeypatch):
    """Pretend that kernels run here. -> a function that sets them; it returns the list of lengths
    that they are then called with."""

    def use(rule):
        lengths = []

        def kernel_delta_rule(q, k, v, g, beta, state, checkpoint_tokens, chunk):
            assert chunk == CHUNK
            lengths.append(v.shape[1])
            return rule(q, k, v, g, beta, state, checkpoint_tokens)

        gpu.rule_agrees.cache_clear()
        monkeypatch.setattr(gpu, "kernel_delta_rule", kernel_delta_rule)
        return lengths

    monkeypatch.setattr(gpu, "KERNEL_DEVICES", ("cpu",))
    yield use
    gpu.rule_agrees.cache_clear()


def right(q, k, v, g, beta, state, checkpoint_tokens):
    """The numbers that kernels must return, token by token."""
    tokens = (q, k, v, g, beta)
    o, u, _ = recurrent(*tokens, state)
    ends = [token + 1 for token in checkpoint_tokens] + [v.shape[1]]
    states = [recurrent(*(x[:, :end] for x in tokens), state)[2] for end in ends]
    return o, u, torch.stack(states, 1)


def slightly_off(*inputs):
    o, u, states = right(*inputs)
    return o, u * (1 + 3e-5), states


def not_a_number(*inputs):
    o, u, states = right(*inputs)
    return o, u * torch.nan, states


def failing(*inputs):
    raise RuntimeError("no such width")


def missing(*inputs):
    raise ImportError("fla")


def test_kernels_that_agree_are_used(kernels, capsys):
    lengths = kernels(right)
    inputs, checkpoint_tokens = (*random_inputs(2, 150), zero_state(2) + 0.3), (63, 127)
    results = delta_rule(*inputs, checkpoint_tokens)
    assert lengths == [135, 150]  # asked once whether they agree, then used
    assert "gated delta rule by flash-linear-attention" in capsys.readouterr().out
    for fast, ours in zip(results, chunk_by_chunk(*inputs, checkpoint_tokens)):
        torch.testing.assert_close(fast, ours, atol=1e-9, rtol=0)
    delta_rule(*inputs, (63, 100))  # not for a checkpoint within a chunk
    delta_rule(*[x.requires_grad_() for x in inputs], checkpoint_tokens)  # not for gradients
    assert lengths == [135, 150]
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "rule, reason",
    [
        (slightly_off, "3e-05"),
        (not_a_number, "nan"),
        (failing, "no such width"),
        (missing, "ImportError"),
    ],
    ids=["slightly off", "not a number", "failing", "not installed"],
)
def test_kernels_that_do_not_agree_are_left_alone(kernels, capsys, rule, reason):
    inputs = (*random_inputs(2, 70), zero_state(2))
    lengths = kernels(rule)
    results = [delta_rule(*inputs, (63,)) for _ in range(2)]
    assert lengths == [135]  # asked once
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1
    assert "gated delta rule by torch operations" in printed and reason in printed
    for result in results:
        for tensor, ours in zip(result, chunk_by_chunk(*inputs, (63,))):
            assert torch.equal(tensor, ours)


def test_kernels_are_not_tried_on_a_cpu(monkeypatch, capsys):
    monkeypatch.setattr(gpu, "kernel_delta_rule", None)
    monkeypatch.setattr(gpu, "rule_agrees", None)
    delta_rule(*random_inputs(1, 70), zero_state(1), (63,))
    assert capsys.readouterr().out == ""
