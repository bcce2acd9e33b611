"""Sweeps: tables that show a gate on label runs while one setting varies.

The setting is the threshold, the variant of the gate, or the data set or LLM it was fitted on.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np

from knowgate.core.display import MISSING_VALUE, TextTable, format_percent, format_points
from knowgate.core.options import Options
from knowgate.core.registry import split_spec
from knowgate.data.runs.records import TableScores
from knowgate.data.runs.table import LabelTable, load_label_table
from knowgate.errors import BadInput, KnowgateError
from knowgate.gates import load_gate
from knowgate.gates.fitted_gate import get_gate_name
from knowgate.gates.offline_scoring import drop_seen_rows, score_gate
from knowgate.gates.scoring import bind_gate, read_questions, score_questions
from knowgate.models.prompts.answers import AnswerPrompts
from knowgate.stats.bootstrap import estimate_mean
from knowgate.stats.metrics import BoolArray, auroc
from knowgate.stats.proportions import format_points_estimate
from knowgate.training.fit_function import read_fit_options
from knowgate.types import Model, Question

THRESHOLDS = tuple(round(0.1 * step, 1) for step in range(1, 10))  # IK paper
BETAS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)  # CBDR: answer directly if confidence is above beta
# Options that make the many fits of a sweep fast. Options of the caller take precedence.
FAST_FIT_OPTIONS: dict[str, dict[str, Any]] = {"probe": {"kind": "linear"}, "fusion": {"cheap": True}}
DECISION_COLUMNS = ("retrieval", "accuracy", "random", "gain", "against always", "harm", "waste", "judged right")
WARMUP_QUESTIONS = 2  # not timed: they load weights and indexes


# --- thresholds -----------------------------------------------------------------------------------


def sweep_thresholds(table: LabelTable, gate: TableScores) -> TextTable:
    """Tabulate how good a gate's decisions are at each threshold, from 0.1 to 0.9."""
    decisions = {f"{threshold:g}": gate.needs > threshold for threshold in THRESHOLDS}
    title = f"{gate.gate}: threshold, {len(table.rows)} questions"
    return _build_decision_table(table, title, "retrieve if need >", decisions)


def sweep_betas(table: LabelTable, gate: TableScores, betas: Sequence[float] = BETAS) -> TextTable:
    """Tabulate how good a gate's decisions are at each beta (CBDR paper).

    If its confidence is above beta, the LLM answers without retrieval.
    """
    decisions = {f"{beta:g}": select_unsure_questions(gate, beta) for beta in betas}
    confidence = "1 - need" if gate.raw is None else "the raw confidence"
    title = f"{gate.gate}: beta on {confidence}, {len(table.rows)} questions"
    return _build_decision_table(table, title, "answer if confidence >", decisions)


def _build_decision_table(
    table: LabelTable, title: str, first_column: str, decisions: Mapping[str, BoolArray]
) -> TextTable:
    """Build a table of the quality of several decision rules.

    The last row is a baseline, which makes the more frequent right decision for every question.

    Args:
        table: The graded questions.
        title: Title of the table.
        first_column: Title of the first column, which names the rules.
        decisions: For each rule, for which questions it retrieves.
    """
    rows = [(name, *measure_decisions(table, retrieve).values()) for name, retrieve in decisions.items()]
    rows.append(("majority", *measure_majority_decisions(table).values()))
    return TextTable(title, (first_column, *DECISION_COLUMNS), tuple(rows))


def select_unsure_questions(gate: TableScores, beta: float) -> BoolArray:
    """Select the questions to retrieve for: those with a confidence of at most beta.

    As in the CBDR paper, the uncalibrated confidence is used, if there is one.

    Returns:
        For each question, whether to retrieve.
    """
    scores = gate.needs if gate.raw is None else gate.raw
    confidence = 1 - scores
    return np.asarray(confidence <= beta + 1e-12)  # the tolerance absorbs rounding errors of the subtraction


def measure_decisions(table: LabelTable, retrieve: BoolArray) -> dict[str, str]:
    """Measure the quality of retrieval decisions, formatted as table cells.

    Args:
        table: Questions whose answers without passages (closed) and with passages (open) are graded.
        retrieve: For each question, whether to retrieve.

    Returns:
        One cell for each of `DECISION_COLUMNS`: the retrieval rate; the accuracy of the answers; the accuracy of
        retrieving for as many questions at random; accuracy minus that of random; accuracy minus that of always
        retrieving, with a 95 % interval; harm; waste; and the share of right decisions (retrieve if the LLM does not
        know the answer). Without open answers, all cells but the first and the last are dashes.
    """
    closed_book_right = table.closed_book_right
    rate = float(retrieve.mean())
    cells = dict.fromkeys(DECISION_COLUMNS, MISSING_VALUE)
    cells["retrieval"] = format_percent(rate)
    cells["judged right"] = format_percent(float((retrieve == ~closed_book_right).mean()))
    if table.open_book_right is None:
        return cells
    open_book_right = table.open_book_right
    right = np.where(retrieve, open_book_right, closed_book_right).astype(float)
    accuracy = float(right.mean())
    random = float(rate * open_book_right.mean() + (1 - rate) * closed_book_right.mean())
    cells["accuracy"] = format_percent(accuracy)
    cells["random"] = format_percent(random)
    cells["gain"] = format_points(accuracy - random)
    cells["against always"] = format_points_estimate(estimate_mean(right - open_book_right))
    is_harmed = ~retrieve & open_book_right & ~closed_book_right  # skipped, but passages were needed
    is_wasted = retrieve & closed_book_right  # retrieved, but the LLM knew the answer
    cells["harm"] = format_percent(float(is_harmed.mean()))
    cells["waste"] = format_percent(float(is_wasted.mean()))
    return cells


def measure_majority_decisions(table: LabelTable) -> dict[str, str]:
    """Measure a baseline with the same decision for every question.

    It retrieves if the LLM knows less than half of the answers.
    """
    share_unknown = float((~table.closed_book_right).mean())
    return measure_decisions(table, np.full(len(table.rows), share_unknown > 0.5))


def sweep_variants(table: LabelTable, prefix: str) -> TextTable:
    """Tabulate the gates whose decisions are stored in the label runs and whose name starts with `prefix`.

    Raises:
        BadInput: There is no such gate.
    """
    names = [name for name in table.recorded_needs if name.startswith(prefix)]
    if not names:
        recorded = ", ".join(table.recorded_needs) or "no gate"
        raise BadInput(
            f"the recorded answers have decisions of {recorded}, but not of gate '{prefix}'. Add them: `knowgate eval` with "
            "record=True."
        )
    columns = ("retrieval", "accuracy", "random", "gain")
    rows = []
    for name in names:
        scores = score_gate(table, name)
        cells = measure_decisions(table, scores.needs > scores.threshold)
        rows.append((scores.gate, format_auroc(table, scores), *(cells[column] for column in columns)))
    return TextTable(f"Variants of {prefix}", ("gate", "AUROC", *columns), tuple(rows))


def format_auroc(table: LabelTable, gate: TableScores) -> str:
    """Format how well a gate's needs predict unknown answers, as AUROC."""
    value = auroc(~table.closed_book_right, gate.needs)
    return MISSING_VALUE if value is None else f"{value:.3f}"


# --- transfer between LLMs and data sets ----------------------------------------------------------


def sweep_plug_in(gates: Sequence[str], runs: Sequence[Path]) -> TextTable:
    """Tabulate the AUROC of fitted gates (rows) on label runs (columns).

    '*' marks gates fitted on another LLM.
    """
    tables = [load_label_table([run]) for run in runs]
    rows = []
    for gate in gates:
        cells = [_make_transfer_cell(table, gate) for table in tables]
        rows.append((Path(gate).name, *cells))
    title = "AUROC of gates (rows) on label runs (columns); *: fitted on another LLM"
    return TextTable(title, ("gate", *(run.name for run in runs)), tuple(rows))


def _make_transfer_cell(table: LabelTable, gate: str) -> str:
    """Format the AUROC of a gate on a label run.

    '*' marks gates fitted on another LLM. Errors are shown in parentheses.
    """
    try:
        table = drop_seen_rows(table, [gate])
        scores = score_gate(table, gate, plug_in=True)
    except KnowgateError as error:
        return f"({error.brief})"
    is_of_another_llm = bool(scores.about)  # the note says which LLM the gate was fitted on
    return format_auroc(table, scores) + (" *" if is_of_another_llm else "")


def sweep_transfer(
    spec: str, training_runs: Sequence[Path], test_runs: Sequence[Path], notify: Callable[[str], None]
) -> TextTable:
    """Fit a gate on each training run (rows) and tabulate its AUROC on each test run (columns).

    Args:
        spec: Name of the gate, followed by options of its fit if needed, such as 'ik:mode=text,tokens=8'.
        training_runs: Label runs to fit on.
        test_runs: Label runs to measure on.
        notify: Called with a message before each fit.
    """
    with tempfile.TemporaryDirectory() as folder:
        gates = [_fit_on_run(spec, run, Path(folder), notify) for run in training_runs]
        table = sweep_plug_in([str(gate) for gate in gates], test_runs)
    return TextTable(f"AUROC of {spec} fitted on (rows), tested on (columns)", table.columns, table.rows)


def _fit_on_run(spec: str, run: Path, folder: Path, notify: Callable[[str], None]) -> Path:
    """Fit a gate on one label run and return its folder.

    Example of a spec: 'ik:mode=text,tokens=8'.
    """
    from knowgate.training.gate import fit, load_fit_function

    name, option_text = split_spec(spec)
    given_options = parse_fit_options(read_fit_options(load_fit_function(name)), option_text)
    options = FAST_FIT_OPTIONS.get(name, {}) | given_options
    notify(f"fitting {name} on {run.name}")
    fit(name, run, out=folder / run.name, target="known", **options)
    return folder / run.name


def parse_fit_options(model: type[Options], text: str) -> dict[str, Any]:
    """Parse options of a fit function.

    Example: 'mode=text,tokens=8' becomes {"mode": "text", "tokens": 8}.

    Args:
        model: Options of the fit function, whose types say which values are texts.
        text: The options. The value of an option that is not a text is parsed as JSON, in upper or lower case ('True' or
            'true'). If that fails, the value stays a text.
    """
    hints = get_type_hints(model)
    options: dict[str, Any] = {}
    for assignment in filter(str.strip, text.split(",")):
        key, _, value = (part.strip() for part in assignment.partition("="))
        hint = hints.get(key, str)
        is_text = hint is str or str in get_args(hint)  # `str`, or a union such as `str | None`
        options[key] = value
        if not is_text:
            with suppress(ValueError):
                options[key] = json.loads(value.lower())
    return options


# --- latency --------------------------------------------------------------------------------------


def time_gates(
    gates: Sequence[str], questions: Sequence[Question], model: Model, prompts: AnswerPrompts, *, plug_in: bool = False
) -> dict[str, list[float]]:
    """Measure how many seconds each gate takes per question.

    Gates take turns, so a slow phase of the machine affects all.

    Returns:
        The seconds of each question, by the name of the gate.

    Raises:
        BadInput: There are no further questions to time.
    """
    if len(questions) <= WARMUP_QUESTIONS:
        raise BadInput(
            f"a latency test needs more than {WARMUP_QUESTIONS} questions, but got {len(questions)}. Give more questions."
        )
    bound = {get_gate_name(gate): bind_gate(load_gate(gate, plug_in=plug_in), model, prompts) for gate in gates}
    seconds: dict[str, list[float]] = {name: [] for name in bound}
    for question in questions:
        for name, gate in bound.items():
            start = time.perf_counter()
            readings = read_questions(model, [gate], [question], prompts)
            score_questions(gate, [question], readings)
            seconds[name].append(time.perf_counter() - start)
    return {name: values[WARMUP_QUESTIONS:] for name, values in seconds.items()}


def build_latency_table(latencies: Mapping[str, Sequence[float]]) -> TextTable:
    """Build the table of median, 95th percentile and mean latency of each gate."""
    rows = []
    for gate, seconds in latencies.items():
        statistics = (np.median(seconds), np.quantile(seconds, 0.95), np.mean(seconds))
        rows.append((gate, *(f"{value:.4f}" for value in statistics), str(len(seconds))))
    title = f"Seconds to decide, one question at a time (the first {WARMUP_QUESTIONS} are not counted)"
    return TextTable(title, ("gate", "median", "95 % within", "mean", "questions"), tuple(rows))
