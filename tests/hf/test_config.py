"""A target's config.json: every spelling is read alike, and what is not implemented is one error
that names the file and the field. `pytest tests/hf/test_config.py`"""

from dataclasses import dataclass, fields

import pytest

from hf.config import (
    FAMILIES,
    FAMILY_FIELDS,
    FAMILY_VALUES,
    IMPLEMENTED_VALUES,
    config_json,
    model_fields,
)
from model import ModelConfig
from small import ARCHS, reconfigure, small_target, spoiled_is_refused
from target import TOYS

LINEAR, FULL = "linear_attention", "full_attention"
CONFIGS = {
    "llama": ModelConfig("llama", tie_word_embeddings=True, rope_theta=5e5),
    "qwen3": ModelConfig(),
    "qwen3_5": TOYS["gdn"],
    "qwen4_exp": TOYS["qsa"],
}

# ---------------------------------------------------------------------------------- what is read


@pytest.mark.parametrize("family", CONFIGS)
def test_a_config_that_was_written_is_read_as_the_same(family):
    config = CONFIGS[family]
    assert ModelConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize("family", CONFIGS)
def test_a_file_has_the_fields_of_its_family_and_no_others(family):
    config = CONFIGS[family]
    names = set(FAMILY_FIELDS[config.model_type]) - {"partial_rotary_factor"}  # it goes with rope
    constants = {"rope_parameters", "hidden_act", "attention_bias", "indexer_kv_heads"}
    assert set(config.to_dict()) - constants == names


def test_every_field_of_the_dataclass_belongs_to_a_family():
    assert FAMILY_FIELDS.keys() == FAMILIES.keys()
    listed = {name for names in FAMILY_FIELDS.values() for name in names}
    assert listed == {field.name for field in fields(ModelConfig)}


def test_a_field_added_at_the_end_of_the_dataclass_changes_nothing():
    @dataclass(frozen=True)
    class Longer(ModelConfig):
        another: int = 3

    longer = Longer.from_dict(TOYS["gdn"].to_dict() | {"another": 5})
    assert longer.another == 3 and longer.layer_types == TOYS["gdn"].layer_types
    assert longer.to_dict() == TOYS["gdn"].to_dict()


def test_unknown_keys_of_a_public_config_are_harmless():
    config_dict = ModelConfig().to_dict() | {"torchscript": True}
    assert ModelConfig.from_dict(config_dict) == ModelConfig()


@pytest.mark.parametrize("arch", ["gdn", "qsa"])
def test_a_nested_text_part_is_read_like_a_flat_file(arch):
    flat = TOYS[arch].to_dict()
    outside = ("eos_token_id", "tie_word_embeddings")  # counts where the text part has none
    text_config = {name: value for name, value in flat.items() if name not in outside}
    nested = {
        "model_type": flat["model_type"].removesuffix("_text"),
        "text_config": text_config,
        "tie_word_embeddings": True,
        "eos_token_id": TOYS[arch].eos_token_id,
    }
    expected = ModelConfig.from_dict(flat | {"tie_word_embeddings": True})
    assert ModelConfig.from_dict(nested) == expected
    text_config |= {"tie_word_embeddings": True, "model_type": flat["model_type"]}
    assert ModelConfig.from_dict(nested) == expected


@pytest.mark.parametrize("family", CONFIGS)
def test_the_older_spelling_of_rope_is_read_like_the_new_one(family):
    config_dict = CONFIGS[family].to_dict()
    rope = config_dict.pop("rope_parameters")
    older = {"rope_theta": rope["rope_theta"], "rope_scaling": None}
    older["partial_rotary_factor"] = rope.get("partial_rotary_factor", 1.0)
    assert ModelConfig.from_dict(config_dict | older) == CONFIGS[family]


def test_layer_kinds_are_read_from_an_interval_and_from_every_word():
    config_dict = TOYS["qsa"].to_dict()
    del config_dict["layer_types"]
    by_interval = model_fields(config_dict | {"full_attention_interval": 2}, "config.json")
    assert by_interval["layer_types"] == (LINEAR, FULL) * 4
    for word in ("indexed_attention", "qwen_sparse_attention"):
        kinds = [LINEAR, LINEAR, LINEAR, word] * 2
        by_word = model_fields(config_dict | {"layer_types": kinds}, "config.json")
        assert by_word["layer_types"] == TOYS["qsa"].layer_types


def test_what_a_file_leaves_out_follows_from_what_it_says():
    config_dict = ModelConfig().to_dict()
    for name in ("num_key_value_heads", "head_dim", "rope_parameters", "rope_theta"):
        del config_dict[name]
    values = model_fields(config_dict, "config.json")
    assert values["num_key_value_heads"] == values["num_attention_heads"] == 6
    assert values["head_dim"] == 192 // 6
    assert values["rope_theta"] == 10_000.0
    stops = model_fields(TOYS["qsa"].to_dict() | {"eos_token_id": [7, 9]}, "config.json")
    assert stops["eos_token_id"] == 7


def test_tuples_are_written_as_the_lists_that_json_has():
    config_dict = config_json(vars(TOYS["qsa"]))
    assert config_dict["layer_types"] == list(TOYS["qsa"].layer_types)
    assert config_dict["ple_layer_ids"] == [2]


# -------------------------------------------------------------------------------- what is refused

ROPE = "rope_parameters"
DENSE = {  # changes of config.json ("gone" removes a field), a word of the error
    "layer kinds": ({"layer_types": ["linear_attention"] * 3}, "layer_types"),
    "unknown model_type": ({"model_type": "rwkv"}, "rwkv"),
    "another unknown model_type": ({"model_type": "gpt2"}, "gpt2"),
    "yarn in the older spelling": ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
    "rope by layer type": ({ROPE: {"full_attention": {}}}, "rope"),
    "yarn": ({ROPE: {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
    "negative size": ({"hidden_size": -32}, "hidden_size"),
    "size of another kind": ({"num_hidden_layers": "3"}, "num_hidden_layers"),
    "heads not divisible": ({"num_key_value_heads": 3}, "num_key_value_heads"),
    "no size at all": ({"vocab_size": "gone"}, "vocab_size"),
    "a width that is a word": ({"hidden_size": "32", "head_dim": "gone"}, "hidden_size"),
    "no heads": ({"num_attention_heads": 0, "head_dim": "gone"}, "num_attention_heads"),
    "no width": ({"hidden_size": "gone"}, "hidden_size"),
    "query heads not divisible": ({"num_attention_heads": 3}, "num_key_value_heads"),
    "odd head width": ({"head_dim": 7}, "head_dim"),
    "attention bias": ({"attention_bias": True}, "attention_bias"),
    "another activation": ({"hidden_act": "gelu"}, "hidden_act"),
    "sliding window": ({"use_sliding_window": True}, "use_sliding_window"),
    "sliding layers": ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    "tied a number": ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1"),
    "awq": ({"quantization_config": {"quant_method": "awq"}}, "quantization"),
}
HYBRID = {
    "layer kinds no list": ({"layer_types": 5}, "layer_types"),
    "layer kinds no words": ({"layer_types": [[1]]}, "layer_types"),
    "n-gram layers no list": ({"ple_layer_ids": 2}, "ple_layer_ids"),
    "no stop id in the list": ({"eos_token_id": []}, "eos_token_id"),
    "quantization a word": ({"quantization_config": "fp8"}, "quantization_config"),
    "rope a word": ({ROPE: "default"}, ROPE),
    "infinite rotary": ({ROPE: {"partial_rotary_factor": float("inf")}}, "partial_rotary"),
    "family a list": ({"model_type": ["qwen4_exp_text"]}, "model_type"),
    "eps no number": ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    "true for a number": ({"num_hidden_layers": True}, "num_hidden_layers"),
    "tied a word": ({"tie_word_embeddings": "false"}, "true or false"),
    "too few layer kinds": ({"layer_types": ["linear_attention"]}, "layer_types"),
    "an unknown layer kind": ({"layer_types": ["sliding_attention"] * 4}, "layer_types"),
    "value heads not divisible": ({"linear_num_value_heads": 5}, "linear_num_value_heads"),
    "n-gram layer on attention": ({"ple_layer_ids": [4]}, "ple_layer_ids"),
    "more experts a token than there are": ({"num_experts_per_tok": 9}, "num_experts"),
    "budget not divisible": ({"indexer_budget": 7}, "indexer_budget"),
    "two index key heads": ({"indexer_kv_heads": 2}, "indexer_kv_heads"),
    "no indexer": ({"indexer_budget": "gone"}, "indexer_budget"),
    "gate of another kind": ({"output_gate_type": "tanh"}, "output_gate_type"),
    "no stop id for n-grams": ({"eos_token_id": "gone"}, "eos_token_id"),
    "yarn": ({ROPE: {"rope_type": "yarn"}}, "yarn"),
    "one stream": ({"hc_count": 1}, "hc_count"),
    "nested without a text part": ({"model_type": "qwen4_exp"}, "text_config"),
    "odd rotary": ({ROPE: {"rope_type": "default", "partial_rotary_factor": 0.2}}, "rotary"),
}
CASES = [("gqa", name, *case) for name, case in DENSE.items()]
CASES += [("qsa", name, *case) for name, case in HYBRID.items()]


@pytest.mark.parametrize(
    "arch, case, changes, word", CASES, ids=[f"{a}: {c}" for a, c, *_ in CASES]
)
def test_a_spoiled_config_is_one_clear_error(arch, case, changes, word):
    config_dict = small_target(arch=arch).config.to_dict()
    ModelConfig.from_dict(config_dict, "there/config.json")
    spoiled = {k: v for k, v in (config_dict | changes).items() if v != "gone"}
    with pytest.raises(ValueError, match=word) as error:
        ModelConfig.from_dict(spoiled, "there/config.json")
    assert str(error.value).startswith("there/config.json: ")


@pytest.mark.parametrize("arch", ARCHS)
def test_a_folder_with_a_spoiled_config_is_refused_and_named(tmp_path, arch):
    small_target(arch=arch).save_pretrained(tmp_path)
    spoiled_is_refused(tmp_path, reconfigure(rope_parameters={"rope_type": "yarn"}), "yarn")


# ----------------------------------------------------------- what is given twice, or not understood

OF_ROPE = "rope_parameters.rope_theta = 10000.0"
TWICE = {  # arch, changes, changes of text_config if it is nested, the two places and their values
    "rotary base": ("gqa", {"rope_theta": 5e5}, None, OF_ROPE, "rope_theta = 500000.0"),
    "rotary base in the older block": (
        "gdn",
        {"rope_scaling": {"rope_theta": 7.0}},
        None,
        OF_ROPE,
        "rope_scaling.rope_theta = 7.0",
    ),
    "rotary type": (
        "qsa",
        {ROPE: {"rope_type": "default", "type": "linear"}},
        None,
        "rope_parameters.rope_type = 'default'",
        "rope_parameters.type = 'linear'",
    ),
    "rotary type in the older block": (
        "gqa",
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        None,
        "rope_parameters.rope_type = 'default'",
        "rope_scaling.type = 'dynamic'",
    ),
    "rotary part": (
        "gdn",
        {"partial_rotary_factor": 0.25},
        None,
        "rope_parameters.partial_rotary_factor = 0.5",
        "partial_rotary_factor = 0.25",
    ),
    "layer kinds": (
        "gdn",
        {"full_attention_interval": 3},
        None,
        "layer_types[2] = 'linear_attention'",
        "full_attention_interval = 3",
    ),
    "tied": (
        "gdn",
        {"tie_word_embeddings": True},
        {"tie_word_embeddings": False},
        "tie_word_embeddings = True",
        "text_config.tie_word_embeddings = False",
    ),
    "a size": ("qsa", {"vocab_size": 99}, {}, "vocab_size = 99", "text_config.vocab_size = 24"),
    "family": (
        "gdn",
        {},
        {"model_type": "qwen3"},
        "model_type = 'qwen3_5'",
        "text_config.model_type = 'qwen3'",
    ),
    "rotary block": (
        "qsa",
        {ROPE: {"rope_theta": 1.0}},
        {ROPE: {"rope_theta": 2.0}},
        "rope_parameters = {'rope_theta': 1.0}",
        "text_config.rope_parameters = {'rope_theta': 2.0}",
    ),
}


def small_config(arch: str, changes: dict, inner: dict | None) -> dict:
    """A small config.json; where `inner` is given it is nested, with these changes inside."""
    flat = small_target(arch=arch).config.to_dict()
    if inner is None:
        return flat | changes
    outer = {"model_type": flat["model_type"].removesuffix("_text"), "text_config": flat | inner}
    return outer | changes


@pytest.mark.parametrize("case", TWICE)
def test_a_field_with_two_values_is_an_error_that_names_both_places(case):
    arch, changes, inner, first, second = TWICE[case]
    with pytest.raises(ValueError) as error:
        ModelConfig.from_dict(small_config(arch, changes, inner), "there/config.json")
    assert str(error.value).startswith("there/config.json: ") and "\n" not in str(error.value)
    assert f"{first} contradicts {second}" in str(error.value)


AGREEING = {
    "rotary base, a whole number": ("gqa", {"rope_theta": 10_000}, None),
    "rotary base in the older block": ("gdn", {"rope_scaling": {"rope_theta": 1e4}}, None),
    "rotary type": ("gqa", {"rope_scaling": {"type": "default", "rope_type": "default"}}, None),
    "rotary part": ("gdn", {"partial_rotary_factor": 0.5}, None),
    "layer kinds": ("gdn", {"full_attention_interval": 4}, None),
    "no rotary type": ("gqa", {ROPE: {"rope_theta": 1e4, "rope_type": None}}, None),
    "indexed layers": ("qsa", {"full_attention_interval": 4}, None),
    "tied": ("gdn", {"tie_word_embeddings": False}, {}),
    "a null beside a value": ("qsa", {"vocab_size": None, "rope_scaling": None}, {}),
    "sizes": ("qsa", {"vocab_size": 24, "hidden_size": 32}, {}),
    "stop ids outside, what cuts n-grams inside": ("qsa", {"eos_token_id": [21, 20]}, {}),
}


@pytest.mark.parametrize("case", AGREEING)
def test_a_field_with_one_value_at_two_places_is_fine(case):
    arch, changes, inner = AGREEING[case]
    config = ModelConfig.from_dict(small_config(arch, changes, inner))
    assert config == small_target(arch=arch).config


OTHER = {  # another value for each listed key
    "hidden_act": "relu2",
    "attn_logit_softcapping": 30.0,
    "final_logit_softcapping": 30.0,
    "dual_chunk_attention_config": {"chunk_size": 8192},
    "per_layer_config": {"1": {"hidden_act": "gelu"}},
    "num_experts": 8,
    "output_gate_type": "sigmoid",
    "indexer_kv_heads": 2,
}
ROWS = [(f, name) for f in FAMILIES for name in IMPLEMENTED_VALUES | FAMILY_VALUES[f]]


@pytest.mark.parametrize("family, name", ROWS)
def test_a_listed_key_takes_its_listed_values_alone(family, name):
    config = CONFIGS[family.removesuffix("_text")]
    values = (IMPLEMENTED_VALUES | FAMILY_VALUES[family])[name]
    for value in (None, *values):
        assert ModelConfig.from_dict(config.to_dict() | {name: value}) == config
    other = OTHER[name] if name in OTHER else not values[0]
    with pytest.raises(ValueError) as error:
        ModelConfig.from_dict(config.to_dict() | {name: other})
    only = " or ".join(map(repr, values)) or "null"
    assert str(error.value).endswith(f"{name} = {other!r} is not implemented, only {only}")


def test_the_gate_of_a_released_qwen3_5_is_silu_by_another_name():
    flat = TOYS["gdn"].to_dict()
    for word in ("swish", "silu", None):
        nested = {"model_type": "qwen3_5", "text_config": flat | {"output_gate_type": word}}
        assert ModelConfig.from_dict(nested) == TOYS["gdn"]
    wrong = "output_gate_type = 'sigmoid' is not implemented, only 'silu' or 'swish'"
    with pytest.raises(ValueError, match=wrong):
        ModelConfig.from_dict(flat | {"output_gate_type": "sigmoid"})


def test_a_window_of_a_llama_is_refused_unless_it_is_switched_off():
    config_dict = CONFIGS["llama"].to_dict() | {"sliding_window": 4096}
    with pytest.raises(ValueError, match="sliding_window = 4096 is not implemented"):
        ModelConfig.from_dict(config_dict)
    switched_off = config_dict | {"use_sliding_window": False}
    assert ModelConfig.from_dict(switched_off) == CONFIGS["llama"]
    qwen = ModelConfig().to_dict() | {"sliding_window": 4096}  # off unless it is switched on
    assert ModelConfig.from_dict(qwen) == ModelConfig()


HARMLESS = """
    use_cache initializer_range bos_token_id eos_token_id pad_token_id attention_dropout
    pretraining_tp output_router_logits router_aux_loss_coef
    rope_parameters layer_types sliding_window max_window_layers
""".split()  # they change no logits, or have rules of their own here


@pytest.mark.parametrize(
    "family, name",
    [
        ("llama", "LlamaConfig"),
        ("qwen3", "Qwen3Config"),
        ("qwen3_5_text", "Qwen3_5TextConfig"),
        ("qwen4_exp_text", "Qwen4ExpTextConfig"),
    ],
)
def test_every_field_of_a_family_in_transformers_is_read_listed_or_harmless(family, name):
    transformers = pytest.importorskip("transformers")
    common = {field.name for field in fields(transformers.PreTrainedConfig)}
    theirs = {field.name for field in fields(getattr(transformers, name))} - common
    known = {*FAMILY_FIELDS[family], *IMPLEMENTED_VALUES, *FAMILY_VALUES[family], *HARMLESS}
    assert len(theirs) > 10 and theirs <= known


BEYOND = {  # vocab_size is 24
    "a stop id": ("gqa", {"eos_token_id": 24}, None, "eos_token_id 24"),
    "one of several": ("gqa", {"eos_token_id": [3, 151645]}, None, "eos_token_id 151645"),
    "below zero": ("gdn", {"eos_token_id": -1}, None, "eos_token_id -1"),
    "a pad id": ("gqa", {"pad_token_id": 99}, None, "pad_token_id 99"),
    "beside the text part": ("gdn", {"eos_token_id": [24]}, {}, "eos_token_id 24"),
    "in the text part": ("qsa", {}, {"pad_token_id": 24}, "pad_token_id 24"),
}


@pytest.mark.parametrize("case", BEYOND)
def test_an_id_beyond_the_vocabulary_is_an_error_that_names_it(case):
    arch, changes, inner, word = BEYOND[case]
    with pytest.raises(ValueError, match=f"there: {word} is no id, vocab_size is 24"):
        ModelConfig.from_dict(small_config(arch, changes, inner), "there")


def test_no_pad_id_may_be_written_as_minus_one():
    config_dict = small_config("gqa", {"pad_token_id": -1, "eos_token_id": [22, 23]}, None)
    assert ModelConfig.from_dict(config_dict) == small_target().config
