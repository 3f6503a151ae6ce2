"""The grid of studies: what is run, kept and compared. `pytest tests/test_claims.py`"""

import json
import re
import shutil

import pytest
import torch
from conftest import ROOT
from test_lessons import run

from lab import claims
from lab.claims import STUDIES, Arm, ClaimsConfig, acceptance, counts, own
from support.files import write_json
from support.measure import Acceptance, middle
from train import TrainConfig

SMALL = {
    "--target-steps": 4,
    "--target-layers": 2,
    "--target-length": 32,
    "--num-references": 26,
    "--prompt-length": 12,
    "--response-length": 24,
    "--warm-steps": 2,
    "--steps": 2,
    "--eval-every": 1,
    "--eval-prompts": 4,
    "--eval-tokens": 8,
    "--draft-layers": 1,
    "--num-anchors": 4,
    "--batch-size": 4,
}


def flags(values: dict) -> list:
    return [x for pair in values.items() for x in pair]


def measured(seed, lift=0.0, P=6):
    generator = torch.Generator().manual_seed(seed)
    rounds = torch.randint(5, 9, (P,), generator=generator) * 10
    ease = torch.rand(P, generator=generator)  # some prompts are easier, for every drafter
    survived = torch.rand(P, 7, generator=generator).sort(descending=True).values * rounds[:, None]
    committed = (rounds * (2.0 + ease + lift)).round()
    return Acceptance(committed, rounds, rounds * 8, torch.zeros(P), survived, 1.0)


def test_every_arm_of_every_study_is_a_valid_run():
    config = ClaimsConfig()
    for study in STUDIES.values():
        for arm, changes in study.arms.items():
            values = study.changes | study.later | changes
            if isinstance(values.get("steps"), str):
                assert values["steps"] in STUDIES[study.like].arms and study.like
                values["steps"] = 7
            run_config = own(config, **values)
            assert type(run_config) is TrainConfig and run_config.mode != "story", arm
    starts = {(name, str(claims.places(config, name, 0)[0])) for name in STUDIES}
    shared = {place for name, place in starts if name.startswith(("gqa", "time", "long", "abl"))}
    assert shared == {"runs/claims/starts/gqa-dflash-s0"}  # one start, so that arms compare
    assert len({place for _, place in starts}) == 4


def test_a_measurement_is_kept_whole():
    one = measured(0)
    again = acceptance(json.loads(json.dumps(counts(one))))
    assert again.mean == one.mean and again.survival == pytest.approx(one.survival)
    assert torch.equal(again.resampled(), one.resampled())


def test_gains_over_several_seeds_are_paired_by_prompt():
    base = Arm({seed: measured(seed) for seed in (0, 1)})
    better = Arm({seed: measured(seed, 1.0) for seed in (0, 1)})
    gain = better.over(base)
    by_hand = (better.found[0].mean + better.found[1].mean) / (
        base.found[0].mean + base.found[1].mean
    )
    assert gain["percent"] == pytest.approx(100 * (by_hand - 1)) and gain["seeds"] == 2
    # every prompt gains one, whatever its own AL is: only a comparison in pairs can say so
    assert gain["interval"] == pytest.approx((1.0, 1.0), abs=1e-3)
    low, high = middle(better.draws() - base.draws().roll(7))
    assert high - low > 0.1
    assert better.survival == pytest.approx(base.survival)
    alone = Arm({1: measured(1, 1.0)}).over(base)  # on the one seed that both have
    assert alone["seeds"] == 1 and alone["interval"] == pytest.approx((1.0, 1.0), abs=1e-3)


def test_an_interval_over_seeds_knows_that_seeds_differ():
    base = Arm({seed: measured(seed) for seed in range(3)})
    mixed = Arm({seed: measured(seed, lift) for seed, lift in enumerate((-0.3, 0.0, 0.6))})
    low, high = mixed.over(base)["interval"]
    assert low < 0 < high


def test_arms_of_one_study_must_be_measured_on_the_same_prompts(tmp_path):
    config = ClaimsConfig(out=str(tmp_path))
    for arm, prompts in (("ce", 1), ("e2e", 2)):
        folder = tmp_path / "gqa-24/s0" / arm
        one = {f"t{t}": counts(measured(0)) for t in (0, 1)}
        write_json(folder / "al.json", {"last": one, "best": one, "prompts": prompts})
        write_json(folder / "stage.json", {"made_with": {"drafter": "x/starts/gqa-dflash-s0"}})
    write_json(tmp_path / "starts/gqa-dflash-s0/al.json", {"last": one, "best": one, "prompts": 1})
    with pytest.raises(ValueError, match="different prompts"):
        claims.read(config, "gqa-24")


def test_a_study_runs_resumes_and_compares(tmp_path):
    asked = ("--studies", "gqa-24", "time-24", *flags(SMALL), "--out", "c")
    done = run(ROOT / "bench.py", "claims", *asked, "--arms", "ce", "specopd", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    times = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("al.json")}
    assert len(times) == 3 * 3 + 1  # start, ce, specopd of three seeds; one arm of equal time
    done = run(ROOT / "bench.py", "claims", *asked, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert all(path.stat().st_mtime_ns == time for path, time in times.items())  # kept
    assert len(list(tmp_path.rglob("al.json"))) == 5 * 3 + 3
    found = json.loads((tmp_path / "c/summary.json").read_text())["claims"]
    row = found["gqa-24"]["specopd"]["t1"]
    assert row["al"] >= 1 and set(row["over"]) == {"start", "ce", "e2e", "rollout"}
    assert len(row["best_survival"]) == 7
    stages = {
        arm: json.loads((tmp_path / f"c/time-24/s0/{arm}/stage.json").read_text())
        for arm in ("ce", "rollout")
    }
    assert stages["rollout"]["made_with"]["steps"] >= 2
    listed = run(ROOT / "bench.py", "claims", *asked, "--list", cwd=tmp_path)
    assert "specopd (3)" in listed.stdout and "rollout (1)" in listed.stdout
    again = json.loads((tmp_path / "c/summary.json").read_text())["claims"]
    assert again["gqa-24"] == found["gqa-24"]  # listing leaves the figures alone
    other = run(ROOT / "bench.py", "claims", *asked, "--eval-tokens", 9, cwd=tmp_path)
    assert other.returncode == 2 and "on other prompts" in other.stderr
    changed = run(ROOT / "bench.py", "claims", *asked, "--lr", 0.5, cwd=tmp_path)
    assert changed.returncode == 2 and "lr = 0.001, this run has 0.5" in changed.stderr
    told = run(ROOT / "bench.py", "report", "--claims", "c", "--out", "r", cwd=tmp_path)
    assert told.returncode == 0, told.stderr
    text = (tmp_path / "r/report.md").read_text()
    assert f"| specopd | 3 | {found['gqa-24']['specopd']['t0']['al']:.3f} |" in text
    for name in re.findall(r"\]\(([^)]+)\)", text):
        assert (tmp_path / "r" / name).stat().st_size > 100, name
    assert len(list((tmp_path / "r").glob("*.png"))) == 4
    lines = (tmp_path / "r/gqa-24.csv").read_text().splitlines()
    assert len(lines) == 1 + 4 * 3 * 2 and lines[0] == "arm,seed,step,loss,al_t0,al_t1"


def test_four_ways_on_from_a_given_start(folders, tmp_path):
    pair = ("--target", folders / "target", "--drafter", folders / "drafter")
    sizes = {k: v for k, v in SMALL.items() if k != "--draft-layers"}  # the given one's
    done = run(ROOT / "bench.py", "claims", *pair, *flags(sizes), "--out", "c", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "c/summary.json").read_text())["claims"]["given"]
    assert set(found) == {"start", "ce", "e2e", "rollout", "specopd"}
    other = shutil.copytree(folders / "drafter", tmp_path / "other")
    other = run(
        ROOT / "bench.py", "claims", *pair[:3], other, *flags(sizes), "--out", "c", cwd=tmp_path
    )
    assert other.returncode == 2 and "was made with drafter" in other.stderr
