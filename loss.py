"""What is learned, from token-level imitation to the acceptance length itself, and by which
optimizers.

With p the target's and q the drafter's distribution at branch position k,

    alpha_k = sum_v min(p_k(v), q_k(v)) = 1 - TV(p_k, q_k)     a draft from q_k is accepted so often
    E2E-TV  = 1 - sum_b sum_j prod_{i<=j} alpha_{b,i} / sum_b n_b      end-to-end total variation

A position counts only as far as everything before it survives, so an error at the first token costs
the whole block. Where p_k does not depend on the drafted history, 1 + sum_j prod alpha is exactly
the expected acceptance length; in general it is a surrogate. `e2e_al` (beyond the paper) is the
exact one, estimated without bias from the same samples. Every loss is a numerator over a
denominator that needs no vocabulary, so a global batch may be split over chunks and processes and
still give one gradient.

    python loss.py              two blocks of equal cross-entropy, told apart by E2E-TV
    pytest tests/test_loss.py
"""

import contextlib

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

LOSSES = ("ce", "tv", "kl", "e2e_tv", "e2e_al")
TERMS = (*LOSSES, "early_tv", "confidence")  # the last two: DSpark's
DSPARK_MIX = {"ce": 0.1, "early_tv": 1.8}  # 0.1 CE + 0.9 sum |q - p|, beside the confidence
# matrices that are looked up row by row, or have one row: nothing for Muon
ROWS = ("embed", "lm_head", "markov_w", "codebook", "confidence_head")
CHUNK_ELEMENTS = 2**24  # logits held at once by `chunked`: 64 MiB in float32, a few times over


def _ones(like: Tensor, mask: Tensor | None) -> Tensor:
    return torch.ones_like(like) if mask is None else mask.to(like.dtype)


def acceptance(p: Tensor, q: Tensor) -> Tensor:
    """alpha = sum_v min(p, q): (..., V), (..., V) -> (...). The chance that a draft from q is
    accepted."""
    return torch.minimum(p, q).sum(-1)


def survival(alpha: Tensor, mask: Tensor | None = None) -> Tensor:
    """prod_{i<=j} alpha_i along the last axis (..., W), 0 at positions outside the mask."""
    return (alpha * _ones(alpha, mask)).cumprod(-1)


def expected_acceptance_length(p: Tensor, q: Tensor, mask: Tensor | None = None) -> Tensor:
    """1 + sum_j prod_{i<=j} alpha_i per branch: (..., W, V) -> (...), tokens per verification,
    bonus included; exact for a p_k that does not depend on the drafted history (method:
    position-only)."""
    return 1 + survival(acceptance(p, q), mask).sum(-1)


def e2e_tv(p: Tensor, q: Tensor, mask: Tensor | None = None) -> Tensor:
    """E2E-TV (paper) over all branches: p, q (..., W, V), mask (..., W) of valid positions ->
    scalar."""
    alpha = acceptance(p.detach(), q)
    return 1 - survival(alpha, mask).sum() / _ones(alpha, mask).sum().clamp(min=1)


def tv(p: Tensor, q: Tensor, mask: Tensor | None = None) -> Tensor:
    """Mean total variation per valid position."""
    alpha = acceptance(p.detach(), q)
    return 1 - (alpha * _ones(alpha, mask)).sum() / _ones(alpha, mask).sum().clamp(min=1)


def kl(p: Tensor, q: Tensor, mask: Tensor | None = None) -> Tensor:
    """Mean forward divergence KL(p || q) per valid position, nats."""
    divergence = (torch.special.xlogy(p, p) - torch.special.xlogy(p, q)).sum(-1)
    return (divergence * _ones(divergence, mask)).sum() / _ones(divergence, mask).sum().clamp(min=1)


def ce(logits: Tensor, labels: Tensor, mask: Tensor | None = None, decay: float = 4.0) -> Tensor:
    """-log q_k(label_k) weighted by exp(-(k-1)/decay), over the weights' sum (DFlash's offline
    loss). logits (..., W, V), labels (..., W); decay (gamma_0): 4 for W = 7, 7 for W = 15."""
    nll = -logits.float().log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    weights = position_weights(labels.shape[-1], decay, nll) * _ones(nll, mask)
    nll = torch.where(weights > 0, nll, 0.0)  # a masked label may be one that q never holds
    return (nll * weights).sum() / weights.sum().clamp(min=1e-12)


def position_weights(W: int, decay: float, like: Tensor) -> Tensor:
    return torch.exp(-torch.arange(W, device=like.device, dtype=like.dtype) / decay)


def e2e_al(p: Tensor, q: Tensor, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    """1 - (expected accepted drafts) / valid positions, for branches whose tokens were DRAWN from
    q.

    E[AL] - 1 = sum_j E_y[w_j alpha_j], w_j = prod_{i<j} min(1, p_i(y_i)/q_i(y_i)). The gradient
    also has the share that comes through the drawing of the history, alpha_j sum_{i<j} 1[q_i < p_i]
    grad log q_i(y_i). p, q (..., W, V), tokens (..., W), mask (..., W) -> scalar.
    """
    valid = _ones(p[..., 0], mask)
    return 1 - _e2e_al_sum(p.detach(), q, tokens, valid).sum() / valid.sum().clamp(min=1)


def _e2e_al_sum(p: Tensor, q: Tensor, tokens: Tensor, valid: Tensor) -> Tensor:
    """The sum over positions (..., W) -> (...), its value sum_j w_j alpha_j, its gradient as
    above."""
    alpha = acceptance(p, q) * valid
    p_y, q_y = (t.gather(-1, tokens[..., None])[..., 0] for t in (p, q))
    ratio = (p_y / q_y.detach().clamp(min=1e-30)).clamp(max=1)
    score = torch.where(q_y.detach() < p_y, q_y.clamp(min=1e-30).log(), 0.0)
    before = F.pad(ratio.cumprod(-1), (1, -1), value=1.0)  # w_j, a product over i < j
    history = F.pad(score.cumsum(-1), (1, -1))  # sum over i < j
    return (before * (alpha + alpha.detach() * (history - history.detach()))).sum(-1)


# ----------------------------------------------------------------- the same, without the vocabulary


def denominator(name: str, mask: Tensor, decay: float = 4.0, weight=None) -> Tensor:
    """What a loss's numerator is divided by, from the mask (R, K, W) and the anchors' weight (R,)
    alone: valid positions, or their weights. Summed over processes before dividing, it makes many
    ranks give the gradient of one."""
    valid = mask.float() if weight is None else mask * weight[:, None, None]
    early = name in ("ce", "early_tv", "confidence")
    return (valid * position_weights(mask.shape[-1], decay, valid) if early else valid).sum()


def _numerator(name, logits, p, q, alpha, tokens, valid, temperature, decay, sure) -> Tensor:
    """What the loss grows with, of each branch (...,); p, q and its logits broadcast to (..., W,
    V), alpha and the logits of confidence `sure` to (..., W)."""
    weights = valid * position_weights(valid.shape[-1], decay, valid)
    if name == "ce":
        logp = logits.float().log_softmax(-1)
        nll = -logp.expand(*tokens.shape, -1).gather(-1, tokens[..., None])[..., 0]
        nll = torch.where(valid > 0, nll, 0.0)  # a masked label may be one that q never holds
        return (nll * weights).sum(-1)
    if name == "tv":
        return ((1 - alpha) * valid).sum(-1)
    if name == "early_tv":
        return ((1 - alpha) * weights).sum(-1)
    if name == "confidence":
        target = alpha.detach().expand(sure.shape).clamp(0, 1)
        bce = F.binary_cross_entropy_with_logits(sure.float(), target, reduction="none")
        return (bce * weights).sum(-1)
    if name == "kl":
        logq = (logits.float() / temperature).log_softmax(-1)
        cross = torch.where(logq.isneginf(), 0.0, p * logq)  # ids the drafter may never propose
        return ((torch.special.xlogy(p, p) - cross).sum(-1) * valid).sum(-1)
    if name == "e2e_tv":
        return (valid - survival(alpha, valid)).sum(-1)
    return valid.sum(-1) - _e2e_al_sum(*torch.broadcast_tensors(p, q), tokens, valid)


def chunked(
    terms: str | dict[str, float],
    q_hidden: Tensor,
    q_head,
    mask: Tensor,
    *,
    p_hidden: Tensor | None = None,
    p_head=None,
    before: Tensor | None = None,
    tokens: Tensor | None = None,
    weight: Tensor | None = None,
    confidence=None,
    temperature: float = 1.0,
    decay: float = 4.0,
    totals: dict[str, Tensor] | None = None,
    rows: int | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss, or a weighted sum of several, from hidden states and heads, vocabulary-sized work in
    chunks of anchors.

    q_hidden (R, K or 1, W, C) with gradient; p_hidden (R, K, W, C); tokens (R, K, W): the labels of
    "ce", the drafts of "e2e_al"; before (R, K, W): the token before each slot; mask (R, K, W) valid
    positions; weight (R,) of an anchor's branches. q_head: (hidden, before, labels of "ce" or None)
    -> logits, p_head: hidden -> logits, confidence: (hidden, before) -> logits (R, K, W). A term of
    weight 0 costs nothing. `totals`: each term's `denominator`, of a batch that this may be a part
    of; the value is then its share of the loss (the shares sum to it). `rows`: anchors per chunk,
    by default as many as keep the logits within CHUNK_ELEMENTS. A chunk's logits are recomputed in
    the backward pass, so at no time do those of two chunks exist. Returns the loss and figures,
    sums over valid positions (of all anchors alike): alpha (W,), survival (W,), and how many
    positions (W,) there are; empty for "ce" alone.
    """
    terms = {terms: 1.0} if isinstance(terms, str) else terms
    terms = {name: share for name, share in terms.items() if share}
    for name in terms:
        if name not in TERMS:
            raise ValueError(f"--loss {name}: there is {', '.join(LOSSES)}")
    (R, K, W), valid, needs_p = mask.shape, mask.float(), set(terms) != {"ce"}
    if totals is None:
        totals = {name: denominator(name, mask, decay, weight) for name in terms}
    if rows is None:
        V = q_head(
            q_hidden[:1, :1, :1], *(None if t is None else t[:1, :1, :1] for t in (before, None))
        ).shape[-1]
        rows = max(1, CHUNK_ELEMENTS // (K * W * V))

    def part(q_part, p_part, before_part, tokens_part, valid_part, weight_part):
        logits = q_head(q_part, before_part, tokens_part if "ce" in terms else None)
        p = q = alpha = sure = None
        if needs_p:
            with torch.no_grad():
                p = (p_head(p_part).float() / temperature).softmax(-1)
            q = (logits.float() / temperature).softmax(-1)
            alpha = acceptance(p, q)
        if "confidence" in terms:
            sure = confidence(q_part, before_part)
        value = 0.0
        for name, share in terms.items():
            each = _numerator(
                name, logits, p, q, alpha, tokens_part, valid_part, temperature, decay, sure
            )  # (R', K)
            each = each if weight is None else each * weight_part[:, None]
            value = value + share / totals[name].clamp(min=1e-12) * each.sum()
        return value, None if alpha is None else alpha.detach()

    value, alphas = q_hidden.new_zeros((), dtype=torch.float32), []
    for start in range(0, R, rows):
        cut = [  # contiguous: a head takes a view's rows one block at a time
            None if t is None else t[start : start + rows].contiguous()
            for t in (q_hidden, p_hidden, before, tokens, valid, weight)
        ]
        piece, alpha = part(*cut) if rows >= R else checkpoint(part, *cut, use_reentrant=False)
        value = value + piece
        alphas.append(alpha)
    if not needs_p:
        return value, {}
    alpha = torch.cat(alphas)
    sums = torch.stack([valid, alpha * valid, survival(alpha, valid)]).sum((1, 2))  # (3, W)
    return value, dict(zip(("positions", "alpha", "survival"), sums))


# ----------------------------------------------------------------------------------- what learns it


def make_optimizers(module: nn.Module, matrix_lr: float, lr: float) -> list:
    """Muon for matrices, AdamW for those looked up by row (ROWS) and for vectors; AdamW alone with
    matrix_lr 0."""
    matrices, rest = [], []
    for name, parameter in module.named_parameters():
        is_matrix = parameter.dim() == 2 and not any(word in name for word in ROWS)
        (matrices if is_matrix and matrix_lr else rest).append(parameter)
    optimizers = (
        [torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.95), weight_decay=0.0)] if rest else []
    )
    if matrices:
        optimizers.append(torch.optim.Muon(matrices, lr=matrix_lr, weight_decay=0.0, momentum=0.95))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["full_lr"] = group["lr"]
    return optimizers


class KeepFloat32(TorchFunctionMode):
    """Leaves tensors alone that ask for bfloat16. torch's Muon orthogonalises in it, which a CPU
    without such units does several times slower than in float32."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return args[0].float() if function is Tensor.bfloat16 else function(*args, **(kwargs or {}))


def update(optimizers: list) -> None:
    """One step of each optimizer; gradients are gone afterwards."""
    for optimizer in optimizers:
        on_cpu = optimizer.param_groups[0]["params"][0].device.type == "cpu"
        with KeepFloat32() if on_cpu else contextlib.nullcontext():
            optimizer.step()
        optimizer.zero_grad()


def set_rate(optimizers: list, step: int, steps: int, warmup: int, cooldown: float) -> None:
    """Linear warm-up, constant, then linear down to a tenth over the last `cooldown` of the
    steps."""
    left = (steps - step) / max(1.0, cooldown * steps)
    share = min((step + 1) / max(1, warmup), 1.0, 0.1 + 0.9 * left)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["full_lr"] * share


def main():
    W, V = 4, 8
    p = torch.full((W, V), 0.1 / (V - 1))
    p[:, 0] = 0.9  # the target wants token 0 everywhere
    print(f"A block of {W}: the target puts 0.9 on one token. Two drafters, each wrong once.\n")
    print(
        f"{'wrong at':>9} {'CE':>7} {'mean TV':>8} {'E2E-TV':>8} {'E[AL]':>7}   alpha_1..alpha_{W}"
    )
    for wrong in (0, W - 1):
        q = p.clone()
        q[wrong] = q[wrong].roll(1)
        labels = torch.zeros(W, dtype=torch.long)
        values = [
            ce(q.log(), labels, decay=1e9),
            tv(p, q),
            e2e_tv(p, q),
            expected_acceptance_length(p, q),
        ]
        alphas = " ".join(f"{a:.2f}" for a in acceptance(p, q).tolist())
        figures = "{:7.3f} {:8.3f} {:8.3f} {:7.2f}".format(*values)
        print(f"{wrong + 1:>9} {figures}   {alphas}")
    print(
        "\nCE and mean TV see the same error; E2E-TV sees that the first one costs the whole block."
    )
    logits = p.roll(1, -1).log().requires_grad_()
    q = logits.softmax(-1)
    print("\nGradient at the logits of a drafter wrong everywhere (why training starts with CE):")
    for name, loss in (
        ("CE", ce(logits, labels, decay=1e9)),
        ("mean TV", tv(p, q)),
        ("E2E-TV", e2e_tv(p, q)),
    ):
        (grad,) = torch.autograd.grad(loss, logits, retain_graph=True)
        print(f"  {name:8s} {grad.norm():.4f}")


if __name__ == "__main__":
    main()
