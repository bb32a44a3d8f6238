"""From logits to tokens and their log-probs under the distribution that sampled them.

A row's randomness is one uniform number per position, from its own request's seed: it does not depend on neighbours.
"""

import torch
from torch import Tensor

from trainers.engines import Sampling


def uniforms(seeds: list[int], count: int) -> Tensor:
    """[len(seeds), count] float64 in [0, 1), on the CPU: what request i uses at its positions."""
    return torch.stack(
        [torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    )


def scores(
    logits: Tensor,
    sampling: Sampling,
    *,
    seen: Tensor | None = None,
    stops: Tensor | None = None,
    early: Tensor | None = None,
) -> Tensor:
    """[B, V] float32 whose softmax is the sampling distribution; -inf where a token cannot be sampled.

    Args:
        seen: [B, V] bool, the tokens that the repetition penalty is for.
        stops: [S] int64, ids that the rows where `early` [B] bool may not sample.
    """
    scores = logits.float()
    if seen is not None:
        penalty = sampling.repetition_penalty
        scores = torch.where(seen, torch.where(scores > 0, scores / penalty, scores * penalty), scores)
    if stops is not None and early is not None and stops.numel():
        kept = scores.index_select(-1, stops).masked_fill(early[:, None], -torch.inf)
        scores = scores.index_copy(-1, stops, kept)
    scores = scores / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < scores.shape[-1]:
        kth = scores.topk(sampling.top_k).values[:, -1:]
        scores = scores.masked_fill(scores < kth, -torch.inf)  # what ties with the last one stays
    if sampling.top_p < 1:
        ordered, order = scores.sort(dim=-1, descending=True, stable=True)
        probs = ordered.double().softmax(-1)
        enough = probs.cumsum(-1) - probs >= sampling.top_p  # what is more likely suffices; never so for the first
        scores = scores.scatter(-1, order, ordered.masked_fill(enough, -torch.inf))
    return scores


def draw(scores: Tensor, uniform: Tensor, *, greedy: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """[B, V] float32 scores, [B] uniform numbers -> token ids [B], their log-probs [B] float32, and [B] whether the row
    was a distribution at all. Sums are float64: V may be 250,000."""
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1]
    if greedy:
        chosen = weights.argmax(-1)
    else:
        # right=True never picks a token of probability zero.
        chosen = torch.searchsorted(cumulative, (uniform * total)[:, None], right=True).squeeze(-1)
        chosen = chosen.clamp(max=scores.shape[-1] - 1)
    picked = weights.gather(-1, chosen[:, None]).squeeze(-1)
    return chosen, (picked.double().log() - total.log()).float(), torch.isfinite(total)


def choose(
    logits: Tensor, uniform: Tensor, sampling: Sampling, **masks: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """`draw` of the `scores` of [B, V] logits; `masks`: arguments of `scores`."""
    if not logits.is_cuda:
        return draw(scores(logits, sampling, **masks), uniform, greedy=sampling.greedy)
    from trainers.engines import draw_kernel  # triton comes with torch for GPUs alone

    whole = sampling.top_p == 1 and sampling.top_k is None and masks.get("seen") is None and masks.get("early") is None
    if whole:  # then only the temperature is between the logits and the scores: no copy of them is needed
        return draw_kernel.draw(logits, uniform, temperature=sampling.temperature, greedy=sampling.greedy)
    return draw_kernel.draw(scores(logits, sampling, **masks), uniform, greedy=sampling.greedy)


def check_finite(finite: bool) -> None:
    if not finite:
        raise FloatingPointError("the policy's logits are not finite while sampling: the weights have diverged")
