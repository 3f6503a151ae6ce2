"""Which optimizer trains a parameter, and what Muon does."""

import pytest
import torch
from torch.overrides import TorchFunctionMode

from small import ARCHS, DRAFTERS, free_port, small_drafter, small_target
from small_runs import join_processes
from support import distributed, optim
from support.optim import (
    ADAMW,
    MUON,
    WARMUP_STEPS,
    Muon,
    is_for_muon,
    make_optimizers,
    optimizer_step,
    set_learning_rate,
)
from target import TOYS, Target

TABLES = ("embed", "lm_head", "markov_w", "codebook", "confidence_head")  # by row, or of one row


@pytest.mark.parametrize("name", [*DRAFTERS, *TOYS, *(f"small {arch}" for arch in ARCHS)])
def test_every_parameter_is_claimed_and_matrices_go_to_muon(name):
    if name in DRAFTERS:
        module = small_drafter(small_target(), **DRAFTERS[name])
    elif name in TOYS:
        module = Target.toy(name)
    else:
        module = small_target(arch=name.removeprefix("small "))
    for full_name, parameter in module.named_parameters():
        is_matrix = parameter.dim() == 2 and not any(table in full_name for table in TABLES)
        assert is_for_muon(full_name) == is_matrix, full_name


def test_a_parameter_in_neither_list_is_an_error_that_names_it():
    assert not set(MUON) & set(ADAMW)
    module = torch.nn.ModuleDict(
        {"layers": torch.nn.ModuleDict({"new_proj": torch.nn.Linear(2, 2)})}
    )
    with pytest.raises(
        ValueError, match="layers.new_proj.weight: list 'new_proj' in MUON or ADAMW"
    ):
        make_optimizers(module, 0.01, 1e-3)


def test_matrices_go_to_muon_and_the_rest_to_adamw():
    drafter = small_drafter(small_target())
    adamw, muon = make_optimizers(drafter, 0.01, 1e-3)
    assert {p.dim() for p in muon.param_groups[0]["params"]} == {2}
    assert {p.dim() for p in adamw.param_groups[0]["params"]} == {1}
    (only,) = make_optimizers(drafter, 0.0, 1e-3)
    assert len(only.param_groups[0]["params"]) == len(list(drafter.parameters()))


def test_the_rate_warms_up_and_cools_down():
    adamw, _ = make_optimizers(small_drafter(small_target()), 0.01, 1e-3)
    set_learning_rate([adamw], 0, 100, cooldown=0.5)
    assert abs(adamw.param_groups[0]["lr"] - 1e-3 / WARMUP_STEPS) < 1e-12
    set_learning_rate([adamw], 30, 100, cooldown=0.5)
    assert abs(adamw.param_groups[0]["lr"] - 1e-3) < 1e-12
    set_learning_rate([adamw], 99, 100, cooldown=0.5)
    assert 1e-4 <= adamw.param_groups[0]["lr"] < 1.5e-4


class KeepFloat32(TorchFunctionMode):
    """Leaves tensors in float32 that are to become bfloat16, as torch.optim.Muon asks."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.bfloat16:
            return args[0].float()
        return function(*args, **(kwargs or {}))


def test_muon_is_torchs_own_run_in_float32_bit_for_bit():
    generator = torch.Generator().manual_seed(0)
    shapes = ((8, 8), (12, 5), (5, 12), (1, 7))
    ours = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    unused = torch.nn.Parameter(torch.ones(2, 2))  # without a gradient
    muon = Muon([*ours, unused], lr=0.01)
    reference = torch.optim.Muon(theirs, lr=0.01, weight_decay=0.0, momentum=0.95)
    for _ in range(5):
        for p, q in zip(ours, theirs):
            p.grad = torch.randn(p.shape, generator=generator)
            q.grad = p.grad.clone()
        optimizer_step([muon])
        with KeepFloat32():
            reference.step()
        assert all(torch.equal(p, q) for p, q in zip(ours, theirs))
        assert all(p.grad is None for p in ours)
    assert torch.equal(unused, torch.ones(2, 2))


# ------------------------------------------------------------------------------- several processes

SHAPES = ((8, 8), (12, 5), (5, 12), (1, 7), (9, 4))


def steps_of_muon(steps: range, state: dict | None = None) -> dict:
    """Train five matrices, on from a state if there is one -> the state after the last step."""
    generator = torch.Generator().manual_seed(99)
    matrices = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    muon = Muon(matrices, lr=0.01)
    if state:
        muon.load_state_dict(state["muon"])
        for matrix, values in zip(matrices, state["matrices"]):
            matrix.data.copy_(values)
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for matrix in matrices:
            matrix.grad = torch.randn(matrix.shape, generator=generator)
        optimizer_step([muon], together=True)
    return {"matrices": [matrix.detach() for matrix in matrices], "muon": muon.state_dict()}


def assert_same_state(state: dict, wanted: dict) -> None:
    for matrix, exact in zip(state["matrices"], wanted["matrices"], strict=True):
        assert torch.equal(matrix, exact)
    rows, exact_rows = (x["muon"]["state"] for x in (state, wanted))
    assert rows.keys() == exact_rows.keys() == set(range(len(SHAPES)))
    for number, row in rows.items():
        assert torch.equal(row["momentum_buffer"], exact_rows[number]["momentum_buffer"])


def muon_worker(number: int, size: int, port: int, steps: range, folder) -> None:
    join_processes(number, size, port)
    computed = []
    alone = optim.orthogonalized
    optim.orthogonalized = lambda matrix: computed.append(matrix.shape) or alone(matrix)
    path = folder / "state.pt"
    state = torch.load(path) if path.is_file() else None
    distributed.barrier()  # nobody writes before all have read
    state = steps_of_muon(steps, state)
    assert len(computed) == len(steps) * len(range(number, len(SHAPES), size))
    torch.save(state, folder / f"{size} {number}.pt")
    if number == size - 1:  # any process's state serves
        torch.save(state, path)
    distributed.stop()


@pytest.mark.slow
def test_muon_spread_over_two_then_three_processes_is_muon_on_one_bit_for_bit(tmp_path):
    for size, steps in ((2, range(3)), (3, range(3, 5))):
        arguments = (size, free_port(), steps, tmp_path)
        torch.multiprocessing.spawn(muon_worker, arguments, nprocs=size)
        for number in range(size):
            state = torch.load(tmp_path / f"{size} {number}.pt")
            assert_same_state(state, steps_of_muon(range(steps.stop)))
    state = torch.load(tmp_path / "state.pt")
    assert_same_state(steps_of_muon(range(5, 6), state), steps_of_muon(range(6)))  # and on one
