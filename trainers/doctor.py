"""`--doctor`: one step of a run, looked at from every side that commonly goes wrong, in words and with an exit code.

Nothing is kept: the step is made in a temporary folder, by a trainer that is then thrown away. What is looked at: that
the masks end where the responses end, that the engine and the trainer agree about the log-probs of what was sampled,
that the reference is the untrained policy and stays so, that the reward is paid where it should be, that the first
update starts at ratio 1 and moves the weights, and that the engine then generates with the new ones.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from trainers import dist
from trainers.backbone import name_of
from trainers.engines import Sampling
from trainers.optim import StepMetrics
from trainers.probe import disagreement
from trainers.rollout import FINISH, RolloutBatch, pack
from trainers.trainer import Trainer

PROMPTS_AFTER_REFIT = 4


@dataclass
class Finding:
    ok: bool
    what: str
    told: str

    def __str__(self) -> str:
        return f"{'ok ' if self.ok else 'BAD'}  {self.what:<14}{self.told}"


def temporary(config: Any, folder: str) -> Any:
    """The settings for one step that leaves nothing behind, and that no probe stops before its engine is looked at."""
    return replace(
        config,
        logger=replace(config.logger, run_dir=folder, tensorboard=False, report=False),
        checkpointing=replace(config.checkpointing, enabled=False, resume="never"),
        policy=replace(config.policy, generation=replace(config.policy.generation, probe_period=0)),
    )


def examine(trainer: Trainer) -> Iterator[Finding]:
    """The findings of one step, as they come; none of what cannot be looked at because of an earlier one.

    `trainer` is a new one, and of no use afterwards: its weights are changed on purpose.

    Raises:
        RewardError, TrainingError: the step cannot be made.
    """
    trainer.refit()
    batch = trainer.generate_rollouts(1)
    yield (found := masks(batch, trainer))
    if not found.ok:  # all that follows is about the tokens that it selects
        return
    batch = trainer.prepare(batch)
    yield engine_agrees(batch, trainer)
    if batch.ref_logprobs is not None:
        yield reference_is_policy(batch)
    yield placement(batch)
    yield (found := advantages(batch))
    if not found.ok:
        return
    if not bool(batch.trained.any()):
        yield Finding(False, "update", "nothing is left to train on: " + reasons(batch))
        return
    if equal := not bool(batch.advantages[batch.trained].any()):
        batch.advantages = batch.trained.float()  # the update is to be looked at all the same
    before = {name: values.to("cpu", copy=True) for name, values in trainer.policy.trained().items()}
    with trainer.run.timer("update_actor"):
        steps = [
            trainer.policy.train_step(minibatch, trainer.policy_loss)
            for minibatch in trainer.policy_minibatches(batch, [], step=trainer.cfg.policy_training_start_step, epoch=0)
        ]
    yield ratio(steps[0].sums, trainer.cfg.max_first_ratio_error)
    yield moved(before, trainer, steps, equal)
    if batch.ref_logprobs is not None:
        yield reference_stays(batch, trainer)
    yield engine_follows(batch, trainer)


def masks(batch: RolloutBatch, trainer: Trainer) -> Finding:
    starts = batch.cu_seqlens[:-1]
    if bool(batch.mask[starts].any()):
        return Finding(False, "masks", "the first token of a sequence is trained, which nothing predicts")
    for row, sample in enumerate(batch.samples):
        tokens = slice(int(starts[row]), int(batch.cu_seqlens[row + 1]))
        if batch.tokens[tokens][batch.mask[tokens]].tolist() != list(sample.response_ids):
            return Finding(False, "masks", f"sample {row}: the trained tokens are not those that were sampled")
    ended = batch.finish == FINISH.index("stop")
    last = batch.tokens[batch.last_selected()[ended]].tolist()
    shown = ", ".join(repr(trainer.policy.tokenizer.decode([token])) for token in sorted(set(last))[:3])
    told = f"{int(batch.mask.sum())} trained tokens are the sampled ones, {int(ended.sum())} of {len(batch)} responses "
    return Finding(True, "masks", told + (f"ended by themselves, in {shown}" if last else "ended by themselves"))


def limit_of(trainer: Trainer) -> float:
    return disagreement(name_of(trainer.dtype), trainer.config.policy.generation)


def engine_agrees(batch: RolloutBatch, trainer: Trainer) -> Finding:
    apart = (batch.old_logprobs - batch.rollout_logprobs)[batch.mask].abs()
    told = f"mean |log p_trainer - log p_engine| {float(apart.mean()):.2g}, at most {float(apart.max()):.2g}"
    return Finding(float(apart.mean()) <= limit_of(trainer), "engine", told)


def reference_is_policy(batch: RolloutBatch) -> Finding:
    kl = float(batch.per_sequence((batch.old_logprobs - batch.ref_logprobs).abs()).max())
    told = f"its log-probs are the untrained policy's, within {kl:.2g} nats in every response"
    if not kl < 0.05:
        told = f"it is not the untrained policy: of one response their log-probs are {kl:.2g} nats apart"
    return Finding(kl < 0.05, "reference", told)


def reference_stays(batch: RolloutBatch, trainer: Trainer) -> Finding:
    again = trainer.policy.score(batch, {"ref_logprobs"})["ref_logprobs"]
    change = float((again - batch.ref_logprobs).abs().max())
    return Finding(change == 0, "reference", f"its log-probs moved by {change:.2g} with the update")


def placement(batch: RolloutBatch) -> Finding:
    paid, final = batch.token_scores.double(), batch.rewards
    outside = int(((paid != 0) | (final != 0))[~batch.mask].sum())
    if outside:
        return Finding(False, "reward", f"{outside} tokens that the policy did not sample are paid")
    sums, sizes = (torch.zeros(len(batch)).double().index_add(0, batch.sequence_ids, x) for x in (paid, paid.abs()))
    if not bool(((sums - batch.raw_reward).abs() <= 1e-6 * (1 + sizes)).all()):
        return Finding(False, "reward", "what a response's tokens are paid does not add up to its score")
    if not bool(final.isfinite().all()):
        return Finding(False, "reward", "after normalisation and KL some are not finite")
    last = torch.zeros_like(batch.mask).index_fill(0, batch.last_selected(), True)
    where = "on tokens inside the responses" if bool((paid != 0)[~last].any()) else "on the last token of each response"
    low, mean, high = (float(f(batch.raw_reward)) for f in (torch.min, torch.mean, torch.max))
    spread = "" if high > low else "; all are equal, so nothing can be learnt from them"
    return Finding(True, "reward", f"paid {where}; {low:.3g} to {high:.3g}, mean {mean:.3g}{spread}")


def advantages(batch: RolloutBatch) -> Finding:
    known = [name for name in ("values", "returns", "advantages") if getattr(batch, name) is not None]
    if wrong := [name for name in known if not bool(getattr(batch, name)[batch.trained].isfinite().all())]:
        return Finding(False, "advantages", f"some {wrong[0]} are not finite")
    if bool((batch.advantages[~batch.trained] != 0).any()):
        return Finding(False, "advantages", "they are not 0 outside the trained tokens")
    chosen = batch.advantages[batch.trained].double()
    if not chosen.numel():
        return Finding(True, "advantages", "no token is trained")
    mean, deviation = float(chosen.mean()), float(chosen.std(correction=0))
    return Finding(True, "advantages", f"mean {mean:.3g}, deviation {deviation:.3g} over {chosen.numel()} tokens")


def reasons(batch: RolloutBatch) -> str:
    """Why no response is trained on: what the filters counted."""
    counted = {name: x for name, x in batch.metrics.items() if name.endswith("_filtered") or "equal_prompts" in name}
    return ", ".join(f"{name} {x:.0f}" for name, x in counted.items()) or "no response is valid"


def ratio(sums: dict[str, Tensor], limit: float) -> Finding:
    total, count = sums["ratio_error"].tolist()
    mean, most = total / max(count, 1), float(sums["ratio_error_max"])
    return Finding(mean <= limit, "ratio", f"first update: mean |ratio - 1| {mean:.2g}, at most {most:.2g}")


def moved(before: dict[str, Tensor], trainer: Trainer, steps: list[StepMetrics], equal: bool) -> Finding:
    """`equal`: the rollout's advantages were all 0, and ones were put in their place."""
    if skipped := sum(step.optimizers["actor"]["skipped"] for step in steps):
        return Finding(False, "update", f"no finite gradient in {skipped:.0f} of {len(steps)} optimizer steps")
    now = trainer.policy.trained()  # the masters': a step too small for bfloat16 is one all the same
    changes = {name: (now[name].cpu() - old).double() for name, old in before.items()}
    changed = sum(bool(change.any()) for change in changes.values())
    size = sum(float(old.double().square().sum()) for old in before.values()) ** 0.5
    change = sum(float(each.square().sum()) for each in changes.values()) ** 0.5
    told = f"{changed} of {len(before)} trained tensors changed, by {change / size:.2g} of their norm"
    told += " (with advantages of 1: this rollout's are all 0)" if equal else ""
    return Finding(changed > 0, "update", told)


@torch.no_grad()
def engine_follows(batch: RolloutBatch, trainer: Trainer) -> Finding:
    """Refit after a change of every trained weight so large that no rounding hides an engine that did not get it."""
    for name, parameter in trainer.policy.parameters():
        generator = torch.Generator().manual_seed(crc32(name.encode()))
        size = float(parameter.float().square().mean().sqrt())
        noise = torch.randn(parameter.shape, generator=generator) * max(0.5 * size, 0.01)
        parameter += noise.to(parameter.device, parameter.dtype)
    few = batch.select(range(min(PROMPTS_AFTER_REFIT, len(batch))))
    change = trainer.policy.score(few, {"old_logprobs"})["old_logprobs"] - few.old_logprobs
    large = float(change[few.mask].abs().mean())
    trainer.progress.step += 1
    trainer.refit()
    prompts = [list(prompt) for prompt in dict.fromkeys(sample.prompt_ids for sample in batch.samples)]
    prompts = prompts[:PROMPTS_AFTER_REFIT]
    sampling = Sampling.from_config(trainer.config.policy.generation)
    completions = trainer.engine.generate(prompts, sampling, list(range(len(prompts))))
    probe = pack(prompts, completions)
    scored = trainer.policy.score(probe, {"old_logprobs"})["old_logprobs"]
    own = float((scored - probe.rollout_logprobs)[probe.mask].abs().mean())
    version = min(completion.weight_version for completion in completions)
    apart, versions = (list(each) for each in zip(*dist.gather((own, version)), strict=True))
    step = trainer.progress.step
    if min(versions) != step:
        return Finding(False, "refit", f"the engine's weights are those of step {min(versions)}, not of step {step}")
    told = (
        f"weights changed on purpose: the trainer's log-probs by {large:.2g}, the engine's are within "
        f"{max(apart):.2g} of them"
    )
    # Weights of noise make more of a rounding than those of a model do.
    fresh = all(each <= min(10 * limit_of(trainer), large / 4) for each in apart)
    return Finding(fresh, "refit", told)
