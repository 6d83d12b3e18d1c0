# SPDX-License-Identifier: Apache-2.0
"""What a serving job's own values may be, whichever command line they come from: Hydra's or the plain one."""

from __future__ import annotations

from typing import Any, Callable

from nemo_automodel.components.speculative.serve.types import ServeSpec
from nemo_automodel.errors import ConfigError

# (key of `serve`, is it fine?, what is wanted); the names are those of ServeSpec, too
RULES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("tensor_parallel_size", lambda v: v >= 1, "1 or more"),
    ("gpu_memory_utilization", lambda v: 0 < v <= 1, "in (0, 1]"),
    ("max_model_len", lambda v: v is None or v >= 1, "1 or more, or null"),
    ("num_speculative_tokens", lambda v: v is None or v >= 0, "0 (no speculation) or more, or null"),
    ("export_dir", lambda v: v is None or bool(v.strip()), "a folder, or leave it at null"),
    ("served_model_name", lambda v: v is None or (v.isprintable() and v == v.strip() != ""), "a name of one line"),
    ("python", lambda v: v is None or bool(v.strip()), "the path of an interpreter, or leave it at null"),
)


def refuse_unusable(spec: ServeSpec) -> None:
    """Raises ConfigError: a value that no server could be started with, or that would silently mean something else."""
    for key, fine, wanted in RULES:
        refuse(f"serve.{key}", getattr(spec, key), fine, wanted)


def refuse(key: str, value: Any, fine: Callable[[Any], bool], wanted: str) -> None:
    """Raises ConfigError: the value of `key` is not fine."""
    if not fine(value):
        empty = isinstance(value, str) and not value.strip()
        found = "it is empty" if empty else f"{value!r} is out of range"
        raise ConfigError(found, where=key, remedy=f"give {wanted}")
