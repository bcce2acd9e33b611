"""Passages cut to one length in the LLM's tokens: a control for preferences that follow length alone.

Knows a tokenizer; not what the passages are wanted for.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from knowgate.data.preferences import DEFAULT_TOP, CandidatePassage, Preference, deduplicate_passages, select_passages
from knowgate.data.splits import split_questions
from knowgate.errors import BadInput, BadSetting, DeviceError, KnowgateError, NotOffered, ServerError
from knowgate.gates.hidden_state import ProbeGate
from knowgate.labels.grading import Grader, list_gold_answers
from knowgate.models.prompts.answers import AnswerPrompts, fit_passages, format_passages
from knowgate.types import (
    Model,
    Passage,
    Prompt,
    Question,
    Reading,
    Retriever,
    ScoringModel,
    SignalRequest,
    TokenizingModel,
)


def truncate_passages(model: Model, passages: Sequence[Passage], n_tokens: int) -> list[Passage]:
    """Each passage as it is shown, title first, cut to n tokens; those that are shorter are left out."""
    if not isinstance(model, TokenizingModel):
        raise NotOffered(f"{model.name} does not say how long a passage is in tokens; --cut needs hf, gguf or smollm.")
    cut = [(passage, truncate_text(model, format_passages([passage]), n_tokens)) for passage in passages]
    return [Passage(passage.id, text, score=passage.score) for passage, text in cut if text is not None]


def truncate_text(model: TokenizingModel, text: str, n_tokens: int) -> str | None:
    """The longest beginning of at most n tokens; None where the whole has fewer."""
    if len(model.tokenize(text)) < n_tokens:
        return None
    # bisection: with every character a beginning has as many tokens or more, but for a merge at its very end
    end = bisect_right(range(len(text)), n_tokens, key=lambda last: len(model.tokenize(text[: last + 1])))
    return text[:end]


ANSWER_TOKENS = 32


@dataclass(frozen=True)
class PassageEffects:
    """A question's value without a passage and with each candidate; correct: where answers were graded."""

    base: float
    values: list[float]
    correct: list[bool | None]


class EffectSource(Protocol):
    """Measures what each passage, alone, does to the LLM."""

    @property
    def name(self) -> str: ...
    @property
    def model(self) -> Model: ...
    @property
    def prompts(self) -> AnswerPrompts: ...

    def measure(self, questions: Sequence[Question], passages: Sequence[Sequence[Passage]]) -> list[PassageEffects]: ...


@dataclass(frozen=True)
class ConfidenceSource:
    """Inc(q, c) = Conf(q + c) - Conf(q), with the probe's uncalibrated network: Conf = 1 - its raw need.

    One pass over each prompt that stops at the probe's layer. Calibration is monotone and flattens where the LLM
    hardly ever knows, so shifts of the calibrated need would vanish.
    """

    model: Model
    gate: ProbeGate
    prompts: AnswerPrompts = field(default_factory=AnswerPrompts)
    name = "confidence"

    def __post_init__(self) -> None:
        target = self.gate.artifact.manifest.get("target", "known")
        if target != "known":
            raise BadSetting(
                f"confidence is that the LLM knows, but this probe was fitted on '{target}'. "
                "Fit one: knowgate fit probe --target known --balanced --labels RUN --out DIR"
            )
        if self.gate.artifact.options["position"] != "pre":
            raise BadSetting(
                "the confidence shift is read before the answer, but this probe reads after the draft. "
                "Fit one with --position pre."
            )

    def measure(self, questions: Sequence[Question], passages: Sequence[Sequence[Passage]]) -> list[PassageEffects]:
        asked = build_passage_prompts(self.prompts, questions, passages)
        want = SignalRequest(layers=self.gate.request.layers, resumable=False)
        readings: list[Reading] = self.model.read(asked, want)
        values = 1 - self.gate.raw([Question(prompt.text) for prompt in asked], readings)
        return _grouped([float(value) for value in values], [None] * len(asked), passages)


@dataclass(frozen=True)
class LikelihoodSource:
    """Mean log-probability of the first gold answer's tokens with the passage, less that without (as in REPLUG)."""

    model: Model
    prompts: AnswerPrompts = field(default_factory=AnswerPrompts)
    name = "likelihood"

    def measure(self, questions: Sequence[Question], passages: Sequence[Sequence[Passage]]) -> list[PassageEffects]:
        if not isinstance(self.model, ScoringModel):
            raise NotOffered(
                f"{self.model.name} cannot score a given answer; --source likelihood needs hf, gguf or smollm."
            )
        answers = [_first_gold(question) for question in questions]
        spoken = [answer for answer, candidates in zip(answers, passages, strict=True) for _ in candidates]
        values = self.model.answer_logprobs(
            build_passage_prompts(self.prompts, questions, passages), [*answers, *spoken]
        )
        return _grouped(values, [None] * len(values), passages)


@dataclass(frozen=True)
class BenefitSource:
    """+1 where the passage turns the greedy answer right, -1 where it turns it wrong, 0 where it changes neither."""

    model: Model
    grader: Grader
    prompts: AnswerPrompts = field(default_factory=AnswerPrompts)
    max_tokens: int = ANSWER_TOKENS
    name = "benefit"

    def measure(self, questions: Sequence[Question], passages: Sequence[Sequence[Passage]]) -> list[PassageEffects]:
        said = self.model.generate(build_passage_prompts(self.prompts, questions, passages), max_tokens=self.max_tokens)
        about = [
            *questions,
            *(question for question, candidates in zip(questions, passages, strict=True) for _ in candidates),
        ]
        grades = [grade.correct for grade in self.grader.grade([row[0].text for row in said], about)]
        if any(verdict is None for verdict in grades):
            raise BadInput("an answer could not be graded: --source benefit needs questions with gold answers.")
        return _grouped([float(bool(verdict)) for verdict in grades], grades, passages)


def build_passage_prompts(
    prompts: AnswerPrompts, questions: Sequence[Question], passages: Sequence[Sequence[Passage]]
) -> list[Prompt]:
    """The bare questions, then each question with each of its passages alone."""
    pairs = [
        (question, passage) for question, candidates in zip(questions, passages, strict=True) for passage in candidates
    ]
    bare = [prompts.closed(question) for question in questions]
    return [*bare, *(prompts.open(question, [passage]) for question, passage in pairs)]


def _grouped(
    values: Sequence[float], correct: Sequence[bool | None], passages: Sequence[Sequence[Passage]]
) -> list[PassageEffects]:
    """Values in the order of `single_prompts`, back to their questions."""
    bases, rest, verdicts = values[: len(passages)], iter(values[len(passages) :]), iter(correct[len(passages) :])
    return [
        PassageEffects(base, [next(rest) for _ in candidates], [next(verdicts) for _ in candidates])
        for base, candidates in zip(bases, passages, strict=True)
    ]


def _first_gold(question: Question) -> str:
    answers = list_gold_answers(question)
    if not answers:
        raise BadInput(f"question '{question.id}' has no gold answer; --source likelihood needs one.")
    return answers[0]


@dataclass(frozen=True)
class PreferenceLabeler:
    """Turns questions into preferences. A question that fails is a row with its error.

    retriever: where candidates come from; None for each question's own contexts. split: one part for all questions;
    None to divide them by a hash of the question. cut: tokens every candidate is cut to; None leaves them as they are.
    """

    source: EffectSource
    retriever: Retriever | None = None
    candidates: int = 20
    top: int = DEFAULT_TOP
    seed: int = 0
    split: str | None = None
    cut: int | None = None

    def prefer(self, questions: Sequence[Question]) -> list[Preference]:
        """Preferences of a batch; if it fails as a whole, its questions are tried one by one."""
        candidates = self._find(questions)
        try:
            return self._batch(questions, candidates)
        except KnowgateError as error:
            if isinstance(error, (ServerError, DeviceError, NotOffered)):
                raise
        return [self._alone(*pair) for pair in zip(questions, candidates, strict=True)]

    def _alone(self, question: Question, candidates: list[Passage]) -> Preference:
        try:
            return self._batch([question], [candidates])[0]
        except DeviceError:
            raise
        except KnowgateError as error:
            return self.failed(question, str(error))[0]

    def failed(self, question: Question, why: str) -> list[Preference]:
        """The row of a question that could not be measured."""
        split = self.split or assign_splits([question.text], self.seed)[0]
        return [Preference(question.id, question.text, split, answers=question.answers, error=why)]

    def _find(self, questions: Sequence[Question]) -> list[list[Passage]]:
        found = self._search(questions)
        return found if self.cut is None else [truncate_passages(self.source.model, some, self.cut) for some in found]

    def _search(self, questions: Sequence[Question]) -> list[list[Passage]]:
        if self.retriever is None:
            return [list(question.contexts[: self.candidates]) for question in questions]
        return self.retriever.search([question.text for question in questions], self.candidates)

    def _batch(self, questions: Sequence[Question], candidates: Sequence[Sequence[Passage]]) -> list[Preference]:
        once = [deduplicate_passages(passages) for passages in candidates]
        try:
            fitting, measured = once, self.source.measure(questions, once)
        except BadInput:  # most likely a passage beyond the window; checking all of them first would cost more
            fitting = [self._fitting(question, passages) for question, passages in zip(questions, once, strict=True)]
            measured = self.source.measure(questions, fitting)
        splits = [self.split] * len(questions) if self.split else assign_splits([q.text for q in questions], self.seed)
        return [
            self._row(question, split, kept, values, len(all_) - len(whole), _cut(whole, kept))
            for question, split, all_, whole, kept, values in zip(
                questions, splits, candidates, once, fitting, measured, strict=True
            )
        ]

    def _fitting(self, question: Question, passages: Sequence[Passage]) -> list[Passage]:
        source = self.source
        parts = [fit_passages(source.model, source.prompts, question, [one], ANSWER_TOKENS) for one in passages]
        return [passage for part in parts for passage in part]

    def _row(
        self, question: Question, split: str | None, passages: Sequence[Passage], effects: PassageEffects, *counts: int
    ) -> Preference:
        candidates = tuple(
            CandidatePassage(passage.id, passage.text, passage.title, passage.score, value - effects.base, verdict)
            for passage, value, verdict in zip(passages, effects.values, effects.correct, strict=True)
        )
        chosen = select_passages([candidate.shift for candidate in candidates], effects.correct, self.top)
        return Preference(
            id=question.id,
            question=question.text,
            split=split or "train",
            lang=question.lang,
            answers=question.answers,
            choices=question.choices,
            meta=question.meta,
            base=effects.base,
            candidates=candidates,
            positives=chosen.positives,
            negatives=chosen.negatives,
            duplicates=counts[0],
            cut=counts[1],
        )


def _cut(whole: Sequence[Passage], kept: Sequence[Passage]) -> int:
    """Passages that were shortened, or left out because not even a part of them fits."""
    texts = {passage.text for passage in kept}
    return sum(passage.text not in texts for passage in whole)


def assign_splits(texts: Sequence[str], seed: int) -> list[str]:
    """train, dev or test of each question, as gates are fitted: what a probe was tested on is tested on here."""
    split = split_questions(texts, seed)
    held = {**dict.fromkeys(split.dev.tolist(), "dev"), **dict.fromkeys(split.test.tolist(), "test")}
    return [held.get(place, "train") for place in range(len(texts))]
