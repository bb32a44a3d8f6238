"""`python -m trainers.reinforce` end to end on the tiny model, and the options that both trainers have beside it."""

import json
import math
from pathlib import Path

import pytest
import torch

from tests import tiny
from trainers.arithmetic import ConfigError, check
from trainers.batching import count
from trainers.cli import load_config
from trainers.config import CONFIGS, LossConfig
from trainers.losses import PolicyLoss
from trainers.ppo import PPOTrainer
from trainers.reinforce import ReinforceTrainer
from trainers.run import TrainingError

TRAINERS = {"ppo": PPOTrainer, "reinforce": ReinforceTrainer}
CRITIC_METRICS = {"critic/vf_loss", "critic/values/mean", "critic/returns/mean", "critic/lr"}


def small(run_dir: Path, algorithm: str = "reinforce", **overrides: object):
    settings = {
        "logger.run_dir": str(run_dir),
        "checkpointing.enabled": True,
        "checkpointing.save_period": 2,
        "env.size": 8,
        "policy.train_global_batch_size": 8,
        "policy.train_micro_batch_size": 4,
        f"{algorithm}.num_prompts_per_step": 4,
        f"{algorithm}.num_generations_per_prompt": 4,
        f"{algorithm}.max_num_steps": 4,
    }
    own = {key.replace("algorithm__", f"{algorithm}__"): value for key, value in overrides.items()}
    return tiny.config(algorithm, **{key.replace(".", "__"): value for key, value in settings.items()} | own)


def trained(run_dir: Path, algorithm: str = "reinforce", **overrides: object):
    trainer = TRAINERS[algorithm](small(run_dir, algorithm, **overrides))
    trainer.fit()
    return trainer


def lines(run_dir: Path) -> list[dict]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    drop = ("time", "timing_s/", "perf/")
    return [{key: value for key, value in row.items() if not key.startswith(drop)} for row in rows]


def test_reinforce_learns_to_copy(tmp_path):
    trainer = ReinforceTrainer(tiny.config("reinforce", logger__run_dir=str(tmp_path), reinforce__max_num_steps=70))
    trainer.fit()
    scores = [row["critic/score/mean"] for row in lines(tmp_path)]
    assert sum(scores[:3]) / 3 < 0.15  # chance is 1 / 14
    assert sum(scores[-3:]) / 3 > 0.6
    assert not CRITIC_METRICS & set(lines(tmp_path)[-1])


ESTIMATORS = ("raw_reward", "rloo", "grpo", "dr_grpo", "opo", "reinforce_plus_plus", "remax")


@pytest.mark.parametrize("algorithm", ["ppo", "reinforce"])
def test_every_estimator_trains_without_a_critic(tmp_path, algorithm):
    for name in ESTIMATORS:
        options = {"algorithm__adv_estimator__name": name, "algorithm__max_num_steps": 1}
        if algorithm == "ppo":  # the recipe's, which would have no effect
            options["value__optimizer__lr"] = 1e-3
        trainer = trained(tmp_path / name, algorithm, **options)
        (row,) = lines(tmp_path / name)
        assert row["actor/grad_norm"] > 0 and row["actor/optimizer_steps"] == 2
        assert not CRITIC_METRICS & set(row)
        assert not (tmp_path / name / "checkpoints" / "step_1" / "critic").exists()
        assert trainer.progress.step == 1


STATEFUL = {
    "algorithm__reward_normalization": "running",
    "algorithm__kl_controller__name": "adaptive",
    "algorithm__kl_controller__target": 0.01,
    "algorithm__kl_controller__horizon": 100,
    "algorithm__use_dynamic_sampling": True,
    "algorithm__dynamic_sampling_carry": True,
    "algorithm__batch_multiplier": 1.5,
    "algorithm__dynamic_sampling_on_exhausted": "train_partial",
    "algorithm__seq_logprob_error_threshold": 1.5,
    "loss_fn__importance_sampling__type": "tis",
    "loss_fn__reference_policy_kl_penalty": 0.05,
    "loss_fn__positive_example_nll_weight": 0.1,
    "algorithm__ppo_epochs": 2,
}


@pytest.mark.parametrize(("algorithm", "stop"), [("reinforce", 3), ("ppo", 2)])
def test_a_resume_with_every_stateful_option_is_exact(tmp_path, algorithm, stop):
    options = {**STATEFUL, "algorithm__max_num_steps": 5}
    whole = trained(tmp_path / "whole", algorithm, **options)
    trained(tmp_path / "broken", algorithm, **{**options, "algorithm__max_num_steps": stop})
    resumed = trained(tmp_path / "broken", algorithm, **options)
    assert lines(tmp_path / "broken") == lines(tmp_path / "whole")
    assert resumed.kl.coef == whole.kl.coef != 0.05
    assert resumed.rewards.state_dict() == whole.rewards.state_dict()
    rows = lines(tmp_path / "whole")
    assert whole.rewards.count == sum(row["training/trained_samples"] for row in rows)
    assert sum(row["dynamic_sampling/carried_prompts"] for row in rows) > 0


def test_nothing_to_train_on_is_skipped_counted_and_three_times_stops_the_run(tmp_path):
    """Every response is cut at max_new_tokens: filtering leaves none of them."""
    trainer = ReinforceTrainer(small(tmp_path, reinforce__overlong_filtering=True))
    before = {name: p.detach().clone() for name, p in trainer.policy.model.named_parameters()}
    with pytest.raises(TrainingError, match="nothing was left to train on in 3 rollouts .*overlong_filtered 16"):
        trainer.fit()
    assert all(torch.equal(p, before[name]) for name, p in trainer.policy.model.named_parameters())
    assert not trainer.policy.optimizers["actor"].adamw.state_dict()["state"]  # no momentum, no schedule
    assert trainer.policy.optimizers["actor"].schedule.last_epoch == 0
    rows = lines(tmp_path)
    assert [row["training/empty_minibatches"] for row in rows] == [2, 2, 2]
    assert [row["training/trained_samples"] for row in rows] == [0, 0, 0]
    assert "actor/optimizer_steps" not in rows[0]


def test_the_reference_can_be_left_out(tmp_path):
    trainer = trained(tmp_path, reinforce__skip_reference_policy_logprobs_calculation=True,
                      loss_fn__reference_policy_kl_penalty=0.0, reinforce__max_num_steps=1)  # fmt: skip
    assert not hasattr(trainer.policy, "reference")
    assert "critic/kl/mean" not in lines(tmp_path)[0]
    sample = json.loads((tmp_path / "samples.jsonl").read_text().splitlines()[0])
    assert sample["kl"] is None and sample["tokens"][-1]["ref"] is None and sample["tokens"][-1]["value"] is None


def test_a_critic_whose_gradients_are_never_finite_stops_the_run(tmp_path):
    local = {"value.mode": "local", "value.train_global_batch_size": 8, "value.train_micro_batch_size": 8}
    config = small(tmp_path, "ppo", ppo__max_num_steps=6, **{key.replace(".", "__"): v for key, v in local.items()})
    trainer = PPOTrainer(config)
    trainer.value.head.linear.weight.register_hook(lambda grad: grad * float("nan"))
    with pytest.raises(TrainingError, match="no gradient was finite in 3 rollouts .* value.optimizer.lr"):
        trainer.fit()
    assert [row["critic/skipped_steps"] for row in lines(tmp_path)] == [2, 2, 2]


def test_the_loader_names_the_setting_that_asks_for_too_many_prompts(tmp_path):
    with pytest.raises(
        ValueError, match="reinforce.num_prompts_per_step x reinforce.batch_multiplier=12, but there are"
    ):
        ReinforceTrainer(
            small(tmp_path, reinforce__use_dynamic_sampling=True, reinforce__batch_multiplier=3, env__size=8)
        )


def gradients(loss_fn: LossConfig, **fields: object) -> tuple[float, dict[str, torch.Tensor]]:
    policy = tiny.policy()
    batch = count(tiny.rollout().update(**{"old_logprobs": torch.full((21,), -2.0), **fields}))
    captured = {}

    def keep(optimizers):
        captured.update({n: p.grad.clone() for n, p in policy.model.named_parameters() if p.grad is not None})
        return {}

    import trainers.policy.hf as module

    original, module.step_all = module.step_all, keep
    try:
        loss = PolicyLoss(loss_fn, temperature=1.0, norm_length=4)
        totals = []
        policy.train_step(batch, lambda *a: totals.append(loss(*a)) or totals[-1])
    finally:
        module.step_all = original
    return sum(float(step.loss) for step in totals), captured


def test_positive_example_nll_is_a_mean_over_the_tokens_of_good_responses():
    """Advantages 0: what is left is weight * mean(-logp) over responses 0 and 2, of 4 and 5 tokens."""
    batch = tiny.rollout()
    zero, reward = torch.zeros_like(batch.advantages), torch.tensor([0.5, 0.0, 2.0, -1.0])
    loss, grads = gradients(LossConfig(positive_example_nll_weight=0.1), advantages=zero, raw_reward=reward)
    policy = tiny.policy()
    logprobs = policy.score(batch, {"old_logprobs"})["old_logprobs"]
    good = batch.mask & (reward > 0)[batch.sequence_ids]
    assert good.sum() == 9
    assert loss == pytest.approx(-0.1 * logprobs[good].mean().item(), rel=1e-5)
    assert max(float(g.abs().max()) for g in grads.values()) > 0
    none, _ = gradients(LossConfig(positive_example_nll_weight=0.1), advantages=zero, raw_reward=-reward.abs())
    assert none == 0.0


def test_a_forced_ratio_is_one_whatever_the_scorer_said():
    """Loss: the mean of -A; the old log-probs, here far off, play no part."""
    batch = tiny.rollout()
    loss, forced = gradients(LossConfig(force_on_policy_ratio=True))
    assert loss == pytest.approx(-batch.advantages[batch.mask].mean().item(), rel=1e-5)
    scored = tiny.policy().score(batch, {"old_logprobs"})["old_logprobs"]
    _, on_policy = gradients(LossConfig(ratio_clip_min=0.9), old_logprobs=scored)
    for name, grad in forced.items():
        assert torch.allclose(grad, on_policy[name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("options", "weight"),
    [
        ({"type": "tis"}, 2.0),  # exp(1.5), at most 2
        ({"type": "tis", "max": 3.0}, 3.0),
        ({"type": "icepop"}, math.exp(1.5)),
        ({"type": "icepop", "max": 4.0}, 0.0),
        ({"type": "seq_mask_tis"}, 0.0),
        ({"type": "seq_mask_tis", "max": 5.0}, math.exp(1.5)),
    ],
    ids=str,
)
def test_importance_sampling_weighs_the_policy_gradient(options, weight):
    old = torch.full((21,), -2.0)
    settings = {"type": "reinforce", "reference_policy_kl_penalty": 0.0}
    plain, _ = gradients(LossConfig(**settings))
    cfg = LossConfig(**settings)
    for key, value in options.items():
        setattr(cfg.importance_sampling, key, value)
    weighed, _ = gradients(cfg, rollout_logprobs=old - 1.5)
    assert weighed == pytest.approx(weight * plain, rel=1e-5, abs=1e-7)


def refused(*overrides: str, algorithm: str = "reinforce") -> str:
    with pytest.raises(ConfigError) as caught:
        check(load_config(None, overrides, CONFIGS[algorithm]))
    return str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["reinforce.adv_estimator.name=gae"], "reinforce.adv_estimator.name=gae needs a critic: python -m"),
        (["reinforce.num_generations_per_prompt=1"], "reinforce.adv_estimator.name=rloo compares the responses"),
        (
            ["reinforce.use_dynamic_sampling=true", "reinforce.num_generations_per_prompt=1",
             "reinforce.adv_estimator.name=raw_reward"],
            "reinforce.use_dynamic_sampling=true compares the responses",
        ),
        (["reinforce.adv_estimator.gae_lambda=0.5"], "reinforce.adv_estimator.gae_lambda=0.5 has no effect"),
        (["reinforce.bootstrap_truncated=true"], "reinforce.bootstrap_truncated=true has no effect"),
        (["reinforce.adv_estimator.gae_gamma=0.9"], "reinforce.adv_estimator.gae_gamma=0.9 has no effect"),
        (["reinforce.batch_multiplier=2"], "reinforce.batch_multiplier=2.0 has no effect with reinforce.use_dynamic_s"),
        (
            ["reinforce.use_dynamic_sampling=true", "reinforce.dynamic_sampling_carry=true"],
            "reinforce.dynamic_sampling_carry=true needs loss_fn.importance_sampling.type",
        ),
        (["loss_fn.importance_sampling.max=3"], "loss_fn.importance_sampling.max=3.0 has no effect"),
        (
            ["loss_fn.importance_sampling.type=icepop", "loss_fn.importance_sampling.min=6"],
            "loss_fn.importance_sampling.min=6.0 is above loss_fn.importance_sampling.max=5.0",
        ),
        (["reinforce.reward_normalization_shift=false"], "reinforce.reward_normalization_shift=false has no effect"),
        (
            ["reinforce.reward_normalization=ref", "reinforce.reward_reference_mean=1"],
            "reinforce.reward_reference_mean and reinforce.reward_reference_std must be given together",
        ),
        (["reinforce.kl_controller.target=3"], "reinforce.kl_controller.target=3.0 has no effect"),
        (
            ["reinforce.kl_controller.name=adaptive", "loss_fn.reference_policy_kl_penalty=0"],
            "reinforce.kl_controller.name=adaptive needs loss_fn.reference_policy_kl_penalty > 0",
        ),
        (
            ["reinforce.skip_reference_policy_logprobs_calculation=true"],
            "leaves no reference for loss_fn.reference_policy_kl_penalty=0.05",
        ),
        (["loss_fn.type=reinforce", "loss_fn.force_on_policy_ratio=true"], "force_on_policy_ratio=true has no effect"),
        (
            ["loss_fn.force_on_policy_ratio=true", "loss_fn.type=cispo"],
            "needs one optimizer step a rollout: reinforce.ppo_epochs=1, got 1, and policy.train_global_batch_size=32",
        ),
        (["reinforce.policy_training_start_step=3"], "reinforce.policy_training_start_step=3 has no effect"),
        (["reinforce.kl_reduction=mean", "loss_fn.use_kl_in_reward=false"], "kl_reduction=mean has no effect"),
        (["reinforce.seq_logprob_error_threshold=0.9"], "error_threshold=0.9: expected a number >= 1"),
        (["ppo.seed=1"], "there is no setting ppo.seed; did you mean reinforce.seed?"),
        (["value.mode=local"], "there is no setting value.mode"),
    ],
    ids=lambda x: x[-1] if isinstance(x, list) else "",
)  # fmt: skip
def test_settings_that_do_not_go_together(overrides, message):
    assert message in refused(*overrides)


def test_settings_of_a_critic_that_the_estimator_does_not_have():
    message = refused("ppo.adv_estimator.name=rloo", "value.mode=local", "value_loss_fn.scale=2", algorithm="ppo")
    assert "value.mode=local has no effect with ppo.adv_estimator.name=rloo, which has no critic" in message
    assert "value_loss_fn.scale=2.0 has no effect" in message
