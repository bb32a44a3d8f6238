"""What the tests of the losses share on every backend: options, inputs, calls, layouts, the comparisons."""

import torch

from fastppo.metrics import PPO_METRICS, VALUE_METRICS
from fastppo.ops.ppo_loss import KL_TYPES, LOSS_TYPES, ppo_loss
from fastppo.ops.value_loss import value_loss
from fastppo.reference.ppo_loss import ppo_loss as ppo_reference
from fastppo.reference.value_loss import value_loss as value_reference
from fastppo.testing import assert_no_worse, make_loss_inputs

# A vector's tail; a block of 256 and one more; a task of 16384 tokens and the start of the next.
LENGTHS = [7, 1, 12, 0, 236, 1, 300, 16200, 5]
AGGREGATIONS = {
    "token_mean": {},
    "seq_mean_token_mean": {},
    "seq_mean_token_sum": {},
    "token_sum_norm": {"norm": 37.0},
}
PPO_FIELDS = ("logprobs", "old_logprobs", "ref_logprobs", "rollout_logprobs", "entropy", "advantages")


def ppo_case(**options):
    """Options whose tensors are named: a string stands for the field of the inputs."""
    return options


CASES = {
    **{f"{loss}": ppo_case(loss_type=loss) for loss in LOSS_TYPES},
    **{
        f"{loss}-{how}": ppo_case(loss_type=loss, aggregation=how, **more)
        for loss in ("ppo", "gspo", "gmpo")
        for how, more in AGGREGATIONS.items()
    },
    **{f"kl-{kl}": ppo_case(kl_type=kl, kl_coef=0.3, ref_logprobs="ref_logprobs") for kl in KL_TYPES},
    **{
        f"kl-{kl}-pathwise": ppo_case(kl_type=kl, kl_coef=0.3, kl_grad="pathwise", ref_logprobs="ref_logprobs")
        for kl in ("k2", "k3")
    },
    "kl-measured": ppo_case(ref_logprobs="ref_logprobs", entropy="entropy"),
    "entropy": ppo_case(entropy="entropy", ent_coef=0.1, aggregation="seq_mean_token_mean"),
    **{
        f"{correction}-{loss}": ppo_case(
            loss_type=loss, is_correction=correction, rollout_logprobs="rollout_logprobs", is_bounds=(0.97, 1.03)
        )
        for correction in ("tis", "icepop", "seq_mask_tis")
        for loss in ("ppo", "gspo", "reinforce")
    },
    "dual_clip": ppo_case(dual_clip=1.3, clip_eps_high=0.1),
    "no_clip": ppo_case(clip_eps=0.0),
    "sapo_tau": ppo_case(loss_type="sapo", sapo_tau=(0.5, 4.0)),
    "nll": ppo_case(nll_coef=0.4, nll_mask="nll_mask", kl_coef=0.1, ref_logprobs="ref_logprobs"),
    "nll-counts": ppo_case(nll_coef=0.4, nll_mask="nll_mask", num_nll_tokens=11, num_tokens=900.5),
    "gspo-nll-everything": ppo_case(
        loss_type="gspo", nll_coef=0.4, nll_mask="nll_mask", kl_coef=0.1, ref_logprobs="ref_logprobs",
        entropy="entropy", ent_coef=0.01, is_correction="tis", rollout_logprobs="rollout_logprobs", dual_clip=2.0,
        aggregation="seq_mean_token_mean", num_seqs=torch.tensor(5),
    ),
    "first_update": ppo_case(old_logprobs=None),
}  # fmt: skip


def inputs(dtype=torch.float32, lengths=LENGTHS, spread=0.4, seed=0, device="cpu"):
    batch = make_loss_inputs(lengths, spread=spread, dtype=dtype, seed=seed, device=device)
    return {**batch._asdict(), "nll_mask": torch.arange(len(batch.mask), device=device) % 3 == 0}


def ppo(batch, function=ppo_loss, *, wide=False, packed=True, backend="cpu", **options):
    """loss, metrics, and the gradients of logprobs and (if it is given) entropy."""
    batch = {k: v.double() if wide and v.is_floating_point() else v for k, v in batch.items()}
    options = {"old_logprobs": "old_logprobs", **options}
    options = {k: batch[v] if isinstance(v, str) and v in batch else v for k, v in options.items()}
    if packed:
        options["cu_seqlens"] = batch["cu_seqlens"]
    leaves = {"logprobs": batch["logprobs"].detach().requires_grad_()}
    if options.get("entropy") is not None:
        leaves["entropy"] = options["entropy"] = options["entropy"].detach().requires_grad_()
    old = options.pop("old_logprobs")
    if function is ppo_loss:
        options["backend"] = backend
    loss, metrics = function(leaves["logprobs"], old, batch["advantages"], mask=batch["mask"], **options)
    grads = torch.autograd.grad(loss * 3.0, list(leaves.values()), allow_unused=True)
    zeros = [torch.zeros_like(x) if g is None else g for x, g in zip(leaves.values(), grads, strict=True)]
    return [loss.detach(), metrics.detach(), *zeros]


NAMES = ("loss", "metrics", "dlogprobs", "dentropy")


def assert_ppo_no_worse(batch, backend, **options):
    got = ppo(batch, backend=backend, **options)
    baseline, truth = ppo(batch, ppo_reference, **options), ppo(batch, ppo_reference, wide=True, **options)
    for name, a, b, c in zip(NAMES, got, baseline, truth, strict=False):
        if name == "metrics":  # sums of very different sizes: each on its own; counts are exact
            for metric, x, y, z in zip(PPO_METRICS, a, b, c, strict=True):
                assert_no_worse(metric, x, y, z, atol=1e-7 * (1 + abs(float(z))))
        elif name == "loss":
            # A mean of 1e4 terms of size 1 that cancel, each rounded to float32 once.
            assert_no_worse(name, a, b, c, atol=1e-7)
        else:
            assert_no_worse(name, a, b, c)


def value(batch, function=value_loss, *, wide=False, backend="cpu", **options):
    batch = {k: v.double() if wide and v.is_floating_point() else v for k, v in batch.items()}
    leaf = batch["values"].detach().requires_grad_()
    old = batch["old_values"] if options.get("clip_eps") else None
    if function is value_loss:
        options["backend"] = backend
    loss, metrics = function(leaf, old, batch["returns"], mask=batch["mask"], cu_seqlens=batch["cu_seqlens"], **options)
    (grad,) = torch.autograd.grad(loss * 3.0, leaf)
    return loss.detach(), metrics, grad


def assert_value_no_worse(batch, backend, **options):
    got = value(batch, backend=backend, **options)
    baseline, truth = value(batch, value_reference, **options), value(batch, value_reference, wide=True, **options)
    assert_no_worse("loss", got[0], baseline[0], truth[0], atol=1e-7 * float(truth[0]))
    for name, a, b, c in zip(VALUE_METRICS, got[1], baseline[1], truth[1], strict=True):
        assert_no_worse(name, a, b, c, atol=1e-7 * (1 + abs(float(c))))
    assert_no_worse("dvalues", got[2], baseline[2], truth[2])


# Of [B, T].
LAYOUTS = {
    "row_padded": lambda x: torch.nn.functional.pad(x, (0, 11))[:, : x.shape[1]],
    "odd_offset": lambda x: torch.nn.functional.pad(x, (1, 2))[:, 1 : 1 + x.shape[1]],
    "transposed": lambda x: x.t().contiguous().t(),
    "strided": lambda x: x.repeat_interleave(2, -1)[:, ::2],
    "rows_skipped": lambda x: x.repeat_interleave(2, 0)[::2],
}
