"""What goes in: text and prompts.

The default corpus needs no download: the sources of Python's standard library and the prose of
pydoc's topics, split by file into training and held-out texts.

    pytest tests/support/test_data.py
"""

import sysconfig
import zlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from hf.chat import PROMPT_SUFFIXES, first_turn, holds_prompts, read_prompts, read_text
from hf.tokenizer import NO_HEADER, NO_TURN, OWN_TEXT, REWRITTEN, Tokenizer

HELD_OUT_SHARE = 20  # one file in this many is held out
NUM_PIECES = 64  # a single text file is cut into so many
HELD_OUT = (64, 256)  # prompts held out: at least so many if there are enough, and at most
ENOUGH = 4  # times as many as are held out
EXCLUDED = {"test", "tests", "idlelib", "lib2to3", "site-packages", "pydoc_data"}
TOO_LONG = "the turn ends beyond"
HINTS = {  # how a reason begins, and what helps
    TOO_LONG: "--prompt-length and --response-length together are the limit",
    NO_TURN: "`lab references` lets the target answer prompts",
    NO_HEADER: "--chat-template-args sets the template's variables",
    OWN_TEXT: "--chat-template-args '{\"enable_thinking\": false}'",
    REWRITTEN: "give each turn a record of its own, which ends with it",
    "the chat template refuses": "--chat-template-args sets the template's variables",
    "the chat template has no": "take it out, or give --target the template that wrote the texts",
}


@dataclass(frozen=True)
class Corpus:
    """Texts that prompts are cut from, split by file; or conversations that each give one."""

    train: list[str] | list[list[dict]]
    held_out: list[str] | list[list[dict]]


def load_corpus(path: str | None = None, skip_bad_lines: bool = False) -> Corpus:
    """The default, or a file or folder of text or of prompts (see `hf.chat.read_prompts`). In a
    folder with prompts other files are left aside, and so are hidden ones in any folder."""
    if path is None:
        root = Path(sysconfig.get_path("stdlib"))
        return _split(_library_texts(root), str(root))
    root = Path(path)
    if not root.exists():
        raise FileNotFoundError(f"corpus {path} is missing")
    prompt_files, text_files, others = _files_by_kind(root)
    texts = {}
    for file in prompt_files:
        name = file.relative_to(root) if root.is_dir() else file.name
        prompts = enumerate(read_prompts(file, skip_bad_lines))
        texts |= {f"{name}:{number}": messages for number, messages in prompts}
    for file in text_files:
        name = file.relative_to(root.parent)
        text = read_text(file)
        pieces = enumerate(_pieces(text) if len(text_files) == 1 else [text])
        texts |= {f"{name}:{number:04d}": piece for number, piece in pieces}
    if prompt_files:
        size = f"{_count(prompt_files, 'file')} of prompts, {_count(texts, 'conversation')}"
    else:
        size = f"{_count(text_files, 'file')} of text, {sum(map(len, texts.values())):,} characters"
        size += "; --skip-bad-lines means nothing for text" if skip_bad_lines else ""
    print(f"corpus {path}: {size}{_listed('; left aside: ', others)}")
    return _split(texts, path)


def _files_by_kind(root: Path) -> tuple[list[Path], list[Path], list[str]]:
    """Files of prompts, files of text (if there are none of prompts), and names of the others."""
    if root.is_file():
        is_prompts = root.name.lower().endswith(PROMPT_SUFFIXES)
        return ([root], [], []) if is_prompts else ([], [root], [])
    paths = sorted(root.rglob("*"))
    files = [path for path in paths if path.is_file()]
    links = [path for path in paths if path.is_symlink() and not path.is_file()]
    names = {file: file.relative_to(root) for file in files}
    visible = [f for f in files if not any(part.startswith(".") for part in names[f].parts)]
    prompts = [file for file in visible if holds_prompts(file)]
    taken = prompts or visible
    others = [f"{link.relative_to(root)} (a link to no file)" for link in links]
    others += [str(names[file]) for file in files if file not in taken]
    return prompts, [] if prompts else visible, others


def _count(things, noun: str) -> str:
    return f"{len(things):,} {noun}{'' if len(things) == 1 else 's'}"


def _listed(start: str, names: list[str]) -> str:
    """The first few names, after `start`; nothing for none."""
    rest = f" and {len(names) - 5:,} more" if len(names) > 5 else ""
    return f"{start}{', '.join(names[:5])}{rest}" if names else ""


def _library_texts(root: Path) -> dict[str, str]:
    """Python's own library by file name, and pydoc's topics."""
    texts = {}
    for file in root.rglob("*.py"):
        name = file.relative_to(root)
        if not EXCLUDED & set(name.parts):
            texts[str(name)] = file.read_text("utf-8", errors="ignore")
    return texts | {f"topic {name}": text for name, text in topics.items()}


def _pieces(text: str) -> list[str]:
    """One file, cut at line ends, because it has to give both parts of a corpus."""
    lines = text.splitlines(keepends=True)
    size = max(1, -(-len(lines) // NUM_PIECES))
    return ["".join(lines[start : start + size]) for start in range(0, len(lines), size)]


def num_held_out(count: int) -> int:
    """How many of `count` conversations are held out; none of very few."""
    least, most = HELD_OUT
    return min(most, max(count // HELD_OUT_SHARE, min(least, count // ENOUGH)))


def split_conversations(conversations: list, least: int = 0) -> tuple[list, list]:
    """Those to train on and those held out, evenly spread and `least` of them at least."""
    count = max(least, num_held_out(len(conversations)))
    numbers = {len(conversations) * i // count for i in range(count)}
    train = [c for number, c in enumerate(conversations) if number not in numbers]
    return train, [conversations[number] for number in sorted(numbers)]


def _split(texts: dict, source: str) -> Corpus:
    """Hold out one text in HELD_OUT_SHARE, chosen by its name, or `num_held_out` conversations."""
    texts = {name: t for name, t in texts.items() if not isinstance(t, str) or t.strip()}
    if not texts:
        raise ValueError(f"{source}: the corpus is empty, nothing to learn from")
    if isinstance(next(iter(texts.values())), str):
        names = {name for name in texts if zlib.crc32(name.encode()) % HELD_OUT_SHARE == 0}
        names = names or {max(texts)}
        train = [texts[name] for name in sorted(texts) if name not in names]
        held_out = [texts[name] for name in sorted(texts) if name in names]
    else:
        train, held_out = split_conversations([texts[name] for name in sorted(texts)], least=1)
    if not train:
        raise ValueError(f"{source}: holds one text only; two are needed, one to be held out")
    return Corpus(train, held_out)


def pack(texts: list, tokenizer: Tokenizer) -> Tensor:
    """One long row of token ids (n,), each text between BOS and end id; int16 where ids fit."""
    rows = []
    for text in texts:
        if not isinstance(text, str):  # a conversation
            text = "\n\n".join(message["content"] for message in text)
        ids = [*tokenizer.bos_ids, *tokenizer.encode(text, False), *tokenizer.stop_ids[:1]]
        rows.append(np.array(ids, np.int32))
    ids = np.concatenate(rows)
    return torch.from_numpy(ids.astype(np.int16) if tokenizer.num_tokens < 2**15 else ids)


class TooLong(ValueError):
    """All prompts are longer than allowed."""


def draw_prompts(
    texts: list, tokenizer: Tokenizer, count: int, length: int, seed: int, tell=print
) -> list[list[int]]:
    """Draw `count` prompts. From text: `length` tokens, BOS first, from the start of a random line.
    From conversations: each up to its first user turn, if it has one, unless that is longer than
    `length` tokens or the chat template refuses it. tell: gets what was left out, in words."""
    generator = np.random.default_rng(seed)
    if isinstance(texts[0], str):
        return _prompts_from_text(texts, tokenizer, count, length, generator)
    prompts = []
    refusals = Counter()
    for messages in tqdm(texts, "prompts", leave=False, delay=1):
        try:
            prompts.append(_prompt_ids(first_turn(messages), tokenizer))
        except ValueError as error:
            refusals[str(error)] += 1
    if not prompts:
        raise ValueError(f"no prompt is left: {format_reasons(refusals, tokenizer)}")
    if refusals:
        tell(f"prompts left out: {format_reasons(refusals, tokenizer)}")
    fitting = [ids for ids in prompts if len(ids) <= length]
    if len(fitting) < len(prompts):
        left_out = f"{len(prompts) - len(fitting)} of {len(prompts)} prompts are longer than"
        tell(f"{left_out} {length} tokens and left out: --prompt-length allows longer ones")
    if not fitting:
        raise TooLong(f"no prompt of at most {length} tokens: allow longer ones")
    if len(fitting) < count:
        tell(f"{len(fitting)} prompts are all there are, of {count} wanted")
    return [fitting[i] for i in generator.permutation(len(fitting))[:count]]


def _prompt_ids(messages: list[dict], tokenizer: Tokenizer) -> list[int]:
    """The token ids of a conversation as a prompt. Raise a ValueError if the chat template loses
    anything of it."""
    ids = tokenizer.encode(tokenizer.chat(messages))
    tokenizer.check_shown(messages)
    if not ids:
        raise ValueError("the chat template writes nothing")
    return ids


def format_reasons(counts: Counter, tokenizer: Tokenizer) -> str:
    """The most frequent reasons with their counts, and what helps against the first."""
    [(first, _), *_] = counts.most_common()
    text = _listed("", [f"{number} x {reason}" for reason, number in counts.most_common()])
    hints = [hint for start, hint in HINTS.items() if first.startswith(start)]
    if "enable_thinking" in "".join(hints) and not tokenizer.template_names("enable_thinking"):
        return text
    return f"{text} ({hints[0]})" if hints else text


def _prompts_from_text(texts: list[str], tokenizer: Tokenizer, count, length, generator) -> list:
    """Cut prompts of `length` tokens from texts drawn with probability proportional to size."""
    texts = [t for t in texts if len(t) >= 4 * length] or texts
    sizes = np.array([len(t) for t in texts], float)
    prompts = []
    for _ in range(50 * count):
        text = texts[generator.choice(len(texts), p=sizes / sizes.sum())]
        start = text.rfind("\n", 0, int(generator.integers(0, len(text)))) + 1
        ids = tokenizer.encode(text[start : start + 8 * length], False)
        ids = [*tokenizer.bos_ids, *ids][:length]
        if len(ids) == length:
            prompts.append(ids)
        if len(prompts) == count:
            return prompts
    if not prompts:
        raise ValueError(f"the corpus is too short for {count} prompts of {length} tokens")
    print(f"the text gives {len(prompts)} prompts of {length} tokens, of {count} wanted")
    return prompts


def unseen(prompts: list[list[int]], trained: list[list[int]]) -> list[list[int]]:
    """Those of the prompts that nothing is trained on."""
    known = set(map(tuple, trained))
    return [prompt for prompt in prompts if tuple(prompt) not in known]


def hold_out(
    corpus: Corpus, tokenizer: Tokenizer, config, prompts: list, tell=print
) -> list[list[int]]:
    """Draw the prompts that travel in a file of references: `prompts` are trained on."""
    is_text = isinstance(corpus.held_out[0], str)
    count = HELD_OUT[1] if is_text else len(corpus.held_out)
    how = (tokenizer, count, config.prompt_length, config.seed + 1, tell)
    try:
        return unseen(draw_prompts(corpus.held_out, *how), prompts)
    except TooLong as error:
        tell(f"no prompt is held out to measure on: {error}")
        return []
