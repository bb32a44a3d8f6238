"""The machines: the block `cluster`."""

from dataclasses import dataclass

from trainers.config_types import block, opt


@dataclass
class PlanConfig:
    """What --dry-run takes for granted of the GPUs and their wires, with cluster.gpus; no run reads it. Defaults: H100
    SXM, a 400 Gb/s adapter for each."""

    gpu_tflops: float = opt(989.0, "dense bfloat16 peak of a GPU, in 10^12 FLOP/s", free=True)
    mfu: float = opt(0.4, "share of that peak that products reach", free=True)
    gpu_bandwidth_gbps: float = opt(3350.0, "a GPU reads its own memory at this many GB/s", free=True)
    nvlink_gbps: float = opt(450.0, "a GPU sends to the others of its node at this many GB/s", free=True)
    network_gbps: float = opt(50.0, "a GPU sends to other nodes at this many GB/s", free=True)


@dataclass
class ClusterConfig:
    device: str = opt("auto", "auto, cpu or cuda", choices=("auto", "cpu", "cuda"))
    gpus: int | None = opt(
        None,
        "--dry-run plans memory and communication for this many GPUs, of which there need be none here; default: "
        "without such a plan, but of backend=megatron for the ranks that torchrun started; in a run it must be their "
        "number",
        free=True,
    )
    gpus_per_node: int = opt(8, "with gpus: those that NVLink joins, hence neighbouring ranks", free=True)
    rank_timeout_s: float = opt(
        1800.0, "under torchrun: seconds that a rank waits for the others, as for a slow reward, before it gives up",
        free=True,
    )  # fmt: skip
    num_threads: int | None = opt(
        None, "CPU threads of torch and of fastppo's kernels; default: torch's own choice", free=True
    )
    device_memory_gb: float | None = opt(
        None,
        "memory of a device, in GB of 10^9 bytes, that --dry-run fits the run into; default: what is free on the "
        "device, with gpus 80",
        free=True,
    )
    plan: PlanConfig = block(PlanConfig)
