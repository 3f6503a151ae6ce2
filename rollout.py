"""Sequential on-policy distillation, the baseline that SpecOPD is measured against.

    1. decode whole responses with the current drafter by real rounds of draft and verify
    2. keep every proposed block, accepted and rejected positions, with the target's distributions
       of that very verification: nothing is scored twice
    3. run the drafter again on those blocks, with gradient; loss, update; repeat

(Draft-OPD, arXiv 2605.29343, in outline.) The states are those that serving visits, but a response
of n tokens takes n / AL rounds one after the other, and only the blocks it passes are supervised:
SpecOPD samples its blocks at all anchors of a ready text at once.

    pytest tests/test_rollout.py
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from drafter import Drafter
from serve import generate
from target import Target, Trunk
from tree import gather_slots, with_room


@dataclass
class Blocks:
    """Blocks along B texts, and what the target said of them: the R rounds of a decoding (K = 1, -1
    where a response had fewer), the branches of a tree, or the text itself. `step.draw` adds what
    learning needs beyond the first four."""

    trunk: Trunk  # tokens, lengths and taps, nothing else
    anchors: Tensor  # (B, R)
    tokens: Tensor  # (B, R, K, W) what was drafted
    # (B, R, K, W, C) the target's hidden that gave p_1..p_W; None: learned without
    p_hidden: Tensor | None
    weight: Tensor | None = None  # (B, R) of a block in the loss; None: all alike
    valid: Tensor | None = None  # (B, R, K, W) positions that count
    text: Tensor | None = None  # (B, R, 1, W) the trunk's own tokens behind the anchors
    labelled: Tensor | None = None  # (B, R, 1, W) those that may be labels
    # (B, R, 1, W, C) of the pass that drafted, with its graph; None: to be run
    hidden: Tensor | None = None
    counts: dict = field(default_factory=dict)  # of the tree: nodes, and those without merging


def until_stop(tokens: Tensor, stop_ids: tuple) -> Tensor:
    """Valid positions (…,W) of branches: up to and including the first stop token."""
    if not stop_ids:
        return torch.ones_like(tokens, dtype=torch.bool)
    stops = torch.isin(tokens, torch.tensor(stop_ids, device=tokens.device)).long()
    return stops.cumsum(-1) - stops == 0


@dataclass
class Recorder:
    """Watches `serve.generate` decode one batch: what each round drafted, verified and tapped."""

    width: int  # tokens of the longest text, and room for a round behind it
    taps: Tensor | None = None  # (B, width, ·)
    rounds: list = field(default_factory=list)

    def start(self, trunk: Trunk) -> None:
        self.taps = with_room(trunk.taps, self.width).clone()

    def round(self, alive: list, anchors: Tensor, drafts: Tensor, scored, path: Tensor) -> None:
        """Rows `alive` of the batch: anchors (B',1), drafts (B',W), path (B',W+1) of the commit."""
        B, W = len(self.taps), drafts.shape[1]
        rows = torch.tensor(alive, device=drafts.device)
        slots = anchors + torch.arange(W + 1, device=anchors.device)
        # rejected ones are overwritten by the next round
        self.taps[rows[:, None], slots] = gather_slots(scored.taps, path.clamp(min=0))
        hidden = scored.hidden[:, 0, 0, :W]  # (B', W, C)
        parts = {"anchors": anchors[:, 0], "tokens": drafts, "hidden": hidden}
        whole = {
            "anchors": anchors.new_full((B,), -1),
            "tokens": drafts.new_zeros(B, W),
            "hidden": hidden.new_zeros(B, *hidden.shape[1:]),
        }
        for name, part in parts.items():
            whole[name][rows] = part
        self.rounds.append(whole)


def collect(
    target: Target,
    drafter: Drafter,
    prompts: list[list[int]],
    max_new_tokens: int,
    temperature: float = 1.0,
    seed: int = 0,
    stop_ids=(),
    places=None,
) -> Blocks:
    """Decode the prompts in one batch with the drafter as it is now."""
    W = drafter.config.num_draft_tokens
    longest = max(map(len, prompts)) + max_new_tokens + W + 1
    recorder = Recorder(longest)
    results = generate(
        target,
        drafter,
        prompts,
        max_new_tokens,
        temperature,
        seed,
        stop_ids,
        batch_size=len(prompts),
        watch=recorder,
        places=places,
    )
    if not recorder.rounds:  # every response ended with its first token: nothing to learn
        B, C = len(prompts), target.config.hidden_size
        nothing = torch.zeros(B, W, C, device=recorder.taps.device, dtype=recorder.taps.dtype)
        tokens = torch.zeros(B, W, dtype=torch.long, device=nothing.device)
        recorder.rounds = [{"anchors": tokens[:, 0] - 1, "tokens": tokens, "hidden": nothing}]
    device = recorder.taps.device
    rows = [torch.tensor(p + r.tokens) for p, r in zip(prompts, results)]
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device)
    lengths = torch.tensor([len(row) for row in rows], device=device)
    anchors, drafts, hidden = (
        torch.stack([one[name] for one in recorder.rounds], 1)
        for name in ("anchors", "tokens", "hidden")
    )  # (B, R), (B, R, W), (B, R, W, C)
    trunk = Trunk(
        tokens,
        lengths,
        [],
        drafter.config.target_layer_ids,
        int(lengths.max()),
        taps=recorder.taps[:, : tokens.shape[1]].clone(),
    )
    return Blocks(trunk, anchors, drafts[:, :, None], hidden[:, :, None])
