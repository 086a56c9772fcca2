"""Checks that the ranks holding a parameter whole still hold the same values.

They all start from rank 0's values, and get the same gradients. A script that changes weights or gradients by
each rank's own random numbers, or on one rank only, makes them differ, and from then on the ranks silently
train different models. So now and then they compare norms, which are quick to send.

The optimizer's settings are compared too: a scheduler that depends on a rank's own numbers sets a different
learning rate on every rank, which norms do not show for parameters that are cut. So is the number of its
steps: a rank that leaves one out, by a decision of its own, would train older pieces than the others. And so
are buffers that the program reads, the numbers by which losses were multiplied, and what was done with the
gradients of parameters that are cut (``acts``).

Devices may round differently, so values need not be equal to the bit. If n values differ at random by a share
d of their size, their norms differ by about d / sqrt(n); so the difference of the norms times sqrt(n) is
compared with a limit for d. These norms are taken in float64, in which a CPU is four times as slow as in
float32. So first a norm and a sum in the parameters' own precision are compared; where all ranks have the
same ones, to the bit, nothing else is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from ..base.units import ranks_text
from ..errors import InputError
from ..lang.ir import Program, Shard
from . import collectives
from .acts import NUM_COUNTS, Acts, text_of
from .agreement import OF_LOSS_ROUNDING, by_value, unequal_weights
from .comm import Comm
from .layout import Layout
from .shard_numbers import Off
from .shards import Stored

FIRST_CALLS = (2, 4, 8, 16, 32)  # forward passes in training before which parameters are compared
EVERY = 64  # forward passes from one comparison to the next, after the first ones
ORDERS = (1.0, 2.0)  # the orders of the norms
NORMED_AT_A_TIME = 2**22  # elements of a tensor
CHECKSUMS = (torch.linalg.vector_norm, torch.sum)
NOT_SETTINGS = ("params", "initial_lr", "foreach", "fused", "capturable", "differentiable")
SETTINGS_ROUNDING = 1e-6  # mathematical functions may differ between machines
# largest share by which values of a dtype may differ between devices that round differently
ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.1}
HINTS = (
    "draw random numbers alike on all ranks: seed them by one number right before, torch.manual_seed(0)",
    "change weights and gradients on every rank, outside of `if rank == 0:`, and by numbers of whole batches",
    "model.load_full_state_dict(state), with the state of one rank, makes them the same again",
)
RESUME = "resume from the last checkpoint: the ranks train different models"


def is_due(num_calls: int) -> bool:
    """Whether to compare parameters before forward pass number ``num_calls`` of a training."""
    return num_calls in FIRST_CALLS or num_calls % EVERY == 0


@dataclass(frozen=True)
class Replica:
    """One parameter or buffer that ``ranks`` hold whole."""

    name: str
    ranks: tuple[int, ...]
    num_elements: int
    dtype: torch.dtype


class DriftWatch:
    """Compares the parameters of a model that several ranks hold whole, and the buffers among ``read``.
    ``held`` are this rank's parameters, by name, ``buffers`` returns its buffers, and ``stored`` says which
    ranks hold each of them."""

    def __init__(
        self,
        comm: Comm,
        held: Mapping[str, Tensor],
        stored: Mapping[str, Stored],
        buffers: Callable[[], Mapping[str, Tensor]],
        read: Collection[str] = (),
    ) -> None:
        self._comm = comm
        self._replicas = [
            Replica(name, layout.ranks, torch.Size(s.shape).numel(), s.dtype)
            for name, s in stored.items()
            if name in held or (name in read and s.counting is None)
            if s.dtype in ROUNDING and torch.Size(s.shape).numel()
            for layout in s.copies or (s.held,)
            if is_replicated(layout)
        ]
        self._held, self._buffers = held, buffers
        self._cut = tuple(n for n, s in stored.items() if n in held and is_cut(s) and comm.world_size > 1)
        own = {n: stored[n].at(comm.rank).held for n in self._cut}
        self.acts = Acts(
            {n: held[n] for n, layout in own.items() if layout.sizes and layout.sizes[comm.rank]}
        )
        self.optimizer: torch.optim.Optimizer | None = None
        self._num_steps = 0
        self.num_calls = 0
        self._alike_at = 0  # the last forward pass before which all ranks agreed

    def before_step(self) -> None:
        """Called before a step of the optimizer."""
        self.acts.before_step()

    def after_step(self) -> None:
        """Called after a step of the optimizer."""
        self._num_steps += 1

    def before_call(self) -> None:
        """Called before a forward pass of a training: compares if it is due. Collective."""
        self.num_calls += 1
        if is_due(self.num_calls):
            self.check()

    def check(self) -> None:
        """Raises InputError, on all ranks, if a parameter has different values on some ranks, or the
        optimizer different settings. Collective."""
        comm = self._comm
        if comm.world_size == 1 or not (self._replicas or self._cut or self.optimizer):
            return
        with comm.call("comparison of parameters"):
            acts = [self.acts.of(name, self.optimizer) for name in self._cut]
            own = [self._num_steps, self.acts.taken(), *settings_of(self.optimizer), *chain(*acts)]
            checksums = self._checksums()
            of_ranks = self._gathered(
                torch.cat([torch.tensor(own, dtype=torch.float64), checksums.flatten()])
            )
            own_of_ranks, sums = of_ranks.split([len(own), checksums.numel()], dim=1)
            self._compare_settings(own_of_ranks[:, 2:4])
            self._compare_steps(own_of_ranks[:, 0].tolist())
            self._compare_weights(own_of_ranks[:, :2].tolist())
            for name, counts in zip(self._cut, own_of_ranks[:, 4:].split(NUM_COUNTS, dim=1)):
                self._compare_acts(name, counts.tolist())
            sums = sums.unflatten(1, checksums.shape)
            unequal = [r for n, r in enumerate(self._replicas) if not is_same(sums[list(r.ranks), n])]
            if unequal:
                norms = self._gathered(self._norms(unequal))
                for number, replica in enumerate(unequal):
                    self._compare(replica, norms[:, number])
        self._alike_at = self.num_calls

    def _gathered(self, rows: Tensor) -> Tensor:
        """The ``rows`` of every rank, stacked. Collective."""
        comm = self._comm
        channel = comm.channel(comm.everyone, "all_gather of norms of parameters")
        return collectives.all_gather(channel, rows.to(comm.device).unsqueeze(0), [1] * comm.world_size).cpu()

    def _compare_settings(self, settings: Tensor) -> None:
        """Compares ``settings``, which have a row for each rank."""
        least, most = settings.min(0).values, settings.max(0).values
        is_other = most - least > SETTINGS_ROUNDING * most.abs()  # pretended ranks have NaN
        if not bool(is_other.any()):
            return
        low, high = (int(settings[:, 0].argmin()), int(settings[:, 0].argmax()))
        rates = ", ".join(f"rank {rank}: {rate:.6g}" for rank, (rate, _) in enumerate(settings.tolist()))
        raise InputError(
            "the optimizer has other settings on other ranks: each trains its part of the model otherwise",
            expected="one learning rate on all ranks, one weight decay, and so on",
            got=f"learning rates, each group's times its number, of {rates}",
            hint=(
                "give a scheduler such as ReduceLROnPlateau a number that is the same on all ranks: the "
                "loss of model(x, y), or one of whole batches",
                "numbers of a rank's own rows: out.gather() has those of all, or sum them over ranks",
            ),
            ranks=(low, high),
        )

    def _compare_steps(self, counts: Sequence[float]) -> None:
        """Compares the numbers of the optimizer's steps, by rank."""
        by_count = by_value({rank: f"{n:.0f}" for rank, n in enumerate(counts) if math.isfinite(n)})
        if len(by_count) < 2:
            return
        since = f", after the same number before forward pass {self._alike_at}" if self._alike_at else ""
        raise InputError(
            "the optimizer has made more steps on some ranks than on others",
            expected="optimizer.step() on every rank after the same backward passes",
            got="; ".join(f"{n} steps on {ranks_text(ranks)}" for n, ranks in by_count.items())
            + f", before forward pass {self.num_calls} of the training{since}",
            hint=(
                "leave a step out on all ranks or on none, by a number that is the same on all: the loss of "
                "model(x, y), a norm of gradients",
                RESUME,
            ),
            ranks=one_of_each(by_count),
        )

    def _compare_weights(self, of_ranks: Sequence[Sequence[float]]) -> None:
        """Compares the sums of the gradients of losses since the last comparison. Each rank has a row: the
        number of its steps, which is NaN for pretended ranks alone, and that sum."""
        known = {rank: weight for rank, (steps, weight) in enumerate(of_ranks) if math.isfinite(steps)}
        finite = {rank: weight for rank, weight in known.items() if math.isfinite(weight)}
        if not finite or len(known) < 2:
            return  # a loss that is multiplied by NaN on all ranks is that of one device
        low, high = min(finite, key=finite.__getitem__), max(finite, key=finite.__getitem__)
        high = next((rank for rank in known if rank not in finite), high)
        if not math.isclose(known[low], known[high], rel_tol=OF_LOSS_ROUNDING):
            raise unequal_weights(
                f"{known[low]:.6g} on rank {low} and {known[high]:.6g} on rank {high} in all, "
                f"before forward pass {self.num_calls} of the training"
            )

    def _compare_acts(self, name: str, of_ranks: Sequence[Sequence[float]]) -> None:
        """Compares what the ranks have done with the gradients of their pieces of a parameter."""
        told = {rank: text_of(tuple(n)) for rank, n in enumerate(of_ranks) if all(map(math.isfinite, n))}
        by_text = by_value(told)
        if len(by_text) < 2:
            return
        since = f"; alike before forward pass {self._alike_at}" if self._alike_at else ""
        raise InputError(
            f"{name} is cut, and its pieces were trained in other ways on other ranks",
            expected="the same on every rank: zero_grad(), clipping and other changes of gradients, "
            "gradients that are dropped, requires_grad_(), states of the optimizer that are loaded",
            got=". ".join(f"On {ranks_text(ranks)}: {text}" for text, ranks in by_text.items())
            + f" (before forward pass {self.num_calls} of the training{since})",
            hint=(
                "change weights and gradients on every rank, outside of `if rank == 0:`, and decide by a "
                "number that is the same on all: the loss of model(x, y), a norm of gradients",
                RESUME,
            ),
            ranks=one_of_each(by_text),
        )

    def _checksums(self) -> Tensor:
        """For every replica, a norm and a sum in its own precision, or in float32 if that is less; zeros for
        replicas that only other ranks hold."""

        def both(x: Tensor) -> Tensor:
            dtype = torch.promote_types(x.dtype, torch.float32)
            return torch.stack([checksum(x, dtype=dtype) for checksum in CHECKSUMS])

        return self._rows(self._replicas, lambda tensors: [both(x) for x in tensors])

    def _norms(self, replicas: Sequence[Replica]) -> Tensor:
        """The norms of these replicas; zeros for those that only other ranks hold."""

        def both(tensors: list[Tensor]) -> list[Tensor]:
            return [torch.stack(row) for row in zip(*(wide_norms(tensors, order) for order in ORDERS))]

        return self._rows(replicas, both)

    @torch.no_grad()
    def _rows(
        self, replicas: Sequence[Replica], numbers: Callable[[list[Tensor]], Sequence[Tensor]]
    ) -> Tensor:
        """A float64 row of two ``numbers`` for each replica that this rank holds, and of zeros for the
        others."""
        rows = torch.zeros(len(replicas), 2, dtype=torch.float64)
        own = [n for n, replica in enumerate(replicas) if self._comm.rank in replica.ranks]
        if own:
            with Off():
                held = {**self._buffers(), **self._held}
                own = [n for n in own if replicas[n].name in held]
                tensors = [held[replicas[n].name].detach().as_subclass(Tensor) for n in own]
                if own:
                    rows[own] = torch.stack([row.double() for row in numbers(tensors)]).cpu()
        return rows

    def _compare(self, replica: Replica, norms: Tensor) -> None:
        """Compares ``norms``, which have a row for each rank."""
        of_holders = norms[list(replica.ranks)]
        for column, order in enumerate(ORDERS):
            values = of_holders[:, column].tolist()
            if not is_alike(values, replica.num_elements, replica.dtype):
                raise self._error(replica, order, values)

    def _error(self, replica: Replica, order: float, values: Sequence[float]) -> InputError:
        least, most = min(values), max(values)
        low, high = (replica.ranks[values.index(value)] for value in (least, most))
        step = None if self._comm.watch is None else self._comm.watch.position.step
        when = f"forward pass {self.num_calls} of the training" + (f", at step {step}" if step else "")
        since = f"; they were the same before forward pass {self._alike_at}" if self._alike_at else ""
        return InputError(
            f"{replica.name} has other values on other ranks: the ranks train different models",
            expected="one value of a parameter on all ranks that hold it whole",
            got=f"norms of order {order:g} of {most:.9g} on rank {high} and {least:.9g} on rank {low}, "
            f"before {when}{since}",
            hint=HINTS,
            ranks=(low, high),
        )


def one_of_each(by_value: Mapping[str, Sequence[int]]) -> tuple[int, ...]:
    """Two ranks that differ, of those that have each value."""
    return tuple(ranks[0] for ranks in by_value.values())[:2]


def wide_norms(tensors: Sequence[Tensor], order: float) -> list[Tensor]:
    """Norms in float64, in which a CPU copies what it is given: a large tensor is given piece by piece."""
    pieces = [x.flatten().split(NORMED_AT_A_TIME) for x in tensors]
    norms = iter(torch._foreach_norm([*chain(*pieces)], order, dtype=torch.float64))
    of_tensors = [[next(norms) for _ in own] for own in pieces]
    return [
        own[0] if len(own) == 1 else torch.linalg.vector_norm(torch.stack(own), order) for own in of_tensors
    ]


def settings_of(optimizer: torch.optim.Optimizer | None) -> tuple[float, float]:
    """(sum of an optimizer's learning rates, sum of its other settings), each setting times its group's
    number."""
    rates = others = 0.0
    for number, group in enumerate(() if optimizer is None else optimizer.param_groups, 1):
        for name in sorted(group.keys() - set(NOT_SETTINGS)):
            value = group[name]
            for each in value if isinstance(value, tuple | list) else (value,):
                if isinstance(each, int | float) or (isinstance(each, Tensor) and each.numel() == 1):
                    rates += number * float(each) * (name == "lr")
                    others += number * float(each) * (name != "lr")
    return rates, others


def is_replicated(layout: Layout) -> bool:
    """Whether several ranks hold all of a tensor."""
    return len(layout.ranks) > 1 and not isinstance(layout.placement, Shard)


def is_cut(stored: Stored) -> bool:
    """Whether ranks hold pieces of a tensor."""
    return any(isinstance(layout.placement, Shard) for layout in stored.copies or (stored.held,))


def read_buffers(program: Program) -> frozenset[str]:
    """The names of the buffers that a program reads."""
    return frozenset(i.args[0] for i in program.instructions if i.op == "buffer")


def is_same(rows: Tensor) -> bool:
    """Whether all rows are equal to the first."""
    return bool((rows == rows[0]).all())


def is_alike(norms: Sequence[float], num_elements: int, dtype: torch.dtype) -> bool:
    """Whether replicas' norms differ only by rounding. Values that are not finite count as alike: other
    checks find them."""
    if not all(map(math.isfinite, norms)):
        return True
    largest = max(norms)
    return math.sqrt(num_elements) * (largest - min(norms)) <= ROUNDING[dtype] * largest
