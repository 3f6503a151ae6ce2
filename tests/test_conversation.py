"""A trunk that was cut and extended equals a fresh prefill; a conversation's answers equal those of
a fresh `generate` on the whole text. `pytest tests/test_conversation.py`"""

import itertools
import math
import random
from dataclasses import replace

import pytest
import torch

import replay
import serve
from drafter import PLAIN, LookupDrafter
from serve import AutoLength, Conversation, Options, generate
from small import ARCHS, DRAFTERS, random_tokens, small_drafter, small_target, state_gap
from target import Target
from tree import build_tree, with_room

FAMILIES = {
    "gqa": {},
    "llama": dict(model_type="llama"),
    "gdn": dict(arch="gdn"),
    "qsa": dict(arch="qsa"),
    "qsa in blocks of 3": dict(arch="qsa", indexer_compress_ratio=3, indexer_budget=6),
}

# A fresh prefill of the small gdn target is itself up to 3e-5 from a plain run, the others 4e-6.
LIMIT = 5e-5

# ------------------------------------------------------------------------ a trunk, cut and extended


def chain(trunk, drafts):
    """The tree of a round: token 3 after each row, then drafts (B,W)."""
    T = trunk.width + 1
    anchors = trunk.lengths[:, None]
    tokens = with_room(trunk.tokens, T)[:, :T].clone().scatter(1, anchors, 3)
    return build_tree(tokens, trunk.lengths, anchors, drafts[:, None, None], include_anchor=True)


def gap_to_fresh(target, trunk, texts) -> float:
    """The largest difference of the logits of four more tokens from those of a plain run, as a
    share of the largest. What each layer remembers has to be that of a fresh prefill, too."""
    gaps = []
    for row, text in enumerate(texts):
        one = trunk.select(torch.tensor([row]), width=len(text))
        every = trunk.checkpoint_every
        fresh = target.prefill(
            torch.tensor([text]), torch.tensor([len(text)]), checkpoint_every=every
        )
        assert one.tokens[0].tolist() == text and one.lengths == len(text)
        # hidden states and taps are not kept
        assert state_gap(replace(one, hidden=fresh.hidden, taps=fresh.taps), 0, fresh) < 1e-4
        drafts = torch.tensor([[1, 4, 2]])
        scored = target.score(one, chain(one, drafts))
        logits = target(torch.tensor([[*text, 3, 1, 4, 2]]))[0, -4:]
        gap = target.head(scored.hidden[0, 0, 0]) - logits
        gaps.append((gap.abs().max() / logits.abs().max()).item())
    return max(gaps)


def random_changes(target, trunk, seed: int):
    """Cut, extend and commit at random -> after each, the trunk and the texts that it should be of.
    Two rows; before an extension both are cut to one length."""
    rng = random.Random(seed)
    texts = [[], []]
    for step in range(6):
        length = rng.randint(0, min(map(len, texts)))
        trunk = trunk.cut(torch.tensor([length, length])) if step else trunk
        sizes = [rng.randint(1, 9), rng.randint(1, 9)]
        new = random_tokens(2, max(sizes), seed=100 * seed + step)
        texts = [text[:length] + row[:n] for text, row, n in zip(texts, new.tolist(), sizes)]
        lengths = torch.tensor([len(text) for text in texts])
        trunk, hidden, taps = target.extend(trunk, new, lengths, chunk=rng.choice([1, 4, 100]))
        trunk.width = int(lengths.max())
        yield trunk, texts
        for row, text in enumerate(texts):
            fresh = target.prefill(torch.tensor([text]), lengths[row : row + 1])
            for name, part in (("hidden", hidden), ("taps", taps)):
                wanted = getattr(fresh, name)[0, length:]
                assert (part[row, : sizes[row]] - wanted).abs().max() < 1e-4 * wanted.abs().max()
        drafts = random_tokens(2, 3, seed=step)
        tree = chain(trunk, drafts)
        path = torch.tensor([[0, 1, -1, -1], [0, 1, 2, 3]])
        trunk = target.commit(trunk, tree, target.score(trunk, tree), path)
        texts = [texts[0] + [3, *drafts[0, :1].tolist()], texts[1] + [3, *drafts[1].tolist()]]
        trunk.width = max(map(len, texts))
        lengths = torch.tensor([rng.randint(1, len(text)) for text in texts])
        texts = [text[:n] for text, n in zip(texts, lengths.tolist())]
        trunk = trunk.cut(lengths)
        yield trunk, texts


@pytest.mark.parametrize("checkpoint_every", [3, 64])
@pytest.mark.parametrize("family", FAMILIES)
def test_after_cuts_extensions_and_commits_a_trunk_equals_a_fresh_prefill(family, checkpoint_every):
    target = small_target(**FAMILIES[family])
    empty = target.empty_trunk(2, checkpoint_every=checkpoint_every)
    for trunk, texts in random_changes(target, empty, seed=checkpoint_every):
        assert gap_to_fresh(target, trunk, texts) < LIMIT


@pytest.mark.parametrize("arch", ["gdn", "qsa"])
def test_a_state_that_is_not_cut_back_is_noticed(arch, monkeypatch):
    honest = replay.cut_checkpoints

    def late(past, last):
        return honest(past, last) | {"states": past["states"][:, -1:]}

    monkeypatch.setattr(replay, "cut_checkpoints", late)
    target, tokens = small_target(arch=arch), random_tokens(1, 12)
    trunk = target.prefill(tokens, torch.tensor([12])).cut(torch.tensor([7]))
    scored = target.score(trunk, chain(trunk, torch.tensor([[1, 4, 2]])))
    logits = target(torch.tensor([[*tokens[0, :7].tolist(), 3, 1, 4, 2]]))[0, -4:]
    assert (target.head(scored.hidden[0, 0, 0]) - logits).abs().max() > 1e-3


@pytest.mark.parametrize("arch", ["gdn", "qsa"])
def test_a_trunk_that_keeps_its_end_alone_is_not_cut(arch):
    target = small_target(arch=arch)
    trunk = target.prefill(random_tokens(1, 9), torch.tensor([9]), checkpoint_every=0)
    with pytest.raises(ValueError, match="only at its end"):
        trunk.cut(torch.tensor([5]))


# --------------------------------------------------------------------------------- a conversation


def talk(conversation, options, seed: int, num_turns: int = 5):
    """Turns of which the second is left early, the third changes what came before, and the fourth
    is decoded plainly -> after each: the prompt, the answer as far as it was read, and whether it
    was left early."""
    rng = random.Random(seed)
    text = []
    for turn in range(num_turns):
        text = text + [rng.randrange(20) for _ in range(rng.randint(1, 6))]
        if turn == 2:
            text = text[: len(text) // 3] + text[len(text) // 3 + 2 :]
        results = conversation.answer(text, options, draft=turn != 3)
        result = next(results)  # it grows
        for _ in itertools.islice(results, 2 if turn == 1 else None):
            pass
        results.close()
        yield text, result, turn == 1
        text = text + result.tokens


VARIANTS = [(arch, variant) for arch in ARCHS for variant in (None, "dflash")]
VARIANTS += [("gqa", name) for name in ("dspark rnn", "dspark sliding", "dflash2 sliding, scaled")]


@pytest.mark.parametrize("arch, variant", VARIANTS)
def test_each_answer_equals_that_of_a_fresh_run_on_the_whole_text(arch, variant):
    target = small_target(arch=arch)
    drafter = small_drafter(target, **DRAFTERS[variant]) if variant else None
    options = Options(17, stop_ids=frozenset({5}))
    conversation = Conversation(target, drafter)
    finished = set()
    for text, result, is_partial in talk(conversation, options, seed=len(variant or "")):
        (fresh,) = generate(target, None, [text], 17, stop_ids={5})
        count = len(result.tokens) if is_partial else None
        assert result.tokens == fresh.tokens[:count] and result.tokens
        finished.add(result.finish_reason)
        with torch.inference_mode():
            assert gap_to_fresh(target, conversation.trunk, [conversation.tokens]) < LIMIT
        assert conversation.tokens[: len(text)] == text
    assert "length" in finished


@pytest.mark.parametrize("arch", ARCHS)
def test_drafts_by_lookup_and_an_automatic_length_change_no_answer(arch):
    target = small_target(arch=arch)
    for drafter in (LookupDrafter(), small_drafter(target)):
        length = AutoLength(drafter.config.num_draft_tokens)
        options = Options(17, stop_ids=frozenset({5}), draft_length=length)
        conversation = Conversation(target, drafter)
        for text, result, is_partial in talk(conversation, options, seed=2):
            (fresh,) = generate(target, None, [text], 17, stop_ids={5})
            assert result.tokens == fresh.tokens[: len(result.tokens) if is_partial else None]
            memory = conversation.memory
            if memory and memory.width == conversation.trunk.width:  # plain steps are in it, too
                tokens = torch.tensor([conversation.tokens])
                wanted = drafter.remember(target.prefill(tokens, torch.tensor([memory.width])))
                for layer, other in zip(memory.layers, wanted.layers):
                    gap = layer.keys_values[:, : memory.width] - other.keys_values
                    assert gap.abs().max() < 1e-4 * other.keys_values.abs().max()


@pytest.mark.parametrize("arch", ARCHS)
def test_with_the_slots_of_a_gpu_too(arch, monkeypatch):
    """There attention sees slots in multiples, more than there are tokens."""
    prefill = serve.Batch._prefill

    def with_settings(batch, prompts):
        batch.share_ended = 0.5
        batch.slots_at_once = 16
        prefill(batch, prompts)

    target = small_target(arch=arch)
    conversation = Conversation(target, small_drafter(target))
    for text, result, is_partial in talk(conversation, Options(17), seed=2):
        if not is_partial:
            assert result.tokens == generate(target, None, [text], 17)[0].tokens
        monkeypatch.setattr(serve.Batch, "_prefill", with_settings)


@pytest.mark.parametrize("arch", ARCHS)
def test_the_drafters_memory_follows_cuts_and_turns_without_drafts(arch):
    """With the memory of a fresh run, the same is drafted, so as much is accepted."""
    target = small_target(arch=arch)
    drafter = small_drafter(target, **DRAFTERS["dflash sliding in part"])
    conversation = Conversation(target, drafter)
    for text, result, is_partial in talk(conversation, Options(17), seed=1):
        (fresh,) = generate(target, drafter, [text], 17)
        if conversation.turn != 4 and not is_partial:  # drafts were on to the end
            assert result == fresh
        if conversation.turn != 4:
            width = conversation.memory.width
            assert width == conversation.trunk.width
            tokens = torch.tensor([conversation.tokens])
            wanted = drafter.remember(target.prefill(tokens, torch.tensor([width])))
            for layer, other in zip(conversation.memory.layers, wanted.layers):
                gap = layer.keys_values[:, :width] - other.keys_values
                assert gap.abs().max() < 1e-4 * other.keys_values.abs().max()


class PlainAtTheEnd(AutoLength):
    """All drafts in the first rounds of an answer, then plain steps."""

    def start(self, num_texts, equal=False):
        self.rounds = 0

    def choose(self, texts):
        self.rounds += 1
        return [self.W if self.rounds <= 3 else 0]

    def learn(self, *figures):
        pass


@pytest.mark.parametrize("arch", ARCHS)
def test_plain_steps_are_remembered_once_before_the_next_answer(arch, monkeypatch):
    target = small_target(arch=arch)
    drafter = small_drafter(target, **DRAFTERS["dflash sliding in part"])
    length = PlainAtTheEnd(drafter.config.num_draft_tokens)
    conversation = Conversation(target, drafter)
    options = Options(24, draft_length=length)
    *_, result = conversation.answer([1, 2, 3], options)
    assert len(conversation.plain_taps) > 10
    text = [1, 2, 3, *result.tokens, 4]
    extended = []
    honest = type(drafter).extend

    def counted(self, memory, taps, positions):
        extended.append(taps.shape[1])
        return honest(self, memory, taps, positions)

    monkeypatch.setattr(type(drafter), "extend", counted)
    pending = len(conversation.plain_taps)
    answer = conversation.answer(text, options)
    next(answer)
    assert extended[0] == pending and len(extended) == 2  # then what the prompt added
    width = conversation.memory.width
    tokens = torch.tensor([conversation.tokens])
    wanted = drafter.remember(target.prefill(tokens, torch.tensor([width])))
    for layer, other in zip(conversation.memory.layers, wanted.layers):
        gap = layer.keys_values[:, :width] - other.keys_values
        assert gap.abs().max() < 1e-4 * other.keys_values.abs().max()
    next(answer)
    (fresh,) = generate(target, drafter, [text], 24)
    *_, result = conversation.answer(text, options)  # the answer before was left
    assert result.tokens == fresh.tokens


def test_sampled_answers_depend_on_seed_and_turn_alone(target, drafter):
    options = Options(20, PLAIN, seed=3)
    texts = []
    for _ in range(2):
        conversation = Conversation(target, drafter)
        texts.append([result.tokens for _, result, _ in talk(conversation, options, seed=0)])
    assert texts[0] == texts[1]
    *_, again = conversation.answer([1, 2, 3], options)
    *_, other = conversation.answer([1, 2, 3], options)
    assert again.tokens != other.tokens  # another turn, other draws
    (fresh,) = generate(target, drafter, [[1, 2, 3]], 20, PLAIN, seed=3, prompt_ids=[6])
    assert other.tokens == fresh.tokens


@pytest.mark.parametrize("arch", ARCHS)
def test_only_new_tokens_are_run(arch, monkeypatch):
    target = small_target(arch=arch)
    sizes = []
    honest = Target.extend

    def counted(self, trunk, tokens, *rest):
        sizes.append(tokens.shape[1])
        return honest(self, trunk, tokens, *rest)

    monkeypatch.setattr(Target, "extend", counted)
    conversation = Conversation(target, small_drafter(target))
    *_, result = conversation.answer([1, 2, 3], Options(10))
    num_run = len(conversation.tokens)
    text = [1, 2, 3, *result.tokens]
    assert conversation.tokens[: len(text) - 1] == text[:num_run]
    *_, result = conversation.answer([*text, 7, 8], Options(10))
    new = len(text) + 2 - min(num_run, len(text))
    text = [1, 9, *text[2:]]  # a change of the second token
    *_, result = conversation.answer(text, Options(10))
    conversation.reset()
    *_, result = conversation.answer(text, Options(10))
    assert sizes == [3, new, len(text) - 1, len(text)]


@pytest.mark.parametrize("arch", ARCHS)
def test_timing_plain_steps_changes_nothing(arch):
    target = small_target(arch=arch)
    conversation = Conversation(target, small_drafter(target))
    assert math.isnan(conversation.plain_speed())  # there is no text yet
    *_, result = conversation.answer([1, 2, 3], Options(10))
    before = conversation.tokens
    assert conversation.plain_speed() > 0
    assert (conversation.tokens, conversation.turn) == (before, 1)
    with torch.inference_mode():
        assert gap_to_fresh(target, conversation.trunk, [before]) < LIMIT
    text = [1, 2, 3, *result.tokens, 4]
    *_, result = conversation.answer(text, Options(10))
    assert result == generate(target, conversation.drafter, [text], 10)[0]


def test_a_conversation_ends_at_the_targets_maximum_length(drafter):
    target = drafter.target
    conversation = Conversation(target, drafter)
    limit = target.config.max_position_embeddings
    text = random_tokens(1, limit - 4)[0].tolist()
    *_, result = conversation.answer(text, Options(50))
    assert len(result.tokens) == 4 and result.finish_reason == "length"
    with pytest.raises(ValueError, match=f"maximum length {limit}"):
        next(conversation.answer(text + result.tokens, Options(50)))
    assert math.isnan(conversation.plain_speed())
    *_, again = conversation.answer(text, Options(50))  # the conversation is as it was
    assert again.tokens == result.tokens
