"""A communicator: ranks that meet for a purpose. NCCL gives each a set of buffers (``gpu_memory``)."""

from __future__ import annotations

from dataclasses import dataclass

DATA = "data"
GRADIENT = "gradient"
UP, BETWEEN, DOWN = "gradient, up", "gradient, between", "gradient, down"  # hierarchical sums
ACTIVATIONS, ACTIVATION_GRADIENTS = "activations", "gradients of activations"  # between pipeline stages
LOSS_TOLD = "loss, told"


@dataclass(frozen=True, slots=True)
class Communicator:
    """``ranks`` that communicate for a ``purpose``. If ``is_pairwise``, each of them also has a connection to
    every other one, in addition to those of rings and trees."""

    purpose: str
    ranks: tuple[int, ...]
    is_pairwise: bool = False
