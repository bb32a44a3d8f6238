"""Every documented error of every public op: its type, the argument's name, what was expected, what came."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

import fastppo
from fastppo import VocabShard


class Case(NamedTuple):
    call: Callable[[], Any]
    error: type[Exception]
    argument: str  # first word of the message, or in it
    expected: str
    got: str


T = torch.zeros(6)
ROWS = torch.zeros(2, 3)
INTS = torch.zeros(6, dtype=torch.int64)
CU = torch.tensor([0, 4, 6])
LOGITS = torch.zeros(2, 5)
TARGETS = torch.tensor([1, 4])


def logprob(logits: Any = LOGITS, targets: Any = TARGETS, **options: Any) -> Callable[[], Any]:
    return lambda: fastppo.logprob(logits, targets, **options)


def leaf(x: torch.Tensor) -> torch.Tensor:
    return x.clone().requires_grad_()


LOGPROB = {
    "logits_no_tensor": Case(logprob([1.0]), TypeError, "logits", "a torch.Tensor", "got list"),
    "logits_integer": Case(
        logprob(LOGITS.long()), TypeError, "logits", "float16, bfloat16, float32, float64", "got int64"
    ),
    "logits_no_dimension": Case(logprob(torch.tensor(1.0)), ValueError, "targets", "logits' shape without", "got [2]"),
    "logits_no_column": Case(
        logprob(torch.zeros(2, 0)), ValueError, "logits", "at least one column", "got shape [2, 0]"
    ),
    "targets_float": Case(logprob(targets=TARGETS.float()), TypeError, "targets", "int64", "got float32"),
    "targets_bool": Case(logprob(targets=TARGETS > 1), TypeError, "targets", "int64", "got bool"),
    "targets_shape": Case(logprob(targets=torch.zeros(3).long()), ValueError, "targets", "[2]", "got [3]"),
    "targets_device": Case(logprob(targets=TARGETS.to("meta")), ValueError, "targets", "device cpu", "got meta"),
    "targets_above": Case(
        logprob(targets=torch.tensor([0, 5])), IndexError, "targets", "[0, 5) or ignore_index=-100", "got 5"
    ),
    "targets_below": Case(logprob(targets=torch.tensor([0, -1])), IndexError, "targets", "[0, 5)", "got -1"),
    "targets_reference": Case(
        logprob(targets=torch.tensor([0, 5]), backend="torch"), IndexError, "targets", "[0, 5)", "got 5"
    ),
    "temperature_zero": Case(logprob(temperature=0.0), ValueError, "temperature", "> 0", "got 0.0"),
    "temperature_nan": Case(
        logprob(temperature=float("nan")), ValueError, "temperature", "finite number > 0", "got nan"
    ),
    "temperature_text": Case(logprob(temperature="1"), TypeError, "temperature", "a number", "got str"),
    "temperature_shape": Case(
        logprob(temperature=torch.ones(3)), ValueError, "temperature", "targets's shape [2]", "got [3]"
    ),
    "temperature_integer": Case(logprob(temperature=TARGETS), TypeError, "temperature", "float32", "got int64"),
    "temperature_content": Case(
        logprob(temperature=torch.tensor([1.0, -2.0])), ValueError, "temperature", "> 0", "got -2.0"
    ),
    "temperature_nan_content": Case(
        logprob(temperature=torch.tensor([1.0, float("nan")])), ValueError, "temperature", "> 0", "got nan"
    ),
    "softcap": Case(logprob(softcap=-30.0), ValueError, "softcap", "> 0", "got -30.0"),
    "softcap_infinite": Case(logprob(softcap=float("inf")), ValueError, "softcap", "finite", "got inf"),
    "backend_unknown": Case(logprob(backend="tpu"), ValueError, "backend", "'auto'", "got 'tpu'"),
    "backend_unavailable": Case(
        logprob(backend="cuda"), RuntimeError, "backend='cuda'", "available: ", "cannot run logprob"
    ),
    "inplace_leaf": Case(
        logprob(leaf(LOGITS), inplace_backward=True), ValueError, "logits", "not be a leaf", "got a leaf"
    ),
    "inplace_expanded": Case(
        logprob((leaf(LOGITS)[:1] * 1).expand(2, 5), inplace_backward=True),
        ValueError,
        "logits",
        "expanded",
        "strides [0, 1]",
    ),
    "inplace_overlapping": Case(
        lambda: fastppo.logprob((leaf(torch.zeros(8)) * 1).unfold(0, 5, 3), TARGETS, inplace_backward=True),
        ValueError,
        "logits",
        "overlap",
        "strides [3, 1]",
    ),
    "vocab_width": Case(
        logprob(vocab=VocabShard(0, 6, None, 6)), ValueError, "logits", "the 6 columns of vocab [0, 6)", "got 5"
    ),
    "vocab_padding_target": Case(logprob(vocab=VocabShard(0, 5, None, 4)), IndexError, "targets", "[0, 4)", "got 4"),
    "shard_range": Case(
        lambda: VocabShard(4, 2, None, 8), ValueError, "VocabShard", "0 <= start <= end", "got start=4, end=2"
    ),
    "shard_size": Case(lambda: VocabShard(0, 0, None, 0), ValueError, "vocab_size", ">= 1", "got 0"),
    "shard_group": Case(lambda: VocabShard(4, 8, None, 8), ValueError, "group", "a process group", "got group=None"),
}


def ppo(logprobs: Any = T, old: Any = T, advantages: Any = T, **options: Any) -> Callable[[], Any]:
    return lambda: fastppo.ppo_loss(logprobs, old, advantages, **options)


PPO = {
    "logprobs_integer": Case(ppo(INTS), TypeError, "logprobs", "float32", "got int64"),
    "logprobs_shape": Case(ppo(*[torch.zeros(1, 2, 3)] * 3), ValueError, "logprobs", "[T] or [B, T]", "got [1, 2, 3]"),
    "old_shape": Case(ppo(old=T[:1]), ValueError, "old_logprobs", "logprobs's shape [6]", "got [1]"),
    "old_no_tensor": Case(ppo(old=0.0), TypeError, "old_logprobs", "a torch.Tensor", "got float"),
    "advantages_integer": Case(ppo(advantages=INTS), TypeError, "advantages", "float32", "got int64"),
    "advantages_none": Case(ppo(advantages=None), TypeError, "advantages", "a torch.Tensor", "got NoneType"),
    "advantages_shape": Case(ppo(advantages=ROWS), ValueError, "advantages", "[6]", "got [2, 3]"),
    "advantages_device": Case(ppo(advantages=T.to("meta")), ValueError, "advantages", "device cpu", "got meta"),
    "mask_shape": Case(ppo(mask=T[:5]), ValueError, "mask", "[6]", "got [5]"),
    "mask_no_tensor": Case(ppo(mask=True), TypeError, "mask", "a torch.Tensor", "got bool"),
    "loss_type": Case(ppo(loss_type="grpo"), ValueError, "loss_type", "'gspo'", "got 'grpo'"),
    "clip_eps": Case(ppo(clip_eps=-0.1), ValueError, "clip_eps", ">= 0", "got -0.1"),
    "clip_eps_high": Case(ppo(clip_eps_high=float("nan")), ValueError, "clip_eps_high", ">= 0", "got nan"),
    "dual_clip": Case(ppo(dual_clip=1.0), ValueError, "dual_clip", "> 1", "got 1.0"),
    "dual_clip_in_vain": Case(
        ppo(dual_clip=3.0, loss_type="cispo"), ValueError, "dual_clip", "'ppo' or 'gspo'", "got 'cispo'"
    ),
    "sapo_tau": Case(ppo(sapo_tau=(1.0, 0.0)), ValueError, "sapo_tau", "> 0", "got 0.0"),
    "sapo_tau_length": Case(ppo(sapo_tau=(1.0,)), ValueError, "sapo_tau", "(positive, other)", "got (1.0,)"),
    "ent_coef": Case(ppo(ent_coef=0.1), ValueError, "entropy", "must be given", "got None"),
    "ent_coef_infinite": Case(ppo(ent_coef=float("inf"), entropy=T), ValueError, "ent_coef", "finite", "got inf"),
    "entropy_shape": Case(ppo(entropy=T[:2]), ValueError, "entropy", "[6]", "got [2]"),
    "kl_coef": Case(ppo(kl_coef=0.1), ValueError, "ref_logprobs", "must be given", "got None"),
    "kl_coef_tensor": Case(
        ppo(kl_coef=torch.tensor(0.1), ref_logprobs=T), TypeError, "kl_coef", "a number", "got Tensor"
    ),
    "ref_integer": Case(ppo(ref_logprobs=INTS), TypeError, "ref_logprobs", "float32", "got int64"),
    "kl_type": Case(ppo(kl_type="k4"), ValueError, "kl_type", "'k3'", "got 'k4'"),
    "kl_grad": Case(ppo(kl_grad="forward"), ValueError, "kl_grad", "'pathwise'", "got 'forward'"),
    "kl_grad_k1": Case(ppo(kl_type="k1", kl_grad="pathwise"), ValueError, "kl_grad", "'k2' or 'k3'", "got 'k1'"),
    "kl_grad_abs": Case(ppo(kl_type="abs", kl_grad="pathwise"), ValueError, "kl_grad", "'k2' or 'k3'", "got 'abs'"),
    "is_correction": Case(ppo(is_correction="tos"), ValueError, "is_correction", "'icepop'", "got 'tos'"),
    "is_correction_alone": Case(ppo(is_correction="tis"), ValueError, "rollout_logprobs", "must be given", "got None"),
    "is_bounds": Case(
        ppo(is_correction="tis", rollout_logprobs=T, is_bounds=(2.0, 1.0)),
        ValueError,
        "is_bounds",
        "low <= high",
        "got (2.0, 1.0)",
    ),
    "is_bounds_in_vain": Case(
        ppo(is_bounds=(0.0, 1.0)), ValueError, "is_bounds", "goes with is_correction", "got is_bounds=(0.0, 1.0)"
    ),
    "rollout_shape": Case(ppo(rollout_logprobs=ROWS), ValueError, "rollout_logprobs", "[6]", "got [2, 3]"),
    "seq_mask_tis": Case(
        ppo(is_correction="seq_mask_tis", rollout_logprobs=T),
        ValueError,
        "cu_seqlens",
        "is_correction='seq_mask_tis'",
        "shape [6]",
    ),
    "nll_coef": Case(ppo(nll_coef=0.1), ValueError, "nll_mask", "must be given", "got None"),
    "nll_mask_shape": Case(ppo(nll_mask=ROWS), ValueError, "nll_mask", "[6]", "got [2, 3]"),
    "num_nll_tokens": Case(ppo(num_nll_tokens=T), ValueError, "num_nll_tokens", "0-dim tensor", "got shape [6]"),
    "gspo_flat": Case(ppo(loss_type="gspo"), ValueError, "cu_seqlens", "loss_type='gspo'", "shape [6]"),
    "gmpo_flat": Case(ppo(loss_type="gmpo"), ValueError, "cu_seqlens", "loss_type='gmpo'", "shape [6]"),
    "backend_unknown": Case(ppo(backend="tpu"), ValueError, "backend", "'auto'", "got 'tpu'"),
    "backend_unavailable": Case(
        ppo(backend="cuda"), RuntimeError, "backend='cuda'", "available: ", "cannot run ppo_loss"
    ),
}


def value(values: Any = T, old: Any = T, returns: Any = T, **options: Any) -> Callable[[], Any]:
    return lambda: fastppo.value_loss(values, old, returns, **options)


VALUE = {
    "values_integer": Case(value(INTS), TypeError, "values", "float32", "got int64"),
    "old_values_shape": Case(value(old=T[:3]), ValueError, "old_values", "values's shape [6]", "got [3]"),
    "old_values_none": Case(value(old=None, clip_eps=0.2), ValueError, "old_values", "must be given", "got None"),
    "returns_integer": Case(value(returns=INTS), TypeError, "returns", "float32", "got int64"),
    "returns_shape": Case(value(returns=ROWS), ValueError, "returns", "[6]", "got [2, 3]"),
    "clip_eps": Case(value(clip_eps=0.0), ValueError, "clip_eps", "> 0", "got 0.0"),
    "backend_unknown": Case(value(backend="tpu"), ValueError, "backend", "'auto'", "got 'tpu'"),
}

# What both losses share; each is tried on both.
SHARED: dict[str, tuple[dict[str, Any], type[Exception], str, str, str]] = {
    "aggregation": ({"aggregation": "mean"}, ValueError, "aggregation", "'token_mean'", "got 'mean'"),
    "norm_missing": (
        {"aggregation": "token_sum_norm", "num_seqs": 2},
        ValueError,
        "norm",
        "'token_sum_norm'",
        "got norm=None",
    ),
    "norm_in_vain": ({"norm": 5.0}, ValueError, "norm", "'token_sum_norm'", "got norm=5.0"),
    "norm_zero": ({"aggregation": "token_sum_norm", "norm": 0.0, "num_seqs": 2}, ValueError, "norm", "> 0", "got 0.0"),
    "num_tokens_shape": ({"num_tokens": torch.zeros(1)}, ValueError, "num_tokens", "0-dim tensor", "got shape [1]"),
    "num_tokens_device": (
        {"num_tokens": torch.zeros((), device="meta")},
        ValueError,
        "num_tokens",
        "on the CPU or on cpu",
        "got meta",
    ),
    "num_tokens_negative": ({"num_tokens": -1}, ValueError, "num_tokens", ">= 0", "got -1"),
    "num_seqs_text": ({"num_seqs": "2"}, TypeError, "num_seqs", "a number", "got str"),
    "sequences_unknown": (
        {"aggregation": "seq_mean_token_mean", "num_seqs": 2},
        ValueError,
        "cu_seqlens",
        "aggregation=",
        "shape [6]",
    ),
    "sequences_uncounted": (
        {"aggregation": "seq_mean_token_sum"},
        ValueError,
        "cu_seqlens",
        "must be given",
        "shape [6]",
    ),
    "cu_seqlens_float": ({"cu_seqlens": CU.float()}, TypeError, "cu_seqlens", "int32, int64", "got float32"),
    "cu_seqlens_shape": ({"cu_seqlens": CU[None]}, ValueError, "cu_seqlens", "[B + 1]", "got [1, 3]"),
    "cu_seqlens_device": ({"cu_seqlens": CU.to("meta")}, ValueError, "cu_seqlens", "device cpu", "got meta"),
    "cu_seqlens_start": ({"cu_seqlens": CU + 1}, ValueError, "cu_seqlens", "start with 0", "got 1"),
    "cu_seqlens_end": ({"cu_seqlens": CU[:2]}, ValueError, "cu_seqlens", "end at T=6", "got 4"),
    "cu_seqlens_order": (
        {"cu_seqlens": torch.tensor([0, 4, 2, 6])},
        ValueError,
        "cu_seqlens",
        "not decrease",
        "got 4 then 2",
    ),
}
SHARED_CASES = {
    f"{op}_{name}": Case(door(**options), *rest)
    for op, door in (("ppo", ppo), ("value", value))
    for name, (options, *rest) in SHARED.items()
} | {
    "ppo_cu_seqlens_rows": Case(
        ppo(ROWS, ROWS, ROWS, cu_seqlens=CU), ValueError, "cu_seqlens", "shape [T]", "got [2, 3]"
    ),
    "value_cu_seqlens_rows": Case(
        value(ROWS, ROWS, ROWS, cu_seqlens=CU), ValueError, "cu_seqlens", "shape [T]", "got [2, 3]"
    ),
}


def gae(
    rewards: Any = ROWS, values: Any = ROWS, gamma: Any = 1.0, lam: Any = 0.95, **options: Any
) -> Callable[[], Any]:
    return lambda: fastppo.gae(rewards, values, gamma=gamma, lam=lam, **options)


GAE = {
    "rewards_integer": Case(gae(ROWS.long()), TypeError, "rewards", "float32", "got int64"),
    "values_integer": Case(gae(values=ROWS.long()), TypeError, "values", "float32", "got int64"),
    "rewards_shape": Case(gae(torch.zeros(1, 2, 3)), ValueError, "rewards", "[B, T]", "got [1, 2, 3]"),
    "values_shape": Case(gae(values=torch.zeros(2, 4)), ValueError, "values", "[2, 3]", "got [2, 4]"),
    "values_device": Case(gae(values=ROWS.to("meta")), ValueError, "values", "device cpu", "got meta"),
    "mask_shape": Case(gae(mask=T), ValueError, "mask", "[2, 3]", "got [6]"),
    "terminated_shape": Case(gae(terminated=T), ValueError, "terminated", "[2, 3]", "got [6]"),
    "truncated_shape": Case(gae(truncated=T, bootstrap_values=T[:2]), ValueError, "truncated", "[2, 3]", "got [6]"),
    "truncated_alone": Case(gae(truncated=ROWS), ValueError, "bootstrap_values", "must be given", "got None"),
    "bootstrap_shape": Case(gae(bootstrap_values=T), ValueError, "bootstrap_values", "[B] = [2]", "got [6]"),
    "bootstrap_integer": Case(gae(bootstrap_values=CU[:2]), TypeError, "bootstrap_values", "float32", "got int64"),
    "gamma": Case(gae(gamma=1.5), ValueError, "gamma", "[0, 1]", "got 1.5"),
    "gamma_text": Case(gae(gamma="1"), TypeError, "gamma", "a number", "got str"),
    "lam": Case(gae(lam=-0.1), ValueError, "lam", "[0, 1]", "got -0.1"),
    "lam_shape": Case(gae(lam=torch.ones(3)), ValueError, "lam", "[B] = [2]", "got [3]"),
    "lam_content": Case(gae(lam=torch.tensor([0.5, 1.5])), ValueError, "lam", "[0, 1]", "1.5"),
    "lam_returns": Case(gae(lam_returns=2.0), ValueError, "lam_returns", "[0, 1]", "got 2.0"),
    "time_dim": Case(gae(time_dim=2), ValueError, "time_dim", "in [-2, 1]", "got 2"),
    "time_dim_packed": Case(
        gae(T, T, time_dim=0, cu_seqlens=CU), ValueError, "time_dim", "-1 with cu_seqlens", "got 0"
    ),
    "cu_seqlens_rows": Case(gae(cu_seqlens=CU), ValueError, "rewards", "[T] with cu_seqlens", "got [2, 3]"),
    "cu_seqlens_end": Case(gae(T, T, cu_seqlens=CU[:2]), ValueError, "cu_seqlens", "end at T=6", "got 4"),
    "cu_seqlens_float": Case(gae(T, T, cu_seqlens=CU.float()), TypeError, "cu_seqlens", "int32, int64", "got float32"),
    "backend_unknown": Case(gae(backend="tpu"), ValueError, "backend", "'auto'", "got 'tpu'"),
    "backend_unavailable": Case(gae(backend="cuda"), RuntimeError, "backend='cuda'", "available: ", "cannot run gae"),
}

REST = {
    "whiten_integer": Case(lambda: fastppo.whiten(INTS), TypeError, "x", "float32", "got int64"),
    "whiten_mask_shape": Case(lambda: fastppo.whiten(T, T[:1]), ValueError, "mask", "[6]", "got [1]"),
    "whiten_mask_device": Case(lambda: fastppo.whiten(T, T.to("meta")), ValueError, "mask", "device cpu", "got meta"),
    "kl_integer": Case(lambda: fastppo.kl_divergence(INTS, T), TypeError, "logprobs", "float32", "got int64"),
    "kl_shape": Case(lambda: fastppo.kl_divergence(T, ROWS), ValueError, "ref_logprobs", "[6]", "got [2, 3]"),
    "kl_type": Case(lambda: fastppo.kl_divergence(T, T, "k4"), ValueError, "kl_type", "'k3'", "got 'k4'"),
    "summarize_length": Case(
        lambda: fastppo.summarize(T), ValueError, "metrics", "[14] (ppo_loss) or [7] (value_loss)", "got [6]"
    ),
    "summarize_output": Case(
        lambda: fastppo.summarize(fastppo.ppo_loss(T, T, T)),
        TypeError,
        "metrics",
        "a torch.Tensor",
        "got LossOutput: pass its .metrics",
    ),
    "summarize_dict": Case(lambda: fastppo.summarize({}), TypeError, "metrics", "a torch.Tensor", "got dict"),
    "weight_module": Case(
        lambda: fastppo.linear_logprob(torch.zeros(2, 4), torch.nn.Linear(4, 5), TARGETS),
        TypeError,
        "weight",
        "a torch.Tensor",
        "got Linear: pass its .weight",
    ),
    "advantages_of_sequences": Case(
        lambda: fastppo.ppo_loss(ROWS, ROWS, torch.zeros(2)),
        ValueError,
        "advantages",
        "[2, 3]",
        "got [2]: one number a sequence goes to each of its tokens by advantages.view(-1, 1).expand_as(logprobs)",
    ),
    "values_with_the_last": Case(
        lambda: fastppo.gae(ROWS, torch.zeros(2, 4), gamma=1.0, lam=1.0),
        ValueError,
        "values",
        "[2, 3]",
        "got [2, 4]: the value after the last step is bootstrap_values",
    ),
    "rloo_of_groups": Case(
        lambda: fastppo.rloo(ROWS, 3), ValueError, "rewards", "[N]", "got [2, 3]: rewards.flatten() with group_size=3"
    ),
    "summarize_shape": Case(lambda: fastppo.summarize(torch.zeros(7, 1)), ValueError, "metrics", "[7]", "got [7, 1]"),
}


def groups_cases(op: Callable[..., Any]) -> dict[str, Case]:
    return {
        "rewards_integer": Case(lambda: op(INTS, 2), TypeError, "rewards", "float32", "got int64"),
        "rewards_shape": Case(lambda: op(ROWS, 3), ValueError, "rewards", "[N]", "got [2, 3]"),
        "no_grouping": Case(lambda: op(T), ValueError, "group_size", "exactly one", "got neither"),
        "two_groupings": Case(lambda: op(T, 2, group_ids=INTS), ValueError, "group_ids", "exactly one", "got both"),
        "group_size_divides": Case(lambda: op(T, 4), ValueError, "group_size", "divide the 6 rewards", "got 4"),
        "group_size_zero": Case(lambda: op(T, 0), ValueError, "group_size", ">= 1", "got 0"),
        "group_size_float": Case(lambda: op(T, 2.0), TypeError, "group_size", "an int", "got float"),
        "group_ids_float": Case(lambda: op(T, group_ids=T), TypeError, "group_ids", "int64", "got float32"),
        "group_ids_shape": Case(lambda: op(T, group_ids=CU), ValueError, "group_ids", "[6]", "got [3]"),
        "group_ids_range": Case(lambda: op(T, group_ids=INTS + 6), IndexError, "group_ids", "[0, N) with N=6", "got 6"),
        "group_ids_negative": Case(lambda: op(T, group_ids=INTS - 1), IndexError, "group_ids", "[0, N)", "got -1"),
        "valid_shape": Case(lambda: op(T, 2, valid=T[:1]), ValueError, "valid", "[6]", "got [1]"),
        "valid_device": Case(lambda: op(T, 2, valid=T.to("meta")), ValueError, "valid", "device cpu", "got meta"),
    }


GROUPS = (
    {f"rloo_{k}": v for k, v in groups_cases(fastppo.rloo).items()}
    | {f"group_advantages_{k}": v for k, v in groups_cases(fastppo.group_advantages).items()}
    | {
        "kind": Case(lambda: fastppo.group_advantages(T, 2, kind="ppo"), ValueError, "kind", "'grpo'", "got 'ppo'"),
        "eps": Case(lambda: fastppo.group_advantages(T, 2, eps=0.0), ValueError, "eps", "> 0", "got 0.0"),
        "opo_without_lengths": Case(
            lambda: fastppo.group_advantages(T, 2, kind="opo"), ValueError, "lengths", "kind='opo'", "got None"
        ),
        "lengths_in_vain": Case(
            lambda: fastppo.group_advantages(T, 2, lengths=T),
            ValueError,
            "lengths",
            "kind='opo'",
            "got a tensor of shape [6]",
        ),
        "lengths_shape": Case(
            lambda: fastppo.group_advantages(T, 2, kind="opo", lengths=ROWS), ValueError, "lengths", "[6]", "got [2, 3]"
        ),
    }
)

ALL = {
    f"{op}.{name}": case
    for op, cases in (
        ("logprob", LOGPROB),
        ("ppo_loss", PPO),
        ("value_loss", VALUE),
        ("losses", SHARED_CASES),
        ("gae", GAE),
        ("groups", GROUPS),
        ("rest", REST),
    )
    for name, case in cases.items()
}


@pytest.mark.parametrize("case", ALL.values(), ids=ALL)
def test_error(case: Case) -> None:
    with pytest.raises(case.error) as caught:
        case.call()
    assert type(caught.value) is case.error
    message = str(caught.value)
    for part in (case.argument, case.expected, case.got):
        assert part in message


def test_the_same_calls_without_the_mistake_work() -> None:
    """So that no case above raises for another reason than its own."""
    for call in (
        logprob(), logprob(temperature=torch.ones(2)), logprob(vocab=VocabShard(0, 5, None, 5)),
        logprob(leaf(LOGITS) * 1, inplace_backward=True), logprob(LOGITS, inplace_backward=True),
        ppo(), ppo(cu_seqlens=CU, loss_type="gspo"), ppo(ROWS, ROWS, ROWS, loss_type="gmpo"), ppo(dual_clip=3.0),
        ppo(kl_coef=0.1, ref_logprobs=T), ppo(ent_coef=0.1, entropy=T), ppo(nll_coef=0.1, nll_mask=T),
        ppo(is_correction="tis", rollout_logprobs=T, is_bounds=(1.0, 2.0)),
        value(), value(old=None), value(clip_eps=0.2), value(cu_seqlens=CU, aggregation="seq_mean_token_mean"),
        value(aggregation="token_sum_norm", norm=5.0, num_seqs=2), gae(), gae(T, T, cu_seqlens=CU),
        gae(truncated=ROWS, bootstrap_values=torch.zeros(2)), lambda: fastppo.rloo(T, 2),
        lambda: fastppo.group_advantages(T, group_ids=INTS), lambda: fastppo.whiten(T, T),
    ):  # fmt: skip
        call()


def test_dtensor_is_a_type_error_that_names_the_way_out(tmp_path: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        # No collective: torch 2.6 ends the group in a deadlock with gloo's thread that lets go of its tensors.
        sharded, flat = (DTensor.from_local(x, mesh, [Shard(x.dim() - 1)], run_check=False) for x in (LOGITS, T))
        for call, name in (
            (logprob(sharded), "logits"), (ppo(flat), "logprobs"), (value(flat), "values"), (gae(flat, T), "rewards"),
            (lambda: fastppo.whiten(flat), "x"), (lambda: fastppo.rloo(flat, 2), "rewards"),
            (lambda: fastppo.group_advantages(flat, 2), "rewards"),
            (lambda: fastppo.kl_divergence(flat, T), "logprobs"),
        ):  # fmt: skip
            with pytest.raises(
                TypeError, match=rf"{name} must be a plain torch.Tensor, got a DTensor: .*to_local\(\).*VocabShard"
            ):
                call()
    finally:
        dist.destroy_process_group()


def test_when_contents_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """FASTPPO_CHECK=1 turns the checks of contents on where they would synchronise; on the CPU they are always on."""
    from fastppo.checks import contents_checked

    meta = torch.zeros(1, device="meta")
    assert contents_checked(T) and not contents_checked(meta)
    monkeypatch.setenv("FASTPPO_CHECK", "1")
    assert contents_checked(meta)


def test_hints_are_given_where_they_are_right():
    """What only looks like another library's argument gets none."""
    for call, message in (
        (lambda: fastppo.gae(ROWS, torch.zeros(6), gamma=1.0, lam=1.0), "got [6]"),  # 6 = 2 + 3 + 1
        (lambda: fastppo.gae(ROWS, torch.zeros(2), gamma=1.0, lam=1.0, time_dim=0), "got [2]"),  # of times
        (lambda: fastppo.gae(ROWS, {}, gamma=1.0, lam=1.0), "got dict"),  # whose method is called values
    ):
        with pytest.raises((TypeError, ValueError)) as caught:
            call()
        assert str(caught.value).endswith(message)
