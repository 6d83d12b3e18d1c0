# SPDX-License-Identifier: Apache-2.0
"""Encode rows in several processes, in the order of the source; the result is that of one process."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from itertools import chain, islice
from typing import Any, Callable, Iterable, Iterator, TypeVar

logger = logging.getLogger("nemo_automodel.data")
Row = TypeVar("Row")
Outcome = TypeVar("Outcome")

ALONE_S = 10.0  # the calling process encodes alone for so long: others take seconds of CPU each to start
CHUNK = 64  # rows handed over together
AHEAD = 3  # chunks waiting per process: a huge source is never read far ahead
MOST_WORKERS = 16


def default_workers() -> int:
    """The CPU cores that this process may use, up to MOST_WORKERS."""
    return max(1, min(MOST_WORKERS, len(os.sched_getaffinity(0))))


def encode_all(
    rows: Iterable[Row], encode: Callable[[Row], Outcome], workers: int, alone_s: float | None = None
) -> Iterator[tuple[Row, Outcome]]:
    """Each row with `encode(row)`, in order; after `alone_s` seconds in `workers` processes, where they are 2 or more.

    `encode` must be picklable then.
    """
    source = iter(rows)
    parallel = workers > 1 and not multiprocessing.current_process().daemon  # those may have no children
    until = time.monotonic() + (ALONE_S if alone_s is None else alone_s)
    while not parallel or time.monotonic() < until:
        try:
            row = next(source)
        except StopIteration:
            return
        yield row, encode(row)
    head = list(islice(source, CHUNK))
    if head:
        yield from _in_processes(head, source, encode, workers)


def _in_processes(head: list[Any], source: Iterator[Any], encode: Callable[[Any], Any], workers: int) -> Iterator[Any]:
    pool = ProcessPoolExecutor(
        workers, mp_context=multiprocessing.get_context("spawn"), initializer=_begin, initargs=(encode,)
    )
    waiting: deque[tuple[list[Any], Future]] = deque()
    try:
        while head or waiting:
            if head:
                waiting.append((head, pool.submit(_encode_chunk, head)))
                head = list(islice(source, CHUNK))
                if head and len(waiting) < workers * AHEAD:
                    continue
            yield from zip(waiting[0][0], waiting[0][1].result(), strict=True)
            waiting.popleft()
        return
    except BrokenExecutor:  # a process died (memory), or cannot load a tokenizer that has code of its own
        logger.warning("a tokenising process died; going on with one process")
    finally:  # an error, a signal, or a reader who has seen enough
        pool.shutdown(wait=True, cancel_futures=True)
    unseen = [row for chunk, _ in waiting for row in chunk]
    left = [] if waiting and waiting[-1][0] is head else head
    for row in chain(unseen, left, source):
        yield row, encode(row)


_encode: Callable[[Any], Any]  # of this process


def _begin(encode: Callable[[Any], Any]) -> None:
    """In each process: one thread, no part in the terminal's Ctrl-C, and an end with the parent, whatever ends it."""
    global _encode
    _encode = encode
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def _encode_chunk(rows: list[Any]) -> list[Any]:
    return [_encode(row) for row in rows]
