"""The tensors of a checkpoint folder: one file or shards with an index, and where each one goes.

A folder may hold experts fused or one by one, an embedding table in shards, weights in FP8 with a
scale per block, names with another prefix. `layout` says for each stored tensor which of the
module's it is, or which region of one; `load_weights` reads them one by one, straight to their
device and dtype.

Loud: every tensor of the module must be there, whole, finite and of its shape, and every tensor
there must be used or skipped by a named rule.

    pytest tests/test_loading.py tests/test_layouts.py
"""

import json
import math
import re
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from hf.config import FP8_BLOCK, ModelConfig
from support.files import atomic, read_json

SKIPPED = re.compile(r"^(model\.)?(visual|mtp)\.|\.rotary_emb\.inv_freq$")
EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight$")
SHARD = re.compile(r"(.*\.ngram_embedding)\.shard_(\d+)\.weight$")
TABLE = ".ngram_embedding.weight"  # stays on the host in the file's dtype; its rows are converted
FLOAT32 = (".A_log", ".dt_bias", ".weight_scale")  # whatever the dtype asked for
OTHER_FP8 = (torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
WHOLE = (slice(None),)


def save_tensors(path, tensors: dict[str, Tensor], metadata: dict | None = None) -> None:
    metadata = {"format": "pt"} | {k: json.dumps(v) for k, v in (metadata or {}).items()}
    with atomic(path) as temporary:
        try:
            save_file({k: v.detach().contiguous() for k, v in tensors.items()}, temporary, metadata)
        except SafetensorError as error:  # how a full disk is said
            raise OSError(f"{path} could not be written: {error}") from None


def open_tensors(path):
    """`safetensors.safe_open` with errors that name the file."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path} is missing")
    try:
        return safe_open(path, "pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is damaged or no safetensors file: {error}") from None


def checkpoint_folder(name: str) -> Path:
    """A folder as it is; else the name of a hub's repository, fetched if huggingface_hub is
    installed."""
    if Path(name).is_dir() or name.count("/") != 1 or name.startswith((".", "/")):
        return Path(name)
    try:
        import huggingface_hub
    except ImportError:
        raise FileNotFoundError(
            f"{name} is no folder here; as a hub's name it needs: pip install huggingface_hub, or "
            f"fetch it yourself: hf download {name} --local-dir {name.split('/')[1]}"
        ) from None
    wanted = ["*.json", "*.safetensors", "*.jinja"]
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=wanted))
    except Exception as error:  # the hub's client raises many kinds
        raise FileNotFoundError(f"{name} is no folder here, and no hub gave it: {error}") from None


def tensor_files(folder) -> dict[str, Path]:
    """Every tensor of a checkpoint folder and the file it is in: one file, or shards with an
    index."""
    folder = Path(folder)
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        single = folder / "model.safetensors"
        with open_tensors(single) as file:
            return dict.fromkeys(file.keys(), single)
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not {type(s) for s in shards.values()} == {str}:
        raise ValueError(f"{index} holds no weight_map")
    for shard in sorted(set(shards.values())):
        with open_tensors(folder / shard) as file:
            lacking = {n for n, s in shards.items() if s == shard} - set(file.keys())
        if lacking:
            where = folder / shard
            raise ValueError(f"{where}: tensor {min(lacking)}, named by the index, is missing")
    return {name: folder / shard for name, shard in shards.items()}


def layout(config: ModelConfig):
    """A function of a stored tensor's name and the module's tensors: the module's name and the
    region to fill, or None for what is skipped (vision tower, drafting heads, rotary
    frequencies)."""

    def place(stored: str, wanted: dict):
        if SKIPPED.search(stored):
            return None
        name = stored.replace("model.language_model.", "model.", 1)
        if found := EXPERT.match(name):  # into the fused tensor, gate rows first
            experts, number, kind = found[1], int(found[2]), found[3]
            width = config.moe_intermediate_size
            if kind == "down":
                return f"{experts}.down_proj", (number,)
            rows = slice(0, width) if kind == "gate" else slice(width, 2 * width)
            return f"{experts}.gate_up_proj", (number, rows)
        if (found := SHARD.match(name)) and (table := f"{found[1]}.weight") in wanted:
            rows = -(-wanted[table].shape[0] // config.split_ngram_parts)
            return table, (slice(int(found[2]) * rows, (int(found[2]) + 1) * rows),)
        return name, WHOLE

    return place


def flat(stored: str, wanted: dict):
    """The layout of a drafter's folder: names with or without a prefix."""
    return stored.removeprefix("model."), WHOLE


def plan(wanted: dict, shapes: dict, where: dict, place, tied: dict, folder) -> tuple[dict, int]:
    """Which stored tensors fill which of the module's: {name: [(stored, region)]}, and how many
    are skipped. wanted {name: tensor, meta or not}, shapes {stored: shape}, where {stored: file},
    tied {name: the other name it is, if absent}."""
    parts, skipped = {}, 0
    for stored, shape in shapes.items():
        if stored.endswith("_scale_inv") and stored.removesuffix("_scale_inv") in shapes:
            continue  # read with its weight
        if (found := place(stored, wanted)) is None:
            skipped += 1
            continue
        name, region = found
        try:
            fits = tuple(wanted[name][region].shape) if wanted[name].dim() else ()
        except (KeyError, IndexError):
            raise ValueError(f"{where[stored]}: tensor {stored} has no place here") from None
        if fits != tuple(shape) and not (fits == () and tuple(shape) == (1,)):
            raise ValueError(
                f"{where[stored]}: tensor {stored} has shape {tuple(shape)}, the config says {fits}"
            )
        parts.setdefault(name, []).append((stored, region))
    parts = {name: parts[other] for name, other in tied.items() if other in parts} | parts
    for name, tensor in wanted.items():
        regions = [region for _, region in parts.get(name, ())]
        held = sum(tensor[region].numel() if tensor.dim() else 1 for region in regions)
        if held != tensor.numel() and not name.endswith(".weight_scale"):
            what = f"has {held} of {tensor.numel()} numbers" if held else "is missing"
            raise ValueError(f"{folder}: tensor {name} {what}")
    return parts, skipped


def read(name: str, stored: str, wanted: Tensor, shapes: dict, where: dict, opened: dict) -> Tensor:
    """One stored tensor, dequantised if it is FP8 with block scales, checked to be finite."""
    path = where[stored]
    tensor = opened[path].get_tensor(stored)
    if tensor.is_floating_point() != wanted.is_floating_point():
        kind = "a floating point type" if wanted.is_floating_point() else "integers"
        raise ValueError(f"{path}: tensor {stored} holds {tensor.dtype}, {kind} is needed")
    if f"{stored}_scale_inv" in shapes and tensor.dtype != torch.float8_e4m3fn:
        raise ValueError(f"{path}: tensor {stored} has scales but holds {tensor.dtype}, no FP8")
    if tensor.dtype in OTHER_FP8:
        raise ValueError(f"{path}: tensor {stored} holds {tensor.dtype}: not implemented")
    if tensor.dtype == torch.float8_e4m3fn and name.endswith(TABLE):
        finite = not (tensor.view(torch.uint8) & 0x7F == 0x7F).any()
    else:
        if tensor.dtype == torch.float8_e4m3fn:
            scales = f"{stored}_scale_inv"
            if scales not in shapes:
                raise ValueError(f"{path}: tensor {stored} is FP8 but {scales} is missing")
            tensor = dequantised(tensor, opened[where[scales]].get_tensor(scales))
        finite = all(bound.isfinite() for bound in tensor.aminmax())
    if not finite:
        raise ValueError(f"{path}: tensor {stored} holds NaN or infinite values")
    return tensor


def stored_dtype(found: dict, folder) -> torch.dtype | None:
    """What a folder's weights are to be, if nobody says: what its config names, else what its
    embedding is stored as; bfloat16 for FP8."""
    text = found.get("text_config") or {}
    named = [d.get(key) for d in (text, found) for key in ("dtype", "torch_dtype") if d.get(key)]
    if named and isinstance(kind := getattr(torch, str(named[0]), None), torch.dtype):
        return kind if kind.itemsize > 1 else torch.bfloat16
    for name, path in tensor_files(folder).items():
        if name.endswith("embed_tokens.weight"):
            kind = open_tensors(path).get_slice(name).get_dtype()
            return {"F32": torch.float32, "F16": torch.float16}.get(kind, torch.bfloat16)
    return None


def load_weights(module: nn.Module, folder, device="cpu", dtype=None, place=flat, tied=None) -> int:
    """Fill a module (built on meta or not) from a folder's shards, tensor by tensor, straight to
    device and dtype (None keeps the file's). Returns how many tensors were skipped.

    `place` says where each stored tensor goes (see `layout`); `tied` {name: other name} may be
    absent, being the other. FP8 weights with a `_scale_inv` per 128 x 128 block are dequantised (to
    bfloat16 if dtype is None).
    """
    wanted, where = module.state_dict(keep_vars=True), tensor_files(folder)
    opened = {path: open_tensors(path) for path in set(where.values())}
    shapes = {stored: opened[path].get_slice(stored).get_shape() for stored, path in where.items()}
    parts, skipped = plan(wanted, shapes, where, place, tied or {}, folder)
    same = {n: o for n, o in (tied or {}).items() if parts[n] == parts[o]}  # read once
    parts = {name: own for name, own in parts.items() if name not in same}
    found, largest, touched = {}, max(t.nbytes for t in wanted.values()), 0
    for name in sorted(parts, key=lambda name: str(where[parts[name][0][0]])):  # shard after shard
        host, kept = name.endswith(TABLE), name.endswith(FLOAT32)
        to_device = "cpu" if host else device
        for stored, region in parts[name]:
            tensor, size = None, math.prod(shapes[stored]) * 4
            if touched + size > largest:  # a mapped file keeps what was read of it in memory
                opened, touched = {path: open_tensors(path) for path in opened}, 0
            tensor = read(name, stored, wanted[name], shapes, where, opened)
            touched += size
            quantised = opened[where[stored]].get_slice(stored).get_dtype() == "F8_E4M3"
            to_dtype = torch.float32 if kept else dtype or (torch.bfloat16 if quantised else None)
            if host or not tensor.is_floating_point():
                to_dtype = None
            if len(parts[name]) == 1:
                small = tensor.nbytes < 2**20  # not worth keeping the file mapped for
                tensor = tensor.reshape(wanted[name].shape)  # a scale may be stored as (1,)
                found[name] = (tensor.clone() if small else tensor).to(to_device, to_dtype)
                continue
            if name not in found:
                shape = wanted[name].shape
                found[name] = torch.empty(shape, dtype=to_dtype or tensor.dtype, device=to_device)
            if host and tensor.dtype != found[name].dtype:
                raise ValueError(
                    f"{where[stored]}: tensor {stored} holds {tensor.dtype}, another "
                    f"shard of it {found[name].dtype}"
                )
            found[name][region] = tensor.to(found[name].dtype)
        found[name] = placed(found[name], wanted[name])
    lacking = wanted.keys() - found.keys() - same.keys()
    scales = {name: torch.ones(()) for name in lacking}  # of a table not in FP8
    for name in scales:
        if found[name.removesuffix("_scale")].dtype == torch.float8_e4m3fn:
            raise ValueError(f"{folder}: the table is FP8 and tensor {name} is missing")
    found |= scales | {name: found[other] for name, other in same.items()}
    module.load_state_dict(found, assign=True)
    return skipped


def placed(tensor: Tensor, like: Tensor) -> Tensor:
    """This process's part of a tensor that is to become the parameter `like`, if that is spread
    over several (FSDP2); otherwise the tensor."""
    if not hasattr(like, "device_mesh"):
        return tensor
    from torch.distributed.tensor import DTensor, distribute_tensor  # a second at start-up

    where = like.device_mesh, like.placements
    part = distribute_tensor(tensor, *where, src_data_rank=None).to_local().clone()
    return DTensor.from_local(part, *where, shape=tensor.shape, stride=tensor.stride())


def in_shards(tensors: dict[str, Tensor], parts: int) -> dict[str, Tensor]:
    """Tensors to be saved, n-gram tables in the shards that releases have them in."""
    saved = {}
    for name, tensor in tensors.items():
        if name.endswith(TABLE):
            stem = name.removesuffix("weight")
            shards = enumerate(tensor.chunk(parts))
            saved |= {f"{stem}shard_{i}.weight": shard for i, shard in shards}
        elif not name.endswith(f"{TABLE}_scale") or tensors[name[:-6]].element_size() == 1:
            saved[name] = tensor
    return saved


def by_columns(module: nn.Module) -> None:
    """Lay out float32 matrices on a CPU input by input: it multiplies one row by them a fifth
    sooner, which is what decoding does. Their values and names stay as they are."""
    for one in module.modules():
        kind = (one.weight.device.type, one.weight.dtype) if isinstance(one, nn.Linear) else None
        if kind == ("cpu", torch.float32) and type(one.weight) is nn.Parameter:
            one.weight.data = one.weight.data.t().contiguous().t()


def dequantised(weight: Tensor, scales: Tensor) -> Tensor:
    """weight (..., R, C) in FP8 times its scale per 128 x 128 block, scales (..., ceil(R/128),
    ceil(C/128))."""
    *lead, R, C = weight.shape
    if tuple(scales.shape) != (*lead, -(-R // FP8_BLOCK), -(-C // FP8_BLOCK)):
        raise ValueError(f"FP8 scales {tuple(scales.shape)} do not fit {tuple(weight.shape)}")
    whole = scales.float().repeat_interleave(FP8_BLOCK, -2).repeat_interleave(FP8_BLOCK, -1)
    return weight.float() * whole[..., :R, :C]
