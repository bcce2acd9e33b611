"""Every gate on every data set: how it ranks the questions, and what it comes to at its own threshold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.tables.common import GROUPS, Rows, bold_best, evaluations, gate_names, table
from benchmarks.tables.names import shown
from benchmarks.tables.operating import operating_tables


def facts(found: dict[str, Any]) -> str:
    rows: Rows = []
    for name, one in found.items():
        trial = one.table
        values = [one.gate(line).measures["accuracy"].value for line in ("never", "always", "oracle")]
        hurt = float((trial.closed_right & ~trial.open_right).mean())
        rows.append((name, str(len(trial.rows)), *(f"{value:.3f}" for value in values), f"{hurt:.3f}"))
    return table(("data set", "test questions", "never", "always", "oracle", "retrieval hurts"), rows)


def by_data(found: dict[str, Any], cell: Any) -> str:
    """Gates down, data sets across."""
    rows: Rows = []
    for gate in gate_names(found):
        have = {name: next((g for g in one.gates if g.gate == gate), None) for name, one in found.items()}
        rows.append((shown(gate), *("–" if g is None else cell(g) for g in have.values())))
    return table(("gate", *found), bold_best(rows, range(1, len(found) + 1)))


def auroc_cell(gate: Any) -> str:
    return _with_interval(gate.measures["auroc"])


def rate_cell(rate: float) -> Any:
    def cell(gate: Any) -> str:
        straight = gate.frontier.accuracies[0] * (1 - rate) + gate.frontier.accuracies[-1] * rate
        return f"{100 * (gate.at_rate[rate] - straight):+.1f}"

    return cell


def tuned_cell(gate: Any) -> str:
    tuned = gate.tuned
    if tuned is None:
        return "–"
    return f"{100 * (tuned.accuracy - tuned.always):+.1f} @ {100 * tuned.rate:.0f} %"


def benefit_cell(gate: Any) -> str:
    return _with_interval(gate.measures["auroc_benefit"])


def _with_interval(value: Any) -> str:
    return "–" if value.value is None else f"{value.value:.3f} [{value.low:.2f}, {value.high:.2f}]"


def ece_cell(gate: Any) -> str:
    return f"{gate.measures['ece'].value:.3f}"


def main_tables(model: str, title: str) -> Iterator[str]:
    yield f"## {title}\n"
    for group, names in GROUPS.items():
        if found := evaluations(model, names):
            yield f"### {group}\n"
            yield from _group_tables(found)


def _group_tables(found: dict[str, Any]) -> Iterator[str]:
    yield facts(found)
    yield from operating_tables(found)
    yield '\n**AUROC of "does not know"** (95 % bootstrap interval; best of a column in bold).\n'
    yield by_data(found, auroc_cell)
    yield '\n**AUROC of "retrieval turns the answer right"** (benefit).\n'
    yield by_data(found, benefit_cell)
    for rate in (0.75, 0.5):
        yield f"\n**Accuracy at {rate:.0%} retrieval, points above retrieving at random** (exact top-k).\n"
        yield by_data(found, rate_cell(rate))
    yield (
        "\n**Threshold chosen on 30 % of the test questions, realised on the others: points against always retrieving "
        "@ retrieval rate.** 0.0 @ 100 % means that the dev share showed nothing to skip.\n"
    )
    yield by_data(found, tuned_cell)
    yield "\n**ECE of need as the probability of not knowing** (lower is better; nothing in bold).\n"
    yield by_data(found, ece_cell).replace("**", "")
    yield from fusion_against_parts(found)


def fusion_against_parts(found: dict[str, Any]) -> Iterator[str]:
    """Where fusion is above each of its parts, and where not; paired over the same resamples."""
    from knowgate.stats.bootstrap import bootstrap_p_value, summarize_resamples

    parts = ("logprob:first", "logprob:mean", "logprob:min", "logprob:entropy", "logprob:margin", "prompt", "seakr",
             "probe", "probe, linear", "probe after draft")  # fmt: skip
    rows: Rows = []
    for name, one in found.items():
        have = {gate.gate: gate for gate in one.gates}
        inside = [have[part] for part in parts if part in have]
        if "fusion" not in have or not inside:
            continue
        if have["fusion"].measures["auroc"].value is None:
            continue
        best = max(inside, key=lambda gate: gate.measures["auroc"].value)
        difference = have["fusion"].resampled["auroc"] - best.resampled["auroc"]
        gap = summarize_resamples(difference)
        verdict = "above" if gap.low > 0 else "below" if gap.high < 0 else "not told apart"
        interval = f"{gap.value:+.3f} [{gap.low:+.3f}, {gap.high:+.3f}]"
        own, other = (f"{gate.measures['auroc'].value:.3f}" for gate in (have["fusion"], best))
        rows.append((name, own, best.gate, other, interval, f"{bootstrap_p_value(difference):.3f}", verdict))
    yield "\n**Fusion against the best of its parts on that data set** (AUROC; paired bootstrap).\n"
    yield table(("data set", "fusion", "best part", "its AUROC", "difference", "p", "fusion is"), rows)
