"""The embedded engine on a GPU: the decoding kernel, CUDA graphs, continuous batching, beside plain transformers."""

import contextlib

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests import tiny
from trainers.engines import Sampling
from trainers.engines.native import NativeEngine, share_parameters
from trainers.engines.paged_attention import decode_reference
from trainers.policy.hf import HFPolicy
from trainers.refit import refit

pytestmark = pytest.mark.gpu

SHAPE = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024}  # fmt: skip
MODELS = {
    "llama": (transformers.LlamaConfig, {}),
    "qwen2": (transformers.Qwen2Config, {}),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 64, "tie_word_embeddings": True}),
    "gemma": (transformers.GemmaConfig, {"head_dim": 32}),
    "gemma2": (transformers.Gemma2Config, {"head_dim": 32, "sliding_window": 20}),
    "mistral": (transformers.MistralConfig, {"sliding_window": 20}),
}
PROMPTS = [[2, 3], [4], [5, 6, 7, 8] * 40, [9, 10], [4], [4], [5, 6, 7, 8] * 40, [2] * 64]
SEEDS = list(range(10, 18))


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(tiny.tiny_model())


def model(name: str, dtype: torch.dtype):
    torch.manual_seed(0)
    config, options = MODELS[name]
    return AutoModelForCausalLM.from_config(config(**SHAPE, **options)).to("cuda", dtype).eval()


def engines(name: str, dtype: torch.dtype, tokenizer, **options):
    """With continuous batching, and batch by batch."""
    base = model(name, dtype)
    return [
        NativeEngine(share_parameters(base, dtype), tokenizer, continuous=continuous, **options)
        for continuous in (True, False)
    ]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(90, ignore_eos=True),
        Sampling(40, temperature=0.7, stop_token_ids=tuple(range(60)), min_new_tokens=3),
        Sampling(20, top_k=50, top_p=0.9, repetition_penalty=1.3, ignore_eos=True),
        Sampling(20, greedy=True, ignore_eos=True),
    ],
    ids=["plain", "stops", "cut", "greedy"],
)
def test_graphs_sample_what_plain_batches_sample(name, sampling, tokenizer):
    graphs, plain = engines(name, torch.float32, tokenizer, max_batch_size=3)
    assert graphs.continuous is not None and plain.continuous is None
    for _ in range(2):  # the second time all graphs are there
        ours, theirs = (engine.generate(PROMPTS, sampling, SEEDS) for engine in (graphs, plain))
        for a, b in zip(ours, theirs, strict=True):
            assert (a.tokens, a.finish) == (b.tokens, b.finish)
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)
    pages, steps = graphs.continuous.pages, graphs.continuous.graphs
    assert len(pages.free) == pages.count and not any(pages.owners)
    assert steps.capture and len(steps.made) >= 2


def test_experts_that_the_host_picks_tokens_for_run_without_graphs(tokenizer, capsys):
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(
        transformers.MixtralConfig(**SHAPE, num_local_experts=4), experts_implementation="eager"
    )
    base = base.to("cuda").eval()
    shared = [share_parameters(base, torch.float32) for _ in range(2)]
    graphs, plain = (NativeEngine(m, tokenizer, continuous=c) for m, c in zip(shared, (True, False), strict=True))
    assert graphs.continuous is not None
    sampling = Sampling(20, ignore_eos=True)
    stream = torch.cuda.current_stream()
    ours, theirs = (engine.generate(PROMPTS, sampling, SEEDS) for engine in (graphs, plain))
    assert [c.tokens for c in ours] == [c.tokens for c in theirs]
    assert capsys.readouterr().out.count("generation: without CUDA graphs") == 1
    assert torch.cuda.current_stream() == stream and torch.cuda.get_sync_debug_mode() == 0
    torch.rand(1, device="cuda").item()


def test_a_capture_that_fails_leaves_a_device_to_work_with(tokenizer, capsys, monkeypatch):
    """What the host waits for is seen before; this is for what is not."""
    from trainers.engines import steps

    monkeypatch.setattr(steps, "_no_waiting", contextlib.nullcontext)
    graphs, plain = engines("llama", torch.float32, tokenizer)

    def wait(module, inputs, out):
        out.sum().item()

    hook = graphs.model.lm_head.register_forward_hook(wait)
    sampling, stream = Sampling(20, ignore_eos=True), torch.cuda.current_stream()
    ours, theirs = (engine.generate(PROMPTS, sampling, SEEDS) for engine in (graphs, plain))
    hook.remove()
    assert [c.tokens for c in ours] == [c.tokens for c in theirs]
    assert capsys.readouterr().out.count("generation: without CUDA graphs") == 1
    assert torch.cuda.current_stream() == stream
    assert torch.rand(1, device="cuda").item() < 1


@pytest.mark.parametrize("name", MODELS)
def test_logprobs_in_half_precision_are_those_of_a_forward_pass(name, tokenizer):
    graphs, _ = engines(name, torch.bfloat16, tokenizer, max_batch_size=4)
    sampling = Sampling(60, temperature=0.7, ignore_eos=True)
    for prompt, completion in zip(PROMPTS, graphs.generate(PROMPTS, sampling, SEEDS), strict=True):
        ids = torch.tensor([prompt + completion.tokens], device="cuda")
        with torch.no_grad():
            logits = model(name, torch.float32)(ids).logits[0, len(prompt) - 1 : -1] / 0.7
        expected = logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None]).squeeze(-1)
        error = (torch.tensor(completion.logprobs, device="cuda") - expected).abs()
        assert error.mean() < 0.02, error


def test_a_refit_reaches_the_graphs_and_moves_nothing(tokenizer):
    cfg = tiny.config().policy
    policy = HFPolicy(tiny.tiny_model(), cfg, device=torch.device("cuda"), dtype=torch.float32)
    engine = NativeEngine(policy.engine_model(torch.float32), tokenizer)
    sampling = Sampling(12, ignore_eos=True)
    seen = []
    for version in (1, 2):
        with torch.no_grad():
            for parameter in policy.model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.3)
        assert refit(policy, engine, version) == 0
        completion = engine.generate([[4, 5]], sampling, [3])[0]
        ids = torch.tensor([[4, 5, *completion.tokens]], device="cuda")
        with torch.no_grad():
            logits = policy.model(ids).logits[0, 1:-1]
        expected = logits.log_softmax(-1).gather(-1, ids[0, 2:, None]).squeeze(-1).tolist()
        assert completion.logprobs == pytest.approx(expected, abs=1e-4) and completion.weight_version == version
        seen.append(completion.tokens)
    assert seen[0] != seen[1]


def test_sleep_gives_the_cache_back(tokenizer):
    engine, _ = engines("llama", torch.bfloat16, tokenizer, kv_cache_gb=1.0)
    first = engine.generate(PROMPTS, Sampling(8, ignore_eos=True), SEEDS)
    before = torch.cuda.memory_allocated()
    size = engine.continuous.pages.kv.numel() * 2
    engine.sleep()
    assert torch.cuda.memory_allocated() <= before - size
    for part in ("weights", "kv"):
        engine.wake(part)
    assert engine.generate(PROMPTS, Sampling(8, ignore_eos=True), SEEDS) == first


def test_a_cache_that_no_response_fits_into_names_the_key(tokenizer):
    engine, _ = engines("llama", torch.bfloat16, tokenizer, kv_cache_gb=1e-4)
    with pytest.raises(MemoryError, match=r"policy\.generation\.kv_cache_gb"):
        engine.generate(PROMPTS, Sampling(500), SEEDS)


def test_a_small_cache_serves_all_requests_in_turns(tokenizer):
    engine, plain = engines("llama", torch.float32, tokenizer, kv_cache_gb=12 * 3 * 2 * 64 * 2 * 32 * 4 / 2**30)
    sampling = Sampling(90, ignore_eos=True)
    ours, theirs = (e.generate(PROMPTS, sampling, SEEDS) for e in (engine, plain))
    assert engine.continuous.pages.count == 12
    assert [c.tokens for c in ours] == [c.tokens for c in theirs]


def test_diverged_weights_are_an_error_not_a_token(tokenizer):
    engine, _ = engines("llama", torch.bfloat16, tokenizer)
    with torch.no_grad():
        engine.model.lm_head.weight[3] = torch.nan
    with pytest.raises(FloatingPointError, match="not finite"):
        engine.generate(PROMPTS, Sampling(8), SEEDS)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(16, 8, 128), (9, 3, 64), (8, 1, 256), (4, 4, 80)])
@pytest.mark.parametrize("shares", [None, 1, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("options", [{}, {"window": 100}, {"softcap": 5.0}], ids=str)
def test_decode_kernel(heads, kv_heads, head_dim, shares, dtype, options):
    from trainers.engines.decode_attention import decode_attention

    positions = torch.tensor([0, 63, 64, 1000, 200], device="cuda")
    n, width = len(positions), 16
    cache = torch.randn(2, n * width + 1, kv_heads, 64, head_dim, device="cuda", dtype=dtype)
    table = (torch.randperm(n * width, device="cuda").view(n, width) + 1).int()
    query, key, value = torch.randn(n, heads + 2 * kv_heads, head_dim, device="cuda", dtype=dtype).split(
        [heads, kv_heads, kv_heads], 1
    )
    cache[:, table[0, 0].long(), :, 1:] = torch.nan  # what no token has written is garbage
    mine, exact = cache.clone(), cache.clone().double()
    out = decode_attention(query, key, value, *mine, table, positions, scale=0.1, shares=shares, **options)
    rows = (query.double(), key.double(), value.double())
    expected = decode_reference(*rows, *exact, table, positions, scale=0.1, **options)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(out.double(), expected.double(), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(mine, exact.to(dtype), rtol=0, atol=0, equal_nan=True)
