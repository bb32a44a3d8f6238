"""The counts of a run that follow from its settings, and the words for them."""

import os
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class BatchPlan:
    """The counts that follow from the settings; a step is one rollout and the optimizer steps on it."""

    prompts: int
    responses_per_prompt: int
    epochs: int
    max_prompt_length: int
    max_new_tokens: int
    max_turns: int
    max_length: int | None  # of a row of several turns; None: a prompt and one response
    max_steps: int
    policy_batch: int
    policy_micro_batch: int
    critic: str | None  # where it lives; None: there is none
    value_batch: int | None  # None: a shared critic, trained in the policy's optimizer steps, or none
    value_micro_batch: int | None
    policy_micro_tokens: int | None = None  # in place of policy_micro_batch
    value_micro_tokens: int | None = None
    value_url: str | None = None  # of a critic on a server, which cuts its micro-batches itself

    @property
    def sequences(self) -> int:
        return self.prompts * self.responses_per_prompt

    @property
    def longest_sequence(self) -> int:
        return self.max_length or self.max_prompt_length + self.max_new_tokens

    @property
    def policy_steps_per_rollout(self) -> int:
        return self.epochs * self.sequences // self.policy_batch

    @property
    def policy_micro_batches(self) -> int:
        return -(-self.policy_batch // self.policy_micro_batch)

    @property
    def value_steps_per_rollout(self) -> int:
        return self.epochs * self.sequences // self.value_batch if self.value_batch else 0

    @property
    def value_micro_batches(self) -> int:
        return -(-self.value_batch // self.value_micro_batch) if self.value_batch and self.value_micro_batch else 0

    @property
    def total_policy_steps(self) -> int:
        return self.max_steps * self.policy_steps_per_rollout

    @property
    def total_value_steps(self) -> int:
        return self.max_steps * self.value_steps_per_rollout

    def describe(self) -> str:
        """The plan in words, one line a part."""

        def updates(steps: int, batch: int, micro: int, micro_batches: int, tokens: int | None) -> str:
            parts = f"{counted(micro_batches, 'micro-batch', 'micro-batches')} of up to {micro}"
            return (
                f"{self.epochs} x {self.sequences} / {batch} = {counted(steps, 'optimizer step')} per rollout, "
                f"each {batch} sequences in {parts if tokens is None else f'micro-batches of up to {tokens:,} tokens'}"
            )

        longest = f"{self.max_prompt_length} prompt + {self.max_new_tokens} new = {self.longest_sequence:,} tokens"
        if self.max_length:
            longest = f"{self.max_turns} turns of {self.max_new_tokens} new tokens, {self.max_length:,} tokens in all"
        lines = [
            f"rollout   {counted(self.prompts, 'prompt')} x {counted(self.responses_per_prompt, 'response')} = "
            f"{counted(self.sequences, 'sequence')} a step, each at most {longest}",
            "policy    "
            + updates(
                self.policy_steps_per_rollout,
                self.policy_batch,
                self.policy_micro_batch,
                self.policy_micro_batches,
                self.policy_micro_tokens,
            ),
        ]
        if self.value_batch and self.value_micro_batch:
            lines.append(
                "critic    "
                + updates(
                    self.value_steps_per_rollout,
                    self.value_batch,
                    self.value_micro_batch,
                    self.value_micro_batches,
                    self.value_micro_tokens,
                )
            )
        elif self.value_url:
            lines.append(
                f"critic    {self.epochs} x {self.sequences} / {self.value_batch} = "
                f"{counted(self.value_steps_per_rollout, 'optimizer step')} per rollout, made by {self.value_url}"
            )
        elif self.critic:
            lines.append("critic    a head on the policy's trunk, trained in the policy's optimizer steps")
        total = f"whole run {counted(self.max_steps, 'step')}, {counted(self.max_steps * self.sequences, 'response')}, "
        total += counted(self.total_policy_steps, "optimizer step") + " of the policy"
        if self.value_batch:
            total += f", {self.total_value_steps:,} of the critic"
        return "\n".join([*lines, total])


def launched_ranks() -> int:
    """The ranks that torchrun started, known before they have joined."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def ranks_of(config: Any) -> int:
    """The ranks that settings are for: those that cluster.gpus plans for, or those that torchrun started."""
    return config.cluster.gpus or launched_ranks()


def counted(n: int, noun: str, plural: str | None = None) -> str:
    return f"{n:,} {noun if n == 1 else plural or noun + 's'}"
