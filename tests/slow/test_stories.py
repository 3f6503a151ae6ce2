"""The whole story in small, as a command: `python train.py --preset smoke`."""

import json

import pytest

from small import ROOT, run

pytestmark = pytest.mark.slow


def smoke(cwd, *flags):
    command = (ROOT / "train.py", "--preset", "smoke", "--out", cwd / "run", *flags)
    return run(*command, cwd=cwd, timeout=600)


def test_the_smoke_story_ends_with_its_table_and_is_not_done_twice(tmp_path):
    first = smoke(tmp_path)
    assert first.returncode == 0, first.stderr[-2000:]
    for words in ("Acceptance length", "SpecOPD", "Survival", "tokens/s", "python serve.py"):
        assert words in first.stdout
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert set(summary["rows"]) == {"fresh", "start", "ce", "e2e", "specopd"}
    assert f"{summary['rows']['specopd']['al_t0']:7.3f}" in first.stdout
    assert summary["decoding"]["same_text"] is True
    again = smoke(tmp_path)
    assert again.returncode == 0 and again.stdout.count("is there, kept") == 5
    other = smoke(tmp_path, "--num-anchors", "3")
    assert other.returncode == 2
    assert "num_anchors = 8, this run has 3" in other.stderr.splitlines()[-1]


@pytest.mark.parametrize("kind", ["dspark", "dflash2"])
def test_the_smoke_story_of_the_other_drafters(tmp_path, kind):
    done = smoke(tmp_path, "--drafter-kind", kind)
    assert done.returncode == 0, done.stderr[-2000:]
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert set(summary["rows"]) == {"fresh", "start", "ce", "e2e", "specopd"}
    assert summary["decoding"]["same_text"] is True
    log = (tmp_path / "run/start/log.jsonl").read_text().splitlines()
    assert ("coverage" in json.loads(log[-1])) == (kind == "dflash2")
    assert (tmp_path / "run/specopd/model.safetensors").is_file()
