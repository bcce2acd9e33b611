"""The report's tables as plain text cells, runs side by side. The terminal and the page show the same ones."""

from __future__ import annotations

from collections.abc import Sequence

from knowgate.display import NOT_DEFINED, NOTHING, Sheet, number, percent, points, with_interval
from knowgate.evaluation import INDICATORS, NOT_GIVEN, Interval, Point, RowCounts, RunReport, Saving, Slice, summarise
from knowgate.runs import DIMENSIONS, THIRDS
from knowgate.statistics import Share

NO_OPEN = "no open-book answers in this run"
NO_MASK = "no MASK answers in this run"
SIDE_NAMES = {"closed": "closed-book", "open": "open-book", "mask": "MASK"}


def about(runs: Sequence[RunReport]) -> Sheet:
    names = "folder, model, data, grader, samples per answer, temperature, questions, failed, without gold answers"
    more = "with passages cut to fit, verdicts changed by the echo guard, unparsable judge verdicts, throughput"
    labels = f"{names}, {more}".split(", ")
    columns = [_about(run) for run in runs]
    return _side_by_side(
        "Settings and counts", runs, [(label, *cells) for label, *cells in zip(labels, *columns, strict=True)]
    )


def _about(run: RunReport) -> list[str]:
    counts = run.boundary.counts
    reasons = "; ".join(f"{count} × {reason}" for reason, count in counts.reasons)
    return [
        str(run.path),
        run.model,
        run.data,
        run.grader,
        run.samples,
        run.temperature,
        f"{counts.rows} ({counts.synthetic} synthetic)" if counts.synthetic else str(counts.rows),
        f"{counts.failed}: {reasons}" if reasons else "0",
        f"{counts.without_gold} (no mastery)" if counts.without_gold else "0",
        str(counts.cut),
        str(counts.guarded),
        str(counts.unparsable),
        _throughput(counts),
    ]


def _throughput(counts: RowCounts) -> str:
    if not counts.seconds:
        return "not recorded"
    answered = counts.rows - counts.failed
    return f"{answered / counts.seconds:.2f} questions/s, {counts.tokens / counts.seconds:.0f} tokens/s"


def accuracy(runs: Sequence[RunReport]) -> Sheet:
    accuracies = [run.boundary.accuracy for run in runs]
    benefits = [run.boundary.benefit for run in runs]
    opened = [bool(run.boundary.counts.with_open) for run in runs]

    def counted(name: str) -> list[str]:
        return [str(getattr(b, name)) if has else NOTHING for b, has in zip(benefits, opened, strict=True)]

    rows = [
        ("closed book", *(with_interval(compared(run), "no graded answers") for run in runs)),
        ("open book", *(with_interval(item.open, NO_OPEN) for item in accuracies)),
        ("MASK", *(with_interval(item.mask, NO_MASK) for item in accuracies)),
        *_on_all(runs),
        ("retrieval helps (+1)", *counted("helps")),
        ("changes nothing (0)", *counted("neutral")),
        ("hurts (-1)", *counted("hurts")),
    ]
    return _side_by_side("Accuracy of the greedy answers, 95 % intervals", runs, rows)


def compared(run: RunReport) -> Share:
    """Closed-book accuracy to set beside the open-book one: on the same questions, where there are any."""
    accuracy = run.boundary.accuracy
    return accuracy.matched if accuracy.open.n else accuracy.closed


def _on_all(runs: Sequence[RunReport]) -> list[tuple[str, ...]]:
    """A line on all questions, where some found no passages."""
    if all(compared(run).n == run.boundary.accuracy.closed.n for run in runs):
        return []
    shares = [with_interval(run.boundary.accuracy.closed) for run in runs]
    return [("closed book, also where no passage was found", *shares)]


def correlation(runs: Sequence[RunReport]) -> Sheet:
    correlations = [run.boundary.correlation for run in runs]
    rows = [
        ("Pearson's r", *(number(c.r, NOT_DEFINED) for c in correlations)),
        ("questions", *(str(c.n) for c in correlations)),
    ]
    return _side_by_side("Correlation of mastery and certainty", runs, rows)


def effects(runs: Sequence[RunReport], indicator: str, side: str = "closed") -> Sheet:
    """Who is helped and harmed, over the indicator of one side: the three panels of KBM's Figure 3."""
    rows: list[tuple[str, ...]] = []
    for run in runs:
        if not run.boundary.counts.with_open:
            rows.append((run.name, NO_OPEN))
            continue
        rows += [(run.name, *_interval(item)) for item in panel(run, indicator, side)]
    columns = ("run", f"{SIDE_NAMES[side]} {indicator}", "n", "beneficial", "neutral", "harmful")
    where = "" if side == "closed" else f", over that of the {SIDE_NAMES[side]} answers"
    return Sheet(f"Effect of retrieval on {indicator}{where}", columns, _grouped(rows))


def panel(run: RunReport, indicator: str, side: str) -> tuple[Interval, ...]:
    return (run.boundary.effects if side == "closed" else run.boundary.panels[side])[indicator]


def sampled_sides(runs: Sequence[RunReport]) -> list[str]:
    """Sides beside the closed book that some run has sampled answers of, so that there is something to show."""
    return [
        side
        for side in ("open", "mask")
        if any(item.n for run in runs for name in INDICATORS for item in panel(run, name, side))
    ]


def interval_name(item: Interval) -> str:
    return f"[{item.low:.1f}, {item.high:.1f}{']' if item.high == 1 else ')'}"


def _interval(item: Interval) -> tuple[str, ...]:
    if not item.n:
        return interval_name(item), "0", "empty"
    shares = (count / item.n for count in (item.beneficial, item.neutral, item.harmful))
    return interval_name(item), str(item.n), *map(percent, shares)


def savings(runs: Sequence[RunReport], indicator: str) -> Sheet:
    rows: list[tuple[str, ...]] = []
    for run in runs:
        saving = run.boundary.savings[indicator]
        if saving is None:
            rows.append((run.name, f"no question has {indicator} and two graded answers"))
            continue
        rows += [(run.name, *_point(point, saving)) for point in (saving.points[0], *saving.marks)]
        rows.append(
            (run.name, "never retrieve", "100.0 %", percent(saving.never), points(saving.never - saving.always), "0.0")
        )
    columns = ("run", f"skip if {indicator} ≥", "saved", "accuracy", "against always", "against random")
    return Sheet(f"Retrieval saved by {indicator}", columns, _grouped(rows))


def _point(point: Point, saving: Saving) -> tuple[str, ...]:
    threshold = "always retrieve" if point.threshold is None else f"{point.threshold:.1f}"
    gains = (points(point.accuracy - saving.always), points(point.accuracy - point.random))
    return threshold, percent(point.saved), percent(point.accuracy), *gains


def copying(runs: Sequence[RunReport]) -> Sheet:
    rows: list[tuple[str, ...]] = []
    for run in runs:
        copied = run.boundary.copying
        if copied is None:
            rows.append((run.name, NO_MASK))
            continue
        none = "no answer with certainty 1"
        cells = (with_interval(copied.is_mask, none), with_interval(copied.says_mask, none))
        under = with_interval(copied.under_mask, "no sampled MASK answers that all agree")
        rows.append((run.name, *cells, under, with_interval(copied.anywhere)))
    columns = (
        "run",
        "answer is MASK, open-book certainty 1",
        "holds MASK, open-book certainty 1",
        "answer is MASK, MASK certainty 1",
        "answer is MASK, any certainty",
    )
    return Sheet("Copy rate", columns, _grouped(rows))


def slices(runs: Sequence[RunReport]) -> list[Sheet]:
    """One table per dimension that splits some run."""
    return [sheet for dimension in DIMENSIONS if (sheet := _dimension(runs, dimension)) is not None]


def _dimension(runs: Sequence[RunReport], dimension: str) -> Sheet | None:
    by_value = [{part.value: part for part in run.boundary.slices if part.dimension == dimension} for run in runs]
    if not any(len(parts) > 1 for parts in by_value):
        return None
    rows = [
        (value, run.name, *_slice(parts.get(value, summarise(dimension, value, ()))))
        for value in sorted({value for parts in by_value for value in parts}, key=_slice_order)
        for run, parts in zip(runs, by_value, strict=True)
    ]
    columns = (dimension, "run", "n", "both ways", "closed", "open", "mean benefit", "mastery", "certainty")
    return Sheet(f"By {dimension}", columns, _grouped(rows))


def _slice_order(value: str) -> tuple[bool, int, str]:
    return value == NOT_GIVEN, THIRDS.index(value) if value in THIRDS else -1, value


def _slice(part: Slice) -> tuple[str, ...]:
    if not part.n:
        return "0", "empty"
    benefit = NOTHING if part.benefit is None else f"{part.benefit:+.2f}"
    shares = (percent(part.closed.value), percent(part.open.value))
    return str(part.n), str(part.open.n), *shares, benefit, number(part.mastery), number(part.certainty)


def agreements(runs: Sequence[RunReport]) -> Sheet:
    rows: list[tuple[str, ...]] = []
    for run in runs:
        agreements = run.boundary.agreements
        rows += [] if agreements else [(run.name, "no answers with gold answers to grade")]
        for item in agreements:
            only = (str(item.only_first), str(item.only_second))
            agree = (percent(item.agree), number(item.kappa, NOT_DEFINED))
            rows.append((run.name, item.side, f"{item.first} / {item.second}", str(item.n), *agree, *only))
    columns = ("run", "answers", "graders", "n", "agree", "Cohen's kappa", "right: first only", "right: second only")
    return Sheet("Agreement of graders", columns, _grouped(rows))


def _grouped(rows: Sequence[tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
    """What the first column says of several lines stands in the first of them."""
    before = ["", *(row[0] for row in rows)]
    return tuple(("" if row[0] == last else row[0], *row[1:]) for row, last in zip(rows, before, strict=False))


def _side_by_side(title: str, runs: Sequence[RunReport], rows: Sequence[tuple[str, ...]]) -> Sheet:
    return Sheet(title, ("", *(run.name for run in runs)), tuple(rows))
