"""Whole training steps of both on-policy ways, for throughput, activity and scale.

All texts have one length and no stop token, so that every step works on full texts. Every learning
rate is 0, so that the drafter stays the same from step to step. Every step prefills its trunks,
although training keeps them.
"""

import time
from dataclasses import dataclass, replace

import torch

from drafter import PLAIN
from lab.common import LabConfig, held_out_prompts, open_pair, wait
from serve import generate
from support.data import References
from support.flags import flag
from support.optim import make_optimizers, optimizer_step
from support.prepare import Trunks
from train import Step, TrainConfig, gradient, next_batch

NUM_TEXTS = 32  # as many as the largest batch of rollouts


@dataclass(frozen=True)
class WorkflowConfig(LabConfig):
    """Flags of every command that makes training steps."""

    drafter: str = flag("", "a drafter's folder")
    trunk_length: int = flag(512, "tokens of a text, its prompt included", low=2)
    prompt_length: int = flag(64, "tokens of its prompt", low=1)
    repeats: int = flag(7, "timed steps", low=1)


@dataclass(frozen=True)
class BothWaysConfig(WorkflowConfig):
    """Flags of the commands that compare SpecOPD with rollouts."""

    num_anchors: tuple = flag((64,), "SpecOPD: anchors of a text", kind=int, low=1)
    num_branches: tuple = flag((1, 2), "SpecOPD: branches of an anchor", kind=int, low=1)


class Workflows:
    """A target, a drafter and texts, ready to make training steps in different ways."""

    def __init__(self, config: WorkflowConfig, max_anchors: int):
        response_length = config.trunk_length - config.prompt_length
        if max_anchors > response_length - 1:
            raise ValueError(
                f"--num-anchors {max_anchors}: of --trunk-length {config.trunk_length} tokens "
                f"{max(0, response_length - 1)} can be anchors behind --prompt-length "
                f"{config.prompt_length}"
            )
        target, self.drafter = open_pair(config, torch.float32)
        self.specopd = TrainConfig(
            mode="specopd", seed=config.seed, response_length=response_length, num_greedy=0
        )
        tap_ids = self.drafter.config.target_layer_ids
        self.trunks = Trunks(target, write_texts(config, target), tap_ids, cache_gib=0.0)
        self.optimizers = make_optimizers(self.drafter, self.specopd.matrix_lr, self.specopd.lr)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = 0.0

    def step(self, way: TrainConfig, number: int, module=None) -> int:
        """Make one training step, as train.py does but for clipping -> its supervised tokens."""
        parts = next_batch(way, self.drafter, self.trunks, number, ())
        figures = gradient(way, module or Step(way, self.drafter), self.drafter, parts)
        optimizer_step(self.optimizers)
        return figures["supervised"]

    def timed_step(self, way: TrainConfig, number: int, module=None) -> tuple[int, float]:
        """A step's supervised tokens and seconds."""
        begin = time.perf_counter()
        tokens = self.step(way, number, module)
        wait()
        return tokens, time.perf_counter() - begin

    def both_ways(self, config: BothWaysConfig) -> dict[str, TrainConfig]:
        """Rollouts in batches of several sizes, and SpecOPD on one text at a time."""
        ways = {}
        for n in (1, 8, NUM_TEXTS):
            ways[f"rollouts, {n} at once"] = replace(self.specopd, mode="rollout", batch_size=n)
        for A in config.num_anchors:
            for K in config.num_branches:
                size = {"batch_size": 1, "num_anchors": A, "num_branches": K}
                ways[f"SpecOPD, {A} anchors x {K}"] = replace(self.specopd, **size)
        return ways


def write_texts(config: WorkflowConfig, target) -> References:
    """Held-out prompts, each continued by the target to --trunk-length tokens."""
    prompts = held_out_prompts(config, NUM_TEXTS)
    num_new = config.trunk_length - config.prompt_length
    options = {"batch_size": NUM_TEXTS, "progress": "references"}
    results = generate(target, None, prompts, num_new, PLAIN, config.seed, **options)
    return References.from_lists(prompts, [result.tokens for result in results], 0)
