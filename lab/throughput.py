"""Supervised tokens per second of training steps: SpecOPD against sequential rollouts.

Both ways train the same drafter on texts of the same length, in one process. Rollouts run one at a
time and in batches. Nothing is left out but making the references. For each way: updates per
second, supervised tokens per update, their product, and the share of each stage in one more step.

    python -m lab throughput --target FOLDER --drafter FOLDER --num-anchors 64 --num-branches 1 2 4
    pytest tests/lab/test_commands.py
"""

import statistics
import time
from functools import partial

import torch

from lab.common import StageClock, TimedMethods, wait
from lab.workflows import BothWaysConfig as Config
from lab.workflows import Workflows
from support.optim import optimizer_step
from support.prepare import Trunks
from train import Step, TrainConfig, gradient, next_batch

INSIDE_DECODE = ("sample", "score", "prefill")


def watch_step(workflows: Workflows, way: TrainConfig, number: int) -> StageClock:
    """Make a training step as `Workflows.step` does, and time its stages."""
    clock = StageClock()
    target = TimedMethods(workflows.trunks.target, clock, {"prefill": "prefill", "score": "score"})
    drafter = TimedMethods(workflows.drafter, clock, {"propose": "sample"})
    drafter.target = target
    trunks = Trunks(target, workflows.trunks.references, workflows.trunks.tap_ids, cache_gib=0.0)
    batch = partial(next_batch, way, drafter, trunks, number, ())
    parts = clock("decode", batch) if way.mode == "rollout" else batch()
    loss = partial(clock, "loss", Step(way, workflows.drafter))
    gradient(way, loss, workflows.drafter, parts)
    wait()
    _, _, loss_end = clock.spans[-1]
    clock.spans.append(("backward", loss_end, time.perf_counter()))
    clock("update", optimizer_step, workflows.optimizers)
    return clock


def measure_way(config: Config, workflows: Workflows, way: TrainConfig) -> dict:
    """Speed of one way, and the stages of one more step."""
    on_gpu = config.device != "cpu"
    workflows.timed_step(way, 0)  # warms up
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    steps = [workflows.timed_step(way, 1 + number) for number in range(config.repeats)]
    tokens = statistics.mean(count for count, _ in steps)
    seconds = statistics.median(duration for _, duration in steps)
    begin = time.perf_counter()
    clock = watch_step(workflows, way, 1 + config.repeats)
    watched = time.perf_counter() - begin
    shares = {stage: value / watched for stage, value in clock.seconds().items()}
    if "decode" in shares:
        shares = {stage: x for stage, x in shares.items() if stage not in INSIDE_DECODE}
    row = {
        "updates_per_s": 1 / seconds,
        "tokens_per_update": tokens,
        "tokens_per_s": tokens / seconds,
        "shares": shares,
        "spans": [(stage, b - begin, e - begin) for stage, b, e in clock.spans],
        "seconds": [duration for _, duration in steps],
    }
    if on_gpu:
        row["peak_bytes"] = torch.cuda.max_memory_allocated()
    return row


def print_row(name: str, row: dict) -> None:
    line = ", ".join(f"{stage} {100 * share:.0f} %" for stage, share in row["shares"].items())
    if "peak_bytes" in row:
        line += f"; peak {row['peak_bytes'] / 2**30:.1f} GiB"
    print(
        f"{name:25s} {row['updates_per_s']:10.2f} {row['tokens_per_update']:14.0f} "
        f"{row['tokens_per_s']:9.0f} | {line}"
    )


def ratios_over_rollouts(rows: dict, best: str) -> dict:
    """The best SpecOPD over each kind of rollouts, printed."""
    titles = {
        "updates_per_s": "updates/s",
        "tokens_per_update": "tokens/update",
        "tokens_per_s": "tokens/s",
    }
    ratios = {}
    for name, row in rows.items():
        if name.startswith("rollouts"):
            ratios[name] = {key: rows[best][key] / row[key] for key in titles}
            line = ", ".join(f"{x:.2f} x the {titles[key]}" for key, x in ratios[name].items())
            print(f"{best} over {name}: {line}")
    return ratios


def run(config: Config) -> dict:
    workflows = Workflows(config, max(config.num_anchors))
    print(
        f"texts of {config.trunk_length} tokens, prompts of {config.prompt_length}, W = "
        f"{workflows.drafter.config.num_draft_tokens}, {config.device}, "
        f"{torch.get_num_threads()} threads; medians of {config.repeats} steps\n"
        "way                       updates/s  tokens/update  tokens/s | where the time goes"
    )
    rows = {}
    for name, way in workflows.both_ways(config).items():
        rows[name] = measure_way(config, workflows, way)
        print_row(name, rows[name])
    best = max((n for n in rows if n.startswith("SpecOPD")), key=lambda n: rows[n]["tokens_per_s"])
    return {"rows": rows, "ratios": ratios_over_rollouts(rows, best), "best": best}
