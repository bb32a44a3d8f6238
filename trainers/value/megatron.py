"""A critic with a model of its own on megatron-core: a backbone divided over ranks as `value.megatron` says, and a
float32 scalar head, whole on every tensor-parallel rank of the last pipeline stage. All of it is trained.
"""

import functools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig

from trainers import dist
from trainers import megatron_groups as groups
from trainers.batching import micro_batches, minibatches, score_together, split
from trainers.classifiers import is_classifier
from trainers.config import ClusterConfig, ValueConfig
from trainers.hf_folder import HFFolder, folder_of
from trainers.losses import SelectedRows, ValueLoss
from trainers.megatron_rules import check_layout
from trainers.megatron_training import MegatronModel, Resumable, Rows
from trainers.megatron_weights import VALUE_HEAD
from trainers.optim import StepMetrics
from trainers.policy.megatron_model import check, takes_transformer_engine
from trainers.rollout import RolloutBatch
from trainers.value import BaseValue, ScalarHead
from trainers.value.critic_file import FILE, CriticFile, joined_experts
from trainers.value.hf import Done


class MegatronValue(Resumable, BaseValue):
    """Args: as of `LocalValue`; dtype: of computation and of the backbone's parameters, beside float32 masters where it
    is not float32.

    A process has one layout of megatron-core: beside a policy there, tensor, pipeline and expert sizes must be its.

    Raises:
        ValueError: a model that megatron-core does not compute as transformers does; see megatron_model.check().
        ConfigError: sizes that the ranks cannot divide; see megatron_rules.check_layout().
    """

    key = "value"

    def __init__(
        self,
        path: Path | str,
        cfg: ValueConfig,
        cluster: ClusterConfig,
        *,
        device: torch.device,
        dtype: torch.dtype,
        score_batch: int,
    ):
        self.cfg, self.path, self.device, self.dtype, self.score_batch = cfg, path, device, dtype, score_batch
        hf = AutoConfig.from_pretrained(path)
        check(hf, "value")
        layout = cfg.megatron
        if hf.model_type != "qwen3_moe":  # the policy may have experts to divide
            layout = replace(layout, expert_model_parallel_size=1, expert_tensor_parallel_size=None)
        check_layout(hf, layout, "value.megatron")
        takes_transformer_engine(layout.transformer_engine, device, "value")
        groups.start(cfg.megatron, cluster)
        self.classifier = is_classifier(path)
        head = ScalarHead(hf.hidden_size)
        if self.classifier:
            take_over_scores(head, path)
        self.model = MegatronModel(path, layout, cfg.optimizer, cfg.scheduler, device=device, dtype=dtype, head=head)

    @property
    def lr(self) -> float:
        """Of the next optimizer step."""
        return self.model.lr

    def limits(self) -> tuple[int, int | None]:
        """Rows of the embedding, and positions if they are limited."""
        config = self.model.hf_config
        return config.vocab_size, getattr(config, "max_position_embeddings", None)

    def infer(self, batch: RolloutBatch, max_tokens: int | None = None) -> Done:
        """`max_tokens`: of a pass, where value.max_tokens_per_micro_batch does not say it."""
        budget = self.cfg.max_tokens_per_micro_batch or max_tokens
        parts = split(batch, self.score_batch, budget, by_length=True)
        return Done(**score_together(batch, parts, lambda mine: self.model.score(mine, self._score), lockstep=True))

    def _score(self, hidden: Tensor, batch: RolloutBatch, rows: Rows) -> tuple[None, dict[str, Tensor]]:
        hidden = self._whole(hidden)
        values, next_values = (self._head(rows.of(hidden, places)) for places in (rows.before, rows.last))
        return None, {"values": rows.scatter(values), "next_values": next_values.cpu()}

    def minibatches(self, batch: RolloutBatch, *, seed: int, step: int, epoch: int) -> Iterator[RolloutBatch]:
        return minibatches(batch, self.cfg.train_global_batch_size, seed=seed, step=step, epoch=epoch)

    def train_step(self, minibatch: RolloutBatch, loss: ValueLoss) -> StepMetrics:
        sums = dist.sum_metrics(self.gradients(minibatch, loss))
        return StepMetrics(sums, {"critic": self.model.step()})

    def gradients(self, minibatch: RolloutBatch, loss: ValueLoss) -> dict[str, Tensor]:
        """The gradients of the optimizer step, of all ranks' parts, in each parameter's `main_grad`; the sums of the
        metrics of this rank's part."""
        size = self.cfg.train_micro_batch_size, self.cfg.max_tokens_per_micro_batch
        batches = list(micro_batches(minibatch, *size, lockstep=True, by_length=True))
        return self.model.gradients(batches, functools.partial(self._loss, loss))

    def zero_grad(self) -> None:
        self.model.state.zero_grad()

    def _loss(
        self, loss: ValueLoss, hidden: Tensor, batch: RolloutBatch, rows: Rows
    ) -> tuple[Tensor, dict[str, Tensor]]:
        values = self._head(rows.of(self._whole(hidden), rows.before))
        step = loss(values, SelectedRows.of(batch, rows.selected, self.device))
        return step.loss, step.metrics

    def _head(self, hidden: Tensor) -> Tensor:
        values: Tensor = self.model.last.value_head(hidden)
        return values

    def _whole(self, hidden: Tensor) -> Tensor:
        """Every tensor-parallel rank has the head, and computes all values: each has the whole gradient of the hidden
        states, and of the head."""
        parallel = self.cfg.megatron.sequence_parallel
        return groups.whole_sequence(hidden, partial_gradient=False) if parallel else hidden

    def offload(self) -> None:
        groups.free_buffers()
        if self.cfg.offload:
            self.model.state.offload()
            self.model.state.offload_weights()

    def save(self, folder: Path) -> None:
        """The values that the optimizer steps, float32, in the file that LocalValue writes and reads."""
        prefix, tensors = self._backbone, {}
        for name, tensor in self.model.state.whole_masters():
            if dist.is_main():
                inner, head = name.removeprefix("model."), name.removeprefix(VALUE_HEAD)
                key = prefix + inner if head == name else f"head.{head}"
                tensors[key] = tensor.cpu().clone(memory_format=torch.contiguous_format)
        if dist.is_main():
            folder.mkdir()
            save_file(joined_experts(tensors), folder / FILE)

    @property
    def _backbone(self) -> str:
        """LocalValue's name of a backbone: of a classifier's its decoder, else a language model."""
        return "model." if self.classifier else "model.model."

    def load(self, folder: Path) -> None:
        """What either backend saved, in whatever layout."""
        file = CriticFile.read(folder / FILE, self._backbone)
        expected = {name: tuple(spec.shape) for name, spec in self.model.manifest().items()}
        size = self.model.hf_config.hidden_size
        expected |= {f"{VALUE_HEAD}linear.weight": (1, size), f"{VALUE_HEAD}linear.bias": (1,)}
        if file.shapes() != expected:
            raise ValueError(f"{folder} is not a checkpoint of the critic {self.path}: names or shapes differ")
        self.model.state.load_masters(file)


def take_over_scores(head: ScalarHead, path: Path | str) -> None:
    """A reward model's head, if it has one output, as it is: in the units of its raw scores.

    Raises:
        ValueError: the files have no linear layer `score`.
    """
    files = HFFolder(folder_of(path))
    scores = {name.removeprefix("score."): files[name] for name in files if name.startswith("score.")}
    if "weight" not in scores:
        raise ValueError(
            f"value.model_name={str(path)!r}: the files have no score.weight; expected a trained classifier"
        )
    if len(scores["weight"]) == 1:
        head.linear.load_state_dict(scores, strict=False)  # most have no bias; it stays 0
