"""A sharded model on 4, 2 and 1 ranks is the whole one: gloo on a CPU, all ranks in the processes of one spawn."""

import functools
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as torch_dist
import torch.multiprocessing as mp
from torch.distributed.tensor import DTensor
from torch.testing import assert_close as close
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tests import tiny
from tests.test_dist import ENVIRONMENT, metrics, torchrun
from tests.test_loss_invariance import (
    LENGTHS,
    LONGER,
    UNTRAINED,
    Cut,
    Outcome,
    Setting,
    assert_same,
    loss_of,
    random_head,
)
from trainers import dist, sharding
from trainers.arithmetic import ConfigError, check
from trainers.batching import count, part_of
from trainers.cluster_layout import Layout
from trainers.cluster_memory import Part, reference_bytes, state_bytes
from trainers.config import TrainerConfig
from trainers.engines import Sampling
from trainers.engines.native import NativeEngine
from trainers.model_shapes import shape_of
from trainers.optim import Optimizer
from trainers.policy.hf import HFPolicy
from trainers.refit import refit
from trainers.rollout import RolloutBatch
from trainers.service.critic import Critic
from trainers.service.messages import LoadRequest, SaveRequest, TrainHeader
from trainers.value import ScalarHead
from trainers.value.hf import LocalValue

WORLDS = (4, 1, 2)  # the last reads what the others wrote
CPU = torch.device("cpu")
# Of three sequences a rank has two, one or none, so that some must make passes on nothing.
CUTS = [Cut(1, order=LONGER), Cut(1, order=(5, 2, 7)), Cut(max_tokens=30, packing=True)]
CASES = [
    (Setting(), "tied"), (Setting(layers=1), "untied"), (Setting(), "untied"), (Setting(critic="local"), "untied"),
    (Setting(critic="local", layers=1), "tied"),
]  # fmt: skip
Model = HFPolicy | LocalValue


def models(folder: Path) -> None:
    """Small Llamas whose vocabulary no number of ranks here divides."""
    for name, tied in (("tied", True), ("untied", False)):
        torch.manual_seed(3)
        cfg = LlamaConfig(
            vocab_size=37, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=tied,
            bos_token_id=None, eos_token_id=1, pad_token_id=None,
        )  # fmt: skip
        LlamaForCausalLM(cfg).save_pretrained(folder / name)
        AutoTokenizer.from_pretrained(tiny.tiny_model()).save_pretrained(folder / name)


@functools.cache
def settings() -> TrainerConfig:
    return tiny.config()


def policy(path: Path, sharded: bool, layers: int = -1, dtype: torch.dtype = torch.float32, **changed) -> HFPolicy:
    cfg = replace(settings().policy, num_layers_unfrozen=layers, fully_shard=sharded, **changed)
    made = HFPolicy(path, cfg, device=CPU, dtype=dtype)
    head = random_head(ScalarHead(64))
    made.add_head("critic", head, Optimizer(head.parameters(), cfg.optimizer, cfg.scheduler))
    return made


def critic(path: Path, sharded: bool, layers: int = -1, **changed) -> LocalValue:
    cfg = replace(settings().value, num_layers_unfrozen=layers, fully_shard=sharded, **changed)
    made = LocalValue(path, cfg, device=CPU, dtype=torch.float32, score_batch=9)
    random_head(made.head)
    return made


def part(folder: Path, case: tuple[Setting, str], sharded: bool, **changed) -> Model:
    setting, name = case
    return (critic if setting.critic == "local" else policy)(folder / name, sharded, setting.layers, **changed)


def head_of(made: Model) -> ScalarHead:
    return made.head if isinstance(made, LocalValue) else made.heads["critic"]


def rollout(folder: Path) -> RolloutBatch:
    batch = tiny.rollout(LENGTHS)
    batch.mask &= batch.sequence_ids != UNTRAINED
    batch.update(**policy(folder / "untied", False).score(batch, {"old_logprobs", "ref_logprobs"}))
    moved = torch.where(batch.mask, torch.randn(batch.tokens.numel(), generator=torch.Generator().manual_seed(2)), 0.0)
    return batch.update(old_logprobs=batch.old_logprobs + 0.3 * moved, ref_logprobs=batch.ref_logprobs - 0.1 * moved)


def mine(whole: RolloutBatch) -> RolloutBatch:
    return part_of(whole, torch.tensor(dist.rows(whole.lengths), dtype=torch.int64))


def outcome(made: Model, setting: Setting, cut: Cut, batch: RolloutBatch) -> Outcome:
    """One optimizer step up to where clipping would start; gradients whole."""
    made.cfg = replace(made.cfg, train_micro_batch_size=cut.rows, max_tokens_per_micro_batch=cut.max_tokens)
    loss, head = loss_of(setting, made), head_of(made)
    sums = dist.sum_metrics(made.gradients(mine(count(batch.select(cut.order))), loss))
    dist.sum_gradients(head.parameters())
    named = dict(made.model.named_parameters()) | {f"head.{name}": p for name, p in head.named_parameters()}
    gradients = {name: sharding.whole(p.grad) for name, p in named.items() if p.grad is not None}
    for parameter in named.values():
        parameter.grad = None
    return Outcome(sum(dist.gather(loss.total)), gradients, sums)


def steps(made: Model, batch: RolloutBatch, number: int) -> list[dict]:
    """What the optimizers report of `number` optimizer steps."""
    loss = loss_of(Setting(critic="local" if isinstance(made, LocalValue) else "shared"), made)
    return [made.train_step(mine(count(batch.select(range(8)))), loss).optimizers for _ in range(number)]


def values_of(made: Model) -> dict[str, torch.Tensor]:
    return {name: sharding.whole(p).clone() for name, p in made.model.named_parameters()}


def after_steps(folder: Path, sharded: bool, batch: RolloutBatch) -> dict[str, dict]:
    """What policies and a critic are and say after three optimizer steps, which moved them from their reference."""
    found = {}
    for name, layers, kept in (("untied", -1, "auto"), ("tied", 1, "cpu_offload")):
        made = policy(folder / name, sharded, layers, reference=kept, train_micro_batch_size=1)
        reports = steps(made, batch, 3)
        engine = NativeEngine(made.engine_model(torch.float32), made.tokenizer)
        assert (refit(made, engine, 1) > 0) == sharded
        scored = made.score(batch, {"old_logprobs", "ref_logprobs", "values"})
        scored.pop("trunk_hidden", None)
        found[name] = {
            "scored": scored, "reports": reports, "weights": {n: w.clone() for n, w in made.weights()},
            "alike": (made.manifest(), made.frozen_sha256, made.facts()),
            "answers": [a.tokens for a in engine.generate([[4], [5, 6, 7]], Sampling(12), [3, 4])],
        }  # fmt: skip
    made = critic(folder / "untied", sharded)
    reports = steps(made, batch, 3)
    scored = dict(zip(("values", "next_values"), made.infer(batch).result(), strict=True))
    found["critic"] = {"scored": scored, "reports": reports, "weights": values_of(made), "alike": (), "answers": []}
    return found


def assert_alike(found: dict[str, dict], right: dict[str, dict]) -> None:
    for name, expected in right.items():
        got = found[name]
        for report, wanted in zip(got["reports"], expected["reports"], strict=True):
            for optimizer, numbers in wanted.items():
                assert report[optimizer] == pytest.approx(numbers, rel=1e-5), name
        for kind in ("scored", "weights"):
            assert got[kind].keys() == expected[kind].keys(), (name, kind)
            for key, value in expected[kind].items():
                close(got[kind][key], value, rtol=1e-4, atol=2e-5, msg=f"{name} {key}: ".__add__)
        assert got["alike"] == expected["alike"] and got["answers"] == expected["answers"], name


def same_as_whole(folder: Path, world: int) -> None:
    right = torch.load(folder / "right.pt", weights_only=False)
    batch = right["batch"]
    for case in CASES if world == 2 else CASES[:2]:
        padded, packed = (part(folder, case, True, packing=packing) for packing in (False, True))
        assert all(isinstance(p, DTensor) for p in padded.model.parameters())
        for cut in CUTS:
            got = outcome(packed if cut.packing else padded, case[0], cut, batch)
            assert_same(got, right["outcomes"][str(case), str(cut)], f"{world} ranks, {case}, {cut}")
        if world == 2:
            again = outcome(part(folder, case, True, gradient_checkpointing=True), case[0], CUTS[1], batch)
            for name, gradient in outcome(padded, case[0], CUTS[1], batch).gradients.items():
                assert torch.equal(again.gradients[name], gradient), name
    if world == 2:
        assert_alike(after_steps(folder, True, batch), right["after"])
        in_half(folder, right["half"], batch)


def in_half(folder: Path, right: Outcome, batch: RolloutBatch) -> None:
    """bfloat16, as on a GPU: float32 shards gathered in bfloat16 are bfloat16 parameters with float32 masters."""
    made = policy(folder / "tied", True, dtype=torch.bfloat16)
    assert all(p.dtype == torch.float32 for p in made.model.parameters())
    assert all(spec.dtype == torch.bfloat16 for spec in made.manifest().values())
    got = outcome(made, Setting(), CUTS[0], batch)
    assert got.loss == pytest.approx(right.loss, rel=1e-6)
    for (
        name,
        gradient,
    ) in right.gradients.items():  # the head's alone is summed in float32 there
        assert got.gradients[name].dtype == torch.float32
        scale = gradient.abs().max().item()
        close(got.gradients[name], gradient, rtol=0.01, atol=0.005 * scale, msg=f"{name}: ".__add__)
    holds_what_is_planned(made, batch)


def holds_what_is_planned(made: HFPolicy, batch: RolloutBatch) -> None:
    """--dry-run's bytes of a rank of two, from the model's sizes alone; of 37 rows of a vocabulary one has 19."""
    part = Part(shape_of(made.model.config, "tied"), Layout(dp=2, fully_shard=True), 8, 8)
    planned = state_bytes(part, 0) | {"reference": reference_bytes(part, 0)}
    made.gradients(mine(count(batch.select(range(8)))), loss_of(Setting(), made))
    held = {"gradients": sum(sharding.local(p.grad).nbytes for p in made.model.parameters())}
    steps(made, batch, 1)
    moments = made.optimizers["actor"].adamw.state.values()
    held |= {
        "weights": sum(sharding.local(p).nbytes for p in made.model.parameters()),
        "optimizer": sum(state["exp_avg"].nbytes + state["exp_avg_sq"].nbytes for state in moments),
        "reference": sum(p.nbytes for p in made.reference.initial),
    }
    bytes_ = {"weights": 4, "gradients": 4, "optimizer": 8, "reference": 2}
    for name, both in {name: sum(dist.gather(held[name])) for name in bytes_}.items():
        assert both == 2 * planned[name] == bytes_[name] * part.shape.parameters, name
        assert abs(held[name] - planned[name]) == bytes_[name] * 64 / 2, name


# Optimizer steps after which a checkpoint is written, by number of ranks and kind.
TAKEN = {4: {"policy": (0, 2), "critic": (2,)}, 1: {"policy": (2,), "critic": (2,)}, 2: {"policy": (), "critic": ()}}
KINDS = {"policy": (policy, "untied", 1), "critic": (critic, "tied", -1)}  # each with a head that is not sharded


def make(folder: Path, kind: str) -> Model:
    maker, model, layers = KINDS[kind]
    return maker(folder / model, True, layers)


def write(made: Model, folder: Path) -> None:
    if dist.is_main():
        folder.mkdir()
    dist.gather(None)
    made.save(folder / "export")
    state = made.state_dict()
    if dist.is_main():
        torch.save(state, folder / "state.pt")
    made.save_shards(folder / "shards")
    dist.gather(None)


def read(made: Model, folder: Path) -> Model:
    if isinstance(made, LocalValue):
        made.load(folder / "export")
    made.load_state_dict(torch.load(folder / "state.pt", weights_only=True))
    made.load_shards(folder / "shards")
    return made


def equal(made: Model, right: dict[str, torch.Tensor]) -> bool:
    found = values_of(made)
    return found.keys() == right.keys() and all(torch.equal(found[name], value) for name, value in right.items())


def checkpoints(folder: Path, world: int) -> None:
    """Written by 4 ranks and by 1, before the first step and after two; read by as many bit for bit, and by fewer or
    more with the same weights, from which the same steps follow: without their moments they would be others."""
    batch = torch.load(folder / "right.pt", weights_only=False)["batch"]
    for kind in KINDS:
        for taken in TAKEN[world][kind]:
            here, first = folder / f"{kind}-{world}-{taken}", make(folder, kind)
            steps(first, batch, taken)
            write(first, here)
            saved, second = values_of(first), read(make(folder, kind), here)
            assert equal(second, saved)
            reports = steps(first, batch, 2)
            assert steps(second, batch, 2) == reports
            later = values_of(first)
            assert equal(second, later)
            assert all(map(torch.equal, head_of(first).parameters(), head_of(second).parameters()))
            if dist.is_main():
                torch.save({"saved": saved, "later": later}, here / "whole.pt")
        for writers in {4: (), 2: (4, 1), 1: (4,)}[world]:
            here = folder / f"{kind}-{writers}-2"
            whole, made = torch.load(here / "whole.pt"), read(make(folder, kind), here)
            assert equal(made, whole["saved"])
            steps(made, batch, 2)
            for name, value in values_of(made).items():
                where = f"{kind}, {writers} to {world} ranks, {name}: "
                close(value, whole["later"][name], rtol=1e-4, atol=2e-5, msg=where.__add__)
    if world == 2:
        other = policy(folder / "tied", True, 1)
        with pytest.raises(ValueError, match=r"is not a checkpoint of this model: they differ in 'exp_avg\."):
            other.load_shards(folder / "critic-4-2" / "shards")


def served(folder: Path) -> None:
    """The critic service's own saving and starting again, on both ranks."""

    def start() -> Critic:
        return Critic(lambda: critic(folder / "untied", True), folder / "server", {})

    first, batch = start(), tiny.rollout()
    first.load(LoadRequest(run="r", step=0))
    first.train(TrainHeader(run="r", id=1), "digest", batch)
    first.save(SaveRequest(run="r", step=1))
    again = start()
    assert (again.run, again.step) == ("r", 1) and equal(again.value, values_of(first.value))
    answers = [each.train(TrainHeader(run="r", id=2), "another", batch) for each in (first, again)]
    assert answers[0].optimizer == answers[1].optimizer and equal(again.value, values_of(first.value))
    assert all(map(torch.equal, first.infer(batch), again.infer(batch)))


def worker(rank: int, name: str) -> None:
    torch.set_num_threads(1)
    folder = Path(name)
    for world in WORLDS:
        if rank < world:
            if world > 1:
                meeting = f"file://{folder}/meet{world}"
                torch_dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world)
                same_as_whole(folder, world)
            checkpoints(folder, world)
            if world == 2:
                served(folder)
            dist.stop()


@pytest.mark.timeout(300)
def test_a_sharded_model_is_the_whole_one(tmp_path):
    models(tmp_path)
    batch = rollout(tmp_path)
    right: dict = {"batch": batch, "outcomes": {}, "after": after_steps(tmp_path, False, batch)}
    for case in CASES:
        made = part(tmp_path, case, False)
        for cut in CUTS:
            right["outcomes"][str(case), str(cut)] = outcome(made, case[0], Cut(order=cut.order), batch)
    half = policy(tmp_path / "tied", False, dtype=torch.bfloat16, param_dtype="bfloat16", train_micro_batch_size=1)
    loss = loss_of(Setting(), half)
    half.gradients(count(batch.select(LONGER)), loss)
    gradients = {name: half.masters.of(p).grad for name, p in half.model.named_parameters()}
    right["half"] = Outcome(loss.total, gradients, {})
    torch.save(right, tmp_path / "right.pt")
    mp.start_processes(worker, args=(str(tmp_path),), nprocs=max(WORLDS), start_method="forkserver")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "policy-4-2" / "export", dtype="auto")
    assert exported.dtype == torch.float32 and type(exported).__name__ == "LlamaForCausalLM"
    saved = torch.load(tmp_path / "policy-4-2" / "whole.pt")["saved"]
    got = dict(exported.named_parameters())
    assert got.keys() == saved.keys() and all(torch.equal(got[name], value) for name, value in saved.items())


@pytest.mark.timeout(300)
def test_two_sharded_ranks_train_like_one_whole_one(tmp_path):
    """A run and its resume: rollouts, refits into the embedded engine, updates, checkpoints."""
    critic = ("value.mode=local", "value.train_global_batch_size=6", "value.train_micro_batch_size=2")
    both = (*critic, "policy.num_layers_unfrozen=-1", "policy.generation.probe_period=1")
    sharded = (*both, "policy.fully_shard=true", "value.fully_shard=true")
    for ranks, name, overrides in ((1, "one", both), (2, "two", sharded)):
        command = torchrun(tmp_path / name, *overrides, "ppo.max_num_steps=2", algorithm="ppo", ranks=ranks)
        done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
        assert done.returncode == 0, done.stderr
    for one, two in zip(metrics(tmp_path / "one"), metrics(tmp_path / "two"), strict=True):
        for name in one:
            if not name.startswith(("tim", "perf/")):
                assert two[name] == pytest.approx(one[name], rel=2e-3, abs=2e-4), name
        assert one["perf/refit_bytes"] == 0 < two["perf/refit_bytes"]  # an engine of its own, whole
    saved = tmp_path / "two" / "checkpoints" / "step_2"
    assert {path.name for path in (saved / "shards").iterdir()} == {"policy", "value"}
    assert (saved / "state.pt").stat().st_size < (saved / "policy" / "model.safetensors").stat().st_size / 4
    command = torchrun(tmp_path / "two", *sharded, "ppo.max_num_steps=3", algorithm="ppo")
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 0 and "resumed after step 2" in done.stdout, done.stderr
    assert [row["step"] for row in metrics(tmp_path / "two")] == [1, 2, 3]


def refused(**overrides: object) -> str:
    with pytest.raises(ConfigError) as error:
        check(tiny.config(**overrides))
    return str(error.value)


def test_what_does_not_go_with_it_is_refused_by_name():
    message = refused(policy__fully_shard=True, policy__peft__enabled=True)
    assert message.startswith("policy.fully_shard=true does not go with policy.peft.enabled=true")
    message = refused(policy__fully_shard=True, policy__dtype="bfloat16", policy__param_dtype="bfloat16")
    assert message.startswith("policy.param_dtype=bfloat16 does not go with policy.fully_shard=true: shards are")
    assert "value.fully_shard=true has no effect with value.mode=shared" in refused(value__fully_shard=True)
    message = refused(value__mode="local", value__fully_shard=True, value__offload=True)
    assert message.startswith("value.offload=true does not go with value.fully_shard=true")
    check(tiny.config(policy__fully_shard=True, value__mode="local", value__fully_shard=True))


def test_a_model_without_layers_is_refused():
    class Backbone:
        model = torch.nn.Linear(2, 2)

    with pytest.raises(ValueError, match="policy.fully_shard: Linear has no layers"):
        sharding.shard(Backbone(), CPU, fused=False, key="policy.fully_shard")
