"""The routes of the service, and what stands before them: the token, limits on bodies, and Prometheus metrics.

Whatever can be wrong with a request is found before it is queued. It is then answered with 4xx and the reason, and has
changed nothing.
"""

import asyncio
import hashlib
import hmac
import logging
import math
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import psutil
import torch
from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import PlainTextResponse
from fastapi.security import HTTPBearer
from fastapi_offline import FastAPIOffline
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import fastppo
from trainers.config_service import LimitsConfig
from trainers.service import messages
from trainers.service.messages import (
    InferHeader,
    LoadRequest,
    ReleaseRequest,
    RewardAnswer,
    RewardQuery,
    SaveRequest,
    TrainHeader,
    check_tensors,
    parse,
    sequences,
)
from trainers.service.served import Served
from trainers.service.wire import MEDIA_TYPE, Refused, decode, dumps, loads
from trainers.service.worker import Inference, Worker
from trainers.service_rules import is_own_address

PROTOCOL = 1
OPEN = ("/health", "/docs", "/openapi.json")  # readable without a token: they say nothing
ASSETS = "/static-offline-docs/"  # of /docs
logger = logging.getLogger(__name__)

BINARY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}},
    }
}


class Metrics:
    """What Prometheus reads under /metrics."""

    def __init__(self, served: Served, worker: Worker):
        self.registry = CollectorRegistry()
        labels = {"registry": self.registry, "namespace": "fastppo"}
        self.requests = Counter("requests", "Requests by route and status.", ["route", "status"], **labels)
        self.seconds = Histogram("request_seconds", "From the first byte to the answer.", ["route"], **labels)
        self.tokens = Counter("tokens", "Tokens of sequences that were asked about.", ["route"], **labels)
        gauges: dict[str, tuple[str, Callable[[], float]]] = {
            "waiting_requests": ("Requests that wait to be computed.", lambda: worker.waiting),
            "resident_memory_bytes": ("Memory of the process.", lambda: psutil.Process().memory_info().rss),
        }
        if served.critic is not None:
            gauges["critic_step"] = ("Train requests that the critic has applied.", lambda: served.critic.step)
        for name, (help, read) in gauges.items():
            Gauge(name, help, **labels).set_function(read)


class Gate:
    """Before a body is read: who asks, and how large a body is announced. While it is read: how large it becomes, and
    how long that takes."""

    def __init__(self, app: ASGIApp, token: str | None, limits: LimitsConfig, metrics: Metrics):
        self.app, self.token, self.limits, self.metrics = app, token, limits, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        start, route = time.monotonic(), scope["path"]
        status = 0

        async def seen(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            refused = self._refusal(scope)
            if refused is None:
                await self.app(scope, self._limited(receive), seen)
            else:
                await answer_refused(refused)(scope, receive, seen)
        except asyncio.CancelledError:  # the server ends, and the body has not arrived yet
            if status:
                raise
            await answer_refused(Refused("the server is ending", 503))(scope, receive, seen)
        except Exception as error:
            logger.exception("%r failed", route, exc_info=error)
            if status:  # the answer has begun: its connection ends
                raise
            await answer_refused(failure(error))(scope, receive, seen)
        finally:
            known = route.strip("/") in ROUTES
            label = route.strip("/") if known else "other"
            self.metrics.requests.labels(label, str(status)).inc()
            self.metrics.seconds.labels(label).observe(time.monotonic() - start)

    def _refusal(self, scope: Scope) -> Refused | None:
        headers = dict(scope["headers"])
        if self.token is None:
            if (refused := from_elsewhere(headers)) is not None:
                return refused
        elif scope["path"] not in OPEN and not scope["path"].startswith(ASSETS):
            given = headers.get(b"authorization", b"")
            if not hmac.compare_digest(given, f"Bearer {self.token}".encode()):
                return Refused("expected the header `Authorization: Bearer <token>` with the server's token", 401)
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or len(length) > 20:
            return Refused("Content-Length: expected a number", 400)
        return self._too_large(int(length))

    def _too_large(self, size: int) -> Refused | None:
        most = self.limits.max_body_mb
        if size <= most * 1e6:
            return None
        return Refused(f"the body is larger than limits.max_body_mb={most:g}", 413)

    def _limited(self, receive: Receive) -> Receive:
        size, deadline, complete = 0, time.monotonic() + self.limits.body_timeout_s, False

        async def limited() -> Message:
            nonlocal size, complete
            if complete:
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), deadline - time.monotonic())
            except asyncio.TimeoutError:
                seconds = self.limits.body_timeout_s
                raise Refused(f"the body did not arrive within limits.body_timeout_s={seconds:g} s", 408) from None
            complete = not message.get("more_body", False)
            size += len(message.get("body", b""))
            if (refused := self._too_large(size)) is not None:
                raise refused
            return message

        return limited


ROUTES = (
    "infer",
    "train",
    "save",
    "load",
    "release",
    "info",
    "health",
    "metrics",
    "get_reward",
    "docs",
    "openapi.json",
)


def from_elsewhere(headers: dict[bytes, bytes]) -> Refused | None:
    """Without a token: a browser on this machine may run pages of other hosts. They must not reach the service, neither
    by its address (Origin) nor by a name of theirs that leads to it (Host)."""
    for name, prefix in (("host", "//"), ("origin", "")):
        given = headers.get(name.encode())
        if given is None:
            continue
        try:
            host = urlsplit(prefix + given.decode("latin-1")).hostname
        except ValueError:
            host = None
        if host is None or not is_own_address(host):
            return Refused(f"{name}: without a token only this machine's own addresses are answered", 403)
    return None


def failure(error: Exception) -> Refused:
    """Something that should not have happened. What a library says after its first line is for the log."""
    return Refused(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}", 500)


def answer_refused(refused: Refused) -> Response:
    content = dumps({"error": str(refused), **refused.facts})  # ASCII, whatever it quotes
    headers = {"Connection": "close"} if refused.status == 408 else None  # the rest may never come
    return Response(content, refused.status, headers, media_type="application/json")


def make_app(served: Served, worker: Worker, *, token: str | None, limits: LimitsConfig) -> FastAPI:
    app = FastAPIOffline(
        title="fastppo critic and reward service",
        version=fastppo.__version__,
        redoc_url=None,
        # Gate asks for the token; this gives the OpenAPI page a field for it.
        dependencies=[Depends(HTTPBearer(auto_error=False))] if token else [],
    )
    metrics = Metrics(served, worker)
    app.add_middleware(Gate, token=token, limits=limits, metrics=metrics)

    @app.exception_handler(Refused)
    async def refused(request: Request, error: Refused) -> Response:
        return answer_refused(error)

    @app.exception_handler(ClientDisconnect)
    async def gone(request: Request, error: ClientDisconnect) -> Response:
        return answer_refused(Refused("the client left before its body had arrived", 400))  # nobody reads it

    async def asked(request: Request, model: type) -> Any:
        body = await request.body()
        return await run_in_threadpool(lambda: parse(model, loads(body)))

    async def compute(name: str, *arguments: Any) -> Any:
        return await asyncio.wrap_future(worker.submit(name, *arguments))

    def binary(content: bytes) -> Response:
        return Response(content, media_type=MEDIA_TYPE)

    def json_route(model: type) -> dict[str, Any]:
        schema = {"schema": model.model_json_schema()}  # type: ignore[attr-defined]
        return {"requestBody": {"required": True, "content": {"application/json": schema}}}

    @app.get("/health")
    async def health() -> dict[str, str]:
        """Whether requests are taken."""
        return {"status": "ok"}

    @app.get("/info")
    async def info(vocab: int | None = None) -> dict[str, Any]:
        """What is served, and the critic's run and step. `vocab_digest` is of the tokens with an id below `vocab`."""
        return {"protocol": PROTOCOL, "version": fastppo.__version__} | await run_in_threadpool(served.info, vocab)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def prometheus() -> Response:
        """Counters and times, as Prometheus reads them."""
        return Response(generate_latest(metrics.registry), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.post("/infer", openapi_extra=BINARY, response_class=Response)
    async def infer(request: Request) -> Response:
        """Values of every sampled token and of what follows the last one, rewards of every sequence, or both.

        Body and answer are safetensors files with a JSON header. Tensors: tokens [T] int64, lengths [B] int64, mask [T]
        bool. Answered: values [T] and next_values [B] float32; rewards float64, back to back, reward_counts [B] int64.
        """
        inference = await run_in_threadpool(read_inference, served, limits, await request.body())
        metrics.tokens.labels("infer").inc(inference.batch.tokens.numel())
        return binary(await run_in_threadpool(messages.inferred, await compute("infer", inference)))

    @app.post("/train", openapi_extra=BINARY, response_class=Response)
    async def train(request: Request) -> Response:
        """One optimizer step of the critic, number `id` of its run; sent again it is answered as before.

        Tensors: those of infer, and values [T] (the old ones) and returns [T] float32.
        """
        body = await request.body()
        header, batch = await run_in_threadpool(read_training, served, limits, body)
        metrics.tokens.labels("train").inc(batch.tokens.numel())
        answer = await compute("train", header, hashlib.sha256(body).hexdigest(), batch)
        return binary(messages.trained(header.id, answer))

    @app.post("/save", openapi_extra=json_route(SaveRequest))
    async def save(request: Request) -> dict[str, Any]:
        """A checkpoint of the critic at this very step, written whole or not at all."""
        wanted = await asked(request, SaveRequest)
        served.needs_critic()
        await compute("save", wanted)
        return {"run": wanted.run, "step": wanted.step}

    @app.post("/load", openapi_extra=json_route(LoadRequest))
    async def load(request: Request) -> dict[str, Any]:
        """The critic becomes that of a run at one of its checkpoints, or at step 0 as it was before training."""
        wanted = await asked(request, LoadRequest)
        served.needs_critic()
        await compute("load", wanted)
        return {"run": wanted.run, "step": wanted.step}

    @app.post("/release", openapi_extra=json_route(ReleaseRequest))
    async def release(request: Request) -> dict[str, Any]:
        """The run is over: another may have the critic."""
        wanted = await asked(request, ReleaseRequest)
        served.needs_critic()
        await compute("release", wanted.run)
        return {"run": None}

    @app.post("/get_reward", openapi_extra=json_route(RewardQuery))
    async def get_reward(request: Request) -> RewardAnswer:
        """Rewards of texts, as OpenRLHF asks for them; with serve=reward."""
        query = await asked(request, RewardQuery)
        if served.critic is not None:
            raise Refused("texts are scored by a server that was started with serve=reward", 404)
        inference = await run_in_threadpool(read_query, served, limits, query)
        answer = await compute("infer", inference)
        return RewardAnswer(rewards=[math.fsum(values) for values in answer.rewards])

    return app


def read_inference(served: Served, limits: LimitsConfig, body: bytes) -> Inference:
    raw, tensors = decode(body)
    header = parse(InferHeader, raw)
    served.needs(header.want)
    check_tensors(tensors, messages.INFER)
    batch = sequences(tensors, **served.bounds(header.want), most=limits.max_sequences)
    samples = []
    if "rewards" in header.want:
        if header.samples is None or len(header.samples) != len(batch):
            raise Refused(f"samples: rewards need one for each of the {len(batch)} sequences", 422)
        samples = messages.unpack_samples(batch, header.samples)
    return Inference(header.want, batch, samples, header.run, header.step)


def read_training(served: Served, limits: LimitsConfig, body: bytes) -> tuple[TrainHeader, Any]:
    raw, tensors = decode(body)
    header = parse(TrainHeader, raw)
    served.needs_critic()
    check_tensors(tensors, messages.TRAIN)
    return header, sequences(tensors, **served.bounds(["values"]), most=limits.max_sequences)


def read_query(served: Served, limits: LimitsConfig, query: RewardQuery) -> Inference:
    assert served.scorer is not None
    if len(query.query or query.prompts or ()) > limits.max_sequences:
        raise Refused(f"expected limits.max_sequences={limits.max_sequences} texts at most", 413)
    samples = served.scorer.samples_of(query)
    tensors = messages.pack_samples(samples)
    tensors["mask"] = torch.zeros_like(tensors["mask"])  # texts: nobody says which of their tokens were sampled
    batch = sequences(tensors, **served.bounds(["rewards"]), most=limits.max_sequences)
    return Inference(["rewards"], batch, samples)
