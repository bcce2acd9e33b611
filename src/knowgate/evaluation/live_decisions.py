"""Decisions of gates that need the LLM, made now and stored in label runs.

Stored decisions are timed, and let the runs be evaluated again without the LLM.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import Field

from knowgate.data.questions import QuestionSource, describe_data
from knowgate.data.runs.folder import RunFolder
from knowgate.data.runs.records import RecordedNeeds, read_needs, write_needs
from knowgate.data.runs.storage import question_from_row
from knowgate.data.runs.table import LabelTable, load_label_table
from knowgate.errors import BadSetting, ModelError
from knowgate.gates import load_gate
from knowgate.gates.artifacts.drift import compute_far_share
from knowgate.gates.fitted_gate import FittedGate
from knowgate.gates.offline_scoring import can_score, get_gate_folder, get_gate_name
from knowgate.gates.scoring import bind_gate, measure_distances, read_questions, score_with_raw
from knowgate.labels.labeling import label
from knowgate.labels.local_runner import LocalRunner
from knowgate.labels.options import AnswerOptions, LabelOptions
from knowgate.labels.ray_runner import create_ray_runner, is_remote_runner, require_name
from knowgate.labels.run import LabelProgress
from knowgate.models import load_model, resolve_model
from knowgate.models.prompts.answers import AnswerPrompts, load_answer_prompts
from knowgate.retrieval import as_retriever
from knowgate.retrieval.rerankers import as_reranker
from knowgate.types import Gate, Model, Question, Retriever, Runner

log = logging.getLogger(__name__)
BATCH_RUNNER = LocalRunner(first=32, largest=32)
MAX_TOKENS = 32
LAYERS = "mid,late"
AUTO_GATES = "auto"  # stands for all gates that the rows allow


class LiveOptions(AnswerOptions):
    """Options of calling the LLM during an evaluation."""

    model: Any = Field(
        default=None,
        description="Model or its spec. With `data`: smollm by default. With `runs`: the LLM of the runs, for gates "
        "that need it.",
    )
    plug_in: bool = Field(default=False, description="Allow gates that were fitted on another LLM.")


@dataclass(frozen=True)
class LiveRuns:
    """Label runs made now, and the names that the gates' decisions are stored under in them."""

    runs: list[Path]
    gates: list[str]


def label_and_decide(
    gates: Sequence[str | Gate],
    data: QuestionSource,
    out: Path,
    *,
    options: LiveOptions,
    on_progress: Callable[[LabelProgress], None] = lambda progress: None,
) -> LiveRuns:
    """Label questions and let gates decide on them. Answers and decisions found in `out` are reused.

    Args:
        gates: Gate specs or gates. 'auto' is left for the evaluation to resolve.
        data: Questions, or data specs separated by commas.
        out: Folder for the runs.
        options: The LLM and how it answers.
        on_progress: Called with the progress of labeling.
    """
    sources = split_data_specs(data)
    names = make_record_names(gates)
    named_gates = {name: gate for name, gate in zip(names, gates, strict=True) if gate != AUTO_GATES}
    prompts = load_answer_prompts(options.prompts)
    decider = LiveDecider.create(named_gates, resolve_model(options.model), prompts, options)
    answer_options = {name: getattr(options, name) for name in AnswerOptions.model_fields}
    if not decider.is_remote:  # a cluster loads index and reranker by name; here they are loaded once for all data sets
        answer_options["index"] = None if options.index is None else as_retriever(options.index)
        answer_options["rerank"] = None if options.rerank is None else as_reranker(options.rerank)
    label_options = LabelOptions(**answer_options, samples=0, max_tokens=MAX_TOKENS, layers=LAYERS)
    model = options.model if decider.is_remote else decider.model
    runs = []
    for source in sources:
        folder = out / "runs" / make_folder_name(source)
        run = label(source, out=folder, model=model, options=label_options, on_progress=on_progress)
        decider.record(run)
        runs.append(run.path)
    return LiveRuns(runs, names)


def decide_on_runs(gates: Sequence[str | Gate], runs: Sequence[Path], *, options: LiveOptions) -> list[str | Gate]:
    """Let gates decide on recorded questions if they need more than the rows hold, and store their decisions.

    Args:
        gates: Gate specs or gates.
        runs: Label runs.
        options: The LLM and the prompts that the runs were made with.

    Returns:
        The gates, each replaced by the name its decisions are stored under if it decided now.

    Raises:
        BadSetting: The runs were made with another LLM or other prompts.
    """
    table = load_label_table(runs, layers=())
    prompts = load_answer_prompts(options.prompts)
    model = resolve_model(options.model)
    _check_same_model(table, model, prompts)
    deciding = [gate for gate in gates if gate != AUTO_GATES and not can_score(table, gate, plug_in=options.plug_in)]
    names = make_record_names(deciding)
    decider = LiveDecider.create(dict(zip(names, deciding, strict=True)), model, prompts, options)
    for run in runs:
        decider.record(RunFolder(run))
    name_of_gate = dict(zip(map(id, deciding), names, strict=True))
    return [name_of_gate.get(id(gate), gate) for gate in gates]


def _check_same_model(table: LabelTable, model: Model, prompts: AnswerPrompts) -> None:
    settings = table.settings
    if settings["model_fingerprint"] != model.fingerprint:
        raise BadSetting(
            f"the runs were made with {settings['model']} ({settings['model_fingerprint']}), not with {model.name} "
            f"({model.fingerprint}). Use model={settings['model']!r}."
        )
    if settings["prompts_fingerprint"] != prompts.fingerprint:
        raise BadSetting("the runs were made with other prompts. Name those they were made with in `prompts`.")


def split_data_specs(data: QuestionSource) -> list[QuestionSource]:
    """Split data specs at commas. A list of questions stays as it is."""
    if not isinstance(data, str):
        return [data]
    specs: list[QuestionSource] = [spec.strip() for spec in data.split(",") if spec.strip()]
    if not specs:
        raise BadSetting(f"data={data!r} names no questions.")
    return specs


def make_folder_name(data: QuestionSource) -> str:
    """Return a folder name for the run of a data set."""
    return describe_data(data).replace(":", "-").replace("/", "-")


def make_record_names(gates: Sequence[str | Gate]) -> list[str]:
    """Name gates for storage: a spec by itself, a gate object by its name, numbered if several share it."""
    names: list[str] = []
    for gate in gates:
        name = gate if isinstance(gate, str) else get_gate_name(gate)
        same = sum(other == name or other.startswith(f"{name} (") for other in names)
        names.append(f"{name} ({same + 1})" if same and not isinstance(gate, str) else name)
    return names


# --- deciding -------------------------------------------------------------------------------------


@dataclass
class GateDecisions:
    """Scores of one gate for some questions, by question id.

    Attributes:
        raw: Scores before calibration.
        distances: Distance of each question from those the gate was fitted on; None if unknown.
        seconds: Time spent on all of the questions.
    """

    needs: dict[str, float] = field(default_factory=dict)
    raw: dict[str, float] = field(default_factory=dict)
    distances: list[float | None] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, other: GateDecisions) -> None:
        """Add the decisions on further questions."""
        self.needs |= other.needs
        self.raw |= other.raw
        self.distances += other.distances
        self.seconds += other.seconds


@dataclass(frozen=True)
class Decider:
    """Gates bound to one LLM. Each gate reads only what it needs, as in the pipeline."""

    model: Model
    prompts: AnswerPrompts
    gates: Sequence[Gate]

    def decide(self, questions: Sequence[Question]) -> list[GateDecisions]:
        """Score the questions with every gate."""
        return [self._decide(gate, questions) for gate in self.gates]

    __call__ = decide

    def _decide(self, gate: Gate, questions: Sequence[Question]) -> GateDecisions:
        start = time.perf_counter()
        ids = [question.id for question in questions]
        readings = read_questions(self.model, [gate], questions, self.prompts)
        scores = score_with_raw(gate, questions, readings)
        distances = measure_distances(gate, questions, readings)
        raw = dict(zip(ids, scores.raw, strict=True)) if scores.raw else {}
        needs = dict(zip(ids, scores.needs, strict=True))
        return GateDecisions(needs, raw, list(distances), time.perf_counter() - start)

    @property
    def identity(self) -> dict[str, str]:
        """Fingerprints that all workers of a cluster must share."""
        return {"model": self.model.fingerprint, "wording": self.prompts.fingerprint}


@dataclass(frozen=True)
class DeciderSpec:
    """Names of an LLM and gates, sent to the workers of a cluster, which build the decider."""

    model: str
    gates: tuple[str, ...]
    prompts: AnswerPrompts
    plug_in: bool = False
    index: str | None = None

    def create(self, retriever: Retriever | None) -> Decider:
        """Load the LLM and the gates. The retriever is not used."""
        model = load_model(self.model)
        gates = [bind_gate(load_gate(spec, plug_in=self.plug_in), model, self.prompts) for spec in self.gates]
        return Decider(model, self.prompts, gates)


def raise_undecided(question: Question, reason: str) -> list[GateDecisions]:
    """Raise ModelError for a question that no gate could decide on: a missing score is never replaced by a number."""
    raise ModelError(f"no gate could decide on question '{question.id}': {reason}. Its answers are stored; try again.")


@dataclass(frozen=True)
class BoundGate:
    """A gate bound to the LLM.

    Attributes:
        name: Name that its decisions are stored under.
        spec: What the caller named it by.
        is_reusable: Whether stored decisions under this name are surely its own. Folders, objects and history logs
            may have changed since.
    """

    name: str
    spec: str | Gate
    gate: Gate
    is_reusable: bool


@dataclass(frozen=True)
class LiveDecider:
    """Lets gates decide on the questions of label runs, in this process or on a cluster, and stores the decisions."""

    model: Model
    prompts: AnswerPrompts
    gates: Sequence[BoundGate]
    options: LiveOptions

    @classmethod
    def create(
        cls, gates: dict[str, str | Gate], model: Model, prompts: AnswerPrompts, options: LiveOptions
    ) -> LiveDecider:
        """Bind the gates to the LLM. For a cluster, the LLM and the gates must be given by name."""
        bound = [_bind(name, spec, model, prompts, plug_in=options.plug_in) for name, spec in gates.items()]
        if is_remote_runner(options.runner):
            for name, value in (("model", options.model), *(("gate", gate.spec) for gate in bound)):
                require_name(name, value)  # workers load them by name
        return cls(model, prompts, bound, options)

    @property
    def is_remote(self) -> bool:
        """Whether the LLM runs on a cluster."""
        return is_remote_runner(self.options.runner)

    def record(self, run: RunFolder) -> None:
        """Store the decisions of gates that have none stored in the run."""
        questions = [question_from_row(row) for row in run.rows() if row.error is None]
        stored = {record.gate for record in read_needs(run.path)}
        deciding = [gate for gate in self.gates if not (gate.is_reusable and gate.name in stored)]
        if not questions or not deciding:
            return
        groups = [deciding] if self.is_remote else [[gate] for gate in deciding]
        for group in groups:
            log.info("%s decides on %d questions", ", ".join(gate.name for gate in group), len(questions))
            decisions = [GateDecisions() for _ in group]
            decider = Decider(self.model, self.prompts, [gate.gate for gate in group])
            for batch in self._runner(group).run(questions, decider.decide):
                for total, added in zip(decisions, batch, strict=True):
                    total.add(added)
            write_needs(run.path, [_make_record(gate, made) for gate, made in zip(group, decisions, strict=True)])

    def _runner(self, gates: Sequence[BoundGate]) -> Runner:
        if not self.is_remote:
            return BATCH_RUNNER
        specs = tuple(str(gate.spec) for gate in gates)
        spec = DeciderSpec(str(self.options.model), specs, self.prompts, self.options.plug_in)
        fingerprints = {"wording": self.prompts.fingerprint}
        return create_ray_runner(str(self.options.runner), spec, raise_undecided, fingerprints)


def _bind(name: str, spec: str | Gate, model: Model, prompts: AnswerPrompts, *, plug_in: bool) -> BoundGate:
    gate = load_gate(spec, plug_in=plug_in) if isinstance(spec, str) else spec
    reads_history = type(gate).find_neighbors is not Gate.find_neighbors
    is_reusable = isinstance(spec, str) and get_gate_folder(spec) is None and not reads_history
    return BoundGate(name, spec, bind_gate(gate, model, prompts), is_reusable)


def _make_record(gate: BoundGate, decisions: GateDecisions) -> RecordedNeeds:
    return RecordedNeeds(
        gate.name,
        gate.gate.threshold,
        decisions.needs,
        gate.gate.note,
        decisions.seconds / len(decisions.needs),
        decisions.raw,
        compute_far_share(decisions.distances),
        gate.gate.scoring if isinstance(gate.gate, FittedGate) else "",
    )
