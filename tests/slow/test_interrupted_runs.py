"""Runs that are asked to end, or killed. `KILLS=20 pytest -m slow ...` for a long evening."""

import json
import os
import random
import signal
import subprocess
import time

import pytest
import torch

from hf.files import read_json
from small_runs import train_command
from support.resume import NEWEST, load_training_state

pytestmark = pytest.mark.slow

LONGER = "--steps 60 --eval-every 20 --save-every 3 --matrix-lr 0.01 --lr 1e-3".split()


def begin(folders, cwd, out: str, processes: int, *flags) -> subprocess.Popen:
    return subprocess.Popen(
        train_command(folders, processes, *LONGER, "--out", out, *flags),
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )


def num_steps(log) -> int:
    return len(log.read_text().splitlines()) if log.is_file() else 0


def wait_for_steps(process, log, more: int) -> None:
    wanted = min(num_steps(log) + more, 58)
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if num_steps(log) >= wanted:
            return
        time.sleep(0.02)


def learned(log: list[dict]) -> list[dict]:
    """What a log tells of learning: all but what a clock or the machine says."""
    clocked = ("seconds", "tokens_per_s", "memory_gib")
    return [{k: v for k, v in record.items() if k not in clocked} for record in log]


def assert_same_weights(*folders) -> None:
    one, two = (torch.load(f / NEWEST, weights_only=True)["drafter"] for f in folders)
    assert all(torch.equal(tensor, two[name]) for name, tensor in one.items())


def test_a_run_that_is_asked_to_end_saves_and_goes_on_bit_for_bit(folders, tmp_path):
    whole = begin(folders, tmp_path, "whole", 0)
    assert whole.wait(300) == 0, whole.stderr.read()
    parts = begin(folders, tmp_path, "parts", 0)
    wait_for_steps(parts, tmp_path / "parts/specopd/log.jsonl", 5)
    parts.send_signal(signal.SIGTERM)
    assert parts.wait(60) == 143
    last = parts.stderr.read().strip().splitlines()[-1]
    step = load_training_state(tmp_path / "parts/specopd")["step"]
    assert f"step {step} of 60 is saved" in last and step >= 5
    assert begin(folders, tmp_path, "parts", 0).wait(300) == 0
    assert_same_weights(tmp_path / "whole/specopd", tmp_path / "parts/specopd")


@pytest.mark.parametrize("processes", [0, 2])
def test_ctrl_c_while_measuring_ends_within_seconds_and_nothing_is_lost(
    folders, tmp_path, processes
):
    """Of one process, and of several by torchrun, which passes the signal on."""
    flags = ("--eval-every", "1", "--eval-tokens", "40", "--steps", "8")
    whole = begin(folders, tmp_path, "whole", processes, *flags)
    assert whole.wait(600) == 0, whole.stderr.read()
    parts = begin(folders, tmp_path, "parts", processes, *flags)
    wait_for_steps(parts, tmp_path / "parts/specopd/log.jsonl", 3)
    parts.send_signal(signal.SIGINT)
    sent = time.monotonic()
    message = parts.communicate(timeout=60)[1]
    assert time.monotonic() - sent < 20 and parts.returncode != 0
    assert "of 8 is saved" in message and "the same command goes on" in message
    last = begin(folders, tmp_path, "parts", processes, *flags)
    assert last.wait(600) == 0, last.stderr.read()
    assert_same_weights(tmp_path / "whole/specopd", tmp_path / "parts/specopd")


def test_kills_at_random_moments_lose_nothing(folders, tmp_path):
    """Two processes, killed (-9) again and again, then left alone: the uninterrupted run's weights,
    bit for bit, and at no time a training state that cannot be read."""
    whole = begin(folders, tmp_path, "whole", 2)
    assert whole.wait(600) == 0, whole.stderr.read()
    log = tmp_path / "parts/specopd/log.jsonl"
    generator = random.Random(0)
    for _ in range(int(os.environ.get("KILLS", 2))):
        process = begin(folders, tmp_path, "parts", 2)
        wait_for_steps(process, log, generator.randrange(1, 6))
        time.sleep(generator.random() * 0.3)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for path in tmp_path.glob("parts/specopd/training_state*.pt"):
            torch.load(path, weights_only=True)
    last = begin(folders, tmp_path, "parts", 2)
    assert last.wait(600) == 0, last.stderr.read()
    assert_same_weights(tmp_path / "whole/specopd", tmp_path / "parts/specopd")
    texts = [(tmp_path / out / "specopd/log.jsonl").read_text() for out in ("whole", "parts")]
    logs = [[json.loads(line) for line in text.splitlines()] for text in texts]
    assert learned(logs[0]) == learned(logs[1])
    assert read_json(tmp_path / "parts/specopd/summary.json")["best"]
