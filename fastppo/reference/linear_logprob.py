"""The definition of `fastppo.linear_logprob` in plain differentiable PyTorch: a linear layer, then `logprob`.

All logits exist at once. The vocabulary is whole on this rank, so `vocab` and `reduce_dhidden` are not among the
arguments, nor are `memory` and `weight_grad_into`, which say where logits and gradients live and change no value.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from fastppo.reference.logprob import logprob


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    with_entropy: bool = True,
    logits_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`reference.logprob` of hidden @ weight.T + bias in the wider of the two dtypes; see `fastppo.linear_logprob`."""
    product = torch.promote_types(hidden.dtype, weight.dtype)
    wide = product if logits_dtype is None else torch.promote_types(product, logits_dtype)
    # A row that is not read may hold anything; 0 * NaN would carry it into the weight's gradient.
    hidden = torch.where((targets == ignore_index)[..., None], 0.0, hidden)
    hidden, weight = hidden.to(product).to(wide), weight.to(product).to(wide)
    logits = F.linear(hidden, weight, None if bias is None else bias.to(product).to(wide))
    logits = logits.to(wide if logits_dtype is None else logits_dtype)
    return logprob(
        logits,
        targets,
        temperature=temperature,
        softcap=softcap,
        ignore_index=ignore_index,
        with_entropy=with_entropy,
    )
