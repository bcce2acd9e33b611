"""Labels for a batch of questions: answer closed- and open-book, sample, grade, compare.

Knows models, graders and retrievers by their protocols; not where rows are kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np

from knowgate.data.runs.rows import GradedAnswer, LabelRow, build_ungraded_answer
from knowgate.data.signals.confidence import (
    ASSESSMENT_LABELS,
    SELF_ASSESSMENT,
    has_distinct_logits,
    self_assessment_logit,
)
from knowgate.data.signals.samples import (
    SEAKR_END,
    SEAKR_SIZE,
    canonical_answer,
    certainty,
    log_determinant,
    log_mean_square,
    mastery,
    retrieval_benefit,
    retrieval_effect,
)
from knowgate.errors import BadSetting, DeviceError, KnowgateError, NotOffered, OutOfMemory, ServerError
from knowgate.labels.grading import Grade, Grader, StringGrader, list_gold_answers
from knowgate.labels.mask import mask_passages
from knowgate.labels.options import DEFAULT_PASSAGES, LabelPlan
from knowgate.labels.passages import (
    Evidence,
    IterativeAnswer,
    IterativeAnswerer,
    PassageFinder,
    PassageSearchResults,
    count_truncated,
)
from knowgate.models.prompts.answers import AnswerPrompts, fit_passages_batch
from knowgate.models.prompts.judges import build_self_assessment_prompt
from knowgate.types import (
    Completion,
    Model,
    Prompt,
    Question,
    Reading,
    Reranker,
    Result,
    Retriever,
    Signal,
    SignalRequest,
    Vector,
)

SYSTEM_ERRORS = (ServerError, OutOfMemory)  # what is not the questions' fault where all of them fail


@dataclass(frozen=True)
class LabeledBatch:
    """Rows and the hidden states of those that have them: `vectors[name][i]` belongs to the i-th row with states."""

    rows: list[LabelRow]
    vectors: Mapping[str, Vector] = field(default_factory=dict)


BatchFinisher = Callable[[], LabeledBatch]
PassageSearch = Callable[[Sequence[Question]], PassageSearchResults]


@dataclass(frozen=True)
class Labeler:
    """Turns questions into label rows. A question that fails is a row with its error."""

    model: Model
    grader: Grader
    plan: LabelPlan = field(default_factory=LabelPlan)
    prompts: AnswerPrompts = field(default_factory=AnswerPrompts)
    retriever: Retriever | None = None
    reranker: Reranker | None = None
    look_up: PassageSearch | None = None  # in place of the library's

    def __post_init__(self) -> None:
        missing = {Signal.HIDDEN, Signal.SAMPLES} - self.model.offers if self.plan.seakr else set()
        if self.plan.iterative and (self.retriever is None or not self.plan.open_book):
            raise BadSetting("--iterative looks passages up again and again: give --index DIR, and no --closed-book.")
        if missing:
            raise NotOffered(f"--seakr needs {', '.join(sorted(missing))}, which {self.model.name} does not give.")

    @property
    def library(self) -> PassageFinder:
        return PassageFinder(self.plan, self.retriever, self.reranker)

    @property
    def seakr_layer(self) -> int | None:
        """The middle layer, where SeaKR reads the end of an answer."""
        return self.model.depth // 2 if self.plan.seakr else None

    def label(self, questions: Sequence[Question]) -> LabeledBatch:
        """Label a batch; if it fails as a whole, its questions are tried one by one."""
        return self.begin(questions, apart=False)()

    def begin(self, questions: Sequence[Question], *, apart: bool = True) -> BatchFinisher:
        """`label` as far as it needs the LLM; the rest is done by whoever calls what this gives, in any thread."""
        try:
            finish = self._answer(questions)
            return finish if apart and self._can_finish_apart else _kept(finish())
        except DeviceError:  # every other question would fail, too
            raise
        except KnowgateError as error:
            if len(questions) == 1:
                if isinstance(error, ServerError):
                    raise
                return _kept(self.failed(questions[0], str(error)))
        return _kept(self._one_by_one(questions))

    @property
    def _can_finish_apart(self) -> bool:
        """Whether nothing is left for an LLM once both ways are answered; a judge may be the very one that answers."""
        return isinstance(self.grader, StringGrader) and not self.plan.mask and not self.plan.iterative

    def _one_by_one(self, questions: Sequence[Question]) -> LabeledBatch:
        parts, failures = [], []
        for question in questions:
            try:
                parts.append(self._answer([question])())
            except DeviceError:
                raise
            except KnowgateError as error:
                failures.append(error)
                parts.append(self.failed(question, str(error)))
        if len(failures) == len(questions) and all(isinstance(error, SYSTEM_ERRORS) for error in failures):
            raise failures[0]  # the server or the GPU is at fault, not the questions
        return join_batches(parts)

    def failed(self, question: Question, why: str) -> LabeledBatch:
        """The row of a question that could not be labelled."""
        return LabeledBatch([replace(self._blank(question), error=why)])

    def _blank(self, question: Question) -> LabelRow:
        return LabelRow(
            id=question.id,
            question=question.text,
            lang=self.prompts.language(question),
            answers=tuple(list_gold_answers(question)),
            choices=question.choices,
            meta=question.meta,
            grader="choice" if question.choices else self.grader.name,
        )

    # --- one batch --------------------------------------------------------------------------------

    def _answer(self, questions: Sequence[Question]) -> BatchFinisher:
        """Looking up and grading go on in a thread of their own while the LLM answers."""
        start = time.perf_counter()
        with ThreadPoolExecutor(1, "knowgate-label") as beside:
            looking = beside.submit(self.look_up or self.library.look_up, questions)
            closed = self._read([self.prompts.closed(question) for question in questions], self.plan.samples, True)
            grading = self._beside(beside, lambda: self._closed(questions, closed))
            told = self._signals(questions, closed)
            found, prompts = self._evidence(questions, looking.result())
            opened = self._read_open(prompts)

        def finish() -> LabeledBatch:
            rows = [replace(row, signals=signals) for row, signals in zip(grading.result(), told, strict=True)]
            rows = self._open(rows, questions, found, opened)
            share = (time.perf_counter() - start) / len(questions)
            return LabeledBatch([replace(_compared(row), seconds=share) for row in rows], _vectors(closed))

        return finish

    def _beside(self, thread: Executor, work: Callable[[], Result]) -> Future[Result]:
        """Grading by strings goes into the other thread; a judge may be the very LLM that is answering."""
        if isinstance(self.grader, StringGrader):
            return thread.submit(work)
        done: Future[Result] = Future()
        done.set_result(work())
        return done

    def _closed(self, questions: Sequence[Question], closed: Sequence[Reading]) -> list[LabelRow]:
        return self._with_sides([self._blank(question) for question in questions], questions, "closed", closed)

    def _read(self, prompts: Sequence[Prompt], samples: int, states: bool = False) -> list[Reading]:
        plan = self.plan
        seakr = plan.seakr if states else 0
        want = SignalRequest(
            draft_tokens=plan.max_tokens,
            layers=plan.layers if states else (),
            after_draft=states,
            samples=max(samples, seakr),
            sample_tokens=plan.max_tokens,
            sampling=plan.sampling,
            seed=plan.seed,
            sample_layer=self.seakr_layer if seakr else None,
            sample_end=bool(seakr),
            resumable=False,
        )
        readings = self.model.read(prompts, want)
        return [replace(reading, resume=None, samples=reading.samples[:samples]) for reading in readings]

    def _signals(self, questions: Sequence[Question], closed: Sequence[Reading]) -> list[dict[str, float]]:
        """What the LLM says about itself, and how far apart its samples end."""
        return [said | self._seakr(reading) for said, reading in zip(self._said(questions), closed, strict=True)]

    def _seakr(self, reading: Reading) -> dict[str, float]:
        if reading.sample_states is None:
            return {}
        states = reading.sample_states[: self.plan.seakr]
        return {SEAKR_END: log_determinant(states), SEAKR_SIZE: log_mean_square(states)}

    def _said(self, questions: Sequence[Question]) -> list[dict[str, float]]:
        """Self-assessment as a difference of logits (positive: it can answer).

        None where the LLM would say neither word: that is no reason to lose its answers.
        """
        if Signal.LABELS not in self.model.offers:
            return [{} for _ in questions]
        asked = [build_self_assessment_prompt(question, *ASSESSMENT_LABELS) for question in questions]
        try:
            logits = self.model.label_logits(asked, ASSESSMENT_LABELS)
        except NotOffered:
            return [{} for _ in questions]
        return [{SELF_ASSESSMENT: self_assessment_logit(rows)} if has_distinct_logits(rows) else {} for rows in logits]

    # --- open book --------------------------------------------------------------------------------

    def _evidence(
        self, questions: Sequence[Question], looked_up: PassageSearchResults
    ) -> tuple[list[Evidence], list[Prompt]]:
        """The passages that fit the window, and the prompts of the questions that have any."""
        found = self.library.rank(questions, looked_up.passages)
        fitting = fit_passages_batch(self.model, self.prompts, questions, found, self.plan.max_tokens)
        given = [
            Evidence(kept, count_truncated(passages, kept), frequency)
            for kept, passages, frequency in zip(fitting, found, looked_up.frequencies, strict=True)
        ]
        pairs = zip(questions, given, strict=True)
        return given, [self.prompts.open(question, one.passages) for question, one in pairs if one.passages]

    def _read_open(self, prompts: Sequence[Prompt]) -> list[Reading]:
        samples = self.plan.samples if self.plan.open_samples is None else self.plan.open_samples
        return self._read(prompts, samples) if prompts else []

    def _open(
        self,
        rows: list[LabelRow],
        questions: Sequence[Question],
        found: Sequence[Evidence],
        opened: Sequence[Reading],
    ) -> list[LabelRow]:
        rows = [
            replace(row, passages=one.passages, cut=one.cut, answer_frequency=one.frequency)
            for row, one in zip(rows, found, strict=True)
        ]
        having = [place for place, row in enumerate(rows) if row.passages]
        if not having:
            return rows
        asked = [questions[place] for place in having]
        some = self._with_sides([rows[place] for place in having], asked, "open", opened)
        if self.plan.mask:
            some = self._with_mask(some, asked)
        if self.plan.iterative:
            some = self._with_rounds(some, asked)
        for place, row in zip(having, some, strict=True):
            rows[place] = row
        return rows

    def _with_mask(self, rows: list[LabelRow], questions: Sequence[Question]) -> list[LabelRow]:
        masked = [mask_passages(row.passages, row.answers) for row in rows]
        prompts = [self.prompts.open(question, kept) for question, kept in zip(questions, masked, strict=True)]
        if self.plan.mask_samples:
            return self._with_sides(rows, questions, "mask", self._read(prompts, self.plan.mask_samples))
        done = self.model.generate(prompts, max_tokens=self.plan.max_tokens)
        readings = [Reading(draft=completions[0]) for completions in done]
        return self._with_sides(rows, questions, "mask", readings)

    def _with_rounds(self, rows: list[LabelRow], questions: Sequence[Question]) -> list[LabelRow]:
        """The answers after several rounds, going on from those of one."""
        rounds = [
            IterativeAnswer(question, row.passages, Completion(row.open.text if row.open else ""))
            for row, question in zip(rows, questions, strict=True)
        ]
        tokens, k = self.plan.max_tokens, self.plan.k or DEFAULT_PASSAGES
        IterativeAnswerer(self.model, self.prompts, self.library.search, k, tokens).go_on(rounds)
        rows = self._with_sides(rows, questions, "iterative", [Reading(draft=one.answer) for one in rounds])
        return [replace(row, rounds=one.taken) for row, one in zip(rows, rounds, strict=True)]

    # --- grades -----------------------------------------------------------------------------------

    def _with_sides(
        self, rows: list[LabelRow], questions: Sequence[Question], name: str, readings: Sequence[Reading]
    ) -> list[LabelRow]:
        sides = [build_ungraded_answer(reading.draft or Completion(""), reading.samples) for reading in readings]
        flat = [(text, i) for i, side in enumerate(sides) for text in (side.text, *side.samples)]
        grades = self.grader.grade([text for text, _ in flat], [questions[i] for _, i in flat])
        shares: list[list[Grade]] = [[] for _ in sides]
        for (_, i), grade in zip(flat, grades, strict=True):
            shares[i].append(grade)
        return [
            replace(
                row,
                **{name: add_grades(side, found, question)},  # type: ignore[arg-type]
                guarded=row.guarded + sum(grade.guarded for grade in found),
                unparsable=row.unparsable + sum(grade.unparsable for grade in found),
                tokens=row.tokens + _count(reading),
            )
            for row, side, found, question, reading in zip(rows, sides, shares, questions, readings, strict=True)
        ]


def _kept(batch: LabeledBatch) -> BatchFinisher:
    return lambda: batch


def add_grades(side: GradedAnswer, grades: Sequence[Grade], question: Question) -> GradedAnswer:
    """The side with its verdicts, mastery and certainty; the first grade is the greedy answer's."""
    sampled = tuple(grade.correct for grade in grades[1:])
    return replace(
        side,
        correct=grades[0].correct,
        sample_correct=sampled,
        mastery=mastery(sampled),
        certainty=certainty([canonical_answer(text, question) for text in side.samples]),
    )


def join_batches(parts: Sequence[LabeledBatch]) -> LabeledBatch:
    """Batches one after another."""
    names = sorted({name for part in parts for name in part.vectors})
    vectors = {name: np.concatenate([part.vectors[name] for part in parts if part.vectors]) for name in names}
    return LabeledBatch([row for part in parts for row in part.rows], vectors)


def _compared(row: LabelRow) -> LabelRow:
    if row.closed is None or row.open is None:
        return row
    return replace(
        row,
        effect_mastery=retrieval_effect(row.closed.mastery, row.open.mastery),
        effect_certainty=retrieval_effect(row.closed.certainty, row.open.certainty),
        benefit=retrieval_benefit(row.closed.correct, row.open.correct),
    )


def _vectors(readings: Sequence[Reading]) -> dict[str, Vector]:
    """States before and after the draft by name and layer, in half precision: that is what probes need."""
    layers = list(readings[0].hidden)
    before = {f"before.{layer}": np.stack([reading.hidden[layer] for reading in readings]) for layer in layers}
    after = {f"after.{layer}": np.stack([reading.hidden_after[layer] for reading in readings]) for layer in layers}
    return {name: _halved(block) for name, block in {**before, **after}.items()}


def _halved(block: Vector) -> Vector:
    """Half precision where it holds the values; some layers of some models have states beyond its range."""
    fits = float(np.abs(block).max(initial=0)) < np.finfo(np.float16).max
    return block.astype(np.float16) if fits else block


def _count(reading: Reading) -> int:
    return (reading.draft.n_tokens if reading.draft else 0) + sum(sample.n_tokens for sample in reading.samples)
