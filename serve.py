"""Speculative decoding: draft, score, verify, commit, until every text has ended.

1. The last committed token is the anchor. The drafter proposes y_1..y_W after it in one pass.
2. The target scores the chain anchor, y_1..y_W in one pass: p_1..p_{W+1}. It is the tree of
   training, with one branch.
3. y_k is accepted with probability min(1, p_k(y_k) / q_k(y_k)). At the first rejection a token is
   drawn from the residual (p - q)+, normalised; if all are accepted, a bonus token from p_{W+1}.
4. The accepted path joins the trunk, and the new token is the next anchor.

The text has exactly the target's distribution. At temperature 0, p and q are one-hot, and this
reads: accept while y_k is the target's argmax. Plain decoding is the same loop with W = 0.

Acceptance length (AL) = tokens committed per verification, the bonus or corrected token included.
The token that prefill commits is not counted. A round counts up to its stop token; max_new_tokens
cuts the text, not the count. A round may verify fewer drafts, n <= W, or none (AutoLength): such
rounds count, too, so train.py's AL is that of --draft-length 0. When texts end, the next prompts
take their places (Batch.join).

    python serve.py              a lesson: two rounds with all their numbers
    python serve.py --target runs/toy/target --drafter runs/toy/specopd --prompt "def main("
    python serve.py --target FOLDER --drafter FOLDER        a chat in the terminal; /help in it
    python serve.py --target FOLDER --jsonl < turns.txt     a chat of another program
    pytest tests/test_serve.py tests/test_conversation.py
"""

import contextlib
import itertools
import math
import os
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from drafter import GREEDY, PLAIN, Drafter, LookupDrafter, Memory, Sampling, draw
from hf import load_tokenizer
from hf.chat import first_turn, read_prompts
from support.chat import Chat, be_lenient, record, typed_lines
from support.cpu import for_cpu, sent
from support.draft_length import AutoLength
from support.flags import (
    DEVICE,
    DEVICE_TEXT,
    DTYPES,
    TEMPLATE_ARGS,
    dtype_of,
    flag,
    parse_flags,
    run_command,
)
from support.partings import check_partings, format_partings, partings
from target import Scored, Target
from tree import ProposalTree, build_tree, gather_slots, on_real, real_rows

# On a GPU attention sees so many slots, or a multiple: a new shape in every round would cost new
# plans and allocations. Slots more than there are tokens are masked; on a CPU they cost time.
SLOTS_ON_GPU = 128
# Rows leave the batch once this share of its rows has ended: to leave means to copy the caches of
# all others. If each left at once, that would take a fifth of all time (64 texts of SmolLM2, CPU).
SHARE_THAT_LEAVES = {"cpu": 0.1, "cuda": 0.25}
AUTO = "auto"  # of --draft-length
LOOKUP = "lookup"  # of --drafter
SHARE_THAT_JOINS = 0.1  # of a batch's rows: once more has ended, the next prompts join


@dataclass
class Result:
    """What one prompt got."""

    tokens: list[int] = field(default_factory=list)  # new ones, a stop token included
    drafted: list[bool] = field(default_factory=list)  # was this token an accepted draft?
    finish_reason: str = ""  # "stop" or "length"
    num_rounds: int = 0  # verifications by the target; prefill is none
    num_committed: int = 0  # tokens that these rounds committed
    num_nodes: int = 0  # tokens that these rounds scored, anchors included, padding not
    accepted: list[int] = field(default_factory=list)  # accepted drafts of each round

    @property
    def acceptance_length(self) -> float:
        return self.num_committed / self.num_rounds if self.num_rounds else float("nan")

    def append(self, accepted: list[int], token: int, options: "Options") -> None:
        """Add a round's accepted drafts and the target's own token, up to a stop token."""
        if token < 0:
            raise ValueError(
                "the target's logits are NaN or infinite (overflow?): try --dtype float32"
            )
        new = [*accepted, token]
        drafted = [True] * len(accepted) + [False]
        stop = next((i for i, t in enumerate(new) if t in options.stop_ids), None)
        if stop is not None:
            new = new[: stop + 1]
            drafted = drafted[: stop + 1]
        if self.num_rounds:  # not the token of the prefill
            self.num_committed += len(new)
            self.accepted.append(sum(drafted))
        space = options.max_new_tokens - len(self.tokens)
        self.tokens += new[:space]
        self.drafted += drafted[:space]
        if stop is not None and stop < space:
            self.finish_reason = "stop"
        elif len(self.tokens) == options.max_new_tokens:
            self.finish_reason = "length"


@dataclass(frozen=True)
class Options:
    """How prompts are continued. `generate` names the first four; the others are its keywords."""

    max_new_tokens: int
    sampling: Sampling = GREEDY
    seed: int = 0
    stop_ids: frozenset = frozenset()
    batch_size: int = 32  # prompts decoded at once
    # drafts verified per round; 0: all that the drafter proposes. An AutoLength decides by itself;
    # its 0, and that of Batch.draft, is none.
    draft_length: "int | AutoLength" = 0
    watch: object = None  # is told of the prefill, proposals and rounds, see train.Recorder
    prompt_ids: list[int] | None = None  # numbers of the prompts in a larger set; they seed draws
    progress: str = ""  # title of a progress bar

    def check(self, target: Target, drafter: Drafter | None, prompts: list[list[int]]) -> None:
        """Name what cannot be decoded."""
        for name in ("max_new_tokens", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, at least 1 is needed")
        W = drafter.config.num_draft_tokens if drafter else 0
        length = self.draft_length
        if isinstance(length, AutoLength):
            fits = drafter and length.W == W
        else:
            fits = length == 0 or 0 < length <= W
        if not fits:
            limit = f"the drafter proposes {W} tokens" if drafter else "there is no drafter"
            raise ValueError(f"draft_length is {length}: {limit} (0 verifies all)")
        limit = target.config.max_position_embeddings
        for number, prompt in enumerate(prompts):
            if not prompt:
                raise ValueError(f"prompt {number} is empty: at least one token is needed")
            if len(prompt) + self.max_new_tokens > limit:
                raise ValueError(
                    f"prompt {number} has {len(prompt)} tokens; with {self.max_new_tokens} new "
                    f"ones it exceeds the target's maximum length {limit}"
                )


# ------------------------------------------------------------------------------------- verification


def accept(p_y: Tensor, q_y: Tensor, uniforms: Tensor) -> Tensor:
    """True with probability min(1, p(y)/q(y)): u q(y) < p(y) is the same as u < p(y)/q(y)."""
    return uniforms * q_y < p_y


def residual(p: Tensor, q: Tensor) -> Tensor:
    """(p - q)+, not normalised: (..., V). If it is zero everywhere, p."""
    rest = (p - q).clamp(min=0)
    return torch.where(rest.sum(-1, keepdim=True) > 0, rest, p)


def verify(
    logits: Tensor, drafts: Tensor, q: Tensor | None, sampling: Sampling, uniforms: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Judge one chain per row (algorithm 1 of speculative decoding).

    logits (B,W+1,V) of the target, drafts (B,W), -1 after the last one to be judged, q (B,W,V)
    what they were drawn from (None: they were not drawn, q is one-hot), uniforms (B,W+1): W
    acceptances and one token. Returns the number accepted (B,) and the next token (B,), -1 where
    the logits are NaN or infinite. At temperature 0, q and uniforms are not read: a draft is the
    argmax or it is not."""
    W = drafts.shape[1]
    rows = torch.arange(len(drafts), device=drafts.device)
    if sampling.temperature == 0:
        best = logits.max(-1).indices  # (B, W+1), on a CPU in a third of argmax's time
        num_accepted = (drafts == best[:, :W]).cumprod(1).sum(1)
        token = best[rows, num_accepted]
    elif W == 0:
        num_accepted = torch.zeros_like(rows)
        token = draw(sampling.probs(logits)[:, 0], uniforms)[:, 0]
    else:
        judged = drafts >= 0
        p = on_real(sampling.probs, logits, real_rows(F.pad(judged, (1, 0), value=True)))
        index = drafts.clamp(min=0)[..., None]
        p_y = p[:, :W].gather(2, index)[..., 0] * judged  # after the last: never accepted
        q_y = torch.ones_like(p_y) if q is None else q.gather(2, index)[..., 0]
        num_accepted = accept(p_y, q_y, uniforms[:, :W]).long().cumprod(1).sum(1)
        was_rejected = num_accepted < judged.sum(1)  # else nothing is subtracted
        first = num_accepted.clamp(max=W - 1)  # the first that was not accepted
        if q is None:
            q_next = torch.zeros_like(p[:, 0]).scatter(1, index[rows, first], 1.0)
        else:
            q_next = q[rows, first]
        q_next = q_next * was_rejected[:, None]
        token = draw(residual(p[rows, num_accepted], q_next), uniforms[:, W:])[:, 0]
    is_finite = logits[rows, num_accepted].amax(-1).isfinite()  # NaN is the largest, too
    return num_accepted, torch.where(is_finite, token, -1)


# ----------------------------------------------------------------------------------------- decoding


def with_plain_steps(text: "Batch | Conversation") -> Memory:
    """The drafter's memory of a text, and of the plain steps that ended it."""
    taps = torch.cat(text.plain_taps, 1)  # (B, steps, ·)
    return text.drafter.extend(text.memory, taps, text.trunk.lengths - taps.shape[1])


class Batch:
    """Texts that are decoded together. `results` has all that were ever in it, by number. Rows
    whose text has ended leave it, some a little later: until then nothing is committed to them, and
    their rounds do not count. Or others take their places (`join`)."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        prompts: dict[int, list[int]],  # by number
        options: Options,
        longest: int = 0,  # tokens of the longest prompt that may join
        keeps_places: bool = False,  # rows of ended texts stay, for others to join
    ):
        self.target = target
        self.drafter = drafter
        self.options = options
        self.sampling = options.sampling
        self.W = drafter.config.num_draft_tokens if drafter else 0
        length = options.draft_length
        self.auto = length if isinstance(length, AutoLength) else None
        self.longest = max(longest, *map(len, prompts.values()))
        # of the texts' trunks, on the host
        self.lengths = {number: len(prompt) for number, prompt in prompts.items()}
        self.results = {number: Result() for number in prompts}
        self.prompt_of_row = list(prompts)
        self.alive = self.prompt_of_row  # the prompts whose texts go on
        device = target.lm_head.weight.device
        # (B,) bool on the device: this row's text goes on
        self.row_is_alive = torch.ones(len(prompts), dtype=torch.bool, device=device)
        # (B,) num_rounds when a row's text joined: from there it counts its own rounds
        self.joined_at = torch.zeros(len(prompts), dtype=torch.long, device=device)
        on_gpu = device.type == "cuda"
        self.slots_at_once = SLOTS_ON_GPU if on_gpu else 1
        # a watcher must see all rows, so rows leave at once
        self.share_ended = 0 if options.watch else SHARE_THAT_LEAVES[device.type]
        self.keeps_places = keeps_places
        self.noise = self._noise(list(prompts))
        self.num_rounds = 0
        self._prefill(list(prompts.values()))

    def _noise(self, numbers: list[int]) -> Tensor | None:
        """Uniforms (B, max_new_tokens, 2W+1): of round r W drafts, W acceptances, one token.

        They depend on the seed and on the prompt's number alone, not on the batch."""
        if self.sampling.temperature == 0:
            return None
        shape = (self.options.max_new_tokens, 2 * self.W + 1)
        prompt_ids = self.options.prompt_ids
        noise = []
        for number in numbers:
            prompt_id = prompt_ids[number] if prompt_ids else number
            seed = (self.options.seed * 1_000_003 + prompt_id) % (2**63 - 1)
            noise.append(torch.rand(shape, generator=torch.Generator().manual_seed(seed)))
        return torch.stack(noise).to(self.target.lm_head.weight.device)

    def _noise_now(self) -> Tensor | None:
        """The uniforms (B,2W+1) of this round; a row counts its own rounds."""
        if self.noise is None:
            return None
        number = (self.num_rounds - self.joined_at).clamp(max=self.noise.shape[1] - 1)
        return self.noise[torch.arange(len(number), device=number.device), number]

    def _prefill(self, prompts: list[list[int]]) -> None:
        """Run the prompts, and commit the first token of each."""
        device = self.target.lm_head.weight.device
        rows = [torch.tensor(prompt) for prompt in prompts]
        tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device)
        lengths = torch.tensor(list(self.lengths.values()), device=device)
        room = self.options.max_new_tokens + 2 * (self.W + 1) + self.slots_at_once - 1
        room += self.longest - tokens.shape[1]  # so all that join have equally many slots
        self.plain_taps = []  # (B,1,·) of plain steps that the memory does not have yet
        last = self._run_prompts(tokens, lengths, room)  # (B, 1, C)
        uniforms = None if self.noise is None else self.noise[:, 0, -1:]
        no_drafts = lengths.new_zeros(len(prompts), 0)
        _, self.anchor = verify(self.target.head(last), no_drafts, None, self.sampling, uniforms)
        if self.options.watch:
            self.options.watch.start(self.trunk)
        self.trunk.hidden = None  # from here on nobody reads them
        self.trunk.taps = None
        for result, token in zip(self.results.values(), self.anchor.tolist()):
            result.append([], token, self.options)
        self._drop_ended()

    def _run_prompts(self, tokens: Tensor, lengths: Tensor, room: int) -> Tensor:
        """Make the prompts' trunk and memory -> the hidden states (B,1,C) of their last tokens."""
        taps = self.drafter.config.target_layer_ids if self.drafter else ()
        self.trunk = self.target.prefill(tokens, lengths, room, taps, checkpoint_every=0)
        self.memory = None
        if self.drafter:
            self.memory = self.drafter.remember(self.trunk, room + self.W + 1, bounded=True)
        return gather_slots(self.trunk.hidden, lengths[:, None] - 1)

    def join(self, prompts: dict[int, list[int]]) -> None:
        """Prompts take the places of texts that have ended."""
        new = Batch(self.target, self.drafter, prompts, self.options, self.longest)
        self.results |= new.results
        self.lengths |= new.lengths
        self._remember_plain_steps()
        ended = [row for row, n in enumerate(self.prompt_of_row) if n not in self.alive]
        comes = [row for row, n in enumerate(new.prompt_of_row) if n in new.alive]
        for place, row in zip(ended, comes):
            self.prompt_of_row[place] = new.prompt_of_row[row]
        rows = torch.tensor(comes, dtype=torch.long, device=self.anchor.device)
        places = torch.tensor(ended[: len(comes)], dtype=torch.long, device=self.anchor.device)
        for own, other in zip(self._tensors(), new._tensors(), strict=True):
            own[places] = other[rows]
        self.joined_at[places] = self.num_rounds
        self._drop_ended()

    def _tensors(self) -> list[Tensor]:
        """What a row takes along when it joins, always in the same order. Not here: joined_at,
        which join sets, and plain_taps, which are remembered before."""
        tensors = [self.anchor, self.row_is_alive, self.trunk.tokens, self.trunk.lengths]
        tensors += [tensor for state in self.trunk.states for tensor in state.values()]
        if self.memory:
            tensors += [layer.keys_values for layer in self.memory.layers]
        return tensors if self.noise is None else [*tensors, self.noise]

    def _num_slots(self, num_tokens: int) -> int:
        """The slots that attention sees of so many tokens."""
        return math.ceil(num_tokens / self.slots_at_once) * self.slots_at_once

    def round(self) -> tuple[Tensor, Tensor | None, Scored, Tensor, Tensor]:
        """One round of the algorithm at the top of this file, for every row. Returns its parts:
        drafts and q, what the target gave, the number accepted and the next token."""
        self.num_rounds += 1
        self.noise_now = self._noise_now()
        auto = self.auto
        begin = auto and auto.clock()
        texts = self.alive
        number = self.options.draft_length or self.W
        drafts, q = self.draft(auto.choose(texts) if auto else [number] * len(texts))
        tree, scored = self.score(drafts)
        num_accepted, token = self.verify(drafts, q, scored)
        self.commit(drafts, tree, scored, num_accepted, token)
        accepted = self.retire(drafts, tree, num_accepted)
        if auto:
            auto.learn(texts, self.to_judge, accepted, auto.clock() - begin)
        return drafts, q, scored, num_accepted, token

    def draft(self, lengths: list[int]) -> tuple[Tensor, Tensor | None]:
        """1. Write the anchors into the trunk's tokens; then drafts (B,n) after them, as many as
        `lengths` says for each text that goes on, then -1; n is the largest, or 0 if a lookup finds
        nothing. Then what they were drawn from (B,n,V), None if greedy, looked up or n = 0."""
        n = max(lengths)
        self.to_judge = lengths if self.drafter else [0] * len(lengths)
        positions = self.trunk.lengths[:, None]  # (B, 1) the anchors', not yet run
        self.trunk.tokens.scatter_(1, positions, self.anchor[:, None])
        if not self.drafter or n == 0:
            return self.anchor.new_zeros(len(self.anchor), 0), None
        self._remember_plain_steps()
        if self.memory:
            self.memory.width = self._num_slots(self.trunk.width)
        is_drawn = self.sampling.temperature > 0
        uniforms = self.noise_now[:, : self.W].view(-1, 1, 1, self.W) if is_drawn else None
        proposal = self.drafter.propose(
            self.trunk,
            positions,
            sampling=self.sampling,
            uniforms=uniforms,
            memory=self.memory,
            keep_probs=is_drawn,
        )
        if self.options.watch:
            self.options.watch.draft(proposal)
        q = proposal.q_probs
        drafts = self._shortened(proposal.tokens[:, 0, 0, :n], lengths)
        if isinstance(self.drafter, LookupDrafter):
            is_found = (drafts >= 0).any(1) & self.row_is_alive
            if not is_found.any():  # a plain step, of which nothing is learned
                n, self.to_judge = 0, [0] * len(lengths)
        return drafts[:, :n], None if q is None else q[:, 0, 0, :n]

    def _shortened(self, drafts: Tensor, lengths: list[int]) -> Tensor:
        """drafts (B,n) with -1 after the number of each text that goes on, and in other rows (on a
        GPU not always)."""
        n = drafts.shape[1]
        has_ended = drafts.is_cpu and len(self.alive) < len(self.prompt_of_row)
        if min(lengths) == n and not has_ended:
            return drafts
        length_of = dict(zip(self.alive, lengths))
        limits = torch.tensor([[length_of.get(number, 0)] for number in self.prompt_of_row])
        numbers = torch.arange(n, device=drafts.device)
        return torch.where(numbers < sent(limits, drafts.device), drafts, -1)

    def _remember_plain_steps(self) -> None:
        """Give the drafter's memory the tokens of plain steps, all at once."""
        if self.plain_taps:
            self.memory = with_plain_steps(self)
            self.plain_taps = []

    def score(self, drafts: Tensor) -> tuple[ProposalTree, Scored]:
        """2. One pass of the target over the chain of anchor and drafts (B,n)."""
        trunk = self.trunk
        tokens = trunk.tokens[:, : self._num_slots(trunk.width + 1)]
        anchors = trunk.lengths[:, None]  # (B, 1)
        chain = drafts[:, None, None]  # (B, 1, 1, n)
        tree = build_tree(tokens, trunk.lengths, anchors, chain, include_anchor=True)
        return tree, self.target.score(trunk, tree)

    def verify(self, drafts: Tensor, q: Tensor | None, scored: Scored) -> tuple[Tensor, Tensor]:
        """3. How many drafts are accepted (B,), and the target's own next token (B,)."""
        # of a chain the nodes are anchor and drafts, in order
        logits = on_real(self.target.head, scored.hidden[:, 0, 0], scored.real)  # (B, n+1, V)
        uniforms = None
        if self.noise_now is not None:
            noise = self.noise_now  # (B, 2W+1)
            acceptances = noise[:, self.W : self.W + drafts.shape[1]]
            uniforms = torch.cat([acceptances, noise[:, -1:]], 1)
        return verify(logits, drafts, q, self.sampling, uniforms)

    def commit(self, drafts, tree, scored, num_accepted: Tensor, token: Tensor) -> None:
        """4. The accepted path joins the trunk and the drafter's memory."""
        positions = self.trunk.lengths
        number = torch.arange(drafts.shape[1] + 1, device=drafts.device)
        nodes = tree.p_index[:, 0, 0] - tree.num_trunk_slots  # (B, n+1)
        joins = (number <= num_accepted[:, None]) & self.row_is_alive[:, None]
        path = torch.where(joins, nodes, -1)
        if self.options.watch:
            noise = self.noise_now
            self.options.watch.round(self.alive, positions, drafts, scored, path, token, noise)
        self.trunk = self.target.commit(self.trunk, tree, scored, path)
        if self.drafter and self.memory:
            taps = gather_slots(scored.taps, path.clamp(min=0))
            if drafts.shape[1]:
                self.memory = self.drafter.extend(self.memory, taps, positions)
            else:  # the next round may be plain, too
                self.plain_taps.append(taps)
        self.anchor = torch.where(self.row_is_alive, token, self.anchor)

    def retire(self, drafts: Tensor, tree: ProposalTree, num_accepted: Tensor) -> list[int]:
        """Record the round in the results, and drop the rows whose text has ended -> the number
        accepted of each text that had not."""
        num_nodes = tree.valid.sum(1, keepdim=True)
        report = torch.cat([num_accepted[:, None], num_nodes, drafts, self.anchor[:, None]], 1)
        # the round's one synchronisation with the host (an n-gram table on the host adds its own)
        accepted = []
        for number, (count, nodes, *ids) in zip(self.prompt_of_row, report.tolist()):
            result = self.results[number]
            if not result.finish_reason:
                result.num_rounds += 1
                result.num_nodes += nodes
                result.append(ids[:count], ids[-1], self.options)
                self.lengths[number] += count + 1
                accepted.append(count)
        self._drop_ended()
        return accepted

    def _drop_ended(self) -> None:
        """Drop the rows whose texts have ended once a large enough share of the rows has ended, and
        nobody waits for their places."""
        is_alive = [not self.results[number].finish_reason for number in self.prompt_of_row]
        num_ended = is_alive.count(False)
        has_changed = len(is_alive) - num_ended < len(self.alive)
        self.alive = list(itertools.compress(self.prompt_of_row, is_alive))
        leave = not self.keeps_places and num_ended >= self.share_ended * len(is_alive)
        if num_ended and leave:
            self._select([row for row, alive in enumerate(is_alive) if alive])
        elif has_changed:
            self.row_is_alive = torch.tensor(is_alive, device=self.anchor.device)
        self.trunk.width = max((self.lengths[number] for number in self.prompt_of_row), default=0)

    def _select(self, rows: list[int]) -> None:
        self.prompt_of_row = self.alive
        rows = torch.tensor(rows, dtype=torch.long, device=self.anchor.device)
        self.trunk = self.trunk.select(rows)
        self.memory = None if self.memory is None else self.memory.select(rows)
        self.anchor = self.anchor[rows]
        self.plain_taps = [taps[rows] for taps in self.plain_taps]
        self.joined_at = self.joined_at[rows]
        self.row_is_alive = self.row_is_alive.new_ones(len(rows))
        self.noise = None if self.noise is None else self.noise[rows]


@torch.inference_mode()
def generate(
    target: Target,
    drafter: Drafter | None,
    prompts: list[list[int]],
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    seed: int = 0,
    stop_ids=(),
    **options,
) -> list[Result]:
    """Continue every prompt (token ids). drafter=None is plain decoding; `options`: see Options.

    A prompt's text depends on the seed and on its number in `prompts`, not on the batch it runs in
    (with an AutoLength, above temperature 0, on the clock and on the other texts, too). When texts
    end, the next prompts take their places in the batch."""
    options = Options(max_new_tokens, sampling, seed, frozenset(stop_ids), **options)
    options.check(target, drafter, prompts)
    if isinstance(options.draft_length, AutoLength):
        options.draft_length.start(len(prompts), equal=target.lm_head.weight.is_cuda)
    longest = max(map(len, prompts), default=0)
    waiting = deque(enumerate(prompts))
    results = {}

    def next_prompts(count: int) -> dict[int, list[int]]:
        return dict(waiting.popleft() for _ in range(min(count, len(waiting))))

    with tqdm(
        total=len(prompts) * max_new_tokens,
        desc=options.progress,
        unit=" tokens",
        unit_scale=True,
        leave=False,
        disable=not options.progress,
    ) as bar:
        while waiting:
            chosen = next_prompts(options.batch_size)
            keeps_places = bool(waiting) and not options.watch
            batch = Batch(target, drafter, chosen, options, longest, keeps_places)
            while batch.alive:
                batch.round()
                num_free = len(batch.prompt_of_row) - len(batch.alive)
                if batch.keeps_places and num_free > SHARE_THAT_JOINS * len(batch.prompt_of_row):
                    batch.join(next_prompts(num_free))
                    batch.keeps_places = bool(waiting)
                if options.progress:
                    show_progress(bar, results | batch.results, len(prompts), max_new_tokens)
            results |= batch.results
    return [results[number] for number in range(len(prompts))]


def show_progress(bar: tqdm, results: dict[int, Result], count: int, max_new_tokens: int) -> None:
    """Move a bar to the tokens that there are; texts that ended early will not have more."""
    done = sum(len(result.tokens) for result in results.values())
    ended = [len(r.tokens) for r in results.values() if r.finish_reason]
    bar.total = sum(ended) + (count - len(ended)) * max_new_tokens
    bar.update(done - bar.n)


# ------------------------------------------------------------------------------------- conversation


class Answer(Batch):
    """A batch of one text, which goes on from a conversation's trunk. The trunk outlives it."""

    def __init__(self, conversation: "Conversation", drafter, prompt: list[int], options: Options):
        self.trunk = conversation.trunk
        self.memory = conversation.memory
        options = replace(options, prompt_ids=[conversation.turn])
        super().__init__(conversation.target, drafter, {0: prompt}, options)

    def _run_prompts(self, tokens: Tensor, lengths: Tensor, room: int) -> Tensor:
        """Run what the trunk does not have yet."""
        start = self.trunk.lengths  # (1,)
        tap_ids = self.drafter.config.target_layer_ids if self.drafter else ()
        trunk = replace(self.trunk, tap_ids=tap_ids)
        new = tokens[:, trunk.width :]
        self.trunk, hidden, taps = self.target.extend(trunk, new, lengths, room)
        room += self.W + 1
        if self.drafter and self.memory:
            self.memory = self.memory.with_room(tokens.shape[1] + room)
            self.memory = self.drafter.extend(self.memory, taps, start)
        elif self.drafter:  # the first turn, or a drafter without a memory
            self.memory = self.drafter.remember(replace(self.trunk, taps=taps), room)
        return hidden[:, -1:]

    def _select(self, rows: list[int]) -> None:
        """The only text has ended: nobody goes on, and the trunk stays."""


class Conversation:
    """A text that grows turn by turn. What the target has run of it stays: of a new prompt only the
    tokens after the longest common prefix are run.

    The trunk has checkpoints, so that it can be cut where a template changes an earlier turn. The
    drafter's memory is not bounded, because a cut may need what lies before a window."""

    def __init__(self, target: Target, drafter: Drafter | None = None):
        self.target = target
        self.drafter = drafter
        self.turn = 0  # with the seed it decides what is drawn; reset keeps it
        self.reset()

    def reset(self) -> None:
        """Forget the text."""
        self.trunk = self.target.empty_trunk(1)
        self.memory = None
        self.plain_taps = []  # of the last answer's plain steps; the memory does not have them yet

    @property
    def tokens(self) -> list[int]:
        """What the target has run."""
        return self.trunk.tokens[0, : self.trunk.width].tolist()

    @torch.inference_mode()
    def answer(self, prompt: list[int], options: Options, draft: bool = True) -> Iterator[Result]:
        """Continue prompt (token ids), the whole text so far. Yields the result, which grows, after
        the prefill and after each round; the caller may stop at any of them. draft=False: plain
        decoding. Raises a ValueError if the prompt leaves no room for a token."""
        drafter = self.drafter if draft else None
        space = self.target.config.max_position_embeddings - len(prompt)
        options = replace(options, max_new_tokens=max(1, min(options.max_new_tokens, space)))
        if not drafter:
            options = replace(options, draft_length=0)
        options.check(self.target, drafter, [prompt])
        if isinstance(options.draft_length, AutoLength):
            options.draft_length.start(1)
        self._cut(prompt, drafter)
        batch = Answer(self, drafter, prompt, options)
        self.turn += 1
        self._keep(batch)
        yield batch.results[0]
        while batch.alive:
            batch.round()
            self._keep(batch)
            yield batch.results[0]

    def _cut(self, prompt: list[int], drafter: Drafter | None) -> None:
        """Cut trunk and memory back to what they share with the prompt, without its last token:
        that is run in any case, for p_1."""
        if self.plain_taps:
            memory = with_plain_steps(self)
            self.memory = replace(memory, width=self.trunk.width)
            self.plain_taps = []
        pairs = zip(self.tokens, prompt[:-1])
        length = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        if self.memory:  # it is behind the trunk after turns without drafts
            length_of_memory = min(self.memory.width, length)
            self.memory = replace(self.memory, width=length_of_memory)
        if drafter and drafter.config.target_layer_ids:
            length = self.memory.width if self.memory else 0
        if length < self.trunk.width:
            self.trunk = self.trunk.cut(torch.full_like(self.trunk.lengths, length))

    def _keep(self, batch: Answer) -> None:
        self.trunk = batch.trunk
        if batch.drafter and batch.memory:
            self.plain_taps = list(batch.plain_taps)
            num_plain = sum(taps.shape[1] for taps in self.plain_taps)
            self.memory = replace(batch.memory, width=batch.trunk.width - num_plain)

    def plain_speed(self, num_steps: int = 4) -> float:
        """About how many tokens/s plain decoding gives after this text: a few steps are timed, and
        nothing of them is kept. NaN without a text, and where the target's maximum length leaves no
        room for them."""
        space = self.target.config.max_position_embeddings - self.trunk.width
        if not self.trunk.width or space < num_steps + 2:
            return math.nan
        before = vars(self).copy()
        times = []
        try:
            for _ in self.answer(self.tokens, Options(num_steps + 2), draft=False):
                times.append(time.perf_counter())
        finally:  # also after Ctrl-C
            vars(self).update(before)
        return num_steps / (times[-1] - times[1])  # the first round warms up


# ------------------------------------------------------------------------------------------- lesson


def lesson_models() -> tuple[Target, Drafter]:
    """A target and a drafter small enough to print all their numbers."""
    target = Target.toy(
        seed=12, vocab_size=12, num_hidden_layers=2, hidden_size=32, intermediate_size=64
    )
    target.num_tokens = 10  # of 12: 10 (MASK) and 11 have q = 0, but some p
    target.lm_head.weight.mul_(4)  # it is untrained: make its p less flat
    return target, Drafter.fresh(target, num_layers=1, block_size=4)


def lesson() -> None:
    """Print two rounds with all their numbers, then what plain decoding says."""
    target, drafter = lesson_models()
    prompt = [1, 2, 3]
    options = Options(max_new_tokens=8, sampling=PLAIN, seed=24)
    batch = Batch(target, drafter, {0: prompt}, options)
    print("12 ids: 10 (MASK) and 11 have q = 0, but some p, because the target is untrained.")
    print(f"W = 3, temperature 1. Prompt {prompt}.")
    print(f"Prefill commits {batch.results[0].tokens}: it is the first anchor.")
    for number in (1, 2):
        anchor = batch.anchor.item()
        print(f"\nround {number}, anchor {anchor} at position {batch.trunk.lengths.item()}")
        drafts, q, scored, num_accepted, token = batch.round()
        p = PLAIN.probs(target.head(scored.hidden[:, 0, 0]))
        _show_verification(batch, drafts[0], p[0], q[0], num_accepted.item(), token.item())
    result = batch.results[0]
    al = f"{result.num_committed} tokens in {result.num_rounds} verifications"
    print(f"\ntext so far {result.tokens}: {al}, AL {result.acceptance_length:.2f}")
    print("\nAt temperature 0 the text is that of plain decoding, token for token:")
    for name, proposer in (("plain", None), ("speculative", drafter)):
        (result,) = generate(target, proposer, [prompt], 8)
        rounds = f"{result.num_rounds} verifications"
        print(f"  {name:12s} {result.tokens}   {rounds}")


def _show_verification(batch: Batch, drafts, p, q, num_accepted: int, token: int) -> None:
    """Print how drafts (n,) of one row were judged, by p (n+1,V) and q (n,V)."""
    uniforms = batch.noise[0, batch.num_rounds, batch.W :].tolist()
    for k, y in enumerate(drafts.tolist()):
        p_y = p[k, y].item()
        q_y = q[k, y].item()
        alpha = torch.minimum(p[k], q[k]).sum().item()
        chance = f"min(1, {p_y:.3f}/{q_y:.3f}) = {min(1, p_y / q_y):.3f}"
        verdict = "accepted" if k < num_accepted else "REJECTED"
        print(f"  y_{k + 1} = {y}   alpha {alpha:.3f}   {uniforms[k]:.3f} < {chance}?  {verdict}")
        if k == num_accepted:
            rest = residual(p[k], q[k])
            rest = [round(x, 3) for x in (rest / rest.sum()).tolist()]
            print(f"  the residual (p - q)+, normalised: {rest}")
            print(f"  drawn from it: {token}")
            return
    print(f"  all accepted: the bonus token {token} is drawn from p_{len(drafts) + 1}")


# ------------------------------------------------------------------------------------- command line


TEXTS, DECODING, OUTPUT = "what is continued", "how it is decoded", "what is printed"


@dataclass(frozen=True)
class ServeConfig:
    target: str = flag("", "the target's folder", "models")
    drafter: str = flag(
        "",
        f"the drafter's folder, or {LOOKUP}, which copies from the text; empty: plain decoding",
        "models",
    )
    device: str = flag(DEVICE, DEVICE_TEXT, "models")
    dtype: str = flag("", "empty: what the target's config names", "models", choices=DTYPES)
    prompt: tuple = flag((), "texts to continue; in a terminal, without any: a chat", TEXTS)
    prompts: str = flag("", "a JSONL file of prompts to continue", TEXTS)
    system: str = flag("", "what the system's turn says, before the user's", TEXTS)
    raw: bool = flag(False, "continue texts as they are, without the chat template", TEXTS)
    chat_template_args: str = flag("", TEMPLATE_ARGS, TEXTS)
    max_new_tokens: int = flag(200, "tokens to generate per prompt or turn", DECODING, low=1)
    temperature: float = flag(0.0, "0 is greedy", DECODING, low=0)
    top_k: int = flag(0, "sample among the k likeliest tokens only; 0 is off", DECODING, low=0)
    top_p: float = flag(1.0, "sample among the likeliest of this share; 1 is off", DECODING)
    seed: int = flag(0, "of everything drawn", DECODING)
    draft_length: str = flag(
        AUTO,
        f"drafts verified per round; 0: all; {AUTO}: as many as pay, plain steps if none does",
        DECODING,
    )
    batch_size: int = flag(32, "prompts decoded at once", DECODING, low=1)
    compare: bool = flag(True, "decode plainly too, for the speed-up and as a check", OUTPUT)
    color: str = flag("auto", "colour accepted drafts", OUTPUT, choices=("auto", "always", "never"))
    jsonl: bool = flag(
        False,
        "one JSON record per prompt, or per turn (a line of standard input): prompt, text, tokens "
        "(ids), finish_reason, rounds, al, seconds (of prompts: an equal share)",
        OUTPUT,
    )

    NEEDS = (  # flags, what they mean nothing without, whether a config has it
        ("draft_length compare", "--drafter", lambda c: c.drafter),
        ("batch_size compare", "--prompt or --prompts", lambda c: c.prompt or c.prompts),
        ("compare color", "no --jsonl", lambda c: not c.jsonl),
        ("top_k top_p", "--temperature above 0", lambda c: c.temperature > 0),
        ("system chat_template_args", "no --raw", lambda c: not c.raw),
        ("system", "no --prompts", lambda c: not c.prompts),
    )

    def __post_init__(self):
        if self.draft_length != AUTO and not self.draft_length.isdecimal():
            raise ValueError(f"--draft-length {self.draft_length}: give a number or {AUTO}")


def marked(result: Result, tokenizer, color: bool) -> str:
    """The text, accepted drafts in green (or [in brackets]), the target's own tokens plain."""
    begin, end = ("\033[32m", "\033[0m") if color else ("[", "]")
    pieces = []
    for is_draft, run in itertools.groupby(zip(result.drafted, result.tokens), lambda t: t[0]):
        text = tokenizer.decode([token for _, token in run])
        pieces.append(f"{begin}{text}{end}" if is_draft else text)
    return "".join(pieces)


def open_drafter(name: str, target: Target, tokenizer) -> "Drafter | LookupDrafter":
    """What --drafter names: a folder, whose drafter runs in the target's dtype, or lookup."""
    if name == LOOKUP:
        return LookupDrafter()
    drafter = Drafter.from_pretrained(name, target, target.lm_head.weight.dtype)
    drafter.config.check(target, tokenizer, f"{name}/config.json")
    return drafter


def read_chats(config: ServeConfig) -> list[list[dict]]:
    """The prompts of the command line as conversations whose last turn is the user's."""
    system = [{"role": "system", "content": config.system}] if config.system else []
    chats = [[*system, {"role": "user", "content": text}] for text in config.prompt]
    try:
        for messages in read_prompts(config.prompts) if config.prompts else ():
            chats.append(first_turn(messages))
    except ValueError as error:
        raise ValueError(f"--prompts {config.prompts}: {error}") from None
    if not chats:
        raise ValueError("nothing to continue: give --prompt TEXT ... or --prompts FILE")
    return chats


def sampling_of(config: ServeConfig) -> Sampling:
    return Sampling(config.temperature, config.top_k, config.top_p)


def draft_length_of(text: str, drafter) -> "int | AutoLength":
    """What --draft-length says, for a drafter or None."""
    if not drafter:
        return 0
    return AutoLength(drafter.config.num_draft_tokens) if text == AUTO else int(text)


def timed_generate(target, drafter, prompts, config: ServeConfig, stop_ids):
    """Results and tokens/s, after a short run that warms up."""
    options = dict(
        sampling=sampling_of(config),
        seed=config.seed,
        stop_ids=stop_ids,
        batch_size=config.batch_size,
        draft_length=draft_length_of(config.draft_length, drafter),
    )
    generate(target, drafter, prompts[:1], min(8, config.max_new_tokens), **options)
    begin = time.perf_counter()
    results = generate(target, drafter, prompts, config.max_new_tokens, **options)
    num_tokens = sum(len(result.tokens) for result in results)
    return results, num_tokens / (time.perf_counter() - begin)


def show_texts(texts, results: list[Result], tokenizer, color: bool, is_plain: bool) -> None:
    for text, result in zip(texts, results):
        print(f"{'-' * 80}\n{text}{marked(result, tokenizer, color)}")
        al = "" if is_plain or not result.num_rounds else f", AL {result.acceptance_length:.2f}"
        counts = f"{len(result.tokens)} tokens, {result.num_rounds} verifications{al}"
        print(f"-- {counts}, {result.finish_reason}")
    print("-" * 80)


def show_records(chats, results: list[Result], tokenizer, seconds: float) -> None:
    """One line of JSON per prompt."""
    for messages, result in zip(chats, results):
        text = tokenizer.decode(t for t in result.tokens if t not in tokenizer.stop_ids)
        print(record(messages[-1]["content"], text, result, seconds / len(results)))


def converse(config: ServeConfig, target, drafter, tokenizer, color: bool) -> None:
    """A chat with whoever types, or with another program (--jsonl)."""
    options = Options(
        config.max_new_tokens,
        sampling_of(config),
        config.seed,
        frozenset(tokenizer.stop_ids),
        draft_length=draft_length_of(config.draft_length, drafter),
    )
    raw = config.raw or tokenizer.template is None
    if raw and config.system:
        raise ValueError(f"--system needs a chat template, and {config.target} has none")
    conversation = Conversation(target, drafter)
    chat = Chat(conversation, tokenizer, options, config.system, raw, config.jsonl, color)
    names = [Path(config.target).name]
    if drafter:
        green = " (green: its accepted drafts)" if color else ""
        names.append(f"drafter {Path(config.drafter).name}{green}")
    if raw:
        names.append("each line is continued as text")
    chat.note(f"{', '.join(names)}. /help lists the commands, Ctrl-D ends.")
    chat.run(typed_lines())


def open_models(config: ServeConfig) -> tuple:
    """The target, the drafter or None, the tokenizer."""
    if not config.target:
        raise ValueError("--target FOLDER is needed (train.py writes one to runs/toy/target)")
    target = Target.from_pretrained(config.target, config.device, dtype_of(config))
    tokenizer = load_tokenizer(config.target, config.chat_template_args)
    drafter = open_drafter(config.drafter, target, tokenizer) if config.drafter else None
    return for_cpu(target, drafter), drafter, tokenizer


def serve(config: ServeConfig) -> None:
    with contextlib.redirect_stdout(sys.stderr if config.jsonl else sys.stdout):
        target, drafter, tokenizer = open_models(config)
    be_lenient(sys.stdin, sys.stdout)
    is_terminal = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    color = config.color == "always" or config.color == "auto" and is_terminal
    if not (config.prompt or config.prompts) and (config.jsonl or sys.stdin.isatty()):
        converse(config, target, drafter, tokenizer, color and not config.jsonl)
        return
    chats = read_chats(config)
    if config.raw:
        texts = [tokenizer.bos + messages[-1]["content"] for messages in chats]
    else:
        texts = [tokenizer.chat(messages) for messages in chats]
    prompts = [tokenizer.encode(text) for text in texts]
    stop_ids = tokenizer.stop_ids
    results, speed = timed_generate(target, drafter, prompts, config, stop_ids)
    if config.jsonl:
        num_tokens = sum(len(result.tokens) for result in results)
        show_records(chats, results, tokenizer, num_tokens / speed)
        return
    show_texts(texts, results, tokenizer, color, is_plain=drafter is None)
    if drafter is None:
        print(f"plain decoding: {speed:.1f} tokens/s")
        return
    print("green" if color else "[in brackets]", "= drafted and accepted, plain = the target's own")
    compare_with_plain(config, target, prompts, stop_ids, results, speed)


def compare_with_plain(config, target, prompts, stop_ids, results, speed: float) -> None:
    """Print AL and speed, and what plain decoding gives. Raise a ValueError if it gives another
    greedy text, beyond what rounding does."""
    num_rounds = sum(result.num_rounds for result in results)
    al = sum(result.num_committed for result in results) / max(num_rounds, 1)
    where = f"{num_rounds} verifications, temperature {config.temperature:g}"
    print(f"AL {al:.3f} over {where}: {speed:.1f} tokens/s")
    if not config.compare or not num_rounds:
        return
    plain, plain_speed = timed_generate(target, None, prompts, config, stop_ids)
    note, found = "another draw from the same distribution", []
    if config.temperature == 0:
        texts = ([result.tokens for result in way] for way in (results, plain))
        found = partings(target, prompts, *texts)
        note = format_partings(found)
    ratio = f"{speed / plain_speed:.2f} times as fast"
    print(f"plain decoding {plain_speed:.1f} tokens/s, {ratio}; {note}")
    check_partings(found)


def main():
    if len(sys.argv) == 1:
        with torch.inference_mode():
            lesson()
    else:
        serve(parse_flags(ServeConfig, __doc__))


if __name__ == "__main__":
    sys.exit(run_command(main))
