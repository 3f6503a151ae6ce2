"""Several processes, one batch.

    torchrun --nproc_per_node=8 train.py --mode specopd --target FOLDER --drafter FOLDER ...

Every process has the drafter and takes every n-th sequence of a batch. Branches depend on seed,
step and sequence alone, and a loss is a sum over a denominator of the whole batch (`total`), so the
gradient is the same however many processes there are. Gradients go through
DistributedDataParallel; the first process writes, prints and measures.

The target is whole on every process, or its layers are spread over all of them (`shard`, FSDP2) and
each layer is gathered while it runs. Then a process can run it only together with the others, and
they may want it at different times and unequally often: rollouts end when they end, and AL is
measured by one. So whoever calls it says so first, and whoever waits for the others (in `total`)
runs it along with them, on nothing, until all wait (`Pace`).

    pytest tests/test_distributed.py
"""

import datetime
import itertools
import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hf.tensors import TABLE
from tree import causal_view

PATIENCE = datetime.timedelta(hours=2)  # the others wait while the first one measures
JOINING = datetime.timedelta(seconds=50)  # until all have begun


def start(place: str) -> str:
    """Join the processes that torchrun started, if it did -> this one's device."""
    if "RANK" not in os.environ:
        return place
    if place.startswith("cuda"):
        place = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(place)
    try:
        store, number, count = next(dist.rendezvous("env://", timeout=JOINING))
    except RuntimeError as error:
        raise ValueError(
            "the processes did not meet (a port in use, or fewer of them than "
            f"WORLD_SIZE): {str(error).splitlines()[0]:.200}"
        ) from None
    store.set_timeout(PATIENCE)
    dist.init_process_group(
        "nccl" if place.startswith("cuda") else "gloo",
        timeout=PATIENCE,
        store=store,
        rank=number,
        world_size=count,
    )
    if rank():
        sys.stdout = open(os.devnull, "w")
    return place


def stop() -> None:
    if dist.is_initialized():
        barrier()  # nobody leaves while another may need it
        _paces.clear()
        dist.destroy_process_group()


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def num_processes() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def all_reduce_sum(x: Tensor) -> Tensor:
    """The sum of x over all processes, without a gradient."""
    if num_processes() == 1:
        return x
    for pace in _paces:
        pace.wait()
    x = x.detach().clone()
    dist.all_reduce(x)
    return x


def barrier() -> None:
    """Wait for all processes, running a sharded module along with those that still want it; before
    messages that are none of ours (DistributedDataParallel's)."""
    if num_processes() > 1:
        all_reduce_sum(torch.zeros(1, device=device()))


def main_process_first(make):
    """make() on the first process, and then, when what it makes is there, on the others."""
    made = None if rank() else make()
    barrier()
    return make() if rank() else made


class Pace:
    """Keeps the processes' calls of a sharded module in step: each is announced, and is made by all
    of them, in earnest or not."""

    def __init__(self, module: nn.Module, idle):
        self.idle, self.along = idle, False
        module.register_forward_pre_hook(self.announced, prepend=True)  # before layers are gathered

    def announced(self, *_) -> None:
        if not self.along:
            self.called(1.0)

    def called(self, mine: float) -> bool:
        calls = torch.tensor(mine, device=device())
        dist.all_reduce(calls)
        return calls.item() > 0

    def wait(self) -> None:
        """Until no process calls the module any more; run it along with those that do."""
        while self.called(0.0):
            self.along = True
            self.idle()
            self.along = False


def warm_up() -> None:
    """Let FSDP2 make the buffers that it gathers into, which inference mode would make its own."""
    for pace in _paces:
        pace.idle()


_paces: list[Pace] = []  # of the sharded module of this process, if it has one


def device() -> str:
    """Where tensors must be to be sent."""
    sends = dist.get_backend() if dist.is_initialized() else ""
    return f"cuda:{torch.cuda.current_device()}" if sends == "nccl" else "cpu"


def shard(model: nn.Module, place) -> None:
    """Spread the parameters of a frozen decoder's layers over all processes. What the host keeps
    (n-gram tables) and what is outside the layers (embedding, head, norms) stays whole."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    assert not _paces, "waiting processes could not tell two sharded modules apart"
    if num_processes() == 1:
        raise ValueError("--shard-target needs several processes: torchrun --nproc_per_node=N")
    mesh = init_device_mesh(device().split(":")[0], (num_processes(),))
    inside = {
        p
        for layer in model.layers
        for name, p in layer.named_parameters()
        if not name.endswith(TABLE)
    }
    whole = set(model.parameters()) - inside
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, ignored_params=whole)
    fully_shard(model, mesh=mesh, ignored_params=whole)
    for layer, following in itertools.pairwise(model.layers):
        layer.set_modules_to_forward_prefetch([following])

    @torch.no_grad()
    def idle():
        model(torch.zeros(1, 1, dtype=torch.long, device=place), causal_view(1, 1, place))

    _paces.append(Pace(model, idle))


def own_rows(rows: Tensor) -> Tensor:
    """This process's part of a batch (n,)."""
    return rows[rank() :: num_processes()]


def data_parallel(module: nn.Module, unused: bool = False) -> nn.Module:
    """A module whose parameters' gradients are averaged over the processes in backward(). unused:
    not all of them get one."""
    if num_processes() == 1:
        return module
    barrier()
    devices = [next(module.parameters()).device]
    return DistributedDataParallel(
        module, devices if devices[0].type == "cuda" else None, find_unused_parameters=unused
    )
