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
import functools
import json
import re
import sys
import sysconfig
import unicodedata
import zlib
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import jinja2
import jinja2.sandbox
import numpy as np
import tiktoken
import torch
from torch import Tensor

from checkpoint import checkpoint_folder, open_tensors, save_tensors
from files import check_same, read_json, write_json

HELD_OUT_SHARE = 20  # one file in this many is held out
# how GPT-2 cuts text into pieces, and the same where every digit has been split off before
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
DIGITS_PATTERN = (
    r"\p{N}|'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?![^\s\p{N}])|\s+"
)

# ---------------------------------------------------------------------------------------- tokenizer


@dataclass(frozen=True)
class Tokenizer:
    """A tiktoken.Encoding with the ids that a run needs, and the chat template. `decode` takes any
    id."""

    encoding: tiktoken.Encoding
    num_tokens: int
    stop_ids: tuple[int, ...]
    pad_id: int
    special: dict[str, int]
    unknown: int | None = None  # stands for a byte that has no token; None: such bytes are dropped
    normalise: bool = False  # NFC, between special tokens
    template: str | None = None  # Jinja text
    names: dict[str, str] = dataclasses.field(default_factory=dict)  # bos_token, eos_token, ...

    @property
    def text_ids(self) -> set[int]:
        """Ids that ordinary text is made of."""
        return set(range(self.num_tokens)) - set(self.special.values())

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Special tokens spelled out in the text become their ids (of two, the longer one), unless
        special=False."""
        marks = "|".join(map(re.escape, sorted(self.special, key=len, reverse=True)))
        ids = []
        for part in re.split(f"({marks})", text) if special and marks else [text]:
            if special and part in self.special:
                ids.append(self.special[part])
            else:
                part = unicodedata.normalize("NFC", part) if self.normalise else part
                ids += self.encoding.encode_ordinary(part)
        known = (i if i < self.num_tokens else self.unknown for i in ids)
        return [i for i in known if i is not None]

    def decode(self, ids) -> str:
        known = []
        for i in ids:
            with contextlib.suppress(KeyError, OverflowError):  # rows beyond stand for no text
                known.append(self.encoding.decode_single_token_bytes(int(i)))
        return b"".join(known).decode("utf-8", errors="replace")

    def chat(self, messages: list[dict], add_generation_prompt: bool = True, **options) -> str:
        """A conversation in the checkpoint's own words; without a template, their texts.
        `options` (enable_thinking, tools, ...) pass through to the template."""
        if self.template is None:
            return "\n\n".join(m["content"] for m in messages)
        try:
            template = _template(self.template)
            given = {"messages": messages, "add_generation_prompt": add_generation_prompt}
            given |= {"tools": None, "documents": None} | options
            return template.render(**self.names, **given)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template refuses: {error}") from None

    def supervised(self, messages: list[dict], **options) -> tuple[list[int], list[bool]]:
        """A conversation's ids, and True for those of the assistant's turns: what stands in the
        text with the turn and not without it. A turn that the template renders otherwise once more
        follows (dropped thinking) is left unsupervised; none at all is an error."""
        whole = self.chat(messages, False, **options)
        ids, mask, done = [], [], 0
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self.chat(messages[:i], True, **options)
            after = self.chat(messages[: i + 1], False, **options)
            if not (after.startswith(before) and whole.startswith(after) and len(before) >= done):
                continue
            start, end = len(before), len(after)
            for text, wanted in ((whole[done:start], False), (whole[start:end], True)):
                part = self.encode(text)
                ids, mask, done = ids + part, mask + [wanted] * len(part), len(after)
        part = self.encode(whole[done:])
        if not any(mask):
            raise ValueError("nothing to supervise: no assistant turn in the conversation")
        return ids + part, mask + [False] * len(part)


@functools.lru_cache
def _template(text: str) -> jinja2.Template:
    """A compiled chat template, sandboxed, in the environment that templates are written for."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )

    def refuse(message):
        raise jinja2.TemplateError(message)

    def to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                          sort_keys=sort_keys)  # fmt: skip

    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(text)


def byte_alphabet() -> dict[str, int]:
    """The printable stand-in of each byte in byte-level BPE files: character -> byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    stand_ins = iter(range(256, 512))
    return {chr(b if b in plain else next(stand_ins)): b for b in range(256)}


def _pattern(file: dict, source) -> str:
    """The regular expression that cuts text into pieces before BPE, a digit splitter folded in."""
    stages = file.get("pre_tokenizer") or {}
    stages = stages.get("pretokenizers", [stages])
    kinds = [stage.get("type") for stage in stages]
    last = stages[-1]
    own_regex = last.get("use_regex", True)
    if kinds[-1] == "ByteLevel" and not last.get("add_prefix_space"):
        if kinds == ["ByteLevel"] and own_regex:
            return GPT2_PATTERN
        if kinds == ["Digits", "ByteLevel"] and own_regex and stages[0].get("individual_digits"):
            return DIGITS_PATTERN
        if kinds == ["Split", "ByteLevel"] and not own_regex:
            split = stages[0]
            if split.get("behavior") == "Isolated" and not split.get("invert"):
                if regex := split.get("pattern", {}).get("Regex"):
                    return f"{regex}|(?:(?!{regex})[\\s\\S])+"  # what it leaves out stays too
    raise ValueError(f"{source}: pre_tokenizer {kinds} is not implemented in this form")


def write_byte_tokenizer(folder) -> None:
    """The toy's tokenizer files, as transformers reads them too: bytes, end 256, pad 257."""
    special = {"<|endoftext|>": 256, "<|pad|>": 257}
    flags = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
    level = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=True)
    model = {"type": "BPE", "vocab": byte_alphabet() | special, "merges": []}
    added = [{"id": i, "content": text} | flags for text, i in special.items()]
    write_json(
        Path(folder) / "tokenizer.json",
        {"version": "1.0", "added_tokens": added, "normalizer": None, "pre_tokenizer": level,
         "post_processor": None, "decoder": level, "model": model},
    )  # fmt: skip
    names = {"eos_token": "<|endoftext|>", "pad_token": "<|pad|>"}
    names["tokenizer_class"] = "PreTrainedTokenizerFast"
    write_json(Path(folder) / "tokenizer_config.json", names)
    write_json(Path(folder) / "generation_config.json", {"eos_token_id": 256, "pad_token_id": 257})


def load_tokenizer(folder) -> Tokenizer:
    """tokenizer.json of a byte-level BPE -> tiktoken; stop and pad ids and template from the files
    beside it."""
    folder = checkpoint_folder(str(folder))
    source = folder / "tokenizer.json"
    file = read_json(source)
    model = file.get("model") or {}
    normalizer = file.get("normalizer") or {}
    kinds = [n.get("type") for n in normalizer.get("normalizers", [normalizer] * bool(normalizer))]
    if set(kinds) - {"NFC"}:
        raise ValueError(f"{source}: normalizer {kinds} is not implemented, only NFC")
    if model.get("type") != "BPE" or model.get("byte_fallback") or model.get("dropout"):
        raise ValueError(f"{source}: only byte-level BPE is implemented")
    added = file.get("added_tokens") or []
    for token in added:
        if token.get("lstrip") or token.get("rstrip") or token.get("single_word"):
            raise ValueError(f"{source}: added token {token['content']!r} with lstrip, rstrip or "
                             "single_word is not implemented")  # fmt: skip
    special = {token["content"]: token["id"] for token in added}
    alphabet = byte_alphabet()
    vocab = {text: i for text, i in model["vocab"].items() if text not in special}
    merged = ["".join(m if isinstance(m, list) else m.split(" ")) for m in model["merges"]]
    order = [vocab[text] for text in merged if text in vocab]
    if order != sorted(order):
        raise ValueError(f"{source}: merges whose ids do not rise are not implemented")
    try:
        ranks = {bytes(alphabet[c] for c in text): i for text, i in vocab.items()}
    except KeyError as error:
        raise ValueError(f"{source}: {error} is no byte-level character") from None
    loose = {text for text in vocab if len(text) > 1} - set(merged)
    if loose and not model.get("ignore_merges"):
        raise ValueError(f"{source}: {min(loose)!r} is a token that no merge makes")
    count = max([*ranks.values(), *special.values()]) + 1
    unknown = vocab.get(model.get("unk_token"), special.get(model.get("unk_token")))
    for byte in range(256):  # a byte without a token gets an id beyond all, replaced by `encode`
        ranks.setdefault(bytes([byte]), count + byte)
    encoding = tiktoken.Encoding(
        folder.name, pat_str=_pattern(file, source), mergeable_ranks=ranks, special_tokens=special
    )
    generation, own = folder / "generation_config.json", folder / "tokenizer_config.json"
    found = {}
    for path in (folder / "config.json", generation):  # the later one wins
        found |= read_json(path) if path.is_file() else {}
    stop = found.get("eos_token_id")
    stop = tuple(stop) if isinstance(stop, list) else () if stop is None else (stop,)
    pad = found.get("pad_token_id")
    pad = pad if pad is not None else (stop or (0,))[0]
    own = read_json(own) if own.is_file() else {}
    names = {k: v.get("content") if isinstance(v, dict) else v for k, v in own.items()}
    names = {k: v for k, v in names.items() if k.endswith("_token") and isinstance(v, str)}
    template, jinja = own.get("chat_template"), folder / "chat_template.jinja"
    if isinstance(template, list):  # several by name
        template = next((t["template"] for t in template if t["name"] == "default"), None)
    if jinja.is_file():
        template = jinja.read_text("utf-8")
    composed = kinds == ["NFC"]
    return Tokenizer(encoding, count, stop, pad, special, unknown, composed, template, names)


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
        tensors = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        tensors["tokens"] = self.tokens.int()
        save_tensors(path, tensors, {"made_with": made_with})

    @classmethod
    def load(cls, path, made_with: dict | None = None) -> "References":
        with open_tensors(path) as file:
            stored = json.loads((file.metadata() or {}).get("made_with", "{}"))
            unseen = {"target": None} if stored.get("target", 0) is None else {}  # a server's
            check_same(stored, (made_with or {}) | unseen, path)
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
            print(f"left out: {refused} conversations without an assistant turn that can be told "
                  f"apart, {too_long} turns that end beyond {length} tokens")  # fmt: skip
        found = cls.from_lists(prompts, responses, tokenizer.pad_id)
        print(f"{int((found.lengths - found.prompt_lengths).sum()):,} supervised tokens in "
              f"{len(found.lengths):,} assistant turns")  # fmt: skip
        return found
