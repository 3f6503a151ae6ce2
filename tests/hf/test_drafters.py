"""Drafter folders: what engines load, and what they compute from it. plain_drafters.py is written
from the formats alone."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import plain_drafters as plain
from drafter import Drafter, DrafterConfig, Sampling, drafter_class
from hf.files import read_json
from small import DRAFTERS, random_tokens, reconfigure, small_drafter, small_target


@pytest.fixture(params=DRAFTERS)
def pair(request, target):
    return target, small_drafter(target, **DRAFTERS[request.param])


def tapped(target, drafter, tokens):
    """The trunk of one text, tapped where the drafter reads."""
    lengths = torch.tensor([tokens.shape[1]])
    return target.prefill(tokens, lengths, tap_ids=drafter.config.target_layer_ids)


def test_a_saved_folder_read_by_plain_loops_gives_the_same_q(pair, tmp_path):
    target, drafter = pair
    drafter.save_pretrained(tmp_path, torch.float32)
    config, tensors = plain.read(tmp_path)
    embed = target.model.embed_tokens.weight.double()
    head = target.lm_head.weight.double()
    tokens = random_tokens(1, 14)
    trunk = tapped(target, drafter, tokens)
    anchors = torch.tensor([[0, 3, 9, 13]])
    hidden = drafter.block(trunk, anchors)
    assert hidden.shape[2] == drafter.config.num_draft_tokens == plain.settings(config)["W"] == 4
    proposal = drafter.propose(trunk, anchors, 2, generator=torch.Generator().manual_seed(1))
    logits = drafter.logits(hidden[:, :, None], proposal.previous).expand(1, 4, 2, 4, -1)
    for i, anchor in enumerate(anchors[0].tolist()):
        x_a = int(tokens[0, anchor])
        slow = plain.block_hidden(config, tensors, embed, trunk.taps[0], x_a, anchor)
        torch.testing.assert_close(hidden[0, i].double(), slow, atol=2e-5, rtol=2e-5)
        for k in range(2):
            drafts = proposal.tokens[0, i, k].tolist()
            for temperature in (1.0, 0.7, 0.0):
                expected = plain.distribution(
                    config, tensors, head, slow, x_a, drafts, temperature, target.num_tokens
                )
                q = Sampling(temperature).probs(logits[0, i, k]).double()
                torch.testing.assert_close(q, expected, atol=2e-5, rtol=2e-5)
            if drafter.has_confidence:
                expected = plain.dspark_confidence(config, tensors, slow, x_a, drafts)
                confidence = drafter.confidence_logits(hidden[:, :, None], proposal.previous)
                confidence = confidence[0, i, k].sigmoid().double()
                torch.testing.assert_close(confidence, expected, atol=2e-5, rtol=2e-5)


def test_the_round_trip_is_bit_equal_and_a_prefix_is_accepted(pair, tmp_path):
    target, drafter = pair
    drafter.to(torch.bfloat16).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    again = Drafter.from_pretrained(tmp_path, target)
    assert again.config == drafter.config
    assert type(again) is type(drafter)
    assert set(tensors) == set(again.state_dict())
    assert all(torch.equal(tensors[name], t) for name, t in again.state_dict().items())
    save_file({f"model.{name}": t for name, t in tensors.items()}, tmp_path / "model.safetensors")
    prefixed = Drafter.from_pretrained(tmp_path, target)
    assert all(torch.equal(tensors[name], t) for name, t in prefixed.state_dict().items())
    config = read_json(tmp_path / "config.json")
    assert config["is_causal"] is drafter.config.causal(0)  # always written


def test_a_drafter_with_its_own_embedding_and_head_uses_them(target, tmp_path):
    small_drafter(target, **DRAFTERS["dspark vanilla"]).save_pretrained(tmp_path, torch.float32)
    file = tmp_path / "model.safetensors"
    own = {
        "embed_tokens.weight": target.model.embed_tokens.weight * 0.5,
        "lm_head.weight": target.lm_head.weight.roll(1, 0).contiguous(),
    }
    save_file(load_file(file) | own, file)
    drafter = Drafter.from_pretrained(tmp_path, target)
    assert not drafter.lm_head.weight.requires_grad
    config, tensors = plain.read(tmp_path)
    trunk = tapped(target, drafter, torch.arange(9)[None])
    slow = plain.block_hidden(config, tensors, tensors["embed_tokens.weight"], trunk.taps[0], 5, 5)
    expected = plain.distribution(
        config, tensors, tensors["lm_head.weight"], slow, 5, [1, 2, 3, 4], 1.0, 22
    )
    hidden = drafter.block(trunk, torch.tensor([[5]]))
    logits = drafter.logits(hidden[:, :, None], torch.tensor([[[[5, 1, 2, 3]]]]))
    q = logits.softmax(-1)[0, 0, 0].double()
    torch.testing.assert_close(q, expected, atol=2e-5, rtol=2e-5)
    drafter.save_pretrained(tmp_path / "again", torch.float32)
    assert set(load_file(tmp_path / "again/model.safetensors")) == set(tensors)


OWNERS = {  # which of embedding and head the file holds: what is said of them
    ("embed_tokens",): "uses its own embedding and the target's head",
    ("lm_head",): "uses the target's embedding and its own head",
    ("embed_tokens", "lm_head"): "uses its own embedding and its own head",
    (): "",
}


@pytest.mark.parametrize("names", OWNERS, ids=["embedding", "head", "both", "neither"])
def test_what_a_drafter_has_not_of_its_own_is_the_targets(target, tmp_path, capsys, names):
    small_drafter(target).save_pretrained(tmp_path, torch.float32)
    file = tmp_path / "model.safetensors"
    theirs = {"embed_tokens": target.model.embed_tokens, "lm_head": target.lm_head}
    theirs = {name: module.weight for name, module in theirs.items()}
    used = {name: w * 0.5 if name in names else w for name, w in theirs.items()}
    save_file(load_file(file) | {f"{name}.weight": used[name] for name in names}, file)
    capsys.readouterr()
    drafter = Drafter.from_pretrained(tmp_path, target)
    printed = capsys.readouterr().out
    assert printed == (f"{tmp_path}: the drafter {OWNERS[names]}\n" if names else "")
    config, tensors = plain.read(tmp_path)
    trunk = tapped(target, drafter, torch.arange(9)[None])
    slow = plain.block_hidden(config, tensors, used["embed_tokens"], trunk.taps[0], 5, 5)
    expected = plain.unary_logits(config, used["lm_head"], slow, 22)
    logits = drafter.logits(drafter.block(trunk, torch.tensor([[5]])))[0, 0].double()
    torch.testing.assert_close(logits, expected, atol=2e-5, rtol=2e-5)
    assert set(drafter.state_dict()) - set(small_drafter(target).state_dict()) == {
        f"{name}.weight" for name in names
    }


@pytest.mark.parametrize("name", ["embed_tokens", "lm_head"])
def test_a_tied_drafter_with_only_one_of_embedding_and_head_is_an_error(target, tmp_path, name):
    small_drafter(target).save_pretrained(tmp_path, torch.float32)
    reconfigure(tie_word_embeddings=True)(tmp_path)
    assert not Drafter.from_pretrained(tmp_path, target).config.layers.tie_word_embeddings
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {f"{name}.weight": target.lm_head.weight}, file)
    with pytest.raises(ValueError, match="tie_word_embeddings is true"):
        Drafter.from_pretrained(tmp_path, target)


def test_a_full_folder_holds_embedding_and_head_and_proposes_the_same(pair, tmp_path):
    target, drafter = pair
    drafter.save_pretrained(tmp_path, torch.float32, full=True)
    tensors = load_file(tmp_path / "model.safetensors")
    assert torch.equal(tensors["embed_tokens.weight"], target.model.embed_tokens.weight)
    assert torch.equal(tensors["lm_head.weight"], target.lm_head.weight)
    assert read_json(tmp_path / "config.json")["tie_word_embeddings"] is False
    full = Drafter.from_pretrained(tmp_path, target)
    trunk = tapped(target, drafter, random_tokens(1, 9))
    anchors = torch.tensor([[2, 8]])
    assert torch.equal(full.block(trunk, anchors), drafter.block(trunk, anchors))
    full.save_pretrained(tmp_path / "again", torch.float32)
    again = load_file(tmp_path / "again/model.safetensors")
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in tensors.items())


def test_a_full_folder_of_a_tied_target_holds_both_tensors(tmp_path):
    target = small_target(tie_word_embeddings=True)
    assert target.lm_head.weight is target.model.embed_tokens.weight
    small_drafter(target).save_pretrained(tmp_path, torch.float32, full=True)
    tensors = load_file(tmp_path / "model.safetensors")
    assert torch.equal(tensors["embed_tokens.weight"], target.lm_head.weight)
    assert torch.equal(tensors["lm_head.weight"], target.lm_head.weight)


def test_a_drafter_in_fp8_is_read_and_written_without(target, tmp_path):
    drafter = small_drafter(target)
    drafter.save_pretrained(tmp_path, torch.float32)
    file, name = tmp_path / "model.safetensors", "layers.0.mlp.up_proj.weight"
    eighths = (load_file(file)[name] * 8).to(torch.float8_e4m3fn)
    scales = {f"{name}_scale_inv": torch.full((1, 1), 0.125)}
    save_file(load_file(file) | {name: eighths} | scales, file)
    reconfigure(quantization_config={"quant_method": "fp8"})(tmp_path)
    read = Drafter.from_pretrained(tmp_path, target, torch.float32)
    assert torch.equal(read.state_dict()[name], eighths.float() * 0.125)
    assert "quantization_config" not in read.config.to_dict()
    reconfigure(quantization_config={"quant_method": "awq"})(tmp_path)
    with pytest.raises(ValueError, match="quantization_config .*awq"):
        Drafter.from_pretrained(tmp_path, target)


PUBLISHED = {  # released drafters: config.json as the formats list it, shapes, number of tensors
    "27B, DFlash 2": (
        dict(
            architectures=["DFlash2DraftModel"],
            model_type="qwen3",
            hidden_size=5120,
            intermediate_size=17408,
            num_hidden_layers=5,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
            vocab_size=248320,
            rms_norm_eps=1e-6,
            max_position_embeddings=262144,
            rope_parameters={"rope_theta": 1e7, "rope_type": "default"},
            layer_types=["sliding_attention"] * 5,
            sliding_window=2048,
            is_causal=False,
            num_target_layers=64,
            dflash_config=dict(
                block_size=8,
                mask_token_id=248070,
                target_layer_ids=[5, 19, 33, 47, 61],
                conv_kernel_size=2,
                conv_group_size=16,
                selector_rank=256,
                selector_top_k=16,
            ),
        ),
        {
            "fc.weight": (5120, 25600),
            "layers.4.mlp.down_proj.weight": (5120, 17408),
            "layers.0.self_attn.q_proj.weight": (4096, 5120),
            "layers.0.attention_conv.base_kernel": (2, 2, 5120),
            "layers.4.mlp_conv.kernel_projection.weight": (2 * 2 * 320, 5120),
            "candidate_selector.predecessor_codebook": (248320, 256),
            "candidate_selector.successor_codebook": (248320, 256),
            "candidate_selector.hidden_projection.weight": (256, 5120),
        },
        5 * (11 + 4) + 3 + 3,
    ),
    "8B, DFlash": (
        dict(
            architectures=["DFlashDraftModel"],
            model_type="qwen3",
            hidden_size=4096,
            intermediate_size=12288,
            num_hidden_layers=5,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
            vocab_size=151936,
            rms_norm_eps=1e-6,
            max_position_embeddings=40960,
            rope_theta=1e6,
            block_size=16,
            num_target_layers=36,
            dflash_config=dict(mask_token_id=151669, target_layer_ids=[1, 9, 17, 25, 33]),
        ),
        {"fc.weight": (4096, 20480), "layers.4.mlp.up_proj.weight": (12288, 4096)},
        5 * 11 + 3,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_configs_have_every_tensor_as_listed(name):
    published, shapes, num_tensors = PUBLISHED[name]
    config = DrafterConfig.from_dict(published, name)

    class Frame:  # a target of that size, without its weights
        tap_ids = ()
        num_tokens = published["vocab_size"]

        class config:
            hidden_size = published["hidden_size"]
            vocab_size = published["vocab_size"]
            num_hidden_layers = published["num_target_layers"]

    with torch.device("meta"):
        tensors = drafter_class(config)(config, Frame).state_dict()
    assert len(tensors) == num_tensors
    assert {name: tuple(tensors[name].shape) for name in shapes} == shapes
    written = config.to_dict()
    assert DrafterConfig.from_dict(json.loads(json.dumps(written)), name) == config
    for field, value in published["dflash_config"].items():
        assert written["dflash_config"][field] == value
    assert written["use_sliding_window"] == ("27B" in name)
    assert written["is_causal"] is False
    assert config.block_size == (8 if "27B" in name else 16)


SLIDES_IN_PART = "dflash sliding in part"
BAD = [  # a drafter, changes of its config.json, a word of the error
    ("dspark vanilla", {"markov_head_type": "cubic"}, "markov_head_type 'cubic'"),
    ("dspark vanilla", {"markov_rank": 7}, r"\(1, 39\)"),
    ("dspark vanilla", {"markov_rank": -1}, "markov_rank"),
    ("dspark vanilla", {"enable_confidence_head": False}, "confidence_head"),
    ("dspark vanilla", {"enable_confidence_head": "gone"}, "confidence_head"),
    ("dspark vanilla", {"confidence_head_with_markov": "gone"}, r"\(1, 32\)"),
    ("dspark vanilla", {"markov_rank": "gone"}, "confidence_head.proj"),
    ("dspark vanilla", {"confidence_head_alpha": "much"}, "confidence_head_alpha 'much'"),
    ("dspark vanilla", {"enable_confidence_head": "yes"}, "enable_confidence_head"),
    ("dspark vanilla", {"block_size": 0}, "block_size 0"),
    ("dspark vanilla", {"dflash_config": {"markov_rank": 8}}, "markov_rank is given twice"),
    ("dspark vanilla", {"vocab_size": 99}, "vocab_size is 99"),
    ("dflash2", {"dflash_config": {"selector_top_k": 99}}, "selector_top_k 99"),
    ("dflash2", {"dflash_config": {"selector_top_k": 0}}, "selector_top_k"),
    ("dflash2", {"dflash_config": {"conv_group_size": 5}}, "conv_group_size 5"),
    ("dflash2", {"dflash_config": {"conv_kernel_size": 3}}, "base_kernel"),
    ("dflash2", {"dflash_config": {"final_logit_softcapping": -1.0}}, "final_logit_softcapping"),
    ("dflash2", {"dflash_config": None}, "lacks mask_token_id"),
    ("dflash2", {"architectures": ["DFlashDraftModel"]}, "conv_kernel_size = 2"),
    ("dflash", {"architectures": ["DFlash2DraftModel"]}, "lacks conv_kernel_size"),
    ("dflash", {"output_multiplier": 0.5}, "output_multiplier"),
    ("dflash", {"layer_types": ["sliding_attention"] * 2}, "need a sliding_window"),
    (
        "dflash",
        {
            "layer_types": None,
            "use_sliding_window": True,
            "max_window_layers": 1,
            "sliding_window": "gone",
        },
        "need a sliding_window",
    ),
    ("dflash", {"layer_types": None, "max_window_layers": "all"}, "max_window_layers 'all'"),
    ("dflash", {"dflash_config": {"use_swa": True}}, "need a sliding_window"),
    ("dflash", {"dflash_config": {"use_swa": "yes"}}, "use_swa 'yes'"),
    (
        SLIDES_IN_PART,
        {"layer_types": ["sliding_window_attention", "full_attention"]},
        "layer_types",
    ),
    (SLIDES_IN_PART, {"layer_types": "sliding_attention"}, "layer_types"),
    (SLIDES_IN_PART, {"layer_types": 5}, "layer_types"),
    (SLIDES_IN_PART, {"dflash_config": {"use_swa": False}}, "use_swa"),
    (SLIDES_IN_PART, {"dflash_config": {"swa_window_size": 9}}, "sliding_window is given twice"),
    (SLIDES_IN_PART, {"sliding_window": True}, "sliding_window"),
    ("dflash", {"dflash_config": {"mask_token_id": True}}, "mask_token_id"),
    ("dflash", {"architectures": [[]]}, "architectures"),
    ("dflash", {"model_type": "llama"}, "model_type = 'llama'"),
    ("dflash", {"is_causal": 1}, "is_causal 1"),
    ("dflash", {"layer_types": ["sliding_attention"]}, "layer_types"),
    ("dflash", {"is_causal": "no"}, "is_causal 'no'"),
    (
        "dflash",
        {"layer_types": None, "sliding_window": "far", "dflash_config": {"use_swa": True}},
        "'far'",
    ),
    ("dflash", {"dflash_config": {"target_hidden_size": 64}}, "target_hidden_size"),
]


@pytest.mark.parametrize("variant, changes, word", BAD, ids=[f"{v}: {w}" for v, _, w in BAD])
def test_a_folder_that_is_wrong_is_an_error_that_names_it(target, tmp_path, variant, changes, word):
    small_drafter(target, **DRAFTERS[variant]).save_pretrained(tmp_path)
    config = read_json(tmp_path / "config.json")
    merged = {}
    for name, value in changes.items():
        is_block = isinstance(value, dict) and isinstance(config.get(name), dict)
        merged[name] = config[name] | value if is_block else value
    reconfigure(**merged)(tmp_path)
    with pytest.raises(ValueError, match=word):
        Drafter.from_pretrained(tmp_path, target)


@pytest.mark.parametrize(
    "changes, word",
    [
        ({"hidden_size": 48}, "hidden_size is 48, this target has 32: it was trained for another"),
        ({"num_hidden_layers": 5}, "num_target_layers is 5, this target has 3 layers: it was"),
        ({"vocab_size": 30}, "vocab_size is 30, this target has 24: it was trained for another"),
    ],
)
def test_another_targets_drafter_is_an_error_that_names_its_file(tmp_path, changes, word):
    small_drafter(small_target(**changes)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"^{tmp_path}/config.json: {word}"):
        Drafter.from_pretrained(tmp_path, small_target())


@pytest.mark.parametrize("name", ["norm.weight", "layers.0.mlp.up_proj.weight", "fc.weight"])
def test_a_file_of_several_number_types_is_read_in_that_of_fc(pair, tmp_path, name):
    target, drafter = pair
    drafter.save_pretrained(tmp_path, torch.float32)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {name: tensors[name].bfloat16()}, file)
    read = Drafter.from_pretrained(tmp_path, target)
    expected = torch.bfloat16 if name == "fc.weight" else torch.float32
    assert {tensor.dtype for tensor in read.state_dict().values()} == {expected}
    trunk = tapped(target, read, random_tokens(1, 9))
    assert read.propose(trunk, torch.tensor([[8]])).tokens.shape == (1, 1, 1, 4)


def test_engines_that_read_the_config_through_transformers_find_every_field(pair, tmp_path):
    transformers = pytest.importorskip("transformers")
    target, drafter = pair
    drafter.save_pretrained(tmp_path)
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    config = drafter.config
    written = read_json(tmp_path / "config.json")
    found = theirs.to_dict()
    assert found["rope_parameters"]["rope_theta"] == written.pop("rope_theta")
    assert {name: found.get(name) for name in written} == written
    assert theirs.architectures == [config.architecture]
    assert theirs.model_type == "qwen3"
    assert (theirs.sliding_window or 0) == config.sliding_window
    assert tuple(theirs.layer_types) == (config.layer_types or ("full_attention",) * 2)
    assert theirs.block_size == config.block_size
    is_flat = config.architecture == "Qwen3DSparkModel"
    block = vars(theirs) if is_flat else theirs.dflash_config
    assert block["mask_token_id"] == config.mask_token_id
    assert tuple(block["target_layer_ids"]) == config.target_layer_ids
    if config.kind == "dspark":
        assert block["markov_rank"] == config.markov_rank
    if config.kind == "dflash2":
        assert block["selector_top_k"] == config.selector_top_k
        assert block["block_size"] == config.block_size
