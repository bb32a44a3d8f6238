"""A reward on a server: the numbers of the trainer's own process, OpenRLHF's JSON both ways, and what goes wrong."""

import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import date
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from math import inf, nan
from pathlib import Path

import httpx
import pytest
import torch
from transformers import AutoTokenizer

from tests import tiny
from tests.served import ServerProcess
from tests.served_rewards import Picky, Rewards
from tests.test_reward_model import RAGGED, classifier
from trainers import dist
from trainers.arithmetic import ConfigError, check
from trainers.cli import load_config
from trainers.config import EnvConfig
from trainers.config_env import RewardModelConfig
from trainers.config_remote import RemoteRewardConfig
from trainers.config_service import LimitsConfig
from trainers.engines import Completion
from trainers.environments import Message, Prompt, RewardError, Sample, make_environment
from trainers.environments.asking import LateRewardError, ask
from trainers.environments.reward_model import RewardModelEnvironment
from trainers.ppo import PPOTrainer
from trainers.rewards import score
from trainers.rollout import pack
from trainers.run import TrainingError
from trainers.service import messages
from trainers.service.app import read_query
from trainers.service.messages import InferHeader, RewardQuery, pack_samples, parse, sample_header, unpack_samples
from trainers.service.scorer import Scorer, mine
from trainers.service.served import Served
from trainers.service.wire import Refused, decode, encode
from trainers.service.worker import Inference, Worker

CPU = torch.device("cpu")
HEADS = {"mean": [0.5, -1.0], "std": [2.0, 0.25], "weights": [3.0, -0.5]}
PYTHON = {"PYTHONPATH": str(Path(__file__).parents[1])}


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(tiny.tiny_model())


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return classifier(tmp_path_factory.mktemp("model"), heads=2)


@pytest.fixture(scope="module")
def servers(tmp_path_factory, model):
    """Of functions, and of a reward model beside a critic; started side by side."""
    heads = [f"env.reward_model.{key}={value}" for key, value in HEADS.items()]
    both = ["serve=both", "value.model_name=tiny-llama", "env.name=reward_model"]
    settings = {
        "functions": ["serve=reward", "env.name=python:tests.served_rewards.Rewards", "env.timeout_s=0.5"],
        "model": [*both, f"env.reward_model.model_name={model}", *heads],
    }
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        started = {
            name: ServerProcess(tmp_path_factory.mktemp(name), *each, env=PYTHON) for name, each in settings.items()
        }
        for server in started.values():
            stack.callback(server.__exit__)
        list(pool.map(lambda server: server.__enter__(), started.values()))
        yield started


@pytest.fixture(scope="module")
def scorer(model, tokenizer) -> Scorer:
    """The same reward model in this process."""
    cfg = RewardModelConfig(model_name=str(model), **HEADS)
    env = EnvConfig(name="reward_model", reward_model=cfg)
    own = make_environment(env)
    own.bind(tokenizer, device=CPU, dtype=torch.float32)
    return Scorer(own, env, tokenizer)


def remote(url: str, tokenizer=None, **settings):
    """The trainer's side, bound if there is a tokenizer."""
    asking = RemoteRewardConfig(**{"retry_s": 0.3, **settings})
    made = make_environment(EnvConfig(name="remote", url=url, remote=asking))
    if tokenizer is not None:
        made.bind(tokenizer, device=CPU, dtype=torch.float32)
    return made


def asked(environment, samples, timeout_s: float | None = 60.0):
    return ask(environment, samples, name="remote", timeout_s=timeout_s)


def sample(response=(7, 8, 1), text="w7 w8", prompt="<s> w5", **metadata) -> Sample:
    return Sample(Prompt(prompt, metadata), (0, 5), tuple(response), text, "stop")


# --- what travels ----------------------------------------------------------------------------------------------------

DIALOGUE = (
    Message("policy", (7, 1), "w7"),
    Message("environment", (4, 5), "w4 w5"),
    Message("policy", (8,), "w8"),
    Message("environment", (3,), "w3"),
)
CHAT = ({"role": "system", "content": "be brief"}, {"role": "user", "content": [{"type": "text", "text": "é\n\0"}]})
TRAVELLERS = [
    Sample(Prompt("one"), (0,), (5, 6), "a b", "length"),
    Sample(Prompt("", {"target": 3, "deep": {"a": [1, 2.5, None, True, "ü"]}}, (0, 4)), (0, 4), (1,), "", "stop"),
    Sample(Prompt("chat", {"answer": 1e-300, "big": 2**70}, None, CHAT), (9, 9, 9), (2, 2), "x", "stop"),
    Sample(Prompt("talk"), (0, 5), (7, 1, 8), "w7 w8", "length", DIALOGUE, {"tries": 2, "seen": ["a"]}, -0.1),
    Sample(Prompt("talk"), (0,), (7, 1), "w7", "stop", DIALOGUE[:1], {}, 1 / 3),
]


def test_samples_arrive_as_they_were():
    body = encode({"want": ["rewards"], "samples": [sample_header(s) for s in TRAVELLERS]}, pack_samples(TRAVELLERS))
    raw, tensors = decode(body)
    batch = messages.sequences(tensors, vocab_size=16, longest=None, most=99)
    assert unpack_samples(batch, parse(InferHeader, raw).samples) == TRAVELLERS
    spoken = batch.tokens[batch.mask].split(batch.response_lengths.tolist())
    assert [tuple(ids.tolist()) for ids in spoken] == [s.response_ids for s in TRAVELLERS]


@pytest.mark.parametrize("value", [date(2020, 1, 1), (1, 2), {1: 2}, {"a": {3}}, nan, [inf], torch.ones(1)])
def test_what_json_does_not_give_back_is_named_before_anything_is_sampled(value):
    environment = remote("http://127.0.0.1:1")
    said = r"the prompt '<s> w5': its key 'when' cannot be sent to the server http://127.0.0.1:1 \(env.url\): expected"
    with pytest.raises(ValueError, match=said):
        environment.check_prompts([Prompt("<s> w5", {"ok": [1]}), Prompt("<s> w5", {"when": value})])
    with pytest.raises(RewardError, match=said) as error:
        asked(environment, [sample(), sample(when=value)])
    assert error.value.sample.prompt.metadata == {"when": value}
    state = Sample(Prompt("p"), (0,), (1,), "", "stop", DIALOGUE[:1], {"state": value})
    with pytest.raises(RewardError, match="the dialogue's metadata: its key 'state' cannot be sent"):
        asked(environment, [state])


# --- our server ------------------------------------------------------------------------------------------------------


def rows(run_dir: Path) -> list[dict]:
    read = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(("time", "timing_s/", "perf/"))} for row in read]


def run(run_dir: Path, **overrides) -> list[dict]:
    options = {
        "logger__run_dir": run_dir,
        "ppo__max_num_steps": 3,
        "ppo__val_period": 2,
        "ppo__num_prompts_per_step": 4,
        "ppo__num_generations_per_prompt": 4,
        "policy__train_global_batch_size": 16,
        "policy__train_micro_batch_size": 8,
    }
    trainer = PPOTrainer(tiny.config(**options | overrides))
    try:
        trainer.fit()
    finally:
        trainer.close()
    return rows(run_dir)


def test_a_run_with_the_reward_on_a_server_has_the_metrics_of_one_without(tmp_path, servers):
    own = run(tmp_path / "own")
    served = run(tmp_path / "served", env__rewards="{remote: 1.0}", env__url=servers["functions"].url)
    assert len(own) == len(served) >= 3 and any("critic/score/mean" in row for row in own)
    for row, theirs in zip(own, served, strict=True):
        assert {name: theirs.get(name) for name in row} == row
        parts = {f"{stage}/score/remote/{of}" for stage in ("critic", "val") for of in ("mean", "std")}
        assert theirs.keys() - row.keys() <= parts | {"env/remote/total"}


ROWS = [
    sample(),
    sample((7, 8), "ab", do="tokens"),
    sample((9,), "", do="tokens"),
    sample(do="words"),
    Sample(Prompt("p", {"do": "turns"}), (0, 5), (7, 1, 8), "w7 w8", "stop", DIALOGUE, {"paid": 0.1}, 0.25),
]


def test_functions_give_the_numbers_of_the_trainers_own_process(servers, tokenizer):
    environment, own = remote(servers["functions"].url, tokenizer), Rewards()
    own.bind(tokenizer)
    assert asked(environment, ROWS) == ask(own, ROWS)
    assert asked(environment, ROWS)[1] == [7 / 3, 8 / 3] and asked(environment, ROWS)[3:] == [[16.0], [6 + 0.1 + 0.25]]
    totals = [sum(values) for values in ask(own, ROWS)]
    assert environment.metrics(ROWS, totals) == {"env/total": pytest.approx(sum(totals), rel=1e-15)}
    assert environment.score([]) == [] and environment.metrics([], []) == {}


@pytest.mark.parametrize(
    ("do", "said"),
    [
        ("raise", r"refused the request \(422\): the reward python:.*Rewards failed: KeyError: 'no such thing'"),
        ("nan", r"refused the request \(422\): the reward .* must be finite, got nan for 'w7 w8'"),
        ("few", r"refused the request \(422\): a per-token reward must have 3 values"),
        ("sleep", r"refused the request \(504\): the reward .* did not answer within env.timeout_s=0.5 seconds"),
    ],
)
def test_a_served_reward_that_fails(servers, tokenizer, do, said):
    server = servers["functions"]
    environment = remote(server.url, tokenizer)
    with pytest.raises(RewardError, match=rf"^the reward remote: the server {server.url} \(env.url\) {said}"):
        asked(environment, [sample(), sample(do=do)])
    assert environment.metrics([], []) == {}
    assert asked(environment, [sample()]) == ask(Rewards(), [sample()])  # and it serves on


def test_a_reward_model_gives_the_numbers_of_the_trainers_own_process(servers, tokenizer, scorer):
    own = scorer.environment
    environment = remote(servers["model"].url, tokenizer)
    expected = own.score(RAGGED)
    assert environment.score(RAGGED) == expected and len(set(expected)) == len(RAGGED)
    assert environment.metrics(RAGGED, expected) == own.metrics(RAGGED, expected) != {}
    with ThreadPoolExecutor(8) as pool:  # merged with others or not: to each its own
        found = list(pool.map(lambda row: remote(servers["model"].url).score([row]), RAGGED * 4))
    assert sum(found, []) == pytest.approx(expected * 4, abs=1e-4)


def test_a_reward_model_of_another_vocabulary_is_refused(servers, tokenizer):
    other = AutoTokenizer.from_pretrained(tiny.tiny_model())
    other.add_tokens(["more"])
    with pytest.raises(ValueError, match=r"\(env.url\): its reward model has another vocabulary than the policy"):
        remote(servers["model"].url, other)
    remote(servers["functions"].url, other)  # functions read texts
    with pytest.raises(RewardError, match=r"tokens: expected ids from 0 to 15, got 0 to 16"):
        asked(remote(servers["model"].url, tokenizer), [sample((16,))])


def test_values_and_rewards_of_one_request(servers, scorer):
    header = {"want": ["values", "rewards"], "samples": [sample_header(row) for row in RAGGED]}
    _, tensors = decode(servers["model"].post("infer", encode(header, pack_samples(RAGGED))).content)
    assert tensors["rewards"].tolist() == scorer.environment.score(RAGGED)
    assert len(tensors["values"]) == sum(len(r.prompt_ids + r.response_ids) for r in RAGGED)
    assert len(tensors["next_values"]) == len(RAGGED) and tensors["reward_counts"].tolist() == [1] * len(RAGGED)
    assert servers["model"].post("get_reward", b'{"query": []}').status_code == 404


def test_one_request_of_many_that_fails_is_refused_alone(tokenizer):
    """Computed together because they wait together; what is wrong with one is said to it alone."""

    class Model(RewardModelEnvironment, Picky):
        model, score = None, Picky.score

        def metrics(self, samples, rewards, start=0):
            return {"env/start": float(start)}

    worker = Worker(
        None, Scorer(Model(RewardModelConfig()), EnvConfig(name="picky"), tokenizer), LimitsConfig(), idle_s=60
    )
    futures = []
    for ids in ((2, 3), (13,), (4,)):
        each = [sample(ids)]
        batch = messages.sequences(pack_samples(each), vocab_size=16, longest=None, most=9)
        futures.append(worker.submit("infer", Inference(["rewards"], batch, each)))
    taken = worker._take()
    assert len(taken) == 3
    worker._compute(taken)
    assert [futures[i].result().rewards for i in (0, 2)] == [[[5.0]], [[4.0]]]
    with pytest.raises(Refused, match="unlucky") as error:
        futures[1].result()
    assert error.value.status == 422


def test_who_is_asked_wrongly(servers, tmp_path, tokenizer):
    with pytest.raises(TrainingError, match=r"the server http://127.0.0.1:9 \(env.url\) did not answer within env.rem"):
        remote("http://127.0.0.1:9", tokenizer, retry_s=0.2)
    with pytest.raises(ValueError, match="env.url is not set"):
        make_environment(EnvConfig(name="remote"))
    with stub([(200, b'{"serves": {"value": "x"}}')]) as (url, _), pytest.raises(TrainingError, match="no reward: sta"):
        remote(url, tokenizer)
    vector = torch.tensor
    good = {"rewards": vector([1.0, 2.0], dtype=torch.float64), "reward_counts": vector([1, 1])}
    for wrong, said in (
        (
            {"rewards": vector([1.0, 2.0])},
            r"rewards \[values\] float64 and .*, got reward_counts torch.int64 \[2\], rew",
        ),
        ({"reward_counts": vector([2])}, r"rewards of 2 responses, got 2 numbers with reward_counts=\[2\]"),
        ({"reward_counts": vector([1, 2])}, "got 2 numbers with reward_counts="),
        ({"reward_counts": vector([2, 0])}, "got 2 numbers with reward_counts="),
        ({"reward_counts": vector([3, -1])}, "got 2 numbers with reward_counts="),
        ({"rewards": vector([nan, 2.0], dtype=torch.float64)}, r"env.url\), must be finite, got nan for 'w7 w8'"),
        ({}, None),
    ):
        with stub([(200, encode({"metrics": {"env/a": 1, "b": "c"}}, good | wrong))]) as (url, _):
            environment = remote(url)
            if said is None:
                assert asked(environment, [sample(), sample()]) == [[1.0], [2.0]]
                assert environment.metrics([], []) == {"env/a": 1.0}
                continue
            with pytest.raises(RewardError, match=f"the reward remote.*{url} .*{said}"):
                asked(environment, [sample(), sample()])


# --- OpenRLHF's JSON: our server -------------------------------------------------------------------------------------


def get_reward(server, **query) -> tuple[int, object]:
    answer = httpx.post(f"{server.url}/get_reward", json=query, timeout=60)
    body = answer.json()
    return answer.status_code, body["rewards"] if answer.status_code == 200 else body["error"]


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({"query": ["w5 w7"], "prompts": ["w5 "], "labels": [None]}, [2 / 7 + 1]),
        ({"query": ["w5 w7"], "prompts": ["x"]}, [5 / 7]),  # not how the text begins
        ({"prompts": ["seven", ""]}, [5 / 7, 0.0]),
        ({"query": ["a", "bc"], "labels": ["words", 5], "more": 1}, [16, 2 / 7]),
        ({"query": []}, []),
        ({"prompts": [], "labels": []}, []),
        ({"query": ["a"], "prompts": []}, "prompts: expected 1 entries, one for each text, got 0"),
        ({"query": ["a"], "labels": [1, 2]}, "labels: expected 1 entries"),
        ({"query": "a"}, "query: Input should be a valid list"),
        ({"query": [1]}, "query.0: Input should be a valid string"),
        ({"labels": [1]}, "expected query or prompts"),
        ({"query": ["a", "b"], "labels": [None, "raise"]}, "failed: KeyError"),
        ({"query": ["a"], "labels": ["sleep"]}, "did not answer within env.timeout_s=0.5"),
    ],
)
def test_openrlhf_asks_for_a_function(servers, query, expected):
    status, found = get_reward(servers["functions"], **query)
    if isinstance(expected, list):
        assert (status, found) == (200, expected)
    else:
        assert status in (422, 504) and expected in found


def test_openrlhf_asks_for_a_reward_model(scorer, tokenizer):
    served = Served(None, scorer, LimitsConfig(), names={"reward": "reward_model"}, tokenizer=tokenizer)

    def ask_for(**query):
        inference = read_query(served, LimitsConfig(), RewardQuery(**query))
        (answer,) = Worker(None, scorer, LimitsConfig(), idle_s=60)._infer([inference])
        return sum(answer.rewards, [])

    texts = [tokenizer.decode([*row.prompt_ids, *row.response_ids]) for row in RAGGED]
    expected = pytest.approx(scorer.environment.score(RAGGED), abs=1e-4)
    assert ask_for(query=texts, prompts=[""] * len(texts), labels=[""] * len(texts)) == expected
    assert ask_for(prompts=texts) == expected and ask_for(query=[]) == []
    (one,), (first,) = ask_for(query=["w7"]), scorer.environment.score([Sample(Prompt(""), (7,), (), "", "stop")])
    assert one == first
    with pytest.raises(Refused, match="a text of no token cannot be scored: ''"):
        ask_for(query=["w7", ""])
    with pytest.raises(Refused, match="a sequence has 65 tokens, the model takes 64 at most"):
        ask_for(query=["w7 " * 65])


def test_our_trainer_asks_our_server_as_openrlhf_would(servers, tokenizer):
    environment = remote(f"{servers['functions'].url}/get_reward", tokenizer, api="openrlhf")
    each = [sample((7, 8), answer="words"), sample((9, 10, 11))]
    assert asked(environment, each) == [[16.0], [len(" w9 w10 w11") / 7 + len("<s> w5") / 3]]


def test_labels_reach_math_and_sentiment_reads_the_response():
    for name, query, expected in (
        ("math", {"query": [r"2+2? \boxed{4}", "2+2? 5"], "prompts": ["2+2? "] * 2, "labels": ["4", 4]}, [1.0, 0.0]),
        ("sentiment", {"query": ["The movie was great"], "prompts": ["The movie was"]}, [0.6249]),
    ):
        env = EnvConfig(name=name)
        scorer = Scorer(make_environment(env), env, None)
        ((found, metrics),) = scorer.score([scorer.samples_of(RewardQuery(**query))])
        assert sum(found, []) == expected and metrics == ({"env/answer_marked": 0.5} if name == "math" else {})


def test_several_rewards_are_served_as_their_weighted_sum():
    env = EnvConfig(name="copy", rewards={"copy": 3.0, "math": 0.5})
    both = make_environment(env)
    assert not hasattr(both, "bind")  # neither needs a tokenizer, so the server loads none
    each = [sample((5, 5, 1), "4", target=5, answer=4), sample((5, 6), "5", target=5, answer=4), sample((5,), "4")]
    scorer = Scorer(both, env, None)
    ((found, metrics),) = scorer.score([each[:2]])
    assert found == [[2.5], [1.5]] and metrics == {"env/math/answer_marked": 0.0}
    with pytest.raises(Refused, match="the reward copy failed: KeyError: 'target'"):
        scorer.score([each])
    assert scorer.score([[]]) == [([], {})]


def test_responses_to_one_prompt_stay_on_one_rank(monkeypatch):
    samples = [sample((i,), prompt=prompt) for prompt in "abc" for i in range(3)]
    monkeypatch.setattr(dist, "size", lambda: 2)
    parts = []
    for rank in (0, 1):
        monkeypatch.setattr(dist, "rank", lambda rank=rank: rank)
        parts.append(mine(samples))
    assert parts == [samples[:3], samples[3:]]


# --- OpenRLHF's JSON: another's server -------------------------------------------------------------------------------


@contextmanager
def stub(answers):
    """A server that gives these answers, (status, body) or (status, body, seconds before it), the last one for ever."""
    seen = []

    class Handler(BaseHTTPRequestHandler):
        def answer(self):
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            seen.append((self.path, body, self.headers.get("Authorization")))
            status, content, *wait = answers[min(len(seen), len(answers)) - 1]
            stop.wait(*wait or [0])
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_GET = answer

        def log_message(self, *_):
            pass

    stop = threading.Event()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", seen
    finally:
        stop.set()
        server.shutdown()
        server.server_close()


def of_texts(url: str, tokenizer, **settings):
    return remote(f"{url}/get_reward", tokenizer, api="openrlhf", **settings)


def test_the_texts_that_openrlhf_would_send(tokenizer):
    asked_for = [sample((7, 8, 1), answer=0), sample((6,), answer=None), TRAVELLERS[3]]
    with stub([(200, b'{"rewards": [1, 2.5, -3]}')]) as (url, seen):
        assert asked(of_texts(url, tokenizer, token="secret"), asked_for) == [[1.0], [2.5], [-3.0]]
        asked(of_texts(url, tokenizer, label_key="n"), [sample(n={"a": [1]}, answer=2)] * 3)
    path, body, token = seen[0]
    assert (path, token) == ("/get_reward", "Bearer secret")
    assert json.loads(body) == {
        "query": ["<s> w5 w7 w8 </s>", "<s> w5 w6", "<s> w5 w7 </s> w4 w5 w8 w3"],
        "prompts": ["<s> w5"] * 3,
        "labels": [0, "", ""],
    }
    assert json.loads(seen[1][1])["labels"] == [{"a": [1]}] * 3


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ({"rewards": [[1.5], [2]]}, [[1.5], [2.0]]),  # a head's output of shape [B, 1]
        ({"rewards": [[1, 2, 3], 2]}, [[1.0, 2.0, 3.0], [2.0]]),  # per token
        (
            {"rewards": [1, 2], "scores": [9, 9], "extra_logs": {"a": [1, 2], "b": 3, "c": ["x"], "d": []}},
            [[1.0], [2.0]],
        ),
    ],
)
def test_answers_of_other_forms(tokenizer, answer, expected):
    with stub([(200, json.dumps(answer).encode())]) as (url, _):
        environment = of_texts(url, tokenizer)
        assert asked(environment, [sample(), sample()]) == expected
        assert environment.metrics([], []) == ({"env/a": 1.5, "env/b": 3.0} if "extra_logs" in answer else {})


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (200, '{"rewards": [1.0]}', r", must give 2 values, one per response, got 1"),
        (200, '{"rewards": 1.0}', r", must give 2 values, one per response, got 1"),
        (200, '{"rewards": [1, NaN]}', r": its answer to the request cannot be read: not JSON: NaN is not JSON; got"),
        (200, '{"rewards": [1, 1e999]}', r", must be finite, got inf for 'w7 w8'"),
        (200, '{"rewards": [1, "2"]}', r", must be a number, got '2' for 'w7 w8'"),
        (200, '{"rewards": [1, null]}', r", must be a number, got None"),
        (
            200,
            '{"rewards": [1, [1, 2]]}',
            r"a per-token reward must have 3 values.*got 2 .* from the reward remote, .*",
        ),
        (200, '{"rewards": "high"}', r' must answer with JSON with "rewards", a list of 2 numbers, got str there'),
        (200, '{"scores": [1, 2]}', r" must answer with .*, got the keys \['scores'\]"),
        (
            200,
            "[1, 2]",
            r": its answer to the request cannot be read: expected a JSON object, got list; got '\[1, 2\]'",
        ),
        (200, "<html>welcome</html>", r": its answer .* cannot be read: not JSON: .*; got '<html>welcome"),
        (404, "<html>no such page</html>", r" refused the request \(404\): <html>no such page"),
        (401, '{"error": "who are you"}', r" refused the request \(401\): who are you; set env.remote.token"),
        (500, "oops", r" did not answer within env.remote.retry_s=0.2 seconds: oops"),
    ],
)
def test_answers_that_are_wrong(tokenizer, status, body, said):
    with stub([(status, body.encode())]) as (url, _):
        start = time.monotonic()
        with pytest.raises(RewardError) as error:
            asked(of_texts(url, tokenizer, retry_s=0.2), [sample(), sample()])
    named = rf"the server {url}/get_reward \(env.url\)"
    pattern = said if "from the reward" in said else rf"the reward remote[:,] {named}{said}"
    assert re.search(pattern, str(error.value)), error.value
    assert url in str(error.value) and "env.url" in str(error.value) and time.monotonic() - start < 2


def test_a_server_that_comes_back(tokenizer, capsys):
    with stub([(500, b"out of memory"), (503, b""), (200, b'{"rewards": [4]}')]) as (url, seen):
        assert asked(of_texts(url, tokenizer, retry_s=5), [sample()]) == [[4.0]]
        assert len(seen) == 3 and "(env.url): out of memory" in capsys.readouterr().out


def test_a_server_that_hangs(tokenizer):
    """Each request within env.remote.timeout_s, all of them within env.timeout_s, whichever is over first."""
    with stub([(200, b'{"rewards": [4]}', 20)]) as (url, _):
        said = (
            r"did not answer within env.remote.retry_s=0.1 seconds: no answer within env.remote.timeout_s=0.2 seconds"
        )
        with pytest.raises(RewardError, match=said) as error:
            asked(of_texts(url, tokenizer, timeout_s=0.2, retry_s=0.1), [sample()])
        assert not isinstance(error.value, LateRewardError)
        late = (
            rf"the reward remote, the server {url}/get_reward \(env.url\), did not answer within env.timeout_s=0.3 sec"
        )
        with pytest.raises(LateRewardError, match=late):
            asked(of_texts(url, tokenizer), [sample()], timeout_s=0.3)


def test_a_run_keeps_the_responses_that_could_not_be_rewarded(tmp_path):
    with stub([(200, b'{"rewards": [1]}')]) as (url, seen):
        options = {"env__url": f"{url}/get_reward", "env__remote__api": "openrlhf", "env__rewards": "{remote: 1.0}"}
        with pytest.raises(RewardError, match=r"\(env.url\), must give 16 values, one per response, got 1"):
            run(tmp_path, **options)
    kept = [json.loads(line) for line in (tmp_path / "failed_rollout.jsonl").read_text().splitlines()]
    assert len(kept) == 16 and len(seen) == 1
    assert [row["response_ids"] for row in kept] and all(q.startswith("<s> ") for q in json.loads(seen[0][1])["query"])


def test_a_metric_that_one_rank_was_told_and_another_was_not_is_left_out(monkeypatch):
    class Half:
        def score(self, samples):
            return [1.0] * len(samples)

        def metrics(self, samples, rewards):
            return {"env/seen": 1.0, "env/both": 2.0}

    batch = pack([[0], [0], [0]], [Completion([5], [0.0], "stop", 0)] * 3)
    batch.samples = [sample((5,), prompt=prompt) for prompt in "abc"]
    monkeypatch.setattr(dist, "part", lambda items: items[:1])
    other = ({"": [[2.0], [4.0]]}, {"env/both": 5.0})
    monkeypatch.setattr(dist, "together", lambda compute: [compute(), other])
    assert score(Half(), batch).metrics == {"env/both": 4.0}  # (1 * 2 + 2 * 5) / 3


# --- settings --------------------------------------------------------------------------------------------------------

NEEDED = ("env.rewards={remote: 1}", "env.url=http://127.0.0.1:8900")
OPENRLHF = (NEEDED[0], "env.url=http://127.0.0.1:8900/get_reward", "env.remote.api=openrlhf")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ((NEEDED[0],), "remote in env.name or env.rewards needs env.url"),
        ((NEEDED[1],), "env.url=http://127.0.0.1:8900 has no effect with env.name=sentiment"),
        ((*NEEDED, "env.remote.label_key=x"), "env.remote.label_key=x has no effect with env.remote.api=fastppo"),
        ((NEEDED[0], OPENRLHF[1]), "env.url=.*without a path; with env.remote.api=openrlhf it has one"),
        ((*OPENRLHF, "env.remote.timeout_s=700"), "env.remote.timeout_s=700 is never reached: env.timeout_s=600"),
        ((*OPENRLHF, "env.timeout_s=100", "env.remote.retry_s=200"), "env.remote.retry_s=200 is never reached"),
        (("env.name=remote", NEEDED[1], "data.prompts=hf:a/b"), "env.name=remote needs policy.model_name"),
        (("env.name=remote", NEEDED[1], "policy.model_name=x"), "env.name=remote needs data.prompts"),
    ],
)
def test_settings(settings, said):
    with pytest.raises(ConfigError, match=said):
        check(load_config(None, settings))


def test_settings_that_are_taken():
    for accepted in (NEEDED, OPENRLHF, (*OPENRLHF, "env.timeout_s=null", "env.remote.timeout_s=7000")):
        check(load_config(None, accepted))
