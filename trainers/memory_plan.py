"""What a run holds in the device's memory, and the largest micro-batch that fits: the second half of --dry-run.

Held all along: weights (frozen ones in the compute dtype, trained ones as param_dtype says, with float32 masters where
that is bfloat16), float32 gradients, Adam's two moments, the reference's copy, and what the embedded engine holds
beside the policy's own tensors. With fully_shard a rank has its share of the first five, weights in float32 as their
own masters, a whole copy of the model for the embedded engine, and what `gathered_bytes` says. To this comes the
largest of

    generation  KV cache: 2 x layers x KV heads x head size x bytes x max_batch_size x longest sequence; and what the
                sampler makes of [max_batch_size, V] logits: the logits, 3 float32 copies, float64 sums
    scoring     one layer's intermediates of logprob_batch_size sequences (no gradient, so nothing else stays), and a
                chunk of logits
    update      what the forward pass of a micro-batch saves for backward, the final hidden states and their gradient,
                and a chunk of logits with its gradient, as the fused loss cuts them; its float32 gradient of a trained
                head

What is saved for backward is not a formula: `Activations.count` runs the model's own forward pass on one and two
trained layers, one and two sequences, on tensors without storage, and adds up what autograd keeps; with gradient
checkpointing that of one layer, and the input of every one. Sequences are taken at their longest; what is offloaded to
the host in between is counted as if it stayed. Not counted: the allocator's gaps, temporaries of backward, and the
process itself; hence `SHARE`.
"""

import functools
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from fastppo.ops.linear_loss import default_chunk
from trainers.backbone import autocast, decoder_of
from trainers.batch_plan import counted
from trainers.config import PeftConfig, PolicyConfig, ValueConfig
from trainers.engine_plan import engine_memory, gigabytes, layer_bytes
from trainers.extras import require
from trainers.policy.lora import Adapters

SHARE = 0.9  # of the memory that is there


@dataclass(frozen=True)
class Activations:
    """Bytes that autograd keeps of a micro-batch: `fixed` (half-precision copies of weights) + rows x `row`."""

    fixed: int
    row: int

    def bytes(self, rows: int) -> int:
        return self.fixed + rows * self.row

    @classmethod
    def count(
        cls,
        config: Any,
        *,
        layers: int,
        whole: bool,
        length: int,
        dtype: torch.dtype,
        device: torch.device,
        stored: torch.dtype = torch.float32,
        peft: PeftConfig | None = None,
        checkpointing: bool = False,
    ) -> "Activations":
        """Of the top `layers` of a model of this transformers config (`whole`: over trained embeddings, not over a
        frozen trunk), for sequences of `length` tokens; `stored`: the dtype of trained parameters.
        """
        model = (type(config), config.to_json_string(), None if peft is None else json.dumps(asdict(peft)))
        where = whole, length, dtype, stored, device
        few = {n: [_saved_bytes(*model, n, rows, *where) for rows in (1, 2)] for n in (1, 2)}
        rows = {n: (one, two - one) for n, (one, two) in few.items()}  # n layers: (one sequence, each further one)
        if checkpointing:  # every layer's input, and all of the layer that is being computed again
            inputs = layers * length * config.hidden_size * (stored if whole and peft is None else dtype).itemsize
            first, further = (number + inputs for number in rows[1])
        else:
            first, further = (rows[1][i] + (layers - 1) * (rows[2][i] - rows[1][i]) for i in (0, 1))
        return cls(max(first - further, 0), further)


@functools.cache  # a critic is often of the policy's kind
def _saved_bytes(
    kind: type,
    text: str,
    peft: str | None,
    layers: int,
    rows: int,
    whole: bool,
    length: int,
    dtype: torch.dtype,
    stored: torch.dtype,
    device: torch.device,
) -> int:
    """`kind`, `text`: the transformers config's class and its JSON; `peft`: that of PeftConfig."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    config = kind.from_dict(json.loads(text))
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[-layers:]
    saved: dict[int, tuple[Any, int]] = {}  # storages are kept alive, or their addresses would come again

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage._cdata] = (storage, storage.nbytes())
        return tensor

    with torch.device("meta"):
        model = require("transformers").AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        if peft is not None:
            Adapters(model, PeftConfig(**json.loads(peft)), -1)
    with FakeTensorMode(), torch.device(device):
        _give_device(model, dtype, stored)
        products = torch.float32 if stored == dtype else dtype  # as SplitTransformer.autocast()
        decoder = decoder_of(model)
        weights = {parameter.untyped_storage()._cdata for parameter in decoder.parameters()}
        if whole:
            inputs = {"input_ids": torch.zeros(rows, length, dtype=torch.int64)}
        else:
            inputs = {"inputs_embeds": torch.zeros(rows, length, config.hidden_size, dtype=dtype)}
            for parameter in decoder.norm.parameters() if hasattr(decoder, "norm") else ():
                parameter.requires_grad_(False)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), autocast(products, device):
            hidden = _unpacked(decoder, inputs)
        assert hidden.requires_grad
    return sum(size for address, (_, size) in saved.items() if address not in weights)


@dataclass(frozen=True)
class Trained:
    """The policy, or a critic with a model of its own."""

    key: str  # its block of the settings
    config: Any  # the model's own, of its text part
    layers: int  # trained ones
    held: dict[str, int]  # bytes by use
    cfg: PolicyConfig | ValueConfig
    stored: torch.dtype  # of trained parameters
    parameters: int  # of the model, adapters not among them
    # With fully_shard, bytes that come with a pass without gradients, and with one that has some:
    scoring: int = 0
    updating: int = 0


def plan_lines(
    models: list[Trained], config: Any, dtype: torch.dtype, engine_dtype: torch.dtype, device: torch.device
) -> list[str]:
    """The memory of every stage, the sum, and the largest micro-batches that fit, in words."""
    generation = config.policy.generation
    longest = config.data.max_prompt_length + generation.max_new_tokens
    room, total, source = available_bytes(device, config.cluster.device_memory_gb)
    policy = models[0].config
    later = ("gradients", "Adam")  # than the first rollout
    first = sum(count for model in models for use, count in model.held.items() if use not in later)
    parameters = models[0].parameters
    engine = engine_memory(config, policy, parameters, engine_dtype, device, free=room - first, total=total)
    held = engine.held + sum(sum(model.held.values()) for model in models)
    room = int(SHARE * room)
    scored = in_a_pass(config.policy, config.policy.logprob_batch_size, longest)
    scoring = layer_bytes(policy, scored * longest, dtype)
    scoring += logits_bytes(policy, scored * generation.max_new_tokens, dtype, device, trained=False)
    lines = [
        f"memory    generation by {engine.words}",
        f"          scoring of {scored} sequences: {gigabytes(scoring)}",
    ]
    peaks, fits = [engine.generating, scoring + max(model.scoring for model in models)], []
    for model in models:
        whole = model.layers == model.config.num_hidden_layers
        peft = getattr(model.cfg, "peft", None)
        kept = Activations(0, 0)
        if model.layers:
            kept = Activations.count(
                model.config,
                layers=model.layers,
                whole=whole,
                length=longest,
                dtype=dtype,
                device=device,
                stored=model.stored,
                peft=peft if peft and peft.enabled else None,
                checkpointing=model.cfg.gradient_checkpointing,
            )

        head_trained = whole and not (peft and peft.enabled)

        def beside(rows: int, model: Trained = model, head_trained: bool = head_trained) -> int:
            hidden = 2 * 4 * rows * longest * model.config.hidden_size + model.updating  # and its gradient
            if model.key == "value":
                return hidden
            tokens = rows * generation.max_new_tokens
            return hidden + logits_bytes(model.config, tokens, dtype, device, trained=head_trained)

        micro = in_a_pass(model.cfg, model.cfg.train_micro_batch_size, longest)
        lines.append(
            f"          {model.key} update of {counted(micro, 'sequence')}: {gigabytes(kept.bytes(micro))} saved for "
            f"backward ({gigabytes(kept.row)} a sequence), {gigabytes(beside(micro))} of hidden states and logits"
            + (f", {gigabytes(model.updating)} of it gathered weights and gradients" if model.updating else "")
        )
        peaks.append(kept.bytes(micro) + beside(micro))
        batch = model.cfg.train_global_batch_size
        most = largest_fit(room - held, kept, beside, batch)
        whole_batch = ", the whole batch of an optimizer step" if most == batch else ""
        key = f"{model.key}.train_micro_batch_size"
        if model.cfg.max_tokens_per_micro_batch is not None:
            key, most = f"{model.key}.max_tokens_per_micro_batch", most * longest
        fits.append(f"{key}={most} is the largest that fits{whole_batch}" if most else f"no {key} fits")
    used = held + max(peaks)
    verdict = "fits in" if used <= room else "does not fit in"
    lines.append(
        f"          in all {gigabytes(used)}, which {verdict} {SHARE:.0%} of {gigabytes(round(room / SHARE))} {source}"
    )
    return [*lines, *(f"          {fit}" for fit in fits)]


def _give_device(model: nn.Module, dtype: torch.dtype, stored: torch.dtype) -> None:
    """New tensors on the present device in place of the model's on meta, which autocast would pass over; frozen ones in
    the compute dtype, trained ones as they are `stored`. A tied one stays one.
    """
    new: dict[int, Tensor] = {}
    for module in model.modules():
        for name, old in module._parameters.items():
            if old is not None and id(old) not in new:
                kept = stored if old.requires_grad else dtype
                new[id(old)] = nn.Parameter(torch.empty(old.shape, dtype=kept), requires_grad=old.requires_grad)
            if old is not None:
                module._parameters[name] = new[id(old)]
        for name, old in module._buffers.items():
            if old is not None:
                module._buffers[name] = torch.empty(old.shape, dtype=old.dtype)


def _unpacked(decoder: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Final hidden states. transformers looks whether positions start anew within a row, which tensors without storage
    cannot say, and then takes a mask of length x length that no training has.
    """
    masking = import_module("transformers.masking_utils")
    with patch.object(masking, "find_packed_sequence_indices", lambda *_, **__: None, create=True):
        return decoder(**inputs, use_cache=False).last_hidden_state


def in_a_pass(cfg: PolicyConfig | ValueConfig, rows: int, longest: int) -> int:
    """Sequences of the longest kind in one pass: `rows` of them, or as many as the token budget takes."""
    tokens = cfg.max_tokens_per_micro_batch
    return rows if tokens is None else min(max(tokens // longest, 1), cfg.train_global_batch_size)


def held_bytes(
    trained: int,
    frozen: int,
    dtype: torch.dtype,
    stored: torch.dtype = torch.float32,
    *,
    head: int = 0,
    ranks: int = 1,
) -> dict[str, int]:
    """Of a model's numbers of parameters: what stays on the device all along. `head`: those of a critic's float32 head.
    `ranks`: that fully_shard divides all but the head over.

    Not the bfloat16 gradients, which exist one parameter at a time.
    """
    trained, frozen = -(-trained // ranks), -(-frozen // ranks)
    weights = {"weights": stored.itemsize * trained + 4 * head + dtype.itemsize * frozen}
    masters = {} if stored == torch.float32 else {"masters": 4 * trained}
    return weights | masters | {"gradients": 4 * (trained + head), "Adam": 8 * (trained + head)}


def gathered_bytes(layer: int, embedding: int, head: int, itemsize: int, *, backward: bool) -> int:
    """What fully_shard has whole at a time, of parameters' numbers: the output head for all of a pass; the layer at
    work and the next one, or the embeddings in place of one. In backward the head's gradient, and one layer's as it is
    made and, on its way into the sum, in float32.

    Args: embedding: 0 where the head is the same tensor. head: 0 where no pass uses it."""
    weights = itemsize * (head + layer + max(layer, embedding))
    return weights + ((itemsize + 4) * layer + itemsize * head if backward else 0)


def reference_bytes(
    model: Any, trained: list[nn.Parameter], dtype: torch.dtype, stored: torch.dtype = torch.float32
) -> int:
    """As `trainers.policy.reference.FrozenCopy` stores it: matrices in the compute dtype, all else as it is stored."""
    wanted, total = {id(parameter) for parameter in trained}, 0
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if id(parameter) in wanted:
                wanted.discard(id(parameter))  # a tied head is the embedding
                total += parameter.numel() * (dtype if isinstance(module, nn.Linear) else stored).itemsize
    return total


def logits_bytes(config: Any, tokens: int, dtype: torch.dtype, device: torch.device, *, trained: bool) -> int:
    """A chunk of logits and its gradient, in the compute dtype; with a trained head its gradient in float32 too."""
    depth = config.hidden_size if trained else 0
    chunk = min(default_chunk(tokens, config.vocab_size, depth, device, even=True), tokens)
    return 2 * chunk * config.vocab_size * dtype.itemsize + 4 * depth * config.vocab_size


def available_bytes(device: torch.device, device_memory_gb: float | None) -> tuple[int, int, str]:
    """What a run may fill, what the device has in all, and where the first number comes from."""
    if device_memory_gb is not None:
        return int(device_memory_gb * 1e9), int(device_memory_gb * 1e9), "cluster.device_memory_gb"
    if device.type == "cuda":
        return *torch.cuda.mem_get_info(device), "free on the device"
    there = require("psutil").virtual_memory()
    return there.available, there.total, "available on this machine"


def largest_fit(room: int, activations: Activations, extra: Callable[[int], int], most: int) -> int:
    """The largest micro-batch of at most `most` sequences whose update stays within `room`; 0 if none does.

    `extra(rows)`: bytes of the update beside the activations.
    """
    return next((rows for rows in range(most, 0, -1) if activations.bytes(rows) + extra(rows) <= room), 0)


def memory(parts: dict[str, int]) -> str:
    listed = ", ".join(f"{name} {gigabytes(count)}" for name, count in parts.items())
    return f"          {listed}: {gigabytes(sum(parts.values()))}"


def size(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)
