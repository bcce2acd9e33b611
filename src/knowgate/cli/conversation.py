"""`knowgate ask -i`: a conversation; and conversations that come in as JSON lines."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

from knowgate.cli.answers_shown import Cut, show_basis, show_live, show_understood
from knowgate.cli.console import WORDS, print_json
from knowgate.doors import parse_json
from knowgate.errors import BadInput
from knowgate.pipeline import AdaptiveRAG, Conversation, answer_record, from_messages
from knowgate.types import Model, Question

MESSAGES = "messages"


def talk(rag: AdaptiveRAG, first: Sequence[str], *, explain: bool, as_json: bool) -> None:
    """One question after the other until an empty line; what was given on the command line comes first."""
    conversation, cut = Conversation(rag), Cut(rag.max_tokens)
    for number, text in enumerate(_said(first), start=1):
        question = conversation.understand(text, str(number) if as_json else "")
        if as_json:
            answer = rag.answer(question)
            print_json(answer_record(answer, rag))
        else:
            show_understood(question)
            answer = show_live(rag, question)
            cut.see(answer)
            if explain:
                show_basis(answer.decision)
        conversation.remember(answer)


def _said(first: Sequence[str]) -> Iterator[str]:
    yield from first
    while text := _next_line():
        yield text


def _next_line() -> str:
    """'' at the end: an empty line, or nothing more to read."""
    if sys.stdin.isatty():
        WORDS.print("> ", end="")
    return sys.stdin.readline().strip()


def understand(model: Model, question: Question) -> Question:
    """A line that is JSON with messages is a conversation, whose last question is meant; one with 'question', as in the
    files that are labelled, is that question; any other is a question as it stands."""
    if not (question.text.startswith("{") and f'"{MESSAGES}"' in question.text):
        return _named(question)
    record = parse_json(question.text, f"line {question.id or 1}")
    messages = record.get(MESSAGES)
    if not isinstance(messages, list) or not all(isinstance(one, dict) for one in messages):
        raise BadInput(f"line {question.id or 1}: 'messages' must be a list of objects with 'role' and 'content'.")
    return from_messages(model, messages, question.id)


def _named(question: Question) -> Question:
    if not (question.text.startswith("{") and '"question"' in question.text):
        return question
    try:
        asked = parse_json(question.text, "the line").get("question")
    except BadInput:  # words in braces are words
        return question
    return replace(question, text=asked) if isinstance(asked, str) and asked.strip() else question
