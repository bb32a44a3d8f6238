"""Prompts: read once, tokenised once, then drawn in batches by a loader whose whole state is three numbers."""

import hashlib
import json
import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trainers.batch_plan import counted
from trainers.config import DataConfig
from trainers.environments import Environment, Prompt, nearest
from trainers.prompt_rows import read_rows

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TokenizedPrompt:
    index: int  # position among the loaded prompts, before any was dropped: the same in every epoch and after a resume
    prompt: Prompt
    ids: tuple[int, ...]
    truncated: bool = False  # longer than data.max_prompt_length and cut to it


def load_prompts(data: DataConfig, environment: Environment) -> list[Prompt]:
    """The prompts of `data.prompts`, else the environment's own.

    Each row has a text or chat messages under `data.prompt_key`; its other keys become metadata, what JSON lacks (dates
    in Parquet, for instance) as texts. See trainers/prompt_rows.py for the formats.

    Raises:
        ValueError: a row without such a prompt, with its place; no prompts at all; or a file where the environment can
            only score its own prompts.
        FileNotFoundError: the file is not there.
        ImportError: a package of the `data` extra is not installed.
    """
    if data.prompts is None:
        prompts = environment.prompts()
        if not prompts:
            raise ValueError("the environment has no prompts of its own: set data.prompts to a JSONL file")
    else:
        prompts = _read(data.prompts, "data.prompts", data.prompt_key, environment)
    if hasattr(environment, "check_prompts"):
        environment.check_prompts(prompts)
    return prompts


def load_val_prompts(data: DataConfig, environment: Environment) -> list[Prompt]:
    """The prompts of `data.val_prompts`, a source as that of `data.prompts`; none if it is not set."""
    if data.val_prompts is None:
        return []
    prompts = _read(data.val_prompts, "data.val_prompts", data.prompt_key, environment)
    if hasattr(environment, "check_prompts"):
        environment.check_prompts(prompts)
    return prompts


def _read(source: str, key: str, prompt_key: str, environment: Environment) -> list[Prompt]:
    if getattr(environment, "own_prompts_only", False):
        raise ValueError(f"{key}={source!r}: this environment can only score its own prompts; leave it unset")
    prompts = [_prompt_of(row, where, prompt_key) for where, row in read_rows(source, key)]
    if not prompts:
        raise ValueError(f"{key}={source!r} has no prompts")
    return prompts


def _prompt_of(row: dict[str, Any], where: str, prompt_key: str) -> Prompt:
    if prompt_key not in row:
        raise ValueError(
            f"{where}: no key {prompt_key!r} (data.prompt_key){nearest(prompt_key, list(row))}; keys: {sorted(row)}"
        )
    prompt = row.pop(prompt_key)
    if isinstance(prompt, str):
        return Prompt(prompt, row)
    if isinstance(prompt, list):
        messages = _messages(prompt, f"{where}: {prompt_key!r}")
        alone = len(messages) == 1
        text = "\n".join(turn["content"] if alone else f"{turn['role']}: {turn['content']}" for turn in messages)
        return Prompt(text, row, messages=messages)
    raise ValueError(f"{where}: {prompt_key!r} must be a text or a list of messages, got {type(prompt).__name__}")


def _messages(turns: list[Any], where: str) -> tuple[dict[str, Any], ...]:
    """The turns of a chat, the last of which a response can answer."""
    messages = []
    for i, turn in enumerate(turns):
        if not (isinstance(turn, dict) and all(isinstance(turn.get(key), str) for key in ("role", "content"))):
            raise ValueError(f"{where}: message {i} must be {{role: text, content: text}}, got {turn!r:.80}")
        messages.append({key: value for key, value in turn.items() if value is not None})  # columns that others have
    if not messages:
        raise ValueError(f"{where} has no messages")
    if messages[-1]["role"] == "assistant":
        raise ValueError(f"{where}: the last message is the assistant's, which the response would have to follow")
    return tuple(messages)


def tokenize_prompts(
    prompts: Sequence[Prompt], tokenizer: Any, data: DataConfig, *, vocab_size: int | None = None
) -> list[TokenizedPrompt]:
    """The ids of each prompt, within `data.max_prompt_length`; a prompt's own `ids` are taken as they are.

    Args:
        prompts: the loaded prompts; positions in this list become `TokenizedPrompt.index`.
        tokenizer: a Hugging Face tokenizer.
        data: chat template, system prompt, length limit and what happens to longer prompts.
        vocab_size: rows of the model's embedding; default: the tokenizer's number of tokens.

    Raises:
        ValueError: settings that exclude each other; a prompt with an id outside the vocabulary, without tokens,
            refused by the chat template, or (under overlong_prompts=error) too long; or no prompt left.
    """
    _check_settings(data, tokenizer)
    vocab_size = len(tokenizer) if vocab_size is None else vocab_size
    kept: list[TokenizedPrompt] = []
    overlong: list[tuple[int, int]] = []  # (row, tokens)
    for row, prompt in enumerate(prompts):
        ids = _encode(prompt, row, tokenizer, data)
        outside = [i for i in ids if not 0 <= i < vocab_size]
        if outside:
            raise ValueError(f"prompt {row}: token id {outside[0]} is outside the vocabulary of {vocab_size}")
        truncated = len(ids) > data.max_prompt_length
        if truncated:
            overlong.append((row, len(ids)))
            if data.overlong_prompts == "drop":
                continue
            if data.overlong_prompts == "error":
                raise ValueError(
                    f"prompt {row} has {len(ids)} tokens, more than data.max_prompt_length={data.max_prompt_length}"
                )
            ids = _truncate(ids, data.max_prompt_length, tokenizer.bos_token_id)
        kept.append(TokenizedPrompt(row, prompt, ids, truncated))
    if overlong:
        row, length = overlong[0]
        done = {"drop": "dropped", "truncate": "truncated"}[data.overlong_prompts]
        message = f"{done} {len(overlong)} of {len(prompts)} prompts, the first is prompt {row} with {length} tokens"
        if not kept:
            raise ValueError(f"data.max_prompt_length={data.max_prompt_length} {message}: none is left")
        logger.warning("data.max_prompt_length=%d: %s", data.max_prompt_length, message)
    return kept


def _check_settings(data: DataConfig, tokenizer: Any) -> None:
    if data.max_prompt_length < 1:
        raise ValueError(f"data.max_prompt_length must be at least 1, got {data.max_prompt_length}")
    if data.overlong_prompts not in ("error", "drop", "truncate"):
        raise ValueError(f"data.overlong_prompts must be error, drop or truncate, got {data.overlong_prompts!r}")
    if data.system_prompt is not None and not data.chat_template:
        raise ValueError("data.system_prompt needs data.chat_template=true")
    if data.chat_template and not getattr(tokenizer, "chat_template", None):
        raise ValueError("data.chat_template=true, but the model's tokenizer has no chat template")
    if data.chat_template and data.overlong_prompts == "truncate":
        raise ValueError("data.overlong_prompts=truncate would cut the chat template's own tokens; use drop or error")


def _encode(prompt: Prompt, row: int, tokenizer: Any, data: DataConfig) -> tuple[int, ...]:
    if prompt.ids is not None:
        if data.chat_template:
            raise ValueError(f"prompt {row} is given as ids, to which data.chat_template cannot be applied")
        ids = tuple(prompt.ids)
    elif prompt.messages is not None and not data.chat_template:
        raise ValueError(f"prompt {row} is a list of chat messages, which needs data.chat_template=true")
    elif data.chat_template:
        turns = list(prompt.messages or [{"role": "user", "content": prompt.text}])
        if data.system_prompt is not None:
            if turns[0]["role"] == "system":
                raise ValueError(f"prompt {row} has a system turn of its own, beside that of data.system_prompt")
            turns.insert(0, {"role": "system", "content": data.system_prompt})
        try:
            text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # templates raise what they like, for instance where there is no system role
            raise ValueError(f"prompt {row}: the chat template refused it: {error}") from error
        ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])  # the template has written them
    else:
        ids = tuple(tokenizer(prompt.text)["input_ids"])
        if len(ids) > 1 and ids[0] == ids[1] == tokenizer.bos_token_id:
            ids = ids[1:]  # the text begins with the token that the tokenizer puts in front as well
    if not ids:
        if tokenizer.bos_token_id is None:
            raise ValueError(
                f"prompt {row} has no tokens, and the tokenizer has no beginning-of-sequence token to stand in"
            )
        ids = (tokenizer.bos_token_id,)
    return ids


def _truncate(ids: tuple[int, ...], length: int, bos: int | None) -> tuple[int, ...]:
    """The end of the prompt, which the response continues; a leading BOS stays."""
    if length > 1 and ids[0] == bos:
        return ids[:1] + ids[len(ids) - length + 1 :]
    return ids[len(ids) - length :]


def too_few(setting: str, wanted: int, there: int) -> str:
    """What to do about a step that takes more prompts than there are, and what that brings with it."""
    are = "is" if there == 1 else "are"
    return (
        f"{setting}={wanted}, but there {are} only {counted(there, 'prompt')}: more prompts, or "
        f"{setting}={there} and train_global_batch_size, train_micro_batch_size that its sequences can be divided into"
    )


class PromptLoader:
    """Endless batches of `num_prompts_per_step` prompts; a last partial batch of an epoch is left out.

    The order of an epoch depends on (seed, epoch) alone, so (epoch, index) is all there is to restore.
    `epoch` counts the finished passes and moves with the last batch of a pass; `consumed` counts prompts, not samples.
    """

    def __init__(
        self,
        prompts: Sequence[TokenizedPrompt],
        num_prompts_per_step: int,
        *,
        seed: int,
        shuffle: bool = True,
        setting: str = "ppo.num_prompts_per_step",
    ) -> None:
        """`setting`: what says how many prompts a batch has, for errors."""
        if num_prompts_per_step < 1:
            raise ValueError(f"num_prompts_per_step must be at least 1, got {num_prompts_per_step}")
        if len(prompts) < num_prompts_per_step:
            raise ValueError(too_few(setting, num_prompts_per_step, len(prompts)))
        self._prompts = list(prompts)
        self._batch = num_prompts_per_step
        self._seed = seed
        self._shuffle = shuffle
        self.epoch = self.index = self.consumed = 0
        self._order = self._order_of(0)
        left_out = len(prompts) % num_prompts_per_step
        if left_out and not shuffle:
            logger.warning("data.shuffle=false: the last %d of %d prompts are never used", left_out, len(prompts))

    @property
    def batches_per_epoch(self) -> int:
        return len(self._prompts) // self._batch

    def next_batch(self) -> list[TokenizedPrompt]:
        batch = [self._prompts[i] for i in self._order[self.index : self.index + self._batch]]
        self.index += self._batch
        self.consumed += self._batch
        if self.index + self._batch > len(self._prompts):
            self.epoch, self.index = self.epoch + 1, 0
            self._order = self._order_of(self.epoch)
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "index": self.index, "consumed": self.consumed, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken; ValueError if it was taken with other prompts or settings."""
        for key, here in self._identity().items():
            if state.get(key) != here:
                raise ValueError(
                    f"cannot resume the prompts: {key} was {state.get(key)!r} when saved and is {here!r} now"
                )
        self.epoch, self.index, self.consumed = (int(state[key]) for key in ("epoch", "index", "consumed"))
        self._order = self._order_of(self.epoch)

    def _order_of(self, epoch: int) -> list[int]:
        order = list(range(len(self._prompts)))
        if self._shuffle:
            random.Random(f"prompts of seed {self._seed}, epoch {epoch}").shuffle(order)
        return order

    def _identity(self) -> dict[str, Any]:
        ids = json.dumps([[prompt.index, *prompt.ids] for prompt in self._prompts])
        return {
            "seed": self._seed,
            "shuffle": self._shuffle,
            "num_prompts_per_step": self._batch,
            "num_prompts": len(self._prompts),
            "prompts_sha256": hashlib.sha256(ids.encode()).hexdigest(),
        }
