"""Weights on their way: the plan of the buckets by hand, what lies in them, two buffers in turns, LoRA, a manifest that
changes. And the order of a refit, and an engine that sleeps while the policy trains (several ranks: test_dist.py)."""

import copy

import pytest
import torch

from tests import tiny
from tests.test_ppo import small
from trainers import trainer as trainer_module
from trainers.arithmetic import ConfigError, check
from trainers.config import GenerationConfig
from trainers.engines import Capabilities, TensorSpec
from trainers.engines.native import NativeEngine
from trainers.offload import check_device
from trainers.ppo import PPOTrainer
from trainers.refit import Refit, refit
from trainers.weights import Plan, WeightStream


class Named:
    """A policy that is a list of tensors."""

    def __init__(self, **tensors: torch.Tensor):
        self.tensors = tensors

    def manifest(self):
        return {name: TensorSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in self.tensors.items()}

    def weights(self):
        yield from self.tensors.items()


def places(plan: Plan) -> list[list[tuple[str, int]]]:
    return [[(place.name, place.offset) for place in bucket] for bucket in plan.buckets]


def test_the_plan_by_hand():
    """Buckets of 2048 bytes: 600 B end at 600, so the next lies at 1024; 1025 B there would end at 2049."""
    manifest = {
        "a": TensorSpec((150,), torch.float32),
        "b": TensorSpec((512,), torch.bfloat16),
        "c": TensorSpec((1025,), torch.uint8),
        "large": TensorSpec((3, 1000), torch.float32),
        "scalar": TensorSpec((), torch.float32),
        "d": TensorSpec((2, 2), torch.float64),
    }
    plan = Plan(manifest, 2048)
    assert places(plan) == [[("a", 0), ("b", 1024)], [("c", 0)], [("large", 0)], [("scalar", 0), ("d", 512)]]
    assert plan.sizes == [2048, 1025, 12000, 544]
    assert places(Plan(manifest, 2047))[0] == [("a", 0)]


def read(stream: WeightStream) -> dict[str, torch.Tensor]:
    """What an engine makes of the buckets, each of which is its own only until it asks for the next."""
    stream.manifest()
    return {name: tensor.clone() for bucket in stream.buckets() for name, tensor in bucket}


@pytest.mark.parametrize("bucket_bytes", [1, 1100, 2**20])
@pytest.mark.parametrize("transport", ["inproc", "cuda_ipc"])
def test_an_engine_reads_what_the_policy_has(transport, bucket_bytes):
    policy = Named(
        a=torch.randn(3, 5),
        b=torch.randn(7, 40).bfloat16(),
        c=torch.randn(()),
        d=torch.randn(4, 6).T,
        e=torch.randn(90),
    )
    stream = WeightStream(policy, transport, bucket_bytes)
    for _ in range(2):
        got = read(stream)
        assert list(got) == list("abcde")
        assert all(torch.equal(got[name], tensor) for name, tensor in policy.tensors.items())
        policy.tensors = {name: tensor + 1 for name, tensor in policy.tensors.items()}


def test_two_buffers_serve_all_buckets_in_turns_one_being_filled_while_the_other_is_read():
    policy = Named(**{name: torch.full((256,), float(i)) for i, name in enumerate("abcdef")})  # 1024 bytes each
    taken = []
    policy.weights = lambda: (taken.append(name) or (name, tensor) for name, tensor in policy.tensors.items())
    stream = WeightStream(policy, "cuda_ipc", 1024)
    pointers = []
    for _ in range(2):
        stream.manifest()
        for i, [(name, tensor)] in enumerate(stream.buckets()):
            assert tensor.tolist() == [float(i)] * 256 and name == "abcdef"[i]
            assert len(taken) == min(i + 2, 6)  # the next bucket is filled already, no other
            pointers.append(tensor.untyped_storage().data_ptr())
        taken.clear()
    assert pointers == pointers[:2] * 6 and pointers[0] != pointers[1]
    stream.free()
    assert stream.buffers == [None, None]
    assert torch.equal(read(stream)["f"], policy.tensors["f"])


def test_an_engine_in_this_process_is_given_the_tensors_themselves():
    policy = Named(a=torch.randn(3), b=torch.randn(4))
    stream = WeightStream(policy, "inproc", 1)
    stream.manifest()
    assert [[tensor.data_ptr() for _, tensor in bucket] for bucket in stream.buckets()] == [
        [tensor.data_ptr()] for tensor in policy.tensors.values()
    ]
    assert stream.buffers == [None, None]


@pytest.mark.parametrize("transport", ["inproc", "cuda_ipc"])
def test_adapters_travel_merged(transport):
    policy = tiny.policy(peft=tiny.config(policy__peft__enabled=True).policy.peft)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    got = read(WeightStream(policy, transport, 20_000))
    for name, base in policy.adapters.base():
        right = base
        if name in policy.adapters.adapted:
            right = base + policy.adapters.adapted[name].get_delta_weight("default")
            assert not torch.equal(right, base)
        assert torch.equal(got[name], right)


def test_a_manifest_holds_for_every_refit():
    policy = Named(a=torch.zeros(3), b=torch.zeros(4))
    stream = WeightStream(policy, "cuda_ipc", 2**20)
    read(stream)
    for changed, told in (
        ({"a": torch.zeros(3)}, "b was .*, is None now"),
        ({"a": torch.zeros(3), "b": torch.zeros(5)}, r"b was .*\(4,\).*, is .*\(5,\).* now"),
        ({"a": torch.zeros(3), "b": torch.zeros(4), "c": torch.zeros(1)}, "c was None"),
    ):
        with pytest.raises(ValueError, match=f"changed between two refits: {told}"):
            read_of(stream, changed)


def read_of(stream: WeightStream, tensors: dict[str, torch.Tensor]) -> None:
    stream.policy = Named(**tensors)
    read(stream)


@pytest.mark.parametrize("transport", ["inproc", "cuda_ipc"])
@pytest.mark.parametrize("sent", ["ab", "abcd", "acb"])
def test_weights_that_are_not_the_manifests_are_an_error(transport, sent):
    policy = Named(a=torch.zeros(1), b=torch.zeros(1), c=torch.zeros(1))
    policy.weights = lambda: iter([(name, torch.zeros(1)) for name in sent])
    with pytest.raises(ValueError, match=r"weights\(\) must be what its manifest says"):
        read(WeightStream(policy, transport, 2**20))


class Recorder:
    """An engine that notes its calls."""

    def __init__(self, transport: str = "inproc", *, can_sleep: bool = True, fails: str | None = None):
        self.transport, self.can_sleep, self.fails, self.calls = transport, can_sleep, fails, []

    def capabilities(self) -> Capabilities:
        return Capabilities("recorder", "1", transport=self.transport, can_sleep=self.can_sleep)

    def __getattr__(self, name: str):
        def call(*args, **kwargs) -> int:
            if name == self.fails:
                raise RuntimeError(f"{name} fails")
            self.calls.append((name, *args[:1]) if name in ("wake", "begin_update") else name)
            return 5 if name == "put" else 0

        return call


def test_the_order_of_a_refit():
    engine, policy = Recorder(), Named(a=torch.zeros(300), b=torch.zeros(300))
    update = Refit(policy, engine, GenerationConfig(release_memory=True))
    update.stream.bucket_bytes = 1200
    assert update(7) == 10  # bytes, as the engine says
    update.release()
    assert engine.calls == [
        ("wake", "weights"), ("begin_update", 7), "put", "put", "end_update", ("wake", "kv"), "sleep"
    ]  # fmt: skip
    kept = Recorder()
    Refit(policy, kept, GenerationConfig()).release()
    assert kept.calls == []


@pytest.mark.parametrize("fails", ["put", "end_update"])
def test_a_refit_that_fails_is_aborted_and_the_cache_stays_asleep(fails):
    engine = Recorder(fails=fails)
    with pytest.raises(RuntimeError, match=f"{fails} fails"):
        refit(Named(a=torch.zeros(3)), engine, 1)
    assert engine.calls[-1] == "abort_update" and ("wake", "kv") not in engine.calls


def test_a_refit_that_fails_still_takes_all_tensors():
    """Other ranks take part in the gathering of each."""

    class Counted(Named):
        taken = 0

        def weights(self):
            for pair in super().weights():
                self.taken += 1
                yield pair

    policy = Counted(a=torch.zeros(3), b=torch.zeros(3), c=torch.zeros(3))
    update = Refit(policy, Recorder(fails="put"), GenerationConfig())
    update.stream.bucket_bytes = 12
    with pytest.raises(RuntimeError, match="put fails"):
        update(1)
    assert policy.taken == 3


def test_a_manifest_that_changed_reaches_no_engine():
    engine, policy = Recorder(), Named(a=torch.zeros(3))
    update = Refit(policy, engine, GenerationConfig())
    update(1)
    before = len(engine.calls)
    policy.tensors = {"a": torch.zeros(4)}
    with pytest.raises(ValueError, match="changed between two refits"):
        update(2)
    assert len(engine.calls) == before


def test_memory_that_cannot_be_released_is_refused():
    with pytest.raises(ConfigError, match=r"release_memory=true has no effect with policy\.generation\.backend=native"):
        Refit(Named(), Recorder(can_sleep=False), GenerationConfig(release_memory=True))
    config = tiny.config(policy__generation__release_memory=True)
    with pytest.raises(ConfigError, match="policy.generation.release_memory=true has no effect on a CPU"):
        check_device(config, torch.device("cpu"))


def test_buckets_are_refused_where_tensors_travel_as_they_are():
    with pytest.raises(ConfigError, match="policy.generation.refit_bucket_mb=64 has no effect with .*backend=native"):
        check(tiny.config(policy__generation__refit_bucket_mb=64))
    check(tiny.config(policy__generation__refit_bucket_mb=64, policy__peft__enabled=True))


class Sleeper(NativeEngine):
    """Own weights, which are given up in sleep(); the flat buffers of an engine in another process."""

    def capabilities(self) -> Capabilities:
        return Capabilities("native", "0", transport="cuda_ipc", can_sleep=True)

    def _sleep(self, parts, *, keep_weights):
        for parameter in self.parameters.values():
            parameter.data.fill_(float("nan"))
        return True


def test_an_engine_that_gives_its_memory_back_samples_the_same_run(tmp_path, monkeypatch):
    """Validation before the first step and after the last, a resume between: it is awake wherever it is asked."""

    def run(folder, **overrides):
        options = {"ppo__val_period": 2, "ppo__val_at_start": True, "ppo__max_num_steps": 4, "env__size": 8}
        trainer = PPOTrainer(small(tmp_path / folder, **options | overrides))
        trainer.fit()
        return trainer

    right = run("right")
    monkeypatch.setattr(trainer_module, "check_device", lambda config, device: None)
    monkeypatch.setattr(
        trainer_module,
        "make_engine",
        lambda policy, *_: Sleeper(copy.deepcopy(policy.model), policy.tokenizer),
    )
    released = {"policy__generation__release_memory": True, "policy__generation__probe_period": 1}
    run("released", **released, ppo__max_num_steps=2)
    trainer = run("released", **released)
    for mine, theirs in zip(trainer.policy.model.parameters(), right.policy.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    trainer.generate_rollouts(5)
    assert trainer.engine.asleep and trainer.update_engine.stream.buffers == [None, None]
    with pytest.raises(RuntimeError, match="asleep"):
        trainer.validate()
    trainer.refit()
    trainer.validate()
