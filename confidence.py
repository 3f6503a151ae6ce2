"""How many drafts to verify: a drafter that says how sure it is lets the target score less.

A confidence head gives c_k, the chance that draft k is accepted if those before it were; the
product c_1 ... c_k is the chance that it counts. Two rules choose how many drafts of each row are
verified:

    threshold    up to the first draft with c_k below it
    throughput   over the whole batch in order of survival, while the expected tokens per second,
                 (rows + sum of survivals) / seconds(rows + drafts), rise, up to the first drop

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
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import data
import files
from drafter import Drafter
from files import flag
from measure import Measure, evaluate
from serve import generate
from target import Target
from tree import build_tree

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
    """Verify what raises the expected tokens per second. seconds[n-1]: of a round that scores n
    tokens in all; beyond the last it grows as it did at the end."""

    seconds: Tensor
    temperatures: Tensor | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        """Confidence logits (B,W) -> drafts to verify (B,)."""
        (B, W), device = logits.shape, logits.device
        survival = calibrated(logits, self.temperatures).sigmoid().cumprod(-1)  # (B, W)
        order = survival.flatten().argsort(descending=True, stable=True)  # a row's own in order
        tokens = B + survival.flatten()[order].cumsum(0)  # expected, with so many drafts admitted
        tokens = torch.cat([tokens.new_full((1,), B), tokens])  # (B*W+1,)
        rate = tokens / self.cost(B + torch.arange(B * W + 1, device=device))
        rising = (rate[1:] > rate[:-1]).long().cumprod(0)  # up to the first drop
        admitted = torch.zeros_like(rising).scatter(0, order, rising)
        return admitted.view(B, W).cumprod(-1).sum(-1)

    def cost(self, count: Tensor) -> Tensor:
        """Seconds of a round that scores `count` tokens."""
        seconds = self.seconds.to(count.device)
        last = len(seconds)
        slope = (seconds[-1] - seconds[-2]) if last > 1 else seconds.new_zeros(())
        return seconds[(count - 1).clamp(max=last - 1)] + slope * (count - last).clamp(min=0)


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


def reliability(logits: Tensor, accepted: Tensor, bins: int = 10) -> tuple[float, list]:
    """How far survival probabilities are from how often drafts survive: the mean gap over bins
    weighted by their size (expected calibration error), and (predicted, seen, count) of each."""
    steps = torch.arange(logits.shape[1])
    survival = logits.sigmoid().cumprod(-1).flatten().double()
    survived = (accepted[:, None] > steps).flatten().double()
    which = (survival * bins).long().clamp(max=bins - 1)
    rows = []
    for one in range(bins):
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
            target, drafter, [prompt], measure.max_new_tokens, temperature, measure.seed + number,
            measure.stop_ids, choose=watch,
        )  # fmt: skip
        whole = result.num_rounds - (result.finish_reason == "stop" and result.num_rounds > 0)
        kept += seen[:whole]
        counts += result.accepted[:whole]
        seen.clear()
    if not kept:
        raise ValueError("no round to calibrate on: every prompt ended with its first tokens")
    return torch.stack(kept), torch.tensor(counts)


@torch.inference_mode()
def profile(target, measure: Measure, most: int, repeats: int = 5) -> Tensor:
    """Seconds of scoring 1..most tokens of one row behind a prompt, (most,), made monotonous."""
    prompt = torch.tensor([measure.prompts[0]], device=target.lm_head.weight.device)
    lengths = torch.tensor([prompt.shape[1]], device=prompt.device)
    trunk = target.prefill(prompt, lengths, most + 1, checkpoint_every=0)
    upto = torch.cat([trunk.tokens[:, : prompt.shape[1]], prompt[:, :1]], 1)
    best = []
    for count in range(1, most + 1):
        drafts = torch.zeros(1, 1, 1, count - 1, dtype=torch.long, device=prompt.device)
        times = []
        for _ in range(repeats + 1):
            begin = time.perf_counter()
            tree = build_tree(upto, lengths, lengths[:, None], drafts, False, True)
            float(target.head(target.score(trunk, tree).hidden).sum())  # waits for the device
            times.append(time.perf_counter() - begin)
        best.append(min(times))
    return torch.tensor(best).cummax(0).values


def load_rule(name: str, least: float, folder, drafts: int) -> Threshold | Throughput:
    """A rule by name; its temperatures (one for each of `drafts`) and costs are those beside the
    drafter."""
    path = Path(folder) / FILE
    if not path.is_file():
        raise ValueError(f"{path} is missing: python confidence.py makes it")
    found = files.read_json(path)
    temperatures, seconds = (found.get(key) for key in ("temperatures", "seconds"))
    for values in (temperatures, seconds):
        if not isinstance(values, list) or not all(isinstance(v, float) and v > 0 for v in values):
            raise ValueError(f"{path} is no calibration: python confidence.py makes one")
    if len(temperatures) != drafts or not seconds:
        raise ValueError(f"{path} is of a drafter with other than {drafts} drafts: make it again")
    if name == "threshold":
        return Threshold(least, torch.tensor(temperatures))
    return Throughput(torch.tensor(seconds), torch.tensor(temperatures))


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
    kind = getattr(torch, config.dtype, None)
    target = Target.from_pretrained(config.target, config.device, kind)
    drafter = Drafter.from_pretrained(config.drafter, target, target.lm_head.weight.dtype)
    if not drafter.says_confidence:
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
    for name, shown in (("raw", logits), ("calibrated", logits / temperatures)):
        gaps[name], rows = reliability(shown, accepted)
        print(f"{name}: predicted and seen survival differ by {gaps[name]:.4f} on other rounds")
        print("  " + "  ".join(f"{p:.2f}:{s:.2f} ({n})" for p, s, n in rows))
    W = drafter.config.num_draft_tokens
    seconds = profile(target, first, max(config.batch_sizes) * (W + 1))
    found = {"temperatures": temperatures.tolist(), "seconds": seconds.tolist(), "gaps": gaps}
    files.write_json(Path(config.drafter) / FILE, found)
    print(f"scoring 1 token {1e3 * seconds[0]:.2f} ms, {W + 1}: {1e3 * seconds[W]:.2f} ms")
    print(" batch rule          AL  verified a round   tokens/s")
    rules = {"all": None, "threshold": Threshold(config.threshold, temperatures),
             "throughput": Throughput(seconds, temperatures)}  # fmt: skip
    for size in config.batch_sizes:
        for name, rule in rules.items():
            how = dict(batch_size=size, choose=rule)
            evaluate(target, drafter, second.prompts[:size], 8, config.temperature, **how)
            one = evaluate(target, drafter, second.prompts, config.max_new_tokens,
                           config.temperature, config.seed, second.stop_ids, **how)  # fmt: skip
            speed = one.committed.sum().item() / one.seconds
            nodes = (one.nodes.sum() / one.rounds.sum()).item()
            print(f"{size:6d} {name:11s} {one.mean:5.3f} {nodes:17.2f} {speed:10.1f}")


if __name__ == "__main__":
    sys.exit(files.exit_code(main))
