"""One page that shows a decoding run, or a training step, token by token and number by number.

With --target a prompt is decoded: accepted drafts, rejected drafts and the target's own tokens, and
behind each token its p, q and uniform. Without, it is the step of `train.py --lesson`: the tree,
the mask, and p, q, alpha and survival of every draft. All numbers are the run's own, told by it
while it runs. The page is lab/trace.html with the numbers inside; it needs no server and nothing
from elsewhere.

    python -m lab trace --target runs/toy/target --drafter runs/toy/specopd \\
        --prompt "def main(" --max-new-tokens 120 --out run.html
    python -m lab trace --num-anchors 4 --num-branches 3 --seed 15 --out step.html
    pytest tests/lab/test_trace.py

These two are the pages of docs/pictures, drawn by
`chromium --headless --window-size=1280,900 --screenshot=run.png run.html`.
"""

import json
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from drafter import PLAIN, Proposal, Sampling
from hf import load_tokenizer
from hf.tokenizer import Tokenizer
from lab.common import LabConfig, open_pair
from loss import Blocks, acceptance, step_loss, survival
from serve import Result, generate, residual
from support.flags import TEMPLATE_ARGS, flag
from target import Scored, Target, Trunk
from train import branch_probs, lesson_step, objective_of
from tree import ProposalTree, build_tree

TEMPLATE = Path(__file__).with_name("trace.html")
DATA = "/* data */"  # its place in the template
NUM_LIKELIEST = 5  # the whole vocabulary would not fit


@dataclass(frozen=True)
class Config(LabConfig):
    out: str = flag("runs/trace.html", "the page to write")
    seed: int = flag(3, "of everything drawn")
    drafter: str = flag("", "a drafter's folder")
    prompt: str = flag("", "the text to continue")
    max_new_tokens: int = flag(200, "tokens to generate", low=1)
    temperature: float = flag(1.0, "0 is greedy", low=0)
    top_k: int = flag(0, "sample among the k likeliest tokens only; 0 is off", low=0)
    top_p: float = flag(1.0, "sample among the likeliest that make up this share; 1 is off")
    draft_length: int = flag(0, "drafts verified per round; 0: all", low=0)
    chat_template_args: str = flag("", TEMPLATE_ARGS)
    num_anchors: int = flag(3, "anchors of the training step", low=1)
    num_branches: int = flag(2, "branches proposed per anchor, one of them greedy", low=2)

    NEEDS = (
        (
            "drafter prompt max_new_tokens temperature draft_length chat_template_args device "
            "dtype",
            "--target",
            lambda c: c.target,
        ),
        ("top_k top_p", "--target and --temperature above 0", lambda c: c.target and c.temperature),
        ("num_anchors num_branches", "no --target", lambda c: not c.target),
    )


# ---------------------------------------------------------------------------------- one slot's data


def short(x: float) -> float:
    """Six digits are enough to read."""
    return float(f"{x:.6g}")


def likeliest(y: int, p: Tensor, q: Tensor | None = None) -> list[list]:
    """The likeliest ids of p (V,), those of q (V,), and y, the largest p first: [id, p, q] each;
    without q, [id, p]."""
    distributions = [p] if q is None else [p, q]
    tops = [probs.topk(min(NUM_LIKELIEST, len(probs))).indices.tolist() for probs in distributions]
    ids = {y}.union(*tops)
    rows = [[i, *(short(probs[i].item()) for probs in distributions)] for i in ids]
    return sorted(rows, key=lambda row: row[1:], reverse=True)


def slot(y: int, p: Tensor, q: Tensor) -> dict:
    """What the page shows of a draft y that was proposed by q (V,) and is judged by p (V,)."""
    p_y, q_y = p[y].item(), q[y].item()
    chance = 1.0 if p_y >= q_y else p_y / q_y  # min(1, p/q), where q may be 0
    numbers = {"p": p_y, "q": q_y, "chance": chance, "alpha": acceptance(p, q).item()}
    numbers = {name: short(x) for name, x in numbers.items()}
    return {"y": y, "likeliest": likeliest(y, p, q)} | numbers


# ------------------------------------------------------------------------------------- decoding run


@dataclass
class Trace:
    """Watches `serve.generate` decode one prompt: what each round proposed, and how each draft was
    judged. It is told hidden states and runs the heads on them once more. At temperature 0 the
    run's p and q are one-hot; then those of temperature 1 are shown, of the same logits."""

    target: Target
    sampling: Sampling
    rounds: list[dict] = field(default_factory=list)
    q: Tensor | None = None  # (W, V) of the round; None: nothing was proposed

    def start(self, trunk: Trunk) -> None:
        """Nothing was proposed yet."""

    def draft(self, proposal: Proposal) -> None:
        if self.sampling.temperature == 0:
            q = PLAIN.probs(proposal.drafter.logits(proposal.hidden, proposal.previous))
        else:
            q = proposal.q_probs
        self.q = q[0, 0, 0].cpu()

    def round(
        self,
        alive: list[int],
        anchors: Tensor,
        drafts: Tensor,
        scored: Scored,
        path: Tensor,
        token: Tensor,
        noise: Tensor | None,
    ) -> None:
        """drafts (1,n), path (1,n+1) of the commit, token (1,) after it, noise (1,2W+1)."""
        is_greedy = self.sampling.temperature == 0
        shown = PLAIN if is_greedy else self.sampling
        p = shown.probs(self.target.head(scored.hidden[0, 0, 0])).cpu()  # (n+1, V)
        slots = [slot(y, p[k], self.q[k]) for k, y in enumerate(drafts[0].tolist())]
        num_accepted = int((path[0] >= 0).sum()) - 1
        own = {"y": token.item(), "from": "argmax"}
        rest = p[num_accepted]
        if not is_greedy:
            *uniforms, own["u"] = map(short, noise[0, noise.shape[1] // 2 :].tolist())
            for its_slot, u in zip(slots, uniforms):
                its_slot["u"] = u
            own["from"] = "p"
            if num_accepted < len(slots):
                own["from"] = "residual"
                rest = residual(rest, self.q[num_accepted])
                rest = rest / rest.sum()
        own["likeliest"] = likeliest(own["y"], rest)
        row = {"anchor": anchors.item(), "slots": slots, "accepted": num_accepted, "own": own}
        self.rounds.append(row)
        self.q = None

    def finish(self, result: Result) -> None:
        """Say of each round how many tokens count as committed, and how many the text shows: in the
        last round, these end with a stop token or the text's length."""
        committed, shown = result.num_committed, len(result.tokens) - 1
        for row in self.rounds:
            row["committed"] = min(row["accepted"] + 1, committed)
            row["shown"] = min(row["accepted"] + 1, shown)
            committed -= row["committed"]
            shown -= row["shown"]

    def ids(self) -> set[int]:
        """All token ids that the rounds name."""
        parts = [part for row in self.rounds for part in (*row["slots"], row["own"])]
        return {i for part in parts for i in (part["y"], *(r[0] for r in part["likeliest"]))}


def piece(tokenizer: Tokenizer, token_id: int) -> str:
    r"""A token's text. A byte that is no whole character is written as \xe2."""
    data = tokenizer.bytes_of([token_id])  # of an id without a token: nothing
    return data.decode(errors="backslashreplace") if data else f"<{token_id}>"


def decoding_data(config: Config) -> dict:
    """Decode the prompt and return what the page shows."""
    if not config.prompt:
        raise ValueError("nothing to continue: give --prompt TEXT")
    target, drafter = open_pair(config)
    tokenizer = load_tokenizer(config.target, config.chat_template_args)
    drafter.config.check(target, tokenizer, f"{config.drafter}/config.json")
    text = tokenizer.chat([{"role": "user", "content": config.prompt}])
    sampling = Sampling(config.temperature, config.top_k, config.top_p)
    trace = Trace(target, sampling)
    (result,) = generate(
        target,
        drafter,
        [tokenizer.encode(text)],
        config.max_new_tokens,
        sampling,
        config.seed,
        tokenizer.stop_ids,
        draft_length=config.draft_length,
        watch=trace,
    )
    trace.finish(result)
    first = result.tokens[0]
    names = {"target": config.target, "drafter": config.drafter, "temperature": config.temperature}
    return names | {
        "kind": "decoding",
        "prompt": text,
        "first": first,
        "rounds": trace.rounds,
        "finish": result.finish_reason,
        "pieces": {i: piece(tokenizer, i) for i in sorted(trace.ids() | {first})},
    }


# ------------------------------------------------------------------------------------ training step


def tree_of(blocks: Blocks) -> ProposalTree:
    """The tree of a step's branches. Those of text lie on the trunk and add no node."""
    trunk = blocks.trunk
    branches = torch.where(blocks.valid, blocks.tokens, -1)
    tree = build_tree(trunk.tokens, trunk.lengths, blocks.anchors, branches)
    assert tree.num_nodes == blocks.counts["nodes"]
    return tree


def place_tokens(trunk: list[int], tree: ProposalTree, branches: list[dict]) -> list[dict]:
    """All tokens of trunk and branches as dots: first the packed index's, then drafts that need no
    node. Gives each branch its route, the dots of its anchor and of its drafts."""
    T = len(trunk)
    dots = [{"y": y, "x": x, "parent": x - 1, "kind": "trunk"} for x, y in enumerate(trunk)]
    nodes = (tree.tokens[0].tolist(), tree.positions[0].tolist(), tree.parents[0].tolist())
    for y, x, parent in list(zip(*nodes))[: tree.num_nodes]:
        dots.append({"y": y, "x": x, "parent": parent, "kind": "node"})
    leaves = {}
    for branch in branches:
        route = branch["route"]  # where p_1, p_2, ... come from; the last draft is missing
        last, y = route[-1], branch["slots"][-1]["y"]
        on_trunk = last + 1 < T and trunk[last + 1] == y
        if not on_trunk and (last, y) not in leaves:
            leaves[last, y] = len(dots)
            dots.append({"y": y, "x": dots[last]["x"] + 1, "parent": last, "kind": "leaf"})
        route.append(last + 1 if on_trunk else leaves[last, y])
    _give_rows(dots, T)
    return dots


def _give_rows(dots: list[dict], T: int) -> None:
    """A dot's first child stays in its row, others begin a row below. The branches that leave the
    trunk last hang nearest to it, so that no lines cross."""
    children = defaultdict(list)
    for number, dot in enumerate(dots):
        dot["row"] = 0
        if number >= T:
            children[dot["parent"]].append(number)

    def place(number: int, row: int) -> int:
        """Place a dot and all behind it -> the last row that they take."""
        dots[number]["row"] = row
        for i, child in enumerate(children[number]):
            row = place(child, row if i == 0 else row + 1)
        return row

    row = 0
    for position in reversed(range(T)):
        for child in children[position]:
            row = place(child, row + 1)


def step_data(config: Config) -> dict:
    """The blocks of a training step, as the page shows them."""
    train_config, drafter, blocks = lesson_step(
        config.num_anchors, config.num_branches, config.seed
    )
    tree = tree_of(blocks)
    trunk = blocks.trunk.tokens[0].tolist()
    kinds = ["greedy", *["drawn"] * (config.num_branches - 1), "text"]
    branches = []
    for a, anchor in enumerate(blocks.anchors[0].tolist()):
        for k, kind in enumerate(kinds):
            p, q = branch_probs(drafter, blocks, a, k)
            count = int(blocks.valid[0, a, k].sum())
            slots = [slot(y, p[j], q[j]) for j, y in enumerate(blocks.tokens[0, a, k].tolist())]
            for j, s in enumerate(survival(acceptance(p, q)).tolist()):
                slots[j]["survival"] = short(s)
            route = tree.p_index[0, a, k, :count].tolist()
            branches.append(
                {"anchor": anchor, "kind": kind, "slots": slots[:count], "route": route}
            )
    loss, _ = step_loss(drafter, blocks, objective_of(train_config, drafter))
    visible = tree.view().mask[0, 0, : tree.num_nodes].int().tolist()
    return {
        "kind": "step",
        "dots": place_tokens(trunk, tree, branches),
        "branches": branches,
        "num_trunk": len(trunk),
        "mask": ["".join(map(str, row)) for row in visible],
        "loss": short(loss.item()),
        "unmerged": int(blocks.counts["unmerged"]),
        "pieces": {},  # these tokens have no text
    }


# --------------------------------------------------------------------------------------------- page


def page(data: dict) -> str:
    """The template with the data inside."""
    # a "<" in a text could end the script that the data stand in
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return TEMPLATE.read_text(encoding="utf-8").replace(DATA, text)


def run(config: Config) -> None:
    text = page(decoding_data(config) if config.target else step_data(config))
    path = Path(config.out)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    print(f"{path}, {len(text.encode()) / 1000:.0f} kB: open it in a browser")
