"""A small reward model that prefers what VADER finds more positive, for env.name=reward_model and value.model_name.

    python runs/train_reward_model.py --out reward-model                        # SmolLM2-135M, minutes on a CPU
    python -m trainers.ppo env.name=reward_model env.reward_model.model_name=reward-model \
        policy.model_name=smollm2-135m data.prompts=reward-model/prompts.jsonl

Pairs of continuations are sampled from the model itself and ranked; pairs ranked nearly equal are left out. A linear
head without bias and the top layers learn the Bradley-Terry loss, -log sigmoid(score(better) - score(worse)), scores
being read where the environment reads them. What is printed at the end is of pairs that were not trained on: how many
the model ranks right, and the mean and standard deviation of its scores, for env.reward_model.mean and .std.
"""

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel

from trainers.backbone import decoder_of
from trainers.classifiers import scores_at
from trainers.environments.sentiment import OPENINGS, SentimentEnvironment
from trainers.models import resolve_model

Pair = tuple[list[int], list[int]]  # ids of prompt and continuation: the better one, the worse one


@dataclass
class Settings:
    pairs: int = 1024  # sampled, of which those ranked nearly equal are left out
    margin: float = 0.5  # of the ranks of a pair, at least
    held_out: float = 0.2
    new_tokens: int = 16
    layers: int = 4  # trained, from the top
    epochs: int = 2
    batch: int = 16
    lr: float = 2e-4
    seed: int = 0


def sample_pairs(
    model: Any, tokenizer: Any, prompts: Sequence[str], rank: Callable[[str], float], cfg: Settings
) -> list[Pair]:
    """At most `cfg.pairs`; two continuations of one prompt whose texts `rank` holds `cfg.margin` apart: the better half
    of each prompt's, and the worse half in the same order."""
    torch.manual_seed(cfg.seed)
    pairs: list[Pair] = []
    each = -(-cfg.pairs // len(prompts))
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        rows = model.generate(
            ids.expand(2 * each, -1),
            attention_mask=torch.ones(2 * each, ids.shape[1], dtype=torch.int64),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=cfg.new_tokens,
            pad_token_id=tokenizer.eos_token_id,
        ).tolist()
        rows = [until_stop(row, ids.shape[1], tokenizer.eos_token_id) for row in rows]
        ranks = [rank(tokenizer.decode(row[ids.shape[1] :], skip_special_tokens=True)) for row in rows]
        order = sorted(range(len(rows)), key=lambda i: ranks[i])
        for worse, better in zip(order[:each], order[each:], strict=True):
            if ranks[better] - ranks[worse] >= cfg.margin:
                pairs.append((rows[better], rows[worse]))
    random.Random(cfg.seed).shuffle(pairs)
    return pairs[: cfg.pairs]


def until_stop(row: list[int], prompt: int, stop: int) -> list[int]:
    """Without the padding after the stop token, which itself stays: the trainers sample it too."""
    return row[: row.index(stop, prompt) + 1] if stop in row[prompt:] else row


def scores(model: PreTrainedModel, rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """[rows]: the head at each one's last token."""
    ids = pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    last = torch.tensor([len(row) - 1 for row in rows])
    return scores_at(model, ids, torch.arange(len(rows)) * ids.shape[1] + last)[:, 0]


def fit(model: PreTrainedModel, pairs: Sequence[Pair], cfg: Settings) -> list[float]:
    """The loss of every step."""
    model.requires_grad_(False)
    trained = [model.score, *decoder_of(model).layers[-cfg.layers :], decoder_of(model).norm]
    parameters = [p for module in trained for p in module.requires_grad_(True).parameters()]
    torch.nn.init.zeros_(model.score.weight)
    optimizer = torch.optim.AdamW(parameters, lr=cfg.lr, weight_decay=0.0)
    draw, losses = random.Random(cfg.seed), []
    for _ in range(cfg.epochs):
        for batch in batches(draw.sample(pairs, len(pairs)), cfg.batch):
            better, worse = scores(model, [row for pair in zip(*batch, strict=True) for row in pair]).chunk(2)
            loss = -functional.logsigmoid(better - worse).mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
    return losses


def batches(pairs: Sequence[Pair], size: int) -> list[Sequence[Pair]]:
    return [pairs[first : first + size] for first in range(0, len(pairs), size)]


@torch.no_grad()
def measure(model: PreTrainedModel, pairs: Sequence[Pair], size: int) -> dict[str, float]:
    both = [scores(model, [row for pair in zip(*batch, strict=True) for row in pair]) for batch in batches(pairs, size)]
    better, worse = (torch.cat([half.chunk(2)[i] for half in both]) for i in (0, 1))
    found = torch.cat([better, worse]).tolist()
    return {"accuracy": float((better > worse).float().mean()), "mean": mean(found), "std": stdev(found)}


def train(
    name: str, out: Path, cfg: Settings, *, prompts: Sequence[str], rank: Callable[[str], float]
) -> dict[str, float]:
    """Write the model, its tokenizer and prompts.jsonl to the folder `out`."""
    source, start = resolve_model(name, key="--model"), time.perf_counter()
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    pairs = sample_pairs(model, tokenizer, prompts, rank, cfg)
    kept = int(len(pairs) * cfg.held_out)
    if not 1 <= kept < len(pairs):
        raise SystemExit(f"only {len(pairs)} pairs of different rank: nothing to train on and to measure by")
    del model
    classifier = AutoModelForSequenceClassification.from_pretrained(source, dtype=torch.float32, num_labels=1).eval()
    classifier.config.pad_token_id = tokenizer.eos_token_id  # for transformers' own batches; here it is not looked for
    losses = fit(classifier, pairs[kept:], cfg)
    classifier.save_pretrained(out)
    tokenizer.save_pretrained(out)
    (out / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    last = losses[-max(1, len(losses) // 5) :]
    return {
        "pairs": len(pairs) - kept,
        "first_loss": losses[0],
        "last_loss": mean(last),
        **measure(classifier, pairs[:kept], cfg.batch),
        "seconds": time.perf_counter() - start,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="whose continuations are ranked, and where it starts")
    parser.add_argument("--out", type=Path, required=True, help="folder of the reward model")
    for name, default in vars(Settings()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    args = vars(parser.parse_args())
    name, out, sentiment = args.pop("model"), args.pop("out"), SentimentEnvironment()
    found = train(name, out, Settings(**args), prompts=OPENINGS, rank=sentiment.positivity)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
