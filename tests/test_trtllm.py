"""The TensorRT-LLM engine on a stand-in that refuses what the real one would not survive (tests/fake_trtllm.py)."""

import base64
import inspect
import json
import math
import os
import pickle
import shutil
import sys
from dataclasses import MISSING, fields
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as torch_dist
import torch.multiprocessing as mp
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests import fake_trtllm, tiny
from tests.fake_trtllm import NEW, OLD, AsyncLLM, Logprob, executor, make_trtllm_engine, push
from tests.megatron_models import build_hf
from tests.test_engine_contract import PROMPTS, SEEDS
from trainers import dist
from trainers.arithmetic import ConfigError, check, longest_request
from trainers.config_generation import TRTLLMConfig
from trainers.engines import Sampling, TensorSpec, trtllm_api
from trainers.engines.build import make_engine
from trainers.engines.trtllm import TRTLLMEngine
from trainers.environments import Prompt
from trainers.offload import check_device
from trainers.prompts import TokenizedPrompt
from trainers.refit import refit
from trainers.rollout import generate

FREE = Sampling(max_new_tokens=6, ignore_eos=True)
GPU0, GPU1 = "GPU-00000000", "GPU-00000001"


def scored(model, prompt: list[int], response: list[int], temperature: float = 1.0) -> list[float]:
    """Log-probs of a response by one plain forward pass."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response])).logits[0] / temperature
    logprobs = torch.log_softmax(logits.double(), -1)
    return [float(logprobs[len(prompt) - 1 + i, token]) for i, token in enumerate(response)]


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(tiny.tiny_model(), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(tiny.tiny_model())


@pytest.fixture
def make(model, tokenizer, monkeypatch):
    engines = []

    def engine(**options):
        engines.append(make_trtllm_engine(model, tokenizer, monkeypatch, **options))
        return engines[-1]

    yield engine
    for engine in engines:
        engine.close()


def manifest(model):
    return {name: TensorSpec(tuple(p.shape), p.dtype) for name, p in model.named_parameters()}


# Generating


@pytest.mark.parametrize(
    "sampling",
    [Sampling(6), Sampling(6, temperature=0.7), Sampling(6, temperature=1.6, min_new_tokens=4)],
    ids=["plain", "temperature", "min_new_tokens"],
)
def test_logprobs_are_of_the_sampling_distribution(make, model, sampling):
    for prompt, completion in zip(PROMPTS, make().generate(PROMPTS, sampling, SEEDS), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + completion.tokens])).logits[0, len(prompt) - 1 : -1].double()
        logits[: sampling.min_new_tokens, 1] = -math.inf  # 1 is </s>
        expected = (logits / sampling.temperature).log_softmax(-1)
        right = [float(expected[i, token]) for i, token in enumerate(completion.tokens)]
        assert completion.logprobs == pytest.approx(right, abs=1e-5)
        assert len(completion.tokens) >= sampling.min_new_tokens and completion.weight_version == 0


def test_top_p_and_top_k_have_processed_logprobs(make):
    completion = make().generate([[4]], Sampling(1, top_k=1), [3])[0]
    assert completion.logprobs == [0.0]  # the only one left
    assert executor().requests[-1][1].logprobs_mode.name == "PROCESSED"


@pytest.mark.parametrize(
    "changed", [{"temperature": 0.7}, {"top_p": 0.9}, {"top_k": 4}, {"min_new_tokens": 2}], ids=lambda x: next(iter(x))
)
def test_raw_logprobs_are_refused_where_they_are_not_of_the_sampled_distribution(make, model, changed):
    engine = make(version=OLD)
    assert engine.capabilities().raw_logprobs_only
    with pytest.raises(
        ValueError, match=f"own distribution only.*{next(iter(changed))}={next(iter(changed.values()))}"
    ):
        engine.generate([[4]], Sampling(2, **changed), [0])
    completion = engine.generate([[4]], FREE, [0])[0]
    assert completion.logprobs == pytest.approx(scored(model, [4], completion.tokens), abs=1e-5)


def test_greedy_has_the_models_logprobs_or_is_refused(make, model):
    engine = make()
    completion = engine.generate([[4, 5]], Sampling(4, greedy=True, ignore_eos=True), [0])[0]
    for i, token in enumerate(completion.tokens):
        with torch.no_grad():
            assert token == int(model(torch.tensor([[4, 5, *completion.tokens[:i]]])).logits[0, -1].argmax())
    assert completion.logprobs == pytest.approx(scored(model, [4, 5], completion.tokens), abs=1e-5)
    with pytest.raises(ValueError, match="greedy responses have log-probs of the model's own"):
        engine.generate([[4, 5]], Sampling(4, greedy=True, temperature=0.7), [0])


def test_repetition_penalty_is_applied_or_refused(make, model):
    completion = make().generate([[4, 5]], Sampling(1, repetition_penalty=2.0), [5])[0]
    with torch.no_grad():
        logits = model(torch.tensor([[4, 5]])).logits[0, -1].double()
    for seen in (4, 5):
        logits[seen] = logits[seen] / 2 if logits[seen] > 0 else logits[seen] * 2
    assert completion.logprobs == pytest.approx([float(logits.log_softmax(-1)[completion.tokens[0]])], abs=1e-5)
    with pytest.raises(ValueError, match="does not apply repetition_penalty=2.0"):
        make(version=OLD).generate([[4, 5]], Sampling(1, repetition_penalty=2.0), [5])


def test_min_new_tokens_needs_one_stop_token(make):
    with pytest.raises(ValueError, match=r"exactly one token that ends a response.*\[1, 7\]"):
        make().generate([[4]], Sampling(4, min_new_tokens=2, stop_token_ids=(7,)), [0])


def test_order_is_kept_and_each_request_has_its_seed(make):
    engine = make()
    together = engine.generate(PROMPTS, FREE, SEEDS)
    assert [params.seed for _, params in executor().requests] == SEEDS
    alone = [engine.generate([p], FREE, [s])[0] for p, s in zip(PROMPTS, SEEDS, strict=True)]
    assert together == alone
    assert together[1].tokens != together[4].tokens  # one prompt, two seeds
    assert not engine.capabilities().row_seeds  # the real sampler draws for a whole batch
    engine.generate([[4]], FREE, [2**63 - 1])  # the largest seed of hash64


def test_stop_token_is_kept_and_said(make):
    for completion in make().generate(PROMPTS, Sampling(400, stop_token_ids=(6, 7, 8)), SEEDS):
        ends = {1, 6, 7, 8}
        assert completion.finish == "stop"
        assert completion.tokens[-1] in ends and not ends & set(completion.tokens[:-1])
        assert len(completion.logprobs) == len(completion.tokens)
    assert executor().requests[0][1].stop_token_ids == [1, 6, 7, 8]  # the tokenizer's own end token among them


def test_every_end_token_of_the_folder_ends_a_response(make, tmp_path):
    for file in tiny.tiny_model().iterdir():
        if file.name.endswith(".json"):
            (tmp_path / file.name).write_text(file.read_text())
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 5]}')
    make(folder=tmp_path).generate([[4]], Sampling(2), [0])
    assert executor().requests[0][1].stop_token_ids == [1, 5]


def test_a_response_cut_at_the_limit_says_so_and_ignore_eos_goes_on(make):
    for completion in make().generate(PROMPTS, Sampling(12, ignore_eos=True), SEEDS):
        assert completion.finish == "length" and len(completion.tokens) == 12
    assert executor().requests[0][1].end_id == -1  # None would be the tokenizer's


def test_stop_strings_end_a_response_and_stay_in_it(make):
    for completion in make().generate(
        PROMPTS[:3], Sampling(60, ignore_eos=True, stop_strings=("w9", "w8", "w7")), SEEDS[:3]
    ):
        ends = {7, 8, 9}
        assert completion.finish == "stop"
        assert completion.tokens[-1] in ends and not ends & set(completion.tokens[:-1])
        assert len(completion.logprobs) == len(completion.tokens)


def test_the_sampled_tokens_logprob_is_found_among_others_and_as_a_plain_number(make, model):
    engine = make()

    def crowded(output):
        output.logprobs = [{63: Logprob(-99.0), **entry} for entry in output.logprobs]

    def plain(output):
        output.logprobs = [entry[t].logprob for entry, t in zip(output.logprobs, output.token_ids, strict=True)]

    for mangle in (crowded, plain):
        executor().mangle = mangle
        completion = engine.generate([[4]], FREE, [1])[0]
        assert completion.logprobs == pytest.approx(scored(model, [4], completion.tokens), abs=1e-5)


@pytest.mark.parametrize(
    ("mangle", "said"),
    [
        (lambda output: setattr(output, "logprobs", None), "6 tokens with no log-probs"),
        (lambda output: output.token_ids.pop(), "after 5 tokens, at none of the tokens that end one"),
        (lambda output: output.token_ids.clear(), "answered 0 tokens"),
    ],
    ids=["no logprobs", "stop token stripped", "empty"],
)
def test_an_answer_that_breaks_the_contract_is_an_error(make, mangle, said):
    engine = make()
    executor().mangle = mangle
    with pytest.raises(RuntimeError, match=said):
        engine.generate([[4]], FREE, [1])


def test_a_response_shorter_than_min_new_tokens_is_an_error(make):
    engine = make()

    def early(output):
        output.token_ids[:] = [1]

    executor().mangle = early
    with pytest.raises(RuntimeError, match="answered 1 tokens, fewer than min_new_tokens=3"):
        engine.generate([[4]], Sampling(6, min_new_tokens=3), [1])


def test_prompts_beyond_the_engines_length_are_refused(make):
    with pytest.raises(ValueError, match="exceed the 8 that the engine holds"):
        make(max_seq_len=8).generate([[4] * 3], FREE, [0])


# Weights


def test_nothing_generates_before_the_first_weights(make):
    engine = make(updated=False)
    with pytest.raises(RuntimeError, match="complete weights: none were sent yet"):
        engine.generate(PROMPTS, FREE, SEEDS)


def test_two_updates_in_a_row_reach_the_completions_and_no_prefix_is_older(make):
    policy = tiny.policy()
    engine = make()
    for version in (1, 2):
        with torch.no_grad():
            for parameter in policy.model.parameters():
                parameter.add_(0.2 * torch.randn_like(parameter))
        assert refit(policy, engine, version) == sum(p.nbytes for p in policy.model.parameters())
        # The same prompt each time: a block of the cache under older weights would be found.
        completion = engine.generate([[4, 5]], FREE, [3])[0]
        assert completion.weight_version == version
        assert completion.logprobs == pytest.approx(scored(policy.model, [4, 5], completion.tokens), abs=1e-5)
    assert executor().payloads[-1] is None and set(executor().payloads[-2]) == {GPU0}


def test_tensors_may_be_overwritten_once_put_returns(make, model):
    engine = make(updated=False)
    weights = [(name, p.detach().clone()) for name, p in model.named_parameters()]
    engine.begin_update(1, manifest(model))
    for name, tensor in weights:
        engine.put([(name, tensor)])
        tensor.fill_(math.nan)
    engine.end_update()
    completion = engine.generate([[4, 5]], FREE, [3])[0]
    assert completion.logprobs == pytest.approx(scored(model, [4, 5], completion.tokens), abs=1e-5)


def test_tensors_that_are_not_contiguous_arrive(make, model):
    engine = make(updated=False)
    engine.begin_update(1, manifest(model))
    engine.put([(name, p.detach().t().contiguous().t()) for name, p in model.named_parameters()])
    engine.end_update()
    completion = engine.generate([[4, 5]], FREE, [3])[0]
    assert completion.logprobs == pytest.approx(scored(model, [4, 5], completion.tokens), abs=1e-5)


def test_experts_arrive_under_the_names_of_files(make, tmp_path):
    """As megatron-core's policy sends them: each expert apart, where the folder's model has a layer's in one tensor."""
    experts = build_hf("qwen3_moe")
    experts.save_pretrained(tmp_path)
    for path in tiny.tiny_model().glob("tokenizer*"):
        shutil.copy(path, tmp_path)
    engine = make(folder=tmp_path, updated=False)
    push(engine, experts, 1)
    completion = engine.generate([[4, 5]], FREE, [3])[0]
    assert completion.logprobs == pytest.approx(scored(experts, [4, 5], completion.tokens), abs=1e-5)


def test_the_manifest_is_checked_against_the_folders_model(make, model):
    engine, good = make(), manifest(model)
    first = next(iter(good))
    with pytest.raises(ValueError, match="unknown: .'other'"):
        engine.begin_update(1, good | {"other": good[first]})
    with pytest.raises(ValueError, match=f"{first} must be"):
        engine.begin_update(1, good | {first: TensorSpec((1, 2), torch.float32)})
    engine.generate([[4]], FREE, [0])  # nothing has happened


@pytest.mark.parametrize("version", [NEW, OLD])
def test_a_half_made_update_poisons_until_a_full_one(make, model, version):
    engine = make(version=version)
    engine.begin_update(1, manifest(model))
    engine.put([(n, torch.zeros_like(p)) for n, p in list(model.named_parameters())[:3]])
    with pytest.raises(RuntimeError, match="begun and not ended"):
        engine.generate(PROMPTS, FREE, SEEDS)
    engine.abort_update()
    assert ("abort_update_weights" in executor().calls) == (version == NEW)
    with pytest.raises(RuntimeError, match="begun and not ended"):
        engine.generate(PROMPTS, FREE, SEEDS)
    push(engine, model, 2)
    completion = engine.generate([[4, 5]], FREE, [3])[0]
    assert completion.weight_version == 2
    assert completion.logprobs == pytest.approx(scored(model, [4, 5], completion.tokens), abs=1e-5)


def test_a_failure_in_the_engine_aborts_the_update(make):
    policy, engine = tiny.policy(), make()
    executor().parked.add("model")  # memory that is gone, which the engine does not know of
    with pytest.raises(RuntimeError, match="memory that was released"):
        refit(policy, engine, 1)
    executor().parked.clear()
    with pytest.raises(RuntimeError, match="complete weights"):
        engine.generate([[4]], FREE, [0])


# Sleeping


@pytest.mark.parametrize("version", [NEW, OLD])
def test_sleep_and_wake_in_the_order_of_a_step(make, model, version):
    engine = make(version=version)
    before = engine.generate([[4, 5]], FREE, [3])[0]
    for step in (1, 2):
        engine.sleep()
        assert {"kv_cache", "model"} <= executor().parked
        assert not any(tag.startswith("_") for tag in executor().parked)
        with pytest.raises(RuntimeError, match="asleep"):
            engine.generate([[4, 5]], FREE, [3])
        engine.wake("weights")
        assert executor().parked == {"kv_cache"}
        push(engine, model, step)
        engine.wake("kv")
        assert not executor().parked
        after = engine.generate([[4, 5]], FREE, [3])[0]
        assert after.tokens == before.tokens and after.weight_version == step
    assert executor().calls.count("sleep") == executor().calls.count("wakeup") / 2 == 2


def test_weights_that_were_given_up_must_be_sent_again(make):
    engine = make()
    engine.sleep()
    engine.wake("weights")
    engine.wake("kv")
    with pytest.raises(RuntimeError, match="given up in sleep"):
        engine.generate([[4]], FREE, [0])


def test_kept_weights_generate_without_an_update_and_no_prefix_of_the_released_cache(make):
    engine = make()
    before = engine.generate([[4, 5]], FREE, [3])
    engine.sleep(keep_weights=True)
    assert executor().parked == {"kv_cache"}
    engine.wake("weights")
    engine.wake("kv")
    assert engine.generate([[4, 5]], FREE, [3]) == before


def test_reset_prefix_cache(make):
    engine = make()
    engine.generate([[4, 5]], FREE, [3])
    assert executor().prefixes
    engine.reset_prefix_cache()
    assert not executor().prefixes


# Time and end


def test_each_call_is_bounded_by_timeout_s(make, model, monkeypatch):
    engine = make(timeout_s=0.2)
    executor().delays["generate"] = 30
    with pytest.raises(TimeoutError, match=r"generate did not answer within policy.generation.timeout_s=0.2 seconds"):
        engine.generate(PROMPTS, FREE, SEEDS)
    del executor().delays["generate"]
    engine.generate([[4]], FREE, [0])  # what was late is aborted, not left in the way
    push(engine, model, 1)
    executor().delays["update_weights"] = 30
    with pytest.raises(TimeoutError, match="update_weights did not answer"):
        push(engine, model, 2)
    engine.abort_update()
    executor().delays["sleep"] = 30
    with pytest.raises(TimeoutError, match="release did not answer"):
        engine.sleep()
    monkeypatch.setitem(fake_trtllm.DELAYS, "setup_async", 30)
    with pytest.raises(TimeoutError, match="the start of AsyncLLM did not answer"):
        make(timeout_s=0.2)


def test_closing_twice_and_using_what_is_closed(make):
    engine = make()
    thread, llm = engine.loop.thread, AsyncLLM.last
    engine.close()
    engine.close()
    assert llm.closed and not thread.is_alive()
    with pytest.raises(RuntimeError, match="closed"):
        engine.generate([[4]], FREE, [0])


# Starting


@pytest.mark.parametrize("version", [NEW, OLD])
def test_the_constructor_gets_what_rl_needs(make, monkeypatch, version):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("MASTER_PORT", "29500")
    make(
        version=version, max_num_tokens=4096, kwargs={"kv_cache_config": {"max_tokens": 99}, "trust_remote_code": True}
    )
    given, where = executor().arguments, AsyncLLM.last.environment
    assert given["model"] == str(tiny.tiny_model()) and given["max_seq_len"] == given["max_input_len"] == 512
    assert given["max_num_tokens"] == 4096 and given["trust_remote_code"] is True
    cache = given["kv_cache_config"]
    assert (cache.enable_block_reuse, cache.free_gpu_memory_fraction, cache.max_tokens) == (True, 0.4, 99)
    if version == NEW:
        assert given["sleep_config"].restore_modes == {"kv_cache": "NONE", "model_weights": "NONE"}
    else:
        assert given["enable_sleep"] is True
    assert where["CUDA_VISIBLE_DEVICES"] == "0" and where["TLLM_RAY_FORCE_LOCAL_CLUSTER"] == "1"
    assert "SLURM_JOB_ID" not in where and "MASTER_PORT" not in where
    assert os.environ["SLURM_JOB_ID"] == "7" and "TLLM_RAY_FORCE_LOCAL_CLUSTER" not in os.environ


def test_a_gpu_that_cuda_visible_devices_renames(make, monkeypatch):
    monkeypatch.setattr(trtllm_api, "current_gpu", lambda: 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert trtllm_api.physical_gpu() == "6"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-4a,GPU-6b")
    with pytest.raises(ValueError, match="CUDA_VISIBLE_DEVICES=GPU-4a,GPU-6b: .* needs numbers"):
        trtllm_api.physical_gpu()
    monkeypatch.setattr(trtllm_api, "physical_gpu", lambda: "6")
    # A worker on another GPU than the rank's would read no handle: found at the start.
    with pytest.raises(RuntimeError, match=r"workers are on \['GPU-00000006'\], its ranks on \['GPU-00000000'\]"):
        make()


def test_kwargs_of_the_engines_own_and_unknown_ones_are_refused(make):
    with pytest.raises(ValueError, match="trtllm_cfg.kwargs: load_format is set by the engine"):
        make(kwargs={"load_format": "auto"})
    with pytest.raises(ValueError, match="kv_cache_config: expected a mapping, got 3"):
        make(kwargs={"kv_cache_config": 3})
    with pytest.raises(ValueError, match="invalid argument: tensor_paralel_size"):
        make(kwargs={"tensor_paralel_size": 2})


def test_an_installation_that_is_missing_broken_or_old_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt_llm", None)  # ModuleNotFoundError, as where there is none
    with pytest.raises(ImportError, match=r"fastppo\[trtllm\]"):
        trtllm_api.load_api()
    package = fake_trtllm.install(monkeypatch)
    package.__version__ = "1.1.0"
    with pytest.raises(ImportError, match=r"must be 1.2.0rc6 or later, got 1.1.0.*fastppo\[trtllm\]"):
        trtllm_api.load_api()

    def broken(name):
        raise RuntimeError("FlashInfer requires GPUs with sm75 or higher")

    monkeypatch.setattr(trtllm_api, "import_module", broken)
    with pytest.raises(ImportError, match=r"RuntimeError: FlashInfer.*fastppo\[trtllm\]"):
        trtllm_api.load_api()


# Settings


def settings(**overrides):
    return tiny.config(**{f"policy__generation__{key}": value for key, value in overrides.items()})


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"trtllm_cfg__max_num_tokens": 8}, "trtllm_cfg.max_num_tokens=8 has no effect with .*backend=native"),
        ({"trtllm_cfg__kwargs": "{a: 1}"}, "trtllm_cfg.kwargs={a: 1} has no effect"),
        ({"backend": "trtllm", "kv_cache_gb": 2.0}, "kv_cache_gb=2.0 has no effect with .*backend=trtllm"),
        ({"backend": "trtllm", "trtllm_cfg__tensor_parallel_size": 2}, "size=2 needs a multiple of 2 ranks"),
        ({"backend": "trtllm", "trtllm_cfg__max_seq_len": 3}, "max_seq_len=3 is less than the longest request"),
        ({"backend": "trtllm", "trtllm_cfg__free_gpu_memory_fraction": 1.0}, "=1.0: expected a number > 0 and < 1"),
    ],
    ids=["unused", "unused kwargs", "native's", "ranks", "length", "range"],
)  # fmt: skip
def test_settings_that_cannot_be_used(overrides, said):
    with pytest.raises(ConfigError, match=said):
        check(settings(**overrides))


def test_a_cpu_is_refused_before_a_model_loads():
    config = settings(backend="trtllm")
    config.cluster.device = "cpu"
    with pytest.raises(ConfigError, match="backend=trtllm needs a GPU, got cluster.device=cpu"):
        check(config)
    with pytest.raises(ConfigError, match="backend=trtllm needs a GPU, and torch sees none"):
        check_device(config, torch.device("cpu"))


@pytest.mark.skipif(find_spec("tensorrt_llm") is not None, reason="tensorrt_llm is installed")
def test_a_missing_library_is_refused_before_a_model_loads():
    with pytest.raises(ImportError, match=r"fastppo\[trtllm\]"):
        check_device(settings(backend="trtllm"), torch.device("cuda"))


def test_the_longest_request_is_of_training_or_validation():
    config = settings(max_new_tokens=16)
    config.data.max_prompt_length = 10
    assert longest_request(config) == 26
    config.policy.generation.val.max_new_tokens = 100
    assert longest_request(config) == 110


def test_a_rollout_has_the_trainers_own_logprobs(monkeypatch):
    fake_trtllm.install(monkeypatch)
    config = settings(backend="trtllm", dtype="float32", max_new_tokens=8, temperature=0.7)
    policy = tiny.policy(generation=config.policy.generation)
    engine = make_engine(policy, config, torch.bfloat16)
    assert isinstance(engine, TRTLLMEngine) and engine.max_seq_len == longest_request(config)
    assert executor().arguments["dtype"] == "float32" and executor().arguments["max_batch_size"] == 128
    refit(policy, engine, 4)
    prompts = [TokenizedPrompt(i, Prompt(""), (4, 5 + i)) for i in range(3)]
    batch = generate(engine, prompts, config.policy.generation, policy.tokenizer, samples_per_prompt=2, seed=7, step=4)
    assert batch.weight_version.tolist() == [4] * 6 and batch.group.tolist() == [0, 0, 1, 1, 2, 2]
    own = policy.score(batch, {"old_logprobs"})["old_logprobs"]
    torch.testing.assert_close(batch.rollout_logprobs[batch.mask], own[batch.mask], atol=1e-5, rtol=0)
    engine.close()


# Several ranks


def rank_of_two(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch_dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    model = AutoModelForCausalLM.from_pretrained(tiny.tiny_model(), dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(tiny.tiny_model())
    with pytest.MonkeyPatch.context() as monkeypatch:
        engine = make_trtllm_engine(model, tokenizer, monkeypatch, gpu=rank, tensor_parallel_size=2)
        assert engine.capabilities().devices == (GPU0, GPU1)
        leads = rank == 0
        assert (AsyncLLM.last is not None) == leads
        if leads:
            payload = executor().payloads[0]
            names = [[n for n, _ in pickle.loads(base64.b64decode(payload[uuid]))] for uuid in (GPU0, GPU1)]
            assert set(payload) == {GPU0, GPU1} and names[0] == names[1] and payload[GPU0] != payload[GPU1]
            assert AsyncLLM.last.environment["CUDA_VISIBLE_DEVICES"] == "0,1"
        mine = slice(0, 2) if leads else slice(2, 5)
        completions = engine.generate(PROMPTS[mine], FREE, SEEDS[mine])
        for prompt, completion in zip(PROMPTS[mine], completions, strict=True):
            assert completion.logprobs == pytest.approx(scored(model, prompt, completion.tokens), abs=1e-5)
        torch.save([c.tokens for c in completions], f"{folder}/rank{rank}.pt")
        assert len(engine.generate([[4]] if leads else [], FREE, [1] if leads else [])) == leads
        assert engine.generate([], FREE, []) == []
        with pytest.raises(ValueError, match=r"prompts\[0\]: its 600 tokens"):  # rank 1's, on both
            engine.generate([[4]] if leads else [[4] * 600], FREE, [0])
        engine.sleep()
        engine.wake("weights")
        push(engine, model, 5)
        engine.wake("kv")
        assert engine.generate([[4]], FREE, [0])[0].weight_version == 5
        if leads:
            executor().delays["reset_prefix_cache"] = 30
            engine.timeout_s = 0.1
        with pytest.raises(TimeoutError, match="reset_prefix_cache"):  # the leader's, on both
            engine.reset_prefix_cache()
        engine.close()
    dist.stop()


def test_two_ranks_are_one_engine(make, tmp_path):
    tiny.tiny_model()
    mp.start_processes(rank_of_two, args=(str(tmp_path),), nprocs=2, start_method="fork")
    tokens = [row for rank in (0, 1) for row in torch.load(tmp_path / f"rank{rank}.pt")]
    assert tokens == [c.tokens for c in make().generate(PROMPTS, FREE, SEEDS)]


# The stand-in


def described(function) -> list[list]:
    """[name, default] of each parameter but self, as the file has them."""
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    rows: list[list] = []
    for name, parameter in inspect.signature(function).parameters.items():
        default = "*" if parameter.default is parameter.empty else parameter.default
        default = list(default) if isinstance(default, tuple) else default
        rows.append([stars[parameter.kind] + name] if parameter.kind in stars else [name, default])
    return rows[1:]


SIGNATURES = json.loads((Path(__file__).parent / "trtllm_signatures.json").read_text())


@pytest.mark.parametrize("name", SIGNATURES["callables"])
def test_the_fakes_signatures_are_those_that_were_read(name):
    owner, method = name.split(".")
    assert described(getattr(getattr(fake_trtllm, owner), method)) == SIGNATURES["callables"][name]["parameters"]


def test_the_fakes_fields_and_tags_are_those_that_were_read(monkeypatch):
    fake_trtllm.install(monkeypatch)
    api = trtllm_api.load_api()
    for name, entry in SIGNATURES["fields"].items():
        defaults = {f.name: f.default for f in fields(getattr(api, name)) if f.default is not MISSING}
        assert entry["fields"].items() <= defaults.items(), name
    assert set(fake_trtllm.TAGS.values()) == set(SIGNATURES["tags"]["1.2"])
    assert set(fake_trtllm.NEW_TAGS.values()) == set(SIGNATURES["tags"]["added in 1.3"])
    assert set(SIGNATURES["names"]["LLM"]["names"]) == fake_trtllm.ARGUMENTS


def constructed(api) -> dict:
    return trtllm_api.constructor_arguments(
        api, "folder", TRTLLMConfig(max_num_tokens=8), max_seq_len=8, max_batch_size=4, dtype=torch.bfloat16
    )


@pytest.mark.parametrize("version", [NEW, OLD])
def test_every_argument_that_the_client_passes_was_read(monkeypatch, version):
    fake_trtllm.install(monkeypatch, version)
    api, names = trtllm_api.load_api(), {key: set(entry["names"]) for key, entry in SIGNATURES["names"].items()}
    given = constructed(api)
    placement = {row[0] for row in SIGNATURES["callables"]["AsyncLLM.__init__"]["parameters"]}
    assert set(given) <= names["LLM"] | placement | names["LLM of 1.3" if version == NEW else "LLM of 1.2"]
    assert {f.name for f in fields(given["cuda_graph_config"])} == names["CudaGraphConfig"]
    known = set(SIGNATURES["fields"]["SamplingParams"]["fields"])
    asked = [FREE] if version == OLD else [FREE, Sampling(2, 0.7, min_new_tokens=1, repetition_penalty=1.1)]
    for sampling in asked:
        passed = set(trtllm_api.sampling_arguments(api, sampling, 0, [1], None))
        assert passed <= known | (names["SamplingParams of 1.3"] if version == NEW else set())


@pytest.mark.skipif(find_spec("tensorrt_llm") is None, reason="tensorrt_llm is not installed")
def test_a_real_installation_has_what_was_read():
    api = trtllm_api.load_api()
    worker = pytest.importorskip("tensorrt_llm.llmapi.rlhf_utils").WorkerExtension
    for name, entry in SIGNATURES["callables"].items():
        owner, method = name.split(".")
        if method == "abort_update_weights" and not api.can_abort:
            continue
        real = described(getattr({"AsyncLLM": api.AsyncLLM, "WorkerExtension": worker}[owner], method))
        if method != "generate_async":  # in AsyncLLM a pass-through to LLM's
            assert real[: len(entry["parameters"])] == entry["parameters"], name
    assert set(SIGNATURES["fields"]["SamplingParams"]["fields"]) <= {f.name for f in fields(api.SamplingParams)}
    assert set(SIGNATURES["fields"]["KvCacheConfig"]["fields"]) <= set(api.KvCacheConfig.model_fields)
    arguments = sys.modules["tensorrt_llm.llmapi.llm_args"].TorchLlmArgs.model_fields
    own = constructed(api)
    assert set(own) - {"per_worker_gpu_share"} <= set(arguments)


def test_the_fake_refuses_what_the_engine_would_not_survive(make, model):
    engine = make()
    llm, uuid = AsyncLLM.last, GPU0

    def call(coroutine):
        return engine.loop.run("test", coroutine, 20)

    async def ask():
        return await llm.generate_async({"prompt_token_ids": [4]}, fake_trtllm.NewSamplingParams(max_tokens=1))

    def blob(value):
        return {uuid: base64.b64encode(pickle.dumps(value)).decode()}

    weight = next(iter(model.named_parameters()))[1].detach()
    bucket = {uuid: trtllm_api.packed_handles([("lm_head.weight", weight)])}
    for payload, said in (
        ({"GPU-other": bucket[uuid]}, "Device UUID GPU-00000000 not found"),
        (blob({"a": 1}), "must be a list, got dict"),
        (blob([Path("x")]), "Import pathlib"),
        (blob([print]), "Import builtins | print is not allowed"),
    ):
        with pytest.raises(ValueError, match=said):
            call(llm.update_weights(payload))
    with pytest.raises(AttributeError, match="first_pre_reload_weights"):
        call(llm.update_weights(None))  # nothing came
    with pytest.raises(AttributeError, match="no_such_method"):
        call(llm.collective_rpc("no_such_method"))
    with pytest.raises(RuntimeError, match="wakeup of what is not asleep"):
        call(llm.resume(["kv_cache"]))
    with pytest.raises(ValueError, match="Unknown memory tag"):
        call(llm.release(["_no_capture_init_kv_cache"]))
    with pytest.raises(RuntimeError, match="async with"), llm:
        pass
    call(llm.release(["kv_cache"]))
    with pytest.raises(RuntimeError, match="released memory"):
        call(ask())
    call(llm.resume(["kv_cache"]))
    executor().prefixes[(4,)] = (0, 0)  # what releasing left in the index
    with pytest.raises(RuntimeError, match="stale prefix blocks"):
        call(ask())
    call(llm.update_weights(bucket))
    with pytest.raises(RuntimeError, match="between weights and the call that closes"):
        call(ask())
    with pytest.raises(RuntimeError, match="weights do not fit"):
        call(llm.update_weights(None))  # of one tensor


def test_a_wrong_split_shows_in_the_logits(make, model):
    """As of a gathered gate_up whose halves were taken in the wrong order: shapes agree, numbers do not."""
    weights = {name: p.detach() for name, p in model.named_parameters()}
    gate, up = (f"model.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up"))
    weights[gate], weights[up] = weights[up], weights[gate]
    engine = make(updated=False)
    engine.begin_update(1, manifest(model))
    engine.put(list(weights.items()))
    engine.end_update()
    completion = engine.generate([[4, 5]], FREE, [3])[0]
    assert completion.logprobs != pytest.approx(scored(model, [4, 5], completion.tokens), abs=1e-3)
