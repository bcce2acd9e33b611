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

from knowgate.cli.answer_output import (
    TruncationNotice,
    decision_label,
    show_answer,
    show_decision_basis,
    show_rewritten_question,
    show_streamed_answer,
)
from knowgate.cli.console import STDERR_CONSOLE, create_console, print_json
from knowgate.cli.options import (
    JsonOption,
    LangOption,
    ModelOption,
    PromptsOption,
    RerankMarginOption,
    RetrieverOption,
    parse_path,
)
from knowgate.cli.pipeline_options import (
    ArbiterSpec,
    Beta,
    ConfigFile,
    Docs,
    GateSpec,
    Index,
    K,
    Log,
    LogDrafts,
    MaxTokens,
    NoRules,
    PlugIn,
    Preset,
    Rerank,
    RulesFile,
    SecondLook,
    Threshold,
    combine_rule_flags,
)
from knowgate.cli.questions import QuestionStream, read_arguments
from knowgate.core.display import sanitize_text
from knowgate.core.validation import parse_json
from knowgate.errors import BadInput
from knowgate.gates.artifacts.drift import compute_far_share, format_far_warning
from knowgate.pipeline.adaptive_rag import AdaptiveRAG
from knowgate.pipeline.answer_json import answer_record, decision_record
from knowgate.pipeline.builder import build_pipeline
from knowgate.pipeline.conversation import Conversation, question_from_messages
from knowgate.pipeline.settings import load_settings
from knowgate.pipeline.traffic_log import TrafficLog
from knowgate.types import Answer, Decision, DecisionNote, Model, Question

MESSAGES_KEY = "messages"


def run_conversation(rag: AdaptiveRAG, first: Sequence[str], *, explain: bool, as_json: bool) -> None:
    """One question after the other until an empty line; what was given on the command line comes first."""
    conversation, cut = Conversation(rag), TruncationNotice(rag.max_tokens)
    for number, text in enumerate(_said(first), start=1):
        question = conversation.understand(text, str(number) if as_json else "")
        if as_json:
            answer = rag.answer(question)
            print_json(answer_record(answer, rag))
        else:
            show_rewritten_question(question)
            answer = show_streamed_answer(rag, question)
            cut.see(answer)
            if explain:
                show_decision_basis(answer.decision)
        conversation.remember(answer)


def _said(first: Sequence[str]) -> Iterator[str]:
    yield from first
    while text := _next_line():
        yield text


def _next_line() -> str:
    """'' at the end: an empty line, or nothing more to read."""
    if sys.stdin.isatty():
        STDERR_CONSOLE.print("> ", end="")
    return sys.stdin.readline().strip()


def parse_question_line(model: Model, question: Question) -> Question:
    """A line that is JSON with messages is a conversation, whose last question is meant; one with 'question', as in the
    files that are labelled, is that question; any other is a question as it stands."""
    if not (question.text.startswith("{") and f'"{MESSAGES_KEY}"' in question.text):
        return _named(question)
    record = parse_json(question.text, f"line {question.id or 1}")
    messages = record.get(MESSAGES_KEY)
    if not isinstance(messages, list) or not all(isinstance(one, dict) for one in messages):
        raise BadInput(f"line {question.id or 1}: 'messages' must be a list of objects with 'role' and 'content'.")
    return question_from_messages(model, messages, question.id)


def _named(question: Question) -> Question:
    if not (question.text.startswith("{") and '"question"' in question.text):
        return question
    try:
        asked = parse_json(question.text, "the line").get("question")
    except BadInput:  # words in braces are words
        return question
    return replace(question, text=asked) if isinstance(asked, str) and asked.strip() else question


QuestionArguments = Annotated[list[str] | None, typer.Argument(help="Questions; without any, one per line from stdin.")]
RecordFolder = Annotated[
    Path | None,
    typer.Option(
        parser=parse_path, metavar="DIR", help="Keep the model's outputs in this folder, for --model replay:DIR."
    ),
]
Interactive = Annotated[bool, typer.Option("--interactive", "-i", help="A conversation: one question after the other, follow-ups understood. An empty line ends it.")]  # fmt: skip  # noqa: E501
Explain = Annotated[bool, typer.Option(help="Show what a decision rests on: a fitted gate's raw score and how far the question lies from those it learnt from, logged questions (dhicl, skr), what is proven about the threshold.")]  # fmt: skip  # noqa: E501


def ask(
    questions: QuestionArguments = None,
    model: ModelOption = None,
    gate: GateSpec = None,
    plug_in: PlugIn = None,
    threshold: Threshold = None,
    docs: Docs = None,
    index: Index = None,
    retriever: RetrieverOption = None,
    rerank: Rerank = None,
    rerank_margin: RerankMarginOption = None,
    preset: Preset = None,
    beta: Beta = None,
    arbiter: ArbiterSpec = None,
    rules: RulesFile = None,
    no_rules: NoRules = False,
    second_look: SecondLook = None,
    k: K = None,
    max_tokens: MaxTokens = None,
    lang: LangOption = None,
    prompts: PromptsOption = None,
    config: ConfigFile = None,
    log: Log = None,
    log_drafts: LogDrafts = None,
    record: RecordFolder = None,
    interactive: Interactive = False,
    explain: Explain = False,
    as_json: JsonOption = False,
) -> None:
    """Answer questions, retrieving only where the gate says so.

    A line of standard input may be JSON: {"question": ...}, or a conversation,
    {"messages": [{"role": "user", "content": ...}, ...]}.
    """
    settings = load_settings(
        config, model=model, gate=gate, plug_in=plug_in, threshold=threshold, docs=docs, index=index,
        retriever=retriever, rerank=rerank, rerank_margin=rerank_margin, preset=preset, beta=beta,
        arbiter=arbiter, rules=combine_rule_flags(rules, no_rules),
        second_look=second_look, k=k, max_tokens=max_tokens, lang=lang,
        prompts=prompts, log=log, log_drafts=log_drafts,
    )  # fmt: skip
    asked = None if interactive else read_arguments(questions)  # what is wrong with it is said before anything loads
    rag = build_pipeline(settings, record)
    _say_promise(rag, explain)
    with _logging(rag.log):
        if asked is None:
            run_conversation(rag, questions or [], explain=explain, as_json=as_json)
        else:
            live = not as_json and len(questions or ()) == 1 and sys.stdout.isatty()
            _answer_all(rag, asked, live=live, explain=explain, as_json=as_json)


def _answer_all(rag: AdaptiveRAG, asked: QuestionStream, *, live: bool, explain: bool, as_json: bool) -> None:
    """live: each answer is shown while it is made."""
    sure, far, cut = RerankSkipCounter(), DistanceMonitor(), TruncationNotice(rag.max_tokens)
    understood = (parse_question_line(rag.model, question) for question in asked)
    for answer in map(partial(show_streamed_answer, rag), understood) if live else rag.stream(understood, first=1):
        sure.see(answer)
        far.see(answer.decision)
        if not live:
            _tell_skipped(asked, answer.question, as_json)
            print_json(answer_record(answer, rag)) if as_json else show_answer(answer)
        if not as_json:
            cut.see(answer)
        if explain and not as_json:
            show_decision_basis(answer.decision)
    _tell_skipped(asked, None, as_json)
    far.say()
    if rag.rerank_margin is not None and rag.reranker is not None:
        STDERR_CONSOLE.print(f"{sure.skipped} of {sure.retrieved} retrieved questions were not reranked: margin.")


@contextmanager
def _logging(log: TrafficLog | None) -> Iterator[None]:
    """What was asked is written whatever happens, and how much of it has a label is said."""
    try:
        yield
    finally:
        if log is not None:
            log.close()
    if log is not None:
        STDERR_CONSOLE.print(
            f"{log.labelled} of {log.asked} questions were logged: answered both with and without passages."
        )


@dataclass
class RerankSkipCounter:
    """How often the margin rule held."""

    retrieved: int = 0
    skipped: int = 0

    def see(self, answer: Answer) -> None:
        self.retrieved += bool(answer.passages)
        self.skipped += DecisionNote.NOT_RERANKED in answer.decision.notes


@dataclass
class DistanceMonitor:
    """How many questions lie far from those the gate was fitted on."""

    gate: str = ""
    distances: list[float | None] = field(default_factory=list)

    def see(self, decision: Decision) -> None:
        self.gate = decision.gate
        self.distances.append(decision.distance)

    def say(self) -> None:
        if said := format_far_warning(self.gate, compute_far_share(self.distances), len(self.distances)):
            STDERR_CONSOLE.print(said)


def decide(
    questions: QuestionArguments = None,
    model: ModelOption = None,
    gate: GateSpec = None,
    plug_in: PlugIn = None,
    threshold: Threshold = None,
    rules: RulesFile = None,
    no_rules: NoRules = False,
    lang: LangOption = None,
    prompts: PromptsOption = None,
    config: ConfigFile = None,
    record: RecordFolder = None,
    explain: Explain = False,
    as_json: JsonOption = False,
) -> None:
    """Say for each question whether to retrieve; answer nothing, retrieve nothing."""
    settings = load_settings(
        config, model=model, gate=gate, plug_in=plug_in, threshold=threshold, lang=lang, prompts=prompts,
        rules=combine_rule_flags(rules, no_rules),
    )  # fmt: skip
    asked = read_arguments(questions)
    rag = build_pipeline(settings, record, retrieves=False)
    _say_promise(rag, explain)
    far = DistanceMonitor()
    understood = (parse_question_line(rag.model, question) for question in asked)
    for question, decision in rag.decide_stream(understood, first=1):
        far.see(decision)
        _tell_skipped(asked, question, as_json)
        if as_json:
            number = {"id": question.id} if question.id else {}
            print_json({**number, "question": question.text, **decision_record(decision), "model": rag.model.name})
        else:
            line = (
                decision_label(decision),
                f"  {sanitize_text(question.text)}  ",
                (sanitize_text(decision.reason), "dim"),
            )
            create_console().print(Text.assemble(*line))
        if explain and not as_json:
            show_decision_basis(decision)
    far.say()


def _say_promise(rag: AdaptiveRAG, explain: bool) -> None:
    """What is proven, to who asks; that it does not hold here, to everybody."""
    if (explain or rag.objections) and (said := rag.promise):
        STDERR_CONSOLE.print(said)


def _tell_skipped(asked: QuestionStream, question: Question | None, as_json: bool) -> None:
    """Empty lines before this question (None: to the end) keep their number; programs are told of them."""
    before = int(question.id) if question is not None and question.id else None
    if not as_json or (question is not None and before is None):
        return
    for number in asked.skipped_before(before):
        print_json({"id": str(number), "question": "", "skipped": "the line is empty"})
