#!/usr/bin/env bash
# The table of wheels in CONTRIBUTING.md: a wheel for each Python that is named, with CUDA kernels where nvcc works, and
# the ops' tests on it under the oldest torch and the newest. A quarter of an hour a Python on two cores.
#   runs/wheels.sh python3.10 python3.11 python3.12 python3.13
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -gt 0 ] || { sed -n '2,4s/^# *//p' "$0"; exit 2; }
out=build/wheels failed=0
for python in "$@"; do
    folder=$out/$(basename "$python")
    rm -rf "$folder"
    mkdir -p "$folder"
    "$python" -m venv "$folder/venv"
    "$folder/venv/bin/python" -m pip install --quiet build==1.6.1
    "$folder/venv/bin/python" -m build --wheel --outdir "$folder" . > "$folder/build.log"
    python3 .ci/check_wheel.py "$folder"/*.whl
    for torch in 2.6.0 2.13.0; do
        .ci/test_wheel "$python" "$folder"/*.whl $torch > "$folder/torch-$torch.log" 2>&1 || failed=1
        echo "$python, torch $torch: $(tail -1 "$folder/torch-$torch.log")"
    done
done
exit $failed
