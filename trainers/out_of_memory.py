"""Out of memory, in words: which stage, and which setting to lower. Nothing is tried again in silence."""

from typing import Any

STAGES = {
    "gen": "generation",
    "testing": "validation",
    "reward": "the reward",
    "old_log_prob": "scoring",
    "values": "the critic's scoring",
    "adv": "the advantages",
    "update_critic": "the critic's update",
    "update_actor": "the policy's update",
    "update_weights": "handing the weights to the engine",
    "save_checkpoint": "saving a checkpoint",
}
# The settings that bound a stage's memory and, being free, may change when the run is resumed. The first that is set
# counts.
TO_LOWER = {
    "gen": ("policy.generation.max_batch_size",),
    "testing": ("policy.generation.max_batch_size",),
    "old_log_prob": ("policy.max_tokens_per_micro_batch", "policy.logprob_batch_size"),
    "values": ("value.max_tokens_per_micro_batch", "policy.logprob_batch_size"),
    "update_critic": ("value.max_tokens_per_micro_batch", "value.train_micro_batch_size"),
    "update_actor": ("policy.max_tokens_per_micro_batch", "policy.train_micro_batch_size"),
}


def is_out_of_memory(error: BaseException) -> bool:
    """Of the device, or of the host: torch reports a failed CPU allocation as a plain RuntimeError."""
    import torch

    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    signs = ("can't allocate memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
    torchs_own = isinstance(error, RuntimeError) and type(error).__module__ in ("builtins", "torch")
    return torchs_own and any(sign in str(error) for sign in signs)


def advice(stage: str, error: BaseException, config: Any) -> str:
    """The message for `error` in `stage` (a name of `timing_s/*`, or words)."""
    from trainers.config import walk

    values = {key: value for key, _, value in walk(config)}
    key = next((key for key in TO_LOWER.get(stage, ()) if values.get(key)), None)
    if key is None:
        way = "no setting bounds this stage alone; a smaller model or fewer trained layers need less"
    elif key.endswith("_tokens_per_micro_batch") or values[key] > 1:
        way = f"lower {key}, now {values[key]}, and start again: a run goes on from its last checkpoint"
    else:
        way = (
            f"{key} is 1 already: data.max_prompt_length and policy.generation.max_new_tokens bound the sequences, "
            "policy.num_layers_unfrozen what is trained"
        )
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return f"out of memory in {STAGES.get(stage, stage)}: {way}. --dry-run shows what needs how much. ({reason})"
