"""What a long run survives: being stopped, a full disk, a damaged file.

A training state holds the drafter, the optimizers, the step and the sums so far. What a step sees
and draws follows from (seed, step, sequence) alone, so a run that goes on is bit for bit the run
that was never stopped. A stage (a target, a drafter) is made once; its record is stage.json.

    pytest tests/support/test_resume.py
"""

import contextlib
import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn

from hf.files import read_json
from support import distributed
from support.files import atomic_write, write_json
from support.fingerprint import difference
from support.flags import Stopped

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
    """Notes that this process was asked to end (SIGTERM, Ctrl-C). What may be dropped goes through
    `run`, all else is finished first. A second Ctrl-C ends the process at once."""

    def __init__(self, model: nn.Module | None = None):
        self.model = model  # of the target
        self.received = False
        self.may_drop = False

    def __enter__(self) -> "EndRequest":
        signals = (signal.SIGTERM, signal.SIGINT)
        self.handlers_before = {number: signal.signal(number, self._note) for number in signals}
        self.hooks = [m.register_forward_pre_hook(self._drop, prepend=True) for m in self._calls()]
        return self

    def _calls(self) -> list[nn.Module]:
        """What long work calls again and again: the model, and its layers unless they are spread,
        because a layer that is spread runs on all processes or on none."""
        if self.model is None:
            return []
        is_spread = any(hasattr(weight, "device_mesh") for weight in self.model.parameters())
        return [self.model] if is_spread else [self.model, *getattr(self.model, "layers", ())]

    def _note(self, number: int, _) -> None:
        self.received = True
        if number == signal.SIGINT:
            # the system's own handler: Python's would wait while this process waits for others
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            if distributed.is_main():  # print() must not be called in here
                os.write(sys.stderr.fileno(), b"\nsaving; Ctrl-C again ends at once\n")

    def _drop(self, *_) -> None:
        if self.received and self.may_drop:
            raise Stopped("asked to end")

    def run(self, work):
        """Return work(), or raise Stopped on all processes once any was asked to end: before the
        next layer."""
        self.may_drop = True
        result = None
        with contextlib.suppress(Stopped):  # one process alone must not leave the others waiting
            result = work()
        self.may_drop = False
        self.check("asked to end")
        return result

    def check(self, message: str) -> None:
        """Raise Stopped on all processes if any was asked to end."""
        if any(received for (received,) in distributed.gather_numbers([int(self.received)])):
            raise Stopped(message)

    def __exit__(self, *_) -> None:
        for hook in self.hooks:
            hook.remove()
        for number, handler in self.handlers_before.items():
            signal.signal(number, handler or signal.SIG_DFL)
