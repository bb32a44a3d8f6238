"""Thousands of broken requests: none ends the server, none is its mistake (5xx), none leaves memory behind, and what it
answers to a good one afterwards is what it was."""

import http.client
import json
import random
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from tests import bodies
from tests.bodies import answered, file_of
from tests.served import ServerProcess

MB = 1e6
Request = tuple[str, bytes]  # route, body

SAMPLES = [
    {"prompt": {"text": "<s> a", "metadata": {"target": 4}}, "prompt_tokens": ids.count(0), "response": "b",
     "finish": "stop"}
    for ids, _ in bodies.ROWS
]  # fmt: skip
REWARDED = [(ids, [0] + [1] * (len(ids) - 1)) for ids, _ in bodies.ROWS]
REWARDS = ("infer", bodies.infer(REWARDED, {"want": ["rewards"], "samples": SAMPLES}))
VALUES = ("infer", bodies.infer())


def as_json(route: str, **message: Any) -> Request:
    return route, json.dumps(message).encode()


GOOD = {
    "value": [
        VALUES,
        ("infer", bodies.infer(header={"want": ["values"], "run": "fuzzed", "step": 0})),
        ("train", bodies.train("fuzzed", 1)),
        ("train", bodies.train("fuzzed", 2, header={"cliprange": 0.2, "scale": 0.5})),
        as_json("save", run="fuzzed", step=0, keep=[1, 2]),
        as_json("load", run="fuzzed", step=0, source="fuzzed"),
        as_json("release", run="fuzzed"),
    ],
    "reward": [
        REWARDS,
        as_json("get_reward", query=["<s> a b", "<s> c d"], prompts=["<s> a", "<s> c"], labels=["b", "d"]),
        as_json("get_reward", prompts=["<s> a b"]),
        VALUES,
        ("train", bodies.train("fuzzed", 1)),
        as_json("load", run="fuzzed", step=0),
    ],
}

NUMBERS = [0, -1, 1, 2, 255, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, -(2**63), 2**64, 10**30, 0.5, 1e308, -1e-320]
OTHERS = [None, True, False, "", "x", "1", "\ud800", "\0", "values", "../..", [], {}, [[]], [None], {"": {}}]
RAW = ["NaN", "Infinity", "1e999", "[" * 3000, '{"a":' * 200, "9" * 5000, "-", "\x00", '"\\ud800"', "tru", "1.", "0x1"]
DTYPES = ["I64", "F32", "F64", "BOOL", "U8", "I32", "F16", "BF16", "F8_E4M3", "C64", "", "i64", "F4"]
WORDS = [struct.pack("<q", n) for n in (-1, 2**63 - 1, -(2**63), 2**31, 16, 2**62)] + [
    struct.pack("<ff", x, x) for x in (float("nan"), float("inf"), 3e38, -3e38, 1e-45)
]


class Mutations:
    """Requests made of good ones, the same for the same seed."""

    def __init__(self, good: list[Request], seed: int):
        self.good, self.draw = good, random.Random(seed)

    def __iter__(self) -> Iterator[Request]:
        while True:
            route, body = self.draw.choice(self.good)
            for _ in range(self.draw.choice((1, 1, 1, 2, 4))):
                body = self.mutated(body)
            if self.draw.random() < 0.03:  # to where another is expected
                route = self.draw.choice(self.good)[0]
            yield route, body

    def mutated(self, body: bytes) -> bytes:
        is_file = len(body) > 8 and body[8:9] == b"{" and not body.startswith(b"{")
        kinds = [*[self.described] * 3, *[self.spoken] * 5, *[self.numbers] * 5, self.length]
        of_bytes = [self.flipped, self.flipped, self.cut, self.grown, self.swapped, self.noise, self.raw]
        if self.draw.random() < 0.3:
            kinds = of_bytes
        elif not is_file:
            kinds = [self.rewritten]
        kind: Callable[[bytes], bytes] = self.draw.choice(kinds)
        try:
            return kind(body)
        except (ValueError, LookupError, AttributeError, TypeError, RecursionError, struct.error):  # broken already
            return self.flipped(body)

    def place(self, body: bytes) -> int:
        return self.draw.randrange(len(body) + 1)

    def flipped(self, body: bytes) -> bytes:
        changed = bytearray(body or b"\0")
        for _ in range(self.draw.choice((1, 1, 2, 8))):
            changed[self.draw.randrange(len(changed))] ^= 1 << self.draw.randrange(8)
        return bytes(changed)

    def cut(self, body: bytes) -> bytes:
        start = self.place(body)
        return body[:start] + (b"" if self.draw.random() < 0.5 else body[self.place(body) :])

    def grown(self, body: bytes) -> bytes:
        start = self.place(body)
        more = self.draw.randbytes(self.draw.choice((1, 1, 8, 100, 5000)))
        return body[:start] + more + body[start:]

    def swapped(self, body: bytes) -> bytes:
        a, b, c = sorted(self.place(body) for _ in range(3))
        return body[:a] + body[b:c] + body[a:b] + body[c:]

    def noise(self, body: bytes) -> bytes:
        return self.draw.randbytes(self.draw.choice((0, 1, 7, 8, 9, 200)))

    def raw(self, body: bytes) -> bytes:
        """In place of a number or a word of JSON, what JSON does not have."""
        start = self.place(body)
        return body[:start] + self.draw.choice(RAW).encode() + body[start + self.draw.choice((0, 1, 2)) :]

    def length(self, body: bytes) -> bytes:
        size = struct.unpack("<Q", body[:8])[0]
        wrong = self.draw.choice((0, 1, size - 1, size + 1, 2 * size, 2**32, 2**63, 2**64 - 1))
        return struct.pack("<Q", wrong) + body[8:]

    def numbers(self, body: bytes) -> bytes:
        """What a tensor holds."""
        size = struct.unpack("<Q", body[:8])[0]
        start = 8 + size + 4 * self.draw.randrange((len(body) - 8 - size) // 4)
        return body[:start] + self.draw.choice(WORDS) + body[start + 8 :]

    def described(self, body: bytes) -> bytes:
        """What the file says of its tensors."""
        size = struct.unpack("<Q", body[:8])[0]
        file = json.loads(body[8 : 8 + size])
        name = self.draw.choice([name for name in file if name != "__metadata__"])
        part = file[name]
        choice = self.draw.randrange(7)
        if choice == 0:
            part["dtype"] = self.draw.choice(DTYPES)
        elif choice == 1:
            part["shape"] = [self.draw.choice(NUMBERS) for _ in range(self.draw.choice((0, 1, 2, 70)))]
        elif choice == 2:
            count = part["shape"][0]
            part["shape"] = self.draw.choice(([1, count], [count, 1], [], [count, 0], [0, 2**63], [1] * 100 + [count]))
        elif choice == 3:
            part["data_offsets"][self.draw.randrange(2)] = self.draw.choice(NUMBERS)
        elif choice == 4:
            del file[name]
        elif choice == 5:
            other = self.draw.choice([name for name in file if name != "__metadata__"])
            file[name], file[other] = file[other], file[name]
        else:
            file[self.draw.choice(("", "x", "k" * 20_000, "\ud800", "values", "__metadata__"))] = file.pop(name)
        return file_of(file, body[8 + size :])

    def spoken(self, body: bytes) -> bytes:
        """The JSON header."""
        size = struct.unpack("<Q", body[:8])[0]
        file = json.loads(body[8 : 8 + size])
        said = file["__metadata__"]["fastppo"]
        file["__metadata__"]["fastppo"] = self.rewritten(said.encode()).decode()
        return file_of(file, body[8 + size :])

    def rewritten(self, body: bytes) -> bytes:
        """One value, somewhere in it, is another; or one is left out, or one more."""
        message = json.loads(body)
        at: Any = message
        while True:
            keys = list(at) if isinstance(at, dict) else range(len(at))
            if not keys:  # only the message itself may be empty
                return json.dumps({"want": self.value()}).encode()
            key = self.draw.choice(keys)
            if not isinstance(at[key], dict | list) or not at[key] or self.draw.random() < 0.3:
                break
            at = at[key]
        choice = self.draw.randrange(6)
        if choice == 0:
            del at[key]
        elif choice == 1 and isinstance(at, dict):
            at[self.draw.choice(("", "want", "id", "extra", "k" * 100_000, "\ud800"))] = self.value()
        elif choice == 2 and isinstance(at, list):
            at.extend([self.value()] * self.draw.choice((1, 50, 5000)))
        elif choice == 3 and isinstance(at, dict):
            other = self.draw.choice(list(at))
            at[key], at[other] = at[other], at[key]
        else:
            at[key] = self.value()
        return json.dumps(message).encode()

    def value(self) -> Any:
        return self.draw.choice(self.draw.choice((NUMBERS, OTHERS)))


class Fuzzed:
    """A server, and one connection to it that is kept."""

    def __init__(self, server: ServerProcess, good: list[Request], seed: int):
        self.server, self.mutations = server, iter(Mutations(good, seed))
        self.process = psutil.Process(server.process.pid)
        self.connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        self.statuses: Counter[tuple[str, int]] = Counter()

    def ask(self, route: str, body: bytes) -> tuple[int, bytes]:
        self.connection.request("POST", f"/{route}", body)
        answer = self.connection.getresponse()
        return answer.status, answer.read()

    def send(self, count: int) -> None:
        self.connection.connect()
        kept = self.connection.sock
        for _ in range(count):
            route, body = next(self.mutations)
            status, text = self.ask(route, body)
            self.statuses[route, status] += 1
            assert status == 200 or 400 <= status < 500, (status, text[:500], route, body[:2000])
            assert status == 200 or (0 < len(json.loads(text)["error"]) <= 1000), (text[:500], route, body[:2000])
            assert self.connection.sock is kept, (status, text[:500], route, body[:2000])

    @property
    def memory(self) -> int:
        return self.process.memory_info().rss


def fresh(fuzzed: Fuzzed) -> None:
    """The critic as before training, whoever has it now."""
    info = json.loads(fuzzed.server.get("info").text)
    if info["run"] is not None:
        assert fuzzed.ask(*as_json("release", run=info["run"]))[0] == 200
    assert fuzzed.ask(*as_json("load", run="fuzzed", step=0))[0] == 200


@pytest.mark.parametrize("count", [1500, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
@pytest.mark.parametrize("serve, good", [("value", VALUES), ("reward", REWARDS)], ids=["value", "reward"])
def test_mutated_bodies(tmp_path, serve, good, count):
    settings = ["config=ppo_copy", f"serve={serve}"] + (["env.name=copy"] if serve == "reward" else [])
    with ServerProcess(tmp_path, *settings) as server:
        fuzzed = Fuzzed(server, GOOD[serve], seed=count)
        if serve == "value":
            fresh(fuzzed)
        status, before = fuzzed.ask(*good)
        assert status == 200
        fuzzed.send(count // 5)
        warm = fuzzed.memory
        fuzzed.send(count - count // 5)
        grown = (fuzzed.memory - warm) / MB
        assert server.process.poll() is None and fuzzed.process.is_running()
        assert grown < 10, f"{grown:.1f} MB"
        if serve == "value":
            fresh(fuzzed)
        status, after = fuzzed.ask(*good)
        assert status == 200 and answered(after) == answered(before)
        answers = Counter(status for _, status in fuzzed.statuses.elements())
        assert {200, 400, 422} <= answers.keys() and answers[200] < count / 2
        assert "Traceback" not in server.log.read_text()
        print(dict(answers), f"{grown:.1f} MB")
