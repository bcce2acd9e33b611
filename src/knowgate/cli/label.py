"""`knowgate label`: what does this LLM know?"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from knowgate.cli.console import STDERR_CONSOLE
from knowgate.cli.options import CandidatesOption, PromptsOption, RerankerOption, RunnerOption
from knowgate.cli.progress import show_question_progress
from knowgate.core.files import write_text
from knowgate.data.runs.folder import RunFolder
from knowgate.labels.grading import compare_graders
from knowgate.labels.labeling import label as run_label
from knowgate.labels.run import LabelProgress
from knowgate.models import load_model
from knowgate.papers.kb_sat import build_kb_sat
from knowgate.types import Model


def label(
    data: Annotated[str, typer.Option(help="jsonl:FILE, lines:FILE, bench:NAME/SPLIT or hub:NAME?split=...")],
    out: Annotated[Path, typer.Option(help="Run folder. The same command goes on with a run that was interrupted.")],
    model: Annotated[str, typer.Option(help="Model spec; see `knowgate models`.")] = "smollm",
    index: Annotated[
        str | None,
        typer.Option(help="Index folder, http:URL or a search engine, as in `ask`. Default: the data's own contexts."),
    ] = None,
    rerank: RerankerOption = None,
    candidates: CandidatesOption = 20,
    samples: Annotated[int, typer.Option(min=0, help="Sampled answers per question and way of answering.")] = 30,
    open_samples: Annotated[
        int | None, typer.Option(min=0, help="Samples with passages, if not as many; 0 saves most of the time.")
    ] = None,
    temperature: Annotated[float, typer.Option(help="Of the samples.")] = 1.0,
    top_p: Annotated[
        float, typer.Option(help="Draw samples from the most probable tokens that reach this share; 1: all.")
    ] = 1.0,
    top_k: Annotated[int, typer.Option(help="Draw samples from so many most probable tokens; 0: all.")] = 0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer in tokens.")] = 32,
    grade: Annotated[
        str, typer.Option(help="exact, contains, choice or judge. Choices are graded by letter.")
    ] = "contains",
    judge: Annotated[str | None, typer.Option(help="Model spec of the judge, with --grade judge.")] = None,
    judge_prompt: Annotated[str, typer.Option(help="implies (with the question) or contains (without).")] = "implies",
    mask: Annotated[bool, typer.Option(help="Also answer with gold answers in the passages replaced by MASK.")] = False,
    mask_samples: Annotated[
        int, typer.Option(min=0, help="With --mask: sampled answers to the MASK passages, too (KBM's Figure 3).")
    ] = 0,
    iterative: Annotated[
        bool, typer.Option("--iterative", help="Also answer after up to 3 rounds of retrieval; for `fit adaptive`.")
    ] = False,
    k: Annotated[
        int | None, typer.Option(min=1, help="Passages. Default: 3 from an index, all of the data's own.")
    ] = None,
    layers: Annotated[
        str, typer.Option(help="Hidden states to keep: mid, late, last, numbers, or none.")
    ] = "mid,late,last",
    closed_book: Annotated[
        bool, typer.Option("--closed-book", help="Closed-book answers only: nothing is retrieved.")
    ] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many questions.")] = None,
    seed: Annotated[int, typer.Option(help="Of the samples.")] = 0,
    seakr: Annotated[
        bool, typer.Option("--seakr", help="Also how far apart the states of 20 sampled answers are (SeaKR).")
    ] = False,
    lang: Annotated[str | None, typer.Option(help="Force the prompt language: en or zh.")] = None,
    prompts: PromptsOption = None,
    retry_failed: Annotated[bool, typer.Option(help="Try questions again that failed before.")] = False,
    runner: RunnerOption = "local",
    compare: Annotated[
        bool, typer.Option("--compare-graders", help="Print how far graders agree on this run.")
    ] = False,
    kb_sat: Annotated[
        Path | None, typer.Option(help="Write the balanced self-assessment set (JSONL) and its stress sets.")
    ] = None,
) -> None:
    """Sample and grade closed- and open-book answers: mastery, certainty, effect of retrieval. Resumable."""
    last = LastProgress()
    judging = load_model(judge) if judge else None
    try:
        with labeling_progress_bar() as show:
            folder = run_label(
                data,
                model=model,
                out=out,
                index=index,
                rerank=rerank,
                candidates=candidates,
                samples=samples,
                open_samples=open_samples,
                temperature=temperature,
                top_p=top_p,
                top_k=top_k,
                max_tokens=max_tokens,
                grade=grade,
                judge=judging if runner == "local" else judge,
                judge_prompt=judge_prompt,
                mask=mask,
                mask_samples=mask_samples,
                iterative=iterative,
                k=k,
                layers=layers,
                closed_book=closed_book,
                limit=limit,
                seed=seed,
                seakr=seakr,
                lang=lang,
                prompts=prompts,
                retry_failed=retry_failed,
                runner=runner,
                on_progress=last.then(show),
            )
    except KeyboardInterrupt:
        if last.tally.total:
            done = f"{len(RunFolder(out).done())} of {last.tally.total} questions are safe in {out}"
            STDERR_CONSOLE.print(f"{done}; the same command goes on.")
        raise
    _summary(last.tally, out)
    if not closed_book:
        _say_what_was_found(folder)
    if compare:
        STDERR_CONSOLE.print(_agreement(folder, judging))
    if kb_sat:
        _write_sets(folder, kb_sat, seed)


@dataclass
class LastProgress:
    """How far a run was when it last said so."""

    tally: LabelProgress = field(default_factory=lambda: LabelProgress(total=0))

    def then(self, show: Callable[[LabelProgress], None]) -> Callable[[LabelProgress], None]:
        def told(tally: LabelProgress) -> None:
            self.tally = tally
            show(tally)

        return told


@contextmanager
def labeling_progress_bar() -> Iterator[Any]:
    with show_question_progress("labelling", STDERR_CONSOLE) as show:

        def show_tally(tally: LabelProgress) -> None:
            pace = ""
            if tally.seconds:
                pace = f"{tally.fresh / tally.seconds:.2f} questions/s {tally.tokens / tally.seconds:.0f} tokens/s"
            show(tally.done, tally.total, pace)

        yield show_tally


def _summary(tally: LabelProgress, out: Path) -> None:
    pace = ""
    if tally.seconds and tally.fresh:
        pace = (
            f"; {tally.fresh} of them now, {tally.fresh / tally.seconds:.2f} questions/s, "
            f"{tally.tokens / tally.seconds:.0f} tokens/s"
        )
    failed = f", {tally.failed} failed (see 'error' in the rows; --retry-failed tries again)" if tally.failed else ""
    STDERR_CONSOLE.print(f"{tally.done} of {tally.total} questions in {out}{failed}{pace}. Look: knowgate report {out}")


def _say_what_was_found(folder: RunFolder) -> None:
    """Questions without passages have no open-book answer; whoever compares the two sides should know how many."""
    without = sum(row.error is None and row.open is None for row in folder.rows())
    if without:
        STDERR_CONSOLE.print(
            f"{without} questions have no open-book answer: nothing was found for them, or the data has no contexts."
        )


def _agreement(folder: RunFolder, judge: Model | None) -> Table:
    table = Table("graders", "answers", "agree", "kappa", box=None)
    for pair in compare_graders(folder.rows(), judge):
        kappa = "-" if pair.kappa is None else f"{pair.kappa:.2f}"
        table.add_row(f"{pair.first} / {pair.second}", str(pair.n), f"{pair.agree:.1%}", kappa)
    return table


def _write_sets(folder: RunFolder, out: Path, seed: int) -> None:
    sets = build_kb_sat(folder.rows(), seed)
    for path, records in (
        (out, sets.balanced),
        (out.with_suffix(".swapped.jsonl"), sets.swapped),
        (out.with_suffix(".rare.jsonl"), sets.rare),
    ):
        write_text(path, _lines(records))
        STDERR_CONSOLE.print(f"{len(records)} questions in {path}")
    if not sets.swapped:
        STDERR_CONSOLE.print(sets.why_none_swapped, style="yellow")


def _lines(records: Sequence[dict[str, Any]]) -> str:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
