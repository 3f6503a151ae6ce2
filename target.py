"""The frozen judge: a target model that runs a trunk once and then scores whole trees of drafts on
it.

    trunk  = target.prefill(tokens, lengths)      keys and values, final hidden, taps of every token
    scored = target.score(trunk, tree)            one pass over all nodes; the trunk stays as it was
    logits = target.head(scored.hidden)           p_1..p_{W+1} of every branch, where wanted
    trunk  = target.commit(trunk, tree, scored, path)   serving: the accepted path becomes trunk

Caches are indexed by position, and a slot is visible only up to a node's history: what a rejected
token left behind it is never looked at and soon overwritten. So rows of one batch may accept
different counts.

    python target.py FOLDER     what a checkpoint holds, and 20 tokens of greedy text
    python target.py            a trunk, a tree, and the proof that packed = alone
    pytest tests/test_target.py
"""

import math
import sys
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

import replay
from hf import tensors
from hf.config import FAMILIES, ModelConfig
from hf.tokenizer import load_tokenizer
from loss import make_optimizers, set_rate, update
from model import Decoder, init_weights
from support import distributed
from support.files import read_json, run_command, write_json
from tree import ProposalTree, build_tree, causal_view, gather_slots, with_room, write_slots

WIDE = dict(
    vocab_size=264,
    hidden_size=128,
    intermediate_size=384,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=2048,
)
MIXED = dict(  # three linear layers to one of attention
    num_hidden_layers=8,
    layer_types=(*("linear_attention",) * 3, "full_attention") * 2,
    partial_rotary_factor=0.5,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=32,
    linear_value_head_dim=32,
)
TOYS = {  # deep and narrow: at batch 1 a step costs its layers, which is what drafting saves
    "gqa": ModelConfig(num_hidden_layers=7, **WIDE),
    "gdn": ModelConfig("qwen3_5_text", **WIDE, **MIXED),
    "qsa": ModelConfig(
        "qwen4_exp_text",
        **WIDE,
        **MIXED,
        output_gate_type="sigmoid",
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        shared_expert_intermediate_size=128,
        indexer_n_heads=4,
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
    ),
}
PREFILL = 1024  # tokens run at once: memory grows with a text's length, not its square


@dataclass
class Trunk:
    """What the target keeps of B committed texts. Slots beyond a row's length hold leftovers, never
    read."""

    tokens: Tensor  # (B, S) ids; S >= width leaves room to commit
    lengths: Tensor  # (B,) tokens run by the target
    states: list[dict]  # what each layer remembers: tensors (B, S, ...) by position, see model.py
    tap_ids: tuple[int, ...]
    width: int  # no row is longer; known on the host
    hidden: Tensor | None = None  # (B, S, C) final hidden; None once serving has no use for it
    taps: Tensor | None = None  # (B, S, len(tap_ids) * C), likewise
    every: int = 0  # tokens between the recurrent states kept; 0: the one after the last token
    kept_at: int = 0  # width when the last of them was kept

    def select(self, rows: Tensor, width: int | None = None) -> "Trunk":
        """The trunk of these rows only; serving drops the rows that have finished. width: none of
        them is longer."""

        def cut(held: dict, names) -> dict:
            return {
                name: None if t is None else t[rows, :width] if name in names else t[rows]
                for name, t in held.items()
            }

        states = [cut(state, replay.positional_names(state)) for state in self.states]
        held = {name: getattr(self, name) for name in ("tokens", "lengths", "hidden", "taps")}
        own = cut(held, ("tokens", "hidden", "taps"))
        return replace(self, states=states, width=width or self.width, **own)

    def lean(self) -> "Trunk":
        """Tokens and taps alone, which is what a drafter reads."""
        return replace(self, states=[], hidden=None)

    @property
    def nbytes(self) -> int:
        held = [self.tokens, self.hidden, self.taps, *(t for s in self.states for t in s.values())]
        return sum(t.nbytes for t in held if t is not None)


@dataclass
class Scored:
    """One pass over a tree."""

    # (B, A, K, W+1, C) the hidden that gives p_1..p_{W+1}; meaningless where slots is -1
    hidden: Tensor
    nodes: Tensor  # (B, N, C) final hidden of the nodes
    taps: Tensor | None  # (B, N, len(tap_ids) * C) of the nodes
    states: list[dict]  # what each layer remembers of the nodes, (B, N, ...)


@contextmanager
def one_row(rows: int, weight: Tensor):
    """Within, a single row in bfloat16 on a CPU is multiplied by torch's own kernel, which takes
    about half as long as oneDNN's, torch's choice; more rows do not gain. weight: one of those it
    is multiplied by. The switch is the whole process's."""
    flags = torch.backends.mkldnn
    plain = weight.dtype == torch.bfloat16 and weight.is_cpu and weight.stride(-1) == 1
    own = rows == 1 and plain and flags.enabled
    if own:
        flags.enabled = False
    try:
        yield
    finally:
        if own:
            flags.enabled = True


class Target(nn.Module):
    """A decoder with its head. Frozen, once it is made or loaded."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.tap_ids = default_taps(config.num_hidden_layers)
        self.tail = max(config.linear_conv_kernel_dim - 1, 1)  # tokens a convolution looks back
        # ids that stand for text; rows beyond are never proposed
        self.num_tokens = config.vocab_size

    # -- running

    def head(self, hidden: Tensor) -> Tensor:
        """(…, C) -> logits (…, V). Given a slice with gaps between its rows, torch would copy the
        whole vocabulary's matrix; flat rows it takes as they lie."""
        rows = hidden.reshape(-1, hidden.shape[-1])
        with one_row(len(rows), self.lm_head.weight):
            return self.lm_head(rows).view(*hidden.shape[:-1], self.config.vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens (B,T) -> logits (B,T,V); no cache, no taps. The judge of every other path."""
        return self.head(self.model(tokens, causal_view(*tokens.shape, tokens.device))[0])

    @torch.no_grad()
    def prefill(
        self,
        tokens: Tensor,
        lengths: Tensor,
        room: int = 0,
        tap_ids=None,
        chunk: int = PREFILL,
        checkpoint_every: int | None = None,
    ) -> Trunk:
        """Run a right-padded batch tokens (B,T), lengths (B,), `chunk` tokens at a time. `room`:
        slots to commit into without copying; `tap_ids`: the layers to tap, by default the target's
        own; `checkpoint_every`: tokens between recurrent states kept, so that a tree may hang
        anywhere (replay.checkpoint_spacing); 0 keeps the last alone, which is all that serving needs."""
        if checkpoint_every is None:
            checkpoint_every = replay.checkpoint_spacing(
                self.config, self.lm_head.weight.element_size()
            )
        B, T = tokens.shape
        longest = int(lengths.max())
        if lengths.shape != (B,) or int(lengths.min()) < 1 or longest > T:
            raise ValueError(f"lengths {lengths.tolist()} do not fit tokens of shape {(B, T)}")
        if chunk < 1 or checkpoint_every < 0:
            raise ValueError(f"chunk {chunk}, checkpoint_every {checkpoint_every}: too small")
        tap_ids = self.tap_ids if tap_ids is None else tuple(tap_ids)
        tokens = with_room(tokens.clone(), T + room)
        trunk = Trunk(tokens, torch.zeros_like(lengths), [], tap_ids, 0, every=checkpoint_every)
        outputs = []
        for start in range(0, T, chunk):
            part = tokens[:, start : min(start + chunk, T)]
            n = part.shape[1]
            numbers = torch.arange(n, device=tokens.device)
            valid = start + numbers < lengths[:, None]  # (B, n)
            every = checkpoint_every or T + 1
            checkpoint_tokens = tuple(range(every - 1 - start % every, n, every))
            view = causal_view(B, n, tokens.device, start, valid, checkpoint_tokens)
            hidden, taps, states = self.model(part, view, trunk.states, tap_ids)
            path = torch.where(valid, numbers, -1)
            trunk = self._extended(
                trunk, None, None, None, states, path, start + n, checkpoint_tokens
            )
            outputs.append((hidden, taps))
        hiddens, taps = zip(*outputs)
        hidden, taps = torch.cat(hiddens, 1), torch.cat(taps, 1) if tap_ids else None
        return replace(trunk, width=longest, kept_at=longest, hidden=hidden, taps=taps)

    @torch.no_grad()
    def score(self, trunk: Trunk, tree: ProposalTree) -> Scored:
        """All nodes of the tree in one pass (paper: the tree mask). The trunk stays as it was,
        but for slots that are not in use. One that keeps its last recurrent state alone
        (checkpoint_every=0) takes chains at its end only, anchors = lengths."""
        if not tree.only_nodes and trunk.hidden is None:
            raise ValueError("this trunk keeps no hidden states, so p_1 cannot come from it")
        if not tree.only_nodes and any("base" in state for state in trunk.states):
            raise ValueError("this trunk keeps recurrent state at its end alone")
        B, A, K, W1 = tree.slots.shape
        T = tree.num_trunk_slots
        past = [self._reaching(state, T, trunk.width) for state in trunk.states]
        with one_row(tree.tokens.numel(), self.lm_head.weight):
            node_hidden, taps, states = self.model(tree.tokens, tree.view(), past, trunk.tap_ids)
        slots = tree.slots.view(B, -1)
        hidden = gather_slots(node_hidden, (slots - T).clamp(min=0))  # (B, A*K*(W+1), C)
        if not tree.only_nodes:
            on_trunk = gather_slots(trunk.hidden, slots.clamp(0, trunk.hidden.shape[1] - 1))
            hidden = torch.where((slots >= T)[..., None], hidden, on_trunk)
        return Scored(hidden.view(B, A, K, W1, -1), node_hidden, taps, states)

    @staticmethod
    def _reaching(state: dict, T: int, width: int) -> dict:
        """What a layer remembers, T slots of it at least: T may count an anchor not run yet, and
        nodes must not be written into slots in use."""
        positional_names = replay.positional_names(state)
        end = T if T < width else None
        return state | {name: with_room(state[name], T)[:, :end] for name in positional_names}

    def branch_probs(self, trunk: Trunk, tree: ProposalTree) -> Tensor:
        """p (B,A,K,W,V), float32: for tests and small vocabularies, never where memory matters."""
        hidden = self.score(trunk, tree).hidden[..., :-1, :]
        return self.head(hidden).float().softmax(-1)

    @torch.no_grad()
    def commit(self, trunk: Trunk, tree: ProposalTree, scored: Scored, path: Tensor) -> Trunk:
        """The accepted nodes become trunk. path (B,P): node numbers in order, then -1.

        Writes in place where there is room, so go on with the trunk returned and not the old one.
        Slots are written for all P columns; those of the -1 lie beyond the new length: leftovers.
        """
        width = trunk.width + path.shape[1]
        return self._extended(
            trunk, tree.tokens, scored.nodes, scored.taps, scored.states, path, width
        )

    def _extended(
        self, trunk, tokens, hidden, taps, states, path, width, checkpoint_tokens=None
    ) -> Trunk:
        """The trunk with the tokens (B,N) numbered by path (B,P; -1 behind the last) behind it."""
        numbers, before = path.clamp(min=0), trunk.lengths
        slots = before[:, None] + torch.arange(path.shape[1], device=path.device)
        room = max(trunk.tokens.shape[1], width)
        keep = checkpoint_tokens is None and 0 < trunk.every <= trunk.width - trunk.kept_at
        first = not trunk.states

        def extended(cache: Tensor | None, new: Tensor | None) -> Tensor | None:
            if new is None or cache is None and not first:
                return cache
            if first:  # nothing is there yet: token n belongs into slot n
                return with_room(new, room)
            if cache.shape[1] < width:  # more than was reserved: double it
                cache = with_room(cache, 2 * width)
            write_slots(cache, gather_slots(new, numbers), slots)
            return cache

        def remembered(past: dict | None, new: dict) -> dict:
            kept = {}
            if "u" in new:
                kept = replay.extended_checkpoints(
                    past, new, path, before, checkpoint_tokens or (), keep
                )
                if not trunk.every:
                    kept |= replay.last_tokens(past, new, path, before, self.tail)
            rest = [name for name in new if name not in kept]
            return kept | {name: extended(past and past[name], new[name]) for name in rest}

        return Trunk(
            extended(trunk.tokens, tokens),
            before + (path >= 0).sum(1),
            [remembered(*pair) for pair in zip(trunk.states or [None] * len(states), states)],
            trunk.tap_ids,
            width,
            extended(trunk.hidden, hidden),
            extended(trunk.taps, taps),
            trunk.every,
            trunk.width if keep else trunk.kept_at,
        )

    # -- making, loading, saving

    @classmethod
    def toy(cls, arch: str = "gqa", seed: int = 0, **changes) -> "Target":
        """A small untrained target; `changes` replace config fields."""
        if arch not in TOYS:
            raise ValueError(f"--arch {arch}: there is {', '.join(TOYS)}")
        changes = {name: value for name, value in changes.items() if value is not None}
        layers = changes.get("num_hidden_layers")
        if TOYS[arch].hybrid and layers and "layer_types" not in changes:
            kinds = [TOYS[arch].layer_types[i % 4] for i in range(layers - 1)] + ["full_attention"]
            linear = [i + 1 for i, kind in enumerate(kinds) if kind == "linear_attention"]
            ids = tuple(i for i in TOYS[arch].ple_layer_ids if i in linear)
            changes = {"layer_types": tuple(kinds), "ple_layer_ids": ids} | changes
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            toy = cls(replace(TOYS[arch], **changes)).apply(init_weights)
        return toy.requires_grad_(False)

    @classmethod
    def from_pretrained(cls, folder, device="cpu", dtype=None, shard=False) -> "Target":
        """A Hugging Face folder, frozen. dtype None: what its config names. shard: spread its
        layers over all processes, see distributed.py."""
        folder = tensors.checkpoint_folder(str(folder))
        found = read_json(folder / "config.json")
        if "block_size" in found:
            raise ValueError(f"{folder} holds a drafter, not a target")
        config = ModelConfig.from_dict(found, str(folder / "config.json"))
        with torch.device("meta"):
            target = cls(config).requires_grad_(False)
        if shard:
            distributed.shard(target.model, device)
        dtype = dtype or tensors.stored_dtype(found, folder)
        where, tied = tensors.layout(config), target.tied_names()
        skipped = tensors.load_weights(target, folder, device, dtype, where, tied)
        if skipped:
            print(f"{folder}: {skipped} tensors skipped (images, drafting heads, rotary tables)")
        tensors.by_columns(target)
        if config.tie_word_embeddings:  # loading assigned them one by one
            target.model.embed_tokens.weight = target.lm_head.weight
        if (folder / "tokenizer.json").is_file():
            file = read_json(folder / "tokenizer.json")
            try:
                ids = [int(token["id"]) for token in file.get("added_tokens") or ()]
                ids += map(int, (file.get("model") or {}).get("vocab", {}).values())
            except (TypeError, KeyError, ValueError, AttributeError):
                raise ValueError(f"{folder}/tokenizer.json: ids that are no numbers") from None
            target.num_tokens = max(ids, default=config.vocab_size - 1) + 1
            if target.num_tokens > config.vocab_size:
                raise ValueError(
                    f"{folder}: the tokenizer has {target.num_tokens} ids, vocab_size "
                    f"is {config.vocab_size}"
                )
        distributed.warm_up()
        return target.requires_grad_(False)

    def tied_names(self) -> dict[str, str]:
        """Tensors that the file may leave out because they are another one."""
        tied = self.config.tie_word_embeddings
        return {"lm_head.weight": "model.embed_tokens.weight"} if tied else {}

    def save_pretrained(self, folder, **extra) -> None:
        """An ordinary folder of the target's family; `extra` goes into config.json."""
        folder = Path(folder)
        tensors = {k: v for k, v in self.state_dict().items() if k not in self.tied_names()}
        tensors = tensors.in_shards(tensors, self.config.split_ngram_parts)
        tensors.save_tensors(folder / "model.safetensors", tensors)
        dtype = str(next(self.parameters()).dtype).removeprefix("torch.")
        names = {"architectures": [FAMILIES[self.config.model_type]], "dtype": dtype}
        write_json(folder / "config.json", names | self.config.to_dict() | extra)


def train_toy(toy: Target, rows: Tensor, held: Tensor, steps: int, length: int, seed: int) -> float:
    """Next-token training of a toy on rows (n,) of token ids; returns held-out bits per token."""
    if min(len(rows), len(held)) <= length + 1:
        raise ValueError(
            f"the corpus is too short: more than {length + 1} tokens are needed in each part"
        )
    optimizers = make_optimizers(toy.requires_grad_(True), matrix_lr=0.02, lr=3e-3)
    generator = torch.Generator().manual_seed(seed)
    device = toy.lm_head.weight.device

    def loss_on(ids: Tensor, starts: Tensor) -> Tensor:
        windows = ids[starts[:, None] + torch.arange(length + 1)].long().to(device)  # (n, length+1)
        return F.cross_entropy(toy(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())

    bar = tqdm(range(steps), desc="target  ", unit="step")
    for step in bar:
        set_rate(optimizers, step, steps, warmup=20, cooldown=0.4)
        value = loss_on(rows, torch.randint(len(rows) - length, (8,), generator=generator))
        value.backward()
        update(optimizers)
        if step % 10 == 0:
            bar.set_postfix({"bits per token": f"{value.item() / math.log(2):.3f}"})
    with torch.no_grad():
        starts = torch.linspace(0, len(held) - length - 1, 64).long()
        bits = sum(loss_on(held, part).item() for part in starts.split(8)) / 8 / math.log(2)
    toy.requires_grad_(False)
    return bits


def default_taps(num_layers: int) -> tuple[int, ...]:
    """Five layers whose outputs the drafter reads, evenly spread from the second to the third to
    last (36 layers: 1, 9, 17, 25, 33); a shallow target gives what it has."""
    if num_layers < 8:
        return tuple(sorted({num_layers // 4, num_layers // 2, num_layers - 2} - {-1}))
    return tuple(round(1 + i * (num_layers - 4) / 4) for i in range(5))


def main():
    torch.manual_seed(0)
    target = Target.toy(num_hidden_layers=2, hidden_size=32, intermediate_size=64)
    trunk_tokens = torch.randint(0, 256, (1, 10))
    lengths, anchors = torch.tensor([10]), torch.tensor([[3, 6]])
    branches = torch.randint(0, 256, (1, 2, 2, 4))  # two branches of four tokens at each anchor
    branches[0, 0, 0, :2] = trunk_tokens[0, 4:6]  # one of them follows the trunk for two tokens
    trunk = target.prefill(trunk_tokens, lengths)
    tree = build_tree(trunk_tokens, lengths, anchors, branches)
    p = target.branch_probs(trunk, tree)
    print(f"trunk of 10 tokens, 4 branches of 4: {tree.num_nodes} nodes scored in one pass")
    for a, anchor in enumerate(anchors[0].tolist()):
        for k in range(2):
            alone = torch.cat([trunk_tokens[:, : anchor + 1], branches[:, a, k]], 1)
            slow = target(alone).softmax(-1)[0, anchor : anchor + 4]
            gap = (p[0, a, k] - slow).abs().max().item()
            ids = branches[0, a, k].tolist()
            print(f"  anchor {anchor}, branch {ids}: packed - alone, largest difference {gap:.1e}")
    separate = sum((a + 1 + 3) for a in anchors[0].tolist()) * 2
    print(f"alone, the target runs {separate} tokens; packed, 10 and {tree.num_nodes} nodes")


@torch.no_grad()
def describe(folder: str) -> None:
    """What a checkpoint folder holds, and a greeting."""
    target = Target.from_pretrained(folder)
    config, tokenizer = target.config, load_tokenizer(folder)
    own = {id(p): p for p in target.parameters()}.values()  # a tied head once
    linear = sum(config.is_linear(layer) for layer in range(config.num_hidden_layers))
    heads = f"{config.num_attention_heads} query and {config.num_key_value_heads} key-value heads"
    kind = {"llama": "attention", "qwen3": "attention with q/k norms"}.get(config.model_type)
    kind = kind or ("indexed" if config.streams else "gated") + " attention"
    tied = "tied" if config.tie_word_embeddings else "untied"
    chat = "with" if tokenizer.template else "without"
    streams = f", {config.num_streams} residual streams" if config.streams else ""
    print(f"family      {config.model_type}, width {config.hidden_size}, {tied} head{streams}")
    layers = f"{config.num_hidden_layers - linear} of {kind}, {heads} of {config.head_dim}"
    print(f"layers      {config.num_hidden_layers}: {layers}")
    if linear:
        print(
            f"            {linear} of gated delta net, {config.linear_num_value_heads} value and "
            f"{config.linear_num_key_heads} key heads"
        )
    if config.streams:
        print(
            f"            {config.num_experts_per_tok} of {config.num_experts} experts and a "
            f"shared one; n-gram layers {list(config.ple_layer_ids)}"
        )
    print(f"parameters  {sum(p.numel() for p in own):,}")
    print(f"bytes       {sum(p.nbytes for p in own):,}, {target.lm_head.weight.dtype}")
    print(f"taps        layers {list(target.tap_ids)}, unless a drafter wants others")
    rows = f"{config.vocab_size} rows"
    print(f"tokenizer   {tokenizer.num_tokens} ids of {rows}, {chat} chat template")
    print(f"stop ids    {list(tokenizer.stop_ids)}\n")
    text = tokenizer.chat([{"role": "user", "content": "Hello!"}])
    ids = torch.tensor([tokenizer.encode(text)])
    trunk = target.prefill(ids, torch.tensor([ids.shape[1]]), room=24, checkpoint_every=0)
    token, said = target.head(trunk.hidden[:, -1]).argmax(-1), []
    while len(said) < 20 and int(token) not in tokenizer.stop_ids:
        said.append(int(token))  # plain decoding is a chain of the anchor alone
        trunk.tokens[:, trunk.width] = token
        none, upto = token.new_zeros(1, 1, 1, 0), trunk.tokens[:, : trunk.width + 1]
        tree = build_tree(upto, trunk.lengths, trunk.lengths[:, None], none, False, True)
        scored = target.score(trunk, tree)
        trunk = target.commit(trunk, tree, scored, torch.zeros(1, 1, dtype=torch.long))
        token = target.head(scored.hidden[:, 0, 0, 0]).argmax(-1)
    print(f"{text}{tokenizer.decode(said)}")


if __name__ == "__main__":
    with torch.no_grad():
        sys.exit(run_command(lambda: describe(sys.argv[1]) if len(sys.argv) > 1 else main()))
