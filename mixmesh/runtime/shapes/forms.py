"""The programs of a parallel model, one per shape of its batch, made when the shape first occurs.

The first rank traces the model for the new shape, on fake tensors, and sends the others the program, or the
reason why there is none. A limited number of programs is kept; the least recently used goes first.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ...base.progress import warn_once
from ...base.units import plural
from ...errors import InputError, MixmeshError
from ...frontend.trace import LossSource
from ...frontend.trace.capture import shapes_of
from ...frontend.trace.kept_by_torch import nothing_kept
from ...frontend.trace.outputs import first_part
from ...frontend.trace.reads import Constant, Number, Reads, reads_of
from ...frontend.trace.shapes import passes_for
from ...lang.ir import Graph, Program, Shard, batch_norm_of, has_gradient, outputs_of
from ...lang.ir.graph import begins_gradient
from ...lang.ir.recompute import buffers_kept_for_backward
from ...lang.plan_file import Plan, accumulates
from ..accelerator import HOST_BACKEND, PRETENDED_BACKEND, backend_of, is_accelerator, is_on_device
from ..calls import Calls, missing
from ..comm import Comm
from ..first_rank import from_first_rank
from ..input_gradients import (
    Wanted,
    no_gradient_in_micro_steps,
    question_about_gradients,
    with_input_gradients,
)
from ..layout import meetings
from ..micro_steps import MicroSteps
from ..model_check import batch_of_shapes
from ..modes import Modes, modes_kept, modes_of, set_modes
from ..original import traceable
from ..outputs import Returns
from ..outside import Outside, with_output_gradients
from ..whole_model import own_module
from .agree import Agreement, Shapes
from .carry import CannotCarry, carry
from .children import Children
from .lower import lower
from .parts import resized
from .room import check_room
from .traces import Traces
from .unread import Unread

T = TypeVar("T")
PLANNED = "planned"
# causes for making another program, and how to avoid each
SHAPE, MODES, NUMBERS = "a batch of this shape", "the model in these modes", "the model with these numbers"
HINTS = {
    SHAPE: "pad every batch to the planned lengths, and drop_last=True",
    MODES: "train() and eval() of the model's modules before planning, as they are here",
    NUMBERS: "numbers that change as buffers: self.alpha.fill_(value)",
}
# (modes, with gradients, shapes, values or sizes beyond the inputs', rows as dealt); or (key of another form,
# inputs with a gradient)
TracedKey = tuple[Modes, bool, Shapes, int, bool]
Key = TracedKey | str | tuple["Key", Wanted]


@dataclass(frozen=True)
class Form:
    """A program for one shape of the batch and one mode of each module. ``steps`` are its micro-batches; None
    without any. ``kept_buffers`` are updated while the backward pass may still read their old values.
    ``returns`` makes the return value of a call, None if it is the loss itself; for a model without a loss
    ``outside`` makes it."""

    key: Key
    program: Program
    steps: MicroSteps | None
    kept_buffers: frozenset[str]
    returns: Returns | None
    outside: Outside | None = None

    @property
    def is_traced(self) -> bool:
        """Whether it was traced for its own modes; the planned program may also serve to evaluate."""
        return self.key != PLANNED and self.key[0] != PLANNED

    @classmethod
    def of(cls, key: Key, plan: Plan, comm: Comm) -> Form:
        steps, kept = MicroSteps.of(plan, comm.rank), buffers_kept_for_backward(plan.program)
        outside = Outside.of(plan, comm)
        returns = Returns.of(plan, comm) if outside is None else None
        return cls(key, plan.program, steps, kept, returns, outside)


def learners_of(graph: Graph) -> set[str]:
    """The parameters that the loss, or an output with a gradient, depends on."""
    return {str(n.args[0]) for n in graph.params if n.result in graph.requires_grad}


@dataclass
class Forms:
    """Makes and keeps programs. ``original`` is the planned model, whose ``modules`` were in ``modes``.
    ``limit`` is the number of programs kept besides the planned one."""

    original: nn.Module
    plan: Plan
    calls: Calls
    comm: Comm
    planned: Form
    limit: int
    agreement: Agreement
    modules: tuple[nn.Module, ...]
    modes: Modes
    reads: Reads
    children: Children
    traces: Traces
    kept: OrderedDict[Key, Form] = field(default_factory=OrderedDict)
    unread: Unread = field(default_factory=Unread)
    answered: set[Key] = field(default_factory=set)  # forms whose gradients of inputs nothing asks about

    @classmethod
    def of(cls, original: nn.Module, plan: Plan | Program, calls: Calls, comm: Comm, limit: int) -> Forms:
        if isinstance(plan, Program):
            plan = Plan(plan, "", 0.0, (), "")
        planned = Form.of(PLANNED, plan, comm)
        # messages go between hosts, so that no device waits
        backend = HOST_BACKEND if is_on_device() else None
        agreement = Agreement(plan.program, comm, is_outside=not plan.returned.has_loss)
        comm.add(agreement.groups(), backend)
        modules = tuple(original.modules())
        return cls(
            original,
            plan,
            calls,
            comm,
            planned,
            limit,
            agreement,
            modules,
            modes_of(modules),
            reads_of(original),
            Children.of(original),
            Traces(
                {str(i.args[0]): i.type.value.shape for i in plan.program.batch_inputs}, comm.timeout_s / 4
            ),
        )

    def form(
        self,
        tensors: Mapping[str, Tensor],
        args: tuple,
        kwargs: Mapping[str, Any],
        *,
        modes: Modes,
        wanted: Wanted = (),
    ) -> Form:
        """The program for a call of the model with its modules in these ``modes`` and with ``wanted``
        gradients of inputs. Collective; raises on all ranks alike: InputError, Infeasible, TraceError,
        PlanError."""
        if backend_of() == PRETENDED_BACKEND:
            return self.planned  # in a rehearsal the other ranks do not exist
        self.children.check()
        # a rank's own: the call is traced with what the first one that computes has
        values = self._values() ^ self.unread.mark(self.calls, args, kwargs, tensors)
        shapes, are_own_rows, values = self.agreement.shapes(
            tensors, evaluates=not modes[0], wanted=wanted, modes=modes, values=values
        )
        if not values and self._is_planned(shapes, modes):
            form = self.planned
        else:
            key = modes, torch.is_grad_enabled(), shapes, values, are_own_rows and self._has_units()
            form = self._kept(key, lambda: self._made(key, args, kwargs))
        return self._kept((form.key, wanted), lambda: self._with_gradients(form, wanted)) if wanted else form

    def _has_units(self) -> bool:
        """Whether rows are dealt out in units, which may be others in a batch of another size."""
        placements = [i.type.placement for i in self.plan.program.batch_inputs]
        return any(isinstance(p, Shard) and p.unit > 1 for p in placements)

    def _values(self) -> int:
        """0 if the numbers and tensors that the program holds are as planned, else a number derived from
        them. Only the first rank, which traces, knows what the trace read. Raises InputError if it has
        changed values but no part in the program: the others do not wait for it, so it cannot inform them."""
        if self.comm.rank:
            return 0
        changed = self.reads.changed(Number, Constant)
        if changed and 0 not in self.plan.program.working_ranks:
            path, mark = changed[0]
            raise InputError(
                f"{path} has changed since the model was traced, and the plan has no work for the first rank",
                expected="the value that it had: the other ranks do not wait for the first one, which traces",
                got=mark,
                hint=(
                    "an input of the model that the batches bring along, or a buffer",
                    'plan with planner="ddp-proportional", in which every rank computes',
                ),
            )
        return 1 + zlib.crc32(repr(changed).encode()) if changed else 0

    def _kept(self, key: Key, make: Callable[[], Form]) -> Form:
        """The form for ``key``, made now or kept from before."""
        if key not in self.kept:
            self.kept[key] = make()
            if len(self.kept) > self.limit:
                self.kept.popitem(last=False)
        self.kept.move_to_end(key)
        return self.kept[key]

    def _with_gradients(self, form: Form, wanted: Wanted) -> Form:
        program = with_input_gradients(form.program, wanted)
        if not any(map(has_gradient, program.batch_inputs)):
            return replace(form, key=(form.key, wanted))
        if form.steps is not None:
            raise no_gradient_in_micro_steps(wanted)
        outside = form.outside
        if outside is not None:
            program = with_output_gradients(program)
            outside = Outside.of(replace(self.plan, program=program, returned=outside.returned), self.comm)
        returns = form.returns and form.returns.with_gradients_of(program)
        self.comm.add(meetings(program))
        return replace(form, key=(form.key, wanted), program=program, returns=returns, outside=outside)

    def check_questions(self, form: Form, wanted: Wanted) -> None:
        """Raises InputError on all ranks if gradients are ``wanted`` of inputs of which the model asks
        whether they have one. Collective the first time for a form, which the first rank has traced by
        then."""
        if wanted and form.key not in self.answered:
            asked = self._from_first_rank(lambda: self.reads.asks_gradient)
            about = tuple(name for name in wanted if name in asked)
            if about:
                raise question_about_gradients(about, asked[about[0]])
            self.answered.add(form.key)

    def _from_first_rank(self, make: Callable[[], T]) -> T:
        """Runs ``make`` on the first rank and returns its value on every rank. Collective."""
        group = self.comm.groups.get(("data", self.comm.everyone))  # a single rank has no group
        return make() if group is None else from_first_rank(make, group)

    def drop_gone(self, compiled: dict[tuple, Any]) -> None:
        """Drops compiled code, by a key that begins with its form's, for programs that are no longer kept."""
        for key in [key for key in compiled if key[0] != PLANNED and key[0] not in self.kept]:
            del compiled[key]

    def _is_planned(self, shapes: Shapes, modes: Modes) -> bool:
        program = self.plan.program
        if shapes != tuple(i.type.value.shape for i in program.batch_inputs):
            return False
        if modes == self.modes:
            return True
        # a bare program does not show whether its model behaves differently when all of it evaluates
        is_bare = not self.plan.graph_fingerprint and not any(i.op == "update" for i in program.instructions)
        return is_bare and not any(modes)

    def _made(self, key: TracedKey, args: tuple, kwargs: Mapping[str, Any]) -> Form:
        make = partial(self._plan_for, key, args, kwargs)
        program, micro_batches, returned = self._from_first_rank(make)
        self.comm.add(meetings(program))
        plan = replace(self.plan, program=program, micro_batches=micro_batches)
        if not self.plan.returned.has_loss:
            return Form.of(key, replace(plan, returned=returned), self.comm)
        form = Form.of(key, plan, self.comm)
        if returned.has_loss:
            return form
        assert form.returns is not None  # evaluation without a loss has outputs
        return replace(form, returns=form.returns.without_loss())

    def _plan_for(self, key: TracedKey, args: tuple, kwargs: Mapping[str, Any]) -> tuple:
        modes, learns, shapes, _, as_dealt = key
        self._check_constants()
        numbers = self.reads.changed(Number)
        if numbers:
            warn_once(_of_numbers(numbers))
        planned = self.plan.program
        by_name = {i.args[0]: shape for i, shape in zip(planned.batch_inputs, shapes)}
        outputs = dict.fromkeys(first_part(name) for name in outputs_of(planned))
        absent = [name for name, shape in by_name.items() if shape is None]
        if absent and not outputs:
            raise missing(absent[0], "evaluation without it, and no outputs")
        present = {name: shape for name, shape in by_name.items() if shape is not None}
        batch = batch_of_shapes(self.calls, planned, present, args, kwargs, evaluates=not modes[0])
        every = shapes_of(batch)  # also of tensors that the program does not take
        with traceable(self.original), self._in(modes), nothing_kept():
            traced = self.traces.traced(
                (modes, learns, self._values(), *absent),
                every,
                self.original,
                batch,
                passes=passes_for(planned),
                batch_norm=batch_norm_of(planned),
                outputs=outputs,
                autocast=self.plan.autocast,
                loss=self._loss_source(bool(absent)),
                learns=learns,
            )
        if learns and modes[0] and not planned.copies:
            self._check_learners(traced.graph)
        plan, is_planned = self._placed(
            traced.graph, modes, learns=learns, has_others=bool(numbers), as_dealt=as_dealt
        )
        # the sums are of other gradients
        if learns and not is_planned and (planned.copies or planned.factored):
            raise InputError(
                "this evaluation has no gradients under this plan",
                expected="with torch.no_grad(): model(...)",
                got="a model in evaluation mode, and gradients enabled",
                hint="with torch.no_grad():",
            )
        larger = any(
            now > before
            for i, shape in zip(planned.batch_inputs, shapes)
            for now, before in zip(shape or (), i.type.value.shape)
        )
        if larger or (learns and not is_planned):
            check_room(self.plan, plan, learns=learns, cuda=is_accelerator(self.comm.device))
        return plan.program, plan.micro_batches, traced.returned

    def _check_learners(self, graph: Graph) -> None:
        """Raises InputError for a parameter that gets a gradient now but was planned without one: nothing
        sums or stores it. Warns of parameters that get no gradient now: they get zeros, while on one device
        they have None, as on a rank that is alone."""
        before, now = learners_of(self.plan.program.graph), learners_of(graph)
        if gained := sorted(now - before):
            raise InputError(
                f"{gained[0]} gets a gradient in this call, and got none in the one that was planned",
                expected="the parameters that learn to be those of the plan",
                got=", ".join(gained[:3]) + (", ..." if len(gained) > 3 else ""),
                hint=(
                    "let every call use all parameters: loss + 0 * sum(p.sum() for p in unused)",
                    "plan with a batch, numbers and modes for which all of them learn",
                ),
            )
        trainable = {str(n.args[0]) for n in graph.params if begins_gradient(n)}
        if self.comm.world_size > 1 and (lost := sorted((before - now) & trainable)):
            warn_once(
                f"{lost[0]} gets zeros in this call, as the planned one has a gradient of it: momentum and "
                "weight decay move it, where one device leaves it out"
            )

    def _loss_source(self, is_partial: bool) -> LossSource:
        if not self.plan.returned.has_loss:
            return LossSource.CALLER
        return LossSource.OPTIONAL if is_partial else LossSource.RETURNED

    @contextmanager
    def _in(self, modes: Modes) -> Iterator[None]:
        """A context in which the original's modules are in these modes; afterwards they are as the user left
        them."""
        every = (own_module(self.original), *self.modules)
        with modes_kept(every):
            set_modes(every, (modes[0], *modes))
            yield

    def _placed(
        self, graph: Graph, modes: Modes, *, learns: bool, has_others: bool, as_dealt: bool
    ) -> tuple[Plan, bool]:
        """A plan for a graph, and whether it has the planned placements. With ``as_dealt`` ranks have rows of
        their own, which are dealt out in the planned units."""
        planned = self.plan.program
        try:
            return resized(self.plan, carry(planned, graph, as_dealt=as_dealt)), True
        except CannotCarry as error:
            cause = NUMBERS if has_others else SHAPE if modes == self.modes else MODES
            updates = any(n.op == "update" for n in graph.nodes)
            if modes[0] and (learns or updates):
                self._check_may_lower(error, cause)
            if modes[0] and learns:
                warn_once(_warning(error, cause, graph, planned.world_size))
        return replace(self.plan, program=lower(graph, planned), micro_batches=None), False

    def _check_constants(self) -> None:
        """Raises InputError for a tensor that the program holds as a constant and that has changed since
        planning."""
        changed = self.reads.changed(Constant)
        if changed:
            path, mark = changed[0]
            name = path.rpartition(".")[2] if path.isidentifier() else "weight"
            raise InputError(
                f"{path} is a constant of the plan, and was changed since",
                expected="the values that it had when the model was traced",
                got=mark.partition(",")[0],
                hint=(
                    f'a buffer of the model: self.register_buffer("{name}", tensor), changed in place',
                    "an argument of the loss, which a batch brings along",
                ),
            )

    def _check_may_lower(self, error: CannotCarry, cause: str) -> None:
        """Raises an error if gradients would be summed, or memory would be used, in another way than
        planned."""
        planned, is_trained = self.plan.program, self.modes[0]
        if is_trained and not (planned.copies or planned.factored or accumulates(self.plan.micro_batches)):
            return
        why = "" if is_trained else "; it was planned in evaluation mode: model.train() before planning"
        raise CannotCarry(
            f"the plan does not serve {cause}: {error.message}{why}",
            expected=error.expected,
            got=error.got,
            where=error.where,
            hint=(HINTS[cause], 'plan with planner="ddp-proportional"'),
        ) from None


def _of_numbers(changed: Sequence[tuple[str, str]]) -> str:
    names = ", ".join(path for path, _ in changed[:3])
    return (
        f"mixmesh: the model is traced again for each value of {names}, which takes a while; a buffer "
        "that is changed by fill_() is an input of the program"
    )


def _warning(error: MixmeshError, cause: str, graph: Graph, world_size: int) -> str:
    shapes = [n.types[0].shape for n in graph.nodes if n.op == "input"]
    rows = min((shape[0] for shape in shapes if shape), default=world_size)
    if cause == SHAPE and rows < world_size:  # as the last one of an epoch
        return (
            f"mixmesh: a batch of {plural(rows, 'row')}, fewer than the {world_size} ranks, is trained by "
            "plain data parallelism, with the same results"
        )
    return (
        f"mixmesh: {cause} is trained by plain data parallelism, not as planned: "
        f"{error.message} ({error.got}); {HINTS[cause]} to have the plan's speed"
    )
