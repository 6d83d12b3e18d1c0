# SPDX-License-Identifier: Apache-2.0
"""How fast rows are tokenised, read back from the cache, and batched.

    python benchmarks/token_cache.py [--rows 20000] [--workers 2] [--target MODEL] [--data CHATS]

Without --data: conversations of one to six turns drawn from the quickstart's chats, the same every time. CPU seconds
count the processes that help. Nothing is left behind.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable

import numpy as np
from rich.console import Console
from rich.table import Table

from nemo_automodel.components.datasets import encode_parallel
from nemo_automodel.components.datasets.collate import collate, plan_epoch
from nemo_automodel.components.datasets.encode import EncodedSet, RowEncoder
from nemo_automodel.components.datasets.packing import PackedRows, plan_lines
from nemo_automodel.components.datasets.token_cache import RowsWanted, load_or_encode
from nemo_automodel.components.datasets.tokenizer import load_tokenizer

REPO = Path(__file__).parents[1]
QUICKSTART = REPO / "recipes" / "quickstart"


@dataclass(frozen=True)
class Cost:
    """Seconds of one stage."""

    wall_s: float
    cpu_s: float


def measure(work: Callable[[], Any]) -> tuple[Any, Cost]:
    """The result and what it took, children included once they have ended."""
    before, began = _cpu_s(), time.perf_counter()
    result = work()
    return result, Cost(time.perf_counter() - began, _cpu_s() - before)


def _cpu_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def write_chats(path: Path, count: int) -> None:
    """Conversations of one to six turns; deterministic."""
    source = (QUICKSTART / "data" / "train.jsonl").read_text(encoding="utf-8").splitlines()
    turns = [json.loads(line)["messages"][-2:] for line in source]
    rng = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            chat = [turn for pair in rng.choices(turns, k=rng.randint(1, 6)) for turn in pair]
            file.write(json.dumps({"messages": chat}) + "\n")


def batch_all(lines: Any, lengths: list[int], micro_batch_size: int) -> float:
    """Collate one epoch; returns the share of the tensors' positions that are padding."""
    full = used = 0
    for chosen in plan_epoch(lengths, micro_batch_size=micro_batch_size, seed=0, epoch=0):
        batch = collate([lines[i] for i in chosen], pad_token_id=0)
        full, used = full + batch.input_ids.numel(), used + int(batch.lengths.sum())
    return 1 - used / full


def show_padding(encoded: EncodedSet, seq_length: int, micro_batch_size: int) -> str:
    """Padding of batches in random order, sorted by length (as trained), and packed."""
    rows = encoded.rows
    order = np.random.default_rng(0).permutation(rows.lengths)
    parts = [order[i : i + micro_batch_size] for i in range(0, len(order), micro_batch_size)]
    naive = 1 - order.sum() / sum(len(part) * part.max() for part in parts)
    by_length = batch_all(rows, rows.lengths.tolist(), micro_batch_size)
    packed = PackedRows(rows, plan_lines(rows.lengths, capacity=seq_length, seed=0))
    lines = batch_all(packed, packed.lengths.tolist(), micro_batch_size)
    return (
        f"padding at micro_batch_size={micro_batch_size}: random order {naive:.1%}, sorted by length (the default) "
        f"{by_length:.1%}, packed {lines:.1%} ({len(rows)} rows in {len(packed)} lines of {seq_length})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seq-length", type=int, default=2048)
    parser.add_argument("--target", default=str(QUICKSTART / "target"))
    parser.add_argument("--data", help="chats; default: made from the quickstart's")
    given = parser.parse_args()
    encode_parallel.ALONE_S = 0.0  # processes from the first row on, where several are asked for
    encoder = RowEncoder(load_tokenizer(given.target), given.seq_length)
    table = Table("stage", "rows/s", "tokens/s", "tokens per CPU s", "wall s", "CPU s")
    with tempfile.TemporaryDirectory() as folder:
        data = given.data or str(Path(folder) / "chats.jsonl")
        if given.data is None:
            write_chats(Path(data), given.rows)
        wanted = RowsWanted(data, "--data", max_rows=given.rows)

        def load(cache: str, workers: int) -> EncodedSet:
            return load_or_encode(wanted, encoder, cache_dir=cache, workers=workers, say=lambda _line: None)

        stages = [
            ("tokenise, 1 process", lambda: load("none", 1)),
            (f"tokenise, {given.workers} processes", lambda: load("none", given.workers)),
            ("tokenise into the cache, 1 process", lambda: load(folder, 1)),
            ("open the cache (checked whole)", lambda: load(folder, 1)),
        ]
        for name, work in stages:
            encoded, cost = measure(work)
            _add(table, name, encoded, cost)
        _, cost = measure(lambda: batch_all(encoded.rows, encoded.rows.lengths.tolist(), 8))
        _add(table, "batch one epoch from the cache", encoded, cost)
        size = sum(file.stat().st_size for file in Path(folder).glob("*/*"))
        Console().print(table)
        print(f"{len(encoded.rows)} rows, {encoded.tokens:,} tokens, cache {size / 1e6:.1f} MB")
        print(show_padding(encoded, given.seq_length, 8))


def _add(table: Table, name: str, encoded: EncodedSet, cost: Cost) -> None:
    rates = (len(encoded.rows) / cost.wall_s, encoded.tokens / cost.wall_s, encoded.tokens / max(cost.cpu_s, 1e-3))
    table.add_row(name, *(f"{rate:,.0f}" for rate in rates), f"{cost.wall_s:.1f}", f"{cost.cpu_s:.1f}")


if __name__ == "__main__":
    main()
