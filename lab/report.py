"""One Markdown report of what run folders hold: tables, and pictures if matplotlib is there.

    python bench.py report --claims runs/claims --benches runs/bench    -> runs/report/report.md

    pytest tests/test_claims.py

Nothing is computed here that was not measured before: claims.py keeps the counts of every prompt,
train.py a line a step, bench.py its summary.json.
"""

import csv
import io
import json
from dataclasses import dataclass
from pathlib import Path

from lab import claims
from lab.claims import STUDIES, ClaimsConfig
from support import files
from support.files import flag
from support.measure import format_gain

COLOURS = {
    "ce": "tab:gray",
    "e2e": "tab:orange",
    "rollout": "tab:green",
    "specopd": "tab:blue",
    "start": "black",
}
KINDS = {
    "decode": "tab:green",
    "prefill": "tab:gray",
    "sample": "tab:cyan",
    "score": "tab:blue",
    "loss": "tab:orange",
    "backward": "tab:red",
    "update": "tab:purple",
}


@dataclass(frozen=True)
class ReportConfig:
    out: str = flag("runs/report", "folder for report.md, its pictures and its CSV files")
    claims: str = flag("runs/claims", "the folder of bench.py claims")
    benches: tuple = flag((), "folders with a bench's summary.json; their names become titles")
    window: int = flag(25, "steps that a loss is averaged over", low=1)


def logs_of(config: ClaimsConfig, name: str) -> dict:
    """{arm: {seed: records}} of the arms of a study that are done."""
    return {
        arm: {
            seed: [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
            for seed, folder in held.items()
        }
        for arm, held in claims.done(config, name).items()
    }


def averaged(values: list, window: int) -> list:
    return [
        sum(values[max(0, i - window + 1) : i + 1]) / min(window, i + 1) for i in range(len(values))
    ]


def curve(seeds: dict, key: str, window: int = 1) -> tuple[list, list, list, list]:
    """Steps, mean over seeds, lowest, highest of a figure of the log, where it was taken."""
    rows = [[(r["step"], r[key]) for r in records if key in r] for records in seeds.values()]
    lines = [averaged([value for _, value in row], window) for row in rows]
    steps = [step for step, _ in rows[0]]
    columns = list(zip(*lines))
    return (
        steps,
        [sum(c) / len(c) for c in columns],
        [min(c) for c in columns],
        [max(c) for c in columns],
    )


def write_text(path: Path, text: str) -> None:
    with files.atomic(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_curves(out: Path, name: str, logs: dict) -> None:
    """C4: loss and AL against steps, as CSV."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(["arm", "seed", "step", "loss", "al_t0", "al_t1"])
    for arm, seeds in logs.items():
        for seed, records in seeds.items():
            for r in records:
                al = (r.get("al_t0", ""), r.get("al_t1", ""))
                writer.writerow([arm, seed, r["step"], f"{r['loss']:.5f}", *al])
    write_text(out / f"{name}.csv", stream.getvalue())


# ------------------------------------------------------------------------------------- the pictures


def save(plot, figure, path: Path) -> str:
    figure.tight_layout()
    with files.atomic(path) as temporary:
        figure.savefig(temporary, dpi=120, format="png")
    plot.close(figure)
    return f"![{path.stem}]({path.name})"


def draw_curves(plot, out: Path, name: str, logs: dict, window: int) -> str:
    """Loss and AL against steps; bands are the lowest and highest seed. Losses of other kinds have
    other units, so each is drawn from its own first value."""
    figure, axes = plot.subplots(1, 3, figsize=(13, 3.6))
    for arm, seeds in logs.items():
        for axis, key in zip(axes, ("loss", "al_t0", "al_t1")):
            steps, mean, low, high = curve(seeds, key, window if key == "loss" else 1)
            if key == "loss":  # the window is full from there on
                first = min(window, len(mean)) - 1
                mean, low, high = ([v / mean[first] for v in line] for line in (mean, low, high))
                steps, mean, low, high = (x[first:] for x in (steps, mean, low, high))
            colour = COLOURS.get(arm)
            (line,) = axis.plot(steps, mean, label=arm, color=colour, marker="." * (key != "loss"))
            axis.fill_between(steps, low, high, alpha=0.15, color=line.get_color())
    for axis, title in zip(axes, ("loss, as a share of its first", "AL, T = 0", "AL, T = 1")):
        axis.set_title(f"{name}: {title}")
        axis.set_xlabel("step")
    axes[0].legend()
    return save(plot, figure, out / f"{name}-curves.png")


def draw_survival(plot, out: Path, name: str, found: dict) -> str:
    """C5: how many rounds keep their first k drafts, at every arm's best checkpoint."""
    figure, axes = plot.subplots(1, 2, figsize=(9, 3.6))
    for arm, ats in found.items():
        for axis, (t, one) in zip(axes, ats["best"].items()):
            ks = range(1, len(one.survival) + 1)
            axis.plot(ks, one.survival, label=arm, color=COLOURS.get(arm), marker=".")
            axis.set_title(f"{name}: survival, T = {t[1:]}")
            axis.set_xlabel("draft")
    axes[0].legend()
    return save(plot, figure, out / f"{name}-survival.png")


def draw_bars(plot, path: Path, values: dict, title: str) -> str:
    figure, axis = plot.subplots(figsize=(8, 0.5 + 0.4 * len(values)))
    bars = axis.barh(list(values), list(values.values()))
    axis.bar_label(bars, fmt="{:,.1f}", padding=3)
    axis.invert_yaxis()
    axis.set_title(title)
    axis.margins(x=0.12)
    return save(plot, figure, path)


def draw_timelines(plot, path: Path, rows: dict, names: list) -> str:
    """What runs when in one update, one line for each way to train, on one scale of time."""
    figure, axes = plot.subplots(len(names), 1, figsize=(12, 1.5 * len(names)), sharex=True)
    for axis, name in zip(axes, names):
        for kind, colour in KINDS.items():
            spans = [(begin, end - begin) for k, begin, end in rows[name]["spans"] if k == kind]
            # decoding holds its own drafting and scoring, which are drawn inside it
            height = (0, 1) if kind == "decode" else (0.1, 0.8)
            axis.broken_barh(
                spans,
                height,
                color=colour,
                label=kind,
                linewidth=0,
                alpha=0.3 if kind == "decode" else 1.0,
            )
        tokens = rows[name]["tokens_per_update"]
        axis.set_title(f"{name}: one update, {tokens:,.0f} supervised tokens", fontsize=9)
        axis.set_yticks([])
    axes[-1].set_xlabel("seconds")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper right", ncols=len(labels), fontsize=7)
    return save(plot, figure, path)


# --------------------------------------------------------------------------------------- the report


def of_claims(config: ReportConfig, out: Path, plot) -> list[str]:
    lines, kept = [], ClaimsConfig(out=config.claims)
    for name in (*STUDIES, "given"):
        found = claims.read(kept, name)
        if not found:
            continue
        rows, figures = claims.table(name, found)
        lines += [f"## {name}", "", *rows, ""]
        own = figures.get("specopd")
        for other in ("ce", "e2e", "rollout") if own else ():
            gains = [
                f"T = {t[1:]} {format_gain(own[t]['over'][other])}"
                for t in own
                if other in own[t]["over"]
            ]
            lines += [f"- SpecOPD over {other}: {', '.join(gains)}"] if gains else []
        logs = logs_of(kept, name)
        write_curves(out, name, logs)
        lines += ["", f"Loss and AL by step: [{name}.csv]({name}.csv)", ""]
        if plot and len(logs) <= len(COLOURS):
            lines += [draw_curves(plot, out, name, logs, config.window), ""]
            lines += [draw_survival(plot, out, name, found), ""]
    return lines


def of_bench(folder: Path, out: Path, plot) -> list[str]:
    figures, lines = files.read_json(folder / "summary.json"), []
    title = folder.name
    if "throughput" in figures:
        rows = figures["throughput"]["rows"]
        lines += [
            f"## {title}: throughput",
            "",
            "| | updates/s | tokens/update | tokens/s | where the time goes |",
            "|---" * 5 + "|",
        ]
        for name, row in rows.items():
            shares = ", ".join(f"{k} {100 * v:.0f} %" for k, v in row["shares"].items())
            lines.append(
                f"| {name} | {row['updates_per_s']:.2f} | {row['tokens_per_update']:,.0f} "
                f"| {row['tokens_per_s']:,.0f} | {shares} |"
            )
        if plot:
            speeds = {name: row["tokens_per_s"] for name, row in rows.items()}
            ways = ["rollouts, 8 at once", figures["throughput"]["best"]]
            lines += [
                "",
                draw_bars(
                    plot, out / f"{title}-throughput.png", speeds, "supervised tokens per second"
                ),
                "",
                draw_timelines(plot, out / f"{title}-timelines.png", rows, ways),
            ]
        lines.append("")
    if "speed" in figures:
        sizes = {k: v for k, v in figures["speed"].items() if k != "config"}
        arms = list(next(iter(sizes.values()))["geometric_means"])
        lines += [
            f"## {title}: generation, times plain decoding",
            "",
            f"| | {' | '.join(arms)} |",
            "|---" * (1 + len(arms)) + "|",
        ]
        for size, found in sizes.items():
            for task, row in found["tasks"].items():
                plain = row["off"]["tokens_per_s"]
                cells = [
                    f"{one['tokens_per_s']:.1f}/s, AL {one['al']:.3f}, "
                    + (
                        f"{one['tokens_per_s'] / plain:.2f}x"
                        if one["same_text"]
                        else "THE TEXTS DIFFER"
                    )
                    for one in row.values()
                ]
                lines.append(f"| {task}, {size} | {' | '.join(cells)} |")
            means = [
                f"{mean:.2f}x" if mean else "texts differ"
                for mean in found["geometric_means"].values()
            ]
            lines.append(f"| geometric mean, {size} | {' | '.join(means)} |")
        lines.append("")
    others = [key for key in figures if key not in ("throughput", "speed")]
    if others:
        lines += [f"{title} also holds {', '.join(others)}: {folder}/summary.json", ""]
    return lines


def report(config: ReportConfig) -> dict:
    """Write the report -> the files it consists of."""
    out = Path(config.out)
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot as plot
    except ImportError:
        plot = None
        print("no pictures: pip install matplotlib")
    lines = of_claims(config, out, plot)
    for folder in config.benches:
        try:
            lines += of_bench(Path(folder), out, plot)
        except KeyError as error:
            raise ValueError(
                f"{folder}/summary.json lacks {error}: an older version's? run the bench again"
            ) from None
    if not lines:
        raise ValueError(f"{config.claims} holds no finished study, and no --benches are given")
    write_text(out / "report.md", "\n".join(["# What was measured", "", *lines]))
    print(f"{out}/report.md")
    return {"files": sorted(path.name for path in out.iterdir())}
