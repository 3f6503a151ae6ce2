"""What goes in: text, prompts and references.

The default corpus needs no download: the sources of Python's standard library and the prose of
pydoc's topics, split by file into train and held-out. A *reference* is a prompt from the corpus and
a response that the TARGET generated, made once and stored, so that training never learns another
model's text.

    pytest tests/test_data.py
"""

import dataclasses
import json
import sys
import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hf.tensors import open_tensors, save_tensors
from hf.tokenizer import Tokenizer, load_tokenizer  # noqa: F401 load_tokenizer is a name of ours, too
from support.files import check_same

HELD_OUT_SHARE = 20  # one file in this many is held out

# ------------------------------------------------------------------------------- corpus and prompts


@dataclass(frozen=True)
class Corpus:
    """Texts, split by file, that prompts are cut from; or conversations, each a prompt as it is."""

    train: list[str] | list[list[dict]]
    held_out: list[str] | list[list[dict]]


def _split(named: dict, source: str) -> Corpus:
    named = {name: t for name, t in named.items() if not isinstance(t, str) or t.strip()}
    if not named:
        raise ValueError(f"{source}: the corpus is empty, nothing to learn from")
    held = {n for n in named if zlib.crc32(n.encode()) % HELD_OUT_SHARE == 0} or {max(named)}
    parts = [[named[n] for n in sorted(named) if (n in held) == wanted] for wanted in (False, True)]
    if not parts[0]:
        raise ValueError(f"{source}: holds one text only; two are needed, one to be held out")
    return Corpus(*parts)


def load_corpus(path: str | None = None, skip_bad_lines: bool = False) -> Corpus:
    """The embedded default, or a folder or file of text, or JSONL prompts (see `read_prompts`)."""
    if path is None:
        from pydoc_data.topics import topics

        root = Path(sysconfig.get_path("stdlib"))
        left_out = {"test", "tests", "idlelib", "lib2to3", "site-packages", "pydoc_data"}
        files = [f for f in root.rglob("*.py") if not left_out & set(f.relative_to(root).parts)]
        named = {str(f.relative_to(root)): f.read_text("utf-8", errors="ignore") for f in files}
        return _split(named | {f"topic {name}": text for name, text in topics.items()}, str(root))
    root = Path(path)
    if not root.exists():
        raise FileNotFoundError(f"corpus {path} is missing")
    files = sorted(f for f in root.rglob("*") if f.is_file()) if root.is_dir() else [root]
    if files and all(f.suffix == ".jsonl" for f in files):
        named = {}
        for file in files:
            for number, messages in enumerate(read_prompts(file, skip_bad_lines)):
                named[f"{file.name}:{number}"] = messages
        return _split(named, path)
    named = {}
    for file in files:
        text = file.read_text("utf-8", errors="ignore")
        pieces = [text]
        if len(files) == 1:  # one file has to give both parts: cut it at line ends into 64 pieces
            lines = text.splitlines(keepends=True)
            size = max(1, -(-len(lines) // 64))
            pieces = ["".join(lines[i : i + size]) for i in range(0, len(lines), size)]
        name = file.relative_to(root.parent)
        named |= {f"{name}:{i:04d}": piece for i, piece in enumerate(pieces)}
    return _split(named, path)


def read_prompts(path, skip_bad_lines: bool = False) -> list[list[dict]]:
    """JSON Lines of the four public shapes -> conversations [{"role", "content"}, ...]: {"turns"},
    {"prompt"}, {"messages": [{role, content}]}, {"conversations": [{from, value}]}."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"prompt file {path} is missing")
    found, bad = [], 0
    for number, line in enumerate(path.read_text("utf-8", errors="replace").split("\n"), 1):
        if not line.strip():
            continue
        try:
            found.append(_conversation(json.loads(line)))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            reason = f"lacks {error}" if isinstance(error, KeyError) else error
            message = f"{path}:{number}: bad line: {reason}"
            if not skip_bad_lines:
                raise ValueError(
                    f"{message} (train.py and references.py can leave such lines "
                    "out: --skip-bad-lines)"
                ) from None
            bad += 1
            print(message, file=sys.stderr)
    if bad:
        print(f"{path}: {bad} bad lines left out, {len(found)} kept", file=sys.stderr)
    if not found:
        raise ValueError(f"{path}: no prompts in it")
    return found


def _conversation(record: dict) -> list[dict]:
    if "turns" in record:
        turns = [{"role": "user", "content": text} for text in record["turns"]]
    elif "prompt" in record:
        turns = [{"role": "user", "content": record["prompt"]}]
    elif "messages" in record:
        turns = [{"role": m["role"], "content": m["content"]} for m in record["messages"]]
    elif "conversations" in record:
        names = {"human": "user", "gpt": "assistant"}
        turns = []
        for m in record["conversations"]:
            role = m["from"] if "from" in m else m["role"]
            content = m["value"] if "value" in m else m["content"]
            turns.append({"role": names.get(role, role), "content": content})
    else:
        raise ValueError("none of the keys turns, prompt, messages, conversations")
    if not turns or not all(isinstance(m["content"], str) and m["content"] for m in turns):
        raise ValueError("no turns, or a turn without text")
    return turns


def first_turn(messages: list[dict]) -> list[dict]:
    """What is asked first: a system message, if any, and the first user's turn."""
    first = next((i for i, m in enumerate(messages) if m["role"] == "user"), 0)
    return messages[: first + 1]


def pack(texts: list, tokenizer: Tokenizer) -> Tensor:
    """One long row of token ids (int16 or int32 to stay small), the end id after each text."""
    end = tokenizer.stop_ids[:1]
    texts = [t if isinstance(t, str) else "\n\n".join(m["content"] for m in t) for t in texts]
    ids = np.concatenate([np.array([*tokenizer.encode(t, False), *end], np.int32) for t in texts])
    return torch.from_numpy(ids.astype(np.int16) if tokenizer.num_tokens < 2**15 else ids)


class TooLong(ValueError):
    """All prompts are."""


def draw_prompts(texts: list, tokenizer: Tokenizer, count: int, length: int, seed: int) -> list:
    """`count` prompts. From running text: `length` tokens from the start of a random line, texts by
    size. From prompts: each as it is, those longer than `length` tokens left out and counted."""
    generator = np.random.default_rng(seed)
    if not isinstance(texts[0], str):
        encoded = [tokenizer.encode(tokenizer.chat(first_turn(messages))) for messages in texts]
        fitting = [ids for ids in encoded if 0 < len(ids) <= length]
        if len(fitting) < len(encoded):
            print(f"{len(encoded) - len(fitting)} prompts longer than {length} tokens left out")
        if not fitting:
            raise TooLong(f"no prompt of at most {length} tokens: allow longer ones")
        if len(fitting) < count:
            print(f"{len(fitting)} prompts are all there are, of {count} asked")
        return [fitting[i] for i in generator.permutation(len(fitting))[:count]]
    long_enough = [t for t in texts if len(t) >= 4 * length] or texts
    sizes = np.array([len(t) for t in long_enough], float)
    prompts = []
    for _ in range(50 * count):
        text = long_enough[generator.choice(len(sizes), p=sizes / sizes.sum())]
        start = text.rfind("\n", 0, int(generator.integers(0, len(text)))) + 1
        ids = tokenizer.encode(text[start : start + 8 * length], False)[:length]
        if len(ids) == length:
            prompts.append(ids)
        if len(prompts) == count:
            return prompts
    raise ValueError(f"the corpus is too short for {count} prompts of {length} tokens")


# --------------------------------------------------------------------------------------- references


@dataclass
class References:
    """n texts the target wrote: tokens (n,T) right-padded, lengths (n,), prompt_lengths (n,)."""

    tokens: Tensor
    lengths: Tensor
    prompt_lengths: Tensor

    def save(self, path, made_with: dict) -> None:
        tensors = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        tensors["tokens"] = self.tokens.int()
        save_tensors(path, tensors, {"made_with": made_with})

    @classmethod
    def load(cls, path, made_with: dict | None = None) -> "References":
        with open_tensors(path) as file:
            try:
                stored = json.loads((file.metadata() or {}).get("made_with", "{}"))
            except ValueError:
                stored = None
            if not isinstance(stored, dict):
                raise ValueError(f"{path} does not say how it was made")
            unseen = {"target": None} if stored.get("target", 0) is None else {}  # a server's
            check_same(stored, (made_with or {}) | unseen, path)
            names = [f.name for f in dataclasses.fields(cls)]
            if lacking := set(names) - set(file.keys()):
                raise ValueError(f"{path} holds no references, it lacks {min(lacking)}")
            tokens, lengths, prompts = (file.get_tensor(name).long() for name in names)
        if (
            tokens.dim() != 2
            or not tokens.numel()
            or int(tokens.min()) < 0
            or not lengths.shape == prompts.shape == tokens.shape[:1]
            or not bool(((0 <= prompts) & (prompts < lengths)).all())
            or int(lengths.max()) > tokens.shape[1]
        ):
            raise ValueError(f"{path}: no references, or their lengths do not fit them")
        return cls(tokens, lengths, prompts)

    @classmethod
    def from_lists(cls, prompts: list[list[int]], responses: list[list[int]], pad_id: int):
        """Sequences with a response too short to hold an anchor (two tokens) are left out."""
        pairs = [(p, r) for p, r in zip(prompts, responses) if len(r) >= 2]
        if not pairs:
            raise ValueError("nothing to supervise: every response is shorter than two tokens")
        rows = [torch.tensor([*p, *r]) for p, r in pairs]
        tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad_id)
        lengths = torch.tensor([len(r) for r in rows])
        return cls(tokens, lengths, torch.tensor([len(p) for p, _ in pairs]))

    @classmethod
    def from_conversations(cls, conversations: list, tokenizer: Tokenizer, length: int):
        """Answers written elsewhere: each assistant turn, with all before it as its prompt. Turns
        that end beyond `length` tokens are left out and counted."""
        prompts, responses, refused, too_long = [], [], 0, 0
        for messages in conversations:
            try:
                ids, mask = tokenizer.supervised(messages)
            except ValueError:
                refused += 1
                continue
            mask = [False, *mask, False]
            edges = [i for i in range(len(mask) - 1) if mask[i] != mask[i + 1]]
            for start, end in zip(edges[::2], edges[1::2]):  # what the target itself wrote of it
                stops = (i + 1 for i in range(start, end) if ids[i] in tokenizer.stop_ids)
                end = next(stops, end)
                too_long += end > length
                if start and end <= length:
                    prompts.append(ids[:start])
                    responses.append(ids[start:end])
        if refused or too_long:
            print(
                f"left out: {refused} conversations without an assistant turn that can be told "
                f"apart, {too_long} turns that end beyond {length} tokens"
            )
        found = cls.from_lists(prompts, responses, tokenizer.pad_id)
        print(
            f"{int((found.lengths - found.prompt_lengths).sum()):,} supervised tokens in "
            f"{len(found.lengths):,} assistant turns"
        )
        return found
