"""Writing files so that a reader never sees half of one.

A file is written under a temporary name in the same folder, flushed to the disk and then renamed.
A run that is killed in between leaves the old file as it was.

    pytest tests/support/test_files.py
"""

import contextlib
import json
import os
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor


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


def write_json(path, value) -> None:
    """Write a value as indented JSON."""
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", "utf-8")


def write_tensors(path, tensors: dict[str, Tensor], metadata: dict | None = None) -> None:
    """Write tensors by name as safetensors; each value of `metadata` is stored as JSON."""
    metadata = {"format": "pt"} | {key: json.dumps(v) for key, v in (metadata or {}).items()}
    tensors = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    with atomic_write(path) as temporary:
        try:
            save_file(tensors, temporary, metadata)
        except SafetensorError as error:  # safetensors' way to report a full disk
            raise OSError(f"{path} could not be written: {error}") from None
