# SPDX-License-Identifier: Apache-2.0
"""Fetching from the Hub. `huggingface_hub` is imported only where there is something to fetch."""

from __future__ import annotations

import os
import socket
import urllib.parse
import urllib.request
from pathlib import Path

from nemo_automodel.components.speculative.serve.shards import pickled_weights
from nemo_automodel.errors import ResolveError

_UNANSWERED = "the Hub does not answer from this machine, and the local cache has no copy"
CONVERT = "python -m nemo_automodel.components.speculative.serve_vllm convert --draft"
WEIGHT_PATTERNS = ["config.json", "*.safetensors", "*.safetensors.index.json"]


def fetch_hub_file(repo: str, name: str, *, where: str) -> Path:
    """One file of a Hub repository, from the local cache first.

    Raises:
        ResolveError: neither cached nor reachable.
    """
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    cached = try_to_load_from_cache(repo, name)
    if isinstance(cached, str):
        return Path(cached)
    try:
        _knock()
        return Path(hf_hub_download(repo, name))
    except Exception as error:  # noqa: BLE001 - the Hub client raises many unrelated classes; all mean "not to be had"
        raise _unreachable(repo, error, where) from error


def fetch_hub_draft(repo: str, *, where: str) -> Path:
    """The folder of a Hub draft's config and safetensors files, from the local cache when offline.

    Raises:
        ResolveError: neither cached nor reachable.
    """
    from huggingface_hub import snapshot_download

    offline = not _answers()
    try:
        folder = Path(snapshot_download(repo, allow_patterns=WEIGHT_PATTERNS, local_files_only=offline))
    except Exception as error:  # noqa: BLE001 - see fetch_hub_file
        raise _unreachable(repo, OSError(_UNANSWERED) if offline else error, where) from error
    if not any(folder.glob("*.safetensors")) and not pickled_weights(folder):
        raise ResolveError(
            f"{repo} has no safetensors weights ({'in the local cache' if offline else 'on the Hub'})",
            where=where,
            remedy=f"if it has .bin weights: hf download {repo} --local-dir DIR, then {CONVERT} DIR",
        )
    return folder


def _knock() -> None:
    """One connection to the Hub (nothing behind a proxy, which may be the only way out): without it the client retries
    for half a minute on a machine without network.

    Raises:
        OSError: no name service, no route, or no answer within 3 s.
    """
    from huggingface_hub.constants import ENDPOINT, HF_HUB_OFFLINE

    url = urllib.parse.urlsplit(ENDPOINT)
    if HF_HUB_OFFLINE or url.scheme in urllib.request.getproxies():
        return
    socket.create_connection((url.hostname or "", url.port or {"http": 80}.get(url.scheme, 443)), timeout=3).close()


def _answers() -> bool:
    try:
        _knock()
    except OSError:
        return False
    return True


def _unreachable(repo: str, error: Exception, where: str) -> ResolveError:
    offline = (
        " (HF_HUB_OFFLINE is set)"
        if os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on")
        else ""
    )
    text = " ".join(str(error).split()) or type(error).__name__
    reason = text.split(". ")[0].removesuffix(".")  # what follows are links and advice about the client's own options
    return ResolveError(
        f"{repo} is no folder here and cannot be had from the Hub{offline}: {reason}",
        where=where,
        remedy="give the path of a local folder, check the name, or connect to the Hub (private: hf auth login)",
    )
