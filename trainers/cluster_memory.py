"""Bytes that one GPU of a cluster holds, from the sizes of the models and their layouts alone.

Of n parameters, n_local of them on a GPU, with bfloat16 products and AdamW:

    data parallel          weights 2 n, float32 masters 4 n, gradients 4 n, moments 8 n: 18 n
    fully_shard            (4 weights, their own masters + 4 gradients + 8 moments) n / ranks: 16 n / ranks
    megatron-core          weights 2 n_local, gradients 4 n_local, masters and moments 12 n_local, these divided by the
                           data-parallel ranks with the distributed optimizer: (6 + 12 / DP) n_local
    reference              2 n, as the policy is divided; of fully_shard 4 n / ranks more while it scores

policy.backend=hf has gradients in updates alone, megatron-core keeps their buffers. What fully_shard has whole at a
time comes on top: `gathered_bytes`.

What a layer keeps of a token for backward, in bfloat16, with h the hidden size, q and kv the widths of query and of key
(or value), f that of the gated MLP. In the way of Korthikanti et al. 2022 (arXiv:2205.05198), without dropout:

    inputs of both norms and of the products after them              8 h        / TP with sequence parallel
    query, key, value, attention's output                            4 q + 4 kv                   / TP
    inputs of query's and key's norms, where there are such          2 q + 2 kv                   / TP
    MLP: gate and up; silu(gate); what it is multiplied with; down's input      4 f + 2 f + 2 f + 2 f   / TP
    experts: the same, the product with the token's share, their input; for each of a token's experts  12 f + 2 h

megatron-core's attention without Transformer Engine keeps scores, their softmax in float32 and bfloat16: 6 x heads x
length, and keys and values once for each query head. transformers' layers keep the same but for norms, which hold
float32 copies where they are not fused. With full recomputation 2 h a layer are kept, and what the layer at work keeps.

A stage of a pipeline keeps as many micro-batches as there are stages from it on (1F1B); with V virtual stages, each of
layers / (stages x V), 2 x (stages after it) + (V - 1) x stages + 1 (Narayanan et al. 2021, arXiv:2104.04473).
"""

from dataclasses import dataclass

import torch

from fastppo.ops.linear_loss import default_chunk
from trainers import memory_plan
from trainers.cluster_layout import VOCAB_ROWS, Layout
from trainers.model_shapes import ModelShape

MASTER, GRADIENT, MOMENTS = 4, 4, 8  # bytes a parameter
CUDA = torch.device("cuda")


@dataclass(frozen=True)
class Part:
    """A policy, or a critic with a model of its own, and how it trains."""

    shape: ModelShape
    layout: Layout
    batch: int  # sequences of an optimizer step
    micro: int  # of them in a pass of one rank
    unfrozen: int = -1  # top layers that train; -1: everything
    critic: bool = False  # with a scalar head, float32, in place of the vocabulary's
    stored_in_float32: bool = False  # policy.param_dtype

    @property
    def layers(self) -> int:
        """That train."""
        return self.shape.layers if self.unfrozen == -1 else min(self.unfrozen, self.shape.layers)

    @property
    def whole(self) -> bool:
        return self.layers == self.shape.layers

    @property
    def trained(self) -> int:
        """Parameters of policy.backend=hf, which keeps a critic's vocabulary head but does not train it."""
        if not self.whole:
            return self.layers * self.shape.largest_layer
        return self.shape.parameters - (self.shape.embedding if self.critic and not self.shape.tied else 0)

    @property
    def frozen(self) -> int:
        return self.shape.parameters - self.trained

    @property
    def head(self) -> int:
        """Parameters of a critic's."""
        return self.shape.hidden + 1 if self.critic else 0

    def micro_batches(self) -> tuple[int, int]:
        """Of an optimizer step on one rank: their number, and the sequences of each."""
        own = -(-self.batch // self.layout.dp)
        size = min(self.micro, own)
        return -(-own // size), size


def local_parameters(part: Part, stage: int) -> tuple[int, int]:
    """(dense, experts') on one rank of megatron-core's pipeline stage `stage`."""
    shape, layout = part.shape, part.layout
    tp, share = layout.tp, shape.layers // layout.pp
    last = stage == layout.pp - 1
    sparse = share * shape.sparse_layers // shape.layers  # as if spread evenly
    dense = share * (shape.norms + shape.attention // tp) + (share - sparse) * (shape.mlp // tp) + sparse * shape.router
    rows = -(-shape.vocab // (VOCAB_ROWS * tp)) * VOCAB_ROWS
    if stage == 0:
        dense += rows * shape.hidden
    if last:
        dense += shape.hidden
        if part.critic:
            dense += part.head
        elif not shape.tied or layout.pp > 1:  # the last stage's copy of tied embeddings
            dense += rows * shape.hidden
    return dense, sparse * (shape.experts // layout.ep) * (shape.expert // layout.etp)


def state_bytes(part: Part, stage: int) -> dict[str, int]:
    """weights, gradients, and the optimizer's float32 masters and moments."""
    layout = part.layout
    if layout.megatron:
        dense, expert = local_parameters(part, stage)
        ranks = (layout.dp, layout.expert_dp) if layout.distributed_optimizer else (1, 1)
        moved = MASTER + MOMENTS
        return {
            "weights": 2 * (dense + expert),
            "gradients": GRADIENT * (dense + expert),
            "optimizer": moved * dense // ranks[0] + moved * expert // ranks[1],
        }
    own_masters = part.stored_in_float32 or layout.fully_shard
    masters = 0 if own_masters else MASTER * part.trained
    weights = ((MASTER if own_masters else 2) * part.trained + 2 * part.frozen) // layout.shards
    trained = part.trained // layout.shards + part.head  # a critic's head is whole on every rank
    return {
        "weights": weights + MASTER * part.head,
        "gradients": GRADIENT * trained,
        "optimizer": masters + MOMENTS * trained,
    }


def reference_bytes(part: Part, stage: int, *, scoring: bool = False) -> int:
    """A frozen copy in bfloat16 of what trains; of fully_shard, while it scores, the trained shards beside it."""
    if part.layout.megatron:
        return 2 * sum(local_parameters(part, stage))
    beside = MASTER if scoring and part.layout.fully_shard else 0
    return (2 + beside) * part.trained // part.layout.shards


def gathered_bytes(part: Part, *, backward: bool) -> int:
    """What fully_shard has whole at a time: see memory_plan.gathered_bytes."""
    shape = part.shape
    if not part.layout.fully_shard:
        return 0
    head = 0 if part.critic and not shape.tied else shape.embedding
    return memory_plan.gathered_bytes(
        shape.largest_layer, 0 if shape.tied else shape.embedding, head, 2, backward=backward
    )


def layer_bytes_kept(shape: ModelShape, layout: Layout, length: int) -> float:
    """Of one token, by a layer whose sequences have `length` tokens; of a model with experts by one that has some."""
    h, q, kv = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    outside = 8 * h / layout.sequence_shards
    attention = 4 * q + 4 * (kv if layout.flash else q)
    attention += 0 if layout.flash or layout.recompute == "selective" else 6 * shape.heads * length
    attention += 2 * (q + kv) if shape.qk_norm else 0
    if shape.sparse_layers:
        routed = shape.experts_per_token / layout.sequence_shards
        mlp = routed * (2 * h * layout.etp + 12 * shape.expert_ffn)
    else:
        mlp = 10 * shape.ffn / layout.tp
    return outside + attention / layout.tp + mlp


def kept_bytes(part: Part, length: int, stage: int) -> int:
    """For backward, by pipeline stage `stage`, of an optimizer step's micro-batches of sequences of `length` tokens."""
    shape, layout = part.shape, part.layout
    number, rows = part.micro_batches()
    layer = rows * length * layer_bytes_kept(shape, layout, length)
    after, chunks = layout.pp - stage - 1, layout.pp * layout.vp
    waiting = after + 1 if layout.vp == 1 else 2 * after + (layout.vp - 1) * layout.pp + 1
    layers = min(waiting, number * layout.vp) * (part.layers if chunks == 1 else shape.layers // chunks)
    kept = layers * layer
    if layout.recompute == "full":
        kept = layers * 2 * shape.hidden * rows * length / layout.sequence_shards + layer
    # Under autocast also a copy of every weight, in bfloat16.
    return int(kept) + (2 * part.trained if part.stored_in_float32 and not layout.fully_shard else 0)


def head_bytes(part: Part, rows: int, length: int, responses: int, *, backward: bool = True) -> int:
    """Of the last stage, for `rows` sequences with responses of `responses` tokens: the final hidden states and the
    selected ones with their gradients, and the fused loss's chunk of logits with its gradient. Never all logits: as
    many rows at a time as the loss itself takes. With a trained head, its float32 gradient where that has no place yet.
    """
    shape, layout = part.shape, part.layout
    hidden = 8 * shape.hidden * rows * length // (1 if backward else 2)
    if part.critic:
        return hidden
    columns, scored = -(-shape.vocab // layout.tp), rows * responses
    trained = backward and part.whole
    chunk = min(default_chunk(scored, columns, shape.hidden if trained else 0, CUDA, even=True), scored)
    own = trained and (not layout.megatron or layout.overlap_gradients)
    return hidden + 2 * 2 * chunk * columns + (4 * shape.hidden * columns if own else 0)
