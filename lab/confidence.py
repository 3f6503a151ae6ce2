"""How many drafts to verify: a drafter that says how sure it is lets the target score less.

A confidence head gives c_k, the chance that draft k is accepted if those before it were; the
product c_1 ... c_k is the chance that it counts. Two rules choose how many drafts of each row are
verified:

    threshold    up to the first draft with c_k below it
    throughput   over the whole batch in order of survival, while the expected tokens per second,
                 (rows + sum of survivals) / seconds of such a round, rise, up to the first drop

The second is the rule of an engine that packs its rows. Here a batch is padded to its longest row,
so that of what the rule saves in a batch only the columns that no row needs are saved.

Both keep the text's distribution exactly the target's, because c_k knows y_1..y_{k-1} alone:
whether y_k is verified must not depend on y_k or on anything drawn after it. Raw confidences are
too sure or not sure enough; one temperature per position, fitted in order on held-out rounds
(sequential temperature scaling), sets them right.

    python confidence.py --target FOLDER --drafter FOLDER     calibrate, profile, compare
    pytest tests/test_confidence.py
"""

import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from drafter import Drafter
from serve import generate
from support import data, files
from support.files import flag
from support.measure import Measure, evaluate
from target import Target

FILE = "confidence.json"  # beside a drafter: its temperatures, and what scoring costs


@dataclass
class Threshold:
    """Verify up to the first draft that is less sure than this."""

    least: float
    temperatures: Tensor | None = None  # (W,)

    def __call__(self, logits: Tensor) -> Tensor:
        """Confidence logits (B,W) -> drafts to verify (B,)."""
        sure = calibrated(logits, self.temperatures).sigmoid()
        return (sure >= self.least).long().cumprod(-1).sum(-1)


@dataclass
class Throughput:
    """Verify what raises the expected tokens per second. seconds (W+1,): of a whole round, drafting
    and all, in which every row verifies 0, 1, ... W drafts."""

    seconds: Tensor
    temperatures: Tensor | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        """Confidence logits (B,W) -> drafts to verify (B,)."""
        B, W = logits.shape
        survival = calibrated(logits, self.temperatures).sigmoid().cumprod(-1)  # (B, W)
        order = survival.flatten().argsort(descending=True, stable=True)  # a row's own in order
        tokens = B + survival.flatten()[order].cumsum(0)  # expected, with so many drafts admitted
        tokens = torch.cat([tokens.new_full((1,), B), tokens])  # (B*W+1,)
        rate = tokens / self.cost(torch.arange(B * W + 1, device=logits.device) / B)
        rising = (rate[1:] > rate[:-1]).long().cumprod(0)  # up to the first drop
        admitted = torch.zeros_like(rising).scatter(0, order, rising)
        return admitted.view(B, W).cumprod(-1).sum(-1)

    def cost(self, drafts: Tensor) -> Tensor:
        """Seconds of a round that verifies so many drafts (n,) a row on average."""
        seconds = self.seconds.to(drafts.device)
        low = drafts.long().clamp(max=len(seconds) - 2)
        return torch.lerp(seconds[low], seconds[low + 1], drafts - low)


@dataclass
class Stopwatch:
    """Always verifies `count` drafts, and keeps the time of every round of `rows` rows."""

    count: int
    rows: int
    times: list = field(default_factory=list)

    def __call__(self, logits: Tensor) -> Tensor:
        keep = torch.full_like(logits[:, 0], self.count, dtype=torch.long)
        if len(logits) == self.rows:
            float(logits[0, 0])  # waits for the device
            self.times.append(time.perf_counter())
        return keep


def calibrated(logits: Tensor, temperatures: Tensor | None) -> Tensor:
    logits = logits.float()  # sums over a batch are lost in bfloat16
    return logits if temperatures is None else logits / temperatures.to(logits)


def fit_temperatures(logits: Tensor, accepted: Tensor) -> Tensor:
    """Sequential temperature scaling: logits (R,W) and accepted drafts (R,) of R rounds -> one
    temperature per position (W,), each fitted by likelihood on the rounds that came so far."""
    grid = torch.logspace(-1.5, 1.5, 241, dtype=torch.double)
    found = []
    for k in range(logits.shape[1]):
        reached = accepted >= k
        right = (accepted[reached] > k).double()
        if not len(right):  # no round came so far
            found.append(1.0)
            continue
        scaled = logits[reached, k].double() / grid[:, None]  # (241, rounds)
        loss = F.binary_cross_entropy_with_logits(
            scaled, right.expand_as(scaled), reduction="none"
        ).mean(-1)
        found.append(grid[loss.argmin()].item())
    return torch.tensor(found)


def reliability(logits: Tensor, accepted: Tensor) -> tuple[float, list]:
    """How far survival probabilities are from how often drafts survive: the mean gap over ten bins
    weighted by their size (expected calibration error), and (predicted, seen, count) of each."""
    steps = torch.arange(logits.shape[1])
    survival = logits.sigmoid().cumprod(-1).flatten().double()
    survived = (accepted[:, None] > steps).flatten().double()
    which = (survival * 10).long().clamp(max=9)
    rows = []
    for one in range(10):
        inside = which == one
        if count := int(inside.sum()):
            rows.append((survival[inside].mean().item(), survived[inside].mean().item(), count))
    return sum(abs(p - s) * n for p, s, n in rows) / len(which), rows


@torch.inference_mode()
def rounds(target, drafter, measure: Measure, temperature: float) -> tuple[Tensor, Tensor]:
    """Real rounds with all drafts verified: confidence logits (R,W) and accepted drafts (R,). One
    that ended its text says nothing about the drafts behind its stop token: left out."""
    seen, kept, counts = [], [], []

    def watch(logits: Tensor) -> Tensor:
        seen.append(logits[0].float().cpu())
        return torch.full_like(logits[:, 0], logits.shape[1], dtype=torch.long)

    for number, prompt in enumerate(measure.prompts):
        (result,) = generate(
            target,
            drafter,
            [prompt],
            measure.max_new_tokens,
            temperature,
            measure.seed + number,
            measure.stop_ids,
            choose=watch,
        )
        whole = result.num_rounds - (result.finish_reason == "stop" and result.num_rounds > 0)
        kept += seen[:whole]
        counts += result.accepted[:whole]
        seen.clear()
    if not kept:
        raise ValueError("no round to calibrate on: every prompt ended with its first tokens")
    return torch.stack(kept), torch.tensor(counts)


def profile(target, drafter, measure: Measure, rows: int) -> Tensor:
    """Seconds of a whole round in which each of so many rows verifies 0, 1, ... W drafts (W+1,),
    the fastest of real rounds, made monotonous."""
    best = []
    for count in range(drafter.config.num_draft_tokens + 1):
        watch = Stopwatch(count, rows)
        prompts = (measure.prompts * (1 + rows // len(measure.prompts)))[:rows]
        generate(target, drafter, prompts, 24, seed=measure.seed, batch_size=rows, choose=watch)
        if len(watch.times) < 2:
            raise ValueError("too few rounds to profile: every prompt ended with its first tokens")
        best.append(torch.tensor(watch.times, dtype=torch.double).diff().min().item())
    return torch.tensor(best).cummax(0).values


def load_rule(name: str, least: float, folder, drafts: int, rows: int) -> Threshold | Throughput:
    """A rule by name; its temperatures (one for each of `drafts`) and its times of a round (of the
    measured batch nearest to `rows`) are those beside the drafter."""
    path = Path(folder) / FILE
    if not path.is_file():
        raise ValueError(f"{path} is missing: python confidence.py makes it")
    found = files.read_json(path)
    temperatures, seconds = found.get("temperatures"), found.get("seconds")
    tables = [temperatures, *(seconds.values() if isinstance(seconds, dict) else [])]
    sizes = [drafts] + [drafts + 1] * (len(tables) - 1)
    for values, size in zip(tables, sizes):
        if not isinstance(values, list) or not all(isinstance(v, float) and v > 0 for v in values):
            raise ValueError(f"{path} is no calibration: python confidence.py makes one")
        if len(values) != size:
            raise ValueError(f"{path} is of a drafter with other than {drafts} drafts: make it new")
    if len(tables) < 2 or not all(key.isdigit() for key in seconds):
        raise ValueError(f"{path} is no calibration: python confidence.py makes one")
    if name == "threshold":
        return Threshold(least, torch.tensor(temperatures))
    nearest = min(seconds, key=lambda key: abs(int(key) - rows))
    return Throughput(torch.tensor(seconds[nearest]), torch.tensor(temperatures))


@dataclass(frozen=True)
class ConfidenceConfig:
    target: str = flag("", "the target's folder")
    drafter: str = flag("", "the drafter's folder; confidence.json is written into it")
    temperature: float = flag(1.0, "at which the rounds to calibrate on are decoded", low=0)
    num_prompts: int = flag(32, "prompts to calibrate on, and as many others to compare on", low=1)
    prompt_length: int = flag(64, "tokens of a prompt", low=1)
    max_new_tokens: int = flag(128, "tokens decoded per prompt", low=2)
    batch_sizes: tuple = flag((1, 8, 32), "at which the rules are compared", kind=int, low=1)
    threshold: float = flag(0.5, "of the threshold rule", low=0)
    seed: int = flag(0, "of everything drawn")
    device: str = flag("cpu", "cpu or cuda")
    dtype: str = flag("", "empty: what the target's config names", choices=files.DTYPES)


def main():
    config = files.parse_flags(ConfidenceConfig, __doc__)
    if not (config.target and config.drafter):
        raise ValueError("--target FOLDER and --drafter FOLDER are needed")
    if not Path(config.drafter).is_dir():
        raise ValueError(f"{config.drafter} is no folder: its confidence is kept beside a drafter")
    kind = files.dtype_of(config)
    target = Target.from_pretrained(config.target, config.device, kind)
    drafter = Drafter.from_pretrained(config.drafter, target, target.lm_head.weight.dtype)
    if not drafter.has_confidence:
        raise ValueError(f"{config.drafter} has no confidence head (DSpark drafters have one)")
    tokenizer = data.load_tokenizer(config.target)
    held = data.load_corpus().held_out
    asked = data.draw_prompts(
        held, tokenizer, 2 * config.num_prompts, config.prompt_length, config.seed + 2
    )
    half = config.num_prompts
    first, second = (
        Measure(part, config.max_new_tokens, tokenizer.stop_ids, config.seed)
        for part in (asked[:half], asked[half:])
    )
    logits, accepted = rounds(target, drafter, first, config.temperature)
    temperatures = fit_temperatures(logits, accepted)
    shown = [round(t, 2) for t in temperatures.tolist()]
    heat = f"temperature {config.temperature:g}"
    print(f"{len(accepted)} rounds at {heat}; each position's confidence is divided by {shown}")
    logits, accepted = rounds(target, drafter, second, config.temperature)
    gaps = {}
    for name, shown in (("raw", logits), ("calibrated", calibrated(logits, temperatures))):
        gaps[name], rows = reliability(shown, accepted)
        print(f"{name}: predicted and seen survival differ by {gaps[name]:.4f} on other rounds")
        print("  " + "  ".join(f"{p:.2f}:{s:.2f} ({n})" for p, s, n in rows))
    seconds = {size: profile(target, drafter, first, size) for size in config.batch_sizes}
    found = {
        "temperatures": temperatures.tolist(),
        "gaps": gaps,
        "seconds": {str(size): table.tolist() for size, table in seconds.items()},
    }
    files.write_json(Path(config.drafter) / FILE, found)
    for size, table in seconds.items():
        print(
            f"a round of {size} rows that verify 0, 1, ... drafts, milliseconds: "
            + " ".join(f"{1e3 * t:.1f}" for t in table.tolist())
        )
    print(" batch rule          AL  verified a round   tokens/s")
    for size in config.batch_sizes:
        rules = {
            "all": None,
            "threshold": Threshold(config.threshold, temperatures),
            "throughput": Throughput(seconds[size], temperatures),
        }
        for name, rule in rules.items():
            how = dict(batch_size=size, choose=rule)
            evaluate(target, drafter, second.prompts[:size], 8, config.temperature, **how)
            one = evaluate(
                target,
                drafter,
                second.prompts,
                config.max_new_tokens,
                config.temperature,
                config.seed,
                second.stop_ids,
                **how,
            )
            nodes = (one.nodes.sum() / one.rounds.sum()).item()
            print(f"{size:6d} {name:11s} {one.mean:5.3f} {nodes:17.2f} {one.tokens_per_s:10.1f}")


if __name__ == "__main__":
    sys.exit(files.run_command(main))
