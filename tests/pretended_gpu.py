"""Runs on a pretended CUDA device whatever a real one runs, and counts how often the host waits for
it. `tests/slow/test_pretended_gpu.py` starts it in a process of its own, for one architecture:

python -c "import fakecuda; fakecuda.install(); import pretended_gpu; pretended_gpu.main('gqa')"
"""

import dataclasses
import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import fakecuda
import torch

from drafter import PLAIN
from serve import Batch, Options, generate
from small import DRAFTERS, random_tokens, small_drafter, small_target
from small_runs import CONFIG, STOP, small_trunks, written_by
from support import gpu
from support.cpu import sent
from support.measure import Measure
from support.optim import make_optimizers
from support.run import Run
from train import MODES, Step, one_step
from tree import build_tree

KINDS = ("dflash", "dspark rnn", "dflash2")
PROMPT = [1, 2, 3, 4, 5]


def num_waits() -> int:
    """How often the host has waited for the device so far; copies in a queue do not count."""
    return sum(n for (kind, _), n in fakecuda.SYNCS.items() if "non_blocking" not in kind)


class Waits:
    """Notes how often the host waited in named calls; a name that comes again must agree."""

    def __init__(self):
        self.of = {}

    def __call__(self, name: str, function, *arguments, **options):
        before = num_waits()
        result = function(*arguments, **options)
        self.note(name, num_waits() - before)
        return result

    def note(self, name: str, count: int) -> None:
        if self.of.setdefault(name, count) != count:
            raise ValueError(f"{name}: {count} waits, before {self.of[name]}")


def target_there(arch: str, dtype: torch.dtype):
    """A small target on the device, and texts that it wrote on the host."""
    target = small_target(arch=arch)
    references = written_by(target, 3, 6)
    for module in target.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if name not in ("A_log", "dt_bias"):  # as model folders keep them
                parameter.data = parameter.data.to(dtype)
    return target.to("cuda"), references


@torch.no_grad()
def try_parts(target, waits: Waits) -> None:
    """Prefill, propose with each kind of drafter, score."""
    tokens = waits("sent", sent, random_tokens(2, 20), "cuda")
    lengths = torch.tensor([20, 13]).to("cuda")
    anchors = torch.tensor([[6, 12], [7, -1]]).to("cuda")
    trunk = waits("prefill", target.prefill, tokens, lengths)
    for kind in KINDS:
        drafter = small_drafter(target, **DRAFTERS[kind])
        drafter.to("cuda", target.lm_head.weight.dtype)
        how = dict(generator=torch.Generator().manual_seed(0), keep_probs=True)
        proposal = waits("propose", drafter.propose, trunk, anchors, 2, PLAIN, **how)
    tree = waits("tree", build_tree, tokens, lengths, anchors, proposal.tokens)
    waits("score", target.score, trunk, tree)


@torch.no_grad()
def try_decoding(target, waits: Waits) -> None:
    """Rounds of a single text, drawn and greedy; not the last one, which drops the row."""
    drafter = small_drafter(target).to("cuda", target.lm_head.weight.dtype)
    for sampling in (PLAIN, Options.sampling):
        batch = Batch(target, drafter, {0: PROMPT}, Options(16, sampling))
        for _ in range(2):  # of 16 tokens, which need more than three rounds
            waits("round", batch.round)


def try_steps(target, references, waits: Waits) -> None:
    """A training step of each mode and kind; of a rollout, only what is not a round of decoding."""
    precision = str(target.lm_head.weight.dtype).removeprefix("torch.")
    for mode, kind in itertools.product(MODES, KINDS):
        drafter = small_drafter(target, **DRAFTERS[kind]).to("cuda")
        how = dict(mode=mode, precision=precision, batch_size=2, response_length=6)
        config = dataclasses.replace(CONFIG, **how)
        trunks = small_trunks(target, references, 0.0)
        step_module = Step(config, drafter)
        run = Run(
            config,
            drafter,
            trunks,
            Measure([PROMPT], 4, STOP, 0),
            Path(),
            made_with={},
            objective=step_module.objective,
            optimizers=make_optimizers(drafter, config.matrix_lr, config.lr),
            step_module=step_module,
        )
        in_rounds = WaitsInRounds()
        before = num_waits()
        one_step(run, 0)
        in_rounds.stop()
        waits.note(mode, num_waits() - before - in_rounds.count)


class WaitsInRounds:
    """Adds up the waits inside rounds of decoding until it is stopped."""

    def __init__(self):
        self.count = 0
        self.round = Batch.round
        Batch.round = lambda batch: self.watch(batch)

    def watch(self, batch: Batch) -> None:
        before = num_waits()
        self.round(batch)
        self.count += num_waits() - before

    def stop(self) -> None:
        Batch.round = self.round


def pretend_more() -> None:
    """What fakecuda leaves out: pinned memory, and the size of the device's own."""
    memory = 80 * 2**30
    torch.Tensor.pin_memory = lambda tensor: tensor
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(total_memory=memory)
    torch.cuda.mem_get_info = lambda *_: (memory, memory)


def main(arch: str) -> None:
    torch.set_num_threads(1)
    fakecuda.STATE.raise_on_fault = False
    gpu.KERNEL_DEVICES = ()  # they are not pretended
    pretend_more()
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        fakecuda.clear()
        waits = Waits()
        target, references = target_there(arch, dtype)
        generate(target, None, [PROMPT, PROMPT[:2]], 3)  # what is done once is not counted
        try_parts(target, waits)
        try_decoding(target, waits)
        try_steps(target, references, waits)
        faults = [f"{what} at {where}" for what, where in fakecuda.FAULTS]
        sites = {f"{kind} at {where}": n for (kind, where), n in fakecuda.SYNCS.items()}
        name = str(dtype).removeprefix("torch.")
        found[name] = {"waits": waits.of, "faults": faults, "sites": sites}
    print(json.dumps(found))
