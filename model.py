"""The layers of a decoder, from leaf to root, for the four families.

    norm, rotary · attention (plain, or sparse by an indexer) · gated delta net · MLP, mixture of
    experts · n-gram layer, hyper-connections · decoder layer · decoder

One forward serves prefill, tree and chain. A layer gets the tokens' hidden states, a `View`
(tree.py) that says who is whose past, and the state it left behind on the trunk; it returns its
output and what it remembers of the new tokens, a dict of tensors (B,N,...), and knows nothing about
training or serving. Names of modules and fields are Hugging Face's, so that tensors load by name;
shapes are (B, T, H, D) outside the attention call. Left out: dropout, biases, images.

    python model.py             two tokens of attention by hand, and a layer's tensors
    pytest tests/test_model.py tests/test_families.py      the latter: logits against transformers
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import replay
from hf.config import ModelConfig
from tree import View, block_ends, block_mask, causal_view, gather_history, gather_slots, highest

GATHERED = 2**15  # keys that are gathered at once

# ---------------------------------------------------------------------------------------- functions


def rotary(positions: Tensor, width: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and signed sin (B,N,1,width) of positions (B,N), float32; see `rotate`."""
    frequency = theta ** -(torch.arange(0, width, 2, device=positions.device) / width)
    angle = positions[..., None].float() * frequency  # (B, N, width/2)
    sin = angle.sin()
    return torch.cat([angle.cos()] * 2, -1)[:, :, None], torch.cat([-sin, sin], -1)[:, :, None]


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair (x_i, x_{i+R/2}) of x (B,N,H,D) by its angle; R <= D is the rope's width."""
    cos, sin = rope
    R, D = cos.shape[-1], x.shape[-1]
    if R < D:
        return torch.cat([rotate(x[..., :R], rope), x[..., R:]], -1)
    return ((wide := x.float()) * cos).addcmul_(wide.roll(R // 2, -1), sin).to(x.dtype)


def joined(past: Tensor | None, new: Tensor, num_slots: int) -> Tensor:
    """The past's first num_slots entries, then the new ones: (B, num_slots + N, ...).

    A cache with room to spare takes the new ones in place, behind every slot in use, where nothing
    looks before a commit moves them; that saves a decoding round the copy of its past."""
    if past is None:
        return new
    end = num_slots + new.shape[1]
    if past.shape[1] < end:
        return torch.cat([past[:, :num_slots], new], 1)
    past[:, num_slots:end] = new
    return past[:, :end]


def gathered_attention(q: Tensor, kv: Tensor, mask: Tensor, most: int) -> Tensor:
    """Attention q (B,N,H,D) to the at most `most` slots of kv (B,T,2,H_kv,D) that mask (B,1,N,T)
    checkpoint_tokens for each token: reads those alone, however long the text, so many tokens at a time."""
    if q.shape[1] > (rows := max(1, GATHERED // (len(q) * most))):
        parts = zip(q.split(rows, 1), mask.split(rows, 2))
        return torch.cat([gathered_attention(q, kv, mask, most) for q, mask in parts], 1)
    marked, slots = mask[:, 0].to(torch.uint8).topk(most, -1)  # (B, N, S)
    k, v = (
        gather_slots(kv, slots.flatten(1)).unflatten(1, slots.shape[1:]).unbind(3)
    )  # (B, N, S, H_kv, D)
    scores = torch.einsum("bnkgd,bnskd->bnkgs", q.unflatten(2, (k.shape[3], -1)).float(), k.float())
    scores = (scores * q.shape[-1] ** -0.5).masked_fill(marked[:, :, None, None] == 0, -1e30)
    out = torch.einsum("bnkgs,bnskd->bnkgd", scores.softmax(-1), v.float())
    return out.flatten(2, 3).to(q.dtype)


def short_conv(x: Tensor, weight: Tensor, past: Tensor | None, view: View, dilation=1, base=0):
    """SiLU of a causal depthwise convolution along each token's own history, x (B,N,C), weight
    (C,1,kernel): the last tap is the token itself, before the first token are zeros. past (B,S,C),
    its slot 0 at position `base`."""
    kernel, total = weight.shape[-1], 0
    for tap in range(kernel):
        index = view.ancestor((kernel - 1 - tap) * dilation)
        there = gather_history(past, x, index, view.num_trunk_slots, base)
        total = total + there.float() * weight[:, 0, tap].float()
    return F.silu(total).to(x.dtype)


# ------------------------------------------------------------------------------------------ modules


class RMSNorm(nn.Module):
    """x / rms(x) * weight, the mean in float32, over each of `groups` parts of x. Centred: the
    stored weight is w of 1 + w."""

    def __init__(self, size: int, eps: float, centred: bool = False, groups: int = 1):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size) if centred else torch.ones(size))
        self.eps, self.centred, self.groups = eps, centred, groups

    def forward(self, x: Tensor) -> Tensor:
        if not self.centred:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        parts = x.float().unflatten(-1, (self.groups, -1))
        normed = F.rms_norm(parts, parts.shape[-1:], None, self.eps).flatten(-2)
        return (normed * (1 + self.weight.float())).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention; but for Llama with a norm on each head's q and k; in the hybrid
    families with an output gate; sparse with an indexer. Remembers keys, values (B,T,2,H_kv,D)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        C, D = config.hidden_size, config.head_dim
        eps, centred = config.rms_norm_eps, config.hybrid
        self.head_dim, self.gated = D, config.hybrid
        self.q_proj = nn.Linear(C, config.num_attention_heads * D * (1 + self.gated), bias=False)
        self.k_proj = nn.Linear(C, config.num_key_value_heads * D, bias=False)
        self.v_proj = nn.Linear(C, config.num_key_value_heads * D, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * D, C, bias=False)
        normed = config.model_type != "llama"
        self.q_norm = RMSNorm(D, eps, centred) if normed else nn.Identity()
        self.k_norm = RMSNorm(D, eps, centred) if normed else nn.Identity()
        self.indexer = Indexer(config) if config.streams else None

    def keys_values(self, x: Tensor, rope) -> Tensor:
        """x (B,N,C) -> rotated keys and values (B,N,2,H_kv,D): what this layer remembers of x."""
        split = (*x.shape[:2], -1, self.head_dim)
        k = rotate(self.k_norm(self.k_proj(x).view(split)), rope)
        return torch.stack([k, self.v_proj(x).view(split)], 2)

    def forward(self, x: Tensor, rope, view: View, past: dict | None = None):
        """x (B,N,C), what the layer remembers of the trunk or None -> out (B,N,C), what it
        remembers of the N tokens."""
        B, N, _ = x.shape
        q = self.q_proj(x).view(B, N, -1, self.head_dim * (1 + self.gated))
        q, *gate = q.chunk(1 + self.gated, -1)  # per head [q | gate]
        q = rotate(self.q_norm(q), rope)
        new, mask = {"kv": self.keys_values(x, rope)}, view.mask
        if self.indexer:
            index = self.indexer.keys(x, view, past)
            mask = self.indexer(x, rope, view, past, index["block"])
            new |= index
        kv = joined(past and past["kv"], new["kv"], view.num_trunk_slots)
        most = self.indexer and self.indexer.most
        if most and kv.shape[1] > (4 if B * N * most < 4 * GATHERED else 32) * most:
            out = gathered_attention(q, kv, mask, most)
            return self.o_proj((out * gate[0].sigmoid()).reshape(B, N, -1)), new
        k, v = kv.unbind(2)
        if mask is not None and N > 1 and q.is_cuda:  # no fused kernel takes a mask and groups
            k, v = (replay.expand_heads(t, q.shape[2]) for t in (k, v))
        if N == 1:  # a key head's queries stand for tokens: several times sooner on a CPU
            q = q.view(B, k.shape[2], -1, self.head_dim).transpose(1, 2)
        out = F.scaled_dot_product_attention(
            *(t.transpose(1, 2) for t in (q, k, v)),  # (B, H, T, D) inside the call only
            attn_mask=mask,
            is_causal=mask is None and bool(N > 1),
            enable_gqa=q.shape[2] != k.shape[2],
        ).transpose(1, 2)  # (B, N, H, D)
        out = out.transpose(1, 2).reshape(B, 1, -1, self.head_dim) if N == 1 else out
        out = out * gate[0].sigmoid() if gate else out
        return self.o_proj(out.reshape(B, N, -1)), new


class Indexer(nn.Module):
    """Sparse attention's choice (QSA): a token attends to the whole blocks of r positions of its
    own history that score highest, `budget` tokens in all, and to its incomplete last block.

    Remembers the raw key of each token and the key of the block that ends with it: the mean of its
    history's last r raw keys, normed, rotated as the block's first position. It means something
    only where position + 1 is a multiple of r, and belongs to a branch exactly as far as its tokens
    do: blocks on the trunk are shared, straddling and inner ones private (method: branch-consistent
    groups).
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        D, eps, H = config.indexer_head_dim, config.rms_norm_eps, config.indexer_n_heads
        self.head_dim, self.ratio = D, config.indexer_compress_ratio
        self.num_blocks = config.indexer_budget // self.ratio
        self.most = config.indexer_budget + self.ratio - 1  # tokens that one may attend to
        self.rope = (config.rotary_dim, config.rope_theta)
        self.index_qk_proj = nn.Linear(config.hidden_size, (H + 1) * D, bias=False)
        self.q_layernorm, self.k_layernorm = RMSNorm(D, eps, True), RMSNorm(D, eps, True)

    def keys(self, x: Tensor, view: View, past: dict | None) -> dict:
        """x (B,N,C) -> raw and block keys (B,N,D)."""
        raw = F.linear(x, self.index_qk_proj.weight[-self.head_dim :])
        older = past and past["raw"]
        last = (view.ancestor(depth) for depth in range(self.ratio))
        mean = (
            sum(gather_history(older, raw, i, view.num_trunk_slots).float() for i in last)
            / self.ratio
        )
        start = rotary((view.positions - self.ratio + 1).clamp(min=0), *self.rope)
        block = self.k_layernorm(mean.to(raw.dtype))[:, :, None]
        return {"raw": raw, "block": rotate(block, start)[:, :, 0]}

    def queries(self, x: Tensor, rope) -> Tensor:
        q = F.linear(x, self.index_qk_proj.weight[: -self.head_dim])
        return rotate(self.q_layernorm(q.unflatten(-1, (-1, self.head_dim))), rope)  # (B, N, H, D)

    def forward(self, x: Tensor, rope, view: View, past: dict | None, block: Tensor) -> Tensor:
        """The attention mask (B,1,N,T+N)."""
        q, keys = self.queries(x, rope), joined(past and past["block"], block, view.num_trunk_slots)
        slots, seen = block_ends(view, self.ratio)
        products = torch.einsum("bnhd,bmd->bnmh", q.float(), keys[:, slots].float())
        scores = products.relu().sum(-1) / math.sqrt(self.head_dim)  # (B, N, M)
        chosen = highest(scores.masked_fill(~seen, -torch.inf), self.num_blocks)
        return block_mask(chosen, view, self.ratio)

    def slow(self, x: Tensor, rope, t: int) -> set[int]:
        """The positions that token t of a text x (1,N,C), rope over all of it, attends to: block by
        block, the twin of the above."""
        r, q = self.ratio, self.queries(x, rope)[0, t].float()  # (H, D)
        raw = F.linear(x[0], self.index_qk_proj.weight[-self.head_dim :])
        scores = []
        for start in range(0, (t + 1) // r * r, r):
            key = self.k_layernorm(raw[start : start + r].float().mean(0).to(x.dtype))
            key = rotate(key[None, None, None], tuple(part[:, start : start + 1] for part in rope))
            score = (q @ key[0, 0, 0].float()).relu().sum() / math.sqrt(self.head_dim)
            scores.append((-score.item(), start))
        best = sorted(scores)[: self.num_blocks]
        chosen = {start + i for _, start in best for i in range(r)}
        return chosen | set(range((t + 1) // r * r, t + 1))


class GatedDeltaNet(nn.Module):
    """Linear attention by the gated delta rule (replay.py), behind a short convolution, with a
    gated norm. Remembers of each token the convolution's input and what the rule wrote; of a
    stretch of text also the states at the view's checkpoint_tokens and its end."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        C, H, H_k = config.hidden_size, config.linear_num_value_heads, config.linear_num_key_heads
        D_k, D_v = config.linear_key_head_dim, config.linear_value_head_dim
        self.sizes = (H_k * D_k, H_k * D_k, H * D_v)
        self.key_dim, self.value_dim, self.eps = D_k, D_v, config.rms_norm_eps
        streams = config.model_type == "qwen4_exp_text"
        self.gate = torch.sigmoid if streams and config.output_gate_type == "sigmoid" else F.silu
        self.in_proj_qkv = nn.Linear(C, sum(self.sizes), bias=False)
        self.in_proj_z = nn.Linear(C, H * D_v, bias=False)
        self.in_proj_b = nn.Linear(C, H, bias=False)
        self.in_proj_a = nn.Linear(C, H, bias=False)
        channels, kernel = sum(self.sizes), config.linear_conv_kernel_dim
        self.conv1d = nn.Conv1d(channels, channels, kernel, groups=channels, bias=False)
        self.A_log = nn.Parameter(torch.empty(H).uniform_(0.01, 16).log())
        self.dt_bias = nn.Parameter(torch.ones(H))
        self.norm = RMSNorm(D_v, config.rms_norm_eps)
        self.out_proj = nn.Linear(H * D_v, C, bias=False)

    def forward(self, x: Tensor, view: View, past: dict | None = None):
        """x (B,N,C), what the layer remembers of the trunk or None -> out (B,N,C), what it
        remembers of the N tokens."""
        B, N, _ = x.shape
        qkv = self.in_proj_qkv(x)
        base = past["base"][:, None] if past and "base" in past else 0
        mixed = short_conv(qkv, self.conv1d.weight, past and past["qkv"], view, base=base).float()
        q, k, v = mixed.split(self.sizes, -1)
        q = replay.l2_normed(q.unflatten(-1, (-1, self.key_dim))) / math.sqrt(self.key_dim)
        k = replay.l2_normed(k.unflatten(-1, (-1, self.key_dim)))
        v = v.unflatten(-1, (-1, self.value_dim))  # (B, N, H, D_v)
        beta = self.in_proj_b(x).float().sigmoid()  # (B, N, H)
        a = self.in_proj_a(x).float() + self.dt_bias.float()
        g = -self.A_log.float().exp() * F.softplus(a)
        new = {"qkv": qkv, "k": k, "g": g}
        if view.groups is not None:
            o, new["u"] = replay.delta_rule_on_tree(q, k, v, g, beta, past, view)
        else:
            if view.valid is not None:  # padding leaves the state as it is
                g, beta = g * view.valid[..., None], beta * view.valid[..., None]
            zero = v.new_zeros(B, v.shape[2], self.key_dim, self.value_dim)
            state = past["states"][:, -1] if past else zero
            o, new["u"], new["states"] = replay.delta_rule(
                q, k, v, g, beta, state, view.checkpoint_tokens
            )
        z = self.in_proj_z(x).unflatten(-1, (-1, self.value_dim)).float()
        normed = F.rms_norm(o, (self.value_dim,), self.norm.weight.float(), self.eps)
        out = (normed * self.gate(z)).flatten(-2).to(x.dtype)
        return self.out_proj(out), new


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, width: int | None = None):
        super().__init__()
        C, I = config.hidden_size, width or config.intermediate_size  # noqa: E741
        self.gate_proj = nn.Linear(C, I, bias=False)
        self.up_proj = nn.Linear(C, I, bias=False)
        self.down_proj = nn.Linear(I, C, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Experts(nn.Module):
    """All experts' weights, fused: gate rows first, then up rows."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        E, C, I = config.num_experts, config.hidden_size, config.moe_intermediate_size  # noqa: E741
        self.gate_up_proj = nn.Parameter(torch.empty(E, 2 * I, C))
        self.down_proj = nn.Parameter(torch.empty(E, C, I))

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        """x (n,C), chosen experts (n,k) -> each one's output (n,k,C): one product per weight over
        tokens sorted by expert."""
        n, k = chosen.shape
        order = chosen.flatten().argsort()
        count = chosen.new_zeros(len(self.down_proj))
        count.scatter_add_(0, chosen.flatten(), torch.ones_like(order))
        ends = count.cumsum(0).to(torch.int32)
        gate, up = grouped(x[order // k], self.gate_up_proj, ends).chunk(2, -1)
        out = grouped(F.silu(gate) * up, self.down_proj, ends)
        return torch.empty_like(out).index_copy(0, order, out).view(n, k, -1)


def grouped(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """x (n,C) sorted by expert, weight (E,R,C), ends (E,) of each expert's rows -> (n,R)."""
    if any(size * x.element_size() % 16 for size in weight.shape[1:]):  # it wants aligned rows
        parts = x.tensor_split(ends[:-1].tolist())
        return torch.cat([F.linear(part, one) for part, one in zip(parts, weight)])
    return F.grouped_mm(x, weight.mT, offs=ends)


class MixtureOfExperts(nn.Module):
    """The k likeliest experts of each token, weighted, and a shared expert behind a gate."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.k, self.renormalised = config.num_experts_per_tok, config.norm_topk_prob
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = Experts(config)
        self.shared_expert = MLP(config, config.shared_expert_intermediate_size)
        self.shared_expert_gate = nn.Linear(config.hidden_size, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        weights, chosen = self.gate(flat).float().softmax(-1).topk(self.k, -1)  # (n, k)
        if self.renormalised:
            weights = weights / weights.sum(-1, keepdim=True)
        outputs = self.experts(flat, chosen) * weights.to(x.dtype)[..., None]  # (n, k, C)
        shared = self.shared_expert_gate(flat).sigmoid() * self.shared_expert(flat)
        return (outputs.sum(1) + shared).view_as(x)


class NGramTable(nn.Module):
    """Embeddings of hashed n-grams: one huge table that may stay on the host, in FP8 with a scale
    or not; only the rows looked up are moved and converted."""

    def __init__(self, rows: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))
        self.register_buffer("weight_scale", torch.ones(()))

    def forward(self, index: Tensor, dtype) -> Tensor:
        rows = self.weight[index.to(self.weight.device)].to(index.device)
        scaled = rows.dtype == torch.float8_e4m3fn
        return (rows.float() * self.weight_scale).to(dtype) if scaled else rows.to(dtype)


class NGramEmbedding(nn.Module):
    """For each order n = 2..ngram_size and each head: a hash of the last n tokens picks a row."""

    def __init__(self, config: ModelConfig, number: int):
        super().__init__()
        multipliers, primes = ngram_hashes(config, number)
        total, step = sum(primes), config.make_ngram_vocab_size_divisible_by
        self.heads = config.heads_per_ngram
        offsets = [sum(primes[:head]) for head in range(len(primes))]
        self.register_buffer("layer_multipliers", torch.tensor(multipliers))
        self.register_buffer("ngram_heads_vocab_sizes", torch.tensor(primes))
        self.register_buffer("ngram_heads_offsets", torch.tensor(offsets))
        width = config.ple_embed_dim // len(primes)
        self.ngram_embedding = NGramTable(-(-total // step) * step, width)

    def forward(self, last: Tensor, dtype) -> Tensor:
        """last (B,N,ngram_size) tokens, newest first -> (B,N,ple_embed_dim)."""
        terms = last * self.layer_multipliers  # (B, N, ngram_size)
        mixed, rows = terms[..., 0], []
        for order in range(1, terms.shape[-1]):
            mixed = mixed ^ terms[..., order]
            heads = slice((order - 1) * self.heads, order * self.heads)
            sizes, offsets = self.ngram_heads_vocab_sizes[heads], self.ngram_heads_offsets[heads]
            rows.append(mixed[..., None] % sizes + offsets)  # (B, N, heads)
        return self.ngram_embedding(torch.cat(rows, -1), dtype).flatten(-2)


def ngram_hashes(config: ModelConfig, number: int) -> tuple[list[int], list[int]]:
    """The multipliers (odd, from splitmix64) and the heads' table sizes (primes in a row) of the
    n-gram layer `number`, as a released model derives them; a checkpoint brings its own."""
    whole, golden = 2**64 - 1, 0x9E3779B97F4A7C15
    half = max(1, (2**63 - 1) // config.vocab_size // 2)
    multipliers = []
    for index in range(config.ngram_size):
        z = (config.seed + 10007 * number + golden * (index + 2)) & whole
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & whole
        z = (z ^ z >> 27) * 0x94D049BB133111EB & whole
        multipliers.append(2 * ((z ^ z >> 31) % half) + 1)
    primes, candidate = [], config.ngram_vocab_size_base - 1
    while len(primes) < (number + 1) * config.ngram_heads:
        candidate += 1
        if candidate > 1 and all(candidate % d for d in range(2, math.isqrt(candidate) + 1)):
            primes.append(candidate)
    return multipliers, primes[number * config.ngram_heads :]


class NGramLayer(nn.Module):
    """Adds to every residual stream what the last few tokens are known for: a value, gated by how
    its key agrees with the stream, and a dilated convolution over it. Remembers tokens and the
    convolution's input."""

    def __init__(self, config: ModelConfig, number: int):
        super().__init__()
        C, P, self.streams = config.hidden_size, config.ple_embed_dim, config.num_streams
        wide, self.size, self.stop = self.streams * C, config.ngram_size, config.eos_token_id
        self.ple_embedding = NGramEmbedding(config, number)
        self.key_proj = nn.Linear(P, wide, bias=False)
        self.value_proj = nn.Linear(P, C, bias=False)
        norms = (RMSNorm(wide, config.rms_norm_eps, True, self.streams) for _ in range(3))
        self.norm_key, self.norm_query, self.norm_conv = norms
        kernel = config.ple_conv_kernel_size
        self.conv1d = nn.Conv1d(wide, wide, kernel, groups=wide, bias=False)

    def last_tokens(self, tokens: Tensor, view: View, past: dict | None) -> Tensor:
        """(B,N,ngram_size): the token and those before it in its history, newest first; from the
        first that is missing or a stop token on, all read as stop tokens. Its own does not cut."""
        found = [tokens]
        for depth in range(1, self.size):
            index = view.ancestor(depth)
            token = gather_history(past and past["tokens"], tokens, index, view.num_trunk_slots)
            cut = (index < 0) | (found[-1] == self.stop if depth > 1 else False)
            found.append(torch.where(cut, self.stop, token))
        return torch.stack(found, -1)

    def forward(self, x: Tensor, tokens: Tensor, view: View, past: dict | None = None):
        """x (B,N,streams*C) -> what is added to it, what the layer remembers."""
        split = (self.streams, -1)
        embedded = self.ple_embedding(self.last_tokens(tokens, view, past), x.dtype)
        key = self.norm_key(self.key_proj(embedded)).unflatten(-1, split)  # (B, N, streams, C)
        agree = (key * self.norm_query(x).unflatten(-1, split)).sum(-1, keepdim=True)
        agree = agree / math.sqrt(key.shape[-1])
        gate = torch.sigmoid(agree.abs().clamp(min=1e-6).sqrt() * agree.sign())
        value = (gate * self.value_proj(embedded)[..., None, :]).flatten(-2)
        conv, older = self.norm_conv(value), past and past["conv"]
        out = value + short_conv(conv, self.conv1d.weight, older, view, self.size)
        return out, {"tokens": tokens, "conv": conv}


class HyperConnection(nn.Module):
    """How a sublayer reads a token's residual streams, mixed, and (unless it is the last reader)
    how much of its output each stream takes."""

    def __init__(self, config: ModelConfig, writes: bool = True):
        super().__init__()
        self.streams, wide = config.num_streams, config.num_streams * config.hidden_size
        self.hc_norm = RMSNorm(wide, config.rms_norm_eps, True, self.streams)
        self.input_mix_weight_down = nn.Linear(wide, config.hc_lowrank, bias=False)
        self.input_mix_weight_up = nn.Linear(config.hc_lowrank, wide, bias=False)
        self.block_inject_weight = nn.Linear(wide, self.streams, bias=False) if writes else None

    def forward(self, x: Tensor) -> Tensor:
        """x (B,N,streams*C) -> mixed (B,N,C)."""
        return self.read(x)[0]

    def read(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """mixed (B,N,C) and the normed streams (B,N,streams*C)."""
        normed = self.hc_norm(x)
        weights = F.silu(self.input_mix_weight_down(normed) / self.streams)
        weights = self.input_mix_weight_up(weights).sigmoid()
        return (weights * normed).unflatten(-1, (self.streams, -1)).mean(-2), normed

    def write(self, x: Tensor, normed: Tensor, out: Tensor) -> Tensor:
        """The streams x with the sublayer's output (B,N,C) added."""
        shares = 2 * torch.sigmoid(self.block_inject_weight(normed) / self.streams)
        return x + (shares[..., None] * out[..., None, :]).flatten(-2)


class Layer(nn.Module):
    """What every decoder layer has along the tokens: attention, or the delta rule."""

    def __init__(self, config: ModelConfig, index: int):
        super().__init__()
        self.linear = config.is_linear(index)
        name, kind = ("linear_attn", GatedDeltaNet) if self.linear else ("self_attn", Attention)
        self.add_module(name, kind(config))

    def mix(self, x: Tensor, rope, view: View, past: dict | None):
        if self.linear:
            return self.linear_attn(x, view, past)
        return self.self_attn(x, rope, view, past)


class DecoderLayer(Layer):
    """x + mix(norm(x)), then x + mlp(norm(x)). Targets and drafters are stacks of these."""

    def __init__(self, config: ModelConfig, index: int = 0):
        super().__init__(config, index)
        C, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(C, eps, config.hybrid)
        self.post_attention_layernorm = RMSNorm(C, eps, config.hybrid)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, rope, view: View, past: dict | None = None, tokens=None):
        """x (B,N,C) -> x, what the layer remembers, what it read (for taps: its input)."""
        mixed, new = self.mix(self.input_layernorm(x), rope, view, past)
        y = x + mixed
        return y + self.mlp(self.post_attention_layernorm(y)), new, x


class StreamLayer(Layer):
    """The same on several residual streams, read and written by hyper-connections, with a mixture
    of experts, and an n-gram layer before some."""

    def __init__(self, config: ModelConfig, index: int):
        super().__init__(config, index)
        own = index + 1 in config.ple_layer_ids
        self.ple = NGramLayer(config, config.ple_layer_ids.index(index + 1)) if own else None
        self.attn_hyper_connection = HyperConnection(config)
        self.mlp_hyper_connection = HyperConnection(config)
        self.mlp = MixtureOfExperts(config)

    def forward(self, x: Tensor, rope, view: View, past: dict | None = None, tokens=None):
        """x (B,N,streams*C) -> x, what the layer remembers, what it read (B,N,C)."""
        extra = {}
        if self.ple:
            added, extra = self.ple(x, tokens, view, past)
            x = x + added
        entry, normed = self.attn_hyper_connection.read(x)
        mixed, new = self.mix(entry, rope, view, past)
        x = self.attn_hyper_connection.write(x, normed, mixed)
        inner, normed = self.mlp_hyper_connection.read(x)
        return self.mlp_hyper_connection.write(x, normed, self.mlp(inner)), new | extra, entry


class Decoder(nn.Module):
    """Embedding, layers, and at the end a norm, or the mixer of the residual streams."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        kind = StreamLayer if config.streams else DecoderLayer
        self.layers = nn.ModuleList(kind(config, i) for i in range(config.num_hidden_layers))
        if config.streams:
            self.hyper_connection_mixer = HyperConnection(config, writes=False)
        else:
            self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.hybrid)

    def forward(self, tokens: Tensor, view: View, past: list | None = None, tap_ids=()):
        """tokens (B,N) -> final hidden (B,N,C), taps (B,N,len(tap_ids)*C) or None, what each layer
        remembers.

        A tap is the output of decoder layer L (0-based), before any final norm: what layer L + 1
        reads. With streams that is their mix (B,N,C), after the last layer the final hidden.
        """
        x = self.embed_tokens(tokens)  # (B, N, C)
        x = x.repeat(1, 1, self.config.num_streams)
        rope = rotary(view.positions, self.config.rotary_dim, self.config.rope_theta)
        entries, states = [], []
        for index, layer in enumerate(self.layers):
            x, state, entry = layer(x, rope, view, past[index] if past else None, tokens)
            states.append(state)
            entries.append(entry if index - 1 in tap_ids else None)
        hidden = self.hyper_connection_mixer(x) if self.config.streams else self.norm(x)
        entries.append(hidden if self.config.streams else x)
        tapped = torch.cat([entries[i + 1] for i in tap_ids], -1) if tap_ids else None
        return hidden, tapped, states


def init_weights(module: nn.Module, std: float = 0.02) -> None:
    """Fresh weights: normal matrices, unit norms. Used as `model.apply(init_weights)`."""
    if isinstance(module, nn.Linear | nn.Embedding | NGramTable):
        nn.init.normal_(module.weight, std=std)
    elif isinstance(module, Experts):
        nn.init.normal_(module.gate_up_proj, std=std)
        nn.init.normal_(module.down_proj, std=std)


def main():
    torch.manual_seed(0)
    config = ModelConfig(
        num_hidden_layers=1,
        hidden_size=8,
        intermediate_size=16,
        head_dim=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=11,
    )
    decoder = Decoder(config).apply(init_weights)
    print("a decoder of one layer, tensor by tensor (Hugging Face's names):")
    for name, tensor in decoder.named_parameters():
        print(f"  {name:48s} {tuple(tensor.shape)}")
    tokens = torch.tensor([[1, 2, 3, 4]])
    a = decoder(tokens, causal_view(1, 4))[0][0, 3]
    past = decoder(tokens[:, :3], causal_view(1, 3))[2]
    b = decoder(tokens[:, 3:], causal_view(1, 1, T=3), past)[0][0, 0]
    print("\nfinal hidden of token 3, run with its past, and alone on what tokens 0..2 left:")
    print(*(f"   {[round(v, 4) for v in hidden.tolist()]}" for hidden in (a, b)), sep="\n")
    print(f"   largest difference {(a - b).abs().max().item():.1e}")
    rope = rotary(torch.arange(3)[None], 4, 1e4)
    state = decoder.layers[0].self_attn.keys_values(torch.ones(1, 3, 8), rope)  # (1, 3, 2, 1, 4)
    print("\nthe same token at positions 0, 1, 2 has keys of one length, turned (rotary):")
    print(*(f"   {[round(v, 3) for v in key.tolist()]}" for key in state[0, :, 0, 0]), sep="\n")


if __name__ == "__main__":
    with torch.no_grad():
        main()
