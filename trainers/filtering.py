"""Which responses are trained on: prompts that teach nothing are replaced, responses that mislead are left out."""

from collections.abc import Callable
from dataclasses import asdict, fields
from typing import Any

import torch

from trainers.config import AlgorithmConfig
from trainers.environments import Message, Prompt, Sample
from trainers.rollout import FINISH, RolloutBatch
from trainers.run import TrainingError


class DynamicSampling:
    """DAPO (arXiv:2503.14476, 3.2): only prompts whose responses earn different raw rewards say what is better.

    Decided for each prompt's whole group of responses. Without the option, `collect` is one draw.
    """

    def __init__(self, cfg: AlgorithmConfig, name: str):
        self.cfg, self.name = cfg, name
        self.carried: list[RolloutBatch] = []  # surplus of the last step, each one prompt's responses

    @property
    def prompts_per_draw(self) -> int:
        return round(self.cfg.num_prompts_per_step * self.cfg.batch_multiplier)

    @property
    def setting(self) -> str:
        """What says how many prompts a draw has."""
        return f"{self.name}.num_prompts_per_step" + (
            f" x {self.name}.batch_multiplier" * (self.cfg.batch_multiplier != 1)
        )

    def collect(self, draw: Callable[[int], RolloutBatch]) -> RolloutBatch:
        """One step's rollout. `draw(i)` samples and scores the i-th batch of prompts of this step."""
        cfg, wanted = self.cfg, self.cfg.num_prompts_per_step
        if not cfg.use_dynamic_sampling:
            return draw(0)
        kept, draws, scores, drawn, counted = self.carried, 0, [], 0, []
        while len(kept) < wanted and draws < cfg.dynamic_sampling_max_gen_batches:
            batch = draw(draws)
            groups = [group_of(batch, group) for group in batch.group.unique().tolist()]
            kept = kept + [group for group in groups if differs(group)]
            draws, drawn = draws + 1, drawn + len(groups)
            scores.append(batch.raw_reward)
            counted.append(batch.metrics)
        if len(kept) < wanted and cfg.dynamic_sampling_on_exhausted == "error":
            raise TrainingError(
                f"{self.name}.dynamic_sampling_max_gen_batches={draws}: of {drawn} prompts drawn, {len(kept)} had "
                f"responses of different rewards, and {self.name}.num_prompts_per_step={wanted} are needed. The task "
                f"may be too easy or too hard, or {self.name}.num_generations_per_prompt too small; "
                f"{self.name}.dynamic_sampling_on_exhausted=train_partial trains on those there are"
            )
        surplus = kept[wanted:]
        metrics = {
            "dynamic_sampling/gen_batches": draws,
            "dynamic_sampling/drawn_prompts": drawn,
            "dynamic_sampling/equal_prompts": drawn + len(self.carried) - len(kept),
            "dynamic_sampling/surplus_prompts": len(surplus),
            "dynamic_sampling/carried_prompts": min(len(self.carried), wanted),
        }
        if scores:
            metrics["dynamic_sampling/score_mean"] = float(torch.cat(scores).double().mean())
        self.carried = surplus if cfg.dynamic_sampling_carry else []
        if kept:
            chosen = kept[:wanted]
            batch = RolloutBatch.concat(chosen)
            batch.group = torch.cat([torch.full((len(group),), i) for i, group in enumerate(chosen)])
            if chosen[0].greedy is not None:
                batch.greedy = RolloutBatch.concat([group.greedy for group in chosen])
        else:  # the last draw stands in, and is not trained on
            batch.valid = torch.zeros(len(batch), dtype=torch.bool)
        batch.metrics = {name: float(value) for name, value in metrics.items()}
        for name in counted[0] if counted else ():  # the environment's own, over all that was sampled
            batch.metrics[name] = sum(each[name] for each in counted) / len(counted)
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {"carried": [packed(batch) for batch in self.carried]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.carried = [unpacked(record) for record in state["carried"]]


def group_of(batch: RolloutBatch, group: int) -> RolloutBatch:
    """The responses to one prompt."""
    rows = (batch.group == group).nonzero().squeeze(-1)
    part = batch.select(rows)
    part.samples = [batch.samples[row] for row in rows.tolist()]
    if batch.greedy is not None:
        part.greedy = batch.greedy.select([group])
    return part


def differs(group: RolloutBatch) -> bool:
    return bool(group.raw_reward.max() > group.raw_reward.min())


def leave_out(batch: RolloutBatch, cfg: AlgorithmConfig) -> RolloutBatch:
    """Clear `valid` for responses that were cut (overlong_filtering), and for those that the engine and the trainer
    see too differently (seq_logprob_error_threshold: the mean of exp|rollout - old| over their tokens)."""
    valid = torch.ones(len(batch), dtype=torch.bool) if batch.valid is None else batch.valid.clone()
    if cfg.overlong_filtering:
        cut = batch.finish == FINISH.index("length")
        batch.metrics["training/overlong_filtered"] = float((valid & cut).sum())
        valid &= ~cut
    if cfg.seq_logprob_error_threshold is not None:
        wrong = ~(logprob_error(batch) <= cfg.seq_logprob_error_threshold)  # NaN is wrong too
        batch.metrics["training/mismatch_filtered"] = float((valid & wrong).sum())
        valid &= ~wrong
    return batch.update(valid=None if bool(valid.all()) else valid)


def logprob_error(batch: RolloutBatch) -> torch.Tensor:
    """[B] float32: mean of exp|rollout - old| over each response's tokens; 1 where engine and trainer agree."""
    error = (batch.rollout_logprobs - batch.old_logprobs).abs().exp()
    return batch.per_sequence(error) / batch.response_lengths


def packed(batch: RolloutBatch) -> dict[str, Any]:
    """The batch as tensors, numbers and texts alone, which a checkpoint can hold."""
    tensors = {f.name: value for f in fields(batch) if isinstance(value := getattr(batch, f.name), torch.Tensor)}
    greedy = None if batch.greedy is None else packed(batch.greedy)
    samples = [asdict(sample) for sample in batch.samples]
    return {"tensors": tensors, "samples": samples, "greedy": greedy, "reward_names": batch.reward_names}


def unpacked(record: dict[str, Any]) -> RolloutBatch:
    samples = [
        Sample(
            **{
                **sample,
                "prompt": Prompt(**sample["prompt"]),
                "messages": tuple(Message(**message) for message in sample["messages"]),
            }
        )
        for sample in record["samples"]
    ]
    greedy = None if record["greedy"] is None else unpacked(record["greedy"])
    names = tuple(record["reward_names"])
    return RolloutBatch(**record["tensors"], samples=samples, greedy=greedy, reward_names=names)
