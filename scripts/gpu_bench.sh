#!/usr/bin/env bash
# All that is to be measured on one big GPU, from a folder of images, as parts of under 9 minutes each: what is safest first.
#
#   scripts/gpu_bench.sh DATA [OUT] [PART …]      DATA holds train/<class>/… and test/<class>/…; OUT gets JSON, text and an archive
#
# A recipe's trainings go to RECIPE.json, which is the file that its header names. DATA100 holds CIFAR-100 as DATA holds CIFAR-10.
# PART: check (versions, self-check, one training each way, the GPU tests), step, fast94, airbench, variants, rest, fast100 (with
# DATA100), long; all if none is named. What fails, or takes longer than LIMIT seconds, is named at the end and stops nothing.
# FAST, FASTER, BASELINE and TUTORIAL name recipes, RUNS, RUNS_FASTER and RUNS_COLD count their trainings, EPOCHS_BASELINE and
# EPOCHS_TUTORIAL their epochs. EXTRA holds further flags for every training, TURNS those of `step.py`, INPUT and PROFILE those of
# `input.py` and `profile_step.py`, DEVICES those of `bench devices`. AIRBENCH names airbench94_muon.py, to be measured beside
# ours. TINY=1 tries it all on a CPU.
set -uo pipefail
data=$(realpath "$1")
data100=${DATA100:+$(realpath "$DATA100")}
out=$(realpath -m "${2:-$(dirname "$0")/../results/gpu}")
cd "$(dirname "$0")/.."
parts=("${@:3}")
[ ${#parts[@]} -gt 0 ] || parts=(check step fast94 airbench variants rest fast100 long)
if [ -n "${TINY:-}" ]; then
    : "${ACCELERATOR:=cpu}" "${FAST:=tudui}" "${FASTER:=tudui}" "${BASELINE:=lenet}" "${RUNS:=2}" "${RUNS_FASTER:=1}"
    : "${RUNS_COLD:=1}" "${EPOCHS_BASELINE:=1}" "${EPOCHS_TUTORIAL:=1}" "${TURNS:=--steps 3 --rounds 2}"
    : "${INPUT:=--batch-size 50 --batches 2 --rounds 2}" "${PROFILE:=--warmup 2 --steps 3}"
    : "${PADDED=}" "${DEVICES:=--epochs 1}"
    : "${EXTRA:=--epochs 1 --trainer.limit_train_batches 3 --trainer.limit_val_batches 1 --trainer.limit_test_batches 1}"
fi
accelerator=${ACCELERATOR:-gpu} limit=${LIMIT:-500}
fast=${FAST:-fast94} faster=${FASTER:-fast95 fast96} baseline=${BASELINE:-resnet18} tutorial=${TUTORIAL:-tudui}
images=(--dataset folder --data-dir "$data" --accelerator "$accelerator")
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
mkdir -p "$out"
failed=()

run() { # NAME COMMAND…: shown and kept in NAME.txt, never longer than the limit
    local name=$1
    shift
    printf '\n[%d s] %s\n' "$SECONDS" "$*"
    timeout --kill-after=20 "$limit" "$@" 2>&1 | tee "$out/$name.txt" || failed+=("$name")
}
bench() { # FILE MEASUREMENT FLAGS…
    run "$1" python3 -m cifar_lit bench "${@:2}" --json "$out/$1.json"
}
script() { # FILE SCRIPT FLAGS…
    run "$1" python3 "scripts/benchmarks/$2" "${@:3}" --json "$out/$1.json"
}
seeds() { # FILE RECIPE RUNS FLAGS…
    # shellcheck disable=SC2086
    bench "$1" recipe "$2" --runs "$3" "${images[@]}" --devices 1 --logs "$logs" ${EXTRA:-} "${@:4}"
}
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT

for part in "${parts[@]}"; do
    # shellcheck disable=SC2086
    case $part in
        check)
            run devices python3 -m cifar_lit devices
            run check python3 -m cifar_lit devices --check --accelerator "$accelerator"
            seeds eager "$fast" 1 --model.capture false
            seeds captured "$fast" 1
            seeds first "$fast" "${RUNS_FASTER:-3}"
            if [ "$accelerator" = gpu ]; then run tests python3 -m pytest -m gpu -rs tests; fi
            ;;
        step)
            script profile profile_step.py --recipe "$fast" "${images[@]}" ${PROFILE:-}
            script step step.py --recipe "$fast" "${images[@]}" ${TURNS:-}
            ;;
        fast94) seeds "$fast" "$fast" "${RUNS:-40}" ;;
        airbench) if [ -n "${AIRBENCH:-}" ]; then run airbench python3 "$AIRBENCH"; fi ;;
        variants)
            seeds fast-compile "$fast" "${RUNS_FASTER:-3}" --model.compile true
            seeds fast-eager "$fast" "${RUNS_FASTER:-3}" --model.capture false
            seeds fast-benchmark "$fast" "${RUNS_FASTER:-3}" --trainer.benchmark true
            # shellcheck disable=SC2086
            seeds fast-padded "$fast" "${RUNS_FASTER:-3}" ${PADDED---model.net_options.pad_input true}
            ;;
        rest)
            for recipe in $faster; do seeds "$recipe" "$recipe" "${RUNS_FASTER:-3}"; done
            seeds tutorial "$tutorial" 3 --epochs "${EPOCHS_TUTORIAL:-10}"
            script cold cold.py --runs "${RUNS_COLD:-2}" --recipe "$fast" "${images[@]}" --devices 1 ${EXTRA:-}
            script input input.py "${images[@]}" ${INPUT:-}
            bench devices devices ${DEVICES:-}
            ;;
        fast100) if [ -n "$data100" ]; then seeds fast100 fast100 "${RUNS_FASTER:-3}" --data-dir "$data100"; fi ;;
        long) seeds "$baseline" "$baseline" 1 --epochs "${EPOCHS_BASELINE:-60}" ;;
        *)
            echo "no part is called $part: there are check, step, fast94, airbench, variants, rest, fast100 and long" >&2
            exit 2
            ;;
    esac
done

printf '\n[%d s] the table\n' "$SECONDS"
python3 scripts/benchmarks/table.py "$out" | tee "$out/table.md" || failed+=(table)
tar -C "$out" -czf "$out.tar.gz" .
echo "everything is in $out.tar.gz"
if [ ${#failed[@]} -gt 0 ]; then
    echo "failed: ${failed[*]}" >&2
    exit 1
fi
