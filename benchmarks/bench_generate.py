"""The embedded engine beside transformers' generate(), in one process, on random weights of a known shape.

    python benchmarks/bench_generate.py --shape qwen3-0.6b
    python benchmarks/bench_generate.py --shape tiny --batch 4 --prompt-tokens 8 --response-tokens 8

Two cases. `fixed`: --batch requests, groups of --samples identical prompts, responses of one length, all decoded
together. `ragged`: four times as many requests over --batch slots, with responses that end at a stop token, after half
of --response-tokens in the mean and at those at the latest; generate() takes them in batches of --batch, each of which
lasts as long as its longest response.

Both have the same weights and dtype and sample from the whole distribution. The engine returns log-probs beside the
tokens, generate() tokens alone. After a warm-up they take turns; times are medians of --rounds, with the device idle
before and after. Tokens are the responses', stop tokens included. Peak memory is what PyTorch has allocated at most,
weights included; generate()'s is measured before the engine exists.
"""

import argparse
import gc
import importlib.metadata
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from models import SHAPES, SPECIAL, model_folder, prompt_ids

from trainers.engines import Engine, Sampling, TensorSpec


@dataclass
class Contender:
    """`generate()` returns the response's length for each request."""

    name: str
    generate: Callable[[], list[int]]
    cuda: bool
    peak_gib: float | None = None
    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def warm_up(self) -> None:
        """Whatever is compiled or captured at first use; and the memory, that of setting up included."""
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        self.generate()
        if self.cuda:
            self.peak_gib = torch.cuda.max_memory_allocated() / 2**30

    def measure(self) -> None:
        self.wait()
        begin = time.perf_counter()
        lengths = self.generate()
        self.wait()
        self.seconds.append(time.perf_counter() - begin)
        self.tokens.append(sum(lengths))

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    @property
    def tokens_per_s(self) -> float:
        return statistics.median(n / s for n, s in zip(self.tokens, self.seconds, strict=True))


def parser() -> argparse.ArgumentParser:
    described = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = described.add_argument
    add("--shape", choices=sorted(SHAPES), default="qwen3-0.6b")
    add("--batch", type=int, default=64, help="sequences decoded together")
    add("--prompt-tokens", type=int, default=128)
    add("--response-tokens", type=int, default=256)
    add("--samples", type=int, default=4, help="responses to each prompt")
    add("--rounds", type=int, default=3)
    add("--device", choices=("cpu", "cuda"), help="default: cuda where torch sees one")
    add("--case", choices=("fixed", "ragged"), nargs="+", default=["fixed", "ragged"])
    add("--folder", type=Path, default=Path("results/bench-step"), help="for the model")
    add("--out", type=Path, help="JSONL file to which a line is added for each case")
    return described


def main(argv: list[str]) -> int:
    described = parser()
    args = described.parse_args(argv)
    for key in ("batch", "prompt_tokens", "response_tokens", "samples", "rounds"):
        if getattr(args, key) < 1:
            described.error(f"--{key.replace('_', '-')} must be at least 1, got {getattr(args, key)}")
    if args.batch % args.samples:
        described.error(f"--batch={args.batch} must be a multiple of --samples={args.samples}")
    os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: everything is in a folder
    rows = [measured(args, case) for case in args.case]
    print(table(rows))
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        with args.out.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    return 0


def measured(args: argparse.Namespace, case: str) -> dict[str, Any]:
    import machine
    from transformers import AutoModelForCausalLM, AutoTokenizer

    cuda = torch.cuda.is_available() if args.device is None else args.device == "cuda"
    gc.collect()  # of the case before
    if cuda:
        torch.cuda.empty_cache()
    dtype = torch.bfloat16 if cuda else torch.float32
    folder = model_folder(args.shape, dtype, args.folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to("cuda" if cuda else "cpu").eval()
    model.requires_grad_(False)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    requests = args.batch * (4 if case == "ragged" else 1)
    prompts = prompt_ids(args.shape, math.ceil(requests / args.samples), args.prompt_tokens)
    prompts = [prompt for prompt in prompts for _ in range(args.samples)]
    stops = stop_tokens(model.config.vocab_size, args.response_tokens) if case == "ragged" else ()

    peer = Contender("transformers", plain(model, prompts, args, stops), cuda)
    peer.warm_up()
    if cuda:
        torch.cuda.empty_cache()
    engine, refit_bytes = embedded(model, tokenizer, args.batch)
    ours = Contender("fastppo", ours_of(engine, prompts, args, stops), cuda)
    ours.warm_up()
    for turn in range(args.rounds):
        for side in (ours, peer) if turn % 2 == 0 else (peer, ours):
            side.measure()
    engine.close()
    return {
        "case": case,
        **{key: getattr(args, key) for key in ("shape", "batch", "prompt_tokens", "response_tokens", "samples")},
        "requests": requests,
        "dtype": str(dtype).removeprefix("torch."),
        "refit_bytes": refit_bytes,
        **{side.name: described_side(side) for side in (ours, peer)},
        "ratio": ours.tokens_per_s / peer.tokens_per_s,
        "machine": machine.card() if cuda else machine.cpu_model(),
        "driver_and_clocks": machine.card_state() if cuda else {},
        "versions": machine.versions() | {"transformers": importlib.metadata.version("transformers")},
    }


def stop_tokens(vocab_size: int, response_tokens: int) -> tuple[int, ...]:
    """As many ids as make a response of half of `response_tokens` in the mean, without a limit; random weights take
    each id about as often. Spread over the vocabulary."""
    count = max(1, round(vocab_size * 2 / response_tokens))
    return tuple(range(len(SPECIAL), vocab_size, max(1, vocab_size // count)))[:count]


def plain(model: Any, prompts: list[list[int]], args: argparse.Namespace, stops: tuple[int, ...]) -> Any:
    """transformers' generate() over batches of --batch rows."""
    from transformers import GenerationConfig

    model.generation_config.eos_token_id = None  # else it would stand in for the one that is not given below
    how = GenerationConfig(
        max_new_tokens=args.response_tokens,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        pad_token_id=0,
        eos_token_id=list(stops) or None,
    )

    @torch.inference_mode()
    def generate() -> list[int]:
        lengths = []
        for start in range(0, len(prompts), args.batch):
            ids = torch.tensor(prompts[start : start + args.batch], device=model.device)
            rows = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=how)
            response = rows[:, args.prompt_tokens :]
            stopped = torch.isin(response, torch.tensor(stops or (-1,), device=model.device))
            first = torch.where(stopped.any(1), stopped.int().argmax(1) + 1, response.shape[1])
            lengths += first.tolist()
        assert stops or set(lengths) == {args.response_tokens}
        return lengths

    return generate


def embedded(model: Any, tokenizer: Any, batch: int) -> tuple[Engine, int]:
    """The engine over the model's weights, by its protocol; and the bytes that their coming has copied."""
    from trainers.engines.native import NativeEngine, share_parameters

    engine = NativeEngine(share_parameters(model, model.dtype), tokenizer, max_batch_size=batch)
    named = dict(model.named_parameters())
    engine.begin_update(1, {name: TensorSpec(tuple(p.shape), p.dtype) for name, p in named.items()})
    moved = engine.put(named.items())
    engine.end_update()
    return engine, moved


def ours_of(engine: Engine, prompts: list[list[int]], args: argparse.Namespace, stops: tuple[int, ...]) -> Any:
    sampling = Sampling(max_new_tokens=args.response_tokens, ignore_eos=True, stop_token_ids=stops)
    calls = iter(range(1 << 30))

    def generate() -> list[int]:
        first = next(calls) * len(prompts)  # other seeds in each call
        completions = engine.generate(prompts, sampling, range(first, first + len(prompts)))
        assert all(len(completion.tokens) == len(completion.logprobs) for completion in completions)
        lengths = [len(completion.tokens) for completion in completions]
        assert stops or set(lengths) == {args.response_tokens}
        return lengths

    return generate


def described_side(side: Contender) -> dict[str, Any]:
    return {
        "tokens_per_s": side.tokens_per_s,
        "seconds": side.seconds,
        "tokens": side.tokens,
        "peak_gib": side.peak_gib,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown; milliseconds are those of a decoding step of the batch: seconds x slots / tokens."""
    header = ("shape, case", "requests x slots", "generator", "s", "tokens/s", "ms a step of the batch", "peak GiB")
    header += ("fastppo's tokens/s over it",)
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    for row in rows:
        for name in ("fastppo", "transformers"):
            side = row[name]
            cells = [
                f"{row['shape']}, {row['case']}",
                f"{row['requests']} x {row['batch']}",
                f"{name} {row['versions'][name]}",
                f"{statistics.median(side['seconds']):.3g}",
                f"{side['tokens_per_s']:,.0f}",
                f"{1e3 * row['batch'] / side['tokens_per_s']:.3g}",
                "-" if side["peak_gib"] is None else f"{side['peak_gib']:.1f}",
                f"{row['fastppo']['tokens_per_s'] / side['tokens_per_s']:.2f}",
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
