"""SpecOPD steps of one batch by all processes and by one; the cost of their messages.

First all processes make steps together, with and without sending gradients. Then they part, and
the first one makes the same steps alone. Waiting for the slowest process counts as a message.

    torchrun --nproc_per_node=2 -m lab scale --target FOLDER --drafter FOLDER
    pytest -m slow tests/lab/test_commands.py
"""

import statistics
from dataclasses import dataclass, replace

import torch

from lab.workflows import WorkflowConfig, Workflows
from support import distributed
from support.flags import flag
from train import Step, TrainConfig


@dataclass(frozen=True)
class Config(WorkflowConfig):
    num_anchors: int = flag(64, "anchors of a text", low=1)
    num_branches: int = flag(1, "branches of an anchor", low=1)
    batch_size: int = flag(8, "texts of a step, of all processes", low=1)


def steps_together(config: Config, workflows: Workflows, way: TrainConfig) -> tuple[dict, float]:
    """Seconds of each step by all processes, of one that sends no gradients, and of the other
    messages; supervised tokens per step."""
    module = distributed.data_parallel(Step(way, workflows.drafter))
    seconds = {"all": [], "all, gradients not sent": [], "messages": []}
    counts = []
    for number in range(1 + config.repeats):  # in turn, so that all see the same machine
        tokens, duration = workflows.timed_step(way, number, module)
        counts.append(tokens)
        seconds["all"].append(duration)
        with module.no_sync():
            _, duration = workflows.timed_step(way, number, module)
            seconds["all, gradients not sent"].append(duration)
            seconds["messages"].append(message_seconds(workflows, way, number, module))
    return seconds, statistics.mean(counts)


def message_seconds(workflows: Workflows, way: TrainConfig, number: int, module) -> float:
    """Seconds that a step spends in messages, by torch's profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        workflows.step(way, number, module)
    events = [event for event in profile.events() if event.name.endswith(":all_reduce")]
    return sum(event.time_range.elapsed_us() for event in events) / 1e6


def run(config: Config) -> dict | None:
    device = distributed.start(config.device)
    size = distributed.num_processes()
    if size == 1:
        raise ValueError("scale compares processes: torchrun --nproc_per_node=2 -m lab scale ...")
    if config.batch_size % size:
        raise ValueError(f"--batch-size {config.batch_size} is no multiple of the {size} processes")
    workflows = Workflows(replace(config, device=device), config.num_anchors)
    way = replace(
        workflows.specopd,
        batch_size=config.batch_size,
        num_anchors=config.num_anchors,
        num_branches=config.num_branches,
    )
    seconds, tokens = steps_together(config, workflows, way)
    is_main = distributed.is_main()
    distributed.stop()  # from here on each process is alone
    if not is_main:
        return None
    steps = [workflows.timed_step(way, number) for number in range(1 + config.repeats)]
    seconds["one process"] = [duration for _, duration in steps]
    print(
        f"{config.batch_size} texts of {config.trunk_length} tokens a step, "
        f"{config.num_anchors} anchors x {config.num_branches}, "
        f"{torch.get_num_threads()} threads each; medians of {config.repeats}"
    )
    return summarize(seconds, tokens, size)


def summarize(seconds: dict, tokens: float, size: int) -> dict:
    """Print and return what several processes gain and cost."""
    median = {name: statistics.median(values[1:]) for name, values in seconds.items()}
    messages = median.pop("messages")
    ratio = median["one process"] / median["all"]
    sent = max(0.0, median["all"] - median["all, gradients not sent"])
    figures = {
        "processes": size,
        "threads": torch.get_num_threads(),
        "seconds": seconds,
        "ratio": ratio,
        "tokens_per_s": tokens / median["all"],
        "messages_share": messages / median["all"],
        "gradients_share": sent / median["all"],
    }
    for name, value in median.items():
        print(f"{name:24s} {1e3 * value:8.0f} ms, {tokens / value:7.0f} supervised tokens/s")
    print(
        f"{size} processes: {ratio:.2f} x one; messages {100 * figures['messages_share']:.1f} % "
        f"and gradients {100 * figures['gradients_share']:.1f} % of a step"
    )
    return figures
