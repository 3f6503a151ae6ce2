"""Runs that stop and go on, and what they keep: training states, logs, the best drafter."""

import dataclasses
import json
import math
import os
import signal
from pathlib import Path

import pytest
import torch

import train as training
from drafter import Drafter
from small import small_drafter, small_target
from small_runs import CONFIG, STOP, small_trunks, target_and_references, train_in_parts
from support import run as running
from support.flags import Stopped
from support.measure import Measure
from support.resume import load_training_state, stage
from support.run import add_figures, figures_of, start_or_resume
from train import FREE, MODES, Step

CLOCKED = ("seconds", "tokens_per_s", "memory_gib")  # of a record: no two runs have the same


def small_measure() -> Measure:
    return Measure([[1, 2]], 8, STOP, 0)


def learned(log: list[dict]) -> list[dict]:
    """What a log tells of learning."""
    return [{k: v for k, v in record.items() if k not in CLOCKED} for record in log]


@pytest.mark.parametrize("mode", MODES)
def test_two_and_two_steps_equal_four_bit_for_bit(tmp_path, mode):
    whole, log = train_in_parts(tmp_path / "whole", mode, [0])
    parts, parts_log = train_in_parts(tmp_path / "parts", mode, [2, 0])
    for name, tensor in whole.items():
        assert torch.equal(tensor, parts[name]), name
    assert learned(log) == learned(parts_log)
    assert [record["step"] for record in log] == [1, 2, 3, 4]
    assert {"al_t0", "al_t1"} <= set(log[-1])
    assert all(record["supervised"] > 0 for record in log)
    target, _ = target_and_references()
    saved = Drafter.from_pretrained(tmp_path / "whole", target)
    assert torch.equal(saved.fc.weight, whole["fc.weight"].bfloat16())


def test_the_best_drafter_is_kept_beside_the_last(tmp_path, monkeypatch):
    als = iter([2.0, 1.0, 3.0, 2.0, 1.5, 1.5, 1.0, 1.0])  # at two temperatures, four times

    class Measured:
        def __init__(self, *_):
            self.mean = next(als)

    monkeypatch.setattr(Measure, "__call__", lambda *_, **__: Measured())
    target, references = target_and_references()
    config = dataclasses.replace(CONFIG, eval_every=1)
    drafter, saved = small_drafter(target), {}
    honest = Drafter.save_pretrained

    def recorded(self, folder, **options):
        saved.setdefault(Path(folder).name, []).append(self.fc.weight.clone())
        honest(self, folder, **options)

    monkeypatch.setattr(Drafter, "save_pretrained", recorded)
    trunks = small_trunks(target, references)
    totals = training.train(config, drafter, trunks, small_measure(), tmp_path)
    assert totals["best"] == {"step": 2, "al": 2.5} and len(saved["best"]) == 2
    best = Drafter.from_pretrained(tmp_path / "best", target)
    assert torch.equal(best.fc.weight, saved["best"][1].bfloat16())
    assert not torch.equal(best.fc.weight, drafter.fc.weight.bfloat16())


@pytest.mark.parametrize("bad_step", [1, 2])
def test_a_step_that_is_not_finite_stops_the_run_and_the_drafter_before_it_is_kept(
    tmp_path, monkeypatch, bad_step
):
    target, references = target_and_references()
    drafter, weights = small_drafter(target), []
    honest = training.step_loss

    def broken(*args):
        weights.append(drafter.fc.weight.clone())
        value, figures = honest(*args)
        return value * (math.nan if len(weights) == bad_step else 1), figures

    monkeypatch.setattr(training, "step_loss", broken)
    with pytest.raises(ValueError, match=f"step {bad_step} is not finite"):
        training.train(CONFIG, drafter, small_trunks(target, references), small_measure(), tmp_path)
    assert torch.equal(drafter.fc.weight, weights[-1])  # the bad step changed nothing
    sound = Drafter.from_pretrained(tmp_path / "sound", target)  # to go on from, elsewhere
    assert torch.equal(sound.fc.weight, weights[-1].bfloat16())


def test_a_log_ahead_of_its_training_state_is_cut_back(tmp_path):
    train_in_parts(tmp_path, "ce", [2])
    with open(tmp_path / "log.jsonl", "a") as log:
        log.write('{"step": 3, "loss": 9.9}\n{"step": 4, "lo')
    _, log = train_in_parts(tmp_path, "ce", [0])
    assert [r["step"] for r in log] == [1, 2, 3, 4] and all(r["loss"] != 9.9 for r in log)


def test_an_interruption_behind_the_last_training_state_is_made_good(tmp_path, monkeypatch):
    honest = Drafter.save_pretrained

    def interrupted(*_, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(Drafter, "save_pretrained", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train_in_parts(tmp_path, "ce", [0])
    assert not (tmp_path / "model.safetensors").exists()
    monkeypatch.setattr(Drafter, "save_pretrained", honest)
    train_in_parts(tmp_path, "ce", [0])
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (tmp_path / "model.safetensors").exists() and summary["al_t0"] >= 1


def test_the_summary_of_another_command_does_not_make_a_run_done(tmp_path, capsys):
    train_in_parts(tmp_path, "ce", [1])
    (tmp_path / "summary.json").write_text('{"references": {"config": {}}}')
    train_in_parts(tmp_path, "ce", [0])
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (tmp_path / "model.safetensors").is_file() and summary["step"] == CONFIG.steps
    assert summary["references"] == {"config": {}}
    assert "was done before" not in capsys.readouterr().out
    train_in_parts(tmp_path, "ce", [0])
    assert "was done before: nothing was trained, measured or saved" in capsys.readouterr().out


@pytest.mark.parametrize("changes", [dict(prompts=[[7, 8]]), dict(max_new_tokens=5), {}])
def test_the_best_drafter_is_sought_anew_on_other_prompts(tmp_path, capsys, changes):
    target, references = target_and_references()
    config = dataclasses.replace(CONFIG, eval_every=1, stop_after=1)
    trunks, measure = small_trunks(target, references), Measure([[1, 2, 3]], 8, STOP, 0)
    training.train(config, small_drafter(target), trunks, measure, tmp_path)
    if "prompts" in changes:  # one more than before: others would not be gone on from
        changes = {"prompts": [*measure.prompts, *changes["prompts"]]}
    measure = dataclasses.replace(measure, **changes)
    drafter = small_drafter(target)
    step_module = Step(config, drafter)
    run = start_or_resume(config, FREE, drafter, trunks, measure, tmp_path, step_module)
    assert bool(run.totals["best"]) == (not changes)
    assert ("sought anew" in capsys.readouterr().out) == bool(changes)


def test_a_folder_that_holds_something_else_is_left_alone(tmp_path):
    target, _ = target_and_references()
    small_drafter(target).save_pretrained(tmp_path / "ce")
    before = (tmp_path / "ce/model.safetensors").read_bytes()
    with pytest.raises(ValueError, match="another --out"):
        train_in_parts(tmp_path / "ce", "ce", [0])
    with pytest.raises(ValueError, match="another --out"):
        stage(tmp_path / "ce", {}, lambda: 1 / 0)
    assert (tmp_path / "ce/model.safetensors").read_bytes() == before


def test_a_run_is_not_resumed_on_another_drafter_or_target(tmp_path):
    train_in_parts(tmp_path, "ce", [2])
    target, references = target_and_references()
    config = dataclasses.replace(CONFIG, mode="ce")
    rest = small_trunks(target, references), small_measure(), tmp_path
    other = small_drafter(target, mask_token_id=22)
    other.config = dataclasses.replace(other.config, mask_token_id=23)
    with pytest.raises(ValueError, match="the drafter's dflash_config"):
        training.train(config, other, *rest)
    with torch.no_grad():
        target.lm_head.weight[0, 0] += 1
    with pytest.raises(ValueError, match="the target"):
        training.train(config, small_drafter(target), *rest)


def test_a_damaged_or_foreign_training_state_is_an_error_that_names_it(tmp_path):
    train_in_parts(tmp_path, "ce", [2])
    with pytest.raises(ValueError, match="mode = 'ce'"):
        train_in_parts(tmp_path, "e2e", [0])
    states = list(tmp_path.glob("training_state*.pt"))
    assert len(states) == 2
    for path in states:
        path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match="damaged"):
        train_in_parts(tmp_path, "ce", [0])


def test_a_run_goes_on_from_the_older_training_state_where_the_newest_is_damaged(tmp_path):
    whole, log = train_in_parts(tmp_path / "whole", "ce", [0])
    train_in_parts(tmp_path / "parts", "ce", [3])
    path = tmp_path / "parts/training_state.pt"
    path.write_bytes(path.read_bytes()[:100])
    parts, parts_log = train_in_parts(tmp_path / "parts", "ce", [0])
    assert all(torch.equal(tensor, parts[name]) for name, tensor in whole.items())
    assert learned(log) == learned(parts_log)
    assert (tmp_path / "parts/training_state.damaged").is_file()


def test_a_run_that_is_killed_while_it_measures_goes_on_by_measuring(tmp_path, monkeypatch):
    whole, log = train_in_parts(tmp_path / "whole", "ce", [0])

    def killed(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Measure, "__call__", killed)
        train_in_parts(tmp_path / "parts", "ce", [0])
    state = load_training_state(tmp_path / "parts")
    assert state["step"] == 2 and state["unmeasured"]["step"] == 2
    assert not (tmp_path / "parts/best").exists()
    parts, parts_log = train_in_parts(tmp_path / "parts", "ce", [0])
    assert all(torch.equal(tensor, parts[name]) for name, tensor in whole.items())
    assert learned(log) == learned(parts_log) and "al_t0" in parts_log[1]
    assert load_training_state(tmp_path / "parts")["unmeasured"] is None


def signalled(monkeypatch, owner, name: str, number: int, call: int) -> None:
    """Let this process get a signal while a function runs for the so-manieth time."""
    honest, calls = getattr(owner, name), []

    def wrapped(*args, **options):
        calls.append(1)
        if len(calls) == call:
            os.kill(os.getpid(), number)
        return honest(*args, **options)

    monkeypatch.setattr(owner, name, wrapped)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda s: s.name)
@pytest.mark.parametrize(
    "mode, owner, name, call, step",
    [
        ("ce", Measure, "__call__", 1, 2),  # at the first temperature, after step 2
        ("ce", Measure, "__call__", 4, 4),  # at the second, after the last step
        ("rollout", training, "next_batch", 3, 2),  # while it decodes for step 3
        ("specopd", training, "next_batch", 1, 0),
        ("e2e", training, "optimizer_step", 3, 3),  # which is finished
    ],
)
def test_a_run_that_is_asked_to_end_drops_what_can_be_made_again(
    tmp_path, monkeypatch, mode, owner, name, call, step, number
):
    with monkeypatch.context() as patch:
        signalled(patch, owner, name, number, call)
        with pytest.raises(Stopped, match=f"step {step} of 4 is saved in .*same command goes on"):
            train_in_parts(tmp_path / "parts", mode, [0])
    assert load_training_state(tmp_path / "parts")["step"] == step
    parts, parts_log = train_in_parts(tmp_path / "parts", mode, [0])
    whole, log = train_in_parts(tmp_path / "whole", mode, [0])
    assert all(torch.equal(tensor, parts[name]) for name, tensor in whole.items())
    assert learned(log) == learned(parts_log)


def test_a_request_to_end_decoding_ends_it_at_the_next_round(tmp_path, monkeypatch):
    """A measurement of many rounds makes no further call of the target."""
    target, references = target_and_references()
    trunks, calls = small_trunks(target, references), []
    measure = Measure([[1, 2]], 200, (), 0)
    honest = Measure.__call__

    def asked(*args, **options):
        calls.clear()
        os.kill(os.getpid(), signal.SIGTERM)
        return honest(*args, **options)

    monkeypatch.setattr(Measure, "__call__", asked)
    target.model.register_forward_hook(lambda *_: calls.append(1))
    with pytest.raises(Stopped):
        training.train(CONFIG, small_drafter(target), trunks, measure, tmp_path)
    assert calls == []


def test_the_log_tells_rates_speed_memory_and_what_its_al_is_of(tmp_path):
    _, log = train_in_parts(tmp_path, "specopd", [0])
    for record in log:
        assert record["tokens_per_s"] == record["supervised"] / record["seconds"] > 0
        assert 0.05 < record["memory_gib"] < 1000
        assert ("al_source" in record) == ("al_t0" in record) == (record["step"] % 2 == 0)
    assert log[1]["al_source"] == "the first 2 of held-out prompts"
    assert log[0]["lr"] < log[1]["lr"] and log[0]["matrix_lr"] == pytest.approx(10 * log[0]["lr"])
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["seconds"] == pytest.approx(sum(record["seconds"] for record in log))


def test_al_of_several_tasks_is_their_mean(tmp_path):
    target, references = target_and_references()
    prompts = [[1, 2], [3], [4], [5]]
    measure = Measure(prompts, 12, STOP, 0, tasks=["one", "three", "three", "three"])
    config = dataclasses.replace(CONFIG, mode="ce")
    training.train(
        config, small_drafter(target), small_trunks(target, references), measure, tmp_path
    )
    last = json.loads((tmp_path / "log.jsonl").read_text().splitlines()[-1])
    tasks = last["by_task_t1"]
    assert list(tasks) == ["one", "three"] and tasks["one"] != tasks["three"]
    assert last["al_t1"] == pytest.approx((tasks["one"] + tasks["three"]) / 2)


def test_measuring_keeps_to_its_share_of_the_time_but_the_last_step_is_measured(tmp_path):
    target, references = target_and_references()
    config = dataclasses.replace(CONFIG, mode="ce", eval_every=1, eval_share=1e-6)
    trunks = small_trunks(target, references)
    training.train(config, small_drafter(target), trunks, small_measure(), tmp_path)
    log = map(json.loads, (tmp_path / "log.jsonl").read_text().splitlines())
    assert [record["step"] for record in log if "al_t0" in record] == [1, 4]


def test_the_first_loss_is_told_once(tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(running, "tell_first_loss", lambda *args: told.append(args[1:]))
    _, log = train_in_parts(tmp_path, "ce", [1, 0])
    assert told == [(log[0]["loss"], small_target().num_tokens)]


def test_a_steps_figures_are_sums_of_its_parts_and_means_where_a_mean_is_meant():
    parts = [
        {"positions": [4, 2], "alpha": [3.0, 0.5], "survival": [3.0, 0.25], "padding": 1},
        {"positions": [6, 0], "alpha": [1.0, 0.0], "survival": [1.0, 0.0], "padding": 3},
    ]
    common = {"slots": 8, "supervised": 6, "nodes": 0, "unmerged": 0, "candidates": 2, "labels": 4}
    sums = {}
    for number, part in enumerate(parts):
        vectors = ("positions", "alpha", "survival")
        tensors = {name: torch.tensor(part[name]) for name in vectors}
        loss = torch.tensor(0.25 + number)
        add_figures(sums, common | part | tensors | {"loss": loss})
    assert all(x.dtype == torch.double for x in sums.values())
    figures = figures_of(sums)
    assert figures["alpha"] == [0.4, 0.25] and figures["survival"] == [0.4, 0.125]
    assert figures["padding"] == 4 / 16 and figures["coverage"] == 0.5
    assert figures["loss"] == 1.5 and figures["supervised"] == 12
    assert not {"positions", "slots", "labels", "candidates"} & figures.keys()
