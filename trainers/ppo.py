"""PPO for language models: Schulman et al. 2017 (arXiv:1707.06347) with a KL to the reference (Ziegler et al. 2019).

    python -m trainers.ppo                                   # SmolLM2-135M, positive continuations, on two CPU cores
    python -m trainers.ppo config=copy                       # a tiny random model that learns to copy, in seconds
    python -m trainers.ppo policy.model_name=/models/mine env.name=python:my_module.my_reward data.prompts=prompts.jsonl

Each step: sample responses, score them, take log-probs (policy and reference) and values, charge the KL, estimate
advantages, then some epochs of clipped updates of critic and policy, and hand the new weights to the engine.
What is not here: several GPUs, remote critics, LoRA, environments of more than one turn.
"""

if __name__ == "__main__":  # before torch is imported, so that --help and a mistyped key answer at once
    from trainers.run import launch

    raise SystemExit(launch("ppo", "PPOTrainer", __doc__))

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from trainers import checkpoint, rewards
from trainers.advantages import estimate_advantages
from trainers.arithmetic import check, check_model
from trainers.backbone import model_facts, pick_device, pick_dtype
from trainers.batching import policy_minibatches
from trainers.cli import compare_for_resume, load_config, save_config
from trainers.config import PPOTrainerConfig
from trainers.engines.native import NativeEngine, share_parameters
from trainers.environments import Environment, Prompt, make_environment
from trainers.logger import Logger
from trainers.losses import JointLoss, PolicyLoss, ValueLoss
from trainers.metrics import memory_metrics, rollout_metrics, token_table, update_metrics, validation_metrics
from trainers.models import resolve_model
from trainers.optim import StepMetrics
from trainers.policy.hf import HFPolicy
from trainers.prompts import PromptLoader, load_prompts, tokenize_prompts
from trainers.refit import refit
from trainers.rollout import RolloutBatch, generate
from trainers.run import Progress, Run, TrainingError, progress_from, training_record
from trainers.value import Value
from trainers.value.hf import LocalValue
from trainers.value.shared import SharedValue


class PPOTrainer:
    """Builds the parts from one configuration and runs the loop. `fit()` is the algorithm."""

    def __init__(
        self,
        config: PPOTrainerConfig,
        *,
        environment: Environment | None = None,
        eval_prompts: Sequence[Prompt] | None = None,
        metric_fn: Callable[..., dict[str, list[float]]] | None = None,
    ):
        check(config)
        self.config, self.metric_fn = config, metric_fn
        if config.cluster.num_threads is not None:
            torch.set_num_threads(config.cluster.num_threads)
        torch.manual_seed(config.ppo.seed)
        self.run = Run(config, "ppo")
        self.environment = environment or make_environment(config.env)
        name = self.environment.default_model if config.policy.model_name == "auto" else config.policy.model_name
        prompts = load_prompts(config.data, self.environment)
        resumed = checkpoint.find(config.checkpointing.resume, self.run.dir)
        path = resolve_model(name)
        device = pick_device(config.cluster.device)
        # What "auto" once measured is part of the run: a resume must not measure anew.
        dtype = pick_dtype(checkpoint.compute_dtype(resumed) if resumed else config.policy.dtype, device)
        self.policy = HFPolicy(path, config.policy, device=device, dtype=dtype)
        self.value = self._make_value(path, device, dtype)
        self._make_losses()

        wanted = config.policy.generation.dtype
        engine_dtype = dtype if wanted == "auto" else getattr(torch, wanted)
        self.engine = NativeEngine(
            share_parameters(self.policy.model, engine_dtype),
            self.policy.tokenizer,
            max_batch_size=config.policy.generation.max_batch_size,
        )
        vocab_size = self.policy.model.get_input_embeddings().num_embeddings
        tokenized = [
            tokenize_prompts(part, self.policy.tokenizer, config.data, vocab_size=vocab_size)
            for part in (prompts, eval_prompts or [])
        ]
        check_model(config, self.policy.model.config, max(len(prompt.ids) for part in tokenized for prompt in part))
        self.eval_prompts = tokenized[1] or tokenized[0]
        self.loader = PromptLoader(
            tokenized[0], config.ppo.num_prompts_per_step, seed=config.ppo.seed, shuffle=config.data.shuffle
        )
        self.progress = Progress()
        self.dtype = str(dtype).removeprefix("torch.")
        facts = {"compute_dtype": self.dtype, "device": str(device), **model_facts(path, self.policy.model)}
        self.saved_step: int | None = None
        self.validated_step: int | None = None
        if resumed:
            self._resume(resumed)
        self.run.open(facts)

    def fit(self) -> None:
        cfg = self.config.ppo
        with (
            self.run,
            Logger(
                self.run.dir, self.config.logger, max_steps=cfg.max_num_steps, start_step=self.progress.step
            ) as self.logger,
        ):
            self.refit()
            self.validate(when="start")
            while self.goes_on():
                step = self.progress.step + 1
                batch = self.generate_ppo_data(self.generate_rollouts(step))
                policy_steps: list[StepMetrics] = []
                value_steps: list[StepMetrics] = []
                for epoch in range(cfg.ppo_epochs):
                    with self.run.timer("update_critic"):
                        for minibatch in self.value.minibatches(batch, seed=cfg.seed, step=step, epoch=epoch):
                            value_steps.append(self.value.train_step(minibatch, self.value_loss))
                    with self.run.timer("update_actor"):
                        for minibatch in self.policy_minibatches(batch, policy_steps, step=step, epoch=epoch):
                            policy_steps.append(self.policy.train_step(minibatch, self.policy_loss))
                self.progress.step = step
                moved = self.refit()
                self.log(batch, policy_steps, value_steps, moved)
                self.save(when="period")
                self.validate(when="period")
            self.save(when="end")
            self.validate(when="end")

    def generate_rollouts(self, step: int) -> RolloutBatch:
        """Prompts -> responses -> scores."""
        cfg = self.config
        drawn = self.loader.state_dict()
        prompts = self.loader.next_batch()
        with self.run.timer("gen"):
            batch = generate(
                self.engine,
                prompts,
                cfg.policy.generation,
                self.policy.tokenizer,
                samples_per_prompt=cfg.ppo.num_generations_per_prompt,
                seed=cfg.ppo.seed,
                step=step,
            )
        with self.run.timer("reward"):
            return self.score(batch, drawn)

    def score(self, batch: RolloutBatch, drawn: dict[str, Any]) -> RolloutBatch:
        """The batch with its rewards. If they fail, the state before its prompts were drawn is saved first."""
        try:
            return rewards.score(self.environment, batch)
        except rewards.RewardError:
            self.loader.load_state_dict(drawn)
            self.save(when="failure")
            rewards.dump(batch, self.run.dir / "failed_rollout.jsonl")
            raise

    def generate_ppo_data(self, batch: RolloutBatch) -> RolloutBatch:
        """Log-probs, reference log-probs and values, then rewards after KL, advantages and returns."""
        pending = self.value.infer(batch)  # a remote critic computes while the policy scores
        with self.run.timer("old_log_prob"):
            batch.update(**self.policy.score(batch, {"old_logprobs", "ref_logprobs"} | self.value.wants))
        with self.run.timer("values"):
            values, next_values = pending.result()
            batch.update(values=values, next_values=next_values)
        with self.run.timer("adv"):
            charged = rewards.token_rewards(batch, self.config.ppo, self.config.loss_fn)
            return estimate_advantages(charged, self.config.ppo)

    def policy_minibatches(self, batch: RolloutBatch, done: list[StepMetrics], *, step: int, epoch: int):
        return policy_minibatches(batch, self.config, done, step=step, epoch=epoch)

    def refit(self) -> int:
        with self.run.timer("update_weights"):
            return refit(self.policy, self.engine, version=self.progress.step)

    def validate(self, when: str = "now") -> dict[str, float]:
        """Mean score on the validation prompts, sampled with the same seeds every time."""
        cfg, step = self.config.ppo, self.progress.step
        due = {
            "now": True,
            "start": cfg.val_at_start and step == 0,
            "period": cfg.val_period > 0 and step % cfg.val_period == 0,
            "end": cfg.val_at_end and self.validated_step != step and not self.run.stopping,
        }
        if not due[when]:
            return {}
        with self.run.timer("testing"):
            batch = generate(
                self.engine,
                self.eval_prompts[: cfg.max_val_samples],
                self.config.policy.generation,
                self.policy.tokenizer,
                samples_per_prompt=1,
                seed=cfg.seed,
                step=-1,
            )
            metrics = validation_metrics(self.score(batch, self.loader.state_dict()), self.metric_fn)
        if when != "now":
            self.logger.validation(step, metrics)
            self.validated_step = step
        return metrics

    def log(
        self, batch: RolloutBatch, policy_steps: list[StepMetrics], value_steps: list[StepMetrics], refit_bytes: int
    ) -> None:
        progress, cfg = self.progress, self.config
        progress.consumed_prompts = self.loader.consumed
        progress.consumed_samples += len(batch)
        progress.total_valid_tokens += int(batch.mask.sum())
        metrics = (
            rollout_metrics(batch) | update_metrics(policy_steps, value_steps) | progress.metrics(self.loader.epoch)
        )
        if hasattr(self.environment, "metrics"):
            metrics |= self.environment.metrics(batch.samples, batch.raw_reward.tolist())
        metrics |= {"perf/refit_bytes": float(refit_bytes)} | memory_metrics()
        due = progress.step in (1, cfg.ppo.max_num_steps) or progress.step % cfg.logger.samples_period == 0
        if due and cfg.logger.num_inspected_samples:
            shown = batch.select(range(min(cfg.logger.num_inspected_samples, len(batch))))
            logprobs = self.policy.score(shown, {"old_logprobs"})["old_logprobs"]
            rows = token_table(shown, logprobs, self.policy.tokenizer, self.policy_clip)
            self.logger.samples(progress.step, rows)
        batch.trunk_hidden = None  # as large as all else together, and of no use once the updates are done
        self.logger.log(progress.step, metrics | self.run.lap(metrics["perf/total_num_tokens"]))
        self.run.check(metrics, progress)

    def save(self, when: str) -> None:
        """A checkpoint of the state after the last finished step, unless there is one or none is due."""
        cfg, step = self.config.checkpointing, self.progress.step
        skipped = {"period": bool(step % cfg.save_period), "failure": step == 0, "end": False}
        if not cfg.enabled or step == self.saved_step or skipped[when]:
            return
        with self.run.timer("save_checkpoint"), self.run.saving(step, last=when == "end"):
            checkpoint.save(self.run.dir / "checkpoints", step, self._write, keep_last_k=cfg.keep_last_k)
            self.saved_step = step

    def _write(self, folder: Path) -> None:
        self.policy.save(folder / "policy")
        self.value.save(folder / "critic")
        save_config(self.config, folder / "config.yaml")
        training = training_record(self.progress, loader=self.loader.state_dict(), compute_dtype=self.dtype)
        checkpoint.write_state(folder, training, {"policy": self.policy.state_dict(), "value": self.value.state_dict()})

    def _resume(self, folder: Path) -> None:
        if changed := compare_for_resume(load_config(folder / "config.yaml"), self.config):
            raise TrainingError(f"cannot resume {folder}: these settings change what is trained: {', '.join(changed)}")
        training, state = checkpoint.read_state(folder)
        self.value.load(folder / "critic")
        self.policy.load_state_dict(state["policy"])
        self.value.load_state_dict(state["value"])
        self.loader.load_state_dict(training["loader"])
        self.progress = progress_from(training)
        self.saved_step = self.progress.step
        print(f"resumed after step {self.progress.step} from {folder}", flush=True)

    def goes_on(self) -> bool:
        cfg = self.config.ppo
        epochs_left = cfg.max_num_epochs is None or self.loader.epoch < cfg.max_num_epochs
        return not self.run.stopping and self.progress.step < cfg.max_num_steps and epochs_left

    def _make_value(self, path: Path | str, device: torch.device, dtype: torch.dtype) -> Value:
        cfg = self.config.value
        if cfg.mode == "shared":
            return SharedValue(self.policy, cfg)
        own = path if cfg.model_name is None else resolve_model(cfg.model_name)
        return LocalValue(own, cfg, device=device, dtype=dtype, score_batch=self.config.policy.logprob_batch_size)

    def _make_losses(self) -> None:
        cfg, generation = self.config, self.config.policy.generation
        policy = PolicyLoss(
            cfg.loss_fn,
            temperature=generation.temperature,
            norm_length=generation.max_new_tokens,
            softcap=self.policy.softcap,
        )
        self.policy_clip = policy.ratio_bounds
        self.value_loss = ValueLoss(cfg.value_loss_fn)
        self.policy_loss: PolicyLoss | JointLoss = policy
        if isinstance(self.value, SharedValue):
            self.policy_loss = JointLoss(
                policy,
                self.value_loss,
                self.value.head,
                coef=cfg.value.loss_coef,
                detach_trunk=cfg.value.detach_trunk,
            )
