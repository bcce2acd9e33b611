"""`knowgate eval-self`: does the LLM know what it knows?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import chain
from typing import Annotated

import typer

from knowgate.cli.console import STDERR_CONSOLE, create_console, print_json
from knowgate.cli.gate_specs import split_gate_specs
from knowgate.cli.options import JsonOption, LimitOption, PlugInOption
from knowgate.data.questions import load_questions
from knowgate.models import load_model
from knowgate.models.prompts.answers import AnswerPrompts
from knowgate.papers.self_assessment import (
    SelfAssessment,
    assess_direct,
    assess_free_statements,
    assess_gate,
    assess_with_history,
)
from knowgate.types import Model, Question

ROW_FORMAT = "{:<12} {:<30} {:>9} {:>11} {:>13} {:>7}"
SELF_JUDGE = "self"


def eval_self(
    data: Annotated[
        list[str], typer.Option(help="Self-assessment sets (label --kb-sat), e.g. jsonl:kbsat.jsonl; repeatable.")
    ],
    model: Annotated[str, typer.Option(help="Model spec.")] = "smollm",
    words: Annotated[
        str,
        typer.Option(help="Label words, known/unknown, separated by commas: true/false,false/true,yes/no,1/2,bar/foo."),
    ] = "true/false",
    history: Annotated[str | None, typer.Option(help="Log for the rows with history.")] = None,
    k: Annotated[int, typer.Option(min=1, help="Logged questions shown.")] = 20,
    judge: Annotated[
        str | None, typer.Option(help="Model spec that reads free statements; 'self' for the LLM itself.")
    ] = None,
    gates: Annotated[
        list[str] | None, typer.Option(help="Gates to assess beside it (fit uar, say): folders and specs.")
    ] = None,
    plug_in: PlugInOption = False,
    limit: LimitOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print the KB-SAT table: accuracy and predictions of self-assessment, direct, with history, with calibration."""
    llm = load_model(model)
    reader = llm if judge == SELF_JUDGE else load_model(judge) if judge else None
    others = split_gate_specs(gates) if gates else []
    for spec in data:
        questions = load_questions(spec, limit)
        if not as_json:
            create_console().print(_title(spec, questions))
        beside = (assess_gate(llm, questions, gate, AnswerPrompts(), plug_in=plug_in) for gate in others)
        for row in chain(_rows(llm, questions, words.split(","), history, k, reader), beside):
            if as_json:
                print_json({"data": spec, "model": llm.name, **asdict(row)})
            else:
                create_console().print(_line(row))


def _rows(
    model: Model, questions: Sequence[Question], words: Sequence[str], history: str | None, k: int, judge: Model | None
) -> Iterator[SelfAssessment]:
    prompts = AnswerPrompts()
    for pair in words:
        STDERR_CONSOLE.print(f"asking {len(questions)} questions with the labels {pair} ...")
        yield assess_direct(model, questions, pair, prompts)
        if history:
            yield from assess_with_history(model, questions, pair, prompts, history=history, k=k)
    if judge is not None:
        yield assess_free_statements(model, questions, judge)


def _title(spec: str, questions: Sequence[Question]) -> str:
    known = sum(bool(question.meta.get("known")) for question in questions)
    heads = ROW_FORMAT.format("labels", "method", "accuracy", "says known", "says unknown", "AUROC")
    return f"{spec}: {known} known, {len(questions) - known} unknown\n{heads}"


def _line(row: SelfAssessment) -> str:
    """One row as soon as it is there: a row with history takes a second or two per question on a CPU."""
    unread = f" ({row.unreadable} unreadable)" if row.unreadable else ""
    ranked = "-" if row.auroc is None else f"{row.auroc:.3f}"
    counts = (row.predicted_known, row.predicted_unknown)
    return ROW_FORMAT.format(row.words, row.method + unread, f"{row.accuracy:.1%}", *counts, ranked)
