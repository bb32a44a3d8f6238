"""Dialogues: what stands in a row and who wrote it, what is paid and trained, when it ends; a policy learns one.

The policy is a script, {(sample, turn): (tokens, finish)}, found by the seed that each request must have; so is the
environment, {(sample, turn): Turn}. A script lacks what must not be asked for.
"""

import json
import textwrap
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from tests import tiny
from trainers.advantages import estimate_advantages
from trainers.config import GenerationConfig, LossConfig, PPOConfig, PPOTrainerConfig, ReinforceTrainerConfig
from trainers.engines import Completion
from trainers.environments import Message, Prompt, RewardError, Sample, Turn
from trainers.filtering import group_of, packed, unpacked
from trainers.logger import METRICS
from trainers.metrics import rollout_metrics, token_table
from trainers.ppo import PPOTrainer
from trainers.prompts import TokenizedPrompt
from trainers.reinforce import ReinforceTrainer
from trainers.rewards import Rewards, dump, score
from trainers.rollout import generate, hash64, pack
from trainers.settings import load_config

SEED, STEP = 3, 7
PROMPTS = ((0, 5), (0, 8, 1, 6), (0, 7))  # that of sample 1 has a turn in it that reads like one of the policy's
POLICY = {
    (0, 0): ([8, 1], "stop"),
    (0, 1): ([9], "length"),
    (1, 0): ([8, 1, 4], "length"),
    (2, 0): ([8], "stop"),
    (2, 1): ([1], "stop"),
    (2, 2): ([8, 8], "stop"),
}
ANSWERS = {
    (0, 0): Turn(observation_ids=(3, 9), reward=0.5, metadata={"asked": 1}, stop_strings=("w9",)),
    (0, 1): Turn(observation_ids=(3, 3), reward=1.0, done=True),  # nothing follows what it says
    (1, 0): Turn(reward=-1.0, done=True),
    (2, 0): Turn(observation="w10 w11", reward=0.25),
    (2, 1): Turn(stop_strings=("w2", "w4")),
    (2, 2): Turn(observation_ids=(3,), metadata={"left": True}),
}
ROWS = (
    [0, 5, 8, 1, 3, 9, 9],
    [0, 8, 1, 6, 8, 1, 4],
    [0, 7, 8, 10, 11, 1, 8, 8],
)
MASKS = ([0, 0, 1, 1, 0, 0, 1], [0, 0, 0, 0, 1, 1, 1], [0, 0, 1, 0, 0, 1, 1, 1])


class Script:
    """Engine. Log-probs are -id / 8."""

    def __init__(self, script):
        self.script, self.calls = script, []
        self.turn_of = {hash64(SEED, STEP, sample, turn): (sample, turn) for sample, turn in script}

    def generate(self, prompts, sampling, seeds):
        turns = [self.turn_of[seed] for seed in seeds]
        self.calls.append((turns, prompts, sampling))
        completions = []
        for tokens, finish in (self.script[turn] for turn in turns):
            cut = tokens[: sampling.max_new_tokens]
            completions.append(
                Completion(cut, [-i / 8 for i in cut], finish if cut == tokens else "length", len(self.calls))
            )
        return completions


class Answers:
    """Environment. A dialogue is known by its prompt."""

    def __init__(self, script):
        self.script, self.seen = script, []

    def step(self, samples):
        self.seen.append(samples)
        turns = [(s.prompt.metadata["sample"], sum(m.author == "policy" for m in s.messages) - 1) for s in samples]
        return [self.script[turn] for turn in turns]


def tokenizer():
    return AutoTokenizer.from_pretrained(tiny.tiny_model())


def rollout(engine=None, environment=None, prompts=PROMPTS, max_new_tokens=3, max_turns=3, max_length=20, **generation):
    return generate(
        engine or Script(POLICY),
        [TokenizedPrompt(i, Prompt(f"p{i}: ", {"sample": i}), ids) for i, ids in enumerate(prompts)],
        GenerationConfig(max_new_tokens=max_new_tokens, **generation),
        tokenizer(),
        samples_per_prompt=1,
        seed=SEED,
        step=STEP,
        environment=environment or Answers(ANSWERS),
        max_turns=max_turns,
        max_length=max_length,
    )


def rows_of(tensor, batch):
    return [part.tolist() for part in tensor.split(batch.lengths.tolist())]


def test_rows_hold_every_turn_in_order_and_train_what_the_policy_sampled_here():
    """NeMo-RL #2176: the turn in the prompt of sample 1 is not trained, though its ids are those of its response."""
    engine, environment = Script(POLICY), Answers(ANSWERS)
    batch = rollout(engine, environment)
    assert rows_of(batch.tokens, batch) == list(ROWS)
    assert rows_of(batch.mask.int(), batch) == list(MASKS)
    assert rows_of(batch.rollout_logprobs, batch) == [
        [-i / 8 if sampled else 0 for i, sampled in zip(ids, mask, strict=True)]
        for ids, mask in zip(ROWS, MASKS, strict=True)
    ]
    assert batch.turns.tolist() == [2, 1, 3]
    assert batch.ended.tolist() == [0, 0, 1]  # done, done, turns used up
    assert [batch.finish.tolist(), batch.prompt_lengths.tolist()] == [[0, 0, 0], [2, 4, 2]]
    assert batch.weight_version.tolist() == [1, 1, 1]  # the oldest of a row's turns
    # Each turn was sampled after exactly the ids before it, and asked for once.
    asked = {turn: prompt for turns, prompts, _ in engine.calls for turn, prompt in zip(turns, prompts, strict=True)}
    assert sum(len(turns) for turns, _, _ in engine.calls) == len(asked) == 6
    assert asked[0, 1] == ROWS[0][:6] and asked[2, 1] == ROWS[2][:5] and asked[2, 2] == ROWS[2][:6]


def test_samples_tell_who_wrote_what():
    environment = Answers(ANSWERS)
    first, second, third = rollout(environment=environment).samples
    assert first.response_ids == (8, 1, 9) and second.response_ids == (8, 1, 4) and third.response_ids == (8, 1, 8, 8)
    assert third.messages == (
        Message("policy", (8,), "w8"),
        Message("environment", (10, 11), "w10 w11"),
        Message("policy", (1,), ""),
        Message("policy", (8, 8), "w8 w8"),
    )
    assert third.text == "p2: w8w10 w11w8 w8"
    assert (first.response, first.text, second.text) == ("w8 w9", "p0: w8w3 w9w9", "p1: w8 w4")
    assert (first.metadata, second.metadata, third.metadata) == ({"asked": 1}, {}, {"left": True})
    assert [sample.reward for sample in (first, second, third)] == [1.5, -1.0, 0.25]
    # The environment saw the dialogues as they were, and only those that went on.
    assert [[s.prompt.metadata["sample"] for s in seen] for seen in environment.seen] == [[0, 1, 2], [0, 2], [2]]
    asked = environment.seen[1][0]
    assert (asked.messages[-1].text, asked.metadata, asked.reward) == ("w9", {"asked": 1}, 0.5)


def test_the_sum_of_the_turns_rewards_is_paid_on_the_last_response_token_beside_the_score():
    environment, batch = Answers(ANSWERS), rollout()
    assert rows_of(score(environment, batch).token_scores, batch) == [
        [0, 0, 0, 0, 0, 0, 1.5], [0, 0, 0, 0, 0, 0, -1], [0, 0, 0, 0, 0, 0, 0, 0.25],
    ]  # fmt: skip
    assert batch.raw_reward.tolist() == [1.5, -1.0, 0.25]
    environment.score = lambda samples: [10, [1, 2, 3], [1, 2, 3, 4]]
    assert rows_of(score(environment, batch).token_scores, batch) == [
        [0, 0, 0, 0, 0, 0, 11.5], [0, 0, 0, 0, 1, 2, 2], [0, 0, 1, 0, 0, 2, 3, 4.25],
    ]  # fmt: skip
    assert batch.raw_reward.tolist() == [11.5, 5.0, 10.25]


def test_stop_strings_of_a_turn_end_the_next_one_of_that_dialogue_alone():
    engine = Script(POLICY)
    rollout(engine, stop_strings=["w15"])
    assert [(turns, sampling.stop_strings) for turns, _, sampling in engine.calls] == [
        ([(0, 0), (1, 0), (2, 0)], ("w15",)),
        ([(0, 1)], ("w15", "w9")),
        ([(2, 1)], ("w15",)),
        ([(2, 2)], ("w15", "w2", "w4")),
    ]


@pytest.mark.parametrize(
    ("max_length", "row", "mask", "ended", "finish"),
    [
        (8, [0, 5, 8, 1, 3, 9, 10, 9], "00110001", "done", "stop"),
        (7, [0, 5, 8, 1, 3, 9, 10], "0011000", "length", "length"),  # it fits, but nothing can be said to it
        (6, [0, 5, 8, 1, 3, 9], "001100", "length", "length"),
        (4, [0, 5, 8, 1], "0011", "length", "length"),
        (3, [0, 5, 8], "001", "length", "length"),
    ],
)
def test_a_row_ends_at_the_longest_length(max_length, row, mask, ended, finish):
    engine = Script({(0, 0): ([8, 1], "stop"), (0, 1): ([9], "stop")})
    environment = Answers({(0, 0): Turn(observation_ids=(3, 9, 10), reward=0.5), (0, 1): Turn(reward=1.0, done=True)})
    batch = rollout(engine, environment, PROMPTS[:1], max_length=max_length)
    assert batch.tokens.tolist() == row
    assert batch.mask.int().tolist() == [int(c) for c in mask]
    assert (batch.samples[0].finish, batch.finish.tolist()) == (finish, [finish == "length"])
    assert batch.ended.tolist() == [("done", "turns", "length").index(ended)]
    assert batch.samples[0].reward == (1.5 if ended == "done" else 0.5)  # a cut row is paid for what it did
    assert engine.calls[-1][2].max_new_tokens == min(3, max_length - len(engine.calls[-1][1][0]))
    messages = batch.samples[0].messages
    assert [i for message in messages for i in message.ids] == row[2:]
    if max_length == 6:
        assert messages[-1] == Message("environment", (3, 9), "w3 w9")


def test_a_last_turn_that_is_cut_by_the_length_is_truncated():
    engine = Script({(0, 0): ([8, 9, 10], "stop")})
    batch = rollout(engine, Answers({(0, 0): Turn()}), PROMPTS[:1], max_turns=1, max_length=4)
    assert (batch.tokens.tolist(), batch.finish.tolist()) == ([0, 5, 8, 9], [1])
    batch = rollout(
        Script({(0, 0): ([8], "stop"), (0, 1): ([9, 9], "stop")}), Answers({(0, 0): Turn(), (0, 1): Turn()}),
        PROMPTS[:1], max_turns=2, max_length=4,
    )  # fmt: skip
    assert (batch.tokens.tolist(), batch.ended.tolist()) == ([0, 5, 8, 9], [2])


def test_one_turn_is_answered_and_paid_but_nothing_is_appended():
    batch = rollout(max_turns=1, max_length=None)
    assert rows_of(batch.tokens, batch) == [[0, 5, 8, 1], ROWS[1], [0, 7, 8]]
    assert score(Answers({}), batch).raw_reward.tolist() == [0.5, -1.0, 0.25]
    assert batch.turns is None and not any(name.startswith("rollout/") for name in rollout_metrics(batch))


def test_advantages_are_those_of_the_dialogue_without_its_observations():
    """verl #2337."""
    batch = score(Answers(ANSWERS), rollout())
    cut = pack(PROMPTS, [Completion(list(s.response_ids), [-1.0] * 3, s.finish, 0) for s in batch.samples])
    cut.samples = batch.samples
    cut = score(Answers(ANSWERS), cut)
    draw = torch.Generator().manual_seed(0)
    selected = {name: torch.randn(10, generator=draw) for name in ("values", "old_logprobs", "ref_logprobs")}
    next_values = torch.randn(3, generator=draw)
    for part in (batch, cut):
        garbage = float("nan")
        for name, values in selected.items():
            part.update(**{name: torch.full(part.mask.shape, garbage).masked_scatter(part.mask, values)})
        part.update(next_values=next_values)
        ppo = PPOConfig(bootstrap_truncated=True)
        ppo.adv_estimator.gae_gamma, ppo.adv_estimator.length_adaptive_alpha = 0.9, 0.5
        estimate_advantages(Rewards(ppo, LossConfig())(part, 0.05), ppo)
    assert batch.tokens.numel() == cut.tokens.numel() + 4
    for name in ("rewards", "advantages", "returns"):
        assert torch.equal(getattr(batch, name)[batch.mask], getattr(cut, name)[cut.mask])
    assert batch.advantages[~batch.mask].eq(0).all() and batch.advantages.isfinite().all()


def test_metrics_and_tables_by_hand():
    batch = score(Answers(ANSWERS), rollout())
    metrics = rollout_metrics(batch)
    expected = {
        "rollout/turns_mean": 2.0,
        "rollout/turns_max": 3.0,
        "rollout/observation_tokens_mean": 4 / 3,
        "rollout/natural_termination_rate": 2 / 3,
        "rollout/truncation_rate": 0.0,
        "prompt_length/mean": 8 / 3,
        "prompt_length/max": 4.0,
        "response_length/mean": 10 / 3,
        "perf/total_num_tokens": 22.0,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert batch.select([2, 0]).turns.tolist() == [3, 2]
    for name in ("old_logprobs", "ref_logprobs", "values", "rewards", "advantages", "returns"):
        batch.update(**{name: torch.zeros(22)})
    row = token_table(batch, torch.zeros(22), tokenizer(), None)[2]
    assert (row["prompt"], row["response"]) == ("<s> w7", "w8 w10 w11 </s> w8 w8")
    assert [token["mask"] for token in row["tokens"]] == [bool(m) for m in MASKS[2]]


@pytest.mark.parametrize(
    ("turn", "message"),
    [
        (("w3", 1.0), r"the environment's step must give Turns, got \('w3', 1.0\) in answer to 'w8'"),
        (Turn(reward=float("nan")), "a turn's reward must be a finite number, got nan in answer to 'w8'"),
        (Turn(reward=None), "a turn's reward must be a finite number, got None"),
        (Turn(observation_ids=(3, 16)), "observation_ids must be ids of the vocabulary of 16, got 16"),
        (Turn(observation_ids=(-1,)), "observation_ids must be ids of the vocabulary of 16, got -1"),
        (Turn(observation_ids=(1.0,)), "observation_ids must be ids of the vocabulary of 16, got 1.0"),
        (Turn(observation_ids=(3,), observation="w4"), "observation_ids or an observation, not both"),
        (Turn(stop_strings=("",)), r"stop_strings must be a list of texts that are not empty, got \('',\)"),
        (Turn(stop_strings="w3"), "stop_strings must be a list of texts that are not empty, got 'w3'"),
    ],
)
def test_turns_that_cannot_be_trained_on_are_refused_with_the_sample(turn, message):
    with pytest.raises(RewardError, match=message) as caught:
        rollout(environment=Answers({**ANSWERS, (2, 0): turn}))
    assert caught.value.sample.prompt.text == "p2: "
    assert [sample.response_ids for sample in caught.value.samples] == [(8, 1), (8, 1, 4), (8,)]


def test_numbers_of_tensors_are_taken():
    turn = Turn(observation_ids=torch.tensor([3, 9]), reward=torch.tensor(0.5), done=torch.tensor(False))
    batch = rollout(environment=Answers({**ANSWERS, (0, 0): turn}))
    assert rows_of(batch.tokens, batch)[0] == ROWS[0] and batch.samples[0].reward == 1.5


def test_a_step_that_fails_or_answers_too_few_is_refused(tmp_path):
    class Broken(Answers):
        def step(self, samples):
            return super().step(samples)[1:]

    with pytest.raises(RewardError, match="step must give 3 turns, one per dialogue, got 2"):
        rollout(environment=Broken(ANSWERS))
    with pytest.raises(RewardError, match=r"the environment's step failed: KeyError: \(2, 1\)") as caught:
        rollout(environment=Answers({**{t: a for t, a in ANSWERS.items() if t != (2, 1)}, (0, 0): Turn(
            metadata={"anything": torch.nn.Identity()}
        )}))  # fmt: skip
    dump(caught.value.samples, tmp_path / "failed.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "failed.jsonl").read_text().splitlines()]
    assert rows[2]["messages"][1] == {"author": "environment", "ids": [10, 11], "text": "w10 w11"}
    assert rows[0]["metadata"] == {"anything": "Identity()"}


def test_a_rollout_that_is_carried_over_keeps_its_dialogues():
    batch = score(Answers(ANSWERS), rollout())
    again = unpacked(packed(batch))
    assert again.samples == batch.samples and torch.equal(again.turns, batch.turns)
    groups = [group_of(batch, group) for group in (2, 0)]
    both = type(batch).concat(groups)
    assert both.turns.tolist() == [3, 2] and both.samples == [batch.samples[2], batch.samples[0]]


# --- the trainer -------------------------------------------------------------------------------------------------


def lookup_config(run_dir, *overrides: str) -> PPOTrainerConfig:
    quiet = [f"logger.run_dir={run_dir}", "logger.tensorboard=false", "logger.report=false", "cluster.num_threads=1"]
    return load_config("ppo_tool_lookup", [*quiet, "checkpointing.enabled=false", *overrides])


SMALL = ("ppo.num_prompts_per_step=4", "policy.train_global_batch_size=16", "policy.train_micro_batch_size=16")


def test_a_run_scores_each_turn_as_it_was_sampled_and_validates_in_turns(tmp_path):
    """The trainer's log-probs of every sampled token, given the row before it, are the engine's."""
    trainer = PPOTrainer(lookup_config(tmp_path, *SMALL, "ppo.max_num_steps=2", "ppo.val_at_start=true"))
    trainer.fit()
    before, *rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        assert row["training/rollout_probs_diff_max"] < 1e-5
        assert 1 <= row["rollout/turns_mean"] <= row["rollout/turns_max"] == 2
        assert {name for name in row if name not in METRICS} <= {"step", "time"}
    assert 2 <= before["val/response_length/mean"] <= 4
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    for sample in samples:
        assert [t["mask"] for t in sample["tokens"][:4]] == [False, False, True, True]


def test_reinforce_runs_in_turns_and_compares_with_a_greedy_dialogue(tmp_path):
    quiet = [f"logger.run_dir={tmp_path}", "logger.tensorboard=false", "logger.report=false", "cluster.num_threads=1"]
    small = ["reinforce.num_prompts_per_step=4", "reinforce.num_generations_per_prompt=4", "reinforce.max_num_steps=1"]
    turns = ["env.name=lookup", "reinforce.max_rollout_turns=2", "policy.max_total_sequence_length=8"]
    config = load_config(
        "reinforce_copy",
        [*quiet, *small, *turns, "policy.generation.max_new_tokens=2", "policy.train_global_batch_size=16",
         "policy.train_micro_batch_size=16", "checkpointing.enabled=false", "reinforce.adv_estimator.name=remax"],
        ReinforceTrainerConfig,
    )  # fmt: skip
    trainer = ReinforceTrainer(config)
    batch = trainer.generate_rollouts(1)
    assert batch.turns.shape == (16,) and batch.greedy.turns.shape == (4,)
    trainer.fit()
    row = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
    assert row["training/rollout_probs_diff_max"] < 1e-5 and row["rollout/turns_max"] <= 2


@pytest.mark.slow  # 30 s each, minutes where cores are shared
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_policy_learns_to_use_a_tool(tmp_path, seed):
    """Without the observation no policy is above 0.5 + 0.5 / 6: the value is drawn anew for each task."""
    quiet = ("logger.num_samples_to_print=0", "logger.num_inspected_samples=0")
    PPOTrainer(lookup_config(tmp_path, *quiet, f"ppo.seed={seed}")).fit()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    rewards = [row["critic/score/mean"] for row in rows]
    assert rewards[0] < 0.15
    assert max(sum(rewards[i : i + 3]) / 3 for i in range(len(rewards) - 2)) > 0.9
    assert sum(rewards[-10:]) / 10 > 0.85
    assert rows[0]["rollout/turns_mean"] < 1.2 and rows[-1]["rollout/turns_mean"] > 1.95


def test_a_failing_step_ends_the_run_with_what_was_sampled(tmp_path):
    trainer = PPOTrainer(lookup_config(tmp_path, *SMALL))
    trainer.environment.step = lambda samples: 1 / 0
    with pytest.raises(RewardError, match="the environment's step failed: ZeroDivisionError"):
        trainer.fit()
    rows = [json.loads(line) for line in (tmp_path / "failed_rollout.jsonl").read_text().splitlines()]
    assert len(rows) == 32 and all(len(row["response_ids"]) == 2 for row in rows)
    assert trainer.loader.consumed == 0


def test_turns_need_an_environment_that_answers(tmp_path):
    settings = {"ppo__max_rollout_turns": 2, "policy__max_total_sequence_length": 20, "logger__run_dir": tmp_path}
    with pytest.raises(ValueError, match=r"ppo.max_rollout_turns=2 needs an environment .* env.name=copy is not"):
        PPOTrainer(tiny.config(**settings))


def test_the_rows_must_fit_the_model_and_the_prompts(tmp_path):
    with pytest.raises(ValueError, match="policy.max_total_sequence_length=257, but the model has 256 positions"):
        PPOTrainer(lookup_config(tmp_path, "policy.max_total_sequence_length=257"))
    with pytest.raises(ValueError, match="policy.max_total_sequence_length=2 leaves no room .* a prompt of 2 tokens"):
        PPOTrainer(lookup_config(tmp_path, "policy.max_total_sequence_length=2"))


def test_the_example_of_the_docs_plays(tmp_path):
    """Guess in docs/environments.md: wrong guesses are told more or less, and counted in the dialogue's state."""
    page = (Path(__file__).parents[1] / "docs" / "environments.md").read_text()
    code = textwrap.dedent(page[page.index("    import re") : page.index("After each turn of the policy")])
    names: dict = {}
    exec(code, names)
    environment = names["Guess"](highest=20)
    prompt = environment.prompts()[6]

    def play(text, **metadata):
        message = Message("policy", (5,), text)
        return environment.step([Sample(prompt, (5,), (5,), text, "stop", (message,), metadata)])[0]

    assert play("It is 3.") == Turn(observation="\nmore. Guess: ", reward=-0.1, metadata={"tries": 1})
    assert play("12", tries=1) == Turn(observation="\nless. Guess: ", reward=-0.1, metadata={"tries": 2})
    assert play("7") == Turn(reward=1.0, done=True)
