# SPDX-License-Identifier: Apache-2.0
"""When is a server ready? When it has done what it is for: answered as our model, and speculated.

Two known faults leave /health green (duplicate aux layers, a missing method: vllm 0.17 to 0.32), so a real completion
and growing spec-decode counters are asked for. There is no time limit while the process lives: loading a large model
may take long, and a dead server is noticed at once.
"""

from __future__ import annotations

import threading
import time
from typing import Callable

import httpx

from nemo_automodel.components.speculative.serve.causes import last_line
from nemo_automodel.components.speculative.serve.client import ServerClient
from nemo_automodel.components.speculative.serve.port import foreign_listeners
from nemo_automodel.components.speculative.serve.process import ServerProcess
from nemo_automodel.errors import LaunchError

POLL_S = 0.2
PROGRESS_S = 10.0
DEATH_S = 3.0  # a dying server's last words may come after its last answer
DYING_S = 40.0  # for the rest of a server that no longer answers: its supervisor ends it
COUNTER_LAG_S = 10.0  # the counters are written after the answer has been sent
PROBE_PROMPT = "Count: one two three four"
PROBE_TOKENS = 16


def wait_ready(process: ServerProcess, client: ServerClient, *, speculative: bool, say: Callable[[str], None]) -> float:
    """Wait until the server has proven itself; seconds it took.

    Raises:
        LaunchError: it died, answers as another model, fails a completion, or does not speculate.
    """
    start = time.monotonic()
    with _Heartbeat(start, process, say) as beat:
        _wait_healthy(process, client)
        _refuse_another(process, client)
        _check_model(process, client)
        beat.awaited = " to answer a first completion"
        _probe(process, client, speculative)
    return time.monotonic() - start


class _Heartbeat:
    """A progress line every PROGRESS_S seconds, also while a request is under way."""

    def __init__(self, start: float, process: ServerProcess, say: Callable[[str], None]) -> None:
        self._start, self._process, self._say = start, process, say
        self.awaited = ""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def _beat(self) -> None:
        while not self._over.wait(PROGRESS_S):
            waited = time.monotonic() - self._start
            self._say(f"waiting for vLLM{self.awaited}, {waited:.0f} s: {last_line(self._process.output.tail())}")

    def __enter__(self) -> _Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join()


def _wait_healthy(process: ServerProcess, client: ServerClient) -> None:
    while not client.healthy():
        if process.exit_code() is not None:
            raise _died(process)
        time.sleep(POLL_S)


def _refuse_another(process: ServerProcess, client: ServerClient) -> None:
    """Two servers can share a port (SO_REUSEPORT, which vLLM sets), and each then gets some of the requests."""
    if foreign_listeners(client.port, process.members()):
        raise LaunchError(
            f"another server listens on port {client.port}, too",
            where="serve.port",
            remedy="stop it, or serve.port=0 for a free one",
        )


def _check_model(process: ServerProcess, client: ServerClient) -> None:
    try:
        names = client.models()
    except httpx.HTTPError as error:
        raise _failed(process, f"/v1/models does not answer: {error}") from error
    if client.model not in names:
        raise LaunchError(
            f"{client.url} answers as {', '.join(names) or 'no model'}, not as {client.model}",
            where="serve.port",
            remedy="another server listens there: choose another port, or serve.port=0 for a free one",
        )


def _probe(process: ServerProcess, client: ServerClient, speculative: bool) -> None:
    try:
        before = client.counters() if speculative else None
        drafts_before = before.num_drafts if before else 0
        client.complete(PROBE_PROMPT, PROBE_TOKENS)
        if not speculative:
            return
        deadline = time.monotonic() + COUNTER_LAG_S
        while (after := client.counters()) is None or after.num_drafts <= drafts_before:
            if time.monotonic() > deadline:
                raise _not_speculating(process, after is None)
            time.sleep(POLL_S)
    except httpx.HTTPError as error:
        raise _failed(process, f"its first completion failed ({error})") from error


def _not_speculating(process: ServerProcess, absent: bool) -> LaunchError:
    what = "keeps no spec-decode counters" if absent else "drafted nothing for a completion"
    return LaunchError(
        f"the server answers but {what}: it does not speculate",
        where="serve",
        remedy=f"see {process.output}; the draft was not taken for one",
    )


def _died(process: ServerProcess) -> LaunchError:
    return _error(process, "vLLM ended before it was ready, ")


def explain_death(process: ServerProcess, client: ServerClient) -> LaunchError | None:
    """After a request that failed: how the server died, or None when it lives."""
    start = time.monotonic()
    while process.exit_code() is None:
        waited = time.monotonic() - start
        if waited > DYING_S or waited > DEATH_S and client.healthy():
            return None
        time.sleep(POLL_S)
    return _error(process, "the server died at work, ")


def _failed(process: ServerProcess, what: str) -> LaunchError:
    """An answer went wrong; the cause is in the server's output, which may lag behind the answer a little."""
    deadline = time.monotonic() + 2.0
    while process.exit_code() is None and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return _error(process, f"vLLM started, but {what}: ")


def _error(process: ServerProcess, what: str) -> LaunchError:
    cause = process.cause()
    see = f"see {process.output}"
    return LaunchError(f"{what}{cause.line}", where="serve", remedy=f"{cause.remedy} ({see})" if cause.remedy else see)
