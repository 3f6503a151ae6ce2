"""Training a drafter: four modes, three ways to make blocks, one step, one loop.

    --mode ce       offline: cross-entropy on the reference that the target wrote (DSpark: its mix)
    --mode e2e      offline: E2E-TV, or another --loss, along the reference's own history
    --mode rollout  on policy, one round after another (Draft-OPD, arXiv 2605.29343, in outline):
                    decode whole responses with the current drafter, then E2E-TV on every block
                    that was proposed, accepted or not
    --mode specopd  on policy, all at once (the paper)

One SpecOPD step:

1. `draw_anchors` picks A positions in the response of each reference.
2. `drafter.propose` proposes K branches of W tokens at every anchor, in one pass: --num-greedy of
   them are q's argmax (ours), the others are drawn from q. The text after the anchor is one more
   branch (ours; --no-text-branch).
3. `build_tree` hangs them on the trunk, and `target.score` gives p of all of them in one pass.
4. `step_loss` compares p and q: E2E-TV. Its gradient flows through q only.
5. The optimizers update the drafter; the target never changes.

Modes differ in their loss and in how they make blocks: by `text_blocks` (ce and e2e),
`rollout_blocks` or `tree_blocks`. Without arguments the whole story runs on a laptop: train a toy
target on the standard library's text, let it write references, train a drafter offline, continue
it in three ways for the same number of steps from the same start, and measure the acceptance length
(AL) by real decoding on held-out prompts. Every stage is kept in --out and done once; a run that
was stopped goes on.

    python train.py                       the story (about 11 minutes on one CPU core)
    python train.py --preset smoke        the same in seconds, too short to learn much
    python train.py --lesson              one SpecOPD step on one reference, in numbers
    python train.py --mode specopd --target FOLDER --drafter FOLDER --out runs/mine
    torchrun --nproc_per_node=8 train.py --mode specopd ...       on several processes
    pytest tests/test_train.py
"""

import contextlib
import json
import math
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from drafter import Drafter, Sampling
from hf.drafters import ARCHITECTURES, MARKOV_HEADS
from loss import DSPARK_MIX, LOSSES, Blocks, Objective, acceptance, step_loss
from serve import generate, lesson_models
from support import distributed
from support.cpu import sent
from support.files import locked
from support.flags import (
    DEVICE,
    DEVICE_TEXT,
    DTYPES,
    TEMPLATE_ARGS,
    check_ranges,
    flag,
    parse_flags,
    precision_of,
    run_command,
)
from support.log import TOOLS, check_installed
from support.measure import QUICK_SHARE, TEMPERATURES, Measure, decoding_speed
from support.optim import make_optimizers, optimizer_step, set_learning_rate
from support.prepare import Trunks, batch_rows, decay_of, prepare, resolved, start_drafter
from support.references import References
from support.report import print_opening, print_outcome, report
from support.resume import stage
from support.run import Run, add_figures, figures_of, ingredients, start_or_resume
from target import TOYS, Trunk
from tree import build_tree, gather_slots, with_room

MODES = ("ce", "e2e", "specopd", "rollout")
STORY_MODES = ("ce", "e2e", "specopd")  # rollouts take several times as long
MAX_GRADIENT_NORM = 1.0  # never reached by E2E-TV; it tames the first steps of CE

# ------------------------------------------------------------------------------------------- config

TRAINED = "what is trained, on what"
WHERE = "where and how it runs"
RECIPE = "the recipe"
KEEPING = "measuring and keeping"


@dataclass(frozen=True)
class TrainConfig:
    mode: str = flag("story", "the story, or one way to train", TRAINED, choices=("story", *MODES))
    out: str = flag("runs/toy", "folder of the run: target, references, drafters, logs", TRAINED)
    seed: int = flag(0, "of everything drawn", TRAINED)
    target: str = flag("", "a target's folder; empty: train the toy", TRAINED)
    arch: str = flag("gqa", "the toy target", TRAINED, choices=tuple(TOYS))
    target_steps: int = flag(750, "training steps of the toy", TRAINED, low=1)
    target_layers: int = flag(0, "layers of the toy; 0: as its architecture has", TRAINED, low=0)
    target_length: int = flag(256, "tokens per training sequence of the toy", TRAINED, low=1)
    drafter: str = flag("", "the drafter to start from; empty: a fresh one", TRAINED)
    drafter_kind: str = flag("", "empty: dflash", TRAINED, choices=("", *ARCHITECTURES))
    draft_layers: int = flag(0, "layers of a fresh drafter; 0 means 2", TRAINED, low=0)
    block_size: int = flag(0, "b of a fresh drafter; 0: such that W = 7", TRAINED, low=0)
    markov_head: str = flag("", "of dspark; empty: vanilla", TRAINED, choices=("", *MARKOV_HEADS))
    rank: int = flag(0, "width of the heads' tables; 0: 256, at most hidden_size", TRAINED, low=0)
    mask_token_id: str = flag("", "MASK's row, or auto; empty: a spare one", TRAINED)
    references: str = flag(
        "", "file of references or of the target's chats; empty: new ones", TRAINED
    )
    corpus: str = flag("", "text or JSONL prompts, file or folder; toy: Python's own", TRAINED)
    chat_template_args: str = flag("", TEMPLATE_ARGS, TRAINED)
    skip_bad_lines: bool = flag(False, "leave bad JSONL lines out instead of stopping", TRAINED)
    num_references: int = flag(512, "how many to make", TRAINED, low=1)
    prompt_length: int = flag(
        64, "tokens per prompt (JSONL prompts: at most; 0: as long as they are)", TRAINED, low=0
    )
    response_length: int = flag(
        192, "tokens per response, at most; 0: as the references", TRAINED, low=0
    )

    device: str = flag(DEVICE, DEVICE_TEXT, WHERE)
    dtype: str = flag("", "of the target; empty: what its config names", WHERE, choices=DTYPES)
    precision: str = flag(
        "", "the drafter's arithmetic; empty: bfloat16 on cuda, else float32", WHERE, choices=DTYPES
    )
    shard_target: bool = flag(False, "spread the target's layers over the processes", WHERE)
    grad_accum: int = flag(1, "parts of a batch, run one by one to save memory", WHERE, low=1)
    recompute: bool = flag(False, "run drafter layers again in the backward pass", WHERE)
    cache_gib: float = flag(2.0, "keep all trunks if they fit into so many GiB", WHERE, low=0)
    bucket: int = flag(1, "batches whose references are sorted by length together", WHERE, low=1)

    steps: int = flag(250, "training steps (story: of each way)", RECIPE, low=1)
    warm_steps: int = flag(1000, "story: offline CE steps before the ways part", RECIPE, low=1)
    # a step with 16 takes less than half the time of one with 64
    warm_anchors: int = flag(16, "story: A of these steps", RECIPE, low=1)
    batch_size: int = flag(8, "references per step", RECIPE, low=1)
    num_anchors: int = flag(64, "A, anchors per reference", RECIPE, low=1)
    num_branches: int = flag(2, "K, branches proposed per anchor (specopd)", RECIPE, low=1)
    # NOTE(paper): greedy branches are ours; without them decoding at temperature 0 gains less
    num_greedy: int = flag(1, "how many of the K branches are the argmax", RECIPE, low=0)
    # NOTE(paper): ours; it lies on the trunk, whose hidden states are there, and costs no node
    text_branch: bool = flag(
        True, "the reference's own text after an anchor is one more branch (specopd)", RECIPE
    )
    branch_temperature: float = flag(
        1.0, "of branches, rollouts, p and q (0: greedy, with p and q at 1)", RECIPE, low=0
    )
    loss: str = flag(
        "e2e_tv",
        "of every mode except ce",
        RECIPE,
        choices=tuple(name for name in LOSSES if name != "ce"),
    )
    ce_decay: float = flag(0.0, "gamma_0 of CE; 0: 4 + 3 (W - 7) / 8, from W", RECIPE, low=0)
    # NOTE(paper): ours; the confidence loss's larger gradient would undo what E2E-TV gains
    detach_confidence: str = flag(
        "online",
        "the confidence loss trains only its head: always, never, or online (all modes but ce)",
        RECIPE,
        choices=("online", "always", "never"),
    )
    merge: bool = flag(True, "equal histories share nodes (same p, fewer nodes)", RECIPE)
    matrix_lr: float = flag(0.01, "Muon's rate, for matrices; 0: only AdamW", RECIPE, low=0)
    lr: float = flag(1e-3, "AdamW's rate, for the rest", RECIPE, low=0)

    eval_every: int = flag(250, "steps between two measurements of AL", KEEPING, low=1)
    eval_share: float = flag(
        0.0, "of the time of training that measuring may take; 0: no limit", KEEPING, low=0
    )
    eval_prompts: tuple = flag(
        (), "JSON Lines files to measure on, a task each; empty: held-out prompts", KEEPING
    )
    num_eval_prompts: int = flag(
        96, "prompts (of each task) to measure on; while training a quarter", KEEPING, low=1
    )
    eval_tokens: int = flag(128, "tokens decoded per prompt", KEEPING, low=2)
    save_every: int = flag(100, "steps between two training states", KEEPING, low=1)
    full_folder: bool = flag(
        False, "drafter folders hold the embedding and the head, too (DeepSpec wants them)", KEEPING
    )
    stop_after: int = flag(0, "stop at this step as if interrupted; 0: do not", KEEPING, low=0)
    log_to: str = flag("", "send the log there, too", KEEPING, choices=("", *TOOLS))

    def __post_init__(self):
        check_ranges(self)
        check_installed(self.log_to)
        Sampling(self.branch_temperature)  # names a temperature that cannot be
        if not (self.mask_token_id in ("", "auto") or self.mask_token_id.isdecimal()):
            raise ValueError(f"--mask-token-id {self.mask_token_id}: give an id or auto")
        if self.response_length == 1:
            raise ValueError("--response-length 1: at least 2 is needed, or 0: as the references")
        draws = self.makes_trees and self.branch_temperature > 0
        if draws and self.num_greedy >= self.num_branches:
            counts = f"--num-greedy {self.num_greedy} of --num-branches {self.num_branches}"
            raise ValueError(f"{counts} leaves no branch to draw: fewer greedy, or more branches")
        draws_from_q = self.mode == "specopd" and self.branch_temperature > 0
        not_drawn = self.num_greedy or self.text_branch or not draws_from_q
        if self.loss == "e2e_al" and not_drawn:
            raise ValueError(
                "--loss e2e_al needs branches drawn from q itself: --mode specopd, --num-greedy 0, "
                "--no-text-branch and a --branch-temperature above 0"
            )
        if self.makes_trees and not draws and self.num_branches > 1:
            raise ValueError("--branch-temperature 0 makes equal branches: give --num-branches 1")

    NEEDS = (  # flags, what they mean nothing without, whether a config has it
        ("arch target_steps target_layers target_length", "no --target", lambda c: not c.target),
        ("markov_head", "--drafter-kind dspark", lambda c: c.may_be("dspark")),
        ("rank", "--drafter-kind dspark or dflash2", lambda c: c.may_be("dspark", "dflash2")),
        ("chat_template_args", "--target, which has a template", lambda c: c.target),
        ("num_references", "no --references", lambda c: not c.references),
        ("skip_bad_lines", "--corpus or --references", lambda c: c.corpus or c.references),
        (
            "response_length",
            "no finished references, or --mode rollout",
            lambda c: c.writes_text or not c.response_length,
        ),
        ("warm_steps warm_anchors", "--mode story", lambda c: c.mode == "story"),
        ("stop_after", "another --mode than story", lambda c: c.mode != "story"),
        ("num_anchors", "another --mode than rollout", lambda c: c.mode != "rollout"),
        (
            "num_branches num_greedy text_branch merge",
            "--mode specopd or story",
            lambda c: c.makes_trees,
        ),
        ("num_greedy", "--branch-temperature above 0", lambda c: c.branch_temperature > 0),
        ("loss", "another --mode than ce", lambda c: c.mode != "ce"),
        (
            "ce_decay",
            "--mode ce or story, or --drafter-kind dspark",
            lambda c: c.mode in ("ce", "story") or c.may_be("dspark"),
        ),
        (
            "branch_temperature",
            "another --mode than ce, or --drafter-kind dspark",
            lambda c: c.mode != "ce" or c.may_be("dspark"),
        ),
        ("detach_confidence", "--drafter-kind dspark", lambda c: c.may_be("dspark")),
    )

    def may_be(self, *kinds: str) -> bool:
        """Whether the drafter can be of one of these kinds; a folder's kind is not known yet."""
        return bool(self.drafter) or (self.drafter_kind or "dflash") in kinds

    @property
    def writes_text(self) -> bool:
        """Whether the length of a response is decided here."""
        return not self.references.endswith(".safetensors") or self.mode == "rollout"

    @property
    def makes_trees(self) -> bool:
        return self.mode in ("specopd", "story")


# Flags that may differ when a run goes on: they change where and how it runs, what is kept and
# measured; except for rounding, they do not change what a step learns.
FREE = """
    out device save_every stop_after cache_gib eval_every eval_share eval_prompts num_eval_prompts
    eval_tokens shard_target grad_accum recompute full_folder log_to
""".split()

SMOKE = dict(
    out="runs/smoke",
    target_steps=30,
    target_layers=2,
    target_length=128,
    num_references=24,
    prompt_length=32,
    response_length=48,
    warm_steps=40,
    steps=10,
    num_anchors=8,
    eval_every=10,
    num_eval_prompts=8,
    eval_tokens=24,
    draft_layers=1,
)

REAL = dict(  # docs/scale.md says why, value by value
    prompt_length=0,
    response_length=0,
    dtype="bfloat16",
    precision="bfloat16",
    ce_decay=0.0,
    num_eval_prompts=64,
    eval_share=0.1,
)
CONTINUED = dict(matrix_lr=0.003, lr=3e-4)  # of a drafter that has learned already


def real(flags: dict) -> dict:
    """--preset real, beside the flags that are given."""
    return REAL | (CONTINUED if flags.get("drafter") else {})


PRESETS = {"smoke": SMOKE, "real": real}


def objective_of(config: TrainConfig, drafter: Drafter) -> Objective:
    """What the run minimises."""
    kind = drafter.config.kind
    if config.mode == "ce":
        terms = dict(DSPARK_MIX) if kind == "dspark" else {"ce": 1.0}
    else:
        terms = {config.loss: 1.0, "confidence": 1.0}
    if not drafter.has_confidence:
        terms.pop("confidence", None)
    when = config.detach_confidence
    return Objective(
        terms,
        base_ce=config.mode == "ce" and kind == "dflash2",  # so that its candidates are good
        temperature=config.branch_temperature or 1.0,
        decay=config.ce_decay or decay_of(drafter.config.num_draft_tokens),
        detach_confidence=when == "always" or when == "online" and config.mode != "ce",
        bfloat16=precision_of(config) == "bfloat16",
    )


# ------------------------------------------------------------------------------ ways to make blocks


def sequence_generator(seed: int, step: int, sequence_id: int) -> torch.Generator:
    """What a step draws for a sequence follows from these three numbers alone."""
    mixed = (seed * 1_000_003 + step) * 1_000_003 + sequence_id
    return torch.Generator().manual_seed(mixed % (2**63 - 1))


def draw_anchors(generators: list, prompt_lengths: Tensor, lengths: Tensor, A: int) -> Tensor:
    """Anchors (B,A), ascending, -1 = absent; fewer than A where no text has room for so many.
    They are drawn without replacement, from the first response token to the second-last, both
    included."""
    anchors = torch.full((len(generators), A), -1)
    for row, generator in enumerate(generators):
        first = int(prompt_lengths[row])
        count = max(int(lengths[row]) - 1 - first, 0)
        picked = torch.randperm(count, generator=generator)[:A].sort().values
        anchors[row, : len(picked)] = first + picked
    num_used = max(1, int((anchors >= 0).sum(1).max()))  # a column of absent anchors costs a block
    return anchors[:, :num_used]


def draw_uniforms(generators: list, A: int, K: int, W: int) -> Tensor:
    """The uniforms (B,A,K,W) that draw the branches. A sequence's anchors are drawn before."""
    return torch.stack([torch.rand(A, K, W, generator=generator) for generator in generators])


def until_stop(tokens: Tensor, stop_ids) -> Tensor:
    """Valid positions (…,W) of branches: up to and including the first stop token."""
    if not stop_ids:
        return torch.ones_like(tokens, dtype=torch.bool)
    stops = torch.stack([tokens == i for i in stop_ids]).any(0).long()
    return stops.cumsum(-1) - stops == 0


def text_branches(
    drafter: Drafter, trunk: Trunk, anchors: Tensor, stop_ids
) -> tuple[Tensor, Tensor, Tensor]:
    """The text itself after its anchors (B,A), as if it were a branch: tokens and valid positions
    (B,A,1,W), and the target's hidden states (B,A,1,W,C), which are the trunk's own."""
    B, A = anchors.shape
    W = drafter.config.num_draft_tokens
    ahead = anchors.clamp(min=0)[..., None] + torch.arange(1, W + 1, device=anchors.device)
    inside = (ahead < trunk.lengths[:, None, None]) & (anchors >= 0)[..., None]  # (B, A, W)
    ahead = ahead.clamp(max=trunk.tokens.shape[1] - 1).flatten(1)
    text = trunk.tokens.gather(1, ahead).view(B, A, 1, W)
    valid = inside[:, :, None] & until_stop(text, stop_ids)
    # p_k comes from position a + k - 1
    p_hidden = gather_slots(trunk.hidden, ahead - 1).view(B, A, 1, W, -1)
    return text, valid, p_hidden


def text_blocks(
    objective: Objective, drafter: Drafter, trunk: Trunk, anchors: Tensor, stop_ids
) -> Blocks:
    """Offline: one branch at every anchor (B,A), the text."""
    text, valid, p_hidden = text_branches(drafter, trunk, anchors, stop_ids)
    if "ce" in objective.terms:
        valid = valid & drafter.proposable(text)  # the target may write ids with q = 0
    if not objective.needs_p:
        p_hidden = None
    counts = {"nodes": 0, "unmerged": 0}
    return Blocks(trunk.for_drafter(), anchors, text, valid, p_hidden, counts=counts)


def tree_blocks(
    config,
    objective: Objective,
    drafter: Drafter,
    trunk: Trunk,
    anchors: Tensor,
    uniforms: Tensor,
    stop_ids,
) -> Blocks:
    """SpecOPD: branches proposed at all anchors (B,A) at once, scored as one tree. With
    --text-branch the text is one more branch, the last one; it needs no node."""
    W = drafter.config.num_draft_tokens
    with objective.autocast(anchors.device):
        proposal = drafter.propose(
            trunk,
            anchors,
            config.num_branches,
            Sampling(config.branch_temperature),
            uniforms=uniforms,
            num_greedy=config.num_greedy,
        )
    tokens = proposal.tokens  # (B, A, K, W)
    valid = until_stop(tokens, stop_ids) & (anchors >= 0)[..., None, None]
    branches = torch.where(valid, tokens, -1)
    tree = build_tree(trunk.tokens, trunk.lengths, anchors, branches, config.merge)
    p_hidden = drafter.target.score(trunk, tree, keep=False).hidden[..., :W, :]  # (B, A, K, W, C)
    unmerged = (valid.sum(-1) - 1).clamp(min=0).sum()
    counts = {"nodes": tree.valid.sum(), "unmerged": unmerged}
    hidden = proposal.hidden if proposal.hidden.requires_grad else None
    if config.text_branch:
        text = text_branches(drafter, trunk, anchors, stop_ids)
        both = zip((tokens, valid, p_hidden), text)
        tokens, valid, p_hidden = (torch.cat(pair, 2) for pair in both)
    return Blocks(trunk.for_drafter(), anchors, tokens, valid, p_hidden, hidden, counts)


@dataclass
class Recorder:
    """Watches `serve.generate` decode one batch: what each round drafted, scored and tapped."""

    width: int  # tokens of the longest text, and room for a round after it
    taps: Tensor | None = None  # (B, width, ·)
    rounds: list[tuple] = field(default_factory=list)  # rows (B',), their anchors, drafts, hidden

    def start(self, trunk: Trunk) -> None:
        self.taps = with_room(trunk.taps, self.width).clone()

    def draft(self, proposal) -> None:
        """The round's Proposal. Its q is not kept: the loss runs the drafter again."""

    def round(self, alive: list[int], anchors: Tensor, drafts: Tensor, scored, path, *_) -> None:
        """Rows `alive` of the batch: anchors (B',), drafts (B',W), path (B',W+1) of the commit. Not
        kept: the target's next token (B',) and the round's uniforms (B',2W+1), None if greedy."""
        W = drafts.shape[1]
        rows = torch.tensor(alive, device=drafts.device)
        slots = anchors[:, None] + torch.arange(W + 1, device=anchors.device)
        # those of rejected drafts are overwritten by the next round
        self.taps[rows[:, None], slots] = gather_slots(scored.taps, path.clamp(min=0))
        self.rounds.append((rows, anchors, drafts, scored.hidden[:, 0, 0, :W]))

    def stacked(self, W: int, C: int) -> tuple[Tensor, Tensor, Tensor]:
        """All rounds side by side: anchors (B,R), -1 where a row has ended, drafts (B,R,W), and the
        target's hidden states (B,R,W,C). Without any round (every response ended with its first
        token) one absent anchor stands there: nothing is learned."""
        B = len(self.taps)
        R = max(1, len(self.rounds))
        anchors = torch.full((B, R), -1, device=self.taps.device)
        drafts = torch.zeros(B, R, W, dtype=torch.long, device=self.taps.device)
        hidden = self.taps.new_zeros(B, R, W, C)
        for number, (rows, row_anchors, row_drafts, row_hidden) in enumerate(self.rounds):
            anchors[rows, number] = row_anchors
            drafts[rows, number] = row_drafts
            hidden[rows, number] = row_hidden
        return anchors, drafts, hidden


def rollout_blocks(
    drafter: Drafter, prompts, max_new_tokens: int, sampling, seed: int, stop_ids, prompt_ids=None
) -> Blocks:
    """Sequential: every block that the current drafter proposes while it really decodes, with the
    target's distributions of that very verification."""
    W = drafter.config.num_draft_tokens
    recorder = Recorder(max(map(len, prompts)) + max_new_tokens + W + 1)
    results = generate(
        drafter.target,
        drafter,
        prompts,
        max_new_tokens,
        sampling,
        seed,
        stop_ids,
        batch_size=len(prompts),
        watch=recorder,
        prompt_ids=prompt_ids,
    )
    device = recorder.taps.device
    rows = [torch.tensor(prompt + r.tokens) for prompt, r in zip(prompts, results)]
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device)
    lengths = torch.tensor([len(row) for row in rows], device=device)
    taps = recorder.taps[:, : tokens.shape[1]].clone()
    tap_ids = drafter.config.target_layer_ids
    trunk = Trunk(tokens, lengths, [], tap_ids, int(lengths.max()), taps=taps)
    anchors, drafts, p_hidden = recorder.stacked(W, drafter.target.config.hidden_size)
    drafts = drafts[:, :, None]  # (B, R, 1, W)
    valid = until_stop(drafts, stop_ids) & (anchors >= 0)[..., None, None]
    counts = {"nodes": 0, "unmerged": 0}
    return Blocks(trunk, anchors, drafts, valid, p_hidden[:, :, None], counts=counts)


def next_batch(
    config, drafter: Drafter, trunks: Trunks, step: int, stop_ids, objective=None
) -> list[Blocks]:
    """This process's blocks of a step, in --grad-accum parts of similar lengths. objective: by
    default the config's."""
    objective = objective or objective_of(config, drafter)
    references = trunks.references
    rows = batch_rows(config.seed, step, references.lengths, config.batch_size, config.bucket)
    rows = distributed.own_rows(rows)

    def blocks(rows: Tensor) -> Blocks:
        ids = rows.tolist()
        prompt_lengths = references.prompt_lengths[rows]
        if config.mode == "rollout":
            ends = prompt_lengths.tolist()
            return rollout_blocks(
                drafter,
                [references.tokens[i, :end].tolist() for i, end in zip(ids, ends)],
                config.response_length,
                Sampling(config.branch_temperature),
                config.seed * 1_000_003 + step,
                stop_ids,
                prompt_ids=ids,
            )
        generators = [sequence_generator(config.seed, step, i) for i in ids]
        A = config.num_anchors
        anchors = draw_anchors(generators, prompt_lengths, references.lengths[rows], A)
        anchors = sent(anchors, drafter.fc.weight.device)
        trunk = trunks(rows)
        if config.mode != "specopd":
            return text_blocks(objective, drafter, trunk, anchors, stop_ids)
        W = drafter.config.num_draft_tokens
        uniforms = draw_uniforms(generators, A, config.num_branches, W)[:, : anchors.shape[1]]
        return tree_blocks(config, objective, drafter, trunk, anchors, uniforms, stop_ids)

    # With one part, the drafting pass also serves the loss. With several, step_loss runs it again,
    # so that only one graph is held.
    with torch.set_grad_enabled(torch.is_grad_enabled() and config.grad_accum == 1):
        return [blocks(part) for part in rows.chunk(config.grad_accum)]


# ----------------------------------------------------------------------------------------- one step


class Step(nn.Module):
    """`step_loss` as a module, because that is what data-parallel gradients go through."""

    def __init__(self, config: TrainConfig, drafter: Drafter):
        super().__init__()
        self.drafter = drafter
        self.objective = objective_of(config, drafter)

    def forward(self, blocks: Blocks, denominators: dict | None = None):
        return step_loss(self.drafter, blocks, self.objective, denominators)


def total_denominators(objective: Objective, parts: list[Blocks]) -> dict[str, Tensor]:
    """What the terms' sums are divided by: over all parts and processes, in one message."""
    each = [torch.stack(list(objective.denominators(part).values())) for part in parts]
    return dict(zip(objective.terms, distributed.all_reduce_sum(sum(each))))


def gradient(
    config,
    step_module: nn.Module,
    drafter: Drafter,
    parts: list[Blocks],
    max_norm: float = math.inf,
    objective: Objective | None = None,
) -> dict:
    """Leave the whole batch's gradient in the drafter, scaled down to a norm of max_norm if it is
    larger -> figures of all parts and processes. The host waits for the device once, at the end.
    objective: by default the config's."""
    num_processes = distributed.num_processes()
    # from here on no process needs the target's layers
    denominators = total_denominators(objective or objective_of(config, drafter), parts)
    sums = {}
    for part in parts:
        sends = num_processes == 1 or part is parts[-1]  # gradients are sent once
        with contextlib.nullcontext() if sends else step_module.no_sync():
            value, figures = step_module(part, denominators)
            (value * num_processes).backward()  # data parallel averages; shares are to be summed
        part.hidden = None  # its graph is gone
        add_figures(sums, figures | {"loss": value.detach()})
    norm = nn.utils.clip_grad_norm_(drafter.parameters(), max_norm)
    sums["grad_norm"] = norm.double() / num_processes  # it is the same on all
    return figures_of(sums)


# ----------------------------------------------------------------------------------------- the loop


def one_step(run: Run, step: int) -> dict:
    """Make blocks, learn from them -> what the log tells of the step. Where any process was asked
    to end before it learns, the blocks are dropped and Stopped is raised."""
    config = run.config
    stop_ids = run.measure.stop_ids
    objective = run.objective
    begin = time.perf_counter()
    set_learning_rate(run.optimizers, step, config.steps)
    parts = run.end_request.run(
        lambda: next_batch(config, run.drafter, run.trunks, step, stop_ids, objective)
    )
    figures = gradient(config, run.step_module, run.drafter, parts, MAX_GRADIENT_NORM, objective)
    record = {"step": step + 1} | figures
    run.check_sound(record)
    optimizer_step(run.optimizers, together=True)
    return run.count(record, time.perf_counter() - begin)


def train(config: TrainConfig, drafter: Drafter, trunks: Trunks, measure: Measure, out) -> dict:
    """Train the drafter in place by `config.mode`; everything of the run stands in `out`."""
    step_module = Step(config, drafter)
    run = start_or_resume(config, FREE, drafter, trunks, measure, out, step_module)
    with run.under_way():
        if run.unmeasured:  # it was stopped while it measured
            run.measure_and_log()
        for step in range(run.start, run.end):
            record = one_step(run, step)
            run.log_and_save(record)
    return run.totals


# ---------------------------------------------------------------------------------------- the story


def train_or_load(
    config: TrainConfig, folder: Path, trunks: Trunks, tokenizer, measure: Measure
) -> dict:
    """Train one run, or find it done in its folder -> its totals."""
    drafter = start_drafter(config, trunks.target, tokenizer)
    made_with = ingredients(config, FREE, drafter, trunks.references, measure)
    return stage(folder, made_with, lambda: train(config, drafter, trunks, measure, folder))


def story(config: TrainConfig, out: Path) -> None:
    """Target, references, a drafter trained offline, three ways on from it, and the table."""
    begin = time.perf_counter()
    target, tokenizer, measure, references = prepare(config, out)
    drafters = {"fresh": start_drafter(config, target, tokenizer)}
    config = resolved(config, references, drafters["fresh"])
    print(f"AL is measured on {measure.source}")
    tap_ids = drafters["fresh"].config.target_layer_ids
    trunks = Trunks(target, references, tap_ids, config.cache_gib)
    start = dict(mode="ce", steps=config.warm_steps, num_anchors=config.warm_anchors)
    configs = {"start": replace(config, **start)}
    for mode in STORY_MODES:
        configs[mode] = replace(config, mode=mode, drafter=str(out / "start"))
    totals = {}
    for name, its_config in configs.items():
        totals[name] = train_or_load(its_config, out / name, trunks, tokenizer, measure)
        drafters[name] = Drafter.from_pretrained(out / name, target, torch.float32)
    lengths = {name: {} for name in drafters}
    for name, drafter in drafters.items():
        share = QUICK_SHARE if name == "fresh" else 1.0  # slow: a round for almost every token
        for t in TEMPERATURES:
            lengths[name][t] = measure(target, drafter, t, share, f"AL of {name}")
    speeds = decoding_speed(target, drafters["specopd"], measure, count=32)
    report(config, measure, out, lengths, totals, speeds, time.perf_counter() - begin)


# ------------------------------------------------------------------------------------------- lesson


def lesson_step(
    num_anchors: int = 3, num_branches: int = 2, seed: int = 3
) -> tuple[TrainConfig, Drafter, Blocks]:
    """The blocks of one SpecOPD step on one reference, which a small target wrote."""
    target, drafter = lesson_models()
    prompt = [1, 2, 3]
    (response,) = generate(target, None, [prompt], 9, Sampling(1.0), seed=2)
    references = References.from_lists([prompt], [response.tokens], 0)
    trunks = Trunks(target, references, drafter.config.target_layer_ids, cache_gib=1)
    shape = dict(num_anchors=num_anchors, num_branches=num_branches)
    config = TrainConfig(mode="specopd", batch_size=1, seed=seed, device="cpu", **shape)
    (blocks,) = next_batch(config, drafter, trunks, 0, ())
    return config, drafter, blocks


def lesson() -> None:
    """One SpecOPD step on one reference, in numbers, and the same loss after one update."""
    config, drafter, blocks = lesson_step()
    objective = objective_of(config, drafter)
    reference = blocks.trunk.tokens[0].tolist()
    print(f"the reference: prompt {reference[:3]}, and {reference[3:]}, which the target wrote")
    print("ids 10 (MASK) and 11 have q = 0, but some p, because the target is untrained")
    for anchor, branches in zip(blocks.anchors[0].tolist(), blocks.tokens[0].tolist()):
        text = reference[anchor + 1 : anchor + 4]
        drafts = f"greedy {branches[0]}, drawn {branches[1]}"
        print(f"  anchor {anchor}, after {reference[: anchor + 1]}: {drafts}, the text {text}")
    nodes = f"{int(blocks.counts['nodes'])} nodes ({int(blocks.counts['unmerged'])} unmerged)"
    print(f"6 proposed branches of W = 3 tokens: {nodes}, scored in one pass")
    print("3 branches of text: no node, their p is the trunk's\n")
    show_branch(drafter, blocks, a=1, k=1)
    value, figures = step_loss(drafter, blocks, objective)
    print(f"\nE2E-TV of all 9 branches: {value.item():.4f}")
    value.backward()
    optimizers = make_optimizers(drafter, config.matrix_lr, config.lr)
    optimizer_step(optimizers)
    blocks.hidden = None  # drafted before the update: run the drafter again on the same branches
    value, _ = step_loss(drafter, blocks, objective)
    print(f"the same loss after one update: {value.item():.4f}")


def branch_probs(drafter: Drafter, blocks: Blocks, a: int, k: int) -> tuple[Tensor, Tensor]:
    """p and q (W,V) along branch k at anchor number a of the first text, at temperature 1."""
    first = blocks.trunk.tokens[:, blocks.anchors[0, a]]
    previous = torch.cat([first, blocks.tokens[0, a, k, :-1]])[None]
    q = drafter.logits(blocks.hidden[:, a, 0], previous)[0].softmax(-1).detach()
    return drafter.target.head(blocks.p_hidden[0, a, k]).softmax(-1), q


def show_branch(drafter: Drafter, blocks: Blocks, a: int, k: int) -> None:
    """Print p, q, alpha and survival along branch k at anchor number a."""
    p, q = branch_probs(drafter, blocks, a, k)
    alpha = acceptance(p, q)
    print(f"the drawn branch at anchor {blocks.anchors[0, a]}:")
    for position, y in enumerate(blocks.tokens[0, a, k].tolist()):
        survival = alpha[: position + 1].prod().item()
        print(f"  y_{position + 1} = {y}   alpha {alpha[position]:.3f}   survival {survival:.3f}")
        for name, values in (("p", p), ("q", q)):
            row = " ".join(f"{x:.2f}" for x in values[position].tolist())
            print(f"    {name}_{position + 1} = {row}")


# --------------------------------------------------------------------------------------------- main


def train_one_mode(config: TrainConfig, out: Path) -> None:
    """`python train.py --mode MODE`, on one process or several."""
    if config.shard_target:  # nobody may go ahead: a layer runs on all processes or on none
        if not (config.target and config.references):
            raise ValueError("--shard-target goes with --target FOLDER and --references FILE")
        target, tokenizer, measure, references = prepare(config, out)
    else:
        prepared = distributed.main_process_first(lambda: prepare(config, out))
        target, tokenizer, measure, references = prepared
    drafter = start_drafter(config, target, tokenizer)
    config = resolved(config, references, drafter)
    print_opening(config, measure, references, drafter, tokenizer)
    cache_gib = 0.0 if config.mode == "rollout" else config.cache_gib  # it reads no trunk
    trunks = Trunks(target, references, drafter.config.target_layer_ids, cache_gib)
    totals = train(config, drafter, trunks, measure, out / config.mode)
    is_main = distributed.is_main()
    distributed.stop()
    if is_main:
        print_outcome(config, measure, out, totals)


def main():
    if sys.argv[1:] == ["--lesson"]:
        return lesson()
    config = parse_flags(TrainConfig, __doc__, presets=PRESETS)
    config = replace(config, device=distributed.start(config.device))
    share = distributed.num_processes() * config.grad_accum
    if config.batch_size % share:
        raise ValueError(
            f"--batch-size {config.batch_size} is no multiple of the "
            f"{distributed.num_processes()} processes times --grad-accum {config.grad_accum}"
        )
    out = Path(config.out)
    defaults = asdict(TrainConfig())
    changed = {name: value for name, value in asdict(config).items() if value != defaults[name]}
    where = f"{config.mode} in {out} on {config.device}"
    print(f"{where}; what differs from --help's defaults: {json.dumps(changed)}")
    if config.mode == "story" and distributed.num_processes() > 1:
        raise ValueError("several processes go with one --mode, not with the story")
    with locked(out) if distributed.is_main() else contextlib.nullcontext():
        return story(config, out) if config.mode == "story" else train_one_mode(config, out)


if __name__ == "__main__":
    sys.exit(run_command(main))
