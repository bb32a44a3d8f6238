"""The weights of a Hugging Face model folder, read from its safetensors files one tensor at a time."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from trainers.extras import require

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class HFFolder(Mapping[str, Tensor]):
    """Name -> tensor, in the CPU's memory and the file's dtype. A tensor is read when it is asked for, and not kept.

    Raises:
        ValueError: the folder has neither model.safetensors nor the index of several files.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.open = require("safetensors").safe_open
        self.files: dict[str, Any] = {}
        if (folder / INDEX).is_file():
            self.file_of: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
        elif (folder / SINGLE).is_file():
            self.file_of = dict.fromkeys(self._file(SINGLE).keys(), SINGLE)
        else:
            raise ValueError(f"{folder} has no {SINGLE} and no {INDEX}: expected a model saved as safetensors")

    def __getitem__(self, name: str) -> Tensor:
        return self._file(self.file_of[name]).get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.file_of)

    def __len__(self) -> int:
        return len(self.file_of)

    def _file(self, name: str) -> Any:
        if name not in self.files:
            self.files[name] = self.open(self.folder / name, "pt")
        return self.files[name]
