"""The log of a run: log.jsonl, one line a step, and --log-to another tool by its own writer.

pytest tests/support/test_log.py
"""

import contextlib
import importlib
import importlib.util
import json
import resource
import sys
from pathlib import Path

import torch


def _tensorboard(folder: Path, _):
    """-> send(scalars, step) and close()."""
    writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(str(folder))

    def send(scalars: dict, step: int) -> None:
        for name, value in scalars.items():
            writer.add_scalar(name, value, step)

    return send, writer.close


def _wandb(folder: Path, config: dict):
    """-> send(scalars, step) and close()."""
    wandb = importlib.import_module("wandb")
    run = wandb.init(name=str(folder), dir=str(folder), config=config)
    return lambda scalars, step: run.log(scalars, step=step), run.finish


TOOLS = {"tensorboard": _tensorboard, "wandb": _wandb}  # what --log-to accepts


def check_installed(tool: str) -> None:
    """Raise a ValueError if --log-to names a tool that is not installed."""
    if tool and importlib.util.find_spec(tool) is None:
        raise ValueError(f"--log-to {tool} needs its package: pip install {tool}")


def scalars_of(record: dict) -> dict[str, float]:
    """The numbers of a log's record; a list gives one for each position."""
    scalars = {}
    for name, value in record.items():
        if isinstance(value, list):
            scalars |= {f"{name}/{number + 1}": x for number, x in enumerate(value)}
        elif isinstance(value, int | float):
            scalars[name] = value
    return scalars


@contextlib.contextmanager
def open_log(folder: Path, tool: str, config: dict):
    """Yield write(record), which appends to log.jsonl and sends the numbers to the tool, if any."""
    try:
        send, close = TOOLS[tool](folder, config) if tool else (None, None)
    except Exception as error:  # of whatever kind the tool raises
        raise ValueError(f"--log-to {tool} does not start: {error!s:.200}") from None
    with open(folder / "log.jsonl", "a", encoding="utf-8") as file:

        def write(record: dict) -> None:
            file.write(json.dumps(record) + "\n")
            file.flush()
            if send:
                send(scalars_of(record), record["step"])

        try:
            yield write
        finally:
            if close:
                close()


def peak_memory_gib(on_gpu: bool) -> float:
    """The most that this process has occupied so far: of the GPU's memory, or of the machine's."""
    if on_gpu:
        return torch.cuda.max_memory_allocated() / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
