"""Small training runs for tests: a config, references, one batch, its loss by hand, the gradient on
several processes, and train.py as a command."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

import loss as losses
import train as training
from drafter import PLAIN, Sampling
from serve import generate
from small import DRAFTERS, ROOT, free_port, run, small_drafter, small_target
from support import distributed
from support.measure import Measure
from support.prepare import Trunks, batch_rows
from support.references import References
from train import TrainConfig

STOP = (21,)
W = 4  # of all small drafters
CONFIG = TrainConfig(
    mode="specopd",
    steps=4,
    batch_size=3,
    num_anchors=4,
    num_branches=2,
    eval_every=2,
    num_eval_prompts=2,
    eval_tokens=8,
    save_every=1,
    ce_decay=4.0,
    device="cpu",
)


def written_by(target, num_prompts: int, length: int, seed: int = 0) -> References:
    """References of prompts of 6 tokens and responses of at most `length`."""
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(0, 20, (num_prompts, 6), generator=generator).tolist()
    results = generate(target, None, prompts, length, PLAIN, seed, STOP)
    return References.from_lists(prompts, [r.tokens for r in results], 0)


def target_and_references(seed: int = 0) -> tuple:
    """A small target and ten texts that it wrote."""
    target = small_target()
    return target, written_by(target, 10, 20, seed)


def small_trunks(target, references, cache_gib: float = 1.0) -> Trunks:
    return Trunks(target, references, target.tap_ids, cache_gib)


def draw(seed: int, step: int, ids, prompt_lengths, lengths, shape) -> tuple:
    """-> what a step draws for its references: anchors (B,A), uniforms (B,A,K,W)."""
    generators = [training.sequence_generator(seed, step, i) for i in ids.tolist()]
    anchors = training.draw_anchors(generators, prompt_lengths, lengths, shape[0])
    return anchors, training.draw_uniforms(generators, *shape)[:, : anchors.shape[1]]


def one_batch(target, references, config=CONFIG, step: int = 0) -> tuple:
    """-> (trunk, anchors, uniforms) of the step's references."""
    rows = batch_rows(config.seed, step, references.lengths, config.batch_size)
    spans = references.prompt_lengths[rows], references.lengths[rows]
    shape = (config.num_anchors, config.num_branches, W)
    drawn = draw(config.seed, step, rows, *spans, shape)
    return small_trunks(target, references)(rows), *drawn


def blocks_of(config, drafter, trunk, anchors, uniforms) -> losses.Blocks:
    """What a step of `config.mode` learns from."""
    objective = training.objective_of(config, drafter)
    if config.mode == "specopd":
        return training.tree_blocks(config, objective, drafter, trunk, anchors, uniforms, STOP)
    return training.text_blocks(objective, drafter, trunk, anchors, STOP)


# ------------------------------------------------------------------------- a step, branch by branch


def branch_alone(config, drafter, text: list, ids: list, hidden) -> dict:
    """p from a plain run of the text and the branch's ids, q from the block's hidden (1,W,C)."""
    if STOP[0] in ids:
        ids = ids[: ids.index(STOP[0]) + 1]
    behind = len(text) - 1
    p = drafter.target(torch.tensor([text + ids]))[0, behind : behind + len(ids)].softmax(-1)
    tokens = torch.tensor(ids + [0] * (W - len(ids)))
    previous = torch.tensor([[text[-1], *tokens.tolist()[:-1]]])
    valid = torch.arange(W) < len(ids)
    labels = None
    if config.mode == "ce":
        labels = tokens[None]
        valid &= tokens < drafter.target.num_tokens  # q never holds such a label
    branch = {
        "p": F.pad(p, (0, 0, 0, W - len(ids))),
        "q_logits": drafter.logits(hidden, previous, labels)[0],
        "unary_logits": drafter.unary_logits(hidden)[0],
        "tokens": tokens,
        "valid": valid,
    }
    if drafter.has_confidence:
        detached = config.mode != "ce"
        branch["confidence"] = drafter.confidence_logits(hidden, previous, detached)[0].sigmoid()
    return branch


def step_by_hand(config, drafter, trunk, anchors, uniforms) -> tuple:
    """-> the loss of a step and the number of its positions, every branch by itself."""
    drawn = Sampling(config.branch_temperature)
    how = dict(uniforms=uniforms, num_greedy=config.num_greedy)
    proposal = drafter.propose(trunk, anchors, config.num_branches, drawn, **how)
    branches = []
    for b, a in (anchors >= 0).nonzero().tolist():
        anchor, text = int(anchors[b, a]), trunk.tokens[b, : trunk.lengths[b]].tolist()
        ahead = text[anchor + 1 : anchor + 1 + W]
        drafts = proposal.tokens[b, a].tolist() if config.mode == "specopd" else []
        if config.mode != "specopd" or config.text_branch:
            drafts.append(ahead)
        for ids in drafts:
            hidden = proposal.hidden[b, a]
            branches.append(branch_alone(config, drafter, text[: anchor + 1], ids, hidden))
    each = {name: torch.stack([branch[name] for branch in branches]) for name in branches[0]}
    p, q_logits, valid = each["p"], each["q_logits"], each["valid"]
    alpha = torch.minimum(p, q_logits.softmax(-1)).sum(-1)
    weights = valid * torch.exp(-torch.arange(W) / config.ce_decay)
    if config.mode != "ce":
        value = losses.e2e_tv(p, q_logits.softmax(-1), valid)
    else:
        labels = (each["tokens"], valid, config.ce_decay)
        value = losses.ce(q_logits, *labels)
        if drafter.config.kind == "dspark":
            value = 0.1 * value + 0.9 * 2 * ((1 - alpha) * weights).sum() / weights.sum()
        if drafter.config.kind == "dflash2":
            value = value + losses.ce(each["unary_logits"], *labels)
    if drafter.has_confidence:
        confidence, label = each["confidence"], alpha.detach()
        bce = -(label * confidence.log() + (1 - label) * (1 - confidence).log())
        value = value + (bce * weights).sum() / weights.sum()
    return value, valid.sum()


# ----------------------------------------------------------------------------- several processes


def gradients(arch: str, mode: str, variant: str, target=None) -> dict:
    """Of one step on a batch of four references; on several processes, of this one's share. On two
    processes each works on one reference at a time. In float64 where it can be: where p and q agree
    to float32's rounding, that rounding decides which is smaller, and the slope jumps."""
    if not target:
        target = small_target(arch=arch)
        target = target.double() if arch == "gqa" else target
    references = written_by(target, 6, 16)
    drafter = small_drafter(target, **DRAFTERS[variant]).to(target.lm_head.weight.dtype)
    grad_accum = 2 if distributed.num_processes() == 2 else 1
    how = dict(mode=mode, batch_size=4, response_length=16, grad_accum=grad_accum)
    config = dataclasses.replace(CONFIG, **how)
    Measure([[1, 2, 3], [4], [5, 6]], 8, STOP, 0)(target, drafter, 1.0)  # by all together
    step_module = distributed.data_parallel(training.Step(config, drafter))
    trunks = small_trunks(target, references, 0.0)
    parts = training.next_batch(config, drafter, trunks, 1, STOP)
    assert len(parts) == grad_accum
    figures = training.gradient(config, step_module, drafter, parts)
    tensors = {n: p.grad.clone() for n, p in drafter.named_parameters() if p.grad is not None}
    for name in ("loss", "supervised", "alpha", "survival", "nodes", "unmerged"):
        if name in figures:
            tensors[name] = torch.tensor(figures[name]).double()
    return tensors


def join_processes(number: int, size: int, port: int) -> None:
    """Make this process number `number` of `size`, as torchrun does."""
    torch.set_num_threads(1)
    environment = {"RANK": number, "WORLD_SIZE": size, "LOCAL_RANK": number, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in environment.items()}
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    distributed.start("cpu")


def gradients_worker(number: int, size: int, port: int, cases: list, path: str) -> None:
    join_processes(number, size, port)
    tensors = {" ".join(case): gradients(*case) for case in cases}
    if number == 0:
        torch.save(tensors, path)
    distributed.stop()


def gradients_together(cases: list, size: int, path: Path) -> dict:
    """The gradients of each case, on `size` processes."""
    arguments = (size, free_port(), cases, str(path))
    torch.multiprocessing.spawn(gradients_worker, arguments, nprocs=size)
    return torch.load(path)


def gradient_gap(tensors: dict, wanted: dict) -> float:
    """The largest difference, as a share of the tensor's largest value if that is above 1."""
    assert tensors.keys() == wanted.keys()
    return max(
        ((tensors[name] - x).abs().max() / x.abs().max().clamp(min=1)).item()
        for name, x in wanted.items()
    )


# ------------------------------------------------------------------------------ whole small runs


def train_in_parts(out: Path, mode: str, stops: list[int]) -> tuple[dict, list]:
    """Train in as many parts as there are stops (0: to the end); each part starts from nothing but
    the folder -> (weights, records of the log)."""
    for stop in stops:
        target, references = target_and_references()
        drafter = small_drafter(target)
        measure = Measure([[1, 2, 3], [4, 5]], CONFIG.eval_tokens, STOP, 0)
        config = dataclasses.replace(CONFIG, mode=mode, stop_after=stop)
        training.train(config, drafter, small_trunks(target, references), measure, out)
    log = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return drafter.state_dict(), log


SMALL_RUN = dict(  # as a file, because some of it means nothing in some modes
    mode="specopd",
    steps=4,
    batch_size=4,
    num_anchors=4,
    num_references=8,
    prompt_length=16,
    response_length=24,
    num_eval_prompts=4,
    corpus=str(ROOT / "README.md"),
    eval_tokens=8,
    save_every=2,
    matrix_lr=0.0,
    lr=1e-3,
)


def train_arguments(folders, processes: int, *flags) -> list:
    """What follows `python`: a small run of train.py, by torchrun where there are processes."""
    torchrun = ["-m", "torch.distributed.run", f"--nproc_per_node={processes}"]
    start = [*torchrun, f"--master_port={free_port()}"] if processes else []
    pair = ("--target", folders / "target", "--drafter", folders / "drafter")
    path = folders / "small_run.json"
    path.write_text(json.dumps(SMALL_RUN))
    return [*start, ROOT / "train.py", "--config", path, *pair, *flags]


def train_command(folders, processes: int, *flags) -> list[str]:
    return [sys.executable, *map(str, train_arguments(folders, processes, *flags))]


def train_by_command(folders, cwd, processes: int, *flags) -> subprocess.CompletedProcess:
    return run(*train_arguments(folders, processes, *flags), cwd=cwd)
