"""Corpus, prompts, tokenizer, references, files, flags. `pytest tests/test_data.py`"""

import json
from dataclasses import dataclass

import pytest
import torch

from hf.tensors import load_weights
from hf.tokenizer import write_byte_tokenizer
from support import data, files
from support.data import References


@pytest.fixture
def tokenizer(tmp_path):
    write_byte_tokenizer(tmp_path / "tokenizer")
    return data.load_tokenizer(tmp_path / "tokenizer")


def test_the_embedded_corpus_is_split_by_file():
    corpus = data.load_corpus()
    assert len(corpus.train) > 300 and len(corpus.held_out) > 10
    assert not set(corpus.train) & set(corpus.held_out)
    assert sum(map(len, corpus.train)) > 5e6
    again = data.load_corpus()
    assert again.held_out == corpus.held_out


def test_the_byte_tokenizer_is_exact_on_any_text_and_never_crashes(tokenizer):
    texts = ("def f(x):\n\treturn ¼é", "世界 👩‍💻", "  \n\n   a", "e\u0301", "")
    for text in texts:
        assert tokenizer.encode(text) == list(text.encode())
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("<|endoftext|>") == [256]
    assert tokenizer.encode("<|endoftext|>", special=False) == list(b"<|endoftext|>")
    assert tokenizer.decode([72, 105, 256, 300, 10**9]) == "Hi<|endoftext|>"
    assert tokenizer.num_tokens == 258 and tokenizer.stop_ids == (256,)


def test_prompts_of_the_four_shapes(tmp_path):
    lines = [
        {"turns": ["one", "two"]},
        {"prompt": "one"},
        {"messages": [{"role": "user", "content": "one"}]},
        {"conversations": [{"from": "human", "value": "one"}, {"from": "gpt", "value": "yes"}]},
    ]
    path = tmp_path / "p.jsonl"
    path.write_text("\n\n".join(map(json.dumps, lines)))
    found = data.read_prompts(path)
    assert [m[0] for m in found] == [{"role": "user", "content": "one"}] * 4
    assert found[3][1] == {"role": "assistant", "content": "yes"}


@pytest.mark.parametrize(
    "line, reason",
    [
        ("{", "Expecting"),
        ("[1]", ":2:"),
        ('{"text": "x"}', "turns, prompt"),
        ('{"turns": []}', "no turns"),
        ('{"prompt": 3}', "without text"),
        ('{"messages": [{"role": "user"}]}', "content"),
    ],
)
def test_a_bad_line_is_reported_with_file_line_and_reason(tmp_path, capsys, line, reason):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(ValueError, match=r"p\.jsonl:2: .*") as error:
        data.read_prompts(path)
    assert reason in str(error.value)
    assert len(data.read_prompts(path, skip_bad_lines=True)) == 1
    assert "1 bad lines left out, 1 kept" in capsys.readouterr().err


def test_a_folder_of_text_and_a_single_file_both_give_two_parts(tmp_path):
    for i in range(40):
        (tmp_path / f"{i}.txt").write_text(f"text {i}\n" * 50)
    folder = data.load_corpus(str(tmp_path))
    assert len(folder.train) + len(folder.held_out) == 40 and folder.held_out
    single = data.load_corpus(str(tmp_path / "3.txt"))
    assert "".join(single.train + single.held_out).count("text 3") == 50 and single.held_out


@pytest.mark.parametrize("text", ["", "  \n"])
def test_an_empty_corpus_is_an_error(tmp_path, text):
    (tmp_path / "a.txt").write_text(text)
    for path in (tmp_path, tmp_path / "a.txt"):
        with pytest.raises(ValueError, match="empty"):
            data.load_corpus(str(path))
    with pytest.raises(FileNotFoundError, match="missing"):
        data.load_corpus(str(tmp_path / "nothing"))


def test_drawn_prompts_are_reproducible_and_exact_in_length(tokenizer):
    texts = ["".join(f"line {i} of {n}\n" for i in range(200)) for n in range(3)]
    a, b = (data.draw_prompts(texts, tokenizer, 20, 16, seed=1) for _ in range(2))
    assert a == b and all(len(p) == 16 for p in a)
    assert all(tokenizer.decode(p).startswith("line ") for p in a)
    with pytest.raises(ValueError, match="too short"):
        data.draw_prompts(["abc"], tokenizer, 2, 16, seed=1)
    asked = [[{"role": "user", "content": text}] for text in ("ab", "c" * 40)]
    whole = data.draw_prompts(asked, tokenizer, 5, 16, 0)
    assert whole == [[97, 98]]


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


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "x.json"
    files.write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        files.write_json(path, {"a": object()})
    with pytest.raises(RuntimeError), files.atomic(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert files.read_json(path) == {"a": 1}
    assert [f.name for f in tmp_path.iterdir()] == ["x.json"]


def test_weights_are_loaded_loudly(tmp_path):
    module = torch.nn.Linear(3, 2)
    path = tmp_path / "model.safetensors"
    for tensors, word in [
        ({"weight": torch.zeros(2, 3)}, "bias is missing"),
        ({"weight": torch.zeros(3, 2), "bias": torch.zeros(2)}, r"\(3, 2\)"),
        ({n: torch.zeros(s) for n, s in dict(weight=(2, 3), bias=2, more=1).items()}, "more"),
    ]:
        tensors.save_tensors(path, tensors)
        with pytest.raises(ValueError, match=word):
            load_weights(module, tmp_path)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ValueError, match="damaged"):
        load_weights(module, tmp_path)
    with pytest.raises(FileNotFoundError):
        load_weights(module, tmp_path / "none")


@dataclass(frozen=True)
class Flags:
    num_steps: int = files.flag(3, "steps", low=1)
    merge: bool = files.flag(True, "merge")
    name: str = files.flag("x", "a 100% name")
    kind: str = files.flag("a", "kind", choices=("a", "b"))


def test_flags_come_from_the_dataclass_and_mistakes_get_a_suggestion(tmp_path, capsys):
    assert files.parse_flags(Flags, "", []) == Flags()
    path = tmp_path / "run.json"
    path.write_text('{"num_steps": 5, "name": "y"}')
    given = ["--config", str(path), "--name", "z", "--no-merge"]
    assert files.parse_flags(Flags, "", given) == Flags(5, False, "z")
    with pytest.raises(SystemExit) as error:
        files.parse_flags(Flags, "", ["--num-step", "4"])
    assert error.value.code == 2 and "did you mean --num-steps?" in capsys.readouterr().err
    for text, word in [
        ('{"num_setps": 5}', "did you mean num_steps"),
        ('{"num_steps": "5"}', "num_steps = '5'"),
        ('{"num_steps": 2.5}', "no int"),
        ('{"merge": 1}', "no bool"),
        ("[1]", "no JSON object"),
        ('{"num_steps": true}', "no int"),
        ('{"kind": "c"}', "there is a, b"),
    ]:
        path.write_text(text)
        with pytest.raises(ValueError, match=word):
            files.parse_flags(Flags, "", ["--config", str(path)])
    with pytest.raises(ValueError, match="--num-steps 0: at least 1"):
        files.check_ranges(Flags(num_steps=0))


def test_separators_of_lines_inside_a_string_do_not_cut_it(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a\u2028b\u0085c"}\n', encoding="utf-8")
    assert data.read_prompts(path) == [[{"role": "user", "content": "a\u2028b\u0085c"}]]


def test_a_prompt_is_the_system_text_and_the_first_turn():
    turns = [{"role": r, "content": r} for r in ("system", "user", "assistant", "user")]
    assert data.first_turn(turns) == turns[:2] and data.first_turn(turns[1:]) == turns[1:2]
