"""The definition of `fastppo.logprob` in plain differentiable PyTorch: any derivative, float64 in -> float64 out.

It keeps several copies of the logits and is what the fast paths are tested against. It has the whole vocabulary on
this rank, so `vocab` and `inplace_backward`, which say where logits and gradient live and change no value, are not
among its arguments. One row of the special values is beyond a plain formula: NaN logits leave a NaN gradient even
where both upstream gradients are zero; an ignored row leaves none.
"""

import torch
from torch import Tensor


def logprob(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    with_entropy: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """log p(target) and entropy of softmax(softcap(logits) / temperature); see `fastppo.logprob`."""
    x = logits if logits.dtype == torch.float64 else logits.float()
    ignored = targets == ignore_index
    known = (targets >= 0) & (targets < logits.shape[-1])
    x = torch.where(ignored[..., None], 0.0, x)
    if softcap is not None:
        capped = softcap * torch.tanh(x / softcap)
        x = torch.where(x == -torch.inf, x, torch.where(x == torch.inf, x - x, capped))  # inf - inf: NaN, gradient too
    if isinstance(temperature, Tensor):
        temperature = torch.where(ignored, 1.0, temperature.detach().to(x.dtype))[..., None]

    # Differences first: they are exact near the maximum, and x / temperature rounds to the size of x.
    d = (x - x.detach().amax(-1, keepdim=True)) / temperature
    e = d.exp()
    s = e.sum(-1)
    log_s = s.log()
    d_y = d.gather(-1, torch.where(known, targets, 0)[..., None])[..., 0]
    unknown = torch.where(known | ignored, 1.0, torch.nan).to(x.dtype)
    logprobs = torch.where(ignored, 0.0, (d_y - log_s) * unknown)
    if not with_entropy:
        return logprobs, None
    t = (e * torch.where(d == -torch.inf, 0.0, d)).sum(-1)
    return logprobs, torch.where(ignored, 0.0, log_s - t / s)
