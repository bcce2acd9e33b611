"""Conversations: rewrite a follow-up question so that it stands alone, before the pipeline sees it.

A first question, and one that does not refer to earlier messages, is left unchanged, without a call of the LLM.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from knowgate.core.text import tokenize
from knowgate.errors import BadInput
from knowgate.gates.rules.rule_set import load_rules
from knowgate.models.prompts.questions import Exchange, build_condense_prompt, is_follow_up
from knowgate.pipeline.adaptive_rag import AdaptiveRAG
from knowgate.types import Answer, Model, Question

MAX_EXCHANGES = 4  # exchanges shown to the LLM
MAX_REWRITE_TOKENS = 64
REWRITE_PREFIX = re.compile(r"^(rewritten|改写|question|问题|q)\s*[:：]\s*", re.IGNORECASE)


def rewrite_follow_up(model: Model, exchanges: Sequence[Exchange], text: str) -> str:
    """Rewrite a follow-up question so that it can be understood without the conversation before it.

    Questions that are no follow-up, or that a rule decides (such as small talk), are returned unchanged. If the LLM's
    rewrite is not plausible, the previous question is put before this one instead.

    Args:
        model: The LLM that rewrites.
        exchanges: Earlier questions and answers of the conversation.
        text: The follow-up question.
    """
    if not exchanges or not is_follow_up(text) or load_rules().decide(text) is not None:
        return text
    recent = exchanges[-MAX_EXCHANGES:]
    (completions,) = model.generate([build_condense_prompt(recent, text)], max_tokens=MAX_REWRITE_TOKENS)
    first_line = (completions[0].text.strip().splitlines() or [""])[0].strip()
    rewritten = REWRITE_PREFIX.sub("", first_line)
    return rewritten if _is_plausible(rewritten, recent, text) else f"{recent[-1].question} {text}"


def _is_plausible(rewritten: str, exchanges: Sequence[Exchange], text: str) -> bool:
    """Return whether a rewrite can be used.

    It must share a word with the question and one with the conversation, and must not repeat an earlier question.
    """
    words = set(tokenize(rewritten))
    earlier = set(tokenize(" ".join(f"{exchange.question} {exchange.answer}" for exchange in exchanges)))
    is_repeated = any(tokenize(rewritten) == tokenize(exchange.question) for exchange in exchanges)
    return bool(words & set(tokenize(text))) and bool(words & earlier) and not is_repeated


def _rewrite_question(model: Model, exchanges: Sequence[Exchange], text: str, id: str) -> Question:
    """Build the question to answer; `meta["asked"]` holds the original text if it was rewritten."""
    rewritten = rewrite_follow_up(model, exchanges, text)
    return Question(rewritten, id, meta={"asked": text} if rewritten != text else {})


@dataclass
class Conversation:
    """A conversation, in which questions may refer to earlier questions and answers.

    Args:
        rag: The pipeline that answers.
        exchanges: Earlier questions and answers.

    Example:
        >>> talk = Conversation(rag)  # doctest: +SKIP
        >>> talk.ask("Who wrote Emma?").text, talk.ask("When was she born?").question.text  # doctest: +SKIP
        ('Jane Austen', 'When was Jane Austen born?')
    """

    rag: AdaptiveRAG
    exchanges: list[Exchange] = field(default_factory=list)

    def rewrite(self, text: str, id: str = "") -> Question:
        """Return the stand-alone question that will be answered; its `meta` holds the original text if it differs."""
        return _rewrite_question(self.rag.model, self.exchanges, text, id)

    def ask(self, text: str) -> Answer:
        """Answer the next question of the conversation."""
        answer = self.rag.answer(self.rewrite(text))
        self.remember(answer)
        return answer

    def remember(self, answer: Answer) -> None:
        """Add a question and its answer to the conversation; only the last four are kept."""
        self.exchanges = [*self.exchanges, Exchange(answer.question.text, answer.text)][-MAX_EXCHANGES:]


def question_from_messages(model: Model, messages: Sequence[Mapping[str, Any]], id: str = "") -> Question:
    """Extract the last user question of a chat in OpenAI format, rewritten to stand alone.

    Raises:
        BadInput: A message has no text, or the last one is not the user's.
    """
    chat = [_read_message(message) for message in messages]
    if not chat or chat[-1][0] != "user":
        raise BadInput("the last message must be a question of the user: {'role': 'user', 'content': '...'}.")
    exchanges = []
    for (role, text), (next_role, reply) in itertools.pairwise(chat):
        if role == "user" and next_role == "assistant":
            exchanges.append(Exchange(text, reply))
    _, question = chat[-1]
    return _rewrite_question(model, exchanges, question, id)


def _read_message(message: Mapping[str, Any]) -> tuple[str, str]:
    """Return role and content of a chat message in OpenAI format; raise BadInput unless both are texts."""
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not isinstance(content, str) or not content.strip():
        raise BadInput(
            "every message must be an object with the texts 'role' and 'content', and the content must not be empty."
        )
    return role, content
