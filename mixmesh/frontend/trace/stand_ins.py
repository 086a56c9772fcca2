"""Models made on the device ``meta``, traced as if they had values.

Where an operator is dispatched to follows its tensors' device, and a constant that is made on ``meta`` has no
value left. So while such a model is exported its tensors are fake ones of a real device: shapes without
memory, beside which ``torch.tensor(0.5)`` is a half.
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
    """``tensors``, an export's arguments, where neither they nor ``model`` are on ``meta``. Else, within it,
    the model's tensors on ``meta`` are fake ones on the device of the others, and so are the ``tensors`` that
    are given."""
    every = (*model.parameters(), *model.buffers(), *tensors)
    if not any(x.is_meta for x in every):
        yield tuple(tensors)
        return
    device = next((x.device for x in every if not x.is_meta), torch.device("cpu"))
    # as export makes it; a mode for each export, which counts the sizes that depend on values
    shapes = ShapeEnv(tracked_fakes=[], prefer_deferred_runtime_asserts_over_guards=False, trace_asserts=True)
    mode = FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True, export=True)

    def fake(x: Tensor) -> Tensor:
        if not x.is_meta:
            return mode.from_tensor(x, static_shapes=True)
        stand_in = FakeTensor(mode, x.detach(), device)
        return nn.Parameter(stand_in, x.requires_grad) if isinstance(x, nn.Parameter) else stand_in

    stand_in_of: dict[int, Tensor] = {}  # by the original, of which modules may share one
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
    """Each tensor of the modules on ``meta``, with the table that holds it."""
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, x in table.items():
                if x is not None and x.is_meta:
                    yield table, name, x


def lost_constant(model: nn.Module) -> TraceError | None:
    """The error of a forward pass that uses a tensor on ``meta`` that is neither parameter nor buffer, naming
    the first that the model has; None if it has none."""
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
