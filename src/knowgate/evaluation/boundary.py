"""The knowledge boundary of label runs: what the LLM knows, and what passages change (KBM, section 3, Figures 1-3).

Two indicators are measured on sampled answers: mastery (share of correct samples) and certainty (how far the samples
agree). A side is a way of answering: closed-book, open-book, or with the gold answers masked in the passages.

Failed questions are counted and left out. A question without gold answers has a certainty but no mastery.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from knowgate.data.runs.folder import RunFolder
from knowgate.data.runs.records import check_unique_runs, warn_if_unfinished
from knowgate.data.runs.rows import LabelRow
from knowgate.data.signals.samples import Effect
from knowgate.evaluation import boundary_measures as measures
from knowgate.evaluation.boundary_measures import INDICATORS, SIDES, CopyRate, QuestionFacts, RunSlice, SavingCurve
from knowgate.stats import proportions
from knowgate.stats.proportions import Correlation, GraderAgreement, Proportion, estimate_proportion

INTERVAL_COUNT = 5
MAX_EXTREME_QUESTIONS = 20
MAX_ERROR_KINDS = 3
ROW_COUNTS = ("rows", "guarded", "unparsable", "cut", "synthetic")  # counts of `RowCounts` that rows are added to
NOT_RECORDED = "not recorded"


@dataclass(frozen=True)
class RowCounts:
    """Counts of the rows of a label run. A label run records an LLM's graded answers, one row per question.

    Attributes:
        rows: Number of all rows.
        failed: Number of rows with an error. They are left out of all other measures.
        reasons: The most frequent errors as (message, count).
        without_gold: Number of questions without gold answers.
        with_open: Number of questions with an open-book answer.
        guarded: Number of answers graded as wrong because they only repeat the question.
        unparsable: Number of judge verdicts that could not be parsed.
        cut: Number of questions whose passages were shortened to fit the context window.
        graders: Each grader as (name, number of rows that it graded).
        synthetic: Number of questions that an LLM wrote.
    """

    rows: int
    failed: int
    reasons: tuple[tuple[str, int], ...]
    without_gold: int
    with_open: int
    guarded: int
    unparsable: int
    cut: int
    graders: tuple[tuple[str, int], ...]
    synthetic: int = 0


@dataclass(frozen=True)
class BoundaryAccuracy:
    """Accuracy of the greedy answers, which are generated without sampling.

    Attributes:
        closed: Accuracy without passages (closed-book).
        open: Accuracy with passages (open-book).
        mask: Accuracy with passages in which the gold answers are masked.
        matched: Accuracy without passages on the questions that have a graded answer with passages, so that the two can
            be compared.
    """

    closed: Proportion
    open: Proportion
    mask: Proportion
    matched: Proportion


@dataclass(frozen=True)
class RetrievalBenefit:
    """Numbers of greedy answers turned right, unchanged, or turned wrong by retrieval."""

    helps: int
    neutral: int
    hurts: int


@dataclass(frozen=True)
class EffectInterval:
    """Counts of questions helped or harmed by retrieval.

    The interval is of mastery (share of correct samples) or certainty (their agreement).

    Attributes:
        low: Start of the interval.
        high: End of the interval. It belongs to the next interval, except for the last one, which includes 1.
        beneficial: Number of questions for which retrieval raises the mastery (or certainty).
        neutral: Number of questions for which retrieval does not change it.
        harmful: Number of questions for which retrieval lowers it.
    """

    low: float
    high: float
    beneficial: int
    neutral: int
    harmful: int

    @property
    def n(self) -> int:
        """Number of questions in the interval."""
        return self.beneficial + self.neutral + self.harmful


@dataclass(frozen=True)
class KnowledgeBoundary:
    """Knowledge of an LLM and effect of retrieval, in one label run.

    Mastery is the share of correct samples, certainty their agreement.

    Attributes:
        counts: Numbers of rows and verdicts.
        accuracy: Accuracy of the greedy answers.
        benefit: How often retrieval turns greedy answers right or wrong.
        effects: How often retrieval helps and harms, by interval of an indicator, as `effects[side][indicator]`. The side
            is the kind of answers that the indicator is measured on: 'closed', 'open' or 'mask'.
        correlation: Correlation of closed-book mastery and certainty.
        savings: For each indicator, what is saved and lost if questions with high values skip retrieval; None if no
            question has a graded answer both with and without passages.
        copying: How often the LLM copies the word MASK; None if the run has no answers with masked passages.
        slices: The same measures on groups of questions, such as those of each language.
        agreements: Agreement of each pair of graders.
        harmed: The questions that retrieval harmed most.
        helped: The questions that retrieval helped most.
    """

    counts: RowCounts
    accuracy: BoundaryAccuracy
    benefit: RetrievalBenefit
    effects: Mapping[str, Mapping[str, tuple[EffectInterval, ...]]]
    correlation: Correlation
    savings: Mapping[str, SavingCurve | None]
    copying: CopyRate | None
    slices: tuple[RunSlice, ...]
    agreements: tuple[GraderAgreement, ...]
    harmed: tuple[LabelRow, ...]
    helped: tuple[LabelRow, ...]


def measure_boundary(rows: Iterable[LabelRow]) -> KnowledgeBoundary:
    """Measure an LLM's own knowledge and the effect of retrieval on a label run."""
    totals = Counter(dict.fromkeys(ROW_COUNTS, 0))
    errors, graders = Counter[str](), Counter[str]()
    extremes = _ExtremeRows()
    facts: list[QuestionFacts] = []  # a small summary of each row that did not fail
    for row in rows:
        totals.update(
            rows=1, guarded=row.guarded, unparsable=row.unparsable, cut=bool(row.cut), synthetic=row.is_synthetic
        )
        if row.error is not None:
            errors[row.error] += 1
            continue
        graders[row.grader or NOT_RECORDED] += 1
        facts.append(measures.extract_facts(row))
        extremes.add(row)
    counts = _make_row_counts(totals, errors, graders, facts)
    return _summarize_facts(facts, counts, extremes)


def _make_row_counts(
    totals: Mapping[str, int], errors: Counter[str], graders: Counter[str], facts: Sequence[QuestionFacts]
) -> RowCounts:
    """Collect the counts of all rows. `facts` summarize the rows that did not fail."""
    return RowCounts(
        **totals,
        failed=errors.total(),
        reasons=tuple(errors.most_common(MAX_ERROR_KINDS)),
        without_gold=sum(not fact.has_gold for fact in facts),
        with_open=sum(fact.has_open_book_answer for fact in facts),
        graders=tuple(graders.most_common()),
    )


@dataclass
class _ExtremeRows:
    """The rows that retrieval changes most. Only a few are kept, so memory does not grow with the run.

    Attributes:
        harmed: Rows whose answers passages made worse, most harmed first.
        helped: Rows whose answers passages made better, most helped first.
    """

    harmed: list[LabelRow] = field(default_factory=list)
    helped: list[LabelRow] = field(default_factory=list)

    def add(self, row: LabelRow) -> None:
        """Keep the row if it is among the most harmed or most helped ones."""
        change = measure_retrieval_change(row)
        if change < NO_CHANGE:
            candidates = [*self.harmed, row]
            self.harmed = heapq.nsmallest(MAX_EXTREME_QUESTIONS, candidates, key=measure_retrieval_change)
        elif change > NO_CHANGE:
            candidates = [*self.helped, row]
            self.helped = heapq.nlargest(MAX_EXTREME_QUESTIONS, candidates, key=measure_retrieval_change)


class RetrievalChange(NamedTuple):
    """Effect of retrieval on one question. Changes sort from most harmful to most helpful.

    Attributes:
        mastery: Rise of mastery, which is the share of correct sampled answers; 0 if unknown.
        benefit: 1 if retrieval turns the greedy answer right, -1 if it turns it wrong, 0 if neither or unknown.
    """

    mastery: float
    benefit: int


NO_CHANGE = RetrievalChange(0.0, 0)


def measure_retrieval_change(row: LabelRow) -> RetrievalChange:
    """Measure how passages change the answers to a question."""
    without = row.closed.mastery if row.closed else None
    with_passages = row.open.mastery if row.open else None
    rise = 0.0 if without is None or with_passages is None else round(with_passages - without, 6)
    return RetrievalChange(mastery=rise, benefit=row.benefit or 0)


def _summarize_facts(facts: Sequence[QuestionFacts], counts: RowCounts, extremes: _ExtremeRows) -> KnowledgeBoundary:
    """Compute all measures of a label run from facts about its questions."""
    benefits = Counter(fact.benefit for fact in facts)
    return KnowledgeBoundary(
        counts=counts,
        accuracy=_estimate_accuracy(facts),
        benefit=RetrievalBenefit(helps=benefits[1], neutral=benefits[0], hurts=benefits[-1]),
        effects={side: {name: count_effects(facts, name, side) for name in INDICATORS} for side in SIDES},
        correlation=correlate_indicators(facts),
        savings={name: measures.compute_saving_curve(facts, name) for name in INDICATORS},
        copying=measures.measure_copy_rate(facts),
        slices=measures.compute_run_slices(facts),
        agreements=measure_grader_agreement(facts),
        harmed=tuple(extremes.harmed),
        helped=tuple(extremes.helped),
    )


def _estimate_accuracy(facts: Sequence[QuestionFacts]) -> BoundaryAccuracy:
    """Estimate the accuracy of the greedy answers of each side."""
    accuracy = {side: estimate_proportion(fact.correct[side] for fact in facts) for side in SIDES}
    graded_open_book = [fact for fact in facts if fact.correct["open"] is not None]
    matched = estimate_proportion(fact.correct["closed"] for fact in graded_open_book)
    return BoundaryAccuracy(**accuracy, matched=matched)


def count_effects(facts: Sequence[QuestionFacts], indicator: str, side: str) -> tuple[EffectInterval, ...]:
    """Count how often retrieval helps or hurts, by interval of mastery or certainty.

    Args:
        facts: The questions.
        indicator: 'mastery' (share of right samples) or 'certainty' (how far they agree), divided into intervals.
        side: The answers on which the indicator is measured: 'closed' (without passages), 'open' (with passages) or
            'mask' (with passages in which the gold answers are masked).
    """
    effects_by_interval = [Counter[str | None]() for _ in range(INTERVAL_COUNT)]
    for fact in facts:
        value = fact.indicators[side][indicator]
        if value is not None:
            number = int(value * INTERVAL_COUNT + measures.TOLERANCE)  # the tolerance absorbs rounding errors
            number = min(number, INTERVAL_COUNT - 1)  # the value 1 belongs to the last interval
            effects_by_interval[number][fact.effects[indicator]] += 1
    limits = [number / INTERVAL_COUNT for number in range(INTERVAL_COUNT + 1)]
    # The values of `Effect` are the names of the fields: beneficial, neutral and harmful.
    fields = [{effect.value: counts[effect] for effect in Effect} for counts in effects_by_interval]
    return tuple(EffectInterval(*interval, **counts) for interval, counts in zip(pairwise(limits), fields, strict=True))


def correlate_indicators(facts: Sequence[QuestionFacts]) -> Correlation:
    """Correlate mastery and certainty of answers without passages.

    Mastery is the share of right samples, certainty their agreement.
    """
    pairs = [(fact.indicators["closed"]["mastery"], fact.indicators["closed"]["certainty"]) for fact in facts]
    known = [(mastery, certainty) for mastery, certainty in pairs if mastery is not None and certainty is not None]
    return proportions.pearson_correlation([mastery for mastery, _ in known], [certainty for _, certainty in known])


def measure_grader_agreement(facts: Sequence[QuestionFacts]) -> tuple[GraderAgreement, ...]:
    """Measure how often each pair of graders gives the same verdict on an answer."""
    agreements = []
    for side in ("closed", "open"):  # answers without and with passages
        verdicts = [fact.verdicts[side] for fact in facts if side in fact.verdicts]  # by grader, for each question
        graders = dict.fromkeys(name for by_grader in verdicts for name in by_grader)  # unique, in order
        for first, second in combinations(graders, 2):
            graded_by_both = [by_grader for by_grader in verdicts if first in by_grader and second in by_grader]
            pairs = [(by_grader[first], by_grader[second]) for by_grader in graded_by_both]
            if pairs:
                agreements.append(proportions.measure_agreement(side, (first, second), pairs))
    return tuple(agreements)


# --- run folders ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunReport:
    """Content of the report on one label run. A label run is a folder of questions with an LLM's graded answers.

    Attributes:
        name: The model's name, or the folder's if several runs share a model.
        path: Folder of the run.
        settings: The model, data, grader, samples per answer and temperature of the run, as texts.
        boundary: What was measured.
    """

    name: str
    path: Path
    settings: Mapping[str, str]
    boundary: KnowledgeBoundary


def read_run_reports(paths: Sequence[Path]) -> list[RunReport]:
    """Read label runs and measure the knowledge of each LLM. A label run is a folder of recorded answers."""
    check_unique_runs(paths)
    return _assign_names([_read_run_report(path) for path in paths])


def _read_run_report(path: Path) -> RunReport:
    """Read a label run and measure the LLM's knowledge. The name of the report stays empty."""
    folder = RunFolder(path)
    manifest = folder.manifest()
    boundary = measure_boundary(folder.rows())
    n_expected = (manifest.get("settings") or {}).get("questions")
    warn_if_unfinished(path, boundary.counts.rows, n_expected)
    settings = {
        "model": _get_setting(manifest, "model"),
        "data": _get_setting(manifest, "data"),
        "grader": _describe_graders(boundary.counts) or _get_setting(manifest, "grade", "grader"),
        "samples": _get_setting(manifest, "samples"),
        "temperature": _describe_sampling(manifest),
    }
    return RunReport("", path, settings, boundary)


def _describe_graders(counts: RowCounts) -> str:
    """List the graders of a label run with their numbers of rows."""
    if len(counts.graders) == 1:
        grader, _ = counts.graders[0]  # the count would be that of all rows
        return grader
    return ", ".join(f"{grader} ({count})" for grader, count in counts.graders)


def _describe_sampling(manifest: Mapping[str, Any]) -> str:
    """Describe the temperature and other sampling settings, such as '0.7, top_p 0.9'."""
    settings = manifest.get("settings") or {}
    limits = [f"{name} {settings[name]}" for name in ("top_p", "top_k") if name in settings]
    return ", ".join([_get_setting(manifest, "temperature"), *limits])


def _get_setting(manifest: Mapping[str, Any], *names: str) -> str:
    """Return the first recorded setting of a label run among `names`, as text."""
    for settings in (manifest.get("settings") or {}, manifest):
        for name in names:
            if settings.get(name) is not None:
                return str(settings[name])
    return NOT_RECORDED


def _assign_names(runs: Sequence[RunReport]) -> list[RunReport]:
    """Name each run after its model, its folder or its path, whichever first tells all runs apart."""
    models = [run.settings["model"].split("@")[0] for run in runs]  # without the address of a server
    folders = [run.path.resolve().name for run in runs]
    paths = [str(run.path) for run in runs]
    names = next((names for names in (models, folders) if len(set(names)) == len(runs)), paths)
    return [dataclasses.replace(run, name=name) for run, name in zip(runs, names, strict=True)]


def run_report_to_dict(run: RunReport) -> dict[str, Any]:
    """Convert a run report to plain data for JSON. The most harmed and helped questions are shortened."""
    boundary = run.boundary
    numbers = dataclasses.asdict(dataclasses.replace(boundary, harmed=(), helped=()))
    numbers["harmed"] = [_shorten_row(row) for row in boundary.harmed]
    numbers["helped"] = [_shorten_row(row) for row in boundary.helped]
    return {"name": run.name, "path": str(run.path), **run.settings, **numbers}


def _shorten_row(row: LabelRow) -> dict[str, Any]:
    """Convert a row to plain data without samples and passage texts.

    Answers: 'closed' (without passages), 'open' (with passages), 'mask' (with the gold answers masked in the passages).
    """
    answers = {"closed": row.closed, "open": row.open, "mask": row.mask}
    return {
        "id": row.id,
        "question": row.question,
        "answers": list(row.answers),
        **{side: answer.text for side, answer in answers.items() if answer is not None},
        "mastery_change": measure_retrieval_change(row).mastery,  # of the share of correct samples
        "benefit": row.benefit,
        "passages": [passage.id for passage in row.passages],
    }
