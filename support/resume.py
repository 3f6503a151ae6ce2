"""What a long run survives: being stopped, a full disk, a damaged file.

A training state holds the drafter, the optimizers, the step and the sums so far. What a step sees
and draws follows from (seed, step, sequence) alone, so a run that goes on is bit for bit the run
that was never stopped. A stage (a target, a drafter) is made once; its record is stage.json.

    pytest tests/support/test_resume.py
"""

import os
import signal
from pathlib import Path

import torch
from torch import nn

from hf.files import read_json
from support import distributed
from support.files import atomic_write, write_json
from support.fingerprint import difference

NEWEST = "training_state.pt"
OLDER = "training_state.1.pt"  # the one before, for the case that the newest is damaged


def check_same(made_with: dict, wanted: dict, source) -> None:
    """Raise a ValueError that names the first field in which `source` was made differently."""
    for key, value in wanted.items():
        change = difference(key, made_with.get(key), value)
        if change:
            raise ValueError(f"{source} {change}: choose another --out or remove it")


def stage(folder: Path, made_with: dict, make) -> dict:
    """Return the result of make(), or the one in stage.json, which needs the same `made_with`."""
    record_path = folder / "stage.json"
    if record_path.is_file():
        record = read_json(record_path)
        if not {"made_with", "result"} <= record.keys():
            raise ValueError(f"{record_path} does not say what was made: remove it")
        check_same(record["made_with"], made_with, folder)
        print(f"{folder} is there, kept")
        return record["result"]
    if (folder / "model.safetensors").exists() and not (folder / NEWEST).exists():
        raise ValueError(f"{folder} holds a model that this run did not make: choose another --out")
    result = make()
    write_json(record_path, {"made_with": made_with, "result": result})
    return result


def load_training_state(folder: Path) -> dict | None:
    """Read the newest training state that is not damaged, on the host; None if there is none.
    Added to it: "path", and "damaged", the paths of newer ones that could not be read."""
    paths = [path for path in (folder / NEWEST, folder / OLDER) if path.is_file()]
    damaged = []
    for path in paths:
        try:
            state = dict(torch.load(path, weights_only=True, map_location="cpu"))
            return state | {"path": path, "damaged": damaged}
        except (OSError, MemoryError):
            raise  # these say nothing about the file
        except Exception as error:  # torch raises many kinds for a damaged file
            message = f"{path} is damaged, remove it: {repr(error)[:80]}"
            print(f"{message}; an older one is tried")
            damaged.append(path)
    if damaged:
        raise ValueError(message)
    return None


def check_processes_agree(state: dict | None, references: str) -> None:
    """Raise a ValueError unless all processes go on from one step, with the same references, whose
    fingerprint this is."""
    step = state["step"] if state else -1
    number = int(references[-15:], 16)  # what 64 bits can hold
    steps, numbers = zip(*distributed.gather_numbers([step, number]))
    question = "is the disk the same for all?"
    if len(set(steps)) > 1:
        raise ValueError(f"the processes go on from steps {list(steps)} (-1: none): {question}")
    if len(set(numbers)) > 1:
        raise ValueError(f"the processes have different references: {question}")


def set_damaged_aside(state: dict) -> None:
    """Rename damaged files, so that they do not push out good ones."""
    for path in state["damaged"] if distributed.is_main() else ():
        os.replace(path, path.with_suffix(".damaged"))


def restore(state: dict, drafter: nn.Module, optimizers: list) -> None:
    """Put a training state back into the drafter and its optimizers."""
    try:
        drafter.load_state_dict(state["drafter"])
        for optimizer, optimizer_state in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(optimizer_state)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{state['path']} does not fit this drafter: {error!s:.200}") from None


def save_training_state(folder: Path, state: dict) -> None:
    """Write a training state whole, or not at all; the one before it stays, as the older one."""
    newest = folder / NEWEST
    with atomic_write(newest) as temporary:
        try:
            torch.save(state, temporary)
        except RuntimeError as error:  # torch's way to report a full disk
            failure = f"{newest} could not be written, the one before it is intact"
            raise OSError(f"{failure}: {str(error).splitlines()[0][:120]}") from None
        if newest.is_file():
            os.replace(newest, folder / OLDER)


def cut_log(path: Path, num_steps: int) -> None:
    """Keep a log's lines up to a step, one a step: it may be ahead of its training state."""
    text = path.read_text(errors="replace") if path.is_file() else ""
    with atomic_write(path) as temporary:
        temporary.write_text("".join(text.splitlines(keepends=True)[:num_steps]))


class EndRequest:
    """Notes that this process was asked to end (SIGTERM), so that it can end between two steps."""

    received = False

    def __enter__(self) -> "EndRequest":
        self.handler_before = signal.signal(signal.SIGTERM, self._note)
        return self

    def _note(self, *_) -> None:
        self.received = True

    def __exit__(self, *_) -> None:
        signal.signal(signal.SIGTERM, self.handler_before or signal.SIG_DFL)
