"""One Markdown report of what run folders hold, with tables and pictures.

Nothing is measured here. `claims` keeps the counts of every prompt, train.py a line for each step,
the other commands their summary.json.

    python -m lab report --claims runs/claims --benches runs/lab      -> runs/report/report.md
    pytest tests/lab/test_claims.py
"""

import csv
import io
import json
from dataclasses import dataclass
from pathlib import Path

from hf.files import read_json
from lab import claims
from lab.common import pyplot, save_picture
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
STAGE_COLOURS = {
    "decode": "tab:green",
    "prefill": "tab:gray",
    "sample": "tab:cyan",
    "score": "tab:blue",
    "loss": "tab:orange",
    "backward": "tab:red",
    "update": "tab:purple",
}


@dataclass(frozen=True)
class Config:
    out: str = flag("runs/report", "folder for report.md, its pictures and its CSV files")
    claims: str = flag("runs/claims", "the folder of `python -m lab claims`")
    benches: tuple = flag((), "folders with a command's summary.json; their names become titles")
    window: int = flag(25, "steps that a loss is averaged over", low=1)


def write_text(path: Path, text: str) -> None:
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


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


def write_curves(out: Path, name: str, logs: dict) -> None:
    """Write loss and AL against steps as CSV."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(["arm", "seed", "step", "loss", "al_t0", "al_t1"])
    for arm, seeds in logs.items():
        for seed, records in seeds.items():
            for r in records:
                al = (r.get("al_t0", ""), r.get("al_t1", ""))
                writer.writerow([arm, seed, r["step"], f"{r['loss']:.5f}", *al])
    write_text(out / f"{name}.csv", stream.getvalue())


def draw_curves(plot, path: Path, name: str, logs: dict, window: int) -> str:
    """Loss and AL against steps; a band reaches from the lowest to the highest seed.

    Losses of other kinds have other units, so each is drawn as a share of its first value.
    """
    figure, axes = plot.subplots(1, 3, figsize=(13, 3.6))
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
    return save_picture(plot, figure, path)


def draw_survival(plot, path: Path, name: str, study: dict) -> str:
    """The share of rounds that keep their first k drafts, for every arm's best drafter."""
    figure, axes = plot.subplots(1, 2, figsize=(9, 3.6))
    for arm, moments in study.items():
        for axis, (temperature, results) in zip(axes, moments["best"].items()):
            drafts = range(1, len(results.survival) + 1)
            axis.plot(drafts, results.survival, label=arm, color=COLOURS.get(arm), marker=".")
            axis.set_title(f"{name}: survival, T = {temperature[1:]}")
            axis.set_xlabel("draft")
    axes[0].legend()
    return save_picture(plot, figure, path)


def draw_timelines(plot, path: Path, rows: dict, names: list) -> str:
    """The stages of one update over time, a line for each workflow, on one scale."""
    figure, axes = plot.subplots(len(names), 1, figsize=(12, 1.5 * len(names)), sharex=True)
    for axis, name in zip(axes, names):
        for stage, colour in STAGE_COLOURS.items():
            spans = [(begin, end - begin) for s, begin, end in rows[name]["spans"] if s == stage]
            # decoding drafts and scores, too, which is drawn inside it
            outer = stage == "decode"
            height = (0, 1) if outer else (0.1, 0.8)
            style = {"color": colour, "label": stage, "linewidth": 0}
            axis.broken_barh(spans, height, alpha=0.3 if outer else 1.0, **style)
        tokens = rows[name]["tokens_per_update"]
        axis.set_title(f"{name}: one update, {tokens:,.0f} supervised tokens", fontsize=9)
        axis.set_yticks([])
    axes[-1].set_xlabel("seconds")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper right", ncols=len(labels), fontsize=7)
    return save_picture(plot, figure, path)


def study_section(config: Config, out: Path, plot, name: str) -> list[str]:
    """A study's table, SpecOPD's gains in it, its curves; nothing if no arm is finished."""
    claims_config = claims.Config(out=config.claims)
    study = claims.read_study(claims_config, name)
    if not study:
        return []
    rows, figures = claims.table(name, study)
    lines = [f"## {name}", "", *rows, ""]
    specopd = figures.get("specopd")
    for other in ("ce", "e2e", "rollout") if specopd else ():
        gains = [
            f"T = {temperature[1:]} {format_gain(row['over'][other])}"
            for temperature, row in specopd.items()
            if other in row["over"]
        ]
        lines += [f"- SpecOPD over {other}: {', '.join(gains)}"] if gains else []
    logs = {}  # {arm: {seed: records}}
    for arm, folders in claims.finished_arms(claims_config, name).items():
        logs[arm] = {seed: read_log(folder) for seed, folder in folders.items()}
    write_curves(out, name, logs)
    lines += ["", f"Loss and AL by step: [{name}.csv]({name}.csv)", ""]
    if plot and len(logs) <= len(COLOURS):
        lines += [draw_curves(plot, out / f"{name}-curves.png", name, logs, config.window), ""]
        lines += [draw_survival(plot, out / f"{name}-survival.png", name, study), ""]
    return lines


def throughput_section(title: str, figures: dict, out: Path, plot) -> list[str]:
    rows = figures["rows"]
    lines = [
        f"## {title}: throughput",
        "",
        "| | updates/s | tokens/update | tokens/s | where the time goes |",
        "|---" * 5 + "|",
    ]
    for name, row in rows.items():
        shares = ", ".join(f"{stage} {100 * share:.0f} %" for stage, share in row["shares"].items())
        lines.append(
            f"| {name} | {row['updates_per_s']:.2f} | {row['tokens_per_update']:,.0f} "
            f"| {row['tokens_per_s']:,.0f} | {shares} |"
        )
    if plot:
        shown = ["rollouts, 8 at once", figures["best"]]
        lines += ["", draw_timelines(plot, out / f"{title}-timelines.png", rows, shown)]
    return [*lines, ""]


def speed_section(title: str, figures: dict) -> list[str]:
    sizes = {key: value for key, value in figures.items() if key != "config"}
    arms = list(next(iter(sizes.values()))["geometric_means"])
    lines = [f"## {title}: generation, times plain decoding", ""]
    lines += [f"| | {' | '.join(arms)} |", "|---" * (1 + len(arms)) + "|"]
    for size, results in sizes.items():
        for task, row in results["tasks"].items():
            plain = row["off"]["tokens_per_s"]
            cells = []
            for arm in row.values():
                ratio = f"{arm['tokens_per_s'] / plain:.2f}x"
                ratio = ratio if arm["same_text"] else "THE TEXTS DIFFER"
                cells.append(f"{arm['tokens_per_s']:.1f}/s, AL {arm['al']:.3f}, {ratio}")
            lines.append(f"| {task}, {size} | {' | '.join(cells)} |")
        means = results["geometric_means"].values()
        cells = [f"{mean:.2f}x" if mean else "texts differ" for mean in means]
        lines.append(f"| geometric mean, {size} | {' | '.join(cells)} |")
    return [*lines, ""]


def bench_section(folder: Path, out: Path, plot) -> list[str]:
    """The tables of a folder's summary.json, and the names of what has no table."""
    summary, title = read_json(folder / "summary.json"), folder.name
    lines = []
    if "throughput" in summary:
        lines += throughput_section(title, summary["throughput"], out, plot)
    if "speed" in summary:
        lines += speed_section(title, summary["speed"])
    others = [key for key in summary if key not in ("throughput", "speed")]
    if others:
        lines += [f"{title} also holds {', '.join(others)}: {folder}/summary.json", ""]
    return lines


def run(config: Config) -> dict:
    """Write the report -> the names of its files."""
    out = Path(config.out)
    plot = pyplot()
    if plot is None:
        print("no pictures: pip install matplotlib")
    lines = []
    for name in claims.STUDIES:
        lines += study_section(config, out, plot, name)
    for folder in config.benches:
        try:
            lines += bench_section(Path(folder), out, plot)
        except KeyError as error:
            raise ValueError(
                f"{folder}/summary.json lacks {error}: an older version's? Run the command again"
            ) from None
    if not lines:
        raise ValueError(f"{config.claims} holds no finished study, and no --benches are given")
    write_text(out / "report.md", "\n".join(["# What was measured", "", *lines]))
    print(f"{out}/report.md")
    return {"files": sorted(path.name for path in out.iterdir())}
