"""flash-linear-attention's kernels for a stretch of text, where they are installed and say what
ours says.

    pip install flash-linear-attention      and a GPU

`replay.delta_rule` carries a state from one chunk of text to the next in some dozen small operations
each; these kernels do all of a stretch in six. Replay needs what their public function keeps to
itself, what each token wrote and the states between chunks, so it is the function's parts that are
called, in full float32. Parts change with versions: they are asked once for tokens that ours is
asked for, too, and whatever is missing, fails or differs leaves everything to ours. No GPU was at
hand: they were run by Triton's interpreter, on a CPU, where they agree to 2e-6.

    pytest tests/test_replay.py
"""

import os
from functools import lru_cache

import torch
from torch import Tensor

PLACES = ("cuda",)  # where they run
CLOSE = 1e-5  # how far from ours they may be, beside the largest number


def stretch(
    q, k, v, g, beta, state: Tensor, checkpoint_tokens, size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`replay.delta_rule`, in chunks of `size` that every mark is the end of."""
    os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")  # not TF32
    from fla.ops.common.chunk_delta_h import chunk_gated_delta_rule_fwd_h
    from fla.ops.common.chunk_o import chunk_fwd_o
    from fla.ops.common.chunk_scaled_dot_kkt import chunk_scaled_dot_kkt_fwd
    from fla.ops.gated_delta_rule.wy_fast import recompute_w_u_fwd
    from fla.ops.utils import chunk_local_cumsum, solve_tril
    from fla.ops.utils.constant import RCP_LN2

    q, k, v, g, beta, state = (x.contiguous() for x in (q, k, v, g, beta, state))
    total = chunk_local_cumsum(g, chunk_size=size, scale=RCP_LN2)  # their decay is a power of two
    # in three steps: fla's one step for all of this rounds to TF32
    among = chunk_scaled_dot_kkt_fwd(
        k=k, g=total, beta=beta, chunk_size=size, output_dtype=torch.float32
    )
    inverse = solve_tril(A=among, output_dtype=torch.float32)
    w, new = recompute_w_u_fwd(k=k, v=v, beta=beta, A=inverse, g=total)
    before, u, last = chunk_gated_delta_rule_fwd_h(
        k=k, w=w, u=new, g=total, initial_state=state, output_final_state=True, chunk_size=size
    )
    o = chunk_fwd_o(q=q, k=k, v=u, h=before, g=total, scale=1.0, chunk_size=size)
    after = torch.cat([before[:, 1:], last[:, None]], 1)  # each chunk
    return o, u, after[:, [*((mark + 1) // size - 1 for mark in checkpoint_tokens), -1]]


def serve(v: Tensor, heads: int, width: int, checkpoint_tokens, size: int, ours) -> bool:
    """Whether they can do a stretch of values v (B,N,H,D_v) with so many key heads of this width;
    without a gradient, which they do not give."""
    able = v.device.type in PLACES and not v.requires_grad
    return (
        able
        and all((mark + 1) % size == 0 for mark in checkpoint_tokens)
        and (agree(v.device, heads, v.shape[2], width, v.shape[3], size, ours))
    )


@lru_cache
@torch.no_grad()
def agree(place, key_heads: int, heads: int, key_width: int, width: int, size: int, ours) -> bool:
    """Whether they say what ours says of some tokens of these shapes, asked once."""
    N, generator = 2 * size + 7, torch.Generator().manual_seed(0)

    def drawn(*shape):
        return torch.randn(2, *shape, generator=generator).to(place)

    q, k = (torch.nn.functional.normalize(drawn(N, key_heads, key_width), dim=-1) for _ in range(2))
    v, state = drawn(N, heads, width), drawn(heads, key_width, width) / key_width
    tokens = q, k, v, -drawn(N, heads).abs() / 9, drawn(N, heads).sigmoid(), state, (size - 1,)
    try:
        pairs = zip(stretch(*tokens, size), ours(*tokens))
        gap = max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)
        close, said = gap < CLOSE, f"{gap:.0e} from ours"
    except ImportError:
        return False  # not installed, or a version of other parts
    except Exception as error:  # a kernel may fail in any way
        close, said = False, f"{error!r:.120}"
    print(f"flash-linear-attention is {'used' if close else 'left alone'}: {said}")
    return close
