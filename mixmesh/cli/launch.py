"""The plan file of a launch: the ranks that have it read it, and the others receive it."""

from __future__ import annotations

import os
from pathlib import Path

from ..base.launched import rank_and_world_size
from ..errors import InputError, MixmeshError
from ..lang.plan_file import Plan


def launched_plan(job: str, path: Path, batch_norm: str | None, timeout_s: float) -> tuple[Plan, int]:
    """Reads the plan at ``path``; returns it with this process's rank. A rank without the file receives the
    first rank's. Collective; if a rank cannot read its file, or the first rank has none, all ranks raise the
    error."""
    is_here = path.is_file() or os.environ.get("RANK", "0") == "0"
    mine: Plan | None = None
    failure: MixmeshError | None = None
    try:
        if is_here:
            mine = Plan.load(path)
            check_kind(batch_norm, mine, path)
            check_launch(job, path, mine)
    except MixmeshError as error:
        failure = error
    if not meet(timeout_s):
        if mine is None or failure is not None:
            raise failure or InputError("there is no plan", got="no such file", where=str(path))
        return mine, 0
    from ..runtime.first_rank import everyones, from_first_rank

    for number, other_failure in enumerate(everyones(failure)):
        if other_failure is not None:
            if number:
                other_failure.message = f"rank {number}: {other_failure.message}"
            raise other_failure

    def first_plan() -> Plan:
        assert mine is not None  # the first rank has reported its failure otherwise
        return mine

    first = from_first_rank(first_plan)
    return mine or first, int(os.environ["RANK"])


def meet(timeout_s: float) -> bool:
    """Joins the other processes of this launch. Returns False if this one is alone, or the environment lacks
    variables of a launcher."""
    _, world_size = rank_and_world_size()
    if "RANK" not in os.environ or world_size == 1:
        return False
    from ..runtime.comm import RANK_VARIABLES, default_device, initialise

    if any(name not in os.environ for name in RANK_VARIABLES):
        return False
    initialise(world_size, default_device(), timeout_s)
    return True


def check_kind(batch_norm: str | None, plan: Plan, path: Path) -> None:
    """Raises InputError for a plan whose kind of batch norm is not that of the option."""
    if batch_norm not in (None, plan.batch_norm):
        raise InputError(
            "the plan was made for another kind of batch norm",
            expected=f"--batch-norm {plan.batch_norm}, as the plan has it",
            got=f"--batch-norm {batch_norm}",
            where=str(path),
            hint=f"mixmesh plan JOB --cluster C.toml --batch-norm {batch_norm} --out {path}",
        )


def check_launch(job: str, path: Path, plan: Plan) -> int:
    """Returns this process's rank. Raises InputError, with a command to type, if neither torchrun nor the
    testbed started this process."""
    world_size = plan.program.world_size
    if "RANK" not in os.environ:
        raise InputError(
            "this is one process, and the plan needs one for every device",
            expected=f"to be started {world_size} times, by torchrun or the testbed",
            got="no RANK in the environment",
            hint=(
                f"torchrun --nproc-per-node {world_size} -m mixmesh run {job} --plan {path}",
                f"mixmesh testbed --cluster C.toml -- mixmesh run {job} --plan {path}",
            ),
        )
    launched = os.environ.get("WORLD_SIZE", "")
    if launched != str(world_size):
        raise InputError(
            "the plan is for another number of processes",
            expected=f"{world_size} processes, one per device of {plan.cluster_name or 'the cluster'}",
            got=f"WORLD_SIZE={launched}",
            where=str(path),
            hint=f"torchrun --nproc-per-node {world_size} -m mixmesh run {job} --plan {path}",
        )
    return rank_and_world_size()[0]
