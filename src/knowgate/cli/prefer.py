"""`knowgate prefer`: which passages can this LLM use?"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from knowgate.cli.console import STDERR_CONSOLE
from knowgate.cli.options import (
    LabelsOption,
    LangOption,
    LimitOption,
    PromptsOption,
    RunnerOption,
    SeedOption,
    parse_path,
)
from knowgate.cli.progress import ProgressCallback, show_progress
from knowgate.data.preferences import PreferenceFolder
from knowgate.pipeline.builder import build_prompts
from knowgate.pipeline.settings import PipelineOptions
from knowgate.training.preference_run import DEFAULT_SOURCE, PreferenceProgress
from knowgate.training.preference_run import measure_preferences as prefer_labelled


def prefer(
    labels: LabelsOption,
    out: Annotated[
        Path,
        typer.Option(
            parser=parse_path, metavar="PREF", help="Preference folder. The same command goes on where it stopped."
        ),
    ],
    gate: Annotated[
        str | None, typer.Option(metavar="PROBE", help="Fitted probe; --source confidence reads its shift.")
    ] = None,
    index: Annotated[
        str | None, typer.Option(help="Index folder, http:URL or a search engine that candidates come from.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Data spec whose contexts are the candidates. Default: the run's own passages.")
    ] = None,
    candidates: Annotated[int, typer.Option(min=2, help="Candidate passages of each question.")] = 20,
    source: Annotated[
        str | None,
        typer.Option(
            help="likelihood (of the gold answer), benefit (answers turned right) or confidence (shift of the probe, "
            f"as in CBDR). Default: confidence where --gate names a probe, else {DEFAULT_SOURCE}."
        ),
    ] = None,
    cut: Annotated[
        int | None,
        typer.Option(min=1, help="A control: cut all candidates to so many tokens; shorter ones are left out."),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Positives and negatives kept of each question.")] = 5,
    model: Annotated[str | None, typer.Option(help="Model spec. Default: the label run's.")] = None,
    split: Annotated[
        str | None, typer.Option(help="Put all questions in train, dev or test. Default: divided as `fit` does.")
    ] = None,
    limit: LimitOption = None,
    seed: SeedOption = 0,
    lang: LangOption = None,
    prompts: PromptsOption = None,
    runner: RunnerOption = "local",
) -> None:
    """Measure what each candidate passage does to the LLM: the data `fit reranker` learns from. Resumable.

    Example: knowgate prefer --labels run --index my-index --out pref
    """
    wording = build_prompts(PipelineOptions(lang=lang, prompts=prompts))
    try:
        with show_progress("measuring", "questions", STDERR_CONSOLE) as show:
            counts = prefer_labelled(
                labels, out, source=source, gate=gate, index=index, data=data, candidates=candidates, top=top,
                cut=cut, model=model, split=split, limit=limit, seed=seed, prompts=wording, runner=runner,
                watch=_watching(show),
            )  # fmt: skip
    except KeyboardInterrupt:
        STDERR_CONSOLE.print(
            f"{len(PreferenceFolder(out).done())} questions are safe in {out}; the same command goes on."
        )
        raise
    _summary(counts, out)


def _watching(show: ProgressCallback) -> Callable[[PreferenceProgress], None]:
    def watch(counts: PreferenceProgress) -> None:
        show(counts.done, counts.total, f"{counts.prompts / counts.seconds:.1f} prompts/s" if counts.seconds else "")

    return watch


def _summary(counts: PreferenceProgress, out: Path) -> None:
    left = (
        (counts.one_sided, "with passages of one kind only"),
        (counts.bare, "without passages"),
        (counts.failed, "failed (see 'error' in the rows)"),
    )
    dropped = "; ".join(f"{n} {why}" for n, why in left if n)
    STDERR_CONSOLE.print(
        f"{counts.kept} of {counts.done} questions have passages that help and passages that hurt"
        + (f"; left out: {dropped}" if dropped else "")
        + f". Duplicate passages dropped: {counts.duplicates}; cut to the context window: {counts.cut}."
    )
    STDERR_CONSOLE.print(f"Learn from them: knowgate fit reranker --pref {out} --out DIR")
