"""Questions answered now for `knowgate eval --data`: label them both ways, and let gates that ask the LLM decide.

What they decide is kept beside the rows, timed, so that the run can be evaluated again without the LLM.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from knowgate.cli.label import labelling_bar
from knowgate.datasets import load_questions
from knowgate.errors import BadSetting
from knowgate.gates import bind_gate, load_gate, read_questions, score_questions
from knowgate.labels import Labeller, Plan, label_run, load_grader
from knowgate.models import load_model
from knowgate.pipeline import Settings, build_prompts
from knowgate.retrieval import load_retriever
from knowgate.runs import RecordedNeeds, RunFolder, question_of, read_needs, write_needs
from knowgate.types import Gate, Model, Question, Signal

WORDS = Console(stderr=True, soft_wrap=True, highlight=False)
BATCH = 32
MAX_TOKENS = 32


def answer_now(
    data: str, model: str, index: str | None, specs: Sequence[str], out: Path, *, limit: int | None, plug_in: bool
) -> tuple[list[Path], list[str]]:
    """Label runs with the needs of these gates in them, one per data spec; and the names to evaluate."""
    llm = load_model(model)
    retriever = load_retriever(index) if index else None
    prompts = build_prompts(Settings())
    gates = {spec: bind_gate(load_gate(spec, plug_in=plug_in), llm, prompts) for spec in specs if spec != "auto"}
    runs = []
    for spec in (part.strip() for part in data.split(",") if part.strip()):
        run = out / "runs" / spec.replace(":", "-").replace("/", "-")
        plan = Plan(samples=0, layers=_layers(llm), max_tokens=MAX_TOKENS)
        labeller = Labeller(llm, load_grader("contains", None, "implies"), plan, prompts, retriever)
        with labelling_bar() as show:
            label_run(RunFolder(run), load_questions(spec, limit), labeller, data=spec, on_progress=show)
        _decide(run, llm, gates)
        runs.append(run)
    if not runs:
        raise BadSetting("--data names no questions.")
    return runs, list(specs)


def _layers(model: Model) -> tuple[int, ...]:
    return (model.depth // 2, 3 * model.depth // 4) if Signal.HIDDEN in model.offers else ()


def _decide(run: Path, model: Model, gates: dict[str, Gate]) -> None:
    """Needs of gates not yet on record; a batch at a time, as the pipeline would."""
    questions = [question_of(row) for row in RunFolder(run).rows() if row.error is None]
    have = {item.gate for item in read_needs(run)}
    prompts = build_prompts(Settings())
    for spec, gate in gates.items():
        if spec in have or not questions:
            continue
        WORDS.print(f"{spec} decides on {len(questions)} questions")
        start = time.perf_counter()
        needs: list[float] = []
        for place in range(0, len(questions), BATCH):
            part: list[Question] = questions[place : place + BATCH]
            needs += score_questions(gate, part, read_questions(model, [gate], part, prompts))
        seconds = (time.perf_counter() - start) / len(questions)
        found = dict(zip((question.id for question in questions), needs, strict=True))
        write_needs(run, [RecordedNeeds(spec, gate.threshold, found, gate.note, seconds)])
