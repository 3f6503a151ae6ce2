"""Byte-level BPEs that the `tokenizers` package trains here, saved as model folders have them."""

import json

import pytest

tokenizers = pytest.importorskip("tokenizers")

QWEN_PATTERN = (
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
TEXTS = [
    "The quick brown fox doesn't jump; it's 1234.5 km away — ",
    "世界, こんにちは, привет, ¿qué tal?\n\n\t",
    "def f(x):\n    return x ** 2  # ½ ² ٣ é e\u0301 👩‍💻\r\n" * 2,
    "we'll they've I'm HE'LL 3rd 1st  22   333\u00a0\u2003x",
] * 20
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

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather of a <city> & more",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
TOOL_CHAT = [
    {"role": "user", "content": "Weather in Zürich and Rome?"},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "Weather: call it.",
        "tool_calls": [
            {"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich"}}},
            {"type": "function", "function": {"name": "weather", "arguments": '{"city":"Rome"}'}},
        ],
    },
    {"role": "tool", "name": "weather", "tool_call_id": "a1", "content": "sun"},
    {"role": "tool", "name": "weather", "tool_call_id": "a2", "content": '{"rain": 3}'},
    {"role": "assistant", "content": "Sun here, rain there.", "reasoning_content": "Both known."},
]


def save_tokenizer(folder, kind: str, vocab_size: int = 420):
    """Train and save one in the form of SmolLM2's file (digits split off), of GPT-2's, or of Qwen's
    (a regex of its own, NFC), with a chat template, two stop ids and a pad id."""
    pre = tokenizers.pre_tokenizers
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    level = pre.ByteLevel(add_prefix_space=False)
    if kind == "smollm2":
        tokenizer.pre_tokenizer = pre.Sequence([pre.Digits(True), level])
    elif kind == "gpt2":
        tokenizer.pre_tokenizer = level
    else:
        tokenizer.normalizer = tokenizers.normalizers.NFC()
        split = pre.Split(tokenizers.Regex(QWEN_PATTERN), "isolated")
        tokenizer.pre_tokenizer = pre.Sequence([split, pre.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=SPECIAL, initial_alphabet=pre.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "bos_token": "<|im_start|>",
        "chat_template": CHATML,
    }
    ids = {"eos_token_id": [2, 0], "pad_token_id": 1}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    (folder / "generation_config.json").write_text(json.dumps(ids))
    return tokenizer
