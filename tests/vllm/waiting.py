# SPDX-License-Identifier: Apache-2.0
"""Wait until something comes about."""

from __future__ import annotations

import time
from typing import Callable, TypeVar

T = TypeVar("T")


def wait_for(value: Callable[[], T], seconds: float) -> T:
    """The first truthy answer of `value`."""
    deadline = time.monotonic() + seconds
    while not (found := value()):
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.2)
    return found
