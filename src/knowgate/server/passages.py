"""Passages go into a request: inside delimiters, with ids to cite, where the user wants them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from knowgate.prompts import detect_language, packaged
from knowgate.server.options import Place
from knowgate.types import Passage

OWN_MARKS = re.compile(r"<(?=/?\s*(passages?|documents?)\b)", re.IGNORECASE)


def with_passages(body: Mapping[str, Any], passages: Sequence[Passage], place: Place) -> dict[str, Any]:
    """The request with passages; the one that was given stays as it is."""
    if place == "documents":
        listed = [{"id": one.id, "title": one.title, "text": one.text} for one in passages]
        return {**body, "documents": listed}
    messages = list(body["messages"])
    block = passage_block(passages, detect_language(str(messages[-1].get("content"))))
    if place == "user":
        last = messages[-1]
        messages[-1] = {**last, "content": before(block, last["content"])}
    elif messages[0]["role"] in ("system", "developer"):
        messages[0] = {**messages[0], "content": after(messages[0].get("content"), block)}
    else:
        messages.insert(0, {"role": "system", "content": block})
    return {**body, "messages": messages}


def passage_block(passages: Sequence[Passage], lang: str) -> str:
    listed = "\n".join(_written(number, passage) for number, passage in enumerate(passages, 1))
    return packaged("serve").fill("context", lang, passages=listed)


def _written(number: int, passage: Passage) -> str:
    """What looks like one of our marks in a passage is written with a space inside, so that it ends nothing."""
    title, text = (OWN_MARKS.sub("< ", part) for part in (passage.title, passage.text.strip()))
    head = f"{title}\n" if title and not text.startswith(title) else ""
    return f'<passage id="{number}">\n{head}{text}\n</passage>'


def before(block: str, content: Any, kind: str = "text") -> Any:
    """kind: what a part of text is called."""
    if isinstance(content, list):
        return [{"type": kind, "text": block}, *content]
    return f"{block}\n\n{content}"


def after(content: Any, block: str) -> Any:
    if isinstance(content, list):
        return [*content, {"type": "text", "text": block}]
    return f"{content}\n\n{block}" if content else block
