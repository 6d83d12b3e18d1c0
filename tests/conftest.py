# SPDX-License-Identifier: Apache-2.0
"""Nothing in the tests goes to the Hub. Where vLLM is not installed, real-server tests are skipped; in CI they fail."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")
_TOKENS = tempfile.TemporaryDirectory(prefix="tokens-")  # removed at exit; nothing is cached in the home folder
os.environ["TRAIN_THEN_SERVE_TOKENS"] = _TOKENS.name

PEERS = Path(__file__).parents[1].parent / "shared" / "peers"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("vllm") is not None or os.environ.get("CI"):
        return
    skip = pytest.mark.skip(reason="vLLM is not installed: pip install -e '.[cpu]'")
    for item in items:
        if item.get_closest_marker("vllm"):
            item.add_marker(skip)


@pytest.fixture(scope="session")
def peers() -> Path:
    """Checkpoints of other trainers, which lie beside the repository where they are there at all."""
    if not PEERS.is_dir():
        pytest.skip("no ../shared/peers beside the repository")
    return PEERS
