"""Conversations: read prompts from files, and render a conversation as a model's template says.

A conversation is a list of {"role", "content"}. A chat template is a Jinja program that comes with
a model; it runs in a sandbox, because it is somebody else's code.

    pytest tests/hf/test_chat.py
"""

import functools
import json
import sys
from datetime import datetime
from pathlib import Path

import jinja2.sandbox


def render(template: str | None, messages: list[dict], generation_prompt: bool, names: dict) -> str:
    """Return a conversation as text. `names` are further variables of the template (bos_token,
    enable_thinking, ...). Without a template, return the messages' texts."""
    if template is None:
        return "\n\n".join(message["content"] for message in messages)
    variables = {"messages": messages, "add_generation_prompt": generation_prompt}
    variables |= {"tools": None, "documents": None} | names
    try:
        return _compiled(template).render(variables)
    except Exception as error:  # a template is code, and raises what it likes
        raise ValueError(f"the chat template refuses: {error}") from None


@functools.lru_cache
def _compiled(template: str) -> jinja2.Template:
    """Compile a chat template in the environment that templates are written for."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    # Jinja's own filter escapes HTML, which templates do not expect
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(template)


def _raise_exception(message):
    raise jinja2.TemplateError(message)


def read_prompts(path, skip_bad_lines: bool = False) -> list[list[dict]]:
    """Read conversations from JSON Lines of the four public shapes: {"turns": [text]},
    {"prompt": text}, {"messages": [{role, content}]}, {"conversations": [{from, value}]}."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"prompt file {path} is missing")
    conversations = []
    num_bad = 0
    for number, line in enumerate(path.read_text("utf-8", errors="replace").split("\n"), 1):
        if not line.strip():
            continue
        try:
            conversations.append(_conversation(json.loads(line)))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            reason = f"lacks {error}" if isinstance(error, KeyError) else error
            message = f"{path}:{number}: bad line: {reason}"
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


def _conversation(record: dict) -> list[dict]:
    if "turns" in record:
        messages = [{"role": "user", "content": text} for text in record["turns"]]
    elif "prompt" in record:
        messages = [{"role": "user", "content": record["prompt"]}]
    elif "messages" in record:
        messages = [{"role": m["role"], "content": m["content"]} for m in record["messages"]]
    elif "conversations" in record:
        messages = [_shared_message(message) for message in record["conversations"]]
    else:
        raise ValueError("none of the keys turns, prompt, messages, conversations")
    if not messages or not all(isinstance(m["content"], str) and m["content"] for m in messages):
        raise ValueError("no turns, or a turn without text")
    return messages


def _shared_message(message: dict) -> dict:
    """Translate a message of the ShareGPT shape, {from, value}."""
    role = message["from"] if "from" in message else message["role"]
    content = message["value"] if "value" in message else message["content"]
    return {"role": {"human": "user", "gpt": "assistant"}.get(role, role), "content": content}


def first_turn(messages: list[dict]) -> list[dict]:
    """Return the messages up to and including the first user turn; without one, the first."""
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    return messages[: users[0] + 1] if users else messages[:1]
