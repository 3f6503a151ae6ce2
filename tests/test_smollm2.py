"""A real 135M instruct model against transformers. Needs its folder and a file of prompts:

SMOLLM2=FOLDER EVAL_PROMPTS=FOLDER_OF_JSONL pytest tests/test_smollm2.py
"""

import os
from pathlib import Path

import pytest
import torch

from serve import generate
from support.data import first_turn, load_tokenizer, read_prompts
from target import Target

FOLDER, PROMPTS = os.environ.get("SMOLLM2", ""), os.environ.get("EVAL_PROMPTS", "")
pytestmark = pytest.mark.skipif(
    not (FOLDER and PROMPTS), reason="SMOLLM2 and EVAL_PROMPTS name no model and no prompts"
)
COUNT = int(os.environ.get("SMOLLM2_CHATS", 20))


@pytest.fixture(scope="module")
def chats():
    files = sorted(Path(PROMPTS).glob("*.jsonl"))
    return [first_turn(messages) for file in files for messages in read_prompts(file)]


@pytest.fixture(scope="module")
def theirs():
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(FOLDER)


def test_tokenizer_and_chat_template_equal_transformers_on_all_prompts(chats, theirs):
    ours = load_tokenizer(FOLDER)
    for chat in chats:
        text = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert ours.chat(chat) == text
        assert ours.encode(text) == theirs(text, add_special_tokens=False)["input_ids"]
        plain = chat[-1]["content"]
        assert ours.encode(plain) == theirs(plain, add_special_tokens=False)["input_ids"]
    assert len(chats) > 1000


def test_greedy_text_equals_transformers(chats):
    transformers = pytest.importorskip("transformers")
    tokenizer = load_tokenizer(FOLDER)
    target = Target.from_pretrained(FOLDER, dtype=torch.float32)
    model = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    short = [p for p in (tokenizer.encode(tokenizer.chat(c)) for c in chats) if len(p) < 300]
    picked = short[:: len(short) // COUNT][:COUNT]
    ours = generate(target, None, picked, 64, stop_ids=tokenizer.stop_ids)
    for prompt, result in zip(picked, ours):
        ids = torch.tensor([prompt])
        how = dict(attention_mask=torch.ones_like(ids), max_new_tokens=64, do_sample=False)
        wanted = model.generate(ids, **how)
        assert result.tokens == wanted[0, len(prompt) :].tolist()
