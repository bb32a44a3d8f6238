"""How a model is spread over GPUs: sizes of the groups, and who is whose neighbour.

Ranks are numbered as megatron-core numbers them: tensor parallel first, then data, then pipeline parallel; for experts
expert-tensor, expert, data, pipeline parallel. Nodes hold ranks in this order.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from trainers import megatron_rules
from trainers.config import PolicyConfig, ValueConfig
from trainers.config_megatron import MegatronConfig
from trainers.model_shapes import ModelShape

VOCAB_ROWS = 64  # of a rank: padded to a multiple of it, as trainers/policy/megatron_model.py does


@dataclass(frozen=True)
class Group:
    """Ranks that talk to each other."""

    size: int
    in_node: int  # of them in one node

    @classmethod
    def of(cls, size: int, stride: int, gpus_per_node: int) -> "Group":
        """Of every `stride`-th rank."""
        return cls(size, min(size, max(gpus_per_node // stride, 1)))

    @property
    def spans_nodes(self) -> bool:
        return self.in_node < self.size


@dataclass(frozen=True)
class Layout:
    """`dp`: copies of the model, each trained with its own sequences. Of fully_shard, the ranks that share one copy."""

    backend: str = "hf"
    dp: int = 1
    fully_shard: bool = False
    recompute: str = "none"  # selective: attention's scores alone; full: every layer
    # Of policy.backend=megatron alone:
    tp: int = 1
    pp: int = 1
    vp: int = 1
    ep: int = 1
    etp: int = 1
    sequence_parallel: bool = False
    distributed_optimizer: bool = True
    overlap_gradients: bool = False
    overlap_weights: bool = False
    flash: bool = True  # attention keeps no scores, as Transformer Engine's and torch's; megatron-core's own keeps them

    @property
    def megatron(self) -> bool:
        return self.backend == "megatron"

    @property
    def gpus(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def shards(self) -> int:
        """Ranks that divide a whole model of policy.backend=hf."""
        return self.dp if self.fully_shard else 1

    @property
    def expert_dp(self) -> int:
        return self.gpus // (self.pp * self.ep * self.etp)

    @property
    def sequence_shards(self) -> int:
        """Ranks that the tokens of a sequence are divided over, between the products of a layer."""
        return self.tp if self.sequence_parallel else 1

    def group(self, kind: str, gpus_per_node: int) -> Group:
        """tp, pp, etp, ep; dp: that gradients are summed over; edp: experts'."""
        size, stride = {
            "tp": (self.tp, 1),
            "dp": (self.dp, self.tp),
            "pp": (self.pp, self.gpus // self.pp),
            "etp": (self.etp, 1),
            "ep": (self.ep, self.etp),
            "edp": (self.expert_dp, self.etp * self.ep),
        }[kind]
        return Group.of(size, stride, gpus_per_node)

    @property
    def family(self) -> "Layout":
        """The same without regard to what backward computes again and what goes on beside it."""
        return replace(self, recompute="none", overlap_gradients=False, overlap_weights=False)

    @property
    def sizes(self) -> dict[str, Any]:
        """The settings of megatron-core's groups."""
        return {
            "tensor_model_parallel_size": self.tp,
            "pipeline_model_parallel_size": self.pp,
            "virtual_pipeline_model_parallel_size": self.vp if self.vp > 1 else None,
            "expert_model_parallel_size": self.ep,
            "expert_tensor_parallel_size": self.etp if self.etp != self.tp else None,
        }

    def keys(self, block: str = "policy") -> str:
        """The settings that give it."""
        if not self.megatron:
            true = {True: "true", False: "false"}
            return (
                f"{block}.fully_shard={true[self.fully_shard]} "
                f"{block}.gradient_checkpointing={true[self.recompute == 'full']}"
            )
        plain = {"expert_tensor_parallel_size": None}
        parts = [f"{key}={size}" for key, size in self.sizes.items() if size not in (None, plain.get(key, 1))]
        parts += ["sequence_parallel=true"] if self.sequence_parallel else []
        parts += [f"recompute={self.recompute}"] if self.recompute != "none" else []
        return " ".join([f"{block}.backend=megatron", *(f"{block}.megatron.{part}" for part in parts)])

    def __str__(self) -> str:
        if not self.megatron:
            words = [f"{'fully_shard' if self.fully_shard else 'data parallel'} over {self.dp}"]
        else:
            names = (("PP", self.pp), ("VP", self.vp), ("EP", self.ep), ("DP", self.dp))
            tensor = f"TP {self.tp}" + ("+SP" if self.sequence_parallel else "")
            words = [tensor, *(f"{name} {size}" for name, size in names if size > 1)]
            words += [f"ETP {self.etp}"] if self.etp != self.tp else []
        if self.recompute != "none":
            words.append({"full": "recompute", "selective": "recompute scores"}[self.recompute])
        return " ".join(words)


def layout_of(part: PolicyConfig | ValueConfig, gpus: int) -> Layout:
    """That which the settings of a policy or a local critic give on so many GPUs."""
    if part.backend != "megatron":
        recompute = "full" if part.gradient_checkpointing else "none"
        return Layout(dp=gpus, fully_shard=part.fully_shard, recompute=recompute)
    cfg = part.megatron
    tp, pp = cfg.tensor_model_parallel_size, cfg.pipeline_model_parallel_size
    return Layout(
        backend="megatron",
        dp=max(gpus // (tp * pp), 1),
        recompute=cfg.recompute,
        tp=tp,
        pp=pp,
        vp=cfg.virtual_pipeline_model_parallel_size or 1,
        ep=cfg.expert_model_parallel_size,
        etp=tp if cfg.expert_tensor_parallel_size is None else cfg.expert_tensor_parallel_size,
        sequence_parallel=cfg.sequence_parallel,
        distributed_optimizer=cfg.distributed_optimizer is not False,
        overlap_gradients=cfg.overlap_grad_reduce,
        overlap_weights=cfg.overlap_param_gather,
        flash=cfg.transformer_engine is not False,
    )


def check(layout: Layout, shape: ModelShape, block: str = "policy") -> None:
    """That the ranks can divide the model evenly.

    Args:
        block: that of the settings, policy or value.

    Raises:
        ConfigError: every setting with which they cannot.
    """
    if not layout.megatron:
        return
    cfg = MegatronConfig(**layout.sizes, sequence_parallel=layout.sequence_parallel)
    megatron_rules.check_layout(shape.as_config(), cfg, f"{block}.megatron")


def candidates(shape: ModelShape, gpus: int, gpus_per_node: int, given: Layout) -> Iterator[Layout]:
    """Layouts worth a look beside `given`, each without and with recomputation: tensor parallel within a node, sizes
    powers of 2 but for the stages."""
    for fully_shard in (False, True):
        yield from _recomputing(Layout(dp=gpus, fully_shard=fully_shard))
    megatron = given if given.megatron else Layout("megatron")
    experts = _powers_of_2(shape.experts) if shape.experts else [1]
    for tp in _powers_of_2(min(gpus, gpus_per_node)):
        for pp in (pp for pp in range(1, 33) if shape.layers % pp == 0 and gpus % (tp * pp) == 0):
            for ep in experts:
                for etp in _powers_of_2(tp) if shape.experts else [tp]:
                    if gpus % (pp * ep * etp):
                        continue
                    sizes: dict[str, Any] = {"tp": tp, "pp": pp, "vp": 1, "ep": ep, "etp": etp, "dp": gpus // (tp * pp)}
                    yield from _recomputing(replace(megatron, **sizes, sequence_parallel=tp > 1))


def _recomputing(layout: Layout) -> Iterator[Layout]:
    yield replace(layout, recompute="none")
    yield replace(layout, recompute="full")


def _powers_of_2(limit: int) -> list[int]:
    return [2**i for i in range(limit.bit_length())]
