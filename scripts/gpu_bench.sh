#!/usr/bin/env bash
# Measure the recipes on one large GPU, in parts of less than 8 minutes.
#
#   scripts/gpu_bench.sh DATA [OUT] [PART …]
#
# DATA holds the unpacked archive of CIFAR-10 (cifar-10-batches-py/), the archive itself, or folders of images. Results
# go to OUT (default: results/gpu) as JSON and text, and all of OUT to OUT.tar.gz. The script needs `python3`, torch and
# this project's dependencies, but no network. Parts may run in separate calls, on separate machines. The JSON file of a
# `bench recipe` that was stopped has the finished seeds. Called again, it trains the others if LOGS is still there.
#
# Parts, by default all of them in this order:
#   check                 a test of the device, the first trainings of an eager and a compiled net, the GPU tests
#   fast94                the recipe with 40 seeds; fast94.txt also shows recompilations of the net
#   airbench              AIRBENCH on the same data
#   step                  profile of a step; steps under the Trainer against a plain loop, compiled and eager
#   variants              fast94 without compilation, with eager steps, without cuDNN's benchmark, with padded channels
#   fast95, fast96, fast97    the recipes with 20, 12 and 4 seeds
#   fast100               the recipe with 40 seeds, on DATA100
#   resnet18, resnet18-uncompiled, resnet18-eager     one training of 200 epochs each
#   resnet18_30           the recipe with 4 seeds; resnet18_30_c100 the same on DATA100
#   rest                  the recipe tudui, input pipelines, the CPU against the GPU
#
# A measurement that fails, or takes more than LIMIT seconds, is named at the end; the others still run. LIMIT is 200 by
# default, or the time of the part if the measurement is alone in it. After PART_SECONDS (450), the rest of a part is
# skipped, and named at the end.
#
# Further variables:
#   DATASET       data set in DATA: cifar10 if there are files of its archive, otherwise folder; shapes needs no DATA
#   DATA100       the same for CIFAR-100; without it there is no part fast100
#   AIRBENCH      path of K. Jordan's airbench94_muon.py; without it there is no part airbench
#   RUNS          number of seeds of each recipe
#   LOGS          folder for run folders (default: lightning_logs)
#   EXTRA         further flags of all trainings
#   TURNS         further flags of step.py and profile_step.py
#   ACCELERATOR   gpu (default) or cpu
#   TINY          if set, tries everything on a CPU, with three small steps per training
set -uo pipefail

usage="usage: scripts/gpu_bench.sh DATA [OUT] [PART …]"
data=$(realpath -e -- "${1:?$usage}") || exit 2
out=$(realpath -m -- "${2:-$(dirname "$0")/../results/gpu}")
data100=${DATA100:+$(realpath -- "$DATA100")}
airbench=${AIRBENCH:+$(realpath -- "$AIRBENCH")}
logs=$(realpath -m -- "${LOGS:-$(dirname "$0")/../lightning_logs}")
cd "$(dirname "$0")/.." || exit 2

dataset() { # FOLDER NAME PREFIX: NAME if the folder has files of the archive with this prefix
    if compgen -G "$1/$3*" > /dev/null; then echo "$2"; else echo folder; fi
}
images=(--dataset "${DATASET:-$(dataset "$data" cifar10 cifar-10-)}" --data-dir "$data")
images100=(--dataset "$(dataset "$data100" cifar100 cifar-100-)" --data-dir "$data100")

[ "${images[1]}" = cifar10 ] || airbench=
parts=(check fast94 ${airbench:+airbench} step variants fast95 fast96 fast97 ${data100:+fast100})
parts+=(resnet18 resnet18-uncompiled resnet18-eager resnet18_30 ${data100:+resnet18_30_c100} rest)
for part in "${@:3}"; do
    if [[ " ${parts[*]} " != *" $part "* ]]; then
        echo "no part $part: there are ${parts[*]} (airbench needs AIRBENCH and cifar10, those with 100 need DATA100)" >&2
        exit 2
    fi
done
[ $# -lt 3 ] || parts=("${@:3}")

accelerator=${ACCELERATOR:-gpu} extra=${EXTRA:-} turns=${TURNS:-} input='' devices=''
declare -A small=([fast]='' [resnet]='')
if [ -n "${TINY:-}" ]; then
    accelerator=${ACCELERATOR:-cpu} RUNS=${RUNS:-1}
    small=([fast]='--epochs 3 --model.width 0.1' [resnet]='--net lenet')
    extra="--epochs 1 --batch-size 10 --data.eval_batch_size 10 --data.val_size 0.2 --trainer.logger false $extra"
    for kind in train val test; do extra="--trainer.limit_${kind}_batches 1 $extra"; done
    turns="--steps 2 --warmup 2 --batch-size 10 --model.width 0.1 $turns"
    input='--batch-size 10 --batches 2 --rounds 1'
    devices='--epochs 1 --data.count 100'
fi

declare -A variants=(
    [eager]="--compile null"
    [unbenchmarked]="--trainer.benchmark false"
    [padded]="--model.net_options.pad_input true"
)

# The log of torch.compile names each recompilation.
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 TORCH_LOGS=${TORCH_LOGS:-recompiles}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$out"
failed=() skipped=()

run() { # NAME COMMAND…: show the output and keep it in NAME.txt
    local name=$1 left=$((deadline - SECONDS)) seconds
    shift
    if [ "$left" -lt 1 ]; then
        skipped+=("$name")
        return
    fi
    seconds=$((limit < left ? limit : left))
    printf '\n[%d s] %s\n' "$SECONDS" "$*"
    timeout --kill-after=20 "$seconds" "$@" 2>&1 | tee "$out/$name.txt"
    case ${PIPESTATUS[0]} in
        0) ;;
        124 | 137) failed+=("$name (stopped after $seconds s)") ;;
        *) failed+=("$name") ;;
    esac
}
script() { # NAME SCRIPT FLAGS…
    run "$1" python3 "scripts/benchmarks/$2" "${images[@]}" --accelerator "$accelerator" "${@:3}" --json "$out/$1.json"
}
seeds() { # RECIPE[-VARIANT] RUNS
    local recipe=${1%%-*} variant=${1#*-} flags=("${images[@]}")
    [[ $recipe != *100 ]] || flags=("${images100[@]}")
    [ "$variant" != "$1" ] || variant=
    # shellcheck disable=SC2086
    run "$1" python3 -m cifar_lit bench recipe "$recipe" --runs "${RUNS:-$2}" "${flags[@]}" \
        --accelerator "$accelerator" $extra ${small[${recipe%%[0-9]*}]-} ${variant:+${variants[$variant]}} \
        --logs "$logs" --json "$out/$1.json"
}

for part in "${parts[@]}"; do
    deadline=$((SECONDS + ${PART_SECONDS:-450})) limit=${LIMIT:-${PART_SECONDS:-450}}
    case $part in check | step | variants | rest) limit=${LIMIT:-200} ;; esac
    # shellcheck disable=SC2086
    case $part in
        check)
            [ "$accelerator" = cpu ] || run check python3 -m cifar_lit devices --check --accelerator "$accelerator"
            seeds fast94-eager 1
            mapfile -t files < <(grep -rl --include='test_*.py' 'pytest\.mark\.gpu' tests)
            [ "$accelerator" = cpu ] || run tests python3 -m pytest -m gpu -rs "${files[@]}"
            ;;
        airbench) # reads ./cifar10, and writes its own files there
            mkdir -p "$work/cifar10"
            ln -sfn "$data"/cifar-10-* "$work/cifar10/"
            run airbench env -C "$work" python3 "$airbench"
            ;;
        step)
            script profile profile_step.py --recipe fast94 $turns
            script step step.py --recipe fast94 $turns
            script step-eager step.py --recipe fast94 --compile null $turns
            ;;
        variants) for variant in eager unbenchmarked padded; do seeds "fast94-$variant" 8; done ;;
        fast94 | fast100) seeds "$part" 40 ;;
        fast95) seeds "$part" 20 ;;
        fast96) seeds "$part" 12 ;;
        fast97 | resnet18_30*) seeds "$part" 4 ;;
        resnet18*) seeds "$part" 1 ;;
        rest)
            seeds tudui 3
            script input input.py $input
            run devices python3 -m cifar_lit bench devices $devices --json "$out/devices.json"
            ;;
    esac
    tar -C "$out" -czf "$out.tar.gz" .
done

if compgen -G "$out/*.json" > /dev/null; then
    printf '\n[%d s] the table\n' "$SECONDS"
    python3 scripts/benchmarks/table.py "$out" | tee "$out/table.md" || failed+=(table)
    tar -C "$out" -czf "$out.tar.gz" .
fi
echo "everything is in $out.tar.gz"
report() { # TEXT NAME…
    local names
    printf -v names '%s, ' "${@:2}"
    echo "$1: ${names%, }" >&2
}
[ ${#skipped[@]} -eq 0 ] || report "skipped, because their part had taken ${PART_SECONDS:-450} s" "${skipped[@]}"
[ ${#failed[@]} -eq 0 ] || report failed "${failed[@]}"
exit $((${#skipped[@]} + ${#failed[@]} > 0))
