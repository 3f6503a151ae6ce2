"""Steps, resume, and the whole story in small. `pytest tests/test_train.py`"""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import DRAFTERS, ROOT, small_drafter, small_target

import loss as losses
import train as training
from drafter import Drafter, Sampling
from loss import make_optimizers, set_rate
from rollout import until_stop
from serve import generate
from step import Step, compile_parts, draw, gradient, hardness, next_batch, step_loss
from support import files
from support.data import References
from support.measure import Measure
from support.prepare import Trunks, batch_rows, start_drafter
from train import MODES, TrainConfig
from tree import draw_anchors

STOP = (21,)


def setup(seed=0):
    target = small_target()
    prompts = torch.randint(0, 20, (10, 6), generator=torch.Generator().manual_seed(seed)).tolist()
    results = generate(target, None, prompts, 20, 1.0, seed, STOP)
    return target, References.from_lists(prompts, [r.tokens for r in results], 0)


CONFIG = TrainConfig(
    mode="specopd",
    steps=4,
    batch_size=3,
    num_anchors=4,
    num_branches=2,
    eval_every=2,
    eval_prompts=2,
    eval_tokens=8,
    save_every=1,
    warmup=1,
)


CE = dataclasses.replace(CONFIG, mode="ce")


def one_batch(target, references, config=CONFIG, step=0):
    trunks = Trunks(target, references, config.cache_gib)
    rows = batch_rows(config.seed, step, references.lengths, config.batch_size)
    shape = (config.num_anchors, config.num_branches, 4)
    drawn = draw_anchors(
        config.seed, step, rows, references.prompt_lengths[rows], references.lengths[rows], shape
    )
    return trunks(rows), *drawn


def step_of(config, drafter, batch):
    """A step on one batch: what is drawn, its loss and figures."""
    part = draw(config, drafter, *batch, STOP)
    return part, *step_loss(config, drafter, part)


def by_hand(mode, config, target, drafter, trunk, anchors, uniforms, weight):
    """Every branch alone: p from a plain run of its whole prefix, q from its own block."""
    W, kind, decay = 4, drafter.config.kind, config.ce_decay
    p_all, q_all, base_all, sure_all, tokens_all, valid_all = [], [], [], [], [], []
    proposal = drafter.propose(
        trunk,
        anchors,
        config.num_branches,
        Sampling(config.branch_temperature),
        uniforms,
        num_greedy=config.num_greedy,
    )
    for b, a in torch.cartesian_prod(*(torch.arange(n) for n in anchors.shape)).tolist():
        anchor, length = int(anchors[b, a]), int(trunk.lengths[b])
        text = trunk.tokens[b, :length].tolist()
        for k in range(config.num_branches if mode == "specopd" else 1):
            if anchor < 0:
                continue
            ids = (
                proposal.tokens[b, a, k].tolist()
                if mode == "specopd"
                else text[anchor + 1 : anchor + 1 + W]
            )
            if STOP[0] in ids:
                ids = ids[: ids.index(STOP[0]) + 1]
            p = target(torch.tensor([text[: anchor + 1] + ids]))[0, anchor : anchor + W].softmax(-1)
            pad = W - len(ids)
            p_all.append(torch.nn.functional.pad(p[: len(ids)], (0, 0, 0, pad)))
            tokens_all.append(torch.tensor(ids + [0] * pad))
            before = torch.tensor([[text[anchor], *(ids + [0] * pad)[:-1]]])
            labels = tokens_all[-1][None] if mode == "ce" else None
            hidden = proposal.hidden[b, a]  # (1, W, C)
            q_all.append(drafter.logits(hidden, before, labels)[0])
            base_all.append(drafter.unary(hidden)[0])
            if drafter.has_confidence:
                sure_all.append(drafter.confidence(hidden, before, mode != "ce")[0].sigmoid())
            valid_all.append(torch.arange(W) < len(ids))
            if mode == "ce":  # the target drew MASK or a row beyond the tokenizer: no label for q
                valid_all[-1] &= tokens_all[-1] < target.num_tokens
    p, q_logits, tokens, valid = map(torch.stack, (p_all, q_all, tokens_all, valid_all))
    alpha = torch.minimum(p, q_logits.softmax(-1)).sum(-1)
    weights = valid * torch.exp(-torch.arange(W) / decay)
    extra = 0.0
    if drafter.has_confidence:
        sure, right = torch.stack(sure_all), alpha.detach()
        bce = -(right * sure.log() + (1 - right) * (1 - sure).log())
        extra = (bce * weights).sum() / weights.sum()
    if mode != "ce":
        return losses.e2e_tv(p, q_logits.softmax(-1), valid) + extra, valid.sum()
    value = losses.ce(q_logits, tokens, valid, decay)
    if kind == "dspark":
        value = 0.1 * value + 0.9 * 2 * ((1 - alpha) * weights).sum() / weights.sum()
    if kind == "dflash2":
        value = value + losses.ce(torch.stack(base_all), tokens, valid, decay)
    return value + extra, valid.sum()


@pytest.mark.parametrize("merge", [True, False])
@pytest.mark.parametrize("mode", MODES[:3])
@pytest.mark.parametrize("variant", ["dflash", "dspark vanilla", "dspark rnn", "dflash2"])
def test_a_step_is_what_every_branch_alone_would_give(variant, mode, merge):
    target, references = setup()
    drafter = small_drafter(target, **DRAFTERS[variant])
    config = dataclasses.replace(CONFIG, mode=mode, merge=merge)
    batch = one_batch(target, references, config)
    assert (batch[1] >= 0).any()
    _, value, figures = step_of(config, drafter, batch)
    slow, supervised = by_hand(mode, config, target, drafter, *batch)
    assert figures["supervised"] == supervised and value.isfinite()
    torch.testing.assert_close(value, slow, atol=1e-5, rtol=0)
    weights = list(drafter.parameters())
    for got, want in zip(torch.autograd.grad(value, weights), torch.autograd.grad(slow, weights)):
        torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-3)


def test_a_label_off_by_one_is_noticed(monkeypatch):
    target, references = setup()
    drafter = small_drafter(target)
    trunk, anchors, uniforms, _ = one_batch(target, references)
    moved = dataclasses.replace(trunk, tokens=trunk.tokens.roll(-1, 1))
    value, shifted = (
        step_of(CE, drafter, (one, anchors, uniforms, None))[1] for one in (trunk, moved)
    )
    assert value.isfinite() and shifted.isfinite() and abs(value - shifted) > 1e-2


def test_until_stop_keeps_the_first_stop_token():
    tokens = torch.tensor([[1, 21, 3, 21], [21, 1, 1, 1], [1, 2, 3, 4]])
    assert until_stop(tokens, STOP).int().tolist() == [[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1]]
    assert until_stop(tokens, ()).all()


def test_cached_trunks_equal_fresh_ones():
    target, references = setup()
    rows = torch.tensor([4, 1, 7])
    kept, fresh = (Trunks(target, references, gib)(rows) for gib in (2.0, 0.0))
    assert torch.equal(kept.tokens, fresh.tokens) and torch.equal(kept.lengths, fresh.lengths)
    for row, length in enumerate(fresh.lengths.tolist()):
        torch.testing.assert_close(
            kept.hidden[row, :length], fresh.hidden[row, :length], atol=1e-5, rtol=0
        )


def test_every_epoch_sees_every_reference_once():
    for bucket in (1, 3):
        seen = torch.cat([batch_rows(3, step, LENGTHS, 4, bucket) for step in range(6)])
        assert sorted(seen[:12].tolist()) == sorted(seen[12:].tolist()) == list(range(12))
        assert seen[:12].tolist() != seen[12:].tolist()
        assert LENGTHS[seen].view(-1, 4).diff(dim=1).min() >= 0  # each sorted by length


LENGTHS = torch.tensor([9, 30, 12, 50, 11, 31, 10, 52, 29, 51, 28, 49])


def test_batches_of_a_bucket_hold_texts_of_similar_length():
    longest = [
        [LENGTHS[batch_rows(3, step, LENGTHS, 4, bucket)].max() for step in range(3)]
        for bucket in (1, 3)
    ]
    assert sorted(longest[1]) == [12, 31, 52] and sum(longest[0]) > sum(longest[1])
    # of 11 in batches of 4, later epochs begin within a batch: each still holds every one once
    seen = torch.cat([batch_rows(3, step, LENGTHS[:11], 4, 3) for step in range(11)]).tolist()
    assert sorted(seen) == sorted([*range(11)] * 4)


def test_matrices_go_to_muon_and_the_rest_to_adamw():
    drafter = small_drafter(small_target())
    adamw, muon = make_optimizers(drafter, 0.01, 1e-3)
    assert {p.dim() for p in muon.param_groups[0]["params"]} == {2}
    assert {p.dim() for p in adamw.param_groups[0]["params"]} == {1}
    (only,) = make_optimizers(drafter, 0.0, 1e-3)
    assert len(only.param_groups[0]["params"]) == len(list(drafter.parameters()))
    set_rate([adamw], 0, 100, 10, 0.5)
    assert abs(adamw.param_groups[0]["lr"] - 1e-4) < 1e-12
    set_rate([adamw], 99, 100, 10, 0.5)
    assert 1e-4 <= adamw.param_groups[0]["lr"] < 1.5e-4


def run(out: Path, mode: str, stops: list[int]) -> tuple[dict, list]:
    """Train in as many sittings as there are stops; each starts from nothing but the folder."""
    for stop in stops:
        target, references = setup()
        drafter = small_drafter(target)
        measure = Measure([[1, 2, 3], [4, 5]], CONFIG.eval_tokens, STOP, 0)
        config = dataclasses.replace(CONFIG, mode=mode, stop_after=stop)
        trunks = Trunks(target, references, 2.0)
        training.train(config, drafter, trunks, measure, out)
    log = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return drafter.state_dict(), log


@pytest.mark.parametrize("mode", MODES[:3])
def test_two_and_two_steps_equal_four_bit_for_bit(tmp_path, mode):
    whole, log = run(tmp_path / "whole", mode, [0])
    parts, parts_log = run(tmp_path / "parts", mode, [2, 0])
    for name, tensor in whole.items():
        assert torch.equal(tensor, parts[name]), name
    assert log == parts_log and [r["step"] for r in log] == [1, 2, 3, 4]
    assert {"al_t0", "al_t1"} <= set(log[-1])
    target, _ = setup()
    saved = Drafter.from_pretrained(tmp_path / "whole", target)
    assert torch.equal(saved.fc.weight, whole["fc.weight"].bfloat16())


@pytest.mark.parametrize("variant", ["dflash", "dspark rnn", "dflash2"])
def test_branches_that_are_used_again_give_the_loss_of_those_branches(variant):
    target, references = setup()
    drafter = small_drafter(target, **DRAFTERS[variant])
    batch = one_batch(target, references)
    part, drawn, _ = step_of(CONFIG, drafter, batch)
    again, _ = step_loss(CONFIG, drafter, dataclasses.replace(part, hidden=None))
    weights = [p for n, p in drafter.named_parameters()]
    first, second = (torch.autograd.grad(one, weights, allow_unused=True) for one in (drawn, again))
    torch.testing.assert_close(drawn, again)
    for got, want in zip(second, first):
        if want is not None:
            torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("variant", ["dflash", "dspark rnn", "dflash2"])
def test_a_batch_in_parts_gives_the_gradient_of_the_whole(variant, mode):
    """Of texts of unequal length, with blocks cut short, weighted anchors, a share of CE, and the
    drafter's layers run again in the backward pass. In float64: where a p and its q agree to
    float32's rounding, that rounding says which is smaller, and the slope of min(p, q) jumps."""
    target, references = setup()
    target.double()
    found = []
    for accum, again, cached in ((1, False, 1.0), (3, False, 1.0), (6, True, 0.0)):
        drafter = small_drafter(target, **DRAFTERS[variant]).double()
        config = dataclasses.replace(
            CONFIG,
            mode=mode,
            batch_size=6,
            grad_accum=accum,
            recompute=again,
            ce_weight=0.2,
            response_length=20,
        )
        trunks = Trunks(target, references, cached)
        hard = None if mode == "rollout" else hardness(drafter, trunks, 1.0)
        parts = next_batch(config, drafter, trunks, 1, STOP, hard)
        assert len(parts) == accum and all(part.trunk.hidden is None for part in parts)
        figures = gradient(config, Step(config, drafter), drafter, parts)
        assert "padding" in figures and figures.pop("padding") < 0.5
        found.append((figures, {n: p.grad for n, p in drafter.named_parameters()}))
    (figures, whole), *others = found
    figures.pop("coverage", None)  # of one reference of each part
    for other, grads in others:
        for name, wanted in figures.items():
            scale = max(torch.tensor(wanted).abs().max().item(), 1.0)
            assert other[name] == pytest.approx(wanted, abs=1e-6 * scale), name
        for name, wanted in whole.items():
            if wanted is not None:
                scale = max(wanted.abs().max().item(), 1.0)
                torch.testing.assert_close(grads[name] / scale, wanted / scale, atol=1e-6, rtol=0)


@pytest.mark.parametrize("mode", ["ce", "specopd"])
@pytest.mark.parametrize("variant", ["dflash", "dspark rnn", "dflash2"])
def test_half_precision_is_the_drafters_alone(variant, mode):
    """Its layers and heads work in bfloat16; its weights and their gradients, and p, do not."""
    target, references = setup()
    found, kinds = [], {"drafter": set(), "target": set()}
    for precision in ("float32", "bfloat16"):
        drafter = small_drafter(target, **DRAFTERS[variant])
        config = dataclasses.replace(CONFIG, mode=mode, precision=precision)
        if precision == "bfloat16":
            drafter.layers[0].mlp.down_proj.register_forward_hook(
                lambda *a: kinds["drafter"].add(a[-1].dtype)
            )
            target.model.layers[0].mlp.down_proj.register_forward_hook(
                lambda *a: kinds["target"].add(a[-1].dtype)
            )
        parts = next_batch(config, drafter, Trunks(target, references, 0.0), 0, STOP)
        figures = gradient(config, Step(config, drafter), drafter, parts)
        grads = [p.grad for p in drafter.parameters() if p.grad is not None]
        assert all(g.dtype == torch.float32 for g in grads)
        found.append((figures["loss"], torch.cat([g.flatten() for g in grads])))
    assert kinds == {"drafter": {torch.bfloat16}, "target": {torch.float32}}
    (exact, whole), (near, half) = found
    assert near != exact and near == pytest.approx(exact, abs=0.05)
    assert torch.cosine_similarity(whole, half, 0) > (0.9 if mode == "specopd" else 0.99)


def test_p_is_the_targets_own_in_half_precision(monkeypatch):
    target, references = setup()
    config, kinds = dataclasses.replace(CONFIG, precision="bfloat16"), set()
    monkeypatch.setattr(target, "head", lambda x: kinds.add(x.dtype) or target.lm_head(x))
    target.lm_head.register_forward_hook(lambda *a: kinds.add((a[1][0].dtype, a[-1].dtype)))
    drafter = small_drafter(target)
    parts = next_batch(config, drafter, Trunks(target, references, 1.0), 0, STOP)
    kinds.clear()
    gradient(config, Step(config, drafter), drafter, parts)
    assert torch.float32 in kinds and (torch.float32, torch.float32) in kinds


def test_compiled_parts_compute_the_same():
    target, references = setup()
    config, found = dataclasses.replace(CONFIG, compile=True), []
    for backend in (None, "aot_eager"):
        drafter = small_drafter(target)
        if backend:
            compile_parts(drafter, backend)
        parts = next_batch(config, drafter, Trunks(target, references, 1.0), 0, STOP)
        gradient(config, Step(config, drafter), drafter, parts)
        found.append(torch.cat([p.grad.flatten() for p in drafter.parameters()]))
    assert drafter.layers[0]._compiled_call_impl and target.model.layers[0].mlp._compiled_call_impl
    torch.testing.assert_close(*found, atol=1e-6, rtol=0)


def test_branches_are_drawn_once_for_so_many_steps(tmp_path, monkeypatch):
    calls, honest = [], Drafter.propose
    drafter = small_drafter(setup()[0])
    target, references = drafter.target, setup()[1]
    config = dataclasses.replace(CONFIG, reuse=2, save_every=2, eval_every=4)

    def counted(self, trunk, anchors, *rest, **how):
        calls.append(anchors.shape)
        return honest(self, trunk, anchors, *rest, **how)

    monkeypatch.setattr(Drafter, "propose", counted)
    trunks, measure = Trunks(target, references, 1.0), Measure([[1, 2]], 8, STOP, 0)
    training.train(config, drafter, trunks, measure, tmp_path)
    assert calls.count((3, 4)) == 2  # of four steps
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert log[0]["supervised"] == log[1]["supervised"] != log[2]["supervised"]


@pytest.mark.parametrize("variant", ["dflash", "dspark gated", "dflash2"])
def test_need_is_how_often_the_first_draft_would_be_rejected(variant):
    target, references = setup()
    drafter = small_drafter(target, **DRAFTERS[variant])
    chances = hardness(drafter, Trunks(target, references, 1.0), 0.7)
    assert chances.shape == references.tokens.shape and (chances > 0).all()
    missed = []
    for row in (0, 4):
        trunk = Trunks(target, references, 0.0)(torch.tensor([row]))
        for a in range(int(references.prompt_lengths[row]), int(references.lengths[row]) - 1):
            sampling = Sampling(0.7)
            proposal = drafter.propose(trunk, torch.tensor([[a]]), 1, sampling)
            q = proposal.probs()[0, 0, 0, 0]
            p = (target.head(trunk.hidden[0, a]) / 0.7).softmax(-1)
            missed.append((1 - losses.acceptance(p, q).item(), chances[row, a].item()))
    missed = torch.tensor(missed)
    # chances are half of it and half of a constant
    rest = missed[:, 1] - missed[:, 0] / 2
    assert rest.std() < 1e-5 and missed[:, 0].std() > 1e-3 and rest[0] > 0


def test_the_best_drafter_is_kept_beside_the_last(tmp_path, monkeypatch):
    als = iter([2.0, 1.0, 3.0, 2.0, 1.5, 1.5, 1.0, 1.0])  # at two temperatures, four times
    monkeypatch.setattr(Measure, "__call__", lambda *_: type("Found", (), {"mean": next(als)}))
    target, references = setup()
    config = dataclasses.replace(CONFIG, eval_every=1)
    trunks, measure = Trunks(target, references, 1.0), Measure([[1, 2]], 8, STOP, 0)
    drafter, saved = small_drafter(target), {}
    honest = Drafter.save_pretrained

    def kept(self, folder):
        saved.setdefault(Path(folder).name, []).append(self.fc.weight.clone())
        honest(self, folder)

    monkeypatch.setattr(Drafter, "save_pretrained", kept)
    totals = training.train(config, drafter, trunks, measure, tmp_path)
    assert totals["best"] == {"step": 2, "al": 2.5} and len(saved["best"]) == 2
    best = Drafter.from_pretrained(tmp_path / "best", target)
    assert torch.equal(best.fc.weight, saved["best"][1].bfloat16())
    assert not torch.equal(best.fc.weight, drafter.fc.weight.bfloat16())


def test_a_log_ahead_of_its_checkpoint_is_cut_back(tmp_path):
    run(tmp_path, "ce", [2])
    with open(tmp_path / "log.jsonl", "a") as log:
        log.write('{"step": 3, "loss": 9.9}\n{"step": 4, "lo')
    _, log = run(tmp_path, "ce", [0])
    assert [r["step"] for r in log] == [1, 2, 3, 4] and all(r["loss"] != 9.9 for r in log)


def test_an_interruption_behind_the_last_checkpoint_is_made_good(tmp_path, monkeypatch):
    honest = Drafter.save_pretrained

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Drafter, "save_pretrained", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, "ce", [0])
    assert not (tmp_path / "model.safetensors").exists()
    monkeypatch.setattr(Drafter, "save_pretrained", honest)
    run(tmp_path, "ce", [0])
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (tmp_path / "model.safetensors").exists() and summary["al_t0"] >= 1


def test_a_folder_that_holds_something_else_is_left_alone(tmp_path):
    target, _ = setup()
    small_drafter(target).save_pretrained(tmp_path / "ce")
    before = (tmp_path / "ce/model.safetensors").read_bytes()
    with pytest.raises(ValueError, match="another --out"):
        run(tmp_path / "ce", "ce", [0])
    with pytest.raises(ValueError, match="another --out"):
        files.stage(tmp_path / "ce", {}, lambda: 1 / 0)
    assert (tmp_path / "ce/model.safetensors").read_bytes() == before


def test_a_run_is_not_resumed_on_another_drafter_or_target(tmp_path):
    run(tmp_path, "ce", [2])
    target, references = setup()
    trunks, measure = Trunks(target, references, 1.0), Measure([[1, 2]], 8, STOP, 0)
    config = dataclasses.replace(CONFIG, mode="ce")
    other = small_drafter(target, mask_token_id=22)
    other.config = dataclasses.replace(other.config, mask_token_id=23)
    with pytest.raises(ValueError, match="the drafter's dflash_config"):
        training.train(config, other, trunks, measure, tmp_path)
    with torch.no_grad():
        target.lm_head.weight[0, 0] += 1
    with pytest.raises(ValueError, match="the target"):
        training.train(config, small_drafter(target), trunks, measure, tmp_path)


def test_flags_that_a_given_drafter_contradicts_are_errors(tmp_path):
    target, _ = setup()
    small_drafter(target).save_pretrained(tmp_path)
    for change in (
        dict(block_size=7),
        dict(draft_layers=3),
        dict(mask_token_id=0),
        dict(rank=3),
        dict(drafter_kind="dspark"),
        dict(markov_head="rnn"),
    ):
        config = dataclasses.replace(CONFIG, drafter=str(tmp_path), **change)
        with pytest.raises(ValueError, match=next(iter(change))):
            start_drafter(config, target, None)
    same = dataclasses.replace(CONFIG, drafter=str(tmp_path), block_size=5, draft_layers=2)
    assert start_drafter(same, target, None).config.block_size == 5


@pytest.mark.parametrize(
    "change",
    [
        dict(steps=0),
        dict(response_length=1),
        dict(loss_temperature=-1.0),
        dict(clip=float("nan")),
        dict(loss="e2e_al", mode="e2e"),
        dict(loss="e2e_al", branch_temperature=0.0),
        dict(loss="e2e_al", loss_temperature=0.5),
        dict(loss="e2e_al", num_greedy=1),
        dict(loss="e2e_al", reuse=2, save_every=2),
        dict(num_greedy=2),
        dict(mode="story", stop_after=2),
    ],
)
def test_settings_without_a_meaning_are_errors(change):
    with pytest.raises(ValueError):
        dataclasses.replace(CONFIG, **{"num_greedy": 0} | change)
    dataclasses.replace(CONFIG, loss="e2e_al", num_greedy=0)


def test_a_damaged_or_foreign_checkpoint_is_an_error_that_names_it(tmp_path):
    run(tmp_path, "ce", [2])
    with pytest.raises(ValueError, match="mode = 'ce'"):
        run(tmp_path, "e2e", [0])
    for path in tmp_path.glob("checkpoint*.pt"):
        path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match="damaged"):
        run(tmp_path, "ce", [0])


def test_a_run_goes_on_from_an_older_checkpoint_where_the_newest_is_damaged(tmp_path):
    whole, log = run(tmp_path / "whole", "ce", [0])
    run(tmp_path / "parts", "ce", [3])
    path = tmp_path / "parts/checkpoint.pt"
    path.write_bytes(path.read_bytes()[:100])
    parts, parts_log = run(tmp_path / "parts", "ce", [0])
    assert all(torch.equal(tensor, parts[name]) for name, tensor in whole.items())
    assert log == parts_log and (tmp_path / "parts/checkpoint.damaged").is_file()


def test_the_smoke_story_ends_with_its_table_and_is_not_done_twice(tmp_path):
    command = [sys.executable, ROOT / "train.py", "--preset", "smoke", "--out", tmp_path / "run"]
    first = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert first.returncode == 0, first.stderr[-2000:]
    for words in ("Acceptance length", "SpecOPD", "Survival", "tokens/s", "python serve.py"):
        assert words in first.stdout
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert set(summary["rows"]) == {"fresh", "start", "ce", "e2e", "specopd"}
    assert f"{summary['rows']['specopd']['al_t0']:8.3f}" in first.stdout
    assert summary["decoding"]["same_text"] is True
    again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert again.returncode == 0 and again.stdout.count("is there, kept") == 5
    other = subprocess.run(
        [*command, "--num-anchors", "3"], cwd=tmp_path, capture_output=True, text=True, timeout=600
    )
    assert (
        other.returncode == 2 and "num_anchors = 8, this run has 3" in other.stderr.splitlines()[-1]
    )


@pytest.mark.parametrize("kind", ["dspark", "dflash2"])
def test_the_smoke_story_of_the_other_drafters_goes_on_in_one_way(tmp_path, kind):
    command = [
        sys.executable,
        ROOT / "train.py",
        "--preset",
        "smoke",
        "--out",
        tmp_path / "run",
        "--drafter-kind",
        kind,
        "--ways",
        "specopd",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert set(summary["rows"]) == {"fresh", "start", "specopd"}
    assert summary["decoding"]["same_text"] is True
    log = (tmp_path / "run/start/log.jsonl").read_text().splitlines()
    assert ("coverage" in json.loads(log[-1])) == (kind == "dflash2")
    assert (tmp_path / "run/specopd/model.safetensors").is_file()
