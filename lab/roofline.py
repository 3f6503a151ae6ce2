"""What a SpecOPD step and a rollout cost on a machine, part by part, and what limits each.

Three numbers describe a piece of work, and all follow from shapes: the FLOP of its products, the
bytes that are read and written, and the operators that the host launches. A product of R rows with
a matrix of M numbers takes 2 R M FLOP and reads the matrix once. A machine turns this into time:

    seconds = max(FLOP / peak, bytes of products / bandwidth) + other bytes / bandwidth

So few rows wait for memory and many for arithmetic: a decoding round that scores 8 tokens takes a
GPU as long as one that scores 80. Launches count on a GPU only where they take longer than all
that; on a CPU they add up. On a GPU numbers are bfloat16, but for the delta rule. Left out:
n-grams, the indexer of sparse attention, the heads of DSpark and DFlash 2, several processes.

    python -m lab roofline --target 8B --gpu h100
    python -m lab roofline --check          this CPU: seconds predicted beside seconds measured
    pytest tests/lab/test_roofline.py
"""

import contextlib
import math
import time
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, replace
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

import model
import replay
import serve
import train
from lab import plan
from lab.common import open_target
from support import optim
from support.flags import flag
from support.prepare import Trunks, fresh_drafter
from support.references import References
from tree import causal_view, gather_slots

# ---------------------------------------------------------------------------------------- machines


@dataclass(frozen=True)
class Work:
    """Products of one kind, and the operators around them."""

    kind: str = "float32"  # of the products: bfloat16, float32, attention
    flop: float = 0.0
    rows: float = 1.0  # of a product; queries of attention
    read: float = 0.0  # bytes that products read and write
    moved: float = 0.0  # bytes that element-wise operators read and write
    gathered: float = 0.0  # bytes of what is gathered or transposed
    operators: float = 0.0

    def gradient(self) -> "Work":
        """Of each product two, of attention's two five; the other factors are counted."""
        flop = self.flop * (2.5 if self.kind == "attention" else 2)
        others = dict(moved=2.5 * self.moved, operators=1.75 * self.operators)
        return replace(self, flop=flop, read=2.5 * self.read, **others)


@dataclass(frozen=True)
class Machine:
    """Rates that programs reach: FLOP/s by rows, bytes/s by the bytes of one operator."""

    rates: dict[str, dict[float, float]]  # {kind: {size: rate}}, sizes ascending
    launch: float  # seconds of the host per operator
    is_gpu: bool = True  # kernels run while the host launches more

    def rate(self, kind: str, size: float = 1.0) -> float:
        sizes, rates = zip(*self.rates[kind].items())
        return float(np.exp(np.interp(np.log(max(size, 1)), np.log(sizes), np.log(rates))))

    def cost(self, *works: Work) -> Counter:
        """Sums over some work, and its seconds, each charged to what limits it."""
        c = Counter()
        for work in works:
            arithmetic = work.flop / self.rate(work.kind, work.rows)
            reading = work.read / self.rate("read")
            c["compute" if arithmetic > reading else "bandwidth"] += max(arithmetic, reading)
            size = work.moved / max(work.operators, 1)
            c["bandwidth"] += work.moved / self.rate("moved", size)
            c["bandwidth"] += work.gathered / self.rate("gathered")
            c["GB"] += (work.read + work.moved + work.gathered) / 1e9
            c["GFLOP"] += work.flop / 1e9
            c["operators"] += work.operators
        kernels = c["compute"] + c["bandwidth"]
        launches = self.launch * c["operators"]
        c["launches"] = max(0.0, launches - kernels) if self.is_gpu else launches
        c["seconds"] = kernels + c["launches"]
        return c


REACHED = 0.7  # of the data sheets' numbers below: an estimate until a GPU is measured


def gpu(bfloat16: float, float32: float, bandwidth: float) -> Machine:
    """A GPU by its data sheet: dense TFLOP/s, TB/s."""
    rates = {"bfloat16": bfloat16, "float32": float32, "attention": 0.6 * bfloat16}
    rates |= dict.fromkeys(("read", "moved", "gathered"), bandwidth)
    return Machine({kind: {1: REACHED * x * 1e12} for kind, x in rates.items()}, launch=7e-6)


GPUS = {
    "a100": gpu(312, 19.5, 2.04),
    "h100": gpu(989, 67, 3.35),
    "h200": gpu(989, 67, 4.8),
    "b200": gpu(2250, 75, 8.0),
}


def clock() -> float:
    """Seconds. With one thread those of this process alone: others may use the machine, too."""
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


@torch.no_grad()
def seconds_of(function, inputs: list, between: int) -> float:
    """Median seconds of a call. As in a model, so many numbers pass through the caches between two
    calls, and eight results are kept."""
    other, results, times = torch.ones(between), deque(maxlen=8), []
    while len(times) < 10 or (sum(times) < 0.1 and len(times) < 300):
        other.mul_(-1.0)
        begin = clock()
        results.append(function(*inputs))
        times.append(clock() - begin)
    return sorted(times)[len(times) // 2]


def this_cpu(c: model.ModelConfig) -> Machine:
    """Measure products and attention of a model's widths, moving, gathering, a tiny layer."""
    ones, C = torch.ones, min(c.hidden_size, 1024)
    H, H_kv, D = c.num_attention_heads, c.num_key_value_heads, c.head_dim
    layer = 9 * C**2  # numbers of its weights, about
    batch = 2**22  # numbers that are computed between two uses of a large tensor, about
    rates = defaultdict(dict)
    rates["read"][1] = 1e15  # a product is measured with the reading of its matrix
    for n in (8, 32, 128, 512):
        inputs = [ones(n, C), ones(3 * C, C)]
        rates["float32"][n] = 6 * n * C**2 / seconds_of(F.linear, inputs, layer)
    for n in (8, 64, 256):
        inputs = [ones(4, n, H, D), ones(4, 256, 2, H_kv, D), ones(4, 1, n, 256)]
        rates["attention"][n] = 2**12 * n * H * D / seconds_of(model.attention, inputs, batch)
    for n in (2**12, 2**14, 2**18, 2**20, 2**23 + 2**12):  # the last: always new memory (glibc)
        rates["moved"][8 * n] = 8 * n / seconds_of(torch.neg, [ones(n)], min(8 * n, batch))
    inputs = [ones(64, 64, 64), torch.arange(64).expand(64, 64)]
    rates["gathered"][1] = 2**21 / seconds_of(gather_slots, inputs, batch)
    sizes = dict(hidden_size=8, intermediate_size=8, num_attention_heads=2, head_dim=4)
    tiny = model.DecoderLayer(model.ModelConfig(num_key_value_heads=2, **sizes))
    view = causal_view(1, 2)
    inputs = [ones(1, 2, 8), model.rotary(view.positions, 4, 1e4), view]
    return Machine(rates, seconds_of(tiny, inputs, layer) / (LAYER + 1), is_gpu=False)


# ---------------------------------------------------------------------------- the work of each part

# For each number that a layer's products read or write, its element-wise operators (norms,
# rotation, SiLU, sums) read or write about three.
MOVES = 3

# Operators, views aside; a test counts them. Of the target's pass: a layer with attention, a linear
# one, its experts, a chunk of the delta rule, attention under a mask, what stands around the layers
LAYER, LINEAR, EXPERTS, CHUNK, MASKED, AROUND = 44, 100, 80, 50, 4, 60
# of a step; the last two of it for each parameter
CONTEXT, BLOCKS, DRAW, TREE, LOSS, REST, MUON, ADAMW = 40, 30, 15, 145, 80, 80, 27, 5
# of a decoding round; to commit, a layer with attention and a linear one need so many
CHAIN, VERIFY, ROUND, COMMIT, COMMIT_LINEAR = 60, 40, 40, 11, 110


class Shapes:
    """A target, a drafter and a run; a method says what a part of the work needs."""

    def __init__(self, config, target, drafter, machine: Machine):
        self.target, self.drafter, self.machine = target, drafter, machine
        self.c, self.d = target.config, drafter.config
        self.B, self.A, self.K = config.batch_size, config.num_anchors, config.num_branches
        self.prompt, self.T = config.prompt_length, config.prompt_length + config.response_length
        self.W, self.V = self.d.num_draft_tokens, self.c.vocab_size
        self.N = self.A * self.K * (self.W - 1)  # nodes of a text's tree, if none are merged
        self.kind, self.size = ("bfloat16", 2) if machine.is_gpu else ("float32", 4)
        self.num_linear = sum(layer.is_linear for layer in target.model.layers)
        self.num_attention = self.c.num_hidden_layers - self.num_linear
        # slots that FlexAttention reads for a node of a tree: it skips blocks of 128 x 128
        self.visible = (self.prompt + self.T) / 2 + 128

    def through(self, modules, rows: float, operators: float) -> Work:
        """So many vectors through the matrices of some modules. Each matrix is read once, an expert
        if anyone chose it."""
        c, flop, weights, width = self.c, 0, 0, 0
        for m in (m for module in modules for m in module.modules()):
            if isinstance(m, nn.Linear):
                flop += 2 * rows * m.weight.numel()
                weights += m.weight.numel()
                width += m.in_features + m.out_features
            elif isinstance(m, model.Experts):
                k, numbers = c.num_experts_per_tok, sum(p.numel() for p in m.parameters())
                flop += 2 * rows * numbers * k / c.num_experts
                weights += numbers * min(1, rows * k / c.num_experts)
                width += k * (2 * c.hidden_size + 4 * c.moe_intermediate_size)
        read = self.size * (weights + rows * width)
        return Work(self.kind, flop, rows, read, self.size * MOVES * rows * width, 0, operators)

    def attention(self, c, N: float, T: float, cells: float, operators=MASKED) -> Work:
        """N queries of each text in T keys; `cells` pairs of them are computed."""
        Q, KV = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        read = self.size * 2 * self.B * (N * Q + T * KV)
        return Work("attention", 4 * self.B * cells * Q, N, read, operators=operators)

    def delta_rule(self, N: float, P: float, replayed: float, past: bool) -> Work:
        """A linear layer's convolution and delta rule on N tokens of each text, in P chunks or
        groups; the state before each group is replayed over so many tokens (replay.py)."""
        c, B = self.c, self.B
        H, D_k, D_v = c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim
        channels = 2 * c.linear_num_key_heads * D_k + H * D_v
        pairs = B * H * N**2 / P
        flop = pairs * (4 * D_k + 2 * D_v)
        flop += 2 * B * H * D_k * D_v * (P * replayed + (3 - past) * N)
        # in float32; a token passes some 70 times through memory, 90 on a trunk, replayed 7 times
        numbers = B * channels * ((90 if past else 70) * N + 7 * P * replayed)
        operators = CHUNK * (2 if past else P)
        return Work("float32", flop, N / P, 0, 0, 4 * numbers, operators)

    def target_pass(self, N: float, T: float = 0, P: float = 0, replayed: float = 0):
        """N tokens of each text through the target: a stretch of text, or a tree's nodes in P
        groups on a trunk of T tokens -> the work of its layers, and that of their attention."""
        operators = self.num_linear * LINEAR + self.num_attention * LAYER + AROUND
        operators += self.c.has_streams * self.c.num_hidden_layers * EXPERTS
        layers = [self.through(self.target.model.layers, self.B * N, operators)]
        if self.num_linear:
            chunks = P or math.ceil(N / replay.CHUNK)
            layers += self.num_linear * [self.delta_rule(N, chunks, replayed, T > 0)]
        cells = N * (T + N)
        if not T and not self.c.has_streams:  # causal, in blocks
            cells = N * (N + 64) / 2
        elif self.machine.is_gpu and N > 128 and not self.c.has_streams:
            cells = N * self.visible
        attention = self.attention(self.c, N, T + N, cells, MASKED if T else 1)
        return layers, self.num_attention * [attention]

    def vocabulary(self, rows: float, passes: float, more: float, products=1, chunks=1) -> Work:
        """Logits of so many rows: products with the head, passes over all logits, and `more`
        operators on few numbers."""
        C = self.c.hidden_size
        read = self.size * products * (chunks * self.V + rows) * C
        flop, moved = 2 * products * rows * self.V * C, 4 * passes * rows * self.V
        return Work(self.kind, flop, rows / chunks, read, moved, 0, more * chunks)

    def head_and_loss(self, anchors: float, K: float, chunk: int = 0) -> list[Work]:
        """p and q, and the gradient of q's logits, in chunks of so many logits (loss.chunked). The
        head is multiplied once for p, twice for q, which is one for all branches."""
        chunk = chunk or (2**27 if self.machine.is_gpu else 2**24)
        chunks = math.ceil(self.B * anchors / max(1, chunk // (K * self.W * self.V)))
        rows = self.B * anchors * self.W
        # passes: softmax and its gradient; softmax, minimum and its gradient, sum
        q = self.vocabulary(rows, 7, LOSS / 2, 2, chunks)
        return [q, self.vocabulary(rows * K, 17, LOSS / 2, 1, chunks)]

    def draft(self, anchors: float, T: float):
        """The drafter's pass over blocks at anchors on T tokens, at most 32 of them at once ->
        its work, and that of attention."""
        parts, layers = math.ceil(anchors / 32), self.drafter.layers
        slots = anchors * self.d.block_size / parts
        work = self.through(layers, self.B * slots, LAYER * len(layers) + BLOCKS)
        attention = self.attention(self.d.layers, slots, T + slots, slots * (T + slots))
        return parts * [work], parts * len(layers) * [attention]

    def context(self, tokens: float) -> list[Work]:
        """What the drafter remembers of so many tokens of each text."""
        layers = [layer.self_attn for layer in self.drafter.layers]
        modules = [self.drafter.fc, *(m for layer in layers for m in (layer.k_proj, layer.v_proj))]
        return [self.through(modules, self.B * tokens, CONTEXT)]

    def optimizer(self) -> list[Work]:
        """Muon: five Newton-Schulz steps, A = X X^T, X <- aX + (bA + cAA) X. AdamW for the rest."""
        works = []
        for name, p in self.drafter.named_parameters():
            if optim.is_for_muon(name):
                r, n = sorted(p.shape)
                flop = 5 * (4 * r * r * n + 2 * r**3)
                works.append(Work(self.kind, flop, r, 0, 4 * 15 * r * n, 0, MUON))
            else:
                works.append(Work(moved=4 * 10 * p.numel(), operators=ADAMW))
        return works

    # -- the parts together: {part: work}

    def learning(self, anchors: float, K: float) -> dict[str, list[Work]]:
        draft, attention = self.draft(anchors, self.T)
        draft = draft + self.context(self.T)
        return {
            "draft": draft,
            "attention": attention,
            "head and loss": self.head_and_loss(anchors, K),
            "backward": [work.gradient() for work in draft + attention],
            "optimizer": self.optimizer(),
            "the rest": [Work(operators=REST)],
        }

    def specopd(self) -> dict[str, list[Work]]:
        prefill, in_prefill = self.target_pass(self.T)
        replayed = min(self.T, replay.checkpoint_spacing(self.c, self.size) - 1)
        score, in_tree = self.target_pass(self.N, self.T, self.A, replayed)
        draw = [self.vocabulary(self.B * self.A * self.W, 8, DRAW)]
        learning = self.learning(self.A, self.K)
        learning["attention"] += in_prefill + in_tree
        tree = [Work(operators=TREE)]
        return {"prefill": prefill, "draw": draw, "tree": tree, "score": score} | learning

    def rollout(self, rounds: int) -> dict[str, dict[str, list[Work]]]:
        """Its phases; a round stands for all, in the middle of a response."""
        T = (self.prompt + self.T) / 2
        prefill, in_prefill = self.target_pass(self.prompt)
        draft, in_block = self.draft(1, T)
        score, in_chain = self.target_pass(self.W + 1, T, 1)
        commit = self.num_linear * COMMIT_LINEAR + self.num_attention * COMMIT + AROUND
        one_round = {
            "draft": draft,
            "draw": [self.vocabulary(self.B * self.W, 8, DRAW)],
            "tree": [Work(operators=CHAIN)],
            "score": score,
            "attention": in_block + in_chain,
            "verify": [self.vocabulary(self.B * (self.W + 1), 10, VERIFY)],
            "commit": [*self.context(self.W + 1), Work(operators=commit)],
            "the rest": [Work(operators=ROUND)],
        }
        before = {"prefill": prefill, "attention": in_prefill, "draft": self.context(self.prompt)}
        return {"prefill": before, "one round": one_round, "learning": self.learning(rounds, 1)}


# ------------------------------------------------------------------------------------- the figures


def predict(s: Shapes, rounds: int) -> tuple[dict, dict]:
    """{phase: {part: cost}}, where "all" is their sum, and {way to train: {part: seconds}}."""
    phases, seconds = {}, {"SpecOPD": Counter(), "rollouts": Counter()}
    for name, parts in ({"SpecOPD": s.specopd()} | s.rollout(rounds)).items():
        costs = {part: s.machine.cost(*works) for part, works in parts.items()}
        phases[name] = costs | {"all": sum(costs.values(), Counter())}
        for part, c in phases[name].items():
            times = rounds if name == "one round" else 1
            seconds["SpecOPD" if name == "SpecOPD" else "rollouts"][part] += times * c["seconds"]
    return phases, seconds


def print_phases(phases: dict) -> None:
    for name, parts in phases.items():
        title = "SpecOPD step" if name == "SpecOPD" else f"rollout: {name}"
        print(f"\n{title:20s}    GFLOP       GB  operators        ms  limited by")
        for part, c in parts.items():
            limit = max(("compute", "bandwidth", "launches"), key=lambda limit: c[limit])
            size = f"{c['GFLOP']:9.2f} {c['GB']:8.3f} {c['operators']:10.0f}"
            share = 100 * c[limit] / c["seconds"]
            print(f"  {part:18s}{size} {1e3 * c['seconds']:9.3f}  {limit} {share:.0f} %")


def ratio(s: Shapes, seconds: dict, rounds: int) -> float:
    """Print the supervised tokens per second of both ways -> the one over the other."""
    blocks = {"SpecOPD": s.A * s.K, "rollouts": rounds}
    speed = {way: s.B * blocks[way] * s.W / parts["all"] for way, parts in seconds.items()}
    print(f"\n{rounds} rounds to a rollout")
    for way, parts in seconds.items():
        print(f"{way:10s}{parts['all']:10.4f} s a step, {speed[way]:9.0f} supervised tokens/s")
    c1 = speed["SpecOPD"] / speed["rollouts"]
    print(f"SpecOPD has {c1:.2f} times the tokens/s of sequential rollouts")
    return c1


def items(s: Shapes, step: dict, rounds: int) -> dict[str, float]:
    """What choices in the code are worth, in seconds of a step (of a rollout where it says so)."""
    c, slots = s.c, s.T + s.N

    def seconds(*works: Work) -> float:
        return s.machine.cost(*works)["seconds"]

    dense, visible = (seconds(s.attention(c, s.N, slots, s.N * x)) for x in (slots, s.visible))
    keys = s.size * 4 * s.B * slots * c.num_attention_heads * c.head_dim
    small, large = (seconds(*s.head_and_loss(s.A, s.K, 2**n)) for n in (24, 27))
    node = plan.trunk_bytes(c, 1, 0, s.size) | {"recurrent states": 0}
    worth = {
        "no cuDNN plan for each new length (a rollout, 0.4 s each)": 0.4 * rounds,
        "only visible cells of the tree": s.num_attention * (dense - visible),
        "keys not repeated for each head": s.num_attention * seconds(Work(moved=keys)),
        "chunks of 2^27 logits, not of 2^24": small - large,
        "p and q computed once": seconds(s.vocabulary(s.B * s.A * s.W * (1 + s.K), 0, 0)),
        "states of nodes not kept": seconds(Work(moved=s.B * s.N * sum(node.values()))),
        "30 waits of the host fewer (20 us each)": 30 * 20e-6,
        "Muon spread over 8 GPUs": step["optimizer"] * 7 / 8,
    }
    print(f"\nWhat choices in the code are worth, of {step['all']:.4f} s a step")
    for name, value in worth.items():
        print(f"  {name:60s} {value:9.4f} s")
    return worth


# ------------------------------------------------------------------------- held against a clock


@contextlib.contextmanager
def watched(functions: list[tuple], bar: tqdm):
    """Seconds by part while the context lasts. The functions (owner, name, part) do a part's work;
    one inside another counts for itself alone."""
    seconds, stack, since = Counter(), ["the rest"], clock()

    def tick() -> None:
        nonlocal since
        now = clock()
        seconds[stack[-1]] += now - since
        since = now
        bar.update()

    @contextlib.contextmanager
    def within(part: str):
        tick()
        stack.append(part)
        try:
            yield
        finally:
            tick()
            stack.pop()

    with contextlib.ExitStack() as patches:
        for owner, name, part in functions:
            function = within(part)(getattr(owner, name))
            patches.enter_context(mock.patch.object(owner, name, function))
        yield seconds
        tick()


def measured(config, target, drafter):
    """Seconds of a step by part, the fastest of four or of those in ten seconds; its blocks."""
    functions = [
        (target, "prefill", "prefill"),
        (drafter, "block", "draft"),
        (drafter, "remember", "draft"),
        (drafter, "draw_branches", "draw"),
        (train, "build_tree", "tree"),
        (serve, "build_tree", "tree"),
        (target, "score", "score"),
        (model, "attention", "attention"),
        (train, "step_loss", "head and loss"),
        (Tensor, "backward", "backward"),
        (optim, "optimizer_step", "optimizer"),
        (serve.Batch, "verify", "verify"),
        (serve.Batch, "commit", "commit"),
    ]
    P, T = config.prompt_length, config.prompt_length + config.response_length
    ids = torch.Generator().manual_seed(config.seed)
    rows = torch.randint(target.num_tokens - 1, (config.batch_size, T), generator=ids)
    texts = References.from_lists(rows[:, :P].tolist(), rows[:, P:].tolist(), 0)
    trunks = Trunks(target, texts, drafter.config.target_layer_ids, cache_gib=0.0)
    optimizers = optim.make_optimizers(drafter, 1e-9, 1e-9)  # the drafter stays what it is
    runs = []
    begin = clock()
    with tqdm(desc=f"measuring {config.mode}", unit=" parts") as bar:
        while len(runs) < 4 and clock() - begin < 10:
            with watched(functions, bar) as seconds:
                (blocks,) = train.next_batch(config, drafter, trunks, 0, ())
                train.gradient(config, train.Step(config, drafter), drafter, [blocks])
                optim.optimizer_step(optimizers)
            runs.append(seconds)
    best = min(runs, key=Counter.total)
    return best | {"all": best.total()}, blocks


def check(config, s: Shapes) -> dict:
    """Print seconds predicted beside seconds measured."""
    seen = {}
    # without the text branch: what is counted is what was proposed, as in a rollout
    config = replace(config, mode="specopd", grad_accum=1, text_branch=False)
    seen["SpecOPD"], blocks = measured(config, s.target, s.drafter)
    s.N = int(blocks.counts["nodes"]) / s.B
    config = replace(config, mode="rollout", num_greedy=0)
    seen["rollouts"], blocks = measured(config, s.target, s.drafter)
    rounds = blocks.anchors.shape[1]
    _, predicted = predict(s, rounds)
    print(f"{s.N:.0f} nodes to a text's tree, {rounds} rounds to a rollout")
    for way, parts in seen.items():
        print(f"\n{way:20s}  predicted   measured ms   measured / predicted   share")
        for part, seconds in parts.items():
            times, share = seconds / predicted[way][part], seconds / parts["all"]
            beyond = "" if 1 / 1.5 <= times <= 1.5 or share < 0.05 else "   beyond 1.5"
            both = f"{1e3 * predicted[way][part]:11.2f} {1e3 * seconds:10.2f}"
            print(f"  {part:18s}{both}   {times:20.2f}   {100 * share:3.0f} %{beyond}")
    return {"predicted": predicted, "measured": seen}


# ------------------------------------------------------------------------------------- the command


@dataclass(frozen=True)
class Config(plan.Config):
    out: str = flag("runs/roofline", "folder for summary.json", group="the plan")
    gpu: str = flag("h100", "the machine; cpu: this one", "the plan", choices=(*GPUS, "cpu"))
    al: float = flag(3.0, "acceptance length that rollouts are given", "the plan", low=1)
    check: bool = flag(False, "run it on this CPU, and compare", "the plan")


def run(config: Config) -> dict:
    if not (config.prompt_length and config.response_length):
        raise ValueError("roofline: --prompt-length and --response-length must be above 0")
    size = f"{config.batch_size} texts of {config.prompt_length} + {config.response_length} tokens"
    print(f"{size}, {config.num_anchors} anchors x {config.num_branches}", flush=True)
    if config.check:
        target = open_target(replace(config, device="cpu", dtype="float32"))
        mask = config.mask_token_id  # any row will do
        mask_row = int(mask) if mask.isdecimal() else target.config.vocab_size - 1
        drafter = fresh_drafter(config, target, mask_row)
    else:
        target, drafter = plan.build_on_meta(config)
    is_here = config.check or config.gpu == "cpu"
    machine = this_cpu(target.config) if is_here else GPUS[config.gpu]
    s = Shapes(config, target, drafter, machine)
    peak, bandwidth = machine.rate(s.kind, 1e9) / 1e12, machine.rate("moved", 2**21) / 1e9
    rates = f"{peak:.3g} TFLOP/s, {bandwidth:.0f} GB/s, {1e6 * machine.launch:.1f} us a launch"
    print(f"{'this CPU' if is_here else config.gpu}: {rates}", flush=True)
    if config.check:
        return check(config, s)
    rounds = max(1, round(config.response_length / config.al))
    phases, seconds = predict(s, rounds)
    print_phases(phases)
    c1 = ratio(s, seconds, rounds)
    worth = items(s, seconds["SpecOPD"], rounds)
    return {"phases": phases, "seconds": seconds, "c1": c1, "items": worth}
