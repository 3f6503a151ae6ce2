"""Corpus, prompts and references."""

import pytest
import torch

from hf import load_tokenizer
from support.data import References, draw_prompts, load_corpus, pack
from support.toy import write_byte_tokenizer


@pytest.fixture
def tokenizer(tmp_path):
    write_byte_tokenizer(tmp_path / "tokenizer")
    return load_tokenizer(tmp_path / "tokenizer")


def test_the_default_corpus_is_split_by_file():
    corpus = load_corpus()
    assert len(corpus.train) > 300 and len(corpus.held_out) > 10
    assert not set(corpus.train) & set(corpus.held_out)
    assert sum(map(len, corpus.train)) > 5e6
    again = load_corpus()
    assert again.held_out == corpus.held_out


def test_a_folder_of_text_and_a_single_file_both_give_two_parts(tmp_path):
    for i in range(40):
        (tmp_path / f"{i}.txt").write_text(f"text {i}\n" * 50)
    folder = load_corpus(str(tmp_path))
    assert len(folder.train) + len(folder.held_out) == 40 and folder.held_out
    single = load_corpus(str(tmp_path / "3.txt"))
    assert "".join(single.train + single.held_out).count("text 3") == 50 and single.held_out


def test_prompts_in_json_lines_are_a_corpus_of_conversations(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(f'{{"prompt": "prompt {i}"}}\n' for i in range(40)))
    corpus = load_corpus(str(path))
    assert len(corpus.train) + len(corpus.held_out) == 40 and corpus.held_out
    assert all(messages[0]["role"] == "user" for messages in corpus.train)


@pytest.mark.parametrize("text", ["", "  \n"])
def test_an_empty_corpus_is_an_error(tmp_path, text):
    (tmp_path / "a.txt").write_text(text)
    for path in (tmp_path, tmp_path / "a.txt"):
        with pytest.raises(ValueError, match="empty"):
            load_corpus(str(path))
    with pytest.raises(FileNotFoundError, match="missing"):
        load_corpus(str(tmp_path / "nothing"))


def test_a_corpus_of_one_line_cannot_be_split(tmp_path):
    (tmp_path / "a.txt").write_text("one line\n")
    with pytest.raises(ValueError, match="one text only"):
        load_corpus(str(tmp_path))


def test_packed_texts_are_separated_by_the_end_id(tokenizer):
    conversation = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    ids = pack(["hi", conversation], tokenizer)
    assert ids.tolist() == [*b"hi", 256, *b"a\n\nb", 256] and ids.dtype == torch.int16


def test_prompts_of_text_are_reproducible_and_exact_in_length(tokenizer):
    texts = ["".join(f"line {i} of {n}\n" for i in range(200)) for n in range(3)]
    a, b = (draw_prompts(texts, tokenizer, 20, 16, seed=1) for _ in range(2))
    assert a == b and all(len(p) == 16 for p in a)
    assert all(tokenizer.decode(p).startswith("line ") for p in a)
    with pytest.raises(ValueError, match="too short"):
        draw_prompts(["abc"], tokenizer, 2, 16, seed=1)


def test_prompts_of_conversations_stay_whole_and_long_ones_are_left_out(tokenizer, capsys):
    conversations = [[{"role": "user", "content": text}] for text in ("ab", "c" * 40)]
    assert draw_prompts(conversations, tokenizer, 5, 16, 0) == [[97, 98]]
    assert "1 prompts longer than 16 tokens left out" in capsys.readouterr().out


def test_references_round_trip_and_say_how_they_were_made(tmp_path):
    made = References.from_lists([[1, 2], [3], [4]], [[5, 6], [7, 8, 9], [1]], pad_id=0)
    assert made.lengths.tolist() == [4, 4] and made.prompt_lengths.tolist() == [2, 1]
    made.save(tmp_path / "r.safetensors", {"seed": 3})
    again = References.load(tmp_path / "r.safetensors", {"seed": 3})
    assert torch.equal(again.tokens, made.tokens) and torch.equal(again.lengths, made.lengths)
    with pytest.raises(ValueError, match="seed = 3"):
        References.load(tmp_path / "r.safetensors", {"seed": 4})
    with pytest.raises(ValueError, match="nothing to supervise"):
        References.from_lists([[1]], [[2]], 0)


def test_references_of_a_server_fit_any_target(tmp_path):
    made = References.from_lists([[1]], [[5, 6]], pad_id=0)
    made.save(tmp_path / "r.safetensors", {"target": None})
    References.load(tmp_path / "r.safetensors", {"target": 12345})
    made.save(tmp_path / "r.safetensors", {"target": 1})
    with pytest.raises(ValueError, match="target = 1"):
        References.load(tmp_path / "r.safetensors", {"target": 12345})
