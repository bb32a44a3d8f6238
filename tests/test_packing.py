"""cu_seqlens helpers."""

import pytest
import torch

from fastppo.packing import check_cu_seqlens, cu_seqlens_from_lengths, segment_ids, sequence_lengths

# No sequence, one empty one, empty ones at both ends and inside, one-token ones.
LENGTHS = [[], [0], [3], [0, 2, 0, 0, 1, 4, 0], [1, 1, 1]]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_lengths_there_and_back(lengths: list[int], dtype: torch.dtype) -> None:
    cu_seqlens = cu_seqlens_from_lengths(lengths, dtype=dtype)
    assert cu_seqlens.dtype == dtype
    assert cu_seqlens.tolist() == [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    assert sequence_lengths(cu_seqlens).tolist() == lengths
    check_cu_seqlens(cu_seqlens, sum(lengths))


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_segment_ids_name_each_tokens_sequence(lengths: list[int]) -> None:
    expected = [b for b, length in enumerate(lengths) for _ in range(length)]
    assert segment_ids(cu_seqlens_from_lengths(lengths), sum(lengths)).tolist() == expected


def test_lengths_may_be_a_tensor() -> None:
    assert cu_seqlens_from_lengths(torch.tensor([2, 3], dtype=torch.int32)).tolist() == [0, 2, 5]


@pytest.mark.parametrize(
    ("lengths", "message"),
    [([[1, 2]], r"lengths must have shape \[B\], got \[1, 2\]"), ([2, -1], "lengths must be >= 0, got -1")],
    ids=["2-d", "negative"],
)
def test_wrong_lengths(lengths: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cu_seqlens_from_lengths(lengths)


@pytest.mark.parametrize(
    ("cu_seqlens", "error", "message"),
    [
        ([0, 4], TypeError, "cu_seqlens must be a torch.Tensor, got list"),
        (torch.tensor([0.0, 4.0]), TypeError, "cu_seqlens must be one of int32, int64, got float32"),
        (torch.tensor([0, 4], dtype=torch.int16), TypeError, "got int16"),
        (torch.tensor(4), ValueError, r"cu_seqlens must have shape \[B \+ 1\], got \[\]"),
        (torch.tensor([[0, 4]]), ValueError, r"got \[1, 2\]"),
        (torch.tensor([], dtype=torch.int64), ValueError, r"got \[0\]"),
        (torch.tensor([1, 4]), ValueError, "cu_seqlens must start with 0, got 1"),
        (torch.tensor([0, 3]), ValueError, "cu_seqlens must end at T=4, got 3"),
        (torch.tensor([0, 5]), ValueError, "cu_seqlens must end at T=4, got 5"),
        (torch.tensor([0, 3, 2, 4]), ValueError, "cu_seqlens must not decrease, got 3 then 2 at index 2"),
        (torch.tensor([0, 4], device="meta"), ValueError, "cu_seqlens must be on the tokens' device cpu, got meta"),
    ],
    ids=["list", "float", "int16", "0-d", "2-d", "empty", "start", "short", "long", "decreasing", "device"],
)
def test_wrong_cu_seqlens(cu_seqlens: torch.Tensor, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        check_cu_seqlens(cu_seqlens, 4, like=torch.zeros(4))


def test_the_argument_keeps_its_name() -> None:
    with pytest.raises(ValueError, match="offsets must end at T=4"):
        check_cu_seqlens(torch.tensor([0, 3]), 4, name="offsets")


@pytest.mark.gpu
def test_contents_on_a_gpu_are_read_only_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = torch.tensor([0, 3], device="cuda")
    monkeypatch.delenv("FASTPPO_CHECK", raising=False)
    with torch.cuda.device(0):
        torch.cuda.set_sync_debug_mode("error")
        try:
            check_cu_seqlens(wrong, 4)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    monkeypatch.setenv("FASTPPO_CHECK", "1")
    with pytest.raises(ValueError, match="must end at T=4, got 3"):
        check_cu_seqlens(wrong, 4)
