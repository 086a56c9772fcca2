"""The network interface at which gloo listens, and a better one where its own choice leads to no machine."""

from __future__ import annotations

import ipaddress
import os
import socket
from contextlib import suppress

from .failures import INTERFACE

LOOPBACK = "127.0.0.1"


def choose_interface() -> None:
    """Has gloo listen at the interface that leads to the launch's store, where it would take the loopback.

    It listens at the address of the machine's own name, which Debian and Ubuntu map to 127.0.1.1 in
    ``/etc/hosts``: no other machine reaches it there. Nothing changes where ``GLOO_SOCKET_IFNAME`` is set, or
    where the store is on the loopback too, as on one machine.
    """
    if os.environ.get(INTERFACE) or not is_loopback(host_of_name()):
        return
    towards_store = host_towards_store()
    if not is_loopback(towards_store) and (name := interface_of(towards_store)):
        os.environ[INTERFACE] = name


def host_of_name() -> str:
    """The address of this machine's name at which a socket can listen, else the loopback: that of gloo
    (createDefaultDevice of PyTorch's ProcessGroupGloo)."""
    with suppress(OSError):
        for family, kind, protocol, _, place in socket.getaddrinfo(
            socket.gethostname(), None, type=socket.SOCK_STREAM
        ):
            with suppress(OSError), socket.socket(family, kind, protocol) as tried:
                tried.bind((place[0], 0))
                return str(place[0])
    return LOOPBACK


def host_towards_store() -> str:
    """This machine's address on the route to the store of the launch."""
    return host_towards(os.environ.get("MASTER_ADDR", LOOPBACK))


def host_towards(other: str) -> str:
    """This machine's address on the route to ``other``."""
    with suppress(OSError):
        family, kind, protocol, _, place = socket.getaddrinfo(other, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as way:
            way.connect(place)  # connecting a datagram socket sends nothing
            return str(way.getsockname()[0])
    return LOOPBACK


def is_loopback(host: str) -> bool:
    """Whether an address is one that only this machine reaches."""
    return ipaddress.ip_address(host.partition("%")[0]).is_loopback


def interface_of(host: str) -> str:
    """The name of the interface that has an address; "" for none."""
    import psutil

    interfaces = psutil.net_if_addrs().items()
    return next((name for name, places in interfaces if any(at.address == host for at in places)), "")
