"""The evaluation as one HTML file: what to do first, one picture, then the evidence, the rest folded away."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from knowgate.display import NOTHING, Sheet, percent, points_with_interval
from knowgate.evaluation import (
    MAX_LOSS,
    PER,
    Assumed,
    Evaluation,
    GateResult,
    action_sheet,
    cascade_sheet,
    second_sheet,
)
from knowgate.files import write_text
from knowgate.markup import escape
from knowgate.report import markup
from knowgate.report.comparison import charts, sheets
from knowgate.report.comparison.examples import example_parts
from knowgate.report.comparison.how import CHOOSING
from knowgate.report.comparison.policy import Policy, policy_of, ranked_gates, slices_of
from knowgate.report.comparison.verdict import Verdict, money_words, verdict
from knowgate.report.page import whole_page
from knowgate.runs import cautions_of
from knowgate.statistics import estimate_mean

CHARTED = 4  # gates with pictures of calibration and needs of their own
CURVES = 5  # ROC curves in one picture
FEWEST = 10  # questions of a part that is shown


def write_eval_page(
    evaluation: Evaluation, out: Path, *, assumed: Assumed | None = None, max_loss: float = MAX_LOSS
) -> None:
    """assumed: prices, for what is saved. max_loss: share of the answers that fewer searches may cost."""
    n = len(evaluation.trial.rows)
    about = f"{evaluation.trial.settings['model']}, {n:,} question{'s' if n != 1 else ''}"
    parts = list(sections(evaluation, assumed or Assumed(), max_loss))
    write_text(out, whole_page("Which gate to use", about, parts))


def sections(evaluation: Evaluation, assumed: Assumed, max_loss: float = MAX_LOSS) -> Iterator[str]:
    said = verdict(evaluation, assumed, max_loss)
    policy = policy_of(evaluation, said.advice)
    yield markup.cautions(cautions_of(evaluation.trial))
    yield _verdict(said)
    if evaluation.trial.open_right is not None:
        yield _picture(evaluation, policy)
    if policy is not None:
        yield _spending(said, policy, assumed) if said.advice.gate else ""
        yield _where(evaluation, policy)
        yield _examples(evaluation, policy)
    yield _arbiter(evaluation)
    yield from _folded(evaluation, policy)


def _verdict(said: Verdict) -> str:
    tiles = "".join(f"<div><dt>{escape(tile.about)}</dt><dd>{escape(tile.value)}</dd></div>" for tile in said.tiles)
    parts = [
        f'<p class="light">{escape(said.label)}</p>',
        f"<h2>{escape(said.headline)}</h2>",
        f'<dl class="tiles">{tiles}</dl>' if tiles else "",
        f"<p>{escape(' '.join(said.sentences))}</p>",
        f'<p class="note">{escape(said.note)} <a href="#choosing">How it is chosen</a></p>' if said.note else "",
    ]
    return f'<section class="verdict {said.advice.light}" id="verdict">{"".join(parts)}</section>'


def _picture(evaluation: Evaluation, policy: Policy | None) -> str:
    intro = (
        "Each line retrieves for the questions of highest need first: to the left fewer searches, upwards more right "
        "answers. A gate is worth something where it lies above the straight line, which retrieves at random."
    )
    if policy is not None:
        kind = "recommended" if policy.is_recommended else "best found, not recommended"
        intro += f" The dot is {policy.name} ({kind}), with its 95 % interval."
    drawn = markup.figure(charts.trade_off(evaluation, policy), "Accuracy against searches")
    return markup.section("picture", "What skipping searches does to the answers", intro, [drawn])


def _spending(said: Verdict, policy: Policy, assumed: Assumed) -> str:
    intro = (
        f"Of {policy.name}. Searches and generated tokens are counted in the rows; a search is taken to cost "
        f"{assumed.price_search:g} and {assumed.search_seconds:g} s, a million tokens {1e6 * assumed.price_token:g}"
        f"{' (US dollars)' if assumed == Assumed() else ''}: set --price-search, --price-token and --search-seconds to "
        f"yours. {_break_even(said, assumed)}".rstrip()
    )
    remarks = []
    if said.always.read is None:
        remarks.append(markup.remark("The rows hold no passages, so the tokens that reading them takes are left out."))
    if said.always.written is None:
        remarks.append(markup.remark("The rows hold no texts of answers, so the tokens of writing them are left out."))
    if said.gated.decision is None:
        remarks.append(markup.remark("The gate was not timed here; seconds are those of searching alone."))
    return markup.section("money", "Money and latency", intro, [markup.table(_spent(said, assumed)), *remarks])


def _spent(said: Verdict, assumed: Assumed) -> Sheet:
    ways = (said.always, said.never, said.gated)
    money = [spent.money(assumed) for spent in ways]
    money.append(money[0] - money[-1])
    rows = (
        _row("searches", *(PER * spent.searches for spent in ways)),
        _row("tokens of passages, estimated", *(_times(spent.read) for spent in ways)),
        _row("tokens generated, drafts included", *(_times(spent.written) for spent in ways)),
        ("money", *(money_words(PER * amount, assumed) for amount in money)),
        ("money for 1,000 questions", *(money_words(1_000 * amount, assumed) for amount in money)),
        _row("seconds a question, searching and deciding", *(spent.seconds(assumed) for spent in ways), show="{:.3f}"),
    )
    return Sheet(f"On {PER:,} questions", ("", "always retrieve", "never", "with the gate", "the gate saves"), rows)


def _break_even(said: Verdict, assumed: Assumed) -> str:
    """From which price of a search on the gate is cheaper than always retrieving."""
    price = said.gated.break_even(said.always, assumed)
    if price is None:
        return ""
    if price == 0:
        return "It is cheaper than always retrieving whatever a search costs."
    return f"It is cheaper than always retrieving where a search costs more than {price:.3g}."


def _row(name: str, *amounts: float | None, show: str = "{:,.0f}") -> tuple[str, ...]:
    """always, never and gated, and what is saved between the first and the last."""
    known = [amount for amount in amounts if amount is not None]
    if len(known) < len(amounts):
        return (name, *[NOTHING] * (len(amounts) + 1))
    return (name, *(show.format(value) for value in (*known, known[0] - known[-1])))


def _times(tokens: float | None) -> float | None:
    return None if tokens is None else PER * tokens


def _where(evaluation: Evaluation, policy: Policy) -> str:
    found = slices_of(evaluation, policy, FEWEST)
    intro = (
        f"Of {policy.name}: what its skips change in each part of all questions, those it was chosen on included. Left "
        "of the line answers are lost."
    )
    if not found:
        return markup.section(
            "where", "Where it helps and hurts", intro, [markup.remark("All questions are of one kind.")]
        )
    rows = tuple(
        (part.name, str(part.n), percent(part.skipped), percent(part.always),
         points_with_interval(estimate_mean(part.changes, evaluation.resamples)))
        for part in found
    )  # fmt: skip
    columns = ("part", "n", "searches skipped", "accuracy, always", "change in points")
    drawn = markup.figure(charts.slice_effects(found, evaluation.resamples), "Change against always retrieving")
    parts = [drawn, markup.table(Sheet("By part", columns, rows))]
    return markup.section("where", "Where it helps and hurts", intro, parts)


def _arbiter(evaluation: Evaluation) -> str:
    if evaluation.cascade is None:
        return ""
    intro = (
        "After retrieval an arbiter chooses between the answer with passages and the one from memory: each gate, at "
        "its own threshold, with the arbiter behind it. The row 'always' is the arbiter alone."
    )
    table = _table(cascade_sheet(evaluation.cascade))
    return markup.section("arbiter", "With an arbiter behind the gate", intro, [table])


def _examples(evaluation: Evaluation, policy: Policy) -> str:
    intro = f"Of {policy.name}, those it was surest of; the number is the need. They open on a click."
    if not evaluation.trial.has_text.any():
        intro += " This run holds no question texts, so ids stand for them."
    return markup.section("examples", "Decisions to look at", intro, list(example_parts(evaluation, policy)))


# --- folded away ----------------------------------------------------------------------------------


def _folded(evaluation: Evaluation, policy: Policy | None) -> Iterator[str]:
    chosen = [policy.gate.gate] if policy else []
    every = markup.wide_table(sheets.every(evaluation), sheets.HOW, chosen)
    hint = f"{len(evaluation.gates)} rows, each gate at its own threshold"
    yield markup.folded("gates", "All gates, all numbers", "Heads sort; 95 % intervals in brackets.", [every], hint)
    yield _ranking(evaluation, policy)
    if evaluation.trial.open_right is not None:
        yield _comparisons(evaluation)
        yield _slices(evaluation)
    yield _about(evaluation)
    yield _how()


def _ranking(evaluation: Evaluation, policy: Policy | None) -> str:
    intro = "How well need tells what the LLM does not know, whatever the threshold; and whether it is a probability."
    gates = _tellers(evaluation, policy)
    drawn = [markup.figure(charts.roc(evaluation, gates[:CURVES]), "ROC curves, with AUROC")] if gates else []
    for gate in gates[:CHARTED]:
        drawn.append(markup.figure(charts.reliability(evaluation, gate), f"Calibration: {gate.gate}"))
        drawn.append(markup.figure(charts.histogram(evaluation, gate), f"Needs: {gate.gate}"))
    hint = f"{min(CHARTED, len(gates))} gates, the best by AUROC among them"
    return markup.folded("ranking", "Calibration and ROC", intro, [markup.pair(drawn)], hint)


def _tellers(evaluation: Evaluation, policy: Policy | None) -> list[GateResult]:
    """The gate that is looked at closely, then those that best tell what the LLM does not know."""
    first = [policy.gate] if policy else []
    ranked = sorted(ranked_gates(evaluation), key=lambda gate: -(gate.measures["auroc"].value or 0.0))
    return first + [gate for gate in ranked if gate not in first]


def _comparisons(evaluation: Evaluation) -> str:
    intro = "Each gate against always retrieving, and the most accurate gate against the others, on the same questions."
    parts = [_table(sheets.comparisons(evaluation)), _table(sheets.frontier(evaluation))]
    parts += [_table(second_sheet(evaluation.second))] if evaluation.second else []
    parts += [_table(action_sheet(evaluation.actions))] if evaluation.actions else []
    return markup.folded("compared", "Tests and thresholds", intro, parts, "differences with p-values, rates, areas")


def _slices(evaluation: Evaluation) -> str:
    parts = [_table(sheet) for sheet in sheets.slices(evaluation)]
    if not parts:
        return ""
    intro = "Accuracy @ retrieval rate, and in brackets the gain over matched random in points."
    return markup.folded("slices", "All gates by part", intro, parts)


def _about(evaluation: Evaluation) -> str:
    trial = evaluation.trial
    left = ", ".join(f"{count} {reason}" for reason, count in trial.left_out.items() if count) or "none"
    rows = (
        ("model", str(trial.settings["model"])),
        ("label runs", ", ".join(Path(run).name for run in trial.runs)),
        ("questions", str(len(trial.rows))),
        ("left out", left),
        ("nothing found, so answered closed-book either way", str(trial.unopened)),
        ("graded by", str(trial.settings["grader"])),
        ("intervals", f"95 %, {evaluation.resamples} bootstrap resamples"),
    )
    intro = "Every gate decides on the same recorded questions; nothing was answered again for this page."
    return markup.folded(
        "about", "What was measured", intro, [markup.table(Sheet("Trial", ("", "value"), rows), kind="text")]
    )


def _table(sheet: Sheet) -> str:
    return markup.table(sheet, sheets.HOW)


def _how() -> str:
    chosen = "".join(f"<li>{escape(step)}</li>" for step in CHOOSING)
    parts = [
        f'<h3 id="choosing">How a recommendation is chosen</h3><ol>{chosen}</ol>',
        markup.definitions("Definitions", sheets.HOW),
    ]
    return markup.folded("how", "How every number is computed", "What the heads of the tables mean.", parts)
