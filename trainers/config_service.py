"""The settings of `python -m trainers.serve_critic`, which also reads a trainer's file: see `of_trainer`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from trainers.config import EnvConfig, ValueConfig
from trainers.config_cluster import ClusterConfig
from trainers.config_remote import TOKEN_VARIABLE
from trainers.config_types import block, opt


@dataclass
class TLSConfig:
    """https in place of http."""

    certfile: str | None = opt(None, "certificate chain (PEM)", free=True)
    keyfile: str | None = opt(None, "its private key (PEM)", free=True)


@dataclass
class LimitsConfig:
    """What a request may be at most; anything beyond is refused before it is computed."""

    max_body_mb: float = opt(64.0, "body of a request, in MB of 10^6 bytes", free=True)
    max_sequences: int = opt(4096, "sequences of a request", free=True)
    merged_tokens: int = opt(
        8192, "requests that wait together are computed in passes of up to so many tokens, padding counted", free=True
    )
    max_waiting: int = opt(256, "requests that wait to be computed; more are told to come back (429)", free=True)
    body_timeout_s: float = opt(60.0, "seconds in which a body must have arrived", free=True)


@dataclass
class ServeConfig:
    """Everything `python -m trainers.serve_critic` reads. `config=` may also be the file of the training run: what it
    says of the critic, the environment and the model is taken over, the rest is the trainer's."""

    name: ClassVar[str] = "serve_critic"
    host: str = opt(
        "127.0.0.1", "address that is listened on; any other than this machine's own needs a token", free=True
    )
    port: int = opt(8900, "port; 0: one that is free, printed at the start", free=True)
    token: str | None = opt(
        None,
        "what every request must carry, as the bearer token of its header Authorization; default: the environment "
        f"variable {TOKEN_VARIABLE}, if it is set",
        free=True,
        secret=True,
    )
    serve: str = opt("value", "a value model, the reward of env.name, or both", choices=("value", "reward", "both"))
    run_dir: str = opt(
        "results/critic",
        "folder of the critic's checkpoints, one for each training run; started again, the server goes on from there",
        free=True,
    )
    dtype: str = opt("auto", "policy.dtype for what is served", choices=("auto", "float32", "bfloat16"))
    tls: TLSConfig = block(TLSConfig)
    limits: LimitsConfig = block(LimitsConfig)
    infer_batch_size: int = opt(
        8,
        "policy.logprob_batch_size for the critic: sequences in one pass over a request, where "
        "value.max_tokens_per_micro_batch is off",
        free=True,
    )
    value: ValueConfig = block(lambda: ValueConfig(mode="local"))
    env: EnvConfig = block(EnvConfig)
    cluster: ClusterConfig = block(ClusterConfig)


# Of the trainer's blocks that a server has too: what the trainer decides.
TRAINERS_OWN = (
    *("value.mode", "value.url", "value.train_global_batch_size", "value.detach_trunk", "value.loss_coef"),
    *("value.offload", "value.remote.", "env.url", "env.remote.", "env.constant_reward_steps"),
    *("cluster.device_memory_gb", "cluster.gpus", "cluster.gpus_per_node", "cluster.plan."),
)
FROM_POLICY = {
    "policy.model_name": "value.model_name",
    "policy.dtype": "dtype",
    "policy.logprob_batch_size": "infer_batch_size",
}


def of_trainer(settings: Mapping[str, Any], trainers: Mapping[str, Any], servers: Mapping[str, Any]) -> dict[str, Any]:
    """The server's settings in a file: all of its own, and those of a trainer's file that say what is served.

    Args:
        settings: dotted key -> value; trainers, servers: every key of PPOTrainerConfig and of ServeConfig.
    """
    found = {}
    for key, value in settings.items():
        if key in FROM_POLICY and value != "auto":
            found.setdefault(FROM_POLICY[key], value)
        elif not (key in trainers and (key not in servers or key.startswith(TRAINERS_OWN))):
            found[key] = value
    return found
