"""The page of `python -m lab trace` holds the run's own numbers: every p, q and verdict is computed
again from the target on the text alone. `pytest tests/lab/test_trace.py`"""

import copy
import json
import re
from dataclasses import replace

import pytest
import torch

from browser import page_data
from drafter import GREEDY, PLAIN, Drafter, Sampling, draw
from hf import load_tokenizer
from lab import trace
from lab.trace import TEMPLATE, Config, Trace, page, piece, step_data
from serve import generate, lesson_models
from small import SPARK, small_drafter, small_target
from support.toy import write_byte_tokenizer
from target import Target

NEAR = dict(abs=1e-5, rel=1e-4)
PROMPT = "a </script> b"  # which must not end the script that holds the data


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A target with folders of two drafters: slots that know no tokens, and slots that do."""
    root = tmp_path_factory.mktemp("models")
    target = small_target(vocab_size=264, max_position_embeddings=300)
    target.num_tokens = 258
    write_byte_tokenizer(root / "target")
    target.save_pretrained(root / "target", eos_token_id=256, pad_token_id=257)
    small_drafter(target).save_pretrained(root / "dflash")
    small_drafter(target, **SPARK).save_pretrained(root / "dspark")
    small_drafter(target, block_size=16).save_pretrained(root / "long")
    return root


def q_alone(drafter, text: list, drafts: list):
    """q's logits (W,V) of a block after the text, from a prefill of it."""
    tokens = torch.tensor([text])
    trunk = drafter.target.prefill(
        tokens, torch.tensor([len(text)]), tap_ids=drafter.config.target_layer_ids
    )
    hidden = drafter.block(trunk, torch.tensor([[len(text) - 1]]))[:, 0]  # (1, W, C)
    W = hidden.shape[1]
    previous = [text[-1], *drafts, *[0] * W][:W]
    return drafter.logits(hidden, torch.tensor([previous]))[0]


def check_slot(slot: dict, p, q) -> None:
    y = slot["y"]
    assert slot["p"] == pytest.approx(p[y].item(), **NEAR)
    assert slot["q"] == pytest.approx(q[y].item(), **NEAR)
    assert slot["chance"] == pytest.approx(min(1, (p[y] / q[y]).item()), abs=1e-4)
    assert slot["alpha"] == pytest.approx(torch.minimum(p, q).sum().item(), **NEAR)
    check_likeliest(slot["likeliest"], p, q)


def check_likeliest(rows: list, *distributions) -> None:
    for column, probs in enumerate(distributions, 1):
        values = sorted((row[column] for row in rows), reverse=True)
        assert values[:5] == pytest.approx(probs.topk(5).values.tolist(), **NEAR)
        shown = [row[column] for row in rows]
        assert shown == pytest.approx([probs[row[0]].item() for row in rows], **NEAR)


@torch.inference_mode()
def check_decoding(data: dict, target, drafter, text: list, sampling, seed: int, limit: int):
    """Go through the rounds, one slot after another, as algorithm 1 says."""
    is_greedy = sampling.temperature == 0
    shown = PLAIN if is_greedy else sampling
    W = drafter.config.num_draft_tokens
    generator = torch.Generator().manual_seed(seed * 1_000_003)
    noise = torch.rand(limit, 2 * W + 1, generator=generator)
    text = [*text, data["first"]]
    for number, row in enumerate(data["rounds"], 1):
        drafts = [slot["y"] for slot in row["slots"]]
        q = shown.probs(q_alone(drafter, text, drafts))
        p = shown.probs(target(torch.tensor([text + drafts]))[0, len(text) - 1 :])
        assert row["anchor"] == len(text) - 1
        accepted = []
        for k, slot in enumerate(row["slots"]):
            check_slot(slot, p[k], q[k])
            if is_greedy:
                accepted.append(drafts[k] == p[k].argmax())
            else:
                assert slot["u"] == pytest.approx(noise[number, W + k].item(), **NEAR)
                accepted.append(slot["u"] < slot["chance"])
        count = [*accepted, False].index(False)
        assert row["accepted"] == count
        own, rest = row["own"], p[count]
        if is_greedy:
            assert own["from"] == "argmax" and own["y"] == rest.argmax()
        else:
            assert own["from"] == ("p" if count == len(drafts) else "residual")
            if count < len(drafts):
                rest = (rest - q[count]).clamp(min=0)
                rest = rest / rest.sum()
            assert own["u"] == pytest.approx(noise[number, -1].item(), **NEAR)
            assert own["y"] == draw(rest, noise[number, -1:]).item()
        check_likeliest(own["likeliest"], rest)
        text += [*drafts[:count], own["y"]]


def traced(lab, models, drafter: str, *flags) -> dict:
    pair = ("--target", models / "target", "--drafter", models / drafter, "--prompt", PROMPT)
    code, said, error = lab("trace", *pair, "--out", models / "page.html", *flags)
    assert code == 0 and "page.html" in said, error
    return page_data(models / "page.html")


def opened(models, name: str) -> tuple:
    target = Target.from_pretrained(models / "target")
    prompt = load_tokenizer(models / "target").encode(PROMPT)
    return target, Drafter.from_pretrained(models / name, target, torch.float32), prompt


RUNS = {  # drafter, temperature, top-k, drafts a round
    "drawn": ("dflash", 1.0, 0, 0),
    "greedy": ("dflash", 0.0, 0, 0),
    "likeliest alone": ("dflash", 0.7, 40, 2),
    "slots that know tokens": ("dspark", 1.3, 0, 0),
}


@pytest.mark.parametrize("case", RUNS)
def test_a_decoding_page_has_the_numbers_of_the_run(lab, models, case):
    name, temperature, top_k, length = RUNS[case]
    flags = ["--temperature", temperature, "--max-new-tokens", 40, "--draft-length", length]
    data = traced(lab, models, name, *flags, *(["--top-k", top_k] if top_k else []))
    target, drafter, prompt = opened(models, name)
    sampling = Sampling(temperature, top_k)
    check_decoding(data, target, drafter, prompt, sampling, seed=3, limit=40)
    (result,) = generate(
        target, drafter, [prompt], 40, sampling, 3, (256,), draft_length=length
    )  # nobody watches
    text, rounds = [data["first"]], data["rounds"]
    for row in rounds:
        drafts = [slot["y"] for slot in row["slots"]][: row["accepted"]]
        text += [*drafts, row["own"]["y"]][: row["shown"]]
    assert text == result.tokens and data["finish"] == result.finish_reason
    assert sum(row["committed"] for row in rounds) == result.num_committed
    assert len(rounds) == result.num_rounds and data["prompt"] == PROMPT
    if case != "greedy":
        assert {row["own"]["from"] for row in rounds} >= {"residual"}


@pytest.mark.parametrize("sampling", [GREEDY, PLAIN], ids=["greedy", "drawn"])
def test_a_watcher_records_the_drafts_that_are_accepted_too(sampling):
    """With twelve ids many drafts are accepted; some rounds accept all three."""
    target, drafter = lesson_models()
    watcher = Trace(target, sampling)
    (result,) = generate(target, drafter, [[1, 2, 3]], 60, sampling, 3, watch=watcher)
    watcher.finish(result)
    data = {"first": result.tokens[0], "rounds": watcher.rounds}
    check_decoding(data, target, drafter, [1, 2, 3], sampling, seed=3, limit=60)
    assert {row["accepted"] for row in watcher.rounds} >= {0, 1, 3}


SPOILED = {
    "p": lambda row: row["slots"][0].update(p=row["slots"][0]["p"] + 1e-3),
    "q": lambda row: row["slots"][0].update(q=row["slots"][0]["q"] + 1e-3),
    "alpha": lambda row: row["slots"][0].update(alpha=row["slots"][0]["alpha"] + 1e-3),
    "a bar": lambda row: row["slots"][1]["likeliest"][0].__setitem__(2, 0.5),
    "u": lambda row: row["slots"][0].update(u=row["slots"][0]["u"] / 2),
    "accepted": lambda row: row.update(accepted=row["accepted"] + 1),
    "the own token": lambda row: row["own"].update(y=row["own"]["y"] ^ 1),
}


def test_a_spoiled_number_is_noticed(lab, models):
    data = traced(lab, models, "dflash", "--max-new-tokens", 8)
    models_and_prompt = opened(models, "dflash")
    check_decoding(data, *models_and_prompt, PLAIN, seed=3, limit=8)
    for spoil in SPOILED.values():
        spoiled = copy.deepcopy(data)
        spoil(spoiled["rounds"][1])
        with pytest.raises(AssertionError):
            check_decoding(spoiled, *models_and_prompt, PLAIN, seed=3, limit=8)


def test_the_last_round_counts_up_to_a_stop_token_and_the_text_up_to_its_length():
    target, drafter = lesson_models()
    behind = set()  # why tokens of a last round are not counted, or not shown
    for seed in range(8):
        for stop_ids in ((), (4,)):
            watcher = Trace(target, PLAIN)
            how = (7, PLAIN, seed, stop_ids)
            (result,) = generate(target, drafter, [[1, 2, 3]], *how, watch=watcher)
            watcher.finish(result)
            assert sum(row["shown"] for row in watcher.rounds) == len(result.tokens) - 1
            assert sum(row["committed"] for row in watcher.rounds) == result.num_committed
            for row in watcher.rounds[:-1]:
                assert row["shown"] == row["committed"] == row["accepted"] + 1
            for row in watcher.rounds[-1:]:
                behind |= {name for name in ("shown", "committed") if row[name] <= row["accepted"]}
    assert behind == {"shown", "committed"}


def test_a_page_is_one_file_below_2_mb_for_200_tokens(lab, models, monkeypatch):
    """15 drafts a round, and room for 199 rounds, if none were accepted."""
    endless = replace(load_tokenizer(models / "target"), stop_ids=())
    monkeypatch.setattr(trace, "load_tokenizer", lambda *_: endless)
    data = traced(lab, models, "long")
    written = (models / "page.html").read_text()
    assert sum(row["shown"] for row in data["rounds"]) == 199 and len(data["rounds"]) > 100
    assert len(written.encode()) / len(data["rounds"]) * 199 < 2e6
    assert not re.search(r"https?:|\bsrc\s*=|\bhref\s*=|@import|url\(|import\(|fetch\(", written)
    assert written.count("</script>") == TEMPLATE.read_text().count("</script>") == 2


def test_a_tokens_text_is_shown_as_far_as_it_is_one(models):
    tokenizer = load_tokenizer(models / "target")
    assert [piece(tokenizer, i) for i in (97, 10, 0xE2, 256)] == [
        "a",
        "\n",
        r"\xe2",
        "<|endoftext|>",
    ]
    assert piece(tokenizer, 10**6) == "<1000000>"


# ------------------------------------------------------------------------------------ training step

STEPS = [dict(), dict(num_anchors=4, num_branches=3, seed=15)]


@pytest.mark.parametrize("flags", STEPS, ids=["the lesson's", "with shared nodes"])
def test_a_step_page_has_the_numbers_of_the_step(flags):
    data = step_data(Config(**flags))
    target, drafter = lesson_models()
    trunk = [dot["y"] for dot in data["dots"][: data["num_trunk"]]]
    total, count = 0.0, 0
    for branch in data["branches"]:
        text, drafts = trunk[: branch["anchor"] + 1], [slot["y"] for slot in branch["slots"]]
        with torch.no_grad():
            p = target(torch.tensor([text + drafts]))[0, len(text) - 1 :].softmax(-1)
            q = q_alone(drafter, text, drafts).softmax(-1)
        alpha = torch.minimum(p[: len(drafts)], q[: len(drafts)]).sum(-1)
        for k, slot in enumerate(branch["slots"]):
            check_slot(slot, p[k], q[k])
        survival = [slot["survival"] for slot in branch["slots"]]
        assert survival == pytest.approx(alpha.cumprod(0).tolist(), **NEAR)
        total += alpha.cumprod(0).sum().item()
        count += len(drafts)
    assert data["loss"] == pytest.approx(1 - total / count, **NEAR)


@pytest.mark.parametrize("flags", STEPS, ids=["the lesson's", "with shared nodes"])
def test_the_drawn_tree_and_mask_are_every_branchs_history(flags):
    data = step_data(Config(**flags))
    dots, T = data["dots"], data["num_trunk"]
    places = [(dot["x"], dot["row"]) for dot in dots]
    assert len(set(places)) == len(places)  # no dot hides another
    through = {}
    for branch in data["branches"]:
        history = [dot["y"] for dot in dots[: branch["anchor"] + 1]]
        assert branch["route"][0] == branch["anchor"]
        for number, (i, slot) in enumerate(zip(branch["route"][1:], branch["slots"])):
            history = [*history, slot["y"]]
            assert dots[i]["y"] == slot["y"] and dots[i]["x"] == branch["anchor"] + 1 + number
            through.setdefault(i, set()).add(branch["anchor"])
            if dots[i]["kind"] == "node":
                seen = [dot for dot, sees in zip(dots, data["mask"][i - T]) if sees == "1"]
                assert [dot["y"] for dot in sorted(seen, key=lambda dot: dot["x"])] == history
    assert set(range(T, len(dots))) <= through.keys()
    if flags:  # nodes that two anchors share, and a proposed branch on the trunk
        assert any(len(anchors) > 1 for i, anchors in through.items() if i >= T)
        drawn = [branch for branch in data["branches"] if branch["kind"] != "text"]
        assert any(branch["route"][1] < T for branch in drawn)


def test_data_comes_back_from_a_page_as_it_was(tmp_path):
    data = {"kind": "step", "text": "</script> & <!-- \u2028 é"}
    (tmp_path / "page.html").write_text(page(data))
    assert page_data(tmp_path / "page.html") == data == json.loads(json.dumps(data))


@pytest.mark.parametrize(
    "flags, words",
    [
        (("--target", "nowhere"), "--prompt"),
        (("--target", "nowhere", "--prompt", "a"), "--drafter"),
        (("--prompt", "a"), "needs --target"),
        (("--target", "nowhere", "--prompt", "a", "--num-anchors", 2), "no --target"),
        (("--num-branches", 1), "at least 2"),
    ],
)
def test_a_mistake_ends_in_one_line(lab, flags, words):
    code, _, error = lab("trace", *flags)
    assert code == 2 and words in error and len(error.strip().splitlines()) == 1
