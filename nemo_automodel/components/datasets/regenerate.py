# SPDX-License-Identifier: Apache-2.0
"""Let the target answer the prompts of a data set, so that a draft is trained on what the target really says.

    python -m nemo_automodel.components.datasets.regenerate --data F --out G.jsonl --base-url http://HOST:PORT/v1
    python -m nemo_automodel.components.datasets.regenerate --data F --out G.jsonl --target MODEL [-- vLLM flags]

The second form starts a vLLM for the time of the work. Killed and run again, it asks only what is missing. See
docs/regenerate.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterable, Mapping, Sequence

from nemo_automodel.components.datasets.regenerate_ask import Answered, Asker, RowRefused, Sampling
from nemo_automodel.components.datasets.regenerate_progress import Progress
from nemo_automodel.components.datasets.regenerate_server import KEY_VARIABLE, served_target
from nemo_automodel.components.datasets.regenerate_store import Store, Tally
from nemo_automodel.components.datasets.rows import BadRow, ChatRow, read_rows
from nemo_automodel.errors import ConfigError, DataError, Interrupted, LaunchError, UserError
from nemo_automodel.interrupts import interruptible

PROG = "python -m nemo_automodel.components.datasets.regenerate"
FAILED_IN_A_ROW = 20  # without one answer between them: it is the server, not the rows
NAMED = 5  # failed rows in one message
AGAIN = "run the same command again: finished rows are kept"


@dataclass(frozen=True)
class Source:
    """The data set, as `read_rows` takes it."""

    path: str
    split: str
    column: str | None
    limit: int | None

    def rows(self) -> Iterable[ChatRow | BadRow]:
        """Raises DataError: nothing readable there."""
        return read_rows(self.path, where="--data", split=self.split, column=self.column, max_rows=self.limit)


@dataclass(frozen=True)
class Limits:
    """How hard the server is asked and what may go wrong."""

    concurrency: int
    timeout_s: float
    max_failed_share: float
    drop_cut: bool


def regenerate(source: Source, asker: Asker, store: Store, limits: Limits, progress: Progress) -> Tally:
    """Ask for every row that `store` lacks and write the output.

    Raises:
        LaunchError: the server is gone or fails on everything; finished rows stay in the store.
        Interrupted: SIGINT or SIGTERM; the same.
        DataError: the data is unreadable, or has changed since rows of it were answered.
    """
    tally, work = Tally(), _Work(asker, store, limits, progress)
    with interruptible(where="regenerate", remedy=AGAIN), ThreadPoolExecutor(limits.concurrency) as pool:
        try:
            for row in source.rows():
                if isinstance(row, BadRow):
                    work.fail(tally, row.number, row.reason)
                elif store.has(row):
                    progress.skip()
                else:
                    work.make_room(tally)
                    work.pending[pool.submit(asker.answer, row)] = row
            while work.pending:
                work.collect(tally)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            asker.close()  # ends the requests that are still under way
            raise
    store.finish(tally)
    return tally


class _Work:
    """Requests under way."""

    def __init__(self, asker: Asker, store: Store, limits: Limits, progress: Progress) -> None:
        self.asker, self.store, self.limits, self.progress = asker, store, limits, progress
        self.pending: dict[Future[Answered], ChatRow] = {}
        self.failed_in_a_row = 0

    def make_room(self, tally: Tally) -> None:
        while len(self.pending) >= self.limits.concurrency:
            self.collect(tally)

    def collect(self, tally: Tally) -> None:
        """Take what is finished, or say how far it is after a second without."""
        finished, _ = wait(self.pending, timeout=1.0, return_when=FIRST_COMPLETED)
        for future in finished:
            row = self.pending.pop(future)
            try:
                answered = future.result()
            except RowRefused as refused:
                self.fail(tally, row.number, str(refused))
                self._refuse_hopeless(str(refused))
            else:
                self.failed_in_a_row = 0
                self._keep(tally, answered)
        self.progress.show()

    def _keep(self, tally: Tally, answered: Answered) -> None:
        drop = "an answer was cut by --max-tokens" if self.limits.drop_cut and answered.cut else None
        self.store.add(answered, drop=drop)
        self.progress.add(answered.tokens)
        if drop:
            tally.dropped += 1
            return
        tally.answered += 1
        tally.cut += len(answered.cut)
        tally.ended += answered.ended is not None

    def fail(self, tally: Tally, number: int, reason: str) -> None:
        tally.failed[number] = reason
        self.progress.fail(number, reason)

    def _refuse_hopeless(self, reason: str) -> None:
        self.failed_in_a_row += 1
        if self.failed_in_a_row >= FAILED_IN_A_ROW:
            raise LaunchError(
                f"{self.failed_in_a_row} rows in a row failed, the last one with: {reason}", where=self.asker.url,
                remedy=f"see the server's log, then {AGAIN}",
            )  # fmt: skip


def count_rows(source: Source) -> int:
    """Raises DataError: nothing readable, or no rows."""
    number = sum(1 for _ in source.rows())
    if not number:
        raise DataError("no rows", where=f"--data {source.path}", remedy="give chat rows")
    return number


def conclude(tally: Tally, out: Path, total: int, max_failed_share: float) -> str:
    """The last line.

    Raises:
        DataError: a larger share of the rows than allowed failed; those that did not are in `out`.
    """
    failed = len(tally.failed)
    named = "; ".join(f"row {number}: {why}" for number, why in sorted(tally.failed.items())[:NAMED])
    if failed > max_failed_share * total:
        raise DataError(
            f"{failed} of {total} rows failed: {named}; the other answers are in {out}", where=f"{out}.json",
            remedy=f"mend them, or allow so many with --max-failed-share {failed / total:.3f}; {AGAIN}",
        )  # fmt: skip
    cut = f", {tally.cut} answers cut by --max-tokens" if tally.cut else ""
    dropped = f", {tally.dropped} rows dropped because of a cut answer" if tally.dropped else ""
    ended = f", {tally.ended} conversations without their last turns" if tally.ended else ""
    left_out = f", {failed} failed ({named})" if failed else ""
    return f"{out}: {tally.answered} rows answered now{cut}{dropped}{ended}{left_out}"


def build_parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = argparse.ArgumentParser(
        prog=PROG, description="Let the target answer the prompts of a data set.", allow_abbrev=False
    )
    add = parser.add_argument
    add("--data", required=True, help=".jsonl, .json, .parquet, a `datasets` folder or a Hub id")
    add("--out", required=True, type=Path, help="JSONL file for the answered rows")
    add("--base-url", help="OpenAI-compatible server, ending in /v1")
    add("--target", help="instead: a model folder or Hub id, for which a vLLM is started")
    add("--model", help="name of the model on the server; default: the only one")
    add("--max-tokens", type=_positive, default=512, help="per answer (default: %(default)s)")
    add("--temperature", type=float, default=0.0, help="0 is greedy (default: %(default)s)")
    add("--concurrency", type=_positive, default=64, help="rows under way at once (default: %(default)s)")
    add("--limit", type=_positive, help="only the first so many rows")
    add("--cut", choices=("keep", "drop"), default="keep", help="answers that --max-tokens ends (default: %(default)s)")
    add("--split", default="train", help="split of a Hub data set (default: %(default)s)")
    add("--column", help="field with the turns (default: messages, conversations, or a pair: docs/data.md)")
    add("--chat-template-kwargs", type=_json_object, default={}, metavar="JSON", help='{"enable_thinking": false}')
    add("--max-failed-share", type=float, default=0.01, help="more failed rows: exit code 1 (default: %(default)s)")
    add("--timeout-s", type=float, default=600.0, help="for one answer (default: %(default)s)")
    add("--python", help="with --target: interpreter that has vLLM (default: this one)")
    parser.epilog = f"The API key comes from {KEY_VARIABLE}. With --target, what follows -- goes to vLLM."
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError
    return value


def _json_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError
    return value


def run(args: argparse.Namespace, extra: Mapping[str, Any]) -> str:
    """The last line of a run that went well.

    Raises:
        UserError: see `regenerate`, `served_target`, `conclude`.
    """
    if bool(args.base_url) == bool(args.target):
        raise ConfigError(
            "one of --base-url and --target is wanted", where="command line", remedy="give --base-url URL or --target T"
        )
    source = Source(args.data, args.split, args.column, args.limit)
    total = count_rows(source)
    limits = Limits(args.concurrency, args.timeout_s, args.max_failed_share, args.cut == "drop")
    with contextlib.ExitStack() as stack:
        url, model = served_target(
            stack, args.target, base_url=args.base_url, model=args.model, log=args.out, python=args.python,
            extra_args=extra,
        )  # fmt: skip
        sampling = Sampling(model, args.max_tokens, args.temperature, args.chat_template_kwargs)
        store = stack.enter_context(Store(args.out, _settings(args, model)))
        asker = Asker(url, sampling, connections=limits.concurrency, timeout_s=limits.timeout_s)
        stack.callback(asker.close)
        tally = regenerate(source, asker, store, limits, Progress(total))
    return conclude(tally, args.out, total, limits.max_failed_share)


def _settings(args: argparse.Namespace, model: str) -> dict[str, Any]:
    """What the answers follow from."""
    keys = ("max_tokens", "temperature", "cut", "chat_template_kwargs")
    return {"model": model, **{key: getattr(args, key) for key in keys}}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 1 failed, 2 vLLM missing (or argparse's own), 130 interrupted."""
    words = list(sys.argv[1:] if argv is None else argv)
    end = words.index("--") if "--" in words else len(words)
    args = build_parser().parse_args(words[:end])
    try:
        print(run(args, _extra(words[end + 1 :])))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return Interrupted.exit_code
    return 0


def _extra(words: Sequence[str]) -> dict[str, Any]:
    if not words:
        return {}
    from nemo_automodel.components.speculative.serve_vllm import parse_extra

    return parse_extra(words)


if __name__ == "__main__":
    sys.exit(main())
