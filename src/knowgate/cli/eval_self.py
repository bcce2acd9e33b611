"""`knowgate eval-self`: does the LLM know what it knows?"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from knowgate.datasets import load_questions
from knowgate.evaluate.selfassess import Assessment, assess_direct, assess_freely, assess_with_history
from knowgate.models import load_model
from knowgate.prompts.answer import AnswerPrompts
from knowgate.types import Model, Question


def eval_self(
    data: Annotated[
        list[str], typer.Option(help="Self-assessment sets (label --kb-sat), e.g. jsonl:kbsat.jsonl; repeatable.")
    ],
    model: Annotated[str, typer.Option(help="Model spec.")] = "smollm",
    words: Annotated[
        str, typer.Option(help="Label words, known/unknown, separated by commas.")
    ] = "true/false,false/true,yes/no,1/2,bar/foo",
    history: Annotated[str | None, typer.Option(help="Log for the rows with history.")] = None,
    k: Annotated[int, typer.Option(min=1, help="Logged questions shown.")] = 20,
    judge: Annotated[str | None, typer.Option(help="Model spec that reads free statements.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only so many questions per set.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per row.")] = False,
) -> None:
    """Print the KB-SAT table: accuracy and predictions of self-assessment, direct, with history, with calibration."""
    llm = load_model(model)
    reader = load_model(judge) if judge else None
    for spec in data:
        questions = load_questions(spec, limit)
        table = _table(spec, questions)
        for row in _rows(llm, questions, words.split(","), history, k, reader):
            if as_json:
                typer.echo(json.dumps({"data": spec, "model": llm.name, **asdict(row)}))
            table.add_row(*_cells(row))
        if not as_json:
            Console().print(table)


def _rows(
    model: Model, questions: Sequence[Question], words: Sequence[str], history: str | None, k: int, judge: Model | None
) -> Iterator[Assessment]:
    prompts = AnswerPrompts()
    for pair in words:
        yield assess_direct(model, questions, pair, prompts)
        if history:
            for sign in ("none", "paper", "code"):
                yield assess_with_history(model, questions, pair, prompts, history=history, sign=sign, k=k)
    if judge is not None:
        yield assess_freely(model, questions, judge)


def _table(spec: str, questions: Sequence[Question]) -> Table:
    known = sum(bool(question.meta.get("known")) for question in questions)
    title = f"{spec}: {known} known, {len(questions) - known} unknown"
    return Table("labels", "method", "accuracy", "predicted known", "predicted unknown", "AUROC", title=title, box=None)


def _cells(row: Assessment) -> tuple[str, ...]:
    unread = f" ({row.unreadable} unreadable)" if row.unreadable else ""
    ranked = "-" if row.auroc is None else f"{row.auroc:.3f}"
    counts = (str(row.predicted_known), str(row.predicted_unknown))
    return (row.words, row.method + unread, f"{row.accuracy:.1%}", *counts, ranked)
