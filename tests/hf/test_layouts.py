"""Every tensor of the released 27B and of Flash-Next has its place: at their real sizes, without
their weights."""

import pytest
import torch

from hf.tensors import layout, match_tensors
from model import ModelConfig
from target import Target
from their_models import transformers

KINDS = ["full_attention" if (i + 1) % 4 == 0 else "linear_attention" for i in range(64)]
ROPE = dict(
    rope_theta=1e7,
    rope_type="default",
    partial_rotary_factor=0.25,
    mrope_section=[11, 11, 10],
    mrope_interleaved=True,
)
DENSE = dict(
    vocab_size=248320,
    hidden_size=5120,
    intermediate_size=17408,
    num_hidden_layers=64,
    num_attention_heads=24,
    num_key_value_heads=4,
    head_dim=256,
    linear_num_key_heads=16,
    linear_num_value_heads=48,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    layer_types=KINDS,
    rope_parameters=ROPE,
    max_position_embeddings=262144,
)
FLASH = DENSE | dict(
    hidden_size=2560,
    num_hidden_layers=48,
    num_key_value_heads=2,
    layer_types=KINDS[:48],
    num_experts=512,
    num_experts_per_tok=10,
    moe_intermediate_size=640,
    indexer_kv_heads=1,
    shared_expert_intermediate_size=640,
    indexer_n_heads=4,
    indexer_head_dim=128,
    indexer_budget=2048,
    indexer_compress_ratio=4,
    hc_count=4,
    hc_lowrank=320,
    ple_layer_ids=[2],
    ngram_size=3,
    heads_per_ngram=8,
    ngram_vocab_size_base=20_000_000,
    eos_token_id=248046,
    split_ngram_parts=128,
    output_gate_type="sigmoid",
)


def on_meta(config_dict: dict) -> tuple[ModelConfig, dict]:
    """A target of that size, without its weights."""
    config = ModelConfig.from_dict(config_dict, "config.json")
    with torch.device("meta"):
        return config, Target(config).state_dict()


def num_skipped(config, parameters, shapes) -> int:
    """Raises an error where a tensor has no place, another shape or no source."""
    paths = dict.fromkeys(shapes, "shard")
    return match_tensors(parameters, shapes, paths, layout(config), {}, "folder")[1]


def weights(prefix: str, shapes: dict) -> dict:
    return {f"{prefix}{name}.weight": shape for name, shape in shapes.items()}


def mixer(layer: str, i: int, C: int, num_kv_heads: int) -> dict:
    """The attention layer or the linear layer at i."""
    if (i + 1) % 4 == 0:
        shapes = {
            "q_proj": (24 * 512, C),
            "k_proj": (num_kv_heads * 256, C),
            "v_proj": (num_kv_heads * 256, C),
            "o_proj": (C, 24 * 256),
            "q_norm": (256,),
            "k_norm": (256,),
        }
        return weights(f"{layer}self_attn.", shapes)
    shapes = {
        "in_proj_qkv": (2 * 2048 + 6144, C),
        "in_proj_z": (6144, C),
        "in_proj_a": (48, C),
        "in_proj_b": (48, C),
        "out_proj": (C, 6144),
        "conv1d": (10240, 1, 4),
        "norm": (128,),
    }
    decays = {f"{layer}linear_attn.{name}": (48,) for name in ("A_log", "dt_bias")}
    return weights(f"{layer}linear_attn.", shapes) | decays


def ends(base: str, V: int, C: int) -> dict:
    """Embedding, head, and what is skipped."""
    shapes = {"lm_head.weight": (V, C), "mtp.fc.weight": (C, 2 * C), "model.visual.pos": (4, 4)}
    return shapes | {f"{base}embed_tokens.weight": (V, C)}


def dense_release() -> dict:
    """Names and shapes of the 27B as released, written from the description of the format."""
    C, I = 5120, 17408  # noqa: E741
    base = "model.language_model."
    shapes = ends(base, 248320, C) | {f"{base}norm.weight": (C,)}
    for i in range(64):
        layer = f"{base}layers.{i}."
        norms = {"input_layernorm": (C,), "post_attention_layernorm": (C,)}
        mlp = {"gate_proj": (I, C), "up_proj": (I, C), "down_proj": (C, I)}
        shapes |= weights(layer, norms) | weights(f"{layer}mlp.", mlp) | mixer(layer, i, C, 4)
    return shapes


def flash_release() -> dict:
    """Likewise Flash-Next: fused experts, the table in 128 parts, hashes in the file."""
    C, wide = 2560, 4 * 2560
    base = "model.language_model."
    streams = {
        "hc_norm": (wide,),
        "input_mix_weight_down": (320, wide),
        "input_mix_weight_up": (wide, 320),
    }
    shapes = ends(base, 248320, C) | weights(f"{base}hyper_connection_mixer.", streams)
    for i in range(48):
        layer = f"{base}layers.{i}."
        for sublayer in ("attn", "mlp"):
            both = streams | {"block_inject_weight": (4, wide)}
            shapes |= weights(f"{layer}{sublayer}_hyper_connection.", both)
        shared = {"gate_proj": (640, C), "up_proj": (640, C), "down_proj": (C, 640)}
        shapes |= weights(f"{layer}mlp.", {"gate": (512, C), "shared_expert_gate": (1, C)})
        shapes |= weights(f"{layer}mlp.shared_expert.", shared)
        shapes[f"{layer}mlp.experts.gate_up_proj"] = (512, 1280, C)
        shapes[f"{layer}mlp.experts.down_proj"] = (512, C, 640)
        shapes |= mixer(layer, i, C, 2)
        if (i + 1) % 4 == 0:
            index = {"index_qk_proj": (5 * 128, C), "q_layernorm": (128,), "k_layernorm": (128,)}
            shapes |= weights(f"{layer}self_attn.indexer.", index)
    ple = f"{base}layers.1.ple."
    norms = {f"norm_{name}": (wide,) for name in ("key", "query", "conv")}
    shapes |= weights(ple, norms | {"key_proj": (wide, C), "value_proj": (C, C)})
    shapes |= weights(ple, {"conv1d": (wide, 1, 4)})
    shapes[f"{ple}ple_embedding.layer_multipliers"] = (3,)
    shapes[f"{ple}ple_embedding.ngram_heads_vocab_sizes"] = (16,)
    shapes[f"{ple}ple_embedding.ngram_heads_offsets"] = (16,)
    parts = {f"shard_{n}": (2_500_012, 160) for n in range(128)}
    return shapes | weights(f"{ple}ple_embedding.ngram_embedding.", parts)


RELEASES = {  # shapes, model_type, text_config, billions of parameters
    "27B": (dense_release(), "qwen3_5", DENSE, (26, 28)),
    "Flash-Next": (flash_release(), "qwen4_exp", FLASH, (170, 180)),  # 125 and the table's 51
}


@pytest.mark.parametrize("name", RELEASES)
def test_the_released_layout_has_a_place_for_everything(name):
    shapes, model_type, text_config, (low, high) = RELEASES[name]
    config, parameters = on_meta({"model_type": model_type, "text_config": text_config})
    assert num_skipped(config, parameters, shapes) == 2
    assert low < sum(tensor.numel() for tensor in parameters.values()) / 1e9 < high
    lost = next(name for name in shapes if name.endswith("conv1d.weight"))
    with pytest.raises(ValueError, match="conv1d.weight is missing"):
        num_skipped(config, parameters, {n: s for n, s in shapes.items() if n != lost})
    with pytest.raises(ValueError, match="has no place"):
        more = {"model.language_model.layers.99.norm.weight": (1,)}
        num_skipped(config, parameters, shapes | more)


@pytest.mark.parametrize(
    "config_class, model_class, text_config",
    [
        ("Qwen3_5Config", "Qwen3_5ForConditionalGeneration", DENSE),
        ("Qwen4ExpConfig", "Qwen4ExpForConditionalGeneration", FLASH),
    ],
    ids=["27B", "Flash-Next"],
)
def test_what_transformers_would_save_at_real_sizes_has_a_place_too(
    config_class, model_class, text_config
):
    """Its own model on the meta device, through its own save conversion, but for writing files."""
    from transformers.core_model_loading import revert_weight_conversion

    vision = dict(depth=1, hidden_size=64, num_heads=2, out_hidden_size=text_config["hidden_size"])
    whole = getattr(transformers, config_class)(text_config=text_config, vision_config=vision)
    with torch.device("meta"):
        model = getattr(transformers, model_class)(whole)
    saved = revert_weight_conversion(model, dict(model.state_dict()))
    shapes = {name: tuple(tensor.shape) for name, tensor in saved.items()}
    config, parameters = on_meta(model.config.to_dict())
    count = sum(".visual." in name for name in shapes)
    assert num_skipped(config, parameters, shapes) == count > 5
