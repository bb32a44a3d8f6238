"""Environments: their prompts, their rewards on written-out responses, and what a wrong setting is answered with."""

import json
import random
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from trainers.config import EnvConfig
from trainers.environments import Message, Prompt, Sample, Turn, lookup, make_environment
from trainers.environments.function import FunctionEnvironment
from trainers.environments.guards import is_plain_maths
from trainers.extras import require


def sample(prompt: Prompt, response: str, response_ids: tuple[int, ...] = (5, 1), finish: str = "stop") -> Sample:
    return Sample(prompt, prompt.ids or (0,), response_ids, response, finish)


# --- sentiment ---------------------------------------------------------------------------------------------------


def test_sentiment_prompts_are_sixteen_and_neutral():
    environment = make_environment(EnvConfig(name="sentiment"))
    prompts = environment.prompts()
    assert len({prompt.text for prompt in prompts}) == 16
    assert environment.default_model == "smollm2-135m"
    assert environment.score([sample(prompt, prompt.text) for prompt in prompts]) == [0.0] * 16
    assert [prompt.text for prompt in prompts if prompt.text != prompt.text.strip()] == []


def test_sentiment_scores_the_continuation_alone():
    environment = make_environment(EnvConfig(name="sentiment"))
    prompt = Prompt("I love this wonderful")
    texts = [" good", " bad", " a table", "", " \n"]
    # VADER: good 1.9, bad -2.5 in the lexicon, and x / sqrt(x^2 + 15) rounded to 4 places
    assert environment.score([sample(prompt, text) for text in texts]) == [0.4404, -0.5423, 0.0, 0.0, 0.0]


# --- copy --------------------------------------------------------------------------------------------------------


def test_copy_prompts():
    environment = make_environment(EnvConfig(name="copy", size=300, seed=4))
    prompts = environment.prompts()
    assert environment.default_model == "tiny-llama"
    assert len(prompts) == 300
    assert {prompt.ids for prompt in prompts} == {(0, k) for k in range(2, 16)}
    assert all(prompt.metadata == {"target": prompt.ids[1]} for prompt in prompts)
    assert all(prompt.text == f"<s> w{prompt.ids[1]}" for prompt in prompts)
    assert prompts == make_environment(EnvConfig(name="copy", size=300, seed=4)).prompts()
    assert prompts != make_environment(EnvConfig(name="copy", size=300, seed=5)).prompts()


def test_copy_reward_is_the_share_of_the_target():
    environment = make_environment(EnvConfig(name="copy", size=1))
    prompt = Prompt("<s> w7", {"target": 7}, (0, 7))
    responses = [(7, 7, 7, 7), (7, 7, 7, 1), (7, 3), (1,), (3, 4), ()]
    assert environment.score([sample(prompt, "", ids) for ids in responses]) == [1.0, 0.75, 0.5, 0.0, 0.0, 0.0]


# --- lookup ------------------------------------------------------------------------------------------------------


def test_lookup_prompts_tell_the_key_alone():
    environment = make_environment(EnvConfig(name="lookup", size=400, seed=4))
    prompts = environment.prompts()
    assert len(prompts) == 400
    assert {prompt.ids for prompt in prompts} == {(0, key) for key in lookup.WORDS}
    assert all(prompt.ids[1] == prompt.metadata["key"] for prompt in prompts)
    pairs = {(prompt.metadata["key"], prompt.metadata["value"]) for prompt in prompts}
    assert len(pairs) == len(lookup.WORDS) ** 2  # every key has every value in some task
    assert prompts == make_environment(EnvConfig(name="lookup", size=400, seed=4)).prompts()


def test_lookup_pays_for_asking_for_the_key_and_the_answer_once_each():
    environment = make_environment(EnvConfig(name="lookup", size=1))
    prompt = Prompt("<s> w7", {"key": 7, "value": 9}, (0, 7))

    def turn(*ids: int, paid: float | None = None) -> Turn:
        written = sample(prompt, "", ids)
        metadata = {} if paid is None else {"paid": paid}
        return environment.step([replace(written, messages=(Message("policy", ids, ""),), metadata=metadata)])[0]

    assert turn(2, 7) == Turn(observation_ids=(3, 9), reward=0.5, metadata={"paid": 0.5})
    assert turn(2, 8) == Turn(observation_ids=(4,), reward=0.25, metadata={"paid": 0.25})
    assert turn(2) == Turn(observation_ids=(4,), reward=0.25, metadata={"paid": 0.25})
    assert turn(2, 7, paid=0.25) == Turn(observation_ids=(3, 9), reward=0.25, metadata={"paid": 0.5})
    assert turn(2, 8, paid=0.5) == Turn(observation_ids=(4,), reward=0.0, metadata={"paid": 0.5})
    for ids, reward in (((9, 9), 0.5), ((9, 7), 0.25), ((7, 2), 0.0), ((9,), 0.5)):
        assert turn(*ids, paid=0.5) == Turn(reward=reward, done=True)


# --- reasoning_gym -----------------------------------------------------------------------------------------------


@pytest.fixture
def chain_sum():
    return make_environment(
        EnvConfig(name="reasoning_gym:chain_sum", size=5, seed=3, params={"min_terms": 2, "max_terms": 2})
    )


def test_reasoning_gym_prompts(chain_sum):
    prompts = chain_sum.prompts()
    assert len(prompts) == 5
    for i, prompt in enumerate(prompts):
        assert prompt.metadata["entry"] == i
        assert len(prompt.text.split(" + ")) + len(prompt.text.split(" - ")) == 3  # two terms: params arrived
    config = EnvConfig(name="reasoning_gym:chain_sum", size=5, params={"min_terms": 2, "max_terms": 2})
    config.seed = 3
    assert make_environment(config).prompts() == prompts
    config.seed = 4
    assert make_environment(config).prompts() != prompts


def test_reasoning_gym_reward_and_exact_match(chain_sum):
    prompt = chain_sum.prompts()[0]
    answer = prompt.metadata["answer"]
    samples = [
        sample(prompt, text)
        for text in (
            f"<answer>{answer}</answer>",
            f"thinking <answer>0.5</answer> no: <answer> {answer} </answer> done",
            f" {answer}\n",
            f"xx{answer}xx",  # the verifier pays len(answer) / len(text)
            f"{answer} <answer>nothing</answer>",
            "",
        )
    ]
    rewards = chain_sum.score(samples)
    assert rewards == pytest.approx([1.0, 1.0, 1.0, len(answer) / (len(answer) + 4), 0.0, 0.0])
    assert chain_sum.metrics(samples, rewards) == pytest.approx(
        {"env/exact_match": 3 / 6, "env/answer_tag": 3 / 6, "env/verifier_errors": 0.0}
    )


def test_reasoning_gym_verifier_that_raises_is_counted():
    environment = make_environment(EnvConfig(name="reasoning_gym:prime_factorization", size=1))
    prompt = environment.prompts()[0]
    samples = [sample(prompt, "no numbers here"), sample(prompt, prompt.metadata["answer"])]
    for _ in range(2):  # the count is of the last call
        rewards = environment.score(samples)
        assert rewards == [0.0, 1.0]
        assert environment.metrics(samples, rewards)["env/verifier_errors"] == 0.5


EVALUATING = ["string_insertion", "spiral_matrix", "binary_matrix", "n_queens"]
PARSING = ["countdown", "puzzle24", "polynomial_multiplication", "simple_integration", "intermediate_integration"]


@pytest.mark.parametrize("name", [*EVALUATING, *PARSING])
def test_reasoning_gym_runs_no_code_of_a_response(name, tmp_path):
    canary = tmp_path / "canary"
    environment = make_environment(EnvConfig(name=f"reasoning_gym:{name}", size=8))
    prompts = environment.prompts()
    code = f"__import__('pathlib').Path({str(canary)!r}).write_text('x')"
    hostile = environment.score(
        [sample(prompts[0], code), sample(prompts[0], f"[{code}]"), sample(prompts[0], "no idea")]
    )
    assert not canary.exists()
    assert max(hostile) < 0.1
    assert environment.metrics([], [])["env/verifier_errors"] == 0.0
    right = [sample(prompt, f"<answer>{prompt.metadata['answer']}</answer>") for prompt in prompts]
    assert environment.score(right) == [1.0] * 8


@pytest.mark.parametrize("text", ["1 + 2*(3-4)/5", "x**2 + sin(y)*exp(-x) + C", "3.5^2 = 12.25", "sqrt(2)*pi", ""])
def test_plain_maths(text):
    assert is_plain_maths(text)


@pytest.mark.parametrize(
    "text",
    [
        "exec(1)",
        "chr(101)",
        "x.real",
        "x. real",
        "_",
        "__x",
        "'a'",
        "[1]",
        "a;b",
        "x:=1",
        "ｅｘｅｃ(1)",
        "2exec(1)",
        "{1}",
    ],
)
def test_not_plain_maths(text):
    assert not is_plain_maths(text)


def test_reasoning_gym_bounds_a_slow_verifier(monkeypatch):
    monkeypatch.setattr("trainers.environments.reasoning_gym.VERIFIER_SECONDS", 0.2)
    environment = make_environment(EnvConfig(name="reasoning_gym:countdown", size=1))
    prompt = environment.prompts()[0]
    signal.setitimer(signal.ITIMER_VIRTUAL, 1000)  # somebody else's
    samples = [sample(prompt, "9**9**9**9"), sample(prompt, prompt.metadata["answer"])]
    start = time.monotonic()
    rewards = environment.score(samples)
    assert rewards == [0.0, 1.0]
    assert time.monotonic() - start < 5
    assert environment.metrics(samples, rewards)["env/verifier_errors"] == 0.5
    assert signal.setitimer(signal.ITIMER_VIRTUAL, 0)[0] == pytest.approx(1000, abs=6)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(environment.score, samples[1:]).result() == [1.0]


def test_reasoning_gym_generator_with_the_global_random():
    random.seed(1)
    before = random.getstate()
    config = EnvConfig(name="reasoning_gym:list_functions", size=20)
    prompts = make_environment(config).prompts()
    assert random.getstate() == before
    random.seed(2)
    assert make_environment(config).prompts() == prompts


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("chain_sun", {}, r"reasoning_gym:chain_sun: no such dataset; did you mean chain_sum\?"),
        ("chain_sum", {"max_term": 2}, r"env.params.max_term is not a setting .* did you mean max_terms\?"),
        ("chain_sum", {"size": 2}, "env.params.size: set env.size instead"),
        ("chain_sum", {"seed": 2}, "env.params.seed: set env.seed instead"),
        ("chain_sum", {"min_terms": 5, "max_terms": 2}, "env.params of reasoning_gym:chain_sum: max_terms must be"),
    ],
)
def test_reasoning_gym_errors(name, params, message):
    with pytest.raises(ValueError, match=message):
        make_environment(EnvConfig(name=f"reasoning_gym:{name}", size=2, params=params))


# --- python function ---------------------------------------------------------------------------------------------


@pytest.fixture
def reward_module(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(
        "def length(samples, prompts, outputs, **metadata):\n    return [len(o) for o in outputs]\nlimit = 3\n"
        "class Game:\n"
        "    default_model = 'tiny-llama'\n"
        "    def __init__(self, level=1):\n        self.level = level\n"
        "    def prompts(self):\n        return []\n"
        "    def step(self, samples):\n        return []\n"
        "game = Game(level=5)\n"
        "class Half:\n    def score(self, samples):\n        return []\n"
        "class Nothing:\n    default_model = 'tiny-llama'\n    def prompts(self):\n        return []\n"
        "half = Half()\n"
    )
    (tmp_path / "needs_more.py").write_text("import a_module_that_is_missing\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("my_rewards", None)


def test_function_by_name(reward_module):
    environment = make_environment(EnvConfig(name="python:my_rewards.length"))
    assert environment.default_model == "smollm2-135m"
    assert environment.prompts() == []
    assert environment.score([sample(Prompt("a"), "abc"), sample(Prompt("a"), "")]) == [3.0, 0.0]


@pytest.mark.parametrize(
    ("path", "error", "message"),
    [
        ("length", ValueError, "env.name=python:length: expected python:<module>.<function or class>"),
        ("my_reward.length", ImportError, r"cannot import my_reward .*PYTHONPATH"),
        ("needs_more.length", ImportError, "cannot import needs_more .*a_module_that_is_missing"),
        ("my_rewards.lenght", ValueError, r"my_rewards has no lenght; did you mean length\?"),
        ("my_rewards.limit", TypeError, "limit must be a reward function or an environment, got int"),
        ("my_rewards.Half", TypeError, "Half is not an environment: it has no default_model, no prompts"),
        ("my_rewards.half", TypeError, "half is not an environment: it has no default_model, no prompts"),
        ("my_rewards.Nothing", TypeError, "Nothing is not an environment: it has no score or step"),
    ],
)
def test_function_that_cannot_be_loaded(reward_module, path, error, message):
    with pytest.raises(error, match=message):
        make_environment(EnvConfig(name=f"python:{path}"))


def test_environment_by_name_of_its_class_or_instance(reward_module):
    assert make_environment(EnvConfig(name="python:my_rewards.Game")).level == 1
    assert make_environment(EnvConfig(name="python:my_rewards.Game", params={"level": 3})).level == 3
    assert make_environment(EnvConfig(name="python:my_rewards.game")).level == 5
    with pytest.raises(ValueError, match="env.params of python:my_rewards.Game: got an unexpected .*'levle'"):
        make_environment(EnvConfig(name="python:my_rewards.Game", params={"levle": 3}))
    with pytest.raises(ValueError, match="env.params: python:my_rewards.game has no settings"):
        make_environment(EnvConfig(name="python:my_rewards.game", params={"level": 3}))


def test_function_is_called_with_texts_and_metadata():
    seen = {}

    def reward(samples, prompts, outputs, **metadata):
        seen.update(samples=samples, prompts=prompts, outputs=outputs, **metadata)
        return [1, 2]

    environment = FunctionEnvironment(reward, ["a plain text"])
    assert environment.prompts() == [Prompt("a plain text")]
    samples = [sample(Prompt("Q", {"answer": 4}), " A"), sample(Prompt("R", {"level": "x"}), " B")]
    assert environment.score(samples) == [1.0, 2.0]
    assert seen == {
        "samples": ["Q A", "R B"],
        "prompts": ["Q", "R"],
        "outputs": [" A", " B"],
        "answer": [4, None],
        "level": [None, "x"],
    }


def test_function_prompts_as_mappings():
    prompts = [Prompt("a", ids=(1,)), {"prompt": "b", "answer": 2}]
    assert FunctionEnvironment(len, prompts).prompts() == [Prompt("a", ids=(1,)), Prompt("b", {"answer": 2})]
    with pytest.raises(TypeError, match=r"prompts\[1\] must be a text or a mapping with a text under 'prompt', got 7"):
        FunctionEnvironment(len, ["a", 7])


def test_function_metadata_that_hides_an_argument():
    environment = FunctionEnvironment(lambda **kwargs: [0.0])
    with pytest.raises(ValueError, match="prompt metadata may not be called outputs"):
        environment.score([sample(Prompt("a", {"outputs": 1}), "x")])


def test_function_that_is_none():
    with pytest.raises(TypeError, match="reward_fn must be callable, got list"):
        FunctionEnvironment([1.0])


# --- choosing one ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("sentimant", "did you mean sentiment?"),
        ("cpoy", "did you mean copy?"),
        ("reasoning_gym", "did you mean reasoning_gym:<dataset>?"),
        ("reasoning_gim:chain_sum", "did you mean reasoning_gym:<dataset>?"),
        ("python", "did you mean python:<module>.<function or class>?"),
        ("copy:7", "did you mean copy?"),
        (
            "zzz",
            "there are: sentiment, copy, lookup, math, reward_model, remote, reasoning_gym:<dataset>, "
            "python:<module>.<function or class>",
        ),
    ],
)
def test_unknown_name(name, suggestion):
    with pytest.raises(ValueError) as error:
        make_environment(EnvConfig(name=name))
    assert f"env.name={name!r} is not an environment" in str(error.value)
    assert suggestion in str(error.value)
    assert ("did you mean" in str(error.value)) == ("did you mean" in suggestion)


@pytest.mark.parametrize("name", ["sentiment", "copy", "lookup", "python:json.dumps"])
def test_params_where_there_are_none(name):
    with pytest.raises(ValueError, match=rf"env.params: {name} has no settings, got \['level'\]"):
        make_environment(EnvConfig(name=name, params={"level": 1}))


@pytest.mark.parametrize("name", ["copy", "lookup", "reasoning_gym:chain_sum"])
def test_size_below_one(name):
    with pytest.raises(ValueError, match="env.size must be at least 1, got 0"):
        make_environment(EnvConfig(name=name, size=0))


@pytest.mark.parametrize(
    ("name", "module"), [("sentiment", "vaderSentiment"), ("reasoning_gym:chain_sum", "reasoning_gym")]
)
def test_missing_package_names_the_extra(name, module, monkeypatch):
    def import_module(wanted):
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    monkeypatch.setattr("trainers.extras.import_module", import_module)
    with pytest.raises(ImportError, match=rf'{module} is not installed: pip install "fastppo\[trainer\]"'):
        make_environment(EnvConfig(name=name))


def test_require_does_not_hide_a_broken_package(tmp_path, monkeypatch):
    (tmp_path / "broken_package.py").write_text("import what_it_needs\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="No module named 'what_it_needs'"):
        require("broken_package")
    assert require("json") is json
