# SPDX-License-Identifier: Apache-2.0
"""`serve/runtime=docker`: the same vLLM command inside the image of the version.

What vLLM reads is mounted under its own path, so its flags are those of a server without a container. The container
listens on all of its own addresses; the mapping of the port binds `serve.host` only.
"""

from __future__ import annotations

import csv
import io
import ipaddress
import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Mapping

from nemo_automodel.components.speculative.serve.gpus import visible_gpus
from nemo_automodel.components.speculative.serve.secret_names import secret_keys, shell_remedy
from nemo_automodel.components.speculative.serve.types import LaunchCommand, ServeSpec
from nemo_automodel.components.speculative.serve.vllm_release import (
    ResolvedRelease,
    known_minors,
    newest_patch,
    release_for,
    unknown_text,
)
from nemo_automodel.errors import ConfigError, LaunchError, PreflightError
from nemo_automodel.files import expand_user

IMAGE = "vllm/vllm-openai"
HUB = "/root/.cache/huggingface/hub"  # in the image, whose user is root
ANSWER_S = 60  # an engine that was just started may take a while
# Passed on by name, so that no value is printed.
BY_NAME = ("VLLM_API_KEY", "HF_TOKEN", "HF_ENDPOINT", "HF_HUB_OFFLINE")
_MANAGED = re.compile(r"^(--(detach|entrypoint|publish|publish-all|rm|ipc)|-[dpPti]+)(=|$)")


def image_of(spec: ServeSpec) -> str:
    """The image that serves: the one that is named, else that of the exact version.

    Raises:
        ConfigError: no vLLM version.
    """
    return spec.runtime.image or f"{IMAGE}:v{_version(spec)}"


def _version(spec: ServeSpec) -> str:
    """The exact version: what is asked for, else what a named image's tag says, else the newest known."""
    wanted = spec.vllm_version
    tag = re.search(r":v?(\d+\.\d+(\.\d+)?)[^/]*$", spec.runtime.image or "")
    if wanted == "auto":
        wanted = tag[1] if tag else known_minors()[-1]
    plain = wanted.strip().lstrip("v").replace("_", ".").partition("+")[0]
    minor = release_for(plain).version
    return plain if plain != minor else newest_patch(minor, "vllm") or f"{minor}.0"


def release_of_image(spec: ServeSpec) -> ResolvedRelease:
    """The facts for the image's version; nothing is asked of docker.

    Raises:
        ConfigError: no vLLM version.
    """
    version = _version(spec)
    release = release_for(version)
    warnings = [] if release.known else [unknown_text(release)]
    if (
        spec.runtime.image is not None
        and spec.vllm_version == "auto"
        and version.partition("+")[0] not in image_of(spec)
    ):
        warnings.append(f"the facts for {spec.runtime.image} are those of vLLM {release.version}: serve.vllm.version=X")
    if spec.runtime.image is None and not visible_gpus():
        warnings.append(f"no GPU is seen here, and {IMAGE} needs one: name a CPU image, serve.runtime.image=NAME")
    return ResolvedRelease(release, version, False, tuple(warnings))


def check_docker(spec: ServeSpec) -> None:
    """A docker engine that answers, and a GPU for an image that needs one; the Hub's cache is there to be mounted.

    Raises:
        LaunchError: no docker, or its engine does not answer.
        PreflightError: vLLM's own image without a GPU.
    """
    remedy = "start docker, or serve/runtime=managed; serve.print_only=true prints the line for another machine"
    program = shutil.which("docker")
    if program is None:
        raise LaunchError("there is no docker here", where="serve.runtime", remedy=remedy)
    argv = [program, "version", "--format", "{{.Server.Version}}"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=ANSWER_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise LaunchError(
            f"docker gives no answer within {ANSWER_S} s", where="serve.runtime", remedy=remedy
        ) from error
    if done.returncode != 0:
        last = ([line for line in done.stderr.splitlines() if line.strip()] or ["no output"])[-1].strip()
        raise LaunchError(f"the docker engine does not answer: {last}", where="serve.runtime", remedy=remedy)
    if spec.runtime.image is None and not visible_gpus():
        raise PreflightError(
            f"{IMAGE} needs a GPU, none is seen here",
            where="serve.runtime.image",
            remedy="name a CPU image, or serve/runtime=managed",
        )
    if not Path(spec.target).is_absolute():
        hub_cache(os.environ).mkdir(parents=True, exist_ok=True)


def build_docker_command(
    served: LaunchCommand, spec: ServeSpec, draft: Path | None, environ: Mapping[str, str]
) -> LaunchCommand:
    """The `docker run` line around a vLLM command; `draft` is the export's folder (None: a server without draft).

    Looks at links below the folders that are mounted; writes nothing.

    Raises:
        ConfigError: a host that is no address, or words in `serve.runtime.docker_args` that are managed or secret.
    """
    _check_extra(spec)
    inner = _listen_everywhere(list(served.argv[3:]))  # without `python -m module`
    port = inner[inner.index("--port") + 1]
    words = ["docker", "run", "--rm", "--init", "--ipc=host", *_gpus(spec, environ)]
    words += ["--publish", f"{_address(spec.host)}:{port}:{port}"]
    for mount in [*_mounts(Path(spec.target)), *(_mounts(draft) if draft else [])]:
        words += ["--mount", mount]
    if not Path(spec.target).is_absolute():  # a Hub id: the server downloads into the cache, so it may write there
        words += ["--mount", _mount(hub_cache(environ), HUB, readonly=False)]
    for name, value in served.env.items():
        words += ["--env", f"{name}={value}"]
    for name in BY_NAME:
        if name in environ and name not in served.env:
            words += ["--env", name]
    words += [*spec.runtime.docker_args, "--entrypoint", "python3", image_of(spec)]
    return replace(served, argv=(*words, *served.argv[1:3], *inner), env={}, unset=())


def _listen_everywhere(inner: list[str]) -> list[str]:
    inner[inner.index("--host") + 1] = "0.0.0.0"
    return inner


def _address(host: str) -> str:
    """`serve.host` as docker's port mapping takes it."""
    try:
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError as error:
        raise ConfigError(
            f"docker publishes a port on an address, and {host!r} is none",
            where="serve.host",
            remedy="serve.host=127.0.0.1, or 0.0.0.0",
        ) from error
    return f"[{address}]" if address.version == 6 else str(address)


def _gpus(spec: ServeSpec, environ: Mapping[str, str]) -> list[str]:
    """vLLM's own image runs on GPUs only; a named one gets those that are seen here."""
    if spec.runtime.image is not None and not visible_gpus():
        return []
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    return ["--gpus", f'"device={chosen}"' if chosen else "all"]  # docker reads CSV: a list needs the quotes


def hub_cache(environ: Mapping[str, str]) -> Path:
    """The Hub's cache on this machine (huggingface_hub's own rule)."""
    home = environ.get("HF_HOME") or os.path.join(environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return expand_user(environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")).absolute()


def _mounts(folder: Path) -> list[str]:
    """A local folder, and what links in it point to outside of it (a Hub snapshot's blobs); nothing for a Hub id."""
    if not folder.is_absolute():
        return []
    real = folder.resolve()
    places = {folder: real}
    for entry in sorted(folder.iterdir()) if folder.is_dir() else []:
        if entry.is_symlink() and not entry.resolve().is_relative_to(real):
            named = Path(os.path.normpath(folder / os.readlink(entry)))
            source = entry.resolve()
            whole = named.name == source.name
            places[named.parent if whole else named] = source.parent if whole else source
    return [_mount(source, str(target)) for target, source in places.items()]


def _mount(source: Path, target: str, *, readonly: bool = True) -> str:
    """One --mount value: docker reads a line of CSV, so a comma in a path needs its quoting."""
    text = io.StringIO()
    fields = ["type=bind", f"source={source}", f"target={target}", *(["readonly"] if readonly else [])]
    csv.writer(text, lineterminator="").writerow(fields)
    return text.getvalue()


def _check_extra(spec: ServeSpec) -> None:
    where = "serve.runtime.docker_args"
    for word in spec.runtime.docker_args:
        if _MANAGED.match(word):
            raise ConfigError(f"{word} is managed here", where=where, remedy="leave it out")
    for found in secret_keys(spec.runtime.docker_args, where):
        name = found.rpartition(".")[2]
        told = shell_remedy(name, f"{where}.")
        remedy = told if name in BY_NAME else f"{told}; pass it on as [-e, {name}]"
        raise ConfigError(f"{name} would put a secret on the command line", where=where, remedy=remedy)
