"""The paper's comparisons at our scale: a grid of studies, run by one command that can be stopped.

A study is a starting drafter, trained offline, and the arms that go on from it. Within a study all
arms start from the same checkpoint, see the same references in the same order and are measured on
the same held-out prompts; they differ by what is written at their names below, nothing else. Every
arm is kept in --out and not done twice, its AL with the counts of every prompt, so that arms can be
compared in pairs later. Arms of several seeds are averaged before they are compared.

    python bench.py claims                              everything: hours on a CPU
    python bench.py claims --studies gqa-24 gqa-512     a part; --list names them
    python bench.py claims --target FOLDER --drafter FOLDER ...    four ways on from a given start
    python bench.py report                              what is done so far: tables and pictures
    pytest tests/test_claims.py
"""

import dataclasses
import zlib
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from drafter import Drafter
from story import trained
from support import files
from support.files import flag
from support.measure import Acceptance, central_95, format_gain, gain
from support.prepare import Trunks, prepare
from train import TEMPERATURES, TrainConfig


@dataclass(frozen=True)
class ClaimsConfig(TrainConfig):
    """A run's config, from which studies and arms depart."""

    out: str = flag("runs/claims", "folder of all studies")
    warm_steps: int = flag(2000, "offline CE steps of a start, until its AL is flat", low=1)
    eval_every: int = flag(50, "steps between two measurements of AL (starts: 250)", low=1)
    studies: tuple = flag((), "which ones, by name; empty: all, or `given` with --drafter")
    arms: tuple = flag((), "only these arms of the studies; empty: all")
    seeds: tuple = flag((), "only these seeds of the studies; empty: all", kind=int)
    list: bool = flag(False, "say which studies and arms there are, and what is done")

    def __post_init__(self):
        super().__post_init__()
        if self.mode != "story" or self.stop_after or self.plan:
            raise ValueError("bench.py claims sets --mode itself, has no --stop-after, no --plan")


@dataclass(frozen=True)
class Study:
    """Arms on from one start for each seed; all values are changes of the run's config."""

    arms: dict
    changes: dict = field(default_factory=dict)  # of start and arms
    later: dict = field(default_factory=dict)  # of the arms alone
    seeds: tuple = (0,)  # empty: the run's own
    # arms whose steps are another's name train as long, by the clock, as that one of this study did
    like: str = ""


WAYS = {mode: {"mode": mode} for mode in ("ce", "e2e", "rollout", "specopd")}
DRAWN = {"mode": "specopd", "num_greedy": 0}
OWN = {"mode": "specopd"}
SEEDS, ONCE = (0, 1, 2), {"eval_every": 10**9}

STUDIES = {
    "gqa-24": Study(WAYS, later={"num_references": 24}, seeds=SEEDS),
    "gqa-512": Study(WAYS, seeds=SEEDS),
    # how branches are drawn, by what they are served at
    "temperature-24": Study(
        {
            "drawn": DRAWN,
            "greedy": OWN | {"branch_temperature": 0.0, "num_branches": 1, "num_greedy": 0},
            "e2e_al": DRAWN | {"loss": "e2e_al"},
        },
        later={"num_references": 24},
        seeds=SEEDS,
    ),
    "time-24": Study(
        {mode: WAYS[mode] | {"steps": "specopd"} for mode in ("ce", "e2e", "rollout")},
        later={"num_references": 24},
        like="gqa-24",
    ),
    "time-512": Study(
        {mode: WAYS[mode] | {"steps": "specopd"} for mode in ("ce", "e2e", "rollout")},
        like="gqa-512",
    ),
    # as many blocks a step as a rollout of the same references has
    "dense-24": Study(
        {"64 anchors drawn": DRAWN | {"num_anchors": 64, "num_branches": 1}},
        later={"num_references": 24},
    ),
    "dense-512": Study({"64 anchors drawn": DRAWN | {"num_anchors": 64, "num_branches": 1}}),
    "long-24": Study(
        {mode: WAYS[mode] for mode in ("ce", "e2e", "specopd")},
        later={"num_references": 24, "steps": 2500, "eval_every": 125},
    ),
    "gdn-dspark-64": Study(WAYS, {"arch": "gdn", "drafter_kind": "dspark"}, {"num_references": 64}),
    # one change at a time, of the default recipe
    "ablations": Study(
        {
            "default": OWN,
            "4 anchors": OWN | {"num_anchors": 4},
            "64 anchors": OWN | {"num_anchors": 64},
            "1 branch drawn": DRAWN | {"num_branches": 1},
            "2 branches drawn": DRAWN,
            "4 branches 2 greedy": OWN | {"num_branches": 4, "num_greedy": 2},
            "1 branch greedy": OWN
            | {"branch_temperature": 0.0, "num_branches": 1, "num_greedy": 0},
            "temperature 0.7": OWN | {"branch_temperature": 0.7},
            "loss at 0.7": OWN | {"loss_temperature": 0.7},
            "no merging": OWN | {"merge": False},
            "0.1 CE": OWN | {"ce_weight": 0.1},
            "reused twice": OWN | {"reuse": 2},
            "reused 4 times": OWN | {"reuse": 4},
            "reused 10 times": OWN | {"reuse": 10},
            "anchors by need": OWN | {"anchors": "hard"},
            "exact E[AL] drawn": DRAWN | {"loss": "e2e_al"},
            "TV per position": OWN | {"loss": "tv"},
            "KL": OWN | {"loss": "kl"},
            "AdamW alone": OWN | {"matrix_lr": 0.0},
            "Muon 0.02": OWN | {"matrix_lr": 0.02},
        },
        later=ONCE | {"save_every": 500},
    ),
    "block-4": Study({"e2e": WAYS["e2e"], "specopd": OWN}, {"block_size": 4}, ONCE),
    "block-16": Study(
        {"e2e": WAYS["e2e"], "specopd": OWN}, {"block_size": 16, "ce_decay": 7.0}, ONCE
    ),
}
GIVEN = Study(WAYS, seeds=())  # from --drafter


def study_of(name: str) -> Study:
    return GIVEN if name == "given" else STUDIES[name]


def counts(found: Acceptance) -> dict:
    """What a measurement is kept as: per prompt, without its texts."""
    names = ("committed", "rounds", "nodes", "repeated", "survived")
    return {name: getattr(found, name).tolist() for name in names} | {"seconds": found.seconds}


def acceptance(kept: dict) -> Acceptance:
    return Acceptance(**{k: v if k == "seconds" else torch.tensor(v) for k, v in kept.items()})


class World:
    """What the studies of one target share: target, tokenizer, held-out prompts, references."""

    def __init__(self, config: ClaimsConfig, out: Path):
        self.config, self.trunks = config, {}
        self.target, self.tokenizer, self.measure, self.references = prepare(config, out)

    def text(self, count: int) -> Trunks:
        """Trunks of the first so many references; one set at a time is kept."""
        if count not in self.trunks:
            config, whole = self.config, self.references
            rows = {f.name: getattr(whole, f.name)[:count] for f in dataclasses.fields(whole)}
            every = config.checkpoint_every or None
            self.trunks.clear()
            self.trunks[count] = Trunks(self.target, type(whole)(**rows), config.cache_gib, every)
        return self.trunks[count]

    def run(self, config: TrainConfig, folder: Path) -> None:
        """Train one arm, or find it done; measure it, or find it measured."""
        world = self.target, self.tokenizer, self.measure
        totals = trained(config, folder, *world, lambda: self.text(config.num_references))
        self.keep(folder, folder, totals, config.steps)

    def keep(self, folder: Path, drafters: Path, totals: dict, steps: int) -> None:
        """Measure the drafters of a folder, once, on this world's prompts."""
        m = self.measure
        prompts = zlib.crc32(repr((m.prompts, m.max_new_tokens, m.stop_ids, m.seed)).encode())
        path = folder / "al.json"
        if not path.is_file():
            found = self.measured(drafters, totals, steps)
            files.write_json(path, found | {"prompts": prompts})
        elif files.read_json(path).get("prompts", prompts) != prompts:
            raise ValueError(
                f"{path} was measured on other prompts: remove it, and it is made again"
            )

    def measured(self, folder: Path, totals: dict, steps: int) -> dict:
        """AL of the last and of the best drafter at both temperatures, on all prompts."""
        found = {}
        for name in ("last", "best"):
            if name == "best" and totals.get("best", {}).get("step", steps) == steps:
                found["best"] = found["last"]
                continue
            place = folder / "best" if name == "best" else folder
            drafter = Drafter.from_pretrained(place, self.target, torch.float32)
            found[name] = {
                f"t{t:g}": counts(self.measure(self.target, drafter, t, progress=f"AL at {t:g}"))
                for t in TEMPERATURES
            }
        return found


def own(config: ClaimsConfig, **changes) -> TrainConfig:
    """The run's config alone, changed."""
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(TrainConfig)}
    return TrainConfig(**values | changes)


def places(config: ClaimsConfig, name: str, seed: int) -> tuple[Path, dict]:
    """The folder of a study's start, shared by all studies with the same one, and its changes."""
    study, out = study_of(name), Path(config.out)
    if name == "given":
        return out / name / f"s{seed}" / "start", {"seed": seed}
    kind = study.changes.get("drafter_kind") or config.drafter_kind or "dflash"
    parts = [study.changes.get("arch", config.arch), kind]
    parts += [f"{k}-{v}" for k, v in study.changes.items() if k == "block_size"]
    return out / "starts" / "-".join([*parts, f"s{seed}"]), study.changes | {"seed": seed}


def folder_of(config: ClaimsConfig, name: str, seed: int, arm: str) -> Path:
    return Path(config.out) / name / f"s{seed}" / arm.replace(" ", "-")


def as_long(config: ClaimsConfig, name: str, seed: int, mode: str, like: str) -> int:
    """The steps that `mode` makes in the time of another arm, by the fastest of the seeds that are
    done: other work on the machine only slows a run down."""
    each, study = {}, STUDIES[name].like
    for arm in (mode, like):
        paths = [folder_of(config, study, one, arm) / "stage.json" for one in STUDIES[study].seeds]
        own = folder_of(config, study, seed, arm) / "stage.json"  # which must be there
        done = [files.read_json(path) for path in {own, *filter(Path.is_file, paths)}]
        each[arm] = min(d["result"]["seconds"] / d["made_with"]["steps"] for d in done)
    return max(2, round(config.steps * each[like] / each[mode]))


def begun_with(folder: Path) -> int | None:
    """The steps of an arm that was begun: since then the clock may have said otherwise."""
    for path in (folder / "stage.json", folder / "run.json"):
        if path.is_file():
            found = files.read_json(path)
            return found.get("made_with", found).get("steps")
    return None


def run_of(config: ClaimsConfig, name: str, seed: int, arm: str, steps=as_long) -> TrainConfig:
    """An arm's run. steps: how many it has where it is to take as long as another."""
    study, (start, changes) = study_of(name), places(config, name, seed)
    if arm == "start":
        often = max(250, config.eval_every)
        return own(config, mode="ce", steps=config.warm_steps, eval_every=often, **changes)
    drafter = config.drafter if name == "given" else str(start)
    values = changes | {"drafter": drafter} | study.later | study.arms[arm]
    if isinstance(values.get("steps"), str):
        values["steps"] = begun_with(folder_of(config, name, seed, arm)) or (
            steps(config, name, seed, values["mode"], values["steps"])
        )
    return own(config, **values)


def run_study(config: ClaimsConfig, worlds: dict, name: str) -> None:
    study = study_of(name)
    arch = study.changes.get("arch", config.arch)
    if arch not in worlds:
        worlds.clear()  # one target at a time
        worlds[arch] = World(replace(config, arch=arch), Path(config.out) / "targets" / arch)
    world = worlds[arch]
    for seed in study.seeds or (config.seed,):
        if config.seeds and seed not in config.seeds:
            continue
        start, _ = places(config, name, seed)
        if name == "given":
            given = {"drafter": str(Path(config.drafter).resolve())}
            files.stage(start, given, lambda: {})
            world.keep(start, Path(config.drafter), {}, 0)
        else:
            world.run(run_of(config, name, seed, "start"), start)
        for arm in config.arms or study.arms:
            if arm in study.arms:
                print(f"-- {name}, seed {seed}: {arm}")
                world.run(run_of(config, name, seed, arm), folder_of(config, name, seed, arm))


# ---------------------------------------------------------------------------------- what came of it


@dataclass
class Arm:
    """An arm's measurements at one checkpoint and temperature, by seed."""

    found: dict

    @property
    def mean(self) -> float:
        return sum(one.mean for one in self.found.values()) / len(self.found)

    @property
    def survival(self) -> list[float]:
        return torch.tensor([one.survival for one in self.found.values()]).mean(0).tolist()

    def draws(self) -> torch.Tensor:
        """ALs of so many draws of prompts, and of seeds where there are several; the same ones for
        every arm with as many of them."""
        each = torch.stack([self.found[seed].resampled() for seed in sorted(self.found)])  # (S, n)
        generator = torch.Generator().manual_seed(1)
        picks = torch.randint(len(each), each.shape, generator=generator)
        return each.gather(0, picks).mean(0)

    def interval(self, other: "Arm") -> tuple[float, float]:
        return central_95(self.draws() - other.draws())

    def over(self, other: "Arm") -> dict:
        """The gain over another arm, on the seeds that both have."""
        seeds = self.found.keys() & other.found.keys()
        mine, its = (Arm({seed: arm.found[seed] for seed in seeds}) for arm in (self, other))
        return gain(mine, its) | {"seeds": len(seeds)}


def done(config: ClaimsConfig, name: str) -> dict:
    """{arm: {seed: folder}} of a study, of what is trained and measured."""
    found = {}
    seeds = sorted(int(place.name[1:]) for place in Path(config.out, name).glob("s*"))
    for arm in study_of(name).arms:
        there = {seed: folder_of(config, name, seed, arm) for seed in seeds}
        there = {seed: place for seed, place in there.items() if (place / "al.json").is_file()}
        found |= {arm: there} if there else {}
    return found


def read(config: ClaimsConfig, name: str) -> dict:
    """{arm: {checkpoint: {t: Arm}}} of a study as far as it is done, its start among them, which
    has but the one checkpoint that the arms start from."""
    arms, found, prompts = done(config, name), {}, set()
    starts = {}
    for places_of in arms.values():
        for seed, place in places_of.items():
            start = files.read_json(place / "stage.json")["made_with"]["drafter"]
            given = place.parent / "start"
            starts[seed] = (
                given if name == "given" else (Path(config.out) / "starts" / Path(start).name)
            )
    for arm, places_of in ({"start": starts} | arms if arms else {}).items():
        kept = {s: files.read_json(place / "al.json") for s, place in sorted(places_of.items())}
        prompts |= {one["prompts"] for one in kept.values() if "prompts" in one}
        found[arm] = {
            when: {
                f"t{t:g}": Arm({s: acceptance(one[at][f"t{t:g}"]) for s, one in kept.items()})
                for t in TEMPERATURES
            }
            for when, at in (("last", "last"), ("best", "last" if arm == "start" else "best"))
        }
    if len(prompts) > 1:
        raise ValueError(f"{config.out}/{name}: arms were measured on different prompts")
    return found


def table(name: str, found: dict) -> tuple[list[str], dict]:
    """Lines of Markdown and figures: AL of the last checkpoint and of the best by held-out AL (on a
    quarter of the prompts). In brackets the 95 % interval of the difference in AL."""
    lines = [
        f"| {name} | seeds | T = 0 | over start [AL] | T = 1 | over start [AL] | best: "
        "T = 0 | T = 1 |",
        "|---" * 8 + "|",
    ]
    figures = {}
    for arm, ats in found.items():
        row = figures[arm] = {}
        cells = [arm, str(len(ats["last"]["t0"].found))]
        for t, one in ats["last"].items():
            row[t] = {"al": one.mean, "survival": one.survival}
            if arm != "start" and "start" in found:
                row[t]["over"] = {
                    other: one.over(of["last"][t])
                    for other, of in found.items()
                    if other != arm and one.found.keys() & of["last"][t].found.keys()
                }
            cells += [
                f"{one.mean:.3f}",
                format_gain(row[t]["over"]["start"]) if "over" in row[t] else "",
            ]
        for t, one in ats["best"].items():
            row[t] |= {"best_al": one.mean, "best_survival": one.survival}
            cells.append(f"{one.mean:.3f}")
        lines.append("| " + " | ".join(cells) + " |")
    return lines, figures


def chosen(config: ClaimsConfig) -> list[str]:
    """The studies that are asked for; what cannot be run is said before anything is."""
    names = list(config.studies) or (["given"] if config.drafter else list(STUDIES))
    for name in names:
        if name not in (*STUDIES, "given"):
            raise ValueError(f"--studies {name}: there is {', '.join([*STUDIES, 'given'])}")
    if "given" in names and not config.drafter:
        raise ValueError("--studies given goes with --drafter FOLDER")
    known = {
        "arms": [arm for name in names for arm in study_of(name).arms],
        "seeds": [seed for name in names for seed in study_of(name).seeds or (config.seed,)],
    }
    for flag_name, there in known.items():
        for one in set(getattr(config, flag_name)) - set(there):
            listed = ", ".join(map(str, dict.fromkeys(there)))
            raise ValueError(f"--{flag_name} {one}: there is {listed}")
    for name in names:
        for arm in config.arms or study_of(name).arms:
            if arm in study_of(name).arms:
                run_of(config, name, 0, arm, steps=lambda *_: config.steps)  # a valid run
    return names


def claims(config: ClaimsConfig) -> dict | None:
    names, figures, worlds = chosen(config), {}, {}
    if config.list:
        for name in names:
            study, there = study_of(name), done(config, name)
            arms = ", ".join(f"{arm} ({len(there.get(arm, {}))})" for arm in study.arms)
            seeds = ", ".join(map(str, study.seeds or (config.seed,)))
            print(f"{name}: seeds {seeds}; arms (seeds done): {arms}")
        return None
    for name in names:
        run_study(config, worlds, name)
    for name in names:
        lines, figures[name] = table(name, read(config, name))
        print("\n".join(["", *lines]))
    return figures
