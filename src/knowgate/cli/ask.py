"""`knowgate ask` and `knowgate decide`."""

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
from knowgate.cli.console import STDERR_CONSOLE, create_console, print_json
from knowgate.cli.options import JsonOption, parse_path
from knowgate.cli.pipeline_options import ConfigFile, NoRules, load_command_settings
from knowgate.cli.questions import QuestionStream, read_arguments
from knowgate.core.display import sanitize_text
from knowgate.core.validation import parse_json
from knowgate.errors import BadInput
from knowgate.gates.artifacts.drift import compute_far_share, format_far_warning
from knowgate.pipeline.adaptive_rag import AdaptiveRAG
from knowgate.pipeline.answer_json import answer_record, decision_record
from knowgate.pipeline.builder import build_pipeline
from knowgate.pipeline.conversation import Conversation, question_from_messages
from knowgate.pipeline.settings import DecisionOptions, PipelineOptions
from knowgate.pipeline.traffic_log import TrafficLog
from knowgate.types import Answer, Decision, DecisionNote, Model, Question

QuestionArguments = Annotated[list[str] | None, typer.Argument(help="Questions; without any, one per line from stdin.")]
RecordFolder = Annotated[
    Path | None,
    typer.Option(parser=parse_path, metavar="DIR", help="Record the model's outputs here, for --model replay:DIR."),
]
Interactive = Annotated[
    bool,
    typer.Option("--interactive", "-i", help="A conversation with follow-up questions. An empty line ends it."),
]
Explain = Annotated[
    bool,
    typer.Option(
        help="Show what a decision is based on: a fitted gate's raw score, the distance from its training questions, "
        "similar logged questions (dhicl, skr), and the guarantee of the threshold."
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
    """Answer questions, retrieving only where the gate says so.

    A line of standard input may be JSON: {"question": ...}, or a conversation,
    {"messages": [{"role": "user", "content": ...}, ...]}.
    """
    settings = load_command_settings(config, options, no_rules)
    stream = None if interactive else read_arguments(questions)  # bad input is reported before a model is loaded
    rag = build_pipeline(settings, record)
    _print_guarantee(rag, explain)
    with _closing_log(rag.log):
        if stream is None:
            _run_conversation(rag, questions or [], explain=explain, as_json=as_json)
        else:
            live = not as_json and len(questions or ()) == 1 and sys.stdout.isatty()
            _answer_all(rag, stream, live=live, explain=explain, as_json=as_json)


def _answer_all(rag: AdaptiveRAG, stream: QuestionStream, *, live: bool, explain: bool, as_json: bool) -> None:
    """Answer questions and print the results; with `live`, print each answer while it is generated."""
    skips, outliers = RerankSkipCounter(), OutlierCounter()
    truncation = answer_output.TruncationNotice(rag.max_tokens)
    questions = (_parse_question_line(rag.model, question) for question in stream)
    show_live = partial(answer_output.show_streamed_answer, rag)
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
        STDERR_CONSOLE.print(f"{skips.skipped} of {skips.retrieved} retrieved questions were not reranked: margin.")


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
    """Say for each question whether to retrieve; answer nothing, retrieve nothing."""
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
    """Print the guarantee if `explain` is set, or if it does not hold for this pipeline."""
    if (explain or rag.guarantee_violations) and rag.guarantee:
        STDERR_CONSOLE.print(rag.guarantee)


def _print_skipped_lines(stream: QuestionStream, question: Question | None, as_json: bool) -> None:
    """With JSON output, print a record for each empty line before this question, or up to the end if it is None."""
    number = int(question.id) if question is not None and question.id else None
    if not as_json or (question is not None and number is None):
        return
    for skipped in stream.take_skipped(number):
        print_json({"id": str(skipped), "question": "", "skipped": "the line is empty"})


@contextmanager
def _closing_log(log: TrafficLog | None) -> Iterator[None]:
    """Write pending entries of the log whatever happens, then print how many questions were logged."""
    try:
        yield
    finally:
        if log is not None:
            log.close()
    if log is not None:
        STDERR_CONSOLE.print(
            f"{log.n_labeled} of {log.n_questions} questions were logged: answered both with and without passages."
        )


@dataclass
class RerankSkipCounter:
    """Counts how often the margin rule skipped reranking."""

    retrieved: int = 0
    skipped: int = 0

    def count(self, answer: Answer) -> None:
        """Count one answer."""
        self.retrieved += bool(answer.passages)
        self.skipped += DecisionNote.NOT_RERANKED in answer.decision.notes


@dataclass
class OutlierCounter:
    """Counts questions that lie far from those the gate was fitted on."""

    gate: str = ""
    distances: list[float | None] = field(default_factory=list)

    def count(self, decision: Decision) -> None:
        """Count one decision."""
        self.gate = decision.gate
        self.distances.append(decision.distance)

    def print_warning(self) -> None:
        """Print a warning if too many questions are outliers."""
        share = compute_far_share(self.distances)
        if warning := format_far_warning(self.gate, share, len(self.distances)):
            STDERR_CONSOLE.print(warning)


# --- conversations --------------------------------------------------------------------------------


def _run_conversation(rag: AdaptiveRAG, first: Sequence[str], *, explain: bool, as_json: bool) -> None:
    """Answer the given questions, then lines of standard input until an empty one, as one conversation."""
    conversation, truncation = Conversation(rag), answer_output.TruncationNotice(rag.max_tokens)
    for number, text in enumerate(_read_turns(first), start=1):
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


def _read_turns(first: Sequence[str]) -> Iterator[str]:
    yield from first
    while text := _read_turn():
        yield text


def _read_turn() -> str:
    """Read a line of standard input; return '' at its end."""
    if sys.stdin.isatty():
        STDERR_CONSOLE.print("> ", end="")
    return sys.stdin.readline().strip()


def _parse_question_line(model: Model, question: Question) -> Question:
    """Interpret a line as JSON with "messages" or "question"; any other line is the question itself."""
    if not question.text.startswith("{"):
        return question
    if '"messages"' not in question.text:
        return _parse_question_record(question)
    where = f"line {question.id or 1}"
    messages = parse_json(question.text, where).get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise BadInput(f"{where}: 'messages' must be a list of objects with 'role' and 'content'.")
    return question_from_messages(model, messages, question.id)


def _parse_question_record(question: Question) -> Question:
    if '"question"' not in question.text:
        return question
    try:
        text = parse_json(question.text, "the line").get("question")
    except BadInput:  # text in braces that is not JSON is a question
        return question
    return replace(question, text=text) if isinstance(text, str) and text.strip() else question
