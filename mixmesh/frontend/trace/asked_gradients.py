"""Notes where a forward pass asks whether a value of the batch has a gradient."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor

from ...base.patch import patched
from . import derivatives
from .locate import place_in_model
from .reads import Reads
from .selected import is_selected

HAS_GRADIENT: Any = Tensor.requires_grad
FACTS = ("requires_grad", "grad_fn", "is_leaf")  # attributes that say whether a tensor has a gradient
# modules that compute something else by the answer: for jacobian(..., create_graph=True), and what stands for
# a reentrant checkpoint
ASKING = ("torch.autograd.functional", "mixmesh.frontend.trace.checkpoints")


@contextmanager
def questions_noted(reads: Reads, inputs: Mapping[str, Tensor]) -> Iterator[None]:
    """A context for a pass of a model. Its ``inputs`` are traced without gradients: where the pass asks for
    one of the ``FACTS`` of a value that is made of an input, it may take another branch for one to which the
    script gives a gradient. The first such line for each input is noted in ``reads``."""

    def answer_of(descriptor: Any) -> Callable[[Any], Any]:
        def answer(tensor: Any) -> Any:
            if is_selected(tensor):
                tensor = tensor.values
            asked = reads.asks_gradient
            if len(asked) < len(inputs) and _is_by_model() and not HAS_GRADIENT.__get__(tensor):
                others = [(name, x) for name, x in inputs.items() if name not in asked]
                names = [name for name, x in others if derivatives.depends_on(tensor, [x])]
                asked.update({name: str(place_in_model()) for name in names})
            return descriptor.__get__(tensor)

        return answer

    with ExitStack() as stack:
        for name in FACTS:
            own = getattr(Tensor, name)
            setter = own.__set__ if name == "requires_grad" else None
            stack.enter_context(patched(Tensor, name, property(answer_of(own), setter)))
        yield


def _is_by_model() -> bool:
    """Whether the caller's caller is the model's code, and not PyTorch's, whose other questions change
    nothing."""
    name = sys._getframe(2).f_globals.get("__name__", "")
    return name in ASKING or name.partition(".")[0] not in ("torch", "mixmesh")
