# SPDX-License-Identifier: Apache-2.0
"""Where the server listens: a bind test before anything heavy, and the URL for a client on this machine."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from pathlib import Path
from typing import Any, Iterable

from nemo_automodel.errors import ConfigError, LaunchError


def find_port(host: str, port: int) -> int:
    """The port if it can be bound, or a free one for 0. The socket is closed again before the server binds it.

    Raises:
        ConfigError: the host is not an address of this machine, or the port is out of range.
        LaunchError: another process listens on the port.
    """
    if not 0 <= port <= 65535:
        raise ConfigError(
            f"port {port} is out of range", where="serve.port", remedy="serve.port=8000, or 0 for a free one"
        )
    family, kind, proto, _, address = _resolve_host(host, port)
    with socket.socket(family, kind, proto) as probe:
        # as asyncio's servers do: ports of ended connections are free, ports that are listened on are not
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            raise LaunchError(
                f"port {port} on {host} cannot be bound: {error.strerror}",
                where="serve.port",
                remedy="serve.port=0 for a free one, or stop what listens there",
            ) from error
        return probe.getsockname()[1]


def check_host(host: str) -> None:
    """Raises ConfigError: no address of that name, or a port in it."""
    _resolve_host(host, 0)


def _resolve_host(host: str, port: int) -> tuple[Any, ...]:
    """The first answer of getaddrinfo: family, kind, protocol, name, address."""
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (socket.gaierror, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "no name of a host"
        remedy = "serve.host=127.0.0.1"
        if apart := re.fullmatch(r"(?:\w+://)?([^:/\s]+):(\d+)/?", host):
            reason, remedy = "the port has a key of its own", f"serve.host={apart[1]} and serve.port={apart[2]}"
        raise ConfigError(f"{host}: {reason}", where="serve.host", remedy=remedy) from error


def foreign_listeners(port: int, pids: Iterable[int]) -> bool:
    """Whether another process listens where one of `pids` does (port and address). Without /proc: False."""
    listening = _listening(port)
    ours = {inode for pid in pids for inode in _sockets(pid)} & set(listening)
    addresses = {listening[inode] for inode in ours}
    return any(address in addresses for inode, address in listening.items() if inode not in ours)


def _listening(port: int) -> dict[int, str]:
    """Inode -> local address (as /proc writes it) of each socket that listens on the port."""
    found = {}
    for table in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        except OSError:
            continue
        for fields in map(str.split, lines):
            address, _, number = fields[1].rpartition(":")
            if int(number, 16) == port and fields[3] == "0A":  # TCP_LISTEN
                found[int(fields[9])] = address
    return found


def _sockets(pid: int) -> set[int]:
    """Inodes of the sockets that a process holds; none of one that has ended or is not ours to see."""
    found = set()
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):  # closed meanwhile
                if match := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(f"/proc/{pid}/fd/{name}")):
                    found.add(int(match[1]))
    return found


def server_url(host: str, port: int) -> str:
    """Where a client on this machine reaches a server bound to `host`."""
    reachable = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"
