"""Continue a draft (the beginning of an answer) on a server.

vLLM and SGLang continue the last message if the request sets `continue_final_message`. llama.cpp always does so if the
last message is the assistant's, and it repeats the draft in its response, but not in a stream. Other servers would treat
the draft as an earlier message of the chat. On those servers, and if the server would split the draft into other tokens
than it generated, the whole answer is generated again.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

from knowgate.models.backend import RemoteDraft
from knowgate.models.openai.client import StatusError
from knowgate.models.openai.responses import assemble_stream, parse_completions
from knowgate.models.openai.server import CONTINUATION_FIELDS, REFUSAL_STATUSES, ModelEndpoint
from knowgate.models.tokenization import REPLACEMENT_CHARACTER
from knowgate.types import Completion, Result, TextStream

DRAFT_REPEATING_SERVER = "llamacpp"  # the server whose responses begin with the draft that was sent
StreamChunks = Generator[Any, None, None]


def can_continue(endpoint: ModelEndpoint, draft: RemoteDraft) -> bool:
    """Return whether the server can continue a draft.

    The server must split its text into the same tokens again. This is not possible if the text ends inside a character,
    if it has outer spaces that a chat template would strip, or if the model generated tokens that the text does not
    show, such as reasoning. For chat prompts, the server also needs an option to continue a message and must not have
    refused a draft before. The draft of a raw prompt is sent as part of the prompt.
    """
    answer = draft.completion
    if answer is None or not answer.text or REPLACEMENT_CHARACTER in answer.text:
        return False
    shows_all_tokens = answer.tokens is None or "".join(token.text for token in answer.tokens) == answer.text
    if draft.prompt.raw or not shows_all_tokens:
        return shows_all_tokens
    has_outer_spaces = answer.text != answer.text.strip()
    return not has_outer_spaces and not endpoint.refuses_drafts and endpoint.server in CONTINUATION_FIELDS


def continue_draft(endpoint: ModelEndpoint, draft: RemoteDraft, fields: dict[str, Any]) -> Completion | None:
    """Return the draft with its continuation, or None if the server cannot continue it.

    Args:
        endpoint: The model on its server.
        draft: The draft.
        fields: Fields of the request for the tokens that follow the draft.
    """
    start = draft.completion
    response = _send_draft(endpoint, draft, lambda text: endpoint.complete_prompt(draft.prompt, fields, text))
    if start is None or response is None:
        return None
    # One kind of server returns the draft together with its continuation.
    repeats_draft = endpoint.server == DRAFT_REPEATING_SERVER and not draft.prompt.raw
    return _join(start, parse_completions(response)[0], repeated=start.text if repeats_draft else "")


def stream_continuation(
    endpoint: ModelEndpoint, draft: RemoteDraft, open_stream: Callable[[str], StreamChunks]
) -> TextStream | None:
    """Return a stream that begins with the draft, or None if the server cannot continue it.

    Args:
        endpoint: The model on its server.
        draft: The draft.
        open_stream: Sends a request with the draft's text, and returns the chunks of what follows it.
    """
    start, chunks = draft.completion, _send_draft(endpoint, draft, open_stream)
    if start is None or chunks is None:
        return None

    def stream() -> TextStream:
        yield start.text
        response = yield from assemble_stream(chunks)
        return _join(start, parse_completions(response)[0])

    return stream()


def _send_draft(endpoint: ModelEndpoint, draft: RemoteDraft, send: Callable[[str], Result]) -> Result | None:
    """Call `send` with the text of a draft and return its result, or None if the server cannot continue the draft.

    A server refuses drafts if it is too old or if its chat template does not allow them. It is not asked again then.
    """
    if draft.completion is None or not can_continue(endpoint, draft):
        return None
    try:
        return send(draft.completion.text)
    except StatusError as error:
        if error.status not in REFUSAL_STATUSES:
            raise
    endpoint.refuses_drafts = True
    return None


def _join(start: Completion, continuation: Completion, repeated: str = "") -> Completion:
    """Join a draft and its continuation.

    Args:
        start: The draft.
        continuation: What the server returned.
        repeated: Text at the start of the continuation that repeats the draft, and is removed.
    """
    tokens = None
    if start.tokens is not None and continuation.tokens is not None:
        tokens = start.tokens + continuation.tokens
    return Completion(
        text=start.text + continuation.text.removeprefix(repeated),
        tokens=tokens,
        finished=continuation.finished,
        n_tokens=start.n_tokens + continuation.n_tokens,
    )
