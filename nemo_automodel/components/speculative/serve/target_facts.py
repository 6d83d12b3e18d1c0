# SPDX-License-Identifier: Apache-2.0
"""What the draft is checked against: the target's config.json, local or from the Hub. No torch, no transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Mapping

from nemo_automodel.components.speculative.serve.hub import fetch_hub_file
from nemo_automodel.components.speculative.serve.types import TargetFacts
from nemo_automodel.errors import ResolveError
from nemo_automodel.files import expand_user, is_path_like, read_json

WHERE = "serve.target"


def read_target(path: str, base_dir: Path | None = None) -> TargetFacts:
    """Read a target's sizes from its config.json; a nested `text_config` is flattened over the top level.

    `path` is a folder (relative ones are taken from `base_dir`) or a Hub id.

    Raises:
        ResolveError: no such folder, no readable config.json, or a key that fixes a size is missing.
    """
    if not path.strip():  # it would be the current folder
        raise ResolveError("the target is an empty string", where=WHERE, remedy="name a model folder or a Hub id")
    folder = Path(base_dir or ".") / expand_user(path)
    if folder.is_dir():
        file = folder / "config.json"
        if not file.is_file():
            raise ResolveError(
                f"no config.json in {folder}", where=WHERE, remedy="name a folder of a Hugging Face model"
            )
    elif folder.is_file():
        raise ResolveError(f"{folder} is a file", where=WHERE, remedy="name the model's folder")
    elif is_path_like(path, base_dir):
        raise ResolveError(f"no folder {folder}", where=WHERE, remedy="name an existing model folder or a Hub id")
    else:
        file = fetch_hub_file(path, "config.json", where=WHERE)
    config = _read(file)
    if name := _draft_class(config):
        raise ResolveError(
            f"{path} is a draft ({name}), not a target",
            where=WHERE,
            remedy="name the model that the draft was made for",
        )
    return replace(facts_from_config(path, config), folder=file.parent)


def read_target_or_none(path: str, base_dir: Path | None = None) -> tuple[TargetFacts | None, str | None]:
    """`read_target` for printing: a Hub id that cannot be read gives (None, warning); a bad local target still raises.

    Raises:
        ResolveError: as `read_target`, for a path.
    """
    try:
        return read_target(path, base_dir), None
    except ResolveError as error:
        if is_path_like(path, base_dir) or (Path(base_dir or ".") / expand_user(path)).is_dir():
            raise
        lost = "vocabulary, hidden size, layers and lengths of the draft were not checked against it (skipped)"
        return None, f"the target's config.json could not be read, so {lost}: {error.found}"


def _draft_class(config: Mapping[str, Any]) -> str | None:
    """The class of a config that is a speculative draft's; None: it is another model's."""
    names = config.get("architectures")
    names = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
    return next((name for name in names if "Eagle3" in name or name.endswith("DraftModel")), None)


def tokenizer_size(folder: Path | None) -> int | None:
    """One more than the highest id of the `tokenizer.json` beside the target's config; None: there is none to read."""
    try:
        content = read_json(folder / "tokenizer.json") if folder is not None else {}
    except (OSError, ValueError):
        return None
    model = content.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    ids = list(vocab.values()) if isinstance(vocab, dict) else []
    ids += range(len(vocab)) if isinstance(vocab, list) else []  # a unigram model's pieces, in the order of their ids
    added = content.get("added_tokens")
    ids += [token.get("id") for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    return max((i for i in ids if type(i) is int), default=-1) + 1 or None


def _read(file: Path) -> dict[str, Any]:
    try:
        return read_json(file)
    except (OSError, ValueError) as error:
        raise ResolveError(str(error), where=WHERE, remedy="mend or download this config.json again") from error


def facts_from_config(path: str, config: Mapping[str, Any]) -> TargetFacts:
    """The facts in a target's config dict.

    Raises:
        ResolveError: a key that fixes a size is missing or no positive integer; all of them are named.
    """
    nested = config.get("text_config")
    flat = {**config, **nested} if isinstance(nested, Mapping) else dict(config)
    heads = flat.get("num_attention_heads")
    flat.setdefault("num_key_value_heads", heads)
    if flat["num_key_value_heads"] is None:
        flat["num_key_value_heads"] = heads
    sizes = ("hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads", "num_key_value_heads")
    sizes += ("max_position_embeddings",)
    bad = [key for key in sizes if type(flat.get(key)) is not int or flat[key] <= 0]
    if bad:
        raise ResolveError(
            f"the config.json of {path} has no usable {', '.join(bad)}",
            where=WHERE,
            remedy="name a decoder-only language model",
        )
    return TargetFacts(
        path=path, model_type=str(flat.get("model_type", "")), config=flat, **{key: flat[key] for key in sizes}
    )


def absolute_target(target: str, base_dir: Path) -> str:
    """A local target as an absolute path (a pasted command must work from any folder); a Hub id as it is."""
    folder = (base_dir / expand_user(target)).absolute()
    return str(folder) if target.strip() and folder.is_dir() else target  # empty: `read_target` says so
