"""The proposal tree: the history of every drafted token, written as tables.

Many branches y_1..y_W, each drafted at an anchor a of one trunk x_0..x_{T-1}, are scored in one
pass of the target. Each node of the tree must get exactly the numbers that the target would give
if the node's history x_{<=a}, y_1..y_k stood alone. So a node sees the trunk up to the position
where its history leaves it, and its own ancestors, itself included; nothing else.

    packed index   trunk position t -> t, node n -> T + n, nothing -> -1
    parents        (B, N)          packed index of the token before the node IN ITS HISTORY
    positions      (B, N)          depth in the sequence, not the index in the packed tensor
    p_index        (B, A, K, W+1)  packed index of the token whose hidden state gives p_1..p_{W+1}

p_1 comes from the trunk's own hidden state at a, and y_W needs no node in training: at most W - 1
nodes per branch. With `merge` (beyond the paper, the same p) the branches form one trie over the
trunk and all anchors: a branch lies on the trunk while it repeats the trunk, and branches with
equal histories share nodes. A prefill is the tree in which each token follows the one before it;
a decoding round is the tree with one branch.

    python tree.py              ten trunk tokens, three branches, and all of these tables
    pytest tests/test_tree.py
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

MAX_GROUP = 64  # a root with more nodes is cut into groups of about this size (replay.py)


@dataclass
class View:
    """The past of N tokens, as a layer may see it. A layer learns of the tree only through this.

    Without groups it is the view of a *stretch of text*: each token follows the one before it, and
    packed index = position. (A drafter's blocks have a View without groups too; layers read only
    its positions, T and mask.) With groups the tokens are the nodes of a tree, grouped by the trunk
    position at which their histories leave the trunk (the root)."""

    positions: Tensor  # (B, N) int64, depth of each token in its own sequence
    parents: Tensor  # (B, N) packed index of the token before it, -1 for none
    num_trunk_slots: int = 0  # T
    mask: Tensor | None = None  # (B, 1, N, T+N) bool, True = visible (model.py has another form);
    # None = causal: token i sees all of the T older ones, and the first i + 1 of the N
    valid: Tensor | None = None  # (B, N) bool, False = padding; None = every token counts
    roots: Tensor | None = None  # (B, P) trunk position of each group, -1 for the start
    groups: Tensor | None = None  # (B, P, m) node numbers, -1 after the last
    last_descendants: Tensor | None = None  # (B, N) of a tree, see `descends`
    max_depth: int = 0  # of a tree: no chain has more nodes
    checkpoint_tokens: tuple[int, ...] = ()  # of a stretch of text: keep the state after these
    # of a tree, made by the first linear layer (replay.py) for all of them
    longest_replay: int | None = None
    seen_in_groups: Tensor | None = None  # (B, P, m, m)
    _ancestors: list[Tensor] = field(default_factory=list)

    def descends(self, node: Tensor, other: Tensor) -> Tensor:
        """Whether nodes (B,...) of a tree are others (B,...) or descend from them. Nodes come in
        depth-first order, so a node's descendants are those right after it, up to the last."""
        rows = torch.arange(len(other), device=other.device).view(-1, *(1,) * (other.dim() - 1))
        return (other <= node) & (node <= self.last_descendants[rows, other])

    def ancestor(self, depth: int) -> Tensor:
        """Packed index (B,N): 0 = the token itself, 1 = its parent, ...; -1 before the start."""
        T = self.num_trunk_slots
        if not self._ancestors:
            B, N = self.parents.shape
            itself = torch.arange(T, T + N, device=self.parents.device).expand(B, N)
            self._ancestors.append(itself)
        while len(self._ancestors) <= depth:
            last = self._ancestors[-1]
            above = (last - 1).clamp(min=-1)  # on the trunk: the position before
            if self.groups is not None:
                parents = self.parents.gather(1, (last - T).clamp(min=0))
                above = torch.where(last >= T, parents, above)
            self._ancestors.append(above)
        return self._ancestors[depth]

    def visible(self) -> Tensor:
        """The mask (B,1,N,T+N), written out where it was implied."""
        if self.mask is None:
            N = self.positions.shape[1]
            self.mask = causal_mask(self.num_trunk_slots, N, self.positions.device)
        return self.mask


def causal_mask(T: int, N: int, device=None) -> Tensor:
    """(1, 1, N, T+N): each of N tokens sees T older ones, those of the N before it, and itself."""
    ones = torch.ones(N, T + N, dtype=torch.bool, device=device)
    return ones.tril(T)[None, None]


def causal_view(
    B: int, N: int, device=None, T: int = 0, valid: Tensor | None = None, checkpoint_tokens=()
) -> View:
    """The view of a prefill, or of its next N tokens after T others."""
    positions = torch.arange(T, T + N, device=device).expand(B, N)
    return View(positions, positions - 1, T, None, valid, checkpoint_tokens=checkpoint_tokens)


def gather_slots(values: Tensor, index: Tensor) -> Tensor:
    """values (B,T,...) at index (B,P) -> (B,P,...)."""
    return values[torch.arange(len(values), device=values.device)[:, None], index]


def write_slots(cache: Tensor, new: Tensor, slots: Tensor) -> None:
    """Write new (B,P,...) into cache (B,S,...) at slots (B,P), in place."""
    rows = torch.arange(len(cache), device=cache.device)[:, None]
    cache[rows, slots] = new.to(cache.dtype)


def gather_history(past: Tensor | None, new: Tensor, index: Tensor, T, base=0) -> Tensor:
    """Entries (B,P,...) at packed index (B,P); zero where the index is negative.

    An index from T on reads new (B,N,...). An index below T reads past (B,S,...), whose slot 0 is
    position `base`. T and base are numbers or (B,1)."""

    def match(condition: Tensor) -> Tensor:  # (B, P) -> (B, P, 1, ...)
        return condition.view(*condition.shape, *(1,) * (new.dim() - 2))

    entries = gather_slots(new, (index - T).clamp(0, new.shape[1] - 1))
    if past is not None:
        older = gather_slots(past, (index - base).clamp(0, past.shape[1] - 1)).to(new.dtype)
        entries = torch.where(match(index >= T), entries, older)
    return torch.where(match(index >= 0), entries, 0)


def with_room(cache: Tensor, width: int) -> Tensor:
    """cache (B,S,...) with at least `width` slots. New slots are zero: a masked slot is multiplied
    by its weight 0, and 0 times NaN would be NaN."""
    missing = width - cache.shape[1]
    if missing <= 0:
        return cache
    return torch.cat([cache, cache.new_zeros(len(cache), missing, *cache.shape[2:])], 1)


# ----------------------------------------------------------------------------------------- the tree


@dataclass
class ProposalTree:
    """N nodes on T trunk slots. Rows with fewer nodes end in padding (`valid` False)."""

    tokens: Tensor  # (B, N)
    parents: Tensor  # (B, N) packed index, -1 for none
    positions: Tensor  # (B, N)
    trunk_ends: Tensor  # (B, N) the last trunk position in the node's history, -1 for none
    valid: Tensor  # (B, N) bool
    p_index: Tensor  # (B, A, K, W+1) packed index of what gives p_1..p_{W+1}, -1 = not needed
    roots: Tensor  # (B, P) the trunk positions at which histories leave the trunk, -1 = the start
    groups: Tensor  # (B, P, m) the nodes of each root, -1 after the last
    num_trunk_slots: int  # T
    max_depth: int  # no chain has more nodes
    anchor_is_node: bool = False  # True: a decoding round's chain, p_index has nodes only (or -1)

    @property
    def num_nodes(self) -> int:
        """Nodes that are really scored in the whole batch, without padding."""
        return int(self.valid.sum())

    def ancestors(self, depth: int) -> Tensor:
        """Packed indices (B,N,depth): the node itself, its parent, ...; -1 before the start."""
        view = self.view()
        return torch.stack([view.ancestor(d) for d in range(depth)], -1)

    def view(self, mask: bool = True) -> View:
        """The tree as layers see it: the trunk up to `trunk_ends`, and the ancestors. mask=False
        leaves the mask to the caller."""
        B, N = self.parents.shape
        T = self.num_trunk_slots
        view = View(self.positions, self.parents, T, None, self.valid, self.roots, self.groups)
        view.max_depth = self.max_depth
        numbers = torch.arange(N, device=self.parents.device).expand(B, N)
        nodes = torch.stack([view.ancestor(d) for d in range(self.max_depth)], -1) - T
        nodes = torch.where(nodes >= 0, nodes, N).flatten(1)  # trunk or nothing: a slot cut off
        last = numbers.new_zeros(B, N + 1)
        last.scatter_reduce_(1, nodes, numbers.repeat_interleave(self.max_depth, 1), "amax")
        view.last_descendants = last[:, :N]
        if mask:
            trunk_slots = torch.arange(T, device=self.parents.device)
            on_trunk = trunk_slots <= self.trunk_ends[..., None]  # (B, N, T)
            among_nodes = view.descends(numbers[..., None], numbers[:, None])  # (B, N, N)
            view.mask = torch.cat([on_trunk, among_nodes], -1)[:, None]  # (B, 1, N, T+N)
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

    tokens (B,T) · lengths (B,): trunk tokens already run, T >= every anchor + 1 · anchors (B,A):
    positions, -1 = absent · branches (B,A,K,W): -1 after the last valid token.
    include_anchor=True is the chain of a decoding round: the anchor at position `lengths` is
    committed but not yet run, so it becomes a node, and so does y_W, whose hidden state gives the
    bonus distribution p_{W+1}."""
    B, A, K, W = branches.shape
    if tokens.dim() != 2 or anchors.shape != (B, A) or lengths.shape != (B,):
        shapes = [tuple(t.shape) for t in (tokens, lengths, anchors, branches)]
        raise ValueError(f"shapes {shapes} do not fit (B,T), (B,), (B,A), (B,A,K,W)")
    T = tokens.shape[1]
    chains, ends, needs_node = _chains(tokens, anchors, branches, include_anchor)
    if merge:
        # a decoding round's chain starts at the trunk's end: there is no trunk after it to repeat
        repeatable = torch.zeros_like(lengths) if include_anchor else lengths
        chain_index, nodes = _merged_nodes(tokens, repeatable, chains, ends, needs_node)
    else:
        chain_index, nodes = _private_nodes(chains, ends, needs_node, T)
    chain_index = torch.where(needs_node, chain_index, -1)  # (B, R, E)
    if not nodes["tokens"].shape[1]:  # one node of padding, so that no dimension is 0
        padding = dict(tokens=0, parents=-1, positions=0, trunk_ends=-1, valid=False)
        nodes = {name: nodes[name].new_full((B, 1), fill) for name, fill in padding.items()}
    if merge or not chains.shape[-1]:
        top = nodes["parents"] < T
        roots, groups = _group_by_root(nodes["trunk_ends"], nodes["valid"], top)
    else:  # the nodes of an anchor's private chains lie side by side already
        roots = ends.view(B, A, K)[..., 0].clamp(min=-1)
        numbers = torch.arange(nodes["tokens"].shape[1], device=tokens.device)
        groups = numbers.view(1, A, -1).expand(B, -1, -1)
    if include_anchor:
        p_index = chain_index  # p_1 from the anchor's node, p_{W+1} from y_W's
    else:  # p_1 from the trunk at the anchor; p_{W+1} is not needed
        starts = (anchors >= 0).repeat_interleave(K, 1) & (branches.view(B, A * K, W)[..., 0] >= 0)
        first = torch.where(starts, ends, -1)[..., None]  # (B, R, 1)
        p_index = torch.cat([first, chain_index, torch.full_like(first, -1)], -1)
    return ProposalTree(
        **nodes,
        p_index=p_index.view(B, A, K, W + 1),
        roots=roots,
        groups=groups,
        num_trunk_slots=T,
        max_depth=max(chains.shape[-1], 1),
        anchor_is_node=include_anchor,
    )


def _chains(tokens, anchors, branches, include_anchor: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The R = A*K chains of tokens that may need a node: tokens (B,R,E), the trunk position (B,R)
    that each chain follows, and which tokens do need one (B,R,E)."""
    B, A, K, W = branches.shape
    rows = branches.reshape(B, A * K, W)
    present = (anchors >= 0).repeat_interleave(K, 1)[..., None]  # (B, R, 1)
    ends = anchors.repeat_interleave(K, 1)  # (B, R)
    if include_anchor:
        first = tokens.gather(1, anchors.clamp(min=0)).repeat_interleave(K, 1)  # (B, R)
        chains = torch.cat([first[..., None], rows], -1)
        return chains, ends - 1, present & (chains >= 0).cummin(-1).values
    chains = rows[..., : W - 1]
    if not chains.shape[-1]:
        return chains, ends, chains >= 0
    # y_k needs a node only where p_{k+1} is wanted, that is where y_{k+1} is valid
    needs_node = present & (chains >= 0).cummin(-1).values & (rows[..., 1:] >= 0)
    return chains, ends, needs_node


def _private_nodes(chains: Tensor, ends: Tensor, needs_node: Tensor, T: int) -> tuple[Tensor, dict]:
    """One node per chain token -> packed indices (B,R,E), and the nodes' fields (B,R*E)."""
    B, R, E = chains.shape
    depth = torch.arange(E, device=chains.device)
    index = T + torch.arange(R * E, device=chains.device).view(1, R, E).expand(B, R, E)
    parents = torch.where(depth == 0, ends[..., None], index - 1)
    nodes = dict(
        tokens=torch.where(needs_node, chains, 0),
        parents=torch.where(needs_node, parents, -1),
        positions=torch.where(needs_node, ends[..., None] + 1 + depth, 0),
        trunk_ends=torch.where(needs_node, ends[..., None].expand(B, R, E), -1),
        valid=needs_node,
    )
    return index, {name: values.reshape(B, R * E) for name, values in nodes.items()}


# ------------------------------------------------------------------------------------------ merging


def _merged_nodes(tokens, lengths, chains, ends, needs_node) -> tuple[Tensor, dict]:
    """Build the trie by sorting -> packed indices (B,R,E), and the nodes' fields (B,N).

    Rows that begin alike are neighbours once they are sorted. So a node is new exactly where a
    sorted row first differs from the row before it. One sort per column, no Python trie."""
    B, R, E = chains.shape
    T = tokens.shape[1]
    depth = torch.arange(E, device=chains.device)
    trunk_slots = ends[..., None] + 1 + depth  # (B, R, E) where a token would lie on the trunk
    run = _length_on_trunk(tokens, lengths, chains, trunk_slots, needs_node)  # (B, R)
    leaves = ends + run  # the trunk position at which a chain leaves the trunk
    off_trunk = _without_first(chains, needs_node, run)  # (B, R, E), -1 after a chain's end

    columns = torch.cat([leaves[..., None], off_trunk], -1)  # (B, R, 1+E)
    order = _lexicographic_order(columns)
    ordered = columns.gather(1, order[..., None].expand_as(columns))
    differs = torch.ones_like(ordered, dtype=torch.bool)
    differs[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    is_new = differs.cummax(-1).values[..., 1:] & (ordered[..., 1:] >= 0)  # (B, R, E) new nodes

    counts = is_new.flatten(1).sum(1, keepdim=True)  # (B, 1)
    N = int(counts.max()) if is_new.numel() else 0
    number = (is_new.flatten(1).cumsum(1) - 1).view(B, R, E)
    node_of = torch.where(is_new, number, -1).cummax(1).values  # of each sorted row and depth
    ordered_leaves = ordered[..., :1].expand(B, R, E)
    parents = torch.cat([ordered_leaves[..., :1], T + node_of[..., :-1]], -1)[..., :E]
    column = torch.where(is_new, number, N).flatten(1)  # column N is cut off

    def per_node(values: Tensor, fill: int) -> Tensor:  # (B, R, E) -> (B, N)
        out = values.new_full((B, N + 1), fill)
        return out.scatter_(1, column, values.flatten(1))[:, :N]

    nodes = dict(
        tokens=per_node(ordered[..., 1:], 0),
        parents=per_node(parents, -1),
        positions=per_node(ordered_leaves + 1 + depth, 0),
        trunk_ends=per_node(ordered_leaves, -1),
        valid=torch.arange(N, device=chains.device) < counts,
    )
    # back to the order of the branches: token i lies on the trunk, or is off-trunk token i - run
    inverse = order.argsort(dim=1)
    node_of = node_of.gather(1, inverse[..., None].expand_as(node_of))
    node_of = node_of.gather(2, (depth - run[..., None]).clamp(min=0))
    return torch.where(depth < run[..., None], trunk_slots, T + node_of), nodes


def _length_on_trunk(tokens, lengths, chains, trunk_slots, needs_node) -> Tensor:
    """How many tokens at the beginning of each chain repeat the trunk: (B,R)."""
    B, R, E = chains.shape
    T = tokens.shape[1]
    there = tokens.gather(1, trunk_slots.clamp(0, T - 1).flatten(1)).view(B, R, E)
    repeats = (there == chains) & needs_node & (trunk_slots < lengths.clamp(max=T)[:, None, None])
    return repeats.cumprod(-1).sum(-1)


def _without_first(chains: Tensor, needs_node: Tensor, run: Tensor) -> Tensor:
    """chains (B,R,E) without their first `run` (B,R) tokens, moved to depth 0; -1 after the end."""
    E = chains.shape[-1]
    source = run[..., None] + torch.arange(E, device=chains.device)
    inside = source < E
    source = source.clamp(max=max(E - 1, 0))
    return torch.where(inside & needs_node.gather(2, source), chains.gather(2, source), -1)


def _lexicographic_order(columns: Tensor) -> Tensor:
    """The order (B,R) of the rows of columns (B,R,n), by the first column, then the second, ..."""
    B, R, _ = columns.shape
    order = torch.arange(R, device=columns.device).expand(B, R)
    for column in reversed(columns.unbind(-1)):
        order = order.gather(1, column.gather(1, order).argsort(dim=1, stable=True))
    return order


def _group_by_root(trunk_ends: Tensor, valid: Tensor, top: Tensor) -> tuple[Tensor, Tensor]:
    """Group nodes (B,N) by trunk end -> roots (B,P), groups (B,P,m). The nodes come sorted by it.

    The work on a group grows with the square of m. So a group of more than MAX_GROUP nodes is cut
    where a subtree begins; `top` marks the nodes right after the trunk."""
    B, N = trunk_ends.shape
    index = torch.arange(N, device=valid.device).expand(B, N)
    first = valid.clone()  # the first node of a group
    first[:, 1:] &= trunk_ends[:, 1:] != trunk_ends[:, :-1]
    start = torch.where(first, index, 0).cummax(1).values
    part = (torch.where(top, index, 0).cummax(1).values - start) // MAX_GROUP
    first[:, 1:] |= valid[:, 1:] & (part[:, 1:] != part[:, :-1])
    group = (first.cumsum(1) - 1).clamp(min=0)
    rank = index - torch.where(first, index, 0).cummax(1).values  # number in its group
    # read together: on a GPU the host waits for each read
    largest = torch.stack([group.max(), torch.where(valid, rank, 0).max()])
    P, m = (largest + 1).tolist()
    group = torch.where(valid, group, P)  # padding goes to a row that is cut off
    roots = trunk_ends.new_full((B, P + 1), -1).scatter_(1, group, trunk_ends)[:, :P]
    groups = index.new_full((B, (P + 1) * m), -1)
    groups.scatter_(1, group * m + torch.where(valid, rank, 0), index)
    return roots, groups.view(B, P + 1, m)[:, :P]


# ------------------------------------------------------------------------------------------- lesson


def lesson_tree(merge: bool) -> tuple[Tensor, Tensor, Tensor, ProposalTree]:
    """Ten trunk tokens and three branches of four -> trunk, anchors, branches, the tree."""
    trunk = torch.arange(10, 20)[None]
    anchors = torch.tensor([[3, 3, 4]])
    branches = torch.tensor([[[[14, 50, 51, 52]], [[60, 61, 62, 63]], [[50, 51, 70, 71]]]])
    return trunk, anchors, branches, build_tree(trunk, torch.tensor([10]), anchors, branches, merge)


def main():
    trunk, anchors, branches, _ = lesson_tree(False)
    print(f"trunk       {trunk[0].tolist()}   (positions 0..9)")
    for anchor, branch in zip(anchors[0].tolist(), branches[0, :, 0].tolist()):
        print(f"branch at {anchor} {branch}")
    for merge in (False, True):
        tree = lesson_tree(merge)[-1]
        T = tree.num_trunk_slots
        mask = tree.view().mask[0, 0].int().tolist()
        ancestors = tree.ancestors(4)[0].tolist()
        print(f"\nmerge={merge}: {tree.num_nodes} nodes, packed index = {T} + node")
        print(" node token parent position   sees trunk|nodes       itself, parent, ...")
        for n in range(tree.num_nodes):
            sees = "".join(" ■"[v] for v in mask[n])
            numbers = (t[0, n].item() for t in (tree.tokens, tree.parents, tree.positions))
            print(f"{n:5d} {{:5d}} {{:6d}} {{:8d}}   ".format(*numbers), end="")
            print(f"{sees[:T]}|{sees[T:]}   {ancestors[n]}")
        for branch, index in enumerate(tree.p_index[0, :, 0, :-1].tolist()):
            print(f" p_1..p_4 of branch {branch} come from packed indices {index}")
        for root, group in zip(tree.roots[0].tolist(), tree.groups[0].tolist()):
            print(f" the recurrent state after trunk position {root} serves nodes {group}")
    print("\nMerged: branch 0 repeats the trunk at 14, then shares 50, 51 with branch 2.")


if __name__ == "__main__":
    main()
