"""fastppo in TRL's own trainers: the same losses as without, and TRL left as it was."""

import inspect

import pytest
import torch

pytest.importorskip("trl", reason="needs TRL: pip install trl==1.16.0, for Python 3.11 or newer")
import trl.trainer.utils as utils

import fastppo.integrations.trl as integration
from fastppo.testing import assert_no_worse
from tests.examples import load

THEIRS = utils._ChunkedLogProbFunction, utils._use_triton


@pytest.fixture(autouse=True)
def _undone():
    yield
    integration.undo()
    assert (utils._ChunkedLogProbFunction, utils._use_triton) == THEIRS


@pytest.mark.parametrize("algorithm", ["grpo", "rloo"])
def test_trainers_have_the_losses_that_they_have_without(algorithm, capsys):
    example = load("trl_trainers")
    size = example.Size(vocab=64, hidden=16, prompts=2, prompt_tokens=5, response_tokens=7, learning_rate=1e-3)
    before, after = example.compare(algorithm, size)
    assert 'linear_logprob(memory="recompute", backend="auto")' in capsys.readouterr().out
    assert len(before.losses) == 5 and max(map(abs, before.losses)) > 1e-3 and min(before.grad_norms) > 1e-3
    for name in ("losses", "grad_norms", "entropies"):
        assert getattr(after, name) == pytest.approx(getattr(before, name), rel=1e-4, abs=2e-7), name


def head_inputs(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    hidden, weight, bias = torch.randn(37, 16), torch.randn(50, 16) * 0.4, torch.randn(50) * 0.3
    return tuple(x.to(dtype).requires_grad_() for x in (hidden, weight, bias))


def scored(function, inputs, targets, temperature=0.7, softcap=3.0, scale=0.6):
    outputs = ("log_probs", "entropy")
    logprobs, entropy, *others = function.apply(*inputs, targets, temperature, 16, softcap, scale, outputs)
    assert others == [None, None, None]
    weights = torch.linspace(-1, 1, len(targets), dtype=logprobs.dtype)
    grads = torch.autograd.grad((weights * logprobs - 0.1 * entropy).sum(), inputs)
    return {"logprobs": logprobs, "entropy": entropy, **dict(zip(("dhidden", "dweight", "dbias"), grads, strict=True))}


def scored_exactly(inputs, targets, scale, softcap):
    """In float64, at temperature 0.7."""
    logits = scale * torch.nn.functional.linear(*(x.double() for x in inputs))
    logits = (logits if softcap is None else softcap * torch.tanh(logits / softcap)) / 0.7
    logp = logits.log_softmax(-1)
    truth = {"logprobs": logp.gather(-1, targets[:, None])[:, 0], "entropy": -(logp.exp() * logp).sum(-1)}
    loss = (torch.linspace(-1, 1, 37, dtype=torch.float64) * truth["logprobs"] - 0.1 * truth["entropy"]).sum()
    truth |= dict(zip(("dhidden", "dweight", "dbias"), torch.autograd.grad(loss, inputs), strict=True))
    return {name: x.detach().double() for name, x in truth.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_the_head_is_no_worse_than_trls_own(dtype, softcap, capsys):
    """Bias, softcap, logit scale and temperature, against float64, through both."""
    integration.apply()
    inputs = head_inputs(dtype)
    targets = torch.randint(50, (37,))
    truth = scored_exactly(inputs, targets, scale=0.6, softcap=softcap)
    ours, theirs = (
        scored(utils._ChunkedLogProbFunction, inputs, targets, softcap=softcap),
        scored(THEIRS[0], inputs, targets, softcap=softcap),
    )
    for name, right in truth.items():
        assert_no_worse(name, ours[name], theirs[name], right, atol=1e-5 if dtype == torch.float32 else 2e-2)


def test_the_head_is_no_worse_than_trls_own_under_autocast(capsys):
    """float32 weights and bfloat16 products, which is TRL's default; hidden states in either."""
    integration.apply()
    targets = torch.randint(50, (37,))
    for hidden in (torch.float32, torch.bfloat16):
        inputs = [x.detach() for x in head_inputs(torch.float32)]
        inputs = [x.requires_grad_() for x in (inputs[0].to(hidden), *inputs[1:])]
        truth = scored_exactly(inputs, targets, scale=0.6, softcap=3.0)
        with torch.autocast("cpu", torch.bfloat16):
            ours, theirs = (scored(f, inputs, targets) for f in (utils._ChunkedLogProbFunction, THEIRS[0]))
        for name, right in truth.items():
            assert_no_worse(name, ours[name], theirs[name], right, atol=2e-2)


def test_outputs_of_other_trainers_are_still_trls(capsys):
    integration.apply()
    arguments = (*head_inputs(torch.float32), torch.randint(50, (37,)), 1.0, 16, None, 1.0, ("log_probs", "is_top1"))
    for ours, theirs in zip(utils._ChunkedLogProbFunction.apply(*arguments), THEIRS[0].apply(*arguments), strict=True):
        assert (ours is None and theirs is None) or torch.equal(ours, theirs)


def test_no_labels_at_all_still_reach_backward(capsys):
    integration.apply()
    inputs = head_inputs(torch.float32)
    inputs = (inputs[0][:0].detach().requires_grad_(), *inputs[1:])
    outputs = ("log_probs", "entropy")
    logprobs, *_ = utils._ChunkedLogProbFunction.apply(*inputs, torch.empty(0).long(), 1.0, 16, None, 1.0, outputs)
    logprobs.sum().backward()
    assert not inputs[1].grad.any()


def test_apply_twice_changes_the_options_and_undo_gives_back_the_very_objects(capsys):
    integration.undo()  # nothing to undo
    integration.apply()
    ours = utils._ChunkedLogProbFunction
    integration.apply(memory="auto")
    assert utils._ChunkedLogProbFunction is ours is not THEIRS[0]
    assert integration._options == {"memory": "auto", "backend": "auto"}
    integration.undo()
    assert (utils._ChunkedLogProbFunction, utils._use_triton) == THEIRS
    with pytest.raises(ValueError, match="memory"):
        integration.apply(memory="none")


def other_signature(ctx, hidden, weight, targets): ...


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("_use_triton", None), "utils has no _use_triton"),
        (("_ChunkedLogProbFunction", type("F", (), {"forward": other_signature})), r"takes \(ctx, hidden, weight, tar"),
        (
            ("add_fused_lm_head", lambda model, temperature, cast_lm_head_to_fp32, outputs: None),
            "does not use _Chunked",
        ),
    ],
)
def test_another_trl_is_refused_by_name(change, message, monkeypatch, capsys):
    name, value = change
    monkeypatch.setattr(utils, name, value) if value is not None else monkeypatch.delattr(utils, name)
    monkeypatch.setattr(integration, "_version", lambda: "9.9.0")
    with pytest.raises(RuntimeError, match=r"trl 9\.9\.0 is not as 1\.16\.0, nothing was replaced: .*" + message):
        integration.apply()
    assert capsys.readouterr().out == "" and utils._ChunkedLogProbFunction is not integration.FusedHead


def test_a_head_that_zero3_shards_is_refused(capsys):
    integration.apply()
    hidden, weight, bias = head_inputs(torch.float32)
    weight.ds_status = "NOT_AVAILABLE"
    with pytest.raises(RuntimeError, match="ZeRO-3"):
        scored(utils._ChunkedLogProbFunction, (hidden, weight, bias), torch.randint(50, (37,)))


def test_fused_head_takes_what_trls_function_takes():
    theirs = inspect.signature(THEIRS[0].forward).parameters
    assert list(inspect.signature(integration.FusedHead.apply).parameters) == list(theirs)[1:]
