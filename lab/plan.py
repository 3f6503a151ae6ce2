"""The memory that a training run needs on every GPU, by purpose, from shapes alone.

The target is built on the meta device, from a config.json (of a folder, or fetched from a hub) or
one of sizes.json. Each plan ends with the whole command to paste. Weights, optimizer and trunks are
exact. Temporary tensors are estimated and marked ~: a tree with no node merged or
cut short, activations, masks, logits, gathered layers.

    python -m lab plan --target 27B --drafter-kind dflash2 --draft-layers 5 --batch-size 16
    pytest tests/lab/test_plan.py
"""

import dataclasses
import shlex
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

import replay
from drafter import BLOCKS_AT_ONCE, Drafter, DrafterConfig, drafter_class
from hf.files import read_json
from hf.tensors import TABLE, tensor_files
from model import ModelConfig
from support.flags import flag, option_name, precision_of, unmet_needs
from support.gpu import CHUNK_COPIES, CHUNK_SHARE, GPU_CHUNK_ELEMENTS
from support.optim import make_optimizers
from support.prepare import fresh_drafter
from target import PREFILL_TOKENS_ON_GPU, Target
from train import TrainConfig, objective_of

GIB = 2**30
BF16_BYTES = 2  # bytes of a number in bfloat16, the target's type
USABLE = 0.9  # share of a GPU's memory that may be planned with
ON_POLICY = ("specopd", "story")
SIZES = ("num_references", "response_length")  # needed, from whatever file references will come


@dataclass(frozen=True)
class Config(TrainConfig):
    RUNS_ELSEWHERE = True  # --device need not be here

    out: str = flag("runs/plan", "folder for summary.json", group="the plan")
    gpu_gib: float = flag(80.0, "memory of a GPU", group="the plan", low=1)

    NEEDS = tuple(row for row in TrainConfig.NEEDS if row[0] not in SIZES)


def num_parameters(module) -> int:
    """Parameters of a module, without n-gram tables, which stay on the host."""
    named = module.named_parameters()
    return sum(p.numel() for name, p in named if not name.endswith(TABLE))


def trunk_bytes(c: ModelConfig, T: int, num_taps: int, itemsize: int, spacing=None) -> dict:
    """Bytes of a trunk of T tokens by purpose. itemsize: of a number; spacing: tokens between
    recurrent states, by default the one that replay.py chooses."""
    spacing = spacing or replay.checkpoint_spacing(c, itemsize)
    num_linear = sum(c.is_linear(layer) for layer in range(c.num_hidden_layers))
    num_attention = c.num_hidden_layers - num_linear
    keys_values = 2 * c.num_key_value_heads * c.head_dim
    linear = num_linear * replay.token_bytes(c, itemsize)
    if c.has_streams:
        keys_values += 2 * c.indexer_head_dim
        linear += len(c.ple_layer_ids) * (8 + c.num_streams * c.hidden_size * itemsize)
    num_states = T // spacing + 1  # the last one is kept, too
    return {
        "keys and values": T * num_attention * itemsize * keys_values,
        "linear layers' tokens": T * linear,
        "recurrent states": num_linear * num_states * (replay.state_bytes(c) + 8),
        "hidden and taps": T * (itemsize * c.hidden_size * (1 + num_taps) + 8),
    }


def drafter_bytes(drafter: Drafter, config, num_gpus: int) -> dict[str, int]:
    """Bytes of weights and gradients in float32, and of what the optimizers remember."""
    count = num_parameters(drafter)
    remembered = Counter()  # parameters that each optimizer trains
    for optimizer in make_optimizers(drafter, config.matrix_lr, config.lr):
        for group in optimizer.param_groups:
            trained = sum(p.numel() for p in group["params"] if p.requires_grad)
            remembered[type(optimizer).__name__] += trained
    largest = max(p.numel() for p in drafter.parameters() if p.requires_grad)
    sizes = {
        "drafter's weights": 4 * count,
        # the buckets of DistributedDataParallel stand beside them
        "drafter's gradients": 4 * remembered.total() * (2 if num_gpus > 1 else 1),
        "optimizer": 8 * remembered["AdamW"] + 4 * remembered["Muon"],
        # its mix with the gradient in float32, and two copies and a square in bfloat16
        "~ optimizer at work": 10 * largest if remembered["Muon"] else 0,
    }
    if precision_of(config) == "bfloat16":
        sizes["drafter's weights in bfloat16"] = 2 * count
    return sizes


def moment_bytes(drafter: Drafter, config, B: int, T: int) -> dict[str, int]:
    """Estimates for B sequences of T tokens at once: of the tree, the prefill and the loss."""
    c, d = drafter.target.config, drafter.config
    W, A, K = d.num_draft_tokens, config.num_anchors, config.num_branches
    on_policy = config.mode in ON_POLICY
    num_nodes = A * K * (W - 1) if on_policy else 0
    wide = c.intermediate_size
    if c.has_streams:
        experts = c.num_experts_per_tok * c.moe_intermediate_size
        wide = experts + c.shared_expert_intermediate_size + c.num_streams * c.hidden_size
    node = sum(trunk_bytes(c, 1, len(d.target_layer_ids), BF16_BYTES).values())
    node -= trunk_bytes(c, 1, 0, BF16_BYTES)["recurrent states"]
    # of one layer at a time: gathered, decayed, and the result
    states = 3 * replay.state_bytes(c) if c.hybrid and on_policy else 0
    # on a GPU a masked kernel reads keys and values once for every query head
    is_grouped = c.num_key_value_heads < c.num_attention_heads and on_policy
    repeated = 2 * BF16_BYTES * c.num_attention_heads * c.head_dim * is_grouped
    token_in_layer = (6 * c.hidden_size + 3 * wide) * BF16_BYTES
    num_logits = B * A * (K + has_text(config)) * W * c.vocab_size
    return {
        "~ tree: what it keeps": B * num_nodes * node,
        "~ tree: a layer at work": B * num_nodes * token_in_layer,
        "~ tree: states at anchors": B * A * states,
        "~ tree: its mask": B * num_nodes * (T + num_nodes) * (1 + BF16_BYTES),
        "~ tree: keys of every head": B * (T + num_nodes) * repeated,
        "~ prefill: a layer at work": B * min(T, PREFILL_TOKENS_ON_GPU) * token_in_layer,
        "~ p's hidden states": B * num_p_rows(drafter, config) * c.hidden_size * BF16_BYTES,
        "~ logits, a chunk": 4 * chunk_logits(config, num_logits) * CHUNK_COPIES,
        **graph_bytes(drafter, config, B, T),
    }


def chunk_logits(config, num_logits: int) -> int:
    """Of so many logits, those that are worked on at once: `gpu.chunk_elements` on this GPU."""
    memory = config.gpu_gib * GIB
    return min(num_logits, GPU_CHUNK_ELEMENTS, int(memory * CHUNK_SHARE) // (4 * CHUNK_COPIES))


def has_text(config) -> bool:
    """Whether the text is one more branch."""
    return config.mode in ON_POLICY and config.text_branch


def num_p_rows(drafter: Drafter, config) -> int:
    """The target's hidden states that a text's blocks hold, for p."""
    W, A = drafter.config.num_draft_tokens, config.num_anchors
    if config.mode in ON_POLICY:
        return A * (config.num_branches * (W + 1) + has_text(config) * W)
    return A * W if objective_of(config, drafter).needs_p else 0


def graph_bytes(drafter: Drafter, config, B: int, T: int) -> dict[str, int]:
    """Estimates of what the drafter's layers keep for the backward pass, logits aside. In bfloat16
    residuals, norms and their inputs stay float32, and every matrix has a copy of its input."""
    d, A = drafter.config, config.num_anchors
    is_bfloat16 = precision_of(config) == "bfloat16"
    b, num_taps = d.block_size, len(d.target_layer_ids)
    itemsize = 2 if is_bfloat16 else 4
    C, wide = d.layers.hidden_size, d.layers.intermediate_size
    num_layers = len(drafter.layers)
    queries = d.layers.num_attention_heads * d.layers.head_dim
    keys_values = 2 * d.layers.num_key_value_heads * d.layers.head_dim
    slot = 4 * (5 * C + 2 * queries + keys_values)  # bytes of a slot in a layer
    slot += itemsize * (3 * queries + keys_values + 4 * wide + 3 * C * is_bfloat16)
    if d.kind == "dflash2":
        slot += 32 * d.conv_kernel_size * C  # its convolutions, in float32
    token = 8 * C + itemsize * num_taps * C  # bytes of a context token
    token += num_layers * ((4 + 2 * itemsize) * keys_values + 4 * C * is_bfloat16)
    at_once = min(A, BLOCKS_AT_ONCE)
    num_parts = -(-A // BLOCKS_AT_ONCE)
    mask = at_once * b * (T + at_once * b) * num_parts
    mask *= 1 + itemsize * (1 if config.recompute else num_layers)
    slots = num_layers * 4 * C + slot if config.recompute else num_layers * slot
    # on a GPU a masked kernel reads keys and values once for every query head
    columns = T + at_once * b if config.recompute else num_layers * (num_parts * T + A * b)
    repeated = 2 * itemsize * queries * columns if 2 * queries > keys_values else 0
    return {
        "~ drafter: context": B * T * token,
        "~ drafter: blocks": B * (A * b * slots + mask),
        "~ drafter: keys of every head": B * repeated,
        "~ drafter: a layer's gradients": B * A * b * slot,
    }


def bytes_needed(target: Target, drafter: Drafter, config, num_gpus, B: int, sharded: bool) -> dict:
    """Bytes on each of so many GPUs, with B sequences at once on each."""
    T = config.prompt_length + config.response_length
    layers = [num_parameters(layer) for layer in target.model.layers]
    outside = num_parameters(target) - sum(layers)
    weights = {"target's weights": BF16_BYTES * num_parameters(target)}
    if sharded:
        weights = {
            "target's weights, a share": BF16_BYTES * (outside + -(-sum(layers) // num_gpus)),
            "~ three of its layers, gathered": 3 * BF16_BYTES * max(layers),
        }
    num_taps = len(drafter.config.target_layer_ids)
    one_trunk = trunk_bytes(target.config, T, num_taps, BF16_BYTES)
    trunks = {f"trunks: {name}": B * size for name, size in one_trunk.items() if size}
    of_all_references = config.num_references * sum(one_trunk.values())
    if of_all_references <= config.cache_gib * GIB:
        trunks["trunks of all references"] = of_all_references
    moment = moment_bytes(drafter, config, B, T)
    num_waiting = config.batch_size // num_gpus - B  # with --grad-accum: drawn, not yet learned
    if num_waiting > 0:
        count = (num_taps * T + num_p_rows(drafter, config)) * target.config.hidden_size
        moment["blocks of the other parts"] = num_waiting * count * BF16_BYTES
    return weights | drafter_bytes(drafter, config, num_gpus) | trunks | moment


def config_path(name: str) -> Path:
    """The config.json of a folder, or of a hub's OWNER/NAME, of which only this file is fetched."""
    path = Path(name) / "config.json"
    if Path(name).is_dir() or name.count("/") != 1 or name.startswith((".", "/")):
        return path
    fetch = f"hf download {name} config.json --local-dir FOLDER"
    try:
        import huggingface_hub

        return Path(huggingface_hub.hf_hub_download(name, "config.json"))
    except ImportError:
        needs = f"as a hub's name it needs: pip install huggingface_hub, or {fetch}"
        raise FileNotFoundError(f"{name} is no folder here; {needs}") from None
    except Exception as error:  # the hub's client raises many kinds
        raise FileNotFoundError(f"{name} is no folder, and no hub gave it: {error}") from None


def config_of(name: str) -> dict:
    """The config of a size, a folder or a hub's name."""
    published = read_json(Path(__file__).with_name("sizes.json"))
    if name in published:
        return published[name]
    path = config_path(name) if name else Path()
    if path.is_file():
        return read_json(path)
    sizes = ", ".join(published)
    raise ValueError(
        f"plan: --target {name or '(none)'} is no folder with a config.json, no hub's OWNER/NAME, "
        f"nor of {sizes}"
    )


def build_on_meta(config) -> tuple[Target, Drafter]:
    """Target and drafter of the right shapes, without any numbers."""
    config_dict = config_of(config.target)
    if "block_size" in config_dict:
        raise ValueError(f"plan: {config.target} holds a drafter, not a target")
    with torch.device("meta"):
        target = Target(ModelConfig.from_dict(config_dict, config.target)).requires_grad_(False)
        if not config.drafter:
            return target, fresh_drafter(config, target, 0)
        folder = Path(config.drafter)
        names = tensor_files(folder) if any(folder.glob("*.safetensors")) else ()
        path = config_path(config.drafter)
        fields = DrafterConfig.from_dict(read_json(path), str(path), names)
        return target, drafter_class(fields)(fields, target)


def largest_fit(target, drafter, config, num_gpus: int) -> dict:
    """How many sequences fit on each GPU, the target whole if possible; if 0, the bytes of one."""
    limit = USABLE * config.gpu_gib * GIB
    for sharded in (False, True) if num_gpus > 1 else (False,):
        best = None
        for B in (2**i for i in range(12)):
            sizes = bytes_needed(target, drafter, config, num_gpus, B, sharded)
            if sum(sizes.values()) > limit:
                break
            best = {"fits": True, "sequences": B, "sharded": sharded, "bytes": sizes}
        if best:
            return best
    return {"fits": False, "bytes": sizes}


def planned_flags(config, num_gpus: int, plan: dict) -> dict:
    """The fields of a planned run that the plan decides."""
    B = plan["sequences"]
    share = config.batch_size // num_gpus
    parts = range(1, share + 1) if config.batch_size % num_gpus == 0 else ()
    grad_accum = next((n for n in parts if share % n == 0 and share // n <= B), 1)
    batch = max(num_gpus, min(B * num_gpus, config.num_references // num_gpus * num_gpus))
    decided = {"device": "cuda", "dtype": "bfloat16", "out": "runs/mine"}
    decided |= {"grad_accum": grad_accum, "shard_target": plan["sharded"]}
    decided["batch_size"] = config.batch_size if grad_accum > 1 else batch
    if plan["sharded"] and not config.references:
        decided["references"] = "references.safetensors"
    if "trunks of all references" not in plan["bytes"]:
        decided["cache_gib"] = 0.0
    if not Path(config.target).exists() and "/" not in config.target:  # one of sizes.json
        decided["target"] = "FOLDER"
    return decided


def train_command(config, num_gpus: int, plan: dict) -> str:
    """The command of a planned run: every flag that differs from train.py's defaults."""
    names = [field.name for field in dataclasses.fields(TrainConfig)]
    values = {name: getattr(config, name) for name in names}
    planned = TrainConfig(**values | planned_flags(config, num_gpus, plan))
    words = ["python"] if num_gpus == 1 else ["torchrun", f"--nproc_per_node={num_gpus}"]
    words.append("train.py")
    ignored = unmet_needs(planned)
    for field in dataclasses.fields(TrainConfig):
        value = getattr(planned, field.name)
        if value == field.default or field.name in ignored:
            continue
        option = option_name(field.name)
        if isinstance(value, bool):
            words.append(option if value else option.replace("--", "--no-", 1))
        elif isinstance(value, tuple):
            words += [option, *map(str, value)]
        else:
            words += [option, f"{value:g}" if isinstance(value, float) else str(value)]
    return shlex.join(words)


def run(config: Config) -> dict:
    if config.mode == "rollout":
        unknown = "how many blocks a rollout has, nobody knows before"
        raise ValueError(f"plan: {unknown}; --mode specopd with many --num-anchors is near")
    target, drafter = build_on_meta(config)
    figures = {"target_parameters": num_parameters(target)}
    figures["drafter_parameters"] = num_parameters(drafter)
    billions = [f"{count / 1e9:.2f} G parameters" for count in figures.values()]
    table = sum(p.numel() for p in target.parameters()) - num_parameters(target)
    on_host = f", and a table of {table / 1e9:.1f} G parameters on the host" if table else ""
    print(f"target {config.target}: {billions[0]} in bfloat16{on_host}")
    size = f"{len(drafter.layers)} layers, W = {drafter.config.num_draft_tokens}"
    print(f"drafter: {drafter.config.kind}, {size}, {billions[1]} in float32")
    blocks = f"{config.num_anchors} anchors x {config.num_branches}"
    print(f"texts of {config.prompt_length} + {config.response_length} tokens, {blocks}")
    for num_gpus in (1, 8):
        plan = largest_fit(target, drafter, config, num_gpus)
        figures[str(num_gpus)] = plan
        title = f"\n{num_gpus} x {config.gpu_gib:g} GiB"
        gib = f"{sum(plan['bytes'].values()) / GIB:.1f} GiB"
        if not plan["fits"]:
            print(f"{title}: does not fit: {gib} each for one sequence")
            continue
        print(f"{title}: {plan['sequences']} sequences at once on each, {gib}")
        for name, size in plan["bytes"].items():
            print(f"  {name:30s} {size / GIB:8.2f} GiB")
        plan["command"] = train_command(config, num_gpus, plan)
        print(f"  {plan['command']}")
    return figures
