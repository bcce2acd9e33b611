"""Fitting the reranker: a cross-encoder taught which passages this LLM can use (CBDR, section 3.3).

Knows preference rows, the base and the stages of training; what is written where is `rerank_save`'s.
"""

from __future__ import annotations

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
from knowgate.training.reranker_trainer import (
    MINILM,
    PASSAGE_TOKENS,
    QUERY_TOKENS,
    RankingGroup,
    RerankerProgress,
    RerankerTrainingOptions,
    TrainingLog,
    open_cross_encoder,
    train_groups,
    truncate_texts,
)
from knowgate.types import Passage, Question, Retriever

MAX_NEGATIVES = 7
MAX_POSITIVES = 2  # of each question; more of them say the same


def make_relevance_groups(
    questions: Sequence[Question], retriever: Retriever | None = None, *, candidates: int = 20, seed: int = 0
) -> list[RankingGroup]:
    """Passages of a question that hold a gold answer against others of the same question that hold none.

    Passages are the question's own contexts and what the retriever finds. Where a question has fewer than seven that
    hold no answer, other questions' passages fill up.
    """
    found = retriever.search([q.text for q in questions], candidates) if retriever else [[] for _ in questions]
    pools = [deduplicate_passages([*q.contexts, *more]) for q, more in zip(questions, found, strict=True)]
    others = [passage for pool in pools for passage in pool]
    texts, rng = PassageTextCache(), np.random.default_rng(seed)
    groups: list[RankingGroup] = []
    for question, pool in zip(questions, pools, strict=True):
        answers = [words for gold in list_gold_answers(question) if (words := join_tokens(gold)).strip()]
        holds = [texts.hold(passage, answers) for passage in pool]
        holding = [passage for passage, does in zip(pool, holds, strict=True) if does]
        lacking = [passage for passage, does in zip(pool, holds, strict=True) if not does][:MAX_NEGATIVES]
        if holding:
            lacking += _strangers(answers, others, MAX_NEGATIVES - len(lacking), rng, texts)
            groups += [_group(question, holding[:MAX_POSITIVES], lacking)] if lacking else []
    return groups


@dataclass
class PassageTextCache:
    """Passages as words between spaces, each taken apart once: thousands of questions share a corpus."""

    known: dict[str, str] = field(default_factory=dict)

    def hold(self, passage: Passage, answers: Sequence[str]) -> bool:
        text = format_passage(passage)
        if text not in self.known:
            self.known[text] = join_tokens(text)
        return any(answer in self.known[text] for answer in answers)


def _strangers(
    answers: Sequence[str], others: Sequence[Passage], n: int, rng: np.random.Generator, texts: PassageTextCache
) -> list[Passage]:
    if n <= 0:
        return []
    drawn = [others[int(place)] for place in rng.integers(0, len(others), 3 * n)]
    return [passage for passage in deduplicate_passages(drawn) if not texts.hold(passage, answers)][:n]


def _group(question: Question, positives: Sequence[Passage], negatives: Sequence[Passage]) -> RankingGroup:
    passages = tuple(format_passage(passage) for passage in (*positives, *negatives))
    return RankingGroup(question.text, passages, (*([1.0] * len(positives)), *([0.0] * len(negatives))))


def extract_preference_questions(rows: Iterable[Preference]) -> list[Question]:
    """The questions of preference rows with their candidates as contexts."""
    return [
        Question(row.question, row.id, row.answers, contexts=tuple(found.passage for found in row.candidates))
        for row in rows
        if row.error is None
    ]


StageProgressCallback = Callable[[str, RerankerProgress], None]
RELEVANCE_TRAINING = RerankerTrainingOptions(batch=16, rate=5e-5, epochs=2)


@dataclass(frozen=True)
class TruncationCounts:
    """How many distinct texts were cut to the paper's limits of tokens."""

    questions: int = 0
    passages: int = 0


@dataclass(frozen=True)
class AlignedReranker:
    """A trained reranker with what it came from and its measures on the held-out rows, before and after."""

    model: Any = field(repr=False)
    base: Any = field(repr=False)  # a copy of the model before alignment, where it was made here
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
    watch: StageProgressCallback = lambda stage, step: None,
) -> AlignedReranker:
    """Teach a base the preferences of the rows' train part; measure on their test part.

    The packaged base knows nothing of ranking, so it first learns relevance: from `relevance`, else from which of the
    rows' own candidates hold a gold answer. Other bases do so only if `relevance` is given.
    reads_question: False makes a control that learns which passages are preferred whatever is asked.
    """
    training = training or RerankerTrainingOptions()
    learnt = [row for row in rows if row.split == "train" and row.error is None]
    groups = make_preference_groups(learnt, training.loss)
    groups = groups if reads_question else [replace(group, question=EMPTY_QUESTION) for group in groups]
    if not groups:
        raise BadInput(
            f"none of the {len(learnt)} training questions has passages of both kinds: nothing can be learnt. "
            "Make preferences of more questions, or with another --source."
        )
    model = open_cross_encoder(base, seed=training.seed)
    tested = [row for row in rows if row.split == "test" and row.is_kept]
    plain = (
        relevance
        if relevance is not None or base != MINILM
        else make_relevance_groups(extract_preference_questions(learnt))
    )
    trained = None
    if plain is not None:
        trained = train_groups(model, truncate_groups(model, plain)[0], first, lambda step: watch("relevance", step))
    before = measure_ranking(model, tested, reads_question)
    kept = _copy(model) if trained else None
    short, cut = truncate_groups(model, groups)
    aligned = train_groups(model, short, training, lambda step: watch("alignment", step))
    after = measure_ranking(model, tested, reads_question)
    return AlignedReranker(model, kept, base, training, trained, aligned, cut, reads_question, tested, before, after)


@dataclass(frozen=True)
class RelevanceReranker:
    """A cross-encoder that was taught relevance and nothing of any LLM: what alignment starts from."""

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
    watch: StageProgressCallback = lambda stage, step: None,
) -> RelevanceReranker:
    """Teach a base which passages hold an answer."""
    model = open_cross_encoder(base, seed=training.seed)
    short, cut = truncate_groups(model, groups)
    log = train_groups(model, short, training, lambda step: watch("relevance", step))
    return RelevanceReranker(model, base, training, log, cut)


def make_preference_groups(rows: Sequence[Preference], loss: str) -> list[RankingGroup]:
    """InfoNCE: a question's positives (1) with its own negatives (0). Listwise: all candidates with their shifts."""
    groups = []
    for row in rows:
        texts = [format_passage(found.passage) for found in row.candidates]
        shifts = [found.shift for found in row.candidates]
        if loss == "listwise" and len(set(shifts)) > 1:
            groups.append(RankingGroup(row.question, tuple(texts), tuple(shifts)))
        elif loss == "infonce" and row.is_kept:
            labels = (*([1.0] * len(row.positives)), *([0.0] * len(row.negatives)))
            groups.append(
                RankingGroup(row.question, tuple(texts[place] for place in (*row.positives, *row.negatives)), labels)
            )
    return groups


def truncate_groups(model: Any, groups: Sequence[RankingGroup]) -> tuple[list[RankingGroup], TruncationCounts]:
    """The groups with texts cut to the paper's limits, and how many were."""
    questions = list({group.question for group in groups})
    passages = list({text for group in groups for text in group.passages})
    short = dict(zip(questions, truncate_texts(model, questions, QUERY_TOKENS), strict=True))
    shorter = dict(zip(passages, truncate_texts(model, passages, PASSAGE_TOKENS), strict=True))
    counted = TruncationCounts(
        sum(short[text] != text for text in questions), sum(shorter[text] != text for text in passages)
    )
    return [
        RankingGroup(short[group.question], tuple(shorter[text] for text in group.passages), group.labels)
        for group in groups
    ], counted


def measure_ranking(model: Any, rows: Sequence[Preference], reads_question: bool = True) -> dict[str, FloatArray]:
    """The ranking measures of each row, which look at positives and negatives alone; nothing without rows."""
    if not rows:
        return {}
    pools = [row.keep_pool() for row in rows]
    reranker = CrossEncoderReranker.from_model(model, "trained here", reads_question=reads_question)
    passages = [[found.passage for found in row.candidates] for row in pools]
    return compute_rank_metrics(pools, reranker.score([row.question for row in pools], passages))


def _copy(model: Any) -> Any:
    import copy

    return copy.deepcopy(model)
