"""How a critic server bears many clients at once: requests a second, errors, and how long an answer takes.

    python runs/critic_load.py --clients 64 --seconds 60                    # starts a server of the tiny model
    python runs/critic_load.py --clients 8 value.model_name=smollm2-135m    # ... of another, with any setting of it
    python runs/critic_load.py --url http://127.0.0.1:8900 --vocab 49152    # asks one that runs

Each client keeps one connection and sends its next request when it has its answer. An answer that is not 200, or whose
values are not those that the same request got when the server was idle, is an error. Clients and an own server share
this machine. One line of JSON is printed.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException
from typing import Any
from urllib.parse import urlsplit

import torch

from trainers.config_remote import TOKEN_VARIABLE
from trainers.service.wire import decode, encode

TOLERANCE = 1e-5  # of values: beside others a sequence is padded differently


@contextmanager
def own_server(settings: Sequence[str]) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        ours = ["config=ppo_copy", "port=0", f"run_dir={folder}", "cluster.device=cpu", "cluster.num_threads=1"]
        command = [sys.executable, "-m", "trainers.serve_critic", *ours, *settings]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            for line in process.stdout:
                if found := re.search(r"serving .* on (\S+)$", line):
                    yield found[1]
                    break
            else:
                raise SystemExit("the server did not start")
        finally:
            process.terminate()
            process.wait(timeout=30)


def bodies(count: int, sequences: int, longest: int, vocab: int) -> list[bytes]:
    """Requests of `sequences` random sequences of 2 to `longest` tokens, all but the first sampled."""
    made = []
    for seed in range(count):
        draw = torch.Generator().manual_seed(seed)
        lengths = torch.randint(2, longest + 1, (sequences,), generator=draw)
        mask = torch.ones(int(lengths.sum()), dtype=torch.bool)
        mask[lengths.cumsum(0) - lengths] = False
        tokens = torch.randint(0, vocab, mask.shape, generator=draw)
        made.append(encode({}, {"tokens": tokens, "lengths": lengths, "mask": mask}))
    return made


class Asker:
    """One client."""

    def __init__(self, url: str):
        parts = urlsplit(url)
        assert parts.scheme == "http" and parts.hostname, "expected http://HOST:PORT"
        self.connection = HTTPConnection(parts.hostname, parts.port, timeout=60)
        token = os.environ.get(TOKEN_VARIABLE)
        self.headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self.seconds: list[float] = []
        self.errors: list[str] = []

    def values(self, body: bytes) -> torch.Tensor:
        self.connection.request("POST", "/infer", body, self.headers)
        answer = self.connection.getresponse()
        content = answer.read()
        if answer.status != 200:
            raise ValueError(f"{answer.status}: {content[:200]!r}")
        return decode(content)[1]["values"]

    def ask(self, bodies: Sequence[bytes], expected: Sequence[torch.Tensor], first: int, end: threading.Event) -> None:
        number = first
        while not end.is_set():
            body, wanted = bodies[number % len(bodies)], expected[number % len(bodies)]
            start = time.perf_counter()
            try:
                found = self.values(body)
                if found.shape != wanted.shape or not torch.allclose(found, wanted, rtol=0, atol=TOLERANCE):
                    raise ValueError("other values than when the server was idle")
            except (OSError, HTTPException, ValueError) as error:
                self.errors.append(f"{type(error).__name__}: {error}")
                self.connection.close()  # it opens again with the next request
            self.seconds.append(time.perf_counter() - start)
            number += 1


def load(url: str, *, clients: int, seconds: float, sequences: int, longest: int, vocab: int) -> dict[str, Any]:
    asked = bodies(32, sequences, longest, vocab)
    idle = Asker(url)
    expected = [idle.values(body) for body in asked]
    idle.connection.close()
    askers, end = [Asker(url) for _ in range(clients)], threading.Event()
    threads = [
        threading.Thread(target=asker.ask, args=(asked, expected, i, end), daemon=True)
        for i, asker in enumerate(askers)
    ]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    time.sleep(seconds)
    end.set()
    for thread in threads:
        thread.join(timeout=120)
    took = time.perf_counter() - start
    times = sorted(1e3 * each for asker in askers for each in asker.seconds)
    errors = [error for asker in askers for error in asker.errors]
    cuts = statistics.quantiles(times, n=100)
    return {
        "clients": clients, "seconds": round(took, 1), "sequences": sequences, "longest": longest,
        "requests": len(times), "requests_per_s": round(len(times) / took, 1), "errors": len(errors),
        "p50_ms": round(cuts[49], 1), "p99_ms": round(cuts[98], 1), "max_ms": round(times[-1], 1),
        "idlest_client": min(len(asker.seconds) for asker in askers), "first_errors": errors[:3],
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--sequences", type=int, default=4, help="of a request")
    parser.add_argument("--longest", type=int, default=32, help="tokens of a sequence, at most")
    parser.add_argument("--vocab", type=int, default=16, help="ids are below it")
    parser.add_argument("--url", help="of a server that runs; its token is read from FASTPPO_TOKEN")
    parser.add_argument("settings", nargs="*", help="key=value of the server that is started")
    options = vars(parser.parse_args(argv))
    settings, url = options.pop("settings"), options.pop("url")
    if url is not None:
        result = load(url, **options)
    else:
        with own_server(settings) as url:
            result = load(url, **options)
    print(json.dumps(result), flush=True)
    return result


if __name__ == "__main__":
    raise SystemExit(1 if main()["errors"] else 0)
