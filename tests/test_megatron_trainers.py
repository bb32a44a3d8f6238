"""Both trainers on megatron-core, whatever its layout, make the run of one process on transformers; and go on from
each other's checkpoints. Four ranks over gloo, on a CPU, and once the command as users start it.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist
from safetensors.torch import load_file
from torch.testing import assert_close as close
from transformers import AutoModelForCausalLM

from tests import megatron_cpu, tiny
from tests.test_dist import ENVIRONMENT
from tests.test_dist import metrics as metrics_of
from tests.test_megatron_training import write_models
from trainers import dist
from trainers.cli import load_config
from trainers.config import CONFIGS
from trainers.doctor import examine, temporary
from trainers.ppo import PPOTrainer
from trainers.reinforce import ReinforceTrainer
from trainers.value.hf import LocalValue

pytestmark = pytest.mark.skipif(
    find_spec("megatron") is None, reason='needs megatron-core: pip install "fastppo[megatron]"'
)
WORLD = 4
TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
# A policy gradient without a critic; three steps of two optimizer steps each, one checkpoint before the last.
PPO = {"ppo.adv_estimator.name": "reinforce_plus_plus", "value.optimizer.lr": "0.001"}
STEPS = 3


@dataclass(frozen=True)
class Case:
    """A run, by `ranks` ranks; `layout`: of policy.megatron, None: on transformers."""

    name: str
    algorithm: str
    ranks: int = 1
    layout: dict[str, Any] | None = field(default=None, hash=False)
    more: dict[str, Any] = field(default_factory=dict, hash=False)

    def settings(self, folder: Path, model: str = "llama") -> dict[str, Any]:
        name = self.algorithm
        own = {"env.name": "python:tests.megatron_models.LowIds", "env.size": 512} | (PPO if name == "ppo" else {})
        if self.layout is not None:
            own = own | {"policy.backend": "megatron"} | {f"policy.megatron.{k}": v for k, v in self.layout.items()}
        return own | {
            "policy.model_name": folder / model,
            "policy.dtype": "float32",
            "policy.num_layers_unfrozen": -1,
            "policy.train_global_batch_size": 6,
            "policy.train_micro_batch_size": 2,
            "policy.optimizer.max_grad_norm": 0.5,
            "logger.run_dir": folder / self.name,
            "logger.tensorboard": "false",
            "logger.report": "false",
            "cluster.num_threads": 1,
            "cluster.rank_timeout_s": 60,
            "cluster.device": "cpu",
            "checkpointing.save_period": STEPS - 1,
            f"{name}.num_prompts_per_step": 4,
            f"{name}.num_generations_per_prompt": 3,
            f"{name}.max_num_steps": STEPS,
            **self.more,
        }

    def texts(self, folder: Path) -> list[str]:
        return [f"{key}={str(v).lower() if isinstance(v, bool) else v}" for key, v in self.settings(folder).items()]

    def run(self, folder: Path) -> None:
        """In this process, and the others of its process group."""
        config = load_config(f"{self.algorithm}_copy", self.texts(folder), CONFIGS[self.algorithm])
        trainer = {"ppo": PPOTrainer, "reinforce": ReinforceTrainer}[self.algorithm](config)
        trainer.fit()
        trainer.close()


RIGHT = [Case("ppo", "ppo"), Case("reinforce", "reinforce")]
# The last ones go on from the checkpoints of the first, written by ranks of another layout.
CASES = [
    Case("ppo_tp2_dp2", "ppo", 4, TP2 | {"overlap_grad_reduce": True}),
    Case("reinforce_tp2_pp2", "reinforce", 4, TP2 | PP2 | {"sequence_parallel": True}),
    Case("reinforce_pp2", "reinforce", 2, PP2 | {"recompute": "full"}),
    Case("ppo_tp2", "ppo", 2, TP2),
    Case("ppo_tp1", "ppo", 1, {}),
]


def copied(source: str, target: str, folder: Path) -> None:
    """A run's folder as it was after its last checkpoint but one, as if it had been stopped there."""
    shutil.copytree(folder / source, folder / target)
    shutil.rmtree(folder / target / "checkpoints" / f"step_{STEPS}")
    kept = (folder / target / "metrics.jsonl").read_text().splitlines()[: STEPS - 1]
    (folder / target / "metrics.jsonl").write_text("".join(f"{line}\n" for line in kept))


RESUMED = [  # (from, to)
    ("ppo_tp2", Case("ppo_tp2_again", "ppo", 2, TP2)),
    ("reinforce_pp2", Case("reinforce_pp2_to_tp2", "reinforce", 2, TP2)),
    ("ppo_tp2", Case("ppo_tp2_to_tp1", "ppo", 1, {})),
    ("ppo_tp1", Case("ppo_tp1_to_tp2", "ppo", 2, TP2)),
]


def worker(rank: int, name: str) -> None:
    torch.set_num_threads(1)
    megatron_cpu.apply()
    folder = Path(name)
    written = recorded_writes()
    for case in CASES:
        together(rank, case, folder)
    for source, case in RESUMED:
        if rank == 0:
            copied(source, case.name, folder)
        together(rank, case, folder)
    if rank == 0:
        refuses_another_backend(folder)
    nothing_is_wrong(rank, folder)
    (folder / f"written.{rank}.json").write_text(json.dumps(written))


def together(rank: int, case: Case, folder: Path, run: Callable[[Case, Path], None] = Case.run) -> None:
    """By the first ranks of this spawn, or all."""
    from trainers import megatron_groups

    if rank >= case.ranks:
        return
    os.environ["WORLD_SIZE"] = str(case.ranks)
    if case.ranks > 1:
        store = torch_dist.FileStore(str(folder / f"store_{case.name}"), case.ranks)
        timeout = timedelta(seconds=60)
        torch_dist.init_process_group("gloo", store=store, rank=rank, world_size=case.ranks, timeout=timeout)
    run(case, folder)
    megatron_groups.stop()
    dist.stop()


def refuses_another_backend(folder: Path) -> None:
    from trainers import megatron_groups
    from trainers.run import TrainingError

    elsewhere = {"logger.run_dir": folder / "never", "checkpointing.resume": folder / "ppo" / "checkpoints" / "step_2"}
    os.environ["WORLD_SIZE"] = "1"
    with pytest.raises(TrainingError, match=r"these settings change what is trained: policy\.backend$"):
        Case("refused", "ppo", 1, {}, elsewhere).run(folder)
    megatron_groups.stop()
    dist.stop()


def nothing_is_wrong(rank: int, folder: Path) -> None:
    """--doctor of a tied model on tensor and pipeline parallel ranks."""
    case = Case("doctor", "reinforce", WORLD, TP2 | PP2, {"policy.model_name": folder / "qwen3_tied"})

    def run(case: Case, folder: Path) -> None:
        config = load_config("reinforce_copy", case.texts(folder), CONFIGS["reinforce"])
        findings = list(examine(ReinforceTrainer(temporary(config, str(folder / case.name)))))
        assert len(findings) == 9 and all(found.ok for found in findings), "\n".join(map(str, findings))

    together(rank, case, folder, run)


def recorded_writes() -> list[str]:
    """The files that this process opens to write, from now on, by whichever of the libraries in use."""
    import safetensors.torch
    import transformers

    from trainers import megatron_state

    written: list[str] = []

    def opened(event: str, arguments: tuple) -> None:
        if event == "open" and isinstance(arguments[0], str) and arguments[1] and set(arguments[1]) & set("wax"):
            written.append(arguments[0])

    def recording(real: Any) -> Any:
        def save(content: Any, path: Any, *rest: Any, **options: Any) -> Any:
            written.append(str(path))
            return real(content, path, *rest, **options)

        return save

    save_tokenizer = transformers.PreTrainedTokenizerBase.save_pretrained

    def saved_tokenizer(self: Any, *rest: Any, **options: Any) -> Any:
        written.extend(map(str, files := save_tokenizer(self, *rest, **options)))
        return files

    transformers.PreTrainedTokenizerBase.save_pretrained = saved_tokenizer
    sys.addaudithook(opened)
    for module, function in ((safetensors.torch, "save_file"), (megatron_state, "save_file"), (torch, "save")):
        setattr(module, function, recording(getattr(module, function)))
    return written


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("megatron")
    write_models(folder, ["llama", "qwen3_tied"])
    for case in RIGHT:
        case.run(folder)
    megatron_cpu.spawn(worker, (str(folder),), WORLD)
    return folder


def timeless(run: Path) -> list[dict[str, Any]]:
    rows = metrics_of(run)
    return [{name: value for name, value in row.items() if not name.startswith(("tim", "perf/"))} for row in rows]


def same_run(got: Path, wanted: Path) -> None:
    """Metrics, and what the exported model computes, to float32's rounding."""
    ours, theirs = timeless(got), timeless(wanted)
    assert [row["step"] for row in ours] == [row["step"] for row in theirs] == [*range(1, STEPS + 1)]
    for mine, right in zip(ours, theirs, strict=True):
        assert mine.keys() == right.keys()
        for name in right:
            assert mine[name] == pytest.approx(right[name], rel=1e-4, abs=1e-6), f"{got.name}: {name}"
    models = [
        AutoModelForCausalLM.from_pretrained(run / "checkpoints" / f"step_{STEPS}" / "policy") for run in (got, wanted)
    ]
    ids = torch.arange(24).view(2, 12) % 16
    logits, right = (model(input_ids=ids).logits for model in models)
    close(logits, right, rtol=1e-4, atol=1e-4)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_run_on_megatron_core_is_the_run_of_one_process(folder, case):
    same_run(folder / case.name, folder / case.algorithm)
    first = metrics_of(folder / case.name)[0]
    assert first["actor/grad_norm"] > 0.5  # clipped
    assert first["actor/optimizer_steps"] == 2 and first["actor/skipped_steps"] == 0


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("source", "case"), RESUMED, ids=lambda each: getattr(each, "name", each))
def test_a_checkpoint_of_one_layout_is_gone_on_from_in_another(folder, source, case):
    same_run(folder / case.name, folder / case.algorithm)
    if case.name.endswith("again"):  # in the same layout bit for bit
        assert timeless(folder / source) == timeless(folder / case.name)
        shards = Path("checkpoints", f"step_{STEPS}", "shards", "policy")
        files = sorted(path.name for path in (folder / source / shards).iterdir())
        assert len(files) == 6  # masters and two moments, of two ranks
        for file in files:
            ours, theirs = (load_file(folder / name / shards / file) for name in (case.name, source))
            assert ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours), file


def is_partial(written: str, name: str) -> bool:
    """Whether a file was renamed to `name` later."""
    return written.startswith(f"{name}.") and written.endswith((".partial", ".tmp"))


@pytest.mark.timeout(300)
def test_each_file_of_a_checkpoint_is_written_by_one_rank(folder):
    """Replicated ones by the first."""
    by_rank = [set(json.loads((folder / f"written.{rank}.json").read_text())) for rank in range(WORLD)]
    for case in CASES[:3]:
        step = folder / case.name / "checkpoints" / f"step_{STEPS}"
        for path in (path for path in step.rglob("*") if path.is_file()):
            temporary = path.relative_to(step.parent).as_posix().replace("step_", "tmp_step_", 1)
            name = str(step.parent / temporary)
            ranks = [i for i, written in enumerate(by_rank) if any(w == name or is_partial(w, name) for w in written)]
            shard = "shards" in path.parts
            assert ranks == ([int(path.name.split(".")[1])] if shard else [0]), (path, ranks)
        assert len(list((step / "shards" / "policy").iterdir())) == 3 * case.ranks


@pytest.mark.timeout(300)
def test_the_command_trains_under_torchrun(folder, tmp_path):
    case = Case(str(tmp_path / "run"), "ppo", 2, TP2)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["tests/megatron_cpu.py", "trainers.ppo", "config=ppo_copy", *case.texts(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, cwd=Path(__file__).parents[1])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"step {STEPS}/{STEPS}") == 1  # one rank speaks
    same_run(tmp_path / "run", folder / "ppo")


def test_a_folder_of_another_backend_is_refused_by_name():
    state = {"backend": "megatron", "dtype": "torch.float32"}
    with pytest.raises(ValueError, match="the checkpoint was trained with policy.backend=megatron: set that"):
        tiny.policy().load_state_dict(state)
    where = {"device": torch.device("cpu"), "dtype": torch.float32, "score_batch": 2}
    critic = LocalValue(tiny.tiny_model(), tiny.config().value, **where)
    with pytest.raises(ValueError, match="trained with value.backend=megatron: set that, or start from its critic/"):
        critic.load_state_dict(state)
