"""Flags come from a dataclass; what a user gets wrong is one line and code 2."""

from dataclasses import dataclass

import pytest
import torch

import lab.al
import lab.plan
import lab.speed
import lab.tree
import train
from serve import ServeConfig
from support.flags import (
    Stopped,
    check_ranges,
    flag,
    option_name,
    parse_flags,
    precision_of,
    run_command,
    unmet_needs,
)


@dataclass(frozen=True)
class Flags:
    num_steps: int = flag(3, "steps", group="the recipe", low=1)
    merge: bool = flag(True, "merge", group="the rest")
    name: str = flag("x", "a 100% name", group="the recipe")
    kind: str = flag("a", "kind", group="the recipe", choices=("a", "b"))
    sizes: tuple = flag((1, 2), "sizes", group="the rest", kind=int, low=1)


def test_flags_come_from_the_dataclass_and_later_sources_win(tmp_path):
    assert parse_flags(Flags, "", []) == Flags()
    path = tmp_path / "run.json"
    path.write_text('{"num_steps": 5, "name": "y"}')
    arguments = ["--config", str(path), "--name", "z", "--no-merge"]
    assert parse_flags(Flags, "", arguments) == Flags(5, False, "z")
    presets = {"quick": {"num_steps": 1, "kind": "b"}}
    arguments = ["--preset", "quick", "--config", str(path)]
    assert parse_flags(Flags, "", arguments, presets) == Flags(5, name="y", kind="b")


def test_help_shows_flags_in_groups(capsys):
    with pytest.raises(SystemExit) as error:
        parse_flags(Flags, "", ["--help"])
    recipe, rest = capsys.readouterr().out.split("the recipe:\n")[1].split("the rest:\n")
    assert error.value.code == 0
    assert "--num-steps N" in recipe and "a 100% name (default: x)" in recipe
    assert "--merge, --no-merge" in rest and "sizes (default: 1 2)" in rest


def test_a_mistyped_flag_gets_a_suggestion(capsys):
    with pytest.raises(SystemExit) as error:
        parse_flags(Flags, "", ["--num-step", "4"])
    assert error.value.code == 2 and "did you mean --num-steps?" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text, word",
    [
        ('{"num_setps": 5}', "did you mean num_steps"),
        ('{"num_steps": "5"}', "num_steps = '5'"),
        ('{"num_steps": 2.5}', "no int"),
        ('{"merge": 1}', "no bool"),
        ("[1]", "no JSON object"),
        ('{"num_steps": true}', "no int"),
        ('{"kind": "c"}', "there is a, b"),
        ('{"sizes": [1, "2"]}', "each must be of int"),
        ("{", "not valid JSON"),
    ],
)
def test_a_mistake_in_a_config_file_is_named(tmp_path, text, word):
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=word):
        parse_flags(Flags, "", ["--config", str(path)])


def test_a_value_below_its_smallest_is_an_error():
    with pytest.raises(ValueError, match="--num-steps 0: at least 1"):
        check_ranges(Flags(num_steps=0))
    with pytest.raises(ValueError, match="--sizes 0: at least 1"):
        parse_flags(Flags, "", ["--sizes", "4", "0"])


MEANINGLESS = [  # a command, its flags, the one that means nothing beside the others
    (train.TrainConfig, "--mode ce --loss tv --num-branches 7", "--num-branches"),
    (train.TrainConfig, "--mode ce --loss tv", "--loss"),
    (train.TrainConfig, "--mode e2e --num-greedy 1", "--num-greedy"),
    (train.TrainConfig, "--mode e2e --no-merge", "--merge"),
    (train.TrainConfig, "--mode rollout --num-anchors 4", "--num-anchors"),
    (train.TrainConfig, "--mode specopd --ce-decay 7", "--ce-decay"),
    (train.TrainConfig, "--mode ce --num-branches 1", "--num-branches"),
    (train.TrainConfig, "--branch-temperature 0 --num-branches 1 --num-greedy 1", "--num-greedy"),
    (train.TrainConfig, "--mode specopd --warm-steps 7", "--warm-steps"),
    (train.TrainConfig, "--mode ce --branch-temperature 0.5", "--branch-temperature"),
    (train.TrainConfig, "--mode ce --target x --arch gdn", "--arch"),
    (train.TrainConfig, "--mode ce --target x --target-steps 9", "--target-steps"),
    (train.TrainConfig, "--stop-after 3", "--stop-after"),
    (train.TrainConfig, "--references x.jsonl --num-references 9", "--num-references"),
    (train.TrainConfig, "--mode ce --references x.safetensors --response-length 9", "--response"),
    (train.TrainConfig, "--skip-bad-lines", "--skip-bad-lines"),
    (train.TrainConfig, "--markov-head rnn", "--markov-head"),
    (train.TrainConfig, "--rank 8", "--rank"),
    (train.TrainConfig, "--drafter-kind dflash2 --detach-confidence never", "--detach-conf"),
    (lab.plan.Config, "--mode ce --num-branches 4", "--num-branches"),
    (ServeConfig, "--target x --draft-length 3", "--draft-length"),
    (ServeConfig, "--target x --drafter y --top-k 3", "--top-k"),
    (lab.al.Config, "--temperatures 0 --top-p 0.9", "--top-p"),
    (lab.speed.Config, "--chat-template-args {}", "--chat-template-args"),
    (lab.tree.Config, "--target x --arch gdn", "--arch"),
    (lab.tree.Config, "--drafter y --num-draft-tokens 4", "--num-draft-tokens"),
]


@pytest.mark.parametrize("config_class, line, name", MEANINGLESS, ids=[x[1] for x in MEANINGLESS])
def test_a_flag_that_means_nothing_beside_the_others_is_an_error(config_class, line, name):
    with pytest.raises(ValueError, match=f"{name}.* means nothing here: it needs"):
        parse_flags(config_class, "", line.split())


MEANINGFUL = [
    (train.TrainConfig, "--mode specopd --loss tv --num-branches 7 --num-anchors 3"),
    (train.TrainConfig, "--mode ce --drafter-kind dspark --branch-temperature 0.5"),
    (train.TrainConfig, "--mode specopd --drafter-kind dspark --ce-decay 7"),
    (train.TrainConfig, "--mode ce --drafter x --rank 8 --detach-confidence never"),
    (train.TrainConfig, "--mode rollout --references x.safetensors --response-length 9"),
    (train.TrainConfig, "--mode ce --references x.jsonl --response-length 9 --skip-bad-lines"),
    (lab.plan.Config, "--target x --references x.safetensors --num-references 9"),
    (ServeConfig, "--target x --temperature 1 --top-k 3"),
    (lab.al.Config, "--temperatures 0 1 --top-p 0.9"),
]


@pytest.mark.parametrize("config_class, line", MEANINGFUL, ids=[x[1] for x in MEANINGFUL])
def test_flags_that_mean_something_together_are_taken(config_class, line):
    parse_flags(config_class, "", line.split())


def test_what_a_preset_or_a_file_sets_in_vain_is_named(tmp_path, capsys):
    path = tmp_path / "run.json"
    path.write_text('{"num_branches": 4, "loss": "tv", "mode": "specopd"}')
    line = ["--config", str(path), "--mode", "ce", "--preset", "smoke", "--target", "x"]
    parse_flags(train.TrainConfig, "", line, {"smoke": train.SMOKE})
    (printed,) = capsys.readouterr().out.splitlines()
    assert "ignored" in printed
    for name in ("--num-branches", "--loss", "--target-steps", "--target-layers", "--warm-steps"):
        assert name in printed
    assert "--num-anchors" not in printed
    parse_flags(train.TrainConfig, "", ["--preset", "smoke"], {"smoke": train.SMOKE})
    assert not capsys.readouterr().out


def test_every_need_names_flags_that_exist_and_help_says_it(capsys):
    for config_class in (train.TrainConfig, ServeConfig, lab.al.Config, lab.tree.Config):
        with pytest.raises(SystemExit):
            parse_flags(config_class, "", ["--help"])
        text = "".join(capsys.readouterr().out.split())  # lines break at hyphens
        for names, words, _ in config_class.NEEDS:
            assert "".join(words.split()) in text.split("needs", 1)[1]
            assert all(option_name(name) in text for name in names.split())
    story = train.TrainConfig(drafter_kind="dspark", corpus="x", mode="story")
    assert unmet_needs(story).keys() == {"stop_after", "chat_template_args"}


@dataclass(frozen=True)
class Here:
    device: str = flag("cpu", "device")


@dataclass(frozen=True)
class Elsewhere(Here):
    RUNS_ELSEWHERE = True


def test_a_device_must_be_here_unless_the_command_is_about_another_machine(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert parse_flags(Elsewhere, "", ["--device", "cuda"]).device == "cuda"
    with pytest.raises(ValueError, match="no CUDA device"):
        parse_flags(Here, "", ["--device", "cuda"])
    for config_class in (Here, Elsewhere):
        with pytest.raises(ValueError, match="there is cpu, and cuda"):
            parse_flags(config_class, "", ["--device", "tpu"])


def test_auto_is_the_device_that_is_here_and_the_default():
    here = "cuda" if torch.cuda.is_available() else "cpu"
    assert parse_flags(Here, "", ["--device", "auto"]).device == here
    assert train.TrainConfig().device == here


@pytest.mark.parametrize(
    "device, precision, expected",
    [
        ("cuda:1", "", "bfloat16"),
        ("cpu", "", "float32"),
        ("cuda", "float32", "float32"),
        ("cpu", "bfloat16", "bfloat16"),
    ],
)
def test_the_drafters_arithmetic_is_bfloat16_on_cuda_unless_named(device, precision, expected):
    config = train.TrainConfig(device=device, precision=precision)
    assert precision_of(config) == expected


def test_a_preset_may_depend_on_the_flags_given(tmp_path):
    fresh = parse_flags(train.TrainConfig, "", ["--preset", "real"], train.PRESETS)
    line = ["--preset", "real", "--drafter", "x", "--lr", "0.5"]
    continued = parse_flags(train.TrainConfig, "", line, train.PRESETS)
    assert (fresh.matrix_lr, fresh.lr) == (0.01, 1e-3)
    assert (continued.matrix_lr, continued.lr) == (0.003, 0.5)
    (tmp_path / "c.json").write_text('{"drafter": "x", "lr": 0.5}')
    line = ["--preset", "real", "--config", str(tmp_path / "c.json")]
    assert parse_flags(train.TrainConfig, "", line, train.PRESETS) == continued
    assert fresh.prompt_length == 0 and fresh.num_anchors == 64


@pytest.mark.parametrize("text", ["-1", "mask", "1.5"])
def test_a_row_for_mask_is_an_id_or_auto(text):
    with pytest.raises(ValueError, match=f"--mask-token-id {text}: give an id or auto"):
        train.TrainConfig(mask_token_id=text)


OUT_OF_MEMORY = "out of memory, take fewer at once (of --batch-size"


@pytest.mark.parametrize(
    "error, code, words",
    [
        (MemoryError(), 2, OUT_OF_MEMORY),
        (torch.OutOfMemoryError("CUDA out of memory"), 2, OUT_OF_MEMORY),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 2, OUT_OF_MEMORY),
        (ValueError("--steps 0:\n at least 1"), 2, "error: --steps 0: at least 1"),
        (FileNotFoundError("x is missing"), 2, "error: x is missing"),
        (Stopped("asked to end"), 143, "asked to end"),
        (KeyboardInterrupt(), 130, "stopped"),
    ],
    ids=repr,
)
def test_what_a_user_can_cause_is_one_line(capsys, error, code, words):
    def main():
        raise error

    assert run_command(main) == code
    text = capsys.readouterr().err
    assert words in text and len(text.strip().splitlines()) == 1


def test_a_bug_keeps_its_traceback():
    with pytest.raises(RuntimeError, match="a bug"):
        run_command(lambda: (_ for _ in ()).throw(RuntimeError("a bug")))
