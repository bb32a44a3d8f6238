"""A critic's server on megatron-core: one rank listens, all compute, and the numbers are those of one process."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close as close

from tests import tiny
from tests.served import ServerProcess
from trainers import megatron_rules
from trainers.arithmetic import ConfigError, check
from trainers.config_service import ServeConfig
from trainers.megatron_rules import check_device, check_device_of
from trainers.service.critic import Critic
from trainers.service.launch import check as check_server
from trainers.service.launch import load
from trainers.service.messages import LoadRequest, TrainHeader, packed
from trainers.service.wire import decode, encode
from trainers.value.hf import LocalValue

SERVER = ["dtype=float32", "infer_batch_size=2", "value.optimizer.lr=0.002", "value.train_micro_batch_size=2"]
SPREAD = ["value.backend=megatron", "value.megatron.tensor_model_parallel_size=2"]


def served(*settings: str) -> ServeConfig:
    return load("ppo_copy", settings, ServeConfig)


@pytest.mark.skipif(find_spec("megatron") is None, reason='needs megatron-core: pip install "fastppo[megatron]"')
@pytest.mark.timeout(120)
def test_two_ranks_serve_the_numbers_of_one_process(tmp_path):
    batch, header = tiny.rollout(), {"run": "r", "cliprange": 0.2, "scale": 0.5}
    one = one_process(tmp_path / "one")
    parallel = "value.megatron.sequence_parallel=true"
    with ServerProcess(
        tmp_path / "two", "config=ppo_copy", *SERVER, *SPREAD, parallel, ranks=2, starter="tests/megatron_cpu.py"
    ) as server:
        assert server.post("load", b'{"run": "r", "step": 0}').status_code == 200
        for number in (1, 2, 3):
            wanted = one.train(TrainHeader(id=number, **header), "", batch)
            body = encode(header | {"id": number}, packed(batch, "values", "returns"))
            got = answer(server, "train", body)
            same(got, {f"sums.{name}": vector for name, vector in wanted.sums.items()})
            same(got, {f"optimizer.{name}": torch.tensor(x).double() for name, x in wanted.optimizer.items()})
        values, next_values = one.infer(batch)
        got = answer(server, "infer", encode({"want": ["values"], "run": "r", "step": 3}, packed(batch)))
        same(got, {"values": values, "next_values": next_values})
        assert float(values.abs().max()) > 0.05
        assert server.post("save", b'{"run": "r", "step": 3}').status_code == 200
        told = server.get("info").json()
        assert told["value"]["backend"] == "megatron" and told["vocab_size"] == 16
        assert told["value"]["megatron.tensor_model_parallel_size"] == 2
    one.value.load(tmp_path / "two" / "critic" / "r" / "step_3" / "critic")  # as transformers names it
    same(dict(zip(("values", "next_values"), one.infer(batch), strict=True)), got)


def one_process(folder: Path) -> Critic:
    config = served(*SERVER)
    check_server(config)
    how = {"device": torch.device("cpu"), "dtype": torch.float32, "score_batch": 2}
    critic = Critic(lambda: LocalValue(tiny.tiny_model(), config.value, **how), folder, {})
    critic.load(LoadRequest(run="r", step=0))
    return critic


def answer(server: ServerProcess, route: str, body: bytes) -> dict[str, torch.Tensor]:
    response = server.post(route, body)
    assert response.status_code == 200, response.text
    return decode(response.content)[1]


def same(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    for name, value in wanted.items():
        close(got[name], value, rtol=1e-4, atol=1e-5, msg=f"{name}: ".__add__)


def refused(**overrides: object) -> str:
    with pytest.raises(ConfigError) as error:
        check(tiny.config(**overrides))
    return str(error.value)


BOTH = {"policy__backend": "megatron", "policy__num_layers_unfrozen": -1, "value__backend": "megatron"}
LOCAL = BOTH | {"value__mode": "local"}


def test_policy_and_critic_of_one_process_have_one_layout(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    message = refused(**LOCAL, policy__megatron__tensor_model_parallel_size=2)
    assert message.startswith(
        "value.megatron.tensor_model_parallel_size=1 must equal policy.megatron.tensor_model_parallel_size=2: "
    )
    both = {f"{part}__megatron__pipeline_model_parallel_size": 2 for part in ("policy", "value")}
    message = refused(**LOCAL, **both, policy__megatron__virtual_pipeline_model_parallel_size=2)
    assert message.startswith("value.megatron.virtual_pipeline_model_parallel_size=null must equal policy.megatron.")
    check(tiny.config(**LOCAL, **both, value__megatron__recompute="full"))  # what is not a size may differ
    for mine, theirs in (("hf", "megatron"), ("megatron", "hf")):
        message = refused(**LOCAL | {"value__backend": mine, "policy__backend": theirs})
        assert message.startswith(f"value.backend={mine} does not go with policy.backend={theirs}")
    with pytest.raises(ConfigError, match="value.mode=shared is not supported with policy.backend=megatron"):
        check(tiny.config(policy__backend="megatron", policy__num_layers_unfrozen=-1))
    # A server's critic has a layout, a backend and ranks of its own.
    remote = {"value__mode": "remote", "value__url": "http://a:1", "value__backend": "megatron"}
    check(tiny.config(**remote, value__megatron__tensor_model_parallel_size=8, cluster__rank_timeout_s=10000))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("value.fully_shard=true", "value.fully_shard=true is not supported with value.backend=megatron: set it to"),
        ("value.packing=true", "value.packing=true is not supported with value.backend=megatron: its passes have"),
        ("value.gradient_checkpointing=true", "value.gradient_checkpointing=true is not supported with value.backend="),
        ("value.num_layers_unfrozen=1", "value.num_layers_unfrozen=1 is not supported with value.backend=megatron"),
        ("value.param_dtype=float32", "value.param_dtype=float32 has no effect with value.backend=megatron, which"),
        ("value.fused_layers=false", "value.fused_layers=false has no effect with value.backend=megatron, whose"),
        ("value.megatron.sequence_parallel=true", "value.megatron.sequence_parallel=true has no effect with value."),
        ("value.megatron.context_parallel_size=2", "value.megatron.context_parallel_size=2 is not supported yet"),
        ("value.megatron.pipeline_model_parallel_size=2", "torchrun must start a multiple of that, here are 1"),
        ("value.megatron.tensor_model_parallel_size=0", "value.megatron.tensor_model_parallel_size=0: expected a"),
    ],
)
def test_settings_that_mean_nothing_there_are_refused_by_both(settings, message):
    key, value = settings.split("=")
    assert message in refused(**LOCAL | {key.replace(".", "__"): value})
    with pytest.raises(ConfigError) as error:
        check_server(served("value.backend=megatron", settings))
    assert message in str(error.value)


def test_without_the_backend_its_block_means_nothing():
    message = "value.megatron.recompute=full has no effect with value.backend=hf"
    assert message in refused(value__mode="local", value__megatron__recompute="full")
    with pytest.raises(ConfigError, match=message):
        check_server(served("value.megatron.recompute=full"))
    assert "value.backend=megatron has no effect with value.mode=shared" in refused(value__backend="megatron")


def test_a_critic_there_needs_a_gpu(monkeypatch):
    monkeypatch.setattr("trainers.extras.find_spec", lambda module: object())
    monkeypatch.setattr(megatron_rules, "DEVICES", ["cuda"])
    config = served("value.backend=megatron")
    with pytest.raises(ConfigError, match="value.backend=megatron needs GPUs, and this run is on cpu"):
        check_device_of("value", config.value, "cpu")
    check_device_of("value", config.value, "cuda")
    trainer = tiny.config(**LOCAL | {"policy__backend": "hf"})
    with pytest.raises(ConfigError, match="value.backend=megatron needs GPUs"):
        check_device(trainer, "cpu")
    trainer.value.mode = "remote"
    check_device(trainer, "cpu")
