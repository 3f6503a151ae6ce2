"""One Markdown report of the studies that `python -m lab claims` has finished.

Nothing is measured here: the counts of every prompt and a line for each step are kept in the
folders of the runs. Tables, curves of loss and AL, and how many drafts survive.

    python -m lab report --claims runs/claims      -> runs/report/report.md
    pytest tests/lab/test_claims.py
"""

import csv
import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path

from lab import claims
from lab.common import new_figure, save_picture
from support.files import atomic_write
from support.flags import flag
from support.measure import format_gain

COLOURS = {
    "ce": "tab:gray",
    "e2e": "tab:orange",
    "rollout": "tab:green",
    "specopd": "tab:blue",
    "start": "black",
}


@dataclass(frozen=True)
class Config:
    out: str = flag("runs/report", "folder for report.md, its pictures and its CSV files")
    claims: str = flag("runs/claims", "the folder of `python -m lab claims`")
    window: int = flag(25, "steps that a loss is averaged over", low=1)


def read_log(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def moving_average(values: list, window: int) -> list:
    """The mean of each value and of up to window - 1 values before it."""
    parts = (values[max(0, i + 1 - window) : i + 1] for i in range(len(values)))
    return [sum(part) / len(part) for part in parts]


def curve(seeds: dict, key: str, window: int = 1) -> tuple[list, list, list, list]:
    """Steps, mean over seeds, lowest and highest of a figure, at the steps that record it."""
    rows = [[(r["step"], r[key]) for r in records if key in r] for records in seeds.values()]
    lines = [moving_average([value for _, value in row], window) for row in rows]
    steps = [step for step, _ in rows[0]]
    columns = list(zip(*lines))
    means = [sum(column) / len(column) for column in columns]
    return steps, means, [min(column) for column in columns], [max(column) for column in columns]


def write_curves(path: Path, logs: dict) -> None:
    """Write loss and AL against steps as CSV."""
    with atomic_write(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["arm", "seed", "step", "loss", "al_t0", "al_t1"])
        for arm, seeds in logs.items():
            for seed, records in seeds.items():
                for r in records:
                    al = (r.get("al_t0", ""), r.get("al_t1", ""))
                    writer.writerow([arm, seed, r["step"], f"{r['loss']:.5f}", *al])


def draw_curves(path: Path, name: str, logs: dict, window: int) -> str:
    """Loss and AL against steps; a band reaches from the lowest to the highest seed.

    Losses of other kinds have other units, so each is drawn as a share of its first value.
    """
    figure, axes = new_figure(3, (13, 3.6))
    for arm, seeds in logs.items():
        for axis, key in zip(axes, ("loss", "al_t0", "al_t1")):
            steps, mean, low, high = curve(seeds, key, window if key == "loss" else 1)
            if key == "loss":
                first = min(window, len(mean)) - 1  # from here on the window is full
                unit = mean[first]
                steps = steps[first:]
                mean, low, high = ([v / unit for v in x[first:]] for x in (mean, low, high))
            marker = "" if key == "loss" else "."
            (line,) = axis.plot(steps, mean, label=arm, color=COLOURS.get(arm), marker=marker)
            axis.fill_between(steps, low, high, alpha=0.15, color=line.get_color())
    for axis, title in zip(axes, ("loss, as a share of its first", "AL, T = 0", "AL, T = 1")):
        axis.set_title(f"{name}: {title}")
        axis.set_xlabel("step")
    axes[0].legend()
    return save_picture(figure, path)


def draw_survival(path: Path, name: str, study: dict) -> str:
    """The share of rounds that keep their first k drafts, for every arm's best drafter."""
    figure, axes = new_figure(2, (9, 3.6))
    for arm, moments in study.items():
        for axis, (temperature, results) in zip(axes, moments["best"].items()):
            drafts = range(1, len(results.survival) + 1)
            axis.plot(drafts, results.survival, label=arm, color=COLOURS.get(arm), marker=".")
            axis.set_title(f"{name}: survival, T = {temperature[1:]}")
            axis.set_xlabel("draft")
    axes[0].legend()
    return save_picture(figure, path)


def study_section(config: Config, out: Path, name: str) -> list[str]:
    """A study's table, SpecOPD's gains in it, its curves; nothing if no arm is finished."""
    claims_config = claims.Config(out=config.claims)
    study = claims.read_study(claims_config, name)
    if not study:
        return []
    rows, figures = claims.table(name, study)
    lines = [f"## {name}", "", *rows, ""]
    for other in ("ce", "e2e", "rollout") if "specopd" in figures else ():
        gains = [
            f"T = {temperature[1:]} {format_gain(row['over'][other])}"
            for temperature, row in figures["specopd"].items()
            if other in row["over"]
        ]
        lines += [f"- SpecOPD over {other}: {', '.join(gains)}"] if gains else []
    logs = {}  # {arm: {seed: records}}
    for arm, folders in claims.finished_arms(claims_config, name).items():
        logs[arm] = {seed: read_log(folder) for seed, folder in folders.items()}
    write_curves(out / f"{name}.csv", logs)
    lines += ["", f"Loss and AL by step: [{name}.csv]({name}.csv)", ""]
    if importlib.util.find_spec("matplotlib") and len(logs) <= len(COLOURS):
        lines += [draw_curves(out / f"{name}-curves.png", name, logs, config.window), ""]
        lines += [draw_survival(out / f"{name}-survival.png", name, study), ""]
    return lines


def run(config: Config) -> dict:
    """Write the report -> the names of its files."""
    out = Path(config.out)
    if not importlib.util.find_spec("matplotlib"):
        print("no pictures: pip install matplotlib")
    lines = []
    for name in claims.STUDIES:
        lines += study_section(config, out, name)
    if not lines:
        raise ValueError(f"{config.claims} holds no finished study")
    with atomic_write(out / "report.md") as temporary:
        temporary.write_text("\n".join(["# What was measured", "", *lines]), encoding="utf-8")
    print(f"{out}/report.md")
    return {"files": sorted(path.name for path in out.iterdir())}
