"""Which settings of critics and rewards on other machines go together: of the trainers, which trainers/arithmetic.py
asks, and of `python -m trainers.serve_critic`."""

import os
import ssl
from collections.abc import Iterator, Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from trainers.batch_plan import launched_ranks
from trainers.config import TrainerConfig, ValueConfig, walk
from trainers.config_checks import Rule, constant_schedule, sharding_needs
from trainers.config_remote import TOKEN_VARIABLE, RemoteRewardConfig
from trainers.config_service import ServeConfig, TLSConfig
from trainers.config_types import shown
from trainers.megatron_rules import needs_of, unused_of

REMOTE = "remote"  # as a value of env.name and env.rewards
UNFIT = "travels in a header: expected printable ASCII characters, and no space at either end"
# Beside its optimizer and scheduler what a critic's server decides; a trainer that sets one must set it alike.
SERVED = (
    *("model_name", "param_dtype", "num_layers_unfrozen", "train_micro_batch_size", "fused_layers"),
    *("fully_shard", "gradient_checkpointing", "max_tokens_per_micro_batch", "packing", "backend"),
)


def gives_rewards(env: Any) -> bool:
    """Whether a server is asked for rewards."""
    return REMOTE in (env.name, *env.rewards)


def unused_rules(config: TrainerConfig) -> list[Rule]:
    critic, env = config.critic, config.env
    remote = critic is not None and critic.mode == "remote"
    return [
        (remote, "value: detach_trunk loss_coef offload", "value.mode=remote, whose critic is elsewhere"),
        (critic is not None and not remote, "value: url", f"value.mode={critic.mode if critic else ''}"),
        (critic is not None and not remote, "value.remote: *", f"value.mode={critic.mode if critic else ''}"),
        (not gives_rewards(env), "env: url", f"env.name={env.name}"),
        (not gives_rewards(env), "env.remote: *", f"env.name={env.name}"),
        (env.remote.api != "openrlhf", "env.remote: label_key", f"env.remote.api={env.remote.api}"),
    ]


def served_settings(value: ValueConfig, *, fixed: bool = False) -> dict[str, Any]:
    """What of a critic's settings is its server's, as dotted keys below `value`; with `fixed` what may not change while
    it is trained."""
    blocks = ("optimizer.", "scheduler.", "megatron.")
    return {
        key: setting
        for key, field, setting in walk(value)
        if (key in SERVED or key.startswith(blocks)) and not (fixed and field.metadata["free"])
    }


def otherwise_served(value: ValueConfig, served: Mapping[str, Any]) -> list[str]:
    """Settings of a trainer, changed from their defaults, that the server has otherwise."""
    default = served_settings(ValueConfig())
    return [
        f"value.{key}={shown(mine)}, and {shown(served[key])} on the server"
        for key, mine in served_settings(value).items()
        if mine != default[key] and key in served and mine != served[key]
    ]


def malformed(config: TrainerConfig) -> Iterator[str]:
    for key, part in (("value", getattr(config, "value", None)), ("env", config.env)):
        if part is None:
            continue
        texts = key == "env" and part.remote.api == "openrlhf"
        if part.url is not None and (problem := wrong_url(part.url, path=texts)):
            has_path = "; with env.remote.api=openrlhf it has one" if key == "env" and not texts else ""
            yield f"{key}.url={part.url}: {problem}{has_path}"
        if part.remote.ca_file is not None and not Path(part.remote.ca_file).expanduser().is_file():
            yield f"{key}.remote.ca_file={part.remote.ca_file}: there is no such file"
        if part.url is not None and not fits_header(token_of(part.remote.token)):
            yield f"{key}.remote.token {UNFIT}"


def wrong_url(url: str, *, path: bool) -> str | None:
    """What is wrong with it, if anything is."""
    expected = "expected http://HOST:PORT or https://HOST:PORT"
    expected += ", with a path if the server has one" if path else ""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        return f"{error}; {expected}"
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment or port == 0:
        return expected
    if parts.username is not None:
        return "a name or a password does not belong here: use the setting remote.token"
    return None if path or parts.path in ("", "/") else f"{expected}, without a path"


def needed(config: TrainerConfig) -> Iterator[str]:
    critic, env = config.critic, config.env
    remote = critic.remote if critic is not None and critic.mode == "remote" else None
    limit, longest = config.cluster.rank_timeout_s, remote.timeout_s + remote.retry_s if remote else 0.0
    if launched_ranks() > 1 and limit <= longest:
        yield (
            f"cluster.rank_timeout_s={limit:g}: the other ranks wait while one asks the server, up to "
            f"value.remote.timeout_s + value.remote.retry_s = {longest:g} seconds"
        )
    if critic is not None and critic.mode == "remote" and critic.url is None:
        yield "value.mode=remote needs value.url, the server that python -m trainers.serve_critic prints at its start"
    if not gives_rewards(env):
        return
    if env.url is None:
        yield f"{REMOTE} in env.name or env.rewards needs env.url, the server of the reward"
    for key in ("timeout_s", "retry_s"):
        seconds, limit = getattr(env.remote, key), env.timeout_s
        if seconds != getattr(RemoteRewardConfig(), key) and limit is not None and seconds > limit:
            yield (
                f"env.remote.{key}={seconds:g} is never reached: env.timeout_s={limit:g} ends all asking before; raise "
                "that too, or set it to null"
            )
    if env.name == REMOTE:
        if config.data.prompts is None:
            yield f"env.name={REMOTE} needs data.prompts: it has no prompts of its own"
        if config.policy.model_name == "auto":
            yield f"env.name={REMOTE} needs policy.model_name: the model to train"


def token_of(given: str | None) -> str | None:
    return given if given is not None else os.environ.get(TOKEN_VARIABLE) or None


def fits_header(token: str | None) -> bool:
    return token is None or (token.isascii() and token.isprintable() and token == token.strip())


def is_own_address(host: str) -> bool:
    """Whether only this machine can connect to it."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _unfit(tls: TLSConfig) -> Iterator[str]:
    if tls.certfile is None or tls.keyfile is None:
        return
    try:
        files = (Path(path).expanduser() for path in (tls.certfile, tls.keyfile))
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(*files, password="")  # "": no prompt for one
    except (OSError, ssl.SSLError) as error:
        yield f"tls.certfile={tls.certfile} with tls.keyfile={tls.keyfile}: {error}"


def served_unused(config: ServeConfig) -> list[Rule]:
    """Settings of the trainers' blocks that mean nothing to a server. Those of a part that is not served are let be."""
    asked = "python -m trainers.serve_critic: the trainer that asks decides it"
    by_tokens = config.value.max_tokens_per_micro_batch is not None
    return [
        (True, "value: mode url detach_trunk loss_coef train_global_batch_size", asked),
        (True, "value.remote: *", asked),
        (True, "env: url constant_reward_steps", asked),
        (True, "env.remote: *", asked),
        (True, "value: offload", "python -m trainers.serve_critic: it generates nothing"),
        (by_tokens, "value: train_micro_batch_size", "value.max_tokens_per_micro_batch"),
        *unused_of("value", config.value),
        constant_schedule("value", config.value),
        (True, "cluster: device_memory_gb gpus gpus_per_node", "python -m trainers.serve_critic"),
        (True, "cluster.plan: *", "python -m trainers.serve_critic"),
    ]


def served_needed(config: ServeConfig) -> Iterator[str]:
    tls = config.tls
    yield from sharding_needs("value", config.value)
    if config.serve != "reward" and config.value.backend == "megatron":
        yield from needs_of("value", config.value, launched_ranks())
    if not is_own_address(config.host) and token_of(config.token) is None:
        yield (
            f"host={config.host} can be reached from other machines: that needs token, or the environment variable "
            f"{TOKEN_VARIABLE}; without one only 127.0.0.1 is listened on"
        )
    if (tls.certfile is None) != (tls.keyfile is None):
        yield "tls.certfile and tls.keyfile must be given together"
    for key, path in (("certfile", tls.certfile), ("keyfile", tls.keyfile)):
        if path is not None and not Path(path).expanduser().is_file():
            yield f"tls.{key}={path}: there is no such file"
            break
    else:
        yield from _unfit(tls)
    if config.serve != "value":
        if gives_rewards(config.env):
            yield f"env.name={config.env.name}: a server does not ask another one"
        if config.env.name == "reward_model" and config.env.reward_model.model_name is None:
            yield "env.name=reward_model needs env.reward_model.model_name, a Hugging Face folder or a hub id"
    if config.serve == "value" and config.value.model_name is None and config.env.name in ("reward_model", REMOTE):
        yield f"env.name={config.env.name} names no model: set value.model_name"
    if not config.run_dir:
        yield "run_dir is empty: expected a folder"
    if token_of(config.token) == "":
        yield "token is empty"
    if not fits_header(token_of(config.token)):
        yield f"token {UNFIT}"
