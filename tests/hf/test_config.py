"""A target's config.json: every spelling is read alike, and what is not implemented is one error
that names the file and the field. `pytest tests/hf/test_config.py`"""

from dataclasses import dataclass, fields

import pytest

from hf.config import FAMILIES, FAMILY_FIELDS, config_json, model_fields
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
    text_config = {name: value for name, value in flat.items() if name != "eos_token_id"}
    nested = {
        "model_type": flat["model_type"].removesuffix("_text"),
        "text_config": text_config | {"tie_word_embeddings": False},
        "tie_word_embeddings": True,  # the outer one counts
        "eos_token_id": TOYS[arch].eos_token_id,  # where the text part has none
    }
    expected = ModelConfig.from_dict(flat | {"tie_word_embeddings": True})
    assert ModelConfig.from_dict(nested) == expected


@pytest.mark.parametrize("family", CONFIGS)
def test_the_older_spelling_of_rope_is_read_like_the_new_one(family):
    config_dict = CONFIGS[family].to_dict()
    rope = config_dict.pop("rope_parameters")
    older = {"rope_theta": rope["rope_theta"], "rope_scaling": None}
    older["partial_rotary_factor"] = rope.get("partial_rotary_factor", 1.0)
    assert ModelConfig.from_dict(config_dict | older) == CONFIGS[family]


def test_layer_kinds_are_read_from_an_interval_and_from_both_words():
    config_dict = TOYS["qsa"].to_dict()
    del config_dict["layer_types"]
    by_interval = model_fields(config_dict | {"full_attention_interval": 2}, "config.json")
    assert by_interval["layer_types"] == (LINEAR, FULL) * 4
    kinds = [LINEAR, LINEAR, LINEAR, "indexed_attention"] * 2
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
