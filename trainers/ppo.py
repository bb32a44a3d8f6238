"""PPO for language models: Schulman et al. 2017 (arXiv:1707.06347) with a KL to the reference (Ziegler et al. 2019).

    python -m trainers.ppo                                   # SmolLM2-135M, positive continuations, on two CPU cores
    python -m trainers.ppo config=ppo_copy                   # a tiny random model that learns to copy, in seconds
    python -m trainers.ppo policy.model_name=/models/mine env.name=python:my_module.my_reward data.prompts=prompts.jsonl

Each step: sample responses, score them, take log-probs (policy and reference) and values, charge the KL, estimate
advantages, then some epochs of clipped updates of critic and policy, and hand the new weights to the engine.
Under torchrun `policy.fully_shard=true` trains a model that no single device holds (docs/fully_shard.md).
"""

if __name__ == "__main__":  # before torch is imported, so that --help and a mistyped key answer at once
    from trainers.launch import launch

    raise SystemExit(launch("ppo", "PPOTrainer", __doc__))

from pathlib import Path
from typing import Any

from trainers import dist
from trainers.advantages import estimate_advantages
from trainers.config import PPOTrainerConfig
from trainers.losses import JointLoss, PolicyLoss, ValueLoss
from trainers.models import resolve_model
from trainers.optim import StepMetrics
from trainers.policy.build import stored_dtype
from trainers.rollout import RolloutBatch
from trainers.trainer import Trainer
from trainers.value import NoValue, Value
from trainers.value.build import make_value
from trainers.value.shared import SharedValue


class PPOTrainer(Trainer):
    """Builds the parts from one configuration and runs the loop. `fit()` is the algorithm."""

    config: PPOTrainerConfig

    def fit(self) -> None:
        cfg = self.config.ppo
        with self.logging():
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
                with self.run.timer("update_critic"):  # one on a server has trained while the policy did
                    batch.metrics |= self.value.settle()
                self.kl.update(batch)
                self.progress.step = step
                moved = self.refit()
                self.log(batch, policy_steps, value_steps, moved)
                self.save(when="period")
                self.validate(when="period")
            self.save(when="end")
            self.validate(when="end")

    def generate_ppo_data(self, batch: RolloutBatch) -> RolloutBatch:
        """Log-probs, reference log-probs and values, then rewards after KL, advantages and returns."""
        with self.run.timer("values"):
            pending = self.value.infer(batch)  # a remote critic computes while the policy scores
        self.score_logprobs(batch, self.value.wants)
        with self.run.timer("values"):
            values, next_values = pending.result()
            batch.update(values=values, next_values=next_values)
        with self.run.timer("adv"):
            return estimate_advantages(self.rewards(batch, self.kl.coef), self.cfg)

    def prepare(self, batch: RolloutBatch) -> RolloutBatch:
        return self.generate_ppo_data(batch)

    def build_losses(self, path: Path | str) -> None:
        super().build_losses(path)
        self.value = self._make_value(path)
        self.stateful["value"] = self.value
        self.value_loss = ValueLoss(self.config.value_loss_fn)
        if isinstance(self.value, SharedValue) and isinstance(self.policy_loss, PolicyLoss):
            self.policy_loss = JointLoss(
                self.policy_loss,
                self.value_loss,
                self.value.head,
                coef=self.config.value.loss_coef,
                detach_trunk=self.config.value.detach_trunk,
            )

    def offload(self) -> None:
        super().offload()
        self.value.offload()

    def release(self) -> None:
        self.value.release()

    def close(self) -> None:
        super().close()
        self.value.close()

    def _make_value(self, path: Path | str) -> Value:
        cfg = self.config.critic
        if cfg is None:
            return NoValue()
        if cfg.mode == "shared":
            return SharedValue(self.policy, cfg)
        if cfg.mode == "remote":
            from trainers.value.remote import RemoteValue  # needs the extra server

            tokenizer, resumed = self.policy.tokenizer, self.resumed
            return RemoteValue(cfg, run_dir=self.run.dir, resumed=resumed, tokenizer=tokenizer)
        own = path if cfg.model_name is None else resolve_model(cfg.model_name, key="value.model_name")
        return make_value(
            own,
            cfg,
            self.config.cluster,
            device=self.device,
            dtype=self.dtype,
            param_dtype=self.param_dtype("value", stored_dtype(cfg, self.dtype)),
            score_batch=self.config.policy.logprob_batch_size,
        )

    def _write(self, folder: Path) -> None:
        super()._write(folder)
        dist.together(lambda: self.value.save(folder / "critic"))

    def _read(self, folder: Path, state: dict[str, Any]) -> None:
        self.value.load(folder / "critic")
        super()._read(folder, state)
