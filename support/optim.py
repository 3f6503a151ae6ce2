"""Optimizers and their learning rates.

Muon trains most matrices that multiply a hidden state. AdamW trains the rest: embeddings and heads
of the vocabulary, other tables, the confidence head, stacked experts, kernels of convolutions and
vectors. Two lists of names say which is which; a parameter in neither list is an error.

    Muon:  m <- lerp(m, g, 1 - momentum);  W <- W - lr * sqrt(max(1, rows / columns)) * O(g, m)

O(g, m) is roughly the orthogonal matrix nearest to a mix of g and m (Nesterov). Unlike
torch.optim.Muon it has no weight decay, and on a CPU it works in float32, because bfloat16 is
several times slower there.

Processes that train one module have the same gradients and the same m, but each computes O of its
own matrices alone and sends it to the others. So the result is that of one process, bit for bit,
and a training state is whole on every process: a run may go on with another number of them.

    pytest tests/support/test_optim.py
"""

import math

import torch
from torch import Tensor, nn

from support import distributed

WARMUP_STEPS = 20
COOLDOWN = 0.3  # the last share of the steps, over which the rate falls to a tenth
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Keller Jordan's, steepest at zero

# A parameter goes by the last two parts of its name, without ".weight".
MUON = """
    fc q_proj k_proj v_proj o_proj gate_proj up_proj down_proj
    joint_proj hidden_projection kernel_projection
    in_proj_qkv in_proj_z in_proj_a in_proj_b out_proj index_qk_proj key_proj value_proj
    gate shared_expert_gate input_mix_weight_down input_mix_weight_up block_inject_weight
""".split()
ADAMW = """
    embed_tokens lm_head ngram_embedding markov_w1 markov_w2
    candidate_selector.predecessor_codebook candidate_selector.successor_codebook
    proj proj.bias gate_proj.bias joint_proj.bias
    norm hidden_norm input_layernorm post_attention_layernorm q_norm k_norm q_layernorm k_layernorm
    hc_norm norm_key norm_query norm_conv conv1d attention_conv.base_kernel mlp_conv.base_kernel
    linear_attn.A_log linear_attn.dt_bias experts.gate_up_proj experts.down_proj
""".split()


def is_for_muon(name: str) -> bool:
    """Whether Muon trains the parameter of this full name, by the lists above."""
    key = ".".join(name.split(".")[-2:]).removesuffix(".weight")
    if key not in MUON and key not in ADAMW:
        raise ValueError(f"no optimizer for {name}: list {key!r} in MUON or ADAMW (optim.py)")
    return key in MUON


def arithmetic(matrix: Tensor) -> torch.dtype:
    """The type that Newton-Schulz works in."""
    return torch.float32 if matrix.is_cpu else torch.bfloat16


def orthogonalized(matrix: Tensor) -> Tensor:
    """The nearest orthogonal matrix, roughly, by five Newton-Schulz iterations."""
    a, b, c = COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    X = matrix.to(arithmetic(matrix))
    X = X.T if is_tall else X
    X = X / X.norm().clamp(min=1e-7)  # singular values of at most 1
    for _ in range(5):
        A = X @ X.T
        B = torch.addmm(A, A, A, beta=b, alpha=c)
        X = torch.addmm(X, B, X, beta=a)
    return X.T if is_tall else X


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalized; for matrices."""

    def __init__(self, matrices, lr: float, momentum: float = 0.95):
        super().__init__(matrices, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, together: bool = False) -> None:
        """Update the matrices; together: with all processes, which have the same gradients."""
        size = distributed.num_processes() if together else 1
        number = distributed.rank() if together else 0
        for group in self.param_groups:
            matrices = [matrix for matrix in group["params"] if matrix.grad is not None]
            matrices.sort(
                key=Tensor.numel, reverse=True
            )  # what is worked on at once is of like sizes
            for start in range(0, len(matrices), size):
                part = matrices[start : start + size]  # process i works on part[i]
                updates = [
                    self._update(matrix, group["momentum"], is_own=number == i)
                    for i, matrix in enumerate(part)
                ]
                if size > 1:
                    distributed.share(updates)
                for matrix, update in zip(part, updates):
                    num_rows, num_columns = matrix.shape
                    scale = math.sqrt(max(1, num_rows / num_columns))
                    matrix.add_(update, alpha=-group["lr"] * scale)

    def _update(self, matrix: Tensor, momentum: float, is_own: bool) -> Tensor:
        """Move the matrix's average -> O of it and the gradient; if not its own, room for it."""
        state = self.state[matrix]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(matrix.grad)
        average = state["momentum_buffer"].lerp_(matrix.grad, 1 - momentum)
        if not is_own:
            return torch.empty(matrix.shape, dtype=arithmetic(matrix), device=matrix.device)
        return orthogonalized(matrix.grad.lerp(average, momentum)).contiguous()


def make_optimizers(module: nn.Module, matrix_lr: float, lr: float) -> list:
    """AdamW and Muon for a module's parameters; AdamW alone with matrix_lr 0."""
    matrices, rest = [], []
    for name, parameter in module.named_parameters():
        use_muon = is_for_muon(name) and matrix_lr > 0
        (matrices if use_muon else rest).append(parameter)
    group = {"params": rest, "full_lr": lr}
    optimizers = [torch.optim.AdamW([group], lr, betas=(0.9, 0.95), weight_decay=0.0)]
    if matrices:
        optimizers.append(Muon([{"params": matrices, "full_lr": matrix_lr}], matrix_lr))
    return optimizers


def set_learning_rate(optimizers: list, step: int, num_steps: int, cooldown=COOLDOWN) -> None:
    """Linear warm-up, constant, then linear down to a tenth over the last `cooldown` of steps."""
    remaining = (num_steps - step) / max(1.0, cooldown * num_steps)
    share = min((step + 1) / WARMUP_STEPS, 1.0, 0.1 + 0.9 * remaining)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["full_lr"] * share


def optimizer_step(optimizers: list, together: bool = False) -> None:
    """Update the parameters and drop their gradients. together: see `Muon.step`."""
    for optimizer in optimizers:
        how = {"together": together} if isinstance(optimizer, Muon) else {}
        optimizer.step(**how)
        optimizer.zero_grad()
