"""What engines beside the trainer share: the model's names without its weights, and where an answer ends."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from trainers.engines import Sampling


def on_meta(folder: Path | str) -> Any:
    """The model's names and shapes, end tokens and vocabulary, without its weights."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    with contextlib.suppress(OSError):  # without a file of its own what the configuration says stays
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


def end_of(tokens: list[int], sampling: Sampling, stops: Sequence[int], tokenizer: Any) -> int | None:
    """Tokens up to the first that ends the response, itself included; None if none does."""
    for count, token in enumerate(tokens, 1):
        if token in stops:
            return count
        if sampling.stop_strings and count >= max(sampling.min_new_tokens, 1):
            text = tokenizer.decode(tokens[:count])
            if any(stop in text for stop in sampling.stop_strings):
                return count
    return None
