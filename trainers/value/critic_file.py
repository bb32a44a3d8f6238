"""The file critic.safetensors of a checkpoint: names of the critic's parameters as transformers has them in memory,
the backbone under `model.`, the head under `head.`. In memory a layer's experts are two tensors; in a model's files,
and for megatron-core, each is on its own.

    experts.gate_up_proj [E, 2 F, D]    experts.{e}.gate_proj.weight, experts.{e}.up_proj.weight [F, D]
    experts.down_proj [E, D, F]         experts.{e}.down_proj.weight [D, F]
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from trainers.megatron_weights import VALUE_HEAD

FILE = "critic.safetensors"


@dataclass(frozen=True)
class Place:
    """Where a tensor is: all of one in the file, or of one of experts rows [start, stop) of expert `expert`."""

    key: str
    shape: tuple[int, ...]
    expert: int | None = None
    start: int = 0


class CriticFile(Mapping[str, Tensor]):
    """Under the names of a model's files, the head's under VALUE_HEAD; a tensor is read when it is asked for."""

    def __init__(self, file: Any, places: Mapping[str, Place]):
        self.file, self.places = file, places

    @classmethod
    def read(cls, path: Path, backbone: str) -> "CriticFile":
        """backbone: the prefix of its names, which begin with `model.` in a model's files."""
        file = safe_open(path, "pt")
        places: dict[str, Place] = {}
        for key in file.keys():  # noqa: SIM118
            shape = tuple(file.get_slice(key).get_shape())
            if key.startswith("head."):
                places[VALUE_HEAD + key.removeprefix("head.")] = Place(key, shape)
                continue
            name = f"model.{key.removeprefix(backbone)}" if key.startswith(backbone) else key
            prefix, found, part = name.partition(".experts.")
            if not found:
                places[name] = Place(key, shape)
                continue
            count, rows, columns = shape
            names = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
            rows //= len(names)
            for e in range(count):
                for i, each in enumerate(names):
                    places[f"{prefix}.experts.{e}.{each}.weight"] = Place(key, (rows, columns), e, i * rows)
        return cls(file, places)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: place.shape for name, place in self.places.items()}

    def without(self, prefix: str) -> "CriticFile":
        return CriticFile(self.file, {k: v for k, v in self.places.items() if not k.startswith(prefix)})

    def __getitem__(self, name: str) -> Tensor:
        place = self.places[name]
        if place.expert is None:
            return self.file.get_tensor(place.key)
        return self.file.get_slice(place.key)[place.expert, place.start : place.start + place.shape[0]]

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)


def joined_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Names of a model's files -> names in memory. What is joined is taken out of `tensors`."""
    experts: dict[str, dict[int, dict[str, Tensor]]] = {}
    for name in [name for name in tensors if ".experts." in name]:
        prefix, _, rest = name.partition(".experts.")
        number, part, _ = rest.split(".")
        experts.setdefault(prefix, {}).setdefault(int(number), {})[part] = tensors.pop(name)
    for prefix, members in experts.items():
        ordered = [members[e] for e in range(len(members))]
        gate_up = [torch.cat((each.pop("gate_proj"), each.pop("up_proj"))) for each in ordered]
        tensors[f"{prefix}.experts.gate_up_proj"] = torch.stack(gate_up)
        tensors[f"{prefix}.experts.down_proj"] = torch.stack([each.pop("down_proj") for each in ordered])
    return tensors
