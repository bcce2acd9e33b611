"""Self-assessment on KB-SAT (DH-ICL, sections 2 and 3): can the LLM tell which questions it can answer?

`meta.known` of each question is the correct self-assessment. `knowgate label --kb-sat` writes such questions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

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
from knowgate.types import Gate, Model, Prompt, Question

YES, NO = re.compile(r"\byes\b|是", re.IGNORECASE), re.compile(r"\bno\b|否|不", re.IGNORECASE)
FREE_TOKENS, VERDICT_TOKENS = 48, 4  # maximum length of a free statement, and of the judge's yes or no
# Row names by the sign of calibration. The formula in the DH-ICL paper and its published code differ in this sign.
CALIBRATION_SIGNS: dict[str, CalibrationSign] = {
    "+ history": "none",
    "+ history, calibrated (paper)": "paper",
    "+ history, calibrated (code)": "code",
}


@dataclass(frozen=True)
class SelfAssessment:
    """Results of one method of self-assessment: one row of the KB-SAT table.

    Attributes:
        method: How the LLM was asked.
        words: The words the LLM answers with, as 'known/unknown'; '-' if the method uses none.
        n: Number of questions.
        accuracy: Share of questions judged correctly, of those with a readable judgment.
        predicted_known: Number of questions judged known.
        predicted_unknown: Number of questions judged unknown.
        auroc: Probability that an unknown question has a higher need score than a known one. None if the method gives
            no scores, or if all questions are known or all unknown.
        unreadable: Number of free statements in which no judgment was found.
    """

    method: str
    words: str
    n: int
    accuracy: float
    predicted_known: int
    predicted_unknown: int
    auroc: float | None = None
    unreadable: int = 0


@dataclass(frozen=True)
class SelfAssessor:
    """Measures several methods by which an LLM assesses whether it can answer questions.

    Attributes:
        model: The LLM.
        questions: KB-SAT questions, with `meta.known`.
        history: History log of earlier questions, for the methods that show some of them; None to leave these out.
        k: Number of logged questions shown to the LLM.
        plug_in: Allow gates that were fitted on another LLM.
        prompts: Prompts of answers, which gates read.
        notify: Called with a message before the LLM is asked.
    """

    model: Model
    questions: Sequence[Question]
    history: str | None = None
    k: int = 20
    plug_in: bool = False
    prompts: AnswerPrompts = field(default_factory=AnswerPrompts)
    notify: Callable[[str], None] = lambda message: None

    def assess_all(self, words: Sequence[str], judge: Model | None, gates: Sequence[str]) -> Iterator[SelfAssessment]:
        """Yield the results of each method as soon as they are measured.

        Args:
            words: Pairs of words for known and unknown, such as 'true/false'.
            judge: LLM that reads free statements; None to leave this method out.
            gates: Specs of gates to measure as well.
        """
        for pair in words:
            self.notify(f"asking {len(self.questions)} questions with the words {pair} ...")
            yield self.assess_direct(pair)
            if self.history:
                yield from self.assess_with_history(pair)
        if judge is not None:
            yield self.assess_free_statements(judge)
        for gate in gates:
            yield self.assess_gate(gate)

    def assess_direct(self, words: str) -> SelfAssessment:
        """Measure asking the LLM directly whether it knows the answer (section 2.1)."""
        gate = PromptGate(words)
        return self._evaluate("direct", words, self._score(gate), gate.threshold)

    def assess_gate(self, spec: str) -> SelfAssessment:
        """Measure a gate at its own threshold: skipping means known, retrieving means unknown (UAR in Table 3)."""
        gate = bind_gate(load_gate(spec, plug_in=self.plug_in), self.model, self.prompts)
        return self._evaluate(get_gate_name(spec), "-", self._score(gate), gate.threshold)

    def assess_with_history(self, words: str) -> list[SelfAssessment]:
        """Measure asking the LLM after showing it similar logged questions (section 3).

        Returns three results that share one forward pass: without calibration, and calibrated with either sign.
        """
        gate = DhiclGate(str(self.history), k=self.k, words=words)
        bound = bind_gate(gate, self.model, self.prompts)
        readings = read_questions(self.model, [bound], self.questions, self.prompts)
        assessments = []
        for method, sign in CALIBRATION_SIGNS.items():
            needs = score_questions(replace(gate, sign=sign), self.questions, readings)
            assessments.append(self._evaluate(method, words, needs, gate.threshold))
        return assessments

    def assess_free_statements(self, judge: Model) -> SelfAssessment:
        """Measure letting the LLM state freely whether it knows the answer; a judge reads yes or no (section 2.3).

        Statements without a readable judgment are counted in `unreadable` and left out of the accuracy.
        """
        template = load_packaged_templates("self")
        languages = [detect_question_language(question) for question in self.questions]
        prompts = [
            Prompt(template.fill("free", language, query=question.text))
            for language, question in zip(languages, self.questions, strict=True)
        ]
        statements = [samples[0].text for samples in self.model.generate(prompts, max_tokens=FREE_TOKENS)]
        judge_prompts = [
            Prompt(template.fill("verdict", language, statement=statement))
            for language, statement in zip(languages, statements, strict=True)
        ]
        replies = [samples[0].text for samples in judge.generate(judge_prompts, max_tokens=VERDICT_TOKENS)]
        known = read_known_labels(self.questions)
        parsed = zip([_parse_verdict(reply) for reply in replies], known, strict=True)
        verdicts = [(verdict, is_known) for verdict, is_known in parsed if verdict is not None]
        return SelfAssessment(
            "free statement",
            words="-",
            n=len(self.questions),
            accuracy=sum(verdict == is_known for verdict, is_known in verdicts) / max(1, len(verdicts)),
            predicted_known=sum(verdict for verdict, _ in verdicts),
            predicted_unknown=sum(not verdict for verdict, _ in verdicts),
            unreadable=len(self.questions) - len(verdicts),
        )

    def _score(self, gate: Gate) -> Sequence[float]:
        """Return the gate's need for retrieval (0 = the LLM knows, 1 = retrieve) of each question."""
        readings = read_questions(self.model, [gate], self.questions, self.prompts)
        return score_questions(gate, self.questions, readings)

    def _evaluate(self, method: str, words: str, needs: Sequence[float], threshold: float) -> SelfAssessment:
        """Compare needs with `meta.known`: a need at or below the threshold predicts a known question."""
        known = np.array(read_known_labels(self.questions))
        predicted_known = np.array([need <= threshold for need in needs])
        n, n_known = len(known), int(predicted_known.sum())
        accuracy = float((predicted_known == known).mean())
        return SelfAssessment(method, words, n, accuracy, n_known, n - n_known, auroc(~known, np.array(needs)))


def read_known_labels(questions: Sequence[Question]) -> list[bool]:
    """Return `meta.known` of each question: whether the LLM can answer it.

    Raises:
        BadInput: A question has no `meta.known`.
    """
    for question in questions:
        if not isinstance(question.meta.get("known"), bool):
            raise BadInput(
                f"the question '{question.id}' has no field meta.known, which says whether the LLM can answer it. Make "
                "such questions with `knowgate label` and kb_sat=FILE."
            )
    return [bool(question.meta["known"]) for question in questions]


def _parse_verdict(text: str) -> bool | None:
    """Return True if a reply says yes first, False if it says no first, None if it says neither."""
    yes, no = YES.search(text), NO.search(text)
    if yes and (not no or yes.start() < no.start()):
        return True
    return False if no else None
