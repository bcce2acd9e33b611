"""The pages on gates: ranking, accuracy at several retrieval rates, and calibration, on every data set."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.tables.common import GROUPS, QWEN, RUNS, Rows, bold_best, evaluate_data_sets, list_gate_names, table
from benchmarks.tables.names import display_name
from benchmarks.tables.operating import operating_tables

CMRC = "cmrc2018_ctx"
CMRC_NOTE = (
    "\n**Hardly anything about gates can be learned from `{name}`**, because the LLM knows {known} of its {questions} test "
    "questions. It knows {train_known} of the {train_questions:,} labeled training questions. Fitting on `known` needs eight, so "
    "the gates that do so are missing. These training questions are the trial part of CMRC 2018. Its answers are longer (median: "
    "19 characters; test: 7), so with passages {train_open:.0f} % are right there, but {open:.0f} % of the test questions. The "
    "other 1,584 training questions are like the test questions, but are not in this label run. They would help little: of all "
    "2,584, only 9 have a mastery of .5 or more ([labels](kbm.md)). SKR and `fusion on benefit` can be fitted "
    "all the same. SKR retrieves for nearly every question. `fusion on benefit` tells where passages help (AUROC {benefit}), not "
    "what the LLM knows ({auroc}). At its own threshold it loses {loss:.1f} points against always retrieving. `prompt` is "
    "missing, because the label run leaves out the self-assessment where yes and no have equal logits (8 test questions). The "
    "judges `ik`, `kbm` and `uar` did not read these questions; for other judges of IK see [transfer](transfer.md).\n"
)


def render_data_sets(evaluations: dict[str, Any]) -> str:
    """Render the accuracy of never, always and oracle on each data set."""
    rows: Rows = []
    for name, result in evaluations.items():
        labels = result.table
        values = [result.gate(line).measures["accuracy"].value for line in ("never", "always", "oracle")]
        hurt = float((labels.closed_book_right & ~labels.open_book_right).mean())
        rows.append((name, str(len(labels.rows)), *(f"{value:.3f}" for value in values), f"{hurt:.3f}"))
    return table(("data set", "test questions", "never", "always", "oracle", "retrieval hurts"), rows)


def render_by_data_set(evaluations: dict[str, Any], cell: Any) -> str:
    """Render one row per gate and one column per data set."""
    rows: Rows = []
    for gate in list_gate_names(evaluations):
        results = [next((own for own in result.gates if own.gate == gate), None) for result in evaluations.values()]
        rows.append((display_name(gate), *("–" if own is None else cell(own) for own in results)))
    return table(("gate", *evaluations), bold_best(rows, range(1, len(evaluations) + 1)))


def auroc_cell(gate: Any) -> str:
    """Format the AUROC of not knowing, with its interval."""
    return _with_interval(gate.measures["auroc"])


def rate_cell(rate: float) -> Any:
    """Return a function that formats the points above random retrieval at this rate."""

    def cell(gate: Any) -> str:
        straight = gate.frontier.accuracies[0] * (1 - rate) + gate.frontier.accuracies[-1] * rate
        return f"{100 * (gate.at_rate[rate] - straight):+.1f}"

    return cell


def tuned_cell(gate: Any) -> str:
    """Format the result of a threshold chosen on dev questions, against always retrieving."""
    tuned = gate.tuned
    if tuned is None:
        return "–"
    return f"{100 * (tuned.accuracy - tuned.always):+.1f} @ {100 * tuned.rate:.0f} %"


def benefit_cell(gate: Any) -> str:
    """Format the AUROC of benefit, with its interval."""
    return _with_interval(gate.measures["auroc_benefit"])


def _with_interval(value: Any) -> str:
    return "–" if value.value is None else f"{value.value:.3f} [{value.low:.2f}, {value.high:.2f}]"


def ece_cell(gate: Any) -> str:
    """Format the expected calibration error."""
    return f"{gate.measures['ece'].value:.3f}"


def main_tables(model: str, title: str) -> Iterator[str]:
    """Render the page of an LLM."""
    yield f"## {title}\n"
    for group, names in GROUPS.items():
        if evaluations := evaluate_data_sets(model, names):
            yield f"### {group}\n"
            yield from _group_tables(evaluations)


def _group_tables(evaluations: dict[str, Any]) -> Iterator[str]:
    yield render_data_sets(evaluations)
    if CMRC in evaluations and (RUNS / QWEN / f"{CMRC}-train").is_dir():
        yield describe_cmrc(evaluations[CMRC])
    yield from operating_tables(evaluations)
    yield '\n**AUROC of "does not know"** (95 % bootstrap interval; best of a column in bold).\n'
    yield render_by_data_set(evaluations, auroc_cell)
    yield '\n**AUROC of "retrieval turns the answer right"** (benefit).\n'
    yield render_by_data_set(evaluations, benefit_cell)
    for rate in (0.75, 0.5):
        yield f"\n**Accuracy at {rate:.0%} retrieval, points above retrieving at random** (exact top-k).\n"
        yield render_by_data_set(evaluations, rate_cell(rate))
    yield (
        "\n**Threshold chosen on 30 % of the test questions, realised on the others: points against always retrieving "
        "@ retrieval rate.** 0.0 @ 100 % means that the dev share showed nothing to skip.\n"
    )
    yield render_by_data_set(evaluations, tuned_cell)
    yield "\n**ECE of need as the probability of not knowing** (lower is better; nothing in bold).\n"
    yield render_by_data_set(evaluations, ece_cell).replace("**", "")
    yield from fusion_against_parts(evaluations)


def describe_cmrc(result: Any) -> str:
    """Say what the gates of CMRC 2018 were fitted on, and how little its test questions can show."""
    from knowgate.data.runs.folder import RunFolder

    train, labels = list(RunFolder(RUNS / QWEN / f"{CMRC}-train").rows()), result.table
    fusion, always = (result.gate(name).measures for name in ("fusion on benefit", "always"))
    return CMRC_NOTE.format(
        name=CMRC,
        known=int(labels.closed_book_right.sum()),
        questions=len(labels.rows),
        train_known=sum(bool(row.closed.correct) for row in train),
        train_questions=len(train),
        train_open=100 * sum(bool(row.open.correct) for row in train) / len(train),
        open=100 * labels.open_book_right.mean(),
        benefit=_with_interval(fusion["auroc_benefit"]),
        auroc=_with_interval(fusion["auroc"]),
        loss=100 * (always["accuracy"].value - fusion["accuracy"].value),
    )


def fusion_against_parts(evaluations: dict[str, Any]) -> Iterator[str]:
    """Compare fusion with the best of its parts on each data set, paired over the same resamples."""
    from knowgate.stats.bootstrap import bootstrap_p_value, summarize_resamples

    parts = ("logprob:first", "logprob:mean", "logprob:min", "logprob:entropy", "logprob:margin", "prompt", "seakr",
             "probe", "probe, linear", "probe after draft")  # fmt: skip
    rows: Rows = []
    for name, result in evaluations.items():
        results = {gate.gate: gate for gate in result.gates}
        part_results = [results[part] for part in parts if part in results]
        if "fusion" not in results or not part_results:
            continue
        if results["fusion"].measures["auroc"].value is None:
            continue
        best = max(part_results, key=lambda gate: gate.measures["auroc"].value)
        difference = results["fusion"].resampled["auroc"] - best.resampled["auroc"]
        gap = summarize_resamples(difference)
        verdict = "above" if gap.low > 0 else "below" if gap.high < 0 else "not told apart"
        interval = f"{gap.value:+.3f} [{gap.low:+.3f}, {gap.high:+.3f}]"
        own, other = (f"{gate.measures['auroc'].value:.3f}" for gate in (results["fusion"], best))
        rows.append((name, own, best.gate, other, interval, f"{bootstrap_p_value(difference):.3f}", verdict))
    yield "\n**Fusion against the best of its parts on that data set** (AUROC; paired bootstrap).\n"
    yield table(("data set", "fusion", "best part", "its AUROC", "difference", "p", "fusion is"), rows)
