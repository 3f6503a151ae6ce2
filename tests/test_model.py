"""The layers: logits and taps against transformers for random tiny models in every spelling, every
fast path against a slow twin, and a text run in one piece against the same text run in several.
`pytest tests/test_model.py`"""

import json
import math
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch.nn.attention import flex_attention

import model
from hf import load_tokenizer
from hf.config import FAMILIES
from model import (
    ModelConfig,
    NGramEmbedding,
    attention,
    attention_by_key_head,
    gathered_attention,
    rotary,
    rotate,
)
from small import (
    PRIVATE_AND_MERGED,
    SMALL,
    random_case,
    random_tokens,
    randomise,
    small_target,
    state_gap,
)
from support import gpu
from support.cpu import for_cpu
from support.toy import write_byte_tokenizer
from target import Target
from their_models import COMMON, FULL, GDN, LINEAR, QSA, SPARSE, theirs_saved, transformers
from tree import build_tree, causal_mask, causal_view

# ------------------------------------------------------------------------- against transformers

DENSE = {  # what can vary in the dense families, varied
    "plain": dict(),
    "one kv head": dict(num_key_value_heads=1),
    "as many kv heads": dict(num_key_value_heads=4),
    "wide heads": dict(head_dim=24),
    "tied": dict(tie_word_embeddings=True),
    "older rope": dict(older_rope=True),
    "deep": dict(num_hidden_layers=6, rms_norm_eps=1e-4),
}
VARIANTS = {"llama": DENSE, "qwen3": DENSE, "gdn": GDN, "qsa": QSA}


EVERY_VARIANT = [  # the plain one of each family runs by default
    pytest.param(family, name, marks=() if name == "plain" else pytest.mark.slow)
    for family, variants in VARIANTS.items()
    for name in variants
]


def save_theirs(folder, family: str, variant: str = "plain"):
    """A random tiny model of transformers', saved in a folder, and itself."""
    options = VARIANTS[family][variant]
    if family in ("llama", "qwen3"):
        return save_dense(folder, family, dict(options))
    return theirs_saved(folder, family, options)


def save_dense(folder, family: str, options: dict):
    older_rope = options.pop("older_rope", False)
    theta = 777.0 if older_rope else 5000.0
    options = SMALL | {"rope_parameters": {"rope_theta": theta, "rope_type": "default"}} | options
    kind = {"llama": "Llama", "qwen3": "Qwen3"}[family]
    config = getattr(transformers, f"{kind}Config")(**options)
    theirs = getattr(transformers, f"{kind}ForCausalLM")(config).float()
    randomise(theirs, 0, 0.2)
    theirs.save_pretrained(folder)
    if older_rope:  # the spelling of older files
        path = folder / "config.json"
        config_dict = json.loads(path.read_text())
        del config_dict["rope_parameters"]
        path.write_text(json.dumps(config_dict | {"rope_theta": theta, "rope_scaling": None}))
    return theirs


def text(config, lengths, seed=1):
    """Right-padded random tokens, the stop token among them, and their lengths."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, config.vocab_size, (len(lengths), max(lengths)), generator=generator)
    stop_id = config.eos_token_id if config.has_streams else 7
    tokens[torch.rand(tokens.shape, generator=generator) < 0.15] = stop_id
    return tokens, torch.tensor(lengths)


def lower_index_first(scores, k, dim=-1, topk=torch.Tensor.topk):
    """torch leaves open which of equal scores, common behind a ReLU, `topk` takes; here the lower
    block wins."""
    if scores.dim() > 1:
        return topk(scores, k, dim)
    values, indices = scores.sort(stable=True, descending=True)
    return torch.return_types.topk((values[:k], indices[:k]))


def their_logits_and_taps(theirs, tokens, lengths):
    """Logits, and for each layer what its successor reads: its output, or with residual streams
    their mix."""
    decoder = getattr(theirs.model, "language_model", theirs.model)
    taps = {}

    def keep(index):
        def hook(module, inputs, output):
            taps[index] = output[0] if isinstance(output, tuple) else output

        return hook

    modules = decoder.layers
    if hasattr(decoder, "hyper_connection_mixer"):
        connections = [layer.attn_hyper_connection for layer in decoder.layers[1:]]
        modules = [*connections, decoder.hyper_connection_mixer]
    handles = [module.register_forward_hook(keep(i)) for i, module in enumerate(modules)]
    mask = (torch.arange(tokens.shape[1]) < lengths[:, None]).long()
    with torch.no_grad(), patch.object(torch.Tensor, "topk", lower_index_first):
        logits = theirs(tokens, attention_mask=mask, use_cache=False).logits
    for handle in handles:
        handle.remove()
    return logits, [taps[i] for i in range(len(taps))]


def comparison(ours: Target, their_taps, tokens, lengths) -> list[str]:
    """One line per layer, so that a failing test names the first wrong one."""
    trunk = ours.prefill(tokens, lengths, tap_ids=range(ours.config.num_hidden_layers))
    is_real = torch.arange(tokens.shape[1]) < lengths[:, None]
    lines = []
    for layer, (tap, theirs) in enumerate(zip(trunk.taps.chunk(len(their_taps), -1), their_taps)):
        gap = (tap - theirs)[is_real].abs().max().item()
        kind = LINEAR if ours.config.is_linear(layer) else FULL
        lines.append(f"layer {layer} ({kind}): {gap:.1e} {'OK' if gap < 1e-4 else 'DIFFERS'}")
    return lines


@pytest.mark.parametrize("family, variant", EVERY_VARIANT)
def test_logits_and_taps_equal_transformers(tmp_path, family, variant):
    theirs = save_theirs(tmp_path, family, variant)
    ours = Target.from_pretrained(tmp_path)
    tokens, lengths = text(ours.config, [70, 41, 9])
    logits, their_taps = their_logits_and_taps(theirs, tokens, lengths)
    is_real = torch.arange(tokens.shape[1]) < lengths[:, None]
    gap = (ours(tokens) - logits)[is_real].abs().max()
    lines = comparison(ours, their_taps, tokens, lengths)
    assert len(lines) == ours.config.num_hidden_layers
    report = "\n".join(lines)
    assert gap < 1e-4 and "DIFFERS" not in report, f"logits differ by {gap:.1e}\n{report}"
    assert logits.std() > 0.05  # something was computed


@pytest.mark.parametrize("family, layer", [("llama", 1), ("gdn", 2)])
def test_the_comparison_names_the_first_wrong_layer(tmp_path, family, layer):
    theirs = save_theirs(tmp_path, family)
    ours = Target.from_pretrained(tmp_path)
    wrong = ours.model.layers[layer]
    if family == "llama":
        wrong.mlp.up_proj.weight[0, 0] += 1.0
    else:
        wrong.linear_attn.conv1d.weight[3] += 1.0
    tokens, lengths = text(ours.config, [20])
    _, their_taps = their_logits_and_taps(theirs, tokens, lengths)
    lines = comparison(ours, their_taps, tokens, lengths)
    assert [line.endswith("OK") for line in lines] == [i < layer for i in range(len(lines))]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("seed", range(3))
def test_what_transformers_saved_opens_here_with_the_same_logits(tmp_path, tied, seed):
    config = transformers.Qwen3Config(
        **SMALL,
        tie_word_embeddings=tied,
        rope_parameters={"rope_theta": 3000.0 * (seed + 1), "rope_type": "default"},
    )
    theirs = transformers.Qwen3ForCausalLM(config).float()
    randomise(theirs, seed, 0.2)
    theirs.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "qwen3"
    ours = Target.from_pretrained(tmp_path)
    assert ours.lm_head.weight is ours.model.embed_tokens.weight or not tied
    tokens = random_tokens(3, 40, seed, SMALL["vocab_size"])
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, atol=1e-4, rtol=0)


FAMILY = {
    "llama": dict(model_type="llama"),
    "qwen3": dict(model_type="qwen3"),
    "gdn": dict(arch="gdn"),
    "qsa": dict(arch="qsa", split_ngram_parts=3),
}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILY)
def test_what_is_saved_here_opens_there_and_here_again(tmp_path, family, tied):
    target = small_target(**FAMILY[family], tie_word_embeddings=tied)
    target.save_pretrained(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(theirs).__name__ == FAMILIES[target.config.model_type]
    tokens, lengths = text(target.config, [40, 17])
    tokens %= target.config.vocab_size
    logits, _ = their_logits_and_taps(theirs, tokens, lengths)
    is_real = torch.arange(40) < lengths[:, None]
    gap = (target(tokens) - logits)[is_real].abs().max()
    assert gap < 1e-4 * logits.abs().max().clamp(min=1)
    again = Target.from_pretrained(tmp_path)
    assert again.config == target.config
    assert not any(parameter.requires_grad for parameter in again.parameters())
    for name, tensor in target.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_saved_target_opens_in_transformers_with_its_tokenizer(tmp_path, tied):
    target = small_target(vocab_size=264, tie_word_embeddings=tied, rope_theta=5000.0)
    write_byte_tokenizer(tmp_path)
    target.save_pretrained(tmp_path, eos_token_id=256, pad_token_id=257)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(theirs).__name__ == "Qwen3ForCausalLM"
    tokens = random_tokens(2, 50, vocab_size=256)
    with torch.no_grad():
        torch.testing.assert_close(target(tokens), theirs(tokens).logits, atol=1e-4, rtol=0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = load_tokenizer(tmp_path)
    string = "def f(x):\n    return 'é 世界'"
    assert tokenizer(string)["input_ids"] == ours.encode(string) == list(string.encode())
    special = "a<|endoftext|> b<|pad|>"
    assert tokenizer(special)["input_ids"] == ours.encode(special)
    assert ours.decode(ours.encode(string)) == string
    assert ours.stop_ids == (256,) and ours.pad_id == 257


def decoded_one_by_one(target, tokens, start):
    """Logits (B,T-start,V) of tokens (B,T) from `start` on, decoded one at a time."""
    B, T = tokens.shape
    trunk = target.prefill(tokens[:, :start], torch.full((B,), start), checkpoint_every=0)
    no_draft = tokens.new_zeros(B, 1, 1, 0)
    logits = []
    for t in range(start, T):
        anchors = trunk.lengths[:, None]
        tree = build_tree(tokens[:, : t + 1], trunk.lengths, anchors, no_draft, False, True)
        scored = target.score(trunk, tree)
        logits.append(target.head(scored.hidden[:, 0, 0, 0]).float())
        trunk = target.commit(trunk, tree, scored, torch.zeros(B, 1, dtype=torch.long))
    return torch.stack(logits, 1)


@pytest.mark.parametrize(
    "family", ["llama", "qwen3", pytest.param("gdn", marks=pytest.mark.slow), "qsa"]
)
def test_bfloat16_errs_no_more_than_half_again_as_much_as_transformers(tmp_path, family):
    """Root mean square error of the logits against float32, over the same rounded weights."""
    if family in ("llama", "qwen3"):
        small_target(model_type=family, std=0.15).save_pretrained(tmp_path)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    else:
        theirs = theirs_saved(tmp_path, family, {})
    theirs = theirs.bfloat16()
    theirs.save_pretrained(tmp_path / "half")
    ours = for_cpu(Target.from_pretrained(tmp_path / "half", dtype=torch.bfloat16))
    exact = Target.from_pretrained(tmp_path / "half", dtype=torch.float32)
    tokens, lengths = text(ours.config, [64] * 8)
    tokens %= ours.config.vocab_size
    expected = exact(tokens)
    logits, _ = their_logits_and_taps(theirs, tokens, lengths)

    def error(bfloat16_logits, reference):
        return (bfloat16_logits.float() - reference).square().mean().sqrt()

    assert error(ours(tokens), expected) <= 1.5 * error(logits, expected)
    one_row = decoded_one_by_one(ours, tokens[:1], 32)  # by a kernel of its own, see for_cpu
    reference = expected[:1, 32:]
    assert error(one_row, reference) <= 1.5 * error(logits[:1, 32:], reference)
    for state in ours.prefill(tokens, lengths).states:
        for name in {"states", "k", "u", "g"} & state.keys():
            assert state[name].dtype == torch.float32


# ------------------------------------------------------------------- one piece against several

RUN_IN_PIECES = FAMILY | {"qsa without n-grams": dict(arch="qsa", ple_layer_ids=())}
EVERY_FAMILY = [*FAMILY, pytest.param("qsa without n-grams", marks=pytest.mark.slow)]


@pytest.mark.parametrize("family", EVERY_FAMILY)
@pytest.mark.parametrize("checkpoint_every", [0, 7, 64])
def test_prefill_in_chunks_equals_prefill_at_once(family, checkpoint_every):
    target = small_target(**RUN_IN_PIECES[family])
    tokens, lengths = text(target.config, [90, 33, 64, 1])
    tokens %= target.config.vocab_size
    whole = target.prefill(tokens, lengths, checkpoint_every=checkpoint_every)
    logits = target(tokens)
    for chunk in (1, 5, 32, 64):
        trunk = target.prefill(tokens, lengths, chunk=chunk, checkpoint_every=checkpoint_every)
        for row, length in enumerate(lengths.tolist()):
            alone = whole.select(torch.tensor([row]))
            assert state_gap(trunk, row, alone) < 1e-4
            gap = (target.head(trunk.hidden[row, :length]) - logits[row, :length]).abs().max()
            assert gap < 1e-4 * logits.abs().max()
        assert torch.equal(trunk.lengths, lengths) and torch.equal(trunk.tokens, tokens)


@pytest.mark.parametrize("family", EVERY_FAMILY)
@pytest.mark.parametrize("checkpoint_every", [0, 64])
@pytest.mark.parametrize("size", [1, 5])
def test_committed_pieces_equal_prefill_at_once(family, checkpoint_every, size):
    """Decoding commits chains that hang on the end of the trunk."""
    target = small_target(**RUN_IN_PIECES[family])
    tokens, length = text(target.config, [40])
    whole = target.prefill(tokens, length, checkpoint_every=checkpoint_every)
    trunk = target.prefill(tokens[:, :3], torch.tensor([3]), checkpoint_every=checkpoint_every)
    while trunk.width < 40:
        piece = tokens[:, trunk.width : trunk.width + size]
        known = torch.cat([trunk.tokens[:, : trunk.width], piece[:, :1]], 1)
        anchors = trunk.lengths[:, None]
        tree = build_tree(known, trunk.lengths, anchors, piece[:, None, None, 1:], False, True)
        path = torch.arange(piece.shape[1])[None]
        trunk = target.commit(trunk, tree, target.score(trunk, tree), path)
    assert state_gap(trunk, 0, whole) < 1e-4


# ------------------------------------------------------------- fast paths against their slow twins


def test_rotary_turns_pairs_by_the_complex_exponential():
    x = torch.randn(1, 5, 2, 8)
    positions = torch.tensor([[0, 3, 4, 7, 100]])
    z = torch.complex(x[..., :4], x[..., 4:])
    angle = positions[..., None] * 10_000.0 ** -(torch.arange(4) / 4)  # (1, 5, 4)
    turned = z * torch.polar(torch.ones_like(angle), angle)[:, :, None]
    expected = torch.cat([turned.real, turned.imag], -1)
    torch.testing.assert_close(rotate(x, rotary(positions, 8, 10_000.0)), expected)
    longer = torch.cat([x, x], -1)  # the rope's width is the head's first half
    partly = rotate(longer, rotary(positions, 8, 10_000.0))
    torch.testing.assert_close(partly, torch.cat([expected, x], -1))


def random_attention(B, N, T, H, num_key_heads, D, num_visible):
    """q, kv, and a mask under which each token sees at most num_visible slots."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(B, N, H, D, generator=generator)
    kv = torch.randn(B, T, 2, num_key_heads, D, generator=generator)
    mask = torch.zeros(B, 1, N, T, dtype=torch.bool)
    slots = torch.randint(0, T, (B, 1, N, num_visible), generator=generator)
    return q, kv, mask.scatter_(3, slots, True)


def slow_attention(q, kv, mask):
    """Attention, token by token and head by head, from the slots that each token sees."""
    B, N, H, D = q.shape
    per_key_head = H // kv.shape[3]
    out = torch.empty_like(q)
    for b in range(B):
        for n in range(N):
            for h in range(H):
                k, v = kv[b, mask[b, 0, n], :, h // per_key_head].unbind(1)  # (S, D)
                out[b, n, h] = (k @ q[b, n, h] / math.sqrt(D)).softmax(0) @ v
    return out


@pytest.mark.parametrize("long_text", [0, model.LONG_TEXT])
@pytest.mark.parametrize("N", [1, 5])
@pytest.mark.parametrize("num_key_heads", [1, 3, 6])
def test_attention_equals_head_by_head(N, num_key_heads, long_text, monkeypatch):
    monkeypatch.setattr(model, "LONG_TEXT", long_text)
    q, kv, mask = random_attention(2, N, 12, 6, num_key_heads, 8, 7)
    torch.testing.assert_close(attention(q, kv, mask), slow_attention(q, kv, mask))
    causal = torch.ones(N, N, dtype=torch.bool).tril().expand(2, 1, N, N)
    expected = slow_attention(q, kv[:, :N], causal)
    torch.testing.assert_close(attention(q, kv[:, :N], None), expected)
    mask[0, 0, -1, (~mask[0, 0, -1]).nonzero()[0]] = True  # one slot more is noticed
    assert (attention(q, kv, mask) - slow_attention(q, kv, mask)).abs().max() < 1e-5
    one_less = slow_attention(*random_attention(2, N, 12, 6, num_key_heads, 8, 7))
    assert (attention(q, kv, mask) - one_less).abs().max() > 1e-3


@pytest.mark.parametrize("N", [2, 5])
@pytest.mark.parametrize("num_key_heads", [1, 3, 6])
def test_later_tokens_of_a_text_see_all_that_came_before(N, num_key_heads):
    q, kv, _ = random_attention(2, N, 12, 6, num_key_heads, 8, 7)
    mask = causal_mask(12 - N, N).expand(2, 1, N, 12)
    expected = slow_attention(q, kv, mask)
    torch.testing.assert_close(attention(q, kv, None), expected)
    assert (attention(q, kv[:, 1:], None) - expected).abs().max() > 1e-3


@pytest.mark.parametrize("N", [1, 5])
@pytest.mark.parametrize("num_key_heads", [1, 3, 6])
def test_heads_treated_as_tokens_give_the_same_attention(N, num_key_heads):
    q, kv, mask = random_attention(2, N, 12, 6, num_key_heads, 8, 7)
    expected = slow_attention(q, kv, mask)
    torch.testing.assert_close(attention_by_key_head(q, kv, mask), expected)


# ------------------------------------------------------------------------- attention in blocks


@pytest.fixture
def flex_here(monkeypatch):
    """Score trees by FlexAttention on a CPU, too, where it runs uncompiled."""
    monkeypatch.setattr(gpu, "KERNEL_DEVICES", ("cpu",))
    monkeypatch.setattr(gpu, "FLEX_QUERIES", 1)
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    gpu.flex_agrees.cache_clear()
    yield monkeypatch
    gpu.flex_agrees.cache_clear()


@PRIVATE_AND_MERGED
@pytest.mark.parametrize("arch", ["gqa", "gdn"])
def test_flexattention_equals_dense_masks_on_packed_trees(flex_here, arch, merge):
    target = small_target(arch=arch)
    masks = []
    honest = gpu.attention_in_blocks
    watched = lambda q, kv, mask: (masks.append(mask), honest(q, kv, mask))[1]  # noqa: E731
    flex_here.setattr(gpu, "attention_in_blocks", watched)
    for seed in range(3):
        case = random_case(seed, 4)
        tree = build_tree(*case, merge=merge)
        trunk = target.prefill(*case[:2])
        by_blocks = target.score(trunk, tree).node_hidden[tree.valid]
        assert masks and len({id(mask) for mask in masks}) == (2 if seed == 0 else 1)
        masks.clear()  # one for all layers, and one of the check before the first
        with flex_here.context() as dense:
            dense.setattr(gpu, "KERNEL_DEVICES", ())
            by_mask = target.score(trunk, tree).node_hidden[tree.valid]
        assert not masks
        torch.testing.assert_close(by_blocks, by_mask, atol=1e-5, rtol=0)


def written_out(tree, view) -> torch.Tensor:
    """A tree's block mask as a dense one."""
    B, _, N, slots = view.mask.shape
    mask = gpu.tree_block_mask(tree.roots, view.last_descendants, tree.num_trunk_slots)
    return flex_attention.create_mask(mask.mask_mod, B, 1, N, slots, device="cpu")


def test_a_block_mask_is_the_dense_mask_of_its_tree():
    for seed in range(6):
        tree = build_tree(*random_case(seed, 4), merge=bool(seed % 2))
        view = tree.view()
        is_node = tree.valid[:, None]
        assert torch.equal(written_out(tree, view)[is_node], view.mask[is_node])
        view.last_descendants[0, 0] += 1  # one node more below the first, and they differ
        assert not torch.equal(written_out(tree, view)[is_node], view.mask[is_node])


def test_flexattention_that_fails_or_errs_is_left_alone(flex_here, capsys):
    heads = (torch.device("cpu"), torch.float32, 4, 2, 16)
    assert gpu.flex_agrees(*heads)
    assert "by FlexAttention" in capsys.readouterr().out
    honest = gpu.attention_in_blocks
    for broken in (lambda q, kv, mask: honest(q, kv, mask) * 1.1, lambda *_: 1 / 0):
        gpu.flex_agrees.cache_clear()
        flex_here.setattr(gpu, "attention_in_blocks", broken)
        assert not gpu.flex_agrees(*heads)
        assert "by torch operations" in capsys.readouterr().out
        target, case = small_target(), random_case(0, 2)
        target.score(target.prefill(*case[:2]), build_tree(*case))  # and scoring goes on


@pytest.mark.parametrize("keys_at_once", [model.GATHERED_KEYS, 20], ids=["at once", "in parts"])
def test_attention_to_gathered_slots_equals_attention_under_the_mask(monkeypatch, keys_at_once):
    q, kv, mask = random_attention(2, 5, 40, 6, 3, 8, 7)
    monkeypatch.setattr(model, "GATHERED_KEYS", keys_at_once)  # 20: a token of each row at a time
    gathered = gathered_attention(q, kv, mask, 9)  # room for more than are visible
    torch.testing.assert_close(gathered, attention(q, kv, mask), atol=1e-6, rtol=0)


def test_a_sparse_target_says_the_same_gathered_or_masked(monkeypatch):
    target, tokens = small_target(arch="qsa"), random_tokens(2, 60)
    logits = []
    for gathers in (True, False):
        monkeypatch.setattr(model, "worth_gathering", lambda *sizes: gathers)  # noqa: B023
        logits.append(target(tokens))
    torch.testing.assert_close(*logits, atol=1e-4, rtol=0)


def test_gathering_is_for_texts_much_longer_than_what_is_visible():
    assert model.worth_gathering(num_queries=1, num_slots=10_000, max_visible=2048)
    assert not model.worth_gathering(num_queries=1, num_slots=8_000, max_visible=2048)
    assert not model.worth_gathering(num_queries=1024, num_slots=10_000, max_visible=2048)
    assert model.worth_gathering(num_queries=1024, num_slots=70_000, max_visible=2048)


def is_near_tie(indexer, x, rope, t) -> bool:
    """Whether the last block that token t chooses and the next one differ by rounding only. Equal
    scores are no such case: the lower block wins."""
    r = indexer.ratio
    q = indexer.queries(x, rope)[0, t].float()
    keys = indexer.keys(x, causal_view(1, x.shape[1]), None)["block"][0, r - 1 : t + 1 : r]
    scores = (q @ keys.float().T).relu().sum(0) / math.sqrt(indexer.head_dim)
    if len(scores) <= indexer.num_blocks:
        return False
    scores = scores.sort(descending=True).values
    return 0 < (scores[indexer.num_blocks - 1] - scores[indexer.num_blocks]).item() < 1e-5


@pytest.mark.parametrize("ratio, budget", [(2, 8), (4, 8), (3, 6), (2, 2)])
def test_the_indexer_chooses_what_its_slow_twin_chooses(ratio, budget):
    """On a text, and on a tree whose every node is compared with the text of its history. Queries
    whose last chosen and next score nearly tie are left out and counted."""
    seed = ratio + budget
    sizes = dict(indexer_compress_ratio=ratio, indexer_budget=budget, num_hidden_layers=1)
    target = small_target(seed, arch="qsa", layer_types=(FULL,), ple_layer_ids=(), **sizes)
    indexer = target.model.layers[0].self_attn.indexer
    seen = {}
    indexer.register_forward_hook(lambda m, inputs, mask: seen.update(inputs=inputs, mask=mask))
    torch.manual_seed(seed)
    T, W = 50, 7
    tokens = torch.randint(0, 20, (1, T))
    anchors, branches = torch.tensor([[3, 20, 21, 49]]), torch.randint(0, 3, (1, 4, 2, W))
    lengths = torch.tensor([T])
    trunk = target.prefill(tokens, lengths)
    texts = [(tokens[0, : t + 1].tolist(), set_of(row)) for t, row in enumerate(seen["mask"][0, 0])]
    tree = build_tree(tokens, lengths, anchors, branches)
    target.score(trunk, tree)
    histories = tree.ancestors(T + W)[0]
    for n in range(tree.num_nodes):
        path = [index for index in histories[n].flip(0).tolist() if index >= 0]
        ids = torch.cat([tokens[0], tree.tokens[0]])[path].tolist()
        visible = {path.index(index) for index in set_of(seen["mask"][0, 0, n])}
        texts.append((ids, visible))
    left_out = 0
    for ids, visible in texts:
        target(torch.tensor([ids]))
        x, rope = seen["inputs"][:2]
        if is_near_tie(indexer, x, rope, len(ids) - 1):
            left_out += 1
        else:
            assert visible == visible_slowly(indexer, x, rope, len(ids) - 1)
    assert left_out <= 0.05 * len(texts) and len(texts) > 70


def visible_slowly(indexer, x, rope, t: int) -> set[int]:
    """The twin of the indexer, block by block: the positions that token t of a text x (1,N,C)
    attends to. rope covers the whole text."""
    r = indexer.ratio
    q = indexer.queries(x, rope)[0, t].float()  # (H, D)
    raw = F.linear(x[0], indexer.index_qk_proj.weight[-indexer.head_dim :])
    first_incomplete = (t + 1) // r * r
    scores = []
    for start in range(0, first_incomplete, r):
        key = indexer.k_layernorm(raw[start : start + r].float().mean(0).to(x.dtype))
        key = rotate(key[None, None, None], tuple(part[:, start : start + 1] for part in rope))
        score = (q @ key[0, 0, 0].float()).relu().sum() / math.sqrt(indexer.head_dim)
        scores.append((-score.item(), start))
    best = sorted(scores)[: indexer.num_blocks]
    chosen = {start + i for _, start in best for i in range(r)}
    return chosen | set(range(first_incomplete, t + 1))


def set_of(mask) -> set[int]:
    return set(torch.nonzero(mask).flatten().tolist())


@pytest.mark.parametrize("width", [16, 13], ids=["aligned", "not aligned"])
def test_experts_in_one_product_equal_a_loop_over_tokens_with_gradients(width):
    target = small_target(arch="qsa", moe_intermediate_size=width, num_experts=6)
    moe = target.model.layers[0].mlp.requires_grad_(True)
    x = torch.randn(2, 9, 32, requires_grad=True)
    outputs = []
    for token in x.flatten(0, 1):
        p = moe.gate(token).softmax(-1)
        best = p.argsort(descending=True)[: moe.k]
        out = moe.shared_expert_gate(token).sigmoid() * moe.shared_expert(token)
        for e in best.tolist():
            gate, up = (moe.experts.gate_up_proj[e] @ token).chunk(2)
            share = p[e] / p[best].sum()
            out = out + share * (moe.experts.down_proj[e] @ (F.silu(gate) * up))
        outputs.append(out)
    slow, fast = torch.stack(outputs).view_as(x), moe(x)
    torch.testing.assert_close(fast, slow, atol=1e-5, rtol=0)
    weights, leaves = torch.randn_like(x), [x, *moe.parameters()]
    slow_gradients = torch.autograd.grad((slow * weights).sum(), leaves)
    fast_gradients = torch.autograd.grad((fast * weights).sum(), leaves)
    for slow_gradient, fast_gradient in zip(slow_gradients, fast_gradients):
        torch.testing.assert_close(fast_gradient, slow_gradient, atol=1e-4, rtol=0)


# ---------------------------------------------------------------------------- hashes of n-grams


@pytest.mark.parametrize("number", [0, 1])
def test_the_hashes_are_those_of_a_fresh_model(number):
    options = COMMON | SPARSE | dict(ple_layer_ids=[1, 3], vocab_size=1000)
    config = transformers.Qwen4ExpTextConfig(**options)
    theirs = transformers.Qwen4ExpForCausalLM(config).model.layers[2 * number].ple.ple_embedding
    ours = NGramEmbedding(ModelConfig.from_dict(config.to_dict()), number)
    for name, buffer in theirs.named_buffers():
        assert torch.equal(buffer, getattr(ours, name)), name
    assert ours.ngram_embedding.weight.shape == theirs.ngram_embedding.weight.shape


def test_hashes_in_the_file_win_over_recomputing(tmp_path):
    theirs_saved(tmp_path, "qsa", {})
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith("layer_multipliers"))
    tensors[name] = tensors[name] + 2
    save_file(tensors, path, {"format": "pt"})
    loaded = Target.from_pretrained(tmp_path).state_dict()[name]
    assert torch.equal(loaded, tensors[name]) and loaded.dtype == torch.int64
