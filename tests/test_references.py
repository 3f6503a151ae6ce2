"""References in parts, here and from a server. `pytest tests/test_references.py`"""

import dataclasses
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from test_distributed import free_port
from test_lessons import run

from lab import references
from lab.references import ReferencesConfig, make
from support import data
from support.data import References
from support.prepare import write_references
from target import Target
from train import TrainConfig

SMALL = dict(num_references=7, prompt_length=10, response_length=20, part=3)


def config_for(folders, tmp_path, **changes):
    return ReferencesConfig(
        target=str(folders / "target"), out=str(tmp_path / "r"), **SMALL | changes
    )


def test_parts_are_what_is_written_in_one_go_and_are_not_written_twice(folders, tmp_path):
    config = config_for(folders, tmp_path)
    calls, honest = [], references.generate

    def counted(*args, **how):
        calls.append(len(args[2]))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return honest(*args, **how)

    references.generate = counted
    try:
        with pytest.raises(KeyboardInterrupt):  # two parts of three are kept
            make(config, "cpu")
        make(config, "cpu")
    finally:
        references.generate = honest
    assert calls == [3, 3, 1, 1]
    found = References.load(tmp_path / "r/references.safetensors")
    target = Target.from_pretrained(folders / "target")
    tokenizer = data.load_tokenizer(folders / "target")
    asked = TrainConfig(**{k: v for k, v in SMALL.items() if k != "part"})
    whole = write_references(asked, target, tokenizer, data.load_corpus(), tmp_path / "whole.st")
    assert torch.equal(found.tokens, whole.tokens) and torch.equal(found.lengths, whole.lengths)
    with pytest.raises(ValueError, match="seed"):
        make(dataclasses.replace(config, seed=1), "cpu")


def test_prompts_of_one_length_are_written_together_and_kept_in_their_order(folders, tmp_path):
    corpus = tmp_path / "prompts.jsonl"  # half of the lines are held out
    corpus.write_text("".join(json.dumps({"prompt": "ab" * n}) + "\n" for n in range(20, 0, -1)))
    changes = dict(corpus=str(corpus), prompt_length=44)
    config = config_for(folders, tmp_path, **changes)
    lengths, honest = [], references.generate

    def watched(*args, **how):
        lengths.append([len(prompt) for prompt in args[2]])
        return honest(*args, **how)

    references.generate = watched
    try:
        make(config, "cpu")
    finally:
        references.generate = honest
    flat = [n for part in lengths for n in part]
    assert flat == sorted(flat) and len(set(flat)) > 4
    target = Target.from_pretrained(folders / "target")
    tokenizer = data.load_tokenizer(folders / "target")
    asked = TrainConfig(**{k: v for k, v in (SMALL | changes).items() if k != "part"})
    texts = data.load_corpus(str(corpus))
    whole = write_references(asked, target, tokenizer, texts, tmp_path / "whole.st")
    found = References.load(tmp_path / "r/references.safetensors")
    assert torch.equal(found.tokens, whole.tokens) and torch.equal(found.lengths, whole.lengths)


def test_two_processes_make_the_same_references(folders, tmp_path):
    asked = [x for k, v in SMALL.items() for x in (f"--{k.replace('_', '-')}", v)]
    asked += ["--target", folders / "target"]
    start = ("-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={free_port()}")
    for out, before in (("one", ()), ("two", start)):
        done = run(*before, references.__file__, *asked, "--out", tmp_path / out, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    one, two = (
        References.load(tmp_path / f"{out}/references.safetensors") for out in ("one", "two")
    )
    assert torch.equal(one.tokens, two.tokens) and torch.equal(one.lengths, two.lengths)


class Fake(BaseHTTPRequestHandler):
    """A server that answers every prompt with its own tokens in reverse."""

    mood, asked = "ids", []

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.send({"data": [{"id": "fake"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        Fake.asked.append(body)
        ids = body["prompt"][::-1][:5]
        text, usage = bytes(ids).decode("latin-1"), {"completion_tokens": 6}
        choice = {"text": text, "finish_reason": "stop"}
        if Fake.mood == "ids":
            choice["token_ids"] = ids
        if Fake.mood == "other model":
            choice["token_ids"] = [9999]
        if Fake.mood == "text, one off" and body["seed"] % 2:
            usage = {"completion_tokens": 9}
        if Fake.mood == "nonsense":
            return self.send({"answer": 42})
        if Fake.mood == "html":
            return self.send(None, b"<html>welcome</html>")
        if Fake.mood == "refusing":
            return self.send({"error": "no such model"}, code=404)
        if Fake.mood == "busy at first" and len(Fake.asked) < 3:
            return self.send({"error": "busy"}, code=503)
        self.send({"choices": [choice], "usage": usage})

    def send(self, found, raw=None, code=200):
        raw = raw or json.dumps(found).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)


@pytest.fixture
def server():
    with ThreadingHTTPServer(("127.0.0.1", 0), Fake) as one:
        threading.Thread(target=one.serve_forever, daemon=True).start()
        Fake.asked.clear()
        yield f"http://127.0.0.1:{one.server_port}/v1"
        one.shutdown()


@pytest.mark.parametrize("mood", ["ids", "text", "text, one off", "busy at first"])
def test_a_server_writes_them(folders, tmp_path, server, mood, monkeypatch):
    Fake.mood = mood
    monkeypatch.setattr(references.time, "sleep", lambda _: None)
    monkeypatch.setattr(references, "TRIES", 5)
    config = config_for(folders, tmp_path, api=server)
    figures = make(config, "cpu")
    found = References.load(tmp_path / "r/references.safetensors", {"target": 123})  # not known
    assert {body["model"] for body in Fake.asked} == {"fake"}
    assert figures["not_told_back"] == (3 if mood == "text, one off" else 0)
    stop = data.load_tokenizer(folders / "target").stop_ids[0]
    for row, length, asked in zip(found.tokens, found.lengths, found.prompt_lengths):
        prompt, response = row[:asked].tolist(), row[asked:length].tolist()
        assert len(prompt) == 10 and response == [*prompt[::-1][:5], stop]
    assert len(found.lengths) == 7 - figures["not_told_back"]


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
    monkeypatch.setattr(references.time, "sleep", lambda _: None)
    Fake.mood = "ids"
    config = config_for(folders, tmp_path, api=server)
    make(config, "cpu")
    part = tmp_path / "r/parts/000001.json"
    part.unlink()
    Fake.mood = mood
    with pytest.raises(ValueError, match=word):
        make(config, "cpu")
    assert (tmp_path / "r/parts/000000.json").is_file() and not part.exists()
    Fake.mood = "ids"
    make(config, "cpu")
    assert part.is_file()


def test_no_server_is_one_line(folders, tmp_path):
    done = run(
        references.__file__,
        "--target",
        folders / "target",
        "--api",
        f"http://127.0.0.1:{free_port()}/v1",
        cwd=tmp_path,
    )
    assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert "refused" in done.stderr
