"""Request formats of the APIs for chats, completions and responses.

For each format there is a function that extracts the question and one that inserts passages. If a request does not
contain a plain question, no gate can decide on it, and it is forwarded unchanged (`UngatedRequest`).
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol
from unicodedata import normalize

from knowgate.data.history.entries import MAX_QUESTION_CHARS, is_too_long
from knowgate.models.prompts import templates
from knowgate.pipeline.conversation import question_from_messages
from knowgate.server.json_api import ApiError
from knowgate.server.options import PassagePlacement
from knowgate.types import Model, Passage, Question

MAX_PROMPT_CHARS = 500  # a longer prompt is a text to continue, not a question
MAX_EARLIER_MESSAGES = 32  # earlier messages of a chat that are read to understand a follow-up
CLIENT_TOOL_TYPES = ("function", "custom")  # tools of all other types are run by the upstream
TAG_OPENINGS, SLASHES = "<＜﹤‹«⟨〈\u2329《❮˂", "/／∕⁄⧸"
# Invisible and combining characters.
HIDDEN_CHARACTERS = templates.INVISIBLE_CHARACTERS + "\u0300-\u036f\u1ab0-\u1aff\u1dc0-\u1dff\u20d0-\u20ff"
# Letters of other scripts that look like those of the tags: Cyrillic, Greek, Armenian.
LOOKALIKES = {
    "a": "аαɑ", "c": "сϲ", "d": "ԁ", "e": "еε", "g": "ɡց", "m": "м", "n": "ո", "o": "оο", "p": "рρ", "s": "ѕ",
    "t": "тτ", "u": "υս",
}  # fmt: skip
# Ranges of accented, small, circled, full-width and mathematical letters.
STYLED_LETTERS = ((0xC0, 0x250), (0x1D00, 0x1DC0), (0x1E00, 0x1F00), (0x2100, 0x2150), (0x24B6, 0x24EA), (0xFF21, 0xFF5B),
                  (0x1D400, 0x1D800))  # fmt: skip
# Part types of the Responses API -> part types of chats.
TEXT_PART_TYPES = {"input_text": "text", "output_text": "text"}


@dataclass(frozen=True)
class UngatedRequest:
    """Request without a question for the gate. `reason` says why."""

    reason: str


def check_upstream_tools(body: Mapping[str, Any]) -> UngatedRequest | None:
    """Return why no gate can decide, if the upstream runs tools of the request. None if it runs none.

    Such tools would run twice: once for the draft, and once for the answer with passages.
    """
    tools = body.get("tools")
    types = [tool.get("type") for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
    if body.get("web_search_options") is None and all(kind in CLIENT_TOOL_TYPES for kind in types):
        return None
    return UngatedRequest("the upstream runs tools of this request")


# --- chats ----------------------------------------------------------------------------------------


def extract_question(model: Model, messages: Sequence[Mapping[str, Any]]) -> Question | UngatedRequest:
    """Turn the last message of a chat into a question that can be understood without the earlier messages.

    Args:
        model: The LLM that rewrites follow-up questions.
        messages: The messages of the chat, each with a role.

    Returns:
        The question. If the last message is not a plain text of the user, an `UngatedRequest` with the reason.
    """
    last = messages[-1]
    if last["role"] != "user":
        return UngatedRequest(f"the last message is not from the user: it has the role '{last['role'][:40]}'")
    text = extract_text(last.get("content"))
    if text is None:
        return UngatedRequest("the user's message contains more than text")
    if not text.strip():
        return UngatedRequest("the user's message is empty")
    if is_too_long(text):
        return UngatedRequest(f"the user's message has more than {MAX_QUESTION_CHARS:,} characters")
    # A follow-up refers to the latest messages, and a chat can have thousands.
    latest = list(itertools.islice(_iter_texts_backwards(messages[:-1]), MAX_EARLIER_MESSAGES))
    return question_from_messages(model, [*reversed(latest), {"role": "user", "content": text}])


def may_be_follow_up(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether user or assistant said anything before the last message, so that the LLM may have to rewrite it."""
    return any(message["role"] in ("user", "assistant") for message in messages[:-1])


def _iter_texts_backwards(messages: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, str]]:
    """Yield the texts of user and assistant, last one first, without messages that contain more than text."""
    for message in reversed(messages):
        content = extract_text(message.get("content")) if message["role"] in ("user", "assistant") else None
        if content and content.strip():
            yield {"role": message["role"], "content": content}


def extract_text(content: object) -> str | None:
    """Return the text of a chat message. None means other content, such as an image."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return None
    texts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
    strings = [text for text in texts if isinstance(text, str)]
    return "\n".join(strings) if len(strings) == len(content) else None


def insert_passages(
    body: Mapping[str, Any], passages: Sequence[Passage], placement: PassagePlacement, *, cites: bool = True
) -> dict[str, Any]:
    """Return a copy of a chat request with passages inserted.

    Args:
        body: The body of the request.
        passages: The passages to insert.
        placement: Where to insert them: "user" (before the last message), "system" (at the end of the system prompt) or
            "documents" (in a separate field, after the client's own documents).
        cites: Whether to ask the LLM for citations. It is never asked for them if the request wants JSON.

    Raises:
        ApiError: 400 if the client's own documents are not a list.
    """
    if placement == "documents":
        return _add_documents(body, passages)
    messages = list(body["messages"])
    language = templates.detect_language(extract_text(messages[-1].get("content")) or "")
    block = format_passages(passages, language, cites=cites and not wants_json(body))
    if placement == "user":
        last = messages[-1]
        messages[-1] = {**last, "content": _prepend_text(block, last["content"])}
    elif messages[0]["role"] in ("system", "developer"):
        messages[0] = {**messages[0], "content": _append_text(messages[0].get("content"), block)}
    else:
        messages.insert(0, {"role": "system", "content": block})
    return {**body, "messages": messages}


def wants_json(body: Mapping[str, Any]) -> bool:
    """Return whether a request asks for an answer in JSON. Citations would break it."""
    text_options = body.get("text")  # of the Responses API
    answer_format = body.get("response_format")
    if not answer_format and isinstance(text_options, dict):
        answer_format = text_options.get("format")
    return isinstance(answer_format, dict) and answer_format.get("type", "text") != "text"


def format_passages(passages: Sequence[Passage], language: str, *, cites: bool = True) -> str:
    """Format passages as a block of text for the LLM, with an instruction and numbers.

    Args:
        passages: The passages.
        language: Language of the instruction.
        cites: Whether the instruction asks for citations by number.
    """
    formatted = "\n".join(_format_passage(number, passage) for number, passage in enumerate(passages, 1))
    name = "context" if cites else "uncited"
    return templates.load_packaged_templates("serve").fill(name, language, passages=formatted)


def _format_passage(number: int, passage: Passage) -> str:
    """Format one passage, between tags with its number."""
    text = passage.text.strip()
    if passage.title and not text.startswith(passage.title):
        text = f"{passage.title}\n{text}"
    # Title and text are escaped together, because a tag could begin in the title and end in the text.
    return f'<passage id="{number}">\n{_escape_tags(text)}\n</passage>'


def _escape_tags(text: str) -> str:
    """Put a space after "<" in tags such as </passage>. This prevents faked ends of passages."""
    return _compile_tag_pattern().sub(lambda match: f"{match[0]} ", text)


@cache
def _compile_tag_pattern() -> re.Pattern[str]:
    """Return a pattern for the "<" of tags such as </passage>. Lookalike letters and hidden characters match, too."""
    lookalikes = defaultdict(str, LOOKALIKES)  # letter -> all letters that look like it
    for start, end in STYLED_LETTERS:
        for styled_letter in map(chr, range(start, end)):
            letter = normalize("NFKD", styled_letter)[0].lower()
            lookalikes[letter] += styled_letter
    words = []
    for word in ("passage", "document"):
        letter_patterns = [f"[{letter}{lookalikes[letter]}]" for letter in word]
        words.append(f"[{HIDDEN_CHARACTERS}]*".join(letter_patterns))
    pattern = rf"[{TAG_OPENINGS}](?=[{SLASHES}\s{HIDDEN_CHARACTERS}]*(?:{'|'.join(words)}))"
    return re.compile(pattern, re.IGNORECASE)


def _prepend_text(text: str, content: Any, part_type: str = "text") -> Any:
    """Put a text before the content of a chat message. Content is a string or list."""
    if isinstance(content, list):
        return [{"type": part_type, "text": text}, *content]
    return f"{text}\n\n{content}"


def _append_text(content: Any, text: str) -> Any:
    """Put a text after the content of a chat message. Content is a string or list."""
    if isinstance(content, list):
        return [*content, {"type": "text", "text": text}]
    return f"{content}\n\n{text}" if content else text


# --- /v1/completions ------------------------------------------------------------------------------


def _extract_prompt_question(model: Model, body: Mapping[str, Any]) -> Question | UngatedRequest:
    """Return the prompt of a completion request as a question. Only short prompts of one line qualify."""
    prompt = body.get("prompt")
    if not isinstance(prompt, str):
        return UngatedRequest("the prompt is not a single text")
    if body.get("suffix"):
        return UngatedRequest("the prompt has a suffix")
    if not prompt.strip() or "\n" in prompt.strip() or len(prompt) > MAX_PROMPT_CHARS:
        return UngatedRequest("the prompt is not a plain question (a single line of limited length)")
    return Question(prompt.strip())


def _insert_into_prompt(
    body: Mapping[str, Any], passages: Sequence[Passage], placement: PassagePlacement, *, cites: bool = True
) -> dict[str, Any]:
    """Put passages before the prompt. `placement` is ignored, because a completion request has no other place."""
    prompt = body["prompt"]
    block = format_passages(passages, templates.detect_language(prompt), cites=cites and not wants_json(body))
    return {**body, "prompt": _prepend_text(block, prompt)}


# --- /v1/responses --------------------------------------------------------------------------------


def _extract_input_question(model: Model, body: Mapping[str, Any]) -> Question | UngatedRequest:
    """Return the last user message of a request to the Responses API as a question."""
    if body.get("previous_response_id") or body.get("conversation") or body.get("prompt"):
        return UngatedRequest("earlier messages are stored at the upstream, so this server does not know them")
    items = body.get("input")
    if isinstance(items, str):
        return extract_question(model, [{"role": "user", "content": items}])
    if not isinstance(items, list) or not items or not all(map(_is_message, items)):
        return UngatedRequest("the input contains more than messages")
    messages = [{"role": item["role"], "content": _to_chat_content(item.get("content"))} for item in items]
    return extract_question(model, messages)


def _is_message(item: object) -> bool:
    """Return whether an input item of the Responses API is a message, rather than, for example, a tool result."""
    return isinstance(item, dict) and isinstance(item.get("role"), str) and item.get("type", "message") == "message"


def _to_chat_content(content: Any) -> Any:
    """Convert message content from the Responses API to the chat format. Only part types are renamed."""
    if not isinstance(content, list):
        return content
    parts = []
    for part in content:
        chat_type = TEXT_PART_TYPES.get(str(part.get("type"))) if isinstance(part, dict) else None
        parts.append({**part, "type": chat_type} if chat_type else part)
    return parts


def _add_documents(body: Mapping[str, Any], passages: Sequence[Passage]) -> dict[str, Any]:
    """Return a copy of a chat request with passages after the client's own documents. See `insert_passages`."""
    own_documents = body.get("documents") or []
    if not isinstance(own_documents, list):
        message = "the field 'documents' must be a list, because passages are added to it."
        raise ApiError(400, message, "invalid_type")
    documents = []
    for passage in passages:
        fields = {"id": passage.id, "title": passage.title, "text": passage.text}
        # Without a template (""), `escape_values` escapes only chat markers.
        documents.append(templates.escape_values("", {name: _escape_tags(text) for name, text in fields.items()}))
    return {**body, "documents": [*own_documents, *documents]}


def _insert_into_input(
    body: Mapping[str, Any], passages: Sequence[Passage], placement: PassagePlacement, *, cites: bool = True
) -> dict[str, Any]:
    """Put passages before the last user message, or into the instructions."""
    items = body["input"]  # a text, or a list of messages
    question = items if isinstance(items, str) else extract_text(_to_chat_content(items[-1].get("content")))
    language = templates.detect_language(str(question))
    block = format_passages(passages, language, cites=cites and not wants_json(body))
    if placement != "user":
        return {**body, "instructions": _append_text(body.get("instructions"), block)}
    if isinstance(items, str):
        return {**body, "input": _prepend_text(block, items)}
    last_message = items[-1]
    content = _prepend_text(block, last_message["content"], "input_text")
    return {**body, "input": [*items[:-1], {**last_message, "content": content}]}


class PassageInserter(Protocol):
    """Function that returns a copy of a request with passages."""

    def __call__(
        self, body: Mapping[str, Any], passages: Sequence[Passage], placement: PassagePlacement, *, cites: bool = True
    ) -> dict[str, Any]: ...


@dataclass(frozen=True)
class RequestFormat:
    """Functions for one API path. They extract the question of a request and insert passages."""

    extract_question: Callable[[Model, Mapping[str, Any]], Question | UngatedRequest]
    insert_passages: PassageInserter


REQUEST_FORMATS = {
    "/chat/completions": RequestFormat(lambda model, body: extract_question(model, body["messages"]), insert_passages),
    "/completions": RequestFormat(_extract_prompt_question, _insert_into_prompt),
    "/responses": RequestFormat(_extract_input_question, _insert_into_input),
}
