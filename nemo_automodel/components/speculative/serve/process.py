# SPDX-License-Identifier: Apache-2.0
"""A server process: started in a session of its own, watched, and stopped so that nothing of it is left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from nemo_automodel.components.speculative.serve import supervisor
from nemo_automodel.components.speculative.serve.causes import Cause, read_cause
from nemo_automodel.components.speculative.serve.compile_cache import share_model_infos
from nemo_automodel.components.speculative.serve.types import LaunchCommand
from nemo_automodel.errors import LaunchError

GRACE_S = 30.0  # for the server's own shutdown after SIGTERM
TAIL_BYTES = 256 * 1024
DRAIN_S = 5.0  # longest wait for output that is under way


class LogFile:
    """Output goes to a file; `tail` reads its end."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def open(self) -> int:
        return os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)

    def tail(self) -> str:
        try:
            with self.path.open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
                return file.read().decode(errors="replace")
        except OSError:  # somebody took the log away
            return ""

    def drain(self) -> None:
        """All of it is in the file already."""

    def __str__(self) -> str:
        return str(self.path)


class PassThrough:
    """Output goes on to a text stream as it comes; `tail` remembers the last lines."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._lines = stream, deque[str](maxlen=2000)
        self._thread: threading.Thread | None = None

    def open(self) -> int:
        read_end, write_end = os.pipe()
        self._thread = threading.Thread(target=self._copy, args=(read_end,), daemon=True)
        self._thread.start()
        return write_end

    def _copy(self, read_end: int) -> None:
        with os.fdopen(read_end, encoding="utf-8", errors="replace") as source:
            for line in source:
                self._lines.append(line)
                with contextlib.suppress(OSError, ValueError):  # our reader is gone: the server must not block for it
                    self._stream.write(line)
                    self._stream.flush()

    def tail(self) -> str:
        return "".join(list(self._lines))

    def drain(self) -> None:
        """Wait for the last lines of a server that has ended; the pipe may still hold them."""
        if self._thread is not None:
            self._thread.join(DRAIN_S)

    def __str__(self) -> str:
        return "the output above"


class ServerProcess:
    """One server under its supervisor. Use as a context: leaving it stops everything of it.

    Raises (on leaving, or from `stop`):
        LaunchError: a process of the server's session survived SIGKILL; pids are named.
    """

    def __init__(self, command: LaunchCommand, output: LogFile | PassThrough, *, grace_s: float = GRACE_S) -> None:
        self.output, self._grace = output, grace_s
        share_model_infos(command.env)
        read_end, self._lifeline = os.pipe()
        sink = output.open()
        argv = [sys.executable, "-I", supervisor.__file__, str(read_end), str(grace_s), "--", *command.argv]
        try:
            # isolated (-I): this folder's types.py must not shadow the standard library's
            self._popen = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, env=child_environment(command),
                start_new_session=True, pass_fds=(read_end,),
            )  # fmt: skip
        finally:
            os.close(read_end)
            os.close(sink)

    @property
    def pid(self) -> int:
        """Pid of the supervisor, which is also the session's id: SIGTERM to it stops the server and all of its own."""
        return self._popen.pid

    def members(self) -> list[int]:
        """Pids of everything that was started."""
        return list(supervisor.session_members(self.pid))

    def exit_code(self) -> int | None:
        """None while the server lives; 128 + N when signal N ended it."""
        return self._popen.poll()

    def wait(self) -> int:
        """Wait for the server's own end."""
        return self._popen.wait()

    def cause(self) -> Cause:
        """What the output says of the server's death (with the exit code), or of what is wrong while it lives."""
        code = self.exit_code()
        if code is not None:
            self.output.drain()
        cause = read_cause(self.output.tail(), code)
        return cause if code is None else replace(cause, line=f"exit code {code}: {cause.line}")

    def stop(self) -> None:
        """Stop the server and verify that nothing of its session is left; a second interrupt kills at once."""
        try:
            self._popen.terminate()
            self._popen.wait(timeout=2 * self._grace + 20)
        except subprocess.TimeoutExpired:
            self._kill()
        except BaseException:
            self._kill()
            raise
        finally:
            self._close_lifeline()
        self._verify_gone()
        self.output.drain()

    def _kill(self) -> None:
        supervisor.signal_all(list(supervisor.session_members(self.pid)), signal.SIGKILL)
        self._popen.wait()

    def _close_lifeline(self) -> None:
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1

    def _verify_gone(self) -> None:
        deadline = time.monotonic() + 5.0
        while left := supervisor.session_members(self.pid):
            supervisor.signal_all(list(left), signal.SIGKILL)
            if time.monotonic() > deadline:
                names = ", ".join(f"{pid} ({cmd})" for pid, cmd in left.items())
                raise LaunchError(
                    f"processes survived the stop: {names}", where="serve", remedy=f"kill -9 {' '.join(map(str, left))}"
                )
            time.sleep(0.05)

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()


def child_environment(command: LaunchCommand) -> dict[str, str]:
    """Our environment without `unset` (torchrun's variables), with `env` added."""
    inherited = {key: value for key, value in os.environ.items() if key not in command.unset}
    return inherited | dict(command.env)
