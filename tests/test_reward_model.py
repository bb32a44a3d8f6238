"""A reward model of transformers: its scores beside the model's own, several heads, refusals, runs and critics."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    Qwen3Config,
    Qwen3ForSequenceClassification,
)

from runs import train_reward_model
from tests import tiny
from trainers.arithmetic import ConfigError, check
from trainers.cli import load_config
from trainers.config import EnvConfig
from trainers.config_env import RewardModelConfig
from trainers.dry_run import dry_run
from trainers.environments import Message, Prompt, Sample, make_environment
from trainers.environments.sentiment import OPENINGS, SentimentEnvironment
from trainers.environments.weighted import WeightedEnvironment
from trainers.ppo import PPOTrainer
from trainers.trainer import TrainingError
from trainers.value.hf import LocalValue

CPU = torch.device("cpu")
SHAPE = {
    "vocab_size": 16,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(tiny.tiny_model())


def classifier(folder: Path, heads: int = 1, config: type = LlamaConfig, tokenizer=None, **settings) -> Path:
    """A random sequence classifier whose weights are large enough to tell tokens apart."""
    models = {
        LlamaConfig: LlamaForSequenceClassification,
        Qwen3Config: Qwen3ForSequenceClassification,
        BertConfig: BertForSequenceClassification,
    }
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = models[config](
            config(**{**SHAPE, "num_labels": heads, "pad_token_id": 1, "initializer_range": 0.5, **settings})
        )
    model.save_pretrained(folder)
    (tokenizer or AutoTokenizer.from_pretrained(tiny.tiny_model())).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return classifier(tmp_path_factory.mktemp("models") / "one-head")


@pytest.fixture(scope="module")
def two_heads(tmp_path_factory) -> Path:
    return classifier(tmp_path_factory.mktemp("models") / "two-heads", 2)


def environment(tokenizer, folder: Path, **settings):
    made = make_environment(
        EnvConfig(name="reward_model", reward_model=RewardModelConfig(model_name=str(folder), **settings))
    )
    made.bind(tokenizer, device=CPU, dtype=torch.float32)
    return made


def sample(prompt_ids: tuple[int, ...], response_ids: tuple[int, ...]) -> Sample:
    return Sample(Prompt("p"), prompt_ids, response_ids, "not these words", "stop")


# Lengths 2 to 9; responses that end in the padding token 1, are it alone, or hold it in the middle.
RAGGED = [
    sample((0, 5), (7, 8, 1)),
    sample((0,), (1,)),
    sample((0, 3, 4, 5), (6, 1, 7, 8, 9)),
    sample((0, 9), (2, 1, 1, 1)),
    sample((0, 1), (3,)),
]


def own_scores(folder: Path) -> torch.Tensor:
    """[rows, heads]: the model's own logits of each row alone, told to look for no padding."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    model.config.pad_token_id = None
    with torch.no_grad():
        rows = [torch.tensor([[*row.prompt_ids, *row.response_ids]]) for row in RAGGED]
        return torch.cat([model(input_ids=row).logits for row in rows])


@pytest.mark.parametrize("config", [LlamaConfig, Qwen3Config])
@pytest.mark.parametrize("how", [{"batch_size": 1}, {"batch_size": 3}, {}, {"max_tokens_per_micro_batch": 14}])
def test_scores_are_the_models_own_of_unpadded_rows(tmp_path, tokenizer, config, how):
    folder = classifier(tmp_path, config=config)
    own = own_scores(folder)[:, 0]
    assert own.unique().numel() == len(RAGGED) and own.std() > 0.1
    torch.testing.assert_close(torch.tensor(environment(tokenizer, folder, **how).score(RAGGED)), own)


def test_a_stop_token_that_is_the_padding_is_scored(folder, tokenizer):
    """Read at the last token that is not pad_token_id, as transformers does, the two would be the same."""
    ended, cut = sample((0, 5), (7, 8, 1)), sample((0, 5), (7, 8))
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        theirs = model(input_ids=torch.tensor([[0, 5, 7, 8, 1], [0, 5, 7, 8, 1]])).logits[0, 0]
    first, second = environment(tokenizer, folder).score([ended, cut])
    assert abs(first - second) > 0.05
    assert second == pytest.approx(float(theirs), abs=1e-5)


def test_a_dialogue_is_scored_with_its_observations_at_the_policys_last_token(folder, tokenizer):
    said = (Message("policy", (7, 1), "w7"), Message("environment", (4, 5), "w4 w5"), Message("policy", (8,), "w8"))
    left = (*said, Message("environment", (3,), "w3"))  # what max_total_sequence_length has left of an observation
    dialogues = [Sample(Prompt("p"), (0, 5), (7, 1, 8), "w7 w8", "stop", messages) for messages in (said, left)]
    model = environment(tokenizer, folder)
    (whole,) = model.score([sample((0, 5), (7, 1, 4, 5, 8))])
    assert model.score(dialogues) == pytest.approx([whole, whole], abs=1e-5)


def test_heads_are_standardised_and_then_weighted(two_heads, tokenizer):
    own = own_scores(two_heads).double()
    model = environment(tokenizer, two_heads, mean=[0.5, -1.0], std=[2.0, 0.25], weights=[3.0, -0.5])
    by_hand = 3.0 * (own[:, 0] - 0.5) / 2.0 - 0.5 * (own[:, 1] + 1.0) / 0.25
    assert model.score(RAGGED) == pytest.approx(by_hand.tolist(), abs=1e-4)
    metrics = model.metrics(RAGGED, by_hand.tolist())
    assert metrics == pytest.approx({f"env/head_{i}": float(own[:, i].mean()) for i in (0, 1)}, abs=1e-5)


def test_it_computes_as_the_policy_does_unless_told_otherwise(folder, tokenizer):
    exact = environment(tokenizer, folder).score(RAGGED)
    for settings, dtype in (({}, torch.bfloat16), ({"dtype": "bfloat16"}, torch.float32)):
        model = make_environment(
            EnvConfig(name="reward_model", reward_model=RewardModelConfig(model_name=str(folder), **settings))
        )
        model.bind(tokenizer, device=CPU, dtype=dtype)
        scores = model.score(RAGGED)
        kept = {name for name, p in model.model.named_parameters() if p.dtype == torch.float32}
        assert model.model.dtype == torch.bfloat16 and kept == {"score.weight"}
        assert model.model.model.rotary_emb.inv_freq.dtype == torch.float32
        assert scores != exact and scores == pytest.approx(exact, abs=0.25)


def test_it_is_one_of_several_rewards(folder, tokenizer):
    env = EnvConfig(
        name="copy",
        size=4,
        rewards={"copy": 1.0, "reward_model": 0.5},
        reward_model=RewardModelConfig(model_name=str(folder)),
    )
    both = make_environment(env)
    assert isinstance(both, WeightedEnvironment)
    both.bind(tokenizer, device=CPU, dtype=torch.float32)
    prompt = both.prompts()[0]
    one = Sample(prompt, prompt.ids, (prompt.metadata["target"], 1), "w", "stop")
    (alone,) = environment(tokenizer, folder).score([one])
    (copied,) = both.rewards["copy"][0].score([one])
    assert sum(both.score([one])[0]) == pytest.approx(copied + 0.5 * alone, abs=1e-6)
    assert "env/reward_model/head_0" in both.metrics([one], [[copied, alone]])


# --- what is refused -----------------------------------------------------------------------------------------------


def bad(tokenizer, folder: Path | str, **settings) -> str:
    with pytest.raises(ValueError, match=r"^env\.reward_model\.") as error:
        environment(tokenizer, folder, **settings)
    return str(error.value)


def test_numbers_that_do_not_match_the_heads(folder, two_heads, tokenizer):
    assert "weights: the model has 2 heads" in bad(tokenizer, two_heads)
    said = "expected a number for each head of the model, which has"
    assert f"mean=[1.0]: {said} 2" in bad(tokenizer, two_heads, mean=[1.0], weights=[1.0, 1.0])
    assert f"std=[1.0, 2.0]: {said} 1" in bad(tokenizer, folder, std=[1.0, 2.0])
    assert f"weights=[1.0, 2.0]: {said} 1" in bad(tokenizer, folder, weights=[1.0, 2.0])


def test_models_that_cannot_score(tmp_path, tokenizer):
    bert = {"num_key_value_heads": None, "max_position_embeddings": 32}
    said = bad(tokenizer, classifier(tmp_path / "bert", config=BertConfig, **bert))
    assert "BertForSequenceClassification has no linear layer `score`" in said
    assert "have no score.weight" in bad(tokenizer, tiny.tiny_model())  # a language model: its head would be random
    assert bad(tokenizer, tmp_path / "nowhere").startswith("env.reward_model.model_name='")


def test_scores_that_are_not_those_of_the_last_token(folder, tokenizer, monkeypatch):
    def pooled(self, input_ids, use_cache):
        return SimpleNamespace(logits=self.score(self.model(input_ids).last_hidden_state).mean(1))

    monkeypatch.setattr(LlamaForSequenceClassification, "forward", pooled)
    assert "the scores of LlamaForSequenceClassification differ by" in bad(tokenizer, folder)


def test_another_vocabulary(tmp_path, tokenizer):
    other = AutoTokenizer.from_pretrained(tiny.tiny_model())
    more = other.add_tokens(["more"])
    folder = classifier(tmp_path / "more", tokenizer=other, vocab_size=16 + more)
    environment(tokenizer, folder)  # a token that the policy lacks does no harm
    said = bad(other, classifier(tmp_path / "less"))
    assert "'more' is id 16 to the policy and no token to the reward model" in said


def test_sequences_beyond_the_model(folder, tokenizer):
    model = environment(tokenizer, folder)
    with pytest.raises(ValueError, match="token 16 is beyond its 16 embeddings"):
        model.score([sample((0,), (16,))])
    with pytest.raises(ValueError, match="64 positions, a sequence 65 tokens"):
        model.score([sample((0,), (2,) * 64)])


# What env.name=reward_model needs, to be accepted.
REQUIRED = ("env.name=reward_model", "env.reward_model.model_name=x", "policy.model_name=y", "data.prompts=hf:a/b")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (REQUIRED[:1] + REQUIRED[2:], "needs env.reward_model.model_name"),
        (("env.rewards={sentiment: 1, reward_model: 1}",), "needs env.reward_model.model_name"),
        (REQUIRED[:3], "env.name=reward_model needs data.prompts"),
        (REQUIRED[:2] + REQUIRED[3:], "env.name=reward_model needs policy.model_name"),
        ((*REQUIRED, "env.reward_model.std=0"), r"env.reward_model.std=\[0.0\]: expected numbers that are > 0"),
        ((*REQUIRED, "env.reward_model.std=[1, 0]"), "env.reward_model.std="),
        ((*REQUIRED, "env.reward_model.mean=.nan"), "env.reward_model.mean="),
        ((*REQUIRED, "env.reward_model.weights=[.inf]"), "env.reward_model.weights="),
        ((*REQUIRED, "env.reward_model.mean=a"), "env.reward_model.mean: expected a list of numbers"),
        ((*REQUIRED, "env.reward_model.max_tokens_per_micro_batch=9"), "is less than the longest sequence"),
        (
            (*REQUIRED, "env.reward_model.max_tokens_per_micro_batch=999", "env.reward_model.batch_size=4"),
            "env.reward_model.batch_size=4 has no effect",
        ),
        (
            ("env.reward_model.std=2",),
            r"env.reward_model.std=\[2.0\] has no effect with env.name=sentiment: set",
        ),
    ],
)
def test_settings(settings, said):
    check(load_config(None, REQUIRED))
    with pytest.raises(ConfigError, match=f"^.*{said}"):
        check(load_config(None, settings))


# --- in a run ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"<s> w{i}"}) + "\n" for i in range(2, 8)))
    return path


def run(run_dir: Path, folder: Path, prompts: Path, **overrides: object):
    options = {
        "logger__run_dir": run_dir,
        "env__name": "reward_model",
        "env__size": 512,
        "env__reward_model__model_name": folder,
        "policy__model_name": tiny.tiny_model(),
        "data__prompts": prompts,
        "ppo__num_prompts_per_step": 2,
        "ppo__num_generations_per_prompt": 4,
        "policy__train_global_batch_size": 8,
        "policy__train_micro_batch_size": 8,
        "checkpointing__enabled": True,
        "checkpointing__save_period": 1,
        "ppo__max_num_steps": 2,
        "ppo__val_period": 0,
    }
    return tiny.config(**options | overrides)


def rows(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def numbers(run_dir: Path) -> list[dict]:
    names = ("critic/score/mean", "env/head_0", "actor/pg_loss", "critic/vf_loss")
    return [{name: row[name] for name in names} for row in rows(run_dir)]


def test_a_run_with_a_critic_from_the_reward_model_resumes(tmp_path, folder, prompts):
    options = {
        "value__mode": "local",
        "value__model_name": folder,
        "value__train_global_batch_size": 8,
        "env__reward_model__mean": 0.5,
        "env__reward_model__std": 2.0,
    }
    PPOTrainer(run(tmp_path / "whole", folder, prompts, **options)).fit()
    for last in (1, 2):
        PPOTrainer(run(tmp_path / "parts", folder, prompts, ppo__max_num_steps=last, **options)).fit()
    whole = numbers(tmp_path / "whole")
    assert len(whole) == 2 and numbers(tmp_path / "parts") == whole
    for row in whole:
        assert row["critic/score/mean"] == pytest.approx((row["env/head_0"] - 0.5) / 2.0, abs=1e-5)
    with pytest.raises(TrainingError, match=r"env\.reward_model\.std"):
        PPOTrainer(run(tmp_path / "parts", folder, prompts, **options | {"env__reward_model__std": 3.0}))


def value(folder: Path, **overrides: object) -> LocalValue:
    cfg = tiny.config(value__mode="local", **overrides).value
    return LocalValue(folder, cfg, device=CPU, dtype=torch.float32, score_batch=3)


@pytest.mark.parametrize("packing", [False, True])
def test_a_critic_starts_as_the_reward_model(folder, packing):
    """Its values are the reward model's raw scores of the sequences so far."""
    batch = tiny.rollout()
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    rows = batch.tokens.split(batch.lengths.tolist())
    with torch.no_grad():
        logits = [model.score(model.model(input_ids=row[None]).last_hidden_state)[0, :, 0] for row in rows]
    before = torch.cat([torch.nn.functional.pad(row[:-1], (1, 0)) for row in logits])
    critic = value(folder, value__packing=packing)
    values, next_values = critic.infer(batch).result()
    torch.testing.assert_close(values, torch.where(batch.mask, before, 0.0))
    torch.testing.assert_close(next_values, torch.stack([row[-1] for row in logits]))
    assert {name.partition(".")[0] for name, _ in critic._trained()} == {"model", "head"}
    assert not any("score" in name for name, _ in critic._trained())


def test_a_critic_of_several_heads_starts_at_zero(two_heads):
    values, _ = value(two_heads, value__num_layers_unfrozen=1).infer(tiny.rollout()).result()
    assert values.abs().max() == 0


def test_a_dry_run_counts_both_without_a_language_model_head(folder, prompts, tmp_path):
    options = {"value__mode": "local", "value__model_name": folder, "cluster__device": "cpu"}
    size = sum(p.numel() for p in AutoModelForSequenceClassification.from_pretrained(folder).model.parameters())
    plan = dry_run(run(tmp_path, folder, prompts, **options))
    assert f"LlamaModel, {size + 33:,} parameters, {size + 33:,} trained" in plan
    assert f"reward    {folder}: LlamaModel, {size:,} parameters" in plan
    without = dry_run(
        run(tmp_path, folder, prompts, **options, env__name="sentiment", env__reward_model__model_name=None)
    )
    total, less = (float(re.search(r"in all ([\d.]+) MB", text)[1]) for text in (plan, without))
    assert total - less == pytest.approx(4 * size / 1e6, abs=0.011)  # printed to 0.01 MB

    options["env__reward_model__model_name"] = "/no/such/folder"
    with pytest.raises(ConfigError, match=r"^env\.reward_model\.model_name='/no/such/folder'"):
        dry_run(run(tmp_path, folder, prompts, **options))


# --- a reward model made here ----------------------------------------------------------------------------------------


def test_the_script_trains_one_that_the_trainer_takes(tmp_path, tokenizer):
    """Of a tiny model and a taste for one word, measured on pairs that were not trained on."""
    cfg = train_reward_model.Settings(pairs=160, new_tokens=4, layers=2, epochs=6, lr=3e-3)
    found = train_reward_model.train(
        "tiny-llama", tmp_path / "made", cfg, prompts=["w2", "w3", "w4", "w5"], rank=lambda text: text.count("w7")
    )
    assert found["first_loss"] == pytest.approx(0.6931, abs=1e-4)  # equal scores: log 2
    assert found["last_loss"] < 0.3 and found["accuracy"] > 0.9
    few, many = environment(tokenizer, tmp_path / "made").score(
        [sample((2,), (8, 9, 8, 9)), sample((2,), (7, 9, 7, 7))]
    )
    assert many > few + 1
    assert len((tmp_path / "made" / "prompts.jsonl").read_text().splitlines()) == 4


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_reward_model_of_smollm2_ranks_as_vader_does(tmp_path):
    """Minutes: trained on SmolLM2-135M's own continuations, it ranks pairs that it has not seen."""
    cfg, sentiment = train_reward_model.Settings(), SentimentEnvironment()
    found = train_reward_model.train(
        "smollm2-135m", tmp_path / "made", cfg, prompts=OPENINGS, rank=sentiment.positivity
    )
    assert found["accuracy"] > 0.7
