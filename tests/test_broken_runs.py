"""Runs that something happens to: one clear line, code 2, and nothing that was kept is touched.

What a command line alone can get wrong stands in test_lessons.py, kills and full disks in
test_resume.py, servers in test_references.py. `pytest tests/test_broken_runs.py`
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from safetensors import safe_open
from safetensors.torch import save_file
from test_distributed import command, free_port, train

import train as training
from support import files

FLAGS = """--mode specopd --steps 4 --batch-size 4 --num-anchors 4 --num-references 8
    --prompt-length 16 --response-length 24 --eval-prompts 4 --eval-tokens 8 --save-every 1
    --warmup 1 --matrix-lr 0 --lr 1e-4 --target target --drafter drafter --out run
    --corpus corpus""".split()


def ends(monkeypatch, *more) -> int:
    monkeypatch.setattr(sys, "argv", ["train.py", *FLAGS, *more])
    try:
        return files.run_command(training.main)
    except SystemExit as stop:
        return stop.code


@pytest.fixture(scope="module")
def begun(folders, tmp_path_factory):
    """A run at step 2 of 4, with all it was given."""
    home = tmp_path_factory.mktemp("begun")
    for name in ("target", "drafter"):
        shutil.copytree(folders / name, home / name)
    (home / "corpus").mkdir()
    for n in range(8):
        (home / f"corpus/{n}.txt").write_text(f"def f{n}(x):\n    return x + {n}\n" * 40)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        assert ends(patch, "--stop-after", "2") == 0
    assert (home / "run/specopd/checkpoint.1.pt").is_file()
    return home


def cut(*names):
    def broken():
        for name in names:
            data = open(name, "rb").read()
            open(name, "wb").write(data[: len(data) // 2])

    return broken


def gone(name):
    return lambda: shutil.rmtree(name) if os.path.isdir(name) else os.remove(name)


def text(name, content):
    return lambda: open(name, "w").write(content)


def tensors(name, change):
    def broken():
        with safe_open(name, "pt") as file:
            held, known = {key: file.get_tensor(key) for key in file.keys()}, file.metadata()
        change(held)
        save_file(held, name, known)

    return broken


def changed(name, **changes):
    def broken():
        held = json.loads(open(name).read())
        open(name, "w").write(json.dumps(held | changes))

    return broken


def emptied():
    for name in os.listdir("corpus"):
        open(f"corpus/{name}", "w").close()


def checkpoints(state):
    def broken():
        for name in ("checkpoint.pt", "checkpoint.1.pt"):
            torch.save(state, f"run/specopd/{name}")

    return broken


def forgotten():
    for name in KEPT:
        held = torch.load(name, weights_only=True)
        del held["drafter"]["fc.weight"]
        torch.save(held, name)


def scaled(factor):
    return lambda held: held.update({"lm_head.weight": held["lm_head.weight"] * factor})


KEPT = ["run/specopd/checkpoint.pt", "run/specopd/checkpoint.1.pt"]
TARGET, DRAFTER = "target/model.safetensors", "drafter/model.safetensors"
REFS = "run/references.safetensors"
FAULTS = {  # what happens between two sittings, flags of the second, words of its last line
    "checkpoints cut short": (cut(*KEPT), [], "is damaged"),
    "a checkpoint that is text": (lambda: [text(n, "x")() for n in KEPT], [], "is damaged"),
    "a checkpoint of something else": (checkpoints({"step": 2}), [], "no checkpoint of a training"),
    "a checkpoint that is a list": (checkpoints([1]), [], "is damaged"),
    "a checkpoint that lacks a tensor": (forgotten, [], "does not fit this drafter"),
    "another seed": (None, ["--seed", "1"], "seed = 0"),
    "another batch": (None, ["--batch-size", "2"], "batch_size = 4"),
    "other anchors": (None, ["--num-anchors", "3"], "num_anchors = 4"),
    "fewer steps": (None, ["--steps", "3"], "steps = 4"),
    "another rate": (None, ["--lr", "0.1"], "lr = 0.0001"),
    "another loss": (None, ["--loss", "kl"], "loss = 'e2e_tv'"),
    "other arithmetic": (None, ["--precision", "bfloat16"], "precision = 'float32'"),
    "another target": (tensors(TARGET, scaled(1.5)), [], "target = "),
    "the target's weights gone": (gone(TARGET), [], "target"),
    "the target's weights cut": (cut(TARGET), [], TARGET),
    "a tensor of the target gone": (
        tensors(TARGET, lambda held: held.pop("model.norm.weight")),
        [],
        "model.norm.weight",
    ),
    "the target's config cut": (cut("target/config.json"), [], "not valid JSON"),
    "an unknown family": (changed("target/config.json", model_type="rwkv"), [], "rwkv"),
    "an unknown scaling": (
        changed("target/config.json", rope_scaling={"type": "yarn"}),
        [],
        "rope",
    ),
    "the tokenizer gone": (gone("target/tokenizer.json"), [], "tokenizer.json"),
    "a tokenizer without a vocabulary": (
        changed("target/tokenizer.json", model={"type": "BPE"}),
        [],
        "form of a byte-level BPE",
    ),
    "a stop id that is a word": (
        changed("target/generation_config.json", eos_token_id="end"),
        [],
        "is no id",
    ),
    "the drafter gone": (gone("drafter"), [], "drafter"),
    "the drafter's weights cut": (cut(DRAFTER), [], DRAFTER),
    "a tensor of the drafter gone": (
        tensors(DRAFTER, lambda held: held.pop("fc.weight")),
        [],
        "fc.weight",
    ),
    "a tensor of the wrong shape": (
        tensors(DRAFTER, lambda held: held.update({"norm.weight": torch.ones(7)})),
        [],
        "norm",
    ),
    "a tap beyond the target": (
        changed(
            "drafter/config.json", dflash_config={"target_layer_ids": [0, 9], "mask_token_id": 258}
        ),
        [],
        "9",
    ),
    "weights that are no numbers": (
        tensors(DRAFTER, lambda held: held.update({"fc.weight": held["fc.weight"] * torch.nan})),
        [],
        "fc.weight holds NaN",
    ),
    "references cut": (cut(REFS), [], "references.safetensors"),
    "references of other tensors": (
        tensors(REFS, lambda held: held.pop("lengths")),
        [],
        "references.safetensors",
    ),
    "references of another tokenizer": (
        tensors(REFS, lambda held: held["tokens"].add_(9999)),
        [],
        "are they its own",
    ),
    "references without a text": (
        tensors(REFS, lambda held: held.update({n: held[n][:0] for n in held})),
        [],
        "no references",
    ),
    "references shorter than they say": (
        tensors(REFS, lambda held: held["lengths"].add_(9999)),
        [],
        "lengths do not fit",
    ),
    "references named that are not there": (None, ["--references", "no.safetensors"], "no.safe"),
    "the corpus gone": (gone("corpus"), [], "corpus"),
    "the corpus emptied": (emptied, [], "empty"),
    "--out is a file": (text("file", ""), ["--out", "file"], "file"),
    "a drafter without its checkpoint": (
        lambda: [os.remove(n) for n in KEPT] + [shutil.copy(DRAFTER, "run/specopd")],
        [],
        "another --out",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_happens_between_two_sittings(begun, tmp_path, monkeypatch, capsys, name):
    broken, more, words = FAULTS[name]
    home = tmp_path / "home"
    shutil.copytree(begun, home)
    monkeypatch.chdir(home)
    if broken:
        broken()
    before = {path: path.read_bytes() for path in home.rglob("*") if path.is_file()}
    capsys.readouterr()
    assert ends(monkeypatch, *more) == 2
    lines = [line for line in capsys.readouterr().err.replace("\r", "\n").splitlines() if line]
    said = [line for line in lines if "it/s]" not in line and "s/it]" not in line]
    assert words in said[-1] and not any("Traceback" in line for line in said), lines
    for path, held in before.items():
        assert path.read_bytes() == held, path


def test_there_are_thirty():
    assert len(FAULTS) >= 30


def test_the_run_itself_is_sound(begun, tmp_path, monkeypatch):
    shutil.copytree(begun, tmp_path / "home")
    monkeypatch.chdir(tmp_path / "home")
    assert ends(monkeypatch) == 0 and (tmp_path / "home/run/specopd/summary.json").is_file()


def test_a_rate_beyond_all_measure_ends_in_a_line(begun, tmp_path, monkeypatch, capsys):
    shutil.copytree(begun, tmp_path / "home")
    monkeypatch.chdir(tmp_path / "home")
    wild = ("--lr", "1e30", "--max-skipped", "2", "--steps", "9", "--eval-every", "9")
    assert ends(monkeypatch, "--out", "wild", *wild) == 2
    assert "2 steps in a row went wrong" in capsys.readouterr().err.splitlines()[-1]


def test_a_drafter_that_does_not_fit_is_named_before_texts_are_made(
    begun, tmp_path, monkeypatch, capsys
):
    shutil.copytree(begun, tmp_path / "home")
    monkeypatch.chdir(tmp_path / "home")
    for more, words in (
        (("--drafter", "none/at/all"), "none/at/all/config.json is missing"),
        (("--block-size", "7"), "cannot change it"),
    ):
        assert ends(monkeypatch, "--out", "new", *more) == 2
        assert words in capsys.readouterr().err.splitlines()[-1]
        assert not Path("new/references.safetensors").exists()


def test_a_log_that_lost_lines_is_said_and_the_run_goes_on(begun, tmp_path, monkeypatch, capsys):
    shutil.copytree(begun, tmp_path / "home")
    monkeypatch.chdir(tmp_path / "home")
    log = Path("run/specopd/log.jsonl")
    log.unlink()
    assert ends(monkeypatch, "--stop-after", "3") == 0
    assert "has lost 2 of 2 lines" in capsys.readouterr().out
    for age in range(2):  # of step 2: the checkpoint of step 3 was not written any more
        shutil.copy(begun / f"run/specopd/checkpoint{'.1' * age}.pt", log.parent)
    assert ends(monkeypatch) == 0 and "has lost 2 of 2 lines" in capsys.readouterr().out
    assert [json.loads(line)["step"] for line in log.open()] == [3, 4]
    log.write_bytes(log.read_bytes().replace(b'{"step": 3', b'\xff\0"step": 3'))
    (log.parent / "summary.json").unlink()
    assert ends(monkeypatch) == 0 and "has lost 3 of 4 lines" in capsys.readouterr().out
    for name in ("log.jsonl", "summary.json"):  # at the last step
        (log.parent / name).unlink()
    assert ends(monkeypatch) == 0 and (log.parent / "summary.json").is_file()


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_memory_that_does_not_suffice_is_a_line(error, capsys):
    def main():
        raise error

    assert files.run_command(main) == 2
    said = capsys.readouterr().err
    assert "out of memory, take fewer at once" in said and len(said.splitlines()) == 1


def test_two_processes_end_in_a_line_each_when_they_do_not_fit(folders, tmp_path):
    """Settings that one process could have; and a disk that is not the same for both."""
    for more, words in (
        (("--grad-accum", 4), "--batch-size 4 is no multiple of the 2 processes times"),
        (("--mode", "story"), "several processes go with one --mode"),
        (("--references", "no.safetensors"), "no.safetensors"),
    ):
        done = train(folders, tmp_path, 2, "--out", "two", *more)
        assert done.returncode != 0 and words in done.stderr, done.stderr[-2000:]
        assert 'train.py", line' not in done.stderr  # the one traceback is torchrun's own
    assert not (tmp_path / "two/specopd").exists()


def test_a_port_in_use_is_said(folders, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        asked = command(folders, 0, "--out", "two")
        ranks = {
            "RANK": "0",
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(taken.getsockname()[1]),
            "OMP_NUM_THREADS": "1",
        }
        done = subprocess.run(
            asked, cwd=tmp_path, capture_output=True, text=True, timeout=60, env=os.environ | ranks
        )
    assert done.returncode == 2 and "in use" in done.stderr.strip().splitlines()[-1], done.stderr


ALONE = """
import datetime, sys, distributed, files
distributed.JOINING = datetime.timedelta(seconds=2)
sys.exit(files.run_command(lambda: distributed.start("cpu")))
"""


def test_fewer_processes_than_were_promised_do_not_wait_for_ever():
    ranks = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    done = subprocess.run(
        [sys.executable, "-c", ALONE],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | ranks,
    )
    assert done.returncode == 2 and "fewer of them than WORLD_SIZE" in done.stderr
    assert "Traceback" not in done.stderr


def test_output_that_nobody_reads_is_one_line():
    plan = [sys.executable, ROOT / "train.py", "--plan", "--mode", "specopd", "--target", "8B"]
    process = subprocess.Popen(plan, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()  # as `| head` does
    said = process.stderr.read()
    assert process.wait(60) == 2 and len(said.strip().splitlines()) == 1 and "nobody" in said


def test_a_process_that_dies_ends_the_others_within_a_minute(folders, tmp_path):
    asked = command(folders, 2, "--out", "two", "--steps", "400", "--eval-every", "400")
    process = subprocess.Popen(
        asked,
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    log = tmp_path / "two/specopd/log.jsonl"
    deadline = time.monotonic() + 120
    while not (log.is_file() and log.read_text().count("\n") > 3) and time.monotonic() < deadline:
        time.sleep(0.05)
    children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True)
    ranks = sorted(map(int, children.stdout.split()))
    assert len(ranks) == 2
    os.kill(ranks[1], signal.SIGKILL)
    begin = time.monotonic()
    said = process.communicate(timeout=60)[1]
    assert time.monotonic() - begin < 60 and process.returncode != 0 and "SIGKILL" in said
    for path in tmp_path.glob("two/specopd/checkpoint*.pt"):
        torch.load(path, weights_only=True)
