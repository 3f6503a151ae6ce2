"""What a long run survives: being stopped, a step that went wrong, a full disk, a damaged file.

A checkpoint holds the drafter, the optimizers, the step and what was counted. Which references a
step sees and what is drawn there follow from (seed, step, sequence) alone, so there is no state of
a generator and no place in the data to keep, and a run that goes on is bit for bit the run that was
never stopped.

    pytest tests/test_resume.py
"""

import json
import math
import os
import signal
import threading
import zlib
from pathlib import Path

import torch
from torch import Tensor, nn

from support import distributed, files

PATIENCE = 20  # steps after which a gradient's size is compared with those before


def place(folder: Path, age: int = 0) -> Path:
    """The newest checkpoint of a run, or the one that was the newest so many times ago."""
    return folder / (f"checkpoint.{age}.pt" if age else "checkpoint.pt")


def load(folder: Path) -> dict | None:
    """The newest checkpoint that can be read, on the host, None if there never was one; `damaged`
    are newer ones that cannot."""
    paths = [path for age in range(100) if (path := place(folder, age)).is_file()]
    damaged = []
    for path in paths:
        try:
            saved = dict(torch.load(path, weights_only=True, map_location="cpu"))
        except (OSError, MemoryError):
            raise  # which says nothing about the file
        except Exception as error:  # torch raises many kinds for a damaged one
            damage = f"{path} is damaged, remove it: {error!r:.80}"
            print(f"{damage}; an older one is tried")
            damaged.append(path)
            continue
        return saved | {"path": path, "damaged": damaged}
    if paths:
        raise ValueError(damage)
    return None


def agree(saved: dict | None, texts: Tensor) -> None:
    """All processes go on from one step, or all start, on the same texts; damaged checkpoints step
    aside, so that they do not push out good ones."""
    start, size = saved["step"] if saved else -1, distributed.num_processes()
    # below 2^24, so that sums of squares are exact
    known = zlib.crc32(texts.contiguous().numpy()) % 2**24 if size > 1 else 0
    mine = torch.tensor([start, start**2, known, known**2], device=distributed.device())
    sums = distributed.all_reduce_sum(mine).tolist()
    if sums[:2] != [size * start, size * start**2]:
        raise ValueError(
            f"this process goes on from step {start} (-1: it found none), others do "
            "not: is the disk the same for all?"
        )
    if sums[2:] != [size * known, size * known**2]:
        raise ValueError("the processes have different references: is the disk the same for all?")
    for one in saved["damaged"] if saved and distributed.rank() == 0 else ():
        os.replace(one, one.with_suffix(".damaged"))


def log_lines(path: Path, steps: int) -> list[str]:
    """The lines of a log up to a step, which has one for each; those that were lost are counted."""

    def number(line: str) -> float:
        try:
            return json.loads(line)["step"]
        except (ValueError, KeyError, TypeError):
            return math.inf

    text = path.read_text(errors="replace") if steps and path.is_file() else ""
    lines = [line for line in text.splitlines(keepends=True) if number(line) <= steps]
    if len(lines) < steps:
        print(f"{path} has lost {steps - len(lines)} of {steps} lines; the run goes on")
    return lines


def restore(saved: dict, drafter: nn.Module, optimizers: list) -> None:
    try:
        drafter.load_state_dict(saved["drafter"])
        for optimizer, state in zip(optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{saved['path']} does not fit this drafter: {' '.join(str(error).split()):.200}"
        ) from None


def save(folder: Path, state: dict, keep: int = 1) -> None:
    """Write a checkpoint whole, or not at all; `keep` of them stay, this one included."""
    newest = place(folder)
    with files.atomic(newest) as temporary:
        try:
            torch.save(state, temporary)
        except RuntimeError as error:  # how torch says that the disk is full
            raise OSError(
                f"{newest} could not be written, the one before it is intact: "
                f"{str(error).splitlines()[0]:.120}"
            ) from None
        for age in reversed(range(1, keep)):  # the new one is whole: the others grow older
            if place(folder, age - 1).is_file():
                os.replace(place(folder, age - 1), place(folder, age))


class Terminated:
    """Notes that the process was asked to end (SIGTERM), so that it can do so between two steps."""

    def __init__(self):
        self.asked, self.before = False, None

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():
            self.before = signal.signal(signal.SIGTERM, self.note)
        return self

    def note(self, *_):
        self.asked = True

    def __exit__(self, *_):
        if self.before is not None:
            signal.signal(signal.SIGTERM, self.before)


def sound(value: float, norm: float, health: dict, spike: float) -> bool:
    """Whether a step may change the drafter: its loss and its gradient's norm are finite, and the
    norm is not `spike` times what it was lately (0: never mind). `health` is what is known of the
    run: sound steps, those left out, and in a row, and the norm lately."""
    if not health:
        health |= {"sound": 0, "skipped": 0, "in_a_row": 0, "norm": 0.0}
    wild = spike and health["sound"] >= PATIENCE and norm > spike * health["norm"]
    if math.isfinite(value) and math.isfinite(norm) and not wild:
        health["sound"] += 1
        health["in_a_row"] = 0
        # the mean of the first steps, then one that forgets
        health["norm"] += (norm - health["norm"]) / min(health["sound"], PATIENCE)
        return True
    health["skipped"] += 1
    health["in_a_row"] += 1
    return False
