"""The tensors of a model folder: which file each one is in, and which tensor of a module it fills.

A folder may hold one file or shards with an index, experts fused or one by one, an n-gram table in
parts, weights in FP8 with a scale per block, names with another prefix. A *layout* says for each
stored tensor which of the module's tensors it is, or which region of one. `load_weights` then
assembles the module's tensors one by one, each straight on its device and in its dtype.

Every tensor of the module must be in the folder (but a tied head, and the scale of a table without
FP8), complete, finite and of the right shape. Every stored tensor must be used, or match `SKIPPED`.

    pytest tests/hf/test_tensors.py tests/hf/test_layouts.py
"""

import math
import os
import re
import sys
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from hf.config import FP8_BLOCK
from hf.files import open_tensors, read_json

SINGLE_FILE = "model.safetensors"
SKIPPED = re.compile(r"^(model\.)?(visual|mtp)\.|\.rotary_emb\.inv_freq$")
EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight$")
TABLE_PART = re.compile(r"(.*\.ngram_embedding)\.shard_(\d+)\.weight$")
TABLE = ".ngram_embedding.weight"  # stays on the host in the file's dtype; its rows are converted
HEAD = "lm_head.weight"
EMBEDDINGS = ("model.embed_tokens.weight", "model.language_model.embed_tokens.weight")
FLOAT32 = (".A_log", ".dt_bias", ".weight_scale")  # whatever dtype the other tensors get
FP8 = torch.float8_e4m3fn
OTHER_FP8 = (torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
WHOLE = (...,)  # the region that is all of a tensor
SMALL = 2**20  # bytes; a smaller tensor is copied, so that its file need not stay mapped
LARGE = 2**29  # numbers; a module that is larger takes seconds to load


def tensor_files(folder) -> dict[str, Path]:
    """Return every tensor of a model folder and the file that it is in."""
    folder = Path(folder)
    index = folder / f"{SINGLE_FILE}.index.json"
    if not index.is_file():
        path = folder / SINGLE_FILE
        with open_tensors(path) as file:
            return dict.fromkeys(file.keys(), path)
    shards = read_json(index).get("weight_map")  # {tensor: file name}
    if not isinstance(shards, dict) or {type(shard) for shard in shards.values()} != {str}:
        raise ValueError(f"{index} holds no weight_map")
    if (folder / SINGLE_FILE).exists() and set(shards.values()) != {SINGLE_FILE}:
        both = f"{SINGLE_FILE} and {index.name}, which names other files"
        raise ValueError(f"{folder} holds {both}: remove one of the two")
    for shard in sorted(set(shards.values())):
        path = folder / shard
        with open_tensors(path) as file:
            names = set(file.keys())
        named = {name for name in shards if shards[name] == shard}
        if named - names:
            raise ValueError(f"{path}: tensor {min(named - names)}, named by the index, is missing")
        if names - named:
            raise ValueError(f"{path}: tensor {min(names - named)} is not named by {index.name}")
    return {name: folder / shard for name, shard in shards.items()}


def stored_dtype(config_dict: dict, folder) -> torch.dtype | None:
    """Return the dtype to load a folder in if nobody names one: that of its config, else that of
    its embedding; bfloat16 for FP8. The outer dtype of a nested config counts, as in transformers,
    which leaves the inner one as it was when it saves a model in another dtype."""
    name = ""
    for block in (config_dict.get("text_config") or {}, config_dict):
        names = [block[key] for key in ("dtype", "torch_dtype") if block.get(key)]
        if len(set(map(str, names))) == 2:
            twice = f"dtype = {names[0]!r} contradicts torch_dtype = {names[1]!r}"
            raise ValueError(f"{folder}/config.json: {twice}; remove one, or choose by --dtype")
        name = names[0] if names else name
    if name:
        dtype = getattr(torch, str(name), None)
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            accepted = "none of float32, bfloat16, float16: choose by --dtype"
            raise ValueError(f"{folder}/config.json: dtype = {name!r} is {accepted}")
        return dtype if dtype.itemsize > 1 else torch.bfloat16
    for name, path in tensor_files(folder).items():
        if name.endswith("embed_tokens.weight"):
            kind = open_tensors(path).get_slice(name).get_dtype()
            return {"F32": torch.float32, "F16": torch.float16}.get(kind, torch.bfloat16)
    return None


def has_other_head(folder) -> bool:
    """Return whether a target's folder holds a head that differs from its embedding: in a number,
    in the number type, or in FP8's scales. They are compared in the files, which are mapped:
    nothing is copied."""
    paths = tensor_files(folder)
    embeddings = [name for name in EMBEDDINGS if name in paths]
    if HEAD not in paths or not embeddings:
        return False
    for suffix in ("", "_scale_inv"):
        names = [name + suffix for name in (HEAD, embeddings[0])]
        parts = [open_tensors(paths[n]).get_tensor(n) for n in names if n in paths]
        if len(parts) == 1:
            return True
        if parts and (parts[0].dtype != parts[1].dtype or not torch.equal(*parts)):
            return True
    return False


def layout(config):
    """Return the layout of a target's folder: a function of a stored name and the module's tensors.
    It returns the module's name and the region to fill, or None for what is skipped (vision tower,
    drafting heads, rotary frequencies). `config` is a ModelConfig."""
    width = config.moe_intermediate_size

    def target_names(stored: str, parameters: dict):
        if SKIPPED.search(stored):
            return None
        name = stored.replace("model.language_model.", "model.", 1)
        expert = EXPERT.match(name)
        if expert and expert[3] == "down":
            return f"{expert[1]}.down_proj", (int(expert[2]),)
        if expert:  # gate and up are one tensor, gate rows first
            rows = slice(0, width) if expert[3] == "gate" else slice(width, 2 * width)
            return f"{expert[1]}.gate_up_proj", (int(expert[2]), rows)
        part = TABLE_PART.match(name)
        table = f"{part[1]}.weight" if part else None
        if table in parameters:
            num_rows = -(-parameters[table].shape[0] // config.split_ngram_parts)
            start = int(part[2]) * num_rows
            return table, (slice(start, start + num_rows),)
        return name, WHOLE

    return target_names


def flat_names(stored: str, parameters: dict):
    """The layout of a drafter's folder: names with or without a prefix."""
    return stored.removeprefix("model."), WHOLE


def match_tensors(parameters, shapes, paths, layout, tied, folder) -> tuple[dict, int]:
    """Return which stored tensors fill each tensor of the module, {name: [(stored name, region)]},
    and how many stored tensors are skipped.

    parameters {name: tensor} are the module's; shapes and paths {stored name: ...} the folder's.
    tied {name: other name}: the first is the same tensor as the second, stored or not.
    """
    sources = {}
    num_skipped = 0
    for stored, shape in shapes.items():
        if stored.endswith("_scale_inv") and stored.removesuffix("_scale_inv") in shapes:
            continue  # read with its weight
        label = f"{paths[stored]}: tensor {stored}"
        target = layout(stored, parameters)
        if target is None:
            num_skipped += 1
            continue
        name, region = target
        try:
            expected = tuple(parameters[name][region].shape)
        except (KeyError, IndexError):
            raise ValueError(f"{label} has no place here") from None
        is_scalar = expected == () and tuple(shape) == (1,)
        if expected != tuple(shape) and not is_scalar:
            raise ValueError(f"{label} has shape {tuple(shape)}, the config says {expected}")
        sources.setdefault(name, []).append((stored, region))
    for name, other in tied.items():
        if other in sources:
            sources[name] = sources[other]
    for name, parameter in parameters.items():
        count = sum(parameter[region].numel() for _, region in sources.get(name, ()))
        is_optional = name.endswith(".weight_scale")  # a table that is not FP8 has none
        if count != parameter.numel() and not is_optional:
            problem = f"has {count} of {parameter.numel()} numbers" if count else "is missing"
            raise ValueError(f"{folder}: tensor {name} {problem}")
    return sources, num_skipped


class TensorReader:
    """Reads the tensors of a model folder one by one, each checked, on its device, in its dtype.
    dtype None keeps the file's, bfloat16 for FP8."""

    def __init__(self, folder, device, dtype, max_bytes: int):
        self.device = device
        self.dtype = dtype
        self.max_bytes = max_bytes
        self.paths = tensor_files(folder)
        self._open_files()
        slices = {name: self.files[path].get_slice(name) for name, path in self.paths.items()}
        self.shapes = {name: part.get_shape() for name, part in slices.items()}

    def _open_files(self) -> None:
        self.files = {path: open_tensors(path) for path in set(self.paths.values())}
        self.num_bytes_read = 0

    def _get_tensor(self, name: str) -> Tensor:
        """Read a tensor as it is stored. A mapped file keeps in memory what was read of it, so the
        files are opened anew before this exceeds max_bytes."""
        num_bytes = math.prod(self.shapes[name]) * 4
        if self.num_bytes_read + num_bytes > self.max_bytes:
            self._open_files()
        self.num_bytes_read += num_bytes
        tensor = self.files[self.paths[name]].get_tensor(name)
        return tensor.clone() if tensor.nbytes < SMALL else tensor

    def read_tensor(self, stored: str, name: str, parameter: Tensor) -> Tensor:
        """Read the stored tensor that fills the module's tensor `name` or a region of it."""
        label = f"{self.paths[stored]}: tensor {stored}"
        tensor = self._get_tensor(stored)
        scales = f"{stored}_scale_inv"
        if tensor.is_floating_point() != parameter.is_floating_point():
            needed = "a floating point type" if parameter.is_floating_point() else "integers"
            raise ValueError(f"{label} holds {tensor.dtype}, {needed} is needed")
        if scales in self.shapes and tensor.dtype != FP8:
            raise ValueError(f"{label} has scales but holds {tensor.dtype}, no FP8")
        if tensor.dtype in OTHER_FP8:
            raise ValueError(f"{label} holds {tensor.dtype}: not implemented")
        is_table = name.endswith(TABLE)
        dtype = torch.float32 if name.endswith(FLOAT32) else self.dtype
        if tensor.dtype == FP8 and not is_table:
            if scales not in self.shapes:
                raise ValueError(f"{label} is FP8 but {scales} is missing")
            tensor = dequantise(tensor, self._get_tensor(scales))
            dtype = dtype or torch.bfloat16
        if not _is_finite(tensor):
            raise ValueError(f"{label} holds NaN or infinite values")
        if is_table:
            return tensor
        return tensor.to(self.device, dtype if tensor.is_floating_point() else None)

    def assemble(self, name: str, parts: list, parameter: Tensor) -> Tensor:
        """Return one tensor of the module from its parts, [(stored name, region)]."""
        if len(parts) == 1:
            tensor = self.read_tensor(parts[0][0], name, parameter)
            return tensor.reshape(parameter.shape)  # a scale may be stored as (1,)
        whole = None
        for stored, region in parts:
            part = self.read_tensor(stored, name, parameter)
            if whole is None:
                whole = torch.empty(parameter.shape, dtype=part.dtype, device=part.device)
            if name.endswith(TABLE) and part.dtype != whole.dtype:
                dtypes = f"holds {part.dtype}, another shard of it {whole.dtype}"
                raise ValueError(f"{self.paths[stored]}: tensor {stored} {dtypes}")
            whole[region] = part
            del part  # or its file stays mapped while the next part is read
        return whole


def dequantise(weight: Tensor, scales: Tensor) -> Tensor:
    """Multiply FP8 weights (..., R, C) by their scale per 128 x 128 block, scales
    (..., ceil(R/128), ceil(C/128)). Return float32."""
    *leading, R, C = weight.shape
    if tuple(scales.shape) != (*leading, -(-R // FP8_BLOCK), -(-C // FP8_BLOCK)):
        raise ValueError(f"FP8 scales {tuple(scales.shape)} do not fit {tuple(weight.shape)}")
    per_weight = scales.float().repeat_interleave(FP8_BLOCK, -2).repeat_interleave(FP8_BLOCK, -1)
    return weight.float() * per_weight[..., :R, :C]


def _is_finite(tensor: Tensor) -> bool:
    if tensor.dtype == FP8:  # which has no minimum here; NaN is the pattern of seven ones
        return not (tensor.view(torch.uint8) & 0x7F == 0x7F).any()
    return all(bound.isfinite() for bound in tensor.aminmax())


def load_weights(module, folder, device="cpu", dtype=None, layout=flat_names, tied=None) -> int:
    """Fill a torch module (on meta or not) from a model folder. Return how many stored tensors were
    skipped. dtype None keeps the file's, bfloat16 for FP8. layout and tied: see `match_tensors`."""
    tied = tied or {}
    parameters = module.state_dict(keep_vars=True)
    reader = TensorReader(folder, device, dtype, max(p.nbytes for p in parameters.values()))
    paths = reader.paths
    sources, num_skipped = match_tensors(parameters, reader.shapes, paths, layout, tied, folder)
    shared = {name: other for name, other in tied.items() if sources[name] == sources[other]}
    names = [name for name in sources if name not in shared]
    names.sort(key=lambda name: str(paths[sources[name][0][0]]))  # file after file
    tensors = {}
    with _loading_bar(folder, sum(parameters[name].numel() for name in names)) as bar:
        for name in names:
            tensor = reader.assemble(name, sources[name], parameters[name])
            tensors[name] = local_part(tensor, parameters[name])
            bar.update(parameters[name].numel())
    for name in parameters.keys() - tensors.keys() - shared.keys():  # scales of tables
        if tensors[name.removesuffix("_scale")].dtype == FP8:
            raise ValueError(f"{folder}: the table is FP8 and tensor {name} is missing")
        tensors[name] = torch.ones(())
    for name, other in shared.items():
        tensors[name] = tensors[other]
    module.load_state_dict(tensors, assign=True)
    return num_skipped


def _loading_bar(folder, count: int) -> tqdm:
    """A bar for what takes long, and on a terminal for all; on the first process alone."""
    is_short = count < LARGE and not sys.stderr.isatty()
    quiet = is_short or os.environ.get("RANK", "0") != "0"
    how = dict(unit=" numbers", unit_scale=True, leave=False, disable=quiet)
    return tqdm(total=count, desc=f"loading {Path(folder).name}", **how)


def local_part(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Return this process's part of a tensor that becomes `parameter`, if that is spread over
    several processes (FSDP2); otherwise the tensor."""
    if not hasattr(parameter, "device_mesh"):
        return tensor
    from torch.distributed.tensor import DTensor, distribute_tensor  # takes a second to import

    mesh, placements = parameter.device_mesh, parameter.placements
    part = distribute_tensor(tensor, mesh, placements, src_data_rank=None).to_local().clone()
    return DTensor.from_local(part, mesh, placements, shape=tensor.shape, stride=tensor.stride())


def in_shards(tensors: dict[str, Tensor], num_parts: int) -> dict[str, Tensor]:
    """Return tensors as they are saved: n-gram tables in the parts that releases have them in."""
    saved = {}
    for name, tensor in tensors.items():
        is_scale = name.endswith(f"{TABLE}_scale")
        if name.endswith(TABLE):
            stem = name.removesuffix("weight")
            for number, part in enumerate(tensor.chunk(num_parts)):
                saved[f"{stem}shard_{number}.weight"] = part
        elif not is_scale or tensors[name.removesuffix("_scale")].dtype == FP8:  # else it is 1
            saved[name] = tensor
    return saved
