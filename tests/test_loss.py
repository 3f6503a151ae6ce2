"""Losses against brute force, enumeration and gradcheck. `pytest tests/test_loss.py`"""

import itertools
import subprocess
import sys

import pytest
import torch
from conftest import ROOT
from torch import nn

import loss as losses


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
    """E[AL] - 1 over every drafted block and every acceptance, p_of/q_of: history ->
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


@pytest.mark.parametrize("q_depends", [False, True])
def test_e2e_al_value_and_gradient_equal_full_enumeration(q_depends):
    W, V = 3, 3
    p_of = history_dependent(6, W, V)
    histories = [h for k in range(W) for h in itertools.product(range(V), repeat=k)]
    place = {h: i if q_depends else len(h) for i, h in enumerate(histories)}
    logits = torch.randn(len(histories), V, dtype=torch.float64, requires_grad=True)
    exact = accepted_by_enumeration(p_of, lambda h: logits[place[tuple(h)]].softmax(-1), W, V)
    (exact_grad,) = torch.autograd.grad(exact, logits)
    value, grad = 0.0, torch.zeros_like(logits)
    for y in itertools.product(range(V), repeat=W):
        q = torch.stack([logits[place[y[:k]]] for k in range(W)]).softmax(-1)
        p = torch.stack([p_of(y[:k]) for k in range(W)])
        tokens = torch.tensor(y)
        chance = q.gather(-1, tokens[:, None]).prod().detach()  # how often this sample is drawn
        estimate = (1 - losses.e2e_al(p, q, tokens)) * W
        value = value + chance * estimate.detach()
        grad += chance * torch.autograd.grad(estimate, logits)[0]
    assert abs(value - exact) < 1e-10
    assert (grad - exact_grad).abs().max() < 1e-10


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


def head_of(linear):
    """A head that looks neither at the token before nor at labels."""
    return lambda hidden, before, labels: linear(hidden)


def chunk_case(K_q):
    torch.manual_seed(0)
    R, K, W, C, V = 7, 3, 4, 8, 13
    q_head, p_head = nn.Linear(C, V), nn.Linear(C, V)
    q_hidden = torch.randn(R, K_q, W, C, requires_grad=True)
    mask = torch.ones(R, K, W, dtype=torch.bool)
    mask[2, 1, 2:] = mask[5] = False
    p_hidden, tokens = torch.randn(R, K, W, C), torch.randint(0, V, (R, K, W))
    return q_hidden, q_head, mask, p_hidden, p_head, tokens


@pytest.mark.parametrize("K_q", [1, 3])
@pytest.mark.parametrize("name", losses.LOSSES)
def test_chunked_equals_unchunked_and_the_plain_formula(name, K_q):
    q_hidden, q_head, mask, p_hidden, p_head, tokens = chunk_case(K_q)
    q_logits = q_head(q_hidden).expand(*tokens.shape, -1)
    p, q = p_head(p_hidden).softmax(-1).detach(), q_logits.softmax(-1)
    plain = {
        "ce": lambda: losses.ce(q_logits, tokens, mask),
        "e2e_al": lambda: losses.e2e_al(p, q, tokens, mask),
    }.get(name, lambda: getattr(losses, name)(p, q, mask))()
    weights = [q_hidden, *q_head.parameters()]
    expected = torch.autograd.grad(plain, weights)
    for rows in (1, 2, 3, 100):
        value, _ = losses.chunked(
            name,
            q_hidden,
            head_of(q_head),
            mask,
            p_hidden=p_hidden,
            p_head=p_head,
            tokens=tokens,
            rows=rows,
        )
        torch.testing.assert_close(value, plain, atol=1e-6, rtol=0)
        for got, want in zip(torch.autograd.grad(value, weights), expected):
            torch.testing.assert_close(got, want, atol=1e-6, rtol=0)


def test_a_global_batch_in_parts_gives_the_gradient_of_the_whole():
    q_hidden, q_head, mask, p_hidden, p_head, tokens = chunk_case(1)
    for name in losses.LOSSES:

        def run(part, totals=None, name=name):
            value, _ = losses.chunked(
                name,
                q_hidden[part],
                head_of(q_head),
                mask[part],
                totals=totals,
                p_hidden=p_hidden[part],
                p_head=p_head,
                tokens=tokens[part],
            )
            return value

        totals = {name: losses.denominator(name, mask)}
        shares = run(slice(0, 3), totals), run(slice(3, None), totals)
        torch.testing.assert_close(sum(shares), run(slice(None)))
        (whole,) = torch.autograd.grad(run(slice(None)), q_hidden)
        (parts,) = torch.autograd.grad(sum(shares), q_hidden)
        torch.testing.assert_close(parts, whole, atol=1e-6, rtol=0)


def test_positions_behind_the_mask_and_empty_branches_add_nothing():
    p, q = random_probs(2, 4, 5, seed=7), random_probs(2, 4, 5, seed=8)
    mask = torch.tensor([[True, True, False, False], [False] * 4])
    alpha = losses.acceptance(p, q)[0]
    by_hand = 1 - (alpha[0] + alpha[0] * alpha[1]) / 2
    assert abs(losses.e2e_tv(p, q, mask) - by_hand) < 1e-12
    assert losses.expected_acceptance_length(p, q, mask)[1] == 1


def test_figures_are_sums_over_valid_positions():
    q_hidden, q_head, mask, p_hidden, p_head, tokens = chunk_case(1)
    _, figures = losses.chunked(
        "tv", q_hidden, head_of(q_head), mask, p_hidden=p_hidden, p_head=p_head, rows=2
    )
    alpha = losses.acceptance(
        p_head(p_hidden).softmax(-1), q_head(q_hidden).softmax(-1).expand(7, 3, 4, 13)
    )
    mean = figures["alpha"][3] / figures["positions"][3]
    torch.testing.assert_close(mean, alpha[..., 3][mask[..., 3]].mean())


def test_a_sum_of_terms_is_their_sum_and_a_term_of_weight_zero_needs_no_tensors():
    q_hidden, q_head, mask, p_hidden, p_head, tokens = chunk_case(3)
    given = dict(
        p_hidden=p_hidden,
        p_head=p_head,
        tokens=tokens,
        rows=2,
        confidence=lambda hidden, before: hidden[..., 0],
    )
    terms = {"ce": 0.1, "early_tv": 1.8, "confidence": 0.7, "e2e_tv": 0.5}
    whole, _ = losses.chunked(terms, q_hidden, head_of(q_head), mask, **given)
    parts = sum(
        weight * losses.chunked(name, q_hidden, head_of(q_head), mask, **given)[0]
        for name, weight in terms.items()
    )
    torch.testing.assert_close(whole, parts)
    alone = dict(q_hidden=q_hidden, q_head=head_of(q_head), mask=mask, tokens=tokens)
    without, _ = losses.chunked({"ce": 1.0, "early_tv": 0.0, "confidence": 0}, **alone)
    assert without == losses.chunked("ce", **alone)[0]


def test_an_anchor_of_weight_two_counts_as_two():
    q_hidden, q_head, mask, p_hidden, p_head, tokens = chunk_case(1)
    twice = torch.tensor([0, 0, 1, 2, 3, 4, 5, 6])
    weight = torch.ones(7)
    weight[0] = 2.0
    for name in losses.LOSSES:

        def run(rows, name=name, **how):
            value, _ = losses.chunked(
                name,
                q_hidden[rows],
                head_of(q_head),
                mask[rows],
                p_hidden=p_hidden[rows],
                p_head=p_head,
                tokens=tokens[rows],
                rows=2,
                **how,
            )
            return value, *torch.autograd.grad(value, q_hidden)

        for got, want in zip(run(slice(None), weight=weight), run(twice)):
            torch.testing.assert_close(got, want, atol=1e-6, rtol=0)


def test_heads_are_given_contiguous_rows():
    q_hidden, q_head, mask, p_hidden, p_head, tokens = chunk_case(1)
    q_view, p_view = (torch.cat([x, x], 2)[:, :, :4] for x in (q_hidden, p_hidden))
    assert not q_view.is_contiguous()

    def watched(head):
        def run(hidden, *_):
            assert hidden.is_contiguous()  # a view would go through a big matrix block by block
            return head(hidden)

        return run

    losses.chunked(
        "tv", q_view, watched(q_head), mask, p_hidden=p_view, p_head=watched(p_head), rows=2
    )


def test_an_unknown_loss_is_named():
    with pytest.raises(ValueError, match="e2e_tv"):
        losses.chunked("l2", torch.zeros(1, 1, 1, 1), nn.Identity(), torch.ones(1, 1, 1))


MEMORY = """
import resource, sys, torch
import loss
torch.set_num_threads(1)
R, W, V, C = 64, 7, 248_320, 32  # anchors, drafts, a real vocabulary, a small width
generator = torch.Generator().manual_seed(0)
q_hidden, p_hidden = (torch.randn(R, 1, W, C, generator=generator) for _ in range(2))
head = torch.randn(V, C, generator=generator)
q_hidden.requires_grad_()
rows = int(sys.argv[1]) or None
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
value, _ = loss.chunked("e2e_tv", q_hidden, lambda h, *_: h @ head.T, torch.ones(R, 1, W).bool(),
                        p_hidden=p_hidden, p_head=lambda h: h @ head.T, rows=rows)
value.backward()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
torch.save(q_hidden.grad, sys.argv[2])
"""


def test_a_real_vocabulary_in_chunks_takes_a_fraction_of_the_memory(tmp_path):
    peaks, gradients = [], []
    for rows in (0, 10**9):  # in chunks, and all at once
        out = tmp_path / f"{rows}.pt"
        done = subprocess.run(
            [sys.executable, "-c", MEMORY, str(rows), out], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout))
        gradients.append(torch.load(out))
    print("peak above the start, MB, in chunks and at once:", [peak // 1024 for peak in peaks])
    assert peaks[0] < peaks[1] / 4
    scale = gradients[1].abs().max()
    torch.testing.assert_close(gradients[0] / scale, gradients[1] / scale, atol=1e-5, rtol=0)
