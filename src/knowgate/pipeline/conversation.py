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
from knowgate.data.history.entries import MAX_QUESTION_CHARS, is_too_long
from knowgate.errors import BadInput, ModelError
from knowgate.gates.rules.rule_set import load_rules
from knowgate.models.prompts.questions import REFERENCE_PATTERN, Exchange, build_condense_prompt, is_follow_up
from knowgate.pipeline.adaptive_rag import AdaptiveRAG
from knowgate.types import Answer, Model, Question

MAX_EXCHANGES = 4  # exchanges shown to the LLM
MAX_REWRITE_TOKENS = 64
MAX_REWRITE_CHARS = 2_000  # what is read of a rewrite, because a server can return more than it was asked for
MAX_ANSWER_CHARS = 2_000  # of an earlier answer; the beginning shows what a follow-up refers to
MAX_JOINED_QUESTIONS = 3  # earlier questions that are put before a follow-up whole
MIN_PLURAL_LENGTH = 4  # shorter words, such as "gas" or "its", keep their final s
REWRITE_PREFIX = re.compile(r"^(rewritten|改写|question|问题|q)\s*[:：]\s*", re.IGNORECASE)
QUESTION_END = re.compile(r"[?？][\"'”’)]*$")
QUESTION_SENTENCE = re.compile(r"[^?？]+[?？]?")
# Words that carry no topic, so a rewrite may drop or change them.
_FUNCTION_WORDS = (
    "a about also am an and any are as at be been but by can could did do does else for from had has have how i if in "
    "instead is may me might must my no not of on or our please same shall should so some than the then to too us was "
    "we well were what when where which who whom whose why will with would yes you your"
)
FUNCTION_WORDS = frozenset([*_FUNCTION_WORDS.split(), *"的了呢吗吧是在那哪里么什谁几多少怎为何有和也还这它他她们个"])


def rewrite_follow_up(model: Model, exchanges: Sequence[Exchange], text: str) -> str:
    """Rewrite a follow-up question so that it stands alone. Other questions stay as they are.

    Example: "When was she born?" becomes "When was Jane Austen born?". If the conversation is too long for the LLM, the
    follow-up stays as it is; if the LLM fails, earlier questions are put before it.

    Args:
        model: The LLM that rewrites.
        exchanges: Earlier questions and answers of the conversation.
        text: The follow-up question.
    """
    # A rule decides without earlier questions, for example that a greeting needs no retrieval.
    if not exchanges or not is_follow_up(text) or load_rules().decide(text) is not None:
        return text
    recent = exchanges[-MAX_EXCHANGES:]
    try:
        (completions,) = model.generate([build_condense_prompt(recent, text)], max_tokens=MAX_REWRITE_TOKENS)
    except BadInput:  # the earlier questions and answers exceed the context window
        return text
    except ModelError:  # if the LLM does not answer the question either, that call says so
        return _concatenate(recent, text)
    lines = completions[0].text[:MAX_REWRITE_CHARS].strip().splitlines() or [""]
    rewritten = REWRITE_PREFIX.sub("", lines[0].strip())
    return rewritten if _is_plausible(rewritten, recent, text) else _concatenate(recent, text)


def _is_plausible(rewritten: str, exchanges: Sequence[Exchange], text: str) -> bool:
    """Return whether the LLM's rewrite of a follow-up question can be used."""
    if not QUESTION_END.search(rewritten):
        return False
    conversation = " ".join(f"{exchange.question} {exchange.answer}" for exchange in exchanges)
    conversation_words = _find_content_words(conversation)
    rewritten_words = _find_content_words(rewritten)
    question_words = _find_content_words(REFERENCE_PATTERN.sub(" ", text))  # without pronouns
    keeps_words = question_words <= rewritten_words
    added_words = rewritten_words - question_words
    adds_context = not conversation_words.isdisjoint(added_words)
    is_repeated = any(tokenize(rewritten) == tokenize(exchange.question) for exchange in exchanges)
    return keeps_words and adds_context and not is_repeated


def _find_content_words(text: str) -> set[str]:
    """Return the content words of a text, without plural s.

    Example: "Who wrote the novels?" gives {"wrote", "novel"}.
    """
    words = {word for word in tokenize(text) if word not in FUNCTION_WORDS}
    return {word if len(word) < MIN_PLURAL_LENGTH else word.removesuffix("s") for word in words}


def _concatenate(exchanges: Sequence[Exchange], text: str) -> str:
    """Prepend the previous questions to a follow-up, from the latest one on that is not a follow-up itself.

    Example: "Who wrote Emma? When was she born?".
    """
    questions: list[str] = []
    for exchange in reversed(exchanges):
        questions.insert(0, exchange.question)
        if not is_follow_up(exchange.question):
            break
    sentences = [part.strip() for part in QUESTION_SENTENCE.findall(" ".join(questions)) if part.strip()]
    if len(sentences) >= MAX_JOINED_QUESTIONS:
        sentences = [sentences[0], sentences[-1]]
    joined = " ".join([*sentences, text])
    return joined if len(joined) <= MAX_QUESTION_CHARS else text


def _rewrite_question(model: Model, exchanges: Sequence[Exchange], text: str, id: str) -> Question:
    """Return a follow-up as a standalone `Question`. `meta["asked"]` holds the original text."""
    rewritten = rewrite_follow_up(model, exchanges, text)
    if rewritten == text:
        return Question(text, id)
    earlier = [exchange.question for exchange in exchanges[-MAX_EXCHANGES:]]
    return Question(rewritten, id, meta={"asked": text, "earlier": earlier})


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
        """Rewrite a follow-up question to stand alone, without answering it; `meta` holds the original text."""
        return _rewrite_question(self.rag.model, self.exchanges, text, id)

    def ask(self, text: str) -> Answer:
        """Answer the next question of the conversation."""
        answer = self.rag.answer(self.rewrite(text))
        self.remember(answer)
        return answer

    def remember(self, answer: Answer) -> None:
        """Add a question and its answer to the conversation; only the last MAX_EXCHANGES are kept."""
        self.exchanges = [*self.exchanges, Exchange(answer.question.text, answer.text)][-MAX_EXCHANGES:]


def question_from_messages(model: Model, messages: Sequence[Mapping[str, Any]], id: str = "") -> Question:
    """Return the last user question of an OpenAI chat, rewritten to stand alone.

    Raises:
        BadInput: A message has no text, or the last one is not the user's.
    """
    chat = [_read_message(message) for message in messages]  # pairs of role and text
    last_role, question = chat[-1] if chat else ("", "")
    if last_role != "user":
        raise BadInput("the last message must be a question of the user: {'role': 'user', 'content': '...'}.")
    answered = [
        Exchange(text, reply[:MAX_ANSWER_CHARS])
        for (role, text), (next_role, reply) in itertools.pairwise(chat)
        if role == "user" and next_role == "assistant"
    ]
    # Only the last ones are checked, because a chat can have thousands, and normalizing a text takes milliseconds.
    exchanges = [exchange for exchange in answered[-MAX_EXCHANGES:] if not is_too_long(exchange.question)]
    return _rewrite_question(model, exchanges, question, id)


def _read_message(message: Mapping[str, Any]) -> tuple[str, str]:
    """Return role and content of a chat message in OpenAI format; raise BadInput unless both are texts."""
    role = message.get("role")
    content = message.get("content")
    if not isinstance(role, str) or not isinstance(content, str) or not content.strip():
        raise BadInput("every message must have the fields 'role' (a text) and 'content' (a text, not empty).")
    return role, content
