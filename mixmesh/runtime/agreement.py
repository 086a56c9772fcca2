"""Compares digests of everything that must be the same on all ranks: plan, model, code, seed, versions, and
the values of the first batches. Ranks that differ would train something nobody asked for, or wait for each
other."""

from __future__ import annotations

import hashlib
import json
import time
import types
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isclose

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..base.progress import tell
from ..base.units import ranks_text
from ..errors import CollectiveError, InputError, PlanError
from ..lang.ir import Program, Shard, print_program
from .versions import versions_text

Facts = dict[str, str]  # values short enough to show, by subject

COMPARED_STEPS = 3  # number of training steps whose batches are compared
POLL_S = (0.005, 0.2)  # first and longest pause between looks
NOTICE_S = 10.0
LAST_READ_S = 5.0  # longest wait for the other ranks to read why they are about to fail
HASHED_BYTES = 64 * 2**20  # limit on the bytes hashed of a tensor
OF_LOSS = "= the gradient of the loss"
OF_LOSS_ROUNDING = 1e-3  # relative: devices of several kinds may round it differently
HINTS = {
    "plan": "give every process the same plan file, or no --plan: then all get what rank 0 plans",
    "seed": "parallelize(..., seed=...) with one number on all ranks",
    "versions": "install the same versions on all machines",
    "model": "make the same model on all ranks",
    "model code": "copy the same source files to all machines",
}


def facts_of_start(model: nn.Module, program: Program, header: str, seed: int) -> Facts:
    """The facts compared before ranks exchange anything else. ``header`` is the plan's text other than its
    program."""
    return {
        "plan": f"{program.name} for {program.world_size} ranks, digest "
        + _digest(print_program(program) + header),
        **facts_of_model(model),
        "seed": str(seed),
        "versions": versions_text(),
    }


def facts_of_model(model: nn.Module) -> Facts:
    """The facts about a model that are compared: its class, settings and parameters, and its code."""
    tensors = [
        (n, tuple(p.shape), str(p.dtype), p.requires_grad, p.is_meta) for n, p in model.named_parameters()
    ]
    return {
        "model": f"{type(model).__name__}, digest {_digest(repr(tensors) + repr(model))}",
        "model code": _digest(*_code_of(model)),
    }


@dataclass(frozen=True)
class Round:
    """Exchanges ``what`` between all ranks through ``store`` under ``key``, within ``timeout_s``. ``check``
    may raise in the meantime."""

    store: dist.Store
    key: str
    rank: int
    world_size: int
    what: str
    timeout_s: float
    check: Callable[[], object] = lambda: None

    def exchange(self, facts: Facts) -> list[Facts]:
        """The facts of all ranks, by rank. Collective; raises CollectiveError if a rank does not come in
        time, or if the process that holds the store has ended."""
        store = self.store
        try:
            store.set(f"{self.key}/{self.rank}", json.dumps(facts))
            told = [json.loads(text) for text in store.multi_get(self._wait_for_all())]
            were_read = f"{self.key}/read"
            store.add(were_read, 1)
            if self.rank == 0 and any(one != told[0] for one in told):
                _wait_for_readers(store, were_read, self.world_size)
            return told
        except dist.DistError as error:
            raise CollectiveError(
                f"rank {self.rank} has lost the store of the launch in {self.what}",
                got=str(error).partition("\n")[0],
                hint="the process that holds it (rank 0, or its launcher) has ended: its own output says why",
            ) from None

    def _wait_for_all(self) -> list[str]:
        """The keys under which all ranks have written, by rank."""
        names = {r: f"{self.key}/{r}" for r in range(self.world_size)}
        started, noticed, pause_s = time.monotonic(), False, POLL_S[0]
        while missing := [r for r, name in names.items() if not self.store.check([name])]:
            waited_s = time.monotonic() - started
            self.check()
            if waited_s > self.timeout_s:
                raise CollectiveError(
                    f"rank {self.rank}: not all ranks have come to {self.what} within {self.timeout_s:g} s",
                    expected=f"{self.world_size} ranks",
                    got=f"nothing from {ranks_text(missing)}",
                    hint="a rank of these is slow, stuck or has ended: look at the output of each",
                    ranks=tuple(missing),
                )
            if waited_s > NOTICE_S and not noticed and self.rank == min(set(names) - set(missing)):
                noticed = True
                text = f"mixmesh: nothing from {ranks_text(missing)} in {self.what} yet"
                tell(text)
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, POLL_S[1])
        return list(names.values())


def _wait_for_readers(store: dist.Store, were_read: str, world_size: int) -> None:
    """Keeps rank 0 waiting until all ranks have read: its process may hold the store and may end next."""
    deadline = time.monotonic() + LAST_READ_S
    while store.add(were_read, 0) < world_size and time.monotonic() < deadline:
        time.sleep(POLL_S[0])


def disagreement(told: list[Facts]) -> PlanError | None:
    """The first fact in which ranks differ; None if they agree."""
    for what in told[0]:
        values = [facts.get(what, "nothing") for facts in told]
        if got := difference(values):
            return PlanError(
                f"the ranks were not given the same {what}",
                expected=f"one {what} on all ranks",
                got=got,
                hint=HINTS.get(what, ""),
                ranks=outliers(values),
            )
    return None


def check_facts(told: list[Facts]) -> None:
    """Raises PlanError if a fact is not the same on all ranks."""
    if (error := disagreement(told)) is not None:
        raise error


def difference(values: Sequence[str]) -> str:
    """The first two different values, each with its ranks; empty if all ranks have the same value."""
    groups = by_value(dict(enumerate(values)))
    if len(groups) < 2:
        return ""
    (one, first), (other, second), *_ = groups.items()
    return f"{ranks_text(first)}: {one}; {ranks_text(second)}: {other}"


def outliers(values: Sequence[str]) -> tuple[int, ...]:
    """The ranks whose value differs from the most common one; among equally common values that of the lowest
    rank counts."""
    groups = by_value(dict(enumerate(values)))
    usual = max(groups, key=lambda value: len(groups[value]))  # the lowest rank's group among equal ones
    return tuple(rank for rank, value in enumerate(values) if value != usual)


def by_value(values: Mapping[int, str]) -> dict[str, list[int]]:
    """Groups ranks by their value; the group of the lowest rank comes first."""
    groups: dict[str, list[int]] = {}
    for rank in sorted(values):
        groups.setdefault(values[rank], []).append(rank)
    return groups


def facts_of_batch(program: Program, tensors: Mapping[str, Tensor]) -> Facts:
    """Facts about the inputs that this rank was given whole, under ``= NAME`` if all ranks need the same
    value, and under ``| NAME`` if each takes its own samples from it."""
    facts = {}
    for i in program.batch_inputs:
        tensor = tensors.get(i.args[0])
        if tensor is not None and tuple(tensor.shape) == i.type.value.shape and tensor.device.type != "meta":
            mark = "|" if isinstance(i.type.placement, Shard) else "="
            facts[f"{mark} {i.args[0]}"] = _values(tensor)
    return facts


def facts_of_values(name: str, tensor: Tensor) -> Facts:
    """Facts about the values of a tensor that every rank must have whole."""
    return {f"= {name}": _values(tensor)}


def facts_of_loss(gradient: Tensor) -> Facts:
    """The fact about a gradient that the loop gives a loss: the factor of all gradients."""
    return {OF_LOSS: f"{gradient.item():.6g}"}


ROWS_HINT = 'if each rank loads its own rows: planner="ddp-proportional", under which ranks take part by rows'


def batch_disagreement(told: list[Facts]) -> InputError | None:
    """The error for an input that differs between two ranks and must not; None if there is none.

    Samples may differ between ranks (random augmentation), as each rank takes only its own. If two batches
    have nothing in common, they are batches of different samples.
    """
    for rank, other in enumerate(told[1:], 1):
        for first, mine in enumerate(told[:rank]):
            name = _conflict(mine, other)
            if name == OF_LOSS:
                if isclose(float(mine[name]), float(other[name]), rel_tol=OF_LOSS_ROUNDING):
                    continue
                return unequal_weights(f"{mine[name]} on rank {first} and {other[name]} on rank {rank}")
            if name is not None:
                is_dealt = name[0] == "|"
                return InputError(
                    f"the ranks were not given the same batch: {name[2:]} differs",
                    expected="one global batch, or each rank's own rows of it"
                    if is_dealt
                    else "one global batch: under this plan every rank needs all of its rows",
                    got=f"rank {first}: {mine[name]}; rank {rank}: {other[name]}",
                    hint=(
                        "seed the order of the data alike on all ranks, or deal it: mixmesh.shard_batches",
                        *(() if is_dealt else (ROWS_HINT,)),
                    ),
                )
    return None


def unequal_weights(got: str) -> InputError:
    """The error for ranks that multiply the loss by different numbers."""
    return InputError(
        "the loss is multiplied or divided by another number on each rank: it is that of the whole batch",
        expected="one number on all ranks, made of the whole batch",
        got=f"gradients of the loss: {got}",
        hint=(
            "model, optimizer, _ = mixmesh.prepare(...)  # and the script's own loader, of whole batches",
            "mixmesh.prepare(..., loss=function), with the number in the loss",
            "for a number of rows or tokens: torch.distributed.all_reduce(number)",
        ),
    )


def _conflict(mine: Facts, other: Facts) -> str | None:
    both = [name for name in mine if name in other]
    for name in both:
        if name[0] == "=" and mine[name] != other[name]:
            return name
    cut = [name for name in both if name[0] == "|"]
    return cut[0] if cut and all(mine[name] != other[name] for name in cut) else None


def _values(tensor: Tensor) -> str:
    flat = tensor.detach().flatten()
    flat = flat[: HASHED_BYTES // max(flat.element_size(), 1)].cpu().contiguous()
    head = ", ".join(f"{x:.4g}" if isinstance(x, float) else str(x) for x in flat[:3].tolist())
    return f"[{head}, ...] crc {zlib.crc32(flat.view(torch.uint8).numpy().data):08x}"


def _digest(*parts: str | bytes) -> str:
    hasher = hashlib.sha256()
    for part in parts:
        hasher.update(part if isinstance(part, bytes) else part.encode())
    return hasher.hexdigest()[:12]


def _code_of(model: nn.Module) -> Iterator[bytes]:
    """The byte code of the methods of all module classes, except PyTorch's own, whose version is compared."""
    classes = {c for m in model.modules() for c in type(m).__mro__}
    for c in sorted(classes, key=lambda c: (c.__module__, c.__qualname__)):
        if c.__module__.partition(".")[0] in ("torch", "builtins"):
            continue
        for name, member in sorted(vars(c).items()):
            function = getattr(member, "__func__", member)
            if isinstance(function, types.FunctionType):
                yield name.encode()
                yield from _byte_code(function.__code__)


def _byte_code(code: types.CodeType) -> Iterator[bytes]:
    yield code.co_code
    yield repr(code.co_names).encode()
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _byte_code(constant)
        elif isinstance(constant, frozenset):
            yield repr(sorted(map(repr, constant))).encode()
        else:
            yield repr(constant).encode()
