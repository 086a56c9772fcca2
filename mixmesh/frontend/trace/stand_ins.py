"""Export of models on the device ``meta``.

The device of its tensors decides an operator's kernel, and a constant that is created on ``meta`` has no
value. So during export the tensors of such a model are replaced by fake ones on a real device: they have no
memory either, but ``torch.tensor(0.5)`` among them keeps its value.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ...errors import TraceError


@contextmanager
def meta_on_device(model: nn.Module, tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """A context that gives the tensors for an export. These are ``tensors`` themselves if neither they nor
    ``model`` are on ``meta``. Otherwise those on ``meta``, and within the context also the model's, are
    replaced by fake ones on the device of the others."""
    every = (*model.parameters(), *model.buffers(), *tensors)
    if not any(x.is_meta for x in every):
        yield tuple(tensors)
        return
    device = next((x.device for x in every if not x.is_meta), torch.device("cpu"))
    # like export's own mode; a new one for each export, because it numbers the sizes that depend on values
    shapes = ShapeEnv(tracked_fakes=[], prefer_deferred_runtime_asserts_over_guards=False, trace_asserts=True)
    mode = FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True, export=True)

    def fake(x: Tensor) -> Tensor:
        if not x.is_meta:
            return mode.from_tensor(x, static_shapes=True)
        stand_in = FakeTensor(mode, x.detach(), device)
        return nn.Parameter(stand_in, x.requires_grad) if isinstance(x, nn.Parameter) else stand_in

    stand_in_of: dict[int, Tensor] = {}  # by the original tensor, which modules may share
    held = list(_held(model))
    try:
        for table, name, x in held:
            if id(x) not in stand_in_of:
                stand_in_of[id(x)] = fake(x)
            table[name] = stand_in_of[id(x)]
        yield tuple(map(fake, tensors))
    finally:
        for table, name, x in held:
            table[name] = x


def _held(model: nn.Module) -> Iterator[tuple[dict, str, Tensor]]:
    """Yields each tensor of the modules on ``meta``, with the table that holds it."""
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, x in table.items():
                if x is not None and x.is_meta:
                    yield table, name, x


def lost_constant(model: nn.Module) -> TraceError | None:
    """The error for the model's first tensor on ``meta`` that is neither a parameter nor a buffer; None if
    there is none."""
    for prefix, module in model.named_modules():
        for name, x in vars(module).items():
            if isinstance(x, Tensor) and x.is_meta:
                return without_values(f"{prefix}.{name}" if prefix else name, x)
    return None


def without_values(name: str, constant: Tensor) -> TraceError:
    return TraceError(
        f"the model's constant {name} has no values, as the model was made on the device meta",
        expected="a buffer, which needs no values to be planned, or a model with values",
        got=f"a tensor of shape {list(constant.shape)} that is neither parameter nor buffer",
        hint=(
            "in __init__: self.register_buffer(name, tensor, persistent=False)",
            "or make the model without torch.device('meta')",
        ),
    )
