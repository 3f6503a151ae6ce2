"""What a long run survives. `pytest tests/test_resume.py` (KILLS=20 for a long evening)"""

import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch
from conftest import ROOT, small_drafter
from test_distributed import command
from test_train import CONFIG, STOP, setup

import step as steps
import train as training
from drafter import Drafter
from support import distributed, files, resume
from support.measure import Measure
from support.prepare import Trunks


def test_the_last_few_checkpoints_are_kept_and_a_damaged_one_is_passed_over(tmp_path, capsys):
    assert resume.load(tmp_path) is None
    for step in range(5):
        resume.save(tmp_path, {"step": step}, keep=3)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["checkpoint.1.pt", "checkpoint.2.pt", "checkpoint.pt"]
    assert resume.load(tmp_path)["step"] == 4
    for age, older in ((0, 3), (1, 2)):
        path = resume.place(tmp_path, age)
        path.write_bytes(path.read_bytes()[:-100])
        assert resume.load(tmp_path)["step"] == older
        assert f"{path} is damaged" in capsys.readouterr().out
    resume.place(tmp_path, 2).write_bytes(b"nothing")
    with pytest.raises(ValueError, match="checkpoint.2.pt is damaged"):
        resume.load(tmp_path)


def test_a_kill_between_two_renames_loses_nothing(tmp_path, monkeypatch):
    resume.save(tmp_path, {"step": 1}, keep=2)
    honest, calls = os.replace, []

    def killed(source, destination):
        if calls:
            raise KeyboardInterrupt
        calls.append(destination)
        honest(source, destination)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        resume.save(tmp_path, {"step": 2}, keep=2)
    assert calls == [resume.place(tmp_path, 1)] and not resume.place(tmp_path).exists()
    assert resume.load(tmp_path)["step"] == 1


FULL = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
import pathlib, torch, files, resume
state = {"step": 2, "weights": torch.zeros(100_000)}
sys.exit(files.run_command(lambda: resume.save(pathlib.Path(sys.argv[1]), state, keep=2)))
"""


def test_a_full_disk_is_one_line_and_the_checkpoint_before_is_intact(tmp_path):
    resume.save(tmp_path, {"step": 1}, keep=2)
    done = subprocess.run(
        [sys.executable, "-c", FULL, tmp_path], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert "intact" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.pt"]
    assert resume.load(tmp_path)["step"] == 1


def test_a_step_is_sound_if_it_is_finite_and_not_far_from_those_before():
    health = {}
    assert all(resume.sound(1.0, norm, health, 10.0) for norm in (275, *[1.0] * 60))
    assert health["sound"] == 61 and 1 < health["norm"] < 30
    nan, inf = float("nan"), float("inf")
    assert not resume.sound(nan, 1.0, health, 10.0) and not resume.sound(1.0, inf, health, 10.0)
    assert health["in_a_row"] == 2
    assert resume.sound(1.0, 1.0, health, 10.0) and health["in_a_row"] == 0
    assert not resume.sound(1.0, 1e3, health, 10.0) and resume.sound(1.0, 1e3, health, 0)
    assert health["skipped"] == 3


def test_damaged_checkpoints_step_aside(tmp_path):
    for step in range(3):
        resume.save(tmp_path, {"step": step}, keep=2)
    resume.place(tmp_path).write_bytes(b"nothing")
    saved = resume.load(tmp_path)
    resume.agree(saved, torch.zeros(1))
    resume.save(tmp_path, {"step": 5}, keep=2)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["checkpoint.1.pt", "checkpoint.damaged", "checkpoint.pt"]
    resume.place(tmp_path).unlink()
    assert resume.load(tmp_path)["step"] == 1


def test_processes_that_do_not_share_a_disk_are_told(monkeypatch):
    texts, other = torch.arange(6), torch.arange(6) + 1
    theirs = []  # what the other process sends
    monkeypatch.setattr(distributed, "size", lambda: 2)
    monkeypatch.setattr(distributed, "total", lambda x: theirs.append(x) or 2 * x)
    resume.agree(None, texts)
    resume.agree(None, other)
    for sent, word in zip(theirs, (None, "different references")):
        monkeypatch.setattr(distributed, "total", lambda x, sent=sent: x + sent)
        if word:
            with pytest.raises(ValueError, match=word):
                resume.agree(None, texts)
            continue
        resume.agree(None, texts)
        with pytest.raises(ValueError, match="goes on from step 3"):
            resume.agree({"step": 3, "damaged": []}, texts)


@pytest.mark.parametrize("bad", [{2}, {1, 2, 3, 4}])
def test_a_step_that_is_not_finite_changes_nothing_and_many_end_the_run(tmp_path, monkeypatch, bad):
    honest, weights = steps.step_loss, []
    target, references = setup()
    drafter = small_drafter(target)

    def broken(*args):
        weights.append(drafter.fc.weight.clone())
        value, figures = honest(*args)
        return value * float("nan") if len(weights) in bad else value, figures

    monkeypatch.setattr(steps, "step_loss", broken)
    trunks, measure = Trunks(target, references, 1.0), Measure([[1, 2]], 8, STOP, 0)
    config = dataclasses.replace(CONFIG, max_skipped=3)
    if len(bad) > 1:
        with pytest.raises(ValueError, match="3 steps in a row"):
            training.train(config, drafter, trunks, measure, tmp_path)
        saved = Drafter.from_pretrained(tmp_path / "sound", target)  # to go on from, elsewhere
        assert torch.equal(saved.fc.weight, weights[0].bfloat16())
        return
    totals = training.train(config, drafter, trunks, measure, tmp_path)
    moved = [not torch.equal(a, b) for a, b in zip(weights, weights[1:])]
    assert moved == [True, False, True] and totals["health"]["skipped"] == 1
    assert drafter.fc.weight.isfinite().all()


# --------------------------------------------------------------------- runs that are interrupted

LONGER = "--steps 60 --eval-every 20 --save-every 3 --matrix-lr 0.01 --lr 1e-3".split()


def begin(folders, cwd, out: str, processes: int) -> subprocess.Popen:
    return subprocess.Popen(
        command(folders, processes, *LONGER, "--out", out),
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )


def steps_of(log) -> int:
    return len(log.read_text().splitlines()) if log.is_file() else 0


def wait_for_a_step(process, log, more: int) -> None:
    before, deadline = steps_of(log), time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if steps_of(log) >= min(before + more, 58):
            return
        time.sleep(0.02)


def weights_checksum(folder):
    return torch.load(folder / "checkpoint.pt", weights_only=True)["drafter"]


def test_a_run_that_is_asked_to_end_saves_and_goes_on_bit_for_bit(folders, tmp_path):
    whole = begin(folders, tmp_path, "whole", 0)
    assert whole.wait(300) == 0, whole.stderr.read()
    parts = begin(folders, tmp_path, "parts", 0)
    wait_for_a_step(parts, tmp_path / "parts/specopd/log.jsonl", 5)
    parts.send_signal(signal.SIGTERM)
    assert parts.wait(60) == 143
    last = parts.stderr.read().strip().splitlines()[-1]
    saved = resume.load(tmp_path / "parts/specopd")["step"]
    assert f"step {saved} of 60 is saved" in last and saved >= 5
    assert begin(folders, tmp_path, "parts", 0).wait(300) == 0
    one, two = (weights_checksum(tmp_path / out / "specopd") for out in ("whole", "parts"))
    assert all(torch.equal(tensor, two[name]) for name, tensor in one.items())


def test_kills_at_random_moments_lose_nothing(folders, tmp_path):
    """Two processes, killed (-9) again and again, then left alone: the uninterrupted run's weights,
    bit for bit, and at no time a checkpoint that cannot be read."""
    whole = begin(folders, tmp_path, "whole", 2)
    assert whole.wait(600) == 0, whole.stderr.read()
    log, generator = tmp_path / "parts/specopd/log.jsonl", random.Random(0)
    for _ in range(int(os.environ.get("KILLS", 2))):
        process = begin(folders, tmp_path, "parts", 2)
        wait_for_a_step(process, log, generator.randrange(1, 6))
        time.sleep(generator.random() * 0.3)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for path in tmp_path.glob("parts/specopd/checkpoint*.pt"):
            torch.load(path, weights_only=True)
    last = begin(folders, tmp_path, "parts", 2)
    assert last.wait(600) == 0, last.stderr.read()
    one, two = (weights_checksum(tmp_path / out / "specopd") for out in ("whole", "parts"))
    assert all(torch.equal(tensor, two[name]) for name, tensor in one.items())
    texts = [(tmp_path / out / "specopd/log.jsonl").read_text() for out in ("whole", "parts")]
    assert [json.loads(line) for line in texts[0].splitlines()] == [
        json.loads(line) for line in texts[1].splitlines()
    ]
    assert files.read_json(tmp_path / "parts/specopd/summary.json")["best"]
