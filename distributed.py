"""Several processes, one batch.

    torchrun --nproc_per_node=8 train.py --mode specopd --target FOLDER --drafter FOLDER ...

Every process has the whole target and drafter and takes every n-th sequence of a batch. Branches
depend on seed, step and sequence alone, and a loss is a sum over a denominator of the whole batch
(`total`), so the gradient is the same however many processes there are. Gradients go through
DistributedDataParallel; the first process writes, prints and measures.

    pytest tests/test_distributed.py
"""

import datetime
import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

PATIENCE = datetime.timedelta(hours=2)  # the others wait while the first one measures


def start(device: str) -> str:
    """Join the processes that torchrun started, if it did -> this one's device."""
    if "RANK" not in os.environ:
        return device
    if device.startswith("cuda"):
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.startswith("cuda") else "gloo", timeout=PATIENCE)
    if rank():
        sys.stdout = open(os.devnull, "w")
    return device


def stop() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def total(x: Tensor) -> Tensor:
    """The sum of x over all processes, without a gradient."""
    if size() == 1:
        return x
    x = x.detach().clone()
    dist.all_reduce(x)
    return x


def in_turn(make):
    """make() on the first process, and then, when what it makes is there, on the others."""
    if rank():
        dist.barrier()
        return make()
    made = make()
    if size() > 1:
        dist.barrier()
    return made


def own(rows: Tensor) -> Tensor:
    """This process's part of a batch (n,)."""
    return rows[rank() :: size()]


def shared(module: nn.Module, unused: bool = False) -> nn.Module:
    """A module whose parameters' gradients are averaged over the processes in backward(). unused:
    not all of them get one."""
    if size() == 1:
        return module
    devices = [next(module.parameters()).device]
    return DistributedDataParallel(
        module, devices if devices[0].type == "cuda" else None, find_unused_parameters=unused
    )
