"""What goes in: text, tokenizers, prompts and references.

The default corpus needs no download: the sources of Python's standard library and the prose of
pydoc's topics, split by file into train and held-out. Tokenizers are `tiktoken.Encoding`s, built
from a folder's tokenizer.json; the toy's has the 256 bytes, an end and a pad. A *reference* is a
prompt from the corpus and a response that the TARGET generated, made once and stored, so that
training never learns another model's text.

    pytest tests/test_data.py
"""

import contextlib
import dataclasses
import json
import sys
import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tiktoken
import torch
from torch import Tensor

from files import check_same, open_tensors, read_json, save_tensors

HELD_OUT_SHARE = 20  # one file in this many is held out
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"

# ---------------------------------------------------------------------------------------- tokenizer


@dataclass(frozen=True)
class Tokenizer:
    """A tiktoken.Encoding with the ids that a run needs. `decode` takes any id."""

    encoding: tiktoken.Encoding
    stop_ids: tuple[int, ...]
    pad_id: int
    special_ids: frozenset[int]

    @property
    def num_tokens(self) -> int:
        return self.encoding.n_vocab

    @property
    def text_ids(self) -> set[int]:
        """Ids that ordinary text is made of."""
        return set(range(self.num_tokens)) - self.special_ids

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Special tokens spelled out in the text become their ids, unless special=False."""
        allowed = "all" if special else set()
        return self.encoding.encode(text, allowed_special=allowed, disallowed_special=())

    def decode(self, ids) -> str:
        known = []
        for i in ids:
            with contextlib.suppress(KeyError):  # rows beyond the tokenizer stand for no text
                known.append(self.encoding.decode_single_token_bytes(int(i)))
        return b"".join(known).decode("utf-8", errors="replace")


def byte_alphabet() -> dict[str, int]:
    """The printable stand-in of each byte in byte-level BPE files: character -> byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    stand_ins = iter(range(256, 512))
    return {chr(b if b in plain else next(stand_ins)): b for b in range(256)}


def load_tokenizer(folder) -> Tokenizer:
    """tokenizer.json of a byte-level BPE -> tiktoken; stop and pad ids from the files beside it."""
    folder = Path(folder)
    source = folder / "tokenizer.json"
    file = read_json(source)
    if file.get("model", {}).get("type") != "BPE" or file.get("normalizer"):
        raise ValueError(f"{source}: only byte-level BPE without a normalizer is implemented")
    special = {token["content"]: token["id"] for token in file.get("added_tokens", ())}
    alphabet = byte_alphabet()
    vocab = {text: i for text, i in file["model"]["vocab"].items() if text not in special}
    merged = ["".join(m if isinstance(m, list) else m.split(" ")) for m in file["model"]["merges"]]
    order = [vocab[text] for text in merged if text in vocab]
    if order != sorted(order):
        raise ValueError(f"{source}: merges whose ids do not rise are not implemented")
    try:
        ranks = {bytes(alphabet[c] for c in text): i for text, i in vocab.items()}
    except KeyError as error:
        raise ValueError(f"{source}: {error} is no byte-level character") from None
    stages = file.get("pre_tokenizer") or {}
    stages = stages.get("pretokenizers", [stages])
    plain = dict(type="ByteLevel", add_prefix_space=False, use_regex=True)
    if len(stages) > 1 or any(stages[0].get(k, v) != v for k, v in plain.items()):
        raise ValueError(f"{source}: pre_tokenizer is not implemented, only plain ByteLevel")
    encoding = tiktoken.Encoding(
        folder.name, pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens=special
    )
    generation = folder / "generation_config.json"
    found = read_json(generation if generation.is_file() else folder / "config.json")
    stop = found.get("eos_token_id")
    stop = tuple(stop) if isinstance(stop, list) else () if stop is None else (stop,)
    pad = found.get("pad_token_id")
    pad = pad if pad is not None else (stop or (0,))[0]
    return Tokenizer(encoding, stop, pad, frozenset(special.values()))


# ------------------------------------------------------------------------------- corpus and prompts


@dataclass(frozen=True)
class Corpus:
    """Texts, split by file. `are_prompts`: each is a prompt as it is, else prompts are cut out."""

    train: list[str]
    held_out: list[str]
    are_prompts: bool = False


def _split(named: dict[str, str], source: str, are_prompts: bool = False) -> Corpus:
    named = {name: text for name, text in named.items() if text.strip()}
    if not named:
        raise ValueError(f"{source}: the corpus is empty, nothing to learn from")
    held = {n for n in named if zlib.crc32(n.encode()) % HELD_OUT_SHARE == 0} or {max(named)}
    parts = [[named[n] for n in sorted(named) if (n in held) == wanted] for wanted in (False, True)]
    if not parts[0]:
        raise ValueError(
            f"{source}: holds one text only; two are needed, one of them to be held out"
        )
    return Corpus(*parts, are_prompts)


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
                named[f"{file.name}:{number}"] = first_prompt(messages)
        return _split(named, path, are_prompts=True)
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
                raise ValueError(f"{message} (--skip-bad-lines goes on without it)") from None
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


def first_prompt(messages: list[dict]) -> str:
    """What a model without a chat template continues: system text and the first user's turn."""
    first = next((i for i, m in enumerate(messages) if m["role"] == "user"), 0)
    return "\n\n".join(m["content"] for m in messages[: first + 1])


def pack(texts: list[str], tokenizer: Tokenizer) -> Tensor:
    """One long row of token ids (int16 or int32 to stay small), the end id after each text."""
    end = tokenizer.stop_ids[:1]
    ids = np.concatenate([np.array([*tokenizer.encode(t, False), *end], np.int32) for t in texts])
    return torch.from_numpy(ids.astype(np.int16) if tokenizer.num_tokens < 2**15 else ids)


def draw_prompts(
    texts: list[str], tokenizer: Tokenizer, count: int, length: int, seed: int, are_prompts=False
) -> list[list[int]]:
    """`count` prompts. From running text: `length` tokens from the start of a random line, texts
    weighted by size. From prompts: each as it is, those longer than `length` tokens left out and
    counted."""
    generator = np.random.default_rng(seed)
    if are_prompts:
        encoded = [tokenizer.encode(text) for text in texts]
        fitting = [ids for ids in encoded if 0 < len(ids) <= length]
        if len(fitting) < len(encoded):
            print(f"{len(encoded) - len(fitting)} prompts longer than {length} tokens left out")
        if not fitting:
            raise ValueError(f"no prompt of at most {length} tokens: raise --prompt-length")
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
        tensors = dict(
            tokens=self.tokens.int(), lengths=self.lengths, prompt_lengths=self.prompt_lengths
        )
        save_tensors(path, tensors, {"made_with": made_with})

    @classmethod
    def load(cls, path, made_with: dict | None = None) -> "References":
        with open_tensors(path) as file:
            stored = json.loads((file.metadata() or {}).get("made_with", "{}"))
            check_same(stored, made_with or {}, path)
            parts = {f.name: file.get_tensor(f.name) for f in dataclasses.fields(cls)}
        return cls(parts["tokens"].long(), parts["lengths"].long(), parts["prompt_lengths"].long())

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
