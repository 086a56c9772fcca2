"""Names of collectives and of their variants."""

from __future__ import annotations

# hierarchical collectives of gradients and parameters: to one rank of each machine, between those, and back
LEVELLED = {
    "all_reduce": "levelled_all_reduce",
    "reduce_scatter": "levelled_reduce_scatter",  # to shard owners, each of which represents its machine
    "all_gather": "levelled_all_gather",
}
FLAT = {levelled: name for name, levelled in LEVELLED.items()}
DIRECT = "direct_all_reduce"  # every rank sends its addend to every other one, and sums what it receives
USUAL = {**FLAT, DIRECT: "all_reduce"}  # the library's own collective for each of its variants
COLLECTIVES = (
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "send", *USUAL,
)  # fmt: skip
