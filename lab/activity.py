"""The share of time with a kernel running on a GPU, in training steps of both ways.

torch's profiler notes every kernel of some steps; kernels that overlap count once.

    python -m lab activity --target FOLDER --drafter FOLDER --device cuda
    pytest tests/lab/test_commands.py
"""

import time

import torch
from torch.autograd import DeviceType

from lab.common import wait
from lab.workflows import BothWaysConfig as Config
from lab.workflows import Workflows
from train import TrainConfig


def covered(spans: list) -> float:
    """The length of line that intervals (begin, end) cover together."""
    length, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        length += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return length


def kernel_share(config: Config, workflows: Workflows, way: TrainConfig) -> float:
    """The share of time with a kernel running."""
    workflows.step(way, 0)  # warms up
    wait()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        begin = time.perf_counter()
        for number in range(1, config.repeats + 1):
            workflows.step(way, number)
        wait()
        seconds = time.perf_counter() - begin
    kernels = [
        (event.time_range.start, event.time_range.end)
        for event in profile.events()
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    ]
    return covered(kernels) / 1e6 / seconds


def run(config: Config) -> dict:
    if config.device == "cpu":
        raise ValueError("activity is measured on a GPU: --device cuda")
    workflows = Workflows(config, max(config.num_anchors))
    shares = {}
    for name, way in workflows.both_ways(config).items():
        shares[name] = kernel_share(config, workflows, way)
        print(f"{name:25s} a kernel runs {100 * shares[name]:.1f} % of the time")
    return shares
