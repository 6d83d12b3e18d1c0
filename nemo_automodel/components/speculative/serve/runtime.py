# SPDX-License-Identifier: Apache-2.0
"""Where the server lives: this interpreter or `serve.python`, a managed environment, a docker image; or SGLang.

`settle_runtime` turns a job into one whose interpreter is known and usable; `resolve_release` finds the facts for it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Callable

from nemo_automodel.components.speculative.serve import docker, managed, sglang, vllm_release
from nemo_automodel.components.speculative.serve.types import Engine, RuntimeKind, ServeSpec
from nemo_automodel.components.speculative.serve.vllm_release import ResolvedRelease, release_for, unknown_text
from nemo_automodel.errors import ConfigError

Say = Callable[[str], None]


def settle_runtime(spec: ServeSpec, say: Say, *, start: bool) -> ServeSpec:
    """The job with the interpreter that serves it. With `start`, a managed environment is made when it is not there.

    Without `start` (printing, planning) nothing is installed or asked of docker: `python` is where it would be.

    Raises:
        ConfigError: keys that contradict each other.
        VllmMissingError, PreflightError, LaunchError, Interrupted: the environment cannot be made, no docker engine.
    """
    _refuse_contradictions(spec)
    if spec.runtime.kind is RuntimeKind.managed:
        environment = managed.plan_environment(spec.vllm_version, spec.runtime.dir)
        if start:
            managed.ensure_environment(environment, say)
        return replace(spec, python=str(environment.python))
    if spec.runtime.kind is RuntimeKind.docker and start:
        docker.check_docker(spec)
    return spec


def _refuse_contradictions(spec: ServeSpec) -> None:
    kind = spec.runtime.kind
    if kind is not RuntimeKind.here and spec.python is not None:
        found = f"serve.python names an interpreter, and serve/runtime={kind.value} brings its own"
        raise ConfigError(found, where="serve.python", remedy="leave one of them out")
    if kind is not RuntimeKind.docker and (spec.runtime.image or spec.runtime.docker_args):
        key = "image" if spec.runtime.image else "docker_args"
        raise ConfigError(
            f"serve/runtime={kind.value} starts no container",
            where=f"serve.runtime.{key}",
            remedy="add serve/runtime=docker, or leave it out",
        )
    if spec.engine is Engine.sglang:
        sglang.refuse_options(spec)


def is_planned(spec: ServeSpec) -> bool:
    """A managed environment that is not made yet. `spec` has been through `settle_runtime`."""
    return spec.runtime.kind is RuntimeKind.managed and not managed.is_ready(_environment(spec))


def make_line(spec: ServeSpec) -> list[str] | None:
    """The command that makes the job's environment; None when nothing is to be made."""
    return managed.make_line(_environment(spec)) if is_planned(spec) else None


def _environment(spec: ServeSpec) -> managed.Environment:
    return managed.plan_environment(spec.vllm_version, spec.runtime.dir)


def resolve_release(spec: ServeSpec) -> ResolvedRelease:
    """The facts for a settled job, wherever its server lives.

    Raises:
        ConfigError, VllmMissingError: as `vllm_release.resolve_release`; SGLang is missing (launch only).
    """
    if spec.engine is Engine.sglang:
        return sglang.resolve_sglang(spec)
    if spec.runtime.kind is RuntimeKind.docker:
        return docker.release_of_image(spec)
    if is_planned(spec):
        return _planned_release(spec)
    return vllm_release.resolve_release(spec)


def release_to_export_for(spec: ServeSpec) -> ResolvedRelease:
    """The facts for an export alone: an explicit version is taken at its word, whatever is installed here.

    Raises:
        ConfigError: a bad version or interpreter.
    """
    if spec.engine is Engine.vllm and spec.vllm_version != "auto":
        return vllm_release.release_to_export_for(spec)
    return resolve_release(replace(spec, print_only=True))


def _planned_release(spec: ServeSpec) -> ResolvedRelease:
    environment = _environment(spec)
    release = release_for(environment.version)
    warnings = [] if release.known else [unknown_text(release)]
    warnings.append(f"{environment.path} is not made yet: the first launch installs {environment.requirement}")
    if not spec.print_only:
        managed.refuse_cpu_without_speculation(environment)
    elif environment.cpu and not release.cpu_speculation:
        warnings.append(f"vLLM {release.version} for CPU cannot speculate, and no GPU is seen here")
    return ResolvedRelease(replace(release, cpu=environment.cpu), None, environment.cpu, tuple(warnings))
