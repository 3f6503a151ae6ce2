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
equal histories share nodes. The last trunk position in a node's history is its *root*; without
merging it is the anchor. A prefill is the tree in which each token follows the one before it;
a decoding round is the tree with one branch.

    python tree.py              ten trunk tokens, three branches, and all of these tables
    pytest tests/test_tree.py
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

PADDING_THAT_COSTS = 0.25  # a share of the tokens; less is computed with the others
MAX_GROUP = 64  # a root with more nodes is cut into groups of about this size (replay.py)


@dataclass
class View:
    """The past of N tokens, as a layer may see it. A layer learns of the tree only through this.

    Without groups it is the view of a *stretch of text*: each token follows the one before it, and
    packed index = position. (A drafter's blocks have a View without groups too; layers read only
    its positions, T and mask.) With groups the tokens are the nodes of a tree, grouped by root."""

    positions: Tensor  # (B, N) int64, depth of each token in its own sequence
    parents: Tensor  # (B, N) packed index of the token before it, -1 for none
    num_trunk_slots: int = 0  # T
    # (B, 1, N, T+N) bool, True = visible, or another form of it (`tree_view` of model.py);
    # None = causal: token i sees all of the T older ones, and the first i + 1 of the N
    mask: Tensor | None = None
    valid: Tensor | None = None  # (B, N) bool, False = padding; None = every token counts
    real: Tensor | None = None  # (M,) the tokens that are worth computing alone, see `real_rows`
    group_roots: Tensor | None = None  # (B, P) the root of each group, -1 for the start
    groups: Tensor | None = None  # (B, P, m) node numbers, -1 after the last
    last_descendants: Tensor | None = None  # (B, N) of a tree, see `descends`
    max_depth: int = 0  # of a tree: no chain has more nodes
    checkpoint_tokens: tuple[int, ...] = ()  # of a stretch of text: keep the state after these
    # of a tree, made by the first linear layer (replay.py) for all of them
    longest_replay: int | None = None
    seen_in_groups: Tensor | None = None  # (B, P, m, m)
    _ancestors: list[Tensor] = field(default_factory=list)

    @property
    def is_tree(self) -> bool:
        return self.groups is not None

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
            if self.is_tree:
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


# -------------------------------------------------------------------------- without the padding


def real_rows(valid: Tensor) -> Tensor | None:
    """The numbers (M,), b*N + n, of the tokens that are no padding (True in valid (B,N)), if it
    pays to compute these alone. None: it does not, or there are none, or a GPU would make the host
    wait for M."""
    if not valid.is_cpu:
        return None
    real = valid.flatten().nonzero()[:, 0]
    return real if 0 < len(real) <= (1 - PADDING_THAT_COSTS) * valid.numel() else None


def on_real(module, x: Tensor, real: Tensor | None) -> Tensor:
    """module(x) of x (B,N,C), which treats each token alone. With `real` (see `real_rows`) only
    these tokens are computed; the others get 0."""
    if real is None:
        return module(x)
    rows = x.flatten(0, 1)
    out = module(rows[real])
    return out.new_zeros(len(rows), out.shape[-1]).index_copy(0, real, out).view(*x.shape[:2], -1)


# ------------------------------------- caches: tensors (B, S, ...) with one slot per trunk position


def gather_slots(values: Tensor, index: Tensor) -> Tensor:
    """values (B,S,...) at index (B,P) -> (B,P,...)."""
    return values[torch.arange(len(values), device=values.device)[:, None], index]


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


def first_slots(cache: Tensor, T: int, num_used: int) -> Tensor:
    """The cache with at least T slots, of which num_used are in use. If these are more, it is cut
    to T slots, so that nothing new is written over them."""
    cache = with_room(cache, T)
    return cache[:, :T] if T < num_used else cache


def with_room(cache: Tensor, num_slots: int) -> Tensor:
    """The cache with at least so many slots. New slots are zero: a masked slot is multiplied by its
    weight 0, and 0 times NaN would be NaN."""
    missing = num_slots - cache.shape[1]
    if missing <= 0:
        return cache
    return torch.cat([cache, cache.new_zeros(len(cache), missing, *cache.shape[2:])], 1)


def write_slots(cache: Tensor, new: Tensor, slots: Tensor) -> None:
    """Write new (B,P,...) into the cache at slots (B,P), in place."""
    rows = torch.arange(len(cache), device=cache.device)[:, None]
    cache[rows, slots] = new.to(cache.dtype)


def write_after(cache: Tensor | None, new: Tensor, num_slots: int) -> Tensor:
    """The first num_slots slots of the cache, then new (B,N,...): (B, num_slots + N, ...). If there
    is room, new is written into the cache, where it counts as unused until a commit."""
    if cache is None:
        return new
    end = num_slots + new.shape[1]
    if cache.shape[1] < end:
        return torch.cat([cache[:, :num_slots], new], 1)
    cache[:, num_slots:end] = new
    return cache[:, :end]


def write_path(cache, new, path: Tensor, lengths: Tensor, width: int) -> Tensor | None:
    """Write the tokens of new (B,N,...) at indices path (B,P) into the cache, after lengths (B,)
    -> the cache, with at least `width` slots."""
    if cache is None or new is None:
        return cache
    if cache.shape[1] < width:  # more than was reserved: double it
        cache = with_room(cache, 2 * width)
    slots = lengths[:, None] + torch.arange(path.shape[1], device=path.device)
    write_slots(cache, gather_slots(new, path.clamp(min=0)), slots)
    return cache


# ----------------------------------------------------------------------------------------- the tree


@dataclass
class ProposalTree:
    """N nodes on T trunk slots. Rows with fewer nodes end in padding (`valid` False)."""

    tokens: Tensor  # (B, N)
    parents: Tensor  # (B, N) packed index, -1 for none
    positions: Tensor  # (B, N)
    roots: Tensor  # (B, N) the last trunk position in the node's history, -1 for none
    valid: Tensor  # (B, N) bool
    p_index: Tensor  # (B, A, K, W+1) packed index of what gives p_1..p_{W+1}, -1 = not needed
    groups: Tensor  # (B, P, m) nodes of one root, -1 after the last
    group_roots: Tensor  # (B, P)
    num_trunk_slots: int  # T
    max_depth: int  # no chain has more nodes
    include_anchor: bool = False  # True: a decoding round's chain, p_index has nodes only (or -1)

    @property
    def num_nodes(self) -> int:
        """Nodes that are really scored in the whole batch, without padding."""
        return int(self.valid.sum())

    def ancestors(self, depth: int) -> Tensor:
        """Packed indices (B,N,depth): the node itself, its parent, ...; -1 before the start."""
        view = self.view()
        return torch.stack([view.ancestor(d) for d in range(depth)], -1)

    def view(self, mask: bool = True) -> View:
        """The tree as layers see it: the trunk up to the root, and the ancestors. mask=False leaves
        the mask to the caller."""
        B, N = self.parents.shape
        T = self.num_trunk_slots
        view = View(self.positions, self.parents, T, valid=self.valid, max_depth=self.max_depth)
        view.real = real_rows(self.valid)
        view.groups = self.groups
        view.group_roots = self.group_roots
        numbers = torch.arange(N, device=self.parents.device).expand(B, N)
        nodes = torch.stack([view.ancestor(d) for d in range(self.max_depth)], -1) - T
        # ancestors that are no nodes go to column N, which is dropped below
        nodes = torch.where(nodes >= 0, nodes, N).flatten(1)
        last = numbers.new_zeros(B, N + 1)
        last.scatter_reduce_(1, nodes, numbers.repeat_interleave(self.max_depth, 1), "amax")
        view.last_descendants = last[:, :N]
        if mask:
            trunk_slots = torch.arange(T, device=self.parents.device)
            on_trunk = trunk_slots <= self.roots[..., None]  # (B, N, T)
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
    chains, starts, needs_node = _chains(tokens, anchors, branches, include_anchor)
    if merge and not include_anchor:
        num_on_trunk = _length_on_trunk(tokens, lengths, chains, starts, needs_node)
        off_trunk = _without_first(chains, needs_node, num_on_trunk)
    else:  # a decoding round's chain starts at the trunk's end: nothing follows that it may repeat
        num_on_trunk = torch.zeros_like(starts)
        off_trunk = torch.where(needs_node, chains, -1)
    nodes, node_of = _trie(starts + num_on_trunk, off_trunk, T, merge)
    groups, group_roots = _group_by_root(nodes, T, is_one_chain=A * K == 1)
    chain_index = _chain_index(node_of, starts, num_on_trunk, T)
    chain_index = torch.where(needs_node, chain_index, -1)  # (B, R, E)
    return ProposalTree(
        **nodes,
        p_index=_p_index(chain_index, anchors, branches, include_anchor),
        groups=groups,
        group_roots=group_roots,
        num_trunk_slots=T,
        max_depth=max(chains.shape[-1], 1),
        include_anchor=include_anchor,
    )


def _chains(tokens, anchors, branches, include_anchor: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The R = A*K chains of tokens that may need a node: tokens (B,R,E), the trunk position (B,R)
    that each chain follows, and which tokens do need one (B,R,E)."""
    B, A, K, W = branches.shape
    rows = branches.reshape(B, A * K, W)
    present = (anchors >= 0).repeat_interleave(K, 1)[..., None]  # (B, R, 1)
    starts = anchors.repeat_interleave(K, 1)  # (B, R)
    if include_anchor:
        anchor_tokens = tokens.gather(1, anchors.clamp(min=0)).repeat_interleave(K, 1)  # (B, R)
        chains = torch.cat([anchor_tokens[..., None], rows], -1)
        return chains, starts - 1, present & (chains >= 0).cummin(-1).values
    chains = rows[..., : W - 1]
    # y_k needs a node only where p_{k+1} is wanted, that is where y_{k+1} is valid
    needs_node = present & (chains >= 0).cummin(-1).values & (rows[..., 1:] >= 0)
    return chains, starts, needs_node


def _length_on_trunk(tokens, lengths, chains, starts, needs_node) -> Tensor:
    """How many tokens at the beginning of each chain repeat the trunk: (B,R)."""
    B, R, E = chains.shape
    T = tokens.shape[1]
    slots = starts[..., None] + 1 + torch.arange(E, device=chains.device)  # (B, R, E)
    there = tokens.gather(1, slots.clamp(0, T - 1).flatten(1)).view(B, R, E)
    repeats = (there == chains) & needs_node & (slots < lengths.clamp(max=T)[:, None, None])
    return repeats.cumprod(-1).sum(-1)


def _without_first(chains: Tensor, needs_node: Tensor, count: Tensor) -> Tensor:
    """chains (B,R,E) without their first `count` (B,R) tokens, moved to depth 0; -1 after the
    end."""
    E = chains.shape[-1]
    source = count[..., None] + torch.arange(E, device=chains.device)
    inside = source < E
    source = source.clamp(max=max(E - 1, 0))
    return torch.where(inside & needs_node.gather(2, source), chains.gather(2, source), -1)


def _chain_index(node_of, starts, num_on_trunk, T: int) -> Tensor:
    """The way back from the trie: packed indices (B,R,E) of the chains' tokens. Token i lies on the
    trunk, or is token i - num_on_trunk of those that left it, whose nodes are node_of (B,R,E)."""
    depth = torch.arange(node_of.shape[-1], device=node_of.device)
    num_on_trunk = num_on_trunk[..., None]
    node = node_of.gather(2, (depth - num_on_trunk).clamp(min=0))
    return torch.where(depth < num_on_trunk, starts[..., None] + 1 + depth, T + node)


def _p_index(chain_index, anchors, branches, include_anchor: bool) -> Tensor:
    """Packed indices (B,A,K,W+1) of what gives p_1..p_{W+1}, from those of the chains (B,R,E)."""
    B, A, K, W = branches.shape
    if not include_anchor:  # p_1 from the trunk at the anchor; p_{W+1} is not needed
        is_there = (anchors >= 0)[..., None] & (branches[..., 0] >= 0)
        first = torch.where(is_there, anchors[..., None], -1).view(B, A * K, 1)
        chain_index = torch.cat([first, chain_index, torch.full_like(first, -1)], -1)
    return chain_index.view(B, A, K, W + 1)  # else p_1 from the anchor's node, p_{W+1} from y_W's


# ----------------------------------------------------------------------------------------- the trie


def _trie(roots: Tensor, rows: Tensor, T: int, merge: bool) -> tuple[dict, Tensor]:
    """The trie of the tokens in rows (B,R,E), -1 after a row's last one, that follow the trunk at
    roots (B,R) -> the nodes' fields (B,N), and the node of each token (B,R,E).

    Rows that begin alike are neighbours once they are sorted. So a node is new exactly where a
    sorted row first differs from the row before it. One sort per column, no Python trie. Without
    merging a row's number comes before its tokens, so that no two rows begin alike."""
    B, R, E = rows.shape
    numbers = torch.arange(R, device=rows.device) * (not merge)
    columns = torch.cat([roots[..., None], numbers.expand(B, R)[..., None], rows], -1)
    order = _lexicographic_order(columns)
    ordered = columns.gather(1, order[..., None].expand_as(columns))  # (B, R, 2+E)
    differs = torch.ones_like(ordered, dtype=torch.bool)
    differs[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    is_new = differs.cummax(-1).values[..., 2:] & (ordered[..., 2:] >= 0)  # (B, R, E) new nodes
    number = (is_new.flatten(1).cumsum(1) - 1).view(B, R, E)
    node_of = torch.where(is_new, number, -1).cummax(1).values  # of each sorted row and depth
    nodes = _fields(ordered[..., 2:], ordered[..., :1], node_of, is_new, T)
    inverse = order.argsort(dim=1)[..., None].expand_as(node_of)
    return nodes, node_of.gather(1, inverse)


def _lexicographic_order(columns: Tensor) -> Tensor:
    """The order (B,R) of the rows of columns (B,R,n), by the first column, then the second, ..."""
    B, R, _ = columns.shape
    order = torch.arange(R, device=columns.device).expand(B, R)
    for column in reversed(columns.unbind(-1)) if R > 1 else ():
        order = order.gather(1, column.gather(1, order).argsort(dim=1, stable=True))
    return order


def _fields(tokens, roots, node_of, is_new, T: int) -> dict:
    """The fields (B,N) of the nodes that are new in the sorted tokens (B,R,E) after roots (B,R,1);
    node_of (B,R,E) are the nodes' numbers."""
    B, R, E = tokens.shape
    counts = is_new.flatten(1).sum(1, keepdim=True)  # (B, 1)
    # A round of decoding has one chain: the host need not wait for a GPU to know N. At least one
    # node, if of padding, so that no dimension is 0.
    N = max(E if R == 1 else int(counts.max()), 1)
    column = torch.where(is_new, node_of, N).flatten(1)  # column N is dropped

    def per_node(values: Tensor, fill: int) -> Tensor:  # (B, R, E) -> (B, N)
        out = values.new_full((B, N + 1), fill)
        return out.scatter_(1, column, values.flatten(1))[:, :N]

    depth = torch.arange(E, device=tokens.device)
    return dict(
        tokens=per_node(tokens, 0),
        parents=per_node(torch.cat([roots, T + node_of], -1)[..., :E], -1),
        positions=per_node(roots + 1 + depth, 0),
        roots=per_node(roots.expand(B, R, E), -1),
        valid=torch.arange(N, device=tokens.device) < counts,
    )


def _group_by_root(nodes: dict, T: int, is_one_chain: bool) -> tuple[Tensor, Tensor]:
    """Group nodes (B,N) by root -> groups (B,P,m), their roots (B,P). The nodes come sorted by it.

    The work on a group grows with the square of m. So a group of more than MAX_GROUP nodes is cut
    where a subtree begins."""
    roots, valid = nodes["roots"], nodes["valid"]
    B, N = roots.shape
    index = torch.arange(N, device=valid.device).expand(B, N)
    if is_one_chain:  # one group, and the host need not wait
        return index[:, None], roots[:, :1]
    top = nodes["parents"] < T  # the nodes right after the trunk
    first = valid.clone()  # the first node of a group
    first[:, 1:] &= roots[:, 1:] != roots[:, :-1]
    start = torch.where(first, index, 0).cummax(1).values
    part = (torch.where(top, index, 0).cummax(1).values - start) // MAX_GROUP
    first[:, 1:] |= valid[:, 1:] & (part[:, 1:] != part[:, :-1])
    group = (first.cumsum(1) - 1).clamp(min=0)
    rank = index - torch.where(first, index, 0).cummax(1).values  # number in its group
    # read together: on a GPU the host waits for each read
    largest = torch.stack([group.max(), torch.where(valid, rank, 0).max()])
    P, m = (largest + 1).tolist()
    group = torch.where(valid, group, P)  # padding goes to a row that is dropped
    group_roots = roots.new_full((B, P + 1), -1).scatter_(1, group, roots)[:, :P]
    groups = index.new_full((B, (P + 1) * m), -1)
    groups.scatter_(1, group * m + torch.where(valid, rank, 0), index)
    return groups.view(B, P + 1, m)[:, :P], group_roots


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
        for root, group in zip(tree.group_roots[0].tolist(), tree.groups[0].tolist()):
            print(f" the recurrent state after trunk position {root} serves nodes {group}")
    print("\nMerged: branch 0 repeats the trunk at 14, then shares 50, 51 with branch 2.")


if __name__ == "__main__":
    main()
