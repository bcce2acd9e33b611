"""Requests that are no chats: /v1/completions and /v1/responses. Where they hold a plain question it is decided on.

Knows the forms of the two requests: where their question stands, and where passages go. What is no plain question goes
through as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from knowgate.prompts import detect_language
from knowgate.server.asking import Ungated, plain_text, question_of
from knowgate.server.options import Place
from knowgate.server.passages import after, before, passage_block
from knowgate.types import Model, Passage, Question

LONGEST = 500  # characters of a prompt that is a question; what is longer is a text to go on with
PARTS = {"input_text": "text", "output_text": "text"}  # what the Responses API calls text


@dataclass(frozen=True)
class Form:
    """How a request is read and written."""

    question: Callable[[Model, Mapping[str, Any]], Question | Ungated]
    with_passages: Callable[[Mapping[str, Any], Sequence[Passage], Place], dict[str, Any]]


# --- /v1/completions ------------------------------------------------------------------------------


def _prompted(model: Model, body: Mapping[str, Any]) -> Question | Ungated:
    prompt = body.get("prompt")
    if not isinstance(prompt, str):
        return Ungated("the prompt is not one text")
    if body.get("suffix"):
        return Ungated("the text goes on after the gap")
    if not prompt.strip() or "\n" in prompt.strip() or len(prompt) > LONGEST:
        return Ungated("the prompt is no plain question")
    return Question(prompt.strip())


def _into_prompt(body: Mapping[str, Any], passages: Sequence[Passage], place: Place) -> dict[str, Any]:
    """A prompt is all there is: they go before it wherever they would else."""
    prompt = body["prompt"]
    return {**body, "prompt": before(passage_block(passages, detect_language(prompt)), prompt)}


# --- /v1/responses --------------------------------------------------------------------------------


def _responded(model: Model, body: Mapping[str, Any]) -> Question | Ungated:
    if body.get("previous_response_id") or body.get("conversation") or body.get("prompt"):
        return Ungated("what was said before is kept by the upstream")
    asked = body.get("input")
    if isinstance(asked, str):
        return question_of(model, [{"role": "user", "content": asked}])
    if not isinstance(asked, list) or not asked or not all(map(_is_message, asked)):
        return Ungated("the input is more than messages")
    return question_of(model, [{"role": one["role"], "content": _content(one.get("content"))} for one in asked])


def _is_message(item: object) -> bool:
    return isinstance(item, dict) and isinstance(item.get("role"), str) and item.get("type", "message") == "message"


def _content(content: Any) -> Any:
    """As a chat has it."""
    if not isinstance(content, list):
        return content
    return [
        {**part, "type": PARTS.get(str(part.get("type")), part.get("type"))} if isinstance(part, dict) else part
        for part in content
    ]


def _into_input(body: Mapping[str, Any], passages: Sequence[Passage], place: Place) -> dict[str, Any]:
    asked = body["input"]
    text = asked if isinstance(asked, str) else plain_text(_content(asked[-1].get("content")))
    block = passage_block(passages, detect_language(str(text)))
    if place != "user":
        return {**body, "instructions": after(body.get("instructions"), block)}
    if isinstance(asked, str):
        return {**body, "input": before(block, asked)}
    last = asked[-1]
    return {**body, "input": [*asked[:-1], {**last, "content": before(block, last["content"], "input_text")}]}


FORMS = {"/completions": Form(_prompted, _into_prompt), "/responses": Form(_responded, _into_input)}
