"""Every command of `python -m lab` prints what it measured and writes it to summary.json; mistakes
end in one line with exit code 2. `pytest tests/lab/test_commands.py`"""

import json
import subprocess
import sys

import pytest

from lab import speed
from lab.__main__ import COMMANDS, main
from lab.common import StageClock, format_shares, median_time
from lab.throughput import Config, both_ways, covered
from small import ROOT, run


def read_summary(folder) -> dict:
    return json.loads((folder / "summary.json").read_text())


def write_tasks(folder, **tasks) -> list:
    paths = []
    for name, prompts in tasks.items():
        paths.append(folder / f"{name}.jsonl")
        paths[-1].write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in prompts))
    return paths


def test_the_commands_are_listed_one_line_each():
    listed = run("-m", "lab", cwd=ROOT)
    assert listed.returncode == 0, listed.stderr
    lines = [line.split(maxsplit=1) for line in listed.stdout.splitlines()[2:]]
    assert [name for name, _ in lines] == COMMANDS and all(len(title) > 20 for _, title in lines)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_explains_itself(lab, name):
    code, said, _ = lab(name, "--help")
    assert code == 0 and f"python -m lab {name}" in said and "--out" in said


# ------------------------------------------------------------------------------ what they print


@pytest.mark.parametrize("arch", ["gqa", "gdn"])
def test_tree_and_replay_print_every_size(lab, tmp_path, arch):
    small = ("--repeats", 1, "--out", tmp_path, "--arch", arch, "--num-draft-tokens", 3)
    sizes = ("--trunk-length", 24, 40, "--num-anchors", 2, 4, 8)
    code, said, error = lab("tree", *sizes, *small)
    assert code == 0, error
    rows = read_summary(tmp_path)["tree"]["rows"]
    grid = [(trunk, anchors) for trunk in (24, 40) for anchors in (2, 4, 8)]
    assert [(row["trunk"], row["anchors"]) for row in rows] == grid
    assert all(row["gap"] < 1e-5 and row["nodes"] == 2 * row["anchors"] for row in rows)
    assert said.count("R^2") == 2
    code, _, error = lab("replay", "--trunk-length", 40, "--num-anchors", 4, *small)
    if arch == "gqa":
        assert code == 2 and "linear layers" in error
        return
    assert code == 0, error
    figures = read_summary(tmp_path)
    rows = figures["replay"]["rows"]
    assert set(figures) == {"tree", "replay"} and rows[0]["spacing"] == 1
    assert all(row["gap"] < 1e-4 for row in rows)
    sizes = [row["states_bytes"] for row in rows]
    assert sizes == sorted(sizes, reverse=True)


def test_tree_hangs_a_drafters_branches(lab, folders, tmp_path):
    pair = ("--target", folders / "target", "--drafter", folders / "drafter", "--out", tmp_path)
    sizes = ("--trunk-length", 40, "--num-anchors", 4, "--prompt-length", 16, "--repeats", 1)
    code, said, error = lab("tree", *pair, *sizes)
    assert code == 0 and "branches of 4" in said, error
    assert all(row["gap"] < 1e-4 for row in read_summary(tmp_path)["tree"]["rows"])


def test_throughput_counts_the_same_kind_of_tokens_on_both_sides(lab, folders, tmp_path):
    pair = ("--target", folders / "target", "--drafter", folders / "drafter", "--out", tmp_path)
    sizes = ("--trunk-length", 40, "--prompt-length", 16, "--num-anchors", 8, "--repeats", 1)
    code, _, error = lab("throughput", *pair, *sizes)
    assert code == 0, error
    figures = read_summary(tmp_path)["throughput"]
    rows = figures["rows"]
    assert list(rows)[:3] == [f"rollouts, {n} at once" for n in (1, 8, 32)]
    for name, row in rows.items():
        is_rollout = name.startswith("rollouts")
        assert row["tokens_per_update"] > 0 and 0.5 < sum(row["shares"].values()) <= 1.001
        first = {"decode"} if is_rollout else {"prefill", "sample", "score"}
        assert set(row["shares"]) == first | {"loss", "backward", "update"}
        assert min(row["shares"].values()) > 0
    # anchors x branches x W, less what stop tokens cut
    assert 50 < rows["SpecOPD, 8 anchors x 2"]["tokens_per_update"] <= 8 * 2 * 4
    for name, ratio in figures["ratios"].items():
        product = ratio["updates_per_s"] * ratio["tokens_per_update"]
        assert ratio["tokens_per_s"] == pytest.approx(product) and name in rows


def test_throughput_trains_where_and_in_what_precision_it_is_told():
    ways = both_ways(Config(device="cuda", precision="bfloat16"))
    assert len(ways) == 5
    assert {(way.device, way.precision) for way in ways.values()} == {("cuda", "bfloat16")}


def test_al_compares_drafters_by_task(lab, folders, tmp_path):
    tasks = write_tasks(tmp_path, sums=["1 + 1", "2 + 2"], long=["a" * 30], words=["abc", "d", "h"])
    drafter = folders / "drafter"
    pair = ("--target", folders / "target", "--drafters", drafter, f"{drafter}/")
    sizes = ("--prompt-length", 20, "--max-new-tokens", 12, "--out", tmp_path / "b")
    code, said, error = lab("al", *pair, "--tasks", *tasks, *sizes)
    assert code == 0, error
    assert "left out: no prompt of at most 20 tokens" in said
    assert "2 prompts are all there are, of 64" in said
    assert said.count("+0.0 % [+0.00, +0.00]") == 2  # over itself
    assert said.count("survival") == 4 and said.count("mean of tasks") == 4
    figures = read_summary(tmp_path / "b")["al"]
    for temperature in ("t0", "t1"):
        row = figures[str(drafter)][temperature]
        assert list(row["tasks"]) == ["sums", "words"] and row["over_the_first"] is None
        mean = row["al"]["mean"]
        assert mean == pytest.approx((row["al"]["sums"] + row["al"]["words"]) / 2) and mean >= 1
        assert row["interval"][0] <= mean <= row["interval"][1] and f"{mean:.3f}" in said
        for name, task in row["tasks"].items():
            assert task["interval"][0] <= task["al"] <= task["interval"][1] and task["same_text"]
            assert task["al"] == row["al"][name] and len(task["survival"]) == 4
            assert task["tokens_per_s"] > 0 and task["plain_tokens_per_s"] > 0


def test_speed_has_an_arm_without_a_drafter_at_every_batch_size(lab, folders, tmp_path):
    pair = ("--target", folders / "target", "--drafters", folders / "drafter", "--out", tmp_path)
    sizes = ("--num-prompts", 4, "--prompt-length", 8, "--max-new-tokens", 10, "--repeats", 2)
    code, said, error = lab("speed", *pair, *sizes, "--concurrency", 1, 3)
    assert code == 0, error
    figures = read_summary(tmp_path)["speed"]
    sizes = ["1 at once", "3 at once"]
    assert list(figures) == [*sizes, "partings", "version", "machine", "config"]
    for size in ("1 at once", "3 at once"):
        arms = figures[size]["tasks"]["text"]
        assert all(arm["same_text"] for arm in arms.values())
        off, name, automatic = arms
        assert off == "off" and automatic == f"{name}, auto"
        ratio = arms[name]["tokens_per_s"] / arms["off"]["tokens_per_s"]
        assert figures[size]["geometric_means"][name] == pytest.approx(ratio)
        assert arms[name]["al"] >= 1 and arms["off"]["al"] == 1
    # one prompt at a time: the stages of a round
    assert said.count("ms a round: prefill") == 3 and "stages" not in figures["3 at once"]
    for shares in figures["1 at once"]["stages"].values():
        assert shares.pop("ms_per_round") > 0
        assert set(shares) == {"prefill", "draft", "score", "verify", "commit", "retire"}
        assert 0.5 < sum(shares.values()) <= 1 and min(shares.values()) >= 0


def test_figures_are_written_before_a_text_that_parts_is_an_error(tmp_path, monkeypatch):
    parting = {"prompt": 0, "token": 3, "margin": 2.0, "near_tie": False}
    monkeypatch.setattr(speed, "run", lambda config: {"al": 1.5, "partings": [parting]})
    monkeypatch.setattr(sys, "argv", ["lab", "speed", "--out", str(tmp_path)])
    with pytest.raises(ValueError, match="new token 3, margin 2.* a drafter must not change"):
        main()
    assert read_summary(tmp_path)["speed"]["al"] == 1.5


def test_the_picture_is_drawn(lab, tmp_path):
    pytest.importorskip("matplotlib")
    code, said, error = lab("picture", "--out", tmp_path)
    assert code == 0 and "tree.png" in said, error
    assert (tmp_path / "tree.png").read_bytes()[:4] == b"\x89PNG"
    assert not (tmp_path / "summary.json").exists()


def test_the_gpus_script_parses_and_leaves_a_folder_that_is_there_alone(tmp_path):
    script = str(ROOT / "lab" / "gpu.sh")
    assert subprocess.run(["sh", "-n", script]).returncode == 0
    done = subprocess.run(["sh", script, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 2 and f"{tmp_path} is there" in done.stderr
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------------------------------- clocks


def test_time_is_covered_once_however_many_kernels_run():
    assert covered([]) == 0 and covered([(0, 2), (1, 3), (1.5, 1.7), (5, 6)]) == 4


def test_a_clock_times_what_goes_through_it_and_changes_nothing_else():
    class Words(list):
        pass

    clock, words = StageClock(), Words(["b", "a"])
    with clock.watching(words, index="search"):
        assert clock("outer", lambda: [words.index("b"), words.index("a")]) == [0, 1]
        assert words.count("a") == 1
    once = dict(clock.seconds)
    assert list(once) == ["search", "outer"] and 0 < once["search"] < once["outer"]
    assert words.index("a") == 1 and clock.seconds == once  # no longer watched
    shares = clock.shares()
    assert 0 < shares["search"] < shares["outer"] < 1
    assert format_shares({"search": 0.123, "outer": 0.5}) == "search 12 %, outer 50 %"
    with pytest.raises(ValueError), clock.watching(words, index="search"):
        words.index("c")
    assert "index" not in vars(words)


def test_a_slow_call_is_not_repeated():
    calls = []
    times = median_time(lambda: calls.append(1), repeats=3)
    assert len(calls) == 4 and times["low"] <= times["median"] <= times["high"]
    median_time(lambda: calls.append(1), repeats=3, patience=0.0)
    assert len(calls) == 5


# -------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    "arguments, word",
    [
        ("swim", "swim"),
        ("speeed", "did you mean speed?"),
        ("tree --repeats 0", "--repeats"),
        ("tree --trunk-length 20", "--num-anchors"),
        ("tree --trunk-length 0", "--trunk-length"),
        ("tree --drafter D", "--target"),
        ("throughput", "--target"),
        ("throughput --target T --drafter D --trunk-length 70", "--num-anchors 64"),
        ("speed", "--drafters"),
        ("scale", "there is al, claims"),
        ("claims --studies gqa-25", "gqa, gdn"),
        ("claims --studies given", "--drafter"),
        ("claims --arms sft", "specopd"),
        ("claims --seeds -1", "--seeds"),
        ("claims --mode ce", "--mode"),
        ("al --target T", "--tasks"),
        ("al --target T --tasks none.jsonl", "--drafters"),
        ("al --target T --drafters D --tasks none.jsonl", "none.jsonl"),
        ("hf", "--target"),
        ("references", "--target"),
        ("plan --target 9B", "8B, 27B, 125B"),
        ("report --records none", "no records"),
    ],
)
def test_bad_input_ends_in_one_clear_line_and_code_2(
    lab, folders, tmp_path, monkeypatch, arguments, word
):
    names = {"T": folders / "target", "D": folders / "drafter"}
    monkeypatch.chdir(tmp_path)
    code, _, error = lab(*(names.get(word, word) for word in arguments.split()))
    assert code == 2 and len(error.strip().splitlines()) == 1 and word in error
    assert not list(tmp_path.iterdir())  # nothing is written
