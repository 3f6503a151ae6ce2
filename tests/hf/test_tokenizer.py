"""Ids equal to those of the `tokenizers` package (of a real model: tests/slow/test_smollm2.py)."""

import json
import random
import unicodedata

import pytest

from hf import load_tokenizer
from their_tokenizers import SPECIAL, TEXTS, save_tokenizer, tokenizers


def any_character(rng: random.Random) -> str:
    """A code point that this Python knows: tables of newer ones differ between regex engines."""
    while True:
        character = chr(rng.choice([rng.randint(1, 0xD7FF), rng.randint(0xE000, 0x1FFFF)]))
        if unicodedata.category(character) != "Cn":
            return character


def random_text(rng: random.Random) -> str:
    """Words, spaces, digits, marks and any code point, glued together."""
    words = ["the", " quick", "'ll", "'S", "don't", "é", "e\u0301", "\u1100\u1161"]
    spaces = [" ", "  ", "\n", "\r\n", "\t", "\u00a0", "\u2003"]
    marks = ["½", "²", "٣", "Ⅷ", "一", "👩‍💻", "🇫🇷", "\u0338", "\u200d", "ﬁ", "İ"]
    pieces = [
        lambda: rng.choice(words),
        lambda: rng.choice(spaces) * rng.randint(1, 3),
        lambda: str(rng.randint(0, 10**6)),
        lambda: rng.choice(marks),
        lambda: rng.choice(SPECIAL),
        lambda: any_character(rng),
        lambda: rng.choice("!?.,;:#{}()[]<>|_-+=*/\\'\"") * rng.randint(1, 4),
    ]
    return "".join(rng.choice(pieces)() for _ in range(rng.randint(0, 12)))


@pytest.mark.parametrize("kind", ["smollm2", "gpt2", "qwen"])
def test_ids_equal_those_of_the_tokenizers_package_on_2000_random_texts(tmp_path, kind):
    theirs = save_tokenizer(tmp_path, kind)
    ours = load_tokenizer(tmp_path)
    rng = random.Random(0)
    differ = []
    for text in [*TEXTS, *(random_text(rng) for _ in range(2000))]:
        ids = theirs.encode(text, add_special_tokens=False).ids
        if ids != ours.encode(text):
            differ.append((text, ids, ours.encode(text)))
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=False)
    assert not differ, f"{len(differ)} differ, the first: {differ[0]}"
    assert ours.stop_ids == (2, 0)
    assert ours.pad_id == 1
    assert ours.num_tokens == theirs.get_vocab_size()


def test_of_two_added_tokens_the_longer_one_wins_and_no_text_is_lost(tmp_path):
    theirs = save_tokenizer(tmp_path, "gpt2")
    theirs.add_tokens(["  ", "   ", "<a>", "<a>b"])
    digits = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"\p{N}"), "isolated")
    level = tokenizers.pre_tokenizers.ByteLevel(False, use_regex=False)
    theirs.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([digits, level])
    theirs.save(str(tmp_path / "tokenizer.json"))
    ours = load_tokenizer(tmp_path)
    for text in ("x   y  z", "<a>bc<a>", "ab12c", "  1"):
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False).ids, text


@pytest.mark.parametrize("unknown", [None, "<empty_output>"])
def test_bytes_without_a_token_are_dropped_or_unknown_as_the_file_says(tmp_path, unknown):
    save_tokenizer(tmp_path, "gpt2")
    path = tmp_path / "tokenizer.json"
    file = json.loads(path.read_text())
    del file["model"]["vocab"]["ā"]  # the stand-in of byte 1
    file["model"]["unk_token"] = unknown
    path.write_text(json.dumps(file))
    theirs = tokenizers.Tokenizer.from_file(str(path))
    ours = load_tokenizer(tmp_path)
    for text in ("a\x01b", "\x01\x01 x\x01"):
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False).ids


def bpe(**changes) -> dict:
    return {"model": {"type": "BPE", "merges": []} | changes}


REFUSED = {  # changes of tokenizer.json, and a word of the error
    "normalizer": ({"normalizer": {"type": "NFKC"}}, "NFKC"),
    "normalizer in a sequence": (
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "Lowercase"}]}},
        "Lowercase",
    ),
    "pre-tokenizer": ({"pre_tokenizer": {"type": "Whitespace"}}, "Whitespace"),
    "space in front": (
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True}},
        "ByteLevel",
    ),
    "unigrams": ({"model": {"type": "Unigram", "vocab": []}}, "BPE"),
    "token without a merge": (bpe(vocab={"ab": 5000}), "no merge makes"),
    "stripping token": ({"added_tokens": [{"id": 0, "content": "<x>", "lstrip": True}]}, "<x>"),
    "token without a text": ({"added_tokens": [{}]}, "content"),
    "pre-tokenizer a number": ({"pre_tokenizer": 7}, "byte-level BPE"),
    "negative id": ({"added_tokens": [{"id": -1, "content": "<x>"}]}, "no numbers from 0 on"),
    "one id twice": ({"added_tokens": [{"id": 7, "content": c} for c in "xy"]}, "one for each"),
    "id a letter": (bpe(vocab={"a": "b"}), "no numbers"),
    "merge a number": (bpe(vocab={"a": 5000}, merges=[7]), "byte-level BPE"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_implemented_is_an_error_that_names_it(tmp_path, case):
    change, word = REFUSED[case]
    save_tokenizer(tmp_path, "gpt2")
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=word):
        load_tokenizer(tmp_path)


def test_a_folder_without_a_tokenizer_is_a_clear_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="tokenizer.json"):
        load_tokenizer(tmp_path)
