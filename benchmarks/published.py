"""The figures that the papers report, as data. Times were read from bars of figures, to about 0.02 s."""

from __future__ import annotations

from dataclasses import dataclass

GPUS = (8, 16, 32, 64)


@dataclass(frozen=True)
class Published:
    """HAP (EuroSys'24), figure 12: seconds per iteration on ``GPUS`` devices of the mixed cluster; empty if
    we know only a claim and not the bars."""

    workload: str
    batch_per_gpu: int
    hap: tuple[float, ...] = ()
    ddp_even: tuple[float, ...] = ()  # DP-EV
    ddp_proportional: tuple[float, ...] = ()  # DP-CP
    deepspeed: tuple[float, ...] = ()
    tag: tuple[float, ...] = ()
    claim: str = ""


HAP_FIGURE_12 = (
    Published(
        "vgg19",
        64,
        hap=(0.20, 0.30, 0.40, 0.66),
        ddp_even=(1.24, 1.29, 1.38, 1.58),
        ddp_proportional=(1.05, 1.16, 1.39, 1.51),
        deepspeed=(1.20, 1.37, 1.49, 1.56),
        tag=(0.66, 1.13, 1.37, 1.59),
        claim="up to 2.41 times as fast as the best baseline",
    ),
    Published("vit", 64, claim="about equal to DP-CP"),
    Published(
        "bert-base",
        64,
        hap=(0.87, 0.92, 0.96, 0.99),
        ddp_even=(0.91, 1.04, 1.31, 1.33),
        ddp_proportional=(0.92, 0.97, 1.04, 1.27),
        deepspeed=(0.97, 1.11, 1.29, 1.36),
        tag=(1.15, 1.32, 1.55, 1.91),
        claim="28 % faster than the best baseline on 64",
    ),
    Published(
        "bert-moe", 32, claim="about equal to expert-designed sharding; data parallelism out of memory"
    ),
)


@dataclass(frozen=True)
class PublishedAlone:
    """Seconds per iteration of a model on ``gpus`` devices of one kind."""

    workload: str
    batch_per_gpu: int
    device: str
    gpus: int
    step_s: float
    source: str

    @property
    def cluster(self) -> str:
        """The devices as a cluster file; their positions do not matter for a bound."""
        devices = f'{{ device = "{self.device}", count = {self.gpus} }}'
        return f'name = "{self.gpus} {self.device}"\n[[machine]]\ndevices = [{devices}]\n'


HAP_FIGURE_14 = PublishedAlone("bert-base", 64, "P100-12GB", 8, 0.81, "HAP, figure 14")

# Measured by HAP's authors on their cluster with NCCL: bytes of the whole tensor per second, over all devices
# (the artifact's master.py; profiler.py divides bytes by the median time). An all_reduce at the full 10.4
# Gbit/s would reach 660e6. Broadcast is that of "all_gather_by_group_call".
HAP_COLLECTIVE_BYTES_PER_S = {
    "all_reduce": 476_774_816,
    "all_gather": 815_418_707,
    "reduce_scatter": 876_490_907,
    "all_to_all": 7_504_501_871,
    "broadcast": 549_828_906,
    "send": 549_828_906,  # they measured none: between two devices a broadcast is a send
}
