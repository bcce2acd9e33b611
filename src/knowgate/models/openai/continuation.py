"""Going on from a draft on a server: where it can read a draft as the beginning of its own answer.

vLLM and SGLang do so with `continue_final_message`, llama.cpp whenever the last message is the assistant's (and then
repeats the draft in its reply, but not in a stream). Other servers would take the draft for an earlier turn: there, and
where a draft would not be read as it was written, the answer is generated anew in full.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

from knowgate.errors import BadSetting
from knowgate.models.openai.client import StatusError
from knowgate.models.openai.responses import assemble_stream, parse_completions
from knowgate.models.openai.server import CONTINUATION_FIELDS, REFUSAL_STATUSES, ServedModel
from knowgate.types import Completion, Prompt, TextStream

REPLACEMENT_CHARACTER = "\ufffd"  # half a character: the draft was cut inside one
DRAFT_REPEATING_SERVER = "llamacpp"
StreamChunks = Generator[Any, None, None]


@dataclass(frozen=True)
class ServerDraft:
    """A draft and what it answered; `completion` is None when no draft was asked for."""

    prompt: Prompt
    completion: Completion | None

    def is_enough(self, max_tokens: int) -> bool:
        done = self.completion
        return done is not None and (done.finished or done.n_tokens >= max_tokens)

    @property
    def is_readable(self) -> bool:
        """Whether the server, given the text, would read what it wrote.

        Not if it is cut inside a character, if templates would strip it, or if there was more than the text shows, such
        as thoughts.
        """
        done = self.completion
        if done is None or not done.text or REPLACEMENT_CHARACTER in done.text:
            return False
        whole = done.tokens is None or "".join(token.text for token in done.tokens) == done.text
        return whole and (self.prompt.raw or done.text == done.text.strip())


def check_draft_handle(handle: object) -> ServerDraft:
    """A handle that came back from a caller."""
    if not isinstance(handle, ServerDraft):
        raise BadSetting("resume takes the handles of this model's own readings.")
    return handle


def can_continue(server: ServedModel, draft: ServerDraft) -> bool:
    """Text that is continued as it stands goes on anywhere; a turn only where the server is known to do so."""
    return draft.is_readable and (
        draft.prompt.raw or (not server.refuses_drafts and server.maker in CONTINUATION_FIELDS)
    )


def continue_draft(server: ServedModel, draft: ServerDraft, fields: dict[str, Any]) -> Completion | None:
    """The draft and what follows; None where it cannot go on. `fields` ask for what is still missing."""
    begun = draft.completion
    if begun is None or not can_continue(server, draft):
        return None
    try:
        reply = server.ask(draft.prompt, fields, begun.text)
    except StatusError as error:
        _remember(server, error)
        return None
    more = parse_completions(reply)[0]
    return _joined(begun, more, begun.text if server.maker == DRAFT_REPEATING_SERVER and not draft.prompt.raw else "")


def stream_continuation(
    server: ServedModel, draft: ServerDraft, ask: Callable[[str], StreamChunks]
) -> TextStream | None:
    """The same as a stream, which begins with the draft. `ask` opens what follows a text."""
    begun = draft.completion
    if begun is None or not can_continue(server, draft):
        return None
    try:
        parts = ask(begun.text)
    except StatusError as error:
        _remember(server, error)
        return None

    def stream() -> TextStream:
        yield begun.text
        reply = yield from assemble_stream(parts)
        return _joined(begun, parse_completions(reply)[0])

    return stream()


def _remember(server: ServedModel, error: StatusError) -> None:
    """A server that is too old for it, or whose template has no place for it, is not asked again."""
    if error.status not in REFUSAL_STATUSES:
        raise error
    server.refuses_drafts = True


def _joined(begun: Completion, more: Completion, repeated: str = "") -> Completion:
    tokens = None if begun.tokens is None or more.tokens is None else begun.tokens + more.tokens
    return Completion(
        text=begun.text + more.text.removeprefix(repeated),
        tokens=tokens,
        finished=more.finished,
        n_tokens=begun.n_tokens + more.n_tokens,
    )
