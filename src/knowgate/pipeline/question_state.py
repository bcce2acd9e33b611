"""The state of one question in the pipeline: its reading, decision, passages, answer and timings."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from knowgate.types import Answer, ArbiterChoice, Completion, Decision, DecisionNote, Passage, Question, Reading

NOTE_TEXTS = {
    DecisionNote.NOTHING_FOUND: "nothing was found",
    DecisionNote.PASSAGES_USELESS: "the passages were judged useless",
    DecisionNote.NO_PASSAGE_FITS: "no passage fits the context window",
    DecisionNote.NOT_RERANKED: "not reranked, the retriever is sure",
    DecisionNote.DRAFT_GIVEN: "the answer from memory was given",
    DecisionNote.LABELS_UNLISTED: "the server lists none of the gate's labels among its top tokens, so they are tied",
    DecisionNote.FAR_QUESTION: "unlike the questions that the gate was fitted on, so it may be wrong",
    DecisionNote.WOULD_SKIP: "the gate would have skipped",
    DecisionNote.QUOTED: "quoted, because the LLM's own answer was not in the passages",
}


class DecidedQuestion(NamedTuple):
    """A question, and the decision whether to retrieve for it.

    Attributes:
        question: The question.
        decision: Whether to retrieve, and why.
    """

    question: Question
    decision: Decision


@dataclass
class QuestionState:
    """Everything the pipeline knows about one question while it is processed.

    Attributes:
        question: The question.
        reading: Signals of the forward pass that the gate requested.
        decision: Set once the gate and the rules have decided.
        passages: Passages that the LLM is shown.
        text: The answer as it is so far.
        max_rounds: Rounds of retrieval that this question may take.
        round: The round of retrieval that was started last.
        n_tokens: Tokens generated for the answer, over all rounds.
        seconds: Seconds by stage.
        notes: Facts about how the decision was carried out.
        completion: The last generated answer.
        choice: The arbiter's choice between two answers, if there was one.
        may_show: A function if an arbiter may still replace the open-book answer, else None. It returns whether an
            answer that begins with a given text can be shown, because it will not be replaced.
        is_computed: True if the answer was computed, as for arithmetic, so that the LLM need not generate it.
        is_shown: True once text of the answer was streamed to the caller.
    """

    question: Question
    reading: Reading = field(default_factory=Reading)
    decision: Decision | None = None
    passages: tuple[Passage, ...] = ()
    text: str = ""
    max_rounds: int = 1
    round: int = 1
    n_tokens: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    notes: list[DecisionNote] = field(default_factory=list)
    completion: Completion | None = None
    choice: ArbiterChoice | None = None
    may_show: Callable[[str], bool] | None = None
    is_shown: bool = False
    is_computed: bool = False

    @property
    def final_decision(self) -> Decision:
        """The decision, with all later notes and the arbiter's reason."""
        if self.decision is None:
            raise RuntimeError("the question has no decision yet")
        if not self.notes and self.choice is None:
            return self.decision
        # The arbiter's own reason says more than the note DRAFT_GIVEN.
        notes = [note for note in self.notes if note is not DecisionNote.DRAFT_GIVEN]
        reasons = [self.decision.reason, *describe_notes(notes)]
        if self.choice and self.choice.was_arbitrated:
            reasons.append(self.choice.reason)
        return replace(self.decision, reason="; ".join(reasons), notes=tuple(self.notes))

    @property
    def may_retrieve_again(self) -> bool:
        """Whether another round of retrieval may follow the answer that is being generated."""
        return bool(self.passages) and self.round < self.max_rounds

    @property
    def is_finished(self) -> bool:
        """Whether the given answer ended by itself, before the token limit."""
        uses_draft = self.choice is not None and self.choice.is_closed_book
        answer = self.reading.draft if uses_draft else self.completion
        return answer is None or answer.finished

    def take_completion(self, completion: Completion) -> None:
        """Store a generated answer, and add its tokens to those of earlier rounds of retrieval."""
        self.completion = completion
        self.text = completion.text
        self.n_tokens += completion.n_tokens

    def quote(self, text: str) -> None:
        """Replace the answer with passages by a quotation, and note the replacement."""
        if text == self.text or self.completion is None:
            return
        self.completion = replace(self.completion, text=text, finished=True)
        self.text = text
        self.notes.append(DecisionNote.QUOTED)

    def build_answer(self, batch_size: int) -> Answer:
        """Return the finished answer. `batch_size` is the number of questions that were processed together."""
        return Answer(
            question=self.question,
            text=self.text,
            decision=self.final_decision,
            passages=self.passages,
            seconds={**self.seconds, "total": sum(self.seconds.values())},
            draft=self.reading.draft,
            n_tokens=self.n_tokens,
            choice=self.choice,
            batch_size=batch_size,
            finished=self.is_finished,
        )


@contextmanager
def measure_time(states: Sequence[QuestionState], stage: str) -> Iterator[None]:
    """Add the time of a `with` block to a stage. The questions share the time equally."""
    start = time.perf_counter()
    try:
        yield
    finally:
        share = (time.perf_counter() - start) / max(1, len(states))
        for state in states:
            state.seconds[stage] = state.seconds.get(stage, 0.0) + share


def is_complete_draft(draft: Completion, max_tokens: int) -> bool:
    """Return whether a draft (answer without passages) is a whole answer, not just a beginning."""
    return draft.finished or draft.n_tokens >= max_tokens


def describe_notes(notes: Sequence[DecisionNote]) -> list[str]:
    """Describe each kind of note once. RETRIEVED_AGAIN occurs once per further round, so rounds are counted."""
    n_rounds = 1 + notes.count(DecisionNote.RETRIEVED_AGAIN)
    texts = {**NOTE_TEXTS, DecisionNote.RETRIEVED_AGAIN: f"{n_rounds} rounds of retrieval"}
    return [texts[note] for note in dict.fromkeys(notes)]
