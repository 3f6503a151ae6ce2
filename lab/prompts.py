"""Prompts to train on and to measure on: from tasks, and questions that the target asks itself.

A fifth of each task is held out for good. Of the rest each prompt is written --answers times: the
target will answer it as often, each time anew. A chat model also asks questions by itself: it goes
on from where its template begins a user's turn. A held-out prompt is never among those to train
on, not even where a task holds it twice or the model asks the same.

--out gets prompts.jsonl, and a file for each task in held-out:

    python -m lab prompts --target FOLDER --tasks math.jsonl code.jsonl --questions 5000
    python -m lab references --target FOLDER --corpus runs/prompts/prompts.jsonl ...
    python train.py ... --eval-prompts runs/prompts/held-out/*.jsonl
    pytest tests/lab/test_prompts.py
"""

import json
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from drafter import PLAIN
from hf import load_tokenizer
from hf.chat import first_turn, read_prompts, tools_of
from hf.tokenizer import Tokenizer
from lab.common import LabConfig, open_target, require
from serve import generate
from support.files import atomic_write, locked
from support.fingerprint import weights_fingerprint
from support.flags import TEMPLATE_ARGS, flag
from support.measure import loop_start
from support.references import write_in_parts

HELD_OUT_SHARE = 5  # one prompt in so many
MARK = "\ue000"  # stands for a user's words in a template; no text holds it
FEWEST_LETTERS = 12  # of a question


@dataclass(frozen=True)
class Config(LabConfig):
    target: str = flag("", "the target's folder; without --questions its tokenizer is enough")
    out: str = flag("runs/prompts", "folder: prompts.jsonl, and held-out with a file for each task")
    tasks: tuple = flag((), "JSON Lines files of prompts, a task each")
    answers: int = flag(1, "how often each of the tasks' prompts is written", low=1)
    questions: int = flag(0, "how many the target asks by itself, fewer once cleaned", low=0)
    question_length: int = flag(128, "tokens of a question; longer ones are left out", low=8)
    chat_template_args: str = flag("", TEMPLATE_ARGS)
    part: int = flag(256, "questions per part, which is kept once it is whole", low=1)
    batch_size: int = flag(64, "questions asked at once", low=1)

    NEEDS = (
        ("answers", "--tasks", lambda c: c.tasks),
        ("question_length part batch_size device dtype", "--questions", lambda c: c.questions),
    )


def record(messages: list[dict]) -> str:
    """A conversation up to its first user turn, as a line of JSON."""
    messages = first_turn(messages)
    tools = tools_of(messages)
    values = {"messages": [*messages]} | ({"tools": tools} if tools else {})
    return json.dumps(values, ensure_ascii=False)


def split_task(conversations: list) -> tuple[list[str], list[str]]:
    """The records of prompts to train on, and of every fifth, which is held out. One that is there
    twice counts once."""
    turns = list(dict.fromkeys(map(record, conversations)))
    if len(turns) < HELD_OUT_SHARE:
        raise ValueError(f"has {len(turns)} prompts: {HELD_OUT_SHARE} are needed to hold one out")
    held_out = turns[::HELD_OUT_SHARE]
    return [turn for turn in turns if turn not in held_out], held_out


def opening(tokenizer: Tokenizer) -> list[int]:
    """The ids after which a user's words stand in the chat template."""
    if not tokenizer.template:
        raise ValueError("--questions: the target has no chat template")
    text = tokenizer.chat([{"role": "user", "content": MARK}])
    if MARK not in text:
        raise ValueError("--questions: the chat template does not show a user's words")
    return tokenizer.encode(text[: text.index(MARK)])


def ask(config: Config, tokenizer: Tokenizer, out: Path) -> list[str]:
    """Let the target begin conversations -> what it asked, without what is broken off, empty, in a
    loop or there twice."""
    target = open_target(config)
    begin = opening(tokenizer)
    made_with = {"target": weights_fingerprint(target), "seed": config.seed, "opening": begin}
    made_with |= {"questions": config.questions, "length": config.question_length}

    def write(prompts, prompt_ids):
        how = (config.question_length, PLAIN, config.seed, tokenizer.stop_ids)
        options = {"batch_size": config.batch_size, "prompt_ids": prompt_ids, "progress": "part"}
        return [r.tokens for r in generate(target, None, prompts, *how, **options)]

    prompts = [begin] * config.questions
    how = (write, config.part, config.question_length)
    asked = write_in_parts(out / "questions", made_with, prompts, *how, alone=True)
    ended = [ids[:-1] for ids in asked if ids[-1] in tokenizer.stop_ids and loop_start(ids) is None]
    known = tokenizer.text_ids
    texts = [tokenizer.decode(ids).strip() for ids in ended if known.issuperset(ids)]
    return [
        text
        for text in dict.fromkeys(texts)
        if sum(map(str.isalpha, text)) >= FEWEST_LETTERS and "\ufffd" not in text
    ]


def write_lines(path: Path, lines: list[str]) -> None:
    with atomic_write(path) as temporary:
        temporary.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def run(config: Config) -> dict:
    require(config, "target")
    if not (config.tasks or config.questions):
        raise ValueError("give --tasks, --questions or both")
    with locked(config.out):
        return make_prompts(config, Path(config.out))


def make_prompts(config: Config, out: Path) -> dict:
    """Write the files -> how many prompts each has."""
    tokenizer = load_tokenizer(config.target, config.chat_template_args)
    to_train, held_out = [], {}
    for path in config.tasks:
        name = Path(path).stem
        if name in held_out:
            raise ValueError(f"--tasks: two files are called {name}")
        try:
            own, held_out[name] = split_task(read_prompts(path))
        except ValueError as error:
            raise ValueError(f"{path} {error}") from None
        to_train += own
    never = set(chain(*held_out.values()))
    to_train = [line for line in to_train if line not in never] * config.answers
    texts = ask(config, tokenizer, out) if config.questions else []
    questions = [record([{"role": "user", "content": text}]) for text in texts]
    questions = [line for line in questions if line not in never]
    for name, lines in held_out.items():
        write_lines(out / "held-out" / f"{name}.jsonl", lines)
    write_lines(out / "prompts.jsonl", to_train + questions)
    counts = {name: len(lines) for name, lines in held_out.items()}
    figures = {"of_tasks": len(to_train), "questions": len(questions), "held_out": counts}
    print(json.dumps(figures))
    return figures
