"""Answers and decisions on the terminal: at once, or while they are made."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass

from rich.text import Text

from knowgate.cli.console import STDERR_CONSOLE, create_console
from knowgate.core.display import sanitize_text
from knowgate.pipeline.adaptive_rag import AdaptiveRAG
from knowgate.types import Answer, AnswerEvent, Decision, DecisionEvent, Question, TextEvent

ELLIPSIS = "…"  # where a text goes on that is not shown


def show_answer(answer: Answer) -> None:
    if answer.question.id:
        create_console().print(Text(f"{answer.question.id}. {sanitize_text(original_question(answer.question))}"))
    show_rewritten_question(answer.question)
    create_console().print(Text(sanitize_text(answer.text) + _end(answer), style="bold"))
    show_decision(answer.decision)
    show_sources(answer)


def original_question(question: Question) -> str:
    """What was really asked, before it was made to stand alone."""
    return str(question.meta.get("asked", question.text))


def show_rewritten_question(question: Question) -> None:
    if original_question(question) != question.text:
        create_console().print(Text(f"  understood as: {sanitize_text(question.text)}", style="dim"))


def show_streamed_answer(rag: AdaptiveRAG, question: Question) -> Answer:
    """An answer while it is made: the decision, the text as it comes, then what it rests on.

    What was found out after the decision is said with it once more.
    """
    line = StreamedLine()
    told: Decision | None = None
    with closing(rag.answer_stream(question)) as events, closing(line):
        for event in events:
            match event:
                case DecisionEvent(decision):
                    told = decision
                    show_decision(decision)
                case TextEvent(text):
                    line.add(text)
                case AnswerEvent(answer):
                    line.add(_end(answer))
                    line.close()
                    if answer.decision != told:
                        show_decision(answer.decision)
                    show_sources(answer)
                    return answer
    raise RuntimeError("the last event is the answer")


@dataclass
class StreamedLine:
    """A line that grows. Pieces are made harmless character by character: a sequence cut in two is harmless too."""

    is_open: bool = False

    def add(self, text: str) -> None:
        if not text:
            return
        self.is_open = True
        create_console().print(Text(sanitize_text(text), style="bold"), end="")

    def close(self) -> None:
        """Whatever comes next, an error too, begins on a line of its own."""
        if self.is_open:
            create_console().print()
        self.is_open = False


def show_decision(decision: Decision) -> None:
    create_console().print(Text.assemble("  ", decision_label(decision), " ", (sanitize_text(decision.reason), "dim")))


def show_sources(answer: Answer) -> None:
    console = create_console()
    for passage in answer.passages:
        console.print(f"  · {sanitize_text(passage.id)}: {sanitize_text(_short(passage.text))}", style="dim")
    if answer.together == 1:  # of several that were answered together none has a time of its own
        console.print(f"  {answer.seconds['total']:.2f} s", style="dim")


def show_decision_basis(decision: Decision) -> None:
    """What a decision rests on: a fitted gate's score before calibration and its own questions, logged questions."""
    console = create_console()
    if decision.distance is not None:
        words = f"distance {decision.distance:.2f} from the questions the gate was fitted on; 99 % of them are within 1"
        console.print(f"  {words}", style="dim")
    if decision.raw is not None:
        console.print(f"  need {decision.need:.4f}, made of the raw score {decision.raw:.4f}", style="dim")
    for near in decision.neighbours:
        outcome = f", retrieval: {near.outcome}" if near.outcome else ""
        words = f"{near.similarity:.2f} {near.label}{outcome} ({near.source}): {near.question}"
        console.print(f"  ~ {sanitize_text(words)}", style="dim")


def decision_label(decision: Decision) -> tuple[str, str]:
    return ("retrieve", "yellow") if decision.retrieve else ("skip", "green")


@dataclass
class TruncationNotice:
    """Says of the first answer that the token limit stopped where that was; not again of the others."""

    max_tokens: int
    was_said: bool = False

    def see(self, answer: Answer) -> None:
        if not (answer.finished or self.was_said):
            STDERR_CONSOLE.print(f"{ELLIPSIS} cut at {self.max_tokens} tokens (--max-tokens)")
        self.was_said = self.was_said or not answer.finished


def _end(answer: Answer) -> str:
    return "" if answer.finished else ELLIPSIS


def _short(text: str, width: int = 90) -> str:
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 1] + ELLIPSIS
