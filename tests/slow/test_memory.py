"""Peak memory of loading a target and of a long prefill, each in a process of its own (Linux)."""

import json
import sys

import pytest
from safetensors.torch import load_file, save_file

from small import ROOT, run, small_target

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="reads peak memory from /proc"),
]
PRELUDE = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
import torch
from small import peak_memory, reset_peak_memory, small_target
from target import Target
torch.set_num_threads(1)
"""
LOADING = f"""{PRELUDE}
arch, folder, dtype = sys.argv[1:]
with torch.device("meta"):  # what torch itself loads at first use
    Target.toy(arch)
torch.randn(1000).bfloat16().aminmax()
before = peak_memory()
target = Target.from_pretrained(folder, dtype=getattr(torch, dtype, None))
sizes = {{id(tensor): tensor.nbytes for tensor in target.state_dict().values()}}.values()
print(peak_memory() - before, sum(sizes), max(sizes))
"""
PREFILL = f"""{PRELUDE}
arch, T = sys.argv[1], int(sys.argv[2])
target = small_target(arch=arch, max_position_embeddings=1 << 20)
target.prefill(torch.zeros(1, 64).long(), torch.tensor([64]))
reset_peak_memory()
before = peak_memory()
tokens = torch.zeros(1, T).long() + 3
target.prefill(tokens, torch.tensor([T]), chunk=128, checkpoint_every=0)
print(peak_memory() - before)
"""


def numbers(code: str, *arguments) -> list[int]:
    finished = run("-c", code, *arguments)
    assert finished.returncode == 0, finished.stderr
    return [int(word) for word in finished.stdout.split()]


def shard(folder, max_bytes: float) -> None:
    """Split model.safetensors into files of about max_bytes with an index."""
    files = [{}]
    num_bytes = 0
    for name, tensor in load_file(folder / "model.safetensors").items():
        if num_bytes > max_bytes:
            files.append({})
            num_bytes = 0
        files[-1][name] = tensor
        num_bytes += tensor.nbytes
    weight_map = {}
    for number, tensors in enumerate(files):
        file = f"model-{number:05d}.safetensors"
        save_file(tensors, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors").unlink()
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("dtype", ["None", "bfloat16"])
@pytest.mark.parametrize("arch", ["gqa", "qsa"])
def test_loading_takes_the_model_and_its_largest_tensor(tmp_path, arch, dtype):
    sizes = dict(hidden_size=768, intermediate_size=2048, num_hidden_layers=8, vocab_size=30_000)
    if arch == "qsa":
        sizes |= dict(moe_intermediate_size=256, num_experts=16, num_hidden_layers=4)
    small_target(arch=arch, **sizes).save_pretrained(tmp_path)
    shard(tmp_path, 40e6)
    used, model, largest = numbers(LOADING, arch, tmp_path, dtype)
    stored = largest * (2 if dtype == "bfloat16" else 1)  # the largest as the file holds it
    print(f"{arch} {dtype}: {used / 1e6:.0f} MB for {model / 1e6:.0f} + {stored / 1e6:.0f}")
    assert used < model + stored + 10e6


@pytest.mark.parametrize("arch", ["gdn", "qsa"])
def test_memory_of_a_long_prefill_grows_with_its_length_not_its_square(arch):
    T = 16_384
    [used] = numbers(PREFILL, arch, T)
    print(f"{arch}: {used / 1e6:.0f} MB for {T:,} tokens; a mask of T x T: {T * T / 1e6:.0f} MB")
    assert used < 0.6 * T * T  # what is kept of the text is 40 to 110 MB, as the allocator likes
