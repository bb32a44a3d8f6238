"""Sampling options: the embedded engine against transformers' own processors, and what of them the policy scores."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessorList
from transformers.generation import logits_process as theirs

import fastppo
from tests import tiny
from trainers.arithmetic import ConfigError, check
from trainers.batching import count
from trainers.cli import load_config
from trainers.config import LossConfig
from trainers.config_algorithm import ImportanceSamplingConfig
from trainers.dialogues import Dialogue, write_turn
from trainers.engines import Sampling, sample, stop_ids
from trainers.engines.native import NativeEngine, share_parameters
from trainers.environments import Prompt
from trainers.losses import PolicyLoss, SelectedRows, scored
from trainers.ppo import PPOTrainer
from trainers.prompts import TokenizedPrompt
from trainers.rollout import generate, pack_rows
from trainers.sampling import of_validation

PROMPTS = [[2, 3], [4], [5, 6, 7, 8, 5], [9, 10], [4]]
SEEDS = [11, 12, 13, 14, 15]
STOPS = (1, 6, 7)  # </s> and two of stop_token_ids


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(tiny.tiny_model(), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def engine(model):
    tokenizer = AutoTokenizer.from_pretrained(tiny.tiny_model())
    return NativeEngine(share_parameters(model, torch.float32), tokenizer)


def processors(sampling: Sampling, prompt_length: int = 0, stops: tuple[int, ...] = ()) -> LogitsProcessorList:
    """What transformers' generate() applies for these options, in its order."""
    listed = [theirs.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)]
    if sampling.min_new_tokens:
        listed.append(theirs.MinNewTokensLengthLogitsProcessor(prompt_length, sampling.min_new_tokens, list(stops)))
    listed.append(theirs.TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k is not None:
        listed.append(theirs.TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        listed.append(theirs.TopPLogitsWarper(sampling.top_p))
    return LogitsProcessorList(listed)


@pytest.mark.parametrize("top_k", [None, 1, 7, 99])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3, 1e-6])
@pytest.mark.parametrize("temperature", [1.0, 0.4])
def test_scores_are_those_of_transformers(top_k, top_p, temperature):
    draw = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(16, 50, generator=draw)
    logits[:, 10:14] = 2.5  # ties, within top_k of some rows
    history = torch.randint(0, 50, (16, 6), generator=draw)
    sampling = Sampling(1, temperature=temperature, top_p=top_p, top_k=top_k, repetition_penalty=1.7)
    right = processors(sampling)(history, logits.clone()).softmax(-1)
    seen = torch.zeros(16, 50, dtype=torch.bool).scatter(1, history, True)
    got = sample.scores(logits, sampling, seen=seen).softmax(-1)
    ties = (got > 0) != (right > 0)  # where top_p cuts through equal logits, the sort decides which of them stay
    assert torch.equal((got > 0).sum(-1), (right > 0).sum(-1))
    assert not ties[:, [i for i in range(50) if not 10 <= i < 14]].any()
    assert torch.allclose(got.sort(-1).values, right.sort(-1).values, atol=1e-6)
    assert torch.allclose(got[~ties], right[~ties], atol=1e-6)


def test_top_k_comes_before_top_p():
    """8, 4, 2, 1, 0.5 of 15.5: top_p=0.8 alone would keep three; of the first three, 14, two are enough."""
    logits = torch.tensor([8.0, 4.0, 2.0, 1.0, 0.5]).log().expand(30_000, 5)
    uniform = (torch.arange(30_000, dtype=torch.float64) + 0.5) / 30_000
    chosen, logprobs, _ = sample.choose(logits, uniform, Sampling(1, top_k=3, top_p=0.8))
    assert torch.bincount(chosen, minlength=5).tolist() == [20_000, 10_000, 0, 0, 0]
    assert logprobs[0].exp().item() == pytest.approx(2 / 3) and logprobs[-1].exp().item() == pytest.approx(1 / 3)
    chosen, _, _ = sample.choose(logits, uniform, Sampling(1, top_p=0.8))
    assert torch.bincount(chosen, minlength=5).tolist() == pytest.approx([17_143, 8_571, 4_286, 0, 0], abs=1)


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.8},
        {"repetition_penalty": 0.5, "greedy": True, "temperature": 0.5},
        {"top_k": 4, "top_p": 0.9, "temperature": 1.5},
        {"min_new_tokens": 4, "stop_token_ids": STOPS[1:]},
        {"min_new_tokens": 3, "stop_token_ids": STOPS[1:], "repetition_penalty": 1.3, "top_k": 5, "top_p": 0.8},
    ],
    ids=lambda options: " ".join(options),
)
def test_logprobs_are_of_the_distribution_that_was_sampled(engine, model, options):
    """Token by token, without cache, padding or neighbours."""
    sampling = Sampling(**({"max_new_tokens": 8} | options))
    for prompt, completion in zip(PROMPTS, engine.generate(PROMPTS, sampling, SEEDS), strict=True):
        listed = processors(sampling, len(prompt), STOPS)
        for i, token in enumerate(completion.tokens):
            ids = torch.tensor([prompt + completion.tokens[:i]])
            with torch.no_grad():
                scores = listed(ids, model(ids).logits[:, -1].clone())[0].double().log_softmax(-1)
            assert completion.logprobs[i] == pytest.approx(float(scores[token]), abs=1e-5)
            if sampling.greedy:
                assert token == int(scores.argmax())


def test_greedy_is_transformers_generate(engine, model):
    options = {"repetition_penalty": 1.5, "min_new_tokens": 6, "max_new_tokens": 12}
    for prompt in PROMPTS:
        right = model.generate(torch.tensor([prompt]), do_sample=False, **options)[0, len(prompt) :].tolist()
        assert engine.generate([prompt], Sampling(greedy=True, **options), [0])[0].tokens == right


def test_rows_do_not_depend_on_their_neighbours(engine):
    """Padding is not a token that was seen, and rows that end make room for others."""
    sampling = Sampling(12, top_k=6, top_p=0.9, min_new_tokens=2, repetition_penalty=1.6, stop_token_ids=(6, 7))
    together = engine.generate(PROMPTS, sampling, SEEDS)
    assert len({len(completion.tokens) for completion in together}) > 1
    for prompt, seed, completion in zip(PROMPTS, SEEDS, together, strict=True):
        alone = engine.generate([prompt], sampling, [seed])[0]
        assert alone.tokens == completion.tokens
        assert alone.logprobs == pytest.approx(completion.logprobs, abs=1e-5)


def test_min_new_tokens_come_before_a_stop_token(engine):
    free = engine.generate([[4]] * 40, Sampling(400, stop_token_ids=STOPS[1:]), range(40))
    assert min(len(completion.tokens) for completion in free) <= 3
    sampling = Sampling(400, stop_token_ids=STOPS[1:], min_new_tokens=3)
    lengths = set()
    for completion in engine.generate([[4]] * 40, sampling, range(40)):
        assert completion.finish == "stop" and completion.tokens[-1] in STOPS
        assert not set(STOPS) & set(completion.tokens[:-1])
        lengths.add(len(completion.tokens))
    assert min(lengths) == 4


def test_a_stop_string_is_not_looked_for_before_min_new_tokens(engine):
    sampling = Sampling(400, ignore_eos=True, stop_strings=("w9",), min_new_tokens=6)
    early = 0
    for completion in engine.generate([[4]] * 40, sampling, range(40)):
        assert completion.finish == "stop" and len(completion.tokens) >= 6
        if 9 in completion.tokens[:5]:
            early += 1
            assert len(completion.tokens) == 6
        else:
            assert completion.tokens.index(9) == len(completion.tokens) - 1
    assert 0 < early < 40


# The policy's side.


def policy_and_rollout(num_layers_unfrozen: int = -1, min_new_tokens: int = 3):
    """A policy, and what the engine sampled from it with stop tokens held back."""
    policy = tiny.policy(num_layers_unfrozen)
    policy.cfg.generation = replace(
        policy.cfg.generation,
        min_new_tokens=min_new_tokens,
        max_new_tokens=7,
        ignore_eos=False,
        stop_token_ids=list(STOPS[1:]),
        temperature=0.8,
    )
    engine = NativeEngine(share_parameters(policy.model, torch.float32), policy.tokenizer)
    prompts = [TokenizedPrompt(i, Prompt(""), tuple(ids)) for i, ids in enumerate(PROMPTS)]
    batch = generate(engine, prompts, policy.cfg.generation, policy.tokenizer, samples_per_prompt=2, seed=0, step=1)
    assert stop_ids(policy.cfg.generation, policy.model, policy.tokenizer) == policy.stop_ids == STOPS
    return policy, batch


def test_the_first_tokens_are_scored_without_stop_tokens():
    policy, batch = policy_and_rollout()
    assert int(batch.response_lengths.max()) > 4
    out = policy.score(batch, {"old_logprobs", "ref_logprobs"})
    assert torch.allclose(out["old_logprobs"], batch.rollout_logprobs, atol=1e-5)
    assert torch.equal(out["ref_logprobs"], out["old_logprobs"])
    others = [i for i in range(policy.head.weight.shape[0]) if i not in STOPS]
    for row in range(len(batch)):
        start, stop = batch.cu_seqlens[row : row + 2].tolist()
        ids, prompt = batch.tokens[start:stop], int((~batch.mask[start:stop]).sum())
        with torch.no_grad():
            logits = policy.model(ids[None]).logits[0].double() / 0.8
        for i, t in enumerate(range(prompt, stop - start)):
            whole = logits[t - 1].log_softmax(-1)
            logprobs = torch.full_like(whole, -torch.inf)
            logprobs[others] = logits[t - 1, others].log_softmax(-1)
            logprobs = logprobs if i < 3 else whole
            entropy = torch.special.entr(logprobs.exp()).sum()
            assert out["old_logprobs"][start + t].item() == pytest.approx(float(logprobs[ids[t]]), abs=1e-5)
            assert out["entropy"][start + t].item() == pytest.approx(float(entropy), abs=1e-5)
    policy.cfg.generation = replace(policy.cfg.generation, min_new_tokens=0)
    free = policy.score(batch, {"old_logprobs"})["old_logprobs"]
    early = batch.mask & (batch.turn_positions < 3)
    assert (out["old_logprobs"] - free)[early].min() > 0.01 and torch.equal(out["old_logprobs"] != free, early)


def test_the_turns_of_a_dialogue_are_scored_as_they_are_sampled():
    """Two turns with an observation between them, and two without one, which count as one turn."""
    policy, batch = policy_and_rollout()
    engine = NativeEngine(share_parameters(policy.model, torch.float32), policy.tokenizer)
    dialogues = [Dialogue.of(TokenizedPrompt(i, Prompt(""), (4, 5))) for i in range(12)]
    sampling = Sampling.from_config(policy.cfg.generation)
    for turn in range(2):
        write_turn(engine, dialogues, sampling, range(100 * turn, 100 * turn + 12), policy.tokenizer, None)
        for dialogue in dialogues[: 6 * (1 - turn)]:
            dialogue.row.read([9, 10])
    batch = pack_rows([dialogue.row for dialogue in dialogues])
    stops = torch.isin(batch.tokens, torch.tensor(STOPS)) & batch.mask
    assert (stops & (batch.turn_positions < 3)).sum() == 0 and stops.sum() > 12
    scores = policy.score(batch, {"old_logprobs"})["old_logprobs"]
    assert torch.allclose(scores, batch.rollout_logprobs, atol=1e-5)


def policy_loss(policy, **loss_fn) -> PolicyLoss:
    cfg = policy.cfg.generation
    return PolicyLoss(
        LossConfig(**loss_fn),
        temperature=cfg.temperature,
        norm_length=7,
        min_new_tokens=cfg.min_new_tokens,
        stop_ids=policy.stop_ids,
    )


@pytest.mark.parametrize("num_layers_unfrozen", [-1, 1])
def test_first_update_of_a_rollout_has_ratio_exactly_one(num_layers_unfrozen):
    policy, batch = policy_and_rollout(num_layers_unfrozen)
    batch.update(**policy.score(batch, {"old_logprobs", "ref_logprobs"}), advantages=batch.mask.float())
    step = policy.train_step(count(batch), policy_loss(policy))
    total, tokens = step.sums["ratio_error"].tolist()
    assert tokens == batch.mask.sum() and total == 0.0
    moved = policy.score(batch, {"old_logprobs"})["old_logprobs"] - batch.old_logprobs
    assert moved[batch.mask].mean() > 1e-3  # advantages of 1: what was sampled became more likely


def head_inputs(dtype=torch.float64, vocab=30):
    draw = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(*shape, generator=draw, dtype=dtype) for shape in ((9, 8), (vocab, 8), (vocab,))
    )
    targets = torch.randint(2, 20, (9,), generator=draw)
    early = torch.tensor([1, 1, 0, 0, 1, 0, 1, 1, 0], dtype=torch.bool)
    return [x.requires_grad_() for x in (hidden, weight, bias)], targets, early


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_scored_is_the_head_without_the_columns_and_so_are_its_gradients(dtype, with_bias):
    (hidden, weight, bias), targets, early = head_inputs(dtype)
    bias = bias if with_bias else None
    options = {"bias": bias, "temperature": 0.7, "softcap": 5.0}
    got = [scored(hidden, weight, targets, early, stop_ids=(0, 25), **options)[i] for i in range(2)]
    logits = 5 * torch.tanh((hidden @ weight.T + (0 if bias is None else bias)) / 5) / 0.7
    gone = early[:, None] & torch.isin(torch.arange(30), torch.tensor([0, 25]))
    log_probs = logits.masked_fill(gone, -1e9).log_softmax(-1)
    right = log_probs.gather(-1, targets[:, None]).squeeze(-1), -(log_probs.exp() * log_probs).sum(-1)
    tolerance = {"rtol": 1e-9, "atol": 1e-9} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-5}
    inputs = [x for x in (hidden, weight, bias) if x is not None]
    factors = torch.linspace(-1, 1, 9, dtype=dtype)
    for ours, other in zip(got, right, strict=True):
        torch.testing.assert_close(ours, other.to(ours.dtype), **tolerance)
        gradients = torch.autograd.grad((ours * factors).sum(), inputs, retain_graph=True)
        expected = torch.autograd.grad((other * factors).sum(), inputs, retain_graph=True)
        for one, two in zip(gradients, expected, strict=True):
            torch.testing.assert_close(one, two, **tolerance)


@pytest.mark.parametrize(
    "loss_fn",
    [
        {"entropy_bonus": 0.1, "ratio_clip_max": 0.3, "ratio_clip_c": 3.0},
        {"use_kl_in_reward": False, "reference_policy_kl_type": "k3", "aggregation": "seq_mean_token_mean"},
        {"type": "gspo", "aggregation": "token_sum_norm"},
        {"importance_sampling": ImportanceSamplingConfig("tis", max=1.5), "positive_example_nll_weight": 0.2},
        {"force_on_policy_ratio": True, "aggregation": "seq_mean_token_sum"},
    ],
    ids=["ppo", "kl_in_loss", "gspo", "corrected", "on_policy"],
)
def test_both_ways_to_the_loss_read_the_same_options(loss_fn):
    """Where the stop tokens have no probability anyway, losses, metrics and gradients are those of the fused path."""
    (hidden, weight, bias), _, _ = head_inputs(torch.float32)
    with torch.no_grad():
        bias[25:] = -1e4
    batch = count(tiny.rollout(((2, 4), (3, 5))).update(raw_reward=torch.tensor([1.0, -1.0])))
    batch.update(old_logprobs=torch.where(batch.mask, -3.0 + batch.advantages / 4, 0.0))
    rows = SelectedRows.of(batch, batch.mask.nonzero().squeeze(-1), torch.device("cpu"))
    results = []
    for min_new_tokens in (0, 2):
        loss = PolicyLoss(
            LossConfig(**loss_fn), temperature=0.9, norm_length=4, min_new_tokens=min_new_tokens, stop_ids=(25, 26)
        )
        step = loss(hidden, weight, rows, bias)
        results.append([step.loss, step.metrics["actor"], *torch.autograd.grad(step.loss, [hidden, weight, bias])])
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)
    assert results[0][2].abs().max() > 1e-3


def test_micro_batches_without_an_early_token_cost_one_product(monkeypatch):
    (hidden, weight, _), targets, early = head_inputs(torch.float32)
    calls = []
    plain = fastppo.linear_logprob
    monkeypatch.setattr(fastppo, "linear_logprob", lambda *args, **kw: calls.append(len(args[0])) or plain(*args, **kw))
    scored(hidden, weight, targets, early, stop_ids=(0,))
    scored(hidden, weight, targets, torch.zeros_like(early), stop_ids=(0,))
    assert calls == [5, 4, 9]


def test_training_with_min_new_tokens_agrees_with_its_engine(tmp_path):
    config = tiny.config(
        logger__run_dir=tmp_path,
        ppo__max_num_steps=2,
        policy__generation__ignore_eos=False,
        policy__generation__min_new_tokens=2,
        policy__generation__max_new_tokens=5,
        policy__generation__stop_token_ids=[6, 7, 8],
        loss_fn__entropy_bonus=0.01,
    )
    trainer = PPOTrainer(config)
    seen = []
    log = trainer.log
    trainer.log = lambda batch, *rest: seen.append(batch) or log(batch, *rest)
    trainer.fit()
    lengths = torch.cat([batch.response_lengths for batch in seen])
    assert sorted(set(lengths.tolist())) == [3, 4, 5]
    for batch in seen:
        assert torch.allclose(batch.old_logprobs, batch.rollout_logprobs, atol=1e-5)


# Settings.


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        check(load_config(None, overrides))
    return str(caught.value)


@pytest.mark.parametrize(
    ("option", "neutral"),
    [("top_p=0.9", "1.0"), ("top_k=5", "null"), ("greedy=true", "false"), ("repetition_penalty=1.1", "1.0")],
)
def test_training_refuses_what_it_does_not_score(option, neutral):
    assert refused(f"policy.generation.{option}") == (
        f"policy.generation.{option} is not scored: the trainer's log-probs are of the whole distribution; leave it at "
        f"{neutral}, and for validation alone set policy.generation.val.{option.partition('=')[0]}"
    )
    check(load_config(None, [f"policy.generation.val.{option}"]))


def test_the_shortest_response_fits_into_the_longest():
    assert refused("policy.generation.min_new_tokens=17") == (
        "policy.generation.min_new_tokens=17 is more than policy.generation.max_new_tokens=16"
    )
    assert refused("policy.generation.min_new_tokens=9", "policy.generation.val.max_new_tokens=8") == (
        "policy.generation.min_new_tokens=9 is more than policy.generation.val.max_new_tokens=8"
    )
    check(load_config(None, ["policy.generation.val.min_new_tokens=20", "policy.generation.val.max_new_tokens=20"]))


def test_min_new_tokens_needs_something_that_it_delays():
    settings = ["policy.generation.ignore_eos=true", "policy.generation.min_new_tokens=2"]
    assert "min_new_tokens=2 has no effect with policy.generation.ignore_eos=true" in refused(*settings)
    assert refused("policy.generation.ignore_eos=true", "policy.generation.val.min_new_tokens=2").startswith(
        "policy.generation.val.min_new_tokens=2 has no effect"
    )
    for stop in ("stop_token_ids=[5]", "stop_strings=[x]"):
        check(load_config(None, [*settings, f"policy.generation.{stop}"]))


def test_so_does_a_model_without_an_end_token(monkeypatch):
    monkeypatch.setattr("trainers.policy.hf.stop_ids", lambda *_: ())
    generation = replace(tiny.config().policy.generation, min_new_tokens=2, ignore_eos=False)
    with pytest.raises(ValueError, match="min_new_tokens=2 has no effect: the model has no end-of-sequence token"):
        tiny.policy(generation=generation)
    tiny.policy(generation=replace(generation, stop_strings=["x"]))


@pytest.mark.parametrize("option", ["temperature=0.5", "top_p=0.5", "top_k=3"])
def test_greedy_validation_leaves_nothing_to_the_other_options(option):
    message = refused("policy.generation.val.greedy=true", f"policy.generation.val.{option}")
    assert message == (
        f"policy.generation.val.{option} has no effect with policy.generation.val.greedy=true: leave it at null"
    )


def test_validation_samples_as_training_but_for_its_own():
    generation = load_config(
        None,
        ["policy.generation.val.top_p=0.5", "policy.generation.val.greedy=false", "policy.generation.temperature=2"],
    ).policy.generation
    assert Sampling.from_config(of_validation(generation)) == Sampling(16, temperature=2.0, top_p=0.5)
    assert Sampling.from_config(generation) == Sampling(16, temperature=2.0)
