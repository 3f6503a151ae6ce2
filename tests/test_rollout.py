"""Rollouts: the blocks that real rounds proposed, and what the target said of them. `pytest
tests/test_rollout.py`"""

import dataclasses

import pytest
import torch
from conftest import ARCHS, DRAFTERS, small_drafter, small_target
from test_train import CONFIG, STOP, run, setup

import loss as losses
import step
import train as training
from rollout import collect
from serve import generate
from step import draw, step_loss
from support.measure import Measure
from support.prepare import Trunks


def prompts(count=5):
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 20, (n + 3,), generator=generator).tolist() for n in range(count)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("arch", ARCHS)
def test_every_block_and_its_p_are_those_of_the_round_that_proposed_it(arch, temperature):
    target = small_target(arch=arch)
    drafter = small_drafter(target)
    asked, W = prompts(), 4
    rollout = collect(target, drafter, asked, 20, temperature, 7, STOP)
    decoded = generate(target, drafter, asked, 20, temperature, 7, STOP, batch_size=5)
    seen = 0
    for b, (prompt, result) in enumerate(zip(asked, decoded)):
        text = prompt + result.tokens
        assert rollout.trunk.tokens[b, : len(text)].tolist() == text
        fresh = target.prefill(torch.tensor([text]), torch.tensor([len(text)]))
        for r, anchor in enumerate(rollout.anchors[b].tolist()):
            if anchor < 0:
                continue
            drafts, seen = rollout.tokens[b, r, 0].tolist(), seen + 1
            taps = (rollout.trunk.taps[b, :anchor], fresh.taps[0, :anchor])
            torch.testing.assert_close(*taps, atol=1e-4, rtol=1e-4)
            p = target.head(rollout.p_hidden[b, r, 0]).softmax(-1)
            alone = target(torch.tensor([text[: anchor + 1] + drafts]))[0, anchor : anchor + W]
            torch.testing.assert_close(p, alone.softmax(-1), atol=1e-4, rtol=0)
            accepted = result.accepted[r]
            kept = text[anchor + 1 : anchor + 1 + accepted]
            assert kept == drafts[: len(kept)]
            assert len(kept) == min(accepted, len(text) - anchor - 1)
        assert (rollout.anchors[b] >= 0).sum() == result.num_rounds
    assert seen > 20


@pytest.mark.parametrize("variant", ["dflash", "dspark rnn", "dflash2"])
def test_the_loss_is_e2e_tv_on_accepted_and_rejected_positions(variant):
    target = small_target()
    drafter = small_drafter(target, **DRAFTERS[variant])
    config = dataclasses.replace(CONFIG, mode="rollout", confidence_weight=0.0)
    rollout = collect(target, drafter, prompts(), 16, 1.0, 1, STOP)
    part = draw(config, drafter, rollout.trunk, rollout.anchors, None, None, STOP, rollout)
    value, figures = step_loss(config, drafter, part)
    p_all, q_all, valid_all = [], [], []
    for b, r in (rollout.anchors >= 0).nonzero().tolist():
        anchor, drafts = int(rollout.anchors[b, r]), rollout.tokens[b, r, 0]
        one = rollout.trunk.select(torch.tensor([b]))
        hidden = drafter.block(one, torch.tensor([[anchor]]))[0]  # (1, W, C)
        before = torch.cat([one.tokens[0, anchor : anchor + 1], drafts[:-1]])[None]
        q_all.append(drafter.logits(hidden, before)[0].softmax(-1))
        p_all.append(target.head(rollout.p_hidden[b, r, 0]).softmax(-1))
        stops = (drafts == STOP[0]).nonzero().flatten().tolist()
        valid_all.append(torch.arange(4) <= (stops[0] if stops else 4))
    p, q, valid = map(torch.stack, (p_all, q_all, valid_all))
    slow = losses.e2e_tv(p, q, valid)
    assert figures["supervised"] == valid.sum()
    torch.testing.assert_close(value, slow, atol=1e-5, rtol=0)
    weights = [w for n, w in drafter.named_parameters() if not n.startswith("confidence")]
    for got, want in zip(torch.autograd.grad(value, weights), torch.autograd.grad(slow, weights)):
        torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-3)


def test_responses_of_one_token_leave_nothing_to_learn_and_no_error():
    target = small_target()
    drafter = small_drafter(target)
    first = {r.tokens[0] for r in generate(target, None, prompts(), 1)}
    rollout = collect(target, drafter, prompts(), 16, 0.0, 1, tuple(first))
    config = dataclasses.replace(CONFIG, mode="rollout")
    given = rollout.trunk, rollout.anchors, None, None, tuple(first), rollout
    value, figures = step_loss(config, drafter, draw(config, drafter, *given))
    value.backward()
    assert figures["supervised"] == 0 and value == 0
    assert all(p.grad.abs().sum() == 0 for p in drafter.parameters())


def test_rollouts_resume_bit_for_bit(tmp_path):
    whole, log = run(tmp_path / "whole", "rollout", [0])
    parts, parts_log = run(tmp_path / "parts", "rollout", [2, 0])
    assert all(torch.equal(tensor, parts[name]) for name, tensor in whole.items())
    assert log == parts_log and all(r["supervised"] > 0 for r in log)


def test_several_updates_on_one_decoding(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(step, "collect", lambda *a: calls.append(1) or collect(*a))
    target, references = setup()
    config = dataclasses.replace(CONFIG, mode="rollout", reuse=2, save_every=2)
    trunks, measure = Trunks(target, references, 1.0), Measure([[1, 2]], 8, STOP, 0)
    training.train(config, small_drafter(target), trunks, measure, tmp_path)
    assert len(calls) == 2
    with pytest.raises(ValueError, match="multiples"):
        dataclasses.replace(CONFIG, mode="rollout", reuse=3)
