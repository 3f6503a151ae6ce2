"""One batch on one, two or four processes gives one gradient."""

import dataclasses
import os

import pytest
import torch

from drafter import Sampling
from serve import generate
from small import ARCHS, DRAFTERS, free_port, small_drafter, small_target
from small_runs import CONFIG, STOP
from support import distributed
from support.data import References
from support.measure import Measure
from support.prepare import Trunks
from target import Target
from train import MODES, Step, gradient, next_batch

CASES = [(arch, mode, "dflash") for arch in ARCHS for mode in MODES]
CASES += [("gqa", mode, kind) for mode in ("ce", "specopd") for kind in ("dspark rnn", "dflash2")]
FIGURES = ("loss", "supervised", "alpha", "survival", "nodes", "unmerged")


def test_tensors_to_be_sent_are_where_the_backend_wants_them(monkeypatch):
    assert distributed.message_device() == "cpu"
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "nccl")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert distributed.message_device() == "cuda:3"


def test_a_single_process_is_the_main_one_and_works_on_everything():
    assert distributed.is_main() and distributed.num_processes() == 1
    assert distributed.gather_numbers([3, -1]) == [[3, -1]]
    rows = torch.arange(5)
    assert torch.equal(distributed.own_rows(rows), rows)
    module = torch.nn.Linear(1, 1)
    assert distributed.data_parallel(module) is module
    assert distributed.main_process_first(lambda: "made") == "made"
    with pytest.raises(ValueError, match="--shard-target needs several processes: torchrun"):
        distributed.load_sharded_target("anywhere")


# ------------------------------------------------------------------------------- several processes


def gradients(arch: str, mode: str, variant: str, target=None) -> dict:
    """One step's gradient and figures on a batch of four references; of two processes each works on
    one reference at a time. In float64 where it can be: rounding decides which of p and q is
    smaller where they agree, and the slope of min(p, q) jumps there."""
    if not target:
        target = small_target(arch=arch)
        target = target.double() if arch == "gqa" else target
    prompts = torch.randint(0, 20, (6, 6), generator=torch.Generator().manual_seed(0)).tolist()
    results = generate(target, None, prompts, 16, Sampling(1.0), 0, STOP)
    references = References.from_lists(prompts, [r.tokens for r in results], 0)
    drafter = small_drafter(target, **DRAFTERS[variant]).to(target.lm_head.weight.dtype)
    grad_accum = 2 if distributed.num_processes() == 2 else 1
    changes = dict(mode=mode, batch_size=4, response_length=16, grad_accum=grad_accum)
    config = dataclasses.replace(CONFIG, **changes)
    if distributed.is_main():  # only one process measures; the others must not be in its way
        Measure([[1, 2, 3]], 8, STOP, 0)(target, drafter, 1.0)
    step_module = distributed.data_parallel(Step(config, drafter))
    trunks = Trunks(target, references, drafter.config.target_layer_ids, 0.0)
    parts = next_batch(config, drafter, trunks, 1, STOP)
    assert len(parts) == grad_accum
    figures = gradient(config, step_module, drafter, parts)
    grads = {n: p.grad.clone() for n, p in drafter.named_parameters() if p.grad is not None}
    return grads | {n: torch.tensor(figures[n]).double() for n in FIGURES if n in figures}


def largest_gap(alone: dict, together: dict) -> float:
    assert alone.keys() == together.keys()
    return max(
        (tensor - together[name]).abs().max().item() / max(tensor.abs().max().item(), 1.0)
        for name, tensor in alone.items()
    )


def join(number: int, size: int, port: int) -> None:
    """Become one of `size` processes, as torchrun would have it."""
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(number),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(number),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    distributed.start("cpu")


def worker(number: int, size: int, port: int, path: str) -> None:
    join(number, size, port)
    assert distributed.gather_numbers([number, 7]) == [[n, 7] for n in range(size)]
    together = {" ".join(case): gradients(*case) for case in CASES}
    if distributed.is_main():
        torch.save(together, path)
    distributed.stop()


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_the_gradient_does_not_depend_on_the_number_of_processes(tmp_path, size):
    path = tmp_path / "gradients.pt"
    torch.multiprocessing.spawn(worker, (size, free_port(), str(path)), nprocs=size)
    together = torch.load(path)
    for case in CASES:
        alone = gradients(*case)
        assert alone["supervised"] > 40
        gap = largest_gap(alone, together[" ".join(case)])
        assert gap < (1e-6 if case[0] == "gqa" else 5e-6), case


TEXT = torch.arange(36).view(2, 18) % 20


def sharded_worker(number: int, size: int, port: int, folder: str, path: str) -> None:
    join(number, size, port)
    spread = {}
    for arch in ARCHS:
        target = distributed.load_sharded_target(f"{folder}/{arch}")
        target.num_tokens = small_target(arch=arch).num_tokens
        parts = [
            p.to_local() if hasattr(p, "to_local") else p for p in target.model.layers.parameters()
        ]
        with torch.no_grad():
            spread[arch] = {"logits": target(TEXT), "numbers": sum(p.numel() for p in parts)}
        spread |= {f"{arch} {mode}": gradients(arch, mode, "dflash", target) for mode in MODES}
        distributed.barrier()
        distributed._locksteps.clear()  # a process may spread one target
    if distributed.is_main():
        torch.save(spread, path)
    distributed.stop()


@pytest.mark.slow
def test_a_target_spread_over_two_processes_says_and_teaches_the_same(tmp_path):
    """Though they want it unequally often: rollouts end when they end, and one process measures."""
    for arch in ARCHS:
        small_target(arch=arch).save_pretrained(tmp_path / arch, eos_token_id=21, pad_token_id=0)
    path = tmp_path / "spread.pt"
    arguments = (2, free_port(), str(tmp_path), str(path))
    torch.multiprocessing.spawn(sharded_worker, arguments, nprocs=2)
    spread = torch.load(path)
    for arch in ARCHS:
        target = Target.from_pretrained(tmp_path / arch)
        target.num_tokens = small_target(arch=arch).num_tokens
        whole = sum(p.numel() for p in target.model.layers.parameters())
        assert spread[arch]["numbers"] < 0.65 * whole  # half, and what stays whole
        p = spread[arch]["logits"].softmax(-1)
        torch.testing.assert_close(p, target(TEXT).softmax(-1), atol=3e-5, rtol=0)
        for mode in MODES:
            gap = largest_gap(gradients(arch, mode, "dflash", target), spread[f"{arch} {mode}"])
            assert gap < (1e-6 if arch == "gqa" else 5e-6), (arch, mode)
