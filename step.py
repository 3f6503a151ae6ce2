"""One step of training: what each way supervises, and what is learned from it.

    parts   = next_batch(...)                  the step's blocks, a part at a time: `draw` for each
    divisor = divisors(config, drafter, parts) what losses are divided by, of the whole batch
    value, figures = step_loss(config, drafter, part, divisor)

The ways to train differ by `draw` alone: offline a block is the reference's own text behind an
anchor, on policy it is what the drafter at hand proposed, scored by the target in one pass over a
tree (specopd) or verified in a decoding (rollout). A batch may be worked on in parts
(--grad-accum), by several processes, and used again (--reuse): a block is all that learning needs,
and a loss is a sum over a divisor that all parts share, so the gradient is the undivided batch's.

    pytest tests/test_train.py
"""

import contextlib
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import loss as losses
from drafter import Drafter, Sampling, history
from model import MLP
from rollout import Blocks, collect, until_stop
from support import distributed
from support.prepare import Trunks, batch_rows
from target import Trunk
from tree import build_tree, draw_anchors, gather_slots


def heat(config) -> float:
    """The temperature of p and q in the loss."""
    return config.loss_temperature or config.branch_temperature or 1.0


def arithmetic(config):
    """The drafter's arithmetic; its weights, their gradients and updates are float32 throughout."""
    kind = config.device.split(":")[0]
    return torch.autocast(kind, torch.bfloat16, enabled=config.precision == "bfloat16")


def draw(
    config,
    drafter: Drafter,
    trunk: Trunk,
    anchors: Tensor,
    uniforms: Tensor | None,
    weight: Tensor | None,
    stop_ids,
    rollout: Blocks | None = None,
) -> Blocks:
    """What is supervised at anchors (B,A), -1 = absent, of weight (B,A) in the loss; uniforms
    (B,A,K,W) draw the branches. A rollout's blocks are there already."""
    W, (B, A) = drafter.config.num_draft_tokens, anchors.shape
    present = (anchors >= 0)[..., None, None]
    steps = torch.arange(1, W + 1, device=anchors.device)
    ahead = anchors.clamp(min=0)[..., None] + steps  # (B, A, W) positions a+1..a+W of the text
    inside = (ahead < trunk.lengths[:, None, None])[:, :, None] & present  # (B, A, 1, W)
    ahead = ahead.clamp(max=trunk.tokens.shape[1] - 1)
    text = trunk.tokens.gather(1, ahead.flatten(1)).view(B, A, 1, W)
    inside = inside & until_stop(text, stop_ids)
    labelled = inside & drafter.proposable(text)  # p may draw what q never holds
    hidden, nodes, unmerged = None, 0, 0
    if config.mode == "rollout":
        tokens, p_hidden = rollout.tokens, rollout.p_hidden
        valid = until_stop(tokens, stop_ids) & present
    elif config.mode == "specopd":
        sampling = Sampling(config.branch_temperature)
        with arithmetic(config):
            proposal = drafter.propose(
                trunk,
                anchors,
                config.num_branches,
                sampling,
                uniforms,
                num_greedy=config.num_greedy,
            )
        tokens = proposal.tokens
        hidden = proposal.hidden if proposal.hidden.requires_grad else None
        valid = until_stop(tokens, stop_ids) & present  # (B, A, K, W)
        tree = build_tree(
            trunk.tokens, trunk.lengths, anchors, torch.where(valid, tokens, -1), config.merge
        )
        p_hidden = drafter.target.score(trunk, tree).hidden[..., :W, :]  # (B, A, K, W, C)
        nodes, unmerged = tree.valid.sum(), (valid.sum(-1) - 1).clamp(min=0).sum()
    else:
        tokens, valid = text, labelled if config.mode == "ce" else inside
        p_hidden = None
        if needs_p(config, drafter):  # p_k from a+k-1
            p_hidden = gather_slots(trunk.hidden, (ahead - 1).flatten(1)).view(B, A, 1, W, -1)
    return Blocks(
        trunk.lean(),
        anchors,
        tokens,
        p_hidden,
        weight,
        valid,
        text,
        labelled,
        hidden,
        {"nodes": nodes, "unmerged": unmerged},
    )


def terms_of(config, drafter: Drafter) -> tuple[dict, dict]:
    """What is minimised, by its weight: on the blocks, and on the text behind their anchors."""
    sure = {"confidence": config.confidence_weight if drafter.has_confidence else 0.0}
    if config.mode != "ce":
        return {config.loss: 1.0} | sure, {"ce": config.ce_weight}
    mix = losses.DSPARK_MIX if drafter.config.kind == "dspark" else {"ce": 1.0}
    # DFlash 2's base by itself, too, so that the best k are good
    return mix | sure, {"ce": float(drafter.config.kind == "dflash2")}


def needs_p(config, drafter: Drafter) -> bool:
    return any(share and name != "ce" for name, share in terms_of(config, drafter)[0].items())


def divisors(config, drafter: Drafter, parts: list[Blocks]) -> tuple[dict, dict]:
    """What the terms' sums are divided by: of all parts and processes, in one message."""
    both = terms_of(config, drafter)
    names = [(which, name) for which, terms in enumerate(both) for name in terms]

    def own(part: Blocks) -> Tensor:
        masks = [mask.flatten(0, 1) for mask in (part.valid, part.labelled)]
        weight = None if part.weight is None else part.weight.flatten()
        return torch.stack(
            [
                losses.denominator(name, masks[which], config.ce_decay, weight)
                for which, name in names
            ]
        )

    sums = dict(zip(names, distributed.all_reduce_sum(sum(own(part) for part in parts))))
    return tuple({name: sums[which, name] for name in terms} for which, terms in enumerate(both))


def step_loss(config, drafter: Drafter, part: Blocks, divisor=None) -> tuple[Tensor, dict]:
    """A part's share of the loss, and figures that are summed over parts and processes, too.
    divisor: `divisors` of the whole batch; by default this part is all of it."""
    trunk, hidden, terms = part.trunk, part.hidden, terms_of(config, drafter)
    if hidden is None:
        with arithmetic(config):
            hidden = drafter.block(trunk, part.anchors)[:, :, None]  # (B, A, 1, W, C)
    first = trunk.tokens.gather(1, part.anchors.clamp(min=0))  # (B, A)
    alone = {"always": True, "online": config.mode != "ce"}.get(config.detach_confidence, False)

    def loss_of(which, tokens, valid, p_hidden, head):
        q_rows, p_rows, before_rows, token_rows, valid_rows = (
            None if t is None else t.flatten(0, 1)
            for t in (hidden, p_hidden, history(first, tokens), tokens, valid)
        )
        return losses.chunked(
            terms[which],
            q_rows,
            within(config, head),
            valid_rows,
            p_hidden=p_rows,
            p_head=drafter.target.head,
            before=before_rows,
            tokens=token_rows,
            weight=None if part.weight is None else part.weight.flatten(),
            confidence=within(config, partial(drafter.confidence, detached=alone)),
            temperature=heat(config),
            decay=config.ce_decay,
            totals=divisor and divisor[which],
        )

    def base(hidden, before, labels):
        return drafter.finished(drafter.unary(hidden))

    value, figures = loss_of(0, part.tokens, part.valid, part.p_hidden, drafter.logits)
    if terms[1]["ce"]:
        head = base if config.mode == "ce" else drafter.logits
        value = value + loss_of(1, part.text, part.labelled, None, head)[0]
    if config.mode == "ce" and drafter.config.kind == "dflash2":  # of one reference, a middling one
        few = max(1, losses.CHUNK_ELEMENTS // (hidden.shape[3] * drafter.config.layers.vocab_size))
        one = len(hidden) // 2, slice(few)  # and of no more anchors than fit a chunk
        labels = part.labelled[one].sum()
        share = drafter.coverage(hidden[one], part.text[one], part.labelled[one])
        figures |= {"candidates": share * labels, "labels": labels}
    figures |= part.counts | {"supervised": part.valid.sum()}
    slots = trunk.tokens.numel()
    return value, figures | {"slots": slots, "padding": slots - trunk.lengths.sum()}


def within(config, function):
    """The function, in the drafter's arithmetic."""

    def run(*args):
        with arithmetic(config):
            return function(*args)

    return run


def compile_parts(drafter: Drafter, backend: str = "inductor") -> None:
    """Let torch.compile fuse the drafter's layers and the target's dense MLPs. What else a target
    does with a tree it cannot follow: it reads sizes from tensors, and layers remember things of
    different names."""
    dense = [m for m in drafter.target.modules() if isinstance(m, MLP)]
    for part in (*drafter.layers, *dense):
        part.compile(dynamic=True, backend=backend)


class Step(nn.Module):
    """`step_loss` as a module, which is what gradients are shared through."""

    def __init__(self, config, drafter: Drafter):
        super().__init__()
        self.config, self.drafter = config, drafter
        if config.recompute:
            for layer in drafter.layers:
                layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)

    def forward(self, part: Blocks, divisor=None):
        return step_loss(self.config, self.drafter, part, divisor)


def gradient(config, share: nn.Module, drafter: Drafter, parts, asked=lambda: False) -> dict:
    """Leave the whole batch's gradient in the drafter -> figures of all parts and processes, as
    plain numbers. share: a `Step`, as `distributed.data_parallel` gives it; asked(): whether this
    process was asked to end, for all to know."""
    sums, size = {}, distributed.num_processes()
    divisor = divisors(config, drafter, parts)  # from here on no process needs the target's layers
    for part in parts:
        silent = size > 1 and part is not parts[-1]  # gradients are sent once
        with share.no_sync() if silent else contextlib.nullcontext():
            value, figures = share(part, divisor)
            (value * size).backward()  # sharing averages, the shares are to be summed
        part.hidden = None  # its graph is gone
        for name, x in (figures | {"loss": value.detach()}).items():
            sums[name] = sums.get(name, 0.0) + torch.as_tensor(x, device=value.device).double()
    sums["asked"] = torch.tensor(float(asked()), device=value.device)
    flat = torch.cat([x.double().flatten() for x in sums.values()])
    found = distributed.all_reduce_sum(flat).split([x.numel() for x in sums.values()])
    found = {name: part.view(x.shape).tolist() for (name, x), part in zip(sums.items(), found)}
    return readable(found)


def readable(sums: dict) -> dict:
    """Means where there are sums: alpha, survival (W,) over valid positions, the share of slots
    that are padding, DFlash 2's coverage."""
    counts = sums.pop("positions", ())
    for name in ("alpha", "survival") if counts else ():
        sums[name] = [x / max(n, 1) for x, n in zip(sums[name], counts)]
    if "candidates" in sums:
        sums["coverage"] = sums.pop("candidates") / max(sums.pop("labels"), 1)
    sums["padding"] = sums["padding"] / sums.pop("slots")
    return sums | {name: int(sums[name]) for name in ("supervised", "nodes", "unmerged", "asked")}


def decode(config, drafter, references, rows, step: int, stop_ids) -> Blocks:
    """The responses of the current drafter to the prompts of these references."""
    prompts = [
        references.tokens[row, : references.prompt_lengths[row]].tolist() for row in rows.tolist()
    ]
    return collect(
        drafter.target,
        drafter,
        prompts,
        config.response_length,
        config.branch_temperature,
        config.seed * 1_000_003 + step,
        stop_ids,
        rows.tolist(),
    )


def next_batch(config, drafter, trunks: Trunks, step, stop_ids, hard=None) -> list[Blocks]:
    """This process's blocks of a step, in --grad-accum parts of similar lengths; each is drawn at
    anchors and with uniforms that depend on seed, step and sequence alone. hard: see
    `draw_anchors`."""
    references, device = trunks.references, drafter.fc.weight.device
    rows = batch_rows(config.seed, step, references.lengths, config.batch_size, config.bucket)
    rows = distributed.own_rows(rows)
    shape = (config.num_anchors, config.num_branches, drafter.config.num_draft_tokens)

    def drawn(rows: Tensor) -> Blocks:
        if config.mode == "rollout":
            made = decode(config, drafter, references, rows, step, stop_ids)
            return draw(config, drafter, made.trunk, made.anchors, None, None, stop_ids, made)
        spans = references.prompt_lengths[rows], references.lengths[rows]
        chances = None if hard is None else hard[rows]
        places = draw_anchors(config.seed, step, rows, *spans, shape, chances)
        places = (None if t is None else t.to(device) for t in places)
        return draw(config, drafter, trunks(rows), *places, stop_ids)

    # a graph is kept where it is used at once; elsewhere blocks run again when they are learned
    with torch.set_grad_enabled(torch.is_grad_enabled() and config.grad_accum == 1):
        return [drawn(part) for part in rows.chunk(config.grad_accum)]


@torch.no_grad()
def hardness(drafter: Drafter, trunks: Trunks, temperature: float) -> Tensor:
    """How often the drafter's first draft would be rejected at each position of the references, no
    less than half the mean over all: (R, T) on the host, as `draw_anchors` wants its chances."""
    references, V = trunks.references, drafter.config.layers.vocab_size
    found = torch.zeros(references.tokens.shape)
    for row, length in enumerate(references.lengths.tolist()):
        trunk = trunks(torch.tensor([row]))
        places = torch.arange(length, device=trunk.tokens.device)
        first = drafter.block(trunk, places[None])[0, :, :1]  # (T, 1, C)
        for part in places.split(max(1, losses.CHUNK_ELEMENTS // V)):
            before = trunk.tokens[0, part, None]
            logits = drafter.logits(first[part, None], before[..., None])[:, 0, 0]  # (n, V)
            p, q = (
                (one.float() / temperature).softmax(-1)
                for one in (drafter.target.head(trunk.hidden[0, part]), logits)
            )
            found[row, part.cpu()] = 1 - losses.acceptance(p, q).cpu()
    inside = torch.arange(found.shape[1]) < references.lengths[:, None]
    return (found + found[inside].mean()) / 2
