"""Writing files so that a reader never sees half of one, and folders by one run at a time.

A file is written under a temporary name in the same folder, flushed to the disk and then renamed.
A run that is killed in between leaves the old file as it was, and the folder unlocked.

    pytest tests/support/test_files.py
"""

import contextlib
import json
import os
import socket
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None

LOCK = ".lock"


@contextlib.contextmanager
def atomic_write(path):
    """Yield a temporary path beside `path`; rename it to `path` when the block ends well."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        yield temporary
        with open(temporary, "rb") as written:
            os.fsync(written.fileno())  # or the new name could reach the disk before the content
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path, value, indent: int | None = 2) -> None:
    """Write a value as JSON; without indentation on one line."""
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps(value, indent=indent, ensure_ascii=False) + "\n", "utf-8")


def write_tensors(path, tensors: dict[str, Tensor], metadata: dict | None = None) -> None:
    """Write tensors by name as safetensors; each value of `metadata` is stored as JSON. Raise a
    ValueError where an index of shards lies, which would go on naming the old files."""
    path = Path(path)
    if path.with_name(f"{path.name}.index.json").exists():
        raise ValueError(f"{path.parent} holds a model in shards: choose another folder")
    metadata = {"format": "pt"} | {key: json.dumps(v) for key, v in (metadata or {}).items()}
    tensors = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    with atomic_write(path) as temporary:
        try:
            save_file(tensors, temporary, metadata)
        except SafetensorError as error:  # safetensors' way to report a full disk
            raise OSError(f"{path} could not be written: {error}") from None


@contextlib.contextmanager
def locked(folder):
    """Keep other runs out of a folder, which is made, until the block ends. If one is there, raise
    a ValueError that names it. Where the disk has no locks, say so and go on."""
    folder = Path(folder)
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK
    file = _take_lock(path)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # of a run that wrote nothing, nothing stays
            path.unlink()
            for path in created:
                path.rmdir()
        file.close()


def _take_lock(path: Path):
    """Lock a file, which then tells who has it -> the open file."""
    while True:
        file = open(path, "a+", encoding="utf-8")
        try:
            if fcntl is None:
                raise OSError("no file locks on this system")
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            who = file.read() or "another run"
            file.close()
            problem = f"{who} is writing to {path.parent}"
            raise ValueError(f"{problem}: wait for it, or choose another --out") from None
        except OSError as error:
            print(f"{path}: {error}: nothing keeps a second run out of this folder")
            return file
        if path.exists() and os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
            return file
        file.close()  # the run that had it has removed it just now
