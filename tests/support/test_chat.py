"""Answers stream out in whole characters, commands work, and Ctrl-C ends an answer alone. `pytest
tests/support/test_chat.py`"""

import contextlib
import io
import json
import os
import pty
import random
import select
import signal
import sys
import time
from dataclasses import replace

import pytest

import serve
from hf import load_tokenizer
from serve import Conversation, Options, Result, generate
from small import ROOT, error_of, small_drafter, small_target
from support.chat import COMMANDS, HARMLESS, Chat, GrowingText, be_lenient
from support.toy import write_byte_tokenizer

# as Qwen3's, which leaves out what an earlier answer thought: its first three characters
FORGETFUL = (
    "{% for m in messages %}{{ m.role[0] }}:"
    "{{ m.content[3:] if m.role == 'assistant' and not loop.last else m.content }}\n{% endfor %}a:"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(folder)
    return load_tokenizer(folder)


@pytest.fixture(scope="module", params=["gqa", "gdn", "qsa"])
def target(request):
    return small_target(arch=request.param, vocab_size=264)


@pytest.fixture(scope="module")
def small():
    return small_target(vocab_size=264)


def new_chat(target, tokenizer, template=FORGETFUL, drafter=True, size=12, **options) -> Chat:
    """A chat without a template is a raw one."""
    tokenizer = replace(tokenizer, template=template)
    how = Options(size, stop_ids=frozenset(tokenizer.stop_ids))
    conversation = Conversation(target, small_drafter(target) if drafter else None)
    return Chat(conversation, tokenizer, how, raw=template is None, **options)


# ----------------------------------------------------------------------------------- growing text


@pytest.mark.parametrize("seed", range(5))
def test_text_grows_by_whole_characters_and_never_changes(tokenizer, seed):
    rng = random.Random(seed)
    text = "".join(rng.choice("aé中🦊\n👩‍👩‍👧") for _ in range(40))
    ids = [*tokenizer.encode(text), 256]
    result = Result()
    growing = GrowingText(tokenizer)
    printed = ""
    while len(result.tokens) < len(ids):
        count = rng.randint(1, 3)
        result.tokens += ids[len(result.tokens) :][:count]
        result.drafted = [rng.random() < 0.5 for _ in result.tokens]
        printed += "".join(piece for _, piece in growing.add(result))
        assert text.startswith(printed) and growing.text == printed
    assert printed == text


def test_a_character_that_never_ends_is_not_printed_and_wrong_bytes_are_marked(tokenizer):
    growing = GrowingText(tokenizer)
    result = Result([97, 0xFF, 98, *"中".encode()[:2]], [False] * 5)
    assert "".join(text for _, text in growing.add(result)) == "a\ufffdb"


def test_pieces_say_who_wrote_them(tokenizer):
    result = Result([*b"abc", *"é".encode(), 256], [False, True, True, True, False, True])
    assert GrowingText(tokenizer).add(result) == [(False, "a"), (True, "bc"), (False, "é")]


# ------------------------------------------------------------------------------------------- turns


def told(chat: Chat, line: str, capsys) -> tuple[str, str]:
    """What a line makes the chat print: the answer, and the last line."""
    chat.run([line])
    answer, _, last = capsys.readouterr().out.rpartition("\n--")
    return answer, last.strip()


def expected(chat: Chat, line: str) -> str:
    """What a fresh run on the whole conversation says, as it is printed."""
    prompt = chat.tokenizer.encode(chat.with_line(line))
    (result,) = generate(chat.conversation.target, None, [prompt], 12, stop_ids=(256,))
    pieces = GrowingText(chat.tokenizer).add(result)
    return "".join(text for _, text in pieces).translate(HARMLESS)


@pytest.mark.parametrize("template", [FORGETFUL, None], ids=["template", "raw"])
def test_every_answer_is_that_of_a_fresh_run_on_the_whole_conversation(
    target, tokenizer, template, capsys
):
    chat = new_chat(target, tokenizer, template)
    for line in ("hello", "and é?", "/draft off", "more", "/draft on", "end", "/reset", "hello"):
        if line.startswith("/"):
            chat.run([line])
            capsys.readouterr()
            continue
        wanted = expected(chat, line)
        answer, last = told(chat, line, capsys)
        assert answer == wanted
        assert last.startswith("AL " if chat.drafts else "12 tokens")
        assert "tokens/s" in last and ("plain about" in last) == chat.drafts
    text = chat.with_line("x")
    assert text.count("hello") == 1 and "more" not in text  # it was reset


def test_what_the_template_forgets_is_run_anew_and_the_system_speaks_first(
    small, tokenizer, capsys
):
    chat = new_chat(small, tokenizer, system="be kind")
    chat.run(["one", "two"])
    answers = [m["content"] for m in chat.messages if m["role"] == "assistant"]
    wanted = f"s:be kind\nu:one\na:{answers[0][3:]}\nu:two\na:{answers[1][3:]}\nu:x\na:"
    assert chat.with_line("x") == wanted
    chat.run(["/reset"])
    assert chat.with_line("x") == "s:be kind\nu:x\na:"


def test_a_raw_conversation_is_one_text_and_an_empty_line_lets_it_go_on(small, tokenizer):
    chat = new_chat(small, tokenizer, None)
    chat.run(["", "ab"])
    first = chat.text
    assert first.startswith("ab") and len(first) > 2
    chat.run([""])
    second = chat.text
    assert second.startswith(first) and len(second) > len(first)
    chat.run(["cd"])
    assert chat.text.startswith(f"{second}\ncd")


# --------------------------------------------------------------------------------- Ctrl-C, commands


@contextlib.contextmanager
def ctrl_c_in_the_third_round(monkeypatch, times: int):
    honest = serve.Answer.round
    # a test run in the background may have been started with Ctrl-C ignored
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupted(batch):
        for _ in range(times * (batch.num_rounds == 2)):
            signal.raise_signal(signal.SIGINT)
        return honest(batch)

    with monkeypatch.context() as patch:
        patch.setattr(serve.Answer, "round", interrupted)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


def test_ctrl_c_ends_the_answer_and_what_was_committed_stays(
    target, tokenizer, capsys, monkeypatch
):
    chat = new_chat(target, tokenizer)
    chat.run(["hello"])
    capsys.readouterr()
    whole = expected(chat, "go on")
    handler = signal.getsignal(signal.SIGINT)
    with ctrl_c_in_the_third_round(monkeypatch, 1):
        answer, last = told(chat, "go on", capsys)
    assert last.endswith("stopped") and whole.startswith(answer) and 0 < len(answer) < len(whole)
    assert chat.messages[-1]["content"].translate(HARMLESS) == answer
    assert signal.getsignal(signal.SIGINT) is handler
    wanted = expected(chat, "and then?")
    assert told(chat, "and then?", capsys)[0] == wanted


def test_a_second_ctrl_c_is_not_held_back(small, tokenizer, monkeypatch):
    chat = new_chat(small, tokenizer)
    with ctrl_c_in_the_third_round(monkeypatch, 2), pytest.raises(KeyboardInterrupt):
        chat.run(["hello"])


@pytest.mark.parametrize(
    "line, words",
    [
        ("/temperature 0.7", "temperature 0.7"),
        ("/temperature hot", "error: hot is no number"),
        ("/temperature -1", "error: temperature >= 0"),
        ("/temperature", "no command /temperature: there is /reset"),
        ("/draft off", "drafts off"),
        ("/draft maybe", "no command /draft maybe"),
        ("/reset", "a new conversation"),
        ("/nonsense", "/quit"),
    ],
)
def test_a_command_says_what_it_did_in_one_line(small, tokenizer, capsys, monkeypatch, line, words):
    monkeypatch.setenv("COLUMNS", "200")
    new_chat(small, tokenizer).run([line, "/quit", "/reset"])
    (printed,) = capsys.readouterr().out.splitlines()
    assert words in printed


def test_help_lists_the_commands_in_narrow_lines(small, tokenizer, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    new_chat(small, tokenizer).run(["/help"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(COMMANDS) and max(map(len, lines)) <= 40


def test_a_temperature_counts_from_the_next_turn_on(small, tokenizer):
    chat = new_chat(small, tokenizer)
    chat.run(["/temperature 2", "hello"])
    (prompt,) = (m["content"] for m in chat.messages if m["role"] == "user")
    ids = tokenizer.encode(f"u:{prompt}\na:")
    how = dict(stop_ids=(256,), sampling=replace(chat.options.sampling, temperature=2.0))
    (result,) = generate(small, chat.conversation.drafter, [ids], 12, **how)
    growing = GrowingText(tokenizer)
    growing.add(result)
    assert chat.messages[-1]["content"] == growing.text


def test_drafts_without_a_drafter_are_an_error(small, tokenizer, capsys):
    new_chat(small, tokenizer, drafter=False).run(["/draft on"])
    assert "--drafter FOLDER" in capsys.readouterr().out


def test_what_cannot_be_answered_is_one_line_and_the_chat_goes_on(small, tokenizer, capsys):
    chat = new_chat(small, tokenizer)
    wanted = expected(chat, "hello")
    chat.run(["x" * 600])
    printed = capsys.readouterr().out
    assert printed.startswith("error: ") and "maximum length 512" in printed.replace("\n", " ")
    assert told(chat, "hello", capsys)[0] == wanted


# ---------------------------------------------------------------------------------------- terminals


@pytest.mark.parametrize("color", [False, True])
def test_accepted_drafts_are_green_and_what_the_target_says_is_plain(
    small, tokenizer, capsys, color
):
    new_chat(small, tokenizer, color=color).show([(True, "ab"), (False, "c"), (True, "d")])
    green, end = ("\033[32m", "\033[0m") if color else ("", "")
    assert capsys.readouterr().out == f"{green}ab{end}c{green}d{end}"


def test_codes_that_move_a_cursor_are_not_printed(small, tokenizer, capsys):
    chat = new_chat(small, tokenizer)
    chat.show([(False, "a\x1b[2J\tb\r\nc\x9b")])
    assert capsys.readouterr().out == "a\ufffd[2J\tb\nc\ufffd"


def test_a_terminal_without_unicode_gets_question_marks(small, tokenizer, monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), "ascii")
    be_lenient(stream, None)
    monkeypatch.setattr(sys, "stdout", stream)
    chat = new_chat(small, tokenizer)
    chat.show([(False, "é中")])
    chat.run(["/help", "/nonsense", "hello"])
    stream.flush()
    printed = stream.buffer.getvalue().decode("ascii")
    assert printed.startswith("??") and "-- AL" in printed


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Arguments that name a small target with a template, and a drafter."""
    folder = tmp_path_factory.mktemp("pair")
    target = small_target(vocab_size=264, max_position_embeddings=8192)
    target.num_tokens = 258
    target.lm_head.weight.data[256] = 0  # its answers do not end by themselves
    write_byte_tokenizer(folder / "target")
    (folder / "target" / "chat_template.jinja").write_text(FORGETFUL)
    target.save_pretrained(folder / "target", eos_token_id=256, pad_token_id=257)
    small_drafter(target).save_pretrained(folder / "drafter")
    return "--target", str(folder / "target"), "--drafter", str(folder / "drafter")


def records(capsys, monkeypatch, arguments, typed: str = "") -> list[dict]:
    monkeypatch.setattr(sys, "argv", ["serve.py", *arguments, "--jsonl", "--max-new-tokens", "9"])
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    serve.main()
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_records_of_prompts_and_of_turns_have_the_same_form(pair, capsys, monkeypatch):
    (alone, other) = records(capsys, monkeypatch, [*pair, "--prompt", "ab", "c"])
    keys = ["prompt", "text", "tokens", "finish_reason", "rounds", "al", "seconds"]
    assert list(alone) == list(other) == keys
    assert alone["prompt"] == "ab" and len(alone["tokens"]) == 9 and alone["seconds"] > 0
    assert alone["rounds"] >= 2 and alone["al"] >= 1 and alone["finish_reason"] == "length"
    first, second = records(capsys, monkeypatch, pair, "ab\n/temperature 0\n\nmore\n/quit\nno\n")
    assert first | {"seconds": 0} == alone | {"seconds": 0}
    assert second["prompt"] == "more" and list(second) == keys
    (raw,) = records(capsys, monkeypatch, [*pair, "--prompt", "ab", "--raw"])
    assert raw["tokens"] != alone["tokens"]


@pytest.mark.parametrize(
    "arguments, words",
    [
        ("", "nothing to continue"),
        ("--raw --system x", "--system means nothing here"),
        ("--jsonl --color always", "--color means nothing here"),
        ("--batch-size 3", "--batch-size means nothing here"),
        ("--prompts a.jsonl --system x", "--system means nothing here"),
    ],
)
def test_a_wrong_argument_ends_in_one_clear_line(pair, monkeypatch, capsys, arguments, words):
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    arguments = [*pair, *arguments.split()]
    assert words in error_of(serve.main, arguments, monkeypatch, capsys)


class Terminal:
    """A command in a terminal of its own."""

    def __init__(self, arguments, **variables):
        self.printed = ""
        self.process, self.master = pty.fork()
        if self.process == 0:
            os.chdir(ROOT)
            os.environ.update(OMP_NUM_THREADS="1", TERM="dumb", **variables)
            os.execv(sys.executable, [sys.executable, "serve.py", *arguments])

    def at_prompt(self, keys: str) -> None:
        """Press keys once the chat waits for a line: a moment after it says so."""
        self.wait_for("> ")
        time.sleep(0.5)
        self.press(keys)

    def press(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def wait_for(self, text: str, seconds: float = 60) -> str:
        """What is printed up to and including a text."""
        end = time.monotonic() + seconds
        while text not in self.printed:
            assert select.select([self.master], [], [], end - time.monotonic())[0], self.printed
            self.printed += os.read(self.master, 4096).decode()
        before, _, self.printed = self.printed.partition(text)
        return before

    def exit_code(self) -> int:
        with contextlib.suppress(OSError):  # the other side has closed
            self.wait_for("what is never printed")
        return os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        os.close(self.master)  # the terminal is gone: what still runs in it ends


@pytest.mark.slow
def test_a_chat_in_a_terminal(pair):
    with Terminal([*pair, "--max-new-tokens", "4000"]) as terminal:
        terminal.at_prompt("hello\n")
        terminal.wait_for("hello\r\n")
        time.sleep(0.3)
        terminal.press("\x03")
        terminal.wait_for("stopped")
        terminal.at_prompt("/help\n")
        assert "/draft on|off" in terminal.wait_for("/quit ")
        terminal.at_prompt("\x04")
        assert terminal.exit_code() == 0


@pytest.mark.slow
def test_ctrl_c_at_the_prompt_ends_a_chat(pair):
    with Terminal(pair, NO_COLOR="1") as terminal:
        terminal.at_prompt("\x03")
        assert "\033" not in terminal.wait_for("\r\nstopped\r\n")
        assert terminal.exit_code() == 130
