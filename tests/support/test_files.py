"""Files are written whole or not at all, and a folder by one run at a time."""

import multiprocessing
import os
import signal
import time

import pytest
import torch
from safetensors import safe_open

from hf.files import read_json
from support import files
from support.files import LOCK, atomic_write, locked, write_json, write_tensors


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "x.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    with pytest.raises(RuntimeError), atomic_write(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert read_json(path) == {"a": 1}
    assert [f.name for f in tmp_path.iterdir()] == ["x.json"]


def test_tensors_are_written_with_metadata_as_json(tmp_path):
    path = tmp_path / "new" / "x.safetensors"
    matrix = torch.arange(6.0).view(2, 3)
    write_tensors(path, {"transposed": matrix.t().requires_grad_()}, {"made_with": {"seed": 3}})
    with safe_open(path, "pt") as file:
        assert torch.equal(file.get_tensor("transposed"), matrix.t())
        assert file.metadata() == {"format": "pt", "made_with": '{"seed": 3}'}


# --------------------------------------------------------------------------------- one at a time


def hold(folder, here) -> None:
    with locked(folder):
        here.set()
        time.sleep(60)


@pytest.fixture
def holder(tmp_path):
    """Another process, which writes to tmp_path/run."""
    fork = multiprocessing.get_context("fork")
    here = fork.Event()
    process = fork.Process(target=hold, args=(tmp_path / "run", here))
    process.start()
    assert here.wait(30)
    yield process
    process.kill()
    process.join()


def test_a_second_run_in_a_folder_is_told_who_is_there(holder, tmp_path):
    for _ in range(3):  # being refused changes nothing
        with pytest.raises(ValueError) as error, locked(tmp_path / "run"):
            raise AssertionError("two at a time")
        (line,) = str(error.value).splitlines()
        assert f"process {holder.pid} on " in line and str(tmp_path / "run") in line
        assert "choose another --out" in line


def test_runs_in_other_folders_are_not_disturbed(holder, tmp_path):
    with locked(tmp_path / "other"), locked(tmp_path / "run/inside"), locked(tmp_path):
        assert (tmp_path / "other" / LOCK).is_file()


def test_after_a_kill_the_next_run_goes_on_at_once(holder, tmp_path):
    os.kill(holder.pid, signal.SIGKILL)
    holder.join()
    assert (tmp_path / "run" / LOCK).is_file()  # nobody could remove it
    with locked(tmp_path / "run"):
        assert str(os.getpid()) in (tmp_path / "run" / LOCK).read_text()
    with locked(tmp_path / "run"):
        pass


@pytest.mark.parametrize("ending", [None, ValueError, KeyboardInterrupt])
def test_a_run_leaves_what_it_wrote_and_nothing_else(tmp_path, ending):
    for names in ([], ["figures.json"]):
        with pytest.raises(ending or ZeroDivisionError), locked(tmp_path / "runs/new"):
            for name in names:
                write_json(tmp_path / "runs/new" / name, {})
            raise ending or ZeroDivisionError
        left = sorted(path.name for path in (tmp_path / "runs/new").glob("*"))
        assert left == names
        assert (tmp_path / "runs").exists() == bool(names)


def test_an_empty_folder_that_was_there_stays(tmp_path):
    with locked(tmp_path):
        pass
    assert tmp_path.is_dir() and not list(tmp_path.iterdir())


def test_a_lock_that_was_removed_between_opening_and_locking_is_taken_again(tmp_path, monkeypatch):
    honest, removed = files.fcntl.flock, []

    def late(file, how):
        honest(file, how)
        if not removed:
            removed.append(True)
            (tmp_path / LOCK).unlink()

    monkeypatch.setattr(files.fcntl, "flock", late)
    with locked(tmp_path):
        assert removed and (tmp_path / LOCK).is_file()
        with pytest.raises(ValueError, match="is writing to"), locked(tmp_path):
            pass


@pytest.mark.parametrize("lack", ["fcntl", "locks"])
def test_without_locks_a_run_goes_on_and_says_so(tmp_path, monkeypatch, capsys, lack):
    if lack == "fcntl":
        monkeypatch.setattr(files, "fcntl", None)
    else:
        no_locks = OSError(37, "No locks available")
        monkeypatch.setattr(files.fcntl, "flock", lambda *_: (_ for _ in ()).throw(no_locks))
    with locked(tmp_path), locked(tmp_path):
        pass
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and all("nothing keeps a second run out" in line for line in lines)
