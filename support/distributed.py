"""Several processes, one batch.

    torchrun --nproc_per_node=8 train.py --mode specopd --target FOLDER --drafter FOLDER ...

Every process has the drafter and takes every n-th sequence of a batch. Branches depend on seed,
step and sequence alone, and a loss is a sum divided by a number of the whole batch, so the gradient
is the same for any number of processes. The main process writes and prints; all measure.

The target is whole on every process, or its layers are spread over all of them (FSDP2), and a layer
is gathered while it runs. Then a layer can run only on all processes together, but they want it
unequally often: rollouts end when they end, and texts end when they end. `Lockstep` solves this:

    1. a process announces each call of the target; the others answer by joining the call
    2. a process that waits for the others (in `all_reduce_sum`) joins their calls on a dummy input
    3. the wait is over when no process announces a call

    pytest -m slow tests/support/test_distributed.py
"""

import datetime
import gc
import itertools
import os
import sys
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hf.tensors import TABLE
from target import Target
from tree import causal_view

TIMEOUT = datetime.timedelta(hours=2)  # the others wait while the main process prepares
START_TIMEOUT = datetime.timedelta(seconds=50)  # until all processes have begun


def start(device: str) -> str:
    """Join the processes that torchrun started, if it did -> this process's device."""
    if "RANK" not in os.environ:
        return device
    on_gpu = device.startswith("cuda")
    if on_gpu:
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    try:
        store, number, count = next(dist.rendezvous("env://", timeout=START_TIMEOUT))
    except RuntimeError as error:
        causes = "a port in use, or fewer of them than WORLD_SIZE"
        details = str(error).splitlines()[0][:200]
        raise ValueError(f"the processes did not meet ({causes}): {details}") from None
    store.set_timeout(TIMEOUT)
    backend = "nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, timeout=TIMEOUT, store=store, rank=number, world_size=count)
    if not is_main():
        sys.stdout = open(os.devnull, "w")
    return device


def stop() -> None:
    """Leave the other processes, once all are done."""
    if dist.is_initialized():
        barrier()  # nobody leaves while another may need it
        _locksteps.clear()
        gc.collect()  # wrapped modules hold the group, whose threads must not outlive this process
        dist.destroy_process_group()


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def num_processes() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def is_main() -> bool:
    """Whether this is the process that writes and prints."""
    return rank() == 0


def own_rows(rows: Tensor) -> Tensor:
    """This process's part of a batch (n,), or of a list."""
    return rows[rank() :: num_processes()]


def message_device() -> str:
    """Where a tensor must be to be sent."""
    uses_gpu = dist.is_initialized() and dist.get_backend() == "nccl"
    return f"cuda:{torch.cuda.current_device()}" if uses_gpu else "cpu"


def all_reduce_sum(x: Tensor) -> Tensor:
    """The sum of x over all processes, without a gradient."""
    if num_processes() == 1:
        return x
    for lockstep in _locksteps:
        lockstep.wait()
    x = x.detach().clone()
    dist.all_reduce(x)
    return x


def share(tensors: list[Tensor]) -> None:
    """Overwrite tensor number i on all processes by that of process i, for contiguous tensors.
    As in backward(), no process may still need a spread target: `all_reduce_sum` sees to that."""
    sent = [dist.broadcast(x, number, async_op=True) for number, x in enumerate(tensors)]
    for message in sent:
        message.wait()


def gather_numbers(numbers: list[int]) -> list[list[int]]:
    """Every process's whole numbers, a row for each process."""
    rows = torch.zeros(num_processes(), len(numbers), dtype=torch.long, device=message_device())
    rows[rank()] = torch.tensor(numbers)
    return all_reduce_sum(rows).tolist()


def barrier() -> None:
    """Wait for all processes. Call it before other code sends messages, as torch's DDP does."""
    if num_processes() > 1:
        all_reduce_sum(torch.zeros(1, device=message_device()))


def main_process_first(make):
    """Run make() on the main process, then on the others, which find what it made."""
    made = make() if is_main() else None
    barrier()
    return made if is_main() else make()


def data_parallel(module: nn.Module) -> nn.Module:
    """A module whose gradients are averaged over the processes in backward()."""
    if num_processes() == 1:
        return module
    barrier()
    device = next(module.parameters()).device
    ids = [device] if device.type == "cuda" else None
    # gradients lie in the messages' own memory: no second copy of them
    return DistributedDataParallel(module, ids, gradient_as_bucket_view=True)


class Lockstep:
    """Keeps the processes' calls of a spread module in step, as described above."""

    def __init__(self, module: nn.Module, run_on_dummy):
        self.run_on_dummy = run_on_dummy
        self.joining = False
        module.register_forward_pre_hook(self._announce, prepend=True)  # before layers are gathered

    def _announce(self, *_) -> None:
        if not self.joining:
            self._someone_calls(True)

    def _someone_calls(self, this_one_does: bool) -> bool:
        calls = torch.tensor(float(this_one_does), device=message_device())
        dist.all_reduce(calls)
        return calls.item() > 0

    def wait(self) -> None:
        """Join the calls of the others until no process calls the module any more."""
        while self._someone_calls(False):
            self.joining = True
            self.run_on_dummy()
            self.joining = False


_locksteps: list[Lockstep] = []  # at most one; whoever sends a message joins its calls first


def shard_layers(target: Target, device) -> None:
    """Spread the layers' parameters over all processes; n-gram tables and all else stay whole."""
    # here, because they take a second to import
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    assert not _locksteps, "waiting processes could not tell two spread modules apart"
    model = target.model
    mesh = init_device_mesh(message_device().split(":")[0], (num_processes(),))
    spread = set()
    for layer in model.layers:
        spread |= {p for name, p in layer.named_parameters() if not name.endswith(TABLE)}
    whole = set(model.parameters()) - spread
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, ignored_params=whole)
    fully_shard(model, mesh=mesh, ignored_params=whole)
    for layer, next_layer in itertools.pairwise(model.layers):
        layer.set_modules_to_forward_prefetch([next_layer])

    @torch.no_grad()
    def run_on_dummy() -> None:
        token = torch.zeros(1, 1, dtype=torch.long, device=device)
        model(token, causal_view(1, 1, device))

    _locksteps.append(Lockstep(model, run_on_dummy))


def load_sharded_target(folder, device="cpu", dtype=None) -> Target:
    """A target as `Target.from_pretrained` loads it, its layers spread over all processes."""
    if num_processes() == 1:
        raise ValueError("--shard-target needs several processes: torchrun --nproc_per_node=N")
    target = Target.from_pretrained(folder, device, dtype, partial(shard_layers, device=device))
    # FSDP2 makes its buffers in the first call; a call in inference mode would spoil them.
    _locksteps[0].run_on_dummy()
    return target
