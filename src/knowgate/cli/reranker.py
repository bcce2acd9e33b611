"""`knowgate prefer` measures which passages help an LLM; `knowgate fit reranker` trains a cross-encoder on that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from knowgate.cli.console import inform, print_table
from knowgate.cli.options import LabelsOption, LangOption, PromptsOption, format_command_line, path_option
from knowgate.cli.progress import ProgressCallback, show_progress
from knowgate.core.files import check_replaceable
from knowgate.core.options import Count, Options, Seed, option
from knowgate.data.preferences import (
    RANK_METRIC_NAMES,
    Preference,
    PreferenceFolder,
    hash_preferences,
    load_common_settings,
)
from knowgate.data.questions import load_questions
from knowgate.errors import BadInput, BadSetting
from knowgate.models.prompts.answers import load_answer_prompts
from knowgate.retrieval import load_retriever
from knowgate.retrieval.rerankers.cross_encoder import RERANKER_MANIFEST
from knowgate.training import reranker as training
from knowgate.training import reranker_artifact as artifact
from knowgate.training.fit_function import FitProgressCallback
from knowgate.training.preference_run import PreferenceOptions, PreferenceProgress, measure_preferences
from knowgate.training.reranker import MINILM
from knowgate.training.reranker_trainer import RankingGroup, RerankerTrainingOptions, TrainingLog

MIN_USEFUL_QUESTIONS = 100  # with fewer, a reranker learns next to nothing
PAPER_QUESTIONS = 7_622  # training questions of the CBDR paper


class FitRerankerOptions(Options):
    """Options of `knowgate fit reranker`."""

    base: str | None = option(None, "Cross-encoder to start from: minilm, a folder or a hub name. Default: minilm.")
    relevance: list[str] | None = option(
        None,
        "Questions with gold answers, such as jsonl:FILE. The reranker first learns from them which passages "
        "contain the answer. May be repeated.",
    )
    relevance_index: str | None = option(
        None, "Index to search for more passages for `relevance`. Default: only the questions' own passages."
    )
    limit: Count | None = option(None, "Maximum number of questions to use of each `relevance` set.")
    temperature: float = option(
        1.0, "Temperature of the training loss; lower values give more weight to the hardest passages.", gt=0
    )
    epochs: Count | None = option(
        None, "Number of passes over the questions. Default: 1 with --pref, 2 with `relevance` alone."
    )
    batch: Count | None = option(
        None, "Number of questions per training step. Default: 8 with --pref, 16 with `relevance` alone."
    )
    learning_rate: float | None = option(None, "Peak learning rate. Default: 6e-5 (`relevance` alone: 5e-5).", gt=0)
    question_unread: bool = option(
        False,
        "Hide the question from the reranker. This shows how much the ranking depends on the passages alone.",
        flag="--question-unread",
    )
    seed: Seed = option(0, "Random seed of the training.")
    relevance_mix: float = option(
        0.0,
        "With --pref: number of examples of relevance (which passages contain the answer) to mix in per question of "
        "--pref. They keep the reranker from forgetting what is relevant.",
        ge=0,
    )
    checks: int = option(
        6,
        "How often the dev questions are ranked during training, to keep the best weights. 0 keeps the last "
        "weights, as in the paper.",
        ge=0,
    )

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """The user's training hyperparameters, under the names of `RerankerTrainingOptions`."""
        values = {"epochs": self.epochs, "batch": self.batch, "rate": self.learning_rate, "seed": self.seed}
        return {name: value for name, value in values.items() if value is not None}


def fit_reranker_command(
    pref: Annotated[
        list[Path] | None, path_option("PREF", "Folder made by `knowgate prefer`. May be repeated.", "--pref")
    ] = None,
    *,
    out: Annotated[Path, path_option("DIR", "Folder to write to; use it as --rerank DIR.", "--out")],
    options: FitRerankerOptions,
) -> None:
    """Train a reranker (a cross-encoder) to rank passages first that help your LLM to answer.

    It learns from the folders (--pref) of knowgate prefer, which measures how passages help the LLM. With --relevance
    alone, it learns which passages contain the answer, for any LLM. Such a reranker can be aligned to your LLM later,
    with --base and --pref.

    Example: knowgate fit reranker --pref pref --out my-reranker
    """
    if pref:
        _fit_alignment([PreferenceFolder(folder) for folder in pref], out, options)
    elif options.relevance:
        _fit_relevance(out, options)
    else:
        raise BadSetting("no training data is given. Give --pref PREF (made by knowgate prefer) or --relevance DATA.")


def _fit_alignment(folders: Sequence[PreferenceFolder], out: Path, options: FitRerankerOptions) -> None:
    """Train a reranker on an LLM's preferences, save it and print its metrics.

    Preferences say which passages help the LLM to answer.
    """
    settings = load_common_settings(folders)
    rows = [row for folder in folders for row in folder.rows()]
    groups = _load_relevance_groups(options)
    check_replaceable(out, RERANKER_MANIFEST, "a reranker of ours")  # Fail before the training, not after it.
    fitted = _train_on_preferences(rows, groups, options)
    data_hash = hash_preferences(rows)
    artifact.save_reranker(fitted, out, settings=settings, data_hash=data_hash, command=format_command_line())
    _print_result(fitted, out)


def _train_on_preferences(
    rows: list[Preference], relevance: list[RankingGroup] | None, options: FitRerankerOptions
) -> training.AlignedReranker:
    """Train a reranker on preferences, with a progress bar."""
    hyperparameters = RerankerTrainingOptions(
        options.temperature, relevance_mix=options.relevance_mix, checks=options.checks, **options.hyperparameters
    )
    with show_progress("training", "questions") as show:
        return training.fit_reranker(
            rows,
            base=options.base or MINILM,
            training=hyperparameters,
            relevance=relevance,
            reads_question=not options.question_unread,
            watch=_make_watcher(show),
        )


def _fit_relevance(out: Path, options: FitRerankerOptions) -> None:
    """Train a reranker on relevance only (which passages contain the answer), and save it."""
    check_replaceable(out, artifact.RELEVANCE_MANIFEST, "a reranker trained on relevance")
    hyperparameters = replace(training.RELEVANCE_TRAINING, **options.hyperparameters)
    groups = _load_relevance_groups(options) or []
    with show_progress("training", "questions") as show:
        fitted = training.fit_relevance(
            groups, base=options.base or MINILM, training=hyperparameters, watch=_make_watcher(show)
        )
    data = ", ".join(options.relevance or [])
    artifact.save_relevance(fitted, out, data=data, command=format_command_line())
    inform(f"Trained on the relevance of {len(groups)} questions in {fitted.log.seconds:.0f} s.")
    inform(f"Align it to an LLM: knowgate fit reranker --base {out} --pref PREF --out DIR")


def _load_relevance_groups(options: FitRerankerOptions) -> list[RankingGroup] | None:
    """Load questions with passages that do and do not contain the gold answer.

    Returns:
        The questions; None if the option was not given.

    Raises:
        BadInput: No question has a passage with its gold answer.
    """
    if not options.relevance:
        return None
    questions = [question for spec in options.relevance for question in load_questions(spec, options.limit)]
    retriever = load_retriever(options.relevance_index) if options.relevance_index else None
    groups = training.make_relevance_groups(questions, retriever)
    if not groups:
        names = ", ".join(options.relevance)
        raise BadInput(
            f"no question of {names} has a passage that contains its right answer. Give other data, or --relevance-index INDEX."
        )
    return groups


def _make_watcher(show: ProgressCallback) -> FitProgressCallback:
    """Return a progress callback for the training that updates a progress bar."""
    return lambda progress: show(progress.done, progress.total, progress.words, stage=progress.stage)


def _print_result(fitted: training.AlignedReranker, out: Path) -> None:
    """Print the ranking metrics before and after training, warnings, and the next command.

    Args:
        fitted: The reranker, with its test questions in `tested`.
        out: Folder of the reranker, for the suggested command.
    """
    if fitted.tested:
        _print_ranking_gains(fitted)
    else:
        inform("No test question has passages of different effect, so the reranker was not measured on any.")
        inform("To measure it on test questions: knowgate prefer --split test, then knowgate eval-rerank.")
    _print_training_notes(fitted.alignment)
    inform(f"Reranker aligned on {fitted.alignment.groups} questions, measured on {len(fitted.tested)}.")
    inform(f"Use it: knowgate ask --rerank {out}")


def _print_training_notes(alignment: TrainingLog) -> None:
    """Print how the training changed the ranking of dev questions, and warn about few training questions."""
    selection = alignment.selection
    if selection:  # None if the last weights were kept without a check
        inform(f"P@1 of {selection.questions} dev questions: {selection.base:.3f} to {selection.chosen:.3f}.")
        if selection.share == 0:  # the share of the trained weights; 0 means that the untrained model was kept
            inform("Training did not improve the base, so it is kept. Use more questions or another --learning-rate.")
    if alignment.groups < MIN_USEFUL_QUESTIONS:
        counts = f"{alignment.groups} questions only (the CBDR paper: {PAPER_QUESTIONS:,})"
        inform(f"The reranker was trained on {counts}. Run knowgate prefer on more questions.")


def _print_ranking_gains(fitted: training.AlignedReranker) -> None:
    """Print each ranking metric before and after the training, and the gain."""
    gains = artifact.measure_ranking_gains(fitted)
    rows = []
    for metric in RANK_METRIC_NAMES:
        estimates = [gains[part][metric].format() for part in ("before", "after", "gain")]
        rows.append((metric, *estimates))
    print_table(("measure", "before", "after", "gain, 95 % interval"), rows)


def prefer(
    labels: LabelsOption,
    out: Annotated[Path, path_option("PREF", "Folder to write the measurements to. An interrupted run is continued.")],
    options: PreferenceOptions,
    model: Annotated[
        str | None, typer.Option(help="LLM that answers with each passage. Default: the LLM of the label run.")
    ] = None,
    lang: LangOption = None,
    prompts: PromptsOption = None,
) -> None:
    """Measure how each passage changes the LLM's confidence in its answer.

    `fit reranker` learns from this. Run the same command again to continue an interrupted run.

    Example: knowgate prefer --labels run --index my-index --out pref
    """
    wording = load_answer_prompts(prompts, lang)
    try:
        with show_progress("measuring", "questions") as show:
            progress = measure_preferences(
                labels,
                out,
                model=model,
                prompts=wording,
                options=options,
                on_progress=lambda state: show(state.done, state.total, _format_speed(state)),
            )
    except KeyboardInterrupt:
        count = len(PreferenceFolder(out).done())
        inform(f"{count} questions are saved in {out}. Run the same command to continue.")
        raise
    _print_summary(progress, out)


def _format_speed(progress: PreferenceProgress) -> str:
    return f"{progress.prompts / progress.seconds:.1f} prompts/s" if progress.seconds else ""


def _print_summary(progress: PreferenceProgress, out: Path) -> None:
    """Print how many questions are usable for training, and the next command.

    Usable questions have both helpful and unhelpful passages.
    """
    inform(f"{progress.kept} of {progress.done} questions have passages that help and passages that do not.")
    inform(
        f"Left out: {progress.one_sided} whose passages are all of one kind, {progress.bare} without passages, "
        f"{progress.failed} failed (see 'error' in the rows)."
    )
    inform(f"Duplicate passages dropped: {progress.duplicates}; shortened to fit the context window: {progress.cut}.")
    inform(f"Train a reranker on them: knowgate fit reranker --pref {out} --out DIR")
