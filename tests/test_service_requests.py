"""What a critic server makes of every request that it might get: refused with a reason and without a trace, or answered
with numbers that do not depend on what else was asked."""

import asyncio
import hmac
import json
import re
import shutil
import socket
import ssl
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import httpx
import pytest
import torch
import uvicorn
from prometheus_client.parser import text_string_to_metric_families

from tests import bodies, tiny
from tests.bodies import answered, file_of, with_header
from tests.served import ServerProcess
from trainers.config_remote import RemoteConfig
from trainers.config_service import LimitsConfig
from trainers.service import app as service_app
from trainers.service import messages
from trainers.service.app import Gate, from_elsewhere
from trainers.service.client import Client, ServerError
from trainers.service.connections import connections
from trainers.service.launch import launch
from trainers.service.wire import Refused, decode, loads
from trainers.service.worker import Inference, Worker
from trainers.service_rules import malformed

TOKEN = "a token, of 1 test"
OWN = {"Authorization": f"Bearer {TOKEN}"}
MOST_SEQUENCES, MOST_MB, BODY_SECONDS = 1024, 8, 1.0
I64 = torch.int64


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """(certificate, key), signed by itself."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    folder = tmp_path_factory.mktemp("tls")
    made = ("-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1")
    names = ("-addext", "subjectAltName=IP:127.0.0.1")
    files = ("-keyout", folder / "key.pem", "-out", folder / "cert.pem")
    subprocess.run(["openssl", "req", "-x509", *made, *names, *files], check=True, capture_output=True)
    return folder / "cert.pem", folder / "key.pem"


@pytest.fixture(scope="module")
def server(tmp_path_factory, certificate):
    cert, key = certificate
    limits = (
        f"limits.max_sequences={MOST_SEQUENCES}",
        f"limits.max_body_mb={MOST_MB}",
        f"limits.body_timeout_s={BODY_SECONDS}",
    )
    settings = ("config=ppo_copy", f"token={TOKEN}", f"tls.certfile={cert}", f"tls.keyfile={key}", *limits)
    with ServerProcess(tmp_path_factory.mktemp("served"), *settings) as process:
        yield process


@pytest.fixture(scope="module")
def trusting(certificate):
    return ssl.create_default_context(cafile=certificate[0])


@pytest.fixture(scope="module")
def http(server, trusting):
    with httpx.Client(base_url=server.url, headers=OWN, verify=trusting, timeout=60) as client:
        yield client


def state(http) -> tuple:
    """Of the critic: its run and step, and what it says of some sequences, which is what its weights are."""
    info = http.get("/info").json()
    return info["run"], info["step"], answered(http.post("/infer", content=bodies.infer()).content)


@pytest.fixture
def unchanged(http):
    before = state(http)
    yield
    assert state(http) == before


@pytest.fixture
def run(http):
    """A critic as before training, of a run of its own."""
    http.post("/load", json={"run": "here", "step": 0}).raise_for_status()
    yield "here"
    http.post("/release", json={"run": "here"}).raise_for_status()


def with_byte(body: bytes, tensor: str, value: int) -> bytes:
    size = int.from_bytes(body[:8], "little")
    start = json.loads(body[8 : 8 + size])[tensor]["data_offsets"][0] + 8 + size
    return body[:start] + bytes([value]) + body[start + 1 :]


def i64(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=I64)


COUNT = bodies.tensors()["tokens"].numel()
SAMPLED = torch.arange(COUNT) == 2  # a position that the policy sampled
UNSAMPLED = torch.arange(COUNT) == 0


def spoiled(where: torch.Tensor, value: float) -> torch.Tensor:
    return torch.where(where, value, 0.5)


META = {"__metadata__": {"fastppo": "{}"}}
EMPTY = {"dtype": "I64", "shape": [0], "data_offsets": [0, 0]}

# name -> (body, status, what the reason says)
NO_FILE = {
    "empty": (b"", 400, "not a safetensors file"),
    "noise": (bytes(range(256)) * 4, 400, "not a safetensors file"),
    "truncated": (bodies.infer()[:-1], 400, "not a safetensors file"),
    "longer than it says": (bodies.infer() + b"\0", 400, "not a safetensors file"),
    "truncated header": (bodies.infer()[:20], 400, "not a safetensors file"),
    "a header of 2^63 bytes": (b"\xff" * 8 + bodies.infer()[8:], 400, "not a safetensors file"),
    "no metadata": (file_of({}), 400, "the safetensors metadata must have the key 'fastppo'"),
    "other metadata": (file_of({"__metadata__": {"a": "b"}}), 400, "must have the key 'fastppo'"),
    "metadata of numbers": (file_of({"__metadata__": {"fastppo": 1}}), 400, "not a safetensors file"),
    "one tensor twice": (
        file_of(f'{{"a":{json.dumps(EMPTY)},"a":{json.dumps(EMPTY)}}}'), 400, "the key 'a' is given twice",
    ),
    "a thousand tensors": (
        file_of(META | {str(i): EMPTY for i in range(1000)}), 400, "more than 256 tensors",
    ),
    "2^63 rows of nothing": (
        file_of(META | {"tokens": EMPTY | {"shape": [0, 2**63]}}), 400, "tensor 'tokens': expected one dimension",
    ),
    "negative shape": (file_of(META | {"tokens": EMPTY | {"shape": [-1]}}), 400, "not a safetensors file"),
    "shape beyond the data": (file_of(META | {"tokens": EMPTY | {"shape": [2**62]}}), 400, "not a safetensors file"),
    "offsets beyond the data": (
        file_of(META | {"tokens": {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]}}), 400, "not a safetensors",
    ),
    "float16": (
        file_of(META | {"tokens": {"dtype": "F16", "shape": [1], "data_offsets": [0, 2]}}, b"\0\0"), 400,
        "tensor 'tokens': expected dtype I64, F32, F64, BOOL, got F16",
    ),
}  # fmt: skip
HEADERS = {
    "no JSON": ("{", 400, "not JSON"),
    "no object": ("[1]", 400, "expected a JSON object, got list"),
    "nested 100000 deep": ('{"want":' + "[" * 100_000, 400, "not JSON"),
    "NaN": ('{"step":NaN}', 400, "NaN is not JSON"),
    "-Infinity": ('{"step":-Infinity}', 400, "-Infinity is not JSON"),
    "5000 digits": ('{"step":' + "1" * 5000 + "}", 400, "not JSON"),
    "a key twice": ('{"step":0,"step":1}', 400, "the key 'step' is given twice"),
    "unknown key": ('{"stop":0}', 422, "stop: Extra inputs are not permitted"),
    "half a character": ('{"\\ud800":0}', 422, "unicode"),
    "a thousand keys": (json.dumps({str(i): i for i in range(1000)}), 422, "header: Value error, expected some of"),
    "a key of a million": (json.dumps({"k" * 1_000_000: 0}), 422, "kkk"),
    "want as text": ('{"want":"values"}', 422, "want: "),
    "want unknown": ('{"want":["value"]}', 422, "want.0: "),
    "want nothing": ('{"want":[]}', 422, "want: expected values, rewards or both"),
    "want a million": (json.dumps({"want": ["x"] * 200_000}), 422, "want.0: "),
    "want rewards of a critic": ('{"want":["rewards"],"samples":[]}', 404, "serve=value"),
    "step as bool": ('{"step":true}', 422, "step: "),
    "step as text": ('{"step":"0"}', 422, "step: "),
    "step as float": ('{"step":0.0}', 422, "step: "),
    "step below 0": ('{"step":-1}', 422, "step: "),
    "step of 20 digits": ('{"step":12345678901234567890}', 422, "step: "),
    "step of another time": ('{"step":7}', 409, "at step 0, not at 7"),
    "run as number": ('{"run":1}', 422, "run: "),
    "run elsewhere": ('{"run":"../x"}', 422, "run: "),
    "run of a file's name": ('{"run":"current.json"}', 422, "run: "),
    "run of another": ('{"run":"x"}', 409, "not to x"),
    "samples as object": ('{"samples":{}}', 422, "samples: "),
    "samples of nothing": ('{"samples":[{}]}', 422, "samples.0.prompt: Field required"),
}  # fmt: skip
TENSORS = {
    "float ids": ({"tokens": torch.zeros(COUNT)}, 422, "tokens: expected torch.int64"),
    "0 dimensions": ({"tokens": torch.tensor(1)}, 422, "tokens: expected torch.int64 of one dimension"),
    "2 dimensions": ({"tokens": torch.zeros(3, 3, dtype=I64)}, 400, "tensor 'tokens': expected one dimension"),
    "mask of numbers": ({"mask": torch.zeros(COUNT, dtype=I64)}, 422, "mask: expected torch.bool"),
    "no mask": ({"mask": None}, 422, "tensors: expected tokens, lengths, mask, got lengths, tokens"),
    "one more": ({"values": torch.zeros(COUNT)}, 422, "tensors: expected"),
    "short mask": ({"mask": torch.zeros(COUNT - 1).bool()}, 422, f"mask: expected {COUNT} elements"),
    "id 16": ({"tokens": torch.full((COUNT,), 16)}, 422, "tokens: expected ids from 0 to 15, got 16 to 16"),
    "id -1": ({"tokens": torch.full((COUNT,), -1)}, 422, "tokens: expected ids from 0 to 15"),
    "id 2^63-1": ({"tokens": torch.full((COUNT,), 2**63 - 1)}, 422, "tokens: expected ids from 0 to 15"),
    "lengths of less": ({"lengths": i64(4, 3, 1)}, 422, f"lengths: they add up to 8, but there are {COUNT} tokens"),
    "lengths of more": ({"lengths": i64(4, 3, 3)}, 422, "lengths: they add up to 10"),
    "length 0": ({"lengths": i64(4, 3, 2, 0)}, 422, "lengths: expected numbers from 1"),
    "length -1": ({"lengths": i64(4, 3, 3, -1)}, 422, "lengths: expected numbers from 1"),
    "lengths that overflow": ({"lengths": i64(2**63 - 1, 2**63 - 1, 2 + COUNT)}, 422, "lengths: "),
    "no lengths": ({"lengths": i64()}, 422, "lengths: they add up to 0"),
    "lengths of no tokens": ({"tokens": i64(), "mask": torch.zeros(0).bool()}, 422, "lengths: expected numbers"),
    "first token sampled": ({"mask": UNSAMPLED}, 422, "mask: the first token"),
}
TRAINING_TENSORS = {
    "no returns": ({"returns": None}, 422, "tensors: expected"),
    "float64": ({"values": torch.zeros(COUNT).double()}, 422, "values: expected torch.float32"),
    "short": ({"returns": torch.zeros(COUNT - 1)}, 422, f"returns: expected {COUNT} elements"),
} | {
    f"{value} in {name}, {place}": ({name: spoiled(where, value)}, 422, f"{name}: expected finite numbers")
    for value in (float("nan"), float("inf"), float("-inf"))
    for name in ("values", "returns")
    for place, where in (("sampled", SAMPLED), ("not sampled", UNSAMPLED))
}
TRAINING_HEADERS = {
    "no run": ({"id": 1}, 422, "run: "),
    "no id": ({"run": "a"}, 422, "id: "),
    "id 0": ({"run": "a", "id": 0}, 422, "id: "),
    "id as bool": ({"run": "a", "id": True}, 422, "id: "),
    "id 2^63": ({"run": "a", "id": 2**63}, 422, "id: "),
    "scale 0": ({"run": "a", "id": 1, "scale": 0}, 422, "scale: "),
    "scale as text": ({"run": "a", "id": 1, "scale": "1"}, 422, "scale: "),
    "cliprange below 0": ({"run": "a", "id": 1, "cliprange": -0.2}, 422, "cliprange: "),
    "unknown": ({"run": "a", "id": 1, "lr": 1.0}, 422, "lr: "),
    "of no run": ({"run": "a", "id": 1}, 409, "the critic belongs to no run, not to a"),
}
JSON = {
    "empty": ("save", b"", 400, "not JSON"),
    "no JSON": ("load", b"{]", 400, "not JSON"),
    "no text": ("save", b"\xff\xfe\xff", 400, "not JSON"),
    "deep": ("load", b"[" * 100_000, 400, "not JSON"),
    "no object": ("release", b'"run"', 400, "expected a JSON object"),
    "no run": ("release", b"{}", 422, "run: Field required"),
    "null": ("save", b'{"run":"a","step":null}', 422, "step: "),
    "bool": ("save", b'{"run":"a","step":false}', 422, "step: "),
    "infinite": ("load", b'{"run":"a","step":1e999}', 422, "step: "),
    "20 digits": ("save", b'{"run":"a","step":10000000000000000000}', 422, "step: "),
    "keep of text": ("save", b'{"run":"a","step":0,"keep":["1"]}', 422, "keep.0: "),
    "a million mistakes": ("save", b'{"run":"a","step":0,"keep":[' + b'"",' * 999_999 + b'""]}', 422, "keep.0: "),
    "source elsewhere": ("load", b'{"run":"a","step":1,"source":"/tmp"}', 422, "source: "),
    "unknown key": ("load", b'{"run":"a","step":0,"force":true}', 422, "force: "),
    "file's name": ("load", b'{"run":"current.json","step":0}', 422, "run: "),
    "no checkpoint": ("load", b'{"run":"a","step":9}', 409, "no checkpoint of run a at step 9"),
    "of no run": ("save", b'{"run":"a","step":0}', 409, "belongs to no run"),
}


@pytest.mark.parametrize(
    "model, message",
    [
        (messages.InferHeader, {"want": [1, 2]}),
        (messages.InferHeader, {"samples": [1, 2]}),
        (messages.SaveRequest, {"run": "a", "step": 0, "keep": [True, False]}),
        (messages.PromptHeader, {"text": "", "ids": ["1", "2"]}),
        (messages.PromptHeader, {"text": "", "messages": [1, 2]}),
        (messages.RewardQuery, {"query": [1, 2]}),
        (messages.RewardQuery, {"prompts": [1, 2]}),
    ],
)
def test_the_first_mistake_of_a_list_is_the_last_looked_at(model, message):
    """A million of them, each with its own words, would be a small body and a full memory."""
    with pytest.raises(Refused) as refused:
        messages.parse(model, message)
    assert ".0: " in str(refused.value) and ".1: " not in str(refused.value)


def refused(answer: httpx.Response, status: int, reason: str) -> None:
    error = answer.json()["error"]
    assert answer.status_code == status and reason in error, (answer.status_code, error)
    assert len(error) <= 1000


@pytest.mark.usefixtures("unchanged")
class TestRefused:
    """A reason that names the field, and a critic that is as it was."""

    @pytest.mark.parametrize("case", NO_FILE)
    def test_no_file(self, http, case):
        body, *expected = NO_FILE[case]
        for route in ("/infer", "/train"):
            refused(http.post(route, content=body), *expected)

    @pytest.mark.parametrize("case", HEADERS)
    def test_header(self, http, case):
        text, *expected = HEADERS[case]
        refused(http.post("/infer", content=with_header(text)), *expected)

    @pytest.mark.parametrize("case", TENSORS)
    def test_tensors(self, http, case):
        changed, *expected = TENSORS[case]
        refused(http.post("/infer", content=bodies.infer(**changed)), *expected)

    @pytest.mark.parametrize("case", TRAINING_HEADERS)
    def test_training_header(self, http, case):
        header, *expected = TRAINING_HEADERS[case]
        body = with_header(json.dumps(header), bodies.train("a", 1))
        refused(http.post("/train", content=body), *expected)

    @pytest.mark.parametrize("case", TRAINING_TENSORS)
    def test_training_tensors(self, http, case):
        changed, *expected = TRAINING_TENSORS[case]
        refused(http.post("/train", content=bodies.train("a", 1, **changed)), *expected)

    @pytest.mark.parametrize("case", JSON)
    def test_json(self, http, case):
        route, body, *expected = JSON[case]
        refused(http.post(f"/{route}", content=body), *expected)

    def test_a_byte_that_is_no_bool(self, http):
        body = with_byte(bodies.infer(), "mask", 2)
        refused(http.post("/infer", content=body), 400, "tensor 'mask': a bool must be stored as 0 or 1, got 2")

    def test_too_long(self, http):
        body = bodies.infer([([0] * 257, [0] * 256 + [1])])
        refused(http.post("/infer", content=body), 422, "a sequence has 257 tokens, the model takes 256 at most")

    def test_too_many(self, http):
        body = bodies.infer([([0, 1], [0, 1])] * (MOST_SEQUENCES + 1))
        refused(http.post("/infer", content=body), 413, f"limits.max_sequences={MOST_SEQUENCES}")

    def test_methods_and_routes(self, http):
        for route in ("infer", "train", "save", "load", "release"):
            assert http.get(f"/{route}").status_code == http.put(f"/{route}").status_code == 405
        assert http.post("/info", content=b"").status_code == 405
        refused = http.post("/get_reward", content=b"{}")
        assert refused.status_code == 404 and "started with serve=reward" in refused.json()["error"]
        for route in ("nothing", "static-offline-docs/../app.py", "static-offline-docs/%2e%2e/core.py"):
            assert http.post(f"/{route}", content=b"{}").status_code in (404, 405)
            assert http.get(f"/{route}").status_code == 404
        assert http.get("/info?vocab=many").status_code == 422


def connect(server, trusting) -> socket.socket:
    plain = socket.create_connection(("127.0.0.1", server.port), timeout=20)
    return trusting.wrap_socket(plain, server_hostname="127.0.0.1")


def spoken(server, trusting, *parts: bytes, pause: float = 0.0) -> tuple[int, str, bool]:
    """What is said, as it is, to a connection of its own: (status, body, whether the server ended the connection)."""
    with connect(server, trusting) as wire:
        try:
            for part in parts:
                wire.sendall(part)
                time.sleep(pause)
        except OSError:  # answered and closed before all was said
            pass
        answer = wire.makefile("rb")
        status = int(answer.readline().split()[1])
        headers = {}
        while (line := answer.readline().strip()) != b"":
            name, _, value = line.partition(b": ")
            headers[name.lower()] = value
        text = answer.read(int(headers.get(b"content-length", 0))).decode()
        return status, text, headers.get(b"connection") == b"close"


def head(route: str = "infer", *more: str) -> bytes:
    lines = (f"POST /{route} HTTP/1.1", "Host: 127.0.0.1", f"Authorization: Bearer {TOKEN}", *more)
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


@pytest.mark.usefixtures("unchanged")
class TestTransport:
    @pytest.mark.parametrize("length", ["abc", "-1", "1e3", "9" * 25, "9" * 5000, "5, 6", ""])
    def test_content_length_that_is_none(self, server, trusting, length):
        status, *_ = spoken(server, trusting, head("infer", f"Content-Length: {length}"))
        assert status == 400

    def test_content_length_of_too_much(self, server, trusting):
        """Refused before a byte of the body is sent."""
        status, text, _ = spoken(server, trusting, head("infer", f"Content-Length: {MOST_MB * 10**6 + 1}"))
        assert status == 413 and f"limits.max_body_mb={MOST_MB}" in text

    def test_content_length_of_less_than_is_sent(self, server, trusting):
        body = bodies.infer()
        status, text, _ = spoken(server, trusting, head("infer", f"Content-Length: {len(body) - 5}"), body)
        assert status == 400 and "not a safetensors file" in text

    def test_content_length_of_more_than_is_sent(self, server, trusting):
        """Slow bodies end alike: a byte now and then does not keep the connection."""
        body, start = bodies.infer(), time.monotonic()
        parts = [bytes([byte]) for byte in body[:30]]
        status, text, closed = spoken(
            server, trusting, head("infer", f"Content-Length: {len(body)}"), *parts, pause=0.1
        )
        assert status == 408 and f"limits.body_timeout_s={BODY_SECONDS:g}" in text and closed
        assert time.monotonic() - start < 10

    def test_client_that_leaves(self, server, trusting, http):
        body = bodies.infer()
        for sent in (head("infer", f"Content-Length: {len(body)}")[:-9], head("infer", "Content-Length: 999") + body):
            with connect(server, trusting) as wire:
                wire.sendall(sent)
        assert http.get("/health").status_code == 200

    def test_chunks(self, server, trusting, http):
        body = bodies.infer()
        whole = http.post("/infer", content=iter([body[:7], body[7:50], body[50:]]))
        assert answered(whole.content) == answered(http.post("/infer", content=body).content)
        chunk = b"100000\r\n" + b"x" * 0x100000 + b"\r\n"
        status, text, _ = spoken(
            server, trusting, head("infer", "Transfer-Encoding: chunked"), *[chunk] * (MOST_MB + 1)
        )
        assert status == 413 and "limits.max_body_mb" in text

    def test_connections_that_ask_for_nothing_end(self, server, trusting, http):
        """Neither silence, nor a head that does not end, nor the rest of a refused body keeps one."""
        unread = head("infer", f"Content-Length: {10**12}")
        wires = [connect(server, trusting) for _ in range(4)]
        wires[1].sendall(head()[:40])
        wires[2].sendall(unread)
        wires[3].sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")  # kept by uvicorn, for a minute
        start = time.monotonic()
        ended: dict[int, float] = {}
        while len(ended) < 3 and time.monotonic() - start < 10:
            for i, wire in enumerate(wires):
                if i in ended:
                    continue
                wire.settimeout(0.05)
                try:
                    if i in (1, 2):
                        wire.sendall(b"x")
                    if wire.recv(4096) == b"":
                        ended[i] = time.monotonic() - start
                except TimeoutError:
                    pass
                except OSError:
                    ended[i] = time.monotonic() - start
        assert sorted(ended) == [0, 1, 2] and all(0.3 < seconds < 8 for seconds in ended.values()), ended
        for wire in wires:
            wire.close()
        assert http.get("/health").status_code == 200

    def test_no_http(self, server, trusting):
        for noise in (b"\0" * 100 + b"\r\n\r\n", b"GET\r\n\r\n", head("infer", "X: " + "y" * 100_000)):
            assert spoken(server, trusting, noise)[0] == 400

    def test_a_body_too_large_is_a_reason_to_the_client(self, server, certificate):
        """Not a broken connection, which would be tried again and again."""
        cfg = RemoteConfig(token=TOKEN, ca_file=str(certificate[0]), retry_s=5.0)
        client = Client(server.url, cfg, key="value")
        with pytest.raises(ServerError, match=r"refused the request \(413\): .*limits.max_body_mb"):
            client.exchange("infer", bytes(5 * MOST_MB * 10**6))
        client.close()


def test_connections_beyond_the_most_end_at_once():
    async def nothing(scope, receive, send):
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    protocol = connections(60.0)
    protocol.most = 2
    config = uvicorn.Config(nothing, http=protocol, lifespan="off", log_level="warning")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        service = uvicorn.Server(config)
        thread = threading.Thread(target=service.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        ask = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"

        def opened() -> socket.socket:
            return socket.create_connection(listening.getsockname(), timeout=10)

        def status(wire: socket.socket) -> bytes:
            wire.sendall(ask)
            return wire.recv(4096)[9:12]

        first, second = opened(), opened()
        assert status(first) == status(second) == b"204"
        third = opened()
        assert third.recv(1) == b""
        assert status(first) == b"204"
        first.close()
        deadline = time.monotonic() + 10
        while True:  # until the server has seen it leave
            fourth = opened()
            try:
                if status(fourth) == b"204":
                    break
            except OSError:
                pass
            assert time.monotonic() < deadline
            fourth.close()
        for wire in (second, third, fourth):
            wire.close()
        service.should_exit = True
        thread.join(timeout=10)


class TestToken:
    @pytest.mark.parametrize(
        "given",
        [
            None,
            "",
            TOKEN,
            f"Basic {TOKEN}",
            f"bearer {TOKEN}",
            f"Bearer {TOKEN}x",
            f"Bearer {TOKEN[:-1]}",
            b"Bearer \xff",
        ],
        ids=str,
    )
    def test_without_the_right_one(self, server, trusting, given):
        headers = {} if given is None else {"Authorization": given}
        with httpx.Client(base_url=server.url, headers=headers, verify=trusting, timeout=60) as client:
            for route in ("info", "metrics", "healthy", "docs/", "static-offline-docs", "nothing"):
                refused(client.get(f"/{route}"), 401, "Authorization: Bearer <token>")
            for route in ("infer", "train", "save", "load", "release"):
                refused(client.post(f"/{route}", content=bodies.infer()), 401, "Authorization: Bearer <token>")
            for route in ("health", "docs", "openapi.json"):
                assert client.get(f"/{route}").status_code == 200

    def test_is_compared_in_constant_time(self, monkeypatch):
        compared, real = [], hmac.compare_digest
        monkeypatch.setattr(service_app.hmac, "compare_digest", lambda a, b: compared.append((a, b)) or real(a, b))
        gate = Gate(None, "right", LimitsConfig(), None)
        for given, status in ((b"Bearer right", None), (b"Bearer wrong", 401), (b"\xff", 401)):
            found = gate._refusal({"path": "/info", "headers": [(b"authorization", given)]})
            assert (found and found.status) == status
        assert compared == [(given, b"Bearer right") for given in (b"Bearer right", b"Bearer wrong", b"\xff")]

    @pytest.mark.parametrize("token", ["caf\u00e9", "sesame\n", " sesame", "sesame ", "open\tsesame", ""])
    def test_must_fit_into_a_header(self, token, capsys):
        with pytest.raises(SystemExit) as ended:
            launch("", ["config=ppo_copy", f"token={json.dumps(token)}"])
        message = capsys.readouterr().err
        assert ended.value.code == 2 and "error: token " in message
        assert "sesame" not in message and "caf" not in message  # a secret

    def test_a_trainers_must_too(self):
        settings = {"value__mode": "remote", "value__url": "http://127.0.0.1:1"}
        assert list(malformed(tiny.config(**settings, value__remote__token="sesame"))) == []
        (problem,) = malformed(tiny.config(**settings, value__remote__token="caf\u00e9"))
        assert problem.startswith("value.remote.token ") and "caf" not in problem

    def test_another_address_needs_one(self, monkeypatch, capsys):
        monkeypatch.delenv("FASTPPO_TOKEN", raising=False)
        opened = []
        monkeypatch.setattr(socket, "socket", lambda *_, **__: opened.append(1))
        with pytest.raises(SystemExit) as ended:
            launch("", ["host=0.0.0.0", "port=0", "config=ppo_copy"])
        assert ended.value.code == 2 and not opened
        assert "host=0.0.0.0 can be reached from other machines: that needs token" in capsys.readouterr().err

    def test_a_port_that_is_taken(self, capsys):
        with socket.create_server(("127.0.0.1", 0)) as other:
            port = other.getsockname()[1]
            assert launch("", ["config=ppo_copy", f"port={port}"]) == 2
        assert f"host=127.0.0.1 port={port}: cannot listen there" in capsys.readouterr().err

    @pytest.mark.parametrize(
        "host, origin, answered",
        [
            ("127.0.0.1:8900", None, True),
            ("localhost:8900", "http://localhost:8900", True),  # the service's own page
            ("[::1]:8900", None, True),
            ("127.0.0.1:8900", "https://example.com", False),  # a page that was opened on this machine
            ("127.0.0.1:8900", "null", False),
            ("example.com:8900", "http://example.com:8900", False),  # whose name leads to this machine
            ("127.0.0.1.example.com", None, False),
            ("[::1", None, False),
            ("", None, False),
        ],
    )
    def test_without_one_no_web_page_is_answered(self, host, origin, answered):
        headers = {b"host": host.encode()} | ({} if origin is None else {b"origin": origin.encode()})
        found = from_elsewhere(headers)
        assert found is None if answered else found.status == 403


class TestTLS:
    def client(self, server, **settings) -> Client:
        return Client(server.url, RemoteConfig(token=TOKEN, retry_s=0.1, **settings), key="value")

    def test_with_the_certificate(self, server, certificate):
        client = self.client(server, ca_file=str(certificate[0]))
        assert client.get("info")["step"] == 0
        client.close()

    def test_without(self, server):
        client = self.client(server)
        with pytest.raises(ServerError, match=r"\(value.url\) did not answer .*CERTIFICATE_VERIFY_FAILED"):
            client.get("info")
        client.close()

    def test_files_that_do_not_fit(self, certificate, capsys):
        cert, _ = certificate
        with pytest.raises(SystemExit) as ended:
            launch("", ["config=ppo_copy", f"tls.certfile={cert}", f"tls.keyfile={cert}"])
        assert ended.value.code == 2
        assert f"tls.certfile={cert} with tls.keyfile={cert}: " in capsys.readouterr().err

    def test_plain(self, server):
        client = Client(server.url.replace("https", "http"), RemoteConfig(token=TOKEN, retry_s=0.1), key="value")
        with pytest.raises(ServerError, match=r"value.url"):
            client.get("info")
        client.close()


def values(answer: httpx.Response) -> torch.Tensor:
    """[T + B] values and next values."""
    tensors = decode(answer.raise_for_status().content)[1]
    return torch.cat([tensors["values"], tensors["next_values"]])


class TestNothingToDo:
    EMPTY = bodies.infer([])
    MASKED = [([0, 1, 2], [0, 0, 0]), ([3], [0])]

    def test_infer(self, http):
        tensors = decode(http.post("/infer", content=self.EMPTY).raise_for_status().content)[1]
        assert tensors["values"].shape == tensors["next_values"].shape == (0,)
        tensors = decode(http.post("/infer", content=bodies.infer(self.MASKED)).raise_for_status().content)[1]
        assert tensors["values"].tolist() == [0.0] * 4 and tensors["next_values"].shape == (2,)
        assert tensors["next_values"].isfinite().all()

    def test_train_moves_nothing(self, http, run):
        """Not even by Adam's momentum, nor does its count of steps go up: what follows is as if they had not been."""
        ask = lambda: values(http.post("/infer", content=bodies.infer()))  # noqa: E731
        steps = [bodies.train(run, 1), bodies.train(run, 2, []), bodies.train(run, 3, self.MASKED)]
        seen = []
        for body in steps:
            answer = decode(http.post("/train", content=body).raise_for_status().content)[1]
            seen.append((ask(), float(answer["optimizer.grad_norm"])))
        assert torch.equal(seen[0][0], seen[1][0]) and torch.equal(seen[0][0], seen[2][0])
        assert seen[0][1] > 0 and seen[1][1] == seen[2][1] == 0.0

        def next_step(number: int) -> torch.Tensor:
            known = bodies.train(run, 99)  # of equal numbers; only its place differs
            http.post("/train", content=with_header(json.dumps({"run": run, "id": number}), known)).raise_for_status()
            return ask()

        after = next_step(4)
        http.post("/load", json={"run": run, "step": 0}).raise_for_status()
        http.post("/train", content=steps[0]).raise_for_status()
        assert torch.equal(next_step(2), after) and not torch.equal(after, seen[0][0])

    def test_extreme_numbers_leave_the_weights_finite(self, http, run):
        huge = torch.full((COUNT,), 3e38)
        for number, changed in enumerate(({"returns": huge}, {"values": huge, "returns": -huge}), start=1):
            http.post("/train", content=bodies.train(run, number, **changed)).raise_for_status()
        for number, header in enumerate(({"scale": 1e308}, {"scale": 5e-324}, {"cliprange": 1e308}), start=3):
            http.post("/train", content=bodies.train(run, number, header=header)).raise_for_status()
        assert values(http.post("/infer", content=bodies.infer())).isfinite().all()


class TestPadding:
    """Whatever a sequence is computed beside, its numbers are its own."""

    ROWS = bodies.random_rows(12)

    def alone(self, http) -> list[torch.Tensor]:
        return [values(http.post("/infer", content=bodies.infer([row]))) for row in self.ROWS]

    def test_a_request_again_is_the_same_bit_for_bit(self, http):
        for rows in (self.ROWS, self.ROWS[:1]):
            first, again = (http.post("/infer", content=bodies.infer(rows)).content for _ in range(2))
            assert answered(first) == answered(again)

    def test_together_and_in_any_order(self, http):
        alone = self.alone(http)
        for seed in range(3):
            order = torch.randperm(len(self.ROWS), generator=torch.Generator().manual_seed(seed)).tolist()
            answer = decode(http.post("/infer", content=bodies.infer([self.ROWS[i] for i in order])).content)[1]
            parts = answer["values"].split([len(self.ROWS[i][0]) for i in order])
            for place, i in enumerate(order):
                found = torch.cat([parts[place], answer["next_values"][place : place + 1]])
                torch.testing.assert_close(found, alone[i], rtol=0, atol=1e-6)

    def test_beside_the_requests_of_others(self, http):
        """They wait behind a long one, so the server takes them together."""
        alone = self.alone(http)
        long = bodies.infer(bodies.random_rows(200, longest=250))
        with ThreadPoolExecutor(len(self.ROWS) + 1) as pool:
            first = pool.submit(http.post, "/infer", content=long)
            time.sleep(0.1)
            merged = list(pool.map(lambda row: values(http.post("/infer", content=bodies.infer([row]))), self.ROWS))
            first.result().raise_for_status()
        for found, expected in zip(merged, alone, strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


class StubCritic:
    """Answers each token with its id, and remembers what it was called with, in order."""

    step, run = 0, "here"

    def __init__(self):
        self.calls = []
        self.started, self.go_on = threading.Event(), threading.Event()

    def check_at(self, run, step):
        if step is not None and step != self.step:
            raise Refused("another step", 409)

    def infer(self, batch, max_tokens=None):
        self.calls.append(("infer", len(batch), self.step))
        if 13 in batch.tokens.tolist():
            raise RuntimeError("an id that this one does not bear")
        ends = batch.cu_seqlens[1:] - 1
        return batch.tokens.float(), batch.tokens[ends].float()

    def train(self, name):
        self.started.set()
        assert self.go_on.wait(10)
        self.calls.append(("train", name))
        self.step += 1
        return name


def inference(*ids: int, step: int | None = None) -> Inference:
    tensors = bodies.tensors([([0, *ids], [0] + [1] * len(ids))])
    return Inference(["values"], messages.sequences(tensors, vocab_size=16, longest=None, most=9), [], None, step)


class TestWorker:
    @pytest.fixture
    def worker(self):
        worker = Worker(StubCritic(), None, LimitsConfig(max_waiting=20), idle_s=10.0)
        thread = threading.Thread(target=worker.run, daemon=True)
        thread.start()
        yield worker
        worker.critic.go_on.set()
        worker.stop()
        thread.join(timeout=10)
        assert not thread.is_alive()

    def behind_a_slow_one(self, worker, *jobs) -> list:
        """The futures of jobs that all wait while a train request is computed."""
        slow = worker.submit("train", "slow")
        assert worker.critic.started.wait(10)
        futures = [worker.submit(*job) for job in jobs]
        worker.critic.go_on.set()
        slow.result(10)
        return futures

    def test_waiting_infers_are_merged_and_no_train_is_overtaken(self, worker):
        ask = lambda *ids: ("infer", inference(*ids))  # noqa: E731
        jobs = [ask(1), ask(2), ask(3), ("train", "a"), ask(4), ("train", "b"), ask(5), ask(6)]
        answers = [future.result(10) for future in self.behind_a_slow_one(worker, *jobs)]
        assert worker.critic.calls == [
            ("train", "slow"), ("infer", 3, 1), ("train", "a"), ("infer", 1, 2), ("train", "b"), ("infer", 2, 3)
        ]  # fmt: skip
        infers = [answer for answer in answers if not isinstance(answer, str)]
        assert [answer.step for answer in infers] == [1, 1, 1, 2, 3, 3]
        assert [answer.values.tolist() for answer in infers] == [[0.0, float(i)] for i in range(1, 7)]

    def test_one_that_fails_fails_alone(self, worker):
        asked = [inference(1), inference(13), inference(2, step=5), inference(3)]
        first, broken, other, last = self.behind_a_slow_one(worker, *[("infer", each) for each in asked])
        assert first.result(10).values.tolist() == [0.0, 1.0] and last.result(10).values.tolist() == [0.0, 3.0]
        with pytest.raises(RuntimeError, match="does not bear"):
            broken.result(10)
        with pytest.raises(Refused, match="another step"):
            other.result(10)

    def test_too_many_are_told_to_come_back(self, worker):
        worker.submit("train", "slow")
        assert worker.critic.started.wait(10)
        futures = [worker.submit("infer", inference(1)) for _ in range(20)]
        with pytest.raises(Refused, match="limits.max_waiting=20") as refused:
            worker.submit("infer", inference(1))
        assert refused.value.status == 429
        worker.critic.go_on.set()
        assert all(future.result(10).step == 1 for future in futures)

    def test_those_that_wait_at_the_end_are_told_to_come_back(self, worker):
        slow = worker.submit("train", "slow")
        assert worker.critic.started.wait(10)
        future = worker.submit("infer", inference(1))
        worker.stop()
        worker.critic.go_on.set()
        assert slow.result(10) == "slow"
        with pytest.raises(Refused) as refused:
            future.result(10)
        assert refused.value.status == 503
        with pytest.raises(Refused) as refused:
            worker.submit("infer", inference(1)).result(10)
        assert refused.value.status == 503


def test_infers_beside_train_requests(http, run):
    """A critic that is asked while it is trained answers of one step or another, never of something between."""
    seen, done = [], threading.Event()

    def asking() -> None:
        while not done.is_set():
            header, tensors = decode(http.post("/infer", content=bodies.infer()).raise_for_status().content)
            seen.append((header["step"], tensors["values"]))

    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(asking) for _ in range(2)]
        trained = {}
        for number in range(1, 21):
            http.post("/train", content=bodies.train(run, number)).raise_for_status()
            header, tensors = decode(http.post("/infer", content=bodies.infer()).content)
            assert header["step"] == number
            trained[number] = tensors["values"]
        done.set()
        for each in asked:
            each.result()
    assert len({step for step, _ in seen}) > 3
    near = [(trained[step] - found).abs().max() for step, found in seen if step]
    assert max(near) < 1e-6 < 1e-4 < min((trained[n] - trained[n + 1]).abs().max() for n in range(1, 20))


class TestPages:
    ROUTES = {"infer", "train", "save", "load", "release", "info", "health", "metrics"}

    def test_docs_need_no_other_host(self, http, server):
        page = http.get("/docs").text
        assets = re.findall(r"""(?:src|href|url)\s*[=:]\s*["']([^"']+)["']""", page)
        assert len(assets) >= 4 and all(asset.startswith("/") and not asset.startswith("//") for asset in assets)
        assert all(http.get(asset).status_code == 200 for asset in assets)
        assert not [host for host in re.findall(r"https?://([^/\"' ]+)", page) if host]

    def test_openapi(self, http):
        described = http.get("/openapi.json").json()
        assert described["openapi"].startswith("3.") and described["info"]["title"] and described["info"]["version"]
        assert {path.strip("/") for path in described["paths"]} == self.ROUTES | {"get_reward"}
        for path, methods in described["paths"].items():
            for method, operation in methods.items():
                assert operation["summary"] and operation["responses"]["200"]["description"]
                assert operation["description"]
                if method == "post":
                    (media,) = operation["requestBody"]["content"].values()
                    assert media["schema"]["type"] in ("object", "string"), path
        for reference in re.findall(r'"\$ref": "([^"]+)"', json.dumps(described)):
            found = described
            for part in reference.removeprefix("#/").split("/"):
                found = found[part]

    def test_metrics(self, http):
        http.post("/infer", content=bodies.infer())
        http.get("/no/such/route")
        text = http.get("/metrics").text
        families = {family.name: family.samples for family in text_string_to_metric_families(text)}
        assert {"fastppo_requests", "fastppo_request_seconds", "fastppo_tokens"} < families.keys()
        assert {"fastppo_waiting_requests", "fastppo_critic_step", "fastppo_resident_memory_bytes"} < families.keys()
        total = {
            (sample.labels["route"], sample.labels["status"]): sample.value
            for sample in families["fastppo_requests"]
            if sample.name.endswith("_total")
        }
        assert total["infer", "200"] >= 1 and total["other", "404"] >= 1
        assert {route for route, _ in total} <= self.ROUTES | {"docs", "openapi.json", "get_reward", "other"}


class TestSamples:
    """What a reward is told beside the ids, of one sequence of four tokens, two of them sampled."""

    @pytest.mark.parametrize(
        "changed, reason",
        [
            ({"prompt_tokens": 5}, "prompt and messages do not make up its 4 tokens"),
            ({"prompt_tokens": 2**40}, "do not make up its 4 tokens"),  # nor is anything made that large
            ({"prompt_tokens": 1}, "is not what mask says"),
            ({"messages": [{"author": "policy", "tokens": 3, "text": ""}]}, "do not make up its 4 tokens"),
            ({"messages": [{"author": "environment", "tokens": 2, "text": ""}]}, "is not what mask says"),
            ({"prompt_tokens": -1}, "samples.0.prompt_tokens: "),
            ({"messages": [{"author": "user", "tokens": 2, "text": ""}]}, "samples.0.messages.0.author: "),
            ({"finish": "length "}, "samples.0.finish: "),
            ({"reward": "1"}, "samples.0.reward: "),
        ],
    )
    def test_refused(self, changed, reason):
        sample = {"prompt": {"text": "a"}, "prompt_tokens": 2, "response": "b", "finish": "stop"}
        batch = messages.sequences(bodies.tensors(bodies.ROWS[:1]), vocab_size=16, longest=None, most=1)
        (good,) = messages.unpack_samples(batch, messages.parse(messages.InferHeader, {"samples": [sample]}).samples)
        assert good.prompt_ids == (0, 3) and good.response_ids == (4, 5)
        with pytest.raises(Refused) as refused:
            header = messages.parse(messages.InferHeader, {"samples": [sample | changed]})
            messages.unpack_samples(batch, header.samples)
        assert refused.value.status == 422 and reason in str(refused.value)


def test_an_error_of_the_server_says_what_but_not_where(caplog):
    error = RuntimeError("no memory\nException raised from f at /somewhere/x.h:1\nframe #0")
    answer = service_app.answer_refused(service_app.failure(error))
    assert answer.status_code == 500 and loads(answer.body) == {"error": "RuntimeError: no memory"}


@pytest.mark.parametrize(
    "ending, status, reason",
    [(None, 503, "the server is ending"), (KeyError("x"), 500, "KeyError: 'x'")],
)
def test_what_ends_a_request_is_an_answer(ending, status, reason):
    """Cancelled, as when the server ends: the client is told to come back. Another mistake is not the client's."""
    sent = []

    async def app(scope, receive, send):
        if ending is not None:
            raise ending
        await asyncio.Event().wait()

    async def send(message):
        sent.append(message)

    async def cancelled() -> None:
        served = SimpleNamespace(critic=None)
        gate = Gate(app, None, LimitsConfig(), service_app.Metrics(served, SimpleNamespace(waiting=0)))
        request = asyncio.create_task(gate({"type": "http", "path": "/infer", "headers": []}, None, send))
        await asyncio.sleep(0)
        request.cancel()
        await request

    asyncio.run(cancelled())
    assert sent[0]["status"] == status and loads(sent[1]["body"]) == {"error": reason}


def test_sigterm_ends_a_train_request_first(http, server, certificate):
    """It is answered, those behind it are told to come back, and the client does."""
    http.post("/load", json={"run": "late", "step": 0}).raise_for_status()
    long = bodies.train("late", 1, bodies.random_rows(250, longest=250))
    client = Client(server.url, RemoteConfig(token=TOKEN, ca_file=str(certificate[0]), retry_s=60.0), key="value")
    with ThreadPoolExecutor(6) as pool:
        trained = pool.submit(http.post, "/train", content=long)
        time.sleep(0.3)
        assert not trained.done()
        waiting = [pool.submit(http.post, "/infer", content=bodies.infer()) for _ in range(3)]
        patient = pool.submit(client.exchange, "infer", bodies.infer())
        time.sleep(0.3)
        assert not trained.done()
        assert server.end() == 0
        assert "optimizer.grad_norm" in decode(trained.result().raise_for_status().content)[1]
        for each in waiting:
            refused(each.result(), 503, "the server is ending")
        assert not patient.done()
        server.start()
        header, _ = patient.result()
    assert header["step"] == 0  # nothing had been saved
    client.close()
    http.post("/release", json={"run": "late"}).raise_for_status()
