"""Prompts read from files; chat text and masks equal to transformers'."""

import gzip
import json

import pytest

from hf import load_tokenizer
from hf.chat import Conversation, first_turn, read_prompts
from support.references import References
from their_tokenizers import CHATS, TOOL_CHAT, TOOLS, save_tokenizer

USER = {"role": "user", "content": "a"}
ANSWER = {"role": "assistant", "content": "b"}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
# prints all that it is given, in order
MIRROR = (
    "{{ tools | tojson }}{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message | tojson }}{{ message.tool_calls }}{{ message.thinking }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer_with(folder, template: str, template_args: str = ""):
    """A small tokenizer with a chat template of its own."""
    save_tokenizer(folder, "qwen")
    (folder / "chat_template.jinja").write_text(template)
    return load_tokenizer(folder, template_args)


def write_records(path, records: list):
    """Write records in the form that the file's name says."""
    lines = "\n".join(map(json.dumps, records)).encode()
    data = json.dumps(records).encode() if path.suffix == ".json" else lines
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def conversation_of(tmp_path, record: dict) -> Conversation:
    [conversation] = read_prompts(write_records(tmp_path / "one.jsonl", [record]))
    return conversation


def test_prompts_of_the_four_shapes_are_read_alike(tmp_path):
    lines = [
        {"turns": ["one", "two"]},
        {"prompt": "one"},
        {"messages": [{"role": "user", "content": "one"}]},
        {"conversations": [{"from": "human", "value": "one"}, {"from": "gpt", "value": "yes"}]},
    ]
    path = tmp_path / "p.jsonl"
    path.write_text("\n\n".join(map(json.dumps, lines)))
    conversations = read_prompts(path)
    assert [messages[0] for messages in conversations] == [{"role": "user", "content": "one"}] * 4
    assert conversations[3][1] == {"role": "assistant", "content": "yes"}


@pytest.mark.parametrize(
    "line, reason",
    [
        ("{", "Expecting"),
        ("[1]", ":2:"),
        ('{"text": "x"}', "turns, prompt"),
        ('{"turns": []}', "no turns"),
        ('{"prompt": 3}', "without text"),
        ('{"messages": [{"role": "user"}]}', "content"),
        ('{"turns": "one"}', "turns is no list"),
        ('{"prompt": null}', "turns, prompt"),
        ('{"messages": [{"content": "a"}]}', "lacks 'role'"),
        ('{"messages": ["a"]}', "no JSON object"),
        ('{"prompt": "a", "prompt": "b"}', "the key 'prompt' is given twice"),
        ('{"messages": [{"role": "user", "content": "a", "role": "tool"}]}', "key 'role' is given"),
    ],
)
def test_a_bad_line_is_reported_with_file_line_and_reason(tmp_path, capsys, line, reason):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(ValueError, match=r"p\.jsonl:2: .*--skip-bad-lines") as error:
        read_prompts(path)
    assert reason in str(error.value)
    assert len(read_prompts(path, skip_bad_lines=True)) == 1
    assert "1 bad lines left out, 1 kept" in capsys.readouterr().err


def test_separators_of_lines_inside_a_string_do_not_cut_it(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a\u2028b\u0085c"}\n', encoding="utf-8")
    assert read_prompts(path) == [[{"role": "user", "content": "a\u2028b\u0085c"}]]


@pytest.mark.parametrize("name", ["p.jsonl", "p.jsonl.gz", "p.json", "P.JSONL", "p.ndjson"])
def test_the_same_records_are_read_from_each_form_of_file(tmp_path, name):
    records = [{"prompt": "é"}, {"messages": [USER, ANSWER], "tools": TOOLS}]
    conversations = read_prompts(write_records(tmp_path / name, records))
    assert conversations == [[{"role": "user", "content": "é"}], [USER, ANSWER]]
    assert [conversation.tools for conversation in conversations] == [None, TOOLS]


@pytest.mark.parametrize("name", ["p.jsonl", "p.json"])
def test_a_byte_order_mark_is_no_error(tmp_path, name):
    path = write_records(tmp_path / name, [{"prompt": "a"}])
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert read_prompts(path) == [[USER]]


@pytest.mark.parametrize(
    "text, reason",
    [
        ('{"data": [], "version": 1}', "no array, but an object with data, version"),
        ('"abc"', "no array"),
        ('{"prompt": "a"}\n{"prompt": "b"}', "Extra data.*one record a line makes a .jsonl"),
        ("[]", "no prompts"),
        ('[{"prompt": "a"}, 3]', "p.json: bad record 2: no JSON object"),
    ],
)
def test_a_json_that_is_no_array_of_records_says_what_it_is(tmp_path, text, reason):
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(ValueError, match=reason):
        read_prompts(tmp_path / "p.json")


@pytest.mark.parametrize(
    "name, data, reason",
    [
        ("p.jsonl", b"PAR1\x15", r"Parquet.*to_json\(B, orient"),
        ("p.json", b"PK\x03\x04", "zip"),
        ("p.jsonl", gzip.compress(b"{}"), "a gzip file"),
        ("p.jsonl.gz", b"{}", "damaged or no gzip"),
        ("p.jsonl.gz", gzip.compress(b'{"prompt": "a"}')[:-9], "damaged or no gzip"),
        ("p.jsonl", "{}".encode("utf-16"), "UTF-16"),
        ("p.jsonl", b"\x07\0", "NUL"),
    ],
)
def test_a_binary_file_is_refused_by_name(tmp_path, name, data, reason):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=reason) as error:
        read_prompts(tmp_path / name, skip_bad_lines=True)
    assert name in str(error.value)


def test_a_line_that_is_not_utf8_is_a_bad_line(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_bytes('{"prompt": "a"}\n{"prompt": "é"}'.encode("latin-1"))
    with pytest.raises(ValueError, match="p.jsonl:2: bad line: 'utf-8'"):
        read_prompts(path)
    assert read_prompts(path, skip_bad_lines=True) == [[USER]]


@pytest.mark.parametrize(
    "record, reason",
    [
        ({"prompt": "a", "messages": [USER]}, "prompt beside messages"),
        ({"turns": ["a"], "conversations": []}, "turns beside conversations"),
        ({"messages": [USER], "conversations": [USER]}, "messages beside conversations"),
        ({"prompt": "a", "turns": ["a"]}, "turns beside prompt"),
        ({"prompt": "a", "system": 3}, "system is no text"),
        ({"messages": [{"role": "system", "content": "x"}, USER], "system": "y"}, "something else"),
        ({"messages": [{"role": "developer", "content": "x"}]}, "role 'developer' is not one of"),
        ({"conversations": [{"from": "bing", "value": "x"}]}, "role 'bing' is not one of"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "'image_url'"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "only parts of type text"),
        ({"messages": [USER, {"role": "assistant", "content": None}]}, "without text"),
        ({"messages": [USER, {"role": "assistant", "content": None, "tool_calls": []}]}, "text"),
        ({"messages": [USER, ANSWER | {"tool_calls": {"name": "f"}}]}, "tool_calls is no list"),
        ({"messages": [USER], "tools": {"name": "f"}}, "tools is no list"),
        ({"messages": [USER], "tools": ["f"]}, "tools is no list"),
        ({"conversations": [{"from": "function_call", "value": "f(x)"}]}, "Expecting"),
        ({"messages": [USER], "functions": [{"name": "f"}]}, "functions is not read: .* as tools"),
        ({"prompt": "a", "system_prompt": "s"}, "system_prompt is not read: call it system"),
        (
            {"prompt": "a", "chat_template_kwargs": {"enable_thinking": False}},
            "chat_template_kwargs is not read: --chat-template-args",
        ),
        ({"messages": [USER | {"from": "gpt"}]}, "from and role of a message say different"),
        ({"messages": [USER | {"value": "x"}]}, "value and content of a message say different"),
        (
            {"messages": [USER, ANSWER | {"reasoning_content": "x", "thinking": "y"}]},
            "reasoning_content and thinking of a message say different things",
        ),
        (
            {"messages": [USER, ANSWER | {"thinking": "y", "reasoning": ""}]},
            "thinking and reasoning of a message say different things",
        ),
        ({"messages": [USER, ANSWER | {"reasoning": ["x"]}]}, "reasoning .* is no text"),
        ({"messages": [USER, ANSWER | {"weight": 0.5}]}, "weight 0.5: a turn has 1, or 0"),
        ({"messages": [USER, ANSWER | {"weight": "0"}]}, "weight '0'"),
    ],
)
def test_a_record_that_cannot_mean_one_conversation_is_an_error(tmp_path, record, reason):
    with pytest.raises(ValueError, match=reason):
        conversation_of(tmp_path, record)


@pytest.mark.parametrize(
    "record, expected",
    [
        ({"prompt": "a", "messages": None, "system": None, "tools": None}, [USER]),
        ({"prompt": "a", "system": ""}, [USER]),
        ({"turns": ["a"], "system": "s"}, [{"role": "system", "content": "s"}, USER]),
        (
            {"messages": [{"role": "system", "content": "s"}, USER], "system": "s"},
            [{"role": "system", "content": "s"}, USER],
        ),
        (
            {"messages": [USER | {"content": [{"type": "text", "text": t} for t in "xyz"]}]},
            [USER | {"content": "xyz"}],
        ),
        (
            {"messages": [USER, ANSWER | {"content": None, "tool_calls": [CALL]}]},
            [USER, ANSWER | {"content": "", "tool_calls": [CALL]}],
        ),
        (
            {"messages": [USER, ANSWER | {"reasoning_content": "why", "name": "n"}]},
            [USER, ANSWER | {"reasoning_content": "why", "name": "n"}],
        ),
        ({"messages": [USER | {"from": "human", "value": "a"}], "functions": []}, [USER]),
        (
            {"messages": [USER, ANSWER | {"thinking": "y", "reasoning": "y", "weight": 1}]},
            [USER, ANSWER | {"thinking": "y", "reasoning": "y", "weight": 1}],
        ),
        (
            {"messages": [{"role": "tool", "tool_call_id": "i", "name": "f", "content": ""}]},
            [{"role": "tool", "tool_call_id": "i", "name": "f", "content": ""}],
        ),
        (
            {
                "conversations": [
                    {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
                    {"from": "observation", "value": "r"},
                    {"from": "tool", "value": "r"},
                ]
            },
            [
                {"role": "assistant", "content": "", "tool_calls": [CALL]},
                *[{"role": "tool", "content": "r"}] * 2,
            ],
        ),
    ],
)
def test_what_a_record_says_reaches_the_messages(tmp_path, record, expected):
    assert conversation_of(tmp_path, record) == expected


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS)])
def test_tools_are_read_as_objects_or_as_json_text(tmp_path, tools):
    assert conversation_of(tmp_path, {"messages": [USER], "tools": tools}).tools == TOOLS


def test_a_prompt_is_the_system_text_and_the_first_turn_with_its_tools():
    messages = [{"role": role, "content": role} for role in ("system", "user", "assistant", "user")]
    assert first_turn(messages) == messages[:2]
    assert first_turn(messages[1:]) == messages[1:2]
    assert first_turn(messages).tools is None
    assert first_turn(Conversation(messages, TOOLS)).tools == TOOLS
    with pytest.raises(ValueError, match="no turn of the user"):
        first_turn([messages[0], messages[2]])


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("generation_prompt", [True, False])
def test_chat_text_equals_transformers(tmp_path, chat, generation_prompt):
    transformers = pytest.importorskip("transformers")
    save_tokenizer(tmp_path, "smollm2")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = load_tokenizer(tmp_path)
    text = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=generation_prompt)
    assert ours.chat(chat, generation_prompt) == text
    assert ours.encode(text) == theirs(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(
    "chat, tools",
    [
        (TOOL_CHAT, TOOLS),
        (TOOL_CHAT, None),
        (TOOL_CHAT, []),
        (
            [USER, {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None}],
            None,
        ),
        ([USER, ANSWER | {"thinking": "hm"}], None),
        ([USER, ANSWER | {"reasoning": "hm"}, USER, ANSWER], TOOLS),
        ([USER, {"role": "ipython", "content": [{"type": "text", "text": "x"}]}], None),
    ],
)
def test_a_template_sees_the_messages_and_tools_that_transformers_shows_it(tmp_path, chat, tools):
    transformers = pytest.importorskip("transformers")
    ours = tokenizer_with(tmp_path, MIRROR)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for prompt in (True, False):
        options = {"tools": tools, "add_generation_prompt": prompt, "tokenize": False}
        assert ours.chat(Conversation(chat, tools), prompt) == theirs.apply_chat_template(
            chat, **options
        )


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_a_template_for_tools_is_taken_where_there_are_tools(tmp_path, tools):
    transformers = pytest.importorskip("transformers")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("T{{ tools }}")
    ours = tokenizer_with(tmp_path, MIRROR)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = theirs.apply_chat_template([USER], tools=tools, tokenize=False)
    assert ours.chat(Conversation([USER], tools), False) == text
    assert text.startswith("T") == bool(tools)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="none called default"):
        load_tokenizer(tmp_path)


def test_a_template_in_its_own_file_wins_and_sees_options_and_names(tmp_path):
    save_tokenizer(tmp_path, "qwen")
    (tmp_path / "chat_template.jinja").write_text(
        "{{ bos_token }}{% if enable_thinking is defined and not enable_thinking %}quiet{% endif %}"
        "{% for m in messages %}{% if m.role == 'x' %}{% continue %}{% endif %}"
        "{{ m | tojson }}{% endfor %}"
        "{{ strftime_now('%Y') | length }}"
    )
    chat = [{"role": "x", "content": "no"}, {"role": "user", "content": "é"}]
    text = load_tokenizer(tmp_path).chat(chat, enable_thinking=False)
    assert text == '<|im_start|>quiet{"role": "user", "content": "é"}4'


def test_a_template_that_refuses_is_one_clear_error(tmp_path):
    save_tokenizer(tmp_path, "qwen")
    chat = [{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}]
    with pytest.raises(ValueError, match="no tools"):
        load_tokenizer(tmp_path).chat(chat)


@pytest.mark.parametrize("template", ["{% for %}", "{{ ''.__class__.__mro__ }}", "{{ 1 + 'a' }}"])
def test_a_template_that_is_broken_or_leaves_its_sandbox_is_one_clear_error(tmp_path, template):
    save_tokenizer(tmp_path, "qwen")
    (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(ValueError, match="template"):
        load_tokenizer(tmp_path).chat(CHATS[0])


def test_only_the_assistants_turns_are_supervised(tmp_path):
    save_tokenizer(tmp_path, "smollm2")
    tokenizer = load_tokenizer(tmp_path)
    ids, mask = tokenizer.supervised(CHATS[2])
    assert tokenizer.decode(ids) == tokenizer.chat(CHATS[2], False)
    assert len(ids) == len(mask)
    supervised = tokenizer.decode([i for i, is_supervised in zip(ids, mask) if is_supervised])
    assert supervised == "2<|im_end|>\nfour 世界<|im_end|>\n"
    with pytest.raises(ValueError, match="nothing to supervise"):
        tokenizer.supervised(CHATS[1])


def test_each_assistant_turn_becomes_a_reference(tmp_path, capsys):
    save_tokenizer(tmp_path, "smollm2")
    tokenizer = load_tokenizer(tmp_path)
    references = References.from_conversations([CHATS[1], CHATS[2]], tokenizer, 1000)
    rows = zip(references.tokens, references.prompt_lengths, references.lengths)
    texts = [(tokenizer.decode(ids[:p]), tokenizer.decode(ids[p:end])) for ids, p, end in rows]
    assert [response for _, response in texts] == ["2<|im_end|>", "four 世界<|im_end|>"]
    whole = tokenizer.chat(CHATS[2], False)
    assert all(whole.startswith(prompt + response) for prompt, response in texts)
    count = sum(len(tokenizer.encode(response)) for _, response in texts)
    assert f"{count} supervised tokens in 2 assistant turns" in capsys.readouterr().out
    first = int(references.lengths[0])
    assert len(References.from_conversations([CHATS[2]], tokenizer, first).lengths) == 1
    assert "1 x the turn ends beyond" in capsys.readouterr().out
    for chats, length in (([CHATS[1]], 1000), ([CHATS[2]], 3)):
        with pytest.raises(ValueError, match="nothing to supervise"):
            References.from_conversations(chats, tokenizer, length)


GENERATION = {  # what stands between the user's turn and the assistant's, and around the latter
    "end token inside": "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}",
    "end token outside": "{%- generation -%} {{ m.content }} {%- endgeneration -%}<|im_end|>",
    "block inside a word": "ab{% generation %}{{ m.content }}d{% endgeneration %}e",
    "space before the block": "x {% generation %}{{ m.content }}{% endgeneration %}",
    "variables of the loop": (
        "{% set r = loop.index %}{% generation %}{{ m.content }}{{ r }}{% set r = 7 %}"
        "{% if loop.index == 2 %}second{% endif %}{% endgeneration %}{{ r }}"
    ),
}
GENERATION_CHATS = [
    [USER, ANSWER],
    [USER, {"role": "assistant", "content": "\n  four 世界 e\u0301 👩\u200d💻 "}, USER, ANSWER],
    [USER, ANSWER, ANSWER],
]


@pytest.mark.parametrize("block", GENERATION)
@pytest.mark.parametrize("chat", GENERATION_CHATS)
def test_the_mask_of_a_generation_tag_equals_transformers(tmp_path, block, chat):
    transformers = pytest.importorskip("transformers")
    answer = GENERATION[block]
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
        + answer
        + "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    )
    ours = tokenizer_with(tmp_path, template)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    expected = theirs.apply_chat_template(chat, return_assistant_tokens_mask=True, return_dict=True)
    ids, mask = ours.supervised(chat)
    assert ids == expected["input_ids"]
    assert mask == list(map(bool, expected["assistant_masks"])) and any(mask)
    assert ours.chat(chat, False) == theirs.apply_chat_template(chat, tokenize=False)


def test_generation_blocks_that_hold_nothing_or_forged_marks_are_errors(tmp_path):
    tokenizer = tokenizer_with(
        tmp_path,
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    )
    with pytest.raises(ValueError, match="nothing to supervise"):
        tokenizer.supervised([USER | {"content": ""}])
    with pytest.raises(ValueError, match="marks"):
        tokenizer.supervised([USER | {"content": "a\ufdd0b"}])


def supervised_of(tokenizer, messages: list[dict]) -> tuple[list[str], list[str]]:
    """-> the supervised texts, and the reasons for turns that are not."""
    ids, mask, reasons = tokenizer.turns(messages)
    spans = "".join(tokenizer.decode([i]) if m else "\0" for i, m in zip(ids, mask)).split("\0")
    return [span for span in spans if span], reasons


def tagged(answer: str) -> str:
    """A template that writes so what the assistant says."""
    return (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
        + answer
        + "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


BLOCK = "{% generation %}{{ m.content }}{% endgeneration %}"
THOUGHT = "{% if loop.last %}<think>{{ m.thinking }}</think>{% endif %}"
FOUR = [USER, ANSWER | {"thinking": "hm"}, USER, {"role": "assistant", "content": "c"}]
TAGGED = {  # template, supervised texts of FOUR, and the reasons for the other turns
    "each turn": (tagged(BLOCK + "{# {{ m.thinking }} #}{{ m.thinking and '' }}"), ["b", "c"], []),
    "written differently later": (
        tagged("{% generation %}" + THOUGHT + "{{ m.content }}{% endgeneration %}"),
        [],
        ["writes the turn differently", "text of its own in front"],
    ),
    "the last turn alone has a block": (
        tagged("{% if loop.last %}" + BLOCK + "{% else %}{{ m.thinking }}{% endif %}"),
        ["c"],
        ["writes the turn differently"],
    ),
    "another turn has the block": (
        tagged("{{ m.content }}{{ m.thinking }}").replace(
            "{{ m.content }}{% endif", BLOCK + "{% endif"
        ),
        [],
        ["nothing in the turn that is the assistant's"] * 2,
    ),
    "all turns have one": (
        tagged(BLOCK + "{{ m.thinking }}").replace("{{ m.content }}{% endif", BLOCK + "{% endif"),
        ["b", "c"],
        [],
    ),
    "a turn has two": (
        tagged(BLOCK + "|{% generation %}{{ m.content }}{{ m.thinking }}!{% endgeneration %}"),
        ["b", "bhm!", "c", "c!"],
        [],
    ),
    "the header is in the block": (
        "{% for m in messages %}{% generation %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{{ m.thinking }}<|im_end|>{% endgeneration %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        ["bhm<|im_end|>", "c<|im_end|>"],
        [],
    ),
    "the tag is in a comment": (
        tagged("{# {% generation %} #}{{ m.content }}{{ m.thinking }}"),
        ["bhm<|im_end|>\n", "c<|im_end|>\n"],
        [],
    ),
}


@pytest.mark.parametrize("case", TAGGED)
def test_generation_blocks_are_supervised_in_turns_that_stay_as_they_are(tmp_path, case):
    template, texts, words = TAGGED[case]
    supervised, reasons = supervised_of(tokenizer_with(tmp_path, template), FOUR)
    assert supervised == texts and len(reasons) == len(words)
    assert all(word in reason for word, reason in zip(words, reasons))


def test_a_turn_of_weight_0_is_not_supervised(tmp_path):
    chat = [USER, ANSWER | {"weight": 0}, USER, ANSWER | {"content": "c", "weight": 1}]
    for template in (PLAIN, tagged(BLOCK)):
        supervised, reasons = supervised_of(tokenizer_with(tmp_path, template), chat)
        assert "".join(supervised).startswith("c") and reasons == ["the turn has weight 0"]


THINKS = (
    tagged(  # as Qwen3's: it writes a frame of reasoning even where there is none
        "<think>\n{{ m.thinking }}\n</think>\n\n{{ m.content }}"
        "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}</call>{% endfor %}"
    )
    + "{% if add_generation_prompt and quiet %}<think>\n\n</think>\n\n{% endif %}"
)
CALLS = ANSWER | {"content": "", "tool_calls": [CALL]}
FRAMES = {  # template, its arguments, the answer; the supervised text, None: it is left out
    "no reasoning": (THINKS, "", ANSWER, None),
    "no reasoning, in a block": (
        THINKS.replace("<think>", "{% generation %}<think>", 1).replace(
            "{{ m.content }}", "{{ m.content }}{% endgeneration %}", 1
        ),
        "",
        ANSWER,
        None,
    ),
    "a reasoning": (THINKS, "", ANSWER | {"thinking": "hm"}, "<think>\nhm\n</think>\n\nb"),
    "no reasoning in front of a call": (THINKS, "", CALLS, None),
    "a reasoning in front of a call": (
        THINKS,
        "",
        CALLS | {"reasoning": "hm"},
        "<think>\nhm\n</think>\n\n<call>f</call>",
    ),
    "the frame is in the prompt": (THINKS, '{"quiet": true}', ANSWER, "b"),
    "the frame in front of a call is in the prompt": (
        THINKS,
        '{"quiet": true}',
        CALLS,
        "<call>f</call>",
    ),
    "a call in its frame": (
        tagged("{% if m.tool_calls %}<call>{{ m.tool_calls[0].function.name }}{% endif %}"),
        "",
        CALLS,
        "<call>f",
    ),
    "a word": (tagged("Answer: {{ m.content }}"), "", ANSWER, None),
    "spaces": (tagged(" \n{{ m.content | trim }}"), "", ANSWER | {"content": " b "}, " \nb"),
    "a reasoning within the text": (
        THINKS.replace("<think>\n{{ m.thinking }}\n</think>\n\n", "", 1),
        "",
        ANSWER | {"content": "<think>hm</think>b"},
        "<think>hm</think>b",
    ),
}


@pytest.mark.parametrize("case", FRAMES)
def test_a_turn_that_begins_with_text_of_the_template_is_left_out(tmp_path, case):
    template, args, answer, text = FRAMES[case]
    supervised, reasons = supervised_of(tokenizer_with(tmp_path, template, args), [USER, answer])
    if text is None:
        assert not supervised
        assert reasons == ["the chat template writes text of its own in front of the answer"]
    else:
        assert supervised == [text + "<|im_end|>\n"] and not reasons


@pytest.mark.parametrize(
    "name, hint", [("enable_thinking", r" \(--chat-template-args '.*false}'\)"), ("quiet", "")]
)
def test_text_in_front_of_an_answer_comes_with_the_variable_that_helps(tmp_path, name, hint):
    tokenizer = tokenizer_with(tmp_path, THINKS.replace("quiet", name))
    with pytest.raises(ValueError, match=f"2 x .* in front of the answer{hint}$"):
        References.from_conversations([[USER, ANSWER]] * 2, tokenizer, 500)


def test_an_empty_template_is_an_error(tmp_path):
    for text in ("", " \n"):
        with pytest.raises(ValueError, match="the chat template default is empty: fill or remove"):
            tokenizer_with(tmp_path, text)


@pytest.mark.parametrize(
    "text, reason",
    [
        ("{", "no JSON object such as"),
        ("[1]", "no JSON object such as"),
        ('"x"', "no JSON object such as"),
        ('{"messages": []}', "messages comes from the prompts"),
        ('{"add_generation_prompt": true}', "cannot be set"),
        ('{"tools": []}', "tools comes from the prompts"),
        (
            '{"enable_thinkin": false}',
            "no variable enable_thinkin; did you mean enable_thinking\\?$",
        ),
        ('{"tokenize": false}', "its variables are enable_thinking, style$"),
        ('{"message": 1}', "no variable message"),
    ],
)
def test_template_args_that_would_be_passed_over_are_an_error(tmp_path, text, reason):
    template = MIRROR + "{{ enable_thinking }}{% set style = style | default('x') %}"
    with pytest.raises(ValueError, match=reason):
        tokenizer_with(tmp_path, template, text)


def test_template_args_may_be_variables_of_the_template_for_tools_alone(tmp_path):
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates/tool_use.jinja").write_text("{{ lang }}{{ tools }}")
    tokenizer = tokenizer_with(tmp_path, PLAIN, '{"lang": "fr"}')
    assert tokenizer.chat(Conversation([USER], TOOLS)).startswith("fr")
    with pytest.raises(ValueError, match="no variable style; its variables are lang$"):
        load_tokenizer(tmp_path, '{"style": "x"}')
    (tmp_path / "additional_chat_templates/tool_use.jinja").unlink()
    with pytest.raises(ValueError, match="no variable style; it has no variables$"):
        load_tokenizer(tmp_path, '{"style": "x"}')


def test_template_args_without_a_template_or_with_a_broken_one_are_an_error(tmp_path):
    with pytest.raises(ValueError, match="broken"):
        tokenizer_with(tmp_path, "{% for %}", '{"x": 1}')
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(ValueError, match="there is no chat template"):
        load_tokenizer(tmp_path, '{"x": 1}')


def test_template_args_are_seen_at_each_render_and_options_win(tmp_path):
    template = "{% if style is defined %}{{ style }}{% endif %}" + PLAIN
    tokenizer = tokenizer_with(tmp_path, template, '{"style": "terse"}')
    assert tokenizer.template_args == {"style": "terse"}
    assert tokenizer.chat([USER]).startswith("terse")
    assert tokenizer.chat([USER], style="long").startswith("long")
    ids, _ = tokenizer.supervised([USER, ANSWER])
    assert tokenizer.decode(ids).startswith("terse")
    assert not load_tokenizer(tmp_path).chat([USER]).startswith("terse")


def test_hashes_tell_templates_and_tokenizers_apart(tmp_path):
    first = tokenizer_with(tmp_path, MIRROR)
    assert first.template_hash == tokenizer_with(tmp_path, MIRROR).template_hash
    second = tokenizer_with(tmp_path, MIRROR + " ")
    assert first.template_hash != second.template_hash and len(first.template_hash) == 16
    assert first.tokenizer_hash == second.tokenizer_hash and len(first.tokenizer_hash) == 16
    path = tmp_path / "tokenizer.json"
    path.write_text(path.read_text() + " ")
    assert load_tokenizer(tmp_path).tokenizer_hash != first.tokenizer_hash
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").unlink()
    assert load_tokenizer(tmp_path).template_hash == ""


def test_the_assistants_turn_is_supervised_with_its_reasoning_and_calls(tmp_path):
    tokenizer = tokenizer_with(tmp_path, MIRROR)
    chat = Conversation(TOOL_CHAT, TOOLS)
    ids, mask, reasons = tokenizer.turns(chat)
    supervised = tokenizer.decode([i for i, is_supervised in zip(ids, mask) if is_supervised])
    assert reasons == [] and tokenizer.decode(ids) == tokenizer.chat(chat, False)
    assert "Weather: call it." in supervised and "Both known." in supervised
    assert supervised.count("arguments") == 4 and '"rain"' not in supervised


LEFT_OUT = {  # template, conversation, limit of tokens; the reason and what helps
    "too long": (PLAIN, [USER, ANSWER], 5, "the turn ends beyond 5 tokens", "--response-length"),
    "no answer": (MIRROR, [USER], 500, "no assistant turn", "lab references"),
    "an answer first": (MIRROR, [ANSWER, USER], 500, "nothing stands before", ""),
    "template refuses": (
        "{{ raise_exception('no way') }}",
        [USER, ANSWER],
        500,
        "the chat template refuses: no way",
        "--chat-template-args",
    ),
    "rewritten": (
        "{% for m in messages %}{% if loop.last or m.role == 'user' %}{{ m.content }}{% endif %}!"
        "{% endfor %}",
        [USER, ANSWER, USER],
        500,
        "the chat template writes the turn differently",
        "a record of its own",
    ),
    "template broken": (
        "{% for m in messages %}",
        [USER, ANSWER],
        500,
        "the chat template is broken: Unexpected end",
        "",
    ),
    "weight 0": (PLAIN, [USER, ANSWER | {"weight": 0}], 500, "the turn has weight 0", ""),
    "nothing of the answer": (
        "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
        [USER, ANSWER],
        500,
        "nothing in the turn that is the assistant's",
        "",
    ),
    "another header": (
        MIRROR.replace("assistant\n", "assistant\n<think>"),
        [USER, ANSWER],
        500,
        "does not begin as the chat template prompts",
        "--chat-template-args",
    ),
    "one token": (
        "{% for m in messages %}{{ m.content }}{% endfor %}",
        [USER, ANSWER],
        500,
        "fewer than two tokens",
        "",
    ),
    "tools that are not shown": (
        "{% for m in messages %}{{ m.content }}{% endfor %}",
        Conversation([USER, ANSWER], TOOLS),
        500,
        "no place for tools",
        "--target",
    ),
    "calls that are not shown": (
        "{% for m in messages %}{{ m.content }}{% endfor %}",
        [USER, ANSWER | {"tool_calls": [CALL]}],
        500,
        "no place for tool_calls",
        "--target",
    ),
    "reasoning that is not shown": (
        "{% for m in messages %}{{ m.content }}{% endfor %}",
        [USER, ANSWER | {"reasoning": "hm"}],
        500,
        "no place for reasoning",
        "--target",
    ),
}


@pytest.mark.parametrize("case", LEFT_OUT)
def test_what_is_left_out_is_counted_by_reason_with_what_helps(tmp_path, case):
    template, chat, length, reason, hint = LEFT_OUT[case]
    tokenizer = tokenizer_with(tmp_path, template)
    with pytest.raises(ValueError, match="nothing to supervise: 2 x ") as error:
        References.from_conversations([chat, chat], tokenizer, length)
    assert reason in str(error.value) and hint in str(error.value)
    assert "\n" not in str(error.value)
    assert bool(hint) == str(error.value).endswith(")")


def test_the_share_of_supervised_tokens_is_said(tmp_path, capsys):
    tokenizer = tokenizer_with(tmp_path, PLAIN)
    chats = [[USER, ANSWER], [USER], [USER], [ANSWER, USER]]
    references = References.from_conversations(chats, tokenizer, 500)
    response = int((references.lengths - references.prompt_lengths).sum())
    total = sum(len(tokenizer.encode(tokenizer.chat(chat, False))) for chat in chats)
    printed = capsys.readouterr().out
    assert "left out: 2 x no assistant turn, 1 x nothing stands before" in printed
    assert f"1 assistant turns, {response / total:.1%} of all {total:,}" in printed
