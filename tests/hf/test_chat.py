"""Prompts read from files; chat text equal to transformers'."""

import json

import pytest

from hf import load_tokenizer
from hf.chat import first_turn, read_prompts
from support.data import References
from their_tokenizers import CHATS, save_tokenizer


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


def test_a_prompt_is_the_system_text_and_the_first_turn():
    messages = [{"role": role, "content": role} for role in ("system", "user", "assistant", "user")]
    assert first_turn(messages) == messages[:2]
    assert first_turn(messages[1:]) == messages[1:2]


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
    assert "1 turns that end beyond" in capsys.readouterr().out
    for chats, length in (([CHATS[1]], 1000), ([CHATS[2]], 3)):
        with pytest.raises(ValueError, match="nothing to supervise"):
            References.from_conversations(chats, tokenizer, length)
