"""Runs that something happens to: one clear line, code 2, and nothing that was made is touched.

Kills and full disks stand in test_interrupted_runs.py and tests/support/test_resume.py.
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
from safetensors import safe_open
from safetensors.torch import save_file

import train as training
from small import ROOT, free_port
from small_runs import SMALL_RUN, train_by_command, train_command
from support.flags import run_command
from support.resume import NEWEST, OLDER

pytestmark = pytest.mark.slow

FLAGS = """--save-every 1 --target target --drafter drafter --out run --corpus corpus""".split()
STATES = [f"run/specopd/{NEWEST}", f"run/specopd/{OLDER}"]
TARGET = "target/model.safetensors"
DRAFTER = "drafter/model.safetensors"
REFERENCES = "run/references.safetensors"


def train_here(monkeypatch, *flags) -> int:
    """Run train.py in this process -> its exit code."""
    Path("small_run.json").write_text(json.dumps(SMALL_RUN))
    arguments = ["train.py", "--config", "small_run.json", *FLAGS, *flags]
    monkeypatch.setattr(sys, "argv", arguments)
    try:
        return run_command(training.main)
    except SystemExit as stop:
        return stop.code


@pytest.fixture(scope="module")
def begun(folders, tmp_path_factory):
    """A folder with a run at step 2 of 4, its target, drafter and corpus."""
    home = tmp_path_factory.mktemp("begun")
    for name in ("target", "drafter"):
        shutil.copytree(folders / name, home / name)
    (home / "corpus").mkdir()
    for n in range(8):
        (home / f"corpus/{n}.txt").write_text(f"def f{n}(x):\n    return x + {n}\n" * 40)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        assert train_here(patch, "--stop-after", "2") == 0
    assert (home / STATES[1]).is_file()
    return home


@pytest.fixture
def home(begun, tmp_path, monkeypatch):
    """A copy of `begun`, as the current folder."""
    shutil.copytree(begun, tmp_path / "home")
    monkeypatch.chdir(tmp_path / "home")
    return tmp_path / "home"


# ------------------------------------------------------------------------------- what may happen


def cut(*names):
    def spoil():
        for name in names:
            content = Path(name).read_bytes()
            Path(name).write_bytes(content[: len(content) // 2])

    return spoil


def remove(name):
    return lambda: shutil.rmtree(name) if os.path.isdir(name) else os.remove(name)


def overwrite(text, *names):
    return lambda: [Path(name).write_text(text) for name in names]


def change_tensors(name, change):
    def spoil():
        with safe_open(name, "pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}
            metadata = file.metadata()
        change(tensors)
        save_file(tensors, name, metadata)

    return spoil


def change_fields(name, **changes):
    return lambda: Path(name).write_text(json.dumps(json.loads(Path(name).read_text()) | changes))


def empty_the_corpus():
    for path in Path("corpus").iterdir():
        path.write_text("")


def replace_states(state):
    return lambda: [torch.save(state, name) for name in STATES]


def forget_a_tensor():
    for name in STATES:
        state = torch.load(name, weights_only=True)
        del state["drafter"]["fc.weight"]
        torch.save(state, name)


def leave_a_drafter_without_its_state():
    for name in STATES:
        os.remove(name)
    shutil.copy(DRAFTER, "run/specopd")


def scale_head(tensors):
    tensors["lm_head.weight"] = tensors["lm_head.weight"] * 1.5


def no_number(tensors):
    tensors["fc.weight"] = tensors["fc.weight"] * torch.nan


def no_texts(tensors):
    tensors.update({name: tensor[:0] for name, tensor in tensors.items()})


TAP_9 = {"target_layer_ids": [0, 9], "mask_token_id": 258}
FAULTS = {  # what happens between two sittings, flags of the second, words of its last line
    "training states cut short": (cut(*STATES), [], "is damaged"),
    "training states that are text": (overwrite("x", *STATES), [], "is damaged"),
    "training states of something else": (replace_states({"step": 2}), [], "another --out"),
    "training states that are a list": (replace_states([1]), [], "is damaged"),
    "training states that lack a tensor": (forget_a_tensor, [], "does not fit this drafter"),
    "another seed": (None, ["--seed", "1"], "seed = 0"),
    "another batch": (None, ["--batch-size", "2"], "batch_size = 4"),
    "other anchors": (None, ["--num-anchors", "3"], "num_anchors = 4"),
    "fewer steps": (None, ["--steps", "3"], "steps = 4"),
    "another rate": (None, ["--lr", "0.1"], "lr = 0.001"),
    "another loss": (None, ["--loss", "kl"], "loss = 'e2e_tv'"),
    "other arithmetic": (None, ["--precision", "bfloat16"], "precision = 'float32'"),
    "another target": (
        change_tensors(TARGET, scale_head),
        [],
        "other weights or another config of target",
    ),
    "the target's weights gone": (remove(TARGET), [], "target"),
    "the target's weights cut": (cut(TARGET), [], TARGET),
    "a tensor of the target gone": (
        change_tensors(TARGET, lambda tensors: tensors.pop("model.norm.weight")),
        [],
        "model.norm.weight",
    ),
    "the target's config cut": (cut("target/config.json"), [], "not valid JSON"),
    "an unknown family": (change_fields("target/config.json", model_type="rwkv"), [], "rwkv"),
    "an unknown scaling": (
        change_fields("target/config.json", rope_scaling={"type": "yarn"}),
        [],
        "rope",
    ),
    "the tokenizer gone": (remove("target/tokenizer.json"), [], "tokenizer.json"),
    "a tokenizer without a vocabulary": (
        change_fields("target/tokenizer.json", model={"type": "BPE"}),
        [],
        "form of a byte-level BPE",
    ),
    "a stop id that is a word": (
        change_fields("target/generation_config.json", eos_token_id="end"),
        [],
        "is not among the",
    ),
    "the drafter gone": (remove("drafter"), [], "drafter"),
    "the drafter's weights cut": (cut(DRAFTER), [], DRAFTER),
    "a tensor of the drafter gone": (
        change_tensors(DRAFTER, lambda tensors: tensors.pop("fc.weight")),
        [],
        "fc.weight",
    ),
    "a tensor of the wrong shape": (
        change_tensors(DRAFTER, lambda tensors: tensors.update({"norm.weight": torch.ones(7)})),
        [],
        "norm",
    ),
    "a tap beyond the target": (change_fields("drafter/config.json", dflash_config=TAP_9), [], "9"),
    "weights that are no numbers": (change_tensors(DRAFTER, no_number), [], "fc.weight holds NaN"),
    "references cut": (cut(REFERENCES), [], "references.safetensors"),
    "references of other tensors": (
        change_tensors(REFERENCES, lambda tensors: tensors.pop("lengths")),
        [],
        "references.safetensors",
    ),
    "references of another tokenizer": (
        change_tensors(REFERENCES, lambda tensors: tensors["tokens"].add_(9999)),
        [],
        "are they its own",
    ),
    "references without a text": (change_tensors(REFERENCES, no_texts), [], "no references"),
    "references shorter than they say": (
        change_tensors(REFERENCES, lambda tensors: tensors["lengths"].add_(9999)),
        [],
        "lengths do not fit",
    ),
    "references named that are not there": (None, ["--references", "no.safetensors"], "no.safe"),
    "the corpus gone": (remove("corpus"), [], "corpus"),
    "the corpus emptied": (empty_the_corpus, [], "empty"),
    "--out is a file": (overwrite("", "file"), ["--out", "file"], "file"),
    "a drafter without its training state": (
        leave_a_drafter_without_its_state,
        [],
        "another --out",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_happens_between_two_sittings_is_one_line(home, monkeypatch, capsys, name):
    spoil, flags, words = FAULTS[name]
    if spoil:
        spoil()
    before = {path: path.read_bytes() for path in home.rglob("*") if path.is_file()}
    capsys.readouterr()
    assert train_here(monkeypatch, *flags) == 2
    lines = [line for line in capsys.readouterr().err.replace("\r", "\n").splitlines() if line]
    messages = [line for line in lines if "it/s]" not in line and "s/it]" not in line]
    assert words in messages[-1] and not any("Traceback" in line for line in messages), lines
    for path, content in before.items():
        assert path.read_bytes() == content, path


def test_the_run_itself_goes_on(home, monkeypatch):
    assert train_here(monkeypatch) == 0 and (home / "run/specopd/summary.json").is_file()


def test_a_log_that_is_gone_does_not_end_the_run(home, monkeypatch):
    log = home / "run/specopd/log.jsonl"
    log.unlink()
    assert train_here(monkeypatch) == 0
    assert [json.loads(line)["step"] for line in log.open()] == [3, 4]
    assert (home / "run/specopd/summary.json").is_file()


def test_a_rate_beyond_all_measure_ends_in_a_line(home, monkeypatch, capsys):
    wild = ("--lr", "1e30", "--steps", "9", "--eval-every", "9")
    assert train_here(monkeypatch, "--out", "wild", *wild) == 2
    assert "not finite" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    "flags, words",
    [
        (("--drafter", "none/at/all"), "none/at/all/config.json is missing"),
        (("--block-size", "7"), "cannot change it"),
    ],
)
def test_a_drafter_that_does_not_fit_is_named_before_texts_are_made(
    home, monkeypatch, capsys, flags, words
):
    assert train_here(monkeypatch, "--out", "new", *flags) == 2
    assert words in capsys.readouterr().err.splitlines()[-1]
    assert not Path("new/references.safetensors").exists()


# --------------------------------------------------------------------------------------- processes


@pytest.mark.parametrize(
    "flags, words",
    [
        (("--grad-accum", 4), "--batch-size 4 is no multiple of the 2 processes times"),
        (("--mode", "story"), "several processes go with one --mode"),
        (("--references", "no.safetensors"), "no.safetensors"),
    ],
)
def test_two_processes_end_in_a_line_each_when_flags_do_not_fit(folders, tmp_path, flags, words):
    done = train_by_command(folders, tmp_path, 2, "--out", "two", *flags)
    assert done.returncode != 0 and words in done.stderr, done.stderr[-2000:]
    assert 'train.py", line' not in done.stderr  # the only traceback is torchrun's own
    assert not (tmp_path / "two/specopd").exists()


def first_of_two(port: int) -> dict:
    """The environment of the first of two processes."""
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return os.environ | ranks | address | {"OMP_NUM_THREADS": "1"}


def test_a_port_in_use_is_said(folders, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = subprocess.run(
            train_command(folders, 0, "--out", "two"),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
            env=first_of_two(taken.getsockname()[1]),
        )
    assert done.returncode == 2 and "in use" in done.stderr.strip().splitlines()[-1], done.stderr


ALONE = """
import datetime, sys
from support import distributed
from support.flags import run_command
distributed.START_TIMEOUT = datetime.timedelta(seconds=2)
sys.exit(run_command(lambda: distributed.start("cpu")))
"""


def test_fewer_processes_than_were_promised_do_not_wait_for_ever():
    done = subprocess.run(
        [sys.executable, "-c", ALONE],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        env=first_of_two(free_port()),
    )
    assert done.returncode == 2 and "fewer of them than WORLD_SIZE" in done.stderr
    assert "Traceback" not in done.stderr


def test_output_that_nobody_reads_is_one_line():
    plan = [sys.executable, "-m", "lab", "plan", "--mode", "specopd", "--target", "8B"]
    process = subprocess.Popen(
        plan, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    process.stdout.close()  # as `| head` does
    message = process.stderr.read()
    assert process.wait(60) == 2 and len(message.strip().splitlines()) == 1
    assert "nobody reads" in message


def test_a_process_that_dies_ends_the_others_within_a_minute(folders, tmp_path):
    process = subprocess.Popen(
        train_command(folders, 2, "--out", "two", "--steps", "400", "--eval-every", "400"),
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
    message = process.communicate(timeout=60)[1]
    assert time.monotonic() - begin < 60 and process.returncode != 0 and "SIGKILL" in message
    for path in tmp_path.glob("two/specopd/training_state*.pt"):
        torch.load(path, weights_only=True)
