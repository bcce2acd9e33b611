"""Records that label runs hold beside their rows, and checks of runs that are used together."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from knowgate.core.files import read_jsonl, write_text
from knowgate.core.schema import NumberRange, UnitInterval, read_record
from knowgate.data.runs.folder import RunFolder
from knowgate.data.runs.storage import RowNumbers
from knowgate.errors import ArtifactError, BadInput, BadSetting
from knowgate.stats.metrics import FloatArray
from knowgate.types import ModelIdentity

log = logging.getLogger(__name__)


def check_compatible(runs: Sequence[Path], settings: Sequence[Mapping[str, Any]], advice: Mapping[str, str]) -> None:
    """Raise BadSetting if label runs cannot be used together.

    Args:
        runs: Folders of the runs.
        settings: Settings of each run.
        advice: Names of the settings that must be equal, each with a sentence for the error that says what to do.
    """
    check_unique_runs(runs)
    for key, suggestion in advice.items():
        values = [str(run_settings.get(key)) for run_settings in settings]
        if len(set(values)) > 1:
            run_values = "; ".join(f"{run}: {value}" for run, value in zip(runs, values, strict=True))
            raise BadSetting(f"the label runs differ in their {key.replace('_', ' ')} ({run_values}). {suggestion}.")


def check_unique_runs(runs: Sequence[Path]) -> None:
    """Raise BadSetting if a run is named twice."""
    resolved = [run.resolve() for run in runs]
    duplicates = [run for number, run in enumerate(runs) if resolved[number] in resolved[:number]]
    if duplicates:
        raise BadSetting(f"the folder '{duplicates[0]}' of recorded answers is given twice. Give it once.")


def check_same_llm(name: str, settings: Mapping[str, Any], model: ModelIdentity, prompts: str) -> None:
    """Raise BadSetting if a label run was made with another LLM or other prompts.

    Args:
        name: What the error calls the run.
        settings: Settings of the run.
        model: The LLM.
        prompts: Fingerprint of the prompts.
    """
    model_hash = settings["model_fingerprint"]
    prompts_hash = settings["prompts_fingerprint"]
    if model.fingerprint != model_hash or prompts != prompts_hash:
        raise BadSetting(
            f"{name} was made with another LLM or other prompts: {settings['model']} ({model_hash}, prompts {prompts_hash}). "
            f"Your LLM is {model.name} ({model.fingerprint}, prompts {prompts}). Use the LLM and prompts of the run."
        )


def name_runs(runs: Sequence[Path]) -> list[str]:
    """Name each run by its folder, or by its full path if names are not unique."""
    folders = [run.resolve() for run in runs]
    names = [folder.name for folder in folders]
    return names if len(set(names)) == len(names) else [str(folder) for folder in folders]


def warn_if_unfinished(run: Path, n_rows: int, n_questions: object) -> None:
    """Warn if some questions of a run have no row yet."""
    if isinstance(n_questions, int) and n_rows < n_questions:
        message = "%s holds %d of %d questions: it was not finished. Run the same `knowgate label` again to continue."
        log.warning(message, run, n_rows, n_questions)


NEEDS_FILE = "needs.jsonl"
BELIEFS_FILE = "beliefs.jsonl"
USEFULNESS_FILE = "useful.jsonl"
OWN_VERDICT = ",verdict=own"  # after the name of a fitted gate: it decides by its raw score, cut at one half
SCORE_DIGITS = 7  # enough to keep different scores different
Record = TypeVar("Record")


@dataclass(frozen=True)
class RecordedNeeds:
    """The need for retrieval that one gate gave to each question of a label run.

    0 means the LLM knows, and 1 means retrieve.

    Attributes:
        gate: Name of the gate.
        threshold: Threshold of the gate when it was recorded.
        needs: Need for retrieval by question id.
        about: Note about the gate, shown in tables.
        seconds: Seconds per question; None if not timed.
        raw: Scores of a fitted gate before calibration, by question id. Empty for other gates.
        far: Share of the questions that are far from the training questions of the gate; None if unknown.
        scoring: Fingerprint of how the fitted gate scores, without its threshold; "" if unknown.
    """

    gate: str
    threshold: float
    needs: Mapping[str, UnitInterval] = field(repr=False)
    about: str = ""
    seconds: Annotated[float, NumberRange(0)] | None = None
    raw: Mapping[str, UnitInterval] = field(default_factory=dict, repr=False)
    far: UnitInterval | None = None
    scoring: str = ""


@dataclass(frozen=True, eq=False)
class TableScores:
    """The scores of a gate for every row of a label table, and their cost.

    Attributes:
        gate: Name of the gate.
        threshold: The gate retrieves for needs above this.
        needs: Need of each row (0 = the LLM knows, 1 = retrieve); NaN if the gate did not score it.
        about: Note about the gate, shown in tables, for example that it was fitted on a different LLM.
        seconds: Seconds per question; None if not timed.
        raw: Score of each row before calibration; None if the gate is not fitted, or if it was not recorded.
        far: Share of questions far from the training questions of the gate; None if unknown.
        scoring: Fingerprint of how the gate scores, without its threshold; "" if not fitted or unknown.
        calls: Extra LLM calls per question that the decision takes. The call that drafts the answer is not counted.
        drafts: Whether the gate drafts an answer before it decides, also for questions that it then retrieves for.
        extra_tokens: Tokens generated per question in addition to the draft, such as sampled answers.
    """

    gate: str
    threshold: float
    needs: FloatArray = field(repr=False)
    about: str = ""
    seconds: float | None = None
    raw: FloatArray | None = field(default=None, repr=False)
    far: float | None = None
    scoring: str = ""
    calls: float = 0.0
    drafts: bool = True
    extra_tokens: float = 0.0

    def select(self, numbers: RowNumbers) -> TableScores:
        """Return the scores of the rows with these indices."""
        return replace(self, needs=self.needs[numbers], raw=None if self.raw is None else self.raw[numbers])

    def make_raw_variant(self) -> TableScores | None:
        """Return the scores of the gate variant 'NAME,verdict=own', which decides by the scores before calibration.

        None if these raw scores were not recorded.
        """
        if self.raw is None:
            return None
        return replace(self, gate=f"{self.gate}{OWN_VERDICT}", threshold=0.5, needs=self.raw, scoring="")


@dataclass(frozen=True)
class RecordedBeliefs:
    """The probabilities of being right that an arbiter gave to both answers of each question.

    The closed-book answer is without passages, the open-book answer with passages.

    Attributes:
        arbiter: Name of the arbiter.
        fingerprint: Fingerprint of the arbiter. If it is fitted again, it changes, and this record is outdated.
        closed: Probability that the closed-book answer is right, by question id.
        open: Probability that the open-book answer is right, by question id.
        agreed: Ids of questions whose two answers are the same, so that no choice was needed.
    """

    arbiter: str
    fingerprint: str
    closed: Mapping[str, UnitInterval] = field(repr=False)
    open: Mapping[str, UnitInterval] = field(repr=False)
    agreed: tuple[str, ...] = field(default=(), repr=False)

    @property
    def judged(self) -> frozenset[str]:
        """Ids of the questions that the arbiter has already judged."""
        return frozenset({*self.closed, *self.agreed})

    @property
    def from_memory(self) -> frozenset[str]:
        """Ids of the questions for which the arbiter prefers the closed-book answer."""
        return frozenset(key for key, belief in self.closed.items() if belief > self.open[key])


@dataclass(frozen=True)
class RecordedUsefulness:
    """Whether a judge model found the retrieved passages of each question useful.

    Attributes:
        judge: Name of the judge.
        fingerprint: Fingerprint of the judge. If the judge is fitted again, it changes, and this record is outdated.
        useful: Verdict by question id.
    """

    judge: str
    fingerprint: str
    useful: Mapping[str, bool] = field(repr=False)


# --- needs of gates -------------------------------------------------------------------------------


def read_needs(run: Path) -> list[RecordedNeeds]:
    """Read the needs for retrieval that gates recorded in a run, in the order of recording."""
    return list(iterate_needs(run))


def iterate_needs(run: Path) -> Iterator[RecordedNeeds]:
    """Yield the recorded needs for retrieval of a run, gate by gate.

    Raises:
        ArtifactError: A record is damaged.
    """
    for record, where in _read_records(run, NEEDS_FILE, RecordedNeeds, "gate scores"):
        if record.raw and record.raw.keys() != record.needs.keys():
            raise ArtifactError(
                f"{where}: gate '{record.gate}' must have a calibrated and a raw score for every question. Delete {NEEDS_FILE}, "
                "then evaluate the gate again."
            )
        yield record


def write_needs(run: Path, recorded: Sequence[RecordedNeeds]) -> None:
    """Record in a run the need for retrieval that gates gave to each question; replaces earlier records of these gates."""
    _replace_lines(run, NEEDS_FILE, "gate", [_needs_to_dict(item) for item in recorded])


def _needs_to_dict(item: RecordedNeeds) -> dict[str, Any]:
    """Convert the recorded needs of a gate to a JSON object. Empty optional fields are left out."""
    record: dict[str, Any] = {"gate": item.gate, "threshold": item.threshold, "needs": _round_scores(item.needs)}
    optional = {
        "raw": _round_scores(item.raw) or None,
        "about": item.about or None,
        "seconds": None if item.seconds is None else round(item.seconds, 5),
        "far": None if item.far is None else round(item.far, 5),
        "scoring": item.scoring or None,
    }
    return record | {key: value for key, value in optional.items() if value is not None}


def load_scores(runs: Sequence[Path], ids: NDArray[np.str_], run_index: NDArray[np.int32]) -> dict[str, TableScores]:
    """Read the recorded scores of every gate, for the rows of a label table.

    Gates that are not recorded in every run are left out.

    Args:
        runs: Folders of the runs.
        ids: Question id of each row.
        run_index: Index into `runs` of each row.
    """
    scores: dict[str, TableScores] = {}  # by gate; only the gates that all runs so far have recorded
    for run_number, path in enumerate(runs):
        rows = np.flatnonzero(run_index == run_number)  # the rows of this run
        updated: dict[str, TableScores] = {}
        for recorded in iterate_needs(path):
            gate_scores = _make_empty_scores(recorded, len(ids)) if run_number == 0 else scores.get(recorded.gate)
            if gate_scores is not None:  # None if an earlier run has not recorded the gate
                _fill_scores(gate_scores, recorded, rows, ids[rows])
                # With this weight, all runs so far count equally in the means.
                updated[recorded.gate] = _merge_record(gate_scores, recorded, weight=1 / (run_number + 1))
        scores = updated  # without the gates that this run has not recorded
    return scores


def _fill_scores(scores: TableScores, recorded: RecordedNeeds, rows: RowNumbers, ids: NDArray[np.str_]) -> None:
    """Write the recorded scores of one run into the table rows of this run, whose question ids are `ids`."""
    scores.needs[rows] = [recorded.needs.get(row_id, np.nan) for row_id in ids]
    if scores.raw is not None:
        scores.raw[rows] = [recorded.raw.get(row_id, np.nan) for row_id in ids]


def _make_empty_scores(recorded: RecordedNeeds, n_rows: int) -> TableScores:
    """Return the scores of a recorded gate for a table of `n_rows` rows, all of them still NaN."""
    raw = np.full(n_rows, np.nan) if recorded.raw else None
    names = ("gate", "threshold", "about", "seconds", "far", "scoring")  # fields that both classes have
    return TableScores(**{name: getattr(recorded, name) for name in names}, needs=np.full(n_rows, np.nan), raw=raw)


def _merge_record(scores: TableScores, recorded: RecordedNeeds, weight: float) -> TableScores:
    """Merge the record of the next run into the scores of a gate.

    The seconds, and the share of far questions, become weighted means.

    Args:
        scores: The scores of the gate in the runs so far.
        recorded: The record of the next run.
        weight: The weight of the next run in the means, from 0 to 1.
    """

    def average(first: float | None, second: float | None) -> float | None:
        return None if first is None or second is None else (1 - weight) * first + weight * second

    return replace(
        scores,
        seconds=average(scores.seconds, recorded.seconds),
        far=average(scores.far, recorded.far),
        scoring=scores.scoring if scores.scoring == recorded.scoring else "",
        raw=scores.raw if recorded.raw else None,  # kept only if every run recorded raw scores
    )


# --- beliefs of arbiters --------------------------------------------------------------------------


def read_beliefs(run: Path) -> list[RecordedBeliefs]:
    """Read the recorded beliefs of every arbiter of a run. A belief is the probability that an answer is right."""
    recorded = []
    for beliefs, where in _read_records(run, BELIEFS_FILE, RecordedBeliefs, "arbiter results"):
        if beliefs.closed.keys() != beliefs.open.keys():
            raise ArtifactError(
                f"{where}: arbiter '{beliefs.arbiter}' must have a probability for both answers of every question. Delete "
                f"{BELIEFS_FILE}, then evaluate the arbiter again."
            )
        recorded.append(beliefs)
    return recorded


def write_beliefs(run: Path, recorded: RecordedBeliefs) -> None:
    """Record the beliefs of an arbiter in a run. A belief is the probability that an answer is right."""
    rounded = {"closed": _round_scores(recorded.closed), "open": _round_scores(recorded.open)}
    _replace_lines(run, BELIEFS_FILE, "arbiter", [{**asdict(recorded), **rounded}])


# --- verdicts of passage judges -------------------------------------------------------------------


def read_usefulness(run: Path) -> list[RecordedUsefulness]:
    """Read the passage verdicts of every judge recorded in a run."""
    records = _read_records(run, USEFULNESS_FILE, RecordedUsefulness, "passage verdicts")
    return [record for record, _ in records]


def write_usefulness(run: Path, recorded: RecordedUsefulness) -> None:
    """Record the passage verdicts of a judge; an earlier record of the same name is replaced."""
    _replace_lines(run, USEFULNESS_FILE, "judge", [asdict(recorded)])


# --- files ----------------------------------------------------------------------------------------


def _read_records(run: Path, name: str, kind: type[Record], content: str) -> Iterator[tuple[Record, str]]:
    """Yield the records of a file of a run, each with its location for error messages.

    Args:
        run: Folder of the label run.
        name: Name of the file.
        kind: Class of the records.
        content: What an error calls the content of the file.

    Raises:
        ArtifactError: A record is damaged.
    """
    file = RunFolder(run).file(name)
    if not file.is_file():
        return
    for number, record in read_jsonl(file):
        where = f"{file} line {number}"
        try:
            yield read_record(kind, record, where), where
        except BadInput as error:
            reason = str(error).rstrip(".")
            raise ArtifactError(f"invalid {content}: {reason}. Delete {name}, then evaluate again.") from None


def _replace_lines(run: Path, name: str, key: str, records: Sequence[Mapping[str, Any]]) -> None:
    """Add records to a JSON Lines file of a run. Older records with the same key are replaced.

    Args:
        run: Folder of the label run, which is locked while the file is rewritten.
        name: Name of the file.
        key: Field that identifies a record, such as 'gate', which holds the name of a gate.
        records: The new records.
    """
    folder = RunFolder(run)
    file = folder.file(name)
    replaced = [record[key] for record in records]
    with folder.exclusive():
        existing = [record for _, record in read_jsonl(file)] if file.is_file() else []
        unchanged = [record for record in existing if record.get(key) not in replaced]
        lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in [*unchanged, *records]]
        write_text(file, "".join(lines))


def _round_scores(scores: Mapping[str, float]) -> dict[str, float]:
    return {name: round(float(score), SCORE_DIGITS) for name, score in scores.items()}
