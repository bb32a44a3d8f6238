"""A real critic or reward server for tests: `python -m trainers.serve_critic` in a process of its own."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil

START_SECONDS = 60


class ServerProcess:
    """Runs until the `with` ends. `restart()` is what a supervisor does: the same command, on the same port.

    Args: starter: the file that starts the module, such as tests/megatron_cpu.py, under torchrun.
    """

    def __init__(
        self,
        folder: Path,
        *settings: str,
        ranks: int = 1,
        env: dict[str, str] | None = None,
        starter: str | None = None,
    ):
        self.folder, self.settings, self.ranks, self.env = folder, list(settings), ranks, env or {}
        self.starter = starter
        self.log = folder / "server.log"
        self.port = 0
        self.process: subprocess.Popen | None = None

    def __enter__(self) -> "ServerProcess":
        self.folder.mkdir(parents=True, exist_ok=True)
        self.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.end(signal.SIGKILL)

    def start(self) -> None:
        python = [sys.executable, "-m"]
        if self.ranks > 1:
            python += ["torch.distributed.run", "--standalone", f"--nproc-per-node={self.ranks}"]
            python += ["-m"] if self.starter is None else [self.starter]
        ours = [f"port={self.port}", f"run_dir={self.folder / 'critic'}", "cluster.device=cpu", "cluster.num_threads=1"]
        env = {**os.environ, "OMP_NUM_THREADS": "1", **self.env}
        before = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("a") as log:
            command = [*python, "trainers.serve_critic", *ours, *self.settings]
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=env, start_new_session=True)
        deadline = time.monotonic() + START_SECONDS
        while not (found := re.search(r"serving .* on (\S+):(\d+)$", self.log.read_text()[before:], re.MULTILINE)):
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)
        self.base, self.port = found[1], int(found[2])

    @property
    def url(self) -> str:
        return f"{self.base}:{self.port}"

    def end(self, number: int = signal.SIGTERM) -> int:
        """Signal the process, and those that it started; its exit code."""
        assert self.process is not None
        if self.process.poll() is None:
            # torchrun's ranks have sessions of their own, which a signal to its group does not reach; unless it is
            # killed, it ends them itself.
            ranks = psutil.Process(self.process.pid).children(recursive=True)
            os.killpg(self.process.pid, number)
            for rank in ranks if number == signal.SIGKILL else ():
                with suppress(psutil.NoSuchProcess):
                    rank.kill()
        return self.process.wait(timeout=60)

    def restart(self, number: int = signal.SIGKILL) -> None:
        self.end(number)
        self.start()

    def get(self, route: str, **options: Any) -> httpx.Response:
        return httpx.get(f"{self.url}/{route}", timeout=60, **options)

    def post(self, route: str, body: bytes, **options: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/{route}", content=body, timeout=60, **options)


class Supervisor(threading.Thread):
    """Kills the server at each of `steps` of the run that `metrics` tells of, and starts it again."""

    def __init__(self, server: ServerProcess, metrics: Path, steps: list[int]):
        super().__init__(daemon=True)
        self.server, self.metrics, self.steps, self.kills = server, metrics, steps, 0

    def run(self) -> None:
        for step in self.steps:
            while not self.metrics.exists() or self.metrics.read_text().count("\n") < step:
                time.sleep(0.01)
            self.server.restart()
            self.kills += 1
