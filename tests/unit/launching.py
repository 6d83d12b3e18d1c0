# SPDX-License-Identifier: Apache-2.0
"""Start the fake server the way the product starts vLLM."""

from __future__ import annotations

import sys
from pathlib import Path

from nemo_automodel.components.speculative.serve.launch import running_server
from nemo_automodel.components.speculative.serve.port import find_port
from nemo_automodel.components.speculative.serve.types import LaunchCommand

FAKE = Path(__file__).with_name("fake_server.py")
HOST = "127.0.0.1"


def fake(port: int, behaviour: str = "good", *, answers_as: str = "target") -> LaunchCommand:
    """A command line with the flags that the launcher reads, for the fake (which takes its own first)."""
    argv = (sys.executable, str(FAKE), str(port), answers_as, behaviour, "--model", "target")
    return LaunchCommand(argv, {}, ())


def launch(tmp_path: Path, behaviour: str, *, answers_as: str = "target", speculative: bool = True):
    """`running_server` around the fake; a context of (client, info)."""
    port = find_port(HOST, 0)
    command = fake(port, behaviour, answers_as=answers_as)
    return running_server(
        command, host=HOST, port=port, log=tmp_path / "server.log", speculative=speculative, say=lambda _: None
    )
