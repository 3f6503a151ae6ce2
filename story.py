"""The whole story on a laptop: a toy target, its references, a drafter trained offline, and the
ways on from it for the same number of steps from the same checkpoint; then AL by real decoding.

Every stage is kept in --out and not done twice. The paper's comparison in small: what differs
between the ways is the loss and where its blocks come from, nothing else.

    python train.py                       (about 12 minutes on one CPU core)
    pytest tests/test_train.py
"""

import dataclasses
import time
from dataclasses import replace
from pathlib import Path

import torch

from drafter import Drafter
from support import files
from support.measure import Measure, decoding_speed, format_gain, gain
from support.prepare import Trunks, prepare, start_drafter
from train import FREE, MODES, TEMPERATURES, TrainConfig, train


def trained(run: TrainConfig, folder: Path, target, tokenizer, measure: Measure, trunks) -> dict:
    """Train one run, or find it done in its folder -> its totals. trunks(): of its references, made
    where they are needed."""
    wanted = {k: v for k, v in dataclasses.asdict(run).items() if k not in FREE}

    def make():
        return train(run, start_drafter(run, target, tokenizer), trunks(), measure, folder)

    return files.stage(folder, wanted, make)


def story(config: TrainConfig, out: Path) -> None:
    """Target, references, a drafter trained offline, three ways on from it, and the table."""
    begin = time.perf_counter()
    target, tokenizer, measure, references = prepare(config, out)
    fresh = start_drafter(config, target, tokenizer)
    trunks = Trunks(target, references, config.cache_gib, config.checkpoint_every or None)
    totals, drafters = {}, {"fresh": fresh}
    runs = {"start": replace(config, mode="ce", steps=config.warm_steps)}
    for mode in config.ways:
        runs[mode] = replace(config, mode=mode, drafter=str(out / "start"))
    for name, run in runs.items():
        world = target, tokenizer, measure, lambda: trunks
        totals[name] = trained(run, out / name, *world)
        drafters[name] = Drafter.from_pretrained(out / name, target, torch.float32)
    rows = {}
    for name, drafter in drafters.items():
        share = 0.25 if name == "fresh" else 1.0  # a round for every token: slow, and about 1
        rows[name] = {t: measure(target, drafter, t, share, f"AL of {name}") for t in TEMPERATURES}
    last = drafters["specopd" if "specopd" in drafters else config.ways[-1]]
    speeds = decoding_speed(target, last, measure, count=32)
    report(config, out, rows, totals, speeds, time.perf_counter() - begin)


TITLES = {
    "fresh": "fresh (1/4 of them)",
    "start": "offline CE (the start)",
    "ce": "  + CE",
    "e2e": "  + offline E2E-TV",
    "specopd": "  + SpecOPD",
    "rollout": "  + rollouts",
}


def report(config: TrainConfig, out: Path, rows, totals, speeds: dict, seconds: float) -> None:
    """The figures, in summary.json and as a table."""
    entries = {name: dict(totals.get(name, {})) for name in rows}
    for name, entry in entries.items():
        for t in TEMPERATURES:
            here = rows[name][t]
            entry |= {f"al_t{t:g}": here.mean, f"survival_t{t:g}": here.survival}
            for base in {"start", "ce"} & rows.keys() if name in MODES else ():
                entry[f"over_{base}_t{t:g}"] = gain(here, rows[base][t])
    summary = {"config": dataclasses.asdict(config), "rows": entries}
    files.write_json(out / "summary.json", summary | {"decoding": speeds, "seconds": seconds})

    size = f"{config.eval_prompts} held-out prompts x {config.eval_tokens} tokens"
    print(f"\nAcceptance length, {size}, seed {config.seed}")
    print("[gain over the start, 95 % interval of the paired difference]")
    print(f"{'':24s}{'T = 0':>7s}{'':26s}{'T = 1':>7s}{'':26s}{'supervised tokens/s':>20s}")
    for name, entry in entries.items():
        line = f"{TITLES[name]:24s}"
        for t in TEMPERATURES:
            over = format_gain(entry[f"over_start_t{t:g}"]) if name in MODES else ""
            line += f"{entry[f'al_t{t:g}']:7.3f}  {over:24s}"
        print(line + (f"{entry['supervised'] / entry['seconds']:20.0f}" if name in totals else ""))
    for t in TEMPERATURES:
        print(f"\nSurvival: share of rounds that keep the first 1, 2, ... drafts, T = {t:g}")
        for name, entry in entries.items():
            print(f"{TITLES[name]:24s}" + " ".join(f"{s:6.3f}" for s in entry[f"survival_t{t:g}"]))
    own = entries.get("specopd")
    if own and "ce" in rows:
        over = [f"T = {t:g} {format_gain(own[f'over_ce_t{t:g}'])}" for t in TEMPERATURES]
        print("\nSpecOPD over continued CE: " + ", ".join(over))
    if own:
        saved = 1 - own["nodes"] / max(own["unmerged"], 1)
        print(f"merging saved {100 * saved:.1f} % of the trees' nodes")
    plain, fast = speeds["plain"], speeds["speculative"]
    line = f"greedy decoding, batch 1: plain {plain:.0f} tokens/s, speculative {fast:.0f}"
    if speeds["same_text"]:
        print(f"{line}, the same text, {fast / plain:.2f} times as fast")
    else:
        print(f"{line}; THE TEXTS DIFFER, so no speed-up is reported")
    print(f"{seconds:.0f} s in all. Figures: {out}/summary.json, and a log.jsonl per run. Next:")
    pair, last = f"--target {config.target or f'{out}/target'} --drafter {out}", list(rows)[-1]
    print(f'  python serve.py {pair}/{last} --prompt "def main(" "import os"')
    print(f"  python train.py --mode specopd {pair}/start --out runs/mine")
    print(f"  python bench.py decode {pair}/{last}")
