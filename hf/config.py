"""What a checkpoint's config.json says: the shape of a decoder of one of the four families.

`ModelConfig` keeps Hugging Face's field names. A public config.json spells the same model in
several ways: the text part nested under text_config or flat, the rotary embedding as a block or as
fields, layer kinds listed or by an interval. All of them are read into one form; a field that
changes the arithmetic and is not implemented is an error that names it, unknown keys are harmless.

    pytest tests/test_loading.py tests/test_families.py
"""

import math
from dataclasses import dataclass, fields

FAMILIES = {  # model_type: architecture
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen4_exp_text": "Qwen4ExpForCausalLM",
}
NESTED = {"qwen3_5": "qwen3_5_text", "qwen4_exp": "qwen4_exp_text"}  # the text under text_config
HYBRID = ("qwen3_5_text", "qwen4_exp_text")
# Config fields that change the arithmetic and are not implemented, each with the values that leave
# it unchanged.
PLAIN_VALUES = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_sliding_window": (False,),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "attn_output_gate": (True,),
    "indexer_kv_heads": (1,),
}
FP8_BLOCK = 128  # the block of weights that share a scale
LINEAR_FIELDS = (
    "layer_types",
    "partial_rotary_factor",
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
)
EXPERT_FIELDS = (
    "num_experts",
    "num_experts_per_tok",
    "norm_topk_prob",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)
INDEXER_FIELDS = ("indexer_n_heads", "indexer_head_dim", "indexer_budget", "indexer_compress_ratio")
STREAM_FIELDS = (
    "output_gate_type",
    "hc_count",
    "hc_lowrank",
    "ple_layer_ids",
    "ple_embed_dim",
    "ple_conv_kernel_size",
    "ngram_size",
    "heads_per_ngram",
    "ngram_vocab_size_base",
    "make_ngram_vocab_size_divisible_by",
    "seed",
    "split_ngram_parts",
    "eos_token_id",
)
FIELDS = {"llama": (), "qwen3": (), "qwen3_5_text": LINEAR_FIELDS}  # beyond the common ones
FIELDS["qwen4_exp_text"] = LINEAR_FIELDS + EXPERT_FIELDS + INDEXER_FIELDS + STREAM_FIELDS
NEEDED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")


@dataclass(frozen=True)
class ModelConfig:
    """A decoder's shape, in the field names of its config.json. A family's fields are those of
    FIELDS; the others stay at their defaults and mean nothing."""

    model_type: str = "qwen3"
    vocab_size: int = 264
    hidden_size: int = 192
    intermediate_size: int = 512
    num_hidden_layers: int = 4
    num_attention_heads: int = 6
    num_key_value_heads: int = 2
    head_dim: int = 32
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 4096
    # gated delta net, and which layers are one
    layer_types: tuple = ()
    partial_rotary_factor: float = 1.0
    linear_conv_kernel_dim: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32
    # mixture of experts
    num_experts: int = 512
    num_experts_per_tok: int = 10
    norm_topk_prob: bool = True
    moe_intermediate_size: int = 512
    shared_expert_intermediate_size: int = 512
    # the sparse layers' indexer
    indexer_n_heads: int = 4
    indexer_head_dim: int = 128
    indexer_budget: int = 2048
    indexer_compress_ratio: int = 4
    # residual streams, and the n-gram layers (counted from 1)
    output_gate_type: str = "silu"
    hc_count: int = 4
    hc_lowrank: int = 320
    ple_layer_ids: tuple = ()
    ple_embed_dim: int = 2048
    ple_conv_kernel_size: int = 4
    ngram_size: int = 3
    heads_per_ngram: int = 8
    ngram_vocab_size_base: int = 20_000_000
    make_ngram_vocab_size_divisible_by: int = 128
    seed: int = 1234
    split_ngram_parts: int = 512
    eos_token_id: int = 0

    def __post_init__(self):
        for field in fields(self):
            value, kind = getattr(self, field.name), type(field.default)
            kinds = (int, float) if kind is float else (kind,)
            low = 0 if field.name in ("seed", "eos_token_id") else 1e-30
            fits = isinstance(value, kinds) and (kind is bool or not isinstance(value, bool))
            if not fits or (kind in (int, float) and not low <= value < math.inf):
                wanted = {bool: "true or false", str: "word", tuple: "list"}
                what = wanted.get(kind, "positive number")
                raise ValueError(f"{field.name} is {value!r}, no {what}")
        self._check_multiple("num_attention_heads", "num_key_value_heads")
        if self.head_dim % 2 or self.rotary_dim % 2 or not 0 < self.rotary_dim <= self.head_dim:
            raise ValueError(
                f"head_dim {self.head_dim} and partial_rotary_factor {self.partial_rotary_factor}: "
                "rotary needs pairs"
            )
        if self.hybrid:
            self._check_hybrid()

    def _check_multiple(self, whole: str, part: str) -> None:
        if getattr(self, whole) % getattr(self, part):
            raise ValueError(
                f"{whole} {getattr(self, whole)} is no multiple of {part} {getattr(self, part)}"
            )

    def _check_hybrid(self) -> None:
        kinds = {"linear_attention", "full_attention"}
        if len(self.layer_types) != self.num_hidden_layers or set(self.layer_types) - kinds:
            raise ValueError(
                f"layer_types {list(self.layer_types)} are not {self.num_hidden_layers} of "
                f"{' and '.join(sorted(kinds))}"
            )
        self._check_multiple("linear_num_value_heads", "linear_num_key_heads")
        if not self.streams:
            return
        self._check_multiple("indexer_budget", "indexer_compress_ratio")
        if self.rotary_dim > self.indexer_head_dim:
            raise ValueError(
                f"indexer_head_dim {self.indexer_head_dim} is below the rotated {self.rotary_dim}"
            )
        if self.num_experts_per_tok > self.num_experts or self.hc_count < 2:
            raise ValueError(
                f"num_experts_per_tok {self.num_experts_per_tok} of num_experts "
                f"{self.num_experts}, hc_count {self.hc_count}: out of range"
            )
        if self.output_gate_type not in ("silu", "sigmoid"):
            raise ValueError(f"output_gate_type {self.output_gate_type!r} is not implemented")
        for layer in self.ple_layer_ids:
            if not 1 <= layer <= self.num_hidden_layers or not self.is_linear(layer - 1):
                raise ValueError(
                    f"ple_layer_ids {list(self.ple_layer_ids)}: {layer} is no "
                    "linear_attention layer, counted from 1"
                )
        if self.ngram_size < 2 or self.ple_embed_dim % self.ngram_heads:
            raise ValueError(
                f"ple_embed_dim {self.ple_embed_dim} does not split into (ngram_size - 1) x "
                f"heads_per_ngram = {self.ngram_heads} heads"
            )

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def ngram_heads(self) -> int:
        return (self.ngram_size - 1) * self.heads_per_ngram

    @property
    def hybrid(self) -> bool:
        """Linear layers among gated attention ones; norm weights stored as w of 1 + w."""
        return self.model_type in HYBRID

    @property
    def streams(self) -> bool:
        """Residual streams, experts, sparse attention."""
        return self.model_type == "qwen4_exp_text"

    @property
    def num_streams(self) -> int:
        return self.hc_count if self.streams else 1

    def is_linear(self, layer: int) -> bool:
        return self.hybrid and self.layer_types[layer] == "linear_attention"

    @classmethod
    def from_dict(cls, found: dict, source: str = "config.json") -> "ModelConfig":
        """Read a public config.json, nested or flat; unknown keys are harmless, unimplemented
        arithmetic is an error."""
        _check_kinds(found, source)
        kind = found.get("model_type")
        if kind in NESTED:
            if "text_config" not in found:
                raise ValueError(f"{source}: model_type {kind!r} has no text_config")
            _check_kinds(found["text_config"], source)
            outer = {k: v for k, v in found.items() if k in ("quantization_config", "eos_token_id")}
            tied = {k: v for k, v in found.items() if k == "tie_word_embeddings"}
            kind, found = NESTED[kind], outer | found["text_config"] | tied
        if kind not in FAMILIES:
            public = ", ".join([*FAMILIES, *NESTED])
            raise ValueError(f"{source}: model_type {kind!r}; implemented: {public}")
        hybrid = kind in HYBRID
        plain = PLAIN_VALUES if hybrid else PLAIN_VALUES | {"num_experts": (0,)}
        for name, values in plain.items():
            if found.get(name) is not None and found[name] not in values:
                raise ValueError(f"{source}: {name} = {found[name]!r} is not implemented")
        if not hybrid and set(found.get("layer_types") or ()) - {"full_attention"}:
            raise ValueError(f"{source}: layer_types other than full_attention are not implemented")
        stored = found.get("quantization_config") or {}
        block = stored.get("weight_block_size", [FP8_BLOCK, FP8_BLOCK])
        if stored and (stored.get("quant_method") != "fp8" or block != [FP8_BLOCK, FP8_BLOCK]):
            raise ValueError(f"{source}: quantization_config {stored} is not implemented")
        names = [f.name for f in fields(cls)][: len(fields(cls)) - len(FIELDS["qwen4_exp_text"])]
        values = {n: found[n] for n in (*names, *FIELDS[kind]) if found.get(n) is not None}
        values |= {"model_type": kind} | _rope_values(found, kind, source)
        needed = NEEDED if kind == "qwen4_exp_text" else (*NEEDED, "intermediate_size")
        needed += INDEXER_FIELDS if kind == "qwen4_exp_text" else ()
        if missing := [name for name in needed if name not in values]:
            raise ValueError(f"{source}: lacks {', '.join(missing)}")
        if hybrid:
            _hybrid_values(values, found, source)
        values.setdefault("num_key_value_heads", values["num_attention_heads"])
        try:
            values.setdefault("head_dim", values["hidden_size"] // values["num_attention_heads"])
            return cls(**values)
        except (ValueError, TypeError, ZeroDivisionError) as error:
            raise ValueError(f"{source}: {error}") from None

    def to_dict(self) -> dict:
        """The fields of a config.json that transformers and the engines open."""
        other = {n for names in FIELDS.values() for n in names} - set(FIELDS[self.model_type])
        found = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in other}
        rope = {"rope_theta": self.rope_theta, "rope_type": "default"}
        if self.hybrid:
            rope["partial_rotary_factor"] = found.pop("partial_rotary_factor")
        if self.streams:
            found["indexer_kv_heads"] = 1
        found = {k: list(v) if isinstance(v, tuple) else v for k, v in found.items()}
        return found | {"rope_parameters": rope, "hidden_act": "silu", "attention_bias": False}


def _check_kinds(found: dict, source: str) -> None:
    """The fields that are no plain numbers."""
    kinds = dict.fromkeys(("layer_types", "ple_layer_ids"), list) | {"model_type": str}
    blocks = ("rope_parameters", "rope_scaling", "quantization_config", "text_config")
    for name, kind in (kinds | dict.fromkeys(blocks, dict)).items():
        value = found.get(name)
        inner = {"layer_types": str, "ple_layer_ids": int}.get(name, object)
        if (
            value is not None
            and not isinstance(value, kind)
            or (kind is list and not all(isinstance(v, inner) for v in value or ()))
        ):
            raise ValueError(f"{source}: {name} is {value!r}, of the wrong kind")
    stops = found.get("eos_token_id")
    if stops == [] or not all(
        isinstance(i, int | None) for i in (stops if isinstance(stops, list) else [stops])
    ):
        raise ValueError(f"{source}: eos_token_id is {stops!r}, no id and no list of ids")


def _rope_values(found: dict, kind: str, source: str) -> dict:
    """Both spellings of the rotary embedding: a block rope_parameters, or fields and
    rope_scaling."""
    rope = {}
    for given in (found.get("rope_scaling") or {}, found.get("rope_parameters") or {}):
        scaled = given.get("rope_type", given.get("type", "default")) != "default"
        if scaled or any(isinstance(value, dict) for value in given.values()):
            raise ValueError(f"{source}: rope {given} is not implemented, only the default")
        rope |= given
    usual = 0.25 if kind == "qwen3_5_text" else 1.0
    factor = found.get("partial_rotary_factor", usual)
    factor = rope.get("partial_rotary_factor", factor)
    if kind not in HYBRID and factor != 1.0:
        raise ValueError(f"{source}: rope with partial_rotary_factor {factor} is not implemented")
    theta = rope.get("rope_theta", found.get("rope_theta", ModelConfig.rope_theta))
    try:
        return {"rope_theta": float(theta), "partial_rotary_factor": float(factor)}
    except (TypeError, ValueError):
        raise ValueError(f"{source}: rope {rope or theta} holds no number") from None


def _hybrid_values(values: dict, found: dict, source: str) -> None:
    """Bring layer kinds, stop id and lists into one form."""
    kinds, layers = values.get("layer_types"), values["num_hidden_layers"]
    interval = found.get("full_attention_interval", 4)
    if not all(isinstance(n, int) and n > 0 for n in (layers, interval)):
        raise ValueError(
            f"{source}: num_hidden_layers {layers!r}, full_attention_interval "
            f"{interval!r}: no positive numbers"
        )
    if kinds is None:
        kinds = [
            "linear_attention" if (i + 1) % interval else "full_attention" for i in range(layers)
        ]
    if values["model_type"] == "qwen4_exp_text":  # both words mean attention with an indexer
        kinds = ["full_attention" if kind == "indexed_attention" else kind for kind in kinds]
        values.setdefault("ple_embed_dim", values["hidden_size"])
    values["layer_types"] = tuple(kinds)
    if "ple_layer_ids" in values:
        values["ple_layer_ids"] = tuple(sorted(set(values["ple_layer_ids"])))
    eos = values.get("eos_token_id")
    if isinstance(eos, list):
        values["eos_token_id"] = eos[0]
    if values.get("ple_layer_ids") and eos is None:
        raise ValueError(f"{source}: lacks eos_token_id, which cuts n-grams")
