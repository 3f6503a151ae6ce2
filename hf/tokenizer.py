"""From text to token ids and back: a folder's tokenizer.json becomes a `tiktoken.Encoding`.

Byte-level BPE is implemented in the three forms that GPT-2, SmolLM2 and Qwen have. Stop and pad
ids and the chat template come from the files beside it. What is not implemented is an error that
names it.

    pytest tests/hf/test_tokenizer.py
"""

import contextlib
import re
import unicodedata
from dataclasses import dataclass
from pathlib import Path

import tiktoken

from hf.chat import render
from hf.files import model_folder, read_json

# how GPT-2 cuts text into pieces, and the same where every digit has been split off before
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
DIGITS_PATTERN = (
    r"\p{N}|'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?![^\s\p{N}])|\s+"
)


@dataclass(frozen=True)
class Tokenizer:
    """A tiktoken.Encoding with the ids that a run needs, and the chat template."""

    encoding: tiktoken.Encoding
    num_tokens: int
    stop_ids: tuple[int, ...]
    pad_id: int
    special: dict[str, int]
    unknown: int | None  # stands for a byte that has no token; None: such bytes are dropped
    normalise: bool  # NFC, between special tokens
    template: str | None  # Jinja text
    names: dict[str, str]  # bos_token, eos_token, ...

    @property
    def text_ids(self) -> set[int]:
        """Ids that ordinary text is made of."""
        return set(range(self.num_tokens)) - set(self.special.values())

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Return a text's ids. Special tokens spelled out in the text become their ids (where two
        begin alike, the longer one), unless special=False."""
        pattern = "|".join(map(re.escape, sorted(self.special, key=len, reverse=True)))
        ids = []
        for part in re.split(f"({pattern})", text) if special and pattern else [text]:
            if special and part in self.special:
                ids.append(self.special[part])
            else:
                part = unicodedata.normalize("NFC", part) if self.normalise else part
                ids += self.encoding.encode_ordinary(part)
        known = (i if i < self.num_tokens else self.unknown for i in ids)
        return [i for i in known if i is not None]

    def decode(self, ids) -> str:
        """Return the text of any ids; those that are no token stand for no text."""
        pieces = []
        for i in ids:
            with contextlib.suppress(KeyError, OverflowError):
                pieces.append(self.encoding.decode_single_token_bytes(int(i)))
        return b"".join(pieces).decode("utf-8", errors="replace")

    def chat(self, messages: list[dict], add_generation_prompt: bool = True, **options) -> str:
        """Return a conversation as the model's template writes it; without a template, its texts.
        `options` (enable_thinking, tools, ...) pass through to the template."""
        return render(self.template, messages, add_generation_prompt, self.names | options)

    def supervised(self, messages: list[dict]) -> tuple[list[int], list[bool]]:
        """Return a conversation's ids and a mask: True for the ids of the assistant's turns, but
        not of their headers. A turn that the template renders differently when other turns
        follow it (it drops thinking) is not supervised. If no turn is left, that is an error."""
        whole = self.chat(messages, False)
        cuts = [0]  # of the text; every second piece is a turn of the assistant
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self.chat(messages[:i], True)
            after = self.chat(messages[: i + 1], False)
            if after.startswith(before) and whole.startswith(after) and len(before) >= cuts[-1]:
                cuts += [len(before), len(after)]
        ids = []
        mask = []
        for number, (start, end) in enumerate(zip(cuts, [*cuts[1:], None])):
            piece_ids = self.encode(whole[start:end])
            ids += piece_ids
            mask += [number % 2 == 1] * len(piece_ids)
        if not any(mask):
            raise ValueError("nothing to supervise: no assistant turn in the conversation")
        return ids, mask


def load_tokenizer(folder) -> Tokenizer:
    """Read tokenizer.json of a byte-level BPE, stop and pad ids and the chat template."""
    folder = model_folder(str(folder))
    try:
        return _load(folder)
    except (AttributeError, TypeError, KeyError, IndexError) as error:
        source = f"{folder}: tokenizer.json or a file beside it"
        raise ValueError(f"{source} has not the form of a byte-level BPE: {error!r}") from None


def _load(folder: Path) -> Tokenizer:
    source = folder / "tokenizer.json"
    file = read_json(source)
    _check_bpe(file, source)
    model = file["model"]
    special = {token["content"]: token["id"] for token in file.get("added_tokens") or []}
    ids = model["vocab"] | special
    are_ids = all(type(i) is int and 0 <= i < 2**31 for i in ids.values())
    if not are_ids or len(set(ids.values())) < len(ids):
        raise ValueError(f"{source}: ids that are no numbers from 0 on, one for each token")
    vocab = {text: i for text, i in model["vocab"].items() if text not in special}
    _check_merges(model, vocab, source)
    alphabet = byte_alphabet()
    try:
        ranks = {bytes(alphabet[character] for character in text): i for text, i in vocab.items()}
    except KeyError as error:
        raise ValueError(f"{source}: {error} is no byte-level character") from None
    num_tokens = max([*ranks.values(), *special.values()]) + 1
    for byte in range(256):  # a byte without a token gets an id beyond all, replaced by `encode`
        ranks.setdefault(bytes([byte]), num_tokens + byte)
    encoding = tiktoken.Encoding(
        folder.name, pat_str=_pattern(file, source), mergeable_ranks=ranks, special_tokens=special
    )
    stop_ids, pad_id = _stop_and_pad_ids(folder)
    unknown = ids.get(model.get("unk_token"))
    normalise = _normalizers(file) == ["NFC"]
    template, names = _chat_template(folder)
    return Tokenizer(
        encoding, num_tokens, stop_ids, pad_id, special, unknown, normalise, template, names
    )


def _normalizers(file: dict) -> list[str]:
    normalizer = file.get("normalizer") or {"normalizers": []}
    return [part.get("type") for part in normalizer.get("normalizers", [normalizer])]


def _check_bpe(file: dict, source: Path) -> None:
    normalizers = _normalizers(file)
    if set(normalizers) - {"NFC"}:
        raise ValueError(f"{source}: normalizer {normalizers} is not implemented, only NFC")
    model = file.get("model") or {}
    if model.get("type") != "BPE" or model.get("byte_fallback") or model.get("dropout"):
        raise ValueError(f"{source}: only byte-level BPE is implemented")
    for token in file.get("added_tokens") or []:
        if token.get("lstrip") or token.get("rstrip") or token.get("single_word"):
            problem = f"{token['content']!r} with lstrip, rstrip or single_word"
            raise ValueError(f"{source}: added token {problem} is not implemented")


def _check_merges(model: dict, vocab: dict[str, int], source: Path) -> None:
    """tiktoken merges the pair whose token has the lowest id. This is what the file says only if
    its merges have rising ids and make every token."""
    merges = [merge if isinstance(merge, list) else merge.split(" ") for merge in model["merges"]]
    merged = ["".join(merge) for merge in merges]
    order = [vocab[text] for text in merged if text in vocab]
    if order != sorted(order):
        raise ValueError(f"{source}: merges whose ids do not rise are not implemented")
    unmade = {text for text in vocab if len(text) > 1} - set(merged)
    if unmade and not model.get("ignore_merges"):
        raise ValueError(f"{source}: {min(unmade)!r} is a token that no merge makes")


def byte_alphabet() -> dict[str, int]:
    """Return the printable stand-in of each byte in byte-level BPE files: {character: byte}."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    stand_ins = iter(range(256, 512))
    return {chr(byte if byte in printable else next(stand_ins)): byte for byte in range(256)}


def _pattern(file: dict, source: Path) -> str:
    """Return the regular expression that cuts text into pieces, a digit splitter folded in."""
    stages = file.get("pre_tokenizer") or {}
    stages = stages.get("pretokenizers", [stages])
    kinds = [stage.get("type") for stage in stages]
    first, last = stages[0], stages[-1]
    if kinds[-1] == "ByteLevel" and not last.get("add_prefix_space"):
        use_regex = last.get("use_regex", True)
        if kinds == ["ByteLevel"] and use_regex:
            return GPT2_PATTERN
        if kinds == ["Digits", "ByteLevel"] and use_regex and first.get("individual_digits"):
            return DIGITS_PATTERN
        if kinds == ["Split", "ByteLevel"] and not use_regex:
            regex = first.get("pattern", {}).get("Regex")
            if regex and first.get("behavior") == "Isolated" and not first.get("invert"):
                return f"{regex}|(?:(?!{regex})[\\s\\S])+"  # other text is a piece, too
    raise ValueError(f"{source}: pre_tokenizer {kinds} is not implemented in this form")


def _read_if_there(path: Path) -> dict:
    return read_json(path) if path.is_file() else {}


def _stop_and_pad_ids(folder: Path) -> tuple[tuple[int, ...], int]:
    """Read the ids from config.json and generation_config.json; the latter wins."""
    config = _read_if_there(folder / "config.json")
    config |= _read_if_there(folder / "generation_config.json")
    stop = config.get("eos_token_id")
    if not isinstance(stop, list):
        stop = [] if stop is None else [stop]
    pad = config.get("pad_token_id")
    if pad in (None, -1):
        pad = stop[0] if stop else 0
    if not all(type(i) is int and i >= 0 for i in [*stop, pad]):
        raise ValueError(f"{folder}: eos_token_id {stop} or pad_token_id {pad!r} is no id")
    return tuple(stop), pad


def _chat_template(folder: Path) -> tuple[str | None, dict[str, str]]:
    """Read the template, and the names of special tokens that it may use. A file of its own wins
    over the one in tokenizer_config.json."""
    config = _read_if_there(folder / "tokenizer_config.json")
    tokens = {name: value for name, value in config.items() if name.endswith("_token")}
    texts = {name: t.get("content") if isinstance(t, dict) else t for name, t in tokens.items()}
    names = {name: text for name, text in texts.items() if isinstance(text, str)}
    template = config.get("chat_template")
    if isinstance(template, list):  # several by name
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    path = folder / "chat_template.jinja"
    if path.is_file():
        template = path.read_text("utf-8")
    return template, names
