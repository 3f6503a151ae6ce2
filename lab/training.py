"""What training costs: commands of bench.py."""

import statistics
import time
from dataclasses import dataclass, replace

import torch

import loss
import replay
import step as training
from drafter import Drafter, Sampling
from lab.common import BenchConfig, Clock, held_out_prompts, load, median_time, text_of, wait
from loss import make_optimizers
from serve import generate
from support import distributed
from support.data import References
from support.prepare import Trunks
from target import Target
from train import TrainConfig
from tree import build_tree


def line_of(xs: list, ys: list) -> tuple[float, float, float]:
    """The least-squares line through points -> its value at 0, its slope, R^2."""
    x, y = torch.tensor(xs, dtype=torch.double), torch.tensor(ys, dtype=torch.double)
    slope = ((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum()
    start = y.mean() - slope * x.mean()
    rest = (y - start - slope * x).square().sum() / (y - y.mean()).square().sum()
    return start.item(), slope.item(), 1 - rest.item()


@torch.inference_mode()
def bench_tree(config: BenchConfig) -> dict:
    """One prefill and one pass over the tree, against one run of the whole prefix per branch, for
    every trunk length and number of anchors; and what a node costs."""
    _check_anchors(config)
    target, drafter = load(config)
    W = drafter.config.num_draft_tokens if drafter else config.num_draft_tokens
    K, figures = config.num_branches, []
    text, _ = text_of(config, target, max(config.trunk_length))
    name = config.target or f"untrained {config.arch}"
    print(
        f"{name}, {config.device}, {torch.get_num_threads()} threads, seed {config.seed}; "
        f"branches of {W}, {K} an anchor; milliseconds\n"
        "trunk anchors |  nodes merged |  tokens alone | packed  merged   alone | "
        "x tokens  x speed  share | gap of p"
    )
    for T in config.trunk_length:
        tokens, lengths = text[:, :T], torch.tensor([T], device=config.device)
        scoring = []
        for A in config.num_anchors:
            row = _packed_and_alone(config, target, drafter, tokens, lengths, A, K, W)
            figures.append(row)
            scoring.append((row["nodes"], 1e3 * row["times"]["scoring"]["median"]))
            packed, merged, alone = (
                1e3 * row["times"][k]["median"] for k in ("packed", "merged", "alone")
            )
            print(
                f"{T:5d} {A:7d} | {row['nodes']:6d} {row['merged']:6d} | {row['alone']:13d} | "
                f"{packed:6.1f} {merged:7.1f} {alone:7.0f} | {row['ideal']:8.1f} "
                f"{alone / packed:8.1f} {row['share']:6.2f} | {row['gap']:.1e}"
            )
        if len(scoring) > 2:
            start, slope, fit = line_of(*zip(*scoring))
            figures[-1]["scoring_line"] = {"start_ms": start, "ms_per_node": slope, "r2": fit}
            print(f"{T:5d} scoring alone: {start:.1f} ms + {slope:.4f} ms a node, R^2 {fit:.4f}")
    nodes, merged = (sum(row[k] for row in figures) for k in ("nodes", "merged"))
    if nodes:  # blocks of one draft have none
        print(f"merging saved {100 * (1 - merged / nodes):.1f} % of all nodes")
    return {"rows": figures}


def _check_anchors(config) -> None:
    if max(config.num_anchors) >= min(config.trunk_length):
        raise ValueError("--num-anchors: fewer than --trunk-length are needed")


def _anchors(config, T: int, A: int) -> tuple[torch.Tensor, torch.Generator]:
    """A positions (1,A) of a trunk of T, and the generator for what hangs there."""
    generator = torch.Generator().manual_seed(config.seed)
    anchors = torch.randperm(T - 1, generator=generator)[:A].sort().values[None]
    return anchors.to(config.device), generator


def _packed_and_alone(config, target, drafter, tokens, lengths, A, K, W) -> dict:
    T = tokens.shape[1]
    anchors, generator = _anchors(config, T, A)
    trunk = target.prefill(tokens, lengths)
    if drafter:
        branches = drafter.propose(trunk, anchors, K, Sampling(1.0), generator).tokens
    else:
        branches = torch.randint(0, target.num_tokens, (1, A, K, W), generator=generator)
        branches = branches.to(config.device)
    prefixes = [
        torch.cat([tokens[0, : a + 1], branch[: W - 1]])[None]
        for a, row in zip(anchors[0].tolist(), branches[0])
        for branch in row
    ]

    def packed(merge):
        tree = build_tree(tokens, lengths, anchors, branches, merge)
        return target.head(target.score(target.prefill(tokens, lengths), tree).hidden[..., :W, :])

    def alone():
        for prefix in prefixes:
            length = torch.tensor([prefix.shape[1]], device=config.device)
            target.head(target.prefill(prefix, length, tap_ids=()).hidden[:, -W:])

    trees = [build_tree(tokens, lengths, anchors, branches, merge) for merge in (False, True)]
    p = packed(True).softmax(-1)[0].flatten(0, 1)
    picked = range(0, A * K, max(1, A * K // 16))  # some branches, for the check
    gap = max((target(prefixes[i]).softmax(-1)[0, -W:] - p[i]).abs().max().item() for i in picked)
    runs = {
        "packed": lambda: packed(False),
        "merged": lambda: packed(True),
        "alone": alone,
        "scoring": lambda: target.score(trunk, trees[0]),
    }
    times = {name: median_time(run, config.repeats, config.patience) for name, run in runs.items()}
    each = sum(prefix.shape[1] for prefix in prefixes)
    ideal = each / (T + trees[0].num_nodes)
    speed = times["alone"]["median"] / times["packed"]["median"]
    return {
        "trunk": T,
        "anchors": A,
        "nodes": trees[0].num_nodes,
        "merged": trees[1].num_nodes,
        "alone": each,
        "ideal": ideal,
        "share": speed / ideal,
        "gap": gap,
        "times": times,
    }


@torch.inference_mode()
def bench_replay(config: BenchConfig) -> dict:
    """Checkpoints every so many trunk tokens: what they hold, what replaying from them to all
    anchors costs, and what the whole pass over a tree then takes."""
    _check_anchors(config)
    target, _ = load(config)
    if not target.config.hybrid:
        raise ValueError("replay needs a target with linear layers: --arch gdn, or --target FOLDER")
    T, A, W = config.trunk_length[0], config.num_anchors[0], config.num_draft_tokens
    tokens, lengths = text_of(config, target, T)
    anchors, generator = _anchors(config, T, A)
    branches = torch.randint(0, target.num_tokens, (1, A, 1, W), generator=generator)
    tree = build_tree(tokens, lengths, anchors, branches.to(config.device), merge=False)
    chosen = replay.checkpoint_spacing(target.config, target.lm_head.weight.element_size())
    print(
        f"trunk of {T}, {A} anchors, {tree.num_nodes} nodes, {torch.get_num_threads()} threads; "
        f"milliseconds, all linear layers\nspacing | states MB  tokens MB |  replay  scoring  "
        "prefill | largest gap of a state"
    )
    exact, figures = None, []
    for every in sorted({1, 8, 16, chosen, 256, 1024, T + 1}):
        trunk = target.prefill(tokens, lengths, tap_ids=(), checkpoint_every=every)
        linear = [state for state in trunk.states if "u" in state]
        found = replay.replay_states(linear[0], anchors)
        exact = found if exact is None else exact  # spacing 1: the state itself is kept
        runs = {
            "replay": lambda: [replay.replay_states(state, anchors) for state in linear],  # noqa: B023
            "scoring": lambda: target.score(trunk, tree),  # noqa: B023
            "prefill": lambda: target.prefill(tokens, lengths, tap_ids=(), checkpoint_every=every),  # noqa: B023
        }
        times = {name: median_time(run, config.repeats) for name, run in runs.items()}
        held = sum(state["states"].nbytes for state in linear)
        each = sum(state[name].nbytes for state in linear for name in replay.PER_TOKEN)
        gap = (found - exact).abs().max().item()
        shown = "".join(f"{1e3 * t['median']:9.1f}" for t in times.values())
        note = "  the default" if every == chosen else ""
        print(f"{every:7d} | {held / 1e6:9.1f} {each / 1e6:10.1f} |{shown} | {gap:.1e}{note}")
        figures.append(
            {
                "spacing": every,
                "states_bytes": held,
                "tokens_bytes": each,
                "gap": gap,
                "times": times,
            }
        )
    return {"rows": figures, "default": chosen}


@dataclass
class Workflows:
    """Both ways to train on policy, ready to make whole steps on texts of one length."""

    drafter: Drafter
    trunks: Trunks
    optimizers: list
    ways: dict  # by name a TrainConfig

    def step(self, name: str, number: int) -> int:
        """A training step, as train.py makes it but for clipping -> its supervised tokens."""
        config = self.ways[name]
        parts = training.next_batch(config, self.drafter, self.trunks, number, ())
        share = training.Step(config, self.drafter)
        figures = training.gradient(config, share, self.drafter, parts)
        loss.update(self.optimizers)
        return figures["supervised"]

    def timed(self, name: str, number: int) -> tuple[int, float]:
        """A step's supervised tokens and seconds."""
        begin = time.perf_counter()
        tokens = self.step(name, number)
        wait()
        return tokens, time.perf_counter() - begin


def workflows(config: BenchConfig, command: str) -> Workflows:
    target, drafter = load(config, torch.float32, command)
    T, length = config.trunk_length[0], config.prompt_length
    if max(config.num_anchors) > T - length - 1:
        raise ValueError(
            f"--num-anchors {max(config.num_anchors)}: of --trunk-length {T} tokens "
            f"{max(0, T - length - 1)} can be anchors behind --prompt-length {length}"
        )
    # without stop tokens every text has its full length, on both sides
    prompts = held_out_prompts(config, max(32, config.num_prompts), length)
    texts = generate(
        target,
        None,
        prompts,
        T - length,
        1.0,
        config.seed,
        batch_size=len(prompts),
        progress="references",
    )
    references = References.from_lists(prompts, [text.tokens for text in texts], 0)
    common = TrainConfig(mode="specopd", seed=config.seed, response_length=T - length, num_greedy=0)
    ways = {
        f"rollouts, {n} at once": replace(common, mode="rollout", batch_size=n) for n in (1, 8, 32)
    }
    ways |= {
        f"SpecOPD, {A} anchors x {K}": replace(common, batch_size=1, num_anchors=A, num_branches=K)
        for A in config.num_anchors
        for K in sorted({1, 2, config.num_branches})
    }
    optimizers = make_optimizers(drafter, common.matrix_lr, common.lr)
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["lr"] = 0.0  # the drafter stays what it is
    # no trunk is kept: every step prefills
    return Workflows(drafter, Trunks(target, references, 0.0), optimizers, ways)


PARTS = {
    "decode": (training, "decode"),
    "prefill": (Trunks, "__call__"),
    "sample": (Drafter, "propose"),
    "score": (Target, "score"),
    "loss": (loss, "chunked"),
    "backward": (torch.Tensor, "backward"),
    "update": (loss, "update"),
}


def bench_throughput(config: BenchConfig) -> dict:
    """Supervised tokens per second of whole training steps: sequential rollouts, alone and in
    batches, against SpecOPD on references of the same length. Nothing is left out but the
    references' making; SpecOPD's prefill of them is counted, though training keeps it."""
    flows = workflows(config, "throughput")
    print(
        f"texts of {config.trunk_length[0]} tokens, prompts of {config.prompt_length}, W = "
        f"{flows.drafter.config.num_draft_tokens}, {config.device}, {torch.get_num_threads()} "
        f"threads; medians of {config.repeats} steps\n"
        "way                       updates/s  tokens/update  tokens/s | "
        "where the time goes"
    )
    rows = {}
    for name in flows.ways:
        flows.timed(name, 0)  # warms up
        if config.device != "cpu":
            torch.cuda.reset_peak_memory_stats()
        counts, times = zip(*(flows.timed(name, 1 + step) for step in range(config.repeats)))
        seconds, tokens = statistics.median(times), statistics.mean(counts)
        clock, begin = Clock(PARTS), time.perf_counter()  # one step more, which waits at every part
        _, watched = flows.timed(name, 1 + config.repeats)
        clock.restore()
        shares = {k: v / watched for k, v in clock.seconds.items()}
        if "decode" in shares:  # which drafts and scores by itself
            shares = {k: v for k, v in shares.items() if k not in ("sample", "score", "prefill")}
        spans = [(k, b - begin, e - begin) for k, b, e in clock.spans]
        rows[name] = {
            "updates_per_s": 1 / seconds,
            "tokens_per_update": tokens,
            "tokens_per_s": tokens / seconds,
            "shares": shares,
            "spans": spans,
            "seconds": list(times),
        }
        line = ", ".join(f"{k} {100 * v:.0f} %" for k, v in shares.items())
        if config.device != "cpu":
            rows[name]["peak_bytes"] = peak = torch.cuda.max_memory_allocated()
            line += f"; peak {peak / 2**30:.1f} GiB"
        print(f"{name:25s} {1 / seconds:10.2f} {tokens:14.0f} {tokens / seconds:9.0f} | {line}")
    best = max((n for n in rows if n.startswith("SpecOPD")), key=lambda n: rows[n]["tokens_per_s"])
    ratios = {}
    for name in rows:
        if name.startswith("rollouts"):
            ratios[name] = {
                k: rows[best][k] / rows[name][k]
                for k in ("updates_per_s", "tokens_per_update", "tokens_per_s")
            }
            shown = ", ".join(
                f"{v:.2f} x the {k.replace('_per_s', '/s').replace('_per_', '/')}"
                for k, v in ratios[name].items()
            )
            print(f"{best} over {name}: {shown}")
    return {"rows": rows, "ratios": ratios, "best": best}


def covered(spans: list) -> float:
    """How much of the line intervals (begin, end) cover together."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def bench_activity(config: BenchConfig) -> dict:
    """The share of time with a kernel running on the GPU, in whole training steps of both kinds."""
    if config.device == "cpu":
        raise ValueError("activity is a GPU's: --device cuda")
    flows, figures = workflows(config, "activity"), {}
    from torch.autograd import DeviceType

    for name in flows.ways:
        flows.step(name, 0)
        wait()
        kinds = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=kinds) as profile:
            begin = time.perf_counter()
            for number in range(1, config.repeats + 1):
                flows.step(name, number)
            wait()
            seconds = time.perf_counter() - begin
        kernels = [
            (event.time_range.start, event.time_range.end)
            for event in profile.events()
            if event.device_type == DeviceType.CUDA and not event.is_user_annotation
        ]
        figures[name] = covered(kernels) / 1e6 / seconds
        print(f"{name:25s} a kernel runs {100 * figures[name]:.1f} % of the time")
    return figures


def bench_scale(config: BenchConfig) -> dict | None:
    """Whole SpecOPD steps of one batch by one process, the others idle, and by all of them; what
    their messages and gradients cost, waiting for the slowest included."""
    size, lead = distributed.num_processes(), distributed.rank() == 0
    if size == 1:
        raise ValueError("scale compares processes: torchrun --nproc_per_node=2 bench.py scale ...")
    flows = workflows(config, "scale")
    if config.batch_size % size:
        raise ValueError(f"--batch-size {config.batch_size} is no multiple of the {size} processes")
    way = replace(
        next(way for name, way in flows.ways.items() if name.startswith("SpecOPD")),
        batch_size=config.batch_size,
        num_branches=config.num_branches,
    )
    whole = training.Step(way, flows.drafter)
    share = distributed.data_parallel(whole)

    def step(module, number: int) -> tuple[float, int]:
        begin = time.perf_counter()
        parts = training.next_batch(way, flows.drafter, flows.trunks, number, ())
        tokens = training.gradient(way, module, flows.drafter, parts)["supervised"]
        loss.update(flows.optimizers)
        wait()
        return time.perf_counter() - begin, tokens

    def alone(number: int) -> float:
        names = {"size": lambda: 1, "rank": lambda: 0}
        saved = {name: getattr(distributed, name) for name in names}
        vars(distributed).update(names)
        seconds = step(whole, number)[0] if lead else 0.0
        vars(distributed).update(saved)
        distributed.barrier()
        return seconds

    def silent(number: int) -> float:
        with share.no_sync():
            return step(share, number)[0]

    times = {"one process": [], "all": [], "all, gradients not sent": []}
    messages, tokens = [], []
    for number in range(1 + config.repeats):  # in turn, so that all see the same machine
        times["one process"].append(alone(number))
        clock = Clock({"messages": (distributed, "total")})
        seconds, count = step(share, number)
        clock.restore()
        times["all"].append(seconds)
        messages.append(clock.seconds["messages"])
        tokens.append(count)
        times["all, gradients not sent"].append(silent(number))
    distributed.stop()
    if not lead:
        return None
    median = {name: statistics.median(found[1:]) for name, found in times.items()}
    ratio = median["one process"] / median["all"]
    sent = max(0.0, median["all"] - median["all, gradients not sent"])
    said = statistics.median(messages[1:])
    figures = {
        "processes": size,
        "threads": torch.get_num_threads(),
        "seconds": times,
        "ratio": ratio,
        "tokens_per_s": statistics.mean(tokens) / median["all"],
        "messages_share": said / median["all"],
        "gradients_share": sent / median["all"],
    }
    print(
        f"{config.batch_size} texts of {config.trunk_length[0]} tokens a step, "
        f"{way.num_anchors} anchors x {way.num_branches}, {figures['threads']} threads each; "
        f"medians of {config.repeats}"
    )
    for name, seconds in median.items():
        print(
            f"{name:24s} {1e3 * seconds:8.0f} ms, {statistics.mean(tokens) / seconds:7.0f} "
            f"supervised tokens/s"
        )
    print(
        f"{size} processes: {ratio:.2f} x one; messages {100 * figures['messages_share']:.1f} % "
        f"and gradients {100 * figures['gradients_share']:.1f} % of a step"
    )
    return figures
