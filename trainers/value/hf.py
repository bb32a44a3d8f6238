"""A critic with a transformers model of its own: backbone, float32 scalar head, optimizer."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from trainers import dist, offload, sharding
from trainers.backbone import SplitTransformer, View, checkpoint_layers, limits_of, pick_param_dtype
from trainers.batching import micro_batches, minibatches, score_parts, split
from trainers.checkpoint import check_origin
from trainers.classifiers import load_backbone
from trainers.config import ValueConfig
from trainers.losses import SelectedRows, ValueLoss
from trainers.optim import Optimizer, StepMetrics, add_metrics, step_all
from trainers.rollout import RolloutBatch
from trainers.value import BaseValue, ScalarHead


class LocalValue(BaseValue):
    """Args: as of `HFPolicy`; score_batch: sequences of a pass that infers.

    From a reward model with one head (classifiers.py) the head is taken over as well, in the units of its raw scores.
    """

    def __init__(
        self,
        path: Path | str,
        cfg: ValueConfig,
        *,
        device: torch.device,
        dtype: torch.dtype,
        param_dtype: torch.dtype | None = None,
        score_batch: int,
    ):
        self.cfg, self.path, self.device, self.score_batch = cfg, path, device, score_batch
        if cfg.fully_shard:
            param_dtype = torch.float32  # shards are masters
        param_dtype = param_dtype or pick_param_dtype(cfg.param_dtype, dtype, device, "value")
        model, scores = load_backbone(path, "value.model_name")
        head = model.get_output_embeddings()
        if head is not None and head.weight is not model.get_input_embeddings().weight:
            head.requires_grad_(False)  # a critic has no use for the language-model head
        self.model = model
        self.backbone = SplitTransformer(
            model,
            cfg.num_layers_unfrozen,
            dtype,
            packing=cfg.packing,
            param_dtype=param_dtype,
            device=torch.device("cpu") if cfg.fully_shard else device,
            fused=cfg.fused_layers,
            output_used=False,
        )
        if cfg.gradient_checkpointing:
            checkpoint_layers(model, "value.gradient_checkpointing")
        if cfg.fully_shard:
            sharding.shard(self.backbone, device, fused=cfg.fused_layers, key="value.fully_shard")
        self.masters = self.backbone.masters
        self.head = ScalarHead(model.config.hidden_size)
        if scores is not None and scores.out_features == 1:
            self.head.linear.load_state_dict(scores.state_dict(), strict=False)  # most have no bias; it stays 0
        self.head.to(device)
        self.optimizer = Optimizer([p for _, p in self._trained()], cfg.optimizer, cfg.scheduler, self.masters)
        self.offloaded = False

    def _trained(self) -> list[tuple[str, torch.nn.Parameter]]:
        backbone = [(f"model.{name}", p) for name, p in self.model.named_parameters() if p.requires_grad]
        return backbone + [(f"head.{name}", p) for name, p in self.head.named_parameters()]

    @property
    def lr(self) -> float:
        """Of the next optimizer step."""
        return self.optimizer.schedule.get_last_lr()[0]

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def limits(self) -> tuple[int, int | None]:
        """Rows of the embedding, and positions if they are limited."""
        return limits_of(self.model)

    def offload(self) -> None:
        if self.cfg.offload and not self.offloaded:
            self.optimizer.offload()
            self._move(offload.to_host)
            self.offloaded = True

    def _bring_back(self) -> None:
        """The weights; masters come back for gradients, the optimizer's own state for its step."""
        if self.offloaded:
            self._move(lambda tensor: offload.to_device(tensor, self.device))
            self.offloaded = False

    def _move(self, move: Callable[[Tensor], Tensor]) -> None:
        for parameter in (*self.model.parameters(), *self.head.parameters()):
            parameter.data = move(parameter.data)

    @torch.no_grad()
    def infer(self, batch: RolloutBatch, max_tokens: int | None = None) -> "Done":
        """`max_tokens`: of a pass, where value.max_tokens_per_micro_batch does not say it."""
        self._bring_back()
        budget = self.cfg.max_tokens_per_micro_batch or max_tokens
        parts = split(batch, self.score_batch, budget, self.cfg.packing)
        backbone = self.backbone
        score = lambda part: backbone.run(lambda: self._score(part))  # noqa: E731
        return Done(**score_parts(batch, parts, score, lockstep=backbone.lockstep))

    def _score(self, batch: RolloutBatch) -> dict[str, Tensor]:
        view = self.backbone.view(batch, self.device)
        hidden = self._hidden(view)
        values, next_values = self.head(hidden[view.before]), self.head(hidden[view.last])
        return {"values": view.scatter(values), "next_values": next_values.cpu()}

    def minibatches(self, batch: RolloutBatch, *, seed: int, step: int, epoch: int) -> Iterator[RolloutBatch]:
        return minibatches(batch, self.cfg.train_global_batch_size, seed=seed, step=step, epoch=epoch)

    def train_step(self, minibatch: RolloutBatch, loss: ValueLoss) -> StepMetrics:
        sums = dist.sum_metrics(self.gradients(minibatch, loss))
        return StepMetrics(sums, step_all({"critic": self.optimizer}))

    def gradients(self, minibatch: RolloutBatch, loss: ValueLoss) -> dict[str, Tensor]:
        """Add the gradients of this rank's part of an optimizer step to each `grad`; the sums of its metrics."""
        self._bring_back()
        self.masters.bring_back()
        sums: dict[str, Tensor] = {}
        cfg, backbone = self.cfg, self.backbone
        size = cfg.train_micro_batch_size, cfg.max_tokens_per_micro_batch, cfg.packing
        for part in micro_batches(minibatch, *size, lockstep=backbone.lockstep):
            total, metrics = backbone.run(lambda part=part: self._loss(part, loss))
            total.backward()
            add_metrics(sums, metrics)
        return sums

    def _loss(self, part: RolloutBatch, loss: ValueLoss) -> tuple[Tensor, dict[str, Tensor]]:
        view = self.backbone.view(part, self.device)
        values = self.head(self._hidden(view)[view.before])
        step = loss(values, SelectedRows.of(part, view.selected, self.device))
        return step.loss, step.metrics

    def _hidden(self, view: View) -> Tensor:
        # The batch's trunk_hidden is the policy's trunk, not this one's.
        trunk = None if self.backbone.trunk is None else self.backbone.trunk_hidden(view.ids, **view.where)
        return self.backbone.hidden(view.ids, trunk, **view.where).flatten(0, 1)

    def save(self, folder: Path) -> None:
        """The values that the optimizer steps, float32."""
        stepped = self.masters.of if not self.backbone.lockstep else lambda parameter: parameter
        tensors = sharding.whole_on_main((name, stepped(p)) for name, p in self._trained())
        if not dist.is_main():
            return
        folder.mkdir()
        save_file(tensors, folder / "critic.safetensors")

    def load(self, folder: Path) -> None:
        mine = dict(self._trained())
        with safe_open(folder / "critic.safetensors", "pt") as tensors:
            shapes = {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118
            if shapes != {name: list(parameter.shape) for name, parameter in mine.items()}:
                raise ValueError(f"{folder} is not a checkpoint of the critic {self.path}: names or shapes differ")
            for name, parameter in mine.items():
                self.masters.load(parameter, tensors.get_tensor(name))

    def save_shards(self, folder: Path) -> None:
        if self.backbone.lockstep:
            sharding.save_shards(folder, self._trained(), self.optimizer)

    def load_shards(self, folder: Path) -> None:
        if self.backbone.lockstep:
            sharding.load_shards(folder, self._trained(), self.optimizer)

    def state_dict(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        check_origin(state, "value", backend="hf")
        self._bring_back()
        self.optimizer.load_state_dict(state["optimizer"])


class Done:
    def __init__(self, values: Tensor, next_values: Tensor):
        self.values, self.next_values = values, next_values

    def result(self) -> tuple[Tensor, Tensor]:
        return self.values, self.next_values
