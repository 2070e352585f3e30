#!/usr/bin/env bash
# What only a GPU can show: its tests, the two-minute recipes and the ResNet-18 baseline, from a folder of images.
#
#   scripts/gpu_check.sh DATA [OUT]       DATA holds train/<class>/… and test/<class>/…; OUT gets the results
#
# What fails, or takes longer than LIMIT seconds, is named at the end and stops nothing.
# EPOCHS_RESNET=1 EPOCHS=1 ACCELERATOR=cpu EXTRA="--trainer.limit_train_batches 3" tries it on a machine without one.
set -uo pipefail
data=$(realpath "$1")
out=$(realpath -m "${2:-$(dirname "$0")/../results/gpu}")
cd "$(dirname "$0")/.."
accelerator=${ACCELERATOR:-gpu} limit=${LIMIT:-900}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
mkdir -p "$out"
failed=()

run() { # NAME COMMAND…: its last lines are shown, all are kept in NAME.txt
    local name=$1
    shift
    printf '\n[%d s] %s\n' "$SECONDS" "$*"
    timeout --kill-after=20 "$limit" "$@" 2>&1 | tee "$out/$name.txt" | tail -n 15 || failed+=("$name")
}
train() { # RECIPE FLAGS…
    local recipe=$1
    shift
    # shellcheck disable=SC2086
    run "$recipe" python3 scripts/train.py --recipe "$recipe" --accelerator "$accelerator" --devices 1 --logs "$logs/$recipe" "$@" ${EXTRA:-}
    cp "$logs/$recipe"/*/metrics.json "$out/$recipe.json"
}
run devices python3 -m cifar_lit devices
run check python3 -m cifar_lit devices --check --accelerator "$accelerator"
train quickstart
train tudui --dataset folder --data-dir "$data" --epochs "${EPOCHS:-10}"
if [ "$accelerator" = gpu ]; then run tests python3 -m pytest -m gpu -rs tests; fi
train folder --data-dir "$data" --epochs "${EPOCHS:-20}"
train resnet18 --dataset folder --data-dir "$data" --epochs "${EPOCHS_RESNET:-200}"

python3 scripts/benchmarks/table.py "$out"
if [ ${#failed[@]} -gt 0 ]; then
    echo "failed: ${failed[*]}" >&2
    exit 1
fi
