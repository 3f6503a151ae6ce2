"""What stands at the top level and who imports whom, read from the syntax trees.

python tests/test_house.py      prints the layers, bottom first, with what each module imports
"""

import ast
import importlib
import sys
from pathlib import Path

import pytest

from support import not_installable

ROOT = Path(__file__).parent.parent
CONCEPTS = ("tree", "replay", "model", "target", "drafter", "loss", "serve", "train")
DOORS = ("hf", "support", "lab")
AT_THE_BOTTOM = "chat cpu draft_length files flags gpu partings".split()  # of support
LAYERS = [  # a module imports from lower layers, or from its own entry here
    ("hf", *(f"support.{name}" for name in AT_THE_BOTTOM)),
    *((name,) for name in CONCEPTS[:7]),
    ("support",),
    ("train",),
    ("lab", "hf.__main__"),
]


def our_modules() -> dict[str, Path]:
    """{dotted name: file} of all Python outside tests."""
    files = [*ROOT.glob("*.py"), *(file for door in DOORS for file in (ROOT / door).rglob("*.py"))]
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files]
    return dict(zip((name.removesuffix(".__init__") for name in names), files))


MODULES = our_modules()


def imports_in(source: str) -> set[str]:
    """Our modules that a source imports, at the top or inside a function."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "an import is written with the module's whole name"
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            modules = inside & MODULES.keys()
            names |= modules or {node.module}
    return {name for name in names if name in MODULES}


IMPORTS = {name: imports_in(file.read_text()) for name, file in MODULES.items()}


def layer_of(module: str) -> tuple[int, str]:
    """-> (number of the layer, the entry of LAYERS that the module belongs to)."""
    entries = [(entry, number) for number, layer in enumerate(LAYERS) for entry in layer]
    fitting = [e for e in entries if f"{module}.".startswith(f"{e[0]}.")]
    assert fitting, f"{module} belongs to no layer"
    entry, number = max(fitting, key=lambda e: len(e[0]))
    return number, entry


def may_import(module: str, imported: str) -> bool:
    (number, entry), (below, other) = layer_of(module), layer_of(imported)
    return below < number or entry == other


def circle_in(imports: dict[str, set[str]]) -> list[str]:
    """A chain of modules that ends where it began, or nothing."""
    finished = set()

    def walk(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in finished:
            return []
        for imported in sorted(imports[module]):
            circle = walk(imported, [*path, module])
            if circle:
                return circle
        finished.add(module)
        return []

    for module in imports:
        circle = walk(module, [])
        if circle:
            return circle
    return []


def test_the_top_level_is_the_eight_concept_files():
    assert sorted(file.stem for file in ROOT.glob("*.py")) == sorted(CONCEPTS)
    folders = {f.name for f in ROOT.iterdir() if f.is_dir() and any(f.rglob("*.py"))}
    assert folders - {".venv"} == {*DOORS, "tests"}


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_from_lower_layers_alone(module):
    assert not [name for name in sorted(IMPORTS[module]) if not may_import(module, name)]


def test_an_import_that_climbs_is_noticed_inside_a_function_too():
    climbing = imports_in("import torch\n\ndef f():\n    from train import train\n")
    assert climbing == {"train"} and not may_import("loss", "train")
    assert imports_in("from support import flags, files\n") == {"support.flags", "support.files"}
    assert not may_import("support.flags", "support.files") and may_import("hf.tensors", "hf.files")
    assert not may_import("hf.config", "model") and may_import("hf.__main__", "serve")


def test_no_module_imports_itself_by_way_of_others():
    assert not circle_in(IMPORTS)
    assert circle_in({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]


def test_the_commands_common_part_knows_no_command():
    assert not [name for name in IMPORTS["lab.common"] if name.startswith("lab")]


@pytest.mark.parametrize("concept", CONCEPTS[:7])
def test_a_concept_file_knows_no_processes_and_no_flags(concept):
    """But for the command line of serve."""
    source = MODULES[concept].read_text()
    assert "torch.distributed" not in source
    flags = {"support.flags"} & IMPORTS[concept]
    assert concept == "serve" or not flags


def test_lab_lists_every_module_that_is_a_command():
    names = importlib.import_module("lab.__main__").COMMANDS
    commands = []
    for module in sorted(MODULES):
        tree = ast.parse(MODULES[module].read_text())
        defined = {getattr(node, "name", "") for node in tree.body}
        if module.startswith("lab.") and "run" in defined and ast.get_docstring(tree):
            commands.append(module.removeprefix("lab."))
    assert sorted(names) == commands


def test_whatever_is_imported_is_declared():
    """requirements.txt has what a run imports, requirements-dev.txt what tests and pictures need;
    the optional packages are imported inside functions."""
    optional = {"fla", "huggingface_hub"}
    declared = set()
    for name in ("requirements.txt", "requirements-dev.txt"):
        lines = (ROOT / name).read_text().splitlines()
        declared |= {line.split(">=")[0].strip() for line in lines if ">=" in line}
    imported = set()
    for file in MODULES.values():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            if isinstance(node, ast.ImportFrom):
                imported.add(node.module.split(".")[0])
    ours = {name.split(".")[0] for name in MODULES}
    assert imported - ours - set(sys.stdlib_module_names) - optional <= declared


def test_installing_the_repository_ends_in_one_sentence():
    with pytest.raises(SystemExit, match="run from its folder"):
        not_installable.get_requires_for_build_wheel()


def test_ruff_format_lays_out_every_line():
    skipped = "fmt: " + "skip"
    files = [*MODULES.values(), *(ROOT / "tests").rglob("*.py")]
    assert not [str(file) for file in files if skipped in file.read_text()]


def print_layers() -> None:
    for number, layer in enumerate(LAYERS):
        print(f"layer {number}: {', '.join(layer)}")
        for module in sorted(name for name in MODULES if layer_of(name)[0] == number):
            print(f"    {module:22s} <- {', '.join(sorted(IMPORTS[module])) or 'nothing of ours'}")
    print("circle:", " -> ".join(circle_in(IMPORTS)) or "none")


if __name__ == "__main__":
    print_layers()
