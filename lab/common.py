"""What measuring commands share: flags, models, texts and clocks. Knows no command.

Times are medians over repeats after a warm-up, with the lowest and the highest. Whatever is
compared runs in one process on the same weights, and where it can in turn.
"""

import statistics
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from drafter import Drafter, Sampling
from hf import load_tokenizer
from serve import generate
from support.cpu import for_cpu
from support.data import draw_prompts, load_corpus, pack
from support.files import atomic_write
from support.flags import DTYPES, dtype_of, flag, option_name
from target import Target


@dataclass(frozen=True)
class LabConfig:
    """Flags of every measuring command."""

    target: str = flag("", "a target's folder")
    out: str = flag("runs/lab", "folder for summary.json")
    seed: int = flag(0, "of everything drawn")
    device: str = flag("cpu", "cpu or cuda")
    dtype: str = flag("", "empty: the type that the target's config names", choices=DTYPES)


def require(config, *names: str) -> None:
    """Stop unless these flags are set."""
    missing = [option_name(name) for name in names if not getattr(config, name)]
    if missing:
        raise ValueError(f"{', '.join(missing)} must be set (train.py writes the folders)")


def open_target(config) -> Target:
    """The target of --target; without one, the untrained toy of --arch."""
    if not config.target:
        return Target.toy(config.arch, config.seed).to(config.device)
    return for_cpu(Target.from_pretrained(config.target, config.device, dtype_of(config)))


def open_drafter(folder: str, target: Target, dtype=None) -> Drafter:
    """A drafter, by default in the target's dtype."""
    return Drafter.from_pretrained(folder, target, dtype or target.lm_head.weight.dtype)


def open_pair(config, drafter_dtype=None) -> tuple[Target, Drafter]:
    """The target of --target and the drafter of --drafter."""
    require(config, "target", "drafter")
    target = open_target(config)
    return target, open_drafter(config.drafter, target, drafter_dtype)


def held_out_prompts(config, count: int) -> list[list[int]]:
    """`count` prompts of --prompt-length tokens from the held-out files of the corpus."""
    tokenizer = load_tokenizer(config.target)
    held_out = load_corpus().held_out
    return draw_prompts(held_out, tokenizer, count, config.prompt_length, config.seed + 1)


def long_text(config, target: Target, length: int) -> Tensor:
    """One text (1, length): a prompt with the loaded target's continuation.

    A text too long for the target is held-out text; that of an untrained target is noise.
    """
    if not config.target:
        generator = torch.Generator().manual_seed(config.seed)
        tokens = torch.randint(0, target.num_tokens, (1, length), generator=generator)
    elif length > target.config.max_position_embeddings:
        tokens = pack(load_corpus().held_out, load_tokenizer(config.target))
        tokens = tokens[None, :length].long()
    else:
        if config.prompt_length >= length:
            raise ValueError(
                f"--trunk-length {length} must exceed --prompt-length {config.prompt_length}"
            )
        (prompt,) = held_out_prompts(config, 1)
        num_new = length - len(prompt)
        (result,) = generate(target, None, [prompt], num_new, Sampling(1.0), config.seed)
        tokens = torch.tensor([prompt + result.tokens])
    return tokens.to(config.device)


def random_anchors(config, length: int, count: int) -> tuple[Tensor, torch.Generator]:
    """Anchors (1, count) of a text of `length` tokens, and the generator for their branches."""
    if count >= length:
        raise ValueError(f"--num-anchors {count} must be below --trunk-length {length}")
    generator = torch.Generator().manual_seed(config.seed)
    anchors = torch.randperm(length - 1, generator=generator)[:count].sort().values[None]
    return anchors.to(config.device), generator


def wait() -> None:
    """Wait until the GPU, if there is one, has finished its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(function) -> float:
    """Seconds that function() takes."""
    begin = time.perf_counter()
    function()
    wait()
    return time.perf_counter() - begin


def median_time(function, repeats: int, patience: float = float("inf")) -> dict:
    """Median, lowest and highest seconds of function() over its repeats, after one warm-up.

    Repeats end early once all calls took `patience` seconds; if that is the warm-up alone, it
    counts.
    """
    times = []
    while len(times) <= repeats and sum(times) <= patience:
        times.append(timed(function))
    times = times[1:] or times
    return {"median": statistics.median_high(times), "low": min(times), "high": max(times)}


class StageClock:
    """Times calls: clock("score", function, *arguments). `spans` holds (stage, begin, end), in the
    order in which calls end; a stage inside another counts in both. On a GPU calls are waited for.
    """

    def __init__(self):
        self.spans = []

    def __call__(self, stage: str, function, *arguments, **options):
        begin = time.perf_counter()
        result = function(*arguments, **options)
        wait()
        self.spans.append((stage, begin, time.perf_counter()))
        return result

    def seconds(self) -> dict[str, float]:
        """Seconds by stage, in the order of the first ends."""
        sums = {}
        for stage, begin, end in self.spans:
            sums[stage] = sums.get(stage, 0.0) + end - begin
        return sums


class TimedMethods:
    """Stands for an object and times some of its methods; stages: {method: stage}."""

    def __init__(self, original, clock: StageClock, stages: dict):
        self.original = original
        self.clock = clock
        self.stages = stages

    def __getattr__(self, name: str):
        value = getattr(self.original, name)
        return partial(self.clock, self.stages[name], value) if name in self.stages else value


def pyplot():
    """matplotlib's pyplot without a screen; None if it is not installed."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plot

    return plot


def save_picture(plot, figure, path: Path) -> str:
    """Write a figure as PNG -> the Markdown that shows it."""
    figure.tight_layout()
    with atomic_write(path) as temporary:
        figure.savefig(temporary, dpi=120, format="png")
    plot.close(figure)
    return f"![{path.stem}]({path.name})"
