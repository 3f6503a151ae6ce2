"""A change of weights, texts or prompts is noticed, and named for what it is."""

import dataclasses

import pytest
import torch

from small import small_target
from support.cpu import for_cpu
from support.fingerprint import (
    MIN_NUMBERS,
    difference,
    fingerprint,
    is_another_dtype,
    weights_fingerprint,
)
from target import Target

SAYS_OTHER = "was made with other weights or another config of the target"
CONFIGS = {"rms_norm_eps": 0.1, "rope_theta": 77.0, "tie_word_embeddings": True}


def add_one(name: str, *index):
    """-> a function that changes one number of a target."""

    def change(target: Target) -> None:
        target.state_dict()[name][index] += 1

    return change


def other_layers(target: Target) -> None:
    target.model.layers.load_state_dict(small_target(seed=5).model.layers.state_dict())


CHANGES = {
    "all layers, the head alike": ("gqa", other_layers),
    "one norm": ("gqa", add_one("model.layers.1.input_layernorm.weight", 7)),
    "the last norm": ("gqa", add_one("model.norm.weight", 31)),
    "a matrix's first row": ("gqa", add_one("model.layers.0.mlp.up_proj.weight", 0, 3)),
    "a matrix's last row": ("gqa", add_one("model.layers.2.mlp.up_proj.weight", 47, 31)),
    "the head": ("gqa", add_one("lm_head.weight", 0, 0)),
    "a linear layer's decay": ("gdn", add_one("model.layers.0.linear_attn.A_log", 2)),
    "a convolution": ("gdn", add_one("model.layers.2.linear_attn.conv1d.weight", 5, 0, 1)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_other_weights_have_another_fingerprint(name):
    arch, change = CHANGES[name]
    target = small_target(arch=arch)
    before = weights_fingerprint(target)
    assert before == weights_fingerprint(small_target(arch=arch))
    with torch.no_grad():
        change(target)
    after = weights_fingerprint(target)
    assert after["weights"] != before["weights"] and after["rounded"] != before["rounded"]
    assert not is_another_dtype(before, after)
    assert difference("the target", before, after) == SAYS_OTHER


def test_another_config_of_the_same_weights_is_noticed_in_every_dtype():
    before, half = (
        weights_fingerprint(small_target()),
        weights_fingerprint(small_target().bfloat16()),
    )
    for field, value in CONFIGS.items():
        changed = small_target()
        changed.config = dataclasses.replace(changed.config, **{field: value})
        after = weights_fingerprint(changed)
        assert difference("the target", before, after) == SAYS_OTHER
        assert difference("the target", half, after) == SAYS_OTHER


def named(target: Target, ending: str) -> torch.Tensor:
    """The first tensor whose name ends so, a parameter or a buffer."""
    return next(t for name, t in target.state_dict().items() if name.endswith(ending))


@pytest.mark.parametrize(
    "ending", ["layer_multipliers", "ngram_heads_offsets", "ngram_embedding.weight", "down_proj"]
)
def test_what_an_ngram_layer_and_experts_compute_with_is_looked_at(ending):
    target = small_target(arch="qsa")
    before = weights_fingerprint(target)
    with torch.no_grad():
        named(target, ending)[-1] += 1
    assert weights_fingerprint(target)["weights"] != before["weights"]


def test_an_fp8_table_is_looked_at_row_by_row():
    target = small_target(arch="qsa")
    table = next(m for m in target.modules() if hasattr(m, "weight_scale"))
    table.weight.data = table.weight.data.to(torch.float8_e4m3fn)
    before = weights_fingerprint(target)
    table.weight_scale += 1
    scaled = weights_fingerprint(target)
    table.weight.data.view(torch.uint8)[-1, -1] ^= 1
    fingerprints = [w["weights"] for w in (before, scaled, weights_fingerprint(target))]
    assert len(set(fingerprints)) == 3


def test_long_and_large_tensors_are_sampled_from_the_first_to_the_last_number():
    layer = torch.nn.Linear(MIN_NUMBERS, 50)  # five of its rows are looked at
    before = weights_fingerprint(layer)["weights"]
    noticed = []
    for row in range(50):
        changed = torch.nn.Linear(MIN_NUMBERS, 50)
        changed.load_state_dict(layer.state_dict())
        with torch.no_grad():
            changed.weight[row, -1] += 1
        if weights_fingerprint(changed)["weights"] != before:
            noticed.append(row)
    assert noticed == [0, 12, 24, 36, 49]


@pytest.mark.parametrize("arch", ["gqa", "gdn", "qsa"])
def test_the_same_weights_in_another_dtype_are_told_from_other_weights(arch):
    single, half = small_target(arch=arch), small_target(arch=arch).bfloat16()
    exact = small_target(arch=arch).bfloat16().float()
    one, two, three = map(weights_fingerprint, (single, half, exact))
    assert is_another_dtype(one, two) and is_another_dtype(two, three)
    assert not is_another_dtype(one, three) and one["weights"] != three["weights"]
    message = difference("the target", two, one)
    assert message == (
        "was made with the same weights in another dtype: bfloat16, this run has float32 (--dtype)"
    )
    assert "other weights" in difference("the target", one, three)  # below bfloat16's rounding


def test_the_layout_in_memory_does_not_matter():
    target = small_target()
    before = weights_fingerprint(target)
    for_cpu(target)
    assert not target.lm_head.weight.is_contiguous()
    assert weights_fingerprint(target) == before


def test_names_and_shapes_matter():
    one, two = torch.nn.Linear(2, 3, bias=False), torch.nn.Linear(3, 2, bias=False)
    two.weight.data = one.weight.data.reshape(2, 3)
    renamed = torch.nn.ModuleDict({"other": one})
    assert len({weights_fingerprint(m)["weights"] for m in (one, two, renamed)}) == 3


def test_texts_are_told_apart_by_their_content_their_order_and_their_ends():
    values = [["ab", "c"], ["a", "bc"], ["c", "ab"], ["abc"], ["ab", "c", ""], [[1, 2], [3]], []]
    values += [[[1], [2, 3]], [torch.arange(4)], [torch.arange(4).view(2, 2)], [torch.arange(5)]]
    assert len(set(map(fingerprint, values))) == len(values)
    assert fingerprint(iter(["é", "\ud800"])) == fingerprint(["é", "\ud800"])


@pytest.mark.parametrize(
    "recorded, value, message",
    [
        (3, 3, ""),
        (3, 4, "was made with x = 3, this run has 4"),
        (None, "text", "was made with x = None, this run has 'text'"),
        ({"a": 1}, {}, "was made with x = {'a': 1}, this run has {}"),
        (fingerprint(["a"]), fingerprint(["a"]), ""),
        (fingerprint(["a"]), fingerprint(["b"]), "was made before x changed"),
        (None, fingerprint(["b"]), "does not record x (an earlier version made it)"),
        (123, {"rounded": "sha256:1"}, "does not record x (an earlier version made it)"),
    ],
)
def test_a_difference_is_said_in_words(recorded, value, message):
    assert difference("x", recorded, value) == message
