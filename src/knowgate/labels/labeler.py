"""Labels a batch of questions: lets the LLM answer without and with passages, and grades and compares the answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice

import numpy as np

from knowgate.data.runs.rows import GradedAnswer, LabelRow, build_ungraded_answer
from knowgate.data.runs.storage import pack_hidden_states
from knowgate.data.signals import confidence, samples
from knowgate.errors import BadSetting, DeviceError, KnowgateError, OutOfMemory, ServerError, UnsupportedSignal
from knowgate.labels.grading import Grade, Grader, StringGrader, add_counts, add_grades, compare_answers, make_empty_row
from knowgate.labels.mask import mask_passages
from knowgate.labels.options import LabelOptions, resolve_layers
from knowgate.labels.passages import IterativeAnswer, IterativeAnswerer, PassageFinder, SearchResult, count_truncated
from knowgate.models.backend import check_sampling
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


@dataclass(frozen=True)
class LabeledBatch:
    """The label rows of a batch, with the LLM's hidden states.

    Attributes:
        rows: One row per question.
        vectors: Hidden states by name; `vectors[name][i]` belongs to the i-th row that did not fail.
    """

    rows: list[LabelRow]
    vectors: Mapping[str, Vector] = field(default_factory=dict)


BatchFinisher = Callable[[], LabeledBatch]
PassageSearch = Callable[[Sequence[Question]], list[SearchResult]]


@dataclass(frozen=True)
class Labeler:
    """Turns questions into label rows. A failed question becomes a row with an error.

    Attributes:
        model: The LLM that answers.
        grader: Decides whether answers are right.
        options: What to generate and record. The index, reranker and graders that they name are given as objects below.
        prompts: Wording of the prompts.
        retriever: Finds passages; None to use the contexts of the questions.
        reranker: Sorts found passages; None to keep the order of the retriever.
        second_grader: Grades the greedy answers once more; its verdicts are stored beside those of `grader`.
        find_passages: Used instead of the default passage search, for example to return prefetched passages.
    """

    model: Model
    grader: Grader
    options: LabelOptions = field(default_factory=LabelOptions)
    prompts: AnswerPrompts = field(default_factory=AnswerPrompts)
    retriever: Retriever | None = None
    reranker: Reranker | None = None
    find_passages: PassageSearch | None = None
    second_grader: Grader | None = None

    def __post_init__(self) -> None:
        """Raise an error if the options do not suit the model."""
        if self.options.iterative and (self.retriever is None or self.options.closed_book):
            raise BadSetting(
                "iterative=True needs an index, because it searches several times. Set `index`, and leave `closed_book` out."
            )
        missing = {Signal.HIDDEN, Signal.SAMPLES} - self.model.offers if self.options.seakr else set()
        if missing:
            raise UnsupportedSignal(
                f"the model '{self.model.name}' lacks signals that seakr=True needs: {', '.join(sorted(missing))}. Use another "
                "model, or leave `seakr` out."
            )
        check_sampling(self.options.sampling)
        _ = self.layers  # raises an error before anything is generated

    @property
    def passage_finder(self) -> PassageFinder:
        """A passage finder with the options, retriever and reranker of this labeler."""
        return PassageFinder(self.options, self.retriever, self.reranker)

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Numbers of the layers whose hidden states are recorded."""
        return resolve_layers(self.options.layers, self.model)

    @property
    def seakr_layer(self) -> int | None:
        """Layer whose hidden states SeaKR compares, which is the middle one; None without SeaKR."""
        return self.model.depth // 2 if self.options.seakr else None

    @property
    def identity(self) -> dict[str, str]:
        """Fingerprints of the model, prompts, index and reranker, to compare them across machines."""
        parts = {"model": self.model, "wording": self.prompts, "index": self.retriever, "reranker": self.reranker}
        return {name: part.fingerprint for name, part in parts.items() if part is not None}  # type: ignore[attr-defined]

    def label(self, questions: Sequence[Question]) -> LabeledBatch:
        """Label a batch of questions; if it fails as a whole, its questions are labeled one by one."""
        return self.start(questions, can_defer=False)()

    __call__ = label  # as the workers of a Ray cluster call it

    def start(self, questions: Sequence[Question], *, can_defer: bool = True) -> BatchFinisher:
        """Let the LLM answer a batch, and return a finisher: a function that grades the answers and returns the rows.

        Another thread can call the finisher while the LLM answers the next batch. Questions of a failed batch are labeled
        one by one.

        Args:
            questions: The batch.
            can_defer: Whether grading may be left to the finisher. If False, or if grading needs the LLM, the answers are
                graded before this method returns.

        Raises:
            DeviceError: The GPU failed, so that all other questions would fail as well.
            ServerError: The server of the LLM failed, even for a single question.
        """
        is_single = len(questions) == 1
        try:
            finish = self._answer(questions)
            if can_defer and self._can_finish_in_thread:
                return finish
            batch = finish()
            return lambda: batch
        except DeviceError:
            raise
        except KnowgateError as error:
            if is_single and isinstance(error, ServerError):
                raise
            reason = str(error)
        # Outside of `except`, so that the memory that the error's traceback refers to is free.
        labeled = self.make_failed_batch(questions[0], reason) if is_single else self._label_one_by_one(questions)
        return lambda: labeled

    @property
    def _can_finish_in_thread(self) -> bool:
        """Whether grading needs no LLM. A judge, answers with masked passages, and iterative answers need one."""
        return self._compares_strings and not self.options.mask and not self.options.iterative

    @property
    def _compares_strings(self) -> bool:
        """Whether all graders compare strings, so that none calls an LLM."""
        return all(isinstance(grader, StringGrader | None) for grader in (self.grader, self.second_grader))

    def _label_one_by_one(self, questions: Sequence[Question]) -> LabeledBatch:
        """Label each question as a batch of its own. Failed questions become rows with an error."""
        batches: list[LabeledBatch] = []
        errors: list[KnowgateError] = []
        for question in questions:
            try:
                finish = self._answer([question])
                batches.append(finish())
            except DeviceError:
                raise
            except KnowgateError as error:
                errors.append(error)
                batches.append(self.make_failed_batch(question, str(error)))
        system_errors = [error for error in errors if isinstance(error, SYSTEM_ERRORS)]
        if len(system_errors) == len(questions):
            raise system_errors[0]  # the server or the GPU failed, not the questions
        return join_batches(batches)

    def make_failed_batch(self, question: Question, reason: str) -> LabeledBatch:
        """Return a batch with a single row that records why the question could not be labeled."""
        return LabeledBatch([replace(self._make_empty_row(question), error=reason)])

    def _make_empty_row(self, question: Question) -> LabelRow:
        """Make the label row of a question before it is answered."""
        return make_empty_row(question, self.prompts.language(question), self.grader)

    # --- one batch --------------------------------------------------------------------------------

    def _answer(self, questions: Sequence[Question]) -> BatchFinisher:
        """Let the LLM answer questions with and without passages.

        A second thread searches and grades. The returned function makes the rows.
        """
        start = time.perf_counter()
        # Passages are selected in the second thread, unless this needs the LLM (for a reranker) or a tokenizer that only
        # this thread may use. Then they are selected here, after the LLM has answered.
        can_select_in_thread = self.reranker is None and getattr(self.model, "encodes_in_threads", False)
        with ThreadPoolExecutor(1, "knowgate-label") as thread:
            search = thread.submit(self.find_passages or self.passage_finder.find, questions)

            def select() -> tuple[list[SearchResult], list[Prompt]]:
                return self._select_evidence(questions, search.result())

            get_evidence = thread.submit(select).result if can_select_in_thread else select
            assessments = self._assess(questions)
            closed_book_prompts = [self.prompts.closed(question) for question in questions]
            closed_book = self._read(closed_book_prompts, self.options.samples, with_states=True)
            rows = [self._make_empty_row(question) for question in questions]
            graded = self._grade_in_thread(thread, lambda: self._add_answers(rows, questions, "closed", closed_book))
            signals = list(map(_collect_signals, assessments, closed_book))
            evidence, open_book_prompts = get_evidence()
            n_samples = self.options.samples if self.options.open_samples is None else self.options.open_samples
            open_book = self._read(open_book_prompts, n_samples) if open_book_prompts else []

        def finish() -> LabeledBatch:
            """Add signals, open-book answers and grades to the rows of the batch."""
            graded_rows = zip(graded.result(), signals, strict=True)
            rows = [replace(row, signals=row_signals) for row, row_signals in graded_rows]
            rows = self._add_open_book_answers(rows, questions, evidence, open_book)
            seconds = (time.perf_counter() - start) / len(questions)
            rows = [replace(compare_answers(row), seconds=seconds) for row in rows]
            return LabeledBatch(rows, pack_hidden_states(closed_book))

        return finish

    def _grade_in_thread(self, executor: Executor, work: Callable[[], Result]) -> Future[Result]:
        """Call `work`, which grades answers, and return its result as a future.

        Strings are compared in a thread of `executor`. A judge is an LLM, which only the calling thread may use, so it
        grades before this method returns.
        """
        if self._compares_strings:
            return executor.submit(work)
        finished: Future[Result] = Future()
        finished.set_result(work())
        return finished

    def _read(self, prompts: Sequence[Prompt], n_samples: int, *, with_states: bool = False) -> list[Reading]:
        """Generate a greedy answer (draft) and sampled answers to each prompt.

        Args:
            prompts: The prompts.
            n_samples: Number of sampled answers to return.
            with_states: Also record hidden states. With the option `seakr`, this includes those of 20 sampled answers:
                SeaKR measures uncertainty by how much they differ.
        """
        options = self.options
        # SeaKR may need more samples than are returned.
        seakr_samples = samples.SEAKR_SAMPLES if options.seakr and with_states else 0
        request = SignalRequest(
            draft_tokens=options.max_tokens,
            layers=self.layers if with_states else (),
            after_draft=with_states,
            samples=max(n_samples, seakr_samples),
            sample_tokens=options.max_tokens,
            sampling=options.sampling,
            seed=options.seed,
            sample_layer=self.seakr_layer if seakr_samples else None,
            sample_end=bool(seakr_samples),
            resumable=False,
        )
        readings = self.model.read(prompts, request)
        return [replace(reading, resume=None, samples=reading.samples[:n_samples]) for reading in readings]

    def _assess(self, questions: Sequence[Question]) -> list[float | None]:
        """Ask the LLM whether it can answer each question.

        Returns:
            For each question, the logit of "yes" minus the logit of "no"; None if the logits are unknown.
        """
        unknown: list[float | None] = [None for _ in questions]
        if Signal.LABELS not in self.model.offers:
            return unknown
        prompts = [build_self_assessment_prompt(question, *confidence.ASSESSMENT_LABELS) for question in questions]
        try:
            logits = self.model.label_logits(prompts, confidence.ASSESSMENT_LABELS)
        except UnsupportedSignal:  # the answers are still useful without the self-assessment
            return unknown
        return [self._compare_logits(pair) for pair in logits]

    def _compare_logits(self, pair: Vector) -> float | None:
        """Return the logit of "yes" minus the logit of "no"; None if they are unknown."""
        # Equal logits of a local LLM are a true tie. Those of a server mean that it listed neither label.
        if isinstance(self.model, LocalBackend) or confidence.has_distinct_logits(pair):
            return confidence.self_assessment_logit(pair)
        return None

    # --- open book --------------------------------------------------------------------------------

    def _select_evidence(
        self, questions: Sequence[Question], results: Sequence[SearchResult]
    ) -> tuple[list[SearchResult], list[Prompt]]:
        """Rank the passages of each question, and keep what fits the context window.

        Also return the prompts with passages.
        """
        queries = [question.text for question in questions]
        ranked = self.passage_finder.rank(queries, [result.passages for result in results])
        fitting = build_fitting_prompts(self.model, self.prompts, questions, ranked, self.options.max_tokens)
        evidence = [
            SearchResult(list(shown.passages), result.frequency, count_truncated(passages, shown.passages))
            for result, passages, shown in zip(results, ranked, fitting, strict=True)
        ]
        return evidence, [shown.prompt for shown in fitting if shown.passages]

    def _add_open_book_answers(
        self,
        rows: list[LabelRow],
        questions: Sequence[Question],
        evidence: Sequence[SearchResult],
        open_book: Sequence[Reading],
    ) -> list[LabelRow]:
        """Add the passages to all rows, and graded answers with passages where available.

        Args:
            rows: Rows with closed-book answers.
            questions: The question of each row.
            evidence: The passages of each row.
            open_book: Open-book answers, only of the rows that have passages.
        """
        rows = [
            replace(row, passages=tuple(item.passages), cut=item.n_truncated, answer_frequency=item.frequency)
            for row, item in zip(rows, evidence, strict=True)
        ]
        open_book_rows = [row for row in rows if row.passages]
        if not open_book_rows:
            return rows
        open_book_questions = [question for question, row in zip(questions, rows, strict=True) if row.passages]
        answered = iter(self._add_answers_with_passages(open_book_rows, open_book_questions, open_book))
        return [next(answered) if row.passages else row for row in rows]

    def _add_answers_with_passages(
        self, rows: list[LabelRow], questions: Sequence[Question], open_book: Sequence[Reading]
    ) -> list[LabelRow]:
        """Add all answers with passages to rows that have passages."""
        shown = [row.passages for row in rows]
        checked = list(map(self.prompts.check_open_reading, questions, shown, open_book))
        rows = self._add_answers(rows, questions, "open", checked)
        if self.options.mask:
            rows = self._add_masked_answers(rows, questions)
        if self.options.iterative:
            rows = self._add_iterative_answers(rows, questions)
        return rows

    def _add_masked_answers(self, rows: list[LabelRow], questions: Sequence[Question]) -> list[LabelRow]:
        """Let the LLM answer with masked passages, and add the answers to the rows.

        In masked passages, the word MASK replaces the gold answers.
        """
        masked = [mask_passages(row.passages, row.answers) for row in rows]
        prompts = [self.prompts.open(question, passages) for question, passages in zip(questions, masked, strict=True)]
        if self.options.mask_samples:
            return self._add_answers(rows, questions, "mask", self._read(prompts, self.options.mask_samples))
        completions = self.model.generate(prompts, max_tokens=self.options.max_tokens)
        readings = [Reading(draft=prompt_completions[0]) for prompt_completions in completions]
        return self._add_answers(rows, questions, "mask", readings)

    def _add_iterative_answers(self, rows: list[LabelRow], questions: Sequence[Question]) -> list[LabelRow]:
        """Refine each answer over several rounds of retrieval, and add the final answers."""
        answers = [
            IterativeAnswer(question, row.passages, Completion(row.open.text if row.open else ""))
            for row, question in zip(rows, questions, strict=True)
        ]
        IterativeAnswerer(self.model, self.prompts, self.passage_finder).refine(answers)
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
        answers = self._store_other_verdicts(answers, questions)
        grades = self._grade_all(answers, questions)
        graded_answers = map(add_grades, answers, grades, questions)
        counted_rows = map(add_counts, rows, readings, grades)
        pairs = zip(counted_rows, graded_answers, strict=True)
        return [replace(row, **{name: answer}) for row, answer in pairs]  # type: ignore[arg-type]

    def _grade_all(self, answers: Sequence[GradedAnswer], questions: Sequence[Question]) -> list[list[Grade]]:
        """Grade all answers in one call. Each gets a list: the greedy answer's grade, then the samples' grades."""
        texts: list[str] = []
        text_questions: list[Question] = []
        for answer, question in zip(answers, questions, strict=True):
            texts += [answer.text, *answer.samples]
            text_questions += [question] * (1 + len(answer.samples))
        grades = iter(self.grader.grade(texts, text_questions))
        return [list(islice(grades, 1 + len(answer.samples))) for answer in answers]

    def _store_other_verdicts(self, answers: list[GradedAnswer], questions: Sequence[Question]) -> list[GradedAnswer]:
        """Store the verdicts of the second grader in the answers. These verdicts do not count as grades."""
        if self.second_grader is None:
            return answers
        grades = self.second_grader.grade([answer.text for answer in answers], questions)
        pairs = zip(answers, grades, strict=True)
        return [replace(answer, other_grades={self.second_grader.name: grade.correct}) for answer, grade in pairs]


def _collect_signals(assessment: float | None, reading: Reading) -> dict[str, float]:
    """Return the signals of a question by name: its self-assessment, and two of SeaKR if sample states are recorded.

    SEAKR_END measures how much the hidden states at the end of the sampled answers differ, SEAKR_SIZE how large they are.
    """
    signals = {} if assessment is None else {confidence.SELF_ASSESSMENT: assessment}
    if reading.sample_states is not None:
        states = reading.sample_states[: samples.SEAKR_SAMPLES]
        signals[samples.SEAKR_END] = samples.log_determinant(states)
        signals[samples.SEAKR_SIZE] = samples.log_mean_square(states)
    return signals


def join_batches(batches: Sequence[LabeledBatch]) -> LabeledBatch:
    """Join the rows and the hidden states of batches. Failed questions have no hidden states."""
    succeeded = [batch for batch in batches if batch.vectors]
    names = sorted(succeeded[0].vectors) if succeeded else []  # all batches have states of the same names
    vectors = {name: np.concatenate([batch.vectors[name] for batch in succeeded]) for name in names}
    return LabeledBatch([row for batch in batches for row in batch.rows], vectors)
