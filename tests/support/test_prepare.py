"""Trunks, batches, given references, and the drafter that training starts from."""

import dataclasses
import gzip
import json
import shutil

import pytest
import torch

from hf import load_tokenizer
from small import ARCHS, small_target
from small_runs import CONFIG, target_and_references
from support import prepare as preparing
from support.fingerprint import weights_fingerprint
from support.measure import Acceptance
from support.prepare import (
    Trunks,
    batch_rows,
    decay_of,
    fresh_drafter,
    get_references,
    load_given,
    prepare,
    provenance,
    resolved,
    start_drafter,
)
from support.references import References
from target import Target
from train import TrainConfig


def test_cached_trunks_equal_fresh_ones():
    target, references = target_and_references()
    rows = torch.tensor([4, 1, 7])
    cached, fresh = (Trunks(target, references, (0, 2), gib)(rows) for gib in (2.0, 0.0))
    assert cached.tap_ids == fresh.tap_ids == (0, 2)
    assert torch.equal(cached.tokens, fresh.tokens) and torch.equal(cached.lengths, fresh.lengths)
    for row, length in enumerate(fresh.lengths.tolist()):
        for name in ("hidden", "taps"):
            pair = (getattr(trunk, name)[row, :length] for trunk in (cached, fresh))
            torch.testing.assert_close(*pair, atol=1e-5, rtol=0)


@pytest.mark.parametrize("arch", ARCHS)
def test_trunks_are_cached_if_they_fit(arch):
    target = small_target(arch=arch)
    references = References.from_lists([[1, 2], [3]], [[5, 6], [7, 8, 9]], 0)
    size = Trunks(target, references, (0,), 1.0).cache.nbytes / 2**30
    assert Trunks(target, references, (0,), size * 1.01).cache
    assert not Trunks(target, references, (0,), size * 0.99).cache


LENGTHS = torch.tensor([9, 30, 12, 50, 11, 31, 10, 52, 29, 51, 28, 49])


@pytest.mark.parametrize("bucket", [1, 3])
def test_every_epoch_sees_every_reference_once(bucket):
    seen = torch.cat([batch_rows(3, step, LENGTHS, 4, bucket) for step in range(6)])
    assert sorted(seen[:12].tolist()) == sorted(seen[12:].tolist()) == list(range(12))
    assert seen[:12].tolist() != seen[12:].tolist()
    assert LENGTHS[seen].view(-1, 4).diff(dim=1).min() >= 0  # each sorted by length


def test_batches_of_a_bucket_hold_texts_of_similar_length():
    longest = [
        [LENGTHS[batch_rows(3, step, LENGTHS, 4, bucket)].max() for step in range(3)]
        for bucket in (1, 3)
    ]
    assert sorted(longest[1]) == [12, 31, 52] and sum(longest[0]) > sum(longest[1])
    # of 11 in batches of 4, later epochs begin within a batch: each still holds every one once
    seen = torch.cat([batch_rows(3, step, LENGTHS[:11], 4, 3) for step in range(11)]).tolist()
    assert sorted(seen) == sorted([*range(11)] * 4)


@pytest.mark.parametrize(
    "flags, kind, size",
    [
        (dict(), "dflash", 8),
        (dict(drafter_kind="dspark", markov_head="rnn"), "dspark", 7),
        (dict(drafter_kind="dspark", block_size=5), "dspark", 5),
        (dict(drafter_kind="dflash2", rank=3), "dflash2", 8),
    ],
    ids=str,
)
def test_a_fresh_drafter_is_of_the_kind_and_size_that_flags_name(flags, kind, size):
    drafter = fresh_drafter(dataclasses.replace(CONFIG, **flags), small_target(), None)
    assert (drafter.config.kind, drafter.config.block_size) == (kind, size)
    assert drafter.config.num_draft_tokens == (size if kind == "dspark" else size - 1)


@pytest.mark.parametrize(
    "flags, word",
    [
        (dict(markov_head="rnn"), "--markov-head"),
        (dict(rank=3), "--rank"),
        (dict(drafter_kind="dflash2", markov_head="rnn"), "--markov-head"),
    ],
    ids=str,
)
def test_a_flag_of_another_kind_is_an_error(flags, word):
    with pytest.raises(ValueError, match=word):
        fresh_drafter(dataclasses.replace(CONFIG, **flags), small_target(), None)


# ------------------------------------------------------------------------------- given references


def given(path, made_with: dict) -> str:
    """A file of references that says so of its making."""
    references = References.from_lists([[1, 2]], [[3, 4, 5]], 0)
    references.save(path / "given.safetensors", made_with, [[7, 8], [9]])
    return str(path / "given.safetensors")


def with_other_layers(target: Target) -> Target:
    target.model.layers.load_state_dict(small_target(seed=5).model.layers.state_dict())
    return target


def with_other_norm(target: Target) -> Target:
    target.model.layers[0].post_attention_layernorm.weight[2] += 1
    return target


def with_other_eps(target: Target) -> Target:
    target.config = dataclasses.replace(target.config, rms_norm_eps=0.1)
    return target


TEMPLATE = "{% for m in messages %}{{ m.content }}{{ style or '' }}{% endfor %}"


@pytest.fixture
def tokenizer(folders):
    """A tokenizer with a chat template that has a variable."""
    made = load_tokenizer(folders / "target")
    return dataclasses.replace(made, template=TEMPLATE, template_args={"style": "brief"})


def recorded_of(tokenizer) -> dict:
    """What a file of references that were made of chats says of the tokenizer."""
    config = TrainConfig()
    made_with = provenance(config, None, tokenizer, [[{"role": "user", "content": "a"}]], [])
    return {name: made_with[name] for name in made_with.keys() - {"target"}}


@pytest.mark.parametrize(
    "change, line",
    [
        (lambda target: target, ""),
        (lambda target: target.bfloat16(), "was written by the same weights in bfloat16"),
    ],
)
def test_given_references_may_be_of_the_same_weights_in_any_dtype(
    tmp_path, capsys, tokenizer, change, line
):
    path = given(tmp_path, {"target": weights_fingerprint(change(small_target()))})
    assert load_given(path, small_target(), tokenizer).lengths.tolist() == [5]
    assert capsys.readouterr().out == (f"{path} {line}\n" if line else "")


def test_given_references_of_a_server_or_an_earlier_version_are_taken(tmp_path, capsys, tokenizer):
    path = given(tmp_path, {"target": None} | recorded_of(tokenizer))
    assert load_given(path, small_target(), tokenizer).lengths.tolist() == [5]
    assert not capsys.readouterr().out
    for target in (123456, None):
        path = given(tmp_path, {"target": target})
        assert load_given(path, small_target(), tokenizer).lengths.tolist() == [5]
        (line,) = capsys.readouterr().out.splitlines()
        assert line.startswith(path) and "cannot be checked" in line


@pytest.mark.parametrize(
    "made_with, words",
    [
        (
            lambda: {"target": weights_fingerprint(with_other_layers(small_target()))},
            "other weights",
        ),
        (lambda: {"target": weights_fingerprint(with_other_norm(small_target()))}, "other weights"),
        (lambda: {"target": weights_fingerprint(with_other_eps(small_target()))}, "another config"),
        (lambda: {"target": weights_fingerprint(small_target(seed=1))}, "other weights"),
        (lambda: {"target": weights_fingerprint(small_target(seed=1).bfloat16())}, "other weights"),
        (lambda: {}, "does not record the target"),
        (lambda: {"target": "gqa"}, "does not record the target"),
    ],
)
def test_given_references_of_another_target_are_refused(tmp_path, tokenizer, made_with, words):
    path = given(tmp_path, made_with())
    with pytest.raises(ValueError, match=f"{words}.*: --references must be") as error:
        load_given(path, small_target(), tokenizer)
    assert str(error.value).startswith(path)


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(tokenizer_hash="0"), "was made before the tokenizer changed: --target must be"),
        (dict(stop_ids=(5,)), "stop ids = .*: --target must be as it was"),
        (dict(template="x"), "was made before the chat template changed: --target must be"),
        (dict(template_args={}), """: give --chat-template-args '{"style": "brief"}'$"""),
    ],
)
@pytest.mark.parametrize("by_server", [True, False])
def test_given_references_of_another_tokenizer_or_template_are_refused(
    tmp_path, tokenizer, change, words, by_server
):
    target = small_target()
    made_by = {"target": None if by_server else weights_fingerprint(target)}
    path = given(tmp_path, made_by | recorded_of(tokenizer))
    assert len(load_given(path, target, tokenizer).lengths) == 1
    with pytest.raises(ValueError, match=words) as error:
        load_given(path, target, dataclasses.replace(tokenizer, **change))
    assert str(error.value).startswith(path)


def test_given_references_of_text_do_not_ask_for_a_template(tmp_path, tokenizer):
    recorded = recorded_of(tokenizer)
    names = ("the tokenizer", "stop ids")
    path = given(tmp_path, {"target": None} | {name: recorded[name] for name in names})
    other = dataclasses.replace(tokenizer, template=None, template_args={})
    assert len(load_given(path, small_target(), other).lengths) == 1


@pytest.mark.parametrize("name", ["refs.txt", "refs.pt", "folder", "refs.jsonl.bz2"])
def test_a_references_file_of_another_kind_is_refused_before_any_work(tmp_path, name):
    config = TrainConfig(references=str(tmp_path / name))
    with pytest.raises(ValueError, match=f"--references .*{name}: accepted are .*jsonl.*ndjson"):
        prepare(config, tmp_path / "out")


ARGS = '{"style": "brief"}'


def test_template_arguments_where_no_chat_is_are_refused_before_any_work(tmp_path):
    config = TrainConfig(chat_template_args=ARGS)
    with pytest.raises(ValueError, match="no chats here: --chat-template-args means nothing"):
        prepare(config, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_template_arguments_are_taken_where_the_references_are_of_chats(
    folders, tmp_path, tokenizer
):
    shutil.copytree(folders / "target", tmp_path / "target")
    (tmp_path / "target/chat_template.jinja").write_text(TEMPLATE)
    target = Target.from_pretrained(tmp_path / "target")
    recorded = {"target": weights_fingerprint(target)} | recorded_of(tokenizer)
    config = TrainConfig(
        target=str(tmp_path / "target"),
        chat_template_args=ARGS,
        references=given(tmp_path, recorded),
        prompt_length=8,
        response_length=8,
        eval_tokens=8,
    )
    assert len(prepare(config, tmp_path / "out")[3].lengths) == 1
    with pytest.raises(ValueError, match="give --chat-template-args"):
        prepare(dataclasses.replace(config, chat_template_args=""), tmp_path / "out")


@pytest.mark.parametrize(
    "name", ["chats.jsonl", "chats.json", "chats.jsonl.gz", "CHATS.JSONL", "c.ndjson"]
)
def test_given_references_may_be_chats_in_every_form_that_prompts_may_have(folders, tmp_path, name):
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bcd"}]
    records = [{"messages": turns}] * 3
    text = "\n".join(map(json.dumps, records))
    text = json.dumps(records) if name.endswith(".json") else text
    path = tmp_path / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    config = TrainConfig(references=str(path), prompt_length=8, response_length=8)
    references = get_references(config, None, load_tokenizer(folders / "target"), None, tmp_path)
    assert len(references.lengths) == 3


# --------------------------------------------------------------- prompts to measure on, and lengths


def config_with(folders, **changes) -> TrainConfig:
    sizes = dict(prompt_length=8, response_length=8, eval_tokens=8, num_references=4)
    return TrainConfig(target=str(folders / "target"), device="cpu", mode="ce", **sizes | changes)


def given_of(folders, path) -> str:
    """References that the folder's target wrote."""
    return given(path, {"target": weights_fingerprint(Target.from_pretrained(folders / "target"))})


def write_chats(path, texts, answer: str = "") -> str:
    records = [[{"role": "user", "content": text}] for text in texts]
    if answer:
        records = [[*turns, {"role": "assistant", "content": answer}] for turns in records]
    path.write_text("".join(json.dumps({"messages": turns}) + "\n" for turns in records))
    return str(path)


def test_al_is_measured_on_prompts_that_the_references_bring(folders, tmp_path):
    path = given_of(folders, tmp_path)
    _, _, measure, _ = prepare(config_with(folders, references=path), tmp_path / "out")
    assert measure.prompts == [[7, 8], [9]]
    assert measure.source == f"2 prompts held out from {path}"


def test_chats_with_answers_hold_some_out_and_train_on_the_rest(folders, tmp_path):
    path = write_chats(tmp_path / "chats.jsonl", [f"q {n}" for n in range(12)], "abc")
    _, tokenizer, measure, references = prepare(
        config_with(folders, references=path), tmp_path / "out"
    )
    ends = references.prompt_lengths.tolist()
    trained = {tokenizer.decode(r[:end]) for r, end in zip(references.tokens.tolist(), ends)}
    measured = {tokenizer.decode(prompt) for prompt in measure.prompts}
    assert len(measured) == 3 and trained | measured == {f"q {n}" for n in range(12)}


def test_a_prompt_that_is_trained_on_is_not_measured_on(folders, tmp_path, capsys):
    path = write_chats(tmp_path / "chats.jsonl", ["same"] * 4 + ["other"] + ["same"] * 7)
    tasks = (write_chats(tmp_path / "a.jsonl", ["same", "new"]),)
    config = config_with(folders, corpus=path, eval_prompts=tasks)
    _, tokenizer, measure, _ = prepare(config, tmp_path / "out")
    assert [tokenizer.decode(prompt) for prompt in measure.prompts] == ["new"]
    assert "1 prompts to measure on are references' prompts, too" in capsys.readouterr().out
    with pytest.raises(ValueError, match="all are trained on: name some by --eval-prompts"):
        prepare(dataclasses.replace(config, eval_prompts=()), tmp_path / "out")


def test_prompts_of_several_tasks_take_turns_and_are_told_apart(folders, tmp_path):
    x = write_chats(tmp_path / "x.jsonl", ["x"])
    y = write_chats(tmp_path / "y.jsonl", ["y1", "y2", "y3"])
    path = given_of(folders, tmp_path)
    config = config_with(folders, references=path, eval_prompts=(x, y))
    _, _, measure, _ = prepare(config, tmp_path / "out")
    assert measure.tasks == ["x", "y", "y", "y"]
    assert measure.source == "4 prompts of x (1), y (3)"
    counts = dict(committed=torch.tensor([6, 4, 2]), rounds=torch.tensor([2, 4, 0]))
    assert measure.by_task(Acceptance(nodes=0, repeated=0, survived=0, seconds=1, **counts)) == {
        "x": 3.0,
        "y": 1.5,
    }


def test_one_length_of_chats_cuts_though_the_other_is_0(folders, tmp_path, capsys):
    path = write_chats(tmp_path / "chats.jsonl", ["q" * n for n in range(1, 41)], "abc")
    config = config_with(folders, references=path, prompt_length=20, response_length=0)
    _, _, _, references = prepare(config, tmp_path / "out")
    assert int(references.prompt_lengths.max()) == 20
    assert "its prompt is longer than --prompt-length 20" in capsys.readouterr().out
    config = dataclasses.replace(config, prompt_length=0, response_length=2)
    with pytest.raises(ValueError, match="the turn is longer than --response-length 2"):
        prepare(config, tmp_path / "out")


@pytest.mark.parametrize(
    "flags, words",
    [
        (dict(), "--target .*: --references .or --corpus.*--eval-prompts"),
        (dict(eval_prompts=("a.jsonl",)), "--target .*: --references .or --corpus"),
        (dict(references="OLD"), "it has none: name some by --eval-prompts or --corpus"),
    ],
    ids=str,
)
def test_a_given_target_without_prompts_of_its_own_kind_is_refused_before_any_work(
    folders, tmp_path, flags, words
):
    if flags.get("references"):
        flags = dict(references=str(tmp_path / "old.safetensors"))
        References.from_lists([[1]], [[2, 3]], 0).save(flags["references"], {})
    with pytest.raises(ValueError, match=words):
        prepare(config_with(folders, **flags), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_length_of_0_cuts_no_chat(folders, tmp_path, capsys):
    texts = ["q" * n for n in range(1, 41)]
    path = write_chats(tmp_path / "chats.jsonl", texts, "abc")
    for length, count in ((8, 8), (0, 30)):
        config = config_with(folders, references=path, prompt_length=length, response_length=length)
        _, _, measure, references = prepare(config, tmp_path / "out")
        assert len(references.lengths) == count and len(measure.prompts) == 10
        assert ("beyond 16 tokens" in capsys.readouterr().out) == bool(length)
    drafter = fresh_drafter(config, small_target(), None)
    config = resolved(config, references, drafter)
    assert (config.prompt_length, config.response_length) == (40, 5)
    assert (config.ce_decay, config.precision) == (4.0, "float32")


def test_ce_decay_follows_the_block():
    assert [decay_of(W) for W in (7, 15, 11)] == [4.0, 7.0, 5.5]


# ------------------------------------------------------------------------------------------- MASK


def full_target() -> Target:
    """A target whose embedding has no row beyond the tokenizer."""
    target = small_target(vocab_size=264)
    target.num_tokens = 264
    return target


@pytest.fixture
def specials(folders):
    """A tokenizer with special tokens, one of which its template writes."""
    made = load_tokenizer(folders / "target")
    names = {"<|user|>": 258, "<file>": 259, "<empty>": 260}
    template = "{% for m in messages %}<|user|>{{ m.content }}{% endfor %}"
    return dataclasses.replace(made, special=made.special | names, template=template)


def test_without_a_spare_row_the_error_proposes_ids_for_mask(specials):
    words = r"no spare row.* --mask-token-id; free are 260 \(<empty>\), 259 \(<file>\), and auto"
    with pytest.raises(ValueError, match=words):
        start_drafter(CONFIG, full_target(), specials)


@pytest.mark.parametrize("flag, expected", [("auto", 260), ("259", 259), ("7", 7)])
def test_mask_takes_a_free_id_or_the_one_named(specials, flag, expected):
    config = dataclasses.replace(CONFIG, mask_token_id=flag)
    assert start_drafter(config, full_target(), specials).config.mask_token_id == expected


@pytest.mark.parametrize("flag, words", [("258", "template uses <.user.>"), ("256", "stop or pad")])
def test_an_id_that_a_text_uses_is_refused_for_mask(specials, flag, words):
    config = dataclasses.replace(CONFIG, mask_token_id=flag)
    with pytest.raises(ValueError, match=words):
        start_drafter(config, full_target(), specials)


def test_auto_takes_a_spare_row_where_there_is_one(specials):
    config = dataclasses.replace(CONFIG, mask_token_id="auto")
    target = small_target(vocab_size=264)
    target.num_tokens = 261
    assert start_drafter(config, target, specials).config.mask_token_id == 261


# ------------------------------------------------------------------------- a toy and its corpus


def edit_one(folder) -> None:
    file = next(folder.iterdir())
    file.write_text(file.read_text() + "more\n")


def rename_one(folder) -> None:
    next(folder.iterdir()).rename(folder / "zzz.txt")


EDITS = {
    "a text is edited": edit_one,
    "a text is gone": lambda folder: next(folder.iterdir()).unlink(),
    "a text is added": lambda folder: (folder / "new.txt").write_text("new\n" * 100),
    "texts change places": rename_one,
}


@pytest.mark.parametrize("name", EDITS)
def test_a_toy_target_is_not_reused_once_its_corpus_has_changed(
    folders, tmp_path, monkeypatch, name
):
    def make(config, corpus, folder) -> dict:
        shutil.copytree(folders / "target", folder, dirs_exist_ok=True)
        return {"held_out_bits_per_byte": 2.0}

    monkeypatch.setattr(preparing, "make_toy", make)
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number in range(6):
        (corpus / f"{number}.txt").write_text(f"line {number} of a text\n" * 30)
    sizes = dict(num_references=4, prompt_length=8, response_length=6, num_eval_prompts=2)
    config = TrainConfig(mode="ce", corpus=str(corpus), eval_tokens=6, **sizes)
    prepare(config, tmp_path / "out")
    prepare(config, tmp_path / "out")  # kept
    EDITS[name](corpus)
    with pytest.raises(ValueError, match="target was made before the corpus changed"):
        prepare(config, tmp_path / "out")
