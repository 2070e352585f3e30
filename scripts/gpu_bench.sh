#!/usr/bin/env bash
# All that is to be measured on one big GPU, in under 8 minutes, from a folder of images: checks first, a table last.
#
#   scripts/gpu_bench.sh DATA [OUT]       DATA holds train/<class>/… and test/<class>/…; OUT gets JSON and text
#
# What is measured can be changed: FAST, FASTER, BASELINE and TUTORIAL name recipes, RUNS, RUNS_FASTER and RUNS_COLD
# count their trainings, EPOCHS_BASELINE and EPOCHS_TUTORIAL their epochs. EXTRA holds further flags for every training,
# TURNS those of `bench step`, INPUT, PROFILE and DEVICES those of these measurements. TINY=1 tries it all on a CPU.
set -euo pipefail
data=$1
out=${2:-results/gpu}
if [ -n "${TINY:-}" ]; then
    : "${ACCELERATOR:=cpu}" "${FAST:=tudui}" "${FASTER:=tudui}" "${BASELINE:=lenet}" "${RUNS:=2}" "${RUNS_FASTER:=1}"
    : "${RUNS_COLD:=1}" "${EPOCHS_BASELINE:=1}" "${EPOCHS_TUTORIAL:=1}" "${TURNS:=--steps 3 --rounds 2}"
    : "${INPUT:=--batch-size 50 --batches 2 --rounds 2}" "${PROFILE:=--warmup 2 --steps 3}"
    : "${DEVICES:=--batch-sizes 4 --widths 1 --warmup 2 --steps 3 --rounds 2}"
    : "${HAND:=--epochs 1}"
    : "${EXTRA:=--epochs 1 --trainer.limit_train_batches 3 --trainer.limit_val_batches 1 --trainer.limit_test_batches 1}"
fi
accelerator=${ACCELERATOR:-gpu}
fast=${FAST:-fast94} faster=${FASTER:-fast96} baseline=${BASELINE:-resnet18} tutorial=${TUTORIAL:-tudui}
images=(--dataset folder --data-dir "$data" --accelerator "$accelerator")
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
mkdir -p "$out"
failed=()

python -m cifar_lit devices | tee "$out/devices.txt"
python -m cifar_lit devices --check --accelerator "$accelerator" 2>&1 | tee "$out/check.txt" || failed+=(check)
if [ "$accelerator" = gpu ]; then python -m pytest -m gpu -rs tests; fi

measure() { # FILE MEASUREMENT FLAGS…
    local name=$1
    shift
    printf '\n[%d s] bench %s\n' "$SECONDS" "$*"
    if ! python -m cifar_lit bench "$@" --json "$out/$name.json" 2>&1 | tee "$out/$name.txt"; then failed+=("$name"); fi
}
train() { # FILE RECIPE RUNS FLAGS…
    local name=$1 recipe=$2 runs=$3
    shift 3
    # shellcheck disable=SC2086
    measure "$name" recipe "$recipe" --runs "$runs" "${images[@]}" --devices 1 --logs "$logs" ${EXTRA:-} "$@"
}
# shellcheck disable=SC2086
{
    measure step step --recipe "$fast" "${images[@]}" ${TURNS:-} # decodes the images, too
    measure profile profile --recipe "$fast" "${images[@]}" ${PROFILE:-}
    train fast "$fast" "${RUNS:-40}"
    measure hand hand --recipe "$fast" "${images[@]}" --runs "${RUNS:-40}" ${HAND:-} # the same by a bare loop
    train faster "$faster" "${RUNS_FASTER:-3}"
    train tutorial "$tutorial" 3 --epochs "${EPOCHS_TUTORIAL:-10}"
    measure cold cold --runs "${RUNS_COLD:-2}" --recipe "$fast" "${images[@]}" --devices 1 ${EXTRA:-}
    measure input input "${images[@]}" ${INPUT:-}
    measure devices devices "${images[@]}" --accelerator auto ${DEVICES:-}
    train baseline "$baseline" 1 --epochs "${EPOCHS_BASELINE:-60}" # the longest last, should time run out
}

printf '\n[%d s] the table\n' "$SECONDS"
python -m cifar_lit bench table "$out" || failed+=(table)
if [ ${#failed[@]} -gt 0 ]; then
    echo "failed: ${failed[*]}" >&2
    exit 1
fi
