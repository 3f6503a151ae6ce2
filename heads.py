"""What makes the tokens of a block depend on one another: DSpark's and DFlash 2's additions.

DFlash fills all slots at once, so slot k does not know which token slot k-1 got. Two remedies, both
cheap steps from left to right behind the one pass of the backbone, e_k a vector of the token
y_{k-1} before slot k (y_0 = x_a) and h_k the slot's hidden state:

    DSpark     logits_k + W2 f(e_k), f the identity, a gate on (h_k, e_k), or a small recurrence;
               and a confidence, the chance that draft k is accepted
    DFlash 2   of the k best tokens of each slot, U_k(c) + <pred[y_{k-1}] * P h_k, succ[c]>; and
               short convolutions along the block, their kernels made from the block itself

    python heads.py             one slot's q after two different tokens, for each kind
    pytest tests/test_drafter.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model import ModelConfig
from hf.drafters import DrafterConfig
from model import DecoderLayer
from tree import View


class MarkovHead(nn.Module):
    """DSpark's sequential head. Fresh: W2 = 0, so that it changes nothing."""

    def __init__(self, config: DrafterConfig):
        super().__init__()
        V, C, R = config.layers.vocab_size, config.layers.hidden_size, config.markov_rank
        self.kind = config.markov_head_type
        self.markov_w1, self.markov_w2 = nn.Embedding(V, R), nn.Linear(R, V, bias=False)
        nn.init.zeros_(self.markov_w2.weight)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(C + R, R)
        elif self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * R + C, 3 * R)

    def forward(self, hidden: Tensor, before: Tensor, state: Tensor | None):
        """hidden (...,W,C) and the tokens before each slot (...,W) -> what is added to the logits
        (...,W,V), the state for the slots behind them (the recurrence's; else None)."""
        e = self.markov_w1(before)  # (..., W, R)
        hidden = hidden.expand(*e.shape[:-1], -1)
        if self.kind == "gated":
            e = self.gate_proj(torch.cat([hidden, e], -1)).sigmoid() * e
        elif self.kind == "rnn":
            state = torch.zeros_like(e[..., 0, :]) if state is None else state
            outputs = []
            for k in range(e.shape[-2]):
                joint = self.joint_proj(torch.cat([state, e[..., k, :], hidden[..., k, :]], -1))
                g, c, o = joint.chunk(3, -1)
                state = g.sigmoid() * state + (1 - g.sigmoid()) * c.tanh()
                outputs.append(o.tanh())
            e = torch.stack(outputs, -2)
        return self.markov_w2(e), state


class ConfidenceHead(nn.Module):
    """How likely draft k is to be accepted, given that those before it were (as a logit)."""

    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.with_markov = config.confidence_head_with_markov and config.markov_rank > 0
        width = config.layers.hidden_size + config.markov_rank * self.with_markov
        self.proj = nn.Linear(width, 1)
        nn.init.zeros_(self.proj.weight)
        nn.init.zeros_(self.proj.bias)

    def forward(self, hidden: Tensor, e: Tensor | None) -> Tensor:
        """hidden (...,W,C), the vectors of the tokens before (...,W,R) -> (...,W)."""
        if self.with_markov:
            hidden = torch.cat([hidden.expand(*e.shape[:-1], -1), e], -1)
        return self.proj(hidden)[..., 0]


class CandidateSelector(nn.Module):
    """DFlash 2's choice among each slot's best tokens. Fresh: successors = 0, so that it changes
    nothing."""

    def __init__(self, config: DrafterConfig):
        super().__init__()
        V, R = config.layers.vocab_size, config.selector_rank
        self.predecessor_codebook = nn.Parameter(torch.randn(V, R))
        self.successor_codebook = nn.Parameter(torch.zeros(V, R))
        self.hidden_projection = nn.Linear(config.layers.hidden_size, R, bias=False)

    def forward(self, hidden: Tensor, before: Tensor, ids: Tensor) -> Tensor:
        """hidden (...,W,C), the tokens before (...,W), candidates (...,W,k) -> what is added to
        their unary logits (...,W,k)."""
        context = self.predecessor_codebook[before] * self.hidden_projection(hidden)
        return (context[..., None, :] * self.successor_codebook[ids]).sum(-1)


class DynamicConv(nn.Module):
    """A short convolution along the block, before and behind a sublayer: each slot's kernel is a
    stored one plus what a projection of the slot makes of itself, shared by groups of channels.
    Taps before the block read zero. Fresh: the identity.

    out_t = sum over tau of (base[side, tau] + delta_t[side, tau]) * x_{t - tau}
    """

    def __init__(self, config: DrafterConfig):
        super().__init__()
        C, self.taps = config.layers.hidden_size, config.conv_kernel_size
        self.group, self.block = config.conv_group_size, config.block_size
        self.base_kernel = nn.Parameter(torch.zeros(2, self.taps, C))
        nn.init.ones_(self.base_kernel[:, 0])
        rows = 2 * self.taps * (C // self.group)
        self.kernel_projection = nn.Linear(C, rows, bias=False)
        nn.init.zeros_(self.kernel_projection.weight)

    def kernels(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x (B,A*b,C), the sublayer's normed input -> kernels of both sides (B,A*b,taps,C)."""
        delta = self.kernel_projection(x).unflatten(-1, (2, self.taps, -1))
        return (delta.repeat_interleave(self.group, -1) + self.base_kernel).unbind(2)

    def forward(self, x: Tensor, kernel: Tensor) -> Tensor:
        """x (B,A*b,C) -> the same, convolved within each block."""
        blocks = x.unflatten(1, (-1, self.block))  # (B, A, b, C)
        kernel = kernel.unflatten(1, (-1, self.block))  # (B, A, b, taps, C)
        out = kernel[..., 0, :] * blocks
        for tau in range(1, self.taps):
            out = out + kernel[..., tau, :] * F.pad(blocks, (0, 0, tau, 0))[:, :, : self.block]
        return out.flatten(1, 2)


class ConvolvedLayer(DecoderLayer):
    """A decoder layer of DFlash 2: a convolution before and behind each sublayer. Context features
    are not convolved."""

    def __init__(self, config: ModelConfig, whole: DrafterConfig):
        super().__init__(config)
        self.attention_conv, self.mlp_conv = DynamicConv(whole), DynamicConv(whole)

    def forward(self, x: Tensor, rope, view: View, past: dict | None = None):
        """x (B,A*b,C) -> x, what the layer remembers, its input."""
        normed = self.input_layernorm(x)
        before, behind = self.attention_conv.kernels(normed)
        mixed, new = self.mix(self.attention_conv(normed, before), rope, view, past)
        y = x + self.attention_conv(mixed, behind)
        normed = self.post_attention_layernorm(y)
        before, behind = self.mlp_conv.kernels(normed)
        return y + self.mlp_conv(self.mlp(self.mlp_conv(normed, before)), behind), new, x


def main():
    from drafter import Drafter  # which is built on this file
    from target import Target

    target = Target.toy(num_hidden_layers=2, hidden_size=32, intermediate_size=64)
    target.num_tokens = 258
    tokens = torch.arange(65, 75)[None]
    trunk, anchors = target.prefill(tokens, torch.tensor([10])), torch.tensor([[6]])
    print("context x_0..x_6; slot 2 predicts position 8. Its likeliest tokens if y_1 was ...\n")
    kinds = {
        "DFlash": dict(block_size=4),
        "DSpark": dict(block_size=3, architecture="Qwen3DSparkModel", markov_rank=8),
        "DFlash 2": dict(block_size=4, architecture="DFlash2DraftModel", selector_rank=8),
    }
    for name, fields in kinds.items():
        drafter = Drafter.fresh(target, **fields)
        for table in ("markov_head.markov_w2.weight", "candidate_selector.successor_codebook"):
            if table in (found := dict(drafter.named_parameters())):  # fresh ones are zero
                nn.init.normal_(found[table], generator=torch.Generator().manual_seed(0))
        hidden = drafter.block(trunk, anchors)[:, :, None]  # (1, 1, 1, W, C)
        for y_1 in (72, 101):
            before = torch.tensor([[[[int(tokens[0, 6]), y_1, 0]]]])
            chance, ids = drafter.logits(hidden, before)[0, 0, 0, 1].float().softmax(-1).topk(3)
            shown = ", ".join(f"{i}: {c:.4f}" for i, c in zip(ids.tolist(), chance.tolist()))
            print(f"  {name:9s} y_1 = {y_1:3d}   {shown}")
    print("\nDFlash's slots know nothing of one another; the others read the token before.")


if __name__ == "__main__":
    with torch.no_grad():
        main()
