"""The cost model's formulas, against hand arithmetic and a counted step. `pytest
tests/lab/test_roofline.py`"""

from types import SimpleNamespace

import pytest
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from lab import plan, roofline
from lab.roofline import GPUS, Config, Machine, Shapes, Work
from small import ARCHS, small_drafter, small_target

RATES = {"float32": {1: 1e9}} | {kind: {1: 1e6} for kind in ("read", "moved", "gathered")}
SIZES = dict(mode="specopd", prompt_length=20, response_length=20, batch_size=2, num_anchors=3)
NOTHING = ("empty", "new_empty", "_unsafe_view", "detach", "alias", "lift_fresh")


class Counted(TorchDispatchMode):
    """Counts the operators that are no views, and the FLOP of products without attention."""

    def __init__(self):
        super().__init__()
        self.operators = self.flop = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name, returns = func._schema.name.removeprefix("aten::"), func._schema.returns
        is_view = any(r.alias_info and not r.alias_info.is_write for r in returns)
        self.operators += not is_view and not name.startswith(NOTHING)
        if func.overloadpacket in flop_registry and "attention" not in name:
            self.flop += flop_registry[func.overloadpacket](*args, **(kwargs or {}), out_val=out)
        return out


@pytest.mark.parametrize("arch", ARCHS)
def test_a_steps_products_and_operators_are_those_of_the_formulas(arch, monkeypatch):
    config, target = Config(**SIZES), small_target(arch=arch)
    drafter = small_drafter(target)
    counted = Counted()
    monkeypatch.setattr(roofline, "clock", lambda: counted.operators)
    with counted:
        seen, blocks = roofline.measured(config, target, drafter)  # operators by part, not seconds
    shapes = Shapes(config, target, drafter, Machine({}, 0.0, is_gpu=False))
    shapes.N = int(blocks.counts["nodes"]) / config.batch_size
    parts = shapes.specopd()
    flop = sum(w.flop for works in parts.values() for w in works if w.kind != "attention")
    assert flop == pytest.approx(counted.flop, rel=0.06 if arch == "qsa" else 0.03)
    for part in parts.keys() - {"the rest", "attention"}:
        operators = sum(work.operators for work in parts[part])
        assert operators == pytest.approx(seen[part], rel=0.25), part


def test_the_8b_by_hand():
    config = Config(**SIZES | dict(target="8B", prompt_length=96, response_length=32, batch_size=1))
    shapes = Shapes(config, *plan.build_on_meta(config), GPUS["h100"])
    layers, attention = shapes.target_pass(128)
    weights = 36 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 4096 * 12288)
    assert [work.flop for work in layers] == [2 * 128 * weights]
    width = 4 * 4096 + 2 * (4096 + 1024) + 3 * (4096 + 12288)  # in and out of a layer's matrices
    assert layers[0].read == 2 * (weights + 128 * 36 * width)
    assert sum(work.flop for work in attention) == 36 * 4 * 128 * (128 + 64) / 2 * 4096
    head = 151936 * 4096  # of 3 anchors' 2 branches of 7 tokens, and of q for both
    assert sum(work.flop for work in shapes.head_and_loss(3, 2)) == 2 * head * (2 * 21 + 42)


def test_a_product_takes_the_longer_of_arithmetic_and_reading():
    machine = Machine(RATES, launch=0.0)
    c = machine.cost(Work(flop=4e9, read=1e6), Work(flop=1e9, read=3e6), Work(moved=2e6))
    assert (c["compute"], c["bandwidth"], c["seconds"]) == pytest.approx((4.0, 5.0, 9.0))
    assert (c["GFLOP"], c["GB"]) == pytest.approx((5.0, 0.006))


@pytest.mark.parametrize("is_gpu, launches", [(True, 8.0), (False, 10.0)])
def test_launches_add_up_on_a_cpu_and_hide_behind_a_gpus_kernels(is_gpu, launches):
    c = Machine(RATES, launch=1.0, is_gpu=is_gpu).cost(Work(moved=2e6, operators=10))
    assert (c["launches"], c["seconds"]) == pytest.approx((launches, 2.0 + launches))


def test_between_two_sizes_a_rate_is_between():
    machine = Machine({"float32": {10: 1.0, 1000: 100.0}}, 0.0)
    rates = [machine.rate("float32", rows) for rows in (1, 10, 100, 10**6)]
    assert rates == pytest.approx([1.0, 1.0, 10.0, 100.0])


def test_seconds_go_to_the_innermost_part(monkeypatch):
    now = iter((0.0, 1.0, 3.0, 6.0, 10.0, 10.5))
    monkeypatch.setattr(roofline, "clock", lambda: next(now))
    owner = SimpleNamespace(inner=lambda: None, outer=lambda: owner.inner())
    bar = SimpleNamespace(update=lambda: None)
    functions = [(owner, "inner", "inside"), (owner, "outer", "around")]
    with roofline.watched(functions, bar) as seconds:
        owner.outer()
    assert seconds == {"the rest": 1.0 + 0.5, "around": 2.0 + 4.0, "inside": 3.0}


def flags(tmp_path) -> tuple:
    small_target(vocab_size=264).save_pretrained(tmp_path / "target")
    sizes = ("--prompt-length", 8, "--response-length", 8, "--batch-size", 1, "--num-anchors", 2)
    return ("--target", tmp_path / "target", "--out", tmp_path, *sizes)


def test_the_command_prints_every_part_the_ratio_and_what_choices_are_worth(lab, tmp_path):
    code, said, error = lab("roofline", *flags(tmp_path), "--gpu", "h100")
    assert code == 0, error
    for part in ("prefill", "draft", "draw", "tree", "score", "attention", "head and loss"):
        assert f"\n  {part} " in said
    for part in ("backward", "optimizer", "verify", "commit", "all"):
        assert f"\n  {part} " in said
    assert "times the tokens/s of sequential rollouts" in said and "Muon spread" in said


def test_a_length_of_zero_is_named(lab, tmp_path):
    code, _, error = lab("roofline", *flags(tmp_path), "--prompt-length", 0)
    assert code == 2 and "--prompt-length" in error


@pytest.mark.slow
def test_the_check_prints_seconds_predicted_beside_seconds_measured(lab, tmp_path):
    code, said, error = lab("roofline", *flags(tmp_path), "--check")
    assert code == 0, error
    for part in ("prefill", "score", "optimizer", "all"):
        assert said.count(f"\n  {part} ") == 2  # of SpecOPD and of rollouts
