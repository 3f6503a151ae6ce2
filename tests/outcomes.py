"""Every random outcome of `serve.generate`, enumerated, and what plain decoding would give.

The uniform numbers are replaced by scripts of choices, so a text's probability is exact: the sum
over all scripts that end in it.
"""

import itertools

import torch

import drafter
import loss
import serve
from drafter import PLAIN
from small import small_drafter, small_target
from tree import build_tree


class Outcomes:
    """Each row of a batch follows a script of choices and takes the first possible one where the
    script ends; what it could have chosen there becomes new scripts."""

    def __init__(self, monkeypatch):
        monkeypatch.setattr(drafter, "draw", self.draw)
        monkeypatch.setattr(serve, "draw", self.draw)
        monkeypatch.setattr(serve, "accept", self.accept)
        monkeypatch.setattr(torch, "rand", self.rand)
        # a text that has ended draws no more
        monkeypatch.setitem(serve.SHARE_THAT_LEAVES, "cpu", 0)

    def rand(self, shape, generator=None):  # the uniforms only say which row they belong to
        self.rows += 1
        return torch.full(shape, float(self.rows - 1))

    def choose(self, row: int, options: list[tuple[int, float]]) -> int:
        taken, script = self.taken[row], self.scripts[row]
        if len(taken) < len(script):
            pick = script[len(taken)]
        else:
            pick = options[0][0]
            self.waiting += [taken + [other] for other, _ in options[1:]]
        self.chance[row] *= dict(options)[pick]
        taken.append(pick)
        return pick

    def draw(self, probs, uniforms):
        flat = probs.double().reshape(len(probs), -1, probs.shape[-1])
        flat = flat / flat.sum(-1, keepdim=True)
        rows = uniforms.reshape(len(probs), -1)[:, 0].tolist()
        tokens = [
            [self.choose(int(row), [(v, c) for v, c in enumerate(slot) if c > 0]) for slot in slots]
            for slots, row in zip(flat.tolist(), rows)
        ]
        return torch.tensor(tokens).view(uniforms.shape)

    def accept(self, p_y, q_y, uniforms):
        ratios = (p_y.double() / q_y.double()).clamp(max=1).tolist()
        decisions = []
        for row_ratios, row in zip(ratios, uniforms[:, 0].tolist()):
            accepted = []
            for ratio in row_ratios:  # behind the first rejection nothing is decided any more
                going = not accepted or accepted[-1]
                options = [o for o in ((1, ratio), (0, 1 - ratio)) if o[1] > 0]
                if going and len(options) > 1:
                    going = self.choose(int(row), options)
                accepted.append(bool(going and ratio > 0))
            decisions.append(accepted)
        return torch.tensor(decisions)

    def distribution(self, generate, batch=4096) -> tuple[dict, float]:
        """{text: probability} over all outcomes of `generate(number of rows) -> results`, and the
        probability that the first draft is accepted."""
        self.waiting, texts, accepted = [[]], {}, 0.0
        while self.waiting:
            self.scripts, self.waiting = self.waiting[:batch], self.waiting[batch:]
            self.taken = [[] for _ in self.scripts]
            self.chance = [1.0] * len(self.scripts)
            self.rows = 0
            for result, chance in zip(generate(len(self.scripts)), self.chance):
                text = tuple(result.tokens)
                texts[text] = texts.get(text, 0.0) + chance
                accepted += chance * (result.accepted[0] > 0)
        return texts, accepted


def plain_distribution(target, prompt, sampling, length) -> dict:
    """{text: probability} of every text of that length, by the target alone."""
    texts = {}
    for text in itertools.product(range(target.config.vocab_size), repeat=length):
        logits = target(torch.tensor([[*prompt, *text]]))[0, len(prompt) - 1 : -1]
        p = sampling.probs(logits).double()
        texts[text] = p.gather(-1, torch.tensor(text)[:, None]).prod().item()
    return texts


def distance(texts: dict, expected: dict) -> float:
    """The largest difference between the probabilities that the two give one text."""
    every_text = expected.keys() | texts.keys()
    return max(abs(texts.get(text, 0.0) - expected.get(text, 0.0)) for text in every_text)


def trained_on_four_tokens(**fields) -> tuple:
    """-> a target over 4 tokens whose p depends on history, and a drafter that was trained to be
    near it. MASK is id 3, which q never holds and p does."""
    target = small_target(seed=3, std=0.25, vocab_size=4, num_hidden_layers=2)
    near = small_drafter(target, mask_token_id=3, **fields)
    target.num_tokens = 4
    optimizer = torch.optim.AdamW(near.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(150):
        tokens = torch.randint(0, 4, (16, 6), generator=generator)
        trunk = target.prefill(tokens, torch.full((16,), 6))
        anchors = torch.tensor([[2, 3, 4]]).expand(16, 3)
        proposal = near.propose(trunk, anchors, 4, PLAIN, generator)
        p = target.branch_probs(trunk, build_tree(tokens, trunk.lengths, anchors, proposal.tokens))
        loss.tv(p, proposal.probs()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return target, near
