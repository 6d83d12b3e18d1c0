# SPDX-License-Identifier: Apache-2.0
"""Which checkpoint `train.resume` means. Reads only."""

from __future__ import annotations

from pathlib import Path

from nemo_automodel.errors import TrainError

LATEST = "LATEST"
STATE_FILE = Path("trainer") / "state.pt"


def find_resume_checkpoint(value: str, run_dir: Path) -> Path:
    """The `epoch_*` folder to go on from.

    `LATEST` is this run dir's own newest checkpoint, else that of the newest other run beside it. A path may be a run
    dir, its `checkpoints/`, an `epoch_*` folder or the `model/` inside one.

    Raises:
        TrainError: no resumable checkpoint there; lists the places looked in.
    """
    looked: list[Path] = []
    for place in _places(value, run_dir):
        for candidate in (place, latest_of(place), latest_of(place / "checkpoints"), place.parent):
            if candidate is not None and (candidate / STATE_FILE).is_file():
                return candidate.resolve()
        looked.append(place)
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


def _places(value: str, run_dir: Path) -> list[Path]:
    if value != LATEST:
        return [Path(value).expanduser().absolute()]
    others = [link.parent.parent for link in run_dir.parent.glob(f"*/checkpoints/{LATEST}")]
    others.sort(key=lambda run: (run / "checkpoints" / LATEST).lstat().st_mtime, reverse=True)
    return [run_dir, *(run for run in others if run != run_dir)]
