"""The losses: from imitating single tokens to the acceptance length itself.

p is the target's and q the drafter's distribution at position k of a branch.

    alpha_k = sum_v min(p_k(v), q_k(v)) = 1 - TV(p_k, q_k)     P(a draft from q_k is accepted)
    E2E-TV  = 1 - sum_b sum_j prod_{i<=j} alpha_{b,i} / sum_b n_b       (end-to-end, paper)

A position counts only as far as everything before it survives. So an error at the first token
costs the whole block. Where alpha_k does not depend on the drafted tokens, 1 + sum_j prod alpha
is exactly the expected acceptance length; in general it is an approximation. `e2e_al` (beyond the
paper) estimates the exact value, without bias, from the same branches.

Every loss is a sum over branches, divided by a number that needs no logits. So a global batch
may be split over chunks and processes and still give the same gradient. One table, TERMS, serves
the plain losses below and the chunked form, which never holds all logits at once.

A new loss is one function of `Branches` and one row of TERMS; `_branches` computes what it reads.

    python loss.py              two drafters of equal cross-entropy, told apart by E2E-TV
    pytest tests/test_loss.py
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from drafter import Drafter, chunk_elements, previous_tokens, tokens_at
from target import Trunk

CE_DECAY = 4.0  # default `decay` of position_weights, for W = 7; the papers take 7.0 for W = 15
DSPARK_MIX = {"ce": 0.1, "early_tv": 1.8, "confidence": 1.0}  # 0.9 sum |q - p| = 1.8 TV

# ------------------------------------------------------------------------------------- acceptance


def acceptance(p: Tensor, q: Tensor) -> Tensor:
    """alpha = sum_v min(p, q), P(a draft from q is accepted): (..., V) -> (...)."""
    return torch.minimum(p, q).sum(-1)


def survival(alpha: Tensor, mask: Tensor | None = None) -> Tensor:
    """prod_{i<=j} alpha_i along the last axis (..., W), 0 at positions outside the mask."""
    return (alpha * _as_valid(mask, alpha)).cumprod(-1)


def expected_acceptance_length(p: Tensor, q: Tensor, mask: Tensor | None = None) -> Tensor:
    """1 + sum_j prod_{i<=j} alpha_i of each branch: (..., W, V) -> (...).

    In tokens per verification, bonus included. Exact where alpha_k does not depend on drafts."""
    return 1 + survival(acceptance(p, q), mask).sum(-1)


def position_weights(like: Tensor, decay: float) -> Tensor:
    """exp(-(k-1)/decay) for positions k = 1..W of like (..., W) -> (W,)."""
    W = like.shape[-1]
    return torch.exp(-torch.arange(W, device=like.device, dtype=like.dtype) / decay)


def _as_valid(mask: Tensor | None, like: Tensor) -> Tensor:
    return torch.ones_like(like) if mask is None else mask.to(like.dtype)


# ------------------------------------------------------------------ the losses, branch by branch


@dataclass
class Branches:
    """Some branches, with what the losses need of them. Shapes broadcast against one another."""

    valid: Tensor  # (..., W) 1.0 where a position counts, else 0.0
    p: Tensor | None = None  # (..., W, V), without gradient
    q: Tensor | None = None  # (..., W, V)
    log_q: Tensor | None = None  # (..., W, V), of kl
    log_q_plain: Tensor | None = None  # (..., W, V) at temperature 1, of ce
    tokens: Tensor | None = None  # (..., W) labels of ce, drafts of e2e_al
    alpha: Tensor | None = None  # (..., W)
    confidence: Tensor | None = None  # (..., W) logits
    decay: float = CE_DECAY

    @property
    def early_weights(self) -> Tensor:
        """Weights (..., W) that fall with the position."""
        return self.valid * position_weights(self.valid, self.decay)


def _ce_sum(b: Branches) -> Tensor:
    """-log q_k(label_k), early positions weigh more."""
    log_q = b.log_q_plain.expand(*b.tokens.shape, -1)
    nll = -log_q.gather(-1, b.tokens[..., None])[..., 0]
    nll = torch.where(b.valid > 0, nll, 0.0)  # outside the mask a label may have q = 0
    return (nll * b.early_weights).sum(-1)


def _tv_sum(b: Branches) -> Tensor:
    """Total variation at each position."""
    return ((1 - b.alpha) * b.valid).sum(-1)


def _early_tv_sum(b: Branches) -> Tensor:
    """The same, early positions weigh more."""
    return ((1 - b.alpha) * b.early_weights).sum(-1)


def _kl_sum(b: Branches) -> Tensor:
    """Forward divergence KL(p || q) at each position, nats."""
    cross = torch.where(b.log_q.isneginf(), 0.0, b.p * b.log_q)  # where q = 0
    return ((torch.special.xlogy(b.p, b.p) - cross).sum(-1) * b.valid).sum(-1)


def _e2e_tv_sum(b: Branches) -> Tensor:
    """1 - prod_{i<=j} alpha_i at each position j (paper: E2E-TV)."""
    return (b.valid - survival(b.alpha, b.valid)).sum(-1)


def _e2e_al_sum(b: Branches) -> Tensor:
    """1 - w_j alpha_j at each position j, for branches whose tokens were DRAWN from q.

    E[AL] - 1 = sum_j E_y[w_j alpha_j] with w_j = prod_{i<j} min(1, p_i(y_i)/q_i(y_i)). The gradient
    also has a term from the drawing of the history:
    w_j alpha_j sum_{i<j} 1[q_i < p_i] grad log q_i(y_i)."""
    p, q = torch.broadcast_tensors(b.p, b.q)
    alpha = acceptance(p, q) * b.valid
    p_y = p.gather(-1, b.tokens[..., None])[..., 0]
    q_y = q.gather(-1, b.tokens[..., None])[..., 0]
    ratio = (p_y / q_y.detach().clamp(min=1e-30)).clamp(max=1)
    score = torch.where(q_y.detach() < p_y, q_y.clamp(min=1e-30).log(), 0.0)
    w = F.pad(ratio.cumprod(-1), (1, -1), value=1.0)  # a product over i < j
    history = F.pad(score.cumsum(-1), (1, -1))  # a sum over i < j
    drawn = alpha.detach() * (history - history.detach())  # value 0, gradient as above
    return b.valid.sum(-1) - (w * (alpha + drawn)).sum(-1)


def _confidence_sum(b: Branches) -> Tensor:
    """Cross-entropy of the confidence with alpha as its label (DSpark)."""
    label = b.alpha.detach().expand(b.confidence.shape).clamp(0, 1)
    logits = b.confidence.float()
    bce = F.binary_cross_entropy_with_logits(logits, label, reduction="none")
    return (bce * b.early_weights).sum(-1)


@dataclass(frozen=True)
class Term:
    """A loss: a sum of each branch, and what the sums are divided by."""

    branch_sum: Callable[[Branches], Tensor]  # (..., W) -> (...)
    early: bool = False  # divided by the sum of the early weights; else by the valid positions
    alone: bool = True  # a loss of its own; else a part of a sum


TERMS = {
    "ce": Term(_ce_sum, early=True),
    "tv": Term(_tv_sum),
    "kl": Term(_kl_sum),
    "e2e_tv": Term(_e2e_tv_sum),
    "e2e_al": Term(_e2e_al_sum),
    "early_tv": Term(_early_tv_sum, early=True, alone=False),
    "confidence": Term(_confidence_sum, early=True, alone=False),
}
LOSSES = tuple(name for name, term in TERMS.items() if term.alone)


def denominator(name: str, mask: Tensor, decay: float = CE_DECAY) -> Tensor:
    """What a loss's sum is divided by, from the mask (..., W) of valid positions alone.

    Added up over processes before dividing, it makes many processes give the gradient of one."""
    valid = mask.float()
    return (valid * position_weights(valid, decay) if TERMS[name].early else valid).sum()


# -------------------------------------------------------------------- plain: all logits at once


def _mean(name: str, b: Branches) -> Tensor:
    return TERMS[name].branch_sum(b).sum() / denominator(name, b.valid, b.decay).clamp(min=1e-12)


def e2e_tv(p: Tensor, q: Tensor, mask: Tensor | None = None) -> Tensor:
    """E2E-TV (paper) over all branches: p, q (..., W, V), mask (..., W) -> scalar."""
    alpha = acceptance(p.detach(), q)
    return _mean("e2e_tv", Branches(_as_valid(mask, alpha), alpha=alpha))


def e2e_al(p: Tensor, q: Tensor, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    """1 - (expected accepted drafts) / (valid positions), for tokens (..., W) drawn from q."""
    valid = _as_valid(mask, p[..., 0])
    return _mean("e2e_al", Branches(valid, p=p.detach(), q=q, tokens=tokens))


def tv(p: Tensor, q: Tensor, mask: Tensor | None = None) -> Tensor:
    """Mean total variation per valid position."""
    alpha = acceptance(p.detach(), q)
    return _mean("tv", Branches(_as_valid(mask, alpha), alpha=alpha))


def kl(p: Tensor, q: Tensor, mask: Tensor | None = None) -> Tensor:
    """Mean KL(p || q) per valid position, nats. Ids with q = 0 are left out."""
    log_q = torch.where(q > 0, q, 1.0).log().masked_fill(q == 0, -torch.inf)  # no gradient there
    return _mean("kl", Branches(_as_valid(mask, p[..., 0]), p=p, log_q=log_q))


def ce(
    logits: Tensor, labels: Tensor, mask: Tensor | None = None, decay: float = CE_DECAY
) -> Tensor:
    """-log q_k(label_k) weighted by exp(-(k-1)/decay), over the sum of weights (DFlash's offline
    loss): logits (..., W, V), labels (..., W) -> scalar."""
    log_q = logits.float().log_softmax(-1)
    valid = _as_valid(mask, log_q[..., 0])
    return _mean("ce", Branches(valid, log_q_plain=log_q, tokens=labels, decay=decay))


# ------------------------------------------------ chunked: the same, without the whole vocabulary


@dataclass
class Rows:
    """The branches of R anchors as hidden states: the heads have not run yet."""

    q_hidden: Tensor  # (R, K or 1, W, C), with gradient
    valid: Tensor  # (R, K, W)
    tokens: Tensor | None = None  # (R, K, W) labels of ce, drafts of e2e_al
    previous: Tensor | None = None  # (R, K, W) the token before each slot
    p_hidden: Tensor | None = None  # (R, K, W, C)

    def part(self, start: int, stop: int) -> "Rows":
        """Some anchors' tensors, contiguous (see Target.head). Gradients end at its q_hidden."""
        tensors = {name: t for name, t in vars(self).items() if t is not None}
        part = Rows(**{name: t[start:stop].detach().contiguous() for name, t in tensors.items()})
        part.q_hidden.requires_grad_()
        return part


@dataclass
class Heads:
    """What turns hidden states into logits."""

    q: Callable  # (q_hidden, previous, labels of ce or None) -> (..., W, V)
    vocab_size: int
    parameters: list  # what q and confidence learn; any other tensor gets no gradient
    p: Callable | None = None  # p_hidden -> (..., W, V)
    confidence: Callable | None = None  # (q_hidden, previous) -> (R, K, W)
    autocast: Callable = contextlib.nullcontext  # () -> a context, for q and confidence


class _GradientKnown(torch.autograd.Function):
    """A value whose gradients at some inputs were computed with it: backward scales them."""

    @staticmethod
    def forward(ctx, value: Tensor, gradients: list, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*gradients)  # None where the value does not depend on an input
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, scale: Tensor):
        return None, None, *(None if g is None else g * scale for g in ctx.saved_tensors)


def chunked(
    terms: str | dict[str, float],
    rows: Rows,
    heads: Heads,
    temperature: float = 1.0,
    decay: float = CE_DECAY,
    denominators: dict[str, Tensor] | None = None,
    anchors_per_chunk: int | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss, or a weighted sum of several ({name: weight}), with vocabulary-sized work in chunks
    of anchors.

    What a sum is divided by is known before, so each chunk gives its share of the loss and, at
    once, the gradient of it at the hidden states and the heads' parameters. Only these are kept: p
    and q are computed once, and those of two chunks never exist at the same time. The backward
    pass has only to multiply by the gradient that arrives.

    denominators: of each term, if these rows are a part of a batch; the value is then this part's
    share of the loss, and the shares add up to it. anchors_per_chunk: by default as many as keep a
    chunk's logits within `chunk_elements`. Returns the loss and figures, sums (W,) over valid
    positions: alpha, survival, and how many positions there are; for only ce, none."""
    terms = {terms: 1.0} if isinstance(terms, str) else terms
    terms = {name: weight for name, weight in terms.items() if weight}  # weight 0 costs nothing
    for name in terms:
        if name not in TERMS:
            raise ValueError(f"--loss {name}: there is {', '.join(LOSSES)}")
    if denominators is None:
        denominators = {name: denominator(name, rows.valid, decay) for name in terms}
    R, K, W = rows.valid.shape
    if anchors_per_chunk is None:
        elements = chunk_elements(rows.valid.device)
        anchors_per_chunk = max(1, elements // (K * W * heads.vocab_size))

    def chunk_loss(part: Rows) -> tuple[Tensor, Tensor | None]:
        b = _branches(terms, part, heads, temperature, decay)
        value = 0.0
        for name, weight in terms.items():
            total = TERMS[name].branch_sum(b).sum()
            value = value + weight / denominators[name].clamp(min=1e-12) * total
        return value, None if b.alpha is None else b.alpha.detach()

    starts = range(0, R, anchors_per_chunk)
    parts = (rows.part(start, start + anchors_per_chunk) for start in starts)
    value, alphas = _sum_with_gradient(chunk_loss, parts, rows.q_hidden, heads.parameters)
    if set(terms) == {"ce"}:
        return value, {}
    alpha = torch.cat(alphas)  # (R, K, W)
    valid = rows.valid.float()
    sums = torch.stack([valid, alpha * valid, survival(alpha, valid)]).sum((1, 2))  # (3, W)
    return value, dict(zip(("positions", "alpha", "survival"), sums))


def _sum_with_gradient(chunk_loss, parts, q_hidden: Tensor, parameters) -> tuple[Tensor, list]:
    """The sum of chunk_loss(part) over parts of the rows, with its gradient at their q_hidden and
    at the parameters -> the sum, and each part's alpha."""
    value = q_hidden.new_zeros((), dtype=torch.float32)
    alphas, hidden_grads = [], []
    totals = [None] * len(parameters)
    for part in parts:
        share, alpha = chunk_loss(part)
        value = value + share.detach()
        alphas.append(alpha)
        if torch.is_grad_enabled():
            inputs = (part.q_hidden, *parameters)
            hidden_grad, *grads = torch.autograd.grad(share, inputs, allow_unused=True)
            if hidden_grad is None:  # only the confidence head learns (detach_confidence)
                hidden_grad = torch.zeros_like(part.q_hidden)
            hidden_grads.append(hidden_grad)
            totals = [g if total is None else total + g for total, g in zip(totals, grads)]
    if torch.is_grad_enabled():
        grads = [torch.cat(hidden_grads), *totals]
        value = _GradientKnown.apply(value, grads, q_hidden, *parameters)
    return value, alphas


def _over(logits: Tensor, temperature: float) -> Tensor:
    """logits / temperature in float32; no copy is made where there is nothing to do."""
    return logits.float() if temperature == 1 else logits.float() / temperature


def _branches(terms, rows: Rows, heads: Heads, temperature: float, decay: float) -> Branches:
    """Run the heads on some rows, as far as the terms need them."""
    b = Branches(rows.valid.float(), tokens=rows.tokens, decay=decay)
    with heads.autocast():
        logits = heads.q(rows.q_hidden, rows.previous, rows.tokens if "ce" in terms else None)
        if "confidence" in terms:
            b.confidence = heads.confidence(rows.q_hidden, rows.previous)
    if "ce" in terms:
        b.log_q_plain = logits.float().log_softmax(-1)
    if set(terms) != {"ce"}:
        with torch.no_grad():
            b.p = _over(heads.p(rows.p_hidden), temperature).softmax(-1)
        b.q = _over(logits, temperature).softmax(-1)
        b.alpha = acceptance(b.p, b.q)
    if "kl" in terms:
        b.log_q = _over(logits, temperature).log_softmax(-1)
    return b


# ------------------------------------------------------------------ what one training step learns


@dataclass
class Blocks:
    """Blocks along B texts and what the target said of them: all that a step learns from.

    They are the text itself after its anchors, the branches of a proposal tree (the last of the K
    may be the text), or the rounds of a decoding (then K = 1, and A is the largest number of
    rounds)."""

    trunk: Trunk  # tokens, lengths and taps, nothing else
    anchors: Tensor  # (B, A), -1 = absent
    tokens: Tensor  # (B, A, K, W)
    valid: Tensor  # (B, A, K, W) positions that count
    p_hidden: Tensor | None  # (B, A, K, W, C) the target's, gives p_1..p_W; None: not needed
    hidden: Tensor | None = None  # (B, A, 1, W, C) of the pass that drafted; None: run it again
    counts: dict = field(default_factory=dict)  # of the tree: nodes, and nodes without merging


@dataclass(frozen=True)
class Objective:
    """What is minimised on blocks."""

    terms: dict[str, float]  # {name in TERMS: weight}
    base_ce: bool = False  # also CE of DFlash 2's logits before its selector (offline)
    temperature: float = 1.0  # of p and q
    decay: float = CE_DECAY
    detach_confidence: bool = False  # its loss teaches only the confidence head
    bfloat16: bool = False  # the drafter's arithmetic; weights and gradients stay float32

    @property
    def needs_p(self) -> bool:
        return set(self.terms) != {"ce"}

    def autocast(self, device: torch.device):
        return torch.autocast(device.type, torch.bfloat16, enabled=self.bfloat16)

    def denominators(self, blocks: Blocks) -> dict[str, Tensor]:
        return {name: denominator(name, blocks.valid, self.decay) for name in self.terms}


def step_loss(
    drafter: Drafter, blocks: Blocks, objective: Objective, denominators: dict | None = None
) -> tuple[Tensor, dict]:
    """The share of the loss that these blocks have, and figures that add up over parts and
    processes. denominators: those of the whole batch, by default these blocks."""
    trunk = blocks.trunk
    autocast = partial(objective.autocast, trunk.tokens.device)
    hidden = blocks.hidden
    if hidden is None:
        with autocast():
            hidden = drafter.block(trunk, blocks.anchors)[:, :, None]  # (B, A, 1, W, C)
    previous = previous_tokens(tokens_at(trunk, blocks.anchors), blocks.tokens)
    p_hidden = blocks.p_hidden
    rows = Rows(
        q_hidden=hidden.flatten(0, 1),
        valid=blocks.valid.flatten(0, 1),
        tokens=blocks.tokens.flatten(0, 1),
        previous=previous.flatten(0, 1),
        p_hidden=None if p_hidden is None else p_hidden.flatten(0, 1),
    )
    heads = Heads(
        q=drafter.logits,
        vocab_size=drafter.config.layers.vocab_size,
        parameters=[p for p in drafter.parameters() if p.requires_grad],
        p=drafter.target.head,
        confidence=partial(drafter.confidence_logits, detached=objective.detach_confidence),
        autocast=autocast,
    )
    temperature, decay = objective.temperature, objective.decay
    value, figures = chunked(objective.terms, rows, heads, temperature, decay, denominators)
    if objective.base_ce:
        base = replace(heads, q=lambda hidden, previous, labels: drafter.base_logits(hidden))
        value = value + chunked("ce", rows, base, temperature, decay, denominators)[0]
        figures |= _coverage(drafter, hidden, blocks)
    figures |= blocks.counts | {"supervised": blocks.valid.sum()}
    num_slots = trunk.tokens.numel()
    return value, figures | {"slots": num_slots, "padding": num_slots - trunk.lengths.sum()}


def _coverage(drafter, hidden: Tensor, blocks: Blocks) -> dict:
    """How many labels are among DFlash 2's candidates: of one text in the middle of the batch, and
    of no more anchors than fit a chunk."""
    V = drafter.config.layers.vocab_size
    num_anchors = max(1, chunk_elements(hidden.device) // (hidden.shape[3] * V))
    some = (len(hidden) // 2, slice(num_anchors))
    num_labels = blocks.valid[some].sum()
    share = drafter.coverage(hidden[some], blocks.tokens[some], blocks.valid[some])
    return {"candidates": share * num_labels, "labels": num_labels}


# ------------------------------------------------------------------------------------------- lesson


def main():
    W = 4
    V = 8
    p = torch.full((W, V), 0.1 / (V - 1))
    p[:, 0] = 0.9  # the target wants token 0 everywhere
    labels = torch.zeros(W, dtype=torch.long)
    print(f"A block of {W}: the target puts 0.9 on one token. Two drafters, each wrong once.\n")
    print(f" wrong at      CE  mean TV   E2E-TV   E[AL]   alpha_1..alpha_{W}")
    for wrong in (0, W - 1):
        q = p.clone()
        q[wrong] = q[wrong].roll(1)
        values = (ce(q.log(), labels, decay=1e9), tv(p, q), e2e_tv(p, q))
        numbers = "{:7.3f} {:8.3f} {:8.3f}".format(*values)
        length = expected_acceptance_length(p, q)
        alphas = " ".join(f"{a:.2f}" for a in acceptance(p, q).tolist())
        print(f"{wrong + 1:>9} {numbers} {length:7.2f}   {alphas}")
    print("\nCE and mean TV see equal errors. E2E-TV sees that the first costs the whole block.")
    logits = p.roll(1, -1).log().requires_grad_()
    q = logits.softmax(-1)
    losses = {"CE": ce(logits, labels, decay=1e9), "mean TV": tv(p, q), "E2E-TV": e2e_tv(p, q)}
    print("\nGradient at the logits of a drafter wrong everywhere (why training starts with CE):")
    for name, value in losses.items():
        (gradient,) = torch.autograd.grad(value, logits, retain_graph=True)
        print(f"  {name:8s} {gradient.norm():.4f}")


if __name__ == "__main__":
    main()
