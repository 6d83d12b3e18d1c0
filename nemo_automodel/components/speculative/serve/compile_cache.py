# SPDX-License-Identifier: Apache-2.0
"""Where a server keeps what it compiles. vLLM's own key for it does not know K, so jobs that differ are kept apart.

`VLLM_CACHE_ROOT` (vllm/envs.py, 0.14 to 0.33) holds torch.compile's graphs, Inductor's and Triton's kernels. Jobs of
one shape share a folder, whichever checkpoint they serve: weights are not compiled in, and the next one starts warm.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any, Mapping, Sequence

from nemo_automodel.files import expand_user

VARIABLE = "VLLM_CACHE_ROOT"
FOLDER = "jobs"  # below vLLM's own cache
MODEL_INFOS = "modelinfos"  # what was learnt about model classes; vLLM holds it against a hash of their source
_ADDRESS = ("--host", "--port", "--served-model-name")


def cache_root(argv: Sequence[str], draft_config: Mapping[str, Any], inherited: Mapping[str, str]) -> str:
    """The folder for a server's command line and its draft's config.json (empty: no draft); pure.

    It lies below an inherited VLLM_CACHE_ROOT, else below vLLM's default.
    """
    default = Path(inherited.get("XDG_CACHE_HOME") or "~/.cache") / "vllm"
    base = expand_user(inherited.get(VARIABLE) or default)
    key = json.dumps([_shape(argv), draft_config], sort_keys=True, default=str)  # ASCII: half a surrogate has no UTF-8
    return str(base / FOLDER / hashlib.sha256(key.encode()).hexdigest()[:16])


def share_model_infos(env: Mapping[str, str]) -> None:
    """Link vLLM's own facts about model classes into a job's new cache: asking for them anew takes seconds each.

    Only a folder that `cache_root` named is touched. That it cannot be written is for vLLM to say.
    """
    root = Path(env.get(VARIABLE, ""))
    common = root.parent.parent / MODEL_INFOS
    with contextlib.suppress(OSError):
        if root.parent.name != FOLDER or (root / MODEL_INFOS).exists():
            return
        common.mkdir(parents=True, exist_ok=True)
        root.mkdir(parents=True, exist_ok=True)
        (root / MODEL_INFOS).symlink_to(common)


def _shape(argv: Sequence[str]) -> list[Any]:
    """The command line without what no compiled code depends on: the address, and where the draft lies."""
    words: list[Any] = list(argv)
    for flag in _ADDRESS:
        if flag in words:
            at = words.index(flag)
            del words[at : at + 2]
    if "--speculative-config" in words:
        at = words.index("--speculative-config") + 1
        words[at] = {key: value for key, value in json.loads(words[at]).items() if key != "model"}
    return words
