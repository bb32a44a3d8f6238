"""The losses' Triton kernels under the interpreter: every option by the three-way rule, sequences across
chunks, layouts, micro-batches, special values."""

import pytest
import torch

from fastppo.kernels import tiles
from fastppo.metrics import PPO_METRICS
from fastppo.ops.ppo_loss import KL_TYPES, LOSS_TYPES, ppo_loss
from fastppo.reference.ppo_loss import ppo_loss as ppo_reference
from fastppo.testing import assert_no_worse, make_loss_inputs

# Two programs of the token pass with a tail; sequences of no token, one, one chunk, and over a chunk's end.
LENGTHS = [7, 1, 12, 0, 44, 1, 37, 101]
AGGREGATIONS = {"token_mean": {}, "seq_mean_token_mean": {}, "seq_mean_token_sum": {}, "token_sum_norm": {"norm": 37.0}}


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    """Loops of more than one turn on few tokens: interpreting is slow."""
    monkeypatch.setattr(tiles, "LOSS_TOKENS", tiles.TokenTiles(groups=8, vector=4, warps=4, programs=3))
    for name, size in {"CHUNK": 32, "CHUNK_TILE": 16, "SEQUENCES": 4, "SLOTS": 2, "FINISH_ROWS": 2}.items():
        monkeypatch.setattr(tiles, f"LOSS_{name}", size)


CASES = {
    **{loss: {"loss_type": loss} for loss in LOSS_TYPES},
    **{
        f"{loss}-{how}": {"loss_type": loss, "aggregation": how, **more}
        for loss in ("ppo", "gspo", "gmpo")
        for how, more in AGGREGATIONS.items()
        if how != "token_mean"
    },
    **{f"kl-{kl}": {"kl_type": kl, "kl_coef": 0.3, "ref_logprobs": "ref_logprobs"} for kl in KL_TYPES},
    "kl-k3-pathwise": {"kl_coef": 0.3, "kl_grad": "pathwise", "ref_logprobs": "ref_logprobs"},
    "kl-measured": {"ref_logprobs": "ref_logprobs", "entropy": "entropy"},
    "entropy": {"entropy": "entropy", "ent_coef": 0.1, "aggregation": "seq_mean_token_mean"},
    **{
        f"{correction}-{loss}": {
            "loss_type": loss, "is_correction": correction, "rollout_logprobs": "rollout_logprobs",
            "is_bounds": (0.97, 1.03),
        }
        for correction in ("tis", "icepop", "seq_mask_tis")
        for loss in ("ppo", "gspo")
    },
    "dual_clip": {"dual_clip": 1.3, "clip_eps_high": 0.1},
    "sapo_tau": {"loss_type": "sapo", "sapo_tau": (0.5, 4.0)},
    "nll": {"nll_coef": 0.4, "nll_mask": "nll_mask", "num_nll_tokens": 11, "num_tokens": 900.5},
    "everything": {
        "loss_type": "gspo", "nll_coef": 0.4, "nll_mask": "nll_mask", "kl_coef": 0.1, "ref_logprobs": "ref_logprobs",
        "entropy": "entropy", "ent_coef": 0.01, "is_correction": "tis", "rollout_logprobs": "rollout_logprobs",
        "dual_clip": 2.0, "aggregation": "seq_mean_token_mean", "num_seqs": torch.tensor(5),
    },
    "first_update": {"old_logprobs": None},
}  # fmt: skip


def inputs(dtype=torch.float32, lengths=LENGTHS, spread=0.4):
    batch = make_loss_inputs(lengths, spread=spread, dtype=dtype)
    return {**batch._asdict(), "nll_mask": torch.arange(len(batch.mask)) % 3 == 0}


def ppo(batch, function=ppo_loss, *, wide=False, packed=True, **options):
    """loss, metrics, and the gradients of logprobs and (if it is given) entropy."""
    batch = {k: v.double() if wide and v.is_floating_point() else v for k, v in batch.items()}
    options = {"old_logprobs": "old_logprobs", **options}
    options = {k: batch[v] if isinstance(v, str) and v in batch else v for k, v in options.items()}
    if packed:
        options["cu_seqlens"] = batch["cu_seqlens"]
    leaves = {"logprobs": batch["logprobs"].detach().requires_grad_()}
    if options.get("entropy") is not None:
        leaves["entropy"] = options["entropy"] = options["entropy"].detach().requires_grad_()
    if function is ppo_loss:
        options["backend"] = "triton"
    old = options.pop("old_logprobs")
    loss, metrics = function(leaves["logprobs"], old, batch["advantages"], mask=batch["mask"], **options)
    grads = torch.autograd.grad(loss * 3.0, list(leaves.values()), allow_unused=True)
    zeros = [torch.zeros_like(x) if g is None else g for x, g in zip(leaves.values(), grads, strict=True)]
    return [loss.detach(), metrics.detach(), *zeros]


def assert_all_no_worse(metrics, got, baseline, truth):
    for name, x, y, z in zip(metrics, got[1], baseline[1], truth[1], strict=True):
        assert_no_worse(name, x, y, z, atol=1e-7 * (1 + abs(float(z))))
    assert_no_worse("loss", got[0], baseline[0], truth[0], atol=1e-7)
    for name, *three in zip(("gradient", "dentropy"), got[2:], baseline[2:], truth[2:], strict=False):
        assert_no_worse(name, *three)


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_ppo_loss_is_no_worse_than_torch(options):
    batch = inputs()
    three = ppo(batch, **options), ppo(batch, ppo_reference, **options), ppo(batch, ppo_reference, wide=True, **options)
    assert_all_no_worse(PPO_METRICS, *three)
