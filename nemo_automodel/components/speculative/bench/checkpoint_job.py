# SPDX-License-Identifier: Apache-2.0
"""The benchmark of one checkpoint while training goes on: `python -m ...bench.checkpoint_job JOB.json`.

A process of its own (see `beside_training`), which is told everything in a file: what the recipe composed, nothing that
has changed on disk since.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from nemo_automodel.components.speculative.bench.leaderboard import write_leaderboard
from nemo_automodel.components.speculative.bench.plain import from_plain
from nemo_automodel.components.speculative.serve.launch import stopping_servers
from nemo_automodel.components.speculative.serve.pipeline import run_serve
from nemo_automodel.components.speculative.serve.types import ServeSpec
from nemo_automodel.errors import UserError
from nemo_automodel.files import read_json, write_json


@dataclass(frozen=True)
class CheckpointJob:
    """`spec` as it is to be run; result.json and logs go to `out_dir`, leaderboard and report into its parent."""

    spec: ServeSpec
    base_dir: str
    out_dir: str

    def save(self, path: Path) -> None:
        write_json(path, _plain(asdict(self)))


def _plain(value: Any) -> Any:
    """Enums by their values; `from_plain` is the other direction."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value.value if isinstance(value, Enum) else value


def main(argv: list[str]) -> int:
    job: CheckpointJob = from_plain(CheckpointJob, read_json(Path(argv[0])))
    out_dir = Path(job.out_dir)
    try:
        with stopping_servers():
            return run_serve(job.spec, base_dir=Path(job.base_dir), out_dir=out_dir, multirun=True)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    finally:
        write_leaderboard(out_dir.parent)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
