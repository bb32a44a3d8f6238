"""The weights of a Hugging Face model folder: read from its safetensors files a tensor at a time, and written there."""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainers.engines import Manifest
from trainers.extras import require
from trainers.files import Writing

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
FILE_BYTES = 4 * 2**30  # of one file, unless a single tensor has more


class TensorFiles(Mapping[str, Tensor]):
    """Name -> tensor, in the CPU's memory and the file's dtype. A tensor is read when it is asked for, and not kept.

    Args: file_of: tensor -> file in `folder`.
    """

    def __init__(self, folder: Path, file_of: Mapping[str, str]):
        self.folder, self.file_of = folder, file_of
        self.files: dict[str, Any] = {}

    @classmethod
    def listed(cls, folder: Path, pattern: str) -> "TensorFiles":
        """All tensors of the files that match.

        Raises:
            ValueError: there is no such file.
        """
        found = cls(folder, {})
        names = sorted(path.name for path in folder.glob(pattern))
        if not names:
            raise ValueError(f"{folder} has no {pattern}: nothing of a model that was spread over ranks is there")
        found.file_of = {tensor: name for name in names for tensor in found._file(name).keys()}  # noqa: SIM118
        return found

    def without(self, prefix: str) -> "TensorFiles":
        return TensorFiles(self.folder, {k: v for k, v in self.file_of.items() if not k.startswith(prefix)})

    def has_float32(self) -> bool:
        """Whether any of them is; none is read."""
        return any(self._file(file).get_slice(name).get_dtype() == "F32" for name, file in self.file_of.items())

    def __getitem__(self, name: str) -> Tensor:
        return self._file(self.file_of[name]).get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.file_of)

    def __len__(self) -> int:
        return len(self.file_of)

    def _file(self, name: str) -> Any:
        if name not in self.files:
            self.files[name] = require("safetensors").safe_open(self.folder / name, "pt")
        return self.files[name]


class HFFolder(TensorFiles):
    """Those of a Hugging Face model.

    Raises:
        ValueError: the folder has neither model.safetensors nor the index of several files.
    """

    def __init__(self, folder: Path):
        super().__init__(folder, {})
        if (folder / INDEX).is_file():
            self.file_of = json.loads((folder / INDEX).read_text())["weight_map"]
        elif (folder / SINGLE).is_file():
            self.file_of = dict.fromkeys(self._file(SINGLE).keys(), SINGLE)
        else:
            raise ValueError(f"{folder} has no {SINGLE} and no {INDEX}: expected a model saved as safetensors")


def folder_of(path: Path | str) -> Path:
    """The folder itself, or that of a hub id, which is downloaded unless it has been before."""
    if Path(path).is_dir():
        return Path(path)
    return Path(require("huggingface_hub").snapshot_download(str(path), allow_patterns=["*.safetensors", "*.json"]))


def write_weights(
    folder: Path, manifest: Manifest, tensors: Iterable[tuple[str, Tensor]], *, here: bool, file_bytes: int = FILE_BYTES
) -> None:
    """The model's safetensors files, one of them in memory at a time.

    Args:
        tensors: in the manifest's order. All are taken, as another rank may wait for this one to do so: a file that
            cannot be written is an error at the end.
        here: whether to write.
    """
    save_file = require("safetensors.torch").save_file
    files: list[list[str]] = []
    filled = file_bytes
    for name, spec in manifest.items():
        size = spec.dtype.itemsize * torch.Size(spec.shape).numel()
        if not files or filled + size > file_bytes:
            files.append([])
            filled = 0
        files[-1].append(name)
        filled += size
    names = [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    names = [SINGLE] if len(files) == 1 else names
    stream, writing = iter(tensors), Writing()
    for file, members in zip(names, files, strict=True):
        content = {}
        for _ in members:
            name, tensor = next(stream)
            if here:
                content[name] = tensor.cpu().clone(memory_format=torch.contiguous_format)
        if here:
            writing(lambda file=file, content=content: save_file(content, folder / file, metadata={"format": "pt"}))
    next(stream, None)  # there must be none
    writing.done()
    if here and len(files) > 1:
        weight_map = {name: file for file, members in zip(names, files, strict=True) for name in members}
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}, indent=2) + "\n")
