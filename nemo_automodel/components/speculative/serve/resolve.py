# SPDX-License-Identifier: Apache-2.0
"""Find a draft checkpoint and read its config and safetensors headers. Reads only; no tensor data, no torch."""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator, Mapping

from nemo_automodel.components.speculative.serve.hub import fetch_hub_draft
from nemo_automodel.components.speculative.serve.shards import pickled_weights, read_tensors, weight_files
from nemo_automodel.components.speculative.serve.types import Layout, Resolved, ShardTensor
from nemo_automodel.errors import ResolveError
from nemo_automodel.files import expand_user, is_path_like, read_json

WHERE = "serve.checkpoint"
LATEST = "LATEST"
_CONVERT = ("python", "-m", "nemo_automodel.components.speculative.serve_vllm", "convert")


@dataclass(frozen=True)
class _Look:
    """One place that was looked at and, when it is not the draft, why."""

    place: Path
    reason: str


def resolve(checkpoint: str, base_dir: Path) -> Resolved:
    """Read the draft that `checkpoint` names: a run dir, `checkpoints/`, an `epoch_*` dir, its `model/` or
    `model/consolidated/`, a model dir, `LATEST` (symlink or text file), a Hub id. Relative paths start at `base_dir`.

    Raises:
        ResolveError: nothing usable there (every place looked in is listed), a half-written checkpoint, an index that
            leads outside its folder, weights that are not safetensors, or a Hub id that cannot be had.
    """
    text = checkpoint.strip()
    if not text:
        raise ResolveError(
            "the checkpoint is an empty string", where=WHERE, remedy="name a run, a checkpoint or a Hub id"
        )
    path = base_dir / expand_user(text)
    try:
        if path.exists() or path.is_symlink():
            return read_draft(find_model_dir(path))
        if is_path_like(text, base_dir):
            raise ResolveError(
                f"no such path: {path}{_nearest(path)}", where=WHERE, remedy="name an existing run or checkpoint"
            )
    except OSError as error:  # a parent that may not be read, a name too long, a disk that fails
        raise ResolveError(f"cannot be read: {error}", where=WHERE, remedy="name a path that can be read") from error
    return read_draft(fetch_hub_draft(text, where=WHERE))


def _nearest(path: Path) -> str:
    parent = path.parent
    while not parent.exists():
        parent = parent.parent
    names = (
        sorted(child.name for child in parent.iterdir() if not child.name.startswith(".")) if parent.is_dir() else []
    )
    shown = ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
    return f" ({parent} holds: {shown or 'nothing'})"


def find_model_dir(path: Path) -> Path:
    """The folder that holds config.json and weights, below (or at) an existing path.

    Raises:
        ResolveError: there is none; each place looked in is named with what is wrong with it.
    """
    looks: list[_Look] = []
    for place in _places(path, looks, set()):
        reason = _unfit(place)
        if reason is None:
            return place.resolve()
        looks.append(_Look(place, reason))
    listed = "; ".join(f"{look.place}: {look.reason}" for look in looks)
    raise ResolveError(
        f"no draft checkpoint at {path}. Looked in {listed}",
        where=WHERE,
        remedy="name a run dir, an epoch_* dir or a folder with config.json and *.safetensors",
    )


def _places(path: Path, looks: list[_Look], seen: set[Path]) -> Iterator[Path]:
    """Candidate folders, best first. `model/consolidated` comes before `model`, whose shard files are not a model's."""
    path = _follow_latest(path, looks)
    if path is None:
        return
    if path.resolve() in seen:
        looks.append(_Look(path, "leads back to a folder looked in before"))
        return
    seen.add(path.resolve())
    if path.is_file():
        if path.suffix in (".safetensors", ".json"):
            yield path.parent
        else:
            looks.append(_Look(path, "is a file, not a folder"))
        return
    if (path / "snapshots").is_dir():
        yield from _snapshot(path, looks)
        return
    for sub in ("model/consolidated", "consolidated", "model", "."):
        if sub == "." or (path / sub).is_dir():
            yield path / sub if sub != "." else path
    for holder in (path, path / "checkpoints"):
        latest = holder / LATEST
        if latest.is_symlink() or latest.exists():
            yield from _places(latest, looks, seen)
            return
        newest = _newest_epoch(holder)
        if newest is not None:
            yield from _places(newest, looks, seen)
            return
    if (path / "checkpoints").is_file():
        looks.append(_Look(path / "checkpoints", "is a file, not a folder"))
    elif not (path / "checkpoints").is_dir() and not (path / "config.json").is_file():
        looks.append(_Look(path / "checkpoints", "is not there"))


def _snapshot(repo: Path, looks: list[_Look]) -> Iterator[Path]:
    """A repository folder of the Hub's local cache: the snapshot that `refs/main` names, or the only one."""
    main, snapshots = repo / "refs" / "main", sorted(repo.glob("snapshots/*"))
    if main.is_file():
        yield repo / "snapshots" / (main.read_text(encoding="utf-8", errors="replace").strip() or "?")
    elif len(snapshots) == 1:
        yield snapshots[0]
    else:
        looks.append(_Look(repo, f"has {len(snapshots)} snapshots and no refs/main: name one of them"))


def _follow_latest(path: Path, looks: list[_Look]) -> Path | None:
    """A LATEST text file stands for the sibling it names; a dangling link or a name that leads away is reported."""
    if path.is_symlink() and not path.exists():
        to = path.readlink()
        gone = "itself" if path.parent / to == path else f"{to}, which is not there{_epochs_there(path.parent)}"
        looks.append(_Look(path, f"is a link to {gone}"))
        return None
    if not path.is_file() or path.name != LATEST:
        return path
    name = path.read_text(encoding="utf-8", errors="replace").strip()
    if not Path(name).parts or Path(name).is_absolute() or ".." in Path(name).parts:
        looks.append(_Look(path, f"names {name[:200]!r}, not a checkpoint beside it"))
        return None
    target = path.parent / name
    if not target.is_dir():
        looks.append(_Look(path, f"names {name[:200]!r}, which is not there{_epochs_there(path.parent)}"))
        return None
    return target


def _epochs_there(holder: Path) -> str:
    """The checkpoints beside a LATEST that leads nowhere, for its message."""
    names = sorted(child.name for child in holder.glob("epoch_*") if child.is_dir())
    return f" (there are: {', '.join(names[:6])}{', ...' if len(names) > 6 else ''})" if names else ""


def _newest_epoch(holder: Path) -> Path | None:
    """The `epoch_<E>_step_<S>` folder with the highest numbers, for a holder without LATEST."""
    found = []
    for child in holder.glob("epoch_*"):
        numbers = [int(part) for part in child.name.split("_") if part.isdigit()]
        if child.is_dir() and numbers:
            found.append((numbers, child))
    return max(found)[1] if found else None


def _unfit(place: Path) -> str | None:
    """Why this folder is not the draft's; None when it is."""
    weights = any(place.glob("*.safetensors"))
    if not (place / "config.json").is_file():
        if (place / ".hf_metadata").is_dir():
            return "NeMo shards without consolidated/ (train with checkpoint.save_consolidated=true)"
        return "weights without config.json (half-written?)" if weights else "no config.json"
    if weights or any(place.glob("*.safetensors.index.json")):
        return None
    old = [file.name for file in pickled_weights(place)]
    if old:
        raise ResolveError(
            f"{place} holds {', '.join(old[:3])} and no safetensors: pickles are not loaded",
            where=WHERE,
            remedy=f"convert once: {shlex.join([*_CONVERT, '--draft', str(place)])}",
        )
    return "no *.safetensors"


def read_draft(model_dir: Path) -> Resolved:
    """Read one model folder's config and headers, and tell who wrote it.

    Raises:
        ResolveError: an unreadable config, missing, half-written or misleading shards.
    """
    try:
        config = read_json(model_dir / "config.json")
    except (OSError, ValueError) as error:
        raise ResolveError(
            f"{error} (half-written?)", where=WHERE, remedy="name another checkpoint or save it again"
        ) from error
    if key := _non_finite(config):
        raise ResolveError(
            f"{key} in config.json of {model_dir} is no finite number: JSON has none other",
            where=WHERE,
            remedy=f"write a number for {key}, or take it out",
        )
    shards = weight_files(model_dir)
    tensors = read_tensors(model_dir, shards)
    return Resolved(
        model_dir=model_dir,
        layout=detect_layout(config, tensors),
        config=config,
        tensors=tensors,
        shards=tuple(shards),
        recipe_depth=_recipe_depth(model_dir),
    )


def _non_finite(value: Any, path: str = "") -> str | None:
    """The dotted path of the first Infinity or NaN, which Python's reader takes and no JSON file may hold."""
    if isinstance(value, float):
        return None if math.isfinite(value) else path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = (_non_finite(one, f"{path}.{key}" if path else str(key)) for key, one in inner)
    return next(filter(None, found), None)


def _recipe_depth(model_dir: Path) -> int | None:
    """`recipe_args.ttt_steps` of the `config.yaml` that NeMo Automodel leaves in the epoch's folder."""
    for folder in (model_dir.parent, model_dir.parent.parent):
        recipe = folder / "config.yaml"
        if not (folder.name.startswith("epoch_") and recipe.is_file()):
            continue
        import yaml  # most drafts have no such file

        try:
            content = yaml.safe_load(recipe.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError):
            return None  # a note for people; the draft does not depend on it
        arguments = content.get("recipe_args") if isinstance(content, dict) else None
        steps = arguments.get("ttt_steps") if isinstance(arguments, dict) else None
        return steps if type(steps) is int and steps > 0 else None
    return None


def detect_layout(config: Mapping[str, Any], tensors: tuple[ShardTensor, ...]) -> Layout:
    """Who wrote the draft, told by its files: the speculators key, the `midlayer.` name, the `model.` prefix."""
    names = [tensor.name for tensor in tensors]
    if "speculators_model_type" in config:
        return Layout.speculators
    if any("midlayer." in name for name in names):
        return Layout.midlayer
    if any(name.startswith("model.") for name in names) or "LlamaEagle3DraftModel" in (
        config.get("architectures") or []
    ):
        return Layout.nemo
    return Layout.vllm
