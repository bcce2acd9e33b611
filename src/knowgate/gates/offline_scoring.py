"""Gates applied to recorded rows: the needs they would have given, without running the LLM again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from knowgate.core.validation import expand_path, read_text
from knowgate.data.runs.columns import TOKEN_STATISTICS
from knowgate.data.runs.folder import RECORDED_PREFIX, suggest_label_options
from knowgate.data.runs.records import RecordedNeeds, write_needs
from knowgate.data.runs.table import GateColumn, LabelTable
from knowgate.data.signals.confidence import SELF_ASSESSMENT
from knowgate.data.signals.samples import SEAKR, SEAKR_END
from knowgate.errors import BadInput, BadSetting, NotOffered
from knowgate.gates import load_gate
from knowgate.gates.artifacts.drift import compute_far_share
from knowgate.gates.artifacts.gate_folder import SEEN_FILE, FittedGateSpec, Verdict, parse_fitted_spec, read_artifact
from knowgate.gates.fitted_gate import FittedGate
from knowgate.gates.scoring import collect_readings, measure_distances, score_with_raw, wrap_plugin_errors
from knowgate.stats.metrics import FloatArray
from knowgate.types import Gate, Question, Reading, Signal, SignalRequest, Vector

SIGNAL_NAMES = {Signal.HIDDEN: "hidden states", Signal.LABELS: "label logits", Signal.LOGPROBS: "log-probabilities"}
SIGNAL_SOURCES = {
    Signal.HIDDEN: "models that run here: hf:, gguf:, llamacpp:",
    Signal.LABELS: "models that run here and servers with top_logprobs",
    Signal.LOGPROBS: "models that run here and servers with logprobs",
}


@dataclass(frozen=True)
class TableScores:
    """A gate's needs for every row of a trial, and what deciding costs. seconds: per question, None if not timed.

    calls: runs of the LLM before the decision, beyond the pass that starts the answer. drafts: whether that pass
    happens for retrieved questions too. extra_tokens: generated per question beside the draft (samples).
    far: share of questions that lie far from those the gate was fitted on, None where it does not know.
    scoring: identity of a fitted gate, whatever its threshold.
    """

    name: str
    needs: FloatArray
    threshold: float
    calls: float = 0.0
    drafts: bool = True
    extra_tokens: float = 0.0
    seconds: float | None = None
    note: str = ""
    raw: FloatArray | None = None  # before calibration, in the same direction; None where there is none
    far: float | None = None
    scoring: str = ""


@dataclass(frozen=True)
class RunModelIdentity:
    """Which LLM a run was made with. Runs do not keep how deep it is: 0, as for one that shows no hidden states."""

    name: str
    fingerprint: str
    depth: int = 0


@dataclass(frozen=True)
class RecordedReadingSource:
    """The rows of a trial as what gates read. spec: what the gate is called in messages."""

    trial: LabelTable
    spec: str

    @property
    def identity(self) -> RunModelIdentity:
        return RunModelIdentity(self.trial.settings["model"], self.trial.settings["model_fingerprint"])

    def bind(self, gate: Gate) -> Gate:
        if Signal.LABELS in gate.needs and not gate.recorded_signal:
            raise self._not_asked()
        missing = gate.needs - find_signals(self.trial)
        if missing:
            listed = ", ".join(SIGNAL_NAMES.get(one, one) for one in sorted(missing))
            message = f"gate '{self.spec}' needs {listed}, which the rows lack. {_advice(missing, self.trial)}"
            raise NotOffered(message, brief=f"the rows lack {listed}")
        with wrap_plugin_errors(gate):
            return gate.bind(self.identity, self.trial.settings["prompts_fingerprint"])

    def read(self, questions: Sequence[Question], want: SignalRequest) -> list[Reading]:
        """The recorded ones: `questions` are those of the trial."""
        return list(self.trial.readings)

    def ask(self, gate: Gate, questions: Sequence[Question], readings: Sequence[Reading]) -> list[Vector]:
        raise self._not_asked()

    def _not_asked(self) -> NotOffered:
        data, model = suggest_label_options(self.trial.settings)
        return NotOffered(
            f"gate '{self.spec}' asks the LLM in words of its own, which the rows do not hold. Evaluate it with the "
            f"LLM at hand: knowgate eval --data {data} --model {model} --gates {self.spec}",
            brief="asks the LLM in words of its own",
        )


def score_gates(trial: LabelTable, gates: Sequence[str | Gate], *, plug_in: bool = False) -> list[TableScores]:
    """Every gate given; 'auto' stands for those that these rows are enough for, recorded ones included."""
    asked = [one for gate in gates for one in (list_scorable_gates(trial) if gate == "auto" else [gate])]
    different = {gate if isinstance(gate, str) else id(gate): gate for gate in asked}  # weights cannot be compared
    if not trial.is_in_memory:
        return number_duplicate_names(_score_together(trial, list(different.values()), plug_in))
    told: dict[str, TableScores] = {}
    return number_duplicate_names([_score_once(trial, gate, told, plug_in) for gate in different.values()])


def _score_once(trial: LabelTable, gate: str | Gate, told: dict[str, TableScores], plug_in: bool) -> TableScores:
    """A fitted gate whose copy with another threshold was scored already says the same: a judge is not asked again."""
    if isinstance(gate, str) and (_is_recorded(trial, gate) or parse_fitted_spec(gate) is None):
        return score_gate(trial, gate, plug_in=plug_in)
    loaded = load_gate(gate, plug_in=plug_in) if isinstance(gate, str) else gate
    alike = loaded.scoring if isinstance(loaded, FittedGate) else ""
    if alike not in told:
        scored = score_gate(trial, gate, plug_in=plug_in)
        return told.setdefault(alike, scored) if alike else scored
    if (folder := get_gate_folder(gate)) is not None:
        check_unseen(trial, folder)
    return replace(told[alike], name=get_gate_name(gate), threshold=loaded.threshold)


def save_scores(trial: LabelTable, scores: Sequence[TableScores]) -> None:
    """Keep what these gates said beside the rows of the trial's runs."""
    for run in trial.split_by_run():
        ids = {number: trial.rows[number].id for number in run.numbers.tolist()}
        write_needs(run.path, [_to_record(one, ids) for one in scores])


def _to_record(scores: TableScores, rows: Mapping[int, str]) -> RecordedNeeds:
    needs = {key: float(scores.needs[place]) for place, key in rows.items()}
    raw = {} if scores.raw is None else {key: float(scores.raw[place]) for place, key in rows.items()}
    return RecordedNeeds(
        scores.name, scores.threshold, needs, scores.note, scores.seconds, raw, scores.far, scores.scoring
    )


def number_duplicate_names(scores: Sequence[TableScores]) -> list[TableScores]:
    """Gates of one name (two objects, two folders of that name) numbered from the second on."""
    names = [one.name for one in scores]
    earlier = [names[:place].count(name) for place, name in enumerate(names)]
    return [
        replace(one, name=f"{one.name} ({count + 1})") if count else one
        for one, count in zip(scores, earlier, strict=True)
    ]


def list_scorable_gates(trial: LabelTable) -> list[str]:
    """Gates without settings of their own whose signals the rows have, then what is on record."""
    have, names = find_signals(trial), list(trial.recorded_needs)
    if Signal.LOGPROBS in have:
        names = ["logprob:first", "logprob:mean", "logprob:min", *_of_all_tokens(trial), "flare", *names]
    if Signal.LABELS in have:
        names = ["prompt", *names]
    if all({SEAKR, SEAKR_END} & names for names in set(trial.signal_names.tolist())):
        names.append("seakr")
    return names


def _of_all_tokens(trial: LabelTable) -> list[str]:
    """Statistics that a server which shows only the top tokens may lack."""
    known = set(trial.token_statistics.tolist())
    return [f"logprob:{name}" for name in TOKEN_STATISTICS if all(name in each for each in known)]


def find_signals(trial: LabelTable) -> frozenset[Signal]:
    """What the rows of a trial hold."""
    reading = trial.readings[0]
    have = {Signal.DRAFT} if reading.draft else set()
    have |= {Signal.LOGPROBS} if reading.draft and reading.draft.tokens is not None else set()
    spread = {SEAKR, SEAKR_END} & set(reading.signals)  # stands for what it was read off
    have |= {Signal.SAMPLES} if reading.samples or spread else set()
    have |= {Signal.HIDDEN} if reading.hidden or spread else set()
    have |= {Signal.LABELS} if all(SELF_ASSESSMENT in names for names in set(trial.signal_names.tolist())) else set()
    return frozenset(have)


def score_gate(trial: LabelTable, gate: str | Gate, *, plug_in: bool = False) -> TableScores:
    """The needs of a gate: a spec, a folder, the name of one on record, or a gate itself."""
    if isinstance(gate, str) and _is_recorded(trial, gate):
        found = _from_record(trial.recorded_needs[gate])
        return found if parse_fitted_spec(gate) is None else replace(found, threshold=load_gate(gate).threshold)
    ready = _ready(trial, gate, plug_in)
    return _as_scores(trial, ready, [_score_part(part, ready) for part in trial.chunks()])


def _score_together(trial: LabelTable, gates: Sequence[str | Gate], plug_in: bool) -> list[TableScores]:
    """All gates in one pass over rows that are on disk; what a gate lacks shows before it."""
    ready = {place: _ready(trial, gate, plug_in) for place, gate in enumerate(gates) if not _is_recorded(trial, gate)}
    said: dict[int, list[ChunkScores]] = {place: [] for place in ready}
    for part in trial.chunks() if ready else ():
        for place, one in ready.items():
            said[place].append(_score_part(part, one))
    return [
        _as_scores(trial, ready[place], said[place]) if place in ready else score_gate(trial, gate)
        for place, gate in enumerate(gates)
    ]


def _is_recorded(trial: LabelTable, gate: str | Gate) -> bool:
    """Whether what a gate said is on record: a folder of that name here must be the gate that said it."""
    if not isinstance(gate, str) or gate not in trial.recorded_needs:
        return False
    if parse_fitted_spec(gate) is None:
        return True
    loaded = load_gate(gate)
    return isinstance(loaded, FittedGate) and loaded.scoring == trial.recorded_needs[gate].scoring


@dataclass(frozen=True)
class BoundGate:
    """A gate that is bound to the LLM of a trial. spec: what it is called in messages."""

    name: str
    spec: str
    gate: Gate


@dataclass(frozen=True)
class ChunkScores:
    """What a gate said of some of the rows. far: of how many distances that it knows how many are far."""

    needs: FloatArray
    raw: FloatArray | None
    far: float | None
    known: int


def _ready(trial: LabelTable, gate: str | Gate, plug_in: bool) -> BoundGate:
    name, folder = get_gate_name(gate), get_gate_folder(gate)
    gate = load_gate(gate, plug_in=plug_in) if isinstance(gate, str) else gate
    if folder is not None:
        check_unseen(trial, folder)
    return BoundGate(name, folder or name, RecordedReadingSource(trial, folder or name).bind(gate))


def _score_part(part: LabelTable, ready: BoundGate) -> ChunkScores:
    gate, source = ready.gate, RecordedReadingSource(part, ready.spec)
    readings = collect_readings(source, [gate], part.questions)
    scored = score_with_raw(gate, part.questions, readings)
    raw = None if scored.raw is None else np.array(scored.raw)
    distances = measure_distances(gate, part.questions, readings)
    known = sum(distance is not None for distance in distances)
    return ChunkScores(np.array(scored.needs), raw, compute_far_share(distances), known)


def _as_scores(trial: LabelTable, ready: BoundGate, parts: Sequence[ChunkScores]) -> TableScores:
    gate, want = ready.gate, ready.gate.request
    raw = [part.raw for part in parts if part.raw is not None]
    return TableScores(
        ready.name,
        np.concatenate([part.needs for part in parts]),
        gate.threshold,
        calls=float(Signal.LABELS in gate.needs) + want.samples,
        drafts=want.draft_tokens > 0,
        extra_tokens=want.samples * float(trial.closed_tokens.mean()),
        note=gate.note,
        raw=np.concatenate(raw) if len(raw) == len(parts) else None,
        far=_far_of(parts),
        scoring=gate.scoring if isinstance(gate, FittedGate) else "",
    )


def _far_of(parts: Sequence[ChunkScores]) -> float | None:
    if len(parts) == 1:
        return parts[0].far
    known = sum(part.known for part in parts)
    return sum((part.far or 0.0) * part.known for part in parts) / known if known else None


def can_score(trial: LabelTable, gate: str | Gate, *, plug_in: bool = False) -> bool:
    """Whether the rows are enough for a gate; else the LLM must be asked."""
    if _is_recorded(trial, gate):
        return True
    try:
        RecordedReadingSource(trial, get_gate_name(gate)).bind(
            load_gate(gate, plug_in=plug_in) if isinstance(gate, str) else gate
        )
    except NotOffered:
        return False
    return True


def get_gate_name(gate: str | Gate) -> str:
    """What tables call a gate: a fitted one by its folder, another by its spec or its own name."""
    if isinstance(gate, str):
        spec = parse_fitted_spec(gate)
        return gate if spec is None else _called(spec)
    return _called(FittedGateSpec(str(gate.artifact.path), gate.verdict)) if isinstance(gate, FittedGate) else gate.name


def _called(spec: FittedGateSpec) -> str:
    return Path(spec.folder).name + (",verdict=own" if spec.verdict == "own" else "")


def get_gate_folder(gate: str | Gate) -> str | None:
    """The folder of a fitted gate, None for another."""
    if isinstance(gate, str):
        spec = parse_fitted_spec(gate)
        return None if spec is None else spec.folder
    return str(gate.artifact.path) if isinstance(gate, FittedGate) else None


def get_verdict(gate: str | Gate) -> Verdict:
    """By whose verdict a gate decides: 'own' of fitted ones that were asked for it."""
    if isinstance(gate, str):
        spec = parse_fitted_spec(gate)
        return "need" if spec is None else spec.verdict
    return gate.verdict if isinstance(gate, FittedGate) else "need"


def _from_record(column: GateColumn) -> TableScores:
    """Scores read from the label table; a gate must have scored every row."""
    missing = int(np.isnan(column.needs).sum())
    if missing:
        raise BadSetting(f"the recorded gate '{column.gate}' lacks {missing} of {len(column.needs)} questions.")
    return TableScores(
        column.gate,
        column.needs,
        column.threshold,
        seconds=column.seconds,
        note=column.about,
        raw=column.raw,
        far=column.far,
        scoring=column.scoring,
    )


def _advice(missing: frozenset[Signal], trial: LabelTable) -> str:
    """How to come by what is missing: answers recorded elsewhere are texts, and labelling needs the LLM itself."""
    data, model = suggest_label_options(trial.settings)
    options = {Signal.HIDDEN: " --layers mid,late,last", Signal.SAMPLES: " --samples 20"}
    asked = f"knowgate label --data {data} --model {model}" + "".join(options.get(one, "") for one in sorted(missing))
    given = [f"{SIGNAL_NAMES[one]} come from {SIGNAL_SOURCES[one]}" for one in sorted(missing) if one in SIGNAL_SOURCES]
    again = f"{asked} --out RUN{' (' + '; '.join(given) + ')' if given else ''}"
    if trial.settings["model"].startswith(RECORDED_PREFIX):
        return f"Recorded answers are texts, which a judge can read: knowgate fit judge. Or ask the LLM itself: {again}"
    return f"Label again: {again}"


def check_unseen(trial: LabelTable, folder: str) -> None:
    """Refuse a gate on questions it was fitted on: by text, however it is written, or by id where there is none."""
    same = sum(mark_seen_rows(trial, folder))
    if same:
        raise BadSetting(
            f"the gate '{read_artifact(folder).path.name}' was fitted on {same} of these {len(trial.rows)} questions; "
            "evaluate it on others, or leave them out with --drop-seen.",
            brief=f"fitted on {same} of these {len(trial.rows)} questions",
        )


def mark_seen_rows(trial: LabelTable, folder: str | Path) -> list[bool]:
    """Which rows the gate in this folder was fitted on; none where it does not say."""
    file = expand_path(folder) / SEEN_FILE
    seen = set(read_text(file).split()) if file.is_file() else set()
    if not seen:
        return [False] * len(trial.rows)
    return [
        str(key) in seen or str(loose) in seen
        for key, loose in zip(trial.question_fingerprints, trial.loose_fingerprints, strict=True)
    ]


def drop_seen_rows(trial: LabelTable, gates: Sequence[str | Gate], *others: str | None) -> LabelTable:
    """The trial without the rows that any of these gates was fitted on; they are counted as left out.

    others: folders of what else was fitted on rows and keeps a list of them.
    """
    folders = [folder for folder in (*map(get_gate_folder, gates), *others) if folder is not None]
    seen = [any(marks) for marks in zip(*(mark_seen_rows(trial, folder) for folder in folders), strict=True)]
    if not any(seen):
        return trial
    if all(seen):
        raise BadInput(
            "no question is left to evaluate: the gates were fitted on all of them. Label others: knowgate label",
            brief="no question is left",
        )
    kept = trial.subset(number for number, was_seen in enumerate(seen) if not was_seen)
    return kept.with_changes(left_out={**trial.left_out, "seen by a gate": sum(seen)})
