"""Random tiny models of transformers', saved in every spelling of the hybrid families."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

transformers = pytest.importorskip("transformers")
from transformers import (  # noqa: E402
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5TextConfig,
    Qwen4ExpConfig,
    Qwen4ExpForCausalLM,
    Qwen4ExpForConditionalGeneration,
    Qwen4ExpTextConfig,
)

COMMON = dict(
    vocab_size=40,
    hidden_size=32,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=12,
    max_position_embeddings=512,
    rms_norm_eps=1e-5,  # the gated norm of a state still empty lifts float32's noise by 1/sqrt(eps)
    rope_parameters=dict(rope_theta=500.0, rope_type="default", partial_rotary_factor=0.5),
)
SPARSE = dict(
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    hc_count=2,
    hc_lowrank=12,
    shared_expert_intermediate_size=24,
    indexer_n_heads=4,
    indexer_kv_heads=1,
    indexer_head_dim=12,
    indexer_budget=8,
    indexer_compress_ratio=2,
    ple_layer_ids=[2],
    ple_embed_dim=24,
    ngram_size=3,
    heads_per_ngram=2,
    ngram_vocab_size_base=60,
    split_ngram_parts=3,
    eos_token_id=7,
    make_ngram_vocab_size_divisible_by=4,
    output_gate_type="sigmoid",
)
LINEAR, FULL = "linear_attention", "full_attention"
GDN = {  # what can vary, varied
    "plain": dict(intermediate_size=48),
    "one kv head, wide heads, quarter rotary": dict(
        num_key_value_heads=1,
        head_dim=24,
        rope_parameters=dict(rope_theta=1e4, rope_type="default", partial_rotary_factor=0.25),
    ),
    "tied": dict(tie_word_embeddings=True),
    "irregular layers": dict(num_hidden_layers=5, layer_types=[FULL, LINEAR, LINEAR, FULL, LINEAR]),
    "other irregular layers": dict(
        num_hidden_layers=5, layer_types=[LINEAR, FULL, FULL, LINEAR, FULL]
    ),
    "interval": dict(num_hidden_layers=6, full_attention_interval=3),
    "default rotary": dict(head_dim=32, rope_parameters=None),
    "nested": dict(nested=True),
    "nested and tied, equal heads": dict(
        nested=True, tie_word_embeddings=True, linear_num_key_heads=4, num_key_value_heads=4
    ),
    "older rope": dict(older_rope=True),
    "kernel of 3, eps": dict(linear_conv_kernel_dim=3, rms_norm_eps=1e-4),
}
QSA = {
    "plain": dict(),
    "top 1, not renormalised": dict(num_experts_per_tok=1, norm_topk_prob=False),
    "top 4, not renormalised, one kv head": dict(
        num_experts_per_tok=4, norm_topk_prob=False, num_key_value_heads=1
    ),
    "fused experts": dict(fused=True),
    "nested, fused, three streams": dict(nested=True, fused=True, hc_count=3),
    "nested": dict(nested=True),
    "ratio 4, six index heads": dict(indexer_compress_ratio=4, indexer_budget=8, indexer_n_heads=6),
    "tied, whole rotary": dict(
        tie_word_embeddings=True,
        indexer_head_dim=16,
        rope_parameters=dict(rope_theta=1e4, rope_type="default"),
    ),
    "bigrams, no n-grams shared": dict(ngram_size=2, ple_embed_dim=12, ple_layer_ids=[1, 3]),
    "no n-gram layer, silu gate": dict(ple_layer_ids=[], output_gate_type=None),
    "irregular layers": dict(
        num_hidden_layers=5,
        ple_layer_ids=[2, 5],
        eos_token_id=[7, 9],
        layer_types=[FULL, LINEAR, FULL, "indexed_attention", LINEAR],
    ),
    "interval": dict(num_hidden_layers=6, full_attention_interval=2, ple_layer_ids=[1]),
    "odd expert width": dict(moe_intermediate_size=13, ple_embed_dim=20, norm_topk_prob=True),
}


def stir(model, seed: int = 0) -> None:
    """Every norm, gate and convolution away from its initial value, every matrix peaked, but no
    sum so large that float32 alone would differ by 1e-4."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                parameter.add_(0.3 * noise)
            else:
                wide = parameter.dim() == 3 and parameter.shape[1] == 1  # a convolution
                parameter.copy_(noise * (0.4 if wide else 0.6 / parameter.shape[-1] ** 0.5))


def theirs_saved(folder, family: str, variant: dict):
    """A random tiny model of transformers', everything moved away from its initial value."""
    torch.manual_seed(0)  # transformers draws the decays
    variant = dict(variant)
    nested, fused, older = (variant.pop(n, False) for n in ("nested", "fused", "older_rope"))
    options = COMMON | (SPARSE if family == "qsa" else {}) | variant
    if family == "gdn":
        text, both = Qwen3_5TextConfig, Qwen3_5Config
        flat, whole = Qwen3_5ForCausalLM, Qwen3_5ForConditionalGeneration
    else:
        text, both = Qwen4ExpTextConfig, Qwen4ExpConfig
        flat, whole = Qwen4ExpForCausalLM, Qwen4ExpForConditionalGeneration
    if nested:
        vision = dict(
            depth=1,
            hidden_size=16,
            intermediate_size=16,
            num_heads=2,
            patch_size=4,
            out_hidden_size=options["hidden_size"],
            num_position_embeddings=16,
        )
        tied = options.get("tie_word_embeddings", False)
        config = both(text_config=options, vision_config=vision, tie_word_embeddings=tied)
        model = whole(config)
    else:
        model = flat(text(**options))
    if family == "qsa":
        model.set_experts_implementation("eager")  # the grouped one wants aligned widths
    stir(model)
    model.eval().float().save_pretrained(folder)
    if fused:
        fuse(folder / "model.safetensors")
    if older:
        path = folder / "config.json"
        config = json.loads(path.read_text())
        rope = config.pop("rope_parameters")
        config |= {"rope_theta": rope["rope_theta"], "rope_scaling": None}
        config["partial_rotary_factor"] = rope["partial_rotary_factor"]
        path.write_text(json.dumps(config))
    return model


def fuse(path):
    """Experts as a release has them: one tensor for all."""
    tensors, experts = {}, {}
    for name, tensor in load_file(path).items():
        stem, _, rest = name.partition(".experts.")
        if rest and rest[0].isdigit():
            number, kind, _ = rest.split(".")
            experts.setdefault(f"{stem}.experts.", {})[int(number), kind] = tensor
        else:
            tensors[name] = tensor
    assert experts
    for stem, parts in experts.items():
        numbers = sorted({number for number, _ in parts})
        pairs = [torch.cat([parts[i, "gate_proj"], parts[i, "up_proj"]]) for i in numbers]
        tensors[f"{stem}gate_up_proj"] = torch.stack(pairs)
        tensors[f"{stem}down_proj"] = torch.stack([parts[i, "down_proj"] for i in numbers])
    save_file(tensors, path, {"format": "pt"})
