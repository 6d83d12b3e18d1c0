# SPDX-License-Identifier: Apache-2.0
"""Tokenised once: the same rows as without a cache, found again only while nothing they follow from has changed."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import filelock
import numpy as np
import pytest
from processes import die_on_77
from tiny_chat import CHATML, CHATML_MARKED, byte_tokenizer
from tiny_train import write_rows

from nemo_automodel.components.datasets import encode_parallel
from nemo_automodel.components.datasets.encode import RowEncoder
from nemo_automodel.components.datasets.encode_parallel import encode_all
from nemo_automodel.components.datasets.token_cache import KEEP_DAYS, RowsWanted, load_or_encode
from nemo_automodel.errors import DataError

FOUND = "tokens from the cache"


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "rows.jsonl", 20)


def load(path: Path, cache: Path | str, *, encoder: RowEncoder | None = None, **wanted):
    """The encoded set and what was said."""
    said: list[str] = []
    encoder = encoder or RowEncoder(byte_tokenizer(CHATML), 64)
    got = load_or_encode(
        RowsWanted(str(path), "data.train", **wanted), encoder, cache_dir=str(cache), workers=1, say=said.append
    )
    return got, " ".join(said)


def content(encoded):
    return [(row.number, row.input_ids.tolist(), row.loss_mask.tolist()) for row in encoded.rows]


def test_the_second_time_the_rows_come_from_the_cache_and_are_the_same(tmp_path, rows):
    rows.write_text(rows.read_text() + "{}\n")
    plain, said = load(rows, "none", max_bad_row_share=0.1)
    first, first_said = load(rows, tmp_path / "cache", max_bad_row_share=0.1)
    again, again_said = load(rows, tmp_path / "cache", max_bad_row_share=0.1)
    assert not said and FOUND not in first_said and FOUND in again_said
    assert content(plain) == content(first) == content(again) and len(plain.rows) == 20
    assert plain.rows.digest == again.rows.digest
    assert replace(plain, rows=None) == replace(first, rows=None) == replace(again, rows=None)
    assert again.bad_rows[0].startswith("row 21 (rows.jsonl:21): no field")


def test_whatever_the_rows_follow_from_makes_them_anew(tmp_path, rows):
    cache = tmp_path / "cache"
    encoder = RowEncoder(byte_tokenizer(CHATML), 64)
    load(rows, cache, encoder=encoder)
    changes = {
        "length": replace(encoder, seq_length=32),
        "template": replace(encoder, tokenizer=byte_tokenizer(CHATML_MARKED)),
        "tokenizer": replace(encoder, tokenizer=byte_tokenizer(CHATML, merges=(("a", "l"),))),
        "reasoning": replace(encoder, mask_reasoning_content=True),
        "kwargs": replace(encoder, kwargs={"enable_thinking": False}),
    }
    for name, other in changes.items():
        assert FOUND not in load(rows, cache, encoder=other)[1], name
    assert FOUND not in load(rows, cache, max_rows=5)[1]
    assert FOUND in load(rows, cache, encoder=RowEncoder(byte_tokenizer(CHATML), 64))[1]
    moved = rows.rename(tmp_path / "elsewhere.jsonl")  # the content counts, not the name
    assert FOUND in load(moved, cache)[1]
    before = moved.stat()
    moved.write_text(moved.read_text().replace("gamma", "gummi"))  # as long as before, and dated back
    os.utime(moved, ns=(before.st_atime_ns, before.st_mtime_ns))
    changed, said = load(moved, cache)
    assert FOUND not in said and content(changed) == content(load(moved, "none")[0])


@pytest.mark.parametrize("file", ["ids.bin", "masks.bin", "index.npy", "facts.json"])
@pytest.mark.parametrize("damage", ["cut", "flipped", "gone"])
def test_a_damaged_cache_is_made_anew(tmp_path, rows, file, damage):
    wanted = content(load(rows, tmp_path / "cache")[0])
    (place,) = (tmp_path / "cache").glob(f"*/{file}")
    raw = bytearray(place.read_bytes())
    raw[len(raw) // 2] ^= 0x10
    place.write_bytes(raw if damage == "flipped" else raw[: len(raw) // 2])
    if damage == "gone":
        place.unlink()
    got, said = load(rows, tmp_path / "cache")
    assert "damaged" in said and content(got) == wanted
    assert FOUND in load(rows, tmp_path / "cache")[1]


def test_a_run_that_fails_or_dies_leaves_nothing_that_counts(tmp_path, rows):
    rows.write_text('{"messages": []}\n')
    with pytest.raises(DataError):
        load(rows, tmp_path / "cache")
    assert not [p for p in (tmp_path / "cache").iterdir() if p.is_dir()]


def test_a_cache_that_cannot_be_written_costs_a_warning_and_not_the_run(tmp_path, rows):
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file" / "cache", "~nobody-of-this-name/cache"):  # as `~` for a user id without a name
        got, said = load(rows, place)
        assert f"warning: no token cache in {place}" in said and len(got.rows) == 20


def test_a_full_disk_is_said(tmp_path, rows, monkeypatch):
    def full(*_args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(DataError, match="No space left.*data.cache_dir=PATH on another disk, or data.cache_dir=none"):
        load(rows, tmp_path / "cache")


def test_two_at_once_tokenise_once(tmp_path, rows):
    """The second waits for the lock, says so, and finds what the first made."""
    cache = tmp_path / "cache"
    load(rows, cache)
    (lock,) = cache.glob("*.lock")
    held = filelock.FileLock(lock, thread_local=False)
    held.acquire()
    said: list[str] = []
    encoder = RowEncoder(byte_tokenizer(CHATML), 64)

    def second():
        load_or_encode(RowsWanted(str(rows), "data.train"), encoder, cache_dir=str(cache), workers=1, say=said.append)

    thread = threading.Thread(target=second)
    thread.start()
    thread.join(timeout=0.5)
    assert thread.is_alive()
    held.release()
    thread.join(timeout=60)
    assert "waiting for another run" in said[0] and FOUND in said[1]


def test_several_processes_give_the_rows_of_one(tmp_path, monkeypatch):
    monkeypatch.setattr(encode_parallel, "ALONE_S", 0.0)
    path = write_rows(tmp_path / "rows.jsonl", 300)
    path.write_text(path.read_text() + "{}\n")
    encoder = RowEncoder(byte_tokenizer(CHATML), 64)
    wanted, _ = load(path, "none", encoder=encoder)
    said: list[str] = []
    got = load_or_encode(RowsWanted(str(path), "data.train"), encoder, cache_dir="none", workers=2, say=said.append)
    assert content(got) == content(wanted) and replace(got, rows=None) == replace(wanted, rows=None)


def test_a_process_that_dies_costs_no_row():
    got = list(encode_all(range(1000), die_on_77, workers=2, alone_s=0))
    assert got == [(i, str(i)) for i in range(1000)]


def test_a_source_is_not_read_far_ahead():
    read = []

    def source():
        for i in range(10_000):
            read.append(i)
            yield i

    rows = encode_all(source(), str, workers=2, alone_s=0)
    assert [next(rows) for _ in range(3)] == [(0, "0"), (1, "1"), (2, "2")]
    rows.close()
    assert len(read) <= encode_parallel.CHUNK * (2 * encode_parallel.AHEAD + 2)


def test_processes_end_with_a_parent_that_is_killed(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(
        "import os\n"
        "from nemo_automodel.components.datasets import encode_parallel\n"
        "def pids(_): return os.getpid()\n"
        "if __name__ == '__main__':\n"
        "    encode_parallel.CHUNK = 1\n"
        "    rows = encode_parallel.encode_all(range(10**9), pids, 2, 0)\n"
        "    print(*{pid for _, (_, pid) in zip(range(9), rows)}, flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    children = [int(pid) for pid in done.stdout.split()]
    assert done.returncode == -9 and children
    for pid in children:
        for _ in range(100):
            if not Path(f"/proc/{pid}").exists():
                break
            threading.Event().wait(0.1)
        else:
            pytest.fail(f"process {pid} outlives its parent")


def test_what_was_not_opened_for_long_is_removed_but_for_what_is_in_use(tmp_path, rows):
    cache, old = tmp_path / "cache", time.time() - (KEEP_DAYS + 1) * 24 * 3600
    kept, _ = load(rows, cache)  # opened again below
    held, _ = load(rows, cache, max_rows=5)
    load(rows, cache, max_rows=6)
    entries = {len(np.load(facts.parent / "index.npy")[0]): facts.parent for facts in cache.glob("*/facts.json")}
    (cache / "mine").mkdir()
    for folder in (*entries.values(), cache / "mine"):
        os.utime(folder, (old, old))
    assert FOUND in load(rows, cache)[1]
    with filelock.FileLock(cache / f"{entries[5].name}.lock", thread_local=False):
        _, said = load(rows, cache, max_rows=7)
    assert f"removed {entries[6]} from the cache: not opened for {KEEP_DAYS} days" in said
    assert {n for n, folder in entries.items() if folder.exists()} == {20, 5} and (cache / "mine").exists()
    load(rows, cache, max_rows=8)
    assert not entries[5].exists()
    assert len(content(held)) == 5 and len(content(kept)) == 20  # mapped already


def test_a_table_in_memory_is_never_taken_from_the_cache(tmp_path, monkeypatch):
    """It has no files to tell by whether it is the same."""
    import datasets  # here: the processes that other tests start import this file as well

    monkeypatch.setattr(datasets.config, "IN_MEMORY_MAX_SIZE", 1 << 30)
    for name in ("a", "b"):
        said_by = [{"role": "user", "content": "q"}, {"role": "assistant", "content": name}]
        datasets.Dataset.from_list([{"messages": said_by}]).save_to_disk(tmp_path / name)
    first, second = (content(load(tmp_path / name, tmp_path / "cache")[0]) for name in ("a", "b"))
    assert first != second
