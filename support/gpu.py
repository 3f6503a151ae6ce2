"""What is done otherwise on a GPU: by kernels that are not ours, and in larger parts.

Our files compute everything with torch's plain operations. Two things have faster kernels on a GPU.
Before the first use a kernel runs on random numbers. If it fails, or its numbers are not ours, it
is left alone; one printed line says which of the two runs.

    attention in trees    FlexAttention skips blocks of 128 x 128 that the mask hides: of a training
                          step's nodes, each sees few others
    gated delta rule      flash-linear-attention (pip install flash-linear-attention)

    pytest tests/test_model.py tests/test_replay.py     with pretended kernels, on a CPU
"""

import math
import os
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

KERNEL_DEVICES = ("cuda",)  # where outside kernels are tried
FLEX_QUERIES = 128  # nodes from which FlexAttention pays: fewer fill no block of its mask
FLEX_TOLERANCE = 0.01  # how far it may be off, as a share of the largest number: bfloat16's digits
RULE_TOLERANCE = 1e-5  # likewise, for the gated delta rule, which is float32

CHUNK_ELEMENTS = 2**24  # logits of a chunk on a CPU
GPU_CHUNK_ELEMENTS = 2**27  # on a GPU, if its memory allows
CHUNK_COPIES = 10  # tensors of a chunk's size at once: logits, p, q, their minimum, the gradients
CHUNK_SHARE = 1 / 8  # of a GPU's memory that they may take


def chunk_elements(device: torch.device) -> int:
    """How many logits are worked on at once on a device, in the loss and in drawing.

    Every chunk reads the whole head, V x C: a chunk of few rows waits for the head's memory, not
    for arithmetic. At a vocabulary of 150,000 a CPU's chunk has 110 rows, and four times as many
    are 4 % faster in three times the memory. A GPU needs some 300 rows and more: its chunk has 900,
    or what a share of its memory allows."""
    if device.type != "cuda":
        return CHUNK_ELEMENTS
    memory = torch.cuda.get_device_properties(device).total_memory
    return min(GPU_CHUNK_ELEMENTS, int(memory * CHUNK_SHARE) // (4 * CHUNK_COPIES))


def agrees(task: str, kernel: str, fast, plain, tolerance: float) -> bool:
    """Whether fast() gives the tensors that plain() gives, but for a share of the largest number.
    Prints which of the two does the task from now on."""
    gap = math.inf
    why = ""
    try:
        pairs = zip(fast(), plain())
        gap = torch.stack([(a - b).abs().max() / b.abs().max() for a, b in pairs]).max().item()
    except Exception as error:  # not installed, another version, or a kernel that fails
        why = f", {error!r:.120}"
    path = kernel if gap < tolerance else "torch operations"
    print(f"{task} by {path} (relative error of {kernel}: {gap:.0e}{why})")
    return gap < tolerance


# ------------------------------------------------------------------------------ attention in trees


def flex_serves(num_nodes: int, device, dtype: torch.dtype, H: int, H_kv: int, D: int) -> bool:
    """Whether a tree of so many nodes is scored by FlexAttention."""
    is_large = num_nodes >= FLEX_QUERIES and device.type in KERNEL_DEVICES
    return is_large and flex_agrees(device, dtype, H, H_kv, D)


@lru_cache
def compiled(function):
    return torch.compile(function, dynamic=True)  # dynamic: every tree has a size of its own


def tree_block_mask(roots: Tensor, last_descendants: Tensor, T: int) -> BlockMask:
    """The mask of a tree: the twin of ProposalTree.view, element by element. roots and
    last_descendants (B,N) are the nodes', T the trunk's slots."""
    B, N = roots.shape
    num_trunk_slots = roots.new_full((), T)  # a tensor: a number would be compiled in

    def sees(b, head, node, slot):
        other = (slot - num_trunk_slots).clamp(min=0)
        descends = (other <= node) & (node <= last_descendants[b, other])
        return torch.where(slot < num_trunk_slots, slot <= roots[b, node], descends)

    make = compiled(create_block_mask) if roots.is_cuda else create_block_mask
    return make(sees, B, None, N, T + N, device=roots.device)


def attention_in_blocks(q: Tensor, kv: Tensor, mask: BlockMask) -> Tensor:
    """model.attention by FlexAttention: q (B,N,H,D), kv (B,T+N,2,H_kv,D) -> (B,N,H,D)."""
    q, k, v = (x.transpose(1, 2) for x in (q, *kv.unbind(2)))  # (B, H, N, D) in the call only
    flex = compiled(flex_attention) if q.is_cuda else flex_attention
    return flex(q, k, v, block_mask=mask, enable_gqa=k.shape[1] < q.shape[1]).transpose(1, 2)


@lru_cache
@torch.no_grad()
def flex_agrees(device, dtype: torch.dtype, H: int, H_kv: int, D: int) -> bool:
    """Whether FlexAttention agrees with the formula, in float32, on a tree of chains of 16 nodes,
    two at each tenth position of the trunk."""
    T, N = 200, 640
    node = torch.arange(N, device=device)
    chain = node // 16
    root = chain // 2 * 10
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, N, H, D), (1, T + N, 2, H_kv, D))
    q, kv = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)

    def fast() -> list[Tensor]:
        mask = tree_block_mask(root[None], (chain * 16 + 15)[None], T)
        return [attention_in_blocks(q, kv, mask).float()]

    def plain() -> list[Tensor]:
        on_trunk = torch.arange(T, device=device) <= root[:, None]  # (N, T)
        among_nodes = (chain == chain[:, None]) & (node <= node[:, None])  # (N, N)
        mask = torch.cat([on_trunk, among_nodes], -1)
        heads = [x.transpose(1, 2).float() for x in (q, *kv.unbind(2))]
        out = F.scaled_dot_product_attention(*heads, mask, enable_gqa=H_kv < H)
        return [out.transpose(1, 2)]

    return agrees("attention in trees", "FlexAttention", fast, plain, FLEX_TOLERANCE)


# -------------------------------------------------------------------------------- gated delta rule


def rule_serves(plain, chunk: int, k: Tensor, v: Tensor) -> bool:
    """Whether `kernel_delta_rule` does what plain(q, k, v, g, beta, state, checkpoint_tokens) does,
    for k (B,N,H_k,D_k), v (B,N,H,D_v) without gradients."""
    if v.device.type not in KERNEL_DEVICES or v.requires_grad:
        return False
    return rule_agrees(plain, chunk, v.device, *k.shape[-2:], *v.shape[-2:])


def kernel_delta_rule(q, k, v, g, beta, state: Tensor, checkpoint_tokens, chunk: int):
    """replay.delta_rule by flash-linear-attention's kernels. Its public function hides u and the
    states between chunks, so its parts are called, in float32. Checkpoint tokens end a chunk."""
    os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")  # not TF32
    from fla.ops.common.chunk_delta_h import chunk_gated_delta_rule_fwd_h
    from fla.ops.common.chunk_o import chunk_fwd_o
    from fla.ops.common.chunk_scaled_dot_kkt import chunk_scaled_dot_kkt_fwd
    from fla.ops.gated_delta_rule.wy_fast import recompute_w_u_fwd
    from fla.ops.utils import chunk_local_cumsum, solve_tril
    from fla.ops.utils.constant import RCP_LN2

    q, k, v, g, beta, state = (x.contiguous() for x in (q, k, v, g, beta, state))
    G = chunk_local_cumsum(g, chunk_size=chunk, scale=RCP_LN2)  # the kernels use 2**G, not e**G
    A = chunk_scaled_dot_kkt_fwd(k=k, g=G, beta=beta, chunk_size=chunk, output_dtype=torch.float32)
    A = solve_tril(A=A, output_dtype=torch.float32)
    w, unknown = recompute_w_u_fwd(k=k, v=v, beta=beta, A=A, g=G)
    before, u, last = chunk_gated_delta_rule_fwd_h(
        k=k, w=w, u=unknown, g=G, initial_state=state, output_final_state=True, chunk_size=chunk
    )
    o = chunk_fwd_o(q=q, k=k, v=u, h=before, g=G, scale=1.0, chunk_size=chunk)
    after = torch.cat([before[:, 1:], last[:, None]], 1)  # the state after each chunk
    return o, u, after[:, [*((token + 1) // chunk - 1 for token in checkpoint_tokens), -1]]


@lru_cache
@torch.no_grad()
def rule_agrees(plain, chunk: int, device, H_k: int, D_k: int, H: int, D_v: int) -> bool:
    """Whether the kernels agree with `plain` on random tokens."""
    generator = torch.Generator().manual_seed(0)
    N = 2 * chunk + 7
    shapes = ((N, H_k, D_k), (N, H_k, D_k), (N, H, D_v), (N, H), (N, H), (H, D_k, D_v))
    q, k, v, g, beta, S = (torch.randn(2, *s, generator=generator).to(device) for s in shapes)
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    tokens = (q, k, v, -g.abs() / 9, beta.sigmoid(), S / D_k, (chunk - 1,))
    return agrees(
        "gated delta rule",
        "flash-linear-attention",
        lambda: kernel_delta_rule(*tokens, chunk),
        lambda: plain(*tokens),
        RULE_TOLERANCE,
    )
