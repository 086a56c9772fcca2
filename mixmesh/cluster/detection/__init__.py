"""Detects the cluster of which this process is a rank: ``mixmesh detect``.

Reading order: ``inventory`` (every rank's device), ``speed`` and ``links`` (measurements), ``assemble`` (the
cluster from both), ``cache`` (measurements of an earlier start).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from ...runtime.first_rank import everyones, from_first_rank
from ...runtime.messages import meet
from ..cluster import Cluster, Device
from .assemble import assemble, calibrations_of
from .cache import Cache
from .inventory import Inventory, read_inventory
from .links import Links, measure_links
from .speed import Speed, measure_speed

__all__ = ["Cache", "Inventory", "Links", "Speed", "calibrations_of", "detect", "read_inventory"]


def detect(
    device: torch.device,
    *,
    inventory: Inventory | None = None,
    calibrations: Mapping[str, Device] | None = None,
    on_start: Callable[[], object] = lambda: None,
    on_end: Callable[[], object] = lambda: None,
    progress: Callable[[str], None] = lambda _: None,
) -> Cluster:
    """The cluster of all ranks: machines by host name, cards by name and memory, measured rates of links.

    Cards that were calibrated (on the first rank's machine: ``calibrations``) have those figures, others of
    the catalogue the datasheet's; all ranks measure the speed of any other device at the same time, between
    ``on_start`` and ``on_end``. Collective, and takes a few seconds; ``torch.distributed`` is initialised.
    Raises InputError if the ranks of a machine are not consecutive.
    """
    inventory = inventory or read_inventory(device)
    cards = inventory
    if calibrations is None:
        calibrations = from_first_rank(lambda: calibrations_of(cards))
    own = inventory.devices[dist.get_rank()]
    progress("speed of devices")
    meet()
    on_start()
    speed = None if own.row is not None else measure_speed(device)
    on_end()
    speeds = everyones(speed)
    progress("rates of links")
    return assemble(inventory, speeds, measure_links(inventory.machines, device), calibrations)
