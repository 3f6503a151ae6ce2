"""Loading what is large shows a bar, on one process."""

import pytest

import hf.tensors
from small import small_target
from target import Target


@pytest.mark.parametrize(
    "large, rank, is_shown", [(100, "0", True), (100, "1", False), (10**6, "0", False)]
)
def test_a_large_model_is_loaded_with_a_bar(tmp_path, monkeypatch, capfd, large, rank, is_shown):
    small_target().save_pretrained(tmp_path / "model")
    monkeypatch.setattr(hf.tensors, "LARGE", large)
    monkeypatch.setenv("RANK", rank)
    Target.from_pretrained(tmp_path / "model")
    shown = capfd.readouterr().err
    assert ("loading model: " in shown and " numbers/s" in shown) == is_shown
