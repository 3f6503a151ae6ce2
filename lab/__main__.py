"""Measurements and studies, one command each.

    python -m lab                 lists the commands
    python -m lab NAME --help     explains one and its flags
    pytest tests/lab

A command is a module lab/NAME.py with a docstring, a `Config` of flags and `run(config)`. The
figures that it returns are printed by it and written here, to summary.json in --out. What it found
of greedy texts that part from plain decoding ("partings") is checked after that.
"""

import dataclasses
import difflib
import importlib
import sys
from pathlib import Path

from hf.files import read_json
from lab.common import machine, version
from support.files import write_json
from support.flags import parse_flags, run_command
from support.partings import check_partings

COMMANDS = (
    "al claims hf picture plan prompts references replay report roofline speed throughput "
    "trace tree"
).split()


def main():
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("-h", "--help"):
        print("python -m lab NAME [flags]     (NAME --help explains one)\n")
        for name in COMMANDS:
            title = importlib.import_module(f"lab.{name}").__doc__.splitlines()[0]
            print(f"  {name:12s}{title}")
        return
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there is {', '.join(COMMANDS)}"
        raise ValueError(f"python -m lab {name} is no command: {hint}")
    command = importlib.import_module(f"lab.{name}")
    title = f"python -m lab {name}"
    config = parse_flags(command.Config, command.__doc__, sys.argv[2:], name=title)
    figures = command.run(config)
    if figures is not None:
        path = Path(config.out) / "summary.json"
        summary = read_json(path) if path.is_file() else {}  # of other commands, too
        made_by = {"version": version(), "machine": machine()}
        summary[name] = figures | made_by | {"config": dataclasses.asdict(config)}
        write_json(path, summary)
        check_partings(figures.get("partings", []))


if __name__ == "__main__":
    sys.exit(run_command(main))
