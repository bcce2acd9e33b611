"""`knowgate eval-self`: measure whether the LLM can tell which questions it can answer."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from knowgate.cli.console import inform, print_json, print_tables
from knowgate.cli.options import JsonOption, split_gate_specs
from knowgate.core.display import TextTable
from knowgate.core.options import Count, Options, option
from knowgate.data.questions import load_questions
from knowgate.models import load_model
from knowgate.papers.self_assessment import SelfAssessment, SelfAssessor

COLUMNS = ("labels", "method", "accuracy", "says known", "says unknown", "AUROC")
SELF_JUDGE = "self"


class SelfAssessmentOptions(Options):
    """Options of `knowgate eval-self`."""

    model: str = option("smollm", "LLM that assesses itself, such as smollm.")
    words: str = option("true/false", "Word pairs the LLM answers with, `known/unknown`, such as true/false,yes/no.")
    history: str | None = option(None, "Log of earlier questions. Adds methods that show similar ones to the LLM.")
    k: Count = option(20, "Number of logged questions shown to the LLM. Used with `history`.")
    judge: str | None = option(
        None, "Adds a method: the LLM says freely whether it knows, and the LLM named here (or 'self') reads that."
    )
    gates: list[str] | None = option(None, "Gates to compare with the LLM's self-assessment, by name or folder.")
    plug_in: bool = option(False, "Allow gates that were fitted on another LLM.", flag="--plug-in")
    limit: Count | None = option(None, "Maximum number of questions per set.")


def eval_self(
    data: Annotated[
        list[str], typer.Option(help="Questions written by `label --kb-sat`: jsonl:FILE. May be repeated.")
    ],
    options: SelfAssessmentOptions,
    as_json: JsonOption = False,
) -> None:
    """Measure whether the LLM can tell which questions it can answer (the KB-SAT test).

    Prints one row per method: the LLM is asked directly, sees similar logged questions (--history), states its
    judgment freely (--judge), or a gate decides (--gates).
    """
    model = load_model(options.model)
    judge = None
    if options.judge:
        judge = model if options.judge == SELF_JUDGE else load_model(options.judge)
    gates = split_gate_specs(options.gates) if options.gates else []
    for spec in data:
        questions = load_questions(spec, options.limit)
        assessor = SelfAssessor(model, questions, options.history, options.k, plug_in=options.plug_in, notify=inform)
        known = sum(bool(question.meta.get("known")) for question in questions)
        rows = []
        for row in assessor.assess_all(options.words.split(","), judge, gates):
            if as_json:
                print_json({"data": spec, "model": model.name, **asdict(row)})
            else:
                rows.append(_format_row(row))
        if rows:
            title = f"{spec}: {known} known, {len(questions) - known} unknown"
            print_tables([TextTable(title, COLUMNS, tuple(rows))])


def _format_row(row: SelfAssessment) -> tuple[str, ...]:
    """Format one method's results as a row of the table."""
    unreadable = f" ({row.unreadable} unreadable)" if row.unreadable else ""
    auroc = "-" if row.auroc is None else f"{row.auroc:.3f}"
    counts = (str(row.predicted_known), str(row.predicted_unknown))
    return (row.words, row.method + unreadable, f"{row.accuracy:.1%}", *counts, auroc)
