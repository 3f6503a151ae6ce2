"""A conversation that one can watch: lines go in, answers stream out as they are committed.

1. Each line is a turn of the user, which the chat template renders with all turns before it; or,
   where there is no template, it is more text to be continued.
2. Each round commits a few tokens. Their bytes may end in the middle of a character: it is printed
   once it is whole, so nothing that was printed ever changes.
3. Lines that begin with a slash are commands. Ctrl-C ends an answer after the round that runs; what
   was committed by then stays in the conversation.

Decorations are plain ASCII. This module knows nothing of targets: it is given a conversation.

    pytest tests/support/test_chat.py
"""

import codecs
import contextlib
import itertools
import json
import math
import shutil
import signal
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace

try:
    import readline  # noqa: F401  lines can be edited, and the arrow keys bring old ones back
except ImportError:  # not on Windows
    pass

COMMANDS = {
    "/reset": "begin a new conversation",
    "/temperature X": "0 is greedy",
    "/draft on|off": "off is plain decoding",
    "/help": "this list",
    "/quit": "end, as Ctrl-D does",
}
# An answer may hold codes that move a terminal's cursor; a carriage return may stand at a line's
# end.
HARMLESS = dict.fromkeys((*range(32), *range(127, 160)), "\ufffd") | {9: "\t", 10: "\n", 13: ""}
GREEN, DIM, NORMAL = "\033[32m", "\033[2m", "\033[0m"


def be_lenient(*streams) -> None:
    """Let streams replace what their encoding has no character for, instead of raising an error."""
    for stream in streams:
        with contextlib.suppress(AttributeError):  # of a test, or none
            stream.reconfigure(errors="replace")


def record(prompt: str, text: str, result, seconds: float) -> str:
    """What became of a prompt as one line of JSON, in ASCII."""
    al = result.acceptance_length
    return json.dumps(
        {
            "prompt": prompt,
            "text": text,
            "tokens": result.tokens,
            "finish_reason": result.finish_reason or "interrupted",
            "rounds": result.num_rounds,
            "al": None if math.isnan(al) else round(al, 4),
            "seconds": round(seconds, 4),
        }
    )


def typed_lines(prompt: str = "> ") -> Iterator[str]:
    """The lines of standard input. The prompt is for a terminal alone, and never goes into a
    pipe."""
    is_dialogue = sys.stdin.isatty() and sys.stdout.isatty()
    while True:
        if sys.stdin.isatty() and not is_dialogue:
            print(prompt, end="", file=sys.stderr, flush=True)
        try:
            yield input(prompt if is_dialogue else "")
        except EOFError:
            if sys.stdin.isatty():
                print(file=sys.stderr)
            return


@contextlib.contextmanager
def noticed_ctrl_c() -> Iterator[list]:
    """A list that the first Ctrl-C fills, instead of stopping what runs. A second one stops it."""
    pressed = []

    def notice(*_) -> None:
        pressed.append(True)
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, notice)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


def number_of(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{text} is no number such as 0.7") from None


class GrowingText:
    """The text of tokens that arrive a few at a time: whole characters, in the order of bytes."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.num_tokens = 0
        self.text = ""

    def add(self, result) -> list[tuple[bool, str]]:
        """What became readable since the last call, in pieces: (is an accepted draft, text). A
        stop token is no text. A character belongs to the token that completes it."""
        new = list(zip(result.drafted, result.tokens))[self.num_tokens :]
        self.num_tokens = len(result.tokens)
        stop_ids = self.tokenizer.stop_ids
        pieces = [
            (is_draft, self.decoder.decode(self.tokenizer.bytes_of([token])))
            for is_draft, token in new
            if token not in stop_ids
        ]
        runs = itertools.groupby(pieces, lambda piece: piece[0])
        runs = [(is_draft, "".join(text for _, text in run)) for is_draft, run in runs]
        self.text += "".join(text for _, text in runs)
        return runs


class Chat:
    """Turns typed by a user, and the state that commands change."""

    def __init__(
        self, conversation, tokenizer, options, system="", raw=False, jsonl=False, color=False
    ):
        """conversation, options: a `serve.Conversation` and its `Options`. raw: lines are text to
        be continued, without a template. jsonl: standard output gets one record per turn and
        nothing else. color: accepted drafts in green."""
        self.conversation = conversation
        self.tokenizer = tokenizer
        self.options = options
        self.first = [{"role": "system", "content": system}] if system else []
        self.raw = raw
        self.jsonl = jsonl
        self.color = color
        self.drafts = conversation.drafter is not None
        self.plain_speed = None  # tokens/s of plain decoding, once it has been measured
        self.reset()

    def reset(self) -> None:
        self.conversation.reset()
        self.messages = list(self.first)
        self.text = ""  # of a raw conversation

    def run(self, lines: Iterable[str]) -> None:
        """Answer lines until there are no more."""
        for line in lines:
            if line.strip() == "/quit":
                return
            try:
                if line.startswith("/"):
                    self.obey(line.split())
                elif line.strip() or self.raw and self.text:
                    self.answer(line)
            except ValueError as error:
                if self.jsonl:  # a program counts on a record for each turn
                    raise
                self.note(f"error: {error}")

    def note(self, text: str) -> None:
        """A line that is no part of the conversation."""
        width = shutil.get_terminal_size().columns
        text = textwrap.fill(text, width)
        begin, end = (DIM, NORMAL) if self.color else ("", "")
        print(f"{begin}{text}{end}", file=sys.stderr if self.jsonl else sys.stdout, flush=True)

    # -- commands

    def obey(self, words: list[str]) -> None:
        match words:
            case ["/reset"]:
                self.reset()
                self.note("a new conversation")
            case ["/temperature", number]:
                sampling = replace(self.options.sampling, temperature=number_of(number))
                self.options = replace(self.options, sampling=sampling)
                self.note(f"temperature {sampling.temperature:g}")
            case ["/draft", "on" | "off" as word]:
                if not self.conversation.drafter:
                    raise ValueError("there is no drafter: start with --drafter FOLDER")
                self.drafts = word == "on"
                self.note(f"drafts {word}")
            case ["/help"]:
                for command, text in COMMANDS.items():
                    self.note(f"{command:15s} {text}")
            case _:
                self.note(f"no command {' '.join(words)}: there is {', '.join(COMMANDS)}")

    # -- turns

    def answer(self, line: str) -> None:
        """Print the answer to a line while it grows, and what it cost."""
        prompt = self.tokenizer.encode(self.with_line(line))
        text = GrowingText(self.tokenizer)
        times = [time.perf_counter()]
        with noticed_ctrl_c() as pressed:
            for result in self.conversation.answer(prompt, self.options, self.drafts):
                times.append(time.perf_counter())
                self.show(text.add(result))
                if pressed:
                    break
        self.keep(line, text.text)
        if self.jsonl:
            print(record(line, text.text, result, times[-1] - times[0]), flush=True)
        else:
            print(flush=True)
            self.note(self.summary(result, times))

    def with_line(self, line: str) -> str:
        """The whole text that the target continues once a line has been typed."""
        if self.raw:
            return self.tokenizer.bos + self.raw_text(line)
        return self.tokenizer.chat([*self.messages, {"role": "user", "content": line}])

    def raw_text(self, line: str) -> str:
        """A line begins a new line of the text; an empty one lets it go on where it ended."""
        return f"{self.text}\n{line}" if self.text and line else self.text + line

    def keep(self, line: str, answer: str) -> None:
        """Make a line and its answer part of the conversation."""
        self.text = self.raw_text(line) + answer
        self.messages += [
            {"role": "user", "content": line},
            {"role": "assistant", "content": answer},
        ]

    def show(self, pieces: list[tuple[bool, str]]) -> None:
        if self.jsonl:
            return
        for is_draft, text in pieces:
            text = text.translate(HARMLESS)
            print(f"{GREEN}{text}{NORMAL}" if is_draft and self.color else text, end="")
        sys.stdout.flush()

    def summary(self, result, times: list[float]) -> str:
        """AL and tokens/s of the rounds, without the prefill; times: of the start, of the first
        token and of each round."""
        num_tokens = len(result.tokens)
        parts = [f"{num_tokens} token{'s' * (num_tokens != 1)}"]
        if self.drafts and result.num_rounds:
            parts = [f"AL {result.acceptance_length:.2f}"]
        if result.num_rounds:
            speed = (num_tokens - 1) / (times[-1] - times[1])
            parts.append(f"{speed:.1f} tokens/s")
            if not self.drafts:
                self.plain_speed = speed
            elif self.plain_speed is None:
                self.plain_speed = self.conversation.plain_speed()
            if self.drafts and not math.isnan(self.plain_speed):
                parts.append(f"plain about {self.plain_speed:.1f}")
        parts += {"": ["stopped"], "length": ["at its limit"], "stop": []}[result.finish_reason]
        return f"-- {', '.join(parts)}"
