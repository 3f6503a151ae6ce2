"""What makes a loaded target fast on a CPU, and the host quick beside a GPU. Layers know nothing
of it.

1. float32 matrices are laid out column after column: products with one row take a fifth less time.
2. A single row in bfloat16 is multiplied by torch's own kernel, which takes about half as long as
   oneDNN's, torch's choice.
3. A round of speculative decoding multiplies W + 1 rows of each text. To read the matrix is most
   of the work, and yet torch takes more than twice as long for 8 rows as for one. So, given
   drafters, `for_cpu` packs the large matrices: it keeps a second copy of each, in the order in
   which a kernel reads it. It does so if that is faster on this machine, and says what it costs.
   A single row is multiplied so, too, where that is faster: by AMX in bfloat16. Packed matrices
   know no gradient: under autograd the plain ones are used.

Names and values of the weights stay as they are, and a target on a GPU stays as it is.

4. What is made on the host is copied to a GPU from pinned memory (`sent`): such a copy joins the
   GPU's queue. Before any other, the host waits until the queue is empty.

    pytest tests/support/test_cpu.py
"""

import contextlib
import math
import time
from collections import Counter
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

MOST_ROWS = 64  # packed matrices multiply up to so many rows; float32 gains nothing beyond
LEAST_NUMBERS = 100_000  # of a matrix that is packed: a smaller one is read from the cache anyway
MOST_TIME = 0.9  # of the plain products'; for a smaller gain the memory is not spent
TRIAL_SECONDS = 0.3  # in which both ways are timed, if no call takes long:
MOST_TIMED = 2**26  # numbers of a matrix; a larger one is packed untimed, if the others gain
GAPS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}  # allowed between both, of the largest number


def sent(x: Tensor, device) -> Tensor:
    """A tensor of the host on a device, where it is once the work before it is done."""
    if x.is_cpu and torch.device(device).type == "cuda":
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)


@contextlib.contextmanager
def single_row_kernel(num_rows: int, weight: Tensor):
    """Multiply one row by bfloat16 weights with torch's own kernel; the switch is process-wide."""
    is_plain = weight.dtype == torch.bfloat16 and weight.is_cpu and weight.stride(-1) == 1
    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = before and not (is_plain and num_rows == 1)
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = before


def matrices_by_columns(module: nn.Module) -> None:
    """Lay out float32 matrices on a CPU column after column."""
    for layer in module.modules():
        # a weight that is spread over processes has a type of its own
        if isinstance(layer, nn.Linear) and type(layer.weight) is nn.Parameter:
            if layer.weight.is_cpu and layer.weight.dtype == torch.float32:
                layer.weight.data = layer.weight.data.t().contiguous().t()


def for_cpu(target, *drafters):
    """Prepare a loaded target for a CPU, in place -> the target. Call it once.

    Given drafters (None stands for none), their matrices and the target's are packed for rounds of
    decoding if that is faster here, and a printed line says so."""
    matrices_by_columns(target)
    if target.lm_head.weight.is_cpu and target.lm_head.weight.dtype == torch.bfloat16:
        _switch_kernels(target.model, lambda tokens: tokens.numel(), target.lm_head)
        _switch_kernels(target.lm_head, lambda hidden: hidden.shape[:-1].numel(), target.lm_head)
    drafters = [drafter for drafter in drafters if drafter is not None]
    if drafters:
        num_rows = 1 + max(drafter.config.num_draft_tokens for drafter in drafters)
        models = [model for model in (target, *drafters) if isinstance(model, nn.Module)]
        _pack_matrices(models, min(num_rows, MOST_ROWS))
    return target


def _switch_kernels(module: nn.Module, count_rows, head: nn.Linear) -> None:
    """Run the module within `single_row_kernel`; the head's weight stands for all weights."""
    switch = contextlib.ExitStack()

    def before(_, args) -> None:
        switch.enter_context(single_row_kernel(count_rows(args[0]), head.weight))

    module.register_forward_pre_hook(before)
    module.register_forward_hook(lambda *_: switch.close(), always_call=True)


# ---------------------------------------------------------------------------------- packed matrices


def packed(weight: Tensor) -> Tensor:
    """A copy of a matrix in the order in which a kernel reads it: MKL's in float32, or oneDNN's."""
    weight = weight.detach().contiguous()
    if weight.dtype == torch.float32:
        return torch.ops.mkl._mkl_reorder_linear_weight(weight, MOST_ROWS)
    return torch.ops.mkldnn._reorder_linear_weight(weight, MOST_ROWS)


def packed_product(x: Tensor, matrix: Tensor, layer: nn.Linear) -> Tensor:
    """The output of a layer for x (...,C), by its packed matrix."""
    if x.dtype == torch.float32:
        num_rows = x.numel() // x.shape[-1]  # another number would mean the plain product
        return torch.ops.mkl._mkl_linear.default(x, matrix, layer.weight, layer.bias, num_rows)
    return torch.ops.mkldnn._linear_pointwise.default(x, matrix, layer.bias, "none", [], "")


class PackedLinear(nn.Linear):
    """A layer with a packed copy of its matrix. Loaded layers become such: see `_pack_matrices`."""

    def pack(self, least_rows: int) -> None:
        self.least_rows = least_rows
        self.packed = packed(self.weight)
        self.packed_version = self._version()

    def _version(self) -> tuple[int, int]:
        """Another one once the weight was moved, replaced or changed (but through `.data`)."""
        weight = self.weight
        return weight.data_ptr(), weight._version

    def forward(self, x: Tensor) -> Tensor:
        is_few = self.least_rows <= x.numel() // self.in_features <= MOST_ROWS
        is_plain = torch.is_grad_enabled() or not is_few or x.dtype != self.weight.dtype
        if is_plain or self._version() != self.packed_version:
            return super().forward(x)
        return packed_product(x, self.packed, self)


def can_be_packed(layer: nn.Module) -> bool:
    """Whether it is a layer on a CPU with a large matrix of a type that has a kernel."""
    if type(layer) is not nn.Linear or type(layer.weight) is not nn.Parameter:
        return False
    weight = layer.weight
    is_there = weight.is_cpu and not weight.is_inference()  # else changes would not be noticed
    return is_there and weight.dtype in GAPS and weight.numel() >= LEAST_NUMBERS


def free_memory() -> int:
    """Bytes of memory that are free on the host; 0 where the system (not Linux) does not say."""
    path = Path("/proc/meminfo")
    lines = path.read_text().splitlines() if path.is_file() else ()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))


def _pack_matrices(models: list[nn.Module], num_rows: int) -> None:
    """Pack the large matrices if rounds with so many rows gain by it, and say so in a line."""
    layers = [layer for model in models for layer in model.modules() if can_be_packed(layer)]
    num_bytes = sum(layer.weight.nbytes for layer in layers)
    if not layers:
        return
    size = f"{num_bytes / 2**20:.0f} MiB more memory"
    if num_bytes > free_memory() / 2:
        print(f"matrices are not packed: {size} is more than half of what is free")
        return
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on a busy machine several would wait for one another
    try:
        single, share = (_time_share(layers, rows) for rows in (1, num_rows))
    except (AttributeError, RuntimeError) as error:  # no such operator, or not for this processor
        print(f"matrices are not packed: {str(error).splitlines()[0][:100]}")
        return
    finally:
        torch.set_num_threads(num_threads)
    if not share <= MOST_TIME:
        reason = f"{num_rows} rows would take {share:.0%} of the time"
        print(f"matrices are not packed: {reason if share < math.inf else 'other numbers'}")
        return
    for layer in layers:
        layer.__class__ = PackedLinear
        layer.pack(least_rows=1 if single <= MOST_TIME else 2)
    gain = f"{num_rows} rows take {share:.0%} of the time in one thread"
    print(f"{len(layers)} matrices are packed: {gain}, {size}")


@torch.no_grad()
def _time_share(layers: list[nn.Linear], num_rows: int) -> float:
    """The time of all packed products as a share of the plain ones', from a layer of each shape;
    infinite if their numbers differ."""
    timed = [layer for layer in layers if layer.weight.numel() <= MOST_TIMED] or layers
    counts = Counter(layer.weight.shape for layer in timed)
    seconds = [0.0, 0.0]
    for shape, layer in {layer.weight.shape: layer for layer in timed}.items():
        x = torch.randn(num_rows, shape[1], generator=torch.Generator().manual_seed(0))
        x = x.to(layer.weight.dtype)
        matrix = packed(layer.weight)
        ways = (partial(unpacked_product, x, layer), partial(packed_product, x, matrix, layer))
        plain, other = (way() for way in ways)
        if (plain - other).abs().max() > GAPS[x.dtype] * plain.abs().max():
            return math.inf
        for number, best in enumerate(best_times(ways, TRIAL_SECONDS / len(counts))):
            seconds[number] += counts[shape] * best
    return seconds[1] / seconds[0]


def unpacked_product(x: Tensor, layer: nn.Linear) -> Tensor:
    with single_row_kernel(x.shape[0], layer.weight):
        return layer(x)


def best_times(ways, patience: float) -> list[float]:
    """The least seconds of each way, called in turn until so many seconds have passed. They are
    those that this process was running: a busy machine shall choose as an idle one."""
    times = [[] for _ in ways]
    begin = time.perf_counter()
    while not times[-1] or time.perf_counter() < begin + patience:
        for way, seconds in zip(ways, times):
            start = time.process_time()
            way()
            seconds.append(time.process_time() - start)
    return [min(seconds) for seconds in times]
