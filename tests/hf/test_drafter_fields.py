"""Every field of a drafter's config.json: read, harmless or refused, and written again. The folders
here are built from the description of the formats, not by save_pretrained.

PYTHONPATH=.:tests python tests/hf/test_drafter_fields.py    prints the table of docs/models.md
"""

import copy
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafter import Drafter, DrafterConfig
from hf.drafters import (
    ARCHITECTURES,
    IMPLEMENTED,
    KINDS,
    LEFT_OUT,
    REFUSED,
    TREATMENTS,
    WRITTEN_AGAIN,
    accepted_values,
    place_of,
    treatment,
)
from hf.files import read_json
from small import DRAFTERS, small_drafter, small_target

DOCS = Path(__file__).parents[2] / "docs/models.md"
C, V, RANK = 32, 24, 6
LAYERS = dict(
    model_type="qwen3",
    vocab_size=V,
    hidden_size=C,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    rms_norm_eps=1e-6,
    max_position_embeddings=512,
    rope_parameters={"rope_theta": 1e4, "rope_type": "default"},
)
SECOND = dict(conv_kernel_size=2, conv_group_size=8, selector_rank=RANK, selector_top_k=5)
SPARK = dict(
    markov_rank=RANK,
    markov_head_type="vanilla",
    enable_confidence_head=True,
    confidence_head_with_markov=True,
    num_anchors=7,
)


def described(architecture: str, **changes) -> dict:
    """A config.json as the formats describe it; "gone" removes a field, a dictionary is merged."""
    block = dict(mask_token_id=22, target_layer_ids=[0, 2], block_size=5)
    block |= {"DFlashDraftModel": {}, "DFlash2DraftModel": SECOND}.get(architecture, SPARK)
    config = dict(architectures=[architecture], num_target_layers=3, **copy.deepcopy(LAYERS))
    config |= block if architecture == "Qwen3DSparkModel" else {"dflash_config": block}
    for name, value in changes.items():
        is_merged = isinstance(value, dict) and isinstance(config.get(name), dict)
        config[name] = config[name] | value if is_merged else value
    return {name: value for name, value in config.items() if value != "gone"}


def read(config: dict, tensor_names=()) -> DrafterConfig:
    return DrafterConfig.from_dict(config, "config.json", tensor_names)


def with_field(kind: str, place: str, name: str, value) -> dict:
    """A fresh config of a kind with a field, at the top level or in a block."""
    changes = {place: {name: value}} if place else {name: value}
    return described(ARCHITECTURES[kind], **changes)


# ----------------------------------------------------------------------------------- the table


def field_table() -> str:
    """What becomes of each field in each kind of drafter, fields alike in one row."""
    rows = {}
    for name in TREATMENTS:
        only = place_of(name)
        cells = ["top or block" if only is None else f"`{only}`" if only else "top"]
        for kind in ARCHITECTURES:
            what = treatment(name, kind)
            values = accepted_values(name, kind, {}) if what == REFUSED else ()
            words = [v if isinstance(v, str) else json.dumps(v) for v in values]
            cells.append(f"{what} unless {' or '.join(words)}" if words else what)
        rows.setdefault(tuple(cells), []).append(f"`{name}`")
    lines = ["| fields | where | DFlash | DFlash 2 | DSpark |", "|---|---|---|---|---|"]
    lines += [f"| {', '.join(names)} | {' | '.join(cells)} |" for cells, names in rows.items()]
    return "\n".join(lines)


def between_markers(name: str) -> str:
    text = DOCS.read_text()
    return text.split(f"<!-- {name} -->")[1].split(f"<!-- /{name} -->")[0].strip()


def test_the_table_of_the_docs_is_what_the_code_does():
    assert between_markers("fields") == field_table()


def check_treatment(name: str, kind: str, place: str) -> None:
    what = treatment(name, kind)
    if place_of(name) not in (None, place):
        right, wrong = (f"in {p}" if p else "at the top" for p in (place_of(name), place))
        label = f"{place}.{name}".lstrip(".")
        with pytest.raises(ValueError, match=f": {label} is read {right}, not {wrong}: move it$"):
            read(with_field(kind, place, name, None))
    elif what == REFUSED:
        with pytest.raises(ValueError, match=f"{name} = 'strange' is not implemented"):
            read(with_field(kind, place, name, "strange"))
        flat = described(ARCHITECTURES[kind]) | {"target_layer_ids": [0, 2]}
        for value in accepted_values(name, kind, flat):
            config = read(with_field(kind, place, name, value))
            written = config.to_dict()
            assert (written[place] if place else written)[name] == value
            assert read(written) == config
    elif what in (WRITTEN_AGAIN, LEFT_OUT):
        value = False if name == "tie_word_embeddings" else 5
        config = read(with_field(kind, place, name, value))
        written = config.to_dict()
        written = written[place] if place else written
        assert (written.get(name) == 5) == (what == WRITTEN_AGAIN)
        assert read(config.to_dict()) == config
    else:
        assert what == IMPLEMENTED
        base = read(described(ARCHITECTURES[kind]))
        try:  # it is used: a strange value is an error, or another config
            assert read(with_field(kind, place, name, "strange")) != base
        except ValueError as error:
            assert "unknown" not in str(error)


@pytest.mark.parametrize("name", TREATMENTS)
def test_each_known_field_is_treated_as_the_table_says(name):
    for kind in ARCHITECTURES:
        for place in ("", "dflash_config", "dspark_config"):
            check_treatment(name, kind, place)


@pytest.mark.parametrize("place", ["", "dflash_config", "dspark_config"])
@pytest.mark.parametrize("architecture", KINDS)
@pytest.mark.parametrize(
    "name, word",
    [
        ("blocksize", "did you mean block_size?"),
        ("is_causl", "did you mean is_causal?"),
        ("mask_tokenid", "did you mean mask_token_id?"),
        ("target_layers_ids", "did you mean target_layer_ids?"),
        ("training_mode", "remove it if no engine reads it"),
        ("flux_capacitor", "remove it if no engine reads it"),
        ("markov_rnak", "did you mean markov_rank?"),
    ],
)
def test_an_unknown_field_is_an_error_with_a_suggestion(architecture, place, name, word):
    changes = {place: {name: 1}} if place else {name: 1}
    label = f"{place}.{name}" if place else name
    with pytest.raises(ValueError) as error:
        read(described(architecture, **changes))
    assert f"config.json: {label} is unknown" in str(error.value) and word in str(error.value)
    assert "\n" not in str(error.value)


def test_everything_that_transformers_writes_is_known():
    transformers = pytest.importorskip("transformers")
    written = json.loads(transformers.Qwen3Config().to_json_string(use_diff=False))
    assert len(written) > 25 and not written.keys() - TREATMENTS.keys()


# -------------------------------------------------------------------- fields that contradict


@pytest.mark.parametrize(
    "changes, word",
    [
        ({"is_causal": True, "dflash_config": {"causal": False}}, "is_causal is given twice"),
        ({"is_causal": False, "dflash_config": {"causal": True}}, "is_causal is given twice"),
        ({"block_size": 6}, "block_size is given twice"),
        ({"mask_token_id": 23}, "mask_token_id is given twice"),
        ({"target_layer_ids": [1]}, "target_layer_ids is given twice"),
        (
            {"sliding_window": 4, "dflash_config": {"use_swa": True, "swa_window_size": 5}},
            "sliding_window is given twice",
        ),
        ({"dspark_config": {"block_size": 4}}, "block_size is given twice"),
        ({"num_target_layers": 3, "dflash_config": {"num_target_layers": 4}}, "is given twice"),
    ],
)
def test_two_values_of_a_fact_are_an_error_that_names_both(changes, word):
    with pytest.raises(ValueError, match=word):
        read(described("DFlashDraftModel", **changes))


@pytest.mark.parametrize("architecture", KINDS)
@pytest.mark.parametrize(
    "changes, word",
    [
        ({"dflash_config": {"is_causal": True}}, "read at the top, not in dflash_config"),
        ({"dspark_config": {"is_causal": None}}, "read at the top, not in dspark_config"),
        ({"causal": True}, "causal is read in dflash_config, not at the top"),
        ({"use_swa": True}, "use_swa is read in dflash_config, not at the top"),
        ({"swa_window_size": 8}, "swa_window_size is read in dflash_config, not at the top"),
        ({"dspark_config": {"use_swa": True}}, "read in dflash_config, not in dspark_config"),
    ],
)
def test_a_switch_where_engines_do_not_look_is_an_error(architecture, changes, word):
    with pytest.raises(ValueError, match=word):
        read(described(architecture, **changes))


def test_two_ropes_are_an_error():
    with pytest.raises(ValueError, match="rope_theta"):
        read(described("DFlashDraftModel", rope_theta=5e5))
    assert read(described("DFlashDraftModel", rope_theta=1e4)).layers.rope_theta == 1e4


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "rope_parameters": "gone"},
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": "gone"},
        {"rope_parameters": {"rope_type": "yarn"}},
        {"rope_parameters": {"rope_type": "llama3"}},
    ],
)
def test_a_scaled_rope_is_refused_by_name(rope):
    block = rope.get("rope_scaling") or rope["rope_parameters"]
    with pytest.raises(ValueError, match=block.get("rope_type") or block["type"]):
        read(described("DFlashDraftModel", **rope))


@pytest.mark.parametrize("kind", [{"rope_type": None}, {"rope_type": None, "type": None}])
def test_a_rope_without_a_type_is_the_default_one(kind):
    rope = {"rope_parameters": {"rope_theta": 777.0} | kind}
    assert read(described("DFlashDraftModel", **rope)).layers.rope_theta == 777.0


# ------------------------------------------------------------------------ window and causality

SLIDES, FULL = "sliding_attention", "full_attention"


@pytest.mark.parametrize("architecture", KINDS)
@pytest.mark.parametrize(
    "changes, windows, causal",
    [
        ({}, (0, 0), (False, False)),
        ({"is_causal": True}, (0, 0), (True, True)),
        ({"dflash_config": {"causal": True}}, (0, 0), (True, True)),
        ({"layer_types": [SLIDES, FULL], "sliding_window": 6}, (6, 0), (True, False)),
        (
            {"layer_types": [SLIDES, FULL], "sliding_window": 5, "is_causal": False},
            (5, 0),
            (False, False),
        ),
        ({"layer_types": [SLIDES] * 2, "sliding_window": 6}, (6, 6), (True, True)),
        ({"dflash_config": {"use_swa": True, "swa_window_size": 5}}, (5, 5), (False, False)),
        (
            {"layer_types": [FULL] * 2, "dflash_config": {"use_swa": True, "swa_window_size": 5}},
            (5, 5),
            (False, False),
        ),
        (
            {"dflash_config": {"use_swa": True, "causal": True}, "sliding_window": 6},
            (6, 6),
            (True, True),
        ),
        ({"dflash_config": {"use_swa": False, "swa_window_size": 6}}, (0, 0), (False, False)),
        ({"use_sliding_window": True, "sliding_window": 6}, (0, 0), (False, False)),
        (
            {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
            (0, 6),
            (False, True),
        ),
        (
            {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 0},
            (6, 6),
            (True, True),
        ),
        (
            {"use_sliding_window": False, "sliding_window": 6, "max_window_layers": 0},
            (0, 0),
            (False, False),
        ),
        (
            {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0},
            (0, 0),
            (False, False),
        ),
        (
            {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": None},
            (0, 0),
            (False, False),
        ),
    ],
)
def test_windows_and_causality_are_vllms_and_are_written_so_that_engines_take_them(
    architecture, changes, windows, causal
):
    config = read(described(architecture, **changes))
    assert tuple(map(config.window, range(2))) == windows
    assert tuple(map(config.causal, range(2))) == causal
    written = config.to_dict()
    assert written["use_sliding_window"] == (SLIDES in written["layer_types"]) == any(windows)
    assert written["sliding_window"] == (max(windows) or None)
    assert "use_swa" not in json.dumps(written) and read(written) == config


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_types": [SLIDES, FULL], "sliding_window": 4, "is_causal": False},
        {"dflash_config": {"use_swa": True, "swa_window_size": 4}},
        {"dflash_config": {"use_swa": True, "causal": False}, "sliding_window": 1},
        {"dflash_config": {"use_swa": True, "causal": True}, "sliding_window": 4},
    ],
)
def test_a_window_that_cuts_a_block_is_an_error(changes):
    with pytest.raises(ValueError, match="sliding_window .* cuts .*: at least 5 is needed"):
        read(described("DFlashDraftModel", **changes))


def test_layer_types_that_are_not_given_are_those_of_transformers():
    transformers = pytest.importorskip("transformers")
    for fields in [
        dict(use_sliding_window=True, max_window_layers=1),
        dict(use_sliding_window=True),
        dict(use_sliding_window=False, max_window_layers=0),
        dict(use_sliding_window=True, max_window_layers=0),
        dict(use_sliding_window=True, max_window_layers=0, sliding_window=None),
        dict(use_sliding_window=False, max_window_layers=0, sliding_window=None),
    ]:
        fields = dict(sliding_window=5) | fields
        theirs = transformers.Qwen3Config(num_hidden_layers=2, **fields).layer_types
        ours = read(described("DFlashDraftModel", **fields)).to_dict()["layer_types"]
        assert ours == theirs


def test_engines_that_read_a_window_through_transformers_see_it():
    transformers = pytest.importorskip("transformers")
    config = described("DFlashDraftModel", layer_types=[SLIDES] * 2, sliding_window=6)
    assert transformers.Qwen3Config(**config).sliding_window is None  # which vLLM refuses
    assert transformers.Qwen3Config(**read(config).to_dict()).sliding_window == 6


# ------------------------------------------------------------------------------------- folders


def draw(shapes: dict) -> dict:
    generator = torch.Generator().manual_seed(0)
    return {
        name: (torch.randn(shape, generator=generator) * 0.2).bfloat16()
        for name, shape in shapes.items()
    }


def described_tensors(architecture: str) -> dict:
    """{name: shape} as the formats list them, for the config of `described`."""
    shapes = {"fc.weight": (C, 2 * C), "hidden_norm.weight": (C,), "norm.weight": (C,)}
    for n in range(2):
        layer = {
            "input_layernorm": (C,),
            "self_attn.q_proj": (32, C),
            "self_attn.k_proj": (16, C),
            "self_attn.v_proj": (16, C),
            "self_attn.o_proj": (C, 32),
            "self_attn.q_norm": (8,),
            "self_attn.k_norm": (8,),
            "post_attention_layernorm": (C,),
            "mlp.gate_proj": (40, C),
            "mlp.up_proj": (40, C),
            "mlp.down_proj": (C, 40),
        }
        shapes |= {f"layers.{n}.{name}.weight": shape for name, shape in layer.items()}
        for conv in ("attention_conv", "mlp_conv") * (architecture == "DFlash2DraftModel"):
            shapes[f"layers.{n}.{conv}.base_kernel"] = (2, 2, C)
            shapes[f"layers.{n}.{conv}.kernel_projection.weight"] = (2 * 2 * 4, C)
    if architecture == "DFlash2DraftModel":
        for name in ("predecessor_codebook", "successor_codebook"):
            shapes[f"candidate_selector.{name}"] = (V, RANK)
        shapes["candidate_selector.hidden_projection.weight"] = (RANK, C)
    if "DSpark" in architecture:
        shapes |= {f"markov_head.markov_w{i}.weight": (V, RANK) for i in (1, 2)}
        shapes |= {"confidence_head.proj.weight": (1, C + RANK), "confidence_head.proj.bias": (1,)}
    return shapes


VOCABULARY = {"embed_tokens.weight": (V, C), "lm_head.weight": (V, C)}
CODEBOOKS = [f"candidate_selector.{name}_codebook" for name in ("predecessor", "successor")]


def without_markov(shapes: dict) -> None:
    for name in list(shapes):
        if name.startswith(("markov_head", "confidence_head")):
            del shapes[name]


FOREIGN = {  # folders as peers write them: (architecture, changes of the config, of the tensors)
    "z-lab, DFlash": (
        "DFlashDraftModel",
        dict(
            auto_map={"AutoModel": "dflash.DFlashDraftModel"},
            dtype="bfloat16",
            transformers_version="4.57.0",
            bos_token_id=1,
            max_window_layers=2,
        ),
        lambda shapes: None,
    ),
    "MiMo's way to slide, a prefix": (
        "DFlashDraftModel",
        dict(dflash_config={"use_swa": True, "swa_window_size": 5, "attention_sink_bias": False}),
        lambda shapes: shapes.update({f"model.{n}": shapes.pop(n) for n in list(shapes)}),
    ),
    "DFlash 2 with codebooks as weights": (
        "DFlash2DraftModel",
        dict(is_causal=False, dflash_config={"output_multiplier": 0.5}),
        lambda shapes: shapes.update({f"{n}.weight": shapes.pop(n) for n in CODEBOOKS}),
    ),
    "DeepSpec, whole": (
        "Qwen3DSparkModel",
        dict(markov_head_type="Vanilla", tie_word_embeddings=False, pad_token_id=None),
        lambda shapes: shapes.update(VOCABULARY),
    ),
    "DeepSpec, taps from the embedding on": (
        "Qwen3DSparkModel",
        dict(target_layer_ids=[-1, 2], eagle_aux_hidden_state_layer_ids=[0, 3]),
        lambda shapes: None,
    ),
    "DeepSpec's DFlash": (
        "Qwen3DSparkModel",
        dict(markov_rank=0, enable_confidence_head=False, num_anchors=512)
        | dict.fromkeys(["markov_head_type", "confidence_head_with_markov"], "gone"),
        without_markov,
    ),
    "SpecForge's DSpark": (
        "DSparkDraftModel",
        dict(
            model_type="dspark",
            num_key_value_heads=4,
            dflash_config={
                "attention_mode": "mha",
                "projector_type": "dspark",
                "confidence_head_alpha": 1.0,
            },
        ),
        lambda shapes: shapes.update(
            {n: (32, C) for n in shapes if n.endswith(("k_proj.weight", "v_proj.weight"))}
        ),
    ),
    "SpecForge's DSpark by default": (
        "DSparkDraftModel",
        dict(dflash_config=dict(mask_token_id=22, target_layer_ids=[0, 2], block_size=5)),
        without_markov,
    ),
    "SpecForge's DSpark in a block of its own": (
        "DSparkDraftModel",
        dict(dflash_config=dict(mask_token_id=22, target_layer_ids=[0, 2]), block_size=5)
        | dict(dspark_config={n: v for n, v in SPARK.items() if n != "num_anchors"}),
        lambda shapes: None,
    ),
}


def foreign_folder(folder: Path, name: str) -> tuple[dict, dict]:
    """Write a folder of FOREIGN and return its config and tensors."""
    architecture, changes, change = FOREIGN[name]
    config = described(architecture, **changes)
    if "default" in name or "its own" in name:  # these blocks replace, and are not merged
        config["dflash_config"] = changes["dflash_config"]
    shapes = described_tensors(architecture)
    change(shapes)
    tensors = draw(shapes)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return config, tensors


@pytest.mark.parametrize("name", FOREIGN)
def test_a_peers_folder_is_read_written_and_read_again_without_a_change(tmp_path, target, name):
    config, tensors = foreign_folder(tmp_path, name)
    drafter = Drafter.from_pretrained(tmp_path, target)
    drafter.save_pretrained(tmp_path / "again")
    again = Drafter.from_pretrained(tmp_path / "again", target)
    assert again.config == drafter.config and type(again) is type(drafter)
    flat = {n.removeprefix("model.").replace("book.weight", "book"): t for n, t in tensors.items()}
    written_tensors = load_file(tmp_path / "again/model.safetensors")
    assert written_tensors.keys() == flat.keys() == again.state_dict().keys()
    for tensor_name, tensor in flat.items():
        assert torch.equal(written_tensors[tensor_name], tensor)
        assert torch.equal(again.state_dict()[tensor_name], tensor)
    written = read_json(tmp_path / "again/config.json")
    spelt_anew = {"use_swa", "swa_window_size", "max_window_layers", "markov_head_type"}
    spelt_anew |= {"model_type"}  # qwen3, whatever SpecForge calls a DSpark
    for place in ("", "dflash_config", "dspark_config"):
        theirs = config.get(place, {}) if place else config
        ours = written | (written.get(place, {}) if place else {})
        names = theirs.keys() - spelt_anew - {"dflash_config", "dspark_config"}
        for field_name in (name for name in names if TREATMENTS[name] != LEFT_OUT):
            assert ours[field_name] == theirs[field_name], field_name
    again.save_pretrained(tmp_path / "thrice")
    assert read_json(tmp_path / "thrice/config.json") == written
    anchors = torch.tensor([[3, 8]])
    tokens = torch.arange(10)[None]
    trunk = target.prefill(tokens, torch.tensor([10]), tap_ids=drafter.config.target_layer_ids)
    proposal = again.propose(trunk, anchors, 2)
    assert proposal.tokens.shape == (1, 2, 2, drafter.config.num_draft_tokens)


@pytest.mark.parametrize("variant", DRAFTERS)
def test_our_own_folder_is_read_and_written_without_a_change(tmp_path, target, variant):
    drafter = small_drafter(target, **DRAFTERS[variant], trained_with={"chat_template": "ab12"})
    drafter.save_pretrained(tmp_path / "one")
    again = Drafter.from_pretrained(tmp_path / "one", target)
    again.save_pretrained(tmp_path / "two")
    assert again.config == drafter.config
    one, two = (read_json(tmp_path / name / "config.json") for name in ("one", "two"))
    assert one == two and one["trained_with"] == {"chat_template": "ab12"}
    files = [load_file(tmp_path / name / "model.safetensors") for name in ("one", "two")]
    assert files[0].keys() == files[1].keys()
    assert all(torch.equal(files[0][name], tensor) for name, tensor in files[1].items())


def test_a_block_of_the_training_must_be_a_dictionary():
    assert read(described("DFlashDraftModel")).trained_with is None
    for value in ("ab12", ["ab12"], 5):
        with pytest.raises(ValueError, match="trained_with .* is no block"):
            read(described("DFlashDraftModel", trained_with=value))


@pytest.mark.parametrize(
    "changes, word",
    [
        ({"model_type": "gone"}, "model_type = None is not implemented in .*, only 'qwen3'"),
        ({"model_type": "dspark"}, "model_type = 'dspark' is not implemented .*, only 'qwen3'"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings 'false' must be true or false"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings 1 must be true or false"),
        ({"dflash_config": {"output_multiplier": 0}}, "output_multiplier is 0, not a positive"),
        ({"dflash_config": {"output_multiplier": -0.5}}, "output_multiplier is -0.5, not a pos"),
        ({"dflash_config": {"target_layer_ids": [2, 0]}}, r"\[2, 0\] must increase strictly"),
        ({"dflash_config": {"target_layer_ids": [1, 1]}}, r"\[1, 1\] must increase strictly"),
        ({"dflash_config": {"target_layer_ids": [0, -1]}}, r"\[0, -1\] must increase strictly"),
    ],
)
def test_a_value_that_no_engine_takes_is_an_error(changes, word):
    with pytest.raises(ValueError, match=f"config.json: .*{word}"):
        read(described("DFlash2DraftModel", **changes))


def test_a_dsparks_own_model_type_is_written_as_qwen3():
    config = read(described("Qwen3DSparkModel", model_type="dspark"))
    assert config.layers.model_type == config.to_dict()["model_type"] == "qwen3"


def test_a_tap_on_the_last_layer_is_told_in_one_line(tmp_path, target, capsys):
    for taps in [(0, 2), (0, 1)]:
        small_drafter(target, target_layer_ids=taps).save_pretrained(tmp_path)
        assert capsys.readouterr().out == ""
        Drafter.from_pretrained(tmp_path, target)
        printed = capsys.readouterr().out
        assert printed.count("\n") == ("tap 2, the target's last layer" in printed) == (2 in taps)


def test_tap_minus_one_is_the_embedding_but_not_of_several_streams(target):
    tokens = torch.arange(9)[None]
    trunk = target.prefill(tokens, torch.tensor([9]), tap_ids=(-1, 1))
    embedded = target.model.embed_tokens(tokens)
    assert torch.equal(trunk.taps[..., :C], embedded)
    assert small_drafter(target, target_layer_ids=(-1, 1)).fc.in_features == 2 * C
    with pytest.raises(ValueError, match="-1 is not implemented for residual streams"):
        small_drafter(small_target(arch="qsa"), target_layer_ids=(-1, 1))
    with pytest.raises(ValueError, match="-1 for the embedding"):
        small_drafter(target, target_layer_ids=(-2, 1))


@pytest.mark.parametrize("variant", ["dflash", "dflash2", "dspark vanilla", "dspark rnn"])
def test_a_vector_for_mask_in_a_file_of_its_own_is_refused_by_name(tmp_path, target, variant):
    small_drafter(target, **DRAFTERS[variant]).save_pretrained(tmp_path)
    Drafter.from_pretrained(tmp_path, target)
    torch.save(torch.zeros(C), tmp_path / "mask_embedding.pt")
    with pytest.raises(ValueError, match="mask_embedding.pt"):
        Drafter.from_pretrained(tmp_path, target)


# -------------------------------------------------------------------------------------- DSpark


@pytest.mark.parametrize("architecture", ["Qwen3DSparkModel", "DSparkDraftModel"])
def test_dsparks_fields_are_written_where_engines_look(target, architecture):
    written = small_drafter(
        target, architecture=architecture, markov_rank=RANK, block_size=4
    ).config.to_dict()
    expected = SPARK | {"num_anchors": 512, "mask_token_id": 22, "block_size": 4}
    expected["target_layer_ids"] = list(target.tap_ids)
    assert expected.items() <= written.items()
    if architecture == "DSparkDraftModel":
        assert written["dflash_config"] == expected
    else:
        assert "dflash_config" not in written
    assert written["num_target_layers"] == 3


@pytest.mark.parametrize(
    "fields, expected",
    [
        ({}, (0, False, False)),
        ({"markov_rank": RANK}, (RANK, False, False)),
        ({"markov_rank": RANK, "confidence_head_alpha": 1.0}, (RANK, True, False)),
        ({"confidence_head_alpha": 1.0, "enable_confidence_head": False}, (0, False, False)),
        ({"enable_confidence_head": True, "confidence_head_with_markov": True}, (0, True, False)),
        (
            {"markov_rank": RANK, "confidence_head_alpha": 1, "confidence_head_with_markov": True},
            (RANK, True, True),
        ),
    ],
)
def test_what_a_dspark_does_not_say_is_as_specforge_takes_it(fields, expected):
    config = described("DSparkDraftModel", dflash_config=dict.fromkeys(SPARK) | fields)
    config = read(config)
    stated = (config.markov_rank, config.enable_confidence_head, config.confidence_head_with_markov)
    assert stated == expected
    assert read(config.to_dict()) == config


@pytest.mark.parametrize("word", ["Vanilla", "VANILLA", "Gated", "RNN"])
def test_the_markov_heads_kind_is_read_in_any_case(word):
    config = read(described("Qwen3DSparkModel", markov_head_type=word))
    assert config.markov_head_type == config.to_dict()["markov_head_type"] == word.lower()


@pytest.mark.parametrize(
    "options, word",
    [
        (dict(markov_head_type="gated"), "gated"),
        (dict(markov_head_type="rnn"), "rnn"),
        (dict(markov_head_type="vanilla"), ""),
        (dict(markov_head_type="rnn", markov_rank=0), ""),
    ],
)
def test_a_fresh_markov_head_without_a_place_in_vllm_is_told(target, capsys, options, word):
    small_drafter(target, architecture="Qwen3DSparkModel", **(dict(markov_rank=RANK) | options))
    printed = capsys.readouterr().out
    assert printed.count("\n") == bool(word)
    assert word in printed and ("vLLM" in printed) == bool(word)


# ------------------------------------------------------------------------------------- engines


def test_each_cell_about_an_engine_says_how_it_is_known():
    rows = between_markers("engines").splitlines()
    heading, _, *rows = [[cell.strip() for cell in row.strip("| ").split(" | ")] for row in rows]
    engines = ["vLLM", "SGLang", "SpecForge", "DeepSpec", "z-lab's own", "transformers"]
    assert [row[0] for row in rows] == engines
    assert len(heading) == 5
    for row in rows:
        assert len(row) == len(heading)
        for cell in row[1:]:
            assert cell.split(":")[0] in ("run", "compared", "source", "unknown"), cell


if __name__ == "__main__":
    print(field_table())
