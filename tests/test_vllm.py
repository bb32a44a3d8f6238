"""The vLLM engine on a stand-in that refuses what the real one would not survive (tests/fake_vllm.py)."""

import inspect
import math
import os
import random
import sys
import time
from dataclasses import fields, replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as torch_dist
import torch.multiprocessing as mp
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests import fake_vllm, tiny
from tests.fake_vllm import LLM, SIGNATURES, make_vllm_engine, push
from tests.megatron_models import build_hf
from trainers import dist
from trainers.arithmetic import ConfigError, check
from trainers.config_generation import VLLMConfig
from trainers.engines import Sampling, TensorSpec, vllm_api
from trainers.engines.vllm_worker import packed, unpacked
from trainers.offload import check_device

PROMPTS = [[2, 3], [4], [5, 6, 7, 8], [9, 10], [4]]
SEEDS = [11, 12, 13, 14, 15]
FREE = Sampling(max_new_tokens=6, ignore_eos=True)


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
        engines.append(make_vllm_engine(model, tokenizer, monkeypatch, **options))
        return engines[-1]

    yield engine
    for engine in engines:
        engine.close()


def scored(model, prompt, completion, sampling):
    """The log-probs of the sampling distribution, one plain forward pass."""
    tokens = completion.tokens
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].double()
    ends = [*sampling.stop_token_ids, *([] if sampling.ignore_eos else [1])]  # 1 is </s>
    right = []
    for i, token in enumerate(tokens):
        row, seen, penalty = logits[i], sorted({*prompt, *tokens[:i]}), sampling.repetition_penalty
        row[seen] = torch.where(row[seen] > 0, row[seen] / penalty, row[seen] * penalty)
        if i < sampling.min_new_tokens:
            row[ends] = -math.inf
        row = row / sampling.temperature
        if sampling.top_k:
            row[row < row.topk(sampling.top_k).values[-1]] = -math.inf
        right.append(float(row.log_softmax(-1)[token]))
    return right


def other(model):
    """Different weights, one for every tensor."""
    changed = AutoModelForCausalLM.from_config(model.config).float().eval()
    changed.load_state_dict({name: tensor.roll(1, -1) for name, tensor in model.state_dict().items()})
    return changed


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(6),
        replace(FREE, temperature=0.7),
        replace(FREE, temperature=1.6, top_k=4, min_new_tokens=6, stop_token_ids=(5, 6)),
        replace(FREE, repetition_penalty=1.8, temperature=0.9),
        replace(FREE, greedy=True, repetition_penalty=1.8),
    ],
    ids=["plain", "temperature", "top_k and min_new_tokens", "penalty", "greedy"],
)
def test_logprobs_are_of_the_sampling_distribution(make, model, sampling):
    for prompt, completion in zip(PROMPTS, make().generate(PROMPTS, sampling, SEEDS), strict=True):
        assert completion.logprobs == pytest.approx(scored(model, prompt, completion, sampling), abs=1e-5)
        assert len(completion.tokens) >= sampling.min_new_tokens and completion.weight_version == 0


def test_an_end_token_that_is_ignored_is_sampled_below_min_new_tokens_too(make, model):
    """vLLM would mask what the folder's generation_config.json calls an end."""
    sampling = Sampling(40, ignore_eos=True, min_new_tokens=40, temperature=2.0)
    completions = make().generate(PROMPTS, sampling, SEEDS)
    assert any(1 in c.tokens for c in completions)
    assert completions[0].logprobs == pytest.approx(scored(model, PROMPTS[0], completions[0], sampling), abs=1e-5)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"greedy": True, "temperature": 0.7}, "greedy responses have log-probs at temperature 1.*temperature=0.7"),
        ({"greedy": True, "top_k": 3}, "greedy responses.*top_k=3"),
        ({"temperature": 2.5}, "temperature must be 0.01 to 2.0, got 2.5"),
        ({"temperature": 0.001}, "temperature must be 0.01"),
    ],
)
def test_a_sampling_that_vllm_would_do_otherwise_is_refused(make, changed, said):
    with pytest.raises(ValueError, match=said):
        make().generate(PROMPTS, replace(FREE, **changed), SEEDS)


def test_order_is_kept_and_each_request_has_its_seed(make):
    engine = make(max_batch_size=2)  # so that requests finish out of order
    together = [c.tokens for c in engine.generate(PROMPTS, FREE, SEEDS)]
    assert together == [engine.generate([p], FREE, [s])[0].tokens for p, s in zip(PROMPTS, SEEDS, strict=True)]
    first, second, third = engine.generate([[4]] * 3, FREE, [1, 2, 1])
    assert first.tokens == third.tokens != second.tokens
    assert len(engine.generate([[4]], FREE, [2**64 - 1])) == 1  # vLLM keeps signed 64-bit seeds


def test_stop_token_is_kept_said_and_counted_with_what_ends_a_response(make):
    engine = make()
    for sampling, ends in (
        (Sampling(40, temperature=2.0), {1}),
        (Sampling(40, ignore_eos=True, stop_token_ids=(3, 7)), {3, 7}),
    ):
        completions = engine.generate(PROMPTS, sampling, SEEDS)
        assert {c.finish for c in completions} >= {"stop"}
        for c in completions:
            assert (c.tokens[-1] in ends) == (c.finish == "stop") and not ends & set(c.tokens[:-1])
            assert len(c.tokens) == len(c.logprobs) and (c.finish == "stop" or len(c.tokens) == 40)


def test_stop_strings_end_a_response_and_stay_in_it(make, tokenizer):
    free = make().generate([[4]], replace(FREE, max_new_tokens=20), [3])[0]
    text = tokenizer.decode(free.tokens[4:5])
    cut = make().generate([[4]], replace(FREE, max_new_tokens=20, stop_strings=(text,)), [3])[0]
    assert cut.finish == "stop" and cut.tokens == free.tokens[: len(cut.tokens)] and len(cut.tokens) <= 5
    assert tokenizer.decode(cut.tokens).endswith(text) and cut.logprobs == free.logprobs[: len(cut.tokens)]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"logprobs": None}, "no log-probs"),
        ({"logprobs": []}, "0 log-probs"),
        ({"token_ids": [4, 5], "logprobs": [{4: None}, {5: None}]}, "ended a response after 2 tokens for no reason"),
    ],
)
def test_an_answer_that_breaks_the_contract_is_an_error(make, monkeypatch, change, said):
    engine, answer = make(), fake_vllm.answer
    monkeypatch.setattr(fake_vllm, "answer", lambda request: replace(answer(request), **change))
    with pytest.raises(RuntimeError, match=said):
        engine.generate([[4]], FREE, [0])


# Weights


@pytest.mark.parametrize("in_process", [True, False])
def test_two_updates_in_a_row_reach_the_completions_and_no_prefix_is_older(make, model, in_process):
    engine, changed = make(in_process=in_process), other(model)
    assert engine.capabilities().transport == ("inproc" if in_process else "cuda_ipc")
    for version, weights in ((1, changed), (2, model)):
        engine.generate(PROMPTS, FREE, SEEDS)  # fills the prefix cache
        push(engine, weights, version, parts=3)  # halves of a layer arrive apart, and are overwritten at once
        for prompt, completion in zip(PROMPTS, engine.generate(PROMPTS, FREE, SEEDS), strict=True):
            assert completion.logprobs == pytest.approx(scored(weights, prompt, completion, FREE), abs=1e-5)
            assert completion.weight_version == version


@pytest.mark.parametrize("in_process", [True, False])
def test_experts_arrive_under_the_names_of_files(make, tmp_path, in_process):
    """As megatron-core's policy sends them: each expert apart, where the folder's model has a layer's in one tensor."""
    experts = build_hf("qwen3_moe")
    experts.save_pretrained(tmp_path)
    engine = make(folder=tmp_path, updated=False, in_process=in_process)
    push(engine, experts, 1)
    completion = engine.generate([[4, 5]], FREE, [0])[0]
    assert completion.logprobs == pytest.approx(scored(experts, [4, 5], completion, FREE), abs=1e-5)


def test_a_prefix_cache_that_is_not_reset_is_an_error(make, model, monkeypatch):
    engine = make()
    monkeypatch.setattr(LLM, "resettable", False)
    with pytest.raises(RuntimeError, match="did not reset its prefix cache"):
        push(engine, model, 1)
    with pytest.raises(RuntimeError, match="needs complete weights"):
        engine.generate(PROMPTS, FREE, SEEDS)


def test_nothing_generates_before_the_first_weights(make):
    with pytest.raises(RuntimeError, match="none were sent yet"):
        make(updated=False).generate(PROMPTS, FREE, SEEDS)


def test_a_half_made_update_poisons_until_a_full_one(make, model):
    engine, changed = make(), other(model)
    weights = [(name, p.detach()) for name, p in changed.named_parameters()]
    manifest = {name: TensorSpec(tuple(p.shape), p.dtype) for name, p in weights}
    engine.begin_update(1, manifest)
    engine.put(weights[:3])
    engine.abort_update()
    with pytest.raises(RuntimeError, match="an update was begun and not ended"):
        engine.generate(PROMPTS, FREE, SEEDS)
    push(engine, model, 2)
    assert LLM.last.model.waiting is None
    completion = engine.generate([[4, 5]], FREE, [0])[0]
    assert completion.logprobs == pytest.approx(scored(model, [4, 5], completion, FREE), abs=1e-5)
    with pytest.raises(ValueError, match="manifest must name the engine's"):
        engine.begin_update(3, dict(list(manifest.items())[1:]))


def test_a_bucket_is_packed_into_one_buffer_or_is_one_already():
    tensors = [("a", torch.arange(6.0).view(2, 3)), ("b", torch.arange(3).bfloat16()), ("c", torch.ones(4, 2).t())]
    flat, layout = packed(tensors)
    for (name, tensor), (back, view) in zip(tensors, unpacked(flat, layout), strict=True):
        assert name == back and torch.equal(tensor, view) and view.data_ptr() % 64 == flat.data_ptr() % 64
    again, _ = packed(unpacked(flat, layout))
    assert again.data_ptr() == flat.data_ptr()  # no second copy


# Sleep, time, the end


def test_sleep_and_wake_in_the_order_of_a_step(make, model):
    engine, changed = make(), other(model)
    engine.generate(PROMPTS, FREE, SEEDS)
    engine.sleep()
    assert LLM.last.level == 2 and LLM.last.sleeping == {"weights", "kv_cache"}
    with pytest.raises(RuntimeError, match="asleep now"):
        engine.generate(PROMPTS, FREE, SEEDS)
    with pytest.raises(RuntimeError, match="call wake"):
        push(engine, changed, 1)
    with pytest.raises(RuntimeError, match='before wake\\("weights"\\)'):
        engine.wake("kv")
    engine.wake("weights")
    push(engine, changed, 1)
    engine.sleep()  # with the cache asleep still: vLLM would do nothing
    assert LLM.last.sleeping == {"weights", "kv_cache"} and LLM.last.level == 2
    engine.wake("weights")
    engine.wake("kv")
    with pytest.raises(RuntimeError, match="given up in sleep"):
        engine.generate(PROMPTS, FREE, SEEDS)
    push(engine, changed, 2)
    completion = engine.generate([[4, 5]], FREE, [0])[0]
    assert completion.logprobs == pytest.approx(scored(changed, [4, 5], completion, FREE), abs=1e-5)


def test_kept_weights_generate_without_an_update(make):
    engine = make()
    before = engine.generate(PROMPTS, FREE, SEEDS)
    engine.sleep(keep_weights=True)
    assert LLM.last.level == 1
    engine.wake("weights")
    engine.wake("kv")
    assert engine.generate(PROMPTS, FREE, SEEDS) == before


def test_an_engine_that_cannot_sleep_keeps_its_weights(make):
    engine = make(vllm_kwargs={"enable_sleep_mode": False})
    assert not engine.capabilities().can_sleep
    engine.sleep()
    engine.wake("weights")
    engine.wake("kv")
    assert len(engine.generate([[4]], FREE, [0])) == 1


@pytest.mark.parametrize("in_process", [True, False])
def test_timeout_stops_the_steps_and_leaves_no_request_behind(make, monkeypatch, in_process):
    engine = make(in_process=in_process, timeout_s=0.05)
    monkeypatch.setattr(LLM, "on_step", staticmethod(lambda: time.sleep(0.02)))
    with pytest.raises(TimeoutError, match=r"policy.generation.timeout_s=0.05"):
        engine.generate(PROMPTS, replace(FREE, max_new_tokens=200), SEEDS)
    assert LLM.last.llm_engine.steps < 10 and not LLM.last.llm_engine.has_unfinished_requests()
    engine.timeout_s = 60
    assert len(engine.generate(PROMPTS, FREE, SEEDS)) == 5


def test_a_step_that_hangs_in_another_process_is_given_up(make, monkeypatch):
    engine = make(in_process=False, timeout_s=0.1)
    monkeypatch.setattr(LLM, "on_step", staticmethod(lambda: time.sleep(2.5)))
    start = time.monotonic()
    with pytest.raises(TimeoutError, match="timeout_s=0.1"):
        engine.generate([[4]], FREE, [0])
    assert time.monotonic() - start < 2


def test_closing_twice_and_using_what_is_closed(make):
    engine = make()
    llm = LLM.last
    engine.close()
    engine.close()
    assert llm.shut == 1
    with pytest.raises(RuntimeError, match="closed"):
        engine.generate(PROMPTS, FREE, SEEDS)


# The installation, the constructor, the configuration


def test_the_constructor_gets_what_rl_needs_and_leaves_the_random_numbers(make):
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    make(max_model_len=77, gpu_memory_utilization=0.3, vllm_kwargs={"seed": 5}, updated=False)
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2]
    given = LLM.last.arguments
    assert given["logprobs_mode"] == "processed_logprobs" and given["enable_sleep_mode"] is True and given["seed"] == 5
    assert (given["max_model_len"], given["max_num_seqs"], given["gpu_memory_utilization"]) == (77, 8, 0.3)
    assert given["load_format"] == "dummy" and "distributed_executor_backend" not in given
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0" and os.environ["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
    with pytest.raises(ValueError, match="vllm_kwargs: logprobs_mode is set by the engine"):
        make(vllm_kwargs={"logprobs_mode": "raw_logprobs"})
    with pytest.raises(TypeError, match="no_such"):
        make(vllm_kwargs={"no_such": 1})


def test_an_installation_that_is_missing_broken_or_old_names_the_extra(monkeypatch):
    module = fake_vllm.install(monkeypatch, version="0.20.0")
    with pytest.raises(ImportError, match=r"0\.25\.1 or later, got 0\.20\.0.*fastppo\[vllm\]"):
        vllm_api.load_api()
    module.__version__ = "0.33.0"
    assert vllm_api.load_api().version == "0.33.0"
    del module.LLM
    with pytest.raises(ImportError, match=r"cannot be used \(AttributeError.*fastppo\[vllm\]"):
        vllm_api.load_api()
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ImportError, match=r"fastppo\[vllm\]"):
        vllm_api.load_api()


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"vllm_cfg__enforce_eager": True}, "vllm_cfg.enforce_eager.*backend=native"),
        ({"backend": "vllm"}, "backend=vllm needs a GPU, got cluster.device=cpu"),
        ({"backend": "vllm", "vllm_cfg__tensor_parallel_size": 2}, "tensor_parallel_size=2 needs a multiple of 2"),
        ({"backend": "vllm", "vllm_cfg__max_model_len": 3}, "vllm_cfg.max_model_len=3 is less than the longest"),
        ({"backend": "vllm", "trtllm_cfg__max_seq_len": 9}, "trtllm_cfg.max_seq_len.*backend=vllm"),
        ({"backend": "vllm", "temperature": 0.7, "val__greedy": True}, "policy.generation.val.temperature=1"),
        ({"backend": "vllm", "vllm_cfg__gpu_memory_utilization": 1.5}, "gpu_memory_utilization"),
    ],
)
def test_settings_that_cannot_be_used(overrides, said):
    device = "cpu" if "needs a GPU" in said else "auto"
    with pytest.raises(ConfigError, match=said):
        check(tiny.config(cluster__device=device, **{f"policy__generation__{k}": v for k, v in overrides.items()}))


def test_a_cpu_is_refused_before_a_model_loads():
    with pytest.raises(ConfigError, match="backend=vllm needs a GPU, and torch sees none"):
        check_device(tiny.config(cluster__device="auto", policy__generation__backend="vllm"), torch.device("cpu"))


# Several ranks


def rank_of_two(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch_dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    model = AutoModelForCausalLM.from_pretrained(tiny.tiny_model(), dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(tiny.tiny_model())
    with pytest.MonkeyPatch.context() as monkeypatch:
        engine = make_vllm_engine(model, tokenizer, monkeypatch, tensor_parallel_size=2)
        assert LLM.last.arguments["distributed_executor_backend"] == "external_launcher"
        mine = slice(0, 2) if rank == 0 else slice(2, 5)
        completions = engine.generate(PROMPTS[mine], FREE, SEEDS[mine])
        for prompt, completion in zip(PROMPTS[mine], completions, strict=True):
            assert completion.logprobs == pytest.approx(scored(model, prompt, completion, FREE), abs=1e-5)
        assert len(engine.generate([[4]] if rank else [], FREE, [1] if rank else [])) == rank
        assert engine.generate([], FREE, []) == []
        with pytest.raises(ValueError, match=r"prompts\[0\]: its 600 tokens"):  # rank 1's, on both
            engine.generate([[4] * 600] if rank else [[4]], FREE, [0])
        if rank:
            engine.timeout_s = 1e-9
        with pytest.raises(TimeoutError):  # rank 1's, on both: neither steps on alone
            engine.generate([[4]], FREE, [0])
        assert not LLM.last.llm_engine.has_unfinished_requests()
        with pytest.raises(ValueError, match="in_process=false needs one rank"):
            make_vllm_engine(model, tokenizer, monkeypatch, in_process=False)
        engine.close()
    dist.stop()


def test_two_ranks_are_one_engine(tmp_path):
    mp.start_processes(rank_of_two, args=(str(tmp_path),), nprocs=2, start_method="forkserver")


# The stand-in and the real thing


def described(function):
    """As in vllm_signatures.json."""
    found, star = [], False
    for p in list(inspect.signature(function).parameters.values()):
        if p.name == "self":
            continue
        if p.kind == p.KEYWORD_ONLY and not star:
            found.append(["*"])
            star = True
        name = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "") + p.name
        found.append([name] + ([] if p.default is p.empty else [repr(p.default)]))
    return found


def read(name):
    return SIGNATURES["callables"][name]["parameters"]


@pytest.mark.parametrize("name", [n for n in SIGNATURES["callables"] if "." in n and n != "LLM.__init__"])
def test_the_fakes_signatures_are_those_that_were_read(name):
    owner, method = name.split(".")
    assert described(getattr(getattr(fake_vllm, owner), method)) == read(name)


def test_the_fakes_fields_are_those_that_were_read():
    for cls in (fake_vllm.SamplingParams, fake_vllm.CompletionOutput):
        known = {f[0] for f in SIGNATURES["fields"][cls.__name__]["fields"]}
        assert {f.name for f in fields(cls)} <= known
    defaults = {f[0]: f[1] for f in SIGNATURES["fields"]["SamplingParams"]["fields"]}
    assert {f.name: repr(f.default) for f in fields(fake_vllm.SamplingParams)} == defaults


def test_every_argument_that_the_client_passes_was_read():
    arguments = vllm_api.constructor_arguments(
        "x", VLLMConfig(), max_model_len=8, max_batch_size=2, dtype=torch.bfloat16, ranks=2
    )
    assert set(arguments) <= fake_vllm.ARGUMENTS
    params = {f[0] for f in SIGNATURES["fields"]["SamplingParams"]["fields"]}
    assert set(vllm_api.sampling_arguments(FREE, 0, [1])) <= params


@pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed")
def test_a_real_installation_has_what_was_read():
    import vllm
    from vllm.v1.engine.llm_engine import LLMEngine

    for name in SIGNATURES["callables"]:
        owner, _, method = name.partition(".")
        if method and method != "__init__":
            theirs = described(getattr({"LLM": vllm.LLM, "LLMEngine": LLMEngine}[owner], method))
            assert [p[0] for p in read(name)] == [p[0] for p in theirs][: len(read(name))]


def test_no_defaults_has_none():
    assert (Path(vllm_api.__file__).parent / "no_defaults" / "generation_config.json").read_text() == "{}\n"
