# SPDX-License-Identifier: Apache-2.0
"""Names and values that are secrets. None is ever taken from a command line or the configuration: both are printed,
stored, and seen by everybody who lists processes.
"""

from __future__ import annotations

import json
import re
from typing import Any, Iterator, Mapping, Sequence

from nemo_automodel.errors import ConfigError

_SECRET = re.compile(
    r"SECRET|PASSW|PASSPHRASE|CREDENTIAL|(^|_)(TOKEN|PAT)$|API_?KEY|(ACCESS|PRIVATE)_KEY|^AUTHORIZATION$"
    r"|^API_KE?$|^HF_T(O|OK|OKE)?$",  # vLLM's argparse completes these
    re.IGNORECASE,
)
_SPECIAL = re.compile(r"(^|_)(BOS|EOS|PAD|UNK|SEP|CLS|MASK|PARD|IMAGE|AUDIO|VIDEO)_TOKEN$", re.IGNORECASE)  # a model's
# A URL with a password in it; the two kinds of tokens that people paste.
_VALUE = re.compile(r"://[^/\s:@]+:[^/\s@]+@|\bhf_[A-Za-z0-9]{24,}|\bsk-[A-Za-z0-9_-]{24,}")
_ASSIGNED = re.compile(r"^(?:-e|--env[= ]|-+)?([A-Za-z_][\w-]*)\s*[=:]\s*\S")  # NAME=x, -eNAME=x, --flag=x, Header: x
_ANYWHERE = re.compile(r"([A-Za-z_][\w-]*)['\"]?\s*[=:]")


def is_secret_name(name: str) -> bool:
    """Whether an environment variable, flag or key of this name holds a secret (`max_num_batched_tokens` does not)."""
    plain = name.replace("-", "_")
    return _SECRET.search(plain) is not None and not _SPECIAL.search(plain)


def secret_keys(value: Any, path: str = "") -> Iterator[str]:
    """Dotted paths of the secrets in nested mappings, lists of words, and JSON texts. Never a value."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            here = f"{path}.{key}" if path else str(key)
            if is_secret_name(str(key)):
                yield here
            else:
                yield from secret_keys(inner, here)
    elif isinstance(value, (list, tuple)):
        yield from (f"{path}.{name}" for name in secret_words([word for word in value if isinstance(word, str)]))
        for inner in value:
            yield from secret_keys(inner, path)
    elif isinstance(value, str):
        if _VALUE.search(value):
            yield path
        if value.lstrip().startswith(("{", "[")):
            yield from secret_keys(_json(value), path)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def secret_words(words: Sequence[str]) -> Iterator[str]:
    """Names of the secrets among the words of a command line: `NAME=value`, `--name value`, `Name: value`.

    A variable that is passed on by its name alone (`-e VLLM_API_KEY`) is none.
    """
    for i, word in enumerate(words):
        assigned = _ASSIGNED.match(word)
        if assigned and is_secret_name(assigned[1]):
            yield assigned[1]
        elif word.startswith("--") and "=" not in word and is_secret_name(word[2:]) and i + 1 < len(words):
            yield word[2:]


def refuse_secret_words(words: Sequence[str], *, where: str) -> None:
    """Refuse a plain command line with a secret in it, before anything is parsed, printed or written.

    Raises:
        ConfigError: the name of the secret is told, the value is not.
    """
    flag = where
    for i, word in enumerate(words):
        flag = word.partition("=")[0] if word.startswith("--") and len(word) > 2 else flag
        for found in (*secret_words(words[i : i + 2]), *secret_keys(word.partition("=")[2] or word, "a value")):
            name = found.rpartition(".")[2]
            raise ConfigError(f"{name} would put a secret on the command line", where=flag, remedy=shell_remedy(name))


def refuse_secret_overrides(arguments: list[str]) -> None:
    """Refuse Hydra overrides that hold a secret. Call it before Hydra writes `.hydra/*.yaml`.

    Raises:
        ConfigError: `serve.env.VLLM_API_KEY=...`, `serve.extra_args={api-key: ...}`,
            `serve.runtime.docker_args=[-e, VLLM_API_KEY=...]` and the like; the key is named, the value is not.
    """
    for argument in arguments:
        if argument.startswith(("-", "~")) or "=" not in argument:  # `~key` takes a key out and holds no value
            continue
        for where in _secret_places(argument):
            name = where.rpartition(".")[2]
            raise ConfigError(
                f"{name} is a secret, and overrides are stored", where=where, remedy=shell_remedy(name, where)
            )


def refuse_secret_config(config: Mapping[str, Any]) -> None:
    """The same for a composed configuration, whatever file or override a value came from.

    Raises:
        ConfigError: the key is named, the value is not.
    """
    for where in secret_keys(config):
        name = where.rpartition(".")[2]
        found = f"{name} is a secret, and the configuration is stored"
        raise ConfigError(found, where=where, remedy=shell_remedy(name, where))


def shell_remedy(name: str, where: str = "") -> str:
    """What to do instead of writing the secret `name` at `where`; what stands for an environment is a variable."""
    environment = where.startswith(("serve.env.", "serve.runtime.docker_args."))
    if variable := _variable(name) or (name if environment else None):
        return f"export {variable} in the shell instead: the server inherits it and it is never printed"
    return "take it out: a secret on a command line is stored and seen by everybody who lists processes"


def _variable(name: str) -> str | None:
    """The environment variable that does what the flag or key would; None: nothing reads one of that name."""
    plain = name.lower().replace("-", "_")
    if plain in ("api_k", "api_ke", "api_key", "authorization"):
        return "VLLM_API_KEY"
    if re.fullmatch(r"hf_t(o|ok|oke|oken)?", plain):
        return "HF_TOKEN"
    return name if re.fullmatch(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+", name) else None  # it is one already


def _secret_places(argument: str) -> list[str]:
    key, _, value = argument.lstrip("+").partition("=")
    parts = key.split(".")
    for end, part in enumerate(parts, 1):
        if is_secret_name(part):
            return [".".join(parts[:end])]
    if not any(sign in value for sign in "{[:"):
        return [*secret_keys(value, key)]
    plain = _values(argument)
    if plain is None:  # Hydra will refuse it, and show all of it
        return [f"{key}.{name}" for name in _ANYWHERE.findall(value) if is_secret_name(name)]
    return [found for one in plain for found in secret_keys(one, key)]


def _values(argument: str) -> list[Any] | None:
    """What Hydra's grammar makes of the value; a sweep gives several; None: it makes nothing of it."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import ChoiceSweep
    from hydra.errors import HydraException

    try:
        override = OverridesParser.create().parse_override(argument)
    except HydraException:
        return None
    value = override.value()
    return list(value.list) if isinstance(value, ChoiceSweep) else [value]
