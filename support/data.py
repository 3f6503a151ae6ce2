"""What goes in: text, prompts and references.

The default corpus needs no download: the sources of Python's standard library and the prose of
pydoc's topics, split by file into training and held-out texts. A *reference* is a prompt from the
corpus and a response that the TARGET generated: training never learns another model's text.

    pytest tests/support/test_data.py
"""

import json
import sysconfig
import zlib
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import torch
from torch import Tensor

from hf.chat import first_turn, read_prompts
from hf.files import open_tensors
from hf.tokenizer import Tokenizer
from support.files import write_tensors
from support.resume import check_same

HELD_OUT_SHARE = 20  # one file in this many is held out
NUM_PIECES = 64  # a single text file is cut into so many
EXCLUDED = {"test", "tests", "idlelib", "lib2to3", "site-packages", "pydoc_data"}


@dataclass(frozen=True)
class Corpus:
    """Texts that prompts are cut from, split by file; or conversations that each give one."""

    train: list[str] | list[list[dict]]
    held_out: list[str] | list[list[dict]]


def load_corpus(path: str | None = None, skip_bad_lines: bool = False) -> Corpus:
    """The default, or a folder or file of text or of JSONL prompts (see `hf.chat.read_prompts`)."""
    if path is None:
        root = Path(sysconfig.get_path("stdlib"))
        return _split(_library_texts(root), str(root))
    root = Path(path)
    if not root.exists():
        raise FileNotFoundError(f"corpus {path} is missing")
    files = sorted(f for f in root.rglob("*") if f.is_file()) if root.is_dir() else [root]
    are_prompts = all(file.suffix == ".jsonl" for file in files)
    texts = {}
    for file in files:
        if are_prompts:
            prompts = enumerate(read_prompts(file, skip_bad_lines))
            texts |= {f"{file.name}:{number}": messages for number, messages in prompts}
        else:
            name = file.relative_to(root.parent)
            text = file.read_text("utf-8", errors="ignore")
            pieces = enumerate(_pieces(text) if len(files) == 1 else [text])
            texts |= {f"{name}:{number:04d}": piece for number, piece in pieces}
    return _split(texts, path)


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


def _split(texts: dict, source: str) -> Corpus:
    """Hold out one text in HELD_OUT_SHARE, chosen by its name."""
    texts = {name: t for name, t in texts.items() if not isinstance(t, str) or t.strip()}
    if not texts:
        raise ValueError(f"{source}: the corpus is empty, nothing to learn from")
    names = {name for name in texts if zlib.crc32(name.encode()) % HELD_OUT_SHARE == 0}
    names = names or {max(texts)}
    train = [texts[name] for name in sorted(texts) if name not in names]
    held_out = [texts[name] for name in sorted(texts) if name in names]
    if not train:
        raise ValueError(f"{source}: holds one text only; two are needed, one to be held out")
    return Corpus(train, held_out)


def pack(texts: list, tokenizer: Tokenizer) -> Tensor:
    """One long row of token ids (n,), the end id after each text; int16 where ids fit."""
    rows = []
    for text in texts:
        if not isinstance(text, str):  # a conversation
            text = "\n\n".join(message["content"] for message in text)
        rows.append(np.array([*tokenizer.encode(text, False), *tokenizer.stop_ids[:1]], np.int32))
    ids = np.concatenate(rows)
    return torch.from_numpy(ids.astype(np.int16) if tokenizer.num_tokens < 2**15 else ids)


class TooLong(ValueError):
    """All prompts are longer than allowed."""


def draw_prompts(texts: list, tokenizer: Tokenizer, count: int, length: int, seed: int) -> list:
    """Draw `count` prompts. From text: `length` tokens from the start of a random line. From
    conversations: each up to its first user turn, unless that is longer than `length` tokens."""
    generator = np.random.default_rng(seed)
    if isinstance(texts[0], str):
        return _prompts_from_text(texts, tokenizer, count, length, generator)
    prompts = [tokenizer.encode(tokenizer.chat(first_turn(messages))) for messages in texts]
    fitting = [ids for ids in prompts if 0 < len(ids) <= length]
    if len(fitting) < len(prompts):
        print(f"{len(prompts) - len(fitting)} prompts longer than {length} tokens left out")
    if not fitting:
        raise TooLong(f"no prompt of at most {length} tokens: allow longer ones")
    if len(fitting) < count:
        print(f"{len(fitting)} prompts are all there are, of {count} wanted")
    return [fitting[i] for i in generator.permutation(len(fitting))[:count]]


def _prompts_from_text(texts: list[str], tokenizer: Tokenizer, count, length, generator) -> list:
    """Cut prompts of `length` tokens from texts drawn with probability proportional to size."""
    texts = [t for t in texts if len(t) >= 4 * length] or texts
    sizes = np.array([len(t) for t in texts], float)
    prompts = []
    for _ in range(50 * count):
        text = texts[generator.choice(len(texts), p=sizes / sizes.sum())]
        start = text.rfind("\n", 0, int(generator.integers(0, len(text)))) + 1
        ids = tokenizer.encode(text[start : start + 8 * length], False)[:length]
        if len(ids) == length:
            prompts.append(ids)
        if len(prompts) == count:
            return prompts
    raise ValueError(f"the corpus is too short for {count} prompts of {length} tokens")


@dataclass
class References:
    """n texts that the target wrote, each a prompt and a response."""

    tokens: Tensor  # (n, T) right-padded
    lengths: Tensor  # (n,)
    prompt_lengths: Tensor  # (n,)

    def save(self, path, made_with: dict) -> None:
        write_tensors(path, vars(self) | {"tokens": self.tokens.int()}, {"made_with": made_with})

    @classmethod
    def load(cls, path, made_with: dict | None = None) -> "References":
        """Read references that were made with `made_with`."""
        names = ("tokens", "lengths", "prompt_lengths")
        with open_tensors(path) as file:
            _check_made_with(file.metadata() or {}, made_with or {}, path)
            missing = set(names) - set(file.keys())
            if missing:
                raise ValueError(f"{path} holds no references, it lacks {min(missing)}")
            references = cls(*(file.get_tensor(name).long() for name in names))
        if not references.is_consistent():
            raise ValueError(f"{path}: no references, or their lengths do not fit them")
        return references

    def is_consistent(self) -> bool:
        """Whether there are texts, and lengths that fit them."""
        tokens, lengths, prompt_lengths = self.tokens, self.lengths, self.prompt_lengths
        if tokens.dim() != 2 or not lengths.shape == prompt_lengths.shape == tokens.shape[:1]:
            return False
        fits = (0 <= prompt_lengths) & (prompt_lengths < lengths) & (lengths <= tokens.shape[1])
        return tokens.numel() > 0 and bool(fits.all()) and int(tokens.min()) >= 0

    @classmethod
    def from_lists(cls, prompts: list[list[int]], responses: list[list[int]], pad_id: int):
        """Texts whose response has fewer than two tokens, too few for an anchor, are left out."""
        pairs = [(p, r) for p, r in zip(prompts, responses) if len(r) >= 2]
        if not pairs:
            raise ValueError("nothing to supervise: every response is shorter than two tokens")
        rows = [torch.tensor([*p, *r]) for p, r in pairs]
        tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad_id)
        lengths = torch.tensor([len(row) for row in rows])
        return cls(tokens, lengths, torch.tensor([len(p) for p, _ in pairs]))

    @classmethod
    def from_conversations(cls, conversations: list, tokenizer: Tokenizer, length: int):
        """Each assistant turn that ends within `length` tokens; all before it is its prompt."""
        prompts, responses = [], []
        num_refused = num_too_long = 0
        for messages in conversations:
            try:
                ids, supervised = tokenizer.supervised(messages)
            except ValueError:
                num_refused += 1
                continue
            for start, end in _turns(ids, supervised, tokenizer.stop_ids):
                if end > length:
                    num_too_long += 1
                elif start:
                    prompts.append(ids[:start])
                    responses.append(ids[start:end])
        if num_refused or num_too_long:
            turns = f"{num_too_long} turns that end beyond {length} tokens"
            print(f"left out: {num_refused} conversations without a clear assistant turn, {turns}")
        references = cls.from_lists(prompts, responses, tokenizer.pad_id)
        num_tokens = int((references.lengths - references.prompt_lengths).sum())
        print(f"{num_tokens:,} supervised tokens in {len(references.lengths):,} assistant turns")
        return references


def _check_made_with(metadata: dict, made_with: dict, path) -> None:
    """Check how references were made. Those of a server, with target None, fit any target."""
    try:
        recorded = dict(json.loads(metadata.get("made_with", "{}")))
    except (ValueError, TypeError):
        raise ValueError(f"{path} does not say how it was made") from None
    if "target" in recorded and recorded["target"] is None:
        made_with = made_with | {"target": None}
    check_same(recorded, made_with, path)


def _turns(ids: list[int], supervised: list[bool], stop_ids) -> list[tuple[int, int]]:
    """Start and end of each supervised stretch; it ends after its first stop token, if any."""
    padded = [False, *supervised, False]
    edges = [i for i, (before, after) in enumerate(pairwise(padded)) if before != after]
    turns = []
    for start, end in zip(edges[::2], edges[1::2]):
        stops = [i + 1 for i in range(start, end) if ids[i] in stop_ids]
        turns.append((start, stops[0] if stops else end))
    return turns
