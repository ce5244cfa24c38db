#!/bin/bash
# Trains rows of the 2024 paper on one GPU, shortened to 22 minutes; see README.md.
# shellcheck source=benchmarks/gpu/common.sh
source "$(dirname "$0")/common.sh"
data=(--config.data.name=folder --config.data.data_dir=.gpu/data)
mixer=("${data[@]}") vit=("${data[@]}" --config.data.train_split='train[:10%]')
swept=("${data[@]}" --config.model.dtype=bfloat16)
mixer_row=configs/convmixer_2024.py:convmixer_256_8,3
vit_row=configs/vit_2024_small.py:cifar10,vit_tiny_patch2_32
if [ "$QUICK" ]; then
  small=(--config.num_steps=2 --config.batch_size=8 --config.model.depth=1)
  small+=(--config.data.train_split='train[:64]' --config.data.eval_split='test[:64]')
  mixer+=("${small[@]}") vit+=("${small[@]}") swept+=("${small[@]}")
fi

# Five seeds of every scheme in one program: cell A of protocol.md.
part sweep "$PYTHON" benchmarks/sweep.py --config=configs/vit_cifar10_small.py "${swept[@]}" \
  --scheme=default --scheme=mimetic --scheme=impulse --scheme=impulse_mimetic \
  --num_seeds="$([ "$QUICK" ] && echo 2 || echo 5)" --out="$OUT/sweep.json"
# 2024, table 2: a tenth of the images, 200 epochs, and their initializations.
for init in kaiming_uniform mimetic impulse_2024 impulse; do
  part "vit_$init" "$PYTHON" -m structinit_jax.main --config="$vit_row,$init" "${vit[@]}" \
    --workdir="$OUT/vit_$init"
done
# 2024, table 4: 100 epochs, if time allows. Every evaluation is in metrics.jsonl.
for filters in trained impulse_2024 random box; do
  part "mixer_$filters" "$PYTHON" -m structinit_jax.main --config="$mixer_row,$filters" \
    "${mixer[@]}" --workdir="$OUT/mixer_$filters"
done
finish
