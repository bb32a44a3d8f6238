"""The order in which an engine may be used, written once: engines fill in the methods with an underscore."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from trainers.engines import Capabilities, Completion, Manifest, Sampling

PARTS = ("weights", "kv")  # in the order in which they wake


class GuardedEngine:
    """Base of every engine. A call out of order is a RuntimeError, and changes nothing.

    Args:
        timeout_s: seconds that one generate() may take (policy.generation.timeout_s); None: no limit.
    """

    def __init__(self, *, timeout_s: float | None = None):
        self.timeout_s = timeout_s
        self.version = 0  # of the weights that generate
        self.manifest: Manifest = {}  # of the update under way
        self.pending: set[str] | None = None  # names still to come; None outside an update
        self.unusable: str | None = None  # why generate() refuses until a full update has been made
        self.asleep: set[str] = set()
        self.closed = False

    # What an engine is made of. None of these needs to check what is checked below.
    def capabilities(self) -> Capabilities:
        raise NotImplementedError

    def _generate(self, prompts: list[list[int]], sampling: Sampling, seeds: Sequence[int]) -> list[Completion]:
        raise NotImplementedError

    def _begin_update(self, manifest: Manifest) -> None:
        """Compare with the model's own names and shapes, all of them: ValueError if any differs."""
        raise NotImplementedError

    def _put(self, bucket: list[tuple[str, Tensor]]) -> int:
        raise NotImplementedError

    def _end_update(self) -> None: ...

    def _abort_update(self) -> None: ...

    def _sleep(self, parts: set[str], *, keep_weights: bool) -> bool:
        """Free `parts`. Returns whether the weights are lost."""
        return False

    def _wake(self, part: str) -> None: ...

    def _reset_prefix_cache(self) -> None: ...

    def _close(self) -> None: ...

    def generate(self, prompts: list[list[int]], sampling: Sampling, seeds: Sequence[int]) -> list[Completion]:
        self._check_request(prompts, sampling, seeds)
        return self._generate(prompts, sampling, seeds) if prompts else []

    def _check_request(self, prompts: list[list[int]], sampling: Sampling, seeds: Sequence[int]) -> None:
        self._check_open("generate")
        if self.pending is not None:
            raise RuntimeError("generate() needs complete weights: an update was begun and not ended")
        if self.asleep:
            raise RuntimeError(f"generate() needs {' and '.join(sorted(self.asleep))}, asleep now: call wake() first")
        if self.unusable:
            raise RuntimeError(f"generate() needs complete weights: {self.unusable}")
        if len(seeds) != len(prompts):
            raise ValueError(f"seeds must have one entry per prompt, {len(prompts)}, got {len(seeds)}")
        if empty := [i for i, prompt in enumerate(prompts) if not prompt]:
            raise ValueError(f"prompts[{empty[0]}] must have at least one token, got none")
        limit = self.capabilities().max_len
        for i, prompt in enumerate(prompts):
            if limit is not None and len(prompt) + sampling.max_new_tokens > limit:
                raise ValueError(
                    f"prompts[{i}]: its {len(prompt)} tokens and max_new_tokens={sampling.max_new_tokens} exceed the "
                    f"{limit} that the engine holds"
                )

    def begin_update(self, version: int, manifest: Manifest) -> None:
        self._check_open("begin_update")
        if self.pending is not None:
            raise RuntimeError("begin_update() inside an update: call end_update() or abort_update() first")
        if "weights" in self.asleep:
            raise RuntimeError('begin_update() needs the weights\' memory: call wake("weights") first')
        if not manifest:
            raise ValueError("manifest must name the model's tensors, got none")
        self._begin_update(manifest)
        self.next_version, self.manifest, self.pending = version, manifest, set(manifest)

    @torch.no_grad()
    def put(self, bucket: Iterable[tuple[str, Tensor]]) -> int:
        self._check_open("put")
        if self.pending is None:
            raise RuntimeError("put() needs begin_update() first")
        bucket, names = list(bucket), set()
        for name, tensor in bucket:
            if name not in self.pending or name in names:
                raise ValueError(f"put: {name!r} was not announced, or came twice")
            spec = self.manifest[name]
            if tuple(tensor.shape) != tuple(spec.shape) or tensor.dtype != spec.dtype:
                raise ValueError(
                    f"put: {name} must be {tuple(spec.shape)} {spec.dtype}, got {tuple(tensor.shape)} {tensor.dtype}"
                )
            names.add(name)
        moved = self._put(bucket)
        self.pending -= names
        return moved

    def end_update(self) -> None:
        self._check_open("end_update")
        if self.pending is None:
            raise RuntimeError("end_update() needs begin_update() first")
        if missing := sorted(self.pending):
            self.abort_update()
            raise RuntimeError(f"end_update: {len(missing)} announced tensors never came, such as {missing[0]!r}")
        try:
            self._end_update()
        except BaseException:
            self.abort_update()
            raise
        self.version, self.pending, self.unusable = self.next_version, None, None

    def abort_update(self) -> None:
        if self.closed or self.pending is None:
            return
        self.pending, self.unusable = None, "an update was begun and not ended"
        self._abort_update()

    def sleep(self, *, keep_weights: bool = False) -> None:
        self._check_open("sleep")
        if self.pending is not None:
            raise RuntimeError("sleep() inside an update: call end_update() or abort_update() first")
        if self.asleep != set(PARTS):
            if self._sleep(set(PARTS) - self.asleep, keep_weights=keep_weights):
                self.unusable = "they were given up in sleep() and not sent again"
            self.asleep = set(PARTS)

    def wake(self, part: str) -> None:
        self._check_open("wake")
        if part not in PARTS:
            raise ValueError(f"part must be one of {', '.join(PARTS)}, got {part!r}")
        if part == "kv" and "weights" in self.asleep:
            raise RuntimeError('wake("kv") before wake("weights"): the cache takes what memory the weights leave')
        if part in self.asleep:
            self._wake(part)
            self.asleep.discard(part)

    def reset_prefix_cache(self) -> None:
        self._check_open("reset_prefix_cache")
        self._reset_prefix_cache()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._close()

    def _check_open(self, call: str) -> None:
        if self.closed:
            raise RuntimeError(f"{call}() on an engine that is closed")


class Deadline:
    """Of one generate(): `check()` raises TimeoutError once `timeout_s` seconds have passed since it was made."""

    def __init__(self, timeout_s: float | None):
        self.timeout_s, self.start = timeout_s, time.monotonic()

    @property
    def left_s(self) -> float | None:
        return None if self.timeout_s is None else max(self.timeout_s - (time.monotonic() - self.start), 0.0)

    def check(self) -> None:
        if self.left_s == 0:
            raise TimeoutError(
                f"the engine has not answered within policy.generation.timeout_s={self.timeout_s:g} seconds"
            )


def check_manifest(manifest: Manifest, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`manifest` names exactly `parameters` (transformers' own, which may be on the meta device) in their shapes: all
    as they are in memory, or all as in files.

    Returns:
        `parameters` under the manifest's names: what a file has in parts are views.

    Raises:
        ValueError: the first difference.
    """
    places = dict(parameters)
    if not manifest.keys() <= places.keys():
        in_files = dict(as_in_files(parameters))
        if manifest.keys() & (in_files.keys() - places.keys()):
            places = in_files
    mine, theirs = set(places), set(manifest)
    if mine != theirs:
        raise ValueError(
            f"manifest must name the engine's {len(mine)} tensors; missing: {sorted(mine - theirs)[:3]}, "
            f"unknown: {sorted(theirs - mine)[:3]}"
        )
    for name, spec in manifest.items():
        if (shape := tuple(places[name].shape)) != tuple(spec.shape):
            raise ValueError(f"manifest: {name} must be {shape}, got {tuple(spec.shape)}")
    return places


def as_in_files(parameters: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """(name, view) as Qwen3-MoE's files have them: each expert's matrices apart. In memory transformers has a layer's
    in two tensors, gate_up_proj [experts, 2 * width, hidden] and down_proj [experts, hidden, width]."""
    for name, parameter in parameters.items():
        layer, found, part = name.partition(".experts.")
        if not found or part not in ("gate_up_proj", "down_proj"):
            yield name, parameter
            continue
        halves = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
        for expert, matrix in enumerate(parameter.detach()):
            for half, rows in zip(halves, matrix.chunk(len(halves)), strict=True):
                yield f"{layer}.experts.{expert}.{half}.weight", rows
