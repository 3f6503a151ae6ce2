"""A drafter's config.json: what becomes of each of its fields.

Engines load drafters in several forms. The fields of a drafter stand at the top level, in a block
`dflash_config` or in a block `dspark_config`. All places are read, and a fact that is given twice
with two values is an error. A config is written in the form of its architecture; DSpark's fields
are written at the top in every form, where vLLM and SGLang look for them.

`TREATMENTS` names every field that is known. A field that is not in it is an error, and so is one
that changes what an engine computes and is not implemented, unless it has a value that changes
nothing (`accepted_values`). Dictionaries only: the dataclass `DrafterConfig` stands in drafter.py.

    pytest tests/hf/test_drafters.py tests/hf/test_drafter_fields.py
"""

from difflib import get_close_matches

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
LOSS_WEIGHT = "confidence_head_alpha"  # says if there is a confidence head, if nothing else does
LAYER_TYPES = ("full_attention", "sliding_attention")
BLOCKS = ("dflash_config", "dspark_config")
TRANSFORMERS_WINDOW_LAYERS = 28  # max_window_layers of a config that does not give it

IMPLEMENTED = "implemented"
WRITTEN_AGAIN = "harmless"
LEFT_OUT = "harmless, not written again"
REFUSED = "refused"

LAYER_FIELDS = """
    architectures model_type vocab_size hidden_size intermediate_size num_hidden_layers
    num_attention_heads num_key_value_heads head_dim rms_norm_eps max_position_embeddings rope_theta
    rope_parameters rope_scaling quantization_config layer_types use_sliding_window
    max_window_layers trained_with dflash_config dspark_config
""".split()
DRAFTER_FIELDS = """
    block_size mask_token_id target_layer_ids num_target_layers is_causal causal sliding_window
    use_swa swa_window_size
""".split()
BOOKKEEPING = """
    bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id tokenizer_class
    initializer_range use_cache attention_dropout return_dict output_hidden_states output_attentions
    chunk_size_feed_forward is_encoder_decoder is_decoder add_cross_attention
    cross_attention_hidden_size tie_encoder_decoder pruned_heads torchscript use_bfloat16
    finetuning_task task_specific_params id2label label2id problem_type prefix
""".split()
FILE_FACTS = """
    dtype torch_dtype transformers_version auto_map _name_or_path name_or_path tie_word_embeddings
    _attn_implementation attn_implementation _attn_implementation_autoset
""".split()
LAYER_VALUES = {  # fields that change what an engine computes: the values that change nothing
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1.0,),
    "attn_logit_softcapping": (),
    "num_experts": (0,),
}
NEUTRAL = LAYER_VALUES | {
    "logit_scale": (1.0,),
    "is_neox_style": (True,),
    "rope_is_neox_style": (True,),
    "attention_value_scale": (1.0,),
    "attention_sink_bias": (False,),
    "add_swa_attention_sink_bias": (False,),
    "use_aux_hidden_state": (True,),
    "dspark_bonus_anchor": (False,),
    "attention_modes": (),
    "eagle_config": (),
    "layer_ids": (),
    "speculators_model_type": (),
    "dspark_draft_topk": (),
    "dspark_block_size": (),
    "dspark_markov_rank": (),
    "dspark_markov_head_type": (),
    "dspark_noise_token_id": (),
    "dspark_target_layer_ids": (),
}
WRITTEN_WITH_THE_LAYERS = ("hidden_act", "attention_bias")
BY_CONFIG = """
    sample_from_anchor shift_label projector_type draft_vocab_size target_hidden_size attention_mode
    eagle_aux_hidden_state_layer_ids
""".split()
FIELDS_OF_SOME_KIND = [name for names in FIELDS_OF_KIND.values() for name in names]
TREATMENTS = (  # of the fields that all kinds share; see `treatment`
    dict.fromkeys(LAYER_FIELDS + DRAFTER_FIELDS, IMPLEMENTED)
    | dict.fromkeys([*BOOKKEEPING, "mask_token", LOSS_WEIGHT], WRITTEN_AGAIN)
    | dict.fromkeys(FILE_FACTS, LEFT_OUT)
    | dict.fromkeys([*NEUTRAL, *BY_CONFIG, *FIELDS_OF_SOME_KIND], REFUSED)
)
# where engines look for a field; the others may stand at the top or in a block
TOP_LEVEL_ALONE = {*LAYER_FIELDS, *LAYER_VALUES, *BOOKKEEPING, *FILE_FACTS, "is_causal"}
DFLASH_CONFIG_ALONE = {"causal", "use_swa", "swa_window_size"}


def treatment(name: str, kind: str) -> str | None:
    """Return what becomes of a field in a drafter of a kind, None if it is unknown."""
    is_read = name in FIELDS_OF_KIND[kind] or (kind == "dspark" and name == LOSS_WEIGHT)
    return IMPLEMENTED if is_read else TREATMENTS.get(name)


def place_of(name: str) -> str | None:
    """Return the only place where a field is read: a block or "", the top level. None: any."""
    if name in DFLASH_CONFIG_ALONE:
        return "dflash_config"
    return "" if name in TOP_LEVEL_ALONE else None


def accepted_values(name: str, kind: str, config_dict: dict) -> tuple:
    """Return the values of a refused field that change nothing in this config. An empty config
    gives the words that say which they are."""
    heads = config_dict.get("num_attention_heads")
    is_mha = config_dict.get("num_key_value_heads") in (None, heads)
    taps = config_dict.get("target_layer_ids")
    by_config = {
        "sample_from_anchor": (kind == "dspark",),
        "shift_label": (kind == "dspark",),
        "projector_type": (kind,),
        "draft_vocab_size": (config_dict.get("vocab_size", "vocab_size"),),
        "target_hidden_size": (config_dict.get("hidden_size", "hidden_size"),),
        "attention_mode": ("gqa", "mha") if is_mha else ("gqa",),
        "eagle_aux_hidden_state_layer_ids": ([i + 1 for i in taps] if taps else "taps + 1",),
    }
    scales = {scale: (value,) for scale, value in SCALES.items()}
    return (NEUTRAL | scales | by_config).get(name, ())


def drafter_fields(config_dict: dict, source: str) -> tuple[dict, dict]:
    """Read a drafter's config.json in any form. Return the fields of `DrafterConfig` without
    `layers`, and the dictionary to be read as the `ModelConfig` of those layers."""
    drafters_own = ("layer_types", "use_sliding_window", "tie_word_embeddings", *SCALES)
    layer_dict = {k: v for k, v in config_dict.items() if k not in drafters_own}
    layer_dict["model_type"] = "qwen3"
    try:
        return _drafter_fields(config_dict), layer_dict
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None


def drafter_config_json(fields: dict, layer_json: dict) -> dict:
    """Return the config.json of a drafter, in the form of its architecture. `fields` are those
    of its DrafterConfig, `layer_json` is the config.json of its layers."""
    kind = KINDS[fields["architecture"]]
    names = FIELDS_OF_KIND[kind]
    spark = {name: fields[name] for name in SPARK_FIELDS if name in names}
    block = {name: fields[name] for name in names if fields[name] != SCALES.get(name)}
    block |= {"mask_token_id": fields["mask_token_id"], "block_size": fields["block_size"]}
    block["target_layer_ids"] = list(fields["target_layer_ids"])
    full = ["full_attention"] * layer_json["num_hidden_layers"]
    others = fields["other_fields"]
    written = {"architectures": [fields["architecture"]]} | others.get("", {}) | layer_json
    written["num_target_layers"] = fields["num_target_layers"]
    written["layer_types"] = list(fields["layer_types"]) or full
    written["sliding_window"] = fields["sliding_window"] or None
    written["use_sliding_window"] = bool(fields["sliding_window"])  # or engines refuse the window
    if fields["is_causal"] is not None:  # None: it depends on the layer's kind
        written["is_causal"] = fields["is_causal"]
    if fields["trained_with"] is not None:
        written["trained_with"] = fields["trained_with"]
    written |= block if kind == "dspark" else {"block_size": fields["block_size"]}
    if fields["architecture"] != "Qwen3DSparkModel" or "dflash_config" in others:
        nested = {k: v for k, v in block.items() if kind != "dflash" or k != "block_size"}
        written["dflash_config"] = others.get("dflash_config", {}) | nested
    if "dspark_config" in others:
        written["dspark_config"] = others["dspark_config"] | spark
    return written


def _drafter_fields(config_dict: dict) -> dict:
    names = config_dict.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or str(names[0]) not in KINDS:
        raise ValueError(f"architectures {names}; implemented: {', '.join(KINDS)}")
    blocks = {"": config_dict}
    for place in BLOCKS:
        block = config_dict.get(place)
        if not isinstance(block, dict | None):
            raise ValueError(f"{place} {block!r} is no block of fields")
        if block is not None:
            blocks[place] = block
    kind = KINDS[names[0]]
    _refuse_unknown(blocks, kind)
    fields = {"architecture": names[0]} | _required_fields(blocks, kind)
    _refuse_unimplemented(blocks, names[0])
    fields |= _window_and_causality(blocks)
    fields["num_target_layers"] = _field(blocks, "num_target_layers")
    fields["trained_with"] = config_dict.get("trained_with")
    if not isinstance(fields["trained_with"], dict | None):
        raise ValueError(f"trained_with {fields['trained_with']!r} is no block of fields")
    fields["other_fields"] = _other_fields(blocks, names[0])
    for name in FIELDS_OF_KIND[kind]:
        value = _field(blocks, name)
        if value is not None:
            fields[name] = value
    return fields | _spark_defaults(fields, blocks) if kind == "dspark" else fields


def _spark_defaults(fields: dict, blocks: dict) -> dict:
    """Return DSpark's fields with what SpecForge and vLLM take an absent one for: no Markov head,
    and a confidence head, without the Markov head's vector, if it has a weight in the loss."""
    alpha = _field(blocks, LOSS_WEIGHT) or 0
    if not isinstance(alpha, int | float):
        raise ValueError(f"{LOSS_WEIGHT} {alpha!r} must be a number")
    defaults = {"markov_rank": 0, "enable_confidence_head": alpha > 0}
    spark = defaults | {"confidence_head_with_markov": False} | fields
    if isinstance(spark.get("markov_head_type"), str):
        spark["markov_head_type"] = spark["markov_head_type"].lower()
    return spark


def _field(blocks: dict, *names: str):
    """Return the value of a fact that stands under some names in some places, None if in none."""
    values = {
        f"{place}.{name}".lstrip("."): block[name]
        for place, block in blocks.items()
        for name in names
        if block.get(name) is not None
    }
    first = next(iter(values.values()), None)
    if any(value != first for value in values.values()):
        stated = ", ".join(f"{name} {value}" for name, value in values.items())
        raise ValueError(f"{names[0]} is given twice: {stated}")
    return first


def _refuse_unknown(blocks: dict, kind: str) -> None:
    """Raise an error for a field that is not known, or not in this place."""
    # what is misspelt is rather a field that the kind reads than another
    known = sorted(TREATMENTS, key=lambda name: treatment(name, kind) != IMPLEMENTED)
    for place, block in blocks.items():
        for name in block:
            label = f"{place}.{name}".lstrip(".")
            if name in TREATMENTS and place_of(name) not in (None, place):
                right, wrong = (f"in {p}" if p else "at the top" for p in (place_of(name), place))
                raise ValueError(f"{label} is read {right}, not {wrong}: move it")
            if name not in TREATMENTS:
                close = get_close_matches(name, known, 1, 0.7)
                hint = (
                    f", did you mean {close[0]}?" if close else ": remove it if no engine reads it"
                )
                raise ValueError(f"{label} is unknown{hint}")


def _required_fields(blocks: dict, kind: str) -> dict:
    names = ["block_size", "mask_token_id", "target_layer_ids"]
    needed = names + (DFLASH2_FIELDS if kind == "dflash2" else [])
    lacking = [name for name in needed if _field(blocks, name) is None]
    if lacking:
        raise ValueError(f"lacks {', '.join(lacking)}")
    fields = {name: _field(blocks, name) for name in names}
    ids = fields["target_layer_ids"]
    numbers = [fields["block_size"], fields["mask_token_id"]]
    if not isinstance(ids, list) or not all(type(i) is int for i in [*ids, *numbers]):
        wanted = f"a list of integers, block_size and mask_token_id {numbers} integers"
        raise ValueError(f"target_layer_ids {ids} must be {wanted}")
    return fields | {"target_layer_ids": tuple(ids)}


def _refuse_unimplemented(blocks: dict, architecture: str) -> None:
    """Raise an error for a field that changes the arithmetic and is not implemented."""
    kind = KINDS[architecture]
    pairs = [pair for block in blocks.values() for pair in block.items()]
    everywhere = {name: value for name, value in pairs if value is not None}
    rows = {name: accepted_values(name, kind, everywhere) for name in everywhere}
    rows = {name: values for name, values in rows.items() if treatment(name, kind) == REFUSED}
    rows["model_type"] = ("qwen3", "dspark") if kind == "dspark" else ("qwen3",)
    for name, accepted in rows.items():
        value = _field(blocks, name)
        if (value is not None or name == "model_type") and value not in accepted:
            only = f", only {' or '.join(map(repr, accepted))}" if accepted else ""
            raise ValueError(f"{name} = {value!r} is not implemented in {architecture}{only}")


def _other_fields(blocks: dict, architecture: str) -> dict:
    """Return what was read and changes nothing, by place: it is written again. A block that the
    architecture would not write is in it even if it holds nothing else."""
    kind = KINDS[architecture]
    is_flat = architecture == "Qwen3DSparkModel"
    others = {}
    for place, block in blocks.items():
        others[place] = {
            name: value
            for name, value in block.items()
            if name == LOSS_WEIGHT
            or treatment(name, kind) in (WRITTEN_AGAIN, REFUSED)
            and name not in WRITTEN_WITH_THE_LAYERS
        }
        is_written = place == "" or (place == "dflash_config" and not is_flat)
        if is_written and not others[place]:
            del others[place]
    return others


def _window_and_causality(blocks: dict) -> dict:
    """Return layer_types, sliding_window and is_causal. No sliding layer: an empty tuple and 0.

    As in vLLM: use_swa makes every layer slide where no layer type does, and then no layer is
    causal unless the file says so. Layer types that are not given are filled in as transformers
    does."""
    use_swa = _field(blocks, "use_swa")
    is_causal = _field(blocks, "is_causal", "causal")
    switches = {"use_swa": use_swa, "is_causal": is_causal}
    for name in ("use_sliding_window", "tie_word_embeddings"):
        switches[name] = blocks[""].get(name)
    for name, value in switches.items():
        if not isinstance(value, bool | None):
            raise ValueError(f"{name} {value!r} must be true or false")
    layer_types = _layer_types(blocks[""])
    slides = "sliding_attention" in layer_types
    if slides and use_swa is False:
        raise ValueError(f"use_swa {use_swa} contradicts layer_types {layer_types}")
    if use_swa and not slides:
        layer_types = ["sliding_attention"] * len(layer_types)
        is_causal = bool(is_causal)
    window = _field(blocks, "sliding_window", "swa_window_size")
    if (window is not None or slides or use_swa) and (type(window) is not int or window < 1):
        raise ValueError(f"sliding layers need a sliding_window of at least 1, not {window!r}")
    if not slides and not use_swa:
        layer_types, window = (), 0
    return {"layer_types": tuple(layer_types), "sliding_window": window, "is_causal": is_causal}


def _layer_types(config_dict: dict) -> list:
    """Return the kind of every layer, as listed, or as transformers makes the list."""
    num_layers = config_dict.get("num_hidden_layers")
    if type(num_layers) is not int or num_layers < 1:
        raise ValueError(f"num_hidden_layers {num_layers!r} must be a positive integer")
    layer_types = config_dict.get("layer_types")
    if layer_types is None:
        num_full = config_dict.get("max_window_layers")
        if num_full is None:
            num_full = TRANSFORMERS_WINDOW_LAYERS
        if type(num_full) is not int:
            raise ValueError(f"max_window_layers {num_full!r} must be an integer")
        has_window = config_dict.get("sliding_window", "absent") is not None  # null: no window
        slides = config_dict.get("use_sliding_window") and has_window
        num_full = num_full if slides else num_layers
        layer_types = [LAYER_TYPES[number >= num_full] for number in range(num_layers)]
    is_list = isinstance(layer_types, list) and len(layer_types) == num_layers
    if not is_list or any(layer_type not in LAYER_TYPES for layer_type in layer_types):
        accepted = f"{num_layers} of {' and '.join(LAYER_TYPES)}"
        raise ValueError(f"layer_types {layer_types!r} are not {accepted}")
    return layer_types
