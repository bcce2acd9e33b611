"""A preference run from start to end, or from where it was: questions in, a preference folder out."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from knowgate.errors import BadInput
from knowgate.files import new_file
from knowgate.labels import LocalRunner, about, fingerprint_questions
from knowgate.preferences.measure import Benefit, Confidence, Preferrer
from knowgate.preferences.record import PAIRS, Preference, PreferenceFolder, paper_record
from knowgate.runs import disk_error
from knowgate.types import Question, Runner

BATCH = LocalRunner(largest=256)  # questions; each has some 20 prompts, and a GPU reads thousands in a few seconds


@dataclass(frozen=True)
class PreferenceCounts:
    """How far a run is, and what was left out. `fresh`, `prompts` and `seconds` are those of this start."""

    total: int
    done: int = 0
    kept: int = 0
    one_sided: int = 0  # without positives, or without negatives
    bare: int = 0  # without candidates
    failed: int = 0
    duplicates: int = 0
    cut: int = 0
    fresh: int = 0
    prompts: int = 0
    seconds: float = 0.0

    def plus(self, rows: Sequence[Preference], *, fresh: bool = True, seconds: float = 0.0) -> PreferenceCounts:
        good = [row for row in rows if row.error is None]
        return replace(
            self,
            done=self.done + len(rows),
            kept=self.kept + sum(row.is_kept for row in good),
            one_sided=self.one_sided + sum(bool(row.candidates) and not row.is_kept for row in good),
            bare=self.bare + sum(not row.candidates for row in good),
            failed=self.failed + len(rows) - len(good),
            duplicates=self.duplicates + sum(row.duplicates for row in good),
            cut=self.cut + sum(row.cut for row in good),
            fresh=self.fresh + fresh * len(rows),
            prompts=self.prompts + fresh * sum(1 + len(row.candidates) for row in good),
            seconds=seconds,
        )


def prefer_run(
    folder: PreferenceFolder,
    questions: Sequence[Question],
    preferrer: Preferrer,
    *,
    data: str,
    runner: Runner = BATCH,
    on_progress: Callable[[PreferenceCounts], None] = lambda counts: None,
) -> PreferenceCounts:
    """Measure all questions that have no row yet; every finished batch is on disk before the next begins."""
    with folder.exclusive():
        try:
            counts = _run(folder, questions, preferrer, data, runner, on_progress)
            _write_pairs(folder)
        except OSError as error:
            raise disk_error(error, folder.path) from error
    _check(counts, preferrer)
    return counts


def _run(
    folder: PreferenceFolder,
    questions: Sequence[Question],
    preferrer: Preferrer,
    data: str,
    runner: Runner,
    on_progress: Callable[[PreferenceCounts], None],
) -> PreferenceCounts:
    folder.start(describe(preferrer, questions, data), about())
    counts, done = PreferenceCounts(len(questions)), set[str]()
    for row in folder.rows():
        counts = counts.plus([row], fresh=False)
        done.add(row.id)
    on_progress(counts)
    start = time.perf_counter()
    try:
        for rows in runner.run([question for question in questions if question.id not in done], preferrer.prefer):
            _check_found(rows, counts, preferrer)
            folder.append(rows)
            counts = counts.plus(rows, seconds=time.perf_counter() - start)
            on_progress(counts)
    finally:
        folder.update(totals=asdict(counts))
    return counts


def describe(preferrer: Preferrer, questions: Sequence[Question], data: str) -> dict[str, Any]:
    """The settings that make a run what it is; two runs with the same ones give the same rows."""
    source, retriever = preferrer.source, preferrer.retriever
    settings: dict[str, Any] = {
        "data": data,
        "data_fingerprint": fingerprint_questions(questions),
        "questions": len(questions),
        "model": source.model.name,
        "model_fingerprint": source.model.fingerprint,
        "prompts_fingerprint": source.prompts.fingerprint,
        "retriever": retriever.name if retriever else "contexts",
        "retriever_fingerprint": retriever.fingerprint if retriever else None,
        "source": source.name,
        "candidates": preferrer.candidates,
        "top": preferrer.top,
        "seed": preferrer.seed,
        "split": preferrer.split,
    }
    if preferrer.cut is not None:  # folders begun before there was such a thing can go on
        settings["cut_to"] = preferrer.cut
    if isinstance(source, Confidence):
        made = source.gate.artefact
        settings["probe"] = {"name": made.path.name, "checksum": made.manifest["checksum"], **made.options}
    if isinstance(source, Benefit):
        settings["grader"] = source.grader.name
    return settings


def _check_found(rows: Sequence[Preference], counts: PreferenceCounts, preferrer: Preferrer) -> None:
    """Candidates are missing for everything asked so far: say so at once, not after an hour."""
    if counts.done > counts.bare or any(row.candidates or row.error for row in rows):
        return
    where = "the index holds other documents" if preferrer.retriever else "the questions have no passages of their own"
    raise BadInput(
        f"no candidate passage was found for any of the first {len(rows)} questions: {where}. "
        "Give the index of the documents they are about (--index), or data with contexts (--data)."
    )


def _check(counts: PreferenceCounts, preferrer: Preferrer) -> None:
    if counts.done == counts.total and not counts.kept:
        raise BadInput(
            f"none of {counts.total} questions has both passages that help and passages that hurt by "
            f"'{preferrer.source.name}' ({counts.one_sided} have one kind only, {counts.bare} no passages, "
            f"{counts.failed} failed): nothing can be learnt from them. Use more questions or candidates, or another "
            "--source."
        )


def _write_pairs(folder: PreferenceFolder) -> None:
    lines = (json.dumps(paper_record(row), ensure_ascii=False) + "\n" for row in folder.rows() if row.is_kept)
    with new_file(folder.path / PAIRS) as file:
        file.writelines(line.encode() for line in lines)
