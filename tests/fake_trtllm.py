"""A stateful stand-in for `tensorrt_llm` on a CPU: what TRTLLMEngine's calls would meet, refusals included.

Signatures are those of tests/trtllm_signatures.json. The model is a real one from the folder the engine is given; its
weights are NaN until `update_weights(None)` loads what came, so a wrong name, split or a missing close shows in the
logits. Copies of weights are queued until `torch.cuda.synchronize()`, as on a GPU. It proves the protocol, not the
product: it draws by request from SamplingParams.seed, which the real sampler does not (docs/engines_trtllm.md).
"""

import asyncio
import base64
import ctypes
import io
import math
import os
import pickle
import re
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, make_dataclass
from enum import Enum
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests import tiny
from tests.megatron_models import file_names
from trainers.config_generation import TRTLLMConfig
from trainers.engines import TensorSpec, trtllm_api

NEW, OLD = "1.3.0rc24", "1.2.0"
APPROVED = {"builtins": {"list", "tuple", "str", "int", "float", "bool", "bytes", "dict", "NoneType", "type"}}
DENIED = {("torch.storage", "_load_from_bytes"), ("torch.hub", "_load_local"), ("torch", "save")}
TAGS = {
    "SAMPLER": "sampler",
    "DRAFTER": "drafter",
    "GUIDED_DECODER": "guided_decoder",
    "SPEC_RESOURCES": "spec_resource_manager",
    "INIT_KV_CACHE": "_no_capture_init_kv_cache",
    "INIT_EXTRA_RESOURCES": "_no_capture_init_extra_resources",
    "MODEL_EXTRA": "model_extra",
    "EXTRA_RESOURCES": "executor_extra",
    "KV_CACHE": "kv_cache",
    "MODEL_ENGINE_MAIN": "model",
    "MODEL_ENGINE_DRAFT": "draft_model",
}
NEW_TAGS = {"MODEL_WEIGHTS_MAIN": "model_weights", "MODEL_WEIGHTS_DRAFT": "draft_model_weights"}
ARGUMENTS = {
    "model", "backend", "tensor_parallel_size", "dtype", "load_format", "max_seq_len", "max_input_len",
    "max_batch_size", "max_num_tokens", "kv_cache_config", "cuda_graph_config", "scheduler_config",
    "enable_chunked_prefill", "sampler_type", "allreduce_strategy", "orchestrator_type", "ray_placement_config",
    "ray_worker_extension_cls", "trust_remote_code", "model_kwargs", "skip_tokenizer_init",
}  # fmt: skip


class LogprobMode(str, Enum):
    RAW = "raw"
    PROCESSED = "processed"


@dataclass(kw_only=True)
class OldSamplingParams:
    end_id: int | None = None
    pad_id: int | None = None
    max_tokens: int = 32
    bad: Any = None
    bad_token_ids: list[int] | None = None
    stop: Any = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    n: int = 1
    best_of: int | None = None
    use_beam_search: bool = False
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    temperature: float | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    min_p: float | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    exclude_input_from_output: bool = True
    ignore_eos: bool = False
    detokenize: bool = True
    add_special_tokens: bool = True
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        for name, low, high in (("top_p", 0, 1), ("top_k", 0, math.inf), ("temperature", 0, math.inf)):
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ValueError(f"require {low} <= {name} <= {high}, got {name}={value}")
        if self.seed is not None and not 0 <= self.seed < 2**64:
            raise TypeError(f"seed must be an unsigned 64-bit integer, got {self.seed}")


@dataclass(kw_only=True)
class NewSamplingParams(OldSamplingParams):
    logprobs_mode: LogprobMode = LogprobMode.RAW


@dataclass
class Logprob:
    logprob: float
    rank: int | None = None


@dataclass
class Output:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] | None = None
    finish_reason: str | None = None


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in APPROVED.get(module, ()) or (re.match("^torch.*", module) and (module, name) not in DENIED):
            return super().find_class(module, name)
        raise ValueError(f"Import {module} | {name} is not allowed")


def cpu_handle(tensor: torch.Tensor) -> tuple[Any, tuple[Any, ...]]:
    """The CPU form of a CUDA IPC handle, in the same layout: it points at the tensor's memory, and copies nothing."""
    assert tensor.is_contiguous()
    where = f"{os.getpid()}:{tensor.data_ptr()}".encode()
    what = (torch.Tensor, tuple(tensor.shape), tensor.stride(), 0, torch.UntypedStorage, tensor.dtype)
    return rebuild_cuda_tensor, (*what, 7, where, tensor.nbytes, 0, False, b"", 0, b"", True)


def from_handle(args: list[Any]) -> torch.Tensor | None:
    """The tensor as it is in memory now; None for another process's, which this one cannot read."""
    pid, address = map(int, args[7].split(b":"))
    if pid != os.getpid():
        return None
    data = bytearray(ctypes.string_at(address, args[8]))
    return torch.frombuffer(data, dtype=args[5]).reshape(args[1]).clone()


class Executor:
    """What the workers of one engine share. Attributes are for tests to look at and to set."""

    def __init__(self, arguments: dict[str, Any], cache: Any, can_sleep: bool):
        self.arguments, self.can_sleep = arguments, can_sleep
        with torch.random.fork_rng():
            self.model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(arguments["model"])).eval()
        self.lose_weights()
        self.tokenizer = AutoTokenizer.from_pretrained(arguments["model"])
        self.block_reuse: bool = cache.enable_block_reuse
        self.prefixes: dict[tuple[int, ...], tuple[int, int]] = {}
        self.generation, self.kv_epoch = 0, 0  # of weights, of the cache's memory
        self.parked: set[str] = set()
        self.open = False  # weights came since the last close
        self.torn = False  # by an update that was aborted
        self.queued: dict[int, dict[str, list[Any]]] = defaultdict(dict)  # by worker: copies not done yet
        self.staged: dict[str, torch.Tensor] = {}
        self.names: dict[int, set[str]] = defaultdict(set)
        self.payloads: list[Any] = []
        self.calls: list[str] = []
        self.requests: list[tuple[Any, Any]] = []
        self.active = 0
        self.delays: dict[str, float] = {}  # seconds, by method
        self.mangle: Callable[[Output], None] = lambda output: None

    def lose_weights(self) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(math.nan)

    def copy_queued(self) -> None:
        for name, args in self.queued.pop(0, {}).items():
            self.staged[name] = from_handle(args)
        self.queued.clear()

    def close(self) -> None:
        if not self.open:
            raise AttributeError("first_pre_reload_weights")
        self.copy_queued()
        if len({frozenset(names) for names in self.names.values()}) > 1:
            raise RuntimeError("the workers were given different tensors")
        parameters = file_names(self.model.named_parameters())
        expected, got = ({name: x.shape for name, x in tensors.items()} for tensors in (parameters, self.staged))
        if got != expected:
            raise RuntimeError(f"weights do not fit: {sorted(set(expected.items()) ^ set(got.items()))}")
        for name, tensor in self.staged.items():
            parameters[name].data.copy_(tensor)
        self.staged, self.open, self.torn, self.generation = {}, False, False, self.generation + 1
        self.names.clear()
        self.prefixes.clear()

    def check_idle(self, call: str) -> None:
        if self.active:
            raise RuntimeError(f"{call} with {self.active} requests in flight")


class OldWorkerExtension:
    """Mixed into each worker; `engine` is the Executor here, `device_id` the GPU's index."""

    engine: Executor
    device_id: int

    def update_weights(self, ipc_handles: dict | None = None) -> None:
        self.engine.check_idle("update_weights")
        if self.engine.parked - {"kv_cache"}:
            raise RuntimeError(f"update_weights writes to memory that was released: {sorted(self.engine.parked)}")
        if ipc_handles is None:
            if self.device_id == self.engine.first_device:
                self.engine.close()
            return
        uuid = get_device_uuid(self.device_id)
        if uuid not in ipc_handles:
            raise ValueError(f"Device UUID {uuid} not found in ipc_handles")
        handles = ipc_handles[uuid]
        if isinstance(handles, str):
            handles = _Unpickler(io.BytesIO(base64.b64decode(handles))).load()
        if not isinstance(handles, list):
            raise ValueError(f"Deserialized data must be a list, got {type(handles).__name__} instead")
        self.engine.open = True
        worker = self.device_id - self.engine.first_device
        for name, (_, args) in handles:
            rebuilt = list(args)
            rebuilt[6] = self.device_id
            self.engine.queued[worker][name] = rebuilt
            self.engine.names[worker].add(name)


class WorkerExtension(OldWorkerExtension):
    def abort_update_weights(self, reason: str = "trainer-initiated abort") -> None:
        """What the update has begun to take apart stays so until a full one."""
        self.engine.open, self.engine.torn = False, True
        self.engine.staged, self.engine.queued = {}, defaultdict(dict)
        self.engine.names.clear()


class _Worker:
    def __init__(self, engine: Executor, device_id: int):
        self.engine, self.device_id = engine, device_id

    def report_device_id(self) -> str:
        return get_device_uuid(self.device_id)

    def reset_prefix_cache(self) -> None:
        self.engine.check_idle("reset_prefix_cache")
        self.engine.prefixes.clear()

    def sleep(self, sleep_tags: list[str]) -> None:
        self._checked(sleep_tags)
        if again := self.engine.parked & set(sleep_tags):
            raise RuntimeError(f"released twice: {sorted(again)}")
        self._last(lambda: self.engine.parked.update(sleep_tags))
        if "kv_cache" in sleep_tags:
            self.engine.kv_epoch += 1
        if {"model_weights", "model"} & set(sleep_tags):
            self.engine.lose_weights()

    def wakeup(self, wakeup_tags: list[str]) -> None:
        self._checked(wakeup_tags)
        if awake := set(wakeup_tags) - self.engine.parked:
            raise RuntimeError(f"wakeup of what is not asleep: {sorted(awake)}")
        self._last(lambda: self.engine.parked.difference_update(wakeup_tags))

    def _checked(self, tags: list[str]) -> None:
        self.engine.check_idle("sleep or wakeup")
        if not self.engine.can_sleep:
            raise ValueError("Sleep feature is not enabled")
        if unknown := [t for t in tags if t not in self.engine.tags or t.startswith("_")]:
            raise ValueError(f"Unknown memory tag {unknown}")

    def _last(self, change: Callable[[], None]) -> None:
        if self.device_id == self.engine.last_device:
            change()


class Request:
    """What generate_async returns: awaitable, and itself the result."""

    def __init__(self, engine: Executor, prompt: list[int], params: Any):
        self.engine, self.prompt_token_ids, self.params = engine, prompt, params
        self.outputs = [Output()]
        engine.active += 1
        self.task = asyncio.get_running_loop().create_task(self._run())
        self.task.add_done_callback(lambda _: self._done())

    def _done(self) -> None:
        self.engine.active -= 1

    def abort(self) -> None:
        self.task.cancel()

    def __await__(self) -> Any:
        yield from self.task.__await__()
        return self

    async def _run(self) -> None:
        await asyncio.sleep(self.engine.delays.get("generate", 0))
        self._reuse_prefix()
        params, output = self.params, self.outputs[0]
        if params.logprobs is not None:
            output.logprobs = []
        draw = torch.Generator().manual_seed((params.seed or 0) % 2**63)
        words = [[i] for i in params.stop_token_ids or []]
        words += [self.engine.tokenizer.encode(s, add_special_tokens=False) for s in params.stop or []]
        while output.finish_reason is None:
            await asyncio.sleep(0)
            self._step(params, output, draw)
            tokens = output.token_ids
            word = next((w for w in words if tokens[-len(w) :] == w), None)
            if word or tokens[-1] == params.end_id:
                output.finish_reason = "stop"
                if word and not params.include_stop_str_in_output:
                    del tokens[-len(word) :]
            elif len(tokens) == params.max_tokens:
                output.finish_reason = "length"
        self.engine.mangle(output)

    def _reuse_prefix(self) -> None:
        now, key = (self.engine.generation, self.engine.kv_epoch), tuple(self.prompt_token_ids)
        if self.engine.block_reuse and self.engine.prefixes.setdefault(key, now) != now:
            raise RuntimeError(f"stale prefix blocks of {key}: computed under {self.engine.prefixes[key]}, now {now}")

    @torch.no_grad()
    def _step(self, params: Any, output: Output, draw: torch.Generator) -> None:
        ids = self.prompt_token_ids + output.token_ids
        raw = self.engine.model(torch.tensor([ids])).logits[0, -1].double()
        if not torch.isfinite(raw).all():
            raise FloatingPointError("generate with weights that never came")
        scores = raw.clone()
        if (penalty := params.repetition_penalty or 1) != 1:
            seen = torch.tensor(sorted(set(ids)))
            scores[seen] = torch.where(scores[seen] > 0, scores[seen] / penalty, scores[seen] * penalty)
        if params.min_tokens and len(output.token_ids) < params.min_tokens and params.end_id >= 0:
            scores[params.end_id] = -math.inf
        scores = scores / params.temperature
        if params.top_k:
            scores[scores < scores.topk(params.top_k).values[-1]] = -math.inf
        ordered, order = scores.sort(descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        scores[order[before >= params.top_p]] = -math.inf
        processed = scores.log_softmax(-1)
        token = int(torch.multinomial(processed.exp(), 1, generator=draw))
        output.token_ids.append(token)
        if output.logprobs is not None:
            of_raw = getattr(params, "logprobs_mode", LogprobMode.RAW) == LogprobMode.RAW
            chosen = (raw.log_softmax(-1) if of_raw else processed)[token]
            output.logprobs.append({token: Logprob(float(chosen))})


class AsyncLLM:
    """Signatures of 1.3.0rc13; `executor` is for tests."""

    last: "AsyncLLM | None" = None  # the newest

    def __init__(
        self,
        placement_groups: list[Any] | None = None,
        placement_bundle_indices: list[list[int]] | None = None,
        per_worker_gpu_share: float | None = None,
        *args: Any,
        **kwargs: Any,
    ):
        new = sys.modules["tensorrt_llm"].__version__ == NEW
        known = ARGUMENTS | ({"sleep_config"} if new else {"enable_sleep"})
        for name in kwargs:
            if name not in known:
                raise ValueError(f"LLM got invalid argument: {name}")
        assert not args, "the first three positions are placement arguments"
        assert kwargs["backend"] == "pytorch" and kwargs["load_format"] == "dummy"
        assert kwargs["sampler_type"] in ("auto", "TorchSampler") and kwargs["allreduce_strategy"] == "NCCL"
        self.environment = dict(os.environ)
        gpus = self.environment["CUDA_VISIBLE_DEVICES"].split(",")
        self.size = kwargs["tensor_parallel_size"]
        assert len(gpus) == self.size and (per_worker_gpu_share or 1.0) > 0.5, "two workers on one GPU"
        self.executor = Executor(
            kwargs, kwargs["kv_cache_config"], bool(kwargs.get("sleep_config" if new else "enable_sleep"))
        )
        self.executor.first_device, self.executor.last_device = int(gpus[0]), int(gpus[-1])
        self.executor.tags = {**TAGS, **(NEW_TAGS if new else {})}.values()
        module, _, name = kwargs["ray_worker_extension_cls"].rpartition(".")
        extension = getattr(import_module(module), name)
        if clash := [n for n in dir(extension) if not n.startswith("__") and hasattr(_Worker, n)]:
            raise ValueError(f"the worker has {clash} already")
        worker = type("Worker", (_Worker, extension), {})
        self.workers = [worker(self.executor, int(gpu)) for gpu in gpus]
        self.ready = self.closed = False
        AsyncLLM.last = self

    async def setup_async(self) -> "AsyncLLM":
        await self._delayed("setup_async")
        self.ready = True
        return self

    async def release(self, tags: list[str]) -> None:
        await self.collective_rpc("sleep", args=(tags,))

    async def resume(self, tags: list[str]) -> None:
        await self.collective_rpc("wakeup", args=(tags,))

    async def update_weights(self, weights: dict[str, str]) -> None:
        self.executor.payloads.append(weights)
        await self.collective_rpc("update_weights", args=(weights,))

    async def collective_rpc(
        self,
        method: str,
        args: tuple[Any, ...] = (),
        kwargs: dict | None = None,
        unique_reply_rank: int | None = None,
    ) -> list[Any]:
        self._check()
        await self._delayed(method)
        self.executor.calls.append(method)
        return [getattr(worker, method)(*args, **(kwargs or {})) for worker in self.workers]

    def generate_async(self, inputs: Any, sampling_params: Any = None) -> Request:
        self._check()
        if self.executor.parked:
            raise RuntimeError(f"generate with released memory: {sorted(self.executor.parked)}")
        if self.executor.open or self.executor.torn:
            raise RuntimeError("generate between weights and the call that closes their update")
        prompt = inputs["prompt_token_ids"]
        assert isinstance(prompt, list) and all(type(i) is int for i in prompt)
        if len(prompt) + sampling_params.max_tokens > self.executor.arguments["max_seq_len"]:
            raise ValueError("prompt and max_tokens exceed max_seq_len")
        self.executor.requests.append((prompt, sampling_params))
        return Request(self.executor, prompt, sampling_params)

    def shutdown(self) -> None:
        self.closed = True

    async def _delayed(self, method: str) -> None:
        await asyncio.sleep(self.executor.delays.get(method, DELAYS.get(method, 0)))

    def _check(self) -> None:
        if not self.ready or self.closed:
            raise RuntimeError("the engine was not set up, or is shut down")

    def __await__(self) -> Any:
        return self.setup_async().__await__()

    def __enter__(self) -> None:
        raise RuntimeError("Please use 'async with AsyncLLM' instead")

    def __exit__(self, *_: Any) -> None: ...

    async def __aenter__(self) -> "AsyncLLM":
        return await self.setup_async()

    async def __aexit__(self, *_: Any) -> None:
        self.shutdown()


DELAYS: dict[str, float] = {}  # seconds, by method, of engines that do not exist yet


def get_device_uuid(device: int) -> str:
    return f"GPU-{device:08d}"


def install(monkeypatch: Any, version: str = NEW, *, gpu: int = 0) -> ModuleType:
    """Put the fake where `import tensorrt_llm` finds it, in the form of `version` (NEW or OLD), on GPU number `gpu`."""
    new = version == NEW
    memory = Enum("ExecutorMemoryType", {**TAGS, **(NEW_TAGS if new else {})}, type=str)
    flags = [("enable_block_reuse", bool, True), ("free_gpu_memory_fraction", float, 0.9), ("max_tokens", Any, None)]
    llm_args = {
        "KvCacheConfig": make_dataclass("KvCacheConfig", flags, kw_only=True),
        "CudaGraphConfig": make_dataclass(
            "CudaGraphConfig", [("enable_padding", bool, False), ("max_batch_size", int, 0)], kw_only=True
        ),
    }
    sampling = {"SamplingParams": NewSamplingParams if new else OldSamplingParams}
    if new:
        sampling["LogprobMode"] = LogprobMode
        modes = [("restore_modes", dict, field(default_factory=dict))]
        llm_args |= {"SleepConfig": make_dataclass("SleepConfig", modes, kw_only=True), "ExecutorMemoryType": memory}
    modules = {
        "": {"__version__": version, "AsyncLLM": AsyncLLM, "SamplingParams": sampling["SamplingParams"]},
        ".llmapi": {},
        ".llmapi.llm_args": llm_args,
        ".llmapi.rlhf_utils": {"WorkerExtension": WorkerExtension if new else OldWorkerExtension},
        ".sampling_params": sampling,
        "._torch": {},
        "._torch.utils": {"get_device_uuid": get_device_uuid},
        "._torch.virtual_memory": {"ExecutorMemoryType": memory},
    }
    for name, contents in modules.items():
        module = ModuleType(f"tensorrt_llm{name}")
        module.__path__ = []
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    # Its base class is this installation's.
    monkeypatch.delitem(sys.modules, "trainers.engines.trtllm_worker", raising=False)
    monkeypatch.setattr(trtllm_api, "current_gpu", lambda: gpu)
    monkeypatch.setattr(trtllm_api, "to_handle", cpu_handle)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: AsyncLLM.last.executor.copy_queued())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    AsyncLLM.last = None
    return sys.modules["tensorrt_llm"]


def push(engine: Any, model: Any, version: int) -> None:
    """One full update with a model's parameters, in two buckets."""
    weights = [(name, p.detach()) for name, p in file_names(model.named_parameters()).items()]
    engine.begin_update(version, {name: TensorSpec(tuple(p.shape), p.dtype) for name, p in weights})
    for bucket in (weights[1::2], weights[::2]):
        engine.put(bucket)
    engine.end_update()


def make_trtllm_engine(
    model: Any,
    tokenizer: Any,
    monkeypatch: Any,
    *,
    version: str = NEW,
    folder: Path | None = None,
    timeout_s: float | None = 60.0,
    gpu: int = 0,
    updated: bool = True,
    max_seq_len: int = 512,
    **cfg: Any,
) -> Any:
    """An engine on the fake, with the weights of `model` as version 0 (unless `updated` is false).

    Args:
        folder: of the model's config and tokenizer; default: the tiny Llama's.
        cfg: fields of TRTLLMConfig.
    """
    from trainers.engines.trtllm import TRTLLMEngine

    install(monkeypatch, version, gpu=gpu)
    engine = TRTLLMEngine(
        folder or tiny.tiny_model(),
        tokenizer,
        TRTLLMConfig(**cfg),
        max_seq_len=max_seq_len,
        max_batch_size=8,
        dtype=torch.float32,
        timeout_s=timeout_s,
    )
    if updated:
        push(engine, model, 0)
    return engine


def executor() -> Executor:
    """That of the newest engine."""
    return AsyncLLM.last.executor
