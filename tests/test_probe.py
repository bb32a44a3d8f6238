"""The probe finds an engine that missed its update, whole or in part, or caches what is older; a sound one never.

Weights change by about what an optimizer step changes: log-probs by 1e-6 to 0.1.
"""

import copy
import json
import math
import re
from dataclasses import replace

import pytest
import torch

from tests import tiny
from tests.test_ppo import small
from trainers import trainer as trainer_module
from trainers.config import GenerationConfig
from trainers.engines import Capabilities, Completion
from trainers.engines.native import NativeEngine, share_parameters
from trainers.filtering import DynamicSampling
from trainers.metrics import rollout_metrics
from trainers.ppo import PPOTrainer
from trainers.probe import Answer, Probe, moves
from trainers.refit import Refit
from trainers.rollout import pack
from trainers.run import TrainingError

PROMPT = [0, 4, 7, 9]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Faulty(NativeEngine):
    """`fault` is from the second update on: "nothing" arrives, a "layer" does not, the "prefix" stays as computed."""

    fault: str | None = None
    updates = 0
    kept: list | None = None

    def _put(self, bucket):
        if self.updates and self.fault == "nothing":
            return 0
        if self.updates and self.fault == "layer":
            bucket = [(name, tensor) for name, tensor in bucket if "layers.1." not in name]
        return super()._put(bucket)

    def _end_update(self):
        self.updates += 1

    def _generate(self, prompts, sampling, seeds):
        if self.fault == "prefix":  # what the prompt's tokens left in the cache is reused by every later request
            keep = self.model.model.layers[1].self_attn
            hooks = [getattr(keep, name).register_forward_hook(self._reuse(name)) for name in ("k_proj", "v_proj")]
            try:
                return super()._generate(prompts, sampling, seeds)
            finally:
                for hook in hooks:
                    hook.remove()
        return super()._generate(prompts, sampling, seeds)

    def _reuse(self, name):
        self.kept = self.kept or {}

        def hook(module, args, output):
            if output.shape[1] > 1:  # the prompt's pass; its last token is computed anew even where all is cached
                first = self.kept.setdefault(name, output[:, :-1].clone())
                return torch.cat([first, output[:, -1:]], 1)
            return output

        return hook


def probed(dtype="float32", engine_dtype="auto", fault=None, **options):
    """A policy, its engine (weights of its own), and what a trainer does after an optimizer step of some size."""
    policy = tiny.policy(dtype=DTYPES[dtype])
    cfg = GenerationConfig(max_new_tokens=16, probe_period=1, dtype=engine_dtype, **options)
    own = share_parameters(policy.model, DTYPES[dtype if engine_dtype == "auto" else engine_dtype])
    engine = Faulty(copy.deepcopy(own), policy.tokenizer)
    engine.fault = fault
    update, probe = Refit(policy, engine, cfg), Probe(policy, engine, cfg, PROMPT, dtype=dtype)

    def step(version: int, size: float) -> None:
        """Every weight moves by `size` of its tensor's spread, up or down, as Adam moves it while gradients agree."""
        torch.manual_seed(0)
        with torch.no_grad():
            for parameter in policy.model.parameters():
                parameter.add_(torch.randn_like(parameter).sign(), alpha=size * (float(parameter.std()) or 0.1))
        update(version)
        probe(version)

    update(0)
    probe(0)
    return probe, step


def steps_until_found(probe, step, size, most=40) -> int:
    for version in range(1, most + 1):
        step(version, size)
        if probe.problem:
            return version
    return most + 1


@pytest.mark.parametrize(
    ("dtype", "fault", "size", "within"),
    [
        ("float32", "nothing", 1e-5, 8),  # each step moves log-probs by 2e-6, which is rounding; they add up
        ("float32", "nothing", 1e-2, 1),
        ("float32", "layer", 1e-3, 10),  # by 1e-4, and as much again with every step
        ("float32", "prefix", 1e-3, 15),
        ("bfloat16", "nothing", 1e-2, 1),  # far less than the limit of 0.15
        ("bfloat16", "nothing", 1e-4, 8),
        ("bfloat16", "layer", 0.1, 24),
    ],
)
def test_a_stale_engine_is_found(dtype, fault, size, within):
    probe, step = probed(dtype, fault=fault)
    probe.check()
    assert steps_until_found(probe, step, size) <= within
    with pytest.raises(TrainingError, match="the generation engine is stale"):
        probe.check()


@pytest.mark.parametrize("size", [1e-5, 1e-2])
@pytest.mark.parametrize(
    ("dtype", "engine_dtype"),
    [("float32", "auto"), ("bfloat16", "auto"), ("float32", "bfloat16"), ("bfloat16", "float32")],
)
def test_a_sound_engine_is_never_accused(dtype, engine_dtype, size):
    probe, step = probed(dtype, engine_dtype)
    assert steps_until_found(probe, step, size, most=8) == 9, probe.problem


def answer(version=1, tokens=(2, 3, 4, 5), engine=-1.0, trainer=-1.0) -> Answer:
    return Answer(version, list(tokens), torch.full((len(tokens),), engine), torch.full((len(tokens),), trainer))


THEN = answer(1, engine=-1.0, trainer=-1.0)


@pytest.mark.parametrize(
    ("now", "told"),
    [
        (answer(2, engine=-1.0004, trainer=-1.0005), None),
        (answer(2, engine=-1.0005, trainer=-1.002), "0.0015 in the mean; rounding explains 0.001"),
        (answer(2, engine=-1.0, trainer=float("nan")), "by nan"),
        (answer(1), "with the weights of step 1, after a refit to those of step 2"),
        # since the answer before: the trainer by 0.0005, the engine by 0.00001, so it lacks 0.00049
        (answer(2, engine=-1.00001, trainer=-1.0005), "since step 1 .* moved by 0.0005 in the mean, its own by 1e-05"),
        (answer(2, engine=-1.0001, trainer=-1.0005), None),  # a quarter of what it lacks: it moved
        (answer(2, engine=-1.0, trainer=-1.000005), None),  # too little to be sure of
        (answer(2, (2, 3, 4, 6), -1.0, -1.0005), None),  # another answer: it moved
    ],
)
def test_the_rules_by_hand(now, told):
    found = probed()[0].judge(2, now, THEN)
    assert found is None if told is None else re.search(told, found)


def test_answers_of_few_or_other_tokens_are_not_compared():
    assert moves(answer(2), answer(1)) == (0, 0, 0)
    assert moves(answer(tokens=(2, 3, 4)), answer(tokens=(2, 3, 4))) is None
    assert moves(answer(tokens=(2, 3, 4, 4)), answer()) is None


def test_what_the_probe_asks_for():
    """The prompt's last 64 tokens, 8 new ones and never a row that is too long; no way to end before them."""
    policy = tiny.policy()
    long = [2 + i % 14 for i in range(100)]

    def sampling(limit=None, seeds=True, **options):
        engine = NativeEngine(policy.model, policy.tokenizer)
        if not seeds:
            engine.capabilities = lambda: Capabilities("other", "1", "inproc", row_seeds=False)
        probe = Probe(policy, engine, GenerationConfig(**options), long, dtype="float32", max_length=limit)
        assert probe.prompt == long[-64:]
        return probe.sampling

    plain = sampling(max_new_tokens=20, stop_token_ids=[3], stop_strings=["w5"])
    assert (plain.max_new_tokens, plain.ignore_eos, plain.stop_token_ids, plain.stop_strings) == (8, True, (), ())
    assert not plain.greedy
    assert sampling(max_new_tokens=5).max_new_tokens == 5
    assert sampling(max_new_tokens=20, limit=67).max_new_tokens == 3
    first = sampling(max_new_tokens=20, min_new_tokens=4, stop_token_ids=[3])  # scored without the stop tokens
    assert (first.min_new_tokens, first.stop_token_ids, first.ignore_eos) == (4, (3,), False)
    assert sampling(seeds=False).greedy
    assert not sampling(seeds=False, temperature=0.7).greedy


def test_when_the_probe_is_made():
    """After the first refit of a process, at whatever step, then at multiples of the period; the metric is then's."""
    policy = tiny.policy()
    engine = NativeEngine(policy.engine_model(torch.float32), policy.tokenizer)
    asked = []
    for period in (0, 1, 3):
        probe = Probe(policy, engine, GenerationConfig(probe_period=period), PROMPT, dtype="float32")
        asked.append([])
        for version in (4, 5, 6, 7):
            engine.version = version
            probe(version)
            if probe.metrics:
                assert 0 <= probe.metrics["training/probe_logprob_error"] < 1e-5
                asked[-1].append(version)
    assert asked == [[], [4, 5, 6, 7], [4, 6]]


def made_by(kind):
    def make(policy, config, dtype):
        size = config.policy.generation.max_batch_size
        return kind(copy.deepcopy(policy.model).to(dtype), policy.tokenizer, max_batch_size=size)

    return make


def test_a_stale_engine_stops_the_run_before_it_samples_again(tmp_path, monkeypatch):
    """The step that trained is logged and saved whole: another run goes on from it."""
    monkeypatch.setattr(Faulty, "fault", "nothing")
    settings = {"policy__generation__probe_period": 1, "checkpointing__save_period": 10}
    with monkeypatch.context() as context:
        context.setattr(trainer_module, "make_engine", made_by(Faulty))
        trainer = PPOTrainer(small(tmp_path, **settings))
        with pytest.raises(TrainingError, match="stale"):
            trainer.fit()
    assert trainer.progress.step == 1
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1] and rows[0]["training/probe_logprob_error"] > 1e-3
    again = PPOTrainer(small(tmp_path, **settings))
    assert (again.progress.step, again.loader.consumed) == (1, 4)
    again.fit()
    assert again.progress.step == 4


def test_how_far_the_engine_is_from_the_trainer_by_hand():
    """Two responses, of two tokens and of one: log-probs of the trainer, and of the engine, which gives a third more
    and a half less to a token of the first."""
    batch = pack([[2], [3]], [completion([0.6, 0.2]), completion([0.5])])
    old = torch.tensor([0.0, 0.45, 0.4, 0.0, 0.5])  # 0.6 is a third more than 0.45, 0.2 half of 0.4
    batch.update(
        old_logprobs=torch.where(batch.mask, old.log(), 0.0), entropy=torch.zeros(5), raw_reward=torch.zeros(2)
    )
    metrics = rollout_metrics(batch)
    assert metrics["training/rollout_probs_diff_mean"] == pytest.approx((0.15 + 0.2 + 0) / 3)
    assert metrics["training/rollout_probs_diff_max"] == pytest.approx(0.2)
    kl = (0.75 - 1 - math.log(0.75) + 2 - 1 - math.log(2) + 0) / 3
    assert metrics["training/rollout_kl"] == pytest.approx(kl, rel=1e-5)
    assert metrics["training/seq_logprob_error_mean"] == pytest.approx(((4 / 3 + 2) / 2 + 1) / 2)
    assert metrics["training/seq_logprob_error_max"] == pytest.approx((4 / 3 + 2) / 2)


def completion(probabilities: list[float]) -> Completion:
    return Completion([5] * len(probabilities), [math.log(p) for p in probabilities], "length", 0)


class Behind(NativeEngine):
    """Says of every answer that older weights gave it."""

    def _generate(self, prompts, sampling, seeds):
        return [replace(each, weight_version=self.version - 1) for each in super()._generate(prompts, sampling, seeds)]


def test_responses_of_other_weights_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(trainer_module, "make_engine", made_by(Behind))
    trainer = PPOTrainer(small(tmp_path, policy__generation__probe_period=0))
    trainer.refit()
    with pytest.raises(TrainingError, match="16 of 16 responses were sampled by weights of step -1, .* of step 0"):
        trainer.generate_rollouts(1)


def test_what_dynamic_sampling_carries_may_be_older(tmp_path):
    """Only what is sampled now has to be by the present weights: steps have responses of the one before."""
    seen = []
    options = {
        "ppo__use_dynamic_sampling": True,
        "ppo__dynamic_sampling_carry": True,
        "ppo__batch_multiplier": 2,
        "ppo__dynamic_sampling_on_exhausted": "train_partial",
        "loss_fn__importance_sampling__type": "tis",
        "ppo__max_num_steps": 4,
    }
    trainer = PPOTrainer(small(tmp_path, **options))
    collect = DynamicSampling.collect

    def noted(self, draw):
        batch = collect(self, draw)
        seen.append(int(trainer.progress.step - batch.weight_version.min()))
        return batch

    trainer.dynamic_sampling.collect = noted.__get__(trainer.dynamic_sampling)
    trainer.fit()
    assert len(seen) == 4 and max(seen) == 1


def test_an_answer_of_diverged_weights_is_left_to_the_rollout():
    probe, step = probed()
    with torch.no_grad():
        probe.policy.head.weight.fill_(float("nan"))
    step(1, 0.0)
    assert probe.metrics == {} and probe.problem is None


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_false_alarm_in_fifty_steps(tmp_path, dtype):
    trainer = PPOTrainer(
        tiny.config(
            logger__run_dir=tmp_path,
            ppo__max_num_steps=50,
            policy__dtype=dtype,
            policy__generation__probe_period=1,
            policy__generation__max_new_tokens=8,
        )
    )
    trainer.fit()
    assert trainer.progress.step == 50 and trainer.probe.problem is None
