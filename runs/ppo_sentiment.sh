#!/usr/bin/env bash
# The default run on three seeds: the curves and the table of docs/ppo_sentiment.md. About 12 minutes on two CPU cores.
#   runs/ppo_sentiment.sh [results folder]
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-results/ppo-sentiment}

for seed in 0 1 2; do
    python -m trainers.ppo ppo.seed="$seed" logger.run_dir="$out/seed-$seed"
done
python -m trainers.report "$out"/seed-{0,1,2} --out "$out"
python runs/ppo_sentiment_table.py "$out"/seed-{0,1,2}
