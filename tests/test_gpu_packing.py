"""Packed training on a CUDA device: torch's variable-length attention in half precision, and no [T, T] anywhere."""

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from fastppo.testing import assert_no_worse
from tests import tiny
from trainers import packed_attention
from trainers.batching import count
from trainers.losses import PolicyLoss
from trainers.policy.hf import HFPolicy
from trainers.rollout import RolloutBatch

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
LENGTHS = ((3, 1), (20, 300), (1, 90), (64, 64), (5, 11), (100, 17), (2, 500), (1, 1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Grouped heads of 64 and weights large enough for attention to be peaked."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, initializer_range=0.1, max_position_embeddings=4096,
    )  # fmt: skip
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(config).save_pretrained(path)
    AutoTokenizer.from_pretrained(tiny.tiny_model()).save_pretrained(path)
    return path


def make(folder, dtype: torch.dtype, packing: bool, **overrides: object) -> HFPolicy:
    cfg = tiny.config(**{"policy__packing": packing, "policy__num_layers_unfrozen": 2} | overrides).policy
    return HFPolicy(folder, cfg, device=CUDA, dtype=dtype)


def outcome(policy: HFPolicy, batch: RolloutBatch) -> dict[str, torch.Tensor]:
    """Log-probs of policy and reference, and the raw gradients of one optimizer step."""
    scored = policy.score(batch, {"old_logprobs", "ref_logprobs"})
    old = torch.where(batch.mask, -4.0, 0.0)  # the same whatever was scored, so that gradients compare
    step = count(batch.select(range(len(batch))).update(old_logprobs=old, trunk_hidden=scored["trunk_hidden"]))
    policy.gradients(step, PolicyLoss(tiny.config(loss_fn__type="reinforce").loss_fn, temperature=1.0, norm_length=4))
    gradients = {name: policy.masters.of(p).grad for name, p in policy.model.named_parameters() if p.requires_grad}
    return {name: scored[name] for name in ("old_logprobs", "ref_logprobs", "entropy", "trunk_hidden")} | gradients


@pytest.fixture
def calls(monkeypatch):
    """How many sequences each call of torch's variable-length attention was given."""
    attend, seen = packed_attention.torch_varlen(), []
    if attend is None:
        pytest.skip("torch has no variable-length attention before 2.10")

    def counted(*args, **options):
        seen.append(args[3].numel() - 1)
        return attend(*args, **options)

    counted.__signature__ = packed_attention.inspect.signature(attend)
    monkeypatch.setattr(packed_attention, "torch_varlen", lambda: counted)
    return seen


def test_bfloat16_is_no_worse_than_padded(folder, calls):
    batch = tiny.rollout(LENGTHS)
    truth = outcome(make(folder, torch.float32, packing=False), batch)
    padded = outcome(make(folder, torch.bfloat16, packing=False), batch)
    assert not calls
    packed = outcome(make(folder, torch.bfloat16, packing=True), batch)
    assert calls == [len(LENGTHS)] * (1 + 2 + 2 + 2)  # the trunk's layer; two each of policy, reference and training
    assert packed.keys() == padded.keys() == truth.keys()
    for name in truth:
        assert_no_worse(name, packed[name], padded[name], truth[name])


def test_float32_equals_padded(folder, calls):
    batch = tiny.rollout(LENGTHS)
    right, got = (outcome(make(folder, torch.float32, packing=packing), batch) for packing in (False, True))
    assert not calls  # the flash kernel takes half precision alone
    for name, value in right.items():
        torch.testing.assert_close(
            got[name], value, rtol=1e-4, atol=1e-5 * float(value.abs().max()), msg=f"{name}: ".__add__
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
def test_memory_grows_with_the_tokens_not_with_their_square(dtype):
    """16 x 2048 tokens in one micro-batch: a mask of them would take 1 GiB, the activations of this model 0.4."""
    cfg = tiny.config(policy__packing=True, policy__train_micro_batch_size=16).policy
    policy = HFPolicy(tiny.tiny_model(), cfg, device=CUDA, dtype=dtype)  # rotary positions: 256 of them or 2048
    loss = PolicyLoss(tiny.config().loss_fn, temperature=1.0, norm_length=4)
    peaks = {}
    for rows in (8, 16):
        batch = count(tiny.rollout(((48, 2000),) * rows))
        batch.update(old_logprobs=batch.rollout_logprobs)
        policy.gradients(batch, loss)  # cuBLAS' workspace and the like
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        policy.gradients(batch, loss)
        peaks[rows] = torch.cuda.max_memory_allocated() - before
    tokens = 16 * 2048
    assert peaks[16] < tokens**2 / 2
    assert peaks[16] < 2.2 * peaks[8]
