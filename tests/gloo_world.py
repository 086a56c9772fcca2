"""Real gloo processes for tests: many checks in one world, to pay for its start only once."""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
import traceback
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from ended_groups import EndedChecks
from fuzz.ports import free_port
from fuzz.world import forking
from torch import nn

from mixmesh.errors import CollectiveError
from mixmesh.lang.ir import Program
from mixmesh.runtime.comm import leave
from mixmesh.runtime.parallel import parallelize


def nothing() -> None:
    """For checks that make what they need."""


def run_world(world_size: int, checks: dict, make_comm=nothing) -> dict[str, list[str | None]]:
    """Runs every check on every rank; gives, by check, the traceback per rank or None.

    ``make_comm()`` is called once per process, and its value passed to each check.
    """
    with tempfile.TemporaryDirectory() as folder:
        args = (world_size, free_port(), checks, make_comm, folder, dict(os.environ))
        # CUDA does not survive a fork, and imports may have asked it for its devices
        method = "spawn" if "MIXMESH_TEST_GPU" in os.environ else forking().get_start_method()
        mp.start_processes(_worker, args, nprocs=world_size, start_method=method)
        per_rank = [pickle.loads(Path(folder, str(rank)).read_bytes()) for rank in range(world_size)]
    return {name: [results.get(name, "did not run") for results in per_rank] for name in checks}


def _worker(
    rank: int, world_size: int, port: int, checks: dict, make_comm, folder: str, environment: dict
) -> None:
    torch.set_num_threads(1)
    mp.set_start_method("fork", force=True)  # of a loader's workers, as in a script of one's own
    os.environ.update(environment)  # the server that this was forked from may be older
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    results: dict[str, str | None] = {}
    comm = make_comm()
    over = EndedChecks(rank, world_size)
    for name, check in checks.items():
        try:
            check(comm)
            results[name] = None
        except Exception:
            results[name] = traceback.format_exc()
        else:
            with suppress(dist.DistError):  # the first rank failed and has gone
                over.add(name)
    Path(folder, str(rank)).write_bytes(pickle.dumps(results))
    if dist.is_initialized() and not any(results.values()):
        with suppress(RuntimeError, CollectiveError):  # another rank failed and has gone
            leave()
    else:  # the others may wait for what never comes
        sys.stderr.flush()
        os._exit(0)


def assert_trains_alike(
    single: nn.Module, mine: nn.Module, program: Program, batches: Iterable[dict]
) -> None:
    """A step of Adam per batch: losses of ``mine``, trained by ``program``, and its parameters after each are
    those of ``single``, which begins with the same ones. Collective."""
    adam = [torch.optim.Adam(m.parameters(), lr=0.05) for m in (single, mine)]
    model, mine_adam = parallelize(mine, adam[1], program, device="cpu", timeout_s=60)
    for batch in batches:
        expected, loss = single(**batch), model(**batch)
        torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-9)
        for value, optimizer in ((expected, adam[0]), (loss, mine_adam)):
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
        whole = single.state_dict()
        for name, value in model.full_state_dict().items():
            torch.testing.assert_close(value, whole[name], rtol=1e-9, atol=1e-9, msg=name)


def shared_folder() -> Path:
    """A new folder that all ranks know. Collective."""
    names = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(names)
    return Path(names[0])


def assert_passed(failures: list[str | None]) -> None:
    text = "\n".join(f"rank {rank}:\n{f}" for rank, f in enumerate(failures) if f)
    assert not text, text
