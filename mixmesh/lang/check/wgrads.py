"""Weight gradients that are computed apart. No torch."""

from __future__ import annotations

from ..ir import WGRADS, Instruction, wgrad_of


def check_wgrad(i: Instruction, able: bool, fail) -> None:
    """Raises what ``fail`` makes if an instruction has its weight's gradient apart and is not ``able`` to."""
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
