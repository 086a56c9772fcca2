"""An account of the bytes that ranks hold: storages with references, as PyTorch counts them."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...base.heap import OWN_PIECE_BYTES
from ...lang.ir import Cut
from .moments import Moment, Sizes


@dataclass(slots=True)
class Storage:
    """Unsharded bytes that are held as long as something refers to them."""

    size_bytes: float
    cut: Cut
    references: int = 1
    small: bool = False


@dataclass(slots=True)
class View:
    """A tensor: a view of a storage with these strides."""

    storage: Storage
    strides: tuple[int, ...]


@dataclass(slots=True)
class Ledger:
    """Keeps account of the bytes that are held now, and of the moments so far."""

    world_size: int
    has_heap: bool  # whether small tensors come and go in a heap, as on a CPU
    held: Sizes = field(default_factory=dict)
    small: Sizes = field(default_factory=dict)
    moments: list[Moment] = field(default_factory=list)
    same_small: Sizes | None = None  # a copy of ``small``, as long as it does not change

    def take(self, size_bytes: float, cut: Cut, *, stays: bool = False) -> Storage:
        """Adds a new storage. One that ``stays`` for long is not part of a heap."""
        held = self.held
        held[cut] = held.get(cut, 0.0) + size_bytes
        # under an even share, so that memory stays linear in the shares
        piece_bytes = size_bytes / (self.world_size if cut.size else 1)
        small = self.has_heap and not stays and piece_bytes < OWN_PIECE_BYTES
        if small:
            self.small[cut] = self.small.get(cut, 0.0) + size_bytes
            self.same_small = None
        return Storage(size_bytes, cut, 1, small)

    def drop(self, *storages: Storage) -> None:
        """Removes a reference from each; a storage is freed with the last one."""
        for s in storages:
            s.references -= 1
            if s.references == 0:
                self.held[s.cut] -= s.size_bytes
                if s.small:
                    self.small[s.cut] -= s.size_bytes
                    self.same_small = None

    def moment(self, what: str, *temporary: tuple[float, Cut], event: str = "") -> None:
        """Notes what is held now, with ``temporary`` bytes that are freed right after."""
        self.moments.append(self.now(what, *temporary, event=event))

    def now(self, what: str, *temporary: tuple[float, Cut], event: str = "") -> Moment:
        """The present moment, without noting it."""
        held = self.held.copy()
        for size_bytes, cut in temporary:
            held[cut] = held.get(cut, 0.0) + size_bytes
        if self.same_small is None:
            self.same_small = self.small.copy()
        return Moment(what, held, self.same_small, event)
