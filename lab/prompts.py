"""Prompts to train on and to measure on: those of tasks, and questions that the target asks itself.

About a fifth of each task is held out for good: which prompts these are depends on their words
alone. With --questions a chat model also asks by itself: it goes on after what its template writes
before a user's words. No question has the words of a prompt that is held out.

--out gets prompts.jsonl, and in held-out a file for each task:

    python -m lab prompts --target FOLDER --tasks math.jsonl code.jsonl --questions 5000
    python -m lab references --target FOLDER --corpus runs/prompts/prompts.jsonl ...
    python train.py ... --eval-prompts runs/prompts/held-out/*.jsonl
    pytest tests/lab/test_prompts.py
"""

import json
import zlib
from collections import Counter
from dataclasses import dataclass
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

ONE_IN = 5  # of so many prompts of a task about one is held out
MARK = "\ufdd0"  # stands for a user's words in a template; it is no character of any text
FEWEST_LETTERS = 12  # of a question


@dataclass(frozen=True)
class Config(LabConfig):
    target: str = flag("", "the target's folder, for --questions")
    out: str = flag("runs/prompts", "folder: prompts.jsonl, and held-out with a file for each task")
    tasks: tuple = flag((), "JSON Lines files of prompts, a task each")
    skip_bad_lines: bool = flag(False, "leave malformed JSONL lines out instead of stopping")
    questions: int = flag(0, "how many the target asks; what is no whole question goes", low=0)
    question_length: int = flag(128, "tokens of a question; longer ones are left out", low=8)
    chat_template_args: str = flag("", TEMPLATE_ARGS)
    part: int = flag(256, "questions per part, which is kept once it is whole", low=1)
    batch_size: int = flag(64, "questions asked at once, at most --part", low=1)

    NEEDS = (
        ("skip_bad_lines", "--tasks", lambda c: c.tasks),
        (
            "target seed chat_template_args question_length part batch_size device dtype",
            "--questions",
            lambda c: c.questions,
        ),
    )

    def __post_init__(self):
        if not (self.tasks or self.questions):
            raise ValueError("give --tasks, --questions or both")


def words_of(messages: list[dict]) -> str:
    """What the user says: by it one prompt is told from another."""
    return messages[-1]["content"].strip()


def is_held_out(words: str) -> bool:
    return zlib.crc32(words.encode()) % ONE_IN == 0


def line_of(messages: list[dict]) -> str:
    tools = tools_of(messages)
    values = {"messages": [*messages]} | ({"tools": tools} if tools else {})
    return json.dumps(values, ensure_ascii=False)


def split_task(conversations: list) -> tuple[dict, dict]:
    """The first turns to train on and those held out: {words: line}, each once."""
    turns = {words_of(turn): turn for turn in map(first_turn, conversations)}
    train = {words: line_of(turn) for words, turn in turns.items() if not is_held_out(words)}
    held_out = {words: line_of(turn) for words, turn in turns.items() if is_held_out(words)}
    if not (train and held_out):
        raise ValueError(f"{len(turns)} prompts are too few to hold one in {ONE_IN} out")
    return train, held_out


def opening(tokenizer: Tokenizer) -> list[int]:
    """The ids after which a user's words stand in the chat template."""
    if not tokenizer.template:
        raise ValueError("--questions: the target has no chat template")
    text = tokenizer.chat([{"role": "user", "content": MARK}])
    if MARK not in text:
        raise ValueError("--questions: the chat template does not show a user's words")
    before, after = text.split(MARK, 1)
    if not {*tokenizer.encode(after)[:1]} & {*tokenizer.stop_ids}:
        raise ValueError("--questions: no stop token follows a user's words in the chat template")
    return tokenizer.encode(before)


def ask(config: Config, out: Path) -> list[str]:
    """Let the target begin conversations -> the questions that it asked as a user."""
    tokenizer = load_tokenizer(config.target, config.chat_template_args)
    begin = opening(tokenizer)
    target = open_target(config)
    made_with = {"target": weights_fingerprint(target), "seed": config.seed, "opening": begin}
    made_with |= {"questions": config.questions, "length": config.question_length}

    def write(prompts, prompt_ids):
        how = (config.question_length, PLAIN, config.seed, tokenizer.stop_ids)
        options = {"batch_size": config.batch_size, "prompt_ids": prompt_ids, "progress": "part"}
        return [r.tokens for r in generate(target, None, prompts, *how, **options)]

    prompts = [begin] * config.questions
    how = (write, config.part, config.question_length)
    asked = write_in_parts(out / "questions", made_with, prompts, *how, alone=True)
    return clean(asked, tokenizer)


def clean(asked: list[list[int]], tokenizer: Tokenizer) -> list[str]:
    """The texts of what was asked. What is no question is left out, and counted by reason."""
    known = tokenizer.text_ids
    left_out = Counter()
    texts = {}
    for ids in asked:
        text = tokenizer.decode(ids[:-1]).strip()
        if ids[-1] not in tokenizer.stop_ids:
            left_out["too long"] += 1
        elif not known.issuperset(ids[:-1]) or "\ufffd" in text:
            left_out["not text"] += 1
        elif loop_start(ids) is not None:
            left_out["repeats itself"] += 1
        elif sum(map(str.isalpha, text)) < FEWEST_LETTERS:
            left_out["too short"] += 1
        elif text in texts:
            left_out["asked before"] += 1
        else:
            texts[text] = None
    if left_out:
        reasons = ", ".join(f"{count} {reason}" for reason, count in left_out.most_common())
        print(f"questions left out: {reasons}")
    return list(texts)


def read_all(config: Config) -> tuple[dict, dict]:
    """{words: line} of all tasks to train on, and {task: {words: line}} held out."""
    train, held_out = {}, {}
    for path in config.tasks:
        name = Path(path).stem
        if name in held_out:
            raise ValueError(f"--tasks: two files are called {name}")
        conversations = read_prompts(path, config.skip_bad_lines)
        try:
            own, held_out[name] = split_task(conversations)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        train |= own
    return train, held_out


def run(config: Config) -> dict:
    if config.questions:
        require(config, "target")
    train, held_out = read_all(config)
    out = Path(config.out)
    others = {path.stem for path in (out / "held-out").glob("*.jsonl")} - held_out.keys()
    if others:
        raise ValueError(
            f"{out}/held-out has other tasks, too ({min(others)}): choose another --out"
        )
    with locked(out):
        texts = ask(config, out) if config.questions else []
        taken = set(train).union(*held_out.values())
        turns = {text: [{"role": "user", "content": text}] for text in texts if text not in taken}
        train_lines = [*train.values(), *map(line_of, turns.values())]
        for name, lines in held_out.items():
            write_lines(out / "held-out" / f"{name}.jsonl", lines.values())
        write_lines(out / "prompts.jsonl", train_lines)
    figures = {"of_tasks": len(train), "questions": len(turns)}
    figures["held_out"] = {name: len(lines) for name, lines in held_out.items()}
    print(json.dumps(figures))
    return figures


def write_lines(path: Path, lines) -> None:
    with atomic_write(path) as temporary:
        temporary.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
