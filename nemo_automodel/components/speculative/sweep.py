# SPDX-License-Identifier: Apache-2.0
"""What the command line needs besides Hydra: globs over checkpoints, paths that stay text, the end of a sweep."""

from __future__ import annotations

import copy
import difflib
import glob
import os
import re
import shlex
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from nemo_automodel.components.speculative.run_lock import claim_folder
from nemo_automodel.components.speculative.serve.secret_names import refuse_secret_config
from nemo_automodel.config.schema import AppConfig
from nemo_automodel.errors import ConfigError, UserError
from nemo_automodel.files import expand_user

_GLOB = re.compile(r"^(serve\.checkpoint)=glob\((.*)\)$", re.DOTALL)


# Keys that hold a path or a name. Hydra's grammar would make the number 100000.0 of a folder called 1e5, and 0.3 of the
# vLLM release 0.30.
_TEXT_KEYS = (
    "data.train",
    "data.validation",
    "serve.benchmark.prompts",
    "serve.checkpoint",
    "serve.export_dir",
    "serve.python",
    "serve.served_model_name",
    "serve.target",
    "serve.vllm.version",
    "target.path",
    "train.resume",
)
_LOOKS_TYPED = re.compile(r"[+-]?(\d[\d_]*\.?\d*|\.\d+)(e[+-]?\d+)?|inf|nan|true|false|yes|no|on|off", re.IGNORECASE)


def prepare_arguments(arguments: list[str], base_dir: Path) -> list[str]:
    """The command line as Hydra should see it: globs expanded, path values kept text.

    `serve.checkpoint=glob(PATTERN)` becomes the sorted list of matching folders. Hydra's own `glob()` looks among the
    options of a config group, never among files: on a plain value it gives 0 jobs and exit code 0. LATEST and BEST
    only point at folders of the same list, so they are left out.

    Raises:
        ConfigError: nothing matches, a value that Hydra cannot read, or an unknown key.
    """
    prepared = [_keep_text(_expand(argument, base_dir)) for argument in arguments]
    for argument in prepared:
        if not argument.startswith("-") and "=" in argument:
            _refuse_unreadable(argument)
            _refuse_unknown_key(argument)
    return prepared


def _refuse_unreadable(argument: str) -> None:
    """Hydra's own words for a path with `=` or `,` in it are "mismatched input"; here is what to type."""
    try:
        OverridesParser.create().parse_override(argument)
    except HydraException as error:
        key, _, value = argument.partition("=")
        plain = not set(value) & set("'\"\\")  # then no quote needs an escape, in the shell or in Hydra
        quoted = f"'{key}=\"{value}\"'" if plain else shlex.quote(f"{key}={quote_value(value)}")
        raise ConfigError(
            "Hydra cannot read this value", where=argument, remedy=f"quote it, for the shell and for Hydra: {quoted}"
        ) from error


def _refuse_unknown_key(argument: str) -> None:
    """A plain `key=value` that the schema does not know, with the nearest key that it does."""
    key = argument.partition("=")[0]
    if (
        key[0] in "+~"
        or "/" in key
        or "@" in key
        or key.startswith("hydra.")
        or not key.replace(".", "").isidentifier()
    ):
        return
    place: Any = AppConfig()
    parts = key.split(".")
    for i, part in enumerate(parts):
        if not is_dataclass(place):  # an open dictionary, or a group's name
            return
        known = [f.name for f in fields(place)]
        if part not in known:
            close = difflib.get_close_matches(part, known, n=1)
            prefix = ".".join([*parts[:i], ""])
            hint = f"did you mean {prefix}{close[0]}?" if close else f"keys there: {', '.join(known)}"
            raise ConfigError("unknown key", where=key, remedy=hint)
        place = getattr(place, part)


def _keep_text(argument: str) -> str:
    key, equals, value = argument.partition("=")
    if not equals or key not in _TEXT_KEYS or "'" in value or '"' in value:  # what is quoted is text already
        return argument
    items = value.split(",")
    return f"{key}=" + ",".join(f"'{item}'" if _LOOKS_TYPED.fullmatch(item) else item for item in items)


def _expand(argument: str, base_dir: Path) -> str:
    match = _GLOB.match(argument)
    if not match:
        return argument
    key, pattern = match.group(1), match.group(2).strip().strip("'\"")
    found = sorted(glob.glob(str(base_dir / expand_user(pattern))), key=_natural)
    folders = [path for path in found if Path(path).is_dir() and Path(path).name not in ("LATEST", "BEST")]
    if not folders:
        raise ConfigError("no folder matches", where=argument, remedy=f"see what is there: ls -d {pattern}")
    return f"{key}={','.join(quote_value(path) for path in folders)}"


def _natural(path: str) -> list[Any]:
    """Sort key under which step_500 comes before step_1000."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path)]


def quote_value(value: str) -> str:
    """Quote a string so that Hydra's override grammar gives it back unchanged."""
    if re.fullmatch(r"[A-Za-z_/.\-][\w/.\-]*", value, re.ASCII):
        return value
    # Backslashes count only before a quote (or at the end) in Hydra 1.3's quoted strings.
    body = re.sub(r"(\\*)('|$)", lambda m: m.group(1) * 2 + ("\\'" if m.group(2) else ""), value)
    return f"'{body}'"


def refuse_unusable_place(arguments: list[str], base_dir: Path, conf: Path) -> None:
    """What Hydra answers with a traceback: a folder that cannot be written, a recipe that is not there.

    Raises:
        ConfigError: with the recipes that there are, or what to type for another output folder.
    """
    elsewhere = any(a.startswith(("hydra.run.dir=", "hydra.sweep.dir=")) for a in arguments)
    informs = {"--help", "-h", "--hydra-help", "--cfg", "-c", "--info", "-i", "--version", "--shell-completion"}
    outputs = base_dir / "outputs"
    writable = os.access(outputs if outputs.is_dir() else base_dir, os.W_OK)
    if not elsewhere and not writable and not informs & set(arguments):
        raise ConfigError("cannot be written", where=str(base_dir), remedy="cd elsewhere, or add hydra.run.dir=FOLDER")
    own_conf = any(a.partition("=")[0] in ("-cd", "--config-dir", "-cp", "--config-path") for a in arguments)
    for flag, name in zip(arguments, arguments[1:]):
        if own_conf or flag not in ("-cn", "--config-name"):
            continue
        recipes = sorted(path.stem for path in conf.glob("*.yaml") if path.stem != "base")
        if name.removesuffix(".yaml") not in recipes:
            raise ConfigError("no such recipe", where=f"{flag} {name}", remedy=f"one of {', '.join(recipes)}")


class SweepCallback(Callback):
    """What has to happen before Hydra writes anything: no secret in the configuration, no second run in one folder.

    Also remembers in the launching process where a sweep writes, whatever launcher runs the jobs. Hydra turns an
    exception of a callback into a warning and goes on; only an exit is heard.
    """

    sweep_dir: Path | None = None

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        _resolvable(config)
        _exit_on_mistake(config, "hydra.run.dir")

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        _resolvable(config)
        _exit_on_mistake(config, "hydra.sweep.dir")
        SweepCallback.sweep_dir = Path(config.hydra.sweep.dir).absolute()


def _resolvable(config: DictConfig) -> None:
    """`${hydra:...}` inside a path is resolved through this singleton, which Hydra itself sets only per job."""
    HydraConfig.instance().set_config(copy.deepcopy(config))


def _exit_on_mistake(config: DictConfig, key: str) -> None:
    plain = OmegaConf.to_container(config, resolve=False)
    plain.pop("hydra", None)
    try:
        refuse_secret_config(plain)
        claim_folder(Path(OmegaConf.select(config, key)).absolute(), key=key)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
