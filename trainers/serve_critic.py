"""A critic, a reward, or both as a service for trainers on other machines.

    python -m trainers.serve_critic                                        # the critic of the default run
    python -m trainers.serve_critic value.model_name=/models/rm host=0.0.0.0 token=...
    python -m trainers.serve_critic serve=reward env.name=reward_model env.reward_model.model_name=/models/rm
    torchrun --nproc-per-node 2 -m trainers.serve_critic ...               # one rank listens, all compute

    python -m trainers.ppo value.mode=remote value.url=http://127.0.0.1:8900

It ends on SIGTERM or Ctrl-C, and with code 1 when it cannot be sure of its weights: a supervisor that starts the same
command again brings it back to its last checkpoint, and its client to where it was. docs/critic_service.md says more.
"""

if __name__ == "__main__":  # before torch is imported, so that --help and a mistyped key answer at once
    from trainers.service.launch import launch

    raise SystemExit(launch(__doc__))

import logging
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import torch
import uvicorn
from transformers import AutoTokenizer

from trainers import dist
from trainers.backbone import name_of, pick_device, pick_dtype, pick_param_dtype
from trainers.config_service import ServeConfig
from trainers.environments import Environment, make_environment
from trainers.megatron_rules import check_device_of
from trainers.models import resolve_model
from trainers.policy.build import stored_dtype
from trainers.reward_model_rules import is_used
from trainers.service.app import make_app
from trainers.service.connections import connections
from trainers.service.critic import Critic, read_current
from trainers.service.scorer import Scorer
from trainers.service.served import Served
from trainers.service.worker import Worker
from trainers.service_rules import served_settings, token_of
from trainers.value.build import OwnValue, make_value


class Server:
    """Everything that is served, and the process around it. `run()` returns when it has been told to end."""

    def __init__(self, config: ServeConfig):
        dist.start(config.cluster)
        self.config = config
        self.socket: socket.socket | None = None
        dist.main_does(self._listen)
        if config.cluster.num_threads is not None:
            torch.set_num_threads(config.cluster.num_threads)
        self.device = pick_device(config.cluster.device)
        if config.serve != "reward":
            check_device_of("value", config.value, self.device.type)
        # What "auto" once measured or meant holds for as long as the critic is trained.
        known = dist.main_does(lambda: read_current(self.run_dir)) if config.serve != "reward" else None
        self.known = known["facts"] if known else {}
        wanted = self.known.get("dtype", "auto") if config.dtype == "auto" else config.dtype
        self.dtype = dist.main_does(lambda: pick_dtype(wanted, self.device))
        environment = make_environment(config.env)
        critic, path = self._critic(environment)
        scorer, names = None, {} if path is None else {"value": config.value.model_name or environment.default_model}
        tokenizer = None if path is None else AutoTokenizer.from_pretrained(path)
        if config.serve != "value":
            scorer = self._scorer(environment, tokenizer)
            names["reward"], tokenizer = ", ".join(scorer.names), tokenizer or scorer.tokenizer
        self.served = Served(critic, scorer, config.limits, names=names, tokenizer=tokenizer)
        idle_s = config.cluster.rank_timeout_s / 4
        self.worker = Worker(critic, scorer, config.limits, idle_s=idle_s)

    @property
    def run_dir(self) -> Path:
        return Path(self.config.run_dir).expanduser()

    def _listen(self) -> None:
        self.socket = listen(self.config)

    def _critic(self, environment: Environment) -> tuple[Critic | None, Path | str | None]:
        cfg = self.config.value
        if self.config.serve == "reward":
            return None, None
        name = environment.default_model if cfg.model_name is None else cfg.model_name
        path = dist.together(lambda: resolve_model(name, key="value.model_name"))[dist.rank()]
        wanted = stored_dtype(cfg, self.dtype)
        wanted = self.known.get("param_dtype", "auto") if wanted == "auto" else wanted
        param_dtype = pick_param_dtype(wanted, self.dtype, self.device, "value")

        def build() -> OwnValue:
            how = {"device": self.device, "dtype": self.dtype, "param_dtype": param_dtype}
            return make_value(path, cfg, self.config.cluster, score_batch=self.config.infer_batch_size, **how)

        facts = {f"value.{key}": setting for key, setting in served_settings(cfg, fixed=True).items()}
        facts |= {"value.model_name": name, "dtype": name_of(self.dtype), "param_dtype": name_of(param_dtype)}
        return Critic(build, self.run_dir, facts), path

    def _scorer(self, environment: Environment, tokenizer: Any) -> Scorer:
        env = self.config.env
        reads = None
        if is_used(env):
            reads = AutoTokenizer.from_pretrained(resolve_model(env.reward_model.model_name))
        if hasattr(environment, "bind"):
            name = self.config.value.model_name or environment.default_model
            bound = tokenizer or reads or AutoTokenizer.from_pretrained(resolve_model(name, key="value.model_name"))
            environment.bind(bound, device=self.device, dtype=self.dtype)
        return Scorer(environment, env, reads)

    def run(self) -> None:
        """Answer until SIGTERM or SIGINT. Raises what leaves the weights in doubt."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: self.worker.stop())
        if not dist.is_main():
            return self.worker.run()
        http = uvicorn.Server(self._http())
        thread = threading.Thread(target=http.run, kwargs={"sockets": [self.socket]}, name="http", daemon=True)
        thread.start()
        while not http.started and thread.is_alive():
            time.sleep(0.01)
        if not http.started:
            raise RuntimeError("no request can be taken: see above")
        print(f"serving   {self.describe()} on {self.url}", flush=True)
        try:
            self.worker.run()
        finally:
            http.should_exit = True
            thread.join(timeout=10)

    def _http(self) -> uvicorn.Config:
        config, tls = self.config, self.config.tls
        app = make_app(self.served, self.worker, token=token_of(config.token), limits=config.limits)
        return uvicorn.Config(
            app,
            http=connections(config.limits.body_timeout_s),
            backlog=128,  # asyncio accepts as many at a time, and each needs a file
            log_level="warning",
            access_log=False,
            ssl_certfile=tls.certfile and Path(tls.certfile).expanduser(),
            ssl_keyfile=tls.keyfile and Path(tls.keyfile).expanduser(),
            timeout_graceful_shutdown=5,
            timeout_keep_alive=75,  # longer than clients keep a connection, so that they are the ones to end it
        )

    @property
    def url(self) -> str:
        assert self.socket is not None
        host, port = self.socket.getsockname()[:2]
        scheme = "http" if self.config.tls.certfile is None else "https"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"

    def describe(self) -> str:
        words = [f"{part} {name}" for part, name in self.served.names.items()]
        if (critic := self.served.critic) is not None and critic.run is not None:
            words.append(f"run {critic.run} at step {critic.step}")
        return ", ".join(words)


def listen(config: ServeConfig) -> socket.socket:
    """Before a model is loaded: a port that is taken is a message at once.

    Raises:
        OSError: the address cannot be had; names the settings.
    """
    try:
        family, *_, address = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0]
        # asyncio turns off Nagle's algorithm, which would hold each answer back for 40 ms, only where TCP is named.
        found = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        return found
    except OSError as error:
        raise OSError(f"host={config.host} port={config.port}: cannot listen there: {error}") from error


def serve(config: ServeConfig) -> Server:
    """The server, its models loaded and its checkpoint read."""
    logging.basicConfig(format="%(levelname)s %(message)s")
    return Server(config)
