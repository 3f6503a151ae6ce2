"""Measurements: two things in one process, on the same weights, and their ratio.

    python bench.py throughput  supervised tokens per second: SpecOPD against sequential rollouts
    python bench.py tree        scoring branches packed on their trunk, against each branch alone
    torchrun --nproc_per_node=2 bench.py scale     whole steps by one process and by all of them
    python bench.py activity    the share of time with a kernel running, of both; on a GPU
    python bench.py replay      what checkpoints of recurrent state cost, by their spacing
    python bench.py chains      several drafted chains per round against one
    python bench.py decode      speculative against plain decoding, each part's share of a round
    python bench.py al          acceptance length of drafters by task, a JSONL file each
    python bench.py speed       generation without a drafter, and with each, 1, 8 and 32 at once
    python bench.py claims      the grid of studies behind the tables; resumable
    python bench.py report      one Markdown report of such folders, with pictures
    python bench.py hf          plain greedy decoding and prefill against transformers, if installed

Times are medians over repeats after a warm-up, with the spread (decode: one pass); sizes and seeds
are flags. The figures go to the terminal and to summary.json in --out. What each measures stands
in bench_training.py (the first five), bench_serving.py, claims.py and report.py.
"""

import dataclasses
import inspect
import sys
import time
from dataclasses import dataclass
from functools import wraps
from pathlib import Path

import torch

import serve
from drafter import Drafter
from support import data, distributed, files
from support.files import flag
from target import TOYS, Target


@dataclass(frozen=True)
class BenchConfig:
    target: str = flag("", "a target's folder; empty: an untrained toy")
    drafter: str = flag(
        "", "a drafter's folder; empty: tree draws random branches, decode needs one"
    )
    drafters: tuple = flag((), "al, speed: the folders of the drafters to compare")
    tasks: tuple = flag(
        (), "al, speed: JSONL files of prompts, one task each (speed: or held-out text)"
    )
    out: str = flag("runs/bench", "folder for summary.json")
    seed: int = flag(0, "of everything drawn")
    arch: str = flag("gqa", "the untrained toy's architecture", choices=tuple(TOYS))
    repeats: int = flag(7, "timed repeats", low=1)
    patience: float = flag(30.0, "tree: seconds after which a measurement is not repeated", low=0)
    trunk_length: tuple = flag(
        (512,),
        "tree: tokens of the trunk, one or several; replay, throughput, activity, scale, hf: one",
        kind=int,
        low=2,
    )
    num_anchors: tuple = flag(
        (64,),
        "tree, throughput: anchors, one or several; replay, activity, scale: one",
        kind=int,
        low=1,
    )
    num_branches: int = flag(
        1, "tree, scale: branches per anchor; throughput: beside 1 and 2", low=1
    )
    num_draft_tokens: int = flag(7, "replay: W; tree: where no drafter sets it", low=1)
    num_prompts: int = flag(
        16,
        "prompts: decode one at a time, al of each task, chains; speed: "
        "or as many as are decoded at once; throughput: 32 at least",
        low=1,
    )
    batch_size: int = flag(8, "scale: texts per step", low=1)
    prompt_length: int = flag(64, "tokens of a prompt; al: at most", low=1)
    max_new_tokens: int = flag(
        200, "decode, al, speed, chains, hf: tokens generated per prompt", low=2
    )
    concurrency: tuple = flag((1, 8, 32), "speed: prompts decoded at once", kind=int, low=1)
    temperature: float = flag(0.0, "speed: of decoding", low=0)
    device: str = flag("cpu", "cpu or cuda")
    dtype: str = flag("", "empty: what the target's config names", choices=files.DTYPES)

    def __post_init__(self):
        files.check_ranges(self)


def wait() -> None:
    """Until the GPU, if there is one, has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def median_time(run, repeats: int, patience: float = float("inf")) -> dict:
    """Seconds of run(): median, and the lowest and highest of the repeats, after one warm-up. Not
    repeated once it took longer than `patience` in all; the warm-up counts where nothing else was
    run."""
    times = []
    while len(times) <= repeats and sum(times) <= patience:
        begin = time.perf_counter()
        run()
        wait()
        times.append(time.perf_counter() - begin)
    ordered = sorted(times[1:] or times)
    return {"median": ordered[len(ordered) // 2], "low": ordered[0], "high": ordered[-1]}


def load(config: BenchConfig, drafter_dtype=None, command: str = ""):
    """Target and drafter (or None), by default in one dtype; both for a command that is named."""
    if command and not (config.target and config.drafter):
        raise ValueError(
            f"{command} needs --target FOLDER and --drafter FOLDER (train.py writes both)"
        )
    if config.target:
        kind = files.dtype_of(config)
        target = Target.from_pretrained(config.target, config.device, kind)
    else:
        target = Target.toy(config.arch, config.seed).to(config.device)
    drafter = None
    if config.drafter:
        kind = drafter_dtype or target.lm_head.weight.dtype
        drafter = Drafter.from_pretrained(config.drafter, target, kind)
    return target, drafter


def held_out_prompts(config: BenchConfig, count: int, length: int) -> list[list[int]]:
    tokenizer = data.load_tokenizer(config.target)
    return data.draw_prompts(data.load_corpus().held_out, tokenizer, count, length, config.seed + 1)


def text_of(config: BenchConfig, target, length: int):
    """A text (1,length) and its length (1,): a prompt that a loaded target continued, held-out text
    if that is too long for it, or noise for an untrained one."""
    if config.target and length > target.config.max_position_embeddings:
        tokenizer = data.load_tokenizer(config.target)
        tokens = data.pack(data.load_corpus().held_out, tokenizer)[None, :length].long()
    elif config.target:
        if config.prompt_length >= length:
            raise ValueError(
                f"--trunk-length {length} must exceed --prompt-length {config.prompt_length}"
            )
        (prompt,) = held_out_prompts(config, 1, config.prompt_length)
        (result,) = serve.generate(target, None, [prompt], length - len(prompt), 1.0, config.seed)
        tokens = torch.tensor([prompt + result.tokens])
    else:
        generator = torch.Generator().manual_seed(config.seed)
        tokens = torch.randint(0, target.num_tokens, (1, length), generator=generator)
    return tokens.to(config.device), torch.tensor([length], device=config.device)


class Clock:
    """When functions ran, and for how long in all, while they are replaced by timed ones. On a GPU
    each is waited for."""

    def __init__(self, parts: dict):
        self.seconds, self.spans, self.saved = {}, [], []
        for label, (owner, name) in parts.items():
            self.saved.append((owner, name, getattr(owner, name)))
            setattr(owner, name, self._timed(getattr(owner, name), label))

    def _timed(self, function, label):
        @wraps(function)
        def timed(*args, **options):
            begin = time.perf_counter()
            result = function(*args, **options)
            wait()
            end = time.perf_counter()
            self.seconds[label] = self.seconds.get(label, 0.0) + end - begin
            self.spans.append((label, begin, end))
            return result

        return timed

    def restore(self):
        for owner, name, function in self.saved:
            setattr(owner, name, function)


def main():
    # they build on this file
    from lab.claims import ClaimsConfig, claims
    from lab.report import ReportConfig, report
    from lab.serving import bench_al, bench_chains, bench_decode, bench_hf, bench_speed
    from lab.training import bench_activity, bench_replay, bench_scale, bench_throughput, bench_tree

    commands = {
        "throughput": bench_throughput,
        "tree": bench_tree,
        "replay": bench_replay,
        "chains": bench_chains,
        "decode": bench_decode,
        "al": bench_al,
        "speed": bench_speed,
        "hf": bench_hf,
        "activity": bench_activity,
        "scale": bench_scale,
        "claims": claims,
        "report": report,
    }
    command = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if command in ("-h", "--help"):
        files.parse_flags(BenchConfig, __doc__, ["--help"], name="bench.py NAME")
    if command not in commands:
        raise ValueError(f"bench.py {command}: there is {', '.join(commands)}")
    kind = {"claims": ClaimsConfig, "report": ReportConfig}.get(command, BenchConfig)
    run = commands[command]
    told = inspect.getdoc(run if kind is BenchConfig else sys.modules[run.__module__])
    config = files.parse_flags(kind, told, sys.argv[2:], name=f"bench.py {command}")
    if command == "scale":
        config = dataclasses.replace(config, device=distributed.start(config.device))
    figures = run(config)
    path = Path(config.out) / "summary.json"
    if figures is None:
        return
    before = files.read_json(path) if path.is_file() else {}
    if command == "claims":  # of other studies
        figures = before.get("claims", {}) | figures
    files.write_json(path, before | {command: figures | {"config": dataclasses.asdict(config)}})


if __name__ == "__main__":
    sys.exit(files.run_command(main))
