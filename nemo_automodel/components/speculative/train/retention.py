# SPDX-License-Identifier: Apache-2.0
"""Which checkpoint is BEST, and which are removed: by figures and dates on disk, so a resumed run goes on with them."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any, Mapping

from nemo_automodel.components.speculative.train.resume import BEST, LATEST, STATE_FILE
from nemo_automodel.files import point, read_json, write_json

VALIDATION_FILE, DECODE_FILE = "validation.json", "decode.json"


def record_validation(checkpoint: Path, figures: Mapping[str, Any]) -> None:
    """Leave the held-out figures beside the weights and move BEST.

    Raises:
        OSError: they could not be written.
    """
    write_json(checkpoint / VALIDATION_FILE, dict(figures))
    point_best(checkpoint.parent)


def record_decode(checkpoint: Path, figures: Mapping[str, Any]) -> None:
    """Leave what was decoded with these weights beside them and move BEST. Raises OSError: see `record_validation`."""
    write_json(checkpoint / DECODE_FILE, dict(figures))
    point_best(checkpoint.parent)


def point_best(root: Path) -> None:
    """Let BEST name what the figures say. Raises OSError when it cannot be moved."""
    best = best_of(root)
    if best is not None:
        point(root, BEST, best.name)


def is_validated(checkpoint: Path) -> bool:
    return (checkpoint / VALIDATION_FILE).is_file()


def is_decoded(checkpoint: Path) -> bool:
    return (checkpoint / DECODE_FILE).is_file()


def best_of(root: Path) -> Path | None:
    """The checkpoint of the highest acceptance length, of equal ones the lower held-out loss. None: no figures.

    Like is compared with like, and the newest checkpoint that has figures says what counts: the decoded length, among
    those decoded in the same way, or else the simulated one of the held-out rows.
    """
    simulated, decoded = _figures(root, VALIDATION_FILE), _figures(root, DECODE_FILE)
    newest = max(simulated.keys() | decoded.keys(), key=_step, default=None)
    rated = simulated
    if newest in decoded:
        how = _conditions(decoded[newest])
        rated = {folder: figures for folder, figures in decoded.items() if _conditions(figures) == how}

    def rating(folder: Path) -> tuple[float, float]:
        return rated[folder]["acceptance_length"], -simulated.get(folder, {}).get("loss", math.inf)

    return max(rated, key=rating, default=None)


def _figures(root: Path, name: str) -> dict[Path, Mapping[str, Any]]:
    """Per checkpoint what its file of this name holds."""
    found = {}
    for path in sorted(root.glob(f"epoch_*_step_*/{name}")):
        try:
            found[path.parent] = read_json(path)
            float(found[path.parent]["acceptance_length"]), _step(path.parent)
        except (OSError, ValueError, KeyError, TypeError):
            found.pop(path.parent, None)  # not a file of ours
    return found


def _conditions(decoded: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(decoded.get(key) for key in ("prompts", "max_new_tokens", "k"))


def _step(folder: Path) -> int:
    return int(folder.name.rpartition("_")[2])


def drop_old_states(root: Path, keep: int) -> None:
    """Remove `trainer/` of all checkpoints but the `keep` written last; their weights stay.

    Raises:
        OSError: a state could not be removed.
    """
    states = [path for path in root.glob(f"epoch_*/{STATE_FILE}") if not path.parents[1].is_symlink()]
    states.sort(key=lambda path: path.stat().st_mtime_ns, reverse=True)
    for path in states[keep:]:
        _remove(path.parent)


def drop_old_checkpoints(root: Path, keep: int | None) -> None:
    """Remove all checkpoints but the `keep` written last and those that LATEST and BEST name. None: keep all.

    Raises:
        OSError: one could not be removed.
    """
    if keep is None:
        return
    configs = [p for p in root.glob("epoch_*/model/config.json") if not p.parents[1].is_symlink()]
    configs.sort(key=lambda path: path.stat().st_mtime_ns, reverse=True)
    named = {(root / name).resolve() for name in (LATEST, BEST)}
    for path in configs[keep:]:
        if path.parents[1].resolve() not in named:
            _remove(path.parents[1])


def _remove(folder: Path) -> None:
    """Out of sight first: what is half removed is no checkpoint."""
    hidden = folder.with_name(f".{folder.name}.old")
    folder.rename(hidden)
    shutil.rmtree(hidden)
