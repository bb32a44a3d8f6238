"""The command that starts the service. As in trainers/launch.py, torch is imported once the settings are checked."""

import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trainers import service_rules
from trainers.cli import config_yaml, exit_on_error, parse
from trainers.config import PPOTrainerConfig
from trainers.config_checks import (
    ConfigError,
    missing_decay,
    out_of_range,
    without_effect,
    wrong_betas,
    wrong_choices,
    wrong_types,
)
from trainers.config_service import ServeConfig, of_trainer
from trainers.settings import flatten, known_keys, load_config, read_yaml

PROG = "python -m trainers.serve_critic"


@dataclass(frozen=True)
class ServicePlan:
    """What will be served, in words."""

    config: ServeConfig

    def describe(self) -> str:
        config = self.config
        value = config.value.model_name or f"the model of env.name={config.env.name}"
        reward = ", ".join(config.env.rewards) or config.env.name
        parts = {"value": f"the critic {value}", "reward": f"the reward {reward}"}
        wanted = ("value", "reward") if config.serve == "both" else (config.serve,)
        kept = "" if config.serve == "reward" else f", checkpoints in {config.run_dir}"
        return f"service   {' and '.join(parts[name] for name in wanted)}{kept}"


def check(config: ServeConfig) -> ServicePlan:
    """Raises: ConfigError: any problem that the settings alone show; all of them, one a line."""
    groups: tuple[tuple[Any, ...], ...] = (
        (wrong_types,),
        (wrong_choices, out_of_range, lambda c: wrong_betas("value", c.value)),
        (
            service_rules.served_needed,
            lambda c: missing_decay("value", c.value),
            lambda c: without_effect(c, service_rules.served_unused(c)),
        ),
    )
    for group in groups:
        if problems := [problem for rule in group for problem in rule(config)]:
            raise ConfigError("\n".join(problems))
    return ServicePlan(config)


def load(source: str | None, overrides: Sequence[str], config_class: type) -> ServeConfig:
    """The settings of a server's own file or of a training run's, then `overrides`."""
    own, trainers = known_keys(config_class), known_keys(PPOTrainerConfig)
    settings = {}
    if source is not None:
        settings = of_trainer(dict(flatten(read_yaml(source), {**trainers, **own}, where=f"{source}: ")), trainers, own)
    return load_config(settings, overrides, config_class)


def launch(description: str, argv: list[str] | None = None) -> int:
    """0 when it was told to end, 2 for what cannot be served, 1 when it ended by itself."""
    if os.environ.get("RANK", "0") != "0":
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (for as long as the process lives)
    texts = sys.argv[1:] if argv is None else argv
    arguments = parse(texts, ServeConfig, prog=PROG, description=description, check=check, load=load)
    if arguments.doctor:
        with exit_on_error(PROG):
            raise ConfigError("--doctor looks at a step of a trainer; a service makes none of its own")
    if arguments.print_config:
        print(config_yaml(arguments.config), end="")
        return 0
    print(arguments.plan.describe(), flush=True)
    if arguments.dry_run:
        return 0
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as in trainers/launch.py
    from trainers.extras import require

    try:
        for module in ("fastapi", "fastapi_offline", "uvicorn", "prometheus_client"):
            require(module, extra="server")
        from trainers import dist
        from trainers.run import TrainingError
        from trainers.serve_critic import serve
        from trainers.service.wire import Refused

        try:
            server = serve(arguments.config)
        except (TrainingError, Refused) as error:
            raise ValueError(str(error)) from error
    except (ValueError, TypeError, OSError, ImportError) as error:
        print(f"{PROG}: error: {error}", file=sys.stderr)
        return 2
    try:
        server.run()
    except BaseException:  # a reward's sys.exit(0) is no reason to end with 0
        traceback.print_exc()
        print(f"{PROG}: error: it ends, since what failed leaves its state in doubt: start it again", file=sys.stderr)
        sys.stdout.flush()
        os._exit(1)  # other threads may hold the process
    dist.stop()
    return 0
