# SPDX-License-Identifier: Apache-2.0
"""Which server answers: one that runs already, or a vLLM that we start for the time of the work.

The launch code is the serve stage's; it is imported only when a server is to be started.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Any, Mapping
from urllib.parse import urlsplit

import httpx

from nemo_automodel.errors import ConfigError, DataError

KEY_VARIABLE = "OPENAI_API_KEY"
SPEC_FLAGS = {  # vLLM's flags that are fields of `ServeSpec`
    "max_model_len": int, "dtype": str, "tensor_parallel_size": int, "gpu_memory_utilization": float,
    "trust_remote_code": bool,
}  # fmt: skip


def served_target(
    stack: contextlib.ExitStack, target: str | None, *, base_url: str | None, model: str | None, log: Path,
    python: str | None = None, extra_args: Mapping[str, Any] | None = None,
) -> tuple[str, str]:  # fmt: skip
    """(base URL ending in /v1, model name) of a server for this target, one of our own unless `base_url` is given.

    Args:
        stack: stops the server that was started here.
        log: its output goes to `<log>.server.log`.
        extra_args: vLLM's flags for a server of ours, as `serve.extra_args`.

    Raises:
        ConfigError: the URL or the flags are unusable.
        DataError: the server at `base_url` does not answer, or serves several models and none is named.
        VllmMissingError, LaunchError: vLLM is not there or does not start.
    """
    if base_url is None:
        return _start(stack, target, log=log, python=python, extra_args=extra_args or {})
    url = check_url(base_url)
    return url, model or _only_model(url)


def check_url(base_url: str) -> str:
    """The URL without a slash at its end.

    Raises:
        ConfigError: no http(s) URL, or one that holds a password.
    """
    parts = urlsplit(base_url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{base_url!r} is no URL", where="--base-url", remedy="write http://127.0.0.1:8000/v1")
    if parts.username or parts.password:
        raise ConfigError("the URL holds a password", where="--base-url", remedy=f"put the key into {KEY_VARIABLE}")
    return base_url.rstrip("/")


def auth_headers() -> dict[str, str]:
    """From the environment only: a key on a command line is seen by every user of the machine."""
    key = os.environ.get(KEY_VARIABLE)
    return {"Authorization": f"Bearer {key}"} if key else {}


def _only_model(url: str) -> str:
    try:
        answer = httpx.get(f"{url}/models", headers=auth_headers(), timeout=30.0, trust_env=False)
        answer.raise_for_status()
        names = [entry["id"] for entry in answer.json()["data"]]
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{url}/models does not answer: {error}", where="--base-url",
            remedy="check that the server runs and that the URL ends in /v1, or name its model with --model",
        ) from error  # fmt: skip
    if len(names) != 1:
        raise DataError(f"{len(names)} models: {', '.join(names)}", where=url, remedy="name one with --model")
    return names[0]


def _start(
    stack: contextlib.ExitStack, target: str, *, log: Path, python: str | None, extra_args: Mapping[str, Any]
) -> tuple[str, str]:
    from nemo_automodel.components.speculative.serve.command import build_baseline_command
    from nemo_automodel.components.speculative.serve.launch import running_server, stopping_servers
    from nemo_automodel.components.speculative.serve.port import find_port
    from nemo_automodel.components.speculative.serve.target_facts import absolute_target
    from nemo_automodel.components.speculative.serve.types import ServeSpec
    from nemo_automodel.components.speculative.serve.vllm_release import require_vllm, resolve_release

    target = absolute_target(target, Path.cwd())
    fields, rest = {}, {}
    for flag, value in extra_args.items():
        name = flag.replace("-", "_")
        if name in SPEC_FLAGS:
            fields[name] = SPEC_FLAGS[name](value)
        else:
            rest[flag] = value
    spec = ServeSpec(checkpoint="", target=target, python=python, port=0, extra_args=rest, **fields)
    found = resolve_release(spec)
    require_vllm(found, spec)
    port = find_port(spec.host, spec.port)
    command = build_baseline_command(spec, found.release, python, port)
    stack.enter_context(stopping_servers())
    server_log = log.with_name(log.name + ".server.log")
    server_log.parent.mkdir(parents=True, exist_ok=True)
    _, info = stack.enter_context(
        running_server(command, host=spec.host, port=port, log=server_log, speculative=False, say=_say)
    )
    return f"{info.url}/v1", target


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
