"""`knowgate ask` answers questions; `knowgate decide` only says which of them need retrieval."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from knowgate.cli import answer_output
from knowgate.cli.console import create_console, inform, print_json
from knowgate.cli.options import ConfigFile, JsonOption, NoRules, load_command_settings, path_option
from knowgate.cli.questions import QuestionStream, read_arguments
from knowgate.core.display import sanitize_text
from knowgate.core.validation import parse_json
from knowgate.errors import BadInput
from knowgate.gates import PACKAGED_GATES
from knowgate.gates.artifacts.drift import compute_far_share, format_far_warning
from knowgate.gates.fitted_gate import FittedGate
from knowgate.pipeline.adaptive_rag import AdaptiveRAG
from knowgate.pipeline.answer_json import answer_record, decision_record
from knowgate.pipeline.builder import build_pipeline
from knowgate.pipeline.conversation import Conversation, question_from_messages
from knowgate.pipeline.settings import DecisionOptions, PipelineOptions
from knowgate.pipeline.traffic_log import TrafficLog
from knowgate.types import Answer, Decision, DecisionNote, Model, Question

QuestionArguments = Annotated[
    list[str] | None, typer.Argument(help="Questions to process. Default: one per line from stdin.")
]
RecordFolder = Annotated[
    Path | None, path_option("DIR", "Folder to record the LLM's outputs in, for --model replay:DIR.")
]
Interactive = Annotated[
    bool,
    typer.Option("--interactive", "-i", help="Hold a conversation with follow-up questions; an empty line ends it."),
]
Explain = Annotated[
    bool,
    typer.Option(
        help="Show what each decision is based on: the raw score of a fitted gate, how far the question is from the "
        "gate's training questions, similar logged questions (gates dhicl and skr), and the guarantee of the threshold."
    ),
]


def ask(
    questions: QuestionArguments = None,
    *,
    options: PipelineOptions,
    no_rules: NoRules = False,
    config: ConfigFile = None,
    record: RecordFolder = None,
    interactive: Interactive = False,
    explain: Explain = False,
    as_json: JsonOption = False,
) -> None:
    """Answer questions, and retrieve passages only for those that the gate says need them.

    A line of standard input is a question, or a JSON object: {"question": ...}, or a conversation,
    {"messages": [{"role": "user", "content": ...}, ...]}.
    """
    settings = load_command_settings(config, options, no_rules)
    stream = None if interactive else read_arguments(questions)  # Bad input is reported before a model is loaded.
    rag = build_pipeline(settings, record)
    _print_guarantee(rag, explain)
    with _closing_log(rag.log):
        if stream is None:
            _run_conversation(rag, questions or [], explain=explain, as_json=as_json)
        else:
            live = not as_json and len(questions or ()) == 1 and sys.stdout.isatty()
            _answer_all(rag, stream, live=live, explain=explain, as_json=as_json)


def _answer_all(rag: AdaptiveRAG, stream: QuestionStream, *, live: bool, explain: bool, as_json: bool) -> None:
    """Answer questions and print the results, then print warnings about all of them.

    Args:
        rag: The pipeline that answers.
        stream: The questions.
        live: Print each answer while it is generated.
        explain: Also print what each decision is based on.
        as_json: Print JSON records instead of text.
    """
    skips, outliers = RerankSkipCounter(), OutlierCounter()
    truncation = answer_output.TruncationNotice(rag.max_tokens)
    questions = (_parse_question_line(rag.model, question) for question in stream)
    show_live = partial(answer_output.show_streamed_answer, rag)
    # The first batch has one question, so that the first answer appears soon.
    for answer in map(show_live, questions) if live else rag.stream(questions, first=1):
        skips.count(answer)
        outliers.count(answer.decision)
        if not live:
            _print_skipped_lines(stream, answer.question, as_json)
            print_json(answer_record(answer, rag)) if as_json else answer_output.show_answer(answer)
        if not as_json:
            truncation.check(answer)
            if explain:
                answer_output.show_decision_basis(answer.decision)
    _print_skipped_lines(stream, None, as_json)
    outliers.print_warning()
    if rag.rerank_margin is not None and rag.reranker is not None:
        inform(
            f"{skips.skipped} of {skips.retrieved} retrieved questions were not reranked, because the best passage was "
            "far ahead (--rerank-margin)."
        )


def decide(
    questions: QuestionArguments = None,
    *,
    options: DecisionOptions,
    no_rules: NoRules = False,
    config: ConfigFile = None,
    record: RecordFolder = None,
    explain: Explain = False,
    as_json: JsonOption = False,
) -> None:
    """Say for each question whether it needs retrieval, without retrieving or answering."""
    settings = load_command_settings(config, options, no_rules)
    stream = read_arguments(questions)
    rag = build_pipeline(settings, record, retrieves=False)
    _print_guarantee(rag, explain)
    outliers = OutlierCounter()
    for question, decision in rag.decide_stream((_parse_question_line(rag.model, each) for each in stream), first=1):
        outliers.count(decision)
        _print_skipped_lines(stream, question, as_json)
        if as_json:
            number = {"id": question.id} if question.id else {}
            print_json({**number, "question": question.text, **decision_record(decision), "model": rag.model.name})
            continue
        label, reason = answer_output.format_verdict(decision), (sanitize_text(decision.reason), "dim")
        create_console().print(Text.assemble(label, f"  {sanitize_text(question.text)}  ", reason))
        if explain:
            answer_output.show_decision_basis(decision)
    outliers.print_warning()


def _print_guarantee(rag: AdaptiveRAG, explain: bool) -> None:
    """Print what the gate guarantees (how few right answers it loses), or warn that the guarantee does not hold.

    With `explain`, the guarantee is printed. Without it, only a warning is printed, and only for a gate that the user
    fitted: packaged gates were calibrated on other documents, so nobody relies on their guarantee here.
    """
    gate = rag.bound_gate
    if explain:
        if rag.guarantee:
            inform(rag.guarantee)
        return
    is_own = isinstance(gate, FittedGate) and not gate.artifact.path.is_relative_to(PACKAGED_GATES)
    if is_own and (reasons := rag.guarantee_violations):
        inform(f"The guarantee of the gate '{gate.name}' does not hold here: {'; '.join(reasons)}.")


def _print_skipped_lines(stream: QuestionStream, question: Question | None, as_json: bool) -> None:
    """Print a JSON record for each empty input line before this question, so that ids stay equal to line numbers.

    Prints nothing in text mode. With question=None, prints the records of all remaining empty lines.
    """
    if not as_json or (question is not None and not question.id):  # a single question of the command line has no id
        return
    for number in stream.take_skipped(None if question is None else int(question.id)):
        print_json({"id": str(number), "question": "", "skipped": "the line is empty"})


@contextmanager
def _closing_log(log: TrafficLog | None) -> Iterator[None]:
    """Close the traffic log at the end of the block, also after an error, so that pending entries are written.

    If there was no error, also prints how many questions were logged. Does nothing without a log.
    """
    try:
        yield
    finally:
        if log is not None:
            log.close()
    if log is not None:
        inform(
            f"{log.n_labeled} of {log.n_questions} questions were logged: those with an answer both with and without "
            "passages."
        )


@dataclass
class RerankSkipCounter:
    """Counts how often reranking was skipped because the best passage was far ahead (`rerank_margin`).

    Attributes:
        retrieved: Number of answers that were given with passages.
        skipped: Number of answers whose passages were not reranked.
    """

    retrieved: int = 0
    skipped: int = 0

    def count(self, answer: Answer) -> None:
        """Count an answer if it was given with passages, and if these were not reranked."""
        self.retrieved += bool(answer.passages)
        self.skipped += DecisionNote.NOT_RERANKED in answer.decision.notes


@dataclass
class OutlierCounter:
    """Collects how far each question lies from the gate's training questions, to warn about outliers.

    A distance above 1 is far: 99 % of the training questions are within 1. It is None if the gate reports no distance.
    """

    gate: str = ""
    distances: list[float | None] = field(default_factory=list)

    def count(self, decision: Decision) -> None:
        """Store how far the question of a decision lies from the gate's training questions."""
        self.gate = decision.gate
        self.distances.append(decision.distance)

    def print_warning(self) -> None:
        """Print a warning if too many questions lie far from the questions that the gate was trained on."""
        share = compute_far_share(self.distances)
        if warning := format_far_warning(self.gate, share, len(self.distances)):
            inform(warning)


# --- conversations --------------------------------------------------------------------------------


def _run_conversation(rag: AdaptiveRAG, first: Sequence[str], *, explain: bool, as_json: bool) -> None:
    """Answer questions as one conversation: first those given, then lines of standard input until an empty line."""
    conversation, truncation = Conversation(rag), answer_output.TruncationNotice(rag.max_tokens)
    for number, text in enumerate(_read_conversation(first), start=1):
        question = conversation.rewrite(text, str(number) if as_json else "")
        if as_json:
            answer = rag.answer(question)
            print_json(answer_record(answer, rag))
        else:
            answer_output.show_rewritten_question(question)
            answer = answer_output.show_streamed_answer(rag, question)
            truncation.check(answer)
            if explain:
                answer_output.show_decision_basis(answer.decision)
        conversation.remember(answer)


def _read_conversation(first: Sequence[str]) -> Iterator[str]:
    """Yield the given questions, then lines of standard input until an empty line or the end."""
    yield from first
    while text := _read_line():
        yield text


def _read_line() -> str:
    """Read a line of standard input, with a prompt on a terminal. Returns '' at the end of the input."""
    if sys.stdin.isatty():
        inform("> ", end="")
    return sys.stdin.readline().strip()


def _parse_question_line(model: Model, question: Question) -> Question:
    """Read the question of an input line: JSON with "messages" (a chat) or "question", or plain text.

    The last question of a chat is rewritten by the model so that it can be understood alone.
    """
    if not question.text.startswith("{"):
        return question
    if '"messages"' not in question.text:
        return _parse_question_record(question)
    where = f"line {question.id or 1}"
    messages = parse_json(question.text, where).get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise BadInput(f"{where}: 'messages' must be a list of objects, each with 'role' and 'content'.")
    return question_from_messages(model, messages, question.id)


def _parse_question_record(question: Question) -> Question:
    """Read the question of a JSON object with "question"; anything else is returned unchanged."""
    if '"question"' not in question.text:
        return question
    try:
        text = parse_json(question.text, "the line").get("question")
    except BadInput:  # Text in braces that is not JSON is a question.
        return question
    return replace(question, text=text) if isinstance(text, str) and text.strip() else question
