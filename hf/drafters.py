"""A drafter's config.json: which fields make it a drafter, and which describe its layers.

Engines load drafters in two forms. The fields of DFlash, DFlash 2 and one architecture of DSpark
stand in a block `dflash_config`, those of DSpark's other architecture at the top level. Both places
are read, and a field that has two different values is an error. A config is written in the form of
its architecture. Dictionaries only: the dataclass `DrafterConfig` stands in drafter.py.

    pytest tests/hf/test_drafters.py
"""

KINDS = {  # architectures[0]: kind
    "DFlashDraftModel": "dflash",
    "DFlash2DraftModel": "dflash2",
    "Qwen3DSparkModel": "dspark",
    "DSparkDraftModel": "dspark",
}
ARCHITECTURES = {  # kind: architecture of a fresh drafter
    "dflash": "DFlashDraftModel",
    "dflash2": "DFlash2DraftModel",
    "dspark": "Qwen3DSparkModel",
}
MARKOV_HEADS = ("vanilla", "gated", "rnn")
DFLASH2_FIELDS = "conv_kernel_size conv_group_size selector_rank selector_top_k".split()
SCALES = {  # name: the value that changes nothing
    "input_embedding_scale": 1.0,
    "output_multiplier": 1.0,
    "final_logit_softcapping": 0.0,
}
SPARK_FIELDS = """
    markov_rank markov_head_type enable_confidence_head confidence_head_with_markov num_anchors
""".split()
FIELDS_OF_KIND = {"dflash": [], "dflash2": [*DFLASH2_FIELDS, *SCALES], "dspark": SPARK_FIELDS}
LAYER_TYPES = ("full_attention", "sliding_attention")


def drafter_fields(config_dict: dict, source: str) -> tuple[dict, dict]:
    """Read a drafter's config.json in either form. Return the fields of `DrafterConfig` without
    `layers`, and the dictionary to be read as the `ModelConfig` of those layers."""
    drafters_own = ("layer_types", "use_sliding_window", *SCALES)
    layer_dict = {k: v for k, v in config_dict.items() if k not in drafters_own}
    try:
        return _drafter_fields(config_dict), layer_dict
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None


def drafter_config_json(fields: dict, layer_json: dict) -> dict:
    """Return the config.json of a drafter, in the form of its architecture. `fields` are those
    of its DrafterConfig, `layer_json` is the config.json of its layers."""
    kind = KINDS[fields["architecture"]]
    block = {"mask_token_id": fields["mask_token_id"]}
    block["target_layer_ids"] = list(fields["target_layer_ids"])
    unwritten = SCALES | {"num_anchors": 0}  # defaults, which are not written
    for name in FIELDS_OF_KIND[kind]:
        if fields[name] != unwritten.get(name):
            block[name] = fields[name]
    if kind != "dflash":
        block["block_size"] = fields["block_size"]  # loaders of these kinds look for it here
    full = ["full_attention"] * layer_json["num_hidden_layers"]
    written = {"architectures": [fields["architecture"]]} | layer_json
    written["num_target_layers"] = fields["num_target_layers"]
    written["layer_types"] = list(fields["layer_types"]) or full
    written["sliding_window"] = fields["sliding_window"] or None
    written["use_sliding_window"] = bool(fields["sliding_window"])
    if fields["is_causal"] is not None:  # None: it depends on the layer's kind
        written["is_causal"] = fields["is_causal"]
    if fields["architecture"] == "Qwen3DSparkModel":
        return written | block
    return written | {"block_size": fields["block_size"], "dflash_config": block}


def _drafter_fields(config_dict: dict) -> dict:
    names = config_dict.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or str(names[0]) not in KINDS:
        raise ValueError(f"architectures {names}; implemented: {', '.join(KINDS)}")
    kind = KINDS[names[0]]
    block = config_dict.get("dflash_config") or {}
    if not isinstance(block, dict):
        raise ValueError(f"dflash_config {block!r} is no block of fields")
    blocks = (config_dict, block)
    fields = {"architecture": names[0]} | _required_fields(blocks)
    _refuse_unimplemented(blocks, kind)
    fields["layer_types"], fields["sliding_window"] = _layer_types_and_window(blocks)
    fields["num_target_layers"] = _field(blocks, "num_target_layers")
    is_causal = _field(blocks, "is_causal")
    if is_causal is None:
        is_causal = block.get("causal")
    if not isinstance(is_causal, bool | None):
        raise ValueError(f"is_causal {is_causal!r} must be true or false")
    fields["is_causal"] = is_causal
    for name in FIELDS_OF_KIND[kind]:
        value = _field(blocks, name)
        if value is not None:
            fields[name] = value
    if kind == "dspark":
        fields.setdefault("markov_rank", 0)
    return fields


def _field(blocks: tuple[dict, dict], name: str):
    """Return a field's value, None if it is neither at the top level nor in dflash_config."""
    values = [block[name] for block in blocks if block.get(name) is not None]
    if len(values) == 2 and values[0] != values[1]:
        raise ValueError(f"{name} is given twice, {values[0]} and {values[1]}")
    return values[0] if values else None


def _required_fields(blocks: tuple[dict, dict]) -> dict:
    names = ("block_size", "mask_token_id", "target_layer_ids")
    fields = {name: _field(blocks, name) for name in names}
    lacking = [name for name in names if fields[name] is None]
    if lacking:
        raise ValueError(f"lacks {', '.join(lacking)}")
    ids = fields["target_layer_ids"]
    numbers = [fields["block_size"], fields["mask_token_id"]]
    if not isinstance(ids, list) or not all(type(i) is int for i in [*ids, *numbers]):
        wanted = f"a list of integers, block_size and mask_token_id {numbers} integers"
        raise ValueError(f"target_layer_ids {ids} must be {wanted}")
    return fields | {"target_layer_ids": tuple(ids)}


def _refuse_unimplemented(blocks: tuple[dict, dict], kind: str) -> None:
    """Raise an error for a field that changes the arithmetic and is not implemented."""
    neutral = {"target_hidden_size": blocks[0].get("hidden_size")}
    neutral |= {} if kind == "dflash2" else SCALES
    rows = [(name, _field(blocks, name), accepted) for name, accepted in neutral.items()]
    rows.append(("model_type", blocks[0].get("model_type"), "qwen3"))
    for name, value, accepted in rows:
        if value not in (None, accepted):
            raise ValueError(f"{name} = {value!r} is not implemented, only {accepted!r}")


def _layer_types_and_window(blocks: tuple[dict, dict]) -> tuple[tuple, int]:
    """Read layer_types and sliding_window, or use_swa and swa_window_size. If no layer slides,
    return an empty tuple and 0."""
    config_dict = blocks[0]
    num_layers = config_dict.get("num_hidden_layers")
    if type(num_layers) is not int or num_layers < 1:
        raise ValueError(f"num_hidden_layers {num_layers!r} must be a positive integer")
    layer_types = config_dict.get("layer_types")
    use_swa = _field(blocks, "use_swa")
    if layer_types is None:  # use_sliding_window also stands in configs that list their layers
        slides = use_swa or config_dict.get("use_sliding_window")
        layer_types = ["sliding_attention" if slides else "full_attention"] * num_layers
    is_list = isinstance(layer_types, list) and len(layer_types) == num_layers
    if not is_list or any(layer_type not in LAYER_TYPES for layer_type in layer_types):
        accepted = f"{num_layers} of {' and '.join(LAYER_TYPES)}"
        raise ValueError(f"layer_types {layer_types!r} are not {accepted}")
    slides = "sliding_attention" in layer_types
    if use_swa is not None and use_swa is not slides:
        raise ValueError(f"use_swa {use_swa!r} contradicts layer_types {layer_types}")
    if not slides:
        return (), 0
    windows = [_field(blocks, name) for name in ("sliding_window", "swa_window_size")]
    windows = [window for window in windows if window is not None]
    if not windows or any(type(w) is not int or w < 1 or w != windows[0] for w in windows):
        raise ValueError(f"sliding layers need one sliding_window, not {windows}")
    return tuple(layer_types), windows[0]
