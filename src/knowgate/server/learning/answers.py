"""The text of a reply, whole or streamed, read as it goes by. Nothing of the reply is changed or held up.

Of chats, of completions, and of the Responses API.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.background import BackgroundTask
from starlette.responses import Response

from knowgate.errors import ModelError
from knowgate.models.prompts.templates import detect_language, load_packaged_templates
from knowgate.server.chat.gate_service import GateService
from knowgate.server.chat.request_formats import REQUEST_FORMATS, insert_passages
from knowgate.server.streaming import EventStreamResponse, parse_event_data
from knowgate.server.telemetry.trace import ClientRequest, RequestTrace
from knowgate.server.upstream.forwarding import ForwardedRequest, UpstreamForwarder
from knowgate.types import Passage, Question

FINISH_REASONS = ("stop", "length")  # whoever limits answers limits both of those that are compared
MAX_STREAM_BYTES = 1 << 20  # bytes of a stream that are listened to; longer answers are not compared


@dataclass
class StreamText:
    """What was said in a stream so far. is_whole: it came to its end."""

    parts: list[str] = field(default_factory=list)
    rest: bytes = b""
    size: int = 0
    is_whole: bool = False

    def hear(self, piece: bytes) -> None:
        self.size += len(piece)
        if self.size > MAX_STREAM_BYTES:
            return
        *lines, self.rest = (self.rest + piece).split(b"\n")
        for line in lines:
            chunk = parse_event_data(line)
            choice = _choice(chunk)
            text = _text(choice.get("delta")) or _plain(choice.get("text")) or _delta(chunk)
            self.parts += [text] if text else []
            self.is_whole = self.is_whole or choice.get("finish_reason") in FINISH_REASONS or _closes(chunk)

    @property
    def text(self) -> str | None:
        """None where it broke off."""
        return "".join(self.parts) if self.is_whole else None


def capture_answer(response: Response, then: Callable[[str | None], None]) -> None:
    """Tells what was said when the reply has gone out; None for a reply that broke off."""
    if isinstance(response, EventStreamResponse):
        heard, over = StreamText(), response.when_over
        response.pieces = capture_stream(response.pieces, heard)

        def tell_both() -> None:
            over()
            then(heard.text)

        response.when_over = tell_both
        return

    async def tell() -> None:
        then(extract_answer(response))

    response.background = BackgroundTask(tell)


async def capture_stream(pieces: AsyncGenerator[bytes, None], heard: StreamText) -> AsyncGenerator[bytes, None]:
    try:
        async for piece in pieces:
            heard.hear(piece)
            yield piece
    finally:
        await pieces.aclose()


def extract_answer(response: Response) -> str | None:
    """The answer in a reply of one piece; None where there is none."""
    if response.status_code != 200:
        return None
    try:
        record = json.loads(bytes(response.body))
    except ValueError:
        return None
    choice = _choice(record)
    if choice.get("finish_reason") in FINISH_REASONS:
        return _text(choice.get("message")) or _plain(choice.get("text")) or None
    return _responded(record) or None


def _choice(record: Any) -> Mapping[str, Any]:
    choices = record.get("choices") if isinstance(record, dict) else None
    first = choices[0] if isinstance(choices, list) and len(choices) == 1 else None
    return first if isinstance(first, dict) else {}


def _text(said: Any) -> str:
    content = said.get("content") if isinstance(said, dict) else None
    return content if isinstance(content, str) else ""


def _plain(text: Any) -> str:
    return text if isinstance(text, str) else ""


# --- the Responses API ------------------------------------------------------------------------------


def _delta(chunk: Any) -> str:
    is_text = isinstance(chunk, dict) and chunk.get("type") == "response.output_text.delta"
    return _plain(chunk.get("delta")) if is_text else ""


def _closes(chunk: Any) -> bool:
    """A response that only the limit of its tokens stopped counts as whole, as of chats."""
    return isinstance(chunk, dict) and chunk.get("type") in ("response.completed", "response.incomplete")


def _responded(record: Any) -> str:
    """The text of a response that is one message; '' where a tool was called or it is not there yet."""
    if not isinstance(record, dict) or record.get("status") not in ("completed", "incomplete"):
        return ""
    output = record.get("output")
    items = [one for one in output if isinstance(one, dict)] if isinstance(output, list) else []
    said = [one for one in items if one.get("type") != "reasoning"]
    if len(said) != 1 or said[0].get("type") != "message" or not isinstance(said[0].get("content"), list):
        return ""
    parts = [one for one in said[0]["content"] if isinstance(one, dict) and one.get("type") == "output_text"]
    return "".join(_plain(part.get("text")) for part in parts)


YES_WORDS, NO_WORDS = ("yes", "是"), ("no", "否", "不")
DROPPED_FIELDS = ("stream", "stream_options", "n", "best_of", "logprobs", "top_logprobs", "knowgate")


class CounterfactualAnswerer:
    """forwarding: where an upstream answers; else the model in this process does."""

    def __init__(self, keeper: GateService, forwarding: UpstreamForwarder | None, seconds: float):
        self.keeper = keeper
        self.forwarding = forwarding
        self.seconds = seconds

    async def answer(self, asked: ClientRequest, question: str, *, given: str, opened: bool) -> str | None:
        """None where it cannot be had. Where nothing is found the answer `given` from memory is the only one."""
        async with asyncio.timeout(self.seconds):
            if self.forwarding is None:
                return await self._here(question, opened)
            own = RequestTrace()
            passages = await self.keeper.search(self.keeper.rag, Question(question), own) if opened else ()
            if own.degraded:
                return None
            if opened and not passages:
                return given
            return await self._there(self.forwarding, asked, passages)

    async def says_same(self, asked: ClientRequest, question: str, closed: str, opened: str) -> bool:
        """What the upstream's LLM says to that; an error where it says neither yes nor no."""
        assert self.forwarding is not None
        lang = detect_language(question)
        words = load_packaged_templates("compare").fill("same", lang, question=question, first=closed, second=opened)
        known = {key: asked.body[key] for key in ("model", "user") if key in asked.body}
        body = {**known, "messages": [{"role": "user", "content": words}], "max_tokens": 8, "temperature": 0}
        async with asyncio.timeout(self.seconds):
            said = await self._there(self.forwarding, ClientRequest(body, asked.headers), ())
        word = (said or "").strip().lower()
        if not word.startswith((*YES_WORDS, *NO_WORDS)):
            raise ModelError(f"asked whether two answers say the same, the LLM said '{word[:40]}'.")
        return word.startswith(YES_WORDS)

    async def _here(self, question: str, opened: bool) -> str:
        gate = self.keeper.always if opened else self.keeper.never
        rag = self.keeper.rag.replace(gate=gate, threshold=None, rules=None, log=None)
        return (await rag.aanswer(question)).text

    async def _there(
        self, forwarding: UpstreamForwarder, asked: ClientRequest, passages: Sequence[Passage]
    ) -> str | None:
        body = {key: value for key, value in asked.body.items() if key not in DROPPED_FIELDS}
        until = asyncio.get_running_loop().time() + self.seconds
        exchange = ForwardedRequest(body, b"", asked.headers, RequestTrace(), until, sent=body)
        await forwarding.name_model(exchange)
        if passages:
            amend = REQUEST_FORMATS[asked.path].with_passages if asked.path in REQUEST_FORMATS else insert_passages
            exchange.sent = amend(exchange.request, passages, forwarding.options.place)
        return extract_answer(await forwarding.answer(exchange, asked.path))
