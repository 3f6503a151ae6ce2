"""What `for_cpu` changes: how a matrix lies in memory, and which kernel takes a single row."""

import pytest
import torch

from small import ARCHS, random_tokens, small_target
from support.cpu import for_cpu, matrices_by_columns, single_row_kernel
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
