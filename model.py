"""The layers of a decoder, from leaf to root, for the four families of targets, and for drafters.

    norm, rotary · attention, indexer · gated delta net · MLP, experts · n-grams, streams · decoder

One forward serves a prefill, a tree and a chain. A layer gets the hidden states (B,N,C) of N
tokens, a `View` (tree.py) that says which tokens are the past of which, and its state of the trunk
that they hang on. It returns its output and its state of the N tokens, a dict of tensors (B,N,...).

    attention    out_t = sum over s of softmax_s(q_t · k_s / sqrt(D)) v_s,   s: what t may see
    layer        y = x + mix(norm(x)),   out = y + mlp(norm(y))

Names of modules and fields are Hugging Face's, so that tensors load by name. Left out: dropout
(targets are frozen), biases (the text models of these families have none) and images.

    python model.py             attention by hand, and a layer's tensors
    pytest tests/test_model.py  logits against transformers, fast paths against slow, simple ones
"""

import math
from dataclasses import asdict, dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import BlockMask

import replay
from hf.config import HYBRID, config_json, model_fields
from support import gpu
from tree import ProposalTree, View, causal_view, gather_history, gather_slots, on_real, write_after

FEW_QUERIES = 32  # of a text, as in rounds of decoding; see `attention`
LONG_TEXT = 2**15  # numbers of a head's keys; measured on a CPU
GATHERED_KEYS = 2**15  # keys that `gathered_attention` reads at once: bounds its memory
LEAST = {"seed": 0, "eos_token_id": 0, "hc_count": 2, "ngram_size": 2}  # other numbers: above 0
MULTIPLES = {  # field: another that divides it
    "num_attention_heads": "num_key_value_heads",
    "linear_num_value_heads": "linear_num_key_heads",
    "indexer_budget": "indexer_compress_ratio",
}

# ------------------------------------------------------------------------------------ configuration


@dataclass(frozen=True)
class ModelConfig:
    """A decoder's shape, in the field names of its config.json. Fields that its family does not
    have (hf.config.FAMILY_FIELDS lists those it has) keep their defaults and mean nothing."""

    model_type: str = "qwen3"
    vocab_size: int = 264
    hidden_size: int = 192
    intermediate_size: int = 512
    num_hidden_layers: int = 4
    num_attention_heads: int = 6
    num_key_value_heads: int = 2
    head_dim: int = 32
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 4096
    # which layers are gated delta nets, and their sizes; the rotated part of attention's heads
    layer_types: tuple = ()
    partial_rotary_factor: float = 1.0
    linear_conv_kernel_dim: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32
    # mixture of experts
    num_experts: int = 512
    num_experts_per_tok: int = 10
    norm_topk_prob: bool = True
    moe_intermediate_size: int = 512
    shared_expert_intermediate_size: int = 512
    # the indexer of sparse attention
    indexer_n_heads: int = 4
    indexer_head_dim: int = 128
    indexer_budget: int = 2048
    indexer_compress_ratio: int = 4
    # residual streams, and n-gram layers (counted from 1)
    output_gate_type: str = "silu"
    hc_count: int = 4
    hc_lowrank: int = 320
    ple_layer_ids: tuple = ()
    ple_embed_dim: int = 2048
    ple_conv_kernel_size: int = 4
    ngram_size: int = 3
    heads_per_ngram: int = 8
    ngram_vocab_size_base: int = 20_000_000
    make_ngram_vocab_size_divisible_by: int = 128
    seed: int = 1234
    split_ngram_parts: int = 512
    eos_token_id: int = 0

    @classmethod
    def from_dict(cls, config_dict: dict, source: str = "config.json") -> "ModelConfig":
        """Read a public config.json; `source` names it in errors."""
        values = model_fields(config_dict, source)
        try:
            return cls(**values)
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from None

    def to_dict(self) -> dict:
        """The config.json, in the format that transformers opens."""
        return config_json(asdict(self))

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def hybrid(self) -> bool:
        """Linear layers among gated attention layers; norms multiply by 1 + w and store w."""
        return self.model_type in HYBRID

    @property
    def has_streams(self) -> bool:
        """Residual streams, experts, sparse attention."""
        return self.model_type == "qwen4_exp_text"

    @property
    def num_streams(self) -> int:
        return self.hc_count if self.has_streams else 1

    def is_linear(self, layer: int) -> bool:
        return self.hybrid and self.layer_types[layer] == "linear_attention"

    def __post_init__(self):
        sizes = vars(self)
        for field in fields(self):
            check_field(field.name, sizes[field.name], field.default, LEAST.get(field.name))
        for whole, part in MULTIPLES.items():
            if sizes[whole] % sizes[part]:
                raise ValueError(f"{whole} {sizes[whole]} is no multiple of {part} {sizes[part]}")
        if self.head_dim % 2 or self.rotary_dim % 2 or not 0 < self.rotary_dim <= self.head_dim:
            part = f"{self.partial_rotary_factor} of head_dim {self.head_dim}"
            raise ValueError(f"partial_rotary_factor {part}: rotary needs pairs")
        num_layers = self.num_hidden_layers
        kinds = ("linear_attention", "full_attention")
        fits = len(self.layer_types) == num_layers and set(self.layer_types) <= set(kinds)
        if self.hybrid and not fits:
            wanted = f"{num_layers} of {' and '.join(kinds)}"
            raise ValueError(f"layer_types {list(self.layer_types)} are not {wanted}")
        ids = list(self.ple_layer_ids)
        linear = [layer + 1 for layer in range(num_layers) if self.is_linear(layer)]
        if not set(ids) <= set(linear):
            raise ValueError(f"ple_layer_ids {ids}: linear layers, counted from 1, are {linear}")
        heads = (self.ngram_size - 1) * self.heads_per_ngram
        if self.ple_embed_dim % heads:
            parts = f"(ngram_size - 1) x heads_per_ngram = {heads} parts"
            raise ValueError(f"ple_embed_dim {self.ple_embed_dim} does not split into {parts}")
        D, E, k = self.indexer_head_dim, self.num_experts, self.num_experts_per_tok
        if self.has_streams and D < self.rotary_dim:
            raise ValueError(f"indexer_head_dim {D} is below the rotated {self.rotary_dim}")
        if E < k:
            raise ValueError(f"num_experts {E} is below num_experts_per_tok {k}")
        if self.output_gate_type not in ("silu", "sigmoid"):
            raise ValueError(f"output_gate_type {self.output_gate_type!r} is not implemented")


def check_field(name: str, value, default, least: int | None = None) -> None:
    """Refuse a value that is not of the type of the field's default, and a number that is
    infinite, below `least`, or not above 0 where least is None."""
    kind = type(default)
    fits = type(value) is kind or (kind is float and type(value) is int)
    wanted = {bool: "true or false", str: "a word", tuple: "a tuple"}.get(kind)
    if wanted is None:
        wanted = f"a positive {kind.__name__}" if least is None else f"{kind.__name__} >= {least}"
        fits = fits and (value > 0 if least is None else value >= least) and value < math.inf
    if not fits:
        raise ValueError(f"{name} is {value!r}, not {wanted}")


# ---------------------------------------------------------------------------------------- functions


def rotary(positions: Tensor, width: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin (B,N,1,width) of the angles at positions (B,N), float32, for `rotate`."""
    frequency = theta ** -(torch.arange(0, width, 2, device=positions.device) / width)
    angle = positions[..., None].float() * frequency  # (B, N, width/2)
    angle = torch.cat([angle, angle], -1)[:, :, None]  # (B, N, 1, width)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair (x_i, x_{i+R/2}) of x (B,N,H,D) by its angle; R <= D is the rope's width."""
    cos, sin = rope
    R = cos.shape[-1]
    turning = x[..., :R].float()
    left, right = turning.chunk(2, -1)
    quarter_turned = torch.cat([-right, left], -1)
    turned = torch.addcmul(turning * cos, quarter_turned, sin).to(x.dtype)  # + quarter_turned * sin
    return turned if R == x.shape[-1] else torch.cat([turned, x[..., R:]], -1)


def attention(q: Tensor, kv: Tensor, mask: Tensor | BlockMask | None) -> Tensor:
    """Attention of queries q (B,N,H,D) to kv (B,T,2,H_kv,D) -> (B,N,H,D). Each key head serves
    H / H_kv query heads. mask (B,1,N,T), True = visible, or its other forms (see `tree_view`);
    None = causal: query i sees the first T - N + i + 1 slots."""
    B, N, H, D = q.shape
    T, H_kv = kv.shape[1], kv.shape[3]
    if isinstance(mask, BlockMask):
        return gpu.attention_in_blocks(q, kv, mask)
    # Heads of one key head are treated as tokens: several times as fast for one token on a CPU, and
    # up to twice for a few and a long text, whose keys are then read once per key head. On a GPU
    # no fused kernel takes a mask and groups, and this repeats the mask instead of the keys.
    is_long = N <= FEW_QUERIES and T * D >= LONG_TEXT
    if N == 1 or (mask is not None and H_kv < H and (q.is_cuda or is_long)):
        return attention_by_key_head(q, kv, mask)
    if mask is None and 1 < N < T:
        mask = causal_lower_right(N, T)  # no mask is made where there is a kernel for it
    is_causal = mask is None and bool(N > 1)  # bool: torch.compile may make N a symbol
    q, k, v = (x.transpose(1, 2) for x in (q, *kv.unbind(2)))  # (B, H, N, D) in the call only
    out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, enable_gqa=H_kv < H)
    return out.transpose(1, 2)


def attention_by_key_head(q: Tensor, kv: Tensor, mask: Tensor | None) -> Tensor:
    """`attention` with the H / H_kv query heads of a key head as so many times N tokens."""
    N, H_kv = q.shape[1], kv.shape[3]
    per_key_head = q.shape[2] // H_kv
    q = q.unflatten(2, (H_kv, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)  # (B, H_kv, H/H_kv*N, D)
    k, v = (x.transpose(1, 2) for x in kv.unbind(2))  # (B, H_kv, T, D)
    if mask is not None and N > 1:
        mask = mask.repeat(1, 1, per_key_head, 1)
    out = F.scaled_dot_product_attention(q, k, v, mask).unflatten(2, (per_key_head, N))
    return out.permute(0, 3, 1, 2, 4).flatten(2, 3)


def worth_gathering(num_queries: int, num_slots: int, max_visible: int) -> bool:
    """Whether `gathered_attention` is faster than `attention` under a mask: the text must be much
    longer than what a query sees, and the more so the more queries there are."""
    few_queries = num_queries * max_visible < 4 * GATHERED_KEYS
    return num_slots > (4 if few_queries else 32) * max_visible  # measured on a CPU


def gathered_attention(q: Tensor, kv: Tensor, mask: Tensor, max_visible: int) -> Tensor:
    """`attention` where each query sees at most max_visible slots, and only these are read."""
    B, N, H, D = q.shape
    H_kv = kv.shape[3]
    at_once = max(1, GATHERED_KEYS // (B * max_visible))  # tokens
    outputs = []
    for start in range(0, N, at_once):
        queries = q[:, start : start + at_once].unflatten(2, (H_kv, -1)).float()
        part = mask[:, 0, start : start + at_once].to(torch.uint8)  # (B, n, T)
        visible, slots = part.topk(max_visible, -1)  # (B, n, S), S = max_visible
        entries = gather_slots(kv, slots.flatten(1)).unflatten(1, slots.shape[1:])
        k, v = entries.unbind(3)  # (B, n, S, H_kv, D)
        scores = torch.einsum("bnkgd,bnskd->bnkgs", queries, k.float()) * D**-0.5
        scores = scores.masked_fill(visible[:, :, None, None] == 0, -1e30)
        outputs.append(torch.einsum("bnkgs,bnskd->bnkgd", scores.softmax(-1), v.float()))
    return torch.cat(outputs, 1).flatten(2, 3).to(q.dtype)


def short_conv(x: Tensor, weight: Tensor, past, view: View, dilation=1, base=0) -> Tensor:
    """SiLU of a causal depthwise convolution along each token's own history.

    x (B,N,C), weight (C,1,kernel): its last entry belongs to the token itself; before the first
    token are zeros. past (B,S,C) or None: the trunk's inputs, slot 0 at position `base`."""
    kernel = weight.shape[-1]
    out = 0
    for entry in range(kernel):
        index = view.ancestor((kernel - 1 - entry) * dilation)
        inputs = gather_history(past, x, index, view.num_trunk_slots, base)  # (B, N, C)
        out = out + inputs.float() * weight[:, 0, entry].float()
    return F.silu(out).to(x.dtype)


def index_block_ends(view: View, r: int) -> tuple[Tensor, Tensor]:
    """The blocks of r positions, for sparse attention: the packed index (M,) of the token that ends
    each, and whether a token's history (B,N,M) holds the whole block.

    A block that ends on the trunk is shared. One that ends at a node, wherever it begins, belongs
    to that node and its descendants (paper: branch-consistent indexer groups)."""
    T, N = view.num_trunk_slots, view.positions.shape[1]
    index = torch.arange(T + N, device=view.positions.device)
    num_text_slots = T if view.is_tree else T + N  # there the packed index is the position
    slots = index[r - 1 : num_text_slots : r]
    ends = torch.ones_like(slots, dtype=torch.bool)[None]
    if view.is_tree:
        slots = torch.cat([slots, index[T:]])
        nodes_end = (view.positions + 1) % r == 0
        ends = torch.cat([ends.expand(len(nodes_end), -1), nodes_end], 1)
    return slots, view.visible()[:, 0, :, slots] & ends[:, None]


def highest(scores: Tensor, count: int) -> Tensor:
    """Mark the `count` highest of scores (B,N,M): never -inf, of equal scores the earlier."""
    if scores.shape[-1] <= count:
        return scores > -torch.inf
    lowest = scores.topk(count, -1).values[..., -1:]
    above = scores > lowest
    equal = (scores == lowest) & (scores > -torch.inf)
    free = count - above.sum(-1, keepdim=True)
    return above | equal & (equal.cumsum(-1) <= free)


def index_block_mask(chosen: Tensor, view: View, r: int) -> Tensor:
    """The mask (B,1,N,T+N) of the tokens in the chosen blocks (B,N,M), in the order of
    `index_block_ends`, and in the incomplete last block of each history."""
    B, N, M = chosen.shape
    T = view.num_trunk_slots
    num_text_blocks = M - N if view.is_tree else M
    mask = chosen.new_zeros(B, N, T + N + 1)  # the last column is cut off
    mask[..., : num_text_blocks * r] = chosen[..., :num_text_blocks].repeat_interleave(r, -1)
    history = torch.stack([view.ancestor(d) for d in range(max(view.max_depth + r - 1, 1))], -1)
    depth = torch.arange(history.shape[-1], device=chosen.device)
    picked = depth < ((view.positions + 1) % r)[..., None]  # (B, N, depth) the incomplete block
    if view.is_tree:  # a block that ends at a node is the node and the r - 1 tokens before it
        nodes = history[..., : view.max_depth] - T
        ends = chosen[..., num_text_blocks:].gather(2, nodes.clamp(min=0)) & (nodes >= 0)
        for shift in range(r):
            picked[..., shift : shift + view.max_depth] |= ends
    slots = torch.where(picked, history, T + N)
    mask = mask.scatter(2, slots, True)[..., :-1]  # (B, N, T+N)
    return (mask & view.visible()[:, 0])[:, None]


def per_expert(x: Tensor, weight: Tensor, ends: Tensor | list) -> Tensor:
    """Multiply each row of x by its expert's matrix: x (n,C) is sorted by expert, weight (E,R,C),
    ends (E,) counts the rows up to each expert's last, int32 -> (n,R). If `ends` is a list, there
    is one product per expert."""
    if isinstance(ends, Tensor):
        return F.grouped_mm(x, weight.mT, offs=ends)
    parts = x.tensor_split(ends[:-1])
    return torch.cat([F.linear(part, matrix) for part, matrix in zip(parts, weight)])


def fits_grouped_mm(weight: Tensor) -> bool:
    """Whether one product can serve all experts, weight (E,R,C). For float32 on a GPU it would read
    the ends and go expert by expert."""
    is_aligned = all(size * weight.element_size() % 16 == 0 for size in weight.shape[1:])
    return is_aligned and not (weight.is_cuda and weight.dtype == torch.float32)


def ngram_hashes(config: ModelConfig, number: int) -> tuple[list[int], list[int]]:
    """The multipliers (odd, from splitmix64) and the heads' table sizes (consecutive primes) of
    n-gram layer `number`, as a released model derives them. The numbers in a file replace them."""
    all_bits = 2**64 - 1
    golden_ratio = 0x9E3779B97F4A7C15
    half = max(1, (2**63 - 1) // config.vocab_size // 2)
    multipliers = []
    for index in range(config.ngram_size):
        z = (config.seed + 10007 * number + golden_ratio * (index + 2)) & all_bits
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & all_bits
        z = (z ^ z >> 27) * 0x94D049BB133111EB & all_bits
        multipliers.append(2 * ((z ^ z >> 31) % half) + 1)
    primes = []
    heads = (config.ngram_size - 1) * config.heads_per_ngram
    candidate = config.ngram_vocab_size_base - 1
    while len(primes) < (number + 1) * heads:
        candidate += 1
        if candidate > 1 and all(candidate % d for d in range(2, math.isqrt(candidate) + 1)):
            primes.append(candidate)
    return multipliers, primes[number * heads :]


def tree_view(tree: ProposalTree, config: ModelConfig, dtype: torch.dtype) -> View:
    """A tree as the layers of a target see it. On a GPU the mask of a large one is a BlockMask; on
    a CPU it is made of numbers to add, once, as else in every layer. Sparse attention makes masks
    of its own."""
    N = tree.tokens.shape[1]
    heads = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    if config.has_streams:
        return tree.view()
    if gpu.flex_serves(N, tree.tokens.device, dtype, *heads):
        view = tree.view(mask=False)
        view.mask = gpu.tree_block_mask(tree.roots, view.last_descendants, tree.num_trunk_slots)
        return view
    view = tree.view()
    if view.mask.is_cpu:
        hidden = torch.full((), -torch.inf, dtype=dtype)
        view.mask = torch.where(view.mask, torch.zeros((), dtype=dtype), hidden)
    return view


# ------------------------------------------------------------------------------------------ modules


class RMSNorm(nn.Module):
    """x / rms(x) * weight, over each of `groups` equal parts of x. Centred: the stored weight is
    w, x is multiplied by 1 + w, and the arithmetic is float32."""

    def __init__(self, size: int, eps: float, centred: bool = False, groups: int = 1):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size) if centred else torch.ones(size))
        self.eps = eps
        self.centred = centred
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        if not self.centred:
            # of one dtype: mixed, bfloat16 and float32, they have no fast kernel
            return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)
        parts = x.float().unflatten(-1, (self.groups, -1))
        normed = F.rms_norm(parts, parts.shape[-1:], None, self.eps).flatten(-2)
        return (normed * (1 + self.weight.float())).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention. Each head's q and k are normed (not in Llama). Hybrid families gate
    the output, and with residual streams an indexer makes the attention sparse. State: keys and
    values "kv" (B,N,2,H_kv,D), and the indexer's keys."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        C, D = config.hidden_size, config.head_dim
        self.head_dim = D
        self.gated = config.hybrid
        self.q_proj = nn.Linear(C, config.num_attention_heads * D * (1 + self.gated), bias=False)
        self.k_proj = nn.Linear(C, config.num_key_value_heads * D, bias=False)
        self.v_proj = nn.Linear(C, config.num_key_value_heads * D, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * D, C, bias=False)
        normed = config.model_type != "llama"
        eps = config.rms_norm_eps
        self.q_norm = RMSNorm(D, eps, config.hybrid) if normed else nn.Identity()
        self.k_norm = RMSNorm(D, eps, config.hybrid) if normed else nn.Identity()
        self.indexer = Indexer(config) if config.has_streams else None

    def keys_values(self, x: Tensor, rope, real: Tensor | None = None) -> Tensor:
        """x (B,N,C) -> rotated keys, and values, (B,N,2,H_kv,D). real: see `tree.real_rows`."""
        per_head = (*x.shape[:2], -1, self.head_dim)
        k = rotate(self.k_norm(on_real(self.k_proj, x, real).view(per_head)), rope)
        return torch.stack([k, on_real(self.v_proj, x, real).view(per_head)], 2)

    def forward(self, x: Tensor, rope, view: View, past: dict | None = None):
        """x (B,N,C), state of the trunk or None -> out (B,N,C), state of the N tokens."""
        B, N, _ = x.shape
        q = on_real(self.q_proj, x, view.real).view(B, N, -1, self.head_dim * (1 + self.gated))
        if self.gated:
            q, gate = q.chunk(2, -1)  # (B, N, H, D) each
        q = rotate(self.q_norm(q), rope)
        new = {"kv": self.keys_values(x, rope, view.real)}
        mask = view.mask
        if self.indexer:
            new |= self.indexer.keys(x, view, past)
            mask = self.indexer(x, rope, view, past, new["block"])
        kv = write_after(past and past["kv"], new["kv"], view.num_trunk_slots)
        if self.indexer and worth_gathering(B * N, kv.shape[1], self.indexer.max_visible):
            out = gathered_attention(q, kv, mask, self.indexer.max_visible)
        else:
            out = attention(q, kv, mask)  # (B, N, H, D)
        if self.gated:
            out = out * gate.sigmoid()
        return on_real(self.o_proj, out.reshape(B, N, -1), view.real), new


class Indexer(nn.Module):
    """The choice of sparse attention (QSA): a token attends to those complete blocks of r positions
    of its own history that score highest, `indexer_budget` tokens in all, and to the incomplete
    last block. These are not a drafter's blocks.

    State: the raw key of each token, and the key of the block that ends with it: the mean of the
    last r raw keys of its history, normed, and rotated by the angle of the block's first position.
    A block's key counts only where position + 1 is a multiple of r."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        D, H = config.indexer_head_dim, config.indexer_n_heads
        self.head_dim = D
        self.ratio = config.indexer_compress_ratio  # r, the positions of a block
        self.num_blocks = config.indexer_budget // self.ratio
        self.max_visible = config.indexer_budget + self.ratio - 1
        self.rotary_sizes = (config.rotary_dim, config.rope_theta)
        self.index_qk_proj = nn.Linear(config.hidden_size, (H + 1) * D, bias=False)
        self.q_layernorm = RMSNorm(D, config.rms_norm_eps, centred=True)
        self.k_layernorm = RMSNorm(D, config.rms_norm_eps, centred=True)

    def keys(self, x: Tensor, view: View, past: dict | None) -> dict:
        """x (B,N,C) -> raw and block keys (B,N,D)."""
        raw = F.linear(x, self.index_qk_proj.weight[-self.head_dim :])
        older = past and past["raw"]
        summed = 0
        for depth in range(self.ratio):
            index = view.ancestor(depth)
            summed = summed + gather_history(older, raw, index, view.num_trunk_slots).float()
        block = self.k_layernorm((summed / self.ratio).to(raw.dtype))[:, :, None]
        first = (view.positions - self.ratio + 1).clamp(min=0)
        rope = rotary(first, *self.rotary_sizes)
        return {"raw": raw, "block": rotate(block, rope)[:, :, 0]}

    def queries(self, x: Tensor, rope) -> Tensor:
        """x (B,N,C) -> (B,N,H,D)."""
        q = F.linear(x, self.index_qk_proj.weight[: -self.head_dim])
        return rotate(self.q_layernorm(q.unflatten(-1, (-1, self.head_dim))), rope)

    def forward(self, x: Tensor, rope, view: View, past: dict | None, block: Tensor) -> Tensor:
        """The attention mask (B,1,N,T+N)."""
        q = self.queries(x, rope)
        keys = write_after(past and past["block"], block, view.num_trunk_slots)
        slots, is_complete = index_block_ends(view, self.ratio)
        products = torch.einsum("bnhd,bmd->bnmh", q.float(), keys[:, slots].float())
        scores = products.relu().sum(-1) / math.sqrt(self.head_dim)  # (B, N, M)
        chosen = highest(scores.masked_fill(~is_complete, -torch.inf), self.num_blocks)
        return index_block_mask(chosen, view, self.ratio)


class GatedDeltaNet(nn.Module):
    """The gated delta rule (replay.py) between a short convolution and a gated norm.

    State: of each token the convolution's input "qkv", and "k", "u", "g" for a replay; of a stretch
    of text also the recurrent "states" after the checkpoint tokens and the last token."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        C, H, H_k = config.hidden_size, config.linear_num_value_heads, config.linear_num_key_heads
        D_k, D_v = config.linear_key_head_dim, config.linear_value_head_dim
        self.sizes = (H_k * D_k, H_k * D_k, H * D_v)  # of q, k, v
        self.key_dim, self.value_dim = D_k, D_v
        self.gate = torch.sigmoid if config.output_gate_type == "sigmoid" else F.silu
        channels = sum(self.sizes)
        kernel = config.linear_conv_kernel_dim
        self.in_proj_qkv = nn.Linear(C, channels, bias=False)
        self.in_proj_z = nn.Linear(C, H * D_v, bias=False)
        self.in_proj_b = nn.Linear(C, H, bias=False)
        self.in_proj_a = nn.Linear(C, H, bias=False)
        self.conv1d = nn.Conv1d(channels, channels, kernel, groups=channels, bias=False)
        self.A_log = nn.Parameter(torch.empty(H).uniform_(0.01, 16).log())
        self.dt_bias = nn.Parameter(torch.ones(H))
        self.norm = RMSNorm(D_v, config.rms_norm_eps)
        self.out_proj = nn.Linear(H * D_v, C, bias=False)

    def queries_keys_values(self, qkv: Tensor, view: View, past: dict | None):
        """qkv (B,N,channels), the convolution's input -> q, k (B,N,H_k,D_k), v (B,N,H,D_v)."""
        older = past and past["qkv"]
        base = past["tail_start"][:, None] if past and "tail_start" in past else 0
        mixed = short_conv(qkv, self.conv1d.weight, older, view, base=base).float()
        q, k, v = mixed.split(self.sizes, -1)
        q = replay.l2_normed(q.unflatten(-1, (-1, self.key_dim))) / math.sqrt(self.key_dim)
        k = replay.l2_normed(k.unflatten(-1, (-1, self.key_dim)))
        return q, k, v.unflatten(-1, (-1, self.value_dim))

    def forward(self, x: Tensor, view: View, past: dict | None = None):
        """x (B,N,C), state of the trunk or None -> out (B,N,C), state of the N tokens."""
        qkv = on_real(self.in_proj_qkv, x, view.real)
        q, k, v = self.queries_keys_values(qkv, view, past)
        beta = self.in_proj_b(x).float().sigmoid()  # (B, N, H)
        a = self.in_proj_a(x).float() + self.dt_bias.float()
        g = -self.A_log.float().exp() * F.softplus(a)  # (B, N, H)
        new = {"qkv": qkv, "k": k, "g": g}
        if view.is_tree:
            o, new["u"] = replay.delta_rule_on_tree(q, k, v, g, beta, past, view)
        else:
            if view.valid is not None:  # padding leaves the recurrent state as it is
                g, beta = g * view.valid[..., None], beta * view.valid[..., None]
            shape = (len(x), v.shape[2], self.key_dim, self.value_dim)
            state = past["states"][:, -1] if past else v.new_zeros(shape)
            ends = view.checkpoint_tokens
            o, new["u"], new["states"] = replay.delta_rule(q, k, v, g, beta, state, ends)
        z = on_real(self.in_proj_z, x, view.real).unflatten(-1, (-1, self.value_dim)).float()
        normed = F.rms_norm(o, (self.value_dim,), self.norm.weight.float(), self.norm.eps)
        out = (normed * self.gate(z)).flatten(-2).to(x.dtype)
        return on_real(self.out_proj, out, view.real), new


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, C: int, width: int):
        super().__init__()
        self.gate_proj = nn.Linear(C, width, bias=False)
        self.up_proj = nn.Linear(C, width, bias=False)
        self.down_proj = nn.Linear(width, C, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Experts(nn.Module):
    """The SwiGLU weights of all E experts, fused: gate rows first, then up rows."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        E, C, width = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(E, 2 * width, C))
        self.down_proj = nn.Parameter(torch.empty(E, C, width))

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        """x (n,C), numbers of the chosen experts (n,k) -> the output of each (n,k,C). Tokens are
        sorted by expert, so that one product serves all experts."""
        n, k = chosen.shape
        experts, order = chosen.flatten().sort()  # (n*k,)
        numbers = torch.arange(len(self.down_proj), device=x.device)
        ends = torch.searchsorted(experts, numbers, right=True, out_int32=True)  # (E,)
        if not fits_grouped_mm(self.down_proj):  # the other matrices have the same sizes or twice
            ends = ends.tolist()
        gate, up = per_expert(x[order // k], self.gate_up_proj, ends).chunk(2, -1)
        out = per_expert(F.silu(gate) * up, self.down_proj, ends)  # (n*k, C)
        return torch.empty_like(out).index_copy(0, order, out).view(n, k, -1)


class MixtureOfExperts(nn.Module):
    """The k likeliest experts of each token, weighted by probability, and a gated shared expert."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.k = config.num_experts_per_tok
        self.renormalise = config.norm_topk_prob
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = Experts(config)
        self.shared_expert = MLP(config.hidden_size, config.shared_expert_intermediate_size)
        self.shared_expert_gate = nn.Linear(config.hidden_size, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)  # (n, C)
        weights, chosen = self.gate(flat).float().softmax(-1).topk(self.k, -1)  # (n, k)
        if self.renormalise:
            weights = weights / weights.sum(-1, keepdim=True)
        outputs = self.experts(flat, chosen) * weights.to(x.dtype)[..., None]  # (n, k, C)
        shared = self.shared_expert_gate(flat).sigmoid() * self.shared_expert(flat)
        return (outputs.sum(1) + shared).view_as(x)


class NGramTable(nn.Module):
    """One huge table of embeddings. It may stay on the host, and in FP8 with one scale; only the
    rows that are looked up are moved and converted."""

    def __init__(self, rows: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))
        self.register_buffer("weight_scale", torch.ones(()))

    def forward(self, index: Tensor, dtype) -> Tensor:
        """Row numbers (...) -> (...,width)."""
        rows = self.weight[index.to(self.weight.device)].to(index.device)
        if rows.dtype == torch.float8_e4m3fn:
            return (rows.float() * self.weight_scale).to(dtype)
        return rows.to(dtype)


class NGramEmbedding(nn.Module):
    """For each order n = 2..ngram_size and each head, a hash of the last n tokens picks a row."""

    def __init__(self, config: ModelConfig, number: int):
        super().__init__()
        multipliers, primes = ngram_hashes(config, number)
        offsets = [sum(primes[:head]) for head in range(len(primes))]
        self.heads = config.heads_per_ngram
        self.register_buffer("layer_multipliers", torch.tensor(multipliers))
        self.register_buffer("ngram_heads_vocab_sizes", torch.tensor(primes))
        self.register_buffer("ngram_heads_offsets", torch.tensor(offsets))
        multiple = config.make_ngram_vocab_size_divisible_by
        rows = math.ceil(sum(primes) / multiple) * multiple
        self.ngram_embedding = NGramTable(rows, config.ple_embed_dim // len(primes))

    def forward(self, last: Tensor, dtype) -> Tensor:
        """last (B,N,ngram_size): tokens, newest first -> (B,N,ple_embed_dim)."""
        terms = last * self.layer_multipliers  # (B, N, ngram_size)
        mixed = terms[..., 0]
        rows = []
        for order in range(1, terms.shape[-1]):
            mixed = mixed ^ terms[..., order]
            heads = slice((order - 1) * self.heads, order * self.heads)
            sizes, offsets = self.ngram_heads_vocab_sizes[heads], self.ngram_heads_offsets[heads]
            rows.append(mixed[..., None] % sizes + offsets)  # (B, N, heads)
        return self.ngram_embedding(torch.cat(rows, -1), dtype).flatten(-2)


class NGramLayer(nn.Module):
    """Adds to every residual stream a value that depends on the last few tokens alone, gated by how
    well its key matches the stream, and a dilated convolution over these values. State: tokens, and
    the convolution's input "conv"."""

    def __init__(self, config: ModelConfig, number: int):
        super().__init__()
        wide = config.num_streams * config.hidden_size
        eps = config.rms_norm_eps
        self.num_streams = config.num_streams
        self.size = config.ngram_size
        self.stop_id = config.eos_token_id
        self.ple_embedding = NGramEmbedding(config, number)
        self.key_proj = nn.Linear(config.ple_embed_dim, wide, bias=False)
        self.value_proj = nn.Linear(config.ple_embed_dim, config.hidden_size, bias=False)
        self.norm_key = RMSNorm(wide, eps, centred=True, groups=self.num_streams)
        self.norm_query = RMSNorm(wide, eps, centred=True, groups=self.num_streams)
        self.norm_conv = RMSNorm(wide, eps, centred=True, groups=self.num_streams)
        self.conv1d = nn.Conv1d(wide, wide, config.ple_conv_kernel_size, groups=wide, bias=False)

    def last_tokens(self, tokens: Tensor, view: View, past: dict | None) -> Tensor:
        """(B,N,ngram_size): each token and those before it in its history, newest first. An older
        token that is missing or a stop token, and all before it, are replaced by the stop token."""
        last = [tokens]
        for depth in range(1, self.size):
            index = view.ancestor(depth)
            token = gather_history(past and past["tokens"], tokens, index, view.num_trunk_slots)
            cut = (index < 0) | (depth > 1) & (last[-1] == self.stop_id)
            last.append(torch.where(cut, self.stop_id, token))
        return torch.stack(last, -1)

    def forward(self, x: Tensor, tokens: Tensor, view: View, past: dict | None = None):
        """x (B,N,streams*C), tokens (B,N) -> what is added to x, the layer's state."""
        per_stream = (self.num_streams, -1)
        embedded = self.ple_embedding(self.last_tokens(tokens, view, past), x.dtype)
        key = self.norm_key(self.key_proj(embedded)).unflatten(-1, per_stream)  # (B, N, streams, C)
        query = self.norm_query(x).unflatten(-1, per_stream)
        match = (key * query).sum(-1, keepdim=True) / math.sqrt(key.shape[-1])
        gate = torch.sigmoid(match.abs().clamp(min=1e-6).sqrt() * match.sign())
        value = (gate * self.value_proj(embedded)[..., None, :]).flatten(-2)  # (B, N, streams*C)
        conv = self.norm_conv(value)
        out = value + short_conv(conv, self.conv1d.weight, past and past["conv"], view, self.size)
        return out, {"tokens": tokens, "conv": conv}


class HyperConnection(nn.Module):
    """Connects a sublayer to a token's residual streams: the sublayer reads a weighted
    mean of the normed streams, and its output is added to each stream with that stream's weight.
    A decoder's last hyper-connection only reads."""

    def __init__(self, config: ModelConfig, writes: bool = True):
        super().__init__()
        wide = config.num_streams * config.hidden_size
        self.num_streams = config.num_streams
        self.hc_norm = RMSNorm(wide, config.rms_norm_eps, centred=True, groups=self.num_streams)
        self.input_mix_weight_down = nn.Linear(wide, config.hc_lowrank, bias=False)
        self.input_mix_weight_up = nn.Linear(config.hc_lowrank, wide, bias=False)
        self.block_inject_weight = nn.Linear(wide, self.num_streams, bias=False) if writes else None

    def read(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x (B,N,streams*C) -> the mixed input (B,N,C), and the normed streams for `write`."""
        normed = self.hc_norm(x)
        weights = F.silu(self.input_mix_weight_down(normed) / self.num_streams)
        weights = self.input_mix_weight_up(weights).sigmoid()
        return (weights * normed).unflatten(-1, (self.num_streams, -1)).mean(-2), normed

    def write(self, x: Tensor, normed: Tensor, out: Tensor) -> Tensor:
        """The streams x (B,N,streams*C) with the sublayer's output (B,N,C) added to each."""
        shares = 2 * torch.sigmoid(self.block_inject_weight(normed) / self.num_streams)
        return x + (shares[..., None] * out[..., None, :]).flatten(-2)


class Layer(nn.Module):
    """The part of a decoder layer that mixes tokens: attention, or the gated delta net."""

    def __init__(self, config: ModelConfig, index: int):
        super().__init__()
        self.is_linear = config.is_linear(index)
        if self.is_linear:
            self.linear_attn = GatedDeltaNet(config)
        else:
            self.self_attn = Attention(config)

    def mix(self, x: Tensor, rope, view: View, past: dict | None):
        """x (B,N,C) -> out (B,N,C), the layer's state of the N tokens."""
        if self.is_linear:
            return self.linear_attn(x, view, past)
        return self.self_attn(x, rope, view, past)


class DecoderLayer(Layer):
    """y = x + mix(norm(x)), then y + mlp(norm(y)). Not in targets with streams."""

    def __init__(self, config: ModelConfig, index: int = 0):
        super().__init__(config, index)
        norm = (config.hidden_size, config.rms_norm_eps, config.hybrid)
        self.input_layernorm = RMSNorm(*norm)
        self.post_attention_layernorm = RMSNorm(*norm)
        self.mlp = MLP(config.hidden_size, config.intermediate_size)

    def forward(self, x: Tensor, rope, view: View, past: dict | None = None, tokens=None):
        """x (B,N,C) -> out (B,N,C), the layer's state, and its input for taps (B,N,C)."""
        mixed, new = self.mix(self.input_layernorm(x), rope, view, past)
        y = x + mixed
        return y + on_real(self.mlp, self.post_attention_layernorm(y), view.real), new, x


class StreamLayer(Layer):
    """A decoder layer on several residual streams: hyper-connections read and write them, the MLP
    is a mixture of experts, and some layers begin with an n-gram layer."""

    def __init__(self, config: ModelConfig, index: int):
        super().__init__(config, index)
        ids = config.ple_layer_ids  # counted from 1
        self.ple = NGramLayer(config, ids.index(index + 1)) if index + 1 in ids else None
        self.attn_hyper_connection = HyperConnection(config)
        self.mlp_hyper_connection = HyperConnection(config)
        self.mlp = MixtureOfExperts(config)

    def forward(self, x: Tensor, rope, view: View, past: dict | None = None, tokens=None):
        """x (B,N,streams*C), tokens (B,N) -> out, the layer's state, its mixed input (B,N,C)."""
        ngram_state = {}
        if self.ple:
            added, ngram_state = self.ple(x, tokens, view, past)
            x = x + added
        layer_input, normed = self.attn_hyper_connection.read(x)
        mixed, new = self.mix(layer_input, rope, view, past)
        x = self.attn_hyper_connection.write(x, normed, mixed)
        mlp_input, normed = self.mlp_hyper_connection.read(x)
        out = on_real(self.mlp, mlp_input, view.real)
        x = self.mlp_hyper_connection.write(x, normed, out)
        return x, new | ngram_state, layer_input


class Decoder(nn.Module):
    """Embedding, layers, and at the end a norm, or the mixer of the residual streams."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        layer_class = StreamLayer if config.has_streams else DecoderLayer
        self.layers = nn.ModuleList(layer_class(config, i) for i in range(config.num_hidden_layers))
        if config.has_streams:
            self.hyper_connection_mixer = HyperConnection(config, writes=False)
        else:
            self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.hybrid)

    def forward(self, tokens: Tensor, view: View, past: list | None = None, tap_ids=(), keep=True):
        """tokens (B,N) -> final hidden (B,N,C), taps (B,N,len(tap_ids)*C) or None, layers' states
        (none of them where keep is False).

        Tap L is the output of layer L (0-based), before any final norm: the input of layer L + 1.
        With streams it is their mix (B,N,C), and after the last layer the final hidden."""
        x = self.embed_tokens(tokens).repeat(1, 1, self.config.num_streams)  # (B, N, streams*C)
        rope = rotary(view.positions, self.config.rotary_dim, self.config.rope_theta)
        inputs = []  # of each layer, where tapped
        states = []
        for index, layer in enumerate(self.layers):
            x, state, layer_input = layer(x, rope, view, past[index] if past else None, tokens)
            if keep:
                states.append(state)
            inputs.append(layer_input if index - 1 in tap_ids else None)
        hidden = self.hyper_connection_mixer.read(x)[0] if self.config.has_streams else self.norm(x)
        inputs.append(hidden if self.config.has_streams else x)
        taps = torch.cat([inputs[i + 1] for i in tap_ids], -1) if tap_ids else None
        return hidden, taps, states


def init_weights(module: nn.Module) -> None:
    """Draw fresh matrices and leave norms at one: `model.apply(init_weights)`."""
    if isinstance(module, nn.Linear | nn.Embedding | NGramTable | Experts):
        for matrix in module.parameters(recurse=False):
            nn.init.normal_(matrix, std=0.02)


# --------------------------------------------------------------------------------------- the lesson


def main():
    q = [0.5, 1.0]  # one head of width 2
    k = [[0.0, 1.0], [1.0, 1.0]]
    v = [[1.0, 2.0], [3.0, 0.0]]
    scores = [sum(a * b for a, b in zip(q, k_s)) / math.sqrt(2) for k_s in k]
    exponentials = [math.exp(score) for score in scores]
    weights = [number / sum(exponentials) for number in exponentials]
    out = [sum(weight * v_s[d] for weight, v_s in zip(weights, v)) for d in range(2)]
    print(f"1. Attention by hand: q = {q}, k = {k}, v = {v}\n")
    print(f"   scores  q · k_s / sqrt(2)     {torch.tensor(scores)}")
    print(f"   weights softmax               {torch.tensor(weights)}")
    print(f"   out     sum of weight * v_s   {torch.tensor(out)}")
    kv = torch.stack([torch.tensor(k), torch.tensor(v)], 1)[None, :, :, None]  # (1, 2, 2, 1, 2)
    same = attention(torch.tensor(q)[None, None, None], kv, None)  # (1, 1, 1, 2)
    print(f"   the function `attention`      {same[0, 0, 0]}")
    torch.manual_seed(0)
    sizes = dict(vocab_size=11, hidden_size=8, intermediate_size=16, num_hidden_layers=1)
    config = ModelConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, head_dim=4)
    decoder = Decoder(config).apply(init_weights)
    print("\n2. A decoder of one layer, tensor by tensor (Hugging Face's names):\n")
    for name, tensor in decoder.named_parameters():
        print(f"   {name:40s} {tuple(tensor.shape)}")
    tokens = torch.tensor([[1, 2, 3, 4]])
    whole, _, _ = decoder(tokens, causal_view(1, 4))
    _, _, past = decoder(tokens[:, :3], causal_view(1, 3))
    cached, _, _ = decoder(tokens[:, 3:], causal_view(1, 1, T=3), past)
    print("\n3. The final hidden state of token 3, run with tokens 0..2, and run on their state:")
    print(f"   largest difference {(whole[0, 3] - cached[0, 0]).abs().max().item():.1e}")


if __name__ == "__main__":
    with torch.no_grad():
        main()
