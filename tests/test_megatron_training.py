"""However megatron-core spreads a policy, it scores and trains as the policy on transformers does in one process.

Four ranks over gloo, on a CPU. Log-probs, raw gradients (AdamW would hide a wrong scale), metrics, gradient norms and
weights after some steps are held against HFPolicy's.
"""

import os
import shutil
from dataclasses import dataclass, field, replace
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist
from torch import Tensor
from torch.testing import assert_close as close
from transformers import AutoModelForCausalLM

from tests import megatron_cpu, tiny
from tests.megatron_models import build_hf, config_of, file_names
from trainers import dist
from trainers.batching import count, part_of
from trainers.config import ClusterConfig, LossConfig, PolicyConfig
from trainers.config_megatron import MegatronConfig
from trainers.engines.native import NativeEngine
from trainers.losses import PolicyLoss
from trainers.refit import Refit
from trainers.rollout import RolloutBatch
from trainers.weights import WeightStream

pytestmark = pytest.mark.skipif(
    find_spec("megatron") is None, reason='needs megatron-core: pip install "fastppo[megatron]"'
)
CPU = torch.device("cpu")
IDS = torch.arange(24).view(2, 12)
WORLD = 4
LENGTHS = ((2, 4), (3, 1), (1, 9), (2, 3), (4, 2), (1, 1), (6, 5), (2, 7))


@dataclass(frozen=True)
class Layout:
    """What these leave of the four ranks is data-parallel."""

    tensor: int = 1
    pipeline: int = 1
    more: dict[str, Any] = field(default_factory=dict, hash=False)
    tokens: int | None = None  # max_tokens_per_micro_batch
    reference: str = "auto"

    def settings(self) -> MegatronConfig:
        return MegatronConfig(self.tensor, self.pipeline, **self.more)


LAYOUTS = {
    "dp4": Layout(more={"overlap_grad_reduce": True}),
    "dp4_divided": Layout(
        more={"distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True},
        reference="cpu_offload",
    ),
    "tp2": Layout(2, tokens=30),
    "tp2_divided": Layout(2, more={"distributed_optimizer": True}),
    "tp2_sp": Layout(2, more={"sequence_parallel": True, "recompute": "full"}),
    "tp4": Layout(4, reference="cpu_offload"),
    "pp2": Layout(1, 2, {"recompute": "selective"}, reference="cpu_offload"),
    "tp2_sp_pp2": Layout(2, 2, {"sequence_parallel": True}, tokens=30),
    # The output layer has a bucket of its own, and its module is never called.
    "pp2_divided": Layout(
        1, 2, {"distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
    ),
    "pp2_interleaved": Layout(1, 2, {"virtual_pipeline_model_parallel_size": 2}),
    "ep2": Layout(more={"expert_model_parallel_size": 2}),
    "tp2_sp_ep2": Layout(
        2,
        more={"sequence_parallel": True, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
    ),
}
CASES = [
    *(("llama", layout) for layout in LAYOUTS if "ep2" not in layout and layout != "pp2_divided"),
    *(("qwen3_tied", layout) for layout in ("pp2_divided", "tp2_divided", "tp2_sp_pp2")),
    *(("qwen3_moe", layout) for layout in ("ep2", "tp2_sp_ep2")),
]
FED = {"llama": "tp2_sp_pp2", "qwen3_tied": "tp2_sp_pp2", "qwen3_moe": "tp2_sp_ep2"}  # model -> layout


def settings_of(name: str, layout: Layout | None = None) -> PolicyConfig:
    cfg = tiny.config().policy
    optimizer = replace(cfg.optimizer, lr=1e-3, weight_decay=0.1, max_grad_norm=0.05)
    early = {"min_new_tokens": 2, "stop_token_ids": [3, 100]} if name == "llama" else {}
    generation = replace(cfg.generation, temperature=0.7, **early)
    cut: dict[str, Any] = {}
    if layout is not None:
        cut = {"megatron": layout.settings(), "max_tokens_per_micro_batch": layout.tokens}
        cut |= {"reference": layout.reference, "offload_optimizer": layout.reference == "cpu_offload"}
    return replace(
        cfg, num_layers_unfrozen=-1, train_micro_batch_size=2, logprob_batch_size=3, optimizer=optimizer,
        generation=generation, **cut,
    )  # fmt: skip


def loss_of(cfg: PolicyConfig, policy: Any) -> PolicyLoss:
    loss_fn = LossConfig(entropy_bonus=0.1, use_kl_in_reward=False, reference_policy_kl_type="k3")
    return PolicyLoss(
        loss_fn, temperature=cfg.generation.temperature, norm_length=20, softcap=None, stop_ids=policy.stop_ids,
        min_new_tokens=cfg.generation.min_new_tokens,
    )  # fmt: skip


def rollout(vocab: int) -> RolloutBatch:
    """Over ids of the whole vocabulary, so that each rank's rows are targets."""
    batch = tiny.rollout(LENGTHS)
    batch.tokens = torch.randint(vocab, batch.tokens.shape, generator=torch.Generator().manual_seed(4))
    return batch


def scored(policy: Any, vocab: int) -> RolloutBatch:
    """By a policy that has moved since, so that some ratios are clipped."""
    batch = rollout(vocab)
    batch.update(**policy.score(batch, {"old_logprobs", "ref_logprobs"}))
    moved = torch.where(batch.mask, torch.randn(batch.tokens.numel(), generator=torch.Generator().manual_seed(2)), 0.0)
    return batch.update(old_logprobs=batch.old_logprobs + 0.3 * moved, ref_logprobs=batch.ref_logprobs - 0.1 * moved)


def course(policy: Any, cfg: PolicyConfig, vocab: int, gradients: Any, weights: Any) -> dict[str, Any]:
    """Scores, the first step's raw gradients, three optimizer steps, of which one is not finite, and scores again."""
    found: dict[str, Any] = {"first": policy.score(rollout(vocab), {"old_logprobs", "ref_logprobs"})}
    batch, loss = scored(policy, vocab), loss_of(cfg, policy)

    def minibatch(rows: list[int], **changes: Tensor) -> RolloutBatch:
        whole = count(replace(batch, **changes).select(rows))
        return part_of(whole, torch.tensor(dist.rows(whole.lengths), dtype=torch.int64))

    every = list(range(len(batch)))
    found["sums"] = dist.sum_metrics(policy.gradients(minibatch(every), loss))
    found["gradients"] = gradients(policy)
    steps = [minibatch(every), minibatch(every, advantages=batch.advantages * torch.nan), minibatch([6, 1, 0, 2])]
    metrics = []
    for step in steps:
        metrics.append(policy.train_step(step, loss))
        policy.offload()
    found["steps"] = [step.optimizers["actor"] for step in metrics]
    found["metrics"] = [metrics[0].sums, metrics[2].sums]
    found["weights"] = weights(policy)
    found["last"] = policy.score(rollout(vocab), {"old_logprobs", "ref_logprobs"})
    return found


def right(folder: Path, name: str) -> dict[str, Any]:
    """What HFPolicy does in one process."""
    from trainers.policy.hf import HFPolicy

    cfg = settings_of(name)
    policy = HFPolicy(folder, cfg, device=CPU, dtype=torch.float32)

    def gradients(policy: Any) -> dict[str, Tensor]:
        taken = file_names((name, p.grad.clone()) for name, p in policy.model.named_parameters())
        policy.model.zero_grad()
        return taken

    def weights(policy: Any) -> dict[str, Tensor]:
        return {name: p.clone() for name, p in file_names(policy.weights()).items()}

    return course(policy, cfg, policy.vocab_size, gradients, weights)


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    megatron_cpu.apply()
    from trainers import megatron_groups

    store = torch_dist.FileStore(os.path.join(folder, "store"), WORLD)
    torch_dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=60))
    results: dict[Any, Any] = {}
    for key, layout in LAYOUTS.items():
        for name in dict.fromkeys(model for model, its in CASES if its == key):
            results[name, key] = evaluate(Path(folder), name, layout)
        megatron_groups.stop()
    torch_dist.destroy_process_group()
    torch.save(results, os.path.join(folder, f"{rank}.pt"))


def evaluate(folder: Path, name: str, layout: Layout) -> dict[str, Any]:
    from trainers.megatron_weights import hf_tensors
    from trainers.policy.megatron import MegatronPolicy

    cfg, cluster = settings_of(name, layout), ClusterConfig(rank_timeout_s=60)
    policy = MegatronPolicy(folder / name, cfg, cluster, device=CPU, dtype=torch.float32)
    fed = feed(policy, folder / f"{name}_exported") if layout == LAYOUTS[FED[name]] else {}

    def gradients(policy: Any) -> dict[str, Tensor]:
        return {k: g.clone() for k, g in hf_tensors(policy.model.chunks, of=lambda p: p.main_grad)}

    def weights(policy: Any) -> dict[str, Tensor]:
        return {k: w.clone() for k, w in policy.weights()}

    return course(policy, cfg, policy.vocab_size, gradients, weights) | fed


def feed(policy: Any, exported: Path) -> dict[str, Any]:
    """What engines are given, by each way there is, what the embedded one computes after a refit; and the export."""
    streams = {}
    for transport in ("inproc", "cuda_ipc"):
        stream = WeightStream(policy, transport, bucket_bytes=10_000)
        stream.manifest()
        streams[transport] = {name: x.clone() for bucket in stream.buckets() for name, x in bucket}
        assert len(stream.plan.buckets) > 5
    logits = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = policy.engine_model(dtype)
        for parameter in model.parameters():
            parameter.zero_()
        update = Refit(policy, NativeEngine(model, policy.tokenizer), policy.cfg.generation)
        assert update(1) == sum(p.numel() * p.itemsize for p in model.parameters())
        logits[dtype] = model(input_ids=IDS, use_cache=False).logits
    policy.save(exported)
    return {"streams": streams, "logits": logits}


def write_models(folder: Path, names: list[str]) -> None:
    for name in names:
        build_hf(name).save_pretrained(folder / name)
        for path in tiny.tiny_model().glob("tokenizer*"):
            shutil.copy(path, folder / name)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[dict[Any, Any]], Path]:
    """What is right, by model; what was found, by rank; where the models are."""
    folder = tmp_path_factory.mktemp("megatron")
    names = list(dict.fromkeys(model for model, _ in CASES))
    write_models(folder, names)
    megatron_cpu.spawn(worker, (str(folder),), WORLD)
    found = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(WORLD)]
    return {name: right(folder / name, name) for name in names}, found, folder


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", FED)
def test_engines_and_exports_have_the_very_weights(results, name):
    """Of tensor, pipeline and expert parallel ranks; a tied embedding once, each expert apart; on every rank."""
    _, found, folder = results
    model = AutoModelForCausalLM.from_pretrained(folder / name)
    expected = file_names(model.named_parameters())
    for rank in found:
        for transport, tensors in rank[name, FED[name]]["streams"].items():
            assert tensors.keys() == expected.keys(), transport
            assert all(tensors[key].equal(parameter) for key, parameter in expected.items()), transport
        for dtype, logits in rank[name, FED[name]]["logits"].items():
            right = AutoModelForCausalLM.from_pretrained(folder / name, dtype=dtype)
            assert logits.equal(right(input_ids=IDS, use_cache=False).logits), dtype
    exported = AutoModelForCausalLM.from_pretrained(folder / f"{name}_exported")
    assert all(p.equal(q) for p, q in zip(model.parameters(), exported.parameters(), strict=True))
    assert exported(input_ids=IDS).logits.equal(model(input_ids=IDS).logits)


def same(got: dict[str, Tensor], wanted: dict[str, Tensor], what: str) -> None:
    """To float32's rounding of the sums they are: an element that cancels is as uncertain as the largest one."""
    assert got.keys() == wanted.keys(), what
    for name, value in wanted.items():
        largest = float(value.abs().max())
        close(got[name], value, rtol=1e-5, atol=1e-5 * largest, msg=f"{what}: {name}: ".__add__)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_a_policy_on_megatron_core_is_the_same_policy(results, case):
    wanted = results[0][case[0]]
    assert config_of(case[0]).vocab_size > 64  # more than a rank's rows
    for got in (rank[case] for rank in results[1]):
        for when in ("first", "last"):
            same(got[when], wanted[when], when)
        same(got["sums"], wanted["sums"], "sums")
        if not LAYOUTS[case[1]].more.get("distributed_optimizer"):  # else a rank has the sum of its part alone
            same(got["gradients"], wanted["gradients"], "gradients")
        for mine, theirs in zip(got["metrics"], wanted["metrics"], strict=True):
            same(mine, theirs, "metrics")
        for mine, theirs in zip(got["steps"], wanted["steps"], strict=True):
            assert mine == pytest.approx(theirs, rel=1e-5, nan_ok=True)
        same(got["weights"], wanted["weights"], "weights")
    assert [step["skipped"] for step in wanted["steps"]] == [0, 1, 0]
    assert wanted["steps"][0]["grad_norm"] > 0.05  # clipped
