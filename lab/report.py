"""One Markdown report of the studies that `python -m lab claims` has finished.

Tables, curves of loss and AL, and how many drafts survive. Nothing is measured here.

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

COLOURS = {"start": "black", "ce": "tab:gray", "e2e": "tab:orange"}
COLOURS |= {"rollout": "tab:green", "specopd": "tab:blue"}
CURVES = {"loss": "loss, as a share of its first", "al_t0": "AL, T = 0", "al_t1": "AL, T = 1"}


@dataclass(frozen=True)
class Config:
    out: str = flag("runs/report", "folder for report.md, its pictures and its CSV files")
    claims: str = flag("runs/claims", "the folder of `python -m lab claims`")
    window: int = flag(25, "steps that a loss is averaged over", low=1)


def write_curves(path: Path, logs: dict) -> None:
    """Write loss and AL against steps as CSV."""
    with atomic_write(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["arm", "seed", "step", *CURVES])
        for arm, seeds in logs.items():
            for seed, records in seeds.items():
                for r in records:
                    row = [arm, seed, r["step"], f"{r['loss']:.5f}"]
                    writer.writerow([*row, r.get("al_t0", ""), r.get("al_t1", "")])


def curve(seeds: dict, key: str, window: int) -> tuple[list, numpy.ndarray]:
    """Steps (n,), and means of a logged figure over full windows of them (n, seeds)."""
    rows = [[(r["step"], r[key]) for r in records if key in r] for records in seeds.values()]
    steps = [step for step, _ in rows[0]]
    values = numpy.array([[value for _, value in column] for column in zip(*rows)])
    window = min(window, len(values))
    windows = numpy.lib.stride_tricks.sliding_window_view(values, window, axis=0)
    return steps[window - 1 : len(values)], windows.mean(-1)


def draw_curves(path: Path, name: str, logs: dict, window: int) -> None:
    """Loss and AL against steps; a band reaches from the lowest to the highest seed. Losses of
    other kinds have other units, so each is drawn as a share of its first value."""
    figure, axes = new_figure(3, (13, 3.6))
    for axis, (key, title) in zip(axes, CURVES.items()):
        for arm, seeds in logs.items():
            is_loss = key == "loss"
            steps, values = curve(seeds, key, window if is_loss else 1)
            values = values / values[0].mean() if is_loss else values
            style = {"color": COLOURS.get(arm), "marker": "" if is_loss else "."}
            (line,) = axis.plot(steps, values.mean(1), label=arm, **style)
            band = (values.min(1), values.max(1))
            axis.fill_between(steps, *band, alpha=0.15, color=line.get_color())
        axis.set(title=f"{name}: {title}", xlabel="step")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def draw_survival(path: Path, name: str, study: dict) -> None:
    """The share of rounds that keep their first k drafts, for every arm's best drafter."""
    figure, axes = new_figure(2, (9, 3.6))
    for arm, moments in study.items():
        for axis, (temperature, results) in zip(axes, moments["best"].items()):
            drafts = range(1, len(results.survival) + 1)
            axis.plot(drafts, results.survival, label=arm, color=COLOURS.get(arm), marker=".")
            axis.set(title=f"{name}: survival, T = {temperature[1:]}", xlabel="draft")
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
    if len(logs) <= len(COLOURS):
        draw_curves(out / f"{name}-curves.png", name, logs, config.window)
        draw_survival(out / f"{name}-survival.png", name, study)
        for picture in ("curves", "survival"):
            lines += [f"![{name}-{picture}]({name}-{picture}.png)", ""]
    return lines


def run(config: Config) -> dict:
    """Write the report -> the names of its files."""
    out = Path(config.out)
    lines = [line for name in claims.STUDIES for line in study_section(config, out, name)]
    if not lines:
        raise ValueError(f"{config.claims} holds no finished study")
    with atomic_write(out / "report.md") as temporary:
        temporary.write_text("\n".join(["# What was measured", "", *lines]), encoding="utf-8")
    print(f"{out}/report.md")
    return {"files": sorted(path.name for path in out.iterdir())}
