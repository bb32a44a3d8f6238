"""What a step costs on a cluster, on paper: memory of a GPU, bytes sent, seconds of each stage, and what limits it.

Computed from sizes alone (model_shapes.py, cluster_layout.py, cluster_memory.py, cluster_traffic.py), for sequences at
their longest and even work. Seconds are the sum of

    computing    the larger of products, FLOP / (peak x mfu): 2 a parameter and token forward, 4 backward, 2 more where
                 layers are recomputed, attention's own, causal, as well; and, of generation alone, reading: the weights
                 and the KV cache from the GPU's memory, once a token
    sending      what does not go on beside the products
    bubble       products x (stages - 1) / (micro-batches x virtual stages)

Not counted: latency of messages and of starting kernels, the host, rewards, uneven lengths, a critic's server. So
seconds are a lower bound, good for comparing layouts and for finding what limits; a small model's steps are longer.
"""

from dataclasses import dataclass, field, replace

from trainers.cluster_layout import Layout
from trainers.cluster_memory import (
    Part,
    gathered_bytes,
    head_bytes,
    kept_bytes,
    layer_bytes_kept,
    reference_bytes,
    state_bytes,
)
from trainers.cluster_traffic import (
    Machine,
    Traffic,
    engine_traffic,
    optimizer_traffic,
    pass_traffic,
    refit_traffic,
    rollout_traffic,
)
from trainers.engines.continuous import MEMORY_SHARE
from trainers.memory_plan import SHARE
from trainers.model_shapes import ModelShape


@dataclass(frozen=True)
class Work:
    """Of a step: sequences and tokens."""

    prompts: int
    responses: int  # of each prompt
    prompt: int  # tokens
    longest: int
    scored: int  # sequences in a pass without gradients, of one rank
    epochs: int = 1

    @property
    def sequences(self) -> int:
        return self.prompts * self.responses

    @property
    def response(self) -> int:
        return self.longest - self.prompt


@dataclass(frozen=True)
class EnginePlan:
    """backend: policy.generation.backend. tp: GPUs that one engine spans."""

    backend: str = "native"
    tp: int = 1
    rows: int = 64  # policy.generation.max_batch_size
    share: float = 0.4  # of the GPU's memory (vllm), of what is free beside the weights (trtllm)
    cache_gib: float | None = None  # policy.generation.kv_cache_gb
    bucket: int = 512 * 2**20  # bytes of weights on their way
    released: bool = False  # while the policy trains


@dataclass(frozen=True)
class Job:
    """The roles of a step. `critic`: one with a model of its own on these GPUs; a head on the policy's trunk, `shared`,
    and a server, `remote`, have none."""

    work: Work
    policy: Part
    critic: Part | None = None
    critic_mode: str | None = None
    has_reference: bool = True  # a copy on the GPUs
    scores_reference: bool = True
    engine: EnginePlan = field(default_factory=EnginePlan)
    reward_bytes: int = 0
    offload_optimizer: bool = False
    offload_critic: bool = False

    @property
    def layout(self) -> Layout:
        return self.policy.layout

    @property
    def parts(self) -> tuple[Part, ...]:
        return (self.policy,) if self.critic is None else (self.policy, self.critic)

    def laid_out(self, layout: Layout) -> "Job":
        """All parts alike."""
        critic = self.critic and replace(self.critic, layout=layout)
        return replace(self, policy=replace(self.policy, layout=layout), critic=critic)


@dataclass(frozen=True)
class Stage:
    name: str
    products: float = 0.0  # seconds
    reading: float = 0.0
    bubble: float = 0.0
    traffic: tuple[Traffic, ...] = ()

    @property
    def computing(self) -> float:
        return max(self.products, self.reading)

    def sending(self, machine: Machine) -> float:
        """Seconds that nothing else fills."""
        beside = sum(part.seconds(machine) for part in self.traffic if part.beside)
        alone = sum(part.seconds(machine) for part in self.traffic if not part.beside)
        return alone + max(0.0, beside - self.products)

    def seconds(self, machine: Machine) -> float:
        return self.computing + self.sending(machine) + self.bubble

    def limit(self, machine: Machine) -> str:
        """products, reading, bubble, or what the traffic that takes longest is for."""
        costs = {"products": self.products, "reading": self.reading, "bubble": self.bubble}
        if (sending := self.sending(machine)) > 0:
            most = max(self.traffic, key=lambda part: part.seconds(machine))
            costs[most.what] = sending
        return max(costs, key=lambda what: costs[what])


@dataclass(frozen=True)
class Plan:
    job: Job
    machine: Machine
    parts: dict[str, int]  # bytes of the fullest GPU, by what they are
    peaks: dict[str, int]  # by stage
    stages: tuple[Stage, ...]
    rows: int  # sequences that an engine decodes together; 0: it has no room for one

    @property
    def layout(self) -> Layout:
        return self.job.layout

    @property
    def peak(self) -> int:
        return max(self.peaks.values())

    @property
    def fits(self) -> bool:
        return self.rows > 0 and self.peak <= SHARE * self.machine.memory_gb * 1e9

    @property
    def seconds(self) -> float:
        return sum(stage.seconds(self.machine) for stage in self.stages)


def plan_of(job: Job, machine: Machine) -> Plan:
    ends = {0, job.layout.pp - 1}
    parts, peaks, room = max((memory_of(job, machine, end) for end in ends), key=lambda found: max(found[1].values()))
    rows = min(wanted_rows(job), room)
    work, gpus = job.work, job.layout.gpus
    tokens = work.sequences * work.prompt, work.sequences * work.response
    fields = 2 + job.scores_reference + (job.critic_mode in ("shared", "local"))
    stages = [
        generation(job, machine, max(rows, 1)),
        Stage("rollout gather", traffic=tuple(rollout_traffic(gpus, *tokens, fields, machine))),
        scoring(job, machine),
        update(job, job.policy, machine),
    ]
    if job.critic is not None:
        stages.append(update(job, job.critic, machine))
    if job.critic_mode == "remote":
        stages.append(critic_service(work))
    stages.append(Stage("refit", traffic=tuple(refit_traffic(job.policy.shape, job.layout, machine))))
    return Plan(job, machine, parts, peaks, tuple(stages), rows)


def memory_of(job: Job, machine: Machine, stage: int) -> tuple[dict[str, int], dict[str, int], int]:
    """Of a GPU of pipeline stage `stage`: bytes by what they are, peaks by stage of a step, sequences in the engine."""
    work, policy, critic, layout = job.work, job.policy, job.critic, job.layout
    states = [state_bytes(part, stage) for part in job.parts]
    reference = reference_bytes(policy, stage) if job.has_reference else 0
    # megatron-core keeps its buffers of gradients, others have them in updates alone.
    coming = [0 if layout.megatron else state["gradients"] for state in states]
    always = sum(sum(state.values()) for state in states) - sum(coming) + reference + job.reward_bytes
    # A divided model's comes back for each checkpoint, when the engine has its memory again.
    divided = layout.megatron or layout.fully_shard
    generating = always - (states[0]["optimizer"] if job.offload_optimizer and not divided else 0)
    if critic is not None and job.offload_critic:
        generating -= sum(states[1].values()) - coming[1]
    weights, cache, room = engine_bytes(job, machine, generating)
    beside = 0 if job.engine.released else weights + cache
    whole = gathered_tensors(job)
    peaks = {
        "generation": generating + weights + cache,
        "scoring": always + beside + scoring_bytes(job, stage),
    }
    kept = []
    for part, gradients in zip(job.parts, coming, strict=True):
        rows = part.micro_batches()[1]
        kept.append(kept_bytes(part, work.longest, stage))
        if stage == layout.pp - 1:
            kept[-1] += head_bytes(part, rows, work.longest, work.response)
        name = "critic update" if part.critic else "policy update"
        peaks[name] = always + beside + gradients + kept[-1] + gathered_bytes(part, backward=True)
    peaks["refit"] = generating + weights + (0 if job.engine.released else cache) + whole
    parts = {name: states[0][name] for name in states[0]} | {
        "reference": reference,
        "critic": sum(states[1].values()) if critic else 0,
        "reward model": job.reward_bytes,
        "engine's weights": weights,
        "KV cache": cache,
        "kept for backward": max(kept),
        "gathered": max(gathered_bytes(part, backward=True) for part in job.parts),
    }
    return parts, peaks, room


def host_bytes(job: Job, machine: Machine) -> tuple[int, int]:
    """Of the memory of a node: while models load, and what waits there for its turn on the GPUs."""
    layout, ranks = job.layout, min(machine.gpus_per_node, job.layout.gpus)
    loading = max(4 * part.shape.parameters for part in job.parts)
    if layout.megatron:  # of the model, own parts alone; of the embedded engine's, whole
        loading = 2 * job.policy.shape.parameters if job.engine.backend == "native" else 0
    waiting, state = 0, state_bytes(job.policy, 0)
    if job.scores_reference and not job.has_reference:  # it and what it is swapped with, as parameters are stored
        whole = state["weights"] - (0 if layout.megatron else 2 * (job.policy.frozen // layout.shards))
        waiting += 2 * whole
    if job.offload_optimizer:
        waiting += state["optimizer"]
    if job.critic is not None and job.offload_critic:
        critic = state_bytes(job.critic, 0)
        waiting += critic["weights"] + critic["optimizer"]
    return ranks * loading, ranks * waiting


def scoring_bytes(job: Job, stage: int) -> int:
    """What one layer makes of a pass without gradients; at the end the head; with fully_shard what is whole."""
    work, policy = job.work, job.policy
    rows = min(work.scored, -(-work.sequences // job.layout.dp))
    count = int(rows * work.longest * layer_bytes_kept(policy.shape, job.layout, work.longest))
    if stage == job.layout.pp - 1:
        count += head_bytes(policy, rows, work.longest, work.response, backward=False)
    if job.has_reference:
        count += reference_bytes(policy, stage, scoring=True) - reference_bytes(policy, stage)
    return count + max(gathered_bytes(part, backward=False) for part in job.parts)


def gathered_tensors(job: Job) -> int:
    """In a refit, of tensors on their way to an engine with weights of its own: a bucket, and the largest of them twice
    where it is joined from shards."""
    if shares_weights(job):
        return 0
    shape = job.policy.shape
    return job.engine.bucket + (4 * shape.embedding if job.layout.megatron or job.layout.fully_shard else 0)


def shares_weights(job: Job) -> bool:
    """Whether generation reads the policy's own tensors."""
    own = job.engine.backend != "native" or job.layout.megatron or job.layout.fully_shard
    return not (own or job.policy.stored_in_float32)


def engine_bytes(job: Job, machine: Machine, held: int) -> tuple[int, int, int]:
    """Weights and KV cache of an engine on one GPU beside `held` bytes, and the sequences that the cache takes."""
    shape, engine = job.policy.shape, job.engine
    card, weights = machine.memory_gb * 1e9, 0 if shares_weights(job) else 2 * shape.parameters // engine.tp
    free = SHARE * card - held - weights
    sequence = job.work.longest * shape.kv_bytes // min(engine.tp, shape.kv_heads)
    if engine.backend == "vllm":
        cache = int(engine.share * card) - weights
    elif engine.backend == "trtllm":
        cache = int(engine.share * free)
    else:
        room = MEMORY_SHARE * free if engine.cache_gib is None else engine.cache_gib * 2**30
        cache = int(min(wanted_rows(job) * sequence, room))
    cache = max(cache, 0)
    return weights, cache, cache // sequence


def wanted_rows(job: Job) -> int:
    """Sequences that one engine would decode together."""
    return min(job.engine.rows, -(-job.work.sequences // engines(job)))


def engines(job: Job) -> int:
    return max(job.layout.gpus // job.engine.tp, 1)


def flops(shape: ModelShape, tokens: float, context: float, *, layers: int | None = None, head: float = 0.0) -> float:
    """Forward, of `layers` layers [all] whose tokens see `context` others on average, and of the vocabulary's head over
    `head` tokens."""
    share = 1.0 if layers is None else layers / shape.layers
    attention = 4 * shape.layers * context * shape.heads * shape.head_dim
    return tokens * share * (2 * shape.multiplied + attention) + 2 * shape.embedding * head


def on_each(total: float, layout: Layout, machine: Machine) -> float:
    """Seconds of `total` FLOP spread over all GPUs."""
    return total / layout.gpus / (machine.gpu_tflops * 1e12 * machine.mfu)


def bubble(products: float, layout: Layout, micro_batches: int) -> float:
    return products * (layout.pp - 1) / (micro_batches * layout.vp)


def generation(job: Job, machine: Machine, rows: int) -> Stage:
    """`rows`: sequences that an engine decodes together, the next one in the place of one that has ended."""
    shape, work, tp = job.policy.shape, job.work, job.engine.tp
    context, waves = work.prompt + work.response / 2, max(work.sequences / (engines(job) * rows), 1.0)
    # Experts that no token of the batch goes to are not read.
    used = min(1.0, rows * shape.experts_per_token / shape.experts) if shape.experts else 1.0
    weights = 2 * (shape.parameters - (1 - used) * shape.sparse_layers * shape.experts * shape.expert) / tp
    cache = rows * context * shape.kv_bytes / min(tp, shape.kv_heads)
    reading = waves * work.response * (weights + cache) / (machine.gpu_bandwidth_gbps * 1e9)
    new, read = work.sequences * work.response, work.prompts * work.prompt  # samples of a prompt share it
    total = flops(shape, read, work.prompt / 2, head=work.prompts) + flops(shape, new, context, head=new)
    traffic = engine_traffic(shape, tp, (read + new) / engines(job), machine)
    return Stage("generation", on_each(total, job.layout, machine), reading, traffic=tuple(traffic))


def scoring(job: Job, machine: Machine) -> Stage:
    """Log-probs of the policy and the reference, and the critic's values: forward passes over all sequences."""
    work, total, traffic = job.work, 0.0, []
    own = -(-work.sequences // job.layout.dp)
    rows = min(work.scored, own)
    number = -(-own // rows)
    for part in (*[job.policy] * (1 + job.scores_reference), *job.parts[1:]):
        head = 0 if part.critic else work.sequences * work.response
        total += flops(part.shape, work.sequences * work.longest, work.longest / 2, head=head)
        traffic += [sent.times(number) for sent in pass_traffic(part, rows * work.longest, machine, backward=False)]
    products = on_each(total, job.layout, machine)
    return Stage("scoring", products, 0.0, bubble(products, job.layout, number), merged(traffic))


def update(job: Job, part: Part, machine: Machine) -> Stage:
    work, layout = job.work, part.layout
    number, rows = part.micro_batches()
    steps, tokens = work.epochs * work.sequences / part.batch, work.epochs * work.sequences * work.longest
    head = 0 if part.critic else work.epochs * work.sequences * work.response
    again = layout.recompute == "full"
    total = (3 + again) * flops(part.shape, tokens, work.longest / 2, layers=part.layers)
    total += 3 * flops(part.shape, 0, 0, head=head)
    passes = pass_traffic(part, rows * work.longest, machine, backward=True)
    traffic = [sent.times(steps * number) for sent in passes]
    traffic += [sent.times(steps) for sent in optimizer_traffic(part, machine)]
    products = on_each(total, layout, machine)
    name = "critic update" if part.critic else "policy update"
    return Stage(name, products, 0.0, bubble(products, layout, number), tuple(traffic))


def critic_service(work: Work) -> Stage:
    """What the main rank and the critic's server tell each other: ids and mask with each request, values back; values
    and returns to train on."""
    tokens = work.sequences * work.longest
    return Stage("critic service", traffic=(Traffic("requests", network=tokens * (9 + 4 + work.epochs * (9 + 8))),))


def merged(traffic: list[Traffic]) -> tuple[Traffic, ...]:
    """Those for the same use added."""
    sums: dict[str, Traffic] = {}
    for part in traffic:
        old = sums.get(part.what, Traffic(part.what))
        sums[part.what] = Traffic(part.what, old.nvlink + part.nvlink, old.network + part.network, part.beside)
    return tuple(sums.values())
