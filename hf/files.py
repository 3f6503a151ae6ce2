"""Open what the outside world wrote: JSON files, safetensors files, model folders.

A model folder holds config.json, weights and often a tokenizer. Its name is a path, or OWNER/NAME
of a repository on a hub. Every error names the file and says what is wrong with it.

    pytest tests/hf/test_files.py
"""

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja"]  # what is fetched of a repository


def read_json(path) -> dict:
    """Read a file that holds one JSON object."""
    path = Path(path)
    if not path.is_file():
        hint = "" if path.parent.is_dir() else ": no such folder (a hub's name is OWNER/NAME)"
        raise FileNotFoundError(f"{path} is missing{hint}")
    try:
        # Windows' editors begin a file with a byte order mark
        value = json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=_json_object)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds no JSON object")
    return value


def _json_object(pairs: list[tuple]) -> dict:
    """Make an object of its pairs. A key with two values is an error: json would keep the last."""
    value = dict(pairs)
    if len(value) < len(pairs):
        for key, first in pairs:
            if value[key] != first:
                both = f"{first!r} and {value[key]!r}"
                raise ValueError(f"key {key} is given twice, {both}: remove the wrong one")
    return value


def open_tensors(path):
    """Open a file with `safetensors.safe_open`, with errors that name the file."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path} is missing")
    try:
        return safe_open(path, "pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is damaged or no safetensors file: {error}") from None


def model_folder(name: str) -> Path:
    """Return the path of a folder. If the name is that of a repository on a hub, the repository is
    fetched first; this needs huggingface_hub."""
    if Path(name).is_dir() or name.count("/") != 1 or name.startswith((".", "/")):
        return Path(name)
    problem = f"{name} is no folder here"
    try:
        import huggingface_hub

        return Path(huggingface_hub.snapshot_download(name, allow_patterns=HUB_PATTERNS))
    except ImportError:
        fetch = f"pip install huggingface_hub, or hf download {name} --local-dir FOLDER"
        raise FileNotFoundError(f"{problem}; as a hub's name it needs: {fetch}") from None
    except Exception as error:  # the hub's client raises many kinds
        raise FileNotFoundError(f"{problem}, and no hub gave it: {error}") from None
