"""Notes where a forward pass asks whether a value of the batch has a gradient."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor

from ...base.patch import patched
from .functions import may_need_gradient
from .locate import place_in_model
from .reads import Reads

HAS_GRADIENT: Any = Tensor.requires_grad
FACTS = ("requires_grad", "grad_fn", "is_leaf")  # attributes that say whether a tensor has a gradient


@contextmanager
def questions_noted(reads: Reads) -> Iterator[None]:
    """A context for a pass of a model. Batches are traced without gradients: where the pass asks for one of
    the ``FACTS``, a batch that the script gives a gradient may take another branch. The first such line is
    noted in ``reads``."""

    def answer_of(descriptor: Any) -> Callable[[Tensor], Any]:
        def answer(tensor: Tensor) -> Any:
            if not reads.asks_gradient and _is_by_model() and _may_differ(tensor):
                reads.asks_gradient = str(place_in_model())
            return descriptor.__get__(tensor)

        return answer

    with ExitStack() as stack:
        for name in FACTS:
            own = getattr(Tensor, name)
            setter = own.__set__ if name == "requires_grad" else None
            stack.enter_context(patched(Tensor, name, property(answer_of(own), setter)))
        yield


def _is_by_model() -> bool:
    """Whether the caller's caller is the model's code, and not PyTorch's, whose questions change nothing."""
    return sys._getframe(2).f_globals.get("__name__", "").partition(".")[0] not in ("torch", "mixmesh")


def _may_differ(tensor: Tensor) -> bool:
    return not HAS_GRADIENT.__get__(tensor) and may_need_gradient(tensor)
