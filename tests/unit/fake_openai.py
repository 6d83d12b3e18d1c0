# SPDX-License-Identifier: Apache-2.0
"""A small OpenAI-compatible server in a thread: answers `<number of turns>:<last user text>`, with faults on demand."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FakeOpenAI:
    """`faults`: last user text -> (status, headers) to give before the first good answer. Use as a context manager."""

    def __init__(self, faults: dict[str, list[tuple[int, dict[str, str]]]] | None = None, delay_s: float = 0.0) -> None:
        self.faults, self.delay_s = faults or {}, delay_s
        self.bodies: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.under_way = self.most_under_way = 0
        self._lock = threading.Lock()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._reply(200, {"data": [{"id": "target"}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with owner._lock:
                    owner.bodies.append(body)
                    owner.keys.add(self.headers.get("Authorization"))
                    owner.under_way += 1
                    owner.most_under_way = max(owner.most_under_way, owner.under_way)
                    text = body["messages"][-1]["content"]
                    fault = owner.faults[text].pop(0) if owner.faults.get(text) else None
                time.sleep(owner.delay_s)
                with owner._lock:
                    owner.under_way -= 1
                if fault:
                    self._reply(fault[0], {"error": f"fault {fault[0]}"}, fault[1])
                    return
                words = f"{len(body['messages'])}:{text}".split()[: body["max_tokens"]]
                reason = "length" if len(words) == body["max_tokens"] else "stop"
                choice = {"message": {"content": " ".join(words)}, "finish_reason": reason}
                self._reply(200, {"choices": [choice], "usage": {"completion_tokens": len(words)}})

            def _reply(self, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
                data = json.dumps(value).encode()
                self.send_response(status)
                for name, text in (headers or {}).items():
                    self.send_header(name, text)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def asked(self) -> Counter[str]:
        """How often each question was asked."""
        return Counter(body["messages"][-1]["content"] for body in self.bodies)

    def __enter__(self) -> FakeOpenAI:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._server.server_close()
