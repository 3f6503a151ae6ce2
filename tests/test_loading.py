"""Checkpoint folders: shards, FP8, both families, and every way to spoil one. `pytest
tests/test_loading.py`"""

import json
import struct
import sys

import pytest
import torch
from conftest import SMALL, randomise, small_target
from safetensors.torch import load_file, save_file

from hf.tensors import FP8_BLOCK, checkpoint_folder
from hf.tokenizer import load_tokenizer, write_byte_tokenizer
from target import Target

transformers = pytest.importorskip("transformers")
VARIANTS = {  # what can vary, varied
    "plain": dict(),
    "one kv head": dict(num_key_value_heads=1),
    "as many kv heads": dict(num_key_value_heads=4),
    "wide heads": dict(head_dim=24),
    "tied": dict(tie_word_embeddings=True),
    "older rope": dict(theta_only=777.0),
    "deep": dict(num_hidden_layers=6, rms_norm_eps=1e-4),
}


def theirs_saved(folder, family: str, variant: dict, **save):
    """A random tiny model of transformers', everything moved away from its initial value."""
    kind = {"llama": "Llama", "qwen3": "Qwen3"}[family]
    variant = dict(variant)
    theta = variant.pop("theta_only", None)
    options = SMALL | {"rope_parameters": {"rope_theta": 5000.0, "rope_type": "default"}} | variant
    if theta:
        options["rope_parameters"] = {"rope_theta": theta, "rope_type": "default"}
    model = getattr(transformers, f"{kind}ForCausalLM")(
        getattr(transformers, f"{kind}Config")(**options)
    )
    randomise(model, 0, 0.2)
    model.float().save_pretrained(folder, **save)
    if theta:  # the spelling of older files
        path = folder / "config.json"
        config = json.loads(path.read_text())
        del config["rope_parameters"]
        path.write_text(json.dumps(config | {"rope_theta": theta, "rope_scaling": None}))
    return model


def first_difference(ours: Target, theirs, tokens) -> str:
    """The first decoder layer whose output differs, for a failing test's message."""
    outputs = theirs(tokens, output_hidden_states=True).hidden_states
    ours.tap_ids = tuple(range(ours.config.num_hidden_layers))
    taps = ours.prefill(tokens, torch.full((len(tokens),), tokens.shape[1])).taps
    lines = []
    for layer, tap in enumerate(taps.chunk(len(ours.tap_ids), -1)):
        if layer + 1 < len(ours.tap_ids):  # transformers' last one is behind the final norm
            gap = (tap - outputs[layer + 1]).abs().max().item()
            lines.append(f"layer {layer}: {gap:.1e} {'OK' if gap < 1e-4 else 'DIFFERS'}")
    return "\n".join(lines)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_logits_and_taps_equal_transformers(tmp_path, family, variant):
    theirs = theirs_saved(tmp_path, family, VARIANTS[variant])
    ours = Target.from_pretrained(tmp_path)
    tokens = torch.randint(0, 24, (3, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        gap = (ours(tokens) - theirs(tokens).logits).abs().max()
        assert gap < 1e-4, first_difference(ours, theirs, tokens)
        report = first_difference(ours, theirs, tokens)
    assert "DIFFERS" not in report and report.count("OK") == ours.config.num_hidden_layers - 1


def test_the_comparison_finds_the_first_wrong_layer(tmp_path):
    theirs = theirs_saved(tmp_path, "llama", {})
    ours = Target.from_pretrained(tmp_path)
    ours.model.layers[1].mlp.up_proj.weight[0, 0] += 1.0
    with torch.no_grad():
        lines = first_difference(ours, theirs, torch.arange(12)[None]).splitlines()
    assert lines[0].endswith("OK") and lines[1].endswith("DIFFERS")


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_what_is_saved_here_opens_there(tmp_path, family):
    target = small_target(model_type=family, tie_word_embeddings=family == "llama")
    target.save_pretrained(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        torch.testing.assert_close(target(tokens), theirs(tokens).logits, atol=1e-4, rtol=0)


def test_prefill_in_chunks_and_token_by_token_equal_prefill_at_once(tmp_path):
    """A chunk is a chain that hangs on the trunk, committed whole."""
    from tree import build_tree

    theirs_saved(tmp_path, "llama", {})
    target, tokens = Target.from_pretrained(tmp_path), torch.arange(23)[None]
    whole = target.prefill(tokens, torch.tensor([23]))
    for size in (1, 5):
        trunk = target.prefill(tokens[:, :3], torch.tensor([3]))
        while trunk.width < 23:
            chunk = tokens[:, trunk.width : trunk.width + size]
            text = torch.cat([trunk.tokens[:, : trunk.width], chunk[:, :1]], 1)
            tree = build_tree(
                text, trunk.lengths, trunk.lengths[:, None], chunk[:, None, None, 1:], False, True
            )
            n = chunk.shape[1]
            trunk = target.commit(trunk, tree, target.score(trunk, tree), torch.arange(n)[None])
        torch.testing.assert_close(trunk.hidden[:, :23], whole.hidden, atol=1e-4, rtol=0)
        torch.testing.assert_close(trunk.taps[:, :23], whole.taps, atol=1e-4, rtol=0)


def test_shards_are_read_like_one_file(tmp_path):
    theirs_saved(tmp_path / "one", "qwen3", {})
    theirs_saved(tmp_path / "many", "qwen3", {}, max_shard_size="20KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    one, many = (Target.from_pretrained(tmp_path / name).state_dict() for name in ("one", "many"))
    assert one.keys() == many.keys() and all(torch.equal(one[k], many[k]) for k in one)


def test_fp8_weights_are_dequantised_by_block(tmp_path):
    wide = dict(hidden_size=160, intermediate_size=200, head_dim=40)
    theirs_saved(tmp_path, "qwen3", wide)
    path = tmp_path / "model.safetensors"
    tensors, plain = load_file(path), {}
    for name, weight in list(tensors.items()):
        if "_proj" not in name:
            plain[name] = weight
            continue
        R, C = weight.shape
        rows, columns = -(-R // FP8_BLOCK), -(-C // FP8_BLOCK)
        scales = 0.5 + torch.rand(rows, columns)
        tensors[name] = (weight * 50).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scales
        plain[name] = torch.empty(R, C)
        for r in range(R):
            for b in range(columns):  # by the block, in plain loops
                cut = slice(b * FP8_BLOCK, (b + 1) * FP8_BLOCK)
                plain[name][r, cut] = tensors[name][r, cut].float() * scales[r // FP8_BLOCK, b]
    save_file(tensors, path, {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["dtype"] = "bfloat16"
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = Target.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    assert all(torch.equal(loaded[name], plain[name]) for name in plain)
    half = Target.from_pretrained(tmp_path).state_dict()["model.layers.0.mlp.up_proj.weight"]
    assert half.dtype == torch.bfloat16


def test_rotary_frequencies_of_old_conversions_are_skipped(tmp_path):
    small_target().save_pretrained(tmp_path)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(lambda t: t.update({name: torch.ones(4)}))(tmp_path)
    Target.from_pretrained(tmp_path)


def rewrite(change):
    def spoil(folder):
        path = folder / "model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, {"format": "pt"})

    return spoil


def reconfigure(**changes):
    def spoil(folder):
        path = folder / "config.json"
        config = {k: v for k, v in (json.loads(path.read_text()) | changes).items() if v != "gone"}
        path.write_text(json.dumps(config))

    return spoil


def cut(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def lying_header(folder):
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 10**9) + path.read_bytes()[8:])


def index_to_nothing(folder):
    (folder / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "none.safetensors"}}'
    )


def index_of_more(folder):
    names = dict.fromkeys([*load_file(folder / "model.safetensors"), "extra"], "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


Q = "model.layers.0.self_attn.q_proj.weight"
UP = "model.layers.1.mlp.up_proj.weight"
SPOILED = {
    "truncated file": (cut, "model.safetensors is damaged"),
    "header longer than the file": (lying_header, "damaged"),
    "missing file": (lambda f: (f / "model.safetensors").unlink(), "missing"),
    "index pointing at nothing": (index_to_nothing, "none.safetensors is missing"),
    "index naming a tensor that is nowhere": (index_of_more, "extra"),
    "empty index": (lambda f: (f / "model.safetensors.index.json").write_text("{}"), "weight_map"),
    "missing tensor": (rewrite(lambda t: t.pop(Q)), Q),
    "extra tensor": (rewrite(lambda t: t.update(extra=torch.zeros(2))), "extra has no place"),
    "transposed weight": (rewrite(lambda t: t.update({UP: t[UP].T.contiguous()})), r"\(32, 48\)"),
    "wrong dtype": (rewrite(lambda t: t.update({Q: t[Q].int()})), "int32"),
    "NaN weights": (rewrite(lambda t: t[Q].fill_(torch.nan)), "NaN"),
    "FP8 alone": (rewrite(lambda t: t.update({Q: t[Q].to(torch.float8_e4m3fn)})), "scale_inv"),
    "untied and no head": (rewrite(lambda t: t.pop("lm_head.weight")), "lm_head.weight"),
    "layer kinds": (reconfigure(layer_types=["linear_attention"] * 3), "layer_types"),
    "unknown model_type": (reconfigure(model_type="rwkv"), "rwkv"),
    "yarn in the older spelling": (
        reconfigure(rope_scaling={"rope_type": "yarn", "factor": 4.0}),
        "yarn",
    ),
    "rope by layer type": (reconfigure(rope_parameters={"full_attention": {}}), "rope"),
    "yarn": (reconfigure(rope_parameters={"rope_type": "yarn", "factor": 4.0}), "yarn"),
    "negative size": (reconfigure(hidden_size=-32), "hidden_size"),
    "size of another kind": (reconfigure(num_hidden_layers="3"), "num_hidden_layers"),
    "heads not divisible": (reconfigure(num_key_value_heads=3), "num_key_value_heads"),
    "no size at all": (reconfigure(vocab_size="gone"), "vocab_size"),
    "attention bias": (reconfigure(attention_bias=True), "attention_bias"),
    "awq": (reconfigure(quantization_config={"quant_method": "awq"}), "quantization"),
    "config not JSON": (lambda f: (f / "config.json").write_text("{"), "not valid JSON"),
    "config a list": (lambda f: (f / "config.json").write_text("[]"), "no JSON object"),
    "a drafter's": (reconfigure(block_size=8), "holds a drafter, not a target"),
    "empty folder": (lambda f: [p.unlink() for p in f.iterdir()], "config.json is missing"),
    "vocabulary smaller than the tokenizer": (write_byte_tokenizer, "tokenizer"),
}


def spoiled_is_refused(folder, spoil, word: str) -> None:
    """A folder that opens does not once it is spoiled, and the error names it and the reason."""
    Target.from_pretrained(folder)
    spoil(folder)
    with pytest.raises((ValueError, FileNotFoundError), match=word) as error:
        Target.from_pretrained(folder)
    assert str(folder) in str(error.value)


@pytest.mark.parametrize("case", SPOILED)
def test_a_spoiled_checkpoint_is_one_clear_error(tmp_path, case):
    small_target().save_pretrained(tmp_path)
    spoiled_is_refused(tmp_path, *SPOILED[case])


def test_no_tokenizer_and_no_hub_are_clear_errors(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # as if it were not installed
    with pytest.raises(FileNotFoundError, match="tokenizer.json"):
        load_tokenizer(tmp_path)
    with pytest.raises(FileNotFoundError, match="pip install huggingface_hub"):
        checkpoint_folder("some/model-that-is-nowhere")
