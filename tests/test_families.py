"""The hybrid families against transformers: random tiny checkpoints in every spelling, logits and
taps; and the three ways to run a text. `pytest tests/test_families.py`"""

import json
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from conftest import small_target, state_gap
from safetensors.torch import load_file, save_file

from hf.config import ModelConfig
from model import NGramEmbedding, gathered_attention
from target import Target
from tree import build_tree, causal_view

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
CASES = [("gdn", name) for name in GDN] + [("qsa", name) for name in QSA]


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


def decoder_of(theirs):
    inner = theirs.model
    return getattr(inner, "language_model", inner)


def their_taps(theirs, tokens, lengths):
    """logits, and what each layer's successor reads: with streams the mixed input, else the
    output."""
    decoder, taps = decoder_of(theirs), {}

    def keep(index):
        def hook(module, inputs, output):
            taps[index] = output[0] if isinstance(output, tuple) else output

        return hook

    streams = hasattr(decoder, "hyper_connection_mixer")
    if streams:
        heads = [layer.attn_hyper_connection for layer in decoder.layers[1:]]
        hooked = [*heads, decoder.hyper_connection_mixer]
    else:
        hooked = decoder.layers
    handles = [module.register_forward_hook(keep(i)) for i, module in enumerate(hooked)]
    mask = (torch.arange(tokens.shape[1]) < lengths[:, None]).long()
    topk = torch.Tensor.topk

    def lower_first(scores, k, dim=-1):
        """Equal scores, common behind a ReLU: the lower block wins, as method.md wants it; torch's
        own topk leaves it open."""
        if scores.dim() > 1:
            return topk(scores, k, dim)
        values, indices = scores.sort(stable=True, descending=True)
        return torch.return_types.topk((values[:k], indices[:k]))

    with torch.no_grad(), patch.object(torch.Tensor, "topk", lower_first):
        logits = theirs(tokens, attention_mask=mask, use_cache=False).logits
    for handle in handles:
        handle.remove()
    return logits, [taps[i] for i in range(len(taps))]


def comparison(ours: Target, theirs, tokens, lengths) -> str:
    """Layer by layer, so that a failing test names the first wrong one."""
    _, outputs = their_taps(theirs, tokens, lengths)
    trunk = ours.prefill(tokens, lengths, tap_ids=range(ours.config.num_hidden_layers))
    real = torch.arange(tokens.shape[1]) < lengths[:, None]
    lines = []
    for layer, (tap, other) in enumerate(zip(trunk.taps.chunk(len(outputs), -1), outputs)):
        gap = (tap - other)[real].abs().max().item()
        kind = LINEAR if ours.config.is_linear(layer) else FULL
        lines.append(f"layer {layer} ({kind}): {gap:.1e} {'OK' if gap < 1e-4 else 'DIFFERS'}")
    return "\n".join(lines)


def text(config, lengths, seed=1):
    """Right-padded random tokens with the stop token among them."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, config.vocab_size, (len(lengths), max(lengths)), generator=generator)
    stop = config.eos_token_id if config.streams else 7
    tokens[torch.rand(tokens.shape, generator=generator) < 0.15] = stop
    return tokens, torch.tensor(lengths)


@pytest.mark.parametrize("family, name", CASES)
def test_logits_and_taps_equal_transformers(tmp_path, family, name):
    theirs = theirs_saved(tmp_path, family, (GDN if family == "gdn" else QSA)[name])
    ours = Target.from_pretrained(tmp_path)
    tokens, lengths = text(ours.config, [70, 41, 9])
    logits, _ = their_taps(theirs, tokens, lengths)
    real = torch.arange(tokens.shape[1]) < lengths[:, None]
    gap = (ours(tokens) - logits)[real].abs().max()
    print(f"{family} {name}: {gap:.1e}")
    report = comparison(ours, theirs, tokens, lengths)
    assert gap < 1e-4 and "DIFFERS" not in report, f"logits differ by {gap:.1e}\n{report}"
    assert logits.std() > 0.05  # something was computed


def test_the_comparison_names_the_first_wrong_layer(tmp_path):
    theirs = theirs_saved(tmp_path, "gdn", {})
    ours = Target.from_pretrained(tmp_path)
    ours.model.layers[2].linear_attn.conv1d.weight[3] += 1.0
    lines = comparison(ours, theirs, *text(ours.config, [20])).splitlines()
    assert [line.endswith("OK") for line in lines] == [True, True, False, False]


def families():
    for family in ("llama", "qwen3"):
        yield family, small_target(model_type=family)
    yield "qwen3_5", small_target(arch="gdn")
    yield "qwen4_exp", small_target(arch="qsa")
    yield "qwen4_exp without n-grams", small_target(arch="qsa", ple_layer_ids=())


@pytest.mark.parametrize("name, target", list(families()))
@pytest.mark.parametrize("every", [0, 7, 64])
def test_prefill_in_chunks_equals_prefill_at_once(name, target, every):
    tokens, lengths = text(target.config, [90, 33, 64, 1])
    tokens %= target.config.vocab_size
    whole = target.prefill(tokens, lengths, checkpoint_every=every)
    logits = target(tokens)
    for chunk in (1, 5, 32, 64):
        trunk = target.prefill(tokens, lengths, chunk=chunk, checkpoint_every=every)
        for row, length in enumerate(lengths.tolist()):
            alone = whole.select(torch.tensor([row]))
            assert state_gap(trunk, row, alone) < 1e-4
            gap = (target.head(trunk.hidden[row, :length]) - logits[row, :length]).abs().max()
            assert gap < 1e-4 * logits.abs().max()
        assert (trunk.lengths == lengths).all() and torch.equal(trunk.tokens, tokens)


@pytest.mark.parametrize("name, target", list(families()))
@pytest.mark.parametrize("every", [0, 64])
def test_token_by_token_and_by_pieces_equals_prefill(name, target, every):
    """What decoding does: a chain that hangs on the trunk, committed whole."""
    tokens, length = text(target.config, [40])
    whole = target.prefill(tokens, length, checkpoint_every=every)
    for size in (1, 5):
        trunk = target.prefill(tokens[:, :3], torch.tensor([3]), checkpoint_every=every)
        while trunk.width < 40:
            piece = tokens[:, trunk.width : trunk.width + size]
            known = torch.cat([trunk.tokens[:, : trunk.width], piece[:, :1]], 1)
            end = trunk.lengths[:, None]
            tree = build_tree(known, trunk.lengths, end, piece[:, None, None, 1:], False, True)
            path = torch.arange(piece.shape[1])[None]
            trunk = target.commit(trunk, tree, target.score(trunk, tree), path)
        assert state_gap(trunk, 0, whole) < 1e-4


@pytest.mark.parametrize("seed", range(4))
def test_the_indexer_chooses_what_its_slow_twin_chooses(seed):
    """On a text, and on a tree whose every branch is compared with the text it stands for. Queries
    whose last chosen and next score nearly tie are left out and counted."""
    ratio, budget = ((2, 8), (4, 8), (3, 6), (2, 2))[seed]
    sizes = dict(indexer_compress_ratio=ratio, indexer_budget=budget, num_hidden_layers=1)
    target = small_target(
        seed, arch="qsa", layer_types=("full_attention",), ple_layer_ids=(), **sizes
    )
    layer, config = target.model.layers[0], target.config
    asked = {}
    layer.self_attn.indexer.register_forward_hook(lambda m, i, o: asked.update(inputs=i, mask=o))
    torch.manual_seed(seed)
    tokens, W = torch.randint(0, 20, (1, 50)), 7
    anchors, branches = torch.tensor([[3, 20, 21, 49]]), torch.randint(0, 3, (1, 4, 2, W))
    trunk = target.prefill(tokens, torch.tensor([50]))
    whole, left_out, compared = asked["mask"][0, 0], 0, 0

    def slow_sets(ids):
        target(torch.tensor([ids]))
        x, rope = asked["inputs"][:2]
        indexer = layer.self_attn.indexer
        last = len(ids) - 1
        return indexer.slow(x, rope, last), near_tie(indexer, x, rope, last)

    for t in range(50):
        wanted, close = slow_sets(tokens[0, : t + 1].tolist())
        left_out, compared = left_out + close, compared + 1
        assert close or set(torch.nonzero(whole[t]).flatten().tolist()) == wanted
    tree = build_tree(tokens, torch.tensor([50]), anchors, branches)
    target.score(trunk, tree)
    mask, T = asked["mask"][0, 0], 50
    history = tree.ancestors(W + 60)[0]
    for n in range(tree.num_nodes):
        path = [i for i in history[n].flip(0).tolist() if i >= 0]
        ids = [int(tokens[0, i]) if i < T else int(tree.tokens[0, i - T]) for i in path]
        wanted, close = slow_sets(ids)
        left_out, compared = left_out + close, compared + 1
        found = {path.index(i) for i in torch.nonzero(mask[n]).flatten().tolist()}
        assert close or found == wanted
    print(f"{left_out} of {compared} queries left out")
    assert left_out <= 0.05 * compared and compared > 70
    assert config.indexer_budget < 40


def near_tie(indexer, x, rope, t) -> bool:
    """Whether one more or fewer block would be a matter of rounding: exact ties are not."""
    count, found = indexer.num_blocks, []
    for blocks in (count - 1, count, count + 1):
        indexer.num_blocks = blocks
        found.append(indexer.slow(x, rope, t))
    indexer.num_blocks = count
    scores = block_scores(indexer, x, rope, t)
    if len(scores) <= count:
        return False
    edge = scores.sort(descending=True).values[count - 1 : count + 1]
    return 0 < (edge[0] - edge[1]).item() < 1e-5


def block_scores(indexer, x, rope, t):
    r, q = indexer.ratio, indexer.queries(x, rope)[0, t].float()
    keys = indexer.keys(x, causal_view(1, x.shape[1]), None)["block"][0, r - 1 : t + 1 : r]
    return (q @ keys.float().T).relu().sum(0) / indexer.head_dim**0.5


@pytest.mark.parametrize("aligned", [True, False])
def test_experts_grouped_equal_a_loop_over_tokens_with_gradients(aligned):
    sizes = dict(moe_intermediate_size=16 if aligned else 13, num_experts=6)
    moe = small_target(arch="qsa", **sizes).model.layers[0].mlp.requires_grad_(True)
    x = torch.randn(2, 9, 32, requires_grad=True)
    slow = []
    for token in x.flatten(0, 1):
        p = moe.gate(token).softmax(-1)
        best = p.argsort(descending=True)[: moe.k]
        total = moe.shared_expert_gate(token).sigmoid() * moe.shared_expert(token)
        for e in best.tolist():
            gate, up = (moe.experts.gate_up_proj[e] @ token).chunk(2)
            share = p[e] / p[best].sum()
            total = total + share * (moe.experts.down_proj[e] @ (F.silu(gate) * up))
        slow.append(total)
    slow = torch.stack(slow).view_as(x)
    torch.testing.assert_close(moe(x), slow, atol=1e-5, rtol=0)
    weights, leaves = torch.randn_like(x), [x, *moe.parameters()]
    pairs = (torch.autograd.grad((out * weights).sum(), leaves) for out in (moe(x), slow))
    for fast, plain in zip(*pairs):
        torch.testing.assert_close(fast, plain, atol=1e-4, rtol=0)


@pytest.mark.parametrize("number", [0, 1])
def test_the_hashes_are_those_of_a_fresh_model(number):
    options = COMMON | SPARSE | dict(ple_layer_ids=[1, 3], vocab_size=1000)
    theirs = Qwen4ExpForCausalLM(Qwen4ExpTextConfig(**options)).model.layers[2 * number]
    ours = NGramEmbedding(ModelConfig.from_dict(Qwen4ExpTextConfig(**options).to_dict()), number)
    for name, buffer in theirs.ple.ple_embedding.named_buffers():
        assert torch.equal(buffer, getattr(ours, name))
    table = theirs.ple.ple_embedding.ngram_embedding
    assert ours.ngram_embedding.weight.shape == table.weight.shape


def test_hashes_in_the_file_win_over_recomputing(tmp_path):
    theirs_saved(tmp_path, "qsa", {})
    path, name = tmp_path / "model.safetensors", "layer_multipliers"
    tensors = load_file(path)
    name = next(n for n in tensors if n.endswith(name))
    tensors[name] = tensors[name] + 2
    save_file(tensors, path, {"format": "pt"})
    loaded = Target.from_pretrained(tmp_path).state_dict()[name]
    assert torch.equal(loaded, tensors[name]) and loaded.dtype == torch.int64


@pytest.mark.parametrize("arch", ["gdn", "qsa"])
@pytest.mark.parametrize("tied", [False, True])
def test_what_is_saved_here_opens_there(tmp_path, arch, tied):
    target = small_target(arch=arch, tie_word_embeddings=tied, split_ngram_parts=3)
    target.save_pretrained(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    tokens, lengths = text(target.config, [40, 17])
    logits, _ = their_taps(theirs, tokens % 24, lengths)
    real = torch.arange(40) < lengths[:, None]
    gap = (target(tokens % 24) - logits)[real].abs().max()
    assert gap < 1e-4 * logits.abs().max().clamp(min=1)
    again = Target.from_pretrained(tmp_path).state_dict()
    for name, tensor in target.state_dict().items():
        assert torch.equal(again[name], tensor)


def one_by_one(target, tokens, start):
    """Logits (B,T-start,V) of tokens (B,T) from `start` on, decoded one at a time."""
    B, T = tokens.shape
    trunk = target.prefill(tokens[:, :start], torch.full((B,), start), checkpoint_every=0)
    logits, none = [], tokens.new_zeros(B, 1, 1, 0)
    for t in range(start, T):
        tree = build_tree(
            tokens[:, : t + 1], trunk.lengths, trunk.lengths[:, None], none, False, True
        )
        scored = target.score(trunk, tree)
        logits.append(target.head(scored.hidden[:, 0, 0, 0]).float())
        trunk = target.commit(trunk, tree, scored, torch.zeros(B, 1, dtype=torch.long))
    return torch.stack(logits, 1)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gdn", "qsa"])
def test_bfloat16_errs_no_more_than_half_again_as_much_as_transformers(tmp_path, family):
    """Root mean square error of the logits against float32, over the same rounded weights."""
    if family in ("llama", "qwen3"):
        small_target(model_type=family, std=0.15).save_pretrained(tmp_path)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    else:
        theirs = theirs_saved(tmp_path, family, {})
    theirs = theirs.bfloat16()
    theirs.save_pretrained(tmp_path / "half")
    ours = Target.from_pretrained(tmp_path / "half", dtype=torch.bfloat16)
    exact = Target.from_pretrained(tmp_path / "half", dtype=torch.float32)
    tokens, lengths = text(ours.config, [64] * 8)
    tokens %= ours.config.vocab_size
    wanted = exact(tokens)
    logits, _ = their_taps(theirs, tokens, lengths)
    mine, others = ((x.float() - wanted).square().mean().sqrt() for x in (ours(tokens), logits))
    print(f"{family}: error {mine:.2e}, transformers' {others:.2e}, ratio {mine / others:.2f}")
    assert mine <= 1.5 * others
    single = one_by_one(ours, tokens[:1], 32)  # one row takes another kernel, see one_row
    mine, others = (
        (x - wanted[:1, 32:]).square().mean().sqrt() for x in (single, logits[:1, 32:].float())
    )
    print(f"one by one: error {mine:.2e}, transformers' {others:.2e}, ratio {mine / others:.2f}")
    assert mine <= 1.5 * others
    for state in ours.prefill(tokens, lengths).states:
        for name in {"states", "k", "u", "g"} & state.keys():
            assert state[name].dtype == torch.float32


def test_attention_to_gathered_tokens_equals_attention_under_the_mask(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 5, 6, 8, generator=generator)
    kv = torch.randn(2, 40, 2, 3, 8, generator=generator)
    mask = torch.zeros(2, 1, 5, 40, dtype=torch.bool)
    mask.scatter_(3, torch.randint(0, 40, (2, 1, 5, 7), generator=generator), True)
    k, v = (x.transpose(1, 2) for x in kv.unbind(2))
    slow = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=mask, enable_gqa=True)
    fast = gathered_attention(q, kv, mask, 9)  # room for more than are marked
    torch.testing.assert_close(fast, slow.transpose(1, 2), atol=1e-6, rtol=0)
    monkeypatch.setattr("model.GATHERED", 20)  # two tokens at a time
    parts = gathered_attention(q, kv, mask, 9)
    torch.testing.assert_close(parts, slow.transpose(1, 2), atol=1e-6, rtol=0)
