"""The upstream's answer to the request itself, read as a draft: all of it, or as much of a stream as the gate reads."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp.client_exceptions import ClientError

from knowgate.errors import ModelError, NotOffered
from knowgate.models.backend import Backend
from knowgate.models.openai.model import OpenAIModel
from knowgate.models.openai.responses import StreamedResponse, parse_completions
from knowgate.server.streaming import LineTooLong, parse_event_data, remove_logprobs, split_lines
from knowgate.types import Arbiter, Completion, Gate, LabelPrompt, Prompt, Reading, Signal, SignalRequest, Vector

MIN_TOP_LOGPROBS = 2  # the margin needs two
STREAM_END_TIMEOUT = 2.0  # between the end of an answer and that of its stream


@dataclass
class UpstreamDraft:
    """What came: `content` of a reply in one piece; of a stream the `lines` so far and the `rest`.

    completion: None where it could not be read. hides_logprobs: they were asked for by us, not by the client.
    ended: of a stream, that the answer came to its end.
    """

    reply: aiohttp.ClientResponse
    completion: Completion | None = None
    called_tool: bool = False
    content: bytes = b""
    lines: list[bytes] = field(default_factory=list)
    rest: AsyncGenerator[bytes, None] | None = None
    hides_logprobs: bool = False
    ended: bool = False

    async def read_on(self) -> None:
        """What comes after the end of an answer (usage, [DONE]), so that it could be the reply."""
        assert self.rest is not None
        try:
            async with asyncio.timeout(STREAM_END_TIMEOUT):
                self.lines += [line async for line in self.rest]
        except (ClientError, OSError, LineTooLong, TimeoutError):
            self.ended = False

    @property
    def is_whole(self) -> bool:
        """It could be the reply: all of it is here."""
        return self.rest is None or (self.ended and self.completion is not None and self.completion.finished)

    def close(self) -> None:
        """Hang up: what is left of the draft is not wanted."""
        self.reply.close()

    @property
    def shown(self) -> bytes:
        """A reply in one piece as the client may see it."""
        if not self.hides_logprobs:
            return self.content
        reply = json.loads(self.content)
        remove_logprobs(reply)
        return json.dumps(reply, separators=(",", ":")).encode()


def build_draft_request(request: dict[str, Any], reader: Gate | Arbiter) -> dict[str, Any]:
    """The request, asking for what the gate or arbiter reads as well."""
    if Signal.LOGPROBS not in reader.needs:
        return request
    top = request.get("top_logprobs")
    return {
        **request,
        "logprobs": True,
        "top_logprobs": max(MIN_TOP_LOGPROBS, top) if isinstance(top, int) else MIN_TOP_LOGPROBS,
    }


async def read_draft(reply: aiohttp.ClientResponse) -> UpstreamDraft:
    async with reply:
        content = await reply.read()
    try:
        record = json.loads(content)
        completion = parse_completions(record)[0]
    except (ValueError, ModelError):
        return UpstreamDraft(reply, content=content)
    message = record["choices"][0].get("message")
    return UpstreamDraft(reply, completion, isinstance(message, dict) and bool(message.get("tool_calls")), content)


async def read_streamed_draft(reply: aiohttp.ClientResponse, tokens: int) -> UpstreamDraft:
    """Until there are so many tokens, or the end."""
    return await read_stream(reply, lambda gathered: _count(gathered) >= tokens)


async def read_until_released(reply: aiohttp.ClientResponse, lets_out: Callable[[str], bool]) -> UpstreamDraft:
    """Until its beginning may be let out, or the end."""
    return await read_stream(reply, lambda gathered: lets_out("".join(gathered.texts)))


async def read_stream(reply: aiohttp.ClientResponse, is_enough: Callable[[StreamedResponse], bool]) -> UpstreamDraft:
    found = UpstreamDraft(reply, rest=split_lines(reply.content.iter_any()))
    gathered = StreamedResponse()
    assert found.rest is not None
    async for line in found.rest:
        found.lines.append(line)
        chunk = parse_event_data(line)
        if chunk is None:
            continue
        if _calls_tool(chunk):
            found.called_tool = True
            return found
        try:
            gathered.add(chunk)
        except ModelError:
            return found
        if gathered.finish_reason is not None or is_enough(gathered):
            break
    found.ended = gathered.finish_reason is not None
    choice = {"text": "".join(gathered.texts), "finish_reason": gathered.finish_reason or "length"}
    try:
        (found.completion,) = parse_completions({"choices": [{**choice, "logprobs": gathered.logprobs or None}]})
    except ModelError:
        found.completion = None
    return found


def _count(gathered: StreamedResponse) -> int:
    """Tokens so far; pieces of text where the server does not say."""
    listed = gathered.logprobs.get("content")
    return len(listed) if listed is not None else sum(bool(text) for text in gathered.texts)


def _calls_tool(chunk: dict[str, Any]) -> bool:
    choices = chunk.get("choices")
    first = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    delta = first.get("delta")
    return isinstance(delta, dict) and bool(delta.get("tool_calls"))


CURRENT_DRAFT: ContextVar[Completion | None] = ContextVar("what the upstream answered", default=None)


@contextmanager
def use_draft(draft: Completion | None) -> Iterator[None]:
    """What is decided inside is decided on this draft."""
    token = CURRENT_DRAFT.set(draft)
    try:
        yield
    finally:
        CURRENT_DRAFT.reset(token)


class UpstreamDraftModel(Backend):
    """Gives drafts that are there already. url, model: of the upstream, which fitted gates are held against."""

    offers = frozenset({Signal.DRAFT, Signal.LOGPROBS})
    depth = 0

    def __init__(self, url: str, model: str | None):
        self._url = url
        self._model = model

    @property
    def name(self) -> str:
        return f"openai:{self._model or 'upstream'}"

    @functools.cached_property
    def fingerprint(self) -> str:
        """As of the same LLM in `openai:MODEL@URL`, which gates are fitted on."""
        if self._model is None:
            return "openai-unnamed"
        asked = OpenAIModel(self._model, self._url)
        try:
            return asked.fingerprint
        finally:
            asked.close()

    def read(self, prompts: Sequence[Prompt], want: SignalRequest) -> list[Reading]:
        draft = CURRENT_DRAFT.get()
        if draft is None:
            raise NotOffered("the upstream was not asked for a draft.")
        return [Reading(draft=draft) for _ in prompts]

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        max_tokens: int,
        temperature: float = 0.0,
        n: int = 1,
        seed: int | None = None,
        resume: Sequence[object] | None = None,
    ) -> list[list[Completion]]:
        """Nothing: follow-ups are then joined to the question before them, without a call."""
        return [[Completion("")] for _ in prompts]

    def fits(self, prompts: Sequence[Prompt], max_tokens: int) -> list[bool]:
        return [True for _ in prompts]

    def label_logits(self, prompts: Sequence[LabelPrompt], labels: Sequence[str]) -> list[Vector]:
        raise NotOffered("the upstream is asked nothing beside what the application asks.")
