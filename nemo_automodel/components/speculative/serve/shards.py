# SPDX-License-Identifier: Apache-2.0
"""The weight files of one model folder: the index or the single file, every shard whole, nothing outside the folder."""

from __future__ import annotations

import re
from pathlib import Path

from nemo_automodel.components.speculative.serve.types import ShardTensor
from nemo_automodel.errors import ResolveError
from nemo_automodel.files import read_json, read_safetensors_header

WHERE = "serve.checkpoint"
AGAIN = "name another checkpoint, or copy or save this one again"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_PART = re.compile(r"^(.+)-(\d+)-of-(\d+)\.safetensors$")
_STATE = re.compile(r"^(training_args|optimizer|scheduler|scaler|rng_state|random_states|sampler).*\.\w+$|^\.")
CHUNK_BYTES = 1 << 22
DTYPE_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
}


def weight_files(model_dir: Path) -> dict[Path, frozenset[str] | None]:
    """Shard file -> the names its index promises there (None: no index, whatever is inside).

    Without an index, a whole set of numbered files is the model. An index wins over stray files beside it, except that
    a `model.safetensors` beside an index is refused: loaders differ in which of the two they read.

    Raises:
        ResolveError: no way to tell which files are the model, a missing shard, or an entry that leaves the folder.
    """
    indices = sorted(model_dir.glob("*.safetensors.index.json"))
    files = sorted(file for file in model_dir.glob("*.safetensors") if not file.name.startswith("."))
    if len(indices) > 1:
        raise _bad(
            f"{model_dir} holds {len(indices)} indices: {', '.join(i.name for i in indices)}",
            "keep the one that is meant",
        )
    if indices:
        if (model_dir / SINGLE).exists() and SINGLE not in _weight_map(indices[0]).values():
            raise _bad(
                f"{model_dir} holds both {SINGLE} and {indices[0].name}, which does not name it", "remove the stale one"
            )
        return _indexed(model_dir, indices[0])
    if (model_dir / SINGLE) in files:
        return {model_dir / SINGLE: None}
    if _whole_set(files) or (len(files) == 1 and not _PART.match(files[0].name)):
        return dict.fromkeys(files)
    shown = ", ".join(file.name for file in files[:4])
    count = "1 weight file" if len(files) == 1 else f"{len(files)} weight files"
    raise _bad(f"{model_dir} holds {count} ({shown}) and no {INDEX} (half-written?)", AGAIN)


def pickled_weights(model_dir: Path) -> list[Path]:
    """The `.bin` files that may hold a model (else `.pt`, `.pth`, `.ckpt`), without a trainer's own state."""
    for patterns in (("*.bin",), ("*.pt", "*.pth", "*.ckpt")):
        files = sorted(file for pattern in patterns for file in model_dir.glob(pattern))
        files = [file for file in files if not _STATE.match(file.name)]
        if files:
            return files
    return []


def _whole_set(files: list[Path]) -> bool:
    """Every file of one `<name>-0000i-of-0000n` set, whose index got lost: vLLM loads all files there are, too."""
    parts = [_PART.match(file.name) for file in files]
    stems = {(part[1], int(part[3])) for part in parts if part}
    if not all(parts) or len(stems) != 1:
        return False
    (_, count) = stems.pop()
    return sorted(int(part[2]) for part in parts if part) == list(range(1, count + 1))


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weights = read_json(index).get("weight_map")
    except (OSError, ValueError) as error:
        raise _bad(f"{error} (half-written?)", AGAIN) from error
    if not isinstance(weights, dict) or not weights or not all(isinstance(v, str) for v in weights.values()):
        raise _bad(f"{index} has no usable weight_map", AGAIN)
    return weights


def _indexed(model_dir: Path, index: Path) -> dict[Path, frozenset[str] | None]:
    names: dict[str, set[str]] = {}
    for tensor, file in _weight_map(index).items():
        if Path(file).is_absolute() or ".." in Path(file).parts or "\\" in file or not file.endswith(".safetensors"):
            raise _bad(f"{index} names {file!r}, which is no safetensors file inside its folder", AGAIN)
        names.setdefault(str(Path(file)), set()).add(tensor)  # `./a` is `a`
    missing = sorted(file for file in names if not (model_dir / file).is_file())
    if missing:
        raise _bad(
            f"{index} names {len(missing)} of {len(names)} shards that are not there: {', '.join(missing[:4])}", AGAIN
        )
    return {model_dir / file: frozenset(wanted) for file, wanted in sorted(names.items())}


def read_tensors(model_dir: Path, shards: dict[Path, frozenset[str] | None]) -> tuple[ShardTensor, ...]:
    """The header entries of all shards; with an index, exactly what it promises must be there.

    Raises:
        ResolveError: a truncated or damaged shard, a promised tensor that is missing, one name in two shards.
    """
    tensors: dict[str, ShardTensor] = {}
    for shard, promised in shards.items():
        try:
            header = read_safetensors_header(shard)
        except (OSError, ValueError) as error:
            raise _bad(str(error), AGAIN) from error
        held = {info.name for info in header.tensors}
        starts = [info.begin for info in header.tensors]
        if starts != [0, *(info.end for info in header.tensors)][: len(starts)]:
            raise _bad(f"{shard}: its tensors overlap or leave holes", AGAIN)
        if promised is not None and promised - held:
            raise _bad(f"{shard} lacks {', '.join(sorted(promised - held)[:4])}, which its index promises", AGAIN)
        for info in header.tensors:
            if promised is not None and info.name not in promised:
                continue  # the index places it in another shard: that copy is the model's
            if info.begin < 0 or info.end - info.begin != info.numel * DTYPE_BYTES.get(info.dtype, -1):
                raise _bad(
                    f"{shard}: {info.name} has {info.end - info.begin} bytes for {info.dtype}{list(info.shape)}", AGAIN
                )
            if info.name in tensors:
                raise _bad(f"{info.name} is in both {tensors[info.name].shard.name} and {shard.name}", AGAIN)
            tensors[info.name] = ShardTensor(info, shard)
    if not tensors:
        raise _bad(f"the weight files of {model_dir} hold no tensors", AGAIN)
    return tuple(tensors.values())


def read_bytes(tensor: ShardTensor) -> bytes:
    """The raw bytes of one (small) tensor."""
    start = read_safetensors_header(tensor.shard).data_start + tensor.info.begin
    with tensor.shard.open("rb") as file:
        file.seek(start)
        return file.read(tensor.info.end - tensor.info.begin)


def same_bytes(one: ShardTensor, other: ShardTensor) -> bool:
    """Whether two tensors, of files of any size, hold the same bytes; read in pieces, up to the first difference."""
    left = one.info.end - one.info.begin
    if left != other.info.end - other.info.begin:
        return False
    with one.shard.open("rb") as first, other.shard.open("rb") as second:
        first.seek(read_safetensors_header(one.shard).data_start + one.info.begin)
        second.seek(read_safetensors_header(other.shard).data_start + other.info.begin)
        while left:
            size = min(CHUNK_BYTES, left)
            block = first.read(size)
            if len(block) != size or block != second.read(size):
                return False
            left -= size
    return True


def _bad(found: str, remedy: str) -> ResolveError:
    return ResolveError(found, where=WHERE, remedy=remedy)
