"""What train.py prints: what a run is about to do, how it ended, and the table of the story.

pytest tests/support/test_report.py
"""

import json
import math
from dataclasses import asdict
from pathlib import Path

from support.files import write_json
from support.measure import QUICK_SHARE, TEMPERATURES, Measure, format_gain, gain
from support.partings import check_partings, format_partings
from support.prepare import mask_in_words

RESOLVED = "ce_decay precision dtype matrix_lr lr num_anchors".split()

TITLES = {
    "fresh": "fresh ({} prompts)",
    "start": "offline CE (the start)",
    "ce": "  + CE",
    "e2e": "  + offline E2E-TV",
    "specopd": "  + SpecOPD",
}
BEFORE_THE_WAYS_PART = ("fresh", "start")  # these have no gain over the start

# ---------------------------------------------------------------------------------- one mode's run


def quick_source(measure: Measure) -> str:
    """In words what an AL while training is of."""
    return f"the first {len(measure.first_prompts(QUICK_SHARE))} of {measure.source}"


def print_opening(config, measure: Measure, references, drafter, tokenizer) -> None:
    """What a run of one mode is about to do."""
    print(f"AL is measured on {quick_source(measure)}")
    values = json.dumps({name: getattr(config, name) for name in RESOLVED})
    print(f"{references.sizes()}; resolved: {values}, MASK: {mask_in_words(drafter, tokenizer)}")
    if not config.drafter and config.mode != "ce":
        print(
            "hardly any draft of a fresh drafter is accepted, and then E2E-TV has almost no "
            "gradient: begin with --mode ce and give its folder as --drafter"
        )


def tell_first_loss(config, loss: float, num_tokens: int) -> None:
    """Say why a fresh drafter's first loss may be far above that of guessing, ln V."""
    guessing = math.log(num_tokens)
    if config.mode == "ce" and not config.drafter and loss > 1.5 * guessing:
        print(
            f"a fresh drafter's first loss of {loss:.0f} is above ln V = {guessing:.1f}: "
            "its logits are not yet scaled; it falls within the first steps"
        )


def print_outcome(config, measure: Measure, out: Path, totals: dict) -> None:
    """How a run of one mode ended, and what can be done next."""
    print(json.dumps(totals))
    folder = out / config.mode
    if totals["step"] < config.steps:
        print(f"stopped at step {totals['step']} of {config.steps}; the same command goes on")
        return
    als = [f"{totals[f'al_t{t:g}']:.3f} at {t:g}" for t in TEMPERATURES]
    print(f"{folder} is done: AL by temperature {', '.join(als)}.")
    for t in TEMPERATURES:
        tasks = totals.get(f"by_task_t{t:g}", {})
        cells = ", ".join(f"{task} {al:.3f}" for task, al in tasks.items())
        if tasks:
            print(f"  at {t:g} by task: {cells}")
    print(f"The best mean was at step {totals['best'].get('step')}: {folder / 'best'}. Next:")
    drafters = f"{config.drafter} {folder}".strip()
    print(f"  python -m lab speed --target {config.target or out / 'target'} --drafters {drafters}")
    print(f"AL is measured on {quick_source(measure)}")


# ---------------------------------------------------------------------------------------- the story


def report(
    config, measure: Measure, out: Path, lengths: dict, totals: dict, speeds: dict, seconds: float
) -> None:
    """Write the story's figures to summary.json and print them. lengths: {drafter: {temperature:
    Acceptance}}; totals: {drafter: those of its run}; speeds: of `decoding_speed`."""
    rows = {name: row_of(name, lengths, totals.get(name, {})) for name in lengths}
    summary = {"config": asdict(config), "rows": rows, "decoding": speeds, "seconds": seconds}
    write_json(out / "summary.json", summary)
    size = f"{config.eval_tokens} tokens each, seed {config.seed}"
    print(f"\nAcceptance length on {measure.source}, {size}")
    print_table(rows, len(lengths["fresh"][0.0].rounds))
    specopd = rows["specopd"]
    over = [f"T = {t:g} {format_gain(specopd[f'over_ce_t{t:g}'])}" for t in TEMPERATURES]
    print("\nSpecOPD over continued CE: " + ", ".join(over))
    saved = 1 - specopd["nodes"] / max(specopd["unmerged"], 1)
    print(f"merging saved {100 * saved:.1f} % of the trees' nodes")
    print_speeds(speeds)
    print(f"{seconds:.0f} s in all. Figures: {out}/summary.json, and a log.jsonl per run. Next:")
    print_commands(config, out)
    check_partings(speeds["partings"])


def row_of(name: str, lengths: dict, totals: dict) -> dict:
    """The figures of one drafter: its run's totals, AL, survival and gains by temperature."""
    row = dict(totals)
    for t in TEMPERATURES:
        measured = lengths[name][t]
        row |= {f"al_t{t:g}": measured.mean, f"survival_t{t:g}": measured.survival}
        if name not in BEFORE_THE_WAYS_PART:
            for base in ("start", "ce"):
                row[f"over_{base}_t{t:g}"] = gain(measured, lengths[base][t])
    return row


def print_table(rows: dict, num_fresh: int) -> None:
    """AL with gains over the start, then survival by position. num_fresh: the number of prompts
    that the fresh drafter was measured on."""
    titles = {name: f"{TITLES[name].format(num_fresh):24s}" for name in rows}
    print("[gain over the start, 95 % interval of the paired difference]")
    print(f"{'':24s}{'T = 0':>7s}{'':26s}{'T = 1':>7s}{'':26s}{'supervised tokens/s':>20s}")
    for name, row in rows.items():
        line = titles[name]
        for t in TEMPERATURES:
            over = row.get(f"over_start_t{t:g}")
            line += f"{row[f'al_t{t:g}']:7.3f}  {format_gain(over) if over else '':24s}"
        if "seconds" in row:
            line += f"{row['supervised'] / row['seconds']:20.0f}"
        print(line)
    for t in TEMPERATURES:
        print(f"\nSurvival: share of rounds that keep the first 1, 2, ... drafts, T = {t:g}")
        for name, row in rows.items():
            shares = " ".join(f"{share:6.3f}" for share in row[f"survival_t{t:g}"])
            print(f"{titles[name]}{shares}")


def print_speeds(speeds: dict) -> None:
    plain = speeds["plain"]
    speculative = speeds["speculative"]
    line = f"greedy decoding, batch 1: plain {plain:.0f} tokens/s, speculative {speculative:.0f}"
    words = format_partings(speeds["partings"])
    print(f"{line}, {speculative / plain:.2f} times as fast; {words}")


def print_commands(config, out: Path) -> None:
    """What to run after the story."""
    target = f"--target {config.target or f'{out}/target'}"
    print(f'  python serve.py {target} --drafter {out}/specopd --prompt "def main(" "import os"')
    made = "" if config.references else f" --references {out}/references.safetensors"
    command = f"python train.py --mode specopd {target}{made}"
    print(f"  {command} --drafter {out}/start --out runs/mine")
    print(f"  python -m lab speed {target} --drafters {out}/specopd")
