"""Model folders: shards, FP8, and every way to spoil the tensors of one."""

import json
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf.config import FP8_BLOCK
from hf.tensors import has_other_head, load_weights, tensor_files
from small import SMALL, reconfigure, rewrite, small_drafter, small_target, spoiled_is_refused
from support.files import write_tensors
from support.toy import write_byte_tokenizer
from target import Target
from their_models import theirs_saved, transformers


def test_shards_are_read_like_one_file(tmp_path):
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SMALL)).float()
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    one = Target.from_pretrained(tmp_path / "one").state_dict()
    many = Target.from_pretrained(tmp_path / "many").state_dict()
    assert one.keys() == many.keys()
    assert all(torch.equal(one[name], many[name]) for name in one)


def test_an_index_of_the_one_file_beside_it_is_no_contradiction(tmp_path):
    small_target().save_pretrained(tmp_path)
    before = tensor_files(tmp_path)
    index_of(tmp_path, before)
    assert tensor_files(tmp_path) == before


def test_nothing_is_saved_into_a_folder_of_shards(tmp_path):
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SMALL)).float()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    target = Target.from_pretrained(tmp_path)
    target.num_tokens -= 2
    for module in (target, small_drafter(target)):
        with pytest.raises(ValueError, match=f"{tmp_path} holds a model in shards: choose another"):
            module.save_pretrained(tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_fp8_weights_are_dequantised_by_block(tmp_path):
    small_target(hidden_size=160, intermediate_size=200, head_dim=40).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    expected = {}
    for name, weight in list(tensors.items()):
        if "_proj" not in name:
            expected[name] = weight
            continue
        R, C = weight.shape
        num_columns = -(-C // FP8_BLOCK)
        scales = 0.5 + torch.rand(-(-R // FP8_BLOCK), num_columns)
        tensors[name] = (weight * 50).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scales
        expected[name] = torch.empty(R, C)
        for r in range(R):
            for b in range(num_columns):  # by the block, in plain loops
                block = slice(b * FP8_BLOCK, (b + 1) * FP8_BLOCK)
                row = tensors[name][r, block].float()
                expected[name][r, block] = row * scales[r // FP8_BLOCK, b]
    save_file(tensors, path, {"format": "pt"})
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    reconfigure(dtype="bfloat16", quantization_config=quantization)(tmp_path)
    loaded = Target.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)
    half = Target.from_pretrained(tmp_path).state_dict()["model.layers.0.mlp.up_proj.weight"]
    assert half.dtype == torch.bfloat16


def test_fp8_experts_are_dequantised_and_an_fp8_table_with_one_scale_stays(tmp_path):
    theirs_saved(tmp_path, "qsa", {"fused": True})
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    plain = Target.from_pretrained(tmp_path)
    name = next(n for n in tensors if n.endswith("experts.gate_up_proj"))
    scales = torch.rand(len(tensors[name]), 1, 1) + 0.5
    tensors[name] = (tensors[name] / scales * 40).to(torch.float8_e4m3fn)
    tensors[f"{name}_scale_inv"] = scales / 40
    expected = tensors[name].float() * (scales / 40)
    parts = sorted(n for n in tensors if ".shard_" in n)
    table_name = parts[0].partition("shard_")[0] + "weight"
    scale = 0.25
    rows = []
    for part in parts:
        tensors[part] = (tensors[part] / scale).to(torch.float8_e4m3fn)
        rows.append(tensors[part].float() * scale)
    tensors[f"{table_name}_scale"] = torch.tensor(scale)
    save_file(tensors, path, {"format": "pt"})
    loaded = Target.from_pretrained(tmp_path, dtype=torch.float32)
    state = loaded.state_dict()
    assert torch.equal(state[name], expected)
    assert state[table_name].dtype == torch.float8_e4m3fn  # rows are converted as looked up
    embedding = loaded.model.layers[1].ple.ple_embedding.ngram_embedding
    looked_up = embedding(torch.arange(len(state[table_name])), torch.float32)
    assert torch.equal(looked_up, torch.cat(rows))
    tokens = torch.arange(40)[None]
    gap = (loaded(tokens) - plain(tokens)).abs().max()
    print(f"FP8 moves the logits by {gap:.1e} of {plain(tokens).abs().max():.1e}")
    assert 0 < gap < 0.5  # rounding to FP8 shows, and no more

    tensors[f"{table_name}_scale"] = torch.tensor([scale])
    save_file(tensors, path, {"format": "pt"})
    again = Target.from_pretrained(tmp_path)  # the config says float32
    assert torch.equal(again(tokens), loaded(tokens))

    del tensors[f"{table_name}_scale"]
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ValueError, match="weight_scale is missing"):
        Target.from_pretrained(tmp_path)

    tensors[f"{table_name}_scale"] = torch.tensor(scale)
    tensors[parts[1]] = tensors[parts[1]].float()
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ValueError, match="another shard"):
        Target.from_pretrained(tmp_path)


def replace_head(folder, change) -> None:
    """Put change(embedding) into a folder as its lm_head, in another shard where there are some."""
    target = Target.from_pretrained(folder)
    head = {"lm_head.weight": change(target.model.embed_tokens.weight.detach())}
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return rewrite(lambda tensors: tensors.update(head))(folder)
    shards = json.loads(index.read_text())
    shards["weight_map"]["lm_head.weight"] = "head.safetensors"
    index.write_text(json.dumps(shards))
    save_file(head, folder / "head.safetensors", {"format": "pt"})


TIED = {  # family, how it is saved
    "flat": ("gdn", {}),
    "nested": ("gdn", {"nested": True}),
    "nested, fused experts": ("qsa", {"nested": True, "fused": True}),
    "shards": ("qwen3", {}),
}


def tied_and_saved(folder, form: str):
    """A tiny model of transformers' whose config says that the head is tied; its class."""
    family, variant = TIED[form]
    if family != "qwen3":
        return type(theirs_saved(folder, family, variant | {"tie_word_embeddings": True}))
    config = transformers.Qwen3Config(**SMALL, tie_word_embeddings=True)
    transformers.Qwen3ForCausalLM(config).float().save_pretrained(folder, max_shard_size="9KB")
    return transformers.Qwen3ForCausalLM


@pytest.mark.parametrize("form", TIED)
def test_a_tied_config_with_another_head_in_the_file_uses_both(tmp_path, capsys, form):
    model_class = tied_and_saved(tmp_path, form)
    tokens = torch.arange(20)[None]
    tied_logits = Target.from_pretrained(tmp_path)(tokens)
    replace_head(tmp_path, lambda embedding: embedding.flip(0) * 2)
    capsys.readouterr()
    target = Target.from_pretrained(tmp_path)
    assert capsys.readouterr().out.count("lm_head differs from the embedding: both are used\n") == 1
    with torch.no_grad():
        theirs = model_class.from_pretrained(tmp_path).eval()(tokens).logits
    size = theirs.abs().max()
    assert (target(tokens) - theirs).abs().max() < 1e-4 * size
    assert (tied_logits - theirs).abs().max() > 0.1 * size

    target.save_pretrained(tmp_path / "again")
    config_dict = json.loads((tmp_path / "again" / "config.json").read_text())
    assert config_dict["tie_word_embeddings"] is False
    capsys.readouterr()
    again = Target.from_pretrained(tmp_path / "again")
    assert capsys.readouterr().out == ""
    assert torch.equal(again(tokens), target(tokens))
    with torch.no_grad():
        opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again").eval()
        assert (opened(tokens).logits - theirs).abs().max() < 1e-4 * size


@pytest.mark.parametrize("form", TIED)
def test_a_tied_config_with_the_same_head_in_the_file_shares_one_tensor(tmp_path, capsys, form):
    tied_and_saved(tmp_path, form)
    before = Target.from_pretrained(tmp_path)
    replace_head(tmp_path, torch.clone)
    capsys.readouterr()
    target = Target.from_pretrained(tmp_path)
    assert "lm_head" not in capsys.readouterr().out
    assert target.config == before.config and target.config.tie_word_embeddings
    assert target.lm_head.weight is target.model.embed_tokens.weight
    assert torch.equal(target.lm_head.weight, before.lm_head.weight)


@pytest.mark.parametrize(
    "head",
    [
        lambda t: t.clone().index_fill_(0, torch.tensor(3), 0.1),
        torch.Tensor.double,
        torch.zeros_like,
    ],
    ids=["in one row", "in its dtype", "in every number"],
)
def test_a_head_counts_as_another_if_it_differs(tmp_path, head):
    small_target(tie_word_embeddings=True).save_pretrained(tmp_path)
    replace_head(tmp_path, head)
    target = Target.from_pretrained(tmp_path)
    expected = load_file(tmp_path / "model.safetensors")
    assert target.lm_head.weight is not target.model.embed_tokens.weight
    assert torch.equal(target.lm_head.weight, expected["lm_head.weight"].float())
    assert torch.equal(target.model.embed_tokens.weight, expected["model.embed_tokens.weight"])


@pytest.mark.parametrize(
    "scales, is_other",
    [((0.5, 0.5), False), ((0.5, 0.25), True), ((0.5, None), True), ((None, 0.5), True)],
    ids=["alike", "another", "none of the head", "none of the embedding"],
)
def test_a_head_in_fp8_counts_as_another_if_its_scales_differ(tmp_path, scales, is_other):
    embedding = torch.randn(24, 32).to(torch.float8_e4m3fn)
    tensors = {}
    for name, scale in zip(("lm_head.weight", "model.embed_tokens.weight"), scales):
        tensors[name] = embedding.clone()
        if scale:
            tensors[f"{name}_scale_inv"] = torch.full((1, 1), scale)
    save_file(tensors, tmp_path / "model.safetensors")
    assert has_other_head(tmp_path) == is_other


def test_the_number_type_of_a_nested_config_is_the_outer_one_as_in_transformers(tmp_path):
    theirs_saved(tmp_path, "gdn", {"nested": True})
    text_config = json.loads((tmp_path / "config.json").read_text())["text_config"]
    for outer, inner in [("bfloat16", "float32"), ("float32", "bfloat16")]:
        reconfigure(dtype=outer, text_config=text_config | {"dtype": inner})(tmp_path)
        expected = getattr(torch, outer)
        assert Target.from_pretrained(tmp_path).lm_head.weight.dtype == expected
        model = transformers.Qwen3_5ForConditionalGeneration.from_pretrained(tmp_path, dtype="auto")
        assert model.dtype == expected


def test_two_number_types_are_an_error_unless_one_is_chosen(tmp_path):
    small_target().save_pretrained(tmp_path)
    reconfigure(torch_dtype="float32")(tmp_path)
    Target.from_pretrained(tmp_path)
    reconfigure(torch_dtype="bfloat16")(tmp_path)
    both = "dtype = 'float32' contradicts torch_dtype = 'bfloat16'.*--dtype"
    with pytest.raises(ValueError, match=both):
        Target.from_pretrained(tmp_path)
    assert Target.from_pretrained(tmp_path, dtype=torch.bfloat16).lm_head.weight.itemsize == 2


@pytest.mark.parametrize("word", ["int32", "bogus", "bool", {"": "bfloat16"}])
def test_a_number_type_that_is_none_is_an_error_unless_one_is_chosen(tmp_path, word):
    small_target().save_pretrained(tmp_path)
    reconfigure(dtype=word)(tmp_path)
    accepted = "is none of float32, bfloat16, float16: choose by --dtype"
    with pytest.raises(ValueError, match=f"config.json: dtype = .*{accepted}"):
        Target.from_pretrained(tmp_path)
    assert Target.from_pretrained(tmp_path, dtype=torch.float32).lm_head.weight.itemsize == 4


def test_a_target_that_sees_what_follows_is_refused(tmp_path):
    theirs_saved(tmp_path, "gdn", {"nested": True})
    text_config = json.loads((tmp_path / "config.json").read_text())["text_config"]
    looking_back = reconfigure(text_config=text_config | {"is_causal": True})
    looking_back(tmp_path)
    both_ways = reconfigure(text_config=text_config | {"is_causal": False})
    spoiled_is_refused(tmp_path, both_ways, "is_causal = False is not implemented")


def test_rotary_frequencies_of_old_conversions_are_skipped(tmp_path):
    small_target().save_pretrained(tmp_path)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(lambda tensors: tensors.update({name: torch.ones(4)}))(tmp_path)
    Target.from_pretrained(tmp_path)


def test_skipped_tensors_are_counted_in_one_line(tmp_path, capsys):
    theirs_saved(tmp_path, "gdn", {"nested": True})
    capsys.readouterr()
    Target.from_pretrained(tmp_path)
    printed = capsys.readouterr().out
    count = sum(".visual." in name for name in load_file(tmp_path / "model.safetensors"))
    assert printed.count("\n") == 1
    assert f"{count} tensors skipped" in printed


@pytest.mark.parametrize(
    "shapes, word",
    [
        ({"weight": (2, 3)}, "bias is missing"),
        ({"weight": (3, 2), "bias": (2,)}, r"\(3, 2\)"),
        ({"weight": (2, 3), "bias": (2,), "more": (1,)}, "more"),
    ],
    ids=["a tensor missing", "a wrong shape", "a tensor too many"],
)
def test_a_layer_is_loaded_whole_or_not_at_all(tmp_path, shapes, word):
    tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
    write_tensors(tmp_path / "model.safetensors", tensors)
    with pytest.raises(ValueError, match=word):
        load_weights(torch.nn.Linear(3, 2), tmp_path)


def cut(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def lying_header(folder):
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 10**9) + path.read_bytes()[8:])


def remove_tensors(folder):
    (folder / "model.safetensors").unlink()


def empty(folder):
    for path in folder.iterdir():
        path.unlink()


def index(text: str):
    """-> a function of a folder that gives it an index."""
    return lambda folder: (folder / "model.safetensors.index.json").write_text(text)


def index_of(folder, names) -> None:
    index(json.dumps({"weight_map": dict.fromkeys(names, "model.safetensors")}))(folder)


def index_of_more(folder):
    index_of(folder, [*load_file(folder / "model.safetensors"), "extra"])


def index_of_fewer(folder):
    index_of(folder, load_file(folder / "model.safetensors").keys() - {Q})


def index_of_nothing(folder):
    remove_tensors(folder)
    index('{"weight_map": {"a": "none.safetensors"}}')(folder)


def add(name: str, *shape):
    return rewrite(lambda tensors: tensors.update({name: torch.zeros(shape)}))


def remove(name: str):
    return rewrite(lambda tensors: tensors.pop(name))


def change(name: str, function):
    """-> a function of a folder that changes one of its tensors."""
    return rewrite(lambda tensors: tensors.update({name: function(tensors[name])}))


Q = "model.layers.0.self_attn.q_proj.weight"
UP = "model.layers.1.mlp.up_proj.weight"
SPOILED = {
    "truncated file": (cut, "model.safetensors is damaged"),
    "header longer than the file": (lying_header, "damaged"),
    "missing file": (remove_tensors, "missing"),
    "index pointing at nothing": (index_of_nothing, "none.safetensors is missing"),
    "one file and an index of others": (
        index('{"weight_map": {"a": "b.safetensors"}}'),
        "model.safetensors and model.safetensors.index.json.*: remove one of the two",
    ),
    "a tensor that the index does not name": (index_of_fewer, f"{Q} is not named by"),
    "index naming a tensor that is nowhere": (index_of_more, "extra"),
    "empty index": (index("{}"), "weight_map"),
    "missing tensor": (remove(Q), Q),
    "extra tensor": (add("extra", 2), "extra has no place"),
    "transposed weight": (change(UP, lambda t: t.T.contiguous()), r"\(32, 48\)"),
    "wrong dtype": (change(Q, torch.Tensor.int), "int32"),
    "NaN weights": (change(Q, lambda t: t * torch.nan), "NaN"),
    "FP8 alone": (change(Q, lambda t: t.to(torch.float8_e4m3fn)), "scale_inv"),
    "untied and no head": (remove("lm_head.weight"), "lm_head.weight"),
    "a drafter's": (reconfigure(block_size=8), "holds a drafter, not a target"),
    "empty folder": (empty, "config.json is missing"),
    "vocabulary smaller than the tokenizer": (write_byte_tokenizer, "tokenizer"),
}


@pytest.mark.parametrize("case", SPOILED)
def test_a_spoiled_folder_is_one_clear_error(tmp_path, case):
    small_target().save_pretrained(tmp_path)
    spoiled_is_refused(tmp_path, *SPOILED[case])


EXPERT = "model.layers.0.mlp.experts.2.up_proj.weight"
EMBEDDING = "model.layers.1.ple.ple_embedding"
SPOILED_HYBRID = {
    "scales beside a weight that is not FP8": (add(f"{EXPERT}_scale_inv", 1, 1), "no FP8"),
    "the other FP8": (change(EXPERT, lambda t: t.to(torch.float8_e5m2)), "float8_e5m2"),
    "an expert missing": (remove(EXPERT), "gate_up_proj has"),
    "an expert too many": (add(EXPERT.replace(".2.", ".9."), 16, 32), "no place"),
    "an expert of another width": (change(EXPERT, lambda t: t[:5]), r"\(16, 32\)"),
    "a shard missing": (
        remove(f"{EMBEDDING}.ngram_embedding.shard_1.weight"),
        "ngram_embedding.weight has",
    ),
    "hashes missing": (remove(f"{EMBEDDING}.layer_multipliers"), "layer_multipliers is missing"),
    "hashes not whole numbers": (
        change(f"{EMBEDDING}.layer_multipliers", torch.Tensor.float),
        "integers",
    ),
    "layer kinds that contradict the tensors": (
        reconfigure(layer_types=["linear_attention"] * 4),
        "no place",
    ),
}


@pytest.mark.parametrize("case", SPOILED_HYBRID)
def test_a_spoiled_folder_of_a_hybrid_is_one_clear_error(tmp_path, case):
    theirs_saved(tmp_path, "qsa", {})
    spoiled_is_refused(tmp_path, *SPOILED_HYBRID[case])
