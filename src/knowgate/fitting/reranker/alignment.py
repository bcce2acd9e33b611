"""Fitting the reranker: a cross-encoder taught which passages this LLM can use (CBDR, section 3.3).

Knows preference rows, the base and the stages of training; what is written where is `rerank_save`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from knowgate.errors import BadInput
from knowgate.fitting.reranker.base import MINILM, cut_texts, open_cross_encoder
from knowgate.fitting.reranker.relevance import questions_of, relevance_groups
from knowgate.fitting.reranker.training import (
    PASSAGE_TOKENS,
    QUERY_TOKENS,
    Group,
    RerankStep,
    RerankTraining,
    TrainingLog,
    train_groups,
)
from knowgate.preferences import Preference, rank_values
from knowgate.rerank import UNREAD, CrossEncoderReranker, shown
from knowgate.statistics import Floats

Watch = Callable[[str, RerankStep], None]
RELEVANCE = RerankTraining(batch=16, rate=5e-5, epochs=2)


@dataclass(frozen=True)
class CutTexts:
    """How many distinct texts were cut to the paper's limits of tokens."""

    questions: int = 0
    passages: int = 0


@dataclass(frozen=True)
class AlignedReranker:
    """A trained reranker with what it came from and its measures on the held-out rows, before and after."""

    model: Any = field(repr=False)
    base: Any = field(repr=False)  # a copy of the model before alignment, where it was made here
    spec: str
    training: RerankTraining
    relevance: TrainingLog | None
    alignment: TrainingLog
    cut: CutTexts
    reads_question: bool
    tested: list[Preference] = field(repr=False)
    before: dict[str, Floats] = field(repr=False)
    after: dict[str, Floats] = field(repr=False)


def fit_reranker(
    rows: Sequence[Preference],
    *,
    base: str = MINILM,
    training: RerankTraining | None = None,
    relevance: Sequence[Group] | None = None,
    first: RerankTraining = RELEVANCE,
    reads_question: bool = True,
    watch: Watch = lambda stage, step: None,
) -> AlignedReranker:
    """Teach a base the preferences of the rows' train part; measure on their test part.

    The packaged base knows nothing of ranking, so it first learns relevance: from `relevance`, else from which of the
    rows' own candidates hold a gold answer. Other bases do so only if `relevance` is given.
    reads_question: False makes a control that learns which passages are preferred whatever is asked.
    """
    training = training or RerankTraining()
    learnt = [row for row in rows if row.split == "train" and row.error is None]
    groups = preference_groups(learnt, training.loss)
    groups = groups if reads_question else [replace(group, question=UNREAD) for group in groups]
    if not groups:
        raise BadInput(
            f"none of the {len(learnt)} training questions has passages of both kinds: nothing can be learnt. "
            "Make preferences of more questions, or with another --source."
        )
    model = open_cross_encoder(base, seed=training.seed)
    tested = [row for row in rows if row.split == "test" and row.is_kept]
    plain = relevance if relevance is not None or base != MINILM else relevance_groups(questions_of(learnt))
    trained = None
    if plain is not None:
        trained = train_groups(model, limited(model, plain)[0], first, lambda step: watch("relevance", step))
    before = measured(model, tested, reads_question)
    kept = _copy(model) if trained else None
    short, cut = limited(model, groups)
    aligned = train_groups(model, short, training, lambda step: watch("alignment", step))
    after = measured(model, tested, reads_question)
    return AlignedReranker(model, kept, base, training, trained, aligned, cut, reads_question, tested, before, after)


@dataclass(frozen=True)
class RelevanceReranker:
    """A cross-encoder that was taught relevance and nothing of any LLM: what alignment starts from."""

    model: Any = field(repr=False)
    spec: str
    training: RerankTraining
    log: TrainingLog
    cut: CutTexts


def fit_relevance(
    groups: Sequence[Group],
    *,
    base: str = MINILM,
    training: RerankTraining = RELEVANCE,
    watch: Watch = lambda stage, step: None,
) -> RelevanceReranker:
    """Teach a base which passages hold an answer."""
    model = open_cross_encoder(base, seed=training.seed)
    short, cut = limited(model, groups)
    log = train_groups(model, short, training, lambda step: watch("relevance", step))
    return RelevanceReranker(model, base, training, log, cut)


def preference_groups(rows: Sequence[Preference], loss: str) -> list[Group]:
    """InfoNCE: a question's positives (1) with its own negatives (0). Listwise: all candidates with their shifts."""
    groups = []
    for row in rows:
        texts = [shown(found.passage) for found in row.candidates]
        shifts = [found.shift for found in row.candidates]
        if loss == "listwise" and len(set(shifts)) > 1:
            groups.append(Group(row.question, tuple(texts), tuple(shifts)))
        elif loss == "infonce" and row.is_kept:
            labels = (*([1.0] * len(row.positives)), *([0.0] * len(row.negatives)))
            groups.append(
                Group(row.question, tuple(texts[place] for place in (*row.positives, *row.negatives)), labels)
            )
    return groups


def limited(model: Any, groups: Sequence[Group]) -> tuple[list[Group], CutTexts]:
    """The groups with texts cut to the paper's limits, and how many were."""
    questions = list({group.question for group in groups})
    passages = list({text for group in groups for text in group.passages})
    short = dict(zip(questions, cut_texts(model, questions, QUERY_TOKENS), strict=True))
    shorter = dict(zip(passages, cut_texts(model, passages, PASSAGE_TOKENS), strict=True))
    counted = CutTexts(sum(short[text] != text for text in questions), sum(shorter[text] != text for text in passages))
    return [
        Group(short[group.question], tuple(shorter[text] for text in group.passages), group.labels) for group in groups
    ], counted


def measured(model: Any, rows: Sequence[Preference], reads_question: bool = True) -> dict[str, Floats]:
    """The ranking measures of each row, which look at positives and negatives alone; nothing without rows."""
    if not rows:
        return {}
    pools = [row.only_pool() for row in rows]
    reranker = CrossEncoderReranker.around(model, "trained here", reads_question=reads_question)
    passages = [[found.passage for found in row.candidates] for row in pools]
    return rank_values(pools, reranker.score([row.question for row in pools], passages))


def _copy(model: Any) -> Any:
    import copy

    return copy.deepcopy(model)
