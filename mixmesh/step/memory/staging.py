"""The buffers of a collective under way, besides its source and result (``runtime.collectives``)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from ...cost.exchanges import DUAL_COLLECTIVE
from ...lang.ir import Cut, Instruction, Shard, TensorType

# forms of a reduce_scatter in which each rank receives all addends of its piece
EXCHANGES = (None, "all_to_all")


@dataclass(frozen=True, slots=True)
class Transfer:
    """A collective ``op`` that makes ``target`` from ``source``, by an ``algorithm`` if the program names
    one."""

    op: str
    source: TensorType
    target: TensorType
    algorithm: str | None = None

    @classmethod
    def forward(cls, i: Instruction, source: TensorType) -> Transfer:
        return cls(i.op, source, i.type, i.attr("algorithm"))

    @classmethod
    def back(cls, i: Instruction, source: TensorType) -> Transfer:
        """The transfer of the gradient."""
        return cls(DUAL_COLLECTIVE.get(i.op, i.op), i.type, source, i.attr("gradient_algorithm"))

    def is_sent_as_it_is(self, cuda: bool) -> bool:
        """Whether a reduce_scatter sends its source's own memory: pieces lie in rank order there, and nothing
        is overwritten."""
        placement = self.target.placement
        cut = placement.dim if isinstance(placement, Shard) else 0
        in_order = prod(self.source.value.shape[:cut]) == 1
        return not cuda and in_order and self.algorithm in EXCHANGES

    def staging(self, world_size: int, cuda: bool) -> Iterator[tuple[float, Cut]]:
        """The bytes of buffers that it holds from its start to its end."""
        size = float(self.target.value.size_bytes)
        match self.op:
            case "reduce_scatter":
                if not self.is_sent_as_it_is(cuda):
                    yield size, self.source.cut.whole
                if not cuda and self.algorithm in EXCHANGES:
                    yield world_size * size, self.target.cut
            case "all_to_all" | "move":
                yield size, self.source.cut
                yield size, self.target.cut

    def ordering(self, cuda: bool) -> Iterator[tuple[float, Cut]]:
        """The bytes of the buffer in rank order that it holds after arrival, besides the result in memory
        order."""
        placement = self.source.placement
        if self.op != "all_gather" or not isinstance(placement, Shard):
            return
        if prod(self.target.value.shape[: placement.dim]) > 1 or cuda:
            yield float(self.target.value.size_bytes), self.target.cut.whole
