# SPDX-License-Identifier: Apache-2.0
"""What values vLLM's flags take, and which of them leave no server that we could wait for (`vllm_flag_kinds.json`)."""

from __future__ import annotations

import json
import math
import re
from functools import lru_cache
from importlib import resources
from typing import Any

from nemo_automodel.errors import ConfigError


@lru_cache(maxsize=1)
def _kinds() -> dict[str, Any]:
    text = resources.files(__package__).joinpath("vllm_flag_kinds.json").read_text(encoding="utf-8")
    return json.loads(text)


def takes_several(flag: str) -> bool:
    """Whether the flag (without dashes) is followed by one word or more: `--lora-modules a=x b=y`."""
    return flag in _kinds()["several"]


def takes_value(flag: str) -> bool:
    """Whether the flag cannot stand alone. False for one that is not known."""
    return flag in _kinds()["value"]


def long_flag(word: str) -> str | None:
    """`-tp`, `-tp=2`, `-O3` -> the long flag (without dashes) that vLLM takes it for; None: there is no such one."""
    short = re.match(r"-(O(?=\d|$)|[a-z]+(?==|$))", word)
    return _kinds()["short"].get(short[1]) if short else None


def refuse_unservable(flag: str, value: Any, where: str) -> None:
    """Raises ConfigError: with this flag the server could not be made ready, or not be measured."""
    for entry in _kinds()["unservable"]:
        off = value is None or str(value).lower() == "false"
        if flag == entry["flag"] and not off and str(value) in entry.get("values", [str(value)]):
            given = f"--{flag} {value}" if "values" in entry else f"--{flag}"
            raise ConfigError(f"{given} {entry['why']}", where=where, remedy=entry["remedy"])


def refuse_wrong_value(flag: str, value: Any, where: str) -> None:
    """A value that the flag's type in vLLM cannot be made of; texts are read as vLLM's parser reads them.

    Raises:
        ConfigError: no value where one is needed, or no number where one is needed.
    """
    kinds = _kinds()
    if flag in kinds["value"] and (isinstance(value, bool) or value in ([], ())):
        raise ConfigError(f"--{flag} has no value", where=where, remedy="give it one, or leave it out")
    if value is None or isinstance(value, bool):
        return
    if flag in kinds["whole"] and not re.fullmatch(r"\s*[+-]?\d[\d_]*\s*", str(value)):
        raise ConfigError(f"--{flag} is {value!r}", where=where, remedy="give a whole number")
    if flag in kinds["fraction"] and not _is_finite(value):
        raise ConfigError(f"--{flag} is {value!r}", where=where, remedy="give a number")


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(float(value))
    except (TypeError, ValueError):
        return False
