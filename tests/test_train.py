"""Blocks and steps against every branch alone, parts against the whole, and runs that stop and go
on. `pytest tests/test_train.py`"""

import dataclasses
import json
import math
import os
import re
import signal
from pathlib import Path

import pytest
import torch

import loss as losses
import train as training
from drafter import GREEDY, PLAIN, Drafter, Sampling, previous_tokens
from loss import step_loss
from serve import generate
from small import (
    ARCHS,
    DRAFTERS,
    PRIVATE_AND_MERGED,
    ROOT,
    error_of,
    run,
    small_drafter,
    small_target,
)
from small_runs import (
    CONFIG,
    STOP,
    W,
    blocks_of,
    gradient_gap,
    one_batch,
    small_trunks,
    step_by_hand,
    target_and_references,
    train_in_parts,
)
from support.flags import Stopped
from support.measure import Measure
from support.prepare import start_drafter
from support.resume import load_training_state
from train import (
    MODES,
    Step,
    draw_anchors,
    gradient,
    next_batch,
    objective_of,
    rollout_blocks,
    until_stop,
)

TEXT_AND_TREE = MODES[:3]
THREE_KINDS = ["dflash", "dspark rnn", "dflash2"]


def loss_of(config, drafter, blocks) -> tuple:
    """-> the loss and its figures."""
    return step_loss(drafter, blocks, objective_of(config, drafter))


def check_gradients(value, expected, weights) -> None:
    """Of a loss and its slow twin."""
    grads, wanted = (torch.autograd.grad(x, weights) for x in (value, expected))
    for grad, x in zip(grads, wanted):
        torch.testing.assert_close(grad, x, atol=2e-5, rtol=1e-3)


# ----------------------------------------------------------------------- blocks of texts and trees


@PRIVATE_AND_MERGED
@pytest.mark.parametrize("mode", TEXT_AND_TREE)
@pytest.mark.parametrize("variant", ["dflash", "dspark vanilla", "dspark rnn", "dflash2"])
def test_a_step_equals_every_branch_alone(variant, mode, merge):
    target, references = target_and_references()
    drafter = small_drafter(target, **DRAFTERS[variant])
    config = dataclasses.replace(CONFIG, mode=mode, merge=merge)
    batch = one_batch(target, references, config)
    value, figures = loss_of(config, drafter, blocks_of(config, drafter, *batch))
    slow, supervised = step_by_hand(config, drafter, *batch)
    assert figures["supervised"] == supervised and value.isfinite()
    torch.testing.assert_close(value, slow, atol=1e-5, rtol=0)
    check_gradients(value, slow, list(drafter.parameters()))


@pytest.mark.parametrize("mode", TEXT_AND_TREE)
def test_one_wrong_token_of_a_branch_is_noticed(mode):
    target, references = target_and_references()
    drafter = small_drafter(target)
    config = dataclasses.replace(CONFIG, mode=mode)
    batch = one_batch(target, references, config)
    slow, _ = step_by_hand(config, drafter, *batch)
    blocks = blocks_of(config, drafter, *batch)
    name = "tokens" if mode == "ce" else "p_hidden"  # what the loss compares q with
    wrong = getattr(blocks, name).clone()
    index = blocks.valid.nonzero()[0].tolist()
    wrong[tuple(index)] = (wrong[tuple(index)] + 1) % 20
    wrong_value, _ = loss_of(config, drafter, dataclasses.replace(blocks, **{name: wrong}))
    assert abs(wrong_value - slow) > 1e-3


def test_a_label_off_by_one_is_noticed():
    target, references = target_and_references()
    drafter = small_drafter(target)
    config = dataclasses.replace(CONFIG, mode="ce")
    trunk, anchors, uniforms = one_batch(target, references)
    moved = dataclasses.replace(trunk, tokens=trunk.tokens.roll(-1, 1))
    value, shifted = (
        loss_of(config, drafter, blocks_of(config, drafter, one, anchors, uniforms))[0]
        for one in (trunk, moved)
    )
    assert value.isfinite() and shifted.isfinite() and abs(value - shifted) > 1e-2


@pytest.mark.parametrize("variant", THREE_KINDS)
def test_blocks_that_are_run_again_give_the_loss_of_the_pass_that_drafted(variant):
    target, references = target_and_references()
    drafter = small_drafter(target, **DRAFTERS[variant])
    blocks = blocks_of(CONFIG, drafter, *one_batch(target, references))
    at_once, _ = loss_of(CONFIG, drafter, blocks)
    again, _ = loss_of(CONFIG, drafter, dataclasses.replace(blocks, hidden=None))
    torch.testing.assert_close(at_once, again)
    weights = list(drafter.parameters())
    pairs = zip(*(torch.autograd.grad(x, weights, allow_unused=True) for x in (again, at_once)))
    for grad, wanted in pairs:
        if wanted is not None:
            torch.testing.assert_close(grad, wanted, atol=1e-6, rtol=1e-4)


def test_until_stop_keeps_the_first_stop_token():
    tokens = torch.tensor([[1, 21, 3, 21], [21, 1, 1, 1], [1, 2, 3, 4]])
    assert until_stop(tokens, STOP).int().tolist() == [[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1]]
    assert until_stop(tokens, ()).all()


def test_anchors_depend_on_seed_step_and_sequence_alone():
    prompt, lengths = torch.tensor([4, 6, 5]), torch.tensor([20, 9, 30])
    shape = (5, 2, 5)
    anchors, uniforms = draw_anchors(0, 7, torch.tensor([11, 12, 13]), prompt, lengths, shape)
    alone = draw_anchors(0, 7, torch.tensor([12]), prompt[1:2], lengths[1:2], shape)
    assert torch.equal(anchors[1:2, :2], alone[0]) and torch.equal(uniforms[1:2, :2], alone[1])
    assert anchors[1].tolist() == [6, 7, -1, -1, -1]  # first response token to the second to last
    other, _ = draw_anchors(0, 8, torch.tensor([11]), prompt[:1], lengths[:1], shape)
    assert not torch.equal(anchors[:1], other)
    drawn = torch.cat(
        [
            draw_anchors(0, step, torch.tensor([0]), prompt[:1], lengths[:1], (5, 1, 1))[0]
            for step in range(200)
        ]
    )
    assert drawn.min() == 4 and drawn.max() == 18


@pytest.mark.parametrize("mode", TEXT_AND_TREE)
@pytest.mark.parametrize("num_anchors", [40, 512])
def test_anchors_beyond_the_text_cost_nothing_and_change_nothing(mode, num_anchors):
    target, references = target_and_references()
    drafter = small_drafter(target)
    longest = int((references.lengths - references.prompt_lengths).max()) - 1
    config = dataclasses.replace(CONFIG, mode=mode, num_anchors=num_anchors, batch_size=10)
    trunk, anchors, uniforms = one_batch(target, references, config)
    assert anchors.shape[1] == uniforms.shape[1] == longest < num_anchors
    blocks = blocks_of(config, drafter, trunk, anchors, uniforms)
    value = step_loss(drafter, blocks, training.objective_of(config, drafter))[0]
    columns = num_anchors - longest  # as it was: columns of absent anchors
    anchors = torch.nn.functional.pad(anchors, (0, columns), value=-1)
    uniforms = torch.nn.functional.pad(uniforms, (0, 0, 0, 0, 0, columns), value=0.5)
    padded = blocks_of(config, drafter, trunk, anchors, uniforms)
    wanted = step_loss(drafter, padded, training.objective_of(config, drafter))[0]
    torch.testing.assert_close(value, wanted, atol=1e-6, rtol=1e-6)


def test_a_batch_without_room_for_an_anchor_has_one_absent_column():
    prompt, lengths = torch.tensor([4, 6]), torch.tensor([5, 7])
    anchors, uniforms = draw_anchors(0, 7, torch.tensor([1, 2]), prompt, lengths, (5, 2, 3))
    assert anchors.tolist() == [[-1], [-1]] and uniforms.shape == (2, 1, 2, 3)


# ------------------------------------------------------------------------------ blocks of rollouts


def rollout_prompts() -> list:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 20, (n + 3,), generator=generator).tolist() for n in range(5)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("arch", ARCHS)
def test_every_block_of_a_rollout_and_its_p_are_those_of_the_round(arch, temperature):
    target = small_target(arch=arch)
    drafter, prompts, sampling = small_drafter(target), rollout_prompts(), Sampling(temperature)
    blocks = rollout_blocks(drafter, prompts, 20, sampling, 7, STOP)
    decoded = generate(target, drafter, prompts, 20, sampling, 7, STOP, batch_size=5)
    num_blocks = 0
    for b, (prompt, result) in enumerate(zip(prompts, decoded)):
        text = prompt + result.tokens
        assert blocks.trunk.tokens[b, : len(text)].tolist() == text
        fresh = target.prefill(torch.tensor([text]), torch.tensor([len(text)]))
        assert (blocks.anchors[b] >= 0).sum() == result.num_rounds
        for r, anchor in enumerate(blocks.anchors[b].tolist()):
            if anchor < 0:
                continue
            num_blocks += 1
            taps = blocks.trunk.taps[b, :anchor], fresh.taps[0, :anchor]
            torch.testing.assert_close(*taps, atol=1e-4, rtol=1e-4)
            drafts = blocks.tokens[b, r, 0].tolist()
            p = target.head(blocks.p_hidden[b, r, 0]).softmax(-1)
            alone = target(torch.tensor([text[: anchor + 1] + drafts]))[0, anchor : anchor + W]
            torch.testing.assert_close(p, alone.softmax(-1), atol=1e-4, rtol=0)
            accepted = text[anchor + 1 : anchor + 1 + result.accepted[r]]
            assert accepted == drafts[: len(accepted)]
            assert len(accepted) == min(result.accepted[r], len(text) - anchor - 1)
    assert num_blocks > 20


@pytest.mark.parametrize("variant", THREE_KINDS)
def test_a_rollouts_loss_is_e2e_tv_on_accepted_and_rejected_positions(variant):
    target = small_target()
    drafter = small_drafter(target, **DRAFTERS[variant])
    blocks = rollout_blocks(drafter, rollout_prompts(), 16, PLAIN, 1, STOP)
    objective = losses.Objective({"e2e_tv": 1.0})
    value, figures = step_loss(drafter, blocks, objective)
    p_all, q_all, valid_all = [], [], []
    for b, r in (blocks.anchors >= 0).nonzero().tolist():
        anchor, drafts = int(blocks.anchors[b, r]), blocks.tokens[b, r, 0]
        alone = blocks.trunk.select(torch.tensor([b]))
        hidden = drafter.block(alone, torch.tensor([[anchor]]))[0]  # (1, W, C)
        previous = torch.cat([alone.tokens[0, anchor : anchor + 1], drafts[:-1]])[None]
        q_all.append(drafter.logits(hidden, previous)[0].softmax(-1))
        p_all.append(target.head(blocks.p_hidden[b, r, 0]).softmax(-1))
        stops = (drafts == STOP[0]).nonzero().flatten().tolist()
        valid_all.append(torch.arange(W) <= (stops[0] if stops else W))
    p, q, valid = map(torch.stack, (p_all, q_all, valid_all))
    slow = losses.e2e_tv(p, q, valid)
    assert figures["supervised"] == valid.sum()
    torch.testing.assert_close(value, slow, atol=1e-5, rtol=0)
    weights = [w for n, w in drafter.named_parameters() if not n.startswith("confidence")]
    check_gradients(value, slow, weights)
    p[3, 0] = p[3, 0].roll(1)  # of one position, and they differ
    assert abs(value - losses.e2e_tv(p, q, valid)) > 1e-4


def test_responses_of_one_token_leave_nothing_to_learn_and_no_error():
    target = small_target()
    drafter = small_drafter(target)
    first_tokens = {r.tokens[0] for r in generate(target, None, rollout_prompts(), 1)}
    blocks = rollout_blocks(drafter, rollout_prompts(), 16, GREEDY, 1, tuple(first_tokens))
    config = dataclasses.replace(CONFIG, mode="rollout")
    value, figures = loss_of(config, drafter, blocks)
    value.backward()
    assert figures["supervised"] == 0 and value == 0
    assert all(p.grad.abs().sum() == 0 for p in drafter.parameters())


# ---------------------------------------------------------------------------------------- one step


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("variant", THREE_KINDS)
def test_a_batch_in_parts_gives_the_gradient_of_the_whole(variant, mode):
    """Of texts of unequal length, with blocks cut short, and the drafter's layers run again in the
    backward pass. In float64: where p and q agree to float32's rounding, that rounding decides
    which is smaller, and the slope of min(p, q) jumps."""
    target, references = target_and_references()
    target.double()
    results = []
    for grad_accum, recompute, cache_gib in ((1, False, 1.0), (3, False, 1.0), (6, True, 0.0)):
        drafter = small_drafter(target, **DRAFTERS[variant]).double()
        drafter.recompute = recompute
        config = dataclasses.replace(
            CONFIG, mode=mode, batch_size=6, grad_accum=grad_accum, response_length=20
        )
        trunks = small_trunks(target, references, cache_gib)
        parts = next_batch(config, drafter, trunks, 1, STOP)
        assert len(parts) == grad_accum and all(part.trunk.hidden is None for part in parts)
        figures = gradient(config, Step(config, drafter), drafter, parts)
        assert figures.pop("padding") < 0.5
        figures.pop("coverage", None)  # of one reference of each part
        figures = {name: torch.tensor(x).double() for name, x in figures.items()}
        grads = {n: p.grad for n, p in drafter.named_parameters() if p.grad is not None}
        results.append(figures | grads)
    whole, *in_parts = results
    for parts in in_parts:
        assert gradient_gap({name: parts[name] for name in whole}, whole) < 1e-6
    whole["fc.weight"][0, 0] += 1e-4  # one element, and they differ
    assert gradient_gap({name: parts[name] for name in whole}, whole) > 1e-6


@pytest.mark.parametrize("mode", ["ce", "specopd"])
@pytest.mark.parametrize("variant", THREE_KINDS)
def test_half_precision_is_the_drafters_alone(variant, mode):
    """Its layers and heads work in bfloat16; its weights and their gradients, and p, do not."""
    target, references = target_and_references()
    results, dtypes = [], {"drafter": set(), "target": set()}
    for precision in ("float32", "bfloat16"):
        drafter = small_drafter(target, **DRAFTERS[variant])
        config = dataclasses.replace(CONFIG, mode=mode, precision=precision)
        if precision == "bfloat16":
            for name, module in (("drafter", drafter), ("target", target.model)):
                module.layers[0].mlp.down_proj.register_forward_hook(
                    lambda *args, name=name: dtypes[name].add(args[-1].dtype)
                )
        parts = next_batch(config, drafter, small_trunks(target, references, 0.0), 0, STOP)
        figures = gradient(config, Step(config, drafter), drafter, parts)
        grads = [p.grad for p in drafter.parameters() if p.grad is not None]
        assert all(grad.dtype == torch.float32 for grad in grads)
        results.append((figures["loss"], torch.cat([grad.flatten() for grad in grads])))
    assert dtypes == {"drafter": {torch.bfloat16}, "target": {torch.float32}}
    (exact, whole), (near, half) = results
    assert near != exact and near == pytest.approx(exact, abs=0.05)
    assert torch.cosine_similarity(whole, half, 0) > (0.9 if mode == "specopd" else 0.99)


def test_p_is_the_targets_own_in_half_precision(monkeypatch):
    target, references = target_and_references()
    config, dtypes = dataclasses.replace(CONFIG, precision="bfloat16"), set()
    monkeypatch.setattr(target, "head", lambda x: dtypes.add(x.dtype) or target.lm_head(x))
    target.lm_head.register_forward_hook(lambda *a: dtypes.add((a[1][0].dtype, a[-1].dtype)))
    drafter = small_drafter(target)
    parts = next_batch(config, drafter, small_trunks(target, references), 0, STOP)
    dtypes.clear()
    gradient(config, Step(config, drafter), drafter, parts)
    assert torch.float32 in dtypes and (torch.float32, torch.float32) in dtypes


# --------------------------------------------------------------------------- runs that stop, go on


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

    monkeypatch.setattr(Measure, "__call__", lambda *_: Measured())
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
    run = training.start_or_resume(config, small_drafter(target), trunks, measure, tmp_path)
    assert bool(run.totals["best"]) == (not changes)
    assert ("sought anew" in capsys.readouterr().out) == bool(changes)


def test_a_folder_that_holds_something_else_is_left_alone(tmp_path):
    target, _ = target_and_references()
    small_drafter(target).save_pretrained(tmp_path / "ce")
    before = (tmp_path / "ce/model.safetensors").read_bytes()
    with pytest.raises(ValueError, match="another --out"):
        train_in_parts(tmp_path / "ce", "ce", [0])
    with pytest.raises(ValueError, match="another --out"):
        training.stage(tmp_path / "ce", {}, lambda: 1 / 0)
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

    def killed(*_):
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

    def asked(*args):
        calls.clear()
        os.kill(os.getpid(), signal.SIGTERM)
        return honest(*args)

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
    assert log[1]["al_source"] == "held-out prompts"
    assert log[0]["lr"] < log[1]["lr"] and log[0]["matrix_lr"] == pytest.approx(10 * log[0]["lr"])
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["seconds"] == pytest.approx(sum(record["seconds"] for record in log))


def test_measuring_keeps_to_its_share_of_the_time_but_the_last_step_is_measured(tmp_path):
    target, references = target_and_references()
    config = dataclasses.replace(CONFIG, mode="ce", eval_every=1, eval_share=1e-6)
    trunks = small_trunks(target, references)
    training.train(config, small_drafter(target), trunks, small_measure(), tmp_path)
    log = map(json.loads, (tmp_path / "log.jsonl").read_text().splitlines())
    assert [record["step"] for record in log if "al_t0" in record] == [1, 4]


# ------------------------------------------------------------------------------- flags, the lesson


@pytest.mark.parametrize(
    "flags",
    [
        dict(block_size=7),
        dict(draft_layers=3),
        dict(mask_token_id="0"),
        dict(rank=3),
        dict(drafter_kind="dspark"),
        dict(markov_head="rnn"),
    ],
    ids=str,
)
def test_a_flag_that_contradicts_the_drafters_folder_is_an_error(tmp_path, flags):
    target = small_target()
    small_drafter(target).save_pretrained(tmp_path)
    config = dataclasses.replace(CONFIG, drafter=str(tmp_path), **flags)
    with pytest.raises(ValueError, match=next(iter(flags))):
        start_drafter(config, target, None)


def test_a_flag_that_agrees_with_the_drafters_folder_is_fine(tmp_path):
    target = small_target()
    small_drafter(target).save_pretrained(tmp_path)
    config = dataclasses.replace(CONFIG, drafter=str(tmp_path), block_size=5, draft_layers=2)
    assert start_drafter(config, target, None).config.block_size == 5


@pytest.mark.parametrize(
    "flags",
    [
        dict(steps=0),
        dict(response_length=1),
        dict(branch_temperature=-1.0),
        dict(lr=math.nan),
        dict(loss="e2e_al", mode="e2e"),
        dict(loss="e2e_al", branch_temperature=0.0),
        dict(loss="e2e_al", num_greedy=1),
        dict(num_greedy=2),
        dict(branch_temperature=1e-38),
    ],
    ids=str,
)
def test_settings_without_a_meaning_are_errors(flags):
    with pytest.raises(ValueError):
        dataclasses.replace(CONFIG, **{"num_greedy": 0} | flags)


def test_an_unknown_loss_is_an_error_that_lists_the_losses():
    target, references = target_and_references()
    drafter, config = small_drafter(target), dataclasses.replace(CONFIG, loss="l2")
    blocks = blocks_of(config, drafter, *one_batch(target, references))
    with pytest.raises(ValueError, match="there is ce, tv, kl, e2e_tv, e2e_al"):
        loss_of(config, drafter, blocks)


def test_e2e_al_goes_with_branches_that_are_all_drawn():
    assert dataclasses.replace(CONFIG, loss="e2e_al", num_greedy=0).loss == "e2e_al"


@pytest.fixture
def paths(folders, tmp_path):
    """{name: path} of what a command line may name."""
    contents = {
        "EMPTY": ("empty.txt", ""),
        "BAD": ("bad.jsonl", '{"prompt": "a"}\n{"prompt": \n'),
        "KEYS": ("keys.json", '{"num_anchor": 3}'),
        "MODE": ("mode.json", '{"mode": "sft"}'),
    }
    for name, text in contents.values():
        (tmp_path / name).write_text(text)
    written = {key: tmp_path / name for key, (name, _) in contents.items()}
    return {"TARGET": folders / "target", "TEXT": ROOT / "README.md"} | written


@pytest.mark.parametrize(
    "arguments, word",
    [
        ("--mode sft", "invalid choice"),
        ("--step 3", "--steps"),
        ("--steps 0", "--steps"),
        ("--loss l2", "e2e_tv"),
        ("--corpus EMPTY", "empty"),
        ("--corpus BAD", "bad.jsonl:2"),
        ("--config KEYS", "num_anchors"),
        ("--config MODE", "mode = 'sft'"),
        ("--target nowhere", "nowhere"),
        ("--target TARGET --corpus TEXT --eval-tokens 40", "exceed"),
    ],
)
def test_a_wrong_argument_ends_in_one_clear_line(paths, monkeypatch, capsys, arguments, word):
    folder = paths["EMPTY"].parent
    before = sorted(folder.rglob("*"))
    monkeypatch.chdir(folder)
    arguments = [paths.get(argument, argument) for argument in arguments.split()]
    assert word in error_of(training.main, arguments, monkeypatch, capsys)
    assert sorted(folder.rglob("*")) == before  # nothing written, nothing lost


@pytest.mark.slow
def test_a_wrong_argument_ends_a_process_with_code_2(tmp_path):
    done = run("train.py", "--target", "nowhere", "--out", tmp_path / "run")
    assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1
    assert "Traceback" not in done.stderr


def plain_probs(drafter, blocks) -> tuple:
    """p and q (A,K,W,V) of the branches of one text: p from a plain run of each, q from the drafter
    as it is now."""
    _, A, K, W = blocks.tokens.shape
    p = torch.zeros(A, K, W, drafter.target.config.vocab_size)
    for a, k in torch.cartesian_prod(torch.arange(A), torch.arange(K)).tolist():
        text = blocks.trunk.tokens[0, : blocks.anchors[0, a] + 1]
        branch = torch.cat([text, blocks.tokens[0, a, k]])
        p[a, k] = drafter.target(branch[None])[0, len(text) - 1 : -1].softmax(-1)
    hidden = drafter.block(blocks.trunk, blocks.anchors)[:, :, None]
    first = blocks.trunk.tokens.gather(1, blocks.anchors)
    q = drafter.logits(hidden, previous_tokens(first, blocks.tokens)).softmax(-1)
    return p, q[0].expand_as(p)


def test_the_lesson_prints_the_numbers_of_the_functions(monkeypatch, capsys):
    """p from plain runs; alpha, survival and the loss from p and q; then the drafter as updated."""
    shown = {}
    honest = training.show_branch

    def recorded(drafter, blocks, a, k):
        shown.update(drafter=drafter, blocks=blocks, a=a, k=k)
        shown["p"], shown["q"] = plain_probs(drafter, blocks)
        honest(drafter, blocks, a, k)

    monkeypatch.setattr(training, "show_branch", recorded)
    training.lesson()
    printed = capsys.readouterr().out
    p, q = shown["p"], shown["q"]
    alpha = torch.minimum(p, q).sum(-1)[shown["a"], shown["k"]]
    pairs = re.findall(r"alpha (\S+)   survival (\S+)", printed)
    pairs = torch.tensor([[float(x) for x in pair] for pair in pairs])
    assert (pairs - torch.stack([alpha, alpha.cumprod(0)], 1)).abs().max() < 6e-4
    for name, probs in (("p", p), ("q", q)):
        rows = re.findall(rf"{name}_\d = (.*)", printed)
        rows = torch.tensor([[float(x) for x in row.split()] for row in rows])
        assert (rows - probs[shown["a"], shown["k"]]).abs().max() < 6e-3
    losses_printed = [float(x) for x in re.findall(r"(?:branches|update): (\d\S+)", printed)]
    after = losses.e2e_tv(*plain_probs(shown["drafter"], shown["blocks"]))
    expected = [losses.e2e_tv(p, q).item(), after.item()]
    assert losses_printed == pytest.approx(expected, abs=6e-5) and expected[1] < expected[0]


@pytest.mark.slow
def test_the_lesson_is_a_command(capsys):
    done = run("train.py", "--lesson")
    assert done.returncode == 0 and not done.stderr
    training.lesson()
    assert done.stdout == capsys.readouterr().out
