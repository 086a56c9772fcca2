"""The forward passes of a rank: of a whole batch, of micro-batches, and of a pipeline stage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from weakref import WeakSet

import torch
from torch import Tensor, nn

from ..frontend.trace.dtypes import TORCH_DTYPE
from ..lang.ir import Program
from .agreement import COMPARED_STEPS, facts_of_loss
from .allocator import HeapLimit
from .calls import Calls
from .collectives import Handle
from .comm import Comm
from .drift import DriftWatch
from .executor import RankProgram, compile_program
from .gradients import GradientReducer
from .guards import Guards
from .input_gradients import Given
from .inspection import Inspector
from .left_tensors import Left
from .loss import LossSum
from .micro_steps import Earlier, next_seed
from .model_check import PlannedModel
from .modes import FollowedModes
from .node import Inner, rooted_alone
from .outputs import Returns
from .outside import Outside
from .owned import Awaited, Owned, WholeParams
from .random import RandomPolicy
from .recording import Recorder
from .shapes import Form, Forms
from .shards import Stored
from .start import no_values
from .whole_model import Loan
from .window import Window


@dataclass(frozen=True)
class Forward:
    """The outcome of a forward pass: this rank's addend of the loss with its graph (``local``, None if it has
    none) and the tokens, the addend's ``value``, the gradients of ``earlier`` micro-batches, the outputs
    ``shown`` by name with a piece for every micro-batch, the form in which the call ``returns`` them, and a
    handle on the ``total`` of all ranks' addends. ``outside`` makes the return value of a model without a
    loss, and ``given`` are inputs with a gradient. If it ``is_alone``, the graph begins at the shown
    parameters."""

    local: Tensor | None
    tokens: list[Tensor]
    value: Tensor
    earlier: Earlier | None = None
    shown: dict[str, list[Tensor]] = field(default_factory=dict)
    returns: Returns | None = None
    total: Handle | None = None
    outside: Outside | None = None
    given: Sequence[Given] = ()
    is_alone: bool = False


OFTEN = 20  # uses of code for another shape before it is compiled, which may take a minute


@dataclass
class Runtime:
    """Everything of a ParallelModel that is not a module, kept in one attribute to stay out of the way of the
    model's own names."""

    program: Program
    comm: Comm
    calls: Calls
    forms: Forms
    random: RandomPolicy
    stored: Mapping[str, Stored]  # by every name of the tensor
    by_param: dict[Tensor, Stored]  # by the shown parameter
    compiled: dict[tuple, RankProgram]  # by form, training mode, and the samples of a micro-batch
    owned: dict[str, Owned]  # by every name of the parameter
    wholes: WholeParams
    seed: Tensor  # the gradient of the loss in the last backward pass
    heap: HeapLimit  # lets this process hold as much memory as planned
    params: dict[str, nn.Parameter | Awaited]  # the tensors on which the program runs, by every name
    reducer: GradientReducer
    loss_sum: LossSum
    node: Inner
    guards: Guards
    original: nn.Module  # the model that was taken over
    alone: Mapping[str, nn.Parameter] | None  # the shown parameters by every name, if this rank runs alone
    again: Callable[[nn.Module], nn.Module]  # makes another ParallelModel of a module with whole weights
    drift: DriftWatch
    unchecked: PlannedModel | None  # None after the first call
    recorder: Recorder | None = None
    inspector: Inspector | None = None
    summed: Program | None = None  # the program that ran last
    # returns the arguments to use
    before_call: Callable[[tuple, Mapping], tuple[tuple, Mapping]] | None = None
    followed: FollowedModes | None = None
    num_zeroed: int = 0  # number of times that zero_grad has dropped gradients
    loans: WeakSet[Loan] = field(default_factory=WeakSet)  # open loans
    compiles: bool = False  # whether operators between collectives are compiled
    uses: Counter[tuple] = field(default_factory=Counter)  # calls of code that may be compiled, by its key
    left: Left = Left()
    without_values: tuple[str, ...] = ()  # tensors of a model on the device meta that have no values yet

    @property
    def is_in_first_steps(self) -> bool:
        """Whether ranks still compare in the step under way, whose forward pass has counted it."""
        return self.random.step - self.random.first_step <= COMPARED_STEPS

    @property
    def lent(self) -> nn.Module | None:
        """The user's own module with whole weights, while it is lent."""
        return next((loan.module for loan in self.loans), None)

    def drop_gradients(self) -> None:
        """Called by ``zero_grad`` of the model and of its optimizer."""
        self.num_zeroed += 1
        self.reducer.drop()

    def values_changed(self) -> None:
        """Called after the values of all parameters and buffers were written in place."""
        self.without_values = ()
        self.wholes.changed()
        for loan in self.loans:
            loan.note()

    def check_values(self) -> None:
        """Raises InputError as long as tensors have no values."""
        if self.without_values:
            raise no_values(self.without_values, len({*map(id, self.stored.values())}))


def run_batch(
    run: Runtime, form: Form, buffers, inputs, *, takes_given: bool, training: bool
) -> tuple[Forward, dict[str, Tensor]]:
    """Runs a program without micro-batches. With ``takes_given`` some inputs get gradients."""
    is_seen = run.recorder is not None or run.inspector is not None
    alone = None if is_seen or takes_given or form.outside is not None else run.alone
    shown: dict[str, Tensor] = {}
    code = code_of(run, form, training=training)
    local, updated, tokens = code.run(alone or run.params, buffers, inputs, shown=shown)
    value = zero(run, form) if local is None else local.detach()
    outputs = {name: [x] for name, x in shown.items()}
    return Forward(local, tokens, value, shown=outputs, is_alone=bool(alone)), updated


def accumulate(
    run: Runtime, form: Form, buffers, inputs, *, training: bool
) -> tuple[Forward, dict[str, Tensor]]:
    """Runs all micro-batches, and the backward passes of all but the last (see ``micro_steps``)."""
    steps, params = form.steps, run.params
    assert steps is not None  # the caller has checked this
    if steps.once is not None:
        with torch.no_grad():
            _, results, _ = code_of(run, form, once=True, training=training).run(params, buffers, inputs)
        inputs = {**inputs, **results}
    learns = torch.is_grad_enabled()
    before = run.reducer.take() if learns else None
    if steps.is_pipeline:
        last = nullcontext if before is None else partial(run.reducer.early, before)
        value, updated = _pipeline(run, form, buffers, inputs, last, training=training)
        earlier = None
        if before is not None:
            earlier = Earlier(run.reducer, run.seed)
            run.reducer.put_back(before)
        return Forward(None, [], value, earlier), updated
    value, start = zero(run, form), 0
    pieces: dict[str, list[Tensor]] = {}
    for number, size in enumerate(steps.sizes):
        run.random.micro_step, run.random.first_sample = number, steps.first_sample + start
        part = steps.cut(inputs, start, size)
        shown: dict[str, Tensor] = {}
        local, updated, tokens = code_of(run, form, size, training=training).run(
            params, buffers, part, shown=shown
        )
        for name, piece in shown.items():
            pieces.setdefault(name, []).append(piece)
        own = zero(run, form) if local is None else local.detach()
        value = value + own
        start += size
        if learns and number + 1 < len(steps.sizes):
            with run.reducer.summing(steps.sums):
                rooted(run, own, Forward(local, tokens, own)).backward(run.seed)
            del local, tokens  # frees the rest of its graph before the next micro-batch
        del part
    run.random.micro_step = 0
    earlier = None
    if before is not None:
        earlier = Earlier(run.reducer, run.seed)
        run.reducer.put_back(before)
    return Forward(local, tokens, value, earlier, pieces), updated


def _pipeline(
    run: Runtime,
    form: Form,
    buffers,
    inputs,
    last: Callable[[], AbstractContextManager],
    *,
    training: bool,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Runs all passes of this rank's stage, the last backward pass within ``last``. Returns the value of its
    addend of the loss, and new values of buffers."""
    steps = form.steps
    assert steps is not None  # the caller has checked this
    size, count = steps.sizes[0], len(steps.sizes)
    value = zero(run, form)
    updated: dict[str, Tensor] = {}
    if steps.stage is None:
        return value, updated

    def forward(number: int, received: dict[str, Tensor]) -> tuple[Tensor | None, dict[str, Tensor]]:
        nonlocal value, updated
        run.random.micro_step = number
        run.random.first_sample = steps.samples.first_sample(run.comm.rank, number * size, count)
        part = {**steps.cut(inputs, number * size, size), **received}
        handed: dict[str, Tensor] = {}
        local, updated, _ = code_of(run, form, size, training=training).run(run.params, buffers, part, handed)
        if local is not None:
            value = value + local.detach()
        return local, handed

    leave = (lambda: None) if run.recorder is None else run.recorder.leave
    seed = run.seed if torch.is_grad_enabled() else None
    steps.stage.run(run.comm, forward, seed, last, leave)
    run.random.micro_step = 0
    return value, updated


def code_of(
    run: Runtime, form: Form, size: int | None = None, *, once: bool = False, training: bool
) -> RankProgram:
    """This rank's code for a micro-batch of ``size`` samples (by default as many as the first one has), or
    for the part of a program that runs ``once`` before its micro-batches. Made on first use; its operators
    are compiled at once in the planned program, and where another one comes often."""
    steps = form.steps
    if steps is not None and size is None and not once:
        size = steps.sizes[0]
    key = (form.key, training, size, once)
    compiles = run.compiles
    if compiles and form.is_traced:
        run.uses[key] += 1
        compiles = run.uses[key] > OFTEN
        if run.uses[key] == OFTEN + 1:
            run.compiled.pop(key, None)
    if key not in run.compiled:
        run.forms.drop_gone(run.compiled)
        run.compiled[key] = compile_program(
            _part_of(form, once),
            run.comm.rank,
            run.comm,
            run.comm.device,
            run.random,
            training=training,
            sink=run.reducer.sink,
            receiver=run.reducer,
            recorder=run.recorder,
            window=None if size is None or steps is None else Window(steps.samples, size, run.random),
            inspector=run.inspector,
            compiles=compiles,
        )
    return run.compiled[key]


def _part_of(form: Form, once: bool) -> Program:
    if form.steps is None:
        return form.program
    if not once:
        return form.steps.program
    assert form.steps.once is not None  # the caller has checked this
    return form.steps.once


def zero(run: Runtime, form: Form) -> Tensor:
    """The addend of a rank that computes none."""
    dtype = TORCH_DTYPE[form.program.types[form.program.loss].value.dtype]
    return torch.zeros((), dtype=dtype, device=run.comm.device)


def rooted(run: Runtime, value: Tensor, done: Forward) -> Tensor:
    """A loss with this ``value`` whose backward pass is that of this rank's addend."""
    if done.is_alone and done.local is not None:
        return rooted_alone(done.local) if done.local.requires_grad else value
    if not torch.is_grad_enabled():
        return value
    anchor = torch.empty(0, device=run.comm.device, requires_grad=True)
    return _Loss.apply(run, done.earlier, value, anchor, done.local, *done.tokens)


def rooted_pieces(run: Runtime, pieces: Sequence[Tensor], done: Forward) -> Sequence[Tensor]:
    """This rank's ``pieces`` of outputs as the roots of its backward pass."""
    if not torch.is_grad_enabled():
        return pieces
    anchor = torch.empty(0, device=run.comm.device, requires_grad=True)
    return _Pieces.apply(run, len(pieces), anchor, done.local, *pieces, *done.tokens)


class _Pieces(torch.autograd.Function):
    """Forward: the pieces of outputs. Backward: their gradients, and none for the number that stands for a
    loss; the number's backward pass makes every rank take part in all exchanges."""

    @staticmethod
    def forward(ctx, runtime, count, anchor, local, *pieces_and_tokens):
        ctx.runtime, ctx.num_tokens = runtime, len(pieces_and_tokens) - count
        ctx.like = None if local is None else local.detach()
        return tuple(x.view_as(x) for x in pieces_and_tokens[:count])

    @staticmethod
    def backward(ctx, *gradients):
        ctx.runtime.reducer.begin()
        ctx.runtime.comm.begin_backward()
        nothing = None if ctx.like is None else torch.zeros_like(ctx.like)
        return None, None, None, nothing, *gradients, *(None,) * ctx.num_tokens


class _Loss(torch.autograd.Function):
    """Forward: the given value. Backward: the gradient for this rank's addend, which for a sum is the
    same."""

    @staticmethod
    def forward(ctx, runtime, earlier, value, anchor, local, *tokens):
        ctx.runtime, ctx.earlier = runtime, earlier
        ctx.is_compared = runtime.is_in_first_steps
        ctx.has_local, ctx.num_tokens = local is not None, len(tokens)
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        runtime = ctx.runtime
        runtime.reducer.begin()
        runtime.comm.begin_backward()
        if ctx.is_compared:
            runtime.comm.compare(lambda: facts_of_loss(gradient))
        if ctx.earlier is not None:
            ctx.earlier.deliver(gradient)
            runtime.seed = next_seed(gradient, runtime.seed)
        return None, None, None, None, gradient if ctx.has_local else None, *(None,) * ctx.num_tokens
