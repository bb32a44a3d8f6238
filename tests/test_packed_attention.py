"""Sequences packed into one row: the attention that keeps them apart, what it refuses, and who is not to notice."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from tests import tiny
from tests.linear import memory_of
from trainers.backbone import Packed, Padded, SplitTransformer
from trainers.batching import count, score_parts, split
from trainers.engines import Sampling
from trainers.engines.native import NativeEngine, share_parameters
from trainers.losses import PolicyLoss
from trainers.packed_attention import NAME, Sequences, packed_attention, varlen_flash
from trainers.policy.hf import HFPolicy
from trainers.policy.reference import FrozenCopy
from trainers.ppo import PPOTrainer

CPU = torch.device("cpu")
LENGTHS = torch.tensor([1, 5, 3, 8])


def inputs(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Query of 6 heads, key and value of 2, over 17 tokens."""
    return [torch.randn(1, heads, 17, 8, dtype=dtype, requires_grad=True) for heads in (6, 2, 2)]


def dense(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """The definition, by a mask of [T, T]."""
    owner, place = torch.repeat_interleave(LENGTHS), torch.arange(17)
    seen = (owner[:, None] == owner) & (place[:, None] >= place)
    scores = query @ key.repeat_interleave(3, 1).mT * scaling
    return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value.repeat_interleave(3, 1)).transpose(1, 2)


def loop(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    return packed_attention(
        torch.nn.Module(), query, key, value, None, scaling=scaling, sequences=Sequences.of(LENGTHS, CPU)
    )[0]


def varlen_2_10(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False):
    """What torch's `varlen_attn` is documented to compute, [T, H, D]; here with neither scale nor grouped heads."""
    assert is_causal and query.shape == key.shape == value.shape and max_q == max_k == 8
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    parts = [x.transpose(0, 1).tensor_split(cu_seq_q[1:-1].tolist(), 1) for x in (query, key, value)]
    return torch.cat(
        [F.scaled_dot_product_attention(*qkv, is_causal=True) for qkv in zip(*parts, strict=True)], 1
    ).mT.mT.transpose(0, 1)


def varlen_2_13(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False
):
    assert window_size == (-1, 0) and enable_gqa and key.shape[1] == value.shape[1] == 2
    query = query * (scale * query.shape[-1] ** 0.5)
    key, value = key.repeat_interleave(3, 1), value.repeat_interleave(3, 1)
    return varlen_2_10(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=True)


def flash(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda q, k, v, scaling: varlen_flash(attend, q, k, v, Sequences.of(LENGTHS, CPU), scaling)


@pytest.mark.parametrize(
    "attention", [loop, flash(varlen_2_10), flash(varlen_2_13)], ids=["loop", "torch 2.10's varlen", "torch 2.13's"]
)
def test_attention_equals_that_under_a_dense_mask(attention):
    given, upstream = inputs(torch.float64), torch.randn(1, 17, 6, 8, dtype=torch.float64)
    for scaling in (8**-0.5, 0.7):
        right, got = dense(*given, scaling), attention(*given, scaling)
        assert got.shape == (1, 17, 6, 8)
        torch.testing.assert_close(got, right)
        gradients = [torch.autograd.grad(out, given, upstream) for out in (got, right)]
        torch.testing.assert_close(*gradients)


def test_under_autocast_the_variable_length_op_gets_one_dtype():
    """Rotary embeddings leave query and key in float32; the op is torch's own, not one that autocast casts."""
    query, key, value = inputs()

    def attend(query, *others, **options):
        assert query.dtype == others[0].dtype == others[1].dtype == torch.bfloat16
        return query

    with torch.autocast("cpu", torch.bfloat16):
        flash(attend)(query, key, value.bfloat16(), None)


def test_views_by_hand():
    batch = tiny.rollout(((2, 2), (1, 1)))  # tokens 0..3 and 4..5, of which 2, 3 and 5 are trained
    padded, packed = Padded(batch, CPU), Packed(batch, CPU)
    assert padded.ids.tolist() == [batch.tokens[:4].tolist(), [*batch.tokens[4:].tolist(), 0, 0]]
    assert packed.ids.tolist() == [batch.tokens.tolist()]
    assert (padded.before.tolist(), packed.before.tolist()) == ([1, 2, 4], [1, 2, 4])
    assert (padded.last.tolist(), packed.last.tolist()) == ([3, 5], [3, 5])
    assert padded.where == {} and packed.where["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1]]
    assert packed.where["sequences"].lengths == [4, 2]
    assert packed.where["sequences"].cu_seqlens.tolist() == [0, 4, 6]
    hidden = torch.arange(6.0)[:, None]
    for view in (padded, packed):
        assert torch.equal(view.unpad(view.lay_out(hidden)), hidden)


# Lengths 6, 4, 2, 9, 4: from the longest, rows 3, 0, 1, 4, 2.
@pytest.mark.parametrize(
    ("max_tokens", "packing", "parts"),
    [
        (9, False, [[3], [0], [1, 4], [2]]),  # 9; 6, as 2 x 6 > 9; 2 x 4 = 8, and 3 x 4 > 9
        (9, True, [[3], [0], [1, 4], [2]]),  # 9; 6, as 6 + 4 > 9; 4 + 4; 2, as 8 + 2 > 9
        (12, False, [[3], [0, 1], [4, 2]]),  # 2 x 9 > 12; 2 x 6; 2 x 4
        (16, True, [[3, 0], [1, 4, 2]]),  # 15; 10
        (25, False, [[3, 0], [1, 4, 2]]),  # 2 x 9; 3 x 4
        (25, True, [[3, 0, 1, 4, 2]]),  # 25
    ],
)
def test_micro_batches_are_filled_by_tokens(max_tokens, packing, parts):
    batch = tiny.rollout(((5, 1), (1, 3), (1, 1), (4, 5), (2, 2)))
    assert [part.tolist() for part in split(batch, 1, max_tokens, packing)] == parts
    assert [part.tolist() for part in split(batch, 2)] == [[0, 1], [2, 3], [4]]
    with pytest.raises(ValueError, match="max_tokens_per_micro_batch=8: a sequence has 9 tokens"):
        split(batch, 1, 8, packing)


def test_scores_of_parts_come_back_in_the_batchs_order():
    batch = tiny.rollout(((1, 2), (1, 1), (2, 2)))
    batch.values, batch.next_values = torch.arange(9.0), torch.arange(3.0)
    parts = [torch.tensor([2, 0]), torch.tensor([1])]
    found = score_parts(batch, parts, lambda part: {"values": part.values, "next_values": part.next_values})
    assert torch.equal(found["values"], batch.values) and torch.equal(found["next_values"], batch.next_values)


def step_memory(packing: bool, call: Callable[[HFPolicy], object] | None = None) -> int:
    """Bytes of the largest allocation of one pass over 8 sequences of 256 tokens."""
    policy = tiny.policy(packing=packing)
    batch = count(tiny.rollout(((4, 252),) * 8))
    batch.update(old_logprobs=batch.rollout_logprobs)
    loss = PolicyLoss(tiny.config().loss_fn, temperature=1.0, norm_length=4)
    return memory_of(lambda: call(policy) if call else policy.gradients(batch, loss)).largest


def test_nothing_of_tokens_times_tokens_is_made():
    tokens = 8 * 256
    assert step_memory(packing=True) < tokens**2 / 2  # a mask of them takes a byte each
    # transformers' own way with such positions makes that mask, and the measure sees it
    positions = torch.arange(256).repeat(8)[None]
    where = {"input_ids": torch.zeros_like(positions), "position_ids": positions, "use_cache": False}
    masked = step_memory(False, lambda policy: policy.model.get_decoder()(**where))
    assert masked >= tokens**2


def of_family(family: str, **options: object):
    config = getattr(transformers, f"{family}Config")(
        **{"vocab_size": 16, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8,
           "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0} | options
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


FAMILIES = {
    "Qwen2": {},
    "Qwen3": {},
    "Llama": {},
    "GPT2": {"n_embd": 32, "n_head": 4, "n_layer": 2},
    "DeepseekV3": {  # values of another size than queries
        "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "v_head_dim": 12, "qk_nope_head_dim": 4,
        "head_dim": 4, "num_key_value_heads": 4, "n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1,
        "topk_group": 1, "moe_intermediate_size": 8,
    },
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_families_that_pack(family):
    """The probe of SplitTransformer holds; this is another one, with a trunk where there can be one."""
    model = of_family(family, **FAMILIES[family])
    batch = tiny.rollout(((2, 4), (3, 1), (1, 5)))
    with torch.no_grad():
        right = torch.cat([model.get_decoder()(ids[None])[0][0] for ids in batch.tokens.split(batch.lengths.tolist())])
        split_model = SplitTransformer(model, -1 if family == "GPT2" else 1, torch.float32, packing=True)
        view = split_model.view(batch, CPU)
        trunk = None if split_model.trunk is None else split_model.trunk_hidden(view.ids, **view.where)
        hidden = split_model.hidden(view.ids, trunk, **view.where)
        reference = split_model.hidden(view.ids, trunk, FrozenCopy(split_model).top, **view.where)
    torch.testing.assert_close(hidden[0], right, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(reference, hidden, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("Mistral", {"sliding_window": 4}, "MistralAttention asks for sliding_window=4, which packed attention"),
        ("Gemma3Text", {}, "Gemma3ForCausalLM has layers of type sliding_attention; only full_attention can be packed"),
        ("Gemma2", {"layer_types": ["full_attention"] * 2}, "Gemma2(Attention asks for softcap|ForCausalLM keeps to)"),
        ("GptOss", {"layer_types": ["full_attention"] * 2}, "GptOssForCausalLM keeps to an attention of its own"),
        ("Bloom", {"n_head": 4}, "BloomForCausalLM keeps to an attention of its own"),
    ],
    ids=["window", "layer types", "softcap", "sinks", "alibi"],
)
def test_what_packed_attention_does_not_have_is_refused_by_name(family, options, message):
    with pytest.raises(ValueError, match=f"^packing: {message}"):
        SplitTransformer(of_family(family, **options), -1, torch.float32, packing=True)


def test_a_model_that_keeps_the_bounds_to_itself_is_refused():
    model = of_family("Llama")
    drop = lambda module, args, kwargs: (args, {k: v for k, v in kwargs.items() if k != "sequences"})  # noqa: E731
    model.model.register_forward_pre_hook(drop, with_kwargs=True)
    with pytest.raises(ValueError, match="^packing: LlamaForCausalLM gives other outputs when .* .they differ by"):
        SplitTransformer(model, -1, torch.float32, packing=True)


@pytest.mark.parametrize(
    "wrong",
    [{"attention_mask": torch.ones(1, 17)}, {"dropout": 0.1}, {"s_aux": torch.ones(6)}],
    ids=lambda x: next(iter(x)),
)
def test_a_call_that_it_cannot_answer_is_refused(wrong):
    with pytest.raises(ValueError, match="^packing: Module asks for "):
        packed_attention(torch.nn.Module(), *inputs(), **{"attention_mask": None, "scaling": 1.0} | wrong)


@pytest.mark.parametrize("layers", [-1, 1])
def test_the_embedded_engine_does_not_notice(layers):
    plain, packed = tiny.policy(layers), tiny.policy(layers, packing=True)
    prompts, sampling = [[2, 3], [4, 5, 6, 7], [8]], Sampling(max_new_tokens=6, ignore_eos=True)
    found = []
    for policy in (plain, packed):
        engine = NativeEngine(share_parameters(policy.model, torch.float32), policy.tokenizer)
        assert engine.model.config._attn_implementation == "sdpa"
        found.append(engine.generate(prompts, sampling, seeds=[1, 2, 3]))
        for name, parameter in policy.model.named_parameters():
            assert engine.parameters[name] is parameter
    assert found[0] == found[1]
    assert packed.model.config._attn_implementation == NAME


def test_the_saved_folder_does_not_name_it(tmp_path):
    tiny.policy(packing=True).save(tmp_path)
    assert NAME not in (tmp_path / "config.json").read_text()


def test_gradient_checkpointing_recomputes_within_the_same_bounds():
    loss = PolicyLoss(tiny.config().loss_fn, temperature=1.0, norm_length=4)
    found = []
    for checkpointing in (False, True):
        policy = tiny.policy(packing=True)
        if checkpointing:
            policy.model.gradient_checkpointing_enable({"use_reentrant": False})
            policy.model.train()
        batch = tiny.rollout()
        policy.gradients(count(batch.update(**policy.score(batch, {"old_logprobs"}))), loss)
        found.append([p.grad for p in policy.model.parameters()])
    torch.testing.assert_close(*found, rtol=0, atol=0)


def run(folder: Path, **overrides: object) -> list[dict]:
    """metrics.jsonl of two steps of the copy task, without what a clock decides."""
    options = {
        "logger__run_dir": folder,
        "ppo__num_prompts_per_step": 4,
        "ppo__num_generations_per_prompt": 4,
        "ppo__max_num_steps": 2,
        "policy__train_global_batch_size": 8,
        "policy__train_micro_batch_size": 8,
        "policy__logprob_batch_size": 8,
        "policy__num_layers_unfrozen": 1,
        "policy__generation__ignore_eos": False,  # responses of unequal length
    }
    PPOTrainer(tiny.config(**options | overrides)).fit()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(("time", "timing_s/", "perf/"))} for row in rows]


def test_a_run_is_the_same_packed_and_cut_by_tokens(tmp_path):
    by_tokens = {
        "policy__packing": True, "policy__max_tokens_per_micro_batch": 20,
        "value__packing": True, "value__max_tokens_per_micro_batch": 13,
    }  # fmt: skip
    right = run(tmp_path / "padded", value__mode="local")
    got = run(tmp_path / "packed", value__mode="local", **by_tokens)
    assert len(got) == len(right) == 2
    for mine, theirs in zip(got, right, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-5)
