"""What policy.backend=megatron refuses, each with its words: of the settings, the ranks, the device, and the model."""

import importlib.util

import pytest

from tests.megatron_models import config_of
from tests.test_arithmetic import accepted, refused
from trainers import megatron_rules
from trainers.arithmetic import ConfigError, check
from trainers.cli import load_config
from trainers.config import PPOTrainerConfig, ReinforceTrainerConfig, walk
from trainers.config_megatron import MegatronConfig
from trainers.megatron_rules import check_device, check_layout

ON = ("policy.backend=megatron", "policy.num_layers_unfrozen=-1", "ppo.adv_estimator.name=reinforce_plus_plus")
# What the policy's settings do is the same on both backends, but for these.
OTHERWISE = {
    "peft.enabled": "true is not supported with policy.backend=megatron: set it to false, or policy.backend=hf",
    "fully_shard": "true is not supported with policy.backend=megatron: set it to false; policy.megatron divides",
    "packing": "true is not supported with policy.backend=megatron: its passes have one sequence a row",
    "gradient_checkpointing": "true is not supported with policy.backend=megatron: set policy.megatron.recompute=full",
    "param_dtype": "float32 has no effect with policy.backend=megatron, which stores the compute dtype",
    "fused_layers": "false has no effect with policy.backend=megatron, whose layers are megatron-core's own",
    "num_layers_unfrozen": "2 is not supported with policy.backend=megatron, which trains every layer: set it to -1",
}


@pytest.fixture
def ranks(monkeypatch):
    return lambda count: monkeypatch.setenv("WORLD_SIZE", str(count))


@pytest.mark.parametrize("key", OTHERWISE)
def test_settings_of_the_policy_that_megatron_core_has_otherwise(key):
    value, words = OTHERWISE[key].split(" ", 1)
    assert refused(*ON, f"policy.{key}={value}").startswith(f"policy.{key}={value} {words}")
    accepted(f"policy.{key}={value}")


def test_every_setting_of_the_policy_was_thought_of():
    """A new one is either in OTHERWISE, or added here once MegatronPolicy does what it says."""
    same = "model_name backend dtype max_total_sequence_length train_global_batch_size train_micro_batch_size"
    same += " logprob_batch_size reference offload_optimizer max_tokens_per_micro_batch"
    keys = {key.removeprefix("policy.") for key, _, _ in walk(PPOTrainerConfig()) if key.startswith("policy.")}
    blocks = ("generation.", "megatron.", "scheduler.", "peft.")
    optimizer = {f"optimizer.{name}" for name in ("lr", "betas", "eps", "weight_decay", "max_grad_norm")}
    assert {key for key in keys if not key.startswith(blocks)} == {*same.split(), *optimizer, *OTHERWISE} - {
        "peft.enabled"
    }


def test_the_default_number_of_layers_is_not_taken_for_all():
    assert refused("policy.backend=megatron", *ON[2:]).startswith("policy.num_layers_unfrozen=8 is not supported")
    accepted(*ON)


@pytest.mark.parametrize(
    "setting",
    ["recompute=full", "overlap_grad_reduce=true", "transformer_engine=false", "expert_model_parallel_size=2"],
)
def test_settings_of_megatron_core_need_it(setting):
    assert f"policy.megatron.{setting} has no effect with policy.backend=hf" in refused(f"policy.megatron.{setting}")
    message = refused("value.mode=local", f"value.megatron.{setting}")
    assert f"value.megatron.{setting} has no effect with value.backend=hf" in message


def test_a_critic_lies_as_the_policy_does():
    own = ("policy.backend=megatron", "policy.num_layers_unfrozen=-1")
    assert refused(*own).startswith("value.mode=shared is not supported with policy.backend=megatron: set value.mode")
    message = refused(*own, "value.mode=local")
    assert message.startswith("value.backend=hf does not go with policy.backend=megatron: a local critic lies on the")
    message = refused("value.mode=local", "value.backend=megatron")
    assert message.startswith("value.backend=megatron does not go with policy.backend=hf")
    assert "value.backend=megatron has no effect with value.mode=shared" in refused("value.backend=megatron")
    accepted(*own, "value.mode=remote", "value.url=http://127.0.0.1:8900")
    check(load_config(None, own, ReinforceTrainerConfig))


def test_ranks_hold_whole_copies(ranks):
    layout = (*ON, "policy.megatron.tensor_model_parallel_size=2", "policy.megatron.pipeline_model_parallel_size=3")
    ranks(12)
    accepted(*layout)
    ranks(9)
    assert refused(*layout) == (
        "policy.megatron.tensor_model_parallel_size=2 x policy.megatron.pipeline_model_parallel_size=3 = 6 ranks hold "
        "a model together: torchrun must start a multiple of that, here are 9"
    )
    experts = (
        *ON,
        "policy.train_global_batch_size=16",
        "policy.megatron.expert_model_parallel_size=4",
        "policy.megatron.expert_tensor_parallel_size=2",
    )
    assert "expert_tensor_parallel_size=2 x policy.megatron.pipeline_model_parallel_size=1 = 8 ranks" in refused(
        *experts
    )
    ranks(16)
    accepted(*experts)
    # megatron-core makes groups of experts of a layout that divides no experts too.
    ranks(4)
    experts = (*ON, "policy.train_global_batch_size=16", "policy.megatron.expert_tensor_parallel_size=3")
    assert refused(*experts) == (
        "policy.megatron.expert_model_parallel_size=1 x policy.megatron.expert_tensor_parallel_size=3 x "
        "policy.megatron.pipeline_model_parallel_size=1 = 3 ranks hold all experts together: torchrun must start a "
        "multiple of that, here are 4"
    )
    ranks(6)
    accepted(*experts)


def test_each_copy_needs_a_sequence_and_not_each_rank(ranks):
    ranks(16)
    assert "fewer than the 16 ranks that torchrun started" in refused(*ON, "policy.train_global_batch_size=8")
    accepted(*ON, "policy.megatron.tensor_model_parallel_size=2")
    batch = ("policy.train_global_batch_size=4", "policy.train_micro_batch_size=4")
    message = refused(*ON, *batch, "policy.megatron.tensor_model_parallel_size=2")
    assert "fewer than the 8 copies of the model on the 16 ranks that torchrun started" in message


def test_layouts_that_make_no_sense(ranks):
    ranks(2)
    on = lambda *settings: (*ON, *(f"policy.megatron.{each}" for each in settings))  # noqa: E731
    assert "context_parallel_size=2 is not supported yet: set it to 1" in refused(*on("context_parallel_size=2"))
    message = refused(*on("sequence_parallel=true"))
    assert message.endswith("has no effect with policy.megatron.tensor_model_parallel_size=1: set it to false")
    accepted(*on("sequence_parallel=true", "tensor_model_parallel_size=2"))
    message = refused(*on("virtual_pipeline_model_parallel_size=2"))
    assert message.endswith("has no effect with policy.megatron.pipeline_model_parallel_size=1: set it to null")
    accepted(*on("virtual_pipeline_model_parallel_size=2", "pipeline_model_parallel_size=2"))
    assert "expected a number >= 2" in refused(
        *on("virtual_pipeline_model_parallel_size=1", "pipeline_model_parallel_size=2")
    )
    assert "expected a number >= 1" in refused(*on("tensor_model_parallel_size=0"))
    assert "needs policy.megatron.overlap_grad_reduce=true" in refused(*on("overlap_param_gather=true"))
    overlap = ("overlap_param_gather=true", "overlap_grad_reduce=true")
    accepted(*on(*overlap))
    message = refused(*on(*overlap, "distributed_optimizer=false"))
    assert message.startswith("policy.megatron.overlap_param_gather=true needs policy.megatron.distributed_optimizer")


def test_an_engine_takes_gathered_weights_in_buckets():
    accepted(*ON, "policy.generation.refit_bucket_mb=64")
    assert "has no effect with policy.generation.backend=native" in refused("policy.generation.refit_bucket_mb=64")


def test_the_device(monkeypatch):
    config = load_config(None, ON)
    monkeypatch.setattr("trainers.extras.find_spec", lambda module: object())
    monkeypatch.setattr(megatron_rules, "DEVICES", ["cuda"])
    check_device(config, "cuda")
    with pytest.raises(ConfigError, match=r"policy\.backend=megatron needs GPUs, and this run is on cpu"):
        check_device(config, "cpu")
    check_device(load_config(), "cpu")
    monkeypatch.setattr(megatron_rules, "DEVICES", ["cuda", "cpu"])
    check_device(config, "cpu")
    config.policy.megatron.distributed_optimizer = True
    with pytest.raises(ConfigError, match=r"policy\.megatron\.distributed_optimizer=true needs GPUs"):
        check_device(config, "cpu")


def test_megatron_core_that_is_missing_is_named_with_its_extra(monkeypatch):
    find = importlib.util.find_spec

    def without(name, *rest):
        if name.startswith("megatron"):
            raise ModuleNotFoundError("No module named 'megatron'", name="megatron")
        return find(name, *rest)

    monkeypatch.setattr("trainers.extras.find_spec", without)
    with pytest.raises(ImportError, match=r'megatron\.core is not installed: pip install "fastppo\[megatron\]"'):
        check_device(load_config(None, ON), "cuda")


@pytest.mark.parametrize(
    ("model", "layout", "words"),
    [
        ("llama", {"tensor_model_parallel_size": 8}, "does not divide the model's num_attention_heads=4"),
        (
            "llama",
            {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 4},
            "pipeline_model_parallel_size x policy.megatron.virtual_pipeline_model_parallel_size=8 does not divide the "
            "model's num_hidden_layers=4",
        ),
        ("qwen3", {"pipeline_model_parallel_size": 4}, "=4 does not divide the model's num_hidden_layers=2"),
        ("qwen3_moe", {"expert_model_parallel_size": 3}, "=3 does not divide the model's num_experts=4"),
        ("qwen3_moe", {"expert_tensor_parallel_size": 16}, "=16 does not divide the model's moe_intermediate_size=40"),
        (
            "qwen3_moe",
            {"tensor_model_parallel_size": 2},
            "of a model with experts needs policy.megatron.sequence_parallel=true",
        ),
        ("llama", {"expert_model_parallel_size": 2}, "=2 has no effect: the model, a llama, has no experts"),
    ],
)
def test_a_model_that_the_ranks_cannot_divide(model, layout, words):
    with pytest.raises(ConfigError) as caught:
        check_layout(config_of(model), MegatronConfig(**layout), "policy.megatron")
    assert words in str(caught.value) and str(caught.value).startswith("policy.megatron.")


def test_fewer_key_value_heads_than_ranks_are_divided():
    check_layout(config_of("qwen2"), MegatronConfig(tensor_model_parallel_size=4), "policy.megatron")  # one head
    uneven = config_of("llama", hidden_size=48, num_attention_heads=12, num_key_value_heads=3)
    with pytest.raises(ConfigError, match="=4 neither divides the model's num_key_value_heads=3 nor is a multiple"):
        check_layout(uneven, MegatronConfig(tensor_model_parallel_size=4), "policy.megatron")
