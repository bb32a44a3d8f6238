"""Bytes that one GPU of a cluster sends, by what they are for, and over which wires.

Of n ranks in a ring each sends (n - 1) / n of what all gather, or of what they reduce and scatter; an all-reduce is
both. Of a group that spans nodes, k ranks in each, 1 / k of that leaves the node, since every GPU has its own adapter;
of an all-to-all, the share of ranks in other nodes. X = 2 x tokens x hidden bytes, of a micro-batch of one copy of the
model, and a layer's sums are counted in rounds of (TP - 1) / TP x X:

    tensor parallel    4 a layer forward, 4 backward: two all-reduces, or with sequence parallel two gathers and two
                       reduce-scatters and backward 2 more to gather inputs again; recomputed layers 4 more. Of a layer
                       of experts attention alone, half of it. Embeddings and output head 2 forward, 2 backward
    pipeline           X, of a rank X / TP with sequence parallel, to the next stage, its gradient to the one before;
                       V times with V virtual stages
    experts            a token's hidden state to its experts and back, each way twice with backward, three times with
                       recomputation; all that is divided by TP with sequence parallel
    gradients          float32, once an optimizer step: summed and divided, then new weights gathered in bfloat16, with
                       the distributed optimizer; else an all-reduce
    fully_shard        weights forward and backward in bfloat16, gradients in float32, for each micro-batch

Not counted: what a step sends once and is small (norms of gradients, tied embeddings of two stages, metrics).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from trainers.cluster_layout import Group, Layout
from trainers.cluster_memory import Part, local_parameters
from trainers.model_shapes import ModelShape

# A token's id and log-prob in a list that pickle has made bytes of, as ranks tell each other their responses.
PICKLED_ID, PICKLED_FLOAT = 5, 9


@dataclass(frozen=True)
class Machine:
    """What the plan assumes; units of 10^9 bytes, 10^12 FLOP, seconds."""

    gpus_per_node: int = 8
    memory_gb: float = 80
    gpu_tflops: float = 989
    gpu_bandwidth_gbps: float = 3350
    nvlink_gbps: float = 450
    network_gbps: float = 50
    mfu: float = 0.4


@dataclass(frozen=True)
class Traffic:
    what: str
    nvlink: float = 0.0  # bytes a GPU sends
    network: float = 0.0
    beside: bool = False  # goes on beside products, as far as these last

    def seconds(self, machine: Machine) -> float:
        return max(self.nvlink / machine.nvlink_gbps, self.network / machine.network_gbps) / 1e9

    def times(self, count: float) -> "Traffic":
        return Traffic(self.what, self.nvlink * count, self.network * count, self.beside)


def ring(what: str, group: Group, total: float, *, rounds: float = 1.0, beside: bool = False) -> Traffic:
    """`total`: bytes gathered, or reduced, in each round: of all ranks together, or of each before the reduction."""
    sent = rounds * total * (group.size - 1) / group.size
    if not group.spans_nodes:
        return Traffic(what, nvlink=sent, beside=beside)
    return Traffic(what, sent - sent / group.in_node, sent / group.in_node, beside)


def all_to_all(what: str, group: Group, sent: float) -> Traffic:
    """`sent`: bytes a rank has for all ranks, itself among them."""
    far = sent * (group.size - group.in_node) / group.size
    return Traffic(what, sent * (group.in_node - 1) / group.size, far)


def along(what: str, group: Group, sent: float) -> Traffic:
    """From each rank to the next, of the pair that is farthest apart."""
    return Traffic(what, network=sent) if group.spans_nodes else Traffic(what, nvlink=sent)


def pass_traffic(part: Part, tokens: int, machine: Machine, *, backward: bool) -> Iterator[Traffic]:
    """Of one micro-batch of `tokens` tokens through the whole model; with backward also its gradients' way back."""
    shape, layout = part.shape, part.layout
    if layout.fully_shard:
        group = Group.of(layout.dp, 1, machine.gpus_per_node)
        weights = 2 * (shape.parameters if not backward or part.whole else part.trained + shape.embedding)
        yield ring("fully_shard weights", group, weights, rounds=2 if backward else 1, beside=True)
        if backward:
            yield ring("fully_shard gradients", group, 4 * part.trained, beside=True)
    if not layout.megatron:
        return
    groups = {kind: layout.group(kind, machine.gpus_per_node) for kind in ("tp", "pp", "ep", "etp")}
    x, sharded = 2 * shape.hidden * tokens, 2 * shape.hidden * tokens / layout.sequence_shards
    again = backward and layout.recompute == "full"
    layers, sparse = shape.layers / layout.pp, shape.sparse_layers / layout.pp
    ways = 1 + backward + again
    if layout.tp > 1:
        halves = 4 * (layers - sparse) + 2 * sparse
        rounds = halves * (ways + (0.5 if backward and layout.sequence_parallel else 0)) + 2 * (1 + backward)
        yield ring("tensor parallel", groups["tp"], x, rounds=rounds)
    if sparse:
        routed = sharded * shape.experts_per_token
        if layout.ep > 1:
            yield all_to_all("experts", groups["ep"], 2 * ways * sparse * routed)
        if layout.etp > 1:
            yield ring("expert tensor parallel", groups["etp"], routed * layout.etp, rounds=2 * ways * sparse)
    if layout.pp > 1:
        yield along("pipeline", groups["pp"], sharded * (1 + backward) * layout.vp)


def optimizer_traffic(part: Part, machine: Machine) -> Iterator[Traffic]:
    """Of one optimizer step, beside its passes; of megatron-core, of the first or last stage, whichever has more."""
    layout, per_node = part.layout, machine.gpus_per_node
    if layout.fully_shard:
        return
    if not layout.megatron:
        if layout.dp > 1:
            yield ring("gradients", Group.of(layout.dp, 1, per_node), 4 * (part.trained + part.head), rounds=2)
        return
    counts = max((local_parameters(part, stage) for stage in (0, layout.pp - 1)), key=sum)
    for kind, whose, count in zip(("dp", "edp"), ("", "experts' "), counts, strict=True):
        group = layout.group(kind, per_node)
        if group.size == 1 or not count:
            continue
        rounds = 1 if layout.distributed_optimizer else 2
        yield ring(f"{whose}gradients", group, 4 * count, rounds=rounds, beside=layout.overlap_gradients)
        if layout.distributed_optimizer:
            yield ring(f"{whose}new weights", group, 2 * count, beside=layout.overlap_weights)


def refit_traffic(shape: ModelShape, layout: Layout, machine: Machine) -> Iterator[Traffic]:
    """Every tensor whole on every rank, in bfloat16, as `weights()` yields them; its way into the engine is a copy."""
    weights = 2 * shape.parameters
    if layout.fully_shard:
        yield ring("gather of shards", Group.of(layout.dp, 1, machine.gpus_per_node), weights)
    if not layout.megatron:
        return
    groups = {kind: layout.group(kind, machine.gpus_per_node) for kind in ("tp", "pp", "ep", "etp")}
    expert = 2 * shape.sparse_layers * shape.experts * shape.expert
    if layout.pp > 1:  # each stage's shards to all stages, before they are joined
        shards = (weights - expert) / layout.tp + expert / (layout.etp * layout.ep)
        yield along("broadcast over stages", groups["pp"], shards)
    yield ring("gather over tensor parallel", groups["tp"], weights - expert)
    if expert:
        yield ring("gather over expert tensor parallel", groups["etp"], expert / layout.ep)
        yield ring("gather over experts", groups["ep"], expert)


def engine_traffic(shape: ModelShape, tp: int, tokens: float, machine: Machine) -> Iterator[Traffic]:
    """Of an engine over `tp` GPUs that reads and samples `tokens`: two all-reduces a layer."""
    if tp > 1:
        group = Group.of(tp, 1, machine.gpus_per_node)
        yield ring("engine's tensor parallel", group, 2 * shape.hidden * tokens, rounds=4 * shape.layers)


def rollout_traffic(gpus: int, prompt: float, response: float, fields: int, machine: Machine) -> Iterator[Traffic]:
    """Every rank gets all responses, pickled, and then all scores, `fields` float32 numbers a token.

    Args: prompt, response: tokens of all sequences."""
    group = Group.of(gpus, 1, machine.gpus_per_node)
    texts = PICKLED_ID * prompt + (PICKLED_ID + PICKLED_FLOAT) * response
    # From host to host, whose ranks share one wire: no part of a ring stays in the node.
    for what, total in (("responses", texts), ("scores", 4.0 * fields * (prompt + response))):
        sent = total * (group.size - 1) / group.size
        yield Traffic(what, network=sent) if group.spans_nodes else Traffic(what, nvlink=sent)
