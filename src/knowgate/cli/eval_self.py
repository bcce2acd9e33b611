"""`knowgate eval-self`: measure whether the LLM can tell which questions it can answer."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from knowgate.cli.console import create_console, inform, print_json
from knowgate.cli.options import JsonOption, split_gate_specs
from knowgate.core.options import Count, Options, option
from knowgate.data.questions import load_questions
from knowgate.models import load_model
from knowgate.papers.self_assessment import SelfAssessment, SelfAssessor

ROW_FORMAT = "{:<12} {:<30} {:>9} {:>11} {:>13} {:>7}"
SELF_JUDGE = "self"


class SelfAssessmentOptions(Options):
    """Options of `knowgate eval-self`."""

    model: str = option("smollm", "LLM that assesses itself, such as smollm.")
    words: str = option(
        "true/false",
        "Word pairs the LLM answers with, `known/unknown`, separated by commas. Example: true/false,yes/no,1/2.",
    )
    history: str | None = option(
        None, "History log of earlier questions. Adds methods that show similar logged questions to the LLM."
    )
    k: Count = option(20, "Number of logged questions shown to the LLM. Used with `history`.")
    judge: str | None = option(
        None,
        "Adds a method in which the LLM says freely whether it knows the answer. The LLM named here reads the "
        "statement; 'self' means the same LLM.",
    )
    gates: list[str] | None = option(None, "Gates to compare with the LLM's self-assessment, by name or folder.")
    plug_in: bool = option(False, "Allow gates that were fitted on another LLM.", flag="--plug-in")
    limit: Count | None = option(None, "Maximum number of questions per set.")


def eval_self(
    data: Annotated[
        list[str],
        typer.Option(help="Known and unknown questions, written by `label --kb-sat`: jsonl:FILE. May be repeated."),
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
        if not as_json:
            known = sum(bool(question.meta.get("known")) for question in questions)
            create_console().print(f"{spec}: {known} known, {len(questions) - known} unknown")
            heads = ("labels", "method", "accuracy", "says known", "says unknown", "AUROC")
            create_console().print(ROW_FORMAT.format(*heads))
        # Each row is printed as soon as it is computed, because a row with history takes seconds per question on a CPU.
        for row in assessor.assess_all(options.words.split(","), judge, gates):
            if as_json:
                print_json({"data": spec, "model": model.name, **asdict(row)})
            else:
                create_console().print(_format_row(row))


def _format_row(row: SelfAssessment) -> str:
    """Format one method's results as a line of the table."""
    unreadable = f" ({row.unreadable} unreadable)" if row.unreadable else ""
    auroc = "-" if row.auroc is None else f"{row.auroc:.3f}"
    return ROW_FORMAT.format(
        row.words, row.method + unreadable, f"{row.accuracy:.1%}", row.predicted_known, row.predicted_unknown, auroc
    )
