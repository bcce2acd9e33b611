"""An OpenAI-compatible server on loopback, for tests and benchmarks. Its answers, delays and failures can be set."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

WORDS = ("The ", "answer ", "is ", "42.")
USAGE = {"prompt_tokens": 5, "completion_tokens": 4, "total_tokens": 9}


@dataclass
class Stub:
    """The state and the settings of the stub server.

    Attributes:
        bodies: Bodies of the requests so far.
        headers: Headers of the requests so far.
        ports: Ports from which clients connected.
        sure: Log-probability of every token.
        status: HTTP status of the replies. Other values than 200 return an error.
        slow: Delay in seconds before a reply, or before each chunk of a stream.
        dropped: Number of requests whose client disconnected.
        refuses: Fields that are rejected.
        refusal_status: HTTP status of these replies.
        breaks_off: Whether streams are aborted after the first chunk.
        forgets: Whether requests are not stored, as in long load tests.
        speaks: Whether `completions` and `responses` return answers. By default they echo the request.
        answered: Number of replies so far, without streams.
        waits_for: Event to wait for before a reply, or after the first chunk of a stream.
        url: Base URL, set when the server starts.
    """

    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    ports: set[int] = field(default_factory=set)
    sure: float = -0.01
    status: int = 200
    slow: float = 0.0
    dropped: int = 0
    refuses: tuple[str, ...] = ()
    refusal_status: int = 400
    breaks_off: bool = False
    forgets: bool = False
    speaks: bool = False
    answered: int = 0
    waits_for: threading.Event | None = None
    url: str = ""

    def forget_requests(self) -> None:
        """Forget all requests so far."""
        self.bodies.clear()
        self.headers.clear()
        self.ports.clear()
        self.answered = 0

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """Answer a chat completion, in one piece or as a stream."""
        body = await request.json()
        if not self.forgets:
            self.bodies.append(body)
            self.headers.append(dict(request.headers))
            self.ports.add(request.get_extra_info("peername")[1])
        rejected = [name for name in self.refuses if name in body]
        if self.status != 200 or rejected:
            status = self.refusal_status if rejected else self.status
            message = " ".join(["the stub's own words", *rejected])
            return web.json_response({"error": {"message": message, "code": "stub"}}, status=status)
        try:
            return await (self._stream(request, body) if body.get("stream") else self._plain(body))
        except (asyncio.CancelledError, ConnectionError):
            self.dropped += 1
            raise

    async def _plain(self, body: dict[str, Any]) -> web.Response:
        await asyncio.sleep(self.slow)
        await self._wait()
        self.answered += 1
        message: dict[str, Any] = {"role": "assistant", "content": self.answer(body)}
        if body.get("tools"):
            call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
            message = {"role": "assistant", "content": None, "tool_calls": [call]}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        if body.get("logprobs"):
            choice["logprobs"] = {"content": [self._token(word) for word in WORDS]}
        return web.json_response({**self._common_fields(body, "chat.completion"), "choices": [choice], "usage": USAGE})

    async def _wait(self) -> None:
        while self.waits_for is not None and not self.waits_for.is_set():
            await asyncio.sleep(0.01)

    async def _stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await reply.prepare(request)
        words = self.answer(body).split(" ")
        for number, word in enumerate(words):
            await asyncio.sleep(self.slow)
            await self._send(reply, body, {"content": word + (" " if number < len(words) - 1 else "")})
            await self._wait()
            if self.breaks_off and request.transport is not None:
                request.transport.abort()
                return reply
        await self._send(reply, body, {}, "stop")
        if (body.get("stream_options") or {}).get("include_usage"):
            await self._write_chunk(reply, body, {"choices": [], "usage": USAGE})
        await reply.write(b"data: [DONE]\n\n")
        return reply

    async def _send(
        self, reply: web.StreamResponse, body: dict[str, Any], delta: dict[str, Any], finish: str | None = None
    ) -> None:
        choice: dict[str, Any] = {"index": 0, "delta": delta, "finish_reason": finish}
        if body.get("logprobs") and delta:
            choice["logprobs"] = {"content": [self._token(delta["content"])]}
        await self._write_chunk(reply, body, {"choices": [choice]})

    async def _write_chunk(self, reply: web.StreamResponse, body: dict[str, Any], fields: dict[str, Any]) -> None:
        chunk = {**self._common_fields(body, "chat.completion.chunk"), **fields}
        await reply.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")

    def answer(self, body: dict[str, Any]) -> str:
        """Return the text of the answer, which depends on whether the request has passages."""
        return "From the passages: 43." if "<passages>" in json.dumps(body) or body.get("documents") else "".join(WORDS)

    def _token(self, text: str) -> dict[str, Any]:
        return {"token": text, "logprob": self.sure, "top_logprobs": [{"token": text, "logprob": self.sure}]}

    def _common_fields(self, body: dict[str, Any], kind: str) -> dict[str, Any]:
        return {"id": "chatcmpl-stub", "object": kind, "created": 1, "model": body.get("model", "")}

    async def models(self, request: web.Request) -> web.Response:
        """List one model."""
        return web.json_response({"object": "list", "data": [{"id": "stub-llm", "object": "model"}]})

    async def other(self, request: web.Request) -> web.Response:
        """Answer embeddings, completions and responses."""
        body = await request.json()
        self.bodies.append(body)
        if not self.speaks or request.path.endswith("embeddings"):
            return web.json_response({"object": request.path, "got": body})
        is_completion, text = request.path.endswith("/completions"), self.answer(body)
        chunks = completion_chunks(text) if is_completion else response_chunks(text)
        if not body.get("stream"):
            return web.json_response(chunks[-1])
        lines = b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks[:-1])
        return web.Response(body=lines, content_type="text/event-stream")

    async def reject(self, request: web.Request) -> web.Response:
        """Answer 400 with the body of the request, as some search engines do."""
        return web.Response(status=400, body=await request.read())

    @property
    def application(self) -> web.Application:
        """The routes of the server."""
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self.chat)
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/v1/echo", self.reject)
        for path in ("embeddings", "completions", "responses"):
            app.router.add_post(f"/v1/{path}", self.other)
        return app


def completion_chunks(text: str) -> list[dict[str, Any]]:
    """Return the chunks of a streamed completion, then the completion in one piece."""
    last = {"index": 0, "text": "", "finish_reason": "stop"}
    pieces = [{"index": 0, "text": word + " ", "finish_reason": None} for word in text.split(" ")]
    whole = {"index": 0, "text": text, "finish_reason": "stop"}
    return [{"object": "text_completion", "choices": [choice]} for choice in (*pieces, last, whole)]


def response_chunks(text: str) -> list[dict[str, Any]]:
    """Return the events of a streamed response, then the response in one piece."""
    content = [{"type": "output_text", "text": text, "annotations": []}]
    whole = {"object": "response", "status": "completed"}
    whole |= {"output": [{"type": "reasoning"}, {"type": "message", "role": "assistant", "content": content}]}
    pieces = [{"type": "response.output_text.delta", "delta": word + " "} for word in text.split(" ")]
    return [{"type": "response.created"}, *pieces, {"type": "response.completed", "response": whole}, whole]


@contextmanager
def running_stub(stub: Stub | None = None) -> Iterator[Stub]:
    """Run a stub, by default a new one, on a free port in a thread of its own."""
    stub, ready, loop = stub or Stub(), threading.Event(), asyncio.new_event_loop()
    runner = web.AppRunner(stub.application, handler_cancellation=True, shutdown_timeout=0.1)

    async def start() -> None:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        stub.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        ready.set()

    def serve() -> None:
        loop.run_until_complete(start())
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    ready.wait(30)
    try:
        yield stub
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
