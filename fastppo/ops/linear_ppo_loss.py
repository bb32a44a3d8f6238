"""`ppo_loss` from hidden states and the output head in one pass: `linear_loss` with the losses of `ops/ppo_loss.py`.

Counts that are not given are taken of the whole call first, so a token's coefficient, and with it its row of dlogits,
does not depend on the chunk it came in. In float16 the chunks compute sums without their normaliser, so that it does
not depend on how many tokens the step has either, and does not underflow.
"""

from __future__ import annotations  # with evaluated ones torch 2.8 compiles no inner function

from typing import Literal

import torch
from torch import Tensor

from fastppo.checks import INTEGERS, check_like, check_tensor
from fastppo.metrics import PPO_METRICS
from fastppo.ops._linear import product_dtype
from fastppo.ops._loss import LossOutput, check_count, check_layout
from fastppo.ops.linear_loss import LinearLossOutput, linear_loss
from fastppo.ops.ppo_loss import ppo_loss
from fastppo.reference.aggregation import Sequences, reciprocal
from fastppo.vocab import VocabShard


def linear_ppo_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    with_entropy: bool = True,
    vocab: VocabShard | None = None,
    reduce_dhidden: Literal["all_reduce", "reduce_scatter", "none"] = "all_reduce",
    logits_dtype: torch.dtype | None = None,
    weight_grad_into: Tensor | None = None,
    loss_type: Literal["ppo", "reinforce", "cispo", "gspo", "gmpo", "sapo"] = "ppo",
    clip_eps: float = 0.2,
    clip_eps_high: float | None = None,
    dual_clip: float | None = None,
    sapo_tau: tuple[float, float] = (1.0, 1.05),
    ent_coef: float = 0.0,
    ref_logprobs: Tensor | None = None,
    kl_coef: float = 0.0,
    kl_type: Literal["k1", "abs", "k2", "k3"] = "k3",
    kl_grad: Literal["reverse", "pathwise"] = "reverse",
    rollout_logprobs: Tensor | None = None,
    is_correction: Literal["tis", "icepop", "seq_mask_tis"] | None = None,
    is_bounds: tuple[float, float] | None = None,
    nll_coef: float = 0.0,
    nll_mask: Tensor | None = None,
    num_nll_tokens: float | Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    aggregation: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "token_sum_norm"] = "token_mean",
    norm: float | None = None,
    num_tokens: float | Tensor | None = None,
    num_seqs: float | Tensor | None = None,
    chunk_tokens: int | None = None,
    compact: Literal["auto", "off"] = "auto",
    num_rows: int | None = None,
    backend: Literal["auto", "cuda", "triton", "cpu", "torch"] = "auto",
) -> LinearLossOutput:
    """`ppo_loss` of the log-probs and entropies of `linear_logprob`, and its gradients, with three products in all.

    Args:
        hidden, weight, targets, bias, temperature, softcap, ignore_index, with_entropy, vocab, reduce_dhidden,
            logits_dtype, weight_grad_into: as in `fastppo.linear_logprob`. targets is [T] or [B, T].
        chunk_tokens, compact, num_rows: as in `fastppo.linear_loss`. gspo, gmpo, seq_mask_tis and
            seq_mean_token_mean are losses of whole sequences.
        mask: the tokens that count; one whose target is ignore_index does not.
        everything else: as in `fastppo.ppo_loss`, of targets' shape where it is per token. Counts that are None are
            those of this whole call.

    Returns:
        LinearLossOutput(loss, metrics, logprobs, entropy): ppo_loss's loss and metrics; logprobs and entropy [T] or
        [B, T], 0 where not selected. Only `loss` is differentiable, in hidden, weight and bias, and once.

    Raises:
        As `fastppo.linear_loss` and `fastppo.ppo_loss`.
    """
    check_tensor("targets", targets, INTEGERS)
    targets = targets.long()  # an unsigned dtype has no -100 to compare with
    check_tensor("advantages", advantages)
    per_token = {
        "old_logprobs": old_logprobs,
        "advantages": advantages,
        "ref_logprobs": ref_logprobs,
        "rollout_logprobs": rollout_logprobs,
        "nll_mask": nll_mask,
    }
    rows = {name: value for name, value in per_token.items() if value is not None}
    for name, value in rows.items():
        if name != "nll_mask":
            check_tensor(name, value)
        check_like(name, value, "targets", targets)
    if ent_coef and not with_entropy:
        raise ValueError(f"with_entropy must be True with ent_coef={ent_coef}, got False")
    check_count("num_nll_tokens", num_nll_tokens, targets)
    needs_sequences = f"loss_type={loss_type!r}" if loss_type in ("gspo", "gmpo") else None
    if is_correction == "seq_mask_tis":
        needs_sequences = "is_correction='seq_mask_tis'"
    check_layout("targets", targets, mask, cu_seqlens, aggregation, norm, num_tokens, num_seqs, needs_sequences)

    selected = targets != ignore_index
    if mask is not None:
        selected = selected & (mask != 0)
    sequences = Sequences.of(selected, cu_seqlens)
    if aggregation == "token_mean":
        count = selected.sum() if num_tokens is None else num_tokens
    else:
        count = sequences.count() if num_seqs is None else num_seqs
    scale = reciprocal(count, advantages) / (1.0 if norm is None else norm)
    some = scale > 0  # a count of 0 gives loss 0, but for the NLL term, which has its own
    normaliser = torch.where(some, scale, 1.0)
    # In float16, whose range ends early, dlogits are formed without the normaliser; else with it, so that backward's
    # factor is 1 where the caller's is, and multiplies nothing.
    outside = torch.float16 in (product_dtype(hidden, weight), logits_dtype)
    count_of_sums = some.double() if outside else some / normaliser
    if nll_coef and nll_mask is not None:
        found = (selected & (nll_mask != 0)).sum() if num_nll_tokens is None else num_nll_tokens
        num_nll_tokens = normaliser * found if outside else found

    def sums(logprobs: Tensor, entropy: Tensor | None, rows: dict[str, Tensor]) -> LossOutput:
        return ppo_loss(
            logprobs,
            rows.get("old_logprobs"),
            rows["advantages"],
            mask=rows["mask"],
            loss_type=loss_type,
            clip_eps=clip_eps,
            clip_eps_high=clip_eps_high,
            dual_clip=dual_clip,
            sapo_tau=sapo_tau,
            entropy=entropy,
            ent_coef=ent_coef,
            ref_logprobs=rows.get("ref_logprobs"),
            kl_coef=kl_coef,
            kl_type=kl_type,
            kl_grad=kl_grad,
            rollout_logprobs=rows.get("rollout_logprobs"),
            is_correction=is_correction,
            is_bounds=is_bounds,
            nll_coef=nll_coef,
            nll_mask=rows.get("nll_mask"),
            num_nll_tokens=num_nll_tokens,
            cu_seqlens=rows.get("cu_seqlens"),
            aggregation=aggregation,
            norm=None if norm is None else 1.0,
            num_tokens=count_of_sums,
            num_seqs=count_of_sums,
            backend="auto" if backend == "cuda" else backend,  # "cuda" is of the products
        )

    whole = needs_sequences is not None or aggregation == "seq_mean_token_mean"
    output = linear_loss(
        hidden,
        weight,
        targets,
        sums,
        rows={name: value.detach() for name, value in rows.items()},
        mask=selected,
        cu_seqlens=sequences.offsets if whole else None,
        bias=bias,
        temperature=temperature,
        softcap=softcap,
        ignore_index=ignore_index,
        with_entropy=with_entropy,
        vocab=vocab,
        reduce_dhidden=reduce_dhidden,
        logits_dtype=logits_dtype,
        weight_grad_into=weight_grad_into,
        chunk_tokens=chunk_tokens,
        compact=compact,
        num_rows=num_rows,
        backend=backend,
    )
    # A sequence that is cut into chunks is one sequence all the same.
    metrics = output.metrics.clone()
    metrics[PPO_METRICS.index("seqs")] = sequences.count()
    loss = (output.loss.double() * normaliser).to(output.loss.dtype) if outside else output.loss
    return LinearLossOutput(loss, metrics, output.logprobs, output.entropy)
