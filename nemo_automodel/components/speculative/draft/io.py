# SPDX-License-Identifier: Apache-2.0
"""Drafts on disk: config.json and safetensors, in our training form (`model.` prefix) and in vLLM's (without)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from nemo_automodel.components.speculative.draft.build import empty_draft
from nemo_automodel.components.speculative.draft.network import DraftNetwork
from nemo_automodel.components.speculative.draft.spec import DraftSpec
from nemo_automodel.errors import ResolveError
from nemo_automodel.files import plain_mode, read_json, write_json

TOP_LEVEL = frozenset({"lm_head.weight", "d2t", "t2d", "mask_hidden"})
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def save_draft(folder: Path, draft: DraftNetwork, spec: DraftSpec, dtype: torch.dtype) -> None:
    """Write `config.json` and `model.safetensors` into an existing folder; floating tensors in `dtype`.

    `spec.dtype` must name `dtype`. Tokenizer files are the caller's.
    """
    if spec.dtype != str(dtype).removeprefix("torch."):
        raise ValueError(f"spec.dtype is {spec.dtype}, the weights are to be {dtype}")
    tensors = {
        name: (t.to(dtype) if t.is_floating_point() else t).detach().cpu().contiguous()
        for name, t in draft.state_dict().items()
    }
    part = folder / f".{WEIGHTS}.{os.getpid()}.tmp"
    try:
        save_file(tensors, part, metadata={"format": "pt"})
        part.chmod(plain_mode())  # safetensors makes it for its owner alone
        with part.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(part, folder / WEIGHTS)
    finally:
        part.unlink(missing_ok=True)
    write_json(folder / "config.json", spec.to_config())


def load_draft(folder: Path) -> tuple[DraftNetwork, DraftSpec]:
    """Read a draft of either kind in either form, as fp32 on the CPU.

    See `optional_names` for what may be absent.

    Raises:
        ResolveError: no draft there, or tensor names or shapes that do not fit its config.
    """
    spec = load_spec(folder)
    draft = empty_draft(spec)
    _fill(draft, folder)
    return draft, spec


def read_sliding_window(folder: Path) -> int | None:
    """Tokens that the layers of a draft see at most; None when they see all."""
    config = _read_config(folder)
    return config.get("sliding_window") if "sliding_attention" in (config.get("layer_types") or []) else None


def _fill(draft: DraftNetwork, folder: Path) -> None:
    """Load the folder's tensors into the draft, or say which do not fit."""
    spec, wanted = draft.spec, draft.state_dict()
    found = canonical_names(read_tensors(folder), folder)
    optional = optional_names(spec)
    if spec.draft_vocab_size == spec.vocab_size:
        found = {name: t for name, t in found.items() if name not in ("d2t", "t2d")}  # the identity
    wrong = [f"missing {name}" for name in sorted(wanted.keys() - found.keys() - optional - {"t2d"})]
    wrong += [f"unknown {name}" for name in sorted(found.keys() - wanted.keys())]
    mask = wanted.get("mask_hidden")
    if mask is not None and "mask_hidden" in found and found["mask_hidden"].numel() == mask.numel():
        found["mask_hidden"] = found["mask_hidden"].view_as(mask)
    wrong += [
        f"{name} {list(t.shape)} instead of {list(wanted[name].shape)}"
        for name, t in found.items()
        if name in wanted and t.shape != wanted[name].shape
    ]
    if wrong:
        raise _refuse(folder, "; ".join(wrong))
    draft.load_state_dict(found, strict=False)  # names were compared above
    if "d2t" in found:
        draft.t2d.zero_()[draft.vocab_ids()] = True


def optional_names(spec: DraftSpec) -> set[str]:
    """Tensors that a draft may lack: nothing reads them (NeMo Automodel writes none)."""
    return {f"model.layers.{i}.hidden_norm.weight" for i in range(1, spec.num_layers)}


def has_weights(folder: Path) -> bool:
    """Whether safetensors lie there, in one file or as the shards of an index."""
    return (folder / WEIGHTS).is_file() or (folder / INDEX).is_file()


def load_spec(folder: Path) -> DraftSpec:
    """The `DraftSpec` in a draft's config.json.

    Raises:
        ResolveError: there is none, or a key is missing.
    """
    return _spec(_read_config(folder), folder)


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        return read_json(folder / "config.json")
    except (OSError, ValueError) as error:
        raise _refuse(folder, f"no readable config.json ({error})") from error


def _spec(config: dict[str, Any], folder: Path) -> DraftSpec:
    try:
        return DraftSpec.from_config(config)
    except KeyError as error:
        raise _refuse(folder, f"config.json has no {error}") from error


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of `model.safetensors` or of the shards of its index."""
    names = [WEIGHTS]
    if (folder / INDEX).exists():
        try:
            names = sorted(set(read_json(folder / INDEX)["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise _refuse(folder, f"{INDEX} has no readable weight_map ({error!r})") from error
    tensors: dict[str, Tensor] = {}
    for name in names:
        if Path(name).name != name:
            raise _refuse(folder, f"the index names {name!r}, which is outside the folder")
        try:
            tensors |= load_file(folder / name)
        except (OSError, SafetensorError) as error:
            raise _refuse(folder, f"cannot read {name} ({error})") from error
    return tensors


def canonical_names(tensors: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """Names as `DraftNetwork` has them, from either form."""
    named: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        new = name if name in TOP_LEVEL else "model." + name.removeprefix("model.")
        new = new.replace("model.midlayer.", "model.layers.0.")  # the first EAGLE-3 trainer's name
        if new in named:
            raise _refuse(folder, f"two tensors would be {new}")
        named[new] = tensor
    return named


def _refuse(folder: Path, found: str) -> ResolveError:
    return ResolveError(
        f"not a draft that can be read: {found}",
        where=str(folder),
        remedy="name an exported draft or a model/ folder",
    )
