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


def adding(before: list[str], after: list[str], **ids: int) -> dict:
    """A post_processor that puts tokens before and after a text."""
    pieces = [
        [{"SpecialToken": {"id": text, "type_id": 0}} for text in row] for row in (before, after)
    ]
    special = {t: {"id": t, "ids": [ids.get(t, -1)], "tokens": [t]} for t in (*before, *after)}
    single = [*pieces[0], {"Sequence": {"id": "A", "type_id": 0}}, *pieces[1]]
    return {"type": "TemplateProcessing", "single": single, "special_tokens": special}


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
    "post-processor": ({"post_processor": {"type": "RobertaProcessing"}}, "RobertaProcessing"),
    "post-processor in a sequence": (
        {"post_processor": {"type": "Sequence", "processors": [{"type": "BertProcessing"}]}},
        "BertProcessing",
    ),
    "two post-processors": (
        {"post_processor": {"type": "Sequence", "processors": [adding([], []), adding([], [])]}},
        "'TemplateProcessing', 'TemplateProcessing'",
    ),
    "end token after a text": ({"post_processor": adding([], ["<|im_end|>"])}, "after a text"),
    "nothing but a token": ({"post_processor": adding(["<|im_end|>"], [])}, "no added tokens"),
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


POST_PROCESSORS = {
    "none": None,
    "byte level": tokenizers.processors.ByteLevel(trim_offsets=False),
    "a BOS": tokenizers.processors.TemplateProcessing(
        "<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    ),
    "a BOS after byte level": tokenizers.processors.Sequence(
        [
            tokenizers.processors.ByteLevel(),
            tokenizers.processors.TemplateProcessing(
                "<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
            ),
        ]
    ),
    "two tokens": tokenizers.processors.TemplateProcessing(
        "<|endoftext|> <|im_start|> $A", special_tokens=[("<|endoftext|>", 0), ("<|im_start|>", 1)]
    ),
}


@pytest.mark.parametrize("case", POST_PROCESSORS)
def test_raw_text_gets_the_tokens_that_transformers_puts_before_it(tmp_path, case):
    transformers = pytest.importorskip("transformers")
    made = save_tokenizer(tmp_path, "gpt2")
    if POST_PROCESSORS[case]:
        made.post_processor = POST_PROCESSORS[case]
        made.save(str(tmp_path / "tokenizer.json"))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = load_tokenizer(tmp_path)
    for text in TEXTS[:4]:
        assert [*ours.bos_ids, *ours.encode(text)] == theirs(text)["input_ids"]
    chat = [{"role": "user", "content": "a"}]
    assert ours.encode(ours.chat(chat)) == theirs.apply_chat_template(
        chat, add_generation_prompt=True, return_dict=False
    )


STOP_IDS = {  # files beside tokenizer.json, and the stop ids that follow
    "generation_config wins": (
        {"generation_config": {"eos_token_id": [2, 0]}, "config": {"eos_token_id": 1}},
        (2, 0),
    ),
    "its null does not": (
        {"generation_config": {"eos_token_id": None}, "config": {"eos_token_id": 1}},
        (1,),
    ),
    "its empty list does not": (
        {"generation_config": {"eos_token_id": []}, "config": {"eos_token_id": 0}},
        (0,),
    ),
    "config": ({"config": {"eos_token_id": 0, "text_config": {"eos_token_id": 2}}}, (0,)),
    "text_config": ({"config": {"text_config": {"eos_token_id": 2}}}, (2,)),
    "the tokenizer's eos": ({"tokenizer_config": {"eos_token": "<|im_end|>"}}, (2,)),
    "the same as an object": ({"tokenizer_config": {"eos_token": {"content": "<|im_end|>"}}}, (2,)),
    "special_tokens_map": (
        {
            "special_tokens_map": {"eos_token": "<|endoftext|>"},
            "tokenizer_config": {"eos_token": None},
        },
        (0,),
    ),
    "a row without a text": ({"config": {"eos_token_id": 500, "vocab_size": 512}}, (500,)),
    "a row of text_config's": (
        {"config": {"text_config": {"eos_token_id": 500, "vocab_size": 512}}},
        (500,),
    ),
}


def write_files(folder, files: dict) -> None:
    """A tokenizer with these files beside it, and no others."""
    save_tokenizer(folder, "gpt2")
    for name in ("tokenizer_config", "generation_config"):
        (folder / f"{name}.json").unlink()
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


@pytest.mark.parametrize("case", STOP_IDS)
def test_stop_ids_come_from_the_first_file_that_has_any(tmp_path, capsys, case):
    files, expected = STOP_IDS[case]
    write_files(tmp_path, files)
    assert load_tokenizer(tmp_path).stop_ids == expected
    assert capsys.readouterr().out.strip() == ""


@pytest.mark.parametrize(
    "files",
    [
        {"generation_config": {"eos_token_id": 420}},
        {"generation_config": {"eos_token_id": [2, 512]}, "config": {"vocab_size": 512}},
        {"config": {"text_config": {"eos_token_id": 10**6, "vocab_size": 512}}},
        {"config": {"eos_token_id": 2, "pad_token_id": 999}},
        {"config": {"eos_token_id": "2"}},
        {"config": {"eos_token_id": -5}},
    ],
)
def test_stop_and_pad_ids_beyond_the_vocabulary_are_an_error(tmp_path, files):
    write_files(tmp_path, files)
    with pytest.raises(
        ValueError, match="is not among the (394|512) ids.*: mend generation_config.json"
    ):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "files", [{}, {"config": {"eos_token_id": None}}, {"tokenizer_config": {"eos_token": "<none>"}}]
)
def test_no_stop_id_at_all_is_said_in_one_line(tmp_path, capsys, files):
    write_files(tmp_path, files)
    assert load_tokenizer(tmp_path).stop_ids == ()
    assert f"{tmp_path} names no stop id" in capsys.readouterr().out
