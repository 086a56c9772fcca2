"""One rank's part in a pipeline: the micro-batches of its stage in 1F1B order (``ir.passes_of``).

A value for another stage is sent when the forward pass of a micro-batch ends, its gradient when the backward
pass ends. No rank waits for its sends before the end of the step, and each posts its receives one micro-batch
ahead, so that values travel while the micro-batch before is computed. Activations and gradients have separate
groups, in each of which micro-batches follow in order, so no two stages can wait for each other.

The stages' passes run within the forward call. In the last backward pass the gradients of all micro-batches
begin to be summed between the ranks of a stage, and between stages that share a weight; then they wait for
``backward`` of the loss (see ``micro_steps``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ..cost.communicators import ACTIVATION_GRADIENTS, ACTIVATIONS
from ..errors import InputError
from ..frontend.trace.dtypes import TORCH_DTYPE
from ..lang.ir import Instruction, Program, Samples, micro_step_program, passes_of, transfers_of
from . import collectives
from .batches import local_input
from .collectives import Handle
from .comm import Comm
from .executor import transfer_key
from .layout import union


@dataclass(frozen=True)
class Transfer:
    """One move between stages, the same in every micro-batch: pieces of ``counts`` elements, per rank, along
    the cut dim."""

    instruction: Instruction  # in the program of one micro-batch
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    counts: tuple[int, ...]
    has_gradient: bool

    @classmethod
    def of(cls, program: Program, samples: Samples, i: Instruction, micro_steps: int) -> Transfer:
        value, dim = i.type.value, i.type.shard.dim
        each = value.shape[dim] // samples.batch_size
        shape = (*value.shape[:dim], value.shape[dim] // micro_steps, *value.shape[dim + 1 :])
        return cls(
            replace(i, types=(replace(i.type, value=replace(value, shape=shape)),)),
            program.participants(program.types[i.inputs[0]]),
            program.participants(i.type),
            tuple(count // micro_steps * each for count in samples.counts),
            i.result in program.requires_grad,
        )

    @property
    def name(self) -> str:
        return self.instruction.result

    @property
    def ranks(self) -> tuple[int, ...]:
        return union(self.sources, self.targets)

    def pass_on(self, comm: Comm, x: Tensor | None) -> Handle:
        """Sends this rank's piece of the activations, or requests it if ``x`` is None."""
        return self._exchange(comm, x, self.sources, self.targets, ACTIVATIONS, "")

    def give_back(self, comm: Comm, gradient: Tensor | None) -> Handle:
        """Does the same for the gradient of the activations."""
        return self._exchange(comm, gradient, self.targets, self.sources, ACTIVATION_GRADIENTS, "gradient")

    def _exchange(self, comm: Comm, x: Tensor | None, senders, receivers, purpose: str, part: str) -> Handle:
        t = self.instruction.type
        shape, dim = t.value.shape, t.shard.dim
        if x is None:
            empty = (*shape[:dim], 0, *shape[dim + 1 :])
            x = torch.empty(empty, dtype=TORCH_DTYPE[t.value.dtype], device=comm.device)
        channel = comm.channel(self.ranks, self.instruction, purpose, part)
        of = lambda ranks: [self.counts[r] if r in ranks else 0 for r in self.ranks]  # noqa: E731
        return collectives.all_to_all.start(channel, x, dim, of(senders), dim, of(receivers))


Forward = Callable[[int, dict[str, Tensor]], tuple[Tensor | None, dict[str, Tensor]]]


@dataclass(frozen=True)
class Stage:
    """This rank's place in a pipeline. ``incoming`` and ``outgoing`` are in the program's order."""

    number: int
    stages: int
    micro_steps: int
    incoming: tuple[Transfer, ...]
    outgoing: tuple[Transfer, ...]

    @classmethod
    def of(cls, program: Program, samples: Samples, rank: int, micro_steps: int) -> Stage | None:
        """The stage of ``rank``; None for a rank that is in no stage."""
        number = samples.stage_of(rank)
        if number is None:
            return None
        moves = transfers(program, samples, micro_steps)
        incoming = tuple(t for t in moves if rank in t.targets)
        outgoing = tuple(t for t in moves if rank in t.sources)
        return cls(number, len(samples.stages), micro_steps, incoming, outgoing)

    def run(
        self,
        comm: Comm,
        forward: Forward,
        seed: Tensor | None,
        last_backward: Callable[[], AbstractContextManager] = nullcontext,
        after_backward: Callable[[], object] = lambda: None,
    ) -> None:
        """Runs all micro-batches. ``forward`` takes the number of a micro-batch and the values from earlier
        stages; it returns this rank's addend of the loss, and the values for later stages by name. ``seed``
        is the loss's gradient; without it there are no backward passes. The last one runs within
        ``last_backward``."""
        learns = seed is not None
        returning = [t for t in self.outgoing if t.has_gradient] if learns else []
        activations = _Ahead(self.micro_steps, [partial(t.pass_on, comm, None) for t in self.incoming])
        gradients = _Ahead(self.micro_steps, [partial(t.give_back, comm, None) for t in returning])
        sent: deque[Handle] = deque()
        kept: dict[int, _Kept] = {}
        passes = passes_of(self.number, self.stages, self.micro_steps)
        for is_backward, k in passes if learns else [p for p in passes if not p[0]]:
            if is_backward:
                arrived = gradients.next()
                with last_backward() if k + 1 == self.micro_steps else nullcontext():
                    sent += self._backward(comm, kept.pop(k), arrived, seed)
                del arrived
                after_backward()
            else:
                received = [
                    x.requires_grad_() if learns and t.has_gradient else x
                    for t, x in zip(self.incoming, activations.next())
                ]
                by_key = {transfer_key(t.name): x for t, x in zip(self.incoming, received)}
                loss, handed = forward(k, by_key)
                sent += [t.pass_on(comm, handed[t.name].detach()) for t in self.outgoing]
                if learns:
                    kept[k] = _Kept(received, [handed[t.name] for t in returning], loss)
                del received, by_key, loss, handed  # kept values live until their backward pass
            while sent and sent[0].is_ready():
                sent.popleft().wait()
        for handle in sent:
            handle.wait()

    def _backward(
        self, comm: Comm, kept: _Kept, gradients: list[Tensor], seed: Tensor | None
    ) -> list[Handle]:
        roots = [*zip(kept.sent, gradients)]
        if kept.loss is not None:
            assert seed is not None  # without a seed there are no backward passes
            roots.append((kept.loss, seed))
        roots = [(x, g) for x, g in roots if x.requires_grad]
        if roots:
            torch.autograd.backward([x for x, _ in roots], [g for _, g in roots])
        back = [(t, x) for t, x in zip(self.incoming, kept.received) if t.has_gradient]
        return [t.give_back(comm, torch.zeros_like(x) if x.grad is None else x.grad) for t, x in back]


@dataclass(frozen=True)
class _Kept:
    """Values that a forward pass leaves for the backward pass of its micro-batch; ``sent`` have gradients."""

    received: list[Tensor]
    sent: list[Tensor]
    loss: Tensor | None


class _Ahead:
    """The values received in every micro-batch, requested one micro-batch ahead."""

    def __init__(self, micro_steps: int, asked: Sequence[Callable[[], Handle]]) -> None:
        self._left, self._asked = micro_steps, asked
        self._coming = self._ask()

    def _ask(self) -> list[Handle]:
        self._left -= 1
        return [ask() for ask in self._asked] if self._left >= 0 else []

    def next(self) -> list[Tensor]:
        arrived = [handle.wait() for handle in self._coming]
        self._coming = self._ask()
        return arrived


def transfers(program: Program, samples: Samples, micro_steps: int) -> list[Transfer]:
    """The transfers of every micro-batch, without those made once per step before the first one."""
    moves = transfers_of(micro_step_program(program, samples))
    return [Transfer.of(program, samples, i, micro_steps) for i in moves]


def groups(program: Program, samples: Samples) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The groups of ranks that communicate between stages, each with its purpose."""
    for t in transfers(program, samples, 1):
        yield ACTIVATIONS, t.ranks
        if t.has_gradient:
            yield ACTIVATION_GRADIENTS, t.ranks


def stage_inputs(
    program: Program, samples: Samples, tensors: Mapping[str, Tensor], comm: Comm, micro_steps: int
) -> dict[str, Tensor]:
    """Like ``local_inputs``, with a rank's samples in the order of micro-batches, each of which is cut
    between the ranks of the stage. Raises InputError for a part of a batch if it cannot tell whose part it
    is."""
    out = {}
    for i in program.batch_inputs:
        ranks, name = program.participants(i.type), i.args[0]
        if comm.rank not in ranks:
            continue
        got = tensors.get(name)
        if i.result not in samples.values or len(ranks) == 1:
            out[name] = local_input(program, i, got, comm.rank, comm.device)
            continue
        local_input(program, i, got, comm.rank, None)
        assert got is not None  # None has been refused
        if tuple(got.shape) != i.type.value.shape:
            raise InputError(
                f"{name} is a part of a batch, and a pipeline cuts every micro-batch between its ranks",
                expected=f"{list(i.type.value.shape)} (whole)",
                got=f"{list(got.shape)}",
                hint="pass whole batches, as mixmesh.shard_batches(batches, plan, rank) does",
            )
        dim = i.type.shard.dim
        rows = got.unflatten(dim, (micro_steps, -1))
        each = got.shape[dim] // samples.batch_size
        mine = samples.offset(comm.rank), samples.counts[comm.rank]
        first, size = (n // micro_steps * each for n in mine)
        out[name] = rows.narrow(dim + 1, first, size).flatten(dim, dim + 1).to(comm.device)
    return out
