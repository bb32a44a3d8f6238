"""GRPO and RLOO by TRL's own trainers, with its log-probs and entropies by fastppo: the same losses, measured beside.

    pip install "fastppo[examples]"
    python examples/trl_trainers.py grpo
    python examples/trl_trainers.py rloo --vocab 151936 --memory auto

In your own script it is one line, anywhere before training: `fastppo.integrations.trl.apply()`. The model here has
random weights, so that nothing is downloaded; its reward counts even words. Times and peaks are of the updates alone,
without generation: the process's resident memory above what it was before the update.
"""

import argparse
import os
import re
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import fastppo.integrations.trl

TRAINERS = {"grpo": (trl.GRPOConfig, trl.GRPOTrainer), "rloo": (trl.RLOOConfig, trl.RLOOTrainer)}


@dataclass
class Size:
    vocab: int = 32768
    hidden: int = 128
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
        intermediate_size=2 * size.hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def even_words(completions: list[str], **_: object) -> list[float]:
    return [sum(word[-1] in "02468" for word in text.split()) / max(1, len(text.split())) for text in completions]


def resident_mib(line: str) -> float:
    return int(re.search(rf"{line}:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1024


def measured(trainer: type) -> type:
    """The trainer with a clock and a peak around what follows its generation: loss, backward, optimizer."""

    class Measured(trainer):
        def _prepare_inputs(self, batch):
            inputs = super()._prepare_inputs(batch)
            Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from here
            self.began, self.base = time.perf_counter(), resident_mib("VmRSS")
            return inputs

        def training_step(self, *args):
            loss = super().training_step(*args)
            self.seconds.append(time.perf_counter() - self.began)
            self.peaks.append(resident_mib("VmHWM") - self.base)
            return loss

    Measured.__name__ = trainer.__name__
    return Measured


def train(algorithm: str, folder: Path, size: Size, **overrides: object) -> Result:
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
            use_cpu=True,
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


def compare(algorithm: str, size: Size, memory: str = "recompute", **overrides: object) -> tuple[Result, Result]:
    """TRL's own run and the same run with fastppo."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model(folder, size)
        before = train(algorithm, folder, size, **overrides)
        fastppo.integrations.trl.apply(memory=memory)
        try:
            after = train(algorithm, folder, size, **overrides)
        finally:
            fastppo.integrations.trl.undo()
    return before, after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("algorithm", choices=TRAINERS)
    parser.add_argument("--memory", choices=("recompute", "save", "auto"), default="recompute")
    parser.add_argument("--bf16", action="store_true", help="bfloat16 autocast")
    for name, default in vars(Size()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    args = vars(parser.parse_args())
    algorithm, memory, bf16 = (args.pop(name) for name in ("algorithm", "memory", "bf16"))
    before, after = compare(algorithm, Size(**args), memory, bf16=bf16)
    print(f"{algorithm} {args}, {torch.get_num_threads()} threads, torch {torch.__version__}, trl {trl.__version__}")
    for name in ("losses", "grad_norms", "entropies"):
        for who, result in (("TRL", before), ("fastppo", after)):
            print(f"{name:10} {who:8}", *(f"{x:11.7f}" for x in getattr(result, name)))
    for who, result in (("TRL", before), ("fastppo", after)):
        print(f"{who:8} {result.seconds:.2f} s an update, {result.peak_mib:.0f} MiB above the start of the update")


if __name__ == "__main__":
    main()
