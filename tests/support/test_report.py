"""What is printed of a run and of the story: each figure is that of the counts it comes from."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from small_runs import CONFIG
from support.measure import TEMPERATURES, Acceptance, Measure
from support.report import TITLES, print_outcome, report

MEASURE = Measure([[1]] * 12, 8, (), 0, "12 prompts of somebody")
BEST = {"step": 2, "al": 2.5}
DONE = {"step": 4, "al_t0": 2.0, "al_t1": 3.0, "best": BEST, "by_task_t1": {"sums": 2.5}}


def counted(seed: int, num_prompts: int = 12) -> Acceptance:
    """What a decoding of some prompts might have counted."""
    generator = torch.Generator().manual_seed(seed)
    rounds = torch.randint(4, 9, (num_prompts,), generator=generator)
    committed = rounds + torch.randint(1, 20, (num_prompts,), generator=generator)
    survived = torch.randint(0, 4, (num_prompts, 4), generator=generator)
    return Acceptance(committed, rounds, rounds, torch.zeros(num_prompts), survived, 1.0)


def reported(out, capsys, partings=()) -> tuple[dict, str]:
    """-> the story's summary, and what was printed."""
    lengths = {
        name: {t: counted(10 * number + int(t), 8 if name == "fresh" else 12) for t in TEMPERATURES}
        for number, name in enumerate(TITLES)
    }
    run = {"step": 4, "supervised": 300, "seconds": 2.0, "nodes": 60, "unmerged": 80}
    totals = {name: run for name in TITLES if name != "fresh"}
    speeds = {"plain": 200.0, "speculative": 500.0, "same_text": True, "partings": list(partings)}
    config = dataclasses.replace(CONFIG, mode="story", target="", references="")
    report(config, MEASURE, out, lengths, totals, speeds, 77.0)
    summary = json.loads((out / "summary.json").read_text())
    for name, row in summary["rows"].items():
        assert row["al_t1"] == lengths[name][1.0].mean
    return summary, capsys.readouterr().out


def test_the_storys_table_shows_the_figures_of_its_summary(tmp_path, capsys):
    summary, printed = reported(tmp_path, capsys)
    lines = printed.splitlines()
    for name, row in summary["rows"].items():
        title = TITLES[name].format(8)
        al, at_0, at_1 = (line.removeprefix(title) for line in lines if line.startswith(title))
        assert f"{row['al_t0']:.3f}" in al and f"{row['al_t1']:.3f}" in al
        assert [float(x) for x in at_0.split()] == pytest.approx(row["survival_t0"], abs=6e-4)
        assert [float(x) for x in at_1.split()] == pytest.approx(row["survival_t1"], abs=6e-4)
        assert (al.split()[-1] == "150") == (name != "fresh")  # supervised tokens per second
        has_gain = "over_start_t0" in row
        assert has_gain == (name not in ("fresh", "start")) == ("%" in al)
        if has_gain:
            assert f"{row['over_start_t1']['percent']:+5.1f} %" in al
    over = summary["rows"]["specopd"]["over_ce_t0"]["percent"]
    assert f"SpecOPD over continued CE: T = 0 {over:+5.1f} %" in printed
    assert "merging saved 25.0 % of the trees' nodes" in printed
    assert "plain 200 tokens/s, speculative 500, 2.50 times as fast" in printed
    assert f"--references {tmp_path}/references.safetensors --drafter {tmp_path}/start" in printed


def test_the_figures_are_written_before_a_text_that_parts_is_an_error(tmp_path, capsys):
    parting = {"prompt": 3, "token": 7, "margin": 2.0, "near_tie": False}
    with pytest.raises(ValueError, match="a drafter must not change the text"):
        reported(tmp_path, capsys, [parting])
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["decoding"]["partings"] == [parting]
    assert "NO NEAR-TIE" in capsys.readouterr().out


@pytest.mark.parametrize(
    "totals, shown, not_shown",
    [
        (DONE, "is done: AL by temperature 2.000 at 0, 3.000 at 1.", "stopped"),
        (DONE, "at 1 by task: sums 2.500", "at 0 by task"),
        (DONE, "The best mean was at step 2: here/specopd/best", "stopped"),
        (DONE, "--drafters start here/specopd\n", "stopped"),
        (DONE, "AL is measured on the first 8 of 12 prompts of somebody", "stopped"),
        ({"step": 3, "best": {}}, "stopped at step 3 of 4; the same command goes on", "is done"),
    ],
)
def test_a_run_says_how_it_ended(capsys, totals, shown, not_shown):
    config = dataclasses.replace(CONFIG, drafter="start")
    print_outcome(config, MEASURE, Path("here"), totals)
    printed = capsys.readouterr().out
    assert shown in printed and not_shown not in printed
    assert json.loads(printed.splitlines()[0]) == totals
