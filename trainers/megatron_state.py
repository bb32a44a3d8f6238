"""megatron-core's optimizer of a model: its step, and its state as tensors under Hugging Face's names.

The state is written as what it is of the whole model, three tensors for each of Hugging Face's: the float32 master and
AdamW's two moments. So a checkpoint of one layout, of any number of ranks, is read by any other. Each rank writes a
share of the tensors, and each is written once:

    master.00000.safetensors  exp_avg.00000.safetensors  exp_avg_sq.00000.safetensors  ...of rank 0, and so on
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as torch_dist
from safetensors.torch import save_file
from torch import Tensor, nn

from trainers import dist, offload
from trainers.config import OptimizerConfig
from trainers.files import Writing
from trainers.hf_folder import TensorFiles
from trainers.megatron_groups import of_last_stage
from trainers.megatron_weights import VALUE_HEAD, Chunks, hf_tensors, load_hf, named_parameters, unwrap

KINDS = ("master", "exp_avg", "exp_avg_sq")


class MegatronState:
    """Args: chunks: wrapped in megatron-core's DistributedDataParallel."""

    def __init__(self, chunks: Chunks, cfg: OptimizerConfig, *, distributed: bool, dtype: torch.dtype):
        from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
        from megatron.core.optimizer import get_megatron_optimizer

        self.chunks, self.distributed = chunks, distributed
        self.overlaps = chunks[0].ddp_config.overlap_param_gather
        settings = MegatronOptimizerConfig(
            optimizer="adam",
            lr=cfg.lr,
            adam_beta1=cfg.betas[0],
            adam_beta2=cfg.betas[1],
            adam_eps=cfg.eps,
            weight_decay=cfg.weight_decay,
            clip_grad=0.0,  # step() is given the scale
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=distributed,
            overlap_param_gather=self.overlaps,
        )
        # No overrides: weight decay is for all parameters, as in trainers/optim.py.
        self.optimizer = get_megatron_optimizer(settings, chunks, config_overrides={}, use_gloo_process_groups=False)
        self.parts = self.optimizer.chained_optimizers
        self.shards = {p: shard for part in self.parts for p, shard in shards_of(part)} if distributed else {}
        self.halves = dtype != torch.float32  # whose masters are tensors of their own
        self.stale = self.offloaded = self.weights_away = False
        self.emptied = offload.Emptied(())

    def gradient_norm(self) -> float:
        """Of the whole model, each gradient counted once; the same on all ranks."""
        self.bring_back()
        self.optimizer.prepare_grads()
        return float(self.optimizer.get_grad_norm())

    @torch.no_grad()
    def step(self, lr: float, scale: float) -> None:
        """After gradient_norm(). scale: of the gradients."""
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = lr
                gradients = [p.grad for p in group["params"] if p.grad is not None]
                if scale < 1 and gradients:
                    torch._foreach_mul_(gradients, scale)
        self.optimizer.step_with_ready_grads()
        self.stale = self.overlaps

    def zero_grad(self) -> None:
        """After each step, made or not: what a float32 parameter's `grad` is then, autograd would add to."""
        self.optimizer.zero_grad(set_to_none=True)

    def settle(self) -> None:
        """Parameters are here, and whole, also where the next training pass would have fetched them."""
        self.bring_weights_back()
        if self.stale:
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)
            self.stale = False

    def offload(self) -> None:
        """Moments, and masters that are tensors of their own, to the CPU's memory until bring_back()."""
        if not self.offloaded:
            self._move(lambda tensor: offload.to_host(tensor))
            self.offloaded = True

    def bring_back(self) -> None:
        """All of it, for an optimizer step."""
        self.bring_weights_back()
        for buffer in self.buffers():
            buffer.reload_from_cpu(move_params=False)
        if self.offloaded:
            device = next(self.chunks[0].parameters()).device
            self._move(lambda tensor: offload.to_device(tensor, device))
            self.offloaded = False

    def _move(self, move: Callable[[Tensor], Tensor]) -> None:
        own = {id(p) for chunk in self.chunks for p in chunk.parameters()}
        for part in self.parts:
            for group in part.param_groups:
                for parameter in group["params"]:
                    if self.halves and id(parameter) not in own:
                        parameter.data = move(parameter.data)
                    state = part.optimizer.state[parameter]
                    moments = {name: value for name, value in state.items() if name in KINDS}
                    state.update({name: move(value) for name, value in moments.items()})

    def offload_weights(self) -> None:
        """Parameters to the CPU's memory, until settle(); what holds gradients is let go of, until bring_back()."""
        if self.weights_away:
            return
        self.settle()
        for buffer in self.buffers():
            buffer.offload_to_cpu(move_params=self.distributed)
        if not self.distributed:  # else they lie in the buffers
            self.emptied = offload.Emptied(p.data for chunk in self.chunks for p in chunk.parameters())
        self.weights_away = True

    def bring_weights_back(self) -> None:
        if not self.weights_away:
            return
        if self.distributed:
            for buffer in self.buffers():
                buffer.reload_from_cpu(move_grads=False)
        else:
            self.emptied.restore()
        self.weights_away = False

    def buffers(self) -> list[Any]:
        """In which DistributedDataParallel has gradients, and with the distributed optimizer parameters."""
        return [buffer for chunk in self.chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]

    def whole_masters(self) -> Iterator[tuple[str, Tensor]]:
        """(name, whole tensor), float32: what the optimizer steps, a critic's head under VALUE_HEAD. Collective."""
        self._within_reach()
        yield from self._tensors("master")

    @torch.no_grad()
    def start_from(self, files: TensorFiles) -> None:
        """Masters take a model's values as its files have them: parameters in bfloat16 have rounded them already. What
        the model has and the files have not, a critic's head, stays."""
        if self.halves and files.has_float32():
            self._put_backbone(files, "master")

    @torch.no_grad()
    def load_masters(self, files: Any) -> None:
        """Whole tensors, by such names, become this rank's masters and parameters."""
        self.bring_back()
        self.put(files, "master")
        self.publish()

    def _within_reach(self) -> None:
        """For tensors to be joined. Divided ones are copied for that one by one, wherever they are."""
        if self.distributed:
            self.bring_weights_back()
        else:
            self.bring_back()

    def save(self, folder: Path, steps: int) -> None:
        """Collective. steps: that the optimizer has made."""
        self._within_reach()
        self._fill(steps)
        dist.main_does(lambda: folder.mkdir(parents=True, exist_ok=True))
        writing = Writing()
        for kind in KINDS:
            share = {
                name: tensor.cpu().clone(memory_format=torch.contiguous_format)
                for i, (name, tensor) in enumerate(self._tensors(kind))
                if i % dist.size() == dist.rank()
            }
            file = folder / f"{kind}.{dist.rank():05d}.safetensors"
            writing(lambda file=file, share=share: save_file(share, file))
        writing.done()

    def local_masters(self) -> dict[str, Tensor]:
        """This rank's; with the distributed optimizer what it has of each parameter, flat."""
        self.bring_back()
        found: dict[str, Tensor] = {}
        for model in map(unwrap, self.chunks):
            for name, parameter in named_parameters(model):
                if not self.distributed:
                    found[name] = self._local(parameter, "master")
                elif (mine := self._shard(parameter, "master")) is not None:
                    found[name] = mine[0].detach()
        return found

    def _tensors(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        yield from hf_tensors(self.chunks, of=lambda parameter: self._local(parameter, kind))
        yield from self.head(lambda parameter: self._local(parameter, kind)).items()

    def head(self, of: Callable[[nn.Parameter], Tensor]) -> dict[str, Tensor]:
        """What the last stage has of a critic's head, on the CPU of every rank; nothing of a policy."""
        return of_last_stage({name: of(p).detach().cpu() for name, p in self._head()})

    def _head(self) -> list[tuple[str, nn.Parameter]]:
        return [pair for pair in unwrap(self.chunks[-1]).named_parameters() if pair[0].startswith(VALUE_HEAD)]

    @torch.no_grad()
    def load(self, folder: Path, steps: int) -> None:
        """What save() wrote, in whatever layout. Collective where parameters are divided."""
        self.bring_back()
        self._fill(steps)
        for kind in KINDS:
            self.put(TensorFiles.listed(folder, f"{kind}.*.safetensors"), kind)
        self.publish()

    @torch.no_grad()
    def put(self, files: Any, kind: str) -> None:
        """Full tensors, by name, become this rank's part of the masters or of a moment."""
        self._put_backbone(files.without(VALUE_HEAD), kind)
        for name, parameter in self._head():
            self._put_whole(parameter, files[name], kind)

    def _put_backbone(self, files: Any, kind: str) -> None:
        found: dict[nn.Parameter, Tensor] = {}

        def local(parameter: nn.Parameter) -> Tensor:
            if parameter not in found:
                found[parameter] = self._local(parameter, kind) if not self.distributed else empty(parameter)
            return found[parameter]

        def empty(parameter: nn.Parameter) -> Tensor:
            return torch.zeros(parameter.shape, dtype=torch.float32)

        load_hf(self.chunks, files, into=local)
        if self.distributed:
            for parameter, whole in found.items():
                self._put_whole(parameter, whole, kind)

    def _put_whole(self, parameter: nn.Parameter, whole: Tensor, kind: str) -> None:
        """Of a tensor that this rank has the parameter of: its part, where the optimizer has it."""
        if not self.distributed:
            self._local(parameter, kind).copy_(whole)
        elif (mine := self._shard(parameter, kind)) is not None:
            shard, (start, end) = mine
            shard.copy_(whole.view(-1)[start:end])

    def publish(self) -> None:
        """Parameters take their masters' values."""
        for part in self.parts:
            if hasattr(part, "_copy_main_params_to_model_params"):
                part._copy_main_params_to_model_params()
        if self.distributed:
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)
        self.stale = False

    def _fill(self, steps: int) -> None:
        """AdamW makes its moments at its first step; there are some before that to be written and read."""
        for part in self.parts:
            for group in part.param_groups:
                if "step" in group or not isinstance(part.optimizer, torch.optim.AdamW):  # Transformer Engine's, Apex's
                    group["step"] = steps
                for parameter in group["params"]:
                    state = part.optimizer.state[parameter]
                    for name in KINDS[1:]:
                        state.setdefault(name, torch.zeros_like(parameter.data))
                    if isinstance(part.optimizer, torch.optim.AdamW):
                        state["step"] = torch.tensor(float(steps))

    def _local(self, parameter: nn.Parameter, kind: str) -> Tensor:
        """This tensor-parallel rank's part, of the parameter's shape. With the distributed optimizer a copy, joined
        over the data-parallel ranks: all of them must ask."""
        if not self.distributed:
            master = getattr(parameter, "main_param", parameter)
            return master.detach() if kind == "master" else self._state_of(master)[kind]
        whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
        if (mine := self._shard(parameter, kind)) is not None:
            shard, (start, end) = mine
            whole[start:end] = shard
        torch_dist.all_reduce(whole, group=self._holder(parameter).data_parallel_group)
        return whole.view(parameter.shape)

    def _state_of(self, master: Tensor) -> dict[str, Tensor]:
        return next(part.optimizer.state[master] for part in self.parts if master in part.optimizer.state)

    def _shard(self, parameter: nn.Parameter, kind: str) -> tuple[Tensor, tuple[int, int]] | None:
        """Of the distributed optimizer: what this rank has, and where that is in the flat parameter."""
        if parameter not in self.shards:
            return None
        part, shard = self._holder(parameter), self.shards[parameter]
        where = part._get_model_param_range_map(parameter)["param"]
        tensor = shard if kind == "master" else part.optimizer.state[shard][kind]
        return tensor.view(-1), (where.start, where.end)

    def _holder(self, parameter: nn.Parameter) -> Any:
        """The optimizer that has it: experts have one of their own."""
        expert = not getattr(parameter, "allreduce", True)
        return self.parts[-1] if expert else self.parts[0]


def shards_of(optimizer: Any) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Of megatron-core's distributed optimizer: each parameter of which this rank has a part, and that part's master.
    Its own table of them is wrong where one group has parameters of both kinds, as a critic's float32 head among
    bfloat16 layers: it counts them in the model's order, and steps the float32 ones first."""
    for models, masters in (
        (optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups),
        (optimizer.model_fp32_groups, optimizer.shard_fp32_groups),
    ):
        for parameters, shards in zip(models, masters, strict=True):
            yield from zip(parameters, shards, strict=True)
