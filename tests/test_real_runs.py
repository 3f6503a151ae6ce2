"""What a run of a real model is told: its preset, its source of AL, its first loss."""

import dataclasses

import pytest

import train
from small_runs import CONFIG
from support.flags import option_name
from support.measure import Measure
from support.report import quick_source, tell_first_loss
from train import TrainConfig


@pytest.mark.parametrize("count, words", [(96, "first 24 of"), (20, "first 8 of"), (5, "first 5")])
def test_an_al_while_training_says_of_how_many_prompts_it_is(count, words):
    measure = Measure([[1]] * count, 8, (), 0, f"{count} prompts")
    assert words in quick_source(measure) and quick_source(measure).endswith(f"{count} prompts")


CE = dataclasses.replace(CONFIG, mode="ce")


@pytest.mark.parametrize(
    "config, loss, is_told",
    [
        (CE, 67.0, True),
        (CE, 11.0, False),  # about ln V
        (dataclasses.replace(CE, drafter="x"), 67.0, False),
        (dataclasses.replace(CONFIG, mode="e2e"), 67.0, False),
    ],
)
def test_a_fresh_drafters_high_first_loss_is_explained(config, loss, is_told, capsys):
    tell_first_loss(config, loss, 49152)
    told = capsys.readouterr().out
    line = "a fresh drafter's first loss of 67 is above ln V = 10.8: its logits are not yet scaled"
    assert bool(told) == is_told and (not told or (line in told and told.count("\n") == 1))


def test_every_value_of_the_real_preset_is_in_its_table():
    table = (train.Path(train.__file__).parent / "docs/scale.md").read_text()
    table = table.split("<!-- real -->")[1].split("<!-- /real -->")[0]
    values = train.REAL | train.CONTINUED
    for name, value in values.items():
        number = value if isinstance(value, str) else f"{value:g}"
        assert f"\n| `{option_name(name)} {number}` | " in table
    assert table.count("\n|") == 2 + len(values)  # a head and a rule


def test_the_real_preset_cuts_no_length_and_leaves_the_rest_to_the_references():
    config = TrainConfig(**train.real({}))
    assert config.prompt_length == config.response_length == config.ce_decay == 0
