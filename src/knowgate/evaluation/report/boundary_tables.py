"""Tables of the knowledge boundary, with runs side by side. The terminal, the page and table.md show the same ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from knowgate.core.display import MISSING_VALUE, NOT_DEFINED, TextTable, format_number, format_percent, format_points
from knowgate.data.runs.rows import FREQUENCY_THIRDS, SLICE_DIMENSIONS, LabelRow
from knowgate.evaluation.boundary import NOT_RECORDED, EffectInterval, RunReport, measure_retrieval_change
from knowgate.evaluation.boundary_measures import (
    INDICATORS,
    NOT_GIVEN,
    RunSlice,
    SavingCurve,
    SavingPoint,
    summarize_slice,
)
from knowgate.stats.proportions import Proportion, format_proportion
from knowgate.types.markup import shorten

NO_OPEN_ANSWERS = "no open-book answers in this run"
NO_MASK_ANSWERS = "no MASK answers in this run"
SIDE_NAMES = {"closed": "closed-book", "open": "open-book", "mask": "MASK"}
MAX_EXTREMES = 5  # extreme questions in tables; the page shows all
MAX_TEXT_WIDTH = 60
BENEFIT_ROWS = {"retrieval helps (+1)": "helps", "changes nothing (0)": "neutral", "hurts (-1)": "hurts"}
COPY_RATE_COLUMNS = (
    "run",
    "answer is MASK, open-book certainty 1",
    "holds MASK, open-book certainty 1",
    "answer is MASK, MASK certainty 1",
    "answer is MASK, any certainty",
)


def build_boundary_tables(runs: Sequence[RunReport]) -> Iterator[TextTable]:
    """Build all tables of the knowledge report, with the runs side by side. Tables without data are left out."""
    boundaries = [run.boundary for run in runs]
    yield build_settings_table(runs)
    yield build_accuracy_table(runs)
    if any(boundary.correlation.n for boundary in boundaries):
        yield build_correlation_table(runs)
    for side in SIDE_NAMES:
        if has_effects(runs, side):
            yield from (build_effect_table(runs, indicator, side) for indicator in INDICATORS)
    for indicator in INDICATORS:
        if any(boundary.savings[indicator] is not None for boundary in boundaries):
            yield build_saving_table(runs, indicator)
    if any(boundary.copying is not None for boundary in boundaries):
        yield build_copy_rate_table(runs)
    yield from build_run_slice_tables(runs)
    yield build_agreement_table(runs)
    for run in runs:
        yield from (_build_extremes_table(run, name) for name in ("harmed", "helped"))


def build_settings_table(runs: Sequence[RunReport]) -> TextTable:
    """Build the table of settings and row counts, with a column per run."""
    columns = [_describe_run(run) for run in runs]
    rows = []
    for label in columns[0]:  # all runs have the same labels
        cells = [column[label] for column in columns]
        if set(cells) != {NOT_RECORDED}:
            rows.append((label, *cells))
    return _build_side_by_side("Settings and counts", runs, rows)


def _describe_run(run: RunReport) -> dict[str, str]:
    """Return the cells that describe a run, its settings and row counts, by row label."""
    counts = run.boundary.counts
    errors = "; ".join(f"{count} × {reason}" for reason, count in counts.reasons)
    return {
        "folder": str(run.path),
        **run.settings,
        "questions": f"{counts.rows} ({counts.synthetic} synthetic)" if counts.synthetic else str(counts.rows),
        "failed": f"{counts.failed}: {errors}" if errors else "0",
        "without gold answers": f"{counts.without_gold} (their mastery is unknown)" if counts.without_gold else "0",
        "with passages cut to fit": str(counts.cut),
        # The echo guard grades an answer as wrong if it only repeats the question.
        "verdicts changed by the echo guard": str(counts.guarded),
        "unparsable judge verdicts": str(counts.unparsable),
    }


def build_accuracy_table(runs: Sequence[RunReport]) -> TextTable:
    """Build the table of accuracies and of the effects of retrieval on the greedy answers."""
    accuracies = [run.boundary.accuracy for run in runs]
    rows = [
        ("closed book", *(format_proportion(get_closed_book_accuracy(run), "no graded answers") for run in runs)),
        ("open book", *(format_proportion(accuracy.open, NO_OPEN_ANSWERS) for accuracy in accuracies)),
    ]
    if any(accuracy.mask.n for accuracy in accuracies):
        rows.append(("MASK", *(format_proportion(accuracy.mask, NO_MASK_ANSWERS) for accuracy in accuracies)))
    # The row 'closed book' has only questions that found passages. If some found none, another row has all questions.
    if any(get_closed_book_accuracy(run).n != run.boundary.accuracy.closed.n for run in runs):
        all_questions = (format_proportion(accuracy.closed) for accuracy in accuracies)
        rows.append(("closed book, also where no passage was found", *all_questions))
    benefits = [run.boundary.benefit if run.boundary.counts.with_open else None for run in runs]
    for label, effect in BENEFIT_ROWS.items():
        rows.append((label, *(str(getattr(benefit, effect)) if benefit else MISSING_VALUE for benefit in benefits)))
    return _build_side_by_side("Accuracy of the greedy answers, 95 % intervals", runs, rows)


def get_closed_book_accuracy(run: RunReport) -> Proportion:
    """Return the accuracy without passages on the questions that were also answered with passages; on all if none was."""
    accuracy = run.boundary.accuracy
    return accuracy.matched if accuracy.open.n else accuracy.closed


def build_correlation_table(runs: Sequence[RunReport]) -> TextTable:
    """Build the table of the correlation between mastery and certainty. Mastery is the share of right samples."""
    correlations = [run.boundary.correlation for run in runs]
    rows = [
        ("Pearson's r", *(format_number(correlation.r, NOT_DEFINED) for correlation in correlations)),
        ("questions", *(str(correlation.n) for correlation in correlations)),
    ]
    return _build_side_by_side("Correlation of mastery and certainty", runs, rows)


# --- effects of retrieval -------------------------------------------------------------------------


def build_effect_table(runs: Sequence[RunReport], indicator: str, side: str = "closed") -> TextTable:
    """Build the table of how often retrieval helps, changes nothing or harms.

    Args:
        runs: The runs.
        indicator: 'mastery' (share of sampled answers that are right) or 'certainty' (how far they agree). The table has
            a row for each interval of its values.
        side: The answers that the indicator is measured on: 'closed' (without passages), 'open' (with passages) or
            'mask' (with masked passages). The title names the answers, except for 'closed'.
    """
    rows: list[tuple[str, ...]] = []
    for run in runs:
        if run.boundary.counts.with_open:
            rows += [(run.name, *_make_interval_cells(item)) for item in run.boundary.effects[side][indicator]]
        else:
            rows.append((run.name, NO_OPEN_ANSWERS))
    columns = ("run", f"{SIDE_NAMES[side]} {indicator}", "n", "beneficial", "neutral", "harmful")
    measured_on = "" if side == "closed" else f", by {indicator} of the {SIDE_NAMES[side]} answers"
    return TextTable(f"Effect of retrieval on {indicator}{measured_on}", columns, _blank_repeats(rows))


def has_effects(runs: Sequence[RunReport], side: str) -> bool:
    """Return whether any run has mastery or certainty values of a side. Sides are 'closed', 'open' and 'mask'."""
    return any(item.n for run in runs for name in INDICATORS for item in run.boundary.effects[side][name])


def format_interval(item: EffectInterval) -> str:
    """Format an interval, such as '[0.2, 0.4)'. Only the last one includes its end."""
    bracket = "]" if item.high == 1 else ")"
    return f"[{item.low:.1f}, {item.high:.1f}{bracket}"


def _make_interval_cells(item: EffectInterval) -> tuple[str, ...]:
    """Make the table row of one interval: limits, number of questions, shares of effects."""
    if not item.n:
        return format_interval(item), "0", "empty"
    shares = (count / item.n for count in (item.beneficial, item.neutral, item.harmful))
    return format_interval(item), str(item.n), *map(format_percent, shares)


def build_saving_table(runs: Sequence[RunReport], indicator: str) -> TextTable:
    """Build the table of savings and losses when questions of high `indicator` are skipped.

    Indicators are 'mastery' and 'certainty'.
    """
    rows: list[tuple[str, ...]] = []
    for run in runs:
        curve = run.boundary.savings[indicator]
        if curve is None:
            rows.append((run.name, f"no question has {indicator} and two graded answers"))
            continue
        nothing_skipped = curve.points[0]
        rows += [(run.name, *_make_saving_cells(point, curve)) for point in (nothing_skipped, *curve.marks)]
        loss = format_points(curve.never - curve.always)
        rows.append((run.name, "never retrieve", "100.0 %", format_percent(curve.never), loss, "0.0"))
    columns = ("run", f"skip if {indicator} ≥", "saved", "accuracy", "against always", "against random")
    return TextTable(f"Retrieval saved by {indicator}", columns, _blank_repeats(rows))


def _make_saving_cells(point: SavingPoint, curve: SavingCurve) -> tuple[str, ...]:
    """Make the table row of one threshold: searches saved, accuracy, and comparisons."""
    return (
        "always retrieve" if point.threshold is None else f"{point.threshold:.1f}",
        format_percent(point.saved),
        format_percent(point.accuracy),
        format_points(point.accuracy - curve.always),
        format_points(point.accuracy - point.random),
    )


# --- copying, slices, graders ---------------------------------------------------------------------


def build_copy_rate_table(runs: Sequence[RunReport]) -> TextTable:
    """Build the table of how often LLMs copy the word MASK, which replaces the gold answers in masked passages.

    Questions of certainty 1 have columns of their own. Certainty 1 means that all sampled answers agree.
    """
    rows: list[tuple[str, ...]] = []
    for run in runs:
        rate = run.boundary.copying
        if rate is None:
            rows.append((run.name, NO_MASK_ANSWERS))
            continue
        no_answer = "no answer with certainty 1"
        is_mask, says_mask = (format_proportion(share, no_answer) for share in (rate.is_mask, rate.says_mask))
        under_mask = format_proportion(rate.under_mask, "no sampled MASK answers that all agree")
        rows.append((run.name, is_mask, says_mask, under_mask, format_proportion(rate.anywhere)))
    return TextTable("Copy rate", COPY_RATE_COLUMNS, _blank_repeats(rows))


def build_run_slice_tables(runs: Sequence[RunReport]) -> list[TextTable]:
    """Build a table for each dimension with several groups of questions, such as the language."""
    tables = []
    for dimension in SLICE_DIMENSIONS:
        # For each run, its groups of questions by value.
        groups_of_runs = [
            {part.value: part for part in run.boundary.slices if part.dimension == dimension} for run in runs
        ]
        if any(len(groups) > 1 for groups in groups_of_runs):
            tables.append(_build_slice_table(runs, dimension, groups_of_runs))
    return tables


def _build_slice_table(
    runs: Sequence[RunReport], dimension: str, groups_of_runs: Sequence[Mapping[str, RunSlice]]
) -> TextTable:
    """Build the table of one dimension, such as the language."""
    rows = []
    values = {value for groups in groups_of_runs for value in groups}
    for value in sorted(values, key=_get_slice_order):
        empty = summarize_slice(dimension, value, ())
        for run, groups in zip(runs, groups_of_runs, strict=True):
            rows.append((value, run.name, *_make_slice_cells(groups.get(value, empty))))
    columns = (dimension, "run", "n", "both ways", "closed", "open", "mean benefit", "mastery", "certainty")
    return TextTable(f"By {dimension}", columns, _blank_repeats(rows))


def _get_slice_order(value: str) -> tuple[bool, int, str]:
    """Return the sort key of a group of questions, such as 'en'. Frequency thirds keep their own order."""
    third = FREQUENCY_THIRDS.index(value) if value in FREQUENCY_THIRDS else -1
    return value == NOT_GIVEN, third, value


def _make_slice_cells(item: RunSlice) -> tuple[str, ...]:
    """Make the cells of a group of questions. An empty group has only two cells, '0' and 'empty'.

    The others have its number of questions, the number with an answer with passages, accuracies, benefit and indicators.
    """
    if not item.n:
        return "0", "empty"
    return (
        str(item.n),
        str(item.open.n),
        format_percent(item.closed.value),
        format_percent(item.open.value),
        MISSING_VALUE if item.benefit is None else f"{item.benefit:+.2f}",
        format_number(item.mastery),
        format_number(item.certainty),
    )


def build_agreement_table(runs: Sequence[RunReport]) -> TextTable:
    """Build the table of the agreement between graders."""
    rows: list[tuple[str, ...]] = []
    for run in runs:
        if not run.boundary.agreements:
            rows.append((run.name, "no answers with gold answers to grade"))
        for item in run.boundary.agreements:
            graders = f"{item.first} / {item.second}"
            agreement = (format_percent(item.agree), format_number(item.kappa, NOT_DEFINED))
            disagreement = (str(item.only_first), str(item.only_second))
            rows.append((run.name, item.side, graders, str(item.n), *agreement, *disagreement))
    columns = ("run", "answers", "graders", "n", "agree", "Cohen's kappa", "right: first only", "right: second only")
    return TextTable("Agreement of graders", columns, _blank_repeats(rows))


def _build_extremes_table(run: RunReport, name: str) -> TextTable:
    """Build the table of the questions that retrieval 'harmed' or 'helped' most."""
    columns: tuple[str, ...] = ("change of mastery", "benefit", "question", "closed", "open")
    questions = getattr(run.boundary, name)[:MAX_EXTREMES]
    rows = [_make_question_cells(question) for question in questions] or [("", "", "none")]
    has_mastery = any(measure_retrieval_change(question).mastery for question in questions)
    if not has_mastery:  # the answers were not sampled, so the first column would be empty
        columns = columns[1:]
        rows = [row[1:] for row in rows]
    return TextTable(f"Most {name} questions of {run.name}", columns, tuple(rows))


def _make_question_cells(row: LabelRow) -> tuple[str, ...]:
    """Make the cells of a question: how passages changed its answers, the question, and both answers.

    Mastery is the share of right answers among sampled ones. The benefit is 1 if passages turned the answer right, and
    -1 if they turned it wrong.
    """
    change = measure_retrieval_change(row)
    answers = [answer.text if answer else "" for answer in (row.closed, row.open)]  # without and with passages
    texts = (row.question or row.id, *answers)
    return f"{change.mastery:+.2f}", f"{change.benefit:+d}", *(shorten(text, MAX_TEXT_WIDTH) for text in texts)


def _blank_repeats(rows: Sequence[tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
    """Blank the first cell of rows that repeat the cell above."""
    blanked = []
    above = ""  # first cell of the row above
    for first, *rest in rows:
        blanked.append(("" if first == above else first, *rest))
        above = first
    return tuple(blanked)


def _build_side_by_side(title: str, runs: Sequence[RunReport], rows: Sequence[tuple[str, ...]]) -> TextTable:
    """Build a table with a column per run. Each row has a label and one cell per run."""
    return TextTable(title, ("", *(run.name for run in runs)), tuple(rows))
