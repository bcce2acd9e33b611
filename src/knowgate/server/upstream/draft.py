"""Drafts, which are answers of the upstream without passages.

A gate reads a draft to decide whether to retrieve. A streamed draft is read only as far as the gate needs it.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, cast

import aiohttp
import httpx
from aiohttp.client_exceptions import ClientError

from knowgate.core import http_client
from knowgate.core.http_client import RetryPolicy
from knowgate.core.network_deadline import request_deadline
from knowgate.core.text import estimate_tokens
from knowgate.core.validation import count_json_values
from knowgate.errors import KnowgateError, ModelError, UnsupportedSignal
from knowgate.models.backend import UNNAMED_FINGERPRINT, Backend
from knowgate.models.openai.client import ApiClient
from knowgate.models.openai.model import OpenAIModel
from knowgate.models.openai.responses import StreamedResponse, is_thought, parse_completions
from knowgate.models.openai.server import ModelEndpoint
from knowgate.pipeline.adaptive_rag import AdaptiveRAG
from knowgate.server.json_api import LARGE_BODY_BYTES, dump_json, estimate_memory, replace_non_finite
from knowgate.server.streaming import (
    MAX_EVENT_VALUES,
    InvalidResponse,
    LogprobsFilter,
    check_chunk,
    parse_event_data,
    read_event_lines,
)
from knowgate.server.telemetry.trace import RequestTrace, TokenUsage, get_cost, is_token_count
from knowgate.server.upstream import response_body
from knowgate.server.upstream.response_body import MIN_TOP_LOGPROBS
from knowgate.types import Arbiter, Completion, Gate, LabelPrompt, Prompt, Reading, Signal, SignalRequest, Vector

TOOL_FIELDS = ("tool_calls", "function_call")  # of a message that calls a tool; older LLMs use the second one
MAX_DRAFT_BYTES = 32 << 20  # maximum size of a stream whose beginning is a draft
MAX_DRAFT_VALUES = 2_000_000  # maximum number of JSON values of the part that is read as a draft
BYTES_PER_VALUE, BYTES_PER_LINE = 64, 64  # of memory, for a JSON value or a line of a draft
CHECK_SPACING_DIVISOR = 200  # a text of 400 pieces is checked at every second piece, one of 600 at every third piece
MAX_USAGE_LINES = 20  # of a stream, from its end: only the last ones with the field `usage` have the sum
MAX_BEGINNING_CHARS = 2_000  # of a streamed answer that an arbiter reads to accept its beginning
PROBE_RETRY = RetryPolicy(timeout=5.0, total=5.0, retries=0)  # a silent upstream must not delay the start
STREAM_END_TIMEOUT = 2.0  # maximum seconds from the last text of an answer to the end of its stream


@dataclass
class LineReading:
    """State of a stream whose beginning is a draft. The other lines are forwarded as they arrive."""

    is_kept: bool = True  # whether lines that are read now stay in memory


@dataclass
class UpstreamDraft:
    """Answer of the upstream, read completely or in part. Only a stream can be read in part.

    Attributes:
        response: The HTTP response.
        completion: The part of the answer that has been read, or None if it could not be parsed.
        calls_tool: Whether the LLM called a tool.
        content: Body of a response that is not streamed.
        body: The same body as a JSON object, or None if it could not be parsed.
        lines: Lines of a stream that have been read.
        remaining_lines: Lines of a stream that have not been read yet. None if the response is not streamed.
        hide_logprobs: Removes log-probabilities that the client did not request, in place. None if there are none.
        has_ended: Whether the text of a streamed answer has ended. Token counts and [DONE] may still follow.
        reading: State of the stream.
    """

    response: aiohttp.ClientResponse
    completion: Completion | None = None
    calls_tool: bool = False
    content: bytes = b""
    body: dict[str, Any] | None = None
    lines: list[bytes] = field(default_factory=list)
    remaining_lines: AsyncGenerator[bytes, None] | None = None
    hide_logprobs: LogprobsFilter | None = None
    has_ended: bool = False
    reading: LineReading = field(default_factory=LineReading)

    @property
    def is_complete(self) -> bool:
        """Whether the whole answer has been read, so that it can be compared with another answer."""
        if self.remaining_lines is None:  # not a stream, so the answer was read at once
            return True
        return self.has_ended and self.completion is not None and self.completion.finished

    async def read_to_end(self) -> None:
        """Read the rest of a stream after its answer, such as [DONE]. A failure makes the answer unusable."""
        assert self.remaining_lines is not None
        self.reading.is_kept = True
        try:
            async with asyncio.timeout(STREAM_END_TIMEOUT):
                self.lines += [line async for line in self.remaining_lines]
        except (ClientError, OSError, InvalidResponse):
            self.has_ended, self.completion = False, None

    def get_client_content(self) -> bytes:
        """Return the body of the response for the client, without hidden log-probabilities."""
        if self.hide_logprobs is None or self.body is None:
            return self.content
        self.hide_logprobs(self.body)
        return dump_json(self.body, is_large=len(self.content) > LARGE_BODY_BYTES)


def arbiter_makes_drafts(rag: AdaptiveRAG) -> bool:
    """Return whether the arbiter of a pipeline gets a draft to compare, even if the gate reads only the question."""
    return rag.retriever is not None and rag.bound_arbiter is not None and rag.bound_arbiter.makes_drafts


def build_draft_request(request: dict[str, Any], reader: Gate | Arbiter) -> dict[str, Any]:
    """Return the request body for a draft. Ask for log-probabilities only if the reader needs them.

    Args:
        request: Body of the client's request.
        reader: The gate, which decides whether to retrieve, or the arbiter, which chooses between two answers.
    """
    if Signal.LOGPROBS not in reader.needs:
        return request
    requested_count = request.get("top_logprobs")
    count = max(MIN_TOP_LOGPROBS, requested_count) if isinstance(requested_count, int) else MIN_TOP_LOGPROBS
    return {**request, "logprobs": True, "top_logprobs": count}


async def read_draft(response: aiohttp.ClientResponse) -> UpstreamDraft:
    """Read an answer that is not streamed. `completion` stays None for an invalid body."""
    content = await response_body.read_content(response)
    draft = UpstreamDraft(response, content=content)
    memory = await response_body.run_for_size(len(content), functools.partial(estimate_memory, content))
    await response_body.wait_for_memory(response, memory)
    try:
        draft.body = body = await response_body.parse_completion(content)
        completions = await response_body.run_for_size(len(content), lambda: _parse_beginnings(body))
    except (InvalidResponse, ModelError):
        return draft
    draft.completion = completions[0]
    message = body["choices"][0].get("message")
    draft.calls_tool = isinstance(message, dict) and any(message.get(name) for name in TOOL_FIELDS)
    return draft


def _parse_beginnings(body: Mapping[str, Any]) -> list[Completion]:
    """Parse the completions of a response, with the log-probabilities that gates read."""
    choices = [response_body.cut_logprobs(item) if isinstance(item, dict) else item for item in body.get("choices", [])]
    return parse_completions({**body, "choices": choices})


async def read_first_tokens(response: aiohttp.ClientResponse, count: int) -> UpstreamDraft:
    """Read the first `count` tokens of a streamed answer. Without log-probabilities, pieces of text count as tokens."""
    piece_count = 0  # number of pieces of text that are not empty

    def is_enough(answer: StreamedResponse) -> bool:
        """Return whether the answer has `count` tokens. Called after each piece of text."""
        nonlocal piece_count
        if answer.texts and answer.texts[-1]:
            piece_count += 1
        tokens = answer.logprobs.get("content")
        token_count = piece_count if tokens is None else len(tokens)
        return token_count >= count

    return await _read_stream(response, is_enough)


async def read_until(response: aiohttp.ClientResponse, is_enough: Callable[[str], bool]) -> UpstreamDraft:
    """Read a streamed answer until `is_enough` accepts its beginning, or to the end."""
    beginning = ""
    piece_count = next_check = 0  # pieces of text in `beginning`, and those at which `is_enough` is called next

    def is_done(answer: StreamedResponse) -> bool:
        """Return whether `is_enough` accepts the text so far. Long texts are checked more rarely, to save time."""
        nonlocal beginning, piece_count, next_check
        if len(beginning) == MAX_BEGINNING_CHARS:  # it was rejected, and does not grow any more
            return False
        beginning = "".join([beginning, *answer.texts[piece_count:]])[:MAX_BEGINNING_CHARS]
        piece_count = len(answer.texts)
        if piece_count < next_check:
            return False
        next_check = piece_count + piece_count // CHECK_SPACING_DIVISOR
        return is_enough(beginning)

    return await _read_stream(response, is_done)


async def _read_stream(
    response: aiohttp.ClientResponse, is_enough: Callable[[StreamedResponse], bool]
) -> UpstreamDraft:
    """Read the beginning of a streamed answer, until `is_enough`. After a tool call, `completion` stays None."""
    reading = LineReading()
    chunks = response_body.iter_chunks(response, MAX_DRAFT_BYTES, is_kept=lambda: reading.is_kept)
    draft = UpstreamDraft(response, remaining_lines=read_event_lines(chunks), reading=reading)
    await _read_beginning(draft, is_enough)
    reading.is_kept = False
    return draft


async def _read_beginning(draft: UpstreamDraft, is_enough: Callable[[StreamedResponse], bool]) -> None:
    """Read the beginning of a streamed answer into a draft, as `_read_stream` does."""
    answer = StreamedResponse()
    byte_count = value_count = 0
    assert draft.remaining_lines is not None
    async for line in draft.remaining_lines:
        draft.lines.append(line)
        byte_count += len(line)
        chunk, line_values = await response_body.run_for_size(len(line), functools.partial(_parse_line, line))
        value_count += 0 if is_thought(chunk) else line_values  # of thoughts, only the line is kept
        if value_count > MAX_DRAFT_VALUES:
            raise InvalidResponse(f"the answer has more than {MAX_DRAFT_VALUES:,} JSON values")
        line_memory = byte_count + BYTES_PER_LINE * len(draft.lines)
        await response_body.wait_for_memory(draft.response, line_memory + BYTES_PER_VALUE * value_count)
        if chunk is None:
            continue
        draft.calls_tool = _calls_tool(chunk)
        if draft.calls_tool:
            return
        try:
            answer.add(chunk)
        except ModelError:
            return
        if answer.finish_reason is not None or is_enough(answer):
            break
    draft.has_ended = answer.finish_reason is not None
    draft.completion = await response_body.run_for_size(byte_count, lambda: _join_pieces(answer))


def _parse_line(line: bytes) -> tuple[dict[str, Any] | None, int]:
    """Check a line of a stream. Return its JSON object, or None for others such as [DONE], and its number of values."""
    check_chunk(line)
    return parse_event_data(line), count_json_values(line, MAX_EVENT_VALUES)


def _join_pieces(answer: StreamedResponse) -> Completion | None:
    """Parse the pieces of a streamed answer like one that is not streamed. Return None if they are invalid."""
    choice = {"text": "".join(answer.texts), "finish_reason": answer.finish_reason or "length"}
    try:
        (completion,) = _parse_beginnings({"choices": [{**choice, "logprobs": answer.logprobs or None}]})
    except ModelError:
        return None
    return completion


def _calls_tool(chunk: dict[str, Any]) -> bool:
    """Return whether a chunk of a stream contains a tool call. The chunk may be malformed."""
    choices = chunk.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        return False
    delta = choices[0].get("delta")
    return isinstance(delta, dict) and any(delta.get(name) for name in TOOL_FIELDS)


# --- the draft as a reading -----------------------------------------------------------------------

CURRENT_DRAFT: ContextVar[Completion | None] = ContextVar("the upstream's answer", default=None)


@contextmanager
def use_draft(draft: Completion | None) -> Iterator[None]:
    """Let gates read this draft within the `with` body. `UpstreamDraftModel` returns the draft to them."""
    token = CURRENT_DRAFT.set(draft)
    try:
        yield
    finally:
        CURRENT_DRAFT.reset(token)


class UpstreamDraftModel(Backend):
    """Stand-in for the LLM of the upstream. Gates get the draft that the server has already requested.

    Args:
        url: URL of the upstream. It is part of the fingerprint, which shows whether a gate was fitted on this LLM.
        model: Name of the upstream's LLM, if the settings name one.
        asks_upstream: Ask the upstream on first use whether it returns log-probabilities. Otherwise, or if it does not
            respond, they are assumed.
    """

    depth = 0  # the upstream returns no hidden states

    def __init__(self, url: str, model: str | None, *, asks_upstream: bool = False):
        self._url = url
        self._model = model
        self._asks_upstream = asks_upstream

    @property
    def name(self) -> str:
        return f"openai:{self._model or 'upstream'}"

    def differs_from(self, model_name: str, default_model: str | None) -> bool:
        """Return whether a name is not that of this LLM. Without two names to compare, nothing is known.

        Args:
            model_name: Name of the LLM in a request, or "".
            default_model: Default LLM of the upstream, if it is known. It is this LLM if the settings name none.
        """
        own_name = self._model or default_model
        return bool(own_name and model_name) and model_name != own_name

    @functools.cached_property
    def fingerprint(self) -> str:
        """Identifier of the upstream's LLM. A gate fitted on `openai:MODEL@URL` has the same one."""
        if self._model is None:
            return UNNAMED_FINGERPRINT
        with closing(OpenAIModel(self._model, self._url)) as model:
            return model.fingerprint

    @functools.cached_property
    def offers(self) -> frozenset[Signal]:
        """Signals of the LLM for gates: drafts, and log-probabilities unless known to be missing."""
        is_text_only = self._asks_upstream and self.returns_logprobs is False
        return frozenset({Signal.DRAFT} if is_text_only else {Signal.DRAFT, Signal.LOGPROBS})

    @functools.cached_property
    def returns_logprobs(self) -> bool | None:
        """Whether the upstream returns log-probabilities, or None if it does not respond. It is asked only once."""
        with suppress(KnowgateError), closing(ApiClient(self._url, retry=PROBE_RETRY, connections=1)) as client:
            # Without a name, the endpoint describes the first model that the upstream lists.
            model = self._model or ModelEndpoint("", client).card.get("id")
            if model:
                return ModelEndpoint(str(model), client).capabilities.logprobs
        return None

    def read(self, prompts: Sequence[Prompt], request: SignalRequest) -> list[Reading]:
        """Return the draft that was set with `use_draft`, once for every prompt.

        Raises:
            UnsupportedSignal: There is no draft, for example because the upstream did not return one.
        """
        draft = CURRENT_DRAFT.get()
        if draft is None:
            raise UnsupportedSignal("the upstream server returned no draft answer, which the gate needs.")
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
        """Return empty texts, because this stand-in does not call the upstream.

        The pipeline calls this to rewrite a follow-up. An empty text makes it join the earlier questions instead.
        """
        return [[Completion("")] for _ in prompts]

    def label_logits(self, prompts: Sequence[LabelPrompt], labels: Sequence[str]) -> list[Vector]:
        message = "this gate reads logits, and the LLM server returns none. Use another gate, or a local model."
        raise UnsupportedSignal(message)


def is_reachable(url: str) -> bool:
    """Return whether a server answers GET /models, with any status."""
    seconds = PROBE_RETRY.timeout
    try:
        with (
            closing(http_client.open_client({}, connections=1)) as client,
            request_deadline(time.monotonic() + seconds),
            client.stream("GET", f"{url}/models", timeout=seconds),
        ):
            return True
    except (httpx.HTTPError, httpx.InvalidURL, KnowgateError):
        return False


async def measure_draft(draft: UpstreamDraft, request: Mapping[str, Any], request_bytes: int) -> TokenUsage:
    """Return the token counts of an answer that is not sent, and of its prompt. Missing counts are estimated.

    Args:
        draft: The answer, which may be a draft or the answer with passages.
        request: The request body that the upstream got. Only `messages` is used.
        request_bytes: About the size of this body.
    """
    if draft.has_ended and draft.remaining_lines is not None:
        await draft.read_to_end()  # the token counts follow the text
    byte_count = request_bytes + len(draft.content) + sum(map(len, draft.lines))
    return await response_body.run_for_size(byte_count, lambda: _count_tokens(draft, request))


def _count_tokens(draft: UpstreamDraft, request: Mapping[str, Any]) -> TokenUsage:
    """Return the token counts of an answer and its prompt, as `measure_draft` does."""
    usage = _find_usage(draft)
    prompt_tokens = usage.get("prompt_tokens")
    if not is_token_count(prompt_tokens):
        prompt_tokens = round(estimate_tokens("\n".join(_iter_texts(request.get("messages")))))
    completion_tokens = usage.get("completion_tokens")
    if not is_token_count(completion_tokens):
        text = draft.completion.text if draft.completion is not None else ""
        completion_tokens = round(estimate_tokens(text))
    return TokenUsage(prompt_tokens, completion_tokens, get_cost(usage))


def _iter_texts(messages: object) -> Iterator[str]:
    """Yield the texts of a chat, without images and other content."""
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        parts = content if isinstance(content, list) else [{"text": content}]
        texts = [part.get("text") for part in parts if isinstance(part, dict)]
        yield from (text for text in texts if isinstance(text, str))


def _find_usage(draft: UpstreamDraft) -> Mapping[str, Any]:
    """Return the token counts reported by the upstream, or {}. The last chunk of a stream has the sum."""
    lines = (line for line in reversed(draft.lines) if b'"usage"' in line)
    chunks = map(parse_event_data, itertools.islice(lines, MAX_USAGE_LINES))
    with suppress(InvalidResponse):
        for chunk in itertools.chain([draft.body], chunks):
            if chunk is not None and isinstance(chunk.get("usage"), dict):
                return cast("dict[str, Any]", chunk["usage"])
    return {}


def annotate_body(content: bytes, trace: RequestTrace) -> bytes:
    """Add the report `knowgate` at the end of a JSON object.

    Example: b'{"id": 1}' becomes b'{"id": 1,"knowgate":{...}}'.
    """
    content = replace_non_finite(content)
    if trace.extra_usage != TokenUsage():
        content = _add_usage(content, trace.extra_usage)
    text = content.strip()
    has_fields = text[1:-1].strip() != b""
    separator = b"," if has_fields else b""
    return text[:-1] + separator + b'"knowgate":' + dump_json(trace.to_json()) + b"}"


def _add_usage(content: bytes, extra_usage: TokenUsage) -> bytes:
    """Add the tokens of other calls to `usage` in a JSON body. Invalid bodies stay unchanged."""
    try:
        body = response_body.parse_upstream_json(content)
    except InvalidResponse:
        return content
    if not isinstance(body, dict):
        return content
    extra_usage.add_to(body)
    return dump_json(body, is_large=len(content) > LARGE_BODY_BYTES)
