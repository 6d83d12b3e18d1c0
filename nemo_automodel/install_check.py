# SPDX-License-Identifier: Apache-2.0
"""The end of a set-up: import what was installed, heal what can be healed, say in one line what cannot.

    python -m nemo_automodel.install_check [--vllm]

PyPI's torchvision, torchaudio and torchcodec are built for one build of torch. Beside another (a CPU build is the usual
case) their import fails, and with it transformers' model classes and vLLM, although text models need none of them.
Each is tried in a process of its own; one that cannot be imported is uninstalled. The functions work on any
interpreter: this one after `make setup`, that of a managed vLLM environment after it was made.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from typing import Callable

from nemo_automodel.errors import PreflightError, UserError

OPTIONAL = ("torchvision", "torchaudio", "torchcodec")
NEEDED = (
    "torch",
    "safetensors",
    "hydra",
    "omegaconf",
    "datasets",
    "transformers.models.qwen3.modeling_qwen3",
    "httpx",
    "prometheus_client",
    "rich",
)
VLLM = ("vllm.entrypoints.openai.api_server",)
IMPORT_TIMEOUT_S = 600  # a cold disk reads several GB of shared libraries
_FIND = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"


def import_error(module: str, python: str = sys.executable) -> str | None:
    """Import `module` in a fresh process of `python`; None, or the last line it printed when it failed."""
    command = [python, "-c", f"import {module}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"no answer within {IMPORT_TIMEOUT_S} s"
    lines = done.stderr.strip().splitlines()
    return None if done.returncode == 0 else (lines[-1] if lines else f"exit code {done.returncode}")


def is_installed(package: str, python: str = sys.executable) -> bool:
    """Whether `python` finds the package; it is not imported."""
    done = subprocess.run([python, "-c", _FIND, package], capture_output=True, timeout=IMPORT_TIMEOUT_S)
    return done.returncode == 0


def heal(package: str, python: str = sys.executable, say: Callable[[str], None] = print) -> None:
    """Uninstall an optional package that is there and cannot be imported."""
    if not is_installed(package, python):
        return
    reason = import_error(package, python)
    if reason is None:
        return
    say(f"{package} does not fit this torch ({reason[:120]}): removing it, text models do not need it.")
    subprocess.run([python, "-m", "pip", "uninstall", "--quiet", "--yes", package], check=True)


def check(
    modules: tuple[str, ...],
    python: str = sys.executable,
    *,
    remedy: str = "delete .venv and run `make setup` again",
) -> None:
    """Import each module.

    Raises:
        PreflightError: one cannot be imported.
    """
    for module in modules:
        reason = import_error(module, python)
        if reason is not None:
            raise PreflightError(f"cannot import {module}: {reason}", where=python, remedy=remedy)


def main() -> int:
    """Heal, check, and print the versions that will be used."""
    parser = argparse.ArgumentParser(description="Check what the set-up installed.")
    parser.add_argument("--vllm", action="store_true", help="vLLM must be importable too")
    arguments = parser.parse_args()
    try:
        for package in OPTIONAL:
            heal(package)
        check(NEEDED + (VLLM if arguments.vllm else ()))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    from nemo_automodel.provenance import versions

    print("installed and importable: " + ", ".join(f"{name} {version}" for name, version in versions().items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
