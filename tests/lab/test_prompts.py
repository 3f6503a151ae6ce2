"""Prompts of tasks and of the target's own asking. `pytest tests/lab/test_prompts.py`"""

import json
import shutil
from types import SimpleNamespace

import pytest

from hf import load_tokenizer
from hf.chat import Conversation, read_prompts
from lab import prompts
from lab.prompts import FEWEST_LETTERS, MARK, opening, split_task
from small import ROOT

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def chat_folder(folders, tmp_path):
    """The target with a chat template."""
    folder = tmp_path / "target"
    shutil.copytree(folders / "target", folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def write_task(path, texts) -> str:
    path.write_text("".join(json.dumps({"turns": [text, "and?"]}) + "\n" for text in texts))
    return str(path)


def config_for(folder, tmp_path, **changes) -> prompts.Config:
    return prompts.Config(target=str(folder), out=str(tmp_path / "out"), **changes)


def texts_in(path) -> list[str]:
    return [messages[-1]["content"] for messages in read_prompts(path)]


def test_a_fifth_of_each_task_is_never_among_those_to_train_on(folders, tmp_path):
    """Shown on token ids; the tasks share prompts, and one holds some twice."""
    tokenizer = load_tokenizer(folders / "target")
    tasks = {"a": [f"a{i % 13}" for i in range(26)], "b": [f"a{i}" for i in range(5, 25)]}
    files = tuple(write_task(tmp_path / f"{name}.jsonl", texts) for name, texts in tasks.items())
    figures = prompts.run(config_for(folders / "target", tmp_path, tasks=files, answers=3))
    assert figures["held_out"] == {"a": 3, "b": 4}
    trained = texts_in(tmp_path / "out/prompts.jsonl")
    assert all(
        trained.count(text) == 6 if text in tasks["a"] and text in tasks["b"] else 3
        for text in trained
    )
    held_out = [
        text for name in tasks for text in texts_in(tmp_path / f"out/held-out/{name}.jsonl")
    ]
    ids_of = {
        name: {tuple(tokenizer.encode(t)) for t in texts}
        for name, texts in (("trained", trained), ("held out", held_out))
    }
    assert not ids_of["trained"] & ids_of["held out"]
    both = set(tasks["a"]) | set(tasks["b"])
    assert set(trained) | set(held_out) == both


def test_the_real_tasks_share_no_prompt_with_what_is_held_out(folders, tmp_path):
    eval_folder = ROOT.parent / "shared/eval"
    files = tuple(map(str, sorted(eval_folder.glob("*.jsonl"))))
    if not files:
        pytest.skip("shared/eval is not here")
    prompts.run(config_for(folders / "target", tmp_path, tasks=files))
    tokenizer = load_tokenizer(folders / "target")
    trained = {tuple(tokenizer.encode(t)) for t in texts_in(tmp_path / "out/prompts.jsonl")}
    for path in (tmp_path / "out/held-out").iterdir():
        held_out = {tuple(tokenizer.encode(text)) for text in texts_in(path)}
        assert held_out and not held_out & trained


def test_tools_stay_with_their_prompt():
    tools = [{"type": "function", "function": {"name": "f"}}]
    lines = [{"messages": [{"role": "user", "content": str(i)}], "tools": tools} for i in range(5)]
    conversations = [Conversation(line["messages"], line["tools"]) for line in lines]
    train, held_out = split_task(conversations)
    assert [json.loads(line)["tools"] for line in train + held_out] == [tools] * 5


def test_a_question_begins_where_the_template_begins_a_users_turn(chat_folder):
    tokenizer = load_tokenizer(chat_folder)
    assert tokenizer.decode(opening(tokenizer)) == "<user>"
    assert MARK not in tokenizer.decode(opening(tokenizer))


def test_questions_are_whole_clean_and_asked_once(chat_folder, tmp_path, monkeypatch, lab):
    stop = load_tokenizer(chat_folder).stop_ids[0]
    tokenizer = load_tokenizer(chat_folder)
    good = "what is the answer to it?"
    asked = [good, good, "held-out question?", "?" * 40, "x" * (FEWEST_LETTERS - 1), "ab" * 40]
    answers = [[*tokenizer.encode(text), stop] for text in asked]
    answers.append(tokenizer.encode("this one is broken off"))
    answers.append([*tokenizer.encode("a special token is in it"), stop, stop])

    def generate(*_, prompt_ids, **__):
        return [SimpleNamespace(tokens=answers[i]) for i in prompt_ids]

    monkeypatch.setattr(prompts, "generate", generate)
    task = write_task(tmp_path / "t.jsonl", ["held-out question?", "b", "c", "d", "e"])
    config = config_for(chat_folder, tmp_path, questions=len(answers), tasks=(task,), part=3)
    assert prompts.run(config)["questions"] == 1
    assert texts_in(tmp_path / "out/prompts.jsonl") == ["b", "c", "d", "e", good]


@pytest.mark.parametrize(
    "flags, words",
    [
        ((), "give --tasks, --questions or both"),
        (("--questions", 3), "--questions: the target has no chat template"),
        (("--answers", 3, "--questions", 3), "--answers means nothing here: it needs --tasks"),
        (("--tasks", "FEW"), "few.jsonl has 4 prompts: 5 are needed"),
        (("--tasks", "FEW", "FEW"), "two files are called few"),
    ],
)
def test_mistakes_end_in_one_line(lab, folders, tmp_path, flags, words):
    few = write_task(tmp_path / "few.jsonl", "abcd" if flags.count("FEW") == 1 else "abcdef")
    flags = [few if flag == "FEW" else flag for flag in flags]
    code, _, error = lab(
        "prompts", "--target", folders / "target", "--out", tmp_path / "out", *flags
    )
    assert code == 2 and words in error and error.count("\n") == 1


def test_the_target_asks_and_goes_on_where_it_was_stopped(lab, chat_folder, tmp_path):
    flags = ("--questions", 6, "--question-length", 16, "--part", 3)
    for _ in range(2):
        where = ("--target", chat_folder, "--out", tmp_path / "out")
        code, said, error = lab("prompts", *where, *flags)
        assert code == 0, error
    assert len(list((tmp_path / "out/questions").glob("0*.json"))) == 2
    assert json.loads((tmp_path / "out/summary.json").read_text())["prompts"]["questions"] >= 0
