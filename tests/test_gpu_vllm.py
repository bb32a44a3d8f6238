"""The real vllm on one GPU, with a small random Qwen2 in bfloat16. See docs/engines_vllm.md for what ran where."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from trainers.engines import Sampling, TensorSpec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(find_spec("vllm") is None or not torch.cuda.is_available(), reason="needs vllm and a GPU"),
]

PROMPTS = [[5, 6, 7], [9] * 5, [11, 12], [100]] * 4
SEEDS = list(range(20, 36))
FREE = Sampling(max_new_tokens=16, ignore_eos=True)
SHAPE = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class Tokenizer:
    eos_token_id = 2

    def decode(self, ids):
        return "".join(f"<{i}>" for i in ids)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen2Config(**SHAPE, tie_word_embeddings=True)).to("cuda", torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():  # biases too
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    model.folder = tmp_path_factory.mktemp("qwen2")
    model.save_pretrained(model.folder)
    return model.eval()


@pytest.fixture(scope="module")
def engine(model):
    from trainers.config_generation import VLLMConfig
    from trainers.engines.vllm import VLLMEngine

    cfg = VLLMConfig(gpu_memory_utilization=0.2, enforce_eager=True)
    engine = VLLMEngine(
        model.folder, Tokenizer(), cfg, max_model_len=256, max_batch_size=8, dtype=torch.bfloat16, timeout_s=120
    )
    push(engine, model, 1)
    yield engine
    engine.close()
    engine.close()


def push(engine, model, version, parts=2):
    """One full update, each tensor overwritten as soon as the engine has it. Returns seconds."""
    weights = [(name, p.detach()) for name, p in model.named_parameters()]
    torch.cuda.synchronize()
    start = time.perf_counter()
    engine.begin_update(version, {name: TensorSpec(tuple(p.shape), p.dtype) for name, p in weights})
    for part in range(parts):
        bucket = [(name, tensor.clone()) for name, tensor in weights[part::parts]]
        engine.put(bucket)
        for _, tensor in bucket:
            tensor.fill_(7.0)
    engine.end_update()
    torch.cuda.synchronize()
    return time.perf_counter() - start


@torch.no_grad()
def change(model):
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=0.02)


@torch.no_grad()
def errors(model, completions, sampling, prompts=PROMPTS):
    """|difference| of each token's log-prob to transformers', in bfloat16 both, in units of the logits' last bit."""
    found = []
    for prompt, c in zip(prompts, completions, strict=True):
        logits = model(torch.tensor([prompt + c.tokens], device="cuda")).logits[0, len(prompt) - 1 : -1].double()
        logits[: sampling.min_new_tokens, list(sampling.stop_token_ids)] = -torch.inf
        right = (logits / sampling.temperature).log_softmax(-1)
        last_bit = float(logits[logits.isfinite()].abs().max()) / sampling.temperature * 2**-8
        found += [abs(float(right[i, t]) - c.logprobs[i]) / last_bit for i, t in enumerate(c.tokens)]
    return found


def assert_close(model, completions, sampling, version, prompts=PROMPTS):
    found = errors(model, completions, sampling, prompts)
    mean, largest = sum(found) / len(found), max(found)
    assert mean < 1 and largest < 8, (mean, largest)
    assert {c.weight_version for c in completions} == {version}


@pytest.mark.parametrize(
    "sampling",
    [FREE, replace(FREE, temperature=0.7), replace(FREE, min_new_tokens=16, stop_token_ids=tuple(range(3, 100)))],
    ids=["plain", "temperature", "min_new_tokens"],
)
def test_logprobs_are_of_the_sampling_distribution(engine, model, sampling):
    assert_close(model, engine.generate(PROMPTS, sampling, SEEDS), sampling, engine.version)


def test_top_k_and_penalty_have_processed_logprobs(engine):
    """All of the probability is on top_k tokens: by chance alone each log-prob would be near -7."""
    for c in engine.generate(PROMPTS, replace(FREE, top_k=2, repetition_penalty=1.2), SEEDS):
        assert min(c.logprobs) > -2


def test_seeds_are_reproducible_and_independent_per_request(engine):
    first, second, again = engine.generate([[4]] * 3, FREE, [1, 2, 1])
    assert first.tokens == again.tokens != second.tokens


def test_stop_tokens_and_strings_are_kept(engine):
    stops = tuple(range(3, 120))  # vLLM holds back at most 128
    for c in engine.generate(PROMPTS, replace(FREE, stop_token_ids=stops, min_new_tokens=3), SEEDS):
        assert (c.finish == "stop") == (c.tokens[-1] in stops) and len(c.tokens) >= 3
        assert not set(stops) & set(c.tokens[:-1])
    free = engine.generate([[4]], FREE, [3])[0]
    cut = engine.generate([[4]], replace(FREE, stop_strings=(f"<{free.tokens[4]}>",)), [3])[0]
    assert cut.finish == "stop" and cut.tokens == free.tokens[: free.tokens.index(free.tokens[4]) + 1]


def test_greedy(engine, model):
    c = engine.generate([[4, 5]], replace(FREE, greedy=True), [0])[0]
    with torch.no_grad():
        logits = model(torch.tensor([[4, 5, *c.tokens]], device="cuda")).logits[0, 1:-1].float()
    chosen = logits.gather(-1, torch.tensor(c.tokens, device="cuda")[:, None])[:, 0]
    assert float((logits.max(-1).values - chosen).max()) < 0.05  # equal but for bfloat16


def test_two_refits_and_no_prefix_is_older(engine, model):
    for version in (2, 3):
        engine.generate(PROMPTS, FREE, SEEDS)
        change(model)
        print(f"refit {version}: {1e3 * push(engine, model, version, parts=3):.1f} ms")
        assert_close(model, engine.generate(PROMPTS, FREE, SEEDS), FREE, version)


def test_a_half_made_update_poisons_until_a_full_one(engine, model):
    weights = [(name, p.detach()) for name, p in model.named_parameters()]
    engine.begin_update(4, {name: TensorSpec(tuple(p.shape), p.dtype) for name, p in weights})
    engine.put(weights[:3])
    engine.abort_update()
    with pytest.raises(RuntimeError, match="an update was begun and not ended"):
        engine.generate(PROMPTS, FREE, SEEDS)
    change(model)
    push(engine, model, 5)
    assert_close(model, engine.generate(PROMPTS, FREE, SEEDS), FREE, 5)


def test_sleep_frees_and_the_order_of_a_step_works(engine, model):
    before = torch.cuda.mem_get_info()[0]
    engine.sleep()
    freed = torch.cuda.mem_get_info()[0] - before
    print(f"sleep frees {freed / 2**30:.1f} GiB")
    assert freed > 2**30
    engine.wake("weights")
    change(model)
    push(engine, model, 6)
    engine.wake("kv")
    assert_close(model, engine.generate(PROMPTS, FREE, SEEDS), FREE, 6)
    engine.sleep(keep_weights=True)
    engine.wake("weights")
    engine.wake("kv")
    assert_close(model, engine.generate(PROMPTS, FREE, SEEDS), FREE, 6)


def test_timeout(engine, monkeypatch):
    monkeypatch.setattr(engine, "timeout_s", 1e-6)
    with pytest.raises(TimeoutError, match=r"policy.generation.timeout_s"):
        engine.generate(PROMPTS, replace(FREE, max_new_tokens=200), SEEDS)
    monkeypatch.setattr(engine, "timeout_s", 60)
    assert len(engine.generate(PROMPTS, FREE, SEEDS)) == len(PROMPTS)


def other_process(folder: str) -> None:
    """vllm in a process of its own, weights by CUDA IPC; a Llama whose head is its own, with CUDA graphs."""
    from trainers.config_generation import VLLMConfig
    from trainers.engines.vllm import VLLMEngine

    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE, tie_word_embeddings=False))
    model = model.to("cuda", torch.bfloat16).eval()
    model.save_pretrained(folder)
    engine = VLLMEngine(
        folder,
        Tokenizer(),
        VLLMConfig(gpu_memory_utilization=0.2, in_process=False),
        max_model_len=256,
        max_batch_size=8,
        timeout_s=300,
    )
    report = {"transport": engine.capabilities().transport, "refit_ms": []}
    for version in (1, 2):
        change(model)
        report["refit_ms"].append(1e3 * push(engine, model, version, parts=3))
        assert_close(model, engine.generate(PROMPTS, FREE, SEEDS), FREE, version)
    engine.sleep()
    engine.wake("weights")
    change(model)
    push(engine, model, 3)
    engine.wake("kv")
    assert_close(model, engine.generate(PROMPTS, FREE, SEEDS), FREE, 3)
    engine.close()
    print("REPORT" + json.dumps(report))


def test_weights_by_cuda_ipc_into_another_process_with_cuda_graphs(tmp_path):
    command = [sys.executable, "-m", "tests.test_gpu_vllm", str(tmp_path / "llama")]
    run = subprocess.run(
        command, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=400, check=False
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-6000:]
    report = json.loads(run.stdout.rpartition("REPORT")[2].splitlines()[0])
    print(report)
    assert report["transport"] == "cuda_ipc"


if __name__ == "__main__":
    other_process(sys.argv[1])
