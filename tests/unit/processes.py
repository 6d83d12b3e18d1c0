# SPDX-License-Identifier: Apache-2.0
"""A function in several forked processes that meet as a process group: no import is paid twice."""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from typing import Any, Callable


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def in_processes(size: int, work: Callable[[Any], Any], timeout_s: float = 120) -> list[Any]:
    """`work(world)` in each of `size` processes. What each returned; the exit code of one that died; its traceback."""
    context = multiprocessing.get_context("fork")
    port, queue = free_port(), context.SimpleQueue()
    children = [context.Process(target=_one, args=(rank, size, port, work, queue)) for rank in range(size)]
    for child in children:
        child.start()
    answers: dict[int, Any] = {}
    try:
        for rank, child in enumerate(children):
            child.join(timeout_s)
            assert child.exitcode is not None, f"process {rank} hangs"
            answers[rank] = child.exitcode
    finally:
        for child in children:
            child.kill()
    while not queue.empty():
        rank, answer = queue.get()
        answers[rank] = answer
    return [answers[rank] for rank in range(size)]


def _one(rank: int, size: int, port: int, work: Callable[[Any], Any], queue: Any) -> None:
    from nemo_automodel.components.speculative.train.world import join

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    try:
        queue.put((rank, work(join())))
    except BaseException:
        queue.put((rank, traceback.format_exc()))


def die_on_77(row: int) -> str:
    """`str`, in a process of its own but for one row; here, where a new process has little to import."""
    if row == 77 and multiprocessing.parent_process() is not None:
        os._exit(1)
    return str(row)
