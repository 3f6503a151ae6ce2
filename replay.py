"""The gated delta rule, and how every branch gets the recurrent state it starts from.

A linear-attention layer (gated delta net) needs no keys and values of the past, only one matrix S
per head. Each token t lets S decay by e^{g_t}, writes the part of its value v_t that S does not
know yet under its key k_t, and reads with its query q_t:

    S <- e^{g_t} S     u_t = beta_t (v_t - S^T k_t)     S <- S + k_t u_t^T     o_t = S^T q_t     (1)

A mask cannot isolate branches from S, because everything that ran before is mixed into it. The
state must be rebuilt after the last trunk position in a branch's history. This position is the
branch's *root*. Without merging it is the anchor.

    1. `recurrent` is equation (1), token by token.
    2. `delta_rule_chunk` computes it for many tokens at once. Each u_t is linear in the u of the
       tokens before it, so one triangular system gives all of them.
    3. While the trunk runs, k_t, u_t and g_t of every token are kept, and the state after every
       n-th token: the checkpoints.
    4. `replay_states` gets the state after any trunk token a from the last checkpoint c at or
       before it, in one product, because every u_t is known. G_t is the sum of g over c+1..t:

           S_a = e^{G_a} S_c + sum over c < t <= a of  e^{G_a - G_t} k_t u_t^T                   (2)

    5. `delta_rule_on_tree` starts from S_a and runs the nodes whose histories leave the trunk at a.
       It is `delta_rule_chunk` with the tree's ancestors as the tokens before.

Shapes: q, k (..., N, H_k, D_k), v, u, o (..., N, H, D_v), g, beta (..., N, H), S (..., H, D_k,
D_v). Value head j uses key head j // (H / H_k). All is float32, sums of g float64, whatever the
target's dtype. Left out: the state after every node, because only a commit needs one, and
`advance_state` gives it then. On a GPU the trunk's step 2 is left to the kernels of
flash-linear-attention, if the package is installed and its numbers agree with ours.

    python replay.py            eight tokens: states, a replay and two branches in numbers
    pytest tests/test_replay.py
"""

import math

import torch
from torch import Tensor

from support import gpu
from tree import View, build_tree, gather_history, gather_slots

CHUNK = 64  # tokens whose u are computed at once; memory grows with its square
# The least logarithm of a decay: e^-80 is 2e-35. Below -87 a CPU's exp is up to 70 times slower.
FAINTEST = -80.0
PER_TOKEN = ("qkv", "k", "u", "g")  # what a linear layer keeps of each token

# ------------------------------------------- 1 and 2. the rule: token by token, many tokens at once


def l2_normed(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def expand_heads(x: Tensor, num_heads: int) -> Tensor:
    """(..., H_k, D) -> (..., H, D): each key head serves H / H_k neighbouring value heads."""
    return x if x.shape[-2] == num_heads else x.repeat_interleave(num_heads // x.shape[-2], -2)


def recurrent(q, k, v, g, beta, S: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Equation (1), token by token -> o, u, the last state. Tests compare all below with it."""
    q, k = expand_heads(q, v.shape[-2]), expand_heads(k, v.shape[-2])
    o, u = torch.empty_like(v), torch.empty_like(v)
    for t in range(v.shape[-3]):
        q_t, k_t, v_t = (x[..., t, :, :, None] for x in (q, k, v))  # (..., H, D, 1)
        S = g[..., t, :, None, None].exp() * S
        u_t = beta[..., t, :, None, None] * (v_t - S.mT @ k_t)
        S = S + k_t @ u_t.mT
        o[..., t, :, :] = (S.mT @ q_t)[..., 0]
        u[..., t, :, :] = u_t[..., 0]
    return o, u, S


def delta_rule_chunk(q, k, v, g, beta, state: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """o and u of N tokens at once, all of which start from one state. Row i of seen (..., N, N)
    marks token i and the tokens before it in its history, none of them later than i: a stretch of
    text has a lower triangle, a tree its ancestors."""
    H = v.shape[-2]
    q, k, v = (x.transpose(-2, -3) for x in (expand_heads(q, H), expand_heads(k, H), v))
    beta = beta.mT[..., None]  # (..., H, N, 1)
    seen = seen[..., None, :, :]  # (..., 1, N, N)
    # (..., H, N, 1) the sum of g along each history, in float64: after a strong gate two sums are
    # large and their difference, a weak gate, may be small
    G = seen.double() @ g.double().mT[..., None]
    # (..., H, N, N) what is left at token i of what token j wrote
    decay = torch.where(seen, (G - G.mT).to(g.dtype), FAINTEST).clamp(min=FAINTEST).exp() * seen
    G = G.to(g.dtype).clamp(min=FAINTEST)
    unknown = beta * (v - G.exp() * (k @ state))  # what the state does not know yet
    among = beta * (k @ k.mT) * decay  # how much of it the other tokens write
    u = torch.linalg.solve_triangular(among, unknown, upper=False, unitriangular=True)
    o = G.exp() * (q @ state) + ((q @ k.mT) * decay) @ u
    return o.transpose(-2, -3), u.transpose(-2, -3)


def advance_state(
    state: Tensor, k: Tensor, u: Tensor, g: Tensor, inside: Tensor | None = None
) -> Tensor:
    """Equation (2): the state after N more tokens, each of which follows the one before it.

    Head by head: k (..., H, N, D_k), u (..., H, N, D_v), g (..., H, N). inside, like g: False where
    a token does not count."""
    if not k.shape[-2]:
        return state
    if inside is not None:
        g = g * inside
    G = g.double().cumsum(-1)  # in float64, as in `delta_rule_chunk`
    decay = (G[..., -1:] - G).to(g.dtype).exp()
    if inside is not None:
        decay = decay * inside
    state = G[..., -1, None, None].to(g.dtype).exp() * state
    return state + (k * decay[..., None]).mT @ u


def head_by_head(k: Tensor, u: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """k (..., N, H_k, D_k), u (..., N, H, D_v), g (..., N, H) -> the same with H before N, and k
    repeated to H heads."""
    k = expand_heads(k, u.shape[-2])
    return k.transpose(-2, -3), u.transpose(-2, -3), g.mT


def delta_rule(q, k, v, g, beta, state: Tensor, checkpoint_tokens=()) -> tuple[Tensor, ...]:
    """`recurrent` for a stretch of text -> o, u, states (B,M,H,D_k,D_v): one after each
    checkpoint token, then one after the last token. On a GPU by outside kernels, if they agree."""
    end_chunks = all((token + 1) % CHUNK == 0 for token in checkpoint_tokens)
    if end_chunks and gpu.rule_serves(chunk_by_chunk, CHUNK, k, v):
        return gpu.kernel_delta_rule(q, k, v, g, beta, state, checkpoint_tokens, CHUNK)
    return chunk_by_chunk(q, k, v, g, beta, state, checkpoint_tokens)


def chunk_by_chunk(q, k, v, g, beta, state: Tensor, checkpoint_tokens) -> tuple[Tensor, ...]:
    """`delta_rule` in torch, CHUNK tokens at a time. Checkpoint tokens end a chunk early."""
    N = v.shape[-3]
    ends = sorted({*range(CHUNK, N, CHUNK), *(token + 1 for token in checkpoint_tokens), N})
    outputs, written, states = [], [], []
    for start, end in zip([0, *ends], ends):
        q_c, k_c, v_c, g_c, beta_c = (x[:, start:end] for x in (q, k, v, g, beta))
        seen = torch.ones(end - start, end - start, dtype=torch.bool, device=v.device).tril()
        o, u = delta_rule_chunk(q_c, k_c, v_c, g_c, beta_c, state, seen)
        state = advance_state(state, *head_by_head(k_c, u, g_c))
        outputs.append(o)
        written.append(u)
        if end - 1 in checkpoint_tokens:
            states.append(state)
    states.append(state)
    return torch.cat(outputs, 1), torch.cat(written, 1), torch.stack(states, 1)


# --------------------------------------------------------- 3 to 5. checkpoints, replay and the tree


def token_bytes(config, itemsize: int) -> int:
    """Bytes that a linear layer keeps of each token: q, k, v before the convolution (`itemsize`
    bytes a number), and the rule's k, u, g in float32."""
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    return itemsize * (2 * keys + values) + 4 * (keys + values + config.linear_num_value_heads)


def state_bytes(config) -> int:
    """Bytes of a linear layer's state, float32."""
    per_head = config.linear_key_head_dim * config.linear_value_head_dim
    return 4 * config.linear_num_value_heads * per_head


def checkpoint_spacing(config, itemsize: int) -> int:
    """Tokens between checkpoints: so many that the checkpoints take no more memory than what is
    kept of every token anyway. It is rounded up to whole chunks, because a checkpoint at a chunk's
    end takes no extra time. A wider spacing could save at most half of the memory, and would make
    replays longer."""
    tokens = state_bytes(config) // token_bytes(config, itemsize)
    return max(1, math.ceil(tokens / CHUNK)) * CHUNK


def positional_names(state: dict) -> list[str]:
    """The names in a layer's state, of whatever kind, that have one entry per trunk position."""
    cut = PER_TOKEN if "tail_start" in state else ()  # kept of the trunk's end only: `trunk_tail`
    others = ("states", "after", "tail_start", *cut)
    return [name for name in state if name not in others]


def extended_checkpoints(
    past: dict | None, new: dict, path: Tensor, lengths: Tensor, checkpoint_tokens=()
) -> dict:
    """The trunk's checkpoints after tokens have joined it. path (B,P): their indices in `new`, then
    -1; they follow the trunk's `lengths` tokens. Kept are the old checkpoints, and the states after
    each checkpoint token (a column of path) and after the new last token, not the old one."""
    last = lengths - 1 + (path >= 0).sum(1)  # (B,) the new last token
    after = [torch.minimum(lengths + token, last) for token in checkpoint_tokens] + [last]
    after = torch.stack(after, 1)  # (B, M)
    if "states" in new:  # of a stretch of text; those of a tree's nodes are not known yet
        states = new["states"]
    else:
        joins = (path >= 0)[:, None]  # (B, 1, P)
        written = [gather_slots(new[name], path.clamp(min=0)) for name in ("k", "u", "g")]
        states = advance_state(past["states"][:, -1], *head_by_head(*written), joins)[:, None]
    if past is not None:
        states = torch.cat([past["states"][:, :-1], states], 1)
        after = torch.cat([past["after"][:, :-1], after], 1)
    return {"states": states, "after": after}


def trunk_tail(past: dict | None, new: dict, path: Tensor, lengths: Tensor, size: int) -> dict:
    """What is kept per token where only the end of the trunk counts: the convolution's last `size`
    inputs, slot 0 at position `tail_start`. Nothing is replayed from there, so k, u and g are not
    kept. Arguments as in `extended_checkpoints`."""
    start = lengths + (path >= 0).sum(1) - size  # (B,)
    positions = start[:, None] + torch.arange(size, device=path.device)
    joining = gather_slots(new["qkv"], path.clamp(min=0))
    older, older_start = (past["qkv"], past["tail_start"][:, None]) if past else (None, 0)
    qkv = gather_history(older, joining, positions, lengths[:, None], older_start)
    return {"qkv": qkv, "tail_start": start}


def nearest_checkpoints(past: dict, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Positions (B,P) of the last checkpoints at or before trunk positions (B,P), -1 where there is
    none, and their numbers (B,P)."""
    after = past["after"][:, None]  # (B, 1, M)
    return torch.where(after <= positions[..., None], after, -1).max(-1)


def replay_states(past: dict, positions: Tensor, longest: int | None = None) -> Tensor:
    """The states (B,P,H,D_k,D_v) after trunk positions (B,P), -1 = before the first token, each
    from the nearest checkpoint at or before it, in one product (paper: indexed state replay).
    longest: the most tokens between the two, if known."""
    nearest, index = nearest_checkpoints(past, positions)
    state = gather_slots(past["states"], index) * (nearest >= 0)[..., None, None, None]
    if "tail_start" in past:  # only the state at the end is kept, and no other is wanted
        return state
    if longest is None:
        longest = int((positions - nearest).max())
    slots = nearest[..., None, None] + 1 + torch.arange(longest, device=positions.device)
    inside = slots <= positions[..., None, None]  # (B, P, 1, n)
    slots = slots.clamp(0, past["k"].shape[1] - 1)
    B, H, H_k = len(slots), past["u"].shape[2], past["k"].shape[2]
    rows = torch.arange(B, device=slots.device)[:, None, None, None]
    # head by head at once: else a gather, a repeat and a transpose would each copy k
    heads = torch.arange(H, device=slots.device)[:, None]
    k = past["k"][rows, slots, heads // (H // H_k)]  # (B, P, H, n, D_k)
    u, g = (past[name][rows, slots, heads] for name in ("u", "g"))
    return advance_state(state, k, u, g, inside)


def cut_checkpoints(past: dict, last: Tensor) -> dict:
    """The checkpoints of a trunk that is cut so that it ends with position last (B,), -1: it is
    empty. Kept are those before that position, and the state after it."""
    is_before = past["after"] < last[:, None]  # (B, M)
    M = int(is_before.any(0).sum()) + 1  # checkpoints come in order
    state = replay_states(past, last[:, None])  # (B, 1, H, D_k, D_v)
    states = torch.where(is_before[:, :M, None, None, None], past["states"][:, :M], state)
    return {"states": states, "after": torch.minimum(past["after"][:, :M], last[:, None])}


def delta_rule_on_tree(q, k, v, g, beta, past: dict | None, view: View) -> tuple[Tensor, Tensor]:
    """o and u (B,N,H,D_v) of a tree's nodes. Each group of nodes starts from the state of its root,
    and within it each node sees its ancestors."""
    B, P, _ = view.groups.shape
    N = v.shape[1]
    nodes = view.groups.clamp(min=0)  # (B, P, m)
    rows = torch.arange(B, device=nodes.device)[:, None, None]

    def ungrouped(x: Tensor) -> Tensor:  # (B, P, m, H, D) -> (B, N, H, D)
        out = x.new_zeros(B, N + 1, *x.shape[3:])
        out[rows, torch.where(view.groups >= 0, view.groups, N)] = x  # padding goes to slot N
        return out[:, :N]

    is_node = (view.groups >= 0) & view.valid[rows, nodes]  # (B, P, m), False = padding
    if view.seen_in_groups is None:
        view.seen_in_groups = view.descends(nodes[..., :, None], nodes[..., None, :])
    seen = view.seen_in_groups  # (B, P, m, m)
    if past is None:  # nothing has run yet
        state = v.new_zeros(B, P, v.shape[-2], k.shape[-1], v.shape[-1])
    else:
        if view.longest_replay is None and "tail_start" not in past:
            nearest, _ = nearest_checkpoints(past, view.group_roots)
            view.longest_replay = int((view.group_roots - nearest).max())
        state = replay_states(past, view.group_roots, view.longest_replay)
    q, k, v, g, beta = (x[rows, nodes] for x in (q, k, v, g, beta))  # (B, P, m, ...)
    g, beta = g * is_node[..., None], beta * is_node[..., None]
    o, u = delta_rule_chunk(q, k, v, g, beta, state, seen & is_node[..., None, :])
    return ungrouped(o), ungrouped(u)


def show(state: Tensor) -> str:
    return str([[round(number, 4) for number in row] for row in state.flatten(0, -3)[0].tolist()])


def main():
    torch.manual_seed(0)
    T, H, D = 8, 1, 2
    q, k = l2_normed(torch.randn(1, T, H, D)), l2_normed(torch.randn(1, T, H, D))
    v, g, beta = torch.randn(1, T, H, D), -torch.rand(1, T, H), torch.rand(1, T, H)
    trunk = (q, k, v, g, beta)
    start = torch.zeros(1, H, D, D)
    slow_o, _, slow = recurrent(*trunk, start)
    print(f"1. eight tokens, one by one: S_7 = {show(slow)}")
    o, u, states = delta_rule(*trunk, start, checkpoint_tokens=(2,))
    gap = (o - slow_o).abs().max()
    print(f"2. all at once, by a triangular system: largest difference of o_t {gap:.1e}")
    print(f"3. the checkpoint after token 2: S_2 = {show(states[:, 0])}")
    print("4. replay from there to an anchor at token a = 7:")
    print("   t      g_t   e^(G_a-G_t)   k_t              u_t")
    G = g[0, 3:, 0].cumsum(0)
    for t in range(3, T):
        decay = (G[-1] - G[t - 3]).exp()
        numbers = "".join(f"{x:8.4f}" for x in (*k[0, t, 0], *u[0, t, 0]))
        print(f"   {t}  {g[0, t, 0]:7.4f}    {decay:8.4f}   {numbers}")
    past = {"k": k, "u": u, "g": g, "states": states[:, :1], "after": torch.tensor([[2]])}
    replayed = replay_states(past, torch.tensor([[7]]))
    gap = (replayed[:, 0] - slow).abs().max()
    print(f"   S_7 in one product = {show(replayed)}, largest difference {gap:.1e}")
    print("5. two branches of two nodes each leave the trunk at token 4:")
    branches = torch.tensor([[[[10, 11, 12], [20, 21, 22]]]])  # their last tokens need no node
    tree = build_tree(torch.arange(T)[None], torch.tensor([T]), torch.tensor([[4]]), branches)
    nodes = [x[:, :4].flip(1) for x in trunk]  # any numbers will do
    packed, _ = delta_rule_on_tree(*nodes, past, tree.view())
    for branch in (slice(0, 2), slice(2, 4)):
        history = [torch.cat([x[:, :5], y[:, branch]], 1) for x, y in zip(trunk, nodes)]
        alone, _, _ = recurrent(*history, start)
        gap = (packed[:, branch] - alone[:, 5:]).abs().max()
        print(f"   o of one branch: packed - alone, largest difference {gap:.1e}")


if __name__ == "__main__":
    main()
