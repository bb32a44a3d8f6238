"""What a server serves, and what it says of itself."""

import functools
import hashlib
import json
from collections.abc import Sequence
from typing import Any

from trainers.backbone import limits_of
from trainers.config_service import LimitsConfig
from trainers.service.critic import Critic
from trainers.service.scorer import Scorer
from trainers.service.wire import Refused
from trainers.service_rules import served_settings


class Served:
    """Read by any thread, so it asks no model: while a critic begins anew it has none.

    Args: names: of what is served, under "value" and "reward"; tokenizer: what is read with, if anything is.
    """

    def __init__(
        self,
        critic: Critic | None,
        scorer: Scorer | None,
        limits: LimitsConfig,
        *,
        names: dict[str, str],
        tokenizer: Any,
    ):
        self.critic, self.scorer, self.names, self.tokenizer = critic, scorer, names, tokenizer
        self.limits = {"max_sequences": limits.max_sequences, "max_body_mb": limits.max_body_mb}
        self.settings: dict[str, Any] = {}
        self.models: dict[str, tuple[int, list[int | None]]] = {}  # rows of the embedding, limits of a sequence
        if critic is not None:
            cfg, (rows, positions) = critic.value.cfg, critic.value.limits()
            self.settings = served_settings(cfg)
            self.models["values"] = (rows, [positions, cfg.max_tokens_per_micro_batch])
        if scorer is not None and scorer.model is not None:
            rows, positions = limits_of(scorer.model)
            self.models["rewards"] = (rows, [positions, scorer.env.reward_model.max_tokens_per_micro_batch])

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
        found = [self.models[name] for name in want if name in self.models]
        vocab = min([vocab for vocab, _ in found], default=2**31)
        longest = [limit for _, limits in found for limit in limits if limit is not None]
        return {"vocab_size": vocab, "longest": min(longest, default=None)}

    def info(self, vocab: int | None = None) -> dict[str, Any]:
        facts: dict[str, Any] = {"serves": dict(self.names), "run": None, "step": None, **self.limits}
        if self.critic is not None:
            facts |= {"run": self.critic.run, "step": self.critic.step, "compute_dtype": self.critic.facts["dtype"]}
            facts["value"] = self.settings
        facts |= self.bounds(list(self.models))
        if self.scorer is not None:
            facts["reward_model"] = self.scorer.reads_ids
        if vocab is not None and self.tokenizer is not None:
            facts["vocab_digest"] = self._digest(vocab)
        return facts

    @functools.lru_cache(maxsize=4)  # noqa: B019 (one object, as long-lived as the process)
    def _digest(self, vocab: int) -> str:
        return vocab_digest(self.tokenizer, vocab)


def vocab_digest(tokenizer: Any, vocab: int) -> str:
    """Of all tokens with an id below `vocab`: equal where two tokenizers mean the same by these ids."""
    tokens = sorted((i, token) for token, i in tokenizer.get_vocab().items() if i < vocab)
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()
