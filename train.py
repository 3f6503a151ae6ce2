"""The ways to train a drafter, one loop.

    --mode ce       offline: cross-entropy on the reference that the target wrote (DSpark: its mix)
    --mode e2e      offline: E2E-TV along the reference's own history
    --mode rollout  on policy, one after the other: whole responses by real rounds with the current
                    drafter, then E2E-TV on every block they proposed
    --mode specopd  on policy (the paper): sample branches at many anchors at once, hang them on the
                    trunk, let the target score the tree in one pass, minimise E2E-TV on them

What differs is `step.draw`, on one screen. With no arguments the whole story runs on a laptop:
train a toy target on the standard library's text, let it write references, train a drafter offline,
then continue it in all three ways for the same number of steps from the same checkpoint, and
measure the acceptance length (AL) by real decoding on held-out prompts. Every stage is kept in
--out and not done twice; a run that was stopped goes on where it was.

    python train.py                       the story (about 12 minutes on one CPU core)
    python train.py --preset smoke        the same in seconds, too short to learn much
    python train.py --mode specopd --target FOLDER --drafter FOLDER --out runs/mine
    torchrun --nproc_per_node=8 train.py --mode specopd ...       on several processes
"""

import dataclasses
import json
import os
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn
from tqdm import tqdm

import loss as losses
from drafter import Drafter
from hf.drafters import ARCHITECTURES, MARKOV_HEADS
from loss import make_optimizers, set_rate, update
from step import Step, compile_parts, gradient, hardness, heat, next_batch
from support import distributed, files, resume
from support.files import flag
from support.measure import Measure
from support.prepare import Trunks, prepare, start_drafter, weights_checksum
from target import TOYS

MODES = ("ce", "e2e", "specopd", "rollout")
TEMPERATURES = (0.0, 1.0)


@dataclass(frozen=True)
class TrainConfig:
    mode: str = flag("story", "everything in order, or one way to train", choices=("story", *MODES))
    out: str = flag("runs/toy", "folder of the run: target, references, drafters, logs, figures")
    seed: int = flag(0, "of everything drawn")
    device: str = flag("cpu", "cpu or cuda")
    dtype: str = flag("", "of the target; empty: what its config names", choices=files.DTYPES)
    shard_target: bool = flag(False, "spread the target's layers over the processes (FSDP2)")
    target: str = flag("", "a target's folder; empty: train the toy")
    drafter: str = flag("", "the drafter to start from; empty: a fresh one")
    arch: str = flag("gqa", "the toy target: gqa, gdn, qsa", choices=tuple(TOYS))
    corpus: str = flag("", "text file or folder, or JSONL prompts; empty: Python's own library")
    skip_bad_lines: bool = flag(False, "leave malformed JSONL lines out instead of stopping")
    # the toy target
    target_steps: int = flag(750, "training steps of the toy target", low=1)
    target_layers: int = flag(0, "its decoder layers; 0: what its architecture has", low=0)
    target_length: int = flag(256, "tokens per training sequence", low=1)
    # references
    references: str = flag("", "made before, or the target's own chats as JSONL; empty: made once")
    num_references: int = flag(512, "how many", low=1)
    prompt_length: int = flag(64, "tokens per prompt (JSONL prompts: at most)", low=1)
    response_length: int = flag(192, "tokens per response, at most", low=2)
    # the drafter
    drafter_kind: str = flag(
        "",
        "dflash, dspark, dflash2; empty: the given drafter's, else dflash",
        choices=("", *ARCHITECTURES),
    )
    markov_head: str = flag("", "of a fresh dspark; empty: vanilla", choices=("", *MARKOV_HEADS))
    rank: int = flag(
        0, "of a fresh dspark's or dflash2's low-rank tables; 0: 256, at most the width", low=0
    )
    draft_layers: int = flag(0, "decoder layers; 0: the given drafter's, 2 for a fresh one", low=0)
    block_size: int = flag(0, "b = W + 1; 0: the given drafter's, 8 for a fresh one", low=0)
    mask_token_id: int = flag(-1, "MASK's row; -1: the given drafter's, or a spare one", low=-1)
    # training
    warm_steps: int = flag(1000, "story: offline CE steps before the three ways part", low=1)
    ways: tuple = flag(MODES[:3], "story: which ways to go on from there")
    steps: int = flag(250, "training steps (story: of each way)", low=1)
    batch_size: int = flag(8, "references per step", low=1)
    grad_accum: int = flag(
        1,
        "parts of a process's share of the batch, one at a time in memory; "
        "the gradient is the same",
        low=1,
    )
    bucket: int = flag(
        1,
        "sort the references of so many batches by length, so that one batch "
        "holds similar ones; 1: as they come",
        low=1,
    )
    num_anchors: int = flag(16, "A, anchors per reference", low=1)
    num_branches: int = flag(2, "K, branches per anchor (specopd)", low=1)
    # NOTE(paper): greedy branches are ours; without them decoding at temperature 0 gains less
    num_greedy: int = flag(1, "of the K branches, how many are the drafter's argmax", low=0)
    branch_temperature: float = flag(1.0, "temperature that draws the branches", low=0)
    loss_temperature: float = flag(0.0, "of p and q; 0: the branch temperature, else 1", low=0)
    reuse: int = flag(
        1, "steps on one drawing of branches (specopd), on one decoding (rollout)", low=1
    )
    # NOTE(paper): drawing anchors by need is ours; each is weighted so that the loss stays the same
    anchors: str = flag(
        "uniform",
        "where branches hang: uniform, or more often where the drafter "
        "that the run starts from fails (hard)",
        choices=("uniform", "hard"),
    )
    loss: str = flag("e2e_tv", "what e2e, specopd and rollout minimise", choices=losses.LOSSES[1:])
    ce_weight: float = flag(0.0, "share of CE on the text mixed into e2e, specopd, rollout", low=0)
    confidence_weight: float = flag(1.0, "of the confidence head's loss (dspark)", low=0)
    # NOTE(paper): E2E-TV's gradient is small beside this one, which then undoes what it gains
    detach_confidence: str = flag(
        "online",
        "when that loss teaches its head alone: online (not in ce), always, never",
        choices=("online", "always", "never"),
    )
    ce_decay: float = flag(4.0, "gamma_0 of CE's weights; 4 for W = 7, 7 for W = 15", low=0.01)
    merge: bool = flag(True, "branches of equal history share nodes (same p, fewer nodes)")
    matrix_lr: float = flag(0.01, "Muon's rate, for matrices; 0: AdamW for everything", low=0)
    lr: float = flag(1e-3, "AdamW's rate, for the rest", low=0)
    warmup: int = flag(20, "steps of linear warm-up")
    cooldown: float = flag(0.3, "share of the steps over which the rate falls to a tenth", low=0)
    clip: float = flag(1.0, "largest gradient norm", low=0)
    precision: str = flag(
        "float32",
        "the drafter's arithmetic in training; its weights stay float32",
        choices=("float32", "bfloat16"),
    )
    recompute: bool = flag(
        False,
        "run the drafter's layers again in the backward pass instead of keeping what they computed",
    )
    compile: bool = flag(False, "torch.compile for the drafter's layers and the target's MLPs")
    cache_gib: float = flag(2.0, "keep the references' trunks in memory up to this size", low=0)
    checkpoint_every: int = flag(0, "tokens between recurrent states kept; 0: see target.py", low=0)
    # measuring and keeping
    eval_every: int = flag(250, "steps between two measurements of AL", low=1)
    eval_prompts: int = flag(96, "held-out prompts; a quarter, but 8 at least, in training", low=1)
    eval_tokens: int = flag(128, "tokens decoded per prompt", low=2)
    save_every: int = flag(100, "steps between two checkpoints", low=1)
    keep: int = flag(
        2, "checkpoints kept: the last ones (the drafter of the best AL is kept, too)", low=1
    )
    spike: float = flag(
        100.0,
        "leave out a step whose gradient is so many times as large as it was lately; 0: none",
        low=0,
    )
    max_skipped: int = flag(10, "end the run after so many left out in a row", low=1)
    plan: bool = flag(
        False,
        "say what the run needs of 1 and of 8 GPUs, and do nothing; --target "
        "may be 8B, 27B, 125B or a folder with a config.json",
    )
    gpu_gib: float = flag(80.0, "plan: memory of a GPU", low=1)
    stop_after: int = flag(0, "stop at this step as if interrupted; 0: do not", low=0)

    def __post_init__(self):
        files.check_ranges(self)
        if self.num_greedy >= self.num_branches and self.branch_temperature > 0:
            raise ValueError("--num-greedy leaves no branch to draw; use --branch-temperature 0")
        own = self.branch_temperature > 0 and self.loss_temperature in (0, self.branch_temperature)
        own = own and self.mode == "specopd" and not self.num_greedy and self.reuse == 1
        if self.loss == "e2e_al" and not own:
            raise ValueError(
                "--loss e2e_al needs branches drawn from the q at hand: --mode specopd"
                ", --num-greedy 0, --reuse 1, one temperature above 0 for "
                "both"
            )
        if not self.ways or set(self.ways) - set(MODES):
            raise ValueError(f"--ways {' '.join(self.ways)}: there is {', '.join(MODES)}")
        if self.save_every % self.reuse or self.stop_after % self.reuse:
            raise ValueError(
                "--save-every and --stop-after must be multiples of --reuse, so that "
                "a run goes on as it was"
            )
        ways = self.ways if self.mode == "story" else (self.mode,)
        if self.anchors == "hard" and "rollout" in ways:
            raise ValueError("--anchors hard: a rollout's anchors are where its rounds begin")
        if self.stop_after and self.mode == "story":
            raise ValueError("--stop-after goes with one --mode")


# flags that may differ when a run is resumed: they change where and how it runs, what is kept and
# measured, which steps are left out; not, but for rounding, what a step learns
FREE = """out device save_every stop_after cache_gib checkpoint_every eval_prompts eval_tokens ways
    keep spike max_skipped shard_target plan gpu_gib grad_accum recompute compile""".split()

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
    eval_prompts=8,
    eval_tokens=24,
    draft_layers=1,
)

# ----------------------------------------------------------------------------------------- the loop


def train(config: TrainConfig, drafter: Drafter, trunks: Trunks, measure: Measure, out) -> dict:
    """Train the drafter in place by `config.mode`; folder, checkpoint and log stand in `out`."""
    target, parts = drafter.target, None
    optimizers = make_optimizers(drafter, config.matrix_lr, config.lr)
    same = {k: v for k, v in dataclasses.asdict(config).items() if k not in FREE}
    # what the flags name may have changed since
    same |= {f"the drafter's {k}": v for k, v in drafter.config.to_dict().items()}
    same["the target"] = weights_checksum(target)
    lead, unused = distributed.rank() == 0, drafter.has_confidence and not config.confidence_weight
    share = distributed.data_parallel(Step(config, drafter), unused)
    if config.compile:
        compile_parts(drafter)
    hard = hardness(drafter, trunks, heat(config)) if config.anchors == "hard" else None
    start, totals = 0, {"supervised": 0, "seconds": 0.0, "nodes": 0, "unmerged": 0}
    totals |= {"best": {}, "health": {}}
    saved = resume.load(out)
    if saved and (absent := {"step", "same", "totals", "drafter", "optimizers"} - set(saved)):
        raise ValueError(
            f"{saved['path']} is no checkpoint of a training, it has no "
            f"{min(absent)}: choose another --out"
        )
    resume.agree(saved, trunks.references.tokens)
    if saved:
        files.check_same(saved["same"], same, saved["path"])
        start = saved["step"]
        totals |= saved["totals"]
        resume.restore(saved, drafter, optimizers)
    elif (out / "model.safetensors").exists():
        raise ValueError(f"{out} holds a drafter without its checkpoint: choose another --out")

    def save(step: int) -> None:
        if lead:
            state = {"step": step, "same": same, "totals": totals, "drafter": drafter.state_dict()}
            state["optimizers"] = [optimizer.state_dict() for optimizer in optimizers]
            resume.save(out, state, config.keep)

    if not saved:
        save(0)
    if lead:
        path = out / "log.jsonl"
        kept = resume.log_lines(path, start)
        with files.atomic(path) as temporary:
            temporary.write_text("".join(kept))
        files.write_json(out / "run.json", dataclasses.asdict(config))
    end, als = min(config.steps, config.stop_after or config.steps), {}
    bar = tqdm(
        range(start, end),
        initial=start,
        total=config.steps,
        desc=f"{config.mode:8s}",
        disable=not lead,
    )
    path = out / "log.jsonl" if lead else os.devnull
    with open(path, "a", encoding="utf-8") as log, resume.Terminated() as terminated:
        for step in bar:
            begin = time.perf_counter()
            set_rate(optimizers, step, config.steps, config.warmup, config.cooldown)
            if parts is None or step % config.reuse == 0:
                parts = None  # nothing of the last ones lies beside the new ones
                parts = next_batch(config, drafter, trunks, step, measure.stop_ids, hard)
            record = {"step": step + 1}
            record |= gradient(config, share, drafter, parts, lambda: terminated.asked)
            norm = nn.utils.clip_grad_norm_(drafter.parameters(), config.clip).item()
            value, asked = record["loss"], record.pop("asked")
            if resume.sound(value, norm, totals["health"], config.spike):
                update(optimizers)
            else:
                drafter.zero_grad()
            if totals["health"]["in_a_row"] >= config.max_skipped:
                if lead:
                    drafter.save_pretrained(out / "sound")
                raise ValueError(
                    f"{config.max_skipped} steps in a row went wrong, the last with "
                    f"loss {value:.3g} and gradient norm {norm:.3g}: go on in another "
                    f"--out from --drafter {out}/sound, with a lower --lr and "
                    "--matrix-lr"
                )
            record["grad_norm"] = norm
            totals["seconds"] += time.perf_counter() - begin
            for key in ("supervised", "nodes", "unmerged"):
                totals[key] += record[key]
            if lead and ((step + 1) % config.eval_every == 0 or step + 1 == config.steps):
                als = {f"al_t{t:g}": measure(target, drafter, t, 0.25).mean for t in TEMPERATURES}
                record |= als
                if (mean := sum(als.values()) / len(als)) > totals["best"].get("al", 0):
                    totals["best"] = {"step": step + 1, "al": mean}
                    drafter.save_pretrained(out / "best")
            log.write(json.dumps(record) + "\n")
            log.flush()
            speed = totals["supervised"] / totals["seconds"]
            shown = {k.replace("al_t", "AL@"): f"{v:.2f}" for k, v in als.items()}
            bar.set_postfix({"loss": f"{value:.3f}", **shown, "tokens/s": f"{speed:.0f}"})
            asked = asked and (step + 1) % config.reuse == 0  # branches at hand are used first
            if (step + 1) % config.save_every == 0 or step + 1 == end or asked:
                save(step + 1)
            if asked and step + 1 < end:
                distributed.barrier()  # one may still be measuring, and save after that
                raise files.Stopped(
                    f"asked to end: step {step + 1} of {config.steps} is saved in "
                    f"{out}, the same command goes on"
                )
    if lead and end == config.steps and not (out / "summary.json").is_file():
        drafter.save_pretrained(out)
        lines = resume.log_lines(out / "log.jsonl", end)
        last = json.loads(lines[-1]) if lines else {}
        als = {key: value for key, value in last.items() if key.startswith("al_")}
        files.write_json(out / "summary.json", totals | als | {"config": same})  # last: now done
    distributed.barrier()
    if terminated.asked:  # during the last step: it is done, what may come after it is not wanted
        raise files.Stopped(f"asked to end: {out} is done")
    return totals


def main():
    config = files.parse_flags(TrainConfig, __doc__, presets={"smoke": SMOKE})
    if config.plan:
        from lab.plan import plan

        return plan(config)
    config = replace(config, device=distributed.start(config.device))
    if config.batch_size % ((size := distributed.num_processes()) * config.grad_accum):
        raise ValueError(
            f"--batch-size {config.batch_size} is no multiple of the {size} processes "
            f"times --grad-accum {config.grad_accum}"
        )
    out, usual = Path(config.out), dataclasses.asdict(TrainConfig())
    asked = {k: v for k, v in dataclasses.asdict(config).items() if v != usual[k]}
    print(f"{config.mode} in {out}; what differs from --help's defaults: {json.dumps(asked)}")
    if config.mode == "story":
        from story import story  # which builds on this file

        if distributed.num_processes() > 1:
            raise ValueError("several processes go with one --mode, not with the story")
        return story(config, out)
    if config.shard_target:  # nobody may go ahead: a layer runs on all processes or on none
        if not (config.target and config.references):
            raise ValueError("--shard-target goes with --target FOLDER and --references FILE")
        made = prepare(config, out)
    else:
        made = distributed.main_process_first(lambda: prepare(config, out))
    target, tokenizer, measure, references = made
    drafter = start_drafter(config, target, tokenizer)
    if not config.drafter and config.mode != "ce":
        print(
            "of what a fresh drafter proposes hardly anything is accepted, and such a loss has "
            "little slope: begin with --mode ce, go on from its --drafter"
        )
    kept = 0.0 if config.mode == "rollout" else config.cache_gib  # which reads no reference's trunk
    trunks = Trunks(target, references, kept, config.checkpoint_every or None)
    totals = train(config, drafter, trunks, measure, out / config.mode)
    distributed.stop()
    print(json.dumps(totals))
    done = out / config.mode
    if not (done / "summary.json").is_file():
        print(f"stopped at step {config.stop_after} of {config.steps}; the same command goes on")
        return None
    last = files.read_json(done / "summary.json")
    als = ", ".join(f"{v:.3f} at {k[4:]}" for k, v in last.items() if k.startswith("al_t"))
    print(
        f"{done} is done: AL by temperature {als}, on a quarter of the prompts; of the best mean "
        f"was {done / 'best'}, at step {totals['best'].get('step')}. Beside plain decoding:\n"
        f"  python bench.py speed --target {config.target or out / 'target'} --drafters "
        f"{config.drafter} {done}"
    )


if __name__ == "__main__":
    sys.exit(files.run_command(main))
