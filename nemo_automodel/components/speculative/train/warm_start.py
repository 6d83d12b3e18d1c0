# SPDX-License-Identifier: Apache-2.0
"""`draft.init_from`: the weights of an earlier draft, ours or one in NeMo Automodel's naming, as the first ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Mapping

import torch
from torch import Tensor

from nemo_automodel.components.speculative.draft.io import canonical_names, has_weights, optional_names, read_tensors
from nemo_automodel.components.speculative.draft.network import DraftNetwork
from nemo_automodel.components.speculative.draft.spec import DraftSpec, RopeSpec
from nemo_automodel.components.speculative.train.resume import LATEST, latest_of
from nemo_automodel.errors import ConfigError
from nemo_automodel.files import read_json

KEY = "draft.init_from"
# what decides the meaning of weights whose shapes say nothing; compared where the earlier draft's config has it
MEANING = ("eagle_aux_hidden_state_layer_ids", "norm_before_residual", "norm_output")
VOCAB = ("d2t", "t2d")
METHOD_OWN = frozenset({"mask_hidden"})  # P-EAGLE's; an EAGLE-3 draft has none


def find_weights(path: str, key: str = KEY) -> Path:
    """The folder with `config.json` and safetensors that `path` means: it, its `model/`, `model/consolidated/`, the
    same of LATEST (a link or a text file) in it or in its `checkpoints/`. `key` is where the path was given.

    Raises:
        ConfigError: no such folder; lists the places looked in.
    """
    place = Path(path).expanduser()
    starts = [place, latest_of(place), latest_of(place / "checkpoints")]
    if place.name == LATEST:
        starts.append(latest_of(place.parent))
    looked = [start / inner for start in starts if start for inner in ("", "model", "model/consolidated")]
    for folder in looked:
        if (folder / "config.json").is_file() and has_weights(folder):
            return folder
    raise ConfigError(
        f"no draft (config.json and safetensors) in {', '.join(map(str, looked))}", where=f"{key}={path}",
        remedy=f"{key}=PATH of a run dir, an epoch_* folder or a model/ folder",
    )  # fmt: skip


class EarlierDraft:
    """Names and values of the earlier draft's tensors, ready to be copied into a new one."""

    def __init__(self, folder: Path, spec: DraftSpec) -> None:
        """Raises ConfigError when its config speaks of another draft than `spec`; ResolveError when unreadable."""
        self.folder, self.spec = folder, spec
        self.tensors = canonical_names(read_tensors(folder), folder)
        try:
            config = read_json(folder / "config.json")
        except ValueError as error:
            raise ConfigError(f"no readable config.json ({error})", where=str(folder), remedy="name another") from error
        self._refuse(self._other_meaning(config))

    def vocab_ids(self) -> Tensor | None:
        """Its map's target ids [draft_vocab], when it has one of the wanted size."""
        offsets, head = self.tensors.get("d2t"), self.tensors.get("lm_head.weight")
        reduced = self.spec.draft_vocab_size < self.spec.vocab_size
        if offsets is None and head is not None and reduced and len(head) == self.spec.draft_vocab_size:
            self._refuse(["missing d2t, which says what tokens the rows of lm_head.weight stand for"])
        if offsets is None or offsets.shape != (self.spec.draft_vocab_size,):
            return None
        if not reduced:
            return None
        ids = torch.arange(len(offsets)) + offsets
        if bool((ids.diff() <= 0).any()) or not 0 <= int(ids[0]) <= int(ids[-1]) < self.spec.vocab_size:
            told = f"{int(ids.min())}..{int(ids.max())}, not ascending within {self.spec.vocab_size} tokens"
            self._refuse([f"d2t, added to 0, 1, 2, ..., gives {told}"])
        return ids

    def copy_into(self, draft: DraftNetwork) -> list[str]:
        """Overwrite the weights of `draft`; returns what stays fresh or is left behind, for people.

        Raises:
            ConfigError: names or shapes that do not fit; all of them are named.
        """
        wanted = draft.state_dict()
        found = {name: tensor for name, tensor in self.tensors.items() if name not in VOCAB}
        mask = wanted.get("mask_hidden")
        if mask is not None and "mask_hidden" in found and found["mask_hidden"].numel() == mask.numel():
            found["mask_hidden"] = found["mask_hidden"].reshape(mask.shape)
        self._refuse(self._misfits(found, wanted))
        kept = {name: tensor for name, tensor in found.items() if name in wanted}
        draft.load_state_dict(kept, strict=False)  # names were compared
        notes = [f"{name} stays fresh" for name in sorted(METHOD_OWN & (wanted.keys() - found.keys()))]
        return notes + [f"{name} is left behind" for name in sorted(METHOD_OWN & (found.keys() - wanted.keys()))]

    def _other_meaning(self, config: Mapping[str, Any]) -> list[str]:
        """Keys of its config that say otherwise than the spec."""
        ours = self.spec.to_config()
        wrong = [
            f"{key} {config[key]} instead of {ours[key]}"
            for key in MEANING
            if config.get(key) is not None and config[key] != ours[key]
        ]
        named = any(config.get(key) is not None for key in ("rope_theta", "rope_parameters"))
        if named and (theirs := RopeSpec.from_config(config)) != self.spec.rope:
            wrong.append(f"rope {theirs.theta:g} {theirs.scaling or ''}".rstrip() + f" instead of {self.spec.rope}")
        return wrong

    def _misfits(self, found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> list[str]:
        fresh = optional_names(self.spec) | METHOD_OWN | set(VOCAB)
        wrong = [f"missing {name}" for name in sorted(wanted.keys() - found.keys() - fresh)]
        wrong += [f"unknown {name}" for name in sorted(found.keys() - wanted.keys() - METHOD_OWN)]
        return wrong + [
            f"{name} {list(tensor.shape)} instead of {list(wanted[name].shape)}"
            for name, tensor in found.items()
            if name in wanted and tensor.shape != wanted[name].shape
        ]

    def _refuse(self, wrong: list[str]) -> None:
        if wrong:
            raise ConfigError(
                f"the draft in {self.folder} does not fit: {'; '.join(wrong)}", where=KEY,
                remedy="give the draft.* settings that it was trained with, or leave draft.init_from out",
            )  # fmt: skip
