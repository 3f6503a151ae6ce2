"""The paper's comparisons at our scale: studies over several seeds, which can be stopped any time.

For every seed a toy target is trained, writes references, and a drafter is trained offline: the
start. The arms of a study go on from it. They see the same references in the same order and are
measured on the same held-out prompts; they differ only by the flags in STUDIES. An arm named
"..., same time" makes as many steps as fit into SpecOPD's seconds.

--out keeps everything. A record of each study, with the version of the code, the machine and the
counts of every prompt, goes to --records; `python -m lab report` reads nothing else. A record keeps
what it has of other seeds, if they are of the same version.

    python -m lab claims                               everything: hours on a CPU
    python -m lab claims --studies gqa --seeds 20      a part; --list-only names all
    python -m lab claims --target FOLDER --drafter FOLDER ...     ways on from a given start
    pytest tests/lab/test_claims.py
"""

import dataclasses
import json
import zlib
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from drafter import Drafter
from hf.files import read_json
from lab.common import machine, version
from support.files import locked, write_json
from support.fingerprint import weights_fingerprint
from support.flags import flag
from support.measure import TEMPERATURES, Acceptance, TaskMean, format_gain, gain
from support.prepare import Trunks, prepare, start_drafter
from support.references import References
from support.resume import stage
from train import TrainConfig, train_or_load

GROUP = "the studies"
# Recipes were chosen on the first; what is shown is of the others, which nobody had seen before.
SEARCH_SEEDS = (10, 11)
PROOF_SEEDS = (20, 21, 22)
SAME_TIME = ", same time"
WHERE_AND_WHAT = ("out", "records", "studies", "arms", "seeds", "list_only")  # flags of a call
WINDOW = 25  # steps that a record's losses are averaged over


@dataclass(frozen=True)
class Config(TrainConfig):
    out: str = flag("runs/claims", "folder of all studies", group=GROUP)
    records: str = flag("docs/records", "folder of the records", group=GROUP)
    eval_every: int = flag(50, "steps between two measurements of AL (starts: 250)", GROUP, low=1)
    studies: tuple = flag((), "which ones; empty: all, or `given` with --drafter", GROUP)
    arms: tuple = flag((), "only these arms; empty: all", GROUP)
    seeds: tuple = flag((), "other seeds than the studies'", GROUP, kind=int, low=0)
    list_only: bool = flag(False, "list the studies, their arms and what is finished", GROUP)

    def __post_init__(self):
        super().__post_init__()
        if self.mode != "story" or self.stop_after:
            raise ValueError("claims sets --mode itself and has no --stop-after")


@dataclass(frozen=True)
class Study:
    """Arms that go on from one start, for each seed. Values are changes of the run's config."""

    arms: dict
    same_time: tuple = ()  # arms that are trained once more, for as long as the arm specopd
    changes: dict = field(default_factory=dict)  # of target, start and arms
    arm_changes: dict = field(default_factory=dict)  # of the arms alone
    seeds: tuple = PROOF_SEEDS  # empty: the run's own

    def all_arms(self) -> dict:
        return self.arms | {name + SAME_TIME: self.arms[name] for name in self.same_time}


def modes(names: str) -> dict:
    return {name: {"mode": name} for name in names.split()}


MODES = modes("ce e2e rollout specopd")
# the rates that were best on a search seed; those of the other ways are the defaults
CE_OWN_RATE = {"ce, own rate": {"mode": "ce", "matrix_lr": 0.03, "lr": 3e-3}}
NO_ROLLOUTS = modes("ce e2e specopd")
OTHERS = ("ce", "e2e", "rollout")  # than SpecOPD, which they are given the time of
ARCHS = ("gqa", "gdn", "qsa")
SPECOPD = {"mode": "specopd"}
ONE_SEED = PROOF_SEEDS[:1]
TWO_SEEDS = PROOF_SEEDS[:2]
AT_THE_END = {"eval_every": 10**9}  # AL is measured once
FEW = {"num_references": 24}
LONG = FEW | {"steps": 2500, "eval_every": 125}
# the same small search over rates for each way; 0.01 and 1e-3 are the defaults
RATES = {
    f"{mode}, {matrix_lr:g}": {"mode": mode, "matrix_lr": matrix_lr, "lr": matrix_lr / 10}
    for mode in ("ce", "e2e", "specopd")
    for matrix_lr in (0.003, 0.01, 0.03)
}
# one change of the default recipe at a time
ABLATIONS = {
    "default": SPECOPD,
    "no text branch": SPECOPD | {"text_branch": False},
    "no greedy branch": SPECOPD | {"num_branches": 1, "num_greedy": 0},
    "drawn alone": SPECOPD | {"num_branches": 1, "num_greedy": 0, "text_branch": False},
    "greedy alone": SPECOPD
    | {"branch_temperature": 0.0, "num_branches": 1, "num_greedy": 0, "text_branch": False},
    "4 branches": SPECOPD | {"num_branches": 4},
    "16 anchors": SPECOPD | {"num_anchors": 16},
    "E2E-TV, 16 anchors": {"mode": "e2e", "num_anchors": 16},
    "exact E[AL]": SPECOPD
    | {"loss": "e2e_al", "num_branches": 2, "num_greedy": 0, "text_branch": False},
    "TV per position": SPECOPD | {"loss": "tv"},
    "KL": SPECOPD | {"loss": "kl"},
    "no merging": SPECOPD | {"merge": False},
}

STUDIES = {
    **{arch: Study(MODES | CE_OWN_RATE, OTHERS, {"arch": arch}) for arch in ARCHS},
    **{
        f"{arch}-{kind}": Study(
            NO_ROLLOUTS,
            changes={"arch": arch, "drafter_kind": kind},
            arm_changes=AT_THE_END,
            seeds=TWO_SEEDS,
        )
        for arch in ARCHS
        for kind in ("dspark", "dflash2")
    },
    "rates": Study(RATES, arm_changes=AT_THE_END, seeds=SEARCH_SEEDS[:1]),
    "few": Study(MODES, arm_changes=FEW),
    "long": Study(NO_ROLLOUTS, arm_changes=LONG, seeds=ONE_SEED),
    "ablations": Study(ABLATIONS, arm_changes=AT_THE_END, seeds=TWO_SEEDS),
    "block-4": Study(modes("e2e specopd"), (), {"block_size": 4}, AT_THE_END, ONE_SEED),
    "block-16": Study(modes("e2e specopd"), (), {"block_size": 16}, AT_THE_END, ONE_SEED),
    "given": Study(MODES, OTHERS, seeds=()),  # from --drafter
}


# ---------------------------------------------------------------------------------- what is run


def seeds_of(config: Config, name: str) -> tuple:
    return config.seeds or STUDIES[name].seeds or (config.seed,)


def setting_folder(config: Config, name: str, seed: int) -> Path:
    """Where a seed's target and references are kept; studies of one target share them."""
    arch = STUDIES[name].changes.get("arch", config.arch)
    return Path(config.out) / f"{'given' if config.target else arch}-s{seed}"


def start_folder(config: Config, name: str, seed: int) -> Path:
    """Where a study's start is kept; studies with the same start share it."""
    changes = STUDIES[name].changes
    kind = changes.get("drafter_kind") or config.drafter_kind or "dflash"
    size = f"-{changes['block_size']}" if "block_size" in changes else ""
    folder = "start-given" if name == "given" else f"start-{kind}{size}"
    return setting_folder(config, name, seed) / folder


def arm_folder(config: Config, name: str, seed: int, arm: str) -> Path:
    return Path(config.out, name, f"s{seed}", arm.replace(",", "").replace(" ", "-"))


def arm_config(config: Config, name: str, seed: int, arm: str) -> TrainConfig:
    """The run of an arm, or of a study's "start"."""
    study = STUDIES[name]
    changes = study.changes | {"seed": seed}
    if arm == "start":
        every = max(250, config.eval_every)
        changes |= {"mode": "ce", "steps": config.warm_steps, "eval_every": every}
        changes |= {"num_anchors": config.warm_anchors}
    else:
        drafter = config.drafter if name == "given" else str(start_folder(config, name, seed))
        changes |= {"drafter": drafter} | study.arm_changes | study.all_arms()[arm]
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(TrainConfig)}
    return TrainConfig(**values | changes)


def steps_of_same_time(config: Config, name: str, seed: int, arm: str) -> int:
    """How many steps of an arm take as long as all of specopd's. Both are timed by their fastest
    finished seed, because other work on the machine only slows a run down."""
    folder = arm_folder(config, name, seed, arm)
    for path in (folder / "stage.json", folder / "run.json"):
        if path.is_file():  # an arm that was begun keeps its steps
            values = read_json(path)
            return values.get("made_with", values)["steps"]
    seconds = {}
    for timed in (arm.removesuffix(SAME_TIME), "specopd"):
        records = [read_json(x) for x in Path(config.out, name).glob(f"s*/{timed}/stage.json")]
        if not records:
            raise ValueError(f"{name}, {arm}: needs the time of the arms {timed} and specopd")
        seconds[timed] = min(r["result"]["seconds"] / r["made_with"]["steps"] for r in records)
    steps = STUDIES[name].arm_changes.get("steps", config.steps)
    return max(2, round(steps * seconds["specopd"] / seconds[arm.removesuffix(SAME_TIME)]))


class Setting:
    """What the studies of one target share: target, tokenizer, held-out prompts, references."""

    def __init__(self, config: TrainConfig, out: Path):
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
        train_or_load(run, folder, self.trunks_of(run), self.tokenizer, self.measure)
        self.measure_once(folder, folder)

    def measure_once(self, folder: Path, drafter_folder: Path) -> None:
        """Write what a drafter accepts on all held-out prompts to al.json, once."""
        m = self.measure
        prompts = zlib.crc32(repr((m.prompts, m.max_new_tokens, m.stop_ids, m.seed)).encode())
        path = folder / "al.json"
        if path.is_file():
            if read_json(path)["prompts"] != prompts:
                raise ValueError(f"{path} was measured on other prompts: remove it")
            return
        drafter = Drafter.from_pretrained(drafter_folder, self.target, torch.float32)
        counts = {"prompts": prompts}
        for t in TEMPERATURES:
            counted = m(self.target, drafter, t, progress=f"AL at {t:g}")
            counts[f"t{t:g}"] = to_counts(counted)
        write_json(path, counts)


def chosen_arms(config: Config, name: str) -> list[str]:
    """In the order in which they are run: those of the same time need the others' seconds."""
    return [arm for arm in STUDIES[name].all_arms() if not config.arms or arm in config.arms]


def run_study(config: Config, settings: dict, name: str, seed: int) -> None:
    """Run what is missing of a study's arms for one seed."""
    study = STUDIES[name]
    folder = setting_folder(config, name, seed)
    if folder not in settings:
        settings.clear()  # one target at a time
        changes = {key: value for key, value in study.changes.items() if key == "arch"}
        settings[folder] = Setting(replace(config, seed=seed, **changes), folder)
    setting = settings[folder]
    start = start_folder(config, name, seed)
    if name == "given":
        drafter = Path(config.drafter)
        weights = weights_fingerprint(Drafter.from_pretrained(drafter, setting.target))
        stage(start, {"drafter": str(drafter.resolve()), "its weights": weights}, lambda: {})
        setting.measure_once(start, drafter)
    else:
        setting.train(arm_config(config, name, seed, "start"), start)
    for arm in chosen_arms(config, name):
        print(f"-- {name}, seed {seed}: {arm}")
        run = arm_config(config, name, seed, arm)
        if arm.endswith(SAME_TIME):
            steps = steps_of_same_time(config, name, seed, arm)
            run = replace(run, steps=steps, eval_every=steps)
        setting.train(run, arm_folder(config, name, seed, arm))


# ------------------------------------------------------------------------------------- records


def to_counts(results: Acceptance) -> dict:
    """A measurement for JSON: what each prompt committed and in how many rounds, and sums."""
    names = ("committed", "rounds", "fresh")
    counts = {name: getattr(results, name).tolist() for name in names}
    counts["survived"] = results.survived.sum(0).tolist()
    return counts | {"repeated": results.repeated.mean().item(), "seconds": results.seconds}


def from_counts(counts: dict) -> Acceptance:
    """The measurement again; survivals and repetition are of all prompts together."""
    tensors = {n: torch.tensor(counts[n]) for n in ("committed", "rounds", "fresh")}
    sums = {"survived": torch.tensor([counts["survived"]])}
    sums["repeated"] = torch.tensor([counts["repeated"]])
    return Acceptance(**tensors, **sums, nodes=tensors["rounds"], seconds=counts["seconds"])


def curve(folder: Path) -> dict[str, list]:
    """Of a run's log: its losses, averaged over windows, and AL, by step and by seconds."""
    path = folder / "log.jsonl"
    log = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    seconds = torch.tensor([record["seconds"] for record in log]).cumsum(0).tolist()
    losses, als = [], []
    for start in range(0, len(log), WINDOW):
        part = log[start : start + WINDOW]
        losses.append([part[-1]["step"], sum(record["loss"] for record in part) / len(part)])
    for record, passed in zip(log, seconds):
        if "al_t0" in record:
            als.append([record["step"], passed, record["al_t0"], record["al_t1"]])
    return {"loss": losses, "al": als}


def record_path(config: Config, name: str) -> Path:
    return Path(config.records) / f"{name}.json"


def finished_seeds(config: Config, name: str, arm: str) -> list[int]:
    paths = (arm_folder(config, name, seed, arm) for seed in seeds_of(config, name))
    return [s for s, path in zip(seeds_of(config, name), paths) if (path / "al.json").is_file()]


def seed_record(folder: Path) -> dict:
    """What is known of one arm and seed."""
    counts = read_json(folder / "al.json")
    stage_path = folder / "stage.json"
    result = read_json(stage_path)["result"] if stage_path.is_file() else {}
    sizes = {name: result[name] for name in ("step", "seconds", "supervised") if name in result}
    return sizes | {"prompts": counts.pop("prompts"), "al": counts, "curve": curve(folder)}


def record_of(config: Config, name: str) -> dict:
    """The record of a study: of its finished arms and their start."""
    arms = {"start": {}}
    for arm in STUDIES[name].all_arms():
        for seed in finished_seeds(config, name, arm):
            arms.setdefault(arm, {})[seed] = seed_record(arm_folder(config, name, seed, arm))
            start = seed_record(start_folder(config, name, seed))
            arms["start"][seed] = start
            if start["prompts"] != arms[arm][seed]["prompts"]:
                raise ValueError(f"{config.out}/{name}: arms were measured on different prompts")
    made_by = {"version": version(), "machine": machine()}
    return {"study": name} | made_by | {"config": dataclasses.asdict(config), "arms": arms}


def with_older(record: dict, older: dict) -> dict:
    """A record with the arms and seeds that an older one of the same version and recipe has beside
    its own: they may have been run in another folder, or on another machine."""
    no_difference = dict.fromkeys(WHERE_AND_WHAT)
    config = json.loads(json.dumps(record["config"]))  # with lists, as the older one
    if older["version"] != record["version"] or older["config"] | no_difference != (
        config | no_difference
    ):
        return record
    arms = {}
    for name in ("start", *STUDIES[record["study"]].all_arms()):
        by_seed = {int(seed): row for seed, row in older["arms"].get(name, {}).items()}
        by_seed |= record["arms"].get(name, {})
        if by_seed:
            arms[name] = {seed: by_seed[seed] for seed in sorted(by_seed)}
    return record | {"arms": arms}


def write_record(config: Config, name: str) -> None:
    path = record_path(config, name)
    record = record_of(config, name)
    write_json(path, with_older(record, read_json(path)) if path.is_file() else record, indent=None)


class Arm(TaskMean):
    """An arm's measurements of one drafter at one temperature: its tasks are {seed: Acceptance}."""

    @classmethod
    def of(cls, by_seed: dict, temperature: float) -> "Arm":
        """From a record's {seed: ...}."""
        key = f"t{temperature:g}"
        return cls({int(seed): from_counts(row["al"][key]) for seed, row in by_seed.items()})

    @property
    def fresh_mean(self) -> float | None:
        """The AL where texts do not repeat themselves."""
        means = [results.fresh_mean for results in self.tasks.values()]
        return None if None in means else sum(means) / len(means)

    @property
    def survival(self) -> list[float]:
        shares = [r.survived.sum(0) / r.rounds.sum() for r in self.tasks.values()]
        return torch.stack(shares).mean(0).tolist()

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


def table(record: dict) -> list[str]:
    """A study's table in Markdown: AL, and the gains over the start and over E2E-TV."""
    arms = record["arms"]
    cells = "AL | over start | over E2E-TV | not repeated"
    lines = [f"| {record['study']} | seeds | steps | seconds | T = 0: {cells} | T = 1: {cells} |"]
    lines.append("|---" * 12 + "|")
    for name, by_seed in arms.items():
        rows = list(by_seed.values())
        sizes = [f"{sum(r.get(k, 0) for r in rows) / len(rows):.0f}" for k in ("step", "seconds")]
        row = [name, str(len(rows)), *sizes]
        for t in TEMPERATURES:
            arm = Arm.of(by_seed, t)
            over = [format_over(arm, arms, other, t, name) for other in ("start", "e2e")]
            fresh = arm.fresh_mean
            row += [f"{arm.mean:.3f}", *over, "" if fresh is None else f"{fresh:.3f}"]
        lines.append(f"| {' | '.join(row)} |")
    return lines


def format_over(arm: Arm, arms: dict, other: str, temperature: float, name: str) -> str:
    """The gain over another arm of the record, in words; nothing over itself or of no seed."""
    if name == other or other not in arms or name == "start":
        return ""
    base = Arm.of(arms[other], temperature)
    shares_seeds = arm.tasks.keys() & base.tasks.keys()
    return format_gain(arm.gain_over(base)) if shares_seeds else ""


# ------------------------------------------------------------------------------------- the command


def chosen_studies(config: Config) -> list[str]:
    """The names of the studies to run; what cannot be run is an error."""
    usual = [name for name in STUDIES if name != "given"]
    names = list(config.studies) or (["given"] if config.drafter else usual)
    check_choice("studies", names, STUDIES)
    if ("given" in names) != bool(config.drafter):
        raise ValueError("--studies given goes with --drafter FOLDER")
    check_choice("arms", config.arms, [arm for name in names for arm in STUDIES[name].all_arms()])
    for name in names:
        for arm in chosen_arms(config, name):
            arm_config(config, name, 0, arm)  # a config checks itself
    return names


def check_choice(flag_name: str, values, known) -> None:
    for value in values:
        if value not in known:
            listed = ", ".join(map(str, dict.fromkeys(known)))
            raise ValueError(f"--{flag_name} {value}: there is {listed}")


def list_studies(config: Config, names: list[str]) -> None:
    for name in names:
        counts = {arm: len(finished_seeds(config, name, arm)) for arm in STUDIES[name].all_arms()}
        arms = ", ".join(f"{arm} ({count})" for arm, count in counts.items())
        print(f"{name}: seeds {seeds_of(config, name)}; arms (seeds finished): {arms}")


def run(config: Config) -> dict | None:
    names = chosen_studies(config)
    if config.list_only:
        return list_studies(config, names)
    settings = {}
    with locked(config.out):
        jobs = [(name, seed) for name in names for seed in seeds_of(config, name)]
        # all studies of a seed's target, one after another: it is loaded once
        for name, seed in sorted(jobs, key=lambda job: str(setting_folder(config, *job))):
            run_study(config, settings, name, seed)
            write_record(config, name)
    for name in names:
        print("\n".join(["", *table(read_json(record_path(config, name)))]))
    return {"records": [str(record_path(config, name)) for name in names]}
