"""Continue a draft on a server that can take it as the beginning of its own answer.

vLLM and SGLang do so with `continue_final_message`, llama.cpp whenever the last message is the assistant's (and then
repeats the draft in its response, but not in a stream). Other servers would take the draft for an earlier turn. There,
and if the draft would not be tokenized as it was generated, the whole answer is generated again.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

from knowgate.models.openai.client import StatusError
from knowgate.models.openai.responses import assemble_stream, parse_completions
from knowgate.models.openai.server import CONTINUATION_FIELDS, REFUSAL_STATUSES, ModelEndpoint
from knowgate.models.tokenization import REPLACEMENT_CHARACTER
from knowgate.types import Completion, Prompt, TextStream

DRAFT_REPEATING_SERVER = "llamacpp"
StreamChunks = Generator[Any, None, None]


@dataclass(frozen=True)
class ServerDraft:
    """A resume handle: a prompt and its draft, which is None if the reading had none."""

    prompt: Prompt
    completion: Completion | None

    def is_complete(self, max_tokens: int) -> bool:
        """Return whether the draft ended by itself or has `max_tokens` tokens."""
        draft = self.completion
        return draft is not None and (draft.finished or draft.n_tokens >= max_tokens)

    @property
    def is_reproducible(self) -> bool:
        """Whether the server would read the draft's text as the tokens that it generated.

        Not if the text is cut inside a character, if a chat template would strip it, or if there were tokens that it
        does not show, such as reasoning.
        """
        draft = self.completion
        if draft is None or not draft.text or REPLACEMENT_CHARACTER in draft.text:
            return False
        shows_all_tokens = draft.tokens is None or "".join(token.text for token in draft.tokens) == draft.text
        return shows_all_tokens and (self.prompt.raw or draft.text == draft.text.strip())


def can_continue(endpoint: ModelEndpoint, draft: ServerDraft) -> bool:
    """Return whether the server can continue a draft. Every server continues raw text."""
    if not draft.is_reproducible:
        return False
    return draft.prompt.raw or (not endpoint.refuses_drafts and endpoint.server in CONTINUATION_FIELDS)


def continue_draft(endpoint: ModelEndpoint, draft: ServerDraft, fields: dict[str, Any]) -> Completion | None:
    """Return the draft with its continuation, or None if the server cannot continue it.

    Args:
        endpoint: The model on its server.
        draft: The draft.
        fields: Request fields for the missing tokens.
    """
    start = draft.completion
    if start is None or not can_continue(endpoint, draft):
        return None
    try:
        response = endpoint.complete_prompt(draft.prompt, fields, start.text)
    except StatusError as error:
        _note_refusal(endpoint, error)
        return None
    repeats_draft = endpoint.server == DRAFT_REPEATING_SERVER and not draft.prompt.raw
    return _join(start, parse_completions(response)[0], start.text if repeats_draft else "")


def stream_continuation(
    endpoint: ModelEndpoint, draft: ServerDraft, open_stream: Callable[[str], StreamChunks]
) -> TextStream | None:
    """Return a stream that begins with the draft, or None if the server cannot continue it.

    Args:
        endpoint: The model on its server.
        draft: The draft.
        open_stream: Opens the stream of what follows a text.
    """
    start = draft.completion
    if start is None or not can_continue(endpoint, draft):
        return None
    try:
        chunks = open_stream(start.text)
    except StatusError as error:
        _note_refusal(endpoint, error)
        return None

    def stream() -> TextStream:
        yield start.text
        response = yield from assemble_stream(chunks)
        return _join(start, parse_completions(response)[0])

    return stream()


def _note_refusal(endpoint: ModelEndpoint, error: StatusError) -> None:
    """Remember that a server refuses drafts, because it is too old or its chat template does not allow them."""
    if error.status not in REFUSAL_STATUSES:
        raise error
    endpoint.refuses_drafts = True


def _join(start: Completion, continuation: Completion, repeated: str = "") -> Completion:
    """Join a draft and its continuation, from which the text `repeated` is removed."""
    tokens = None
    if start.tokens is not None and continuation.tokens is not None:
        tokens = start.tokens + continuation.tokens
    return Completion(
        text=start.text + continuation.text.removeprefix(repeated),
        tokens=tokens,
        finished=continuation.finished,
        n_tokens=start.n_tokens + continuation.n_tokens,
    )
