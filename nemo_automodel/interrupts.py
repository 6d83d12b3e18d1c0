# SPDX-License-Identifier: Apache-2.0
"""SIGINT and SIGTERM as an error, so that `with` blocks clean up behind what they started."""

from __future__ import annotations

import contextlib
import signal
import threading
from types import FrameType
from typing import Iterator

from nemo_automodel.errors import Interrupted


@contextlib.contextmanager
def interruptible(*, during: str = "", where: str, remedy: str) -> Iterator[None]:
    """Inside, SIGINT and SIGTERM raise `Interrupted` (exit code 130); afterwards the handlers of before are back.

    `during` follows "SIGINT received" in the message.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread has signals
        return

    def stop(number: int, _frame: FrameType | None) -> None:
        found = f"{signal.Signals(number).name} received {during}".rstrip()
        raise Interrupted(found, where=where, remedy=remedy)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
