"""The tensors of a model as one rank stores them: cuts them into pieces, and makes them whole again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ..errors import PlanError
from ..frontend.trace.dtypes import DTYPE_NAME
from ..lang.ir import REPLICATE, Instruction, Program, Shard, batch_norm_of, owned_type
from ..lang.ir.local_norms import LOCAL
from .collectives import broadcast, flat_bytes
from .comm import Comm
from .executor import local_piece
from .layout import Layout, layout
from .redistribute import between

BROADCAST_BYTES = 32 * 2**20


@dataclass(frozen=True, slots=True)
class Stored:
    """The storage of one named tensor of a model: its whole shape and dtype, and the places of its pieces."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    held: Layout
    copies: tuple[Layout, ...] = ()  # all layouts of a tensor with copies; ``held`` is one of them
    counting: int | None = None  # the rank whose tensor counts, if ranks have different ones

    def at(self, rank: int) -> Stored:
        """The same storage, with the copy that ``rank`` holds."""
        mine = [copy for copy in self.copies if rank in copy.ranks]
        return replace(self, held=mine[0]) if mine else self

    @property
    def counted(self) -> Layout:
        """The layout in which every element of the tensor appears once, or once per rank."""
        return self.copies[0] if self.copies else self.held

    def origin(self, rank: int) -> tuple[int, ...]:
        """The position in the whole tensor at which this rank's piece begins."""
        at = [0] * len(self.shape)
        if isinstance(self.held.placement, Shard):
            at[self.held.dim], _ = self.held.piece(rank)
        return tuple(at)

    def counts(self, rank: int) -> bool:
        """Whether the part of ``rank`` counts in a total that is to contain the whole tensor once."""
        held = self.counted
        return rank in held.ranks and (bool(held.sizes) or rank == held.ranks[0])

    def is_everywhere(self, world_size: int) -> bool:
        """Whether all ranks hold the whole tensor."""
        held = self.counted
        return (
            self.counting is None and not isinstance(held.placement, Shard) and len(held.ranks) == world_size
        )

    @property
    def num_pieces(self) -> int:
        """The number of ranks whose piece is less than the whole (0 if nothing is cut)."""
        pieces = [size for size in self.held.sizes if size]
        return len(pieces) if len(pieces) > 1 else 0

    def piece(self, whole: Tensor, rank: int, device: torch.device) -> Tensor:
        """The piece that ``rank`` keeps. It shares no memory with the whole, which can then be freed."""
        mine = local_piece(whole.data, self.held, rank)
        if mine.shape != whole.shape:
            mine = mine.clone(memory_format=torch.contiguous_format)
        elif not torch.ops.aten.is_non_overlapping_and_dense(mine):
            mine = mine.contiguous()
        return mine.to(device)

    def whole(self, mine: Tensor, comm: Comm) -> Tensor:
        """The whole tensor, on all ranks, from this rank's piece (plain or as a shard). Collective."""
        with torch._C.DisableTorchFunctionSubclass():
            mine = mine.detach().as_subclass(Tensor)
        held = self.counted
        if self.counting is not None:
            channel = comm.channel(comm.everyone, f"collecting {self.name}")
            if comm.rank not in held.ranks:
                mine = torch.empty(self.shape, dtype=self.dtype, device=comm.device)
            return broadcast(channel, mine.detach().clone(), src=self.counting)
        if self.is_everywhere(comm.world_size):
            return mine.detach()
        what = f"collecting {self.name}"
        if isinstance(held.placement, Shard):
            if comm.rank not in held.ranks:
                mine = torch.empty(held.shape(self.shape, comm.rank), dtype=self.dtype)
            everywhere = Layout(placement=REPLICATE, ranks=comm.everyone)
            how = between(comm, what, self.shape, self.dtype, held, everywhere)
            whole = how.forward(mine.detach().to(comm.device))
            assert whole is not None  # every rank holds it
            return whole
        if comm.rank not in held.ranks:
            mine = torch.empty(self.shape, dtype=self.dtype, device=comm.device)
        channel = comm.channel(comm.everyone, what)
        return broadcast(channel, mine.detach().contiguous(), src=held.ranks[0])


def stored_tensors(program: Program, model: nn.Module) -> dict[str, Stored]:
    """Every parameter and buffer of a model by each of its names. An owned parameter is stored as its owners
    hold it; a buffer that is updated but never read is on the ranks that update it; tensors that the program
    does not use are whole everywhere.

    Raises PlanError, naming the first differences, if the model is not the program's.
    """
    params = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    check_model(program, params, buffers)
    by_tensor = {
        id((params if i.op == "param" else buffers)[i.args[0]]): layout(
            program, owned_type(program, i) or i.type
        )
        for i in program.instructions
        if i.op in ("param", "buffer")
    }
    for i in program.instructions:
        if i.op == "update":
            by_tensor.setdefault(id(buffers[i.args[0]]), layout(program, program.types[i.inputs[0]]))
    copies = {
        id(params[name]): tuple(layout(program, i.type) for i in every)
        for name, every in program.copies.items()
    }
    everywhere = Layout(REPLICATE, tuple(range(program.world_size)))
    counting = {id(buffers[name]): rank for name, rank in counting_ranks(program).items()}
    return {
        name: Stored(
            name,
            tuple(t.shape),
            t.dtype,
            by_tensor.get(id(t), everywhere),
            copies.get(id(t), ()),
            counting.get(id(t)),
        )
        for name, t in {**params, **buffers}.items()
    }


def counting_ranks(program: Program) -> dict[str, int]:
    """For each updated buffer, by name, the rank whose value counts if batch norm is local. Each rank then
    has its own running statistics, and the model's are those of the first rank that holds samples, as
    DistributedDataParallel keeps rank 0's."""
    if batch_norm_of(program) != LOCAL:
        return {}
    updates = [i for i in program.instructions if i.op == "update"]
    return {i.args[0]: program.participants(program.types[i.inputs[0]])[0] for i in updates}


def check_model(program: Program, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
    differences = list(_differences(program, params, buffers))
    if differences:
        shown = differences[:3]
        more = len(differences) - len(shown)
        raise PlanError(
            "the model is not the one that was planned",
            expected="; ".join(e for e, _ in shown) + (f"; and {more} more" if more else ""),
            got="; ".join(g for _, g in shown),
            hint="plan again with this model",
        )


def _differences(program: Program, params, buffers) -> Iterator[tuple[str, str]]:
    seen: dict[int, Instruction] = {}
    for i in program.instructions:
        if i.op == "update" and i.args[0] not in buffers:
            yield f"a buffer {i.args[0]} that is updated", "no buffer of this name"
        if i.op not in ("param", "buffer"):
            continue
        name, value = i.args[0], i.type.value
        tensor = (params if i.op == "param" else buffers).get(name)
        if tensor is None:
            yield f"{i.op} {name} {value}", f"no {i.op} of this name"
            continue
        dtype = DTYPE_NAME.get(tensor.dtype, str(tensor.dtype))
        got = f"{dtype}[{', '.join(map(str, tensor.shape))}]"
        if got != str(value):
            yield f"{name} {value}", f"{name} {got}"
        if i.op == "param" and tensor.requires_grad != dict(i.kwargs).get("trainable", True):
            yield (
                f"{name} with requires_grad={not tensor.requires_grad}",
                f"requires_grad={tensor.requires_grad}",
            )
        other = seen.setdefault(id(tensor), i)
        if other.args[0] != name and (other.type.placement, other.type.ratio, other.attr("owned")) != (
            i.type.placement, i.type.ratio, i.attr("owned")
        ):  # fmt: skip
            yield (
                f"{name} apart from {other.args[0]}",
                f"one tensor under both names, {other.type} and {i.type}",
            )


def agree(tensors: Iterable[Tensor], comm: Comm) -> None:
    """Overwrites the tensors of all ranks with rank 0's. Collective."""
    channel = comm.channel(comm.everyone, "broadcast of the initial parameters")
    if channel.alone:
        return
    group: list[Tensor] = []
    # tensors whose memory order is not that of their bytes, with these bytes
    copies: list[tuple[Tensor, Tensor]] = []
    size = 0

    def send() -> None:
        if group:
            flat = broadcast(channel, torch.cat(group).to(comm.device), src=0)
            for part, piece in zip(group, flat.split([part.numel() for part in group])):
                part.copy_(piece)
        for t, own in copies:
            t.copy_(own.view(t.dtype).view(t.shape))
        group.clear()
        copies.clear()

    for t in tensors:
        t = t.detach()
        own = flat_bytes(t)
        for part in own.split(BROADCAST_BYTES):  # so that no device has to hold a large tensor whole
            group.append(part)
            size += part.numel()
            if size >= BROADCAST_BYTES:
                send()
                size = 0
        if own.data_ptr() != t.data_ptr():
            copies.append((t, own))
    send()
