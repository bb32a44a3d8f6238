"""Peak GPU memory of one step of `python -m trainers.ppo` on a model of Qwen3-0.6B's shape with random weights: with
the loss fused with the output head, and with whole float32 logits in its place, as docs/kernels/linear_ppo_loss.md has
it. Each in a process of its own.

    python runs/trainer_memory.py [results folder] [key=value ...]
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

SETTINGS = [
    "config=ppo_copy",
    "policy.dtype=bfloat16",
    "policy.train_global_batch_size=64",
    "policy.train_micro_batch_size=16",
    "policy.logprob_batch_size=16",
    "policy.generation.max_new_tokens=256",
    "policy.generation.max_batch_size=64",
    "ppo.num_generations_per_prompt=4",
    "ppo.max_num_steps=1",
    "checkpointing.enabled=false",
]
SHAPE = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def write_model(folder: Path) -> None:
    """Random weights; the tokenizer is that of the copy task's own model."""
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    from trainers.models import resolve_model

    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**SHAPE)).bfloat16().save_pretrained(folder)
    AutoTokenizer.from_pretrained(resolve_model("tiny-llama")).save_pretrained(folder)


def whole_logits_loss(hidden: Any, weight: Any, targets: Any, old: Any, advantages: Any, **options: Any) -> Any:
    """`linear_ppo_loss` as a trainer without it writes it, without softcap and bias."""
    import torch

    import fastppo

    temperature = options.pop("temperature")
    assert options.pop("softcap") is None and options.pop("bias") is None
    options.pop("num_rows")
    logps = torch.log_softmax(torch.nn.functional.linear(hidden, weight).float() / temperature, -1)
    logprobs = logps.gather(-1, targets[:, None])[:, 0]
    entropy = -(logps.exp() * logps).sum(-1)
    loss, metrics = fastppo.ppo_loss(logprobs, old, advantages, entropy=entropy, **options)
    return fastppo.LinearLossOutput(loss, metrics, logprobs.detach(), entropy.detach())


def main() -> None:
    words = sys.argv[1:]
    overrides = [word for word in words if "=" in word or word.startswith("-")]
    out = Path(next((word for word in words if word not in overrides), "results/trainer-memory"))
    if not (out / "model" / "config.json").exists():
        write_model(out / "model")
    for loss in ("fused", "whole"):
        settings = [*SETTINGS, f"policy.model_name={out / 'model'}", f"logger.run_dir={out / loss}", *overrides]
        subprocess.run([sys.executable, __file__, "--step", loss, *settings], check=True)
        log = out / loss / "metrics.jsonl"
        if log.exists():
            row = json.loads(log.read_text().splitlines()[-1])
            print(f"{loss:6} {row.get('perf/max_memory_allocated_gb', 0):.1f} GB", flush=True)


def step(loss: str, settings: list[str]) -> None:
    import fastppo

    if loss == "whole":
        fastppo.linear_ppo_loss = whole_logits_loss  # type: ignore[assignment]
    from trainers.launch import launch

    raise SystemExit(launch("ppo", "PPOTrainer", __doc__ or "", settings))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--step"]:
        step(sys.argv[2], sys.argv[3:])
    else:
        main()
