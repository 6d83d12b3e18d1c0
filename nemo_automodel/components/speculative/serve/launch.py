# SPDX-License-Identifier: Apache-2.0
"""Start a server and know that it works: a benchmark child inside a context, or in the foreground until it ends."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Callable, Iterator

from nemo_automodel.components.speculative.serve.client import ServerClient
from nemo_automodel.components.speculative.serve.port import server_url
from nemo_automodel.components.speculative.serve.process import LogFile, PassThrough, ServerProcess, child_environment
from nemo_automodel.components.speculative.serve.readiness import explain_death, wait_ready
from nemo_automodel.components.speculative.serve.types import LaunchCommand, ServerInfo
from nemo_automodel.errors import LaunchError
from nemo_automodel.interrupts import interruptible

Say = Callable[[str], None]


def served_name(argv: tuple[str, ...]) -> str:
    """The model name that a server started with this command line answers to."""
    flag = "--served-model-name" if "--served-model-name" in argv else "--model"
    return argv[argv.index(flag) + 1]


def stopping_servers() -> contextlib.AbstractContextManager[None]:
    """Inside, SIGINT and SIGTERM raise `Interrupted` (exit code 130), so that contexts stop their servers."""
    return interruptible(where="serve", remedy="the server was stopped; run the same command again")


@contextlib.contextmanager
def running_server(
    command: LaunchCommand, *, host: str, port: int, log: Path, speculative: bool, say: Say
) -> Iterator[tuple[ServerClient, ServerInfo]]:
    """A proven server for the length of the block, output in `log`; afterwards no process of it is left.

    Raises:
        LaunchError: it does not become ready (see `wait_ready`), dies inside the block (where something was asked of
            it and failed), or does not go away.
    """
    output = LogFile(log)
    with ServerProcess(command, output) as process, _client(command, host, port) as client:
        say(f"starting vLLM, pid {process.pid}, output in {log}")
        ready_s = wait_ready(process, client, speculative=speculative, say=say)
        say(f"ready after {ready_s:.0f} s at {client.url}")
        try:
            yield client, ServerInfo(client.url, process.pid, round(ready_s, 2))
        except LaunchError as error:
            with _client(command, host, port) as probe:  # the first one may be closed
                raise explain_death(process, probe) or error from error


def serve_foreground(
    command: LaunchCommand,
    *,
    host: str,
    port: int,
    say: Say,
    on_ready: Callable[[ServerInfo], None],
    speculative: bool = True,
) -> int:
    """Run the server until it ends, its output passing through on stderr; its exit code.

    With `speculative`, ready means that vLLM's counters grow; SGLang has none.

    Raises:
        LaunchError: it does not become ready.
        Interrupted: SIGINT or SIGTERM; the server has been stopped.
    """
    with stopping_servers(), ServerProcess(command, PassThrough(sys.stderr)) as process:
        with _client(command, host, port) as client:
            ready_s = wait_ready(process, client, speculative=speculative, say=say)
            on_ready(ServerInfo(client.url, process.pid, round(ready_s, 2)))
            say(f"ready after {ready_s:.0f} s: {client.url}/v1 serves {client.model}; Ctrl-C stops it")
        return process.wait()


def _client(command: LaunchCommand, host: str, port: int) -> ServerClient:
    key = child_environment(command).get("VLLM_API_KEY")  # vllm/envs.py
    return ServerClient(server_url(host, port), served_name(command.argv), api_key=key)
