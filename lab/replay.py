"""Recurrent states kept at different spacings: memory, and the time to replay from them.

For each spacing of the checkpoints: the bytes of states and tokens, the seconds of replaying to all
anchors, of the pass over a tree and of the prefill, and the largest difference to a kept state.

    python -m lab replay --arch gdn --trunk-length 2048
    python -m lab replay --target FOLDER
    pytest tests/lab/test_commands.py
"""

from dataclasses import dataclass

import torch

from lab.common import LabConfig, long_text, median_time, open_target, random_anchors
from replay import PER_TOKEN, checkpoint_spacing, replay_states
from support.flags import flag
from target import TOYS
from tree import build_tree


@dataclass(frozen=True)
class Config(LabConfig):
    arch: str = flag("gdn", "without --target: the untrained toy's kind", choices=tuple(TOYS))
    trunk_length: int = flag(512, "tokens of the trunk", low=2)
    num_anchors: int = flag(64, "anchors on it", low=1)
    num_draft_tokens: int = flag(7, "tokens of a branch, one branch at each anchor", low=1)
    prompt_length: int = flag(64, "tokens of the prompt that the target continues", low=1)
    repeats: int = flag(7, "timed repeats", low=1)

    NEEDS = (
        ("arch", "no --target", lambda c: not c.target),
        ("prompt_length dtype", "--target", lambda c: c.target),
    )


def measure_spacing(target, tokens, tree, anchors, spacing: int, repeats: int) -> tuple:
    """Figures of one spacing, and the first linear layer's states at the anchors."""
    lengths = torch.tensor([tokens.shape[1]], device=tokens.device)

    def prefill():
        return target.prefill(tokens, lengths, tap_ids=(), checkpoint_every=spacing)

    trunk = prefill()
    linear = [state for state in trunk.states if "u" in state]
    runs = {
        "replay": lambda: [replay_states(state, anchors) for state in linear],
        "scoring": lambda: target.score(trunk, tree),
        "prefill": prefill,
    }
    figures = {
        "spacing": spacing,
        "states_bytes": sum(state["states"].nbytes for state in linear),
        "tokens_bytes": sum(state[name].nbytes for state in linear for name in PER_TOKEN),
        "times": {name: median_time(run, repeats) for name, run in runs.items()},
    }
    return figures, replay_states(linear[0], anchors)


@torch.inference_mode()
def run(config: Config) -> dict:
    T, A, W = config.trunk_length, config.num_anchors, config.num_draft_tokens
    anchors, generator = random_anchors(config, T, A)
    target = open_target(config)
    if not target.config.hybrid:
        raise ValueError("replay needs a target with linear layers: --arch gdn, or --target FOLDER")
    tokens = long_text(config, target, T)
    branches = torch.randint(0, target.num_tokens, (1, A, 1, W), generator=generator)
    lengths = torch.tensor([T], device=config.device)
    tree = build_tree(tokens, lengths, anchors, branches.to(config.device), merge=False)
    default = checkpoint_spacing(target.config, target.lm_head.weight.element_size())
    print(f"T = {T}, {A} anchors, {tree.num_nodes} nodes, {torch.get_num_threads()} threads; ms")
    print("spacing | states MB  tokens MB |  replay  scoring  prefill | largest gap of a state")
    rows, exact = [], None
    for spacing in sorted({1, 8, 16, default, 256, 1024, T + 1}):
        row, states = measure_spacing(target, tokens, tree, anchors, spacing, config.repeats)
        exact = states if exact is None else exact  # at spacing 1 the state itself is kept
        rows.append(row | {"gap": (states - exact).abs().max().item()})
        megabytes = f"{row['states_bytes'] / 1e6:9.1f} {row['tokens_bytes'] / 1e6:10.1f}"
        ms = "".join(f"{1e3 * times['median']:9.1f}" for times in row["times"].values())
        note = "  the default" if spacing == default else ""
        print(f"{spacing:7d} | {megabytes} |{ms} | {rows[-1]['gap']:.1e}{note}")
    return {"rows": rows, "default": default}
