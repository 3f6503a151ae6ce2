"""From logits to the distribution that is drawn from and judged by, and from it to tokens.

Speculative decoding is lossless only if what a draft was drawn from and what its acceptance divides
by are the same tensor, so there is one function for both, in float32 on both sides.

    pytest tests/test_drafter.py
"""

from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How logits become the distribution that is drawn from and judged by, the same for p and q."""

    temperature: float = 1.0  # 0 = greedy: all mass on the argmax
    top_k: int = 0  # 0 = off
    top_p: float = 1.0  # 1 = off

    def __post_init__(self):
        if not 0 <= self.temperature < inf or self.top_k < 0 or not 0 < self.top_p <= 1:
            raise ValueError(
                f"temperature >= 0, top_k >= 0 and 0 < top_p <= 1 are needed, not {self}"
            )

    def probs(self, logits: Tensor) -> Tensor:
        """(..., V) -> probabilities (..., V), float32."""
        logits = logits.float()
        if self.temperature == 0:
            return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
        logits = logits / self.temperature
        if 0 < self.top_k < logits.shape[-1]:  # ties at the edge stay in
            edge = logits.topk(self.top_k, -1).values[..., -1:]
            logits = logits.masked_fill(logits < edge, -torch.inf)
        probs = logits.softmax(-1)
        if self.top_p < 1:  # the smallest set of likeliest tokens that reaches top_p
            ordered, order = probs.sort(-1, descending=True)
            outside = ordered.cumsum(-1) - ordered >= self.top_p
            probs = probs.masked_fill(torch.zeros_like(outside).scatter(-1, order, outside), 0.0)
            probs = probs / probs.sum(-1, keepdim=True)
        return probs


def draw(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Tokens by inverse distribution function: probs (..., V), uniforms (..., n) in [0,1) -> (...,
    n). A token of probability zero is never drawn."""
    upto = probs.cumsum(-1)
    whole = upto[..., -1:]
    point = torch.minimum(uniforms * whole, torch.nextafter(whole, torch.zeros_like(whole)))
    found = torch.searchsorted(upto, point.contiguous(), right=True)
    return found.clamp(max=probs.shape[-1] - 1)  # of NaN the last: a loss or `verify` will tell
