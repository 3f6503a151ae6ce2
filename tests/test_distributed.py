"""One batch on one, two or four processes gives one gradient. `pytest tests/test_distributed.py`"""

import dataclasses
import json
import os
import socket
import subprocess
import sys

import pytest
import torch
from conftest import ARCHS, DRAFTERS, ROOT, small_drafter, small_target
from test_train import CONFIG, STOP

from drafter import Drafter
from serve import generate
from step import Step, gradient, next_batch
from support import distributed
from support.data import References
from support.measure import Measure
from support.prepare import Trunks
from target import Target
from train import MODES

CASES = [(arch, mode, "dflash") for arch in ARCHS for mode in MODES]
CASES += [("gqa", mode, kind) for mode in ("ce", "specopd") for kind in ("dspark rnn", "dflash2")]


def gradients(arch: str, mode: str, variant: str, target=None) -> dict:
    """Of one step on a batch of four references, this process's share of it; of two processes each
    works on one reference at a time. In float64 where it can be, as test_train's batch in parts."""
    if not target:
        target = small_target(arch=arch)
        target = target.double() if arch == "gqa" else target
    prompts = torch.randint(0, 20, (6, 6), generator=torch.Generator().manual_seed(0)).tolist()
    texts = [r.tokens for r in generate(target, None, prompts, 16, 1.0, 0, STOP)]
    references = References.from_lists(prompts, texts, 0)
    drafter = small_drafter(target, **DRAFTERS[variant]).to(target.lm_head.weight.dtype)
    config = dataclasses.replace(
        CONFIG,
        mode=mode,
        batch_size=4,
        response_length=16,
        ce_weight=0.1,
        grad_accum=2 if distributed.num_processes() == 2 else 1,
    )
    if distributed.rank() == 0:  # only one measures; the others must not be in its way
        Measure([[1, 2, 3]], 8, STOP, 0)(target, drafter, 1.0)
    share = distributed.data_parallel(Step(config, drafter))
    parts = next_batch(config, drafter, Trunks(target, references, 0.0), 1, STOP)
    assert len(parts) == config.grad_accum
    figures = gradient(config, share, drafter, parts)
    found = {n: p.grad.clone() for n, p in drafter.named_parameters() if p.grad is not None}
    kept = ("loss", "supervised", "alpha", "survival", "nodes", "unmerged")
    return found | {n: torch.tensor(figures[n]).double() for n in kept if n in figures}


def worker(number: int, size: int, port: int, out: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(number),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(number),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    distributed.start("cpu")
    found = {" ".join(case): gradients(*case) for case in CASES}
    if number == 0:
        torch.save(found, out)
    distributed.stop()


def sharded_worker(number: int, size: int, port: int, folder: str, out: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(number),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(number),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    distributed.start("cpu")
    found = {}
    for arch in ARCHS:
        target = Target.from_pretrained(f"{folder}/{arch}", shard=True)
        target.num_tokens = small_target(arch=arch).num_tokens
        parts = [
            p.to_local().numel() if hasattr(p, "to_local") else p.numel()
            for p in target.model.layers.parameters()
        ]
        with torch.no_grad():
            found[arch] = {"logits": target(TEXT), "held": torch.tensor(sum(parts))}
        found |= {f"{arch} {mode}": gradients(arch, mode, "dflash", target) for mode in MODES}
        distributed.barrier()
        distributed._paces.clear()
    if number == 0:
        torch.save(found, out)
    distributed.stop()


TEXT = torch.arange(36).view(2, 18) % 20


def test_a_target_spread_over_two_processes_says_and_teaches_the_same(tmp_path):
    """Though they want it unequally often: rollouts end when they end, and one process measures."""
    for arch in ARCHS:
        small_target(arch=arch).save_pretrained(tmp_path / arch, eos_token_id=21, pad_token_id=0)
    args = 2, free_port(), str(tmp_path), str(tmp_path / "found.pt")
    torch.multiprocessing.spawn(sharded_worker, args, nprocs=2)
    found = torch.load(tmp_path / "found.pt")
    for arch in ARCHS:
        target = Target.from_pretrained(tmp_path / arch)
        target.num_tokens = small_target(arch=arch).num_tokens
        whole = sum(p.numel() for p in target.model.layers.parameters())
        assert found[arch]["held"] < 0.65 * whole  # half, and what stays whole
        p, own_p = found[arch]["logits"].softmax(-1), target(TEXT).softmax(-1)
        torch.testing.assert_close(p, own_p, atol=3e-5, rtol=0)  # matrices are laid out otherwise
        for mode in MODES:
            alone = gradients(arch, mode, "dflash", target)
            spread = found[f"{arch} {mode}"]
            for name, tensor in alone.items():
                scale = max(tensor.abs().max().item(), 1.0)
                gap = (tensor - spread[name]).abs().max().item() / scale
                assert gap < (1e-6 if arch == "gqa" else 5e-6), (arch, mode, name, gap)


def test_tensors_to_be_sent_are_where_the_backend_wants_them(monkeypatch):
    assert distributed.device() == "cpu"
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "nccl")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert distributed.device() == "cuda:3"


def test_a_run_on_a_spread_target_is_the_run_on_a_whole_one_and_does_not_hang(folders, tmp_path):
    """Processes out of step: one measures after every step, rollouts end when they end."""
    made = train(folders, tmp_path, 0, "--out", "one", "--eval-every", 1)
    assert made.returncode == 0, made.stderr
    given = ("--references", "one/references.safetensors", "--eval-every", 1, "--cache-gib", 0)
    logs = []
    for mode in ("specopd", "rollout"):
        asked = ("--out", "two", "--mode", mode, "--shard-target")
        spread = train(folders, tmp_path, 2, *asked, *given)
        assert spread.returncode == 0, spread.stderr
        logs.append([json.loads(line) for line in (tmp_path / f"two/{mode}/log.jsonl").open()])
        assert len(logs[-1]) == 4 and all("al_t0" in record for record in logs[-1])
    alone = [json.loads(line) for line in (tmp_path / "one/specopd/log.jsonl").open()]
    for one, two in zip(alone, logs[0]):
        assert one["supervised"] == two["supervised"] > 0
        assert one["loss"] == pytest.approx(two["loss"], abs=1e-5)
    refused = train(folders, tmp_path, 2, "--out", "odd", "--shard-target")
    assert refused.returncode != 0 and "--references FILE" in refused.stderr
    alone = train(folders, tmp_path, 0, "--out", "odd", "--shard-target", *given)
    assert alone.returncode == 2 and "torchrun" in alone.stderr


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.mark.parametrize("size", [2, 4])
def test_the_gradient_does_not_depend_on_the_number_of_processes(tmp_path, size):
    out = tmp_path / "gradients.pt"
    torch.multiprocessing.spawn(worker, (size, free_port(), str(out)), nprocs=size)
    found = torch.load(out)
    for case in CASES:
        alone, together = gradients(*case), found[" ".join(case)]
        assert alone.keys() == together.keys() and alone["supervised"] > 40
        for name, tensor in alone.items():
            scale = max(tensor.abs().max().item(), 1.0)
            gap = (tensor - together[name]).abs().max().item() / scale
            assert gap < (1e-6 if case[0] == "gqa" else 5e-6), (case, name, gap)


def command(folders, processes: int, *flags) -> list[str]:
    """A small run of train.py, by torchrun where there are processes."""
    start = (
        [
            "-m",
            "torch.distributed.run",
            f"--nproc_per_node={processes}",
            f"--master_port={free_port()}",
        ]
        if processes
        else []
    )
    small = """--mode specopd --steps 4 --batch-size 4 --num-anchors 4 --num-references 8
        --prompt-length 16 --response-length 24 --eval-prompts 4 --eval-tokens 8 --save-every 2
        --warmup 1 --matrix-lr 0 --lr 1e-4""".split()
    given = ("--target", folders / "target", "--drafter", folders / "drafter", *flags)
    return [sys.executable, *start, *map(str, (ROOT / "train.py", *small, *given))]


def train(folders, cwd, processes: int, *flags):
    return subprocess.run(
        command(folders, processes, *flags),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def test_torchrun_trains_resumes_on_another_number_and_says_what_does_not_fit(folders, tmp_path):
    for done in (
        train(folders, tmp_path, 2, "--out", "two", "--stop-after", 2),
        train(folders, tmp_path, 0, "--out", "two"),  # one process goes on where two stopped
        train(folders, tmp_path, 0, "--out", "one"),
    ):
        assert done.returncode == 0, done.stderr
    texts = [(tmp_path / out / "specopd/log.jsonl").read_text() for out in ("two", "one")]
    logs = [[json.loads(line) for line in text.splitlines()] for text in texts]
    assert [[r["step"] for r in log] for log in logs] == [[1, 2, 3, 4]] * 2
    for two, one in zip(*logs):
        assert two["supervised"] == one["supervised"] and two["nodes"] == one["nodes"]
        assert two["loss"] == pytest.approx(one["loss"], abs=1e-5)
        assert two["alpha"] == pytest.approx(one["alpha"], abs=1e-5)
    target = Target.from_pretrained(folders / "target")
    weights = [
        Drafter.from_pretrained(tmp_path / out / "specopd", target, torch.float32).fc.weight
        for out in ("two", "one")
    ]
    torch.testing.assert_close(*weights, atol=1e-3, rtol=0)
    refused = train(folders, tmp_path, 2, "--out", "odd", "--batch-size", 3)
    assert refused.returncode != 0 and "--batch-size 3 is no multiple of the 2" in refused.stderr
