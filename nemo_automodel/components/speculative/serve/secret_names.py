# SPDX-License-Identifier: Apache-2.0
"""Names that hold secrets. Such a value is never taken from the configuration: it would be printed and stored."""

from __future__ import annotations

import re
from typing import Any, Iterator

from nemo_automodel.errors import ConfigError

_SECRET = re.compile(r"SECRET|PASSW|CREDENTIAL|(^|_)TOKEN$|API_?KEY|(ACCESS|PRIVATE)_KEY", re.IGNORECASE)
_STORED = re.compile(r"^\+{0,2}(serve|hydra\.job\.env_set)[.=]")  # `~key` takes a key out and holds no value


def is_secret_name(name: str) -> bool:
    """Whether an environment variable, flag or key of this name holds a secret (`max_num_batched_tokens` does not)."""
    return _SECRET.search(name.replace("-", "_")) is not None


def secret_keys(value: Any, path: str = "") -> Iterator[str]:
    """Dotted paths of the secret names among the keys of nested mappings and lists."""
    if isinstance(value, dict):
        for key, inner in value.items():
            here = f"{path}.{key}" if path else str(key)
            if is_secret_name(str(key)):
                yield here
            else:
                yield from secret_keys(inner, here)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from secret_keys(inner, path)


def refuse_secret_overrides(arguments: list[str]) -> None:
    """Refuse command-line arguments that put a secret under `serve` or into Hydra's environment.

    Call it before Hydra writes `.hydra/*.yaml`.

    Raises:
        ConfigError: `serve.env.VLLM_API_KEY=...`, `serve.extra_args={api-key: ...}` and the like; the key is named, the
            value is not.
    """
    for argument in arguments:
        if not _STORED.match(argument):
            continue
        for where in _secret_places(argument):
            name = where.rpartition(".")[2]
            raise ConfigError(f"{name} is a secret, and overrides are stored", where=where, remedy=shell_remedy(name))


def shell_remedy(name: str) -> str:
    """What to do instead of writing the secret `name` into the configuration."""
    variable = "VLLM_API_KEY" if name.lower().replace("-", "_") == "api_key" else name.upper().replace("-", "_")
    return f"export {variable} in the shell instead: the server inherits it and it is never printed"


def _secret_places(argument: str) -> list[str]:
    key, _, value = argument.lstrip("+").partition("=")
    parts = key.split(".")
    for end, part in enumerate(parts, 1):
        if is_secret_name(part):
            return [".".join(parts[:end])]
    return [found for plain in _values(argument) for found in secret_keys(plain, key)] if "{" in value else []


def _values(argument: str) -> list[Any]:
    """What Hydra's grammar makes of the value; a sweep gives several."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import ChoiceSweep
    from hydra.errors import HydraException

    try:
        override = OverridesParser.create().parse_override(argument)
    except HydraException:
        return []  # Hydra refuses it itself, before it writes anything
    value = override.value()
    return list(value.list) if isinstance(value, ChoiceSweep) else [value]
