"""Names of what the losses count, and the means that are logged.

A loss's `metrics` are sums and counts over the tokens of one call. They are added over micro-batches and
all-reduced over ranks as they are; only then does `summarize` divide.
"""

from torch import Tensor

from fastppo.checks import check_tensor

PPO_METRICS = (
    "tokens",
    "seqs",
    "pg_loss",
    "kl",
    "ppo_kl",
    "entropy",
    "clip_high",
    "clip_low",
    "dual_clip",
    "clamped",
    "ratio",
    "ratio_sq",
    "is_weight",
    "is_missing",
)
VALUE_METRICS = ("tokens", "vf_loss", "vf_clipped", "err", "err_sq", "ret", "ret_sq")


def summarize(metrics: Tensor) -> dict[str, float]:
    """Means per token of a `metrics` vector, under the names of docs/metrics.md. Reads the device once.

    Args:
        metrics: [len(PPO_METRICS)] or [len(VALUE_METRICS)], summed over whatever is to be one number; its length
            tells which.

    Returns:
        "actor/..." or "critic/..." -> float. NaN where there is nothing to average, and for the explained variance of
        returns that do not vary.

    Raises:
        TypeError: not a tensor, as the output that has it.
        ValueError: another shape.
    """
    check_tensor("metrics", metrics)
    names = {len(PPO_METRICS): PPO_METRICS, len(VALUE_METRICS): VALUE_METRICS}.get(metrics.numel())
    if metrics.dim() != 1 or names is None:
        raise ValueError(
            f"metrics must have shape [{len(PPO_METRICS)}] (ppo_loss) or [{len(VALUE_METRICS)}] (value_loss), "
            f"got {list(metrics.shape)}"
        )
    sums = dict(zip(names, metrics.detach().double().tolist(), strict=True))
    tokens = sums.pop("tokens")
    mean = {name: value / tokens if tokens else float("nan") for name, value in sums.items()}
    return _actor(mean) if names is PPO_METRICS else _critic(mean)


def _actor(mean: dict[str, float]) -> dict[str, float]:
    return {
        "actor/pg_loss": mean["pg_loss"],
        "actor/kl_loss": mean["kl"],
        "actor/ppo_kl": mean["ppo_kl"],
        "actor/entropy": mean["entropy"],
        "actor/pg_clipfrac": mean["clip_high"] + mean["clip_low"],
        "actor/pg_clipfrac_high": mean["clip_high"],
        "actor/pg_clipfrac_low": mean["clip_low"],
        "actor/pg_clipfrac_dual": mean["dual_clip"],
        "actor/ratio_clamped_frac": mean["clamped"],
        "actor/ratio_mean": mean["ratio"],
        "actor/ratio_std": _variance(mean["ratio"], mean["ratio_sq"]) ** 0.5,
        "actor/is_weight_mean": mean["is_weight"],
        "actor/is_missing_frac": mean["is_missing"],
    }


def _critic(mean: dict[str, float]) -> dict[str, float]:
    spread = _variance(mean["ret"], mean["ret_sq"])
    unexplained = _variance(mean["err"], mean["err_sq"])
    return {
        "critic/vf_loss": mean["vf_loss"],
        "critic/vf_clipfrac": mean["vf_clipped"],
        "critic/vf_explained_var": 1 - unexplained / spread if spread > 0 else float("nan"),
        "critic/vpred_mean": mean["ret"] - mean["err"],
    }


def _variance(mean: float, mean_of_squares: float) -> float:
    """Biased. The difference may round below zero; what is within its rounding error is no variance."""
    variance = mean_of_squares - mean * mean
    return variance if not variance <= 1e-12 * mean_of_squares else 0.0
