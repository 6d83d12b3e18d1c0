# SPDX-License-Identifier: Apache-2.0
"""A stand-in for vLLM's API server, run as a child: `fake_server.py PORT MODEL BEHAVIOUR`. Standard library only."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PORT, MODEL, BEHAVIOUR = int(sys.argv[1]), sys.argv[2], sys.argv[3]
PREFIX = "(EngineCore pid=7) ERROR 12-01 17:00:00 [core.py:1] "
COUNTS = {"drafts": 0}
PAGE = """# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total{{engine="0",model_name="{m}"}} {d}
# TYPE vllm:spec_decode_num_draft_tokens counter
vllm:spec_decode_num_draft_tokens_total{{engine="0",model_name="{m}"}} {t}
# TYPE vllm:spec_decode_num_accepted_tokens counter
vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="{m}"}} {a}
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="{m}",position="0"}} {a}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="{m}",position="1"}} 0
"""


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._reply(json.dumps({"data": [{"id": MODEL}]}))
        elif self.path == "/metrics" and BEHAVIOUR != "no_counters":
            d = COUNTS["drafts"]
            if BEHAVIOUR == "killed_between_answers" and d > 20:
                os.kill(os.getpid(), signal.SIGKILL)
            self._reply(PAGE.format(m=MODEL, d=d, t=2 * d, a=d // 2))
        else:
            self._reply("")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "FAKE_SERVER_LOG" in os.environ:
            with open(os.environ["FAKE_SERVER_LOG"], "a") as file:
                file.write(json.dumps(body) + "\n")
        if BEHAVIOUR == "fails_first_request":
            print(PREFIX + "RuntimeError: shape '[-1, 384]' is invalid for input of size 2816", flush=True)
            return self._reply('{"error": "EngineCore encountered an issue"}', 500)
        if BEHAVIOUR == "fails_on_chat" and "messages" in body:
            return self._reply('{"error": "This model\'s maximum context length is 512 tokens"}', 400)
        tokens = body["max_tokens"]
        COUNTS["drafts"] += 0 if BEHAVIOUR == "never_drafts" else tokens // 2
        text = f"echo {body['messages'][-1]['content']}" if "messages" in body else "x"
        if body.get("stream"):
            return self._stream(text, tokens)
        choice = {"message": {"content": text}, "text": text}
        self._reply(json.dumps({"choices": [choice], "usage": {"completion_tokens": tokens}}))

    def _stream(self, text: str, tokens: int) -> None:
        """One token from the prefill, the others two at a time: as many chunks after it as drafts are counted."""
        self.send_response(200)
        self.end_headers()
        done = 0
        sizes = [0, 1, *[2] * ((tokens - 1) // 2), *[1] * ((tokens - 1) % 2)]
        for number, size in enumerate(sizes):
            done += size
            delta = {"role": "assistant", "content": ""} if number == 0 else {"content": text if number == 1 else ""}
            event = {"choices": [{"delta": delta}], "usage": {"completion_tokens": done, "prompt_tokens": 3}}
            self.wfile.write(b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\n\n")
            self.wfile.flush()
            if number == 1 and BEHAVIOUR == "dies_in_an_answer":
                print(PREFIX + "torch.OutOfMemoryError: CUDA out of memory", flush=True)
                os._exit(1)
            if number == 1 and BEHAVIOUR == "killed_in_an_answer":
                os.kill(os.getpid(), signal.SIGKILL)
            if number == 1 and BEHAVIOUR == "falls_silent":
                threading.Event().wait()
            if number == 1 and BEHAVIOUR == "breaks_off":
                return
        usage = {"choices": [], "usage": {"completion_tokens": done, "prompt_tokens": 3}}
        self.wfile.write(b"data: " + json.dumps(usage).encode() + b"\n\ndata: [DONE]\n\n")

    def _reply(self, text: str, status: int = 200) -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        pass


def main() -> None:
    if BEHAVIOUR == "dies_at_start":
        print(PREFIX + "Traceback (most recent call last):\n" + PREFIX + "ValueError: mask_hidden not found in weights")
        print("RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}")
        sys.exit(1)
    if BEHAVIOUR in ("ignores_sigterm", "grandchild_stays"):
        stubborn = (
            "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
            "print('up', flush=True); time.sleep(600)"
        )
        child = subprocess.Popen([sys.executable, "-c", stubborn], stdout=subprocess.PIPE)
        child.stdout.readline()
        if BEHAVIOUR == "ignores_sigterm":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("all up", flush=True)
    if BEHAVIOUR == "hangs":
        threading.Event().wait()
    ThreadingHTTPServer(("127.0.0.1", PORT), Handler).serve_forever()


main()
