"""Continuous batching over a paged cache, on a CPU (where a step is no CUDA graph): the same as batch by batch."""

import copy

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests import tiny
from trainers.engines import Sampling, steps
from trainers.engines.continuous import ContinuousBatching
from trainers.engines.native import NativeEngine
from trainers.engines.pages import Pages
from trainers.engines.steps import Graphs, batch_sizes

SHAPE = {"vocab_size": 16, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}  # fmt: skip
MODELS = {
    "llama": (transformers.LlamaConfig, {}),
    "qwen2": (transformers.Qwen2Config, {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 32, "tie_word_embeddings": True}),
    "gemma": (transformers.GemmaConfig, {"head_dim": 16}),
    "gemma2": (transformers.Gemma2Config, {"head_dim": 16, "sliding_window": 20}),
    "gemma3": (transformers.Gemma3TextConfig, {"head_dim": 16, "sliding_window": 20}),
    "mistral": (transformers.MistralConfig, {"sliding_window": 20}),
    "gpt2": (transformers.GPT2Config, {"num_key_value_heads": 4}),
}
# Two are asked of twice; some end at a page's end, some go over several.
PROMPTS = [[2, 3], [4], [5, 6, 7, 8] * 20, [9, 10], [4], [4], [5, 6, 7, 8] * 20, [2] * 64]
SEEDS = list(range(10, 18))


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(tiny.tiny_model())


def model(name: str):
    torch.manual_seed(0)
    config, options = MODELS[name]
    return AutoModelForCausalLM.from_config(config(**(SHAPE | options))).eval()


def both(name: str, tokenizer, **options):
    one = model(name)
    ours = NativeEngine(copy.deepcopy(one), tokenizer, continuous=True, **options)
    assert ours.continuous is not None
    return ours, NativeEngine(one, tokenizer)


def assert_equal(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        assert (a.tokens, a.finish) == (b.tokens, b.finish)
        assert a.logprobs == pytest.approx(b.logprobs, abs=2e-6)


@pytest.mark.parametrize("name", MODELS)
def test_every_architecture_samples_as_without_pages(name, tokenizer):
    ours, theirs = both(name, tokenizer, max_batch_size=3)
    sampling = Sampling(40, ignore_eos=True)
    prompts, seeds = PROMPTS[:4], SEEDS[:4]
    assert_equal(ours.generate(prompts, sampling, seeds), theirs.generate(prompts, sampling, seeds))


def test_every_way_of_sampling_samples_as_without_pages(tokenizer):
    """One engine after the other option: what it keeps on the device must not leak from call to call."""
    ours, theirs = both("llama", tokenizer, max_batch_size=3)
    for sampling in (
        Sampling(6),
        Sampling(70, ignore_eos=True),
        Sampling(30, stop_token_ids=(6,), min_new_tokens=3),
        Sampling(20, temperature=0.7, top_k=5, top_p=0.9, repetition_penalty=1.3),
        Sampling(9, greedy=True),
        Sampling(100, ignore_eos=True, stop_strings=("w9",)),
        Sampling(30, stop_strings=("w9",), min_new_tokens=5),
        Sampling(1),
    ):
        assert_equal(ours.generate(PROMPTS, sampling, SEEDS), theirs.generate(PROMPTS, sampling, SEEDS))
        pages = ours.continuous.pages
        assert len(pages.free) == pages.count and not any(pages.owners)


def test_a_prompt_is_computed_once_for_all_its_samples(tokenizer, monkeypatch):
    ours, _ = both("llama", tokenizer, max_batch_size=2)
    computed = []
    prefill = ContinuousBatching._prefill
    record = lambda self, groups: computed.extend(group.prompt for group in groups) or prefill(self, groups)  # noqa: E731
    monkeypatch.setattr(ContinuousBatching, "_prefill", record)
    ours.generate([[4, 5]] * 5 + [[6]] * 2, Sampling(3, ignore_eos=True), range(7))
    assert computed == [(4, 5), (6,)]


def test_samples_share_the_full_pages_of_their_prompt(tokenizer, monkeypatch):
    ours, _ = both("llama", tokenizer, max_batch_size=4)
    most = []
    decode = ContinuousBatching._decode
    record = lambda self: most.append(self.pages.count - len(self.pages.free)) or decode(self)  # noqa: E731
    monkeypatch.setattr(ContinuousBatching, "_decode", record)
    ours.generate([[7] * 130] * 4, Sampling(3, ignore_eos=True), range(4))
    assert max(most) == 2 + 4 * 1  # two full pages for all, and each one's own for the rest of the prompt and response


def test_a_small_cache_serves_all_requests_in_turns(tokenizer):
    a_page = 2 * 2 * 64 * 2 * 16 * 4  # layers, keys and values, tokens, heads, head size, bytes
    ours, theirs = both("llama", tokenizer, kv_cache_gb=6.5 * a_page / 2**30)
    sampling = Sampling(90, ignore_eos=True)
    assert_equal(ours.generate(PROMPTS, sampling, SEEDS), theirs.generate(PROMPTS, sampling, SEEDS))
    assert ours.continuous.pages.count == 6


def test_a_cache_that_no_response_fits_into_names_the_key(tokenizer):
    ours, _ = both("llama", tokenizer, kv_cache_gb=1e-6)
    with pytest.raises(MemoryError, match=r"policy\.generation\.kv_cache_gb"):
        ours.generate([[4]], Sampling(500), [0])


def test_a_batch_that_fails_gives_all_pages_back(tokenizer):
    ours, _ = both("llama", tokenizer, max_batch_size=3)
    with torch.no_grad():
        ours.model.lm_head.weight[3] = torch.nan
    with pytest.raises(FloatingPointError, match="not finite"):
        ours.generate(PROMPTS, Sampling(8), SEEDS)
    pages = ours.continuous.pages
    assert len(pages.free) == pages.count and not any(pages.owners)


def test_an_architecture_that_answers_otherwise_is_generated_batch_by_batch(tokenizer, capsys):
    one = model("llama")
    attention = type(one.model.layers[0].self_attn)
    odd = type(
        "OddAttention", (attention,), {"forward": lambda self, hidden_states, **_: (hidden_states.cumsum(1), None)}
    )
    for layer in one.model.layers:
        layer.self_attn.__class__ = odd  # what a token sees of those before it does not pass through a cache
    engine = NativeEngine(one, tokenizer, continuous=True)
    assert engine.continuous is None
    assert "batch by batch, without CUDA graphs: LlamaForCausalLM gives other logits" in capsys.readouterr().out


def rope(kind: str) -> dict:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}}


@pytest.mark.parametrize(
    ("config", "options", "reason"),
    [
        # None of these differ in so short a sequence as the engine tries.
        (transformers.LlamaConfig, rope("dynamic"), "rotary embeddings of type dynamic"),
        (transformers.Llama4TextConfig, {"intermediate_size_mlp": 96, "num_local_experts": 2}, "chunked_attention"),
        (transformers.PhimoeConfig, {"sliding_window": 400, "num_local_experts": 2}, "a sliding window in its mask"),
        (transformers.GptOssConfig, {"num_local_experts": 4, "head_dim": 16}, "asks for s_aux"),
    ],
    ids=lambda x: getattr(x, "model_type", None),
)
def test_what_pages_do_not_have_is_refused_by_name(config, options, reason, tokenizer, capsys):
    engine = NativeEngine(AutoModelForCausalLM.from_config(config(**SHAPE, **options)), tokenizer, continuous=True)
    assert engine.continuous is None and reason in capsys.readouterr().out


def test_heads_that_the_cache_is_not_made_for_are_refused(tokenizer, capsys):
    one = model("llama")
    one.config.num_key_value_heads = 4  # the kernel would read past the two that there are
    assert NativeEngine(one, tokenizer, continuous=True).continuous is None
    assert "has 2 heads of sizes (16, 16, 16) in layer 0, and the cache 4 of 16" in capsys.readouterr().out


def test_a_reason_of_any_kind_leads_to_batches(tokenizer, capsys):
    one = model("llama")
    one.model.layers[1].self_attn.layer_idx = 2
    assert NativeEngine(one, tokenizer, continuous=True).continuous is None
    assert "batch by batch, without CUDA graphs: index 2 is out of bounds" in capsys.readouterr().out


def test_a_model_that_no_graph_can_be_made_of_samples_all_the_same(tokenizer, monkeypatch, capsys):
    ours, theirs = both("llama", tokenizer, max_batch_size=3)
    tried, freed = [], []

    def captured(self, once):
        tried.append(once())
        raise RuntimeError("called a synchronizing CUDA operation\nmore")

    monkeypatch.setattr(Graphs, "_captured", captured)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(steps, "_free_generator", freed.append)
    ours.continuous.graphs.capture = True
    for _ in range(2):
        assert_equal(ours.generate(PROMPTS, Sampling(9), SEEDS), theirs.generate(PROMPTS, Sampling(9), SEEDS))
    assert len(tried) == len(freed) == 1
    assert capsys.readouterr().out == "generation: without CUDA graphs: called a synchronizing CUDA operation\n"


def test_a_graph_serves_all_calls_that_differ_in_what_the_host_does(tokenizer, monkeypatch):
    ours, theirs = both("llama", tokenizer, max_batch_size=2)
    made = []
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(Graphs, "_captured", lambda self, once: made.append(once) or once)
    ours.continuous.graphs.capture = True
    host = [Sampling(9, stop_token_ids=(1,)), Sampling(8, stop_strings=("w9",)), Sampling(9)]
    for sampling in (*host, Sampling(9, temperature=0.5)):
        assert_equal(ours.generate(PROMPTS, sampling, SEEDS), theirs.generate(PROMPTS, sampling, SEEDS))
    assert len(made) == 2 * 2  # batches of one and two, at two temperatures


def test_no_step_is_made_after_the_last_response_has_ended(tokenizer, monkeypatch):
    ours, _ = both("llama", tokenizer, max_batch_size=2)
    steps = []
    step = ContinuousBatching._step
    monkeypatch.setattr(ContinuousBatching, "_step", lambda self, *given: steps.append(given) or step(self, *given))
    ours.generate([[4], [5]], Sampling(12, ignore_eos=True), [0, 1])
    assert len(steps) == 11  # the first token comes from the prompt's own pass


def test_calls_of_two_kinds_that_take_turns_keep_the_state(tokenizer):
    ours, _ = both("llama", tokenizer, max_batch_size=2)
    kinds = [([[4]], Sampling(100, ignore_eos=True)), ([[5] * 150], Sampling(5, repetition_penalty=1.2))]
    held = []
    for prompts, sampling in kinds * 2:
        ours.generate(prompts, sampling, [0])
        held.append(ours.continuous.state)
    assert held[1] is held[2] is held[3]


def test_the_cache_is_as_large_as_what_runs_together(tokenizer):
    ours, _ = both("llama", tokenizer, max_batch_size=2)
    ours.generate([[i % 16, i // 16] for i in range(40)], Sampling(3), range(40))
    assert ours.continuous.pages.count == 2 + 3  # two responses, their prompts, and one whose other samples wait


def test_a_cache_that_suffices_stays_when_memory_is_short(tokenizer, monkeypatch):
    ours, theirs = both("llama", tokenizer, max_batch_size=4)
    ours.generate([[4]], Sampling(3), [0])
    pages = ours.continuous.pages
    monkeypatch.setattr(ContinuousBatching, "_free_bytes", lambda self: 0)
    prompts = [[2], [3], [5]]
    assert_equal(ours.generate(prompts, Sampling(3), range(3)), theirs.generate(prompts, Sampling(3), range(3)))
    assert ours.continuous.pages is pages


def test_pages_go_back_when_nobody_holds_them():
    pages = Pages(3, layers=1, heads=1, head_dim=16, dtype=torch.float32, device=torch.device("cpu"))
    mine = pages.take(2)
    pages.hold(mine[:1])
    pages.drop(mine)
    assert pages.free == [3, mine[1]] and 0 not in mine
    pages.drop(mine[:1])
    assert sorted(pages.free) == [1, 2, 3]


def test_graphs_are_made_for_few_sizes():
    assert batch_sizes(1) == [1]
    assert batch_sizes(24) == [1, 2, 4, 8, 16, 24]
    assert batch_sizes(64) == [1, 2, 4, 8, 16, 32, 64]
