"""What a run needs of every GPU, before anything is loaded: bytes by purpose, from shapes alone.

    python train.py --plan --target 27B --drafter-kind dflash2 --draft-layers 5 --batch-size 16
    pytest tests/test_plan.py

The target is built on the meta device, from a folder's config.json or one of the sizes below, so a
laptop does it in a minute. Exact are weights, optimizer and trunks (a test holds them against real
tensors of small models); estimates, marked ~, are what lives for a moment: a tree with no node
merged or cut short, activations, masks, logits, layers gathered.
"""

import dataclasses
from pathlib import Path

import torch

import replay
from drafter import ANCHORS, Drafter, drafter_class
from hf.config import ModelConfig
from hf.drafters import DrafterConfig
from hf.tensors import tensor_files
from loss import CHUNK_ELEMENTS, make_optimizers
from step import needs_p
from support.files import read_json
from support.prepare import fresh_drafter
from target import PREFILL, Target

FULL = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(64)]
_27B = dict(
    model_type="qwen3_5_text",
    vocab_size=248320,
    hidden_size=5120,
    intermediate_size=17408,
    num_hidden_layers=64,
    num_attention_heads=24,
    num_key_value_heads=4,
    head_dim=256,
    linear_num_key_heads=16,
    linear_num_value_heads=48,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    layer_types=FULL,
    max_position_embeddings=262144,
    rope_parameters=dict(rope_theta=1e7, rope_type="default", partial_rotary_factor=0.25),
)
SIZES = {  # real ones, as their config.json say
    "8B": dict(
        model_type="qwen3",
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        max_position_embeddings=40960,
        tie_word_embeddings=False,
    ),
    "27B": _27B,
    "125B": _27B
    | dict(
        model_type="qwen4_exp_text",
        hidden_size=2560,
        num_hidden_layers=48,
        num_key_value_heads=2,
        layer_types=FULL[:48],
        num_experts=512,
        num_experts_per_tok=10,
        moe_intermediate_size=640,
        shared_expert_intermediate_size=640,
        indexer_kv_heads=1,
        indexer_n_heads=4,
        indexer_head_dim=128,
        indexer_budget=2048,
        indexer_compress_ratio=4,
        hc_count=4,
        hc_lowrank=320,
        ple_layer_ids=[2],
        ngram_size=3,
        heads_per_ngram=8,
        ngram_vocab_size_base=20_000_000,
        eos_token_id=248046,
        split_ngram_parts=128,
        output_gate_type="sigmoid",
    ),
}
LOGITS = 10  # copies of a chunk's logits that live at once: logits, p, q, minima, their gradients
SHARE = 0.9  # of a GPU that may be planned with


def numbers(module, table: bool = False) -> int:
    """How many a module has; of n-gram tables only with `table`, and then nothing else."""
    named = module.named_parameters()
    return sum(p.numel() for n, p in named if n.endswith("ngram_embedding.weight") == table)


def trunk_bytes(config: ModelConfig, T: int, taps: int, size: int, every=None) -> dict[str, int]:
    """What a trunk of T tokens holds; `size` bytes a number of the target's dtype, `every` tokens
    between recurrent states."""
    c, every = config, every or replay.checkpoint_spacing(config, size)
    linear = sum(c.is_linear(i) for i in range(c.num_hidden_layers))
    attention = c.num_hidden_layers - linear
    sparse = 2 * c.indexer_head_dim if c.streams else 0
    ngram = len(c.ple_layer_ids) * (8 + c.num_streams * c.hidden_size * size) if c.streams else 0
    token = replay.token_bytes(c, size)
    return {
        "keys and values": T * attention * size * (2 * c.num_key_value_heads * c.head_dim + sparse),
        "linear layers' tokens": T * (linear * token + ngram),
        # the last one is kept, too
        "recurrent states": linear * (T // every + 1) * (replay.state_bytes(c) + 8),
        "hidden and taps": T * (size * c.hidden_size * (1 + taps) + 8),
    }


def drafter_bytes(drafter: Drafter, config, processes: int) -> dict[str, int]:
    """float32 weights and gradients, and what the optimizers remember."""
    count = numbers(drafter)
    learned = sum(p.numel() for p in drafter.parameters() if p.requires_grad)
    optimizers = make_optimizers(drafter, config.matrix_lr, config.lr)
    kinds = {
        type(o).__name__: sum(
            p.numel() for g in o.param_groups for p in g["params"] if p.requires_grad
        )
        for o in optimizers
    }
    return {
        "drafter's weights": 4 * count,
        # DDP has buckets beside them
        "drafter's gradients": 4 * learned * (2 if processes > 1 else 1),
        "optimizer": 8 * kinds.get("AdamW", 0) + 4 * kinds.get("Muon", 0),
    } | ({"drafter's weights in bfloat16": 2 * count} if config.precision == "bfloat16" else {})


def passing_bytes(drafter: Drafter, config, B: int, T: int) -> dict[str, int]:
    """Estimates of what lives for a moment with B sequences of T tokens at once."""
    c, d, size = drafter.target.config, drafter.config, 2
    W, A, K = d.num_draft_tokens, config.num_anchors, config.num_branches
    on_policy = config.mode in ("specopd", "story")
    nodes = A * K * max(W - 1, 0) * on_policy
    wide = c.intermediate_size
    if c.streams:
        wide = (
            c.num_experts_per_tok * c.moe_intermediate_size
            + c.shared_expert_intermediate_size
            + c.num_streams * c.hidden_size
        )
    taps = len(d.target_layer_ids)
    kept = sum(trunk_bytes(c, 1, taps, size).values())
    kept -= trunk_bytes(c, 1, 0, size)["recurrent states"]
    # recurrent state at every anchor, in one layer at a time: gathered, decayed, and beside it
    state = 3 * replay.state_bytes(c)
    at_work = (6 * c.hidden_size + 3 * wide) * size  # of a token in a layer of the target
    return {
        "~ tree: what it keeps": B * nodes * kept,
        "~ tree: a layer at work": B * nodes * at_work,
        "~ tree: states at anchors": B * A * state * c.hybrid * on_policy,
        "~ tree: its mask": B * nodes * (T + nodes) * (1 + size),
        "~ prefill: a layer at work": B * min(T, PREFILL) * at_work,
        "~ p's hidden states": B * hidden_rows(drafter, config) * c.hidden_size * size,
        "~ logits, a chunk": 4 * CHUNK_ELEMENTS * LOGITS,
    } | graph_bytes(drafter, config, B, T)


def hidden_rows(drafter: Drafter, config) -> int:
    """The target's hidden states that a text's blocks hold, for p."""
    W, A = drafter.config.num_draft_tokens, config.num_anchors
    if config.mode in ("specopd", "story"):
        return A * config.num_branches * (W + 1)
    return A * W * needs_p(config, drafter)


def graph_bytes(drafter: Drafter, config, B: int, T: int) -> dict[str, int]:
    """Estimates of what the drafter's layers keep for the backward pass, logits aside: in bfloat16
    all but residuals, norms and what they norm, which stay float32, and every matrix has a copy of
    its input."""
    d, A, half = drafter.config, config.num_anchors, config.precision == "bfloat16"
    b, each, taps = d.block_size, 2 if half else 4, len(d.target_layer_ids)
    C, layers, wide = d.layers.hidden_size, len(drafter.layers), d.layers.intermediate_size
    heads = d.layers.num_attention_heads * d.layers.head_dim
    grouped = 2 * d.layers.num_key_value_heads * d.layers.head_dim  # of keys and values
    slot = 4 * (5 * C + 2 * heads + grouped)  # bytes of a slot in a layer
    slot += each * (3 * heads + grouped + 4 * wide + 3 * C * half)
    slot += 32 * d.conv_kernel_size * C * (d.kind == "dflash2")  # its convolutions, in float32
    token = 8 * C + each * taps * C + layers * ((4 + 2 * each) * grouped + 4 * C * half)
    at_once = min(A, ANCHORS)
    mask = at_once * b * (T + at_once * b) * -(-A // ANCHORS)
    mask *= 1 + each * (1 if config.recompute else layers)
    kept = layers * 4 * C + slot if config.recompute else layers * slot
    # on a GPU a masked kernel reads keys and values once for every query head
    repeated = 2 * each * heads * (2 * heads > grouped)
    repeated *= T + at_once * b if config.recompute else layers * (-(-A // ANCHORS) * T + A * b)
    return {
        "~ drafter: context": B * T * token,
        "~ drafter: blocks": B * (A * b * kept + mask),
        "~ drafter: keys of every head": B * repeated,
        "~ drafter: a layer's gradients": B * A * b * slot,
    }


def needs(target: Target, drafter: Drafter, config, processes: int, B: int, sharded: bool) -> dict:
    """Bytes on each of so many GPUs, with B sequences at once on each."""
    size, T = 2, config.prompt_length + config.response_length
    layers = [numbers(layer) for layer in target.model.layers]
    outside = numbers(target) - sum(layers)
    spread = {"target's weights": size * numbers(target)}
    if sharded:
        spread = {
            "target's weights, a share": size * (outside + -(-sum(layers) // processes)),
            "~ three of its layers, gathered": 3 * size * max(layers),
        }
    taps, every = len(drafter.config.target_layer_ids), config.checkpoint_every
    trunks = trunk_bytes(target.config, T, taps, size, every)
    kept = config.num_references * sum(trunks.values())
    trunks = {f"trunks: {name}": B * each for name, each in trunks.items() if each}
    if kept <= config.cache_gib * 2**30:
        trunks["trunks of all references"] = kept
    waiting = max(0, config.batch_size // processes - B)  # with --grad-accum: drawn, not learned
    width = target.config.hidden_size * size
    rows = taps * T + hidden_rows(drafter, config)
    blocks = {"blocks of the other parts": waiting * width * rows}
    moment = passing_bytes(drafter, config, B, T) | (blocks if waiting else {})
    return spread | drafter_bytes(drafter, config, processes) | trunks | moment


def on_meta(config) -> tuple[Target, Drafter]:
    found = SIZES.get(config.target)
    if found is None:
        path = Path(config.target or ".") / "config.json"
        if not path.is_file():
            raise ValueError(
                f"--plan: --target {config.target or '(none)'} is no folder with a "
                f"config.json and none of {', '.join(SIZES)}"
            )
        found = read_json(path)
        if "block_size" in found:
            raise ValueError(f"--plan: {config.target} holds a drafter, not a target")
    with torch.device("meta"):
        target = Target(ModelConfig.from_dict(found, config.target)).requires_grad_(False)
        if config.drafter:
            path = Path(config.drafter) / "config.json"
            known = DrafterConfig.from_dict(read_json(path), str(path))
            if any(path.parent.glob("*.safetensors")):
                known = known.beside(tensor_files(path.parent))
            return target, drafter_class(known)(known, target)
        drafter = fresh_drafter(config, target, max(0, config.mask_token_id))
    return target, drafter


def chosen(target, drafter, config, processes: int) -> tuple[int, bool, dict] | None:
    """The most sequences at once that fit on every GPU, the target whole if possible: how many,
    whether it is spread, and the bytes; None if not even one does."""
    limit = SHARE * config.gpu_gib * 2**30
    for sharded in (False, True) if processes > 1 else (False,):
        best = None
        for B in (2**i for i in range(12)):
            found = needs(target, drafter, config, processes, B, sharded)
            if sum(found.values()) > limit:
                break
            best = B, sharded, found
        if best:
            return best
    return None


def plan(config) -> dict:
    """Print and return the plan for one GPU and for eight."""
    if config.mode == "rollout":
        raise ValueError(
            "--plan: a rollout has as many blocks as its decoding has rounds, which "
            "nobody knows before; --mode specopd with as many --num-anchors is "
            "near"
        )
    target, drafter = on_meta(config)
    table = numbers(target, table=True)
    print(
        f"target {config.target}: {numbers(target) / 1e9:.2f} G numbers in bfloat16"
        + f", and a table of {table / 1e9:.1f} G that stays on the host" * (table > 0)
    )
    print(
        f"drafter: {drafter.config.kind}, {len(drafter.layers)} layers, W = "
        f"{drafter.config.num_draft_tokens}, {numbers(drafter) / 1e9:.2f} G numbers in float32; "
        f"texts of {config.prompt_length} + {config.response_length} tokens, "
        f"{config.num_anchors} anchors x {config.num_branches}"
    )
    figures = {"target_numbers": numbers(target), "drafter_numbers": numbers(drafter)}
    for processes in (1, 8):
        best = chosen(target, drafter, config, processes)
        print(f"\n{processes} x {config.gpu_gib:g} GiB: ", end="")
        if best is None:
            least = needs(target, drafter, config, processes, 1, processes > 1)
            print(f"does not fit: {sum(least.values()) / 2**30:.1f} GiB each for one sequence")
            figures[str(processes)] = {"fits": False, "bytes": least}
            continue
        B, sharded, found = best
        share = config.batch_size // processes
        batch = max(processes, min(B * processes, config.num_references // processes * processes))
        ways = range(1, share + 1) if config.batch_size % processes == 0 else ()
        accum = next((n for n in ways if share % n == 0 and share // n <= B), 1)
        print(f"{B} sequences at once on each, {sum(found.values()) / 2**30:.1f} GiB")
        for name, value in found.items():
            print(f"  {name:30s} {value / 2**30:8.2f} GiB")
        flags = (
            f"--batch-size {batch}"
            if accum == 1
            else (f"--batch-size {config.batch_size} --grad-accum {accum}")
        )
        flags += " --shard-target --references FILE" * sharded
        flags += f" --precision {config.precision}" * (config.precision != "float32")
        flags += " --recompute" * config.recompute
        flags += " --cache-gib 0" * ("trunks of all references" not in found)
        start = (
            f"torchrun --nproc_per_node={processes} train.py"
            if processes > 1
            else ("python train.py")
        )
        print(f"  {start} --device cuda --dtype bfloat16 {flags} ...")
        figures[str(processes)] = {"fits": True, "sequences": B, "sharded": sharded, "bytes": found}
    return figures | {"config": dataclasses.asdict(config)}
