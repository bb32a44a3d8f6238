"""The trainer's numbers by hand: each option and each field reaches the formula it is meant for."""

import copy
import functools
import math

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoTokenizer, Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

import fastppo
from tests import tiny
from trainers.advantages import estimate_advantages
from trainers.batching import count, policy_minibatches
from trainers.config import LossConfig, PolicyConfig, PPOConfig, PPOTrainerConfig, ValueLossConfig
from trainers.config_algorithm import AdvEstimatorConfig
from trainers.engines import Completion, Sampling
from trainers.engines.native import NativeEngine, share_parameters
from trainers.losses import JointLoss, PolicyLoss, SelectedRows, ValueLoss, ratio_error
from trainers.metrics import rollout_metrics
from trainers.optim import StepMetrics
from trainers.policy.hf import HFPolicy
from trainers.ppo import PPOTrainer
from trainers.refit import refit
from trainers.rewards import Rewards
from trainers.rollout import FINISH, pack
from trainers.value import ScalarHead
from trainers.value.hf import LocalValue

TEMPERATURE = 0.7
LENGTHS = ((2, 4), (3, 1), (1, 5), (2, 3), (4, 2))  # 15 response tokens, of which sizes 1 to 4 make uneven parts


def trainer(run_dir, **overrides):
    options = {
        "logger__run_dir": run_dir,
        "ppo__num_prompts_per_step": 4,
        "ppo__num_generations_per_prompt": 4,
        "policy__train_global_batch_size": 8,
        "policy__train_micro_batch_size": 8,
        "policy__generation__temperature": TEMPERATURE,
    }
    return PPOTrainer(tiny.config(**options | overrides))


def randomise(head):
    with torch.no_grad():
        head.linear.weight.normal_()
        head.linear.bias.fill_(0.3)
    return head


def disturb(model):
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.05)


@torch.no_grad()
def plain_logprobs(model, ids, temperature=TEMPERATURE):
    """[S] float64: log-prob of each token given those before it; nan for the first."""
    logprobs = (model(ids[None]).logits[0].double() / temperature).log_softmax(-1)
    return F.pad(logprobs[:-1].gather(1, ids[1:, None])[:, 0], (1, 0), value=math.nan)


@torch.no_grad()
def plain_values(model, head, ids):
    """[S] float64: V of the state after each token."""
    hidden = model.get_decoder()(input_ids=ids[None]).last_hidden_state[0].double()
    return hidden @ head.linear.weight[0].double() + head.linear.bias.double()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"policy__num_layers_unfrozen": 1},
        {"value__mode": "local", "value__train_global_batch_size": 8, "value__train_micro_batch_size": 8},
    ],
    ids=["shared", "shared-cut", "local"],
)
def test_a_rollout_by_hand(tmp_path, options):
    """Log-probs, reference, values, rewards, advantages and returns against plain forwards of single sequences."""
    ppo = trainer(
        tmp_path,
        policy__generation__ignore_eos=False,
        policy__generation__max_new_tokens=6,
        policy__logprob_batch_size=3,
        ppo__bootstrap_truncated=True,
        ppo__adv_estimator__gae_gamma=0.9,
        ppo__normalize_advantages=False,
        loss_fn__reference_policy_kl_penalty=0.3,
        **options,
    )
    before = copy.deepcopy(ppo.policy.model)
    head = randomise(ppo.value.head)
    disturb(ppo.policy.model)
    ppo.refit()
    batch = ppo.generate_ppo_data(ppo.generate_rollouts(1))
    critic = ppo.policy.model if options.get("value__mode") != "local" else ppo.value.model
    near = lambda x: pytest.approx(float(x), abs=2e-5)  # noqa: E731
    for row in range(len(batch)):
        start, stop = batch.cu_seqlens[row : row + 2].tolist()
        ids, prompt = batch.tokens[start:stop], int((~batch.mask[start:stop]).sum())
        policy, reference = plain_logprobs(ppo.policy.model, ids), plain_logprobs(before, ids)
        after = plain_values(critic, head, ids)
        assert batch.next_values[row].item() == near(after[-1])
        cut = FINISH[int(batch.finish[row])] == "length"
        assert cut == (stop - start - prompt == 6 and ids[-1] != 1)  # 1 is </s>
        following, advantage = float(after[-1]) if cut else 0.0, 0.0
        for i in reversed(range(prompt, stop - start)):
            t, value = start + i, float(after[i - 1])
            score = float(batch.raw_reward[row]) if t == stop - 1 else 0.0
            reward = score - 0.3 * float(policy[i] - reference[i])
            advantage = reward + 0.9 * following - value + 0.9 * 0.95 * advantage
            following = value
            assert batch.values[t].item() == near(value)
            assert batch.old_logprobs[t].item() == near(policy[i])
            assert batch.rollout_logprobs[t].item() == near(policy[i])
            assert batch.ref_logprobs[t].item() == near(reference[i])
            assert batch.rewards[t].item() == near(reward)
            assert batch.advantages[t].item() == near(advantage)
            assert batch.returns[t].item() == near(advantage + value)
    assert set(batch.finish.tolist()) == {0, 1}
    assert (batch.old_logprobs - batch.ref_logprobs).abs().max() > 0.01 and batch.values.std() > 0.1


# One micro-batch of 13 tokens in 4 sequences, of a step of 20 tokens in 6.
HIDDEN, VOCAB, NUM_TOKENS, NUM_SEQS = 8, 16, 20, 6


def micro_batch(softcap=None):
    draw = torch.Generator().manual_seed(0)
    noise = lambda *shape: torch.randn(*shape, generator=draw)  # noqa: E731
    hidden, weight, bias = (3 * noise(13, HIDDEN)), noise(VOCAB, HIDDEN), noise(VOCAB)
    targets = torch.randint(VOCAB, (13,), generator=draw)
    old = fastppo.logprob(F.linear(hidden, weight, bias), targets, temperature=TEMPERATURE, softcap=softcap).logprobs
    old = old + 0.5 * noise(13)
    advantages = noise(13)
    old[3], advantages[3] = old[3] - 2, -1.0  # a ratio far above any dual clip, at a negative advantage
    fields = {
        "old_logprobs": old,
        "rollout_logprobs": old + noise(13),
        "ref_logprobs": old + 0.5 * noise(13),
        "advantages": advantages,
        "values": noise(13),
        "returns": noise(13),
    }
    rows = SelectedRows(targets, torch.tensor([0, 4, 5, 10, 13]), NUM_TOKENS, NUM_SEQS, fields)
    return hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), rows


def by_hand(inputs, softcap, *, kl=False, **options):
    hidden, weight, bias, rows = inputs
    logprobs, entropy = fastppo.logprob(
        F.linear(hidden, weight, bias), rows.targets, temperature=TEMPERATURE, softcap=softcap
    )
    return fastppo.ppo_loss(
        logprobs,
        rows.fields["old_logprobs"],
        rows.fields["advantages"],
        entropy=entropy,
        ref_logprobs=rows.fields["ref_logprobs"] if kl else None,
        cu_seqlens=rows.cu_seqlens,
        num_tokens=NUM_TOKENS,
        num_seqs=NUM_SEQS,
        **options,
    ).loss


def policy_loss(softcap=None, **options):
    return PolicyLoss(LossConfig(**options), temperature=TEMPERATURE, norm_length=4, softcap=softcap)


def with_gradients(loss, *inputs):
    return [loss.detach(), *torch.autograd.grad(loss, inputs, allow_unused=True)]


def same(a, b):
    return all(torch.allclose(x, y, rtol=1e-5, atol=1e-6) for x, y in zip(a, b, strict=True))


KL = {"use_kl_in_reward": False, "reference_policy_kl_penalty": 0.3}
NORM = {"aggregation": "token_sum_norm"}
OPTIONS = {
    "ratio_clip_min": ({}, {"ratio_clip_min": 0.05}, {"clip_eps": 0.05}),
    "ratio_clip_max": ({}, {"ratio_clip_max": 0.6}, {"clip_eps": 0.2, "clip_eps_high": 0.6}),
    "ratio_clip_c": ({}, {"ratio_clip_c": 3.0}, {"dual_clip": 3.0}),
    "entropy_bonus": ({}, {"entropy_bonus": 0.1}, {"ent_coef": 0.1}),
    **{
        name: ({}, {"aggregation": name}, {"aggregation": name})
        for name in ("seq_mean_token_mean", "seq_mean_token_sum")
    },
    "token_sum_norm": ({}, NORM, {"aggregation": "token_sum_norm", "norm": 4}),
    "norm_length": (NORM, NORM | {"norm_length": 7.0}, {"aggregation": "token_sum_norm", "norm": 7}),
    "kl_in_loss": ({}, KL, {"kl": True, "kl_coef": 0.3, "kl_type": "k1"}),
    "kl_penalty": (KL, KL | {"reference_policy_kl_penalty": 0.1}, {"kl": True, "kl_coef": 0.1, "kl_type": "k1"}),
    **{
        name: (KL, KL | {"reference_policy_kl_type": name}, {"kl": True, "kl_coef": 0.3, "kl_type": name})
        for name in ("abs", "k2", "k3")
    },
    # The two gradients of k2 are equal, so this one needs k3.
    "pathwise": (
        KL | {"reference_policy_kl_type": "k3"},
        KL | {"reference_policy_kl_type": "k3", "reference_policy_kl_gradient": "pathwise"},
        {"kl": True, "kl_coef": 0.3, "kl_type": "k3", "kl_grad": "pathwise"},
    ),
    **{
        name: ({}, {"type": name}, {"loss_type": name}) for name in ("reinforce", "cispo", "gspo", "gmpo", "sapo")
    },
}  # fmt: skip


@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("default, options, written_out", OPTIONS.values(), ids=OPTIONS)
def test_each_option_of_the_policy_loss_reaches_it(softcap, default, options, written_out):
    hidden, weight, bias, rows = given = micro_batch(softcap)
    inputs = hidden, weight, bias
    got = with_gradients(policy_loss(softcap, **options)(hidden, weight, rows, bias).loss, *inputs)
    assert same(got, with_gradients(by_hand(given, softcap, **written_out), *inputs))
    without = with_gradients(policy_loss(softcap, **default)(hidden, weight, rows, bias).loss, *inputs)
    assert not all(torch.allclose(x, y, rtol=1e-3, atol=1e-4) for x, y in zip(got, without, strict=True))


def test_a_kl_charged_in_the_reward_is_not_charged_in_the_loss():
    hidden, weight, bias, rows = given = micro_batch()
    charged = policy_loss(use_kl_in_reward=True, reference_policy_kl_penalty=5.0)(hidden, weight, rows, bias).loss
    assert charged.item() == pytest.approx(by_hand(given, None).item(), rel=1e-5)


def test_temperature_and_softcap_reach_the_policy_loss():
    hidden, weight, bias, rows = micro_batch()
    losses = [
        PolicyLoss(LossConfig(), temperature=temperature, norm_length=4, softcap=softcap)(
            hidden, weight, rows, bias
        ).loss.item()
        for temperature in (TEMPERATURE, 1.0)
        for softcap in (None, 30.0)
    ]
    assert min(abs(a - b) for i, a in enumerate(losses) for b in losses[:i]) > 1e-3


def value_loss_by_hand(values, rows, cliprange=None):
    old, returns = rows.fields["values"], rows.fields["returns"]
    error = (values - returns) ** 2
    if cliprange is not None:
        error = torch.maximum(error, (torch.clamp(values, old - cliprange, old + cliprange) - returns) ** 2)
    return 0.5 * error.sum() / NUM_TOKENS


@pytest.mark.parametrize(
    "options, factor, cliprange",
    [({}, 1.0, None), ({"scale": 0.25}, 0.25, None), ({"cliprange": 0.3}, 1.0, 0.3)],
    ids=["default", "scale", "cliprange"],
)
def test_each_option_of_the_value_loss_reaches_it(options, factor, cliprange):
    rows = micro_batch()[3]
    values = torch.randn(13, generator=torch.Generator().manual_seed(1)).requires_grad_()
    got = with_gradients(ValueLoss(ValueLossConfig(**options))(values, rows).loss, values)
    assert same(got, with_gradients(factor * value_loss_by_hand(values, rows, cliprange), values))
    plain = with_gradients(ValueLoss(ValueLossConfig())(values, rows).loss, values)
    assert same(got, plain) == (not options)


@pytest.mark.parametrize("coef, detach_trunk", [(1.0, True), (0.3, True), (0.3, False)])
def test_the_joint_loss_adds_the_value_loss_and_detaches_the_trunk_alone(coef, detach_trunk):
    hidden, weight, bias, rows = given = micro_batch()
    head = randomise(ScalarHead(HIDDEN))
    inputs = hidden, weight, bias, head.linear.weight, head.linear.bias
    joint = JointLoss(policy_loss(), ValueLoss(ValueLossConfig()), head, coef=coef, detach_trunk=detach_trunk)
    got = with_gradients(joint(hidden, weight, rows, bias).loss, *inputs)

    values = F.linear(hidden, head.linear.weight, head.linear.bias)[:, 0]
    critic = with_gradients(coef * value_loss_by_hand(values, rows), *inputs[:1], *inputs[3:])
    actor = with_gradients(by_hand(given, None), *inputs[:3])
    assert got[0].item() == pytest.approx((actor[0] + critic[0]).item(), rel=1e-5)
    trunk = actor[1] if detach_trunk else actor[1] + critic[1]
    assert critic[1].abs().max() > 1e-2
    assert same(got[1:], [trunk, actor[2], actor[3], critic[2], critic[3]])


@pytest.mark.parametrize("detach_trunk", [True, False])
def test_a_trainer_hands_its_settings_to_its_losses(tmp_path, detach_trunk):
    ppo = trainer(
        tmp_path,
        policy__generation__max_new_tokens=5,
        value__loss_coef=0.3,
        value__detach_trunk=detach_trunk,
        value_loss_fn__scale=0.25,
        value_loss_fn__cliprange=0.3,
        loss_fn__aggregation="token_sum_norm",
        loss_fn__entropy_bonus=0.1,
    )
    rows = micro_batch()[3]
    width = ppo.policy.model.config.hidden_size
    draw = torch.Generator().manual_seed(2)
    hidden = torch.randn(13, width, generator=draw).requires_grad_()
    weight, bias = torch.randn(VOCAB, width, generator=draw), torch.zeros(VOCAB)
    head = randomise(ppo.value.head)
    got = with_gradients(ppo.policy_loss(hidden, weight, rows).loss, hidden)

    actor = by_hand((hidden, weight, bias, rows), None, ent_coef=0.1, aggregation="token_sum_norm", norm=5)
    values = head(hidden.detach() if detach_trunk else hidden)
    right = actor + 0.3 * 0.25 * value_loss_by_hand(values, rows, 0.3)
    assert torch.allclose(got[0], right.detach(), rtol=1e-5)
    assert torch.allclose(got[1], torch.autograd.grad(right, hidden)[0], rtol=1e-4, atol=1e-6)


def scored_by_hand(*responses, prompt=2):
    """A batch of one-prompt rows whose responses have as many tokens as each number says; all cut but the last."""
    finish = ["length"] * (len(responses) - 1) + ["stop"]
    completions = [Completion([3] * n, [-1.0] * n, f, 0) for n, f in zip(responses, finish, strict=True)]
    return pack([[2] * prompt] * len(responses), completions)


@pytest.mark.parametrize(
    "kl_type, kl",
    [
        ("k1", [0.5, -1.0, 0.0]),
        ("abs", [0.5, 1.0, 0.0]),
        ("k2", [0.125, 0.5, 0.0]),
        ("k3", [math.exp(-0.5) - 0.5, math.e - 2, 0.0]),
    ],
)
def test_each_kl_type_is_charged_in_the_reward(kl_type, kl):
    batch = scored_by_hand(3)
    batch.update(
        old_logprobs=torch.tensor([9.0, 9.0, -1.0, -2.0, -3.0]),
        ref_logprobs=torch.tensor([1.0, 1.0, -1.5, -1.0, -3.0]),
        token_scores=torch.tensor([0.0, 0.0, 0.0, 0.25, 1.0]),
        raw_reward=torch.tensor([1.25]),
    )
    options = {"reference_policy_kl_penalty": 0.2, "reference_policy_kl_type": kl_type}
    charged = Rewards(PPOConfig(), LossConfig(**options))(batch, 0.2).rewards
    right = [0.0, 0.0, -0.2 * kl[0], 0.25 - 0.2 * kl[1], 1.0 - 0.2 * kl[2]]
    assert charged.tolist() == pytest.approx(right, abs=1e-6)
    free = Rewards(PPOConfig(), LossConfig(use_kl_in_reward=False, **options))(batch, 0.2).rewards
    assert torch.equal(free, batch.token_scores)


@pytest.mark.parametrize(
    "gamma, lam, bootstrap, cut, stopped",
    [
        (0.5, 0.5, False, [-0.40625, -0.125, 1.5], [-0.5, 1.0]),
        (1.0, 0.5, False, [-0.25, 0.0, 1.5], [0.0, 1.0]),
        (0.5, 1.0, False, [-0.25, 0.25, 1.5], [-0.25, 1.0]),
        (0.5, 0.5, True, [-0.34375, 0.125, 2.5], [-0.5, 1.0]),
    ],
    ids=["both", "lambda", "gamma", "bootstrap"],
)
def test_discount_and_lambda_by_hand(gamma, lam, bootstrap, cut, stopped):
    batch = scored_by_hand(3, 2)
    values = [0.5, 0.25, -0.5, 1.0, 0.5]
    batch.update(
        rewards=torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.5]),
        values=torch.tensor([0.0, 0.0, *values[:3], 0.0, 0.0, *values[3:]]),
        next_values=torch.tensor([2.0, 7.0]),
    )
    settings = PPOConfig(
        adv_estimator=AdvEstimatorConfig(gae_gamma=gamma, gae_lambda=lam),
        normalize_advantages=False,
        bootstrap_truncated=bootstrap,
    )
    batch = estimate_advantages(batch, settings)
    assert batch.advantages[batch.mask].tolist() == pytest.approx(cut + stopped, abs=1e-6)
    right = [a + v for a, v in zip(cut + stopped, values, strict=True)]
    assert batch.returns[batch.mask].tolist() == pytest.approx(right, abs=1e-6)


def test_advantages_are_normalised_over_the_whole_rollout_and_returns_are_not():
    batch = tiny.rollout(LENGTHS)
    batch.update(rewards=torch.randn(batch.tokens.numel()) + 3)
    raw = estimate_advantages(copy.copy(batch), PPOConfig(normalize_advantages=False))
    done = estimate_advantages(copy.copy(batch), PPOConfig(normalize_advantages=True))
    chosen = raw.advantages[batch.mask]
    right = (chosen - chosen.mean()) / chosen.std(unbiased=False)
    assert torch.allclose(done.advantages[batch.mask], right, atol=1e-4)
    assert torch.equal(done.returns, raw.returns)


def test_the_sampled_kl_is_positive_where_the_policy_likes_its_tokens_more_than_the_reference():
    batch = scored_by_hand(2, 1)
    batch.update(
        raw_reward=torch.zeros(2),
        entropy=torch.zeros(7),
        old_logprobs=torch.tensor([9.0, 9.0, -1.0, -2.0, 9.0, 9.0, -1.0]),
        ref_logprobs=torch.tensor([0.0, 0.0, -1.5, -2.25, 0.0, 0.0, -0.5]),
    )
    metrics = rollout_metrics(batch)
    assert metrics["critic/kl/mean"] == (0.75 - 0.5) / 2
    assert metrics["critic/kl/max"] == 0.75


def recorded(parameters):
    """A list that a later step fills with the parameters' gradients as they are before clipping."""
    seen = [None] * len(parameters)

    def hook(i, parameter):
        seen[i] = parameter.grad.clone()

    for i, parameter in enumerate(parameters):
        parameter.register_post_accumulate_grad_hook(functools.partial(hook, i))
    return seen


def assert_gradients_equal(got, right) -> None:
    """To float32's rounding of the sums they are: an element that cancels is as uncertain as the largest one."""
    for a, b in zip(got, right, strict=True):
        error, size = float((a - b).abs().max()), float(b.abs().max())
        assert error <= 1e-5 * size, f"{error:.2g} of {size:.2g}"


def rows_of(batch):
    return [
        (batch.tokens[start:stop], slice(start + prompt, stop), prompt)
        for start, stop in batch.cu_seqlens.unfold(0, 2, 1).tolist()
        for prompt in [int((~batch.mask[start:stop]).sum())]
    ]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_gradients_of_a_shared_critics_step_are_those_of_plain_forwards(size):
    policy = tiny.policy(train_micro_batch_size=size)
    head = randomise(ScalarHead(policy.model.config.hidden_size))
    batch = tiny.rollout(LENGTHS)
    batch = count(batch.update(old_logprobs=policy.score(batch, {"old_logprobs"})["old_logprobs"] - 0.05))
    parameters = [*policy.model.parameters(), *head.parameters()]
    total = torch.zeros(())
    for ids, trained, prompt in rows_of(batch):
        output = policy.model(ids[None], output_hidden_states=True)
        logprobs = output.logits[0, prompt - 1 : -1].log_softmax(-1).gather(1, ids[prompt:, None])[:, 0]
        ratio, advantage = (logprobs - batch.old_logprobs[trained]).exp(), batch.advantages[trained]
        total = total - torch.minimum(advantage * ratio, advantage * ratio.clamp(0.8, 1.2)).sum()
        values = head(output.hidden_states[-1][0, prompt - 1 : -1])
        total = total + 0.3 * 0.5 * 0.5 * (values - batch.returns[trained]).square().sum()
    right, got = torch.autograd.grad(total / 15, parameters), recorded(parameters)

    loss = PolicyLoss(LossConfig(), temperature=policy.cfg.generation.temperature, norm_length=4)
    joint = JointLoss(loss, ValueLoss(ValueLossConfig(scale=0.5)), head, coef=0.3, detach_trunk=False)
    policy.train_step(batch, joint)
    assert_gradients_equal(got, right)
    assert all(gradient.abs().max() > 1e-4 for gradient in right)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_gradients_of_a_local_critics_step_are_those_of_plain_forwards(size):
    cfg = tiny.config(value__train_micro_batch_size=size).value
    device = torch.device("cpu")
    critic = LocalValue(tiny.tiny_model(), cfg, device=device, dtype=torch.float32, score_batch=4)
    randomise(critic.head)
    batch = count(tiny.rollout(LENGTHS))
    parameters = [*(p for p in critic.model.parameters() if p.requires_grad), *critic.head.parameters()]
    total = torch.zeros(())
    for ids, response, prompt in rows_of(batch):
        values = critic.head(critic.model.get_decoder()(input_ids=ids[None]).last_hidden_state[0, prompt - 1 : -1])
        total = total + 0.5 * 0.5 * (values - batch.returns[response]).square().sum()
    right, got = torch.autograd.grad(total / 15, parameters), recorded(parameters)

    critic.train_step(batch, ValueLoss(ValueLossConfig(scale=0.5)))
    assert_gradients_equal(got, right)
    assert all(gradient.abs().max() > 1e-4 for gradient in right)


@pytest.mark.parametrize("num_layers_unfrozen", [-1, 1])
def test_first_ratio_of_a_rollout_is_exactly_one_at_another_temperature(tmp_path, num_layers_unfrozen):
    ppo = trainer(
        tmp_path,
        policy__generation__temperature=0.6,
        policy__num_layers_unfrozen=num_layers_unfrozen,
        policy__logprob_batch_size=8,
    )
    disturb(ppo.policy.model)
    ppo.refit()
    batch = count(ppo.generate_ppo_data(ppo.generate_rollouts(1)))
    step = ppo.policy.train_step(batch, ppo.policy_loss)
    assert step.sums["ratio_error"].tolist() == [0.0, 64.0]
    assert step.sums["ratio_error_max"].item() == 0.0


def test_the_models_softcap_reaches_the_trainers_loss(tmp_path):
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=16, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, pad_token_id=0, final_logit_softcapping=0.05,
    )  # fmt: skip
    Gemma2ForCausalLM(config).save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(tiny.tiny_model()).save_pretrained(tmp_path / "model")
    ppo = trainer(tmp_path / "run", policy__model_name=tmp_path / "model", policy__logprob_batch_size=8)
    ppo.refit()
    batch = count(ppo.generate_ppo_data(ppo.generate_rollouts(1)))
    assert torch.allclose(batch.rollout_logprobs, batch.old_logprobs, rtol=0, atol=1e-5)
    step = ppo.policy.train_step(batch, ppo.policy_loss)
    assert step.sums["ratio_error_max"].item() == 0.0


@pytest.fixture(scope="module")
def tied_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tied")
    config = LlamaConfig.from_pretrained(tiny.tiny_model())
    config.tie_word_embeddings = True
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny.tiny_model()).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("num_layers_unfrozen", [-1, 1])
def test_the_reference_of_a_model_with_tied_embeddings_never_moves(tied_model, num_layers_unfrozen):
    """A trained tied head would move the embeddings under the reference's trunk."""
    cfg = tiny.config(policy__num_layers_unfrozen=num_layers_unfrozen).policy
    policy = HFPolicy(tied_model, cfg, device=torch.device("cpu"), dtype=torch.float32)
    assert policy.model.get_output_embeddings().weight is policy.model.get_input_embeddings().weight
    first = policy.score(tiny.rollout(), {"old_logprobs", "ref_logprobs"})
    assert torch.equal(first["old_logprobs"], first["ref_logprobs"])
    batch = count(tiny.rollout().update(**first))
    for _ in range(3):
        policy.train_step(batch, PolicyLoss(LossConfig(), temperature=1.0, norm_length=4))
        now = policy.score(tiny.rollout(), {"old_logprobs", "ref_logprobs"})
        assert torch.equal(now["ref_logprobs"], first["ref_logprobs"])
    assert (now["old_logprobs"] - first["old_logprobs"]).abs().max() > 1e-3


@pytest.mark.parametrize("shared", [True, False], ids=["shared-storage", "own-storage"])
def test_after_a_refit_the_engine_scores_as_the_trainer_does(shared):
    policy = tiny.policy()
    policy.cfg.generation.temperature = TEMPERATURE
    own = share_parameters(policy.model, torch.float32) if shared else copy.deepcopy(policy.model)
    engine = NativeEngine(own, policy.tokenizer)
    prompts, sampling = [[4, 5, 6, 7], [8, 9]], Sampling(6, temperature=TEMPERATURE, greedy=True, ignore_eos=True)
    before = engine.generate(prompts, sampling, [0, 1])
    batch = tiny.rollout()
    batch = count(batch.update(**policy.score(batch, {"old_logprobs"})))
    for _ in range(5):
        policy.train_step(batch, PolicyLoss(LossConfig(), temperature=TEMPERATURE, norm_length=4))
    refit(policy, engine, 1)
    after = engine.generate(prompts, sampling, [0, 1])
    said = pack(prompts, after)
    scored = policy.score(said, {"old_logprobs"})["old_logprobs"]
    assert torch.allclose(said.rollout_logprobs, scored, rtol=0, atol=1e-4)
    assert [c.weight_version for c in after] == [1, 1]
    moved = [a - b for x, y in zip(before, after, strict=True) for a, b in zip(x.logprobs, y.logprobs, strict=True)]
    assert max(map(abs, moved)) > 0.01


def test_the_policys_minibatches():
    """Four of 4 tokens each; k3 of the last step is a mean over its tokens: 0.02 / 2 = 0.01."""
    batch = pack([[5]] * 8, [Completion([8, 1], [-1.0] * 2, "stop", 0)] * 8)

    def drawn(k3_sums, **ppo):
        config = PPOTrainerConfig(policy=PolicyConfig(train_global_batch_size=2), ppo=PPOConfig(**ppo))
        done: list[StepMetrics] = []
        for _ in policy_minibatches(batch, config, done, step=3, epoch=0):
            done.append(StepMetrics({"k3": torch.tensor([k3_sums[len(done)], 2.0])}, {}))
        return len(done)

    assert drawn([1.0] * 4) == 4
    assert drawn([0.02, 0.02, 0.02, 0.02], target_kl=0.01) == 4
    assert drawn([0.0, 0.03, 0.0, 0.0], target_kl=0.01) == 2
    assert drawn([0.03, 0.0, 0.0, 0.0], target_kl=0.01) == 1
    assert drawn([0.0] * 4, policy_training_start_step=3) == 4
    assert drawn([0.0] * 4, policy_training_start_step=4) == 0


def test_k3_of_a_step_by_hand():
    rows = SelectedRows(torch.zeros(2), torch.tensor([0, 2]), 2, 1, {"old_logprobs": torch.tensor([-1.0, -2.0])})
    got = ratio_error(torch.tensor([-1.5, -1.0]), rows)
    k3 = [math.exp(-0.5) - 1 + 0.5, math.e - 2]
    assert got["k3"].tolist() == pytest.approx([sum(k3), 2.0], rel=1e-6)
    error = [1 - math.exp(-0.5), math.e - 1]
    assert got["ratio_error"].tolist() == pytest.approx([sum(error), 2.0], rel=1e-6)
    assert got["ratio_error_max"].item() == pytest.approx(error[1], rel=1e-6)
