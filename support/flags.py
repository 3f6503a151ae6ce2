"""Command-line flags from a frozen dataclass, and errors in one line.

A field made by `flag(default, text)` is a flag: its default, its help text and its limits stand in
one place. Later sources win: defaults, --preset, --config FILE, flags. A config's table NEEDS says
which flags mean something only beside others. What a user gets wrong is a ValueError or an OSError,
which `run_command` prints as one line; its exit code is then 2.

    pytest tests/support/test_flags.py
"""

import argparse
import dataclasses
import difflib
import json
import os
import signal
import sys
from pathlib import Path

import torch

DTYPES = ("", "float32", "bfloat16")  # what --dtype accepts
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # what --device auto stands for
DEVICE_TEXT = "cpu, cuda, or auto: cuda if there is one"
TEMPLATE_ARGS = 'variables of the chat template, as JSON: {"enable_thinking": false}'


class Stopped(Exception):
    """A run ends early because it was asked to (SIGTERM, Ctrl-C), after saving its state."""


def flag(default, text: str, group="flags", low=None, choices=None, kind=str):
    """Declare a config field. group: its heading in --help; low: the smallest value; choices: the
    allowed values; kind: the type of a tuple's members."""
    metadata = {"help": text, "group": group, "low": low, "choices": choices, "kind": kind}
    return dataclasses.field(default=default, metadata=metadata)


def dtype_of(config) -> torch.dtype | None:
    """The type that --dtype names; None stands for the type named by the folder's config."""
    return getattr(torch, config.dtype) if config.dtype else None


def precision_of(config) -> str:
    """The type that --precision names; empty: bfloat16 on CUDA, float32 on a CPU."""
    return config.precision or ("bfloat16" if config.device.startswith("cuda") else "float32")


def option_name(field_name: str) -> str:
    """The flag of a config field: num_steps -> --num-steps."""
    return "--" + field_name.replace("_", "-")


def check_ranges(config) -> None:
    """Raise a ValueError that names the first field below its smallest value."""
    for field in dataclasses.fields(config):
        low = field.metadata.get("low")
        value = getattr(config, field.name)
        for number in value if isinstance(value, tuple | list) else (value,):
            if low is not None and not low <= number < float("inf"):
                raise ValueError(f"{option_name(field.name)} {number}: at least {low} is needed")


def unmet_needs(config) -> dict[str, str]:
    """The fields that mean nothing in this config, and what each would need in words. The table
    NEEDS of the config's class has rows (fields, words, holds(config))."""
    rows = getattr(config, "NEEDS", ())
    return {n: words for names, words, holds in rows for n in names.split() if not holds(config)}


def check_needs(config, on_command_line: dict) -> None:
    """Raise a ValueError for a flag of the command line that means nothing beside the others. One
    printed line names those of a preset or a file: such a set of flags may serve several runs."""
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    ignored = []
    for name, words in unmet_needs(config).items():
        if name in on_command_line:
            raise ValueError(f"{option_name(name)} means nothing here: it needs {words}")
        if getattr(config, name) != defaults[name]:
            ignored.append(option_name(name))
    if ignored:
        print(f"ignored, because they mean nothing here: {' '.join(ignored)}")


def check_values(values: dict, config_class, source: str) -> None:
    """Raise a ValueError that names a key that is unknown, or whose value is of another type."""
    fields = {field.name: field for field in dataclasses.fields(config_class)}
    for key, value in values.items():
        if key not in fields:
            raise ValueError(f"{source}: unknown key {key!r}{_suggestion(key, fields)}")
        expected = type(fields[key].default)
        accepted = {float: (int, float), tuple: (list,)}.get(expected, (expected,))
        if type(value) not in accepted:  # not isinstance: True is an int, too
            raise ValueError(f"{source}: {key} = {value!r} is no {expected.__name__}")
        kind = fields[key].metadata["kind"]
        kinds = (int, float) if kind is float else (kind,)
        if expected is tuple and not all(type(member) in kinds for member in value):
            raise ValueError(f"{source}: {key} = {value!r}: each must be of {kind.__name__}")
        choices = fields[key].metadata["choices"]
        if choices and value not in choices:
            raise ValueError(f"{source}: {key} = {value!r}; there is {', '.join(choices)}")


def check_device(config) -> None:
    """Raise a ValueError if the device is not cpu or cuda, or is cuda on a machine without it."""
    device = getattr(config, "device", "cpu")
    if device.split(":")[0] not in ("cpu", "cuda"):
        raise ValueError(f"--device {device}: there is cpu, and cuda where a GPU is, or auto")
    if device == "cpu" or getattr(config, "RUNS_ELSEWHERE", False):
        return
    if not torch.cuda.is_available():
        raise ValueError(f"--device {device}: this torch sees no CUDA device")
    if ":" in device:
        torch.cuda.set_device(device)  # some kernels read the current device only
    # cuDNN's attention builds a plan for every new shape, and a decoding round has a new length
    # each time; with a mask at length % 128 = 64 its gradient is reported to be NaN
    torch.backends.cuda.enable_cudnn_sdp(False)


def _suggestion(word: str, known_words) -> str:
    close = difflib.get_close_matches(word, list(known_words), n=1, cutoff=0.75)
    return f", did you mean {close[0]}?" if close else ""


class OneLineParser(argparse.ArgumentParser):
    def error(self, message):
        print(f"{self.prog}: error: {message} (see --help)", file=sys.stderr)
        raise SystemExit(2)


def _add_flag(group, field, words: str) -> None:
    kind = type(field.default)
    default = " ".join(map(str, field.default)) if kind is tuple else field.default
    text = field.metadata["help"] + (f" (default: {default})" if default != "" else "")
    text += f"; needs {words}" if words else ""
    options = {"help": text.replace("%", "%%")}
    name = option_name(field.name)
    if kind is bool:
        group.add_argument(name, action=argparse.BooleanOptionalAction, **options)
    elif kind is tuple:
        group.add_argument(name, type=field.metadata["kind"], nargs="+", **options)
    else:
        options |= {"metavar": {int: "N", float: "X"}.get(kind)}
        group.add_argument(name, type=kind, choices=field.metadata["choices"], **options)


def _read_config_file(path: Path, config_class) -> dict:
    if not path.is_file():
        raise FileNotFoundError(f"--config {path} is missing")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds no JSON object")
    check_values(values, config_class, str(path))
    return values


def parse_flags(config_class, description: str, argv=None, presets=None, name=None):
    """Read a config from the command line. presets: sets of flags by name, or functions that make
    one from the flags given. name: the command's name, by default the file's."""
    parser = OneLineParser(name, description=description, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.argument_default = argparse.SUPPRESS
    parser.add_argument("--config", metavar="FILE", help="a run config, as a run saves in run.json")
    if presets:
        parser.add_argument("--preset", choices=list(presets), help="a set of flags by name")
    fields = dataclasses.fields(config_class)
    titles = dict.fromkeys(field.metadata["group"] for field in fields)
    groups = {title: parser.add_argument_group(title) for title in titles}
    rows = getattr(config_class, "NEEDS", ())
    needs = {}
    for names, words, _ in rows:
        for name in names.split():
            needs[name] = f"{needs[name]}, and {words}" if name in needs else words
    for field in fields:
        _add_flag(groups[field.metadata["group"]], field, needs.get(field.name, ""))
    namespace, unknown = parser.parse_known_args(argv)
    if unknown:
        options = [option for action in parser._actions for option in action.option_strings]
        parser.error(f"unknown argument {unknown[0]}{_suggestion(unknown[0], options)}")
    flags = vars(namespace)
    preset = presets[flags.pop("preset")] if "preset" in flags else {}
    given = _read_config_file(Path(flags.pop("config")), config_class) if "config" in flags else {}
    given |= flags
    values = dict(preset(given) if callable(preset) else preset) | given
    if values.get("device") == "auto":
        values["device"] = DEVICE
    config = config_class(**values)
    check_ranges(config)
    check_device(config)
    check_needs(config, flags)
    return config


def _memory_hint() -> str:
    """The flags of the running command that save memory."""
    command = Path(sys.argv[0]).name
    if command == "train.py":
        flags = "a larger --grad-accum, --recompute, fewer --num-anchors, --cache-gib 0"
        return f"this saves some: {flags}, --dtype bfloat16 (python -m lab plan knows sizes)"
    flags = "--batch-size, --part, --num-anchors, --prompt-length, --max-new-tokens"
    return f"take fewer at once (of {flags} those that the command has) or --dtype bfloat16"


def _explain(error: Exception) -> str | None:
    """One line for an error that a user can cause; None for a bug."""
    if isinstance(error, ValueError | OSError):
        return " ".join(str(error).split())
    details = " ".join(repr(error).split())[:120]
    out_of_memory = isinstance(error, MemoryError | torch.OutOfMemoryError)
    if out_of_memory or "can't allocate memory" in str(error):
        return f"out of memory, {_memory_hint()}: {details}"
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return "another process failed: " + details
    return None


def _end(*_) -> None:
    """SIGTERM ends a command as Ctrl-C does: what it has locked or half written is cleared."""
    raise Stopped("asked to end")


def run_command(main) -> int:
    """Run main() -> the exit code. An error that a user can cause becomes one line and code 2, but
    with SPECOPD_TRACEBACK set it keeps its traceback."""
    # gradients below 1e-38 have a form of their own, which makes a CPU up to ten times slower; this
    # comes before any thread is started, because threads take it over
    torch.set_flush_denormal(True)
    signal.signal(signal.SIGTERM, _end)
    try:
        main()
        sys.stdout.flush()
        return 0
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130
    except Stopped as stopped:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second Ctrl-C: no traceback of the first
        if os.environ.get("RANK", "0") == "0":  # of several processes one speaks
            print(f"\n{stopped}", file=sys.stderr)
        return 143
    except BrokenPipeError:  # `| head` closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python's exit complains
        print("error: nobody reads what is printed any more", file=sys.stderr)
        return 2
    except (MemoryError, RuntimeError, ValueError, OSError) as error:
        explanation = _explain(error)
        if explanation is None or os.environ.get("SPECOPD_TRACEBACK"):
            raise
        print(f"error: {explanation}", file=sys.stderr)
        return 2
