"""Checks the ranks' own dtypes."""

from __future__ import annotations

from ...errors import VerificationError
from ..ir import Program
from ..ir.dtypes import STAND_INS, dtype_conflicts
from .failure import invalid


def check_dtypes(program: Program, where: str = "") -> None:
    """Raises VerificationError for a ``dtype`` line that is wrong, or the first instruction that cannot run
    in these dtypes."""
    for name, row in program.dtypes:
        allowed_dtypes = STAND_INS.get(name)
        if allowed_dtypes is None:
            raise VerificationError(
                f"{name} is the same on all ranks", expected=", ".join(STAND_INS), got=name, where=where
            )
        wrong = [d for d in row if d not in allowed_dtypes]
        if wrong or len(row) != program.world_size:
            raise VerificationError(
                f"dtype {name} is not given for every rank",
                expected=f"{program.world_size} of {' or '.join(allowed_dtypes)}",
                got=", ".join(row),
                where=where,
            )
    for i, reason in dtype_conflicts(program):
        hint = "the same dtype on all ranks, or a plan whose ranks compute their own samples"
        raise invalid(program, i, where, reason, "", "", hint)
