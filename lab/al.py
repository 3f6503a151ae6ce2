"""Acceptance length (AL) of drafters by task, by real decoding of the same prompts.

AL is pooled within a task and averaged over tasks, with 95 % intervals over prompts; later drafters
are compared with the first, prompt by prompt. Beside AL stands the share of repeated text: loops
flatter AL.

    python -m lab al --target FOLDER --drafters FOLDER [FOLDER ...] --tasks math.jsonl code.jsonl
    pytest tests/lab/test_commands.py
"""

from dataclasses import dataclass

from drafter import Sampling
from lab.common import LabConfig, open_drafters, require
from support.flags import TEMPLATE_ARGS, flag
from support.measure import TaskMean, by_task, evaluate, format_gain, gain, read_tasks
from support.partings import format_partings, partings


@dataclass(frozen=True)
class Config(LabConfig):
    drafters: tuple = flag(
        (), "folders of the drafters, or lookup; later ones are compared with the first"
    )
    tasks: tuple = flag((), "JSON Lines files of prompts, a task each")
    temperatures: tuple = flag((0.0, 1.0), "temperatures of decoding", kind=float, low=0)
    top_k: int = flag(0, "sample among the k likeliest tokens only; 0 is off")
    top_p: float = flag(1.0, "sample among the likeliest that make up this share; 1 is off")
    num_prompts: int = flag(64, "prompts of each task", low=1)
    prompt_length: int = flag(512, "tokens of a prompt, at most", low=1)
    max_new_tokens: int = flag(200, "tokens decoded per prompt", low=2)
    draft_length: int = flag(0, "drafts verified in a round; 0: all that a drafter proposes", low=0)
    batch_size: int = flag(32, "prompts decoded at once", low=1)
    chat_template_args: str = flag("", TEMPLATE_ARGS)

    NEEDS = (("top_k top_p", "one of --temperatures above 0", lambda c: max(c.temperatures) > 0),)


def task_row(results, plain, found: list[dict]) -> dict:
    """The figures of one drafter on one task; `plain`: the same prompts without a drafter; found:
    where greedy texts part."""
    speed = {"tokens_per_s": results.tokens_per_s, "plain_tokens_per_s": plain.tokens_per_s}
    row = {"al": results.mean, "interval": results.interval()} | speed
    row["repeated"] = results.repeated.mean().item()
    row |= {"same_text": not found, "partings": found}
    return row | {"survival": results.survival, "conditional": results.conditional}


def print_tasks(folder: str, rows: dict, mean: TaskMean, over_first: dict | None) -> None:
    """One drafter's table: a line for each task, their mean, then survival."""
    print(f"\n{folder}")
    print("task          prompts     AL   95 % interval  repeated   tokens/s   plain    x")
    for task, row in rows.items():
        low, high = row["interval"]
        line = f"{task[:14]:14s} {len(mean.tasks[task].rounds):6d} {row['al']:6.3f}   "
        line += f"[{low:.3f}, {high:.3f}] {row['repeated']:9.2f} {row['tokens_per_s']:10.1f} "
        ratio = f"{row['tokens_per_s'] / row['plain_tokens_per_s']:.2f}"
        print(f"{line}{row['plain_tokens_per_s']:7.1f}  {ratio}")
        if row["partings"]:
            print(f"  {format_partings(row['partings'])}")
    low, high = mean.interval()
    line = f"{'mean of tasks':21s} {mean.mean:6.3f}   [{low:.3f}, {high:.3f}]"
    print(line + (f"  over the first: {format_gain(over_first)}" if over_first else ""))
    titles = {
        "survival": "share of rounds that accept the first 1, 2, ...",
        "conditional": "of the rounds that accept all drafts before",
    }
    for key, title in titles.items():
        print(f"{key}: {title}")
        for task, row in rows.items():
            cells = ("     -" if share is None else f"{share:6.3f}" for share in row[key])
            print(f"  {task[:14]:14s}" + " ".join(cells))


def run(config: Config) -> dict:
    require(config, "tasks")
    target, tokenizer, drafters = open_drafters(config)
    how = (config.num_prompts, config.prompt_length, config.seed)
    tasks = read_tasks(config.tasks, tokenizer, *how)
    options = {"seed": config.seed, "stop_ids": tokenizer.stop_ids, "batch_size": config.batch_size}
    drafting = options | {"draft_length": config.draft_length}
    warm_up = next(iter(tasks.values()))[:2]
    num_new = config.max_new_tokens
    figures = {folder: {} for folder in drafters}
    all_found = []  # where greedy texts part
    for temperature in config.temperatures:
        sampling = Sampling(temperature, config.top_k, config.top_p)
        print(f"\ntemperature {temperature:g}, {num_new} tokens a prompt")
        evaluate(target, None, warm_up, 8, sampling)
        plain = by_task(target, None, tasks, num_new, sampling, **options)
        first = None
        for folder, drafter in drafters.items():
            evaluate(target, drafter, warm_up, 8, sampling)
            results = by_task(target, drafter, tasks, num_new, sampling, **drafting)
            mean = TaskMean(results)
            over_first = gain(mean, first) if first else None
            first = first or mean
            rows = {}
            for task, prompts in tasks.items():
                pair = (results[task].texts, plain[task].texts)
                found = partings(target, prompts, *pair) if temperature == 0 else []
                rows[task] = task_row(results[task], plain[task], found)
                all_found += found
            print_tasks(folder, rows, mean, over_first)
            als = {task: row["al"] for task, row in rows.items()} | {"mean": mean.mean}
            row = {"al": als, "interval": mean.interval(), "over_the_first": over_first}
            figures[folder][f"t{temperature:g}"] = row | {"tasks": rows}
    return figures | {"partings": all_found}
