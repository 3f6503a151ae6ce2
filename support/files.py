"""Files and flags: what every command shares, and none of it is about speculative decoding.

Files are written under a temporary name and renamed; tensors go through safetensors. Command-line
flags derive from a frozen dataclass, so that a default stands once. Whatever a user can get wrong
is a ValueError or an OSError that says what was given and what is accepted, and `run_command` turns
it into one line and code 2.

    pytest tests/test_data.py
"""

import argparse
import contextlib
import dataclasses
import difflib
import json
import os
import sys
from pathlib import Path

import torch

# ------------------------------------------------------------------------------------ files, safely


@contextlib.contextmanager
def atomic(path):
    """Write to a temporary name beside `path`, then rename: never half of a file is seen."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        yield temporary
        with open(temporary, "rb") as written:
            os.fsync(written.fileno())  # or the name could outlive the content
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
        temporary.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", "utf-8")


def read_json(path) -> dict:
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing"
            + ("" if path.parent.is_dir() else ": no such folder (a hub's name is OWNER/NAME)")
        )
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no JSON object")
    return found


def stage(folder: Path, wanted: dict, make) -> dict:
    """Do a stage once: it is done when its stage.json is there, and must have been made alike."""
    done = folder / "stage.json"
    if done.is_file():
        found = read_json(done)
        if not {"made_with", "result"} <= set(found):
            raise ValueError(f"{done} does not say what was made: remove it")
        check_same(found["made_with"], wanted, folder)
        print(f"{folder} is there, kept")
        return found["result"]
    if (folder / "model.safetensors").exists() and not (folder / "checkpoint.pt").exists():
        raise ValueError(f"{folder} holds a model that this run did not make: choose another --out")
    result = make()
    write_json(done, {"made_with": wanted, "result": result})
    return result


# --------------------------------------------------------------------------------- flags and errors


class Stopped(Exception):
    """A run was asked to end, and has saved what it had."""


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        print(f"{self.prog}: error: {message} (see --help)", file=sys.stderr)
        raise SystemExit(2)


DTYPES = ("", "float32", "bfloat16")


def dtype_of(config) -> torch.dtype | None:
    """What --dtype names; None: what a folder's config names."""
    return getattr(torch, config.dtype, None)


def flag(default, text: str, **metadata):
    """A config field with its help text: the one place where its default stands. `low`: the least
    value it may have; `choices`: all it may be; `kind`: of a tuple's members, if not str."""
    return dataclasses.field(default=default, metadata={"help": text} | metadata)


def check_ranges(config) -> None:
    for field in dataclasses.fields(config):
        low, value = field.metadata.get("low"), getattr(config, field.name)
        for one in value if isinstance(value, (tuple, list)) else (value,):
            if low is not None and not low <= one < float("inf"):
                name = field.name.replace("_", "-")
                raise ValueError(f"--{name} {one}: at least {low} is needed")


def _suggest(word: str, known) -> str:
    close = difflib.get_close_matches(word, list(known), 1, 0.75)
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
        one = known[key].metadata.get("kind", str)
        if kind is tuple and not all(isinstance(member, one) for member in value):
            raise ValueError(f"{source}: {key} = {value!r}: each must be of {one.__name__}")
        if choices and value not in choices:
            raise ValueError(f"{source}: {key} = {value!r}; there is {', '.join(choices)}")


def parse_flags(config_class, description: str, argv=None, presets=None, name=None):
    """Flags of a frozen dataclass. Of defaults, --preset, --config FILE, flags the last wins. name:
    of the command, by default the file's."""
    style = argparse.RawDescriptionHelpFormatter
    parser = _Parser(name, description=description, formatter_class=style, allow_abbrev=False)
    parser.add_argument("--config", metavar="FILE", help="a run config, as a run saves in run.json")
    if presets:
        parser.add_argument("--preset", choices=list(presets), help="a set of flags by name")
    for field in dataclasses.fields(config_class):
        kind, name = type(field.default), "--" + field.name.replace("_", "-")
        usual = " ".join(map(str, field.default)) if kind is tuple else field.default
        text = field.metadata["help"] + f" (default: {usual})" * (usual != "")
        options = dict(default=argparse.SUPPRESS, help=text.replace("%", "%%"))
        if kind in (int, float):
            options["metavar"] = "N" if kind is int else "X"
        if kind is bool:
            parser.add_argument(name, action=argparse.BooleanOptionalAction, **options)
        elif kind is tuple:
            kind = field.metadata.get("kind", str)
            parser.add_argument(name, type=kind, nargs="+", **options)
        else:
            choices = field.metadata.get("choices")
            if choices:
                options.pop("metavar", None)
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
    check_ranges(config)
    device = getattr(config, "device", "cpu")
    if device.split(":")[0] not in ("cpu", "cuda"):
        raise ValueError(f"--device {device}: there is cpu, and cuda where a GPU is")
    elsewhere = getattr(config, "plan", False)  # what is planned runs on another machine
    if device != "cpu" and not elsewhere and not torch.cuda.is_available():
        raise ValueError(f"--device {device}: this torch sees no CUDA device")
    if ":" in device and not elsewhere:
        torch.cuda.set_device(device)  # for kernels that look at nothing else
    return config


def run_command(main) -> int:
    """Run main(); anything a user can cause ends in one line and exit code 2."""
    try:
        main()
        sys.stdout.flush()
        return 0
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130
    except Stopped as stopped:  # by SIGTERM
        print(f"\n{stopped}", file=sys.stderr)
        return 143
    except (MemoryError, RuntimeError) as error:
        if os.environ.get("SPECOPD_TRACEBACK"):
            raise
        full = isinstance(error, MemoryError | torch.OutOfMemoryError)
        several = torch.distributed.is_available() and torch.distributed.is_initialized()
        if full or "can't allocate memory" in str(error):
            said = "out of memory, take fewer at once (--grad-accum, --batch-size or --part)"
        elif several:
            said = "another process failed"
        else:
            raise
        print(f"error: {said}: {' '.join(repr(error).split()):.120}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `| head` has seen enough: nothing is to be flushed when Python ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print("error: nobody reads what is printed any more", file=sys.stderr)
        return 2
    except (ValueError, OSError) as error:
        if os.environ.get("SPECOPD_TRACEBACK"):
            raise
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
