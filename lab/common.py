"""What measuring commands share: flags, models, texts, clocks and figures. Knows no command.

Times are medians over repeats after a warm-up. Whatever is compared runs in one process on the same
weights and, where possible, in turn.
"""

import contextlib
import platform
import statistics
import subprocess
import time
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from drafter import PLAIN, Drafter
from hf import load_tokenizer
from hf.tokenizer import Tokenizer
from serve import generate, open_drafter
from support.cpu import for_cpu
from support.data import draw_prompts, load_corpus
from support.flags import DEVICE, DEVICE_TEXT, DTYPES, dtype_of, flag, option_name
from target import Target


@dataclass(frozen=True)
class LabConfig:
    target: str = flag("", "a target's folder")
    out: str = flag("runs/lab", "folder for summary.json")
    seed: int = flag(0, "of everything drawn")
    device: str = flag(DEVICE, DEVICE_TEXT)
    dtype: str = flag("", "empty: the type that the target's config names", choices=DTYPES)


def require(config, *names: str) -> None:
    missing = [option_name(name) for name in names if not getattr(config, name)]
    if missing:
        raise ValueError(f"{', '.join(missing)} must be set (train.py writes the folders)")


def open_target(config) -> Target:
    """The target of --target; without one, the untrained toy of --arch."""
    if not config.target:
        return Target.toy(config.arch, config.seed).to(config.device)
    return for_cpu(Target.from_pretrained(config.target, config.device, dtype_of(config)))


def open_pair(config, drafter_dtype=None) -> tuple[Target, Drafter]:
    """The target of --target and the drafter of --drafter, by default in the target's dtype."""
    require(config, "target", "drafter")
    target = open_target(config)
    dtype = drafter_dtype or target.lm_head.weight.dtype
    return target, Drafter.from_pretrained(config.drafter, target, dtype)


def open_drafters(config) -> tuple[Target, Tokenizer, dict]:
    """The target of --target, its tokenizer, and the drafters of --drafters by name, in the
    target's dtype."""
    require(config, "target", "drafters")
    target = Target.from_pretrained(config.target, config.device, dtype_of(config))
    tokenizer = load_tokenizer(config.target, config.chat_template_args)
    drafters = {name: open_drafter(name, target, tokenizer) for name in config.drafters}
    for_cpu(target, *drafters.values())
    return target, tokenizer, drafters


def held_out_prompts(config, count: int) -> list[list[int]]:
    """Prompts of --prompt-length tokens from the held-out files of the corpus."""
    how = (load_tokenizer(config.target), count, config.prompt_length, config.seed + 1)
    return draw_prompts(load_corpus().held_out, *how)


def long_text(config, target: Target, length: int) -> Tensor:
    """One text (1, length): a prompt with the loaded target's continuation; noise for the toy."""
    if not config.target:
        generator = torch.Generator().manual_seed(config.seed)
        tokens = torch.randint(0, target.num_tokens, (1, length), generator=generator)
        return tokens.to(config.device)
    if length <= config.prompt_length:
        limit = f"--prompt-length {config.prompt_length}"
        raise ValueError(f"--trunk-length {length} must exceed {limit}")
    prompts = held_out_prompts(config, 1)
    (result,) = generate(target, None, prompts, length - config.prompt_length, PLAIN, config.seed)
    return torch.tensor([prompts[0] + result.tokens], device=config.device)


def random_anchors(config, length: int, count: int) -> tuple[Tensor, torch.Generator]:
    """Anchors (1, count) of a text of `length` tokens, and the generator for their branches."""
    if count >= length:
        raise ValueError(f"--num-anchors {count} must be below --trunk-length {length}")
    generator = torch.Generator().manual_seed(config.seed)
    anchors = torch.randperm(length - 1, generator=generator)[:count].sort().values[None]
    return anchors.to(config.device), generator


MEASURED_CODE = (":(top,glob)*.py", ":(top)hf", ":(top)support")


def version() -> str:
    """The last commit of the code that is measured, and whether it was changed since; empty outside
    of git."""

    def git(*words) -> str:
        command = ["git", *words, "--", *MEASURED_CODE]
        return subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True
        ).stdout

    try:
        commit = git("log", "-1", "--format=%h").strip()
        return commit + ("-dirty" if git("status", "--porcelain") else "")
    except OSError:  # there is no git
        return ""


def machine() -> dict:
    """What figures of time depend on."""
    names = [line.split(":")[1].strip() for line in _cpu_info() if line.startswith("model name")]
    processor = names[0] if names else platform.processor() or platform.machine()
    if torch.cuda.is_available():
        processor += f", {torch.cuda.get_device_name()}"
    return {"processor": processor, "threads": torch.get_num_threads(), "torch": torch.__version__}


def _cpu_info() -> list[str]:
    path = Path("/proc/cpuinfo")  # Linux alone has it
    return path.read_text().splitlines() if path.is_file() else []


def timed(function, *arguments, **options) -> tuple:
    """The result of a call and its seconds; a GPU is waited for."""
    begin = time.perf_counter()
    result = function(*arguments, **options)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return result, time.perf_counter() - begin


def median_time(function, repeats: int, patience: float = 30.0) -> dict:
    """Median, lowest and highest seconds of function() over its repeats, after a warm-up.
    Repeats end once all calls together took more than `patience` seconds; if the warm-up alone took
    that long, it is the measurement."""
    times = []
    while len(times) <= repeats and sum(times) <= patience:
        times.append(timed(function)[1])
    times = times[1:] or times
    return {"median": statistics.median_high(times), "low": min(times), "high": max(times)}


class StageClock:
    """Adds up seconds by stage, from now on; a stage inside another counts in both."""

    def __init__(self):
        self.seconds = defaultdict(float)
        self.begin = time.perf_counter()

    def __call__(self, stage: str, function, *arguments, **options):
        result, seconds = timed(function, *arguments, **options)
        self.seconds[stage] += seconds
        return result

    @contextlib.contextmanager
    def watching(self, owner, **stages):
        """Time some of an object's methods while the context lasts; stages: method=stage."""
        for method, stage in stages.items():
            setattr(owner, method, partial(self, stage, getattr(owner, method)))
        try:
            yield
        finally:
            for method in stages:
                delattr(owner, method)  # the class's method is seen again

    def shares(self) -> dict[str, float]:
        passed = time.perf_counter() - self.begin
        return {stage: seconds / passed for stage, seconds in self.seconds.items()}


def format_shares(shares: dict[str, float]) -> str:
    return ", ".join(f"{stage} {100 * share:.0f} %" for stage, share in shares.items())


def new_figure(columns: int, size: tuple, rows: int = 1, **options):
    """A figure of matplotlib and its axes; no screen is needed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("pictures need matplotlib: pip install matplotlib") from None
    figure = Figure(size)
    return figure, figure.subplots(rows, columns, **options)
