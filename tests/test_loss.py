"""Losses against brute force, enumeration and gradcheck. `pytest tests/test_loss.py`"""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import loss as losses
from drafter import previous_tokens
from loss import Blocks, Heads, Objective, Rows, step_loss
from small import DRAFTERS, random_tokens, run, small_drafter, small_target
from support.gpu import chunk_elements


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
        [*q_head.parameters()],
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
    bare_rows, bare_heads = Rows(rows.q_hidden, rows.valid, rows.tokens), Heads(heads.q, 13, [])
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

    heads = Heads(watched(heads.q), heads.vocab_size, [], watched(heads.p))
    losses.chunked("tv", Rows(q_view, rows.valid, p_hidden=p_view), heads, anchors_per_chunk=2)


def counted(head, calls: list):
    """A head that counts its calls."""

    def run_head(*args):
        calls.append(len(args[0]))
        return head(*args)

    return run_head


@pytest.mark.parametrize("name", losses.LOSSES)
def test_each_head_runs_once_for_each_chunk_and_not_in_the_backward_pass(name):
    rows, heads, *_ = rows_and_heads(1)
    calls_of_q, calls_of_p = [], []
    heads.q, heads.p = counted(heads.q, calls_of_q), counted(heads.p, calls_of_p)
    losses.chunked(name, rows, heads, anchors_per_chunk=3)[0].backward()
    assert calls_of_q == [3, 3, 1]
    assert calls_of_p == ([] if name == "ce" else [3, 3, 1])


def test_the_backward_pass_scales_the_gradient_and_runs_once():
    rows, heads, q_head, _ = rows_and_heads(3)
    weights = [rows.q_hidden, *q_head.parameters()]
    value = losses.chunked("e2e_tv", rows, heads, anchors_per_chunk=2)[0]
    scaled = torch.autograd.grad(value * 3, weights, retain_graph=True)
    for grad, wanted in zip(scaled, torch.autograd.grad(value, weights)):
        torch.testing.assert_close(grad, wanted * 3)
    with pytest.raises(RuntimeError, match="second time"):
        value.backward()


def test_without_gradients_the_value_is_the_same_and_nothing_is_kept():
    rows, heads, *_ = rows_and_heads(1)
    value = losses.chunked("kl", rows, heads, anchors_per_chunk=2)[0]
    with torch.no_grad():
        bare = losses.chunked("kl", rows, heads, anchors_per_chunk=2)[0]
    assert torch.equal(bare, value) and value.requires_grad and not bare.requires_grad


@pytest.mark.parametrize("name", losses.LOSSES)
def test_a_value_that_is_no_number_shows_in_the_loss_and_in_the_gradient(name):
    rows, heads, q_head, _ = rows_and_heads(1)
    with torch.no_grad():
        rows.q_hidden[3, 0, 1, 2] = torch.nan
    value = losses.chunked(name, rows, heads, anchors_per_chunk=2)[0]
    value.backward()
    assert value.isnan() and q_head.weight.grad.isnan().any()


@pytest.mark.parametrize("terms", ["l2", {"ce": 1.0, "e2e-tv": 0.5}])
def test_an_unknown_loss_is_an_error_that_lists_the_losses(terms):
    rows, heads, *_ = rows_and_heads(1)
    with pytest.raises(ValueError, match="there is ce, tv, kl, e2e_tv, e2e_al"):
        losses.chunked(terms, rows, heads)


# ----------------------------------------------------------------------------- a drafter's step

KINDS = ["dflash", "dspark vanilla", "dspark gated", "dspark rnn", "dflash2 sliding, scaled"]
MIXES = {name: {name: 1.0} for name in losses.LOSSES} | {
    "dspark's mix": losses.DSPARK_MIX,
    "e2e_tv and confidence": {"e2e_tv": 1.0, "confidence": 1.0},
}


def drafter_and_blocks(variant: str) -> tuple:
    """-> a drafter in float64 and blocks of two branches, one position of them invalid, at six
    anchors of two texts."""
    target = small_target().double()
    drafter = small_drafter(target, **DRAFTERS[variant]).double()
    trunk = target.prefill(random_tokens(2, 16), torch.tensor([16, 14]))
    anchors = torch.tensor([[2, 5, 9], [3, 4, -1]])
    tokens = random_tokens(2 * 3 * 2, 4, seed=1).view(2, 3, 2, 4)
    valid = (anchors >= 0)[..., None, None].expand(tokens.shape).clone()
    valid[0, 1, 1, 3] = False
    generator = torch.Generator().manual_seed(2)
    p_hidden = 3 * torch.randn(2, 3, 2, 4, 32, generator=generator, dtype=torch.float64)
    return drafter, Blocks(trunk.for_drafter(), anchors, tokens, valid, p_hidden)


def plain_step_loss(drafter, blocks: Blocks, objective: Objective):
    """A step's loss with all logits at once, by the plain forms."""
    hidden = drafter.block(blocks.trunk, blocks.anchors)[:, :, None]
    first = blocks.trunk.tokens.gather(1, blocks.anchors.clamp(min=0))
    previous = previous_tokens(first, blocks.tokens)
    labels = blocks.tokens if "ce" in objective.terms else None
    logits = drafter.logits(hidden, previous, labels)
    logits = logits.float().expand(*blocks.tokens.shape, -1)
    p_logits = drafter.target.head(blocks.p_hidden).float()
    p, q = (torch.softmax(x / objective.temperature, -1) for x in (p_logits, logits))
    valid = blocks.valid
    weights = valid * losses.position_weights(valid.float(), objective.decay)
    alpha = losses.acceptance(p, q)

    def early_mean(x):
        return (x * weights).sum() / weights.sum()

    def confidence():
        logits = drafter.confidence_logits(hidden, previous).float()
        bce = nn.functional.binary_cross_entropy_with_logits
        return early_mean(bce(logits, alpha.detach(), reduction="none"))

    terms = {
        "ce": lambda: losses.ce(logits, blocks.tokens, valid, objective.decay),
        "e2e_al": lambda: losses.e2e_al(p, q, blocks.tokens, valid),
        "early_tv": lambda: early_mean(1 - alpha),
        "confidence": confidence,
    }
    terms |= {n: lambda n=n: getattr(losses, n)(p, q, valid) for n in ("tv", "kl", "e2e_tv")}
    return sum(weight * terms[name]() for name, weight in objective.terms.items())


def gradients_of(drafter, value) -> dict:
    drafter.zero_grad()
    value.backward()
    return {name: p.grad for name, p in drafter.named_parameters()}


def check_same(gradients: dict, wanted: dict, tolerance: float) -> None:
    """Of each parameter, as a share of its largest element; None where there is none."""
    for name, slow in wanted.items():
        fast = gradients[name]
        assert (fast is None) == (slow is None), name
        if slow is not None:
            assert (fast - slow).abs().max() <= tolerance * slow.abs().max(), name


def chunks_of(monkeypatch, num_anchors: int) -> None:
    elements = num_anchors * 2 * 4 * 24  # branches, drafts, ids
    monkeypatch.setattr("support.gpu.CHUNK_ELEMENTS", elements)
    assert chunk_elements(torch.device("cpu")) == elements


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("variant", KINDS)
def test_a_steps_gradient_equals_that_of_all_logits_at_once(variant, mix, monkeypatch):
    drafter, blocks = drafter_and_blocks(variant)
    if "confidence" in MIXES[mix] and not drafter.has_confidence:
        pytest.skip("this drafter has no confidence head")
    objective = Objective(MIXES[mix], temperature=1.0 if mix == "ce" else 0.8)
    slow = plain_step_loss(drafter, blocks, objective)
    wanted = gradients_of(drafter, slow)
    for num_anchors in (1, 4, 6):
        chunks_of(monkeypatch, num_anchors)
        value, _ = step_loss(drafter, blocks, objective)
        torch.testing.assert_close(value, slow, atol=1e-5, rtol=1e-5)
        check_same(gradients_of(drafter, value), wanted, 1e-4)
    blocks.valid[0, 1, 1, 2] = False  # one position less, and the gradient differs
    changed = gradients_of(drafter, step_loss(drafter, blocks, objective)[0])
    with pytest.raises(AssertionError):
        check_same(changed, wanted, 1e-4)


@pytest.mark.parametrize("variant", ["dflash", "dspark gated", "dflash2"])
def test_in_bfloat16_a_step_in_chunks_equals_one_chunk_and_gradients_stay_float32(
    variant, monkeypatch
):
    drafter, blocks = drafter_and_blocks(variant)
    drafter.target.float()
    drafter.float()
    blocks.trunk.taps, blocks.p_hidden = blocks.trunk.taps.float(), blocks.p_hidden.float()
    objective = Objective({"e2e_tv": 1.0}, bfloat16=True)
    results = []
    for num_anchors in (6, 1):
        chunks_of(monkeypatch, num_anchors)
        value, _ = step_loss(drafter, blocks, objective)
        results.append(gradients_of(drafter, value))
    check_same(results[1], results[0], 0.02)
    assert all(g is None or g.dtype == torch.float32 for g in results[1].values())


class StepModule(nn.Module):
    def __init__(self, drafter):
        super().__init__()
        self.drafter = drafter

    def forward(self, blocks: Blocks, objective: Objective):
        return step_loss(self.drafter, blocks, objective)[0]


@pytest.mark.parametrize("variant", ["dflash", "dspark rnn", "dflash2"])
def test_data_parallel_sends_the_gradient_of_every_parameter(variant, monkeypatch, tmp_path):
    """Messages that double what they carry double the gradient of each parameter, heads included,
    also where the backbone's layers run again."""
    drafter, blocks = drafter_and_blocks(variant)
    terms = {"e2e_tv": 1.0} | ({"confidence": 1.0} if drafter.has_confidence else {})
    chunks_of(monkeypatch, 2)
    wanted = gradients_of(drafter, step_loss(drafter, blocks, Objective(terms))[0])

    def doubled(_, bucket):
        sent = torch.futures.Future()
        sent.set_result(2 * bucket.buffer())
        return sent

    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        drafter.recompute = True
        module = DistributedDataParallel(StepModule(drafter))
        module.register_comm_hook(None, doubled)
        gradients = gradients_of(drafter, module(blocks, Objective(terms)))
    finally:
        dist.destroy_process_group()
    check_same(gradients, {name: 2 * g for name, g in wanted.items()}, 1e-6)


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
heads = Heads(lambda hidden, *_: hidden @ head.T, V, [], lambda hidden: hidden @ head.T)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
value, _ = chunked("e2e_tv", rows, heads, anchors_per_chunk=int(sys.argv[1]))
value.backward()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
torch.save(q_hidden.grad, sys.argv[2])
"""


@pytest.mark.slow
def test_a_real_vocabulary_in_chunks_takes_a_fraction_of_the_memory(tmp_path):
    peaks, gradients = [], []
    for anchors_per_chunk in (9, 10**9):  # in chunks, and all at once
        out = tmp_path / f"{anchors_per_chunk}.pt"
        done = run("-c", MEMORY, anchors_per_chunk, out)
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout))
        gradients.append(torch.load(out))
    print("peak above the start, MB, in chunks and at once:", [peak // 1024 for peak in peaks])
    assert peaks[0] < peaks[1] / 4
    scale = gradients[1].abs().max()
    torch.testing.assert_close(gradients[0] / scale, gradients[1] / scale, atol=1e-5, rtol=0)
