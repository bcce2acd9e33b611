"""Measures what each passage does to an LLM, and derives which passages it prefers (CBDR, section 3.2)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from knowgate.data.preferences import DEFAULT_TOP, CandidatePassage, Preference, deduplicate_passages, select_passages
from knowgate.data.splits import split_questions
from knowgate.errors import BadInput, BadSetting, DeviceError, KnowgateError, ServerError, UnsupportedSignal
from knowgate.gates.hidden_state import ProbeGate
from knowgate.labels.grading import Grader, list_gold_answers
from knowgate.models.prompts.answers import AnswerPrompts, fit_passages, format_passages
from knowgate.types import (
    Model,
    Passage,
    Prompt,
    Question,
    Retriever,
    ScoringModel,
    SignalRequest,
    TokenizingModel,
)

ANSWER_TOKENS = 32
FIT_PROBE_HINT = "Fit one with target='known' and balanced=True: knowgate fit probe"


@dataclass(frozen=True)
class PassageEffects:
    """Effects of the candidate passages of one question.

    Attributes:
        base: Value of the question without a passage.
        values: Value with each candidate alone.
        correct: Grade of the answer with each candidate; None if answers were not graded.
    """

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

    def measure(self, questions: Sequence[Question], passages: Sequence[Sequence[Passage]]) -> list[PassageEffects]:
        """Measure the passages of each question."""
        ...


@dataclass(frozen=True)
class ConfidenceSource:
    """Measures by how much a passage raises the LLM's confidence, read by a fitted probe.

    Confidence is one minus the raw need of the probe, from one pass that stops at its layer. The calibrated need is not
    used: it is flat where the LLM hardly ever knows, so shifts would vanish.
    """

    model: Model
    gate: ProbeGate
    prompts: AnswerPrompts = field(default_factory=AnswerPrompts)
    name = "confidence"

    def __post_init__(self) -> None:
        target = self.gate.artifact.manifest.get("target", "known")
        if target != "known":
            raise BadSetting(
                f"the probe was fitted on '{target}', but confidence needs target='known'. {FIT_PROBE_HINT}"
            )
        if self.gate.artifact.options["position"] != "pre":
            raise BadSetting(
                "the probe reads after the draft, but confidence is measured before the answer. Fit one with "
                "position='pre'."
            )

    def measure(self, questions: Sequence[Question], passages: Sequence[Sequence[Passage]]) -> list[PassageEffects]:
        """Measure the passages of each question."""
        prompts = build_passage_prompts(self.prompts, questions, passages)
        readings = self.model.read(prompts, SignalRequest(layers=self.gate.request.layers, resumable=False))
        values = 1 - self.gate.raw([Question(prompt.text) for prompt in prompts], readings)
        return _group_by_question([float(value) for value in values], [None] * len(prompts), passages)


@dataclass(frozen=True)
class LikelihoodSource:
    """Measures by how much a passage raises the log-probability of the first gold answer, as in REPLUG."""

    model: Model
    prompts: AnswerPrompts = field(default_factory=AnswerPrompts)
    name = "likelihood"

    def measure(self, questions: Sequence[Question], passages: Sequence[Sequence[Passage]]) -> list[PassageEffects]:
        """Measure the passages of each question."""
        if not isinstance(self.model, ScoringModel):
            raise UnsupportedSignal(
                f"{self.model.name} cannot score a given answer; source='likelihood' needs hf, gguf or smollm."
            )
        answers = [_get_first_gold(question) for question in questions]
        repeated = [answer for answer, candidates in zip(answers, passages, strict=True) for _ in candidates]
        prompts = build_passage_prompts(self.prompts, questions, passages)
        values = self.model.answer_logprobs(prompts, [*answers, *repeated])
        return _group_by_question(values, [None] * len(values), passages)


@dataclass(frozen=True)
class BenefitSource:
    """Measures whether a passage turns the greedy answer right (+1) or wrong (-1)."""

    model: Model
    grader: Grader
    prompts: AnswerPrompts = field(default_factory=AnswerPrompts)
    max_tokens: int = ANSWER_TOKENS
    name = "benefit"

    def measure(self, questions: Sequence[Question], passages: Sequence[Sequence[Passage]]) -> list[PassageEffects]:
        """Measure the passages of each question."""
        prompts = build_passage_prompts(self.prompts, questions, passages)
        completions = self.model.generate(prompts, max_tokens=self.max_tokens)
        pairs = zip(questions, passages, strict=True)
        repeated = [*questions, *(question for question, candidates in pairs for _ in candidates)]
        grades = [grade.correct for grade in self.grader.grade([row[0].text for row in completions], repeated)]
        if any(correct is None for correct in grades):
            raise BadInput("an answer could not be graded: source='benefit' needs questions with gold answers.")
        return _group_by_question([float(bool(correct)) for correct in grades], grades, passages)


def build_passage_prompts(
    prompts: AnswerPrompts, questions: Sequence[Question], passages: Sequence[Sequence[Passage]]
) -> list[Prompt]:
    """Build a prompt for each bare question, then one for each question with each of its passages alone."""
    closed = [prompts.closed(question) for question in questions]
    pairs = zip(questions, passages, strict=True)
    return [*closed, *(prompts.open(question, [passage]) for question, candidates in pairs for passage in candidates)]


def _group_by_question(
    values: Sequence[float], correct: Sequence[bool | None], passages: Sequence[Sequence[Passage]]
) -> list[PassageEffects]:
    """Group values in the order of `build_passage_prompts` by question."""
    n = len(passages)
    rest, verdicts = iter(values[n:]), iter(correct[n:])
    return [
        PassageEffects(base, [next(rest) for _ in candidates], [next(verdicts) for _ in candidates])
        for base, candidates in zip(values[:n], passages, strict=True)
    ]


def _get_first_gold(question: Question) -> str:
    answers = list_gold_answers(question)
    if not answers:
        raise BadInput(f"question '{question.id}' has no gold answer; source='likelihood' needs one.")
    return answers[0]


@dataclass(frozen=True)
class PreferenceLabeler:
    """Turns questions into preferences; a question that fails becomes a row with its error.

    Attributes:
        source: Measures the effect of passages.
        retriever: Finds candidates; None for the contexts of each question.
        candidates: Candidate passages per question.
        top: Positives and negatives kept per question.
        seed: Seed of the split.
        split: Split of all questions; None to split them by a hash of the question.
        cut: Tokens that every candidate is truncated to; None to leave candidates as they are.
    """

    source: EffectSource
    retriever: Retriever | None = None
    candidates: int = 20
    top: int = DEFAULT_TOP
    seed: int = 0
    split: str | None = None
    cut: int | None = None

    def label(self, questions: Sequence[Question]) -> list[Preference]:
        """Label a batch; if it fails as a whole, label its questions one by one."""
        candidates = self._find_candidates(questions)
        try:
            return self._label_batch(questions, candidates)
        except (ServerError, DeviceError, UnsupportedSignal):
            raise
        except KnowgateError:
            return [self._label_one(*pair) for pair in zip(questions, candidates, strict=True)]

    def _label_one(self, question: Question, candidates: list[Passage]) -> Preference:
        try:
            return self._label_batch([question], [candidates])[0]
        except DeviceError:
            raise
        except KnowgateError as error:
            return self.make_failed_rows(question, str(error))[0]

    def make_failed_rows(self, question: Question, reason: str) -> list[Preference]:
        """Return the row of a question that could not be measured."""
        (split,) = self._get_splits([question])
        return [Preference(question.id, question.text, split, answers=question.answers, error=reason)]

    def _get_splits(self, questions: Sequence[Question]) -> list[str]:
        if self.split:
            return [self.split] * len(questions)
        return assign_splits([question.text for question in questions], self.seed)

    def _find_candidates(self, questions: Sequence[Question]) -> list[list[Passage]]:
        """Find the candidate passages of each question, and truncate them if required."""
        if self.retriever is None:
            passages = [list(question.contexts[: self.candidates]) for question in questions]
        else:
            passages = self.retriever.search([question.text for question in questions], self.candidates)
        if self.cut is None:
            return passages
        return [truncate_passages(self.source.model, candidates, self.cut) for candidates in passages]

    def _label_batch(self, questions: Sequence[Question], candidates: Sequence[Sequence[Passage]]) -> list[Preference]:
        """Measure a batch; passages beyond the context window are shortened and measured again."""
        distinct = [deduplicate_passages(passages) for passages in candidates]
        try:
            fitting, effects = distinct, self.source.measure(questions, distinct)
        except BadInput:  # usually a passage beyond the context window; checking all of them first would be slow
            fitting = [self._fit(question, passages) for question, passages in zip(questions, distinct, strict=True)]
            effects = self.source.measure(questions, fitting)
        rows = zip(questions, self._get_splits(questions), candidates, distinct, fitting, effects, strict=True)
        return [
            self._make_row(question, split, shown, effect, len(found) - len(unique), _count_changed(unique, shown))
            for question, split, found, unique, shown, effect in rows
        ]

    def _fit(self, question: Question, passages: Sequence[Passage]) -> list[Passage]:
        """Shorten or drop passages that exceed the context window."""
        model, prompts = self.source.model, self.source.prompts
        fitted = [fit_passages(model, prompts, question, [passage], ANSWER_TOKENS) for passage in passages]
        return [passage for group in fitted for passage in group]

    def _make_row(
        self,
        question: Question,
        split: str,
        passages: Sequence[Passage],
        effects: PassageEffects,
        n_duplicates: int,
        n_truncated: int,
    ) -> Preference:
        """Make the preference row of a question from the measured effects."""
        candidates = tuple(
            CandidatePassage(passage.id, passage.text, passage.title, passage.score, value - effects.base, correct)
            for passage, value, correct in zip(passages, effects.values, effects.correct, strict=True)
        )
        selection = select_passages([candidate.shift for candidate in candidates], effects.correct, self.top)
        return Preference(
            id=question.id,
            question=question.text,
            split=split,
            lang=question.lang,
            answers=question.answers,
            choices=question.choices,
            meta=question.meta,
            base=effects.base,
            candidates=candidates,
            positives=selection.positives,
            negatives=selection.negatives,
            duplicates=n_duplicates,
            cut=n_truncated,
        )


def _count_changed(passages: Sequence[Passage], shown: Sequence[Passage]) -> int:
    """Count the passages that were shortened or dropped."""
    texts = {passage.text for passage in shown}
    return sum(passage.text not in texts for passage in passages)


def assign_splits(texts: Sequence[str], seed: int) -> list[str]:
    """Return train, dev or test for each question, in agreement with the splits that gates are fitted on."""
    split = split_questions(texts, seed)
    names = {**dict.fromkeys(split.dev.tolist(), "dev"), **dict.fromkeys(split.test.tolist(), "test")}
    return [names.get(number, "train") for number in range(len(texts))]


# --- passages of equal length ---------------------------------------------------------------------


def truncate_passages(model: Model, passages: Sequence[Passage], n_tokens: int) -> list[Passage]:
    """Truncate passages, with their titles, to the same number of tokens; shorter ones are dropped.

    This is a control for preferences that only follow the length of a passage.
    """
    if not isinstance(model, TokenizingModel):
        raise UnsupportedSignal(f"{model.name} has no tokenizer here; `cut` needs hf, gguf or smollm.")
    truncated = [(passage, truncate_text(model, format_passages([passage]), n_tokens)) for passage in passages]
    return [Passage(passage.id, text, score=passage.score) for passage, text in truncated if text is not None]


def truncate_text(model: TokenizingModel, text: str, n_tokens: int) -> str | None:
    """Return the longest prefix of at most `n_tokens` tokens; None if the text is shorter than that."""
    if len(model.tokenize(text)) < n_tokens:
        return None
    # A longer prefix has at least as many tokens, except for a merge at its very end, so bisection works.
    end = bisect_right(range(len(text)), n_tokens, key=lambda last: len(model.tokenize(text[: last + 1])))
    return text[:end]
