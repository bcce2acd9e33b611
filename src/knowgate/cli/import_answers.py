"""`knowgate import-answers`: make a label run from answers that were recorded elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from knowgate.cli.console import STDERR_CONSOLE
from knowgate.cli.options import LimitOption, parse_path
from knowgate.data.questions import load_questions
from knowgate.data.questions.records import read_extra_fields
from knowgate.data.runs.folder import RunFolder
from knowgate.labels.answer_import import AnswerKeys
from knowgate.labels.answer_import import import_answers as run_import
from knowgate.labels.grading import load_grader


def import_answers(
    data: Annotated[str, typer.Option(help="Questions with recorded answers, such as jsonl:FILE.")],
    model: Annotated[str, typer.Option(help="Name of the LLM that gave the answers; any text.")],
    closed: Annotated[
        str,
        typer.Option(
            help="Name of the field that holds the answer without passages (closed-book). Fields are read from the "
            "`meta` of each question, or from the top level of its JSON line."
        ),
    ],
    out: Annotated[
        Path, typer.Option(parser=parse_path, metavar="RUN", help="Folder that the label run is written to.")
    ],
    opened: Annotated[
        str,
        typer.Option(
            "--open", help="Name of the field that holds the answer with passages (open-book). Default: none recorded."
        ),
    ] = "",
    iterative: Annotated[
        str,
        typer.Option(
            help="Name of the field that holds the answer after several rounds of retrieval. Default: none recorded."
        ),
    ] = "",
    grade: Annotated[
        str,
        typer.Option(
            help="How answers are graded: `exact` (equals a gold answer), `contains` (contains one) or `choice` "
            "(right letter)."
        ),
    ] = "contains",
    limit: LimitOption = None,
) -> None:
    """Make a label run from answers that were recorded elsewhere, for an LLM that cannot be run here.

    Gates can be fitted on this run as on any other. Each line of the data holds a question and its answers:

    {"question": "Who wrote Hamlet?", "answers": ["Shakespeare"], "alone": "Marlowe", "searched": "Shakespeare"}

    Example: knowgate import-answers --data jsonl:asked.jsonl --model my-llm --closed alone --open searched --out run
    """
    questions = load_questions(data, limit)
    count = run_import(
        RunFolder(out),
        questions,
        load_grader(grade),
        llm=model,
        data=data,
        keys=AnswerKeys(closed, opened, iterative),
        extra_fields=read_extra_fields(data),
    )
    STDERR_CONSOLE.print(f"{count} of {len(questions)} questions imported into {out}. See: knowgate report {out}")
