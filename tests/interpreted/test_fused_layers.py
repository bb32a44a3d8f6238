"""The kernels of a decoder layer and of sampling, beside what transformers and `sample.draw` compute."""

import copy
import math
import sys

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from trainers.engines import draw_kernel, sample
from trainers.fused_layers import fuse_layers, rms_norm, rotate, silu_mul

SHAPE = {"vocab_size": 32, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
         "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 12}  # fmt: skip


def compare(ours, theirs, *inputs):
    """Results and gradients, for a random upstream gradient."""
    grads = []
    for function in (ours, theirs):
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        outs = function(*leaves)
        outs = outs if isinstance(outs, tuple) else (outs,)
        upstream = [torch.cos(torch.arange(out.numel()).view(out.shape).float()) for out in outs]
        grads.append([*outs, *torch.autograd.grad(outs, leaves, upstream)])
    for mine, right in zip(*grads, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("one_plus", [False, True])
def test_rms_norm_takes_strided_rows(one_plus):
    norm = lambda x, w: torch.nn.functional.rms_norm(x[..., :24], (24,), w + int(one_plus), 1e-5)  # noqa: E731
    ours = lambda x, w: rms_norm(x[..., :24], w, 1e-5, one_plus=one_plus)  # noqa: E731
    compare(ours, norm, torch.randn(3, 2, 40), torch.arange(24.0) - int(one_plus))
    empty = rms_norm(torch.randn(0, 24, requires_grad=True), torch.ones(24, requires_grad=True), 1e-5)
    assert empty.shape == (0, 24) and torch.autograd.grad(empty.sum(), empty)[0].shape == (0, 24)


def test_rms_norm_of_many_short_rows():
    """Several rows a program, and the last program's are not all there."""
    norm = lambda x, w: torch.nn.functional.rms_norm(x, (6,), w, 1e-5)  # noqa: E731
    compare(lambda x, w: rms_norm(x, w, 1e-5), norm, torch.randn(4100, 6), torch.randn(6))


@pytest.mark.parametrize("batch", [1, 3])
def test_rotate_is_the_rotary_embedding(batch):
    angle = torch.randn(batch, 5, 6).repeat(1, 1, 2)
    where = (angle.cos(), angle.sin())
    query, key = torch.randn(3, 5, 4, 12).transpose(1, 2), torch.randn(3, 5, 2, 12).transpose(1, 2)
    compare(lambda q, k: rotate(q, k, *where), lambda q, k: apply_rotary_pos_emb(q, k, *where), query, key)


def test_rotate_gives_the_transposed_rotation_to_gradients():
    """Also where the two halves turn by angles of their own."""
    where = torch.randn(2, 1, 3, 8)
    compare(
        lambda q, k: rotate(q, k, *where), lambda q, k: apply_rotary_pos_emb(q, k, *where), *torch.randn(2, 1, 2, 3, 8)
    )


def test_silu_mul():
    compare(silu_mul, lambda gate, up: torch.nn.functional.silu(gate) * up, *torch.randn(2, 7, 300))


def test_a_second_derivative_is_refused():
    x = torch.randn(2, 24, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"policy\.fused_layers=false"):
        torch.autograd.grad(rms_norm(x, torch.ones(24), 1e-5).sum(), x, create_graph=True)


@pytest.mark.parametrize(
    ("config", "fused"),
    [(transformers.LlamaConfig, 9), (transformers.Qwen3Config, 13), (transformers.Gemma2Config, 11)],
    ids=lambda x: getattr(x, "model_type", x),
)
def test_a_fused_model_gives_the_same_logits_and_gradients(config, fused):
    """Norms, gated MLPs and attentions of two layers and the last norm; Gemma's MLP has another activation."""
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(config(**SHAPE)).eval()
    for parameter in plain.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model = copy.deepcopy(plain)
    fuse_layers(model)
    fuse_layers(model)  # once is enough, and twice is not too much
    model = copy.deepcopy(model)  # as a reference or an engine is made
    assert sum("forward" in vars(module) for module in model.modules()) == fused
    before = sys.modules[type(plain).__module__].apply_rotary_pos_emb
    results = []
    for one in (model, plain):
        logits = one(torch.arange(6)[None], use_cache=False).logits
        logits.log_softmax(-1)[0, :, 3].sum().backward()
        results.append([logits, *(parameter.grad for parameter in one.parameters())])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    assert sys.modules[type(plain).__module__].apply_rotary_pos_emb is before


def test_what_does_something_else_is_left_alone():
    """By its name an RMSNorm, but it adds its weight."""
    model = AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SHAPE))
    norm = type("OddRMSNorm", (type(model.model.norm),), {"forward": lambda self, x: x + self.weight})(24)
    model.model.norm = norm
    fuse_layers(model)
    assert "forward" not in vars(norm) and "forward" in vars(model.model.layers[0].input_layernorm)


def test_layers_that_look_alike_are_compared_one_by_one_if_their_settings_differ():
    model = AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SHAPE))
    forward = lambda self, x: type(self).__base__.forward(self, x * (1 - self.sparsity))  # noqa: E731
    odd = type("OddMLP", (type(model.model.layers[0].mlp),), {"forward": forward})
    for layer, sparsity in zip(model.model.layers, (0.0, 0.5), strict=True):
        layer.mlp.__class__, layer.mlp.sparsity = odd, sparsity
    fuse_layers(model)
    assert ["forward" in vars(layer.mlp) for layer in model.model.layers] == [True, False]


def test_a_norm_that_wants_more_than_its_input_is_left_alone():
    model = AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SHAPE))
    forward = lambda self, x, gate: x * gate  # noqa: E731
    model.model.norm = type("GatedRMSNorm", (type(model.model.norm),), {"forward": forward})(24)
    fuse_layers(model)
    assert "forward" not in vars(model.model.norm)


def test_a_fused_mlp_computes_with_the_layers_that_it_has_now():
    mlp = AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SHAPE)).model.layers[0].mlp
    holder = torch.nn.ModuleList([mlp])
    holder.dtype, holder.device = torch.float32, torch.device("cpu")
    fuse_layers(holder)
    mlp.up_proj = torch.nn.Linear(24, 40)  # as adapters are put around a layer
    x = torch.randn(2, 24)
    assert "forward" in vars(mlp)
    torch.testing.assert_close(mlp(x), type(mlp).forward(mlp, x))


class TestDraw:
    def test_follows_the_distribution(self, monkeypatch):
        monkeypatch.setattr(draw_kernel, "BLOCK", 16)
        logits = torch.tensor([0.0, math.log(2), -math.inf, math.log(5)]).expand(80, 4)
        chosen, logprobs, finite = draw_kernel.draw(logits, (torch.arange(80, dtype=torch.float64) + 0.5) / 80)
        assert torch.bincount(chosen, minlength=4).tolist() == [10, 20, 0, 50]
        assert logprobs[0].item() == pytest.approx(math.log(1 / 8)) and bool(finite.all())

    @pytest.mark.parametrize("greedy", [False, True])
    def test_picks_as_the_definition_over_several_blocks(self, greedy, monkeypatch):
        monkeypatch.setattr(draw_kernel, "BLOCK", 64)
        logits, uniform = torch.randn(20, 300) * 4, torch.rand(20, 3, dtype=torch.float64)[:, 1]
        logits[:, 100:200] = -torch.inf
        ours = draw_kernel.draw(logits, uniform, temperature=0.7, greedy=greedy)
        theirs = sample.draw(logits / 0.7, uniform, greedy=greedy)
        assert ours[0].tolist() == theirs[0].tolist()
        torch.testing.assert_close(ours[1], theirs[1])

    @pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
    def test_never_a_token_of_probability_zero(self, uniform, monkeypatch):
        monkeypatch.setattr(draw_kernel, "BLOCK", 16)
        logits = torch.full((1, 50), -math.inf)
        logits[0, [20, 21, 38]] = 0.0
        chosen, logprob, _ = draw_kernel.draw(logits, torch.tensor([uniform], dtype=torch.float64))
        assert chosen.item() in (20, 21, 38) and logprob.item() == pytest.approx(-math.log(3))

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    def test_says_which_rows_are_no_distribution(self, value):
        logits = torch.zeros(3, 10)
        logits[1] = value if value == -math.inf else torch.tensor([0.0] * 9 + [value])
        assert draw_kernel.draw(logits, torch.full((3,), 0.5).double())[2].tolist() == [True, False, True]
