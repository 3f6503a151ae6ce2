"""Conversations: read prompts from files, and render a conversation as a model's template says.

A conversation is a list of messages {"role", "content", ...}, and the tools that go with them. A
chat template is a Jinja program that comes with a model; it runs in a sandbox, because it is
somebody else's code.

    pytest tests/hf/test_chat.py
"""

import codecs
import difflib
import functools
import gzip
import json
import re
import sys
import zlib
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import jinja2.ext
import jinja2.meta
import jinja2.sandbox
from jinja2 import nodes

PROMPT_SUFFIXES = (".jsonl", ".ndjson", ".jsonl.gz", ".json")
ACCEPTED = (
    "UTF-8 text, prompts as JSON Lines (.jsonl, .ndjson, .jsonl.gz) or as an array of records "
    "(.json)"
)
SIGNATURES = {  # how a binary file begins, and what it is
    b"PAR1": 'a Parquet file (pandas: read_parquet(A).to_json(B, orient="records", lines=True))',
    b"ARROW1": "an Arrow file",
    b"PK\x03\x04": "a zip archive",
    b"\x1f\x8b": "a gzip file",
    b"\xff\xfe": "UTF-16 text",
    b"\xfe\xff": "UTF-16 text",
}
SHAPES = ("turns", "prompt", "messages", "conversations")
ELSEWHERE = {  # what would change the prompt in a record of another program, and where it goes here
    "functions": "list them as tools",
    "system_prompt": "call it system",
    "chat_template_kwargs": "--chat-template-args sets the template's variables for all records",
}
ROLES = {  # in a file, and as templates call them
    "system": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "human": "user",
    "gpt": "assistant",
    "function_call": "assistant",
    "observation": "tool",
}
REASONING = ("reasoning_content", "thinking", "reasoning")  # names of one thing
READ_AS = {  # what a conversation may carry, and the names under which templates read it
    "tools": {"tools"},
    "tool_calls": {"tool_calls"},
    "function_call": {"function_call"},
    **{name: {name, "reasoning_content", "thinking"} for name in REASONING},
}
# variables that each rendering sets
SET_PER_RENDER = ("messages", "tools", "documents", "add_generation_prompt")
MARK = "\ufdd0"  # at both ends of a generation block; Unicode keeps it out of texts
NO_USER = "no turn of the user"


class Conversation(list):
    """Messages, and the tools that the model may call in them (None: the record names none)."""

    def __init__(self, messages, tools: list[dict] | None = None):
        super().__init__(messages)
        self.tools = tools


def tools_of(messages: list[dict]) -> list[dict] | None:
    """Return the tools of a conversation, which may be a plain list of messages."""
    return getattr(messages, "tools", None)


def first_turn(messages: list[dict]) -> Conversation:
    """Return the messages up to and including the first user turn. Raise a ValueError if there is
    none."""
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    if not users:
        raise ValueError(NO_USER)
    return Conversation(messages[: users[0] + 1], tools_of(messages))


class GenerationTag(jinja2.ext.Extension):
    """{% generation %}...{% endgeneration %} is around what the model writes. It prints its body,
    between two marks where the variable generation_mark is set."""

    tags = {"generation"}

    def parse(self, parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = (nodes.Output([nodes.Name("generation_mark", "load")]) for _ in range(2))
        begin.set_lineno(line)
        end.set_lineno(line)
        return nodes.Scope([begin, *body, end]).set_lineno(line)


@functools.lru_cache
def _environment() -> jinja2.Environment:
    """Make the environment that templates are written for."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationTag]
    )
    # Jinja's own filter escapes HTML, which templates do not expect
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _raise_exception(message):
    raise jinja2.TemplateError(message)


@functools.lru_cache
def _compiled(template: str) -> jinja2.Template:
    return _environment().from_string(template)


def render(template: str | None, messages: list[dict], generation_prompt: bool, names: dict) -> str:
    """Return a conversation as text. `names` are further variables of the template (bos_token,
    enable_thinking, ...). Without a template, return the messages' texts."""
    if template is None:
        return "\n\n".join(message["content"] for message in messages)
    variables = {"tools": None, "documents": None} | names
    variables["messages"] = [_as_templates_expect(message) for message in messages]
    variables["add_generation_prompt"] = generation_prompt
    try:
        return _compiled(template).render(variables)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"the chat template is broken: {error}") from None
    except Exception as error:  # a template is code, and raises what it likes
        raise ValueError(f"the chat template refuses: {error}") from None


def _as_templates_expect(message: dict) -> dict:
    """Drop keys without a value, and give reasoning under both names that templates read."""
    message = {key: value for key, value in message.items() if value is not None}
    reasoning = [message[key] for key in REASONING if key in message]
    if reasoning:
        message = {"thinking": reasoning[0]} | message | {"reasoning_content": reasoning[0]}
    return message


def reasoning_of(message: dict) -> str:
    """Return what the message says before its answer, "" if nothing."""
    return _only_value(message, REASONING) or ""


def has_generation_tag(template: str | None) -> bool:
    return "generation_mark" in _names_in(template)


def generation_pieces(template: str, messages: list[dict], names: dict) -> list[str]:
    """Return a conversation's text in pieces; every second one is a generation block's."""
    pieces = render(template, messages, False, names | {"generation_mark": MARK}).split(MARK)
    if "".join(pieces) != render(template, messages, False, names):
        raise ValueError("the chat template changes the marks of its generation blocks")
    return pieces


@functools.lru_cache
def _names_in(template: str | None) -> frozenset[str]:
    """Return the variables, attributes and texts that a template names."""
    tree = _environment().parse(template or "")
    names = {name.name for name in tree.find_all(nodes.Name)}
    names |= {getter.attr for getter in tree.find_all(nodes.Getattr)}
    return frozenset(names | {str(text.value) for text in tree.find_all(nodes.Const)})


def check_shown(template: str | None, messages: list[dict]) -> None:
    """Raise a ValueError if a conversation carries what its template never looks at."""
    keys = {key for message in messages for key, value in message.items() if value}
    keys |= {"tools"} if tools_of(messages) else set()
    for key in sorted(keys & READ_AS.keys()):
        if not READ_AS[key] & _names_in(template):
            raise ValueError(f"the chat template has no place for {key}")


def read_template_args(text: str, *templates: str | None) -> dict:
    """Read the JSON object of --chat-template-args; its keys have to be variables of one of the
    templates. Empty text stands for none."""
    if not text:
        return {}
    flag = f"--chat-template-args {text}"
    try:
        args = json.loads(text)
    except ValueError:
        args = None
    if not isinstance(args, dict):
        raise ValueError(f"{flag}: no JSON object such as '{{\"enable_thinking\": false}}'")
    if not any(templates):
        raise ValueError(f"{flag}: there is no chat template")
    try:
        trees = [_environment().parse(template or "") for template in templates]
    except jinja2.TemplateError as error:
        raise ValueError(f"{flag}: the chat template is broken: {error}") from None
    variables = set().union(*map(jinja2.meta.find_undeclared_variables, trees))
    variables = sorted(variables - {*_environment().globals, *SET_PER_RENDER, "generation_mark"})
    for key in args:
        if key in SET_PER_RENDER:
            raise ValueError(f"{flag}: {key} comes from the prompts, it cannot be set")
        if key not in variables:
            close = difflib.get_close_matches(key, variables, 1)
            known = (
                f"its variables are {', '.join(variables)}" if variables else "it has no variables"
            )
            meant = f"did you mean {close[0]}?" if close else known
            raise ValueError(f"{flag}: the chat template has no variable {key}; {meant}")
    return args


def binary_kind(data: bytes) -> str | None:
    """Say what a file is that is no text; None for text."""
    for signature, kind in SIGNATURES.items():
        if data.startswith(signature):
            return kind
    return "binary (it holds NUL bytes)" if b"\0" in data else None


def read_text(path: Path) -> str:
    """Read a file of UTF-8 text, with or without a byte order mark."""
    data = path.read_bytes()
    kind = binary_kind(data)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        kind = kind or f"not UTF-8 (byte {error.start})"
    if kind:
        raise ValueError(f"{path} is {kind}: accepted are {ACCEPTED}")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def holds_prompts(path: Path) -> bool:
    """Whether a file of a folder holds prompts: by its name, and a .json if it is an array."""
    name = path.name.lower()
    if not name.endswith(".json"):
        return name.endswith(PROMPT_SUFFIXES)
    with open(path, "rb") as file:
        return bool(re.match(rb"(\xef\xbb\xbf)?\s*\[\s*\{", file.read(1024)))


def read_prompts(path, skip_bad_lines: bool = False) -> list[Conversation]:
    """Read conversations from records of the four public shapes: {"turns": [text]},
    {"prompt": text}, {"messages": [{role, content}]}, {"conversations": [{from, value}]}."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"prompt file {path} is missing")
    conversations = []
    num_bad = 0
    for error_start, record in _records(path):
        try:
            record = _parsed(record) if isinstance(record, bytes) else record
            conversations.append(_conversation(record))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            reason = f"lacks {error}" if isinstance(error, KeyError) else error
            message = f"{error_start}: {reason}"
            if not skip_bad_lines:
                hint = "train.py and `lab references` leave such lines out with --skip-bad-lines"
                raise ValueError(f"{message} ({hint})") from None
            num_bad += 1
            print(message, file=sys.stderr)
    if num_bad:
        print(f"{path}: {num_bad} bad lines left out, {len(conversations)} kept", file=sys.stderr)
    if not conversations:
        raise ValueError(f"{path}: no prompts in it")
    return conversations


def _records(path: Path) -> Iterator[tuple[str, object]]:
    """Yield the start of an error about a record, and the record: a line, as bytes, or a value of
    a .json."""
    data = path.read_bytes()
    if path.name.lower().endswith(".gz"):
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{path} is damaged or no gzip file: {error}") from None
    kind = binary_kind(data[:1024])
    if kind:
        raise ValueError(f"{path} is {kind}: accepted are {ACCEPTED}")
    data = data.removeprefix(codecs.BOM_UTF8)
    if path.name.lower().endswith(".json"):
        for number, value in enumerate(_array(path, data), 1):
            yield f"{path}: bad record {number}", value
        return
    for number, line in enumerate(data.split(b"\n"), 1):
        if line.strip():
            yield f"{path}:{number}: bad line", line


def _parsed(data: bytes):
    return json.loads(data.decode(), object_pairs_hook=_object)


def _object(pairs: list[tuple]) -> dict:
    """Make a JSON object of its pairs. Raise a ValueError if a key is there twice."""
    value = dict(pairs)
    if len(value) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(k for k in keys if keys.count(k) > 1)!r} is given twice")
    return value


def _array(path: Path, data: bytes) -> list:
    wanted = "a .json is an array of records, one record a line makes a .jsonl"
    try:
        value = _parsed(data)
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}; {wanted}") from None
    if not isinstance(value, list):
        keys = f", but an object with {', '.join(value):.80}" if isinstance(value, dict) else ""
        raise ValueError(f"{path} holds no array{keys}; {wanted}")
    return value


def _conversation(record: dict) -> Conversation:
    """Check a record of one of the four shapes, and translate it."""
    if not isinstance(record, dict):
        raise ValueError("no JSON object")
    for key, instead in ELSEWHERE.items():
        if record.get(key):
            raise ValueError(f"{key} is not read: {instead}")
    shapes = [key for key in SHAPES if record.get(key) is not None]
    if not shapes:
        raise ValueError(f"none of the keys {', '.join(SHAPES)}")
    if len(shapes) > 1:
        raise ValueError(f"{' beside '.join(shapes)}: a record has one of them")
    value = [record["prompt"]] if shapes == ["prompt"] else record[shapes[0]]
    if not isinstance(value, list):
        raise ValueError(f"{shapes[0]} is no list")
    if shapes[0] in ("turns", "prompt"):
        value = [{"role": "user", "content": text} for text in value]
    messages = [_message(message) for message in value]
    if not messages:
        raise ValueError("no turns")
    system = record.get("system") or ""
    if not isinstance(system, str):
        raise ValueError("system is no text")
    if system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    if system and messages[0]["content"] != system:
        raise ValueError("system beside a system message that says something else")
    return Conversation(messages, _tools(record.get("tools")))


def _message(message: dict) -> dict:
    """Translate {role, content, ...} or {from, value, ...} to what templates read."""
    if not isinstance(message, dict):
        raise ValueError("a message that is no JSON object")
    role = _only_value(message, ("from", "role"), _role)
    if role is None:
        raise KeyError("role")
    text = _only_value(message, ("value", "content"), _text) or ""
    weight = message.get("weight")
    if weight not in (None, 0, 1):
        raise ValueError(f"weight {weight!r}: a turn has 1, or 0 if it is not to be supervised")
    if not isinstance(reasoning_of(message), str):
        raise ValueError(f"the reasoning {reasoning_of(message)!r:.40} is no text")
    is_call = "function_call" in (message.get("from"), message.get("role"))
    message = {key: value for key, value in message.items() if key not in ("from", "value")}
    message |= {"role": role, "content": text}
    if is_call:
        message |= {"content": "", "tool_calls": _tool_calls(text)}
    calls = message.get("tool_calls")
    if calls is not None and not _is_list_of_objects(calls):
        raise ValueError("tool_calls is no list of JSON objects")
    if not (text or calls or role == "tool" or reasoning_of(message)):
        raise ValueError(f"a turn without text: the content of role {role} is empty")
    return message


def _role(name) -> str:
    if name not in ROLES:
        raise ValueError(f"role {name!r} is not one of {', '.join(ROLES)}")
    return ROLES[name]


def _only_value(message: dict, names: tuple[str, ...], read=lambda value: value):
    """Return read(value) of a field that goes by several names; None if it has no value. Raise a
    ValueError if it has two."""
    values = {name: read(message[name]) for name in names if message.get(name) is not None}
    for name, value in values.items():
        if value != next(iter(values.values())):
            raise ValueError(f"{next(iter(values))} and {name} of a message say different things")
    return next(iter(values.values()), None)


def _text(content) -> str:
    """Return the text of a message's content: a text, a list of parts, or nothing."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise ValueError(f"a turn without text: its content is {content!r:.40}")
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text":
            raise ValueError(f"content with {part!r:.60}: only parts of type text are read")
    return "".join(part["text"] for part in content)


def _tool_calls(text: str) -> list[dict]:
    """Translate the JSON text of a ShareGPT function_call: one {name, arguments}, or several."""
    calls = json.loads(text)
    calls = calls if isinstance(calls, list) else [calls]
    functions = [{"name": call["name"], "arguments": call["arguments"]} for call in calls]
    return [{"type": "function", "function": function} for function in functions]


def _tools(value) -> list[dict] | None:
    """Check a record's tools; ShareGPT files hold them as JSON text."""
    tools = json.loads(value) if isinstance(value, str) and value else value
    if tools in (None, ""):
        return None
    if not _is_list_of_objects(tools):
        raise ValueError("tools is no list of JSON objects")
    return tools


def _is_list_of_objects(value) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)
