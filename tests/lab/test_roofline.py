"""What the cost model notes, against hand arithmetic and the same step with numbers. `pytest
tests/lab/test_roofline.py`"""

import dataclasses
from collections import Counter

import pytest
import torch

from drafter import drafter_class
from lab import roofline
from lab.roofline import GPUS, Config, Machine, Notes, Operator, Parts, Work, cost, note_phases
from small import ARCHS, small_drafter, small_target
from target import Target

pytestmark = pytest.mark.slow

MACHINE = Machine({2: 2e9, 4: 1e9}, bandwidth=1e6, launch=1.0, gib=80)
SIZES = dict(mode="specopd", prompt_length=20, response_length=20, batch_size=2, num_anchors=3)


def works(arch: str) -> tuple[Work, Work]:
    """The same small work with numbers and without."""
    config = Config(**SIZES)
    target = small_target(arch=arch)
    drafter = small_drafter(target)
    with torch.device("meta"):
        ghost = Target(target.config).requires_grad_(False)
        ghost.num_tokens = target.num_tokens
        ghost_drafter = drafter_class(drafter.config)(drafter.config, ghost)
    return Work(config, target, drafter), Work(config, ghost, ghost_drafter)


def noted(work: Work) -> dict[str, Counter]:
    parts = Parts()
    notes = Notes(parts)
    with notes, parts.watching(work.target, work.drafter):
        work.specopd(parts)
    return notes.counts


def flop_in(operators: Counter) -> int:
    return sum(op.flop * count for op, count in operators.items())


@pytest.mark.parametrize("arch", ARCHS)
def test_a_step_without_numbers_has_the_flop_of_one_with_numbers(arch):
    work, ghost = works(arch)
    seen = noted(work)
    cpu = Machine({2: 1.0, 4: 1.0}, 1.0, 1.0, 80, overlaps=False)
    phases = note_phases(ghost, cpu, rounds=3)
    for part in ("prefill", "draft", "draw", "head and loss", "backward", "optimizer"):
        assert flop_in(phases["SpecOPD step"][part]) == flop_in(seen[part]) > 0, part
        counts = phases["SpecOPD step"][part].total(), seen[part].total()
        assert counts[0] == pytest.approx(counts[1], rel=0.1, abs=3), part
    scored = flop_in(phases["SpecOPD step"]["score"])  # other drafts merge
    assert scored == pytest.approx(flop_in(seen["score"]), rel=0.15)
    assert {"draft", "draw", "score", "verify", "commit"} <= phases["rollout: one round"].keys()
    assert phases["rollout: learning"]["backward"] and phases["rollout: prefill"]["prefill"]


def test_the_8b_prefill_by_hand():
    config = Config(**SIZES | dict(target="8B", prompt_length=96, response_length=32, batch_size=1))
    target, drafter = roofline.plan.build_on_meta(config)
    parts = Parts()
    notes = Notes(parts, ghost=True)
    with roofline.without_numbers(GPUS["h100"]), notes, parts.watching(target, drafter):
        target.prefill(torch.zeros(1, 128, dtype=torch.long), torch.tensor([128]))
    layer = 2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 4096 * 12288
    assert flop_in(notes.counts["prefill"]) == 2 * 128 * 36 * layer
    assert flop_in(notes.counts["attention"]) == 4 * 36 * 128 * 128 * 4096


def test_an_operator_takes_the_longer_of_arithmetic_and_memory():
    product = Operator("mm", flop=4 * 10**9, bytes=10**6, itemsize=2)
    addition = Operator("add", flop=0, bytes=3 * 10**6)
    c = cost(MACHINE, Counter({product: 1, addition: 2}))
    assert (c["compute"], c["bandwidth"], c["launches"]) == (2.0, 6.0, 0.0)
    assert c["seconds"] == 8.0 and c["flop"] == 4 * 10**9 and c["operators"] == 3


def test_launches_count_where_kernels_do_not_hide_them():
    few_bytes = Counter({Operator("add", 0, 10**6): 1, Operator("mul", 0, 10**5): 9})
    c = cost(MACHINE, few_bytes)
    assert c["seconds"] == 10.0 and c["launches"] == pytest.approx(8.1)
    on_cpu = dataclasses.replace(MACHINE, overlaps=False)
    assert cost(on_cpu, few_bytes)["seconds"] == pytest.approx(11.9)


def test_bytes_count_what_is_read_and_written_once():
    parts = Parts()
    notes = Notes(parts)
    x, ids = torch.zeros(1000, 4), torch.tensor([1, 2])
    with notes:
        x + x
        x[ids]
        x.view(4000)
        x[:1].expand(1000, 4) * 2.0
    by_name = {op.name: op.bytes for op in notes.counts["the rest"]}
    assert by_name == {"add": 3 * 16000, "index": 2 * 32 + 16, "mul": 2 * 16000}


def test_the_command_prints_every_part_the_ratio_and_what_changes_are_worth(lab, tmp_path):
    size = ("--target", small_folder(tmp_path), "--mode", "specopd", "--prompt-length", 8)
    size += ("--response-length", 8, "--batch-size", 1, "--num-anchors", 2, "--out", tmp_path)
    code, said, error = lab("roofline", *size, "--gpu", "h100")
    assert code == 0, error
    for part in ("prefill", "draft", "draw", "score", "attention", "head and loss", "optimizer"):
        assert f"\n  {part} " in said
    assert "times the tokens/s of sequential rollouts" in said and "Muon spread" in said


def small_folder(tmp_path):
    target = small_target(vocab_size=264)
    target.save_pretrained(tmp_path / "target")
    return tmp_path / "target"


def test_seconds_go_to_the_innermost_part(monkeypatch):
    now = iter((0.0, 1.0, 3.0, 6.0, 10.0))
    monkeypatch.setattr(roofline, "clock", lambda: next(now))
    watch = roofline.Watch()
    inner = watch.parts.within("inner", lambda: None)
    watch.parts.within("outer", inner)()
    assert watch.seconds == {"the rest": 1.0, "outer": 2.0 + 4.0, "inner": 3.0}
