"""What a request holds, checked before anything is computed, and what is made of it. T tokens, B sequences.

Sequences travel packed, as RolloutBatch has them: `tokens` [T] int64, `lengths` [B] int64, `mask` [T] bool (sampled by
the policy). Their first token is never sampled.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from torch import Tensor
from torch.nn import functional as F

from trainers.environments import Message, Prompt, Sample
from trainers.rollout import RolloutBatch
from trainers.service.wire import Refused, encode

# The name of a folder beside current.json, hence without a dot.
RunId = Annotated[str, Field(pattern=r"^[0-9a-zA-Z][0-9a-zA-Z_-]{0,63}$")]
Step = Annotated[int, Field(ge=0, lt=2**63)]
MOST_KEYS = 64  # of an object whose keys are known

# pydantic keeps every mistake: of a list of millions only the first may count, or a small body fills the memory.
FIRST = Field(fail_fast=True)
Metadata = dict[Any, Any]  # keys of JSON are text; checked as str, each could be one more mistake


class Header(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _few_keys(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > MOST_KEYS:
            raise ValueError(f"expected some of {', '.join(cls.model_fields)}, got {len(value)} keys")
        return value


class PromptHeader(Header):
    text: str
    metadata: Metadata = {}
    ids: Annotated[list[int], FIRST] | None = None
    messages: Annotated[list[Metadata], FIRST] | None = None

    def made(self) -> Prompt:
        ids, messages = (None if x is None else tuple(x) for x in (self.ids, self.messages))
        return Prompt(self.text, self.metadata, ids, messages)


class MessageHeader(Header):
    author: Literal["policy", "environment"]
    tokens: Annotated[int, Field(ge=0)]  # how many of the sequence's are its own
    text: str


class SampleHeader(Header):
    """What a reward may need beside the ids; see `trainers.environments.Sample`."""

    prompt: PromptHeader
    prompt_tokens: Annotated[int, Field(ge=0)]
    response: str
    finish: Literal["stop", "length"]
    messages: Annotated[list[MessageHeader], FIRST] = []
    metadata: Metadata = {}
    reward: float = 0.0


class InferHeader(Header):
    want: Annotated[list[Literal["values", "rewards"]], FIRST] = ["values"]
    run: RunId | None = None
    step: Step | None = None  # values of the critic as it is after that many train requests; None: as it is
    samples: Annotated[list[SampleHeader], FIRST] | None = None  # rewards need one a sequence


class TrainHeader(Header):
    run: RunId
    id: Annotated[int, Field(ge=1, lt=2**63)]  # the run's first train request is 1
    cliprange: Annotated[float, Field(gt=0)] | None = None
    scale: Annotated[float, Field(gt=0)] = 1.0


class SaveRequest(Header):
    run: RunId
    step: Step
    keep: Annotated[list[Step], FIRST] = []  # the run's other checkpoints that are still wanted


class LoadRequest(Header):
    run: RunId
    step: Step  # 0: the model as it was before any training
    source: RunId | None = None  # the run whose checkpoint it is; default: `run` itself


class ReleaseRequest(Header):
    run: RunId


class RewardQuery(BaseModel):
    """OpenRLHF's JSON. `query` is prompt and response as one text; its own clients send more keys, which are let be."""

    model_config = ConfigDict(extra="ignore", strict=True)

    query: Annotated[list[str], FIRST] | None = None
    prompts: Annotated[list[str], FIRST] | None = None
    labels: list[Any] | None = None


class RewardAnswer(BaseModel):
    rewards: list[float]


def parse(model: type[BaseModel], value: Mapping[str, Any]) -> Any:
    """`value` as `model`.

    Raises:
        Refused (422): what is wrong, by key.
    """
    try:
        return model.model_validate(value)
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, e['loc'])) or 'header'}: {e['msg']}" for e in error.errors()[:5]]
        raise Refused("; ".join(problems), 422) from None
    except RecursionError:
        raise Refused("the header is nested too deeply", 422) from None


def sequences(tensors: Mapping[str, Tensor], *, vocab_size: int, longest: int | None, most: int) -> RolloutBatch:
    """The sequences of a request.

    Args:
        vocab_size: ids are below it.
        longest: tokens of a sequence at most; None: any number.
        most: sequences at most.

    Raises:
        Refused (422): a tensor that is missing, unknown, of another shape or dtype; ids outside the vocabulary; lengths
            that do not add up; a sequence whose first token is sampled; a number that is not finite.
    """
    tokens, lengths, mask = (tensors[name] for name in ("tokens", "lengths", "mask"))
    if lengths.numel() > most:
        raise Refused(f"lengths: {lengths.numel()} sequences are more than limits.max_sequences={most}", 413)
    if lengths.numel() and (int(lengths.min()) < 1 or int(lengths.max()) > tokens.numel()):
        raise Refused("lengths: expected numbers from 1 to the number of tokens", 422)
    if int(lengths.sum()) != tokens.numel():
        raise Refused(f"lengths: they add up to {int(lengths.sum())}, but there are {tokens.numel()} tokens", 422)
    if lengths.numel() and longest is not None and int(lengths.max()) > longest:
        raise Refused(f"lengths: a sequence has {int(lengths.max())} tokens, the model takes {longest} at most", 422)
    if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
        raise Refused(
            f"tokens: expected ids from 0 to {vocab_size - 1}, got {int(tokens.min())} to {int(tokens.max())}", 422
        )
    cu_seqlens = F.pad(lengths.cumsum(0), (1, 0))
    if mask.numel() and bool(mask[cu_seqlens[:-1]].any()):
        raise Refused("mask: the first token of a sequence follows nothing, so it cannot have been sampled", 422)
    rows = lengths.numel()
    batch = RolloutBatch(
        cu_seqlens=cu_seqlens,
        tokens=tokens,
        mask=mask,
        rollout_logprobs=torch.zeros(tokens.numel()),
        group=torch.arange(rows),
        sample_id=torch.arange(rows),
        finish=torch.zeros(rows, dtype=torch.int64),
        weight_version=torch.zeros(rows, dtype=torch.int64),
    )
    return batch.update(values=tensors.get("values"), returns=tensors.get("returns"))


INFER = {"tokens": torch.int64, "lengths": torch.int64, "mask": torch.bool}
TRAIN = INFER | {"values": torch.float32, "returns": torch.float32}


def check_tensors(tensors: Mapping[str, Tensor], expected: Mapping[str, torch.dtype]) -> None:
    """Names, dtypes and shapes, [B] for `lengths` and [T] for all others, and that numbers are finite."""
    if tensors.keys() != expected.keys():
        raise Refused(f"tensors: expected {', '.join(expected)}, got {', '.join(sorted(tensors)) or 'none'}", 422)
    for name, dtype in expected.items():
        tensor = tensors[name]
        if tensor.dtype != dtype or tensor.dim() != 1:
            raise Refused(f"{name}: expected {dtype} of one dimension, got {tensor.dtype} {list(tensor.shape)}", 422)
        if name != "lengths" and tensor.shape != tensors["tokens"].shape:
            count = tensors["tokens"].numel()
            raise Refused(f"{name}: expected {count} elements, as tokens has, got {tensor.numel()}", 422)
        if dtype.is_floating_point and not bool(tensor.isfinite().all()):
            raise Refused(f"{name}: expected finite numbers", 422)


def packed(batch: RolloutBatch, *fields: str) -> dict[str, Tensor]:
    """The tensors of a request about `batch`, with these of its [T] fields; 0 where nothing was sampled, so that what
    an unsampled position holds does not travel."""
    chosen = {name: torch.where(batch.mask, getattr(batch, name), 0.0) for name in fields}
    return {"tokens": batch.tokens, "lengths": batch.lengths, "mask": batch.mask, **chosen}


def sample_header(sample: Sample) -> dict[str, Any]:
    """All of a sample but the ids, as SampleHeader has it. TypeError where metadata holds what JSON has no word for."""
    prompt = sample.prompt
    return {
        "prompt": {
            "text": prompt.text,
            "metadata": dict(prompt.metadata),
            "ids": None if prompt.ids is None else list(prompt.ids),
            "messages": None if prompt.messages is None else list(prompt.messages),
        },
        "prompt_tokens": len(sample.prompt_ids),
        "response": sample.response,
        "finish": sample.finish,
        "messages": [{"author": m.author, "tokens": len(m.ids), "text": m.text} for m in sample.messages],
        "metadata": dict(sample.metadata),
        "reward": sample.reward,
    }


def pack_samples(samples: Sequence[Sample]) -> dict[str, Tensor]:
    """The ids of samples, with observations, as the tensors of a request."""
    rows = [spans(sample) for sample in samples]
    written = [(i, who == "policy") for row in rows for who, ids in row for i in ids]
    lengths = [sum(len(ids) for _, ids in row) for row in rows]
    return {
        "tokens": torch.tensor([i for i, _ in written], dtype=torch.int64),
        "lengths": torch.tensor(lengths, dtype=torch.int64),
        "mask": torch.tensor([mine for _, mine in written], dtype=torch.bool),
    }


def spans(sample: Sample) -> list[tuple[str, Sequence[int]]]:
    """(author, ids) of everything in the sequence, in order."""
    messages = [(message.author, message.ids) for message in sample.messages]
    return [("prompt", sample.prompt_ids), *(messages or [("policy", sample.response_ids)])]


def unpack_samples(batch: RolloutBatch, headers: Iterable[SampleHeader]) -> list[Sample]:
    """The samples of a request.

    Raises:
        Refused (422): spans that do not cover the sequence, or that disagree with the mask.
    """
    samples = []
    for row, header in enumerate(headers):
        start, stop = int(batch.cu_seqlens[row]), int(batch.cu_seqlens[row + 1])
        ids, mask = batch.tokens[start:stop].tolist(), batch.mask[start:stop].tolist()
        lengths = [m.tokens for m in header.messages] or [len(ids) - header.prompt_tokens]
        authors = [m.author for m in header.messages] or ["policy"]
        if min(lengths) < 0 or header.prompt_tokens + sum(lengths) != len(ids):
            raise Refused(f"samples.{row}: prompt and messages do not make up its {len(ids)} tokens", 422)
        at, messages, told = header.prompt_tokens, [], [False] * header.prompt_tokens
        for i, (author, length) in enumerate(zip(authors, lengths, strict=True)):
            text = header.messages[i].text if header.messages else header.response
            messages.append(Message(author, tuple(ids[at : at + length]), text))
            told += [author == "policy"] * length
            at += length
        if told != mask:
            raise Refused(f"samples.{row}: who wrote which token is not what mask says", 422)
        samples.append(
            Sample(
                prompt=header.prompt.made(),
                prompt_ids=tuple(ids[: header.prompt_tokens]),
                response_ids=tuple(i for m in messages if m.author == "policy" for i in m.ids),
                response=header.response,
                finish=header.finish,
                messages=tuple(messages) if header.messages else (),
                metadata=header.metadata,
                reward=header.reward,
            )
        )
    return samples


def inferred(answer: Any) -> bytes:
    """The body that answers an infer request; see worker.Inferred."""
    tensors = {}
    if answer.values is not None:
        tensors |= {"values": answer.values, "next_values": answer.next_values}
    if answer.rewards is not None:
        flat = [value for values in answer.rewards for value in values]
        tensors["rewards"] = torch.tensor(flat, dtype=torch.float64)
        tensors["reward_counts"] = torch.tensor([len(values) for values in answer.rewards], dtype=torch.int64)
    header = {"run": answer.run, "step": answer.step, "seconds": answer.seconds, "metrics": answer.metrics}
    return encode(header, tensors)


def trained(step: int, answer: Any) -> bytes:
    """The body that answers a train request; see critic.Answer. A norm may be infinite, so all numbers are tensors."""
    sums = {f"sums.{name}": vector for name, vector in answer.sums.items()}
    optimizer = {f"optimizer.{name}": torch.tensor(x, dtype=torch.float64) for name, x in answer.optimizer.items()}
    return encode({"step": step}, sums | optimizer)
