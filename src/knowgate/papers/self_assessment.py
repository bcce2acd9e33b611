"""Does the LLM know what it knows? The KB-SAT table of DH-ICL: direct, with history, with calibration, free, and other
gates beside it.

Runs a model on a set whose records say what the right self-assessment is (`meta.known`, as `label --kb-sat` writes).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from knowgate.errors import BadInput
from knowgate.gates import load_gate
from knowgate.gates.dhicl import CalibrationSign, DhiclGate
from knowgate.gates.offline_scoring import get_gate_name
from knowgate.gates.prompt import PromptGate
from knowgate.gates.scoring import bind_gate, read_questions, score_questions
from knowgate.models.prompts.answers import AnswerPrompts
from knowgate.models.prompts.templates import detect_question_language, load_packaged_templates
from knowgate.stats.metrics import auroc
from knowgate.types import Model, Prompt, Question

YES, NO = re.compile(r"\byes\b|是", re.IGNORECASE), re.compile(r"\bno\b|否|不", re.IGNORECASE)
FREE_TOKENS, VERDICT_TOKENS = 48, 4
CALIBRATION_SIGNS: dict[str, CalibrationSign] = {
    "+ history": "none",
    "+ history, calibrated (paper)": "paper",
    "+ history, calibrated (code)": "code",
}


@dataclass(frozen=True)
class SelfAssessment:
    """One row of the table. auroc is None where needs are not graded or only one kind of question is there."""

    method: str
    words: str
    n: int
    accuracy: float
    predicted_known: int
    predicted_unknown: int
    auroc: float | None = None
    unreadable: int = 0


def assess_direct(model: Model, questions: Sequence[Question], words: str, prompts: AnswerPrompts) -> SelfAssessment:
    """The LLM is asked outright (section 2.1)."""
    gate = PromptGate(words)
    needs = score_questions(gate, questions, read_questions(model, [gate], questions, prompts))
    return _assessed("direct", words, questions, needs, gate.threshold)


def assess_gate(
    model: Model, questions: Sequence[Question], gate: str, prompts: AnswerPrompts, *, plug_in: bool = False
) -> SelfAssessment:
    """Any gate as a self-assessment, at its own threshold: Table 3 has UAR beside the LLM."""
    bound = bind_gate(load_gate(gate, plug_in=plug_in), model, prompts)
    needs = score_questions(bound, questions, read_questions(model, [bound], questions, prompts))
    return _assessed(get_gate_name(gate), "-", questions, needs, bound.threshold)


def assess_with_history(
    model: Model, questions: Sequence[Question], words: str, prompts: AnswerPrompts, *, history: str, k: int
) -> list[SelfAssessment]:
    """Similar logged questions come first (section 3): without calibration and with either sign, from one pass."""
    gate = DhiclGate(history, k=k, words=words)
    bound = bind_gate(gate, model, prompts)
    readings = read_questions(model, [bound], questions, prompts)
    needs = {
        name: score_questions(replace(gate, sign=sign), questions, readings) for name, sign in CALIBRATION_SIGNS.items()
    }
    return [_assessed(name, words, questions, found, gate.threshold) for name, found in needs.items()]


def assess_free_statements(model: Model, questions: Sequence[Question], judge: Model) -> SelfAssessment:
    """The LLM states its judgment in its own words; another reads it (section 2.3)."""
    template = load_packaged_templates("self")
    languages = [detect_question_language(question) for question in questions]
    asked = [Prompt(template.fill("free", lang, query=q.text)) for lang, q in zip(languages, questions, strict=True)]
    said = [row[0].text for row in model.generate(asked, max_tokens=FREE_TOKENS)]
    read = [Prompt(template.fill("verdict", lang, statement=s)) for lang, s in zip(languages, said, strict=True)]
    verdicts = [_read(row[0].text) for row in judge.generate(read, max_tokens=VERDICT_TOKENS)]
    readable = [(v, t) for v, t in zip(verdicts, read_known_labels(questions), strict=True) if v is not None]
    return SelfAssessment(
        "free statement",
        "-",
        len(questions),
        sum(verdict == truth for verdict, truth in readable) / max(1, len(readable)),
        sum(verdict for verdict, _ in readable),
        sum(not verdict for verdict, _ in readable),
        unreadable=len(questions) - len(readable),
    )


def read_known_labels(questions: Sequence[Question]) -> list[bool]:
    """What the right self-assessment is."""
    for question in questions:
        if not isinstance(question.meta.get("known"), bool):
            raise BadInput(f"question '{question.id}' has no meta.known; make the set with knowgate label --kb-sat.")
    return [bool(question.meta["known"]) for question in questions]


def _assessed(
    method: str, words: str, questions: Sequence[Question], needs: Sequence[float], threshold: float
) -> SelfAssessment:
    known = read_known_labels(questions)
    says_known = [need <= threshold for need in needs]
    right = sum(said == truth for said, truth in zip(says_known, known, strict=True))
    counts = (sum(says_known), len(questions) - sum(says_known))
    ranks = auroc(~np.array(known), np.array(needs))  # how often an unknown question has more need than a known one
    return SelfAssessment(method, words, len(questions), right / len(questions), *counts, ranks)


def _read(text: str) -> bool | None:
    yes, no = YES.search(text), NO.search(text)
    if yes and (not no or yes.start() < no.start()):
        return True
    return False if no else None
