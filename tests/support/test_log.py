"""A run's log: lines of JSON, and the numbers to another tool by its own writer."""

import json
import sys
from types import SimpleNamespace

import pytest

from support.log import check_installed, open_log, peak_memory_gib, scalars_of
from train import TrainConfig

RECORD = {"step": 3, "loss": 0.5, "alpha": [0.9, 0.8], "al_source": "held-out prompts"}
SCALARS = {"step": 3, "loss": 0.5, "alpha/1": 0.9, "alpha/2": 0.8}


def test_a_list_is_a_number_for_each_position_and_words_stay_out():
    assert scalars_of(RECORD) == SCALARS


def test_a_log_is_appended_to_line_by_line(tmp_path):
    for _ in range(2):
        with open_log(tmp_path, "", {}) as write:
            write(RECORD)
            lines = (tmp_path / "log.jsonl").read_text().splitlines()  # at once
    assert [json.loads(line) for line in lines] == [RECORD] * 2


def test_numbers_go_to_tensorboard_by_its_writer(tmp_path, monkeypatch):
    written = []

    class Writer:
        def __init__(self, folder):
            written.append(folder)

        def add_scalar(self, *scalar):
            written.append(scalar)

        def close(self):
            written.append("closed")

    fake = SimpleNamespace(SummaryWriter=Writer)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    with pytest.raises(KeyboardInterrupt), open_log(tmp_path, "tensorboard", {}) as write:
        write(RECORD)
        raise KeyboardInterrupt  # however the run ends
    scalars = [(name, value, 3) for name, value in SCALARS.items()]
    assert written == [str(tmp_path), *scalars, "closed"]
    assert json.loads((tmp_path / "log.jsonl").read_text()) == RECORD


def test_numbers_go_to_wandb_with_the_runs_config(tmp_path, monkeypatch):
    told = []
    run = SimpleNamespace(
        log=lambda scalars, step: told.append((scalars, step)), finish=lambda: told.append("done")
    )
    fake = SimpleNamespace(init=lambda **how: told.append(how["config"]) or run)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with open_log(tmp_path, "wandb", {"seed": 4}) as write:
        write(RECORD)
    assert told == [{"seed": 4}, (SCALARS, 3), "done"]


def test_a_tool_that_does_not_start_is_an_error_that_names_the_flag(tmp_path, monkeypatch):
    def refuses(**_):
        raise RuntimeError("no API key")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=refuses))
    with pytest.raises(ValueError, match="--log-to wandb does not start: no API key"):
        open_log(tmp_path, "wandb", {}).__enter__()


@pytest.mark.parametrize("tool", ["tensorboard", "wandb"])
def test_a_tool_that_is_not_installed_is_an_error_at_the_door(tmp_path, monkeypatch, tool):
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, tool, raising=False)
    with pytest.raises(ValueError, match=f"--log-to {tool} needs its package: pip install"):
        TrainConfig(log_to=tool)
    (tmp_path / f"{tool}.py").write_text("")
    check_installed(tool)
    assert TrainConfig(log_to=tool).log_to == tool


def test_peak_memory_is_the_processs_or_the_gpus(monkeypatch):
    now = peak_memory_gib(False)
    room = bytearray(2**27)  # an eighth of a GiB
    assert len(room) and 0.05 < now <= peak_memory_gib(False) < 1000
    monkeypatch.setattr("torch.cuda.max_memory_allocated", lambda: 3 * 2**30)
    assert peak_memory_gib(True) == 3
