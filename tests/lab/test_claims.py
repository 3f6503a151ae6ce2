"""The grid of studies: what is run, kept and compared. `pytest tests/lab/test_claims.py`"""

import json
import re
import shutil

import pytest
import torch

from lab import claims
from lab.claims import STUDIES, Arm, from_counts, to_counts
from small import ROOT
from support.files import write_json
from support.measure import Acceptance, central_95
from train import TrainConfig

TOY = "--target-steps 4 --target-layers 2 --target-length 32".split()
SMALL = """--num-references 26
    --prompt-length 12 --response-length 24 --warm-steps 2 --steps 2 --eval-every 1
    --num-eval-prompts 4 --eval-tokens 8 --num-anchors 4 --batch-size 4""".split()
ONE_LAYER = ("--draft-layers", 1)
TEXT = ("--corpus", ROOT / "README.md")


def random_acceptance(seed: int, lift: float = 0.0, P: int = 6) -> Acceptance:
    """Counts of P prompts; some prompts are easier, for every drafter, and `lift` adds to all."""
    generator = torch.Generator().manual_seed(seed)
    rounds = torch.randint(5, 9, (P,), generator=generator) * 10
    ease = torch.rand(P, generator=generator)
    survived = torch.rand(P, 7, generator=generator).sort(descending=True).values * rounds[:, None]
    committed = (rounds * (2.0 + ease + lift)).round()
    return Acceptance(committed, rounds, rounds * 8, torch.zeros(P), survived, 1.0)


def test_every_arm_of_every_study_is_a_valid_run():
    config = claims.Config(drafter="somewhere")
    for name, study in STUDIES.items():
        for arm in study.arms:
            run_config = claims.arm_config(config, name, 0, arm)
            assert type(run_config) is TrainConfig and run_config.mode != "story", arm
        if study.same_time_as:
            other, reference = study.same_time_as
            assert {reference, *study.arms} <= set(STUDIES[other].arms)
    names = [name for name in STUDIES if name != "given"]
    starts = {name: str(claims.start_folder(config, name, 0)) for name in names}
    shared = {starts[name] for name in names if name.startswith(("gqa", "time", "long", "abl"))}
    assert shared == {"runs/claims/starts/gqa-dflash-s0"}  # one start, so that arms compare
    assert len(set(starts.values())) == 4


def test_a_measurement_is_kept_whole():
    results = random_acceptance(0)
    again = from_counts(json.loads(json.dumps(to_counts(results))))
    assert again.mean == results.mean and again.survival == pytest.approx(results.survival)
    assert torch.equal(again.resampled(), results.resampled())


def test_gains_over_several_seeds_are_paired_by_prompt():
    base = Arm({seed: random_acceptance(seed) for seed in (0, 1)})
    better = Arm({seed: random_acceptance(seed, 1.0) for seed in (0, 1)})
    gain = better.gain_over(base)
    means = [sum(arm.tasks[seed].mean for seed in (0, 1)) for arm in (better, base)]
    assert gain["percent"] == pytest.approx(100 * (means[0] / means[1] - 1)) and gain["seeds"] == 2
    # every prompt gains one, whatever its own AL is: only a comparison in pairs can say so
    assert gain["interval"] == pytest.approx((1.0, 1.0), abs=1e-3)
    low, high = central_95(better.resampled() - base.resampled().roll(7))
    assert high - low > 0.1
    assert better.survival == pytest.approx(base.survival)
    alone = Arm({1: random_acceptance(1, 1.0)}).gain_over(base)  # on the one seed that both have
    assert alone["seeds"] == 1 and alone["interval"] == pytest.approx((1.0, 1.0), abs=1e-3)


def test_an_interval_over_seeds_knows_that_seeds_differ():
    base = Arm({seed: random_acceptance(seed) for seed in range(3)})
    lifts = enumerate((-0.3, 0.0, 0.6))
    mixed = Arm({seed: random_acceptance(seed, lift) for seed, lift in lifts})
    low, high = mixed.gain_over(base)["interval"]
    assert low < 0 < high


def test_arms_of_one_study_must_be_measured_on_the_same_prompts(tmp_path):
    config = claims.Config(out=str(tmp_path))
    counts = {f"t{t}": to_counts(random_acceptance(0)) for t in (0, 1)}
    for arm, prompts in (("ce", 1), ("e2e", 2)):
        folder = tmp_path / "gqa-24/s0" / arm
        write_json(folder / "al.json", {"last": counts, "best": counts, "prompts": prompts})
        write_json(folder / "stage.json", {"made_with": {"drafter": "x/starts/gqa-dflash-s0"}})
    start = tmp_path / "starts/gqa-dflash-s0/al.json"
    write_json(start, {"last": counts, "best": counts, "prompts": 1})
    with pytest.raises(ValueError, match="different prompts"):
        claims.read_study(config, "gqa-24")


def test_arms_of_equal_time_get_the_steps_that_fit_into_it(tmp_path):
    config = claims.Config(out=str(tmp_path), steps=100)
    seconds = {"specopd": {0: 30, 1: 20}, "ce": {0: 10, 1: 40}}  # seed 1 or 0 was disturbed
    for arm, by_seed in seconds.items():
        for seed, value in by_seed.items():
            record = {"made_with": {"steps": 100}, "result": {"seconds": value}}
            write_json(tmp_path / f"gqa-24/s{seed}/{arm}/stage.json", record)
    assert claims.steps_of_same_time(config, "time-24", 0, "ce") == 200
    write_json(tmp_path / "time-24/s0/ce/run.json", {"steps": 77})  # was begun
    assert claims.steps_of_same_time(config, "time-24", 0, "ce") == 77


@pytest.mark.slow
def test_a_study_runs_resumes_and_compares(lab, tmp_path):
    out = tmp_path / "c"
    studies = ("--studies", "gqa-24", "time-24", *TOY, *SMALL, *ONE_LAYER, "--out", out)
    code, _, error = lab("claims", *studies, "--arms", "ce", "specopd")
    assert code == 0, error
    times = {path: path.stat().st_mtime_ns for path in out.rglob("al.json")}
    assert len(times) == 3 * 3 + 1  # start, ce, specopd of three seeds; one arm of equal time
    code, _, error = lab("claims", *studies)
    assert code == 0, error
    assert all(path.stat().st_mtime_ns == time for path, time in times.items())  # kept
    assert len(list(out.rglob("al.json"))) == 5 * 3 + 3
    figures = json.loads((out / "summary.json").read_text())["claims"]
    row = figures["gqa-24"]["specopd"]["t1"]
    assert row["al"] >= 1 and set(row["over"]) == {"start", "ce", "e2e", "rollout"}
    assert len(row["best_survival"]) == 7
    stage = json.loads((out / "time-24/s0/rollout/stage.json").read_text())
    assert stage["made_with"]["steps"] >= 2
    _, listed, _ = lab("claims", *studies, "--list-only")
    assert "specopd (3)" in listed and "rollout (1)" in listed
    again = json.loads((out / "summary.json").read_text())["claims"]
    assert again["gqa-24"] == figures["gqa-24"]  # listing leaves the figures alone
    code, _, error = lab("claims", *studies, "--eval-tokens", 9)
    assert code == 2 and "on other prompts" in error
    code, _, error = lab("claims", *studies, "--lr", 0.5)
    assert code == 2 and "lr = 0.001, this run has 0.5" in error
    report_is_complete(lab, out, tmp_path / "r", figures)


def report_is_complete(lab, out, folder, figures: dict) -> None:
    code, _, error = lab("report", "--claims", out, "--out", folder)
    assert code == 0, error
    text = (folder / "report.md").read_text()
    assert f"| specopd | 3 | {figures['gqa-24']['specopd']['t0']['al']:.3f} |" in text
    for name in re.findall(r"\]\(([^)]+)\)", text):
        assert (folder / name).stat().st_size > 100, name
    assert len(list(folder.glob("*.png"))) == 4
    lines = (folder / "gqa-24.csv").read_text().splitlines()
    assert len(lines) == 1 + 4 * 3 * 2 and lines[0] == "arm,seed,step,loss,al_t0,al_t1"


def test_four_ways_on_from_a_given_start(lab, folders, tmp_path):
    out = ("--out", tmp_path / "c")
    target = ("--target", folders / "target", *TEXT)
    code, _, error = lab("claims", *target, "--drafter", folders / "drafter", *SMALL, *out)
    assert code == 0, error
    figures = json.loads((tmp_path / "c/summary.json").read_text())["claims"]["given"]
    assert set(figures) == {"start", "ce", "e2e", "rollout", "specopd"}
    other = shutil.copytree(folders / "drafter", tmp_path / "other")
    code, _, error = lab("claims", *target, "--drafter", other, *SMALL, *out)
    assert code == 2 and "was made with drafter" in error
