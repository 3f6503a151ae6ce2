"""What only a GPU can show; `DEVICE=cpu pytest -m slow tests/slow/test_gpu.py` tries the same on a
CPU."""

import dataclasses
import os

import pytest
import torch

import replay
from serve import generate
from small import ARCHS, DRAFTERS, small_drafter, small_target
from small_runs import CONFIG, STOP, small_trunks, target_and_references
from train import Step, gradient, next_batch
from tree import build_tree

DEVICE = os.environ.get("DEVICE", "cuda")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        DEVICE != "cpu" and not torch.cuda.is_available(), reason="needs a CUDA device"
    ),
]


def probabilities(target, tokens, anchors, branches) -> tuple:
    """p (A,K,W,V) of branches packed on their trunk, and of each alone."""
    lengths = torch.tensor([tokens.shape[1]], device=tokens.device)
    trunk = target.prefill(tokens, lengths)
    tree = build_tree(tokens, lengths, anchors, branches)
    packed = target.branch_probs(trunk, tree)[0]
    alone = torch.zeros_like(packed)
    for a, anchor in enumerate(anchors[0].tolist()):
        for k, branch in enumerate(branches[0, a]):
            text = torch.cat([tokens[0, : anchor + 1], branch])[None]
            alone[a, k] = target(text)[0, anchor : anchor + len(branch)].float().softmax(-1)
    return packed, alone


@pytest.mark.parametrize("arch", ARCHS)
def test_packed_is_alone_in_half_precision_as_far_as_half_precision_goes(arch):
    target = small_target(arch=arch).to(DEVICE)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 20, (1, 90), generator=generator).to(DEVICE)
    anchors = torch.tensor([[9, 40, 41, 77]], device=DEVICE)
    branches = torch.randint(0, 20, (1, 4, 3, 6), generator=generator).to(DEVICE)
    packed, exact = probabilities(target, tokens, anchors, branches)
    assert (packed - exact).abs().max() < 2e-5  # float32
    for module in target.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if name not in ("A_log", "dt_bias"):  # as model folders keep them
                parameter.data = parameter.data.bfloat16()
    packed, alone = probabilities(target, tokens, anchors, branches)
    own, other = ((p - exact).abs().mean().item() for p in (alone, packed))
    print(f"{arch}: bfloat16 - float32, mean |p|: alone {own:.1e}, packed {other:.1e}")
    assert 0 < own and other < 1.5 * own  # packing adds nothing to what bfloat16 loses


def one_step(device, mode, variant="dflash", precision="float32") -> tuple:
    """-> a step's figures, and its gradients in one vector."""
    target, references = target_and_references()
    target.to(device)
    drafter = small_drafter(target, **DRAFTERS[variant]).to(device)
    config = dataclasses.replace(CONFIG, mode=mode, precision=precision, device=device)
    parts = next_batch(config, drafter, small_trunks(target, references), 0, STOP)
    figures = gradient(config, Step(config, drafter), drafter, parts)
    grads = [p.grad.flatten().cpu() for p in drafter.parameters() if p.grad is not None]
    return figures, torch.cat(grads)


@pytest.mark.parametrize("mode", ["ce", "e2e", "specopd"])
@pytest.mark.parametrize("variant", ["dflash", "dspark rnn"])
def test_a_step_there_is_a_step_here(variant, mode):
    figures, grads = one_step(DEVICE, mode, variant)
    wanted, exact = one_step("cpu", mode, variant)
    assert figures["supervised"] == wanted["supervised"]
    assert figures["loss"] == pytest.approx(wanted["loss"], abs=1e-4)
    torch.testing.assert_close(grads, exact, atol=1e-3, rtol=1e-2)


def test_half_precision_there():
    figures, exact = one_step(DEVICE, "ce")
    near, half = one_step(DEVICE, "ce", precision="bfloat16")
    assert near["loss"] == pytest.approx(figures["loss"], abs=0.05)
    assert torch.cosine_similarity(exact, half, 0) > 0.99


@pytest.mark.parametrize("shape", [(2, 4, 32, 32), (16, 48, 128, 128)])
def test_the_kernels_for_linear_attention_are_used_there(shape):
    pytest.importorskip("fla", reason="flash-linear-attention is not installed")
    if DEVICE == "cpu":
        pytest.skip("they want a CUDA device")
    num_key_heads, num_heads, key_dim, value_dim = shape
    device = torch.device(DEVICE)
    assert replay.kernels_agree(device, num_key_heads, key_dim, num_heads, value_dim)


@pytest.mark.parametrize("arch", ARCHS)
def test_speculative_text_there_is_plain_text(arch):
    target = small_target(arch=arch).to(DEVICE)
    drafter = small_drafter(target).to(DEVICE)
    prompts = [[1, 2, 3], [4, 5, 6, 7]]
    plain, drafted = (generate(target, proposer, prompts, 40) for proposer in (None, drafter))
    assert [r.tokens for r in plain] == [r.tokens for r in drafted]
