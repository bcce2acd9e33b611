"""A simulated OpenAI-compatible server for tests."""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx

TOP = [("Paris", 0.6), (" Lyon", 0.25), (" Paris", 0.1), ("Pa", 0.04), ("x", 0.01)]


class ChatServer:
    """Answers 'answer to <text>'. Fields in `refuses` get status 400, fields in `ignores` have no effect."""

    def __init__(self, *, refuses: frozenset[str] = frozenset(), ignores: frozenset[str] = frozenset()):
        self.refuses = refuses
        self.ignores = ignores
        self.bodies: list[tuple[str, dict[str, Any]]] = []
        self.change: Callable[[dict[str, Any]], Any] = lambda reply: reply
        self.cards: list[dict[str, Any]] | None = [{"id": "m", "owned_by": "vllm", "root": "/w", "created": 1}]
        self.finish = "stop"
        self.stream: EventStream | None = None
        self._lock = threading.Lock()

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return self._models()
        body = json.loads(request.content)
        with self._lock:
            self.bodies.append((request.url.path.removeprefix("/v1"), body))
        if body["model"] != "m":
            return httpx.Response(404, json={"error": {"message": "The model does not exist"}})
        refused = sorted(self.refuses & set(body))
        if refused:
            return httpx.Response(400, json={"error": {"message": f"Unrecognized argument: {refused[0]}"}})
        reply = self.change(self._reply(request.url.path, body))
        if body.get("stream") and "stream" not in self.ignores:
            return httpx.Response(200, stream=self.streamed(reply, "stream_options" in body))
        return httpx.Response(200, content=json.dumps(reply))

    def streamed(self, reply: dict[str, Any], counts: bool) -> EventStream:
        self.stream = EventStream([as_line(part) for part in parts_of(reply, counts)] + [b"data: [DONE]\n\n"])
        return self.stream

    def after_probe(self) -> list[dict[str, Any]]:
        """Return the bodies of all requests except the probe."""
        return [body for _, body in self.bodies if not _is_probe(body)]

    def _models(self) -> httpx.Response:
        if self.cards is None:
            return httpx.Response(404, text="no such page")
        return httpx.Response(200, json={"data": self.cards})

    def _reply(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        body = {key: value for key, value in body.items() if key not in self.ignores}
        n = body.get("n", 1)
        make = chat_choice if path.endswith("/chat/completions") else raw_choice
        choices = [make(body, i, self.finish) for i in range(n)]
        return {"choices": choices, "usage": {"completion_tokens": 3 * n + 1}}


class EventStream(httpx.SyncByteStream):
    """A stream that records how many pieces were read and whether it was closed."""

    def __init__(self, pieces: list[bytes]):
        self.pieces = pieces
        self.taken = 0
        self.closed = False

    def __iter__(self) -> Iterator[bytes]:
        for piece in self.pieces:
            self.taken += 1
            yield piece

    def close(self) -> None:
        self.closed = True


def as_line(part: Any) -> bytes:
    return b"data: " + json.dumps(part, ensure_ascii=False).encode() + b"\n\n"


def parts_of(reply: dict[str, Any], counts: bool) -> Iterator[dict[str, Any]]:
    """Split a response into chunks of one word, as vLLM does."""
    choice = reply["choices"][0]
    chat = "message" in choice
    words = re.findall(r"\s*\S+", choice["message"]["content"] if chat else choice["text"])
    for word in words:
        yield {"choices": [{"index": 0, "delta": {"content": word}} if chat else {"index": 0, "text": word}]}
    last = {"index": 0, "finish_reason": choice["finish_reason"], "logprobs": choice.get("logprobs")}
    yield {"choices": [{**last, "delta": {}} if chat else {**last, "text": ""}], "usage": None}
    if counts:
        yield {"choices": [], "usage": reply["usage"]}


def _is_probe(body: dict[str, Any]) -> bool:
    return body.get("messages") == [{"role": "user", "content": "Hi"}]


def chat_choice(body: dict[str, Any], i: int, finish: str) -> dict[str, Any]:
    text = f"answer to {body['messages'][0]['content']}" + (f" #{i}" if body["temperature"] else "")
    choice: dict[str, Any] = {"message": {"role": "assistant", "content": text}, "finish_reason": finish}
    if body.get("logprobs"):
        top = [{"token": token, "logprob": math.log(p)} for token, p in TOP][: body.get("top_logprobs", 0)]
        choice["logprobs"] = {"content": [{"token": "Paris", "logprob": math.log(0.6), "top_logprobs": top}]}
    return choice


def raw_choice(body: dict[str, Any], i: int, finish: str) -> dict[str, Any]:
    choice: dict[str, Any] = {"text": f"{body['prompt']} goes on", "finish_reason": finish}
    if "logprobs" in body:
        top = {token: math.log(p) for token, p in TOP[: body["logprobs"]]}
        choice["logprobs"] = {"tokens": ["Paris"], "token_logprobs": [math.log(0.6)], "top_logprobs": [top]}
    return choice
