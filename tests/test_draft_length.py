"""How many drafts are verified: what AutoLength chooses, and that the text stays the target's.
Drafts by lookup. `pytest tests/test_draft_length.py`"""

import itertools

import pytest
import torch

import serve
from drafter import GREEDY, PLAIN, LookupConfig, LookupDrafter, Sampling
from outcomes import Outcomes, distance, plain_distribution, trained_on_four_tokens
from serve import AutoLength, generate
from small import ARCHS, SECOND, SPARK, random_prompts, small_drafter, small_target
from target import Trunk

W = 4
PROMPT = [1, 0, 2, 1, 0]
KINDS = {"dflash": {}, "dspark": SPARK, "dflash2": SECOND}
FOUR_TOKENS = {
    "dflash": {},
    "dspark": SPARK | {"block_size": 2},
    "dflash2": SECOND | {"selector_top_k": 2},
}


class Clock:
    """Rounds that take the seconds of a table, by how many drafts they verify."""

    def __init__(self, seconds: list[float]):
        self.seconds = seconds
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def simulated(seconds, acceptance: float, rounds: int, rows: int = 1, equal=False) -> list[int]:
    """The numbers of drafts chosen, round by round, where each draft is accepted by chance."""
    rule = AutoLength(len(seconds) - 1)
    rule.start(rows, equal)
    texts = list(range(rows))
    generator = torch.Generator().manual_seed(0)
    chosen = []
    for _ in range(rounds):
        lengths = torch.tensor(rule.choose(texts))[:, None]
        hits = torch.rand(rows, len(seconds) - 1, generator=generator) < acceptance
        hits &= torch.arange(hits.shape[1]) < lengths
        accepted = hits.long().cumprod(1).sum(1).tolist()
        rule.learn(texts, lengths[:, 0].tolist(), accepted, seconds[rule.n])
        assert lengths.sum() == rule.n * rows
        chosen.append(rule.n)
    return chosen


def best_length(seconds: list[float], acceptance: float) -> int:
    tokens = [sum(acceptance**k for k in range(n + 1)) for n in range(len(seconds))]
    return max(range(len(seconds)), key=lambda n: tokens[n] / seconds[n])


@pytest.mark.parametrize("rows, equal", [(1, False), (5, False), (5, True)])
@pytest.mark.parametrize("acceptance", [0.02, 0.5, 0.8, 0.97])
def test_the_choice_is_the_fastest_number_of_drafts(acceptance, rows, equal):
    seconds = [1.0, 1.5, 1.6, 1.7, 1.8, 2.2, 2.6, 3.0]
    chosen = simulated(seconds, acceptance, 400, rows, equal)[50:]
    best = best_length(seconds, acceptance)
    tokens = [sum(acceptance**k for k in range(n + 1)) for n in range(len(seconds))]
    speed = sum(tokens[n] for n in chosen) / sum(seconds[n] for n in chosen)
    assert speed > 0.95 * tokens[best] / seconds[best]


def test_a_useless_drafter_costs_little():
    seconds = [1.0, 1.5, 1.6, 1.7, 1.8, 2.0, 2.2, 2.4]
    chosen = simulated(seconds, 0.0, 200)
    assert 200 / sum(seconds[n] for n in chosen) > 0.95  # with the rounds that measure
    later = chosen[40:]
    assert len(later) / sum(seconds[n] for n in later) > 0.98


@pytest.mark.parametrize("before, after", [(0.85, 0.02), (0.05, 0.9)])
def test_a_change_of_the_text_is_followed(before, after):
    """Within 200 rounds the choice is as fast as the best one, but for a tenth."""
    seconds = [1.0, 1.31, 1.37, 1.43, 1.49, 1.55, 1.61, 1.67]
    generator = torch.Generator().manual_seed(0)
    rule = AutoLength(len(seconds) - 1)
    rule.start(1)
    chosen = []
    for number in range(600):
        (n,) = rule.choose([0])
        hits = torch.rand(n, generator=generator) < (before if number < 300 else after)
        rule.learn([0], [n], [int(hits.long().cumprod(0).sum())], seconds[n])
        chosen.append(n)
    tokens = [sum(after**k for k in range(n + 1)) for n in range(len(seconds))]
    best = best_length(seconds, after)
    late = chosen[400:]
    speed = sum(tokens[n] for n in late) / sum(seconds[n] for n in late)
    assert speed > 0.9 * tokens[best] / seconds[best]


def test_seconds_are_those_of_the_number_of_texts():
    rule = AutoLength(2)
    rule.start(32)
    for num_texts, n, seconds in ((1, 2, 1.0), (1, 0, 0.5), (32, 2, 7.2)):
        rule.n = n
        texts = list(range(num_texts))
        rule.learn(texts, [n] * num_texts, [0] * num_texts, seconds)
    assert rule._seconds(1) == {0: 0.5, 2: 1.0}
    assert rule._seconds(32) == {0: 0.5, 2: 7.2}  # of plain steps none other is known
    assert rule._seconds(17) == {0: 0.5, 2: pytest.approx(1 + 6.2 * 16 / 31)}
    for seconds in (9.0, 1.0, 2.0, 3.0, 4.0):  # a quarter of the rounds was faster
        rule.learn([0], [2], [0], seconds)
    assert rule._seconds(1)[2] == 1.0


def test_drafts_that_do_not_pay_for_many_texts_are_not_used_because_they_pay_for_fewer():
    """Rounds with drafts are seen with few texts, those without with many."""
    rule = AutoLength(4)

    def seconds(num_texts: int, n: float) -> float:
        return 5 + 0.16 * num_texts * (1 + n) + (13 - 5 if n else 0)

    generator = torch.Generator().manual_seed(0)
    used = []
    for wave in range(6):
        rule.start(32)
        left = [20 + 2 * i for i in range(32)]
        while texts := [i for i in range(32) if left[i] > 0]:
            lengths = rule.choose(texts)
            hits = torch.rand(len(texts), 4, generator=generator) < 0.85
            hits &= torch.arange(4) < torch.tensor(lengths)[:, None]
            accepted = hits.long().cumprod(1).sum(1).tolist()
            rule.learn(texts, lengths, accepted, seconds(len(texts), rule.n))
            for i, count in zip(texts, accepted):
                left[i] -= 1 + count
            if wave and len(texts) > 28:
                used.append(rule.n)
    tokens = 1 + sum(0.85**k for k in range(1, 5))
    assert tokens / seconds(32, 4) < 0.99 / seconds(32, 0)
    assert tokens / seconds(20, 4) > 1.03 / seconds(20, 0)
    assert sum(n == 0 for n in used) > 0.65 * len(used)


def test_every_text_has_its_own_counts():
    rule = AutoLength(W)
    rule.start(2)
    rule.n = W
    for _ in range(30):
        rule.learn([0, 1], [W, W], [W, 0], 1.0)
    good, bad = rule._survival([0, 1])
    assert good[-1] > 1.3 * bad[0]
    rule._average = lambda texts: 2  # drafts for each on average: the good text gets more of them
    lengths = rule.choose([0, 1])
    assert sum(lengths) == 4 and lengths[0] > 2 and rule.choose([1, 0]) == lengths[::-1]
    rule.equal = True  # where padding is not free
    assert rule.choose([0, 1]) == [2, 2]


# -------------------------------------------------------------- whatever is chosen, it is lossless


class ByThePast(AutoLength):
    """All of 0..W, decided by what earlier rounds accepted; each text has its own number."""

    def start(self, num_texts, equal=False):
        self.rounds = self.sum = 0

    def choose(self, texts):
        return [(2 * self.rounds + self.sum + 3 * text) % (self.W + 1) for text in texts]

    def learn(self, texts, judged, accepted, seconds):
        self.rounds += 1
        self.sum += sum(accepted)


def known(num_drafts: int) -> AutoLength:
    """An AutoLength that has measured its rounds, whose choice turns on what was accepted."""
    rule = AutoLength(num_drafts, Clock([]))
    rule.PRIOR, rule.KEPT = 0.5, 1
    rule.learn = lambda *figures: AutoLength.learn(rule, *figures[:-1], 0.0)
    rule._seconds = lambda num_texts: {n: 1.0 + 0.45 * n for n in range(num_drafts + 1)}
    return rule


@pytest.fixture(scope="module", params=FOUR_TOKENS)
def pair(request):
    return trained_on_four_tokens(**(dict(block_size=3) | FOUR_TOKENS[request.param]))


@pytest.mark.parametrize("rule", [ByThePast, known])
def test_sampled_text_has_the_targets_distribution(monkeypatch, pair, rule):
    target, drafter = pair
    num_drafts = drafter.config.num_draft_tokens
    chosen = set()

    def decode(rows):
        length = rule(num_drafts)
        choose = length.choose

        def choose_and_note(texts):
            lengths = choose(texts)
            chosen.update(lengths)
            return lengths

        length.choose = choose_and_note
        return generate(target, drafter, [PROMPT], 3, PLAIN, draft_length=length)

    texts, _ = Outcomes(monkeypatch).distribution(decode, batch=1)
    assert len(chosen) > 1 and 0 in chosen
    assert distance(texts, plain_distribution(target, PROMPT, PLAIN, 3)) < 1e-6


def test_a_rule_that_peeks_at_its_drafts_is_noticed(monkeypatch):
    target, drafter = trained_on_four_tokens(block_size=3, **FOUR_TOKENS["dflash2"])
    draft = serve.Batch.draft

    def peeking(batch, lengths):
        drafts, q = draft(batch, lengths)
        n = int(drafts[0, 0]) % 2  # the first draft is verified if it is odd
        return drafts[:, :n], q[:, :n]

    monkeypatch.setattr(serve.Batch, "draft", peeking)

    def decode(rows):
        return generate(target, drafter, [PROMPT], 3, PLAIN)

    texts, _ = Outcomes(monkeypatch).distribution(decode, batch=1)
    assert distance(texts, plain_distribution(target, PROMPT, PLAIN, 3)) > 1e-3


@pytest.mark.parametrize("sampling", [GREEDY, PLAIN], ids=["greedy", "sampled"])
@pytest.mark.parametrize("one_hot", [False, True])
def test_a_row_of_fewer_drafts_is_judged_as_a_shorter_chain(sampling, one_hot):
    generator = torch.Generator().manual_seed(0)
    B, V = 500, 5
    logits = 2 * torch.randn(B, W + 1, V, generator=generator)
    q = (logits[:, :-1] + torch.randn(B, W, V, generator=generator)).softmax(-1)
    drafts = q.argmax(-1)
    uniforms = torch.rand(B, W + 1, generator=generator)
    lengths = torch.randint(0, W + 1, (B,), generator=generator)
    cut = torch.where(torch.arange(W) < lengths[:, None], drafts, -1)
    packed = serve.verify(logits, cut, None if one_hot else q, sampling, uniforms)
    for row, n in enumerate(lengths.tolist()):
        part = slice(row, row + 1)
        noise = torch.cat([uniforms[part, :n], uniforms[part, -1:]], 1)
        q_row = None if one_hot or n == 0 else q[part, :n]
        alone = serve.verify(logits[part, : n + 1], drafts[part, :n], q_row, sampling, noise)
        assert [x[row].item() for x in packed] == [x.item() for x in alone]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("arch", ARCHS)
def test_greedy_text_equals_plain_decoding(arch, kind):
    target = small_target(arch=arch)
    drafter = small_drafter(target, **KINDS[kind])
    prompts = random_prompts(6, seed=3)
    plain = generate(target, None, prompts, 40, stop_ids={1})
    for rule in (ByThePast, AutoLength):
        length = rule(drafter.config.num_draft_tokens)
        for size in (1, 3):
            results = generate(
                target, drafter, prompts, 40, stop_ids={1}, batch_size=size, draft_length=length
            )
            assert [r.tokens for r in results] == [r.tokens for r in plain]


@pytest.mark.parametrize("kind", KINDS)
def test_plain_steps_are_remembered_before_the_next_draft(monkeypatch, kind):
    """After any mixture of plain steps and drafted rounds, the drafter proposes what it proposes
    on a fresh trunk of the same text."""
    target = small_target()
    drafter = small_drafter(target, **KINDS[kind])
    checked = []
    draft = serve.Batch.draft

    def watched(batch, lengths):
        drafts, q = draft(batch, lengths)
        length_of = dict(zip(batch.alive, lengths))
        for row, number in enumerate(batch.prompt_of_row if any(lengths) else ()):
            text = prompts[number] + batch.results[number].tokens
            tokens = torch.tensor([text])
            fresh = target.prefill(tokens, torch.tensor([len(text) - 1]))
            anchors = torch.tensor([[len(text) - 1]])
            expected = drafter.propose(fresh, anchors, sampling=GREEDY)
            count = length_of.get(number, 0)
            wanted = expected.tokens[0, 0, 0, :count].tolist()
            assert drafts[row].tolist() == wanted + [-1] * (drafts.shape[1] - count)
            checked.append(len(batch.plain_taps))
        return drafts, q

    monkeypatch.setattr(serve.Batch, "draft", watched)
    prompts = random_prompts(7, seed=3)
    length = ByThePast(drafter.config.num_draft_tokens)
    generate(target, drafter, prompts, 30, stop_ids={1}, batch_size=3, draft_length=length)
    assert len(checked) > 20


# ------------------------------------------------------------------------------------------- lookup


def slow_lookup(text: list[int], num_drafts: int) -> list[int]:
    """What followed the longest match of the last 3, 2 or 1 tokens, the last one if there are
    several. The copy goes on with what it has copied."""
    for size in (3, 2, 1):
        for end in range(len(text) - 1, size - 1, -1):
            if size < len(text) and text[end - size : end] == text[-size:]:
                grown = list(text)
                for number in range(num_drafts):
                    grown.append(grown[end + number])
                return grown[len(text) :]
    return [-1] * num_drafts


def test_lookup_proposes_what_its_slow_twin_proposes():
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(0, n, (40,), generator=generator) for n in (2, 3, 6, 30, 200, 1000)]
    tokens = torch.stack(texts)
    for end in (1, 2, 3, 10, 25, 40):
        anchors = torch.full((len(texts), 1), end - 1)
        trunk = Trunk(tokens, anchors[:, 0], [], (), 40)
        if end == 1:  # a text of one token has nothing before it
            continue
        drafts = LookupDrafter(LookupConfig(5)).propose(trunk, anchors).tokens[:, 0, 0].tolist()
        assert drafts == [slow_lookup(text[:end].tolist(), 5) for text in texts]


def test_a_text_that_has_ended_is_not_looked_up(monkeypatch):
    target = small_target(vocab_size=16)
    batch = serve.Batch(
        target, LookupDrafter(), {0: [1, 2, 1, 2, 1], 1: [3, 4, 5]}, serve.Options(8), 0, True
    )
    batch.anchor = torch.tensor([2, 6])  # repeats its text, is new
    drafts, _ = batch.draft([7, 7])
    assert drafts.shape[1] == 7 and drafts[1].max() == -1
    assert batch.to_judge == [7, 7]
    drafts, _ = batch.draft([0, 7])  # what could be found is not wanted
    assert drafts.shape[1] == 0 and batch.to_judge == [0, 0]
    batch.alive = [1]
    drafts, _ = batch.draft([7])
    assert drafts.shape[1] == 0 and batch.to_judge == [0]


@pytest.mark.parametrize("sampling", [PLAIN, Sampling(0.7), Sampling(1.0, top_k=2)], ids=str)
def test_lookup_keeps_the_targets_distribution(monkeypatch, sampling):
    target = small_target(seed=3, std=0.25, vocab_size=4, num_hidden_layers=2)

    def decode(rows):
        lookup = LookupDrafter(LookupConfig(2))
        return generate(target, lookup, [PROMPT] * rows, 3, sampling, batch_size=rows)

    texts, accepted = Outcomes(monkeypatch).distribution(decode)
    assert accepted > 0.1
    assert distance(texts, plain_distribution(target, PROMPT, sampling, 3)) < 1e-6


def test_a_residual_that_forgets_the_rejected_draft_is_noticed(monkeypatch):
    target = small_target(seed=3, std=0.25, vocab_size=4, num_hidden_layers=2)
    monkeypatch.setattr(serve, "residual", lambda p, q: p)

    def decode(rows):
        lookup = LookupDrafter(LookupConfig(2))
        return generate(target, lookup, [PROMPT] * rows, 3, PLAIN, batch_size=rows)

    texts, _ = Outcomes(monkeypatch).distribution(decode)
    assert distance(texts, plain_distribution(target, PROMPT, PLAIN, 3)) > 1e-3


@pytest.mark.parametrize("arch, length", [*itertools.product(ARCHS, [0, 2, AutoLength])])
def test_lookup_gives_the_greedy_text_and_accepts_loops(arch, length):
    target = small_target(arch=arch)
    prompts = random_prompts(5, seed=3) + [[5, 6, 7] * 4]
    if length is AutoLength:
        length = AutoLength(7)
    plain = generate(target, None, prompts, 60)
    results = generate(target, LookupDrafter(), prompts, 60, batch_size=3, draft_length=length)
    assert [r.tokens for r in results] == [r.tokens for r in plain]
    if length == 0:
        assert sum(sum(r.accepted) for r in results) > 0
