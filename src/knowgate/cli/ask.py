"""`knowgate ask` and `knowgate decide`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from knowgate.cli.console import WORDS, plain_console, print_json
from knowgate.cli.options import Json, Lang, ModelSpec, Prompts, RerankMargin, Retriever
from knowgate.cli.paths import path
from knowgate.cli.questions import read_arguments
from knowgate.display import harmless
from knowgate.gates import far_share, far_words
from knowgate.pipeline import AdaptiveRAG, TrafficLog, answer_record, build_pipeline, decision_record, load_settings
from knowgate.types import Answer, AnswerEvent, Decision, DecisionEvent, Note, TextEvent

Questions = Annotated[list[str] | None, typer.Argument(help="Questions; without any, one per line from stdin.")]
GateSpec = Annotated[str | None, typer.Option("--gate", help="Gate with options, e.g. logprob:mean; folder of a fitted one (DIR,verdict=own: by its raw score). See `knowgate gates`.")]  # fmt: skip  # noqa: E501
PlugIn = Annotated[
    bool | None, typer.Option("--plug-in", help="Let a fitted gate decide for another LLM than its own.")
]
Threshold = Annotated[float | None, typer.Option(help="Retrieve when need is above this (0-1). Default: the gate's own.")]  # fmt: skip  # noqa: E501
Docs = Annotated[Path | None, typer.Option(parser=path, metavar="PATH", help="Folder (txt, md, html, pdf) or JSONL file to retrieve from; indexed in the cache.")]  # fmt: skip  # noqa: E501
Index = Annotated[str | None, typer.Option(help="Index folder made by `knowgate index`, or http:URL of a search endpoint.")]  # fmt: skip  # noqa: E501
Rerank = Annotated[str | None, typer.Option(help="Reranker of 20 candidates: folder made by `fit reranker`, or any cross-encoder.")]  # fmt: skip  # noqa: E501
Preset = Annotated[str | None, typer.Option(help="cbdr: probe (--gate) with --beta, aligned reranker (--rerank), top --k.")]  # fmt: skip  # noqa: E501
Beta = Annotated[float | None, typer.Option(min=0, max=1, help="With --preset cbdr: answer directly above this confidence. Default 0.95.")]  # fmt: skip  # noqa: E501
ArbiterSpec = Annotated[str | None, typer.Option("--arbiter", help="Who chooses between draft and open-book answer: folder made by `fit arbiter`, rules, or none. Default: rules, where the gate reads a whole draft.")]  # fmt: skip  # noqa: E501
SecondLook = Annotated[str | None, typer.Option(help="Folder of a fitted kbm gate that drops useless passages.")]
K = Annotated[int | None, typer.Option(help="Passages shown to the LLM. Default 3.")]
MaxTokens = Annotated[int | None, typer.Option(help="Longest answer in tokens. Default 32.")]
Config = Annotated[Path | None, typer.Option(parser=path, metavar="FILE", help="Config file. Default: knowgate.toml in this folder, if there is one.")]  # fmt: skip  # noqa: E501
Log = Annotated[str | None, typer.Option("--log", metavar="DB", help="Log that grows with use: retrieved questions, known where the answers with and without passages agree.")]  # fmt: skip  # noqa: E501
LogDrafts = Annotated[bool | None, typer.Option("--log-drafts", help="With --log: also answer from memory where the gate reads no whole draft (dhicl, skr, logprob:first).")]  # fmt: skip  # noqa: E501
Record = Annotated[
    Path | None,
    typer.Option(parser=path, metavar="DIR", help="Keep the model's outputs in this folder, for --model replay:DIR."),
]
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
    second_look: SecondLook = None,
    k: K = None,
    max_tokens: MaxTokens = None,
    lang: Lang = None,
    prompts: Prompts = None,
    config: Config = None,
    log: Log = None,
    log_drafts: LogDrafts = None,
    record: Record = None,
    explain: Explain = False,
    as_json: Json = False,
) -> None:
    """Answer questions, retrieving only where the gate says so."""
    settings = load_settings(
        config, model=model, gate=gate, plug_in=plug_in, threshold=threshold, docs=docs, index=index,
        retriever=retriever, rerank=rerank, rerank_margin=rerank_margin, preset=preset, beta=beta,
        arbiter=arbiter, second_look=second_look, k=k, max_tokens=max_tokens, lang=lang,
        prompts=prompts, log=log, log_drafts=log_drafts,
    )  # fmt: skip
    asked = read_arguments(questions)
    rag = build_pipeline(settings, record)
    _say_promise(rag, explain)
    sure, far = Sure(), Far()
    live = not as_json and len(questions or ()) == 1 and sys.stdout.isatty()
    with _logging(rag.log):
        for answer in map(partial(_show_live, rag), asked) if live else rag.stream(asked):
            sure.see(answer)
            far.see(answer.decision)
            if not live:
                print_json(answer_record(answer, rag)) if as_json else _show(answer)
            if explain and not as_json:
                _show_basis(answer.decision)
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
    lang: Lang = None,
    prompts: Prompts = None,
    config: Config = None,
    record: Record = None,
    explain: Explain = False,
    as_json: Json = False,
) -> None:
    """Say for each question whether to retrieve; answer nothing, retrieve nothing."""
    settings = load_settings(
        config, model=model, gate=gate, plug_in=plug_in, threshold=threshold, lang=lang, prompts=prompts
    )
    asked = read_arguments(questions)
    rag = build_pipeline(settings, record, retrieves=False)
    _say_promise(rag, explain)
    far = Far()
    for question, decision in rag.decide_stream(asked):
        far.see(decision)
        if as_json:
            print_json({"question": question.text, **decision_record(decision), "model": rag.model.name})
        else:
            line = (_verdict(decision), f"  {harmless(question.text)}  ", (harmless(decision.reason), "dim"))
            plain_console().print(Text.assemble(*line))
        if explain and not as_json:
            _show_basis(decision)
    far.say()


def _say_promise(rag: AdaptiveRAG, explain: bool) -> None:
    """What is proven, to who asks; that it does not hold here, to everybody."""
    if (explain or rag.objections) and (said := rag.promise):
        WORDS.print(said)


def _show(answer: Answer) -> None:
    plain_console().print(Text(harmless(answer.text), style="bold"))
    _show_decision(answer.decision)
    _show_sources(answer)


def _show_live(rag: AdaptiveRAG, question: str) -> Answer:
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
                    _show_decision(decision)
                case TextEvent(text):
                    line.add(text)
                case AnswerEvent(answer):
                    line.close()
                    if answer.decision != told:
                        _show_decision(answer.decision)
                    _show_sources(answer)
                    return answer
    raise RuntimeError("the last event is the answer")


@dataclass
class Line:
    """A line that grows. Pieces are made harmless character by character: a sequence cut in two is harmless too."""

    is_open: bool = False

    def add(self, text: str) -> None:
        self.is_open = True
        plain_console().print(Text(harmless(text), style="bold"), end="")

    def close(self) -> None:
        """Whatever comes next, an error too, begins on a line of its own."""
        if self.is_open:
            plain_console().print()
        self.is_open = False


def _show_decision(decision: Decision) -> None:
    plain_console().print(Text.assemble("  ", _verdict(decision), " ", (harmless(decision.reason), "dim")))


def _show_sources(answer: Answer) -> None:
    console = plain_console()
    for passage in answer.passages:
        console.print(f"  · {harmless(passage.id)}: {harmless(_short(passage.text))}", style="dim")
    console.print(f"  {answer.seconds['total']:.2f} s", style="dim")


def _show_basis(decision: Decision) -> None:
    """What a decision rests on: a fitted gate's score before calibration and its own questions, logged questions."""
    console = plain_console()
    if decision.distance is not None:
        words = f"distance {decision.distance:.2f} from the questions the gate was fitted on; 99 % of them are within 1"
        console.print(f"  {words}", style="dim")
    if decision.raw is not None:
        console.print(f"  need {decision.need:.4f}, made of the raw score {decision.raw:.4f}", style="dim")
    if not decision.neighbours and decision.raw is None:
        console.print("  this gate looked up no logged questions", style="dim")
    for near in decision.neighbours:
        outcome = f", retrieval: {near.outcome}" if near.outcome else ""
        words = f"{near.similarity:.2f} {near.label}{outcome} ({near.source}): {near.question}"
        console.print(f"  ~ {harmless(words)}", style="dim")


def _verdict(decision: Decision) -> tuple[str, str]:
    return ("retrieve", "yellow") if decision.retrieve else ("skip", "green")


def _short(text: str, width: int = 90) -> str:
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 1] + "…"
