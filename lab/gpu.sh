# Show what only a GPU can show: sh lab/gpu.sh [OUT]
# Packed = alone in bfloat16, the small story, SpecOPD against rollouts on random targets of 1.2 and
# 1.6 G parameters (their speed is a trained one's, their acceptance length is not), and training with
# and without bfloat16 and recomputation. Not yet run: no GPU was at hand.
set -eu
out=${1:-runs/gpu}
python -m pytest -q -s -m slow tests/slow/test_gpu.py
python train.py --preset smoke --device cuda --out "$out/smoke"
python - "$out" <<'PYTHON'
import sys

from drafter import Drafter
from support.toy import write_byte_tokenizer
from target import Target

out = sys.argv[1]
wide = dict(hidden_size=2048, intermediate_size=6144, num_attention_heads=16,
            num_key_value_heads=8, head_dim=128, num_hidden_layers=24)
linear = dict(linear_num_key_heads=16, linear_num_value_heads=32, linear_key_head_dim=128,
              linear_value_head_dim=128)
for arch, changes in (("gqa", wide), ("gdn", wide | linear)):
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
    pair="--target $out/$arch --drafter $out/$arch-drafter --device cuda --repeats 3"
    python -m lab tree $pair --trunk-length 2048 --num-anchors 64 --out "$out/lab-$arch"
    python -m lab throughput $pair --trunk-length 512 --num-anchors 64 --num-branches 1 2 4 \
        --out "$out/lab-$arch"
done
for more in "" "--precision bfloat16" "--recompute"; do
    python train.py --mode specopd --device cuda --target "$out/gqa" --drafter "$out/gqa-drafter" \
        --num-references 32 --batch-size 8 --num-anchors 64 --steps 20 --eval-prompts 4 \
        --eval-tokens 8 --out "$out/steps$(echo "$more" | tr -d ' ')" $more
done
