"""`knowgate fit reranker`: its options, and the measures before and after alignment."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from knowgate.cli.console import STDERR_CONSOLE, create_console
from knowgate.cli.options import SeedOption, format_command_line, parse_path
from knowgate.cli.progress import ProgressCallback, show_progress
from knowgate.core.files import check_replaceable
from knowgate.data.preferences import (
    RANK_METRIC_NAMES,
    Preference,
    PreferenceFolder,
    hash_preferences,
    load_common_settings,
)
from knowgate.data.questions import load_questions
from knowgate.errors import BadInput, BadSetting
from knowgate.retrieval import load_retriever
from knowgate.retrieval.rerankers.cross_encoder import RERANKER_MANIFEST
from knowgate.training.reranker import (
    RELEVANCE_TRAINING,
    AlignedReranker,
    fit_relevance,
    fit_reranker,
    make_relevance_groups,
)
from knowgate.training.reranker_artifact import RELEVANCE_MANIFEST, measure_ranking_gains, save_relevance, save_reranker
from knowgate.training.reranker_trainer import MINILM, RankingGroup, RerankerProgress, RerankerTrainingOptions

MIN_USEFUL_QUESTIONS = 100  # questions, below which a reranker learns next to nothing


def fit_reranker_command(
    pref: Annotated[
        list[Path] | None,
        typer.Option(
            "--pref", parser=parse_path, metavar="PREF", help="Preference folder to learn from; may be repeated."
        ),
    ] = None,
    *,
    out: Annotated[
        Path,
        typer.Option("--out", parser=parse_path, metavar="DIR", help="Folder of the reranker; use it as --rerank DIR."),
    ],
    base: Annotated[str | None, typer.Option(help="Cross-encoder to start from. Default: minilm.")] = None,
    relevance: Annotated[
        list[str] | None,
        typer.Option(help="Data whose gold answers teach the base relevance first; may be repeated. Alone: no more."),
    ] = None,
    relevance_index: Annotated[
        str | None, typer.Option(help="Index of passages without the answer for --relevance. Default: the data's own.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first questions of each --relevance.")] = None,
    loss: Annotated[str, typer.Option(help="infonce (the paper's) or listwise (graded shifts).")] = "infonce",
    temperature: Annotated[float, typer.Option(help="Of the loss.")] = 1.0,
    epochs: Annotated[int | None, typer.Option(help="Walks over the questions. Default: 1, of relevance 2.")] = None,
    batch: Annotated[int | None, typer.Option(help="Questions in a step. Default: 8, of relevance 16.")] = None,
    learning_rate: Annotated[
        float | None, typer.Option(help="Highest learning rate. Default: 6e-5, of relevance 5e-5.")
    ] = None,
    question_unread: Annotated[
        bool, typer.Option("--question-unread", help="A control: teach which passages are preferred whatever is asked.")
    ] = False,
    seed: SeedOption = 0,
) -> None:
    """Teach a cross-encoder which passages the LLM can use, from preferences; or, from --relevance alone, a base.

    Example: knowgate fit reranker --pref pref --out my-reranker
    """
    given = {"epochs": epochs, "batch": batch, "rate": learning_rate, "seed": seed}
    chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if pref:
        folders = [PreferenceFolder(folder) for folder in pref]
        settings = load_common_settings(folders)
        training = RerankerTrainingOptions(loss, temperature, **chosen)
        rows = [row for folder in folders for row in folder.rows()]
        groups = _relevance(relevance, relevance_index, limit)
        _align(rows, settings, out, base, training, groups, reads_question=not question_unread)
    elif relevance:
        _teach_relevance(relevance, relevance_index, limit, out, base, replace(RELEVANCE_TRAINING, **chosen))
    else:
        raise BadSetting(
            "fit reranker learns from preferences: give --pref PREF, made by knowgate prefer (or --relevance DATA for "
            "a base to align later)."
        )


def _align(
    rows: Sequence[Preference],
    settings: Mapping[str, Any],
    out: Path,
    base: str | None,
    training: RerankerTrainingOptions,
    relevance: list[RankingGroup] | None,
    *,
    reads_question: bool,
) -> None:
    check_replaceable(out, RERANKER_MANIFEST, "a reranker of ours")  # before the work, not after it
    with show_progress("training", "questions", STDERR_CONSOLE) as show:
        fitted = fit_reranker(
            rows, base=base or MINILM, training=training, relevance=relevance, reads_question=reads_question,
            watch=_watching(show),
        )  # fmt: skip
    save_reranker(fitted, out, settings=settings, data_hash=hash_preferences(rows), command=format_command_line())
    _say(fitted, out)


def _teach_relevance(
    specs: Sequence[str],
    index: str | None,
    limit: int | None,
    out: Path,
    base: str | None,
    training: RerankerTrainingOptions,
) -> None:
    check_replaceable(out, RELEVANCE_MANIFEST, "a reranker trained on relevance")
    groups = _relevance(specs, index, limit) or []
    with show_progress("training", "questions", STDERR_CONSOLE) as show:
        fitted = fit_relevance(groups, base=base or MINILM, training=training, watch=_watching(show))
    save_relevance(fitted, out, data=", ".join(specs), command=format_command_line())
    STDERR_CONSOLE.print(
        f"Taught relevance by {len(groups)} questions in {fitted.log.seconds:.0f} s. Align it: knowgate fit reranker "
        f"--base {out} --pref PREF --out DIR"
    )


def _relevance(specs: Sequence[str] | None, index: str | None, limit: int | None) -> list[RankingGroup] | None:
    if not specs:
        return None
    questions = [question for spec in specs for question in load_questions(spec, limit)]
    groups = make_relevance_groups(questions, load_retriever(index) if index else None)
    if not groups:
        raise BadInput(
            f"{', '.join(specs)} has no question with a passage that holds its answer; --relevance needs some."
        )
    return groups


def _watching(show: ProgressCallback) -> Callable[[str, RerankerProgress], None]:
    def watch(stage: str, step: RerankerProgress) -> None:
        show(step.done, step.total, f"{step.rate:.1f} questions/s, loss {step.loss:.3f}", stage=stage)

    return watch


def _say(fitted: AlignedReranker, out: Path) -> None:
    gains = measure_ranking_gains(fitted)
    if fitted.tested:
        table = Table("measure", "before", "after", "gain, 95 % interval", box=None)
        for name in RANK_METRIC_NAMES:
            table.add_row(name, *(part[name].format() for part in (gains.before, gains.after, gains.gain)))
        create_console(soft_wrap=False).print(table)
    else:
        STDERR_CONSOLE.print(
            "No held-out question of these preferences has passages of both kinds, so nothing was measured. Prefer "
            "more questions (some hundred), or a folder of test questions: knowgate prefer --split test"
        )
    if fitted.alignment.groups < MIN_USEFUL_QUESTIONS:
        STDERR_CONSOLE.print(
            f"Only {fitted.alignment.groups} questions were learnt from; the paper has 7,622. Prefer more."
        )
    cut = fitted.cut
    if cut.questions or cut.passages:
        STDERR_CONSOLE.print(f"Cut to the paper's limits: {cut.questions} questions, {cut.passages} passages.")
    STDERR_CONSOLE.print(
        f"Reranker aligned on {fitted.alignment.groups} questions, measured on {len(fitted.tested)}. "
        f"Use it: knowgate ask --rerank {out}"
    )
