"""Several rewards with weights: their sum per token, their metrics, what is refused, and rewards that never change."""

import json
import logging
import math

import pytest

from tests import tiny
from trainers.charts import charts_of
from trainers.cli import load_config
from trainers.config import EnvConfig
from trainers.engines import Completion
from trainers.environments import Prompt, RewardError, Sample, make_environment
from trainers.environments.weighted import WeightedEnvironment
from trainers.filtering import packed, unpacked
from trainers.metrics import rollout_metrics
from trainers.ppo import PPOTrainer
from trainers.rewards import ConstantRewards, score
from trainers.rollout import RolloutBatch, pack
from trainers.validation import validation_metrics, validation_rows


class Answers:
    default_model = "tiny-llama"

    def __init__(self, answers):
        self.answers = answers

    def prompts(self):
        return [Prompt("own")]

    def score(self, samples):
        if isinstance(self.answers, Exception):
            raise self.answers
        return self.answers

    def metrics(self, samples, rewards):
        return {"env/total": sum(rewards)}


def batch():
    """Prompt 2 + response 3, prompt 1 + response 2."""
    made = pack(
        [[5, 6], [7]], [Completion([8, 9, 1], [-1.0] * 3, "stop", 0), Completion([8, 8], [-1.0] * 2, "stop", 0)]
    )
    made.samples = [
        Sample(Prompt("a"), (5, 6), (8, 9, 1), "x y", "stop"),
        Sample(Prompt("b"), (7,), (8, 8), "x x", "stop"),
    ]
    return made


def weighted(**rewards):
    return WeightedEnvironment(Answers([]), {name: (Answers(answers), w) for name, (answers, w) in rewards.items()})


MIXED = {
    "whole": ([1.0, -2.0], 0.5),
    "tokens": ([[1.0, 2.0, 3.0], [0.25, 0.5]], 2.0),
    "some": ([4.0, [1.0, 0.0]], -1.0),
}


def test_scalars_and_lists_per_token_add_up_on_their_tokens():
    """whole pays 0.5 and -1 on the last tokens, tokens 2, 4, 6 and 0.5, 1, some -4 on the last and -1, 0."""
    scored = score(weighted(**MIXED), batch())
    assert scored.token_scores.tolist() == [0, 0, 2, 4, 2.5, 0, -0.5, 0]
    assert scored.raw_reward.tolist() == [8.5, -0.5]
    assert scored.reward_names == ("whole", "tokens", "some")
    assert scored.reward_parts.tolist() == [[1, 6, 4], [-2, 0.75, 1]]
    environment = weighted(**MIXED)
    assert environment.score(batch().samples) == [[2, 4, 2.5], [-0.5, 0]]
    assert weighted(a=([1.0, 2.0], 3.0), b=([4, 5], 0.5)).score(batch().samples) == [[5.0], [8.5]]


def test_each_reward_has_its_metrics_in_training_and_validation():
    environment = weighted(**MIXED)
    scored = score(environment, batch())
    expected = {
        "critic/score/whole/mean": -0.5, "critic/score/whole/std": 1.5,  # 1 and -2
        "critic/score/tokens/mean": 3.375, "critic/score/tokens/std": 2.625,  # 6 and 0.75
        "critic/score/some/mean": 2.5, "critic/score/some/std": 1.5,  # 4 and 1
    }  # fmt: skip
    metrics = rollout_metrics(scored)
    assert {name: metrics[name] for name in metrics if name.count("/") == 3} == expected
    assert metrics["critic/score/mean"] == 4.0
    metrics = validation_metrics(validation_rows([None, None], lambda *_: scored, batch_size=None))
    means = {name: value for name, value in metrics.items() if name.startswith("val/score/") and name.count("/") == 3}
    assert means == {"val/score/whole/mean": -0.5, "val/score/tokens/mean": 3.375, "val/score/some/mean": 2.5}
    assert scored.metrics == {"env/whole/total": -1.0, "env/tokens/total": 6.75, "env/some/total": 5.0}
    chosen = unpacked(packed(RolloutBatch.concat([scored.select([1]), scored.select([1])])))
    assert rollout_metrics(chosen)["critic/score/tokens/mean"] == 0.75  # what dynamic sampling carries keeps them


def test_the_report_draws_each_reward():
    names = ["critic/score/mean", "critic/score/python:a.b/mean", "critic/score/python:a.b/std", "val/score/copy/mean"]
    titles = [chart.title for chart in charts_of({"run": [{"step": 1, **dict.fromkeys(names, 0.5)}]})]
    assert titles[-2:] == ["critic/score/python:a.b/mean", "val/score/copy/mean"]


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        (KeyError("label"), "the reward second failed: KeyError: 'label'"),
        ([1.0, math.nan], "the reward second must be finite, got nan for 'x x'"),
        ([1.0], "the reward second must give 2 values, one per response, got 1"),
        (None, "the reward second must be a list of 2 values, got NoneType"),
        ([[1.0], 2.0], "a per-token reward must have 3 values, .* from the reward second"),
        ([3e38, 0.0], "the sum of env.rewards must be finite, got inf for 'x y'|got 6e.38 for 'x y'"),
    ],
)
def test_a_failure_names_the_reward(answers, message):
    with pytest.raises(RewardError, match=message):
        score(weighted(first=([1.0, 1.0], 1.0), second=(answers, 2.0)), batch())


def test_a_single_reward_is_named_too():
    with pytest.raises(RewardError, match="the reward python:m.f must be finite"):
        score(Answers([1.0, math.inf]), batch(), EnvConfig(name="python:m.f"))


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "weighted_rewards.py").write_text(
        "def brevity(outputs, **_): return [-len(o) for o in outputs]\n"
        "def long(outputs, **_): return [float(len(o)) for o in outputs]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))


def test_it_is_made_from_the_settings(module):
    text = 'env.rewards={sentiment: 1.0, "python:weighted_rewards.brevity": 0.25}'
    env = load_config(None, [text]).env
    assert env.rewards == {"sentiment": 1.0, "python:weighted_rewards.brevity": 0.25}
    assert load_config({"env": {"rewards": env.rewards}}).env == env
    environment = make_environment(env)
    assert environment.prompts() == make_environment(EnvConfig()).prompts()
    assert environment.default_model == "smollm2-135m" and not environment.own_prompts_only
    good, bad = (Sample(Prompt("a"), (0,), (5, 1), text, "stop") for text in (" good", " bad"))
    assert environment.score([good, bad]) == [[pytest.approx(0.4404 - 0.25 * 5)], [pytest.approx(-0.5423 - 0.25 * 4)]]


def test_the_prompts_of_env_name_without_its_score(module):
    environment = make_environment(
        EnvConfig(name="copy", size=3, rewards={"python:weighted_rewards.long": 2.0, "sentiment": 0.0})
    )
    assert environment.prompts() == make_environment(EnvConfig(name="copy", size=3)).prompts()
    assert environment.own_prompts_only
    sample = Sample(environment.prompts()[0], (0,), (5, 1), "w w", "stop")
    assert environment.score([sample]) == [[6.0]]


def test_params_are_those_of_env_name_or_of_a_reward_that_has_some():
    math_alone = make_environment(EnvConfig(rewards={"math": 1.0, "sentiment": 0.5}, params={"answer_key": "solution"}))
    assert math_alone.score([Sample(Prompt("a", {"solution": 4}), (0,), (1,), "4", "stop")]) == [[1.0]]
    name = "reasoning_gym:chain_sum"
    both = make_environment(EnvConfig(name=name, size=2, rewards={name: 1.0, "math": 0.5}, params={"min_terms": 3}))
    prompt = both.prompts()[0]
    assert both.score([Sample(prompt, (0,), (1,), prompt.metadata["answer"], "stop")]) == [[1.5]]
    assert both.metrics([], [])["env/math/answer_marked"] == both.metrics([], [])[f"env/{name}/exact_match"] == 0.0
    with pytest.raises(ValueError, match=r"prompt 0: the math reward needs an answer"):
        make_environment(EnvConfig(rewards={"math": 1.0})).check_prompts([Prompt("The movie was")])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rewards": {"sentimant": 1.0}}, r"env.rewards: sentimant is not an environment; did you mean sentiment\?"),
        ({"rewards": {"copy": 1.0}}, "env.rewards: copy can only score prompts of its own, which needs env.name=copy"),
        ({"rewards": {"python:weighted_rewards.lang": 1}}, r"env.rewards: python:weighted_rewards.lang.*mean long\?"),
        (
            {"name": "python:weighted_rewards.long", "rewards": {"sentiment": 1.0}},
            "env.name=python:weighted_rewards.long has no prompts and is not among env.rewards: it would do nothing",
        ),
        ({"rewards": {"sentiment": 1.0}, "params": {"a": 1}}, "env.params: sentiment and sentiment has no settings"),
    ],
)
def test_what_is_refused(settings, message, module):
    with pytest.raises(ValueError, match=message):
        make_environment(EnvConfig(**settings))


# --- constant rewards --------------------------------------------------------------------------------------------


def seen(caplog, limit, *calls, name="r"):
    caplog.clear()
    watch = ConstantRewards(limit)
    with caplog.at_level(logging.WARNING):
        for scores in calls:
            watch.see(name, scores)
    return [record.getMessage() for record in caplog.records]


def test_a_constant_reward_warns_once_by_name(caplog):
    same, other, mixed = [0.5, 0.5], [1.0, 1.0], [0.5, 1.0]
    assert seen(caplog, 3, same, same) == []
    (message,) = seen(caplog, 3, same, same, same, same, same, other, other, other)
    assert message.startswith("env.constant_reward_steps=3: the reward r gave 0.5 to every response")
    assert seen(caplog, 3, same, same, mixed, same, same) == []
    assert seen(caplog, 3, same, same, other, other, same, same) == []  # another value is a change
    assert len(seen(caplog, 3, mixed, same, same, same)) == 1
    assert len(seen(caplog, 1, same)) == 1
    assert seen(caplog, 0, same, same) == []


def test_every_reward_is_watched_by_itself(caplog):
    watch = ConstantRewards(2)
    for i in range(3):
        score(weighted(moves=([1.0, float(i)], 1.0), stays=([2.0, 2.0], 1.0)), batch(), constant=watch)
        score(Answers([0.0, 0.0]), batch(), EnvConfig(name="python:a.b"), watch)
    messages = [record.getMessage() for record in caplog.records]
    assert ["stays gave 2" in messages[0], "python:a.b gave 0" in messages[1], len(messages)] == [True, True, 2]


def test_a_run_with_two_rewards(tmp_path, module, caplog):
    cfg = tiny.config(
        logger__run_dir=str(tmp_path / "run"), ppo__num_prompts_per_step=4, ppo__num_generations_per_prompt=4,
        policy__train_global_batch_size=8, policy__train_micro_batch_size=8, ppo__max_num_steps=3, ppo__val_at_end=True,
        env__rewards='{copy: 1.0, "python:weighted_rewards.brevity": 0.5, "sentiment": 0.1}',
        env__constant_reward_steps=3,
    )  # fmt: skip
    PPOTrainer(cfg).fit()
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    train, val = rows[2], rows[-1]
    for row, start in ((train, "critic"), (val, "val")):
        parts = [row[f"{start}/score/{name}/mean"] for name in cfg.env.rewards]
        assert row[f"{start}/score/mean"] == pytest.approx(parts[0] + 0.5 * parts[1] + 0.1 * parts[2], abs=1e-5)
        assert parts[1] < -5  # responses of four words
    assert train["critic/score/copy/std"] > 0 == train["critic/score/sentiment/std"]
    assert "the reward sentiment gave 0 to every response" in caplog.text  # words w2 ... have no tone
