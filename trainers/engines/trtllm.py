"""TensorRT-LLM's PyTorch backend as an engine: AsyncLLM under Ray, on the GPUs that also train.

AsyncLLM lives in one event loop in one thread; every call waits for it, and no longer than policy.generation.timeout_s.
Weights travel as CUDA IPC handles, by GPU: each rank of a replica holds the full tensors on its own GPU, so the leader
gathers their handles and posts one payload; the engine slices. What the versions differ in: trtllm_api.py.
"""

import asyncio
import concurrent.futures
import contextlib
import socket
import threading
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from trainers.config_generation import TRTLLMConfig
from trainers.engines import Capabilities, Completion, Manifest, Sampling, stop_ids, trtllm_api
from trainers.engines.answers import end_of, on_meta
from trainers.engines.guarded import check_manifest
from trainers.engines.replica import Replica, ReplicaEngine

T = TypeVar("T")
ABORT_S = 10.0  # it only clears marks; an engine that hangs has used up timeout_s before


class TRTLLMEngine(ReplicaEngine):
    """The leader of the replica alone talks to AsyncLLM.

    Args:
        folder: Hugging Face folder (or hub id) with config and tokenizer; its weights are not read.
        tokenizer: what stop strings are found with.
        max_seq_len: tokens of prompt and response together, unless cfg has its own.
        max_batch_size: requests decoded together.
        dtype: of the engine's weights.

    Raises:
        ImportError: tensorrt_llm is missing, broken or too old.
        RuntimeError: the engine started on other GPUs than those of its ranks.
        TimeoutError: the engine did not start within timeout_s.
    """

    def __init__(
        self,
        folder: Path | str,
        tokenizer: Any,
        cfg: TRTLLMConfig,
        *,
        max_seq_len: int,
        max_batch_size: int = 64,
        dtype: torch.dtype = torch.bfloat16,
        timeout_s: float | None = None,
    ):
        super().__init__(timeout_s=timeout_s)
        self.api = trtllm_api.load_api()
        self.tokenizer = tokenizer
        self.max_seq_len = cfg.max_seq_len or max_seq_len
        self.unusable = "none were sent yet"  # they are random until then
        self.parked: dict[str, list[str]] = {}  # part -> tags that were released for it
        self.model = on_meta(folder)
        self.parameters = dict(self.model.named_parameters())
        self.replica = Replica(cfg.tensor_parallel_size, timeout_s=timeout_s)
        arguments = trtllm_api.constructor_arguments(
            self.api,
            str(folder),
            cfg,
            max_seq_len=self.max_seq_len,
            max_batch_size=max_batch_size,
            dtype=dtype,
        )

        def mine() -> tuple[str, str, str]:
            uuid = self.api.get_device_uuid(trtllm_api.current_gpu())
            return uuid, trtllm_api.physical_gpu(), socket.gethostname()

        uuids, gpus, hosts = zip(*self.replica.together(mine), strict=True)
        if len(set(hosts)) > 1 or len(set(uuids)) < len(uuids):
            raise ValueError(
                f"policy.generation.trtllm_cfg.tensor_parallel_size={len(uuids)} needs as many ranks on GPUs of their "
                f"own of one host, got {sorted(zip(hosts, uuids, strict=True))}"
            )
        self.devices: tuple[str, ...] = uuids
        self.uuid = uuids[self.replica.index]
        self.loop: _Loop | None = None
        try:
            self.replica.leader_does(lambda: self._start(arguments, gpus))
        except BaseException:
            self.close()
            raise

    def _start(self, arguments: dict[str, Any], gpus: Sequence[str]) -> None:
        self.loop = _Loop()

        async def start() -> Any:
            llm = self.api.AsyncLLM(**arguments)
            await llm.setup_async()
            return llm

        with trtllm_api.ray_environment(gpus):
            self.llm = self._call("the start of AsyncLLM", start())
        workers = self._call("report_device_id", self.llm.collective_rpc("report_device_id"))
        if sorted(workers) != sorted(self.devices):
            raise RuntimeError(f"the engine's workers are on {sorted(workers)}, its ranks on {sorted(self.devices)}")

    def _call(self, what: str, coroutine: Coroutine[Any, Any, T]) -> T:
        assert self.loop is not None, "only the leader has an engine"
        return self.loop.run(what, coroutine, self.timeout_s)

    def capabilities(self) -> Capabilities:
        return Capabilities(
            name="trtllm",
            version=self.api.version,
            transport="cuda_ipc",
            raw_logprobs_only=self.api.processed is None,
            row_seeds=False,  # its sampler draws for a batch, whatever the requests' seeds are
            max_len=self.max_seq_len,
            devices=self.devices,
        )

    def _generate_together(
        self, prompts: list[list[int]], sampling: Sampling, seeds: Sequence[int]
    ) -> list[Completion]:
        return self.replica.leader_does(lambda: self._generate(prompts, sampling, seeds))

    def _generate(self, prompts: list[list[int]], sampling: Sampling, seeds: Sequence[int]) -> list[Completion]:
        stops = stop_ids(sampling, self.model, self.tokenizer)
        pad = self.tokenizer.pad_token_id
        wanted = [trtllm_api.sampling_arguments(self.api, sampling, seed, stops, pad) for seed in seeds]

        async def answers() -> list[Any]:
            requests: list[Any] = []
            try:
                for prompt, arguments in zip(prompts, wanted, strict=True):
                    params = self.api.SamplingParams(**arguments)
                    requests.append(self.llm.generate_async({"prompt_token_ids": prompt}, params))
                return await asyncio.gather(*requests)
            except BaseException:
                for request in requests:
                    request.abort()
                raise

        return [self._completion(a.outputs[0], sampling, stops) for a in self._call("generate", answers())]

    def _completion(self, output: Any, sampling: Sampling, stops: Sequence[int]) -> Completion:
        """What the contract promises of an answer, made sure of: versions differ in what they strip and when they end.

        Raises:
            RuntimeError: no log-probs, a response that ends for no reason, or before min_new_tokens.
        """
        tokens, given = list(output.token_ids), output.logprobs
        if not tokens or given is None or len(given) < len(tokens):
            raise RuntimeError(
                f"TensorRT-LLM {self.api.version} answered {len(tokens)} tokens with "
                f"{'no' if given is None else len(given)} log-probs (finish_reason={output.finish_reason})"
            )
        end = end_of(tokens, sampling, stops, self.tokenizer)
        if end is not None:
            tokens = tokens[:end]
        elif len(tokens) != sampling.max_new_tokens:
            raise RuntimeError(
                f"TensorRT-LLM {self.api.version} ended a response after {len(tokens)} tokens, at none of the tokens "
                f"that end one (finish_reason={output.finish_reason}): was the stop token dropped?"
            )
        if len(tokens) < sampling.min_new_tokens:
            raise RuntimeError(
                f"TensorRT-LLM {self.api.version} answered {len(tokens)} tokens, fewer than min_new_tokens="
                f"{sampling.min_new_tokens}"
            )
        logprobs = [_logprob(entry, token) for entry, token in zip(given, tokens, strict=False)]
        return Completion(tokens, logprobs, "length" if end is None else "stop", self.version)

    def _begin_update(self, manifest: Manifest) -> None:
        check_manifest(manifest, self.parameters)

    def _put(self, bucket: list[tuple[str, Tensor]]) -> int:
        here = [(name, self._on_gpu(tensor)) for name, tensor in bucket]  # held until the engine has its copy

        def handles() -> tuple[str, str]:
            if torch.cuda.is_available():
                torch.cuda.current_stream().synchronize()  # what writes these tensors is done before others read them
            return self.uuid, trtllm_api.packed_handles(here)

        payload = dict(self.replica.together(handles))

        async def copy() -> None:
            await self.llm.update_weights(payload)
            await self.llm.collective_rpc("fastppo_synchronize")

        self.replica.leader_does(lambda: self._call("update_weights", copy()))
        return sum(tensor.numel() * tensor.element_size() for _, tensor in here)

    @staticmethod
    def _on_gpu(tensor: Tensor) -> Tensor:
        where = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else tensor.device
        return tensor.detach().to(where).contiguous()

    def _end_update(self) -> None:
        """The closing call fuses and lays out what came, and empties the prefix cache."""
        self.replica.leader_does(lambda: self._call("update_weights(None)", self.llm.update_weights(None)))
        if torch.cuda.is_available():
            torch.cuda.ipc_collect()

    def _abort_update(self) -> None:
        """What came stays until the next full update writes over it; but its workers must agree that this one is over.
        No rank waits here, and nothing is raised: an error is under way already."""
        if self.replica.leader and self.api.can_abort and self.loop is not None:
            with contextlib.suppress(Exception):
                self.loop.run("abort", self.llm.collective_rpc("abort_update_weights"), ABORT_S)

    def _sleep(self, parts: set[str], *, keep_weights: bool) -> bool:
        tags = {"kv": [trtllm_api.KV_CACHE], "weights": [t for t in self.api.memory_tags if t != trtllm_api.KV_CACHE]}
        if keep_weights:
            tags.pop("weights")  # in place: what their restore mode would bring back differs between versions
        chosen = {part: tags[part] for part in ("weights", "kv") if part in parts and part in tags}
        released = [tag for part in chosen.values() for tag in part]

        async def release() -> None:
            await self.llm.collective_rpc("reset_prefix_cache")  # releasing its memory does not empty its index
            if released:
                await self.llm.release(released)

        self.replica.leader_does(lambda: self._call("release", release()))
        self.parked |= chosen
        return "weights" in chosen

    def _wake(self, part: str) -> None:
        if tags := self.parked.get(part):
            self.replica.leader_does(lambda: self._call("resume", self.llm.resume(tags)))
            del self.parked[part]

    def _reset_prefix_cache(self) -> None:
        self.replica.leader_does(
            lambda: self._call("reset_prefix_cache", self.llm.collective_rpc("reset_prefix_cache"))
        )

    def _close(self) -> None:
        if self.loop is None:
            return
        loop, self.loop = self.loop, None
        llm, self.llm = getattr(self, "llm", None), None

        async def shutdown() -> None:
            llm.shutdown()

        try:
            if llm is not None:
                loop.run("shutdown", shutdown(), self.timeout_s)
        finally:
            loop.stop()


class _Loop:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name="trtllm", daemon=True)
        self.thread.start()

    def run(self, what: str, coroutine: Coroutine[Any, Any, T], timeout_s: float | None) -> T:
        """The coroutine's result.

        Raises:
            TimeoutError: not there within timeout_s seconds.
        """
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        done, _ = concurrent.futures.wait([future], timeout_s)
        if not done:
            future.cancel()
            raise TimeoutError(
                f"TensorRT-LLM: {what} did not answer within policy.generation.timeout_s={timeout_s:g} seconds"
            )
        return future.result()

    def stop(self) -> None:
        async def cancel() -> None:
            late = asyncio.all_tasks() - {asyncio.current_task()}
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

        concurrent.futures.wait([asyncio.run_coroutine_threadsafe(cancel(), self.loop)], timeout=5)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(timeout=5)  # a call that hangs in the engine must not keep the trainer
        if not self.thread.is_alive():
            self.loop.close()


def _logprob(entry: Any, token: int) -> float:
    """Of the sampled token: a mapping may hold others beside it, and some versions give the number alone."""
    return float(entry[token].logprob) if hasattr(entry, "keys") else float(entry)
