# SPDX-License-Identifier: Apache-2.0
"""The words after `--` on the plain command line, as `serve.extra_args`."""

from __future__ import annotations

import re
from typing import Any, Sequence

from nemo_automodel.components.speculative.serve.command import MANAGED
from nemo_automodel.components.speculative.serve.flag_kinds import long_flag, takes_several
from nemo_automodel.errors import ConfigError


def parse_extra(words: Sequence[str]) -> dict[str, Any]:
    """vLLM flags as `serve.extra_args`: --flag VALUE, --flag=VALUE, or a bare --flag (true).

    Raises:
        ConfigError: a word that belongs to no flag, or a flag given twice.
    """
    extra: dict[str, Any] = {}
    i = 0
    while i < len(words):
        word = words[i]
        if not re.match(r"--[^-=]", word):
            raise _no_flag(word, last=next(reversed(extra), None))
        key, equals, value = word[2:].partition("=")
        i += 1
        if key in extra:
            raise ConfigError(f"--{key} is given twice", where="after --", remedy="keep one")
        several = []
        while not equals and i < len(words) and not words[i].startswith("--"):
            several.append(words[i])
            i += 1
            if not takes_several(key.replace("_", "-")):
                break
        extra[key] = value if equals else several if len(several) > 1 else several[0] if several else True
    return extra


def _no_flag(word: str, *, last: str | None) -> ConfigError:
    """A word after -- that is no long flag; `last`: the flag before it, which has its value."""
    long = long_flag(word)
    if long in MANAGED:
        found, remedy = "short flags are not taken", f"set {MANAGED[long]} instead"
    elif long is not None:
        found, remedy = "short flags are not taken", f"write --{long}"
    elif re.match(r"-[^\d]", word):
        found, remedy = "it is no flag of vLLM's", "write --flag VALUE or --flag=VALUE"
    else:
        found = f"belongs to no flag{f' (--{last} has its one value)' if last else ''}"
        remedy = "write --flag VALUE or --flag=VALUE; what belongs together goes in quotes"
    return ConfigError(
        f"{word!r}: {found}" if word.startswith("-") else f"{word!r} {found}", where="after --", remedy=remedy
    )


def served_name(extra: dict[str, Any]) -> str | None:
    """The name that is given after the -- (taken out of `extra`)."""
    name = extra.pop("served-model-name", None)
    if name is True:
        found = "--served-model-name has no value"
        raise ConfigError(found, where="after --", remedy="write --served-model-name NAME, or leave it out")
    return name
