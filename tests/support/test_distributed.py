"""One batch on one, two or four processes gives one gradient."""

import pytest
import torch

from small import ARCHS, free_port, small_target
from small_runs import gradient_gap, gradients, gradients_together, join_processes
from support import distributed
from support.fingerprint import weights_fingerprint
from target import Target
from train import MODES

CASES = [(arch, mode, "dflash") for arch in ARCHS for mode in MODES]
CASES += [("gqa", mode, kind) for mode in ("ce", "specopd") for kind in ("dspark rnn", "dflash2")]


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


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_the_gradient_does_not_depend_on_the_number_of_processes(tmp_path, size):
    together = gradients_together(CASES, size, tmp_path / "gradients.pt")
    for case in CASES:
        alone = gradients(*case)
        assert alone["supervised"] > 40
        gap = gradient_gap(together[" ".join(case)], alone)
        assert gap < (1e-6 if case[0] == "gqa" else 5e-6), case


def numbers_worker(number: int, size: int, port: int) -> None:
    join_processes(number, size, port)
    assert distributed.is_main() == (number == 0) and distributed.num_processes() == size
    assert distributed.gather_numbers([number, 2**40]) == [[n, 2**40] for n in range(size)]
    assert distributed.own_rows(torch.arange(5)).tolist() == list(range(5))[number::size]
    order = []
    distributed.main_process_first(lambda: order.append(number))
    assert order == [number]
    distributed.stop()


@pytest.mark.slow
def test_every_process_learns_every_processs_numbers():
    torch.multiprocessing.spawn(numbers_worker, (3, free_port()), nprocs=3)


def memory_worker(number: int, size: int, port: int) -> None:
    join_processes(number, size, port)
    module = distributed.data_parallel(torch.nn.Sequential(torch.nn.Linear(3, 2, bias=False)))
    lists = [torch.full((2,), float(number)) for _ in range(size)]
    distributed.share(lists)
    assert [x.tolist() for x in lists] == [[n, n] for n in range(size)]
    for _ in range(2):
        module.zero_grad()
        module(torch.full((1, 3), number + 1.0)).sum().backward()
        assert all(p.grad._is_view() for p in module.parameters())  # of the messages' memory
        assert all((p.grad == (size + 1) / 2).all() for p in module.parameters())
    distributed.stop()


@pytest.mark.slow
def test_a_gradient_exists_once_and_tensors_are_shared_by_number():
    torch.multiprocessing.spawn(memory_worker, (3, free_port()), nprocs=3)


TEXT = torch.arange(36).view(2, 18) % 20


def sharded_worker(number: int, size: int, port: int, folder: str, path: str) -> None:
    join_processes(number, size, port)
    spread = {}
    for arch in ARCHS:
        target = distributed.load_sharded_target(f"{folder}/{arch}")
        target.num_tokens = small_target(arch=arch).num_tokens
        parts = [
            p.to_local() if hasattr(p, "to_local") else p for p in target.model.layers.parameters()
        ]
        with torch.no_grad():
            spread[arch] = {"logits": target(TEXT), "size": sum(p.numel() for p in parts)}
        spread |= {f"{arch} {mode}": gradients(arch, mode, "dflash", target) for mode in MODES}
        distributed.barrier()
        distributed._locksteps.clear()  # a process spreads one target at a time
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
        assert spread[arch]["size"] < 0.65 * whole  # half, and what stays whole
        p = spread[arch]["logits"].softmax(-1)
        torch.testing.assert_close(p, target(TEXT).softmax(-1), atol=3e-5, rtol=0)
        for mode in MODES:
            alone = gradients(arch, mode, "dflash", target)
            gap = gradient_gap(spread[f"{arch} {mode}"], alone)
            assert gap < (1e-6 if arch == "gqa" else 5e-6), (arch, mode)


def fingerprint_worker(number: int, size: int, port: int, folder: str) -> None:
    join_processes(number, size, port)
    for arch in ARCHS:
        whole = Target.from_pretrained(f"{folder}/{arch}")
        spread = distributed.load_sharded_target(f"{folder}/{arch}")
        assert any(hasattr(p, "device_mesh") for p in spread.parameters())
        alone = weights_fingerprint(whole)
        assert weights_fingerprint(spread) == alone
        with torch.no_grad():
            for p in spread.model.layers[2].parameters():
                (p.to_local() if hasattr(p, "device_mesh") else p)[-1:] += 1
        assert weights_fingerprint(spread)["weights"] != alone["weights"]
        distributed.barrier()
        distributed._locksteps.clear()  # a process spreads one target at a time
    distributed.stop()


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_the_fingerprint_of_a_spread_target_is_that_of_a_whole_one(tmp_path, size):
    for arch in ARCHS:
        small_target(arch=arch).save_pretrained(tmp_path / arch, eos_token_id=21, pad_token_id=0)
    torch.multiprocessing.spawn(fingerprint_worker, (size, free_port(), str(tmp_path)), nprocs=size)
