"""What a drafter computes, that training and decoding compute the same, and that q is what is drawn
from. `pytest tests/test_drafter.py`"""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

import plain_drafters
from drafter import Drafter, LayerMemory, Sampling, draw, previous_tokens
from small import DRAFTERS, SMALL, random_tokens, reconfigure, small_drafter, small_target
from support.gpu import chunk_elements
from target import default_taps
from tree import build_tree


def trunk_and_anchors(target, B=3, T=20, A=5) -> tuple:
    """-> tokens, lengths, anchors: one anchor at the start, one absent."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, target.num_tokens, (B, T), generator=generator)
    lengths = torch.tensor([T, T - 7, T - 3])[:B]
    anchors = torch.stack(
        [torch.randperm(int(n), generator=generator)[:A].sort().values for n in lengths]
    )
    anchors[0, 0], anchors[-1, -1] = 0, -1  # no context at all, and no anchor at all
    return tokens, lengths, anchors


# -------------------------------------------------------------------------------------- the blocks


def gap_to_plain_loops(drafter, trunk, taps, anchors) -> float:
    """The largest difference between a block's logits and those of plain loops over these taps."""
    config, embed = drafter.config.to_dict(), drafter.target.model.embed_tokens.weight
    tensors = {name: tensor.double() for name, tensor in drafter.state_dict().items()}
    logits = drafter.logits(drafter.block(trunk, anchors))
    gaps = []
    for row, column in [(0, 0), (0, 2), (1, 4), (2, 1)]:
        anchor = int(anchors[row, column])
        token = int(trunk.tokens[row, anchor])
        hidden = plain_drafters.block_hidden(config, tensors, embed, taps[row], token, anchor)
        head, num_tokens = drafter.target.lm_head.weight, drafter.target.num_tokens
        slow = plain_drafters.unary_logits(config, head, hidden, num_tokens)
        allowed = logits[row, column] > -torch.inf
        assert torch.equal(allowed, slow > -torch.inf)
        gaps.append((logits[row, column] - slow)[allowed].abs().max().item())
    return max(gaps)


def test_blocks_equal_the_formulas_in_plain_loops(target, drafter):
    tokens, lengths, anchors = trunk_and_anchors(target)
    trunk = target.prefill(tokens, lengths)
    with torch.no_grad():
        assert gap_to_plain_loops(drafter, trunk, trunk.taps, anchors) < 2e-5
        changed = trunk.taps.clone()
        changed[0, int(anchors[0, 2]) - 1, 0] += 1  # one element of the last context feature
        assert gap_to_plain_loops(drafter, trunk, changed, anchors) > 1e-3


GRID = [("gqa", variant) for variant in DRAFTERS] + [
    (arch, variant)
    for arch in ("gdn", "qsa")
    for variant in ("dflash", "dspark rnn", "dflash2 sliding, scaled")
]


def decoded_up_to(target, drafter, text, anchor: int) -> tuple:
    """-> the trunk and the drafter's memory of text[:anchor]: prefilled in part, the rest committed
    in rounds of at most two accepted tokens, with rejected junk behind them."""
    W = drafter.config.num_draft_tokens
    start = max(1, anchor - 6)
    trunk = target.prefill(text[:, :start], torch.tensor([start]), room=40)
    memory = drafter.remember(trunk, room=40, bounded=True)
    while trunk.width < anchor:
        count = min(2, anchor - trunk.width)
        at_anchor = trunk.lengths[:, None]
        trunk.tokens.scatter_(1, at_anchor, text.gather(1, at_anchor))
        drafts = torch.randint(0, 20, (1, 1, 1, W))
        if count == 2:
            drafts[..., 0] = text[0, trunk.width + 1]
        known = trunk.tokens[:, : trunk.width + 1]
        tree = build_tree(known, trunk.lengths, at_anchor, drafts, False, True)
        scored = target.score(trunk, tree)
        path = torch.where(torch.arange(W + 1) < count, torch.arange(W + 1), -1)[None]
        width = trunk.width + count
        memory = drafter.extend(memory, scored.taps, trunk.lengths)
        trunk = target.commit(trunk, tree, scored, path)
        trunk.width = memory.width = width
    trunk.tokens.scatter_(1, trunk.lengths[:, None], text[:, anchor : anchor + 1])
    return trunk, memory


@pytest.mark.parametrize("arch, variant", GRID)
def test_blocks_of_training_equal_blocks_of_decoding(arch, variant):
    target = small_target(arch=arch)
    drafter = small_drafter(target, **DRAFTERS[variant])
    tokens, lengths, anchors = trunk_and_anchors(target)
    drafts = torch.randint(0, 20, (3, 5, 1, 4), generator=torch.Generator().manual_seed(9))
    previous = previous_tokens(tokens.gather(1, anchors.clamp(min=0)), drafts)
    hidden = drafter.block(target.prefill(tokens, lengths), anchors)[:, :, None]
    trained = drafter.logits(hidden, previous)
    tolerance = 1e-5 if arch == "gqa" else 5e-5  # taps of hybrid targets agree to 1e-5 alone
    for row, column in (anchors >= 1).nonzero().tolist():
        anchor = int(anchors[row, column])
        trunk, memory = decoded_up_to(target, drafter, tokens[row : row + 1], anchor)
        hidden = drafter.block(trunk, torch.tensor([[anchor]]), memory)[:, :, None]
        served = drafter.logits(hidden, previous[row : row + 1, column : column + 1])[0, 0]
        torch.testing.assert_close(trained[row, column], served, atol=tolerance, rtol=1e-5)
        if "sliding" in variant:  # of sliding layers the window alone is remembered
            assert min(layer.keys_values.shape[1] for layer in memory.layers) == 5 + 4 + 1


def test_the_memory_of_sliding_layers_does_not_grow_with_the_text(target):
    drafter = small_drafter(target, **DRAFTERS["dflash sliding in part"])
    trunk = target.prefill(torch.zeros(1, 300).long(), torch.tensor([300]))
    sizes = [
        [layer.keys_values.shape[1] for layer in drafter.remember(trunk, 100, bounded).layers]
        for bounded in (True, False)
    ]
    assert sizes == [[10, 400], [400, 400]]


def test_blocks_run_in_parts_are_the_same_blocks(target, drafter, monkeypatch):
    tokens, lengths, anchors = trunk_and_anchors(target)
    trunk = target.prefill(tokens, lengths)
    whole = drafter.block(trunk, anchors)
    monkeypatch.setattr("drafter.BLOCKS_AT_ONCE", 2)
    torch.testing.assert_close(drafter.block(trunk, anchors), whole, atol=1e-5, rtol=1e-5)


def test_a_block_sees_nothing_at_or_behind_its_anchor_and_no_other_block(target, drafter):
    tokens, lengths, _ = trunk_and_anchors(target)
    anchors = torch.tensor([[4, 9], [4, 9], [4, 9]])
    trunk = target.prefill(tokens, lengths)
    before = drafter.block(trunk, anchors)
    trunk.taps[:, 4:] += 1.0  # from the first anchor's own position on
    after = drafter.block(trunk, anchors)
    assert torch.equal(before[:, 0], after[:, 0]) and not torch.equal(before[:, 1], after[:, 1])
    moved = drafter.block(trunk, torch.tensor([[4, 7], [4, 8], [4, -1]]))
    assert torch.equal(moved[:, 0], after[:, 0])
    trunk.taps[:, 3] += 1.0  # the last position it does see
    assert not torch.equal(drafter.block(trunk, anchors)[:, 0], after[:, 0])


def test_slot_zero_holds_the_anchor_and_the_others_mask(target, drafter):
    tokens, lengths, anchors = trunk_and_anchors(target)
    trunk = target.prefill(tokens, lengths)
    embedded = []
    target.model.embed_tokens.register_forward_hook(lambda m, args, out: embedded.append(args[0]))
    drafter.block(trunk, anchors)
    blocks = embedded[-1].view(3, 5, -1)
    assert torch.equal(blocks[..., 0], tokens.gather(1, anchors.clamp(min=0)))
    assert (blocks[..., 1:] == drafter.config.mask_token_id).all()


def test_a_trunk_tapped_at_other_layers_is_refused(target):
    drafter = small_drafter(target, target_layer_ids=(1, 2))
    tokens, lengths = random_tokens(1, 4), torch.tensor([4])
    with pytest.raises(ValueError, match="tapped"):
        drafter.block(target.prefill(tokens, lengths), torch.tensor([[2]]))
    drafter.block(target.prefill(tokens, lengths, tap_ids=(1, 2)), torch.tensor([[2]]))


# ------------------------------------------------------------------------------------ q and drawing

SAMPLINGS = [Sampling(1.0), Sampling(0.7, top_k=5), Sampling(1.3, top_p=0.8), Sampling(0.0)]


@pytest.mark.parametrize("variant", DRAFTERS)
def test_q_is_what_is_drawn_from_and_never_holds_mask_or_rows_beyond_the_tokenizer(target, variant):
    drafter = small_drafter(target, **DRAFTERS[variant])
    tokens, lengths, anchors = trunk_and_anchors(target)
    trunk = target.prefill(tokens, lengths)
    for sampling in SAMPLINGS:
        generator = torch.Generator().manual_seed(3)
        proposal = drafter.propose(trunk, anchors, 4, sampling, generator, keep_probs=True)
        q = proposal.probs()
        assert q.shape == (3, 5, 4, 4, target.config.vocab_size)
        assert q.requires_grad == (sampling.temperature > 0)
        torch.testing.assert_close(q, proposal.q_probs.expand_as(q), atol=1e-6, rtol=1e-5)
        assert (q[..., target.num_tokens :] == 0).all()
        assert (q[..., drafter.config.mask_token_id] == 0).all()
        assert (q.gather(-1, proposal.tokens[..., None]) > 0).all()
        torch.testing.assert_close(q.sum(-1), torch.ones(3, 5, 4, 4))
        if drafter.config.kind == "dflash2":
            assert ((q > 0).sum(-1) <= drafter.config.selector_top_k).all()


@pytest.mark.parametrize("variant", ["dflash", "dspark gated", "dspark rnn", "dflash2"])
def test_pairs_of_drafts_are_as_frequent_as_q_says(target, variant):
    """Pearson's chi-square of (y_1, y_2) against q_1(y_1) q_2(y_2 | y_1), rare pairs pooled: above
    df + 6 sqrt(2 df) by chance less than once in 10,000."""
    drafter = small_drafter(target, **DRAFTERS[variant])
    tokens, lengths, anchors = trunk_and_anchors(target)
    trunk, n = target.prefill(tokens, lengths), 20_000
    proposal = drafter.propose(trunk, anchors[:, 1:2], n, Sampling(0.7), torch.Generator())
    q, ids = proposal.probs()[1, 0].double(), proposal.tokens[1, 0]
    V = q.shape[-1]
    second = torch.zeros(V, V, dtype=torch.double)
    second[ids[:, 0]] = q[:, 1]  # the same for every branch of that y_1
    expected = n * (q[0, 0][:, None] * second).flatten()
    counts = torch.bincount(ids[:, 0] * V + ids[:, 1], minlength=V * V).double()
    assert not counts[expected == 0].any()
    often = expected > 5
    rare_count, rare_expected = counts[~often].sum(), expected[~often].sum()
    chi = ((counts - expected)[often].square() / expected[often]).sum()
    chi += (rare_count - rare_expected).square() / rare_expected.clamp(min=1)
    freedom = int(often.sum())
    assert freedom > 20 and chi < freedom + 6 * (2 * freedom) ** 0.5


def test_draw_frequencies_match_the_distribution():
    """Pearson's chi-square with 9 degrees of freedom: above 39.4 by chance once in 100,000."""
    probs = torch.tensor([0.3, 0.0, 0.2, 0.1, 0.1, 0.1, 0.05, 0.05, 0.05, 0.04, 0.01])
    n = 200_000
    tokens = draw(probs, torch.rand(n, generator=torch.Generator().manual_seed(0)))
    counts = torch.bincount(tokens, minlength=11)
    assert counts[1] == 0
    possible = probs > 0
    expected = n * probs[possible]
    assert ((counts[possible] - expected) ** 2 / expected).sum() < 39.4


def test_draw_at_the_edges_never_gives_a_token_of_probability_zero():
    probs = torch.tensor([0.0, 0.3, 0.0, 0.7, 0.0])
    ends = torch.tensor([0.0, 1 - 2**-24])
    assert draw(probs, ends).tolist() == [1, 3]
    assert draw(probs * 1e-20, ends).tolist() == [1, 3]


def test_sampling_filters_are_the_usual_ones():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -9.0])
    full = logits.softmax(-1)
    first_two = full * torch.tensor([1, 1, 0, 0, 0]) / full[:2].sum()
    torch.testing.assert_close(Sampling(1.0, top_k=2).probs(logits), first_two)
    # 0.64 alone does not reach 0.7
    torch.testing.assert_close(Sampling(1.0, top_p=0.7).probs(logits), first_two)
    assert Sampling(0.0).probs(logits).tolist() == [1, 0, 0, 0, 0]
    torch.testing.assert_close(Sampling(2.0).probs(logits), (logits / 2).softmax(-1))


@pytest.mark.parametrize(
    "fields",
    [
        dict(temperature=-1.0),
        dict(temperature=float("nan")),
        dict(top_k=-1),
        dict(top_p=0.0),
        dict(top_p=1.5),
    ],
    ids=str,
)
def test_sampling_without_a_meaning_is_an_error(fields):
    with pytest.raises(ValueError, match=f"needed.*{next(iter(fields))}"):
        Sampling(**fields)


@pytest.mark.parametrize("temperature", [1e-38, 1e-7, 9e-5])
def test_a_temperature_that_makes_logits_infinite_is_an_error(temperature):
    with pytest.raises(ValueError, match="0 is greedy, else at least 0.0001 is needed"):
        Sampling(temperature)


def test_greedy_branches_come_first_and_leave_the_others_as_drawn(target, drafter):
    tokens, lengths, anchors = trunk_and_anchors(target)
    trunk = target.prefill(tokens, lengths)
    uniforms = torch.rand(3, 5, 3, 4, generator=torch.Generator().manual_seed(0))
    drawn = drafter.propose(trunk, anchors, 3, Sampling(), uniforms=uniforms).tokens
    mixed = drafter.propose(trunk, anchors, 3, Sampling(), uniforms=uniforms, num_greedy=1)
    assert torch.equal(mixed.tokens[:, :, 1:], drawn[:, :, 1:])
    assert torch.equal(mixed.tokens[:, :, 0], mixed.probs()[:, :, 0].argmax(-1))


def test_drawing_in_chunks_is_the_same(target, drafter, monkeypatch):
    tokens, lengths, anchors = trunk_and_anchors(target)
    trunk = target.prefill(tokens, lengths)
    uniforms = torch.rand(3, 5, 2, 4, generator=torch.Generator().manual_seed(0))
    whole = drafter.propose(trunk, anchors, 2, Sampling(), uniforms=uniforms).tokens
    monkeypatch.setattr("support.gpu.CHUNK_ELEMENTS", 300)
    assert torch.equal(
        whole, drafter.propose(trunk, anchors, 2, Sampling(), uniforms=uniforms).tokens
    )


def test_a_chunk_takes_a_share_of_a_gpus_memory_up_to_a_bound(monkeypatch):
    gib = 2**30
    sizes = []
    properties = SimpleNamespace()
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: properties)
    for memory in (8 * gib, 16 * gib, 80 * gib, 180 * gib):
        properties.total_memory = memory
        sizes.append(chunk_elements(torch.device("cuda:0")))
        assert sizes[-1] * 4 * 10 <= memory / 8
    assert sizes[1] == pytest.approx(2 * sizes[0], rel=1e-6)
    assert sizes[2:] == [2**27, 2**27]
    assert chunk_elements(torch.device("cpu")) == 2**24


def test_logits_are_masked_in_place_and_their_gradient_is_that_of_a_masked_copy(target, drafter):
    tokens, lengths, anchors = trunk_and_anchors(target)
    hidden = drafter.block(target.prefill(tokens, lengths), anchors).detach().requires_grad_()
    made = []
    hook = target.lm_head.register_forward_hook(lambda m, args, out: made.append(out))
    logits = drafter.unary_logits(hidden)
    hook.remove()
    assert logits.data_ptr() == made[0].data_ptr()
    proposable = drafter.proposable(torch.arange(24))
    copy = target.lm_head(hidden).masked_fill(~proposable, -torch.inf)
    assert torch.equal(logits, copy)
    picked = torch.randint(0, 20, (3, 5, 4, 1), generator=torch.Generator().manual_seed(0))
    for distribution in (torch.softmax, torch.log_softmax):
        grads = [
            torch.autograd.grad(
                distribution(x, -1).gather(-1, picked).sum(), hidden, retain_graph=True
            )[0]
            for x in (logits, copy)
        ]
        assert torch.equal(*grads) and grads[0].abs().sum() > 0


@pytest.mark.parametrize("variant", DRAFTERS)
def test_gradients_reach_every_parameter_of_the_drafter_and_none_of_the_target(target, variant):
    drafter = small_drafter(target, **DRAFTERS[variant])
    tokens, lengths, anchors = trunk_and_anchors(target)
    q = drafter.propose(target.prefill(tokens, lengths), anchors, 2).probs()
    q[..., 0].sum().backward()
    for name, parameter in drafter.named_parameters():
        if not name.startswith("confidence"):
            assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name
    assert all(p.grad is None for p in target.parameters())


def test_fresh_drafters_begin_with_dflashs_backbone_and_dflash2_with_its_drafts(target):
    tokens, lengths, anchors = trunk_and_anchors(target)
    trunk = target.prefill(tokens, lengths)
    plain = Drafter.fresh(target, 2, 5)
    second = Drafter.fresh(target, 2, 5, architecture="DFlash2DraftModel", selector_rank=6)
    hidden = plain.block(trunk, anchors)
    assert torch.equal(second.block(trunk, anchors), hidden)
    assert torch.equal(second.unary_logits(hidden), plain.unary_logits(hidden))
    greedy = [d.propose(trunk, anchors, 1, Sampling(0.0)).tokens for d in (plain, second)]
    assert torch.equal(*greedy)
    q, restricted = (d.propose(trunk, anchors, 1, Sampling(1.0)).probs() for d in (plain, second))
    candidates = torch.zeros_like(q).scatter(-1, q.topk(16, -1).indices, 1.0) * q
    torch.testing.assert_close(restricted, candidates / candidates.sum(-1, keepdim=True))
    spark = Drafter.fresh(target, 2, 4, architecture="Qwen3DSparkModel", markov_rank=6)
    assert all(torch.equal(spark.state_dict()[n], v) for n, v in plain.state_dict().items())
    hidden, previous = spark.block(trunk, anchors)[:, :, None], torch.zeros(3, 5, 2, 4).long()
    unary = spark.unary_logits(hidden).expand(3, 5, 2, 4, -1)
    assert torch.equal(spark.logits(hidden, previous), unary)


def test_a_fresh_drafter_takes_widths_from_its_target_and_changes_nothing_there():
    target = small_target(arch="qsa")
    taps = target.tap_ids
    drafter = small_drafter(target, target_layer_ids=(1, 2))
    assert target.tap_ids == taps and drafter.config.target_layer_ids == (1, 2)
    layers = drafter.config.layers
    assert (layers.hidden_size, layers.head_dim) == (32, 8)
    assert layers.partial_rotary_factor == 1 and not layers.hybrid


def test_labels_outside_the_candidates_are_let_in_for_training_alone(target):
    drafter = small_drafter(target, **DRAFTERS["dflash2"])
    tokens, lengths, anchors = trunk_and_anchors(target)
    hidden = drafter.block(target.prefill(tokens, lengths), anchors)[:, :, None]
    labels = torch.randint(0, 21, (3, 5, 1, 4), generator=torch.Generator().manual_seed(0))
    previous = labels.roll(1, -1)
    served, trained = drafter.logits(hidden, previous), drafter.logits(hidden, previous, labels)
    is_candidate = served.gather(-1, labels[..., None])[..., 0] > -torch.inf
    assert is_candidate.any() and not is_candidate.all()
    assert (trained.gather(-1, labels[..., None]) > -torch.inf).all()
    assert torch.equal(trained[is_candidate], served[is_candidate])
    assert ((trained > -torch.inf).sum(-1) == 5).all()
    share = drafter.coverage(hidden, labels, torch.ones_like(is_candidate))
    torch.testing.assert_close(share, is_candidate.float().mean())


@pytest.mark.parametrize("detached", [True, False])
def test_the_confidence_head_teaches_the_drafter_unless_detached(target, detached):
    drafter = small_drafter(target, **DRAFTERS["dspark vanilla"])
    tokens, lengths, anchors = trunk_and_anchors(target)
    hidden = drafter.block(target.prefill(tokens, lengths), anchors)[:, :, None]
    previous = torch.zeros(3, 5, 2, 4).long()
    drafter.confidence_logits(hidden, previous, detached).sum().backward()
    assert drafter.confidence_head.proj.weight.grad.abs().sum() > 0
    assert (drafter.fc.weight.grad is None) == detached
    assert (drafter.markov_head.markov_w1.weight.grad is None) == detached


# ------------------------------------------------------------------------------------------ folders


def test_a_folder_has_the_public_names(tmp_path, target, drafter):
    drafter.to(torch.bfloat16).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"] and config["model_type"] == "qwen3"
    assert config["block_size"] == 5 and config["num_target_layers"] == 3
    assert config["is_causal"] is False
    assert set(config["dflash_config"]) == {"mask_token_id", "target_layer_ids"}
    tensors = load_file(tmp_path / "model.safetensors")
    layer = {f"self_attn.{n}" for n in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")}
    layer |= {f"mlp.{n}_proj" for n in ("gate", "up", "down")}
    layer |= {"input_layernorm", "post_attention_layernorm"}
    names = {f"layers.{i}.{n}.weight" for i in range(2) for n in layer}
    assert set(tensors) == names | {"fc.weight", "hidden_norm.weight", "norm.weight"}
    assert all(t.dtype == torch.bfloat16 for t in tensors.values())
    assert tensors["fc.weight"].shape == (32, len(target.tap_ids) * 32)


def test_the_taps_of_a_fresh_drafter_increase_for_every_depth():
    for num_layers in range(1, 200):
        taps = default_taps(num_layers)
        assert list(taps) == sorted(set(taps)) and set(taps) <= set(range(num_layers))


def test_a_folder_knows_the_taps_it_was_trained_with(tmp_path, target):
    small_drafter(target, target_layer_ids=(1, 2)).save_pretrained(tmp_path)
    other = small_target()
    loaded = Drafter.from_pretrained(tmp_path, other)
    assert loaded.config.target_layer_ids == (1, 2) and other.tap_ids == target.tap_ids


@pytest.mark.parametrize("number", ["gone", None, 3])
def test_a_folder_counts_the_targets_layers_once_it_was_loaded(tmp_path, target, drafter, number):
    drafter.save_pretrained(tmp_path)
    reconfigure(num_target_layers=number)(tmp_path)
    loaded = Drafter.from_pretrained(tmp_path, target)
    assert loaded.config == drafter.config and loaded.config.num_target_layers == 3


@pytest.mark.parametrize(
    "change, word",
    [
        ({"architectures": ["LlamaForCausalLM"]}, "architectures"),
        ({"hidden_size": 16}, "hidden_size"),
        ({"vocab_size": 99}, "vocab_size"),
        ({"num_target_layers": 7}, "num_target_layers"),
        ({"dflash_config": {"mask_token_id": 24, "target_layer_ids": [1]}}, "mask_token_id 24"),
        ({"dflash_config": {"mask_token_id": 22, "target_layer_ids": [3]}}, "target_layer_ids"),
        (
            {"dflash_config": {"mask_token_id": 22, "target_layer_ids": [1], "block_size": 9}},
            "block_size",
        ),
        ({"dflash_config": {"target_layer_ids": [1]}}, "mask_token_id"),
        ({"dflash_config": {"mask_token_id": 22, "target_layer_ids": 1}}, "target_layer_ids 1"),
        ({"dflash_config": {"mask_token_id": 22, "target_layer_ids": []}}, "target_layer_ids"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": 3}, "layer_types"),
        ({"num_hidden_layers": 3, "layer_types": None}, "layers.2"),
        ({"num_hidden_layers": 1, "layer_types": None}, "layers.1"),
        ({"intermediate_size": 64}, r"\(32, 64\)"),
    ],
)
def test_a_drafter_folder_that_does_not_fit_is_an_error_that_names_it(
    tmp_path, target, drafter, change, word
):
    drafter.save_pretrained(tmp_path)
    reconfigure(**change)(tmp_path)
    with pytest.raises(ValueError, match=word):
        Drafter.from_pretrained(tmp_path, target)


def test_mask_equal_to_a_stop_id_is_an_error(target, drafter):
    class Tokenizer:
        stop_ids, pad_id, text_ids = (22,), 0, {1, 2, 3}

    with pytest.raises(ValueError, match="^the drafter: mask_token_id 22 is a stop or pad"):
        drafter.config.check(target, Tokenizer)
    with pytest.raises(ValueError, match="^there: mask_token_id 22 .*--mask-token-id"):
        drafter.config.check(target, Tokenizer, "there")
    full = small_target()
    full.num_tokens = SMALL["vocab_size"]
    with pytest.raises(ValueError, match="spare row"):
        Drafter.fresh(full)


def test_a_ring_that_is_given_more_than_it_holds_keeps_the_last():
    S, P, start = 24, 200, 5
    positions = start + torch.arange(P)[None]
    new = positions[..., None, None, None].float().expand(1, P, 2, 4, 64)  # many: torch splits it
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        ring = LayerMemory(torch.zeros(1, S, 2, 4, 64), is_ring=True)
        ring.write(new, positions)
    finally:
        torch.set_num_threads(threads)
    wanted = ring.positions(torch.tensor([start + P]))
    assert (ring.keys_values == wanted[..., None, None, None]).all()
