"""Models of known shapes with random weights, and a tokenizer with one word for each id: what a step costs depends on
the shape, not on what the weights are."""

import shutil
from pathlib import Path
from typing import Any

import torch

# Class of the configuration, and what of it is not the default. "tiny" is for tests.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "tiny": (
        "LlamaConfig",
        {
            "vocab_size": 512,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        },
    ),
    "qwen3-0.6b": (
        "Qwen3Config",
        {
            "vocab_size": 151936,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "tie_word_embeddings": True,
        },
    ),
    "llama-1b": (
        "LlamaConfig",
        {
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
        },
    ),
}
SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")  # ids 0 to 3; the others are the words w4, w5, ...


def model_folder(shape: str, dtype: torch.dtype, parent: Path) -> Path:
    """The Hugging Face folder of that shape below `parent`, written if it is not there yet."""
    from transformers import AutoModelForCausalLM

    folder = parent / f"{shape}-{str(dtype).removeprefix('torch.')}"
    if not folder.exists():
        half_made = folder.with_name(f"{folder.name}.part")
        shutil.rmtree(half_made, ignore_errors=True)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(_config(shape), dtype=dtype)
        model.save_pretrained(half_made)
        _tokenizer(model.config.vocab_size).save_pretrained(half_made)
        half_made.rename(folder)
    return folder


def prompt_ids(shape: str, count: int, length: int, seed: int = 0) -> list[list[int]]:
    """`count` random prompts of `length` ordinary tokens."""
    vocab_size = SHAPES[shape][1]["vocab_size"]
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(len(SPECIAL), vocab_size, (count, length), generator=draw).tolist()


def text_of(ids: list[int]) -> str:
    """What the tokenizer reads as `ids`, ordinary tokens all of them."""
    return " ".join(f"w{i}" for i in ids)


def product_parameters(shape: str) -> tuple[int, int]:
    """Parameters that a token is multiplied with: in the decoder's layers, and in the output head."""
    from transformers import AutoModel

    config = _config(shape)
    with torch.device("meta"):
        decoder = AutoModel.from_config(config)
    looked_up = decoder.get_input_embeddings().weight.numel()  # not multiplied, except as a tied head
    return sum(p.numel() for p in decoder.parameters()) - looked_up, config.vocab_size * config.hidden_size


def _config(shape: str) -> Any:
    import transformers

    name, settings = SHAPES[shape]
    return getattr(transformers, name)(pad_token_id=0, bos_token_id=1, eos_token_id=2, **settings)


def _tokenizer(vocab_size: int) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL, *(f"w{i}" for i in range(len(SPECIAL), vocab_size))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    named = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), SPECIAL, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="left", **named)
