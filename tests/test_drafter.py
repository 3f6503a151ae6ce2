"""What DFlash computes, and that training and decoding compute the same. `pytest
tests/test_drafter.py`"""

import json

import pytest
import torch
from conftest import DRAFTERS, SMALL, small_drafter, small_target
from safetensors.torch import load_file

from drafter import Drafter, Sampling, draw, history
from model import rotary, rotate
from tree import build_tree


def case(target, B=3, T=20, A=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, target.num_tokens, (B, T), generator=generator)
    lengths = torch.tensor([T, T - 7, T - 3])[:B]
    anchors = torch.stack(
        [torch.randperm(int(n), generator=generator)[:A].sort().values for n in lengths]
    )
    anchors[0, 0], anchors[-1, -1] = 0, -1  # no context at all, and no anchor at all
    return tokens, lengths, anchors


def by_hand(drafter, taps, token, anchor):
    """One block in plain loops from the method's formulas: taps (T, taps*C) -> logits (W, V)."""
    config, weights = drafter.config.layers, drafter.state_dict()
    D, b = config.head_dim, drafter.config.block_size

    def norm(x, name):
        return x / (x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * weights[name]

    features = norm(taps[:anchor] @ weights["fc.weight"].T, "hidden_norm.weight")
    embedding = drafter.target.model.embed_tokens.weight
    x = embedding[torch.tensor([token] + [drafter.config.mask_token_id] * (b - 1))]
    for i in range(config.num_hidden_layers):
        pre = f"layers.{i}."
        h = norm(x, pre + "input_layernorm.weight")
        source = torch.cat([features, h])
        out = []
        for slot in range(b):
            q = (h[slot] @ weights[pre + "self_attn.q_proj.weight"].T).view(-1, D)
            q = norm(q, pre + "self_attn.q_norm.weight")
            heads = []
            for head in range(config.num_attention_heads):
                kv = head // (config.num_attention_heads // config.num_key_value_heads)
                scores, values = [], []
                # context at its position, block behind the anchor
                for j, feature in enumerate(source):
                    k = (feature @ weights[pre + "self_attn.k_proj.weight"].T).view(-1, D)[kv]
                    k = norm(k, pre + "self_attn.k_norm.weight")
                    turned = [
                        rotate(
                            v[None, None, None], rotary(torch.tensor([[p]]), D, config.rope_theta)
                        )[0, 0, 0]
                        for v, p in ((q[head], anchor + slot), (k, j if j < anchor else j))
                    ]
                    scores.append(turned[0] @ turned[1] / D**0.5)
                    values.append(
                        (feature @ weights[pre + "self_attn.v_proj.weight"].T).view(-1, D)[kv]
                    )
                heads.append(torch.stack(scores).softmax(0) @ torch.stack(values))
            out.append(torch.cat(heads) @ weights[pre + "self_attn.o_proj.weight"].T)
        x = x + torch.stack(out)
        h = norm(x, pre + "post_attention_layernorm.weight")
        gate, up, down = (weights[pre + f"mlp.{n}_proj.weight"] for n in ("gate", "up", "down"))
        x = x + (torch.nn.functional.silu(h @ gate.T) * (h @ up.T)) @ down.T
    return norm(x, "norm.weight")[1:] @ drafter.target.lm_head.weight.T


def test_blocks_equal_the_formulas_in_plain_loops(target, drafter):
    tokens, lengths, anchors = case(target)
    trunk = target.prefill(tokens, lengths)
    logits = drafter.logits(drafter.block(trunk, anchors))
    for row, column in [(0, 0), (0, 2), (1, 4), (2, 1)]:
        anchor = int(anchors[row, column])
        slow = by_hand(drafter, trunk.taps[row], int(tokens[row, anchor]), anchor)
        allowed = logits[row, column] > -torch.inf
        torch.testing.assert_close(
            logits[row, column][allowed], slow[allowed], atol=1e-5, rtol=1e-5
        )


GRID = [("gqa", variant) for variant in DRAFTERS] + [
    (arch, variant)
    for arch in ("gdn", "qsa")
    for variant in ("dflash", "dspark rnn", "dflash2 sliding, scaled")
]


@pytest.mark.parametrize("arch, variant", GRID)
def test_training_blocks_equal_decoding_steps(arch, variant):
    """Decoding: text prefilled in part, the rest committed in rounds, features remembered as it
    goes, of sliding layers the window alone."""
    target = small_target(arch=arch)
    drafter = small_drafter(target, **DRAFTERS[variant])
    tokens, lengths, anchors = case(target)
    drafts = torch.randint(0, 20, (3, 5, 1, 4), generator=torch.Generator().manual_seed(9))
    before = history(tokens.gather(1, anchors.clamp(min=0)), drafts)
    hidden = drafter.block(target.prefill(tokens, lengths), anchors)[:, :, None]
    trained = drafter.logits(hidden, before)
    W = drafter.config.num_draft_tokens
    for row in range(3):
        for column, anchor in enumerate(anchors[row].tolist()):
            if anchor < 1:
                continue
            first = max(1, anchor - 6)
            text = tokens[row : row + 1]
            trunk = target.prefill(text[:, :first], torch.tensor([first]), room=40)
            memory = drafter.remember(trunk, room=40, bounded=True)
            # rounds of two accepted tokens and rejected junk behind them
            while trunk.width < anchor:
                count = min(2, anchor - trunk.width)
                at_anchor = trunk.lengths[:, None]
                trunk.tokens.scatter_(1, at_anchor, text.gather(1, at_anchor))
                drafts = torch.randint(0, 20, (1, 1, 1, W))
                if count == 2:
                    drafts[..., 0] = text[0, trunk.width + 1]
                upto = trunk.tokens[:, : trunk.width + 1]
                tree = build_tree(upto, trunk.lengths, at_anchor, drafts, False, True)
                scored = target.score(trunk, tree)
                path = torch.where(torch.arange(W + 1) < count, torch.arange(W + 1), -1)[None]
                width = trunk.width + count
                memory = drafter.extend(memory, scored.taps, trunk.lengths)
                trunk = target.commit(trunk, tree, scored, path)
                trunk.width = memory.width = width
            trunk.tokens.scatter_(1, trunk.lengths[:, None], text[:, anchor : anchor + 1])
            served = drafter.block(trunk, torch.tensor([[anchor]]), memory)[:, :, None]
            served = drafter.logits(served, before[row : row + 1, column : column + 1])[0, 0]
            close = 1e-5 if arch == "gqa" else 5e-5  # taps of hybrid targets agree to 1e-5 alone
            torch.testing.assert_close(trained[row, column], served, atol=close, rtol=1e-5)
            if "sliding" in variant:
                assert min(state.shape[1] for state in memory.states) == 5 + W + 1


def test_the_memory_of_sliding_layers_does_not_grow_with_the_text(target):
    drafter = small_drafter(target, **DRAFTERS["dflash sliding in part"])
    trunk = target.prefill(torch.zeros(1, 300).long(), torch.tensor([300]))
    sliding, full = drafter.remember(trunk, 100, bounded=True).states
    assert sliding.shape[1] == 10 and full.shape[1] == 400
    assert all(s.shape[1] == 400 for s in drafter.remember(trunk, 100).states)


def test_blocks_run_in_parts_are_the_same_blocks(target, drafter, monkeypatch):
    tokens, lengths, anchors = case(target)
    trunk = target.prefill(tokens, lengths)
    whole = drafter.block(trunk, anchors)
    monkeypatch.setattr("drafter.ANCHORS", 2)
    torch.testing.assert_close(drafter.block(trunk, anchors), whole, atol=1e-5, rtol=1e-5)


def test_a_block_sees_nothing_at_or_behind_its_anchor_and_no_other_block(target, drafter):
    tokens, lengths, _ = case(target)
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
    tokens, lengths, anchors = case(target)
    trunk = target.prefill(tokens, lengths)
    seen = []
    target.model.embed_tokens.register_forward_hook(lambda m, args, out: seen.append(args[0]))
    drafter.block(trunk, anchors)
    blocks = seen[-1].view(3, 5, -1)
    assert torch.equal(blocks[..., 0], tokens.gather(1, anchors.clamp(min=0)))
    assert (blocks[..., 1:] == drafter.config.mask_token_id).all()


@pytest.mark.parametrize("variant", list(DRAFTERS))
def test_q_is_what_is_drawn_from_and_never_holds_mask_or_rows_beyond_the_tokenizer(target, variant):
    drafter = small_drafter(target, **DRAFTERS[variant])
    tokens, lengths, anchors = case(target)
    trunk = target.prefill(tokens, lengths)
    for sampling in (
        Sampling(1.0),
        Sampling(0.7, top_k=5),
        Sampling(1.3, top_p=0.8),
        Sampling(0.0),
    ):
        generator = torch.Generator().manual_seed(3)
        proposal = drafter.propose(trunk, anchors, 4, sampling, generator, keep_probs=True)
        q = proposal.probs()
        assert q.shape == (3, 5, 4, 4, target.config.vocab_size) and q.requires_grad == (
            sampling.temperature > 0
        )
        torch.testing.assert_close(q, proposal.q_probs.expand_as(q), atol=1e-6, rtol=1e-5)
        assert (q[..., target.num_tokens :] == 0).all() and (
            q[..., drafter.config.mask_token_id] == 0
        ).all()
        assert (q.gather(-1, proposal.tokens[..., None]) > 0).all()
        torch.testing.assert_close(q.sum(-1), torch.ones(3, 5, 4, 4))
        if drafter.config.kind == "dflash2":
            assert ((q > 0).sum(-1) <= drafter.config.selector_top_k).all()


@pytest.mark.parametrize("variant", ["dflash", "dspark gated", "dspark rnn", "dflash2"])
def test_pairs_of_drafts_are_as_frequent_as_q_says(target, variant):
    """Pearson's chi-square of (y_1, y_2) against q_1(y_1) q_2(y_2 | y_1), rare pairs pooled: above
    df + 6 sqrt(2 df) by chance less than once in 10,000."""
    drafter = small_drafter(target, **DRAFTERS[variant])
    tokens, lengths, anchors = case(target)
    trunk, n = target.prefill(tokens, lengths), 20_000
    drawn = drafter.propose(trunk, anchors[:, 1:2], n, Sampling(0.7), torch.Generator())
    q, ids = drawn.probs()[1, 0].double(), drawn.tokens[1, 0]
    V = q.shape[-1]
    second = torch.zeros(V, V, dtype=torch.double)
    second[ids[:, 0]] = q[:, 1]  # the same for every branch of that y_1
    expected = n * (q[0, 0][:, None] * second).flatten()
    counts = torch.bincount(ids[:, 0] * V + ids[:, 1], minlength=V * V).double()
    assert not counts[expected == 0].any()
    often = expected > 5
    rest = torch.stack([counts[~often].sum(), expected[~often].sum()])
    chi = ((counts - expected)[often].square() / expected[often]).sum() + (
        (rest[0] - rest[1]).square() / rest[1].clamp(min=1)
    )
    freedom = int(often.sum())
    assert freedom > 20 and chi < freedom + 6 * (2 * freedom) ** 0.5


def test_draw_frequencies_match_the_distribution():
    """Pearson's chi-square with 9 degrees of freedom: above 39.4 by chance once in 100,000."""
    probs = torch.tensor([0.3, 0.0, 0.2, 0.1, 0.1, 0.1, 0.05, 0.05, 0.05, 0.04, 0.01])
    n = 200_000
    tokens = draw(probs, torch.rand(n, generator=torch.Generator().manual_seed(0)))
    counts = torch.bincount(tokens, minlength=11)
    assert counts[1] == 0
    kept = probs > 0
    assert ((counts[kept] - n * probs[kept]) ** 2 / (n * probs[kept])).sum() < 39.4


def test_draw_at_the_edges_never_gives_a_token_of_probability_zero():
    probs = torch.tensor([0.0, 0.3, 0.0, 0.7, 0.0])
    ends = torch.tensor([0.0, 1 - 2**-24])
    assert draw(probs, ends).tolist() == [1, 3]
    assert draw(probs * 1e-20, ends).tolist() == [1, 3]


def test_sampling_filters_are_the_usual_ones():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -9.0])
    full = logits.softmax(-1)
    torch.testing.assert_close(
        Sampling(1.0, top_k=2).probs(logits), full * torch.tensor([1, 1, 0, 0, 0]) / full[:2].sum()
    )
    kept = Sampling(1.0, top_p=0.7).probs(logits)  # 0.64 alone does not reach 0.7
    torch.testing.assert_close(kept, full * torch.tensor([1, 1, 0, 0, 0]) / full[:2].sum())
    assert Sampling(0.0).probs(logits).tolist() == [1, 0, 0, 0, 0]
    torch.testing.assert_close(Sampling(2.0).probs(logits), (logits / 2).softmax(-1))
    for bad in (dict(temperature=-1.0), dict(top_k=-1), dict(top_p=0.0), dict(top_p=1.5)):
        with pytest.raises(ValueError, match="needed"):
            Sampling(**bad)


def test_greedy_branches_come_first_and_leave_the_others_as_drawn(target, drafter):
    tokens, lengths, anchors = case(target)
    trunk = target.prefill(tokens, lengths)
    u = torch.rand(3, 5, 3, 4, generator=torch.Generator().manual_seed(0))
    drawn = drafter.propose(trunk, anchors, 3, Sampling(), u).tokens
    mixed = drafter.propose(trunk, anchors, 3, Sampling(), u, num_greedy=1)
    assert torch.equal(mixed.tokens[:, :, 1:], drawn[:, :, 1:])
    assert torch.equal(mixed.tokens[:, :, 0], mixed.probs()[:, :, 0].argmax(-1))


def test_drawing_in_chunks_is_the_same(target, drafter, monkeypatch):
    tokens, lengths, anchors = case(target)
    trunk = target.prefill(tokens, lengths)
    u = torch.rand(3, 5, 2, 4, generator=torch.Generator().manual_seed(0))
    whole = drafter.propose(trunk, anchors, 2, Sampling(), u).tokens
    monkeypatch.setattr("drafter.DRAW_ELEMENTS", 300)
    assert torch.equal(whole, drafter.propose(trunk, anchors, 2, Sampling(), u).tokens)


@pytest.mark.parametrize("variant", list(DRAFTERS))
def test_gradients_reach_every_parameter_of_the_drafter_and_none_of_the_target(target, variant):
    drafter = small_drafter(target, **DRAFTERS[variant])
    tokens, lengths, anchors = case(target)
    q = drafter.propose(target.prefill(tokens, lengths), anchors, 2).probs()
    q[..., 0].sum().backward()
    own = {n: p for n, p in drafter.named_parameters() if not n.startswith("confidence")}
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in own.values())
    assert all(p.grad is None for p in target.parameters())


def test_fresh_drafters_begin_with_dflashs_backbone_and_dflash2_with_its_drafts(target):
    tokens, lengths, anchors = case(target)
    trunk = target.prefill(tokens, lengths)
    plain = Drafter.fresh(target, 2, 5)
    second = Drafter.fresh(target, 2, 5, architecture="DFlash2DraftModel", selector_rank=6)
    hidden = plain.block(trunk, anchors)
    assert torch.equal(second.block(trunk, anchors), hidden)
    assert torch.equal(second.unary(hidden), plain.unary(hidden))
    greedy = [d.propose(trunk, anchors, 1, Sampling(0.0)) for d in (plain, second)]
    assert torch.equal(greedy[0].tokens, greedy[1].tokens)
    q, restricted = (d.propose(trunk, anchors, 1, Sampling(1.0)).probs() for d in (plain, second))
    kept = torch.zeros_like(q).scatter(-1, q.topk(16, -1).indices, 1.0) * q
    torch.testing.assert_close(restricted, kept / kept.sum(-1, keepdim=True))
    spark = Drafter.fresh(target, 2, 4, architecture="Qwen3DSparkModel", markov_rank=6)
    assert all(torch.equal(spark.state_dict()[n], v) for n, v in plain.state_dict().items())
    hidden, before = spark.block(trunk, anchors)[:, :, None], torch.zeros(3, 5, 2, 4).long()
    assert torch.equal(spark.logits(hidden, before), spark.unary(hidden).expand(3, 5, 2, 4, -1))


def test_labels_outside_the_candidates_are_let_in_for_training_alone(target):
    drafter = small_drafter(target, **DRAFTERS["dflash2"])
    tokens, lengths, anchors = case(target)
    hidden = drafter.block(target.prefill(tokens, lengths), anchors)[:, :, None]
    labels = torch.randint(0, 21, (3, 5, 1, 4), generator=torch.Generator().manual_seed(0))
    before = labels.roll(1, -1)
    served, trained = drafter.logits(hidden, before), drafter.logits(hidden, before, labels)
    among = served.gather(-1, labels[..., None])[..., 0] > -torch.inf
    assert among.any() and not among.all()
    assert (trained.gather(-1, labels[..., None]) > -torch.inf).all()
    assert torch.equal(trained[among], served[among])
    assert ((trained > -torch.inf).sum(-1) == 5).all()
    share = drafter.coverage(hidden, labels, torch.ones_like(among))
    torch.testing.assert_close(share, among.float().mean())


def test_the_confidence_head_teaches_the_drafter_unless_detached(target):
    drafter = small_drafter(target, **DRAFTERS["dspark vanilla"])
    tokens, lengths, anchors = case(target)
    hidden = drafter.block(target.prefill(tokens, lengths), anchors)[:, :, None]
    for detached in (True, False):
        drafter.zero_grad()
        sure = drafter.confidence(hidden, torch.zeros(3, 5, 2, 4).long(), detached)
        sure.sum().backward(retain_graph=True)
        assert drafter.confidence_head.proj.weight.grad.abs().sum() > 0
        assert (drafter.fc.weight.grad is None) == detached
        assert (drafter.markov_head.markov_w1.weight.grad is None) == detached


# ------------------------------------------------------------------------------------------ folders


def test_folder_has_the_public_names(tmp_path, target, drafter):
    drafter.to(torch.bfloat16).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"] and config["model_type"] == "qwen3"
    assert (
        config["block_size"] == 5
        and config["is_causal"] is False
        and config["num_target_layers"] == 3
    )
    assert set(config["dflash_config"]) == {"mask_token_id", "target_layer_ids"}
    found = load_file(tmp_path / "model.safetensors")
    layer = {f"self_attn.{n}" for n in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")}
    layer |= {f"mlp.{n}_proj" for n in ("gate", "up", "down")} | {
        "input_layernorm",
        "post_attention_layernorm",
    }
    names = {f"layers.{i}.{n}.weight" for i in range(2) for n in layer}
    assert set(found) == names | {"fc.weight", "hidden_norm.weight", "norm.weight"}
    assert all(t.dtype == torch.bfloat16 for t in found.values())
    assert found["fc.weight"].shape == (32, len(target.tap_ids) * 32)


def test_loading_sets_the_taps_it_was_trained_with(tmp_path, target):
    target.tap_ids = (1, 2)
    small_drafter(target).save_pretrained(tmp_path)
    other = small_target()
    stale = other.prefill(torch.zeros(1, 4).long(), torch.tensor([4]))
    loaded = Drafter.from_pretrained(tmp_path, other)
    assert other.tap_ids == (1, 2)
    with pytest.raises(ValueError, match="tapped"):
        loaded.block(stale, torch.tensor([[2]]))


def test_a_folder_that_does_not_count_the_targets_layers_loads(tmp_path, target, drafter):
    drafter.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["num_target_layers"]
    path.write_text(json.dumps(config))
    assert Drafter.from_pretrained(tmp_path, target).config.num_target_layers is None


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
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=word):
        Drafter.from_pretrained(tmp_path, target)


def test_mask_equal_to_a_stop_id_is_an_error(target, drafter):
    class Tokenizer:
        stop_ids, pad_id, text_ids = (22,), 0, {1, 2, 3}

    with pytest.raises(ValueError, match="stop or pad"):
        drafter.config.check(target, Tokenizer)
    full = small_target()
    full.num_tokens = SMALL["vocab_size"]
    with pytest.raises(ValueError, match="spare row"):
        Drafter.fresh(full)
