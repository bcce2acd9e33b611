"""The trainings of `benchmarks/judge_train.py`: what each judge is built on, learns from and is asked.

Data are the recorded answers of Llama-3.1-8B-Instruct (`bench:gate_llama3_8b`): from memory, with one retrieval, with
IRCoT; "right" is what was recorded as `acc_contains`. Knows no weights and trains nothing.
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

LABELS = "labels"  # the job that lets the untrained big model speak
FOLDS = 5
KEYS = {
    "closed": ("pred_no_retrieval", "nor"),
    "open": ("pred_one_retrieval", "oner"),
    "ircot": ("pred_ircot", "ircot"),
}
OWN_RUNS = ("nq_ctx", "triviaqa_ctx", "squad_ctx", "hotpotqa_ctx")
ALL = ("judge", "judge_open", "search", "memory", "documents")
ARBITER = ("memory", "documents")


@dataclass(frozen=True)
class Case:
    """A question with its answers by the way they came about, and which of them are right."""

    question: Question
    texts: Mapping[str, str]
    right: Mapping[str, bool]

    @property
    def agrees(self) -> float:
        """Whether memory and documents say the same."""
        return float(self.same("open"))

    @property
    def agreed(self) -> float:
        """Share of the other recorded answers that say what memory says."""
        return (self.same("open") + self.same("ircot")) / 2

    def same(self, other: str) -> bool:
        return normalize(self.texts["closed"]) == normalize(self.texts[other])


def load_cases(split: str, limit: int | None = None) -> list[Case]:
    return [_case(question) for question in load_questions(f"bench:gate_llama3_8b/{split}", limit)]


def _case(question: Question) -> Case:
    texts = {side: str(question.meta[key]) for side, (key, _) in KEYS.items()}
    return Case(question, texts, {side: bool(question.meta["acc_contains"][key]) for side, (_, key) in KEYS.items()})


@dataclass(frozen=True)
class Kind:
    """One thing a judge can be asked. side: whose answer; others: it is left out where one of these says the same."""

    side: str
    text: Callable[[Question, Mapping[str, str]], str]
    pair: Callable[[Mapping[str, str]], str]  # the second text of an encoder's pair
    others: tuple[str, ...] = ()


KINDS = {
    "question": Kind("closed", lambda question, texts: build_correctness_prompt(question), lambda texts: ""),
    "judge": Kind(
        "closed",
        lambda question, texts: build_correctness_prompt(question, texts["closed"]),
        lambda texts: texts["closed"],
    ),
    "judge_open": Kind(
        "open",
        lambda question, texts: build_correctness_prompt(question, texts["open"]),
        lambda texts: texts["open"],
        ("closed",),
    ),
    "judge_ircot": Kind(
        "ircot",
        lambda question, texts: build_correctness_prompt(question, texts["ircot"]),
        lambda texts: texts["ircot"],
        ("closed", "open"),
    ),
    "search": Kind(
        "open",
        lambda question, texts: build_search_correctness_prompt(question, texts["closed"]),
        lambda texts: f"{texts['closed']}; what would documents say?",
    ),
    "memory": Kind(
        "closed",
        lambda question, texts: build_arbiter_prompt(question, texts["closed"], texts["open"], "memory"),
        lambda texts: f"from memory: {texts['closed']}; documents say: {texts['open']}",
    ),
    "documents": Kind(
        "open",
        lambda question, texts: build_arbiter_prompt(question, texts["closed"], texts["open"], "documents"),
        lambda texts: f"from documents: {texts['open']}; memory says: {texts['closed']}",
    ),
}


@dataclass(frozen=True)
class Recipe:
    """One judge. base: big, or what else is trained; members: trainings, each without the next of the folds.

    More members than folds: a row is scored by several that did not learn from it, as test rows are by all.

    asks: what is asked for each column of the predictions. labels: gold, or what stands in for it. rows: how many
    questions it learns from; None for all. teacher: recipes whose mean is learnt, mixed with gold by `gold`.
    """

    name: str
    base: str
    teaches: tuple[str, ...] = ("judge",)
    asks: Mapping[str, str] = field(default_factory=lambda: {"known": "judge"})
    epochs: int = 2
    rate: float = 1e-4
    batch: int = 32
    full: bool = False
    members: int = 4
    labels: str = "gold"
    rows: int | None = None
    teacher: tuple[str, ...] = ()
    gold: float = 0.5
    own_runs: bool = False


BOTH = {"closed": "memory", "open": "documents"}
EVERY = {"known": "judge", "found": "search", **BOTH}
TEACHERS = ("judge-1.5b",)
SMALL = {
    "135m": {"base": "smollm", "epochs": 3, "rate": 5e-5, "full": True},
    "mpnet": {"base": "mpnet", "epochs": 3, "rate": 3e-5, "full": True},
    "minilm": {"base": "minilm", "epochs": 4, "rate": 1e-4, "full": True},
}


def recipes() -> list[Recipe]:
    """In the order of their weight: what is cut off by time is at the end."""
    return [
        Recipe("judge-1.5b", "big", members=3 * FOLDS),
        Recipe("arbiter-1.5b", "big", ARBITER, BOTH, rate=5e-5),
        Recipe("arbiter-1.5b-again", "big", ARBITER, BOTH, rate=5e-5, members=FOLDS + 3),
        Recipe("search-1.5b", "big", ("search",), {"found": "search"}, members=2 * FOLDS),
        Recipe("judge-1.5b-1000", "big", rows=1000, batch=16, members=2),
        Recipe("judge-1.5b-300", "big", rows=300, batch=8, members=2),
        Recipe("agree-1.5b", "big", labels="agrees", members=2),
        Recipe("question-1.5b", "big", ("question",), {"known": "question"}, members=2),
        Recipe("judge-135m-lora", "smollm", epochs=3, rate=3e-4),
        *(Recipe(f"judge-{name}", **how) for name, how in SMALL.items()),  # type: ignore[arg-type]
        Recipe("judge-frozen-mpnet", "frozen:mpnet"),
        Recipe("judge-frozen-minilm", "frozen:minilm"),
        Recipe("all-1.5b", "big", ALL, EVERY, rate=7e-5, batch=64),
        Recipe("agreed-1.5b", "big", labels="agreed", members=1),
        Recipe("implied-1.5b", "big", labels="implied", members=1),
        Recipe("said-1.5b", "big", labels="said", members=1),
        *(Recipe(f"all-{name}", teaches=ALL, asks=EVERY, **how) for name, how in SMALL.items()),  # type: ignore[arg-type]
        *(Recipe(f"distilled-{name}", teacher=TEACHERS, **how) for name, how in SMALL.items()),  # type: ignore[arg-type]
        Recipe("unlabelled-mpnet", teacher=TEACHERS, gold=0.0, **SMALL["mpnet"]),  # type: ignore[arg-type]
        Recipe("unlabelled-minilm", teacher=TEACHERS, gold=0.0, **SMALL["minilm"]),  # type: ignore[arg-type]
        Recipe("more-1.5b", "big", own_runs=True, members=2),
        Recipe("more-minilm", own_runs=True, **SMALL["minilm"]),  # type: ignore[arg-type]
    ]


def own_cases(runs: Path, known: Sequence[Case], limit: int | None = None) -> list[Case]:
    """Answers of our own LLM to questions of its train runs, without those that are among the known ones."""
    keys = {fingerprint_text_loosely(case.question.text) for case in known}
    found = []
    for name in OWN_RUNS:
        asked = {question.id: question for question in load_questions(f"bench:{name}/train")}
        file = runs / "qwen2.5-coder-1.5b" / f"{name}-train" / "labels.jsonl.gz"
        with gzip.open(file, "rt", encoding="utf-8") as lines:
            rows = [json.loads(line) for line in lines][:limit]
        found += [_own(asked[row["id"]], row) for row in rows if row.get("open") and row["id"] in asked]
    return [case for case in found if fingerprint_text_loosely(case.question.text) not in keys]


def _own(question: Question, row: Mapping[str, dict[str, object]]) -> Case:
    texts = {side: str(row[side]["text"]) for side in ("closed", "open")}
    return Case(question, texts, {side: bool(row[side].get("correct")) for side in texts})


def mean_scores(found: Sequence[dict[str, Any]], split: str) -> dict[str, dict[str, float]]:
    """Column -> id -> mean over the trainings that scored it."""
    columns = list(found[0][split])
    ids = {key: None for one in found for key in one[split][columns[0]]}
    return {
        column: {
            key: float(np.mean([one[split][column][key] for one in found if key in one[split][column]])) for key in ids
        }
        for column in columns
    }
