"""Exports a model's call with a batch, as a program that gives the loss and some outputs."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.utils import _pytree as pytree

from ...errors import TraceError
from ...lang.ir import Returned
from .asked_gradients import questions_noted
from .attributes import Attributes, check_replaced, warnings_of
from .autocast import Autocast, no_autocast, under
from .averages import means_over_batches
from .branches import Paths, Site, distributions_unchecked, past_checks, warnings_of_skipped
from .carried import warnings_of_changed
from .causal_masks import masks_as_given
from .checkpoints import regions_kept
from .composites import with_known_operators
from .copies import take_attributes
from .decompositions import decomposed
from .detached_data import data_as_detached
from .failures import explain
from .fakes import fixed_shapes
from .functions import batch_of, exact_functions
from .generators import Draws
from .hooks import hooks_traced
from .inner_gradients import inner_gradients
from .leaves import check_leaf, describe_argument, instead_of
from .locate import place_of_function, whole_stacks
from .loops import experts_in_groups
from .moves import moves_in_place
from .outputs import named_tensors, names_of_all, selected
from .reads import reading, reads_of
from .regions import inference_as_no_grad, inline_regions, no_grad_within_autocast
from .replaced_functions import ReplacedFunctions, weights_of_losses_kept
from .returned_loss import check_loss, is_loss, loss_of
from .scattered_writes import write_decompositions
from .selected import as_tensors
from .selected_functions import lengths_of_rows
from .selections import targets_by_sample
from .skipped import Skips, all_skipped, none_skipped, parts, proves_skips, without_conditions
from .small_constants import small_constants_kept
from .stand_ins import meta_on_device
from .stopped_writes import check_stopped_writes
from .symbolic import FreeDims, NotSymbolic, dynamic_shapes, put_numbers_in_place
from .synced_norms import synced_norms_as_plain
from .unfit import of_an_unfit_batch
from .words import Unread, is_words

# the branches on masks, in order, that change nothing where skipped; for each model, in training or not
PROVED: WeakKeyDictionary[nn.Module, set[tuple[bool, tuple[Site, ...]]]] = WeakKeyDictionary()
WRAPPED = "model."  # prefix of the model's names in the exported program


class LossSource(Enum):
    """Says where the loss of a traced call comes from."""

    RETURNED = "the model returns it"
    OPTIONAL = "the model returns it, or None, in a call that is not trained on"
    MAYBE_CALLER = "the caller computes it, if the model returns none"
    CALLER = "the caller computes it"


@dataclass(frozen=True)
class Request:
    """The details of a call to trace: its further ``outputs``, its autocast context, the source of its loss,
    and the dims of its inputs whose sizes are symbols (``symbolic``)."""

    outputs: Collection[str | int] = ()
    autocast: Autocast | None = None
    loss: LossSource = LossSource.RETURNED
    free: FreeDims = field(default_factory=dict)


@dataclass(frozen=True)
class Capture:
    """An exported call. ``inputs`` names the batch's tensors, in the order of the program's user inputs;
    ``arguments`` are all leaves of the batch. ``outputs`` names the program's results after the loss, taken
    from what the model ``returned``. ``left`` are the attributes where the pass left tensors."""

    program: ExportedProgram
    inputs: tuple[str, ...]
    output_has_loss: bool
    arguments: tuple[tuple[str, str], ...] = ()
    outputs: tuple[str, ...] = ()
    returned: Returned = Returned()
    warnings: tuple[str, ...] = ()
    left: tuple[str, ...] = ()


@dataclass(frozen=True)
class Batch:
    """A batch as a flat list of leaves. Tensors are traced, all others are constants."""

    names: tuple[str, ...]
    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec
    by_keyword: bool

    @classmethod
    def of(cls, batch: Mapping[str, Any] | tuple | list) -> Batch:
        if not isinstance(batch, Mapping | tuple | list):
            raise TraceError(
                "a batch must say how the model is called",
                expected="a mapping for model(**batch), or a tuple or list for model(*batch)",
                got=type(batch).__name__,
                hint=instead_of(batch),
            )
        by_keyword = isinstance(batch, Mapping)
        arguments = dict(batch) if by_keyword else tuple(batch)
        pairs, spec = pytree.tree_flatten_with_path(arguments, is_leaf=is_words)
        names = tuple(".".join(map(key_text, path)) for path, _ in pairs)
        for name, (_, leaf) in zip(names, pairs):
            check_leaf(name, leaf)
        return cls(names, tuple(leaf for _, leaf in pairs), spec, by_keyword)

    @property
    def arguments(self) -> tuple[tuple[str, str], ...]:
        """All leaves by name, each with its description (``describe_argument``)."""
        return tuple((name, describe_argument(leaf)) for name, leaf in zip(self.names, self.leaves))

    @property
    def tensor_names(self) -> tuple[str, ...]:
        return tuple(n for n, x in zip(self.names, self.leaves) if isinstance(x, torch.Tensor))

    def tensors(self) -> tuple[torch.Tensor, ...]:
        # copies, because export merges inputs that are the same tensor object
        return tuple(x.detach().clone() for x in self.leaves if isinstance(x, torch.Tensor))

    def call(self, model: nn.Module, tensors: tuple[torch.Tensor, ...]) -> Any:
        rest = iter(tensors)
        leaves = [
            next(rest) if isinstance(x, torch.Tensor) else Unread(name) if is_words(x) else x
            for name, x in zip(self.names, self.leaves)
        ]
        arguments = pytree.tree_unflatten(leaves, self.spec)
        return model(**arguments) if self.by_keyword else model(*arguments)


def shapes_of(batch: Mapping[str, Any] | tuple | list) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of a batch, by the name that a trace gives it."""
    flat = Batch.of(batch)
    return {n: tuple(x.shape) for n, x in zip(flat.names, flat.leaves) if isinstance(x, torch.Tensor)}


def key_text(key: Any) -> str:
    """One step of an input's path in the batch, as text for its name."""
    match key:
        case pytree.MappingKey():
            return str(key.key)
        case pytree.SequenceKey():
            return str(key.idx)
        case pytree.GetAttrKey():
            return key.name
    return str(key)


@dataclass
class SeenOutput:
    """The output of a model's last call: whether it is an object with the loss, the names of the ``outputs``
    that follow the loss, and the description of what was ``returned``. A separate object, because export
    resets the plain attributes of a module."""

    has_loss: bool = False
    outputs: tuple[str, ...] = ()
    returned: Returned = Returned()

    def set(self, has_loss: bool, outputs: tuple[str, ...], returned: Returned) -> None:
        self.has_loss, self.outputs, self.returned = has_loss, outputs, returned


def _is_tuple(output: Any) -> bool:
    return isinstance(output, tuple | list)


class LossAndOutputs(nn.Module):
    """Calls ``model`` with a batch's tensors and returns the loss and the requested outputs."""

    def __init__(self, model: nn.Module, batch: Batch, request: Request) -> None:
        super().__init__()
        take_attributes(model)
        self.model = model
        self.training = model.training
        self.batch = batch
        self._request, self.free = request, request.free
        self.seen = SeenOutput()
        self.attributes, self.reads, self.draws = Attributes(model), reads_of(model), Draws(model)
        self.paths = Paths({})

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The loss and the outputs, and then the conditions of branches that ask whether a mask selects
        anything."""
        results = self._loss_and_outputs(tensors)
        return *results, *(asked.condition for asked in self.paths.asked)

    def _loss_and_outputs(self, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        source = self._request.loss
        reads = reading(self.model, self.reads)
        context = under(self._request.autocast)
        inputs = dict(zip(self.batch.tensor_names, tensors))
        # the last ones, innermost, see the calls of the model and not those that PyTorch makes to export them
        with (
            context, self.attributes.watched(), reads, self.draws.by_torch_alone(),
            self.paths, batch_of(tensors), ReplacedFunctions(), data_as_detached(self.model),
            questions_noted(self.reads, inputs),
        ):  # fmt: skip
            output = as_tensors(self.batch.call(self.model, tensors))
        where = str(place_of_function(type(self.model).forward))
        loss = loss_of(output)
        if source is LossSource.CALLER or (source is LossSource.MAYBE_CALLER and not is_loss(loss)):
            return self._all_outputs(output, where)
        if source is LossSource.OPTIONAL and loss is None:
            return self._outputs(output, where)
        loss = check_loss(loss, output, where)
        named = {} if loss is output else dict(named_tensors(output))
        its_name = next((name for name, value in named.items() if value is loss), "loss")
        chosen = selected(tuple(named), its_name, self._request.outputs, where)
        self.seen.set(loss is not output, chosen, Returned(tuple(named), its_name, _is_tuple(output)))
        return loss, *(named[name] for name in chosen)

    def _outputs(self, output: Any, where: str) -> tuple[torch.Tensor, ...]:
        """The outputs of a call without a loss, preceded by a number that stands for the loss."""
        named = dict(named_tensors(output))
        chosen = selected(tuple(named), "", self._request.outputs, where)
        floating = next((named[name] for name in chosen if named[name].is_floating_point()), None)
        instead = check_loss(None if floating is None else floating.sum() * 0, output, where)
        self.seen.set(True, chosen, Returned(tuple(named), "", _is_tuple(output)))
        return instead, *(named[name] for name in chosen)

    def _all_outputs(self, output: Any, where: str) -> tuple[torch.Tensor, ...]:
        """All tensors from which the caller may compute a loss, preceded by a number that depends on all of
        them."""
        named = dict(named_tensors(output))
        floating = [x.sum() * 0 for x in named.values() if x.is_floating_point()]
        instead = check_loss(sum(floating[1:], floating[0]) if floating else None, output, where)
        returned = Returned(names_of_all(output, where), "", _is_tuple(output))
        self.seen.set(True, tuple(named), returned)
        return instead, *named.values()


def capture(
    model: nn.Module, batch: Mapping[str, Any] | tuple | list, known: Container[str], request: Request
) -> Capture:
    """Exports the model's forward pass at the batch's shapes, in functional form; composite operators that
    are ``known`` stay whole. Raises TraceError with PyTorch's own reason and the user's file and line."""
    flat = Batch.of(batch)
    wrapper = LossAndOutputs(model, flat, request)
    try:
        with _quiet(), _as_it_is_traced(), hooks_traced(model), torch.enable_grad():
            program, places = _export_proved(wrapper, known)
    except Exception as error:
        raise of_an_unfit_batch(error, model, batch) or explain(error, model) from error
    return Capture(
        program,
        flat.tensor_names,
        wrapper.seen.has_loss,
        flat.arguments,
        wrapper.seen.outputs,
        wrapper.seen.returned,
        (
            *warnings_of(wrapper.attributes.replaced),
            *warnings_of_changed([each.path for each in wrapper.reads.changed_within]),
            *wrapper.draws.warnings,
            *warnings_of_skipped(places),
        ),
        wrapper.attributes.left,
    )


def _export_proved(wrapper: LossAndOutputs, known: Container[str]) -> tuple[ExportedProgram, tuple[str, ...]]:
    """Exports a call in functional form, and the lines of its branches that ask whether a mask selects
    anything. All of them are taken as if it did, which is proved to be right (``skipped``)."""

    def functional(skips: Skips | None) -> ExportedProgram:
        program = _export_settled(wrapper, skips, checks)
        wrapper.reads.keep_constants(wrapper.model, program)
        check_replaced(wrapper.attributes.replaced, program, WRAPPED)
        inline_regions(program.graph_module)
        if wrapper.free:
            put_numbers_in_place(program)
        check_stopped_writes(program.graph_module)
        targets_by_sample(program.graph_module)
        return with_known_operators(decomposed(program, write_decompositions(program)), known)

    checks: dict[Site, bool | None] = {}
    while True:
        program: ExportedProgram | None = None
        try:
            program, asked = functional(none_skipped), tuple(wrapper.paths.asked)
            seen = wrapper.attributes.left, wrapper.attributes.replaced
            sites = tuple(each.site for each in asked)
            if asked and wrapper.free:
                raise NotSymbolic
            branches = wrapper.training, sites
            is_known = not asked or branches in PROVED.get(wrapper.model, ())
            is_proved = is_known or _is_proved(functional, program, sites)
        except NotSymbolic:  # no branch: the same call without symbols decides on those
            raise
        except Exception as error:
            check = wrapper.paths.check_that_raised(error)
            if check and _raises_alone(functional, wrapper, is_taken=program is None):
                checks |= check
                continue
            if program is None:
                raise
            is_proved = False
        if not is_proved:
            return functional(None), ()
        wrapper.attributes.left, wrapper.attributes.replaced = seen  # not those of a call that skips branches
        if asked:  # batches of other lengths take the same branches
            PROVED.setdefault(wrapper.model, set()).add(branches)
        places = dict.fromkeys(each.place for each in asked)
        return without_conditions(program, len(asked)), tuple(places)


def _is_proved(
    functional: Callable[[Skips], ExportedProgram], program: ExportedProgram, sites: Sequence[Site]
) -> bool:
    """Whether a program with the branches at these lines taken is right where they are not: parts and all of
    them. A call that fails with all of them skipped fails so on one device."""
    count = len(sites)
    if not all(proves_skips(program, functional(part), count, part) for part in parts(sites)):
        return False
    if count == 1:
        return True
    try:
        other = functional(all_skipped)
    except Exception:
        return True
    return proves_skips(program, other, count, all_skipped)


def _raises_alone(functional: Callable[[Skips], object], wrapper: LossAndOutputs, is_taken: bool) -> bool:
    """Whether the call raises its error too where the branch that was asked last is the only one to be taken,
    or to be skipped. Then it is a check."""
    turn = len(wrapper.paths.asked) - 1
    try:
        functional(turn.__ne__ if is_taken else turn.__eq__)
    except Exception as error:
        return len(wrapper.paths.asked) - 1 == turn and bool(wrapper.paths.check_that_raised(error))
    return False


def _export_settled(
    wrapper: LossAndOutputs, skips: Skips | None, checks: Mapping[Site, bool | None]
) -> ExportedProgram:
    """Exports a call. A pass may set what was empty for all later ones, such as transformers'
    ``config.problem_type``: if a second one changes nothing and computes the same, nothing is amiss."""

    def export() -> ExportedProgram:
        return past_checks(lambda paths: _export(wrapper, paths, skips), checks)

    program = export()
    changed = wrapper.reads.changed_within
    if changed and all(each.was_empty() for each in changed):
        try:
            is_settled = _computes_the_same(export(), program) and not wrapper.reads.changed_within
        except Exception:  # the first one stands, and its warning
            is_settled = False
        wrapper.reads.changed_within = () if is_settled else changed
    return program


def _computes_the_same(program: ExportedProgram, other: ExportedProgram) -> bool:
    constants, others = program.constants, other.constants
    return program.graph_module.code == other.graph_module.code and (
        constants.keys() == others.keys()
        and all(_is_same_constant(constants[name], others[name]) for name in constants)
    )


def _is_same_constant(value: Any, other: Any) -> bool:
    are_tensors = isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor)
    return value is other or (are_tensors and torch.equal(value, other))


def _export(wrapper: LossAndOutputs, paths: Paths, skips: Skips | None) -> ExportedProgram:
    paths.skips = skips
    wrapper.paths = paths
    with meta_on_device(wrapper, beside(wrapper, wrapper.batch.tensors())) as meta_tensors:
        free = dynamic_shapes(wrapper.batch.tensor_names, wrapper.free)
        return torch.export.export(wrapper, meta_tensors, dynamic_shapes=free, strict=False)


def beside(model: nn.Module, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """The tensors of a batch, moved to the device of the model if it has one: tensors from a loader are on
    the host, and those of a call are on a rank's device, while the model may have been planned on the host.
    """
    devices = {x.device for x in (*model.parameters(), *model.buffers()) if not x.is_meta}
    if len(devices) != 1:
        return tensors
    (device,) = devices
    return tuple(x if x.is_meta else x.to(device) for x in tensors)


@contextmanager
def _as_it_is_traced() -> Iterator[None]:
    """A context in which a model can be traced. Its graphs are not compiled after each of PyTorch's passes,
    as nothing runs their code."""
    with (
        fixed_shapes(), exact_functions(), moves_in_place(), means_over_batches(),
        whole_stacks(),
        regions_kept(), experts_in_groups(), masks_as_given(), synced_norms_as_plain(),
        no_autocast(), no_grad_within_autocast(), inference_as_no_grad(), inner_gradients(),
        distributions_unchecked(), small_constants_kept(), weights_of_losses_kept(),
        lengths_of_rows(), _use_lazy_graph_module(True),
    ):  # fmt: skip
        yield


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppresses the log lines of torch and transformers, which serve their own debugging, and the incomplete
    graph that torch.fx prints when an export fails."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
