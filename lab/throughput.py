"""Supervised tokens per second of training steps: SpecOPD against sequential rollouts.

Both ways train the same drafter in one process, on texts of one length without stop tokens. Every
learning rate is 0, so that the drafter stays the same, and every step prefills its trunks, although
training keeps them. For each way: updates per second, supervised tokens per update, their product,
the share of each stage in one more step, and on a GPU the share of time with a kernel running.

    python -m lab throughput --target FOLDER --drafter FOLDER --num-anchors 64 --num-branches 1 2 4
    pytest tests/lab/test_commands.py
"""

import statistics
import time
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch.autograd import DeviceType

from drafter import PLAIN
from lab.common import LabConfig, StageClock, format_shares, held_out_prompts, open_pair, timed
from serve import generate
from support.data import References
from support.flags import flag
from support.optim import make_optimizers, optimizer_step
from support.prepare import Trunks
from train import Step, TrainConfig, gradient, next_batch

ROLLOUTS = (1, 8, 32)  # decoded at once; there are as many texts as the last of them


@dataclass(frozen=True)
class Config(LabConfig):
    drafter: str = flag("", "a drafter's folder")
    trunk_length: int = flag(512, "tokens of a text, its prompt included", low=2)
    prompt_length: int = flag(64, "tokens of its prompt", low=1)
    num_anchors: tuple = flag((64,), "SpecOPD: anchors of a text", kind=int, low=1)
    num_branches: tuple = flag((1, 2), "SpecOPD: branches of an anchor", kind=int, low=1)
    repeats: int = flag(7, "timed steps", low=1)


class Workflows:
    """A target, a drafter and texts, ready to make training steps in different ways."""

    def __init__(self, config: Config):
        self.config = config
        self.response_length = config.trunk_length - config.prompt_length
        limit = max(0, self.response_length - 1)
        if max(config.num_anchors) > limit:
            raise ValueError(
                f"--num-anchors {max(config.num_anchors)}: of --trunk-length {config.trunk_length} "
                f"tokens {limit} can be anchors behind --prompt-length {config.prompt_length}"
            )
        self.target, self.drafter = open_pair(config, torch.float32)
        tap_ids = self.drafter.config.target_layer_ids
        self.trunks = Trunks(self.target, self.write_texts(), tap_ids, cache_gib=0.0)
        self.optimizers = make_optimizers(self.drafter, TrainConfig.matrix_lr, TrainConfig.lr)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = 0.0

    def write_texts(self) -> References:
        """Held-out prompts, each continued by the target to --trunk-length tokens."""
        prompts = held_out_prompts(self.config, ROLLOUTS[-1])
        how = (self.response_length, PLAIN, self.config.seed)
        results = generate(self.target, None, prompts, *how, progress="references")
        return References.from_lists(prompts, [result.tokens for result in results], 0)

    def ways(self) -> dict[str, TrainConfig]:
        """Rollouts in batches of several sizes, and SpecOPD on one text at a time."""
        size = {"seed": self.config.seed, "response_length": self.response_length}
        rollout = TrainConfig(mode="rollout", num_greedy=0, **size)
        ways = {f"rollouts, {n} at once": replace(rollout, batch_size=n) for n in ROLLOUTS}
        specopd = replace(rollout, mode="specopd", batch_size=1)
        for A in self.config.num_anchors:
            for K in self.config.num_branches:
                way = replace(specopd, num_anchors=A, num_branches=K)
                ways[f"SpecOPD, {A} anchors x {K}"] = way
        return ways

    def step(self, way: TrainConfig, number: int) -> int:
        """Make one training step, as train.py does but for clipping -> its supervised tokens."""
        parts = next_batch(way, self.drafter, self.trunks, number, ())
        figures = gradient(way, Step(way, self.drafter), self.drafter, parts)
        optimizer_step(self.optimizers)
        return figures["supervised"]

    def stage_shares(self, way: TrainConfig, number: int) -> dict[str, float]:
        """Make a training step as `step` does -> the share of each stage."""
        clock = StageClock()
        batch = partial(next_batch, way, self.drafter, self.trunks, number, ())
        begin = time.perf_counter()
        if way.mode == "rollout":
            parts = clock("decode", batch)
        else:
            with (
                clock.watching(self.target, prefill="prefill", score="score"),
                clock.watching(self.drafter, propose="sample"),
            ):
                parts = batch()
        loss = partial(clock, "loss", Step(way, self.drafter))
        clock("backward", gradient, way, loss, self.drafter, parts)
        clock.seconds["backward"] -= clock.seconds["loss"]
        clock("update", optimizer_step, self.optimizers)
        return clock.shares(time.perf_counter() - begin)


def covered(spans: list) -> float:
    """The length of line that intervals (begin, end) cover together."""
    length, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        length += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return length


def kernel_share(steps) -> float:
    """The share of time with a kernel running on the GPU while steps() runs."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        seconds = timed(steps)
    kernels = [
        (event.time_range.start, event.time_range.end)
        for event in profile.events()
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    ]
    return covered(kernels) / 1e6 / seconds


def measure_way(config: Config, workflows: Workflows, way: TrainConfig) -> dict:
    """Speed of one way, and the stages of one more step."""
    tokens = []

    def step(number: int) -> None:
        tokens.append(workflows.step(way, number))

    on_gpu = config.device != "cpu"
    step(0)  # warms up
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    seconds = [timed(partial(step, number)) for number in range(1, config.repeats + 1)]
    per_update = statistics.mean(tokens[1:])
    median = statistics.median(seconds)
    row = {
        "updates_per_s": 1 / median,
        "tokens_per_update": per_update,
        "tokens_per_s": per_update / median,
        "seconds": seconds,
        "shares": workflows.stage_shares(way, config.repeats + 1),
    }
    if on_gpu:
        row["peak_bytes"] = torch.cuda.max_memory_allocated()
        row["kernel_share"] = kernel_share(lambda: [step(n) for n in range(1, config.repeats + 1)])
    return row


def print_row(name: str, row: dict) -> None:
    line = format_shares(row["shares"])
    if "peak_bytes" in row:
        share = f"a kernel runs {100 * row['kernel_share']:.1f} % of the time"
        line += f"; peak {row['peak_bytes'] / 2**30:.1f} GiB; {share}"
    print(
        f"{name:25s} {row['updates_per_s']:10.2f} {row['tokens_per_update']:14.0f} "
        f"{row['tokens_per_s']:9.0f} | {line}"
    )


def ratios_over_rollouts(rows: dict, best: str) -> dict:
    """The best SpecOPD over each kind of rollouts, printed."""
    keys = ("updates_per_s", "tokens_per_update", "tokens_per_s")
    ratios = {}
    for name in rows:
        if name.startswith("rollouts"):
            ratios[name] = {key: rows[best][key] / rows[name][key] for key in keys}
            shown = [
                f"{x:.2f} x the {key.replace('_per_', '/')}" for key, x in ratios[name].items()
            ]
            print(f"{best} over {name}: {', '.join(shown)}")
    return ratios


def run(config: Config) -> dict:
    workflows = Workflows(config)
    print(
        f"texts of {config.trunk_length} tokens, prompts of {config.prompt_length}, W = "
        f"{workflows.drafter.config.num_draft_tokens}, {config.device}, "
        f"{torch.get_num_threads()} threads; medians of {config.repeats} steps\n"
        "way                       updates/s  tokens/update  tokens/s | where the time goes"
    )
    rows = {}
    for name, way in workflows.ways().items():
        rows[name] = measure_way(config, workflows, way)
        print_row(name, rows[name])
    best = max((n for n in rows if n.startswith("SpecOPD")), key=lambda n: rows[n]["tokens_per_s"])
    return {"rows": rows, "ratios": ratios_over_rollouts(rows, best), "best": best}
