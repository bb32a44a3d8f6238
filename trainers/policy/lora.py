"""LoRA by the peft library: every adapted matrix is W + scale * B @ A, with W frozen and only A and B trained.

Source: Hu et al. 2021, arXiv:2106.09685; scale = alpha / dim, or alpha / sqrt(dim) (rsLoRA, arXiv:2312.03732).

The base weights are the reference: with the adapters switched off the model is the one that training started from, and
no weight exists twice. For the same reason nothing is ever merged in place (bfloat16 rounds W + delta, and subtracting
delta does not give W back): `weights()` makes one merged matrix at a time, out of place.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from trainers.backbone import decoder_of, is_cut
from trainers.config import PeftConfig
from trainers.engines.native import share_parameters
from trainers.extras import require


class Adapters:
    """Puts adapters into `model`, in place, and freezes all else. Nothing changes yet: B starts at 0.

    Args:
        model: float32, as loaded; adapters stay float32 when the frozen weights go to the compute dtype.
        num_layers_unfrozen: adapters go into the top N decoder layers alone; -1: into all.
    """

    def __init__(self, model: PreTrainedModel, cfg: PeftConfig, num_layers_unfrozen: int):
        peft = require("peft")
        self.model = model
        names = target_names(model, cfg.target_modules, num_layers_unfrozen)
        self.wrapper = peft.get_peft_model(
            model,
            peft.LoraConfig(
                task_type="CAUSAL_LM",
                r=cfg.dim,
                lora_alpha=cfg.alpha,
                use_rslora=cfg.use_rslora,
                target_modules=names,
                fan_in_fan_out=isinstance(model.get_submodule(names[0]), Conv1D),
            ),
        )
        self.adapted = {f"{name}.weight": model.get_submodule(name) for name in names}  # by Hugging Face name
        self.own = {name for name, p in model.named_parameters() if p.requires_grad}

    def off(self) -> AbstractContextManager:
        """The base model for as long as the context lasts."""
        return self.wrapper.disable_adapter()

    def base(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every frozen weight under its Hugging Face name; tied ones once."""
        for name, parameter in self.model.named_parameters():
            if name not in self.own:
                yield hf_name(name), parameter

    @torch.no_grad()
    def weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Every weight under its Hugging Face name, adapted matrices merged in float32 and then given `dtype`, or that
        of the base weight; the others are the model's own tensors."""
        for name, parameter in self.base():
            if name in self.adapted:
                merged = parameter.float() + self.adapted[name].get_delta_weight("default").float()
                yield name, merged.to(dtype or parameter.dtype)
            else:
                yield name, parameter.detach()

    def engine_model(self, dtype: torch.dtype) -> PreTrainedModel:
        """The model's structure without adapters, in `dtype`: own storage for adapted matrices, to be filled with
        merged ones; all else that is stored in `dtype` is shared."""
        copied = [layer.get_base_layer().weight for layer in self.adapted.values()]
        return share_parameters(self.wrapper, dtype, copied).unload()

    def save_pretrained(self, folder: Path) -> None:
        """A Hugging Face folder of the merged model; merged matrices in float32."""
        state = {hf_name(name): tensor for name, tensor in self.model.state_dict().items() if name not in self.own}
        state |= {name: tensor.cpu() for name, tensor in self.weights(torch.float32) if name in self.adapted}
        self.model.save_pretrained(folder, state_dict=state)

    def save_adapter(self, folder: Path) -> None:
        """peft's own format: `PeftModel.from_pretrained(base model, folder)` loads it."""
        self.wrapper.save_pretrained(folder, save_embedding_layers=False)


def target_names(model: PreTrainedModel, wanted: list[str], num_layers_unfrozen: int) -> list[str]:
    """Full names of the linear layers to adapt. Never the output layer: the fused loss reads its weight as it is."""
    decoder = decoder_of(model)
    parts = [decoder]
    if is_cut(model, num_layers_unfrozen) and hasattr(decoder, "layers"):
        parts = list(decoder.layers)[-num_layers_unfrozen:]
    inside = {id(module) for part in parts for module in part.modules() if isinstance(module, nn.Linear | Conv1D)}
    known = [name for name, module in model.named_modules() if id(module) in inside]
    for target in wanted:
        if not any(matches(name, target) for name in known):
            last = sorted({name.rpartition(".")[2] for name in known})
            raise ValueError(
                f"policy.peft.target_modules: expected linear layers of {type(model).__name__}'s decoder "
                f"({', '.join(last) or 'it has none'}) or all-linear, got {target!r}"
            )
    return [name for name in known if any(matches(name, target) for target in wanted)]


def matches(name: str, target: str) -> bool:
    return target == "all-linear" or name == target or name.endswith(f".{target}")


def hf_name(name: str) -> str:
    """A parameter's name in the model without adapters."""
    return name.replace(".base_layer.", ".")
