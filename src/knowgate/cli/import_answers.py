"""`knowgate import-answers`: make a label run from answers that were recorded elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from knowgate.cli.console import STDERR_CONSOLE
from knowgate.cli.options import LimitOption, parse_path
from knowgate.data.questions import load_questions
from knowgate.data.questions.extra_fields import read_extra_fields
from knowgate.data.runs.folder import RunFolder
from knowgate.labels.answer_import import ImportOptions
from knowgate.labels.answer_import import import_answers as run_import
from knowgate.labels.grading import load_grader


def import_answers(
    data: Annotated[str, typer.Option(help="Questions with recorded answers, such as jsonl:FILE or langfuse:FILE.")],
    model: Annotated[str, typer.Option(help="Name of the LLM that gave the answers; any text.")],
    out: Annotated[
        Path, typer.Option(parser=parse_path, metavar="RUN", help="Folder that the label run is written to.")
    ],
    options: ImportOptions,
    grade: Annotated[
        str,
        typer.Option(
            help="How answers without a recorded grade are graded: `exact` (equals a gold answer), `contains` "
            "(contains one) or `choice` (right letter). Beside recorded grades, this verdict is stored as the second "
            "grader; choose it with `knowgate eval --grader`."
        ),
    ] = "contains",
    limit: LimitOption = None,
) -> None:
    """Make a label run from answers that were recorded elsewhere, for an LLM that cannot be run here.

    Gates can be fitted on this run as on any other. Each line of the data holds a question and its answers:

    {"question": "Who wrote Hamlet?", "answers": ["Shakespeare"], "alone": "Marlowe", "searched": "Shakespeare"}

    Grades by people or by your own judge are used instead of the string rule if you name their fields.

    Example: knowgate import-answers --data jsonl:asked.jsonl --model my-llm --closed alone --open searched --out run

    Example: knowgate import-answers --data langfuse:traces.jsonl --model my-llm --closed answer --closed-correct
    scores.user-feedback --out run
    """
    questions = load_questions(data, limit)
    count = run_import(
        RunFolder(out),
        questions,
        load_grader(grade),
        llm=model,
        data=data,
        options=options,
        extra_fields=read_extra_fields(data),
    )
    STDERR_CONSOLE.print(f"{count} of {len(questions)} questions imported into {out}. See: knowgate report {out}")
