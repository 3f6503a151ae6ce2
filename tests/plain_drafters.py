"""Slow, plain reference of three speculative-decoding drafters: DFlash, DSpark, DFlash 2.

One sequence, one anchor `a`, float64, loops in the order of the formulas. Letters: V vocabulary,
C width, H heads, D head width, b block slots, W drafts per block, T tokens of the sequence.
Embedding and head are always the arrays that the caller passes.
"""

import json
import math

import torch
from safetensors.torch import load_file

KINDS = {
    "DFlashDraftModel": "dflash",
    "DFlash2DraftModel": "dflash2",
    "Qwen3DSparkModel": "dspark",
    "DSparkDraftModel": "dspark",
}
NEVER = -math.inf


def read(folder):
    """A checkpoint folder -> (config dict, {name without a leading `model.`: float64 tensor})."""
    with open(f"{folder}/config.json", encoding="utf-8") as file:
        config = json.load(file)
    stored = load_file(f"{folder}/model.safetensors")
    return config, {name.removeprefix("model."): t.double() for name, t in stored.items()}


def settings(config):
    """All forms of config.json (flat fields, or in a block) -> one flat dict.

    `causal` and `windows` have one entry per layer. Causality: `is_causal` at the top, else
    `causal` in dflash_config, else causal exactly on the layers whose type slides; not on those
    that `use_swa` (in dflash_config, as its `swa_window_size`) alone makes slide. Layers without
    types: those from `max_window_layers` on slide if `use_sliding_window` and there is a window. A
    field that stands in two places with different values is an error; an optional field that is
    absent reads None.
    """
    dflash_config = config.get("dflash_config") or {}
    places = (config, dflash_config, config.get("dspark_config") or {})

    def field(name, default=None):
        values = [place[name] for place in places if place.get(name) is not None]
        if any(value != values[0] for value in values):
            raise ValueError(f"{name}: {values} in several places")
        return values[0] if values else default

    names = """mask_token_id target_layer_ids block_size conv_kernel_size conv_group_size
        selector_rank enable_confidence_head confidence_head_with_markov final_logit_softcapping"""
    cfg = {name: field(name) for name in names.split()}
    defaults = {"markov_rank": 0, "markov_head_type": "vanilla", "selector_top_k": 16}
    defaults |= {"input_embedding_scale": 1.0, "output_multiplier": 1.0}
    cfg |= {name: field(name, value) for name, value in defaults.items()}
    cfg["markov_head_type"] = cfg["markov_head_type"].lower()
    cfg["kind"] = KINDS[config["architectures"][0]]
    cfg["W"] = cfg["block_size"] - (cfg["kind"] != "dspark")
    cfg["layers"], cfg["heads"] = config["num_hidden_layers"], config["num_attention_heads"]
    cfg["kv_heads"] = config.get("num_key_value_heads") or cfg["heads"]
    cfg["head_dim"] = config.get("head_dim") or config["hidden_size"] // cfg["heads"]
    cfg["eps"] = config.get("rms_norm_eps", 1e-6)
    first_sliding = config.get("max_window_layers")
    first_sliding = 28 if first_sliding is None else first_sliding
    if not config.get("use_sliding_window") or config.get("sliding_window") is None:
        first_sliding = cfg["layers"]
    numbers, types = range(cfg["layers"]), config.get("layer_types")
    slides = [types[n] == "sliding_attention" if types else n >= first_sliding for n in numbers]
    by_type, use_swa = slides, dflash_config.get("use_swa")
    if use_swa is False and any(slides):
        raise ValueError("layer_types names sliding layers, use_swa is false")
    if use_swa and not any(slides):
        slides = [True] * cfg["layers"]
    sizes = {field("sliding_window"), dflash_config.get("swa_window_size")} - {None}
    if any(slides) and len(sizes) != 1:
        raise ValueError(f"a sliding layer needs exactly one window size, found {sizes}")
    cfg["windows"] = [min(sizes) if slide else None for slide in slides]
    flags = [config.get("is_causal"), dflash_config.get("causal")]
    flags = [flag for flag in flags if flag is not None]
    cfg["causal"] = [flags[0]] * cfg["layers"] if flags else by_type

    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    form = rope.get("rope_type") or rope.get("type") or "default"
    if form != "default" or rope.get("partial_rotary_factor", 1) != 1:
        raise ValueError(f"only plain full rotary is implemented: {rope}")
    cfg["theta"] = rope["rope_theta"] if "rope_theta" in rope else config["rope_theta"]
    return cfg


def rms_norm(x, weight, eps):
    """x (n,), weight (n,) -> (n,): x / sqrt(mean(x^2) + eps) * weight (never 1 + weight)."""
    return x / torch.sqrt((x * x).mean() + eps) * weight


def rotary(x, position, theta):
    """x (D,) -> (D,): element i turns with i + D/2 by the angle position * theta^(-2i/D)."""
    half = len(x) // 2
    angles = [position * theta ** (-i / half) for i in range(half)]
    angle = torch.tensor(angles, dtype=torch.float64)
    cos, sin = torch.cos(angle), torch.sin(angle)
    first, second = x[:half], x[half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin])


def head_norm_rotary(x, weight, position, cfg):
    """x (heads * D,) -> list of (D,): RMSNorm of each head, then rotary at `position`."""
    width = cfg["head_dim"]
    heads = [x[i : i + width] for i in range(0, len(x), width)]
    return [rotary(rms_norm(h, weight, cfg["eps"]), position, cfg["theta"]) for h in heads]


def convolve(xs, sources, name, side, cfg, tensors):
    """out_t = sum over tau of (base[side, tau] + delta_t[side, tau]) * x_{t - tau}.

    xs: list of b (C,), what is convolved; sources: list of b (C,), the normed sublayer input that
    delta is projected from (for both sides) -> list of b (C,). Before the block: zero.
    kernel_projection's rows: (side, tap, group), group g = channels g*size .. (g+1)*size - 1.
    """
    taps, size = cfg["conv_kernel_size"], cfg["conv_group_size"]
    groups = len(xs[0]) // size
    base = tensors[f"{name}.base_kernel"]  # (2, taps, C)
    projection = tensors[f"{name}.kernel_projection.weight"]  # (2 * taps * groups, C)
    result = []
    for t in range(len(xs)):
        out = torch.zeros_like(xs[t])
        for tau in range(min(taps, t + 1)):
            pieces = []
            for g in range(groups):
                delta = projection[(side * taps + tau) * groups + g] @ sources[t]  # one number
                channels = slice(g * size, (g + 1) * size)
                pieces.append((base[side, tau, channels] + delta) * xs[t - tau][channels])
            out = out + torch.cat(pieces)
        result.append(out)
    return result


def attention(xs, context, a, n, cfg, tensors):
    """Layer n's attention: softmax(q . k / sqrt(D)) v over context and block, then o_proj.

    xs: list of b (C,), normed block (slot j stands at position a + j); context: list of a (C,),
    features as they are (entry j at position j) -> list of b (C,). Queries from the block only; a
    slot at t sees context t - w < j < a and its block (up to itself where the layer is causal).
    """
    name, width = f"layers.{n}.self_attn", cfg["head_dim"]
    wq, wk, wv, wo = (tensors[f"{name}.{p}_proj.weight"] for p in "qkvo")
    q_norm, k_norm = tensors[f"{name}.q_norm.weight"], tensors[f"{name}.k_norm.weight"]
    window, causal = cfg["windows"][n], cfg["causal"][n]

    inputs = context + xs  # index = position, since the context is 0 .. a-1 without gaps
    keys = [head_norm_rotary(wk @ x, k_norm, j, cfg) for j, x in enumerate(inputs)]
    values = [wv @ x for x in inputs]
    result = []
    for slot, x in enumerate(xs):
        t = a + slot
        queries = head_norm_rotary(wq @ x, q_norm, t, cfg)
        seen = [j for j in range(a) if window is None or j > t - window]
        seen += [a + other for other in range(len(xs)) if other <= slot or not causal]
        heads = []
        for h in range(cfg["heads"]):
            kv = h // (cfg["heads"] // cfg["kv_heads"])
            scores = torch.stack([queries[h] @ keys[j][kv] for j in seen]) / math.sqrt(width)
            weights = torch.softmax(scores, 0)
            own = [values[j][kv * width : (kv + 1) * width] for j in seen]
            heads.append(sum(weight * value for weight, value in zip(weights, own, strict=True)))
        result.append(wo @ torch.cat(heads))
    return result


def block_hidden(config, tensors, embed, taps, anchor_token, a):
    """embed (V, C), taps (T, taps * C) -> (W, C): final-normed slots for positions a+1 .. a+W.

    Block = [x_a, MASK, ...] of block_size slots at positions a, a+1, ...; context feature j =
    hidden_norm(fc . taps[j]) for j < a only. DFlash and DFlash 2: slot j >= 1 predicts a + j.
    DSpark: slot j >= 0 predicts a + j + 1.
    """
    cfg = settings(config)
    eps, fc, fc_norm = cfg["eps"], tensors["fc.weight"], tensors["hidden_norm.weight"]
    context = [rms_norm(fc @ taps[j].double(), fc_norm, eps) for j in range(a)]
    tokens = [anchor_token] + [cfg["mask_token_id"]] * (cfg["block_size"] - 1)
    states = [embed[token].double() * cfg["input_embedding_scale"] for token in tokens]
    for n in range(cfg["layers"]):
        for part, norm in (("attention", "input_layernorm"), ("mlp", "post_attention_layernorm")):
            normed = [rms_norm(x, tensors[f"layers.{n}.{norm}.weight"], eps) for x in states]
            conv, xs = f"layers.{n}.{part}_conv", normed
            if cfg["kind"] == "dflash2":
                xs = convolve(xs, normed, conv, 0, cfg, tensors)
            if part == "attention":
                xs = attention(xs, context, a, n, cfg, tensors)
            else:
                gate, up, down = (
                    tensors[f"layers.{n}.mlp.{p}_proj.weight"] for p in ("gate", "up", "down")
                )
                xs = [down @ (torch.nn.functional.silu(gate @ x) * (up @ x)) for x in xs]
            if cfg["kind"] == "dflash2":
                xs = convolve(xs, normed, conv, 1, cfg, tensors)
            states = [state + x for state, x in zip(states, xs, strict=True)]
    finals = [rms_norm(x, tensors["norm.weight"], eps) for x in states]
    return torch.stack(finals if cfg["kind"] == "dspark" else finals[1:])


def allowed(vocab_size, mask_token_id, num_tokens):
    """-> V booleans: the ids q may hold, all but MASK and ids >= num_tokens (None: no limit).

    Applied last in unary_logits and in dspark_logits (a cap or an added bias must not lift a
    forbidden id off -inf), but FIRST in dflash2_scores, before its top-k: the candidates must be
    proposable, and a forbidden id must not use up one of the places.
    """
    limit = vocab_size if num_tokens is None else num_tokens
    return [i != mask_token_id and i < limit for i in range(vocab_size)]


def forbid(logits, cfg, num_tokens):
    """logits (W, V) -> (W, V): -inf where `allowed` is false."""
    keep = torch.tensor(allowed(logits.shape[1], cfg["mask_token_id"], num_tokens))
    return torch.where(keep, logits, torch.full_like(logits, NEVER))


def product(rows, x):
    """rows (V, n), x (n,) -> (V,): one dot product a row, summed alike (equal rows tie exactly)."""
    return (rows.double() * x.double()).sum(1)


def unary_logits(config, head, hidden, num_tokens=None):
    """head (V, C), hidden (W, C) -> (W, V): z = output_multiplier * head h; cap * tanh(z / cap).

    DFlash 2 chooses its candidates by the bare product, and scores them from here.
    """
    cfg = settings(config)
    logits = torch.stack([product(head, h) for h in hidden]) * cfg["output_multiplier"]
    cap = cfg["final_logit_softcapping"]
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    return forbid(logits, cfg, num_tokens)


def dspark_logits(config, tensors, head, hidden, anchor_token, drafts, num_tokens=None):
    """hidden (W, C), drafts y_1 .. y_W -> (W, V): head h_k plus the sequential head's term.

    e_k = W1[y_{k-1}], y_0 = x_a. vanilla: W2 e_k. gated: W2(sigmoid(gate_proj[h_k; e_k]) * e_k).
    rnn: (g, c, o) = joint_proj[s; e_k; h_k], term W2 tanh(o), then s <- sigmoid(g) s +
    (1 - sigmoid(g)) tanh(c), s = 0 at k = 1. markov_rank 0: no term.
    """
    cfg = settings(config)
    rank, form = cfg["markov_rank"], cfg["markov_head_type"]
    plain = unary_logits(config, head, hidden)
    if rank == 0:
        return forbid(plain, cfg, num_tokens)
    part = {name.removeprefix("markov_head."): t for name, t in tensors.items()}
    w1, w2 = part["markov_w1.weight"], part["markov_w2.weight"]
    state = torch.zeros(rank).double()
    rows = []
    history = [anchor_token, *drafts[:-1]]
    for k, (h, previous) in enumerate(zip(hidden.double(), history, strict=True)):
        e = w1[previous]
        if form == "vanilla":
            term = e
        elif form == "gated":
            gate = part["gate_proj.weight"] @ torch.cat([h, e]) + part["gate_proj.bias"]
            term = torch.sigmoid(gate) * e
        elif form == "rnn":
            joint = part["joint_proj.weight"] @ torch.cat([state, e, h])
            g, c, o = (joint + part["joint_proj.bias"]).split(rank)
            state = torch.sigmoid(g) * state + (1 - torch.sigmoid(g)) * torch.tanh(c)
            term = torch.tanh(o)
        else:
            raise ValueError(f"markov_head_type {form}")
        rows.append(plain[k] + product(w2, term))
    return forbid(torch.stack(rows), cfg, num_tokens)


def dspark_confidence(config, tensors, hidden, anchor_token, drafts):
    """hidden (W, C), drafts -> (W,): sigmoid(proj[h_k; e_k] + bias), or of h_k alone."""
    cfg = settings(config)
    weight, bias = (tensors[f"confidence_head.proj.{p}"] for p in ("weight", "bias"))
    result = []
    for h, previous in zip(hidden.double(), [anchor_token, *drafts[:-1]], strict=True):
        x = h
        if cfg["confidence_head_with_markov"] and cfg["markov_rank"] > 0:
            x = torch.cat([h, tensors["markov_head.markov_w1.weight"][previous]])
        result.append(torch.sigmoid(weight[0] @ x + bias[0]))
    return torch.stack(result)


def dflash2_scores(config, tensors, head, hidden, anchor_token, drafts, num_tokens=None):
    """hidden (W, C), drafts -> W pairs (candidate ids, scores (top_k,)), best unary logit first.

    Candidates = the top_k of the bare product head h_t (before output_multiplier and softcap) among
    the allowed ids (equal logits: lower id first); score(c) = U_t(c) +
    <pred[y_{t-1}] * proj(h_t), succ[c]>, U_t the finished logits, y_0 = x_a.
    """
    cfg = settings(config)
    names = ("predecessor_codebook", "successor_codebook", "hidden_projection")
    named = {name.removesuffix(".weight"): tensor for name, tensor in tensors.items()}
    pred, succ, proj = (named[f"candidate_selector.{name}"] for name in names)
    keep = allowed(len(head), cfg["mask_token_id"], num_tokens)
    result, finished = [], unary_logits(config, head, hidden)
    history = [anchor_token, *drafts[:-1]]
    for h, full, previous in zip(hidden.double(), finished, history, strict=True):
        unary = product(head, h)
        ranked = sorted((-u, i) for i, u in enumerate(unary.tolist()) if keep[i])
        ids = [i for _, i in ranked[: cfg["selector_top_k"]]]
        edge = pred[previous] * (proj @ h)
        result.append((ids, torch.stack([full[c] + edge @ succ[c] for c in ids])))
    return result


def distribution(config, tensors, head, hidden, anchor_token, drafts, temperature, num_tokens=None):
    """-> (W, V): q_k given x_a, y_1 .. y_{k-1}: softmax(logits_k / temperature).

    Temperature 0: one-hot on the argmax, the lowest id of equal ones. DFlash 2: on the scores of
    the candidates, zero elsewhere. Forbidden ids hold exactly zero for every kind.
    """
    kind = settings(config)["kind"]
    if kind == "dflash":
        logits = unary_logits(config, head, hidden, num_tokens)
    elif kind == "dspark":
        logits = dspark_logits(config, tensors, head, hidden, anchor_token, drafts, num_tokens)
    else:
        logits = torch.full((len(hidden), len(head)), NEVER).double()
        pairs = dflash2_scores(config, tensors, head, hidden, anchor_token, drafts, num_tokens)
        for k, (ids, scores) in enumerate(pairs):
            logits = logits.index_put((torch.tensor(k), torch.tensor(ids)), scores)
    if temperature > 0:
        return torch.stack([torch.softmax(row / temperature, 0) for row in logits])
    result = torch.zeros(logits.shape).double()
    for k, row in enumerate(logits.tolist()):
        result[k, row.index(max(row))] = 1  # index finds the first, the lowest id
    return result
