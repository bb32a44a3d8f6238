#!/usr/bin/env bash
# What docs/integrate.md shows: every example's commands, a quarter of an hour on two idle cores; and those for a GPU, or
# for two, where torch sees them. Needs `pip install -e ".[examples,megatron]"`.
set -euo pipefail
cd "$(dirname "$0")/.."
gpus=$(python -c 'import torch; print(torch.cuda.device_count())')

python examples/trl_trainers.py grpo
python examples/trl_trainers.py rloo --learning-rate 1e-6
python examples/trl_trainers.py grpo --bf16
for seed in 0 1 2; do
    python examples/cartpole_ppo.py --seed $seed
    python examples/cartpole_ppo.py --seed $seed --ops torch
done
torchrun --nproc-per-node 2 tests/megatron_cpu.py examples.megatron_logprob --tp 2
torchrun --nproc-per-node 2 tests/megatron_cpu.py examples.megatron_logprob --tp 2 --sequence-parallel
python examples/transformers_ten_lines.py

if [ "$gpus" -ge 1 ]; then
    for memory in recompute auto; do
        python examples/trl_trainers.py grpo --device cuda --bf16 --gradient-checkpointing --vocab 128256 --hidden 2048 --intermediate 8192 \
            --layers 16 --heads 32 --kv-heads 8 --prompts 8 --generations 8 --prompt-tokens 128 --response-tokens 256 \
            --learning-rate 1e-6 --memory $memory
    done
    python examples/transformers_ten_lines.py --device cuda
fi
if [ "$gpus" -ge 2 ]; then
    torchrun --nproc-per-node 2 -m examples.megatron_logprob --tp 2
    torchrun --nproc-per-node 2 -m examples.megatron_logprob --tp 2 --sequence-parallel
fi
