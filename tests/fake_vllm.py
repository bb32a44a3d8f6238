"""A stand-in for vllm 0.25.1 that runs a real tiny model on the CPU and refuses what the real one would not survive.

What it knows of vllm is in vllm_signatures.json and in the comments here. Like the real one it keeps references to the
weights it is given until the update ends, caches prompts until told to forget them, finishes requests out of order,
and masks the end tokens of generation_config.json while a response is shorter than min_tokens.
"""

import json
import math
import os
import sys
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as torch_dist
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from tests import tiny
from tests.megatron_models import file_names
from trainers.config_generation import VLLMConfig
from trainers.engines import TensorSpec

SIGNATURES = json.loads((Path(__file__).parent / "vllm_signatures.json").read_text())
VERSION = SIGNATURES["version"]
ARGUMENTS = {p[0] for p in SIGNATURES["callables"]["LLM.__init__"]["parameters"]}
ARGUMENTS |= {f[0] for f in SIGNATURES["fields"]["EngineArgs"]["fields"]}


@dataclass
class SamplingParams:
    n: int = 1
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    detokenize: bool = True
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        if 0 < self.temperature < 0.01:
            self.temperature = 0.01
        if self.temperature > 2:
            raise ValueError(f"temperature must be in [0, 2], got {self.temperature}.")
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise OverflowError("Python int too large to convert to C long")
        if self.min_tokens > self.max_tokens:
            raise ValueError("min_tokens must be less than or equal to max_tokens")
        if self.stop and not self.detokenize:
            raise ValueError("stop strings are only supported when detokenize is True.")


@dataclass
class Logprob:
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    routed_experts: Any = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: Any = None


@dataclass
class Request:
    external: str
    prompt: list[int]
    params: SamplingParams
    draw: torch.Generator | None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    finish: str | None = None


class Model(torch.nn.Module):
    """A vLLM model: `load_weights` takes the names of Hugging Face files."""

    def __init__(self, folder: str):
        super().__init__()
        self.hf = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32).eval()
        self.waiting: list[tuple[str, torch.Tensor]] | None = None
        self.resident = True

    def load_weights(self, weights: Any) -> set[str]:
        if not self.resident:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        if self.waiting is None:
            raise RuntimeError("these weights would not go through the layerwise reload")
        known, names = file_names(self.hf.named_parameters()), set()
        for name, tensor in weights:
            if known[name].shape != tensor.shape:
                raise AssertionError(name)
            self.waiting.append((name, tensor))  # not a copy
            names.add(name)
        return names


def initialize_layerwise_reload(model: Model) -> None:
    if model.waiting is None:  # one that is open already is left as it is, with what it holds
        model.waiting = []


def finalize_layerwise_reload(*args: Any, **kwargs: Any) -> None:
    model, _config = args
    parameters = file_names(model.hf.named_parameters())
    for name, tensor in model.waiting or ():
        parameters[name].data.copy_(tensor)
    model.waiting = None


class FakeWorker:
    def __init__(self, model: Model):
        self.model_runner = SimpleNamespace(model=model)
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace())
        self.device = torch.device("cpu")


class LLMEngine:
    def __init__(self, llm: "LLM"):
        self.llm, self.requests = llm, {}
        self.engine_core = self
        self.steps = 0

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def abort_request(self, request_ids: list[str], internal: bool = False) -> None:
        for request_id in request_ids:
            for mine in [i for i, r in self.requests.items() if (i if internal else r.external) == request_id]:
                del self.requests[mine]

    @torch.no_grad()
    def step(self) -> list[Any]:
        llm = self.llm
        if llm.sleeping or llm.model.waiting is not None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        self.steps += 1
        llm.on_step()
        running = list(self.requests.items())[: llm.arguments["max_num_seqs"]]
        for _, request in running:
            self._advance(request)
        done = [(i, r) for i, r in running if r.finish]
        for i, _ in done:
            del self.requests[i]
        return [SimpleNamespace(request_id=r.external, finished=True, outputs=[answer(r)]) for _, r in done[::-1]]

    def _advance(self, request: Request) -> None:
        llm, p = self.llm, request.params
        key = tuple(request.prompt + request.tokens)
        logits = llm.prefixes.get(key)
        if logits is None:
            logits = llm.model.hf(torch.tensor([key])).logits[0, -1]
        if llm.arguments["enable_prefix_caching"]:
            llm.prefixes[key] = logits
        logits, raw = logits.double().clone(), logits.double()
        ends = {*(p.stop_token_ids or ()), *llm.end_tokens}
        if len(request.tokens) < p.min_tokens:
            logits[list(ends)] = -math.inf
        if p.repetition_penalty != 1:
            seen = sorted(set(key))
            logits[seen] = torch.where(
                logits[seen] > 0, logits[seen] / p.repetition_penalty, logits[seen] * p.repetition_penalty
            )
        if p.temperature == 0:
            token = int(logits.argmax())
        else:
            logits = restricted(logits / p.temperature, p)
            token = int(torch.multinomial(logits.softmax(-1), 1, generator=request.draw))
        processed = llm.arguments["logprobs_mode"] == "processed_logprobs"
        logprobs = (logits if processed else raw).log_softmax(-1)
        request.tokens.append(token)
        request.logprobs.append({token: Logprob(float(logprobs[token]))})
        if len(request.tokens) >= p.min_tokens:
            if token in (p.stop_token_ids or ()) or (not p.ignore_eos and token in llm.end_tokens):
                request.finish = "stop"
            elif len(request.tokens) == p.max_tokens:
                request.finish = "length"

    def shutdown(self) -> None:
        self.llm.shut += 1


def restricted(logits: torch.Tensor, p: SamplingParams) -> torch.Tensor:
    if p.top_k:
        logits[logits < logits.topk(min(p.top_k, len(logits))).values[-1]] = -math.inf
    if p.top_p < 1:
        ordered, order = logits.sort(descending=True)
        probabilities = ordered.softmax(-1)
        logits[order[probabilities.cumsum(-1) - probabilities >= p.top_p]] = -math.inf
    return logits


def answer(request: Request) -> CompletionOutput:
    logprobs = None if request.params.logprobs is None else request.logprobs
    return CompletionOutput(0, "", request.tokens, None, logprobs, finish_reason=request.finish)


class LLM:
    last: "LLM | None" = None
    resettable = True  # what reset_prefix_cache() answers while nothing runs
    on_step = staticmethod(lambda: None)

    def __init__(self, model: str, **kwargs: Any):
        if unknown := sorted(kwargs.keys() - ARGUMENTS):
            raise TypeError(f"EngineArgs.__init__() got an unexpected keyword argument {unknown[0]!r}")
        self.arguments = {"max_num_seqs": 256, "logprobs_mode": "raw_logprobs", "enable_prefix_caching": True} | kwargs
        self.other_process = os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING", "1") == "1"
        self.together = kwargs.get("distributed_executor_backend") == "external_launcher"
        if self.together and self.other_process:
            raise AssertionError("To get deterministic execution, please set VLLM_ENABLE_V1_MULTIPROCESSING=0")
        torch.manual_seed(0)  # the worker seeds its process
        self.model = Model(model)
        source = kwargs.get("generation_config", "auto")
        ends = GenerationConfig.from_pretrained(model if source in ("auto", "vllm") else source).eos_token_id
        self.end_tokens = {*(ends if isinstance(ends, list) else [ends])} - {None}
        extension = import_module(kwargs["worker_extension_cls"].rpartition(".")[0])
        extension = getattr(extension, kwargs["worker_extension_cls"].rpartition(".")[2])
        taken = [a for a in dir(extension) if not a.startswith("__") and hasattr(FakeWorker, a)]
        assert not taken, f"Worker class already has an attribute {taken}"
        self.worker = type("Worker", (FakeWorker, extension), {})(self.model)
        self.sleeping: set[str] = set()
        self.prefixes: dict[tuple[int, ...], torch.Tensor] = {}
        self.count = self.shut = 0
        self.llm_engine = LLMEngine(self)
        LLM.last = self

    def enqueue(
        self,
        prompts: Any,
        sampling_params: Any = None,
        lora_request: Any = None,
        priority: Any = None,
        use_tqdm: Any = True,
        tokenization_kwargs: Any = None,
        mm_processor_kwargs: Any = None,
    ) -> list[str]:
        if self.together:
            everyone: list[Any] = [None] * torch_dist.get_world_size()
            torch_dist.all_gather_object(everyone, [(p, vars(s)) for p, s in zip(prompts, sampling_params)])  # noqa: B905
            span = self.arguments["tensor_parallel_size"]
            first = torch_dist.get_rank() // span * span
            assert all(e == everyone[first] for e in everyone[first : first + span]), "the workers' schedules differ"
        ids = []
        for prompt, params in zip(prompts, sampling_params, strict=True):
            draw = None if params.seed is None else torch.Generator().manual_seed(params.seed)
            ids.append(f"{self.count}-internal")
            self.llm_engine.requests[ids[-1]] = Request(str(self.count), prompt["prompt_token_ids"], params, draw)
            self.count += 1
        return ids

    def collective_rpc(self, method: Any, timeout: Any = None, args: tuple = (), kwargs: Any = None) -> list[Any]:
        if self.other_process and not all(isinstance(a, bytes | str | int) for a in args):
            raise TypeError("Object of this type is not serializable. Set VLLM_ALLOW_INSECURE_SERIALIZATION=1")
        if "weights" in self.sleeping:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return [getattr(self.worker, method)(*args, **(kwargs or {}))]

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        if self.llm_engine.requests or not self.resettable:
            return False
        self.prefixes.clear()
        return True

    def sleep(self, level: int = 1, mode: Any = "abort") -> None:
        if not self.arguments.get("enable_sleep_mode"):
            raise ValueError("Sleep mode is not enabled.")
        self.prefixes.clear()
        if self.sleeping:
            return  # "Executor is already sleeping."
        self.sleeping, self.level, self.model.resident = {"weights", "kv_cache"}, level, False
        if level == 2:
            for parameter in self.model.parameters():
                parameter.data.fill_(math.nan)

    def wake_up(self, tags: list[str] | None = None) -> None:
        if set(tags or self.sleeping) <= self.sleeping:  # else a warning, and nothing is done
            self.sleeping -= set(tags or self.sleeping)
            self.model.resident = "weights" not in self.sleeping


def install(monkeypatch: Any, version: str = VERSION) -> ModuleType:
    """`import vllm` finds the fake."""
    reload = {"initialize_layerwise_reload": initialize_layerwise_reload}
    reload["finalize_layerwise_reload"] = finalize_layerwise_reload
    modules: dict[str, dict[str, Any]] = {"": {"__version__": version, "LLM": LLM, "SamplingParams": SamplingParams}}
    modules |= {
        ".model_executor": {},
        ".model_executor.model_loader": {},
        ".model_executor.model_loader.reload": reload,
    }
    for name, contents in modules.items():
        module = ModuleType(f"vllm{name}")
        module.__path__ = []
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_USE_FLASHINFER_SAMPLER"):
        monkeypatch.setenv(name, "")  # so that what the engine sets is undone
        monkeypatch.delenv(name)
    LLM.last = None
    return sys.modules["vllm"]


def push(engine: Any, model: Any, version: int, parts: int = 2) -> None:
    """One full update with a model's parameters, overwritten as soon as the engine has taken them."""
    weights = [(name, p.detach()) for name, p in file_names(model.named_parameters()).items()]
    engine.begin_update(version, {name: TensorSpec(tuple(p.shape), p.dtype) for name, p in weights})
    for part in range(parts):
        bucket = [(name, tensor.clone()) for name, tensor in weights[part::parts]]
        engine.put(bucket)
        for _, tensor in bucket:
            tensor.fill_(1e4)
    engine.end_update()


def make_vllm_engine(
    model: Any,
    tokenizer: Any,
    monkeypatch: Any,
    *,
    folder: Path | str | None = None,
    timeout_s: float | None = 60.0,
    max_model_len: int = 512,
    max_batch_size: int = 8,
    updated: bool = True,
    **cfg: Any,
) -> Any:
    """An engine on the fake, with the weights of `model` as version 0 (unless `updated` is false).

    Args:
        folder: of the model's configuration; default: the tiny Llama's.
        cfg: fields of VLLMConfig.
    """
    from trainers.engines.vllm import VLLMEngine

    install(monkeypatch)
    engine = VLLMEngine(
        folder or tiny.tiny_model(),
        tokenizer,
        VLLMConfig(**cfg),
        max_model_len=max_model_len,
        max_batch_size=max_batch_size,
        dtype=torch.float32,
        timeout_s=timeout_s,
    )
    if updated:
        push(engine, model, 0)
    return engine
