"""docs/results.md, its pictures and the README's table, from records of ONE version.

Nothing is measured here. The records are what `python -m lab claims` wrote (one file a study) and
what other commands wrote with `--out docs/records` (summary.json). Records of several versions, or
of code that was changed and not committed, are refused.

    python -m lab claims; python -m lab throughput --out docs/records ...; python -m lab report
    pytest tests/lab/test_report.py
"""

from dataclasses import dataclass
from pathlib import Path

import numpy

from hf.files import read_json
from lab.claims import ARCHS, OTHERS, SAME_TIME, Arm, table
from lab.common import new_figure
from support.files import atomic_write
from support.flags import flag
from support.measure import TEMPERATURES, format_gain

KINDS = ("dflash", "dspark", "dflash2")
TITLES = {
    "start": "start",
    "ce": "CE",
    "e2e": "E2E-TV",
    "rollout": "rollouts",
    "specopd": "SpecOPD",
}
COLOURS = {"start": "black", "ce": "C7", "e2e": "C1", "rollout": "C2", "specopd": "C0"}
BEGIN, END = "<!-- story -->\n", "<!-- /story -->"  # around the README's table
INTRODUCTION = """# Results

Written by `python -m lab report` from [records](records) of one version of the code. Nothing here
was typed by hand. [earlier.md](earlier.md) has what only earlier versions measured.

AL is the acceptance length: tokens committed per pass of the target, its own token included. T is
the temperature of decoding. `gqa`, `gdn` and `qsa` are the three toy targets: full attention; three
gated delta nets to one attention layer; the same with sparse attention, experts, residual streams
and n-grams. A gain is in percent, and in brackets is the 95 % interval of the difference in AL,
over prompts and training seeds, paired by both. "Not repeated": AL of the tokens that are not part
of a loop, which greedy text of a small model has many of. "Same time": as many steps as fit into
the seconds of the arm specopd.
"""


@dataclass(frozen=True)
class Config:
    out: str = flag("docs", "folder for results.md and pictures/")
    records: str = flag("docs/records", "folder of the records")
    readme: str = flag("README.md", "the file whose table is written; empty: none")


def load_records(folder: Path) -> dict[str, dict]:
    """{study or command: record}."""
    records = {}
    for path in sorted(folder.glob("*.json")):
        content = read_json(path)
        records |= {content["study"]: content} if "study" in content else content
    if not records:
        raise ValueError(f"{folder} holds no records: `python -m lab claims` writes them")
    return records


def check_one_version(records: dict[str, dict]) -> str:
    """Raise a ValueError unless all records are of one committed version -> the version."""
    by_version = {}
    for name, record in records.items():
        by_version.setdefault(record.get("version") or "unknown", []).append(name)
    if len(by_version) > 1:
        listed = "; ".join(
            f"{version}: {', '.join(names)}" for version, names in by_version.items()
        )
        raise ValueError(
            f"the records are of several versions ({listed}): run the older ones again"
        )
    (version,) = by_version
    if version == "unknown" or version.endswith("-dirty"):
        raise ValueError(f"the records are of version {version}: commit the code, then measure")
    return version


# ------------------------------------------------------------------------------------- pictures


def save(figure, folder: Path, name: str) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    figure.tight_layout(rect=(0, 0, 1, 0.94 if figure.legends else 1))
    figure.savefig(folder / f"{name}.png", dpi=100)
    return [f"![{name}](pictures/{name}.png)", ""]


def legend_above(figure, axis) -> None:
    """One legend for all axes, above them."""
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncol=len(labels), fontsize=8)


def al_curves(record: dict) -> dict:
    """{arm: (steps, seconds, {temperature: AL (n, seeds)})} of arms that were measured often."""
    curves = {}
    for arm, by_seed in record["arms"].items():
        rows = [numpy.array(seed["curve"]["al"]) for seed in by_seed.values()]
        if arm != "start" and arm in COLOURS and all(len(row) > 1 for row in rows):
            als = {t: numpy.stack([row[:, 2 + i] for row in rows], 1) for i, t in enumerate((0, 1))}
            curves[arm] = (rows[0][:, 0], numpy.mean([row[:, 1] for row in rows], 0), als)
    return curves


def draw_al(records: dict, folder: Path, against: str) -> list[str]:
    """AL while training, against steps or seconds: a column for each target."""
    archs = [arch for arch in ARCHS if arch in records]
    figure, axes = new_figure(len(archs), (8, 5), rows=2, squeeze=False)
    for column, arch in enumerate(archs):
        for arm, (steps, seconds, als) in al_curves(records[arch]).items():
            xs = steps if against == "steps" else seconds
            for row, t in enumerate((0, 1)):
                axis = axes[row][column]
                axis.plot(xs, als[t].mean(1), color=COLOURS[arm], label=TITLES[arm])
                low, high = als[t].min(1), als[t].max(1)
                axis.fill_between(xs, low, high, alpha=0.15, color=COLOURS[arm])
                axis.set(title=f"{arch}, T = {t}", xlabel=against, ylabel="" if column else "AL")
    legend_above(figure, axes[0][0])
    return save(figure, folder, f"al-against-{against}")


def draw_survival(records: dict, folder: Path) -> list[str]:
    """How often the first k drafts are accepted, of each arm."""
    archs = [arch for arch in ARCHS if arch in records]
    figure, axes = new_figure(len(archs), (8, 5), rows=2, squeeze=False)
    for column, arch in enumerate(archs):
        for arm, by_seed in records[arch]["arms"].items():
            for row, t in enumerate((0, 1)) if arm in COLOURS else ():
                shares = Arm.of(by_seed, t).survival
                style = dict(color=COLOURS[arm], marker=".", label=TITLES[arm])
                axes[row][column].plot(range(1, len(shares) + 1), shares, **style)
                title = f"{arch}, T = {t}"
                axes[row][column].set(title=title, xlabel="draft", ylabel="" if column else "kept")
    legend_above(figure, axes[0][0])
    return save(figure, folder, "survival")


def draw_grid(records: dict, folder: Path) -> list[str]:
    """SpecOPD's gain over E2E-TV, in percent, for each target and drafter."""
    figure, axes = new_figure(2, (8, 3.2))
    for axis, t in zip(axes, TEMPERATURES):
        gains = numpy.full((len(ARCHS), len(KINDS)), numpy.nan)
        for i, arch in enumerate(ARCHS):
            for j, kind in enumerate(KINDS):
                arms = records.get(study_of(arch, kind), {}).get("arms", {})
                if {"specopd", "e2e"} <= arms.keys():
                    pair = [Arm.of(arms[name], t) for name in ("specopd", "e2e")]
                    gains[i, j] = pair[0].gain_over(pair[1])["percent"]
                    axis.text(j, i, f"{gains[i, j]:+.1f} %", ha="center", va="center")
        axis.imshow(gains, cmap="RdYlGn", vmin=-15, vmax=15, aspect="auto")
        axis.set_xticks(range(len(KINDS)), KINDS)
        axis.set_yticks(range(len(ARCHS)), ARCHS)
        axis.set_title(f"SpecOPD over E2E-TV, T = {t:g}")
    return save(figure, folder, "grid")


def draw_loss_and_al(record: dict, folder: Path) -> list[str]:
    """Loss, as a share of its first, and AL by step, of one seed."""
    figure, axes = new_figure(2, (8, 3.4))
    for arm, by_seed in record["arms"].items():
        curve = next(iter(by_seed.values()))["curve"]
        if arm == "start" or arm not in COLOURS:
            continue
        losses, als = numpy.array(curve["loss"]), numpy.array(curve["al"])
        style = dict(color=COLOURS[arm], label=TITLES[arm])
        axes[0].plot(losses[:, 0], losses[:, 1] / losses[0, 1], **style)
        axes[1].plot(als[:, 0], als[:, 2:].mean(1), **style)
    axes[0].set(title="loss, as a share of its first", xlabel="step")
    axes[1].set(title="AL, mean of T = 0 and 1", xlabel="step")
    axes[0].legend(fontsize=8)
    return save(figure, folder, "loss-and-al")


def draw_nodes(record: dict, folder: Path) -> list[str]:
    """Milliseconds of a pass over a tree, by its nodes."""
    figure, axis = new_figure(1, (8, 3.4))
    for T in sorted({row["trunk"] for row in record["rows"]}):
        rows = [row for row in record["rows"] if row["trunk"] == T]
        ms = [1e3 * row["times"]["scoring"]["median"] for row in rows]
        axis.plot([row["nodes"] for row in rows], ms, marker="o", label=f"trunk of {T}")
    axis.set(title="scoring a proposal tree", xlabel="nodes", ylabel="ms")
    axis.legend(fontsize=8)
    return save(figure, folder, "nodes")


# ------------------------------------------------------------------------------------- sections


def study_of(arch: str, kind: str) -> str:
    return arch if kind == "dflash" else f"{arch}-{kind}"


def study(records: dict, name: str) -> list[str]:
    return [*table(records[name]), ""] if name in records else []


def story(records: dict, folder: Path) -> list[str]:
    lines = [line for arch in ARCHS for line in study(records, arch)]
    if lines:
        lines += draw_al(records, folder, "steps") + draw_al(records, folder, "seconds")
        lines += draw_survival(records, folder)
    return lines


def over_others(records: dict, folder: Path) -> list[str]:
    """What SpecOPD gains over arms that the first tables set beside the start: by equal seconds,
    and by CE at its own rate. Each line is of the seeds that both arms have."""
    lines = ["| | SpecOPD over | seeds | its AL | T = 0 | its AL | T = 1 |", "|---" * 7 + "|"]
    for arch in filter(records.get, ARCHS):
        arms = records[arch]["arms"]
        for name in ("ce, own rate", *(other + SAME_TIME for other in OTHERS)):
            if name not in arms or "specopd" not in arms:
                continue
            cells = []
            for t in TEMPERATURES:
                other = Arm.of(arms[name], t)
                gain = Arm.of(arms["specopd"], t).gain_over(other)
                cells += [f"{other.mean:.3f}", format_gain(gain).strip()]
            lines.append(f"| {arch} | {name} | {gain['seeds']} | {' | '.join(cells)} |")
    return [*lines, ""] if len(lines) > 2 else []


def grid(records: dict, folder: Path) -> list[str]:
    names = [study_of(arch, kind) for arch in ARCHS for kind in KINDS[1:]]
    lines = [line for name in names for line in study(records, name)]
    return lines + draw_grid(records, folder) if lines else []


def long(records: dict, folder: Path) -> list[str]:
    if "long" not in records:
        return []
    return study(records, "long") + draw_loss_and_al(records["long"], folder)


def throughput(records: dict, folder: Path) -> list[str]:
    if "throughput" not in records:
        return []
    record = records["throughput"]
    lines = ["| way | updates/s | supervised tokens/update | tokens/s |", "|---" * 4 + "|"]
    for name, row in record["rows"].items():
        sizes = f"{row['updates_per_s']:.2f} | {row['tokens_per_update']:.0f}"
        lines.append(f"| {name} | {sizes} | {row['tokens_per_s']:.0f} |")
    for name, ratios in record["ratios"].items():
        lines += ["", f"{record['best']} over {name}: {ratios['tokens_per_s']:.2f} times."]
    return [*lines, ""]


def packed(records: dict, folder: Path) -> list[str]:
    if "tree" not in records:
        return []
    title = "| trunk | anchors | nodes | merged | packed ms | merged ms | one by one ms | times |"
    lines = [title, "|---" * 8 + "|"]
    for row in records["tree"]["rows"]:
        ms = {name: 1e3 * times["median"] for name, times in row["times"].items()}
        sizes = f"{row['trunk']} | {row['anchors']} | {row['nodes']} | {row['merged']}"
        times = f"{ms['packed']:.1f} | {ms['merged']:.1f} | {ms['alone']:.0f}"
        lines.append(f"| {sizes} | {times} | {ms['alone'] / ms['packed']:.1f} |")
    return [*lines, "", *draw_nodes(records["tree"], folder)]


def replay(records: dict, folder: Path) -> list[str]:
    if "replay" not in records:
        return []
    record = records["replay"]
    title = "| checkpoint every | states MB | replay ms | scoring ms | largest gap of a state |"
    lines = [title, "|---" * 5 + "|"]
    for row in record["rows"]:
        name = f"{row['spacing']}{' (default)' if row['spacing'] == record['default'] else ''}"
        ms = [f"{1e3 * row['times'][key]['median']:.1f}" for key in ("replay", "scoring")]
        megabytes = f"{row['states_bytes'] / 1e6:.1f}"
        lines.append(f"| {name} | {megabytes} | {' | '.join(ms)} | {row['gap']:.1e} |")
    return [*lines, ""]


def speed(records: dict, folder: Path) -> list[str]:
    if "speed" not in records:
        return []
    lines = ["| at once | drafter | AL | tokens/s | times plain |", "|---" * 5 + "|"]
    for size, figures in records["speed"].items():
        if not size.endswith("at once"):
            continue
        for task in figures["tasks"].values():
            for name, arm in task.items():
                name = Path(name).name
                speeds = f"{arm['al']:.3f} | {arm['tokens_per_s']:.0f} | {arm['ratio']:.2f}"
                lines.append(f"| {size.split()[0]} | {name} | {speeds} |")
    return [*lines, ""]


SECTIONS = (  # title, claims of the paper, function
    ("The story: three ways on from one start", "C2, C3, C5", story),
    ("In equal seconds", "", over_others),
    ("Three targets, three drafters", "C10", grid),
    ("24 references", "C2, C3", lambda records, folder: study(records, "few")),
    ("Long training on 24 references", "C4", long),
    ("One change at a time", "", lambda records, folder: study(records, "ablations")),
    ("Rates, on a search seed", "", lambda records, folder: study(records, "rates")),
    ("Blocks of 4", "", lambda records, folder: study(records, "block-4")),
    ("Blocks of 16", "", lambda records, folder: study(records, "block-16")),
    ("Throughput of training", "C1", throughput),
    ("One pass over a tree", "C6", packed),
    ("Indexed state replay", "C7", replay),
    ("Generation", "C8", speed),
)


def readme_table(record: dict) -> list[str]:
    """The short table: AL and SpecOPD's competitors, T = 0 and 1."""
    lines = ["| | T = 0 | gain | T = 1 | gain |", "|---|---|---|---|---|"]
    arms = record["arms"]
    for name in ("start", "ce", "e2e", "specopd"):
        cells = ["offline CE (the start)" if name == "start" else f"+ {TITLES[name]}"]
        for t in TEMPERATURES:
            arm = Arm.of(arms[name], t)
            over = format_gain(arm.gain_over(Arm.of(arms["start"], t))).strip()
            cells += [f"{arm.mean:.3f}", "" if name == "start" else over]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def write_text(path: Path, text: str) -> None:
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def run(config: Config) -> None:
    records = load_records(Path(config.records))
    version = check_one_version(records)
    out = Path(config.out)
    machines = dict.fromkeys(str(record["machine"]) for record in records.values())
    lines = [INTRODUCTION, f"Version {version}. Machine: {'; '.join(machines)}.", ""]
    for title, claims, section in SECTIONS:
        body = section(records, out / "pictures")
        lines += [f"## {title}{f' ({claims})' if claims else ''}", ""]
        lines += body or ["Not measured in this version.", ""]
    write_text(out / "results.md", "\n".join(lines).rstrip() + "\n")
    if config.readme and "gqa" in records:
        text = Path(config.readme).read_text(encoding="utf-8")
        before, rest = text.split(BEGIN)
        after = rest.split(END)[1]
        rows = "\n".join(readme_table(records["gqa"]))
        write_text(Path(config.readme), f"{before}{BEGIN}{rows}\n{END}{after}")
    print(f"{out}/results.md and {out}/pictures, of version {version}")
