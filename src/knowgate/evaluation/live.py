"""Questions answered now for an evaluation: label them both ways, and let the gates decide with the LLM at hand.

What they decide is kept beside the rows, timed, so that the run can be evaluated again without the LLM.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from knowgate.datasets import Data, data_name
from knowgate.errors import BadSetting
from knowgate.evaluation.deciding import Decided, Decider, DecideRecipe, LiveGate, bound, cannot_decide
from knowgate.gates import FittedGate, far_share, gate_name, is_told
from knowgate.labels import CANDIDATES, LocalRunner, Tally, far_runner, is_far, label, named
from knowgate.models import as_model
from knowgate.prompts import AnswerPrompts, load_answer_prompts
from knowgate.rerank import as_reranker
from knowgate.retrieval import as_retriever
from knowgate.runs import RecordedNeeds, RunFolder, Trial, load_trial, question_of, read_needs, write_needs
from knowgate.types import Gate, Model, Reranker, Retriever, Runner

log = logging.getLogger(__name__)
BATCHES = LocalRunner(first=32, largest=32)
MAX_TOKENS = 32
LAYERS = "mid,late"
AUTO = "auto"  # stands for all gates that the rows allow


@dataclass(frozen=True)
class LiveRuns:
    """Runs made now, and the names under which the gates' needs are on record in them; 'auto' stays as it is."""

    runs: list[Path]
    gates: list[str]


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
    runner: str | Runner | None = None,
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
    deciding = [
        bound(name, gate, llm, wording, plug_in=plug_in)
        for name, gate in zip(names, gates, strict=True)
        if gate != AUTO
    ]
    specs = [gate for gate in gates if gate != AUTO]
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
            out=Path(out) / "runs" / folder_name(part),
            samples=0,
            max_tokens=MAX_TOKENS,
            layers=LAYERS,
            limit=limit,
            on_progress=on_progress,
        )
        decide_on(run, deciding, lambda some: Decider(llm, wording, some), far)
        runs.append(run.path)
    return LiveRuns(runs, names)


def ask_now(
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
    trial, llm, wording = load_trial(runs, layers=()), as_model(model), prompts or load_answer_prompts()
    _check_same(trial, llm, wording)
    asked = [gate for gate in gates if gate != AUTO and not is_told(trial, gate, plug_in=plug_in)]
    names = dict(zip(map(id, asked), record_names(asked), strict=True))
    deciding = [bound(names[id(gate)], gate, llm, wording, plug_in=plug_in) for gate in asked]
    far = _far(runner, model, deciding, asked, wording, plug_in=plug_in)
    for run in runs:
        decide_on(RunFolder(run), deciding, lambda some: Decider(llm, wording, some), far)
    return [names.get(id(gate), gate) for gate in gates]


def _far(
    runner: str | Runner | None,
    model: str | Model,
    deciding: Sequence[LiveGate],
    gates: Sequence[str | Gate],
    prompts: AnswerPrompts,
    *,
    plug_in: bool,
) -> Callable[[Sequence[LiveGate]], Runner] | None:
    """How to have gates decide on a cluster, if that is wished. deciding: the same gates, bound here."""
    if not is_far(runner):
        return None
    spec = str(named("model", model))
    specs = {one.name: str(named("gate", gate)) for one, gate in zip(deciding, gates, strict=True)}

    def made(some: Sequence[LiveGate]) -> Runner:
        recipe = DecideRecipe(spec, tuple(specs[one.name] for one in some), prompts, plug_in)
        return far_runner(str(runner), recipe, cannot_decide, {"wording": prompts.fingerprint})

    return made


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


def decide_on(
    run: RunFolder,
    gates: Sequence[LiveGate],
    decider: Callable[[Sequence[Gate]], Decider],
    far: Callable[[Sequence[LiveGate]], Runner] | None = None,
) -> None:
    """Needs of gates that have none on record; a batch at a time, as the pipeline would.

    far: makes the runner that has them all decide elsewhere; here, one gate follows the other.
    """
    questions = [question_of(row) for row in run.rows() if row.error is None]
    have = {item.gate for item in read_needs(run.path)}
    asked = [one for one in gates if questions and not (one.lasting and one.name in have)]
    for some in ([asked] if asked else []) if far else [[one] for one in asked]:
        log.info("%s decides on %d questions", ", ".join(one.name for one in some), len(questions))
        runner: Runner = far(some) if far else BATCHES
        said = [Decided() for _ in some]
        for part in runner.run(questions, decider([one.gate for one in some]).decide):
            for so_far, more in zip(said, part, strict=True):
                so_far.add(more)
        write_needs(run.path, [_recorded(one, told) for one, told in zip(some, said, strict=True)])


def _recorded(one: LiveGate, said: Decided) -> RecordedNeeds:
    seconds, far = said.seconds / len(said.needs), far_share(said.distances)
    scoring = one.gate.scoring if isinstance(one.gate, FittedGate) else ""
    return RecordedNeeds(one.name, one.gate.threshold, said.needs, one.gate.note, seconds, said.raw, far, scoring)
