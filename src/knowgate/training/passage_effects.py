"""Measure which passages help an LLM to answer and which mislead it (CBDR, section 3.2).

The result is called a preference: a question with passages that help the LLM (positives) and passages that hurt it or, if
answers were graded, lead to a wrong answer (negatives).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from knowgate.data.preferences import DEFAULT_TOP, CandidatePassage, Preference, deduplicate_passages, select_passages
from knowgate.data.splits import split_questions
from knowgate.errors import BadInput, BadSetting, DeviceError, KnowgateError, ServerError, UnsupportedSignal
from knowgate.gates.hidden_state import ProbeGate
from knowgate.labels.grading import Grader, list_gold_answers
from knowgate.models.prompts.answers import AnswerPrompts, fit_passages, format_passages
from knowgate.types import Model, Passage, Prompt, Question, Retriever, ScoringModel, SignalRequest, TokenizingModel

Item = TypeVar("Item")
ANSWER_TOKENS = 32
FIT_PROBE_HINT = "Fit a probe with target='known' and balanced=True (`knowgate fit probe`)."


@dataclass(frozen=True)
class PassageEffects:
    """How much each candidate passage of a question helps the LLM to answer.

    The effect source measures a value, such as the grade of the answer (1 or 0). A passage helps if it raises the value.

    Attributes:
        base: The value without any passage.
        values: The value with each candidate as the only passage.
        correct: Grade of the answer with each candidate; None if answers were not graded.
    """

    base: float
    values: list[float]
    correct: list[bool | None]


@dataclass(frozen=True)
class ConfidenceSource:
    """Measures how much a passage raises the LLM's confidence in knowing the answer.

    A probe (classifier of a hidden state) predicts the confidence. Its uncalibrated score is used, because calibrated
    scores hardly differ between passages.

    Attributes:
        model: The LLM.
        gate: The probe.
        prompts: Prompts with which the LLM answers.
    """

    model: Model
    gate: ProbeGate
    prompts: AnswerPrompts = field(default_factory=AnswerPrompts)
    name = "confidence"

    def __post_init__(self) -> None:
        """Raise BadSetting if the probe has another target or reads another hidden state."""
        target = self.gate.artifact.manifest.get("target", "known")
        if target != "known":
            raise BadSetting(
                f"source='confidence' needs a probe (classifier of hidden states) with target='known', not target='{target}'. "
                f"{FIT_PROBE_HINT}"
            )
        if self.gate.artifact.options["position"] != "pre":
            raise BadSetting(
                "source='confidence' needs a probe that reads the hidden state before the answer. This probe reads the state "
                "after it. Fit a probe with position='pre'."
            )

    def measure(self, questions: Sequence[Question], passages: Sequence[Sequence[Passage]]) -> list[PassageEffects]:
        """Measure the probe's confidence without passages and with each passage alone."""
        prompts = build_passage_prompts(self.prompts, questions, passages)
        readings = self.model.read(prompts, SignalRequest(layers=self.gate.request.layers, resumable=False))
        # The probe reads the hidden states alone, so any question will do.
        confidences = 1 - self.gate.raw([Question(prompt.text) for prompt in prompts], readings)
        return _group_by_question(confidences.tolist(), passages)


@dataclass(frozen=True)
class LikelihoodSource:
    """Measures how much a passage raises the log-probability of the gold answer (as in the paper REPLUG).

    Attributes:
        model: The LLM, which must be able to score a given answer.
        prompts: Prompts with which the LLM answers.
    """

    model: Model
    prompts: AnswerPrompts = field(default_factory=AnswerPrompts)
    name = "likelihood"

    def measure(self, questions: Sequence[Question], passages: Sequence[Sequence[Passage]]) -> list[PassageEffects]:
        """Measure the log-probability of the gold answer, without passages and with each passage alone."""
        if not isinstance(self.model, ScoringModel):
            raise UnsupportedSignal(
                f"the model {self.model.name} cannot score given answers, which source='likelihood' needs. Use an hf, gguf or "
                "smollm model."
            )
        prompts = build_passage_prompts(self.prompts, questions, passages)
        golds = [_get_first_gold(question) for question in questions]
        golds_of_prompts = _repeat_for_prompts(golds, passages)
        logprobs = self.model.answer_logprobs(prompts, golds_of_prompts)
        return _group_by_question(logprobs, passages)


@dataclass(frozen=True)
class BenefitSource:
    """Measures whether a passage makes a wrong answer right (+1) or the reverse (-1).

    Attributes:
        model: The LLM that answers.
        grader: Decides whether an answer is right.
        prompts: Prompts with which the LLM answers.
    """

    model: Model
    grader: Grader
    prompts: AnswerPrompts = field(default_factory=AnswerPrompts)
    name = "benefit"

    def measure(self, questions: Sequence[Question], passages: Sequence[Sequence[Passage]]) -> list[PassageEffects]:
        """Grade the answers without passages and with each passage alone (1 for right)."""
        prompts = build_passage_prompts(self.prompts, questions, passages)
        completions = self.model.generate(prompts, max_tokens=ANSWER_TOKENS)
        answers = [row[0].text for row in completions]
        graded = self.grader.grade(answers, _repeat_for_prompts(questions, passages))
        grades = [grade.correct for grade in graded]
        if None in grades:
            raise BadInput("an answer cannot be graded. Add a gold answer to every question for source='benefit'.")
        values = [float(bool(correct)) for correct in grades]  # 1 for right, 0 for wrong
        return _group_by_question(values, passages, grades)


# Measures how each passage, shown alone, changes the LLM's answer or confidence.
EffectSource = ConfidenceSource | LikelihoodSource | BenefitSource


def build_passage_prompts(
    prompts: AnswerPrompts, questions: Sequence[Question], passages: Sequence[Sequence[Passage]]
) -> list[Prompt]:
    """Build one prompt per question without passages, then one prompt per passage.

    Example: questions a and b, with passages [1, 2] and [3], give the prompts a, b, a+1, a+2, b+3.
    """
    built = [prompts.closed(question) for question in questions]
    for question, candidates in zip(questions, passages, strict=True):
        built += [prompts.open(question, [passage]) for passage in candidates]
    return built


def _repeat_for_prompts(items: Sequence[Item], passages: Sequence[Sequence[Passage]]) -> list[Item]:
    """Return the item of each prompt that `build_passage_prompts` makes from these passages.

    Example: items x and y, with passages [1, 2] and [3], give x, y, x, x, y. The first two belong to the prompts without
    passages.
    """
    pairs = zip(items, passages, strict=True)
    return [*items, *(item for item, candidates in pairs for _ in candidates)]


def _group_by_question(
    values: Sequence[float], passages: Sequence[Sequence[Passage]], grades: Sequence[bool | None] | None = None
) -> list[PassageEffects]:
    """Group the values of all prompts by question.

    Args:
        values: How well the LLM can answer each prompt. All prompts without passages come first, one per question. The
            prompts with one passage follow, question by question.
        passages: The passages of each question.
        grades: The grade of the answer to each prompt. Default: not graded.
    """
    correct = grades or [None] * len(values)
    effects: list[PassageEffects] = []
    n_questions = len(passages)
    start = n_questions  # position of the question's first prompt with a passage
    for base, candidates in zip(values[:n_questions], passages, strict=True):
        end = start + len(candidates)
        effects.append(PassageEffects(base, list(values[start:end]), list(correct[start:end])))
        start = end
    return effects


def _get_first_gold(question: Question) -> str:
    """Return the first gold (correct) answer of a question."""
    answers = list_gold_answers(question)
    if not answers:
        raise BadInput(f"question '{question.id}' has no gold answer for source='likelihood'. Add a correct answer.")
    return answers[0]


@dataclass(frozen=True)
class PreferenceLabeler:
    """Measures which passages of each question help or hurt the LLM.

    Attributes:
        source: Measures the effect of passages.
        retriever: Finds candidates; None for the contexts of each question.
        candidates: Candidate passages per question.
        top: Maximum number of positives, and of negatives, kept per question.
        seed: Seed of the split.
        split: "train", "dev" or "test" for all questions; None to divide them by a hash of the question.
        cut: Truncate every candidate to this many tokens (see `truncate_passages`); None to truncate none.
    """

    source: EffectSource
    retriever: Retriever | None = None
    candidates: int = 20
    top: int = DEFAULT_TOP
    seed: int = 0
    split: str | None = None
    cut: int | None = None

    def label(self, questions: Sequence[Question]) -> list[Preference]:
        """Measure the passages of a batch of questions, and return one row per question.

        After a failure, the questions are measured one by one.
        """
        candidates = self._find_candidates(questions)
        try:
            return self._label_batch(questions, candidates)
        except (ServerError, DeviceError, UnsupportedSignal):
            raise
        except KnowgateError as error:
            if len(questions) == 1:
                return self.make_failed_rows(questions[0], str(error))
        return [row for question in questions for row in self.label([question])]

    @property
    def identity(self) -> dict[str, str]:
        """Fingerprints of model, prompts, probe and index. They must match on all machines."""
        identity = {"model": self.source.model.fingerprint, "wording": self.source.prompts.fingerprint}
        if isinstance(self.source, ConfidenceSource):
            identity["probe"] = str(self.source.gate.artifact.manifest["checksum"])
        if self.retriever is not None:
            identity["index"] = self.retriever.fingerprint
        return identity

    def __call__(self, questions: Sequence[Question]) -> list[Preference]:
        return self.label(questions)

    def make_failed_rows(self, question: Question, reason: str) -> list[Preference]:
        """Return one row with the error of a question."""
        (split,) = self._get_splits([question])
        return [Preference(question.id, question.text, split, answers=question.answers, error=reason)]

    def _get_splits(self, questions: Sequence[Question]) -> list[str]:
        """Return "train", "dev" or "test" for each question.

        Gates use the same splits, so that no reranker is trained on questions that a gate is tested on.
        """
        if self.split:
            return [self.split] * len(questions)
        split = split_questions([question.text for question in questions], self.seed)
        names = ["train"] * len(questions)
        for part, indices in (("dev", split.dev), ("test", split.test)):
            for index in indices:
                names[index] = part
        return names

    def _find_candidates(self, questions: Sequence[Question]) -> list[list[Passage]]:
        """Find the candidate passages of each question, and truncate them to `cut` tokens."""
        if self.retriever is None:
            passages = [list(question.contexts[: self.candidates]) for question in questions]
        else:
            passages = self.retriever.search([question.text for question in questions], self.candidates)
        if self.cut is None:
            return passages
        return [truncate_passages(self.source.model, candidates, self.cut) for candidates in passages]

    def _label_batch(self, questions: Sequence[Question], candidates: Sequence[Sequence[Passage]]) -> list[Preference]:
        """Measure how much the distinct candidate passages of each question help, and make a row of each question."""
        distinct = [deduplicate_passages(passages) for passages in candidates]
        shown, effects = self._measure(questions, distinct)
        rows = []
        for i, split in enumerate(self._get_splits(questions)):
            row = self._make_row(questions[i], split, shown[i], effects[i])
            shown_texts = {passage.text for passage in shown[i]}
            n_changed = sum(passage.text not in shown_texts for passage in distinct[i])  # shortened or dropped
            rows.append(replace(row, duplicates=len(candidates[i]) - len(distinct[i]), cut=n_changed))
        return rows

    def _measure(
        self, questions: Sequence[Question], passages: list[list[Passage]]
    ) -> tuple[list[list[Passage]], list[PassageEffects]]:
        """Measure the effects of passages, and return the passages that were shown with their effects."""
        try:
            return passages, self.source.measure(questions, passages)
        except BadInput:  # Usually a passage is too long. Checking all of them first is slow.
            fitting = [self._fit(question, pool) for question, pool in zip(questions, passages, strict=True)]
            return fitting, self.source.measure(questions, fitting)

    def _fit(self, question: Question, passages: Sequence[Passage]) -> list[Passage]:
        """Shorten or drop passages that exceed the LLM's context window."""
        fitting: list[Passage] = []
        for passage in passages:  # each passage is shown alone
            fitting += fit_passages(self.source.model, self.source.prompts, question, [passage], ANSWER_TOKENS)
        return fitting

    def _make_row(
        self, question: Question, split: str, passages: Sequence[Passage], effects: PassageEffects
    ) -> Preference:
        """Make the preference row of a question from the measured effects.

        The shift of a passage says how much the LLM's answer improves with it.
        """
        shifts = [value - effects.base for value in effects.values]
        candidates = tuple(map(_make_candidate, passages, shifts, effects.correct))
        selection = select_passages(shifts, effects.correct, self.top)
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
        )


def _make_candidate(passage: Passage, shift: float, correct: bool | None) -> CandidatePassage:
    return CandidatePassage(passage.id, passage.text, passage.title, passage.score, shift, correct)


# --- passages of equal length ---------------------------------------------------------------------


def truncate_passages(model: Model, passages: Sequence[Passage], n_tokens: int) -> list[Passage]:
    """Truncate passages to `n_tokens` tokens, and drop shorter passages (option `cut`).

    If all passages have the same length, the LLM cannot prefer a passage for its length.
    """
    if not isinstance(model, TokenizingModel):
        raise UnsupportedSignal(
            f"`cut` truncates passages with a local tokenizer, but {model.name} has none. Use an hf, gguf or smollm model."
        )
    truncated = []
    for passage in passages:
        text = truncate_text(model, format_passages([passage]), n_tokens)
        if text is not None:
            truncated.append(Passage(passage.id, text, score=passage.score))
    return truncated


def truncate_text(model: TokenizingModel, text: str, n_tokens: int) -> str | None:
    """Return the longest start of a text with at most `n_tokens` tokens, or None if the text has fewer tokens."""
    if len(model.tokenize(text)) < n_tokens:
        return None

    def count_tokens(last: int) -> int:
        """Return the number of tokens of the text up to the character with this index."""
        return len(model.tokenize(text[: last + 1]))

    # Bisection works, because the number of tokens grows with the text (apart from merges of its last characters).
    return text[: bisect_right(range(len(text)), n_tokens, key=count_tokens)]
