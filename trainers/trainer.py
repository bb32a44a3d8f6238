"""What the two trainers share: parts built from one configuration, rollouts, refit, validation, logging, resuming."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from trainers import checkpoint, dist, rewards
from trainers.advantages import needs_greedy
from trainers.arithmetic import check, check_launched, check_model
from trainers.backbone import name_of, pick_device, pick_dtype, pick_param_dtype
from trainers.batching import policy_minibatches
from trainers.cli import compare_for_resume, load_config, save_config
from trainers.config import GenerationConfig, TrainerConfig
from trainers.engines import Engine
from trainers.engines.build import make_engine
from trainers.environments import Environment, Prompt, check_turns, make_environment
from trainers.filtering import DynamicSampling, leave_out
from trainers.logger import Logger, SilentLogger
from trainers.losses import JointLoss, PolicyLoss
from trainers.metrics import memory_metrics, rollout_metrics, token_table, update_metrics
from trainers.models import resolve_model
from trainers.offload import check_device
from trainers.optim import StepMetrics
from trainers.policy import Policy
from trainers.policy.build import make_policy, stored_dtype
from trainers.probe import Probe
from trainers.prompts import PromptLoader, TokenizedPrompt, load_prompts, load_val_prompts, tokenize_prompts
from trainers.refit import Refit
from trainers.rollout import RolloutBatch, generate
from trainers.run import Progress, Run, TrainingError, progress_from, training_record
from trainers.sampling import of_validation
from trainers.service.reach import reach
from trainers.validation import validation_metrics, validation_rows


class Trainer:
    """Base of PPOTrainer and ReinforceTrainer, which add the critic and the algorithm: `build_losses()` and `fit()`."""

    def __init__(
        self,
        config: TrainerConfig,
        *,
        environment: Environment | None = None,
        eval_prompts: Sequence[Prompt] | None = None,
        metric_fn: Callable[..., dict[str, list[float]]] | None = None,
    ):
        check(config)
        check_launched(config)
        dist.start(config.cluster)
        dist.main_does(lambda: reach(config))
        self.config, self.cfg, self.metric_fn = config, config.algorithm, metric_fn
        if config.cluster.num_threads is not None:
            torch.set_num_threads(config.cluster.num_threads)
        torch.manual_seed(self.cfg.seed)
        self.run = Run(config)
        self.environment = environment or make_environment(config.env)
        check_turns(self.environment, config)
        prompts = load_prompts(config.data, self.environment)
        validation = eval_prompts or load_val_prompts(config.data, self.environment)
        self.resumed = checkpoint.find(config.checkpointing.resume, self.run.dir)
        self.device = pick_device(config.cluster.device)
        check_device(config, self.device)

        self.param_dtypes: dict[str, str] = {}
        path = self._make_policy()
        if hasattr(self.environment, "bind"):
            self.environment.bind(self.policy.tokenizer, device=self.device, dtype=self.dtype)
        self.engine: Engine = make_engine(self.policy, config, self.dtype)
        self._tokenize(prompts, validation)
        self.update_engine = Refit(self.policy, self.engine, config.policy.generation)
        self.constant_rewards = rewards.ConstantRewards(config.env.constant_reward_steps)
        self.rewards = rewards.Rewards(self.cfg, config.loss_fn)
        self.kl = rewards.KLController(self.cfg, config.loss_fn)
        self.stateful: dict[str, Any] = {"policy": self.policy, "rewards": self.rewards, "kl": self.kl}
        self.stateful["dynamic_sampling"] = self.dynamic_sampling
        self.build_losses(path)

        self.progress = Progress()
        self.saved_step: int | None = None
        self.validated_step: int | None = None
        if self.resumed:
            self._resume(self.resumed)
        facts = {"compute_dtype": name_of(self.dtype), "param_dtypes": self.param_dtypes, "device": str(self.device)}
        self.run.open(facts | self.policy.facts())

    def _make_policy(self) -> Path | str:
        """Policy and reference; where they were loaded from, which a critic's backbone may be too."""
        cfg, name = self.config.policy, self.config.policy.model_name
        wanted_model = self.environment.default_model if name == "auto" else name
        path = dist.together(lambda: resolve_model(wanted_model))[dist.rank()]
        # What "auto" once measured is part of the run: a resume must not measure anew.
        wanted = checkpoint.compute_dtype(self.resumed) if self.resumed else cfg.dtype
        self.dtype = dist.main_does(lambda: pick_dtype(wanted, self.device))
        reference = not self.cfg.skip_reference_policy_logprobs_calculation
        self.logprobs = {"old_logprobs", "ref_logprobs"} if reference else {"old_logprobs"}
        param_dtype = self.param_dtype("policy", stored_dtype(cfg, self.dtype))
        self.policy: Policy = make_policy(
            path, self.config, device=self.device, dtype=self.dtype, param_dtype=param_dtype, reference=reference
        )
        return path

    def param_dtype(self, part: str, wanted: str) -> torch.dtype:
        """How the trained parameters of `part`, the block of the setting `wanted`, are stored; remembered."""
        wanted = checkpoint.param_dtype(self.resumed, part) if self.resumed else wanted
        picked = pick_param_dtype(wanted, self.dtype, self.device, part)
        self.param_dtypes[part] = name_of(picked)
        return picked

    def _tokenize(self, prompts: Sequence[Prompt], validation: Sequence[Prompt]) -> None:
        """The prompts of training, in a loader, and those of validation: the same where there are no others."""
        tokenized, others = (
            tokenize_prompts(part, self.policy.tokenizer, self.config.data, vocab_size=self.policy.vocab_size)
            for part in (prompts, validation)
        )
        self.eval_prompts = others or tokenized
        longest = (max(len(prompt.ids) for prompt in part) for part in (tokenized, self.eval_prompts))
        check_model(self.config, self.policy.hf_config, *longest)
        self.probe = Probe(
            self.policy,
            self.engine,
            self.config.policy.generation,
            tokenized[0].ids,
            dtype=name_of(self.dtype),
            max_length=self.config.policy.max_total_sequence_length,
            timer=self.run.timer,
        )
        self.dynamic_sampling = DynamicSampling(self.cfg, self.config.name)
        self.loader = PromptLoader(
            tokenized,
            self.dynamic_sampling.prompts_per_draw,
            seed=self.cfg.seed,
            shuffle=self.config.data.shuffle,
            setting=self.dynamic_sampling.setting,
        )

    def build_losses(self, path: Path | str) -> None:
        """The policy's loss, and whatever else the algorithm optimises; `path` is the policy's model."""
        generation = self.config.policy.generation
        loss = PolicyLoss(
            self.config.loss_fn,
            temperature=generation.temperature,
            norm_length=generation.max_new_tokens,
            softcap=self.policy.softcap,
            kl=self.kl,
            min_new_tokens=generation.min_new_tokens,
            stop_ids=self.policy.stop_ids,
        )
        self.policy_clip = loss.ratio_bounds
        self.policy_loss: PolicyLoss | JointLoss = loss

    @contextmanager
    def logging(self) -> Iterator[None]:
        """A run's folder, signals and log, for as long as it trains."""
        start, writer = self.progress.step, Logger if dist.is_main() else SilentLogger
        with (
            self.run,
            writer(self.run.dir, self.config.logger, max_steps=self.cfg.max_num_steps, start_step=start) as log,
        ):
            self.logger = log
            yield

    def release(self) -> None:
        """Let others have what the run had on servers; training on takes it back."""

    def close(self) -> None:
        """End the generation engine, and the processes that it may have: nothing can be sampled any more."""
        self.engine.close()

    def generate_rollouts(self, step: int) -> RolloutBatch:
        """Prompts -> responses -> scores, drawn again by dynamic sampling until enough of them say what is better."""
        self.offload()
        with self.saved_on_failure():
            batch = self.dynamic_sampling.collect(lambda draw: self._draw(step, draw))
            self.update_engine.release()
            return batch

    def offload(self) -> None:
        """What generation does not need leaves the device, if so configured, until it is needed again."""
        self.policy.offload()

    def _draw(self, step: int, draw: int) -> RolloutBatch:
        prompts, count = self.loader.next_batch(), self.cfg.num_generations_per_prompt
        with self.run.timer("gen"):
            batch = self._generate(prompts, count, step, first_sample=draw * len(prompts) * count)
            if needs_greedy(self.cfg):
                batch.greedy = self._generate(prompts, 1, step, greedy=True)
        with self.run.timer("reward"):
            if batch.greedy is not None:
                self._score(batch.greedy)
            return self._score(batch, self.constant_rewards)

    def _generate(
        self,
        prompts: Sequence[TokenizedPrompt],
        samples_per_prompt: int,
        step: int,
        generation: GenerationConfig | None = None,
        **how: Any,
    ) -> RolloutBatch:
        self.probe.check()
        return generate(
            self.engine,
            prompts,
            generation or self.config.policy.generation,
            self.policy.tokenizer,
            samples_per_prompt=samples_per_prompt,
            seed=self.cfg.seed,
            step=step,
            weight_version=self.progress.step,
            environment=self.environment,
            timeout_s=self.config.env.timeout_s,
            max_turns=self.cfg.max_rollout_turns,
            max_length=self.config.policy.max_total_sequence_length,
            **how,
        )

    def _score(self, batch: RolloutBatch, constant: rewards.ConstantRewards | None = None) -> RolloutBatch:
        return rewards.score(self.environment, batch, self.config.env, constant)

    @contextmanager
    def saved_on_failure(self) -> Iterator[None]:
        """If the block cannot give a rollout, the state before its prompts were drawn is saved; if the environment is
        the reason, the responses are left in failed_rollout.jsonl."""
        drawn = self.loader.state_dict()
        try:
            yield
        except (rewards.RewardError, TrainingError) as error:
            if isinstance(error, rewards.RewardError) and dist.is_main():
                rewards.dump(error.samples, self.run.dir / "failed_rollout.jsonl")
            self.loader.load_state_dict(drawn)
            self.save(when="failure")
            raise

    def score_logprobs(self, batch: RolloutBatch, want: set[str] = frozenset()) -> RolloutBatch:
        """Log-probs of the policy and the reference, and what else the policy's pass can give; then who is left out."""
        with self.run.timer("old_log_prob"):
            batch.update(**self.policy.score(batch, self.logprobs | want))
            return leave_out(batch, self.cfg)

    def prepare(self, batch: RolloutBatch) -> RolloutBatch:
        """The rollout with all that the updates need: `generate_ppo_data` or `generate_reinforce_data`."""
        raise NotImplementedError

    def policy_minibatches(
        self, batch: RolloutBatch, done: list[StepMetrics], *, step: int, epoch: int
    ) -> Iterator[RolloutBatch]:
        return policy_minibatches(batch, self.config, done, step=step, epoch=epoch)

    def refit(self) -> int:
        self.offload()  # the engine takes its memory again, a KV cache included
        with self.run.timer("update_weights"):
            moved = self.update_engine(self.progress.step)
        self.probe(self.progress.step)
        return moved

    def validate(self, when: str = "now") -> dict[str, float]:
        """Mean score on the validation prompts, sampled with the same seeds every time."""
        cfg, step = self.cfg, self.progress.step
        due = {
            "now": True,
            "start": cfg.val_at_start and step == 0,
            "period": cfg.val_period > 0 and step % cfg.val_period == 0,
            "end": cfg.val_at_end and self.validated_step != step and not self.run.interrupted,
        }
        if not due[when]:
            return {}
        with self.run.timer("testing"), self.saved_on_failure():
            prompts = self.eval_prompts[: cfg.max_val_samples]
            rows = validation_rows(prompts, self._validation_batch, batch_size=cfg.val_batch_size)
            metrics = validation_metrics(rows, self.metric_fn)
        if when != "now":
            self.logger.validation(step, metrics, rows)
            self.validated_step = step
            self.progress.validated(metrics)
            self.rank_saved()
        return metrics

    def _validation_batch(self, prompts: Sequence[TokenizedPrompt], first: int) -> RolloutBatch:
        """One scored response to each; `first`: their place among the validation prompts."""
        generation = of_validation(self.config.policy.generation)
        batch = self._generate(prompts, 1, step=-1, generation=generation, first_sample=first)
        return self._score(batch)

    def log(
        self, batch: RolloutBatch, policy_steps: list[StepMetrics], value_steps: list[StepMetrics], refit_bytes: int
    ) -> None:
        progress, logger = self.progress, self.config.logger
        progress.consumed_prompts = self.loader.consumed
        progress.consumed_samples += len(batch)
        progress.total_valid_tokens += int(batch.trained.sum())
        metrics = (
            rollout_metrics(batch) | update_metrics(policy_steps, value_steps) | progress.metrics(self.loader.epoch)
        )
        metrics |= {"perf/refit_bytes": float(refit_bytes), "actor/kl_coef": self.kl.coef} | self.probe.metrics
        metrics |= memory_metrics()
        due = progress.step in (1, self.cfg.max_num_steps) or progress.step % logger.samples_period == 0
        if due and logger.num_inspected_samples:
            shown = batch.select(range(min(logger.num_inspected_samples, len(batch))))
            logprobs = self.policy.score(shown, {"old_logprobs"})["old_logprobs"]
            rows = token_table(shown, logprobs, self.policy.tokenizer, self.policy_clip)
            self.logger.samples(progress.step, rows)
        batch.trunk_hidden = None  # as large as all else together, and of no use once the updates are done
        metrics |= self.run.lap(metrics["perf/total_num_tokens"])
        progress.logged(metrics)
        self.logger.log(progress.step, metrics)
        self.run.check(metrics, progress)

    def save(self, when: str) -> None:
        """A checkpoint of the state after the last finished step, unless there is one or none is due."""
        cfg, step = self.config.checkpointing, self.progress.step
        skipped = {"period": bool(step % cfg.save_period), "failure": step == 0, "end": False}
        if not cfg.enabled or step == self.saved_step or skipped[when]:
            return
        with self.run.timer("save_checkpoint"), self.run.saving(step, last=when == "end"):
            checkpoint.save(self.run.dir / "checkpoints", step, self._write, cfg)
            self.saved_step = step
            if when != "failure":  # what is joined for a checkpoint comes back for it
                self.offload()

    def rank_saved(self) -> None:
        """A validation comes after the save of its step: its metrics join the checkpoint, which they may rank."""
        folder, step = self.run.dir / "checkpoints", self.progress.step
        if step == self.saved_step:
            with self.run.timer("save_checkpoint"), self.run.saving(step, last=False):
                record = training_record(self.progress)
                dist.main_does(lambda: checkpoint.rank(folder, step, record, self.config.checkpointing))

    def _write(self, folder: Path) -> None:
        """What fails on one rank fails on all before the next part, in which others would wait for it."""
        dist.together(lambda: self.policy.save(folder / "policy"))
        training = training_record(
            self.progress,
            loader=self.loader.state_dict(),
            compute_dtype=name_of(self.dtype),
            param_dtypes=self.param_dtypes,
        )
        state = {name: part.state_dict() for name, part in self.stateful.items()}  # of shards it takes all ranks

        def write_state() -> None:
            save_config(self.config, folder / "config.yaml")
            checkpoint.write_state(folder, training, state)

        dist.main_does(write_state)
        for name in ("policy", "value"):
            if name in self.stateful:
                dist.together(lambda name=name: self.stateful[name].save_shards(folder / "shards" / name))

    def _resume(self, folder: Path) -> None:
        before = load_config(folder / "config.yaml", config_class=type(self.config))
        if changed := compare_for_resume(before, self.config):
            raise TrainingError(f"cannot resume {folder}: these settings change what is trained: {', '.join(changed)}")
        training, state = checkpoint.read_state(folder)
        self._read(folder, state)
        self.loader.load_state_dict(training["loader"])
        self.progress = progress_from(training)
        self.saved_step = self.progress.step
        if dist.is_main():
            done = self.progress.step >= self.cfg.max_num_steps
            nothing = (
                f"; {self.config.name}.max_num_steps={self.cfg.max_num_steps} leaves nothing to train" if done else ""
            )
            print(f"resumed after step {self.progress.step} from {folder}{nothing}", flush=True)

    def _read(self, folder: Path, state: dict[str, Any]) -> None:
        for name, part in self.stateful.items():
            part.load_state_dict(state[name])
            if name in ("policy", "value"):
                part.load_shards(folder / "shards" / name)

    def goes_on(self) -> bool:
        epochs_left = self.cfg.max_num_epochs is None or self.loader.epoch < self.cfg.max_num_epochs
        return not self.run.stopping and self.progress.step < self.cfg.max_num_steps and epochs_left
