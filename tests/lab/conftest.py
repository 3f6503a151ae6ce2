"""The fixture that all tests of lab/ take."""

import sys

import pytest

from lab.__main__ import main
from support.flags import run_command


@pytest.fixture
def lab(monkeypatch, capsys):
    """`python -m lab` in this process: arguments -> exit code, standard output, standard error."""

    def call(*arguments) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["lab", *map(str, arguments)])
        try:
            code = run_command(main)
        except SystemExit as stop:  # argparse ends so
            code = stop.code
        return code, *capsys.readouterr()

    return call
