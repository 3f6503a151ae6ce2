"""The proposer: DFlash, a few decoder layers that fill a whole block of tokens in one pass.

1. The target's hidden states at a few tapped layers are fused into context features,
   hidden_norm(fc(taps)).
2. Each drafter layer is an ordinary decoder layer whose PAST is made from these features: its own
   k/v projections applied to them, at their true positions. No token of the context is run again.
3. The block is [x_a, MASK, ..., MASK]; its tokens see the context strictly before a, and one
   another both ways. Slot j >= 1 predicts the token at its own position a + j, all slots at once.
4. Embedding and head are the target's, frozen.

`propose` returns the tokens and the very distribution they were drawn from (paper: p is the
target's, q the drafter's). The same function serves training (all anchors of a reference at once,
with gradient) and decoding (one anchor per row, features kept in a `Memory`). Left out: causal and
sliding-window blocks.

    python drafter.py            a block proposed at two anchors, and its visibility
    pytest tests/test_drafter.py
"""

from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

import torch
from torch import Tensor, nn

from checkpoint import flat, load_weights, save_tensors
from config import ModelConfig
from files import read_json, write_json
from model import DecoderLayer, RMSNorm, init_weights, rotary
from target import Target, Trunk
from tree import block_view, place, with_room

DRAW_ELEMENTS = 2**24  # probabilities held at once while drawing


# ----------------------------------------------------------------------------------------- sampling


@dataclass(frozen=True)
class Sampling:
    """How logits become the distribution that is drawn from and judged by, the same for p and q."""

    temperature: float = 1.0  # 0 = greedy: all mass on the argmax
    top_k: int = 0  # 0 = off
    top_p: float = 1.0  # 1 = off

    def __post_init__(self):
        if not 0 <= self.temperature < inf or self.top_k < 0 or not 0 < self.top_p <= 1:
            raise ValueError(
                f"temperature >= 0, top_k >= 0 and 0 < top_p <= 1 are needed, not {self}"
            )

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
        if self.top_p < 1:  # the smallest set of likeliest tokens that reaches top_p
            ordered, order = probs.sort(-1, descending=True)
            outside = ordered.cumsum(-1) - ordered >= self.top_p
            probs = probs.masked_fill(torch.zeros_like(outside).scatter(-1, order, outside), 0.0)
            probs = probs / probs.sum(-1, keepdim=True)
        return probs


def draw(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Tokens by inverse distribution function: probs (..., V), uniforms (..., n) in [0,1) -> (...,
    n). A token of probability zero is never drawn."""
    upto = probs.cumsum(-1)
    whole = upto[..., -1:]
    point = torch.minimum(uniforms * whole, torch.nextafter(whole, torch.zeros_like(whole)))
    return torch.searchsorted(upto, point.contiguous(), right=True)


# ------------------------------------------------------------------------------------------- config


@dataclass(frozen=True)
class DrafterConfig:
    """The layers' shape (a Qwen3 config) and what makes them a drafter."""

    layers: ModelConfig
    block_size: int  # b = W + 1
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None = None  # of the target it was trained for, if the file says
    is_causal: bool = False

    @property
    def num_draft_tokens(self) -> int:
        """W, the tokens proposed per block."""
        return self.block_size - 1

    def check(self, target: Target, tokenizer=None) -> None:
        """Everything by which a drafter can fail to fit its target (and tokenizer), named."""
        config, ids = target.config, self.target_layer_ids
        if self.is_causal:
            raise ValueError("is_causal = true is not implemented: the block is bidirectional")
        if self.block_size < 2:
            raise ValueError(
                f"block_size {self.block_size}: a block holds the anchor and at least one draft"
            )
        own = {"hidden_size": self.layers.hidden_size, "vocab_size": self.layers.vocab_size}
        own["num_target_layers"] = self.num_target_layers
        for name, value in own.items():
            wanted = getattr(config, name.replace("target", "hidden"))
            if value is not None and value != wanted:
                raise ValueError(f"the drafter's {name} is {value}, this target has {wanted}")
        if self.layers.num_hidden_layers < 1:
            raise ValueError(f"num_hidden_layers {self.layers.num_hidden_layers}: at least 1")
        if not ids or not all(0 <= i < config.num_hidden_layers for i in ids):
            raise ValueError(
                f"target_layer_ids {list(ids)} are not layers 0..{config.num_hidden_layers - 1}"
            )
        if not 0 <= self.mask_token_id < config.vocab_size:
            raise ValueError(
                f"mask_token_id {self.mask_token_id} is beyond vocab_size {config.vocab_size}"
            )
        if tokenizer and self.mask_token_id in (*tokenizer.stop_ids, tokenizer.pad_id):
            raise ValueError(f"mask_token_id {self.mask_token_id} is a stop or pad id")
        if tokenizer and self.mask_token_id in tokenizer.text_ids:
            print(f"warning: mask_token_id {self.mask_token_id} is an ordinary token of text")

    @classmethod
    def from_dict(cls, found: dict, source: str) -> "DrafterConfig":
        if found.get("architectures") != ["DFlashDraftModel"]:
            named = found.get("architectures")
            raise ValueError(f"{source}: architectures {named}; implemented: ['DFlashDraftModel']")
        inner = found.get("dflash_config") or {}
        sizes = {d["block_size"] for d in (found, inner) if "block_size" in d}
        if len(sizes) != 1:
            raise ValueError(
                f"{source}: block_size is given {len(sizes)} different times: {sorted(sizes)}"
            )
        if lacking := {"mask_token_id", "target_layer_ids"} - set(inner):
            raise ValueError(f"{source}: dflash_config lacks {', '.join(sorted(lacking))}")
        if inner.get("use_swa"):
            raise ValueError(f"{source}: dflash_config.use_swa is not implemented")
        causal = found.get("is_causal")
        causal = inner.get("causal", False) if causal is None else causal
        ids, numbers = inner["target_layer_ids"], [inner["mask_token_id"], *sizes]
        if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids + numbers):
            raise ValueError(f"{source}: target_layer_ids {ids} must be a list of integers, "
                             f"mask_token_id and block_size {numbers} integers")  # fmt: skip
        return cls(
            ModelConfig.from_dict(found, source), sizes.pop(), inner["mask_token_id"], tuple(ids),
            found.get("num_target_layers"), causal,
        )  # fmt: skip

    def to_dict(self) -> dict:
        """config.json in the dialect that engines load."""
        names = {"architectures": ["DFlashDraftModel"]}
        inner = {
            "mask_token_id": self.mask_token_id,
            "target_layer_ids": list(self.target_layer_ids),
        }
        return names | self.layers.to_dict() | {
            "block_size": self.block_size,
            "num_target_layers": self.num_target_layers,
            "layer_types": ["full_attention"] * self.layers.num_hidden_layers,
            "sliding_window": None,
            "is_causal": self.is_causal,
            "dflash_config": inner,
        }  # fmt: skip


# ------------------------------------------------------------------------------------------ drafter


@dataclass
class Memory:
    """The drafter's keys and values of the context, per layer (B,S,2,H_kv,D), by position."""

    states: list[Tensor]
    width: int

    def select(self, rows: Tensor) -> "Memory":
        return Memory([state[rows] for state in self.states], self.width)


@dataclass
class Proposal:
    """K branches of W tokens at each anchor, and what they were drawn from."""

    tokens: Tensor  # (B, A, K, W)
    # (B, A, 1, W, C), with gradient if there was one; DFlash's q is the same for all K
    hidden: Tensor
    sampling: Sampling
    drafter: "Drafter"
    drawn_from: Tensor | None = None  # (B, A, 1, W, V), kept if the caller divides by it

    def probs(self) -> Tensor:
        """q (B,A,K,W,V), float32, with gradient through `hidden`: for tests and small
        vocabularies."""
        q = self.sampling.probs(self.drafter.logits(self.hidden))
        return q.expand(*self.tokens.shape, -1)


class Drafter(nn.Module):
    """DFlash. Parameters are the drafter's own; the target is held, not owned."""

    def __init__(self, config: DrafterConfig, target: Target):
        super().__init__()
        config.check(target)
        self.config = config
        self._held = (target,)  # in a tuple, so that its parameters are not ours
        C = config.layers.hidden_size
        self.fc = nn.Linear(len(config.target_layer_ids) * C, C, bias=False)
        self.hidden_norm = RMSNorm(C, config.layers.rms_norm_eps)
        self.layers = nn.ModuleList(
            DecoderLayer(config.layers) for _ in range(config.layers.num_hidden_layers)
        )
        self.norm = RMSNorm(C, config.layers.rms_norm_eps)
        target.tap_ids = config.target_layer_ids

    @property
    def target(self) -> Target:
        return self._held[0]

    def _rope(self, positions: Tensor):
        return rotary(positions, self.config.layers.head_dim, self.config.layers.rope_theta)

    # -- the context

    def _context(self, taps: Tensor, positions: Tensor) -> list[Tensor]:
        """taps (B,P,taps*C) at positions (B,P) -> each layer's keys and values of the features,
        which go in as they are, without the layer's input norm."""
        features = self.hidden_norm(self.fc(taps.to(self.fc.weight.dtype)))  # (B, P, C)
        rope = self._rope(positions)
        return [layer.self_attn.keys_values(features, rope) for layer in self.layers]

    def remember(self, trunk: Trunk, room: int = 0) -> Memory:
        """The context's keys and values of a whole trunk; `room` for decoding to add more."""
        if trunk.tap_ids != self.config.target_layer_ids:
            raise ValueError(
                f"the trunk was tapped at layers {trunk.tap_ids}, "
                f"the drafter reads {self.config.target_layer_ids}"
            )
        if trunk.taps is None:
            raise ValueError("this trunk keeps no taps: remember it before they are dropped")
        T = trunk.taps.shape[1]
        states = self._context(trunk.taps, torch.arange(T, device=trunk.taps.device)[None])
        states = [with_room(state, T + room) for state in states]
        return Memory(states, T)

    def extend(self, memory: Memory, taps: Tensor, lengths: Tensor) -> Memory:
        """Remember P more tokens of each row, taps (B,P,·), at positions lengths (B,) onwards, in
        place. Entries beyond what gets committed are leftovers that no anchor looks at."""
        slots = lengths[:, None] + torch.arange(taps.shape[1], device=taps.device)
        for cache, new in zip(memory.states, self._context(taps, slots)):
            place(cache, new, slots)
        return Memory(memory.states, memory.width + taps.shape[1])

    # -- the block

    def block(self, trunk: Trunk, anchors: Tensor, memory: Memory | None = None) -> Tensor:
        """Final hidden (B,A,W,C) of the blocks at anchors (B,A), all in one pass. The trunk gives
        the anchors' tokens and, without a memory, the context."""
        B, A = anchors.shape
        b = self.config.block_size
        if memory is None:
            memory = self.remember(trunk)
        first = trunk.tokens.gather(1, anchors.clamp(min=0))[..., None]  # (B, A, 1)
        masks = first.new_full((B, A, b - 1), self.config.mask_token_id)
        tokens = torch.cat([first, masks], -1).view(B, A * b)
        view = block_view(anchors, b, memory.width)
        x = self.target.model.embed_tokens(tokens).to(self.fc.weight.dtype)  # (B, A*b, C)
        rope = self._rope(view.positions)
        for layer, past in zip(self.layers, memory.states):
            x = layer(x, rope, view, {"kv": past})[0]
        return self.norm(x).view(B, A, b, -1)[:, :, 1:]  # slot j >= 1 predicts position a + j

    def proposable(self, ids: Tensor) -> Tensor:
        """Which ids q may hold: not MASK, not a row beyond the tokenizer. (p is never masked.)"""
        return (ids != self.config.mask_token_id) & (ids < self.target.num_tokens)

    def logits(self, hidden: Tensor) -> Tensor:
        """(…, C) -> (…, V) by the target's head; -inf where an id is not proposable."""
        logits = self.target.head(hidden.to(self.target.lm_head.weight.dtype))
        ids = torch.arange(logits.shape[-1], device=logits.device)
        return logits.masked_fill(~self.proposable(ids), -torch.inf)

    def propose(
        self,
        trunk: Trunk,
        anchors: Tensor,
        num_branches: int = 1,
        sampling: Sampling = Sampling(),
        generator: torch.Generator | Tensor | None = None,
        memory: Memory | None = None,
        keep_probs: bool = False,
        num_greedy: int = 0,
    ) -> Proposal:
        """K branches at each anchor (B,A), -1 = absent; the first num_greedy of them are q's argmax
        instead of draws. `generator` may be the uniforms (B,A,K,W)."""
        hidden = self.block(trunk, anchors, memory)  # (B, A, W, C)
        shape = (*anchors.shape, num_branches, self.config.num_draft_tokens)
        rows = hidden.detach().flatten(0, 1)  # (B*A, W, C)
        greedy = sampling.temperature == 0 and not keep_probs  # nothing to draw
        if not greedy:
            uniforms = generator
            if not isinstance(uniforms, Tensor):
                device = "cpu" if generator is None else generator.device
                uniforms = torch.rand(shape, generator=generator, device=device)
            uniforms = uniforms.to(hidden.device).transpose(2, 3).flatten(0, 1)  # (B*A, W, K)
        size = max(1, DRAW_ELEMENTS // (shape[-1] * self.config.layers.vocab_size))
        drawn, kept = [], []
        with torch.no_grad():
            for start in range(0, len(rows), size):  # vocabulary-sized work in chunks
                logits = self.logits(rows[start : start + size])
                if greedy:
                    drawn.append(logits.argmax(-1, keepdim=True).expand(-1, -1, num_branches))
                    continue
                kept.append(sampling.probs(logits))
                drawn.append(draw(kept[-1], uniforms[start : start + size]))
                if num_greedy:
                    drawn[-1][..., :num_greedy] = logits.argmax(-1, keepdim=True)
                if not keep_probs:
                    kept.clear()
        tokens = torch.cat(drawn).transpose(1, 2).reshape(shape)
        q = torch.cat(kept).view(*shape[:2], 1, shape[3], -1) if keep_probs else None
        return Proposal(tokens, hidden[:, :, None], sampling, self, q)

    # -- making, loading, saving

    @classmethod
    def fresh(
        cls, target: Target, num_layers: int = 2, block_size: int = 8, mask_token_id=None, seed=0
    ):
        """An untrained drafter of the target's width. MASK: the first row beyond the tokenizer."""
        if mask_token_id is None:
            mask_token_id = target.num_tokens
            if mask_token_id >= target.config.vocab_size:
                raise ValueError("the embedding has no spare row for MASK: give --mask-token-id")
        # full rotary even where the target's is partial, dense layers whatever the target's are
        layers = replace(
            target.config, model_type="qwen3", tie_word_embeddings=False, partial_rotary_factor=1.0,
            num_hidden_layers=num_layers, layer_types=(), ple_layer_ids=(), intermediate_size=(
                3 * target.config.hidden_size if target.config.streams
                else target.config.intermediate_size),
        )  # fmt: skip
        config = DrafterConfig(
            layers,
            block_size,
            mask_token_id,
            tuple(target.tap_ids),
            target.config.num_hidden_layers,
        )
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return cls(config, target).apply(init_weights)

    @classmethod
    def from_pretrained(cls, folder, target: Target, dtype=None) -> "Drafter":
        """A published drafter folder, on the target's device; sets the target's taps to the
        drafter's. dtype None keeps the file's (bfloat16 as published); training wants float32."""
        folder = Path(folder)
        source = folder / "config.json"
        config = DrafterConfig.from_dict(read_json(source), str(source))
        with torch.device("meta"):
            drafter = cls(config, target)
        device = target.lm_head.weight.device
        load_weights(drafter, folder, device, dtype, flat)
        return drafter

    def save_pretrained(self, folder, dtype=torch.bfloat16) -> None:
        """config.json and model.safetensors, flat names, bfloat16: what engines load."""
        folder = Path(folder)
        save_tensors(
            folder / "model.safetensors", {k: v.to(dtype) for k, v in self.state_dict().items()}
        )
        write_json(folder / "config.json", self.config.to_dict() | {"dtype": str(dtype)[6:]})


def main():
    target = Target.toy(num_hidden_layers=4, hidden_size=32, intermediate_size=64)
    target.num_tokens = 258
    drafter = Drafter.fresh(target, block_size=4)
    own = sum(p.numel() for p in drafter.parameters())
    print(f"taps {drafter.config.target_layer_ids} of 4 layers; {own} parameters of its own")
    tokens = torch.arange(65, 75)[None]
    trunk = target.prefill(tokens, torch.tensor([10]))
    anchors = torch.tensor([[3, 6]])
    print("context x_0..x_9, blocks of 4 at anchors 3 and 6: [x_a, MASK, MASK, MASK]\n")
    mask = block_view(anchors, 4, 10).mask[0, 0].int()
    print(" block slot position  sees: context    | block@3 block@6")
    for n, row in enumerate(mask):
        cells = ["".join("·■"[v] for v in part) for part in (row[:10], row[10:14], row[14:])]
        position = 3 + 3 * (n // 4) + n % 4
        seen = f"{cells[0]} | {cells[1]}    {cells[2]}"
        print(f"{n // 4:6d} {n % 4:4d} {position:8d}        {seen}")
    generator = torch.Generator().manual_seed(0)
    proposal = drafter.propose(trunk, anchors, 2, Sampling(1.0), generator)
    q = proposal.probs()
    print("\ntwo branches each, drawn from one q per slot (untrained: near uniform):")
    for a, anchor in enumerate(anchors[0].tolist()):
        for k in range(2):
            ids = proposal.tokens[0, a, k]
            chance = q[0, a, k].gather(-1, ids[:, None])[:, 0]
            shown = [round(c, 4) for c in chance.tolist()]
            print(f"  anchor {anchor}: y = {ids.tolist()}, q(y) = {shown}")


if __name__ == "__main__":
    with torch.no_grad():
        main()
