"""Training a drafter: four modes, three ways to make blocks, one step, one loop.

    --mode ce       offline: cross-entropy on the reference that the target wrote (DSpark: its mix)
    --mode e2e      offline: E2E-TV, or another --loss, along the reference's own history
    --mode rollout  on policy, one round after another (Draft-OPD, arXiv 2605.29343, in outline):
                    decode whole responses with the current drafter, then E2E-TV on every block
                    that was proposed, accepted or not
    --mode specopd  on policy, all at once (the paper)

One SpecOPD step:

1. `draw_anchors` picks A positions in the response of each reference.
2. `drafter.propose` draws K branches of W tokens at every anchor, in one pass.
3. `build_tree` hangs them on the trunk, and `target.score` gives p of all of them in one pass.
4. `step_loss` compares p and q: E2E-TV. Its gradient flows through q only.
5. The optimizers update the drafter; the target never changes.

Modes differ in their loss and in how they make blocks: by `text_blocks` (ce and e2e),
`rollout_blocks` or `tree_blocks`. Without arguments the whole story runs on a laptop: train a toy
target on the standard library's text, let it write references, train a drafter offline, continue
it in three ways for the same number of steps from the same start, and measure the acceptance length
(AL) by real decoding on held-out prompts. Every stage is kept in --out and done once; a run that
was stopped goes on.

    python train.py                       the story (12 to 15 minutes on one CPU core)
    python train.py --preset smoke        the same in seconds, too short to learn much
    python train.py --lesson              one SpecOPD step on one reference, in numbers
    python train.py --mode specopd --target FOLDER --drafter FOLDER --out runs/mine
    torchrun --nproc_per_node=8 train.py --mode specopd ...       on several processes
    pytest tests/test_train.py
"""

import contextlib
import itertools
import json
import math
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from drafter import Drafter, Sampling
from hf.drafters import ARCHITECTURES, MARKOV_HEADS
from hf.files import read_json
from loss import DSPARK_MIX, LOSSES, Blocks, Objective, acceptance, step_loss
from serve import generate, lesson_models
from support import distributed, resume
from support.cpu import sent
from support.files import locked, write_json
from support.fingerprint import fingerprint, fingerprints, weights_fingerprint
from support.flags import (
    DEVICE,
    DEVICE_TEXT,
    DTYPES,
    TEMPLATE_ARGS,
    Stopped,
    check_ranges,
    flag,
    parse_flags,
    precision_of,
    run_command,
)
from support.log import TOOLS, check_installed, open_log, peak_memory_gib
from support.measure import Measure, decoding_speed, format_gain, gain
from support.optim import make_optimizers, optimizer_step, set_learning_rate
from support.partings import check_partings, format_partings
from support.prepare import (
    Trunks,
    batch_rows,
    decay_of,
    mask_in_words,
    prepare,
    resolved,
    start_drafter,
)
from support.references import References
from support.resume import check_same, stage
from target import TOYS, Trunk
from tree import build_tree, gather_slots, with_room

MODES = ("ce", "e2e", "specopd", "rollout")
STORY_MODES = ("ce", "e2e", "specopd")  # rollouts take several times as long
TEMPERATURES = (0.0, 1.0)  # at which AL is measured
MAX_GRADIENT_NORM = 1.0  # never reached by E2E-TV; it tames the first steps of CE
QUICK_SHARE = 0.25  # of the held-out prompts, measured while training

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
    batch_size: int = flag(8, "references per step", RECIPE, low=1)
    num_anchors: int = flag(16, "A, anchors per reference", RECIPE, low=1)
    num_branches: int = flag(2, "K, branches per anchor (specopd)", RECIPE, low=1)
    # NOTE(paper): greedy branches are ours; without them decoding at temperature 0 gains less
    num_greedy: int = flag(1, "how many of the K branches are the argmax", RECIPE, low=0)
    branch_temperature: float = flag(
        1.0, "of branches, rollouts, p and q (0: greedy, with p and q at 1)", RECIPE, low=0
    )
    loss: str = flag("e2e_tv", "of every mode except ce", RECIPE, choices=LOSSES[1:])
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
        if self.loss == "e2e_al" and (self.num_greedy or not draws_from_q):
            raise ValueError(
                "--loss e2e_al needs branches drawn from q itself: --mode specopd, "
                "--num-greedy 0 and a --branch-temperature above 0"
            )

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
        ("warm_steps", "--mode story", lambda c: c.mode == "story"),
        ("stop_after", "another --mode than story", lambda c: c.mode != "story"),
        ("num_anchors", "another --mode than rollout", lambda c: c.mode != "rollout"),
        ("num_branches num_greedy merge", "--mode specopd or story", lambda c: c.makes_trees),
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
    out device save_every stop_after cache_gib eval_share eval_prompts num_eval_prompts eval_tokens
    shard_target grad_accum recompute full_folder log_to
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
    num_anchors=64,
    num_branches=1,
    num_greedy=0,
    ce_decay=0.0,
    num_eval_prompts=64,
    eval_share=0.1,
)
CONTINUED = dict(matrix_lr=0.003, lr=3e-4)  # of a drafter that has learned already


def real(flags: dict) -> dict:
    """--preset real, beside the flags that are given."""
    return REAL | (CONTINUED if flags.get("drafter") else {})


RESOLVED = "ce_decay precision dtype matrix_lr lr num_anchors".split()
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


def tell_first_loss(config: TrainConfig, loss: float, num_tokens: int) -> None:
    """Say why a fresh drafter's first loss may be far above that of guessing, ln V."""
    guessing = math.log(num_tokens)
    if config.mode == "ce" and not config.drafter and loss > 1.5 * guessing:
        print(
            f"a fresh drafter's first loss of {loss:.0f} is above ln V = {guessing:.1f}: "
            "its logits are not yet scaled; it falls within the first steps"
        )


# ------------------------------------------------------------------------------ ways to make blocks


def draw_anchors(
    seed: int, step: int, sequence_ids, prompt_lengths, lengths, shape: tuple[int, int, int]
) -> tuple[Tensor, Tensor]:
    """Anchors (B,A), ascending, -1 = absent, and the uniforms (B,A,K,W) that draw the branches.

    shape = (A, K, W); the result has fewer than A anchors where no text has room for so many.
    Anchors are drawn without replacement, from the first response token to the second-last, both
    included. All follows from (seed, step, sequence id) alone."""
    A, K, W = shape
    anchors = torch.full((len(sequence_ids), A), -1)
    uniforms = torch.empty(len(sequence_ids), A, K, W)
    for row, sequence_id in enumerate(sequence_ids):
        mixed = (seed * 1_000_003 + step) * 1_000_003 + int(sequence_id)
        generator = torch.Generator().manual_seed(mixed % (2**63 - 1))
        first = int(prompt_lengths[row])
        count = max(int(lengths[row]) - 1 - first, 0)
        picked = torch.randperm(count, generator=generator)[:A].sort().values
        anchors[row, : len(picked)] = first + picked
        uniforms[row] = torch.rand(A, K, W, generator=generator)
    num_used = max(1, int((anchors >= 0).sum(1).max()))  # a column of absent anchors costs a block
    return anchors[:, :num_used], uniforms[:, :num_used]


def until_stop(tokens: Tensor, stop_ids) -> Tensor:
    """Valid positions (…,W) of branches: up to and including the first stop token."""
    if not stop_ids:
        return torch.ones_like(tokens, dtype=torch.bool)
    stops = torch.stack([tokens == i for i in stop_ids]).any(0).long()
    return stops.cumsum(-1) - stops == 0


def text_blocks(config, drafter: Drafter, trunk: Trunk, anchors: Tensor, stop_ids) -> Blocks:
    """Offline: the text itself after its anchors (B,A), as if it were a branch."""
    B, A = anchors.shape
    W = drafter.config.num_draft_tokens
    ahead = anchors.clamp(min=0)[..., None] + torch.arange(1, W + 1, device=anchors.device)
    inside = (ahead < trunk.lengths[:, None, None]) & (anchors >= 0)[..., None]  # (B, A, W)
    ahead = ahead.clamp(max=trunk.tokens.shape[1] - 1).flatten(1)
    text = trunk.tokens.gather(1, ahead).view(B, A, 1, W)
    valid = inside[:, :, None] & until_stop(text, stop_ids)
    if config.mode == "ce":
        valid = valid & drafter.proposable(text)  # the target may write ids with q = 0
    p_hidden = None
    if objective_of(config, drafter).needs_p:  # p_k comes from position a + k - 1
        p_hidden = gather_slots(trunk.hidden, ahead - 1).view(B, A, 1, W, -1)
    counts = {"nodes": 0, "unmerged": 0}
    return Blocks(trunk.for_drafter(), anchors, text, valid, p_hidden, counts=counts)


def tree_blocks(
    config, drafter: Drafter, trunk: Trunk, anchors: Tensor, uniforms: Tensor, stop_ids
) -> Blocks:
    """SpecOPD: branches drawn at all anchors (B,A) at once, scored as one tree."""
    W = drafter.config.num_draft_tokens
    with objective_of(config, drafter).autocast(anchors.device):
        sampling = Sampling(config.branch_temperature)
        how = dict(uniforms=uniforms, num_greedy=config.num_greedy)
        proposal = drafter.propose(trunk, anchors, config.num_branches, sampling, **how)
    valid = until_stop(proposal.tokens, stop_ids) & (anchors >= 0)[..., None, None]
    branches = torch.where(valid, proposal.tokens, -1)  # (B, A, K, W)
    tree = build_tree(trunk.tokens, trunk.lengths, anchors, branches, config.merge)
    p_hidden = drafter.target.score(trunk, tree, keep=False).hidden[..., :W, :]  # (B, A, K, W, C)
    unmerged = (valid.sum(-1) - 1).clamp(min=0).sum()
    counts = {"nodes": tree.valid.sum(), "unmerged": unmerged}
    hidden = proposal.hidden if proposal.hidden.requires_grad else None
    tokens = proposal.tokens
    return Blocks(trunk.for_drafter(), anchors, tokens, valid, p_hidden, hidden, counts)


@dataclass
class Recorder:
    """Watches `serve.generate` decode one batch: what each round drafted, scored and tapped."""

    width: int  # tokens of the longest text, and room for a round after it
    taps: Tensor | None = None  # (B, width, ·)
    rounds: list[dict] = field(default_factory=list)

    def start(self, trunk: Trunk) -> None:
        self.taps = with_room(trunk.taps, self.width).clone()

    def round(self, alive: list[int], anchors: Tensor, drafts: Tensor, scored, path) -> None:
        """Rows `alive` of the batch: anchors (B',), drafts (B',W), path (B',W+1) of the commit."""
        B = len(self.taps)
        W = drafts.shape[1]
        rows = torch.tensor(alive, device=drafts.device)
        slots = anchors[:, None] + torch.arange(W + 1, device=anchors.device)
        # those of rejected drafts are overwritten by the next round
        self.taps[rows[:, None], slots] = gather_slots(scored.taps, path.clamp(min=0))
        hidden = scored.hidden[:, 0, 0, :W]  # (B', W, C)
        record = {
            "anchors": anchors.new_full((B,), -1),
            "tokens": drafts.new_zeros(B, W),
            "hidden": hidden.new_zeros(B, *hidden.shape[1:]),
        }
        for name, values in (("anchors", anchors), ("tokens", drafts), ("hidden", hidden)):
            record[name][rows] = values
        self.rounds.append(record)

    def no_round(self, W: int, C: int) -> None:
        """Every response ended with its first token: there is nothing to learn."""
        B = len(self.taps)
        nothing = torch.zeros(B, W, dtype=torch.long, device=self.taps.device)
        hidden = self.taps.new_zeros(B, W, C)
        self.rounds = [{"anchors": nothing[:, 0] - 1, "tokens": nothing, "hidden": hidden}]


def rollout_blocks(
    drafter: Drafter, prompts, max_new_tokens: int, sampling, seed: int, stop_ids, prompt_ids=None
) -> Blocks:
    """Sequential: every block that the current drafter proposes while it really decodes, with the
    target's distributions of that very verification."""
    W = drafter.config.num_draft_tokens
    recorder = Recorder(max(map(len, prompts)) + max_new_tokens + W + 1)
    how = dict(batch_size=len(prompts), watch=recorder, prompt_ids=prompt_ids)
    request = (prompts, max_new_tokens, sampling, seed, stop_ids)
    results = generate(drafter.target, drafter, *request, **how)
    if not recorder.rounds:
        recorder.no_round(W, drafter.target.config.hidden_size)
    device = recorder.taps.device
    rows = [torch.tensor(prompt + r.tokens) for prompt, r in zip(prompts, results)]
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device)
    lengths = torch.tensor([len(row) for row in rows], device=device)
    taps = recorder.taps[:, : tokens.shape[1]].clone()
    tap_ids = drafter.config.target_layer_ids
    trunk = Trunk(tokens, lengths, [], tap_ids, int(lengths.max()), taps=taps)

    def stacked(name: str) -> Tensor:  # (B, R, ...)
        return torch.stack([record[name] for record in recorder.rounds], 1)

    anchors = stacked("anchors")
    drafts = stacked("tokens")[:, :, None]  # (B, R, 1, W)
    valid = until_stop(drafts, stop_ids) & (anchors >= 0)[..., None, None]
    counts = {"nodes": 0, "unmerged": 0}
    return Blocks(trunk, anchors, drafts, valid, stacked("hidden")[:, :, None], counts=counts)


def next_batch(config, drafter: Drafter, trunks: Trunks, step: int, stop_ids) -> list[Blocks]:
    """This process's blocks of a step, in --grad-accum parts of similar lengths."""
    references = trunks.references
    device = drafter.fc.weight.device
    rows = batch_rows(config.seed, step, references.lengths, config.batch_size, config.bucket)
    rows = distributed.own_rows(rows)

    def blocks(rows: Tensor) -> Blocks:
        if config.mode == "rollout":
            ends = references.prompt_lengths.tolist()
            prompts = [references.tokens[row, : ends[row]].tolist() for row in rows.tolist()]
            sampling = Sampling(config.branch_temperature)
            seed = config.seed * 1_000_003 + step
            how = (config.response_length, sampling, seed, stop_ids, rows.tolist())
            return rollout_blocks(drafter, prompts, *how)
        shape = (config.num_anchors, config.num_branches, drafter.config.num_draft_tokens)
        spans = (references.prompt_lengths[rows], references.lengths[rows])
        anchors, uniforms = draw_anchors(config.seed, step, rows, *spans, shape)
        anchors = sent(anchors, device)
        if config.mode == "specopd":
            return tree_blocks(config, drafter, trunks(rows), anchors, uniforms, stop_ids)
        return text_blocks(config, drafter, trunks(rows), anchors, stop_ids)

    # the drafting pass keeps its graph if it is used at once; else the blocks run again later
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
    config, step_module: nn.Module, drafter: Drafter, parts: list[Blocks], max_norm=math.inf
) -> dict:
    """Leave the whole batch's gradient in the drafter, scaled down to a norm of max_norm if it is
    larger -> figures of all parts and processes. The host waits for the device once, at the end."""
    num_processes = distributed.num_processes()
    # from here on no process needs the target's layers
    denominators = total_denominators(objective_of(config, drafter), parts)
    sums = {}
    for part in parts:
        sends = num_processes == 1 or part is parts[-1]  # gradients are sent once
        with contextlib.nullcontext() if sends else step_module.no_sync():
            value, figures = step_module(part, denominators)
            (value * num_processes).backward()  # data parallel averages; shares are to be summed
        part.hidden = None  # its graph is gone
        for name, x in (figures | {"loss": value.detach()}).items():
            if not isinstance(x, Tensor):  # new_full: a copy would make the host wait
                x = value.new_full((), x, dtype=torch.double)
            sums[name] = sums.get(name, 0.0) + x.double()
    norm = nn.utils.clip_grad_norm_(drafter.parameters(), max_norm)
    sums["grad_norm"] = norm.double() / num_processes  # it is the same on all
    return figures_of(all_reduce_dict(sums))


def all_reduce_dict(sums: dict[str, Tensor]) -> dict:
    """Each number's or vector's sum over all processes, in one message and one read, as a plain
    number or list."""
    flat = torch.cat([x.flatten() for x in sums.values()])
    totals = iter(distributed.all_reduce_sum(flat).tolist())
    return {
        name: list(itertools.islice(totals, len(x))) if x.dim() else next(totals)
        for name, x in sums.items()
    }


def figures_of(sums: dict) -> dict:
    """Means instead of sums: alpha, survival (W,) over valid positions, the share of slots that
    are padding, and the share of labels among DFlash 2's candidates."""
    positions = sums.pop("positions", None)
    if positions:
        for name in ("alpha", "survival"):
            sums[name] = [x / max(n, 1) for x, n in zip(sums[name], positions)]
    if "candidates" in sums:
        sums["coverage"] = sums.pop("candidates") / max(sums.pop("labels"), 1)
    sums["padding"] = sums["padding"] / sums.pop("slots")
    return sums | {name: int(sums[name]) for name in ("supervised", "nodes", "unmerged")}


# ----------------------------------------------------------------------------------------- the loop


@dataclass
class Run:
    """A training in progress."""

    config: TrainConfig
    drafter: Drafter
    trunks: Trunks
    measure: Measure
    out: Path
    made_with: dict  # what must be the same when the run goes on
    step_module: nn.Module
    optimizers: list
    start: int = 0  # steps already done
    totals: dict = field(default_factory=dict)
    unmeasured: dict | None = None  # the last step's record while its AL is due

    def __post_init__(self):
        self.end_request = resume.EndRequest(self.drafter.target.model)

    def save(self) -> None:
        if distributed.is_main():
            state = {"step": self.totals["step"], "made_with": self.made_with}
            state |= {"totals": self.totals, "unmeasured": self.unmeasured}
            state["drafter"] = self.drafter.state_dict()
            state["optimizers"] = [optimizer.state_dict() for optimizer in self.optimizers]
            resume.save_training_state(self.out, state)


def ingredients(config, drafter: Drafter, references: References, measure: Measure) -> dict:
    """What must be the same when a run goes on: its flags, and what stood in the files that they
    name. drafter: the one to start from."""
    made_with = {k: v for k, v in asdict(config).items() if k not in FREE}
    made_with |= {f"the drafter's {k}": v for k, v in drafter.config.to_dict().items()}
    made_with["the target"] = weights_fingerprint(drafter.target)
    if config.drafter:
        made_with["the starting drafter's weights"] = weights_fingerprint(drafter)["weights"]
    made_with["the references"] = fingerprint(vars(references).values())
    made_with["stop ids"] = [*measure.stop_ids]
    made_with["the held-out prompts"] = fingerprints(measure.prompts)  # --eval-prompts may change
    return made_with


def start_or_resume(config, drafter: Drafter, trunks: Trunks, measure: Measure, out) -> Run:
    """A fresh run in the folder `out`, or the one there, continued from its last training state."""
    made_with = ingredients(config, drafter, trunks.references, measure)
    drafter.recompute = config.recompute
    optimizers = make_optimizers(drafter, config.matrix_lr, config.lr)
    step_module = distributed.data_parallel(Step(config, drafter))
    run = Run(config, drafter, trunks, measure, out, made_with, step_module, optimizers)
    zero = dict.fromkeys("step supervised seconds eval_seconds nodes unmerged".split(), 0)
    run.totals |= zero | {"best": {}}
    measured_on = fingerprint([measure.prompts, measure.max_new_tokens])
    state = resume.load_training_state(out)
    wanted = {"step", "made_with", "totals", "drafter", "optimizers"}
    if state and not wanted <= state.keys():
        missing = min(wanted - state.keys())
        raise ValueError(
            f"{state['path']} is no training state, it has no {missing}: choose another --out"
        )
    resume.check_processes_agree(state, made_with["the references"])
    if state:
        check_same(state["made_with"], made_with, state["path"])
        resume.set_damaged_aside(state)
        resume.restore(state, drafter, optimizers)
        run.start = state["step"]
        run.unmeasured = state.get("unmeasured")
        run.totals |= state["totals"]
        if run.totals["best"] and run.totals["measured_on"] != measured_on:
            print("AL is measured on other prompts from now on: the best drafter is sought anew")
            run.totals["best"] = {}
    elif (out / "model.safetensors").exists():
        raise ValueError(f"{out} holds a drafter without its training state: choose another --out")
    else:
        run.save()
    run.totals |= {"step": run.start, "measured_on": measured_on}
    if distributed.is_main():
        resume.cut_log(out / "log.jsonl", run.start - bool(run.unmeasured))
        write_json(out / "run.json", asdict(config))
    return run


def one_step(run: Run, step: int) -> dict:
    """Make blocks, learn from them -> what the log tells of the step. Where any process was asked
    to end before it learns, the blocks are dropped and Stopped is raised."""
    config = run.config
    begin = time.perf_counter()
    set_learning_rate(run.optimizers, step, config.steps)
    batch = (config, run.drafter, run.trunks, step, run.measure.stop_ids)
    parts = run.end_request.run(lambda: next_batch(*batch))
    how = (run.step_module, run.drafter, parts, MAX_GRADIENT_NORM)
    record = {"step": step + 1} | gradient(config, *how)
    norm = record["grad_norm"]
    if not (math.isfinite(norm) and math.isfinite(record["loss"])):
        stop_unsound(run, step, record["loss"], norm)
    optimizer_step(run.optimizers, together=True)
    for name, optimizer in zip(("lr", "matrix_lr"), run.optimizers):
        record[name] = optimizer.param_groups[0]["lr"]
    record["seconds"] = time.perf_counter() - begin
    record["tokens_per_s"] = record["supervised"] / record["seconds"]
    record["memory_gib"] = peak_memory_gib(run.drafter.fc.weight.is_cuda)
    run.totals["step"] = step + 1
    for name in ("seconds", "supervised", "nodes", "unmerged"):
        run.totals[name] += record[name]
    return record


def stop_unsound(run: Run, step: int, loss: float, norm: float) -> None:
    """A step that is not finite must not change the drafter: keep it as it is, and stop."""
    folder = run.out / "sound"
    if distributed.is_main():
        run.drafter.save_pretrained(folder)
    raise ValueError(
        f"step {step + 1} is not finite (loss {loss:.3g}, gradient norm {norm:.3g}): go on in "
        f"another --out from --drafter {folder}, with a lower --lr and --matrix-lr"
    )


def measure_and_keep_best(run: Run) -> dict:
    """AL at both temperatures on a share of the prompts; the drafter of the best mean is kept."""
    target = run.drafter.target
    step = run.totals["step"]
    begin = time.perf_counter()
    als, by_task = {}, {}
    for temperature in TEMPERATURES:
        title = f"AL at temperature {temperature:g}, step {step}"
        how = (temperature, QUICK_SHARE, title, run.end_request.run)
        measured = run.measure(target, run.drafter, *how)
        als[f"al_t{temperature:g}"] = measured.mean
        by_task[f"by_task_t{temperature:g}"] = run.measure.by_task(measured)
    mean = sum(als.values()) / len(als)
    als |= {name: tasks for name, tasks in by_task.items() if tasks}
    run.totals |= als
    run.totals["eval_seconds"] += time.perf_counter() - begin
    if mean > run.totals["best"].get("al", 0):
        run.totals["best"] = {"step": step, "al": mean}
        if distributed.is_main():
            run.drafter.save_pretrained(run.out / "best", full=run.config.full_folder)
    return als | {"al_source": run.measure.source}


def train(config: TrainConfig, drafter: Drafter, trunks: Trunks, measure: Measure, out) -> dict:
    """Train the drafter in place by `config.mode`; everything of the run stands in `out`."""
    run = start_or_resume(config, drafter, trunks, measure, out)
    end = min(config.steps, config.stop_after or config.steps)
    with log_of(run) as write, progress_bar(run) as bar, run.end_request:
        try:
            for step in range(run.start - bool(run.unmeasured), end):
                record = run.unmeasured or one_step(run, step)
                if step == 0:
                    tell_first_loss(config, record["loss"], drafter.target.num_tokens)
                show_progress(bar, run, record["loss"])
                write_and_save(run, record, write, is_last=step + 1 == end)
                show_progress(bar, run, record["loss"])
        except Stopped:
            if not run.unmeasured:  # else it is saved
                run.save()
            distributed.barrier()  # the main process saves
            done = f"step {run.totals['step']} of {config.steps} is saved in {out}"
            raise Stopped(f"asked to end: {done}, the same command goes on") from None
        if distributed.is_main() and end == config.steps:
            finish(run)
        # in the last step: this run is done, what would follow is not wanted
        run.end_request.check(f"asked to end: {out} is done")
    return run.totals


def write_and_save(run: Run, record: dict, write, is_last: bool) -> None:
    """Log a step and save the run where that is due. Where AL is due the run is saved before, too:
    if it is stopped or killed while it measures, it goes on by measuring again."""
    config = run.config
    step = record["step"]
    if run.unmeasured or is_al_due(run, step):
        if not run.unmeasured:
            run.unmeasured = record
            run.save()
        record = record | measure_and_keep_best(run)
    write(record)
    if run.unmeasured or step % config.save_every == 0 or is_last:
        run.unmeasured = None
        run.save()


def is_al_due(run: Run, step: int) -> bool:
    """Whether AL is measured after this step: after the last, and every --eval-every steps unless
    measuring has had its --eval-share of the time so far. The main process's clock decides."""
    share, totals = run.config.eval_share, run.totals
    is_over = bool(share) and totals["eval_seconds"] > share * totals["seconds"]
    is_due = step % run.config.eval_every == 0 and not distributed.gather_numbers([is_over])[0][0]
    return is_due or step == run.config.steps


def log_of(run: Run):
    """A context that gives the function which logs a record."""
    if not distributed.is_main():
        return contextlib.nullcontext(lambda record: None)
    return open_log(run.out, run.config.log_to, asdict(run.config))


def progress_bar(run: Run) -> tqdm:
    how = dict(initial=run.start, total=run.config.steps, disable=not distributed.is_main())
    return tqdm(desc=f"{run.config.mode:8s}", **how)


def show_progress(bar: tqdm, run: Run, loss: float) -> None:
    totals = run.totals
    als = {n.replace("al_t", "AL@"): f"{x:.2f}" for n, x in totals.items() if n[:4] == "al_t"}
    speed = f"{totals['supervised'] / totals['seconds']:.0f}"
    bar.set_postfix({"loss": f"{loss:.3f}", **als, "tokens/s": speed}, refresh=False)
    bar.update(totals["step"] - bar.n)


def finish(run: Run) -> None:
    """Save the drafter, then the summary: with it the run counts as done."""
    path = run.out / "summary.json"
    summary = read_json(path) if path.is_file() else {}  # a command of lab/ writes there, too
    if "config" in summary and (run.out / "model.safetensors").is_file():
        print(f"{run.out} was done before: nothing was trained, measured or saved again")
        return
    run.drafter.save_pretrained(run.out, full=run.config.full_folder)
    write_json(path, summary | run.totals | {"config": run.made_with})


# ---------------------------------------------------------------------------------------- the story


def trained(run: TrainConfig, folder: Path, target, tokenizer, measure: Measure, trunks) -> dict:
    """Train one run, or find it done in its folder -> its totals."""
    drafter = start_drafter(run, target, tokenizer)
    trunks = trunks()
    made_with = ingredients(run, drafter, trunks.references, measure)
    return stage(folder, made_with, lambda: train(run, drafter, trunks, measure, folder))


def story(config: TrainConfig, out: Path) -> None:
    """Target, references, a drafter trained offline, three ways on from it, and the table."""
    begin = time.perf_counter()
    target, tokenizer, measure, references = prepare(config, out)
    drafters = {"fresh": start_drafter(config, target, tokenizer)}
    config = resolved(config, references, drafters["fresh"])
    print(f"AL is measured on {measure.source}")
    tap_ids = drafters["fresh"].config.target_layer_ids
    trunks = Trunks(target, references, tap_ids, config.cache_gib)
    runs = {"start": replace(config, mode="ce", steps=config.warm_steps)}
    for mode in STORY_MODES:
        runs[mode] = replace(config, mode=mode, drafter=str(out / "start"))
    totals = {}
    for name, run in runs.items():
        totals[name] = trained(run, out / name, target, tokenizer, measure, lambda: trunks)
        drafters[name] = Drafter.from_pretrained(out / name, target, torch.float32)
    lengths = {name: {} for name in drafters}
    for name, drafter in drafters.items():
        share = QUICK_SHARE if name == "fresh" else 1.0  # slow: a round for almost every token
        for t in TEMPERATURES:
            lengths[name][t] = measure(target, drafter, t, share, f"AL of {name}")
    speeds = decoding_speed(target, drafters["specopd"], measure, count=32)
    report(config, measure, out, lengths, totals, speeds, time.perf_counter() - begin)


TITLES = {
    "fresh": "fresh ({} prompts)",
    "start": "offline CE (the start)",
    "ce": "  + CE",
    "e2e": "  + offline E2E-TV",
    "specopd": "  + SpecOPD",
}


def report(
    config: TrainConfig, measure: Measure, out: Path, lengths, totals, speeds: dict, seconds: float
) -> None:
    """Write the figures to summary.json and print them."""
    entries = {name: dict(totals.get(name, {})) for name in lengths}
    for name, entry in entries.items():
        for t in TEMPERATURES:
            measured = lengths[name][t]
            entry |= {f"al_t{t:g}": measured.mean, f"survival_t{t:g}": measured.survival}
            for base in ("start", "ce") if name in STORY_MODES else ():
                entry[f"over_{base}_t{t:g}"] = gain(measured, lengths[base][t])
    summary = {"config": asdict(config), "rows": entries, "decoding": speeds, "seconds": seconds}
    write_json(out / "summary.json", summary)
    size = f"{config.eval_tokens} tokens each, seed {config.seed}"
    print(f"\nAcceptance length on {measure.source}, {size}")
    print_table(entries, len(lengths["fresh"][0.0].rounds))
    specopd = entries["specopd"]
    over = [f"T = {t:g} {format_gain(specopd[f'over_ce_t{t:g}'])}" for t in TEMPERATURES]
    print("\nSpecOPD over continued CE: " + ", ".join(over))
    saved = 1 - specopd["nodes"] / max(specopd["unmerged"], 1)
    print(f"merging saved {100 * saved:.1f} % of the trees' nodes")
    plain = speeds["plain"]
    speculative = speeds["speculative"]
    line = f"greedy decoding, batch 1: plain {plain:.0f} tokens/s, speculative {speculative:.0f}"
    words = format_partings(speeds["partings"])
    print(f"{line}, {speculative / plain:.2f} times as fast; {words}")
    print(f"{seconds:.0f} s in all. Figures: {out}/summary.json, and a log.jsonl per run. Next:")
    target = f"--target {config.target or f'{out}/target'}"
    print(f'  python serve.py {target} --drafter {out}/specopd --prompt "def main(" "import os"')
    made = "" if config.references else f" --references {out}/references.safetensors"
    command = f"python train.py --mode specopd {target}{made}"
    print(f"  {command} --drafter {out}/start --out runs/mine")
    print(f"  python -m lab speed {target} --drafters {out}/specopd")
    check_partings(speeds["partings"])


def print_table(entries: dict, num_fresh: int) -> None:
    """AL with gains over the start, then survival by position."""
    print("[gain over the start, 95 % interval of the paired difference]")
    print(f"{'':24s}{'T = 0':>7s}{'':26s}{'T = 1':>7s}{'':26s}{'supervised tokens/s':>20s}")
    for name, entry in entries.items():
        line = f"{TITLES[name].format(num_fresh):24s}"
        for t in TEMPERATURES:
            over = format_gain(entry[f"over_start_t{t:g}"]) if name in STORY_MODES else ""
            line += f"{entry[f'al_t{t:g}']:7.3f}  {over:24s}"
        if "seconds" in entry:
            line += f"{entry['supervised'] / entry['seconds']:20.0f}"
        print(line)
    for t in TEMPERATURES:
        print(f"\nSurvival: share of rounds that keep the first 1, 2, ... drafts, T = {t:g}")
        for name, entry in entries.items():
            shares = " ".join(f"{share:6.3f}" for share in entry[f"survival_t{t:g}"])
            print(f"{TITLES[name].format(num_fresh):24s}{shares}")


# ------------------------------------------------------------------------------------------- lesson


def lesson() -> None:
    """One SpecOPD step on one reference, in numbers, and the same loss after one update."""
    target, drafter = lesson_models()
    prompt = [1, 2, 3]
    (response,) = generate(target, None, [prompt], 9, Sampling(1.0), seed=2)
    references = References.from_lists([prompt], [response.tokens], 0)
    trunks = Trunks(target, references, drafter.config.target_layer_ids, cache_gib=1)
    config = TrainConfig(mode="specopd", batch_size=1, num_anchors=3, seed=3, device="cpu")
    print(f"the reference: prompt {prompt}, and {response.tokens}, which the target wrote")
    print("ids 10 (MASK) and 11 have q = 0, but some p, because the target is untrained")
    (blocks,) = next_batch(config, drafter, trunks, 0, ())
    for anchor, branches in zip(blocks.anchors[0].tolist(), blocks.tokens[0].tolist()):
        before = blocks.trunk.tokens[0, : anchor + 1].tolist()
        print(f"  anchor {anchor}, after {before}: greedy {branches[0]}, drawn {branches[1]}")
    nodes = f"{int(blocks.counts['nodes'])} nodes ({int(blocks.counts['unmerged'])} unmerged)"
    print(f"6 branches of W = 3 tokens: {nodes}, scored in one pass\n")
    show_branch(drafter, blocks, a=1, k=1)
    value, figures = step_loss(drafter, blocks, objective_of(config, drafter))
    print(f"\nE2E-TV of all 6 branches: {value.item():.4f}")
    value.backward()
    optimizers = make_optimizers(drafter, config.matrix_lr, config.lr)
    optimizer_step(optimizers)
    blocks.hidden = None  # drafted before the update: run the drafter again on the same branches
    value, _ = step_loss(drafter, blocks, objective_of(config, drafter))
    print(f"the same loss after one update: {value.item():.4f}")


def show_branch(drafter: Drafter, blocks: Blocks, a: int, k: int) -> None:
    """Print p, q, alpha and survival along branch k at anchor number a."""
    hidden = blocks.hidden[:, a, 0]  # (1, W, C)
    first = blocks.trunk.tokens[:, blocks.anchors[0, a]]
    previous = torch.cat([first, blocks.tokens[0, a, k, :-1]])[None]
    q = drafter.logits(hidden, previous)[0].softmax(-1).detach()  # (W, V)
    p = drafter.target.head(blocks.p_hidden[0, a, k]).softmax(-1)
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
    print(f"AL is measured on {quick_source(measure)}")
    values = json.dumps({name: getattr(config, name) for name in RESOLVED})
    print(f"{references.sizes()}; resolved: {values}, MASK: {mask_in_words(drafter, tokenizer)}")
    if not config.drafter and config.mode != "ce":
        print(
            "hardly any draft of a fresh drafter is accepted, and then E2E-TV has almost no "
            "gradient: begin with --mode ce and give its folder as --drafter"
        )
    cache_gib = 0.0 if config.mode == "rollout" else config.cache_gib  # it reads no trunk
    trunks = Trunks(target, references, drafter.config.target_layer_ids, cache_gib)
    totals = train(config, drafter, trunks, measure, out / config.mode)
    is_main = distributed.is_main()
    distributed.stop()
    if is_main:
        print_outcome(config, measure, out, totals)


def print_outcome(config: TrainConfig, measure: Measure, out: Path, totals: dict) -> None:
    print(json.dumps(totals))
    folder = out / config.mode
    if totals["step"] < config.steps:
        print(f"stopped at step {totals['step']} of {config.steps}; the same command goes on")
        return
    als = [f"{totals[f'al_t{t:g}']:.3f} at {t:g}" for t in TEMPERATURES]
    print(f"{folder} is done: AL by temperature {', '.join(als)}.")
    for t in TEMPERATURES:
        tasks = totals.get(f"by_task_t{t:g}", {})
        cells = ", ".join(f"{task} {al:.3f}" for task, al in tasks.items())
        if tasks:
            print(f"  at {t:g} by task: {cells}")
    print(f"The best mean was at step {totals['best'].get('step')}: {folder / 'best'}. Next:")
    drafters = f"{config.drafter} {folder}".strip()
    print(f"  python -m lab speed --target {config.target or out / 'target'} --drafters {drafters}")
    print(f"AL is measured on {quick_source(measure)}")


def quick_source(measure: Measure) -> str:
    """In words what an AL while training is of."""
    count = max(8, int(len(measure.prompts) * QUICK_SHARE))
    return f"the first {min(count, len(measure.prompts))} of {measure.source}"


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
