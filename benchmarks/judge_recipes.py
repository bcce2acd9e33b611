"""Recipes for `benchmarks/judge_train.py`: base model, training prompts and scored prompts of each judge.

The data are the recorded answers of Llama-3.1-8B-Instruct (`bench:gate_llama3_8b`): closed-book, with one retrieval and
with IRCoT. An answer is right if the data set's `acc_contains` says so. This module loads no weights and trains nothing.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from knowgate.core.text import normalize
from knowgate.data.questions import load_questions
from knowgate.data.splits import fingerprint_text_loosely
from knowgate.models.prompts.questions import (
    build_arbiter_prompt,
    build_correctness_prompt,
    build_search_correctness_prompt,
)
from knowgate.types import Question

LABELS_JOB = "labels"  # name of the job that labels train rows with the untrained 1.5B model
FOLDS = 5
KEYS = {
    "closed": ("pred_no_retrieval", "nor"),
    "open": ("pred_one_retrieval", "oner"),
    "ircot": ("pred_ircot", "ircot"),
}
EXTRA_RUNS = ("nq_ctx", "triviaqa_ctx", "squad_ctx", "hotpotqa_ctx")
ALL_KINDS = ("judge", "judge_open", "search", "memory", "documents")
ARBITER_KINDS = ("memory", "documents")


@dataclass(frozen=True)
class Case:
    """A question with its recorded answers.

    Attributes:
        question: The question.
        texts: Answer by side: "closed" (closed-book), "open" (one retrieval) or "ircot".
        right: Whether the answer is right, by side.
    """

    question: Question
    texts: Mapping[str, str]
    right: Mapping[str, bool]

    @property
    def agreement(self) -> float:
        """1 if the closed-book answer equals the answer with one retrieval, else 0."""
        return float(self.closed_book_equals("open"))

    @property
    def agreement_share(self) -> float:
        """Share of the other two recorded answers that equal the closed-book answer."""
        return (self.closed_book_equals("open") + self.closed_book_equals("ircot")) / 2

    def closed_book_equals(self, side: str) -> bool:
        """Return whether the closed-book answer equals the answer of another side, after normalization."""
        return normalize(self.texts["closed"]) == normalize(self.texts[side])


def load_cases(split: str, limit: int | None = None) -> list[Case]:
    """Load the questions of a split ("train" or "test") with their recorded answers."""
    return [_make_case(question) for question in load_questions(f"bench:gate_llama3_8b/{split}", limit)]


def _make_case(question: Question) -> Case:
    texts = {side: str(question.meta[key]) for side, (key, _) in KEYS.items()}
    return Case(question, texts, {side: bool(question.meta["acc_contains"][key]) for side, (_, key) in KEYS.items()})


@dataclass(frozen=True)
class PromptKind:
    """A kind of prompt for a judge.

    Attributes:
        side: Side of the answer that the prompt asks about.
        build_prompt: Builds the prompt of a causal LLM from a question and its answers.
        build_pair_text: Builds the second text of an encoder's pair from the answers; the first text is the question.
        skip_if_equal_to: Sides whose answers make a training example redundant if they equal this side's answer.
    """

    side: str
    build_prompt: Callable[[Question, Mapping[str, str]], str]
    build_pair_text: Callable[[Mapping[str, str]], str]
    skip_if_equal_to: tuple[str, ...] = ()


PROMPT_KINDS = {
    "question": PromptKind("closed", lambda question, texts: build_correctness_prompt(question), lambda texts: ""),
    "judge": PromptKind(
        "closed",
        lambda question, texts: build_correctness_prompt(question, texts["closed"]),
        lambda texts: texts["closed"],
    ),
    "judge_open": PromptKind(
        "open",
        lambda question, texts: build_correctness_prompt(question, texts["open"]),
        lambda texts: texts["open"],
        ("closed",),
    ),
    "judge_ircot": PromptKind(
        "ircot",
        lambda question, texts: build_correctness_prompt(question, texts["ircot"]),
        lambda texts: texts["ircot"],
        ("closed", "open"),
    ),
    "search": PromptKind(
        "open",
        lambda question, texts: build_search_correctness_prompt(question, texts["closed"]),
        lambda texts: f"{texts['closed']}; what would documents say?",
    ),
    "memory": PromptKind(
        "closed",
        lambda question, texts: build_arbiter_prompt(question, texts["closed"], texts["open"], "memory"),
        lambda texts: f"from memory: {texts['closed']}; documents say: {texts['open']}",
    ),
    "documents": PromptKind(
        "open",
        lambda question, texts: build_arbiter_prompt(question, texts["closed"], texts["open"], "documents"),
        lambda texts: f"from documents: {texts['open']}; memory says: {texts['closed']}",
    ),
}


@dataclass(frozen=True)
class Recipe:
    """How to train one judge, which is an ensemble of members.

    Attributes:
        name: Name of the recipe and of its predictions.
        base: Base model: "big" for the 1.5B LLM, a small base model, or "frozen:ENCODER" for a linear classifier.
        train_kinds: Kinds of prompts to train on.
        score_kinds: Kind of prompt that is scored for each column of the predictions.
        epochs: Number of epochs.
        learning_rate: Learning rate.
        batch: Examples per optimizer step.
        full: Whether to train all weights instead of LoRA adapters.
        members: Number of trainings. Each leaves out one fold, in turn. With more members than folds, several members
            score each dev row.
        labels: Training labels: "gold", or a substitute ("agreement", "agreement_share", "implied" or "said").
        rows: Number of training questions; None for all.
        teacher: Recipes whose mean predictions are the labels (distillation).
        gold_weight: Weight of the gold labels when there is a teacher.
        uses_extra_runs: Whether to also train on answers of another LLM (`EXTRA_RUNS`).
    """

    name: str
    base: str
    train_kinds: tuple[str, ...] = ("judge",)
    score_kinds: Mapping[str, str] = field(default_factory=lambda: {"known": "judge"})
    epochs: int = 2
    learning_rate: float = 1e-4
    batch: int = 32
    full: bool = False
    members: int = 4
    labels: str = "gold"
    rows: int | None = None
    teacher: tuple[str, ...] = ()
    gold_weight: float = 0.5
    uses_extra_runs: bool = False


ARBITER_COLUMNS = {"closed": "memory", "open": "documents"}
ALL_COLUMNS = {"known": "judge", "found": "search", **ARBITER_COLUMNS}
TEACHERS = ("judge-1.5b",)
SMALL = {
    "135m": {"base": "smollm", "epochs": 3, "learning_rate": 5e-5, "full": True},
    "mpnet": {"base": "mpnet", "epochs": 3, "learning_rate": 3e-5, "full": True},
    "minilm": {"base": "minilm", "epochs": 4, "learning_rate": 1e-4, "full": True},
}


def list_recipes() -> list[Recipe]:
    """Return all recipes, the most important first, since a time limit may cut off the last ones."""
    return [
        Recipe("judge-1.5b", "big", members=3 * FOLDS),
        Recipe("arbiter-1.5b", "big", ARBITER_KINDS, ARBITER_COLUMNS, learning_rate=5e-5),
        Recipe("arbiter-1.5b-again", "big", ARBITER_KINDS, ARBITER_COLUMNS, learning_rate=5e-5, members=FOLDS + 3),
        Recipe("search-1.5b", "big", ("search",), {"found": "search"}, members=2 * FOLDS),
        Recipe("judge-1.5b-1000", "big", rows=1000, batch=16, members=2),
        Recipe("judge-1.5b-300", "big", rows=300, batch=8, members=2),
        Recipe("agree-1.5b", "big", labels="agreement", members=2),
        Recipe("question-1.5b", "big", ("question",), {"known": "question"}, members=2),
        Recipe("judge-135m-lora", "smollm", epochs=3, learning_rate=3e-4),
        *(Recipe(f"judge-{name}", **options) for name, options in SMALL.items()),  # type: ignore[arg-type]
        Recipe("judge-frozen-mpnet", "frozen:mpnet"),
        Recipe("judge-frozen-minilm", "frozen:minilm"),
        Recipe("all-1.5b", "big", ALL_KINDS, ALL_COLUMNS, learning_rate=7e-5, batch=64),
        Recipe("agreed-1.5b", "big", labels="agreement_share", members=1),
        Recipe("implied-1.5b", "big", labels="implied", members=1),
        Recipe("said-1.5b", "big", labels="said", members=1),
        *(
            Recipe(f"all-{name}", train_kinds=ALL_KINDS, score_kinds=ALL_COLUMNS, **options)  # type: ignore[arg-type]
            for name, options in SMALL.items()
        ),
        *(Recipe(f"distilled-{name}", teacher=TEACHERS, **options) for name, options in SMALL.items()),  # type: ignore[arg-type]
        Recipe("unlabelled-mpnet", teacher=TEACHERS, gold_weight=0.0, **SMALL["mpnet"]),  # type: ignore[arg-type]
        Recipe("unlabelled-minilm", teacher=TEACHERS, gold_weight=0.0, **SMALL["minilm"]),  # type: ignore[arg-type]
        Recipe("more-1.5b", "big", uses_extra_runs=True, members=2),
        Recipe("more-minilm", uses_extra_runs=True, **SMALL["minilm"]),  # type: ignore[arg-type]
    ]


def load_extra_cases(runs: Path, excluded: Sequence[Case], limit: int | None = None) -> list[Case]:
    """Load answers of Qwen2.5-Coder-1.5B from its recorded train runs.

    Args:
        runs: Folder of the recorded runs.
        excluded: Cases whose questions are left out.
        limit: Rows to read from each run.
    """
    excluded_keys = {fingerprint_text_loosely(case.question.text) for case in excluded}
    cases = []
    for name in EXTRA_RUNS:
        questions = {question.id: question for question in load_questions(f"bench:{name}/train")}
        file = runs / "qwen2.5-coder-1.5b" / f"{name}-train" / "labels.jsonl.gz"
        with gzip.open(file, "rt", encoding="utf-8") as lines:
            rows = [json.loads(line) for line in lines][:limit]
        cases += [
            _make_extra_case(questions[row["id"]], row) for row in rows if row.get("open") and row["id"] in questions
        ]
    return [case for case in cases if fingerprint_text_loosely(case.question.text) not in excluded_keys]


def _make_extra_case(question: Question, row: Mapping[str, dict[str, object]]) -> Case:
    texts = {side: str(row[side]["text"]) for side in ("closed", "open")}
    return Case(question, texts, {side: bool(row[side].get("correct")) for side in texts})


def mean_scores(results: Sequence[dict[str, Any]], split: str) -> dict[str, dict[str, float]]:
    """Average the scores of the members of a judge.

    Args:
        results: Result of each member.
        split: "dev" or "test".

    Returns:
        Mean over the members that scored a row, by column and row id.
    """
    columns = list(results[0][split])
    ids = {key: None for result in results for key in result[split][columns[0]]}
    return {
        column: {
            key: float(np.mean([result[split][column][key] for result in results if key in result[split][column]]))
            for key in ids
        }
        for column in columns
    }
