"""The gated delta rule, and how every branch gets the recurrent state it starts from.

A linear-attention layer (gated delta net) needs no keys and values of the past, only one matrix S
per head. Each token t lets S decay by e^{g_t}, writes the part of its value v_t that S does not
know yet under its key k_t, and reads with its query q_t:

    S <- e^{g_t} S     u_t = beta_t (v_t - S^T k_t)     S <- S + k_t u_t^T     o_t = S^T q_t     (1)

A mask cannot isolate branches from S, because everything that ran before is mixed into it. The
state must be rebuilt where a branch leaves the trunk (its root: without merging, the anchor):

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
D_v). Value head j uses key head j // (H / H_k). All sums are float32, whatever the target's dtype.
Left out: the state after every node, because only a commit needs one, and `advance_state` gives it
then. On a GPU the trunk's step 2 is left to flash-linear-attention's kernels, if they are there
and agree.

    python replay.py            eight tokens: states, a replay and two branches in numbers
    pytest tests/test_replay.py
"""

import math
import os
from functools import lru_cache

import torch
from torch import Tensor

from tree import View, build_tree, gather_history, gather_slots

CHUNK = 64  # tokens whose u are computed at once; memory grows with its square
PER_TOKEN = ("qkv", "k", "u", "g")  # what a linear layer keeps of each token
KERNEL_DEVICES = ("cuda",)  # where flash-linear-attention's kernels run
KERNEL_TOLERANCE = 1e-5  # how far from ours they may be, as a share of the largest number

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
    decay = torch.where(seen, (G - G.mT).to(g.dtype), -torch.inf).exp()  # (..., H, N, N)
    G = G.to(g.dtype)
    unknown = beta * (v - G.exp() * (k @ state))  # what the state does not know yet
    among = beta * (k @ k.mT) * decay  # how much of it the other tokens write
    u = torch.linalg.solve_triangular(among, unknown, upper=False, unitriangular=True)
    o = G.exp() * (q @ state) + ((q @ k.mT) * decay) @ u
    return o.transpose(-2, -3), u.transpose(-2, -3)


def advance_state(state: Tensor, k: Tensor, u: Tensor, g: Tensor) -> Tensor:
    """Equation (2): the state after N more tokens, each of which follows the one before it."""
    if not k.shape[-3]:
        return state
    G = g.double().cumsum(-2)  # (..., N, H) in float64, as in `delta_rule_chunk`
    decay = (G[..., -1:, :] - G).to(g.dtype).exp()
    G = G.to(g.dtype)
    k = (expand_heads(k, u.shape[-2]) * decay[..., None]).transpose(-2, -3)  # (..., H, N, D_k)
    return G[..., -1, :, None, None].exp() * state + k.mT @ u.transpose(-2, -3)


def delta_rule(q, k, v, g, beta, state: Tensor, checkpoint_tokens=()) -> tuple[Tensor, ...]:
    """`recurrent` for a stretch of text -> o, u, states (B,M,H,D_k,D_v): one after each
    checkpoint token, then one after the last token. On a GPU by outside kernels, if they agree."""
    ends_of_chunks = all((token + 1) % CHUNK == 0 for token in checkpoint_tokens)
    if v.device.type in KERNEL_DEVICES and ends_of_chunks and not v.requires_grad:
        if kernels_agree(v.device, *k.shape[-2:], *v.shape[-2:]):
            return kernel_delta_rule(q, k, v, g, beta, state, checkpoint_tokens)
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
        state = advance_state(state, k_c, u, g_c)
        outputs.append(o)
        written.append(u)
        if end - 1 in checkpoint_tokens:
            states.append(state)
    states.append(state)
    return torch.cat(outputs, 1), torch.cat(written, 1), torch.stack(states, 1)


def kernel_delta_rule(q, k, v, g, beta, state: Tensor, checkpoint_tokens):
    """`delta_rule` by flash-linear-attention's kernels (pip install flash-linear-attention). Its
    public function hides u and the states between chunks, so its parts are called, in float32."""
    os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")  # not TF32
    from fla.ops.common.chunk_delta_h import chunk_gated_delta_rule_fwd_h
    from fla.ops.common.chunk_o import chunk_fwd_o
    from fla.ops.common.chunk_scaled_dot_kkt import chunk_scaled_dot_kkt_fwd
    from fla.ops.gated_delta_rule.wy_fast import recompute_w_u_fwd
    from fla.ops.utils import chunk_local_cumsum, solve_tril
    from fla.ops.utils.constant import RCP_LN2

    q, k, v, g, beta, state = (x.contiguous() for x in (q, k, v, g, beta, state))
    G = chunk_local_cumsum(g, chunk_size=CHUNK, scale=RCP_LN2)  # the kernels use 2**G, not e**G
    A = chunk_scaled_dot_kkt_fwd(k=k, g=G, beta=beta, chunk_size=CHUNK, output_dtype=torch.float32)
    A = solve_tril(A=A, output_dtype=torch.float32)
    w, unknown = recompute_w_u_fwd(k=k, v=v, beta=beta, A=A, g=G)
    before, u, last = chunk_gated_delta_rule_fwd_h(
        k=k, w=w, u=unknown, g=G, initial_state=state, output_final_state=True, chunk_size=CHUNK
    )
    o = chunk_fwd_o(q=q, k=k, v=u, h=before, g=G, scale=1.0, chunk_size=CHUNK)
    after = torch.cat([before[:, 1:], last[:, None]], 1)  # the state after each chunk
    return o, u, after[:, [*((token + 1) // CHUNK - 1 for token in checkpoint_tokens), -1]]


@lru_cache
@torch.no_grad()
def kernels_agree(device, H_k: int, D_k: int, H: int, D_v: int) -> bool:
    """Whether the kernels agree with `chunk_by_chunk` on random tokens. Prints which path runs."""
    generator = torch.Generator().manual_seed(0)
    N = 2 * CHUNK + 7
    shapes = ((N, H_k, D_k), (N, H_k, D_k), (N, H, D_v), (N, H), (N, H), (H, D_k, D_v))
    q, k, v, g, beta, S = (torch.randn(2, *s, generator=generator).to(device) for s in shapes)
    tokens = (l2_normed(q), l2_normed(k), v, -g.abs() / 9, beta.sigmoid(), S / D_k, (CHUNK - 1,))
    gap = math.inf
    why = ""
    try:
        pairs = zip(kernel_delta_rule(*tokens), chunk_by_chunk(*tokens))
        gap = torch.stack([(a - b).abs().max() / b.abs().max() for a, b in pairs]).max().item()
    except Exception as error:  # not installed, another version, or a kernel that fails
        why = f", {error!r:.120}"
    path = "flash-linear-attention" if gap < KERNEL_TOLERANCE else "torch operations"
    print(f"gated delta rule by {path} (the kernels' relative error: {gap:.0e}{why})")
    return gap < KERNEL_TOLERANCE


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
    past: dict | None, new: dict, path: Tensor, lengths: Tensor, checkpoint_tokens, keep_last: bool
) -> dict:
    """The trunk's checkpoints after a commit. path (B,P): the indices in `new` of the tokens that
    join the trunk of `lengths` tokens, then -1. Kept are the old checkpoints, and the states after
    each checkpoint token (a column of path) and after the new last token; with keep_last also the
    state after the old last token."""
    last = lengths - 1 + (path >= 0).sum(1)  # (B,) the new last token
    after = [torch.minimum(lengths + token, last) for token in checkpoint_tokens] + [last]
    after = torch.stack(after, 1)  # (B, M)
    if "states" in new:  # a stretch of text
        states = new["states"]
    else:  # nodes of a tree: their states are not known yet
        joins = (path >= 0)[..., None]
        k, u, g = (gather_slots(new[name], path.clamp(min=0)) for name in ("k", "u", "g"))
        states = advance_state(past["states"][:, -1], k, u * joins[..., None], g * joins)[:, None]
    if past is not None:
        old = slice(None, None if keep_last else -1)
        states = torch.cat([past["states"][:, old], states], 1)
        after = torch.cat([past["after"][:, old], after], 1)
    return {"states": states, "after": after}


def trunk_tail(past: dict | None, new: dict, path: Tensor, lengths: Tensor, size: int) -> dict:
    """What is kept per token where only the end of the trunk counts: the last `size` tokens, slot
    0 at position `base`. Arguments as in `extended_checkpoints`."""
    base = lengths + (path >= 0).sum(1) - size  # (B,)
    positions = base[:, None] + torch.arange(size, device=path.device)
    state = {"tail_start": base}
    for name in PER_TOKEN:
        joining = gather_slots(new[name], path.clamp(min=0))
        older = None if past is None else past[name]
        older_base = 0 if past is None else past["tail_start"][:, None]
        state[name] = gather_history(older, joining, positions, lengths[:, None], older_base)
    return state


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
    slots = nearest[..., None] + 1 + torch.arange(longest, device=positions.device)  # (B, P, n)
    inside = (slots <= positions[..., None])[..., None]
    slots = slots.flatten(1).clamp(0, past["k"].shape[1] - 1)
    shape = (positions.shape[1], longest)
    k, u, g = (gather_slots(past[name], slots).unflatten(1, shape) for name in ("k", "u", "g"))
    return advance_state(state, k, u * inside[..., None], g * inside)


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
            nearest, _ = nearest_checkpoints(past, view.roots)
            view.longest_replay = int((view.roots - nearest).max())
        state = replay_states(past, view.roots, view.longest_replay)
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
