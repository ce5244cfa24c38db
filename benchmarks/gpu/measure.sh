#!/bin/bash
# Measures the package on one GPU, in about 7 minutes; see README.md.
# shellcheck source=benchmarks/gpu/common.sh
source "$(dirname "$0")/common.sh"
digits=(--config=configs/vit_t_digits.py)
speed=(--dtype=bfloat16 --torch_python="${TORCH_PYTHON:-$PYTHON}" --rounds=3 --steps=20)
kills=5 steps=300 models=(ViT-T/16 ViT-S/16 ViT-B/16)
rows=("ViT-B/16 128" "ViT-S/16 256" "ViT-Ti/16 512" "ViT-T/2 at 32² 512")
[ -z "${BIG_VISION:-}" ] || speed+=(--big_vision="$BIG_VISION")
if [ "$QUICK" ]; then
  digits+=(--config.num_steps=4)
  speed+=(--rounds=1 --steps=1)
  kills=1 models=(ViT-T/16)
  rows=("ViT-Ti/16 2" "ViT-T/2 at 32² 2")
fi

part devices "$PYTHON" -c 'import jax; print(jax.__version__, jax.devices())'
part digits "$PYTHON" -m structinit_jax.main "${digits[@]}" --workdir="$OUT/digits"
# Killed and resumed: all arrays and metrics must be bit-identical.
XLA_FLAGS=--xla_gpu_deterministic_ops=true \
  part soak "$PYTHON" benchmarks/soak.py --kills="$kills" --steps="$steps" --out="$OUT/soak.json"
for row in "${rows[@]}"; do
  name=${row% *}
  file=$(tr -cd 'A-Za-z0-9' <<<"$name")
  part "speed_$file" "$PYTHON" benchmarks/train_step.py "${speed[@]}" --programs all \
    --rows "$name" --batch="${row##* }" --out="$OUT/speed_$file.json"
done
part solve "$PYTHON" benchmarks/solve.py --models "${models[@]}" --out="$OUT/solve.json"
part profile "$PYTHON" -m structinit_jax.main "${digits[@]}" --workdir="$OUT/profile" \
  --config.num_steps=20 --profile_step=5
finish
