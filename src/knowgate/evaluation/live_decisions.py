"""Live decisions: gates that need the LLM decide on questions now, and their decisions are stored in label runs.

With stored decisions, the runs can be evaluated again without the LLM. The time of each decision is stored, too.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from knowgate.core.options import option
from knowgate.data.questions import QuestionSource, describe_data
from knowgate.data.runs.folder import RunFolder
from knowgate.data.runs.records import RecordedNeeds, read_needs, write_needs
from knowgate.data.runs.storage import question_from_row
from knowgate.data.runs.table import LabelTable, load_label_table
from knowgate.errors import BadSetting, ModelError
from knowgate.gates import load_gate
from knowgate.gates.artifacts.drift import compute_far_share
from knowgate.gates.fitted_gate import FittedGate, get_gate_folder, get_gate_name
from knowgate.gates.offline_scoring import can_score
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
LabelCallback = Callable[[LabelProgress], None]
BATCH_RUNNER = LocalRunner(first=32, largest=32)
MAX_TOKENS = 32  # maximum length of an answer
LAYERS = "mid,late"  # layers of the LLM whose hidden states are stored for gates
AUTO_GATES = "auto"  # stands for all gates that the rows allow


class LiveOptions(AnswerOptions):
    """Options of an evaluation that calls the LLM."""

    model: Any = option(
        None,
        "LLM that answers `data`. Default: smollm. With `runs`, no LLM is called by default. To include gates that need "
        "more than the runs contain, give the LLM of the runs.",
    )
    plug_in: bool = option(False, "Also use gates that were fitted on another LLM.")


def label_and_decide(
    gates: Sequence[str | Gate], data: QuestionSource, out: Path, options: LiveOptions, on_progress: LabelCallback
) -> list[Path]:
    """Let the LLM answer questions, and gates decide whether to retrieve for them.

    Stored answers and decisions are reused. Returns the folders of the label runs, one per data spec.

    Args:
        gates: Gate specs or gates. 'auto' is ignored here; an evaluation replaces it by all gates that the data allow.
        data: Questions, or data specs separated by commas.
        out: Folder for the runs.
        options: The LLM and how it answers.
        on_progress: Called with the progress of labeling.
    """
    sources = split_data_specs(data)
    named_gates = dict(zip(make_record_names(gates), gates, strict=True))
    named_gates.pop(AUTO_GATES, None)
    model = resolve_model(options.model)
    prompts = load_answer_prompts(options.prompts, model=model)
    decider = LiveDecider.bind(named_gates, model, prompts, options)
    label_options = _make_label_options(options, is_remote=decider.is_remote)
    answering_model = options.model if decider.is_remote else model  # the workers of a cluster load it by name
    runs = []
    for source in sources:
        folder_name = describe_data(source).replace(":", "-").replace("/", "-")
        folder = out / "runs" / folder_name
        run = label(source, out=folder, model=answering_model, options=label_options, on_progress=on_progress)
        decider.record(run)
        runs.append(run.path)
    return runs


def _make_label_options(options: LiveOptions, *, is_remote: bool) -> LabelOptions:
    """Make the options of labeling. Without a cluster, the index and the reranker are loaded here, once."""
    values = {name: getattr(options, name) for name in AnswerOptions.model_fields}
    if not is_remote:  # the workers of a cluster load everything by name
        values["index"] = None if options.index is None else as_retriever(options.index)
        values["rerank"] = None if options.rerank is None else as_reranker(options.rerank)
    return LabelOptions(**values, samples=0, max_tokens=MAX_TOKENS, layers=LAYERS)


def decide_on_runs(gates: Sequence[str | Gate], runs: Sequence[Path], *, options: LiveOptions) -> list[str | Gate]:
    """Let the LLM run the gates whose decisions cannot be computed from label runs, and store the decisions there.

    Args:
        gates: Gate specs or gates.
        runs: Folders of label runs.
        options: The LLM and the prompts that the runs were made with.

    Returns:
        The gates in the same order. A gate that the LLM ran is replaced by the name of its stored decisions. All other
        gates are returned as they were given.

    Raises:
        BadSetting: The runs were made with another LLM or other prompts.
    """
    table = load_label_table(runs, layers=())
    model = resolve_model(options.model)
    prompts = load_answer_prompts(options.prompts, model=model)
    _check_same_model(table, model, prompts)
    needing_llm = [gate for gate in gates if gate != AUTO_GATES and not can_score(table, gate, plug_in=options.plug_in)]
    names = make_record_names(needing_llm)
    decider = LiveDecider.bind(dict(zip(names, needing_llm, strict=True)), model, prompts, options)
    for run in runs:
        decider.record(RunFolder(run))
    # Gates are found by id(), because they may not be hashable.
    record_names = {id(gate): name for gate, name in zip(needing_llm, names, strict=True)}
    return [record_names.get(id(gate), gate) for gate in gates]


def _check_same_model(table: LabelTable, model: Model, prompts: AnswerPrompts) -> None:
    """Raise BadSetting if label runs were made with another LLM or other prompts."""
    settings = table.settings
    if settings["model_fingerprint"] != model.fingerprint:
        raise BadSetting(
            f"the recorded answers come from {settings['model']} (fingerprint {settings['model_fingerprint']}), not from "
            f"{model.name} (fingerprint {model.fingerprint}). Use model={settings['model']!r}."
        )
    if settings["prompts_fingerprint"] != prompts.fingerprint:
        raise BadSetting("the recorded answers were made with other prompts. Set `prompts` to the prompts used then.")


def split_data_specs(data: QuestionSource) -> list[QuestionSource]:
    """Split data specs at commas: 'jsonl:a.jsonl,jsonl:b.jsonl' names two sources. A list of questions is one source.

    Raises:
        BadSetting: The text contains no spec.
    """
    if not isinstance(data, str):
        return [data]
    specs: list[QuestionSource] = [spec.strip() for spec in data.split(",") if spec.strip()]
    if not specs:
        raise BadSetting(f"data={data!r} names no questions. Example: 'jsonl:questions.jsonl'")
    return specs


def make_record_names(gates: Sequence[str | Gate]) -> list[str]:
    """Return a name for the stored decisions of each gate: its spec, or else its name. Equal names get numbers."""
    names: list[str] = []
    for gate in gates:
        if isinstance(gate, str):
            names.append(gate)
        else:
            name = get_gate_name(gate)
            n_same = sum(used == name or used.startswith(f"{name} (") for used in names)
            names.append(f"{name} ({n_same + 1})" if n_same else name)
    return names


# --- deciding -------------------------------------------------------------------------------------


@dataclass
class GateDecisions:
    """Decisions of one gate on some questions.

    Attributes:
        needs: Need for retrieval (0 = the LLM knows, 1 = retrieve), by question id.
        raw: Scores before calibration, by question id; empty if the gate is not calibrated.
        distances: Distance of each question from those the gate was fitted on; None if unknown.
        seconds: Total time of the decisions.
    """

    needs: dict[str, float] = field(default_factory=dict)
    raw: dict[str, float] = field(default_factory=dict)
    distances: list[float | None] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, further: GateDecisions) -> None:
        """Add the decisions on further questions."""
        self.needs |= further.needs
        self.raw |= further.raw
        self.distances += further.distances
        self.seconds += further.seconds


@dataclass(frozen=True)
class Decider:
    """Lets gates decide with one LLM. Gates run one by one, for realistic times.

    Attributes:
        model: The LLM.
        prompts: Wording of the prompts.
        gates: The gates, ready to decide with the LLM.
    """

    model: Model
    prompts: AnswerPrompts
    gates: Sequence[Gate]

    def __call__(self, questions: Sequence[Question]) -> list[GateDecisions]:
        """Let every gate decide on the questions, and return the decisions in the order of the gates."""
        return [self._decide(gate, questions) for gate in self.gates]

    def _decide(self, gate: Gate, questions: Sequence[Question]) -> GateDecisions:
        """Let one gate decide on all questions.

        The result has the gate's needs for retrieval, its scores before calibration, how far each question is from
        the training questions, and the time taken.
        """
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
    """Description of a decider. Workers of a cluster create the decider from it.

    Attributes:
        model: Spec of the LLM.
        gates: Specs of the gates.
        prompts: Wording of the prompts.
        plug_in: Also load gates that were fitted on another LLM.
        index: Required by the runner; always None, because gates search nothing.
    """

    model: str
    gates: tuple[str, ...]
    prompts: AnswerPrompts
    plug_in: bool = False
    index: str | None = None

    def create(self, retriever: Retriever | None) -> Decider:
        """Load the LLM and the gates. The retriever is ignored; the runner passes one to every spec."""
        model = load_model(self.model)
        gates = [bind_gate(load_gate(spec, plug_in=self.plug_in), model, self.prompts) for spec in self.gates]
        return Decider(model, self.prompts, gates)


def raise_undecided(question: Question, reason: str) -> NoReturn:
    """Raise ModelError for an undecided question. The evaluation must not continue with an invented score."""
    raise ModelError(
        f"the gates could not decide on question '{question.id}': {reason}. Try again. The answers are already stored."
    )


@dataclass(frozen=True)
class BoundGate:
    """A gate connected to an LLM, with a name for its stored decisions.

    Attributes:
        name: Name that its decisions are stored under.
        spec: The spec or gate object that the caller gave.
        gate: The gate, ready to decide with the LLM.
    """

    name: str
    spec: str | Gate
    gate: Gate

    @property
    def is_reusable(self) -> bool:
        """Whether stored decisions under this name are still valid.

        Gate folders, gate objects and gates with a history log may have changed since.
        """
        # A gate that searches logged questions overrides `find_neighbors`. Its decisions change as the log grows.
        reads_history = type(self.gate).find_neighbors is not Gate.find_neighbors
        return isinstance(self.spec, str) and get_gate_folder(self.spec) is None and not reads_history


@dataclass(frozen=True)
class LiveDecider:
    """Lets gates decide on label runs (recorded answers), and stores the decisions there.

    Attributes:
        model: The LLM.
        prompts: Wording of the prompts.
        gates: The gates, ready to decide with the LLM.
        options: Where the LLM runs, and further options.
    """

    model: Model
    prompts: AnswerPrompts
    gates: Sequence[BoundGate]
    options: LiveOptions

    @classmethod
    def bind(
        cls, gates: Mapping[str, str | Gate], model: Model, prompts: AnswerPrompts, options: LiveOptions
    ) -> LiveDecider:
        """Load gates from their specs, and connect all gates to the LLM.

        Args:
            gates: Gate specs, folders or gate objects, by the name that their decisions are stored under.
            model: The LLM.
            prompts: Prompts of the LLM.
            options: Where the LLM runs, and whether gates of another LLM may be loaded.

        Raises:
            BadSetting: The LLM runs on a cluster, but the LLM or a gate is given as an object instead of a spec.
        """
        if is_remote_runner(options.runner):  # the workers load the LLM and the gates by name
            require_name("model", options.model)
            for spec in gates.values():
                require_name("gate", spec)
        bound = []
        for name, spec in gates.items():
            gate = load_gate(spec, plug_in=options.plug_in) if isinstance(spec, str) else spec
            bound.append(BoundGate(name, spec, bind_gate(gate, model, prompts)))
        return cls(model, prompts, bound, options)

    @property
    def is_remote(self) -> bool:
        """Whether the LLM runs on a cluster."""
        return is_remote_runner(self.options.runner)

    def record(self, run: RunFolder) -> None:
        """Let the gates decide on the questions of a label run, and store the decisions."""
        questions = [question_from_row(row) for row in run.rows() if row.error is None]
        stored = {record.gate for record in read_needs(run.path)}
        deciding = [gate for gate in self.gates if not (gate.is_reusable and gate.name in stored)]
        if not questions or not deciding:
            return
        # A group of gates decides in one pass over the questions. On a cluster, all gates are one group, because its
        # workers have to load the LLM for every pass. In this process, each gate is a group of its own.
        groups = [deciding] if self.is_remote else [[gate] for gate in deciding]
        for group in groups:
            write_needs(run.path, self._decide(group, questions))

    def _decide(self, gates: Sequence[BoundGate], questions: Sequence[Question]) -> list[RecordedNeeds]:
        """Let gates decide on questions, batch by batch, and return a record of each gate's decisions."""
        log.info("%s decides on %d questions", ", ".join(gate.name for gate in gates), len(questions))
        decisions = [GateDecisions() for _ in gates]
        decider = Decider(self.model, self.prompts, [gate.gate for gate in gates])
        for batch in self._runner(gates).run(questions, decider):
            for total, batch_decisions in zip(decisions, batch, strict=True):
                total.add(batch_decisions)
        return [_make_record(gate, total) for gate, total in zip(gates, decisions, strict=True)]

    def _runner(self, gates: Sequence[BoundGate]) -> Runner:
        """Return the runner that calls the decider: in this process, or on a Ray cluster."""
        if not self.is_remote:
            return BATCH_RUNNER
        specs = tuple(str(gate.spec) for gate in gates)
        spec = DeciderSpec(str(self.options.model), specs, self.prompts, self.options.plug_in)
        fingerprints = {"wording": self.prompts.fingerprint}
        return create_ray_runner(str(self.options.runner), spec, raise_undecided, fingerprints)


def _make_record(bound: BoundGate, decisions: GateDecisions) -> RecordedNeeds:
    """Make the record of a gate's decisions, with the mean time of a decision."""
    gate = bound.gate
    return RecordedNeeds(
        gate=bound.name,
        threshold=gate.threshold,
        needs=decisions.needs,
        about=gate.note,
        seconds=decisions.seconds / len(decisions.needs),
        raw=decisions.raw,
        far=compute_far_share(decisions.distances),  # share of questions unlike those that the gate was fitted on
        scoring=gate.score_fingerprint if isinstance(gate, FittedGate) else "",
    )
