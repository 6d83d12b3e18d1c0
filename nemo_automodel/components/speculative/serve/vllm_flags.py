# SPDX-License-Identifier: Apache-2.0
"""Which flags vLLM's API server has, release by release (`vllm_flags.json`), so that a typo ends before training."""

from __future__ import annotations

import difflib
import json
from functools import lru_cache
from importlib import resources
from typing import Any, Iterable

from nemo_automodel.components.speculative.serve.vllm_release import VllmRelease


@lru_cache(maxsize=1)
def _changes() -> list[dict[str, Any]]:
    text = resources.files(__package__).joinpath("vllm_flags.json").read_text(encoding="utf-8")
    return json.loads(text)["changes"]


def _number(minor: str) -> tuple[int, ...]:
    return tuple(int(part) for part in minor.split("."))


def flags_for(version: str) -> frozenset[str]:
    """Flags (without dashes) of a minor; of the newest known one for newer ones."""
    flags: set[str] = set()
    for change in _changes():
        if _number(change["since"]) <= _number(version):
            flags = (flags | set(change["added"])) - set(change["removed"])
    return frozenset(flags)


def full_flag(flag: str, version: str) -> str:
    """The flag that vLLM's argparse takes `flag` for: it completes one that begins only one other."""
    bare, dot, rest = flag.partition(".")
    no, name = ("no-", bare[3:]) if bare.startswith("no-") and bare not in flags_for(version) else ("", bare)
    known = flags_for(version)
    longer = [full for full in known if full.startswith(name)]
    return f"{no}{longer[0]}{dot}{rest}" if name not in known and len(longer) == 1 else flag


def unknown_flag(flag: str, version: str) -> tuple[str, str] | None:
    """(what is wrong, what to type) for a flag that the release's parser would refuse; None: it takes it.

    argparse completes a flag that begins only one other, and `--no-X` switches X off; `--hf-overrides.a.b` sets a part
    of a JSON value.
    """
    known, bare = flags_for(version), flag.partition(".")[0]
    for name in (bare, bare.removeprefix("no-")):
        if name in known or sum(full.startswith(name) for full in known) == 1:
            return None
    history = _history(bare)
    close = [] if history else difflib.get_close_matches(bare, known, n=1, cutoff=0.7)
    remedy = f"did you mean serve.extra_args.{close[0].replace('-', '_')}?" if close else "leave it out"
    return f"vLLM {version} has no --{flag}{history}", remedy


def _history(flag: str) -> str:
    since = [change["since"] for change in _changes() if flag in change["added"]]
    gone = [change["since"] for change in _changes() if flag in change["removed"]]
    told = [f"it came with {since[0]}"] if since and since[0] != _changes()[0]["since"] else []
    told += [f"it ended before {gone[-1]}"] if gone else []
    return f" ({', '.join(told)})" if told else ""


def flag_warnings(keys: Iterable[str], release: VllmRelease) -> tuple[str, ...]:
    """Flags that the newest known release lacks, for a newer one that nobody has read."""
    if release.known:
        return ()
    found = (unknown_flag(str(key).lstrip("-").replace("_", "-"), release.version) for key in keys)
    return tuple(f"{what[0]}, as far as is known: {what[1]}" for what in found if what)
