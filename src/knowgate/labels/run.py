"""Runs labeling from start to end, or continues an interrupted run; rows are written to a run folder."""

from __future__ import annotations

import contextlib
import logging
import platform
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from typing import Any

from knowgate.core.files import sha256_text
from knowgate.data.runs.folder import RunFolder, hash_settings
from knowgate.data.runs.rows import LabelRow
from knowgate.data.signals.samples import SEAKR_SAMPLES
from knowgate.labels.labeler import LabeledBatch, Labeler
from knowgate.labels.local_runner import LabelingPipeline, LocalRunner
from knowgate.labels.options import DEFAULT_PASSAGES, count_shown_passages
from knowgate.types import Model, Question, Runner

log = logging.getLogger(__name__)
LATER_SETTINGS = ("open_prompts",)  # settings that the first versions did not record
PORTION_SIZE = 64  # questions of similar length that are labeled together
RECORDED_PACKAGES = ("knowgate", "numpy", "torch", "transformers", "bm25s")


@dataclass(frozen=True)
class LabelProgress:
    """The progress of a label run.

    Attributes:
        total: Number of questions in the run.
        done: Number of questions that have a row, including failed ones and those of earlier sessions.
        failed: Number of rows with an error.
        fresh: Number of rows made in this session, that is, since the run was last started or continued.
        tokens: Number of tokens generated in this session.
        seconds: Duration of this session.
    """

    total: int
    done: int = 0
    failed: int = 0
    fresh: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def add(self, rows: Sequence[LabelRow], seconds: float) -> LabelProgress:
        """Return the progress after more rows. `seconds` is the duration of this session."""
        return replace(
            self,
            done=self.done + len(rows),
            fresh=self.fresh + len(rows),
            failed=self.failed + sum(row.error is not None for row in rows),
            tokens=self.tokens + sum(row.tokens for row in rows),
            seconds=seconds,
        )


def run_labeling(
    folder: RunFolder,
    questions: Sequence[Question],
    labeler: Labeler,
    *,
    data: str,
    runner: Runner | None = None,
    on_progress: Callable[[LabelProgress], None] = lambda progress: None,
) -> LabelProgress:
    """Label all questions that have no row in the folder yet, and write each batch when it is finished.

    Args:
        folder: Run folder; may hold an interrupted run with the same settings.
        questions: Questions with unique ids.
        labeler: The labeler.
        data: Name of the data, recorded in the run.
        runner: Runs the batches; None for a `LocalRunner`.
        on_progress: Called at the start and after every batch.

    Returns:
        The final progress.
    """
    settings = describe_label_run(labeler, questions, data)
    with folder.exclusive():
        about = {**describe_environment(), "depth": labeler.model.depth}
        folder.start(match_started_settings(folder, settings), about)
        if labeler.options.retry_failed:
            _drop_failed_rows(folder)
        done = folder.done()
        n_failed = sum(error is not None for error in done.values())
        writer = BatchWriter(folder, LabelProgress(len(questions), len(done), n_failed), on_progress)
        on_progress(writer.progress)
        remaining = group_by_length([question for question in questions if question.id not in done])
        try:
            _run_batches(runner or choose_local_runner(labeler.model), remaining, labeler, writer.write)
        finally:
            _record_totals(folder, writer.progress)
    return writer.progress


def _drop_failed_rows(folder: RunFolder) -> None:
    """Remove the rows of failed questions, so that these questions are labeled again."""
    if n_dropped := folder.drop_failed():
        log.info("labeling %d failed questions again", n_dropped)


@dataclass
class BatchWriter:
    """Writes finished batches to a run folder, and reports the progress after each.

    Attributes:
        folder: The run folder.
        progress: The progress so far.
        on_progress: Called with the progress after each batch.
        started: When this session began, in seconds of `time.perf_counter`.
    """

    folder: RunFolder
    progress: LabelProgress
    on_progress: Callable[[LabelProgress], None]
    started: float = field(default_factory=time.perf_counter)

    def write(self, batch: LabeledBatch) -> None:
        """Write a batch, and report the progress."""
        self.folder.append(batch.rows, batch.vectors)
        self.progress = self.progress.add(batch.rows, time.perf_counter() - self.started)
        self.on_progress(self.progress)


def _run_batches(
    runner: Runner, questions: Sequence[Question], labeler: Labeler, write: Callable[[LabeledBatch], None]
) -> None:
    """Label all questions in batches, and write each finished batch."""
    if not isinstance(runner, LocalRunner):
        for batch in runner.run(questions, labeler.label):
            write(batch)
        return
    with LabelingPipeline(labeler, questions, write) as work:
        for _ in runner.run(questions, work):
            pass  # the pipeline writes the batches itself


def choose_local_runner(model: Model) -> LocalRunner:
    """Return a runner in this process. Models may say how large their first batch should be; by default it is small."""
    return LocalRunner(first=getattr(model, "first_batch_size", LocalRunner.first))


def group_by_length(questions: Sequence[Question]) -> list[Question]:
    """Reorder questions to put similar lengths side by side.

    Groups are shuffled, so the speed so far predicts the remaining time.
    """
    if len(questions) <= PORTION_SIZE:
        return list(questions)
    ordered = sorted(questions, key=_get_length)
    portions = [ordered[start : start + PORTION_SIZE] for start in range(0, len(ordered), PORTION_SIZE)]
    random.Random(0).shuffle(portions)
    return [question for portion in portions for question in portion]


def _get_length(question: Question) -> int:
    """Return the number of characters of a question and its contexts."""
    return len(question.text) + sum(len(passage.text) for passage in question.contexts)


def _record_totals(folder: RunFolder, progress: LabelProgress) -> None:
    """Add the work of this session to the totals in the manifest of the run."""
    earlier = folder.manifest().get("totals", {})
    seconds = earlier.get("seconds", 0.0) + progress.seconds
    tokens = earlier.get("tokens", 0) + progress.tokens
    rows = earlier.get("rows", 0) + progress.fresh
    totals: dict[str, Any] = {
        "questions": progress.total,
        "rows": rows,
        "failed": progress.failed,
        "seconds": round(seconds, 3),
        "tokens": tokens,
    }
    if seconds > 0:
        totals |= {"questions_per_second": round(rows / seconds, 4), "tokens_per_second": round(tokens / seconds, 2)}
    folder.update(totals=totals, updated=_format_now())


def describe_label_run(labeler: Labeler, questions: Sequence[Question], data: str) -> dict[str, Any]:
    """Return the settings that identify a run.

    Unused settings are left out, so runs of older versions can be continued.
    """
    options, retriever = labeler.options, labeler.retriever
    # Without `k`, a search or a reranker selects a default number of passages. Otherwise, all contexts are shown.
    has_default_k = labeler.reranker is not None or (retriever is not None and not options.closed_book)
    settings: dict[str, Any] = {
        "data": data,
        "data_fingerprint": fingerprint_questions(questions),
        "questions": len(questions),
        "model": labeler.model.name,
        "model_fingerprint": labeler.model.fingerprint,
        "prompts_fingerprint": labeler.prompts.fingerprint,
        "retriever": retriever.name if retriever else "contexts",
        "retriever_fingerprint": retriever.fingerprint if retriever else None,
        "grader": labeler.grader.name,
        **{name: getattr(options, name) for name in ("samples", "temperature", "max_tokens", "seed", "mask")},
        "k": DEFAULT_PASSAGES if options.k is None and has_default_k else options.k,
        "layers": list(labeler.layers),
        "open_book": not options.closed_book,
    }
    if not options.closed_book:
        settings["open_prompts"] = labeler.prompts.open_book_fingerprint
    settings |= _describe_optional_parts(labeler)
    settings |= build_synthetic_setting(questions)
    return {**settings, "hash": hash_settings(settings)}


def _describe_optional_parts(labeler: Labeler) -> dict[str, Any]:
    """Return the settings that only some runs have, such as those of a reranker or of further answers."""
    options, reranker, second_grader = labeler.options, labeler.reranker, labeler.second_grader
    settings: dict[str, Any] = {
        "second_grader": second_grader and second_grader.name,
        "candidates": options.candidates if reranker else None,
        "reranker": reranker and reranker.name,
        "reranker_fingerprint": reranker and reranker.fingerprint,
        "open_samples": options.open_samples,
        "mask_samples": options.mask_samples or None,
        "iterative": options.iterative or None,
    }
    if not options.sampling.keeps_all_tokens:  # samples are drawn from a part of the tokens
        settings |= {"top_p": options.top_p, "top_k": options.top_k}
    if options.seakr:
        settings |= {"seakr": SEAKR_SAMPLES, "seakr_layer": labeler.seakr_layer, "seakr_at": "end token"}
    return {name: value for name, value in settings.items() if value is not None}


def match_started_settings(folder: RunFolder, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in the form of the version that started the run, so that they can be compared with the run's.

    Older versions did not record `open_prompts`, and recorded None for the default `k`.
    """
    is_started = (folder.path / folder.manifest_name).is_file()
    if not is_started:
        return dict(settings)
    recorded = folder.manifest().get("settings", {})
    matched = {key: value for key, value in settings.items() if key not in LATER_SETTINGS or key in recorded}
    default_k = count_shown_passages(None, settings["retriever_fingerprint"])
    if recorded.get("k") is None and settings["k"] == default_k:
        matched["k"] = None
    return matched


def build_synthetic_setting(questions: Sequence[Question]) -> dict[str, int]:
    """Return the setting `synthetic`: the number of questions written by an LLM."""
    count = sum(question.is_synthetic for question in questions)
    return {"synthetic": count} if count else {}


def fingerprint_questions(questions: Sequence[Question]) -> str:
    """Return a fingerprint of the ids, texts, gold answers and choices of questions."""
    parts = [f"{question.id}\n{question.text}\n{question.answers}\n{question.choices}" for question in questions]
    return sha256_text(*parts)[:16]


def describe_environment() -> dict[str, Any]:
    """Return the start time, package versions and machine type, for reproducibility."""
    versions = {}
    for package in RECORDED_PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    machine = {"python": platform.python_version(), "machine": platform.machine(), "system": platform.system()}
    return {"started": _format_now(), "versions": versions, "machine": machine}


def _format_now() -> str:
    """Return the current time (UTC) in ISO format."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
