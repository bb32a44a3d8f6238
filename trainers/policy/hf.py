"""The policy on transformers: any causal language model, its reference, and the heads that hang on its trunk.

Log-probs, reference log-probs and values of a shared critic come from one pass of the frozen trunk, whose output the
batch keeps for the epochs that follow. What the reference is: reference.py; adapters in place of weights: lora.py.
"""

import functools
import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedModel

import fastppo
from trainers import dist, sharding
from trainers.backbone import (
    SplitTransformer,
    View,
    checkpoint_layers,
    load_model,
    model_facts,
    name_of,
    pick_param_dtype,
    quiet,
)
from trainers.batching import micro_batches, score_parts, split
from trainers.checkpoint import check_origin
from trainers.config import PolicyConfig
from trainers.engines import Manifest, TensorSpec, stop_ids
from trainers.engines.native import own_copy, share_parameters
from trainers.losses import JointLoss, PolicyLoss, SelectedRows, scored
from trainers.optim import Optimizer, StepMetrics, add_metrics, step_all
from trainers.policy.lora import Adapters
from trainers.policy.reference import make_reference
from trainers.rollout import RolloutBatch


class HFPolicy:
    """Args: dtype: of computation; param_dtype: of stored trained parameters, None: what cfg.param_dtype means here."""

    def __init__(
        self,
        path: Path | str,
        cfg: PolicyConfig,
        *,
        device: torch.device,
        dtype: torch.dtype,
        param_dtype: torch.dtype | None = None,
        reference: bool = True,
    ):
        self.cfg, self.path, self.device, self.dtype = cfg, path, device, dtype
        self.param_dtype = param_dtype or pick_param_dtype(cfg.param_dtype, dtype, device, "policy")
        if cfg.peft.enabled or cfg.fully_shard:
            self.param_dtype = torch.float32  # adapters are small; shards are masters
        model = load_model(path)
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.model, self.hf_config = model, model.config
        self.vocab_size = model.get_input_embeddings().num_embeddings
        self.adapters = Adapters(model, cfg.peft, cfg.num_layers_unfrozen) if cfg.peft.enabled else None
        self.backbone = SplitTransformer(
            model,
            cfg.num_layers_unfrozen,
            dtype,
            packing=cfg.packing,
            param_dtype=self.param_dtype,
            device=torch.device("cpu") if cfg.fully_shard else device,
            fused=cfg.fused_layers,
        )
        if cfg.gradient_checkpointing:
            checkpoint_layers(model, "policy.gradient_checkpointing")
        self.softcap = getattr(model.config, "final_logit_softcapping", None)
        self._check_head()
        if cfg.fully_shard:
            sharding.shard(self.backbone, device, fused=cfg.fused_layers, key="policy.fully_shard")
        self.masters = self.backbone.masters
        if cfg.generation.min_new_tokens and not (self.stop_ids or cfg.generation.stop_strings):
            raise ValueError(
                f"policy.generation.min_new_tokens={cfg.generation.min_new_tokens} has no effect: the model has no "
                "end-of-sequence token, and there are no stop_token_ids and stop_strings"
            )
        if reference:
            self.reference = make_reference(cfg.reference, self.backbone, self.adapters)
        trained = [p for p in model.parameters() if p.requires_grad]
        self.optimizers = {"actor": Optimizer(trained, cfg.optimizer, cfg.scheduler, self.masters)}
        self.heads: dict[str, nn.Module] = {}

    def add_head(self, name: str, head: nn.Module, optimizer: Optimizer) -> None:
        """A head on the final hidden states, stepped together with the policy (a shared critic)."""
        self.heads[name], self.optimizers[name] = head, optimizer

    @torch.no_grad()
    def score(self, batch: RolloutBatch, want: set[str]) -> dict[str, Tensor]:
        cfg, backbone, out = self.cfg, self.backbone, {}
        parts = split(batch, cfg.logprob_batch_size, cfg.max_tokens_per_micro_batch, cfg.packing)
        if mine := want - {"ref_logprobs"}:
            out = score_parts(
                batch, parts, lambda part: backbone.run(lambda: self._score(part, mine)), lockstep=backbone.lockstep
            )
        if "ref_logprobs" in want:  # all of them in one go: the reference's weights may have to be brought in
            seen = replace(batch, trunk_hidden=out.get("trunk_hidden", batch.trunk_hidden))
            with self.reference.active() as (top, head):
                out |= score_parts(
                    seen,
                    parts,
                    lambda part: backbone.run(lambda: self._score_reference(part, top, head)),
                    lockstep=backbone.lockstep,
                )
        return out

    def _score(self, batch: RolloutBatch, want: set[str]) -> dict[str, Tensor]:
        view, out = self.backbone.view(batch, self.device), {}
        trunk = self._trunk(view)
        if trunk is not None:
            out["trunk_hidden"] = view.unpad(trunk)
        hidden = self.backbone.hidden(view.ids, trunk, **view.where).flatten(0, 1)
        if "old_logprobs" in want:
            output = self._logprobs(hidden[view.before], self.head, batch, view)
            out["old_logprobs"], out["entropy"] = view.scatter(output.logprobs), view.scatter(output.entropy)
        if "values" in want:
            head = self.heads["critic"]
            out["values"], out["next_values"] = view.scatter(head(hidden[view.before])), head(hidden[view.last]).cpu()
        return out

    def _score_reference(self, batch: RolloutBatch, top: nn.Module, head: nn.Module) -> dict[str, Tensor]:
        view = self.backbone.view(batch, self.device)
        hidden = self.backbone.hidden(view.ids, self._trunk(view), top, **view.where).flatten(0, 1)
        return {"ref_logprobs": view.scatter(self._logprobs(hidden[view.before], head, batch, view).logprobs)}

    def train_step(self, minibatch: RolloutBatch, loss: PolicyLoss | JointLoss) -> StepMetrics:
        sums = dist.sum_metrics(self.gradients(minibatch, loss))
        return StepMetrics(sums, step_all(self.optimizers))

    def gradients(self, minibatch: RolloutBatch, loss: PolicyLoss | JointLoss) -> dict[str, Tensor]:
        """Add the gradients of this rank's part of an optimizer step to each `grad`; the sums of its metrics."""
        self.masters.bring_back()
        sums: dict[str, Tensor] = {}
        cfg, backbone = self.cfg, self.backbone
        size = cfg.train_micro_batch_size, cfg.max_tokens_per_micro_batch, cfg.packing
        for part in micro_batches(minibatch, *size, lockstep=backbone.lockstep):
            total, metrics = backbone.run(lambda part=part: self._loss(part, loss))
            total.backward()
            add_metrics(sums, metrics)
        return sums

    def _loss(self, part: RolloutBatch, loss: PolicyLoss | JointLoss) -> tuple[Tensor, dict[str, Tensor]]:
        view = self.backbone.view(part, self.device)
        hidden = self.backbone.hidden(view.ids, self._trunk(view), **view.where).flatten(0, 1)[view.before]
        rows = SelectedRows.of(part, view.selected, self.device)
        with self.backbone.autocast():
            weight, bias = self.head.weight, getattr(self.head, "bias", None)
            # A master takes the output layer's gradient as it is summed: no [V, D] of it in bfloat16.
            step = loss(hidden, weight, rows, bias, self.masters.grad(weight))
        return step.loss, step.metrics

    @property
    def head(self) -> nn.Module:
        return self.backbone.output_layer()

    def _trunk(self, view: View) -> Tensor | None:
        if self.backbone.trunk is None:
            return None
        kept = view.trunk_hidden
        return kept if kept is not None else self.backbone.trunk_hidden(view.ids, **view.where)

    def _logprobs(self, hidden: Tensor, head: nn.Module, batch: RolloutBatch, view: View) -> fastppo.LogprobOutput:
        generation = self.cfg.generation
        with self.backbone.autocast():
            return scored(
                hidden,
                head.weight,
                batch.tokens[view.selected].to(self.device),
                batch.turn_positions[view.selected] < generation.min_new_tokens,
                stop_ids=self.stop_ids,
                bias=getattr(head, "bias", None),
                temperature=generation.temperature,
                softcap=self.softcap,
            )

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The tokens that end a response: the first `min_new_tokens` of a turn are sampled and scored without them."""
        return stop_ids(self.cfg.generation, self.model, self.tokenizer)

    @torch.no_grad()
    def _check_head(self) -> None:
        """Some models scale their logits in ways of their own; log-probs here are those of hidden x weight + bias."""
        ids = torch.arange(8).remainder(self.model.config.vocab_size)[None].to(self.model.device)
        hidden = self.backbone.hidden(ids, None if self.backbone.trunk is None else self.backbone.trunk_hidden(ids))
        with self.backbone.autocast():
            right = self.model(input_ids=ids, use_cache=False).logits.float()
            ours = self.head(hidden).float()
        if self.softcap is not None:
            ours = self.softcap * torch.tanh(ours / self.softcap)
        error, scale = (ours - right).abs().max(), right.abs().max()
        if not error <= 0.02 * scale:
            raise ValueError(
                f"policy.model_name: {type(self.model).__name__} forms its logits otherwise than by its output layer "
                f"(they differ by {error:.2g} of {scale:.2g}), which this trainer does not score"
            )

    def manifest(self) -> Manifest:
        named = self.model.named_parameters() if self.adapters is None else self.adapters.base()
        dtype = self.dtype if self.backbone.lockstep else None
        return {name: TensorSpec(tuple(p.shape), dtype or p.dtype) for name, p in named}

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        if self.adapters is not None:
            yield from self.adapters.weights()
            return
        for name, parameter in self.model.named_parameters():
            yield name, sharding.whole(parameter, self.dtype) if self.backbone.lockstep else parameter.detach()

    def engine_model(self, dtype: torch.dtype) -> PreTrainedModel:
        """The model for an engine in this process, in `dtype`: it shares what is stored so, and copies the rest. Beside
        a sharded model it is whole, read from `path` again."""
        if self.backbone.lockstep:
            return own_copy(load_model(self.path, dtype), self.device, dtype)
        return share_parameters(self.model, dtype) if self.adapters is None else self.adapters.engine_model(dtype)

    def offload(self) -> None:
        if self.cfg.offload_optimizer:
            for optimizer in self.optimizers.values():
                optimizer.offload()

    def save(self, folder: Path) -> None:
        """An HF folder of the trained model, or the adapters.

        Parameters as they are stored, which is what generated: with param_dtype=bfloat16 not the masters, which are in
        state_dict(). Where dtypes are mixed, readers are told float32, so that no trained bit is lost.
        """
        weights = sharding.whole_on_main(self.model.named_parameters()) if self.backbone.lockstep else {}
        if not dist.is_main():
            return
        self.tokenizer.save_pretrained(folder)
        if self.adapters is not None and self.cfg.peft.export == "adapter":
            self.adapters.save_adapter(folder)
            return
        with quiet():
            if weights:
                self.model.save_pretrained(folder, state_dict=weights)
            else:
                (self.adapters or self.model).save_pretrained(folder)
        # transformers writes the first parameter's dtype, maybe a frozen one's; readers would round trained ones to it.
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"dtype": name_of(self.param_dtype)}, indent=2) + "\n")

    def save_shards(self, folder: Path) -> None:
        if self.backbone.lockstep:
            sharding.save_shards(folder, self._trained(), self.optimizers["actor"])

    def load_shards(self, folder: Path) -> None:
        if self.backbone.lockstep:
            sharding.load_shards(folder, self._trained(), self.optimizers["actor"])

    def facts(self) -> dict[str, object]:
        return model_facts(self.path, self.model)

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]

    def trained(self) -> dict[str, Tensor]:
        """The float32 values that the optimizer steps; of a sharded model those of this rank."""
        return {name: self.masters.of(p).detach() for name, p in self._trained()}

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, sharding.local(p)) for name, p in self._trained())

    @functools.cached_property
    def frozen_sha256(self) -> str:
        """Of every parameter that never changes: another trunk under trained layers is another model."""
        digest = hashlib.sha256()
        for name, parameter in self.model.named_parameters():
            if not parameter.requires_grad:
                digest.update(name.encode())
                digest.update(sharding.whole(parameter).cpu().flatten().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def state_dict(self) -> dict[str, Any]:
        return {
            "dtype": str(self.dtype),
            "param_dtype": str(self.param_dtype),
            "trained": {} if self.backbone.lockstep else self.trained(),
            "frozen_sha256": self.frozen_sha256,
            "optimizers": {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()},
            "heads": {name: head.state_dict() for name, head in self.heads.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        check_origin(state, "policy", backend="hf", dtype=self.dtype)
        if (stored := state.get("param_dtype", "torch.float32")) != str(self.param_dtype):
            name = stored.removeprefix("torch.")
            raise ValueError(
                f"the checkpoint's trained parameters were stored in {name}, this run's are in {self.param_dtype}: set "
                f"policy.param_dtype={name}"
            )
        mine = {} if self.backbone.lockstep else self.trained()
        for name in sorted(set(mine) ^ set(state["trained"])):
            raise ValueError(f"the checkpoint is not one of {self.path}: they differ in {name!r}")
        for name, parameter in mine.items():
            saved = state["trained"][name]
            if saved.shape != parameter.shape:
                raise ValueError(
                    f"the checkpoint is not one of {self.path}: {name} must be {tuple(parameter.shape)}, "
                    f"got {tuple(saved.shape)}"
                )
        if state["frozen_sha256"] != self.frozen_sha256:
            raise ValueError(f"the checkpoint was trained over another frozen trunk than that of {self.path}")
        for name, parameter in self.model.named_parameters():
            if name in mine:
                self.masters.load(parameter, state["trained"][name])
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(state["optimizers"][name])
        for name, head in self.heads.items():
            head.load_state_dict(state["heads"][name])
