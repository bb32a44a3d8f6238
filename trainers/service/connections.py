"""Connections that ask for nothing: uvicorn lets them stay, and many of them would leave none for others."""

import asyncio
import resource
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


class Connection(H11Protocol):
    """Ends when a request's head, or the rest of a body that was refused, is late; at once where there are too many.

    How long the body of a request may take is `Gate`'s; how long nothing may be said after an answer is uvicorn's.
    """

    patience_s = 60.0
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2  # of the files that the process may open
    late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > self.most:
            transport.close()
        else:
            self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def _watch(self) -> None:
        answered = self.cycle is None or self.cycle.response_complete
        if not answered or self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._forget()
        elif self.late is None:
            self.late = self.loop.call_later(self.patience_s, self.transport.close)

    def _forget(self) -> None:
        if self.late is not None:
            self.late.cancel()
            self.late = None


def connections(patience_s: float) -> type[Connection]:
    """For uvicorn, which makes one for each connection."""
    return type("Connection", (Connection,), {"patience_s": patience_s})
