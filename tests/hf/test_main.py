"""`python -m hf FOLDER`."""

import pytest
import torch

from hf import load_tokenizer
from hf.__main__ import greet, main
from small import ARCHS, SMALL_OF, run, small_target
from support.flags import run_command
from support.toy import write_byte_tokenizer
from target import Target


def saved(folder, arch: str) -> None:
    target = small_target(arch=arch, vocab_size=264)
    write_byte_tokenizer(folder)
    target.save_pretrained(folder, eos_token_id=256, pad_token_id=257)


@pytest.mark.parametrize("arch", ARCHS)
def test_a_folder_is_described_and_says_hello(tmp_path, capsys, arch):
    saved(tmp_path, arch)
    main(str(tmp_path))
    printed = capsys.readouterr().out
    target = Target.from_pretrained(tmp_path)
    count = sum(parameter.numel() for parameter in target.parameters())
    assert f"parameters  {count:,}" in printed
    assert f"layers      {SMALL_OF[arch]['num_hidden_layers']}: " in printed
    assert "tokenizer   258 ids of 264 rows, without chat template" in printed
    assert ("of gated delta net" in printed) == (arch != "gqa")
    assert ("residual streams" in printed) == (arch == "qsa")
    assert "\n\nHello!" in printed


def test_the_greeting_is_what_the_plain_forward_says(tmp_path, capsys):
    saved(tmp_path, "gqa")
    target, tokenizer = Target.from_pretrained(tmp_path), load_tokenizer(tmp_path)
    greet(target, tokenizer)
    ids = tokenizer.encode("Hello!")
    while len(ids) < 26 and ids[-1] not in tokenizer.stop_ids:
        ids.append(int(target(torch.tensor([ids]))[0, -1].argmax()))
    expected = tokenizer.decode([i for i in ids if i not in tokenizer.stop_ids])
    assert capsys.readouterr().out == f"{expected}\n"


def test_without_a_folder_there_is_one_line():
    finished = run("-m", "hf")
    line = "python -m hf: error: the following arguments are required: folder (see --help)\n"
    assert (finished.returncode, finished.stderr) == (2, line)


def test_a_wrong_folder_is_one_line_and_code_2(tmp_path, capsys):
    assert run_command(lambda: main(str(tmp_path))) == 2
    assert capsys.readouterr().err == f"error: {tmp_path}/config.json is missing\n"
