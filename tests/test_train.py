"""Blocks and steps against every branch alone, parts against the whole, flags and the lesson. Runs
that stop and go on stand in tests/support/test_run.py. `pytest tests/test_train.py`"""

import dataclasses
import math
import re

import pytest
import torch

import loss as losses
import train as training
from drafter import GREEDY, PLAIN, Sampling, previous_tokens
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
    draw,
    gradient_gap,
    one_batch,
    small_trunks,
    step_by_hand,
    target_and_references,
    written_by,
)
from support.prepare import start_drafter
from train import MODES, Step, gradient, next_batch, objective_of, rollout_blocks, until_stop

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


@pytest.mark.parametrize("arch", ARCHS)
def test_the_text_branch_has_the_trunks_own_p_and_no_node(arch):
    target = small_target(arch=arch)
    drafter = small_drafter(target)
    batch = one_batch(target, written_by(target, 10, 20))
    trunk, anchors = batch[:2]
    blocks = blocks_of(CONFIG, drafter, *batch)
    without = blocks_of(dataclasses.replace(CONFIG, text_branch=False), drafter, *batch)
    assert torch.equal(blocks.tokens[:, :, :-1], without.tokens)
    assert torch.equal(blocks.p_hidden[:, :, :-1], without.p_hidden)
    assert {n: int(x) for n, x in blocks.counts.items()} == {
        n: int(x) for n, x in without.counts.items()
    }
    valid = blocks.valid[:, :, -1]
    assert valid.any() and not valid.all()  # some are cut off by the text's end
    for b, a, k in valid.nonzero().tolist():
        place = int(anchors[b, a]) + k
        assert torch.equal(blocks.p_hidden[b, a, -1, k], trunk.hidden[b, place])
        assert (
            blocks.tokens[b, a, -1, k] == trunk.tokens[b, place + 1]
            and place + 1 < trunk.lengths[b]
        )


def test_the_text_branch_adds_its_loss_under_one_denominator():
    target, references = target_and_references()
    drafter = small_drafter(target)
    batch = one_batch(target, references)
    configs = {
        "both": CONFIG,
        "proposed": dataclasses.replace(CONFIG, text_branch=False),
        "text": dataclasses.replace(CONFIG, mode="e2e"),
    }
    sums = {}
    for name, config in configs.items():
        value, figures = loss_of(config, drafter, blocks_of(config, drafter, *batch))
        weights = [w for w in drafter.parameters() if w.requires_grad]
        grads = torch.autograd.grad(value, weights, allow_unused=True)
        count = figures["supervised"]
        parts = [count * g.flatten() for g in grads if g is not None]
        sums[name] = torch.cat([count * value.detach()[None], *parts])
    torch.testing.assert_close(sums["both"], sums["proposed"] + sums["text"], atol=1e-4, rtol=1e-4)
    assert sums["text"][1:].abs().max() > 1e-3


def test_until_stop_keeps_the_first_stop_token():
    tokens = torch.tensor([[1, 21, 3, 21], [21, 1, 1, 1], [1, 2, 3, 4]])
    assert until_stop(tokens, STOP).int().tolist() == [[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1]]
    assert until_stop(tokens, ()).all()


def test_anchors_depend_on_seed_step_and_sequence_alone():
    prompt, lengths = torch.tensor([4, 6, 5]), torch.tensor([20, 9, 30])
    shape = (5, 2, 5)
    anchors, uniforms = draw(0, 7, torch.tensor([11, 12, 13]), prompt, lengths, shape)
    alone = draw(0, 7, torch.tensor([12]), prompt[1:2], lengths[1:2], shape)
    assert torch.equal(anchors[1:2, :2], alone[0]) and torch.equal(uniforms[1:2, :2], alone[1])
    assert anchors[1].tolist() == [6, 7, -1, -1, -1]  # first response token to the second to last
    other, _ = draw(0, 8, torch.tensor([11]), prompt[:1], lengths[:1], shape)
    assert not torch.equal(anchors[:1], other)
    drawn = torch.cat(
        [
            draw(0, step, torch.tensor([0]), prompt[:1], lengths[:1], (5, 1, 1))[0]
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
    anchors, uniforms = draw(0, 7, torch.tensor([1, 2]), prompt, lengths, (5, 2, 3))
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
        dict(mode="specopd", branch_temperature=0.0),
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
    drawn = dict(num_greedy=0, text_branch=False)
    assert dataclasses.replace(CONFIG, loss="e2e_al", **drawn).loss == "e2e_al"
    for change in ({"num_greedy": 1}, {"text_branch": True}, {"branch_temperature": 0.0}):
        with pytest.raises(ValueError, match="branches drawn from q itself"):
            dataclasses.replace(CONFIG, loss="e2e_al", **drawn | change)


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
    valid = shown["blocks"].valid[0]
    after = losses.e2e_tv(*plain_probs(shown["drafter"], shown["blocks"]), valid)
    expected = [losses.e2e_tv(p, q, valid).item(), after.item()]
    assert losses_printed == pytest.approx(expected, abs=6e-5) and expected[1] < expected[0]


@pytest.mark.slow
def test_the_lesson_is_a_command(capsys):
    done = run("train.py", "--lesson")
    assert done.returncode == 0 and not done.stderr
    training.lesson()
    assert done.stdout == capsys.readouterr().out
