"""The knowledge boundary of one run in numbers (Zhang et al., KBM, section 3, Figures 1-3). Knows rows; no files.

Failed questions are counted and left out. A question without gold answers has a certainty but no mastery.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from knowgate.data.runs.folder import RunFolder
from knowgate.data.runs.rows import LabelRow
from knowgate.data.runs.table import check_unique_runs, warn_if_unfinished
from knowgate.data.signals.samples import Effect
from knowgate.evaluation.boundary_measures import (
    INDICATORS,
    TOLERANCE,
    QuestionFacts,
    RunSlice,
    SavingCurve,
    compute_run_slices,
    compute_saving_curve,
    extract_facts,
)
from knowgate.stats.proportions import (
    Correlation,
    GraderAgreement,
    Proportion,
    estimate_proportion,
    measure_agreement,
    pearson_correlation,
)

INTERVAL_COUNT = 5
PANEL_SIDES = ("open", "mask")  # of Figure 3, beside that of the closed book
MAX_EXTREME_QUESTIONS = 20
MAX_ERROR_KINDS = 3  # kinds of error that are shown


@dataclass(frozen=True)
class RowCounts:
    """rows are all of them; failed ones are left out of everything else. guarded and unparsable count verdicts."""

    rows: int
    failed: int
    reasons: tuple[tuple[str, int], ...]
    without_gold: int
    with_open: int
    with_mask: int
    guarded: int
    unparsable: int
    cut: int
    seconds: float
    tokens: int
    graders: tuple[tuple[str, int], ...]
    synthetic: int = 0  # questions that an LLM wrote


@dataclass(frozen=True)
class BoundaryAccuracy:
    """Of the greedy answers. matched: closed-book, on the questions of `open` only, so that both can be compared."""

    closed: Proportion
    open: Proportion
    mask: Proportion
    matched: Proportion


@dataclass(frozen=True)
class RetrievalBenefit:
    """How often retrieval made the greedy answer right (+1), changed nothing (0), made it wrong (-1)."""

    helps: int
    neutral: int
    hurts: int


@dataclass(frozen=True)
class EffectInterval:
    """What retrieval did to the questions whose indicator lies in [low, high), the last one closed."""

    low: float
    high: float
    beneficial: int
    neutral: int
    harmful: int

    @property
    def n(self) -> int:
        return self.beneficial + self.neutral + self.harmful


@dataclass(frozen=True)
class CopyRate:
    """MASK answers to questions whose open-book samples all agree (certainty 1), as KBM section 3.3 counts them.

    is_mask: the answer is the word MASK. says_mask: it holds the word. anywhere: is_mask whatever the certainty.
    under_mask: is_mask where the MASK samples all agree, the other way to read the paper; none without such samples.
    """

    is_mask: Proportion
    says_mask: Proportion
    anywhere: Proportion
    under_mask: Proportion


@dataclass(frozen=True)
class KnowledgeBoundary:
    """Everything the report says about a run. Mappings are by indicator: mastery, certainty.

    effects: over intervals of the closed-book indicator; panels: of the open-book and of the MASK one, by side.
    """

    counts: RowCounts
    accuracy: BoundaryAccuracy
    benefit: RetrievalBenefit
    effects: Mapping[str, tuple[EffectInterval, ...]]
    panels: Mapping[str, Mapping[str, tuple[EffectInterval, ...]]]
    correlation: Correlation
    savings: Mapping[str, SavingCurve | None]
    copying: CopyRate | None
    slices: tuple[RunSlice, ...]
    agreements: tuple[GraderAgreement, ...]
    harmed: tuple[LabelRow, ...]
    helped: tuple[LabelRow, ...]


def measure_boundary(rows: Iterable[LabelRow]) -> KnowledgeBoundary:
    """One pass over the rows; of each only the facts are kept, and of the extreme ones everything."""
    tally, reasons, graders = Counter[str](), Counter[str](), Counter[str]()
    facts: list[QuestionFacts] = []
    harmed: list[LabelRow] = []
    helped: list[LabelRow] = []
    seconds = 0.0
    for row in rows:
        tally.update(rows=1, guarded=row.guarded, unparsable=row.unparsable, cut=bool(row.cut), tokens=row.tokens)
        tally["synthetic"] += row.is_synthetic
        seconds += row.seconds
        if row.error is not None:
            reasons[row.error] += 1
            continue
        graders[row.grader or "not recorded"] += 1
        facts.append(extract_facts(row))
        if (key := measure_retrieval_change(row)) < (0, 0):
            harmed = heapq.nsmallest(MAX_EXTREME_QUESTIONS, [*harmed, row], key=measure_retrieval_change)
        elif key > (0, 0):
            helped = heapq.nlargest(MAX_EXTREME_QUESTIONS, [*helped, row], key=measure_retrieval_change)
    counts = _counts(facts, tally, reasons, graders, seconds)
    return _boundary(facts, counts, tuple(harmed), tuple(helped))


def measure_retrieval_change(row: LabelRow) -> tuple[float, int]:
    """What retrieval did: by how much mastery rose, then the benefit; (0, 0) where neither is known."""
    before = row.closed.mastery if row.closed else None
    after = row.open.mastery if row.open else None
    rise = 0.0 if before is None or after is None else round(after - before, 6)
    return rise, row.benefit or 0


def _counts(
    facts: Sequence[QuestionFacts], tally: Counter[str], reasons: Counter[str], graders: Counter[str], seconds: float
) -> RowCounts:
    return RowCounts(
        rows=tally["rows"],
        failed=reasons.total(),
        reasons=tuple(reasons.most_common(MAX_ERROR_KINDS)),
        without_gold=sum(not fact.has_gold for fact in facts),
        with_open=sum(fact.has_open for fact in facts),
        with_mask=sum(fact.is_mask is not None for fact in facts),
        guarded=tally["guarded"],
        unparsable=tally["unparsable"],
        cut=tally["cut"],
        seconds=seconds,
        tokens=tally["tokens"],
        graders=tuple(graders.most_common()),
        synthetic=tally["synthetic"],
    )


def _boundary(
    facts: Sequence[QuestionFacts], counts: RowCounts, harmed: tuple[LabelRow, ...], helped: tuple[LabelRow, ...]
) -> KnowledgeBoundary:
    closed, opened, mask = (
        estimate_proportion(getattr(fact, side) for fact in facts) for side in ("closed", "open", "mask")
    )
    matched = estimate_proportion(fact.closed for fact in facts if fact.open is not None)
    benefits = Counter(fact.benefit for fact in facts)
    return KnowledgeBoundary(
        counts=counts,
        accuracy=BoundaryAccuracy(closed, opened, mask, matched),
        benefit=RetrievalBenefit(benefits[1], benefits[0], benefits[-1]),
        effects={name: count_effects(facts, name) for name in INDICATORS},
        panels={side: {name: count_effects(facts, name, side) for name in INDICATORS} for side in PANEL_SIDES},
        correlation=correlate_indicators(facts),
        savings={name: compute_saving_curve(facts, name) for name in INDICATORS},
        copying=measure_copy_rate(facts),
        slices=compute_run_slices(facts),
        agreements=measure_grader_agreement(facts),
        harmed=harmed,
        helped=helped,
    )


def count_effects(facts: Sequence[QuestionFacts], indicator: str, side: str = "closed") -> tuple[EffectInterval, ...]:
    """Effects per interval [0, .2) ... [.8, 1] of an indicator: closed-book, with passages, or with MASK passages."""
    counted = Counter(
        (min(INTERVAL_COUNT - 1, int(value * INTERVAL_COUNT + TOLERANCE)), fact.effects[indicator])
        for fact in facts
        if (value := _indicator(fact, indicator, side)) is not None
    )
    return tuple(
        EffectInterval(
            number / INTERVAL_COUNT,
            (number + 1) / INTERVAL_COUNT,
            *(counted[number, effect.value] for effect in Effect),
        )
        for number in range(INTERVAL_COUNT)
    )


def _indicator(fact: QuestionFacts, indicator: str, side: str) -> float | None:
    return fact.indicators[indicator] if side == "closed" else fact.shown.get(side, {}).get(indicator)


def correlate_indicators(facts: Sequence[QuestionFacts]) -> Correlation:
    """Pearson's r of closed-book mastery and certainty."""
    pairs = [(fact.indicators["mastery"], fact.indicators["certainty"]) for fact in facts]
    known = [(first, second) for first, second in pairs if first is not None and second is not None]
    return pearson_correlation([first for first, _ in known], [second for _, second in known])


def measure_copy_rate(facts: Sequence[QuestionFacts]) -> CopyRate | None:
    """None when the run has no MASK answers."""
    masked = [fact for fact in facts if fact.is_mask is not None]
    if not masked:
        return None
    certain = [fact for fact in masked if fact.open_certainty is not None and fact.open_certainty >= 1 - TOLERANCE]
    return CopyRate(
        is_mask=estimate_proportion(fact.is_mask for fact in certain),
        says_mask=estimate_proportion(fact.says_mask for fact in certain),
        anywhere=estimate_proportion(fact.is_mask for fact in masked),
        under_mask=estimate_proportion(
            fact.is_mask for fact in masked if (_indicator(fact, "certainty", "mask") or 0) >= 1 - TOLERANCE
        ),
    )


def measure_grader_agreement(facts: Sequence[QuestionFacts]) -> tuple[GraderAgreement, ...]:
    """Every pair of graders over the greedy answers that both have graded."""
    agreed = []
    for side in ("closed", "open"):
        verdicts = [fact.verdicts[side] for fact in facts if side in fact.verdicts]
        names = dict.fromkeys(name for graders in verdicts for name in graders)
        for first, second in combinations(names, 2):
            pairs = [(graders[first], graders[second]) for graders in verdicts if {first, second} <= graders.keys()]
            if pairs:
                agreed.append(measure_agreement(side, (first, second), pairs))
    return tuple(agreed)


@dataclass(frozen=True)
class RunReport:
    """A run as the report shows it. `name` is its model's where that tells the runs apart, else its folder's."""

    name: str
    path: Path
    model: str
    data: str
    grader: str
    samples: str
    temperature: str
    boundary: KnowledgeBoundary


def read_run_reports(paths: Sequence[Path]) -> list[RunReport]:
    """The runs in the order given."""
    check_unique_runs(paths)
    return _named([_read(path) for path in paths])


def _read(path: Path) -> RunReport:
    folder = RunFolder(path)
    manifest = folder.manifest()
    boundary = measure_boundary(folder.rows())
    warn_if_unfinished(path, boundary.counts.rows, manifest.get("settings", {}).get("questions"))
    graders = boundary.counts.graders
    recorded = ", ".join(name if len(graders) == 1 else f"{name} ({count})" for name, count in graders)
    return RunReport(
        name="",
        path=path,
        model=_setting(manifest, "model"),
        data=_setting(manifest, "data"),
        grader=recorded or _setting(manifest, "grade", "grader"),
        samples=_setting(manifest, "samples"),
        temperature=_drawn(manifest),
        boundary=boundary,
    )


def _drawn(manifest: Mapping[str, Any]) -> str:
    """The temperature, and what was cut off if anything was."""
    settings = manifest.get("settings") or {}
    cut = [f"{name} {settings[name]}" for name in ("top_p", "top_k") if name in settings]
    return ", ".join([_setting(manifest, "temperature"), *cut])


def _setting(manifest: Mapping[str, Any], *names: str) -> str:
    """A setting of the run, or something written beside its settings."""
    for settings in (manifest.get("settings") or {}, manifest):
        for name in names:
            if settings.get(name) is not None:
                return str(settings[name])
    return "not recorded"


def _named(runs: Sequence[RunReport]) -> list[RunReport]:
    choices: tuple[Callable[[RunReport], str], ...] = (
        lambda run: run.model.split("@")[0],  # without the address of its server
        lambda run: run.model,
        lambda run: run.path.resolve().name,
        lambda run: str(run.path),
    )
    for choose in choices:
        names = [choose(run) for run in runs]
        if len(set(names)) == len(runs):
            break
    return [dataclasses.replace(run, name=name) for run, name in zip(runs, names, strict=True)]


def run_report_to_dict(run: RunReport) -> dict[str, Any]:
    """The run's numbers as plain data; extreme questions in brief, with the ids of their passages."""
    boundary = run.boundary
    brief = {name: [_brief(row) for row in getattr(boundary, name)] for name in ("harmed", "helped")}
    numbers = dataclasses.asdict(dataclasses.replace(boundary, harmed=(), helped=()))
    about = {item.name: str(getattr(run, item.name)) for item in dataclasses.fields(run) if item.name != "boundary"}
    return {**about, **numbers, **brief}


def _brief(row: LabelRow) -> dict[str, Any]:
    sides = {"closed": row.closed, "open": row.open, "mask": row.mask}
    return {
        "id": row.id,
        "question": row.question,
        "answers": list(row.answers),
        **{name: side.text for name, side in sides.items() if side is not None},
        "mastery_change": measure_retrieval_change(row)[0],
        "benefit": row.benefit,
        "passages": [passage.id for passage in row.passages],
    }
