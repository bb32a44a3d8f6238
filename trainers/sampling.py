"""What `policy.generation` asks for: the sampling of validation, and what cannot be. Without torch."""

from collections.abc import Iterator, Set
from dataclasses import asdict, replace

from trainers.config import GenerationConfig, TrainerConfig
from trainers.config_types import shown

# What training leaves at these values: its log-probs are of the whole distribution, on which they do not act.
UNSCORED = {"top_p": 1.0, "top_k": None, "greedy": False, "repetition_penalty": 1.0}


def of_validation(generation: GenerationConfig) -> GenerationConfig:
    """The generation settings of validation: training's, but for what `policy.generation.val` sets."""
    return replace(generation, **{name: value for name, value in asdict(generation.val).items() if value is not None})


def sampling_problems(config: TrainerConfig) -> Iterator[str]:
    """Settings that training does not score, that contradict each other, or that have no effect; one text each."""
    generation = config.policy.generation
    for name, neutral in UNSCORED.items():
        if (value := getattr(generation, name)) != neutral:
            yield (
                f"policy.generation.{name}={shown(value)} is not scored: the trainer's log-probs are of the whole "
                f"distribution; leave it at {shown(neutral)}, and for validation alone set policy.generation.val.{name}"
            )
    yield from _shortest(generation, set())
    own = {name: value for name, value in asdict(generation.val).items() if value is not None}
    if own.keys() & {"min_new_tokens", "max_new_tokens"}:
        yield from _shortest(of_validation(generation), own.keys())
    for name in ("temperature", "top_p", "top_k"):
        if generation.val.greedy and name in own:
            yield (
                f"policy.generation.val.{name}={shown(own[name])} has no effect with policy.generation.val.greedy="
                "true: leave it at null"
            )


def _shortest(generation: GenerationConfig, own: Set[str]) -> Iterator[str]:
    """`own`: the settings that are validation's own."""
    least, most = (
        f"policy.generation.{'val.' if name in own else ''}{name}={getattr(generation, name)}"
        for name in ("min_new_tokens", "max_new_tokens")
    )
    if generation.min_new_tokens > generation.max_new_tokens:
        yield f"{least} is more than {most}"
    ends = generation.stop_token_ids or generation.stop_strings or not generation.ignore_eos
    if generation.min_new_tokens and not ends:
        yield (
            f"{least} has no effect with policy.generation.ignore_eos=true, without stop_token_ids and without "
            "stop_strings: leave it out"
        )
