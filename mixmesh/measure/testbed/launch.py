"""Runs a command on every device of a cluster, emulated if possible."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Literal

from ...cluster import Cluster
from ...errors import TestbedUnavailable
from .bed import Bed
from .emulated import Testbed
from .plain import PlainBed
from .processes import OnOutput
from .result import RunResult


def run(
    cluster: Cluster,
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
    fallback: Literal["plain", "error"] = "plain",
    on_output: OnOutput | None = None,
    check: bool = True,
) -> RunResult:
    """Runs ``argv`` once for every device, in rank order, and waits for all of them.

    Ranks have the variables of ``torch.distributed`` in their environment and ``MIXMESH_EMULATION`` ("quota"
    or "none"), and may call ``enter_device``. The stdout of rank 0 is passed on unchanged, and all other
    output goes to stderr with its rank; or everything goes to ``on_output(rank, stream, text)``. If no
    cluster can be emulated, ``fallback="plain"`` says so on stderr and runs plain processes.

    Raises ``DeviceLost`` when a rank fails or the time is up (``check=False`` returns it in the result),
    ``TestbedUnavailable`` with ``fallback="error"``, ``InputError`` for a command that cannot be run.
    """
    with ExitStack() as stack:
        bed: Bed
        try:
            bed = stack.enter_context(Testbed(cluster, on_output=on_output))
        except TestbedUnavailable as error:
            if fallback == "error":
                raise
            print(plain_message(error), file=sys.stderr)
            bed = stack.enter_context(PlainBed(cluster, on_output=on_output))
        bed.spawn(argv, env=env)
        return bed.wait(timeout_s=timeout_s, check=check)


def plain_message(error: TestbedUnavailable) -> str:
    return (
        f"mixmesh testbed: {error.message}: {error.got or 'unknown reason'}\n"
        "mixmesh testbed: a plain multi-process run on loopback follows; its results are right, "
        "but its times say nothing about the mixed cluster"
    )
