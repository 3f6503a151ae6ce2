"""Files that are missing or spoiled, and folders that a hub would have."""

import sys

import pytest

from hf.files import model_folder, open_tensors, read_json


@pytest.mark.parametrize("text, word", [("{", "not valid JSON"), ("[]", "holds no JSON object")])
def test_a_file_that_is_no_json_object_is_an_error_that_names_it(tmp_path, text, word):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"config.json.*{word}"):
        read_json(path)


@pytest.mark.parametrize("inside", ["%s", '{"text_config": %s}', '{"shards": [%s]}'])
def test_a_key_with_two_values_in_one_object_is_an_error(tmp_path, inside):
    path = tmp_path / "config.json"
    path.write_text(inside % '{"head_dim": 8, "head_dim": 16}')
    with pytest.raises(ValueError, match="config.json: key head_dim is given twice, 8 and 16"):
        read_json(path)
    path.write_text(inside % '{"head_dim": 8, "head_dim": 8.0}')
    assert "8.0" in str(read_json(path))


def test_a_byte_order_mark_is_no_error_and_other_bytes_are(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"name": "ä"}', "utf-8-sig")
    assert read_json(path) == {"name": "ä"}
    path.write_bytes(b"\xff\xfe{}")
    with pytest.raises(ValueError, match="config.json is not valid JSON"):
        read_json(path)


def test_a_missing_file_is_told_apart_from_a_missing_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match="config.json is missing$"):
        read_json(tmp_path / "config.json")
    with pytest.raises(FileNotFoundError, match="no such folder"):
        read_json(tmp_path / "none" / "config.json")


def test_a_file_without_tensors_is_an_error_that_names_it(tmp_path):
    path = tmp_path / "model.safetensors"
    with pytest.raises(FileNotFoundError, match="model.safetensors is missing"):
        open_tensors(path)
    path.write_bytes(b"nothing")
    with pytest.raises(ValueError, match="model.safetensors is damaged"):
        open_tensors(path)


def test_a_hubs_name_without_the_hubs_client_is_a_clear_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # as if it were not installed
    with pytest.raises(FileNotFoundError, match="pip install huggingface_hub"):
        model_folder("some/model-that-is-nowhere")
