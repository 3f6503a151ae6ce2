"""What a GPU refuses, and how often the host waits for it, on a pretended CUDA device: tensors that
say cuda:0, hold their data on the host and refuse to meet others. The device is a folder with
fakecuda.py and guard.cpp, named by PRETEND_CUDA:

PRETEND_CUDA=FOLDER pytest -m slow tests/slow/test_pretended_gpu.py
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from small import ARCHS, ROOT

# How often the host waits for the device, for each of ARCHS. A wait more is a pause of the device
# in every step or round, so a number may only go down. A rollout's are those outside its rounds.
WAITS = {
    "float32": {
        "sent": (0, 0, 0),
        "prefill": (1, 1, 5),  # four products by expert are made one by one in float32
        "propose": (1, 1, 1),
        "tree": (2, 2, 2),
        "score": (0, 1, 5),
        "round": (1, 1, 5),
        "ce": (2, 2, 6),
        "e2e": (2, 2, 6),
        "specopd": (5, 6, 14),
        "rollout": (9, 9, 13),
    },
    "bfloat16": {
        "sent": (0, 0, 0),
        "prefill": (1, 1, 1),
        "propose": (1, 1, 1),
        "tree": (2, 2, 2),
        "score": (0, 1, 1),
        "round": (1, 1, 1),
        "ce": (2, 2, 2),
        "e2e": (2, 2, 2),
        "specopd": (5, 6, 6),
        "rollout": (9, 9, 9),
    },
}

TOOL = Path(os.environ.get("PRETEND_CUDA", ROOT.parent / "shared" / "tools" / "pretend_cuda"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (TOOL / "guard.cpp").is_file(), reason="PRETEND_CUDA names no pretended device"
    ),
    pytest.mark.skipif(not shutil.which("g++"), reason="the pretended device needs g++"),
]


@pytest.fixture(scope="module")
def there(tmp_path_factory):
    """A function that runs Python code on the pretended device -> its process."""
    library = tmp_path_factory.mktemp("pretended") / "guard.so"
    own = Path(torch.__file__).parent
    includes = [f"-I{own}/include", f"-I{own}/include/torch/csrc/api/include"]
    links = [f"-L{own}/lib", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{own}/lib"]
    source = ["-shared", "-fPIC", "-std=c++20", TOOL / "guard.cpp", "-o", library]
    subprocess.run(["g++", *source, *includes, *links], check=True)
    environment = {
        "PYTHONPATH": os.pathsep.join(map(str, (TOOL, ROOT, ROOT / "tests"))),
        "PRETEND_CUDA_GUARD": str(library),
        "H5ROOT": str(ROOT),  # calls from files below it are named
        "OMP_NUM_THREADS": "1",
    }

    def run(code: str) -> subprocess.CompletedProcess:
        code = f"import fakecuda; fakecuda.install(); {code}"
        how = dict(cwd=ROOT, env=os.environ | environment, capture_output=True, text=True)
        return subprocess.run([sys.executable, "-c", code], **how)

    return run


@pytest.fixture(scope="module", params=ARCHS)
def found(request, there) -> tuple[str, dict]:
    """An architecture, and what was found there in float32 and bfloat16."""
    done = there(f"import pretended_gpu; pretended_gpu.main({request.param!r})")
    assert done.returncode == 0, done.stderr
    return request.param, json.loads(done.stdout.splitlines()[-1])


def test_no_tensor_and_no_generator_meets_one_of_another_device(found):
    _, by_dtype = found
    assert {dtype: row["faults"] for dtype, row in by_dtype.items()} == {
        "float32": [],
        "bfloat16": [],
    }


def test_the_host_waits_for_the_device_as_often_as_the_table_says(found):
    arch, by_dtype = found
    column = ARCHS.index(arch)
    for dtype, row in by_dtype.items():
        wanted = {name: counts[column] for name, counts in WAITS[dtype].items()}
        assert row["waits"] == wanted, (dtype, row["sites"])


@pytest.mark.parametrize(
    "mistake, words",
    [
        ("torch.ones(2, device='cuda') + torch.ones(2)", "meets cuda"),
        ("torch.rand(2, device='cuda', generator=torch.Generator())", "CPU generator"),
    ],
)
def test_a_mistake_is_noticed(there, mistake, words):
    done = there(f"import torch; {mistake}")
    assert done.returncode != 0 and words in done.stderr
