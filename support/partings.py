"""Where greedy texts part from plain decoding: at a near-tie of the target, or at a fault.

At temperature 0 a drafter must not change the text. But two tokens may be equally good but for
rounding, and a pass over several tokens rounds otherwise than a pass over one: then a text may go
either way, and its speed is still a fair one. A large margin between the two is no rounding.

    pytest tests/support/test_partings.py
"""

import itertools
import math

import torch

# By how much of a logit two tokens may differ where rounding alone can swap them. Logits are
# mostly below 32, and there bfloat16's are 0.125 apart, float16's 0.016: these are four such steps.
# Float32 rounds inside the layers, not in the logits.
NEAR_TIE = {torch.float32: 1e-3, torch.bfloat16: 0.5, torch.float16: 0.0625}


def margin(target, tokens: list[int], said: set[int]) -> float:
    """By how much of a logit the best next token leads the worst of `said`, in a plain run of the
    text. Where the best two were said this is the margin between the two."""
    device = target.lm_head.weight.device
    lengths = torch.tensor([len(tokens)], device=device)
    tokens = torch.tensor([tokens], device=device)
    hidden = target.prefill(tokens, lengths, tap_ids=(), checkpoint_every=0).hidden[0, -1:]
    logits = target.head(hidden)[0].float()
    return (logits.max() - logits[list(said)].min()).item()


def partings(target, prompts, texts, plain) -> list[dict]:
    """Where greedy texts are not those of plain decoding: the prompt's number, how many new tokens
    are the same, the margin there, and whether rounding alone explains it."""
    limit = NEAR_TIE.get(target.lm_head.weight.dtype, NEAR_TIE[torch.float32])
    found = []
    for number, (prompt, text, other) in enumerate(zip(prompts, texts, plain)):
        if text != other:
            same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(text, other))
            common = [token for token, _ in same]
            said = {token for way in (text, other) for token in way[len(common) :][:1]}
            # of one text that goes on where the other has ended, nothing is near
            gap = margin(target, prompt + common, said) if len(said) == 2 else math.inf
            near = {"margin": gap, "near_tie": gap <= limit}
            found.append({"prompt": number, "token": len(common)} | near)
    return found


def format_partings(found: list[dict]) -> str:
    """In words what `partings` found; of several, the one of the largest margin."""
    if not found:
        return "the same text"
    worst = max(found, key=lambda parting: parting["margin"])
    count = "1 text parts" if len(found) == 1 else f"{len(found)} texts part"
    where = f"prompt {worst['prompt']}, new token {worst['token']}, margin {worst['margin']:.3g}"
    most = "" if len(found) == 1 else "at most: "
    verdict = "near-ties in this precision" if worst["near_tie"] else "NO NEAR-TIE"
    return f"{count} from plain decoding ({most}{where}): {verdict}"


def check_partings(found: list[dict]) -> None:
    """Raise a ValueError if rounding alone does not explain where a text parts."""
    if not all(parting["near_tie"] for parting in found):
        raise ValueError(
            f"greedy decoding: {format_partings(found)}: a drafter must not change the text, so "
            "something is wrong (--dtype float32 tells whether it is precision)"
        )
