"""Self-assessment on KB-SAT (DH-ICL, sections 2 and 3): can the LLM tell which questions it can answer?

`meta.known` of each question is the correct self-assessment. `knowgate label --kb-sat` writes such questions.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from knowgate.data.runs.rows import LabelRow
from knowgate.errors import BadInput
from knowgate.gates import load_gate
from knowgate.gates.dhicl import CalibrationSign, DhiclGate
from knowgate.gates.fitted_gate import get_gate_name
from knowgate.gates.prompt import PromptGate
from knowgate.gates.scoring import bind_gate, read_questions, score_questions
from knowgate.labels.grading import parse_verdict
from knowgate.models.prompts.answers import AnswerPrompts
from knowgate.models.prompts.templates import detect_question_language, load_packaged_templates
from knowgate.stats.metrics import auroc
from knowgate.types import Gate, Model, Prompt, Question

# An entity is capitalized words after the first word of a question, a year, or a title in Chinese quotation marks.
ENTITY_PATTERN = re.compile(
    r"(?<=\s)(?:[A-ZÀ-Þ][\w'’.-]*)(?:\s+(?:(?:of|the|de|von|van|and|&)\s*)?[A-ZÀ-Þ][\w'’.-]*)*|\b(?:1\d|20)\d\d\b"
    r"|《[^《》]+》|“[^“”]+”"
)
RARE_WORDS = (
    "sesquipedalian", "quomodocunquize", "floccinaucinihilipilification", "tergiversate", "borborygmus",
    "crepuscular", "defenestrate", "eleemosynary", "gobemouche", "hircine", "ineffable", "jentacular",
    "kakorrhaphiophobia", "limerence", "mumpsimus", "nudiustertian", "obelus", "petrichor", "quire",
    "rhytiphobia", "susurrus", "tittynope", "ultracrepidarian", "vagitus", "winklepicker", "xertz", "yarborough",
    "zoanthropy",
)  # fmt: skip
RARE_WORDS_ZH = ("饕餮", "魑魅", "龃龉", "踟蹰", "氤氲", "旖旎", "囹圄", "耄耋", "觊觎", "蹀躞", "逡巡", "龟裂")
SEPARATOR = " | "  # between the rare word and the question
NO_SWAPS_MESSAGE = "No name, year or title of a known question could be swapped. Label more questions."


@dataclass(frozen=True)
class SelfAssessmentSets:
    """KB-SAT and two harder sets: tests of whether an LLM can tell what it knows.

    `meta.known` of a record says whether the LLM knows the answer.

    Attributes:
        balanced: Questions of which the LLM knows half.
        swapped: Known questions in which a name, year or title was replaced by another one. The LLM does not know them.
        rare: Known questions with a rare word in front. The LLM still knows them.
    """

    balanced: list[dict[str, Any]]
    swapped: list[dict[str, Any]]
    rare: list[dict[str, Any]]


def build_kb_sat(rows: Iterable[LabelRow], seed: int = 0) -> SelfAssessmentSets:
    """Build KB-SAT from label rows: a test of whether an LLM can tell which questions it can answer.

    The LLM can answer half of the questions. Two harder sets change the questions that it can answer.

    Raises:
        BadInput: No closed-book answer is correct, or none is wrong.
    """
    graded = [row for row in rows if row.error is None and row.closed is not None and row.closed.correct is not None]
    right = [row for row in graded if _is_right(row)]
    wrong = [row for row in graded if not _is_right(row)]
    if not right or not wrong:
        raise BadInput(
            f"the recorded answers are {len(right)} right and {len(wrong)} wrong, but KB-SAT data needs both. Label more "
            "questions."
        )
    rng = random.Random(seed)
    size = min(len(right), len(wrong))
    chosen = rng.sample(right, size) + rng.sample(wrong, size)
    rng.shuffle(chosen)
    known = [row for row in chosen if _is_right(row)]
    balanced = [_make_record(row, row.question, _is_right(row)) for row in chosen]
    swapped = swap_entities(known, graded, rng)
    return SelfAssessmentSets(balanced, swapped, rare=_prepend_rare_words(known, rng))


def _prepend_rare_words(known: Sequence[LabelRow], rng: random.Random) -> list[dict[str, Any]]:
    """Put a random rare word in front of each known question."""
    records = []
    for row in known:
        word = rng.choice(RARE_WORDS_ZH if row.lang == "zh" else RARE_WORDS)
        records.append(_make_record(row, word + SEPARATOR + row.question, known=True, kind="rare"))
    return records


def swap_entities(known: Sequence[LabelRow], pool: Sequence[LabelRow], rng: random.Random) -> list[dict[str, Any]]:
    """Replace one entity of each known question by another of the same kind.

    Example: one year by another year.

    Args:
        known: Questions to change.
        pool: Questions that replacements are taken from.
        rng: Random number generator.
    """
    entities: dict[str, set[str]] = {"en": set(), "zh": set()}  # by language
    for row in pool:
        if row.lang in entities:
            entities[row.lang].update(_find_entities(row))
    records = []
    for row in known:
        own_entities = _find_entities(row)
        others = sorted(entities.get(row.lang, set()) - set(own_entities))  # sorted, so that the seed alone decides
        kinds = {_get_kind(entity) for entity in others}
        replaceable = [entity for entity in own_entities if _get_kind(entity) in kinds]
        if replaceable:  # another question has an entity of the same kind
            old = rng.choice(replaceable)
            new = rng.choice([entity for entity in others if _get_kind(entity) == _get_kind(old)])
            text = row.question.replace(old, new, 1)
            records.append(_make_record(row, text, known=False, kind="swapped"))
    return records


def _is_right(row: LabelRow) -> bool:
    """Return whether the closed-book answer is right."""
    return bool(row.closed and row.closed.correct)


def _find_entities(row: LabelRow) -> list[str]:
    """Return the entities in a question: capitalized words, years and quoted titles."""
    return [match.group() for match in ENTITY_PATTERN.finditer(row.question)]


def _get_kind(entity: str) -> tuple[bool, bool]:
    """Return whether an entity is a year, and whether it is a title; other entities are names."""
    return entity[0].isdigit(), entity[0] in "《“"  # names never start with a digit


def _make_record(row: LabelRow, text: str, known: bool, kind: str = "") -> dict[str, Any]:
    """Make the JSON record of a question.

    Args:
        row: Label row of the original question.
        text: The question, perhaps changed.
        known: Whether the LLM knows the answer.
        kind: 'swapped', 'rare' or '' for an unchanged question. Swapped questions have no gold answers, because the
            answers of the original question are wrong for them.
    """
    return {
        "id": f"{row.id}-{kind}" if kind else row.id,
        "question": text,
        "lang": row.lang,
        "answers": list(row.answers) if kind != "swapped" else [],
        "meta": {"known": known, "source": row.id, "kind": kind or "balanced"},
    }


NO_WORDS = "-"  # cell of a method that does not tell the LLM which words to answer with
FREE_TOKENS, VERDICT_TOKENS = 48, 4  # maximum length of a free statement, and of the judge's yes or no
# Row names by the sign of calibration. The formula in the DH-ICL paper and its published code differ in this sign.
CALIBRATION_SIGNS: dict[str, CalibrationSign] = {
    "+ history": "none",
    "+ history, calibrated (paper)": "paper",
    "+ history, calibrated (code)": "code",
}


@dataclass(frozen=True)
class SelfAssessment:
    """Results of one method of self-assessment, as a row of the KB-SAT table.

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
    """Measures several methods of asking an LLM whether it knows the answers.

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
        """Measure how well the LLM judges its knowledge if it is asked directly (DH-ICL, section 2.1)."""
        gate = PromptGate(words)
        return self._evaluate("direct", words, self._score(gate), gate.threshold)

    def assess_gate(self, spec: str) -> SelfAssessment:
        """Measure how well a gate tells known from unknown questions.

        A question for which the gate does not retrieve counts as judged known.
        """
        gate = bind_gate(load_gate(spec, plug_in=self.plug_in), self.model, self.prompts)
        return self._evaluate(get_gate_name(spec), NO_WORDS, self._score(gate), gate.threshold)

    def assess_with_history(self, words: str) -> list[SelfAssessment]:
        """Measure how well the LLM judges its knowledge if the prompt shows similar logged questions (DH-ICL, section 3).

        The same output of the LLM is scored with three calibrations.
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
        """Measure how well the LLM judges its knowledge in its own words (DH-ICL, section 2.3).

        A judge reads each statement of the LLM as yes or no.
        """
        verdicts = self._collect_verdicts(judge)  # None if unreadable
        n_known, n_unknown, n_unreadable = (verdicts.count(verdict) for verdict in (True, False, None))
        pairs = zip(verdicts, read_known_labels(self.questions), strict=True)
        n_right = sum(verdict == is_known for verdict, is_known in pairs)
        return SelfAssessment(
            "free statement",
            words=NO_WORDS,
            n=len(verdicts),
            accuracy=n_right / max(1, n_known + n_unknown),
            predicted_known=n_known,
            predicted_unknown=n_unknown,
            unreadable=n_unreadable,
        )

    def _collect_verdicts(self, judge: Model) -> list[bool | None]:
        """Return for each question whether the LLM says that it knows the answer; None if unreadable."""
        template = load_packaged_templates("self")
        languages = [detect_question_language(question) for question in self.questions]
        asked = zip(languages, self.questions, strict=True)
        prompts = [Prompt(template.fill("free", language, query=question.text)) for language, question in asked]
        statements = [samples[0].text for samples in self.model.generate(prompts, max_tokens=FREE_TOKENS)]
        stated = zip(languages, statements, strict=True)
        judge_prompts = [Prompt(template.fill("verdict", language, statement=text)) for language, text in stated]
        replies = judge.generate(judge_prompts, max_tokens=VERDICT_TOKENS)
        return [parse_verdict(samples[0].text) for samples in replies]

    def _score(self, gate: Gate) -> Sequence[float]:
        """Return for each question the need for retrieval, as the gate scores it (0 = the LLM knows, 1 = retrieve)."""
        readings = read_questions(self.model, [gate], self.questions, self.prompts)
        return score_questions(gate, self.questions, readings)

    def _evaluate(self, method: str, words: str, needs: Sequence[float], threshold: float) -> SelfAssessment:
        """Measure how well needs for retrieval tell known from unknown questions.

        Args:
            method: Name of the method, for the table.
            words: The two words that the LLM answers with, such as 'true/false', for the table.
            needs: Need of each question, from 0 (the LLM knows) to 1.
            threshold: A question with a need at or below this value is predicted to be known.
        """
        known = np.array(read_known_labels(self.questions))
        predicted_known = np.array(needs) <= threshold
        accuracy = float((predicted_known == known).mean())
        counts = {"predicted_known": int(predicted_known.sum()), "predicted_unknown": int((~predicted_known).sum())}
        return SelfAssessment(method, words, len(known), accuracy, auroc=auroc(~known, np.array(needs)), **counts)


def read_known_labels(questions: Sequence[Question]) -> list[bool]:
    """Return `meta.known` of each question: whether the LLM can answer it.

    Raises:
        BadInput: A question has no `meta.known`.
    """
    for question in questions:
        if not isinstance(question.meta.get("known"), bool):
            raise BadInput(
                f"question '{question.id}' has no field meta.known. Use questions that `knowgate label` wrote with kb_sat=FILE."
            )
    return [bool(question.meta["known"]) for question in questions]
