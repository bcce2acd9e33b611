"""Scoring of gates on a label table, which holds recorded answers and signals, so that no LLM runs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

import numpy as np

from knowgate.core.validation import expand_path, read_text
from knowgate.data.runs.columns import TOKEN_STATISTICS
from knowgate.data.runs.folder import suggest_data_and_model
from knowgate.data.runs.records import RecordedNeeds, TableScores, write_needs
from knowgate.data.runs.table import LabelTable
from knowgate.data.signals.confidence import SELF_ASSESSMENT
from knowgate.data.signals.samples import SEAKR, SEAKR_END
from knowgate.errors import BadInput, BadSetting, UnknownName, UnsupportedSignal
from knowgate.gates import FITTED_GATES, GATES, load_gate, scoring
from knowgate.gates.artifacts.drift import compute_far_share
from knowgate.gates.artifacts.gate_folder import SEEN_FILE, parse_fitted_spec
from knowgate.gates.fitted_gate import FittedGate, get_gate_folder, get_gate_name
from knowgate.stats.metrics import BoolArray
from knowgate.types import Gate, Signal

SIGNAL_NAMES = {Signal.HIDDEN: "hidden states", Signal.LABELS: "label logits", Signal.LOGPROBS: "log-probabilities"}
LABEL_OPTIONS = {Signal.HIDDEN: "layers=mid,late,last", Signal.SAMPLES: "samples=20"}


@dataclass(frozen=True)
class RunModelIdentity:
    """Name and fingerprint of a label run's LLM. `depth` is 0, because the number of layers is unknown."""

    name: str
    fingerprint: str
    depth: int = 0

    @classmethod
    def from_table(cls, table: LabelTable) -> Self:
        """Return the identity of the LLM whose answers a label table holds."""
        return cls(table.settings["model"], table.settings["model_fingerprint"])


def _bind_to_table(gate: Gate, table: LabelTable, spec: str) -> Gate:
    """Return a copy of the gate for the LLM of a label table. Error messages call the gate `spec`.

    Raises:
        UnsupportedSignal: The table lacks a signal that the gate needs.
    """
    # Label runs do not record the LLM's answer to a prompt of the gate itself, unless it is a recorded signal.
    if Signal.LABELS in gate.needs and not gate.recorded_signal:
        raise _make_prompt_error(table, spec)
    missing = sorted(gate.needs - find_signals(table))
    if missing:
        raise _make_signal_error(table, spec, missing)
    with scoring.wrap_plugin_errors(gate):
        return gate.bind(RunModelIdentity.from_table(table), table.settings["prompts_fingerprint"])


def _make_signal_error(table: LabelTable, spec: str, missing: Sequence[Signal]) -> UnsupportedSignal:
    """Build the error for a gate that needs signals which a table lacks."""
    names = ", ".join(SIGNAL_NAMES.get(signal, signal) for signal in missing)
    data, model = suggest_data_and_model(table.settings)
    options = [f"data={data}", f"model={model}"]
    options += [LABEL_OPTIONS[signal] for signal in missing if signal in LABEL_OPTIONS]
    return UnsupportedSignal(
        f"gate '{spec}' needs {names}, which the label run does not contain. Label the questions again with an LLM "
        f"that provides them: `knowgate label` with {', '.join(options)}",
        brief=f"the label run has no {names}",
    )


def _make_prompt_error(table: LabelTable, spec: str) -> UnsupportedSignal:
    """Build the error for a gate with its own prompt. Label runs lack the LLM's reply to such a prompt."""
    data, model = suggest_data_and_model(table.settings)
    return UnsupportedSignal(
        f"gate '{spec}' sends the LLM a prompt of its own, which the label run does not contain. Run the gate with the "
        f"LLM instead: data={data}, model={model}, gates={spec}",
        brief="sends the LLM a prompt of its own",
    )


def find_signals(table: LabelTable) -> frozenset[Signal]:
    """Return the signals in a label table, such as drafts or hidden states.

    For most signals, only the first row is checked.
    """
    reading = table.readings[0]
    # Only the gate `seakr` needs both samples and hidden states. It computes an uncertainty from them, so a recorded
    # uncertainty replaces both.
    has_uncertainty = SEAKR in reading.signals or SEAKR_END in reading.signals
    names_in_rows = set(table.signal_names.tolist())  # each row has a set of names
    available = {
        Signal.DRAFT: reading.draft is not None,
        Signal.LOGPROBS: reading.draft is not None and reading.draft.tokens is not None,
        Signal.SAMPLES: bool(reading.samples) or has_uncertainty,
        Signal.HIDDEN: bool(reading.hidden) or has_uncertainty,
        Signal.LABELS: all(SELF_ASSESSMENT in names for names in names_in_rows),
    }
    return frozenset(signal for signal, is_available in available.items() if is_available)


def list_scorable_gates(table: LabelTable) -> list[str]:
    """List the gates that a label table can evaluate without running the LLM."""
    signals, gates = find_signals(table), list(table.recorded_needs)
    if Signal.LOGPROBS in signals:
        # Some statistics are missing in rows of a server that lists only the most probable tokens.
        in_all_rows = frozenset.intersection(*set(table.token_statistics.tolist()))
        statistics = [f"logprob:{name}" for name in TOKEN_STATISTICS if name in in_all_rows]
        gates = ["logprob:first", "logprob:mean", "logprob:min", *statistics, "flare", *gates]
    if Signal.LABELS in signals:
        gates = ["prompt", *gates]
    if all({SEAKR, SEAKR_END} & names for names in set(table.signal_names.tolist())):  # each row has one of the two
        gates.append("seakr")
    return gates


# --- scoring --------------------------------------------------------------------------------------


@dataclass
class _GateScorer:
    """Collects the scores of a gate on a label table, chunk by chunk.

    Attributes:
        name: What result tables call the gate.
        spec: What error messages call the gate: its folder if it is fitted.
        gate: The gate, bound to the LLM of the table.
        needs: Need for retrieval of each row.
        raw: Scores of the rows before calibration; empty for gates that are not fitted.
        distances: How far each question is from the training questions; None if unknown.
    """

    name: str
    spec: str
    gate: Gate
    needs: list[float] = field(default_factory=list)
    raw: list[float] = field(default_factory=list)
    distances: list[float | None] = field(default_factory=list)

    @property
    def score_fingerprint(self) -> str:
        """Fingerprint of a fitted gate without its threshold; '' for gates that are not fitted."""
        return self.gate.score_fingerprint if isinstance(self.gate, FittedGate) else ""

    def add(self, chunk: LabelTable) -> None:
        """Score the next chunk of rows."""
        readings = scoring.add_neighbors(self.gate, chunk.questions, list(chunk.readings))
        if scoring.needs_label_prompts(self.gate, readings):
            raise _make_prompt_error(chunk, self.spec)
        scores = scoring.score_with_raw(self.gate, chunk.questions, readings)
        self.needs += scores.needs
        self.raw += scores.raw or []
        self.distances += scoring.measure_distances(self.gate, chunk.questions, readings)

    def make_scores(self, table: LabelTable, name: str, gate: Gate) -> TableScores:
        """Return the scores of all chunks that were added, with the threshold and cost of a gate.

        Args:
            table: The whole table.
            name: Name of the gate in tables.
            gate: The gate with the threshold. It may differ from `self.gate` only in its threshold.
        """
        n_samples = gate.request.samples
        return TableScores(
            name,
            gate.threshold,
            np.array(self.needs),
            about=gate.note,
            raw=np.array(self.raw) if self.raw else None,
            far=compute_far_share(self.distances),  # share of questions unlike the training questions
            scoring=self.score_fingerprint,
            calls=float(scoring.count_own_calls(gate)),
            drafts=gate.request.draft_tokens > 0,
            extra_tokens=n_samples * float(table.closed_book_tokens.mean()),  # a sample is about as long as an answer
        )


def score_gates(table: LabelTable, gates: Sequence[str | Gate], *, plug_in: bool = False) -> list[TableScores]:
    """Score several gates on a label table. Recorded scores are reused.

    Args:
        table: The label table.
        gates: Gates, specs, folders or names of recorded gates. 'auto' stands for `list_scorable_gates`.
        plug_in: Accept gates that were fitted on a different LLM than that of the table.

    Raises:
        UnsupportedSignal: The table lacks a signal that a gate needs.
        BadSetting: A gate was fitted on questions of the table.
    """
    unique = _list_unique_gates(table, gates)
    scores: dict[str | int, TableScores] = {}
    scorers: dict[str | int, _GateScorer] = {}
    for key, gate in unique.items():
        recorded = _find_recorded(table, gate)
        if recorded is None:
            scorers[key] = _make_scorer(table, gate, plug_in)
        else:
            scores[key] = _add_cost(recorded, str(gate))
    if scorers:
        scores |= _run_scorers(table, scorers)
    names = number_duplicates([scores[key].gate for key in unique])
    return [replace(scores[key], gate=name) for key, name in zip(unique, names, strict=True)]


def _list_unique_gates(table: LabelTable, gates: Sequence[str | Gate]) -> dict[str | int, str | Gate]:
    """Replace 'auto' by the gates that a table can score, and drop repeated gates.

    Returns:
        The gates, by their spec, or by the id of a gate object.
    """
    expanded: list[str | Gate] = []
    for gate in gates:
        expanded += list_scorable_gates(table) if gate == "auto" else [gate]
    return {gate if isinstance(gate, str) else id(gate): gate for gate in expanded}


def _run_scorers(table: LabelTable, scorers: Mapping[str | int, _GateScorer]) -> dict[str | int, TableScores]:
    """Score several gates in one pass over a label table. Gates that differ only in their threshold run once."""
    by_fingerprint: dict[str, _GateScorer] = {}  # by key if the gate has no fingerprint
    # For each scorer, the first one with the same fingerprint.
    first_scorers = {
        key: by_fingerprint.setdefault(scorer.score_fingerprint or str(key), scorer) for key, scorer in scorers.items()
    }
    for chunk in table.chunks():
        for scorer in by_fingerprint.values():
            scorer.add(chunk)
    return {key: first_scorers[key].make_scores(table, scorer.name, scorer.gate) for key, scorer in scorers.items()}


def score_gate(table: LabelTable, gate: str | Gate, *, plug_in: bool = False) -> TableScores:
    """Score one gate on a label table; see `score_gates`."""
    return score_gates(table, [gate], plug_in=plug_in)[0]


def can_score(table: LabelTable, gate: str | Gate, *, plug_in: bool = False) -> bool:
    """Return whether a label table can score a gate without running the LLM."""
    if _find_recorded(table, gate) is not None:
        return True
    try:
        _bind_to_table(_load_gate(table, gate, plug_in), table, get_gate_name(gate))
    except UnsupportedSignal:
        return False
    return True


def _make_scorer(table: LabelTable, gate: str | Gate, plug_in: bool) -> _GateScorer:
    """Load a gate for scoring a label table. `plug_in` accepts gates fitted on another LLM.

    Raises:
        BadSetting: The gate was fitted on questions of the table.
    """
    name, folder = get_gate_name(gate), get_gate_folder(gate)
    loaded = _load_gate(table, gate, plug_in)
    if folder is not None:
        check_unseen(table, folder)
    spec = folder or name
    return _GateScorer(name, spec, _bind_to_table(loaded, table, spec))


def _load_gate(table: LabelTable, gate: str | Gate, plug_in: bool) -> Gate:
    """Load a gate from its spec, or return a gate object unchanged. `plug_in` accepts gates fitted on another LLM."""
    if not isinstance(gate, str):
        return gate
    try:
        return load_gate(gate, plug_in=plug_in)
    except UnknownName as error:
        # The error lists the names of known gates, separated by commas. Here, the names of recorded gates are added. Names
        # that contain a comma are quoted, and names with options (=) are left out.
        recorded = [f"'{name}'" if "," in name else name for name in table.recorded_needs if "=" not in name]
        raise UnknownName("gate", gate, {*error.known, *recorded}, also=error.also) from error


def number_duplicates(names: Sequence[str]) -> list[str]:
    """Append a number to repeated names. Example: a, a, b becomes a, a (2), b."""
    numbered = []
    for position, name in enumerate(names):
        n_before = names[:position].count(name)
        numbered.append(f"{name} ({n_before + 1})" if n_before else name)
    return numbered


# --- recorded needs -------------------------------------------------------------------------------


def _find_recorded(table: LabelTable, gate: str | Gate) -> TableScores | None:
    """Return the recorded scores of a gate, or None.

    The scores of a gate in a folder count only if the folder still holds the gate that was recorded.
    """
    if not isinstance(gate, str):
        return None
    scores = table.find_recorded(gate)
    if scores is None or parse_fitted_spec(gate) is None:  # nothing is recorded, or the gate is not a folder
        return scores
    loaded = load_gate(gate)
    is_same_gate = isinstance(loaded, FittedGate) and loaded.score_fingerprint == scores.scoring
    return scores if is_same_gate else None


def _add_cost(scores: TableScores, gate: str) -> TableScores:
    """Add to recorded scores what the gate costs. `gate` is its recorded name, or its folder.

    Raises:
        BadSetting: Some questions have no recorded score.
    """
    _check_all_recorded(scores)
    # 'kbm-certainty' is a variant of the gate 'kbm', and 'logprob:mean' is 'logprob' with an option.
    registered_name = re.split("[-:, ]", scores.gate)[0]
    entry = {**GATES, **FITTED_GATES}.get(registered_name)
    needed = entry.needs if entry else "unknown"  # a gate that is not registered counts as one that reads a draft
    calls_llm = needed == "labels"  # the gate sends the LLM a prompt of its own
    reads_draft = needed not in ("", "labels")
    is_folder = parse_fitted_spec(gate) is not None
    # A gate in a folder may have got a new threshold since the recording.
    threshold = load_gate(gate).threshold if is_folder else scores.threshold
    return replace(scores, threshold=threshold, calls=1.0 if calls_llm else 0.0, drafts=reads_draft)


def _check_all_recorded(scores: TableScores) -> None:
    """Raise BadSetting if a question has no recorded score."""
    n_missing = int(np.isnan(scores.needs).sum())
    if n_missing:
        raise BadSetting(
            f"the label run (recorded answers) lacks the score of gate '{scores.gate}' for {n_missing} of {len(scores.needs)} "
            "questions. Pass the folder of the gate to compute these scores."
        )


def save_scores(table: LabelTable, scores: Sequence[TableScores]) -> None:
    """Write the scores of gates into the label runs of a table."""
    for run in table.split_by_run():  # `numbers` are the rows of the table that belong to the run
        ids = {number: table.rows[number].id for number in run.numbers.tolist()}
        write_needs(run.path, [_to_record(item, ids) for item in scores])


def _to_record(scores: TableScores, ids: Mapping[int, str]) -> RecordedNeeds:
    """Convert a gate's scores to the record of one label run. `ids` maps table rows to the run's question ids."""
    needs = {question_id: float(scores.needs[row]) for row, question_id in ids.items()}
    raw = {} if scores.raw is None else {question_id: float(scores.raw[row]) for row, question_id in ids.items()}
    return RecordedNeeds(
        scores.gate, scores.threshold, needs, scores.about, scores.seconds, raw, scores.far, scores.scoring
    )


# --- training questions ---------------------------------------------------------------------------


def check_unseen(table: LabelTable, folder: str, kind: str = "gate") -> None:
    """Raise BadSetting if a gate or arbiter was fitted on questions of the table."""
    n_seen = int(mark_seen_rows(table, folder).sum())
    if n_seen:
        raise BadSetting(
            f"the {kind} '{expand_path(folder).name}' was fitted on {n_seen} of these {len(table.rows)} questions. Its results "
            "would look too good. Use other questions, or leave these out with drop_seen=True.",
            brief=f"fitted on {n_seen} of these {len(table.rows)} questions",
        )


def mark_seen_rows(table: LabelTable, *folders: str | Path | None) -> BoolArray:
    """Return for each row whether a gate or arbiter was fitted on its question.

    Args:
        table: The label table.
        folders: Folders of the gates and arbiters. None, and folders that list no training questions, are ignored.
    """
    seen: set[str] = set()
    for folder in folders:
        file = None if folder is None else expand_path(folder) / SEEN_FILE
        if file is not None and file.is_file():
            seen.update(read_text(file).split())
    if not seen:
        return np.zeros(len(table.rows), dtype=bool)
    listed = list(seen)
    return np.isin(table.question_fingerprints, listed) | np.isin(table.loose_fingerprints, listed)


def drop_seen_rows(table: LabelTable, gates: Sequence[str | Gate], *folders: str | None) -> LabelTable:
    """Remove the training questions of gates from a table. Gates look too good on their own training questions.

    Args:
        table: The label table.
        gates: Gates or specs.
        folders: Folders of other fitted artifacts, such as an arbiter. None is ignored.
    """
    is_seen = mark_seen_rows(table, *map(get_gate_folder, gates), *folders)
    if not is_seen.any():
        return table
    if is_seen.all():
        raise BadInput(
            "no question is left to evaluate, because the gates were fitted on all of them. Record answers to other questions "
            "with `knowgate label`.",
            brief="the gates were fitted on all of the questions",
        )
    left_out = {**table.left_out, "seen by a gate": int(is_seen.sum())}
    return table.subset(np.flatnonzero(~is_seen), left_out=left_out)
