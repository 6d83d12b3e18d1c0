# SPDX-License-Identifier: Apache-2.0
"""What we ask a running vLLM over HTTP: health, models, completions, metrics."""

from __future__ import annotations

from typing import Any, Mapping, Sequence

import httpx

from nemo_automodel.components.speculative.serve.counters import SpecDecodeCounters, parse_counters


class ServerClient:
    """One server and one model name. Thread-safe (httpx.Client is); the API key comes from the environment only."""

    def __init__(self, url: str, model: str, *, api_key: str | None = None) -> None:
        self.url, self.model = url, model
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # trust_env=False: a proxy variable must not send loopback requests elsewhere
        self._http = httpx.Client(
            base_url=url, headers=headers, trust_env=False, timeout=httpx.Timeout(None, connect=5.0)
        )

    def healthy(self) -> bool:
        """True when /health answers 200; False also while nothing listens yet."""
        try:
            return self._http.get("/health", timeout=5.0).status_code == 200
        except httpx.TransportError:
            return False

    def models(self) -> list[str]:
        """Names in /v1/models.

        Raises:
            httpx.HTTPError: no answer, or an error status.
        """
        answer = self._http.get("/v1/models", timeout=30.0)
        answer.raise_for_status()
        return [entry["id"] for entry in answer.json()["data"]]

    def complete(self, prompt: str, max_tokens: int) -> dict[str, Any]:
        """One greedy /v1/completions that goes on past end-of-sequence, so that decoding steps surely happen."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        return self._post("/v1/completions", body)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        max_tokens: int,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """One greedy /v1/chat/completions. `tools` are in the prompt, but the answer is text, never a parsed call.

        Raises:
            httpx.HTTPError: no answer, or an error status (its text is in the message).
        """
        body: dict[str, Any] = {"messages": list(messages), "max_tokens": max_tokens, "temperature": 0}
        if tools:
            body |= {"tools": list(tools), "tool_choice": "none"}
        if template_kwargs:
            body["chat_template_kwargs"] = dict(template_kwargs)
        return self._post("/v1/chat/completions", body)

    def counters(self) -> SpecDecodeCounters | None:
        """The speculation counters of our model; None when the server keeps none."""
        answer = self._http.get("/metrics", timeout=30.0)
        answer.raise_for_status()
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
            text = " ".join(answer.text.split())[:300]
            raise httpx.HTTPStatusError(f"{path}: {answer.status_code} {text}", request=answer.request, response=answer)
        return answer.json()
