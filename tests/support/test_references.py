"""References in their file, and written in parts."""

import pytest
import torch

from support.files import write_tensors
from support.references import References, load_held_out, write_in_parts


def test_references_round_trip_and_say_how_they_were_made(tmp_path):
    made = References.from_lists([[1, 2], [3], [4]], [[5, 6], [7, 8, 9], [1]], pad_id=0)
    assert made.lengths.tolist() == [4, 4] and made.prompt_lengths.tolist() == [2, 1]
    assert made.sizes() == "2 references, prompts of 1 to 2 and responses of 2 to 3 tokens"
    made.save(tmp_path / "r.safetensors", {"seed": 3})
    again = References.load(tmp_path / "r.safetensors", {"seed": 3})
    assert torch.equal(again.tokens, made.tokens) and torch.equal(again.lengths, made.lengths)
    with pytest.raises(ValueError, match="seed = 3"):
        References.load(tmp_path / "r.safetensors", {"seed": 4})
    with pytest.raises(ValueError, match="nothing to supervise"):
        References.from_lists([[1]], [[2]], 0)


def test_prompts_that_are_held_out_travel_in_the_file_of_references(tmp_path):
    made = References.from_lists([[1]], [[5, 6]], pad_id=0)
    path = tmp_path / "r.safetensors"
    made.save(path, {})
    assert load_held_out(path) == []  # as in an old file
    made.save(path, {}, [[7], [8, 9, 0]])
    assert load_held_out(path) == [[7], [8, 9, 0]]
    assert References.load(path).tokens.tolist() == [[1, 5, 6]]


@pytest.mark.parametrize("lengths", [[3], [0, 2], [2, 4]])
def test_lengths_that_do_not_fit_the_held_out_prompts_are_an_error(tmp_path, lengths):
    tensors = {"held_out_tokens": torch.ones(2, 3), "held_out_lengths": torch.tensor(lengths)}
    write_tensors(tmp_path / "r.safetensors", tensors, {})
    with pytest.raises(ValueError, match="held-out prompts do not fit"):
        load_held_out(tmp_path / "r.safetensors")


def test_references_of_a_server_fit_any_target(tmp_path):
    made = References.from_lists([[1]], [[5, 6]], pad_id=0)
    made.save(tmp_path / "r.safetensors", {"target": None})
    References.load(tmp_path / "r.safetensors", {"target": 12345})
    made.save(tmp_path / "r.safetensors", {"target": 1})
    with pytest.raises(ValueError, match="target = 1"):
        References.load(tmp_path / "r.safetensors", {"target": 12345})


def test_parts_are_written_by_length_kept_and_put_back_in_order(tmp_path):
    prompts = [[1, 1, 1], [2], [3, 3], [4], [5, 5]]
    asked = []

    def write(part, numbers, fails_at=3):
        if len(asked) == fails_at:
            raise KeyboardInterrupt
        asked.append(numbers)
        return [[10 * number, 7] for number in numbers]

    how = (tmp_path / "parts", {"seed": 0}, prompts)
    with pytest.raises(KeyboardInterrupt):
        write_in_parts(*how, lambda *part: write(*part, fails_at=2), size=2, most=4, alone=True)
    responses = write_in_parts(*how, write, size=2, most=4, alone=True)
    assert asked == [[1, 3], [2, 4], [0]]  # the first two were not written again
    assert responses == [[10 * number, 7] for number in range(5)]
    with pytest.raises(ValueError, match="seed = 0"):
        write_in_parts(tmp_path / "parts", {"seed": 1}, prompts, write, 2, 4, alone=True)
    (tmp_path / "parts" / "000001.json").write_text("{}")
    with pytest.raises(ValueError, match="3 responses to 5 prompts: remove it"):
        write_in_parts(*how, write, size=2, most=4, alone=True)
