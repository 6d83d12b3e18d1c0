# SPDX-License-Identifier: Apache-2.0
"""Messages of the serve stage in the words of the plain command line: its flags instead of Hydra's keys."""

from __future__ import annotations

import argparse
import re
from typing import NoReturn

from nemo_automodel.errors import ConfigError

# Hydra's key -> the flag of `serve_vllm` that sets the same.
FLAGS = {
    "checkpoint": "--draft",
    "draft_tensor_parallel_size": "--draft-tp-size",
    "dtype": "--dtype",
    "engine": "--engine",
    "export_dir": "--export-dir",
    "export_shared": "--export-shared",
    "gpu_memory_utilization": "--gpu-memory-utilization",
    "host": "--host",
    "max_model_len": "--max-model-len",
    "method": "--method",
    "num_speculative_tokens": "--num-speculative-tokens",
    "port": "--port",
    "print_only": "--print-only",
    "python": "--python",
    "target": "--target",
    "tensor_parallel_size": "--tp-size",
    "trust_remote_code": "--trust-remote-code",
    "served_model_name": "-- --served-model-name",
    "vllm.version": "--vllm-version",
}


class OneLineParser(argparse.ArgumentParser):
    """argparse whose mistakes read like the rest: one line, and what to type next."""

    for_unrecognized: str | None = None  # the remedy for a flag that there is not; None: the help

    def error(self, message: str) -> NoReturn:
        remedy = self.for_unrecognized if "unrecognized" in message else None
        raise ConfigError(message, where="command line", remedy=remedy or f"{self.prog} --help")


_KEY = re.compile(r"(?<![\w./-])([+~]?)serve\.([a-z_]+(?:\.[A-Za-z_][\w-]*)*)(?:=([^\s,;)\]]+))?")
_GROUP = re.compile(r"(?<![\w./-])serve/(vllm|port|engine)=(\w+)")
_PHRASES = (
    ("leave it at null", "leave it out"),
    ("or null", "or leave it out"),
    ("serve.extra_args", "after --"),
    ("serve.env", "environment"),
)


def as_flags(text: str) -> str:
    """`serve.port=0` -> `--port 0`, `serve.extra_args.max_num_seqs=8` -> `-- --max-num-seqs 8`; paths stay."""
    text = _GROUP.sub(_group, _KEY.sub(_key, text))
    for hydra, plain in _PHRASES:
        text = re.sub(rf"(?<![\w./-]){re.escape(hydra)}(?![\w.])", plain, text)
    return re.sub(r"(?<=-> )set (--[a-z-]+) instead", r"give \1 before the --", text)


def _key(match: re.Match[str]) -> str:
    sign, key, value = match.groups()
    if key.startswith("extra_args."):
        flag = "--" + key.removeprefix("extra_args.").replace("_", "-")
        return f"without {flag}" if sign == "~" else _with(f"-- {flag}", value)
    if key.startswith("env."):
        name = key.removeprefix("env.")
        return f"{name}={value} in the environment" if value else f"{name} in the environment"
    return _with(FLAGS[key], value) if key in FLAGS else match.group()


def _with(flag: str, value: str | None) -> str:
    return flag if value in (None, "true") else f"{flag} {value}"


def _group(match: re.Match[str]) -> str:
    group, option = match.groups()
    if group == "vllm":
        return f"--vllm-version {option.lstrip('v').replace('_', '.')}"
    return f"--{group} {'0' if option == 'auto' else option}"
