#!/usr/bin/env bash
# What only a GPU can show: its tests, the two-minute recipes and the ResNet-18 baseline, from a folder of images.
#
#   scripts/gpu_check.sh DATA [OUT]       DATA holds train/<class>/… and test/<class>/…; OUT gets the results
#
# EPOCHS_RESNET=1 EPOCHS=1 ACCELERATOR=cpu EXTRA="--trainer.limit_train_batches 3" tries it on a machine without one.
set -euo pipefail
data=$1
out=${2:-results/gpu}
accelerator=${ACCELERATOR:-gpu}
logs=$(mktemp -d)
mkdir -p "$out"

python -m cifar_lit devices | tee "$out/devices.txt"
python -m cifar_lit devices --check --accelerator "$accelerator" | tee "$out/check.txt"
if [ "$accelerator" = gpu ]; then python -m pytest -m gpu -rs tests; fi

run() { # NAME RECIPE FLAGS…
    local name=$1 recipe=$2
    shift 2
    # shellcheck disable=SC2086
    python scripts/train.py --recipe "$recipe" --accelerator "$accelerator" --devices 1 --logs "$logs/$name" "$@" ${EXTRA:-} \
        | tee "$out/$name.txt" | tail -n 12
    cp "$logs/$name"/*/metrics.json "$out/$name.json"
}
run quickstart quickstart
run tudui tudui --dataset folder --data-dir "$data" --epochs "${EPOCHS:-10}"
run folder folder --data-dir "$data" --epochs "${EPOCHS:-20}"
run resnet18 resnet18 --dataset folder --data-dir "$data" --epochs "${EPOCHS_RESNET:-200}"

printf '\n%-12s %-10s %10s %12s\n' recipe test seconds images/s
for file in "$out"/*.json; do
    python - "$file" <<'PY'
import json, sys
found = json.load(open(sys.argv[1]))
print(f"{found['recipe']:<12} {found['test']['accuracy']:<10.4f} {found['train_seconds']:>10.1f} {found['images_per_second']:>12,.0f}")
PY
done
