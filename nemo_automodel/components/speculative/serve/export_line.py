# SPDX-License-Identifier: Apache-2.0
"""The shell command that makes an export, for a printed line."""

from __future__ import annotations

import shlex
import sys

from nemo_automodel.components.speculative.serve.types import Engine, ServeSpec, SharedTensors
from nemo_automodel.components.speculative.serve.vllm_release import VllmRelease

COMMAND_LINE = "nemo_automodel.components.speculative.serve_vllm"


def export_line(spec: ServeSpec, draft: str, release: VllmRelease) -> str:
    """A shell command that makes the export which a launch of `spec` with `release` reuses, from any folder.

    `spec`'s paths are absolute. Options that only a server has stay out: an export neither needs nor checks them.
    """
    options = {
        "--vllm-version": release.version,
        "--max-model-len": spec.max_model_len,
        "--export-dir": spec.export_dir,
        "--export-shared": None if spec.export_shared is SharedTensors.keep else spec.export_shared.value,
        "--engine": None if spec.engine is Engine.vllm else spec.engine.value,
    }
    flags = [word for name, value in options.items() if value is not None for word in (name, str(value))]
    argv = [sys.executable, "-m", COMMAND_LINE, "--target", spec.target, "--draft", draft, *flags, "--export-only"]
    return shlex.join(argv)
