"""A labelling run from start to end, or from where it was: questions in, rows in a run folder out."""

from __future__ import annotations

import contextlib
import logging
import platform
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from typing import Any

from knowgate.core.files import sha256_text
from knowgate.data.row_folder import explain_disk_error
from knowgate.data.runs.folder import RunFolder, hash_settings
from knowgate.data.runs.rows import LabelRow
from knowgate.labels.labeler import LabeledBatch, Labeler
from knowgate.labels.local_runner import LabelingPipeline, LocalRunner
from knowgate.labels.options import count_shown_passages
from knowgate.types import Question, Runner

log = logging.getLogger(__name__)
LATER_SETTINGS = ("open_prompts",)  # settings that runs did not keep at first
PORTION_SIZE = 64  # questions of like length that are labelled one after another
RECORDED_PACKAGES = ("knowgate", "numpy", "torch", "transformers", "bm25s")


@dataclass(frozen=True)
class LabelProgress:
    """How far a run is. `tokens` and `seconds` are those of this start."""

    total: int
    done: int = 0
    failed: int = 0
    fresh: int = 0  # rows made by this start
    tokens: int = 0
    seconds: float = 0.0

    def plus(self, rows: Sequence[LabelRow], seconds: float) -> LabelProgress:
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
    labeller: Labeler,
    *,
    data: str,
    runner: Runner | None = None,
    retry_failed: bool = False,
    on_progress: Callable[[LabelProgress], None] = lambda tally: None,
) -> LabelProgress:
    """Label all questions that have no row yet; every finished batch is on disk before the next but one begins."""
    settings = describe_label_run(labeller, questions, data)
    with folder.exclusive(), _disk_errors(folder):
        folder.start(
            match_started_settings(folder, settings), {**describe_environment(), "depth": labeller.model.depth}
        )
        if retry_failed and (dropped := folder.drop_failed()):
            log.info("trying %d failed questions again", dropped)
        done = folder.done()
        tally = LabelProgress(len(questions), len(done), sum(error is not None for error in done.values()))
        on_progress(tally)
        waiting = group_by_length([question for question in questions if question.id not in done])
        start = time.perf_counter()

        def keep(part: LabeledBatch) -> None:
            nonlocal tally
            folder.append(part.rows, part.vectors)
            tally = tally.plus(part.rows, time.perf_counter() - start)
            on_progress(tally)

        try:
            _run(runner or LocalRunner(), waiting, labeller, keep)
        finally:
            _record(folder, tally)
    return tally


def _run(runner: Runner, waiting: Sequence[Question], labeller: Labeler, keep: Callable[[LabeledBatch], None]) -> None:
    if not isinstance(runner, LocalRunner):  # one that may do any batch anywhere
        for part in runner.run(waiting, labeller.label):
            keep(part)
        return
    with LabelingPipeline(labeller, waiting, keep) as work:
        for _ in runner.run(waiting, work):
            pass


def group_by_length(questions: Sequence[Question]) -> list[Question]:
    """Sorted by length over the whole run, so that a batch pads little, in portions that follow each other at random:
    the time that is left can be told from the time it took. A run of a single portion stays as it is."""
    if len(questions) <= PORTION_SIZE:
        return list(questions)
    rising = sorted(questions, key=_length)
    portions = [rising[place : place + PORTION_SIZE] for place in range(0, len(rising), PORTION_SIZE)]
    random.Random(0).shuffle(portions)
    return [question for portion in portions for question in portion]


def _length(question: Question) -> int:
    return len(question.text) + sum(len(passage.text) for passage in question.contexts)


def _record(folder: RunFolder, tally: LabelProgress) -> None:
    """Add this start's work to what earlier starts recorded."""
    earlier = folder.manifest().get("totals", {})
    seconds = earlier.get("seconds", 0.0) + tally.seconds
    tokens = earlier.get("tokens", 0) + tally.tokens
    fresh = earlier.get("rows", 0) + tally.fresh
    totals: dict[str, Any] = {
        "questions": tally.total,
        "rows": fresh,
        "failed": tally.failed,
        "seconds": round(seconds, 3),
        "tokens": tokens,
    }
    if seconds > 0:
        totals |= {"questions_per_second": round(fresh / seconds, 4), "tokens_per_second": round(tokens / seconds, 2)}
    folder.update(totals=totals, updated=_now())


def describe_label_run(labeller: Labeler, questions: Sequence[Question], data: str) -> dict[str, Any]:
    """The settings that make a run what it is; two runs with the same ones give the same rows."""
    retriever = labeller.retriever
    settings: dict[str, Any] = {
        "data": data,
        "data_fingerprint": fingerprint_questions(questions),
        "questions": len(questions),
        "model": labeller.model.name,
        "model_fingerprint": labeller.model.fingerprint,
        "prompts_fingerprint": labeller.prompts.fingerprint,
        "retriever": retriever.name if retriever else "contexts",
        "retriever_fingerprint": retriever.fingerprint if retriever else None,
        "grader": labeller.grader.name,
        **{key: list(value) if isinstance(value, tuple) else value for key, value in asdict(labeller.plan).items()},
        "seakr_layer": labeller.seakr_layer,
        "seakr_at": "end token",  # runs without this read it at the last token of the answers
    }
    if labeller.plan.open_book:
        settings["k"] = count_shown_passages(labeller.plan.k, settings["retriever_fingerprint"])
        settings["open_prompts"] = labeller.prompts.open_fingerprint
    if not labeller.plan.seakr:  # runs started before there was such a thing can go on
        del settings["seakr"], settings["seakr_layer"], settings["seakr_at"]
    if labeller.plan.open_samples is None:
        del settings["open_samples"]
    if reranker := labeller.reranker:
        settings |= {"reranker": reranker.name, "reranker_fingerprint": reranker.fingerprint}
    else:
        del settings["candidates"]
    if not labeller.plan.mask_samples:
        del settings["mask_samples"]
    if not labeller.plan.iterative:
        del settings["iterative"]
    if labeller.plan.sampling.is_whole:
        del settings["top_p"], settings["top_k"]
    settings |= build_synthetic_setting(questions)
    return {**settings, "hash": hash_settings(settings)}


def match_started_settings(folder: RunFolder, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings as the run in this folder would have been begun with: one of an older version can go on.

    Such runs kept k as it was given, and nothing of how passages are put to the LLM.
    """
    begun = folder.manifest().get("settings", {}) if (folder.path / folder.manifest_name).is_file() else settings
    usual = count_shown_passages(None, settings["retriever_fingerprint"])
    older = {"k": None} if begun.get("k") is None and settings["k"] == usual else {}
    known = {key: value for key, value in settings.items() if key not in LATER_SETTINGS or key in begun}
    return {**known, **older}


def build_synthetic_setting(questions: Sequence[Question]) -> dict[str, int]:
    """How many of the questions an LLM wrote; nothing where people asked all of them, as older runs have it."""
    count = sum(question.is_synthetic for question in questions)
    return {"synthetic": count} if count else {}


def fingerprint_questions(questions: Sequence[Question]) -> str:
    parts = [f"{question.id}\n{question.text}\n{question.answers}\n{question.choices}" for question in questions]
    return sha256_text(*parts)[:16]


def describe_environment() -> dict[str, Any]:
    """Versions and machine, for whoever repeats the run."""
    versions = {}
    for package in RECORDED_PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    machine = {"python": platform.python_version(), "machine": platform.machine(), "system": platform.system()}
    return {"started": _now(), "versions": versions, "machine": machine}


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


@contextlib.contextmanager
def _disk_errors(folder: RunFolder) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise explain_disk_error(error, folder.path) from error
