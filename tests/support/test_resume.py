"""Training states, stages and logs survive what happens to a run."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from small import ROOT
from support import distributed
from support.resume import (
    NEWEST,
    OLDER,
    EndRequest,
    check_processes_agree,
    cut_log,
    load_training_state,
    restore,
    save_training_state,
    set_damaged_aside,
    stage,
)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def test_two_training_states_are_kept_and_a_damaged_one_is_passed_over(tmp_path, capsys):
    assert load_training_state(tmp_path) is None
    for step in range(5):
        save_training_state(tmp_path, {"step": step})
    assert names_in(tmp_path) == ["training_state.1.pt", "training_state.pt"]
    assert load_training_state(tmp_path)["step"] == 4
    cut_short(tmp_path / NEWEST)
    assert load_training_state(tmp_path)["step"] == 3
    assert f"{tmp_path / NEWEST} is damaged" in capsys.readouterr().out
    (tmp_path / OLDER).write_bytes(b"nothing")
    with pytest.raises(ValueError, match="training_state.1.pt is damaged"):
        load_training_state(tmp_path)


def test_a_kill_between_two_renames_loses_nothing(tmp_path, monkeypatch):
    save_training_state(tmp_path, {"step": 1})
    honest = os.replace
    renamed = []

    def killed(source, destination):
        if renamed:
            raise KeyboardInterrupt
        renamed.append(destination)
        honest(source, destination)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        save_training_state(tmp_path, {"step": 2})
    assert renamed == [tmp_path / OLDER] and not (tmp_path / NEWEST).exists()
    assert load_training_state(tmp_path)["step"] == 1


FULL_DISK = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
import pathlib, torch
from support.flags import run_command
from support.resume import save_training_state
state = {"step": 2, "weights": torch.zeros(100_000)}
sys.exit(run_command(lambda: save_training_state(pathlib.Path(sys.argv[1]), state)))
"""


@pytest.mark.slow
def test_a_full_disk_is_one_line_and_the_state_before_is_intact(tmp_path):
    save_training_state(tmp_path, {"step": 1})
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, tmp_path], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert "intact" in done.stderr
    assert names_in(tmp_path) == ["training_state.pt"]
    assert load_training_state(tmp_path)["step"] == 1


def test_damaged_training_states_step_aside(tmp_path):
    for step in range(3):
        save_training_state(tmp_path, {"step": step})
    (tmp_path / NEWEST).write_bytes(b"nothing")
    state = load_training_state(tmp_path)
    set_damaged_aside(state)
    save_training_state(tmp_path, {"step": 5})
    assert names_in(tmp_path) == [OLDER, "training_state.damaged", NEWEST]
    (tmp_path / NEWEST).unlink()
    assert load_training_state(tmp_path)["step"] == 1


def test_processes_that_do_not_share_a_disk_are_told(monkeypatch):
    texts = torch.arange(6)
    sent = []
    monkeypatch.setattr(distributed, "num_processes", lambda: 2)
    monkeypatch.setattr(distributed, "gather_numbers", lambda row: sent.append(row) or [row, row])
    check_processes_agree(None, texts)
    check_processes_agree(None, texts + 1)
    same, other = sent
    monkeypatch.setattr(distributed, "gather_numbers", lambda row: [row, same])
    check_processes_agree(None, texts)
    with pytest.raises(ValueError, match=r"go on from steps \[3, -1\]"):
        check_processes_agree({"step": 3}, texts)
    monkeypatch.setattr(distributed, "gather_numbers", lambda row: [row, other])
    with pytest.raises(ValueError, match="different references"):
        check_processes_agree(None, texts)


def test_a_training_state_that_does_not_fit_is_named(tmp_path):
    layer = torch.nn.Linear(2, 3)
    optimizer = torch.optim.AdamW(layer.parameters())
    state = {"drafter": layer.state_dict(), "optimizers": [optimizer.state_dict()], "path": "here"}
    other = torch.nn.Linear(2, 3)
    restore(state, other, [torch.optim.AdamW(other.parameters())])
    assert torch.equal(other.weight, layer.weight)
    for drafter, optimizers in ((torch.nn.Linear(2, 4), [optimizer]), (layer, [])):
        with pytest.raises(ValueError, match="here does not fit this drafter"):
            restore(state, drafter, optimizers)


def test_a_log_ahead_of_its_training_state_is_cut(tmp_path):
    path = tmp_path / "log.jsonl"
    cut_log(path, 0)
    assert path.read_text() == ""
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    cut_log(path, 2)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_a_stage_is_done_once_and_must_have_been_made_alike(tmp_path, capsys):
    assert stage(tmp_path / "a", {"seed": 1}, lambda: {"bits": 2.0}) == {"bits": 2.0}
    assert stage(tmp_path / "a", {"seed": 1}, lambda: 1 / 0) == {"bits": 2.0}
    assert "a is there, kept" in capsys.readouterr().out
    with pytest.raises(ValueError, match="seed = 1, this run has 2"):
        stage(tmp_path / "a", {"seed": 2}, lambda: 1 / 0)
    (tmp_path / "a" / "stage.json").write_text("{}")
    with pytest.raises(ValueError, match="does not say what was made"):
        stage(tmp_path / "a", {"seed": 1}, lambda: 1 / 0)


def test_a_stage_leaves_a_folder_alone_that_holds_something_else(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"somebody's")
    with pytest.raises(ValueError, match="another --out"):
        stage(tmp_path, {}, lambda: 1 / 0)
    assert path.read_bytes() == b"somebody's"
    save_training_state(tmp_path, {"step": 1})  # a training that was stopped: it may go on
    assert stage(tmp_path, {}, lambda: {}) == {}


def test_an_end_request_is_noted_and_does_not_end_the_process():
    before = signal.getsignal(signal.SIGTERM)
    with EndRequest() as end_request:
        assert not end_request.received
        os.kill(os.getpid(), signal.SIGTERM)
        assert end_request.received
    assert signal.getsignal(signal.SIGTERM) is before
