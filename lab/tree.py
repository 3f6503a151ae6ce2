"""Score branches packed on their trunk, and each branch alone with its whole prefix.

For every trunk length and number of anchors: one prefill and one pass over the tree, without and
with merging, against one run per branch. Beside the times stands the largest difference of p
between packed and alone; with three or more numbers of anchors, the cost of one more node.

    python -m lab tree --target FOLDER --drafter FOLDER --trunk-length 512 1024 --num-anchors 16 64
    python -m lab tree --arch gdn          (an untrained toy, random branches)
    pytest tests/lab/test_commands.py
"""

from dataclasses import dataclass

import numpy
import torch
from torch import Tensor

from drafter import Drafter, Sampling
from lab.common import (
    LabConfig,
    long_text,
    median_time,
    open_drafter,
    open_target,
    random_anchors,
    require,
)
from support.flags import flag
from target import TOYS, Target
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
    patience: float = flag(30.0, "seconds after which a time is not repeated", low=0)


@dataclass
class Case:
    """Branches at some anchors of one text, and the ways to score them."""

    target: Target
    tokens: Tensor  # (1, T)
    anchors: Tensor  # (1, A)
    branches: Tensor  # (1, A, K, W)

    def __post_init__(self):
        self.lengths = torch.tensor([self.tokens.shape[1]], device=self.tokens.device)
        W = self.branches.shape[-1]
        self.prefixes = [
            torch.cat([self.tokens[0, : anchor + 1], branch[: W - 1]])[None]
            for anchor, branches in zip(self.anchors[0].tolist(), self.branches[0])
            for branch in branches
        ]

    def tree(self, merge: bool):
        return build_tree(self.tokens, self.lengths, self.anchors, self.branches, merge)

    def packed(self, merge: bool) -> Tensor:
        """Logits (1,A,K,W,V) of all branches by one prefill and one pass over the tree."""
        tree = self.tree(merge)
        trunk = self.target.prefill(self.tokens, self.lengths)
        scored = self.target.score(trunk, tree)
        return self.target.head(scored.hidden[..., : self.branches.shape[-1], :])

    def alone(self) -> None:
        """Logits of the same positions by one run for each branch."""
        W = self.branches.shape[-1]
        for prefix in self.prefixes:
            lengths = torch.tensor([prefix.shape[1]], device=prefix.device)
            self.target.head(self.target.prefill(prefix, lengths, tap_ids=()).hidden[:, -W:])

    def largest_gap(self) -> float:
        """The largest difference of p between packed and alone, over some of the branches."""
        W = self.branches.shape[-1]
        p = self.packed(merge=True).softmax(-1)[0].flatten(0, 1)  # (A*K, W, V)
        gaps = []
        for number in range(0, len(p), max(1, len(p) // 16)):
            p_alone = self.target(self.prefixes[number]).softmax(-1)[0, -W:]
            gaps.append((p_alone - p[number]).abs().max().item())
        return max(gaps)


def make_case(config: Config, target, drafter: Drafter | None, tokens, num_anchors: int) -> Case:
    """Hang branches at random anchors: the drafter's, or random tokens."""
    anchors, generator = random_anchors(config, tokens.shape[1], num_anchors)
    K = config.num_branches
    if drafter:
        lengths = torch.tensor([tokens.shape[1]], device=tokens.device)
        trunk = target.prefill(tokens, lengths, tap_ids=drafter.config.target_layer_ids)
        branches = drafter.propose(trunk, anchors, K, Sampling(1.0), generator).tokens
    else:
        shape = (1, num_anchors, K, config.num_draft_tokens)
        branches = torch.randint(0, target.num_tokens, shape, generator=generator)
    return Case(target, tokens, anchors, branches.to(config.device))


def measure_case(config: Config, case: Case) -> dict:
    """Sizes, times and the gap of one case."""
    trunk = case.target.prefill(case.tokens, case.lengths)
    tree = case.tree(merge=False)
    runs = {
        "packed": lambda: case.packed(merge=False),
        "merged": lambda: case.packed(merge=True),
        "alone": case.alone,
        "scoring": lambda: case.target.score(trunk, tree),
    }
    times = {name: median_time(run, config.repeats, config.patience) for name, run in runs.items()}
    tokens_alone = sum(prefix.shape[1] for prefix in case.prefixes)
    ideal = tokens_alone / (case.tokens.shape[1] + tree.num_nodes)
    speed = times["alone"]["median"] / times["packed"]["median"]
    return {
        "trunk": case.tokens.shape[1],
        "anchors": case.anchors.shape[1],
        "nodes": tree.num_nodes,
        "merged": case.tree(merge=True).num_nodes,
        "alone": tokens_alone,
        "ideal": ideal,
        "share": speed / ideal,
        "gap": case.largest_gap(),
        "times": times,
    }


def print_row(row: dict) -> None:
    ms = {name: 1e3 * times["median"] for name, times in row["times"].items()}
    print(
        f"{row['trunk']:5d} {row['anchors']:7d} | {row['nodes']:6d} {row['merged']:6d} | "
        f"{row['alone']:13d} | {ms['packed']:6.1f} {ms['merged']:7.1f} {ms['alone']:7.0f} | "
        f"{row['ideal']:8.1f} {ms['alone'] / ms['packed']:8.1f} {row['share']:6.2f} | "
        f"{row['gap']:.1e}"
    )


def scoring_line(rows: list[dict]) -> dict:
    """The straight line through the times of scoring, over the number of nodes."""
    nodes = [row["nodes"] for row in rows]
    ms = [1e3 * row["times"]["scoring"]["median"] for row in rows]
    slope, start = numpy.polyfit(nodes, ms, 1).tolist()
    r2 = numpy.corrcoef(nodes, ms)[0, 1].item() ** 2
    return {"start_ms": start, "ms_per_node": slope, "r2": r2}


@torch.inference_mode()
def run(config: Config) -> dict:
    if config.drafter:
        require(config, "target")
    random_anchors(config, min(config.trunk_length), max(config.num_anchors))  # or stop at once
    target = open_target(config)
    drafter = open_drafter(config.drafter, target) if config.drafter else None
    text = long_text(config, target, max(config.trunk_length))
    W = drafter.config.num_draft_tokens if drafter else config.num_draft_tokens
    print(
        f"{config.target or f'untrained {config.arch}'}, {config.device}, "
        f"{torch.get_num_threads()} threads, seed {config.seed}; branches of {W}, "
        f"{config.num_branches} an anchor; milliseconds\n"
        "trunk anchors |  nodes merged |  tokens alone | packed  merged   alone | "
        "x tokens  x speed  share | gap of p"
    )
    rows = []
    for T in config.trunk_length:
        for A in config.num_anchors:
            rows.append(measure_case(config, make_case(config, target, drafter, text[:, :T], A)))
            print_row(rows[-1])
        if len(config.num_anchors) > 2:
            line = scoring_line(rows[-len(config.num_anchors) :])
            rows[-1]["scoring_line"] = line
            print(
                f"{T:5d} scoring alone: {line['start_ms']:.1f} ms + {line['ms_per_node']:.4f} ms "
                f"a node, R^2 {line['r2']:.4f}"
            )
    nodes = sum(row["nodes"] for row in rows)
    if nodes:  # blocks of one draft have none
        saved = 1 - sum(row["merged"] for row in rows) / nodes
        print(f"merging saved {100 * saved:.1f} % of all nodes")
    return {"rows": rows}
