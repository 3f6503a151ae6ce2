"""The drafter: a few decoder layers that propose a whole block of tokens in one pass.

1. The target's hidden states at a few tapped layers are fused into context features,
   hidden_norm(fc(taps)).
2. Each drafter layer is an ordinary decoder layer whose PAST is made from these features: its own
   k and v projections of them, at their true positions. No token of the context is run again.
3. The block is [x_a, MASK, ..., MASK]. Its slots see the context strictly before a, and each other
   (only backwards in a causal block).
4. Embedding and head are frozen: the target's, unless the drafter's folder holds its own.
5. `propose` proposes K branches, and can return the very q that they were drawn from.

Three drafters share this backbone. h_k is the hidden state of the slot that predicts y_k, e_k a
vector of the token y_{k-1} before it (y_0 = x_a):

    DFlash     slot j >= 1 predicts position a + j, not knowing the others' tokens; W = b - 1
    DSpark     slot j predicts position a + j + 1; W = b. logits_k += W2 f(e_k), and a confidence:
               how likely draft k is accepted
    DFlash 2   as DFlash, but slot k chooses among its top candidates c, with the logits
               U_k(c) + <pred[y_{k-1}] * P h_k, succ[c]>, where U_k are the slot's own ("unary")
               logits; and short convolutions along the block

DSpark and DFlash 2 walk the slots from left to right: W tiny steps, no pass of the layers. The same
functions serve training (all anchors of a text) and decoding (one anchor, context in a `Memory`).

    python drafter.py            blocks at two anchors, what they see, and what the heads add
    pytest tests/test_drafter.py
"""

from dataclasses import asdict, dataclass, field, replace
from math import inf
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recomputed

import hf.drafters
from hf.drafters import FIELDS_OF_KIND, KINDS, MARKOV_HEADS
from hf.files import model_folder, read_json
from hf.tensors import flat_names, load_weights, tensor_files
from model import DecoderLayer, ModelConfig, RMSNorm, check_field, init_weights, rotary
from support.files import write_json, write_tensors
from support.gpu import chunk_elements
from target import Target, Trunk
from tree import View, gather_slots, with_room, write_slots

LEAST_TEMPERATURE = 1e-4
MAY_BE_ZERO = ("input_embedding_scale", "final_logit_softcapping", "markov_rank", "num_anchors")
LEAST = dict.fromkeys(MAY_BE_ZERO, 0)  # other numbers: above 0
BLOCKS_AT_ONCE = 32  # run together; the mask has a row and a column for each of their slots

# ------------------------------------------------------------------------------------------- config


@dataclass(frozen=True)
class DrafterConfig:
    """The shape of the layers, and what makes them a drafter. A kind uses the fields that
    hf.drafters lists for it; the others keep their defaults and mean nothing."""

    layers: ModelConfig
    block_size: int  # b: slots of a block, the anchor's slot included
    mask_token_id: int
    target_layer_ids: tuple
    num_target_layers: int | None = None  # of the target it was trained for, if the file says
    is_causal: bool | None = False  # None: exactly the sliding layers are causal
    architecture: str = "DFlashDraftModel"
    layer_types: tuple = ()  # full_attention or sliding_attention per layer; empty: all full
    sliding_window: int = 0  # of the sliding layers
    # DFlash 2
    conv_kernel_size: int = 2
    conv_group_size: int = 16
    selector_rank: int = 256
    selector_top_k: int = 16
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float = 0.0  # 0: none
    # DSpark
    markov_rank: int = 256
    markov_head_type: str = "vanilla"
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True
    num_anchors: int = 512  # per text, for DeepSpec when it goes on from the folder; its own value
    # all kinds
    has_embedding: bool = False  # the file has an embedding of its own, the target's is not used
    has_head: bool = False  # likewise
    trained_with: dict | None = None  # the chat template's hash and arguments; engines ignore it
    other_fields: dict = field(default_factory=dict)  # {place: fields} that change nothing

    def __post_init__(self):
        if self.num_draft_tokens < 1:
            raise ValueError(f"block_size {self.block_size} leaves no room for a draft")
        ids = list(self.target_layer_ids)
        if ids != sorted(set(ids)):  # engines collect taps in the order of the layers
            raise ValueError(f"target_layer_ids {ids} must increase strictly")
        if self.is_causal is None and len(set(self.layer_types)) < 2:  # all layers are alike
            object.__setattr__(self, "is_causal", "sliding_attention" in self.layer_types)
        if not self.markov_rank:  # else engines refuse what is written
            object.__setattr__(self, "confidence_head_with_markov", False)
        for name in FIELDS_OF_KIND[self.kind]:
            default = getattr(DrafterConfig, name)
            check_field(name, getattr(self, name), default, LEAST.get(name))
        self._check_windows()
        if self.markov_head_type not in MARKOV_HEADS:
            raise ValueError(f"markov_head_type {self.markov_head_type!r}, none of {MARKOV_HEADS}")
        C, V = self.layers.hidden_size, self.layers.vocab_size
        if self.kind == "dflash2" and self.selector_top_k > V:
            raise ValueError(f"selector_top_k {self.selector_top_k} is beyond vocab_size {V}")
        if self.kind == "dflash2" and C % self.conv_group_size:
            group = self.conv_group_size
            raise ValueError(f"hidden_size {C} is no multiple of conv_group_size {group}")

    def _check_windows(self) -> None:
        """Refuse a window that would cut what the slots of a block see of each other: engines
        apply it to them, too."""
        b = self.block_size
        for layer in range(self.layers.num_hidden_layers):
            if 0 < self.window(layer) < b:
                cut = f"sliding_window {self.window(layer)} cuts a block of {b} slots"
                raise ValueError(f"{cut}: at least {b} is needed")

    @property
    def kind(self) -> str:
        return KINDS[self.architecture]

    @property
    def num_draft_tokens(self) -> int:
        """W. In DSpark the anchor's slot predicts a token, too."""
        return self.block_size if self.kind == "dspark" else self.block_size - 1

    def window(self, layer: int) -> int:
        """How far back a layer's slots see; 0: all of the context."""
        slides = self.layer_types and self.layer_types[layer] == "sliding_attention"
        return self.sliding_window if slides else 0

    def causal(self, layer: int) -> bool:
        """Whether a layer's slots see only those before them in their block."""
        return self.window(layer) > 0 if self.is_causal is None else self.is_causal

    def check(self, target: Target, tokenizer=None, source="the drafter") -> None:
        """Name the first thing by which the drafter does not fit its target or tokenizer. `source`
        names the drafter's file."""
        try:
            self._check_target(target)
            self._check_mask(target.config.vocab_size, tokenizer)
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from None
        if tokenizer and self.trained_with is not None:
            self._compare_templates(tokenizer.template_facts)

    def _check_target(self, target: Target) -> None:
        C, V = target.config.hidden_size, target.config.vocab_size
        num_layers = target.config.num_hidden_layers
        rows = {  # the drafter's value, the target's
            "hidden_size": (self.layers.hidden_size, C),
            "vocab_size": (self.layers.vocab_size, V),
            "num_target_layers": (self.num_target_layers, num_layers),
        }
        for name, (value, wanted) in rows.items():
            if value not in (None, wanted):
                has = f"{wanted} layers" if name == "num_target_layers" else wanted
                another = f"this target has {has}: it was trained for another target"
                raise ValueError(f"{name} is {value}, {another}")
        ids = self.target_layer_ids
        if not ids or not all(-1 <= i < num_layers for i in ids):
            layers = f"layers 0..{num_layers - 1} of this target, or -1 for the embedding"
            raise ValueError(f"target_layer_ids {list(ids)} are not {layers}")
        if -1 in ids and target.config.has_streams:
            raise ValueError("target_layer_ids -1 is not implemented for residual streams")

    def _check_mask(self, vocab_size: int, tokenizer) -> None:
        mask = self.mask_token_id
        other = "a fresh drafter takes another by --mask-token-id"
        if not 0 <= mask < vocab_size:
            raise ValueError(f"mask_token_id {mask} is beyond vocab_size {vocab_size}: {other}")
        if tokenizer and mask in (*tokenizer.stop_ids, tokenizer.pad_id):
            raise ValueError(f"mask_token_id {mask} is a stop or pad id: {other}")
        if tokenizer and mask in tokenizer.text_ids:
            print(f"warning: mask_token_id {mask} is an ordinary token of text")

    def _compare_templates(self, facts: dict) -> None:
        """Say in one line if the drafter was trained on chats that were rendered otherwise."""
        if self.trained_with.get("chat_template") != facts["chat_template"]:
            print("note: the drafter was trained with another chat template than this target's")
        elif self.trained_with.get("chat_template_args") != facts["chat_template_args"]:
            before, now = (x.get("chat_template_args") for x in (self.trained_with, facts))
            print(f"note: the drafter was trained with --chat-template-args {before}, not {now}")

    @classmethod
    def from_dict(cls, config_dict: dict, source: str, tensor_names=()) -> "DrafterConfig":
        """Read a public config.json in either form. tensor_names: of the file beside it."""
        fields, layer_dict = hf.drafters.drafter_fields(config_dict, source)
        names = {name.removeprefix("model.") for name in tensor_names}
        fields["has_embedding"] = "embed_tokens.weight" in names
        fields["has_head"] = "lm_head.weight" in names
        layers = ModelConfig.from_dict(layer_dict, source)
        try:
            config = cls(layers, **fields)
            if config_dict.get("tie_word_embeddings") and config.has_embedding != config.has_head:
                raise ValueError(
                    "tie_word_embeddings is true and the file has only one of embed_tokens and "
                    "lm_head: engines take the target's for the other; set it to false, or add it"
                )
            return config
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from None

    def to_dict(self) -> dict:
        """The config.json that vLLM and SGLang load, in the form of its architecture."""
        return hf.drafters.drafter_config_json(asdict(self), self.layers.to_dict())


# --------------------------------------------------------------------------- from logits to tokens


@dataclass(frozen=True)
class Sampling:
    """How logits become the distribution that tokens are drawn from, in float32, for p and for q.
    Speculative decoding is lossless only if a draft is judged by the very q it was drawn from:
    `draw_branches` returns both together, and serve.py computes no q of its own."""

    temperature: float = 1.0  # 0 = greedy: all mass on the argmax
    top_k: int = 0  # 0 = off
    top_p: float = 1.0  # 1 = off

    def __post_init__(self):
        if not 0 <= self.temperature < inf or self.top_k < 0 or not 0 < self.top_p <= 1:
            raise ValueError(f"temperature >= 0, top_k >= 0, 0 < top_p <= 1 are needed, not {self}")
        if 0 < self.temperature < LEAST_TEMPERATURE:  # logits divided by it would be infinite
            least = f"0 is greedy, else at least {LEAST_TEMPERATURE:g} is needed"
            raise ValueError(f"temperature {self.temperature:g}: {least}")

    def probs(self, logits: Tensor) -> Tensor:
        """(..., V) -> probabilities (..., V), float32."""
        logits = logits.float()
        if self.temperature == 0:
            return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
        logits = logits / self.temperature
        if 0 < self.top_k < logits.shape[-1]:  # ties at the edge stay in
            edge = logits.topk(self.top_k, -1).values[..., -1:]
            logits = logits.masked_fill(logits < edge, -torch.inf)
        probs = logits.softmax(-1)
        if self.top_p < 1:  # the smallest set of the likeliest tokens that reaches top_p
            ordered, order = probs.sort(-1, descending=True)
            outside = ordered.cumsum(-1) - ordered >= self.top_p
            probs = probs.masked_fill(torch.zeros_like(outside).scatter(-1, order, outside), 0.0)
            probs = probs / probs.sum(-1, keepdim=True)
        return probs


GREEDY = Sampling(temperature=0.0)
PLAIN = Sampling(temperature=1.0)


def draw(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Draw tokens by the inverse distribution function: probs (...,V), uniforms (...,n) in [0,1) ->
    (...,n). A token of probability zero is never drawn. NaN gives any token; the loss, or
    `verify` in serve.py, then reports it."""
    cumulative = probs.cumsum(-1)
    total = cumulative[..., -1:]
    point = torch.minimum(uniforms * total, torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulative, point.contiguous(), right=True)
    tokens = tokens.clamp(max=probs.shape[-1] - 1)
    if probs.is_cuda:  # its parallel sum may fall by a rounding where a probability is zero
        is_possible = probs.gather(-1, tokens) > 0
        tokens = torch.where(is_possible, tokens, probs.argmax(-1, keepdim=True))
    return tokens


def tokens_at(trunk: Trunk, anchors: Tensor) -> Tensor:
    """The tokens x_a (B,A) at anchors (B,A); of an absent one, any."""
    return trunk.tokens.gather(1, anchors.clamp(min=0))


def previous_tokens(anchor_tokens: Tensor, tokens: Tensor) -> Tensor:
    """The token before each of tokens (B,A,K,W), anchor_tokens (B,A): x_a, y_1, ..., y_{W-1}."""
    first = anchor_tokens[..., None, None].expand(*tokens.shape[:-1], 1)
    return torch.cat([first, tokens[..., :-1]], -1)


# ------------------------------------------------------------------------ what the slots may know


def block_view(
    anchors: Tensor, block_size: int, T: int, window=0, causal=False, context_positions=None
) -> View:
    """What each slot of the blocks at anchors (B,A) sees: its own block (if causal, up to itself),
    and of the T entries of context those at positions before its anchor (in a sliding layer only
    those less than `window` before the slot). Anchors may come in any order. The block of an absent
    anchor, -1, sees only itself. context_positions (B,T): the entries', if they are not 0..T-1."""
    B, A = anchors.shape
    device = anchors.device
    positions = anchors.clamp(min=0)[..., None] + torch.arange(block_size, device=device)
    positions = positions.flatten(1)  # (B, A*b)
    context = torch.arange(T, device=device)
    if context_positions is not None:
        context = context_positions[:, None]
    sees = (context < anchors[..., None]).repeat_interleave(block_size, 1)  # (B, A*b, T)
    sees = sees & (context >= 0)
    if window:
        sees = sees & (context > positions[..., None] - window)
    block = torch.arange(A, device=device).repeat_interleave(block_size)
    same = block[:, None] == block
    same = (same.tril() if causal else same).expand(B, -1, -1)  # (B, A*b, A*b)
    mask = torch.cat([sees, same], -1)[:, None]
    return View(positions, positions - 1, T, mask)


@dataclass
class LayerMemory:
    """One layer's keys and values of the context (B,S,2,H_kv,D), by position. Those of a sliding
    layer in decoding are a ring: slot = position mod S."""

    keys_values: Tensor
    is_ring: bool = False

    def positions(self, lengths: Tensor) -> Tensor | None:
        """The positions (B,S) that a ring's slots hold when lengths (B,) tokens are remembered,
        negative where there is none. None: the slots are the positions."""
        if not self.is_ring:
            return None
        S = self.keys_values.shape[1]
        last = lengths[:, None] - 1
        return last - (last - torch.arange(S, device=lengths.device)) % S

    def write(self, new: Tensor, positions: Tensor) -> None:
        """Write new (B,P,...) at positions (B,P), which follow one another."""
        S = self.keys_values.shape[1]
        if self.is_ring:  # no slot twice in one write: which of two wins is not defined
            new, positions = new[:, -S:], positions[:, -S:] % S
        write_slots(self.keys_values, new, positions)


@dataclass
class Memory:
    """The drafter's keys and values of the context, layer by layer."""

    layers: list[LayerMemory]
    width: int

    def with_room(self, num_slots: int) -> "Memory":
        """The memory with at least so many slots per layer; not for rings."""
        caches = [with_room(layer.keys_values, num_slots) for layer in self.layers]
        return replace(self, layers=[LayerMemory(cache) for cache in caches])

    def select(self, rows: Tensor) -> "Memory":
        layers = [replace(layer, keys_values=layer.keys_values[rows]) for layer in self.layers]
        return replace(self, layers=layers)


# -------------------------------------------------------------------------------------------- heads


class MarkovHead(nn.Module):
    """DSpark's sequential head. A fresh one has W2 = 0 and changes nothing."""

    def __init__(self, config: DrafterConfig):
        super().__init__()
        V, C, R = config.layers.vocab_size, config.layers.hidden_size, config.markov_rank
        self.kind = config.markov_head_type
        self.markov_w1 = nn.Embedding(V, R)
        self.markov_w2 = nn.Linear(R, V, bias=False)
        nn.init.zeros_(self.markov_w2.weight)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(C + R, R)
        elif self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * R + C, 3 * R)

    def forward(self, hidden: Tensor, previous: Tensor, state: Tensor | None):
        """hidden (...,W,C), the tokens before the slots (...,W) -> what is added to the logits
        (...,W,V), and the recurrence's state for the following slots (None without one)."""
        e = self.markov_w1(previous)  # (..., W, R)
        hidden = hidden.expand(*e.shape[:-1], -1)
        if self.kind == "gated":
            e = self.gate_proj(torch.cat([hidden, e], -1)).sigmoid() * e
        elif self.kind == "rnn":
            e, state = self._recurrence(hidden, e, state)
        return self.markov_w2(e), state

    def _recurrence(self, hidden, e, state):
        """s <- σ(g) s + (1 - σ(g)) tanh(c), output tanh(o), slot by slot."""
        if state is None:
            state = torch.zeros_like(e[..., 0, :])
        outputs = []
        for k in range(e.shape[-2]):
            joint = self.joint_proj(torch.cat([state, e[..., k, :], hidden[..., k, :]], -1))
            g, c, o = joint.chunk(3, -1)
            state = g.sigmoid() * state + (1 - g.sigmoid()) * c.tanh()
            outputs.append(o.tanh())
        return torch.stack(outputs, -2), state


class ConfidenceHead(nn.Module):
    """The logit of the probability that draft k is accepted, if those before it were."""

    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.with_markov = config.confidence_head_with_markov and config.markov_rank > 0
        width = config.layers.hidden_size + config.markov_rank * self.with_markov
        self.proj = nn.Linear(width, 1)
        nn.init.zeros_(self.proj.weight)
        nn.init.zeros_(self.proj.bias)

    def forward(self, hidden: Tensor, e: Tensor | None) -> Tensor:
        """hidden (...,W,C), vectors of the tokens before (...,W,R) -> (...,W)."""
        if self.with_markov:
            hidden = torch.cat([hidden.expand(*e.shape[:-1], -1), e], -1)
        return self.proj(hidden)[..., 0]


class CandidateSelector(nn.Module):
    """DFlash 2's choice among a slot's candidates. A fresh one has succ = 0 and changes nothing."""

    def __init__(self, config: DrafterConfig):
        super().__init__()
        V, R = config.layers.vocab_size, config.selector_rank
        self.predecessor_codebook = nn.Parameter(torch.randn(V, R))
        self.successor_codebook = nn.Parameter(torch.zeros(V, R))
        self.hidden_projection = nn.Linear(config.layers.hidden_size, R, bias=False)

    def forward(self, hidden: Tensor, previous: Tensor, candidates: Tensor) -> Tensor:
        """hidden (...,W,C), the tokens before (...,W), candidates (...,W,k) -> what is added to
        their logits (...,W,k)."""
        context = self.predecessor_codebook[previous] * self.hidden_projection(hidden)
        return (context[..., None, :] * self.successor_codebook[candidates]).sum(-1)


class DynamicConv(nn.Module):
    """A short convolution along the block, before and after a sublayer:

    out_t = sum over tau of (base[side, tau] + delta_t[side, tau]) * x_{t - tau}

    delta_t is projected from the sublayer's normed input and shared by groups of channels. Before
    the block are zeros. A fresh one is the identity."""

    def __init__(self, config: DrafterConfig):
        super().__init__()
        C = config.layers.hidden_size
        self.kernel_size = config.conv_kernel_size
        self.group_size = config.conv_group_size
        self.block_size = config.block_size
        self.base_kernel = nn.Parameter(torch.zeros(2, self.kernel_size, C))
        nn.init.ones_(self.base_kernel[:, 0])
        rows = 2 * self.kernel_size * (C // self.group_size)
        self.kernel_projection = nn.Linear(C, rows, bias=False)
        nn.init.zeros_(self.kernel_projection.weight)

    def kernels(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x (B,A*b,C), the sublayer's normed input -> the kernels of both sides (B,A*b,size,C)."""
        delta = self.kernel_projection(x).unflatten(-1, (2, self.kernel_size, -1))
        return (delta.repeat_interleave(self.group_size, -1) + self.base_kernel).unbind(2)

    def forward(self, x: Tensor, kernel: Tensor) -> Tensor:
        """x (B,A*b,C) -> the same, convolved within each block."""
        blocks = x.unflatten(1, (-1, self.block_size))  # (B, A, b, C)
        kernel = kernel.unflatten(1, (-1, self.block_size))  # (B, A, b, size, C)
        out = kernel[..., 0, :] * blocks
        for tau in range(1, self.kernel_size):
            shifted = F.pad(blocks, (0, 0, tau, 0))[:, :, : self.block_size]
            out = out + kernel[..., tau, :] * shifted
        return out.flatten(1, 2)


class ConvolvedLayer(DecoderLayer):
    """A decoder layer of DFlash 2: convolutions around each sublayer, not of context features."""

    def __init__(self, config: DrafterConfig):
        super().__init__(config.layers)
        self.attention_conv = DynamicConv(config)
        self.mlp_conv = DynamicConv(config)

    def forward(self, x: Tensor, rope, view: View, past: dict | None = None):
        """x (B,A*b,C) -> x, what the layer remembers, its input."""
        normed = self.input_layernorm(x)
        before, after = self.attention_conv.kernels(normed)
        mixed, new = self.mix(self.attention_conv(normed, before), rope, view, past)
        y = x + self.attention_conv(mixed, after)
        normed = self.post_attention_layernorm(y)
        before, after = self.mlp_conv.kernels(normed)
        return y + self.mlp_conv(self.mlp(self.mlp_conv(normed, before)), after), new, x


# ----------------------------------------------------------------------------------------- drafters


@dataclass
class Proposal:
    """K branches of W tokens at each anchor, and what they were drawn from."""

    tokens: Tensor  # (B, A, K, W)
    hidden: Tensor | None  # (B, A, 1, W, C), with gradient if there was one; None: looked up
    anchor_tokens: Tensor  # (B, A)
    sampling: Sampling
    drafter: "Drafter | LookupDrafter"
    q_probs: Tensor | None = None  # (B, A, K or 1, W, V) that `draw` drew from, if asked for

    @property
    def previous(self) -> Tensor:
        """The token before each (B,A,K,W)."""
        return previous_tokens(self.anchor_tokens, self.tokens)

    def probs(self) -> Tensor:
        """q (B,A,K,W,V), computed again, float32, with gradient: for small vocabularies."""
        q = self.sampling.probs(self.drafter.logits(self.hidden, self.previous))
        return q.expand(*self.tokens.shape, -1)


class Drafter(nn.Module):
    """DFlash, and what all drafters share. The target's parameters are not among its own."""

    def __init__(self, config: DrafterConfig, target: Target):
        super().__init__()
        config.check(target)
        num_layers = target.config.num_hidden_layers
        self.config = config = replace(config, num_target_layers=num_layers)
        self._target = (target,)  # in a tuple, so that its parameters are not ours
        self.recompute = False  # run layers again in the backward pass, to save memory
        V, C = config.layers.vocab_size, config.layers.hidden_size
        self.fc = nn.Linear(len(config.target_layer_ids) * C, C, bias=False)
        self.hidden_norm = RMSNorm(C, config.layers.rms_norm_eps)
        num_layers = config.layers.num_hidden_layers
        self.layers = nn.ModuleList(self.new_layer() for _ in range(num_layers))
        self.norm = RMSNorm(C, config.layers.rms_norm_eps)
        if config.has_embedding:
            self.embed_tokens = nn.Embedding(V, C).requires_grad_(False)
        if config.has_head:
            self.lm_head = nn.Linear(C, V, bias=False).requires_grad_(False)

    def new_layer(self) -> DecoderLayer:
        return DecoderLayer(self.config.layers)

    @property
    def target(self) -> Target:
        return self._target[0]

    @property
    def embedding(self) -> nn.Embedding:
        """The drafter's own, else the target's."""
        return self.embed_tokens if self.config.has_embedding else self.target.model.embed_tokens

    @property
    def head(self) -> nn.Linear:
        """The drafter's own, else the target's."""
        return self.lm_head if self.config.has_head else self.target.lm_head

    def _rope(self, positions: Tensor):
        return rotary(positions, self.config.layers.head_dim, self.config.layers.rope_theta)

    # -- the context

    def _context(self, taps: Tensor, positions: Tensor) -> list[Tensor]:
        """taps (B,P,taps*C) at positions (B,P) -> each layer's keys and values of the features.
        Features go in as they are, without the layer's input norm."""
        features = self.hidden_norm(self.fc(taps.to(self.fc.weight.dtype)))  # (B, P, C)
        rope = self._rope(positions)
        return [layer.self_attn.keys_values(features, rope) for layer in self.layers]

    def remember(self, trunk: Trunk, room: int = 0, bounded: bool = False) -> Memory:
        """Keys and values of a whole trunk. room: slots for decoding to add more. bounded: sliding
        layers keep only their window; then blocks are possible only at the trunk's end."""
        if trunk.tap_ids != self.config.target_layer_ids:
            raise ValueError(
                f"the trunk was tapped at layers {trunk.tap_ids}, the drafter reads "
                f"{self.config.target_layer_ids}: prefill(..., tap_ids=...) chooses them"
            )
        if trunk.taps is None:
            raise ValueError("this trunk keeps no taps: remember it before they are dropped")
        T = trunk.taps.shape[1]
        contexts = self._context(trunk.taps, torch.arange(T, device=trunk.taps.device)[None])
        layers = []
        for number, keys_values in enumerate(contexts):
            window = self.config.window(number)
            # W + 1 larger than the window, so a round overwrites nothing that is still visible
            size = window + self.config.num_draft_tokens + 1
            if bounded and window and size < T + room:
                layer = LayerMemory(with_room(keys_values, size)[:, :size], is_ring=True)
                positions = layer.positions(trunk.lengths)
                layer.keys_values = gather_slots(keys_values, positions.clamp(0, T - 1))
            else:
                layer = LayerMemory(with_room(keys_values, T + room))
            layers.append(layer)
        return Memory(layers, T)

    def extend(self, memory: Memory, taps: Tensor, lengths: Tensor) -> Memory:
        """Remember P more tokens of each row, taps (B,P,·), from position lengths (B,) on, in
        place. Entries after what gets committed are never read."""
        positions = lengths[:, None] + torch.arange(taps.shape[1], device=taps.device)
        for layer, new in zip(memory.layers, self._context(taps, positions)):
            layer.write(new, positions)
        return replace(memory, width=memory.width + taps.shape[1])

    # -- the block

    def block(self, trunk: Trunk, anchors: Tensor, memory: Memory | None = None) -> Tensor:
        """Final hidden (B,A,W,C) of the blocks at anchors (B,A). The trunk gives the anchors'
        tokens and, without a memory, the context."""
        if memory is None:
            memory = self.remember(trunk)
        parts = [self._block(trunk, part, memory) for part in anchors.split(BLOCKS_AT_ONCE, 1)]
        return torch.cat(parts, 1)

    def _block(self, trunk: Trunk, anchors: Tensor, memory: Memory) -> Tensor:
        config = self.config
        B, A = anchors.shape
        b = config.block_size
        masks = anchors.new_full((B, A, b - 1), config.mask_token_id)
        tokens = torch.cat([tokens_at(trunk, anchors)[..., None], masks], -1).view(B, A * b)
        x = self.embedding(tokens).to(self.fc.weight.dtype)  # (B, A*b, C)
        x = x * config.input_embedding_scale
        views = {}  # layers that see alike share a view
        for number, layer in enumerate(self.layers):
            past = memory.layers[number]
            kind = (config.window(number), config.causal(number), past.is_ring)
            if kind not in views:
                positions = past.positions(anchors[:, 0])
                T = past.keys_values.shape[1] if past.is_ring else memory.width
                view = block_view(anchors, b, T, kind[0], kind[1], positions)
                views[kind] = (view, self._rope(view.positions))
            view, rope = views[kind]
            inputs = (x, rope, view, {"kv": past.keys_values})
            if self.recompute:
                x = recomputed(layer, *inputs, use_reentrant=False)[0]
            else:
                x = layer(*inputs)[0]
        return self.norm(x).view(B, A, b, -1)[:, :, b - config.num_draft_tokens :]

    # -- logits

    def proposable(self, ids: Tensor) -> Tensor:
        """Which ids may be proposed: not MASK, no row beyond the tokenizer. p is never masked."""
        return (ids != self.config.mask_token_id) & (ids < self.target.num_tokens)

    def unary_logits(self, hidden: Tensor) -> Tensor:
        """(…, C) -> (…, V) by the head, of each slot by itself; -inf where q must be 0."""
        logits = self.head(hidden.to(self.head.weight.dtype))
        with torch.no_grad():  # autograd need not see this: where q is 0 the gradient is 0
            logits[..., self.config.mask_token_id] = -torch.inf  # as `proposable`
            logits[..., self.target.num_tokens :] = -torch.inf
        return logits

    def slot_logits(self, unary, hidden, previous, state=None, labels=None):
        """Logits of some slots, given the tokens before them: unary (…,1,W,V), hidden (…,1,W,C),
        previous (…,K,W) -> (…,1 or K,W,V), and a state for the following slots. labels (…,K,W): ids
        that must be among the candidates (in training)."""
        return unary, None

    def logits(self, hidden: Tensor, previous: Tensor | None = None, labels=None) -> Tensor:
        """q's logits on a given history; see `slot_logits`."""
        return self.slot_logits(self.unary_logits(hidden), hidden, previous, None, labels)[0]

    has_confidence = False

    def confidence_logits(self, hidden, previous, detached: bool = False) -> Tensor:
        """Logits (…,K,W) of the probability that each draft is accepted, given those before it.
        detached: no gradient goes beyond the confidence head."""
        raise ValueError(f"a {self.config.kind} drafter without a confidence head")

    # -- proposing

    def propose(
        self,
        trunk: Trunk,
        anchors: Tensor,
        num_branches: int = 1,
        sampling: Sampling = PLAIN,
        generator: torch.Generator | None = None,
        uniforms: Tensor | None = None,
        memory: Memory | None = None,
        keep_probs: bool = False,
        num_greedy: int = 0,
    ) -> Proposal:
        """Propose K branches at each anchor (B,A), -1 = absent. The first num_greedy ones are q's
        argmax, the others are drawn with uniforms (B,A,K,W), or with new ones by the generator.
        keep_probs: keep what the branches were drawn from."""
        hidden = self.block(trunk, anchors, memory)  # (B, A, W, C)
        anchor_tokens = tokens_at(trunk, anchors)
        shape = (*anchors.shape, num_branches, self.config.num_draft_tokens)
        if sampling.temperature == 0 and not keep_probs:  # there is nothing to draw
            uniforms = None
        else:
            if uniforms is None:
                device = "cpu" if generator is None else generator.device
                uniforms = torch.rand(shape, generator=generator, device=device)
            uniforms = uniforms.to(hidden.device).flatten(0, 1)  # (B*A, K, W)
        rows = hidden.detach().flatten(0, 1)  # (B*A, W, C)
        tokens, q = self._draw_in_chunks(
            rows, anchor_tokens.flatten(), uniforms, sampling, num_branches, num_greedy, keep_probs
        )
        q = None if q is None else q.unflatten(0, anchors.shape)
        return Proposal(tokens.view(shape), hidden[:, :, None], anchor_tokens, sampling, self, q)

    @torch.no_grad()
    def _draw_in_chunks(
        self, hidden, anchor_tokens, uniforms, sampling, num_branches, num_greedy, keep_probs
    ) -> tuple[Tensor, Tensor | None]:
        """`draw_branches`, as many blocks at once as keep their logits within `chunk_elements` ->
        tokens (R,K,W), and q if it is kept."""
        R, W, _ = hidden.shape
        block_elements = num_branches * W * self.config.layers.vocab_size
        size = max(1, chunk_elements(hidden.device) // block_elements)
        tokens, probs = [], []
        for start in range(0, R, size):
            part = slice(start, start + size)
            noise = None if uniforms is None else uniforms[part]
            drawn, q = self.draw_branches(
                hidden[part], anchor_tokens[part], noise, sampling, num_branches, num_greedy
            )
            tokens.append(drawn)
            if keep_probs:
                probs.append(q)
        return torch.cat(tokens), torch.cat(probs) if keep_probs else None

    def draw_branches(self, hidden, anchor_tokens, uniforms, sampling, num_branches, num_greedy):
        """hidden (R,W,C) and anchor_tokens (R,) of R blocks, uniforms (R,K,W), or None for the
        argmax -> tokens (R,K,W), and the q of those that are drawn (R,1,W,V). DFlash's slots do not
        know one another's tokens, so all slots and all branches are drawn at once."""
        logits = self.logits(hidden)  # (R, W, V)
        best = logits.max(-1).indices  # (R, W), on a CPU in a third of argmax's time
        best = best[:, None].expand(-1, num_branches, -1)
        if uniforms is None:
            return best, None
        q = sampling.probs(logits)
        tokens = draw(q, uniforms.transpose(1, 2)).transpose(1, 2)  # (R, K, W)
        return torch.cat([best[:, :num_greedy], tokens[:, num_greedy:]], 1), q[:, None]

    # -- making, loading, saving

    @classmethod
    def fresh(
        cls, target: Target, num_layers=2, block_size=8, mask_token_id=None, seed=0, **fields
    ) -> "Drafter":
        """An untrained drafter of the target's width; `fields`: further fields of its config. MASK
        is by default the first row beyond the tokenizer. All kinds start with the same layers: a
        fresh DFlash 2 proposes what DFlash does, among its top candidates."""
        model = target.config
        if mask_token_id is None:
            mask_token_id = target.num_tokens
            if mask_token_id >= model.vocab_size:
                raise ValueError("the embedding has no spare row for MASK: give --mask-token-id")
        names = "vocab_size hidden_size num_attention_heads num_key_value_heads head_dim".split()
        names += ["rms_norm_eps", "rope_theta", "max_position_embeddings"]
        wide = 3 * model.hidden_size  # where the target has experts and no dense MLP
        layers = ModelConfig(  # qwen3: full rotary and dense layers, whatever the target has
            intermediate_size=wide if model.has_streams else model.intermediate_size,
            num_hidden_layers=num_layers,
            **{name: getattr(model, name) for name in names},
        )
        known = {"target_layer_ids": target.tap_ids, "num_target_layers": model.num_hidden_layers}
        config = DrafterConfig(layers, block_size, mask_token_id, **(known | fields))
        as_dflash = dict(architecture="DFlashDraftModel", block_size=config.num_draft_tokens + 1)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            backbone = Drafter(replace(config, **as_dflash), target).apply(init_weights)
            drafter = drafter_class(config)(config, target)
        drafter.load_state_dict(backbone.state_dict(), strict=False)
        head = config.markov_head_type
        if config.kind == "dspark" and config.markov_rank and head != "vanilla":
            print(f"note: vLLM's loader has no place for a {head} Markov head, see docs/models.md")
        return drafter

    @classmethod
    def from_pretrained(cls, folder, target: Target, dtype=None) -> "Drafter":
        """Load a published drafter folder of any kind, to the target's device. dtype None: that of
        fc in the file (bfloat16 as published); training wants float32."""
        folder = model_folder(str(folder))
        source = folder / "config.json"
        config = DrafterConfig.from_dict(read_json(source), str(source), tensor_files(folder))
        mask_file = folder / "mask_embedding.pt"
        if mask_file.exists():
            raise ValueError(f"{mask_file}: a vector of its own for MASK is not implemented")
        config.check(target, source=source)
        with torch.device("meta"):
            drafter = drafter_class(config)(config, target)
        load_weights(drafter, folder, target.lm_head.weight.device, dtype, drafter_names)
        drafter.to(drafter.fc.weight.dtype)  # a file may hold several types
        last = target.config.num_hidden_layers - 1
        if last in config.target_layer_ids:
            read = "is read before the final norm, as by DeepSpec, not by z-lab and SpecForge"
            print(f"{folder}: tap {last}, the target's last layer, {read}")
        if config.has_embedding or config.has_head:
            embedding = "its own" if config.has_embedding else "the target's"
            head = "its own" if config.has_head else "the target's"
            print(f"{folder}: the drafter uses {embedding} embedding and {head} head")
        return drafter

    def save_pretrained(self, folder, dtype=torch.bfloat16, full: bool = False) -> None:
        """Write config.json and model.safetensors with flat names: what engines load. full: with
        embedding and head, the target's where the drafter has none (for DeepSpec)."""
        folder = Path(folder)
        tensors = self.state_dict()
        if full:
            tensors["embed_tokens.weight"] = self.embedding.weight
            tensors["lm_head.weight"] = self.head.weight.clone()  # tied: a file shares no memory
        tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
        write_tensors(folder / "model.safetensors", tensors)
        dtype_name = str(dtype).removeprefix("torch.")
        write_json(folder / "config.json", self.config.to_dict() | {"dtype": dtype_name})


class AutoregressiveDrafter(Drafter):
    """A drafter whose slots know the token before them."""

    def draw_branches(self, hidden, anchor_tokens, uniforms, sampling, num_branches, num_greedy):
        """As DFlash's, slot by slot from the left; each branch has its own q (R,K,W,V)."""
        previous = anchor_tokens[:, None, None].expand(-1, num_branches, 1)  # (R, K, 1)
        unary = self.unary_logits(hidden)[:, None]  # (R, 1, W, V)
        hidden = hidden[:, None]
        state = None
        tokens, probs = [], []
        for k in range(hidden.shape[2]):
            slot = slice(k, k + 1)
            logits, state = self.slot_logits(unary[:, :, slot], hidden[:, :, slot], previous, state)
            chosen = logits.argmax(-1).expand_as(previous)  # (R, K, 1)
            if uniforms is not None:
                q = sampling.probs(logits).expand(*previous.shape, -1)  # (R, K, 1, V)
                drawn = draw(q, uniforms[:, :, slot, None])[..., 0]
                chosen = torch.cat([chosen[:, :num_greedy], drawn[:, num_greedy:]], 1)
                probs.append(q)
            tokens.append(chosen)
            previous = chosen
        return torch.cat(tokens, -1), torch.cat(probs, -2) if probs else None


class DSpark(AutoregressiveDrafter):
    """DFlash's layers, one position further, with a Markov head and a confidence head."""

    def __init__(self, config: DrafterConfig, target: Target):
        super().__init__(config, target)
        self.markov_head = MarkovHead(config) if config.markov_rank else None
        self.has_confidence = config.enable_confidence_head
        self.confidence_head = ConfidenceHead(config) if self.has_confidence else None

    def slot_logits(self, unary, hidden, previous, state=None, labels=None):
        if self.markov_head is None:
            return unary, None
        added, state = self.markov_head(hidden, previous, state)
        return unary.float() + added.float(), state

    def confidence_logits(self, hidden, previous, detached=False):
        e = self.markov_head.markov_w1(previous) if self.markov_head else None
        if detached:
            hidden = hidden.detach()
            e = None if e is None else e.detach()
        return self.confidence_head(hidden, e).expand(previous.shape)


class DFlash2(AutoregressiveDrafter):
    """DFlash with convolutions along the block, and a selector among each slot's candidates."""

    def __init__(self, config: DrafterConfig, target: Target):
        super().__init__(config, target)
        self.candidate_selector = CandidateSelector(config)

    def new_layer(self) -> DecoderLayer:
        return ConvolvedLayer(self.config)

    def candidates(self, unary: Tensor) -> Tensor:
        """The top ids (…,W,k) of logits (…,W,V), taken before any scaling."""
        return unary.detach().topk(self.config.selector_top_k, -1).indices

    def scaled(self, unary: Tensor) -> Tensor:
        """Unary logits times output_multiplier, softly capped."""
        cap = self.config.final_logit_softcapping
        logits = unary.float() * self.config.output_multiplier
        logits = cap * (logits / cap).tanh() if cap else logits
        return logits.masked_fill(unary.isneginf(), -torch.inf)  # tanh would make these finite

    def base_logits(self, hidden: Tensor) -> Tensor:
        """Logits without the selector, for the CE of the base."""
        return self.scaled(self.unary_logits(hidden))

    def slot_logits(self, unary, hidden, previous, state=None, labels=None):
        """A label that is no candidate takes the last candidate's place (in training only)."""
        ids = self.candidates(unary).expand(*previous.shape, -1)  # (…, K, W, k)
        if labels is not None:
            present = (ids == labels[..., None]).any(-1)
            last = torch.where(present, ids[..., -1], labels)
            ids = torch.cat([ids[..., :-1], last[..., None]], -1)
        V = unary.shape[-1]
        unary = unary.expand(*previous.shape, -1)
        scores = self.scaled(unary.gather(-1, ids))  # (…, K, W, k)
        scores = scores + self.candidate_selector(hidden, previous, ids).float()
        everywhere = scores.new_full((*previous.shape, V), -torch.inf)
        return everywhere.scatter(-1, ids, scores), None

    @torch.no_grad()
    def coverage(self, hidden: Tensor, labels: Tensor, valid: Tensor) -> Tensor:
        """The share of valid labels (…,W) that are among their slot's candidates."""
        ids = self.candidates(self.unary_logits(hidden))
        present = (ids == labels[..., None]).any(-1) & valid
        return present.sum() / valid.sum().clamp(min=1)


@dataclass(frozen=True)
class LookupConfig:
    """What decoding asks of a drafter's config."""

    num_draft_tokens: int = 7
    target_layer_ids: tuple = ()  # it reads no hidden states


class LookupDrafter:
    """A drafter without weights: it proposes what followed the last tokens earlier in the text
    (prompt lookup). Its q is one-hot, so a draft y is accepted with probability p(y)."""

    LONGEST = 3  # tokens that are looked up; if they are new, one token less, down to one

    def __init__(self, config: LookupConfig | None = None):
        self.config = config or LookupConfig()

    def remember(self, trunk: Trunk, room: int = 0, bounded: bool = False) -> None:
        """It needs no memory: the trunk's tokens are all it reads."""

    def propose(self, trunk: Trunk, anchors: Tensor, **_) -> Proposal:
        """Drafts (B,1,1,W) after the anchors (B,1), at 1 or later; all -1 where the anchor's token
        is new. Nothing else is read."""
        tokens = trunk.tokens
        anchors = anchors[:, 0]
        slots = torch.arange(tokens.shape[1], device=tokens.device)
        earlier = slots < anchors[:, None]  # (B, S)
        matched = torch.zeros_like(tokens)  # how many tokens that end in a slot are the last ones
        goes_on = earlier
        for back in range(self.LONGEST):
            last = tokens.gather(1, (anchors[:, None] - back).clamp(min=0))  # (B, 1)
            before = F.pad(tokens, (back, 0), value=-1)[:, : len(slots)]
            goes_on = goes_on & (before == last)
            matched = matched + goes_on
        # the longest match; of several, the last one
        place = torch.where(matched > 0, matched * len(slots) + slots, -1).argmax(1)  # (B,)
        found = matched.gather(1, place[:, None]) > 0  # (B, 1)
        period = (anchors - place)[:, None]  # beyond the anchor the text is taken to repeat
        ahead = torch.arange(self.config.num_draft_tokens, device=tokens.device) % period
        drafts = tokens.gather(1, place[:, None] + 1 + ahead)
        drafts = torch.where(found, drafts, -1)[:, None, None]
        return Proposal(drafts, None, tokens_at(trunk, anchors[:, None]), GREEDY, self)


def drafter_names(stored: str, parameters: dict):
    """The layout of a drafter's folder: names with or without a prefix; codebooks may be named as
    the weights of an embedding."""
    name, region = flat_names(stored, parameters)
    is_codebook = name.endswith("_codebook.weight")
    return name.removesuffix(".weight") if is_codebook else name, region


def drafter_class(config: DrafterConfig) -> type:
    return {"dflash": Drafter, "dspark": DSpark, "dflash2": DFlash2}[config.kind]


# ------------------------------------------------------------------------------------------- lesson


def show_blocks(target: Target, trunk: Trunk) -> None:
    """Print what the blocks at two anchors see, and a branch drawn at each."""
    anchors = torch.tensor([[3, 6]])
    print("context x_0..x_9, blocks of 4 at anchors 3 and 6: [x_a, MASK, MASK, MASK]\n")
    print(" block slot position  sees: context    | block@3 block@6")
    for n, row in enumerate(block_view(anchors, 4, 10).mask[0, 0].int()):
        cells = ["".join("·■"[v] for v in part) for part in row.split([10, 4, 4])]
        position = 3 + 3 * (n // 4) + n % 4
        print(f"{n // 4:6d} {n % 4:4d} {position:8d}        {cells[0]} | {cells[1]}    {cells[2]}")
    drafter = Drafter.fresh(target, block_size=4)
    proposal = drafter.propose(trunk, anchors, generator=torch.Generator().manual_seed(0))
    q = proposal.probs().gather(-1, proposal.tokens[..., None])  # (1, 2, 1, 3, 1)
    print("\na branch y at each, drawn from q of its slots (untrained: near uniform):")
    for anchor, ids, probs in zip((3, 6), proposal.tokens[0, :, 0], q[0, :, 0, :, 0]):
        print(f"  anchor {anchor}: y = {ids.tolist()}, q(y) = {probs}")


def show_heads(target: Target, trunk: Trunk) -> None:
    """Print the top tokens of one slot after two different tokens, for each kind of drafter."""
    print("\ncontext x_0..x_6; slot 2 predicts position 8. Its likeliest tokens if y_1 was ...\n")
    kinds = {
        "DFlash": dict(block_size=4),
        "DSpark": dict(block_size=3, architecture="Qwen3DSparkModel", markov_rank=8),
        "DFlash 2": dict(block_size=4, architecture="DFlash2DraftModel", selector_rank=8),
    }
    for name, fields in kinds.items():
        drafter = Drafter.fresh(target, **fields)
        for parameter_name, parameter in drafter.named_parameters():
            if parameter_name.endswith(("markov_w2.weight", "successor_codebook")):  # fresh: zero
                nn.init.normal_(parameter, generator=torch.Generator().manual_seed(0))
        hidden = drafter.block(trunk, torch.tensor([[6]]))[:, :, None]  # (1, 1, 1, W, C)
        for y_1 in (72, 101):
            previous = torch.tensor([[[[int(trunk.tokens[0, 6]), y_1, 0]]]])
            q = drafter.logits(hidden, previous)[0, 0, 0, 1].float().softmax(-1)
            shown = [f"{token}: {probability:.4f}" for probability, token in zip(*q.topk(3))]
            print(f"  {name:9s} y_1 = {y_1:3d}   {', '.join(shown)}")
    print("\nDFlash's slots do not know one another's tokens; the others read the token before.")


def main():
    target = Target.toy(num_hidden_layers=4, hidden_size=32, intermediate_size=64)
    target.num_tokens = 258
    trunk = target.prefill(torch.arange(65, 75)[None], torch.tensor([10]))
    show_blocks(target, trunk)
    show_heads(target, trunk)


if __name__ == "__main__":
    with torch.no_grad():
        main()
