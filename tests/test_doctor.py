"""`--doctor`: nothing is wrong with a sound run, each fault is found by its name, and the run's folder stays as is."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import trainers.policy.hf
import trainers.ppo
import trainers.rewards
import trainers.rollout
import trainers.trainer
from trainers.engines.native import NativeEngine
from trainers.launch import launch
from trainers.losses import PolicyLoss
from trainers.optim import Optimizer
from trainers.policy.reference import FrozenCopy
from trainers.trainer import Trainer

SMALL = [
    "env.size=8",
    "cluster.num_threads=1",
    "policy.train_global_batch_size=8",
    "policy.train_micro_batch_size=4",
    "algorithm.num_prompts_per_step=4",
    "algorithm.num_generations_per_prompt=4",
]
LOOKED_AT = ["masks", "engine", "reference", "reward", "advantages", "ratio", "update", "reference", "refit"]


def doctor(capsys: pytest.CaptureFixture, *settings: str, algorithm: str = "ppo", recipe: str = "copy"):
    """(exit code, names of what was looked at, {name: what was said of it, where it is wrong})"""
    texts = [f"config={algorithm}_{recipe}", *SMALL, *settings, "--doctor"]
    trainer = {"ppo": "PPOTrainer", "reinforce": "ReinforceTrainer"}[algorithm]
    code = launch(algorithm, trainer, "", [text.replace("algorithm.", f"{algorithm}.") for text in texts])
    findings = re.findall(r"^(ok |BAD)  (\w+) +(.+)$", capsys.readouterr().out, re.MULTILINE)
    return code, [what for _, what, _ in findings], {what: told for word, what, told in findings if word == "BAD"}


@pytest.mark.parametrize(
    ("algorithm", "recipe", "settings"),
    [
        ("ppo", "copy", []),
        ("reinforce", "copy", []),
        ("ppo", "copy", ["policy.dtype=bfloat16", "policy.packing=true", "policy.num_layers_unfrozen=1"]),
        ("ppo", "copy", ["policy.generation.dtype=bfloat16", "value.mode=local"]),
        ("ppo", "copy", ["policy.peft.enabled=true", "policy.dtype=bfloat16"]),
        ("ppo", "tool_lookup", ["policy.dtype=bfloat16"]),
        # The masters move, by less than bfloat16 shows.
        ("ppo", "copy", ["policy.dtype=bfloat16", "policy.param_dtype=bfloat16", "policy.optimizer.lr=1e-7"]),
        ("reinforce", "copy", ["algorithm.use_dynamic_sampling=true"]),
        ("reinforce", "copy", ["algorithm.adv_estimator.name=remax", "policy.generation.temperature=0.7"]),
        ("ppo", "copy", ["ppo.policy_training_start_step=3", "value.mode=local", "ppo.target_kl=1e-9"]),
    ],
)
def test_nothing_is_wrong_with_a_sound_run(capsys, algorithm, recipe, settings):
    code, names, bad = doctor(capsys, *settings, algorithm=algorithm, recipe=recipe)
    assert (code, bad) == (0, {})
    assert names == LOOKED_AT


def test_a_run_without_a_reference_is_sound_too(capsys):
    settings = ["ppo.skip_reference_policy_logprobs_calculation=true", "loss_fn.reference_policy_kl_penalty=0"]
    code, names, bad = doctor(capsys, *settings)
    assert (code, bad) == (0, {})
    assert names == [name for name in LOOKED_AT if name != "reference"]


def test_equal_rewards_hide_nothing_of_the_update(capsys):
    """Of random responses to two prompts none copies a word: all advantages are 0, which is nobody's fault."""
    settings = ["algorithm.num_prompts_per_step=1", "algorithm.num_generations_per_prompt=2"]
    settings += ["policy.train_global_batch_size=2", "policy.train_micro_batch_size=2"]
    code, names, bad = doctor(capsys, *settings, algorithm="reinforce")
    assert (code, bad, names) == (0, {}, LOOKED_AT)
    code, _, bad = doctor(capsys, *settings, "policy.optimizer.lr=0", algorithm="reinforce")
    assert code == 1 and set(bad) == {"update"} and "this rollout's are all 0" in bad["update"]


def engine_of_other_weights(monkeypatch):
    """The engine starts from weights of its own, and the first refit is lost."""
    own, real = NativeEngine.__init__, trainers.trainer.refit

    def init(self, model, *args, **kwargs):
        model = type(model)(model.config)
        nn.init.normal_(model.get_output_embeddings().weight)
        own(self, model, *args, **kwargs)

    monkeypatch.setattr(NativeEngine, "__init__", init)
    monkeypatch.setattr(trainers.trainer, "refit", lambda *args, version: version and real(*args, version=version))


def sampled_at_another_temperature(monkeypatch):
    real = NativeEngine.generate
    hotter = lambda sampling: replace(sampling, temperature=0.5)  # noqa: E731
    monkeypatch.setattr(
        NativeEngine,
        "generate",
        lambda self, prompts, sampling, seeds: real(
            self, prompts, sampling if self.version else hotter(sampling), seeds
        ),
    )


def packed(change):
    """`change(mask [T])` of the mask that pack_rows makes."""

    def patch(monkeypatch):
        real = trainers.rollout.pack_rows

        def pack_rows(rows):
            batch = real(rows)
            return batch.update(mask=change(batch.mask))

        monkeypatch.setattr(trainers.rollout, "pack_rows", pack_rows)

    return patch


def without_last_token(mask):
    return mask & mask.roll(-1)


def reward_one_token_late(monkeypatch):
    real = Trainer._score

    def score(self, batch, *args):
        batch = real(self, batch, *args)
        return batch.update(token_scores=batch.token_scores.roll(1))

    monkeypatch.setattr(Trainer, "_score", score)


def reward_on_the_token_before(monkeypatch):
    """Shaped rewards, not the scores, go astray."""
    real = trainers.rewards.Rewards.__call__

    def rewards(self, batch, kl_coef):
        batch = real(self, batch, kl_coef)
        return batch.update(rewards=batch.rewards.roll(-4))  # onto the last token of the prompt: responses have four

    monkeypatch.setattr(trainers.rewards.Rewards, "__call__", rewards)


def score_that_is_not_paid(monkeypatch):
    real = Trainer._score
    monkeypatch.setattr(
        Trainer, "_score", lambda self, batch, *args: real(self, batch, *args).update(raw_reward=torch.ones(16))
    )


def reference_that_moves(monkeypatch):
    def init(self, backbone):
        self.top, self.head = backbone.top, backbone.output_layer()

    monkeypatch.setattr(FrozenCopy, "__init__", init)


def reference_of_other_weights(monkeypatch):
    real = FrozenCopy.__init__

    def init(self, backbone):
        real(self, backbone)
        nn.init.normal_(self.head.weight)

    monkeypatch.setattr(FrozenCopy, "__init__", init)


def loss_at_another_temperature(monkeypatch):
    real = PolicyLoss.__init__

    def init(self, *args, temperature, **kwargs):
        real(self, *args, temperature=temperature / 2, **kwargs)

    monkeypatch.setattr(PolicyLoss, "__init__", init)


def scored_at_another_temperature(monkeypatch):
    """The same in the trainer's scoring pass: it agrees neither with the engine nor with the update."""
    hf, real = trainers.policy.hf, trainers.policy.hf.scored
    monkeypatch.setattr(
        hf, "scored", lambda *args, temperature, **kwargs: real(*args, temperature=temperature / 2, **kwargs)
    )


def nan_in_the_advantages(monkeypatch):
    real = trainers.ppo.estimate_advantages

    def estimate(batch, cfg):
        batch = real(batch, cfg)
        batch.advantages[batch.last_selected()[0]] = torch.nan
        return batch

    monkeypatch.setattr(trainers.ppo, "estimate_advantages", estimate)


def advantages_of_the_prompt(monkeypatch):
    real = trainers.ppo.estimate_advantages
    monkeypatch.setattr(
        trainers.ppo,
        "estimate_advantages",
        lambda batch, cfg: real(batch, cfg).update(advantages=torch.ones(batch.tokens.numel())),
    )


def optimizer_of_no_weight(monkeypatch):
    monkeypatch.setattr(Optimizer, "step", lambda self: None)


def gradient_not_finite(monkeypatch):
    real = Optimizer.clip
    monkeypatch.setattr(Optimizer, "clip", lambda self: real(self) * torch.inf)


def refit_that_does_nothing(monkeypatch):
    monkeypatch.setattr(trainers.trainer, "refit", lambda *args, version: 0)


def refit_that_copies_nothing(monkeypatch):
    """The engine takes the version, and keeps its weights: those of a bfloat16 engine are its own."""
    real = NativeEngine.put

    def put(self, bucket):
        if self.next_version == 0:
            return real(self, bucket)
        self.pending.clear()
        return 0

    monkeypatch.setattr(NativeEngine, "put", put)


FAULTS = [
    (packed(without_last_token), [], {"masks"}, "the trained tokens are not those that were sampled"),
    (packed(lambda mask: mask.roll(-1)), [], {"masks"}, "the trained tokens are not those that were"),
    (packed(lambda mask: mask | True), [], {"masks"}, "the first token of a sequence is trained"),
    (engine_of_other_weights, [], {"engine"}, "log p_trainer"),
    (engine_of_other_weights, ["policy.dtype=bfloat16"], {"engine"}, "log p_trainer"),
    (sampled_at_another_temperature, [], {"engine"}, "log p_trainer"),
    (reward_one_token_late, [], {"reward"}, "tokens that the policy did not sample are paid"),
    (reward_on_the_token_before, [], {"reward"}, "tokens that the policy did not sample are paid"),
    (score_that_is_not_paid, [], {"reward"}, "does not add up to its score"),
    (reference_of_other_weights, [], {"reference"}, "it is not the untrained policy"),
    (reference_that_moves, [], {"reference"}, "its log-probs moved by"),
    (loss_at_another_temperature, [], {"ratio"}, "first update: mean |ratio - 1|"),
    (scored_at_another_temperature, [], {"engine", "ratio", "refit"}, ""),
    (nan_in_the_advantages, [], {"advantages"}, "some advantages are not finite"),
    (advantages_of_the_prompt, [], {"advantages"}, "they are not 0 outside the trained tokens"),
    (optimizer_of_no_weight, [], {"update"}, "0 of 21 trained tensors changed"),
    (lambda monkeypatch: None, ["policy.optimizer.lr=1e-30"], {"update"}, "0 of 21 trained tensors changed"),
    (gradient_not_finite, [], {"update"}, "no finite gradient in 2 of 2 optimizer steps"),
    (refit_that_does_nothing, [], {"refit"}, "the engine's weights are those of step 0, not of step 1"),
    (refit_that_copies_nothing, ["policy.dtype=bfloat16"], {"refit"}, "weights changed on purpose"),
]


@pytest.mark.parametrize(("fault", "settings", "names", "told"), FAULTS)
def test_each_fault_is_found_under_its_name(capsys, monkeypatch, fault, settings, names, told):
    fault(monkeypatch)
    code, _, bad = doctor(capsys, *settings)
    assert code == 1
    assert set(bad) == names
    assert any(told in each for each in bad.values()), bad


def test_a_step_that_cannot_be_made_says_why(capsys, monkeypatch):
    code, _, bad = doctor(capsys, "ppo.overlong_filtering=true")  # the recipe's responses are all cut
    assert (code, list(bad)) == (1, ["update"])
    assert bad["update"] == "nothing is left to train on: training/overlong_filtered 16"
    code, _, bad = doctor(capsys, "ppo.use_dynamic_sampling=true", "ppo.dynamic_sampling_max_gen_batches=1")
    assert (code, list(bad)) == (1, ["step"]) and "ppo.num_prompts_per_step=4 are needed" in bad["step"]
    monkeypatch.setattr("trainers.environments.copy.CopyEnvironment.score", lambda self, samples: [float("nan")] * 16)
    code, _, bad = doctor(capsys)
    assert (code, list(bad)) == (1, ["reward"]) and "nan" in bad["reward"]


def test_the_runs_folder_is_not_touched(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "mine"
    (run / "checkpoints" / "step_2").mkdir(parents=True)
    for name in ("metrics.jsonl", "config.yaml", "checkpoints/step_2/training.json"):
        (run / name).write_text("as it was\n")

    def folder() -> dict[Path, tuple[int, bytes]]:
        files = {path: path.read_bytes() if path.is_file() else b"" for path in tmp_path.rglob("*")}
        return {path: (path.stat().st_mtime_ns, held) for path, held in files.items()}

    before = folder()
    options = ["logger.tensorboard=true", "logger.report=true", "checkpointing.enabled=true", "ppo.val_at_start=true"]
    assert doctor(capsys, "logger.run_dir=mine", *options, "checkpointing.resume=auto")[0] == 0
    monkeypatch.setattr(trainers.trainer, "refit", lambda *args, version: 0)
    assert doctor(capsys, *options)[0] == 1  # logger.run_dir=auto: no results/ here
    assert folder() == before
