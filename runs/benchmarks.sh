#!/usr/bin/env bash
# Every speed and memory figure of README.md and docs/kernels: the CPU suite once for each instruction set of this
# machine and, where torch sees a GPU, the GPU suite; then the tables, and of several GPUs the op over ranks. On an
# idle machine.
#   runs/benchmarks.sh [folder for the JSON files, else benchmarks/baselines, where the committed ones lie]
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-benchmarks/baselines}
mkdir -p "$out"

python benchmarks/run_isas.py --save="$out" -q
if python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    python -m pytest benchmarks --device cuda -q --benchmark-json="$out/$(python benchmarks/machine.py cuda).json"
fi
python runs/benchmarks_table.py "$out"/*.json
if python -c 'import sys, torch; sys.exit(torch.cuda.device_count() < 2)'; then
    python benchmarks/run_ranks.py
fi
