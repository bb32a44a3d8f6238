"""vLLM as an engine, on the GPUs that also train.

By default it lives in the trainer's process: with one rank alone, under torchrun as one of vLLM's workers
(`external_launcher`), where the ranks of a replica are all given the same requests and each keeps its own answers. So
weights are handed over as they are. In a process of its own they travel as one CUDA IPC handle a bucket.

Weights go through a worker extension (vllm_worker.py), not through vLLM's weight-transfer engines: those of 0.25.1 that
could serve GPUs shared with the trainer need Ray, and none loads from the same process.
"""

import gc
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from trainers import dist
from trainers.config_generation import VLLMConfig
from trainers.engines import Capabilities, Completion, Manifest, Sampling, stop_ids, vllm_api, vllm_worker
from trainers.engines.answers import end_of, on_meta
from trainers.engines.guarded import Deadline, check_manifest
from trainers.engines.replica import Replica, ReplicaEngine

T = TypeVar("T")
STEPS_BETWEEN_LOOKS = 16  # of ranks that have to meet for one
TAGS = {"weights": "weights", "kv": "kv_cache"}


class VLLMEngine(ReplicaEngine):
    """Every rank of the replica is one of vLLM's workers, and steps with the others.

    Args:
        folder: Hugging Face folder (or hub id) with the model's configuration; its weights are not read.
        tokenizer: what stop strings are found with.
        max_model_len: tokens of prompt and response together, unless cfg has its own.
        max_batch_size: requests decoded together.
        dtype: of the engine's weights.

    Raises:
        ImportError: vllm is missing, broken or too old.
        ValueError: the ranks and cfg do not fit each other.
    """

    def __init__(
        self,
        folder: Path | str,
        tokenizer: Any,
        cfg: VLLMConfig,
        *,
        max_model_len: int,
        max_batch_size: int = 64,
        dtype: torch.dtype = torch.bfloat16,
        timeout_s: float | None = None,
    ):
        super().__init__(timeout_s=timeout_s)
        self.api = vllm_api.load_api()
        self.tokenizer = tokenizer
        self.max_model_len = cfg.max_model_len or max_model_len
        self.in_process = cfg.in_process
        self.unusable = "none were sent yet"  # they are random until then
        if not cfg.in_process and dist.size() > 1:
            raise ValueError(f"policy.generation.vllm_cfg.in_process=false needs one rank, got {dist.size()}")
        self.replica = Replica(cfg.tensor_parallel_size, timeout_s=timeout_s)
        self.model = on_meta(folder)
        self.parameters = dict(self.model.named_parameters())
        arguments = vllm_api.constructor_arguments(
            str(folder),
            cfg,
            max_model_len=self.max_model_len,
            max_batch_size=max_batch_size,
            dtype=dtype,
            ranks=dist.size(),
        )
        self.can_sleep = bool(arguments["enable_sleep_mode"])
        self.llm: Any = None
        with vllm_api.starting(cfg.in_process):
            self.llm = self.api.LLM(**arguments)

    def capabilities(self) -> Capabilities:
        return Capabilities(
            name="vllm",
            version=self.api.version,
            transport="inproc" if self.in_process else "cuda_ipc",
            can_sleep=self.can_sleep,
            max_len=self.max_model_len,
        )

    def _generate(self, prompts: list[list[int]], sampling: Sampling, seeds: Sequence[int]) -> list[Completion]:
        vllm_api.check_sampling(sampling)
        stops = stop_ids(sampling, self.model, self.tokenizer)
        params = [self.api.SamplingParams(**vllm_api.sampling_arguments(sampling, seed, stops)) for seed in seeds]
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self._bounded(lambda deadline: self._answers(requests, params, deadline))
        return [self._completion(output.outputs[0], sampling, stops) for output in outputs]

    def _answers(self, requests: list[dict[str, Any]], params: list[Any], deadline: Deadline) -> list[Any]:
        """vLLM's own loop, with a look at the clock. Ranks of a replica look together, and not after every step: one
        that stopped stepping alone would leave the others waiting."""
        engine, done, steps = self.llm.llm_engine, [], 0
        ids = self.llm.enqueue(requests, params, use_tqdm=False)
        try:
            while engine.has_unfinished_requests():
                done += [output for output in engine.step() if output.finished]
                if self.replica.size == 1 or steps % STEPS_BETWEEN_LOOKS == 0:
                    self.replica.together(deadline.check)
                steps += 1
        except BaseException:
            engine.abort_request(ids, internal=True)
            raise
        if len(done) != len(requests):
            raise RuntimeError(f"vLLM {self.api.version} answered {len(done)} of {len(requests)} requests")
        return sorted(done, key=lambda output: int(output.request_id))

    def _bounded(self, compute: Callable[[Deadline], T]) -> T:
        """In one process nobody can stop a step that hangs; in another one, waiting for it can be given up."""
        deadline = Deadline(self.timeout_s)
        if self.in_process or self.timeout_s is None:
            return compute(deadline)
        result: list[T] = []
        error: list[BaseException] = []

        def run() -> None:
            try:
                result.append(compute(deadline))
            except BaseException as raised:
                error.append(raised)

        thread = threading.Thread(target=run, name="vllm", daemon=True)
        thread.start()
        thread.join(self.timeout_s + 1)  # the loop itself stops at timeout_s unless a step hangs
        if error:
            raise error[0]
        if not result:
            deadline.check()
        return result[0]

    def _completion(self, output: Any, sampling: Sampling, stops: Sequence[int]) -> Completion:
        """What the contract promises of an answer, made sure of.

        Raises:
            RuntimeError: no log-probs, or a response that ends for no reason or before min_new_tokens.
        """
        tokens, given = list(output.token_ids), output.logprobs
        if not tokens or given is None or len(given) != len(tokens):
            raise RuntimeError(
                f"vLLM {self.api.version} answered {len(tokens)} tokens with "
                f"{'no' if given is None else len(given)} log-probs (finish_reason={output.finish_reason})"
            )
        end = end_of(tokens, sampling, stops, self.tokenizer)
        tokens = tokens[:end]
        if len(tokens) < sampling.min_new_tokens or (end is None and len(tokens) != sampling.max_new_tokens):
            raise RuntimeError(
                f"vLLM {self.api.version} ended a response after {len(tokens)} tokens for no reason that it was given "
                f"(finish_reason={output.finish_reason})"
            )
        logprobs = [float(entry[token].logprob) for entry, token in zip(given, tokens, strict=False)]
        return Completion(tokens, logprobs, "length" if end is None else "stop", self.version)

    def _begin_update(self, manifest: Manifest) -> None:
        check_manifest(manifest, self.parameters)
        self.llm.collective_rpc("fastppo_begin_update")

    def _put(self, bucket: list[tuple[str, Tensor]]) -> int:
        if not bucket:
            return 0
        if self.in_process:
            self.llm.collective_rpc("fastppo_put", args=(bucket,))
        else:
            here = [(name, tensor if tensor.is_cuda else self._on_gpu(tensor)) for name, tensor in bucket]
            flat, layout = vllm_worker.packed(here)
            if flat.is_cuda:
                torch.cuda.current_stream().synchronize()  # what writes the buffer is done before others read it
            self.llm.collective_rpc("fastppo_put", args=(vllm_worker.handle(flat, layout),))
        return sum(tensor.numel() * tensor.element_size() for _, tensor in bucket)

    @staticmethod
    def _on_gpu(tensor: Tensor) -> Tensor:
        return tensor.to("cuda") if torch.cuda.is_available() else tensor

    def _end_update(self) -> None:
        self.llm.collective_rpc("fastppo_end_update")
        self._reset_prefix_cache()
        if torch.cuda.is_available() and not self.in_process:
            torch.cuda.ipc_collect()

    def _abort_update(self) -> None:
        """Layers wait for the rest of their weights: they take what there is, so that the next update starts anew."""
        self.llm.collective_rpc("fastppo_end_update")

    def _sleep(self, parts: set[str], *, keep_weights: bool) -> bool:
        if not self.can_sleep:
            return False
        # vLLM does nothing if any part of it sleeps already.
        for part in TAGS.keys() - parts:
            self.llm.wake_up(tags=[TAGS[part]])
        self.llm.sleep(level=1 if keep_weights else 2)
        return not keep_weights

    def _wake(self, part: str) -> None:
        if self.can_sleep:
            self.llm.wake_up(tags=[TAGS[part]])

    def _reset_prefix_cache(self) -> None:
        if not self.llm.reset_prefix_cache():
            raise RuntimeError(
                f"vLLM {self.api.version} did not reset its prefix cache: some of it is still in use, and would answer "
                "with earlier weights"
            )

    def _close(self) -> None:
        llm, self.llm = self.llm, None
        if llm is None:
            return
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
