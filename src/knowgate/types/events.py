"""What comes out of a question while it is being answered. Text events join to the text of the answer, exactly."""

from __future__ import annotations

from dataclasses import dataclass

from knowgate.types.records import Answer, Decision, Passage


@dataclass(frozen=True)
class DecisionEvent:
    """The gate has decided. The decision of the whole answer may say more: what retrieval found, say."""

    decision: Decision


@dataclass(frozen=True)
class PassagesEvent:
    """What was looked up and the LLM will be shown; none where nothing was found or all of it was useless.

    Each round of retrieval that changes them has an event of its own; the last one holds those of the answer.
    """

    passages: tuple[Passage, ...]


@dataclass(frozen=True)
class TextEvent:
    """The next piece of the answer's text; never empty. Answers of earlier rounds of retrieval are not shown."""

    text: str


@dataclass(frozen=True)
class AnswerEvent:
    """The whole answer; nothing comes after it."""

    answer: Answer


Event = DecisionEvent | PassagesEvent | TextEvent | AnswerEvent
