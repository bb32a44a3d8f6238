"""However megatron-core spreads a critic, it values and trains as the critic on transformers does in one process.

Four ranks over gloo, on a CPU: values, raw gradients, metrics, gradient norms and weights after some steps, as
tests/test_megatron_training.py has them of the policy. Then what one backend or layout has saved, another reads; a
server's restart; and a run of PPO with policy and critic there.
"""

import os
import weakref
from dataclasses import replace
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaForSequenceClassification

from tests import megatron_cpu, tiny
from tests.megatron_models import config_of, file_names
from tests.test_dist import metrics
from tests.test_loss_invariance import random_head
from tests.test_megatron_training import CPU, WORLD, Layout, rollout, same, write_models
from trainers import dist
from trainers.batching import count, part_of
from trainers.config import ClusterConfig, ValueConfig, ValueLossConfig
from trainers.losses import ValueLoss
from trainers.ppo import PPOTrainer
from trainers.rollout import RolloutBatch
from trainers.service.critic import Critic
from trainers.service.messages import LoadRequest, SaveRequest, TrainHeader
from trainers.value.critic_file import FILE
from trainers.value.hf import LocalValue

pytestmark = pytest.mark.skipif(
    find_spec("megatron") is None, reason='needs megatron-core: pip install "fastppo[megatron]"'
)
LAYOUTS = {
    "tp2": Layout(2, tokens=30),
    "tp2_sp": Layout(2, more={"sequence_parallel": True, "recompute": "full"}),
    "pp2": Layout(1, 2, {"recompute": "selective"}),
    "pp2_interleaved": Layout(1, 2, {"virtual_pipeline_model_parallel_size": 2}),
    "tp2_sp_pp2": Layout(2, 2, {"sequence_parallel": True}, tokens=30),
    "ep2": Layout(more={"expert_model_parallel_size": 2, "overlap_grad_reduce": True}),
}
# What the four ranks do one after the other. "scores": a reward model, whose head is the critic's at the start.
CASES = [
    ("llama", "tp2"), ("scores", "tp2"), ("qwen3", "tp2_sp"), ("llama", "pp2"), ("llama", "pp2_interleaved"),
    ("qwen3_tied", "tp2_sp_pp2"),
    ("qwen3_moe", "ep2"), ("llama", "ep2"),
]  # fmt: skip
LOSS = ValueLoss(ValueLossConfig(scale=0.5, cliprange=0.2))
WRITER, READER = ("llama", "tp2"), ("llama", "pp2")  # of checkpoints, in this order
PPO = {
    "value__mode": "local", "value__optimizer__lr": 1e-3, "policy__num_layers_unfrozen": -1, "policy__dtype": "float32",
    "cluster__device": "cpu", "checkpointing__enabled": True, "checkpointing__save_period": 2,
}  # fmt: skip
MODELS = list(dict.fromkeys(model for model, _ in CASES))


def settings_of(layout: Layout | None = None) -> ValueConfig:
    cfg = tiny.config().value
    optimizer = replace(cfg.optimizer, lr=1e-3, weight_decay=0.1, max_grad_norm=0.05)
    scheduler = replace(cfg.scheduler, warmup_steps=4)
    cut = {} if layout is None else {
        "backend": "megatron", "megatron": layout.settings(), "max_tokens_per_micro_batch": layout.tokens
    }  # fmt: skip
    return replace(
        cfg, mode="local", train_micro_batch_size=2, optimizer=optimizer, scheduler=scheduler, offload=True, **cut
    )


def vocab_of(name: str) -> int:
    return config_of("llama" if name == "scores" else name).vocab_size


def values(critic: Any, name: str) -> dict[str, Tensor]:
    return dict(zip(("values", "next_values"), critic.infer(rollout(vocab_of(name))).result(), strict=True))


def minibatch(batch: RolloutBatch, rows: list[int], **changes: Tensor) -> RolloutBatch:
    whole = count(replace(batch, **changes).select(rows))
    return part_of(whole, torch.tensor(dist.rows(whole.lengths), dtype=torch.int64))


def course(critic: Any, name: str) -> dict[str, Any]:
    """Values, the first step's raw gradients, three optimizer steps, of which one is not finite, and values again."""
    every = list(range(8))
    found: dict[str, Any] = {"first": values(critic, name)}
    batch = rollout(vocab_of(name))
    found["sums"] = dist.sum_metrics(critic.gradients(minibatch(batch, every), LOSS))
    found["gradients"] = gradients(critic)
    steps = [
        minibatch(batch, every), minibatch(batch, every, returns=batch.returns * torch.nan),
        minibatch(batch, [6, 1, 0, 2]),
    ]  # fmt: skip
    metrics = [critic.train_step(each, LOSS) for each in steps]
    found["steps"] = [each.optimizers["critic"] for each in metrics]
    found["metrics"] = [metrics[0].sums, metrics[2].sums]
    found["last"] = values(critic, name)
    return found


def later(critic: Any, name: str) -> dict[str, Tensor]:
    """Values after one more step, for which weights and moments come back from where they waited; gradients do not."""
    critic.offload()
    critic.train_step(minibatch(rollout(vocab_of(name)), list(range(8))), LOSS)
    critic.offload()
    return values(critic, name)


def gradients(critic: Any) -> dict[str, Tensor]:
    """Under the names of a model's files."""
    if isinstance(critic, LocalValue):
        dist.sum_gradients(p for _, p in critic._trained())
        named = [(name, p.grad.clone()) for name, p in critic.model.named_parameters() if p.grad is not None]
        named += [(f"head.{name}", p.grad.clone()) for name, p in critic.head.named_parameters()]
        critic.zero_grad()
        taken = file_names(named)
        inner = "embed_tokens.weight" in taken
        return {f"model.{k}" if inner and not k.startswith("head.") else k: v for k, v in taken.items()}
    from trainers.megatron_weights import VALUE_HEAD, hf_tensors

    taken = {k: g.clone() for k, g in hf_tensors(critic.model.chunks, of=lambda p: p.main_grad)}
    head = critic.model.state.head(lambda p: p.main_grad)
    return taken | {f"head.{k.removeprefix(VALUE_HEAD)}": g.clone() for k, g in head.items()}


def local(folder: Path, name: str) -> LocalValue:
    critic = LocalValue(folder / name, settings_of(), device=CPU, dtype=torch.float32, score_batch=3)
    if name != "scores":
        random_head(critic.head)
    return critic


def spread(folder: Path, name: str, layout: str) -> Any:
    from trainers.value.megatron import MegatronValue

    cfg, cluster = settings_of(LAYOUTS[layout]), ClusterConfig(rank_timeout_s=60)
    critic = MegatronValue(folder / name, cfg, cluster, device=CPU, dtype=torch.float32, score_batch=3)
    if critic.model.last is not None and name != "scores":
        random_head(critic.model.last.value_head)
    return critic


def save(critic: Any, folder: Path) -> None:
    dist.main_does(folder.mkdir)
    critic.save(folder / "critic")
    if not isinstance(critic, LocalValue):
        critic.save_shards(folder / "shards")
    dist.gather(None)


def worker(rank: int, name: str) -> None:
    torch.set_num_threads(1)
    megatron_cpu.apply()
    from trainers import megatron_groups

    folder = Path(name)
    store = torch_dist.FileStore(os.path.join(folder, "store"), WORLD)
    torch_dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=60))
    results: dict[Any, Any] = {}
    running = None
    for model, layout in CASES:
        if running not in (None, layout):
            megatron_groups.stop()
        running = layout
        critic = spread(folder, model, layout)
        results[model, layout] = found = course(critic, model)
        save(critic, folder / f"{model}-{layout}")
        found["later"] = later(critic, model)
        assert all(buffer.grad_data.untyped_storage().size() == 0 for buffer in critic.model.state.buffers())
        if (model, layout) == READER:
            results["read"] = read(folder)
            served(folder)
            run_ppo(folder)
    torch_dist.destroy_process_group()
    torch.save(results, folder / f"{rank}.pt")


def read(folder: Path) -> dict[str, Any]:
    """What the critic on transformers saved, and then what another layout did, in this one."""
    critic, there = spread(folder, *READER), folder / "-".join(WRITER)
    critic.load(folder / f"{READER[0]}-hf" / "critic")
    found = {"transformers": values(critic, READER[0])}
    critic.load(there / "critic")
    critic.load_state_dict({"backend": "megatron", "dtype": "torch.float32", "steps": 2})
    critic.load_shards(there / "shards")
    save(critic, folder / "again")
    return found | {"later": later(critic, READER[0]), "lr": critic.lr}


def served(folder: Path) -> None:
    """The critic service's own saving and starting again, on all ranks."""

    def start() -> Critic:
        return Critic(lambda: spread(folder, *READER), folder / "server", {})

    first, batch = start(), rollout(vocab_of(READER[0]))
    first.load(LoadRequest(run="r", step=0))
    first.train(TrainHeader(run="r", id=1), "digest", batch)
    first.save(SaveRequest(run="r", step=1))
    again = start()
    assert (again.run, again.step, again.value.lr) == ("r", 1, first.value.lr)
    answers = [each.train(TrainHeader(run="r", id=2), "another", batch) for each in (first, again)]
    assert answers[0].optimizer == answers[1].optimizer and answers[0].optimizer["grad_norm"] > 0
    assert all(map(torch.equal, first.infer(batch), again.infer(batch)))

    # Another run's critic is built where this one was.
    old = weakref.ref(first.value.model.chunks[0])

    def build() -> Any:
        assert old() is None
        return spread(folder, *READER)

    first.build = build
    first.release("r")
    first.load(LoadRequest(run="another", step=0))
    assert (first.run, first.step, first.value.model.steps) == ("another", 0, 0)


def run_ppo(folder: Path, **spread: object) -> None:
    """Two steps, and from their checkpoint a third, by all ranks that there are."""
    if dist.size() > 1:
        os.environ["WORLD_SIZE"] = str(WORLD)
        layout = {"backend": "megatron", "megatron__pipeline_model_parallel_size": 2}
        spread = {f"{part}__{key}": value for part in ("policy", "value") for key, value in layout.items()}
    for steps in (2, 3):
        config = tiny.config(
            **PPO, **spread, policy__model_name=folder / "llama", ppo__max_num_steps=steps,
            logger__run_dir=folder / f"ppo{dist.size()}",
        )  # fmt: skip
        trainer = PPOTrainer(config)
        trainer.fit()
        trainer.close()


def right(folder: Path, name: str) -> dict[str, Any]:
    critic = local(folder, name)
    found = course(critic, name)
    save(critic, folder / f"{name}-hf")
    return found | {"later": later(critic, name), "lr": critic.lr}


def write_scores(folder: Path) -> None:
    torch.manual_seed(5)
    model = LlamaForSequenceClassification(config_of("llama", num_labels=1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], list[dict[Any, Any]]]:
    """The folder of the models and of what was saved; what is right, by model; what was found, by rank."""
    folder = tmp_path_factory.mktemp("megatron_value")
    write_models(folder, [name for name in MODELS if name != "scores"])
    write_scores(folder / "scores")
    wanted = {name: right(folder, name) for name in MODELS}
    run_ppo(folder)
    megatron_cpu.spawn(worker, (str(folder),), WORLD)
    return folder, wanted, [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(WORLD)]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_a_critic_on_megatron_core_is_the_same_critic(results, case):
    folder, wanted = results[0], results[1][case[0]]
    for got in (rank[case] for rank in results[2]):
        for what in ("first", "sums", "gradients", "last", "later"):
            same(got[what], wanted[what], what)
        for mine, theirs in zip(got["metrics"], wanted["metrics"], strict=True):
            same(mine, theirs, "metrics")
        for mine, theirs in zip(got["steps"], wanted["steps"], strict=True):
            assert mine == pytest.approx(theirs, rel=1e-5, nan_ok=True)
    same(
        load_file(folder / "-".join(case) / "critic" / FILE), load_file(folder / f"{case[0]}-hf" / "critic" / FILE), ""
    )
    assert [step["skipped"] for step in wanted["steps"]] == [0, 1, 0]
    assert wanted["steps"][0]["grad_norm"] > 0.05  # clipped
    assert float((wanted["last"]["values"] - wanted["first"]["values"]).abs().max()) > 1e-3


@pytest.mark.timeout(300)
def test_either_backend_and_any_layout_reads_what_was_saved(results):
    folder, wanted, ranks = results
    right = wanted[READER[0]]
    for got in (rank["read"] for rank in ranks):
        same(got["transformers"], right["last"], "from transformers")
        same(got["later"], right["later"], "from another layout")
        assert got["lr"] == right["lr"]
    again, there = (load_file(folder / name / "critic" / FILE) for name in ("again", "-".join(WRITER)))
    assert again.keys() == there.keys() and all(torch.equal(again[name], there[name]) for name in there)
    for name, layout in (WRITER, ("qwen3_moe", "ep2"), ("scores", "tp2")):
        critic = local(folder, name)
        critic.load(folder / f"{name}-{layout}" / "critic")
        same(values(critic, name), wanted[name]["last"], f"{name} on transformers")


@pytest.mark.timeout(300)
def test_ppo_with_policy_and_critic_on_megatron_core_is_the_run_of_one_process(results):
    one, four = (metrics(results[0] / f"ppo{ranks}") for ranks in (1, WORLD))
    assert [row["step"] for row in four] == [1, 2, 3] and four[2]["critic/vf_loss"] > 0
    for mine, theirs in zip(four, one, strict=True):
        for name in theirs:
            if not name.startswith(("tim", "perf/")):
                assert mine[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-5), name
