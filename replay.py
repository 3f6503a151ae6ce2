"""Recurrent state along a tree: the gated delta rule, and how a branch gets its anchor's state.

A linear-attention layer (gated delta net) keeps a matrix S per head instead of keys and values:

    S <- e^g S        u = beta (v - S^T k)        S <- S + k u^T        o = S^T q           (1)

A mask cannot isolate branches from it: whatever ran before has been mixed into S. But every u_t is
known once the trunk has run, so the state after any trunk token a follows from the last checkpoint
c at or before it, in one product (indexed state replay), G_t being the sum of g over c+1..t:

    S_a = e^{G_a} S_c + sum over c < t <= a of  e^{G_a - G_t} k_t u_t^T                     (2)

and the nodes that leave the trunk at a follow from S_a by the same rule with a tree for a past:
`chunk` takes any set of tokens with a table of who is whose ancestor, so that a stretch of trunk, a
chain and a whole tree are one function. All sums are float32, whatever the target's dtype.

Shapes: q, k (..., N, H_k, D_k), v, u, o (..., N, H, D_v), g, beta (..., N, H), S (..., H, D_k,
D_v); value head j reads key head j // (H / H_k).

    python replay.py            five tokens replay_states, with the numbers
    pytest tests/test_replay.py
"""

import torch
from torch import Tensor

import kernels
from tree import View, gather_history, gather_slots

CHUNK = 64  # tokens whose u are solved for at once; memory grows with its square
PER_TOKEN = ("qkv", "k", "u", "g")  # what the layer remembers of each token


def positional_names(state: dict) -> list[str]:
    """The names of what a layer of any kind remembers for each trunk position."""
    fixed = ("states", "after", "base", *(PER_TOKEN if "base" in state else ()))
    return [name for name in state if name not in fixed]


def token_bytes(config, size: int) -> int:
    """What a linear layer keeps of each token: q, k, v before the convolution (`size` bytes a
    number), k, u and g of the rule in float32."""
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    return size * (2 * keys + values) + 4 * (keys + values + config.linear_num_value_heads)


def state_bytes(config) -> int:
    """A linear layer's state, float32."""
    per_head = config.linear_key_head_dim * config.linear_value_head_dim
    return 4 * config.linear_num_value_heads * per_head


def checkpoint_spacing(config, size: int) -> int:
    """Tokens between checkpoints: so many that these take no more memory than what is kept of each
    token (`size` bytes a number of its dtype) anyway, in whole chunks, whose ends cost a prefill
    nothing. More could save at most half, and make replays longer."""
    tokens = state_bytes(config) // token_bytes(config, size)
    return max(1, -(-tokens // CHUNK)) * CHUNK


def l2_normed(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def expand_heads(x: Tensor, num_heads: int) -> Tensor:
    """(..., H_k, D) -> (..., H, D): each key head serves H / H_k value heads next to each other."""
    return x if x.shape[-2] == num_heads else x.repeat_interleave(num_heads // x.shape[-2], -2)


def recurrent(q, k, v, g, beta, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Equation (1), token by token: the twin of everything below. -> o, u, the last state."""
    k, q = (expand_heads(x, v.shape[-2]) for x in (k, q))
    o, u = torch.empty_like(v), torch.empty_like(v)
    for t in range(v.shape[-3]):
        q_t, k_t, v_t = (x[..., t, :, :, None] for x in (q, k, v))  # (..., H, D, 1)
        state = g[..., t, :, None, None].exp() * state
        u_t = beta[..., t, :, None, None] * (v_t - state.mT @ k_t)
        state = state + k_t @ u_t.mT
        o[..., t, :, :], u[..., t, :, :] = (state.mT @ q_t)[..., 0], u_t[..., 0]
    return o, u, state


def delta_rule_chunk(q, k, v, g, beta, state: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """o and u of N tokens at once, which hang on one state. seen (..., N, N): row i checkpoint_tokens token i
    and its ancestors, all at or before i.

    Each u is linear in those of its ancestors: one triangular system for all.
    """
    H = v.shape[-2]
    q, k, v = (x.transpose(-2, -3) for x in (expand_heads(q, H), expand_heads(k, H), v))
    beta, seen = beta.mT[..., None], seen[..., None, :, :]  # (..., H, N, 1), (..., 1, N, N)
    total = seen.to(g.dtype) @ g.mT[..., None]  # (..., H, N, 1) sum of g along each token's path
    decay = torch.where(seen, total - total.mT, -torch.inf).exp()  # (..., H, N, N)
    new = beta * (v - total.exp() * (k @ state))  # what the state does not know yet
    among = beta * (k @ k.mT) * decay
    u = torch.linalg.solve_triangular(among, new, upper=False, unitriangular=True)
    o = total.exp() * (q @ state) + ((q @ k.mT) * decay) @ u
    return o.transpose(-2, -3), u.transpose(-2, -3)


def advance_state(state: Tensor, k: Tensor, u: Tensor, g: Tensor) -> Tensor:
    """Equation (2): the state after N more tokens, of which each follows the one before it."""
    if not k.shape[-3]:
        return state
    total = g.cumsum(-2)  # (..., N, H)
    left = (total[..., -1:, :] - total).exp()
    k = (expand_heads(k, u.shape[-2]) * left[..., None]).transpose(-2, -3)  # (..., H, N, D_k)
    return total[..., -1, :, None, None].exp() * state + k.mT @ u.transpose(-2, -3)


def delta_rule(
    q, k, v, g, beta, state: Tensor, checkpoint_tokens=()
) -> tuple[Tensor, Tensor, Tensor]:
    """`recurrent` for a stretch of text, CHUNK tokens at a time -> o, u, states (B,M,H,D_k,D_v):
    after each marked token, and last after them all. By kernels where they serve."""
    if kernels.serve(v, *k.shape[-2:], checkpoint_tokens, CHUNK, chunk_by_chunk):
        return kernels.stretch(q, k, v, g, beta, state, checkpoint_tokens, CHUNK)
    return chunk_by_chunk(q, k, v, g, beta, state, checkpoint_tokens)


def chunk_by_chunk(
    q, k, v, g, beta, state: Tensor, checkpoint_tokens=()
) -> tuple[Tensor, Tensor, Tensor]:
    N = v.shape[-3]
    ends = sorted({*range(CHUNK, N, CHUNK), *(m + 1 for m in checkpoint_tokens), N})
    outputs, news, states = [], [], []
    for start, end in zip([0, *ends], ends):
        part = [x[:, start:end] for x in (q, k, v, g, beta)]
        seen = torch.ones(end - start, end - start, dtype=torch.bool, device=v.device).tril()
        o, u = delta_rule_chunk(*part, state, seen)
        state = advance_state(state, part[1], u, part[3])
        outputs.append(o)
        news.append(u)
        states += [state] * ((end - 1 in checkpoint_tokens) + (end == N))
    return torch.cat(outputs, 1), torch.cat(news, 1), torch.stack(states, 1)


def replay_states(past: dict, positions: Tensor) -> Tensor:
    """The states after trunk positions (B,P), -1 = before the first token -> (B,P,H,D_k,D_v): from
    the nearest checkpoint at or before each, all in one product (paper: indexed state replay)."""
    after = past["after"][:, None]  # (B, 1, M)
    nearest, index = torch.where(after <= positions[..., None], after, -2).max(-1)  # (B, P)
    state = gather_slots(past["states"], index) * (nearest >= 0)[..., None, None, None]
    if "base" in past:  # only the end is kept, and asked for
        return state
    nearest = nearest.clamp(min=-1)
    window = int((positions - nearest).max())
    slots = nearest[..., None] + 1 + torch.arange(window, device=positions.device)  # (B, P, n)
    inside = (slots <= positions[..., None])[..., None]
    slots = slots.flatten(1).clamp(0, past["k"].shape[1] - 1)
    shape = (positions.shape[1], window)
    k, u, g = (gather_slots(past[name], slots).unflatten(1, shape) for name in ("k", "u", "g"))
    return advance_state(state, k, u * inside[..., None], g * inside)


def delta_rule_on_tree(q, k, v, g, beta, past: dict | None, view: View) -> tuple[Tensor, Tensor]:
    """o and u (B,N,H,D_v) of a tree's nodes: each group of nodes hangs on the state of its root."""
    B, P, m = view.groups.shape
    N, T = v.shape[1], view.num_trunk_slots
    nodes = view.groups.clamp(min=0)
    real = (view.groups >= 0) & gather_slots(view.valid, nodes.flatten(1)).view(B, P, m)
    q, k, v, g, beta = (
        gather_slots(x, nodes.flatten(1)).unflatten(1, (P, m)) for x in (q, k, v, g, beta)
    )  # (B, P, m, ...)
    among = view.mask[:, 0, :, T:]  # (B, N, N)
    rows = torch.arange(B, device=nodes.device)[:, None, None, None]
    seen = among[rows, nodes[..., :, None], nodes[..., None, :]] & real[..., None, :]
    if past is None:  # nothing has run yet
        state = v.new_zeros(B, P, v.shape[-2], k.shape[-1], v.shape[-1])
    else:
        state = replay_states(past, view.roots)
    results = delta_rule_chunk(q, k, v, g * real[..., None], beta * real[..., None], state, seen)
    home = torch.where(view.groups >= 0, view.groups, N).flatten(1)  # N is cut off

    def back(x: Tensor) -> Tensor:  # (B, P, m, H, D) -> (B, N, H, D)
        out = x.new_zeros(B, N + 1, *x.shape[3:])
        out[rows[..., 0, 0], home] = x.flatten(1, 2)
        return out[:, :N]

    return back(results[0]), back(results[1])


def extended_checkpoints(
    past: dict | None,
    new: dict,
    path: Tensor,
    lengths: Tensor,
    checkpoint_tokens=(),
    keep: bool = False,
) -> dict:
    """The trunk's checkpoints once the nodes on path (B,P; -1 behind the last) have joined it:
    those it had, those at the checkpoint_tokens (token numbers in path), and the one after its last token. The
    one after what was the last stays if `keep`."""
    last = lengths - 1 + (path >= 0).sum(1)
    after = [torch.minimum(lengths + mark, last) for mark in checkpoint_tokens] + [last]
    if "states" in new:
        states = new["states"]
    else:
        there = (path >= 0)[..., None]
        k, u, g = (gather_slots(new[name], path.clamp(min=0)) for name in ("k", "u", "g"))
        states = advance_state(past["states"][:, -1], k, u * there[..., None], g * there)[:, None]
    after = torch.stack(after, 1)  # (B, M)
    if past is not None:
        old = slice(None, None if keep else -1)
        states = torch.cat([past["states"][:, old], states], 1)
        after = torch.cat([past["after"][:, old], after], 1)
    return {"states": states, "after": after}


def last_tokens(past: dict | None, new: dict, path: Tensor, lengths: Tensor, size: int) -> dict:
    """What is kept per token where only the end of the trunk matters: the last `size` tokens, slot
    0 being position `base`."""
    base = lengths + (path >= 0).sum(1) - size  # (B,)
    positions = base[:, None] + torch.arange(size, device=path.device)
    kept, start = {"base": base}, lengths[:, None]
    for name in PER_TOKEN:
        joining = gather_slots(new[name], path.clamp(min=0))
        older = (past[name], past["base"][:, None]) if past is not None else (None, 0)
        kept[name] = gather_history(older[0], joining, positions, start, older[1])
    return kept


def main():
    torch.manual_seed(0)
    T, H, D = 8, 1, 2
    q, k = (l2_normed(torch.randn(1, T, H, D)) for _ in range(2))
    v, g, beta = torch.randn(1, T, H, D), -torch.rand(1, T, H), torch.rand(1, T, H)
    start = torch.zeros(1, H, D, D)
    _, u, states = delta_rule(q, k, v, g, beta, start, checkpoint_tokens=(2,))
    print("eight tokens, one head of width 2; checkpoint after token 2, anchor at token 7\n")
    past = {"k": k, "u": u, "g": g, "states": states[:, :1], "after": torch.tensor([[2]])}
    print("t      g_t    e^(G_a-G_t)   k_t                 u_t")
    total = g[0, 3:, 0].cumsum(0)
    for t in range(3, 8):
        share = (total[-1] - total[t - 3]).exp().item()
        numbers = "".join(f"{x:8.4f}" for x in (*k[0, t, 0].tolist(), *u[0, t, 0].tolist()))
        print(f"{t}  {g[0, t, 0].item():7.4f}  {share:10.4f}   {numbers}")
    direct = replay_states(past, torch.tensor([[7]]))[0, 0, 0]
    slow = recurrent(q, k, v, g, beta, start)[2][0, 0]
    for name, state in (("S_7 in one product from S_2", direct), ("S_7 token by token", slow)):
        print(f"\n{name}: {[[round(x, 4) for x in row] for row in state.tolist()]}")
    print(f"largest difference {(direct - slow).abs().max().item():.1e}")


if __name__ == "__main__":
    main()
