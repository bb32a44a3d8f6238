"""The policy on transformers: scoring, the trunk and its reference, optimizer steps, saving."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests import tiny
from trainers.batching import count, idle, micro_batches, minibatches
from trainers.losses import PolicyLoss
from trainers.optim import add_metrics
from trainers.policy.hf import HFPolicy


def loss(**overrides):
    cfg = tiny.config(**{f"loss_fn__{k}": v for k, v in overrides.items()}).loss_fn
    return PolicyLoss(cfg, temperature=1.0, norm_length=4)


def prepared(policy, **fields):
    batch = tiny.rollout()
    batch.update(**policy.score(batch, {"old_logprobs", "ref_logprobs"}))
    return count(batch.update(**fields))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_score_is_the_models_log_softmax_at_the_sampling_temperature(temperature):
    policy = tiny.policy()
    policy.cfg.generation.temperature = temperature
    batch = tiny.rollout()
    scored = policy.score(batch, {"old_logprobs", "ref_logprobs"})
    for row in range(len(batch)):
        start, stop = batch.cu_seqlens[row : row + 2].tolist()
        ids = batch.tokens[start:stop]
        with torch.no_grad():
            logprobs = (policy.model(ids[None]).logits[0].double() / temperature).log_softmax(-1)
        for t in range(1, stop - start):
            trained = bool(batch.mask[start + t])
            right = float(logprobs[t - 1, ids[t]]) if trained else 0.0
            entropy = float(-(logprobs[t - 1].exp() * logprobs[t - 1]).sum()) if trained else 0.0
            assert scored["old_logprobs"][start + t].item() == pytest.approx(right, abs=1e-5)
            assert scored["ref_logprobs"][start + t].item() == pytest.approx(right, abs=1e-5)
            assert scored["entropy"][start + t].item() == pytest.approx(entropy, abs=1e-5)


def test_scores_do_not_depend_on_the_scoring_batch():
    policy = tiny.policy()
    batch = tiny.rollout()
    whole = policy.score(batch, {"old_logprobs"})["old_logprobs"]
    policy.cfg.logprob_batch_size = 1
    assert torch.allclose(policy.score(batch, {"old_logprobs"})["old_logprobs"], whole, atol=1e-6)


def test_a_cut_model_gives_the_whole_models_numbers_and_keeps_the_trunks_output():
    whole, cut = tiny.policy(), tiny.policy(num_layers_unfrozen=1)
    batch = tiny.rollout()
    right = whole.score(batch, {"old_logprobs", "ref_logprobs"})
    scored = cut.score(batch, {"old_logprobs", "ref_logprobs"})
    for name in ("old_logprobs", "ref_logprobs", "entropy"):
        assert torch.allclose(scored[name], right[name], atol=1e-5)
    assert scored["trunk_hidden"].shape == (batch.tokens.numel(), 64)
    assert sum(p.requires_grad for p in cut.model.parameters()) < sum(p.requires_grad for p in whole.model.parameters())
    again = cut.score(batch.update(trunk_hidden=scored["trunk_hidden"]), {"old_logprobs"})["old_logprobs"]
    assert torch.equal(again, scored["old_logprobs"])


@pytest.mark.parametrize("num_layers_unfrozen", [-1, 1, 2])
def test_first_update_of_a_rollout_has_ratio_exactly_one(num_layers_unfrozen):
    """NeMo-Aligner #68, #227: float32, the same micro-batches for scoring and training."""
    policy = tiny.policy(num_layers_unfrozen=num_layers_unfrozen)
    step = policy.train_step(prepared(policy), loss())
    total, tokens = step.sums["ratio_error"].tolist()
    assert tokens == 13 and total == 0.0 and step.sums["ratio_error_max"].item() == 0.0


@pytest.mark.parametrize("num_layers_unfrozen", [-1, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_reference_never_moves_and_starts_equal_to_the_policy(num_layers_unfrozen, dtype):
    """trlX #517, tied or not: frozen parameters are shared, trained ones copied."""
    policy = tiny.policy(num_layers_unfrozen, dtype)
    batch = prepared(policy)
    assert torch.equal(batch.ref_logprobs, batch.old_logprobs)
    for _ in range(3):
        policy.train_step(batch, loss())
    after = policy.score(tiny.rollout(), {"old_logprobs", "ref_logprobs"})
    assert torch.equal(after["ref_logprobs"], batch.ref_logprobs)
    assert (after["old_logprobs"] - batch.old_logprobs).abs().max() > 1e-3


def test_minibatches_cover_the_rollout_once_and_carry_their_own_counts():
    batch = tiny.rollout()
    parts = list(minibatches(batch, 2, seed=0, step=3, epoch=1))
    assert sorted(i for part in parts for i in part.sample_id.tolist()) == [0, 1, 2, 3]
    assert [part.num_tokens for part in parts] == [int(part.mask.sum()) for part in parts]
    assert [part.num_seqs for part in parts] == [2, 2]
    again = [part.sample_id.tolist() for part in minibatches(batch, 2, seed=0, step=3, epoch=1)]
    assert again == [part.sample_id.tolist() for part in parts]
    orders = {
        tuple(p.sample_id.tolist()) for epoch in range(8) for p in minibatches(batch, 4, seed=0, step=3, epoch=epoch)
    }
    assert len(orders) > 3
    assert [p.num_tokens for p in micro_batches(count(batch), 3)] == [13, 13]


def test_saved_folder_gives_the_trained_logits(tmp_path):
    """verl #770, trlX #385."""
    policy = tiny.policy(num_layers_unfrozen=1)
    for _ in range(3):
        policy.train_step(prepared(policy), loss())
    policy.save(tmp_path / "policy")
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "policy").eval()
    untrained = AutoModelForCausalLM.from_pretrained(tiny.tiny_model()).eval()
    ids = torch.tensor([[2, 3, 4, 5, 6]])
    with torch.no_grad():
        assert torch.equal(reloaded(ids).logits, policy.model(ids).logits)
        assert (reloaded(ids).logits - untrained(ids).logits).abs().max() > 1e-2


def test_the_default_kind_of_export_keeps_every_trained_bit(tmp_path):
    """bfloat16 compute over a frozen trunk: the folder must not make readers round the trained float32 parameters."""
    policy = tiny.policy(num_layers_unfrozen=1, dtype=torch.bfloat16)
    policy.train_step(prepared(policy), loss())
    policy.save(tmp_path / "policy")
    reloaded = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "policy").named_parameters())
    for name, parameter in policy.model.named_parameters():
        assert reloaded[name].dtype == torch.float32
        assert torch.equal(reloaded[name], parameter.float()), name


def test_state_of_another_model_is_refused_by_name():
    """NeMo-RL #415."""
    policy, other = tiny.policy(num_layers_unfrozen=1), tiny.policy(num_layers_unfrozen=1)
    with torch.no_grad():
        other.model.get_input_embeddings().weight.add_(1)
    with pytest.raises(ValueError, match="another frozen trunk than that of .*tiny-llama"):
        policy.load_state_dict(other.state_dict())
    with pytest.raises(ValueError, match="not one of .*tiny-llama.*they differ in 'lm_head.weight'"):
        policy.load_state_dict(tiny.policy().state_dict())


def test_a_mixture_of_experts_resumes(tmp_path):
    """Its experts are fused in memory and single in the exported folder."""
    from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=16, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny.tiny_model()).save_pretrained(tmp_path)
    make = lambda: HFPolicy(tmp_path, tiny.config().policy, device=torch.device("cpu"), dtype=torch.float32)  # noqa: E731
    policy, resumed = make(), make()
    policy.train_step(prepared(policy), loss())
    resumed.load_state_dict(policy.state_dict())
    for (name, mine), theirs in zip(policy.model.named_parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(mine, theirs), name


def test_a_checkpoint_in_another_dtype_is_refused_with_the_way_out():
    state = tiny.policy(dtype=torch.bfloat16).state_dict()
    with pytest.raises(ValueError, match="set policy.dtype=bfloat16"):
        tiny.policy().load_state_dict(state)


def test_a_step_without_a_finite_gradient_is_left_out_whole():
    policy = tiny.policy()
    batch = prepared(policy, advantages=torch.full((22,), math.nan))
    before = {name: p.clone() for name, p in policy.model.named_parameters()}
    step = policy.train_step(batch, loss())
    assert step.optimizers["actor"]["skipped"] == 1.0
    assert all(torch.equal(before[name], p) for name, p in policy.model.named_parameters())
    assert not policy.optimizers["actor"].adamw.state
    policy.train_step(prepared(policy), loss())
    assert any(not torch.equal(before[name], p) for name, p in policy.model.named_parameters())


def test_architectures_that_cannot_be_cut_are_refused():
    from transformers import GPT2Config, GPT2LMHeadModel

    from trainers.backbone import SplitTransformer

    model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_embd=8, n_layer=2, n_head=2, n_positions=8))
    with pytest.raises(ValueError, match="num_layers_unfrozen: GPT2Model has no `layers` to cut; use -1"):
        SplitTransformer(model, 1, torch.float32)
    SplitTransformer(model, -1, torch.float32)


def test_a_decoder_that_changes_its_input_embeddings_is_refused():
    from trainers.backbone import SplitTransformer

    model = AutoModelForCausalLM.from_pretrained(tiny.tiny_model())

    def scale(module, args, kwargs):
        if "inputs_embeds" in kwargs:
            return args, kwargs | {"inputs_embeds": 8 * kwargs["inputs_embeds"]}
        return None

    model.model.register_forward_pre_hook(scale, with_kwargs=True)
    with pytest.raises(ValueError, match="LlamaForCausalLM cannot be cut into trunk and top .outputs differ by"):
        SplitTransformer(model, 1, torch.float32)


@pytest.mark.parametrize("family", ["Qwen2", "Qwen3", "Gemma2", "Gemma3Text", "Mistral"])
def test_other_families_cut_cleanly(family):
    import transformers

    from trainers.backbone import SplitTransformer

    config = getattr(transformers, f"{family}Config")(
        vocab_size=16, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, pad_token_id=0, sliding_window=4,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    ids = torch.arange(10)[None]
    with torch.no_grad():
        right = model.get_decoder()(input_ids=ids).last_hidden_state
        split = SplitTransformer(model, 1, torch.float32)
        assert torch.allclose(split.hidden(ids, split.trunk_hidden(ids)), right, atol=1e-5)


def test_a_model_that_scales_its_logits_in_its_own_way_is_refused(tmp_path):
    from transformers import AutoTokenizer, CohereConfig, CohereForCausalLM

    config = CohereConfig(
        vocab_size=16, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, logit_scale=0.0625,
    )  # fmt: skip
    CohereForCausalLM(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny.tiny_model()).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="CohereForCausalLM forms its logits otherwise"):
        HFPolicy(tmp_path, tiny.config().policy, device=torch.device("cpu"), dtype=torch.float32)


def test_softcapped_logits_are_scored_as_the_model_makes_them(tmp_path):
    from transformers import AutoTokenizer, Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=16, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, pad_token_id=0, final_logit_softcapping=0.05,
    )  # fmt: skip
    Gemma2ForCausalLM(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny.tiny_model()).save_pretrained(tmp_path)
    policy = HFPolicy(tmp_path, tiny.config().policy, device=torch.device("cpu"), dtype=torch.float32)
    batch = tiny.rollout(((2, 3),))
    scored = policy.score(batch, {"old_logprobs"})["old_logprobs"]
    with torch.no_grad():
        logits = policy.model(batch.tokens[None]).logits[0]
    right = logits.log_softmax(-1)[torch.arange(1, 4), batch.tokens[2:]]
    assert logits.abs().max() < 0.05 and torch.allclose(scored[2:], right, atol=1e-6)


@pytest.mark.parametrize("packing", [False, True])
def test_an_idle_pass_adds_nothing(packing):
    """What a rank computes that has fewer micro-batches than the others: gradients are zeros, and metrics stay."""
    policy = tiny.policy(packing=packing)
    batch = prepared(policy)
    right = policy.gradients(batch, loss())
    expected = [p.grad.clone() for p in policy.model.parameters()]
    for parameter in policy.model.parameters():
        parameter.grad = None
    sums = policy.gradients(idle(batch), loss())
    assert all(p.grad is not None and not p.grad.any() for p in policy.model.parameters())
    add_metrics(sums, policy.gradients(batch, loss()))
    assert all(torch.equal(p.grad, e) for p, e in zip(policy.model.parameters(), expected, strict=True))
    assert set(sums) == set(right) and all(torch.equal(sums[name], right[name]) for name in right)
