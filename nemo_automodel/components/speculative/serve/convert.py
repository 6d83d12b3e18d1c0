# SPDX-License-Identifier: Apache-2.0
"""`.bin` weights -> safetensors, once, into a folder of their own. The only place of the serve stage that needs torch.

SafeAILab's EAGLE-3 drafts are published so. A `.bin` is a pickle: it is loaded with `weights_only=True`, which builds
tensors and plain containers and runs no code of the file.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from nemo_automodel.components.speculative.serve.shards import SINGLE
from nemo_automodel.errors import ResolveError

WHERE = "serve.checkpoint"
_REMEDY = "name a folder with config.json and *.bin weights"


def convert_bin(draft: Path, out: Path | None = None) -> Path:
    """Write `model.safetensors` and config.json into `out` (default: `<draft>-safetensors` beside it), and return it.

    The source is only read. Tensors keep their names, shapes and dtypes.

    Raises:
        ResolveError: no `.bin` weights, one that is no dict of tensors, a name in two of them, or `out` is there.
    """
    import torch
    from safetensors.torch import save_file

    files = sorted(draft.glob("*.bin")) if draft.is_dir() else []
    if not files or not (draft / "config.json").is_file():
        raise ResolveError(f"no .bin weights with a config.json in {draft}", where=WHERE, remedy=_REMEDY)
    tensors: dict[str, Any] = {}
    for file in files:
        for name, tensor in _load(file).items():
            if name in tensors:
                raise ResolveError(f"{name} is in two of the .bin files of {draft}", where=WHERE, remedy="remove one")
            tensors[name] = tensor.clone() if isinstance(tensor, torch.Tensor) else _no_tensor(file, name)
    out = out or draft.parent / f"{draft.name}-safetensors"
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


def _load(file: Path) -> dict[str, Any]:
    import pickle

    import torch

    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, OSError) as error:
        reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        remedy = "take it from its publisher again; files that need code to load are not opened"
        raise ResolveError(f"{file} cannot be loaded safely: {reason}", where=WHERE, remedy=remedy) from error
    if not isinstance(loaded, dict) or not loaded:
        raise ResolveError(f"{file} holds no named tensors", where=WHERE, remedy=_REMEDY)
    return loaded


def _no_tensor(file: Path, name: str) -> Any:
    raise ResolveError(f"{file}: {name} is no tensor (a trainer's state?)", where=WHERE, remedy=_REMEDY)
