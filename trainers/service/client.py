"""Requests to a critic or reward server.

What fails on its way is sent again for a bounded time. Every route bears that: train requests are numbered, and the
others change nothing, or the same twice. Errors name the server and the setting.
"""

import json
import ssl
import threading
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import httpx
from torch import Tensor

from trainers.config_remote import RemoteConfig
from trainers.run import TrainingError
from trainers.service.wire import MEDIA_TYPE, Refused, decode, dumps, loads
from trainers.service_rules import token_of

FIRST_PAUSE_S, LONGEST_PAUSE_S, LAST_WORD_S = 0.1, 5.0, 5.0
AGAIN = (408, 429, 502, 503)  # the server, or what stands before it, may answer a little later


class ServerError(TrainingError):
    """A server that cannot be reached, or that refused a request (`status`, and what it said beside the reason)."""

    def __init__(self, message: str, status: int | None = None, facts: Mapping[str, Any] | None = None):
        super().__init__(message)
        self.status, self.facts = status, dict(facts or {})


class Client:
    """Args:
    url: the setting's value; with a path, requests go to that path and none is added.
    key: the block of the setting, "value" or "env", for errors.
    again: statuses after which the same request may go well.
    """

    def __init__(self, url: str, cfg: RemoteConfig, *, key: str, again: Collection[int] = AGAIN):
        self.address, self.url, self.cfg, self.key, self.again = url, url.rstrip("/"), cfg, key, again
        self.closing = threading.Event()  # set: nothing is sent again
        self.http = self._connections(cfg.timeout_s)

    def _connections(self, timeout_s: float) -> httpx.Client:
        token = token_of(self.cfg.token)
        return httpx.Client(
            headers={} if token is None else {"Authorization": f"Bearer {token}"},
            timeout=httpx.Timeout(timeout_s, connect=min(self.cfg.connect_timeout_s, timeout_s)),
            verify=self._certificates(),
            trust_env=False,  # a proxy of the environment is for other hosts than these
        )

    def _certificates(self) -> ssl.SSLContext | bool:
        if not self.url.startswith("https://"):
            return False
        if self.cfg.ca_file is None:
            return ssl.create_default_context()
        try:
            return ssl.create_default_context(cafile=Path(self.cfg.ca_file).expanduser())
        except (OSError, ssl.SSLError) as error:
            raise ValueError(f"{self.key}.remote.ca_file={self.cfg.ca_file}: {error}") from error

    def close(self) -> None:
        """What is under way in another thread fails at once."""
        self.closing.set()
        self.http.close()

    def last_word(self, route: str, message: Mapping[str, Any]) -> str | None:
        """A JSON request after close(), tried for a few seconds; why it failed, if it did. 409, that what it asks for
        does not apply, is as good as done."""
        reason, status = None, None
        with self._connections(LAST_WORD_S) as http:
            for _ in range(3):
                reason, status, _ = self._problem(lambda: http.post(f"{self.url}/{route}", json=dict(message)))
                if reason is None or (isinstance(status, int) and status not in self.again):
                    break
                time.sleep(FIRST_PAUSE_S)
        return None if status == 409 else reason

    def get(self, route: str, *, retry: bool = True, **parameters: Any) -> dict[str, Any]:
        return self._json(route, self._send(lambda: self.http.get(f"{self.url}/{route}", params=parameters), retry))

    def post(self, route: str, message: Mapping[str, Any]) -> dict[str, Any]:
        """A JSON request; `route` "" is the url itself, as it was given."""
        where = f"{self.url}/{route}" if route else self.address
        headers = {"Content-Type": "application/json"}
        return self._json(route, self._send(lambda: self.http.post(where, content=dumps(message), headers=headers)))

    def exchange(self, route: str, body: bytes) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """A safetensors request."""
        headers = {"Content-Type": MEDIA_TYPE}
        answer = self._send(lambda: self.http.post(f"{self.url}/{route}", content=body, headers=headers))
        try:
            return decode(answer.content)
        except Refused as error:
            raise ServerError(f"{self.who}: its answer to {route} cannot be read: {error}") from error

    def _json(self, route: str, answer: httpx.Response) -> dict[str, Any]:
        try:
            return loads(answer.content)
        except Refused as error:
            raise ServerError(
                f"{self.who}: its answer to {route or 'the request'} cannot be read: {error}; got {answer.text[:200]!r}"
            ) from error

    @property
    def who(self) -> str:
        return f"the server {self.url} ({self.key}.url)"

    def _send(self, send: Callable[[], httpx.Response], retry: bool = True) -> httpx.Response:
        first_failure, pause = None, FIRST_PAUSE_S
        while True:
            reason, status, facts = self._problem(send)
            if reason is None:
                assert isinstance(status, httpx.Response)
                return status
            if isinstance(status, int) and status not in self.again:
                raise ServerError(f"{self.who} refused the request ({status}): {reason}", status, facts)
            # From the first failure on: that one may have taken timeout_s.
            first_failure = time.monotonic() if first_failure is None else first_failure
            if not retry or self.closing.is_set() or time.monotonic() - first_failure + pause > self.cfg.retry_s:
                limit = f" within {self.key}.remote.retry_s={self.cfg.retry_s:g} seconds" if retry else ""
                raise ServerError(f"{self.who} did not answer{limit}: {reason}")
            if pause == FIRST_PAUSE_S:
                limit = f"up to {self.cfg.retry_s:g} seconds ({self.key}.remote.retry_s)"
                print(f"waiting {limit} for {self.who}: {reason}", flush=True)
            self.closing.wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def _problem(
        self, send: Callable[[], httpx.Response]
    ) -> tuple[str | None, httpx.Response | int | None, dict[str, Any]]:
        """(why there is no good answer, its status if there is one, what it said); or (None, the answer, {})."""
        try:
            answer = send()
        except httpx.TimeoutException as error:
            limit = "connect_timeout_s" if isinstance(error, httpx.ConnectTimeout) else "timeout_s"
            seconds = getattr(self.cfg, limit)
            return f"no answer within {self.key}.remote.{limit}={seconds:g} seconds", None, {}
        except (httpx.TransportError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and not self.closing.is_set():
                raise
            return f"{type(error).__name__}: {error}", None, {}
        if answer.status_code == 200:
            return None, answer, {}
        try:
            facts = json.loads(answer.content)
            reason = str(facts.pop("error", None) or facts)
        except (ValueError, AttributeError):
            facts, reason = {}, answer.text[:200] or answer.reason_phrase
        if answer.status_code == 401:
            reason += f"; set {self.key}.remote.token"
        return reason, answer.status_code, facts
