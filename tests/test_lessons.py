"""Each concept file is a lesson. Those of serve.py and train.py stand in their own tests. `pytest
tests/test_lessons.py`"""

import importlib
import re

import pytest
import torch

from small import ROOT, run

LESSONS = {
    "tree": ["merge=False: 9 nodes", "merge=True: 6 nodes"],
    "replay": ["S_7 in one product", "packed - alone"],
    "model": ["largest difference"],
    "target": ["10 nodes scored in one pass", "|packed - alone| is at most"],
    "drafter": ["block@3 block@6", "DFlash 2  y_1 = 101"],
    "loss": ["0.886    1.46", "0.221    4.11", "E2E-TV"],
}


@pytest.mark.parametrize("name", LESSONS)
def test_a_lesson_shows_its_idea_in_numbers(capsys, name):
    with torch.set_grad_enabled(name == "loss"):
        importlib.import_module(name).main()
    printed = capsys.readouterr().out
    for words in LESSONS[name]:
        assert words in printed
    gaps = re.findall(r"(?:largest difference|is at most)\D*(\d\S*e-\d+)", printed)
    assert all(float(gap) < 1e-5 for gap in gaps)
    assert gaps or name in ("tree", "drafter", "loss")


@pytest.mark.slow
@pytest.mark.parametrize("name", LESSONS)
def test_a_lesson_runs_from_any_folder_and_writes_nothing(tmp_path, name):
    done = run(ROOT / f"{name}.py", cwd=tmp_path)
    assert done.returncode == 0 and not done.stderr
    for words in LESSONS[name]:
        assert words in done.stdout
    assert not list(tmp_path.iterdir())
