"""Speculative decoding is lossless: greedy token for token, sampled by exact enumeration. `pytest
tests/test_serve.py`"""

import itertools
from dataclasses import replace

import pytest
import torch
from conftest import DRAFTERS, SECOND, SPARK, small_drafter, small_target

import drafter as drafter_module
import loss as losses
import serve
from drafter import Drafter, Memory, Proposal, Sampling
from hf.tokenizer import load_tokenizer, write_byte_tokenizer
from lab.confidence import Threshold
from serve import generate
from support.measure import Acceptance, evaluate, repetition
from tree import build_tree

W = 4


def prompts(count, seed=0, vocab=20, longest=12):
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, longest, (count,), generator=generator)
    return [torch.randint(0, vocab, (int(n),), generator=generator).tolist() for n in sizes]


class Scripted:
    """A drafter for tests: `rule(text so far) -> (tokens, q (W,V) or None)`; it keeps the text by
    itself."""

    class Config:
        num_draft_tokens = W
        target_layer_ids = (0,)

    config = Config()

    def __init__(self, rule):
        self.rule = rule

    def remember(self, trunk, room=0, bounded=False):
        return Memory([], trunk.width)

    def extend(self, memory, taps, lengths):
        return Memory([], memory.width)

    def propose(self, trunk, anchors, num_branches, sampling, generator, memory, keep_probs, *_):
        texts = [trunk.tokens[b, : int(a) + 1].tolist() for b, a in enumerate(anchors[:, 0])]
        tokens, q = zip(*(self.rule(text) for text in texts))
        q_probs = torch.stack(q)[:, None, None] if keep_probs else None
        return Proposal(torch.tensor(tokens)[:, None, None], None, None, sampling, self, q_probs)


def oracle(target, sampling):
    """Drafts from the target itself, token by token: q = p."""
    generator = torch.Generator().manual_seed(0)

    def rule(text):
        tokens, q = list(text), []
        for _ in range(W):
            q.append(sampling.probs(target(torch.tensor([tokens]))[0, -1]))
            tokens.append(int(drafter_module.draw(q[-1], torch.rand(1, generator=generator))))
        return tokens[-W:], torch.stack(q)

    return Scripted(rule)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_oracle_drafter_reaches_w_plus_one(target, temperature):
    results = generate(target, oracle(target, Sampling(temperature)), prompts(6), 23, temperature)
    for result in results:
        assert result.acceptance_length == W + 1
        assert (
            len(result.tokens) == 23 and result.num_rounds == 5 and result.finish_reason == "length"
        )
    assert sum(r.num_committed for r in results) == 6 * 25  # the limit cuts the text, not the count


def test_an_always_wrong_drafter_gives_al_one_and_the_same_text(target):
    plain = generate(target, None, prompts(6), 20)

    def wrong(text):
        best = int(target(torch.tensor([text]))[0, -1].argmax())
        return [(best + 1) % 20] * W, None

    for result, reference in zip(generate(target, Scripted(wrong), prompts(6), 20), plain):
        assert result.acceptance_length == 1 and result.tokens == reference.tokens
        assert not any(result.drafted)


def noisy(texts, seed=0):
    """Drafts from the known greedy text with one token in four replaced: every accept count
    occurs."""
    generator = torch.Generator().manual_seed(seed)

    def rule(text):
        full = next(t for t in texts if t[: len(text)] == text)
        ids = [*full[len(text) : len(text) + W], *[0] * W][:W]
        flip = torch.rand(W, generator=generator) < 0.25
        return [(i + 1) % 20 if f else i for i, f in zip(ids, flip.tolist())], None

    return Scripted(rule)


def test_greedy_text_equals_plain_decoding_64_prompts_of_200_tokens():
    target = small_target(std=0.5)
    asked = prompts(64)
    plain = generate(target, None, asked, 200, batch_size=64)
    full = [p + r.tokens for p, r in zip(asked, plain)]
    real = small_drafter(target)
    counts = set()
    for proposer in (noisy(full), real):
        for batch_size in (64, 7):
            results = generate(target, proposer, asked, 200, batch_size=batch_size)
            assert [r.tokens for r in results] == [r.tokens for r in plain]
            counts |= {n for r in results for n in r.accepted}
    assert counts == set(range(W + 1))
    alone = target(torch.tensor([full[0]]))[0, len(asked[0]) - 1 : -1].argmax(-1)
    assert alone.tolist() == plain[0].tokens


def test_a_stop_token_in_the_middle_of_a_block_ends_as_plain_decoding_does(target):
    asked = prompts(12, seed=2)
    free = generate(target, None, asked, 60)
    full = [p + r.tokens for p, r in zip(asked, free)]
    stop = free[0].tokens[17]
    plain = generate(target, None, asked, 60, stop_ids=(stop,))
    results = generate(target, noisy(full, 1), asked, 60, stop_ids=(stop,))
    assert [(r.tokens, r.finish_reason) for r in results] == [
        (r.tokens, r.finish_reason) for r in plain
    ]
    assert {r.finish_reason for r in plain} >= {"stop"}
    assert any(r.drafted[-1] and r.finish_reason == "stop" for r in results)  # an accepted draft
    for result in results:
        assert stop not in result.tokens[:-1]
        drafts = sum(result.accepted)
        cut = result.drafted[-1] and result.finish_reason == "stop"
        assert result.num_committed == drafts + result.num_rounds - cut
        if result.finish_reason == "stop":  # a round counts up to and including its stop token
            assert result.num_committed == len(result.tokens) - 1


@pytest.mark.parametrize("limit", [1, 2, W, W + 1])
def test_limits_smaller_than_a_block_cut_the_text_exactly(target, drafter, limit):
    asked = prompts(5)
    plain, results = (generate(target, d, asked, limit) for d in (None, drafter))
    assert [r.tokens for r in results] == [r.tokens for r in plain] and all(
        len(r.tokens) == limit for r in plain
    )


def test_a_sampled_text_does_not_depend_on_its_batch(target, drafter):
    asked = prompts(9)
    for proposer in (None, drafter):
        a, b = (generate(target, proposer, asked, 30, 1.0, seed=5, batch_size=n) for n in (9, 2))
        assert [r.tokens for r in a] == [r.tokens for r in b]
        assert [r.tokens for r in a] != [
            r.tokens for r in generate(target, proposer, asked, 30, 1.0, seed=6)
        ]


@pytest.mark.parametrize("num_branches", [1, 3])
def test_verifying_fewer_drafts_changes_the_rounds_and_not_the_text(target, drafter, num_branches):
    asked = prompts(6)
    plain = generate(target, None, asked, 40)
    for length in (1, 2, W):
        how = dict(num_branches=num_branches, draft_length=length)
        results = generate(target, drafter, asked, 40, **how)
        assert [r.tokens for r in results] == [r.tokens for r in plain]
        for result in results:
            assert max(result.accepted, default=0) <= length
            most = (1 + num_branches * length) * result.num_rounds
            assert result.num_nodes == most if num_branches == 1 else result.num_nodes <= most
    with pytest.raises(ValueError, match="draft_length"):
        generate(target, drafter, asked, 40, draft_length=-1)


def test_by_confidence_too_a_sampled_text_does_not_depend_on_its_batch(target):
    drafter, asked = small_drafter(target, **SPARK), prompts(9)
    a, b = (
        generate(target, drafter, asked, 30, 1.0, seed=5, batch_size=n, choose=Threshold(0.5))
        for n in (9, 2)
    )
    assert [r.tokens for r in a] == [r.tokens for r in b]
    assert sum(r.num_nodes for r in a) < 5 * sum(r.num_rounds for r in a)


def test_two_drafters_with_other_taps_serve_one_target(target):
    first = small_drafter(target)
    target.tap_ids = (1, 2)
    small_drafter(target, seed=2)
    plain, drafted = (generate(target, d, prompts(3), 20) for d in (None, first))
    assert [r.tokens for r in plain] == [r.tokens for r in drafted]


@pytest.mark.parametrize(
    "how, word",
    [
        (dict(max_new_tokens=0), "max_new_tokens"),
        (dict(max_new_tokens=5, batch_size=0), "batch_size"),
        (dict(max_new_tokens=5, temperature=float("nan")), "temperature"),
        (dict(max_new_tokens=600), "maximum length"),
        (dict(max_new_tokens=5, temperature=-1.0), "temperature"),
        (dict(max_new_tokens=5, draft_temperature=1.0), "draft_temperature"),
    ],
)
def test_what_cannot_be_decoded_is_said(target, drafter, how, word):
    with pytest.raises(ValueError, match=word):
        generate(target, drafter, [[1, 2]], **how)
    with pytest.raises(ValueError, match="empty"):
        generate(target, drafter, [[1], []], 5)


# ---------------------------------------------------------------- exact enumeration of losslessness


class Outcomes:
    """Every random outcome of `generate`: each row of a batch follows a script of choices and takes
    the first possible one where the script ends; what it could have chosen there becomes new
    scripts."""

    def __init__(self, monkeypatch):
        monkeypatch.setattr(drafter_module, "draw", self.draw)
        monkeypatch.setattr(serve, "draw", self.draw)
        monkeypatch.setattr(serve, "accept", self.accept)
        monkeypatch.setattr(torch, "rand", self.rand)

    def rand(self, *shape, generator=None):  # the uniforms only say which row is asking
        self.rows += 1
        return torch.full(shape, float(self.rows - 1))

    def choose(self, row: int, options: list[tuple[int, float]]) -> int:
        taken, script = self.taken[row], self.scripts[row]
        if len(taken) < len(script):
            pick = script[len(taken)]
        else:
            pick = options[0][0]
            self.waiting += [taken + [other] for other, _ in options[1:]]
        self.chance[row] *= dict(options)[pick]
        taken.append(pick)
        return pick

    def draw(self, probs, uniforms):
        flat = probs.double().reshape(len(probs), -1, probs.shape[-1])
        flat = flat / flat.sum(-1, keepdim=True)
        out = [
            [self.choose(int(u), [(v, c) for v, c in enumerate(slot) if c > 0]) for slot in row]
            for row, u in zip(flat.tolist(), uniforms.reshape(len(probs), -1)[:, 0].tolist())
        ]
        return torch.tensor(out).view(uniforms.shape)

    def accept(self, p_y, q_y, uniforms):
        ratios = (p_y.double() / q_y.double()).clamp(max=1).tolist()
        out = []
        for row, u in zip(ratios, uniforms[:, 0].tolist()):
            kept = []
            for ratio in row:  # behind the first rejection nothing is decided any more
                going = not kept or kept[-1]
                options = [o for o in ((1, ratio), (0, 1 - ratio)) if o[1] > 0]
                if going and len(options) > 1:
                    going = self.choose(int(u), options)
                kept.append(bool(going and ratio > 0))
            out.append(kept)
        return torch.tensor(out)

    def distribution(self, run, batch=4096) -> tuple[dict, float]:
        """{text: probability} over all outcomes of `run(number of rows) -> results`, and the
        acceptance rate."""
        self.waiting, found, accepted = [[]], {}, 0.0
        while self.waiting:
            self.scripts, self.waiting = self.waiting[:batch], self.waiting[batch:]
            self.taken, self.chance, self.rows = (
                [[] for _ in self.scripts],
                [1.0] * len(self.scripts),
                0,
            )
            for result, chance in zip(run(len(self.scripts)), self.chance):
                found[tuple(result.tokens)] = found.get(tuple(result.tokens), 0.0) + chance
                accepted += chance * (result.accepted[0] > 0)
        return found, accepted


def plain_distribution(target, prompt, sampling, length) -> dict:
    found = {}
    for text in itertools.product(range(target.config.vocab_size), repeat=length):
        p = sampling.probs(
            target(torch.tensor([[*prompt, *text]]))[0, len(prompt) - 1 : -1]
        ).double()
        found[text] = p.gather(-1, torch.tensor(text)[:, None]).prod().item()
    return found


def distance(found: dict, expected: dict) -> float:
    return max(
        abs(found.get(text, 0.0) - expected.get(text, 0.0))
        for text in expected.keys() | found.keys()
    )


KINDS = {
    "dflash": dict(block_size=3),
    "dspark": SPARK | dict(block_size=2, markov_head_type="rnn"),
    "dflash2": SECOND | dict(block_size=3, selector_top_k=2),
}


@pytest.fixture(scope="module", params=list(KINDS))
def four_token_pair(request):
    """A target over 4 tokens whose p depends on history, a drafter with W = 2 trained to be near it
    (MASK is id 3, which q never holds and p does)."""
    target = small_target(seed=3, std=0.25, vocab_size=4, num_hidden_layers=2)
    drafter = small_drafter(target, mask_token_id=3, **KINDS[request.param])
    target.num_tokens = 4
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(150):
        tokens = torch.randint(0, 4, (16, 6), generator=generator)
        trunk = target.prefill(tokens, torch.full((16,), 6))
        anchors = torch.tensor([[2, 3, 4]]).expand(16, 3)
        proposal = drafter.propose(trunk, anchors, 4, Sampling(1.0), generator)
        p = target.branch_probs(trunk, build_tree(tokens, trunk.lengths, anchors, proposal.tokens))
        losses.tv(p, proposal.probs()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return target, drafter


SETTINGS = [Sampling(1.0), Sampling(0.7), Sampling(1.0, top_k=2), Sampling(1.0, top_p=0.8)]


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
@pytest.mark.parametrize("draft_temperature", [None, 0.0], ids=["drawn", "argmax"])
def test_sampled_text_has_exactly_the_targets_distribution(
    monkeypatch, four_token_pair, sampling, draft_temperature
):
    target, drafter = four_token_pair
    prompt = [1, 0, 2]
    expected = plain_distribution(target, prompt, sampling, 3)
    assert abs(sum(expected.values()) - 1) < 1e-6

    def run(rows):
        return generate(
            target,
            drafter,
            [prompt] * rows,
            3,
            sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            draft_temperature=draft_temperature,
            batch_size=rows,
        )

    found, accepted = Outcomes(monkeypatch).distribution(run)
    assert abs(sum(found.values()) - 1) < 1e-6
    assert accepted > 0.3  # acceptances are common, so that they are tested
    assert distance(found, expected) < 1e-6


def test_dividing_an_argmax_draft_by_a_soft_q_is_noticed(monkeypatch, four_token_pair):
    target, drafter = four_token_pair
    honest = Drafter.propose

    def careless(self, trunk, anchors, num_branches, sampling, *rest, **options):
        drawn = honest(
            self, trunk, anchors, num_branches, replace(sampling, temperature=0.0), *rest, **options
        )
        soft = sampling.probs(self.logits(drawn.hidden, drawn.before))
        return replace(drawn, q_probs=soft.detach())

    monkeypatch.setattr(Drafter, "propose", careless)

    def run(rows):
        return generate(target, drafter, [[1, 0, 2]] * rows, 3, 1.0, batch_size=rows)

    found, _ = Outcomes(monkeypatch).distribution(run)
    assert distance(found, plain_distribution(target, [1, 0, 2], Sampling(1.0), 3)) > 1e-3


@pytest.mark.parametrize("draft_temperature", [None, 0.0], ids=["drawn", "argmax"])
def test_sampled_frequencies_match_with_the_real_generator(four_token_pair, draft_temperature):
    """Enumeration replaces the uniforms; this does not. Pearson's chi-square, texts expected fewer
    than five times pooled: above df + 6 sqrt(2 df) by chance less than once in 10,000."""
    target, drafter = four_token_pair
    n, prompt = 20_000, [1, 0, 2]
    expected = plain_distribution(target, prompt, Sampling(1.0), 3)
    results = generate(
        target,
        drafter,
        [prompt] * n,
        3,
        1.0,
        seed=1,
        batch_size=n,
        draft_temperature=draft_temperature,
    )
    pools = {}
    for text, p in expected.items():
        pool = pools.setdefault(text if n * p >= 5 else "rare", [0, 0.0])
        pool[1] += n * p
    for result in results:
        text = tuple(result.tokens)
        pools[text if text in pools else "rare"][0] += 1
    chi, df = sum((seen - mean) ** 2 / mean for seen, mean in pools.values()), len(pools) - 1
    assert df >= 20 and chi < df + 6 * (2 * df) ** 0.5


def test_a_draft_is_accepted_with_probability_p_over_q():
    uniforms = torch.linspace(0, 1, 10_001)[:-1]
    for p_y, q_y in [(0.3, 0.6), (0.6, 0.3), (0.0, 0.5), (0.5, 0.5), (0.25, 1.0)]:
        kept = serve.accept(torch.tensor(p_y), torch.tensor(q_y), uniforms).float().mean()
        assert abs(kept - min(1.0, p_y / q_y)) < 2e-4


def test_accept_counts_a_prefix_only():
    """Right, wrong, right counts one, not two."""
    logits = torch.eye(8)[torch.tensor([[1, 2, 3, 4]])]
    count, token = serve.verify(logits, torch.tensor([[1, 5, 3]]), None, Sampling(0.0), None)
    assert count.tolist() == [1] and token.tolist() == [2]
    q = torch.eye(8)[torch.tensor([[1, 5, 3]])]
    count, token = serve.verify(
        logits * 1e4, torch.tensor([[1, 5, 3]]), q, Sampling(1.0), torch.zeros(1, 4)
    )
    assert count.tolist() == [1] and token.tolist() == [2]


def test_an_empty_residual_falls_back_to_p():
    logits = torch.zeros(1, 2, 4)
    q = torch.full((1, 1, 4), 0.25)
    count, token = serve.verify(
        logits, torch.tensor([[2]]), q, Sampling(1.0), torch.tensor([[1.0, 0.99]])
    )
    assert count.tolist() == [0] and token.tolist() == [3]


# ---------------------------------------------------------------------------------------- measuring


def test_evaluation_counts_what_decoding_did(target, drafter):
    asked = prompts(7)
    results = generate(target, drafter, asked, 30, 1.0, seed=2)
    measured = evaluate(target, drafter, asked, 30, 1.0, seed=2, batch_size=3)
    assert measured.mean == sum(r.num_committed for r in results) / sum(
        r.num_rounds for r in results
    )
    rounds = [n for r in results for n in r.accepted]
    for k in range(1, W + 1):
        assert abs(measured.survival[k - 1] - sum(n >= k for n in rounds) / len(rounds)) < 1e-6
    assert abs(1 + sum(measured.survival) - measured.mean) < 1e-5  # no stop token cut a round


def test_conditional_rates_multiply_to_survival_and_loops_are_counted():
    survived = torch.tensor([[8, 4, 1, 0], [4, 2, 1, 0]])
    one = Acceptance(*torch.tensor([[9, 9], [10, 6], [50, 30]]), torch.zeros(2), survived, 1.0)
    assert one.survival == pytest.approx([12 / 16, 6 / 16, 2 / 16, 0])
    assert one.conditional == pytest.approx([12 / 16, 1 / 2, 1 / 3, 0])
    counts = torch.tensor([[5, 6, 0], [3, 3, 0], [9, 9, 0]])
    rare = Acceptance(*counts, torch.zeros(3), torch.tensor([[2, 0], [2, 0], [0, 0]]), 1.0)
    assert rare.conditional == [pytest.approx(4 / 6), 0.0] and rare.mean == 11 / 6
    assert 1.6 < rare.interval()[0] <= rare.mean <= rare.interval()[1] < 2.1
    assert repetition([1, 2, 3, 4] * 8, 4) == pytest.approx(1 - 4 / 29)
    assert repetition(list(range(30))) == 0 and repetition([1, 2]) == 0


def test_the_paired_interval_is_narrower_and_covers_the_difference():
    torch.manual_seed(0)
    rounds = torch.randint(20, 40, (96,))
    base = (rounds * (2 + torch.rand(96))).long()
    a = Acceptance(base, rounds, rounds, base * 0.0, torch.zeros(96, W), 1.0)
    b = Acceptance(base + rounds // 5, rounds, rounds, base * 0.0, torch.zeros(96, W), 1.0)
    low, high = b.interval(a)
    assert low <= b.mean - a.mean <= high and low > 0.1
    wide = b.interval()
    assert high - low < (wide[1] - wide[0]) / 3


def test_marked_text_shows_who_wrote_what(tmp_path):
    write_byte_tokenizer(tmp_path)
    result = serve.Result(list(b"abcd"), [False, True, True, False])
    assert serve.marked(result, load_tokenizer(tmp_path), False) == "a[bc]d"
    assert serve.marked(result, load_tokenizer(tmp_path), True) == "a\033[32mbc\033[0md"


@pytest.mark.parametrize("arch", ["gqa", "gdn", "qsa"])
@pytest.mark.parametrize("batch_size", [1, 8])
@pytest.mark.parametrize("num_branches", [1, 3])
def test_greedy_text_of_every_family_equals_plain_decoding(arch, batch_size, num_branches):
    """Over 200 tokens, ragged prompts, rows that finish at different times, one chain or three."""
    target = small_target(arch=arch)
    drafter = small_drafter(target)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, 20, (n,), generator=generator).tolist() for n in (3, 11, 1, 7, 20)]
    how = dict(max_new_tokens=200, stop_ids=(5,), batch_size=batch_size)
    fast = generate(target, drafter, prompts, num_branches=num_branches, **how)
    plain = generate(target, None, prompts, **how)
    slow = []
    for prompt in prompts:  # and plain decoding equals running the whole text again and again
        ids = list(prompt)
        while len(ids) < len(prompt) + 30 and ids[len(prompt) :].count(5) == 0:
            ids.append(int(target(torch.tensor([ids]))[0, -1].argmax()))
        slow.append(ids[len(prompt) :])
    assert [r.tokens for r in fast] == [r.tokens for r in plain]
    assert all(r.tokens[:30] == ids for r, ids in zip(plain, slow))


@pytest.mark.parametrize(
    "arch, variant",
    [("gqa", variant) for variant in DRAFTERS]
    + [
        (arch, variant)
        for arch in ("gdn", "qsa")
        for variant in ("dflash", "dspark rnn", "dflash2 sliding, scaled")
    ],
)
def test_greedy_text_is_plain_decodings_with_every_drafter_on_every_target(arch, variant):
    target = small_target(std=0.3, arch=arch)
    drafter, asked = small_drafter(target, **DRAFTERS[variant]), prompts(4)
    plain = generate(target, None, asked, 30, stop_ids=(5,))
    for num_branches in (1, 3):
        results = generate(target, drafter, asked, 30, stop_ids=(5,), num_branches=num_branches)
        assert [r.tokens for r in results] == [r.tokens for r in plain]


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("arch", ["gdn", "qsa"])
def test_sampled_text_of_the_hybrid_targets_has_their_distribution(monkeypatch, arch, kind):
    target = small_target(seed=3, arch=arch, vocab_size=4, eos_token_id=2)
    drafter = small_drafter(target, mask_token_id=3, **KINDS[kind])
    target.num_tokens = 4

    def run(rows):
        return generate(target, drafter, [[1, 0, 2]] * rows, 3, 1.0, batch_size=rows)

    found, _ = Outcomes(monkeypatch).distribution(run)
    assert distance(found, plain_distribution(target, [1, 0, 2], Sampling(1.0), 3)) < 1e-5


def test_of_several_chains_the_longest_right_one_wins(target):
    """An oracle that hides the right chain behind wrong ones loses nothing by it."""
    prompts = [[1, 2, 3], [4, 5, 6, 7]]
    plain = generate(target, None, prompts, 40)
    texts = {tuple(p): p + r.tokens for p, r in zip(prompts, plain)}

    class Hidden(Drafter):
        def propose(self, trunk, anchors, K, *rest, **options):
            tokens = torch.full((len(anchors), 1, K, W), 23)
            for row, anchor in enumerate(anchors[:, 0].tolist()):
                start = trunk.tokens[row, : anchor + 1].tolist()
                whole = next(t for t in texts.values() if t[: len(start)] == start)
                right = (whole + [23] * W)[anchor + 1 : anchor + 1 + W]
                tokens[row, 0, 1] = torch.tensor(right)
                tokens[row, 0, 0, 0] = right[0]
            return Proposal(tokens, None, None, Sampling(), self)

    oracle = small_drafter(target)
    oracle.__class__ = Hidden
    W = oracle.config.num_draft_tokens
    several = generate(target, oracle, prompts, 40, num_branches=3)
    assert [r.tokens for r in several] == [r.tokens for r in plain]
    assert all(max(r.accepted) == W and r.num_rounds == -(-39 // (W + 1)) for r in several)
    with pytest.raises(ValueError, match="temperature 0"):
        generate(target, oracle, prompts, 40, temperature=1.0, num_branches=2)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_target_whose_logits_are_no_numbers_is_an_error(temperature):
    target = small_target()
    drafter = small_drafter(target)
    for later in (False, True):  # at once, or not before the first round
        target.lm_head.weight.data[3] = torch.nan
        if later:
            honest, calls = type(target).head, []

            def head(self, hidden, honest=honest, calls=calls):
                calls.append(hidden)
                logits = honest(self, hidden)
                return logits.nan_to_num() if len(calls) == 1 else logits

            target.head = head.__get__(target)
        for one in (None, drafter) if not later else (drafter,):
            with pytest.raises(ValueError, match="logits are NaN"):
                generate(target, one, [[1, 2, 3]], 8, temperature)
