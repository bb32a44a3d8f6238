"""Tiny transformers models of every family that megatron-core is given, with what sharding could break."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

# Four query heads; the head size is hidden_size / heads in Qwen2 alone, which has no other.
COMMON = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "attn_implementation": "eager",
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 2.0,
    "original_max_position_embeddings": 16,
}
# An expert's rows in bfloat16 are whole 16 bytes: torch's grouped_mm wants that.
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
# Name -> (configuration class, settings). Of a vocabulary of 150, four ranks have 64 + 64 + 22 + 0 rows.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    # Two groups, fewer than four ranks. A padding token, which the tests' sequences have among the others.
    "llama": (
        "LlamaConfig",
        {
            "pad_token_id": 132,
            "num_hidden_layers": 4,
            "num_key_value_heads": 2,
            "head_dim": 12,
            "vocab_size": 150,
            "rope_parameters": LLAMA3,
        },
    ),
    # One group; biases; tied; its whole vocabulary on the first rank.
    "qwen2": (
        "Qwen2Config",
        {"num_hidden_layers": 2, "num_key_value_heads": 1, "vocab_size": 37, "tie_word_embeddings": True},
    ),
    # As many groups as heads; query and key norms.
    "qwen3": ("Qwen3Config", {"num_hidden_layers": 2, "num_key_value_heads": 4, "head_dim": 10, "vocab_size": 150}),
    "qwen3_tied": (
        "Qwen3Config",
        {
            "num_hidden_layers": 2,
            "num_key_value_heads": 2,
            "head_dim": 12,
            "vocab_size": 257,
            "tie_word_embeddings": True,
        },
    ),
    # A dense layer between sparse ones; the probabilities of the chosen experts sum to 1.
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            "num_hidden_layers": 4,
            "num_key_value_heads": 2,
            "head_dim": 12,
            "vocab_size": 150,
            "mlp_only_layers": [1],
            "norm_topk_prob": True,
            **EXPERTS,
        },
    ),
    # They do not.
    "qwen3_moe_unnormalised": (
        "Qwen3MoeConfig",
        {
            "num_hidden_layers": 2,
            "num_key_value_heads": 2,
            "head_dim": 12,
            "vocab_size": 37,
            "norm_topk_prob": False,
            **EXPERTS,
        },
    ),
}


def config_of(name: str, **changes: Any) -> Any:
    import transformers

    kind, settings = MODELS[name]
    return getattr(transformers, kind)(**COMMON | settings | changes)


def build_hf(name: str) -> Any:
    """All its parameters random: norms of ones and biases of zeros would hide mistakes."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_config(config_of(name)).eval()
    generator = torch.Generator().manual_seed(len(name))
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = 1 + 0.3 * noise if parameter.dim() == 1 else 0.2 * noise
    return model


def file_names(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """As files name them. In memory transformers has a layer's experts in two tensors, files have each on its own."""
    tensors = {}
    for name, tensor in named:
        layer, found, part = name.partition(".experts.")
        if not found:
            tensors[name] = tensor
            continue
        for e, weight in enumerate(tensor):
            parts = {"down_proj": weight}
            if part == "gate_up_proj":
                parts = dict(zip(("gate_proj", "up_proj"), weight.chunk(2), strict=True))
            tensors |= {f"{layer}.experts.{e}.{name}.weight": weight for name, weight in parts.items()}
    return tensors


class LowIds:
    """An environment that pays for low token ids: something to learn for a model of noise."""

    default_model = "tiny-llama"

    def prompts(self) -> list[Any]:
        from trainers.environments import Prompt

        return [Prompt(f"w{i} w{j}") for i in range(2, 6) for j in range(2, 6)]

    def score(self, samples: list[Any]) -> list[float]:
        return [sum(1 - i / 150 for i in sample.response_ids) / len(sample.response_ids) for sample in samples]
