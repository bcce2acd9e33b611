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
    data: Annotated[str, typer.Option(help="Questions with recorded answers, in meta or (jsonl:) at the top level.")],
    model: Annotated[str, typer.Option(help="Name of the LLM that gave the answers.")],
    closed: Annotated[str, typer.Option(help="Key of the closed-book answer.")],
    out: Annotated[Path, typer.Option(parser=parse_path, metavar="RUN", help="Run folder.")],
    opened: Annotated[str, typer.Option("--open", help="Key of the open-book answer, if there is one.")] = "",
    iterative: Annotated[str, typer.Option(help="Key of the answer after several retrievals, if any.")] = "",
    grade: Annotated[str, typer.Option(help="exact, contains or choice.")] = "contains",
    limit: LimitOption = None,
) -> None:
    """Make a label run from recorded answers, for LLMs that cannot be run here; fit gates on it as on any other.

    A line: {"question": "Who wrote Hamlet?", "answers": ["Shakespeare"], "alone": "Marlowe", "searched": "Shakespeare"}

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
