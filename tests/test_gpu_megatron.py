"""A policy on megatron-core's own layers, without Transformer Engine, on a GPU: that on transformers, within rounding;
with the distributed optimizer too, which runs nowhere else. On two GPUs, by torchrun: the run of one."""

import subprocess
import sys
from dataclasses import replace
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.testing import assert_close as close
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tests import tiny
from tests.megatron_models import file_names
from tests.test_dist import ENVIRONMENT
from tests.test_megatron_trainers import STEPS, Case, copied, timeless
from tests.test_megatron_training import loss_of, rollout, write_models
from trainers import dist
from trainers.batching import count
from trainers.config import ClusterConfig, PolicyConfig
from trainers.config_megatron import MegatronConfig
from trainers.engines import Sampling
from trainers.engines.native import NativeEngine
from trainers.policy.hf import HFPolicy
from trainers.refit import Refit

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(find_spec("megatron") is None, reason='needs megatron-core: pip install "fastppo[megatron]"'),
]
WANTED = {"old_logprobs", "ref_logprobs"}
VOCAB = 500
# (dtype, distributed optimizer)
SETTINGS = [(torch.float32, False), (torch.float32, True), (torch.bfloat16, False), (torch.bfloat16, True)]


def settings(**changes: Any) -> PolicyConfig:
    cfg = tiny.config().policy
    optimizer = replace(cfg.optimizer, lr=1e-3, weight_decay=0.1, max_grad_norm=0.5)
    # One sequence a pass: else both sum bfloat16 gradients of the embeddings in another order.
    return replace(cfg, num_layers_unfrozen=-1, train_micro_batch_size=1, optimizer=optimizer, **changes)


def course(policy: Any, gradients: Any) -> dict[str, Any]:
    """Scores, raw gradients, three steps, and scores again: all on the CPU."""
    batch = rollout(VOCAB)
    found = {"first": policy.score(batch, WANTED)}
    batch.update(**found["first"])
    batch, loss = count(batch), loss_of(policy.cfg, policy)
    policy.gradients(batch, loss)
    found["gradients"] = {name: gradient.float().cpu() for name, gradient in gradients().items()}
    found["norms"] = [policy.train_step(batch, loss).optimizers["actor"]["grad_norm"] for _ in range(3)]
    found["last"] = policy.score(rollout(VOCAB), WANTED)
    return found


def on_transformers(folder: Path, dtype: torch.dtype) -> dict[str, Any]:
    policy = HFPolicy(folder, settings(), device=torch.device("cuda"), dtype=dtype)

    def gradients() -> dict[str, Tensor]:
        taken = file_names((name, policy.masters.of(p).grad.clone()) for name, p in policy.model.named_parameters())
        for _, parameter in policy.model.named_parameters():
            parameter.grad = policy.masters.of(parameter).grad = None
        return taken

    return course(policy, gradients)


def on_megatron(folder: Path, dtype: torch.dtype, distributed: bool) -> dict[str, Any]:
    from trainers.megatron_weights import hf_tensors
    from trainers.policy.megatron import MegatronPolicy

    def make(**changes: Any) -> MegatronPolicy:
        layout = MegatronConfig(distributed_optimizer=distributed, transformer_engine=False)
        cfg = settings(megatron=layout, **changes)
        return MegatronPolicy(folder, cfg, ClusterConfig(), device=torch.device("cuda"), dtype=dtype)

    policy = make(offload_optimizer=True)

    def gradients() -> dict[str, Tensor]:
        return {name: g.clone() for name, g in hf_tensors(policy.model.chunks, of=lambda p: p.main_grad)}

    found = course(policy, gradients)
    # Masters and moments through the host's memory and a checkpoint.
    policy.offload()
    folder_of_shards = folder / f"shards_{dtype}_{distributed}"
    policy.save_shards(folder_of_shards)
    again = make()
    again.load_state_dict(policy.state_dict())
    again.load_shards(folder_of_shards)
    batch = rollout(VOCAB)
    scores = [each.score(batch, WANTED) for each in (policy, again)]
    assert all(scores[0][name].equal(scores[1][name]) for name in WANTED)
    batch = count(batch.update(**scores[0]))
    steps = [each.train_step(batch, loss_of(each.cfg, each)).optimizers["actor"] for each in (policy, again)]
    assert steps[0] == pytest.approx(steps[1], rel=1e-3)
    if dtype == torch.float32:  # the step is the moments' too: without them it would be lr in every element
        first, second = (dict(each.weights()) for each in (policy, again))
        assert all((weight - second[name]).abs().max() < 2e-4 for name, weight in first.items())
    # The embedded engine samples what the policy scores, and gives its weights up in between.
    engine = NativeEngine(policy.engine_model(dtype), policy.tokenizer, own_weights=True)
    update = Refit(policy, engine, replace(policy.cfg.generation, release_memory=True))
    for version in (1, 2):
        assert update(version) == dtype.itemsize * sum(p.numel() for p in engine.model.parameters())
        found["sampled"] = engine.generate([[4, 5, 6]], Sampling(8, ignore_eos=True), [3])[0].tokens
        before = torch.cuda.memory_allocated()
        update.release()
        assert torch.cuda.memory_allocated() < before - 10**6
    return found


def worker(rank: int, name: str) -> None:
    folder = Path(name)
    torch.cuda.set_device(0)
    store = torch_dist.FileStore(str(folder / "store"), 1)
    torch_dist.init_process_group(
        "cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1, timeout=timedelta(seconds=60)
    )
    torch.save({key: on_megatron(folder, *key) for key in SETTINGS}, folder / "found.pt")
    dist.stop()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[Any, Any], dict[Any, Any]]:
    folder = tmp_path_factory.mktemp("megatron")
    torch.manual_seed(0)
    cfg = LlamaConfig(
        vocab_size=VOCAB, hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, head_dim=64,
    )  # fmt: skip
    LlamaForCausalLM(cfg).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny.tiny_model()).save_pretrained(folder)
    right = {dtype: on_transformers(folder, dtype) for dtype in (torch.float32, torch.bfloat16)}
    mp.start_processes(worker, args=(str(folder),), nprocs=1, start_method="spawn")
    return right, torch.load(folder / "found.pt", weights_only=False)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("key", SETTINGS, ids=lambda key: f"{key[0]}-distributed={key[1]}".removeprefix("torch."))
def test_one_gpu_is_the_policy_on_transformers(found, key):
    right, got = found[0][key[0]], found[1][key]
    exact = key[0] == torch.float32
    for when in ("first", "last"):
        for name, value in right[when].items():
            apart = (got[when][name] - value).abs()
            assert float(apart.max()) < (1e-3 if exact else 0.3), (when, name)
            assert float(apart.mean()) < (1e-4 if exact else 0.03), (when, name)
    assert got["gradients"].keys() == right["gradients"].keys()
    for name, gradient in right["gradients"].items():
        error = float((got["gradients"][name] - gradient).norm() / gradient.norm())
        assert error < (1e-3 if exact else 0.05), (name, error)
    assert got["norms"] == pytest.approx(right["norms"], rel=1e-3 if exact else 0.05)
    assert got["norms"][0] > 0.5  # clipped


def test_both_optimizers_step_alike(found):
    for dtype in (torch.float32, torch.bfloat16):
        plain, distributed = (found[1][dtype, divided] for divided in (False, True))
        close(torch.tensor(plain["norms"]), torch.tensor(distributed["norms"]), rtol=1e-3, atol=0)
        if dtype == torch.float32:
            assert plain["sampled"] == distributed["sampled"]


@pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason=f"needs two CUDA devices, and torch sees {torch.cuda.device_count()}"
)
@pytest.mark.timeout(900)
def test_two_gpus_make_the_run_of_one(tmp_path):
    """Tensor, pipeline and data parallel, with the distributed optimizer; one goes on from another's checkpoint."""
    write_models(tmp_path, ["llama"])
    overlaps = {"overlap_grad_reduce": True, "overlap_param_gather": True}
    gpu = {"cluster.device": "cuda", "cluster.rank_timeout_s": 120}
    one, tp2, dp2, pp2, resumed = (
        Case("one", "ppo", 1, None, gpu),
        Case("tp2", "ppo", 2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}, gpu),
        Case("dp2", "ppo", 2, overlaps, gpu),
        Case("pp2", "ppo", 2, {"pipeline_model_parallel_size": 2}, gpu),
        Case("tp2_to_dp2", "ppo", 2, overlaps, gpu),
    )
    for case in (one, tp2, dp2, pp2, resumed):
        if case is resumed:
            copied("tp2", case.name, tmp_path)
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if case.ranks > 1 else []
        command = [sys.executable, *launcher, "-m", "trainers.ppo", "config=ppo_copy", *case.texts(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, cwd=Path(__file__).parents[1])
        assert done.returncode == 0, f"{case.name}: {done.stderr}"
        for mine, right in zip(timeless(tmp_path / case.name), timeless(tmp_path / "one"), strict=True):
            for name, value in right.items():
                assert mine[name] == pytest.approx(value, rel=5e-3, abs=5e-4), f"{case.name}: {name}"
    assert len(timeless(tmp_path / "one")) == STEPS
