# SPDX-License-Identifier: Apache-2.0
"""What a Hydra multirun over checkpoints needs besides Hydra: globs over paths, and an end with a leaderboard."""

from __future__ import annotations

import glob
import re
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from nemo_automodel.errors import ConfigError

_GLOB = re.compile(r"^(serve\.checkpoint)=glob\((.*)\)$", re.DOTALL)


def expand_globs(arguments: list[str], base_dir: Path) -> list[str]:
    """Replace `serve.checkpoint=glob(PATTERN)` by the sorted list of matching folders, quoted for Hydra.

    Hydra's own `glob()` looks among the options of a config group, never among files: on a plain value it gives
    0 jobs and exit code 0. LATEST and BEST only point at folders of the same list, so they are left out.

    Raises:
        ConfigError: nothing matches.
    """
    return [_expand(argument, base_dir) for argument in arguments]


def _expand(argument: str, base_dir: Path) -> str:
    match = _GLOB.match(argument)
    if not match:
        return argument
    key, pattern = match.group(1), match.group(2).strip().strip("'\"")
    found = sorted(glob.glob(str(base_dir / Path(pattern).expanduser())), key=_natural)
    folders = [path for path in found if Path(path).is_dir() and Path(path).name not in ("LATEST", "BEST")]
    if not folders:
        raise ConfigError("no folder matches", where=argument, remedy=f"see what is there: ls -d {pattern}")
    return f"{key}={','.join(quote_value(path) for path in folders)}"


def _natural(path: str) -> list[Any]:
    """Sort key under which step_500 comes before step_1000."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path)]


def quote_value(value: str) -> str:
    """Quote a string so that Hydra's override grammar gives it back unchanged."""
    if re.fullmatch(r"[A-Za-z_/.\-][\w/.\-]*", value, re.ASCII):
        return value
    # Backslashes count only before a quote (or at the end) in Hydra 1.3's quoted strings.
    body = re.sub(r"(\\*)('|$)", lambda m: m.group(1) * 2 + ("\\'" if m.group(2) else ""), value)
    return f"'{body}'"


class SweepCallback(Callback):
    """Remembers in the launching process where the sweep writes, whatever launcher runs the jobs."""

    sweep_dir: Path | None = None

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        SweepCallback.sweep_dir = Path(config.hydra.sweep.dir).absolute()
