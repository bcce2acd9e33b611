"""`knowgate ask` and `knowgate decide`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from knowgate.cli.answers_shown import Cut, show_answer, show_basis, show_live, verdict
from knowgate.cli.console import WORDS, plain_console, print_json
from knowgate.cli.conversation import talk, understand
from knowgate.cli.options import Json, Lang, ModelSpec, Prompts, RerankMargin, Retriever
from knowgate.cli.paths import path
from knowgate.cli.pipeline_options import (
    ArbiterSpec,
    Beta,
    Config,
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
    chosen_rules,
)
from knowgate.cli.questions import Asked, read_arguments
from knowgate.display import harmless
from knowgate.gates import far_share, far_words
from knowgate.pipeline import AdaptiveRAG, TrafficLog, answer_record, build_pipeline, decision_record, load_settings
from knowgate.types import Answer, Decision, Note, Question

Questions = Annotated[list[str] | None, typer.Argument(help="Questions; without any, one per line from stdin.")]
Record = Annotated[
    Path | None,
    typer.Option(parser=path, metavar="DIR", help="Keep the model's outputs in this folder, for --model replay:DIR."),
]
Interactive = Annotated[bool, typer.Option("--interactive", "-i", help="A conversation: one question after the other, follow-ups understood. An empty line ends it.")]  # fmt: skip  # noqa: E501
Explain = Annotated[bool, typer.Option(help="Show what a decision rests on: a fitted gate's raw score and how far the question lies from those it learnt from, logged questions (dhicl, skr), what is proven about the threshold.")]  # fmt: skip  # noqa: E501


def ask(
    questions: Questions = None,
    model: ModelSpec = None,
    gate: GateSpec = None,
    plug_in: PlugIn = None,
    threshold: Threshold = None,
    docs: Docs = None,
    index: Index = None,
    retriever: Retriever = None,
    rerank: Rerank = None,
    rerank_margin: RerankMargin = None,
    preset: Preset = None,
    beta: Beta = None,
    arbiter: ArbiterSpec = None,
    rules: RulesFile = None,
    no_rules: NoRules = False,
    second_look: SecondLook = None,
    k: K = None,
    max_tokens: MaxTokens = None,
    lang: Lang = None,
    prompts: Prompts = None,
    config: Config = None,
    log: Log = None,
    log_drafts: LogDrafts = None,
    record: Record = None,
    interactive: Interactive = False,
    explain: Explain = False,
    as_json: Json = False,
) -> None:
    """Answer questions, retrieving only where the gate says so.

    A line of standard input may be JSON: {"question": ...}, or a conversation,
    {"messages": [{"role": "user", "content": ...}, ...]}.
    """
    settings = load_settings(
        config, model=model, gate=gate, plug_in=plug_in, threshold=threshold, docs=docs, index=index,
        retriever=retriever, rerank=rerank, rerank_margin=rerank_margin, preset=preset, beta=beta,
        arbiter=arbiter, rules=chosen_rules(rules, no_rules),
        second_look=second_look, k=k, max_tokens=max_tokens, lang=lang,
        prompts=prompts, log=log, log_drafts=log_drafts,
    )  # fmt: skip
    asked = None if interactive else read_arguments(questions)  # what is wrong with it is said before anything loads
    rag = build_pipeline(settings, record)
    _say_promise(rag, explain)
    with _logging(rag.log):
        if asked is None:
            talk(rag, questions or [], explain=explain, as_json=as_json)
        else:
            live = not as_json and len(questions or ()) == 1 and sys.stdout.isatty()
            _answer_all(rag, asked, live=live, explain=explain, as_json=as_json)


def _answer_all(rag: AdaptiveRAG, asked: Asked, *, live: bool, explain: bool, as_json: bool) -> None:
    """live: each answer is shown while it is made."""
    sure, far, cut = Sure(), Far(), Cut(rag.max_tokens)
    understood = (understand(rag.model, question) for question in asked)
    for answer in map(partial(show_live, rag), understood) if live else rag.stream(understood, first=1):
        sure.see(answer)
        far.see(answer.decision)
        if not live:
            _tell_skipped(asked, answer.question, as_json)
            print_json(answer_record(answer, rag)) if as_json else show_answer(answer)
        if not as_json:
            cut.see(answer)
        if explain and not as_json:
            show_basis(answer.decision)
    _tell_skipped(asked, None, as_json)
    far.say()
    if rag.rerank_margin is not None and rag.reranker is not None:
        WORDS.print(f"{sure.skipped} of {sure.retrieved} retrieved questions were not reranked: margin.")


@contextmanager
def _logging(log: TrafficLog | None) -> Iterator[None]:
    """What was asked is written whatever happens, and how much of it has a label is said."""
    try:
        yield
    finally:
        if log is not None:
            log.close()
    if log is not None:
        WORDS.print(f"{log.labelled} of {log.asked} questions were logged: answered both with and without passages.")


@dataclass
class Sure:
    """How often the margin rule held."""

    retrieved: int = 0
    skipped: int = 0

    def see(self, answer: Answer) -> None:
        self.retrieved += bool(answer.passages)
        self.skipped += Note.NOT_RERANKED in answer.decision.notes


@dataclass
class Far:
    """How many questions lie far from those the gate was fitted on."""

    gate: str = ""
    distances: list[float | None] = field(default_factory=list)

    def see(self, decision: Decision) -> None:
        self.gate = decision.gate
        self.distances.append(decision.distance)

    def say(self) -> None:
        if said := far_words(self.gate, far_share(self.distances), len(self.distances)):
            WORDS.print(said)


def decide(
    questions: Questions = None,
    model: ModelSpec = None,
    gate: GateSpec = None,
    plug_in: PlugIn = None,
    threshold: Threshold = None,
    rules: RulesFile = None,
    no_rules: NoRules = False,
    lang: Lang = None,
    prompts: Prompts = None,
    config: Config = None,
    record: Record = None,
    explain: Explain = False,
    as_json: Json = False,
) -> None:
    """Say for each question whether to retrieve; answer nothing, retrieve nothing."""
    settings = load_settings(
        config, model=model, gate=gate, plug_in=plug_in, threshold=threshold, lang=lang, prompts=prompts,
        rules=chosen_rules(rules, no_rules),
    )  # fmt: skip
    asked = read_arguments(questions)
    rag = build_pipeline(settings, record, retrieves=False)
    _say_promise(rag, explain)
    far = Far()
    understood = (understand(rag.model, question) for question in asked)
    for question, decision in rag.decide_stream(understood, first=1):
        far.see(decision)
        _tell_skipped(asked, question, as_json)
        if as_json:
            number = {"id": question.id} if question.id else {}
            print_json({**number, "question": question.text, **decision_record(decision), "model": rag.model.name})
        else:
            line = (verdict(decision), f"  {harmless(question.text)}  ", (harmless(decision.reason), "dim"))
            plain_console().print(Text.assemble(*line))
        if explain and not as_json:
            show_basis(decision)
    far.say()


def _say_promise(rag: AdaptiveRAG, explain: bool) -> None:
    """What is proven, to who asks; that it does not hold here, to everybody."""
    if (explain or rag.objections) and (said := rag.promise):
        WORDS.print(said)


def _tell_skipped(asked: Asked, question: Question | None, as_json: bool) -> None:
    """Empty lines before this question (None: to the end) keep their number; programs are told of them."""
    before = int(question.id) if question is not None and question.id else None
    if not as_json or (question is not None and before is None):
        return
    for number in asked.skipped_before(before):
        print_json({"id": str(number), "question": "", "skipped": "the line is empty"})
