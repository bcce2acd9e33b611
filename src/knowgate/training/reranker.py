"""Fit a reranker: train a cross-encoder on which passages this LLM can use (CBDR, section 3.3)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from knowgate.core.text import join_tokens
from knowgate.data.preferences import Preference, compute_rank_metrics, deduplicate_passages
from knowgate.errors import BadInput
from knowgate.labels.grading import list_gold_answers
from knowgate.retrieval.passages import format_passage
from knowgate.retrieval.rerankers.cross_encoder import EMPTY_QUESTION, CrossEncoderReranker
from knowgate.stats.metrics import FloatArray
from knowgate.training import reranker_trainer
from knowgate.training.reranker_trainer import (
    MINILM,
    PASSAGE_TOKENS,
    QUERY_TOKENS,
    RankingGroup,
    RerankerProgress,
    RerankerTrainingOptions,
    TrainingLog,
)
from knowgate.types import Passage, Question, Retriever

RELEVANCE_TRAINING = RerankerTrainingOptions(batch=16, rate=5e-5, epochs=2)
MAX_NEGATIVES = 7
MAX_POSITIVES = 2  # per question; further ones add little
StageProgressCallback = Callable[[str, RerankerProgress], None]


@dataclass(frozen=True)
class TruncationCounts:
    """How many distinct texts were cut to the paper's token limits."""

    questions: int = 0
    passages: int = 0


@dataclass(frozen=True)
class AlignedReranker:
    """A reranker aligned to an LLM.

    Attributes:
        model: The trained cross-encoder.
        base: A copy of it before alignment, if it was trained on relevance here.
        spec: Spec of the model that training started from.
        training: Hyperparameters of the alignment.
        relevance: Log of the relevance training, if there was one.
        alignment: Log of the alignment.
        cut: Texts that were truncated.
        reads_question: False for a control that ignores the question.
        tested: Held-out rows.
        before: Ranking metrics of each held-out row before alignment.
        after: The same after alignment.
    """

    model: Any = field(repr=False)
    base: Any = field(repr=False)
    spec: str
    training: RerankerTrainingOptions
    relevance: TrainingLog | None
    alignment: TrainingLog
    cut: TruncationCounts
    reads_question: bool
    tested: list[Preference] = field(repr=False)
    before: dict[str, FloatArray] = field(repr=False)
    after: dict[str, FloatArray] = field(repr=False)


def fit_reranker(
    rows: Sequence[Preference],
    *,
    base: str = MINILM,
    training: RerankerTrainingOptions | None = None,
    relevance: Sequence[RankingGroup] | None = None,
    first: RerankerTrainingOptions = RELEVANCE_TRAINING,
    reads_question: bool = True,
    watch: StageProgressCallback = lambda stage, progress: None,
) -> AlignedReranker:
    """Train a cross-encoder on the preferences of the train rows and measure it on the test rows.

    Args:
        rows: Preferences of one LLM.
        base: Cross-encoder to start from.
        training: Hyperparameters of the alignment.
        relevance: Groups to train relevance on first. Default: none; for the packaged base, which cannot rank yet,
            the candidates of the rows themselves, by whether they contain a gold answer.
        first: Hyperparameters of the relevance training.
        reads_question: False trains a control that learns which passages are preferred whatever the question is.
        watch: Called with the stage and its progress.

    Raises:
        BadInput: No training question has preferred and other passages.
    """
    training = training or RerankerTrainingOptions()
    train_rows = [row for row in rows if row.split == "train" and row.error is None]
    groups = make_preference_groups(train_rows)
    if not reads_question:
        groups = [replace(group, question=EMPTY_QUESTION) for group in groups]
    if not groups:
        raise BadInput(
            f"none of the {len(train_rows)} training questions has both helpful and harmful passages, so nothing can "
            "be learned. Measure preferences of more questions, or with another `source`."
        )
    model = reranker_trainer.open_cross_encoder(base, seed=training.seed)
    tested = [row for row in rows if row.split == "test" and row.is_kept]
    if relevance is None and base == MINILM:
        relevance = make_relevance_groups(extract_preference_questions(train_rows))
    relevance_log = None
    if relevance is not None:
        short_relevance, _ = truncate_groups(model, relevance)
        relevance_log = reranker_trainer.train_groups(
            model, short_relevance, first, lambda progress: watch("relevance", progress)
        )
    before = measure_ranking(model, tested, reads_question)
    unaligned = copy.deepcopy(model) if relevance_log else None
    short, cut = truncate_groups(model, groups)
    log = reranker_trainer.train_groups(model, short, training, lambda progress: watch("alignment", progress))
    after = measure_ranking(model, tested, reads_question)
    return AlignedReranker(
        model, unaligned, base, training, relevance_log, log, cut, reads_question, tested, before, after
    )


@dataclass(frozen=True)
class RelevanceReranker:
    """A cross-encoder trained on relevance only: a base for alignment to any LLM."""

    model: Any = field(repr=False)
    spec: str
    training: RerankerTrainingOptions
    log: TrainingLog
    cut: TruncationCounts


def fit_relevance(
    groups: Sequence[RankingGroup],
    *,
    base: str = MINILM,
    training: RerankerTrainingOptions = RELEVANCE_TRAINING,
    watch: StageProgressCallback = lambda stage, progress: None,
) -> RelevanceReranker:
    """Train a cross-encoder on which passages contain an answer."""
    model = reranker_trainer.open_cross_encoder(base, seed=training.seed)
    short, cut = truncate_groups(model, groups)
    log = reranker_trainer.train_groups(model, short, training, lambda progress: watch("relevance", progress))
    return RelevanceReranker(model, base, training, log, cut)


def make_preference_groups(rows: Sequence[Preference]) -> list[RankingGroup]:
    """Make the training groups of preferences: helpful passages are positive, harmful ones negative."""
    groups = []
    for row in (row for row in rows if row.is_kept):
        passages = tuple(format_passage(row.candidates[index].passage) for index in (*row.positives, *row.negatives))
        groups.append(RankingGroup(row.question, passages, (1.0,) * len(row.positives) + (0.0,) * len(row.negatives)))
    return groups


def truncate_groups(model: Any, groups: Sequence[RankingGroup]) -> tuple[list[RankingGroup], TruncationCounts]:
    """Cut the texts of groups to the paper's limits, and count the texts that were cut."""
    questions = list({group.question for group in groups})
    passages = list({text for group in groups for text in group.passages})
    short = dict(zip(questions, reranker_trainer.truncate_texts(model, questions, QUERY_TOKENS), strict=True))
    shorter = dict(zip(passages, reranker_trainer.truncate_texts(model, passages, PASSAGE_TOKENS), strict=True))
    counts = TruncationCounts(
        sum(short[text] != text for text in questions), sum(shorter[text] != text for text in passages)
    )
    truncated = [
        RankingGroup(short[group.question], tuple(shorter[text] for text in group.passages), group.labels)
        for group in groups
    ]
    return truncated, counts


def measure_ranking(model: Any, rows: Sequence[Preference], reads_question: bool = True) -> dict[str, FloatArray]:
    """Return the ranking metrics of each row, over its positives and negatives; empty without rows."""
    if not rows:
        return {}
    pools = [row.keep_pool() for row in rows]
    reranker = CrossEncoderReranker.from_model(model, "trained here", reads_question=reads_question)
    passages = [[candidate.passage for candidate in row.candidates] for row in pools]
    return compute_rank_metrics(pools, reranker.score([row.question for row in pools], passages))


# --- relevance ------------------------------------------------------------------------------------


def make_relevance_groups(
    questions: Sequence[Question], retriever: Retriever | None = None, *, candidates: int = 20, seed: int = 0
) -> list[RankingGroup]:
    """Make groups of passages that contain a gold answer and passages that do not. No LLM is needed.

    Args:
        questions: Questions with gold answers; their contexts are candidates.
        retriever: Finds further candidates.
        candidates: Passages to search for.
        seed: Seed of the passages of other questions, which fill up questions with fewer than seven negatives.
    """
    results = retriever.search([q.text for q in questions], candidates) if retriever else [[] for _ in questions]
    pools = [deduplicate_passages([*q.contexts, *found]) for q, found in zip(questions, results, strict=True)]
    every_passage = [passage for pool in pools for passage in pool]
    matcher, rng = AnswerMatcher(), np.random.default_rng(seed)
    groups: list[RankingGroup] = []
    for question, pool in zip(questions, pools, strict=True):
        answers = [text for gold in list_gold_answers(question) if (text := join_tokens(gold)).strip()]
        has_answer = [matcher.contains(passage, answers) for passage in pool]
        if not any(has_answer):
            continue
        positives = [passage for passage, is_positive in zip(pool, has_answer, strict=True) if is_positive]
        negatives = [passage for passage, is_positive in zip(pool, has_answer, strict=True) if not is_positive]
        negatives = negatives[:MAX_NEGATIVES]
        if (missing := MAX_NEGATIVES - len(negatives)) > 0:
            drawn = [every_passage[int(index)] for index in rng.integers(0, len(every_passage), 3 * missing)]
            negatives += [p for p in deduplicate_passages(drawn) if not matcher.contains(p, answers)][:missing]
        if negatives:
            groups.append(_make_group(question, positives[:MAX_POSITIVES], negatives))
    return groups


@dataclass
class AnswerMatcher:
    """Tells whether passages contain an answer; caches normalized passages, which many questions share."""

    normalized: dict[str, str] = field(default_factory=dict)

    def contains(self, passage: Passage, answers: Sequence[str]) -> bool:
        """Return whether a passage contains one of the normalized answers as whole words."""
        text = format_passage(passage)
        if text not in self.normalized:
            self.normalized[text] = join_tokens(text)
        return any(answer in self.normalized[text] for answer in answers)


def _make_group(question: Question, positives: Sequence[Passage], negatives: Sequence[Passage]) -> RankingGroup:
    passages = tuple(format_passage(passage) for passage in (*positives, *negatives))
    return RankingGroup(question.text, passages, (1.0,) * len(positives) + (0.0,) * len(negatives))


def extract_preference_questions(rows: Iterable[Preference]) -> list[Question]:
    """Return the questions of preference rows with their candidates as contexts."""
    return [
        Question(row.question, row.id, row.answers, contexts=tuple(each.passage for each in row.candidates))
        for row in rows
        if row.error is None
    ]
