"""From text to token ids and back: a folder's tokenizer.json as a `tiktoken.Encoding`, its stop and
pad ids, its chat template.

Byte-level BPE in the three forms that GPT-2, SmolLM2 and Qwen have; the toy's tokenizer has the 256
bytes, an end and a pad. What is not implemented is refused by name, never passed over.

    pytest tests/test_tokenizer.py
"""

import contextlib
import dataclasses
import functools
import json
import re
import unicodedata
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import jinja2
import jinja2.sandbox
import tiktoken

from hf.tensors import checkpoint_folder
from support.files import read_json, write_json

# how GPT-2 cuts text into pieces, and the same where every digit has been split off before
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
DIGITS_PATTERN = (
    r"\p{N}|'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?![^\s\p{N}])|\s+"
)


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
        except Exception as error:  # a template is code, and raises what it likes
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
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

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
        {
            "version": "1.0",
            "added_tokens": added,
            "normalizer": None,
            "pre_tokenizer": level,
            "post_processor": None,
            "decoder": level,
            "model": model,
        },
    )
    names = {"eos_token": "<|endoftext|>", "pad_token": "<|pad|>"}
    names["tokenizer_class"] = "PreTrainedTokenizerFast"
    write_json(Path(folder) / "tokenizer_config.json", names)
    write_json(Path(folder) / "generation_config.json", {"eos_token_id": 256, "pad_token_id": 257})


def load_tokenizer(folder) -> Tokenizer:
    """tokenizer.json of a byte-level BPE -> tiktoken; stop and pad ids and template from the files
    beside it."""
    folder = checkpoint_folder(str(folder))
    try:
        return _loaded(folder)
    except (AttributeError, TypeError, KeyError, IndexError) as error:
        raise ValueError(
            f"{folder}: tokenizer.json or a file beside it is not of the form of a "
            f"byte-level BPE: {error!r}"
        ) from None


def _loaded(folder: Path) -> Tokenizer:
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
            raise ValueError(
                f"{source}: added token {token['content']!r} with lstrip, rstrip or "
                "single_word is not implemented"
            )
    special = {token["content"]: token["id"] for token in added}
    ids = {**model["vocab"], **special}
    if not all(type(i) is int and 0 <= i < 2**31 for i in ids.values()) or (
        len({*ids.values()}) < len(ids)
    ):
        raise ValueError(f"{source}: ids that are no numbers from 0 on, one for each token")
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
    pad = pad if pad not in (None, -1) else (stop or (0,))[0]
    if not all(type(i) is int and i >= 0 for i in (*stop, pad)):
        raise ValueError(f"{folder}: eos_token_id {stop} or pad_token_id {pad!r} is no id")
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
