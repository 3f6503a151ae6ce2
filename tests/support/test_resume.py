"""Training states, stages and logs survive what happens to a run; nothing else passes for them."""

import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from drafter import Drafter
from small import ROOT, small_drafter
from small_runs import CONFIG, STOP, small_trunks, target_and_references
from support import distributed
from support.fingerprint import fingerprint
from support.flags import Stopped
from support.measure import Measure
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
from train import train, train_or_load


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
    texts, others = fingerprint([torch.arange(6)]), fingerprint([torch.arange(6) + 1])
    sent = []
    monkeypatch.setattr(distributed, "num_processes", lambda: 2)
    monkeypatch.setattr(distributed, "gather_numbers", lambda row: sent.append(row) or [row, row])
    check_processes_agree(None, texts)
    check_processes_agree(None, others)
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


SIGNALS = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda s: s.name)


@SIGNALS
def test_an_end_request_is_noted_and_does_not_end_the_process(number):
    before = signal.getsignal(number)
    with EndRequest() as end_request:
        assert not end_request.received
        os.kill(os.getpid(), number)
        assert end_request.received
    assert signal.getsignal(number) is before


def test_a_second_ctrl_c_ends_at_once_but_a_second_sigterm_does_not(capfd):
    with EndRequest():
        os.kill(os.getpid(), signal.SIGINT)
        assert "Ctrl-C again ends at once" in capfd.readouterr().err
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL  # the system ends the process
        for _ in range(2):  # torchrun sends it, too
            os.kill(os.getpid(), signal.SIGTERM)


@SIGNALS
def test_work_is_dropped_before_the_models_next_call_and_not_inside_one(number):
    model, finished = torch.nn.Sequential(torch.nn.Linear(2, 2)), []
    model[0].register_forward_hook(lambda *_: len(finished) == 2 and os.kill(os.getpid(), number))

    def work():
        for _ in range(9):
            finished.append(model(torch.ones(2)))

    with EndRequest(model) as end_request:
        assert end_request.run(lambda: "done") == "done"
        with pytest.raises(Stopped, match="asked to end"):
            end_request.run(work)
        assert len(finished) == 3  # the call in which the signal came is whole
        model(torch.ones(2))  # what may not be dropped goes on
    model(torch.ones(2))
    assert not model._forward_pre_hooks


def test_work_is_dropped_before_the_models_next_layer():
    model, ran = torch.nn.Module(), []
    model.layers = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(3))
    for layer in model.layers:
        layer.register_forward_hook(lambda *_: ran.append(1))
    model.layers[0].register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    with EndRequest(model) as end_request, pytest.raises(Stopped):
        end_request.run(lambda: [layer(torch.ones(2)) for layer in model.layers])
    assert len(ran) == 1 and not model.layers[1]._forward_pre_hooks


def test_a_request_to_one_process_stops_all(monkeypatch):
    sent = []
    monkeypatch.setattr(distributed, "gather_numbers", lambda row: sent.append(row) or [row, [1]])
    with EndRequest() as end_request, pytest.raises(Stopped):
        end_request.run(lambda: "done here")
    assert sent == [[0]] and not end_request.received


# ------------------------------------------- what a training was made of has changed since it began

PROMPTS = [[1, 2], [3, 4, 5], [6]]


def train_run(out, change=None, prompts=PROMPTS, stop_ids=STOP, **flags) -> None:
    """A small training, stopped after two steps, or gone on with; change(target, references)."""
    target, references = target_and_references()
    if change:
        change(target, references)
    config = dataclasses.replace(CONFIG, mode="ce", stop_after=2, eval_every=9, **flags)
    measure = Measure(prompts, CONFIG.eval_tokens, stop_ids, 0)
    drafter = small_drafter(target)
    if config.drafter:
        drafter = Drafter.from_pretrained(config.drafter, target, torch.float32)
    train(config, drafter, small_trunks(target, references), measure, out)


def other_token(_, references) -> None:
    references.tokens[3, 9] += 1


def shorter_text(_, references) -> None:
    references.lengths[0] -= 1


def longer_prompt(_, references) -> None:
    references.prompt_lengths[5] += 1


def fewer_texts(_, references) -> None:
    for name, tensor in vars(references).items():
        setattr(references, name, tensor[:-1])


def other_norm(target, _) -> None:
    target.model.norm.weight[4] += 1


CHANGED = {
    "a token": (dict(change=other_token), "before the references changed"),
    "a length": (dict(change=shorter_text), "before the references changed"),
    "a prompt's length": (dict(change=longer_prompt), "before the references changed"),
    "one text less": (dict(change=fewer_texts), "before the references changed"),
    "a norm of the target": (
        dict(change=other_norm),
        "other weights or another config of the target",
    ),
    "the target's dtype": (
        dict(change=lambda target, _: target.bfloat16()),
        "the same weights in another dtype: float32, this run has bfloat16",
    ),
    "the stop ids": (dict(stop_ids=(7,)), "stop ids"),
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_training_does_not_go_on_from_what_has_changed(tmp_path, name):
    changes, words = CHANGED[name]
    train_run(tmp_path)
    with pytest.raises(ValueError, match=words) as error:
        train_run(tmp_path, **changes)
    assert str(tmp_path / NEWEST) in str(error.value)


@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS, [[9, 8], [7]]], ids=len)
def test_a_training_goes_on_with_other_prompts_to_measure_on(tmp_path, prompts):
    train_run(tmp_path)
    train_run(tmp_path, prompts=prompts)
    assert load_training_state(tmp_path)["step"] == 2


def test_a_training_does_not_go_on_from_a_drafters_folder_that_has_changed(tmp_path):
    target, _ = target_and_references()
    small_drafter(target).save_pretrained(tmp_path / "start")
    train_run(tmp_path / "run", drafter=str(tmp_path / "start"))
    train_run(tmp_path / "run", drafter=str(tmp_path / "start"))
    small_drafter(target, seed=7).save_pretrained(tmp_path / "start")
    with pytest.raises(ValueError, match="before the starting drafter's weights changed"):
        train_run(tmp_path / "run", drafter=str(tmp_path / "start"))


def other_theta(target, _) -> None:
    target.config = dataclasses.replace(target.config, rope_theta=77.0)


def story_stage(out, config, change=None) -> dict:
    """A stage of the story that is done, or is found done."""
    target, references = target_and_references()
    if change:
        change(target, references)
    measure = Measure(PROMPTS, CONFIG.eval_tokens, STOP, 0)
    trunks = small_trunks(target, references)
    return train_or_load(config, out, trunks, None, measure)


@pytest.mark.parametrize(
    "change, words",
    [
        (other_token, "the references changed"),
        (other_norm, "other weights or another config of the target"),
        (other_theta, "other weights or another config of the target"),
        ("start", "the starting drafter's weights changed"),
    ],
    ids=["references", "target", "its config", "start"],
)
def test_a_storys_stage_is_not_reused_once_what_it_depends_on_has_changed(tmp_path, change, words):
    target, _ = target_and_references()
    small_drafter(target).save_pretrained(tmp_path / "start")
    flags = dict(mode="e2e", steps=1, drafter=str(tmp_path / "start"))
    config = dataclasses.replace(CONFIG, **flags)
    totals = story_stage(tmp_path / "e2e", config)
    assert story_stage(tmp_path / "e2e", config) == totals
    if change == "start":
        small_drafter(target, seed=7).save_pretrained(tmp_path / "start")
        change = None
    with pytest.raises(ValueError, match=words):
        story_stage(tmp_path / "e2e", config, change)


def test_a_training_state_of_an_earlier_version_is_named(tmp_path):
    train_run(tmp_path)
    state = load_training_state(tmp_path)
    state["made_with"]["the target"] = 123456  # a checksum of the head alone
    save_training_state(tmp_path, {k: v for k, v in state.items() if k not in ("path", "damaged")})
    with pytest.raises(ValueError, match=r"does not record the target \(an earlier version"):
        train_run(tmp_path)
