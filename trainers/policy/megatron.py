"""The policy on megatron-core: Llama, Qwen2, Qwen3 and Qwen3-MoE, divided over ranks as `policy.megatron` says.

The log-probs and the loss are computed from the final hidden states and the rows of the output layer that a rank has,
with one exchange of four numbers a token (fastppo.VocabShard). Generation has weights of its own, which refits copy.
"""

import copy
import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import fastppo
from trainers import dist
from trainers import megatron_groups as groups
from trainers.backbone import load_model, name_of
from trainers.batching import micro_batches, score_together, split
from trainers.config import ClusterConfig, PolicyConfig
from trainers.config import GenerationConfig as ConfigOfGeneration
from trainers.config_megatron import MegatronConfig
from trainers.engines import Manifest, stop_ids
from trainers.engines.native import own_copy
from trainers.files import Writing
from trainers.hf_folder import write_weights
from trainers.losses import PolicyLoss, SelectedRows, scored
from trainers.megatron_rules import check_layout
from trainers.megatron_training import MegatronModel, Resumable, Rows, load_frozen
from trainers.megatron_weights import Chunks, hf_tensors, named_parameters, unwrap
from trainers.optim import StepMetrics
from trainers.policy.megatron_model import check, head_weight
from trainers.policy.reference import SwappedIn
from trainers.rollout import RolloutBatch


class MegatronPolicy(Resumable):
    """Args: dtype: of computation and of the parameters, beside float32 masters where it is not float32.

    Raises:
        ValueError: a model that megatron-core does not compute as transformers does; see megatron_model.check().
        ConfigError: sizes that the ranks cannot divide; see megatron_rules.check_layout().
    """

    key = "policy"
    softcap = None  # none of the models has one

    def __init__(
        self,
        path: Path | str,
        cfg: PolicyConfig,
        cluster: ClusterConfig,
        *,
        device: torch.device,
        dtype: torch.dtype,
        reference: bool = True,
    ):
        self.cfg, self.path, self.device, self.dtype = cfg, path, device, dtype
        config = AutoConfig.from_pretrained(path)
        check(config)
        check_layout(config, cfg.megatron, "policy.megatron")
        groups.start(cfg.megatron, cluster)
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.model = MegatronModel(path, cfg.megatron, cfg.optimizer, cfg.scheduler, device=device, dtype=dtype)
        self.hf_config = self.model.hf_config
        self.vocab_size = self.hf_config.vocab_size
        self.generation_config = generation_config(path)
        self.stop_ids = stops(cfg.generation, path, self.vocab_size, self.tokenizer)
        if cfg.generation.min_new_tokens and not (self.stop_ids or cfg.generation.stop_strings):
            raise ValueError(
                f"policy.generation.min_new_tokens={cfg.generation.min_new_tokens} has no effect: the model has no "
                "end-of-sequence token, and there are no stop_token_ids and stop_strings"
            )
        if reference:
            swapped = cfg.reference == "cpu_offload"
            self.reference = Swapped(self.model) if swapped else Frozen(path, cfg.megatron, device, dtype)

    @torch.no_grad()
    def score(self, batch: RolloutBatch, want: set[str]) -> dict[str, Tensor]:
        out: dict[str, Tensor] = {}
        parts = split(batch, self.cfg.logprob_batch_size, self.cfg.max_tokens_per_micro_batch, by_length=True)
        if "old_logprobs" in want:
            out |= score_together(batch, parts, self._score, lockstep=True)
        if "ref_logprobs" in want:
            with self.reference.active() as chunks:
                out |= score_together(batch, parts, lambda mine: self._score_reference(mine, chunks), lockstep=True)
        return out

    def _score(self, batches: Iterable[RolloutBatch]) -> list[dict[str, Tensor]]:
        return self.model.score(batches, functools.partial(self._logprobs, self.model.last))

    def _score_reference(self, batches: Iterable[RolloutBatch], chunks: Chunks) -> list[dict[str, Tensor]]:
        last = unwrap(chunks[-1])
        found = self.model.score(batches, functools.partial(self._logprobs, last), chunks)
        return [{"ref_logprobs": each["old_logprobs"]} for each in found]

    def _logprobs(
        self, model: nn.Module, hidden: Tensor, batch: RolloutBatch, rows: Rows
    ) -> tuple[None, dict[str, Tensor]]:
        generation, weight = self.cfg.generation, head_weight(model)
        if model is self.model.last:  # the reference is never on its way
            self.model.wait_for(weight)
        output = scored(
            self._selected(hidden, rows),
            weight,
            batch.tokens[rows.selected].to(self.device),
            batch.turn_positions[rows.selected] < generation.min_new_tokens,
            stop_ids=self.stop_ids,
            temperature=generation.temperature,
            **self._sharding(model),
        )
        return None, {"old_logprobs": rows.scatter(output.logprobs), "entropy": rows.scatter(output.entropy)}

    def train_step(self, minibatch: RolloutBatch, loss: PolicyLoss) -> StepMetrics:
        sums = dist.sum_metrics(self.gradients(minibatch, loss))
        return StepMetrics(sums, {"actor": self.model.step()})

    def gradients(self, minibatch: RolloutBatch, loss: PolicyLoss) -> dict[str, Tensor]:
        """The gradients of the optimizer step, of all ranks' parts, in each parameter's `main_grad`; the sums of the
        metrics of this rank's part."""
        cfg = self.cfg
        size = cfg.train_micro_batch_size, cfg.max_tokens_per_micro_batch
        batches = micro_batches(minibatch, *size, lockstep=True, by_length=True)
        return self.model.gradients(list(batches), functools.partial(self._loss, loss))

    def _loss(
        self, loss: PolicyLoss, hidden: Tensor, batch: RolloutBatch, rows: Rows
    ) -> tuple[Tensor, dict[str, Tensor]]:
        model = self.model.last
        weight = head_weight(model)
        self.model.wait_for(weight)
        # Straight into the sum, unless DistributedDataParallel waits for autograd to tell that this gradient is there.
        into = None if self.cfg.megatron.overlap_grad_reduce else weight.main_grad
        selected = SelectedRows.of(batch, rows.selected, self.device)
        step = loss(self._selected(hidden, rows), weight, selected, None, into, **self._sharding(model))
        return step.loss, step.metrics

    def _selected(self, hidden: Tensor, rows: Rows) -> Tensor:
        """[N, D], what predicts the trained tokens. Under sequence parallelism a rank's tokens are some of each
        sequence, of which unequally many are trained: so they are joined first, and their gradient is divided there."""
        if self.cfg.megatron.sequence_parallel:
            hidden = groups.whole_sequence(hidden, partial_gradient=True)
        return rows.of(hidden, rows.before)

    def _sharding(self, model: nn.Module) -> dict[str, Any]:
        group, width = model.tp_group, head_weight(model).shape[0]
        start = group.rank() * width
        shard = fastppo.VocabShard(start, start + width, group, self.vocab_size)
        return {"vocab": shard, "reduce_dhidden": "none" if self.cfg.megatron.sequence_parallel else "all_reduce"}

    def manifest(self) -> Manifest:
        return self.model.manifest()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        self.model.state.settle()
        yield from hf_tensors(self.model.chunks)

    def engine_model(self, dtype: torch.dtype) -> PreTrainedModel:
        """A whole model for this rank, with storage of its own."""
        return own_copy(load_model(self.path, dtype), self.device, dtype)

    def trained(self) -> dict[str, Tensor]:
        return self.model.state.local_masters()

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        self.model.state.settle()
        for model in map(unwrap, self.model.chunks):
            for name, parameter in named_parameters(model):
                # The last stage's copy of a tied embedding is the first stage's.
                copied = name == "output_layer.weight" and self.hf_config.tie_word_embeddings
                yield "embedding.word_embeddings.weight" if copied else name, parameter.detach()

    def facts(self) -> dict[str, object]:
        total = sum(torch.Size(spec.shape).numel() for spec in self.manifest().values())
        return {
            "model": str(self.path),
            "architecture": f"{self.hf_config.model_type} on megatron-core",
            "parameters": total,
            "trained_parameters": total,
        }

    def offload(self) -> None:
        groups.free_buffers()
        if self.cfg.offload_optimizer:
            self.model.state.offload()

    def save(self, folder: Path) -> None:
        """An HF folder, of the parameters as they are stored; the masters are in save_shards()."""
        writing = Writing()
        if dist.is_main():
            writing(lambda: self._describe(folder))
        write_weights(folder, self.manifest(), self.weights(), here=dist.is_main())
        writing.done()

    def _describe(self, folder: Path) -> None:
        self.tokenizer.save_pretrained(folder)
        config = copy.deepcopy(self.hf_config)
        config.dtype = name_of(self.dtype)
        config.architectures = config.architectures or [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
        config.save_pretrained(folder)
        if self.generation_config is not None:
            self.generation_config.save_pretrained(folder)


class Frozen:
    """The reference as a second model, spread as the first."""

    def __init__(self, path: Path | str, cfg: MegatronConfig, device: torch.device, dtype: torch.dtype):
        self.chunks = load_frozen(path, cfg, device, dtype)

    @contextmanager
    def active(self) -> Iterator[Chunks]:
        yield self.chunks


class Swapped:
    """The reference in the CPU's memory, written over the policy's parameters for a scoring pass."""

    def __init__(self, model: MegatronModel):
        self.model = model
        whole = nn.ModuleList(unwrap(chunk) for chunk in model.chunks)
        self.swap = SwappedIn(SimpleNamespace(model=whole, top=None, output_layer=lambda: None, lockstep=False))

    @contextmanager
    def active(self) -> Iterator[Chunks]:
        self.model.state.settle()  # nothing may arrive in between
        with self.swap.active():
            yield self.model.chunks


def stops(cfg: ConfigOfGeneration, path: Path | str, vocab_size: int, tokenizer: Any) -> tuple[int, ...]:
    """engines.stop_ids() of a model that is not loaded."""
    embeddings = SimpleNamespace(num_embeddings=vocab_size)
    known = SimpleNamespace(generation_config=generation_config(path), get_input_embeddings=lambda: embeddings)
    return stop_ids(cfg, known, tokenizer)


def generation_config(path: Path | str) -> GenerationConfig | None:
    """As transformers has it for a model of this folder; None if neither the folder nor its config.json says."""
    try:
        return GenerationConfig.from_pretrained(path)
    except OSError:
        return GenerationConfig.from_model_config(AutoConfig.from_pretrained(path))
