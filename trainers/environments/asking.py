"""Ask an environment for its rewards, and take nothing from it that cannot be trained on."""

from collections.abc import Sequence
from numbers import Real
from typing import Any

from trainers.environments import Environment, RewardError, Sample
from trainers.environments.deadline import TooLate, call_within

FLOAT32_MAX = 3.4028234663852886e38


class LateRewardError(RewardError):
    """A reward that has not answered in time. Threads that it has started may never end."""


def ask(
    environment: Environment, samples: Sequence[Sample], *, name: str = "", timeout_s: float | None = None
) -> list[list[float]]:
    """What the environment answers, for each sample one value for its last response token, or one for each.

    Args:
        name: what errors call the reward.
        timeout_s: seconds it may take; None: no limit.

    Raises:
        RewardError: it failed, was late, or gave anything else than as many finite numbers; names the reward.
    """
    who = f"the reward {name}" if name else "the reward"
    if served_by := getattr(environment, "served_by", None):
        who += f", {served_by},"
    if not hasattr(environment, "score"):  # its turns are all that pays
        return [[0.0] for _ in samples]
    try:
        answers = call_within(timeout_s, environment.score, samples)
    except TooLate as error:  # as the cause its traceback shows where the time went
        raise LateRewardError(f"{who} did not answer within env.timeout_s={timeout_s:g} seconds") from error
    except Exception as error:
        if served_by and isinstance(error, RewardError):  # it says whose it is
            raise
        raise RewardError(f"{who} failed: {type(error).__name__}: {error}") from error
    try:
        count = len(answers)
    except TypeError:
        raise RewardError(f"{who} must be a list of {len(samples)} values, got {type(answers).__name__}") from None
    if count != len(samples):
        raise RewardError(f"{who} must give {len(samples)} values, one per response, got {count}")
    return [values_of(answer, sample, who) for answer, sample in zip(answers, samples, strict=True)]


def values_of(answer: Any, sample: Sample, who: str = "the reward") -> list[float]:
    plain = answer.tolist() if hasattr(answer, "tolist") else answer  # tensors, arrays and their scalars
    per_token = isinstance(plain, list | tuple)
    values = list(plain) if per_token else [plain]
    if not all(isinstance(value, Real) for value in values):
        raise RewardError(f"{who} must be a number, got {answer!r} for {sample.response!r}", sample)
    if not all(abs(value) <= FLOAT32_MAX for value in values):  # NaN is not either
        raise RewardError(f"{who} must be finite, got {answer!r} for {sample.response!r}", sample)
    if per_token and len(values) != len(sample.response_ids):
        raise RewardError(
            f"a per-token reward must have {len(sample.response_ids)} values, one per response token, got "
            f"{len(values)} for {sample.response!r} from {who}",
            sample,
        )
    return [float(value) for value in values]
