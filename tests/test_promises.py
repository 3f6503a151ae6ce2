"""What the README promises, each in one short test. `pytest tests/test_promises.py`

The files of the concepts test the same in every combination, and that mistakes are noticed.
"""

import pytest
import torch

from drafter import PLAIN
from loss import step_loss
from outcomes import Outcomes, distance, plain_distribution, trained_on_four_tokens
from replay import delta_rule, recurrent, replay_states
from serve import generate
from small import ARCHS, random_prompts, random_tokens, small_drafter, small_target
from small_runs import (
    CONFIG,
    blocks_of,
    gradient_gap,
    gradients,
    gradients_together,
    one_batch,
    step_by_hand,
    target_and_references,
)
from train import objective_of
from tree import build_tree


def three_anchors_of_two_branches() -> tuple:
    """-> trunk tokens (1,20), lengths, anchors (1,3), branches (1,3,2,4)."""
    anchors = torch.tensor([[3, 4, 11]])
    branches = random_tokens(6, 4, seed=1).view(1, 3, 2, 4)
    return random_tokens(1, 20), torch.tensor([20]), anchors, branches


@pytest.mark.parametrize("arch", ARCHS)
def test_packed_equals_alone(arch):
    """All branches scored in one pass get what the target gives on each alone."""
    target = small_target(arch=arch)
    tokens, lengths, anchors, branches = three_anchors_of_two_branches()
    tree = build_tree(tokens, lengths, anchors, branches)
    packed = target.branch_probs(target.prefill(tokens, lengths), tree)
    for a, anchor in enumerate(anchors[0].tolist()):
        for k in range(2):
            text = torch.cat([tokens[0, : anchor + 1], branches[0, a, k]])[None]
            alone = target(text)[0, anchor:-1].softmax(-1)
            torch.testing.assert_close(packed[0, a, k], alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("arch", ["gqa", "gdn"])
def test_one_branch_changed_leaves_the_others_bit_equal(arch):
    target = small_target(arch=arch)
    tokens, lengths, anchors, branches = three_anchors_of_two_branches()
    trunk = target.prefill(tokens, lengths)
    changed = branches.clone()
    changed[0, 1, 0, :3] = (branches[0, 1, 0, :3] + 1) % 20
    before, after = (
        target.branch_probs(trunk, build_tree(tokens, lengths, anchors, b, merge=False))[0]
        for b in (branches, changed)
    )
    equal = [[torch.equal(before[a, k], after[a, k]) for k in range(2)] for a in range(3)]
    assert equal == [[True, True], [False, True], [True, True]]


def test_replay_equals_token_by_token():
    """The state after any token, replayed from the last checkpoint, is that of the recurrence."""
    torch.manual_seed(0)
    T, H, D = 150, 2, 8
    q, k, v = (torch.nn.functional.normalize(torch.randn(1, T, H, D), dim=-1) for _ in range(3))
    g, beta = -torch.rand(1, T, H), torch.rand(1, T, H)
    state = torch.zeros(1, H, D, D)
    _, u, states = delta_rule(q, k, v, g, beta, state, checkpoint_tokens=(63, 127))
    past = {"k": k, "u": u, "g": g, "states": states[:, :2], "after": torch.tensor([[63, 127]])}
    replayed = replay_states(past, torch.arange(T)[None])
    for t in range(T):
        token = (x[:, t : t + 1] for x in (q, k, v, g, beta))
        _, _, state = recurrent(*token, state)
        torch.testing.assert_close(replayed[:, t], state, atol=1e-5, rtol=0)


@pytest.mark.parametrize("arch", ARCHS)
def test_greedy_text_equals_plain_decoding(arch):
    target = small_target(arch=arch)
    prompts = random_prompts(4)
    speculative, plain = (generate(target, d, prompts, 40) for d in (small_drafter(target), None))
    assert [r.tokens for r in speculative] == [r.tokens for r in plain]
    assert any(r.num_rounds < 39 for r in speculative)  # some drafts were accepted


def test_sampled_text_has_exactly_the_targets_distribution(monkeypatch):
    """Over four tokens, by enumerating all that can be drawn, accepted and rejected."""
    target, drafter = trained_on_four_tokens(block_size=3)
    prompt = [1, 0, 2]

    def decode(rows):
        return generate(target, drafter, [prompt] * rows, 3, PLAIN, batch_size=rows)

    texts, accepted = Outcomes(monkeypatch).distribution(decode)
    assert distance(texts, plain_distribution(target, prompt, PLAIN, 3)) < 1e-6
    assert accepted > 0.3


def test_a_step_equals_every_branch_alone():
    """Its loss and its gradient, with p from a plain run of each branch's whole text."""
    target, references = target_and_references()
    drafter = small_drafter(target)
    batch = one_batch(target, references)
    blocks = blocks_of(CONFIG, drafter, *batch)
    value, _ = step_loss(drafter, blocks, objective_of(CONFIG, drafter))
    slow, _ = step_by_hand(CONFIG, drafter, *batch)
    torch.testing.assert_close(value, slow, atol=1e-5, rtol=0)
    weights = list(drafter.parameters())
    for grad, wanted in zip(*(torch.autograd.grad(x, weights) for x in (value, slow))):
        torch.testing.assert_close(grad, wanted, atol=2e-5, rtol=1e-3)


def test_two_processes_equal_one(tmp_path):
    """They share a batch, and its gradient is that of one process."""
    case = ("gqa", "specopd", "dflash")
    together = gradients_together([case], 2, tmp_path / "gradients.pt")
    assert gradient_gap(together[" ".join(case)], gradients(*case)) < 1e-6


def test_a_saved_folder_opens_in_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    target = small_target()
    target.save_pretrained(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    tokens = random_tokens(2, 30)
    torch.testing.assert_close(theirs(tokens).logits, target(tokens), atol=1e-4, rtol=0)
