"""From text to token ids and back: a folder's tokenizer.json becomes a `tiktoken.Encoding`.

Byte-level BPE is implemented in the three forms that GPT-2, SmolLM2 and Qwen have. Stop and pad
ids and the chat template come from the files beside it. What is not implemented is an error that
names it. What stands before raw text (a BOS) is added to raw text alone: a chat template writes
all that a chat needs.

    pytest tests/hf/test_tokenizer.py
"""

import contextlib
import hashlib
import re
import unicodedata
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path

import tiktoken

from hf.chat import (
    Conversation,
    check_shown,
    generation_pieces,
    has_generation_tag,
    read_template_args,
    reasoning_of,
    render,
    tools_of,
)
from hf.files import model_folder, read_json

# how GPT-2 cuts text into pieces, and the same where every digit has been split off before
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
DIGITS_PATTERN = (
    r"\p{N}|'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?![^\s\p{N}])|\s+"
)
# why a turn of the assistant is not supervised
NO_TURN = "no assistant turn"
NO_PROMPT = "nothing stands before the assistant's turn"
NO_HEADER = "the turn does not begin as the chat template prompts for one"
REWRITTEN = "the chat template writes the turn differently when others follow"
OWN_TEXT = "the chat template writes text of its own in front of the answer"
NO_TEXT = "the chat template writes nothing in the turn that is the assistant's"
NO_WEIGHT = "the turn has weight 0"
PROBE = "\ufdd1"  # stands for a reasoning; Unicode keeps it out of texts


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
    tokenizer_hash: str  # of tokenizer.json
    tool_template: str | None = None  # Jinja text for chats with tools, where it is another
    template_args: dict = field(default_factory=dict)  # variables of the template
    bos: str = ""  # special tokens before raw text

    @property
    def bos_ids(self) -> list[int]:
        """Ids that stand before raw text."""
        return self.encode(self.bos)

    @property
    def template_hash(self) -> str:
        """A number that tells one chat template from another; empty without a template."""
        text = (self.template or "") + (self.tool_template or "")
        return _hash(text.encode()) if text else ""

    @property
    def text_ids(self) -> set[int]:
        """Ids that ordinary text is made of."""
        return set(range(self.num_tokens)) - set(self.special.values())

    @property
    def template_facts(self) -> dict:
        """What a drafter's folder records of the chats that it was trained on."""
        return {"chat_template": self.template_hash, "chat_template_args": self.template_args}

    def template_names(self, name: str) -> bool:
        """Whether a variable or a function is named in the chat templates."""
        return name in (self.template or "") + (self.tool_template or "")

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
        return self.bytes_of(ids).decode("utf-8", errors="replace")

    def bytes_of(self, ids) -> bytes:
        """Return the text of any ids as UTF-8, which may begin or end in the middle of a
        character."""
        pieces = []
        for i in ids:
            with contextlib.suppress(KeyError, OverflowError):
                pieces.append(self.encoding.decode_single_token_bytes(int(i)))
        return b"".join(pieces)

    def chat(self, messages: list[dict], add_generation_prompt: bool = True, **options) -> str:
        """Return a conversation as the model's template writes it; without a template, its texts
        after the BOS. `options` (enable_thinking, tools, ...) pass through to the template."""
        names = self._names(messages) | options
        template = self._template(names["tools"])
        text = render(template, messages, add_generation_prompt, names)
        return text if template else self.bos + text

    def _names(self, messages: list[dict]) -> dict:
        return self.names | self.template_args | {"tools": tools_of(messages)}

    def check_shown(self, messages: list[dict]) -> None:
        """Raise a ValueError if a conversation carries what the template never looks at."""
        check_shown(self._template(tools_of(messages)), messages)

    def _template(self, tools: list[dict] | None) -> str | None:
        return self.template if tools is None else self.tool_template or self.template

    def supervised(self, messages: list[dict]) -> tuple[list[int], list[bool]]:
        """Return a conversation's ids and a mask: True for the ids of the assistant's turns, but
        not of their headers. If no turn is left, that is an error."""
        ids, mask, reasons = self.turns(messages)
        if not any(mask):
            raise ValueError(f"nothing to supervise: {reasons[0]}")
        return ids, mask

    def turns(self, messages: list[dict]) -> tuple[list[int], list[bool], list[str]]:
        """Return what `supervised` does, and for each assistant turn that is not supervised the
        reason. Generation tags of the template say which text of a turn is supervised."""
        whole = self.chat(messages, False)
        self.check_shown(messages)
        is_tagged = has_generation_tag(self._template(tools_of(messages)))
        blocks = self._blocks(messages) if is_tagged else [(0, len(whole))]
        cuts = [0]
        reasons = []
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        for i in turns:
            try:
                cuts += self._turn_cuts(messages, i, whole, blocks, cuts[-1])
            except ValueError as error:
                reasons.append(str(error))
        pieces = [whole[start:end] for start, end in pairwise([*cuts, None])]
        ids, mask = self._overlapping(pieces) if is_tagged else self._one_by_one(pieces)
        return ids, mask, reasons if turns else [NO_TURN]

    def _blocks(self, messages: list[dict]) -> list[tuple[int, int]]:
        """Return where the generation blocks of a conversation's text begin and end."""
        names = self._names(messages)
        pieces = generation_pieces(self._template(names["tools"]), messages, names)
        ends = list(accumulate(map(len, pieces)))
        return list(zip(ends[::2], ends[1::2]))

    def _turn_cuts(self, messages: list[dict], i: int, whole: str, blocks, end: int) -> list[int]:
        """Return where to cut the text of a conversation, so that what the assistant wrote in turn
        i, in these blocks, is apart; `end`: of the turn before. Raise a ValueError that says why it
        is not supervised."""
        if messages[i].get("weight") == 0:
            raise ValueError(NO_WEIGHT)
        if i == 0:
            raise ValueError(NO_PROMPT)
        tools = tools_of(messages)
        turns = Conversation(messages[: i + 1], tools)
        before = self.chat(Conversation(messages[:i], tools))
        after = self.chat(turns, False)
        if not after.startswith(before):
            raise ValueError(NO_HEADER)
        if not whole.startswith(after) or len(before) < end:
            raise ValueError(REWRITTEN)
        spans = [(max(start, len(before)), min(stop, len(after))) for start, stop in blocks]
        cuts = [cut for start, stop in spans if start < stop for cut in (start, stop)]
        if not cuts:
            raise ValueError(NO_TEXT)
        if self._adds_text(turns, after, cuts[0]):
            raise ValueError(OWN_TEXT)
        return cuts

    def _adds_text(self, messages: Conversation, text: str, start: int) -> bool:
        """Whether the last turn of a text, from `start` on, begins with what its message does not
        hold. Reasoning and tool calls stand in a frame, which may not be empty."""
        message = messages[-1]
        reasoning = reasoning_of(message).strip()
        if reasoning and reasoning in text[start:]:
            return False
        if message["content"].strip():
            return not text[start:].lstrip().startswith(message["content"].strip())
        framed = [*messages[:-1], message | {"reasoning_content": PROBE}]
        framed = self.chat(Conversation(framed, messages.tools), False)
        return framed.find(PROBE) >= start and framed.replace(PROBE, "") == text

    def _one_by_one(self, pieces: list[str]) -> tuple[list[int], list[bool]]:
        """Return the ids of a text in pieces, and True for ids of every second one."""
        rows = [self.encode(piece) for piece in pieces]
        mask = [number % 2 == 1 for number, row in enumerate(rows) for _ in row]
        return [i for row in rows for i in row], mask

    def _overlapping(self, pieces: list[str]) -> tuple[list[int], list[bool]]:
        """Return the ids of a text in pieces, and True for ids that reach into a second one."""
        ids = self.encode("".join(pieces))
        is_inside = bytearray()
        for number, piece in enumerate(pieces):
            is_inside += bytes([number % 2]) * sum(self._sizes(self.encode(piece)))
        mask = []
        start = 0
        for size in self._sizes(ids):
            mask.append(any(is_inside[start : start + size]))
            start += size
        return ids, mask

    def _sizes(self, ids: list[int]) -> list[int]:
        """How many bytes of text each id stands for."""
        return [len(self.encoding.decode_single_token_bytes(i)) for i in ids]


def load_tokenizer(folder, template_args: str = "") -> Tokenizer:
    """Read tokenizer.json of a byte-level BPE, stop and pad ids and the chat template.
    template_args: the JSON object of --chat-template-args, variables of the template."""
    folder = model_folder(str(folder))
    try:
        return _load(folder, template_args)
    except (AttributeError, TypeError, KeyError, IndexError) as error:
        source = f"{folder}: tokenizer.json or a file beside it"
        raise ValueError(f"{source} has not the form of a byte-level BPE: {error!r}") from None


def _load(folder: Path, template_args: str) -> Tokenizer:
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
    templates, names = _chat_templates(folder)
    template = templates.get("default")
    stop_ids, pad_id = _stop_and_pad_ids(folder, num_tokens, ids.get(names.get("eos_token")))
    return Tokenizer(
        encoding=encoding,
        num_tokens=num_tokens,
        stop_ids=stop_ids,
        pad_id=pad_id,
        special=special,
        unknown=ids.get(model.get("unk_token")),
        normalise=_normalizers(file) == ["NFC"],
        template=template,
        names=names,
        tokenizer_hash=_hash(source.read_bytes()),
        tool_template=templates.get("tool_use"),
        template_args=read_template_args(template_args, template, templates.get("tool_use")),
        bos=_bos(file, special, source),
    )


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


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


def _bos(file: dict, special: dict[str, int], source: Path) -> str:
    """Return the special tokens that the post_processor puts before a text, spelled out."""
    processor = file.get("post_processor") or {"processors": []}
    parts = processor.get("processors", [processor])
    adding = [p for p in parts if p.get("type") != "ByteLevel"]  # it moves offsets, adds no token
    if not adding:
        return ""
    kinds = [part.get("type") for part in adding]
    if kinds != ["TemplateProcessing"]:
        raise ValueError(f"{source}: post_processor {kinds} is not implemented")
    [part] = adding
    *front, last = part["single"]
    names = [entry["SpecialToken"]["id"] for entry in front if "SpecialToken" in entry]
    if len(names) < len(front) or "Sequence" not in last:
        raise ValueError(f"{source}: post_processor with tokens after a text: not implemented")
    tokens = [part["special_tokens"][name] for name in names]
    texts = [text for token in tokens for text in token["tokens"]]
    if [special.get(text) for text in texts] != [i for token in tokens for i in token["ids"]]:
        raise ValueError(f"{source}: post_processor adds {texts}, which are no added tokens")
    return "".join(texts)


def _stop_and_pad_ids(folder: Path, num_tokens: int, eos: int | None) -> tuple[tuple, int]:
    """Read the ids from the first of generation_config.json, config.json and its text_config that
    has them; without any, the stop id is the tokenizer's own eos."""
    config = _read_if_there(folder / "config.json")
    inner = config.get("text_config") or {}
    sources = (_read_if_there(folder / "generation_config.json"), config, inner)
    num_ids = max(num_tokens, *(source.get("vocab_size") or 0 for source in sources))
    stop = _first_of("eos_token_id", sources)
    if stop is None:
        stop = [] if eos is None else eos
    stop = stop if isinstance(stop, list) else [stop]
    pad = _first_of("pad_token_id", sources)
    if pad in (None, -1):
        pad = stop[0] if stop else 0
    for name, ids in (("eos_token_id", stop), ("pad_token_id", [pad])):
        if not all(type(i) is int and 0 <= i < num_ids for i in ids):
            problem = f"{name} {ids} is not among the {num_ids} ids of the vocabulary"
            raise ValueError(f"{folder}: {problem}: mend generation_config.json or config.json")
    if not stop:
        print(f"{folder} names no stop id (eos): texts end at their full length only")
    return tuple(stop), pad


def _first_of(key: str, sources):
    """Return the value of the first source that has one."""
    return next((s[key] for s in sources if s.get(key) not in (None, [])), None)


def _chat_templates(folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Read the templates by name, and the names of special tokens that they may use. Files of
    their own win over tokenizer_config.json."""
    names = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        config = _read_if_there(folder / file)
        tokens = {name: value for name, value in config.items() if name.endswith("_token")}
        texts = {name: t.get("content") if isinstance(t, dict) else t for name, t in tokens.items()}
        names |= {name: text for name, text in texts.items() if isinstance(text, str)}
    templates = config.get("chat_template") or {}
    if isinstance(templates, str):
        templates = {"default": templates}
    if isinstance(templates, list):
        templates = {entry["name"]: entry["template"] for entry in templates}
    files = {path.stem: path for path in folder.glob("additional_chat_templates/*.jinja")}
    if (folder / "chat_template.jinja").is_file():
        files["default"] = folder / "chat_template.jinja"
    templates = {name: path.read_text("utf-8") for name, path in files.items()} or templates
    blank = [name for name, text in templates.items() if not text.strip()]
    if blank:
        raise ValueError(f"{folder}: the chat template {blank[0]} is empty: fill or remove it")
    if templates and "default" not in templates:
        raise ValueError(f"{folder}: chat templates {sorted(templates)}, but none called default")
    return templates, names
