"""One validation: every prompt sampled and scored, in batches, and what the trainer writes down about it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from trainers.metrics import mean, spread
from trainers.prompts import TokenizedPrompt
from trainers.rollout import FINISH, RolloutBatch

MetricFn = Callable[..., Mapping[str, Sequence[float]]]


def validation_rows(
    prompts: Sequence[TokenizedPrompt],
    rollout: Callable[[Sequence[TokenizedPrompt], int], RolloutBatch],
    *,
    batch_size: int | None,
) -> list[dict[str, Any]]:
    """One row a prompt, in order, in the form of docs/metrics.md.

    `rollout(prompts, first)` gives the scored batch of some prompts, one response each; `first` is the place of the
    first of them, so that a response's seed does not depend on the batch it is sampled in.
    """
    size = batch_size or max(len(prompts), 1)
    rows: list[dict[str, Any]] = []
    for first in range(0, len(prompts), size):
        batch = rollout(prompts[first : first + size], first)
        columns = zip(
            batch.samples,
            batch.raw_reward.tolist(),
            batch.finish.tolist(),
            batch.response_lengths.tolist(),
            strict=True,
        )
        for sample, score, finish, length in columns:
            row = {"sample_id": len(rows), "prompt": sample.prompt.text, "response": sample.response, "score": score}
            row |= {"finish": FINISH[finish], "length": length}
            if batch.reward_names:  # of several rewards each one's own
                parts = batch.reward_parts[len(rows) - first].tolist()
                row["rewards"] = dict(zip(batch.reward_names, parts, strict=True))
            rows.append(row if sample.text == row["prompt"] + row["response"] else row | {"text": sample.text})
    return rows


def validation_metrics(rows: Sequence[Mapping[str, Any]], metric_fn: MetricFn | None = None) -> dict[str, float]:
    """Scores and lengths; with `metric_fn` also the mean of each of its per-sample lists, as val/metrics/<name>.

    Means are over samples: the batches in which they came do not show.
    """
    prompts, outputs = [row["prompt"] for row in rows], [row["response"] for row in rows]
    texts = [row.get("text", row["prompt"] + row["response"]) for row in rows]
    own = metric_fn(samples=texts, prompts=prompts, outputs=outputs) if metric_fn else {}
    return {
        **{f"val/metrics/{name}": mean(torch.as_tensor(values)) for name, values in own.items()},
        **spread("val/score", torch.tensor([row["score"] for row in rows])),
        **{
            f"val/score/{name}/mean": mean(torch.tensor([row["rewards"][name] for row in rows]))
            for name in rows[0].get("rewards", {})
        },
        **spread("val/response_length", torch.tensor([row["length"] for row in rows])),
        "val/response_length/clip_ratio": mean(torch.tensor([row["finish"] == "length" for row in rows])),
    }
