#!/usr/bin/env bash
# fastppo's PPO and RLOO beside TRL's RLOO, three seeds each, one run at a time: the table and the curves of
# docs/learning_quality.md. Needs pip install -e ".[trainer]" and trl==1.16.0. Runs whose result is there are left out.
#   runs/learning_quality.sh [results file] [samples of copy] [samples of sentiment]
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-results/learning_quality.jsonl} copy=${2:-12800} sentiment=${3:-640}
mkdir -p "$(dirname "$out")" && touch "$out"

run() { # task, seed, trainer, overrides
    grep -q "\"trainer\": \"${*:3}\", \"task\": \"$1\", \"seed\": $2," "$out" ||
        python runs/learning_quality.py --task "$1" --samples "${!1}" --seconds 400 --seed "$2" --out "$out" --trainer "${@:3}"
}

for task in copy sentiment; do
    export OMP_NUM_THREADS=$([ $task = copy ] && echo 1 || nproc) # threads of a two-layer model only wait for each other
    for seed in 0 1 2; do
        for trainer in fastppo-rloo trl-rloo fastppo-ppo; do run "$task" "$seed" "$trainer"; done
    done
    for seed in 0 1 2; do run "$task" "$seed" fastppo-rloo loss_fn.type=reinforce; done
done
python runs/learning_quality.py --draw "$out" --picture docs/images/learning_quality.png
