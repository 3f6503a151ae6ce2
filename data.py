"""What goes in: text, tokenizers, prompts, references, and the flags and files of a run.

The default corpus needs no download: the sources of Python's standard library and the prose of
pydoc's topics, split by file into train and held-out. Tokenizers are `tiktoken.Encoding`s, built
from a folder's tokenizer.json; the toy's has the 256 bytes, an end and a pad. A *reference* is a
prompt from the corpus and a response that the TARGET generated, made once and stored, so that
training never learns another model's text.

    pytest tests/test_data.py
"""

import argparse
import contextlib
import dataclasses
import difflib
import json
import os
import sys
import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tiktoken
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

HELD_OUT_SHARE = 20  # one file in this many is held out
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"

# ------------------------------------------------------------------------------------ files, safely


@contextlib.contextmanager
def atomic(path):
    """Write to a temporary name beside `path`, then rename: never half of a file is seen."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def check_same(found: dict, wanted: dict, source) -> None:
    """What was made before must have been made alike; the first field that differs is named."""
    for key, value in wanted.items():
        if found.get(key) != value:
            raise ValueError(
                f"{source} was made with {key} = {found.get(key)!r}, this run has {value!r}: "
                "choose another --out or remove it"
            )


def write_json(path, value) -> None:
    with atomic(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path) -> dict:
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing" + ("" if path.parent.is_dir() else ": no such folder")
        )
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no JSON object")
    return found


def save_tensors(path, tensors: dict[str, Tensor], metadata: dict | None = None) -> None:
    metadata = {"format": "pt"} | {k: json.dumps(v) for k, v in (metadata or {}).items()}
    with atomic(path) as temporary:
        save_file({k: v.detach().contiguous() for k, v in tensors.items()}, temporary, metadata)


def open_tensors(path):
    """`safetensors.safe_open` with errors that name the file."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path} is missing")
    try:
        return safe_open(path, "pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is damaged or no safetensors file: {error}") from None


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


# --------------------------------------------------------------------------------- flags and errors


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        print(f"{self.prog}: error: {message} (see --help)", file=sys.stderr)
        raise SystemExit(2)


def flag(default, text: str, **metadata):
    """A config field with its help text: the one place where its default stands. `low`: the least
    value it may have; `choices`: all it may be."""
    return dataclasses.field(default=default, metadata={"help": text} | metadata)


def check_low(config) -> None:
    for field in dataclasses.fields(config):
        low, value = field.metadata.get("low"), getattr(config, field.name)
        if low is not None and not low <= value < float("inf"):
            raise ValueError(f"--{field.name.replace('_', '-')} {value}: at least {low} is needed")


def _suggest(word: str, known) -> str:
    close = difflib.get_close_matches(word, list(known), 1)
    return f", did you mean {close[0]}?" if close else ""


def check_values(found: dict, config_class, source: str) -> None:
    """An unknown key of our own run config or a value of another kind is an error naming it."""
    known = {f.name: f for f in dataclasses.fields(config_class)}
    for key, value in found.items():
        if key not in known:
            raise ValueError(f"{source}: unknown key {key!r}{_suggest(key, known)}")
        kind, choices = type(known[key].default), known[key].metadata.get("choices")
        kinds = {float: (int, float), tuple: (list, tuple)}.get(kind, (kind,))
        if not isinstance(value, kinds) or (kind is not bool and isinstance(value, bool)):
            raise ValueError(f"{source}: {key} = {value!r} is no {kind.__name__}")
        if choices and value not in choices:
            raise ValueError(f"{source}: {key} = {value!r}; there is {', '.join(choices)}")


def parse_flags(config_class, description: str, argv=None, presets: dict | None = None):
    """Flags of a frozen dataclass. Of defaults, --preset, --config FILE, flags the last wins."""
    style = argparse.RawDescriptionHelpFormatter
    parser = _Parser(description=description, formatter_class=style, allow_abbrev=False)
    parser.add_argument("--config", metavar="FILE", help="a run config, as a run saves in run.json")
    if presets:
        parser.add_argument("--preset", choices=list(presets), help="a set of flags by name")
    for field in dataclasses.fields(config_class):
        kind, name = type(field.default), "--" + field.name.replace("_", "-")
        text = f"{field.metadata['help']} (default: {field.default})".replace("%", "%%")
        options = dict(default=argparse.SUPPRESS, help=text)
        if kind is bool:
            parser.add_argument(name, action=argparse.BooleanOptionalAction, **options)
        elif kind is tuple:
            parser.add_argument(name, nargs="+", **options)
        else:
            choices = field.metadata.get("choices")
            parser.add_argument(name, type=kind, choices=choices, **options)
    given, unknown = parser.parse_known_args(argv)
    if unknown:
        known = [o for a in parser._actions for o in a.option_strings]
        parser.error(f"unknown argument {unknown[0]}{_suggest(unknown[0], known)}")
    given = vars(given)
    values = dict((presets or {}).get(given.pop("preset", None), {}))
    if config_path := given.pop("config", None):
        found = read_json(config_path)
        check_values(found, config_class, config_path)
        values |= found
    config = config_class(**values | given)
    device = getattr(config, "device", "cpu")
    if device.split(":")[0] not in ("cpu", "cuda"):
        raise ValueError(f"--device {device}: there is cpu, and cuda where a GPU is")
    if device != "cpu" and not torch.cuda.is_available():
        raise ValueError(f"--device {device}: this torch sees no CUDA device")
    return config


def exit_code(main) -> int:
    """Run main(); anything a user can cause ends in one line and exit code 2."""
    try:
        main()
        return 0
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:
        if os.environ.get("SPECOPD_TRACEBACK"):
            raise
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
