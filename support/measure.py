"""Acceptance length and speed, by real decoding only.

AL on the drafter's own history can rise while nothing gets faster (self-consistent text), so every
figure here comes from draft-and-verify rounds on held-out prompts, kept per prompt: two drafters
measured on the same prompts are compared in pairs, and intervals resample prompts, not rounds.

    pytest tests/test_serve.py
"""

import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from serve import generate
from support import data

REPEAT = 8  # tokens of a run that counts as repeated


@dataclass
class Acceptance:
    """AL of one drafter on a set of prompts, by real decoding; per prompt, so that two can be
    paired."""

    committed: Tensor  # (P,) tokens committed by each prompt's rounds
    rounds: Tensor  # (P,)
    nodes: Tensor  # (P,) tokens that these rounds verified
    repeated: Tensor  # (P,) share of a text's runs of REPEAT tokens that it had before
    survived: Tensor  # (P, W) rounds in which the first k drafts were all accepted
    seconds: float
    texts: list = field(default_factory=list)  # P lists of new tokens

    @property
    def mean(self) -> float:
        """Pooled: all committed tokens over all verifications."""
        if not self.rounds.sum():
            raise ValueError("no verification to measure: every prompt ended with its first token")
        return self.committed.sum().item() / self.rounds.sum().item()

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.texts)) / self.seconds

    @property
    def survival(self) -> list[float]:
        return (self.survived.sum(0) / self.rounds.sum()).tolist()

    @property
    def conditional(self) -> list:
        """How often draft k is accepted where all before it were; None where that never was."""
        before = [1.0, *self.survival[:-1]]
        return [s / b if b else None for s, b in zip(self.survival, before)]

    def resampled(self, seed: int = 0) -> Tensor:
        """ALs of 2,000 draws of prompts with replacement; of one seed and number of prompts they
        draw the same ones."""
        P = len(self.rounds)
        picks = torch.randint(P, (2000, P), generator=torch.Generator().manual_seed(seed))
        rounds = self.rounds[picks].sum(1).double()  # 0 where only prompts without any were drawn
        return torch.where(rounds > 0, self.committed[picks].sum(1) / rounds, self.mean)

    def interval(self, other: "Acceptance | None" = None) -> tuple[float, float]:
        """95 % bootstrap interval over prompts: of the AL, or of its paired difference to
        another's."""
        return central_95(self.resampled() - (other.resampled() if other else 0))


def central_95(values: Tensor) -> tuple[float, float]:
    """What 95 % of values (n,) lie between."""
    return tuple(values.quantile(torch.tensor([0.025, 0.975], dtype=torch.double)).tolist())


@dataclass
class Tasks:
    """Acceptance on several tasks, as one: the unweighted mean of their ALs."""

    found: dict[str, Acceptance]

    @property
    def mean(self) -> float:
        return sum(one.mean for one in self.found.values()) / len(self.found)

    def resampled(self) -> Tensor:
        """Of draws of each task's prompts."""
        return torch.stack([x.resampled(seed=n) for n, x in enumerate(self.found.values())]).mean(0)

    interval = Acceptance.interval


def gain(one, other) -> dict:
    """Of one's AL over another's: percent, and the 95 % interval of the paired difference in AL."""
    return {"percent": 100 * (one.mean / other.mean - 1), "interval": one.interval(other)}


def format_gain(gain: dict) -> str:
    return f"{gain['percent']:+5.1f} % [{gain['interval'][0]:+.2f}, {gain['interval'][1]:+.2f}]"


def repetition(tokens: list[int], size: int = REPEAT) -> float:
    """The share of a text's runs of `size` tokens that it had before: loops flatter AL."""
    runs = [tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


def evaluate(
    target,
    drafter,
    prompts,
    max_new_tokens,
    temperature,
    seed=0,
    stop_ids=(),
    batch_size=48,
    progress="",
    **how,
) -> Acceptance:
    """Decode the prompts for real and count; `how`: further arguments of `generate`. Prompts that
    end with their first token add nothing."""
    begin = time.perf_counter()
    results = generate(
        target,
        drafter,
        prompts,
        max_new_tokens,
        temperature,
        seed,
        stop_ids,
        batch_size=batch_size,
        progress=progress,
        **how,
    )
    seconds = time.perf_counter() - begin
    W = drafter.config.num_draft_tokens if drafter else 0
    steps = torch.arange(1, W + 1)
    survived = torch.stack(
        [(torch.tensor(r.accepted).view(-1, 1) >= steps).sum(0) for r in results]
    )  # (P, W)
    counts = ("num_committed", "num_rounds", "num_nodes")
    counts = (torch.tensor([getattr(r, name) for r in results]) for name in counts)
    repeated = torch.tensor([repetition(r.tokens) for r in results])
    texts = [r.tokens for r in results]
    return Acceptance(*counts, repeated, survived, seconds, texts)


@dataclass
class Measure:
    """Held-out prompts and how they are decoded."""

    prompts: list
    max_new_tokens: int
    stop_ids: tuple
    seed: int

    def __call__(self, target, drafter, temperature, share=1.0, progress=""):
        prompts = self.prompts[: max(8, int(len(self.prompts) * share))]  # fewer say nothing
        return evaluate(
            target,
            drafter,
            prompts,
            self.max_new_tokens,
            temperature,
            self.seed,
            self.stop_ids,
            progress=progress,
        )


def decoding_speed(target, drafter, measure: Measure, count: int) -> dict:
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


def read_tasks(paths, tokenizer, count: int, length: int, seed: int) -> dict[str, list]:
    """Prompts of each JSON Lines file, a task by its file's name: `count` of at most `length`
    tokens."""
    if len({Path(file).stem for file in paths}) < len(paths):
        raise ValueError("a task goes by its file's name, and two files have the same")
    tasks, asked = {}, {file: data.read_prompts(file) for file in paths}
    for file, chats in asked.items():
        print(f"{Path(file).stem}: ", end="", flush=True)
        try:
            found = data.draw_prompts(chats, tokenizer, count, length, seed)
        except data.TooLong as error:  # the others can be measured
            print(f"left out: {error}")
            continue
        print(f"{len(found)} prompts")
        tasks[Path(file).stem] = found
    if not tasks:
        raise ValueError("no task has a prompt that fits")
    return tasks


def by_task(target, drafter, tasks: dict[str, list], max_new_tokens, temperature, **how) -> dict:
    """Acceptance on each task."""
    return {
        name: evaluate(target, drafter, prompts, max_new_tokens, temperature, progress=name, **how)
        for name, prompts in tasks.items()
    }


def report_tasks(target, drafter, tasks: dict, max_new_tokens, temperatures, **how) -> dict:
    """AL of a drafter by task and temperature, printed: pooled within a task, across tasks the
    unweighted mean, 95 % intervals over prompts, and the speed of plain decoding beside it."""
    figures = {}
    for temperature in temperatures:
        evaluate(target, drafter, next(iter(tasks.values()))[:2], 8, temperature)  # warms up
        found = by_task(target, drafter, tasks, max_new_tokens, temperature, **how)
        sampling = ("seed", "stop_ids", "batch_size", "top_k", "top_p")
        plain = {k: v for k, v in how.items() if k in sampling}
        plain = by_task(target, None, tasks, max_new_tokens, temperature, **plain)
        print(
            f"\ntemperature {temperature:g}, {max_new_tokens} tokens a prompt\n"
            "task          prompts     AL   95 % interval  repeated   tokens/s   plain    "
            "x"
        )
        rows = {}
        for name, one in found.items():
            speed, slow = one.tokens_per_s, plain[name].tokens_per_s
            same = temperature > 0 or one.texts == plain[name].texts
            repeated = one.repeated.mean().item()
            rows[name] = {
                "al": one.mean,
                "interval": one.interval(),
                "repeated": repeated,
                "tokens_per_s": speed,
                "plain_tokens_per_s": slow,
                "same_text": same,
                "survival": one.survival,
                "conditional": one.conditional,
            }
            low, high = one.interval()
            print(
                f"{name[:14]:14s} {len(one.rounds):6d} {one.mean:6.3f}   [{low:.3f}, {high:.3f}] "
                f"{repeated:9.2f} {speed:10.1f} {slow:7.1f}  "
                + (f"{speed / slow:.2f}" if same else "THE TEXTS DIFFER")
            )
        mean, (low, high) = Tasks(found).mean, Tasks(found).interval()
        print(f"{'mean of tasks':21s} {mean:6.3f}   [{low:.3f}, {high:.3f}]")
        for title, values in (("survival", "survival"), ("given those before", "conditional")):
            print(f"{title}: share of rounds that accept draft 1, 2, ...")
            for name, row in rows.items():
                shown = ("     -" if v is None else f"{v:6.3f}" for v in row[values])
                print(f"  {name[:14]:14s}" + " ".join(shown))
        figures[f"t{temperature:g}"] = {"tasks": rows, "mean": mean, "interval": (low, high)}
    return figures
