"""The folders that real models come in: every tensor of the 27B and of Flash-Next has its place, at
their real sizes, without their weights; memory while loading; FP8. `pytest tests/test_layouts.py`
"""

import json
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, small_target
from safetensors.torch import load_file, save_file
from test_families import theirs_saved
from test_loading import reconfigure, rewrite, spoiled_is_refused

from hf.config import ModelConfig
from hf.tensors import layout, plan
from target import Target

transformers = pytest.importorskip("transformers")
MIXED_64 = ["full_attention" if (i + 1) % 4 == 0 else "linear_attention" for i in range(64)]
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
    layer_types=MIXED_64,
    rope_parameters=ROPE,
    max_position_embeddings=262144,
)
FLASH = DENSE | dict(
    hidden_size=2560,
    num_hidden_layers=48,
    num_key_value_heads=2,
    layer_types=MIXED_64[:48],
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
DENSE_KINDS = ("Qwen3_5Config", "Qwen3_5ForConditionalGeneration")
FLASH_KINDS = ("Qwen4ExpConfig", "Qwen4ExpForConditionalGeneration")


def on_meta(found: dict) -> tuple[ModelConfig, dict]:
    config = ModelConfig.from_dict(found)
    with torch.device("meta"):
        return config, Target(config).state_dict()


def mapped(config, wanted, shapes) -> int:
    """How many are skipped; raises where a tensor has no place, no shape or no source."""
    where = dict.fromkeys(shapes, "shard")
    return plan(wanted, shapes, where, layout(config), {}, "folder")[1]


def dense_release() -> dict:
    """Names and shapes of the 27B as released, written from the description of the format."""
    C, V, I = 5120, 248320, 17408  # noqa: E741
    shapes = {"lm_head.weight": (V, C), "mtp.fc.weight": (C, 2 * C), "model.visual.pos": (4, 4)}
    base = "model.language_model."
    shapes |= {f"{base}embed_tokens.weight": (V, C), f"{base}norm.weight": (C,)}
    for i in range(64):
        layer = f"{base}layers.{i}."
        shapes |= {f"{layer}{name}_layernorm.weight": (C,) for name in ("input", "post_attention")}
        shapes |= {f"{layer}mlp.{name}_proj.weight": (I, C) for name in ("gate", "up")}
        shapes |= {f"{layer}mlp.down_proj.weight": (C, I)} | mixer(layer, i, C, 4)
    return shapes


def mixer(layer: str, i: int, C: int, kv: int) -> dict:
    if (i + 1) % 4 == 0:
        own = {"q_proj": (24 * 512, C), "k_proj": (kv * 256, C), "v_proj": (kv * 256, C)}
        own |= {"o_proj": (C, 24 * 256), "q_norm": (256,), "k_norm": (256,)}
        return {f"{layer}self_attn.{name}.weight": shape for name, shape in own.items()}
    own = {"in_proj_qkv.weight": (2 * 2048 + 6144, C), "in_proj_z.weight": (6144, C)}
    own |= {"in_proj_a.weight": (48, C), "in_proj_b.weight": (48, C), "out_proj.weight": (C, 6144)}
    own |= {"conv1d.weight": (10240, 1, 4), "A_log": (48,), "dt_bias": (48,), "norm.weight": (128,)}
    return {f"{layer}linear_attn.{name}": shape for name, shape in own.items()}


def flash_release() -> dict:
    """Likewise Flash-Next: fused experts, 128 shards, hashes in the file."""
    C, V, wide = 2560, 248320, 4 * 2560
    shapes = {"lm_head.weight": (V, C), "mtp.fc.weight": (C, 2 * C), "model.visual.pos": (4, 4)}
    base = "model.language_model."
    shapes[f"{base}embed_tokens.weight"] = (V, C)
    streams = {"hc_norm": (wide,), "input_mix_weight_down": (320, wide)}
    streams |= {"input_mix_weight_up": (wide, 320)}
    shapes |= {f"{base}hyper_connection_mixer.{n}.weight": s for n, s in streams.items()}
    for i in range(48):
        layer = f"{base}layers.{i}."
        for place in ("attn", "mlp"):
            both = streams | {"block_inject_weight": (4, wide)}
            shapes |= {f"{layer}{place}_hyper_connection.{n}.weight": s for n, s in both.items()}
        shapes |= {
            f"{layer}mlp.gate.weight": (512, C),
            f"{layer}mlp.shared_expert_gate.weight": (1, C),
            f"{layer}mlp.experts.gate_up_proj": (512, 1280, C),
            f"{layer}mlp.experts.down_proj": (512, C, 640),
            f"{layer}mlp.shared_expert.gate_proj.weight": (640, C),
            f"{layer}mlp.shared_expert.up_proj.weight": (640, C),
            f"{layer}mlp.shared_expert.down_proj.weight": (C, 640),
        } | mixer(layer, i, C, 2)
        if (i + 1) % 4 == 0:
            index = f"{layer}self_attn.indexer."
            shapes |= {f"{index}index_qk_proj.weight": (5 * 128, C)}
            shapes |= {f"{index}{name}_layernorm.weight": (128,) for name in ("q", "k")}
    ple, table = f"{base}layers.1.ple.", f"{base}layers.1.ple.ple_embedding."
    shapes |= {f"{ple}key_proj.weight": (wide, C), f"{ple}value_proj.weight": (C, C)}
    shapes |= {f"{ple}norm_{name}.weight": (wide,) for name in ("key", "query", "conv")}
    shapes |= {f"{ple}conv1d.weight": (wide, 1, 4), f"{table}layer_multipliers": (3,)}
    shapes |= {f"{table}ngram_heads_{name}": (16,) for name in ("vocab_sizes", "offsets")}
    for n in range(128):
        shapes[f"{table}ngram_embedding.shard_{n}.weight"] = (2_500_012, 160)
    return shapes


@pytest.mark.parametrize("name", ["27B", "Flash-Next"])
def test_the_released_layout_has_a_place_for_everything(name):
    kind, text = ("qwen3_5", DENSE) if name == "27B" else ("qwen4_exp", FLASH)
    config, wanted = on_meta({"model_type": kind, "text_config": text})
    shapes = dense_release() if name == "27B" else flash_release()
    assert mapped(config, wanted, shapes) == 2
    numbers = sum(tensor.numel() for tensor in wanted.values()) / 1e9
    low, high = (26, 28) if name == "27B" else (170, 180)  # 125 and the 51 of the table
    assert low < numbers < high
    lost = next(n for n in shapes if n.endswith("conv1d.weight"))
    with pytest.raises(ValueError, match="conv1d.weight is missing"):
        mapped(config, wanted, {n: s for n, s in shapes.items() if n != lost})
    with pytest.raises(ValueError, match="has no place"):
        mapped(config, wanted, shapes | {"model.language_model.layers.99.norm.weight": (1,)})


@pytest.mark.parametrize("kinds, text", [(DENSE_KINDS, DENSE), (FLASH_KINDS, FLASH)])
def test_what_transformers_would_save_at_real_sizes_has_a_place_too(kinds, text, monkeypatch):
    """Its own model on the meta device, through its own save conversion; only the writing of the
    files is caught."""
    from transformers.core_model_loading import revert_weight_conversion

    both, whole = (getattr(transformers, name) for name in kinds)
    vision = dict(depth=1, hidden_size=64, num_heads=2, out_hidden_size=text["hidden_size"])
    with torch.device("meta"):
        model = whole(both(text_config=text, vision_config=vision))
    saved = revert_weight_conversion(model, dict(model.state_dict()))
    shapes = {name: tuple(tensor.shape) for name, tensor in saved.items()}
    found = model.config.to_dict()
    config, wanted = on_meta(found)
    assert mapped(config, wanted, shapes) == sum(".visual." in name for name in shapes)
    assert mapped(config, wanted, shapes) > 5


LOADER = """
import sys
sys.path.insert(0, {root!r})
import torch, checkpoint, target
def peak():
    for line in open("/proc/self/status"):
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
with torch.device("meta"):  # what torch itself loads at first use
    target.Target.toy({family!r})
torch.randn(1000).bfloat16().aminmax()
before = peak()
made = target.Target.from_pretrained({folder!r}, dtype={dtype})
own = {{id(t): t.nbytes for t in made.state_dict().values()}}
print(peak() - before, sum(own.values()), max(own.values()))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads peak memory from /proc")
@pytest.mark.parametrize("dtype", ["None", "torch.bfloat16"])
@pytest.mark.parametrize("family", ["gqa", "qsa"])
def test_loading_takes_the_model_and_its_largest_tensor(tmp_path, family, dtype):
    sizes = dict(hidden_size=768, intermediate_size=2048, num_hidden_layers=8, vocab_size=30_000)
    if family == "qsa":
        sizes |= dict(moe_intermediate_size=256, num_experts=16, num_hidden_layers=4)
    small_target(arch=family, **sizes).save_pretrained(tmp_path)
    shard(tmp_path, 40e6)
    code = LOADER.format(root=str(ROOT), folder=str(tmp_path), dtype=dtype, family=family)
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    used, model, largest = map(int, out.stdout.split()[-3:])
    stored = largest * (2 if dtype != "None" else 1)  # the largest as the file holds it
    print(f"{family} {dtype}: {used / 1e6:.0f} MB for {model / 1e6:.0f} + {stored / 1e6:.0f}")
    assert used < model + stored + 10e6


def shard(folder, size: float) -> None:
    """Split model.safetensors into shards of about `size` bytes with an index."""
    whole = load_file(folder / "model.safetensors")
    shards, held = [{}], 0
    for name, tensor in whole.items():
        if held > size:
            shards, held = [*shards, {}], 0
        shards[-1][name], held = tensor, held + tensor.nbytes
    index = {}
    for number, tensors in enumerate(shards):
        file = f"model-{number:05d}.safetensors"
        save_file(tensors, folder / file, {"format": "pt"})
        index |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def test_fp8_experts_and_an_fp8_table_with_one_scale(tmp_path):
    theirs_saved(tmp_path, "qsa", {"fused": True})
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    plain = Target.from_pretrained(tmp_path)
    name = next(n for n in tensors if n.endswith("experts.gate_up_proj"))
    E, R, C = tensors[name].shape
    scales = torch.rand(E, 1, 1) + 0.5
    tensors[name] = (tensors[name] / scales * 40).to(torch.float8_e4m3fn)
    tensors[f"{name}_scale_inv"] = scales / 40
    wanted = tensors[name].float() * (scales / 40)
    scale, rows = 0.25, []
    shards = sorted(n for n in tensors if ".shard_" in n)
    for shard_name in shards:
        tensors[shard_name] = (tensors[shard_name] / scale).to(torch.float8_e4m3fn)
        rows.append(tensors[shard_name].float() * scale)
    stem = shards[0].partition("shard_")[0]
    tensors[f"{stem}weight_scale"] = torch.tensor(scale)
    save_file(tensors, path, {"format": "pt"})
    loaded = Target.from_pretrained(tmp_path, dtype=torch.float32)
    state = loaded.state_dict()
    assert torch.equal(state[name], wanted)
    table = state[f"{stem}weight"]
    assert table.dtype == torch.float8_e4m3fn  # stays as it is; rows are converted as looked up
    embedding = loaded.model.layers[1].ple.ple_embedding.ngram_embedding
    found = embedding(torch.arange(len(table)), torch.float32)
    assert torch.equal(found, torch.cat(rows))
    tokens = torch.arange(40)[None]
    gap = (loaded(tokens) - plain(tokens)).abs().max()
    print(f"FP8 moves the logits by {gap:.1e} of {plain(tokens).abs().max():.1e}")
    assert 0 < gap < 0.5  # rounding to FP8 shows, and no more
    tensors[f"{stem}weight_scale"] = torch.tensor([scale])
    save_file(tensors, path, {"format": "pt"})
    again = Target.from_pretrained(tmp_path)  # the config says float32
    assert torch.equal(again(tokens), loaded(tokens))
    del tensors[f"{stem}weight_scale"]
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ValueError, match="weight_scale is missing"):
        Target.from_pretrained(tmp_path)
    tensors[f"{stem}weight_scale"] = torch.tensor(scale)
    tensors[shards[1]] = tensors[shards[1]].float()
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ValueError, match="another shard"):
        Target.from_pretrained(tmp_path)


GATE = "model.layers.0.mlp.experts.2.up_proj.weight"
SPOILED = {
    "scales beside a weight that is not FP8": (
        rewrite(lambda t: t.update({f"{GATE}_scale_inv": torch.ones(1, 1)})),
        "no FP8",
    ),
    "the other FP8": (
        rewrite(lambda t: t.update({GATE: t[GATE].to(torch.float8_e5m2)})),
        "float8_e5m2",
    ),
    "layer kinds no list": (reconfigure(layer_types=5), "layer_types"),
    "layer kinds no words": (reconfigure(layer_types=[[1]]), "layer_types"),
    "n-gram layers no list": (reconfigure(ple_layer_ids=2), "ple_layer_ids"),
    "no stop id in the list": (reconfigure(eos_token_id=[]), "eos_token_id"),
    "quantization a word": (reconfigure(quantization_config="fp8"), "quantization_config"),
    "rope a word": (reconfigure(rope_parameters="default"), "rope_parameters"),
    "infinite rotary": (
        reconfigure(rope_parameters={"partial_rotary_factor": float("inf")}),
        "partial_rotary",
    ),
    "family a list": (reconfigure(model_type=["qwen4_exp_text"]), "model_type"),
    "eps no number": (reconfigure(rms_norm_eps=float("nan")), "rms_norm_eps"),
    "true for a number": (reconfigure(num_hidden_layers=True), "num_hidden_layers"),
    "tied a word": (reconfigure(tie_word_embeddings="false"), "true or false"),
    "an expert missing": (rewrite(lambda t: t.pop(GATE)), "gate_up_proj has"),
    "an expert too many": (
        rewrite(lambda t: t.update({GATE.replace(".2.", ".9."): t[GATE].clone()})),
        "no place",
    ),
    "an expert of another width": (rewrite(lambda t: t.update({GATE: t[GATE][:5]})), r"\(16, 32\)"),
    "a shard missing": (
        rewrite(lambda t: t.pop("model.layers.1.ple.ple_embedding.ngram_embedding.shard_1.weight")),
        "ngram_embedding.weight has",
    ),
    "hashes missing": (
        rewrite(lambda t: t.pop("model.layers.1.ple.ple_embedding.layer_multipliers")),
        "layer_multipliers is missing",
    ),
    "hashes not whole numbers": (
        rewrite(lambda t: t.update({k: v.float() for k, v in t.items() if "multipliers" in k})),
        "integers",
    ),
    "layer kinds that contradict the tensors": (
        reconfigure(layer_types=["linear_attention"] * 4),
        "no place",
    ),
    "too few layer kinds": (reconfigure(layer_types=["linear_attention"]), "layer_types"),
    "an unknown layer kind": (reconfigure(layer_types=["sliding_attention"] * 4), "layer_types"),
    "value heads not divisible": (reconfigure(linear_num_value_heads=5), "linear_num_value_heads"),
    "n-gram layer on attention": (reconfigure(ple_layer_ids=[4]), "ple_layer_ids"),
    "more experts a token than there are": (reconfigure(num_experts_per_tok=9), "num_experts"),
    "budget not divisible": (reconfigure(indexer_budget=7), "indexer_budget"),
    "two index key heads": (reconfigure(indexer_kv_heads=2), "indexer_kv_heads"),
    "no indexer": (reconfigure(indexer_budget="gone"), "indexer_budget"),
    "gate of another kind": (reconfigure(output_gate_type="tanh"), "output_gate_type"),
    "no stop id for n-grams": (reconfigure(eos_token_id="gone"), "eos_token_id"),
    "yarn": (reconfigure(rope_parameters={"rope_type": "yarn"}), "yarn"),
    "one stream": (reconfigure(hc_count=1), "hc_count"),
    "nested without a text part": (reconfigure(model_type="qwen4_exp"), "text_config"),
    "odd rotary": (
        reconfigure(rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.2}),
        "rotary",
    ),
}


@pytest.mark.parametrize("case", SPOILED)
def test_a_spoiled_hybrid_checkpoint_is_one_clear_error(tmp_path, case):
    theirs_saved(tmp_path, "qsa", {})
    spoiled_is_refused(tmp_path, *SPOILED[case])


def test_skipped_tensors_are_counted_in_one_line(tmp_path, capsys):
    theirs_saved(tmp_path, "gdn", {"nested": True})
    capsys.readouterr()
    Target.from_pretrained(tmp_path)
    said = capsys.readouterr().out
    count = sum(".visual." in name for name in load_file(tmp_path / "model.safetensors"))
    assert said.count("\n") == 1 and f"{count} tensors skipped" in said


@pytest.mark.skipif(sys.platform != "linux", reason="reads peak memory from /proc")
def test_memory_of_a_long_prefill_grows_with_its_length_not_its_square():
    code = f"""
import sys, torch
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
torch.set_num_threads(1)
from conftest import small_target
from test_layouts import peak, reset_peak
target = small_target(arch=sys.argv[1], max_position_embeddings=1 << 20)
target.prefill(torch.zeros(1, 64).long(), torch.tensor([64]))
reset_peak()
before = peak()
T = int(sys.argv[2])
target.prefill(torch.zeros(1, T).long() + 3, torch.tensor([T]), chunk=128, checkpoint_every=0)
print(peak() - before)
"""
    for arch in ("gdn", "qsa"):
        used = [
            int(
                subprocess.run(
                    [sys.executable, "-c", code, arch, str(T)],
                    capture_output=True,
                    text=True,
                    check=True,
                ).stdout
            )
            for T in (4096, 16384)
        ]
        print(f"{arch}: {used[0] / 1e6:.0f} MB for 4,096 tokens, {used[1] / 1e6:.0f} for 16,384")
        assert used[1] < 6 * used[0] + 20e6


def peak() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))


def reset_peak() -> None:
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
