"""Answers and decisions on the terminal: at once, or while they are made."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass

from rich.text import Text

from knowgate.cli.console import WORDS, plain_console
from knowgate.display import harmless
from knowgate.pipeline import AdaptiveRAG
from knowgate.types import Answer, AnswerEvent, Decision, DecisionEvent, Question, TextEvent

CUT = "…"  # where a text goes on that is not shown


def show_answer(answer: Answer) -> None:
    if answer.question.id:
        plain_console().print(Text(f"{answer.question.id}. {harmless(said(answer.question))}"))
    show_understood(answer.question)
    plain_console().print(Text(harmless(answer.text) + _end(answer), style="bold"))
    show_decision(answer.decision)
    show_sources(answer)


def said(question: Question) -> str:
    """What was really asked, before it was made to stand alone."""
    return str(question.meta.get("asked", question.text))


def show_understood(question: Question) -> None:
    if said(question) != question.text:
        plain_console().print(Text(f"  understood as: {harmless(question.text)}", style="dim"))


def show_live(rag: AdaptiveRAG, question: Question) -> Answer:
    """An answer while it is made: the decision, the text as it comes, then what it rests on.

    What was found out after the decision is said with it once more.
    """
    line = Line()
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
class Line:
    """A line that grows. Pieces are made harmless character by character: a sequence cut in two is harmless too."""

    is_open: bool = False

    def add(self, text: str) -> None:
        if not text:
            return
        self.is_open = True
        plain_console().print(Text(harmless(text), style="bold"), end="")

    def close(self) -> None:
        """Whatever comes next, an error too, begins on a line of its own."""
        if self.is_open:
            plain_console().print()
        self.is_open = False


def show_decision(decision: Decision) -> None:
    plain_console().print(Text.assemble("  ", verdict(decision), " ", (harmless(decision.reason), "dim")))


def show_sources(answer: Answer) -> None:
    console = plain_console()
    for passage in answer.passages:
        console.print(f"  · {harmless(passage.id)}: {harmless(_short(passage.text))}", style="dim")
    if answer.together == 1:  # of several that were answered together none has a time of its own
        console.print(f"  {answer.seconds['total']:.2f} s", style="dim")


def show_basis(decision: Decision) -> None:
    """What a decision rests on: a fitted gate's score before calibration and its own questions, logged questions."""
    console = plain_console()
    if decision.distance is not None:
        words = f"distance {decision.distance:.2f} from the questions the gate was fitted on; 99 % of them are within 1"
        console.print(f"  {words}", style="dim")
    if decision.raw is not None:
        console.print(f"  need {decision.need:.4f}, made of the raw score {decision.raw:.4f}", style="dim")
    for near in decision.neighbours:
        outcome = f", retrieval: {near.outcome}" if near.outcome else ""
        words = f"{near.similarity:.2f} {near.label}{outcome} ({near.source}): {near.question}"
        console.print(f"  ~ {harmless(words)}", style="dim")


def verdict(decision: Decision) -> tuple[str, str]:
    return ("retrieve", "yellow") if decision.retrieve else ("skip", "green")


@dataclass
class Cut:
    """Says of the first answer that the token limit stopped where that was; not again of the others."""

    max_tokens: int
    was_said: bool = False

    def see(self, answer: Answer) -> None:
        if not (answer.finished or self.was_said):
            WORDS.print(f"{CUT} cut at {self.max_tokens} tokens (--max-tokens)")
        self.was_said = self.was_said or not answer.finished


def _end(answer: Answer) -> str:
    return "" if answer.finished else CUT


def _short(text: str, width: int = 90) -> str:
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 1] + CUT
