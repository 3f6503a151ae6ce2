"""Acceptance length and speed, by real decoding only.

AL on the drafter's own history can rise while nothing gets faster (self-consistent text), so every
figure here comes from draft-and-verify rounds on held-out prompts, kept per prompt: two drafters
measured on the same prompts are compared in pairs, and intervals resample prompts, not rounds.

    pytest tests/test_serve.py
"""

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from serve import generate


@dataclass
class Acceptance:
    """AL of one drafter on a set of prompts, by real decoding; per prompt, so that two can be
    paired."""

    committed: Tensor  # (P,) tokens committed by each prompt's rounds
    rounds: Tensor  # (P,)
    nodes: Tensor  # (P,) tokens that these rounds verified
    survived: Tensor  # (P, W) rounds in which the first k drafts were all accepted
    seconds: float

    @property
    def mean(self) -> float:
        """Pooled: all committed tokens over all verifications."""
        if not self.rounds.sum():
            raise ValueError("no verification to measure: every prompt ended with its first token")
        return self.committed.sum().item() / self.rounds.sum().item()

    @property
    def survival(self) -> list[float]:
        return (self.survived.sum(0) / self.rounds.sum()).tolist()

    def interval(
        self, other: "Acceptance | None" = None, samples: int = 2000
    ) -> tuple[float, float]:
        """95 % bootstrap interval over prompts: of the AL, or of its paired difference to
        another's."""
        P = len(self.rounds)
        generator = torch.Generator().manual_seed(0)
        picks = torch.randint(P, (samples, P), generator=generator)

        def resampled(one):
            return one.committed[picks].sum(1).double() / one.rounds[picks].sum(1).double()

        values = resampled(self) - (resampled(other) if other else 0)
        return tuple(values.quantile(torch.tensor([0.025, 0.975], dtype=torch.double)).tolist())


def evaluate(
    target, drafter, prompts, max_new_tokens, temperature, seed=0, stop_ids=(), batch_size=48,
    progress="", **how,
) -> Acceptance:
    """Decode the prompts for real and count; `how`: further arguments of `generate`. Prompts that
    end with their first token add nothing."""
    begin = time.perf_counter()
    results = generate(target, drafter, prompts, max_new_tokens, temperature, seed, stop_ids,
                       batch_size=batch_size, progress=progress, **how)  # fmt: skip
    seconds = time.perf_counter() - begin
    W = drafter.config.num_draft_tokens if drafter else 0
    steps = torch.arange(1, W + 1)
    survived = torch.stack(
        [(torch.tensor(r.accepted).view(-1, 1) >= steps).sum(0) for r in results]
    )  # (P, W)
    counts = ("num_committed", "num_rounds", "num_nodes")
    counts = (torch.tensor([getattr(r, name) for r in results]) for name in counts)
    return Acceptance(*counts, survived, seconds)


@dataclass
class Measure:
    """Held-out prompts and how they are decoded."""

    prompts: list
    max_new_tokens: int
    stop_ids: tuple
    seed: int

    def __call__(self, target, drafter, temperature, share=1.0, progress=""):
        prompts = self.prompts[: max(1, int(len(self.prompts) * share))]
        return evaluate(
            target, drafter, prompts, self.max_new_tokens, temperature, self.seed, self.stop_ids,
            progress=progress,
        )  # fmt: skip


def decoding_speed(target, drafter, measure: Measure, count: int = 8) -> dict:
    """Greedy, batch 1: plain and speculative decoding of the same prompts in turn, tokens/s
    each."""
    tokens, seconds, same = {"plain": 0, "speculative": 0}, {"plain": 0.0, "speculative": 0.0}, True
    # the first warms up
    for number, prompt in enumerate([measure.prompts[0], *measure.prompts[:count]]):
        texts = []
        for name, proposer in (("plain", None), ("speculative", drafter)):
            begin = time.perf_counter()
            (result,) = generate(
                target, proposer, [prompt], measure.max_new_tokens, stop_ids=measure.stop_ids
            )
            if number:
                seconds[name] += time.perf_counter() - begin
                tokens[name] += len(result.tokens)
            texts.append(result.tokens)
        same &= texts[0] == texts[1]
    speeds = {name: tokens[name] / seconds[name] for name in tokens}
    return speeds | {"same_text": same}
