"""Texts that part from plain decoding, and the target's margin there."""

import pytest
import torch

from serve import generate
from small import random_prompts
from support.partings import NEAR_TIE, check_partings, format_partings, partings


def test_texts_part_where_the_target_itself_says_so_and_by_which_margin(target, monkeypatch):
    prompts = random_prompts(3)
    plain = [r.tokens for r in generate(target, None, prompts, 9)]
    assert partings(target, prompts, plain, plain) == []
    texts = [list(text) for text in plain]
    logits = target(torch.tensor([prompts[1] + plain[1][:4]]))[0, -1]
    best, second = logits.topk(2).values.tolist()
    texts[1][4:] = [int(logits.topk(2).indices[1]), *reversed(texts[1][5:])]
    (found,) = partings(target, prompts, texts, plain)
    assert found["prompt"] == 1 and found["token"] == 4
    assert found["margin"] == pytest.approx(best - second, abs=1e-4)
    assert not found["near_tie"] and found["margin"] > NEAR_TIE[torch.float32]
    words = f"1 text parts from plain decoding (prompt 1, new token 4, margin {best - second:.3g})"
    assert format_partings([found]) == f"{words}: NO NEAR-TIE"
    with pytest.raises(ValueError, match="something is wrong"):
        check_partings([found])
    monkeypatch.setitem(NEAR_TIE, torch.float32, best - second + 0.1)
    (found,) = partings(target, prompts, texts, plain)
    texts[1][4] = int(logits.argmin())  # near-ties do not excuse a third token
    (other,) = partings(target, prompts, texts, plain)
    assert not other["near_tie"]
    assert other["margin"] == pytest.approx((logits.max() - logits.min()).item(), abs=1e-4)
    (short,) = partings(target, prompts[:1], [plain[0][:3]], plain[:1])
    assert short["token"] == 3 and not short["near_tie"]
    assert found["near_tie"] and format_partings([found]).endswith(": near-ties in this precision")
    check_partings([found])


def test_of_several_partings_the_one_of_the_largest_margin_is_told():
    keys = ("prompt", "token", "margin", "near_tie")
    found = [dict(zip(keys, row)) for row in [(0, 3, 0.1, True), (7, 5, 2.0, False)]]
    text = format_partings(found)
    assert text.startswith("2 texts part") and "at most: prompt 7, new token 5, margin 2)" in text
    with pytest.raises(ValueError, match="prompt 7"):
        check_partings(found)
    assert format_partings([]) == "the same text"
