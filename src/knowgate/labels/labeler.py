"""Labels a batch of questions: lets the LLM answer without and with passages, and grades and compares the answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np

from knowgate.data.runs.rows import GradedAnswer, LabelRow, build_ungraded_answer
from knowgate.data.signals import confidence, samples
from knowgate.errors import BadSetting, DeviceError, KnowgateError, OutOfMemory, ServerError, UnsupportedSignal
from knowgate.labels.grading import Grader, StringGrader, add_grades, compare_answers, list_gold_answers
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
from knowgate.models.local_backend import LocalBackend
from knowgate.models.prompts.answers import AnswerPrompts, build_fitting_prompts
from knowgate.models.prompts.questions import build_self_assessment_prompt
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

SYSTEM_ERRORS = (ServerError, OutOfMemory)  # if all questions of a batch fail like this, the run stops
MAX_HALF = float(np.finfo(np.float16).max)  # largest number in half precision


@dataclass(frozen=True)
class LabeledBatch:
    """The label rows of a batch, and the hidden states that the LLM had when it answered.

    Attributes:
        rows: One row per question.
        vectors: Hidden states by name; `vectors[name][i]` belongs to the i-th row that did not fail.
    """

    rows: list[LabelRow]
    vectors: Mapping[str, Vector] = field(default_factory=dict)


BatchFinisher = Callable[[], LabeledBatch]
PassageSearch = Callable[[Sequence[Question]], PassageSearchResults]


@dataclass(frozen=True)
class Labeler:
    """Turns questions into label rows. A question that fails becomes a row with an error message.

    Attributes:
        model: The LLM that answers.
        grader: Decides whether answers are right.
        plan: What to generate and record.
        prompts: Wording of the prompts.
        retriever: Finds passages; None to use the contexts of the questions.
        reranker: Sorts found passages; None to keep the order of the retriever.
        second_grader: Grades the greedy answers once more; its verdicts are stored beside those of `grader`.
        find_passages: Used instead of the default passage search, for example to return prefetched passages.
    """

    model: Model
    grader: Grader
    plan: LabelPlan = field(default_factory=LabelPlan)
    prompts: AnswerPrompts = field(default_factory=AnswerPrompts)
    retriever: Retriever | None = None
    reranker: Reranker | None = None
    find_passages: PassageSearch | None = None
    second_grader: Grader | None = None

    def __post_init__(self) -> None:
        if self.plan.iterative and (self.retriever is None or not self.plan.open_book):
            raise BadSetting(
                "iterative=True searches an index several times per question. Set `index`, and leave `closed_book` out."
            )
        missing = {Signal.HIDDEN, Signal.SAMPLES} - self.model.offers if self.plan.seakr else set()
        if missing:
            raise UnsupportedSignal(
                f"seakr=True needs signals that the model '{self.model.name}' does not give: "
                f"{', '.join(sorted(missing))}. Use another model, or leave `seakr` out."
            )

    @property
    def passage_finder(self) -> PassageFinder:
        """A passage finder with the plan, retriever and reranker of this labeler."""
        return PassageFinder(self.plan, self.retriever, self.reranker)

    @property
    def seakr_layer(self) -> int | None:
        """Layer whose hidden states SeaKR compares, which is the middle one; None if the plan does not use SeaKR."""
        return self.model.depth // 2 if self.plan.seakr else None

    def label(self, questions: Sequence[Question]) -> LabeledBatch:
        """Label a batch of questions; if it fails as a whole, its questions are labeled one by one."""
        return self.start(questions, can_defer=False)()

    def start(self, questions: Sequence[Question], *, can_defer: bool = True) -> BatchFinisher:
        """Let the LLM answer a batch, and return a function (the finisher) that grades the answers into label rows.

        If the batch fails, its questions are labeled one by one, and those that fail get a row with the error.

        Args:
            questions: The batch.
            can_defer: Whether grading may be left to the finisher. If False, it is done before this method returns.

        Raises:
            DeviceError: The GPU failed, so that all other questions would fail as well.
            ServerError: The server of the LLM failed, even for a single question.
        """
        try:
            finish = self._answer(questions)
            return finish if can_defer and self._can_finish_in_thread else _make_finisher(finish())
        except DeviceError:
            raise
        except KnowgateError as error:
            if len(questions) == 1:
                if isinstance(error, ServerError):
                    raise
                return _make_finisher(self.make_failed_batch(questions[0], str(error)))
        # Outside of `except`, so that the memory that the error's traceback refers to is free.
        return _make_finisher(self._label_one_by_one(questions))

    @property
    def _can_finish_in_thread(self) -> bool:
        """Whether grading needs no LLM. A judge, answers with masked passages, and iterative answers need one."""
        return self._compares_strings and not self.plan.mask and not self.plan.iterative

    @property
    def _compares_strings(self) -> bool:
        """Whether no grader calls an LLM."""
        return all(isinstance(grader, StringGrader | None) for grader in (self.grader, self.second_grader))

    def _label_one_by_one(self, questions: Sequence[Question]) -> LabeledBatch:
        """Label each question as a batch of its own; failed questions become rows with an error.

        Raises the first error if all questions fail because of the server or the GPU memory.
        """
        batches, errors = [], []
        for question in questions:
            try:
                batches.append(self._answer([question])())
            except DeviceError:
                raise
            except KnowgateError as error:
                errors.append(error)
                batches.append(self.make_failed_batch(question, str(error)))
        if len(errors) == len(questions) and all(isinstance(error, SYSTEM_ERRORS) for error in errors):
            raise errors[0]  # the server or the GPU failed, not the questions
        return join_batches(batches)

    def make_failed_batch(self, question: Question, reason: str) -> LabeledBatch:
        """Return a batch with a single row that records why the question could not be labeled."""
        return LabeledBatch([replace(self._make_empty_row(question), error=reason)])

    def _make_empty_row(self, question: Question) -> LabelRow:
        """Make the label row of a question before it is answered."""
        return make_empty_row(question, self.prompts.language(question), self.grader)

    # --- one batch --------------------------------------------------------------------------------

    def _answer(self, questions: Sequence[Question]) -> BatchFinisher:
        """Answer without passages (closed) and with passages (opened); return a function that finishes the label rows.

        A second thread works while the LLM generates: it searches the passages, and later grades the closed-book answers.
        It also selects the passages that fit, unless that needs a reranker or a tokenizer that only one thread may use.
        """
        start = time.perf_counter()
        can_select = self.reranker is None and getattr(self.model, "encodes_in_threads", False)
        with ThreadPoolExecutor(1, "knowgate-label") as thread:
            search = thread.submit(self.find_passages or self.passage_finder.find, questions)

            def select() -> tuple[list[Evidence], list[Prompt]]:
                return self._select_evidence(questions, search.result())

            selection = thread.submit(select) if can_select else None
            closed_prompts = [self.prompts.closed(question) for question in questions]
            closed = self._read(closed_prompts, self.plan.samples, with_states=True)
            empty_rows = [self._make_empty_row(question) for question in questions]
            graded = self._grade_in_thread(thread, lambda: self._add_answers(empty_rows, questions, "closed", closed))
            signals = self._read_signals(questions, closed)
            evidence, open_prompts = selection.result() if selection else select()
            n_open = self.plan.samples if self.plan.open_samples is None else self.plan.open_samples
            opened = self._read(open_prompts, n_open) if open_prompts else []

        def finish() -> LabeledBatch:
            pairs = zip(graded.result(), signals, strict=True)
            rows = [replace(row, signals=row_signals) for row, row_signals in pairs]
            rows = self._add_open_answers(rows, questions, evidence, opened)
            seconds = (time.perf_counter() - start) / len(questions)
            return LabeledBatch([replace(compare_answers(row), seconds=seconds) for row in rows], _pack_states(closed))

        return finish

    def _grade_in_thread(self, thread: Executor, work: Callable[[], Result]) -> Future[Result]:
        """Call `work`, which grades answers, and return its result as a future.

        It runs in the thread if the graders only compare strings. Otherwise it runs here: a judge may be the LLM that is
        answering, which must not be called from two threads.
        """
        if self._compares_strings:
            return thread.submit(work)
        finished: Future[Result] = Future()
        finished.set_result(work())
        return finished

    def _read(self, prompts: Sequence[Prompt], n_samples: int, *, with_states: bool = False) -> list[Reading]:
        """Generate a greedy answer (draft) and sampled answers to each prompt; a reading holds all of them.

        Args:
            prompts: The prompts.
            n_samples: Number of sampled answers to return.
            with_states: Also record hidden states, including those of sampled answers that SeaKR compares.
        """
        plan = self.plan
        seakr_samples = plan.seakr if with_states else 0  # SeaKR may need more samples than are returned
        request = SignalRequest(
            draft_tokens=plan.max_tokens,
            layers=plan.layers if with_states else (),
            after_draft=with_states,
            samples=max(n_samples, seakr_samples),
            sample_tokens=plan.max_tokens,
            sampling=plan.sampling,
            seed=plan.seed,
            sample_layer=self.seakr_layer if seakr_samples else None,
            sample_end=bool(seakr_samples),
            resumable=False,
        )
        readings = self.model.read(prompts, request)
        return [replace(reading, resume=None, samples=reading.samples[:n_samples]) for reading in readings]

    def _read_signals(self, questions: Sequence[Question], closed: Sequence[Reading]) -> list[dict[str, float]]:
        """Return signals of each question by name: whether the LLM thinks it can answer, and SeaKR if it is planned.

        SeaKR measures how much the hidden states of the sampled answers in `closed` differ, which shows uncertainty.
        """
        assessments = self._assess(questions)
        return [signals | self._measure_seakr(reading) for signals, reading in zip(assessments, closed, strict=True)]

    def _measure_seakr(self, reading: Reading) -> dict[str, float]:
        """Measure how much the hidden states of the sampled answers differ; empty if they were not recorded."""
        if reading.sample_states is None:
            return {}
        states = reading.sample_states[: self.plan.seakr]
        return {samples.SEAKR_END: samples.log_determinant(states), samples.SEAKR_SIZE: samples.log_mean_square(states)}

    def _assess(self, questions: Sequence[Question]) -> list[dict[str, float]]:
        """Ask the LLM whether it can answer each question.

        Returns:
            For each question, {name of the signal: logit of "yes" minus logit of "no"}; {} if the logits are unknown.
        """
        if Signal.LABELS not in self.model.offers:
            return [{} for _ in questions]
        prompts = [build_self_assessment_prompt(question, *confidence.ASSESSMENT_LABELS) for question in questions]
        try:
            logits = self.model.label_logits(prompts, confidence.ASSESSMENT_LABELS)
        except UnsupportedSignal:  # the answers are still useful without the self-assessment
            return [{} for _ in questions]
        signals: list[dict[str, float]] = []
        for pair in logits:  # of one question
            # Equal logits of a local LLM are a true tie. Those of a server mean that it listed neither label.
            is_known = isinstance(self.model, LocalBackend) or confidence.has_distinct_logits(pair)
            signals.append({confidence.SELF_ASSESSMENT: confidence.self_assessment_logit(pair)} if is_known else {})
        return signals

    # --- open book --------------------------------------------------------------------------------

    def _select_evidence(
        self, questions: Sequence[Question], results: PassageSearchResults
    ) -> tuple[list[Evidence], list[Prompt]]:
        """Rank the passages of each question, and keep those that fit the context window.

        Returns the kept passages of all questions, and the open-book prompts of the questions that have passages.
        """
        ranked = self.passage_finder.rank(questions, results.passages)
        fitting = build_fitting_prompts(self.model, self.prompts, questions, ranked, self.plan.max_tokens)
        evidence = [
            Evidence(shown.passages, count_truncated(passages, shown.passages), frequency)
            for shown, passages, frequency in zip(fitting, ranked, results.frequencies, strict=True)
        ]
        return evidence, [shown.prompt for shown in fitting if shown.passages]

    def _add_open_answers(
        self,
        rows: list[LabelRow],
        questions: Sequence[Question],
        evidence: Sequence[Evidence],
        opened: Sequence[Reading],
    ) -> list[LabelRow]:
        """Add the retrieved passages to all rows, and graded open-book answers to the rows that have passages.

        Args:
            rows: Rows with closed-book answers.
            questions: The question of each row.
            evidence: The passages of each row.
            opened: Open-book answers, only of the rows that have passages.
        """
        rows = [
            replace(row, passages=item.passages, cut=item.n_truncated, answer_frequency=item.frequency)
            for row, item in zip(rows, evidence, strict=True)
        ]
        with_passages = [number for number, row in enumerate(rows) if row.passages]
        if not with_passages:
            return rows
        open_rows = [rows[number] for number in with_passages]
        open_questions = [questions[number] for number in with_passages]
        shown = [row.passages for row in open_rows]
        checked = list(map(self.prompts.check_open_reading, open_questions, shown, opened))
        open_rows = self._add_answers(open_rows, open_questions, "open", checked)
        if self.plan.mask:
            open_rows = self._add_masked_answers(open_rows, open_questions)
        if self.plan.iterative:
            open_rows = self._add_iterative_answers(open_rows, open_questions)
        for number, row in zip(with_passages, open_rows, strict=True):
            rows[number] = row
        return rows

    def _add_masked_answers(self, rows: list[LabelRow], questions: Sequence[Question]) -> list[LabelRow]:
        """Answer with passages in which the word MASK replaces the gold answers, and add the answers to the rows."""
        masked = [mask_passages(row.passages, row.answers) for row in rows]
        prompts = [self.prompts.open(question, passages) for question, passages in zip(questions, masked, strict=True)]
        if self.plan.mask_samples:
            return self._add_answers(rows, questions, "mask", self._read(prompts, self.plan.mask_samples))
        completions = self.model.generate(prompts, max_tokens=self.plan.max_tokens)
        readings = [Reading(draft=prompt_completions[0]) for prompt_completions in completions]
        return self._add_answers(rows, questions, "mask", readings)

    def _add_iterative_answers(self, rows: list[LabelRow], questions: Sequence[Question]) -> list[LabelRow]:
        """Continue each open-book answer over several rounds of retrieval, and add the final answers to the rows."""
        answers = [
            IterativeAnswer(question, row.passages, Completion(row.open.text if row.open else ""))
            for row, question in zip(rows, questions, strict=True)
        ]
        k = self.plan.k or DEFAULT_PASSAGES
        answerer = IterativeAnswerer(self.model, self.prompts, self.passage_finder.search, k, self.plan.max_tokens)
        answerer.refine(answers)
        rows = self._add_answers(rows, questions, "iterative", [Reading(draft=state.answer) for state in answers])
        return [replace(row, rounds=state.rounds) for row, state in zip(rows, answers, strict=True)]

    # --- grades -----------------------------------------------------------------------------------

    def _add_answers(
        self, rows: list[LabelRow], questions: Sequence[Question], name: str, readings: Sequence[Reading]
    ) -> list[LabelRow]:
        """Grade the greedy and sampled answers, and return the rows with these answers added.

        Args:
            rows: The rows, which are not changed.
            questions: The question of each row.
            name: Field of the row that holds the answer: closed, open, mask or iterative.
            readings: Generated answers of each row.
        """
        answers = [build_ungraded_answer(reading.draft or Completion(""), reading.samples) for reading in readings]
        answers = self._add_second_grades(answers, questions)
        # All texts are graded in one call; then each row takes as many grades as it has texts.
        texts: list[str] = []
        text_questions: list[Question] = []
        for answer, question in zip(answers, questions, strict=True):
            texts += [answer.text, *answer.samples]
            text_questions += [question] * (1 + len(answer.samples))
        grades = iter(self.grader.grade(texts, text_questions))
        grades_by_row = [list(islice(grades, 1 + len(answer.samples))) for answer in answers]
        return [
            replace(
                row,
                **{name: add_grades(answer, row_grades, question)},  # type: ignore[arg-type]
                guarded=row.guarded + sum(grade.guarded for grade in row_grades),
                unparsable=row.unparsable + sum(grade.unparsable for grade in row_grades),
                tokens=row.tokens + _count_generated_tokens(reading),
            )
            for row, answer, row_grades, question, reading in zip(
                rows, answers, grades_by_row, questions, readings, strict=True
            )
        ]

    def _add_second_grades(self, answers: list[GradedAnswer], questions: Sequence[Question]) -> list[GradedAnswer]:
        """Add the verdicts of the second grader, if there is one, to the greedy answers; they are only stored."""
        if self.second_grader is None:
            return answers
        grades = self.second_grader.grade([answer.text for answer in answers], questions)
        name = self.second_grader.name
        pairs = zip(answers, grades, strict=True)
        return [replace(answer, other_grades={name: grade.correct}) for answer, grade in pairs]


def make_empty_row(question: Question, lang: str, grader: Grader) -> LabelRow:
    """Make the label row of a question before it is answered: all answer fields are empty."""
    return LabelRow(
        id=question.id,
        question=question.text,
        lang=lang,
        answers=tuple(list_gold_answers(question)),
        choices=question.choices,
        meta=question.meta,
        grader="choice" if question.choices else grader.name,  # every grader grades multiple choice by letter
    )


def _make_finisher(batch: LabeledBatch) -> BatchFinisher:
    """Return a function that returns a batch that is already finished."""
    return lambda: batch


def join_batches(batches: Sequence[LabeledBatch]) -> LabeledBatch:
    """Concatenate the rows and the hidden states of batches. A batch of a failed question has no hidden states."""
    succeeded = [batch for batch in batches if batch.vectors]
    names = sorted(succeeded[0].vectors) if succeeded else []  # all batches have states of the same names
    vectors = {name: np.concatenate([batch.vectors[name] for batch in succeeded]) for name in names}
    return LabeledBatch([row for batch in batches for row in batch.rows], vectors)


def _pack_states(readings: Sequence[Reading]) -> dict[str, Vector]:
    """Stack the hidden states of all readings, one array per layer and position.

    The names are 'before.LAYER' (last prompt token) and 'after.LAYER' (last token of the answer).
    """
    layers = list(readings[0].hidden)  # all readings have the same layers
    before = {f"before.{layer}": np.stack([reading.hidden[layer] for reading in readings]) for layer in layers}
    after = {f"after.{layer}": np.stack([reading.hidden_after[layer] for reading in readings]) for layer in layers}
    return {name: _to_half_precision(states) for name, states in {**before, **after}.items()}


def _to_half_precision(states: Vector) -> Vector:
    """Convert to float16, unless a value is too large for it, as in some layers of some models."""
    return states.astype(np.float16) if float(np.abs(states).max(initial=0)) < MAX_HALF else states


def _count_generated_tokens(reading: Reading) -> int:
    """Return the number of tokens in the greedy answer and all samples."""
    return (reading.draft.n_tokens if reading.draft else 0) + sum(sample.n_tokens for sample in reading.samples)
