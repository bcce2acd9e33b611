"""Questions answered now for an evaluation: label them both ways, and let the gates decide with the LLM at hand.

What they decide is kept beside the rows, timed, so that the run can be evaluated again without the LLM.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

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
from knowgate.labels.options import DEFAULT_CANDIDATES
from knowgate.labels.ray_runner import create_ray_runner, is_remote_runner, require_name
from knowgate.labels.run import LabelProgress
from knowgate.models import load_model, resolve_model
from knowgate.models.prompts.answers import AnswerPrompts, load_answer_prompts
from knowgate.retrieval import as_retriever
from knowgate.retrieval.rerankers import as_reranker
from knowgate.types import Gate, Model, Question, Reranker, Retriever, Runner


@dataclass(frozen=True)
class BoundGate:
    """A gate bound to the LLM, under the name its needs are recorded by.

    lasting: the name says all about the gate, so that needs on record under it are its own. A folder may have been
    fitted or calibrated again since, and so may an object; a log may have grown. They decide anew.
    """

    name: str
    gate: Gate
    lasting: bool


def bind_live_gate(name: str, gate: str | Gate, model: Model, prompts: AnswerPrompts, *, plug_in: bool) -> BoundGate:
    loaded = load_gate(gate, plug_in=plug_in) if isinstance(gate, str) else gate
    reads_log = type(loaded).find_neighbors is not Gate.find_neighbors  # which may have grown since
    lasting = isinstance(gate, str) and get_gate_folder(gate) is None and not reads_log
    return BoundGate(name, bind_gate(loaded, model, prompts), lasting)


@dataclass
class GateDecisions:
    """What one gate says about some questions, by their ids. seconds: spent on all of them."""

    needs: dict[str, float] = field(default_factory=dict)
    raw: dict[str, float] = field(default_factory=dict)
    distances: list[float | None] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, other: GateDecisions) -> None:
        self.needs |= other.needs
        self.raw |= other.raw
        self.distances += other.distances
        self.seconds += other.seconds


@dataclass(frozen=True)
class Decider:
    """Gates on one LLM; each reads what it needs, as the pipeline would with this gate alone."""

    model: Model
    prompts: AnswerPrompts
    gates: Sequence[Gate]

    def decide(self, questions: Sequence[Question]) -> list[GateDecisions]:
        """For each gate."""
        return [self._one(gate, questions) for gate in self.gates]

    def _one(self, gate: Gate, questions: Sequence[Question]) -> GateDecisions:
        start = time.perf_counter()
        ids = [question.id for question in questions]
        readings = read_questions(self.model, [gate], questions, self.prompts)
        scored = score_with_raw(gate, questions, readings)
        distances = measure_distances(gate, questions, readings)
        needs, raw = dict(zip(ids, scored.needs, strict=True)), dict(zip(ids, scored.raw or [], strict=False))
        return GateDecisions(needs, raw, list(distances), time.perf_counter() - start)

    @property
    def identity(self) -> dict[str, str]:
        return {"model": self.model.fingerprint, "wording": self.prompts.fingerprint}

    def __call__(self, questions: Sequence[Question]) -> list[GateDecisions]:
        return self.decide(questions)


@dataclass(frozen=True)
class DeciderSpec:
    """The names of the LLM and the gates: what is sent to other machines and made there."""

    model: str
    gates: tuple[str, ...]
    prompts: AnswerPrompts
    plug_in: bool = False
    index: str | None = None

    def create(self, retriever: Retriever | None) -> Decider:
        llm = load_model(self.model)
        gates = [bind_live_gate(spec, spec, llm, self.prompts, plug_in=self.plug_in).gate for spec in self.gates]
        return Decider(llm, self.prompts, gates)


def raise_undecided(question: Question, why: str) -> list[GateDecisions]:
    """A need that cannot be had is an error, never a number."""
    raise ModelError(f"no gate could decide on question '{question.id}': {why}. Its answers are kept; try again.")


log = logging.getLogger(__name__)
BATCH_RUNNER = LocalRunner(first=32, largest=32)
MAX_TOKENS = 32
LAYERS = "mid,late"
AUTO_GATES = "auto"  # stands for all gates that the rows allow


@dataclass(frozen=True)
class LiveRuns:
    """Runs made now, and the names under which the gates' needs are on record in them; 'auto' stays as it is."""

    runs: list[Path]
    gates: list[str]


def label_and_decide(
    gates: Sequence[str | Gate],
    data: QuestionSource,
    *,
    model: str | Model,
    out: str | Path,
    prompts: str | Path | None = None,
    index: str | Path | Retriever | None = None,
    rerank: str | Path | Reranker | None = None,
    candidates: int = DEFAULT_CANDIDATES,
    k: int | None = None,
    limit: int | None = None,
    plug_in: bool = False,
    runner: str | Runner | None = None,
    on_progress: Callable[[LabelProgress], None] = lambda tally: None,
) -> LiveRuns:
    """Label the questions and let the gates decide on them. data: one or several specs, between commas, or questions.

    prompts: the wording of the answers, 'free' or a TOML file; the packaged one unless given.
    Answers that are in `out` already are not given again, nor are the decisions of plain gates.
    """
    parts = split_data_specs(data)
    llm, wording = resolve_model(model), load_answer_prompts(None if prompts is None else Path(prompts))
    retriever = as_retriever(index) if index is not None else None
    reranker = as_reranker(rerank) if rerank is not None else None
    names = make_record_names(gates)
    deciding = [
        bind_live_gate(name, gate, llm, wording, plug_in=plug_in)
        for name, gate in zip(names, gates, strict=True)
        if gate != AUTO_GATES
    ]
    specs = [gate for gate in gates if gate != AUTO_GATES]
    far = _far(runner, model, deciding, specs, wording, plug_in=plug_in)
    runs = []
    for part in parts:
        run = label(
            part,
            model=model if far else llm,
            prompts=prompts,
            index=index if far else retriever,
            rerank=rerank if far else reranker,
            runner=runner,
            candidates=candidates,
            k=k,
            out=Path(out) / "runs" / make_folder_name(part),
            samples=0,
            max_tokens=MAX_TOKENS,
            layers=LAYERS,
            limit=limit,
            on_progress=on_progress,
        )
        record_decisions(run, deciding, lambda some: Decider(llm, wording, some), far)
        runs.append(run.path)
    return LiveRuns(runs, names)


def decide_recorded_questions(
    gates: Sequence[str | Gate],
    runs: Sequence[Path],
    *,
    model: str | Model,
    prompts: AnswerPrompts | None = None,
    plug_in: bool = False,
    runner: str | Runner | None = None,
) -> list[str | Gate]:
    """Let gates decide on recorded questions that need more than the rows hold; what they say is kept beside the rows.

    Gives back the gates as the record knows them. The LLM and the wording must be those of the runs.
    """
    trial, llm, wording = load_label_table(runs, layers=()), resolve_model(model), prompts or load_answer_prompts()
    _check_same(trial, llm, wording)
    asked = [gate for gate in gates if gate != AUTO_GATES and not can_score(trial, gate, plug_in=plug_in)]
    names = dict(zip(map(id, asked), make_record_names(asked), strict=True))
    deciding = [bind_live_gate(names[id(gate)], gate, llm, wording, plug_in=plug_in) for gate in asked]
    far = _far(runner, model, deciding, asked, wording, plug_in=plug_in)
    for run in runs:
        record_decisions(RunFolder(run), deciding, lambda some: Decider(llm, wording, some), far)
    return [names.get(id(gate), gate) for gate in gates]


def _far(
    runner: str | Runner | None,
    model: str | Model,
    deciding: Sequence[BoundGate],
    gates: Sequence[str | Gate],
    prompts: AnswerPrompts,
    *,
    plug_in: bool,
) -> Callable[[Sequence[BoundGate]], Runner] | None:
    """How to have gates decide on a cluster, if that is wished. deciding: the same gates, bound here."""
    if not is_remote_runner(runner):
        return None
    spec = str(require_name("model", model))
    specs = {one.name: str(require_name("gate", gate)) for one, gate in zip(deciding, gates, strict=True)}

    def made(some: Sequence[BoundGate]) -> Runner:
        recipe = DeciderSpec(spec, tuple(specs[one.name] for one in some), prompts, plug_in)
        return create_ray_runner(str(runner), recipe, raise_undecided, {"wording": prompts.fingerprint})

    return made


def _check_same(trial: LabelTable, model: Model, prompts: AnswerPrompts) -> None:
    made = trial.settings
    if made["model_fingerprint"] != model.fingerprint:
        raise BadSetting(
            f"the runs were made with {made['model']} ({made['model_fingerprint']}), not with {model.name} "
            f"({model.fingerprint}); ask the LLM that answered: --model {made['model']}."
        )
    if made["prompts_fingerprint"] != prompts.fingerprint:
        raise BadSetting("the runs were made with other prompts than these; name those they were made with: --prompts.")


def split_data_specs(data: QuestionSource) -> list[QuestionSource]:
    """Specs between commas each by itself; questions as they are."""
    if not isinstance(data, str):
        return [data]
    specs: list[QuestionSource] = [part.strip() for part in data.split(",") if part.strip()]
    if not specs:
        raise BadSetting("--data names no questions.")
    return specs


def make_folder_name(data: QuestionSource) -> str:
    return describe_data(data).replace(":", "-").replace("/", "-")


def make_record_names(gates: Sequence[str | Gate]) -> list[str]:
    """Specs as they are; gates given as objects by their names, numbered where they share one."""
    names: list[str] = []
    for gate in gates:
        own = gate if isinstance(gate, str) else get_gate_name(gate)
        same = sum(name == own or name.startswith(f"{own} (") for name in names)
        names.append(f"{own} ({same + 1})" if same and not isinstance(gate, str) else own)
    return names


def record_decisions(
    run: RunFolder,
    gates: Sequence[BoundGate],
    decider: Callable[[Sequence[Gate]], Decider],
    far: Callable[[Sequence[BoundGate]], Runner] | None = None,
) -> None:
    """Needs of gates that have none on record; a batch at a time, as the pipeline would.

    far: makes the runner that has them all decide elsewhere; here, one gate follows the other.
    """
    questions = [question_from_row(row) for row in run.rows() if row.error is None]
    have = {item.gate for item in read_needs(run.path)}
    asked = [one for one in gates if questions and not (one.lasting and one.name in have)]
    for some in ([asked] if asked else []) if far else [[one] for one in asked]:
        log.info("%s decides on %d questions", ", ".join(one.name for one in some), len(questions))
        runner: Runner = far(some) if far else BATCH_RUNNER
        said = [GateDecisions() for _ in some]
        for part in runner.run(questions, decider([one.gate for one in some]).decide):
            for so_far, more in zip(said, part, strict=True):
                so_far.add(more)
        write_needs(run.path, [_recorded(one, told) for one, told in zip(some, said, strict=True)])


def _recorded(one: BoundGate, said: GateDecisions) -> RecordedNeeds:
    seconds, far = said.seconds / len(said.needs), compute_far_share(said.distances)
    scoring = one.gate.scoring if isinstance(one.gate, FittedGate) else ""
    return RecordedNeeds(one.name, one.gate.threshold, said.needs, one.gate.note, seconds, said.raw, far, scoring)
