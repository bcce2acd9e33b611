"""Several turns: a follow-up is made to stand alone before anybody decides, searches or answers.

A first question, and one that leans on nothing, goes through as it is and costs nothing more.
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
MAX_REWRITE_TOKENS = 64  # tokens of a question that was made to stand alone
REWRITE_PREFIX = re.compile(r"^(rewritten|改写|question|问题|q)\s*[:：]\s*", re.IGNORECASE)


def rewrite_follow_up(model: Model, before: Sequence[Exchange], text: str) -> str:
    """The question as it would be asked without the conversation."""
    if not before or not is_follow_up(text) or load_rules().judge(text) is not None:
        return text
    recent = before[-MAX_EXCHANGES:]
    (written,) = model.generate([build_condense_prompt(recent, text)], max_tokens=MAX_REWRITE_TOKENS)
    found = REWRITE_PREFIX.sub("", (written[0].text.strip().splitlines() or [""])[0].strip())
    return found if _makes_sense(found, recent, text) else f"{recent[-1].asked} {text}"


def _makes_sense(found: str, before: Sequence[Exchange], text: str) -> bool:
    """It says something of the question and something of what came before, and is not what came before."""
    said = set(tokenize(found))
    earlier = set(tokenize(" ".join(f"{one.asked} {one.answered}" for one in before)))
    repeated = any(tokenize(found) == tokenize(one.asked) for one in before)
    return bool(said & set(tokenize(text))) and bool(said & earlier) and not repeated


@dataclass
class Conversation:
    """Questions one after the other, each understood in the light of those before.

    Example:
        >>> talk = Conversation(rag)  # doctest: +SKIP
        >>> talk.ask("Who wrote Emma?").text, talk.ask("When was she born?").question.text  # doctest: +SKIP
        ('Jane Austen', 'When was Jane Austen born?')
    """

    rag: AdaptiveRAG
    exchanges: list[Exchange] = field(default_factory=list)

    def understand(self, text: str, id: str = "") -> Question:
        """The question that is answered; what was really said is in its `meta`, where that is something else."""
        alone = rewrite_follow_up(self.rag.model, self.exchanges, text)
        return Question(alone, id, meta={"asked": text} if alone != text else {})

    def ask(self, text: str) -> Answer:
        answer = self.rag.answer(self.understand(text))
        self.remember(answer)
        return answer

    def remember(self, answer: Answer) -> None:
        """What was said counts for the questions after it; all but the last few is forgotten."""
        self.exchanges = [*self.exchanges, Exchange(answer.question.text, answer.text)][-MAX_EXCHANGES:]


def question_from_messages(model: Model, messages: Sequence[Mapping[str, Any]], id: str = "") -> Question:
    """The last question of a conversation in the form of chat APIs, made to stand alone."""
    said = [_message(message) for message in messages]
    if not said or said[-1][0] != "user":
        raise BadInput("the last of the messages must be the user's question: {'role': 'user', 'content': '...'}.")
    before: list[Exchange] = []
    for (role, text), (next_role, reply) in itertools.pairwise(said):
        if role == "user" and next_role == "assistant":
            before.append(Exchange(text, reply))
    last = said[-1][1]
    alone = rewrite_follow_up(model, before, last)
    return Question(alone, id, meta={"asked": last} if alone != last else {})


def _message(message: Mapping[str, Any]) -> tuple[str, str]:
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not isinstance(content, str) or not content.strip():
        raise BadInput("a message is an object with 'role' and 'content', both texts.")
    return role, content
