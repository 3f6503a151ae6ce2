"""What only a GPU can show; `DEVICE=cpu pytest -m slow tests/slow/test_gpu.py` tries the same on a
CPU."""

import dataclasses
import os
import statistics

import pytest
import torch

from drafter import Drafter
from lab.common import timed
from model import attention
from replay import CHUNK, chunk_by_chunk
from serve import Batch, Options, generate
from small import ARCHS, DRAFTERS, small_drafter, small_target
from small_runs import CONFIG, STOP, small_trunks, target_and_references
from support import gpu
from target import Target
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
    widths = (num_key_heads, key_dim, num_heads, value_dim)
    assert gpu.rule_agrees(chunk_by_chunk, CHUNK, device, *widths)


@pytest.mark.parametrize("arch", ARCHS)
def test_speculative_text_there_is_plain_text(arch):
    target = small_target(arch=arch).to(DEVICE)
    drafter = small_drafter(target).to(DEVICE)
    prompts = [[1, 2, 3], [4, 5, 6, 7]]
    plain, drafted = (generate(target, proposer, prompts, 40) for proposer in (None, drafter))
    assert [r.tokens for r in plain] == [r.tokens for r in drafted]


# ----------------------------------------------------------------------------- kernels of attention


def attention_by_hand(q, kv, mask):
    """q (B,N,H,D), kv (B,T,2,H_kv,D), mask (B,1,N,T) -> (B,N,H,D), in the type of q."""
    groups = q.shape[2] // kv.shape[3]
    k, v = (x.repeat_interleave(groups, 2).transpose(1, 2) for x in kv.unbind(2))
    scores = q.transpose(1, 2) @ k.mT * q.shape[-1] ** -0.5  # (B, H, N, T)
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    return (weights @ v).transpose(1, 2)


@pytest.mark.parametrize("length", [64, 128, 192, 320])
def test_half_precision_attention_under_a_mask_has_the_gradient_of_the_formula(length):
    """Also at lengths that are no multiple of a kernel's tile of 128."""
    generator = torch.Generator().manual_seed(length)
    shapes = ((2, 96, 8, 64), (2, length, 2, 2, 64))
    inputs = [torch.randn(shape, generator=generator).to(DEVICE).bfloat16() for shape in shapes]
    mask = torch.rand(2, 1, 96, length, generator=generator).to(DEVICE) < 0.3
    mask[..., 0] = True
    grads = []
    for function, dtype in ((attention, torch.bfloat16), (attention_by_hand, torch.float32)):
        q, kv = (x.detach().to(dtype).requires_grad_() for x in inputs)
        out = function(q, kv, mask)
        out.float().square().sum().backward()
        grads.append(torch.cat([x.grad.float().flatten() for x in (q, kv)]))
    near, exact = grads
    error = ((near - exact).norm() / exact.norm()).item()
    print(f"\n| gradient of attention to {length} keys, bfloat16 | relative error {error:.1e} |")
    assert near.isfinite().all() and error < 0.02


def seconds_of_rounds(target, drafter, length: int, count: int) -> list[float]:
    """Decode after a prompt of `length` tokens; each round's text is longer than the last."""
    prompt = [number % 20 for number in range(length)]
    with torch.inference_mode():
        batch = Batch(target, drafter, {0: prompt}, Options(8 * count))
        return [timed(batch.round)[1] for _ in range(count)]


def test_rounds_at_new_lengths_take_no_longer_than_at_known_ones():
    """A kernel that is planned anew for every length would show here."""
    shape = dict(hidden_size=512, num_attention_heads=4, num_key_value_heads=2, head_dim=128)
    target = Target.toy("gqa", num_hidden_layers=4, **shape).to(DEVICE).bfloat16()
    target.num_tokens = 258
    drafter = Drafter.fresh(target, 2).to(DEVICE, torch.bfloat16)
    seconds_of_rounds(target, drafter, 100, 2)  # warms up
    new, known = (seconds_of_rounds(target, drafter, 200, 20) for _ in range(2))
    ms = " ".join(f"{1e3 * seconds:.0f}" for seconds in new)
    print(f"\n| decoding round, 20 new lengths, one after another | {ms} ms |")
    assert statistics.median(new) < 3 * statistics.median(known)
