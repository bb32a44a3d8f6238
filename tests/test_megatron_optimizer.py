"""Masters and moments of a critic in bfloat16, whose head is float32, are the same however its optimizer divides them,
in training and through a checkpoint. Two ranks over gloo, on a CPU."""

import os
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

from tests import megatron_cpu, tiny
from tests.test_loss_invariance import random_head
from tests.test_megatron_training import rollout, write_models
from trainers import dist
from trainers.batching import count, part_of
from trainers.config import ClusterConfig, ValueConfig, ValueLossConfig
from trainers.config_megatron import MegatronConfig
from trainers.losses import ValueLoss

pytestmark = pytest.mark.skipif(
    find_spec("megatron") is None, reason='needs megatron-core: pip install "fastppo[megatron]"'
)
RANKS, VOCAB = 2, 150
LOSS = ValueLoss(ValueLossConfig())


def settings(divided: bool) -> ValueConfig:
    cfg = tiny.config().value
    optimizer = replace(cfg.optimizer, lr=1e-2, weight_decay=0.1)
    how = {"mode": "local", "backend": "megatron", "megatron": MegatronConfig(distributed_optimizer=divided)}
    return replace(cfg, train_micro_batch_size=2, optimizer=optimizer, **how)


def on_disk(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, once."""
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            key = f"{file.name.split('.')[0]}.{name}"
            assert key not in found
            found[key] = tensor
    return found


def course(folder: Path, divided: bool) -> dict[str, Any]:
    from trainers.value.megatron import MegatronValue

    def make() -> MegatronValue:
        where = {"device": torch.device("cpu"), "dtype": torch.bfloat16}
        return MegatronValue(folder / "llama", settings(divided), ClusterConfig(), score_batch=3, **where)

    critic = make()
    started = {name: tensor.clone() for name, tensor in critic.model.state.whole_masters()}
    random_head(critic.model.last.value_head)
    whole = count(rollout(VOCAB))
    mine = part_of(whole, torch.tensor(dist.rows(whole.lengths)))
    norms = []
    for _ in range(3):
        norms.append(critic.train_step(mine, LOSS).optimizers["critic"]["grad_norm"])
    critic.save_shards(folder / f"{divided}")
    dist.gather(None)  # before another rank's part is read
    again = make()
    again.load_state_dict(critic.state_dict())
    again.load_shards(folder / f"{divided}")
    again.save_shards(folder / f"{divided}_again")
    values = [torch.cat(each.infer(rollout(VOCAB)).result()) for each in (critic, again)]
    return {"started": started, "norms": norms, "values": values}


def worker(rank: int, name: str) -> None:
    torch.set_num_threads(1)
    megatron_cpu.apply()
    folder = Path(name)
    store = torch_dist.FileStore(os.path.join(name, "store"), RANKS)
    torch_dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=60))
    torch.save({divided: course(folder, divided) for divided in (False, True)}, folder / f"{rank}.pt")
    torch_dist.destroy_process_group()


@pytest.mark.timeout(300)
def test_moments_and_masters_are_the_same_however_they_are_divided(tmp_path):
    write_models(tmp_path, ["llama"])
    megatron_cpu.spawn(worker, (str(tmp_path),), RANKS)
    plain, divided = (on_disk(tmp_path / str(each)) for each in (False, True))
    assert sum(name.startswith("master.") for name in plain) > 20
    assert {len(plain), len(divided)} == {3 * sum(name.startswith("master.") for name in plain)}
    for name, tensor in plain.items():
        assert tensor.dtype == torch.float32 and tensor.any()
        torch.testing.assert_close(divided[name], tensor, rtol=1e-5, atol=1e-7, msg=f"{name}: ".__add__)
    for way in (False, True):
        first, second = (on_disk(tmp_path / name) for name in (f"{way}", f"{way}_again"))
        assert first.keys() == second.keys()
        assert all(tensor.equal(second[name]) for name, tensor in first.items())
    files = load_file(tmp_path / "llama" / "model.safetensors")
    assert any((tensor != tensor.bfloat16()).any() for tensor in files.values())
    for rank in range(RANKS):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=False)
        assert found[True]["norms"] == pytest.approx(found[False]["norms"], rel=1e-6)
        for each in found.values():
            for name in files.keys() - {"lm_head.weight"}:
                assert each["started"][name].equal(files[name]), name  # not as bfloat16 has it
            assert each["values"][0].equal(each["values"][1])
