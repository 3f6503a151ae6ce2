"""The paper's comparisons at our scale: a grid of studies that can be stopped any time.

A study is a starting drafter, trained offline, and the arms that go on from it. All arms start from
the same weights, see the same references in the same order and are measured on the same held-out
prompts; they differ by the flags at their names alone. --out keeps the counts of every prompt.

    python -m lab claims                               everything: hours on a CPU
    python -m lab claims --studies gqa-24 gqa-512      a part; --list names all
    python -m lab claims --target FOLDER --drafter FOLDER ...     four ways on from a given start
    python -m lab report                               what is finished: tables and pictures
    pytest tests/lab/test_claims.py
"""

import dataclasses
import zlib
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from drafter import Drafter
from hf.files import read_json
from support.data import References
from support.files import write_json
from support.flags import flag
from support.measure import Acceptance, central_95, format_gain, gain
from support.prepare import Trunks, prepare, start_drafter
from support.resume import stage
from train import TEMPERATURES, TrainConfig, trained

GROUP = "the studies"


@dataclass(frozen=True)
class Config(TrainConfig):
    """A run's config, which studies and arms change."""

    out: str = flag("runs/claims", "folder of all studies", group=GROUP)
    warm_steps: int = flag(2000, "offline CE steps of a start, until its AL is flat", GROUP, low=1)
    eval_every: int = flag(50, "steps between two measurements of AL (starts: 250)", GROUP, low=1)
    studies: tuple = flag((), "which ones; empty: all, or `given` with --drafter", GROUP)
    arms: tuple = flag((), "only these arms; empty: all", GROUP)
    seeds: tuple = flag((), "only these seeds; empty: all", GROUP, kind=int)
    list: bool = flag(False, "say which studies and arms there are, and what is finished", GROUP)

    def __post_init__(self):
        super().__post_init__()
        if self.mode != "story" or self.stop_after:
            raise ValueError("claims sets --mode itself and has no --stop-after")


@dataclass(frozen=True)
class Study:
    """Arms on from one start, for each seed. All values are changes of the run's config. An arm of
    `same_time_as` (study, arm) gets that arm's wall-clock time instead of the same steps."""

    arms: dict
    changes: dict = field(default_factory=dict)  # of the start and of the arms
    arm_changes: dict = field(default_factory=dict)  # of the arms alone
    seeds: tuple = (0,)  # empty: the run's own
    same_time_as: tuple = ()


def modes(names: str) -> dict:
    """Arms that differ by --mode alone."""
    return {name: {"mode": name} for name in names.split()}


ALL = modes("ce e2e rollout specopd")
OTHERS = modes("ce e2e rollout")
SPECOPD = {"mode": "specopd"}
DRAWN = SPECOPD | {"num_greedy": 0}
GREEDY = SPECOPD | {"branch_temperature": 0.0, "num_branches": 1, "num_greedy": 0}
DENSE = {"64 anchors drawn": DRAWN | {"num_anchors": 64, "num_branches": 1}}
FEW = {"num_references": 24}
SEEDS = (0, 1, 2)
AT_THE_END = {"eval_every": 10**9}  # AL is measured once

STUDIES = {
    "gqa-24": Study(ALL, arm_changes=FEW, seeds=SEEDS),
    "gqa-512": Study(ALL, seeds=SEEDS),
    # how branches are drawn, by the temperature that they are served at
    "temperature-24": Study(
        {"drawn": DRAWN, "greedy": GREEDY, "e2e_al": DRAWN | {"loss": "e2e_al"}},
        arm_changes=FEW,
        seeds=SEEDS,
    ),
    "time-24": Study(OTHERS, arm_changes=FEW, same_time_as=("gqa-24", "specopd")),
    "time-512": Study(OTHERS, same_time_as=("gqa-512", "specopd")),
    # as many blocks in a step as a rollout of the same references has
    "dense-24": Study(DENSE, arm_changes=FEW),
    "dense-512": Study(DENSE),
    "long-24": Study(modes("ce e2e specopd"), arm_changes=FEW | {"steps": 2500, "eval_every": 125}),
    "gdn-dspark-64": Study(ALL, {"arch": "gdn", "drafter_kind": "dspark"}, {"num_references": 64}),
    # one change of the default recipe at a time
    "ablations": Study(
        {
            "default": SPECOPD,
            "4 anchors": SPECOPD | {"num_anchors": 4},
            "64 anchors": SPECOPD | {"num_anchors": 64},
            "1 branch drawn": DRAWN | {"num_branches": 1},
            "2 branches drawn": DRAWN,
            "4 branches 2 greedy": SPECOPD | {"num_branches": 4, "num_greedy": 2},
            "1 branch greedy": GREEDY,
            "temperature 0.7": SPECOPD | {"branch_temperature": 0.7},
            "no merging": SPECOPD | {"merge": False},
            "exact E[AL] drawn": DRAWN | {"loss": "e2e_al"},
            "TV per position": SPECOPD | {"loss": "tv"},
            "KL": SPECOPD | {"loss": "kl"},
            "AdamW alone": SPECOPD | {"matrix_lr": 0.0},
            "Muon 0.02": SPECOPD | {"matrix_lr": 0.02},
        },
        arm_changes=AT_THE_END | {"save_every": 500},
    ),
    "block-4": Study(modes("e2e specopd"), {"block_size": 4}, AT_THE_END),
    "block-16": Study(modes("e2e specopd"), {"block_size": 16, "ce_decay": 7.0}, AT_THE_END),
    "given": Study(ALL, seeds=()),  # from --drafter
}


def start_folder(config: Config, name: str, seed: int) -> Path:
    """Where a study's start is kept; studies with the same start share it."""
    if name == "given":
        return arm_folder(config, name, seed, "start")
    changes = STUDIES[name].changes
    kind = changes.get("drafter_kind") or config.drafter_kind or "dflash"
    parts = [changes.get("arch", config.arch), kind]
    if "block_size" in changes:
        parts.append(f"block_size-{changes['block_size']}")
    return Path(config.out) / "starts" / "-".join([*parts, f"s{seed}"])


def arm_folder(config: Config, name: str, seed: int, arm: str) -> Path:
    return Path(config.out) / name / f"s{seed}" / arm.replace(" ", "-")


def arm_config(config: Config, name: str, seed: int, arm: str) -> TrainConfig:
    """The run of an arm, or of a study's "start"."""
    study = STUDIES[name]
    changes = study.changes | {"seed": seed}
    if arm == "start":
        every = max(250, config.eval_every)
        changes |= {"mode": "ce", "steps": config.warm_steps, "eval_every": every}
    else:
        drafter = config.drafter if name == "given" else str(start_folder(config, name, seed))
        changes |= {"drafter": drafter} | study.arm_changes | study.arms[arm]
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(TrainConfig)}
    return TrainConfig(**values | changes)


def steps_of_same_time(config: Config, name: str, seed: int, arm: str) -> int:
    """The steps that an arm makes in the time of the arm that its study names. Both are timed by
    their fastest finished seed, because other work on the machine only slows a run down."""
    folder = arm_folder(config, name, seed, arm)
    for record in (folder / "stage.json", folder / "run.json"):
        if record.is_file():  # an arm that was begun keeps its steps
            values = read_json(record)
            return values.get("made_with", values)["steps"]
    study, reference = STUDIES[name].same_time_as
    seconds = {}
    for timed in (arm, reference):
        required = arm_folder(config, study, seed, timed) / "stage.json"
        paths = [arm_folder(config, study, s, timed) / "stage.json" for s in STUDIES[study].seeds]
        records = [read_json(path) for path in {required, *filter(Path.is_file, paths)}]
        seconds[timed] = min(r["result"]["seconds"] / r["made_with"]["steps"] for r in records)
    return max(2, round(config.steps * seconds[reference] / seconds[arm]))


class Setting:
    """What the studies of one target share: target, tokenizer, held-out prompts, references."""

    def __init__(self, config: Config, out: Path):
        self.target, self.tokenizer, self.measure, self.references = prepare(config, out)
        self.trunks = {}  # one set at a time

    def trunks_of(self, run: TrainConfig) -> Trunks:
        """Trunks of the run's first references, tapped where its drafter reads."""
        tap_ids = start_drafter(run, self.target, self.tokenizer).config.target_layer_ids
        key = run.num_references, tap_ids
        if key not in self.trunks:
            self.trunks.clear()
            rows = {name: t[: run.num_references] for name, t in vars(self.references).items()}
            self.trunks[key] = Trunks(self.target, References(**rows), tap_ids, run.cache_gib)
        return self.trunks[key]

    def train(self, run: TrainConfig, folder: Path) -> None:
        """Train and measure one arm, or find it finished."""
        world = self.target, self.tokenizer, self.measure
        totals = trained(run, folder, *world, lambda: self.trunks_of(run))
        best_step = totals.get("best", {}).get("step", run.steps)
        best = folder if best_step == run.steps else folder / "best"
        self.measure_once(folder, {"last": folder, "best": best})

    def measure_once(self, folder: Path, drafters: dict[str, Path]) -> None:
        """Write the AL of drafters, on all held-out prompts, to al.json, unless it is there."""
        m = self.measure
        prompts = zlib.crc32(repr((m.prompts, m.max_new_tokens, m.stop_ids, m.seed)).encode())
        path = folder / "al.json"
        if path.is_file():
            if read_json(path).get("prompts", prompts) != prompts:
                raise ValueError(f"{path} was measured on other prompts: remove it")
            return
        counts = {drafter: self.count(drafter) for drafter in set(drafters.values())}
        write_json(path, {n: counts[d] for n, d in drafters.items()} | {"prompts": prompts})

    def count(self, folder: Path) -> dict:
        """A drafter's counts by temperature."""
        drafter = Drafter.from_pretrained(folder, self.target, torch.float32)
        counts = {}
        for t in TEMPERATURES:
            results = self.measure(self.target, drafter, t, progress=f"AL at {t:g}")
            counts[f"t{t:g}"] = to_counts(results)
        return counts


def chosen_arms(config: Config, name: str) -> list[str]:
    return [arm for arm in STUDIES[name].arms if not config.arms or arm in config.arms]


def run_study(config: Config, settings: dict, name: str) -> None:
    study = STUDIES[name]
    arch = study.changes.get("arch", config.arch)
    if arch not in settings:
        settings.clear()  # one target at a time
        folder = Path(config.out) / "targets" / arch
        settings[arch] = Setting(replace(config, arch=arch), folder)
    setting = settings[arch]
    for seed in study.seeds or (config.seed,):
        if config.seeds and seed not in config.seeds:
            continue
        start = start_folder(config, name, seed)
        if name == "given":
            drafter = Path(config.drafter)
            stage(start, {"drafter": str(drafter.resolve())}, lambda: {})
            setting.measure_once(start, {"last": drafter, "best": drafter})
        else:
            setting.train(arm_config(config, name, seed, "start"), start)
        for arm in chosen_arms(config, name):
            print(f"-- {name}, seed {seed}: {arm}")
            run = arm_config(config, name, seed, arm)
            if study.same_time_as:
                run = replace(run, steps=steps_of_same_time(config, name, seed, arm))
            setting.train(run, arm_folder(config, name, seed, arm))


def to_counts(results: Acceptance) -> dict:
    """A measurement as JSON keeps it: counts per prompt, without texts."""
    tensors = {name: x.tolist() for name, x in vars(results).items() if torch.is_tensor(x)}
    return tensors | {"seconds": results.seconds}


def from_counts(counts: dict) -> Acceptance:
    tensors = {name: torch.tensor(x) for name, x in counts.items() if name != "seconds"}
    return Acceptance(**tensors, seconds=counts["seconds"])


@dataclass
class Arm:
    """An arm's measurements of one drafter at one temperature, by seed."""

    seeds: dict[int, Acceptance]

    @property
    def mean(self) -> float:
        return sum(results.mean for results in self.seeds.values()) / len(self.seeds)

    @property
    def survival(self) -> list[float]:
        return torch.tensor([results.survival for results in self.seeds.values()]).mean(0).tolist()

    def resampled(self) -> torch.Tensor:
        """ALs of many draws of prompts, and of seeds where there are several; the same draws for
        every arm with as many of them."""
        als = torch.stack([self.seeds[seed].resampled() for seed in sorted(self.seeds)])  # (S, n)
        generator = torch.Generator().manual_seed(1)
        draws = torch.randint(len(als), als.shape, generator=generator)
        return als.gather(0, draws).mean(0)

    def interval(self, other: "Arm") -> tuple[float, float]:
        return central_95(self.resampled() - other.resampled())

    def gain_over(self, other: "Arm") -> dict:
        """The gain over another arm, on the seeds that both have."""
        seeds = self.seeds.keys() & other.seeds.keys()
        pair = (Arm({seed: arm.seeds[seed] for seed in seeds}) for arm in (self, other))
        return gain(*pair) | {"seeds": len(seeds)}


def finished_arms(config: Config, name: str) -> dict:
    """{arm: {seed: folder}} of a study, for what is trained and measured."""
    seeds = sorted(int(path.name[1:]) for path in Path(config.out, name).glob("s*"))
    finished = {}
    for arm in STUDIES[name].arms:
        folders = {seed: arm_folder(config, name, seed, arm) for seed in seeds}
        finished[arm] = {s: path for s, path in folders.items() if (path / "al.json").is_file()}
    return {arm: folders for arm, folders in finished.items() if folders}


def read_study(config: Config, name: str) -> dict:
    """{arm: {"last" or "best": {temperature: Arm}}} of the finished arms of a study and of its
    start; the start has one drafter, which stands for both."""
    arms = finished_arms(config, name)
    starts = {}
    for seed, folder in (pair for folders in arms.values() for pair in folders.items()):
        drafter = Path(read_json(folder / "stage.json")["made_with"]["drafter"])
        shared = Path(config.out) / "starts" / drafter.name
        starts[seed] = folder.parent / "start" if name == "given" else shared
    study, prompts = {}, set()
    for arm, folders in ({"start": starts} | arms if arms else {}).items():
        counts = {seed: read_json(path / "al.json") for seed, path in sorted(folders.items())}
        prompts |= {c["prompts"] for c in counts.values() if "prompts" in c}
        study[arm] = {"last": {}, "best": {}}
        for moment, by_temperature in study[arm].items():
            key = "last" if arm == "start" else moment
            for t in (f"t{t:g}" for t in TEMPERATURES):
                by_temperature[t] = Arm({s: from_counts(c[key][t]) for s, c in counts.items()})
    if len(prompts) > 1:
        raise ValueError(f"{config.out}/{name}: arms were measured on different prompts")
    return study


def table(name: str, study: dict) -> tuple[list[str], dict]:
    """Lines of Markdown, and figures: AL of the last drafter, and of the best by its AL on a
    quarter of the prompts. In brackets the 95 % interval of the difference in AL."""
    titles = "seeds | T = 0 | over start [AL] | T = 1 | over start [AL] | best: T = 0 | T = 1 |"
    lines = [f"| {name} | {titles}", "|---" * 8 + "|"]
    figures = {}
    for arm, moments in study.items():
        row = figures[arm] = {}
        cells = [arm, str(len(moments["last"]["t0"].seeds))]
        for t, results in moments["last"].items():
            row[t] = {"al": results.mean, "survival": results.survival}
            over_start = ""
            if arm != "start":
                row[t]["over"] = {
                    other: results.gain_over(of["last"][t])
                    for other, of in study.items()
                    if other != arm and results.seeds.keys() & of["last"][t].seeds.keys()
                }
                over_start = format_gain(row[t]["over"]["start"])
            cells += [f"{results.mean:.3f}", over_start]
        for t, results in moments["best"].items():
            row[t] |= {"best_al": results.mean, "best_survival": results.survival}
            cells.append(f"{results.mean:.3f}")
        lines.append(f"| {' | '.join(cells)} |")
    return lines, figures


def chosen_studies(config: Config) -> list[str]:
    """The names of the studies to run; what cannot be run is an error before anything runs."""
    usual = [name for name in STUDIES if name != "given"]
    names = list(config.studies) or (["given"] if config.drafter else usual)
    check_choice("studies", names, STUDIES)
    if "given" in names and not config.drafter:
        raise ValueError("--studies given goes with --drafter FOLDER")
    check_choice("arms", config.arms, [arm for name in names for arm in STUDIES[name].arms])
    seeds = [seed for name in names for seed in STUDIES[name].seeds or (config.seed,)]
    check_choice("seeds", config.seeds, seeds)
    for name in names:
        for arm in chosen_arms(config, name):
            arm_config(config, name, 0, arm)  # a config checks itself
    return names


def check_choice(flag_name: str, values, known) -> None:
    """Raise a ValueError that names the first value which is not known."""
    for value in values:
        if value not in known:
            listed = ", ".join(map(str, dict.fromkeys(known)))
            raise ValueError(f"--{flag_name} {value}: there is {listed}")


def run(config: Config) -> dict | None:
    names = chosen_studies(config)
    if config.list:
        for name in names:
            finished = finished_arms(config, name)
            arms = [f"{arm} ({len(finished.get(arm, {}))})" for arm in STUDIES[name].arms]
            seeds = ", ".join(map(str, STUDIES[name].seeds or (config.seed,)))
            print(f"{name}: seeds {seeds}; arms (seeds finished): {', '.join(arms)}")
        return None
    settings, figures = {}, {}
    for name in names:
        run_study(config, settings, name)
    for name in names:
        lines, figures[name] = table(name, read_study(config, name))
        print("\n".join(["", *lines]))
    return figures
