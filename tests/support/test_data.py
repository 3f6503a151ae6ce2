"""The corpus and prompts."""

import gzip
import json
from types import SimpleNamespace

import pytest
import torch

from hf import load_tokenizer
from hf.chat import Conversation
from support.data import (
    Corpus,
    draw_prompts,
    hold_out,
    load_corpus,
    num_held_out,
    pack,
    split_conversations,
)
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


def write_prompts(path, count: int, word: str = "prompt"):
    """Write a file of so many prompts."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(f'{{"prompt": "{word} {i}"}}\n' for i in range(count)).encode()
    path.write_bytes(gzip.compress(lines) if path.suffix == ".gz" else lines)


def texts_of(corpus) -> set[str]:
    return {messages[0]["content"] for messages in corpus.train + corpus.held_out}


def test_a_folder_with_prompts_gives_prompts_and_says_what_is_left_aside(tmp_path, capsys):
    write_prompts(tmp_path / "train" / "p.jsonl", 30, "a")
    write_prompts(tmp_path / "test" / "p.jsonl", 20, "b")
    write_prompts(tmp_path / "more.jsonl.gz", 10, "c")
    write_prompts(tmp_path / "lines.ndjson", 3, "e")
    (tmp_path / "array.json").write_text(json.dumps([{"prompt": "d 0"}]))
    write_prompts(tmp_path / ".cache" / "old.jsonl", 5, "hidden")
    (tmp_path / "README.md").write_text("# Prompts\n")
    (tmp_path / "dataset_info.json").write_text('{"splits": []}')
    (tmp_path / "data.parquet").write_bytes(b"PAR1\0")
    corpus = load_corpus(str(tmp_path))
    expected = {
        f"{word} {i}"
        for word, n in (("a", 30), ("b", 20), ("c", 10), ("d", 1), ("e", 3))
        for i in range(n)
    }
    assert texts_of(corpus) == expected
    printed = capsys.readouterr().out
    assert f"corpus {tmp_path}: 5 files of prompts, 64 conversations; left aside: " in printed
    for name in (".cache/old.jsonl", "README.md", "data.parquet", "dataset_info.json"):
        assert name in printed
    assert printed.count("\n") == 1


@pytest.mark.parametrize(
    "names, line",
    [
        (["a.txt"], "1 file of text, 40 characters\n"),
        (["a.txt", "b.md", "c.json"], "3 files of text, 120 characters\n"),
        (["a.txt", "b.py", ".git/x"], "2 files of text, 80 characters; left aside: .git/x\n"),
        ([f"{i}.txt" for i in range(3)] + [f".{i}" for i in range(7)], ".3, .4 and 2 more\n"),
    ],
)
def test_a_folder_of_text_says_what_was_taken(tmp_path, capsys, names, line):
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("12345678\nabcdefghijklmnopqrst\n0123456789")
    load_corpus(str(tmp_path))
    assert capsys.readouterr().out.endswith(line)


@pytest.mark.parametrize("name", ["p.jsonl", "a.txt"])
def test_links_that_are_not_followed_are_named(tmp_path, capsys, name):
    write_prompts(tmp_path / "elsewhere" / name, 30)
    write_prompts(tmp_path / "corpus" / name, 20)
    (tmp_path / "corpus/folder").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "corpus/gone.jsonl").symlink_to(tmp_path / "nothing")
    (tmp_path / "corpus/file.jsonl").symlink_to(tmp_path / "elsewhere" / name)
    load_corpus(str(tmp_path / "corpus"))
    printed = capsys.readouterr().out
    assert "left aside: folder (a link to no file), gone.jsonl (a link to no file)" in printed
    assert ("50 conversations" in printed) == (name == "p.jsonl")  # the third link is followed


def test_a_flag_for_lines_of_prompts_is_named_where_the_corpus_is_text(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("line\n" * 40)
    write_prompts(tmp_path / "p.jsonl", 30)
    for name, words in (("a.txt", "; --skip-bad-lines means nothing for text\n"), ("p.jsonl", "")):
        load_corpus(str(tmp_path / name), skip_bad_lines=True)
        printed = capsys.readouterr().out
        assert printed.endswith(words) and ("--skip-bad-lines" in printed) == bool(words)


def test_the_default_corpus_is_taken_without_a_word(capsys):
    load_corpus()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "name, data, reason",
    [
        ("a.parquet", b"PAR1\x15\x04", "Parquet.*to_json"),
        ("a.zip", b"PK\x03\x04", "zip"),
        ("a.txt.gz", gzip.compress(b"text"), "gzip"),
        ("a.bin", b"ab\0c", "NUL"),
        ("a.txt", "näh".encode("latin-1"), r"not UTF-8 \(byte 1\)"),
        ("a.txt", "text".encode("utf-16"), "UTF-16"),
        ("a.json", b'{"prompt": "a"}', "no array, but an object with prompt"),
    ],
)
def test_a_file_that_is_no_text_is_refused_by_name(tmp_path, name, data, reason):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=rf"{name}.*{reason}"):
        load_corpus(str(tmp_path / name))
    if name != "a.json":  # in a folder it is text, as a package.json beside sources
        (tmp_path / "b.txt").write_text("text\n" * 9)
        with pytest.raises(ValueError, match=f"{name}.*accepted are UTF-8 text, prompts as JSON L"):
            load_corpus(str(tmp_path))


def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n")
    corpus = load_corpus(str(tmp_path / "a.txt"))
    assert sorted(corpus.train + corpus.held_out) == ["one\n", "two\n"]


@pytest.mark.parametrize(
    "count, expected",
    [(3, 0), (4, 1), (100, 25), (256, 64), (1279, 64), (1280, 64), (2000, 100), (100_000, 256)],
)
def test_a_twentieth_is_held_out_but_64_if_there_are_enough_and_256_at_most(count, expected):
    assert num_held_out(count) == expected
    train, held_out = split_conversations([*range(count)])
    assert len(held_out) == expected and sorted(train + held_out) == [*range(count)]


def test_a_file_of_prompts_is_split_alike_alone_and_in_its_folder(tmp_path):
    write_prompts(tmp_path / "p.jsonl", 100)
    alone, in_folder = (load_corpus(str(path)) for path in (tmp_path / "p.jsonl", tmp_path))
    assert alone == in_folder and len(alone.held_out) == 25
    write_prompts(tmp_path / "p.jsonl", 2)
    assert len(load_corpus(str(tmp_path)).held_out) == 1  # a corpus has two parts


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
    assert draw_prompts(texts, tokenizer, 5, 16, seed=1) == a[:5]  # fewer are the first of more


def test_prompts_of_conversations_stay_whole_and_long_ones_are_left_out(tokenizer, capsys):
    conversations = [[{"role": "user", "content": text}] for text in ("ab", "c" * 40)]
    assert draw_prompts(conversations, tokenizer, 5, 16, 0) == [[97, 98]]
    line = "1 of 2 prompts are longer than 16 tokens and left out: --prompt-length allows longer"
    assert line in capsys.readouterr().out


def test_prompts_that_the_template_refuses_are_left_out_by_reason(tokenizer, tmp_path, capsys):
    template = (
        "{% if messages[0].content == 'x' %}{{ raise_exception('no x') }}{% endif %}"
        "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text(template)
    tokenizer = load_tokenizer(tmp_path / "tokenizer")
    x, ab = ([{"role": "user", "content": text}] for text in ("x", "ab"))
    with_tools = Conversation(ab, [{"name": "f"}])
    assert draw_prompts([x, ab, with_tools, x], tokenizer, 5, 16, 0) == [[97, 98]]
    line = (
        "prompts left out: 2 x the chat template refuses: no x, 1 x the chat template has no place"
    )
    assert line in capsys.readouterr().out
    for texts, reason in (([x], "no x"), ([with_tools], "no place for tools")):
        with pytest.raises(ValueError, match=f"no prompt is left: 1 x .*{reason}"):
            draw_prompts(texts, tokenizer, 5, 16, 0)
        assert capsys.readouterr().out == ""  # the error says it all


def test_conversations_that_give_no_prompt_are_left_out_by_reason(tokenizer, tmp_path, capsys):
    turns = {role: {"role": role, "content": role} for role in ("system", "user", "assistant")}
    chats = [[turns["assistant"]] * 2, [turns["system"], turns["assistant"]], [turns["user"]]]
    assert draw_prompts(chats, tokenizer, 5, 16, 0) == [[*b"user"]]
    assert capsys.readouterr().out.startswith("prompts left out: 2 x no turn of the user")
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text("{# nothing #}")
    silent = load_tokenizer(tmp_path / "tokenizer")
    with pytest.raises(ValueError, match="2 x no turn of the user.*1 x .* template writes nothing"):
        draw_prompts(chats, silent, 5, 16, 0)


def test_no_prompt_is_held_out_where_all_are_too_long(tokenizer, capsys):
    chats = [[{"role": "user", "content": "long" * 9}]]
    config = SimpleNamespace(prompt_length=8, seed=0)
    assert hold_out(Corpus(chats, chats), tokenizer, config, []) == []
    assert "no prompt is held out to measure on: no prompt of at most 8" in capsys.readouterr().out


def test_raw_text_begins_with_the_bos_of_the_post_processor(tokenizer, tmp_path):
    path = tmp_path / "tokenizer" / "tokenizer.json"
    bos = {"id": "<|endoftext|>", "ids": [256], "tokens": ["<|endoftext|>"]}
    single = [{"SpecialToken": {"id": bos["id"], "type_id": 0}}, {"Sequence": {"id": "A"}}]
    adds = {"type": "TemplateProcessing", "single": single, "special_tokens": {bos["id"]: bos}}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"post_processor": adds}))
    tokenizer = load_tokenizer(tmp_path / "tokenizer")
    texts = ["".join(f"line {i}\n" for i in range(200))] * 2
    prompts = draw_prompts(texts, tokenizer, 5, 16, seed=1)
    assert all(ids[0] == 256 and len(ids) == 16 and 256 not in ids[1:] for ids in prompts)
    assert pack(["hi", "a"], tokenizer).tolist() == [256, *b"hi", 256, 256, *b"a", 256]
    chat = [{"role": "user", "content": "hi"}]
    assert draw_prompts([chat], tokenizer, 1, 16, 0) == [[256, *b"hi"]]
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    tokenizer = load_tokenizer(tmp_path / "tokenizer")
    assert draw_prompts([chat], tokenizer, 1, 16, 0) == [[*b"hi"]]
