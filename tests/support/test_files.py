"""Files are written whole or not at all."""

import pytest
import torch
from safetensors import safe_open

from hf.files import read_json
from support.files import atomic_write, write_json, write_tensors


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "x.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    with pytest.raises(RuntimeError), atomic_write(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert read_json(path) == {"a": 1}
    assert [f.name for f in tmp_path.iterdir()] == ["x.json"]


def test_tensors_are_written_with_metadata_as_json(tmp_path):
    path = tmp_path / "new" / "x.safetensors"
    matrix = torch.arange(6.0).view(2, 3)
    write_tensors(path, {"transposed": matrix.t().requires_grad_()}, {"made_with": {"seed": 3}})
    with safe_open(path, "pt") as file:
        assert torch.equal(file.get_tensor("transposed"), matrix.t())
        assert file.metadata() == {"format": "pt", "made_with": '{"seed": 3}'}
