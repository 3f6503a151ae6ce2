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
from support.data import References
from support.fingerprint import weights_fingerprint
from support.prepare import Trunks, batch_rows, fresh_drafter, get_references, load_given, prepare
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
    References.from_lists([[1, 2]], [[3, 4, 5]], 0).save(path / "given.safetensors", made_with)
    return str(path / "given.safetensors")


def with_other_layers(target: Target) -> Target:
    target.model.layers.load_state_dict(small_target(seed=5).model.layers.state_dict())
    return target


def with_other_norm(target: Target) -> Target:
    target.model.layers[0].post_attention_layernorm.weight[2] += 1
    return target


@pytest.mark.parametrize(
    "change, line",
    [
        (lambda target: target, ""),
        (lambda target: target.bfloat16(), "was written by the same weights in bfloat16"),
    ],
)
def test_given_references_may_be_of_the_same_weights_in_any_dtype(tmp_path, capsys, change, line):
    path = given(tmp_path, {"target": weights_fingerprint(change(small_target()))})
    assert load_given(path, small_target()).lengths.tolist() == [5]
    assert capsys.readouterr().out == (f"{path} {line}\n" if line else "")


def test_given_references_of_a_server_or_an_earlier_version_are_taken(tmp_path, capsys):
    assert load_given(given(tmp_path, {"target": None}), small_target()).lengths.tolist() == [5]
    assert not capsys.readouterr().out
    path = given(tmp_path, {"target": 123456})
    assert load_given(path, small_target()).lengths.tolist() == [5]
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
        (lambda: {"target": weights_fingerprint(small_target(seed=1))}, "other weights"),
        (lambda: {"target": weights_fingerprint(small_target(seed=1).bfloat16())}, "other weights"),
        (lambda: {}, "does not record the target"),
        (lambda: {"target": "gqa"}, "does not record the target"),
    ],
)
def test_given_references_of_another_target_are_refused(tmp_path, made_with, words):
    path = given(tmp_path, made_with())
    with pytest.raises(ValueError, match=f"{words}.*: --references must be") as error:
        load_given(path, small_target())
    assert str(error.value).startswith(path)


@pytest.mark.parametrize("name", ["chats.jsonl", "chats.json", "chats.jsonl.gz", "CHATS.JSONL"])
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
    sizes = dict(num_references=4, prompt_length=8, response_length=6, eval_prompts=2)
    config = TrainConfig(mode="ce", corpus=str(corpus), eval_tokens=6, **sizes)
    prepare(config, tmp_path / "out")
    prepare(config, tmp_path / "out")  # kept
    EDITS[name](corpus)
    with pytest.raises(ValueError, match="target was made before the corpus changed"):
        prepare(config, tmp_path / "out")
