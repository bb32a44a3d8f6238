"""REINFORCE for language models with a leave-one-out baseline (RLOO: Kool et al. 2019; Ahmadian et al. 2024,
arXiv:2402.14740), and the other estimators without a critic: GRPO, Dr.GRPO, OPO, REINFORCE++, ReMax.

    python -m trainers.reinforce                             # SmolLM2-135M, positive continuations, on two CPU cores
    python -m trainers.reinforce config=reinforce_copy       # a tiny random model that learns to copy, in seconds

Each step: sample several responses to each prompt, score them, charge each response its KL to the reference, take what
the other responses to the prompt earned as the baseline, then update the policy and hand its weights to the engine. In
a rollout's first optimizer step the loss's ratio is 1 and its gradient that of -A log p; in those that follow the ratio
makes up for the steps between, and `loss_fn.type=reinforce` would leave it out.
"""

if __name__ == "__main__":  # before torch is imported, so that --help and a mistyped key answer at once
    from trainers.launch import launch

    raise SystemExit(launch("reinforce", "ReinforceTrainer", __doc__))

from trainers.advantages import estimate_advantages
from trainers.config import ReinforceTrainerConfig
from trainers.optim import StepMetrics
from trainers.rollout import RolloutBatch
from trainers.trainer import Trainer


class ReinforceTrainer(Trainer):
    """Builds the parts from one configuration and runs the loop. `fit()` is the algorithm; there is no critic."""

    config: ReinforceTrainerConfig

    def fit(self) -> None:
        cfg = self.config.reinforce
        with self.logging():
            self.refit()
            self.validate(when="start")
            while self.goes_on():
                step = self.progress.step + 1
                batch = self.generate_reinforce_data(self.generate_rollouts(step))
                policy_steps: list[StepMetrics] = []
                for epoch in range(cfg.ppo_epochs):
                    with self.run.timer("update_actor"):
                        for minibatch in self.policy_minibatches(batch, policy_steps, step=step, epoch=epoch):
                            policy_steps.append(self.policy.train_step(minibatch, self.policy_loss))
                self.kl.update(batch)
                self.progress.step = step
                moved = self.refit()
                self.log(batch, policy_steps, [], moved)
                self.save(when="period")
                self.validate(when="period")
            self.save(when="end")
            self.validate(when="end")

    def generate_reinforce_data(self, batch: RolloutBatch) -> RolloutBatch:
        """Log-probs and reference log-probs, then rewards after KL and each response's advantage over its siblings."""
        self.score_logprobs(batch)
        with self.run.timer("adv"):
            return estimate_advantages(self.rewards(batch, self.kl.coef), self.cfg)

    def prepare(self, batch: RolloutBatch) -> RolloutBatch:
        return self.generate_reinforce_data(batch)
