"""Print answers and decisions on the terminal, at once or while they are generated."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass

from rich.text import Text

from knowgate.cli.console import create_console, inform
from knowgate.core.display import sanitize_text
from knowgate.pipeline.adaptive_rag import AdaptiveRAG
from knowgate.types import Answer, AnswerEvent, Decision, DecisionEvent, Question, TextEvent

ELLIPSIS = "…"


def show_answer(answer: Answer) -> None:
    """Print an answer, the decision whether to retrieve, and the retrieved passages.

    Questions of a batch have ids. For them, the question is printed first, so that the answers can be told apart.
    """
    if answer.question.id:
        create_console().print(Text(f"{answer.question.id}. {sanitize_text(get_original_text(answer.question))}"))
    show_rewritten_question(answer.question)
    create_console().print(Text(sanitize_text(answer.text) + _format_ending(answer), style="bold"))
    show_decision(answer.decision)
    show_sources(answer)


def get_original_text(question: Question) -> str:
    """Return the question as the user typed it, before a follow-up was rewritten as a standalone question."""
    return str(question.meta.get("asked", question.text))


def show_rewritten_question(question: Question) -> None:
    """Print the rewritten question; nothing if the question was not rewritten."""
    if get_original_text(question) != question.text:
        create_console().print(Text(f"  understood as: {sanitize_text(question.text)}", style="dim"))


def show_streamed_answer(rag: AdaptiveRAG, question: Question) -> Answer:
    """Answer a question, and print the decision, the text and the sources as soon as each is known.

    The decision is printed before the answer is generated. If it has changed when the answer is complete, for example
    because a note was added to it, it is printed again.
    """
    line = StreamedLine()
    shown_decision: Decision | None = None
    with closing(rag.answer_stream(question)) as events, closing(line):
        for event in events:
            match event:
                case DecisionEvent(decision):
                    shown_decision = decision
                    show_decision(decision)
                case TextEvent(text):
                    line.add(text)
                case AnswerEvent(answer):
                    line.add(_format_ending(answer))
                    line.close()
                    if answer.decision != shown_decision:
                        show_decision(answer.decision)
                    show_sources(answer)
                    return answer
    raise RuntimeError("the stream ended without an answer")


@dataclass
class StreamedLine:
    """A line of output that grows piece by piece.

    Pieces are sanitized character by character, so an escape sequence that is split over two pieces is harmless, too.

    Attributes:
        is_open: Whether text was printed to the line that `close` has not ended yet.
    """

    is_open: bool = False

    def add(self, text: str) -> None:
        """Print text at the end of the line, without starting a new line."""
        if not text:
            return
        self.is_open = True  # `close` must end the line
        create_console().print(Text(sanitize_text(text), style="bold"), end="")

    def close(self) -> None:
        """End the line, so that later output starts on a new line. Does nothing if no text was printed."""
        if self.is_open:
            create_console().print()
        self.is_open = False


def show_decision(decision: Decision) -> None:
    """Print the decision, 'retrieve' or 'skip', with its reason."""
    create_console().print(Text.assemble("  ", format_verdict(decision), ": ", (sanitize_text(decision.reason), "dim")))


def show_sources(answer: Answer) -> None:
    """Print the retrieved passages, and the time if the question was not answered in a batch."""
    console = create_console()
    for passage in answer.passages:
        console.print(f"  · {sanitize_text(passage.id)}: {sanitize_text(_shorten(passage.text))}", style="dim")
    if answer.batch_size == 1:
        console.print(f"  {answer.seconds['total']:.2f} s", style="dim")


def show_decision_basis(decision: Decision) -> None:
    """Print what a decision is based on, as far as the gate reports it.

    That is the distance from the questions that the gate was fitted on, the score before calibration, and similar
    logged questions.
    """
    console = create_console()
    if decision.distance is not None:
        text = f"distance {decision.distance:.2f} from the questions the gate was fitted on; 99 % of them are within 1"
        console.print(f"  {text}", style="dim")
    if decision.raw is not None:
        console.print(f"  need {decision.need:.4f}, calibrated from the raw score {decision.raw:.4f}", style="dim")
    for neighbor in decision.neighbors:
        outcome = f", retrieval: {neighbor.outcome}" if neighbor.outcome else ""
        text = f"{neighbor.similarity:.2f} {neighbor.label}{outcome} ({neighbor.source}): {neighbor.question}"
        console.print(f"  ~ {sanitize_text(text)}", style="dim")


def format_verdict(decision: Decision) -> tuple[str, str]:
    """Return the word for a decision, 'retrieve' or 'skip', and its color on the terminal."""
    return ("retrieve", "yellow") if decision.retrieve else ("skip", "green")


@dataclass
class TruncationNotice:
    """Tells the user once that an answer was cut off by the token limit."""

    max_tokens: int
    was_printed: bool = False

    def check(self, answer: Answer) -> None:
        """Print the notice at the first answer that was cut off."""
        if not (answer.finished or self.was_printed):
            inform(f"{ELLIPSIS} answer cut off at {self.max_tokens} tokens; change it with --max-tokens")
            self.was_printed = True


def _format_ending(answer: Answer) -> str:
    """Return an ellipsis for an answer that the token limit cut off."""
    return "" if answer.finished else ELLIPSIS


def _shorten(text: str, width: int = 90) -> str:
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 1] + ELLIPSIS
