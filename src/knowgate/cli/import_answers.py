"""`knowgate import-answers`: a label run from answers that were recorded elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from knowgate.cli.console import WORDS
from knowgate.cli.options import Limit
from knowgate.cli.paths import path
from knowgate.datasets import load_questions, texts_beside
from knowgate.labels import import_answers as run_import
from knowgate.labels import load_grader
from knowgate.runs import RunFolder


def import_answers(
    data: Annotated[str, typer.Option(help="Questions with their recorded answers, in meta or (jsonl:) beside it.")],
    model: Annotated[str, typer.Option(help="Name of the LLM that gave them; labels are bound to it.")],
    closed: Annotated[str, typer.Option(help="Key of the closed-book answer.")],
    out: Annotated[Path, typer.Option(parser=path, metavar="RUN", help="Run folder.")],
    opened: Annotated[str, typer.Option("--open", help="Key of the open-book answer, if there is one.")] = "",
    iterative: Annotated[str, typer.Option(help="Key of the answer after several retrievals, if any.")] = "",
    grade: Annotated[str, typer.Option(help="exact, contains or choice.")] = "contains",
    limit: Limit = None,
) -> None:
    """Make a label run from recorded answers, for LLMs whose weights nobody has; fit gates on it as on any other.

    A line: {"question": "Who wrote Hamlet?", "answers": ["Shakespeare"], "alone": "Marlowe", "searched": "Shakespeare"}

    Example: knowgate import-answers --data jsonl:asked.jsonl --model my-llm --closed alone --open searched --out run
    """
    questions = load_questions(data, limit)
    grader = load_grader(grade)
    done = run_import(
        RunFolder(out),
        questions,
        grader,
        llm=model,
        data=data,
        closed=closed,
        opened=opened,
        iterative=iterative,
        beside=texts_beside(data),
    )
    WORDS.print(f"{done} of {len(questions)} questions imported into {out}. Look: knowgate report {out}")
