"""The layers of a decoder, from leaf to root: norm, rotary, attention, MLP, layer, decoder.

One forward serves prefill, tree and chain. A layer gets the tokens' hidden states, a `View`
(tree.py) that says who is whose past, and the state it left behind on the trunk; it returns its
output and its new state. It knows nothing about training or serving. Names of fields and tensors
are Hugging Face's, so a checkpoint's tensors load by name; shapes are (B, T, H, D) outside the
attention call.

Left out: dropout (nobody here trains a target in earnest), biases, and every family but Llama's and
Qwen3's dense ones.

    python model.py             two tokens of attention by hand, and a layer's tensors
    pytest tests/test_model.py  logits against transformers
"""

from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from files import open_tensors, tensor_files
from tree import View, causal_view

FAMILIES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}  # model_type: architecture
# Config fields that change the arithmetic and are not implemented, each with the values that leave
# it unchanged.
PLAIN_VALUES = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_sliding_window": (False,),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "num_experts": (0,),
    "partial_rotary_factor": (1.0,),
}
NEEDED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
NEEDED += ("num_attention_heads",)
FP8_BLOCK = 128


@dataclass(frozen=True)
class ModelConfig:
    """A decoder's shape, in the field names of its config.json."""

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

    def __post_init__(self):
        for field in fields(self):
            value, kind = getattr(self, field.name), type(field.default)
            kinds = (int, float) if kind is float else (kind,)
            if not isinstance(value, kinds) or (kind in (int, float) and value <= 0):
                raise ValueError(f"{field.name} is {value!r}, no positive number")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is no multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd: rotary needs pairs")

    @classmethod
    def from_dict(cls, found: dict, source: str = "config.json") -> "ModelConfig":
        """Read a public config.json; unknown keys are harmless, unimplemented arithmetic is an
        error."""
        if found.get("model_type") not in FAMILIES:
            kind = found.get("model_type")
            raise ValueError(f"{source}: model_type {kind!r}; implemented: {', '.join(FAMILIES)}")
        for name, plain in PLAIN_VALUES.items():
            if found.get(name) is not None and found[name] not in plain:
                raise ValueError(f"{source}: {name} = {found[name]!r} is not implemented")
        if set(found.get("layer_types") or ()) - {"full_attention"}:
            raise ValueError(f"{source}: layer_types other than full_attention are not implemented")
        stored = found.get("quantization_config") or {}
        block = stored.get("weight_block_size", [FP8_BLOCK, FP8_BLOCK])
        if stored and (stored.get("quant_method") != "fp8" or block != [FP8_BLOCK, FP8_BLOCK]):
            raise ValueError(f"{source}: quantization_config {stored} is not implemented")
        rope = found.get("rope_parameters") or {}
        for given in (rope, found.get("rope_scaling") or {}):  # newer and older spelling
            kind = given.get("rope_type", given.get("type", "default"))
            nested = any(isinstance(value, dict) for value in given.values())
            if kind != "default" or nested or given.get("partial_rotary_factor", 1.0) != 1.0:
                raise ValueError(f"{source}: rope {given} is not implemented, only the default")
        values = {f.name: found[f.name] for f in fields(cls) if found.get(f.name) is not None}
        if missing := [name for name in NEEDED if name not in values]:
            raise ValueError(f"{source}: lacks {', '.join(missing)}")
        theta = rope.get("rope_theta", found.get("rope_theta", cls.rope_theta))
        values["rope_theta"] = float(theta)
        values.setdefault("num_key_value_heads", values["num_attention_heads"])
        try:
            values.setdefault("head_dim", values["hidden_size"] // values["num_attention_heads"])
            return cls(**values)
        except (ValueError, TypeError, ZeroDivisionError) as error:
            raise ValueError(f"{source}: {error}") from None

    def to_dict(self) -> dict:
        """The fields of a config.json that transformers and the engines open."""
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        rope = {"rope_theta": self.rope_theta, "rope_type": "default"}
        return found | {"rope_parameters": rope, "hidden_act": "silu", "attention_bias": False}


# ---------------------------------------------------------------------------------------- functions


def rotary(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and signed sin (B,N,1,D) of positions (B,N), float32; see `rotate`."""
    frequency = theta ** -(torch.arange(0, head_dim, 2, device=positions.device) / head_dim)
    angle = positions[..., None].float() * frequency  # (B, N, D/2)
    sin = angle.sin()
    return torch.cat([angle.cos()] * 2, -1)[:, :, None], torch.cat([-sin, sin], -1)[:, :, None]


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair (x_i, x_{i+D/2}) of x (B,N,H,D) by its angle."""
    cos, sin = rope
    return (x.float() * cos + x.float().roll(x.shape[-1] // 2, -1) * sin).to(x.dtype)


def joined(past: Tensor | None, new: Tensor, num_slots: int) -> Tensor:
    """The past's first num_slots entries, then the new ones: (B, num_slots + N, ...).

    A cache with room to spare takes the new entries in place, behind every slot in use, where
    nothing looks before a commit moves them; that saves a decoding round the copy of its whole
    past.
    """
    if past is None:
        return new
    end = num_slots + new.shape[1]
    if past.shape[1] < end:
        return torch.cat([past[:, :num_slots], new], 1)
    past[:, num_slots:end] = new
    return past[:, :end]


# ------------------------------------------------------------------------------------------ modules


class RMSNorm(nn.Module):
    """x / rms(x) * weight, the mean in float32."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention, with a norm on each head's q and k but for Llama. State: keys and
    values (B,T,2,H_kv,D)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        C, D = config.hidden_size, config.head_dim
        self.head_dim = D
        self.q_proj = nn.Linear(C, config.num_attention_heads * D, bias=False)
        self.k_proj = nn.Linear(C, config.num_key_value_heads * D, bias=False)
        self.v_proj = nn.Linear(C, config.num_key_value_heads * D, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * D, C, bias=False)
        normed = config.model_type != "llama"
        self.q_norm = RMSNorm(D, config.rms_norm_eps) if normed else nn.Identity()
        self.k_norm = RMSNorm(D, config.rms_norm_eps) if normed else nn.Identity()

    def keys_values(self, x: Tensor, rope) -> Tensor:
        """x (B,N,C) -> rotated keys and values (B,N,2,H_kv,D): what this layer remembers of x."""
        split = (*x.shape[:2], -1, self.head_dim)
        k = rotate(self.k_norm(self.k_proj(x).view(split)), rope)
        return torch.stack([k, self.v_proj(x).view(split)], 2)

    def forward(self, x: Tensor, rope, view: View, past: Tensor | None = None):
        """x (B,N,C), the trunk's keys and values or None -> out (B,N,C), keys and values of the N
        tokens."""
        B, N, _ = x.shape
        q = rotate(self.q_norm(self.q_proj(x).view(B, N, -1, self.head_dim)), rope)
        new = self.keys_values(x, rope)
        k, v = joined(past, new, view.num_trunk_slots).unbind(2)  # (B, T+N, H_kv, D)
        out = F.scaled_dot_product_attention(
            *(t.transpose(1, 2) for t in (q, k, v)),  # (B, H, T, D) inside the call only
            attn_mask=view.mask,
            is_causal=view.mask is None,
            enable_gqa=q.shape[2] != k.shape[2],
        )
        return self.o_proj(out.transpose(1, 2).reshape(B, N, -1)), new


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        C, I = config.hidden_size, config.intermediate_size  # noqa: E741
        self.gate_proj = nn.Linear(C, I, bias=False)
        self.up_proj = nn.Linear(C, I, bias=False)
        self.down_proj = nn.Linear(I, C, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)). Targets and drafters are stacks of these."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, rope, view: View, past=None):
        attended, new = self.self_attn(self.input_layernorm(x), rope, view, past)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), new


class Decoder(nn.Module):
    """Embedding, layers, final norm."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, tokens: Tensor, view: View, past: list | None = None, tap_ids=()):
        """tokens (B,N) -> final hidden (B,N,C), taps (B,N,len(tap_ids)*C) or None, each layer's new
        state.

        A tap is the output of decoder layer L (0-based), before any final norm.
        """
        x = self.embed_tokens(tokens)  # (B, N, C)
        rope = rotary(view.positions, self.config.head_dim, self.config.rope_theta)
        taps, states = {}, []
        for index, layer in enumerate(self.layers):
            x, state = layer(x, rope, view, past[index] if past else None)
            states.append(state)
            if index in tap_ids:
                taps[index] = x
        tapped = torch.cat([taps[i] for i in tap_ids], -1) if tap_ids else None
        return self.norm(x), tapped, states


def load_weights(
    module: nn.Module, folder, device="cpu", dtype=None, rename=lambda name: name, tied=None
) -> int:
    """Fill a module (built on meta or not) from a folder's shards, tensor by tensor, straight to
    device and dtype (None keeps the file's). Returns how many tensors were skipped.

    Loud: every tensor of the module must be there with its shape and finite, every tensor there
    must be used or renamed to None, which skips it. `tied` {name: other name} may be absent, being
    the other. FP8 weights with a `_scale_inv` per 128 x 128 block are dequantised (to bfloat16 if
    dtype is None).
    """
    wanted, files = module.state_dict(keep_vars=True), tensor_files(folder)
    names, skipped = {}, 0
    for stored in files:
        name = rename(stored)
        if name is None:
            skipped += 1
        elif not (name.endswith("_scale_inv") and stored.removesuffix("_scale_inv") in files):
            names[name] = stored
    names = {n: names[other] for n, other in (tied or {}).items() if other in names} | names
    if missing := sorted(set(wanted) - set(names)):
        raise ValueError(f"{folder}: tensor {missing[0]} is missing ({len(missing)} in all)")
    if extra := sorted(set(names) - set(wanted)):
        where = files[names[extra[0]]]
        raise ValueError(f"{where}: tensor {extra[0]} has no place here ({len(extra)} in all)")
    opened = {path: open_tensors(path) for path in set(files.values())}
    found = {}
    for name in sorted(wanted, key=lambda name: str(files[names[name]])):  # one shard after another
        stored, shape = names[name], tuple(wanted[name].shape)
        path = files[stored]
        has = tuple(opened[path].get_slice(stored).get_shape())
        if has != shape:
            raise ValueError(f"{path}: tensor {stored} has shape {has}, the config says {shape}")
        tensor = opened[path].get_tensor(stored)
        if not tensor.is_floating_point():
            raise ValueError(f"{path}: tensor {stored} holds {tensor.dtype}, no floating point")
        if tensor.dtype == torch.float8_e4m3fn:
            scales = f"{stored}_scale_inv"
            if scales not in files:
                raise ValueError(f"{path}: tensor {stored} is FP8 but {scales} is missing")
            tensor = dequantised(tensor, opened[files[scales]].get_tensor(scales))
            tensor = tensor.to(dtype or torch.bfloat16)
        if not tensor.isfinite().all():
            raise ValueError(f"{path}: tensor {stored} holds NaN or infinite values")
        found[name] = tensor.to(device, dtype)
    module.load_state_dict(found, assign=True)
    return skipped


def dequantised(weight: Tensor, scales: Tensor) -> Tensor:
    """weight (R,C) in FP8 times its scale per 128 x 128 block, scales (ceil(R/128),
    ceil(C/128))."""
    R, C = weight.shape
    if scales.shape != (-(-R // FP8_BLOCK), -(-C // FP8_BLOCK)):
        raise ValueError(f"FP8 scales {tuple(scales.shape)} do not fit a weight of {(R, C)}")
    whole = scales.float().repeat_interleave(FP8_BLOCK, 0).repeat_interleave(FP8_BLOCK, 1)
    return weight.float() * whole[:R, :C]


def init_weights(module: nn.Module, std: float = 0.02) -> None:
    """Fresh weights: normal matrices, unit norms. Used as `model.apply(init_weights)`."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=std)


def main():
    torch.manual_seed(0)
    config = ModelConfig(num_hidden_layers=1, hidden_size=8, intermediate_size=16, head_dim=4,
                         num_attention_heads=2, num_key_value_heads=1, vocab_size=11)  # fmt: skip
    decoder = Decoder(config).apply(init_weights)
    print("a decoder of one layer, tensor by tensor (Hugging Face's names):")
    for name, tensor in decoder.named_parameters():
        print(f"  {name:48s} {tuple(tensor.shape)}")
    tokens = torch.tensor([[1, 2, 3, 4]])
    whole, _, _ = decoder(tokens, causal_view(1, 4))
    _, _, past = decoder(tokens[:, :3], causal_view(1, 3))
    view = View(torch.tensor([[3]]), torch.ones(1, 1, 1, 4, dtype=torch.bool))
    last, _, _ = decoder(tokens[:, 3:], view, past)
    print(
        "\nfinal hidden of token 3, run with its past, and alone on the cache of tokens 0..2:"
    )
    print("  ", [round(v, 4) for v in whole[0, 3].tolist()])
    print("  ", [round(v, 4) for v in last[0, 0].tolist()])
    print(f"  largest difference {(whole[0, 3] - last[0, 0]).abs().max().item():.1e}")
    rope = rotary(torch.arange(3)[None], 4, 1e4)
    state = decoder.layers[0].self_attn.keys_values(torch.ones(1, 3, 8), rope)  # (1, 3, 2, 1, 4)
    print("\nthe same token at positions 0, 1, 2 has keys of one length, turned (rotary):")
    for position in range(3):
        key = state[0, position, 0, 0]
        print(f"   {[round(v, 3) for v in key.tolist()]}   length {key.norm().item():.4f}")


if __name__ == "__main__":
    with torch.no_grad():
        main()
