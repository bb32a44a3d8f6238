"""`--dry-run cluster.gpus=N`: the plan of trainers/cluster_plan.py for the settings, in words, and beside it those of
other layouts of the same run."""

from collections.abc import Iterator, Sequence
from typing import Any

from trainers.batch_plan import BatchPlan, counted
from trainers.cluster_layout import Layout, candidates, check, layout_of
from trainers.cluster_memory import Part
from trainers.cluster_plan import EnginePlan, Job, Plan, Stage, Work, host_bytes, plan_of, wanted_rows
from trainers.cluster_traffic import Machine
from trainers.config import PolicyConfig, TrainerConfig, ValueConfig
from trainers.config_checks import ConfigError
from trainers.memory_plan import SHARE, in_a_pass
from trainers.model_shapes import ModelShape, shape_of
from trainers.policy import megatron_model

OTHERS = 5
SMALL = 0.02  # of a step: what takes less is not worth a turn
MEMORY_GB = 80.0  # of a GPU, where cluster.device_memory_gb does not say
INDENT = " " * 10


def cluster_lines(config: TrainerConfig, plan: BatchPlan, policy: Any, critic: Any, reward_bytes: int) -> list[str]:
    """
    Args:
        policy, critic: (name, transformers config) of each; critic: None unless it is a model of its own on the GPUs.

    Raises:
        ConfigError: a layout that the model, the batch or the GPUs do not allow, or a setting that is not planned for.
    """
    machine, gpus = machine_of(config), config.cluster.gpus
    assert gpus is not None
    if problems := [*not_planned(config), *not_computed(config, policy, critic)]:
        raise ConfigError("\n".join(problems))
    shapes = [shape_of(hf, name) for name, hf in (policy, *([critic] if critic else []))]
    job = job_of(config, plan, shapes, reward_bytes)
    if problems := [*cannot_be(job)]:
        raise ConfigError("\n".join(problems))
    return [*head_words(job, machine), *plan_words(plan_of(job, machine)), *others_words(job, machine)]


def not_computed(config: TrainerConfig, policy: Any, critic: Any) -> Iterator[str]:
    """Models that megatron-core's layers would compute otherwise than transformers."""
    for key, part, model in (("policy", config.policy, policy), ("value", config.critic, critic)):
        try:
            if part is not None and model is not None and part.backend == "megatron":
                megatron_model.check(model[1], key)
        except ValueError as error:
            yield str(error)


def cannot_be(job: Job) -> Iterator[str]:
    """What does not divide what."""
    for part in job.parts:
        try:
            check(part.layout, part.shape, "value" if part.critic else "policy")
        except ValueError as error:
            yield str(error)
    shape, tp = job.policy.shape, job.engine.tp
    if shape.heads % tp:
        key = f"policy.generation.{job.engine.backend}_cfg.tensor_parallel_size"
        yield f"{key}={tp} does not divide the {shape.heads} attention heads of {shape.name}"


def not_planned(config: TrainerConfig) -> Iterator[str]:
    gpus = "--dry-run" if config.cluster.gpus is None else f"cluster.gpus={config.cluster.gpus}"
    if config.policy.peft.enabled:
        yield f"policy.peft.enabled=true: {gpus} plans for trained layers, not for adapters"
    for key, part in (("policy", config.policy), ("policy.generation", config.policy.generation)):
        if part.dtype == "float32":
            yield f"{key}.dtype=float32: {gpus} plans for bfloat16"


def machine_of(config: TrainerConfig) -> Machine:
    cluster, plan = config.cluster, config.cluster.plan
    return Machine(
        gpus_per_node=cluster.gpus_per_node,
        memory_gb=MEMORY_GB if cluster.device_memory_gb is None else cluster.device_memory_gb,
        gpu_tflops=plan.gpu_tflops,
        gpu_bandwidth_gbps=plan.gpu_bandwidth_gbps,
        nvlink_gbps=plan.nvlink_gbps,
        network_gbps=plan.network_gbps,
        mfu=plan.mfu,
    )


def engine_of(config: TrainerConfig) -> EnginePlan:
    generation = config.policy.generation
    tp, share = {
        "native": (1, 0.0),
        "vllm": (generation.vllm_cfg.tensor_parallel_size, generation.vllm_cfg.gpu_memory_utilization),
        "trtllm": (generation.trtllm_cfg.tensor_parallel_size, generation.trtllm_cfg.free_gpu_memory_fraction),
    }[generation.backend]
    return EnginePlan(
        generation.backend, tp, generation.max_batch_size, share, generation.kv_cache_gb,
        generation.refit_bucket_mb * 2**20, generation.release_memory,
    )  # fmt: skip


def job_of(config: TrainerConfig, plan: BatchPlan, shapes: Sequence[ModelShape], reward_bytes: int = 0) -> Job:
    """`shapes`: the policy's, and that of a critic with a model of its own on the GPUs."""
    policy, value, longest = config.policy, config.critic, plan.longest_sequence

    def part(cfg: PolicyConfig | ValueConfig, shape: ModelShape, *, critic: bool = False) -> Part:
        return Part(
            shape,
            layout_of(cfg, config.cluster.gpus or 1),
            cfg.train_global_batch_size,
            in_a_pass(cfg, cfg.train_micro_batch_size, longest),
            cfg.num_layers_unfrozen,
            critic,
            cfg.param_dtype == "float32",
        )

    skipped = config.algorithm.skip_reference_policy_logprobs_calculation
    return Job(
        work=Work(
            prompts=plan.prompts,
            responses=plan.responses_per_prompt,
            prompt=min(plan.max_prompt_length, longest),
            longest=longest,
            scored=in_a_pass(policy, policy.logprob_batch_size, longest),
            epochs=plan.epochs,
        ),
        policy=part(policy, shapes[0]),
        critic=part(value, shapes[1], critic=True) if value is not None and len(shapes) > 1 else None,
        critic_mode=None if value is None else value.mode,
        has_reference=policy.reference == "auto" and not skipped,
        scores_reference=not skipped,
        engine=engine_of(config),
        reward_bytes=reward_bytes,
        offload_optimizer=policy.offload_optimizer,
        offload_critic=value is not None and value.offload,
    )


def others(job: Job, machine: Machine) -> list[Plan]:
    """Of each other way to divide the model that one with the least recomputation that fits, the fastest first; those
    that do not fit last, the nearest to fitting first."""
    best: dict[Layout, Plan] = {}
    whole = job.critic_mode != "shared"  # megatron-core trains all layers, and no head beside its own
    whole = whole and all(part.whole and part.shape.family in megatron_model.FAMILIES for part in job.parts)
    for layout in candidates(job.policy.shape, job.layout.gpus, machine.gpus_per_node, job.layout):
        uneven = any(part.batch % layout.dp for part in job.parts)
        other = job.laid_out(layout)
        if uneven or (layout.megatron and not whole) or any(cannot_be(other)):
            continue
        found, family = plan_of(other, machine), layout.family
        if family not in best or (not best[family].fits and found.peak < best[family].peak):
            best[family] = found
    best.pop(job.layout.family, None)
    return sorted(best.values(), key=lambda plan: (not plan.fits, plan.seconds if plan.fits else plan.peak))


def head_words(job: Job, machine: Machine) -> Iterator[str]:
    gpus, policy = job.layout.gpus, job.policy
    nodes = -(-gpus // machine.gpus_per_node)
    yield (
        f"cluster   {counted(gpus, 'GPU')} of {machine.memory_gb:g} GB in {nodes} node{'s' if nodes > 1 else ''}, "
        f"{machine.gpu_tflops:g} TFLOP/s at mfu {machine.mfu:g}; GB/s of a GPU: memory "
        f"{machine.gpu_bandwidth_gbps:,.0f}, NVLink {machine.nvlink_gbps:g}, network {machine.network_gbps:g}"
    )
    yield f"policy    {model_words(policy)}"
    if job.critic is not None:
        yield f"critic    {model_words(job.critic)}"
    elif job.critic_mode == "shared":
        yield f"critic    a head on the policy's trunk, {policy.shape.hidden + 1:,} parameters"
    elif job.critic_mode == "remote":
        yield "critic    on a server, whose GPUs and time are not planned here"
    reference = "none" if not job.scores_reference else "on the GPUs" if job.has_reference else "in the CPU's memory"
    engine = job.engine
    spans = f"{engine.backend}, {engine.tp} GPU{'s' if engine.tp > 1 else ''} an engine"
    given_back = ", its memory given back while the policy trains" if engine.released else ""
    yield f"reference {reference}; generation by {spans}{given_back}"


def model_words(part: Part) -> str:
    shape, layout = part.shape, part.layout
    active = f", {shape.active / 1e9:.1f} B of them for a token" if shape.experts else ""
    te = "; taking Transformer Engine to be installed" if layout.megatron and layout.flash else ""
    return f"{shape.name}, {shape.parameters:,} parameters{active}: {layout}{te}"


def plan_words(plan: Plan) -> list[str]:
    machine, room = plan.machine, SHARE * plan.machine.memory_gb
    parts = ", ".join(f"{name} {gb(count)}" for name, count in plan.parts.items() if count)
    peaks = ", ".join(f"{name} {gb(count)}" for name, count in plan.peaks.items())
    verdict = f"{'fits' if plan.fits else 'does not fit'} in {room:g}, {SHARE:.0%} of {machine.memory_gb:g}"
    wanted, tokens = wanted_rows(plan.job), plan.job.work.longest
    cache = f"{INDENT}the KV cache has room for {plan.rows} sequences of {tokens:,} tokens, where {wanted} are wanted"
    lines = [f"memory    GB of the fullest GPU: {parts}", *([cache] if plan.rows < wanted else [])]
    lines.append(f"{INDENT}at most {peaks}: {verdict}")
    if not plan.fits:
        lines.append(f"{INDENT}turn {memory_knob(plan)}")
    rows = [["stage", "computing s", "sending s", "bubble s", "all s", "limit"]]
    sent = [["sent by one GPU", "", "NVLink GB", "network GB", "s", ""]]
    knobs: dict[str, list[str]] = {}
    for stage in plan.stages:
        costs = (stage.computing, stage.sending(machine), stage.bubble, stage.seconds(machine))
        limit = stage.limit(machine) if stage.seconds(machine) else "nothing moves"
        rows.append([stage.name, *(figures(x) for x in costs), limit])
        if stage.seconds(machine) >= SMALL * plan.seconds:
            knobs.setdefault(knob(stage, limit, plan), []).append(stage.name)
        for i, part in enumerate(part for part in stage.traffic if part.nvlink or part.network):
            numbers = (part.nvlink / 1e9, part.network / 1e9, part.seconds(machine))
            name, beside = stage.name if not i else "", "beside products" if part.beside else ""
            sent.append([name, part.what, *(figures(x) for x in numbers), beside])
    lines += ["step", *grid(rows, words=(0, 5)), f"{INDENT}in all {figures(plan.seconds)} s, not less"]
    first, *more = (f"{', '.join(names)}: {what}" for what, names in knobs.items())
    lines += [f"turn      {first}", *(INDENT + words for words in more)]
    lines += ["traffic", *grid(sent, words=(0, 1, 5))] if len(sent) > 1 else []
    return [*lines, host_words(plan)]


def host_words(plan: Plan) -> str:
    loading, waiting = host_bytes(plan.job, plan.machine)
    whole = "a whole one in bfloat16 for its engine" if plan.layout.megatron else "a whole one in float32"
    words = f"host      GB of a node's memory: {gb(loading)} while models load, each rank {whole}"
    if not loading:
        words = "host      no whole model in a node's memory, ranks read their own parts"
    return f"{words}; {gb(waiting)} of what waits there" if waiting else words


def others_words(job: Job, machine: Machine) -> list[str]:
    plans = others(job, machine)
    if not plans:
        return ["others    no other layout divides the model and the batches evenly"]
    fitting = sum(plan.fits for plan in plans)
    rows = [["", "GB of a GPU", "computing s", "sending s", "bubble s", "all s", ""]]
    for plan in plans[:OTHERS]:
        parts = [(stage.computing, stage.sending(machine), stage.bubble) for stage in plan.stages]
        sums = (sum(column) for column in zip(*parts, strict=True))
        numbers = (plan.peak / 1e9, *sums, plan.seconds)
        rows.append([str(plan.layout), *(figures(x) for x in numbers), "" if plan.fits else "does not fit"])
    order = "the fastest first" if fitting else "that nearest to it first"
    best = plans[0].job.parts
    keys = " ".join(part.layout.keys("value" if part.critic else "policy") for part in best)
    lines = [f"others    {fitting} of {len(plans)} other layouts fit; {order}:", *grid(rows, words=(0, 6))]
    return [*lines, f"{INDENT}the first: {keys}"]


def memory_knob(plan: Plan) -> str:
    held = ("weights", "gradients", "optimizer", "reference", "critic", "reward model")
    worst = max(plan.peaks, key=lambda name: plan.peaks[name])
    if sum(plan.parts[name] for name in held) > SHARE * plan.machine.memory_gb * 1e9:
        return "a layout that divides the model more, or more GPUs"
    if not plan.rows:
        return "the engine has no room for one sequence: more GPUs an engine (tensor_parallel_size), or a larger share"
    job, divided = plan.job, plan.layout.megatron or plan.layout.fully_shard
    ways = {
        "policy.offload_optimizer=true": not (divided or job.offload_optimizer),
        "value.offload=true": job.critic is not None and not (job.offload_critic or plan.layout.fully_shard),
        "policy.generation.backend=vllm over several GPUs": job.engine.backend == "native",
        "more GPUs an engine (tensor_parallel_size)": job.engine.backend != "native",
        "less of the memory for the engine": job.engine.backend != "native",
    }
    if worst not in ("generation", "refit"):
        ways = {"policy.generation.release_memory=true": not job.engine.released}
        ways["value.mode=remote"] = job.critic is not None
    if worst.endswith("update") and plan.parts["kept for backward"] > plan.peak / 4:
        return "a smaller train_micro_batch_size, recomputation, or a larger tensor_model_parallel_size"
    ways["policy.reference=cpu_offload"] = job.has_reference
    return ", ".join([way for way, helps in ways.items() if helps] + ["or a layout that divides the model more"])


def knob(stage: Stage, limit: str, plan: Plan) -> str:
    if limit == "reading" and plan.rows < wanted_rows(plan.job):
        return "more memory for the KV cache: more sequences for each reading of the weights; or more GPUs an engine"
    part = plan.job.critic if stage.name == "critic update" else plan.job.policy
    if limit == "products" and stage.name.endswith("update") and part and part.layout.recompute == "full":
        return "smaller micro-batches, if they do without recomputation: it is a quarter of the products"
    overlap = "" if not plan.layout.megatron or plan.layout.overlap_gradients else "overlap_grad_reduce=true, or "
    return KNOBS.get(limit, overlap + "a larger train_global_batch_size: sent once an optimizer step")


KNOBS = {
    "nothing moves": "",
    "products": "more GPUs, or fewer tokens",
    "reading": "policy.generation.max_batch_size: more sequences for each reading of the weights",
    "bubble": "fewer stages, or more micro-batches: smaller ones, or a larger batch; virtual stages",
    "tensor parallel": "a smaller tensor_model_parallel_size, with more stages",
    "experts": "a smaller expert_model_parallel_size, so that ranks of experts share a node",
    "expert tensor parallel": "a smaller expert_tensor_parallel_size",
    "pipeline": "sequence_parallel=true, or fewer stages",
    "fully_shard weights": "a larger train_micro_batch_size: each gathers all weights; or policy.backend=megatron",
    "fully_shard gradients": "a larger train_micro_batch_size: each sums all gradients; or policy.backend=megatron",
    "engine's tensor parallel": "fewer GPUs an engine",
    "responses": "none: it grows with the tokens of a step",
    "scores": "none: it grows with the tokens of a step",
    "requests": "none: it grows with the tokens of a step",
    "gather of shards": "fewer, longer steps: sent once a step",
    "broadcast over stages": "fewer stages: sent once a step",
    "gather over tensor parallel": "fewer, longer steps: sent once a step",
    "gather over expert tensor parallel": "a smaller expert_tensor_parallel_size: sent once a step",
    "gather over experts": "a smaller expert_model_parallel_size: sent once a step",
}


def grid(rows: Sequence[Sequence[str]], words: tuple[int, ...]) -> list[str]:
    """Columns, those of `words` to the left, numbers to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) if i in words else cell.rjust(width)
                 for i, (cell, width) in enumerate(zip(row, widths, strict=True))]  # fmt: skip
        lines.append(INDENT + "  ".join(cells).rstrip())
    return lines


def gb(count: int) -> str:
    return figures(count / 1e9)


def figures(x: float) -> str:
    """Three figures."""
    return "<0.01" if 0 < x < 0.005 else f"{x:,.0f}" if x >= 99.95 else f"{x:.1f}" if x >= 9.995 else f"{x:.2f}"
