"""This process's place in its launch, as torchrun writes it into the environment."""

from __future__ import annotations

import os

from ..errors import InputError

# variables in which launchers that set no RANK say how many processes they have started
OTHER_LAUNCHERS = {"SLURM_STEP_NUM_TASKS": "srun", "OMPI_COMM_WORLD_SIZE": "mpirun", "PMI_SIZE": "mpiexec"}


def is_launched() -> bool:
    """Whether torchrun, or another launcher, started this process as one of several and told it its rank.
    Raises InputError if one started several without that: each would train by itself, on all data."""
    if "RANK" in os.environ:
        return True
    for name, launcher in OTHER_LAUNCHERS.items():
        count = _whole_number(os.environ.get(name, "0"))
        if count is not None and count > 1:
            raise InputError(
                f"{launcher} started {count} processes, and none was told its rank",
                expected="a RANK, and the other variables that torchrun sets",
                got=f"{name}={count}: each process would train by itself, on all data",
                hint=(_by_torchrun(launcher), f"for trainings of their own: env -u {name} python ..."),
            )
    return False


def _by_torchrun(launcher: str) -> str:
    if launcher == "srun":
        return (
            "srun --ntasks-per-node=1 torchrun --nnodes=$SLURM_NNODES --nproc-per-node=gpu "
            "--rdzv-backend=c10d --rdzv-endpoint=FIRST_HOST:29500 train.py"
        )
    return "torchrun --nnodes=M --nproc-per-node=gpu --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 train.py"


def rank_and_world_size() -> tuple[int, int]:
    """Returns ``RANK`` and ``WORLD_SIZE``; 0 and 1 where they are not set. Raises InputError for values that
    no launcher sets."""
    texts = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE")}
    try:
        rank, world_size = int(texts["RANK"] or 0), int(texts["WORLD_SIZE"] or 1)
    except ValueError:
        raise _unusable(texts) from None
    if not 0 <= rank < world_size:
        raise _unusable(texts)
    return rank, world_size


def store_address() -> tuple[str, int]:
    """Returns ``MASTER_ADDR`` and ``MASTER_PORT``, which a launcher has set. Raises InputError unless the
    second is the number of a port. A rank that is alone may have 0, any port that is free."""
    text = os.environ["MASTER_PORT"]
    port, least = _whole_number(text), 0 if os.environ.get("WORLD_SIZE") == "1" else 1
    if port is None or not least <= port < 2**16:
        raise InputError(
            "the environment does not say at which port the ranks meet",
            expected="a MASTER_PORT from 1 to 65535, alike on all ranks",
            got=f"MASTER_PORT={text}",
            hint="export MASTER_PORT=29500",
        )
    return os.environ["MASTER_ADDR"], port


def _whole_number(text: str) -> int | None:
    digits = text.strip()
    return int(digits) if digits.isascii() and digits.isdecimal() else None


def _unusable(texts: dict[str, str | None]) -> InputError:
    told = [f"no {name}" if text is None else f"{name}={text}" for name, text in texts.items()]
    return InputError(
        "the environment does not say which of the processes this one is",
        expected="a RANK from 0 to WORLD_SIZE - 1, as torchrun sets both",
        got=", ".join(told),
        hint=("torchrun --nproc-per-node N ...", "for one device: unset RANK WORLD_SIZE"),
    )
