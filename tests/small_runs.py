"""Small training runs for tests: a config, references, one batch, and train.py as a command."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import torch

import train as training
from serve import generate
from small import ROOT, free_port, run, small_drafter, small_target
from support.data import References
from support.measure import Measure
from support.prepare import Trunks, batch_rows
from train import TrainConfig
from tree import draw_anchors

STOP = (21,)
CONFIG = TrainConfig(
    mode="specopd",
    steps=4,
    batch_size=3,
    num_anchors=4,
    num_branches=2,
    eval_every=2,
    eval_prompts=2,
    eval_tokens=8,
    save_every=1,
    warmup=1,
)


def target_and_references(seed: int = 0) -> tuple:
    """A small target and ten texts that it drew."""
    target = small_target()
    prompts = torch.randint(0, 20, (10, 6), generator=torch.Generator().manual_seed(seed)).tolist()
    results = generate(target, None, prompts, 20, 1.0, seed, STOP)
    return target, References.from_lists(prompts, [r.tokens for r in results], 0)


def one_batch(target, references, config=CONFIG, step: int = 0) -> tuple:
    """-> (trunk, anchors, uniforms, weights) of the step's references."""
    rows = batch_rows(config.seed, step, references.lengths, config.batch_size)
    shape = (config.num_anchors, config.num_branches, 4)
    prompt_lengths, lengths = references.prompt_lengths[rows], references.lengths[rows]
    drawn = draw_anchors(config.seed, step, rows, prompt_lengths, lengths, shape)
    return Trunks(target, references, config.cache_gib)(rows), *drawn


def train_in_parts(out: Path, mode: str, stops: list[int]) -> tuple[dict, list]:
    """Train in as many parts as there are stops (0: to the end); each part starts from nothing but
    the folder -> (weights, records of the log)."""
    for stop in stops:
        target, references = target_and_references()
        drafter = small_drafter(target)
        measure = Measure([[1, 2, 3], [4, 5]], CONFIG.eval_tokens, STOP, 0)
        config = dataclasses.replace(CONFIG, mode=mode, stop_after=stop)
        training.train(config, drafter, Trunks(target, references, 2.0), measure, out)
    log = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return drafter.state_dict(), log


SMALL_RUN = """--mode specopd --steps 4 --batch-size 4 --num-anchors 4 --num-references 8
    --prompt-length 16 --response-length 24 --eval-prompts 4 --eval-tokens 8 --save-every 2
    --warmup 1 --matrix-lr 0 --lr 1e-4""".split()


def train_arguments(folders, processes: int, *flags) -> list:
    """What follows `python`: a small run of train.py, by torchrun where there are processes."""
    torchrun = ["-m", "torch.distributed.run", f"--nproc_per_node={processes}"]
    start = [*torchrun, f"--master_port={free_port()}"] if processes else []
    pair = ("--target", folders / "target", "--drafter", folders / "drafter")
    return [*start, ROOT / "train.py", *SMALL_RUN, *pair, *flags]


def train_command(folders, processes: int, *flags) -> list[str]:
    return [sys.executable, *map(str, train_arguments(folders, processes, *flags))]


def train_by_command(folders, cwd, processes: int, *flags) -> subprocess.CompletedProcess:
    return run(*train_arguments(folders, processes, *flags), cwd=cwd)
