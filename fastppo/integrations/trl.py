"""TRL's log-probs and entropies by `fastppo.linear_logprob`, from one line before or after a trainer is made:

    fastppo.integrations.trl.apply()

GRPOTrainer and RLOOTrainer of TRL 1.16 give their models a fused head (`trl.trainer.utils.add_fused_lm_head`), which
scores tokens through two names of that module. Those two are replaced, for every trainer of the process:

- `_ChunkedLogProbFunction`, the product with the head, the log-probs and the entropies, forward and backward. Where
  other outputs are asked for with them, as SFT and DPO's policy do, all are still TRL's; a model that is asked for
  log-probs alone, as DPO's and KTO's references and AsyncGRPO, is served. To train with DPO or KTO, `undo()` first.
- `_use_triton`, by which TRL leaves prompt and padding out of the head's product on a GPU alone: on a CPU too.

Another version of TRL is taken if what is replaced looks as in 1.16, and refused by name otherwise.
"""

import importlib
import importlib.metadata
import inspect
import os
from types import CodeType, ModuleType
from typing import Any, Literal

import torch
from torch import Tensor

import fastppo
from fastppo.checks import check_choice

KNOWN = "1.16.0"
# What the fused head passes, by position, and gets back.
ARGUMENTS = (
    *("ctx", "hidden", "weight", "bias", "targets", "temperature", "chunk_size"),
    *("final_logit_softcapping", "logit_scale", "outputs"),
)
HEAD = ("model", "temperature", "cast_lm_head_to_fp32", "outputs")
OURS = {"log_probs", "entropy"}

_originals: dict[str, Any] = {}
_options: dict[str, Any] = {}


def apply(
    *,
    memory: Literal["recompute", "save", "auto"] = "recompute",
    backend: Literal["auto", "cuda", "triton", "cpu", "torch"] = "auto",
) -> None:
    """Replace TRL's log-probs and entropies, and print what was replaced. Again: only the options change.

    Args:
        memory, backend: as in `fastppo.linear_logprob`. "recompute" keeps no logits, as TRL does; "auto" keeps them
            while they fit in FASTPPO_SAVE_LIMIT, which spares one product of four.

    Raises:
        ImportError: no TRL.
        RuntimeError: this version of TRL has not the functions that are replaced; nothing was changed.
        ValueError: an unknown choice.
    """
    check_choice("memory", memory, ("recompute", "save", "auto"))
    check_choice("backend", backend, ("auto", "cuda", "triton", "cpu", "torch"))
    utils = _utils()
    if not _originals:
        _check(utils)
        _originals.update({name: getattr(utils, name) for name in REPLACED})
    _options.update(memory=memory, backend=backend)
    lines = [f"fastppo {fastppo.__version__} in trl {_version()}:"]
    for name, (ours, what) in REPLACED.items():
        setattr(utils, name, ours)
        lines.append(f"  {utils.__name__}.{name} -> {what.format(**_options)}")
    if os.environ.get("RANK", "0") == "0":  # one of a launcher's processes speaks
        print("\n".join(lines))


def undo() -> None:
    """Give TRL its own functions back, the very same objects. Without an `apply()` before: nothing."""
    if _originals:
        utils = _utils()
        for name, original in _originals.items():
            setattr(utils, name, original)
        _originals.clear()


class FusedHead:
    """Called as TRL's autograd function is."""

    @staticmethod
    def apply(
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        final_logit_softcapping: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = ("log_probs", "entropy"),
    ) -> tuple[Tensor | None, ...]:
        """hidden [N, D], weight [V, D], bias [V], targets [N] -> log-probs, entropy [N] and three outputs of TRL's."""
        if not OURS.issuperset(outputs) or logit_scale <= 0:
            original = _originals["_ChunkedLogProbFunction"].apply
            theirs: tuple[Tensor | None, ...] = original(
                hidden, weight, bias, targets, temperature, chunk_size, final_logit_softcapping, logit_scale, outputs
            )
            return theirs
        if hasattr(weight, "ds_status"):
            raise RuntimeError(
                "fastppo.integrations.trl does not serve DeepSpeed's ZeRO-3, which shards the head's weight again "
                "before backward: use ZeRO-2 or FSDP, or fastppo.integrations.trl.undo()"
            )
        # cap * tanh(s*z / cap) / T with s folded into the other two: (cap/s) * tanh(z / (cap/s)) / (T/s)
        softcap = None if final_logit_softcapping is None else final_logit_softcapping / logit_scale
        logprobs, entropy = fastppo.linear_logprob(
            hidden,
            weight,
            targets,
            bias=bias,
            temperature=temperature / logit_scale,
            softcap=softcap,
            with_entropy="entropy" in outputs,
            **_options,
        )
        return logprobs, entropy, None, None, None


def _compacts(device: torch.device) -> bool:
    """Whether positions without a label are left out of the head's product: on a CPU, and where TRL does so."""
    there: bool = device.type == "cpu" or _originals["_use_triton"](device)
    return there


REPLACED: dict[str, tuple[Any, str]] = {
    "_ChunkedLogProbFunction": (
        FusedHead,
        'fastppo.linear_logprob(memory="{memory}", backend="{backend}"): log-probs and entropies of GRPO and RLOO',
    ),
    "_use_triton": (_compacts, "prompt and padding are left out of the head's product on a CPU too"),
}


def _version() -> str:
    return importlib.metadata.version("trl")


def _utils() -> ModuleType:
    try:
        return importlib.import_module("trl.trainer.utils")
    except ImportError as error:
        raise ImportError(f"fastppo.integrations.trl needs TRL: pip install trl=={KNOWN}") from error


def _check(utils: ModuleType) -> None:
    problems = []
    for name in (*REPLACED, "add_fused_lm_head"):
        if not hasattr(utils, name):
            problems.append(f"{utils.__name__} has no {name}")
    if not problems:
        function, head = utils._ChunkedLogProbFunction, utils.add_fused_lm_head
        for where, called, expected in (
            ("_ChunkedLogProbFunction.forward", function.forward, ARGUMENTS),
            ("_use_triton", utils._use_triton, ("device",)),
            ("add_fused_lm_head", head, HEAD),
        ):
            taken = tuple(inspect.signature(called).parameters)
            if taken != expected:
                problems.append(f"{where} takes ({', '.join(taken)}), expected ({', '.join(expected)})")
        used = _names(head.__code__)
        problems += [f"add_fused_lm_head does not use {name}" for name in REPLACED if name not in used]
        for trainer in ("grpo_trainer", "rloo_trainer"):
            module = importlib.import_module(f"trl.trainer.{trainer}")
            if getattr(module, "add_fused_lm_head", None) is not head:
                problems.append(f"{module.__name__} does not use add_fused_lm_head")
    if problems:
        raise RuntimeError(f"trl {_version()} is not as {KNOWN}, nothing was replaced: {'; '.join(problems)}")


def _names(code: CodeType) -> set[str]:
    """The global names that a function and those inside it use."""
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*inner)
