"""logprob and the losses on a CUDA device: values, no synchronisation, graph capture, determinism, 64-bit addresses."""

import pytest
import torch

import fastppo
from fastppo.reference.logprob import logprob as reference
from fastppo.testing import assert_bitwise_equal, assert_no_worse, make_logits, make_loss_inputs, make_targets

pytestmark = pytest.mark.gpu

OPTIONS = {"plain": {}, "softcap": {"softcap": 5.0, "temperature": 0.7}}


def logprob_and_gradient(logits, targets, upstream, **options):
    leaf = logits.detach().requires_grad_()
    out = fastppo.logprob(leaf, targets, **options)
    (grad,) = torch.autograd.grad((out.logprobs, out.entropy), leaf, list(upstream.to(out.logprobs.dtype)))
    return out.logprobs.detach(), out.entropy.detach(), grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("shape", [(1, 7), (131, 257), (64, 50257)], ids=str)
def test_logprob_is_no_worse_than_torch(shape, options, dtype):
    logits = make_logits(*shape, dtype=dtype, device="cuda") * 3
    targets = make_targets(logits, ignored=0.2)
    upstream = torch.randn(2, shape[0], device="cuda")
    got = logprob_and_gradient(logits, targets, upstream, **options)
    baseline = logprob_and_gradient(logits.float(), targets, upstream, backend="torch", **options)
    truth = logprob_and_gradient(logits.double(), targets, upstream, backend="torch", **options)
    for name, *three in zip(("logprobs", "entropy", "dlogits"), got, baseline, truth, strict=True):
        assert_no_worse(name, *three)


def loss_calls():
    inputs = make_loss_inputs([37, 1, 200, 64], device="cuda")
    logits = make_logits(302, 500, device="cuda")
    targets = make_targets(logits, ignored=0.1)
    upstream = torch.randn(2, 302, device="cuda")

    def ppo(**options):
        leaf = inputs.logprobs.clone().requires_grad_()
        loss, metrics = fastppo.ppo_loss(
            leaf, inputs.old_logprobs, inputs.advantages, mask=inputs.mask, ref_logprobs=inputs.ref_logprobs,
            kl_coef=0.1, cu_seqlens=inputs.cu_seqlens, **options,
        )  # fmt: skip
        return loss, metrics, *torch.autograd.grad(loss, leaf)

    def value():
        leaf = inputs.values.clone().requires_grad_()
        loss, metrics = fastppo.value_loss(
            leaf, inputs.old_values, inputs.returns, mask=inputs.mask, clip_eps=0.2, cu_seqlens=inputs.cu_seqlens
        )
        return loss, metrics, *torch.autograd.grad(loss, leaf)

    return {
        "logprob": lambda: logprob_and_gradient(logits, targets, upstream),
        "ppo": lambda: ppo(),
        "gspo": lambda: ppo(loss_type="gspo", aggregation="seq_mean_token_mean"),
        "tis": lambda: ppo(rollout_logprobs=inputs.rollout_logprobs, is_correction="tis"),
        "value": value,
    }


CALLS = ("logprob", "ppo", "gspo", "tis", "value")


@pytest.mark.parametrize("name", CALLS)
def test_no_synchronisation_and_the_same_bits_twice(name):
    call = loss_calls()[name]
    first = call()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        second = call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for a, b in zip(first, second, strict=True):
        assert_bitwise_equal(name, b, a)


@pytest.mark.parametrize("name", CALLS)
def test_captures_into_a_graph(name):
    call = loss_calls()[name]
    expected = call()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = call()
    graph.replay()
    for a, b in zip(got, expected, strict=True):
        assert_bitwise_equal(name, a, b)


@pytest.mark.timeout(300)
def test_more_than_2_to_the_31_logits():
    """16384 x 151936: the last rows' addresses do not fit 32 bits."""
    logits = torch.zeros(16384, 151936, dtype=torch.bfloat16, device="cuda")
    logits[-2:] = make_logits(2, 151936, dtype=torch.bfloat16, device="cuda")
    targets = torch.zeros(16384, dtype=torch.int64, device="cuda")
    targets[-2:] = make_targets(logits[-2:])
    leaf = logits.requires_grad_()
    out = fastppo.logprob(leaf * 1, targets, inplace_backward=True)
    expected = reference(logits[-2:].detach().double(), targets[-2:])
    torch.testing.assert_close(out.logprobs[-2:].double(), expected[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(out.entropy[-2:].double(), expected[1], rtol=1e-6, atol=1e-6)
    out.logprobs.sum().backward()
    p = torch.softmax(logits[-1].detach().double(), -1)
    p[targets[-1]] -= 1
    torch.testing.assert_close(leaf.grad[-1].double(), -p, rtol=2**-8, atol=1e-9)
