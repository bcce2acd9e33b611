"""One question on its way through the pipeline: what is known about it so far, and what each stage took.

Knows records and clocks; not models, gates or retrievers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from knowgate.types import Answer, ArbiterChoice, Completion, Decision, DecisionNote, Passage, Question, Reading

NOTE_TEXTS = {
    DecisionNote.NOTHING_FOUND: "nothing was found",
    DecisionNote.PASSAGES_USELESS: "the passages were judged useless",
    DecisionNote.NO_PASSAGE_FITS: "no passage fits the context window",
    DecisionNote.NOT_RERANKED: "not reranked, the retriever is sure",
    DecisionNote.DRAFT_GIVEN: "the answer from memory was given",
    DecisionNote.LABELS_UNLISTED: "nothing tells the gate's labels apart, as none of them is among the tokens that are listed",
    DecisionNote.WOULD_SKIP: "the gate would have skipped",
}


def describe_notes(notes: Sequence[DecisionNote]) -> list[str]:
    """Each fact once, in the order they came up."""
    return [_words(note, notes.count(note)) for note in dict.fromkeys(notes)]


def _words(note: DecisionNote, times: int) -> str:
    return f"{1 + times} rounds of retrieval" if note is DecisionNote.RETRIEVED_AGAIN else NOTE_TEXTS[note]


@dataclass
class QuestionState:
    """One question on its way through. `steps`: rounds of retrieval it may take; `rounds`: those begun.

    lets_out: of an answer that an arbiter may replace, whether so much of it can be heard already; was_let_out: it was.
    """

    question: Question
    reading: Reading = field(default_factory=Reading)
    decision: Decision | None = None
    passages: tuple[Passage, ...] = ()
    text: str = ""
    steps: int = 1
    rounds: int = 1
    n_tokens: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    notes: list[DecisionNote] = field(default_factory=list)
    done: Completion | None = None
    choice: ArbiterChoice | None = None
    lets_out: Callable[[str], bool] | None = None
    was_let_out: bool = False

    @property
    def decided(self) -> Decision:
        """The decision, with all that was noted since it was made."""
        if self.decision is None:
            raise RuntimeError("a case is asked for its decision before it has one")
        chosen = [self.choice.reason] if self.choice and self.choice.was_weighed else []
        noted = [note for note in self.notes if note is not DecisionNote.DRAFT_GIVEN]  # the choice says that, and why
        reason = "; ".join([self.decision.reason, *describe_notes(noted), *chosen])
        return replace(self.decision, reason=reason, notes=tuple(self.notes))

    @property
    def may_look_further(self) -> bool:
        """Whether another round of retrieval may follow the answer that is made now."""
        return bool(self.passages) and self.rounds < self.steps

    @property
    def finished(self) -> bool:
        """Whether the answer that is given ended by itself; False: the token limit stopped it."""
        given = self.reading.draft if self.choice and self.choice.from_memory else self.done
        return given is None or given.finished

    def answer(self, together: int) -> Answer:
        """All of it, once the way is gone. together: cases that went it at once."""
        return Answer(
            self.question,
            self.text,
            self.decided,
            self.passages,
            add_total_time(self.seconds),
            self.reading.draft,
            self.n_tokens,
            self.choice,
            together,
            self.finished,
        )

    def take(self, done: Completion) -> None:
        """The answer; tokens of an earlier round of retrieval count too."""
        self.text, self.done = done.text, done
        self.n_tokens += done.n_tokens


@dataclass
class measure_time:  # noqa: N801 - reads as a statement: with timed(cases, "read")
    """Adds a stage's time to its cases; a batch's time is shared evenly among its questions."""

    cases: Sequence[QuestionState]
    stage: str
    start: float = 0.0

    def __enter__(self) -> None:
        self.start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        share = (time.perf_counter() - self.start) / max(1, len(self.cases))
        for case in self.cases:
            case.seconds[self.stage] = case.seconds.get(self.stage, 0.0) + share


def is_complete_draft(draft: Completion, max_tokens: int) -> bool:
    """Whether a draft is the whole closed-book answer."""
    return draft.finished or draft.n_tokens >= max_tokens


def add_total_time(seconds: dict[str, float]) -> dict[str, float]:
    return {**seconds, "total": sum(seconds.values())}
