"""The page on a judge and an arbiter for an 8B LLM behind an API that returns only text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.judge_answers import HOME, Answers, Bools, Floats, Judge, judge_names, read_judge
from benchmarks.judge_cascade import (
    RATES,
    RECORDED_RATE,
    Point,
    best_rule,
    cascade_points,
    choose_judge,
    compute_needs,
    make_point,
    resample_means,
    right_after_retrieval,
)
from benchmarks.tables.common import RUNS, Rows, table
from benchmarks.tables.judge_speed import speed_table
from knowgate.core.chart import COLORS, GRAY, Axis, ChartFrame, ChartPoint, Curve, fit_axis, render_line_chart
from knowgate.stats.bootstrap import Estimate, estimate_auroc, summarize_resamples
from knowgate.stats.metrics import compute_frontier

TEXT_GATES = ("skr", "ik, text", "adaptive", "fusion", "fusion on benefit")
RUN = RUNS / "llama3.1-8b" / "gate_llama3_8b-test"
JUDGE_RATES = (0.75, 0.6, 0.5)
GOALS = ((0.01, "harm"), (0.02, "harm"), (0.05, "harm"), (0.01, "net"), (0.02, "net"), (0.03, "net"))
DELTA = 0.05
FIGURE = "judge.svg"
SECOND_TRAINING = "cascade-again"
STEPS = 50  # points of a curve


def judge_tables(home: Path = HOME, wanted: str | None = None) -> Iterator[str]:
    """Render the page from the recorded predictions, or nothing without predictions."""
    judges = {name: read_judge(home, name) for name in judge_names(home)}
    chosen = choose_judge(judges, wanted)
    if chosen is None:
        return
    yield "## An 8B LLM behind an API: judge, arbiter, cascade\n"
    yield (
        "Recorded answers of Llama-3.1-8B-Instruct (`gate_llama3_8b`, 3,000 test rows of six data sets; right is the "
        "data set's `acc_contains`): from memory, and with one BM25 retrieval. The judge reads question and answer "
        "from memory and says before any search whether that is right; the arbiter reads both answers after the "
        "search and gives the one it believes more; the rules give the answer from memory where the other abstains. "
        f"Thresholds are chosen on {len(chosen.dev.answers)} train rows that the judge did not learn from, for a "
        "wanted share of retrievals; the share that came out on the test rows stands beside it. Text gates have no "
        "such rows on record: theirs is the exact top-k curve of the test rows. Need is by 'known' (the answer from "
        "memory is wrong) or by 'gain' (what documents are expected to add), whichever is better on those rows at that "
        "share. `python benchmarks/judge.py --json` prints the headline.\n"
    )
    yield from _accuracy_table(chosen)
    yield f"![Accuracy against share of questions retrieved for](../{FIGURE})\n"
    yield from _cascade_table(chosen)
    yield from _second_training_table(judges.get(SECOND_TRAINING), chosen)
    yield from _by_set(chosen)
    yield from _guarantees(chosen)
    yield from _three_actions(chosen)
    yield from _all_judges(judges)
    yield from speed_table(home)


# --- accuracy at a share of retrievals ------------------------------------------------------------


def _accuracy_table(judge: Judge) -> Iterator[str]:
    answers, empty = judge.test.answers, ["-"] * len(RATES)
    rows: Rows = [
        ("never (0 %)", _share(answers.closed), *empty),
        ("oracle of both answers", _share(answers.closed | answers.open), *empty),
        ("always, or at random", _share(answers.open), *(_cell(_random_accuracy(answers, rate)) for rate in RATES)),
    ]
    rows += [_text_row(name, needs, answers) for name, needs in _text_needs(answers).items()]
    points = {arbiter: cascade_points(judge, arbiter) for arbiter in ("none", "rules", "judge")}
    rows.append(("judge", _share(answers.open), *map(_point_cell, points["none"])))
    rows.append(
        ("judge, then rules", _share(right_after_retrieval(judge.test, "rules")), *map(_point_cell, points["rules"]))
    )
    rows.append(
        ("**cascade: judge, then arbiter**", _share(judge.test.arbiter_right), *map(_point_cell, points["judge"]))
    )
    columns = ("accuracy at", "100 %", *(f"{rate:.0%}" for rate in RATES))
    yield table(columns, rows)
    yield "Accuracy in percent; in brackets the share of test questions that was retrieved for.\n"


def _random_accuracy(answers: Answers, rate: float) -> float:
    return float(rate * answers.open.mean() + (1 - rate) * answers.closed.mean())


def _text_needs(answers: Answers) -> dict[str, Floats]:
    """Return the needs of the recorded text gates, in the order of the answers."""
    from knowgate.data.runs.records import read_needs

    if not RUN.is_dir():
        return {}
    recorded = {record.gate: record.needs for record in read_needs(RUN) if record.gate in TEXT_GATES}
    ordered = {name: recorded[name] for name in TEXT_GATES if name in recorded}
    return {
        name: np.array([needs[key] for key in answers.ids])
        for name, needs in ordered.items()
        if set(answers.ids) <= set(needs)
    }


def _text_row(name: str, needs: Floats, answers: Answers) -> tuple[str, ...]:
    curve = compute_frontier(answers.closed, answers.open, needs)
    return (f"text gate: {name}", _share(answers.open), *(_cell(curve.at(rate)) for rate in RATES))


def _point_cell(point: Point) -> str:
    return f"{_cell(point.accuracy.value or 0.0)} ({100 * point.rate:.1f})"


def _cell(value: float) -> str:
    return f"{100 * value:.1f}"


def _share(right: Bools) -> str:
    return _cell(float(right.mean()))


# --- the cascade ----------------------------------------------------------------------------------


def _second_training_table(judge: Judge | None, first: Judge) -> Iterator[str]:
    """Render the results of an arbiter trained again, which intervals over questions do not cover."""
    if judge is None:
        return
    difference = 100 * abs(float(judge.test.arbiter_right.mean()) - float(first.test.arbiter_right.mean()))
    yield "### The same with arbiters that were trained again\n"
    yield (
        "The same arbiter was trained a second time, once without each fifth of the train rows. Thresholds and "
        f"calibration then come from {len(judge.dev.answers)} rows. Its accuracy differs by {difference:.1f} points from the "
        "first one, so differences of that size may be due to the training alone. **The first table is too good:** it was "
        "kept as the headline after the test results of both had been seen. This table is the fairer estimate.\n"
    )
    yield _against_always(judge)


def _cascade_table(judge: Judge) -> Iterator[str]:
    yield "### The cascade against always retrieving\n"
    yield _against_always(judge)


def _against_always(judge: Judge) -> str:
    answers = judge.test.answers
    lines = [
        ("rules alone", make_point(right_after_retrieval(judge.test, "rules"), answers)),
        ("arbiter alone", make_point(judge.test.arbiter_right, answers)),
        *(
            (f"cascade, {point.target_rate:.0%} wanted, by {point.rule}", point)
            for point in cascade_points(judge, "judge")
        ),
    ]
    rows = [
        (name, f"{point.rate:.1%}", _interval(point.accuracy), _interval(point.against_always, signed=True), str(point.gained),
         str(point.lost), _format_p(point.p))
        for name, point in lines
    ]  # fmt: skip
    columns = ("", "retrieved for", "accuracy, 95 % interval", "points against always", "gained", "lost", "McNemar p")
    return table(columns, rows)


def _by_set(judge: Judge) -> Iterator[str]:
    yield "### By data set\n"
    answers, points = judge.test.answers, {f"{point.target_rate:g}": point for point in cascade_points(judge, "judge")}
    rows: Rows = []
    for name in sorted(set(answers.sets)):
        inside = np.array([own == name for own in answers.sets])
        cells = []
        for rate in ("0.9", "0.8", "0.6", "0.5"):
            retrieve = compute_needs(judge.test, points[rate].rule) > points[rate].threshold
            right = np.where(retrieve, judge.test.arbiter_right, answers.closed)[inside]
            against = resample_means({"right": right, "always": answers.open[inside]})
            gap = summarize_resamples(against["right"] - against["always"])
            cells.append(f"{_interval(gap, signed=True)} @ {retrieve[inside].mean():.0%}")
        parts = [answers.closed, answers.open, answers.closed | answers.open, judge.test.arbiter_right]
        rows.append((f"{name} ({inside.sum()})", *(_share(part[inside]) for part in parts), *cells))
    columns = ("data set (n)", "never", "always", "oracle", "arbiter",
               *(f"cascade {rate}, points against always" for rate in ("90 %", "80 %", "60 %", "50 %")))  # fmt: skip
    yield table(columns, rows)


# --- guarantees -----------------------------------------------------------------------------------


def _guarantees(judge: Judge) -> Iterator[str]:
    from knowgate.gates.artifacts.gate_folder import ALWAYS_RETRIEVE
    from knowgate.gates.calibration.guarantee import learn_then_test
    from knowgate.gates.calibration.threshold_choice import GateOutcomes, evaluate_threshold

    yield "### With a guarantee\n"
    yield (
        "Thresholds chosen on the dev rows at 95 % confidence, in both forms: 'harm' bounds the answers lost, 'net' "
        "those lost less those gained. Beside them what the threshold came to on the test rows.\n"
    )
    rule, rows = best_rule(judge, "judge", RECORDED_RATE), Rows()
    for arbiter, name in (("none", "judge"), ("rules", "judge, then rules"), ("judge", "cascade")):
        dev, test = (
            GateOutcomes(
                compute_needs(part, rule), part.answers.closed, part.answers.open, right_after_retrieval(part, arbiter)
            )
            for part in (judge.dev, judge.test)
        )
        for epsilon, form in GOALS:
            choice = learn_then_test(dev, epsilon, DELTA, form=form)  # type: ignore[arg-type]
            outcome = evaluate_threshold(test, choice.threshold)
            proven = "nothing" if choice.threshold == ALWAYS_RETRIEVE else f"need <= {choice.threshold:g} is skipped"
            rows.append((name, form, f"{100 * epsilon:g}", proven, f"{outcome.rate:.1%}", f"{100 * outcome.loss:+.2f}",
                         f"{100 * outcome.harmed / outcome.n:.2f}"))  # fmt: skip
    columns = ("", "form", "at most lost, points", "proven", "retrieved for, test", "lost, test", "harmed, test")
    yield table(columns, rows)


def _three_actions(judge: Judge) -> Iterator[str]:
    """Render the choice of skipping, one retrieval or several, by expected gain minus the price of searches."""
    from benchmarks.tables.judge_actions import action_rows

    yield "### Skip, retrieve once, or several times\n"
    yield (
        "IRCoT's answers are on record, too (several retrievals, taken as three searches). Each question gets the "
        "action with the highest expected gain: P(right) by the judge's need, fitted on dev rows, less the price of "
        "its searches, in points of accuracy a search must bring.\n"
    )
    columns = ("price of a search, points", "skipped", "one", "several", "searches per question", "accuracy",
               "points against always one", "McNemar p")  # fmt: skip
    yield table(columns, action_rows(judge))


# --- all judges -----------------------------------------------------------------------------------


def _all_judges(judges: dict[str, Judge]) -> Iterator[str]:
    yield "### Every judge\n"
    yield (
        "Here each judge ranks the test questions by 'known' alone, and exactly the share in the column is retrieved for. The "
        "first table of this page has other figures for the same judge (38.4 and 38.1 in place of 38.0 and 37.6), because at "
        "60 and 50 % it ranks by 'gain', and its thresholds from train rows come to 61.0 and 51.8 % of the test questions.\n"
    )
    rows = [_judge_row(judge) for judge in judges.values() if "known" in judge.dev.columns or judge.dev.can_arbitrate]
    columns = ("predictions", "base", "rows", "AUROC of known, 95 % interval",
               *(f"judge at {rate:.0%}" for rate in JUDGE_RATES), "arbiter", "tokens per question",
               "ms per question, GPU", "seconds of training")  # fmt: skip
    yield table(columns, rows)


def _judge_row(judge: Judge) -> tuple[str, ...]:
    about, cells = judge.about, ["-"] * (1 + len(JUDGE_RATES))
    if "known" in judge.test.columns:
        closed = judge.test.answers.closed
        curve = compute_frontier(closed, judge.test.answers.open, 1 - judge.test.columns["known"])
        ranked = estimate_auroc(closed, judge.test.columns["known"])
        cells = [_format_auroc(ranked), *(_cell(curve.at(rate)) for rate in JUDGE_RATES)]
    arbiter = _share(judge.test.arbiter_right) if judge.test.can_arbitrate else "-"
    facts = [_format_fact(about.get(key)) for key in ("base", "rows", "tokens_per_question", "seconds")]
    return (judge.name, *facts[:2], *cells, arbiter, facts[2], _format_fact(_gpu_ms(judge)), *facts[3:])


def _gpu_ms(judge: Judge) -> float | None:
    """Return GPU milliseconds per question. Every member scores all test rows and its share of the dev rows."""
    seconds, members = judge.about.get("scoring_seconds"), judge.about.get("members")
    if not seconds or not members or judge.about.get("device") == "CPU":
        return None
    return float(1000 * seconds / (members * len(judge.test.answers) + len(judge.dev.answers)))


def _format_fact(value: Any) -> str:
    if isinstance(value, int | float):
        return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"
    return "-" if value is None else str(value)


# --- formats --------------------------------------------------------------------------------------


def _interval(value: Estimate, *, signed: bool = False) -> str:
    form = "+.1f" if signed else ".1f"
    parts = [format(100 * (number or 0.0), form) for number in (value.value, value.low, value.high)]
    return f"{parts[0]} [{parts[1]}, {parts[2]}]"


def _format_auroc(value: Estimate) -> str:
    return f"{value.value or 0:.3f} [{value.low or 0:.3f}, {value.high or 0:.3f}]"


def _format_p(value: float) -> str:
    return "< .001" if value < 0.001 else f"{value:.3f}"


# --- figure ---------------------------------------------------------------------------------------


def draw_judge(folder: Path, home: Path = HOME) -> None:
    """Write the figure into a folder, if there are predictions."""
    judges = {name: read_judge(home, name) for name in judge_names(home)}
    if (chosen := choose_judge(judges)) is not None:
        (folder / FIGURE).write_text(figure(chosen), encoding="utf-8")


def figure(judge: Judge) -> str:
    """Return accuracy by share of questions retrieved for, as SVG: exact top-k curves of the test rows."""
    answers = judge.test.answers
    needs = compute_needs(judge.test, best_rule(judge, "judge", RECORDED_RATE))
    ends = [ChartPoint(0.0, float(answers.closed.mean())), ChartPoint(1.0, float(answers.open.mean()))]
    always = [ChartPoint(0.0, ends[1].y), ChartPoint(1.0, ends[1].y)]
    curves = [
        _curve("cascade: judge, then arbiter", needs, answers.closed, judge.test.arbiter_right, COLORS[1]),
        _curve("judge, then rules", needs, answers.closed, right_after_retrieval(judge.test, "rules"), COLORS[2]),
        _curve("judge", needs, answers.closed, answers.open, COLORS[0]),
    ]
    if text := _text_needs(answers):
        name, best = max(text.items(), key=lambda item: compute_frontier(answers.closed, answers.open, item[1]).area)
        curves.append(_curve(f"best text gate ({name})", best, answers.closed, answers.open, COLORS[3]))
    curves += [Curve("always retrieve", always, "currentColor", dashed=True), Curve("random", ends, GRAY, dashed=True)]
    heights = [point.y for curve in curves for point in curve.points]
    frame = ChartFrame(Axis("share of questions retrieved for"), fit_axis("accuracy", heights), width=420, height=280)
    return render_line_chart(curves, frame)


def _curve(name: str, needs: Floats, closed: Bools, right: Bools, color: str) -> Curve:
    frontier = compute_frontier(closed, right, needs)
    steps: Sequence[float] = [step / STEPS for step in range(STEPS + 1)]
    return Curve(name, [ChartPoint(rate, frontier.at(rate)) for rate in steps], color)
