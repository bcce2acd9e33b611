"""`knowgate fit reranker`: train a cross-encoder on preferences, and print its metrics before and after."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import Field
from rich.table import Table

from knowgate.cli.console import STDERR_CONSOLE, create_console
from knowgate.cli.options import format_command_line, parse_path
from knowgate.cli.progress import ProgressCallback, show_progress
from knowgate.core.files import check_replaceable
from knowgate.core.options import Count, Options, Seed
from knowgate.data.preferences import RANK_METRIC_NAMES, PreferenceFolder, hash_preferences, load_common_settings
from knowgate.data.questions import load_questions
from knowgate.errors import BadInput, BadSetting
from knowgate.retrieval import load_retriever
from knowgate.retrieval.rerankers.cross_encoder import RERANKER_MANIFEST
from knowgate.training import reranker as training
from knowgate.training import reranker_artifact as artifact
from knowgate.training.reranker_trainer import MINILM, RankingGroup, RerankerProgress, RerankerTrainingOptions

MIN_USEFUL_QUESTIONS = 100  # with fewer, a reranker learns next to nothing
PAPER_QUESTIONS = 7_622


class FitRerankerOptions(Options):
    """Options of `knowgate fit reranker`."""

    base: str | None = Field(default=None, description="Cross-encoder to start from. Default: minilm.")
    relevance: list[str] | None = Field(
        default=None,
        description="Data whose gold answers train relevance first; may be repeated. Without preferences: a base.",
    )
    relevance_index: str | None = Field(
        default=None, description="Index of passages without the answer for `relevance`. Default: the data's own."
    )
    limit: Count | None = Field(default=None, description="Only the first questions of each `relevance`.")
    loss: str = Field(default="infonce", description="infonce (the paper's) or listwise (graded shifts).")
    temperature: float = Field(default=1.0, description="Temperature of the loss.")
    epochs: int | None = Field(default=None, description="Passes over the questions. Default: 1, of relevance 2.")
    batch: int | None = Field(default=None, description="Questions per update. Default: 8, of relevance 16.")
    learning_rate: float | None = Field(
        default=None, description="Peak learning rate. Default: 6e-5, of relevance 5e-5."
    )
    question_unread: bool = Field(
        default=False,
        description="A control: learn which passages are preferred whatever the question is.",
        json_schema_extra={"flag": "--question-unread"},
    )
    seed: Seed = Field(default=0, description="Seed of training.")

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """Hyperparameters that were given."""
        values = {"epochs": self.epochs, "batch": self.batch, "rate": self.learning_rate, "seed": self.seed}
        return {name: value for name, value in values.items() if value is not None}


def fit_reranker_command(
    pref: Annotated[
        list[Path] | None,
        typer.Option("--pref", parser=parse_path, metavar="PREF", help="Preference folder to learn from; repeatable."),
    ] = None,
    *,
    out: Annotated[
        Path,
        typer.Option("--out", parser=parse_path, metavar="DIR", help="Folder of the reranker; use it as --rerank DIR."),
    ],
    options: FitRerankerOptions,
) -> None:
    """Train a cross-encoder on which passages the LLM can use, from preferences; or, from --relevance alone, a base.

    Example: knowgate fit reranker --pref pref --out my-reranker
    """
    if pref:
        _fit_alignment([PreferenceFolder(folder) for folder in pref], out, options)
    elif options.relevance:
        _fit_relevance(out, options)
    else:
        raise BadSetting(
            "fit reranker learns from preferences: give --pref PREF, made by knowgate prefer (or --relevance DATA for "
            "a base to align later)."
        )


def _fit_alignment(folders: Sequence[PreferenceFolder], out: Path, options: FitRerankerOptions) -> None:
    settings = load_common_settings(folders)
    hyperparameters = RerankerTrainingOptions(options.loss, options.temperature, **options.hyperparameters)
    rows = [row for folder in folders for row in folder.rows()]
    groups = _load_relevance_groups(options)
    check_replaceable(out, RERANKER_MANIFEST, "a reranker of ours")  # before the work, not after it
    with show_progress("training", "questions", STDERR_CONSOLE) as show:
        fitted = training.fit_reranker(
            rows,
            base=options.base or MINILM,
            training=hyperparameters,
            relevance=groups,
            reads_question=not options.question_unread,
            watch=_make_watcher(show),
        )
    artifact.save_reranker(
        fitted, out, settings=settings, data_hash=hash_preferences(rows), command=format_command_line()
    )
    _print_result(fitted, out)


def _fit_relevance(out: Path, options: FitRerankerOptions) -> None:
    check_replaceable(out, artifact.RELEVANCE_MANIFEST, "a reranker trained on relevance")
    hyperparameters = replace(training.RELEVANCE_TRAINING, **options.hyperparameters)
    groups = _load_relevance_groups(options) or []
    with show_progress("training", "questions", STDERR_CONSOLE) as show:
        fitted = training.fit_relevance(
            groups, base=options.base or MINILM, training=hyperparameters, watch=_make_watcher(show)
        )
    data = ", ".join(options.relevance or [])
    artifact.save_relevance(fitted, out, data=data, command=format_command_line())
    STDERR_CONSOLE.print(
        f"Trained on the relevance of {len(groups)} questions in {fitted.log.seconds:.0f} s. Align it: knowgate fit "
        f"reranker --base {out} --pref PREF --out DIR"
    )


def _load_relevance_groups(options: FitRerankerOptions) -> list[RankingGroup] | None:
    if not options.relevance:
        return None
    questions = [question for spec in options.relevance for question in load_questions(spec, options.limit)]
    retriever = load_retriever(options.relevance_index) if options.relevance_index else None
    groups = training.make_relevance_groups(questions, retriever)
    if not groups:
        names = ", ".join(options.relevance)
        raise BadInput(f"{names} has no question with a passage that contains its answer; --relevance needs some.")
    return groups


def _make_watcher(show: ProgressCallback) -> Callable[[str, RerankerProgress], None]:
    def watch(stage: str, progress: RerankerProgress) -> None:
        pace = f"{progress.rate:.1f} questions/s, loss {progress.loss:.3f}"
        show(progress.done, progress.total, pace, stage=stage)

    return watch


def _print_result(fitted: training.AlignedReranker, out: Path) -> None:
    if fitted.tested:
        create_console(soft_wrap=False).print(_make_metric_table(artifact.measure_ranking_gains(fitted)))
    else:
        STDERR_CONSOLE.print(
            "No held-out question of these preferences has passages of both kinds, so nothing was measured. Prefer "
            "more questions (some hundred), or a folder of test questions: knowgate prefer --split test"
        )
    n_groups, cut = fitted.alignment.groups, fitted.cut
    if n_groups < MIN_USEFUL_QUESTIONS:
        STDERR_CONSOLE.print(
            f"Only {n_groups} questions were learned from; the paper has {PAPER_QUESTIONS:,}. Prefer more."
        )
    if cut.questions or cut.passages:
        STDERR_CONSOLE.print(f"Cut to the paper's limits: {cut.questions} questions, {cut.passages} passages.")
    STDERR_CONSOLE.print(
        f"Reranker aligned on {n_groups} questions, measured on {len(fitted.tested)}. "
        f"Use it: knowgate ask --rerank {out}"
    )


def _make_metric_table(gains: artifact.RankingGains) -> Table:
    table = Table("measure", "before", "after", "gain, 95 % interval", box=None)
    parts: Sequence[Mapping[str, Any]] = (gains.before, gains.after, gains.gain)
    for name in RANK_METRIC_NAMES:
        table.add_row(name, *(part[name].format() for part in parts))
    return table
