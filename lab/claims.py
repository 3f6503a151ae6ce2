"""The paper's comparisons at our scale: a grid of studies that can be stopped any time.

A study is a starting drafter, trained offline, and the arms that go on from it. All arms start from
the same weights, see the same references in the same order and are measured on the same held-out
prompts; they differ only by the flags in STUDIES. --out keeps the counts of every prompt.

    python -m lab claims                               everything: hours on a CPU
    python -m lab claims --studies gqa-24 gqa-512      a part; --list-only names all
    python -m lab claims --target FOLDER --drafter FOLDER ...     four ways on from a given start
    pytest tests/lab/test_claims.py
"""

import dataclasses
import zlib
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from drafter import Drafter
from hf.files import read_json
from support.files import locked, write_json
from support.fingerprint import weights_fingerprint
from support.flags import flag
from support.measure import TEMPERATURES, Acceptance, TaskMean, format_gain, gain
from support.prepare import Trunks, prepare, start_drafter
from support.references import References
from support.resume import stage
from train import TrainConfig, train_or_load

GROUP = "the studies"


@dataclass(frozen=True)
class Config(TrainConfig):
    out: str = flag("runs/claims", "folder of all studies", group=GROUP)
    warm_steps: int = flag(2000, "offline CE steps of a start, until its AL is flat", GROUP, low=1)
    eval_every: int = flag(50, "steps between two measurements of AL (starts: 250)", GROUP, low=1)
    studies: tuple = flag((), "which ones; empty: all, or `given` with --drafter", GROUP)
    arms: tuple = flag((), "only these arms; empty: all", GROUP)
    seeds: tuple = flag((), "only these seeds; empty: all", GROUP, kind=int)
    list_only: bool = flag(False, "list the studies, their arms and what is finished", GROUP)

    def __post_init__(self):
        super().__post_init__()
        if self.mode != "story" or self.stop_after:
            raise ValueError("claims sets --mode itself and has no --stop-after")


@dataclass(frozen=True)
class Study:
    """Arms that go on from one start, for each seed. Values are changes of the run's config. If
    `same_time_as` names (study, arm), each arm gets as many steps as fit into that arm's time."""

    arms: dict
    changes: dict = field(default_factory=dict)  # of the start and of the arms
    arm_changes: dict = field(default_factory=dict)  # of the arms alone
    seeds: tuple = (0,)  # empty: the run's own
    same_time_as: tuple = ()


def modes(names: str) -> dict:
    return {name: {"mode": name} for name in names.split()}


MODES = modes("ce e2e rollout specopd")
NOT_SPECOPD = modes("ce e2e rollout")
SPECOPD = {"mode": "specopd"}
DRAWN = SPECOPD | {"num_greedy": 0}
GREEDY = SPECOPD | {"branch_temperature": 0.0, "num_branches": 1, "num_greedy": 0}
E2E_AL = DRAWN | {"loss": "e2e_al"}
DENSE = {"64 anchors drawn": DRAWN | {"num_anchors": 64, "num_branches": 1}}
FEW = {"num_references": 24}
SEEDS = (0, 1, 2)
AT_THE_END = {"eval_every": 10**9}  # AL is measured once
# ways to draw branches, compared at each temperature of serving
DRAWINGS = {"drawn": DRAWN, "greedy": GREEDY, "e2e_al": E2E_AL}
# one change of the default recipe at a time
ABLATIONS = {
    "default": SPECOPD,
    "4 anchors": SPECOPD | {"num_anchors": 4},
    "64 anchors": SPECOPD | {"num_anchors": 64},
    "1 branch drawn": DRAWN | {"num_branches": 1},
    "2 branches drawn": DRAWN,
    "4 branches 2 greedy": SPECOPD | {"num_branches": 4, "num_greedy": 2},
    "1 branch greedy": GREEDY,
    "temperature 0.7": SPECOPD | {"branch_temperature": 0.7},
    "no merging": SPECOPD | {"merge": False},
    "exact E[AL] drawn": E2E_AL,
    "TV per position": SPECOPD | {"loss": "tv"},
    "KL": SPECOPD | {"loss": "kl"},
    "AdamW alone": SPECOPD | {"matrix_lr": 0.0},
    "Muon 0.02": SPECOPD | {"matrix_lr": 0.02},
}

STUDIES = {
    "gqa-24": Study(MODES, arm_changes=FEW, seeds=SEEDS),
    "gqa-512": Study(MODES, seeds=SEEDS),
    "temperature-24": Study(DRAWINGS, arm_changes=FEW, seeds=SEEDS),
    "time-24": Study(NOT_SPECOPD, arm_changes=FEW, same_time_as=("gqa-24", "specopd")),
    "time-512": Study(NOT_SPECOPD, same_time_as=("gqa-512", "specopd")),
    # as many blocks in a step as a rollout of the same references has
    "dense-24": Study(DENSE, arm_changes=FEW),
    "dense-512": Study(DENSE),
    "long-24": Study(modes("ce e2e specopd"), arm_changes=FEW | {"steps": 2500, "eval_every": 125}),
    "gdn-dspark-64": Study(
        MODES, {"arch": "gdn", "drafter_kind": "dspark"}, {"num_references": 64}
    ),
    "ablations": Study(ABLATIONS, arm_changes=AT_THE_END | {"save_every": 500}),
    "block-4": Study(modes("e2e specopd"), {"block_size": 4}, AT_THE_END),
    "block-16": Study(modes("e2e specopd"), {"block_size": 16, "ce_decay": 7.0}, AT_THE_END),
    "given": Study(MODES, seeds=()),  # from --drafter
}


def start_folder(config: Config, name: str, seed: int) -> Path:
    """Where a study's start is kept; studies with the same start share it."""
    if name == "given":
        return arm_folder(config, name, seed, "start")
    changes = STUDIES[name].changes
    arch = changes.get("arch", config.arch)
    kind = changes.get("drafter_kind") or config.drafter_kind or "dflash"
    size = f"-block_size-{changes['block_size']}" if "block_size" in changes else ""
    return Path(config.out) / "starts" / f"{arch}-{kind}{size}-s{seed}"


def arm_folder(config: Config, name: str, seed: int, arm: str) -> Path:
    return Path(config.out, name, f"s{seed}", arm.replace(" ", "-"))


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
    """How many steps an arm makes in the time that `same_time_as`'s arm took. Both are timed by
    their fastest finished seed, because other work on the machine only slows a run down."""
    folder = arm_folder(config, name, seed, arm)
    for record in (folder / "stage.json", folder / "run.json"):
        if record.is_file():  # an arm that was begun keeps its steps
            values = read_json(record)
            return values.get("made_with", values)["steps"]
    study, reference = STUDIES[name].same_time_as
    seconds = {}
    for timed in (arm, reference):
        records = [read_json(x) for x in Path(config.out, study).glob(f"s*/{timed}/stage.json")]
        if not records:
            raise ValueError(f"{name} needs the time of {timed} in {study}: run --studies {study}")
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
        trunks = self.trunks_of(run)
        totals = train_or_load(run, folder, trunks, self.tokenizer, self.measure)
        best_step = totals.get("best", {}).get("step", run.steps)
        best = folder if best_step == run.steps else folder / "best"
        self.measure_once(folder, folder, best)

    def measure_once(self, folder: Path, last: Path, best: Path) -> None:
        """Write what two drafters accept on all held-out prompts to al.json, once."""
        m = self.measure
        prompts = zlib.crc32(repr((m.prompts, m.max_new_tokens, m.stop_ids, m.seed)).encode())
        path = folder / "al.json"
        if path.is_file():
            if read_json(path).get("prompts", prompts) != prompts:
                raise ValueError(f"{path} was measured on other prompts: remove it")
            return
        counts = {"prompts": prompts, "last": self.count(last)}
        counts["best"] = counts["last"] if best == last else self.count(best)
        write_json(path, counts)

    def count(self, folder: Path) -> dict:
        pair = (self.target, Drafter.from_pretrained(folder, self.target, torch.float32))
        results = {t: self.measure(*pair, t, progress=f"AL at {t:g}") for t in TEMPERATURES}
        return {f"t{t:g}": to_counts(counted) for t, counted in results.items()}


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
            weights = weights_fingerprint(Drafter.from_pretrained(drafter, setting.target))
            stage(start, {"drafter": str(drafter.resolve()), "its weights": weights}, lambda: {})
            setting.measure_once(start, drafter, drafter)
        else:
            setting.train(arm_config(config, name, seed, "start"), start)
        for arm in chosen_arms(config, name):
            print(f"-- {name}, seed {seed}: {arm}")
            run = arm_config(config, name, seed, arm)
            if study.same_time_as:
                run = replace(run, steps=steps_of_same_time(config, name, seed, arm))
            setting.train(run, arm_folder(config, name, seed, arm))


def to_counts(results: Acceptance) -> dict:
    """A measurement without its texts, for JSON."""
    tensors = {name: x.tolist() for name, x in vars(results).items() if torch.is_tensor(x)}
    return tensors | {"seconds": results.seconds}


def from_counts(counts: dict) -> Acceptance:
    tensors = {name: torch.tensor(x) for name, x in counts.items() if name != "seconds"}
    return Acceptance(**tensors, seconds=counts["seconds"])


class Arm(TaskMean):
    """An arm's measurements of one drafter at one temperature: its tasks are {seed: Acceptance}."""

    @property
    def survival(self) -> list[float]:
        return torch.tensor([results.survival for results in self.tasks.values()]).mean(0).tolist()

    def resampled(self) -> torch.Tensor:
        """ALs (n,) of many draws of prompts and seeds. Arms with equally many seeds share draws."""
        als = torch.stack([self.tasks[seed].resampled() for seed in sorted(self.tasks)])  # (S, n)
        generator = torch.Generator().manual_seed(1)
        draws = torch.randint(len(als), als.shape, generator=generator)
        return als.gather(0, draws).mean(0)

    def gain_over(self, other: "Arm") -> dict:
        """The gain over another arm, on the seeds that both have."""
        seeds = self.tasks.keys() & other.tasks.keys()
        pair = (Arm({seed: arm.tasks[seed] for seed in seeds}) for arm in (self, other))
        return gain(*pair) | {"seeds": len(seeds)}


def finished_arms(config: Config, name: str) -> dict:
    """{arm: {seed: folder}} of a study, for what is trained and measured."""
    finished = {}
    for arm in STUDIES[name].arms:
        paths = Path(config.out, name).glob(f"s*/{arm.replace(' ', '-')}/al.json")
        finished[arm] = {int(path.parts[-3][1:]): path.parent for path in paths}
    return {arm: dict(sorted(folders.items())) for arm, folders in finished.items() if folders}


def read_study(config: Config, name: str) -> dict:
    """{arm: {"last" or "best": {temperature: Arm}}} of the finished arms and of their start."""
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
            key = "last" if arm == "start" else moment  # all arms go on from the last
            for t in (f"t{t:g}" for t in TEMPERATURES):
                by_temperature[t] = Arm({s: from_counts(c[key][t]) for s, c in counts.items()})
    if len(prompts) > 1:
        raise ValueError(f"{config.out}/{name}: arms were measured on different prompts")
    return study


def table(name: str, study: dict) -> tuple[list[str], dict]:
    """A table in Markdown, and its figures: AL of the last drafters and of the best ones."""
    titles = "seeds | T = 0 | over start [AL] | T = 1 | over start [AL] | best: T = 0 | T = 1 |"
    lines = [f"| {name} | {titles}", "|---" * 8 + "|"]
    figures = {}
    for arm, moments in study.items():
        figures[arm] = {}
        cells = [arm, str(len(moments["last"]["t0"].tasks))]
        for t, last in moments["last"].items():
            best = moments["best"][t]
            row = {"al": last.mean, "survival": last.survival}
            row |= {"best_al": best.mean, "best_survival": best.survival}
            cells += [f"{last.mean:.3f}", ""]
            if arm != "start":
                arms = {n: of["last"][t] for n, of in study.items() if n != arm}
                paired = {n: x for n, x in arms.items() if last.tasks.keys() & x.tasks.keys()}
                row["over"] = {n: last.gain_over(x) for n, x in paired.items()}
                cells[-1] = format_gain(row["over"]["start"])
            figures[arm][t] = row
        cells += [f"{best.mean:.3f}" for best in moments["best"].values()]
        lines.append(f"| {' | '.join(cells)} |")
    return lines, figures


def chosen_studies(config: Config) -> list[str]:
    """The names of the studies to run; what cannot be run is an error."""
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
    for value in values:
        if value not in known:
            listed = ", ".join(map(str, dict.fromkeys(known)))
            raise ValueError(f"--{flag_name} {value}: there is {listed}")


def run(config: Config) -> dict | None:
    names = chosen_studies(config)
    if config.list_only:
        for name in names:
            finished = finished_arms(config, name)
            arms = [f"{arm} ({len(finished.get(arm, {}))})" for arm in STUDIES[name].arms]
            seeds = STUDIES[name].seeds or (config.seed,)
            print(f"{name}: seeds {seeds}; arms (seeds finished): {', '.join(arms)}")
        return None
    settings, figures = {}, {}
    with locked(config.out):
        for name in names:
            run_study(config, settings, name)
    for name in names:
        lines, figures[name] = table(name, read_study(config, name))
        print("\n".join(["", *lines]))
    return figures
