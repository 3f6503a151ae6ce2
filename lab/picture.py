"""The proposal tree of tree.py's lesson and its mask, drawn for the README.

Left: every token under its position, and the route of each branch through the tree. Right: what
each node sees of the trunk and of other nodes.

    python -m lab picture          -> docs/pictures/tree.png
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from lab.common import new_figure
from support.flags import flag
from tree import lesson_tree

COLOURS = ("#1f77b4", "#d95f02", "#2ca02c")  # of the branches


@dataclass(frozen=True)
class Config:
    out: str = flag("docs/pictures", "folder for tree.png")


def node_places(tree, branches) -> tuple[list, list]:
    """Where nodes and the last token of each branch stand, as (x, y, token), and the route of each
    branch, as packed indices. A token's first child stays in its row, others begin a row."""
    T, W = tree.num_trunk_slots, branches.shape[-1]
    slots = tree.p_index[0, :, 0, :W]  # (A, W) the packed indices that give p_1..p_W
    parents = torch.cat([tree.parents[0], slots[:, -1]]).tolist()
    positions = torch.cat([tree.positions[0], tree.positions[0, slots[:, -1] - T] + 1]).tolist()
    tokens = torch.cat([tree.tokens[0], branches[0, :, 0, -1]]).tolist()
    rows, with_child = [], set()
    for parent in parents:
        continues = parent >= T and parent not in with_child
        rows.append(rows[parent - T] if continues else max(rows, default=0) + 1)
        with_child.add(parent)
    # the branches that leave last stand nearest to the trunk, so that no lines cross
    rows = [max(rows) + 1 - row for row in rows]
    last = T + tree.num_nodes
    routes = [[*route, last + number] for number, route in enumerate(slots.tolist())]
    return list(zip(positions, rows, tokens)), routes


def draw_tree(axis, trunk, anchors, tree, branches) -> None:
    tokens, routes = node_places(tree, branches)
    T = len(trunk[0])
    dots = [(x, 0, token) for x, token in enumerate(trunk[0].tolist())] + tokens
    axis.plot([0, T - 1], [0, 0], color="#999999", linewidth=1.2, zorder=1)
    for number, (route, colour) in enumerate(zip(routes, COLOURS)):
        shift = 0.09 * (number - 1)  # branches that share nodes run side by side
        xs, ys = zip(*((dots[slot][0], dots[slot][1] + shift) for slot in route))
        label = f"at {anchors[0, number]}: {' '.join(map(str, branches[0, number, 0].tolist()))}"
        axis.plot(xs, ys, color=colour, linewidth=2.2, zorder=2, label=label)
    last = int(anchors.max())
    label = f"at {last}: the text, too"
    style = dict(color="#7a5195", linewidth=2.2, linestyle=":", label=label)
    axis.plot([last, last + branches.shape[-1]], [-0.3, -0.3], **style)
    for number, (x, y, token) in enumerate(dots):
        style = {"facecolor": "#e6e6e6" if number < T else "white", "edgecolor": "#333333"}
        style["linewidth"] = 2.4 if number < T and x in anchors else 1.0
        style["linestyle"] = ":" if number >= len(dots) - len(routes) else "-"
        axis.scatter(x, y, s=330, zorder=3, **style)
        axis.text(x, y, token, ha="center", va="center", fontsize=9.5, zorder=4)
    for x in sorted(set(anchors[0].tolist())):
        axis.text(x, -0.52, "anchor", ha="center", fontsize=9)
    axis.set(xlim=(-0.6, T - 0.4), ylim=(max(y for _, y, _ in dots) + 0.6, -0.95))
    axis.set(xticks=range(T), yticks=[], xlabel="position")
    axis.spines[["left", "right", "top"]].set_visible(False)
    axis.legend(loc="lower left", fontsize=9, frameon=False)
    axis.set_title("the tree: trunk grey, nodes white, dotted tokens need no node", fontsize=10.5)


def draw_mask(axis, trunk, tree) -> None:
    T, N = tree.num_trunk_slots, tree.num_nodes
    nodes = tree.tokens[0].tolist()
    shades = tree.view().mask[0, 0].float()  # (N, T+N)
    shades[:, :T] *= 0.45
    axis.imshow(shades.numpy(), cmap="Blues", vmin=0, vmax=1.15, aspect="equal")
    axis.set_xticks(range(T + N), [*trunk[0].tolist(), *nodes], fontsize=9)
    axis.set_yticks(range(N), nodes, fontsize=9)
    axis.set_xticks([x - 0.5 for x in range(T + N)], minor=True)
    axis.set_yticks([y - 0.5 for y in range(N)], minor=True)
    axis.grid(which="minor", color="#bbbbbb", linewidth=0.6)
    axis.tick_params(which="both", length=0)
    axis.axvline(T - 0.5, color="#333333", linewidth=1.6)
    axis.set(xlabel="sees: trunk tokens | nodes", ylabel="node")
    axis.set_title("the mask: each node sees its own history", fontsize=10.5)


def run(config: Config) -> None:
    trunk, anchors, branches, tree = lesson_tree(merge=True)
    figure, axes = new_figure(2, (10.5, 3.3), width_ratios=(1.15, 1))
    draw_tree(axes[0], trunk, anchors, tree, branches)
    draw_mask(axes[1], trunk, tree)
    path = Path(config.out) / "tree.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    print(path)
