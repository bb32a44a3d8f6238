"""Handles of tensors across processes, as TensorRT-LLM's workers read them, and the engine on the real library.

The first needs a GPU alone. The engine's test is skipped where tensorrt_llm is not installed; it has not run yet.
"""

import base64
import pickle
from importlib.util import find_spec

import pytest
import torch
import torch.multiprocessing as mp
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests import tiny
from tests.fake_trtllm import push
from trainers.config_generation import TRTLLMConfig
from trainers.engines import Sampling, trtllm_api

pytestmark = pytest.mark.gpu


def read(blob: str, queue) -> None:
    """As WorkerExtension.update_weights: the seventh argument becomes the reader's own device."""
    found = {}
    for name, (rebuild, args) in pickle.loads(base64.b64decode(blob)):
        own = list(args)
        own[6] = torch.cuda.current_device()
        found[name] = rebuild(*own).float().cpu().tolist()
    queue.put(found)


def test_a_bucket_of_handles_is_read_in_another_process():
    whole = torch.arange(12, device="cuda", dtype=torch.float32)
    bucket = [("a", whole), ("b", whole[4:].view(2, 4)), ("c", torch.full((3,), 0.5, device="cuda").bfloat16())]
    torch.cuda.synchronize()
    context = mp.get_context("spawn")
    queue = context.Queue()
    reader = context.Process(target=read, args=(trtllm_api.packed_handles(bucket), queue))
    reader.start()
    assert queue.get(timeout=60) == {name: tensor.float().cpu().tolist() for name, tensor in bucket}
    reader.join(60)
    assert reader.exitcode == 0


def test_the_current_gpu_is_named_as_the_environment_does(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert trtllm_api.physical_gpu() == str(torch.cuda.current_device())


def scored(model, prompt: list[int], response: list[int], temperature: float) -> list[float]:
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response], device="cuda")).logits[0].double() / temperature
    logprobs = logits.log_softmax(-1)
    return [float(logprobs[len(prompt) - 1 + i, token]) for i, token in enumerate(response)]


@pytest.mark.timeout(1200)
@pytest.mark.skipif(find_spec("tensorrt_llm") is None, reason="tensorrt_llm is not installed")
def test_the_real_library_generates_with_the_weights_of_each_update(tmp_path):
    from trainers.engines.trtllm import TRTLLMEngine

    config, tokenizer = (kind.from_pretrained(tiny.tiny_model()) for kind in (AutoConfig, AutoTokenizer))
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}  # a size that its kernels have
    config.update({"hidden_size": 256, "intermediate_size": 512, **heads})
    model = AutoModelForCausalLM.from_config(config).to("cuda", torch.bfloat16).eval()
    config.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    cfg = TRTLLMConfig(free_gpu_memory_fraction=0.05)
    engine = TRTLLMEngine(
        tmp_path, tokenizer, cfg, max_seq_len=64, max_batch_size=8, dtype=torch.bfloat16, timeout_s=600
    )
    prompts, seeds = [[2, 3], [4], [5, 6, 7, 8], [4]], [1, 2, 3, 4]
    raw_only = engine.capabilities().raw_logprobs_only
    try:
        for version in (1, 2):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.05 * torch.randn_like(parameter))
            if version == 2:
                engine.sleep()
                engine.wake("weights")
            push(engine, model, version)
            engine.wake("kv")
            for temperature in (1.0,) if raw_only else (1.0, 0.7):
                sampling = Sampling(8, temperature=temperature, stop_token_ids=(9, 10))
                for prompt, c in zip(prompts, engine.generate(prompts, sampling, seeds), strict=True):
                    assert c.weight_version == version
                    assert (c.tokens[-1] in (1, 9, 10)) == (c.finish == "stop")
                    assert c.logprobs == pytest.approx(scored(model, prompt, c.tokens, temperature), abs=0.1)
    finally:
        engine.close()
