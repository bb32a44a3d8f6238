"""How critics and rewards on other machines are asked: the blocks `value.remote` and `env.remote`."""

from dataclasses import dataclass

from trainers.config_types import opt

TOKEN_VARIABLE = "FASTPPO_TOKEN"


@dataclass
class RemoteConfig:
    """How a server is asked. Every request may be sent twice without harm, so what fails on its way is sent again."""

    token: str | None = opt(
        None,
        f"the server's token; default: the environment variable {TOKEN_VARIABLE}, if it is set",
        free=True,
        secret=True,
    )
    ca_file: str | None = opt(
        None, "https: certificates (PEM) that the server's must be signed by; default: the system's", free=True
    )
    connect_timeout_s: float = opt(10.0, "seconds in which a connection must stand", free=True)
    timeout_s: float = opt(
        600.0, "seconds without a byte of the answer after which the request is sent again", free=True
    )
    retry_s: float = opt(
        300.0,
        "seconds after the first failure in which a server that cannot be reached is asked again; then the run stops",
        free=True,
    )


@dataclass
class RemoteRewardConfig(RemoteConfig):
    """How the server of env.url is asked. All of it, with what is sent again, happens within env.timeout_s."""

    api: str = opt(
        "fastppo",
        "what it speaks: fastppo (python -m trainers.serve_critic: the sampled ids, and what the prompt's row carries) "
        "or openrlhf (JSON: query, prompts, labels -> rewards)",
        choices=("fastppo", "openrlhf"),
    )
    label_key: str = opt(
        "answer", "openrlhf: key of the prompt's row that is sent as its label; without it: an empty one"
    )
