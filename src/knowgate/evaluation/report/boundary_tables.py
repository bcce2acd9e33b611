"""The report's tables as plain text cells, runs side by side. The terminal and the page show the same ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from knowgate.core.display import MISSING_VALUE, NOT_DEFINED, TextTable, format_number, format_percent, format_points
from knowgate.data.runs.rows import FREQUENCY_THIRDS, SLICE_DIMENSIONS, LabelRow
from knowgate.evaluation.boundary import EffectInterval, RowCounts, RunReport, measure_retrieval_change
from knowgate.evaluation.boundary_measures import (
    INDICATORS,
    NOT_GIVEN,
    RunSlice,
    SavingCurve,
    SavingPoint,
    summarize_slice,
)
from knowgate.evaluation.report import boundary_tables as sheets
from knowgate.evaluation.report.terminal import render_terminal_table
from knowgate.stats.formats import format_proportion
from knowgate.stats.proportions import Proportion

NO_OPEN_ANSWERS = "no open-book answers in this run"
NO_MASK_ANSWERS = "no MASK answers in this run"
SIDE_NAMES = {"closed": "closed-book", "open": "open-book", "mask": "MASK"}


def build_settings_table(runs: Sequence[RunReport]) -> TextTable:
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


def build_accuracy_table(runs: Sequence[RunReport]) -> TextTable:
    accuracies = [run.boundary.accuracy for run in runs]
    benefits = [run.boundary.benefit for run in runs]
    opened = [bool(run.boundary.counts.with_open) for run in runs]

    def counted(name: str) -> list[str]:
        return [str(getattr(b, name)) if has else MISSING_VALUE for b, has in zip(benefits, opened, strict=True)]

    rows = [
        ("closed book", *(format_proportion(get_matched_accuracy(run), "no graded answers") for run in runs)),
        ("open book", *(format_proportion(item.open, NO_OPEN_ANSWERS) for item in accuracies)),
        ("MASK", *(format_proportion(item.mask, NO_MASK_ANSWERS) for item in accuracies)),
        *_on_all(runs),
        ("retrieval helps (+1)", *counted("helps")),
        ("changes nothing (0)", *counted("neutral")),
        ("hurts (-1)", *counted("hurts")),
    ]
    return _side_by_side("Accuracy of the greedy answers, 95 % intervals", runs, rows)


def get_matched_accuracy(run: RunReport) -> Proportion:
    """Closed-book accuracy to set beside the open-book one: on the same questions, where there are any."""
    accuracy = run.boundary.accuracy
    return accuracy.matched if accuracy.open.n else accuracy.closed


def _on_all(runs: Sequence[RunReport]) -> list[tuple[str, ...]]:
    """A line on all questions, where some found no passages."""
    if all(get_matched_accuracy(run).n == run.boundary.accuracy.closed.n for run in runs):
        return []
    shares = [format_proportion(run.boundary.accuracy.closed) for run in runs]
    return [("closed book, also where no passage was found", *shares)]


def build_correlation_table(runs: Sequence[RunReport]) -> TextTable:
    correlations = [run.boundary.correlation for run in runs]
    rows = [
        ("Pearson's r", *(format_number(c.r, NOT_DEFINED) for c in correlations)),
        ("questions", *(str(c.n) for c in correlations)),
    ]
    return _side_by_side("Correlation of mastery and certainty", runs, rows)


def build_effect_table(runs: Sequence[RunReport], indicator: str, side: str = "closed") -> TextTable:
    """Who is helped and harmed, over the indicator of one side: the three panels of KBM's Figure 3."""
    rows: list[tuple[str, ...]] = []
    for run in runs:
        if not run.boundary.counts.with_open:
            rows.append((run.name, NO_OPEN_ANSWERS))
            continue
        rows += [(run.name, *_interval(item)) for item in get_effect_intervals(run, indicator, side)]
    columns = ("run", f"{SIDE_NAMES[side]} {indicator}", "n", "beneficial", "neutral", "harmful")
    where = "" if side == "closed" else f", over that of the {SIDE_NAMES[side]} answers"
    return TextTable(f"Effect of retrieval on {indicator}{where}", columns, _grouped(rows))


def get_effect_intervals(run: RunReport, indicator: str, side: str) -> tuple[EffectInterval, ...]:
    return (run.boundary.effects if side == "closed" else run.boundary.panels[side])[indicator]


def list_sampled_sides(runs: Sequence[RunReport]) -> list[str]:
    """Sides beside the closed book that some run has sampled answers of, so that there is something to show."""
    return [
        side
        for side in ("open", "mask")
        if any(item.n for run in runs for name in INDICATORS for item in get_effect_intervals(run, name, side))
    ]


def format_interval(item: EffectInterval) -> str:
    return f"[{item.low:.1f}, {item.high:.1f}{']' if item.high == 1 else ')'}"


def _interval(item: EffectInterval) -> tuple[str, ...]:
    if not item.n:
        return format_interval(item), "0", "empty"
    shares = (count / item.n for count in (item.beneficial, item.neutral, item.harmful))
    return format_interval(item), str(item.n), *map(format_percent, shares)


def build_saving_table(runs: Sequence[RunReport], indicator: str) -> TextTable:
    rows: list[tuple[str, ...]] = []
    for run in runs:
        saving = run.boundary.savings[indicator]
        if saving is None:
            rows.append((run.name, f"no question has {indicator} and two graded answers"))
            continue
        rows += [(run.name, *_point(point, saving)) for point in (saving.points[0], *saving.marks)]
        rows.append(
            (
                run.name,
                "never retrieve",
                "100.0 %",
                format_percent(saving.never),
                format_points(saving.never - saving.always),
                "0.0",
            )
        )
    columns = ("run", f"skip if {indicator} ≥", "saved", "accuracy", "against always", "against random")
    return TextTable(f"Retrieval saved by {indicator}", columns, _grouped(rows))


def _point(point: SavingPoint, saving: SavingCurve) -> tuple[str, ...]:
    threshold = "always retrieve" if point.threshold is None else f"{point.threshold:.1f}"
    gains = (format_points(point.accuracy - saving.always), format_points(point.accuracy - point.random))
    return threshold, format_percent(point.saved), format_percent(point.accuracy), *gains


def build_copy_rate_table(runs: Sequence[RunReport]) -> TextTable:
    rows: list[tuple[str, ...]] = []
    for run in runs:
        copied = run.boundary.copying
        if copied is None:
            rows.append((run.name, NO_MASK_ANSWERS))
            continue
        none = "no answer with certainty 1"
        cells = (format_proportion(copied.is_mask, none), format_proportion(copied.says_mask, none))
        under = format_proportion(copied.under_mask, "no sampled MASK answers that all agree")
        rows.append((run.name, *cells, under, format_proportion(copied.anywhere)))
    columns = (
        "run",
        "answer is MASK, open-book certainty 1",
        "holds MASK, open-book certainty 1",
        "answer is MASK, MASK certainty 1",
        "answer is MASK, any certainty",
    )
    return TextTable("Copy rate", columns, _grouped(rows))


def build_run_slice_tables(runs: Sequence[RunReport]) -> list[TextTable]:
    """One table per dimension that splits some run."""
    return [sheet for dimension in SLICE_DIMENSIONS if (sheet := _dimension(runs, dimension)) is not None]


def _dimension(runs: Sequence[RunReport], dimension: str) -> TextTable | None:
    by_value = [{part.value: part for part in run.boundary.slices if part.dimension == dimension} for run in runs]
    if not any(len(parts) > 1 for parts in by_value):
        return None
    rows = [
        (value, run.name, *_slice(parts.get(value, summarize_slice(dimension, value, ()))))
        for value in sorted({value for parts in by_value for value in parts}, key=_slice_order)
        for run, parts in zip(runs, by_value, strict=True)
    ]
    columns = (dimension, "run", "n", "both ways", "closed", "open", "mean benefit", "mastery", "certainty")
    return TextTable(f"By {dimension}", columns, _grouped(rows))


def _slice_order(value: str) -> tuple[bool, int, str]:
    return value == NOT_GIVEN, FREQUENCY_THIRDS.index(value) if value in FREQUENCY_THIRDS else -1, value


def _slice(part: RunSlice) -> tuple[str, ...]:
    if not part.n:
        return "0", "empty"
    benefit = MISSING_VALUE if part.benefit is None else f"{part.benefit:+.2f}"
    shares = (format_percent(part.closed.value), format_percent(part.open.value))
    return str(part.n), str(part.open.n), *shares, benefit, format_number(part.mastery), format_number(part.certainty)


def build_agreement_table(runs: Sequence[RunReport]) -> TextTable:
    rows: list[tuple[str, ...]] = []
    for run in runs:
        agreements = run.boundary.agreements
        rows += [] if agreements else [(run.name, "no answers with gold answers to grade")]
        for item in agreements:
            only = (str(item.only_first), str(item.only_second))
            agree = (format_percent(item.agree), format_number(item.kappa, NOT_DEFINED))
            rows.append((run.name, item.side, f"{item.first} / {item.second}", str(item.n), *agree, *only))
    columns = ("run", "answers", "graders", "n", "agree", "Cohen's kappa", "right: first only", "right: second only")
    return TextTable("Agreement of graders", columns, _grouped(rows))


def _grouped(rows: Sequence[tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
    """What the first column says of several lines stands in the first of them."""
    before = ["", *(row[0] for row in rows)]
    return tuple(("" if row[0] == last else row[0], *row[1:]) for row, last in zip(rows, before, strict=False))


def _side_by_side(title: str, runs: Sequence[RunReport], rows: Sequence[tuple[str, ...]]) -> TextTable:
    return TextTable(title, ("", *(run.name for run in runs)), tuple(rows))


MAX_EXTREMES = 5  # extreme questions; the page has them all
MAX_TEXT_WIDTH = 60


def render_boundary_tables(runs: Sequence[RunReport]) -> Group:
    """Everything but the curves and the passages."""
    parts: list[RenderableType] = []
    for sheet in build_boundary_tables(runs):
        parts += [Text(sheet.title, style="bold"), render_terminal_table(sheet), Text()]
    return Group(*parts)


def build_boundary_tables(runs: Sequence[RunReport]) -> Iterator[TextTable]:
    yield sheets.build_settings_table(runs)
    yield sheets.build_accuracy_table(runs)
    yield sheets.build_correlation_table(runs)
    for side in ("closed", *sheets.list_sampled_sides(runs)):
        yield from (sheets.build_effect_table(runs, indicator, side) for indicator in INDICATORS)
    yield from (sheets.build_saving_table(runs, indicator) for indicator in INDICATORS)
    yield sheets.build_copy_rate_table(runs)
    yield from sheets.build_run_slice_tables(runs)
    yield sheets.build_agreement_table(runs)
    for run in runs:
        yield from (_extremes(run, name) for name in ("harmed", "helped"))


def _extremes(run: RunReport, name: str) -> TextTable:
    rows = [_extreme(row) for row in getattr(run.boundary, name)[:MAX_EXTREMES]]
    columns = ("mastery", "benefit", "question", "closed", "open")
    return TextTable(f"Most {name} questions of {run.name}", columns, tuple(rows) or (("", "", "none"),))


def _extreme(row: LabelRow) -> tuple[str, ...]:
    rise, benefit = measure_retrieval_change(row)
    texts = (row.question, row.closed.text if row.closed else "", row.open.text if row.open else "")
    return f"{rise:+.2f}", f"{benefit:+d}", *map(_short, texts)


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MAX_TEXT_WIDTH else line[: MAX_TEXT_WIDTH - 1] + "…"
