"""Branches scored packed on their trunk, against each one alone with its whole prefix.

One prefill and one pass over the tree, without and with merging, against one run per branch, and
the largest difference of p. With three or more numbers of anchors, the cost of one more node.

    python -m lab tree --target FOLDER --drafter FOLDER --trunk-length 512 1024 --num-anchors 16 64
    python -m lab tree --arch gdn          (an untrained toy, random branches)
    pytest tests/lab/test_commands.py
"""

from dataclasses import dataclass

import numpy
import torch
from torch import Tensor

from drafter import PLAIN, Drafter
from lab.common import LabConfig, long_text, median_time, open_pair, open_target, random_anchors
from support.flags import flag
from target import TOYS
from tree import build_tree


@dataclass(frozen=True)
class Config(LabConfig):
    drafter: str = flag("", "a drafter's folder; empty: branches are random tokens")
    arch: str = flag("gqa", "without --target: the untrained toy's kind", choices=tuple(TOYS))
    trunk_length: tuple = flag((512,), "tokens of the trunk", kind=int, low=2)
    num_anchors: tuple = flag((64,), "anchors on it", kind=int, low=1)
    num_branches: int = flag(1, "branches per anchor", low=1)
    num_draft_tokens: int = flag(7, "without --drafter: tokens of a branch", low=1)
    prompt_length: int = flag(64, "tokens of the prompt that the target continues", low=1)
    repeats: int = flag(7, "timed repeats", low=1)

    NEEDS = (
        ("arch", "no --target", lambda c: not c.target),
        ("prompt_length dtype", "--target", lambda c: c.target),
        ("num_draft_tokens", "no --drafter", lambda c: not c.drafter),
    )


def draw_branches(config: Config, target, drafter: Drafter | None, tokens, anchors, generator):
    """Branches (1,A,K,W) at anchors (1,A) of a text: the drafter's, or random tokens."""
    K, W = config.num_branches, config.num_draft_tokens
    if drafter is None:
        shape = (*anchors.shape, K, W)
        return torch.randint(0, target.num_tokens, shape, generator=generator).to(config.device)
    lengths = torch.tensor([tokens.shape[1]], device=tokens.device)
    trunk = target.prefill(tokens, lengths, tap_ids=drafter.config.target_layer_ids)
    return drafter.propose(trunk, anchors, K, PLAIN, generator).tokens


def measure_case(config: Config, target, tokens, anchors, branches) -> dict:
    """Sizes, times and the gap of p for branches (1,A,K,W) at anchors (1,A) of a text (1,T)."""
    T, W = tokens.shape[1], branches.shape[-1]
    lengths = torch.tensor([T], device=tokens.device)
    rows = zip(anchors[0].repeat_interleave(config.num_branches), branches[0].flatten(0, 1))
    prefixes = [torch.cat([tokens[0, : a + 1], branch[: W - 1]])[None] for a, branch in rows]

    def grow(merge: bool):
        return build_tree(tokens, lengths, anchors, branches, merge)

    def packed(merge: bool) -> Tensor:
        scored = target.score(target.prefill(tokens, lengths), grow(merge))
        return target.head(scored.hidden[..., :W, :])

    def alone() -> None:
        for prefix in prefixes:
            length = torch.tensor([prefix.shape[1]], device=prefix.device)
            target.head(target.prefill(prefix, length, tap_ids=()).hidden[:, -W:])

    trunk, tree = target.prefill(tokens, lengths), grow(merge=False)
    runs = {
        "packed": lambda: packed(merge=False),
        "merged": lambda: packed(merge=True),
        "alone": alone,
        "scoring": lambda: target.score(trunk, tree),
    }
    times = {name: median_time(run, config.repeats) for name, run in runs.items()}
    p = packed(merge=True).softmax(-1)[0].flatten(0, 1)  # (A*K, W, V)
    some = range(0, len(prefixes), max(1, len(prefixes) // 16))  # branches whose p is compared
    gaps = [(target(prefixes[i]).softmax(-1)[0, -W:] - p[i]).abs().max().item() for i in some]
    tokens_alone = sum(prefix.shape[1] for prefix in prefixes)
    ideal = tokens_alone / (T + tree.num_nodes)
    share = times["alone"]["median"] / times["packed"]["median"] / ideal
    row = {"trunk": T, "anchors": anchors.shape[1], "nodes": tree.num_nodes}
    row |= {"merged": grow(merge=True).num_nodes, "alone": tokens_alone, "ideal": ideal}
    return row | {"share": share, "gap": max(gaps), "times": times}


def scoring_line(rows: list[dict]) -> dict:
    """The straight line through the times of scoring, over the number of nodes."""
    nodes = [row["nodes"] for row in rows]
    ms = [1e3 * row["times"]["scoring"]["median"] for row in rows]
    slope, start = numpy.polyfit(nodes, ms, 1).tolist()
    r2 = numpy.corrcoef(nodes, ms)[0, 1].item() ** 2
    line = f"{start:.1f} ms + {slope:.4f} ms a node, R^2 {r2:.4f}"
    print(f"{rows[0]['trunk']:5d} scoring alone: {line}")
    return {"start_ms": start, "ms_per_node": slope, "r2": r2}


@torch.inference_mode()
def run(config: Config) -> dict:
    random_anchors(config, min(config.trunk_length), max(config.num_anchors))  # too many: an error
    target, drafter = open_pair(config) if config.drafter else (open_target(config), None)
    text = long_text(config, target, max(config.trunk_length))
    W = drafter.config.num_draft_tokens if drafter else config.num_draft_tokens
    title = f"{config.target or f'untrained {config.arch}'}, seed {config.seed}, {config.device}"
    print(f"{title}, {torch.get_num_threads()} threads; branches of {W}; milliseconds")
    title = "trunk anchors |  nodes merged |  tokens alone | packed  merged   alone"
    print(f"{title} | x tokens  x speed  share | gap of p")
    rows = []
    for T in config.trunk_length:
        for A in config.num_anchors:
            anchors, generator = random_anchors(config, T, A)
            tokens = text[:, :T]
            branches = draw_branches(config, target, drafter, tokens, anchors, generator)
            row = measure_case(config, target, tokens, anchors, branches)
            rows.append(row)
            ms = {name: 1e3 * times["median"] for name, times in row["times"].items()}
            sizes = "{trunk:5d} {anchors:7d} | {nodes:6d} {merged:6d} | {alone:13d}".format(**row)
            times = "{packed:6.1f} {merged:7.1f} {alone:7.0f}".format(**ms)
            ratios = f"{row['ideal']:8.1f} {ms['alone'] / ms['packed']:8.1f} {row['share']:6.2f}"
            print(f"{sizes} | {times} | {ratios} | {row['gap']:.1e}")
        if len(config.num_anchors) > 2:
            rows[-1]["scoring_line"] = scoring_line(rows[-len(config.num_anchors) :])
    nodes = sum(row["nodes"] for row in rows)
    if nodes:  # blocks of one draft have none
        saved = 1 - sum(row["merged"] for row in rows) / nodes
        print(f"merging saved {100 * saved:.1f} % of all nodes")
    return {"rows": rows}
