"""Tokens per second of generation with and without drafters, by task and concurrency.

At concurrency n, n prompts are decoded at once, by plain decoding and each drafter in turn. A
drafter is tried with all its drafts verified, and with as many as pay ("auto"). At temperature 0
every text must be that of plain decoding, but for near-ties of the target. At concurrency 1 a few
prompts are decoded once more with the stages of their rounds timed.

    python -m lab speed --target FOLDER --drafters FOLDER [FOLDER ...] [--tasks FILE ...]
    pytest tests/lab/test_commands.py
"""

import statistics
import time
from dataclasses import dataclass

import torch

from drafter import Sampling
from lab.common import LabConfig, StageClock, format_shares, held_out_prompts, open_drafters
from serve import AUTO, Batch, Options, draft_length_of
from support.flags import TEMPLATE_ARGS, flag
from support.measure import evaluate, read_tasks
from support.partings import format_partings, partings

NUM_WATCHED = 4  # prompts decoded with the stages timed
STAGES = {name: name for name in "draft score verify commit retire".split()}  # of Batch.round


COUNTS = ("committed", "rounds")


@dataclass(frozen=True)
class Config(LabConfig):
    drafters: tuple = flag((), "folders of the drafters, or lookup")
    tasks: tuple = flag((), "JSON Lines files of prompts, a task each; empty: held-out text")
    concurrency: tuple = flag((1, 8, 32), "prompts decoded at once", kind=int, low=1)
    num_prompts: int = flag(16, "prompts of a task, or as many as are decoded at once", low=1)
    prompt_length: int = flag(64, "tokens of a prompt, at most", low=1)
    max_new_tokens: int = flag(200, "tokens decoded per prompt", low=2)
    temperature: float = flag(0.0, "temperature of decoding", low=0)
    repeats: int = flag(7, "timed repeats", low=1)
    chat_template_args: str = flag("", TEMPLATE_ARGS)

    NEEDS = (("chat_template_args", "--tasks", lambda c: c.tasks),)


def arms_of(drafters: dict) -> dict:
    """What is compared: {name: (drafter, draft_length)}, plain decoding first."""
    arms = {"off": (None, 0)}
    for name, drafter in drafters.items():
        automatic = draft_length_of(AUTO, drafter)
        arms |= {name: (drafter, 0), f"{name}, {AUTO}": (drafter, automatic)}
    return arms


def measure_arms(config: Config, target, arms: dict, prompts: list, size: int, stop_ids) -> dict:
    """Speed and AL of each arm on the same prompts, `size` of them at once."""
    sampling = Sampling(config.temperature)
    options = {"seed": config.seed, "stop_ids": stop_ids, "batch_size": size}
    for drafter, length in arms.values():  # warms up
        evaluate(target, drafter, prompts[:size], 8, sampling, draft_length=length, **options)
    how = (prompts, config.max_new_tokens, sampling)
    results = {name: [] for name in arms}
    for _ in range(config.repeats):
        for name, (drafter, length) in arms.items():
            results[name].append(evaluate(target, drafter, *how, draft_length=length, **options))
    row = {}
    plain = results["off"][0].texts
    for name, repeats in results.items():
        speeds = [repeat.tokens_per_s for repeat in repeats]
        speed = {"tokens_per_s": statistics.median_high(speeds)}
        speed |= {"low": min(speeds), "high": max(speeds)}
        found = []
        if config.temperature == 0:  # in each repeat other numbers of drafts may have been chosen
            texts = {repr(repeat.texts): repeat.texts for repeat in repeats}.values()
            found = [p for own in texts for p in partings(target, prompts, own, plain)]
        committed, rounds = (sum(int(getattr(r, key).sum()) for r in repeats) for key in COUNTS)
        al = committed / rounds if arms[name][0] else 1.0
        row[name] = speed | {"al": al, "same_text": not found, "partings": found}
        row[name]["ratio"] = speed["tokens_per_s"] / row["off"]["tokens_per_s"]
    return row


def print_task(task: str, row: dict) -> list[dict]:
    """A line of all arms, and one for each whose texts part from plain decoding -> all partings."""
    line = f"{task[:12]:12s}"
    for arm in row.values():
        line += f"{arm['tokens_per_s']:12.1f} ({arm['al']:.3f}) {arm['ratio']:6.2f}x"
    print(line)
    for name, arm in row.items():
        if arm["partings"]:
            print(f"  {name[-26:]}: {format_partings(arm['partings'])}")
    return [parting for arm in row.values() for parting in arm["partings"]]


@torch.inference_mode()
def print_stages(config: Config, target, arms: dict, prompts: list, stop_ids) -> dict:
    """Print and return each arm's share of each stage, and its milliseconds a round, at batch 1."""
    sampling = Sampling(config.temperature)
    rows = {}
    for name, (drafter, length) in arms.items():
        how = (config.max_new_tokens, sampling, config.seed, frozenset(stop_ids))
        options = Options(*how, draft_length=length)
        clock, num_rounds = StageClock(), 0
        for prompt in prompts[:NUM_WATCHED]:
            if length:
                length.start(1)
            batch = clock("prefill", Batch, target, drafter, {0: prompt}, options)
            with clock.watching(batch, **STAGES):
                while batch.alive:
                    batch.round()
            num_rounds += batch.num_rounds
        passed = time.perf_counter() - clock.begin - clock.seconds["prefill"]
        ms = 1e3 * passed / max(num_rounds, 1)
        rows[name] = clock.shares() | {"ms_per_round": ms}
        print(f"{name[-26:]:26s} {ms:.2f} ms a round: {format_shares(clock.shares())}")
    return rows


def run(config: Config) -> dict:
    target, tokenizer, drafters = open_drafters(config)
    arms = arms_of(drafters)
    stop_ids = tokenizer.stop_ids
    count = max(config.num_prompts, *config.concurrency)
    if config.tasks:
        tasks = read_tasks(config.tasks, tokenizer, count, config.prompt_length, config.seed)
    else:
        print("prompts: held-out text of Python's own library (--tasks FILES: others)")
        tasks = {"text": held_out_prompts(config, count)}
    texts = f"temperature {config.temperature:g}, {config.max_new_tokens} tokens a prompt"
    machine = f"{config.device}, {torch.get_num_threads()} threads"
    print(f"{texts}, {machine}, medians of {config.repeats}; tokens/s (AL) x plain")
    figures, all_found = {}, []
    for size in config.concurrency:
        print(f"\n{f'{size} at once':12s}" + "".join(f"{name[-26:]:>28s}" for name in arms))
        rows = {}
        for task, prompts in tasks.items():
            if len(prompts) < size:
                print(f"{task[:12]:12s} has but {len(prompts)} prompts: left out")
                continue
            whole_batches = min(len(prompts), config.num_prompts) // size
            prompts = prompts[: max(1, whole_batches) * size]
            rows[task] = measure_arms(config, target, arms, prompts, size, stop_ids)
            all_found += print_task(task, rows[task])
        means = {}
        for name in arms:
            ratios = [row[name]["ratio"] for row in rows.values()]
            means[name] = statistics.geometric_mean(ratios) if ratios else None
        cells = (f"{mean:27.2f}x" if mean else f"{'-':>28s}" for mean in means.values())
        print("geom. mean  " + "".join(cells))
        figures[f"{size} at once"] = {"tasks": rows, "geometric_means": means}
        if size == 1:
            prompts = next(iter(tasks.values()))
            figures["1 at once"]["stages"] = print_stages(config, target, arms, prompts, stop_ids)
    return figures | {"partings": all_found}
