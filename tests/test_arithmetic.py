"""What is refused before a model loads, each with its words; and the plan, with numbers worked out by hand."""

import math
from dataclasses import replace

import pytest

from trainers.arithmetic import ConfigError, check
from trainers.cli import load_config
from trainers.config import PPOTrainerConfig, walk
from trainers.config_service import ServeConfig
from trainers.config_types import base_type
from trainers.ranges import RANGES


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        check(load_config(None, overrides))
    return str(caught.value)


def accepted(*overrides: str):
    return check(load_config(None, overrides))


class TestPlan:
    def test_the_defaults(self):
        plan = accepted()
        assert (plan.sequences, plan.longest_sequence) == (32, 272)
        assert (plan.policy_steps_per_rollout, plan.policy_micro_batches, plan.total_policy_steps) == (4, 1, 300)
        assert (plan.value_batch, plan.value_steps_per_rollout, plan.total_value_steps) == (None, 0, 0)
        assert plan.describe() == (
            "rollout   8 prompts x 4 responses = 32 sequences a step, each at most 256 prompt + 16 new = 272 tokens\n"
            "policy    1 x 32 / 8 = 4 optimizer steps per rollout, each 8 sequences in 1 micro-batch of up to 8\n"
            "critic    a head on the policy's trunk, trained in the policy's optimizer steps\n"
            "whole run 75 steps, 2,400 responses, 300 optimizer steps of the policy"
        )

    def test_a_critic_of_its_own_and_uneven_micro_batches(self):
        plan = accepted(
            "value.mode=local",
            "value.train_global_batch_size=24",
            "value.train_micro_batch_size=5",
            "policy.train_global_batch_size=48",
            "policy.train_micro_batch_size=9",
            "ppo.num_prompts_per_step=12",
            "ppo.num_generations_per_prompt=8",
            "ppo.ppo_epochs=3",
            "ppo.max_num_steps=1000",
        )
        assert plan.sequences == 96
        assert (plan.policy_steps_per_rollout, plan.policy_micro_batches) == (6, 6)  # 3*96/48; 9+9+9+9+9+3
        assert (plan.value_steps_per_rollout, plan.value_micro_batches) == (12, 5)  # 3*96/24; 5+5+5+5+4
        assert (plan.total_policy_steps, plan.total_value_steps) == (6000, 12000)
        assert plan.describe().splitlines()[2:] == [
            "critic    3 x 96 / 24 = 12 optimizer steps per rollout, each 24 sequences in 5 micro-batches of up to 5",
            "whole run 1,000 steps, 96,000 responses, 6,000 optimizer steps of the policy, 12,000 of the critic",
        ]

    def test_one_of_each_is_singular(self):
        plan = accepted(
            "ppo.num_prompts_per_step=1",
            "ppo.num_generations_per_prompt=1",
            "ppo.max_num_steps=1",
            "policy.train_global_batch_size=1",
            "policy.train_micro_batch_size=1",
        )
        lines = plan.describe().splitlines()
        assert lines[0].startswith("rollout   1 prompt x 1 response = 1 sequence a step")
        assert lines[-1] == "whole run 1 step, 1 response, 1 optimizer step of the policy"


class TestBatches:
    def test_the_batch_of_the_policy_must_divide_the_rollout(self):
        assert refused("policy.train_global_batch_size=12") == (
            "ppo.num_prompts_per_step=8 x ppo.num_generations_per_prompt=4 = 32 sequences a step, which "
            "policy.train_global_batch_size=12 does not divide"
        )

    def test_so_must_that_of_a_local_critic(self):
        message = refused("value.mode=local", "value.train_global_batch_size=64")
        assert message.endswith("= 32 sequences a step, which value.train_global_batch_size=64 does not divide")

    @pytest.mark.parametrize("part", ["policy", "value"])
    def test_a_micro_batch_is_no_larger_than_its_batch(self, part):
        message = refused("value.mode=local", f"{part}.train_micro_batch_size=9")
        assert message == (
            f"{part}.train_micro_batch_size=9 is larger than {part}.train_global_batch_size=8: a micro-batch is a part "
            "of the batch of one optimizer step"
        )
        accepted("value.mode=local", f"{part}.train_micro_batch_size=3")

    @pytest.mark.parametrize("part", ["policy", "value"])
    def test_the_longest_sequence_fits_into_a_micro_batch_of_tokens(self, part):
        message = refused("value.mode=local", f"{part}.max_tokens_per_micro_batch=271")
        assert message == (
            f"{part}.max_tokens_per_micro_batch=271 is less than the longest sequence: data.max_prompt_length=256 + "
            "policy.generation.max_new_tokens=16 = 272 tokens"
        )
        accepted("value.mode=local", f"{part}.max_tokens_per_micro_batch=272")

    def test_a_micro_batch_of_tokens_needs_no_size_in_sequences(self):
        plan = accepted(
            "value.mode=local",
            "policy.train_global_batch_size=4",  # below the default of train_micro_batch_size, which has no effect
            "policy.max_tokens_per_micro_batch=4096",
            "value.max_tokens_per_micro_batch=1024",
        )
        policy, critic = plan.describe().splitlines()[1:3]
        assert policy.endswith("8 optimizer steps per rollout, each 4 sequences in micro-batches of up to 4,096 tokens")
        assert critic.endswith("4 optimizer steps per rollout, each 8 sequences in micro-batches of up to 1,024 tokens")

    def test_a_step_needs_its_prompts(self):
        message = refused("env.name=copy", "env.size=7")
        assert message == "env.size=7 tasks, of which ppo.num_prompts_per_step=8 different ones cannot be drawn"
        accepted("env.name=copy", "env.size=8")


# key: (values that are refused, values that are accepted)
BOUNDS = {
    "policy.optimizer.lr": (["-1e-9", ".nan", ".inf"], ["0", "1"]),
    "policy.optimizer.betas": (["[0.9]", "[0.9, 1.0]", "[-0.1, 0.9]", "[0.9, 0.9, 0.9]"], ["[0, 0.999]"]),
    "policy.optimizer.eps": (["0"], ["1e-12"]),
    "policy.optimizer.weight_decay": (["-0.1"], ["0", "0.1"]),
    "policy.optimizer.max_grad_norm": (["-1"], ["0", "1"]),
    "policy.scheduler.warmup_steps": (["-1"], ["0"]),
    "policy.generation.temperature": (["0", "-1"], ["0.01"]),
    "policy.generation.max_new_tokens": (["0"], ["1"]),
    "policy.generation.min_new_tokens": (["-1", "17"], ["0", "16"]),
    "policy.generation.stop_token_ids": (["[-1]"], ["[0]"]),
    "policy.generation.val.temperature": (["0"], ["0.01", "null"]),
    "policy.generation.val.top_p": (["0", "1.1", "-0.5"], ["0.1", "1", "null"]),
    "policy.generation.val.top_k": (["0", "-1"], ["1", "null"]),
    "policy.generation.val.repetition_penalty": (["0", "-1"], ["0.9", "1.2"]),
    "policy.generation.val.max_new_tokens": (["0"], ["1", "1000"]),
    "policy.generation.val.min_new_tokens": (["-1", "17"], ["0", "16"]),
    "policy.generation.stop_strings": (['[""]'], ['["."]']),
    "policy.num_layers_unfrozen": (["0", "-2"], ["-1", "1"]),
    "policy.model_name": (['""'], ["x"]),
    "policy.max_tokens_per_micro_batch": (["0"], ["272", "null"]),
    "loss_fn.ratio_clip_min": (["0", "1.01"], ["1", "1e-4"]),
    "loss_fn.ratio_clip_max": (["0", "-1"], ["5", "null"]),
    "loss_fn.ratio_clip_c": (["1", "0.5"], ["1.01"]),
    "loss_fn.kl_input_clamp_value": (["0", "21"], ["20", "0.5"]),
    "loss_fn.kl_output_clamp_value": (["0"], ["100"]),
    "loss_fn.entropy_bonus": (["-0.01"], ["0.01"]),
    "loss_fn.reference_policy_kl_penalty": (["-0.01"], ["0"]),
    "value_loss_fn.scale": (["0"], ["0.5"]),
    "value_loss_fn.cliprange": (["0"], ["0.2"]),
    "value.loss_coef": (["-1"], ["0.1"]),
    "value.optimizer.betas": (["[1, 1]"], ["[0.9, 0.9]"]),
    "env.name": (
        ["sentimant", "copy:x", "reasoning_gym", "reasoning_gym:", "python:f", "python:", '""'],
        ["reasoning_gym:chain_sum", "python:my_package.rewards.score", "lookup"],
    ),
    "data.max_prompt_length": (["0"], ["1"]),
    "env.rewards": (["{sentimant: 1}", "{copy: .nan}", "{copy: .inf}"], ["{sentiment: -1, 'python:a.b': 0}"]),
    "env.reward_model.batch_size": (["0"], []),  # accepted only beside a reward model: tests/test_reward_model.py
    "env.reward_model.std": (["0", "[1, -1]", ".inf"], []),
    "env.timeout_s": (["0", ".inf"], ["0.5", "null"]),
    "env.constant_reward_steps": (["-1"], ["0", "1"]),
    "data.prompts": (["no_such_file.jsonl", "hf:", "tests"], ["hf:a/b:train"]),
    "data.val_prompts": (["no_such_file.jsonl", "hf:", "tests"], ["hf:a/b:test"]),
    "ppo.adv_estimator.gae_lambda": (["1.1", "-0.1"], ["0", "1"]),
    "ppo.adv_estimator.gae_gamma": (["1.1", "-0.1"], ["0", "1"]),
    "ppo.adv_estimator.gae_lambda_policy": (["1.1", "-0.1"], ["0", "1", "null"]),
    "ppo.adv_estimator.gae_lambda_value": (["1.1", "-0.1"], ["0", "1", "null"]),
    "ppo.adv_estimator.length_adaptive_alpha": (["0", "-1"], ["0.05", "null"]),
    "ppo.reward_scaling.source_min": ([".nan", ".inf"], ["-1"]),
    "ppo.reward_scaling.target_max": ([".nan", "-.inf"], ["-1"]),
    "ppo.reward_shaping.max_response_length": (["0"], ["1"]),
    "ppo.reward_shaping.overlong_buffer_length": (["0"], ["1"]),
    "ppo.reward_shaping.overlong_buffer_penalty": (["-1"], ["0"]),
    "ppo.reward_shaping.stop_properly_penalty_coef": (["-0.1", "1.1"], ["0", "1"]),
    "ppo.cliprange_reward": (["0", "-1"], ["10", "null"]),
    "ppo.num_prompts_per_step": (["0"], ["2"]),
    "ppo.max_rollout_turns": (["0"], ["1"]),
    "ppo.ppo_epochs": (["0"], ["2"]),
    "ppo.max_num_steps": (["-1"], ["0"]),
    "ppo.policy_training_start_step": (["0"], ["1"]),
    "ppo.target_kl": (["0", "-1"], ["0.01", "null"]),
    "ppo.max_num_epochs": (["0"], ["1", "null"]),
    "ppo.max_first_ratio_error": (["0"], ["1"]),
    "ppo.val_period": (["-1"], ["0", "1"]),
    "ppo.seed": (["-1", str(2**63)], ["0", str(2**63 - 1)]),
    "logger.report_period": (["-1"], ["0"]),
    "logger.samples_period": (["0"], ["1"]),
    "logger.run_dir": (['""'], ["x"]),
    "cluster.num_threads": (["0"], ["1", "null"]),
    "checkpointing.save_period": (["0"], ["1"]),
    "checkpointing.keep_last_k": (["-1"], ["0"]),
    "checkpointing.keep_top_k": (["-1"], ["0"]),
    "cluster.device_memory_gb": (["0", ".inf"], ["0.5"]),
    "checkpointing.resume": (["nevr"], ["never", "."]),
}


class TestRanges:
    @pytest.mark.parametrize(("key", "value"), [(key, value) for key, (bad, _) in BOUNDS.items() for value in bad])
    def test_outside(self, key, value):
        assert refused(f"{key}={value}").startswith(key)

    @pytest.mark.parametrize(("key", "value"), [(key, value) for key, (_, good) in BOUNDS.items() for value in good])
    def test_inside(self, key, value):
        accepted(f"{key}={value}")

    def test_every_number_has_a_range(self):
        leaves = [*walk(PPOTrainerConfig()), *walk(ServeConfig())]
        numbers = {key for key, field, _ in leaves if base_type(field)[0] in (int, float)}
        assert numbers == set(RANGES)

    def test_the_message(self):
        assert refused("policy.generation.temperature=0") == (
            "policy.generation.temperature=0.0: expected a number > 0"
        )
        assert refused("env.name=sentimant") == (
            "env.name=sentimant: expected sentiment, copy, lookup, math, reward_model, remote, reasoning_gym:<dataset> "
            "or python:<module>.<function or class>; did you mean sentiment?"
        )

    def test_gmpo_bounds_the_log_ratio(self):
        accepted("loss_fn.type=gmpo", "loss_fn.ratio_clip_min=1.5")

    def test_a_config_made_in_python_is_checked_too(self):
        config = PPOTrainerConfig()
        config.ppo.num_prompts_per_step = "8"
        config.loss_fn.type = "pppo"
        with pytest.raises(ConfigError, match='^ppo.num_prompts_per_step: expected an integer, got the text "8"$'):
            check(config)
        config.ppo.num_prompts_per_step = 8
        with pytest.raises(ConfigError, match=r"^loss_fn.type=pppo: expected ppo, .* did you mean ppo\?$"):
            check(config)
        config.loss_fn.type = "ppo"
        config.policy.optimizer.lr = math.nan
        with pytest.raises(ConfigError, match="^policy.optimizer.lr=nan: expected a number >= 0$"):
            check(config)


# (settings that leave the option without effect, the option, settings under which it has one)
UNUSED = [
    ((), "value.model_name=x", ("value.mode=local",)),
    ((), "value.num_layers_unfrozen=2", ("value.mode=local",)),
    ((), "value.train_global_batch_size=16", ("value.mode=local",)),
    ((), "value.train_micro_batch_size=4", ("value.mode=local",)),
    ((), "value.packing=true", ("value.mode=local",)),
    ((), "value.max_tokens_per_micro_batch=512", ("value.mode=local",)),
    (("policy.max_tokens_per_micro_batch=512",), "policy.train_micro_batch_size=4", ()),
    (
        ("policy.max_tokens_per_micro_batch=512",),
        "policy.logprob_batch_size=4",
        ("policy.max_tokens_per_micro_batch=512", "value.mode=local"),  # the critic is scored by it
    ),
    (
        ("policy.max_tokens_per_micro_batch=512", "value.mode=local", "value.max_tokens_per_micro_batch=512"),
        "policy.logprob_batch_size=4",
        ("value.mode=local", "value.max_tokens_per_micro_batch=512"),
    ),
    (
        ("value.mode=local", "value.max_tokens_per_micro_batch=512"),
        "value.train_micro_batch_size=4",
        ("value.mode=local", "policy.max_tokens_per_micro_batch=512"),
    ),
    (("value.mode=local",), "value.detach_trunk=false", ()),
    (("value.mode=local",), "value.loss_coef=0.5", ()),
    (("loss_fn.type=reinforce",), "loss_fn.ratio_clip_min=0.1", ()),
    (("loss_fn.type=sapo",), "loss_fn.ratio_clip_max=0.1", ("loss_fn.type=cispo",)),
    (("loss_fn.type=cispo",), "loss_fn.ratio_clip_c=3", ("loss_fn.type=gspo",)),
    ((), "loss_fn.norm_length=10", ("loss_fn.aggregation=token_sum_norm",)),
    (
        (),
        "loss_fn.reference_policy_kl_gradient=pathwise",
        ("loss_fn.use_kl_in_reward=false", "loss_fn.reference_policy_kl_type=k3"),
    ),
    (("ppo.adv_estimator.length_adaptive_alpha=0.05",), "ppo.adv_estimator.gae_lambda_policy=0.9", ()),
    (
        ("ppo.adv_estimator.gae_lambda_value=1", "ppo.adv_estimator.gae_lambda_policy=0.9"),
        "ppo.adv_estimator.gae_lambda=0.5",
        ("ppo.adv_estimator.gae_lambda_value=1",),
    ),
    (
        ("ppo.adv_estimator.gae_lambda_value=1", "ppo.adv_estimator.length_adaptive_alpha=0.05"),
        "ppo.adv_estimator.gae_lambda=0.5",
        ("ppo.adv_estimator.length_adaptive_alpha=0.05",),
    ),
    (
        ("ppo.reward_shaping.enabled=true", "ppo.reward_shaping.stop_properly_penalty_coef=0"),
        "ppo.reward_shaping.overlong_buffer_length=2",
        (
            "ppo.reward_shaping.enabled=true",
            "ppo.reward_shaping.max_response_length=9",
            "ppo.reward_shaping.overlong_buffer_penalty=1",
        ),
    ),
    ((), "data.prompt_key=text", ("data.prompts=pyproject.toml",)),
    ((), "data.system_prompt=hello", ("data.chat_template=true",)),
    ((), "env.seed=1", ("env.name=copy",)),
    ((), "env.seed=1", ("env.name=lookup",)),
    ((), "policy.max_total_sequence_length=500", ("ppo.max_rollout_turns=2",)),
    (("env.name=python:a.b",), "env.size=100", ("env.name=reasoning_gym:chain_sum",)),
    (("env.name=copy",), "env.params={a: 1}", ("env.name=reasoning_gym:chain_sum",)),
    (("env.rewards={sentiment: 1}",), "env.params={a: 1}", ("env.rewards={math: 1}",)),
    ((), "env.params={a: 1}", ("env.name=python:a.B",)),
    (("env.name=copy",), "data.prompts=pyproject.toml", ()),
    (("env.name=copy",), "data.chat_template=true", ()),
    ((), "policy.scheduler.decay_steps=5", ("policy.scheduler.name=linear",)),
    ((), "value.scheduler.min_lr_ratio=0", ("value.scheduler.name=cosine", "value.scheduler.decay_steps=9")),
]


class TestUnused:
    @pytest.mark.parametrize(("settings", "option", "_"), UNUSED, ids=lambda x: x if isinstance(x, str) else "")
    def test_an_option_without_effect_is_refused(self, settings, option, _, request, monkeypatch):
        monkeypatch.chdir(request.config.rootpath)
        key = option.partition("=")[0]
        message = refused(*settings, option)
        assert message.startswith(key)
        assert "has no effect with" in message
        assert len(message.splitlines()) == 1

    @pytest.mark.parametrize(("_", "option", "settings"), UNUSED, ids=lambda x: x if isinstance(x, str) else "")
    def test_it_is_accepted_where_it_has_one(self, _, option, settings, request, monkeypatch):
        monkeypatch.chdir(request.config.rootpath)
        accepted(*settings, option)

    @pytest.mark.parametrize(
        "settings",
        [
            ("logger.report=false", "logger.report_period=5"),
            ("checkpointing.enabled=false", "checkpointing.save_period=5", "checkpointing.keep_last_k=5"),
            ("ppo.val_period=0", "ppo.max_val_samples=5"),
            ("ppo.reward_scaling.enabled=false", "ppo.reward_scaling.target_min=-1"),
            ("ppo.reward_shaping.enabled=false", "ppo.reward_shaping.overlong_buffer_length=5"),
        ],
    )
    def test_one_switch_suffices_against_a_recipe_that_sets_the_details(self, settings):
        accepted(*settings)

    def test_the_message(self):
        assert refused("loss_fn.norm_length=10") == (
            "loss_fn.norm_length=10.0 has no effect with loss_fn.aggregation=token_mean: set it to null"
        )

    def test_the_default_value_is_never_refused(self):
        accepted("value.train_global_batch_size=8", "loss_fn.norm_length=null", "env.size=512")


class TestNeeds:
    @pytest.mark.parametrize("name", ["linear", "cosine"])
    @pytest.mark.parametrize("part", ["policy", "value"])
    def test_a_decay_needs_its_length(self, part, name):
        assert refused(f"{part}.scheduler.name={name}") == (
            f"{part}.scheduler.name={name} needs {part}.scheduler.decay_steps, the optimizer steps from the end of the "
            "warm-up to the floor"
        )

    def test_maths_needs_prompts(self):
        assert refused("env.name=math").startswith("env.name=math needs data.prompts: tasks whose answers stand under")
        accepted("env.name=math", "data.prompts=hf:a/b", "env.params.answer_key=solution")

    def test_a_warm_up_needs_a_critic_of_its_own(self):
        assert refused("ppo.policy_training_start_step=2").startswith(
            "ppo.policy_training_start_step=2 needs value.mode=local"
        )
        accepted("ppo.policy_training_start_step=2", "value.mode=local")

    def test_turns_need_a_length_of_them_all(self):
        assert refused("ppo.max_rollout_turns=3") == (
            "ppo.max_rollout_turns=3 needs policy.max_total_sequence_length, the longest row of prompt, turns and "
            "observations in tokens"
        )
        plan = accepted("ppo.max_rollout_turns=3", "policy.max_total_sequence_length=1000")
        assert plan.longest_sequence == 1000
        turns = ("ppo.max_rollout_turns=3", "policy.max_total_sequence_length=1000")
        assert refused(*turns, "policy.max_tokens_per_micro_batch=999") == (
            "policy.max_tokens_per_micro_batch=999 is less than the longest sequence: "
            "policy.max_total_sequence_length=1000 tokens"
        )
        accepted(*turns, "policy.max_tokens_per_micro_batch=1000")
        assert "each at most 3 turns of 16 new tokens, 1,000 tokens in all\n" in plan.describe()

    def test_a_scaling_needs_a_range(self):
        assert refused("ppo.reward_scaling.enabled=true", "ppo.reward_scaling.source_min=1") == (
            "ppo.reward_scaling.source_min=1.0 must be below ppo.reward_scaling.source_max=1.0"
        )

    def test_a_shaping_needs_what_it_is_made_of(self):
        some = ("ppo.reward_shaping.enabled=true", "ppo.reward_shaping.max_response_length=9")
        assert refused(*some).startswith(
            "ppo.reward_shaping.enabled=true needs ppo.reward_shaping.overlong_buffer_length, or stop_properly"
        )
        rest = ("ppo.reward_shaping.overlong_buffer_penalty=1", "ppo.reward_shaping.overlong_buffer_length=10")
        assert refused(*some, *rest) == (
            "ppo.reward_shaping.overlong_buffer_length=10 is longer than ppo.reward_shaping.max_response_length=9"
        )

    @pytest.mark.parametrize("kl_type", ["k1", "abs"])
    def test_a_pathwise_gradient_needs_an_estimate_that_has_one(self, kl_type):
        message = refused(
            "loss_fn.use_kl_in_reward=false",
            "loss_fn.reference_policy_kl_gradient=pathwise",
            f"loss_fn.reference_policy_kl_type={kl_type}",
        )
        assert message.startswith(
            f"loss_fn.reference_policy_kl_gradient=pathwise needs reference_policy_kl_type=k2 or k3, got {kl_type}"
        )

    def test_samples_that_are_printed_are_kept(self):
        assert refused("logger.num_samples_to_print=5") == (
            "logger.num_samples_to_print=5 needs as many logger.num_inspected_samples, got 4"
        )

    def test_a_chat_template_is_not_cut(self):
        message = refused("data.chat_template=true", "data.overlong_prompts=truncate")
        assert message.startswith("data.overlong_prompts=truncate would cut the tokens of data.chat_template=true")


def test_nothing_is_adjusted_in_place():
    config = load_config()
    before = replace(config)
    check(config)
    assert config == before == PPOTrainerConfig()
