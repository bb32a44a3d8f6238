"""A model that megatron-core spreads over ranks, with its passes and its optimizer: what policy and critic share.

megatron-core's schedules run the micro-batches through the pipeline, its DistributedDataParallel reduces gradients, its
optimizers hold float32 masters, divided over data-parallel ranks with the distributed optimizer. What is computed of
the final hidden states is the caller's, and happens where they are: on the last pipeline stage.

Losses arrive divided by the counts of a whole optimizer step, so nothing here averages: gradients are summed over
micro-batches and data-parallel ranks.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig

from trainers import megatron_groups as groups
from trainers.backbone import View
from trainers.batching import idle
from trainers.checkpoint import check_origin
from trainers.config import OptimizerConfig, SchedulerConfig
from trainers.config_megatron import MegatronConfig
from trainers.hf_folder import HFFolder, folder_of
from trainers.megatron_state import MegatronState
from trainers.megatron_weights import Chunks, load_hf, manifest, unwrap
from trainers.optim import add_metrics, lr_factor
from trainers.policy.megatron_model import build_model
from trainers.rollout import RolloutBatch
from trainers.value import ScalarHead

# Of the hidden states [S, B, D], or this rank's [S / tensor-parallel size, B, D]: (loss or None, what is to be kept).
Compute = Callable[[Tensor, RolloutBatch, "Rows"], tuple[Tensor | None, dict[str, Tensor]]]


class Rows(View):
    """One right-padded row per sequence, [B, S] = `shape`, which may have more of both; hidden states
    are [S, B, D]."""

    def __init__(self, batch: RolloutBatch, device: torch.device, shape: tuple[int, int]):
        super().__init__(batch, device, shape, batch.sequence_ids * shape[1] + batch.positions)

    def of(self, hidden: Tensor, places: Tensor) -> Tensor:
        """[S, B, D] at flat indices [N] into [B * S] -> [N, D]."""
        rows, length = self.shape
        return hidden.flatten(0, 1).index_select(0, places % length * rows + places // length)


def load_frozen(path: Path | str, cfg: MegatronConfig, device: torch.device, dtype: torch.dtype) -> Chunks:
    """A model as it is in its folder, not to be trained."""
    options = groups.model_options(cfg, device) | {"recompute_granularity": None}
    chunks = build_model(AutoConfig.from_pretrained(path), dtype=dtype, device=device, output="hidden", **options)
    load_hf(chunks, HFFolder(folder_of(path)))
    for chunk in chunks:
        chunk.requires_grad_(False).eval()
    return chunks


class MegatronModel:
    """Args: head: with a scalar head in place of the output layer."""

    def __init__(
        self,
        path: Path | str,
        cfg: MegatronConfig,
        optimizer: OptimizerConfig,
        scheduler: SchedulerConfig,
        *,
        device: torch.device,
        dtype: torch.dtype,
        head: ScalarHead | None = None,
    ):
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )

        self.cfg, self.device, self.dtype = cfg, device, dtype
        self.peak_lr, self.max_grad_norm, self.scheduler = optimizer.lr, optimizer.max_grad_norm, scheduler
        self.hf_config = AutoConfig.from_pretrained(path)
        options = groups.model_options(cfg, device) | {"finalize_model_grads_func": finalize_model_grads}
        models = build_model(
            self.hf_config, dtype=dtype, device=device, output="hidden" if head is None else "no_head", **options
        )
        files = HFFolder(folder_of(path))
        if head is not None:
            files = files.without("score.")  # a reward model's own head
        load_hf(models, files)
        if head is not None and models[-1].post_process:
            models[-1].value_head = head.to(device)
        distributed = device.type == "cuda" if cfg.distributed_optimizer is None else cfg.distributed_optimizer
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=cfg.overlap_grad_reduce,
            use_distributed_optimizer=distributed,
            overlap_param_gather=cfg.overlap_param_gather,
            average_in_collective=False,
        )
        self.chunks = [
            # With a virtual pipeline only the first chunk's gradients are worth sending before all are there.
            DistributedDataParallel(model.config, ddp, model, disable_bucketing=i > 0)
            for i, model in enumerate(models)
        ]
        if cfg.overlap_grad_reduce:
            waiting = [chunk.no_sync for chunk in self.chunks]
            models[0].config.no_sync_func = waiting if len(waiting) > 1 else waiting[0]
        self.state = MegatronState(self.chunks, optimizer, distributed=distributed, dtype=dtype)
        self.state.start_from(files)
        self.steps = 0  # that were made, not skipped

    @property
    def last(self) -> nn.Module | None:
        """The model that has the final hidden states, if this rank has it."""
        model = unwrap(self.chunks[-1])
        return model if model.post_process else None

    def wait_for(self, weight: Tensor) -> None:
        """Of the last stage, before a weight is read whose module is not called: with `overlap_param_gather` its new
        values may be on their way, for which DistributedDataParallel waits when a module is called."""
        chunk = self.chunks[-1]
        if chunk.use_forward_hook:
            chunk.param_to_bucket_group[weight].finish_param_sync()

    @property
    def lr(self) -> float:
        """Of the next step."""
        return self.peak_lr * lr_factor(self.steps, self.scheduler)

    def score(self, batches: Iterable[RolloutBatch], compute: Compute, chunks: Chunks = ()) -> list[dict[str, Tensor]]:
        """What `compute` keeps of each batch, on every rank, without gradients; `chunks`: of another model."""
        self.state.settle()
        with torch.no_grad():
            return groups.of_last_stage(self._passes(list(batches), compute, chunks or self.chunks, forward_only=True))

    def gradients(self, batches: Sequence[RolloutBatch], compute: Compute) -> dict[str, Tensor]:
        """Fill each parameter's `main_grad` with the sum over the micro-batches and the data-parallel ranks, and return
        the sums of what `compute` keeps, of this rank's micro-batches."""
        self.state.bring_back()
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        sums: dict[str, Tensor] = {}
        for kept in self._passes(list(batches), compute, self.chunks, forward_only=False):
            add_metrics(sums, kept)
        return groups.of_last_stage({name: value.cpu() for name, value in sums.items()})

    def _passes(
        self, batches: list[RolloutBatch], compute: Compute, chunks: Chunks, *, forward_only: bool
    ) -> list[dict[str, Tensor]]:
        """In the last stage's order, on the last stage."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        count = len(batches)
        if not count:
            return []
        interleaved = len(chunks) > 1
        if interleaved:  # the schedule takes turns of as many micro-batches as there are stages
            batches += [idle(batches[0])] * (-count % self.cfg.pipeline_model_parallel_size)
        shapes = [self._shape(batch) for batch in batches]
        largest = tuple(map(max, zip(*shapes, strict=True)))

        def forward(data: Any, model: nn.Module) -> tuple[Tensor, Any]:
            batch = next(data)
            rows = Rows(batch, self.device, largest if interleaved else self._shape(batch))
            hidden = model(input_ids=rows.ids, position_ids=None, attention_mask=None)
            return hidden, functools.partial(of_hidden, batch, rows)

        def of_hidden(batch: RolloutBatch, rows: Rows, hidden: Tensor, non_loss_data: bool = False) -> Any:
            loss, kept = compute(hidden, batch, rows)
            # No tokens: what is divided by already is not divided again.
            return kept if non_loss_data else (loss, torch.zeros([], dtype=torch.int, device=self.device), kept)

        found = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[iter(batches) for _ in chunks],
            model=list(chunks),
            num_microbatches=len(batches),
            # Without a virtual pipeline stages tell each other the shapes, and neither is read.
            seq_length=largest[1],
            micro_batch_size=largest[0],
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
        return found[:count] if forward_only else found

    def _shape(self, batch: RolloutBatch) -> tuple[int, int]:
        """Sequences, and a length that sequence parallelism divides."""
        multiple = self.cfg.tensor_model_parallel_size if self.cfg.sequence_parallel else 1
        return len(batch), -(-int(batch.lengths.max()) // multiple) * multiple

    def step(self) -> dict[str, float]:
        """One optimizer step with the gradients that are there, or none if any is not finite."""
        norm = self.state.gradient_norm()
        lr, finite = self.lr, math.isfinite(norm)
        if finite:
            limit = self.max_grad_norm if self.max_grad_norm > 0 else math.inf
            self.state.step(lr, scale=min(limit / (norm + 1e-6), 1.0))
            self.steps += 1
        self.state.zero_grad()
        return {"grad_norm": norm, "lr": lr, "skipped": 0.0 if finite else 1.0}

    def manifest(self) -> Any:
        return manifest(self.chunks)


class Resumable:
    """What policy and critic save and load alike, beside their weights."""

    key: str  # "policy" or "value"
    model: MegatronModel
    dtype: torch.dtype

    def save_shards(self, folder: Path) -> None:
        self.model.state.save(folder, self.model.steps)

    def load_shards(self, folder: Path) -> None:
        self.model.state.load(folder, self.model.steps)

    def state_dict(self) -> dict[str, Any]:
        return {"backend": "megatron", "dtype": str(self.dtype), "steps": self.model.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        check_origin(state, self.key, backend="megatron", dtype=self.dtype)
        self.model.steps = state["steps"]
