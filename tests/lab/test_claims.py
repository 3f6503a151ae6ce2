"""The studies: what is run, kept, recorded and compared. `pytest tests/lab/test_claims.py`"""

import json
import shutil

import pytest
import torch

from lab import claims
from lab.claims import PROOF_SEEDS, SAME_TIME, SEARCH_SEEDS, STUDIES, Arm, from_counts, to_counts
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
    fresh = torch.stack([committed / 2, rounds / 4], 1)
    nodes = rounds * 8
    return Acceptance(committed, rounds, nodes, torch.zeros(P), survived, 1.0, fresh=fresh)


def test_every_arm_of_every_study_is_a_valid_run():
    config = claims.Config(drafter="somewhere")
    for name, study in STUDIES.items():
        for arm in study.all_arms():
            run_config = claims.arm_config(config, name, 0, arm)
            assert type(run_config) is TrainConfig and run_config.mode != "story", arm
        assert not study.same_time or "specopd" in study.arms
    names = [name for name in STUDIES if name != "given"]
    starts = {name: str(claims.start_folder(config, name, 0)) for name in names}
    shared = {starts[name] for name in ("gqa", "few", "long", "ablations")}
    assert shared == {"runs/claims/gqa-s0/start-dflash"}  # one start, so that arms compare
    assert len(set(starts.values())) == 3 * 3 + 2


def test_nothing_is_shown_of_the_seeds_that_recipes_were_chosen_on():
    assert len(PROOF_SEEDS) >= 3
    for name, study in STUDIES.items():
        assert bool(set(study.seeds) & set(SEARCH_SEEDS)) == (name == "rates"), name


def test_a_measurement_is_kept_whole():
    results = random_acceptance(0)
    again = from_counts(json.loads(json.dumps(to_counts(results))))
    assert again.mean == results.mean and again.fresh_mean == results.fresh_mean
    assert Arm({0: again}).survival == pytest.approx(results.survival)
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
    config = claims.Config(out=str(tmp_path), seeds=(0,))
    counts = {f"t{t}": to_counts(random_acceptance(0)) for t in (0, 1)}
    for arm, prompts in (("ce", 1), ("e2e", 2)):
        folder = claims.arm_folder(config, "gqa", 0, arm)
        write_json(folder / "al.json", counts | {"prompts": prompts})
    start = claims.start_folder(config, "gqa", 0)
    write_json(start / "al.json", counts | {"prompts": 1})
    with pytest.raises(ValueError, match="different prompts"):
        claims.record_of(config, "gqa")


def test_a_record_keeps_other_seeds_of_its_version_and_recipe(tmp_path):
    def record(seeds, arm="e2e", version="a", **config):
        config = {"out": "x", "seeds": seeds, "eval_prompts": (), "steps": 9} | config
        rows = {"start": {seed: "s" for seed in seeds}, arm: {seed: arm for seed in seeds}}
        return {"study": "gqa", "version": version, "config": config, "arms": rows}

    older = json.loads(json.dumps(record([20, 21])))
    both = claims.with_older(record([22], out="y"), older)
    assert both["config"]["out"] == "y"
    assert {arm: list(rows) for arm, rows in both["arms"].items()} == {
        "start": [20, 21, 22],
        "e2e": [20, 21, 22],
    }
    other_arm = claims.with_older(record([20], "specopd"), older)
    assert list(other_arm["arms"]) == ["start", "e2e", "specopd"]
    for new in (record([22], version="b"), record([22], steps=8)):
        assert claims.with_older(new, older) == new


def test_arms_of_the_same_time_get_the_steps_that_fit_into_it(tmp_path):
    config = claims.Config(out=str(tmp_path), steps=100)
    seconds = {"specopd": {20: 30, 21: 20}, "ce": {20: 10, 21: 40}}  # one of each was disturbed
    for arm, by_seed in seconds.items():
        for seed, value in by_seed.items():
            record = {"made_with": {"steps": 100}, "result": {"seconds": value}}
            write_json(tmp_path / f"gqa/s{seed}/{arm}/stage.json", record)
    arm = "ce" + SAME_TIME
    assert claims.steps_of_same_time(config, "gqa", 20, arm) == 200
    write_json(claims.arm_folder(config, "gqa", 20, arm) / "run.json", {"steps": 77})  # was begun
    assert claims.steps_of_same_time(config, "gqa", 20, arm) == 77
    with pytest.raises(ValueError, match="needs the time of the arms e2e and specopd"):
        claims.steps_of_same_time(config, "gqa", 20, "e2e" + SAME_TIME)


@pytest.mark.slow
def test_a_study_runs_resumes_and_is_recorded(lab, tmp_path):
    out = tmp_path / "c"
    records = ("--records", tmp_path / "records")
    small = (*TOY, *SMALL, *ONE_LAYER, *TEXT, "--seeds", 3, 4)
    studies = ("--studies", "gqa", *small, "--out", out, *records)
    code, _, error = lab("claims", *studies, "--arms", "ce", "specopd", "ce" + SAME_TIME)
    assert code == 0, error
    times = {path: path.stat().st_mtime_ns for path in out.rglob("al.json")}
    assert len(times) == 2 * 4  # start and three arms of two seeds
    code, said, error = lab("claims", *studies)
    assert code == 0, error
    assert all(path.stat().st_mtime_ns == time for path, time in times.items())  # kept
    assert len(list(out.rglob("al.json"))) == 2 * (1 + len(STUDIES["gqa"].all_arms()))
    summary = json.loads((out / "summary.json").read_text())["claims"]
    assert summary["records"] == [str(tmp_path / "records/gqa.json")]
    record = json.loads((tmp_path / "records/gqa.json").read_text())
    assert set(record["arms"]) == {"start", *STUDIES["gqa"].all_arms()}
    assert record["machine"]["threads"] >= 1 and record["config"]["num_anchors"] == 4
    row = record["arms"]["specopd"]["3"]
    assert row["step"] == 2 and len(row["curve"]["al"]) == 2 and row["al"]["t1"]["committed"]
    assert f"| specopd | 2 | 2 | {row['seconds']:.0f} |"[:16] in said
    _, listed, _ = lab("claims", *studies, "--list-only")
    assert "specopd (2)" in listed and f"rollout{SAME_TIME} (2)" in listed
    code, _, error = lab("claims", *studies, "--eval-tokens", 9)
    assert code == 2 and "on other prompts" in error
    code, _, error = lab("claims", *studies, "--lr", 0.5)
    assert code == 2 and "lr = 0.001, this run has 0.5" in error


def test_ways_on_from_a_given_start(lab, folders, tmp_path):
    out = ("--out", tmp_path / "c", "--records", tmp_path / "records")
    target = ("--target", folders / "target", *TEXT)
    code, _, error = lab("claims", *target, "--drafter", folders / "drafter", *SMALL, *out)
    assert code == 0, error
    record = json.loads((tmp_path / "records/given.json").read_text())
    assert {"start", "ce", "e2e", "rollout", "specopd"} <= set(record["arms"])
    other = shutil.copytree(folders / "drafter", tmp_path / "other")
    code, _, error = lab("claims", *target, "--drafter", other, *SMALL, *out)
    assert code == 2 and "was made with drafter" in error
