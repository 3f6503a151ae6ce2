"""References: texts that the target wrote, each a prompt and a response.

Training never learns another model's text, so the TARGET writes the responses, in parts that are
kept. A response depends on the seed and on its prompt's number alone: it is the same however the
work is split or interrupted. Prompts that AL is measured on travel in the same file.

    pytest tests/support/test_references.py
"""

import json
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from hf.files import open_tensors, read_json
from hf.tokenizer import NO_PROMPT, Tokenizer
from support import distributed
from support.data import TOO_LONG, format_reasons
from support.files import write_json, write_tensors
from support.resume import check_same, stage


@dataclass
class References:
    """n texts that the target wrote, each a prompt and a response."""

    tokens: Tensor  # (n, T) right-padded
    lengths: Tensor  # (n,)
    prompt_lengths: Tensor  # (n,)

    def save(self, path, made_with: dict, held_out: list[list[int]] = ()) -> None:
        """Write the texts, and with them prompts that AL can be measured on."""
        tensors = vars(self) | {"tokens": self.tokens.int()}
        if held_out:
            rows = [torch.tensor(prompt, dtype=torch.int) for prompt in held_out]
            padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
            tensors |= {"held_out_tokens": padded, "held_out_lengths": lengths_of(held_out)}
        write_tensors(path, tensors, {"made_with": made_with})

    @classmethod
    def load(cls, path, made_with: dict | None = None) -> "References":
        """Read references that were made with `made_with`."""
        names = ("tokens", "lengths", "prompt_lengths")
        _check_made_with(how_made(path), made_with or {}, path)
        with open_tensors(path) as file:
            missing = set(names) - set(file.keys())
            if missing:
                raise ValueError(f"{path} holds no references, it lacks {min(missing)}")
            references = cls(*(file.get_tensor(name).long() for name in names))
        if not references.is_consistent():
            raise ValueError(f"{path}: no references, or their lengths do not fit them")
        return references

    def sizes(self) -> str:
        """How many and how long they are, in words."""
        responses = self.lengths - self.prompt_lengths
        prompt = f"prompts of {int(self.prompt_lengths.min())} to {int(self.prompt_lengths.max())}"
        response = f"responses of {int(responses.min())} to {int(responses.max())} tokens"
        return f"{len(self.lengths):,} references, {prompt} and {response}"

    def is_consistent(self) -> bool:
        """Whether there are texts, and lengths that fit them."""
        tokens, lengths, prompt_lengths = self.tokens, self.lengths, self.prompt_lengths
        if tokens.dim() != 2 or not lengths.shape == prompt_lengths.shape == tokens.shape[:1]:
            return False
        fits = (0 <= prompt_lengths) & (prompt_lengths < lengths) & (lengths <= tokens.shape[1])
        return tokens.numel() > 0 and bool(fits.all()) and int(tokens.min()) >= 0

    @classmethod
    def from_lists(cls, prompts: list[list[int]], responses: list[list[int]], pad_id: int):
        """Texts whose response has fewer than two tokens, too few for an anchor, are left out."""
        pairs = [(p, r) for p, r in zip(prompts, responses) if len(r) >= 2]
        if not pairs:
            raise ValueError("nothing to supervise: every response is shorter than two tokens")
        rows = [torch.tensor([*p, *r]) for p, r in pairs]
        tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad_id)
        return cls(tokens, lengths_of(rows), lengths_of([prompt for prompt, _ in pairs]))

    @classmethod
    def from_conversations(
        cls, conversations: list, tokenizer: Tokenizer, length: int, prompt=0, response=0
    ):
        """Each assistant turn that ends within `length` tokens; all before it is its prompt.
        prompt, response: the most tokens of each by itself; 0: no limit. What is left out is
        counted by reason."""
        prompts, responses = [], []
        left_out = Counter()
        num_tokens = num_supervised = 0
        for messages in conversations:
            try:
                ids, supervised, why_left_out = tokenizer.turns(messages)
            except ValueError as error:
                left_out[str(error)] += 1
                continue
            num_tokens += len(ids)
            left_out.update(why_left_out)
            for start, end in _turns(ids, supervised, tokenizer.stop_ids):
                reason = _why_unfit(start, end, length, prompt, response)
                if reason:
                    left_out[reason] += 1
                    continue
                num_supervised += end - start
                prompts.append(ids[:start])
                responses.append(ids[start:end])
        if not prompts:
            raise ValueError(f"nothing to supervise: {format_reasons(left_out, tokenizer)}")
        if left_out:
            print(f"left out: {format_reasons(left_out, tokenizer)}")
        share = f"{num_supervised / num_tokens:.1%} of all {num_tokens:,}"
        turns = f"{len(prompts):,} assistant turns"
        print(f"{num_supervised:,} supervised tokens in {turns}, {share}")
        return cls.from_lists(prompts, responses, tokenizer.pad_id)


def lengths_of(rows: list) -> Tensor:
    return torch.tensor([len(row) for row in rows])


def load_held_out(path) -> list[list[int]]:
    """Read the prompts that were held out when references were made; none in an old file."""
    names = ("held_out_tokens", "held_out_lengths")
    with open_tensors(path) as file:
        if not set(names) <= set(file.keys()):
            return []
        tokens, lengths = (file.get_tensor(name).long() for name in names)
    fits = tokens.dim() == 2 and lengths.shape == tokens.shape[:1]
    if not (fits and len(lengths) and 0 < lengths.min() and lengths.max() <= tokens.shape[1]):
        raise ValueError(f"{path}: the lengths of the held-out prompts do not fit them")
    return [row[:length].tolist() for row, length in zip(tokens, lengths.tolist())]


def _why_unfit(start: int, end: int, length: int, prompt: int, response: int) -> str | None:
    """Why the turn of tokens start to end makes no reference; None if it makes one."""
    if start == 0:
        return NO_PROMPT
    if end > length:
        return f"{TOO_LONG} {length} tokens"
    if prompt and start > prompt:
        return f"its prompt is longer than --prompt-length {prompt}"
    if response and end - start > response:
        return f"the turn is longer than --response-length {response}"
    return "the turn has fewer than two tokens" if end - start < 2 else None


def how_made(path) -> dict:
    """How references were made, as their file records it."""
    with open_tensors(path) as file:
        metadata = file.metadata() or {}
    try:
        return dict(json.loads(metadata.get("made_with", "{}")))
    except (ValueError, TypeError):
        raise ValueError(f"{path} does not say how it was made") from None


def _check_made_with(recorded: dict, made_with: dict, path) -> None:
    """Check how references were made. Those of a server, with target None, fit any target."""
    if "target" in recorded and recorded["target"] is None:
        made_with = made_with | {"target": None}
    check_same(recorded, made_with, path)


def _turns(ids: list[int], supervised: list[bool], stop_ids) -> list[tuple[int, int]]:
    """Start and end of each supervised stretch; it ends after its first stop token, if any."""
    padded = [False, *supervised, False]
    edges = [i for i, (before, after) in enumerate(pairwise(padded)) if before != after]
    turns = []
    for start, end in zip(edges[::2], edges[1::2]):
        stops = [i + 1 for i in range(start, end) if ids[i] in stop_ids]
        turns.append((start, stops[0] if stops else end))
    return turns


# ------------------------------------------------------------------------------- written in parts


def write_in_parts(
    folder: Path, made_with: dict, prompts: list, write, size: int, most: int, alone=False
) -> list:
    """Let write(prompts, their numbers) answer the prompts, `size` at once, and keep each part in
    the folder -> all responses, in the prompts' order. What is there already is not written again.
    most: tokens of a response; alone: the other processes, if any, do not take part."""
    if alone or distributed.is_main():
        stage(folder, made_with | {"part": size, "by": "length"}, lambda: {})
    # prompts of a part are about as long as each other, so little of it is padding
    order = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
    parts = [order[start : start + size] for start in range(0, len(order), size)]
    paths = [folder / f"{number:06d}.json" for number in range(len(parts))]
    wait = (lambda: None) if alone else distributed.barrier
    wait()
    missing = [number for number, path in enumerate(paths) if not path.is_file()]
    wait()  # all have looked before anyone writes
    own = missing if alone else distributed.own_rows(missing)
    how = dict(unit=" tokens", unit_scale=True, disable=not (alone or distributed.is_main()))
    with tqdm(total=sum(len(parts[n]) for n in own) * most, desc="references", **how) as bar:
        for number in own:
            responses = write([prompts[i] for i in parts[number]], parts[number])
            write_json(paths[number], {"responses": responses})
            num_tokens = sum(len(response or ()) for response in responses)
            bar.total -= len(responses) * most - num_tokens
            bar.update(num_tokens)
    wait()
    responses = [r for path in paths for r in read_json(path).get("responses", [])]
    if len(responses) != len(prompts):
        counts = f"{len(responses)} responses to {len(prompts)} prompts"
        raise ValueError(f"{folder} holds {counts}: remove it")
    return [response for _, response in sorted(zip(order, responses))]
