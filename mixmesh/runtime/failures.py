"""Errors of collectives, groups and threads that PyTorch or the system has refused, in words that say what
to do."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from ..base.launched import rank_and_world_size
from ..errors import CollectiveError

INTERFACE = "GLOO_SOCKET_IFNAME"


class _Limit(NamedTuple):
    """A limit of the system: the texts of errors that tell of it, its name, its number in ``resource``, and
    what to type."""

    texts: tuple[str, ...]
    name: str
    number: int
    hints: tuple[str, ...]


_LIMITS = (
    _Limit(
        ("Too many open files",),
        "open files (ulimit -n)",
        resource.RLIMIT_NOFILE,
        ("ulimit -n 65536, in the shell that starts the ranks on this machine",),
    ),
    _Limit(
        ("can't start new thread", "Resource temporarily unavailable", "Thread creation failed"),
        "processes and threads (ulimit -u)",
        resource.RLIMIT_NPROC,
        (
            "ulimit -u unlimited and ulimit -v unlimited, in the shell that starts the ranks on this machine",
            "docker run --pids-limit -1, if it is the container's limit",
            "OMP_NUM_THREADS=1 and fewer workers of data loaders take fewer threads",
        ),
    ),
)


def limit_error(rank: int, what: str, error: BaseException) -> CollectiveError | None:
    """The error of a rank that could not take part in ``what`` because the system gives it no more files or
    threads; None for any other ``error``."""
    text = " ".join(str(error).split())
    limit = next((limit for limit in _LIMITS if any(part in text for part in limit.texts)), None)
    if limit is None:
        return None
    most, _ = resource.getrlimit(limit.number)
    allowed = "no limit of this shell" if most == resource.RLIM_INFINITY else f"a limit of {most}"
    return CollectiveError(
        f"rank {rank}: {what} failed: its process has reached a limit of {limit.name}",
        where=what,
        expected="room for connections to all ranks, and for the threads and pipes beside them",
        got=f"{allowed}; {text[:200]}",
        hint=limit.hints,
        ranks=(rank,),
    )


@contextmanager
def limits_named(what: str, rank: int | None = None) -> Iterator[None]:
    """A context for ``what`` a rank starts, by default the launcher's rank, in which a limit of files or
    threads is told with what to type. Raises CollectiveError for it."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        own = rank_and_world_size()[0] if rank is None else rank
        if (limited := limit_error(own, what, error)) is None:
            raise
        raise limited from error


def _unreached(rank: int, error: BaseException) -> CollectiveError:
    """The error of a rank that has met the others, and then could not connect to one of them."""
    return CollectiveError(
        f"rank {rank} cannot connect to another rank, at the address that this one has given",
        where="the start",
        expected="an address of every machine that the others reach, and a rank that is still there",
        got=" ".join(str(error).split())[-200:],
        hint=(
            f"export {INTERFACE}=NAME on each machine: the interface that leads to the others, of `ip addr`",
            "in place of `mixmesh run`, `mixmesh doctor` names the machines that do not reach each other",
        ),
        ranks=(rank,),
    )


def start_error(rank: int, error: BaseException) -> CollectiveError | None:
    """The error of a rank whose settings or limits keep it from meeting the others; None for any other
    ``error``."""
    if "connectFullMesh failed" in str(error):
        return limit_error(rank, "the start", error) or _unreached(rank, error)
    if "Unable to find address for" not in str(error):
        return limit_error(rank, "the start", error)
    names = ", ".join(name for _, name in socket.if_nameindex())
    return CollectiveError(
        f"rank {rank} cannot use the network interface that {INTERFACE} names",
        where=INTERFACE,
        expected=f"one with an address, of those of this machine: {names}",
        got=os.environ.get(INTERFACE, "") or " ".join(str(error).split())[:200],
        hint=(f"unset {INTERFACE}", f"export {INTERFACE}=NAME on this machine: names may differ on each"),
        ranks=(rank,),
    )


def is_timeout(error: BaseException) -> bool:
    """Whether an error of PyTorch says that a wait has taken too long."""
    return "imed out" in str(error) or "imeout" in str(error)


def collective_error(
    rank: int, what: str, error: BaseException, *, ranks: str, timeout_s: float | None = None, where: str = ""
) -> CollectiveError:
    """The error of a rank whose collective has failed for a reason that only PyTorch's text tells. ``ranks``
    names those that take part."""
    if (limited := limit_error(rank, what, error)) is not None:
        return limited
    text = str(error)
    if "DataLoader worker" in text:
        reason = "was interrupted by the end of a data loader's worker"
        hint = "fewer workers, or more memory, also in /dev/shm: a worker that finds none is killed"
    elif "connecting" in text:  # for gloo each attempt has a limit of its own, below that of the collective
        reason = "could not connect to a peer"
        hint = "a rank of these ended early, or a firewall is between them: look at the output of each"
    elif is_timeout(error):
        reason = "timed out" if timeout_s is None else f"timed out after {timeout_s:g} s"
        hint = "a rank of these is slow, stuck or never got here: look at the output of each"
    elif "onnection" in text or "peer" in text:
        reason = "lost a peer"
        hint = "a rank of these ended early: its own output says why"
    else:
        reason, hint = "failed", ""
    return CollectiveError(
        f"rank {rank}: {what} {reason}",
        where=where or what,
        expected=f"ranks {ranks} to take part",
        got=" ".join(text.split())[:300],
        hint=hint,
    )
