"""A real 135M instruct model against transformers. Needs its folder and a folder of prompts:

SMOLLM2=FOLDER EVAL_PROMPTS=FOLDER_OF_JSONL pytest -m slow tests/slow/test_smollm2.py
"""

import os
from pathlib import Path

import pytest
import torch

from hf import load_tokenizer
from hf.chat import first_turn, read_prompts
from serve import generate
from target import Target

SMOLLM2 = os.environ.get("SMOLLM2", "")
EVAL_PROMPTS = os.environ.get("EVAL_PROMPTS", "")
NUM_CHATS = int(os.environ.get("SMOLLM2_CHATS", 20))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (SMOLLM2 and EVAL_PROMPTS),
        reason="SMOLLM2 and EVAL_PROMPTS name no model and no prompts",
    ),
]


def real_chats() -> list[list[dict]]:
    files = sorted(Path(EVAL_PROMPTS).glob("*.jsonl"))
    return [first_turn(messages) for file in files for messages in read_prompts(file)]


def test_ids_and_chat_text_equal_transformers_on_all_prompts():
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(SMOLLM2)
    ours = load_tokenizer(SMOLLM2)
    chats = real_chats()
    for chat in chats:
        text = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert ours.chat(chat) == text
        for plain in (text, chat[-1]["content"]):
            assert ours.encode(plain) == theirs(plain, add_special_tokens=False)["input_ids"]
    assert len(chats) > 1000


def test_greedy_text_equals_transformers():
    transformers = pytest.importorskip("transformers")
    tokenizer = load_tokenizer(SMOLLM2)
    target = Target.from_pretrained(SMOLLM2, dtype=torch.float32)
    model = transformers.AutoModelForCausalLM.from_pretrained(SMOLLM2, dtype=torch.float32)
    prompts = [tokenizer.encode(tokenizer.chat(chat)) for chat in real_chats()]
    short = [prompt for prompt in prompts if len(prompt) < 300]
    prompts = short[:: len(short) // NUM_CHATS][:NUM_CHATS]
    results = generate(target, None, prompts, 64, stop_ids=tokenizer.stop_ids)
    for prompt, result in zip(prompts, results):
        ids = torch.tensor([prompt])
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=64, do_sample=False
        )
        assert result.tokens == expected[0, len(prompt) :].tolist()
