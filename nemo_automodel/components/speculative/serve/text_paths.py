# SPDX-License-Identifier: Apache-2.0
"""Paths that are text: a file name is bytes, and vLLM gets the draft's inside JSON."""

from __future__ import annotations

import os
from pathlib import Path

from nemo_automodel.components.speculative.serve.types import ServeSpec
from nemo_automodel.errors import ResolveError


def refuse_no_text(model_dir: Path, spec: ServeSpec) -> None:
    """Raises ResolveError: a path of the job that is no UTF-8. `model_dir` is where the draft was found."""
    given = {"checkpoint": str(model_dir), "target": spec.target, "export_dir": spec.export_dir or ""}
    for key, path in given.items():
        if printable(path) != path:
            raise ResolveError(f"{printable(path)} is not UTF-8", where=f"serve.{key}", remedy="rename the folder")


def printable(path: str) -> str:
    """The path with bytes that are no UTF-8 written as escapes."""
    return os.fsencode(path).decode(errors="backslashreplace")
