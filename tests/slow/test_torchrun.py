"""Runs of train.py by several processes."""

import json

import pytest
import torch

from drafter import Drafter
from small_runs import train_by_command
from target import Target

pytestmark = pytest.mark.slow


def read_log(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_torchrun_trains_and_one_process_goes_on_where_two_stopped(folders, tmp_path):
    for processes, flags in (
        (2, ("--out", "two", "--stop-after", 2)),
        (0, ("--out", "two")),
        (0, ("--out", "one")),
    ):
        done = train_by_command(folders, tmp_path, processes, *flags)
        assert done.returncode == 0, done.stderr
    logs = [read_log(tmp_path / out / "specopd/log.jsonl") for out in ("two", "one")]
    assert [[record["step"] for record in log] for log in logs] == [[1, 2, 3, 4]] * 2
    for two, one in zip(*logs):
        assert two["supervised"] == one["supervised"] and two["nodes"] == one["nodes"]
        assert two["loss"] == pytest.approx(one["loss"], abs=1e-5)
        assert two["alpha"] == pytest.approx(one["alpha"], abs=1e-5)
    target = Target.from_pretrained(folders / "target")
    weights = [
        Drafter.from_pretrained(tmp_path / out / "specopd", target, torch.float32).fc.weight
        for out in ("two", "one")
    ]
    torch.testing.assert_close(*weights, atol=1e-3, rtol=0)
    refused = train_by_command(folders, tmp_path, 2, "--out", "odd", "--batch-size", 3)
    assert refused.returncode != 0 and "--batch-size 3 is no multiple of the 2" in refused.stderr


def test_a_run_on_a_spread_target_is_the_run_on_a_whole_one_and_does_not_hang(folders, tmp_path):
    """Processes out of step: one measures after every step, rollouts end when they end."""
    made = train_by_command(folders, tmp_path, 0, "--out", "one", "--eval-every", 1)
    assert made.returncode == 0, made.stderr
    flags = ("--references", "one/references.safetensors", "--eval-every", 1, "--cache-gib", 0)
    logs = {}
    for mode in ("specopd", "rollout"):
        spread = ("--out", "two", "--mode", mode, "--shard-target")
        done = train_by_command(folders, tmp_path, 2, *spread, *flags)
        assert done.returncode == 0, done.stderr
        logs[mode] = read_log(tmp_path / "two" / mode / "log.jsonl")
        assert len(logs[mode]) == 4 and all("al_t0" in record for record in logs[mode])
    for one, two in zip(read_log(tmp_path / "one/specopd/log.jsonl"), logs["specopd"]):
        assert one["supervised"] == two["supervised"] > 0
        assert one["loss"] == pytest.approx(two["loss"], abs=1e-5)
    refused = train_by_command(folders, tmp_path, 2, "--out", "odd", "--shard-target")
    assert refused.returncode != 0 and "--references FILE" in refused.stderr
    alone = train_by_command(folders, tmp_path, 0, "--out", "odd", "--shard-target", *flags)
    assert alone.returncode == 2 and "torchrun" in alone.stderr
