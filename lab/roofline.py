"""What a SpecOPD step and a rollout cost on a machine, part by part, and what limits each.

The code itself runs with the plan's shapes, on tensors that have no numbers. Each operator is noted
with its FLOP and the bytes that it reads and writes, and a table of machines turns them into
seconds: the longer of FLOP / peak and bytes / bandwidth; on a GPU a part takes at least the time
that the host needs to launch it. --check runs the same steps on this CPU, whose peak, bandwidth and
time of a small operator are measured first, and prints predicted beside measured.

    python -m lab roofline --target 8B --gpu h100
    python -m lab roofline --check
    pytest tests/lab/test_roofline.py
"""

import contextlib
import itertools
import statistics
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from functools import cache, partial
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import drafter as drafting
import loss
import model
import serve
import train
from drafter import Drafter
from lab import plan
from support.cpu import for_cpu
from support.flags import flag
from support.optim import make_optimizers, optimizer_step
from support.prepare import Trunks, fresh_drafter
from support.references import References
from target import Target, Trunk

GIB = 2**30
OUTSIDE = "the rest"
MAKES_PLAN_SECONDS = 0.4  # cuDNN, for a new shape of attention, as users report
FEW = 64  # rows for which a CPU's products are slower
LARGE_MATRIX = 2**20  # bytes that a core's cache does not hold
LARGE = 2**25  # bytes from which an allocation is new memory, page by page (glibc)
SYNCHRONISATION_SECONDS = 20e-6  # the GPU is empty until the host has launched again

# ---------------------------------------------------------------------------------------- machines

PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "_grouped_mm", "linalg_solve_triangular")
SDPA = "_scaled_dot_product_flash_attention_for_cpu"
ATTENTION = (SDPA, f"{SDPA}_backward", "_scaled_dot_product_flash_attention")
EXPONENTIALS = ("_softmax", "_log_softmax", "silu", "sigmoid", "exp", "log", "cumsum", "xlogy")


@dataclass(frozen=True)
class Operator:
    """One kernel: what it computes, reads and writes."""

    name: str
    flop: int
    bytes: int
    itemsize: int = 4  # bytes of a number
    rows: int = 0  # of a product, or queries of attention


@dataclass(frozen=True)
class Machine:
    """Rates that programs reach. On a GPU (`overlaps`) kernels run while the host launches more."""

    product: dict  # {bytes of a number: FLOP per second}
    bandwidth: float  # bytes per second
    launch: float  # seconds of the host per operator
    gib: float  # of memory; 0 on a CPU, where nothing depends on it
    overlaps: bool = True
    shares: dict = field(default_factory=dict)  # of these rates, see `slowness`

    def seconds(self, op: Operator) -> tuple[float, float]:
        """Seconds of arithmetic, and of moving bytes, the launch aside."""
        share = min((self.shares[why] for why in slowness(op) if why in self.shares), default=1.0)
        if op.flop:
            peak = self.product[2 if op.itemsize == 2 else 4]
            return op.flop / (share * peak), op.bytes / self.bandwidth
        return 0.0, op.bytes / (share * self.bandwidth)


def slowness(op: Operator) -> list[str]:
    """Why an operator is slower than others, if it is."""
    is_exponential = op.name.rstrip("_").startswith(EXPONENTIALS)
    is_product = op.name in PRODUCTS
    is_wide = op.bytes > LARGE_MATRIX
    reasons = {
        "attention": op.name in ATTENTION,
        "attention of few": op.name in ATTENTION and op.rows <= FEW,
        "few rows": is_product and op.rows <= FEW and not is_wide,
        "few rows, large matrix": is_product and op.rows <= FEW // 4 and is_wide,
        "exponential": is_exponential,
        "large": op.bytes > LARGE and not op.flop,
    }
    return [why for why, is_so in reasons.items() if is_so]


REACHED = 0.7  # of the data sheets' numbers below: an estimate until a GPU is measured


def gpu(bfloat16: float, float32: float, bandwidth: float, gib: float) -> Machine:
    """A GPU by its data sheet: dense TFLOP/s, TB/s, GiB."""
    product = {2: REACHED * bfloat16 * 1e12, 4: REACHED * float32 * 1e12}
    return Machine(product, REACHED * bandwidth * 1e12, 7e-6, gib, shares={"attention": 0.6})


GPUS = {
    "a100": gpu(312, 19.5, 2.04, 80),
    "h100": gpu(989, 67, 3.35, 80),
    "h200": gpu(989, 67, 4.8, 141),
    "b200": gpu(2250, 75, 8.0, 180),
}
MACHINES = (*GPUS, "cpu")


def clock() -> float:
    """Seconds. With one thread those of this process alone: others may use the machine, too."""
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def seconds_of(function, least: float = 0.01) -> float:
    """Seconds of a call: the second best of five, each of so many calls that a clock sees them."""
    function()
    count = 1
    times = []
    while len(times) < 5:
        begin = clock()
        for _ in range(count):
            function()
        passed = clock() - begin
        if passed >= least:
            times.append(passed / count)
        else:
            count *= 4
    return sorted(times)[1]


def in_turn(function, inputs: list):
    """A call on the next of the inputs: together they are more than a cache of a core holds."""
    turn = itertools.cycle(inputs)
    return lambda: function(next(turn))


@cache
@torch.no_grad()
def this_cpu() -> Machine:
    """Measure products, attention, bandwidth and one small operator: a few seconds."""

    def product(rows: int, width: int = 256) -> float:
        matrices = [torch.randn(3 * width, width).T for _ in range(2**23 // width**2)]
        x = torch.randn(rows, width)
        return 2 * rows * matrices[0].numel() / seconds_of(in_turn(x.matmul, matrices))

    def attention(queries: int) -> float:
        T, H, D = 192, 4, 32
        k, v = torch.randn(2, 8, T, H // 2, D).transpose(2, 3)
        q = torch.randn(8, queries, H, D).transpose(1, 2)
        mask = torch.ones(8, 1, queries, T, dtype=torch.bool)
        call = partial(F.scaled_dot_product_attention, q, k, v, mask, enable_gqa=True)
        return 4 * q.numel() * T / seconds_of(call)

    def moved(function, num_floats: int, count: int) -> float:
        inputs = [torch.randn(num_floats // 256, 256) for _ in range(count)]
        return 2 * inputs[0].nbytes / seconds_of(in_turn(function, inputs))

    peak = product(256)
    plain = moved(lambda x: x * 2.0, 2**19, 16)
    shares = {
        "attention": attention(256) / peak,
        "attention of few": attention(8) / peak,
        "few rows": product(16) / peak,
        "few rows, large matrix": product(8, width=1024) / peak,
        "exponential": moved(lambda x: x.softmax(-1), 2**19, 16) / plain,
        "large": moved(lambda x: x * 2.0, 2**24, 1) / plain,
    }
    return Machine({2: peak, 4: peak}, plain, small_operator(), 0.0, overlaps=False, shares=shares)


def small_layer() -> tuple:
    """A decoder layer so small that its operators take the time of their launch."""
    sizes = dict(hidden_size=8, intermediate_size=8, num_attention_heads=2, head_dim=4)
    config = model.ModelConfig(num_key_value_heads=2, **sizes)
    view = model.causal_view(1, 2)
    rope = model.rotary(view.positions, 4, 1e4)
    return model.DecoderLayer(config), torch.randn(1, 2, 8), rope, view


def small_operator() -> float:
    """Seconds of an operator of a small layer, Python's share included. In a model other work has
    used the caches since the last time, so something else is computed in between."""
    layer, *inputs = small_layer()
    other = torch.randn(2**16)
    notes = Notes(Parts())
    with notes:
        layer(*inputs)
    times = []
    for _ in range(30):
        other.mul_(-1.0)
        begin = clock()
        layer(*inputs)
        times.append(clock() - begin)
    return statistics.median(times) / notes.counts[OUTSIDE].total()


# -------------------------------------------------------------------- noting what the code does


class Parts:
    """Which part of the work runs: names on a stack, and who is told when one begins or ends."""

    def __init__(self, on_change=None):
        self.stack = [OUTSIDE]
        self.on_change = on_change or (lambda: None)

    @property
    def current(self) -> str:
        return self.stack[-1]

    def within(self, part: str, function):
        """The function, as a part of the work."""

        def run(*args, **options):
            self.on_change()
            self.stack.append(part)
            try:
                return function(*args, **options)
            finally:
                self.on_change()
                self.stack.pop()

        return run

    @contextlib.contextmanager
    def watching(self, target, drafter):
        """While the context lasts, know the parts by the functions that do them."""
        rows = (
            (target, "prefill", "prefill"),
            (drafter, "block", "draft"),
            (drafter, "draw_branches", "draw"),
            (train, "build_tree", "tree"),
            (serve, "build_tree", "tree"),
            (target, "score", "score"),
            (model, "attention", "attention"),
            (train, "step_loss", "head and loss"),
            (Tensor, "backward", "backward"),
            (serve.Batch, "verify", "verify"),
            (serve.Batch, "commit", "commit"),
            (serve.Batch, "retire", "commit"),
        )
        with contextlib.ExitStack() as stack:
            for owner, name, part in rows:
                watched = self.within(part, getattr(owner, name))
                stack.enter_context(mock.patch.object(owner, name, watched))
            yield


def tensors_in(values) -> list[Tensor]:
    """All tensors among arguments, in lists, too."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, dict):
        values = values.values()
    if not isinstance(values, tuple | list) and not hasattr(values, "__iter__"):
        return []
    if isinstance(values, str):
        return []
    return [tensor for value in values for tensor in tensors_in(value)]


def size_of(tensor: Tensor) -> int:
    """Bytes of a tensor; what is expanded counts once."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def is_view(func) -> bool:
    aliases = [r.alias_info for r in func._schema.returns]
    return any(a is not None and not a.is_write for a in aliases)


NOTHING = """
    empty empty_like empty_strided new_empty _unsafe_view detach alias lift_fresh
    _local_scalar_dense
""".split()
GATHERS = ("index", "gather", "embedding", "index_select")


def flop_of(name: str, args, out) -> int:
    """Floating-point operations of products and attention; all others are bound by bytes."""
    if name in ("mm", "bmm", "_grouped_mm"):
        return 2 * out.numel() * args[0].shape[-1]
    if name in ("addmm", "baddbmm"):
        return 2 * out.numel() * args[1].shape[-1]
    if name == "linalg_solve_triangular":
        return out.numel() * args[0].shape[-1]
    if name in ATTENTION:  # backward: five products in place of two
        is_backward = name.endswith("backward")
        q, k = args[is_backward : is_backward + 2]
        return (10 if is_backward else 4) * q.numel() * k.shape[-2]
    return 0


class Notes(TorchDispatchMode):
    """Notes each operator under the part that runs. ghost: float tensors have no numbers (meta);
    ids and masks have, so that the code can decide by them."""

    def __init__(self, parts: Parts, ghost: bool = False):
        super().__init__()
        self.parts = parts
        self.ghost = ghost
        self.counts = defaultdict(Counter)  # part -> operator -> how often

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        if func._can_decompose() if hasattr(func, "_can_decompose") else False:
            with self:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        out = ghost_call(func, name, args, kwargs) if self.ghost else func(*args, **kwargs)
        if not is_view(func) and name not in NOTHING:
            self.counts[self.parts.current][operator(name, args, kwargs, out)] += 1
        return out


def operator(name: str, args, kwargs, out) -> Operator:
    outputs = tensors_in(out)
    inputs = tensors_in(args) + tensors_in(kwargs)
    size = sum(map(size_of, outputs))
    if name in GATHERS:
        size = 2 * size + sum(size_of(t) for t in inputs if not t.is_floating_point())
    elif name in ("index_put_", "_index_put_impl_"):
        size = 2 * size_of(args[2])
    else:
        size += sum(map(size_of, inputs))
    itemsize = max((t.element_size() for t in outputs if t.is_floating_point()), default=4)
    flop = flop_of(name, args, outputs[0] if outputs else None)
    rows = 0
    if flop:
        first = args[1] if name in ("addmm", "baddbmm", f"{SDPA}_backward") else args[0]
        rows = first.shape[-2]
    return Operator(name, flop, size, itemsize, rows)


# ------------------------------------------------------------------------- running without numbers


def ghost_call(func, name: str, args, kwargs):
    """Run an operator where some tensors have no numbers. Ids and masks that come out of them are
    made up: random ids, and a mask that is true everywhere."""
    inputs = tensors_in(args) + tensors_in(kwargs)
    device = kwargs.get("device")
    to_meta = device is not None and torch.device(device).type == "meta"
    has_meta = any(t.is_meta for t in inputs)
    if name == "_grouped_mm":  # its check of types would refuse float32
        return args[0].new_empty(args[0].shape[0], args[1].shape[-1])
    if to_meta or has_meta:
        dtype = kwargs.get("dtype") or (inputs[0].dtype if inputs else None)
        if name == "_local_scalar_dense":
            return 1.0
        is_number = dtype is None or dtype.is_floating_point
        if has_meta and name == "_to_copy" and device is not None and not to_meta:
            return torch.ones(inputs[0].shape, dtype=dtype)
        if not has_meta and not is_number:
            return func(*args, **kwargs | {"device": "cpu"})
        if not has_meta and name in ("arange", "scalar_tensor"):
            return func(*args, **kwargs | {"device": "cpu"})
    if not has_meta:
        return func(*args, **kwargs)
    out = func(*on_meta(args), **on_meta(kwargs))
    width = next((t.shape[-1] for t in inputs if t.dim()), 1)
    return made_up(out, width, name != "gt")  # no block of an indexer is chosen: any may be absent


def on_meta(values):
    if isinstance(values, Tensor):
        return values if values.is_meta else values.to("meta")
    if isinstance(values, dict):
        return {name: on_meta(value) for name, value in values.items()}
    if isinstance(values, tuple | list):
        return type(values)(on_meta(value) for value in values)
    return values


def made_up(out, width: int, truth: bool):
    """What stands for ids (below `width`) and masks that nobody knows; other results stay."""
    if isinstance(out, tuple | list):
        return type(out)(made_up(x, width, truth) for x in out)
    if not isinstance(out, Tensor) or out.is_floating_point() or not out.is_meta:
        return out
    if out.dtype == torch.bool:
        return torch.full(out.shape, truth)
    return torch.randint(width, out.shape).to(out.dtype)


class WholeCalls(TorchFunctionMode):
    """Attention of ghosts as one operator, as devices have it; and numbers from lists stay."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and args[0].is_meta:
            mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
            if mask is not None and mask.dtype == torch.bool:  # kernels add numbers to the scores
                mask = torch.where(mask, args[0].new_zeros(()), -torch.inf)
            return getattr(torch.ops.aten, SDPA)(*args[:3], attn_mask=mask)[0]
        if func is torch.tensor:
            kwargs = kwargs | {"device": None}
        return func(*args, **kwargs)


@contextlib.contextmanager
def without_numbers(machine: Machine):
    """Let the code run on ghosts as it would on the machine."""
    elements = int(machine.gib * GIB * drafting.CHUNK_SHARE) // (4 * drafting.CHUNK_COPIES)
    elements = min(elements, drafting.GPU_CHUNK_ELEMENTS) or drafting.CHUNK_ELEMENTS
    is_cpu = property(lambda tensor: not machine.overlaps or tensor.device.type == "cpu")
    with (
        mock.patch.object(drafting, "chunk_elements", lambda device: elements),
        mock.patch.object(loss, "chunk_elements", lambda device: elements),
        mock.patch.object(Tensor, "is_cpu", is_cpu),
        # a tensor of a class of its own cannot be made under a mode; it is never read
        mock.patch.object(model, "causal_lower_right", lambda N, T: None, create=True),
        WholeCalls(),
    ):
        yield


# ------------------------------------------------------------------------------------- what is run


@dataclass(frozen=True)
class Config(plan.Config):
    out: str = flag("runs/roofline", "folder for summary.json", group="the plan")
    gpu: str = flag("h100", "the machine; cpu: this one, measured", "the plan", choices=MACHINES)
    al: float = flag(3.0, "acceptance length that rollouts are given", "the plan", low=1)
    check: bool = flag(False, "run it on this CPU, and compare", "the plan")


class Work:
    """A target, a drafter and texts, with numbers or without, and the two ways to train."""

    def __init__(self, config: Config, target: Target, drafter: Drafter):
        self.config = replace(config, mode="specopd")
        self.target, self.drafter = target, drafter
        for module in target.modules():  # numbers that hashes of n-grams are divided by
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_meta and not buffer.is_floating_point():
                    module.register_buffer(name, torch.ones(buffer.shape, dtype=buffer.dtype))
        self.optimizers = make_optimizers(drafter, config.matrix_lr, config.lr)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = 0.0  # texts and drafter stay what they are
        ids = torch.Generator().manual_seed(config.seed)
        shape = (config.batch_size, config.prompt_length + config.response_length)
        rows = torch.randint(target.num_tokens - 1, shape, generator=ids).tolist()
        self.prompts = [row[: config.prompt_length] for row in rows]
        responses = [row[config.prompt_length :] for row in rows]
        texts = References.from_lists(self.prompts, responses, 0)
        self.trunks = Trunks(target, texts, drafter.config.target_layer_ids, cache_gib=0.0)

    def learn(self, parts: Parts, config, blocks: list) -> int:
        figures = train.gradient(config, train.Step(config, self.drafter), self.drafter, blocks)
        parts.within("optimizer", optimizer_step)(self.optimizers)
        return figures["supervised"]

    def specopd(self, parts: Parts) -> int:
        """One step -> its supervised tokens, as those below."""
        blocks = train.next_batch(self.config, self.drafter, self.trunks, 0, ())
        return self.learn(parts, self.config, blocks)

    def rollouts(self, parts: Parts) -> int:
        """One step on whole rollouts, and all of it: for machines that are here."""
        config = replace(self.config, mode="rollout", num_greedy=0)
        blocks = train.next_batch(config, self.drafter, self.trunks, 0, ())
        self.rounds = blocks[0].anchors.shape[1]
        return self.learn(parts, config, blocks)

    def batch(self, length: int) -> serve.Batch:
        """A decoding after `length` tokens."""
        rows = self.trunks.references.tokens[:, :length].tolist()
        recorder = train.Recorder(length + self.config.response_length)
        options = serve.Options(self.config.response_length, drafting.PLAIN, watch=recorder)
        return serve.Batch(self.target, self.drafter, rows, list(range(len(rows))), options)

    def rollout_blocks(self, rounds: int) -> loss.Blocks:
        """Blocks as so many rounds leave them."""
        texts = self.trunks.references
        tap_ids = self.drafter.config.target_layer_ids
        B, T = texts.tokens.shape
        W, C = self.drafter.config.num_draft_tokens, self.target.config.hidden_size
        new = self.target.lm_head.weight.new_empty
        taps = new(B, T, len(tap_ids) * C)
        trunk = Trunk(texts.tokens, texts.lengths, [], tap_ids, T, taps=taps)
        anchors = torch.linspace(len(self.prompts[0]), T - 2, rounds).long().expand(B, -1)
        tokens = torch.zeros(B, rounds, 1, W, dtype=torch.long)
        p_hidden = new(B, rounds, 1, W, C)
        counts = {"nodes": 0, "unmerged": 0}
        return loss.Blocks(trunk, anchors, tokens, tokens == 0, p_hidden, counts=counts)


def note_phases(work: Work, machine: Machine, rounds: int) -> dict[str, dict]:
    """What each phase runs: {phase: {part: operators}}."""
    config = work.config
    rollout = replace(config, mode="rollout", num_greedy=0)
    middle = config.prompt_length + config.response_length // 2
    phases = {}

    def note(name: str, function) -> None:
        notes = Notes(parts, ghost=True)
        with notes, parts.watching(work.target, work.drafter):
            function()
        phases[name] = notes.counts

    parts = Parts()
    with without_numbers(machine):
        note("SpecOPD step", lambda: work.specopd(parts))
        note("rollout: prefill", lambda: work.batch(config.prompt_length))
        with Notes(Parts(), ghost=True), torch.inference_mode():
            batch = work.batch(middle)
        with torch.inference_mode():
            note("rollout: one round", batch.round)
        note("rollout: learning", lambda: work.learn(parts, rollout, [work.rollout_blocks(rounds)]))
    return phases


# ------------------------------------------------------------------------------------- the figures


def cost(machine: Machine, operators: Counter) -> dict:
    """FLOP, bytes and seconds of some operators; each is charged to what limits it."""
    sums = dict(flop=0, bytes=0, operators=operators.total(), compute=0.0, bandwidth=0.0)
    for op, count in operators.items():
        arithmetic, moving = machine.seconds(op)
        limit = "compute" if arithmetic > moving else "bandwidth"
        sums[limit] += count * max(arithmetic, moving)
        sums["flop"] += count * op.flop
        sums["bytes"] += count * op.bytes
    launches = machine.launch * operators.total()
    if machine.overlaps:  # only what the kernels do not hide
        launches = max(0.0, launches - sums["compute"] - sums["bandwidth"])
    return (
        sums | dict(launches=launches) | {"seconds": launches + sums["compute"] + sums["bandwidth"]}
    )


def added(*costs: dict) -> dict:
    return {name: sum(c[name] for c in costs) for name in costs[0]}


def limit_of(c: dict) -> str:
    name = max(("compute", "bandwidth", "launches"), key=c.get)
    return f"{name} {100 * c[name] / max(c['seconds'], 1e-12):.0f} %"


def print_phase(name: str, parts: dict[str, dict]) -> None:
    print(f"\n{name:20s}    GFLOP       GB  operators        ms  limited by")
    for part, c in parts.items():
        size = f"{c['flop'] / 1e9:9.2f} {c['bytes'] / 1e9:8.3f} {c['operators']:10d}"
        print(f"  {part:18s}{size} {1e3 * c['seconds']:9.3f}  {limit_of(c)}")


def predict(work: Work, machine: Machine, rounds: int) -> dict[str, dict]:
    """{phase: {part: cost}}, with the sum of the parts as "all"."""
    phases = {}
    for name, parts in note_phases(work, machine, rounds).items():
        phases[name] = {part: cost(machine, operators) for part, operators in parts.items()}
        phases[name]["all"] = added(*phases[name].values())
    return phases


def whole_rollout(phases: dict, rounds: int) -> dict[str, float]:
    """Seconds by part of prefill, all rounds and learning."""
    seconds = defaultdict(float)
    times = {"rollout: prefill": 1, "rollout: one round": rounds, "rollout: learning": 1}
    for phase, count in times.items():
        for part, c in phases[phase].items():
            seconds[part] += count * c["seconds"]
    return dict(seconds)


def run(config: Config) -> dict:
    config = replace(config, num_greedy=min(config.num_greedy, config.num_branches - 1))
    machine = this_cpu() if config.check or config.gpu == "cpu" else GPUS[config.gpu]
    if config.check:
        return check(config, machine)
    target, drafter = plan.build_on_meta(config)
    if machine.overlaps:
        target.to(torch.bfloat16)
    drafter.requires_grad_(True)
    rounds = max(1, round(config.response_length / config.al))
    work = Work(config, target, drafter)
    phases = predict(work, machine, rounds)
    print_machine(config, machine)
    for name, parts in phases.items():
        print_phase(name, parts)
    return (
        {"phases": phases}
        | ratio(work, phases, rounds)
        | {"items": items(work, machine, phases, rounds)}
    )


def print_machine(config: Config, machine: Machine) -> None:
    name = "cpu" if config.check else config.gpu
    peaks = "/".join(f"{machine.product[size] / 1e12:.3g}" for size in (2, 4))
    rates = f"{peaks} TFLOP/s (bfloat16/float32), {machine.bandwidth / 1e9:.0f} GB/s"
    print(f"{name}: {rates}, {1e6 * machine.launch:.1f} us an operator")
    shape = f"{config.batch_size} texts of {config.prompt_length} + {config.response_length} tokens"
    print(f"{shape}, {config.num_anchors} anchors x {config.num_branches}")


def ratio(work: Work, phases: dict, rounds: int) -> dict:
    """Print and return the supervised tokens per second of both ways."""
    c = work.config
    W = work.drafter.config.num_draft_tokens
    seconds = {"SpecOPD": phases["SpecOPD step"]["all"]["seconds"]}
    seconds["rollouts"] = whole_rollout(phases, rounds)["all"]
    tokens = {"SpecOPD": c.batch_size * c.num_anchors * c.num_branches * W}
    tokens["rollouts"] = c.batch_size * rounds * W
    print(f"\n{'':12s}s per update   tokens  tokens/s   (AL {c.al:g}: {rounds} rounds)")
    for way in seconds:
        speed = tokens[way] / seconds[way]
        print(f"{way:12s}{seconds[way]:12.4f} {tokens[way]:8d} {speed:9.0f}")
    c1 = tokens["SpecOPD"] / seconds["SpecOPD"] * seconds["rollouts"] / tokens["rollouts"]
    print(f"SpecOPD has {c1:.2f} times the tokens/s of sequential rollouts")
    return {"seconds": seconds, "tokens": tokens, "c1": c1}


def items(work: Work, machine: Machine, phases: dict, rounds: int) -> dict[str, float]:
    """What a change of the code is worth, in seconds of a step (of a rollout where it says so)."""
    c, d, config = work.target.config, work.drafter.config, work.config
    B, T = work.trunks.references.tokens.shape
    W, rows = d.num_draft_tokens, config.num_anchors * config.num_branches
    N = rows * (W - 1)
    layers = sum(not c.is_linear(layer) for layer in range(c.num_hidden_layers))
    dense = 4 * B * N * (T + N) * c.num_attention_heads * c.head_dim * layers
    visible = (config.prompt_length + T) / 2 + W / 2  # of an average node
    flop = machine.product[2] * machine.shares["attention"]
    keys = 2 * B * (T + N) * c.num_attention_heads * c.head_dim * layers * plan.BF16_BYTES
    head = c.vocab_size * c.hidden_size * plan.BF16_BYTES
    logits = B * rows * W * c.vocab_size
    step = phases["SpecOPD step"]
    node = sum(plan.trunk_bytes(c, 1, 0, plan.BF16_BYTES).values())
    node -= plan.trunk_bytes(c, 1, 0, plan.BF16_BYTES)["recurrent states"]
    product = 2 * logits * c.hidden_size / machine.product[2]
    worth = {
        "11 no cuDNN plan per new length (a rollout, by reports)": MAKES_PLAN_SECONDS * rounds,
        "12 only visible cells of the tree's attention": dense * (1 - visible / (T + N)) / flop,
        "12 no keys repeated for every head": 2 * keys / machine.bandwidth,
        "13 chunks of 2^27 logits, not 2^24 (four passes)": 4
        * head
        * (logits / 2**24 - logits / 2**27)
        / machine.bandwidth,
        "13 p and q computed once (two products)": 2 * product,
        "14 states of nodes not kept": B * N * node / machine.bandwidth,
        "14 30 host synchronisations fewer": 30 * SYNCHRONISATION_SECONDS,
        "15 Muon spread over 8 GPUs": step["optimizer"]["seconds"] * 7 / 8,
    }
    print(f"\nWhat the points are worth, of {step['all']['seconds']:.4f} s a step")
    for name, seconds in worth.items():
        print(f"  {name:56s} {seconds:9.4f} s")
    return worth


# ------------------------------------------------------------------------- held against a clock


class Watch:
    """Adds up seconds by part."""

    def __init__(self):
        self.seconds = defaultdict(float)
        self.parts = Parts(self.tick)
        self.since = clock()

    def tick(self) -> None:
        now = clock()
        self.seconds[self.parts.current] += now - self.since
        self.since = now


def measured(work: Work, way, repeats: int) -> dict[str, float]:
    """Seconds of a step by part, the least of its repeats after a warm-up."""
    runs = []
    for _ in range(1 + repeats):
        watch = Watch()
        with watch.parts.watching(work.target, work.drafter):
            watch.since = clock()
            way(watch.parts)
            watch.tick()
        runs.append(watch.seconds)
    best = dict(min(runs[1:], key=lambda seconds: sum(seconds.values())))
    return best | {"all": sum(best.values())}


def check(config: Config, machine: Machine) -> dict:
    """Print seconds predicted beside seconds measured, for the toy or the folder of --target."""
    print_machine(config, machine)
    # a fresh drafter's gradients are below 1e-38 at late positions; a CPU multiplies such numbers
    # up to thirty times more slowly
    torch.set_flush_denormal(True)
    real_target = Target.toy(config.arch, config.seed)
    if config.target:
        real_target = for_cpu(Target.from_pretrained(config.target, "cpu", torch.float32))
    mask = config.mask_token_id
    mask_token_id = int(mask) if mask.isdecimal() else None
    if not config.target:
        real_target.num_tokens = real_target.config.vocab_size - 6  # as the byte tokenizer has it
    work = Work(config, real_target, fresh_drafter(config, real_target, mask_token_id))
    seen = {"SpecOPD step": measured(work, work.specopd, 3)}
    seen["rollouts"] = measured(work, work.rollouts, 1)
    with torch.device("meta"):
        target = Target(real_target.config).requires_grad_(False)
        drafter = drafting.drafter_class(work.drafter.config)(work.drafter.config, target)
    phases = predict(Work(config, target, drafter), machine, work.rounds)
    predicted = {name: c["seconds"] for name, c in phases["SpecOPD step"].items()}
    both = {"SpecOPD step": predicted, "rollouts": whole_rollout(phases, work.rounds)}
    figures = {}
    for name, parts in seen.items():
        print(f"\n{name:20s}  predicted   measured ms   measured / predicted")
        figures[name] = {}
        for part, seconds in parts.items():
            wanted = both[name].get(part, 0.0)
            figures[name][part] = (wanted, seconds)
            times = seconds / max(wanted, 1e-9)
            beyond = "" if 1 / 1.5 <= times <= 1.5 else "  beyond 1.5"
            print(f"  {part:18s}{1e3 * wanted:11.2f} {1e3 * seconds:10.2f}   {times:9.2f}{beyond}")
    return {"predicted and measured": figures}
