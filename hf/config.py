"""Reads and writes a target's config.json.

Public files spell the same model in several ways: the text part nested under text_config or flat,
the rotary embedding as a block or as fields, layer kinds listed or by an interval. `model_fields`
reads all of them into one dictionary of model.ModelConfig's fields, which keep Hugging Face's
names; `config_json` writes them back. Keys that are not listed in this file are ignored. A listed
key with a value that is not implemented is an error that names it, and so is a field that has two
values at two places.

    pytest tests/hf/test_config.py
"""

FAMILIES = {  # model_type: architecture
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen4_exp_text": "Qwen4ExpForCausalLM",
}
NESTED = {"qwen3_5": "qwen3_5_text", "qwen4_exp": "qwen4_exp_text"}  # the text under text_config
HYBRID = ("qwen3_5_text", "qwen4_exp_text")  # linear layers among layers of gated attention
# other words for the attention of qwen4_exp, which has an indexer
INDEXED = dict.fromkeys(["indexed_attention", "qwen_sparse_attention"], "full_attention")
FP8_BLOCK = 128  # a scale belongs to a block of 128 x 128 weights

COMMON_FIELDS = """
    model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads
    num_key_value_heads head_dim rms_norm_eps rope_theta tie_word_embeddings
    max_position_embeddings
""".split()
LINEAR_FIELDS = """
    layer_types partial_rotary_factor linear_conv_kernel_dim linear_key_head_dim
    linear_value_head_dim linear_num_key_heads linear_num_value_heads
""".split()
INDEXER_FIELDS = "indexer_n_heads indexer_head_dim indexer_budget indexer_compress_ratio".split()
STREAM_FIELDS = """
    num_experts num_experts_per_tok norm_topk_prob moe_intermediate_size
    shared_expert_intermediate_size output_gate_type hc_count hc_lowrank ple_layer_ids ple_embed_dim
    ple_conv_kernel_size ngram_size heads_per_ngram ngram_vocab_size_base
    make_ngram_vocab_size_divisible_by seed split_ngram_parts eos_token_id
""".split()
HYBRID_FIELDS = COMMON_FIELDS + LINEAR_FIELDS
FAMILY_FIELDS = {  # the fields of ModelConfig that each family's file gives
    "llama": COMMON_FIELDS,
    "qwen3": COMMON_FIELDS,
    "qwen3_5_text": HYBRID_FIELDS,
    "qwen4_exp_text": HYBRID_FIELDS + INDEXER_FIELDS + STREAM_FIELDS,
}
NEEDED = ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"]
# Keys that change the arithmetic of transformers or of an engine, with the values that are
# implemented; null always is. Keys that only say which tensors there are need no line: a tensor too
# many or too few is an error anyway.
IMPLEMENTED_VALUES = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_sliding_window": (False,),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "dual_chunk_attention_config": (),  # vLLM: other positions in long texts
    "per_layer_config": ({},),  # transformers: fields that a layer has for itself
}
DENSE_VALUES = {"num_experts": (0,), "attn_output_gate": (False,)}
FAMILY_VALUES = {  # likewise, of one family
    "llama": DENSE_VALUES,
    "qwen3": DENSE_VALUES,
    "qwen3_5_text": {"attn_output_gate": (True,), "output_gate_type": ("silu", "swish")},
    "qwen4_exp_text": {"attn_output_gate": (True,), "indexer_kv_heads": (1,)},
}
ROPE_BLOCKS = ("rope_parameters", "rope_scaling")


def model_fields(config_dict: dict, source: str) -> dict:
    """Read a public config.json into ModelConfig's fields. `source` names the file in errors."""
    outer = config_dict
    model_type, config_dict = _text_part(config_dict, source)
    _check_implemented(model_type, config_dict, source)
    names = FAMILY_FIELDS[model_type]
    fields = {name: config_dict[name] for name in names if config_dict.get(name) is not None}
    fields["model_type"] = model_type
    fields |= _rope_fields(model_type, config_dict, source)
    needed = NEEDED + (INDEXER_FIELDS if model_type == "qwen4_exp_text" else ["intermediate_size"])
    missing = [name for name in needed if name not in fields]
    if missing:
        raise ValueError(f"{source}: lacks {', '.join(missing)}")
    if model_type in HYBRID:
        fields |= _hybrid_fields(fields, config_dict, source)
    for block in (outer, config_dict):
        _check_ids(fields["vocab_size"], block, source)
    heads = fields["num_attention_heads"]
    fields.setdefault("num_key_value_heads", heads)
    sizes = (heads, fields["hidden_size"])
    if "head_dim" not in fields and all(isinstance(size, int) and size > 0 for size in sizes):
        fields["head_dim"] = fields["hidden_size"] // heads
    return fields


def config_json(fields: dict) -> dict:
    """Write ModelConfig's fields as a config.json that transformers and the engines open."""
    model_type = fields["model_type"]
    config_dict = {name: fields[name] for name in FAMILY_FIELDS[model_type]}
    for name, value in config_dict.items():
        if isinstance(value, tuple):
            config_dict[name] = list(value)
    rope = {"rope_theta": fields["rope_theta"], "rope_type": "default"}
    if model_type in HYBRID:
        rope["partial_rotary_factor"] = config_dict.pop("partial_rotary_factor")
    if model_type == "qwen4_exp_text":
        config_dict["indexer_kv_heads"] = 1
    return config_dict | {"rope_parameters": rope, "hidden_act": "silu", "attention_bias": False}


def _check_kinds(config_dict: dict, source: str) -> None:
    """Check the values that are words, lists or blocks, and the stop ids."""
    blocks = ("rope_parameters", "rope_scaling", "quantization_config", "text_config")
    kinds = dict.fromkeys(blocks, dict) | {"model_type": str, "eos_token_id": int | list}
    kinds |= {"layer_types": list, "ple_layer_ids": list}
    item_kinds = {"layer_types": str, "ple_layer_ids": int, "eos_token_id": int}
    for name, kind in kinds.items():
        value = config_dict.get(name)
        items = value if isinstance(value, list) else ()
        items_fit = all(isinstance(item, item_kinds.get(name, object)) for item in items)
        if not isinstance(value, kind | None) or not items_fit:
            raise ValueError(f"{source}: {name} is {value!r}, of the wrong kind")
    if config_dict.get("eos_token_id") == []:
        raise ValueError(f"{source}: eos_token_id is an empty list")


def _text_part(config_dict: dict, source: str) -> tuple[str, dict]:
    """The family, and the dictionary that describes its text model: nested or flat."""
    _check_kinds(config_dict, source)
    model_type = config_dict.get("model_type")
    if model_type in NESTED:
        return NESTED[model_type], _nested_text_part(config_dict, NESTED[model_type], source)
    if model_type not in FAMILIES:
        public = ", ".join([*FAMILIES, *NESTED])
        raise ValueError(f"{source}: model_type {model_type!r}; implemented: {public}")
    return model_type, config_dict


def _nested_text_part(config_dict: dict, family: str, source: str) -> dict:
    """The fields of text_config, and three that may stand beside it. A field that stands at both
    places must have one value."""
    model_type, nested = config_dict["model_type"], config_dict.get("text_config")
    if nested is None:
        raise ValueError(f"{source}: model_type {model_type!r} has no text_config")
    _check_kinds(nested, source)
    if nested.get("model_type") not in (None, family, model_type):
        inner = f"text_config.model_type = {nested['model_type']!r}"
        raise ValueError(f"{source}: model_type = {model_type!r} contradicts {inner}; remove it")
    names = {*FAMILY_FIELDS[family], *IMPLEMENTED_VALUES, *FAMILY_VALUES[family], *ROPE_BLOCKS}
    names |= {"full_attention_interval", "quantization_config"}
    # the outer eos_token_id may list all ids that end an answer, the nested one cuts n-grams
    for name in sorted(names - {"model_type", "eos_token_id"}):
        _single_value({"": config_dict, "text_config.": nested}, [name], source)
    shared = ("quantization_config", "eos_token_id", "tie_word_embeddings")
    filled = {name: value for name, value in nested.items() if value is not None}
    return {name: config_dict.get(name) for name in shared} | filled


def _single_value(blocks: dict[str, dict], names: list[str], source: str):
    """Return the value of a field that goes by several names or may stand in several blocks,
    {place: block}; None where it is nowhere. Two different values are an error that names both."""
    places = ((place, block, name) for place, block in blocks.items() for name in names)
    values = {f"{place}{name}": block.get(name) for place, block, name in places}
    values = {place: value for place, value in values.items() if value is not None}
    first = next(iter(values), None)
    for place, value in values.items():
        if value != values[first]:
            twice = f"{first} = {values[first]!r} contradicts {place} = {value!r}"
            raise ValueError(f"{source}: {twice}; remove the wrong one")
    return values.get(first)


def _check_ids(vocab_size, config_dict: dict, source: str) -> None:
    """Check that stop and pad ids are rows of the embedding. Older files write no pad id as -1."""
    if not isinstance(vocab_size, int):  # an error elsewhere
        return
    for name in ("eos_token_id", "pad_token_id"):
        ids = config_dict.get(name)
        for token in ids if isinstance(ids, list) else [ids]:
            is_none = token is None or (name, token) == ("pad_token_id", -1)
            if not is_none and token not in range(vocab_size):
                limit = f"vocab_size is {vocab_size}"
                raise ValueError(f"{source}: {name} {token!r} is no id, {limit}")


def _check_implemented(model_type: str, config_dict: dict, source: str) -> None:
    """Refuse a file that asks for other arithmetic than that of model.py."""
    implemented = IMPLEMENTED_VALUES | FAMILY_VALUES[model_type]
    if model_type not in HYBRID and set(config_dict.get("layer_types") or ()) - {"full_attention"}:
        raise ValueError(f"{source}: layer_types other than full_attention are not implemented")
    if model_type == "llama" and config_dict.get("use_sliding_window") is None:
        implemented["sliding_window"] = ()  # engines slide by it alone, transformers does not
    for name, values in implemented.items():
        value = config_dict.get(name)
        if value is not None and value not in values:
            only = " or ".join(map(repr, values)) or "null"
            raise ValueError(f"{source}: {name} = {value!r} is not implemented, only {only}")
    quantization = config_dict.get("quantization_config")
    if quantization:
        square = [FP8_BLOCK, FP8_BLOCK]
        block = quantization.get("weight_block_size", square)
        if quantization.get("quant_method") != "fp8" or block != square:
            raise ValueError(f"{source}: quantization_config {quantization} is not implemented")


def _rope_fields(model_type: str, config_dict: dict, source: str) -> dict:
    """Read both spellings: a block rope_parameters, or rope_scaling and fields at the top."""
    blocks = {f"{name}.": config_dict.get(name) or {} for name in ROPE_BLOCKS}
    kind = _single_value(blocks, ["rope_type", "type"], source) or "default"
    by_layer_type = any(isinstance(v, dict) for block in blocks.values() for v in block.values())
    if kind != "default" or by_layer_type:
        kind = "by layer type" if by_layer_type else f"of type {kind!r}"
        raise ValueError(f"{source}: rope {kind} is not implemented, only the default")
    blocks[""] = config_dict
    theta = _single_value(blocks, ["rope_theta"], source)
    factor = _single_value(blocks, ["partial_rotary_factor"], source)
    theta = 10_000.0 if theta is None else theta
    if factor is None:
        factor = 0.25 if model_type == "qwen3_5_text" else 1.0
    if model_type not in HYBRID and factor != 1.0:
        raise ValueError(f"{source}: rope with partial_rotary_factor {factor} is not implemented")
    return {"rope_theta": theta, "partial_rotary_factor": factor}


def _hybrid_fields(fields: dict, config_dict: dict, source: str) -> dict:
    """The layer kinds, the n-gram layers and the stop id of a hybrid family, in one form each."""
    num_layers = fields["num_hidden_layers"]
    has_interval = config_dict.get("full_attention_interval") is not None
    interval = config_dict["full_attention_interval"] if has_interval else 4
    if not all(isinstance(count, int) and count > 0 for count in (num_layers, interval)):
        counts = f"num_hidden_layers {num_layers!r}, full_attention_interval {interval!r}"
        raise ValueError(f"{source}: {counts}: no positive numbers")
    group = ["linear_attention"] * (interval - 1) + ["full_attention"]
    layer_types = fields.get("layer_types", (group * num_layers)[:num_layers])
    changed = {}
    if fields["model_type"] == "qwen4_exp_text":
        changed["ple_embed_dim"] = fields.get("ple_embed_dim", fields["hidden_size"])
        layer_types = [INDEXED.get(kind, kind) for kind in layer_types]
    for layer, (kind, by_interval) in enumerate(zip(layer_types, group * num_layers)):
        if has_interval and kind != by_interval:
            place = f"layer_types[{layer}] = {kind!r}"
            twice = f"{place} contradicts full_attention_interval = {interval}"
            raise ValueError(f"{source}: {twice}; remove the wrong one")
    changed["layer_types"] = tuple(layer_types)
    if "ple_layer_ids" in fields:
        changed["ple_layer_ids"] = tuple(sorted(set(fields["ple_layer_ids"])))
    stop_id = fields.get("eos_token_id")
    if isinstance(stop_id, list):
        changed["eos_token_id"] = stop_id[0]
    if fields.get("ple_layer_ids") and stop_id is None:
        raise ValueError(f"{source}: lacks eos_token_id, which cuts n-grams")
    return changed
