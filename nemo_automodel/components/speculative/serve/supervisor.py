# SPDX-License-Identifier: Apache-2.0
"""A small process between us and the server, so that the server never outlives us, whatever ends us.

Run as a script (`python -I supervisor.py LIFELINE_FD GRACE_S -- argv...`), standard library only. It leads a session of
its own. It stops everything in that session when it gets SIGTERM, when the other end of the lifeline pipe closes (our
process ended, SIGKILL included), or when the server itself ends. vLLM's engine core is a grandchild that a killed API
server leaves behind with the GPU's memory; as a child subreaper (prctl(2)) the supervisor inherits and ends it.
Its exit code is the server's (128 + N for signal N).
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
POLL_S = 0.05


def session_members(session: int) -> dict[int, str]:
    """Living processes of a session and all their descendants: pid -> command line. Zombies do not count."""
    stats = {int(entry.name): _stat(entry) for entry in Path("/proc").iterdir() if entry.name.isdigit()}
    living = {pid: stat for pid, stat in stats.items() if stat and stat[0] not in "ZX"}
    members = {pid for pid, (_, _, sid) in living.items() if sid == session}
    grown = True
    while grown:
        more = {pid for pid, (_, parent, _) in living.items() if parent in members or parent == session} - members
        members |= more
        grown = bool(more)
    return {pid: _cmdline(pid) for pid in sorted(members)}


def _stat(entry: Path) -> tuple[str, int, int] | None:
    """(state, parent pid, session id) of one process; None when it ended meanwhile."""
    try:
        fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return (fields[0], int(fields[1]), int(fields[3])) if len(fields) > 3 else None


def _cmdline(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()[:120]
    except OSError:
        return "(ended)"


def signal_all(pids: list[int], number: int) -> None:
    """Send a signal to each pid; one that has ended, or is another user's, must not save the others."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):
            continue


def _prepare_child() -> None:
    """In the server's process before exec: a group of its own, and SIGTERM should the supervisor be killed."""
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _others() -> list[int]:
    return [pid for pid in session_members(os.getpid()) if pid != os.getpid()]


def _reap() -> None:
    """Collect inherited orphans, so that none stays a zombie. The server itself is collected by Popen before."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return


def _wait(done, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def _stop(server: subprocess.Popen, grace: float) -> None:
    """SIGTERM to the server, wait; SIGTERM to what is left, wait a little; SIGKILL until nothing is left."""
    if server.poll() is None:
        server.terminate()
        _wait(lambda: server.poll() is not None, grace)
    signal_all(_others(), signal.SIGTERM)
    _wait(lambda: server.poll() is not None and not _others(), min(grace, 5.0))
    signal_all(_others(), signal.SIGKILL)
    _wait(lambda: server.poll() is not None and not _others(), 10.0)
    _reap()


def _watch(server: subprocess.Popen, lifeline: int, wakeups: int, stop_asked: list[int]) -> None:
    """Return when the server has ended, a stop was asked for, or the lifeline has closed. Sleeps in between."""
    while server.poll() is None and not stop_asked:
        readable, _, _ = select.select([lifeline, wakeups], [], [])
        if wakeups in readable:
            os.read(wakeups, 4096)
        if lifeline in readable and not os.read(lifeline, 64):
            return


def _install_signals(stop_asked: list[int]) -> int:
    """SIGTERM and SIGINT ask for a stop; they and SIGCHLD also make the returned descriptor readable."""
    readable, writable = os.pipe()
    os.set_blocking(writable, False)
    signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda signum, _frame: stop_asked.append(signum))
    signal.signal(signal.SIGCHLD, lambda _signum, _frame: None)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    return readable


def main(argv: list[str]) -> int:
    lifeline, grace, command = int(argv[0]), float(argv[1]), argv[3:]
    stop_asked: list[int] = []
    wakeups = _install_signals(stop_asked)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_prepare_child)
    except OSError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 127
    _watch(server, lifeline, wakeups, stop_asked)
    _stop(server, grace)
    code = server.returncode if server.returncode is not None else -signal.SIGKILL
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
