"""`knowgate label` and `knowgate import-answers`: make label runs."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from knowgate.cli.console import inform
from knowgate.cli.options import LimitOption, path_option
from knowgate.cli.progress import ProgressCallback, show_progress
from knowgate.core.files import write_text
from knowgate.data.questions import load_questions
from knowgate.data.questions.files import read_extra_fields
from knowgate.data.runs.folder import RunFolder
from knowgate.labels.answer_import import ImportOptions
from knowgate.labels.answer_import import import_answers as run_import
from knowgate.labels.grading import load_grader
from knowgate.labels.labeling import label as run_label
from knowgate.labels.options import LabelOptions
from knowgate.labels.run import LabelProgress
from knowgate.papers.self_assessment import NO_SWAPS_MESSAGE, build_kb_sat


def import_answers(
    data: Annotated[str, typer.Option(help="Questions with recorded answers, such as jsonl:FILE or langfuse:FILE.")],
    model: Annotated[str, typer.Option(help="Name of the LLM that gave the answers. Any text is allowed.")],
    out: Annotated[Path, path_option("RUN", "Folder to write the label run (graded answers) to.")],
    options: ImportOptions,
    grade: Annotated[
        str, typer.Option(help="How to grade answers without a recorded grade: `exact`, `contains` or `choice`.")
    ] = "contains",
    limit: LimitOption = None,
) -> None:
    """Make a label run from answers that an LLM gave elsewhere.

    Gates can be fitted on this run like on any other. Each line of the data holds a question and its answers:

    {"question": "Who wrote Hamlet?", "answers": ["Shakespeare"], "alone": "Marlowe", "searched": "Shakespeare"}

    If your data has grades, from people or from your own judge, name their fields (as with --closed-correct). Then these
    grades count.

    Example: knowgate import-answers --data jsonl:asked.jsonl --model my-llm --closed alone --open searched --out run

    Example: knowgate import-answers --data langfuse:traces.jsonl --model my-llm --closed answer --closed-correct
    scores.user-feedback --out run
    """
    # `options` names the fields of the answers and grades. In the first example, `closed` is the field "alone".
    questions = load_questions(data, limit)
    extra = read_extra_fields(data)
    grader = load_grader(grade)
    count = run_import(RunFolder(out), questions, grader, llm=model, data=data, options=options, extra_fields=extra)
    inform(f"{count} of {len(questions)} questions imported into {out}. See: knowgate report {out}")


def label(
    data: Annotated[
        str, typer.Option(help="Questions to answer: jsonl:FILE, lines:FILE, bench:NAME/SPLIT or hub:NAME?split=...")
    ],
    out: Annotated[Path, path_option("RUN", "Folder of the graded answers. An interrupted run is continued.")],
    options: LabelOptions,
    model: Annotated[str, typer.Option(help="LLM that answers the questions. To list all: knowgate models")] = "smollm",
    kb_sat: Annotated[
        Path | None, path_option("FILE", "Also write the known and unknown questions (KB-SAT data) to this file.")
    ] = None,
) -> None:
    """Answer questions with and without passages, grade the answers, and record the results.

    Run the same command again to continue an interrupted run.
    """
    with show_progress("labeling", "questions") as show:
        bar = LabelProgressBar(show)
        try:
            folder = run_label(data, model=model, out=out, options=options, on_progress=bar)
        except KeyboardInterrupt:
            _print_saved_questions(RunFolder(out), bar.latest.total)
            raise
    _print_summary(bar.latest, out)
    if not options.closed_book:
        _print_missing_answers(folder)
    if kb_sat:
        _write_kb_sat(folder, kb_sat, options.seed)


def _print_saved_questions(run: RunFolder, total: int) -> None:
    """Print how many questions of an interrupted run are saved. `total` is 0 if the run has not started yet."""
    if total:
        inform(f"{len(run.done())} of {total} questions are saved in {run.path}. Run the same command to continue.")


def _print_missing_answers(folder: RunFolder) -> None:
    """Print how many questions have no open-book answer, if any.

    Closed-book and open-book accuracy then cover different questions.
    """
    missing = sum(row.error is None and row.open is None for row in folder.rows())
    if missing:
        inform(f"{missing} questions have no open-book answer, because no passage was found for them.")


@dataclass
class LabelProgressBar:
    """Progress callback of a label run: updates the bar and stores the latest progress in `latest`."""

    show: ProgressCallback  # updates the bar
    latest: LabelProgress = field(default_factory=lambda: LabelProgress(total=0))

    def __call__(self, progress: LabelProgress) -> None:
        self.latest = progress
        self.show(progress.done, progress.total, _format_speed(progress))


def _format_speed(progress: LabelProgress) -> str:
    """Format the questions and tokens per second. '' if no time has passed."""
    if not progress.seconds:
        return ""
    return f"{progress.fresh / progress.seconds:.2f} questions/s, {progress.tokens / progress.seconds:.0f} tokens/s"


def _print_summary(progress: LabelProgress, out: Path) -> None:
    """Print how many questions are labeled and failed, and the speed of this session.

    `progress.fresh` counts the questions of this session, `done` and `failed` those of earlier ones, too.
    """
    failed = ""
    if progress.failed:
        failed = f", {progress.failed} failed (see 'error' in the rows; --retry-failed labels them again)"
    speed = f"; {progress.fresh} of them in this session, {_format_speed(progress)}" if progress.fresh else ""
    inform(f"{progress.done} of {progress.total} questions in {out}{failed}{speed}. See: knowgate report {out}")


def _write_kb_sat(folder: RunFolder, out: Path, seed: int) -> None:
    """Write three sets of questions to test whether the LLM can tell what it knows (KB-SAT).

    OUT has known and unknown questions. OUT.swapped.jsonl and OUT.rare.jsonl have altered known questions.
    """
    sets = build_kb_sat(folder.rows(), seed)
    for suffix, records in (("", sets.balanced), (".swapped.jsonl", sets.swapped), (".rare.jsonl", sets.rare)):
        path = out.with_suffix(suffix) if suffix else out
        write_text(path, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
        inform(f"{len(records)} questions in {path}")
    if not sets.swapped:
        inform(NO_SWAPS_MESSAGE, style="yellow")
