"""Decoder layers computed again in backward: the same gradients, bit for bit, and fewer tensors kept for them."""

import copy
from dataclasses import replace

import pytest
import torch
from transformers import AutoTokenizer

import trainers.policy.hf
import trainers.value.hf
from tests import tiny
from tests.test_policy import loss, prepared
from trainers.backbone import checkpoint_layers
from trainers.config import PeftConfig
from trainers.engines.native import NativeEngine
from trainers.losses import ValueLoss
from trainers.policy.hf import HFPolicy
from trainers.refit import refit
from trainers.value.hf import LocalValue


def policy(checkpointing, num_layers_unfrozen=-1, lora=False, path=None):
    torch.manual_seed(0)
    cfg = copy.deepcopy(tiny.config().policy)
    cfg.gradient_checkpointing, cfg.num_layers_unfrozen, cfg.peft = checkpointing, num_layers_unfrozen, PeftConfig(lora)
    return HFPolicy(path or tiny.tiny_model(), cfg, device=torch.device("cpu"), dtype=torch.bfloat16)


def critic(checkpointing):
    cfg = replace(tiny.config().value, gradient_checkpointing=checkpointing)
    value = LocalValue(tiny.tiny_model(), cfg, device=torch.device("cpu"), dtype=torch.float32, score_batch=4)
    torch.nn.init.ones_(value.head.linear.weight)
    return value


def step(monkeypatch, model, train_step):
    """(gradients, number of tensors kept for backward, their bytes) of one optimizer step that is not made."""
    seen, kept = {}, []

    def record(optimizers):
        seen.update({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        return {}

    monkeypatch.setattr(trainers.policy.hf, "step_all", record)
    monkeypatch.setattr(trainers.value.hf, "step_all", record)
    backward, forward = torch.Tensor.backward, [True]

    def not_forward(self, *args, **kwargs):
        forward[0] = False
        backward(self, *args, **kwargs)
        forward[0] = True

    def keep(tensor):
        if forward[0]:  # what a layer that is computed again saves is gone before the next one's
            kept.append(tensor.nbytes)
        return tensor

    monkeypatch.setattr(torch.Tensor, "backward", not_forward)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        train_step()
    monkeypatch.undo()
    return seen, len(kept), sum(kept)


@pytest.mark.parametrize(("num_layers_unfrozen", "lora"), [(-1, False), (1, False), (-1, True)])
def test_same_gradients_from_fewer_kept_tensors(monkeypatch, num_layers_unfrozen, lora):
    results = []
    for checkpointing in (False, True):
        mine = policy(checkpointing, num_layers_unfrozen, lora)
        batch = prepared(mine)
        for layer in mine.model.model.layers:
            layer.self_attn.attention_dropout = 0.5  # must stay off
        results.append(step(monkeypatch, mine.model, lambda p=mine, b=batch: p.train_step(b, loss())))
    (right, tensors, size), (got, fewer_tensors, smaller_size) = results
    assert right.keys() == got.keys() and len(right) > 5
    assert all(torch.equal(got[name], right[name]) for name in right)
    assert max(gradient.abs().max() for gradient in right.values()) > 1e-3
    assert fewer_tensors < tensors / 2 and smaller_size < size / 2


def test_a_critic_of_its_own(monkeypatch):
    results = []
    for checkpointing in (False, True):
        value, batch = critic(checkpointing), tiny.rollout()
        batch = replace(batch, num_tokens=13, num_seqs=4)
        run = lambda v=value, b=batch: v.train_step(b, ValueLoss(tiny.config().value_loss_fn))  # noqa: E731
        results.append(step(monkeypatch, value.model, run))
    (right, tensors, _), (got, fewer, _) = results
    assert right.keys() == got.keys() and all(torch.equal(got[name], right[name]) for name in right)
    assert max(gradient.abs().max() for gradient in right.values()) > 1e-3 and fewer < tensors / 2


def test_copies_of_the_model_compute_with_their_own_layers():
    """The frozen reference and an engine in another dtype are deep copies."""
    mine = policy(True)
    engine = NativeEngine(mine.engine_model(torch.float32), mine.tokenizer)
    own = NativeEngine(mine.engine_model(torch.bfloat16), mine.tokenizer)
    batch = prepared(mine)
    ids = torch.tensor([[2, 3, 4, 5]])
    with torch.no_grad():
        before, shared_before = own.model(ids).logits, engine.model(ids).logits
    for _ in range(3):
        mine.train_step(batch, loss())
    assert torch.equal(mine.score(tiny.rollout(), {"ref_logprobs"})["ref_logprobs"], batch.ref_logprobs)
    with torch.no_grad():
        assert torch.equal(own.model(ids).logits, before)
        assert not torch.equal(engine.model(ids).logits, shared_before)
        refit(mine, own, 1)
        assert not torch.equal(own.model(ids).logits, before)


def test_layers_under_another_name_and_a_model_without_any(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_embd=8, n_layer=2, n_head=2, n_positions=16)).eval()
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny.tiny_model()).save_pretrained(tmp_path)
    checkpointed = policy(True, path=tmp_path)
    first = checkpointed.train_step(prepared(checkpointed), loss())
    assert first.sums["ratio_error_max"].item() == 0.0
    with pytest.raises(ValueError, match="value.gradient_checkpointing: Linear has no layers that can be"):
        checkpoint_layers(torch.nn.Linear(2, 2), "value.gradient_checkpointing")
