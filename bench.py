"""Measurements: two things in one process, on the same weights, and their ratio.

    python bench.py tree      scoring branches packed on their trunk, against each branch alone
    python bench.py replay    what checkpoints of recurrent state cost, by their spacing
    python bench.py chains    several drafted chains per round against one
    python bench.py decode    speculative against plain decoding, and each part's share of a round
    python bench.py al        acceptance length of one or more drafters by task, a JSONL file each
    python bench.py hf        plain greedy decoding and prefill against transformers, if installed

Times are medians over repeats after a warm-up, with the spread; sizes and seeds are flags. The
figures go to the terminal and to summary.json in --out.
"""

import dataclasses
import sys
import time
from dataclasses import dataclass
from functools import wraps
from pathlib import Path

import torch

import data
import files
import replay
import serve
from drafter import Drafter, Sampling
from files import flag
from measure import Measure, decoding_speed, evaluate
from target import TOYS, Target
from tree import build_tree


@dataclass(frozen=True)
class BenchConfig:
    target: str = flag("", "a target's folder; empty: an untrained toy")
    drafter: str = flag(
        "", "a drafter's folder; empty: tree draws random branches, decode needs one"
    )
    drafters: tuple = flag((), "al: the folders of the drafters to compare")
    tasks: tuple = flag((), "al: JSONL files of prompts, one task each")
    out: str = flag("runs/bench", "folder for summary.json")
    seed: int = flag(0, "of everything drawn")
    arch: str = flag("gqa", "the untrained toy's architecture", choices=tuple(TOYS))
    repeats: int = flag(7, "timed repeats", low=1)
    patience: float = flag(30.0, "tree: seconds after which a measurement is not repeated", low=0)
    trunk_length: tuple = flag((512,), "tree: tokens of the trunk, one or several; replay, hf: one",
                               kind=int, low=2)  # fmt: skip
    num_anchors: tuple = flag((64,), "tree: anchors, one or several; replay: one", kind=int, low=1)
    num_branches: int = flag(1, "tree: branches per anchor", low=1)
    num_draft_tokens: int = flag(7, "tree: W, where no drafter sets it", low=1)
    num_prompts: int = flag(16, "prompts: decode one at a time, al of each task", low=1)
    prompt_length: int = flag(64, "decode: tokens of a prompt; al: at most", low=1)
    max_new_tokens: int = flag(200, "decode, al: tokens generated per prompt", low=2)
    device: str = flag("cpu", "cpu or cuda")
    dtype: str = flag("", "empty: what the target's config names", choices=files.DTYPES)

    def __post_init__(self):
        files.check_low(self)
        if max(self.num_anchors) >= min(self.trunk_length):
            raise ValueError("--num-anchors: fewer than --trunk-length are needed")


def median_time(run, repeats: int, patience: float = float("inf")) -> dict:
    """Seconds of run(): median, and the lowest and highest of the repeats, after one warm-up. Not
    repeated once it took longer than `patience` in all; the warm-up counts where nothing else was
    run."""
    times = []
    while len(times) <= repeats and sum(times) <= patience:
        begin = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    ordered = sorted(times[1:] or times)
    return {"median": ordered[len(ordered) // 2], "low": ordered[0], "high": ordered[-1]}


def load(config: BenchConfig):
    if config.target:
        kind = getattr(torch, config.dtype, None)
        target = Target.from_pretrained(config.target, config.device, kind)
    else:
        target = Target.toy(config.arch, config.seed).to(config.device)
    drafter = None
    if config.drafter:
        drafter = Drafter.from_pretrained(config.drafter, target, target.lm_head.weight.dtype)
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
            raise ValueError(f"--trunk-length {length} must exceed --prompt-length "
                             f"{config.prompt_length}")  # fmt: skip
        (prompt,) = held_out_prompts(config, 1, config.prompt_length)
        (result,) = serve.generate(target, None, [prompt], length - len(prompt), 1.0, config.seed)
        tokens = torch.tensor([prompt + result.tokens])
    else:
        generator = torch.Generator().manual_seed(config.seed)
        tokens = torch.randint(0, target.num_tokens, (1, length), generator=generator)
    return tokens.to(config.device), torch.tensor([length], device=config.device)


def line_of(xs: list, ys: list) -> tuple[float, float, float]:
    """The least-squares line through points -> its value at 0, its slope, R^2."""
    x, y = torch.tensor(xs, dtype=torch.double), torch.tensor(ys, dtype=torch.double)
    slope = ((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum()
    start = y.mean() - slope * x.mean()
    rest = (y - start - slope * x).square().sum() / (y - y.mean()).square().sum()
    return start.item(), slope.item(), 1 - rest.item()


@torch.inference_mode()
def bench_tree(config: BenchConfig) -> dict:
    """One prefill and one pass over the tree, against one run of the whole prefix per branch, for
    every trunk length and number of anchors; and what a node costs."""
    target, drafter = load(config)
    W = drafter.config.num_draft_tokens if drafter else config.num_draft_tokens
    K, figures = config.num_branches, []
    text, _ = text_of(config, target, max(config.trunk_length))
    name = config.target or f"untrained {config.arch}"
    print(f"{name}, {config.device}, {torch.get_num_threads()} threads, seed {config.seed}; "
          f"branches of {W}, {K} an anchor; milliseconds\n"
          "trunk anchors |  nodes merged |  tokens alone | packed  merged   alone | "
          "x tokens  x speed  share | gap of p")  # fmt: skip
    for T in config.trunk_length:
        tokens, lengths = text[:, :T], torch.tensor([T], device=config.device)
        scoring = []
        for A in config.num_anchors:
            row = _packed_and_alone(config, target, drafter, tokens, lengths, A, K, W)
            figures.append(row)
            scoring.append((row["nodes"], 1e3 * row["times"]["scoring"]["median"]))
            packed, merged, alone = (
                1e3 * row["times"][k]["median"] for k in ("packed", "merged", "alone")
            )
            print(f"{T:5d} {A:7d} | {row['nodes']:6d} {row['merged']:6d} | {row['alone']:13d} | "
                  f"{packed:6.1f} {merged:7.1f} {alone:7.0f} | {row['ideal']:8.1f} "
                  f"{alone / packed:8.1f} {row['share']:6.2f} | {row['gap']:.1e}")  # fmt: skip
        if len(scoring) > 2:
            start, slope, fit = line_of(*zip(*scoring))
            figures[-1]["scoring_line"] = {"start_ms": start, "ms_per_node": slope, "r2": fit}
            print(f"{T:5d} scoring alone: {start:.1f} ms + {slope:.4f} ms a node, R^2 {fit:.4f}")
    nodes, merged = (sum(row[k] for row in figures) for k in ("nodes", "merged"))
    print(f"merging saved {100 * (1 - merged / nodes):.1f} % of all nodes")
    return {"rows": figures}


def _packed_and_alone(config, target, drafter, tokens, lengths, A, K, W) -> dict:
    T = tokens.shape[1]
    generator = torch.Generator().manual_seed(config.seed)
    anchors = torch.randperm(T - 1, generator=generator)[:A].sort().values[None].to(config.device)
    trunk = target.prefill(tokens, lengths)
    if drafter:
        branches = drafter.propose(trunk, anchors, K, Sampling(1.0), generator).tokens
    else:
        branches = torch.randint(0, target.num_tokens, (1, A, K, W), generator=generator)
        branches = branches.to(config.device)
    prefixes = [torch.cat([tokens[0, : a + 1], branch[: W - 1]])[None]
                for a, row in zip(anchors[0].tolist(), branches[0]) for branch in row]  # fmt: skip

    def packed(merge):
        tree = build_tree(tokens, lengths, anchors, branches, merge)
        return target.head(target.score(target.prefill(tokens, lengths), tree).hidden[..., :W, :])

    def alone():
        for prefix in prefixes:
            length = torch.tensor([prefix.shape[1]], device=config.device)
            target.head(target.prefill(prefix, length, tap_ids=()).hidden[:, -W:])

    trees = [build_tree(tokens, lengths, anchors, branches, merge) for merge in (False, True)]
    p = packed(True).softmax(-1)[0].flatten(0, 1)
    picked = range(0, A * K, max(1, A * K // 16))  # some branches, for the check
    gap = max((target(prefixes[i]).softmax(-1)[0, -W:] - p[i]).abs().max().item() for i in picked)
    runs = {"packed": lambda: packed(False), "merged": lambda: packed(True), "alone": alone,
            "scoring": lambda: target.score(trunk, trees[0])}  # fmt: skip
    times = {name: median_time(run, config.repeats, config.patience) for name, run in runs.items()}
    each = sum(prefix.shape[1] for prefix in prefixes)
    ideal = each / (T + trees[0].num_nodes)
    speed = times["alone"]["median"] / times["packed"]["median"]
    return {
        "trunk": T, "anchors": A, "nodes": trees[0].num_nodes, "merged": trees[1].num_nodes,
        "alone": each, "ideal": ideal, "share": speed / ideal, "gap": gap, "times": times,
    }  # fmt: skip


@torch.inference_mode()
def bench_replay(config: BenchConfig) -> dict:
    """Checkpoints every so many trunk tokens: what they hold, what replaying from them to all
    anchors costs, and what the whole pass over a tree then takes."""
    target, _ = load(config)
    if not target.config.hybrid:
        raise ValueError("replay needs a target with linear layers: --arch gdn, or --target FOLDER")
    T, A, W = config.trunk_length[0], config.num_anchors[0], config.num_draft_tokens
    tokens, lengths = text_of(config, target, T)
    generator = torch.Generator().manual_seed(config.seed)
    anchors = torch.randperm(T - 1, generator=generator)[:A].sort().values[None].to(config.device)
    branches = torch.randint(0, target.num_tokens, (1, A, 1, W), generator=generator)
    tree = build_tree(tokens, lengths, anchors, branches.to(config.device), merge=False)
    chosen = replay.spacing(target.config, target.lm_head.weight.element_size())
    print(f"trunk of {T}, {A} anchors, {tree.num_nodes} nodes, {torch.get_num_threads()} threads; "
          f"milliseconds, all linear layers\nspacing | states MB  tokens MB |  replay  scoring  "
          "prefill | largest gap of a state")  # fmt: skip
    exact, figures = None, []
    for every in sorted({1, 8, 16, chosen, 256, 1024, T + 1}):
        trunk = target.prefill(tokens, lengths, tap_ids=(), checkpoint_every=every)
        linear = [state for state in trunk.states if "u" in state]
        found = replay.replayed(linear[0], anchors)
        exact = found if exact is None else exact  # spacing 1: the state itself is kept
        runs = {
            "replay": lambda: [replay.replayed(state, anchors) for state in linear],  # noqa: B023
            "scoring": lambda: target.score(trunk, tree),  # noqa: B023
            "prefill": lambda: target.prefill(tokens, lengths, tap_ids=(), checkpoint_every=every),  # noqa: B023
        }
        times = {name: median_time(run, config.repeats) for name, run in runs.items()}
        held = sum(state["states"].nbytes for state in linear)
        each = sum(state[name].nbytes for state in linear for name in replay.PER_TOKEN)
        gap = (found - exact).abs().max().item()
        shown = "".join(f"{1e3 * t['median']:9.1f}" for t in times.values())
        note = "  the default" if every == chosen else ""
        print(f"{every:7d} | {held / 1e6:9.1f} {each / 1e6:10.1f} |{shown} | {gap:.1e}{note}")
        figures.append({"spacing": every, "states_bytes": held, "tokens_bytes": each, "gap": gap,
                        "times": times})  # fmt: skip
    return {"rows": figures, "default": chosen}


def bench_chains(config: BenchConfig) -> dict:
    """Several drafted chains per round against one, by how many tokens the target scores."""
    if not (config.target and config.drafter):
        raise ValueError("chains needs --target FOLDER and --drafter FOLDER")
    target, drafter = load(config)
    stop_ids = data.load_tokenizer(config.target).stop_ids
    prompts = held_out_prompts(config, config.num_prompts, config.prompt_length)
    print(f"{len(prompts)} prompts x {config.max_new_tokens} tokens, temperature 0\n"
          "chains  drafts each | tokens scored a round      AL   95 % interval")  # fmt: skip
    figures = []
    for K in (1, 2, 3, 4):
        for n in range(1, drafter.config.num_draft_tokens + 1):
            found = evaluate(
                target, drafter, prompts, config.max_new_tokens, 0.0, config.seed, stop_ids,
                num_branches=K, draft_length=n,
            )  # fmt: skip
            nodes = (found.nodes.sum() / found.rounds.sum()).item()
            low, high = found.interval()
            print(f"{K:6d} {n:12d} | {nodes:21.2f} {found.mean:7.3f}   [{low:.2f}, {high:.2f}]")
            figures.append({"chains": K, "drafts": n, "nodes": nodes, "al": found.mean,
                            "interval": (low, high)})  # fmt: skip
    return {"rows": figures}


class Clock:
    """Adds up the time spent in functions while they are replaced by timed ones (on a CPU nothing
    runs late)."""

    def __init__(self, parts: dict):
        self.seconds, self.saved = {}, []
        for label, (owner, name) in parts.items():
            self.saved.append((owner, name, getattr(owner, name)))
            setattr(owner, name, self._timed(getattr(owner, name), label))

    def _timed(self, function, label):
        @wraps(function)
        def timed(*args, **options):
            begin = time.perf_counter()
            result = function(*args, **options)
            self.seconds[label] = self.seconds.get(label, 0.0) + time.perf_counter() - begin
            return result

        return timed

    def restore(self):
        for owner, name, function in self.saved:
            setattr(owner, name, function)


def bench_decode(config: BenchConfig) -> dict:
    """Greedy, one prompt at a time, plain and speculative in turn; the texts must be the same."""
    if not (config.target and config.drafter):
        raise ValueError("decode needs --target FOLDER and --drafter FOLDER (train.py writes both)")
    target, drafter = load(config)
    stop_ids = data.load_tokenizer(config.target).stop_ids
    prompts = held_out_prompts(config, config.num_prompts, config.prompt_length)
    measure = Measure(prompts, config.max_new_tokens, stop_ids, config.seed)
    speeds = decoding_speed(target, drafter, measure, len(prompts))
    if not speeds["same_text"]:
        raise ValueError(
            "greedy speculative text differs from plain decoding: no speed-up is reported"
        )
    ratio = speeds["speculative"] / speeds["plain"]
    al = measure(target, drafter, 0.0)
    print(f"{config.num_prompts} prompts x {config.max_new_tokens} tokens, temperature 0, batch 1, "
          f"{config.device}, {torch.get_num_threads()} threads: the same text")  # fmt: skip
    print(f"plain {speeds['plain']:.1f} tokens/s, speculative {speeds['speculative']:.1f} tokens/s,"
          f" AL {al.mean:.3f}: {ratio:.2f} times as fast")  # fmt: skip
    parts = {
        "draft": (Drafter, "propose"), "tree": (serve, "build_tree"), "score": (Target, "score"),
        "verify": (serve, "verify"), "commit": (Target, "commit"),
        "drafter's memory": (Drafter, "extend"), "prefill": (Target, "prefill"),
    }  # fmt: skip
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


def bench_al(config: BenchConfig) -> dict:
    """AL of each drafter on each task at temperature 0 and 1, pooled within a task, the unweighted
    mean across tasks; the same prompts for all."""
    if not (config.target and config.drafters and config.tasks):
        raise ValueError("bench.py al needs --target, --drafters and --tasks")
    target = Target.from_pretrained(
        config.target, config.device, getattr(torch, config.dtype, None)
    )
    tokenizer = data.load_tokenizer(config.target)
    if len({Path(file).stem for file in config.tasks}) < len(config.tasks):
        raise ValueError("--tasks: a task goes by its file's name, and two are alike")
    prompts, figures = {}, {}
    for file in config.tasks:
        chats, size = data.read_prompts(file), (config.num_prompts, config.prompt_length)
        prompts[Path(file).stem] = data.draw_prompts(chats, tokenizer, *size, config.seed)
    for temperature in (0.0, 1.0):
        print(f"\nAL at temperature {temperature:g}, {config.max_new_tokens} tokens a prompt")
        print(" " * 24 + "".join(f"{task[:12]:>14s}" for task in (*prompts, "mean")))
        print("prompts".ljust(24) + "".join(f"{len(p):14d}" for p in prompts.values()))
        for folder in config.drafters:
            drafter = Drafter.from_pretrained(folder, target, target.lm_head.weight.dtype)
            found = {
                task: evaluate(target, drafter, asked, config.max_new_tokens, temperature,
                                     config.seed, tokenizer.stop_ids, progress=task)
                for task, asked in prompts.items()
            }  # fmt: skip
            row = {task: one.mean for task, one in found.items()}
            row["mean"] = sum(row.values()) / len(row)
            shown = "".join(f"{al:14.3f}" for al in row.values())
            print(f"{'/'.join(Path(folder).parts[-2:])[-23:]:24s}{shown}")
            survival = {task: one.survival for task, one in found.items()}
            figures.setdefault(folder, {})[f"t{temperature:g}"] = {"al": row, "survival": survival}
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
    kind = getattr(torch, config.dtype, None)
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
        return (lambda: serve.generate(ours, None, prompts.tolist(), n),
                lambda: theirs.generate(prompts, attention_mask=mask, **asked), B * n)  # fmt: skip

    def prefill(T):
        prompt, lengths = ids(1, T), torch.tensor([T], device=config.device)
        return (lambda: ours.head(ours.prefill(prompt, lengths, 64, ()).hidden[:, -1:]),
                lambda: theirs(prompt, use_cache=True, logits_to_keep=1), T)  # fmt: skip

    matrices = [m for m in ours.modules() if isinstance(m, torch.nn.Linear)]
    row = {m.in_features: torch.randn(1, 1, m.in_features, dtype=kind) for m in matrices}
    floor = median_time(lambda: [m(row[m.in_features]) for m in matrices], config.repeats)["low"]
    print(f"{kind}, {torch.get_num_threads()} threads; tokens/s, best of {config.repeats} [median]")
    print(f"every matrix once against one row: {1 / floor:.1f}")
    for name, (mine, other, tokens) in {
        "decode, 1 row": decode(1), "decode, 8 rows": decode(8),
        f"prefill of {config.trunk_length[0]:,}": prefill(config.trunk_length[0]),
    }.items():  # fmt: skip
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


COMMANDS = {"tree": bench_tree, "replay": bench_replay, "chains": bench_chains,
            "decode": bench_decode, "al": bench_al, "hf": bench_hf}  # fmt: skip


def main():
    command = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if command in ("-h", "--help"):
        files.parse_flags(BenchConfig, __doc__, ["--help"])
    if command not in COMMANDS:
        raise ValueError(f"bench.py {command}: there is {', '.join(COMMANDS)}")
    config = files.parse_flags(BenchConfig, __doc__, sys.argv[2:])
    figures = COMMANDS[command](config)
    path = Path(config.out) / "summary.json"
    before = files.read_json(path) if path.is_file() else {}
    files.write_json(path, before | {command: figures | {"config": dataclasses.asdict(config)}})


if __name__ == "__main__":
    sys.exit(files.exit_code(main))
