"""`--doctor`: one step of a run, looked at from every side that commonly goes wrong, in words and with an exit code.

Nothing is kept: the step is made in a temporary folder. What is looked at: that the engine and the trainer agree about
the log-probs of what was sampled, that the masks end where the responses end, that the reward is paid where it should
be, that the reference is the untrained policy and stays so, that the first update starts at ratio 1, that an update
moves the weights, and that the engine then generates with the new ones.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from trainers.engines import Sampling
from trainers.metrics import sequence_kl
from trainers.rollout import FINISH, RolloutBatch, pack
from trainers.trainer import Trainer

PROBS_DIFF = {"float32": 1e-3, "bfloat16": 0.05}  # mean |p_old - p_rollout| beyond which the two are different models


@dataclass
class Finding:
    ok: bool
    what: str
    told: str

    def __str__(self) -> str:
        return f"{'ok ' if self.ok else 'BAD'}  {self.what:<14}{self.told}"


def temporary(config: Any, folder: str) -> Any:
    """The settings for one step that leaves nothing behind."""
    quiet = replace(config.logger, run_dir=folder, tensorboard=False, report=False)
    return replace(config, logger=quiet, checkpointing=replace(config.checkpointing, enabled=False, resume="never"))


def examine(trainer: Trainer) -> Iterator[Finding]:
    """The findings of one step, as they come. `trainer` is a new one; its weights are one step older afterwards."""
    trainer.refit()
    batch = trainer.generate_rollouts(1)
    yield masks(batch, trainer)
    yield placement(batch)
    batch = trainer.prepare(batch)
    yield mismatch(batch, trainer.dtype)
    yield rewards_sum(batch, trainer)
    if batch.ref_logprobs is not None:
        yield reference_is_policy(batch)
    before = {name: p.detach().clone() for name, p in trainer.policy.model.named_parameters() if p.requires_grad}
    steps = [
        trainer.policy.train_step(minibatch, trainer.policy_loss)
        for minibatch in trainer.policy_minibatches(batch, [], step=trainer.cfg.policy_training_start_step, epoch=0)
    ]
    if not steps:
        yield Finding(False, "ratio", "no minibatch had a trained token: no update could be looked at")
        return
    yield ratio(steps[0].sums, trainer.cfg.max_first_ratio_error)
    yield moved(before, trainer)
    if batch.ref_logprobs is not None:
        yield reference_stays(batch, trainer)
    trainer.progress.step = 1
    trainer.refit()
    yield engine_is_fresh(batch, trainer)


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


def placement(batch: RolloutBatch) -> Finding:
    paid, last = batch.token_scores, batch.last_selected()
    outside = int((paid[~batch.mask] != 0).sum())
    per_sequence = batch.per_sequence(paid)
    if outside or not torch.allclose(per_sequence, batch.raw_reward, atol=1e-5):
        return Finding(
            False, "reward", f"{outside} tokens outside the responses are paid, or the sums are not the scores"
        )
    on_last = int(((paid != 0) & ~torch.zeros_like(batch.mask).index_fill(0, last, True)).sum()) == 0
    low, mean, high = (float(f(batch.raw_reward)) for f in (torch.min, torch.mean, torch.max))
    spread = "" if high > low else "; all are equal, so nothing can be learnt from them"
    where = "on the last token of each response" if on_last else "on tokens inside the responses"
    return Finding(True, "reward", f"paid {where}; {low:.3g} to {high:.3g}, mean {mean:.3g}{spread}")


def mismatch(batch: RolloutBatch, dtype: str) -> Finding:
    difference = (batch.old_logprobs.exp() - batch.rollout_logprobs.exp())[batch.mask].abs()
    mean, most = float(difference.mean()), float(difference.max())
    told = f"mean |p_trainer - p_engine| {mean:.2g}, at most {most:.2g}"
    return Finding(mean <= PROBS_DIFF[dtype], "engine", told)


def rewards_sum(batch: RolloutBatch, trainer: Trainer) -> Finding:
    outside = [name for name in ("rewards", "advantages") if bool((getattr(batch, name)[~batch.trained] != 0).any())]
    finite = all(bool(getattr(batch, name).isfinite().all()) for name in ("rewards", "advantages"))
    chosen = batch.advantages[batch.trained]
    told = (
        f"mean {float(chosen.mean()):.3g}, deviation {float(chosen.std(correction=0)):.3g} over {chosen.numel()} tokens"
    )
    if batch.valid is None and outside:
        told = f"{outside[0]} are not 0 outside the trained tokens"
    return Finding(finite and not (batch.valid is None and outside), "advantages", told)


def reference_is_policy(batch: RolloutBatch) -> Finding:
    kl = float(sequence_kl(batch).abs().max())
    return Finding(kl < 0.05, "reference", f"KL to the untrained policy before the first update: at most {kl:.2g} nats")


def reference_stays(batch: RolloutBatch, trainer: Trainer) -> Finding:
    again = trainer.policy.score(batch, {"ref_logprobs"})["ref_logprobs"]
    change = float((again - batch.ref_logprobs).abs().max())
    return Finding(change == 0, "reference", f"its log-probs moved by {change:.2g} with the update")


def ratio(sums: dict[str, torch.Tensor], limit: float) -> Finding:
    total, count = sums["ratio_error"].tolist()
    mean, most = total / max(count, 1), float(sums["ratio_error_max"])
    return Finding(mean <= limit, "ratio", f"first update: mean |ratio - 1| {mean:.2g}, at most {most:.2g}")


def moved(before: dict[str, torch.Tensor], trainer: Trainer) -> Finding:
    now = dict(trainer.policy.model.named_parameters())
    changed = sum(not torch.equal(now[name], old) for name, old in before.items())
    return Finding(changed > 0, "update", f"{changed} of {len(before)} trained tensors changed")


def engine_is_fresh(batch: RolloutBatch, trainer: Trainer) -> Finding:
    """The engine's greedy answer to the first prompt, against the trainer's own log-probs of it."""
    prompt = list(batch.samples[0].prompt_ids)
    sampling = replace(Sampling.from_config(trainer.config.policy.generation), greedy=True)
    (completion,) = trainer.engine.generate([prompt], sampling, [0])
    probe = pack([prompt], [completion])
    scored = trainer.policy.score(probe, {"old_logprobs"})["old_logprobs"]
    apart = float((scored.exp() - probe.rollout_logprobs.exp())[probe.mask].abs().mean())
    fresh = apart <= PROBS_DIFF[trainer.dtype] and completion.weight_version == 1
    return Finding(fresh, "refit", f"after it, mean |p_trainer - p_engine| {apart:.2g} on a greedy response")
