# SPDX-License-Identifier: Apache-2.0
"""Served and predicted acceptance part: what was checked, in order, and what explains it.

First the folder that was served beside one made anew from the checkpoint: config keys, tensor names, tensor bytes. Then
the hypotheses of bench/hypotheses.py, one thing wrong at a time: one that gives the served counts is the cause.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any, Mapping, Sequence

import numpy as np

from nemo_automodel.components.speculative.bench.metrics import acceptance_length, per_position
from nemo_automodel.components.speculative.serve.counters import SpecDecodeCounters
from nemo_automodel.files import TensorInfo, read_json, read_safetensors_header

TOLERANCE = 0.02  # per position in bfloat16; 0.012 was the most seen
GAIN = 0.1  # tokens per step: a hypothesis that accepts so much more is worth a word
SEARCHED = ("aux layers", "rope", "mask token", "vocabulary map", "missing tensors", "fc", "conventions", "layers",
            "shared weights")  # fmt: skip
_CONFIG_AREAS = {
    "eagle_aux_hidden_state_layer_ids": "aux layers", "rope_theta": "rope", "rope_parameters": "rope",
    "rope_scaling": "rope", "mask_token_id": "mask token", "pard_token": "mask token", "ptd_token_id": "mask token",
    "draft_vocab_size": "vocabulary map", "num_hidden_layers": "layers", "norm_before_residual": "conventions",
    "norm_output": "conventions", "rms_norm_eps": "conventions",
}  # fmt: skip
_SAID_ONLY = ("transformers_version", "_name_or_path", "torch_dtype")  # change nothing that is computed


@dataclass(frozen=True)
class Cause:
    """One explanation. `proof`: "bytes" (the folders differ), that it gives the served counts, or, of the checkpoint
    itself, that the draft accepts more with it."""

    area: str
    what: str
    proof: str


@dataclass(frozen=True)
class Diagnosis:
    """`causes`, surest first; `checked` in the order of the checks."""

    checked: tuple[str, ...]
    causes: tuple[Cause, ...]
    nearest: str | None = None  # without a cause by counts: the hypothesis that comes nearest, and by how much

    def sentence(self) -> str:
        """One line for a log."""
        if self.causes:
            return "likely cause: " + "; ".join(f"{c.area}: {c.what} ({c.proof})" for c in self.causes[:3])
        tail = f"; nearest: {self.nearest}" if self.nearest else ""
        return f"no cause found; checked: {', '.join(self.checked)}{tail}"


def compare_folders(expected: Path, served: Path) -> tuple[Cause, ...]:
    """Every difference between an export made from the checkpoint and the one that was served.

    Raises:
        OSError, ValueError: a file of them cannot be read.
    """
    causes = _compare_configs(read_json(expected / "config.json"), read_json(served / "config.json"))
    ours, theirs = _tensors(expected), _tensors(served)
    causes += [
        Cause("missing tensors", f"{name} is not served", "bytes") for name in sorted(ours.keys() - theirs.keys())
    ]
    causes += [
        Cause("names", f"{name} is not in the checkpoint", "bytes") for name in sorted(theirs.keys() - ours.keys())
    ]
    for name in sorted(ours.keys() & theirs.keys()):
        if what := _compare_tensor(ours[name], theirs[name], ours):
            causes.append(Cause(_area_of(name), f"{name} {what}", "bytes"))
    return tuple(sorted(causes, key=lambda cause: _order(cause.area)))


def _compare_configs(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[Cause]:
    keys = [key for key in sorted({*ours, *theirs}) if key not in _SAID_ONLY and ours.get(key) != theirs.get(key)]
    return [
        Cause(
            _CONFIG_AREAS.get(key, "config"), f"config.json: {key} is {theirs.get(key)}, not {ours.get(key)}", "bytes"
        )
        for key in keys
    ]


_Place = tuple[TensorInfo, Path, int]  # the tensor, its file, where the file's data starts
_ONE = {"F32": b"\x00\x00\x80\x3f", "BF16": b"\x80\x3f", "F16": b"\x00\x3c"}  # 1.0, little endian


def _tensors(folder: Path) -> dict[str, _Place]:
    """Every tensor of the folder, without the `model.` prefix that some layouts have."""
    found: dict[str, _Place] = {}
    for path in sorted(folder.glob("*.safetensors")):
        header = read_safetensors_header(path)
        found |= {info.name.removeprefix("model."): (info, path, header.data_start) for info in header.tensors}
    return found


def _bytes(place: _Place) -> np.ndarray:
    info, path, start = place
    return np.memmap(path, np.uint8, "r", offset=start + info.begin, shape=(info.end - info.begin,))


def _compare_tensor(ours: _Place, theirs: _Place, checkpoint: Mapping[str, _Place]) -> str | None:
    a, b = ours[0], theirs[0]
    if (a.dtype, tuple(a.shape)) != (b.dtype, tuple(b.shape)):
        return f"is {b.dtype} {list(b.shape)}, not {a.dtype} {list(a.shape)}"
    left, right = _bytes(ours), _bytes(theirs)
    if np.array_equal(left, right):
        return None
    return _whose(b, right, checkpoint) or _how(a, left, right)


def _whose(info: TensorInfo, data: np.ndarray, checkpoint: Mapping[str, _Place]) -> str | None:
    """What the served bytes are, when they are no weights of this tensor at all."""
    if not data.any():
        return "is all zeros"
    one = _ONE.get(info.dtype)
    if one and np.array_equal(data, np.resize(np.frombuffer(one, np.uint8), data.shape)):
        return "is all ones, as vLLM leaves a norm that it does not find"
    digest = None
    for name, place in checkpoint.items():
        if place[0].end - place[0].begin == len(data):
            digest = digest or hashlib.sha256(data).digest()
            if hashlib.sha256(_bytes(place)).digest() == digest:
                return f"holds the values of {name}"
    return None


def _how(info: TensorInfo, left: np.ndarray, right: np.ndarray) -> str:
    """What was done to a tensor, where it can be told."""
    if info.name.endswith("fc.weight"):
        ours, theirs = (array.reshape(info.shape[0], 3, -1) for array in (left, right))
        for order in permutations(range(3)):
            if np.array_equal(ours[:, order], theirs):
                rotated = f"rotated by {order[0]}" if order in ((1, 2, 0), (2, 0, 1)) else f"in the order {list(order)}"
                return f"has its blocks {rotated}"
        return "differs (fc blocks not merely moved)"
    if info.name == "d2t":
        ours, theirs = (array.view(np.int64) + np.arange(info.shape[0]) for array in (left, right))
        moved = int((ours != theirs).sum())
        same = np.array_equal(np.sort(ours), np.sort(theirs))
        return f"is permuted: {moved} of {len(ours)} rows name another token" if same else f"differs in {moved} rows"
    if len(info.shape) == 2 and _row_digests(info, left) == _row_digests(info, right):
        return "has its rows in another order"
    width = len(left) // max(1, info.numel)
    changed = int((left.reshape(-1, width) != right.reshape(-1, width)).any(1).sum()) if width else 0
    return f"differs in {changed} of {info.numel} elements"


def _row_digests(info: TensorInfo, data: np.ndarray) -> list[bytes]:
    return sorted(hashlib.blake2b(row, digest_size=16).digest() for row in data.reshape(info.shape[0], -1))


def _area_of(name: str) -> str:
    areas = {"d2t": "vocabulary map", "t2d": "vocabulary map", "mask_hidden": "mask token", "fc.weight": "fc"}
    return areas.get(name, "weights")


def _order(area: str) -> int:
    return SEARCHED.index(area) if area in SEARCHED else len(SEARCHED)


def judge_counts(tried: Sequence[Mapping[str, Any]], served: SpecDecodeCounters, dtype: str) -> Diagnosis:
    """Which hypothesis explains the served counts. `tried`: by bench/hypotheses.py, the draft as it is first."""
    exact = dtype == "float32"
    base, *others = [(one, _counters(one)) for one in tried]
    causes, near = [], []
    for one, counted in others:
        if counted == base[1]:
            continue  # changes nothing for these prompts: explains nothing
        distance = _distance(counted, served)
        if _same(counted, served) or (not exact and distance <= TOLERANCE < _distance(base[1], served)):
            proof = "gives the served counts" if _same(counted, served) else f"within {distance:.3f} of the served ones"
            causes.append((distance, Cause(one["area"], one["name"], proof)))
        near.append(
            (
                distance,
                f"{one['area']}: {one['name']} (off by {distance:.3f}; as it is by {_distance(base[1], served):.3f})",
            )
        )
    causes.sort(key=lambda cause: (cause[0], _order(cause[1].area)))
    better = [
        Cause(
            one["area"],
            one["name"],
            f"accepts more: {acceptance_length(c):.3f}, as it is {acceptance_length(base[1]):.3f}",
        )
        for one, c in others
        if acceptance_length(c) > acceptance_length(base[1]) + GAIN
    ]
    checked = tuple(area for area in SEARCHED if any(one["area"] == area for one, _ in others))
    nearest = min(near)[1] if near and not causes and not _same(base[1], served) else None
    return Diagnosis(checked, (*(cause for _, cause in causes), *better), nearest)


def _counters(one: Mapping[str, Any]) -> SpecDecodeCounters:
    accepted, drafts = tuple(one["accepted_per_position"]), one["num_drafts"]
    return SpecDecodeCounters(drafts, drafts * len(accepted), sum(accepted), accepted)


def _same(one: SpecDecodeCounters, other: SpecDecodeCounters) -> bool:
    return (one.num_drafts, one.accepted_per_position) == (other.num_drafts, other.accepted_per_position)


def _distance(one: SpecDecodeCounters, other: SpecDecodeCounters) -> float:
    """Largest difference of a share over the positions."""
    return max((abs(a - b) for a, b in zip(per_position(one), per_position(other), strict=True)), default=0.0)
