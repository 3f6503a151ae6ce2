"""One Markdown report of the studies that `python -m lab claims` has finished.

It has tables, curves of loss and AL, and the survival of drafts. Nothing is measured here.

    python -m lab report --claims runs/claims      -> runs/report/report.md
    pytest tests/lab/test_claims.py
"""

import csv
import json
from dataclasses import dataclass
from pathlib import Path

import numpy

from lab import claims
from lab.common import new_figure
from support.files import atomic_write
from support.flags import flag
from support.measure import format_gain

COLOURS = {"start": "black", "ce": "C7", "e2e": "C1", "rollout": "C2", "specopd": "C0"}
CURVES = {"loss": "loss, as a share of its first", "al_t0": "AL, T = 0", "al_t1": "AL, T = 1"}


@dataclass(frozen=True)
class Config:
    out: str = flag("runs/report", "folder for report.md, its pictures and its CSV files")
    claims: str = flag("runs/claims", "the folder of `python -m lab claims`")
    window: int = flag(25, "steps that a loss is averaged over", low=1)


def write_curves(path: Path, logs: dict) -> None:
    with atomic_write(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["arm", "seed", "step", *CURVES])
        for arm, seeds in logs.items():
            for seed, records in seeds.items():
                for r in records:
                    row = [arm, seed, r["step"], f"{r['loss']:.5f}"]
                    writer.writerow([*row, r.get("al_t0", ""), r.get("al_t1", "")])


def curve(seeds: dict, key: str, window: int) -> tuple:
    """Steps (n,), and a logged figure of every seed (n, S). A loss is averaged over windows
    and, because different losses have different units, divided by its first average."""
    rows = [[(r["step"], r[key]) for r in records if key in r] for records in seeds.values()]
    columns = list(zip(*rows))
    steps = [column[0][0] for column in columns]
    values = numpy.array([[value for _, value in column] for column in columns])
    if key != "loss":
        return steps, values
    window = min(window, len(values))
    means = numpy.lib.stride_tricks.sliding_window_view(values, window, axis=0).mean(-1)
    return steps[window - 1 :], means / means[0].mean()


def draw_picture(path: Path, xlabel: str, panels: dict) -> None:
    """A panel for each title, of lines {arm: (xs (n,), values (n, S))} with a band over seeds."""
    figure, axes = new_figure(len(panels), (4.4 * len(panels), 3.6))
    for axis, (title, lines) in zip(axes, panels.items()):
        for arm, (xs, values) in lines.items():
            style = {"color": COLOURS.get(arm), "marker": "." if len(xs) < 100 else ""}
            (line,) = axis.plot(xs, values.mean(1), label=arm, **style)
            axis.fill_between(xs, values.min(1), values.max(1), alpha=0.15, color=line.get_color())
        axis.set(title=title, xlabel=xlabel)
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def study_section(config: Config, out: Path, name: str) -> list[str]:
    """A study's table, SpecOPD's gains in it, its curves; nothing if no arm is finished."""
    claims_config = claims.Config(out=config.claims)
    study = claims.read_study(claims_config, name)
    if not study:
        return []
    rows, figures = claims.table(name, study)
    lines = [f"## {name}", "", *rows, ""]
    for other in ("ce", "e2e", "rollout"):
        overs = {t: row["over"] for t, row in figures.get("specopd", {}).items()}
        gains = [f"T = {t[1:]} {format_gain(x[other])}" for t, x in overs.items() if other in x]
        lines += [f"- SpecOPD over {other}: {', '.join(gains)}"] if gains else []
    logs = {}  # {arm: {seed: records}}
    for arm, folders in claims.finished_arms(claims_config, name).items():
        texts = {seed: (folder / "log.jsonl").read_text() for seed, folder in folders.items()}
        logs[arm] = {s: [json.loads(x) for x in text.splitlines()] for s, text in texts.items()}
    write_curves(out / f"{name}.csv", logs)
    lines += ["", f"Loss and AL by step: [{name}.csv]({name}.csv)", ""]
    if len(logs) > len(COLOURS):
        return lines
    panels = {"curves": {}, "survival": {}}
    for key, title in CURVES.items():
        curves = {arm: curve(seeds, key, config.window) for arm, seeds in logs.items()}
        panels["curves"][f"{name}: {title}"] = curves
    for t in ("t0", "t1"):
        best = {arm: moments["best"][t].tasks.values() for arm, moments in study.items()}
        shares = {arm: numpy.array([r.survival for r in x]).T for arm, x in best.items()}  # (W, S)
        survival = {arm: (range(1, len(x) + 1), x) for arm, x in shares.items()}
        panels["survival"][f"{name}: survival, T = {t[1:]}"] = survival
    for kind, xlabel in (("curves", "step"), ("survival", "draft")):
        draw_picture(out / f"{name}-{kind}.png", xlabel, panels[kind])
        lines += [f"![{name}-{kind}]({name}-{kind}.png)", ""]
    return lines


def run(config: Config) -> dict:
    out = Path(config.out)
    lines = [line for name in claims.STUDIES for line in study_section(config, out, name)]
    if not lines:
        raise ValueError(f"{config.claims} holds no finished study")
    with atomic_write(out / "report.md") as temporary:
        temporary.write_text("\n".join(["# What was measured", "", *lines]), encoding="utf-8")
    print(f"{out}/report.md")
    return {"files": sorted(path.name for path in out.iterdir())}
