"""RolloutBatch: packing, selection, seeds."""

import torch

from trainers.engines import Completion
from trainers.rollout import hash64, pack

BATCH = lambda: pack(  # noqa: E731  three rows: prompt 2 + response 3, 1 + 1, 3 + 2
    [[5, 6], [7], [5, 6, 7]],
    [
        Completion([8, 9, 1], [-0.1, -0.2, -0.3], "stop", 4),
        Completion([1], [-0.5], "stop", 4),
        Completion([9, 9], [-0.6, -0.7], "length", 4),
    ],
)


def test_pack_places_every_token_and_masks_what_was_sampled():
    batch = BATCH()
    assert batch.tokens.tolist() == [5, 6, 8, 9, 1, 7, 1, 5, 6, 7, 9, 9]
    assert batch.cu_seqlens.tolist() == [0, 5, 7, 12]
    assert batch.mask.int().tolist() == [0, 0, 1, 1, 1, 0, 1, 0, 0, 0, 1, 1]
    assert torch.allclose(batch.rollout_logprobs, torch.tensor([0, 0, -0.1, -0.2, -0.3, 0, -0.5, 0, 0, 0, -0.6, -0.7]))
    assert batch.finish.tolist() == [0, 0, 1]
    assert batch.weight_version.tolist() == [4, 4, 4]


def test_a_response_that_is_only_its_stop_token_is_kept_and_trained():
    batch = BATCH().select([1])
    assert batch.tokens.tolist() == [7, 1]
    assert batch.mask.tolist() == [False, True]


def test_the_stop_token_is_trained_even_if_it_is_also_the_padding_id():
    batch = BATCH()
    assert batch.mask[4] and batch.tokens[4] == 1


def test_last_selected_is_the_last_response_token():
    assert BATCH().last_selected().tolist() == [4, 6, 11]


def test_positions_and_sequence_ids():
    batch = BATCH()
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 0, 1, 2, 3, 4]
    assert batch.sequence_ids.tolist() == [0] * 5 + [1] * 2 + [2] * 5


def test_turn_positions_start_anew_where_the_policy_speaks_again():
    assert BATCH().turn_positions.tolist() == [0, 0, 0, 1, 2, 0, 0, 0, 0, 0, 0, 1]
    batch = BATCH().update(mask=torch.tensor([0, 1, 1, 0, 1, 0, 1, 0, 1, 1, 0, 1], dtype=torch.bool))
    assert batch.turn_positions.tolist() == [0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 0, 0]
    assert batch.select([2, 0]).turn_positions.tolist() == [0, 0, 1, 0, 0, 0, 0, 1, 0, 0]


def test_select_reorders_repeats_and_carries_every_field():
    batch = BATCH().update(raw_reward=torch.tensor([1.0, 2.0, 3.0]), values=torch.arange(12.0))
    chosen = batch.select([2, 0, 2])
    assert chosen.tokens.tolist() == [5, 6, 7, 9, 9, 5, 6, 8, 9, 1, 5, 6, 7, 9, 9]
    assert chosen.cu_seqlens.tolist() == [0, 5, 10, 15]
    assert chosen.raw_reward.tolist() == [3.0, 1.0, 3.0]
    assert chosen.values.tolist() == [7, 8, 9, 10, 11, 0, 1, 2, 3, 4, 7, 8, 9, 10, 11]
    assert chosen.sample_id.tolist() == [2, 0, 2]
    assert chosen.old_logprobs is None


def test_select_nothing():
    assert len(BATCH().select([])) == 0


def test_seeds_are_the_same_everywhere_and_differ_in_every_part():
    assert hash64(0, 1, 2, 0) == 6509428560592179104
    seeds = {
        hash64(run, step, sample, turn) for run in (0, 1) for step in (0, 1) for sample in (0, 1) for turn in (0, 1)
    }
    assert len(seeds) == 16
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert hash64(0, -1) != hash64(0, 1)
