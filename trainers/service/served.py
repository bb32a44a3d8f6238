"""What a server serves, and what it says of itself."""

import functools
import hashlib
import json
from collections.abc import Sequence
from typing import Any

from trainers.service.critic import Critic
from trainers.service.scorer import Scorer
from trainers.service.wire import Refused
from trainers.service_rules import served_settings


class Served:
    """Args: models: {"value" or "reward": model}, of those that are models; tokenizer: what they read with, if any."""

    def __init__(self, critic: Critic | None, scorer: Scorer | None, *, names: dict[str, str], tokenizer: Any):
        self.critic, self.scorer, self.names, self.tokenizer = critic, scorer, names, tokenizer

    def needs_critic(self) -> None:
        if self.critic is None:
            raise Refused("this server has no value model: it was started with serve=reward", 404)

    def needs(self, want: Sequence[str]) -> None:
        if not want:
            raise Refused("want: expected values, rewards or both", 422)
        if "values" in want:
            self.needs_critic()
        if "rewards" in want and self.scorer is None:
            raise Refused("this server gives no rewards: it was started with serve=value", 404)

    def bounds(self, want: Sequence[str]) -> dict[str, Any]:
        """What a sequence may hold: ids below `vocab_size`, up to `longest` tokens."""
        found = []
        if "values" in want and self.critic is not None:
            value = self.critic.value
            found.append((*limits_of(value.model), value.cfg.max_tokens_per_micro_batch))
        if "rewards" in want and self.scorer is not None and (model := self.scorer.model) is not None:
            found.append((*limits_of(model), self.scorer.env.reward_model.max_tokens_per_micro_batch))
        vocab = min([vocab for vocab, *_ in found], default=2**31)
        longest = [limit for _, *each in found for limit in each if limit is not None]
        return {"vocab_size": vocab, "longest": min(longest, default=None)}

    def info(self, vocab: int | None = None) -> dict[str, Any]:
        facts: dict[str, Any] = {"serves": dict(self.names), "run": None, "step": None}
        if self.critic is not None:
            facts |= {"run": self.critic.run, "step": self.critic.step, "compute_dtype": self.critic.facts["dtype"]}
            facts["value"] = served_settings(self.critic.value.cfg)
        facts |= self.bounds([name for name, part in (("values", self.critic), ("rewards", self.scorer)) if part])
        if self.scorer is not None:
            facts["reward_model"] = self.scorer.reads_ids
        if vocab is not None and self.tokenizer is not None:
            facts["vocab_digest"] = self._digest(vocab)
        return facts

    @functools.lru_cache(maxsize=4)  # noqa: B019 (one object, as long-lived as the process)
    def _digest(self, vocab: int) -> str:
        return vocab_digest(self.tokenizer, vocab)


def limits_of(model: Any) -> tuple[int, int | None]:
    """Rows of the embedding, and positions if they are limited."""
    config = model.config.get_text_config()
    return model.get_input_embeddings().num_embeddings, getattr(config, "max_position_embeddings", None)


def vocab_digest(tokenizer: Any, vocab: int) -> str:
    """Of all tokens with an id below `vocab`: equal where two tokenizers mean the same by these ids."""
    tokens = sorted((i, token) for token, i in tokenizer.get_vocab().items() if i < vocab)
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()
