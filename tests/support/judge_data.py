"""Examples with a planted rule, and a tiny model to learn it: questions with an x are known."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from knowgate.data.runs.rows import GradedAnswer, LabelRow
from knowgate.data.runs.table import LabelTable
from knowgate.data.splits import split_questions
from knowgate.gates import load_gate
from knowgate.gates.judges import causal_judge, encoder_judge
from knowgate.training.examples import Examples
from knowgate.training.judges.training_options import JudgeTrainingOptions
from knowgate.types import Completion, Passage, Question, Reading

LETTERS = "abcdefghijklmnop"
PROMPTS = "wording"
QUICK = JudgeTrainingOptions(epochs=5, batch=8, rate=5e-3, rank=8)
RESCORE = """
import json, sys
from knowgate.gates import load_gate
from knowgate.types import Completion, Question, Reading
gate = load_gate(sys.argv[1])
pairs = json.loads(sys.stdin.read())
questions = [Question(text) for text, _ in pairs]
print(json.dumps(gate.score(questions, [Reading(draft=Completion(draft)) for _, draft in pairs])))
"""


def planted(model: Path, n: int, *, by: str = "question", fingerprint: str = "f") -> Examples:
    """`by`: where the x stands that tells what is known: question or draft. Passages with an x make all known."""
    rng = np.random.default_rng(0)
    known = rng.random(n) < 0.5
    words = [" ".join(rng.choice(list(LETTERS), 5)) for _ in range(n)]
    marked = [_mark(word, bool(truth)) for word, truth in zip(words, known, strict=True)]
    questions = [Question(f"{i} {marked[i] if by == 'question' else words[i]}?") for i in range(n)]
    drafts = [marked[i] if by == "draft" else "no idea" for i in range(n)]
    rows = [_row(i, questions[i], bool(known[i]), drafts[i], i % 2 == 0) for i in range(n)]
    settings = {
        "model": f"hf:{model}",
        "model_fingerprint": fingerprint,
        "prompts_fingerprint": PROMPTS,
        "grader": "contains",
        "data_fingerprint": "d",
    }
    readings = [Reading(draft=Completion(draft)) for draft in drafts]
    split = split_questions([question.text for question in questions], 0)
    trial = LabelTable(rows, readings, settings, ["run"])
    return Examples(trial, ~known, "known", split)


def _mark(word: str, known: bool) -> str:
    return "x " + word[2:] if known else word


def _row(i: int, question: Question, known: bool, draft: str, helped: bool) -> LabelRow:
    """Mastery and certainty agree with `known`; passages with an x make a question known, others unknown."""
    closed = GradedAnswer(draft, correct=known, mastery=float(known), certainty=float(known))
    row = LabelRow(str(i), question.text, "en", closed=closed)
    side = GradedAnswer("s", correct=helped, mastery=float(helped), certainty=float(helped))
    return replace(row, open=side, passages=(Passage("p", "x x x" if helped else "a b c"),))


@contextlib.contextmanager
def quick() -> Iterator[None]:
    """A model this small is ten times faster on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def score_reloaded(folder: Path, examples: Examples, rows: list[int]) -> list[float]:
    """Load a gate from its files again, without cached judges, and score some rows."""
    causal_judge._load_unshared.cache_clear()
    encoder_judge.load_encoder_judge.cache_clear()
    return load_gate(str(folder)).score([examples.questions[i] for i in rows], [examples.readings[i] for i in rows])


def scored_elsewhere(folder: Path, examples: Examples, places: list[int]) -> list[float]:
    """The gate's needs, from a process that did not fit it."""
    drafts = [reading.draft.text if reading.draft else "" for reading in examples.readings]
    pairs = [(examples.questions[i].text, drafts[i]) for i in places]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    code = [sys.executable, "-c", RESCORE, str(folder)]
    done = subprocess.run(code, input=json.dumps(pairs), capture_output=True, text=True, check=True, env=environment)
    return [float(need) for need in json.loads(done.stdout)]


def plant_open_answers(rows, found):
    """Make the open-book answers of the marked rows right, and fill the questions of these rows with p."""
    return [
        replace(
            row,
            question=f"{row.id} p p p p?" if right else row.question,
            open=replace(row.open, correct=bool(right)),
            benefit=int(right) - int(row.closed.correct),
        )
        for row, right in zip(rows, found, strict=True)
    ]
