"""`knowgate demo`: a tour on the embedded model and the handbook of an invented company."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from knowgate.cli.console import WORDS, plain_console
from knowgate.cli.progress import progress
from knowgate.datasets import load_questions
from knowgate.errors import BadSetting
from knowgate.gates import DEFAULT, default_gate, load_gate
from knowgate.models import load_model
from knowgate.pipeline import AdaptiveRAG, cached_index
from knowgate.prompts import AnswerPrompts
from knowgate.retrieval import load_retriever
from knowgate.text import grade_contains
from knowgate.types import Answer, Question

PLAIN = ("never", "always")


@dataclass(frozen=True)
class Run:
    """What one way of answering gave on all questions."""

    name: str
    answers: list[Answer]

    @property
    def correct(self) -> list[bool]:
        return [grade_contains(answer.text, answer.question).correct for answer in self.answers]

    @property
    def seconds(self) -> float:
        return sum(answer.seconds["total"] for answer in self.answers)

    @property
    def retrieval_rate(self) -> float:
        return sum(answer.decision.retrieve for answer in self.answers) / len(self.answers)


def demo(
    model: Annotated[str, typer.Option(help="Any model spec; the embedded one by default.")] = "smollm",
    gate: Annotated[str, typer.Option(help="Any gate spec.")] = DEFAULT,
    threshold: Annotated[float | None, typer.Option(help="Retrieve when need is above this.")] = None,
    limit: Annotated[int, typer.Option(help="How many of the 40 questions.")] = 24,
) -> None:
    """Answer general questions and questions on an invented company's handbook: never, always, and gated."""
    WORDS.print("Handbook of an invented company; half the questions are general knowledge, half only it can answer.")
    questions = demo_questions(limit)
    retriever = load_retriever(str(cached_index(demo_folder() / "handbook", "bm25")))
    WORDS.print(f"Loading {model} ...")
    llm = load_model(model)
    chosen = default_gate(llm, AnswerPrompts().fingerprint) if gate == DEFAULT else load_gate(gate)
    gated = AdaptiveRAG(llm, chosen, retriever, threshold=threshold, k=2)
    never, always = (_run(replace(gated, gate=load_gate(name), threshold=None), questions) for name in PLAIN)
    runs = [never, always, _gated(gated, never, always)]
    console = plain_console(soft_wrap=False)
    console.print(_question_table(runs[-1]))
    console.print(_comparison(runs))
    WORDS.print(_verdict(runs))
    WORDS.print('need: 0 = the LLM knows, 1 = it must look up. Yours: knowgate ask --docs FOLDER "a question"')


def _verdict(runs: Sequence[Run]) -> str:
    """What to conclude, whichever way it went."""
    _, always, gated = runs
    change = sum(gated.correct) - sum(always.correct)
    answers = "as many right answers" if not change else f"{abs(change)} {'more' if change > 0 else 'fewer'} right"
    return (
        f"The gate saved {1 - gated.retrieval_rate:.0%} of the searches for {answers} of {len(gated.answers)}, against "
        "always retrieving. A model this small knows little; the larger yours, the more there is to save."
    )


def demo_folder() -> Path:
    return Path(str(resources.files("knowgate"))) / "demo_data"


def demo_questions(limit: int | None = None) -> list[Question]:
    if limit is not None and limit < 1:
        raise BadSetting(f"the limit is {limit}; at least 1 question is needed.")
    return load_questions(f"jsonl:{demo_folder() / 'questions.jsonl'}", limit)


def _run(rag: AdaptiveRAG, questions: Sequence[Question]) -> Run:
    answers = []
    with progress(f"{rag.gate.name:>8}", "questions", WORDS) as show:
        for answer in rag.stream(questions, batch=8):
            answers.append(answer)
            show(len(answers), len(questions))
    return Run(rag.gate.name, answers)


def _gated(rag: AdaptiveRAG, never: Run, always: Run) -> Run:
    """The gate's run put together from the other two: greedy answers do not depend on who asked for them."""
    answers = []
    for closed, opened in zip(never.answers, always.answers, strict=True):
        start = time.perf_counter()
        decision = rag.decide(closed.question)
        chosen = opened if decision.retrieve else closed
        # the pass that decides is the start of the closed-book answer: only a retrieved question pays for it
        extra = time.perf_counter() - start if decision.retrieve else 0.0
        total = chosen.seconds["total"] + extra
        answers.append(replace(chosen, decision=decision, seconds={"total": total}))
    return Run(rag.gate.name, answers)


def _question_table(run: Run) -> Table:
    table = Table("", "kind", "question", "need", "decision", "answer", "passage", title="question by question")
    for answer, correct in zip(run.answers, run.correct, strict=True):
        mark = Text("✓", "green") if correct else Text("✗", "red")
        decision = Text("retrieve", "yellow") if answer.decision.retrieve else Text("skip", "green")
        source = answer.passages[0].id if answer.passages else "-"
        kind = str(answer.question.meta.get("kind", ""))
        need = f"{answer.decision.need:.2f}"
        table.add_row(mark, kind, answer.question.text, need, decision, answer.text, source)
    return table


def _comparison(runs: Sequence[Run]) -> Table:
    kinds = sorted({str(answer.question.meta.get("kind", "")) for answer in runs[0].answers})
    table = Table("gate", "right", *(f"right: {kind}" for kind in kinds), "retrieved", "s/question", title="compared")
    for run in runs:
        graded = list(zip(run.answers, run.correct, strict=True))
        cells = [[ok for answer, ok in graded if answer.question.meta.get("kind", "") == kind] for kind in kinds]
        shares = [f"{sum(cell)}/{len(cell)}" for cell in cells]
        total = f"{sum(run.correct)}/{len(graded)}"
        pace = f"{run.seconds / len(graded):.2f}"
        table.add_row(run.name, total, *shares, f"{run.retrieval_rate:.0%}", pace)
    return table
