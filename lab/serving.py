"""What decoding costs and gains: commands of bench.py."""

import statistics
import time
from pathlib import Path

import torch

import serve
from drafter import Drafter
from lab.common import BenchConfig, Clock, held_out_prompts, load, median_time
from support import data, files
from support.measure import (
    Measure,
    Tasks,
    by_task,
    decoding_speed,
    evaluate,
    format_gain,
    gain,
    read_tasks,
)
from target import Target, one_row


def loaded(config: BenchConfig, command: str):
    """Target, drafter, stop ids and held-out prompts of a command that decodes."""
    pair = load(config, command=command)
    prompts = held_out_prompts(config, config.num_prompts, config.prompt_length)
    return *pair, data.load_tokenizer(config.target).stop_ids, prompts


def bench_chains(config: BenchConfig) -> dict:
    """Several drafted chains per round against one, by how many tokens the target scores."""
    target, drafter, stop_ids, prompts = loaded(config, "chains")
    print(
        f"{len(prompts)} prompts x {config.max_new_tokens} tokens, temperature 0\n"
        "chains  drafts each | tokens scored a round      AL   95 % interval"
    )
    figures = []
    for K in (1, 2, 3, 4):
        for n in range(1, drafter.config.num_draft_tokens + 1):
            found = evaluate(
                target,
                drafter,
                prompts,
                config.max_new_tokens,
                0.0,
                config.seed,
                stop_ids,
                num_branches=K,
                draft_length=n,
            )
            nodes = (found.nodes.sum() / found.rounds.sum()).item()
            low, high = found.interval()
            print(f"{K:6d} {n:12d} | {nodes:21.2f} {found.mean:7.3f}   [{low:.2f}, {high:.2f}]")
            figures.append(
                {
                    "chains": K,
                    "drafts": n,
                    "nodes": nodes,
                    "al": found.mean,
                    "interval": (low, high),
                }
            )
    return {"rows": figures}


def bench_decode(config: BenchConfig) -> dict:
    """Greedy, one prompt at a time, plain and speculative in turn; the texts must be the same."""
    target, drafter, stop_ids, prompts = loaded(config, "decode")
    measure = Measure(prompts, config.max_new_tokens, stop_ids, config.seed)
    speeds = decoding_speed(target, drafter, measure, len(prompts))
    if not speeds["same_text"]:
        raise ValueError(
            "greedy speculative text differs from plain decoding: no speed-up is reported"
        )
    ratio = speeds["speculative"] / speeds["plain"]
    al = measure(target, drafter, 0.0)
    print(
        f"{config.num_prompts} prompts x {config.max_new_tokens} tokens, temperature 0, batch 1, "
        f"{config.device}, {torch.get_num_threads()} threads: the same text"
    )
    print(
        f"plain {speeds['plain']:.1f} tokens/s, speculative {speeds['speculative']:.1f} tokens/s,"
        f" AL {al.mean:.3f}: {ratio:.2f} times as fast"
    )
    parts = {
        "draft": (Drafter, "propose"),
        "tree": (serve, "build_tree"),
        "score": (Target, "score"),
        "verify": (serve, "verify"),
        "commit": (Target, "commit"),
        "drafter's memory": (Drafter, "extend"),
        "prefill": (Target, "prefill"),
    }
    shares = {}
    for name, proposer in (("plain", None), ("speculative", drafter)):
        clock = Clock(parts)
        begin = time.perf_counter()
        rounds = 0
        for prompt in prompts[:4]:
            (result,) = serve.generate(
                target, proposer, [prompt], config.max_new_tokens, stop_ids=stop_ids
            )
            rounds += result.num_rounds
        total = time.perf_counter() - begin
        clock.restore()
        share = {k: v / total for k, v in clock.seconds.items()}
        share["target's head and rest"] = 1 - sum(share.values())
        line = ", ".join(f"{k} {100 * v:.0f} %" for k, v in share.items())
        print(f"{name:12s} {1e3 * total / rounds:.2f} ms a round: {line}")
        shares[name] = share | {"ms_per_round": 1e3 * total / rounds}
    return {"speeds": speeds, "ratio": ratio, "al": al.mean, "shares": shares}


def bench_speed(config: BenchConfig) -> dict:
    """Tokens/s of generation without a drafter and with each drafter, by task and by how many
    prompts are decoded at once, arms in turn; at temperature 0 all texts must be those of plain
    decoding."""
    if not (config.target and config.drafters):
        raise ValueError("bench.py speed needs --target FOLDER and --drafters FOLDER ...")
    target, _ = load(config)
    tokenizer = data.load_tokenizer(config.target)
    most = max(config.num_prompts, *config.concurrency)
    if config.tasks:
        tasks = read_tasks(config.tasks, tokenizer, most, config.prompt_length, config.seed)
    else:
        tasks = {"text": held_out_prompts(config, most, config.prompt_length)}
    kind = target.lm_head.weight.dtype
    arms = {"off": None}
    arms |= {folder: Drafter.from_pretrained(folder, target, kind) for folder in config.drafters}
    n, heat, figures = config.max_new_tokens, config.temperature, {}
    asked = (heat, config.seed, tokenizer.stop_ids)
    print(
        f"temperature {heat:g}, {n} tokens a prompt, {config.device}, "
        f"{torch.get_num_threads()} threads, medians of {config.repeats}; tokens/s (AL) x plain"
    )
    for size in config.concurrency:
        rows, ratios = {}, {name: [] for name in arms}
        print(f"\n{f'{size} at once':12s}" + "".join(f"{name[-26:]:>28s}" for name in arms))
        for task, prompts in tasks.items():
            if len(prompts) < size:
                print(f"{task[:12]:12s} has but {len(prompts)} prompts: left out")
                continue
            used = prompts[: max(size, min(len(prompts), config.num_prompts) // size * size)]
            found = {name: [] for name in arms}
            for repeat in range(config.repeats + 1):  # the first warms up
                for name, drafter in arms.items():
                    part, length = (used, n) if repeat else (used[:size], 8)
                    one = evaluate(target, drafter, part, length, *asked, batch_size=size)
                    found[name] += [one] * (repeat > 0)
            row = rows[task] = {}
            for name, ones in found.items():
                speeds = sorted(one.tokens_per_s for one in ones)
                row[name] = {
                    "tokens_per_s": speeds[len(speeds) // 2],
                    "low": speeds[0],
                    "high": speeds[-1],
                    "al": ones[0].mean if arms[name] else 1.0,
                    "same_text": heat > 0 or ones[0].texts == found["off"][0].texts,
                }
                ratio = row[name]["tokens_per_s"] / row["off"]["tokens_per_s"]
                ratios[name].append(ratio if row[name]["same_text"] else None)
            print(
                f"{task[:12]:12s}"
                + "".join(
                    f"{one['tokens_per_s']:12.1f} ({one['al']:.3f}) "
                    + (f"{of[-1]:6.2f}x" if of[-1] else " DIFFER")
                    for one, of in zip(row.values(), ratios.values())
                )
            )
        # where a text differs there is no speed to speak of
        means = {
            name: statistics.geometric_mean(of) if of and None not in of else None
            for name, of in ratios.items()
        }
        print(
            "geom. mean  "
            + "".join(f"{mean:27.2f}x" if mean else f"{'-':>28s}" for mean in means.values())
        )
        figures[f"{size} at once"] = {"tasks": rows, "geometric_means": means}
    return figures


def bench_al(config: BenchConfig) -> dict:
    """AL of each drafter on each task at temperature 0 and 1, pooled within a task, the unweighted
    mean across tasks; the same prompts for all. Behind the mean its gain over the first drafter's,
    with the 95 % interval of the paired difference."""
    if not (config.target and config.drafters and config.tasks):
        raise ValueError("bench.py al needs --target, --drafters and --tasks")
    target, _ = load(config)
    tokenizer = data.load_tokenizer(config.target)
    size = config.num_prompts, config.prompt_length
    prompts, figures = read_tasks(config.tasks, tokenizer, *size, config.seed), {}
    for temperature in (0.0, 1.0):
        print(f"\nAL at temperature {temperature:g}, {config.max_new_tokens} tokens a prompt")
        print(" " * 24 + "".join(f"{task[:12]:>14s}" for task in (*prompts, "mean")))
        print("prompts".ljust(24) + "".join(f"{len(p):14d}" for p in prompts.values()))
        first = None
        for folder in config.drafters:
            drafter = Drafter.from_pretrained(folder, target, target.lm_head.weight.dtype)
            found = by_task(
                target,
                drafter,
                prompts,
                config.max_new_tokens,
                temperature,
                seed=config.seed,
                stop_ids=tokenizer.stop_ids,
            )
            one = Tasks(found)
            row = {task: one.mean for task, one in found.items()} | {"mean": one.mean}
            over = gain(one, first) if first else None
            first = first or one
            line = "".join(f"{al:14.3f}" for al in row.values())
            line += f"  {format_gain(over)}" if over else ""
            print(f"{'/'.join(Path(folder).parts[-2:])[-23:]:24s}{line}")
            survival = {task: one.survival for task, one in found.items()}
            figures.setdefault(folder, {})[f"t{temperature:g}"] = {
                "al": row,
                "survival": survival,
                "over_the_first": over,
            }
    return figures


@torch.inference_mode()
def bench_hf(config: BenchConfig) -> dict:
    """The same weights in both, turn by turn in one process: decoding of one and of eight rows,
    prefill of --trunk-length tokens; and how near decoding is to reading every matrix once."""
    try:
        import transformers
    except ImportError:
        raise ValueError("bench.py hf needs transformers: pip install transformers") from None
    if not config.target:
        raise ValueError("bench.py hf needs --target FOLDER")
    transformers.logging.disable_progress_bar()
    kind = files.dtype_of(config)
    ours = Target.from_pretrained(config.target, config.device, kind)
    kind = ours.lm_head.weight.dtype
    theirs = transformers.AutoModelForCausalLM.from_pretrained(config.target, dtype=kind)
    theirs.to(config.device).generation_config.eos_token_id = None
    generator = torch.Generator().manual_seed(config.seed)
    n, figures = config.max_new_tokens, {"dtype": str(kind)}

    def ids(B, T):
        return torch.randint(0, ours.num_tokens, (B, T), generator=generator).to(config.device)

    def decode(B):
        prompts = ids(B, config.prompt_length)
        asked = dict(max_new_tokens=n, do_sample=False, pad_token_id=0)
        mask = torch.ones_like(prompts)
        return (
            lambda: serve.generate(ours, None, prompts.tolist(), n),
            lambda: theirs.generate(prompts, attention_mask=mask, **asked),
            B * n,
        )

    def prefill(T):
        prompt, lengths = ids(1, T), torch.tensor([T], device=config.device)
        return (
            lambda: ours.head(ours.prefill(prompt, lengths, 64, ()).hidden[:, -1:]),
            lambda: theirs(prompt, use_cache=True, logits_to_keep=1),
            T,
        )

    matrices = [m for m in ours.modules() if isinstance(m, torch.nn.Linear)]
    row = {m.in_features: torch.randn(1, 1, m.in_features, dtype=kind) for m in matrices}
    with one_row(1, matrices[0].weight):
        times = median_time(lambda: [m(row[m.in_features]) for m in matrices], config.repeats)
        floor = times["low"]
    print(f"{kind}, {torch.get_num_threads()} threads; tokens/s, best of {config.repeats} [median]")
    print(f"every matrix once against one row: {1 / floor:.1f}")
    for name, (mine, other, tokens) in {
        "decode, 1 row": decode(1),
        "decode, 8 rows": decode(8),
        f"prefill of {config.trunk_length[0]:,}": prefill(config.trunk_length[0]),
    }.items():
        times = ([], [])
        for repeat in range(config.repeats + 1):  # the first warms up
            for run, kept in zip((mine, other), times):
                begin = time.perf_counter()
                run()
                kept += [time.perf_counter() - begin] if repeat else []
        best = [tokens / min(t) for t in times]
        middle = [tokens / sorted(t)[len(t) // 2] for t in times]
        shown = [f"{b:8.1f} [{m:.1f}]" for b, m in zip(best, middle)]
        ratio = f"{best[0] / best[1]:.2f} [{middle[0] / middle[1]:.2f}] x"
        print(f"{name:18s} here {shown[0]}   transformers {shown[1]}   {ratio}")
        figures[name] = {"tokens_per_s": best, "medians": middle}
    return figures | {"floor_tokens_per_s": 1 / floor}
