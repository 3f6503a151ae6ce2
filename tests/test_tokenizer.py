"""Ids equal to the `tokenizers` package, chat text equal to transformers'. `pytest
tests/test_tokenizer.py`"""

import json
import random
import unicodedata

import pytest

from support.data import References, load_tokenizer

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")
QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<empty_output>"]
CHATML = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}{% endif %}"
    "{% if message['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}\n"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] | trim}}"
    "{{'<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEXT = [
    "The quick brown fox doesn't jump; it's 1234.5 km away — ",
    "世界, こんにちは, привет, ¿qué tal?\n\n\t",
    "def f(x):\n    return x ** 2  # ½ ² ٣ é e\u0301 👩‍💻\r\n" * 2,
    "we'll they've I'm HE'LL 3rd 1st  22   333\u00a0\u2003x",
] * 20


def build(folder, kind: str, size: int = 420):
    """A BPE trained here, in the form of SmolLM2's file (digits split off) or Qwen's (own regex,
    NFC)."""
    pre = tokenizers.pre_tokenizers
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    if kind == "smollm2":
        tokenizer.pre_tokenizer = pre.Sequence(
            [pre.Digits(True), pre.ByteLevel(add_prefix_space=False)]
        )
    elif kind == "gpt2":
        tokenizer.pre_tokenizer = pre.ByteLevel(add_prefix_space=False)
    else:
        tokenizer.normalizer = tokenizers.normalizers.NFC()
        split = pre.Split(tokenizers.Regex(QWEN), "isolated")
        tokenizer.pre_tokenizer = pre.Sequence([split, pre.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size, special_tokens=SPECIAL, initial_alphabet=pre.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "bos_token": "<|im_start|>",
        "chat_template": CHATML,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [2, 0], "pad_token_id": 1})
    )
    return tokenizer


def any_character(rng: random.Random) -> str:
    """A code point that this Python knows: tables of newer ones differ between regex engines."""
    while True:
        character = chr(rng.choice([rng.randint(1, 0xD7FF), rng.randint(0xE000, 0x1FFFF)]))
        if unicodedata.category(character) != "Cn":
            return character


def random_text(rng: random.Random) -> str:
    """Words, spaces, digits, marks and any code point, glued together."""
    pieces = [
        lambda: rng.choice(["the", " quick", "'ll", "'S", "don't", "é", "e\u0301", "\u1100\u1161"]),
        lambda: rng.choice([" ", "  ", "\n", "\r\n", "\t", "\u00a0", "\u2003"]) * rng.randint(1, 3),
        lambda: str(rng.randint(0, 10**6)),
        lambda: rng.choice(["½", "²", "٣", "Ⅷ", "一", "👩‍💻", "🇫🇷", "\u0338", "\u200d", "ﬁ", "İ"]),
        lambda: rng.choice(SPECIAL),
        lambda: any_character(rng),
        lambda: rng.choice("!?.,;:#{}()[]<>|_-+=*/\\'\"") * rng.randint(1, 4),
    ]
    return "".join(rng.choice(pieces)() for _ in range(rng.randint(0, 12)))


@pytest.mark.parametrize("kind", ["smollm2", "gpt2", "qwen"])
def test_ids_equal_those_of_the_tokenizers_package_on_2000_random_texts(tmp_path, kind):
    theirs, ours, rng = build(tmp_path, kind), load_tokenizer(tmp_path), random.Random(0)
    differ = []
    for text in [*TEXT, *(random_text(rng) for _ in range(2000))]:
        ids = theirs.encode(text, add_special_tokens=False).ids
        if ids != ours.encode(text):
            differ.append((text, ids, ours.encode(text)))
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=False)
    assert not differ, f"{len(differ)} differ, the first: {differ[0]}"
    assert (
        ours.stop_ids == (2, 0) and ours.pad_id == 1 and ours.num_tokens == theirs.get_vocab_size()
    )


def test_of_two_added_tokens_the_longer_one_wins_and_no_text_is_lost(tmp_path):
    theirs = build(tmp_path, "gpt2")
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
    build(tmp_path, "gpt2")
    path = tmp_path / "tokenizer.json"
    file = json.loads(path.read_text())
    gone = "ā"  # the stand-in of byte 1
    del file["model"]["vocab"][gone]
    file["model"]["unk_token"] = unknown
    path.write_text(json.dumps(file))
    theirs, ours = tokenizers.Tokenizer.from_file(str(path)), load_tokenizer(tmp_path)
    for text in ("a\x01b", "\x01\x01 x\x01"):
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False).ids


CHATS = [
    [{"role": "user", "content": "Hi {{ there }}"}],
    [{"role": "system", "content": " Be kind. "}, {"role": "user", "content": "a\n"}],
    [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "3"},
        {"role": "assistant", "content": "four 世界"},
    ],
]


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("prompt", [True, False])
def test_chat_text_equals_transformers(tmp_path, chat, prompt):
    build(tmp_path, "smollm2")
    theirs, ours = transformers.AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)
    text = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt)
    assert ours.chat(chat, prompt) == text
    assert ours.encode(text) == theirs(text, add_special_tokens=False)["input_ids"]


def test_a_template_in_its_own_file_wins_and_sees_options_and_names(tmp_path):
    build(tmp_path, "qwen")
    (tmp_path / "chat_template.jinja").write_text(
        "{{ bos_token }}{% if enable_thinking is defined and not enable_thinking %}quiet{% endif %}"
        "{% for m in messages %}{% if m.role == 'x' %}{% continue %}{% endif %}"
        "{{ m | tojson }}{% endfor %}"
        "{{ strftime_now('%Y') | length }}"
    )
    ours, chat = (
        load_tokenizer(tmp_path),
        [{"role": "x", "content": "no"}, {"role": "user", "content": "é"}],
    )
    assert (
        ours.chat(chat, enable_thinking=False)
        == '<|im_start|>quiet{"role": "user", "content": "é"}4'
    )


def test_a_template_that_refuses_or_is_broken_is_one_clear_error(tmp_path):
    build(tmp_path, "qwen")
    with pytest.raises(ValueError, match="no tools"):
        load_tokenizer(tmp_path).chat(
            [{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}]
        )
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(ValueError, match="template"):
        load_tokenizer(tmp_path).chat(CHATS[0])
    for text in ("{{ ''.__class__.__mro__ }}", "{{ 1 + 'a' }}"):
        (tmp_path / "chat_template.jinja").write_text(text)
        with pytest.raises(ValueError, match="template"):
            load_tokenizer(tmp_path).chat(CHATS[0])


def test_only_the_assistants_turns_are_supervised(tmp_path):
    build(tmp_path, "smollm2")
    ours = load_tokenizer(tmp_path)
    ids, mask = ours.supervised(CHATS[2])
    assert ours.decode(ids) == ours.chat(CHATS[2], False) and len(ids) == len(mask)
    kept = ours.decode([i for i, wanted in zip(ids, mask) if wanted])
    assert kept == "2<|im_end|>\nfour 世界<|im_end|>\n"
    with pytest.raises(ValueError, match="nothing to supervise"):
        ours.supervised(CHATS[1])


def test_each_assistant_turn_becomes_a_reference(tmp_path, capsys):
    build(tmp_path, "smollm2")
    ours = load_tokenizer(tmp_path)
    found = References.from_conversations([CHATS[1], CHATS[2]], ours, 1000)
    spans = zip(found.tokens.tolist(), found.prompt_lengths.tolist(), found.lengths.tolist())
    texts = [(ours.decode(ids[:start]), ours.decode(ids[start:end])) for ids, start, end in spans]
    assert [said for _, said in texts] == ["2<|im_end|>", "four 世界<|im_end|>"]
    whole = ours.chat(CHATS[2], False)
    assert all(whole.startswith(before + said) for before, said in texts)
    tokens = sum(len(ours.encode(said)) for _, said in texts)
    assert f"{tokens} supervised tokens in 2 assistant turns" in capsys.readouterr().out
    first = int(found.lengths[0])
    assert len(References.from_conversations([CHATS[2]], ours, first).lengths) == 1
    assert "1 turns that end beyond" in capsys.readouterr().out
    for chats, length in (([CHATS[1]], 1000), ([CHATS[2]], 3)):
        with pytest.raises(ValueError, match="nothing to supervise"):
            References.from_conversations(chats, ours, length)


@pytest.mark.parametrize(
    "change, word",
    [
        (dict(normalizer={"type": "NFKC"}), "NFKC"),
        (
            dict(normalizer={"type": "Sequence", "normalizers": [{"type": "Lowercase"}]}),
            "Lowercase",
        ),
        (dict(pre_tokenizer={"type": "Whitespace"}), "Whitespace"),
        (dict(pre_tokenizer={"type": "ByteLevel", "add_prefix_space": True}), "ByteLevel"),
        (dict(model={"type": "Unigram", "vocab": []}), "BPE"),
        (dict(model={"type": "BPE", "vocab": {"ab": 5000}, "merges": []}), "no merge makes"),
        (dict(added_tokens=[{"id": 0, "content": "<x>", "lstrip": True}]), "<x>"),
        (dict(added_tokens=[{}]), "content"),
        (dict(pre_tokenizer=7), "byte-level BPE"),
        (dict(added_tokens=[{"id": -1, "content": "<x>"}]), "no numbers from 0 on"),
        (dict(added_tokens=[{"id": 7, "content": c} for c in ("<x>", "<y>")]), "one for each"),
        (dict(model={"type": "BPE", "vocab": {"a": "b"}, "merges": []}), "no numbers"),
        (dict(model={"type": "BPE", "vocab": {"a": 5000}, "merges": [7]}), "byte-level BPE"),
    ],
)
def test_what_is_not_implemented_is_an_error_that_names_it(tmp_path, change, word):
    build(tmp_path, "gpt2")
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=word):
        load_tokenizer(tmp_path)
