# SPDX-License-Identifier: Apache-2.0
"""Where the server listens: a bind test before anything heavy, and the URL for a client on this machine."""

from __future__ import annotations

import socket

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
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise ConfigError(f"{host}: {error.strerror}", where="serve.host", remedy="serve.host=127.0.0.1") from error
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


def server_url(host: str, port: int) -> str:
    """Where a client on this machine reaches a server bound to `host`."""
    reachable = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"
