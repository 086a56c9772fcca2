"""The cases of the placement bench: HeteroG's models on its clusters, and others that no policy has seen.

HeteroG (CoNEXT'20, section 6) gives batches for 8 devices, and batches half as large again for 12. It makes
data parallelism run out of memory with twice the batch, and with 48 layers of BERT-large.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mixmesh.cluster import Cluster

RELEASED_BYTES_PER_S = 747e6  # between machines, in HeteroG's released sample configuration


@dataclass(frozen=True)
class Case:
    """A workload with its global batch on a preset. ``role``: "heterog" for its own tables, "memory" for
    cases in which data parallelism should not fit, "other" for models and clusters of other papers."""

    workload: str
    global_batch: int
    cluster: str
    role: str
    links: str = "preset"  # or "released"
    quick: bool = False

    @property
    def name(self) -> str:
        return f"{self.workload}@{self.cluster}"

    def devices(self) -> Cluster:
        """The cluster, with its own links or those of the released code."""
        cluster = Cluster.load(self.cluster)
        if self.links == "preset":
            return cluster
        rate = RELEASED_BYTES_PER_S
        machines = tuple(replace(m, nic_bytes_per_s=rate) for m in cluster.machines)
        return replace(cluster, machines=machines, bandwidth_bytes_per_s=rate)


HETEROG_BATCHES = {  # on 8 devices
    "vgg19-224": 192,
    "resnet200": 192,
    "inception-v3": 192,
    "mobilenet-v2": 192,
    "nasnet": 192,
    "transformer": 720,
    "bert-large": 48,
    "xlnet-large": 48,
}
QUICK = ("vgg19-224", "transformer", "bert-large", "xlnet-large")


def heterog_cases() -> tuple[Case, ...]:
    own = [
        Case(name, batch * times // 2, cluster, "heterog", links, quick=name in QUICK and times == 2)
        for cluster, times in (("heterog-8", 2), ("heterog-12", 3))
        for name, batch in HETEROG_BATCHES.items()
        for links in ("preset", "released")
    ]
    memory = [
        Case("bert-large-48", 24, "heterog-8", "memory", quick=True),
        Case("bert-large", 96, "heterog-8", "memory"),
        Case("resnet200", 384, "heterog-8", "memory"),
    ]
    return (*own, *memory)


CASES = (
    *heterog_cases(),
    Case("vgg19", 512, "tag-16", "other", quick=True),
    Case("transformer", 600, "tag-16", "other"),
    Case("bert-base", 128, "hap-8", "other", quick=True),
    Case("vit", 256, "hap-16", "other"),
)
