"""References in parts, made here and by a server. `pytest tests/lab/test_references.py`"""

import dataclasses
import json
import re
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from hf import load_tokenizer
from lab import references
from small import ROOT, free_port, reconfigure, rewrite, run
from support.data import load_corpus
from support.files import locked
from support.prepare import get_references
from support.references import References, load_held_out
from target import Target
from train import TrainConfig

SMALL = dict(num_references=7, prompt_length=10, response_length=20, part=3)


def config_for(folders, tmp_path, **changes) -> references.Config:
    values = dict(target=str(folders / "target"), out=str(tmp_path / "r"))
    return references.Config(**values | SMALL | changes)


def written_at_once(folders, tmp_path, corpus: str = "", **changes) -> References:
    """The references that train.py writes with the same flags."""
    target = Target.from_pretrained(folders / "target")
    tokenizer = load_tokenizer(folders / "target")
    values = {k: v for k, v in (SMALL | changes).items() if k != "part"}
    config = TrainConfig(corpus=corpus, **values)
    path = tmp_path / "whole.safetensors"
    return get_references(config, target, tokenizer, load_corpus(corpus or None), path)


def are_equal(one: References, other: References) -> bool:
    return torch.equal(one.tokens, other.tokens) and torch.equal(one.lengths, other.lengths)


def test_parts_are_what_is_written_in_one_go_and_are_not_written_twice(
    folders, tmp_path, monkeypatch
):
    config = config_for(folders, tmp_path)
    calls, generate = [], references.generate

    def counted(target, drafter, prompts, *args, **options):
        calls.append(len(prompts))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return generate(target, drafter, prompts, *args, **options)

    monkeypatch.setattr(references, "generate", counted)
    with pytest.raises(KeyboardInterrupt):  # two parts of three are kept
        references.run(config)
    references.run(config)
    assert calls == [3, 3, 1, 1]
    in_parts = References.load(tmp_path / "r/references.safetensors")
    assert are_equal(in_parts, written_at_once(folders, tmp_path))
    with pytest.raises(ValueError, match="seed"):
        references.run(dataclasses.replace(config, seed=1))


def test_some_prompts_are_held_out_and_travel_in_the_file(chats, tmp_path):
    figures = references.run(chats)
    path = tmp_path / "r/references.safetensors"
    made, held_out = References.load(path), load_held_out(path)
    trained = [r[:end].tolist() for r, end in zip(made.tokens, made.prompt_lengths.tolist())]
    assert len(held_out) == figures["held_out"] == 5 and len(trained) == 15
    assert not any(prompt in trained for prompt in held_out)


def test_prompts_of_one_length_are_written_together_and_kept_in_their_order(
    folders, tmp_path, monkeypatch
):
    corpus = tmp_path / "prompts.jsonl"  # a quarter is held out
    corpus.write_text("".join(json.dumps({"prompt": "ab" * n}) + "\n" for n in range(20, 0, -1)))
    changes = dict(corpus=str(corpus), prompt_length=44)
    lengths, generate = [], references.generate

    def watched(target, drafter, prompts, *args, **options):
        lengths.extend(len(prompt) for prompt in prompts)
        return generate(target, drafter, prompts, *args, **options)

    monkeypatch.setattr(references, "generate", watched)
    references.run(config_for(folders, tmp_path, **changes))
    assert lengths == sorted(lengths) and len(set(lengths)) > 4
    in_parts = References.load(tmp_path / "r/references.safetensors")
    assert are_equal(in_parts, written_at_once(folders, tmp_path, **changes))


# -------------------------------------------------------------- what they were made of has changed

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}{{ style or '' }}"


def write_chats(path, texts: list[str]) -> None:
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))


@pytest.fixture
def chats(folders, tmp_path):
    """-> a config whose prompts are conversations; corpus and target are the test's own files."""
    shutil.copytree(folders / "target", tmp_path / "target")
    (tmp_path / "target/chat_template.jinja").write_text(TEMPLATE)
    write_chats(tmp_path / "chats.jsonl", [f"question {n}" for n in range(20)])
    files = dict(target=str(tmp_path / "target"), corpus=str(tmp_path / "chats.jsonl"))
    sizes = dict(num_references=20, prompt_length=30, response_length=20, part=7)
    return references.Config(out=str(tmp_path / "r"), **files, **sizes)


def edit_chats(change):
    return lambda root: write_chats(
        root / "chats.jsonl", change([f"question {n}" for n in range(20)])
    )


def edit_tokenizer(root) -> None:
    path = root / "target/tokenizer.json"
    path.write_text(path.read_text().replace("<|pad|>", "<|nothing|>"))


def edit_template(root) -> None:
    (root / "target/chat_template.jinja").write_text(TEMPLATE.replace("<", "["))


def add_to_norm(tensors: dict) -> None:
    tensors["model.layers.1.input_layernorm.weight"][3] += 1


STOP_AT_5 = {"eos_token_id": 5}
EDITS = {
    "the texts": (
        edit_chats(lambda texts: [text.upper() for text in texts]),
        "the prompts changed",
    ),
    "one text": (edit_chats(lambda texts: [*texts[:7], "?", *texts[8:]]), "the prompts changed"),
    "one text less": (edit_chats(lambda texts: texts[:-1]), "the prompts changed"),
    "their order": (edit_chats(lambda texts: texts[::-1]), "the prompts changed"),
    "the template": (edit_template, "the chat template changed"),
    "the tokenizer": (edit_tokenizer, "the tokenizer changed"),
    "the stop ids": (
        lambda root: (root / "target/generation_config.json").write_text(json.dumps(STOP_AT_5)),
        "stop ids = ",
    ),
    "a norm of the target": (
        lambda root: rewrite(add_to_norm)(root / "target"),
        "other weights or another config of target",
    ),
    "an epsilon of the target": (
        lambda root: reconfigure(rms_norm_eps=0.1)(root / "target"),
        "other weights or another config of target",
    ),
    "the target's dtype": (
        lambda root: reconfigure(dtype="bfloat16")(root / "target"),
        "the same weights in another dtype: float32, this run has bfloat16",
    ),
}


@pytest.mark.parametrize("name", EDITS)
def test_parts_are_not_finished_with_other_prompts_or_another_target(chats, tmp_path, name):
    edit, words = EDITS[name]
    references.run(chats)
    (tmp_path / "r/parts/000001.json").unlink()  # as if it had been stopped
    edit(tmp_path)
    with pytest.raises(ValueError, match=words) as error:
        references.run(chats)
    assert str(tmp_path / "r/parts") in str(error.value)
    assert not (tmp_path / "r/parts/000001.json").exists()


@pytest.mark.parametrize("name", EDITS)
def test_references_of_a_training_are_not_reused_with_other_prompts(chats, tmp_path, name):
    edit, words = EDITS[name]

    def get() -> References:
        target, tokenizer = Target.from_pretrained(chats.target), load_tokenizer(chats.target)
        corpus = load_corpus(chats.corpus)
        return get_references(chats_run, target, tokenizer, corpus, tmp_path / "r.safetensors")

    sizes = {k: getattr(chats, k) for k in ("num_references", "prompt_length", "response_length")}
    chats_run = TrainConfig(corpus=chats.corpus, **sizes)
    first = get()
    assert are_equal(first, get())
    edit(tmp_path)
    with pytest.raises(ValueError, match=words):
        get()


def test_other_template_arguments_are_other_prompts(chats):
    references.run(chats)
    references.run(chats)
    other = dataclasses.replace(chats, chat_template_args='{"style": "brief"}')
    with pytest.raises(ValueError, match="--chat-template-args = {}, this run has {'style'"):
        references.run(other)


def test_a_template_that_writes_the_time_is_named_where_a_run_cannot_go_on(chats, tmp_path):
    path = tmp_path / "target/chat_template.jinja"
    path.write_text("{% set now = strftime_now('%f') if loud is defined else '' %}" + TEMPLATE)
    references.run(chats)
    references.run(chats)  # it does not write it into these
    path.write_text("{{ strftime_now('%M%S%f') }}" + TEMPLATE)
    timed = dataclasses.replace(chats, out=str(tmp_path / "timed"), prompt_length=40)
    references.run(timed)
    words = "before the prompts, into which the chat template writes the time, changed: choose"
    with pytest.raises(ValueError, match=words):
        references.run(timed)


def test_several_temperatures_take_turns(folders, tmp_path):
    """Each response is what its prompt's temperature alone gives."""
    made = {}
    for name, temperature in (("low", (0.1,)), ("high", (2.0,)), ("both", (0.1, 2.0))):
        config = config_for(folders, tmp_path / name, temperature=temperature)
        references.run(config)
        made[name] = References.load(f"{config.out}/references.safetensors")
    for number in range(SMALL["num_references"]):
        wanted = made["high" if number % 2 else "low"]
        for key in ("tokens", "lengths"):
            row, own = (getattr(r, key)[number].flatten() for r in (wanted, made["both"]))
            size = min(len(row), len(own))
            assert torch.equal(row[:size], own[:size])


def test_a_prompt_is_answered_several_times_and_held_out_prompts_stay_so(folders, tmp_path):
    flags = dict(temperature=(1.0,), num_references=8, answers=3)
    references.run(config_for(folders, tmp_path, **flags))
    path = tmp_path / "r/references.safetensors"
    made = References.load(path)
    starts = [tuple(row[:n].tolist()) for row, n in zip(made.tokens, made.prompt_lengths)]
    assert starts[:3] * 3 == [*starts, starts[2]] and len({*starts}) == 3
    assert len({tuple(row.tolist()) for row in made.tokens}) == 8
    assert not {*starts} & {*map(tuple, load_held_out(path))}
    config = config_for(folders, tmp_path, answers=2, temperature=(1.0, 0.0))
    with pytest.raises(ValueError, match="--answers 2: at temperature 0 they would be the same"):
        references.run(config)


def test_an_impossible_temperature_is_refused_before_anything_is_written(folders, tmp_path):
    with pytest.raises(ValueError, match="temperature 1e-09: 0 is greedy, else at least"):
        references.run(config_for(folders, tmp_path, temperature=(1.0, 1e-9)))
    assert not (tmp_path / "r").exists()


def test_responses_end_where_they_begin_to_loop(folders, tmp_path, monkeypatch):
    loop = [1, 2, 3, *[4] * 16, *[4] * 20]
    monkeypatch.setattr(references, "make_writer", lambda *_: (write, {"target": 0}))

    def write(prompts, prompt_ids):
        return [loop if i % 2 else loop[:10] for i in prompt_ids]

    figures = references.run(config_for(folders, tmp_path, cut_loops=True))
    assert figures["cut"] == 3 and figures["cut_tokens"] == 3 * (len(loop) - 4)
    made = References.load(tmp_path / "r/references.safetensors")
    assert (made.lengths - made.prompt_lengths).tolist() == [10, 4, 10, 4, 10, 4, 10]


def test_references_of_another_temperature_are_not_taken_for_a_trainings_own(folders, tmp_path):
    references.run(config_for(folders, tmp_path, temperature=(0.1,)))
    made = tmp_path / "r/references.safetensors"
    made.rename(tmp_path / "whole.safetensors")
    with pytest.raises(ValueError, match="was made with temperature = 0.1, this run has 1.0"):
        written_at_once(folders, tmp_path)


@pytest.mark.parametrize(
    "flags, words",
    [
        (("--api-model", "m"), "--api-model means nothing here: it needs --api"),
        (("--api-requests", 3), "--api-requests means nothing here: it needs --api"),
        (("--api", "http://x/v1", "--batch-size", 3), "--batch-size means nothing .* no --api"),
        (("--api", "http://x/v1", "--device", "cpu"), "--device means nothing .*needs no --api"),
        (("--api", "http://x/v1", "--dtype", "bfloat16"), "--dtype means nothing .* no --api"),
        (("--skip-bad-lines",), "--skip-bad-lines means nothing here: it needs --corpus"),
    ],
)
def test_flags_that_mean_nothing_are_errors(lab, folders, tmp_path, flags, words):
    shared = ("--target", folders / "target", "--out", tmp_path / "r")
    code, _, error = lab("references", *shared, *flags)
    assert code == 2 and re.search(words, error) and len(error.strip().splitlines()) == 1


def text_file(folder) -> str:
    (folder / "text.txt").write_text("some text of several lines\nand words\n" * 40)
    return str(folder / "text.txt")


def test_template_arguments_for_running_text_are_an_error(chats, tmp_path):
    text = text_file(tmp_path)
    config = dataclasses.replace(chats, corpus=text, chat_template_args='{"style": "brief"}')
    with pytest.raises(ValueError, match="no chats here: --chat-template-args means nothing"):
        references.run(config)


def test_a_template_that_no_prompt_uses_may_change(folders, tmp_path):
    config = config_for(folders, tmp_path, target=str(tmp_path / "target"))
    config = dataclasses.replace(config, corpus=text_file(tmp_path))
    shutil.copytree(folders / "target", tmp_path / "target")
    references.run(config)
    (tmp_path / "target/chat_template.jinja").write_text(TEMPLATE)
    references.run(config)  # prompts from running text are not rendered


def test_a_target_that_answers_chats_is_not_given_python_text_silently(chats):
    with pytest.raises(ValueError, match="answers prompts: give them by --corpus"):
        references.run(dataclasses.replace(chats, corpus=""))


def test_a_second_run_in_one_folder_is_refused_in_one_line(lab, folders, tmp_path):
    flags = ("--target", folders / "target", "--num-references", 2, "--response-length", 4)
    flags += ("--prompt-length", 8, "--out", tmp_path / "r")
    with locked(tmp_path / "r"):
        code, _, error = lab("references", *flags)
    assert code == 2 and len(error.strip().splitlines()) == 1
    assert f"is writing to {tmp_path / 'r'}: wait for it, or choose another --out" in error
    assert not (tmp_path / "r/parts").exists()
    assert lab("references", *flags)[0] == 0
    assert lab("references", *flags)[0] == 0  # and once more


@pytest.mark.slow
def test_two_processes_make_the_same_references(folders, tmp_path):
    flags = [x for name, value in SMALL.items() for x in (f"--{name.replace('_', '-')}", value)]
    flags += ["--target", folders / "target"]
    torchrun = ("-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={free_port()}")
    for out, start in (("one", ()), ("two", torchrun)):
        command = (*start, "-m", "lab", "references", *flags, "--out", tmp_path / out)
        made = run(*command, cwd=ROOT)
        assert made.returncode == 0, made.stderr
        assert json.loads((tmp_path / out / "summary.json").read_text())["references"]["prompts"]
    paths = [tmp_path / out / "references.safetensors" for out in ("one", "two")]
    assert are_equal(*map(References.load, paths))


# ---------------------------------------------------------------------------------------- a server


class FakeServer(BaseHTTPRequestHandler):
    """A server that answers every prompt with its own tokens in reverse."""

    mood = "ids"
    bodies = []

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.send({"data": [{"id": "fake"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        FakeServer.bodies.append(body)
        ids = body["prompt"][::-1][:5]
        choice = {"text": bytes(ids).decode("latin-1"), "finish_reason": "stop"}
        usage = {"completion_tokens": 6}
        if self.mood == "ids":
            choice["token_ids"] = ids
        if self.mood == "other model":
            choice["token_ids"] = [9999]
        if self.mood == "text, one off" and body["seed"] % 2:
            usage = {"completion_tokens": 9}
        if self.mood == "nonsense":
            return self.send({"answer": 42})
        if self.mood == "html":
            return self.send(None, b"<html>welcome</html>")
        if self.mood == "refusing":
            return self.send({"error": "no such model"}, code=404)
        if self.mood == "busy at first" and len(FakeServer.bodies) < 3:
            return self.send({"error": "busy"}, code=503)
        self.send({"choices": [choice], "usage": usage})

    def send(self, value, raw=None, code=200):
        raw = raw or json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(references.time, "sleep", lambda _: None)
    with ThreadingHTTPServer(("127.0.0.1", 0), FakeServer) as listener:
        threading.Thread(target=listener.serve_forever, daemon=True).start()
        FakeServer.bodies.clear()
        yield f"http://127.0.0.1:{listener.server_port}/v1"
        listener.shutdown()


@pytest.mark.parametrize("mood", ["ids", "text", "text, one off", "busy at first"])
def test_a_server_writes_them(folders, tmp_path, server, mood, monkeypatch):
    monkeypatch.setattr(FakeServer, "mood", mood)
    config = config_for(folders, tmp_path, api=server, temperature=(1.0, 0.7))
    figures = references.run(config)
    made = References.load(tmp_path / "r/references.safetensors", {"target": 123})  # not known
    assert {body["model"] for body in FakeServer.bodies} == {"fake"}
    for body in FakeServer.bodies:
        assert body["temperature"] == (0.7 if body["seed"] % 2 else 1.0)
    assert figures["dropped"] == (3 if mood == "text, one off" else 0)
    stop = load_tokenizer(folders / "target").stop_ids[0]
    for row, length, prompt_length in zip(made.tokens, made.lengths, made.prompt_lengths):
        prompt, response = row[:prompt_length].tolist(), row[prompt_length:length].tolist()
        assert len(prompt) == 10 and response == [*prompt[::-1][:5], stop]
    assert len(made.lengths) == 7 - figures["dropped"]


@pytest.mark.parametrize(
    "mood, word",
    [
        ("nonsense", "without 'choices'"),
        ("html", "not answered"),
        ("refusing", "404"),
        ("other model", "same model"),
    ],
)
def test_a_server_that_will_not_ends_in_one_line_and_keeps_what_is_there(
    folders, tmp_path, server, mood, word, monkeypatch
):
    config = config_for(folders, tmp_path, api=server)
    references.run(config)
    part = tmp_path / "r/parts/000001.json"
    part.unlink()
    monkeypatch.setattr(FakeServer, "mood", mood)
    with pytest.raises(ValueError, match=word):
        references.run(config)
    assert (tmp_path / "r/parts/000000.json").is_file() and not part.exists()
    monkeypatch.setattr(FakeServer, "mood", "ids")
    references.run(config)
    assert part.is_file()


def test_no_server_is_one_line(lab, folders, tmp_path, monkeypatch):
    monkeypatch.setattr(references.time, "sleep", lambda _: None)
    url = f"http://127.0.0.1:{free_port()}/v1"
    flags = ("--target", folders / "target", "--api", url, "--out", tmp_path)
    code, _, error = lab("references", *flags)
    assert code == 2 and len(error.strip().splitlines()) == 1, error
    assert "refused" in error
