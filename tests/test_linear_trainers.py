"""The trainers go through the linear ops: scoring and training make no [T, V] tensor, whatever the loss."""

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import fastppo
from tests import tiny
from tests.linear import Memory, memory_of, small_chunks
from trainers.batching import count
from trainers.config import LossConfig
from trainers.losses import PolicyLoss
from trainers.policy.hf import HFPolicy

VOCAB = 6000
LENGTHS = ((3, 90),) * 6  # 540 selected tokens


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory):
    """The tiny model with a vocabulary that dwarfs everything else it makes."""
    folder = tmp_path_factory.mktemp("wide")
    config = AutoConfig.from_pretrained(tiny.tiny_model())
    config.vocab_size = VOCAB
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny.tiny_model()).save_pretrained(folder)
    return folder


def steps(folder, dtype: torch.dtype, *, min_new_tokens: int = 0, **loss: object) -> tuple[Memory, Memory]:
    """What scoring and one optimizer step hold."""
    cfg = tiny.config(policy__generation__min_new_tokens=min_new_tokens, policy__generation__ignore_eos=False).policy
    policy = HFPolicy(folder, cfg, device=torch.device("cpu"), dtype=dtype)
    policy.cfg.logprob_batch_size = policy.cfg.train_micro_batch_size = len(LENGTHS)
    batch = count(tiny.rollout(LENGTHS))
    scoring = memory_of(lambda: batch.update(**policy.score(batch, {"old_logprobs", "ref_logprobs"})))
    stops = {"min_new_tokens": min_new_tokens, "stop_ids": policy.stop_ids}
    policy_loss = PolicyLoss(LossConfig(**loss), temperature=1.0, norm_length=4, **stops)
    return scoring, memory_of(lambda: policy.train_step(count(batch), policy_loss))


@pytest.mark.parametrize(
    "loss", [{}, {"entropy_bonus": 0.1, "aggregation": "seq_mean_token_mean"}, {"type": "gspo"}, {"min_new_tokens": 3}]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_no_tensor_of_tokens_times_vocabulary(monkeypatch, wide_model, dtype, loss):
    small_chunks(monkeypatch, 90)
    logits = sum(response for _, response in LENGTHS) * VOCAB * dtype.itemsize
    for held in steps(wide_model, dtype, **loss):
        assert held.largest < 0.5 * logits


def test_the_watch_sees_whole_logits(monkeypatch, wide_model):
    """The same two passes over whole logits are caught by the measure above."""

    def whole(hidden, weight, targets, *, memory="auto", bias=None, weight_grad_into=None, **options):
        options.pop("reduce_dhidden", None)
        return fastppo.logprob(F.linear(hidden, weight, bias), targets, **options)

    def whole_loss(hidden, weight, targets, old, advantages, *, temperature, softcap, num_rows, bias=None, **options):
        assert options.pop("weight_grad_into") is None and options.pop("vocab") is None
        options.pop("reduce_dhidden")  # of a vocabulary in shards
        logprobs, entropy = whole(hidden, weight, targets, bias=bias, temperature=temperature, softcap=softcap)
        output = fastppo.ppo_loss(logprobs, old, advantages, entropy=entropy, **options)
        return fastppo.LinearLossOutput(*output, logprobs, entropy)

    monkeypatch.setattr(fastppo, "linear_logprob", whole)
    monkeypatch.setattr(fastppo, "linear_ppo_loss", whole_loss)
    logits = sum(response for _, response in LENGTHS) * VOCAB * 4
    for held in steps(wide_model, torch.float32):
        assert held.largest >= logits
