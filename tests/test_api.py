"""What `fastppo` promises: its names, their arguments in order and their defaults. A change here is a change for users.

An argument may be added at the end of the keywords, with a default that leaves results as they are. Anything else needs
a release in which the old form still works, warns once (DeprecationWarning) and names the new one.
"""

import inspect
from importlib.resources import files

import fastppo
import fastppo.integrations.trl

HEAD = (
    "bias=None, temperature=1.0, softcap=None, ignore_index=-100, with_entropy=True, vocab=None, "
    "reduce_dhidden='all_reduce'"
)
CHUNKS = "chunk_tokens=None, compact='auto', num_rows=None, backend='auto'"
SUMS = "cu_seqlens=None, aggregation='token_mean', norm=None, num_tokens=None, num_seqs=None"
KL = "ref_logprobs=None, kl_coef=0.0, kl_type='k3', kl_grad='reverse'"
CLIP = "loss_type='ppo', clip_eps=0.2, clip_eps_high=None, dual_clip=None, sapo_tau=(1.0, 1.05)"
SAMPLER = "rollout_logprobs=None, is_correction=None, is_bounds=None, nll_coef=0.0, nll_mask=None, num_nll_tokens=None"

SIGNATURES = {
    "logprob": "logits, targets, *, temperature=1.0, softcap=None, ignore_index=-100, with_entropy=True, vocab=None, "
    "inplace_backward=False, backend='auto'",
    "linear_logprob": f"hidden, weight, targets, *, {HEAD}, memory='auto', logits_dtype=None, weight_grad_into=None, "
    "backend='auto'",
    "linear_loss": f"hidden, weight, targets, loss_fn, *, rows=None, mask=None, cu_seqlens=None, {HEAD}, "
    f"logits_dtype=None, weight_grad_into=None, {CHUNKS}",
    "linear_ppo_loss": f"hidden, weight, targets, old_logprobs, advantages, *, mask=None, {HEAD}, logits_dtype=None, "
    f"weight_grad_into=None, {CLIP}, ent_coef=0.0, {KL}, {SAMPLER}, {SUMS}, {CHUNKS}",
    "ppo_loss": f"logprobs, old_logprobs, advantages, *, mask=None, {CLIP}, entropy=None, ent_coef=0.0, {KL}, "
    f"{SAMPLER}, {SUMS}, backend='auto'",
    "value_loss": f"values, old_values, returns, *, mask=None, clip_eps=None, {SUMS}, backend='auto'",
    "gae": "rewards, values, *, gamma, lam, lam_returns=None, mask=None, terminated=None, truncated=None, "
    "bootstrap_values=None, cu_seqlens=None, time_dim=-1, whiten=False, group=None, backend='auto'",
    "rloo": "rewards, group_size=None, *, group_ids=None, valid=None",
    "group_advantages": "rewards, group_size=None, *, group_ids=None, valid=None, kind='grpo', lengths=None, eps=1e-06",
    "whiten": "x, mask=None, *, group=None, shift_mean=True",
    "kl_divergence": "logprobs, ref_logprobs, kl_type='k3'",
    "summarize": "metrics",
    "VocabShard": "start, end, group, vocab_size",
    "LogprobOutput": "logprobs, entropy",
    "LossOutput": "loss, metrics",
    "LinearLossOutput": "loss, metrics, logprobs, entropy",
    "GAEOutput": "advantages, returns",
}
VALUES = {
    "PPO_METRICS": "tokens seqs pg_loss kl ppo_kl entropy clip_high clip_low dual_clip clamped ratio ratio_sq "
    "is_weight is_missing",
    "VALUE_METRICS": "tokens vf_loss vf_clipped err err_sq ret ret_sq",
}
INTEGRATIONS = {
    fastppo.integrations.trl.apply: "*, memory='recompute', backend='auto'",
    fastppo.integrations.trl.undo: "",
}


def signature(function) -> str:
    """Without annotations, which mypy checks."""
    whole = inspect.signature(function)
    plain = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in whole.parameters.values()]
    return str(whole.replace(parameters=plain, return_annotation=inspect.Signature.empty))[1:-1]


def test_the_public_names_are_these():
    assert set(fastppo.__all__) == SIGNATURES.keys() | VALUES.keys() | {"__version__"}
    assert fastppo.__all__ == sorted(fastppo.__all__, key=lambda name: (not name.isupper(), name.islower(), name))


def test_signatures_are_what_they_were():
    for name, expected in SIGNATURES.items():
        assert signature(getattr(fastppo, name)) == expected, name
    for function, expected in INTEGRATIONS.items():
        assert signature(function) == expected


def test_metrics_are_where_they_were():
    for name, expected in VALUES.items():
        assert list(getattr(fastppo, name)) == expected.split(), name


def test_types_are_shipped_and_complete():
    assert files("fastppo").joinpath("py.typed").is_file()
    for name in SIGNATURES.keys() - {"VocabShard"}:
        function = getattr(fastppo, name)
        for parameter in inspect.signature(function).parameters.values():
            assert parameter.annotation is not inspect.Parameter.empty, f"{name}: {parameter.name}"
