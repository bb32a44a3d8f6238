"""GRPO and RLOO by TRL's own trainers, with its log-probs and entropies by fastppo: the same losses, measured beside.

    pip install "fastppo[examples]"
    python examples/trl_trainers.py grpo
    python examples/trl_trainers.py rloo --vocab 151936 --memory auto
    python examples/trl_trainers.py grpo --device cuda --bf16

In your own script it is one line, anywhere before training: `fastppo.integrations.trl.apply()`. The model here has
random weights, so that nothing is downloaded; its reward counts even words. Times and peaks are of one update's
forward, loss and backward, without generation and optimizer; the peak is what the GPU's tensors, or on a CPU the
process, held above the start of the update.
"""

import argparse
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import trl
from datasets import Dataset
from peak import Peak
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import fastppo.integrations.trl

TRAINERS = {"grpo": (trl.GRPOConfig, trl.GRPOTrainer), "rloo": (trl.RLOOConfig, trl.RLOOTrainer)}


@dataclass
class Size:
    vocab: int = 32768
    hidden: int = 128
    intermediate: int = 256
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    prompts: int = 8
    generations: int = 4
    prompt_tokens: int = 32
    response_tokens: int = 32
    steps: int = 5
    learning_rate: float = 1e-5


@dataclass
class Result:
    losses: list[float]
    grad_norms: list[float]
    entropies: list[float]
    seconds: float  # of one update, the median
    peak_mib: float  # of one update, the most


def save_model(folder: Path, size: Size) -> None:
    torch.manual_seed(0)
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, **{f"w{i}": i for i in range(4, size.vocab)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def even_words(completions: list[str], **_: object) -> list[float]:
    return [sum(word[-1] in "02468" for word in text.split()) / max(1, len(text.split())) for text in completions]


def measured(trainer: type) -> type:
    """The trainer with a clock and a peak around what follows its generation: forward, loss and backward."""

    class Measured(trainer):
        def _prepare_inputs(self, batch):
            inputs = super()._prepare_inputs(batch)
            self.peak, self.began = Peak(self.accelerator.device), time.perf_counter()
            return inputs

        def training_step(self, *args):
            loss = super().training_step(*args)
            self.peaks.append(self.peak.read())  # waits for the device
            self.seconds.append(time.perf_counter() - self.began)
            return loss

    Measured.__name__ = trainer.__name__
    return Measured


def train(algorithm: str, folder: Path, size: Size, device: str, **overrides: object) -> Result:
    Config, Trainer = TRAINERS[algorithm]
    draw = torch.Generator().manual_seed(1)
    words = torch.randint(4, size.vocab, (size.prompts * size.steps, size.prompt_tokens), generator=draw).tolist()
    trainer = measured(Trainer)(
        model=str(folder),
        reward_funcs=even_words,
        train_dataset=Dataset.from_dict({"prompt": [" ".join(f"w{i}" for i in row) for row in words]}),
        args=Config(
            output_dir=str(folder / "out"),
            per_device_train_batch_size=size.prompts * size.generations,
            num_generations=size.generations,
            max_completion_length=size.response_tokens,
            generation_kwargs={"min_new_tokens": size.response_tokens},
            model_init_kwargs={"dtype": "float32"},
            num_iterations=2,  # the second update of a rollout is off policy: ratios are not 1
            beta=0.05,
            temperature=0.9,
            max_steps=size.steps,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=device == "cpu",
            seed=0,
            learning_rate=size.learning_rate,
            **{"bf16": False, "gradient_checkpointing": False} | overrides,
        ),
    )
    trainer.seconds, trainer.peaks = [], []
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    columns = ([entry[key] for entry in log] for key in ("loss", "grad_norm", "entropy"))
    return Result(*columns, median(trainer.seconds), max(trainer.peaks))


def compare(
    algorithm: str, size: Size, memory: str = "recompute", device: str = "cpu", **overrides: object
) -> tuple[Result, Result]:
    """TRL's own run and the same run with fastppo."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model(folder, size)
        before = train(algorithm, folder, size, device, **overrides)
        fastppo.integrations.trl.apply(memory=memory)
        try:
            after = train(algorithm, folder, size, device, **overrides)
        finally:
            fastppo.integrations.trl.undo()
    return before, after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("algorithm", choices=TRAINERS)
    parser.add_argument("--memory", choices=("recompute", "save", "auto"), default="recompute")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--bf16", action="store_true", help="bfloat16 autocast")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    for name, default in vars(Size()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    args = vars(parser.parse_args())
    algorithm, memory, device = (args.pop(name) for name in ("algorithm", "memory", "device"))
    overrides = {name: args.pop(name) for name in ("bf16", "gradient_checkpointing")}
    before, after = compare(algorithm, Size(**args), memory, device, **overrides)
    where = torch.cuda.get_device_name() if device == "cuda" else f"{torch.get_num_threads()} threads"
    print(f"{algorithm} {args}, {where}, torch {torch.__version__}, trl {trl.__version__}")
    for name in ("losses", "grad_norms", "entropies"):
        for who, result in (("TRL", before), ("fastppo", after)):
            print(f"{name:10} {who:8}", *(f"{x:11.7f}" for x in getattr(result, name)))
    for who, result in (("TRL", before), ("fastppo", after)):
        print(f"{who:8} {result.seconds:.3f} s an update, {result.peak_mib:.0f} MiB above the start of the update")


if __name__ == "__main__":
    main()
