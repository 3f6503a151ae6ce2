"""Command-line flags from a frozen dataclass, and errors in one line.

A field made by `flag(default, text)` is a flag: its default, its help text and its limits stand in
one place. Later sources win: defaults, --preset, --config FILE, flags. Whatever a user can get
wrong is a ValueError or an OSError that says what was given and what is accepted; `run_command`
prints it as one line and returns exit code 2.

    pytest tests/support/test_flags.py
"""

import argparse
import dataclasses
import difflib
import json
import os
import sys
from pathlib import Path

import torch

DTYPES = ("", "float32", "bfloat16")  # what --dtype accepts


class Stopped(Exception):
    """A run ends early because it was asked to (SIGTERM), after saving its state."""


def flag(default, text: str, group="flags", low=None, choices=None, kind=str):
    """Declare a config field with its help text.

    group: the heading it stands under in --help; low: the smallest value; choices: all values;
    kind: the type of a tuple's members.
    """
    metadata = {"help": text, "group": group, "low": low, "choices": choices, "kind": kind}
    return dataclasses.field(default=default, metadata=metadata)


def dtype_of(config) -> torch.dtype | None:
    """The type that --dtype names; None stands for the type named by the folder's config."""
    return getattr(torch, config.dtype) if config.dtype else None


def option_name(field_name: str) -> str:
    """The flag of a config field: num_steps -> --num-steps."""
    return "--" + field_name.replace("_", "-")


# ---------------------------------------------------------------------------------------- checking


def check_ranges(config) -> None:
    """Raise a ValueError that names the first field below its smallest value."""
    for field in dataclasses.fields(config):
        low = field.metadata.get("low")
        if low is None:
            continue
        value = getattr(config, field.name)
        for number in value if isinstance(value, tuple | list) else (value,):
            if not low <= number < float("inf"):
                raise ValueError(f"{option_name(field.name)} {number}: at least {low} is needed")


def check_values(values: dict, config_class, source: str) -> None:
    """Raise a ValueError that names a key that is unknown, or whose value is of another type."""
    fields = {field.name: field for field in dataclasses.fields(config_class)}
    for key, value in values.items():
        if key not in fields:
            raise ValueError(f"{source}: unknown key {key!r}{_suggestion(key, fields)}")
        metadata = fields[key].metadata
        expected = type(fields[key].default)
        accepted = {float: (int, float), tuple: (list, tuple)}.get(expected, (expected,))
        is_wrong_bool = isinstance(value, bool) and expected is not bool  # True is an int, too
        if is_wrong_bool or not isinstance(value, accepted):
            raise ValueError(f"{source}: {key} = {value!r} is no {expected.__name__}")
        kind = metadata["kind"]
        if expected is tuple and not all(isinstance(member, kind) for member in value):
            raise ValueError(f"{source}: {key} = {value!r}: each must be of {kind.__name__}")
        choices = metadata["choices"]
        if choices and value not in choices:
            raise ValueError(f"{source}: {key} = {value!r}; there is {', '.join(choices)}")


def check_device(device: str, runs_elsewhere: bool) -> None:
    """Raise a ValueError unless the device is known and here; make it the current one."""
    if device.split(":")[0] not in ("cpu", "cuda"):
        raise ValueError(f"--device {device}: there is cpu, and cuda where a GPU is")
    if device == "cpu" or runs_elsewhere:
        return
    if not torch.cuda.is_available():
        raise ValueError(f"--device {device}: this torch sees no CUDA device")
    if ":" in device:
        torch.cuda.set_device(device)  # some kernels read the current device only


def _suggestion(word: str, known_words) -> str:
    close = difflib.get_close_matches(word, list(known_words), n=1, cutoff=0.75)
    return f", did you mean {close[0]}?" if close else ""


# ----------------------------------------------------------------------------------------- parsing


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        print(f"{self.prog}: error: {message} (see --help)", file=sys.stderr)
        raise SystemExit(2)


def _add_flag(group, field) -> None:
    """Add a field's flag to an argument group."""
    kind = type(field.default)
    default = " ".join(map(str, field.default)) if kind is tuple else field.default
    text = field.metadata["help"]
    if default != "":
        text += f" (default: {default})"
    options = {"default": argparse.SUPPRESS, "help": text.replace("%", "%%")}
    name = option_name(field.name)
    choices = field.metadata["choices"]
    if kind is bool:
        group.add_argument(name, action=argparse.BooleanOptionalAction, **options)
    elif kind is tuple:
        group.add_argument(name, type=field.metadata["kind"], nargs="+", **options)
    else:
        if kind in (int, float) and not choices:
            options["metavar"] = "N" if kind is int else "X"
        group.add_argument(name, type=kind, choices=choices, **options)


def _parser(config_class, description: str, presets, name) -> _Parser:
    """A parser with a flag for each field; groups stand in --help as the class first names them."""
    style = argparse.RawDescriptionHelpFormatter
    parser = _Parser(name, description=description, formatter_class=style, allow_abbrev=False)
    parser.add_argument("--config", metavar="FILE", help="a run config, as a run saves in run.json")
    if presets:
        parser.add_argument("--preset", choices=list(presets), help="a set of flags by name")
    fields = dataclasses.fields(config_class)
    titles = dict.fromkeys(field.metadata["group"] for field in fields)
    groups = {title: parser.add_argument_group(title) for title in titles}
    for field in fields:
        _add_flag(groups[field.metadata["group"]], field)
    return parser


def _read_config_file(path, config_class) -> dict:
    path = Path(path)
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
    """Read a config from the command line.

    name: the command's name in messages, by default the file's. A config class may say
    RUNS_ELSEWHERE = True: then its device need not be here.
    """
    parser = _parser(config_class, description, presets, name)
    namespace, unknown = parser.parse_known_args(argv)
    if unknown:
        options = [option for action in parser._actions for option in action.option_strings]
        parser.error(f"unknown argument {unknown[0]}{_suggestion(unknown[0], options)}")
    flags = vars(namespace)
    preset = flags.pop("preset", None)
    config_path = flags.pop("config", None)
    values = dict(presets[preset]) if preset else {}
    if config_path:
        values |= _read_config_file(config_path, config_class)
    config = config_class(**values | flags)
    check_ranges(config)
    if hasattr(config, "device"):
        check_device(config.device, getattr(config_class, "RUNS_ELSEWHERE", False))
    return config


# ----------------------------------------------------------------------------------------- running


def _explain(error: Exception) -> str | None:
    """One line for an error that a user can cause; None for a bug."""
    if isinstance(error, ValueError | OSError):
        return " ".join(str(error).split())
    details = " ".join(repr(error).split())[:120]
    out_of_memory = isinstance(error, MemoryError | torch.OutOfMemoryError)
    if out_of_memory or "can't allocate memory" in str(error):
        return (
            "out of memory, take fewer at once (--grad-accum, --batch-size or --part): " + details
        )
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return "another process failed: " + details
    return None


def run_command(main) -> int:
    """Run main() -> the exit code. An error that a user can cause becomes one line and code 2.

    With SPECOPD_TRACEBACK set, errors keep their traceback.
    """
    try:
        main()
        sys.stdout.flush()
        return 0
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130
    except Stopped as stopped:
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
