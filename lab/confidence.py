"""How many drafts to verify: a drafter that is unsure lets the target score less.

A confidence head gives c_k, the probability that draft k is accepted if those before it were; the
product c_1 ... c_k, its survival, is the probability that it is committed. Two rules choose drafts:

    threshold    the drafts before the first whose c_k is below the threshold
    throughput   the whole batch's drafts in order of survival, as long as each raises the expected
                 tokens per second, (rows + sum of survivals) / seconds of such a round

The second is the rule of an engine that packs its rows; here a batch is padded to its longest row.
Both keep the text's distribution exactly the target's, because c_k depends on y_1..y_{k-1} alone.
One temperature per position, fitted in order (sequential temperature scaling), calibrates c_k.

    python -m lab confidence --target FOLDER --drafter FOLDER     calibrate, profile, compare
    pytest tests/lab/test_confidence.py
"""

import time
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from drafter import Sampling
from hf import load_tokenizer
from lab.common import LabConfig, open_pair
from serve import generate
from support.data import draw_prompts, load_corpus
from support.flags import flag
from support.measure import Measure, evaluate


@dataclass(frozen=True)
class Config(LabConfig):
    drafter: str = flag("", "a drafter's folder, with a confidence head")
    temperature: float = flag(1.0, "temperature of decoding", low=0)
    num_prompts: int = flag(32, "prompts to calibrate on, and as many others to compare on", low=1)
    prompt_length: int = flag(64, "tokens of a prompt", low=1)
    max_new_tokens: int = flag(128, "tokens decoded per prompt", low=2)
    batch_sizes: tuple = flag((1, 8, 32), "at which the rules are compared", kind=int, low=1)
    threshold: float = flag(0.5, "of the threshold rule", low=0)


def confidence(logits: Tensor, temperatures: Tensor | None = None) -> Tensor:
    """c_k of confidence logits (B,W), divided by temperatures (W,): (B,W) in float32."""
    logits = logits.float()  # bfloat16 is too coarse for sums over a batch
    return (logits if temperatures is None else logits / temperatures.to(logits)).sigmoid()


def by_threshold(logits: Tensor, threshold: float, temperatures: Tensor | None = None) -> Tensor:
    """Count the drafts before the first whose c_k is below the threshold: logits (B,W) -> (B,)."""
    return (confidence(logits, temperatures) >= threshold).long().cumprod(-1).sum(-1)


def by_throughput(logits: Tensor, seconds: Tensor, temperatures: Tensor | None = None) -> Tensor:
    """Verify what raises the expected tokens per second: logits (B,W) -> (B,). seconds (W+1,): of
    a whole round in which every row verifies 0, 1, ... W drafts."""
    B, W = logits.shape
    survival = confidence(logits, temperatures).cumprod(-1).flatten()
    order = survival.argsort(descending=True, stable=True)  # each row's drafts in their order
    tokens = B + survival[order].cumsum(0)
    tokens = torch.cat([tokens.new_full((1,), B), tokens])  # (B*W+1,) with so many drafts admitted
    per_row = torch.arange(B * W + 1, device=logits.device) / B
    low = per_row.long().clamp(max=W - 1)
    seconds = seconds.to(logits.device)
    rate = tokens / torch.lerp(seconds[low], seconds[low + 1], per_row - low)
    rising = (rate[1:] > rate[:-1]).long().cumprod(0)  # up to the first drop
    admitted = torch.zeros_like(rising).scatter(0, order, rising)
    return admitted.view(B, W).cumprod(-1).sum(-1)


def observe_rounds(target, drafter, measure: Measure, temperature: float) -> tuple[Tensor, Tensor]:
    """Real rounds with all drafts verified: confidence logits (R,W) and accepted drafts (R,)."""
    logits, accepted = [], []

    def verify_all(row: Tensor) -> Tensor:
        logits.append(row[0].float().cpu())
        return torch.full_like(row[:, 0], row.shape[1], dtype=torch.long)

    for number, prompt in enumerate(measure.prompts):
        how = (measure.max_new_tokens, Sampling(temperature), measure.seed + number)
        options = {"stop_ids": measure.stop_ids, "choose": verify_all}
        (result,) = generate(target, drafter, [prompt], *how, **options)
        accepted += result.accepted
        if result.finish_reason == "stop" and result.num_rounds:
            # the last round says nothing about the drafts behind the stop token
            logits.pop()
            accepted.pop()
    if not logits:
        raise ValueError("no round to calibrate on: every prompt ended with its first tokens")
    return torch.stack(logits), torch.tensor(accepted)


def fit_temperatures(logits: Tensor, accepted: Tensor) -> Tensor:
    """Fit a temperature (W,) per position to the rounds that reached it; logits (R,W)."""
    grid = torch.logspace(-1.5, 1.5, 241, dtype=torch.double)
    temperatures = torch.ones(logits.shape[1])
    for k in range(logits.shape[1]):
        reached = accepted >= k
        if reached.any():
            scaled = logits[reached, k].double() / grid[:, None]  # (241, rounds)
            labels = (accepted[reached] > k).double().expand_as(scaled)
            losses = F.binary_cross_entropy_with_logits(scaled, labels, reduction="none")
            temperatures[k] = grid[losses.mean(-1).argmin()]
    return temperatures


def reliability(confidences: Tensor, accepted: Tensor) -> tuple[float, list]:
    """The mean gap between predicted and seen survival over ten bins, weighted by their size (the
    expected calibration error), and (predicted, seen, count) of each bin."""
    predicted = confidences.cumprod(-1).flatten().double()
    seen = (accepted[:, None] > torch.arange(confidences.shape[1])).flatten().double()
    bins = (predicted * 10).long().clamp(max=9)
    rows = []
    for number in bins.unique():
        inside = bins == number
        means = (predicted[inside].mean().item(), seen[inside].mean().item())
        rows.append((*means, int(inside.sum())))
    return sum(abs(p - s) * count for p, s, count in rows) / len(bins), rows


def profile_rounds(target, drafter, measure: Measure, num_rows: int) -> Tensor:
    """Lowest seconds (W+1,) of rounds whose rows verify 0, 1, ... W drafts, made non-decreasing."""
    seconds, times = [], []
    prompts = (measure.prompts * (1 + num_rows // len(measure.prompts)))[:num_rows]

    def verify_count(count: int, logits: Tensor) -> Tensor:
        if len(logits) == num_rows:  # all rows still go on
            float(logits[0, 0])  # waits for the device
            times.append(time.perf_counter())
        return torch.full_like(logits[:, 0], count, dtype=torch.long)

    for count in range(drafter.config.num_draft_tokens + 1):
        times.clear()
        options = {"batch_size": num_rows, "choose": partial(verify_count, count)}
        generate(target, drafter, prompts, 24, seed=measure.seed, **options)
        if len(times) < 2:
            raise ValueError("too few rounds to profile: every prompt ended with its first tokens")
        seconds.append(torch.tensor(times, dtype=torch.double).diff().min().item())
    return torch.tensor(seconds).cummax(0).values


def compare(target, drafter, measure: Measure, temperature: float, rules: dict, size: int) -> dict:
    """AL, tokens verified a round and speed by each rule, `size` prompts at once."""
    sampling = Sampling(temperature)
    how = (measure.max_new_tokens, sampling, measure.seed, measure.stop_ids)
    figures = {}
    for name, rule in rules.items():
        options = {"batch_size": size, "choose": rule}
        evaluate(target, drafter, measure.prompts[:size], 8, sampling, **options)  # warms up
        results = evaluate(target, drafter, measure.prompts, *how, **options)
        nodes = (results.nodes.sum() / results.rounds.sum()).item()
        speed = results.tokens_per_s
        print(f"{size:6d} {name:11s} {results.mean:5.3f} {nodes:17.2f} {speed:10.1f}")
        figures[name] = {"al": results.mean, "verified": nodes, "tokens_per_s": speed}
    return figures


def run(config: Config) -> dict:
    target, drafter = open_pair(config)
    if not drafter.has_confidence:
        raise ValueError(f"{config.drafter} has no confidence head (DSpark drafters have one)")
    tokenizer = load_tokenizer(config.target)
    half = config.num_prompts
    how = (2 * half, config.prompt_length, config.seed + 2)
    prompts = draw_prompts(load_corpus().held_out, tokenizer, *how)
    how = (config.max_new_tokens, tokenizer.stop_ids, config.seed)
    first, second = Measure(prompts[:half], *how), Measure(prompts[half:], *how)
    temperatures = fit_temperatures(*observe_rounds(target, drafter, first, config.temperature))
    print(f"confidence logits are divided by {[round(t, 2) for t in temperatures.tolist()]}")
    logits, accepted = observe_rounds(target, drafter, second, config.temperature)
    gaps = {}
    for name, divisors in (("raw", None), ("calibrated", temperatures)):
        gaps[name], bins = reliability(confidence(logits, divisors), accepted)
        print(f"{name}: predicted and seen survival differ by {gaps[name]:.4f} on other rounds")
        print("  " + "  ".join(f"{p:.2f}:{s:.2f} ({n})" for p, s, n in bins))
    fixed = partial(by_threshold, threshold=config.threshold, temperatures=temperatures)
    profiles, rows = {}, {}
    for size in config.batch_sizes:
        seconds = profile_rounds(target, drafter, first, size)
        profiles[str(size)] = seconds.tolist()
        ms = " ".join(f"{1e3 * s:.1f}" for s in seconds.tolist())
        print(f"a round of {size} rows that verify 0, 1, ... drafts, milliseconds: {ms}")
        print(" batch rule          AL  verified a round   tokens/s")
        by_rate = partial(by_throughput, seconds=seconds, temperatures=temperatures)
        rules = {"all": None, "threshold": fixed, "throughput": by_rate}
        rows[str(size)] = compare(target, drafter, second, config.temperature, rules, size)
    figures = {"temperatures": temperatures.tolist(), "gaps": gaps}
    return figures | {"seconds": profiles, "rules": rows}
