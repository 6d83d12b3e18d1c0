# SPDX-License-Identifier: Apache-2.0
"""What we ask a running vLLM over HTTP: health, models, completions, metrics."""

from __future__ import annotations

import contextlib
from typing import Any, Iterator, Mapping

import httpx

from nemo_automodel.components.speculative.serve.counters import SpecDecodeCounters, parse_counters


class ServerClient:
    """One server and one model name. Thread-safe (httpx.Client is); the API key comes from the environment only."""

    def __init__(self, url: str, model: str, *, api_key: str | None = None) -> None:
        self.url, self.model = url, model
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # trust_env=False: a proxy variable must not send loopback requests elsewhere
        self._http = httpx.Client(
            base_url=url,
            headers=headers,
            trust_env=False,
            timeout=httpx.Timeout(None, connect=5.0),
            limits=httpx.Limits(max_connections=None),  # the benchmark decides how many at once
        )

    @property
    def port(self) -> int:
        return self._http.base_url.port or 80

    def healthy(self) -> bool:
        """True when /health answers 200; False also while nothing listens yet."""
        try:
            return self._http.get("/health", timeout=5.0).status_code == 200
        except httpx.HTTPError:
            return False

    def models(self) -> list[str]:
        """Names in /v1/models.

        Raises:
            httpx.HTTPError: no answer, an error status, or the answer of something else.
        """
        answer = self._http.get("/v1/models", timeout=30.0)
        answer.raise_for_status()
        with _understood("/v1/models"):
            return [str(entry["id"]) for entry in answer.json()["data"]]

    def complete(self, prompt: str, max_tokens: int) -> dict[str, Any]:
        """One greedy /v1/completions that goes on past end-of-sequence, so that decoding steps surely happen."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        return self._post("/v1/completions", body)

    def chat_lines(self, body: Mapping[str, Any], *, stall_s: float | None = None) -> Iterator[bytes]:
        """POST /v1/chat/completions; the answer's lines as they arrive: one JSON object, or server-sent events.

        `stall_s` is the longest silence between two pieces of the answer.

        Raises:
            httpx.HTTPError: no answer, silence, or an error status (its text is in the message).
        """
        path, timeout = "/v1/chat/completions", httpx.Timeout(stall_s, connect=5.0)
        with self._http.stream("POST", path, json={"model": self.model, **body}, timeout=timeout) as answer:
            if answer.is_error:
                answer.read()
                raise _refused(path, answer)
            rest = b""
            for piece in answer.iter_bytes():
                *lines, rest = (rest + piece).split(b"\n")  # httpx's own iter_lines also cuts at U+2028 inside a text
                yield from lines
            yield rest

    def counters(self) -> SpecDecodeCounters | None:
        """The speculation counters of our model; None when the server keeps none."""
        answer = self._http.get("/metrics", timeout=30.0)
        answer.raise_for_status()
        with _understood("/metrics"):
            return parse_counters(answer.text, self.model)

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> ServerClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = self._http.post(path, json={"model": self.model, **body})
        if answer.is_error:
            raise _refused(path, answer)
        with _understood(path):
            return answer.json()


@contextlib.contextmanager
def _understood(path: str) -> Iterator[None]:
    """What another kind of server sends there becomes the error that a failed request is."""
    try:
        yield
    except (ValueError, KeyError, TypeError) as error:
        raise httpx.DecodingError(f"{path} is not answered as vLLM does ({error})") from error


def _refused(path: str, answer: httpx.Response) -> httpx.HTTPStatusError:
    text = " ".join(answer.text.split())[:300]
    return httpx.HTTPStatusError(f"{path}: {answer.status_code} {text}", request=answer.request, response=answer)
