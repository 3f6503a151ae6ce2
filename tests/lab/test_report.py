"""results.md from records of one version. `pytest tests/lab/test_report.py`"""

import re

import pytest
import torch

from lab import report
from lab.claims import to_counts
from support.files import write_json
from support.measure import Acceptance

MADE_BY = {"version": "abc1234", "machine": {"processor": "P", "threads": 1, "torch": "2"}}


def seed_of(lift: float) -> dict:
    """An arm's record of one seed, whose AL is 2 + lift."""
    rounds = torch.full((5,), 10)
    committed = (rounds * (2 + lift)).round()
    survived = torch.linspace(9, 3, 7).expand(5, 7)
    fresh = torch.stack([committed, rounds], 1)
    counts = Acceptance(committed, rounds, rounds, torch.zeros(5), survived, 1.0, fresh=fresh)
    als = [[step, step / 2, 2 + lift, 1.5] for step in (50, 100)]
    curve = {"loss": [[25, 0.5], [50, 0.4]], "al": als}
    al = {"t0": to_counts(counts), "t1": to_counts(counts)}
    return {"step": 100, "seconds": 50.0, "al": al, "curve": curve}


def study_record(name: str, **changes) -> dict:
    lifts = {"start": 0.0, "ce": 0.1, "e2e": 0.3, "specopd": 0.5, "e2e, same time": 0.4}
    lifts["ce, own rate"] = 0.2
    arms = {arm: {"20": seed_of(x), "21": seed_of(x + 0.1)} for arm, x in lifts.items()}
    return {"study": name, "arms": arms} | MADE_BY | changes


def write_records(folder, *records) -> None:
    for record in records:
        write_json(folder / f"{record['study']}.json", record)


def test_all_is_written_from_the_records(lab, tmp_path):
    pytest.importorskip("matplotlib")
    records, out = tmp_path / "records", tmp_path / "docs"
    names = ("gqa", "gdn", "gqa-dspark", "few", "long")
    write_records(records, *map(study_record, names))
    readme = tmp_path / "R.md"
    readme.write_text(f"before\n{report.BEGIN}old\n{report.END}\nafter\n")
    code, said, error = lab("report", "--records", records, "--out", out, "--readme", readme)
    assert code == 0 and "abc1234" in said, error
    text = (out / "results.md").read_text()
    assert "Version abc1234" in text
    assert "| specopd | 2 | 100 | 50 | 2.550 | +24.4 % [+0.50, +0.50] |  +8.5 % " in text
    assert "| e2e, same time | 2 |" in text and text.count("Not measured in this version.") == 8
    for name in re.findall(r"\]\((pictures/[^)]+)\)", text):
        assert (out / name).stat().st_size > 1000, name
    assert len(list((out / "pictures").glob("*.png"))) == 5
    table = readme.read_text()
    assert table.startswith("before\n") and table.endswith("after\n") and "old" not in table
    assert "| + SpecOPD | 2.550 | +24.4 % [+0.50, +0.50] |" in table


@pytest.mark.parametrize(
    "change, words",
    [
        ({"version": "other12"}, "of several versions .other12: few; abc1234: gqa.: run the older"),
        ({"version": ""}, "several versions"),
        ({}, None),
    ],
)
def test_records_of_several_versions_are_refused(tmp_path, change, words):
    write_records(tmp_path, study_record("gqa"), study_record("few", **change))
    records = report.load_records(tmp_path)
    if words is None:
        assert report.check_one_version(records) == "abc1234"
        return
    with pytest.raises(ValueError, match=words):
        report.check_one_version(records)


@pytest.mark.parametrize("version", ["abc1234-dirty", ""])
def test_records_of_code_that_is_not_committed_are_refused(tmp_path, version):
    write_records(tmp_path, study_record("gqa", version=version))
    with pytest.raises(ValueError, match="commit the code, then measure"):
        report.check_one_version(report.load_records(tmp_path))


def test_a_folder_without_records_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="holds no records: `python -m lab claims` writes them"):
        report.load_records(tmp_path)
