# SPDX-License-Identifier: Apache-2.0
"""The last words of a server that died, answers that are not vLLM's, and another server on the same port."""

from __future__ import annotations

import io
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launching import HOST

from nemo_automodel.components.speculative.serve.launch import running_server
from nemo_automodel.components.speculative.serve.port import find_port, foreign_listeners
from nemo_automodel.components.speculative.serve.process import LogFile, PassThrough, ServerProcess
from nemo_automodel.components.speculative.serve.types import LaunchCommand
from nemo_automodel.errors import LaunchError

DIES = "import sys\nfor i in range(300): print('line', i)\nprint('RuntimeError: the last word')\nsys.exit(3)"
WEB_PAGE = """
import http.server, sys
class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b'<html>')
    def log_message(self, *args): pass
http.server.HTTPServer(('127.0.0.1', int(sys.argv[1])), Page).serve_forever()
"""
SHARES = """
import socket, sys
s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
s.bind(('127.0.0.1', int(sys.argv[1]))); s.listen(); print('up', flush=True); sys.stdin.read()
"""


class SlowTerminal(io.StringIO):
    def write(self, text: str) -> int:
        time.sleep(0.001)
        return super().write(text)


def test_the_last_words_are_waited_for_though_the_terminal_is_slow() -> None:
    terminal = SlowTerminal()
    with ServerProcess(
        LaunchCommand((sys.executable, "-c", DIES), {}, ()), PassThrough(terminal), grace_s=1
    ) as process:
        process.wait()
        assert "exit code 3: RuntimeError: the last word" in process.cause().line
    assert terminal.getvalue().endswith("the last word\n")


class ClosedTerminal(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError("nobody reads")


def test_a_terminal_that_went_away_does_not_stop_the_server_s_output() -> None:
    chatty = "import sys\nfor i in range(9000): print('line', i)\nsys.exit(4)"
    command = LaunchCommand((sys.executable, "-c", chatty), {}, ())
    with ServerProcess(command, PassThrough(ClosedTerminal()), grace_s=1) as process:
        assert process.wait() == 4


def test_a_log_that_was_taken_away_is_no_failure(tmp_path: Path) -> None:
    assert LogFile(tmp_path / "gone.log").tail() == ""


def test_a_web_page_on_the_port_is_no_model(tmp_path: Path) -> None:
    port = find_port(HOST, 0)
    command = LaunchCommand((sys.executable, "-c", WEB_PAGE, str(port), "--model", "target"), {}, ())
    with pytest.raises(LaunchError, match="/v1/models is not answered as vLLM does"):
        with running_server(command, host=HOST, port=port, log=tmp_path / "log", speculative=True, say=lambda _: None):
            pass


def test_two_servers_that_share_a_port_are_told_apart() -> None:
    with socket.socket() as mine:
        mine.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        mine.bind((HOST, 0))
        mine.listen()
        port = mine.getsockname()[1]
        argv = [sys.executable, "-c", SHARES, str(port)]
        with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
            other.stdout.readline()
            assert foreign_listeners(port, [other.pid])
            mine.close()
            assert not foreign_listeners(port, [other.pid])
            other.stdin.close()
