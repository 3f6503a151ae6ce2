"""Acceptance length (AL) and speed, by real decoding only.

An AL that is computed on branches drawn by the drafter can rise while decoding gets no faster: the
drafter only agrees better with itself. So every figure here comes from draft-and-verify rounds on
held-out prompts. Two drafters are compared prompt by prompt, and intervals resample prompts, not
rounds (paired bootstrap).

    pytest tests/support/test_measure.py
"""

import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from drafter import GREEDY, Sampling
from hf.chat import read_prompts
from serve import generate
from support import distributed
from support.data import TooLong, draw_prompts
from support.partings import partings

TEMPERATURES = (0.0, 1.0)  # at which AL is measured
QUICK_SHARE = 0.25  # of the held-out prompts, measured while training
NGRAM = 8  # tokens of the n-grams that `repetition` counts
LOOP = 16  # tokens of an n-gram that tells a loop from an idiom, see `is_fresh`
NUM_RESAMPLES = 2000
BATCH_SIZE = 48  # prompts decoded at once


@dataclass
class Acceptance:
    """What real decoding of P prompts with one drafter counted, per prompt."""

    committed: Tensor  # (P,) tokens that the prompt's rounds committed
    rounds: Tensor  # (P,) verifications by the target
    nodes: Tensor  # (P,) tokens that these verified
    repeated: Tensor  # (P,) share of a text's n-grams that occurred before
    survived: Tensor  # (P, W) rounds in which the first k drafts were all accepted
    seconds: float
    texts: list = field(default_factory=list)  # P lists of new tokens
    # of the tokens that do not repeat the text before them (`is_fresh`): how many rounds committed,
    # and how many of these ended a round
    fresh: Tensor | None = None  # (P, 2)

    @property
    def fresh_mean(self) -> float | None:
        """The AL where texts do not repeat themselves; None where they do everywhere. For one text
        the tokens are the same whatever the drafter, so drafters can be compared."""
        committed, rounds = self.fresh.sum(0).tolist()
        return committed / rounds if rounds else None

    @property
    def mean(self) -> float:
        """The AL, pooled: all committed tokens over all verifications."""
        if not self.rounds.sum():
            raise ValueError("no verification to measure: every prompt ended with its first token")
        return self.committed.sum().item() / self.rounds.sum().item()

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.texts)) / self.seconds

    @property
    def survival(self) -> list[float]:
        """The share of rounds that accept the first k drafts."""
        return (self.survived.sum(0) / self.rounds.sum()).tolist()

    @property
    def conditional(self) -> list:
        """How often draft k is accepted once those before it are; None where they never were."""
        survival = self.survival
        return [s / before if before else None for s, before in zip(survival, [1.0, *survival])]

    def resampled(self, seed: int = 0) -> Tensor:
        """ALs (NUM_RESAMPLES,) of prompts drawn with replacement. For one seed and one number of
        prompts the draws are the same, so that two drafters can be paired."""
        P = len(self.rounds)
        generator = torch.Generator().manual_seed(seed)
        draws = torch.randint(P, (NUM_RESAMPLES, P), generator=generator)
        committed = self.committed[draws].sum(1)
        rounds = self.rounds[draws].sum(1).double()
        # a draw of prompts that all ended with their first token has no rounds
        return torch.where(rounds > 0, committed / rounds, self.mean)

    def interval(self, other: "Acceptance | None" = None) -> tuple[float, float]:
        """95 % interval over prompts: of the AL, or of its difference to another drafter's."""
        return central_95(self.resampled() - (other.resampled() if other else 0))


@dataclass
class TaskMean:
    """Several tasks as one: the unweighted mean of their ALs."""

    tasks: dict[str, Acceptance]

    @property
    def mean(self) -> float:
        return sum(acceptance.mean for acceptance in self.tasks.values()) / len(self.tasks)

    def resampled(self) -> Tensor:
        """Mean ALs (NUM_RESAMPLES,), each task's prompts drawn on their own."""
        tasks = enumerate(self.tasks.values())
        return torch.stack([task.resampled(seed=number) for number, task in tasks]).mean(0)

    interval = Acceptance.interval


def central_95(values: Tensor) -> tuple[float, float]:
    """The bounds between which 95 % of values (n,) lie."""
    return tuple(values.quantile(torch.tensor([0.025, 0.975], dtype=torch.double)).tolist())


def gain(new, base) -> dict:
    """The AL of one over that of another: percent, and the interval of the paired difference."""
    return {"percent": 100 * (new.mean / base.mean - 1), "interval": new.interval(base)}


def format_gain(gain: dict) -> str:
    low, high = gain["interval"]
    return f"{gain['percent']:+5.1f} % [{low:+.2f}, {high:+.2f}]"


def repetition(tokens: list[int], n: int = NGRAM) -> float:
    """The share of a text's n-grams that occurred before: texts that loop have a higher AL."""
    ngrams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0


def is_fresh(tokens: list[int], n: int = LOOP) -> list[bool]:
    """Of each token, whether the n-gram that ends with it is new in the text. In a loop none is."""
    seen = set()
    fresh = []
    for end in range(1, len(tokens) + 1):
        ngram = tuple(tokens[max(0, end - n) : end])
        fresh.append(ngram not in seen)
        seen.add(ngram)
    return fresh


def loop_start(tokens: list[int], n: int = LOOP) -> int | None:
    """Where a text begins to repeat itself word for word, for 2n - 1 tokens at least; None if it
    does not."""
    repeated = 0
    for end, is_new in enumerate(is_fresh(tokens, n), 1):
        repeated = 0 if is_new else repeated + 1
        if repeated == n:
            return end - (2 * n - 1)
    return None


def count_fresh(tokens: list[int], drafted: list[bool]) -> list[int]:
    """How many fresh tokens came from rounds, and how many rounds they ended. The first token is of
    the prefill; a round ends with a token that was not drafted, and one that the text's end cuts
    off does not count."""
    last = max((i for i, is_draft in enumerate(drafted) if not is_draft), default=0)
    rounds = zip(drafted[1 : last + 1], is_fresh(tokens)[1:])
    ends = [not is_draft for is_draft, is_new in rounds if is_new]
    return [len(ends), sum(ends)]


def run_at_once(work):
    return work()


def evaluate(
    target, drafter, prompts, max_new_tokens, *how, run=run_at_once, **options
) -> Acceptance:
    """Decode the prompts for real and count; `how` and `options` as `serve.generate` has them.

    Each process decodes its share of the prompts, and all get the counts of all. run: calls the
    decoding, and may stop it on all processes (`resume.EndRequest.run`)."""
    numbers = list(distributed.own_rows(range(len(prompts))))
    own = [prompts[number] for number in numbers]
    options = {"batch_size": BATCH_SIZE, "prompt_ids": numbers} | options
    begin = time.perf_counter()
    results = run(lambda: generate(target, drafter, own, max_new_tokens, *how, **options))
    W = drafter.config.num_draft_tokens if drafter else 0
    counts = torch.zeros(len(prompts), 6 + W + max_new_tokens, dtype=torch.long)
    for number, result in zip(numbers, results):
        survived = [sum(n >= k for n in result.accepted) for k in range(1, W + 1)]
        row = [result.num_committed, result.num_rounds, result.num_nodes, *survived]
        row += count_fresh(result.tokens, result.drafted)
        row += [len(result.tokens), *result.tokens]
        counts[number, : len(row)] = torch.tensor(row)
    counts = distributed.all_reduce_sum(counts.to(distributed.message_device())).cpu()
    seconds = time.perf_counter() - begin
    committed, rounds, nodes, survived, fresh, lengths, tokens = counts.split(
        [1, 1, 1, W, 2, 1, max_new_tokens], 1
    )
    texts = [row[:length] for row, (length,) in zip(tokens.tolist(), lengths.tolist())]
    repeated = torch.tensor([repetition(text) for text in texts])
    each = (committed[:, 0], rounds[:, 0], nodes[:, 0], repeated, survived)
    return Acceptance(*each, seconds=seconds, texts=texts, fresh=fresh)


@dataclass
class Measure:
    """Held-out prompts, which nothing is trained on, and how they are decoded."""

    prompts: list
    max_new_tokens: int
    stop_ids: tuple
    seed: int
    source: str = "held-out prompts"  # what an AL is of, in words
    tasks: list = field(default_factory=list)  # each prompt's, if they are of several tasks

    def first_prompts(self, share: float) -> list:
        """The prompts that a share of them means: the first ones, but 8 at least if there are."""
        return self.prompts[: max(8, int(len(self.prompts) * share))]

    def __call__(
        self, target, drafter, temperature: float, share=1.0, progress="", run=run_at_once
    ) -> Acceptance:
        """Measure AL on a share of the prompts: by all processes together."""
        prompts = self.first_prompts(share)
        how = (self.max_new_tokens, Sampling(temperature), self.seed, self.stop_ids)
        progress = progress if distributed.is_main() else ""
        return evaluate(target, drafter, prompts, *how, run=run, progress=progress)

    def by_task(self, measured: Acceptance) -> dict[str, float]:
        """The AL of each task, of what was measured on the first prompts."""
        als = {}
        for task in dict.fromkeys(self.tasks):
            rows = [i for i in range(len(measured.rounds)) if self.tasks[i] == task]
            rounds = int(measured.rounds[rows].sum())
            als |= {task: int(measured.committed[rows].sum()) / rounds} if rounds else {}
        return als


def decoding_speed(target, drafter, measure: Measure, count: int) -> dict:
    """Tokens per second of plain and speculative decoding in turn: greedy, a prompt at a time."""
    drafters = {"plain": None, "speculative": drafter}
    texts = {name: [] for name in drafters}
    seconds = dict.fromkeys(drafters, 0.0)
    how = (measure.max_new_tokens, GREEDY, 0, measure.stop_ids)
    prompts = tqdm(measure.prompts[:1] + measure.prompts[:count], "speed", leave=False)
    for number, prompt in enumerate(prompts):
        for name, proposer in drafters.items():
            begin = time.perf_counter()
            (result,) = generate(target, proposer, [prompt], *how)
            if number:  # the first time warms up
                seconds[name] += time.perf_counter() - begin
            texts[name].append(result.tokens)
    speeds = {name: sum(map(len, texts[name][1:])) / seconds[name] for name in drafters}
    pair = (texts["speculative"][1:], texts["plain"][1:])
    found = partings(target, measure.prompts, *pair)
    return speeds | {"same_text": not found, "partings": found}


def read_tasks(paths, tokenizer, count: int, length: int, seed: int) -> dict[str, list]:
    """Draw `count` prompts, of at most `length` tokens, from each JSON Lines file: a task."""
    conversations = {}
    for path in paths:
        name = Path(path).stem
        if name in conversations:
            raise ValueError(f"a task goes by its file's name, and two files are called {name}")
        conversations[name] = read_prompts(path)
    tasks = {}
    for name, texts in conversations.items():
        print(f"{name}: ", end="", flush=True)
        try:
            tasks[name] = draw_prompts(texts, tokenizer, count, length, seed)
            print(f"{len(tasks[name])} prompts")
        except TooLong as error:  # the other tasks can be measured
            print(f"left out: {error}")
    if not tasks:
        raise ValueError("no task has a prompt that fits")
    return tasks


def by_task(target, drafter, tasks: dict[str, list], *how, **options) -> dict[str, Acceptance]:
    """Measure each task; `how` and `options` as `evaluate` has them."""
    return {
        name: evaluate(target, drafter, prompts, *how, progress=name, **options)
        for name, prompts in tasks.items()
    }
