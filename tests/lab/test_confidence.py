"""Verifying fewer drafts where the drafter is unsure: lossless, calibrated, and by the rule.
`pytest tests/lab/test_confidence.py`"""

import json
from functools import partial

import pytest
import torch

from drafter import DSpark, Sampling
from lab.confidence import (
    by_threshold,
    by_throughput,
    confidence,
    fit_temperatures,
    observe_rounds,
    profile_rounds,
    reliability,
)
from outcomes import Outcomes, distance, plain_distribution
from serve import generate
from small import DRAFTERS, SPARK, random_prompts, small_drafter, small_target
from support.measure import Measure

DIVISORS = torch.tensor([2.0, 0.5])
RULES = {
    "threshold": partial(by_threshold, threshold=0.6),
    "threshold, calibrated": partial(by_threshold, threshold=0.45, temperatures=DIVISORS),
    "throughput": partial(by_throughput, seconds=torch.tensor([1.0, 1.6, 1.8])),
    "nothing": partial(by_threshold, threshold=2.0),
}


@pytest.fixture(scope="module")
def pair():
    """A target over 4 tokens and a DSpark of two drafts, its confidence depending on the tokens."""
    target = small_target(seed=3, std=0.25, vocab_size=4, num_hidden_layers=2)
    drafter = small_drafter(target, mask_token_id=3, **(SPARK | dict(block_size=2)))
    target.num_tokens = 4
    with torch.no_grad():
        drafter.confidence_head.proj.weight.mul_(2)
        drafter.confidence_head.proj.bias.zero_()
    return target, drafter


def distance_from_plain(monkeypatch, pair, rule, sampling: Sampling) -> float:
    """How far a rule's text is from the target's distribution, by enumeration."""
    target, drafter = pair

    def by_row(logits):
        return torch.cat([rule(row[None]) for row in logits])

    def decode(num_rows):
        prompts = [[1, 0, 2]] * num_rows
        return generate(target, drafter, prompts, 3, sampling, batch_size=num_rows, choose=by_row)

    texts, _ = Outcomes(monkeypatch).distribution(decode)
    return distance(texts, plain_distribution(target, [1, 0, 2], sampling, 3))


@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.7, top_k=3)], ids=str)
@pytest.mark.parametrize("rule", list(RULES))
def test_the_texts_distribution_is_the_targets_whatever_is_verified(
    monkeypatch, pair, rule, sampling
):
    counts = set()

    def watched(logits):
        counts.add(int(RULES[rule](logits)))
        return RULES[rule](logits)

    assert distance_from_plain(monkeypatch, pair, watched, sampling) < 1e-6
    assert counts == {0} if rule == "nothing" else len(counts) > 1


def test_a_rule_that_knows_the_draft_it_judges_is_noticed(monkeypatch, pair):
    honest = DSpark.confidence_logits
    propose = DSpark.propose

    def peeking(self, hidden, previous, detached=False):
        ahead = torch.cat([previous[..., 1:], self.last[..., -1:]], -1)
        return honest(self, hidden, ahead, detached)

    def remembering(self, *args, **options):
        proposal = propose(self, *args, **options)
        self.last = proposal.tokens
        return proposal

    monkeypatch.setattr(DSpark, "propose", remembering)
    monkeypatch.setattr(DSpark, "confidence_logits", peeking)
    assert distance_from_plain(monkeypatch, pair, RULES["threshold"], Sampling(1.0)) > 1e-3


@pytest.mark.parametrize("name", ["threshold", "throughput"])
def test_greedy_text_is_plain_decodings_in_batches_that_verify_unequal_numbers(target, name):
    drafter = small_drafter(target, **DRAFTERS["dspark gated"])
    rule = partial(by_throughput, seconds=torch.linspace(1.0, 2.2, 5))
    if name == "threshold":
        rule = partial(by_threshold, threshold=0.5)
    prompts, counts = random_prompts(9), set()

    def watched(logits):
        verified = rule(logits)
        counts.update(verified.tolist())
        return verified

    plain = generate(target, None, prompts, 60)
    results = generate(target, drafter, prompts, 60, choose=watched, batch_size=8)
    assert [r.tokens for r in results] == [r.tokens for r in plain]
    num_rounds = sum(r.num_rounds for r in results)
    assert len(counts) > 2 and sum(r.num_nodes for r in results) < 5 * num_rounds
    with pytest.raises(ValueError, match="confidence head"):
        generate(target, small_drafter(target), prompts, 5, choose=rule)


def test_the_throughput_rule_admits_by_survival_until_the_rate_first_drops():
    logits = torch.tensor([[2.0, -1.0, 3.0], [0.5, 0.5, 0.5]])
    survival = logits.sigmoid().cumprod(-1)
    seconds = torch.tensor([1.0, 1.2, 1.8, 3.0])  # of rounds with 0, 1, 2, 3 drafts a row
    between = [1.0, 1.1, 1.2, 1.5, 1.8, 2.4, 3.0]  # and so with 0, 1/2, 1, ... on average
    ranked = sorted((-survival[b, k].item(), b, k) for b in range(2) for k in range(3))
    tokens, count, best, expected = 2.0, 0, 2.0 / between[0], [0, 0]
    for minus, b, _ in ranked:
        tokens, count = tokens - minus, count + 1
        if tokens / between[count] <= best:
            break
        best = tokens / between[count]
        expected[b] += 1
    assert by_throughput(logits, seconds).tolist() == expected and 0 < sum(expected) < 6
    assert by_throughput(logits, torch.ones(4)).tolist() == [3, 3]  # more drafts cost nothing
    # where each draft costs as much as a whole round
    assert by_throughput(logits, torch.arange(1.0, 5.0)).tolist() == [0, 0]


def test_rules_sum_in_float32_whatever_the_drafters_dtype():
    logits = torch.randn(64, 7, generator=torch.Generator().manual_seed(0)).bfloat16()
    rule = partial(by_throughput, seconds=1 + 0.4 * torch.arange(8))
    assert torch.equal(rule(logits), rule(logits.float())) and rule(logits).sum() > 30


def test_temperatures_are_found_again_and_make_survival_reliable():
    generator = torch.Generator().manual_seed(0)
    true = 2 * torch.randn(20_000, 3, generator=generator) + 1
    drawn = torch.rand(true.shape, generator=generator) < true.sigmoid()
    accepted = drawn.long().cumprod(1).sum(1)
    wrong = torch.tensor([3.0, 0.4, 1.0])
    temperatures = fit_temperatures(true * wrong, accepted)
    torch.testing.assert_close(temperatures, wrong, rtol=0.12, atol=0)
    before, _ = reliability(confidence(true * wrong), accepted)
    after, rows = reliability(confidence(true * wrong, temperatures), accepted)
    assert after < 0.01 < 0.05 < before
    assert sum(count for *_, count in rows) == true.numel()
    nothing = fit_temperatures(true[:2], torch.zeros(2).long())
    assert nothing[1:].tolist() == [1.0, 1.0]  # no round came there


def test_rounds_and_profile_measure_what_decoding_does(target):
    drafter = small_drafter(target, **DRAFTERS["dspark vanilla"])
    measure = Measure(random_prompts(3), 20, (), 0)
    logits, accepted = observe_rounds(target, drafter, measure, 1.0)
    assert logits.shape == (len(accepted), 4) and accepted.max() <= 4
    stop = generate(target, None, measure.prompts[:1], 20, Sampling(1.0))[0].tokens[7]
    cut = observe_rounds(target, drafter, Measure(random_prompts(3), 20, (stop,), 0), 1.0)
    assert len(cut[0]) == len(cut[1]) < len(accepted)  # rounds that end a text say too little
    seconds = profile_rounds(target, drafter, measure, num_rows=2)
    assert seconds.shape == (5,) and (seconds > 0).all() and (seconds.diff() >= 0).all()


def test_the_command_calibrates_profiles_and_compares_the_rules(lab, folders, tmp_path):
    target = small_target(vocab_size=264, max_position_embeddings=64)
    target.num_tokens = 258
    small_drafter(target, **SPARK).save_pretrained(tmp_path / "drafter")
    pair = ("--target", folders / "target", "--drafter", tmp_path / "drafter", "--out", tmp_path)
    sizes = ("--num-prompts", 2, "--prompt-length", 8, "--max-new-tokens", 30)
    code, said, error = lab("confidence", *pair, *sizes, "--batch-sizes", 1, 2)
    assert code == 0 and "calibrated: predicted and seen survival differ" in said, error
    figures = json.loads((tmp_path / "summary.json").read_text())["confidence"]
    assert len(figures["temperatures"]) == 4 and len(figures["seconds"]["2"]) == 5
    assert figures["rules"]["1"]["all"]["verified"] == 5
