"""Checks split weight gradients (``wgrad``)."""

from __future__ import annotations

from ..ir import WGRADS, Instruction, wgrad_of
from .failure import Fail


def check_wgrad(i: Instruction, able: bool, fail: Fail) -> None:
    """Raises VerificationError for an unknown value of ``wgrad``, or for one on an instruction that is not
    ``able`` to split its gradient."""
    when = wgrad_of(i)
    if when is None:
        return
    if when not in WGRADS:
        raise fail(
            "a weight's gradient is computed first, last or beside a collective",
            'wgrad="first"',
            f"wgrad={when!r}",
        )
    if not able:
        raise fail(
            "the weight's gradient cannot be computed apart here",
            "a linear or a convolution of a batch that takes a gradient with parameters that nothing else "
            "uses, outside of what is computed again, without sfb",
        )
