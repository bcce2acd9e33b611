"""The knowledge boundary of one run in numbers (Zhang et al., KBM, section 3, Figures 1-3). Knows rows; no files.

Failed questions are counted and left out. A question without gold answers has a certainty but no mastery.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from knowgate.evaluation.boundary.facts import CLOSE, INDICATORS, Fact, fact_of
from knowgate.evaluation.boundary.saving import Saving, saving
from knowgate.evaluation.boundary.slices import Slice, slices
from knowgate.runs import LabelRow
from knowgate.signals import Effect
from knowgate.statistics import Agreement, Correlation, Share, agreement, pearson, share

INTERVALS = 5
PANELS = ("open", "mask")  # of Figure 3, beside that of the closed book
EXTREMES = 20
REASONS = 3  # kinds of error that are shown


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
class Accuracy:
    """Of the greedy answers. matched: closed-book, on the questions of `open` only, so that both can be compared."""

    closed: Share
    open: Share
    mask: Share
    matched: Share


@dataclass(frozen=True)
class Benefit:
    """How often retrieval made the greedy answer right (+1), changed nothing (0), made it wrong (-1)."""

    helps: int
    neutral: int
    hurts: int


@dataclass(frozen=True)
class Interval:
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
class Copying:
    """MASK answers to questions whose open-book samples all agree (certainty 1), as KBM section 3.3 counts them.

    is_mask: the answer is the word MASK. says_mask: it holds the word. anywhere: is_mask whatever the certainty.
    under_mask: is_mask where the MASK samples all agree, the other way to read the paper; none without such samples.
    """

    is_mask: Share
    says_mask: Share
    anywhere: Share
    under_mask: Share


@dataclass(frozen=True)
class Boundary:
    """Everything the report says about a run. Mappings are by indicator: mastery, certainty.

    effects: over intervals of the closed-book indicator; panels: of the open-book and of the MASK one, by side.
    """

    counts: RowCounts
    accuracy: Accuracy
    benefit: Benefit
    effects: Mapping[str, tuple[Interval, ...]]
    panels: Mapping[str, Mapping[str, tuple[Interval, ...]]]
    correlation: Correlation
    savings: Mapping[str, Saving | None]
    copying: Copying | None
    slices: tuple[Slice, ...]
    agreements: tuple[Agreement, ...]
    harmed: tuple[LabelRow, ...]
    helped: tuple[LabelRow, ...]


def measure(rows: Iterable[LabelRow]) -> Boundary:
    """One pass over the rows; of each only the facts are kept, and of the extreme ones everything."""
    tally, reasons, graders = Counter[str](), Counter[str](), Counter[str]()
    facts: list[Fact] = []
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
        facts.append(fact_of(row))
        if (key := change(row)) < (0, 0):
            harmed = heapq.nsmallest(EXTREMES, [*harmed, row], key=change)
        elif key > (0, 0):
            helped = heapq.nlargest(EXTREMES, [*helped, row], key=change)
    counts = _counts(facts, tally, reasons, graders, seconds)
    return _boundary(facts, counts, tuple(harmed), tuple(helped))


def change(row: LabelRow) -> tuple[float, int]:
    """What retrieval did: by how much mastery rose, then the benefit; (0, 0) where neither is known."""
    before = row.closed.mastery if row.closed else None
    after = row.open.mastery if row.open else None
    rise = 0.0 if before is None or after is None else round(after - before, 6)
    return rise, row.benefit or 0


def _counts(
    facts: Sequence[Fact], tally: Counter[str], reasons: Counter[str], graders: Counter[str], seconds: float
) -> RowCounts:
    return RowCounts(
        rows=tally["rows"],
        failed=reasons.total(),
        reasons=tuple(reasons.most_common(REASONS)),
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
    facts: Sequence[Fact], counts: RowCounts, harmed: tuple[LabelRow, ...], helped: tuple[LabelRow, ...]
) -> Boundary:
    closed, opened, mask = (share(getattr(fact, side) for fact in facts) for side in ("closed", "open", "mask"))
    matched = share(fact.closed for fact in facts if fact.open is not None)
    benefits = Counter(fact.benefit for fact in facts)
    return Boundary(
        counts=counts,
        accuracy=Accuracy(closed, opened, mask, matched),
        benefit=Benefit(benefits[1], benefits[0], benefits[-1]),
        effects={name: intervals(facts, name) for name in INDICATORS},
        panels={side: {name: intervals(facts, name, side) for name in INDICATORS} for side in PANELS},
        correlation=correlation(facts),
        savings={name: saving(facts, name) for name in INDICATORS},
        copying=copying(facts),
        slices=slices(facts),
        agreements=agreements(facts),
        harmed=harmed,
        helped=helped,
    )


def intervals(facts: Sequence[Fact], indicator: str, side: str = "closed") -> tuple[Interval, ...]:
    """Effects per interval [0, .2) ... [.8, 1] of an indicator: closed-book, with passages, or with MASK passages."""
    counted = Counter(
        (min(INTERVALS - 1, int(value * INTERVALS + CLOSE)), fact.effects[indicator])
        for fact in facts
        if (value := _indicator(fact, indicator, side)) is not None
    )
    return tuple(
        Interval(number / INTERVALS, (number + 1) / INTERVALS, *(counted[number, effect.value] for effect in Effect))
        for number in range(INTERVALS)
    )


def _indicator(fact: Fact, indicator: str, side: str) -> float | None:
    return fact.indicators[indicator] if side == "closed" else fact.shown.get(side, {}).get(indicator)


def correlation(facts: Sequence[Fact]) -> Correlation:
    """Pearson's r of closed-book mastery and certainty."""
    pairs = [(fact.indicators["mastery"], fact.indicators["certainty"]) for fact in facts]
    known = [(first, second) for first, second in pairs if first is not None and second is not None]
    return pearson([first for first, _ in known], [second for _, second in known])


def copying(facts: Sequence[Fact]) -> Copying | None:
    """None when the run has no MASK answers."""
    masked = [fact for fact in facts if fact.is_mask is not None]
    if not masked:
        return None
    certain = [fact for fact in masked if fact.open_certainty is not None and fact.open_certainty >= 1 - CLOSE]
    return Copying(
        is_mask=share(fact.is_mask for fact in certain),
        says_mask=share(fact.says_mask for fact in certain),
        anywhere=share(fact.is_mask for fact in masked),
        under_mask=share(fact.is_mask for fact in masked if (_indicator(fact, "certainty", "mask") or 0) >= 1 - CLOSE),
    )


def agreements(facts: Sequence[Fact]) -> tuple[Agreement, ...]:
    """Every pair of graders over the greedy answers that both have graded."""
    agreed = []
    for side in ("closed", "open"):
        verdicts = [fact.verdicts[side] for fact in facts if side in fact.verdicts]
        names = dict.fromkeys(name for graders in verdicts for name in graders)
        for first, second in combinations(names, 2):
            pairs = [(graders[first], graders[second]) for graders in verdicts if {first, second} <= graders.keys()]
            if pairs:
                agreed.append(agreement(side, (first, second), pairs))
    return tuple(agreed)
