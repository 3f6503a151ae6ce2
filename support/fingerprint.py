"""What a run is made of, in a few characters, so that a change of it is noticed.

Texts, prompts and references are hashed whole. Of a model its config is, and of every tensor a few
evenly spread rows: this takes less than a second for 8 billion weights, and a target whose layers
are spread over processes gives the same. Weights in another dtype are told from other weights.

    pytest tests/support/test_fingerprint.py
"""

import hashlib
import json
from dataclasses import asdict

import torch
from torch import Tensor, nn

from support import distributed

HASH = "sha256:"
MIN_ROWS = 5  # looked at of every tensor, but of short rows as many as make so many numbers:
MIN_NUMBERS = 4096


def _digest(parts) -> str:
    """Return 16 hex digits of tensors of whole numbers and of values that JSON can hold."""
    sha = hashlib.sha256()
    for part in parts:
        if torch.is_tensor(part):
            sha.update(repr(tuple(part.shape)).encode())
            sha.update(part.contiguous().numpy())
        else:
            sha.update(json.dumps(part).encode() + b"\n")
    return sha.hexdigest()[:16]


def fingerprint(parts) -> str:
    """Return the hash of texts, prompts, tensors of whole numbers, in their order."""
    return HASH + _digest(parts)


# ----------------------------------------------------------------------------------------- weights


def weights_fingerprint(module: nn.Module) -> dict[str, str]:
    """Return hashes of a module's config and its tensors by name and shape, exact and rounded to
    bfloat16, and its dtype. If it is spread over processes, all call this together."""
    tensors = module.state_dict()
    first = next(module.parameters())
    is_spread = any(map(_is_spread, tensors.values()))
    pieces = []
    for tensor in tensors.values():
        piece = _as_bits(_rows_of(tensor)).to(first.device)
        if is_spread and not _is_spread(tensor) and not distributed.is_main():
            piece.zero_()  # all processes have the whole of it; one gives it
        pieces.append(piece)
    bits = torch.cat(pieces)
    if is_spread:
        bits = distributed.all_reduce_sum(bits)
    bits = bits.cpu()
    shape = [[name, *tensor.shape] for name, tensor in tensors.items()]
    shape.append(asdict(module.config) if hasattr(module, "config") else {})
    rounded = bits.view(torch.float32).bfloat16().view(torch.int16)
    return {
        "weights": fingerprint([shape, bits]),
        "rounded": fingerprint([shape, rounded]),
        "dtype": str(first.dtype).removeprefix("torch."),
    }


def _is_spread(tensor: Tensor) -> bool:
    return hasattr(tensor, "device_mesh")


def _rows_of(tensor: Tensor) -> Tensor:
    """Return evenly spread rows (n, width) of a tensor, the first and the last among them. Of one
    that is spread over processes by its first dimension, the other processes' rows are 0."""
    width = tensor.shape[-1] if tensor.dim() > 1 else 1
    num_rows = tensor.numel() // width
    n = min(num_rows, max(MIN_ROWS, MIN_NUMBERS // width))
    chosen = torch.arange(n) * (num_rows - 1) // max(n - 1, 1)
    if not _is_spread(tensor):
        return tensor.reshape(num_rows, width)[chosen.to(tensor.device)]
    local = tensor.to_local().reshape(-1, width)
    mesh = tensor.device_mesh
    share = -(-tensor.shape[0] // mesh.size()) * (num_rows // tensor.shape[0])
    chosen = (chosen - mesh.get_local_rank() * share).to(local.device)
    here = (0 <= chosen) & (chosen < len(local))
    rows = local.new_zeros(n, width)
    rows[here] = local[chosen[here]]
    return rows


def _as_bits(rows: Tensor) -> Tensor:
    """Return numbers as int32 (n,), which are sent and added up without rounding."""
    rows = rows.detach().float() if rows.is_floating_point() else rows.long()
    return rows.contiguous().view(torch.int32).flatten()


# -------------------------------------------------------------------------------------- comparison


def is_another_dtype(recorded, weights: dict) -> bool:
    """Whether what was recorded is the fingerprint of the same weights in another dtype."""
    if not isinstance(recorded, dict) or recorded.get("rounded") != weights["rounded"]:
        return False
    return recorded.get("dtype") != weights["dtype"]


def difference(name: str, recorded, value) -> str:
    """Say in which way what was made with `recorded` is not what `value` makes; "" if it is."""
    if recorded == value:
        return ""
    is_weights = isinstance(value, dict) and "rounded" in value
    is_hash = isinstance(value, str) and value.startswith(HASH)
    if not (is_weights or is_hash):
        return f"was made with {name} = {recorded!r}, this run has {value!r}"
    if type(recorded) is not type(value):
        return f"does not record {name} (an earlier version made it)"
    if is_weights and is_another_dtype(recorded, value):
        dtypes = f"{recorded['dtype']}, this run has {value['dtype']} (--dtype)"
        return f"was made with the same weights in another dtype: {dtypes}"
    if is_weights:
        return f"was made with other weights or another config of {name}"
    return f"was made before {name} changed"
