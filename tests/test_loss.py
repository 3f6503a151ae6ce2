"""Losses against brute force, enumeration and gradcheck. `pytest tests/test_loss.py`"""

import itertools

import pytest
import torch
from torch import nn

import loss as losses
from loss import Heads, Rows
from small import run


def random_probs(*shape, seed=0, sharp=1.5):
    generator = torch.Generator().manual_seed(seed)
    return (sharp * torch.randn(*shape, generator=generator, dtype=torch.float64)).softmax(-1)


@pytest.mark.parametrize("name", ["tv", "kl", "e2e_tv"])
def test_losses_pass_gradcheck(name):
    p, mask = random_probs(2, 3, 4, seed=1), torch.tensor([[True, True, True], [True, True, False]])
    logits = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: getattr(losses, name)(p, x.softmax(-1), mask), logits)


def test_ce_passes_gradcheck_and_weighs_by_position():
    labels = torch.tensor([[1, 0, 3]])
    logits = torch.randn(1, 3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda x: losses.ce(x, labels, decay=2.0).double(), logits, atol=1e-3, eps=1e-3
    )
    logp = logits.log_softmax(-1)
    weights = [2.718281828459045 ** (-k / 2.0) for k in range(3)]
    by_hand = -sum(w * logp[0, k, labels[0, k]] for k, w in enumerate(weights)) / sum(weights)
    assert abs(losses.ce(logits, labels, decay=2.0) - by_hand) < 1e-6


def accepted_by_enumeration(p_of, q_of, W, V):
    """E[AL] - 1 over every drafted block and every acceptance; p_of, q_of: history ->
    distribution."""
    total = 0.0
    for y in itertools.product(range(V), repeat=W):
        chance, survives = 1.0, 1.0
        for k in range(W):
            p, q = p_of(y[:k]), q_of(y[:k])
            chance = chance * q[y[k]]
            survives = survives * torch.clamp(p[y[k]] / q[y[k]], max=1.0)
            behind = 1.0  # E[accepted] = sum_k P(first k accepted); the tokens behind k sum to one
            for later in range(k + 1, W):
                behind = behind * q_of(y[:later])[y[later]]
            total = total + chance * survives * behind
    return total


def test_e2e_tv_is_the_expected_acceptance_length_for_position_only_p():
    W, V = 3, 3
    p, q = random_probs(W, V, seed=2), random_probs(W, V, seed=3)
    expected = accepted_by_enumeration(lambda h: p[len(h)], lambda h: q[len(h)], W, V)
    assert abs((1 - losses.e2e_tv(p, q)) * W - expected) < 1e-12
    assert abs(losses.expected_acceptance_length(p, q) - 1 - expected) < 1e-12


def history_dependent(seed, W, V):
    tables = {
        h: random_probs(V, seed=seed + 31 * i)
        for i, h in enumerate(h for k in range(W) for h in itertools.product(range(V), repeat=k))
    }
    return lambda history: tables[tuple(history)]


def test_e2e_tv_is_only_a_surrogate_when_p_depends_on_history():
    """The surrogate averages prod alpha over drafted histories, survivors or not; E[AL] does
    not."""
    W, V = 3, 3
    p_of, q = history_dependent(4, W, V), random_probs(W, V, seed=5)
    exact = accepted_by_enumeration(p_of, lambda h: q[len(h)], W, V)
    surrogate = 0.0
    for y in itertools.product(range(V), repeat=W):
        chance = torch.stack([q[k, y[k]] for k in range(W)]).prod()
        p = torch.stack([p_of(y[:k]) for k in range(W)])
        surrogate = surrogate + chance * (1 - losses.e2e_tv(p, q)) * W
    assert abs(surrogate - exact) > 1e-2


@pytest.mark.parametrize("q_depends", [False, True], ids=["q by position", "q by history"])
def test_e2e_al_value_and_gradient_equal_full_enumeration(q_depends):
    W, V = 3, 3
    p_of = history_dependent(6, W, V)
    histories = [h for k in range(W) for h in itertools.product(range(V), repeat=k)]
    row_of = {h: i if q_depends else len(h) for i, h in enumerate(histories)}
    logits = torch.randn(len(histories), V, dtype=torch.float64, requires_grad=True)
    exact = accepted_by_enumeration(p_of, lambda h: logits[row_of[tuple(h)]].softmax(-1), W, V)
    (exact_grad,) = torch.autograd.grad(exact, logits)

    def averaged_over_samples(p_of):
        value, grad = 0.0, torch.zeros_like(logits)
        for y in itertools.product(range(V), repeat=W):
            q = torch.stack([logits[row_of[y[:k]]] for k in range(W)]).softmax(-1)
            p = torch.stack([p_of(y[:k]) for k in range(W)])
            tokens = torch.tensor(y)
            chance = q.gather(-1, tokens[:, None]).prod().detach()  # how often it is drawn
            estimate = (1 - losses.e2e_al(p, q, tokens)) * W
            value = value + chance * estimate.detach()
            grad += chance * torch.autograd.grad(estimate, logits)[0]
        return value, grad

    value, grad = averaged_over_samples(p_of)
    assert abs(value - exact) < 1e-10
    assert (grad - exact_grad).abs().max() < 1e-10
    p_of(())[0] += 0.01  # one element of p, and neither is equal
    value, grad = averaged_over_samples(p_of)
    assert abs(value - exact) > 1e-4
    assert (grad - exact_grad).abs().max() > 1e-4


def test_a_corrupted_alpha_is_noticed(monkeypatch):
    W, V = 3, 3
    p, q = random_probs(W, V, seed=2), random_probs(W, V, seed=3)
    expected = accepted_by_enumeration(lambda h: p[len(h)], lambda h: q[len(h)], W, V)
    honest = losses.acceptance

    def corrupted(p, q):
        alpha = honest(p, q).clone()
        alpha[..., 1] *= 0.99
        return alpha

    monkeypatch.setattr(losses, "acceptance", corrupted)
    assert abs((1 - losses.e2e_tv(p, q)) * W - expected) > 1e-4


def test_positions_behind_the_mask_and_empty_branches_add_nothing():
    p, q = random_probs(2, 4, 5, seed=7), random_probs(2, 4, 5, seed=8)
    mask = torch.tensor([[True, True, False, False], [False] * 4])
    alpha = losses.acceptance(p, q)[0]
    by_hand = 1 - (alpha[0] + alpha[0] * alpha[1]) / 2
    assert abs(losses.e2e_tv(p, q, mask) - by_hand) < 1e-12
    assert losses.expected_acceptance_length(p, q, mask)[1] == 1
    mask[0, 2] = True
    assert abs(losses.e2e_tv(p, q, mask) - by_hand) > 1e-3


# ------------------------------------------------------------------------------ the chunked form


def rows_and_heads(K_q: int) -> tuple:
    """-> rows of 7 anchors, 3 branches and 4 drafts, heads that look at the hidden state alone, and
    the linear layers behind them."""
    torch.manual_seed(0)
    R, K, W, C, V = 7, 3, 4, 8, 13
    q_head, p_head = nn.Linear(C, V), nn.Linear(C, V)
    q_hidden = torch.randn(R, K_q, W, C, requires_grad=True)
    mask = torch.ones(R, K, W, dtype=torch.bool)
    mask[2, 1, 2:] = mask[5] = False
    p_hidden, tokens = torch.randn(R, K, W, C), torch.randint(0, V, (R, K, W))
    rows = Rows(q_hidden, mask, tokens, p_hidden=p_hidden)
    heads = Heads(
        lambda hidden, previous, labels: q_head(hidden),
        V,
        p_head,
        confidence=lambda hidden, previous: hidden[..., 0].expand(-1, K, -1),
    )
    return rows, heads, q_head, p_head


def some(rows: Rows, index) -> Rows:
    return Rows(*(x if x is None else x[index] for x in vars(rows).values()))


@pytest.mark.parametrize("K_q", [1, 3])
@pytest.mark.parametrize("name", losses.LOSSES)
def test_chunked_equals_unchunked_and_the_plain_formula(name, K_q):
    rows, heads, q_head, p_head = rows_and_heads(K_q)
    mask, tokens = rows.valid, rows.tokens
    q_logits = q_head(rows.q_hidden).expand(*tokens.shape, -1)
    p, q = p_head(rows.p_hidden).softmax(-1).detach(), q_logits.softmax(-1)
    special = {
        "ce": lambda: losses.ce(q_logits, tokens, mask),
        "e2e_al": lambda: losses.e2e_al(p, q, tokens, mask),
    }
    plain = special.get(name, lambda: getattr(losses, name)(p, q, mask))()
    weights = [rows.q_hidden, *q_head.parameters()]
    expected = torch.autograd.grad(plain, weights)
    for anchors_per_chunk in (1, 2, 3, 100):
        value, _ = losses.chunked(name, rows, heads, anchors_per_chunk=anchors_per_chunk)
        torch.testing.assert_close(value, plain, atol=1e-6, rtol=0)
        for grad, wanted in zip(torch.autograd.grad(value, weights), expected):
            torch.testing.assert_close(grad, wanted, atol=1e-6, rtol=0)
    mask[0, 0, 2] = False  # one element, and they differ
    assert abs(losses.chunked(name, rows, heads)[0] - plain) > 1e-5


@pytest.mark.parametrize("name", losses.LOSSES)
def test_a_global_batch_in_parts_gives_the_gradient_of_the_whole(name):
    rows, heads, *_ = rows_and_heads(1)
    denominators = {name: losses.denominator(name, rows.valid)}
    shares = [
        losses.chunked(name, some(rows, part), heads, denominators=denominators)[0]
        for part in (slice(0, 3), slice(3, None))
    ]
    value, _ = losses.chunked(name, rows, heads)
    torch.testing.assert_close(sum(shares), value)
    (whole,) = torch.autograd.grad(value, rows.q_hidden)
    (parts,) = torch.autograd.grad(sum(shares), rows.q_hidden)
    torch.testing.assert_close(parts, whole, atol=1e-6, rtol=0)


def test_figures_are_sums_over_valid_positions():
    rows, heads, q_head, p_head = rows_and_heads(1)
    _, figures = losses.chunked("tv", rows, heads, anchors_per_chunk=2)
    p, q = p_head(rows.p_hidden).softmax(-1), q_head(rows.q_hidden).softmax(-1)
    alpha = losses.acceptance(p, q.expand_as(p))
    mean = figures["alpha"][3] / figures["positions"][3]
    torch.testing.assert_close(mean, alpha[..., 3][rows.valid[..., 3]].mean())


def test_a_sum_of_terms_is_their_sum_and_a_term_of_weight_zero_needs_no_tensors():
    rows, heads, *_ = rows_and_heads(3)
    terms = {"ce": 0.1, "early_tv": 1.8, "confidence": 0.7, "e2e_tv": 0.5}
    whole, _ = losses.chunked(terms, rows, heads, anchors_per_chunk=2)
    parts = sum(w * losses.chunked(name, rows, heads)[0] for name, w in terms.items())
    torch.testing.assert_close(whole, parts)
    bare_rows, bare_heads = Rows(rows.q_hidden, rows.valid, rows.tokens), Heads(heads.q, 13)
    without, _ = losses.chunked(
        {"ce": 1.0, "early_tv": 0.0, "confidence": 0}, bare_rows, bare_heads
    )
    assert without == losses.chunked("ce", bare_rows, bare_heads)[0]


def test_heads_are_given_contiguous_rows():
    """A view would go through a big matrix block by block."""
    rows, heads, *_ = rows_and_heads(1)
    q_view, p_view = (torch.cat([x, x], 2)[:, :, :4] for x in (rows.q_hidden, rows.p_hidden))
    assert not q_view.is_contiguous()

    def watched(head):
        def run_head(hidden, *others):
            assert hidden.is_contiguous()
            return head(hidden, *others)

        return run_head

    heads = Heads(watched(heads.q), heads.vocab_size, watched(heads.p))
    losses.chunked("tv", Rows(q_view, rows.valid, p_hidden=p_view), heads, anchors_per_chunk=2)


@pytest.mark.parametrize("terms", ["l2", {"ce": 1.0, "e2e-tv": 0.5}])
def test_an_unknown_loss_is_an_error_that_lists_the_losses(terms):
    rows, heads, *_ = rows_and_heads(1)
    with pytest.raises(ValueError, match="there is ce, tv, kl, e2e_tv, e2e_al"):
        losses.chunked(terms, rows, heads)


MEMORY = """
import resource, sys, torch
from loss import Heads, Rows, chunked
torch.set_num_threads(1)
R, W, V, C = 64, 7, 248_320, 32  # anchors, drafts, a real vocabulary, a small width
generator = torch.Generator().manual_seed(0)
q_hidden, p_hidden = (torch.randn(R, 1, W, C, generator=generator) for _ in range(2))
head = torch.randn(V, C, generator=generator)
q_hidden.requires_grad_()
rows = Rows(q_hidden, torch.ones(R, 1, W).bool(), p_hidden=p_hidden)
heads = Heads(lambda hidden, *_: hidden @ head.T, V, lambda hidden: hidden @ head.T)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
value, _ = chunked("e2e_tv", rows, heads, anchors_per_chunk=int(sys.argv[1]) or None)
value.backward()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
torch.save(q_hidden.grad, sys.argv[2])
"""


@pytest.mark.slow
def test_a_real_vocabulary_in_chunks_takes_a_fraction_of_the_memory(tmp_path):
    peaks, gradients = [], []
    for anchors_per_chunk in (0, 10**9):  # in chunks, and all at once
        out = tmp_path / f"{anchors_per_chunk}.pt"
        done = run("-c", MEMORY, anchors_per_chunk, out)
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout))
        gradients.append(torch.load(out))
    print("peak above the start, MB, in chunks and at once:", [peak // 1024 for peak in peaks])
    assert peaks[0] < peaks[1] / 4
    scale = gradients[1].abs().max()
    torch.testing.assert_close(gradients[0] / scale, gradients[1] / scale, atol=1e-5, rtol=0)
