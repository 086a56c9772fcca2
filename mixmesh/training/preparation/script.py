"""``mixmesh.prepare``: one line in a script that was written for a single device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...base.launched import is_launched, rank_and_world_size
from ...base.progress import tell
from ...cluster.detection import Cache
from ...cluster.detection.cache import default_folder
from ...errors import TraceError
from ...frontend.job import Job, can_step_pieces, check_supported
from ...frontend.trace import LossSource
from ...frontend.trace.autocast import autocast_for
from ...frontend.trace.compiled import is_compiled, uncompiled
from ...frontend.trace.failures import CALL_ONCE
from ...frontend.trace.own_generators import generators_in
from ...frontend.trace.unfit import UNFIT
from ...frontend.trace.words import is_words
from ...measure.testbed import enter_device
from ...runtime.accelerator import device_count
from ...runtime.calls import Signature
from ...runtime.modes import FollowedModes, set_modes
from ...runtime.optimizer_check import check_can_be_prepared, check_holds_only
from ...runtime.parallel import ParallelModel, check_not_parallel, parallelize
from ..rebalance import LoopBalancer, Solver
from .loading import (
    as_arguments,
    from_first_batch,
    own_loader,
    same_random_numbers,
    take_random_numbers,
)
from .modes import as_its_train_has_it
from .outside_loss import check_has_targets, needed_names, with_loss
from .own_loader import OwnLoader
from .refusals import OneBatch, check_gives_all, check_last_batch, check_takes, check_unwrapped, check_workers
from .start import Options, Prepared, prepare_job

WITHOUT_LOSS = (
    "the model returns no loss: give every rank whole batches, as this loader does; outputs are gathered for "
    "the loss that the loop computes. loss=... moves less"
)
UNUSED = (
    "{num_devices} devices are here, and this process trains on one: torchrun --nproc-per-node gpu train.py"
)


def prepare(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    loader: Iterable,
    *,
    loss: Callable[..., Any] | None = None,
    inputs: Callable[..., Any] | None = None,
    planner: str = "auto",
    profile_s: float = 15.0,
    cache: str | Path | None = None,
    cluster: str | Path | None = None,
    timeout_s: float = 300.0,
    heartbeat_s: float = 20.0,
    seed: int = 0,
    batch_norm: str = "exact",
    outputs: tuple[str | int, ...] = (),
    autocast: Any = None,
    compile: bool = False,
    rebalance: bool = True,
    accumulate: str = "",
) -> tuple[nn.Module, torch.optim.Optimizer | None, Iterable]:
    """This process's part of a script's ``model``, ``optimizer`` and ``loader``; the loop stays as it is.

    Call it in every process of ``torchrun``, after the same code has made the same model. ``loader`` gives
    global batches; the returned loader gives this rank's rows of the same batches. ``model(*batch)``, or
    ``model(**batch)`` for a dict, returns the loss of the whole batch; with ``loss`` that is ``loss(outputs,
    targets)`` (``outside_loss.with_loss``). The devices are detected, the job is profiled for about
    ``profile_s`` seconds and planned; the results are kept in the folder ``cache`` for the next start. A file
    ``cluster`` describes the devices and links, which are then not detected. ``batch_norm="local"`` takes
    each rank's own statistics (``mm.plan``). ``outputs`` names parts of the model's own output to return
    besides the loss, ``("logits",)`` for instance: this rank's rows of them, or with ``out.gather()`` all
    rows. ``autocast`` is the ``torch.autocast`` under which the loop calls the model, or its dtype; by
    default it is the context in which ``prepare`` is called. A rank that is silent for ``heartbeat_s``
    seconds counts as lost, and ends the others; 0 turns that off. Without torchrun the model, with its loss,
    and the other two are returned unchanged.

    A model that returns no loss, without ``loss``, gives all its outputs whole on every rank, with a
    gradient: any loss that the loop computes from them is right, even from several calls or models. The
    script then keeps its own loader, with whole batches on every rank; the model gets the part of a batch
    that its forward takes.

    On CPUs the speeds of devices are watched: if one is slower or faster than planned for long enough, then
    between two batches ranks get other numbers of rows, and parameters that are cut move accordingly,
    provided that the loop continues exactly (``rebalance.own_loop``). ``rebalance=False`` keeps shares as
    planned, and so do ``inputs`` and a model without a loss.

    ``inputs`` is for loops that change a batch before they call the model, by adding noise or mixing samples
    for instance: it is the function that does so, called as ``inputs(*batch)`` or ``inputs(**batch)``, and
    the model is called with its result. The script then keeps its own loader, with whole batches on every
    rank, and all ranks draw the same random numbers, from one seed; the first three steps are compared, and
    refused if they differ.

    With ``compile`` the operators between collectives are compiled by ``torch.compile``, which takes a minute
    or more when a shape first occurs; predictions remain those for uncompiled operators.

    A loop that makes several backward passes before an optimizer step holds the gradients of earlier ones
    meanwhile. With ``accumulate`` the plan counts them: "no_sync" if passes but the last are within
    ``model.no_sync()``, "every pass" if not.

    The same plan serves batches of other sizes and lengths than the first, including the smaller last one of
    an epoch. Raises TraceError for a model that cannot be exported, Infeasible if nothing fits in memory.
    """
    if not is_launched():
        return without_torchrun(model, loss, outputs, compiles=compile), optimizer, loader
    rank, world_size = rank_and_world_size()
    model = uncompiled(model)
    check_unwrapped(model)
    check_not_parallel(model, "prepare")
    check_supported(optimizer)
    check_can_be_prepared(optimizer)
    check_gives_all(loader)
    check_workers(loader)
    check = loader.check if isinstance(loader, OneBatch) else partial(check_last_batch, loader)
    batch, loader = from_first_batch(loader)
    own_generators = generators_in(loader, inputs, loss, model)
    with same_random_numbers(own_generators):
        arguments = as_arguments(batch)
        example = taken_by(model, loss, arguments) if inputs is None else made_inputs(inputs, arguments)
    if loss is not None:
        check_has_targets(model, loss, example)
    model = model if loss is None else with_loss(model, loss, outputs)
    check_holds_only(optimizer, set(model.parameters()))
    with same_random_numbers(own_generators), as_its_train_has_it(model) as modes:
        job = Job(model, example, optimizer=maker_like(optimizer), outputs=outputs)
        options = Options(
            profile_s=profile_s,
            planner=planner,
            timeout_s=timeout_s,
            heartbeat_s=heartbeat_s,
            batch_norm=batch_norm,
            autocast=autocast_for(model, autocast),
            whole_parameters=optimizer is not None and not can_step_pieces(optimizer),
            compiles=compile,
            accumulate=accumulate,
            loss=LossSource.MAYBE_CALLER if loss is None and not outputs else LossSource.RETURNED,
        )
        num_needed = None if loss is not None else len(needed_names(model))
        with naming_inputs(batch if inputs is None else None, num_needed):
            prepared = prepare_job(
                job,
                world_size,
                options=options,
                cache=Cache(Path(cache) if cache is not None else default_folder()),
                cluster_file=None if cluster is None else Path(cluster),
                check=check,
            )
        if rank == 0 and not prepared.plan.returned.has_loss:
            tell(f"mixmesh: {WITHOUT_LOSS}")
        parallel, optimizer = parallelize(
            model,
            optimizer,
            prepared.plan,
            timeout_s=timeout_s,
            heartbeat_s=heartbeat_s,
            seed=seed,
            compile=compile,
            check_model=False,  # it has just been traced
        )
    set_modes(parallel.modules(), modes)
    parallel._runtime.followed = FollowedModes(model, parallel)
    take_random_numbers(own_generators)
    # in the testbed: all groups exist by now, with their threads outside of the device's quota
    enter_device()
    if inputs is not None or not prepared.plan.returned.has_loss:
        return parallel, optimizer, loader
    own = own_loader(loader, prepared.plan)
    own.watch_rows(parallel._runtime)
    if rebalance and optimizer is not None and world_size > 1:
        follow_devices(parallel, optimizer, own, prepared)
    return parallel, optimizer, own


def without_torchrun(
    model: nn.Module, loss: Callable[..., Any] | None, outputs: tuple[str | int, ...], *, compiles: bool
) -> nn.Module:
    """The model, with its loss, for a process that torchrun has not started. Tells if it leaves devices
    unused."""
    if (num_devices := device_count()) > 1:
        tell(f"mixmesh: {UNUSED.format(num_devices=num_devices)}")
    if loss is not None:
        check_unwrapped(model)
        model = on_one_device(model, loss, outputs)
    if compiles and model is uncompiled(model):
        model.compile()
    return model


@contextmanager
def naming_inputs(batch: Any, num_needed: int | None = None) -> Iterator[None]:
    """A context that adds a hint to the error for a model that cannot be called with a ``batch``; None adds
    nothing. ``num_needed`` is how many values the forward pass requires: a target may have been passed to an
    optional argument, such as a mask."""
    try:
        yield
    except TraceError as error:
        fills_optional = isinstance(batch, tuple) and num_needed is not None and len(batch) > num_needed
        is_unfit = error.message == UNFIT or fills_optional
        if batch is not None and (is_unfit or CALL_ONCE in error.hint):
            # the most fitting one comes first: the call has too many or too few arguments, or something else
            is_of_arguments = is_unfit or (error.got.startswith("TypeError") and "argument" in error.got)
            added = another_call(batch)
            error.hint = (*added, *error.hint) if is_of_arguments else (*error.hint, *added)
        raise


def follow_devices(
    model: ParallelModel,
    optimizer: torch.optim.Optimizer,
    loader: OwnLoader,
    prepared: Prepared,
) -> None:
    """Makes the shares of a loop follow its devices; does nothing on GPUs, where a rank's own seconds are
    unknown."""
    if model.comm.device.type != "cpu":
        return
    is_first = model.comm.rank == 0

    def say(text: str) -> None:
        if is_first:
            tell(f"mixmesh: {text}")

    solver = Solver(prepared.cluster, prepared.profile, prepared.plan.optimizer_states) if is_first else None
    LoopBalancer(model, optimizer, loader, solver, say)


def another_call(batch: Any) -> tuple[str, ...]:
    """A hint for loops that pass a model only a part of a batch, or in another order."""
    names = tuple(batch) if isinstance(batch, Mapping) else tuple("abcdefgh"[: len(as_arguments(batch))])
    if not all(isinstance(name, str) and name.isidentifier() for name in names):
        return ()
    arguments_text = ", ".join(names)
    return (
        f"if the loop calls the model with other values than the loader gives ({arguments_text}): "
        f"mixmesh.prepare(..., inputs=lambda {arguments_text}: ({names[0]}, ...)), "
        f'in Accelerate planning={{"batch": ({names[0]}, ...)}}, with what the model is called with',
    )


def made_inputs(inputs: Callable[..., Any], batch: Any) -> Any:
    """The arguments with which a model is called for a batch of the loader: a tuple, or a dict by name.
    Raises InputError if the function does not take the batch's values."""
    is_named = isinstance(batch, Mapping)
    named = dict(batch) if is_named else {}
    values = () if is_named else batch if isinstance(batch, tuple) else (batch,)
    check_takes(inputs, values, named)
    arguments = inputs(*values, **named)
    return arguments if isinstance(arguments, Mapping | tuple) else (arguments,)


def taken_by(model: nn.Module, loss: Callable[..., Any] | None, batch: Any) -> Any:
    """The part of a batch for the model's forward pass and the ``loss``. Without a ``loss``, the loop
    computes one and uses the rest; with one, trailing lists of strings that neither needs are left to the
    loop."""
    if loss is not None:
        least = len(needed_names(model)) + len(needed_names(loss)[1:])
        while isinstance(batch, tuple) and len(batch) > least and is_words(batch[-1]):
            batch = batch[:-1]
        return batch
    signature = Signature.of(model)
    if isinstance(batch, Mapping):
        if signature.more_names:
            return batch
        return {k: v for k, v in batch.items() if k in signature.names} or (batch,)  # model(batch)
    if not isinstance(batch, tuple) or signature.more_positions:
        return batch
    return batch[: len(signature.positions)]


def on_one_device(model: nn.Module, loss: Callable[..., Any], outputs: tuple[str | int, ...]) -> nn.Module:
    """``model`` with its loss; compiled if ``model`` was."""
    alone = with_loss(uncompiled(model), loss, outputs)
    if is_compiled(model):
        alone.compile()
    return alone


def maker_like(
    optimizer: torch.optim.Optimizer | None,
) -> Callable[[Iterable], torch.optim.Optimizer] | None:
    """A function that makes an optimizer of the same class and settings for other parameters. It does not
    pass on defaults that the class sets itself, as AdamW does. None if there is no optimizer, and for a class
    with arguments that it does not keep as settings (SAM's base optimizer): the plan then assumes Adam."""
    if optimizer is None:
        return None
    kind, settings = type(optimizer), optimizer.defaults
    taken = signature(kind)
    arguments = taken.parameters.values()
    if not any(a.kind is a.VAR_KEYWORD for a in arguments):
        names = {a.name for a in arguments}
        settings = {name: value for name, value in settings.items() if name in names}
    try:
        taken.bind([], **settings)  # not a trial: some classes refuse the shape of a sample (Muon)
    except TypeError:
        return None
    return lambda params: kind(params, **settings)
