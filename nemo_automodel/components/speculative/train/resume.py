# SPDX-License-Identifier: Apache-2.0
"""Which checkpoint `train.resume` means. Reads only."""

from __future__ import annotations

from pathlib import Path

from nemo_automodel.errors import TrainError

LATEST, BEST = "LATEST", "BEST"
STATE_FILE = Path("trainer") / "state.pt"


def find_resume_checkpoint(value: str, run_dir: Path) -> Path:
    """The `epoch_*` folder to go on from.

    `LATEST` is this run dir's own newest checkpoint, else that of the newest other run beside it. A path may be a run
    dir, its `checkpoints/`, an `epoch_*` folder or the `model/` inside one.

    Raises:
        TrainError: no resumable checkpoint there; lists the places looked in.
    """
    looked: list[Path] = []
    weights_only: Path | None = None
    for place in _places(value, run_dir):
        for candidate in (place, latest_of(place), latest_of(place / "checkpoints"), place.parent):
            if candidate is not None and (candidate / STATE_FILE).is_file():
                return candidate.resolve()
            if candidate is not None and (candidate / "model" / "config.json").is_file():
                weights_only = weights_only or candidate.resolve()
        looked.append(place)
    if weights_only is not None:
        raise _no_state(weights_only)
    raise TrainError(
        f"no resumable checkpoint (epoch_*/{STATE_FILE}) in {', '.join(map(str, looked)) or run_dir.parent}",
        where="train.resume",
        remedy="set train.resume=PATH of a run dir or an epoch_* folder, or train.resume=null to start afresh",
    )


def latest_of(checkpoints: Path) -> Path | None:
    """The folder that LATEST names: a relative symlink, or a text file holding the name. None: there is none."""
    link = checkpoints / LATEST
    if link.is_dir():
        return link.resolve()
    if link.is_file():
        return checkpoints / link.read_text(encoding="utf-8").strip()
    return None


def _no_state(checkpoint: Path) -> TrainError:
    states = sorted(checkpoint.parent.glob(f"epoch_*/{STATE_FILE}"), key=lambda path: path.stat().st_mtime_ns)
    other = f"resume a later one: train.resume={states[-1].parents[1]}" if states else "set train.resume=null"
    return TrainError(
        f"{checkpoint} keeps its weights only: its trainer state is gone (removed once newer checkpoints were there, "
        "see train.keep_trainer_states)", where="train.resume", remedy=other,
    )  # fmt: skip


def _places(value: str, run_dir: Path) -> list[Path]:
    if value != LATEST:
        return [Path(value).expanduser().absolute()]
    others = [link.parent.parent for link in run_dir.parent.glob(f"*/checkpoints/{LATEST}")]
    others.sort(key=lambda run: (run / "checkpoints" / LATEST).lstat().st_mtime, reverse=True)
    return [run_dir, *(run for run in others if run != run_dir)]
