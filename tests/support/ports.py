"""Ports for servers that a process of a test opens later. Not a test."""

import random
import socket
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST, _LAST = 10_000, 32_000


def free_port() -> int:
    """Port of this machine on which nothing listens, which the system gives to no connection by itself.

    A port that the system chose is free only until it is closed: while a rank starts, which takes seconds, another
    process may get it for a connection. Linux chooses from 32,768 on, unless that is set otherwise.
    """
    last = min(_LAST, int(_RANGE.read_text().split()[0]) - 1) if _RANGE.exists() else _LAST
    ports = range(min(_FIRST, last - 1000), last)
    for port in random.SystemRandom().sample(ports, 100):
        with socket.socket() as listening:
            try:
                listening.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"none of 100 ports of {ports.start} to {ports.stop} is free")
