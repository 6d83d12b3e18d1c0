# SPDX-License-Identifier: Apache-2.0
"""Drafts on disk: config.json and safetensors, in our training form (`model.` prefix) and in vLLM's (without)."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from nemo_automodel.components.speculative.draft.peagle import PEagleDraft
from nemo_automodel.components.speculative.draft.spec import DraftSpec
from nemo_automodel.errors import ResolveError
from nemo_automodel.files import read_json, write_json

TOP_LEVEL = frozenset({"lm_head.weight", "d2t", "t2d", "mask_hidden"})
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def save_draft(folder: Path, draft: PEagleDraft, spec: DraftSpec, dtype: torch.dtype) -> None:
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
        with part.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(part, folder / WEIGHTS)
    finally:
        part.unlink(missing_ok=True)
    write_json(folder / "config.json", spec.to_config())


def load_draft(folder: Path) -> tuple[PEagleDraft, DraftSpec]:
    """Read a draft in either form, as fp32 on the CPU.

    `hidden_norm` of layers after the first may be absent (NeMo Automodel writes none, nothing reads it).

    Raises:
        ResolveError: no draft there, or tensor names or shapes that do not fit its config.
    """
    spec = load_spec(folder)
    draft = PEagleDraft(spec)
    wanted = draft.state_dict()
    found = canonical_names(read_tensors(folder), folder)
    optional = {f"model.layers.{i}.hidden_norm.weight" for i in range(1, spec.num_layers)}
    if spec.draft_vocab_size == spec.vocab_size:
        found = {name: t for name, t in found.items() if name not in ("d2t", "t2d")}  # the identity
    wrong = [f"missing {name}" for name in sorted(wanted.keys() - found.keys() - optional - {"t2d"})]
    wrong += [f"unknown {name}" for name in sorted(found.keys() - wanted.keys())]
    if "mask_hidden" in found and found["mask_hidden"].numel() == draft.mask_hidden.numel():
        found["mask_hidden"] = found["mask_hidden"].view_as(draft.mask_hidden)
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
    return draft, spec


def load_spec(folder: Path) -> DraftSpec:
    """The `DraftSpec` in a draft's config.json.

    Raises:
        ResolveError: there is none, or a key is missing.
    """
    try:
        return DraftSpec.from_config(read_json(folder / "config.json"))
    except (OSError, ValueError) as error:
        raise _refuse(folder, f"no readable config.json ({error})") from error
    except KeyError as error:
        raise _refuse(folder, f"config.json has no {error}") from error


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of `model.safetensors` or of the shards of its index."""
    names = [WEIGHTS]
    if (folder / INDEX).exists():
        names = sorted(set(read_json(folder / INDEX)["weight_map"].values()))
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
    """Names as `PEagleDraft` has them, from either form."""
    named: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        new = name if name in TOP_LEVEL else "model." + name.removeprefix("model.")
        if new in named:
            raise _refuse(folder, f"two tensors would be {new}")
        named[new] = tensor
    return named


def _refuse(folder: Path, found: str) -> ResolveError:
    return ResolveError(
        f"not a P-EAGLE draft that can be read: {found}",
        where=str(folder),
        remedy="name an exported draft or a model/ folder",
    )
