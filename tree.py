"""The proposal tree: who is whose past.

Many branches y_1..y_W, each proposed at an anchor a of a shared trunk x_0..x_{T-1}, are scored in
one pass of the target. Everything a layer needs in order to give every branch exactly the numbers
it would get alone, with its whole prefix x_{<=a}, y_1..y_k, is stated here as tables (method: a
node sees the trunk up to where its history leaves it, and its own ancestors, itself included):

    packed index   trunk position t -> t, node n -> T + n, nothing -> -1
    parents        (B, N)    packed index of the token before the node IN ITS HISTORY
    positions      (B, N)    depth in the sequence, not index in the packed tensor
    slots          (B,A,K,W+1)  packed index of the token whose hidden state gives p_1..p_{W+1}

p_1 comes from the trunk's own hidden state at a, and y_W needs no node. With `merge` the branches
form one trie over trunk and anchors (beyond the paper, same p): a branch lies on the trunk while it
repeats it, equal histories share nodes, and a node exists only where some branch needs its p. A
prefill is the tree in which each token's parent is the token before it; a chain is the tree with
one branch.

    python tree.py              ten trunk tokens, three branches, and all of these tables
    pytest tests/test_tree.py   the packed = alone tests
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

GROUP = 64  # nodes that hang on one root and are solved for together, about


@dataclass
class View:
    """What a layer may know about the past of the N tokens it is given; nothing else reaches it.

    A *linear* view (no groups) is a stretch of text: packed index = position, each token comes
    after the one before it. Otherwise the tokens are a tree's nodes, and `groups` lists them by the
    trunk position that their histories leave the trunk at.
    """

    positions: Tensor  # (B, N) int64, depth of each token in its own sequence
    parents: Tensor  # (B, N) packed index of the token before, -1 for none
    num_trunk_slots: int = 0  # T
    mask: Tensor | None = None  # (B, 1, N, T+N) bool, True = visible; None = plain causal, T = 0
    valid: Tensor | None = None  # (B, N) bool, False = padding; None = every token counts
    roots: Tensor | None = None  # (B, P) trunk position, -1 for the start
    groups: Tensor | None = None  # (B, P, m) node numbers, -1 behind the last
    max_depth: int = 0  # nodes on the longest chain of a tree
    checkpoint_tokens: tuple[
        int, ...
    ] = ()  # linear: the tokens after which recurrent state is to be kept
    _above: list[Tensor] = field(default_factory=list)

    def ancestor(self, depth: int) -> Tensor:
        """(B, N) packed index: 0 the token itself, 1 its parent, ...; -1 before the first one."""
        T = self.num_trunk_slots
        if not self._above:
            B, N = self.parents.shape
            self._above.append(torch.arange(T, T + N, device=self.parents.device).expand(B, N))
        while len(self._above) <= depth:
            last = self._above[-1]
            above = (last - 1).clamp(min=-1)
            if self.groups is not None:
                parents = self.parents.gather(1, (last - T).clamp(min=0))
                above = torch.where(last >= T, parents, above)
            self._above.append(above)
        return self._above[depth]

    def visible(self) -> Tensor:
        """The mask, written out if it was implied."""
        if self.mask is None:
            N = self.positions.shape[1]
            self.mask = causal_mask(0, N, self.positions.device)
        return self.mask


def gather_slots(values: Tensor, index: Tensor) -> Tensor:
    """values (B,T,...) at index (B,P) -> (B,P,...)."""
    return values[torch.arange(len(values), device=values.device)[:, None], index]


def write_slots(cache: Tensor, new: Tensor, slots: Tensor) -> None:
    """Write new (B,P,...) into cache (B,S,...) at slots (B,P), in place."""
    rows = torch.arange(len(cache), device=cache.device)[:, None]
    cache[rows, slots] = new.to(cache.dtype)


def gather_history(past: Tensor | None, new: Tensor, index: Tensor, T, base=0) -> Tensor:
    """The entries (B,P,...) at packed index (B,P), zero where it is below 0: from T on the new ones
    (B,N,...), before T the past's (B,S,...), whose slot 0 is position `base`."""

    def spread(condition: Tensor) -> Tensor:
        return condition.view(*condition.shape, *(1,) * (new.dim() - 2))

    found = gather_slots(new, (index - T).clamp(0, new.shape[1] - 1))
    if past is not None:
        older = gather_slots(past, (index - base).clamp(0, past.shape[1] - 1)).to(new.dtype)
        found = torch.where(spread(index >= T), found, older)
    return torch.where(spread(index >= 0), found, 0)


def with_room(cache: Tensor, width: int) -> Tensor:
    """cache (B,S,...) with at least `width` slots; the new ones are zero: masked is not unread."""
    lack = width - cache.shape[1]
    if lack <= 0:
        return cache
    return torch.cat([cache, cache.new_zeros(len(cache), lack, *cache.shape[2:])], 1)


def causal_mask(T: int, N: int, device=None) -> Tensor:
    """(1, 1, N, T+N): N tokens behind T."""
    ones = torch.ones(N, T + N, dtype=torch.bool, device=device)
    return ones.tril(T)[None, None]


def causal_view(B: int, N: int, device=None, T: int = 0, valid=None, checkpoint_tokens=()) -> View:
    """The view of a prefill, or of its next chunk behind T tokens: each token comes after the one
    before it."""
    positions = torch.arange(T, T + N, device=device).expand(B, N)
    mask = causal_mask(T, N, device) if T else None
    return View(positions, positions - 1, T, mask, valid, checkpoint_tokens=checkpoint_tokens)


@dataclass
class ProposalTree:
    """N nodes hanging on T trunk slots (B rows; rows with fewer nodes end in padding, `valid`
    False)."""

    tokens: Tensor  # (B, N)
    parents: Tensor  # (B, N) packed index, -1 for none
    positions: Tensor  # (B, N)
    trunk_ends: Tensor  # (B, N) the last trunk position in the node's history, -1 for none
    valid: Tensor  # (B, N) bool
    slots: Tensor  # (B, A, K, W+1) packed index, -1 where no p is needed
    roots: Tensor  # (B, P) the trunk positions that histories leave the trunk at, -1 the start
    groups: Tensor  # (B, P, m) the nodes of each root, -1 behind the last
    num_trunk_slots: int  # T
    max_depth: int  # nodes on the longest chain
    only_nodes: bool = False  # True: no slot lies on the trunk

    @property
    def num_nodes(self) -> int:
        """Nodes that are really scored, padding left out, over the whole batch."""
        return int(self.valid.sum())

    def ancestors(self, depth: int) -> Tensor:
        """(B, N, depth) packed indices: the node itself, its parent, ...; -1 before the first
        token."""
        view = self.view()
        return torch.stack([view.ancestor(d) for d in range(depth)], -1)

    def view(self) -> View:
        """The tree as the layers see it: the trunk up to `trunk_ends`, and the ancestors."""
        B, N = self.parents.shape
        T = self.num_trunk_slots
        slots = torch.arange(T, device=self.parents.device)
        on_trunk = slots <= self.trunk_ends[..., None]  # (B, N, T)
        view = View(self.positions, self.parents, T, None, self.valid, self.roots, self.groups)
        view.max_depth = self.max_depth
        table = torch.stack([view.ancestor(d) for d in range(self.max_depth)], -1) - T
        # trunk and nothing go to a column that is cut off
        table = torch.where(table >= 0, table, N)
        among_nodes = on_trunk.new_zeros(B, N, N + 1).scatter_(2, table, True)[..., :N]
        view.mask = torch.cat([on_trunk, among_nodes], -1)[:, None]
        return view


def build_tree(
    tokens: Tensor,
    lengths: Tensor,
    anchors: Tensor,
    branches: Tensor,
    merge: bool = True,
    include_anchor: bool = False,
) -> ProposalTree:
    """Hang branches on the trunk (paper: branch-parallel sampling; merging is ours).

    tokens (B,T) · lengths (B,) trunk tokens already run, T >= every anchor + 1 · anchors (B,A)
    positions, -1 = absent · branches (B,A,K,W), -1 from some slot on = no further valid token.
    include_anchor=True is serving's chain: the anchor = lengths is committed but not yet run, so it
    becomes a node, and y_W too, whose hidden state gives the bonus distribution p_{W+1}.
    """
    B, A, K, W = branches.shape
    T = tokens.shape[1]
    if tokens.dim() != 2 or anchors.shape != (B, A) or lengths.shape != (B,):
        raise ValueError(
            f"tokens {tuple(tokens.shape)}, lengths {tuple(lengths.shape)}, "
            f"anchors {tuple(anchors.shape)} and branches {tuple(branches.shape)} do not fit "
            "(B,T), (B,), (B,A), (B,A,K,W)"
        )
    present = (anchors >= 0)[:, :, None].expand(B, A, K).reshape(B, A * K)
    # the trunk's last word before the chain
    ends = anchors[:, :, None].expand(B, A, K).reshape(B, A * K)
    rows = branches.reshape(B, A * K, W)
    if include_anchor:
        first = tokens.gather(1, anchors.clamp(min=0)).repeat_interleave(K, 1)  # (B, R)
        chains, ends = torch.cat([first[..., None], rows], -1), ends - 1
    else:
        chains = rows[..., : W - 1]
    usable = (
        present[..., None] & (chains >= 0).cummin(-1).values if chains.shape[-1] else chains >= 0
    )
    # y_k needs a node only if p_{k+1} is wanted, that is if y_{k+1} is valid
    if not include_anchor:
        usable = usable & (rows[..., 1:] >= 0)
    if merge:
        known = torch.zeros_like(lengths) if include_anchor else lengths  # nothing to repeat
        places, fields = _merged_nodes(tokens, known, chains, ends, usable)
    else:
        places, fields = _private_nodes(chains, ends, usable, T)
    places = torch.where(usable, places, -1)
    # ordinary shapes even for a tree without nodes: one padding node
    if not fields["tokens"].shape[1]:
        fill = dict(tokens=0, parents=-1, positions=0, trunk_ends=-1, valid=False)
        fields = {name: fields[name].new_full((B, 1), fill[name]) for name in fill}
    if merge or not chains.shape[-1]:
        roots, groups = _grouped(fields["trunk_ends"], fields["valid"], fields["parents"] < T)
    else:  # a chain's nodes lie together, an anchor's chains too
        roots = ends.view(B, A, K)[..., 0].clamp(min=-1)
        nodes = torch.arange(fields["tokens"].shape[1], device=tokens.device)
        groups = nodes.view(1, A, -1).expand(B, -1, -1)
    if not include_anchor:  # p_1 from the trunk; no p_{W+1}
        start = torch.where(present & (rows[..., 0] >= 0), ends, -1)[..., None]
        places = torch.cat([start, places, torch.full_like(start, -1)], -1)
    return ProposalTree(
        **fields,
        slots=places.view(B, A, K, W + 1),
        roots=roots,
        groups=groups,
        num_trunk_slots=T,
        max_depth=max(chains.shape[-1], 1),
        only_nodes=include_anchor,
    )


def _private_nodes(chains: Tensor, ends: Tensor, usable: Tensor, T: int) -> tuple[Tensor, dict]:
    """One node per chain token: (B,R,E) places and the node table, R*E nodes a row, no host
    sync."""
    B, R, E = chains.shape
    depth = torch.arange(E, device=chains.device)
    places = T + torch.arange(R * E, device=chains.device).view(1, R, E).expand(B, R, E)
    parents = torch.where(depth == 0, ends[..., None], places - 1)
    fields = dict(
        tokens=torch.where(usable, chains, 0),
        parents=torch.where(usable, parents, -1),
        positions=torch.where(usable, ends[..., None] + 1 + depth, 0),
        trunk_ends=torch.where(usable, ends[..., None].expand(B, R, E), -1),
        valid=usable,
    )
    return places, {name: value.reshape(B, R * E) for name, value in fields.items()}


def _grouped(trunk_ends: Tensor, valid: Tensor, tops: Tensor) -> tuple[Tensor, Tensor]:
    """Nodes (B,N), in ascending order of trunk_ends, by trunk end: roots (B,P), groups (B,P,m).

    Work on a group grows with the square of m, so one of more than GROUP nodes is cut where a
    subtree begins (tops: the nodes right behind the trunk)."""
    B, N = trunk_ends.shape
    index = torch.arange(N, device=valid.device).expand(B, N)
    first = valid.clone()
    first[:, 1:] &= trunk_ends[:, 1:] != trunk_ends[:, :-1]
    start = torch.where(first, index, 0).cummax(1).values
    part = (torch.where(tops, index, 0).cummax(1).values - start) // GROUP
    first[:, 1:] |= valid[:, 1:] & (part[:, 1:] != part[:, :-1])
    group = (first.cumsum(1) - 1).clamp(min=0)
    within = index - torch.where(first, index, 0).cummax(1).values
    P, m = int(group.max()) + 1, int(torch.where(valid, within, 0).max()) + 1
    group = torch.where(valid, group, P)  # padding goes to a row that is cut off
    roots = trunk_ends.new_full((B, P + 1), -1).scatter_(1, group, trunk_ends)[:, :P]
    groups = index.new_full((B, (P + 1) * m), -1)
    groups.scatter_(1, group * m + torch.where(valid, within, 0), index)
    return roots, groups.view(B, P + 1, m)[:, :P]


def _merged_nodes(tokens, lengths, chains, ends, usable) -> tuple[Tensor, dict]:
    """The trie, by sorting: rows with a common beginning are neighbours once sorted, so a node is
    new exactly where a sorted row first differs from the row before it. One sort per column, no
    Python trie."""
    B, R, E = chains.shape
    T = tokens.shape[1]
    depth = torch.arange(E, device=chains.device)
    # 1. how far each chain repeats the trunk, and where it leaves it
    # (B, R, E) the trunk position each chain token would lie on
    trunk_at = ends[..., None] + 1 + depth
    repeats = tokens.gather(1, trunk_at.clamp(0, T - 1).flatten(1)).view(B, R, E) == chains
    repeats &= usable & (trunk_at < lengths.clamp(max=T)[:, None, None])
    run = repeats.cumprod(-1).sum(-1)  # (B, R)
    leaves = ends + run
    # 2. what is left of it off the trunk, shifted to depth 0; -1 behind its end
    source = run[..., None] + depth
    inside = source < E
    source = source.clamp(max=max(E - 1, 0))
    off = torch.where(inside & usable.gather(2, source), chains.gather(2, source), -1)  # (B, R, E)
    # 3. sort rows by (leaves, off_0, off_1, ...)
    columns = torch.cat([leaves[..., None], off], -1)
    order = torch.arange(R, device=chains.device).expand(B, R)
    for column in reversed(columns.unbind(-1)):
        order = order.gather(1, column.gather(1, order).argsort(dim=1, stable=True))
    ordered = columns.gather(1, order[..., None].expand_as(columns))
    # 4. a node wherever something new begins; later rows of the same beginning point to it
    differs = torch.ones_like(ordered, dtype=torch.bool)
    differs[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    fresh = differs.cummax(-1).values[..., 1:] & (ordered[..., 1:] >= 0)  # (B, R, E)
    index = (fresh.flatten(1).cumsum(1) - 1).view(B, R, E)
    # (B, R, E) node of each sorted row and depth
    owner = torch.where(fresh, index, -1).cummax(1).values
    N = int(fresh.flatten(1).sum(1).max()) if fresh.numel() else 0
    ordered_leaves = ordered[..., :1].expand(B, R, E)
    above = torch.cat([ordered_leaves[..., :1], T + owner[..., :-1]], -1)[..., :E]
    where = torch.where(fresh, index, N).flatten(1)

    def table(values: Tensor, fill: int) -> Tensor:  # (B, R, E) -> (B, N), each node's own entry
        out = values.new_full((B, N + 1), fill)
        return out.scatter_(1, where, values.flatten(1))[:, :N]

    fields = dict(
        tokens=table(ordered[..., 1:], 0),
        parents=table(above, -1),
        positions=table(ordered_leaves + 1 + depth, 0),
        trunk_ends=table(ordered_leaves, -1),
        valid=torch.arange(N, device=chains.device) < fresh.flatten(1).sum(1, keepdim=True),
    )
    # 5. back to the order of the branches: chain token i lies on the trunk or is off-trunk token i
    # - run
    inverse = order.argsort(dim=1)
    nodes = owner.gather(1, inverse[..., None].expand_as(owner))
    nodes = nodes.gather(2, (depth - run[..., None]).clamp(min=0))
    return torch.where(depth < run[..., None], trunk_at, T + nodes), fields


def block_ends(view: View, r: int) -> tuple[Tensor, Tensor]:
    """Where a text's blocks of r positions end, for sparse attention: packed indices (M,), and
    which of them end a block of whose history (B,N,M).

    Blocks wholly on the trunk end on the trunk and are shared; one that straddles an anchor or lies
    inside a branch ends at a node, and only that node and its descendants have it (paper:
    branch-consistent indexer groups).
    """
    T, N = view.num_trunk_slots, view.positions.shape[1]
    text = T + N if view.groups is None else T  # packed index = position up to here
    device = view.positions.device
    slots = torch.arange(r - 1, max(text, r - 1), r, device=device)
    ends = torch.ones(1, len(slots), dtype=torch.bool, device=device)
    if view.groups is not None:
        slots = torch.cat([slots, torch.arange(T, T + N, device=device)])
        inner = (view.positions + 1) % r == 0
        ends = torch.cat([ends.expand(len(inner), -1), inner], 1)
    return slots, view.visible()[:, 0, :, slots] & ends[:, None]


def highest(scores: Tensor, count: int) -> Tensor:
    """Marks the `count` highest of scores (B,N,M), -inf = not to be had; of equal ones the
    earlier."""
    if scores.shape[-1] <= count:
        return scores > -torch.inf
    edge = scores.topk(count, -1).values[..., -1:]
    above, equal = scores > edge, (scores == edge) & (scores > -torch.inf)
    left = count - above.sum(-1, keepdim=True)
    return above | equal & (equal.cumsum(-1) <= left)


def block_mask(chosen: Tensor, view: View, r: int) -> Tensor:
    """From chosen blocks (B,N,M), see `block_ends`, to the tokens (B,1,N,T+N): those of the blocks,
    and those of the history's incomplete last block."""
    B, N, M = chosen.shape
    T, tree = view.num_trunk_slots, view.groups is not None
    on_text = M - N if tree else M
    mask = chosen.new_zeros(B, N, T + N + 1)  # the last column takes what is to be dropped
    mask[..., : on_text * r] = chosen[..., :on_text].repeat_interleave(r, -1)
    history = torch.stack([view.ancestor(d) for d in range(max(view.max_depth + r - 1, 1))], -1)
    depth = torch.arange(history.shape[-1], device=chosen.device)
    picked = depth < ((view.positions + 1) % r)[..., None]  # (B, N, depth) the last block
    if tree:  # blocks that end at a node: it and the r - 1 tokens before it
        nodes = history[..., : view.max_depth] - T
        own = chosen[..., on_text:].gather(2, nodes.clamp(min=0)) & (nodes >= 0)
        for shift in range(r):
            picked[..., shift : shift + view.max_depth] |= own
    slots = torch.where(picked, history, T + N)
    return (mask.scatter(2, slots, True)[..., :-1] & view.visible()[:, 0])[:, None]


def block_view(
    anchors: Tensor, block: int, num_context: int, window: int = 0, causal: bool = False, held=None
) -> View:
    """What a drafter's block tokens see: context positions strictly before their anchor (those less
    than `window` before the token itself, if there is one), and their own block, both ways or back
    alone. By POSITION, never by block number. anchors (B,A), -1 = absent (sees only itself); held
    (B,S): the positions that context slots hold, where it is not their number."""
    B, A = anchors.shape
    positions = anchors.clamp(min=0)[..., None] + torch.arange(block, device=anchors.device)
    slots = torch.arange(num_context, device=anchors.device) if held is None else held[:, None]
    context = (slots < anchors[..., None]).repeat_interleave(block, 1)  # (B, A*b, T)
    context = context & (slots >= 0)
    if window:
        context = context & (slots > positions.flatten(1)[..., None] - window)
    own = torch.arange(A, device=anchors.device).repeat_interleave(block)
    same = own[:, None] == own
    same = (same.tril() if causal else same).expand(B, -1, -1)  # (B, A*b, A*b)
    mask = torch.cat([context, same], -1)[:, None]
    return View(positions.flatten(1), positions.flatten(1) - 1, num_context, mask)


def draw_anchors(seed, step, sequence_ids, prompt_lengths, lengths, shape, chances=None) -> tuple:
    """Anchors and the uniforms that will choose the branches, from (seed, step, sequence id) alone.

    shape = (A, K, W) -> anchors (B,A) ascending, -1 = absent; uniforms (B,A,K,W) in [0, 1); weights
    None. Anchors are drawn from the first response token to the second to last, without replacement
    or in proportion to `chances` (B,T) with it; weights (B,A) then make up for that.
    """
    A, K, W = shape
    anchors = torch.full((len(sequence_ids), A), -1)
    uniforms = torch.empty(len(sequence_ids), A, K, W)
    weights = None if chances is None else torch.zeros(len(sequence_ids), A)
    for row, identity in enumerate(sequence_ids):
        mixed = (seed * 1_000_003 + step) * 1_000_003 + int(identity)
        generator = torch.Generator().manual_seed(mixed % (2**63 - 1))
        first, last = int(prompt_lengths[row]), int(lengths[row]) - 1
        picked = torch.randperm(max(last - first, 0), generator=generator)[:A].sort().values
        if chances is not None and last > first:
            here = chances[row, first:last]
            picked = torch.multinomial(here, A, True, generator=generator).sort().values
            weights[row] = here.mean() / here[picked] * min(last - first, A) / A
        anchors[row, : len(picked)] = first + picked
        uniforms[row] = torch.rand(A, K, W, generator=generator)
    return anchors, uniforms, weights


def main():
    trunk, lengths, anchors = (torch.tensor(x) for x in ([[*range(10, 20)]], [10], [[3, 3, 4]]))
    branches = torch.tensor([[[[14, 50, 51, 52]], [[60, 61, 62, 63]], [[50, 51, 70, 71]]]])
    print(f"trunk      {trunk[0].tolist()}   (positions 0..9)")
    for anchor, branch in zip(anchors[0].tolist(), branches[0, :, 0].tolist()):
        print(f"branch at {anchor}: {branch}")
    for merge in (False, True):
        tree = build_tree(trunk, lengths, anchors, branches, merge=merge)
        T, view = tree.num_trunk_slots, tree.view()
        above, (ends, seen) = tree.ancestors(4)[0].tolist(), block_ends(view, 2)
        print(f"\nmerge={merge}: {tree.num_nodes} nodes (packed index = {T} + node)")
        print(" node token parent position   sees trunk|nodes       ancestors         blocks of 2")
        for n in range(tree.num_nodes):
            row = "".join(" ■"[v] for v in view.mask[0, 0, n].int())
            fields = (f[0, n].item() for f in (tree.tokens, tree.parents, tree.positions))
            shown = "{:5d} {:6d} {:8d}   ".format(*fields) + f"{row[:T]}|{row[T:]}   {above[n]}"
            print(f"{n:5d} {shown}   end at {ends[seen[0, n]].tolist()}")
        for branch, places in enumerate(tree.slots[0, :, 0, :-1].tolist()):
            print(f" p_1..p_4 of branch {branch} come from packed indices {places}")
        for root, group in zip(tree.roots[0].tolist(), tree.groups[0].tolist()):
            print(f" recurrent state after trunk token {root} serves nodes {group}")
    print("\nMerged: branch 0 repeats the trunk at 14, then shares 50, 51 with branch 2.")


if __name__ == "__main__":
    main()
