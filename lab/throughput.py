"""Supervised tokens per second of training steps: SpecOPD against sequential rollouts.

Both ways train the same drafter on texts of one length without stop tokens, at learning rate 0.
Every step prefills its trunks. For each way: updates per second, supervised tokens per update,
their product, the share of each stage, and on a GPU the share of time with a kernel running, in one
step more, whose rollouts are short: the profiler keeps every kernel.

    python -m lab throughput --target FOLDER --drafter FOLDER --num-anchors 64 --num-branches 1 2 4
    pytest tests/lab/test_commands.py
"""

import statistics
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from drafter import PLAIN
from lab.common import LabConfig, StageClock, format_shares, held_out_prompts, open_pair, timed
from serve import generate
from support.flags import DTYPES, flag
from support.optim import make_optimizers, optimizer_step
from support.prepare import Trunks
from support.references import References
from train import Step, TrainConfig, gradient, next_batch

ROLLOUTS = (1, 8, 32)  # decoded at once; there are as many texts as the last of them
PROFILED_TOKENS = 64  # of a rollout
SPEEDS = ("updates_per_s", "tokens_per_update", "tokens_per_s")


@dataclass(frozen=True)
class Config(LabConfig):
    drafter: str = flag("", "a drafter's folder")
    trunk_length: int = flag(512, "tokens of a text, its prompt included", low=2)
    prompt_length: int = flag(64, "tokens of its prompt", low=1)
    num_anchors: tuple = flag((64,), "SpecOPD: anchors of a text", kind=int, low=1)
    num_branches: tuple = flag((1, 2), "SpecOPD: branches of an anchor", kind=int, low=1)
    repeats: int = flag(7, "timed steps", low=1)
    precision: str = flag(TrainConfig.precision, "the drafter's arithmetic", choices=DTYPES)


class Workflows:
    """A target, a drafter and texts, ready for training steps."""

    def __init__(self, config: Config):
        num_new = config.trunk_length - config.prompt_length
        if max(config.num_anchors) >= num_new:
            room = f"--trunk-length {config.trunk_length} - --prompt-length {config.prompt_length}"
            raise ValueError(f"--num-anchors {max(config.num_anchors)} must be below {room}")
        target, self.drafter = open_pair(config, torch.float32)
        prompts = held_out_prompts(config, ROLLOUTS[-1])
        results = generate(target, None, prompts, num_new, PLAIN, config.seed, progress="texts")
        texts = References.from_lists(prompts, [result.tokens for result in results], 0)
        self.trunks = Trunks(target, texts, self.drafter.config.target_layer_ids, cache_gib=0.0)
        self.optimizers = make_optimizers(self.drafter, TrainConfig.matrix_lr, TrainConfig.lr)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = 0.0

    def step(self, way: TrainConfig, number: int) -> int:
        """Make one training step, as train.py does but for clipping -> its supervised tokens."""
        parts = next_batch(way, self.drafter, self.trunks, number, ())
        figures = gradient(way, Step(way, self.drafter), self.drafter, parts)
        optimizer_step(self.optimizers)
        return figures["supervised"]

    def stage_shares(self, way: TrainConfig, number: int) -> dict[str, float]:
        clock = StageClock()
        batch = partial(next_batch, way, self.drafter, self.trunks, number, ())
        if way.mode == "rollout":
            parts = clock("decode", batch)
        else:
            on_target = clock.watching(self.drafter.target, prefill="prefill", score="score")
            with on_target, clock.watching(self.drafter, propose="sample"):
                parts = batch()
        loss = partial(clock, "loss", Step(way, self.drafter))
        clock("backward", gradient, way, loss, self.drafter, parts)
        clock.seconds["backward"] -= clock.seconds["loss"]
        clock("update", optimizer_step, self.optimizers)
        return clock.shares()


def both_ways(config: Config) -> dict[str, TrainConfig]:
    """Rollouts in batches of several sizes, and SpecOPD on one text at a time."""
    num_new = config.trunk_length - config.prompt_length
    same = dict(seed=config.seed, device=config.device, precision=config.precision)
    # without the text branch: what is counted is what was proposed, as in a rollout
    same |= dict(num_greedy=0, text_branch=False)
    rollout = TrainConfig("rollout", response_length=num_new, **same)
    ways = {f"rollouts, {n} at once": replace(rollout, batch_size=n) for n in ROLLOUTS}
    specopd = replace(rollout, mode="specopd", batch_size=1)
    for A in config.num_anchors:
        for K in config.num_branches:
            ways[f"SpecOPD, {A} anchors x {K}"] = replace(specopd, num_anchors=A, num_branches=K)
    return ways


def covered(spans: list) -> float:
    """The length of line that intervals (begin, end) cover together."""
    length, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        length += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return length


def kernel_share(function) -> float:
    """The share of time with a kernel running on the GPU during a call."""
    with profile(activities=[ProfilerActivity.CUDA]) as noted:
        _, seconds = timed(function)
    events = [event for event in noted.events() if event.device_type == DeviceType.CUDA]
    ranges = [event.time_range for event in events if not event.is_user_annotation]
    return covered([(span.start, span.end) for span in ranges]) / 1e6 / seconds


def measure_way(config: Config, workflows: Workflows, way: TrainConfig) -> dict:
    step = partial(workflows.step, way)
    numbers = range(1, config.repeats + 1)
    step(0)  # warms up
    steps = [timed(step, number) for number in numbers]
    tokens = statistics.mean(count for count, _ in steps)
    seconds = statistics.median(duration for _, duration in steps)
    row = dict(zip(SPEEDS, (1 / seconds, tokens, tokens / seconds)))
    row["seconds"] = [duration for _, duration in steps]
    row["shares"] = workflows.stage_shares(way, config.repeats + 1)
    if config.device != "cpu":
        short = replace(way, response_length=min(way.response_length, PROFILED_TOKENS))
        row["kernel_share"] = kernel_share(partial(workflows.step, short, config.repeats + 1))
    return row


def run(config: Config) -> dict:
    workflows = Workflows(config)
    size = f"W = {workflows.drafter.config.num_draft_tokens}, texts of {config.trunk_length} tokens"
    machine = f"{config.device}, {torch.get_num_threads()} threads"
    print(f"{size}, {machine}, medians of {config.repeats} steps")
    print("way                       updates/s  tokens/update  tokens/s | where the time goes")
    rows = {}
    for name, way in both_ways(config).items():
        row = measure_way(config, workflows, way)
        rows[name] = row
        speed = f"{row['updates_per_s']:10.2f} {row['tokens_per_update']:14.0f}"
        print(f"{name:25s} {speed} {row['tokens_per_s']:9.0f} | {format_shares(row['shares'])}")
        if "kernel_share" in row:
            print(f"{'':25s} a kernel runs {100 * row['kernel_share']:.1f} % of the time")
    best = max((n for n in rows if n.startswith("SpecOPD")), key=lambda n: rows[n]["tokens_per_s"])
    ratios = {}
    for name in (name for name in rows if name.startswith("rollouts")):
        ratios[name] = {key: rows[best][key] / rows[name][key] for key in SPEEDS}
        shown = [f"{x:.2f} x the {k.replace('_per_', '/')}" for k, x in ratios[name].items()]
        print(f"{best} over {name}: {', '.join(shown)}")
    return {"rows": rows, "ratios": ratios, "best": best}
