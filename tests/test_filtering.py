"""Dynamic sampling and filters: which prompts and responses are trained on."""

import pytest
import torch

from tests.test_estimators import rollout
from trainers.batching import minibatches
from trainers.config_algorithm import PPOConfig
from trainers.environments import Prompt, Sample
from trainers.filtering import DynamicSampling, leave_out, logprob_error
from trainers.run import TrainingError


def drawn(groups, first):
    """A draw of prompts with these raw rewards for each one's two responses; sample ids tell them apart."""
    batch = rollout([r for pair in groups for r in pair], groups=[i for i, _ in enumerate(groups) for _ in "ab"])
    batch.sample_id = torch.arange(first, first + len(batch))
    batch.samples = [Sample(Prompt("p", {"k": [1]}), (5,), (8, 8), str(int(i)), "stop") for i in batch.sample_id]
    return batch


def sampler(**options):
    settings = {"num_prompts_per_step": 2, "use_dynamic_sampling": True} | options
    return DynamicSampling(PPOConfig(**settings), "ppo")


def collect(sampling, *draws):
    asked = []

    def draw(i):
        asked.append(i)
        return drawn(draws[i], first=100 * i)

    batch = sampling.collect(draw)
    return batch, asked


SAME, MIXED = (1.0, 1.0), (0.0, 1.0)


def test_prompts_whose_responses_earn_the_same_are_replaced():
    batch, asked = collect(sampler(), [SAME, MIXED], [SAME, SAME], [(3.0, 2.0), MIXED])
    assert asked == [0, 1, 2]
    assert batch.sample_id.tolist() == [2, 3, 200, 201]  # in the order of arrival, the last prompt is surplus
    assert batch.group.tolist() == [0, 0, 1, 1]
    assert [sample.response for sample in batch.samples] == ["2", "3", "200", "201"]
    assert batch.raw_reward.tolist() == [0.0, 1.0, 3.0, 2.0]
    counts = {name.rpartition("/")[2]: value for name, value in batch.metrics.items()}
    assert counts == {"gen_batches": 3, "drawn_prompts": 6, "equal_prompts": 3, "surplus_prompts": 1,
                      "carried_prompts": 0, "score_mean": pytest.approx((6 + 1 + 6) / 12)}  # fmt: skip


def test_one_differing_response_keeps_its_whole_group():
    """Decided for the group, not for each sample against the others (NeMo-RL drops the one that differs)."""
    batch = rollout([1.0, 1.0, 0.0, 1.0], groups=[0, 0, 0, 0])
    batch.samples = [Sample(Prompt("p"), (5,), (8, 8), "", "stop")] * 4
    assert len(sampler(num_prompts_per_step=1).collect(lambda i: batch)) == 4


def test_without_the_option_a_step_is_one_draw():
    batch, asked = collect(sampler(use_dynamic_sampling=False), [SAME, SAME])
    assert asked == [0] and len(batch) == 4 and batch.metrics == {}


def test_exhausted_draws_stop_the_run_or_train_on_what_there_is():
    with pytest.raises(TrainingError, match="of 4 prompts drawn, 1 had .*num_prompts_per_step=2 are needed"):
        collect(sampler(dynamic_sampling_max_gen_batches=2), [SAME, MIXED], [SAME, SAME])
    partial = {"dynamic_sampling_max_gen_batches": 2, "dynamic_sampling_on_exhausted": "train_partial"}
    batch, _ = collect(sampler(**partial), [SAME, MIXED], [SAME, SAME])
    assert batch.sample_id.tolist() == [2, 3]
    nothing, _ = collect(sampler(**partial), [SAME, SAME], [SAME, SAME])
    assert not nothing.trained.any()
    assert list(minibatches(nothing, 2, seed=0, step=1, epoch=0)) == [] and nothing.empty_minibatches == 2


def test_surplus_is_carried_to_the_next_step_and_through_a_checkpoint(tmp_path):
    first = sampler(dynamic_sampling_carry=True)
    collect(
        first,
        [MIXED, MIXED],
    )
    collect(first, [MIXED, SAME], [MIXED, (2.0, 1.0)])
    torch.save(first.state_dict(), tmp_path / "state.pt")
    second = sampler(dynamic_sampling_carry=True)
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for sampling in (first, second):
        batch, asked = collect(sampling, [MIXED, SAME])
        assert asked == [0]
        assert batch.sample_id.tolist() == [102, 103, 0, 1]
        assert batch.raw_reward.tolist() == [2.0, 1.0, 0.0, 1.0]
        assert batch.samples[0] == Sample(Prompt("p", {"k": [1]}), (5,), (8, 8), "102", "stop")
        assert batch.metrics["dynamic_sampling/carried_prompts"] == 1
        assert batch.metrics["dynamic_sampling/equal_prompts"] == 1


def test_a_draw_may_be_larger_than_a_step():
    assert sampler(batch_multiplier=1.5, num_prompts_per_step=4).prompts_per_draw == 6


def test_cut_responses_leave_every_count():
    batch = rollout([1.0, 2.0, 3.0], lengths=[2, 3, 4])
    batch.finish = torch.tensor([0, 1, 0])
    assert leave_out(batch, PPOConfig()).valid is None
    kept = leave_out(batch, PPOConfig(overlong_filtering=True))
    assert kept.valid.tolist() == [True, False, True]
    assert kept.metrics["training/overlong_filtered"] == 1
    (one,) = minibatches(kept, 3, seed=0, step=1, epoch=0)
    assert (one.num_tokens, one.num_seqs, one.num_nll_tokens, len(one)) == (6, 2, 6, 2)


def test_responses_that_the_engine_sees_otherwise_are_left_out():
    batch = rollout([1.0, 1.0, 1.0])
    batch.rollout_logprobs = torch.tensor([0, 0.1, -0.3, 0, 0, 0, 0, float("nan"), 0])
    error = logprob_error(batch)
    assert error[0].item() == pytest.approx((torch.tensor([0.1, 0.3]).exp().mean()).item())
    assert error[1].item() == 1.0
    kept = leave_out(batch, PPOConfig(seq_logprob_error_threshold=1.2))
    assert kept.valid.tolist() == [False, True, False]
    assert kept.metrics["training/mismatch_filtered"] == 2
