"""The target: a frozen model that runs a trunk once and then scores whole trees of drafts on it.

    trunk  = target.prefill(tokens, lengths)            run the trunk, keep what its layers remember
    scored = target.score(trunk, tree)                  one pass over all nodes of a proposal tree
    logits = target.head(scored.hidden)                 p_1..p_{W+1} of every branch, where wanted
    trunk  = target.commit(trunk, tree, scored, path)   decoding: the accepted path joins the trunk

Scoring writes only into cache slots after the trunk, so a rejected draft leaves no trace. Caches
are indexed by position, and a history sees no slot after its own length: what lies there is never
read and is overwritten later. So the rows of one batch may accept different numbers of drafts.

    python target.py            a trunk, a tree, and the proof that packed = alone
    pytest tests/test_target.py
"""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

import replay
from hf.config import FAMILIES
from hf.files import model_folder, read_json
from hf.tensors import has_other_head, in_shards, layout, load_weights, stored_dtype
from model import Decoder, ModelConfig, init_weights, tree_view
from support.files import write_json, write_tensors
from tree import (
    ProposalTree,
    build_tree,
    causal_view,
    first_slots,
    gather_slots,
    with_room,
    write_path,
)

TWO_TENSORS = "tie_word_embeddings is true, but lm_head differs from the embedding: both are used"
PREFILL_TOKENS = 1024  # run at once: memory then grows with a text's length, not its square
PREFILL_TOKENS_ON_GPU = 4096  # which needs more to be busy, and whose attention keeps no scores

TOY_WIDTHS = dict(
    vocab_size=264,
    hidden_size=128,
    intermediate_size=384,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=2048,
)
TOY_HYBRID = dict(  # three linear layers to one of attention
    num_hidden_layers=8,
    layer_types=(*("linear_attention",) * 3, "full_attention") * 2,
    partial_rotary_factor=0.5,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=32,
    linear_value_head_dim=32,
)
TOY_SPARSE = dict(
    output_gate_type="sigmoid",
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=128,
    shared_expert_intermediate_size=128,
    indexer_head_dim=32,
    indexer_budget=64,
    hc_count=2,
    hc_lowrank=32,
    ple_layer_ids=(2,),
    ple_embed_dim=128,
    heads_per_ngram=4,
    ngram_vocab_size_base=2000,
    make_ngram_vocab_size_divisible_by=8,
    split_ngram_parts=2,
    eos_token_id=256,
)
# Toys are deep and narrow: each layer adds time to a decoding step, and drafting saves such steps.
TOYS = {
    "gqa": ModelConfig(num_hidden_layers=7, **TOY_WIDTHS),
    "gdn": ModelConfig("qwen3_5_text", **TOY_WIDTHS, **TOY_HYBRID),
    "qsa": ModelConfig("qwen4_exp_text", **TOY_WIDTHS, **TOY_HYBRID, **TOY_SPARSE),
}


@dataclass
class Trunk:
    """What the target keeps of B committed texts. Slots after a row's length are never read."""

    tokens: Tensor  # (B, S) ids; S >= width leaves room to commit
    lengths: Tensor  # (B,) tokens that the target has run
    states: list[dict]  # per layer, what it remembers: tensors (B, S, ...), see model.py
    tap_ids: tuple[int, ...]
    width: int  # no row is longer; a number known on the host
    hidden: Tensor | None = None  # (B, S, C) final hidden; None once decoding has no use for it
    taps: Tensor | None = None  # (B, S, len(tap_ids) * C), likewise
    checkpoint_every: int = 0  # tokens between recurrent states kept; 0: only the last state

    def select(self, rows: Tensor, width: int | None = None) -> "Trunk":
        """The trunk of these rows only. `width`: none of them is longer."""

        def rows_of(tensors: dict, positional) -> dict:
            present = [(name, tensor) for name, tensor in tensors.items() if tensor is not None]
            return {n: t[rows, :width] if n in positional else t[rows] for n, t in present}

        states = [rows_of(state, replay.positional_names(state)) for state in self.states]
        by_slot = dict(tokens=self.tokens, hidden=self.hidden, taps=self.taps)
        chosen = rows_of(by_slot, by_slot) | dict(lengths=self.lengths[rows], states=states)
        return replace(self, width=width or self.width, **chosen)

    def cut(self, lengths: Tensor) -> "Trunk":
        """The first `lengths` (B,) tokens of each row. Where layers are linear, their states are
        replayed, which needs checkpoints (checkpoint_every above 0). Storage is shared, and hidden
        and taps keep their slots."""
        if any("tail_start" in state for state in self.states):
            raise ValueError("this trunk keeps recurrent state only at its end, it cannot be cut")
        states = [
            state | replay.cut_checkpoints(state, lengths - 1) if "states" in state else state
            for state in self.states
        ]
        return replace(self, lengths=lengths, states=states, width=int(lengths.max()))

    def for_drafter(self) -> "Trunk":
        """Only tokens, lengths and taps: all that a drafter reads."""
        return replace(self, states=[], hidden=None)

    @property
    def nbytes(self) -> int:
        remembered = (tensor for state in self.states for tensor in state.values())
        tensors = (self.tokens, self.hidden, self.taps, *remembered)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


@dataclass
class Scored:
    """What one pass over a tree gives."""

    # (B, A, K, W+1, C) p_k = head(hidden at p_index[k-1]); without meaning where p_index is -1
    hidden: Tensor
    node_hidden: Tensor  # (B, N, C) final hidden of the nodes
    taps: Tensor | None  # (B, N, len(tap_ids) * C) of the nodes
    states: list[dict]  # what each layer remembers of the nodes, (B, N, ...); empty: not kept
    real: Tensor | None = None  # the nodes that were computed, see `tree.real_rows`; None: all


class Target(nn.Module):
    """A decoder with its head. It is frozen once it is made or loaded."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.tap_ids = default_taps(config.num_hidden_layers)
        self.num_tokens = config.vocab_size  # ids of the tokenizer; rows beyond are not drafted

    def head(self, hidden: Tensor) -> Tensor:
        """(…, C) -> logits (…, V)."""
        # flat rows: a slice that is not contiguous would be multiplied block by block, slowly
        rows = hidden.reshape(-1, hidden.shape[-1])
        return self.lm_head(rows).view(*hidden.shape[:-1], self.config.vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens (B,T) -> logits (B,T,V), without cache or taps: every other path must match it."""
        return self.head(self.model(tokens, causal_view(*tokens.shape, tokens.device))[0])

    # -- the trunk

    @torch.no_grad()
    def prefill(
        self,
        tokens: Tensor,
        lengths: Tensor,
        room: int = 0,
        tap_ids=None,
        chunk: int | None = None,
        checkpoint_every: int | None = None,
    ) -> Trunk:
        """Run a right-padded batch tokens (B,T) of lengths (B,), `chunk` tokens at a time.

        room: slots that commits may fill without copying. tap_ids: layers to tap, by default the
        target's own. checkpoint_every: tokens between recurrent states kept, so that a tree may
        hang anywhere; None: replay.checkpoint_spacing; 0: only the last state, for decoding."""
        B, T = tokens.shape
        shortest, longest = torch.stack(lengths.aminmax()).tolist()  # one wait for a GPU
        if lengths.shape != (B,) or shortest < 1 or longest > T:
            raise ValueError(f"lengths {lengths.tolist()} do not fit tokens of shape {(B, T)}")
        if (chunk or 1) < 1 or (checkpoint_every or 0) < 0:
            raise ValueError(f"chunk {chunk}, checkpoint_every {checkpoint_every}: too small")
        trunk = self.empty_trunk(B, tap_ids, checkpoint_every)
        trunk, hidden, taps = self.extend(trunk, tokens, lengths, room, chunk)
        return replace(trunk, width=longest, hidden=hidden, taps=taps)

    def empty_trunk(self, B: int, tap_ids=None, checkpoint_every: int | None = None) -> Trunk:
        """A trunk of B rows without tokens, for `extend`. Arguments as in `prefill`."""
        if checkpoint_every is None:
            itemsize = self.lm_head.weight.element_size()
            checkpoint_every = replay.checkpoint_spacing(self.config, itemsize)
        tap_ids = self.tap_ids if tap_ids is None else tuple(tap_ids)
        lengths = torch.zeros(B, dtype=torch.long, device=self.lm_head.weight.device)
        tokens = lengths.new_zeros(B, 0)
        return Trunk(tokens, lengths, [], tap_ids, 0, checkpoint_every=checkpoint_every)

    @torch.no_grad()
    def extend(
        self, trunk: Trunk, tokens: Tensor, lengths: Tensor, room: int = 0, chunk: int | None = None
    ) -> tuple[Trunk, Tensor, Tensor | None]:
        """Run more tokens (B,T), right-padded, on a trunk whose rows are all trunk.width long.
        lengths (B,): of the rows afterwards, old tokens included; they are not checked. Returns the
        longer trunk, and hidden (B,T,C) and taps (B,T,·) of the new tokens.

        As `commit`, it writes in place where there is room. The new trunk keeps neither hidden
        states nor taps. room, chunk: as in `prefill`."""
        start, T = trunk.width, tokens.shape[1]
        if chunk is None:
            chunk = PREFILL_TOKENS_ON_GPU if tokens.is_cuda else PREFILL_TOKENS
        size = start + T + room
        cache = with_room(trunk.tokens, size)
        cache[:, start : start + T] = tokens
        states = []
        for state in trunk.states:
            names = replay.positional_names(state)
            states.append(state | {name: with_room(state[name], size) for name in names})
        trunk = replace(trunk, tokens=cache, states=states, hidden=None, taps=None)
        outputs, tapped = [], []
        for part in tokens.split(chunk, 1):
            trunk, hidden, taps = self._run_part(trunk, part, lengths)
            outputs.append(hidden)
            tapped.append(taps)
        taps = torch.cat(tapped, 1) if trunk.tap_ids else None
        return trunk, torch.cat(outputs, 1), taps

    def _run_part(self, trunk: Trunk, tokens: Tensor, lengths: Tensor) -> tuple:
        """Run the next n tokens (B,n); those after lengths (B,) are padding -> the longer trunk,
        hidden (B,n,C), taps."""
        B, n = tokens.shape
        start = trunk.width
        numbers = torch.arange(n, device=tokens.device)
        valid = start + numbers < lengths[:, None]  # (B, n)
        spacing = trunk.checkpoint_every or start + n + 1  # else no token is the last of a spacing
        checkpoint_tokens = tuple(range(spacing - 1 - start % spacing, n, spacing))
        view = causal_view(B, n, tokens.device, start, valid, checkpoint_tokens)
        hidden, taps, new_states = self.model(tokens, view, trunk.states, trunk.tap_ids)
        path = torch.where(valid, numbers, -1)
        states = self._extend_states(trunk, new_states, path, start + n, checkpoint_tokens)
        run = trunk.lengths + valid.sum(1)
        return replace(trunk, lengths=run, states=states, width=start + n), hidden, taps

    @torch.no_grad()
    def score(self, trunk: Trunk, tree: ProposalTree, keep: bool = True) -> Scored:
        """Run all nodes of the tree in one pass (paper: the tree mask). keep=False: nothing will be
        committed, as in training, so what layers remember of the nodes, and taps, are not kept.

        The trunk stays as it was, but for slots that are not in use. A trunk that keeps only its
        last recurrent state (checkpoint_every=0) takes chains at its end only: anchors = lengths.
        """
        if not tree.include_anchor and trunk.hidden is None:
            raise ValueError("this trunk keeps no hidden states, so p_1 cannot come from it")
        has_linear = any(layer.is_linear for layer in self.model.layers)
        if not tree.include_anchor and has_linear and not trunk.checkpoint_every:
            raise ValueError("this trunk keeps recurrent state only at its end")
        B, A, K, W1 = tree.p_index.shape
        T = tree.num_trunk_slots
        # In decoding T includes the anchor, which has no entry yet, so room is made.
        past = []
        for state in trunk.states:
            names = replay.positional_names(state)
            past.append(state | {n: first_slots(state[n], T, trunk.width) for n in names})
        view = tree_view(tree, self.config, self.lm_head.weight.dtype)
        tap_ids = trunk.tap_ids if keep else ()
        node_hidden, taps, states = self.model(tree.tokens, view, past, tap_ids, keep)
        index = tree.p_index.view(B, -1)
        hidden = gather_slots(node_hidden, (index - T).clamp(min=0))  # (B, A*K*(W+1), C)
        if not tree.include_anchor:
            on_trunk = gather_slots(trunk.hidden, index.clamp(0, trunk.hidden.shape[1] - 1))
            hidden = torch.where((index >= T)[..., None], hidden, on_trunk)
        return Scored(hidden.view(B, A, K, W1, -1), node_hidden, taps, states, view.real)

    def branch_probs(self, trunk: Trunk, tree: ProposalTree) -> Tensor:
        """p (B,A,K,W,V), float32: for tests and small vocabularies, never where memory matters."""
        hidden = self.score(trunk, tree, keep=False).hidden[..., :-1, :]
        return self.head(hidden).float().softmax(-1)

    @torch.no_grad()
    def commit(self, trunk: Trunk, tree: ProposalTree, scored: Scored, path: Tensor) -> Trunk:
        """Let the accepted nodes join the trunk. path (B,P): node numbers in order, then -1.

        It writes in place where there is room, so go on with the trunk returned, not the old one.
        Recurrent states are copied, with all checkpoints.
        All P columns are written; those of -1 lie after the new length, where nobody reads. No
        recurrent states are kept between the last checkpoint of the prefill and the new end."""
        width = trunk.width + path.shape[1]
        return replace(
            trunk,
            tokens=write_path(trunk.tokens, tree.tokens, path, trunk.lengths, width),
            hidden=write_path(trunk.hidden, scored.node_hidden, path, trunk.lengths, width),
            taps=write_path(trunk.taps, scored.taps, path, trunk.lengths, width),
            lengths=trunk.lengths + (path >= 0).sum(1),
            states=self._extend_states(trunk, scored.states, path, width),
            width=width,
        )

    def _extend_states(self, trunk, new_states, path, width, checkpoint_tokens=()) -> list[dict]:
        """What each layer remembers once the tokens at indices path (B,P) have joined the trunk of
        at most `width` tokens, in a prefill with the states after checkpoint_tokens."""
        room = max(trunk.tokens.shape[1], width)
        states = []
        pasts = trunk.states or [None] * len(new_states)
        for layer, past, new in zip(self.model.layers, pasts, new_states):
            state = {}
            if layer.is_linear:
                state = replay.extended_checkpoints(
                    past, new, path, trunk.lengths, checkpoint_tokens
                )
                if not trunk.checkpoint_every:
                    size = max(self.config.linear_conv_kernel_dim - 1, 1)  # for its convolution
                    state |= replay.trunk_tail(past, new, path, trunk.lengths, size)
            for name in replay.positional_names(new | state):
                if past is None:  # nothing is there yet: token n belongs in slot n
                    state[name] = with_room(new[name], room)
                else:
                    state[name] = write_path(past[name], new[name], path, trunk.lengths, width)
            states.append(state)
        return states

    # -- making, loading, saving

    @classmethod
    def toy(cls, arch: str = "gqa", seed: int = 0, **changes) -> "Target":
        """A small untrained target. `changes` replace config fields; a value of None is ignored."""
        if arch not in TOYS:
            raise ValueError(f"--arch {arch}: there is {', '.join(TOYS)}")
        config = TOYS[arch]
        changes = {name: value for name, value in changes.items() if value is not None}
        num_layers = changes.get("num_hidden_layers")
        if config.hybrid and num_layers and "layer_types" not in changes:
            kinds = (config.layer_types * num_layers)[: num_layers - 1] + ("full_attention",)
            linear = {i + 1 for i, kind in enumerate(kinds) if kind == "linear_attention"}
            ngram_layers = tuple(i for i in config.ple_layer_ids if i in linear)
            changes = {"layer_types": kinds, "ple_layer_ids": ngram_layers} | changes
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            toy = cls(replace(config, **changes)).apply(init_weights)
        return toy.requires_grad_(False)

    @classmethod
    def from_pretrained(cls, folder, device="cpu", dtype=None, before_loading=None) -> "Target":
        """Load a Hugging Face folder. It needs no tokenizer files.

        dtype None: what its config names. before_loading(target) is called on the empty target,
        before its weights are read: it may spread the layers over several processes."""
        folder = model_folder(str(folder))
        source = str(folder / "config.json")
        config_dict = read_json(source)
        if "block_size" in config_dict:
            raise ValueError(f"{folder} holds a drafter, not a target")
        config = ModelConfig.from_dict(config_dict, source)
        if (config_dict.get("text_config") or config_dict).get("is_causal") is False:
            raise ValueError(f"{source}: is_causal = False is not implemented in a target")
        if config.tie_word_embeddings and has_other_head(folder):
            print(f"{folder}: {TWO_TENSORS}")
            config = replace(config, tie_word_embeddings=False)
        with torch.device("meta"):
            target = cls(config).requires_grad_(False)
        if before_loading:
            before_loading(target)
        dtype = dtype or stored_dtype(config_dict, folder)
        tied = target.tied_names()
        num_skipped = load_weights(target, folder, device, dtype, layout(config), tied)
        if num_skipped:
            print(f"{folder}: {num_skipped} tensors skipped (images, draft heads, rotary tables)")
        if config.tie_word_embeddings:  # loading assigned the two one by one
            target.model.embed_tokens.weight = target.lm_head.weight
        target.num_tokens = _count_tokens(folder, config.vocab_size)
        return target.requires_grad_(False)

    def tied_names(self) -> dict[str, str]:
        """{tensor that a file may leave out: the tensor that it equals}."""
        tied = self.config.tie_word_embeddings
        return {"lm_head.weight": "model.embed_tokens.weight"} if tied else {}

    def save_pretrained(self, folder, **extra) -> None:
        """Write an ordinary folder of the target's family. `extra` goes into config.json."""
        folder = Path(folder)
        tied = self.tied_names()
        tensors = {name: t for name, t in self.state_dict().items() if name not in tied}
        tensors = in_shards(tensors, self.config.split_ngram_parts)
        write_tensors(folder / "model.safetensors", tensors)
        dtype = str(next(self.parameters()).dtype).removeprefix("torch.")
        names = {"architectures": [FAMILIES[self.config.model_type]], "dtype": dtype}
        write_json(folder / "config.json", names | self.config.to_dict() | extra)


def _count_tokens(folder: Path, vocab_size: int) -> int:
    """How many ids the folder's tokenizer has, vocab_size where there is no tokenizer."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return vocab_size
    file = read_json(path)
    try:
        ids = [int(token["id"]) for token in file.get("added_tokens") or ()]
        ids += map(int, (file.get("model") or {}).get("vocab", {}).values())
    except (TypeError, KeyError, ValueError, AttributeError):
        raise ValueError(f"{path}: ids that are no numbers") from None
    count = max(ids, default=vocab_size - 1) + 1
    if count > vocab_size:
        raise ValueError(f"{folder}: the tokenizer has {count} ids, vocab_size is {vocab_size}")
    return count


def default_taps(num_layers: int) -> tuple[int, ...]:
    """Choose five layers for the drafter to read, evenly spaced from the second to the third-last
    (of 36: 1, 9, 17, 25, 33). A shallow target gives fewer."""
    if num_layers < 8:
        return tuple(sorted({num_layers // 4, num_layers // 2, num_layers - 2} - {-1}))
    return tuple(round(1 + i * (num_layers - 4) / 4) for i in range(5))


def main():
    torch.manual_seed(0)
    target = Target.toy(num_hidden_layers=2, hidden_size=32, intermediate_size=64)
    tokens = torch.randint(0, 256, (1, 10))
    lengths = torch.tensor([10])
    anchors = torch.tensor([[3, 6]])
    branches = torch.randint(0, 256, (1, 2, 2, 4))  # two branches of four tokens at each anchor
    branches[0, 0, 0, :2] = tokens[0, 4:6]  # one of them follows the trunk for two tokens
    trunk = target.prefill(tokens, lengths)
    tree = build_tree(tokens, lengths, anchors, branches)
    p = target.branch_probs(trunk, tree)  # (1, 2, 2, 4, V)
    print(f"a trunk of 10 tokens, 4 branches of 4: {tree.num_nodes} nodes scored in one pass")
    for a, anchor in enumerate(anchors[0].tolist()):
        for k in range(2):
            alone = torch.cat([tokens[:, : anchor + 1], branches[:, a, k]], 1)
            p_alone = target(alone).softmax(-1)[0, anchor : anchor + 4]
            gap = (p[0, a, k] - p_alone).abs().max().item()
            branch = branches[0, a, k].tolist()
            print(f"  anchor {anchor}, branch {branch}: |packed - alone| is at most {gap:.1e}")
    num_alone = sum((anchor + 1 + 3) * 2 for anchor in anchors[0].tolist())
    print(f"alone, the target runs {num_alone} tokens; packed, 10 and {tree.num_nodes} nodes")


if __name__ == "__main__":
    with torch.no_grad():
        main()
