# SPDX-License-Identifier: Apache-2.0
"""`.bin` weights -> safetensors, once, into a folder of their own. The only place of the serve stage that needs torch.

SafeAILab's EAGLE-3 drafts are published so. A `.bin` is a pickle: it is loaded with `weights_only=True`, which builds
tensors and plain containers and runs no code of the file.
"""

from __future__ import annotations

import os
import shutil
import zipfile
from pathlib import Path
from typing import Any

from nemo_automodel.components.speculative.serve.shards import SINGLE, pickled_weights
from nemo_automodel.errors import ResolveError
from nemo_automodel.files import read_json

WHERE = "serve.checkpoint"
_REMEDY = "name a folder with config.json and *.bin weights"


def convert_bin(draft: Path, out: Path | None = None) -> Path:
    """Write `model.safetensors` and config.json into `out` (default: see `_beside`), and return it.

    The source is only read. Tensors keep their names, shapes and dtypes.

    Raises:
        ResolveError: no `.bin` weights, one that is no dict of tensors, a name in two of them, or `out` is there.
    """
    import torch
    from safetensors.torch import save_file

    files = _files(draft) if draft.is_dir() else []
    if not files or not (draft / "config.json").is_file():
        raise ResolveError(f"no .bin weights with a config.json in {draft}", where=WHERE, remedy=_REMEDY)
    tensors: dict[str, Any] = {}
    for file in files:
        for name, tensor in _load(file).items():
            if name in tensors:
                raise ResolveError(f"{name} is in two of the .bin files of {draft}", where=WHERE, remedy="remove one")
            if not isinstance(tensor, torch.Tensor):
                raise ResolveError(f"{file}: {name} is no tensor (a trainer's state?)", where=WHERE, remedy=_REMEDY)
            tensors[name] = tensor.clone(memory_format=torch.contiguous_format)  # not a view into another's storage
    out = out or _beside(draft)
    if out.exists():
        raise ResolveError(f"{out} is there already", where="--out", remedy="serve it, or name another folder")
    temp = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        temp.mkdir(parents=True)
        save_file(tensors, temp / SINGLE, metadata={"format": "pt"})
        shutil.copyfile(draft / "config.json", temp / "config.json")
        os.rename(temp, out)
    except BaseException:
        shutil.rmtree(temp, ignore_errors=True)
        raise
    return out


def _files(draft: Path) -> list[Path]:
    """Those the index names, else every file that may hold weights.

    Raises:
        ResolveError: the index cannot be read, leads elsewhere, or names a file that is not there.
    """
    for index in sorted(draft.glob("*.bin.index.json")):
        try:
            named = sorted(set(read_json(index)["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise ResolveError(f"{index} has no usable weight_map", where=WHERE, remedy=_REMEDY) from error
        missing = [name for name in named if Path(name).name != name or not (draft / name).is_file()]
        if missing:
            found = f"{index} names files that are not there: {', '.join(missing[:4])}"
            raise ResolveError(found, where=WHERE, remedy="download or copy the draft again")
        return [draft / name for name in named]
    return pickled_weights(draft)


def _beside(draft: Path) -> Path:
    """`<draft>-safetensors`; for a snapshot of the Hub's local cache, which only the Hub's client writes, in the
    working directory and by the repository's name."""
    if draft.parent.name == "snapshots":
        return Path.cwd() / f"{draft.parents[1].name.split('--')[-1]}-safetensors"
    return draft.parent / f"{draft.name}-safetensors"


def _load(file: Path) -> dict[str, Any]:
    import pickle

    import torch

    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except (RuntimeError, pickle.UnpicklingError, EOFError, OSError) as error:
        reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        remedy = "take it from its publisher again; files that need code to load are not opened"
        raise ResolveError(f"{file} cannot be loaded safely: {reason}", where=WHERE, remedy=remedy) from error
    if not isinstance(loaded, dict) or not loaded:
        raise ResolveError(f"{file} holds no named tensors", where=WHERE, remedy=_REMEDY)
    return loaded
