"""Prompts of tasks and of the target's own asking. `pytest tests/lab/test_prompts.py`"""

import json
import shutil
from types import SimpleNamespace

import pytest

from hf import load_tokenizer
from hf.chat import Conversation, read_prompts
from lab import prompts
from lab.prompts import FEWEST_LETTERS, is_held_out, opening, split_task
from small import ROOT
from support.toy import SPECIAL

END = next(iter(SPECIAL))
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}" + END + "{% endfor %}<assistant>"
WORDS = [f"this is question {number}" for number in range(40)]
HELD_OUT = [words for words in WORDS if is_held_out(words)]


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


def config_for(tmp_path, **changes) -> prompts.Config:
    return prompts.Config(out=str(tmp_path / "out"), **changes)


def texts_in(path) -> list[str]:
    return [messages[-1]["content"] for messages in read_prompts(path)]


def test_prompts_held_out_are_never_among_those_to_train_on(folders, tmp_path):
    """Shown on token ids. The tasks share prompts, hold some twice, and spell records in two ways;
    a system's turn or a blank at the end make no other prompt."""
    tokenizer = load_tokenizer(folders / "target")
    one = write_task(tmp_path / "one.jsonl", WORDS[:25] + WORDS[:5])
    turns = [[{"content": f"{words} \n", "role": "user"}] for words in WORDS[10:]]
    records = [{"messages": [{"role": "system", "content": "be brief"}, *turn]} for turn in turns]
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps(record) + "\n" for record in records))
    figures = prompts.run(config_for(tmp_path, tasks=(one, str(other))))
    trained = texts_in(tmp_path / "out/prompts.jsonl")
    held_out = {
        name: texts_in(tmp_path / f"out/held-out/{name}.jsonl") for name in ("one", "other")
    }
    assert figures["held_out"] == {name: len(texts) for name, texts in held_out.items()}
    ids_of = {text.strip(): tuple(tokenizer.encode(text.strip())) for text in trained}
    for texts in held_out.values():
        assert texts and not {tuple(tokenizer.encode(t.strip())) for t in texts} & {
            *ids_of.values()
        }
    assert sorted(ids_of) == sorted(set(WORDS) - set(HELD_OUT)) and len(trained) == len(ids_of)


def test_no_prompt_of_the_papers_tasks_is_on_both_sides(folders, tmp_path):
    files = tuple(map(str, sorted((ROOT.parent / "shared/eval").glob("*.jsonl"))))
    if not files:
        pytest.skip("shared/eval is not here")
    prompts.run(config_for(tmp_path, tasks=files))
    tokenizer = load_tokenizer(folders / "target")
    trained = {tuple(tokenizer.encode(t)) for t in texts_in(tmp_path / "out/prompts.jsonl")}
    count = 0
    for path in (tmp_path / "out/held-out").iterdir():
        held_out = {tuple(tokenizer.encode(text)) for text in texts_in(path)}
        assert held_out and not held_out & trained
        count += len(held_out)
    assert 0.15 < count / (count + len(trained)) < 0.25


def test_what_is_held_out_stays_so_when_a_task_grows():
    def held_out(texts):
        return split_task([[{"role": "user", "content": text}] for text in texts])[1]

    assert held_out(["a new first line", *WORDS]).keys() >= held_out(WORDS).keys() == {*HELD_OUT}


def test_tools_stay_with_their_prompt():
    tools = [{"type": "function", "function": {"name": "f"}}]
    turns = [Conversation([{"role": "user", "content": words}], tools) for words in WORDS]
    for part in split_task(turns):
        assert all(json.loads(line)["tools"] == tools for line in part.values())


def test_a_question_begins_where_the_template_begins_a_users_turn(chat_folder):
    tokenizer = load_tokenizer(chat_folder)
    assert tokenizer.decode(opening(tokenizer)) == "<user>"
    for template, words in (
        ("hello" + END, "does not show a user's words"),
        (TEMPLATE.replace(END, "\n"), "no stop token follows a user's words"),
    ):
        (chat_folder / "chat_template.jinja").write_text(template)
        with pytest.raises(ValueError, match=words):
            opening(load_tokenizer(chat_folder))


def test_questions_are_whole_and_asked_once_and_the_rest_is_counted(
    chat_folder, tmp_path, monkeypatch, capsys
):
    tokenizer = load_tokenizer(chat_folder)
    stop = tokenizer.stop_ids[0]
    good = "what is the answer to it?"
    texts = [good, good, f" {HELD_OUT[0]}", "?" * 20, "x" * (FEWEST_LETTERS - 1), "abc" * 40]
    answers = [[*tokenizer.encode(text), stop] for text in texts]
    answers.append(tokenizer.encode("this one is broken off"))
    answers.append([*tokenizer.encode("a special token is in it"), stop, stop])

    def generate(*_, prompt_ids, **__):
        return [SimpleNamespace(tokens=answers[i]) for i in prompt_ids]

    monkeypatch.setattr(prompts, "generate", generate)
    task = write_task(tmp_path / "t.jsonl", WORDS)
    flags = dict(target=str(chat_folder), questions=len(answers), tasks=(task,), part=3)
    assert prompts.run(config_for(tmp_path, **flags))["questions"] == 1
    trained = texts_in(tmp_path / "out/prompts.jsonl")
    assert trained[-1] == good and HELD_OUT[0] not in [text.strip() for text in trained]
    said = capsys.readouterr().out
    for reason in ("2 too short", "1 too long", "1 not text", "1 repeats itself", "1 asked before"):
        assert reason in said


def test_parts_are_not_asked_again(chat_folder, tmp_path, monkeypatch):
    asked, generate = [], prompts.generate

    def counted(target, drafter, texts, *how, **options):
        asked.append(len(texts))
        return generate(target, drafter, texts, *how, **options)

    monkeypatch.setattr(prompts, "generate", counted)
    flags = dict(target=str(chat_folder), questions=6, question_length=16, part=4)
    prompts.run(config_for(tmp_path, **flags))
    first = (tmp_path / "out/prompts.jsonl").read_text()
    (tmp_path / "out/questions/000001.json").unlink()  # as if it had been stopped
    prompts.run(config_for(tmp_path, **flags))
    assert asked == [4, 2, 2] and (tmp_path / "out/prompts.jsonl").read_text() == first


@pytest.mark.parametrize(
    "flags, words",
    [
        ((), "give --tasks, --questions or both"),
        (("--questions", 3), "--questions: the target has no chat template"),
        (("--tasks", "few", "--seed", 3), "--seed means nothing here: it needs --questions"),
        (("--tasks", "few"), "few.jsonl: 2 prompts are too few to hold one in 5 out"),
        (("--tasks", "all", "all"), "two files are called all"),
        (("--tasks", "all"), "held-out has other tasks, too (old): choose another --out"),
    ],
)
def test_mistakes_end_in_one_line(lab, folders, tmp_path, flags, words):
    if "other tasks" in words:
        (tmp_path / "out/held-out").mkdir(parents=True)
        (tmp_path / "out/held-out/old.jsonl").touch()
    files = {"few": write_task(tmp_path / "few.jsonl", "ab")}
    files["all"] = write_task(tmp_path / "all.jsonl", WORDS)
    target = () if flags[:1] == ("--tasks",) else ("--target", folders / "target")
    flags = [files.get(flag, flag) for flag in flags]
    code, _, error = lab("prompts", *target, "--out", tmp_path / "out", *flags)
    assert code == 2 and words in error and error.count("\n") == 1
