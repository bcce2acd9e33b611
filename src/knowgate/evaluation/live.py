"""Questions answered now for an evaluation: label them both ways, and let the gates decide with the LLM at hand.

What they decide is kept beside the rows, timed, so that the run can be evaluated again without the LLM.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from knowgate.datasets import Data, data_name
from knowgate.errors import BadSetting
from knowgate.gates import (
    bind_gate,
    far_share,
    folder_of,
    gate_name,
    is_told,
    load_gate,
    measure_distances,
    read_questions,
    score_both,
)
from knowgate.labels import CANDIDATES, Tally, label
from knowgate.models import as_model
from knowgate.prompts import AnswerPrompts, load_answer_prompts
from knowgate.rerank import as_reranker
from knowgate.retrieval import as_retriever
from knowgate.runs import RecordedNeeds, RunFolder, Trial, load_trial, question_of, read_needs, write_needs
from knowgate.types import Gate, Model, Reranker, Retriever

log = logging.getLogger(__name__)
BATCH = 32
MAX_TOKENS = 32
LAYERS = "mid,late"
AUTO = "auto"  # stands for all gates that the rows allow


@dataclass(frozen=True)
class LiveRuns:
    """Runs made now, and the names under which the gates' needs are on record in them; 'auto' stays as it is."""

    runs: list[Path]
    gates: list[str]


@dataclass(frozen=True)
class LiveGate:
    """A gate bound to the LLM, under the name its needs are recorded by.

    lasting: the name says all about the gate, so that needs on record under it are its own. A folder may have been
    fitted or calibrated again since, and so may an object; a log may have grown. They decide anew.
    """

    name: str
    gate: Gate
    lasting: bool


def answer_now(
    gates: Sequence[str | Gate],
    data: Data,
    *,
    model: str | Model,
    out: str | Path,
    prompts: str | Path | None = None,
    index: str | Path | Retriever | None = None,
    rerank: str | Path | Reranker | None = None,
    candidates: int = CANDIDATES,
    k: int | None = None,
    limit: int | None = None,
    plug_in: bool = False,
    on_progress: Callable[[Tally], None] = lambda tally: None,
) -> LiveRuns:
    """Label the questions and let the gates decide on them. data: one or several specs, between commas, or questions.

    prompts: the wording of the answers, 'free' or a TOML file; the packaged one unless given.
    Answers that are in `out` already are not given again, nor are the decisions of plain gates.
    """
    parts = split_data(data)
    llm, wording = as_model(model), load_answer_prompts(None if prompts is None else Path(prompts))
    retriever = as_retriever(index) if index is not None else None
    reranker = as_reranker(rerank) if rerank is not None else None
    names = record_names(gates)
    bound = [
        _bound(name, gate, llm, wording, plug_in=plug_in)
        for name, gate in zip(names, gates, strict=True)
        if gate != AUTO
    ]
    runs = []
    for part in parts:
        run = label(
            part,
            model=llm,
            prompts=prompts,
            index=retriever,
            rerank=reranker,
            candidates=candidates,
            k=k,
            out=Path(out) / "runs" / folder_name(part),
            samples=0,
            max_tokens=MAX_TOKENS,
            layers=LAYERS,
            limit=limit,
            on_progress=on_progress,
        )
        decide_on(run, llm, wording, bound)
        runs.append(run.path)
    return LiveRuns(runs, names)


def ask_now(
    gates: Sequence[str | Gate],
    runs: Sequence[Path],
    *,
    model: str | Model,
    prompts: AnswerPrompts | None = None,
    plug_in: bool = False,
) -> list[str | Gate]:
    """Let gates decide on recorded questions that need more than the rows hold; what they say is kept beside the rows.

    Gives back the gates as the record knows them. The LLM and the wording must be those of the runs.
    """
    trial, llm, wording = load_trial(runs, layers=()), as_model(model), prompts or load_answer_prompts()
    _check_same(trial, llm, wording)
    asked = [gate for gate in gates if gate != AUTO and not is_told(trial, gate, plug_in=plug_in)]
    names = dict(zip(map(id, asked), record_names(asked), strict=True))
    bound = [_bound(names[id(gate)], gate, llm, wording, plug_in=plug_in) for gate in asked]
    for run in runs:
        decide_on(RunFolder(run), llm, wording, bound)
    return [names.get(id(gate), gate) for gate in gates]


def _check_same(trial: Trial, model: Model, prompts: AnswerPrompts) -> None:
    made = trial.settings
    if made["model_fingerprint"] != model.fingerprint:
        raise BadSetting(
            f"the runs were made with {made['model']} ({made['model_fingerprint']}), not with {model.name} "
            f"({model.fingerprint}); ask the LLM that answered: --model {made['model']}."
        )
    if made["prompts_fingerprint"] != prompts.fingerprint:
        raise BadSetting("the runs were made with other prompts than these; name those they were made with: --prompts.")


def split_data(data: Data) -> list[Data]:
    """Specs between commas each by itself; questions as they are."""
    if not isinstance(data, str):
        return [data]
    specs: list[Data] = [part.strip() for part in data.split(",") if part.strip()]
    if not specs:
        raise BadSetting("--data names no questions.")
    return specs


def folder_name(data: Data) -> str:
    return data_name(data).replace(":", "-").replace("/", "-")


def record_names(gates: Sequence[str | Gate]) -> list[str]:
    """Specs as they are; gates given as objects by their names, numbered where they share one."""
    names: list[str] = []
    for gate in gates:
        own = gate if isinstance(gate, str) else gate_name(gate)
        same = sum(name == own or name.startswith(f"{own} (") for name in names)
        names.append(f"{own} ({same + 1})" if same and not isinstance(gate, str) else own)
    return names


def _bound(name: str, gate: str | Gate, model: Model, prompts: AnswerPrompts, *, plug_in: bool) -> LiveGate:
    loaded = load_gate(gate, plug_in=plug_in) if isinstance(gate, str) else gate
    reads_log = type(loaded).recall is not Gate.recall  # which may have grown since
    lasting = isinstance(gate, str) and folder_of(gate) is None and not reads_log
    return LiveGate(name, bind_gate(loaded, model, prompts), lasting)


def decide_on(run: RunFolder, model: Model, prompts: AnswerPrompts, gates: Sequence[LiveGate]) -> None:
    """Needs of gates that have none on record; a batch at a time, as the pipeline would."""
    questions = [question_of(row) for row in run.rows() if row.error is None]
    have = {item.gate for item in read_needs(run.path)}
    for one in gates:
        if not questions or (one.lasting and one.name in have):
            continue
        log.info("%s decides on %d questions", one.name, len(questions))
        start = time.perf_counter()
        needs: list[float] = []
        raws: list[float] = []
        distances: list[float | None] = []
        for first in range(0, len(questions), BATCH):
            part = questions[first : first + BATCH]
            readings = read_questions(model, [one.gate], part, prompts)
            scored = score_both(one.gate, part, readings)
            needs += scored.needs
            raws += scored.raw or []
            distances += measure_distances(one.gate, part, readings)
        seconds = (time.perf_counter() - start) / len(questions)
        ids = [question.id for question in questions]
        by_id, raw = dict(zip(ids, needs, strict=True)), dict(zip(ids, raws, strict=False))
        about, far = one.gate.note, far_share(distances)
        write_needs(run.path, [RecordedNeeds(one.name, one.gate.threshold, by_id, about, seconds, raw, far)])
