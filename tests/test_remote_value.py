"""A critic on a server: the numbers of a local one, whatever breaks on either side, and refusals by name.

Every server here is the real process. "Unbroken" is a local critic in the trainer's own process."""

import json
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file

from tests import tiny
from tests.served import ServerProcess, Supervisor
from tests.test_dist import ENVIRONMENT, metrics, torchrun
from trainers.arithmetic import ConfigError, check
from trainers.config import ValueConfig
from trainers.config_remote import RemoteConfig
from trainers.ppo import PPOTrainer
from trainers.run import TrainingError
from trainers.service.client import Client, ServerError
from trainers.service.critic import Critic
from trainers.service.messages import LoadRequest, SaveRequest, TrainHeader, packed
from trainers.service.wire import Refused, decode, encode
from trainers.value.hf import LocalValue
from trainers.value.remote import RemoteValue

TIMES = ("time", "timing_s/", "perf/throughput", "perf/time_per_step", "perf/max_memory", "perf/critic_")
CRITIC = {"value__train_global_batch_size": 8, "value__num_layers_unfrozen": -1}


def lines(run_dir: Path) -> list[dict]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.startswith(TIMES)} for row in rows]


def small(run_dir: Path, url: str | None = None, **overrides: object):
    """6 steps of 16 responses: two optimizer steps of the critic in each, a checkpoint after every second."""
    options = {
        "logger__run_dir": run_dir,
        "ppo__num_prompts_per_step": 4,
        "ppo__num_generations_per_prompt": 4,
        "ppo__max_num_steps": 6,
        "policy__train_global_batch_size": 8,
        "policy__train_micro_batch_size": 8,
        "policy__logprob_batch_size": 8,
        "checkpointing__enabled": True,
        "checkpointing__save_period": 2,
        "value__mode": "remote" if url else "local",
    }
    if url:
        options |= {"value__url": url, "value__remote__retry_s": 60}
    return tiny.config(**options | CRITIC | overrides)


def run(config) -> PPOTrainer:
    trainer = PPOTrainer(config)
    try:
        trainer.fit()
    finally:
        trainer.close()
    return trainer


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("unbroken")
    run(small(folder))
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with ServerProcess(tmp_path_factory.mktemp("server"), "config=ppo_copy", "infer_batch_size=8") as process:
        yield process


def critic_of(server: ServerProcess, run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    known = json.loads((run_dir / f"checkpoints/step_{step}/critic/remote.json").read_text())
    return load_file(server.folder / f"critic/{known['run']}/step_{known['step']}/critic/critic.safetensors")


def assert_same(server: ServerProcess, run_dir: Path, unbroken: Path, step: int = 6) -> None:
    assert lines(run_dir) == lines(unbroken)
    theirs = load_file(unbroken / f"checkpoints/step_{step}/critic/critic.safetensors")
    mine = critic_of(server, run_dir, step)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_the_numbers_of_a_local_critic(server, unbroken, tmp_path):
    run(small(tmp_path, server.url, checkpointing__save_period=1))
    assert_same(server, tmp_path, unbroken)
    assert not list((tmp_path / "critic_requests").glob("*"))  # all of them are in the last checkpoint
    assert server.get("info").json()["run"] is None  # released
    # The run has kept steps 5 and 6, and had step 4 when it asked for the last of them.
    assert {path.name for path in (server.folder / "critic").glob("*/step_*")} == {"step_8", "step_10", "step_12"}


def test_the_policy_scores_while_the_critic_infers(server, tmp_path, monkeypatch):
    """The critic's half second is not added to the step: what is left of it when the log-probs are there is."""

    def slowly(self, *arguments, ask=RemoteValue._infer):
        time.sleep(0.5)
        return ask(self, *arguments)

    def score(self, batch, want, policy=PPOTrainer.score_logprobs):
        time.sleep(0.4)
        return policy(self, batch, want)

    monkeypatch.setattr(RemoteValue, "_infer", slowly)
    monkeypatch.setattr(PPOTrainer, "score_logprobs", score)
    run(small(tmp_path, server.url, ppo__max_num_steps=1, checkpointing__enabled=False))
    row = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
    assert row["perf/critic_infer_time"] > 0.5
    assert row["timing_s/values"] < 0.35


def test_a_server_killed_in_the_middle_of_steps(tmp_path, unbroken, monkeypatch):
    """Before its first checkpoint (of 4 requests), after it, and once more while it is brought up to date. It comes
    back at the checkpoint, and the client sends the gap again."""
    with ServerProcess(tmp_path / "server", "config=ppo_copy", "infer_batch_size=8") as server:
        kills, sent = [], []

        def exchange(self, route, body, send=Client.exchange):
            if route == "train":
                sent.append(body)
                if len(sent) in (3, 10, 12):
                    kills.append(len(sent))
                    server.end(signal.SIGKILL)
                    threading.Thread(target=server.start).start()
            return send(self, route, body)

        monkeypatch.setattr(Client, "exchange", exchange)
        run(small(tmp_path / "run", server.url))
        assert kills == [3, 10, 12]
        assert_same(server, tmp_path / "run", unbroken)


def test_a_lost_answer_and_a_request_sent_twice(server, unbroken, tmp_path, monkeypatch):
    """Every request is sent twice, and the first answer of each is thrown away."""
    exchange = Client.exchange

    def twice(self, route, body):
        first = exchange(self, route, body)
        second = exchange(self, route, body)
        if route == "train":
            assert all(torch.equal(first[1][name], second[1][name]) for name in first[1])
        return second

    monkeypatch.setattr(Client, "exchange", twice)
    run(small(tmp_path, server.url))
    assert_same(server, tmp_path, unbroken)


def test_a_client_that_dies_between_two_updates_and_resumes(server, unbroken, tmp_path, monkeypatch):
    """Dead in step 4, with its first critic update applied: the critic goes back to the checkpoint of step 2."""
    policy_minibatches = PPOTrainer.policy_minibatches

    def dies(self, batch, done, *, step, epoch):
        if step == 4:
            self.value.settle()
            raise KeyboardInterrupt
        return policy_minibatches(self, batch, done, step=step, epoch=epoch)

    monkeypatch.setattr(PPOTrainer, "policy_minibatches", dies)
    trainer = PPOTrainer(small(tmp_path, server.url))
    with pytest.raises(KeyboardInterrupt):
        trainer.fit()
    assert server.get("info").json()["step"] == 8  # nothing has told the server
    monkeypatch.undo()
    log = tmp_path / "metrics.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:2]))  # step 3 is made again
    run(small(tmp_path, server.url))
    assert_same(server, tmp_path, unbroken)


def test_a_branch_of_another_run_gets_a_critic_of_its_own(server, unbroken, tmp_path):
    run(small(tmp_path / "first", server.url, ppo__max_num_steps=4))
    run(small(tmp_path / "branch", server.url, checkpointing__resume=tmp_path / "first/checkpoints/step_4"))
    assert lines(tmp_path / "branch") == lines(unbroken)[4:]
    known = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("*/checkpoints/step_*/critic/remote.json"))]
    assert [each["step"] for each in known] == [12, 4, 8]
    assert known[1]["run"] == known[2]["run"] != known[0]["run"]


def test_one_run_at_a_time(server, tmp_path):
    """A run that has trained the critic and is not over keeps others out; once it is over the next begins afresh."""
    first = PPOTrainer(small(tmp_path / "first", server.url, ppo__max_num_steps=1))
    first.fit()
    with pytest.raises(TrainingError, match=r"trained to step 2: end that run first"):
        PPOTrainer(small(tmp_path / "second", server.url))
    first.close()
    second = PPOTrainer(small(tmp_path / "second", server.url))
    assert server.get("info").json()["step"] == 0
    second.close()


def test_a_run_that_has_trained_nothing_yet_keeps_others_out_too(server, tmp_path):
    first = PPOTrainer(small(tmp_path / "first", server.url, ppo__max_num_steps=1))
    with pytest.raises(TrainingError, match=r"trained to step 0: end that run first.* POST .* to /release"):
        PPOTrainer(small(tmp_path / "second", server.url))
    first.fit()
    first.close()


def test_a_run_that_was_released_takes_its_critic_back(server, tmp_path, unbroken, capsys):
    """As after trainers.train(): whoever trains on gets the critic as it was."""
    trainer = PPOTrainer(small(tmp_path, server.url, ppo__max_num_steps=4))
    trainer.fit()
    trainer.release()
    trainer.release()
    assert "was not told" not in capsys.readouterr().out
    assert server.get("info").json()["run"] is None
    trainer.cfg.max_num_steps = 6
    trainer.fit()
    trainer.close()
    assert_same(server, tmp_path, unbroken)


def test_a_rollout_beyond_the_servers_limits_goes_in_several_requests(server, tmp_path, unbroken, monkeypatch):
    asked = []

    def exchange(self, route, body, send=Client.exchange):
        asked.extend([route] if route == "infer" else [])
        return send(self, route, body)

    monkeypatch.setattr(Client, "exchange", exchange)
    trainer = PPOTrainer(small(tmp_path, server.url, ppo__max_num_steps=2))
    trainer.value.info["max_sequences"] = 8  # whole passes of infer_batch_size, so that not a bit changes
    trainer.fit()
    trainer.close()
    assert len(asked) == 2 * 2
    assert lines(tmp_path) == lines(unbroken)[:2]


class Failing(httpx.BaseTransport):
    """Fails `times` times, each after `seconds`, then answers."""

    def __init__(self, times: int, seconds: float):
        self.left, self.seconds = times, seconds

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if self.left:
            self.left -= 1
            time.sleep(self.seconds)
            raise httpx.ReadTimeout("nothing came")
        return httpx.Response(200, json={"fine": True})


@pytest.mark.parametrize(("times", "fine"), [(1, True), (10**6, False)])
def test_patience_begins_with_the_first_failure(times, fine):
    """An attempt that took longer than retry_s is made again all the same."""
    client = Client("http://127.0.0.1:1", RemoteConfig(retry_s=0.3), key="value")
    client.http = httpx.Client(transport=Failing(times, 0.4))
    if fine:
        assert client.get("info") == {"fine": True}
    else:
        with pytest.raises(ServerError, match=r"value.remote.retry_s=0.3 seconds: no answer within"):
            client.get("info")
    client.close()


def test_closing_gives_up_what_is_under_way():
    client = Client("http://127.0.0.1:9", RemoteConfig(), key="value")
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(client.get, "info")
        time.sleep(0.3)
        start = time.monotonic()
        client.close()
        with pytest.raises(ServerError):
            asked.result(timeout=10)
    assert time.monotonic() - start < 5


def test_a_critic_that_begins_anew_is_told_of_all_the_while(server, tmp_path):
    """Another thread reads what is served while the model is built again."""
    client = Client(server.url, RemoteConfig(), key="value")
    statuses = set()
    with ThreadPoolExecutor() as pool:
        for number in range(3):
            client.post("load", {"run": f"r{number}", "step": 0})
            assert server.post("train", train_body(1, run=f"r{number}")).status_code == 200
            client.post("release", {"run": f"r{number}"})
            anew = pool.submit(client.post, "load", {"run": f"s{number}", "step": 0})
            while not anew.done():
                statuses.add(server.get("info").status_code)
            client.post("release", {"run": f"s{number}"})
    assert statuses == {200}
    client.close()


def train_body(number: int, seed: int = 0, run: str = "r") -> bytes:
    batch = tiny.rollout(seed=seed)
    return encode({"run": run, "id": number, "cliprange": None}, packed(batch, "values", "returns"))


def test_train_requests_are_numbered(server):
    def post(body: bytes) -> httpx.Response:
        return server.post("train", body)

    def at(step: int) -> None:
        assert server.get("info").json()["step"] == step

    client = Client(server.url, RemoteConfig(), key="value")
    client.post("load", {"run": "r", "step": 0})
    first = post(train_body(1))
    assert first.status_code == 200
    at(1)
    assert post(train_body(1)).content == first.content
    at(1)
    other = post(train_body(1, seed=1))
    assert other.status_code == 409 and "another content" in other.json()["error"]
    skipped = post(train_body(3))
    assert skipped.status_code == 409 and skipped.json()["step"] == 1
    stranger = post(train_body(2, run="s"))
    assert stranger.status_code == 409 and "belongs to run r, not to s" in stranger.json()["error"]
    at(1)
    assert post(train_body(2)).status_code == 200
    early = server.post("save", json.dumps({"run": "r", "step": 1}).encode())
    assert early.status_code == 409
    at(2)
    client.post("release", {"run": "r"})
    client.close()


def test_a_checkpoint_that_cannot_be_written_costs_that_checkpoint(server, tmp_path, capsys):
    """The run goes on, as it does when its own disk is full, and so does the server."""
    trainer = PPOTrainer(small(tmp_path, server.url))
    (server.folder / "critic").mkdir(exist_ok=True)
    in_the_way = server.folder / "critic" / trainer.value.run
    in_the_way.write_text("")
    fit_log = trainer.log

    def log(*arguments):
        fit_log(*arguments)
        if trainer.progress.step == 3:
            in_the_way.unlink()

    trainer.log = log
    trainer.fit()
    trainer.close()
    assert "step 2 was not saved, training goes on: " in capsys.readouterr().out
    assert [path.name for path in sorted((tmp_path / "checkpoints").iterdir())] == ["step_4", "step_6"]


def test_a_critic_is_not_trained_on_with_other_settings(tmp_path):
    """A server that is started again with another learning rate does not take up the critic."""

    def critic(**facts: object) -> Critic:
        cpu = {"device": torch.device("cpu"), "dtype": torch.float32}
        cfg = ValueConfig(mode="local")
        return Critic(lambda: LocalValue(tiny.tiny_model(), cfg, score_batch=8, **cpu), tmp_path, facts)

    first = critic(lr=0.003, dtype="float32")
    first.load(LoadRequest(run="r", step=0))
    answer = first.train(TrainHeader(run="r", id=1), "digest", tiny.rollout())
    first.save(SaveRequest(run="r", step=1))
    again = critic(lr=0.003, dtype="float32")
    assert (again.run, again.step) == ("r", 1)
    repeated = again.train(TrainHeader(run="r", id=1), "digest", tiny.rollout())  # answered from the checkpoint
    assert torch.equal(repeated.sums["critic"], answer.sums["critic"])
    with pytest.raises(Refused, match=r"step_1 was made with lr=0.003, here it is 0.1"):
        critic(lr=0.1, dtype="float32")


def test_an_answer_says_at_which_step(server):
    client = Client(server.url, RemoteConfig(), key="value")
    client.post("load", {"run": "r", "step": 0})
    batch = tiny.rollout()
    header, tensors = client.exchange("infer", encode({"want": ["values"], "run": "r", "step": 0}, packed(batch)))
    assert header["step"] == 0 and header["run"] == "r"
    assert tensors["values"].shape == batch.tokens.shape and tensors["next_values"].shape == (len(batch),)
    with pytest.raises(ServerError, match="at step 0, not at 5") as caught:
        client.exchange("infer", encode({"want": ["values"], "run": "r", "step": 5}, packed(batch)))
    assert caught.value.status == 409 and caught.value.facts["step"] == 0
    client.post("release", {"run": "r"})
    client.close()


def test_nobody_listens(tmp_path):
    start = time.monotonic()
    with pytest.raises(TrainingError, match=r"http://127.0.0.1:9 \(value.url\) .*value.remote.retry_s=1 .*refused"):
        PPOTrainer(small(tmp_path, "http://127.0.0.1:9", value__remote__retry_s=1))
    assert time.monotonic() - start < 5


def test_a_critic_of_another_kind_is_refused(server, tmp_path):
    with pytest.raises(TrainingError, match=r"value.optimizer.lr=0.5, and 0.003 on the server"):
        PPOTrainer(small(tmp_path, server.url, value__optimizer__lr=0.5))


def test_a_critic_that_reads_other_words_is_refused(server, tmp_path, monkeypatch):
    monkeypatch.setattr("trainers.value.remote.vocab_digest", lambda tokenizer, vocab: "of another one")
    with pytest.raises(TrainingError, match="another vocabulary than the policy"):
        PPOTrainer(small(tmp_path, server.url))


def test_a_server_that_lost_its_checkpoints(tmp_path, monkeypatch):
    """Started again with another run_dir: neither can the run go on, nor can it be resumed, and both say why."""
    with ServerProcess(tmp_path / "server", "config=ppo_copy", "infer_batch_size=8") as server:

        def train(self, n, body, send=RemoteValue._train):
            if n == 6:
                server.settings.append(f"run_dir={tmp_path / 'elsewhere'}")
                server.restart()
            return send(self, n, body)

        monkeypatch.setattr(RemoteValue, "_train", train)
        with pytest.raises(TrainingError, match="there is no checkpoint of run"):
            run(small(tmp_path / "run", server.url))
        with pytest.raises(TrainingError, match=r"cannot resume .*step_2, which belongs to step 4 .* no checkpoint of"):
            PPOTrainer(small(tmp_path / "run", server.url))


def test_a_trainer_without_servers_needs_nothing_of_the_extra():
    """README's first command installs the extra `trainer` alone."""
    code = (
        "import sys\n"
        "for name in ('pydantic', 'fastapi', 'fastapi_offline', 'uvicorn', 'prometheus_client'):\n"
        "    sys.modules[name] = None\n"
        "import trainers.ppo, trainers.reinforce\n"
        "from trainers.service.reach import reach\n"
        "from trainers.config import PPOTrainerConfig\n"
        "reach(PPOTrainerConfig())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"value__mode": "remote"}, "value.mode=remote needs value.url"),
        (
            {"value__mode": "local", "value__url": "http://a:1"},
            "value.url=http://a:1 has no effect with value.mode=local",
        ),
        ({"value__mode": "local", "value__remote__retry_s": 3}, "value.remote.retry_s=3.0 has no effect"),
        ({"value__url": "127.0.0.1:8900"}, "value.url=127.0.0.1:8900: expected http://HOST:PORT"),
        ({"value__url": "http://u:p@a:1"}, "use the setting remote.token"),
        ({"value__url": "http://a:1/x"}, "without a path"),
        ({"value__url": "http://a:1", "value__detach_trunk": False}, "value.detach_trunk=false has no effect"),
        ({"value__url": "http://a:1", "value__offload": True}, "value.offload=true has no effect"),
        ({"value__url": "https://a:1", "value__remote__ca_file": "/no"}, "value.remote.ca_file=/no: there is no such"),
        ({"value__url": "http://a:1", "value__train_global_batch_size": 7}, "value.train_global_batch_size=7 does not"),
    ],
)
def test_settings_that_do_not_go_together(settings, message):
    config = tiny.config(**{"value__mode": "remote", **settings})
    with pytest.raises(ConfigError) as caught:
        check(config)
    assert message in str(caught.value)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_every_ten_steps_of_fifty(tmp_path):
    """kill -9 of the server after steps 10, 20, 30 and 40, whatever it does then; its supervisor starts it again."""
    steps = {"ppo__max_num_steps": 50, "checkpointing__save_period": 4}
    run(small(tmp_path / "unbroken", **steps))
    with ServerProcess(tmp_path / "server", "config=ppo_copy", "infer_batch_size=8") as server:
        supervisor = Supervisor(server, tmp_path / "run/metrics.jsonl", [10, 20, 30, 40])
        supervisor.start()
        run(small(tmp_path / "run", server.url, **steps))
        assert supervisor.kills == 4
        assert_same(server, tmp_path / "run", tmp_path / "unbroken", 50)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_ranks_ask_and_two_ranks_serve(tmp_path):
    """Of the trainer one speaks to the server, of the server one listens; all of them compute. The numbers are those of
    one process up to the order in which gradients are added."""
    steps = ["ppo.max_num_steps=3", "value.train_global_batch_size=6"]
    cut = "value.train_micro_batch_size=2"
    alone = torchrun(tmp_path / "one", *steps, cut, "value.mode=local", ranks=1, algorithm="ppo")
    with ServerProcess(tmp_path / "server", "config=ppo_copy", cut, ranks=2) as server:
        patience = ["value.remote.timeout_s=20", "value.remote.retry_s=30"]
        remote = [*steps, *patience, "value.mode=remote", f"value.url={server.url}"]
        for command in (alone, torchrun(tmp_path / "two", *remote, algorithm="ppo")):
            done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
            assert done.returncode == 0, done.stderr
        assert server.get("info").json()["run"] is None
    for one, two in zip(metrics(tmp_path / "one"), metrics(tmp_path / "two"), strict=True):
        for name in one:
            if not name.startswith(("tim", "perf/")):
                assert two[name] == pytest.approx(one[name], rel=2e-3, abs=2e-4), name


def test_decoding_gives_what_was_encoded():
    header, tensors = decode(encode({"a": [1, None, "ü"]}, {"x": torch.arange(3), "m": torch.tensor([True, False])}))
    assert header == {"a": [1, None, "ü"]}
    assert torch.equal(tensors["x"], torch.arange(3)) and tensors["m"].tolist() == [True, False]
