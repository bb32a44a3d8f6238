"""The kernels of a decoder layer and of sampling, beside what transformers and `sample.draw` compute."""

import copy
import math

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from trainers.engines import draw_kernel, sample
from trainers.engines.fused_layers import FusedRotary, fuse_layers, rms_norm, rotate, silu_mul

SHAPE = {"vocab_size": 32, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
         "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 12}  # fmt: skip


def test_rms_norm_takes_strided_rows():
    x = torch.randn(3, 2, 40)[..., :24]
    norm = torch.nn.functional.rms_norm(x, (24,), torch.arange(24.0), 1e-5)
    torch.testing.assert_close(rms_norm(x, torch.arange(24.0), 1e-5), norm)
    torch.testing.assert_close(rms_norm(x, torch.arange(24.0) - 1, 1e-5, one_plus=True), norm)
    assert rms_norm(x[:0], torch.ones(24), 1e-5).shape == (0, 2, 24)


@pytest.mark.parametrize("batch", [1, 3])
def test_rotate_is_the_rotary_embedding(batch):
    query, key = torch.randn(3, 5, 4, 12).transpose(1, 2), torch.randn(3, 5, 2, 12).transpose(1, 2)
    angle = torch.randn(batch, 5, 6).repeat(1, 1, 2)
    ours = rotate(query, key, angle.cos(), angle.sin())
    for mine, theirs in zip(ours, apply_rotary_pos_emb(query, key, angle.cos(), angle.sin()), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_silu_mul():
    gate, up = torch.randn(2, 7, 300)
    torch.testing.assert_close(silu_mul(gate, up), torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize(
    ("config", "fused"),
    [(transformers.LlamaConfig, 7), (transformers.Qwen3Config, 11), (transformers.Gemma2Config, 9)],
    ids=lambda x: getattr(x, "model_type", x),
)
def test_a_fused_model_gives_the_same_logits(config, fused):
    """Norms and gated MLPs of two layers and the last norm; Gemma's MLP has another activation and is left alone."""
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(config(**SHAPE)).eval()
    for parameter in plain.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model = copy.deepcopy(plain)
    fuse_layers(model)
    assert sum("forward" in vars(module) for module in model.modules()) == fused
    ids = torch.arange(6)[None]
    rotary = FusedRotary(model)
    assert len(rotary.replaced) == 1
    with torch.no_grad(), rotary():
        ours = model(ids, use_cache=False).logits
    with torch.no_grad():
        torch.testing.assert_close(ours, plain(ids, use_cache=False).logits, rtol=1e-4, atol=1e-4)
    module, own, _ = rotary.replaced[0]
    assert module.apply_rotary_pos_emb is own


class TestDraw:
    def test_follows_the_distribution(self):
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
