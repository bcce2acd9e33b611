"""What is asked: the stand-alone question of a chat, or why there is none that a gate could decide on.

Knows the form of chat messages. Never changes them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from knowgate.errors import BadInput
from knowgate.models.prompts.templates import detect_language, load_packaged_templates
from knowgate.pipeline.conversation import question_from_messages
from knowgate.server.json_api import ApiError
from knowgate.server.options import PassagePlacement
from knowgate.types import Model, Passage, Question

MAX_QUESTION_CHARS = 20_000  # characters; what is longer is a text to work on, not a question


@dataclass(frozen=True)
class UngatedRequest:
    """Nothing can be decided here; the request goes on as it is."""

    why: str


def read_messages(body: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The messages, found to be objects with a role."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError(400, "'messages' must be a list of at least one message.", "invalid_messages")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ApiError(400, "each message must be an object with a 'role'.", "invalid_messages")
    return messages


def extract_question(model: Model, messages: Sequence[Mapping[str, Any]]) -> Question | UngatedRequest:
    """model: whoever rewrites a follow-up so that it stands alone."""
    last = messages[-1]
    if last["role"] != "user":
        return UngatedRequest(f"the last message is not the user's but of the role '{last['role'][:40]}'")
    text = extract_text(last.get("content"))
    if text is None:
        return UngatedRequest("the user's message holds more than text")
    if not text.strip():
        return UngatedRequest("the user's message is empty")
    if len(text) > MAX_QUESTION_CHARS:
        return UngatedRequest(f"the user's message has more than {MAX_QUESTION_CHARS:,} characters")
    try:
        return question_from_messages(model, [*_talk(messages[:-1]), {"role": "user", "content": text}])
    except BadInput as error:
        return UngatedRequest(str(error).rstrip("."))


def _talk(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What was said by the two sides, as far as it is text."""
    said = [(message["role"], extract_text(message.get("content"))) for message in messages]
    return [{"role": role, "content": text} for role, text in said if role in ("user", "assistant") and text]


def extract_text(content: object) -> str | None:
    """A content that is text, whole or in parts; None for anything else."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return None
    parts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
    texts = [part for part in parts if isinstance(part, str)]
    return "\n".join(texts) if len(texts) == len(content) else None


PASSAGE_TAGS = re.compile(r"<(?=/?\s*(passages?|documents?)\b)", re.IGNORECASE)


def insert_passages(body: Mapping[str, Any], passages: Sequence[Passage], place: PassagePlacement) -> dict[str, Any]:
    """The request with passages; the one that was given stays as it is."""
    if place == "documents":
        listed = [{"id": one.id, "title": one.title, "text": one.text} for one in passages]
        return {**body, "documents": listed}
    messages = list(body["messages"])
    block = format_passages(passages, detect_language(str(messages[-1].get("content"))))
    if place == "user":
        last = messages[-1]
        messages[-1] = {**last, "content": prepend_text(block, last["content"])}
    elif messages[0]["role"] in ("system", "developer"):
        messages[0] = {**messages[0], "content": append_text(messages[0].get("content"), block)}
    else:
        messages.insert(0, {"role": "system", "content": block})
    return {**body, "messages": messages}


def format_passages(passages: Sequence[Passage], lang: str) -> str:
    listed = "\n".join(_written(number, passage) for number, passage in enumerate(passages, 1))
    return load_packaged_templates("serve").fill("context", lang, passages=listed)


def _written(number: int, passage: Passage) -> str:
    """What looks like one of our marks in a passage is written with a space inside, so that it ends nothing."""
    title, text = (PASSAGE_TAGS.sub("< ", part) for part in (passage.title, passage.text.strip()))
    head = f"{title}\n" if title and not text.startswith(title) else ""
    return f'<passage id="{number}">\n{head}{text}\n</passage>'


def prepend_text(block: str, content: Any, kind: str = "text") -> Any:
    """kind: what a part of text is called."""
    if isinstance(content, list):
        return [{"type": kind, "text": block}, *content]
    return f"{block}\n\n{content}"


def append_text(content: Any, block: str) -> Any:
    if isinstance(content, list):
        return [*content, {"type": "text", "text": block}]
    return f"{content}\n\n{block}" if content else block


MAX_PROMPT_CHARS = 500  # characters of a prompt that is a question; what is longer is a text to go on with
TEXT_PART_TYPES = {"input_text": "text", "output_text": "text"}  # what the Responses API calls text


@dataclass(frozen=True)
class RequestFormat:
    """How a request is read and written."""

    question: Callable[[Model, Mapping[str, Any]], Question | UngatedRequest]
    with_passages: Callable[[Mapping[str, Any], Sequence[Passage], PassagePlacement], dict[str, Any]]


# --- /v1/completions ------------------------------------------------------------------------------


def _prompted(model: Model, body: Mapping[str, Any]) -> Question | UngatedRequest:
    prompt = body.get("prompt")
    if not isinstance(prompt, str):
        return UngatedRequest("the prompt is not one text")
    if body.get("suffix"):
        return UngatedRequest("the text goes on after the gap")
    if not prompt.strip() or "\n" in prompt.strip() or len(prompt) > MAX_PROMPT_CHARS:
        return UngatedRequest("the prompt is no plain question")
    return Question(prompt.strip())


def _into_prompt(body: Mapping[str, Any], passages: Sequence[Passage], place: PassagePlacement) -> dict[str, Any]:
    """A prompt is all there is: they go before it wherever they would else."""
    prompt = body["prompt"]
    return {**body, "prompt": prepend_text(format_passages(passages, detect_language(prompt)), prompt)}


# --- /v1/responses --------------------------------------------------------------------------------


def _responded(model: Model, body: Mapping[str, Any]) -> Question | UngatedRequest:
    if body.get("previous_response_id") or body.get("conversation") or body.get("prompt"):
        return UngatedRequest("what was said before is kept by the upstream")
    asked = body.get("input")
    if isinstance(asked, str):
        return extract_question(model, [{"role": "user", "content": asked}])
    if not isinstance(asked, list) or not asked or not all(map(_is_message, asked)):
        return UngatedRequest("the input is more than messages")
    return extract_question(model, [{"role": one["role"], "content": _content(one.get("content"))} for one in asked])


def _is_message(item: object) -> bool:
    return isinstance(item, dict) and isinstance(item.get("role"), str) and item.get("type", "message") == "message"


def _content(content: Any) -> Any:
    """As a chat has it."""
    if not isinstance(content, list):
        return content
    return [
        {**part, "type": TEXT_PART_TYPES.get(str(part.get("type")), part.get("type"))}
        if isinstance(part, dict)
        else part
        for part in content
    ]


def _into_input(body: Mapping[str, Any], passages: Sequence[Passage], place: PassagePlacement) -> dict[str, Any]:
    asked = body["input"]
    text = asked if isinstance(asked, str) else extract_text(_content(asked[-1].get("content")))
    block = format_passages(passages, detect_language(str(text)))
    if place != "user":
        return {**body, "instructions": append_text(body.get("instructions"), block)}
    if isinstance(asked, str):
        return {**body, "input": prepend_text(block, asked)}
    last = asked[-1]
    return {**body, "input": [*asked[:-1], {**last, "content": prepend_text(block, last["content"], "input_text")}]}


REQUEST_FORMATS = {
    "/completions": RequestFormat(_prompted, _into_prompt),
    "/responses": RequestFormat(_responded, _into_input),
}
