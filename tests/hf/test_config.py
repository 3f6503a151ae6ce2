"""What a target's config.json may say wrongly: each is one error that names the file and the field."""

import pytest

from model import ModelConfig
from small import small_target

ROPE = "rope_parameters"
DENSE = {  # changes of config.json ("gone" removes a field), a word of the error
    "layer kinds": ({"layer_types": ["linear_attention"] * 3}, "layer_types"),
    "unknown model_type": ({"model_type": "rwkv"}, "rwkv"),
    "yarn in the older spelling": ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
    "rope by layer type": ({ROPE: {"full_attention": {}}}, "rope"),
    "yarn": ({ROPE: {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
    "negative size": ({"hidden_size": -32}, "hidden_size"),
    "size of another kind": ({"num_hidden_layers": "3"}, "num_hidden_layers"),
    "heads not divisible": ({"num_key_value_heads": 3}, "num_key_value_heads"),
    "no size at all": ({"vocab_size": "gone"}, "vocab_size"),
    "attention bias": ({"attention_bias": True}, "attention_bias"),
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
