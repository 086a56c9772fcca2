"""Tests connections between machines in both directions: the first process of each machine calls those of the
others at the address used in training. Times the look-up of addresses' names, too."""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import psutil

from ...errors import InputError
from ...runtime.accelerator import HOST_BACKEND
from ...runtime.failures import INTERFACE
from ...runtime.interfaces import choose_interface, host_of_name, host_towards_store

CONNECT_S = 5.0  # a slower connection is useless for training
LOOK_UPS = 2  # look-ups of each address, because a packet that was lost is no fault
TOKEN_BYTES = 8


@dataclass(frozen=True)
class Address:
    """The address at which a process answers. ``token`` distinguishes it from another process that answers
    there."""

    host: str
    port: int
    token: str


class Listener:
    """Answers every connection with its token, until it is closed."""

    def __init__(self, host: str) -> None:
        token = secrets.token_bytes(TOKEN_BYTES)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family)
        self.address = Address(host, self._socket.getsockname()[1], token.hex())
        self._token = token
        threading.Thread(target=self._answer, name="mixmesh answers", daemon=True).start()

    def _answer(self) -> None:
        with suppress(OSError):  # already closed
            while True:
                connection, _ = self._socket.accept()
                with connection, suppress(OSError):
                    connection.sendall(self._token)

    def close(self) -> None:
        """Closes the socket and ends the thread, which would stay in accept() if the socket were only
        closed."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def own_host(backend: str) -> str:
    """The address at which other processes reach ``backend`` in this one. gloo takes the interface of
    ``GLOO_SOCKET_IFNAME``, which is chosen for it where the host's name leads to the loopback, else the
    address of the name. NCCL picks an interface itself; the one that leads to the store is assumed. Raises
    InputError for an interface that does not exist."""
    if backend != HOST_BACKEND:
        return host_towards_store()
    choose_interface()
    name = os.environ.get(INTERFACE, "").split(",")[0]
    return interface_host(name) if name else host_of_name()


def interface_host(name: str) -> str:
    """The address of a network interface. Raises InputError if it has none."""
    interfaces = psutil.net_if_addrs()
    families = (socket.AF_INET, socket.AF_INET6)
    addresses = [a.address for a in interfaces.get(name, ()) if a.family in families]
    if not addresses:
        raise InputError(
            f"there is no network interface {name} with an address",
            expected=f"GLOO_SOCKET_IFNAME to be one of {', '.join(sorted(interfaces))}",
            got=f"GLOO_SOCKET_IFNAME={name}",
            hint="export GLOO_SOCKET_IFNAME=NAME on this machine, as `ip addr` names it",
        )
    return addresses[0]


def call(address: Address, timeout_s: float = CONNECT_S) -> tuple[float, str]:
    """Returns (seconds until ``address`` answered, error); the error is empty if it answered."""
    started = time.perf_counter()
    try:
        with socket.create_connection((address.host, address.port), timeout_s) as connection:
            answer = connection.recv(TOKEN_BYTES)
    except OSError as error:
        return time.perf_counter() - started, str(error) or type(error).__name__
    wrong = "" if answer.hex() == address.token else "another process answers there"
    return time.perf_counter() - started, wrong


def call_all(addresses: dict[int, Address], timeout_s: float = CONNECT_S) -> dict[int, tuple[float, str]]:
    """Calls all addresses at the same time; the results are like those of ``call``."""
    with ThreadPoolExecutor(max(1, len(addresses))) as pool:
        return dict(zip(addresses, pool.map(lambda a: call(a, timeout_s), addresses.values())))


def look_up_s(host: str) -> float:
    """The seconds in which this machine finds the name of an address, or that there is none: the fewest of
    ``LOOK_UPS``."""
    times_s = []
    for _ in range(LOOK_UPS):
        started = time.perf_counter()
        with suppress(OSError):
            socket.getnameinfo((mapped(host), 0, 0, 0), 0)
        times_s.append(time.perf_counter() - started)
    return min(times_s)


def look_up_all(hosts: Sequence[str]) -> dict[str, float]:
    """Looks up all addresses at the same time; the results are like those of ``look_up_s``."""
    with ThreadPoolExecutor(max(1, len(hosts))) as pool:
        return dict(zip(hosts, pool.map(look_up_s, hosts)))


def mapped(host: str) -> str:
    """The form in which PyTorch's sockets have an address: IPv6, to which IPv4 is mapped."""
    return host if ":" in host else f"::ffff:{host}"
