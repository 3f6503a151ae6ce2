"""The proposer: a few decoder layers that fill a whole block of tokens in one pass.

1. The target's hidden states at a few tapped layers are fused into context features,
   hidden_norm(fc(taps)).
2. Each drafter layer is an ordinary decoder layer whose PAST is made from these features: its own
   k/v projections applied to them, at their true positions. No token of the context is run again.
3. The block is [x_a, MASK, ..., MASK]; its tokens see the context strictly before a, and one
   another (both ways, if not causal). In DFlash slot j >= 1 predicts the token at its own position
   a + j, in DSpark slot j >= 0 the one after it, all slots at once.
4. Embedding and head are the target's, frozen.
5. DFlash draws each slot for itself; DSpark and DFlash 2 walk the slots from left to right, each
   knowing the token before it (heads.py). That costs W tiny steps, no pass of the backbone.

`propose` returns the tokens and the very distribution they were drawn from (paper: p is the
target's, q the drafter's); `logits` is q on any given history, for the loss. The same functions
serve training (all anchors of a reference at once, with gradient) and decoding (one anchor per row,
features kept in a `Memory`).

    python drafter.py            a block proposed at two anchors, and its visibility
    pytest tests/test_drafter.py tests/test_drafter_folders.py
"""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from heads import CandidateSelector, ConfidenceHead, ConvolvedLayer, MarkovHead
from hf.drafters import DrafterConfig
from hf.tensors import checkpoint_folder, flat, load_weights, save_tensors, tensor_files
from model import DecoderLayer, RMSNorm, init_weights, rotary
from sampling import Sampling, draw
from support.files import read_json, write_json
from target import Target, Trunk
from tree import block_view, gather_slots, with_room, write_slots

DRAW_ELEMENTS = 2**24  # probabilities held at once while drawing
ANCHORS = 32  # whose blocks run together
PLAIN = Sampling()


@dataclass
class Memory:
    """The drafter's keys and values of the context, per layer (B,S,2,H_kv,D): by position, or of a
    sliding layer in serving a ring, slot = position mod S."""

    states: list[Tensor]
    width: int
    rings: tuple[bool, ...] = ()

    def select(self, rows: Tensor) -> "Memory":
        return replace(self, states=[state[rows] for state in self.states])

    def held(self, layer: int, lengths: Tensor) -> Tensor | None:
        """The positions (B,S) that a ring's slots hold once lengths (B,) tokens are remembered,
        below 0 where there is none; None: the slots are the positions."""
        if not (self.rings and self.rings[layer]):
            return None
        S, last = self.states[layer].shape[1], lengths[:, None] - 1
        return last - (last - torch.arange(S, device=lengths.device)) % S


@dataclass
class Proposal:
    """K branches of W tokens at each anchor, and what they were drawn from."""

    tokens: Tensor  # (B, A, K, W)
    hidden: Tensor  # (B, A, 1, W, C), with gradient if there was one
    first: Tensor  # (B, A) the anchors' tokens
    sampling: Sampling
    drafter: "Drafter"
    # (B, A, K or 1, W, V), kept if the caller divides by it
    q_probs: Tensor | None = None

    @property
    def before(self) -> Tensor:
        """(B, A, K, W) the token before each."""
        return history(self.first, self.tokens)

    def probs(self) -> Tensor:
        """q (B,A,K,W,V), float32, with gradient through `hidden`: for tests and small
        vocabularies."""
        q = self.sampling.probs(self.drafter.logits(self.hidden, self.before))
        return q.expand(*self.tokens.shape, -1)


def history(first: Tensor, tokens: Tensor) -> Tensor:
    """first (B,A), tokens (B,A,K,W) -> the token before each (B,A,K,W): x_a, y_1, ..., y_{W-1}."""
    first = first[..., None, None].expand(*tokens.shape[:-1], 1)
    return torch.cat([first, tokens[..., :-1]], -1)


class Drafter(nn.Module):
    """DFlash, and what all drafters have in common. Parameters are the drafter's own; the target is
    held, not owned."""

    def __init__(self, config: DrafterConfig, target: Target):
        super().__init__()
        config.check(target)
        self.config = config
        self._held = (target,)  # in a tuple, so that its parameters are not ours
        C, V = config.layers.hidden_size, config.layers.vocab_size
        self.fc = nn.Linear(len(config.target_layer_ids) * C, C, bias=False)
        self.hidden_norm = RMSNorm(C, config.layers.rms_norm_eps)
        self.layers = nn.ModuleList(
            self.new_layer() for _ in range(config.layers.num_hidden_layers)
        )
        self.norm = RMSNorm(C, config.layers.rms_norm_eps)
        if config.own_vocabulary:
            self.embed_tokens, self.lm_head = nn.Embedding(V, C), nn.Linear(C, V, bias=False)
            self.embed_tokens.requires_grad_(False)
            self.lm_head.requires_grad_(False)
        target.tap_ids = config.target_layer_ids

    def new_layer(self) -> DecoderLayer:
        return DecoderLayer(self.config.layers)

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

    def remember(self, trunk: Trunk, room: int = 0, bounded: bool = False) -> Memory:
        """The context's keys and values of a whole trunk; `room` for decoding to add more. bounded:
        a sliding layer keeps its window alone, and then blocks stand at the trunk's end."""
        if trunk.tap_ids != self.config.target_layer_ids:
            raise ValueError(
                f"the trunk was tapped at layers {trunk.tap_ids}, "
                f"the drafter reads {self.config.target_layer_ids}"
            )
        if trunk.taps is None:
            raise ValueError("this trunk keeps no taps: remember it before they are dropped")
        T = trunk.taps.shape[1]
        states = self._context(trunk.taps, torch.arange(T, device=trunk.taps.device)[None])
        memory = Memory(states, T, (False,) * len(states))
        for layer, state in enumerate(states):
            # what a round writes behind the text must not reach what a window may see
            size = self.config.window(layer) + self.config.num_draft_tokens + 1
            if bounded and self.config.window(layer) and size < T + room:
                memory.rings = (*memory.rings[:layer], True, *memory.rings[layer + 1 :])
                states[layer] = with_room(state, size)[:, :size]  # for its shape
                positions = memory.held(layer, trunk.lengths)
                states[layer] = gather_slots(state, positions.clamp(0, T - 1))
            else:
                states[layer] = with_room(state, T + room)
        return memory

    def extend(self, memory: Memory, taps: Tensor, lengths: Tensor) -> Memory:
        """Remember P more tokens of each row, taps (B,P,·), at positions lengths (B,) onwards, in
        place. Entries beyond what gets committed are leftovers that no anchor looks at."""
        slots = lengths[:, None] + torch.arange(taps.shape[1], device=taps.device)
        rings = memory.rings or (False,) * len(memory.states)
        for ring, cache, new in zip(rings, memory.states, self._context(taps, slots)):
            write_slots(cache, new, slots % cache.shape[1] if ring else slots)
        return replace(memory, width=memory.width + taps.shape[1])

    # -- the block

    def block(self, trunk: Trunk, anchors: Tensor, memory: Memory | None = None) -> Tensor:
        """Final hidden (B,A,W,C) of the blocks at anchors (B,A). The trunk gives the anchors'
        tokens and, without a memory, the context. Many anchors in parts: a block's keys are columns
        of every other's mask."""
        if memory is None:
            memory = self.remember(trunk)
        if anchors.shape[1] > ANCHORS:
            parts = [self.block(trunk, part, memory) for part in anchors.split(ANCHORS, 1)]
            return torch.cat(parts, 1)
        config, (B, A), b = self.config, anchors.shape, self.config.block_size
        first = trunk.tokens.gather(1, anchors.clamp(min=0))[..., None]  # (B, A, 1)
        masks = first.new_full((B, A, b - 1), config.mask_token_id)
        tokens = torch.cat([first, masks], -1).view(B, A * b)
        embed = self.embed_tokens if config.own_vocabulary else self.target.model.embed_tokens
        x = embed(tokens).to(self.fc.weight.dtype) * config.input_embedding_scale  # (B, A*b, C)
        views = {}  # layers that see alike share one
        for number, (layer, past) in enumerate(zip(self.layers, memory.states)):
            window, causal = config.window(number), config.causal(number)
            held = memory.held(number, anchors[:, 0])
            kind = (window, causal, held is None)
            if kind not in views:
                slots = memory.width if held is None else past.shape[1]
                view = block_view(anchors, b, slots, window, causal, held)
                views[kind] = view, self._rope(view.positions)
            view, rope = views[kind]
            x = layer(x, rope, view, {"kv": past})[0]
        return self.norm(x).view(B, A, b, -1)[:, :, b - config.num_draft_tokens :].contiguous()

    def proposable(self, ids: Tensor) -> Tensor:
        """Which ids q may hold: not MASK, not a row beyond the tokenizer. (p is never masked.)"""
        return (ids != self.config.mask_token_id) & (ids < self.target.num_tokens)

    def unary(self, hidden: Tensor) -> Tensor:
        """(…, C) -> (…, V) by the head; -inf where an id is not proposable."""
        head = self.lm_head if self.config.own_vocabulary else self.target.lm_head
        logits = head(hidden.to(head.weight.dtype))
        ids = torch.arange(logits.shape[-1], device=logits.device)
        return logits.masked_fill(~self.proposable(ids), -torch.inf)

    # -- what is proposed

    def step(self, unary: Tensor, hidden: Tensor, before: Tensor, state=None, labels=None):
        """Logits of some slots given the tokens before them: unary (…,1,W,V), hidden (…,1,W,C),
        before (…,K,W) -> (…,1 or K,W,V), and a state for the slots behind. Labels (…,K,W): ids that
        must be among them."""
        return unary, None

    def logits(self, hidden: Tensor, before: Tensor | None = None, labels=None) -> Tensor:
        """q's logits on a given history; see `step`."""
        return self.step(self.unary(hidden), hidden, before, None, labels)[0]

    has_confidence = False

    def confidence(self, hidden: Tensor, before: Tensor, detached: bool = False) -> Tensor:
        """How likely each draft is accepted, given those before it: logits (…,K,W). detached:
        without a gradient beyond the confidence head."""
        raise ValueError(f"a {self.config.kind} drafter without a confidence head")

    def walk(self, hidden, first, uniforms, sampling: Sampling, num_branches, num_greedy):
        """Tokens (R,K,W) of R blocks, and what they were drawn from (R,1,W,V): hidden (R,W,C),
        first (R,), uniforms (R,K,W), None for the argmax. DFlash's slots know nothing of one
        another, so they and all branches are drawn at once."""
        logits = self.unary(hidden)  # (R, W, V)
        best = logits.argmax(-1)[:, None].expand(-1, num_branches, -1)
        if uniforms is None:
            return best, None
        q = sampling.probs(logits)
        tokens = draw(q, uniforms.transpose(1, 2)).transpose(1, 2)  # (R, K, W)
        return torch.cat([best[:, :num_greedy], tokens[:, num_greedy:]], 1), q[:, None]

    def propose(
        self,
        trunk: Trunk,
        anchors: Tensor,
        num_branches: int = 1,
        sampling: Sampling = PLAIN,
        generator: torch.Generator | Tensor | None = None,
        memory: Memory | None = None,
        keep_probs: bool = False,
        num_greedy: int = 0,
    ) -> Proposal:
        """K branches at each anchor (B,A), -1 = absent; the first num_greedy of them are q's argmax
        instead of draws. `generator` may be the uniforms (B,A,K,W)."""
        hidden = self.block(trunk, anchors, memory)  # (B, A, W, C)
        shape = (*anchors.shape, num_branches, self.config.num_draft_tokens)
        first = trunk.tokens.gather(1, anchors.clamp(min=0))  # (B, A)
        uniforms = None
        if sampling.temperature > 0 or keep_probs:  # else there is nothing to draw
            uniforms = generator
            if not isinstance(uniforms, Tensor):
                device = "cpu" if generator is None else generator.device
                uniforms = torch.rand(shape, generator=generator, device=device)
            uniforms = uniforms.to(hidden.device).flatten(0, 1)  # (B*A, K, W)
        rows, starts = hidden.detach().flatten(0, 1), first.flatten()
        size = max(1, DRAW_ELEMENTS // (num_branches * shape[-1] * self.config.layers.vocab_size))
        drawn, kept = [], []
        with torch.no_grad():
            for start in range(0, len(rows), size):  # vocabulary-sized work in chunks
                part = slice(start, start + size)
                u = None if uniforms is None else uniforms[part]
                found = self.walk(rows[part], starts[part], u, sampling, num_branches, num_greedy)
                drawn.append(found[0])
                kept += [found[1]] if keep_probs else []
        q = torch.cat(kept).unflatten(0, anchors.shape) if keep_probs else None
        tokens = torch.cat(drawn).view(shape)
        return Proposal(tokens, hidden[:, :, None], first, sampling, self, q)

    # -- making, loading, saving

    @classmethod
    def fresh(
        cls,
        target: Target,
        num_layers: int = 2,
        block_size: int = 8,
        mask_token_id=None,
        seed=0,
        architecture: str = "DFlashDraftModel",
        **fields,
    ):
        """An untrained drafter of the target's width; `fields` of its config. Its backbone is the
        same for every kind; DFlash 2 proposes what DFlash does, of its top k. MASK: the first row
        beyond the tokenizer."""
        if mask_token_id is None:
            mask_token_id = target.num_tokens
            if mask_token_id >= target.config.vocab_size:
                raise ValueError("the embedding has no spare row for MASK: give --mask-token-id")
        # full rotary even where the target's is partial, dense layers whatever the target's are
        layers = replace(
            target.config,
            model_type="qwen3",
            tie_word_embeddings=False,
            partial_rotary_factor=1.0,
            num_hidden_layers=num_layers,
            layer_types=(),
            ple_layer_ids=(),
            intermediate_size=(
                3 * target.config.hidden_size
                if target.config.streams
                else target.config.intermediate_size
            ),
        )
        config = DrafterConfig(
            layers,
            block_size,
            mask_token_id,
            tuple(target.tap_ids),
            target.config.num_hidden_layers,
            architecture=architecture,
            **fields,
        )
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            plain = Drafter(config.without_heads(), target).apply(init_weights)
            drafter = drafter_class(config)(config, target)
        drafter.load_state_dict(plain.state_dict(), strict=False)
        return drafter

    @classmethod
    def from_pretrained(cls, folder, target: Target, dtype=None) -> "Drafter":
        """A published drafter folder (or hub's name) of any kind, on the target's device; sets the
        target's taps to the drafter's. dtype None keeps the file's (bfloat16 as published);
        training wants float32."""
        folder = checkpoint_folder(str(folder))
        source = folder / "config.json"
        config = DrafterConfig.from_dict(read_json(source), str(source))
        config = config.beside(tensor_files(folder))
        with torch.device("meta"):
            drafter = drafter_class(config)(config, target)
        load_weights(drafter, folder, target.lm_head.weight.device, dtype, flat)
        return drafter

    def save_pretrained(self, folder, dtype=torch.bfloat16) -> None:
        """config.json and model.safetensors, flat names, bfloat16: what engines load."""
        folder, tensors = Path(folder), {k: v.to(dtype) for k, v in self.state_dict().items()}
        save_tensors(folder / "model.safetensors", tensors)
        write_json(folder / "config.json", self.config.to_dict() | {"dtype": str(dtype)[6:]})


class AutoregressiveDrafter(Drafter):
    """A drafter whose slots know the token before them."""

    def walk(self, hidden, first, uniforms, sampling: Sampling, num_branches, num_greedy):
        """As DFlash's, from left to right: q (R,K,W,V) is each branch's own."""
        before, state = first[:, None, None].expand(-1, num_branches, 1), None
        unary, hidden = self.unary(hidden)[:, None], hidden[:, None]  # (R, 1, W, ·)
        tokens, kept = [], []
        for k in range(hidden.shape[2]):
            slot = slice(k, k + 1)
            logits, state = self.step(unary[:, :, slot], hidden[:, :, slot], before, state)
            best = logits.argmax(-1).expand_as(before)  # (R, K, 1)
            if uniforms is not None:
                kept.append(sampling.probs(logits).expand(*before.shape, -1))  # (R, K, 1, V)
                drawn = draw(kept[-1], uniforms[:, :, k : k + 1, None])[..., 0]
                best = torch.cat([best[:, :num_greedy], drawn[:, num_greedy:]], 1)
            tokens.append(best)
            before = best
        return torch.cat(tokens, -1), torch.cat(kept, -2) if kept else None


class DSpark(AutoregressiveDrafter):
    """DFlash's backbone one slot on, a Markov head behind it, and a confidence head."""

    def __init__(self, config: DrafterConfig, target: Target):
        super().__init__(config, target)
        self.markov_head = MarkovHead(config) if config.markov_rank else None
        self.confidence_head = ConfidenceHead(config) if config.enable_confidence_head else None

    def step(self, unary, hidden, before, state=None, labels=None):
        if self.markov_head is None:
            return unary, None
        added, state = self.markov_head(hidden, before, state)
        return unary.float() + added.float(), state

    @property
    def has_confidence(self) -> bool:
        return self.confidence_head is not None

    def confidence(self, hidden, before, detached=False):
        if not self.has_confidence:
            return super().confidence(hidden, before)
        e = self.markov_head.markov_w1(before) if self.markov_head else None
        if detached:
            hidden, e = hidden.detach(), None if e is None else e.detach()
        return self.confidence_head(hidden, e).expand(before.shape)


class DFlash2(AutoregressiveDrafter):
    """DFlash with convolutions along the block, and a selector over each slot's best tokens."""

    def __init__(self, config: DrafterConfig, target: Target):
        super().__init__(config, target)
        self.candidate_selector = CandidateSelector(config)

    def new_layer(self) -> DecoderLayer:
        return ConvolvedLayer(self.config.layers, self.config)

    def finished(self, unary: Tensor) -> Tensor:
        """Unary logits as they count, once the candidates are chosen."""
        cap, scaled = self.config.final_logit_softcapping, unary.float()
        scaled = scaled * self.config.output_multiplier
        scaled = cap * (scaled / cap).tanh() if cap else scaled
        return scaled.masked_fill(unary.isneginf(), -torch.inf)  # not to be proposed, still

    def step(self, unary, hidden, before, state=None, labels=None):
        """A label that is no candidate takes the last one's place (in training only)."""
        ids = unary.detach().topk(self.config.selector_top_k, -1).indices
        ids = ids.expand(*before.shape, -1)  # (…, K, W, k)
        if labels is not None:
            there = (ids == labels[..., None]).any(-1)
            last = torch.where(there, ids[..., -1], labels)
            ids = torch.cat([ids[..., :-1], last[..., None]], -1)
        unary, shape = unary.expand(*before.shape, -1), (*before.shape, unary.shape[-1])
        scores = self.finished(unary.gather(-1, ids))  # (…, K, W, k)
        scores = scores + self.candidate_selector(hidden, before, ids).float()
        return scores.new_full(shape, -torch.inf).scatter(-1, ids, scores), None

    @torch.no_grad()
    def coverage(self, hidden, labels, valid) -> Tensor:
        """The share of labels (…,W) that are among their slot's candidates."""
        ids = self.unary(hidden).topk(self.config.selector_top_k, -1).indices
        there = (ids == labels[..., None]).any(-1) & valid
        return there.sum() / valid.sum().clamp(min=1)


def drafter_class(config: DrafterConfig) -> type:
    return {"dflash": Drafter, "dspark": DSpark, "dflash2": DFlash2}[config.kind]


def main():
    target = Target.toy(num_hidden_layers=4, hidden_size=32, intermediate_size=64)
    target.num_tokens = 258
    drafter = Drafter.fresh(target, block_size=4)
    print(f"taps {drafter.config.target_layer_ids} of 4 layers")
    trunk = target.prefill(torch.arange(65, 75)[None], torch.tensor([10]))
    anchors = torch.tensor([[3, 6]])
    print("context x_0..x_9, blocks of 4 at anchors 3 and 6: [x_a, MASK, MASK, MASK]\n")
    mask = block_view(anchors, 4, 10).mask[0, 0].int()
    print(" block slot position  sees: context    | block@3 block@6")
    for n, row in enumerate(mask):
        cells = ["".join("·■"[v] for v in part) for part in (row[:10], row[10:14], row[14:])]
        position = 3 + 3 * (n // 4) + n % 4
        seen = f"{cells[0]} | {cells[1]}    {cells[2]}"
        print(f"{n // 4:6d} {n % 4:4d} {position:8d}        {seen}")
    proposal = drafter.propose(trunk, anchors, 2, PLAIN, torch.Generator().manual_seed(0))
    print("\ntwo branches each, drawn from one q per slot (untrained: near uniform):")
    for a, anchor in enumerate(anchors[0].tolist()):
        for k in range(2):
            ids = proposal.tokens[0, a, k]
            chance = proposal.probs()[0, a, k].gather(-1, ids[:, None])[:, 0]
            shown = [round(c, 4) for c in chance.tolist()]
            print(f"  anchor {anchor}: y = {ids.tolist()}, q(y) = {shown}")


if __name__ == "__main__":
    with torch.no_grad():
        main()
