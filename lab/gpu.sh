# What only a GPU can show, in under ten minutes: sh gpu.sh
# Packed = alone in bfloat16, the small story, SpecOPD against rollouts on targets of 1.2 and 1.6 G numbers
# (random ones: their speed is a trained one's, their acceptance length is not), with and without
# --compile. Not yet run: no GPU was at hand.
set -eu
out=${1:-runs/gpu}
python -m pytest -q -s tests/test_gpu.py
python train.py --preset smoke --device cuda --out "$out/smoke"
python - "$out" <<'PYTHON'
import sys
from drafter import Drafter
from target import Target
from tokenizer import write_byte_tokenizer

out = sys.argv[1]
for arch, layers in (("gqa", 24), ("gdn", 24)):
    wide = dict(hidden_size=2048, intermediate_size=6144, num_attention_heads=16,
                num_key_value_heads=8, head_dim=128, num_hidden_layers=layers)
    if arch == "gdn":
        wide |= dict(linear_num_key_heads=16, linear_num_value_heads=32, linear_key_head_dim=128,
                     linear_value_head_dim=128)
    target = Target.toy(arch, **wide)
    for name, parameter in target.named_parameters():
        if not name.endswith(("A_log", "dt_bias")):
            parameter.data = parameter.data.bfloat16()
    write_byte_tokenizer(f"{out}/{arch}")
    target.save_pretrained(f"{out}/{arch}", eos_token_id=256, pad_token_id=257)
    target.num_tokens = 260
    Drafter.fresh(target, 5).save_pretrained(f"{out}/{arch}-drafter")
PYTHON
for arch in gqa gdn; do
    given="--target $out/$arch --drafter $out/$arch-drafter --device cuda --repeats 3"
    python bench.py tree $given --trunk-length 2048 --num-anchors 64 --out "$out/bench-$arch"
    python bench.py throughput $given --trunk-length 512 --num-anchors 64 --num-branches 4 --out "$out/bench-$arch"
    python bench.py activity $given --trunk-length 512 --num-anchors 64 --num-branches 4 --out "$out/bench-$arch"
done
for more in "" --compile "--precision bfloat16" "--recompute"; do
    python train.py --mode specopd --device cuda --target "$out/gqa" --drafter "$out/gqa-drafter" \
        --num-references 32 --batch-size 8 --num-anchors 64 --steps 20 --eval-prompts 4 \
        --eval-tokens 8 --out "$out/steps$(echo "$more" | tr -d ' ')" $more
done
