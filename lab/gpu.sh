# Show what only a GPU can show, in nine minutes: sh lab/gpu.sh [OUT]
# OUT/results.md is a table, as it goes into docs/results.md, and then what every stage said. Targets
# of 1.2 and 1.6 G parameters are random: their speed is a trained one's, their AL is not.
# DEVICE=cpu tries the script itself, at tiny sizes. The seconds of all stages add up to 540.
set -u
out=${1:-runs/gpu}
export DEVICE="${DEVICE:-cuda}"
if [ -e "$out" ]; then
    echo "$out is there: name another folder, sh lab/gpu.sh OUT" >&2
    exit 2
fi
mkdir -p "$out"

stage() { # NAME SECONDS COMMAND...
    name=$1
    limit=$(($2 * patience))
    shift 2
    begin=$(date +%s)
    timeout -k 5 "$limit" "$@" >"$out/$name.txt" 2>&1
    code=$?
    line="$name: $(($(date +%s) - begin)) s of at most $limit, exit code $code"
    echo "$line" | tee -a "$out/stages.txt"
}

if [ "$DEVICE" = cpu ]; then
    patience=10
    tree="--trunk-length 96 --prompt-length 80 --num-anchors 8"
    texts="--trunk-length 48 --prompt-length 32 --num-anchors 8"
    run="--num-references 4 --prompt-length 16 --response-length 24 --batch-size 2 --num-anchors 4"
    steps=2
else
    patience=1
    tree="--trunk-length 2048 --prompt-length 1984 --num-anchors 64"
    texts="--trunk-length 192 --prompt-length 64 --num-anchors 64"
    run="--num-references 32 --batch-size 8 --num-anchors 64"
    steps=20
fi

stage kernels 70 python -m pytest -q -s -m slow tests/slow/test_gpu.py
stage models 60 python - "$out" <<'PYTHON'
import os
import sys

import torch

from drafter import Drafter
from support.toy import write_byte_tokenizer
from target import Target

out, device = sys.argv[1], os.environ["DEVICE"]
wide = dict(hidden_size=2048, intermediate_size=6144, num_attention_heads=16,
            num_key_value_heads=8, head_dim=128, num_hidden_layers=24,
            max_position_embeddings=4096)
linear = dict(linear_num_key_heads=16, linear_num_value_heads=32, linear_key_head_dim=128,
              linear_value_head_dim=128)
if device == "cpu":
    wide, linear = dict(num_hidden_layers=4), {}
for arch, changes in (("gqa", wide), ("gdn", wide | linear)):
    with torch.device(device):
        target = Target.toy(arch, **changes)
    for name, parameter in target.named_parameters():
        if not name.endswith(("A_log", "dt_bias")):
            parameter.data = parameter.data.bfloat16()
    write_byte_tokenizer(f"{out}/{arch}")
    target.save_pretrained(f"{out}/{arch}", eos_token_id=256, pad_token_id=257)
    target.num_tokens = 260
    Drafter.fresh(target, 5).save_pretrained(f"{out}/{arch}-drafter")
PYTHON
for arch in gqa gdn; do
    pair="--target $out/$arch --drafter $out/$arch-drafter --device $DEVICE --out $out/lab-$arch"
    limit=$([ $arch = gqa ] && echo 80 || echo 115)
    stage "throughput-$arch" "$limit" python -m lab throughput $pair $texts \
        --num-branches 1 2 4 --repeats 2 --precision bfloat16
    stage "tree-$arch" 25 python -m lab tree $pair $tree --repeats 3
done
for more in float32 bfloat16 recompute; do
    flags=$([ $more = recompute ] && echo "--recompute" || echo "--precision $more")
    made=$out/steps-float32/references.safetensors # by the first of the three
    if [ -f "$made" ]; then
        run="--references $made --batch-size ${run##*--batch-size }"
    fi
    stage "steps-$more" 35 python train.py --mode specopd --device "$DEVICE" $run --steps $steps \
        --target "$out/gqa" --drafter "$out/gqa-drafter" --num-eval-prompts 4 --eval-tokens 8 \
        --out "$out/steps-$more" $flags
done
stage smoke 45 python train.py --preset smoke --device "$DEVICE" --out "$out/smoke"

timeout 15 python - "$out" "$(git rev-parse --short HEAD 2>/dev/null)" <<'PYTHON'
import importlib.metadata
import json
import os
import platform
import sys
from pathlib import Path

import torch

out = Path(sys.argv[1])
on_gpu = os.environ["DEVICE"] != "cpu"
device = torch.cuda.get_device_name() if on_gpu else platform.machine()
installed = {name.metadata["Name"] for name in importlib.metadata.distributions()}
optional = sorted(installed & {"triton", "transformers", "flash-linear-attention"})
versions = [f"{name} {importlib.metadata.version(name)}" for name in ("torch", *optional)]
cuda = f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"
rows = [(f"version {sys.argv[2]}", f"{device}, Python {platform.python_version()}, "
         f"{', '.join(versions)}, {cuda}")]


def summary(folder: str) -> dict:
    path = out / folder / "summary.json"
    return json.loads(path.read_text()) if path.is_file() else {}


for line in (out / "kernels.txt").read_text().splitlines():
    if line.lstrip(".").startswith("| "):
        rows.append(line.strip("|. ").split(" | "))
for arch in ("gqa", "gdn"):
    figures = summary(f"lab-{arch}")
    for row in figures.get("tree", {}).get("rows", ()):
        ms = {name: 1e3 * times["median"] for name, times in row["times"].items()}
        rows.append((f"{arch}: {row['anchors']} branches on {row['trunk']:,} tokens",
                     f"packed {ms['packed']:.1f} ms, alone {ms['alone']:.0f} ms, "
                     f"gap of p {row['gap']:.1e}"))
    throughput = figures.get("throughput", {"rows": {}, "ratios": {}})
    for name, row in throughput["rows"].items():
        shares = ", ".join(f"{stage} {100 * x:.0f} %" for stage, x in row["shares"].items())
        active = f"; a kernel runs {100 * row['kernel_share']:.1f} %" if on_gpu else ""
        rows.append((f"{arch}: {name}", f"{row['tokens_per_s']:.0f} tokens/s{active}; {shares}"))
    for name, ratio in throughput["ratios"].items():
        rows.append((f"{arch}: best SpecOPD over {name}", f"{ratio['tokens_per_s']:.2f} times"))
for name in ("float32", "bfloat16", "recompute"):
    totals = summary(f"steps-{name}/specopd")
    if totals:
        speed = totals["supervised"] / totals["seconds"]
        rows.append((f"training, {name}", f"{speed:.0f} supervised tokens/s"))
rows += [line.split(": ", 1) for line in (out / "stages.txt").read_text().splitlines()]
table = ["| what | figure |", "|---|---|", *(f"| {what} | {figure} |" for what, figure in rows)]
print("\n".join(table))
said = [f"## {path.stem}\n\n```\n{path.read_text()[-6000:]}\n```" for path in out.glob("*.txt")]
(out / "results.md").write_text("\n".join(table) + "\n\n" + "\n\n".join(sorted(said)) + "\n")
PYTHON
