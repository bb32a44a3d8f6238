"""A step's metrics, from the rollout batch and from what the optimizer steps left behind. Names: docs/metrics.md."""

import resource
import sys

import torch
from torch import Tensor

import fastppo
from trainers.dialogues import ENDINGS
from trainers.filtering import logprob_error
from trainers.optim import StepMetrics, add_metrics
from trainers.rollout import FINISH, RolloutBatch


def rollout_metrics(batch: RolloutBatch) -> dict[str, float]:
    """What was generated and how it was judged. Means of [T] tensors are over the trained tokens."""
    mask, lengths = batch.mask, batch.response_lengths
    metrics = {
        **spread("critic/score", batch.raw_reward),
        **_parts("critic/score", batch),
        **spread("response_length", lengths),
        **spread("prompt_length", batch.prompt_lengths),
        "response_length/clip_ratio": mean(batch.finish == FINISH.index("length")),
        "perf/total_num_tokens": float(batch.tokens.numel()),
    }
    if batch.turns is not None:
        metrics |= {
            "rollout/turns_mean": mean(batch.turns),
            "rollout/turns_max": float(batch.turns.max()),
            "rollout/observation_tokens_mean": mean(batch.lengths - batch.prompt_lengths - lengths),
            "rollout/natural_termination_rate": mean(batch.ended == ENDINGS.index("done")),
            "rollout/truncation_rate": mean(batch.ended == ENDINGS.index("length")),
        }
    if batch.old_logprobs is not None:
        difference = (batch.old_logprobs.exp() - batch.rollout_logprobs.exp())[mask].abs()
        apart, error = (batch.old_logprobs - batch.rollout_logprobs)[mask].double(), logprob_error(batch)
        metrics |= {
            "actor/entropy": mean(batch.entropy[batch.trained if bool(batch.trained.any()) else mask]),
            "training/rollout_probs_diff_mean": mean(difference),
            "training/rollout_probs_diff_max": float(difference.max()),
            "training/rollout_kl": mean(apart.expm1() - apart),
            "training/seq_logprob_error_mean": mean(error),
            "training/seq_logprob_error_max": float(error.max()),
        }
    if batch.ref_logprobs is not None:
        kl = sequence_kl(batch)
        metrics |= {"critic/kl/mean": mean(kl), "critic/kl/max": float(kl.max())}
    trained = batch.trained
    if batch.rank_imbalance:
        metrics["perf/rank_imbalance"] = sum(batch.rank_imbalance) / len(batch.rank_imbalance)
    metrics["training/empty_minibatches"] = float(batch.empty_minibatches)
    metrics["training/trained_samples"] = float((batch.trained_lengths > 0).sum())
    if batch.advantages is not None:
        metrics |= spread("critic/rewards", batch.per_sequence(batch.rewards))
        for name in ("advantages", "returns", "values"):
            if (per_token := getattr(batch, name)) is not None and bool(trained.any()):
                metrics |= spread(f"critic/{name}", per_token[trained])
    return metrics | batch.metrics


def update_metrics(policy: list[StepMetrics], value: list[StepMetrics]) -> dict[str, float]:
    """What the optimizer steps of a rollout did: sums over all of them, mean gradient norms, last learning rates."""
    sums: dict[str, Tensor] = {}
    for step in (*policy, *value):
        add_metrics(sums, step.sums)
    metrics: dict[str, float] = {}
    for kind in ("actor", "critic"):
        if kind in sums:
            metrics |= fastppo.summarize(sums[kind])
        steps = [step.optimizers[kind] for step in (*policy, *value) if kind in step.optimizers]
        if steps:
            metrics[f"{kind}/grad_norm"] = sum(step["grad_norm"] for step in steps) / len(steps)
            metrics[f"{kind}/lr"] = steps[-1]["lr"]
            metrics[f"{kind}/optimizer_steps"] = float(len(steps))
            metrics[f"{kind}/skipped_steps"] = sum(step["skipped"] for step in steps)
    metrics.pop("actor/entropy", None)  # that of the rollout is exact over the whole batch before any update
    if policy:
        total, count = policy[0].sums["ratio_error"].tolist()
        metrics["actor/first_ratio_err_mean"] = total / count if count else 0.0
        metrics["actor/first_ratio_err_max"] = float(policy[0].sums["ratio_error_max"])
    return metrics


def token_table(
    batch: RolloutBatch, logprobs: Tensor, tokenizer: object, clip: tuple[float, float] | None
) -> list[dict]:
    """Each sequence of a finished batch token by token, for samples.jsonl; `logprobs` [T] are the updated policy's.

    `clip` are the bounds of the ratio; None for losses that clip otherwise, and then "clipped" is null.
    """
    kl = None if batch.ref_logprobs is None else sequence_kl(batch)
    rows = []
    for row in range(len(batch)):
        start, stop = int(batch.cu_seqlens[row]), int(batch.cu_seqlens[row + 1])
        tokens = [_token(batch, t, logprobs, tokenizer, clip) for t in range(start, stop)]
        ids, prompt_length = batch.tokens[start:stop], int(batch.prompt_lengths[row])
        rows.append(
            {
                "sample_id": int(batch.sample_id[row]),
                "prompt": tokenizer.decode(ids[:prompt_length]),
                "response": tokenizer.decode(ids[prompt_length:]),
                "finish": FINISH[int(batch.finish[row])],
                "score": float(batch.raw_reward[row]),
                "kl": None if kl is None else float(kl[row]),
                "tokens": tokens,
            }
        )
    return rows


def _token(batch: RolloutBatch, t: int, logprobs: Tensor, tokenizer: object, clip: tuple[float, float] | None) -> dict:
    token = int(batch.tokens[t])
    row = {"text": tokenizer.decode([token]), "id": token, "mask": bool(batch.mask[t])}
    named = {
        "logprob": logprobs,
        "old": batch.old_logprobs,
        "rollout": batch.rollout_logprobs,
        "ref": batch.ref_logprobs,
        "value": batch.values,
        "reward": batch.rewards,
        "advantage": batch.advantages,
        "return": batch.returns,
    }
    row |= {name: None if tensor is None or not row["mask"] else float(tensor[t]) for name, tensor in named.items()}
    if row["mask"]:
        ratio = float((logprobs[t] - batch.old_logprobs[t]).exp())
        clipped = None
        if clip is not None:
            clipped = ratio > clip[1] if row["advantage"] > 0 else ratio < clip[0] and row["advantage"] < 0
        kl = None if row["ref"] is None else row["old"] - row["ref"]
        row |= {"kl": kl, "ratio": ratio, "clipped": clipped}
    else:
        row |= {"kl": None, "ratio": None, "clipped": None}
    return row


def sequence_kl(batch: RolloutBatch) -> Tensor:
    """[B] nats: sum over a response's tokens of old - ref, the sampled KL of the policy to the reference."""
    return batch.per_sequence(batch.old_logprobs - batch.ref_logprobs)


def memory_metrics() -> dict[str, float]:
    """The most that this process held so far, of the host's memory and, where it uses a GPU, of that."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    metrics = {"perf/max_memory_rss_gb": peak / (2**30 if sys.platform == "darwin" else 2**20)}  # Linux counts KiB
    if torch.cuda.is_initialized():
        metrics["perf/max_memory_allocated_gb"] = torch.cuda.max_memory_allocated() / 2**30
    return metrics


def _parts(name: str, batch: RolloutBatch) -> dict[str, float]:
    """With several rewards, each one's own."""
    metrics = {}
    for i, reward in enumerate(batch.reward_names):
        scores = batch.reward_parts[:, i]
        metrics[f"{name}/{reward}/mean"] = mean(scores)
        metrics[f"{name}/{reward}/std"] = float(scores.double().std(correction=0))
    return metrics


def mean(x: Tensor) -> float:
    return float(x.double().mean())


def spread(name: str, x: Tensor) -> dict[str, float]:
    return {f"{name}/mean": mean(x), f"{name}/max": float(x.max()), f"{name}/min": float(x.min())}
