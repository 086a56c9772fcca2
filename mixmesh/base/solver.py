"""Linear and mixed-integer programs by HiGHS, which prints nothing."""

from __future__ import annotations

import highspy


class _Quiet(highspy.Highs):
    """HiGHS 1.16 prints its version to standard output as soon as callbacks are enabled, which is in its
    constructor, and would do so into what ``--json`` prints."""

    def enableCallbacks(self):
        self.setOptionValue("output_flag", False)
        return super().enableCallbacks()


def quiet_solver() -> highspy.Highs:
    """An empty model that prints nothing when it is solved."""
    solver = _Quiet()
    solver.setOptionValue("output_flag", False)
    return solver
