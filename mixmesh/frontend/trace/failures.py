"""The error for a model that cannot be traced: PyTorch's reason in a line or two, the user's line and a
remedy."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager

from sympy import Symbol
from torch import nn
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from ...errors import MixmeshError, TraceError
from .left_out import of_a_layer_left_out, of_masked_spans
from .locate import Place, causes_of, place_of_error, place_of_function
from .problem_types import classifying_by
from .stand_ins import lost_constant

LEAKED = "fake tensor in the exported program"  # PyTorch's message for a value that it has lost track of
CALL_ONCE = "call the model once on this batch without mixmesh"
TRACED_OTHERWISE = "if that works, its code does something else while it is traced: give it masks, or none"
BRANCH_HINT = "replace an `if` or loop on a tensor's value by torch.where"
EMPTY_HINT = (
    "in place of `if mask.any():` around a mean of x[mask]: x[mask].sum() / mask.sum().clamp(min=1), or a "
    'loss with reduction="sum" divided by that, which are 0 where nothing is selected'
)
LIBRARY_HINTS = (
    "that line is a library's: a subclass of its module whose forward has no such line, put into the model",
    "or another model of the library; DistributedDataParallel, which traces nothing, trains this one",
)
NUMBER_HINTS = (
    "in what is computed, keep the tensor in place of float(x), int(x) or x.item(): torch.maximum for max()",
    "what is only shown or kept: return the tensor beside the loss, outputs=, and read it in the loop",
    "what decides on shapes or on a number of rounds comes into the batch as a number, not as a tensor; "
    "x[mask] whose number of rows decides becomes a multiplication by the mask",
)
NO_MESSAGES = (
    "leave the gather or the sum over ranks out: the batch is whole here, as on one device",
    "an `if torch.distributed.is_initialized():` around it is meant for DistributedDataParallel alone",
)
INSTEAD_OF_UNIQUE = (
    "of n classes: (torch.bincount(y, minlength=n) > 0).sum() in place of len(torch.unique(y)), and "
    "a loop over range(n) with masks, y == c, in place of one over unique values"
)
# a remedy where a queue is written at the position that a buffer holds, as in MoCo (He et al., 2020)
POSITION_HINT = (
    "a position in a queue stays a tensor: at = (self.{0} + torch.arange(n, device=self.{0}.device)) % size, "
    "self.queue[:, at] = keys.T, and self.{0}.copy_((self.{0} + n) % size)"
)
IN_LOSS = "raised by the function given as loss="  # a note on an error
LOSS_HINT = "or leave loss= out, and compute it in the loop from what the model returns, where it may branch"
COMPARE_BEFORE = "compare before prepare, and keep the answer as a bool: torch.equal and allclose read values"
_COMPARISON = re.compile(r"\b(equal|allclose)\(")  # operators compare too, within their own code
_OF_SELF = re.compile(r"\bself\.(\w+)")
TIED = "expected compiled_fn to be GraphModule"  # PyTorch's message for updated inputs that share memory
# a part of PyTorch's message -> the remedy
HINTS = (
    ("torch.distributed.nn.functional", NO_MESSAGES[0]),
    ("FakeTensor.__format__", NUMBER_HINTS[1]),
    ("data-dependent", BRANCH_HINT),
    ("DataDependentOutput", "write the operator out by others that read no values"),
    ("DynamicOutputShape", "use operators whose result shape does not depend on values (torch.where, masks)"),
    (
        "but got FakeTensor",
        "read no sizes from tensors: instead of packed sequences, padded ones with a mask over the loss",
    ),
    (".numpy()", "keep the computation in torch: numpy cannot be traced"),
    ("lifted_tensor", "register tensors that the model keeps with register_buffer"),
    ("aliases", "return the loss and keep no tensors on the module"),
    (
        "is not in the correct order or is not found in the exported program's user_output",
        "give each buffer a value of its own: self.a.copy_(value); self.b.copy_(value.clone())",
    ),
    ("is mutated in the forward", 'self.register_buffer("name", tensor) in __init__, and update it in place'),
    ("assigned during export", "register the tensor with register_buffer, and update it in place"),
)


DETECTORS = "torchvision.models.detection"
OTHER_DEVICE = "FakeTensorDeviceMismatchError"
# PyTorch's name for an error -> its cause in the model
MEANINGS = {
    "SpecViolationError": "an update of a buffer whose value is another result too",
    "DataDependentOutputException": "an operator that looks at its tensor's values",
    "DynamicOutputShapeException": "a result whose shape depends on values",
}


@contextmanager
def within_loss() -> Iterator[None]:
    """A context for a call of the function given as ``loss=``. An error that leaves it has a note of that."""
    try:
        yield
    except Exception as error:
        error.add_note(IN_LOSS)
        raise


def explain(error: Exception, model: nn.Module) -> TraceError:
    """Turns ``error`` into a TraceError with the reason in a line or two, the user's line, and a remedy."""
    explained = _explained(error, model)
    is_of_loss = any(IN_LOSS in getattr(each, "__notes__", ()) for each in causes_of(error))
    if is_of_loss and (isinstance(error, GuardOnDataDependentSymNode) or _kind(error) in MEANINGS):
        explained.hint = (*explained.hint, LOSS_HINT)
    return explained


def _kind(error: BaseException) -> str:
    return type(error).__name__


def _explained(error: Exception, model: nn.Module) -> TraceError:
    if TIED in str(error) and (tied := _buffers_of_one_memory(model)) is not None:
        return _of_tied_buffers(*tied)
    place = place_of_error(error)
    if type(model).__module__.startswith(DETECTORS):
        return _of_a_detector(place, model)
    is_decision = isinstance(error, MixmeshError | GuardOnDataDependentSymNode)
    if is_decision and (left_out := of_a_layer_left_out(place, model)) is not None:
        return left_out
    if is_decision and (masked := of_masked_spans(place, model)) is not None:
        return masked
    if LEAKED in str(error):
        return _of_a_tensor_not_followed(str(error), model)
    if _kind(error) == OTHER_DEVICE and (lost := lost_constant(model)) is not None:
        error = lost
    if isinstance(error, GuardOnDataDependentSymNode):
        return _of_a_value_read(error, place, classifying_by(error), model)
    if isinstance(error, MixmeshError):
        where = error.where or str(place)
        return TraceError(error.message, expected=error.expected, got=error.got, where=where, hint=error.hint)
    kind = _kind(error)
    text = f"{kind} {error}"
    hints = dict.fromkeys(hint for key, hint in HINTS if key in text)
    if kind == "DataDependentOutputException" and _COMPARISON.search(place.source):
        hints = {COMPARE_BEFORE: None}
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    got = f"{MEANINGS.get(kind, kind)}: {' '.join(lines[:2])}" if lines else kind
    message = "the model cannot be traced" if hints else "the model's forward pass failed while it was traced"
    return TraceError(
        message,
        got=_clip(got),
        where=str(place),
        hint=tuple(hints)[:1] or (CALL_ONCE, TRACED_OTHERWISE),
    )


def _of_a_value_read(
    error: GuardOnDataDependentSymNode, place: Place, setting: tuple[str, ...], model: nn.Module
) -> TraceError:
    """The error for a tensor's value that Python reads, whose remedy is a ``setting`` if one avoids it.
    PyTorch's text names symbols that the user does not know; its condition is a bare symbol where a number is
    read, and no branch is taken."""
    got = "a branch, a loop or an index that depends on a tensor's values"
    hint: tuple[str, ...] = (BRANCH_HINT, EMPTY_HINT)
    if isinstance(error.cond, Symbol):
        got, hint = "a number that is read from a tensor", _of_a_position(place, model) or NUMBER_HINTS
    if "unique(" in place.source:
        hint = (INSTEAD_OF_UNIQUE,)
    if place.location and not place.by_user:
        hint = LIBRARY_HINTS
    return TraceError("the model cannot be traced", got=got, where=str(place), hint=setting or hint)


def _of_a_detector(place: Place, model: nn.Module) -> TraceError:
    return TraceError(
        "a detector of torchvision cannot be traced: it chooses sizes and boxes by values",
        expected="the same operators in every step",
        got=type(model).__name__,
        where=str(place),
        hint=(
            "its backbone alone: body = model.backbone, body_optimizer of body.parameters(), and "
            "model.backbone, body_optimizer, _ = mixmesh.prepare(body, body_optimizer, [images]), where "
            "images are [batch, 3, height, width] as its transform makes them",
            "the other parameters in an optimizer of their own, made before; every rank trains them whole, "
            "with the script's own loader",
        ),
    )


def _of_a_position(place: Place, model: nn.Module) -> tuple[str, ...]:
    """The remedies for a line that reads a number from a buffer of integers; none for another line."""
    counts = {n.rpartition(".")[2] for n, b in model.named_buffers() if not b.is_floating_point()}
    name = next((name for name in _OF_SELF.findall(place.source) if name in counts), None)
    return () if name is None else (POSITION_HINT.format(name), *NUMBER_HINTS[:1])


def _of_a_tensor_not_followed(text: str, model: nn.Module) -> TraceError:
    """The error for a tensor that export does not follow. PyTorch names the module in which it found the
    tensor, but no line."""
    path = re.search(r"model attribute: ([\w.]+)\.lifted_tensor", text)
    name = path[1].removeprefix("model").removeprefix(".") if path else ""
    module = dict(model.named_modules()).get(name, model)
    return TraceError(
        "the model cannot be traced",
        expected="values of the batch, of parameters and of buffers",
        got=f"one from elsewhere in {name or 'the model'} ({type(module).__name__}): x.data, or a global",
        where=str(place_of_function(inspect.unwrap(type(module).forward))),
        hint=(
            "use .detach() instead of .data, and no tensors kept as globals",
            "weights are changed after the optimizer's step: with torch.no_grad(): p.clamp_(-1, 1)",
        ),
    )


def _buffers_of_one_memory(model: nn.Module) -> tuple[str, str] | None:
    """The names of the first two buffers that share memory; None if no two do."""
    names: dict[int, str] = {}
    for name, buffer in model.named_buffers(remove_duplicate=False):
        first = names.setdefault(buffer.untyped_storage()._cdata, name)
        if first != name:
            return first, name
    return None


def _of_tied_buffers(one: str, other: str) -> TraceError:
    return TraceError(
        "a buffer that has two names is updated in the forward pass",
        expected="one name for a buffer that is updated",
        got=f"{one} and {other}, which share memory",
        hint=(
            f"register {one} once, and use it by that name in place of {other}",
            "a module that is used in two places: self.again = [self.module], and self.again[0](x)",
        ),
    )


def _clip(text: str, limit: int = 300) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."
