"""Speculative decoding is lossless: greedy token for token, sampled by exact enumeration. `pytest
tests/test_serve.py`"""

import re
import shutil
from dataclasses import replace

import pytest
import torch

import drafter as drafter_module
import serve
from drafter import GREEDY, PLAIN, Drafter, LookupDrafter, Memory, Proposal, Sampling
from hf import load_tokenizer
from outcomes import Outcomes, distance, plain_distribution, trained_on_four_tokens
from serve import AutoLength, generate
from small import (
    ARCHS,
    DRAFTERS,
    SECOND,
    SPARK,
    error_of,
    random_prompts,
    reconfigure,
    run,
    small_drafter,
    small_target,
)
from support.toy import write_byte_tokenizer

W = 4


def texts_of(results) -> list:
    return [result.tokens for result in results]


# --------------------------------------------------------------------------- drafters with a script


class Scripted:
    """A drafter that follows a rule: text so far -> (tokens, q (W,V) or None)."""

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

    def propose(self, trunk, anchors, sampling, uniforms, memory, keep_probs):
        texts = [trunk.tokens[b, : int(a) + 1].tolist() for b, a in enumerate(anchors[:, 0])]
        tokens, q = zip(*(self.rule(text) for text in texts))
        q_probs = torch.stack(q)[:, None, None] if keep_probs else None
        return Proposal(torch.tensor(tokens)[:, None, None], None, None, sampling, self, q_probs)


def oracle(target, sampling) -> Scripted:
    """Drafts from the target itself, token by token: q = p."""
    generator = torch.Generator().manual_seed(0)

    def rule(text):
        tokens, q = list(text), []
        for _ in range(W):
            q.append(sampling.probs(target(torch.tensor([tokens]))[0, -1]))
            tokens.append(int(drafter_module.draw(q[-1], torch.rand(1, generator=generator))))
        return tokens[-W:], torch.stack(q)

    return Scripted(rule)


def noisy(texts, seed: int = 0) -> Scripted:
    """Drafts from the known greedy texts with one token in four replaced: every number of accepted
    drafts occurs."""
    generator = torch.Generator().manual_seed(seed)

    def rule(text):
        # a text that has ended may stay in the batch for a while: its drafts mean nothing
        whole = next((t for t in texts if t[: len(text)] == text), [])
        ids = [*whole[len(text) : len(text) + W], *[0] * W][:W]
        wrong = torch.rand(W, generator=generator) < 0.25
        return [(i + 1) % 20 if w else i for i, w in zip(ids, wrong.tolist())], None

    return Scripted(rule)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_oracle_drafter_reaches_w_plus_one(target, temperature):
    sampling = Sampling(temperature)
    results = generate(target, oracle(target, sampling), random_prompts(6), 23, sampling)
    for result in results:
        assert result.acceptance_length == W + 1 and result.num_rounds == 5
        assert len(result.tokens) == 23 and result.finish_reason == "length"
    assert sum(r.num_committed for r in results) == 6 * 25  # the limit cuts the text, not the count


def test_an_always_wrong_drafter_gives_al_one_and_the_same_text(target):
    plain = generate(target, None, random_prompts(6), 20)

    def wrong(text):
        best = int(target(torch.tensor([text]))[0, -1].argmax())
        return [(best + 1) % 20] * W, None

    results = generate(target, Scripted(wrong), random_prompts(6), 20)
    assert texts_of(results) == texts_of(plain)
    for result in results:
        assert result.acceptance_length == 1 and not any(result.drafted)


# ------------------------------------------------------------------------- greedy: token for token


@pytest.mark.slow
def test_greedy_text_equals_plain_decoding_64_prompts_of_200_tokens():
    target = small_target(std=0.5)
    prompts = random_prompts(64)
    plain = generate(target, None, prompts, 200, batch_size=64)
    whole = [p + r.tokens for p, r in zip(prompts, plain)]
    counts = set()
    for proposer in (noisy(whole), small_drafter(target)):
        for batch_size in (64, 7):
            results = generate(target, proposer, prompts, 200, batch_size=batch_size)
            assert texts_of(results) == texts_of(plain)
            counts |= {n for r in results for n in r.accepted}
    assert counts == set(range(W + 1))
    alone = target(torch.tensor([whole[0]]))[0, len(prompts[0]) - 1 : -1].argmax(-1)
    assert alone.tolist() == plain[0].tokens


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 8])
@pytest.mark.parametrize("arch", ARCHS)
def test_greedy_text_equals_plain_decoding_over_200_tokens(arch, batch_size):
    """Ragged prompts, rows that finish at different times."""
    target = small_target(arch=arch)
    drafter = small_drafter(target)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, 20, (n,), generator=generator).tolist() for n in (3, 11, 1, 7, 20)]
    how = dict(max_new_tokens=200, stop_ids=(5,), batch_size=batch_size)
    fast = generate(target, drafter, prompts, **how)
    plain = generate(target, None, prompts, **how)
    assert texts_of(fast) == texts_of(plain)
    for prompt, result in zip(prompts, plain):
        # and plain decoding equals running the whole text again and again
        ids = list(prompt)
        while len(ids) < len(prompt) + 30 and 5 not in ids[len(prompt) :]:
            ids.append(int(target(torch.tensor([ids]))[0, -1].argmax()))
        assert result.tokens[:30] == ids[len(prompt) :]


GRID = [("gqa", variant) for variant in DRAFTERS] + [
    (arch, variant)
    for arch in ("gdn", "qsa")
    for variant in ("dflash", "dspark rnn", "dflash2 sliding, scaled")
]


@pytest.mark.parametrize("arch, variant", GRID)
def test_greedy_text_equals_plain_decoding(arch, variant):
    target = small_target(std=0.3, arch=arch)
    drafter, prompts = small_drafter(target, **DRAFTERS[variant]), random_prompts(4)
    plain = generate(target, None, prompts, 30, stop_ids=(5,))
    assert texts_of(generate(target, drafter, prompts, 30, stop_ids=(5,))) == texts_of(plain)


def test_a_stop_token_in_the_middle_of_a_block_ends_as_plain_decoding_does(target):
    prompts = random_prompts(12, seed=2)
    free = generate(target, None, prompts, 60)
    whole = [p + r.tokens for p, r in zip(prompts, free)]
    stop = free[0].tokens[17]
    plain = generate(target, None, prompts, 60, stop_ids=(stop,))
    results = generate(target, noisy(whole, 1), prompts, 60, stop_ids=(stop,))
    assert texts_of(results) == texts_of(plain)
    assert [r.finish_reason for r in results] == [r.finish_reason for r in plain]
    assert "stop" in {r.finish_reason for r in plain}
    assert any(r.drafted[-1] and r.finish_reason == "stop" for r in results)  # an accepted draft
    for result in results:
        assert stop not in result.tokens[:-1]
        ends_in_a_draft = result.drafted[-1] and result.finish_reason == "stop"
        num_drafts = sum(result.accepted)
        assert result.num_committed == num_drafts + result.num_rounds - ends_in_a_draft
        if result.finish_reason == "stop":  # a round counts up to and including its stop token
            assert result.num_committed == len(result.tokens) - 1


@pytest.mark.parametrize("limit", [1, 2, W, W + 1])
def test_limits_smaller_than_a_block_cut_the_text_exactly(target, drafter, limit):
    prompts = random_prompts(5)
    plain, results = (generate(target, d, prompts, limit) for d in (None, drafter))
    assert texts_of(results) == texts_of(plain)
    assert all(len(result.tokens) == limit for result in plain)


@pytest.mark.parametrize("length", [1, 2, W])
def test_verifying_fewer_drafts_changes_the_rounds_and_not_the_text(target, drafter, length):
    prompts = random_prompts(6)
    plain = generate(target, None, prompts, 40)
    results = generate(target, drafter, prompts, 40, draft_length=length)
    assert texts_of(results) == texts_of(plain)
    for result in results:
        assert max(result.accepted, default=0) <= length
        assert result.num_nodes == (1 + length) * result.num_rounds


def test_drafters_with_other_taps_serve_one_target(target):
    plain = generate(target, None, random_prompts(3), 20)
    for taps in (target.tap_ids, (1, 2)):
        drafter = small_drafter(target, target_layer_ids=taps)
        assert texts_of(generate(target, drafter, random_prompts(3), 20)) == texts_of(plain)


# -------------------------------------------------------------------- sampled: exact by enumeration

FOUR_TOKEN_DRAFTERS = {
    "dflash": dict(block_size=3),
    "dspark": SPARK | dict(block_size=2, markov_head_type="rnn"),
    "dflash2": SECOND | dict(block_size=3, selector_top_k=2),
}
PROMPT = [1, 0, 2]


@pytest.fixture(scope="module", params=FOUR_TOKEN_DRAFTERS)
def four_token_pair(request):
    return trained_on_four_tokens(**FOUR_TOKEN_DRAFTERS[request.param])


SAMPLINGS = [Sampling(1.0), Sampling(0.7), Sampling(1.0, top_k=2), Sampling(1.0, top_p=0.8)]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_sampled_text_has_exactly_the_targets_distribution(monkeypatch, four_token_pair, sampling):
    target, drafter = four_token_pair
    expected = plain_distribution(target, PROMPT, sampling, 3)
    assert abs(sum(expected.values()) - 1) < 1e-6

    def decode(rows):
        return generate(target, drafter, [PROMPT] * rows, 3, sampling, batch_size=rows)

    texts, accepted = Outcomes(monkeypatch).distribution(decode)
    assert abs(sum(texts.values()) - 1) < 1e-6
    assert accepted > 0.3  # acceptances are common, so that they are tested
    assert distance(texts, expected) < 1e-6


@pytest.mark.parametrize("kind", FOUR_TOKEN_DRAFTERS)
@pytest.mark.parametrize("arch", ["gdn", "qsa"])
def test_sampled_text_of_the_hybrid_targets_has_their_distribution(monkeypatch, arch, kind):
    target = small_target(seed=3, arch=arch, vocab_size=4, eos_token_id=2)
    drafter = small_drafter(target, mask_token_id=3, **FOUR_TOKEN_DRAFTERS[kind])
    target.num_tokens = 4

    def decode(rows):
        return generate(target, drafter, [PROMPT] * rows, 3, PLAIN, batch_size=rows)

    texts, _ = Outcomes(monkeypatch).distribution(decode)
    assert distance(texts, plain_distribution(target, PROMPT, PLAIN, 3)) < 1e-5


def test_dividing_an_argmax_draft_by_a_soft_q_is_noticed(monkeypatch, four_token_pair):
    target, drafter = four_token_pair
    honest = Drafter.propose

    def careless(self, trunk, anchors, sampling, **options):
        proposal = honest(self, trunk, anchors, sampling=GREEDY, **options)
        soft = sampling.probs(self.logits(proposal.hidden, proposal.previous))
        return replace(proposal, q_probs=soft.detach())

    monkeypatch.setattr(Drafter, "propose", careless)

    def decode(rows):
        return generate(target, drafter, [PROMPT] * rows, 3, PLAIN, batch_size=rows)

    texts, _ = Outcomes(monkeypatch).distribution(decode)
    assert distance(texts, plain_distribution(target, PROMPT, PLAIN, 3)) > 1e-3


@pytest.mark.slow
def test_sampled_frequencies_match_with_the_real_generator(four_token_pair):
    """Enumeration replaces the uniforms; this does not. Pearson's chi-square, texts expected fewer
    than five times pooled: above df + 6 sqrt(2 df) by chance less than once in 10,000."""
    target, drafter = four_token_pair
    n = 20_000
    expected = plain_distribution(target, PROMPT, PLAIN, 3)
    results = generate(target, drafter, [PROMPT] * n, 3, PLAIN, seed=1, batch_size=n)
    pools = {}
    for text, p in expected.items():
        pool = pools.setdefault(text if n * p >= 5 else "rare", [0, 0.0])
        pool[1] += n * p
    for result in results:
        text = tuple(result.tokens)
        pools[text if text in pools else "rare"][0] += 1
    chi = sum((count - mean) ** 2 / mean for count, mean in pools.values())
    freedom = len(pools) - 1
    assert freedom >= 20 and chi < freedom + 6 * (2 * freedom) ** 0.5


def test_a_sampled_text_does_not_depend_on_its_batch(target, drafter):
    prompts = random_prompts(9)
    for proposer in (None, drafter):
        together, apart = (
            texts_of(generate(target, proposer, prompts, 30, PLAIN, seed=5, batch_size=n))
            for n in (9, 2)
        )
        assert together == apart
        assert together != texts_of(generate(target, proposer, prompts, 30, PLAIN, seed=6))


def settings_of_a_gpu(monkeypatch) -> list[int]:
    """Rows leave when half have ended, attention sees multiples of 16 slots. -> after decoding, how
    many rows went on each time that some left."""
    prefill, select = serve.Batch._prefill, serve.Batch._select
    sizes = []

    def with_settings(batch, prompts):
        batch.share_ended = 0.5
        batch.slots_at_once = 16
        prefill(batch, prompts)

    def counted(batch, rows):
        sizes.append(len(rows))
        select(batch, rows)

    monkeypatch.setattr(serve.Batch, "_prefill", with_settings)
    monkeypatch.setattr(serve.Batch, "_select", counted)
    return sizes


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("kind", ["plain", "lookup", "dflash", "dspark"])
def test_rows_that_leave_late_and_slots_in_multiples_change_no_result(
    monkeypatch, kind, arch, temperature
):
    target = small_target(arch=arch)
    others = {"plain": None, "lookup": LookupDrafter()}
    fields = SPARK if kind == "dspark" else {}
    drafter = others[kind] if kind in others else small_drafter(target, **fields)
    prompts = random_prompts(8, seed=3)
    request = (target, drafter, prompts, 30, Sampling(temperature), 5, {1})
    expected = generate(*request)
    assert len({result.num_rounds for result in expected}) > 2  # they end one after the other
    sizes = settings_of_a_gpu(monkeypatch)
    assert generate(*request) == expected
    assert sizes[-1] == 0 and all(n <= before / 2 for before, n in zip([8, *sizes], sizes))


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("arch", ARCHS)
def test_texts_that_join_others_are_what_they_are_alone(monkeypatch, arch, temperature):
    target = small_target(arch=arch)
    drafters = [small_drafter(target, **fields) for fields in ({}, SPARK)]
    prompts = random_prompts(13, seed=3)
    joined = []
    join = serve.Batch.join
    counted = lambda batch, new: (joined.extend(new), join(batch, new))  # noqa: E731
    monkeypatch.setattr(serve.Batch, "join", counted)
    for drafter in (None, LookupDrafter(), *drafters):
        request = (target, drafter, prompts, 30, Sampling(temperature), 5, {1})
        expected = generate(*request, batch_size=1)
        joined.clear()
        results = generate(*request, batch_size=4)
        assert len(joined) > 4
        assert results == expected


@pytest.mark.parametrize("arch", ARCHS)
def test_a_text_that_takes_over_the_state_of_the_one_before_it_is_noticed(monkeypatch, arch):
    request = (small_target(arch=arch), None, random_prompts(13, seed=3), 30, GREEDY, 5, {1})
    expected = generate(*request, batch_size=1)
    tensors = serve.Batch._tensors
    monkeypatch.setattr(serve.Batch, "_tensors", lambda batch: tensors(batch)[:4])
    assert generate(*request, batch_size=4) != expected


def test_a_draft_is_accepted_with_probability_p_over_q():
    uniforms = torch.linspace(0, 1, 10_001)[:-1]
    for p_y, q_y in [(0.3, 0.6), (0.6, 0.3), (0.0, 0.5), (0.5, 0.5), (0.25, 1.0)]:
        share = serve.accept(torch.tensor(p_y), torch.tensor(q_y), uniforms).float().mean()
        assert abs(share - min(1.0, p_y / q_y)) < 2e-4


def test_accepted_drafts_are_a_prefix():
    """Right, wrong, right counts one, not two."""
    logits, drafts = torch.eye(8)[torch.tensor([[1, 2, 3, 4]])], torch.tensor([[1, 5, 3]])
    count, token = serve.verify(logits, drafts, None, GREEDY, None)
    assert count.tolist() == [1] and token.tolist() == [2]
    q = torch.eye(8)[drafts]
    count, token = serve.verify(logits * 1e4, drafts, q, PLAIN, torch.zeros(1, 4))
    assert count.tolist() == [1] and token.tolist() == [2]


def test_an_empty_residual_falls_back_to_p():
    logits, q = torch.zeros(1, 2, 4), torch.full((1, 1, 4), 0.25)
    uniforms = torch.tensor([[1.0, 0.99]])
    count, token = serve.verify(logits, torch.tensor([[2]]), q, PLAIN, uniforms)
    assert count.tolist() == [0] and token.tolist() == [3]


# ------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    "how, word",
    [
        (dict(max_new_tokens=0), "max_new_tokens"),
        (dict(max_new_tokens=5, batch_size=0), "batch_size"),
        (dict(max_new_tokens=5, draft_length=-1), "draft_length"),
        (dict(max_new_tokens=5, draft_length=W + 1), f"the drafter proposes {W} tokens"),
        (dict(max_new_tokens=5, draft_length=20), "draft_length is 20"),
        (dict(max_new_tokens=600), "maximum length"),
        (dict(max_new_tokens=5, draft_length=AutoLength(W), drafter=None), "no drafter"),
        (dict(max_new_tokens=5, draft_length=AutoLength(W + 1)), rf"is AutoLength\({W + 1}\): the"),
    ],
)
def test_what_cannot_be_decoded_is_named(target, drafter, how, word):
    with pytest.raises(ValueError, match=word):
        generate(**(dict(target=target, drafter=drafter, prompts=[[1, 2]]) | how))


def test_an_empty_prompt_is_named(target, drafter):
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        generate(target, drafter, [[1], []], 5)


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_target_whose_logits_are_no_numbers_is_an_error(temperature, number):
    target = small_target()
    drafter = small_drafter(target)
    sampling = Sampling(temperature)
    target.lm_head.weight.data[3] = number
    for proposer in (None, drafter):
        with pytest.raises(ValueError, match="logits are NaN"):
            generate(target, proposer, [[1, 2, 3]], 8, sampling)
    honest, calls = type(target).head, []

    def nan_from_the_first_round_on(self, hidden):
        calls.append(hidden)
        logits = honest(self, hidden)
        return logits.nan_to_num(0, 0, 0) if len(calls) == 1 else logits

    target.head = nan_from_the_first_round_on.__get__(target)
    with pytest.raises(ValueError, match="logits are NaN"):
        generate(target, drafter, [[1, 2, 3]], 8, sampling)


# ------------------------------------------------------------------------- the lesson, the commands


def test_marked_text_shows_who_wrote_what(tmp_path):
    write_byte_tokenizer(tmp_path)
    result = serve.Result(list(b"abcd"), [False, True, True, False])
    assert serve.marked(result, load_tokenizer(tmp_path), False) == "a[bc]d"
    assert serve.marked(result, load_tokenizer(tmp_path), True) == "a\033[32mbc\033[0md"


def test_the_lesson_prints_the_numbers_of_the_functions(monkeypatch, capsys):
    """p from a plain run of the text so far; everything else from p, q and the uniforms."""
    rounds = []
    honest = serve._show_verification

    def recorded(batch, drafts, p, q, num_accepted, token):
        text = batch.trunk.tokens[0, : batch.trunk.lengths[0] - num_accepted].tolist()
        rounds.append((batch, text, drafts.tolist(), q, num_accepted, token))
        honest(batch, drafts, p, q, num_accepted, token)

    monkeypatch.setattr(serve, "_show_verification", recorded)
    with torch.inference_mode():
        serve.lesson()
        printed = capsys.readouterr().out
        pattern = r"y_. = (\d+)   alpha (\S+)   (\S+) < min.* = (\S+)\?  (\w+)"
        judged = iter(re.findall(pattern, printed))
        for number, (batch, text, drafts, q, num_accepted, token) in enumerate(rounds, 1):
            logits = batch.target(torch.tensor([text + drafts]))[0, len(text) - 1 :]
            p = logits.softmax(-1)
            uniforms = batch.noise[0, number, batch.W :].tolist()
            for k, y in enumerate(drafts[: num_accepted + 1]):
                alpha = sum(min(a, b) for a, b in zip(p[k].tolist(), q[k].tolist()))
                ratio = min(1.0, (p[k, y] / q[k, y]).item())
                verdict = "accepted" if uniforms[k] < ratio else "REJECTED"
                draft, *numbers, printed_verdict = next(judged)
                assert int(draft) == y and printed_verdict == verdict
                expected = [alpha, uniforms[k], ratio]
                assert [float(x) for x in numbers] == pytest.approx(expected, abs=6e-4)
            if num_accepted < len(drafts):
                assert p[num_accepted, token] > q[num_accepted, token]  # the residual holds it
                assert f"drawn from it: {token}" in printed
            else:
                assert f"the bonus token {token}" in printed
    assert len(rounds) == 2 and next(judged, None) is None
    plain = generate(rounds[0][0].target, None, [[1, 2, 3]], 8)[0].tokens
    assert f"plain        {plain}" in printed and f"speculative  {plain}" in printed


def test_without_arguments_the_command_is_the_lesson(capsys):
    done = run("serve.py")
    assert done.returncode == 0 and not done.stderr
    with torch.inference_mode():
        serve.lesson()
    assert done.stdout == capsys.readouterr().out


@pytest.mark.slow
def test_the_command_shows_the_text_the_al_and_the_speed_up(folders):
    pair = ("--target", folders / "target", "--drafter", folders / "drafter")
    done = run("serve.py", *pair, "--prompt", "abc", "de", "--max-new-tokens", 20)
    assert done.returncode == 0, done.stderr
    for words in ("AL ", "same text", "times as fast"):
        assert words in done.stdout
    plain = run("serve.py", *pair[:2], "--prompt", "abc", "--max-new-tokens", 20)
    assert plain.returncode == 0 and "plain decoding" in plain.stdout


@pytest.fixture
def broken(folders, tmp_path):
    """{name: folder or file} of what a command line may name."""
    paths = {"TARGET": folders / "target", "DRAFTER": folders / "drafter"}
    for name in ("CUT", "SHAPE", "LIST"):
        paths[name] = shutil.copytree(folders / "target", tmp_path / name.lower())
    weights = paths["CUT"] / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    reconfigure(intermediate_size=40)(paths["SHAPE"])
    (paths["LIST"] / "config.json").write_text("[]")
    return paths


@pytest.mark.parametrize(
    "arguments, word",
    [
        ("--prompt a", "--target"),
        ("--target nowhere --prompt a", "nowhere"),
        ("--target TARGET", "nothing to continue"),
        ("--target TARGET --drafter nowhere --prompt a", "nowhere"),
        ("--target TARGET --drafter TARGET --prompt a", "architectures"),
        (f"--target TARGET --prompt {'a' * 60}", "maximum length"),
        ("--target TARGET --prompt a --max-new-tokens 0", "--max-new-tokens 0"),
        ("--target TARGET --prompt a --max-new-tokens many", "invalid int"),
        ("--target TARGET --prompt a --temprature 1", "--temperature"),
        ("--target TARGET --prompt a --temperature 1 --top-p 0", "top_p"),
        ("--target TARGET --prompt a --temperature nan", "temperature"),
        ("--target TARGET --prompt=", "empty"),
        ("--target TARGET --prompts none.jsonl", "none.jsonl"),
        ("--target CUT --prompt a", "damaged"),
        ("--target SHAPE --prompt a", "shape"),
        ("--target LIST --prompt a", "no JSON object"),
        ("--target TARGET --prompt a --device tpu", "--device"),
        ("--target TARGET --prompt a --device cuda", "CUDA"),
    ],
)
def test_a_wrong_argument_ends_in_one_clear_line(broken, monkeypatch, capsys, arguments, word):
    folder = broken["CUT"].parent
    before = sorted(folder.rglob("*"))
    monkeypatch.chdir(folder)
    arguments = [broken.get(argument, argument) for argument in arguments.split()]
    assert word in error_of(serve.main, arguments, monkeypatch, capsys)
    assert sorted(folder.rglob("*")) == before  # nothing written, nothing lost


def test_a_wrong_argument_ends_a_process_with_code_2():
    done = run("serve.py", "--target", "nowhere", "--prompt", "a")
    assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1
    assert "Traceback" not in done.stderr
