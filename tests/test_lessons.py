"""Each concept file runs as a lesson, and every command line answers mistakes in one line with exit
code 2. `pytest tests/test_lessons.py`"""

import importlib
import json
import re
import subprocess
import sys

import pytest
from conftest import ROOT

from support import files


def run(*arguments, cwd=ROOT):
    return subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=cwd, capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize(
    "file, says",
    [
        ("tree.py", "merge=True: 6 nodes"),
        ("loss.py", "E2E-TV"),
        ("drafter.py", "block@3 block@6"),
        ("model.py", "largest difference"),
        ("target.py", "packed - alone"),
        ("replay.py", "S_7 in one product"),
        ("heads.py", "DFlash 2  y_1 = 101"),
    ],
)
def test_a_concept_file_is_a_lesson(tmp_path, file, says):
    done = run(ROOT / file, cwd=tmp_path)
    assert done.returncode == 0 and says in done.stdout and not done.stderr
    assert not list(tmp_path.iterdir())


def test_serve_shows_the_text_the_al_and_the_speed_up(folders):
    done = run(
        "serve.py",
        "--target",
        folders / "target",
        "--drafter",
        folders / "drafter",
        "--prompt",
        "abc",
        "de",
        "--max-new-tokens",
        20,
    )
    assert done.returncode == 0, done.stderr
    assert "AL " in done.stdout and "same text" in done.stdout and "times as fast" in done.stdout
    plain = run(
        "serve.py", "--target", folders / "target", "--prompt", "abc", "--max-new-tokens", 20
    )
    assert plain.returncode == 0 and "plain decoding" in plain.stdout


@pytest.mark.parametrize("arch", ["gqa", "gdn"])
def test_bench_tree_and_replay_print_every_size(tmp_path, arch):
    small = ("--repeats", 1, "--out", "b", "--arch", arch, "--num-draft-tokens", 3)
    sizes = ("--trunk-length", 24, 40, "--num-anchors", 2, 4, 8)
    done = run(ROOT / "bench.py", "tree", *sizes, *small, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "b/summary.json").read_text())["tree"]["rows"]
    grid = [(trunk, anchors) for trunk in (24, 40) for anchors in (2, 4, 8)]
    assert [(row["trunk"], row["anchors"]) for row in rows] == grid
    assert all(row["gap"] < 1e-5 and row["nodes"] == 2 * row["anchors"] for row in rows)
    assert done.stdout.count("R^2") == 2
    done = run(
        ROOT / "bench.py", "replay", "--trunk-length", 40, "--num-anchors", 4, *small, cwd=tmp_path
    )
    if arch == "gqa":
        assert done.returncode == 2 and "linear layers" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "b/summary.json").read_text())
    rows = figures["replay"]["rows"]
    assert set(figures) == {"tree", "replay"} and rows[0]["spacing"] == 1
    assert all(row["gap"] < 1e-4 for row in rows)
    assert [row["states_bytes"] for row in rows] == sorted(
        (row["states_bytes"] for row in rows), reverse=True
    )


def test_bench_throughput_counts_the_same_kind_of_tokens_on_both_sides(folders, tmp_path):
    pair = ("--target", folders / "target", "--drafter", folders / "drafter", "--out", "b")
    done = run(
        ROOT / "bench.py",
        "throughput",
        *pair,
        "--trunk-length",
        40,
        "--prompt-length",
        16,
        "--num-anchors",
        8,
        "--repeats",
        1,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "b/summary.json").read_text())["throughput"]
    rows = found["rows"]
    assert list(rows)[:3] == [f"rollouts, {n} at once" for n in (1, 8, 32)]
    for name, row in rows.items():
        assert row["tokens_per_update"] > 0 and 0 < sum(row["shares"].values()) <= 1.001
        assert ("decode" in row["shares"]) == name.startswith("rollouts")
    # anchors x branches x W, less what stop tokens cut
    assert 50 < rows["SpecOPD, 8 anchors x 2"]["tokens_per_update"] <= 8 * 2 * 4
    for name, ratio in found["ratios"].items():
        product = ratio["updates_per_s"] * ratio["tokens_per_update"]
        assert ratio["tokens_per_s"] == pytest.approx(product) and name in rows


def test_bench_chains_counts_what_is_scored(folders, tmp_path):
    pair = ("--target", folders / "target", "--drafter", folders / "drafter", "--out", "b")
    done = run(
        ROOT / "bench.py",
        "chains",
        *pair,
        "--num-prompts",
        2,
        "--prompt-length",
        8,
        "--max-new-tokens",
        12,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "b/summary.json").read_text())["chains"]["rows"]
    for row in rows:
        most = 1 + row["chains"] * row["drafts"]
        assert row["nodes"] == most if row["chains"] == 1 else row["nodes"] <= most


def test_bench_al_compares_drafters_by_task(folders, tmp_path):
    for task, asked in (("sums", ["1 + 1", "2 + 2"]), ("words", ["abc", "defg", "h"])):
        lines = [json.dumps({"turns": [text]}) for text in asked]
        (tmp_path / f"{task}.jsonl").write_text("\n".join(lines))
    drafter = folders / "drafter"
    done = run(
        ROOT / "bench.py",
        "al",
        "--target",
        folders / "target",
        "--drafters",
        drafter,
        drafter,
        "--tasks",
        "sums.jsonl",
        "words.jsonl",
        "--max-new-tokens",
        9,
        "--out",
        "b",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("+0.0 % [+0.00, +0.00]") == 2  # over itself
    row = json.loads((tmp_path / "b/summary.json").read_text())["al"][str(drafter)]["t1"]["al"]
    assert row["mean"] == pytest.approx((row["sums"] + row["words"]) / 2) and row["mean"] >= 1
    assert f"{row['mean']:.3f}" in done.stdout


def test_bench_speed_has_three_arms_at_every_batch_size(folders, tmp_path):
    pair = ("--target", folders / "target", "--drafters", folders / "drafter", folders / "drafter")
    done = run(
        ROOT / "bench.py",
        "speed",
        *pair[:4],
        "--num-prompts",
        4,
        "--prompt-length",
        8,
        "--max-new-tokens",
        10,
        "--concurrency",
        1,
        3,
        "--out",
        "b",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "b/summary.json").read_text())["speed"]
    assert [key for key in found if key != "config"] == ["1 at once", "3 at once"]
    for size in ("1 at once", "3 at once"):
        arms = found[size]["tasks"]["text"]
        assert len(arms) == 2 and all(arm["same_text"] for arm in arms.values())
        name = list(arms)[1]
        ratio = arms[name]["tokens_per_s"] / arms["off"]["tokens_per_s"]
        assert found[size]["geometric_means"][name] == pytest.approx(ratio)
        assert arms[name]["al"] >= 1 and arms["off"]["al"] == 1


def test_time_is_covered_once_however_many_kernels_run():
    from lab.training import covered

    assert covered([]) == 0 and covered([(0, 2), (1, 3), (1.5, 1.7), (5, 6)]) == 4


def test_serve_measures_al_by_task(folders, tmp_path):
    for task, asked in (("sums", ["1 + 1", "2 + 2"]), ("words", ["abc", "defg", "h"])):
        (tmp_path / f"{task}.jsonl").write_text("\n".join(json.dumps({"prompt": a}) for a in asked))
    (tmp_path / "long.jsonl").write_text(json.dumps({"prompt": "a" * 30}))
    asked = ("--eval", "sums.jsonl", "long.jsonl", "words.jsonl", "--eval-length", 20)
    done = run(
        ROOT / "serve.py",
        "--target",
        folders / "target",
        "--drafter",
        folders / "drafter",
        *asked,
        "--max-new-tokens",
        12,
        "--out",
        "e",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "left out: no prompt of at most 20 tokens" in done.stdout
    assert "2 prompts are all there are, of 64 asked" in done.stdout
    found = json.loads((tmp_path / "e/summary.json").read_text())
    for heat in ("t0", "t1"):
        tasks = found[heat]["tasks"]
        assert list(tasks) == ["sums", "words"]
        assert found[heat]["mean"] == pytest.approx(sum(t["al"] for t in tasks.values()) / 2)
        for task in tasks.values():
            assert task["interval"][0] <= task["al"] <= task["interval"][1] and task["same_text"]
    assert done.stdout.count("survival") == 2 and "mean of tasks" in done.stdout


@pytest.mark.parametrize(
    "arguments, word",
    [
        (["serve.py"], "--target"),
        (["serve.py", "--target", "nowhere", "--prompt", "a"], "nowhere"),
        (["serve.py", "--target", "T"], "nothing to continue"),
        (["serve.py", "--target", "T", "--eval", "none.jsonl"], "--drafter"),
        (["serve.py", "--target", "T", "--drafter", "D", "--eval", "none.jsonl"], "none.jsonl"),
        (["serve.py", "--target", "T", "--drafter", "nowhere", "--prompt", "a"], "nowhere"),
        (["serve.py", "--target", "T", "--drafter", "T", "--prompt", "a"], "architectures"),
        (["serve.py", "--target", "T", "--prompt", "a" * 60], "maximum length"),
        (["serve.py", "--target", "T", "--prompt", "a", "--max-new-tokens", "0"], "max_new_tokens"),
        (["serve.py", "--target", "T", "--prompt", "a", "--max-new-tokens", "many"], "invalid int"),
        (["serve.py", "--target", "T", "--prompt", "a", "--temprature", "1"], "--temperature"),
        (["serve.py", "--target", "T", "--prompt", "a", "--top-p", "0"], "top_p"),
        (["serve.py", "--target", "T", "--prompt", ""], "empty"),
        (["serve.py", "--target", "T", "--prompts", "none.jsonl"], "none.jsonl"),
        (["serve.py", "--target", "CUT", "--prompt", "a"], "damaged"),
        (["serve.py", "--target", "SHAPE", "--prompt", "a"], "shape"),
        (["train.py", "--mode", "sft"], "invalid choice"),
        (["train.py", "--step", "3"], "--steps"),
        (["train.py", "--steps", "0"], "--steps"),
        (["train.py", "--ways", "ce", "sft"], "--ways"),
        (["train.py", "--corpus", "EMPTY"], "empty"),
        (["train.py", "--corpus", "BAD"], "bad.jsonl:2"),
        (["train.py", "--config", "KEYS"], "num_anchors"),
        (["train.py", "--target", "nowhere"], "nowhere"),
        (["train.py", "--config", "MODE"], "mode = 'sft'"),
        (["train.py", "--target", "T", "--eval-tokens", "40"], "exceed"),
        (["serve.py", "--target", "T", "--prompt", "a", "--device", "tpu"], "--device"),
        (["serve.py", "--target", "T", "--prompt", "a", "--device", "cuda"], "CUDA"),
        (["serve.py", "--target", "T", "--prompt", "a", "--temperature", "nan"], "temperature"),
        (["serve.py", "--target", "LIST", "--prompt", "a"], "no JSON object"),
        (["bench.py", "swim"], "swim"),
        (["bench.py", "tree", "--repeats", "0"], "--repeats"),
        (["bench.py", "tree", "--trunk-length", "20"], "--num-anchors"),
        (["bench.py", "tree", "--trunk-length", "0"], "--trunk-length"),
        (["bench.py", "chains"], "--target"),
        (["bench.py", "speed"], "--drafters"),
        (["bench.py", "activity"], "--device cuda"),
        (["bench.py", "claims", "--studies", "gqa-25"], "gqa-24"),
        (["bench.py", "claims", "--studies", "given"], "--drafter"),
        (["bench.py", "claims", "--arms", "sft"], "specopd"),
        (["bench.py", "claims", "--seeds", "7"], "--seeds 7: there is 0, 1, 2"),
        (["bench.py", "claims", "--mode", "ce"], "--mode"),
        (["bench.py", "claims", "--anchors", "hard"], "--anchors hard"),
        (["train.py", "--ways", "ce", "rollout", "--anchors", "hard"], "--anchors hard"),
        (["train.py", "--anchors", "hard", "--mode", "rollout"], "--anchors"),
        (["confidence.py"], "--target"),
        (["serve.py", "--target", "T", "--prompt", "a", "--verify-by", "threshold"], "--drafter"),
        (
            [
                "serve.py",
                "--target",
                "T",
                "--drafter",
                "D",
                "--prompt",
                "a",
                "--verify-by",
                "threshold",
            ],
            "confidence.json",
        ),
        (["bench.py", "decode"], "--target"),
        (["bench.py", "al", "--target", "T"], "--tasks"),
        (["bench.py", "al", "--target", "T", "--drafters", "D", "--tasks", "none.jsonl"], "none.j"),
    ],
)
def test_bad_input_ends_in_one_clear_line_and_code_2(
    folders, tmp_path, monkeypatch, capsys, arguments, word
):
    target = folders / "target"
    cut, shape = (tmp_path / n for n in ("cut", "shape"))
    for copy in (cut, shape):
        copy.mkdir()
        for file in target.iterdir():
            (copy / file.name).write_bytes(file.read_bytes())
    weights = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    config = (shape / "config.json").read_text()
    (shape / "config.json").write_text(
        config.replace('"intermediate_size": 48', '"intermediate_size": 40')
    )
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n{"prompt": \n')
    (tmp_path / "keys.json").write_text('{"num_anchor": 3}')
    (tmp_path / "mode.json").write_text('{"mode": "sft"}')
    (tmp_path / "list").mkdir()
    (tmp_path / "list/config.json").write_text("[]")
    names = {
        "T": target,
        "D": folders / "drafter",
        "CUT": cut,
        "SHAPE": shape,
        "EMPTY": tmp_path / "empty.txt",
        "BAD": tmp_path / "bad.jsonl",
        "KEYS": tmp_path / "keys.json",
        "MODE": tmp_path / "mode.json",
        "LIST": tmp_path / "list",
    }
    before = sorted(tmp_path.rglob("*"))
    script, *rest = [names.get(a, a) for a in arguments]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [script, *map(str, rest)])
    try:
        code = files.run_command(importlib.import_module(script.removesuffix(".py")).main)
    except SystemExit as stop:  # what argparse does
        code = stop.code
    errors = capsys.readouterr().err
    assert code == 2 and len(errors.strip().splitlines()) == 1 and word in errors
    assert sorted(tmp_path.rglob("*")) == before  # nothing written, nothing lost


@pytest.mark.parametrize("script", ["serve.py", "train.py"])
def test_so_it_does_from_a_shell(tmp_path, script):
    done = run(ROOT / script, "--target", "nowhere", "--prompt", "a")
    assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1
    assert "Traceback" not in done.stderr


def test_the_readme_counts_the_lines_of_every_file():
    rows = re.findall(r"^\| (\w+\.py) \| (\d+) \|", (ROOT / "README.md").read_text(), re.M)
    counts = {f.name: len(f.read_text().splitlines()) for f in ROOT.glob("*.py")}
    assert {name: int(lines) for name, lines in rows} == counts
    assert all(lines <= (600 if name == "model.py" else 450) for name, lines in counts.items())


def test_what_gpu_sh_imports_is_there():
    lines = re.findall(r"^from \w+ import .*$", (ROOT / "gpu.sh").read_text(), re.M)
    assert len(lines) >= 3
    for line in lines:
        exec(line, {})
