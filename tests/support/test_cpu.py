"""What `for_cpu` changes: how a matrix lies in memory, which kernel takes a single row, and packed
copies for the few rows of a round."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from drafter import Drafter
from serve import generate
from small import ARCHS, random_tokens, small_drafter, small_target
from support import cpu
from support.cpu import (
    GAPS,
    MOST_ROWS,
    PackedLinear,
    for_cpu,
    matrices_by_columns,
    single_row_kernel,
)
from support.fingerprint import weights_fingerprint
from target import Target
from tree import build_tree


@pytest.mark.parametrize("before", [True, False], ids=["onednn", "no onednn"])
@pytest.mark.parametrize(
    "dtype, rows, drafts, switches",
    [
        (torch.bfloat16, 1, 0, True),
        (torch.bfloat16, 2, 0, False),
        (torch.bfloat16, 1, 1, False),
        (torch.bfloat16, 1, 7, False),
        (torch.float32, 1, 0, False),
    ],
)
def test_a_single_row_in_bfloat16_takes_torchs_own_kernel(dtype, rows, drafts, switches, before):
    """In the layers and in the head. Afterwards the switch stands as before."""
    target = for_cpu(small_target().to(dtype))
    seen = []
    for module in (target.model.layers[1], target.lm_head):
        module.register_forward_hook(
            lambda *_: seen.append(torch.backends.mkldnn.enabled), prepend=True
        )
    tokens = random_tokens(rows, 9)
    lengths = torch.full((rows,), 8)
    trunk = target.prefill(tokens[:, :8], lengths, checkpoint_every=0)
    chain = tokens.new_ones(rows, 1, 1, drafts)
    tree = build_tree(tokens, lengths, lengths[:, None], chain, False, True)
    torch.backends.mkldnn.enabled = before
    try:
        seen.clear()
        target.head(target.score(trunk, tree).hidden[:, 0])
        assert seen == [before and not switches] * 2
        assert torch.backends.mkldnn.enabled == before
    finally:
        torch.backends.mkldnn.enabled = True


def test_the_kernel_is_switched_back_when_the_module_fails():
    target = for_cpu(small_target().bfloat16())
    with pytest.raises(RuntimeError):
        target.lm_head(torch.ones(1, 3, dtype=torch.bfloat16))
    assert torch.backends.mkldnn.enabled
    with pytest.raises(RuntimeError), single_row_kernel(1, target.lm_head.weight):
        torch.ones(2) @ torch.ones(3)
    assert torch.backends.mkldnn.enabled


def test_a_matrix_laid_out_by_columns_stays_with_onednn():
    """Torch's own kernel would take ten times as long."""
    for weight in (torch.zeros(8, 16, dtype=torch.bfloat16), torch.zeros(16, 8).bfloat16().t()):
        with single_row_kernel(1, weight):
            assert torch.backends.mkldnn.enabled == (weight.stride(-1) != 1)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("arch", ARCHS)
def test_matrices_by_columns_have_the_same_names_and_values(arch, tied):
    target = small_target(arch=arch, tie_word_embeddings=tied)
    values = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    logits = target(random_tokens(2, 9))
    for_cpu(target)
    assert target.lm_head.weight.stride(0) == 1
    assert (target.model.embed_tokens.weight is target.lm_head.weight) == tied
    for name, tensor in target.state_dict().items():
        assert torch.equal(tensor, values.pop(name)), name
    assert not values
    torch.testing.assert_close(target(random_tokens(2, 9)), logits, atol=2e-5, rtol=0)


def test_only_float32_matrices_are_laid_out_by_columns():
    half = torch.nn.Linear(3, 4, dtype=torch.bfloat16)
    matrices_by_columns(half)
    assert half.weight.stride() == (3, 1)


# ---------------------------------------------------------------------------------- packed matrices


@pytest.fixture
def packs_all(monkeypatch):
    """Matrices are packed whatever their size, and whether or not it is faster."""
    monkeypatch.setattr(cpu, "LEAST_NUMBERS", 0)
    monkeypatch.setattr(cpu, "MOST_TIME", 1e9)
    monkeypatch.setattr(cpu, "TRIAL_SECONDS", 0.0)


def packed_layer(num_rows: int, width: int, dtype, bias: bool) -> PackedLinear:
    layer = nn.Linear(width, num_rows, bias, dtype=dtype).requires_grad_(False)
    layer.__class__ = PackedLinear
    layer.pack(least_rows=1)
    return layer


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("shape", [(24, 40), (300, 17), (1, 64), (1000, 576)])
@pytest.mark.parametrize("dtype", GAPS)
def test_packed_products_equal_plain_ones_for_any_number_of_rows(dtype, shape, bias):
    torch.manual_seed(0)
    layer = packed_layer(*shape, dtype, bias)
    used = layer.packed
    for rows in (*range(1, 20), 31, 32, 33, 63, 64, 65, 256):
        x = torch.randn(rows, shape[1], dtype=dtype)
        plain = nn.functional.linear(x, layer.weight, layer.bias)
        with torch.no_grad():
            gap = (layer(x) - plain).abs().max() / plain.abs().max()
            assert gap <= GAPS[dtype], rows
            assert torch.equal(layer(x.view(1, rows, -1)), layer(x)[None])
            layer.packed = cpu.packed(2 * layer.weight)  # seen where the copy is used, only there
            assert torch.equal(layer(x), plain) == (rows > MOST_ROWS)
            layer.packed = used


def test_a_weight_that_changed_and_a_gradient_take_the_plain_product():
    layer = packed_layer(24, 40, torch.float32, False)
    x = torch.randn(8, 40)
    layer.packed = None  # to use it would fail
    layer(x.requires_grad_()).sum().backward()
    torch.testing.assert_close(x.grad, layer.weight.sum(0).expand(8, -1))
    with torch.no_grad(), pytest.raises(RuntimeError):
        layer(x)
    changes = [
        lambda: layer.weight.mul_(2),
        lambda: layer.load_state_dict({"weight": torch.ones(24, 40)}),
        lambda: layer.load_state_dict({"weight": torch.ones(24, 40)}, assign=True),
        lambda: layer.double(),
    ]
    for change in changes:
        layer.packed_version = layer._version()
        with torch.no_grad():
            change()
            y = layer(x.to(layer.weight.dtype))
        torch.testing.assert_close(y, x.to(y.dtype) @ layer.weight.T)


@pytest.mark.parametrize("dtype", GAPS)
@pytest.mark.parametrize("arch", ARCHS)
def test_packing_keeps_names_values_files_and_texts(arch, dtype, packs_all, tmp_path, capsys):
    target = small_target(arch=arch).to(dtype)
    drafter = small_drafter(target).to(dtype)
    names = [list(model.state_dict()) for model in (target, drafter)]
    prints = weights_fingerprint(target), weights_fingerprint(drafter)
    prompts = [[1, 2, 3], [4, 5, 6, 7]]
    texts = [result.tokens for result in generate(target, drafter, prompts, 20)]
    for_cpu(target, drafter)
    line = capsys.readouterr().out
    assert "matrices are packed: 5 rows" in line and line.count("\n") == 1
    for model in (target.lm_head, drafter.fc, drafter.layers[0].mlp.down_proj):
        assert type(model) is PackedLinear
    assert [list(model.state_dict()) for model in (target, drafter)] == names
    assert (weights_fingerprint(target), weights_fingerprint(drafter)) == prints
    if dtype == torch.float32:  # with other kernels than before
        plain = [result.tokens for result in generate(target, None, prompts, 20)]
        assert [result.tokens for result in generate(target, drafter, prompts, 20)] == plain
        assert plain == texts
    target.save_pretrained(tmp_path / "target")
    drafter.save_pretrained(tmp_path / "drafter", dtype)
    again = Target.from_pretrained(tmp_path / "target")
    assert weights_fingerprint(again) == prints[0]
    again = Drafter.from_pretrained(tmp_path / "drafter", again, dtype)
    assert weights_fingerprint(again)["weights"] == prints[1]["weights"]


def fails(*_):
    raise RuntimeError("no such kernel\nand more lines")


def test_matrices_stay_plain_where_packing_does_not_pay(packs_all, monkeypatch, capsys):
    """And a line says why: its kernel is missing, it is slower, its numbers are others, there is no
    memory. Small matrices, those elsewhere, and a target without drafters need no line."""
    target = small_target()
    drafter = small_drafter(target)
    for name, value, reason in (
        ("packed", fails, "no such kernel"),
        ("torch.ops", SimpleNamespace(), "no attribute 'mkl'"),
        ("MOST_TIME", 0.0, "5 rows would take"),
        ("packed_product", lambda x, matrix, layer: 1.001 * layer(x), "other numbers"),
        ("free_memory", lambda: 0, "more than half"),
        ("LEAST_NUMBERS", 10**6, ""),
        ("GAPS", {}, ""),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(f"support.cpu.{name}", value)
            for_cpu(target, drafter)
        line = capsys.readouterr().out
        assert reason in line and line.count("\n") == bool(reason)
    for_cpu(target)
    for_cpu(target, None)
    for_cpu(target.to("meta"), drafter.to("meta"))  # as on a GPU
    assert not capsys.readouterr().out
    assert not any(isinstance(m, PackedLinear) for m in [*target.modules(), *drafter.modules()])
