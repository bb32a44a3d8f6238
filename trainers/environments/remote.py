"""A reward on a server, `env.url`: `env.name=remote` or `env.rewards={remote: 1.0, ...}`.

env.remote.api=fastppo: `python -m trainers.serve_critic serve=reward` gets the samples themselves, ids, texts, turns
and what the prompts' rows carry, and gives the numbers that its environment would give in the trainer's process.

env.remote.api=openrlhf: any server that is written for OpenRLHF's `--reward.remote_url` gets the texts that OpenRLHF
would send, special tokens included, and a label for each.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainers.environments import Prompt, RewardError, Sample
from trainers.run import TrainingError
from trainers.service.client import AGAIN, Client, ServerError
from trainers.service.messages import pack_samples, sample_header, spans
from trainers.service.served import vocab_digest
from trainers.service.wire import dumps, encode

if TYPE_CHECKING:
    from trainers.config import EnvConfig

Answers = list[Any]  # of each sample one number, or a list with one for each response token


class RemoteEnvironment:
    """`trainers.environments.asking.ask` checks its numbers, as every reward's, and limits its time to env.timeout_s,
    in which requests and waiting between them count.

    Raises:
        ValueError: no env.url, or certificates that cannot be read.
    """

    default_model = "smollm2-135m"  # beside other rewards; env.name=remote needs policy.model_name

    def __init__(self, env: "EnvConfig") -> None:
        if env.url is None:
            raise ValueError("env.url is not set: expected the server of the reward")
        self.cfg, self._found = env.remote, {}
        self._of_texts = env.remote.api == "openrlhf"
        # To OpenRLHF's servers 500 is whatever went wrong, such as memory that ran out; ours says what will not help.
        self.client = Client(env.url, env.remote, key="env", again=(*AGAIN, 500, 504) if self._of_texts else AGAIN)
        self.served_by = self.client.who

    def prompts(self) -> list[Prompt]:
        return []

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Raises: RewardError (a ValueError): what a prompt's row carries cannot be sent; names the prompt's key."""
        for prompt in prompts:
            self._check_row(prompt)

    def bind(self, tokenizer: Any, **policy: Any) -> None:
        """Raises:
        TrainingError: there is no such server, or it serves no reward.
        ValueError: its reward model has another vocabulary than the policy.
        """
        self.tokenizer = tokenizer
        if self._of_texts:
            return
        vocab = max(tokenizer.get_vocab().values(), default=-1) + 1
        info = self.client.get("info", vocab=vocab)
        if "reward" not in info.get("serves", {}):
            raise TrainingError(f"{self.served_by} serves no reward: start it with serve=reward or serve=both")
        if info.get("reward_model") and info.get("vocab_digest") != vocab_digest(tokenizer, vocab):
            raise ValueError(
                f"{self.served_by}: its reward model has another vocabulary than the policy. Sampled ids are scored as "
                "they are, so the two need one tokenizer"
            )

    def score(self, samples: Sequence[Sample]) -> Answers:
        """Raises: RewardError: no answer, or none that says something of every sample; names the server and env.url."""
        self._found = {}
        if not samples:
            return []
        seen: set[int] = set()
        for sample in samples:
            if id(sample.prompt) not in seen:
                seen.add(id(sample.prompt))
                self._check_row(sample.prompt, sample)
            if not self._of_texts:
                self._check_keys(sample.metadata, "the dialogue's metadata", sample)
        try:
            return self._by_texts(samples) if self._of_texts else self._by_samples(samples)
        except ServerError as error:  # it says all there is to say
            raise RewardError(f"the reward remote: {error}") from None

    def metrics(self, samples: Sequence[Sample], rewards: Sequence[float]) -> dict[str, float]:
        """What the server said beside the rewards of the last score(): its environment's own metrics; of openrlhf the
        means of what is under extra_logs."""
        return self._found

    def _by_samples(self, samples: Sequence[Sample]) -> Answers:
        header = {"want": ["rewards"], "samples": [sample_header(sample) for sample in samples]}
        said, tensors = self.client.exchange("infer", encode(header, pack_samples(samples)))
        values = _vector(tensors, "rewards", torch.float64)
        counts = _vector(tensors, "reward_counts", torch.int64)
        if values is None or counts is None:
            got = ", ".join(f"{name} {t.dtype} {list(t.shape)}" for name, t in sorted(tensors.items())) or "none"
            raise self._wrong("the tensors rewards [values] float64 and reward_counts [samples] int64", got)
        if len(counts) != len(samples) or not all(n > 0 for n in counts.tolist()) or int(counts.sum()) != len(values):
            raise self._wrong(
                f"rewards of {len(samples)} responses", f"{len(values)} numbers with reward_counts={counts.tolist()}"
            )
        self._found = _means(said.get("metrics"), str)
        parts = [part.tolist() for part in values.split(counts.tolist())]
        return [part if len(part) > 1 else part[0] for part in parts]

    def _by_texts(self, samples: Sequence[Sample]) -> Answers:
        ids = [[i for _, each in spans(sample) for i in each] for sample in samples]
        said = self.client.post(
            "",
            {
                "query": [self._text(each) for each in ids],
                "prompts": [self._text(sample.prompt_ids) for sample in samples],
                "labels": [self._label(sample.prompt) for sample in samples],
            },
        )
        rewards = said.get("rewards")
        if not isinstance(rewards, list | Real):
            raise self._wrong(
                f'JSON with "rewards", a list of {len(samples)} numbers',
                f"{type(rewards).__name__} there" if "rewards" in said else f"the keys {sorted(said)}",
            )
        self._found = _means(said.get("extra_logs"), lambda key: f"env/{key}")
        # A head's output of shape [B, 1], or the number alone where a server is used to one text a request.
        rewards = rewards if isinstance(rewards, list) else [rewards]
        return [each[0] if isinstance(each, list) and len(each) == 1 else each for each in rewards]

    def _text(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=False)

    def _label(self, prompt: Prompt) -> Any:
        label = prompt.metadata.get(self.cfg.label_key)
        return "" if label is None else label

    def _wrong(self, expected: str, got: str) -> RewardError:
        return RewardError(f"the reward remote: {self.served_by} must answer with {expected}, got {got}")

    def _check_row(self, prompt: Prompt, sample: Sample | None = None) -> None:
        if self._of_texts:
            key = self.cfg.label_key
            sent: Mapping[str, Any] = {key: prompt.metadata[key]} if key in prompt.metadata else {}
        else:
            sent = {**prompt.metadata, **({} if prompt.messages is None else {"messages": list(prompt.messages)})}
        self._check_keys(sent, f"the prompt {prompt.text[:80]!r}", sample)

    def _check_keys(self, sent: Mapping[str, Any], who: str, sample: Sample | None) -> None:
        for key, value in sent.items():
            if not isinstance(key, str) or not _travels(value):
                raise RewardError(
                    f"{who}: its key {key!r} cannot be sent to {self.served_by}: expected what JSON gives back as it "
                    f"was (texts, finite numbers, true, false, null, lists, objects), got {value!r:.200}",
                    sample,
                )


def _travels(value: Any) -> bool:
    """Whether JSON gives it back as it is: a tuple would become a list, and a key that is a number a text."""
    try:
        return bool(json.loads(dumps(value)) == value)
    except (TypeError, ValueError, RecursionError):
        return False


def _vector(tensors: Mapping[str, Tensor], name: str, dtype: torch.dtype) -> Tensor | None:
    tensor = tensors.get(name)
    return tensor if tensor is not None and tensor.dim() == 1 and tensor.dtype == dtype else None


def _means(found: Any, name: Callable[[str], str]) -> dict[str, float]:
    """The numbers, and the means of lists of numbers; what else a server likes to log stays with it."""
    means = {}
    for key, value in found.items() if isinstance(found, dict) else ():
        values = value if isinstance(value, list) else [value]
        if values and all(isinstance(x, Real) and isfinite(x) for x in values):
            means[name(key)] = sum(map(float, values)) / len(values)
    return means
