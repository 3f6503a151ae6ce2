"""What a drafter's config.json says: the shape of its layers, and what makes them a drafter.

Engines load drafters in a few dialects. The fields of DFlash, DFlash 2 and one form of DSpark stand
in a block `dflash_config`, those of DSpark's other form at the top; both places are read, and a
field given twice with two values is an error. What is written is the dialect that was read.

    pytest tests/test_drafter.py tests/test_drafter_folders.py
"""

from dataclasses import dataclass, replace

from hf.config import ModelConfig

KINDS = {  # architectures[0]: kind
    "DFlashDraftModel": "dflash",
    "DFlash2DraftModel": "dflash2",
    "Qwen3DSparkModel": "dspark",
    "DSparkDraftModel": "dspark",
}
ARCHITECTURES = {kind: name for name, kind in reversed(KINDS.items())}  # of a fresh one: the first
MARKOV_HEADS = ("vanilla", "gated", "rnn")
SELECTOR_FIELDS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
SCALES = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")
SPARK_FIELDS = (
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
    "num_anchors",
)
OF_KIND = {"dflash": (), "dflash2": SELECTOR_FIELDS + SCALES, "dspark": SPARK_FIELDS}


@dataclass(frozen=True)
class DrafterConfig:
    """The layers' shape (a Qwen3 config) and what makes them a drafter. A kind's fields are those
    of OF_KIND; the others stay at their defaults and mean nothing."""

    layers: ModelConfig
    block_size: int  # b: slots of a block, the anchor's among them
    mask_token_id: int
    target_layer_ids: tuple
    num_target_layers: int | None = None  # of the target it was trained for, if the file says
    is_causal: bool | None = False  # None: not said, and then exactly the sliding layers are
    architecture: str = "DFlashDraftModel"
    layer_types: tuple = ()  # full_attention or sliding_attention; empty: all full
    sliding_window: int = 0  # of the sliding layers
    # DFlash 2
    conv_kernel_size: int = 2
    conv_group_size: int = 16
    selector_rank: int = 256
    selector_top_k: int = 16
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float = 0.0  # 0: none
    # DSpark
    markov_rank: int = 256
    markov_head_type: str = "vanilla"
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True
    num_anchors: int = 0  # what it was trained with, if the file says
    # embedding and head of its own in the file
    own_vocabulary: bool = False

    @property
    def kind(self) -> str:
        return KINDS[self.architecture]

    @property
    def num_draft_tokens(self) -> int:
        """W, the tokens proposed per block. DSpark's slots predict the next token, so that of the
        anchor counts; those of the others predict their own."""
        return self.block_size - (self.kind != "dspark")

    def beside(self, tensors) -> "DrafterConfig":
        """What the names of the tensors say beside it."""
        own = any(name.removeprefix("model.") == "embed_tokens.weight" for name in tensors)
        return replace(self, own_vocabulary=own)

    def window(self, layer: int) -> int:
        """How far back a layer's slots see, 0: all of the context."""
        slides = self.layer_types and self.layer_types[layer] == "sliding_attention"
        return self.sliding_window if slides else 0

    def causal(self, layer: int) -> bool:
        """Whether a layer's slots see only those before them in their block."""
        return self.window(layer) > 0 if self.is_causal is None else self.is_causal

    def check(self, target, tokenizer=None) -> None:
        """Everything by which a drafter can fail to fit its target (and tokenizer), named."""
        config, ids = target.config, self.target_layer_ids
        own = {"hidden_size": self.layers.hidden_size, "vocab_size": self.layers.vocab_size}
        own["num_target_layers"] = self.num_target_layers
        for name, value in own.items():
            wanted = getattr(config, name.replace("target", "hidden"))
            if value is not None and value != wanted:
                raise ValueError(f"the drafter's {name} is {value}, this target has {wanted}")
        if not ids or not all(0 <= i < config.num_hidden_layers for i in ids):
            raise ValueError(
                f"target_layer_ids {list(ids)} are not layers 0..{config.num_hidden_layers - 1}"
            )
        if not 0 <= self.mask_token_id < config.vocab_size:
            raise ValueError(
                f"mask_token_id {self.mask_token_id} is beyond vocab_size {config.vocab_size}"
            )
        if tokenizer and self.mask_token_id in (*tokenizer.stop_ids, tokenizer.pad_id):
            raise ValueError(f"mask_token_id {self.mask_token_id} is a stop or pad id")
        if tokenizer and self.mask_token_id in tokenizer.text_ids:
            print(f"warning: mask_token_id {self.mask_token_id} is an ordinary token of text")

    def __post_init__(self):
        layers = self.layers.num_hidden_layers
        kinds = {"full_attention", "sliding_attention"}
        if self.num_draft_tokens < 1:
            raise ValueError(
                f"block_size {self.block_size}: a block holds the anchor and at least one draft"
            )
        if self.layer_types and (len(self.layer_types) != layers or set(self.layer_types) - kinds):
            raise ValueError(
                f"layer_types {list(self.layer_types)} are not {layers} of "
                f"{' and '.join(sorted(kinds))}"
            )
        if "sliding_attention" in self.layer_types and self.sliding_window < 1:
            raise ValueError(f"sliding_window {self.sliding_window}: sliding layers need one")
        slides = {kind == "sliding_attention" for kind in self.layer_types} or {False}
        if self.is_causal is None and len(slides) == 1:
            object.__setattr__(self, "is_causal", slides.pop())
        for name in OF_KIND[self.kind]:
            value, kind = getattr(self, name), type(getattr(DrafterConfig, name))
            kinds = (int, float) if kind is float else (kind,)
            low = 1 if name in SELECTOR_FIELDS else 0
            fits = isinstance(value, kinds) and (kind is bool or not isinstance(value, bool))
            if not fits or (kind in (int, float) and not low <= value < float("inf")):
                raise ValueError(f"{name} is {value!r}, of the wrong kind or out of range")
        if self.kind == "dspark" and self.markov_head_type not in MARKOV_HEADS:
            raise ValueError(
                f"markov_head_type {self.markov_head_type!r}; there is {', '.join(MARKOV_HEADS)}"
            )
        if self.kind == "dflash2" and self.selector_top_k > self.layers.vocab_size:
            raise ValueError(
                f"selector_top_k {self.selector_top_k} is beyond vocab_size "
                f"{self.layers.vocab_size}"
            )
        if self.kind == "dflash2" and self.layers.hidden_size % self.conv_group_size:
            raise ValueError(
                f"hidden_size {self.layers.hidden_size} is no multiple of "
                f"conv_group_size {self.conv_group_size}"
            )

    @classmethod
    def from_dict(cls, found: dict, source: str) -> "DrafterConfig":
        """Read a public config.json of a drafter, in either dialect."""
        named = found.get("architectures")
        if not isinstance(named, list) or len(named) != 1 or str(named[0]) not in KINDS:
            raise ValueError(f"{source}: architectures {named}; implemented: {', '.join(KINDS)}")
        inner = found.get("dflash_config") or {}
        if not isinstance(inner, dict):
            raise ValueError(f"{source}: dflash_config {inner!r} is no block of fields")

        def field(name, default=None):
            given = [d[name] for d in (found, inner) if d.get(name) is not None]
            if len(given) == 2 and given[0] != given[1]:
                raise ValueError(f"{source}: {name} is given twice, {given[0]} and {given[1]}")
            return given[0] if given else default

        needed = {n: field(n) for n in ("block_size", "mask_token_id", "target_layer_ids")}
        if lacking := [name for name, value in needed.items() if value is None]:
            raise ValueError(f"{source}: lacks {', '.join(lacking)}")
        ids, numbers = needed["target_layer_ids"], [needed["block_size"], needed["mask_token_id"]]
        if not isinstance(ids, list) or not all(type(i) is int for i in [*ids, *numbers]):
            raise ValueError(
                f"{source}: target_layer_ids {ids} must be a list of integers, "
                f"block_size and mask_token_id {numbers} integers"
            )
        if field("target_hidden_size", found.get("hidden_size")) != found.get("hidden_size"):
            raise ValueError(
                f"{source}: a target_hidden_size other than hidden_size is not implemented"
            )
        for name in set(SCALES) - set(OF_KIND[KINDS[named[0]]]):
            if field(name) not in (None, getattr(cls, name)):
                raise ValueError(f"{source}: {name} = {field(name)!r} is not implemented")
        if found.get("model_type", "qwen3") != "qwen3":
            raise ValueError(f"{source}: model_type {found['model_type']!r}: a drafter's is qwen3")
        ignored = {"layer_types": None, "use_sliding_window": False} | dict.fromkeys(SCALES)
        layers = ModelConfig.from_dict({**found, **ignored}, source)
        types, window = _sliding(found, field, layers.num_hidden_layers, source)
        causal = field("is_causal", inner.get("causal"))
        if causal is not None and not isinstance(causal, bool):
            raise ValueError(f"{source}: is_causal {causal!r} must be true or false")
        own = {name: field(name) for name in OF_KIND[KINDS[named[0]]] if field(name) is not None}
        if KINDS[named[0]] == "dspark" and "markov_rank" not in own:
            own["markov_rank"] = 0
        try:
            return cls(
                layers,
                *numbers,
                tuple(ids),
                field("num_target_layers"),
                causal,
                named[0],
                types,
                window,
                **own,
            )
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from None

    def to_dict(self) -> dict:
        """config.json in the dialect that was read, or that engines load."""
        layers, flat = self.layers.num_hidden_layers, self.architecture == "Qwen3DSparkModel"
        own = {"mask_token_id": self.mask_token_id, "target_layer_ids": list(self.target_layer_ids)}
        for name in OF_KIND[self.kind]:
            if getattr(self, name) != getattr(DrafterConfig, name) or name not in SCALES:
                own[name] = getattr(self, name)
        if not self.num_anchors:
            own.pop("num_anchors", None)
        sizes = {"block_size": self.block_size}
        if self.kind != "dflash":
            own |= sizes  # where loaders of these look for it
        # None: by layer kind, which no one word says
        said = {} if self.is_causal is None else {"is_causal": self.is_causal}
        return (
            {"architectures": [self.architecture]}
            | self.layers.to_dict()
            | {
                "num_target_layers": self.num_target_layers,
                "layer_types": list(self.layer_types) or ["full_attention"] * layers,
                "sliding_window": self.sliding_window or None,
                "use_sliding_window": bool(self.sliding_window),
            }
            | said
            | (own | sizes if flat else sizes | {"dflash_config": own})
        )

    def without_heads(self) -> "DrafterConfig":
        """The DFlash of the same layers: what a fresh drafter of another kind starts as."""
        size = self.num_draft_tokens + 1
        return replace(self, architecture="DFlashDraftModel", block_size=size)


def _sliding(found: dict, field, layers: int, source: str) -> tuple[tuple, int]:
    """Layer kinds and window, from layer_types and sliding_window or from use_swa and
    swa_window_size; empty and 0 if no layer slides."""
    types = found.get("layer_types")
    kinds = ("full_attention", "sliding_attention")
    if types is not None and not (
        isinstance(types, list) and len(types) == layers and all(t in kinds for t in types)
    ):
        raise ValueError(
            f"{source}: layer_types {types!r} are not {layers} of {' and '.join(kinds)}"
        )
    asked = field("use_swa")
    if asked is not None and not isinstance(asked, bool):
        raise ValueError(f"{source}: use_swa {asked!r} must be true or false")
    if types is None:  # use_sliding_window stands in many a config that lists its layers otherwise
        types = [kinds[bool(asked or found.get("use_sliding_window"))]] * layers
    types = tuple(types)
    if asked is not None and asked != (kinds[1] in types):
        raise ValueError(f"{source}: use_swa {asked} contradicts layer_types {list(types)}")
    if kinds[1] not in types:
        return (), 0
    sizes = {field(name) for name in ("sliding_window", "swa_window_size")} - {None}
    if len(sizes) != 1 or any(type(size) is not int or size < 1 for size in sizes):
        given = sorted(sizes, key=str)
        raise ValueError(f"{source}: sliding layers need one sliding_window, not {given}")
    return types, sizes.pop()
