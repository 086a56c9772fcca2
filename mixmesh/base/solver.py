"""HiGHS, the solver of linear and mixed-integer programs, with its output turned off."""

from __future__ import annotations

from typing import Any

import highspy


class _Quiet(highspy.Highs):
    """HiGHS 1.16 prints its version to standard output as soon as callbacks are enabled, which its
    constructor does: the line would stand in the output of ``--json``."""

    def enableCallbacks(self) -> Any:
        self.setOptionValue("output_flag", False)
        return super().enableCallbacks()


def quiet_solver() -> highspy.Highs:
    """Returns an empty model that prints nothing when it is solved."""
    solver = _Quiet()
    solver.setOptionValue("output_flag", False)
    return solver
