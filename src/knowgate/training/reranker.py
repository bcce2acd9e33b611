"""Fit a reranker: train a cross-encoder on which passages this LLM can use (CBDR, section 3.3)."""

from __future__ import annotations

import copy
import functools
import itertools
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from knowgate.core.files import link_or_copy
from knowgate.core.text import join_tokens
from knowgate.data.preferences import Preference, compute_rank_metrics, deduplicate_passages
from knowgate.data.splits import fingerprint_text, mark_held_out
from knowgate.errors import BadInput, ModelError, WeightsError, require_extra
from knowgate.labels.grading import list_gold_answers
from knowgate.models import embedded_weights
from knowgate.retrieval.passages import format_passage
from knowgate.retrieval.rerankers.cross_encoder import (
    EMPTY_QUESTION,
    RERANKER_SUFFIXES,
    CrossEncoderReranker,
    check_reranker_files,
)
from knowgate.stats.metrics import FloatArray
from knowgate.training.fit_function import FitProgressCallback, ignore_progress
from knowgate.training.reranker_trainer import (
    PASSAGE_TOKENS,
    QUERY_TOKENS,
    RankingGroup,
    RerankerTrainingOptions,
    TrainingLog,
    WeightSelector,
    train_groups,
)
from knowgate.types import Passage, Question, Retriever

MINILM = "minilm"
MINILM_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "vocab.txt")
MAX_SPECIAL_TOKENS = 4  # around a pair
RELEVANCE_TRAINING = RerankerTrainingOptions(batch=16, rate=5e-5, epochs=2)
RELEVANCE_CANDIDATES = 20  # passages to search for, per question
MAX_NEGATIVES = 7
MAX_POSITIVES = 2  # per question; further ones add little
DEV_SHARE = 0.15  # of the training questions, if no question is in the dev split
MIN_DEV_QUESTIONS = 50  # with fewer, P@1 says too little to choose weights by
_join_tokens_cached = functools.lru_cache(maxsize=100_000)(join_tokens)  # many questions share passages


@dataclass(frozen=True)
class AlignedReranker:
    """A cross-encoder (it scores pairs of question and passage) aligned to an LLM: it prefers passages that help this LLM.

    Attributes:
        model: The trained cross-encoder.
        base: Copy of the model before alignment, if the model was trained on relevance first; else None.
        spec: Spec of the model that training started from.
        training: Hyperparameters of the alignment.
        relevance: Log of the relevance training, if there was one.
        alignment: Log of the alignment.
        reads_question: False for a control that ignores the question.
        tested: Held-out rows that the reranker is tested on.
        before: Ranking metrics of each held-out row before alignment.
        after: Ranking metrics of each held-out row after alignment.
    """

    model: Any = field(repr=False)
    base: Any = field(repr=False)
    spec: str
    training: RerankerTrainingOptions
    relevance: TrainingLog | None
    alignment: TrainingLog
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
    reads_question: bool = True,
    watch: FitProgressCallback = ignore_progress,
) -> AlignedReranker:
    """Train a reranker to prefer passages that help an LLM (alignment), and test it.

    The weights with the best ranking of the dev rows are kept.

    Args:
        rows: Questions with passages that help the LLM and passages that do not, divided into train, dev and test.
        base: Cross-encoder to start from.
        training: Hyperparameters of the alignment.
        relevance: Examples of relevant and irrelevant passages to train on first or, with `training.relevance_mix`, to mix
            into the alignment. Default: none, except for the packaged base, which cannot rank yet, and for a mix. They use
            the passages of `rows`: passages with a gold answer are relevant.
        reads_question: False trains a control that does not see the question.
        watch: Called with the progress.

    Raises:
        BadInput: No training question has both helpful and harmful passages.
    """
    training = training or RerankerTrainingOptions()
    usable = [row for row in rows if row.split == "train" and row.error is None]
    train_rows, dev_rows = split_dev_rows(usable, [row for row in rows if row.split == "dev"], training)
    groups = make_preference_groups(train_rows)
    if not groups:
        raise BadInput(
            f"none of the {len(train_rows)} training questions has both helpful and harmful passages. Run `knowgate prefer` "
            "with more questions or another `source`."
        )
    model = open_cross_encoder(base, seed=training.seed)
    if relevance is None and (base == MINILM or training.relevance_mix):
        relevance = make_relevance_groups(extract_preference_questions(train_rows))
    relevance_log = unaligned = None  # both stay None if relevance is not trained first
    if relevance is not None and (base == MINILM or not training.relevance_mix):
        relevance_log = train_groups(model, relevance, RELEVANCE_TRAINING, "relevance", watch)
        unaligned = copy.deepcopy(model)
    tested = [row for row in rows if row.split == "test" and row.is_kept]
    before = measure_ranking(model, tested, reads_question)
    groups += draw_groups(relevance or [], round(training.relevance_mix * len(groups)), training.seed)
    if not reads_question:
        groups = [replace(group, question=EMPTY_QUESTION) for group in groups]
    selector = _make_selector(model, dev_rows, reads_question) if dev_rows else None
    log = train_groups(model, groups, training, "alignment", watch, selector)
    after = measure_ranking(model, tested, reads_question)
    return AlignedReranker(model, unaligned, base, training, relevance_log, log, reads_question, tested, before, after)


def split_dev_rows(
    train: Sequence[Preference], dev: Sequence[Preference], training: RerankerTrainingOptions
) -> tuple[list[Preference], list[Preference]]:
    """Return the rows to train on, and the dev rows, which choose the best weights.

    Args:
        train: Rows of the train split, each a question with its passages.
        dev: Rows of the dev split. If there are none, a share of the train rows is used instead, and not trained on.
        training: Hyperparameters. If `checks` is 0, the last weights are used, so no dev rows are needed.

    Returns:
        Train rows and dev rows. Dev rows without both helpful and harmful passages are useless and left out. If fewer than
        `MIN_DEV_QUESTIONS` are left: all train rows, and no dev rows.
    """
    if not training.checks:
        return list(train), []
    rest = list(train)
    if not dev:  # choose dev rows by a hash of the question
        held_out = mark_held_out([fingerprint_text(row.question) for row in train], DEV_SHARE, training.seed)
        dev = [row for row, is_dev in zip(train, held_out, strict=True) if is_dev]
        rest = [row for row, is_dev in zip(train, held_out, strict=True) if not is_dev]
    useful = [row for row in dev if row.is_kept and row.error is None]  # kept rows have helpful and harmful passages
    if len(useful) < MIN_DEV_QUESTIONS:
        return list(train), []
    return rest, useful


def draw_groups(groups: Sequence[RankingGroup], count: int, seed: int) -> list[RankingGroup]:
    """Draw at most `count` training examples at random, without repetition."""
    order = np.random.default_rng(seed).permutation(len(groups))
    return [groups[int(index)] for index in order[:count]]


def _make_selector(model: Any, rows: Sequence[Preference], reads_question: bool) -> WeightSelector:
    """Make a selector of the weights with the best P@1 on the dev rows.

    P@1 is the share of questions with a helpful passage on top.
    """

    def measure() -> float:
        return float(measure_ranking(model, rows, reads_question)["P@1"].mean())

    return WeightSelector(model, measure, len(rows))


@dataclass(frozen=True)
class RelevanceReranker:
    """A cross-encoder trained on relevance only. It can be aligned to any LLM.

    Attributes:
        model: The trained cross-encoder.
        spec: Spec of the model that training started from.
        training: Hyperparameters.
        log: Losses and duration of the training.
    """

    model: Any = field(repr=False)
    spec: str
    training: RerankerTrainingOptions
    log: TrainingLog


def fit_relevance(
    groups: Sequence[RankingGroup],
    *,
    base: str = MINILM,
    training: RerankerTrainingOptions = RELEVANCE_TRAINING,
    watch: FitProgressCallback = ignore_progress,
) -> RelevanceReranker:
    """Train a cross-encoder on relevance: passages with a gold answer shall rank above all others."""
    model = open_cross_encoder(base, seed=training.seed)
    log = train_groups(model, groups, training, "relevance", watch)
    return RelevanceReranker(model, base, training, log)


def make_preference_groups(rows: Sequence[Preference]) -> list[RankingGroup]:
    """Make one training example of each row with both helpful and harmful passages."""
    groups = []
    for row in rows:
        if not row.is_kept:
            continue
        positives = [row.candidates[index].passage for index in row.positives]
        negatives = [row.candidates[index].passage for index in row.negatives]
        groups.append(_make_group(row.question, positives, negatives))
    return groups


def measure_ranking(model: Any, rows: Sequence[Preference], reads_question: bool = True) -> dict[str, FloatArray]:
    """Measure how well a cross-encoder ranks helpful (positive) passages above the negative ones.

    Args:
        model: The cross-encoder.
        rows: Questions with positive and negative passages. Passages that are neither are left out.
        reads_question: False for a control that sees the passages without the question.

    Returns:
        One value per row for each ranking metric; empty without rows.
    """
    if not rows:
        return {}
    pools = [row.keep_pool() for row in rows]
    reranker = CrossEncoderReranker.from_model(model, "trained here", reads_question=reads_question)
    passages = [[candidate.passage for candidate in row.candidates] for row in pools]
    return compute_rank_metrics(pools, reranker.score([row.question for row in pools], passages))


# --- relevance ------------------------------------------------------------------------------------


def make_relevance_groups(questions: Sequence[Question], retriever: Retriever | None = None) -> list[RankingGroup]:
    """Make training examples for a reranker from gold answers.

    Passages with a gold answer are positive, others negative. No LLM is needed.

    Args:
        questions: Questions with gold answers; their contexts are candidates.
        retriever: Finds further candidates.
    """
    pools = _collect_pools(questions, retriever)
    every_passage = list(itertools.chain(*pools))
    rng = np.random.default_rng(0)
    groups: list[RankingGroup] = []
    for question, pool in zip(questions, pools, strict=True):
        answers = [text for text in map(join_tokens, list_gold_answers(question)) if text.strip()]
        positives = [passage for passage in pool if contains_answer(passage, answers)]
        if positives:
            negatives = _choose_negatives(pool, every_passage, answers, rng)
            if negatives:
                groups.append(_make_group(question.text, positives[:MAX_POSITIVES], negatives))
    return groups


def _collect_pools(questions: Sequence[Question], retriever: Retriever | None) -> list[list[Passage]]:
    """Collect the distinct candidate passages of each question, from its contexts and the retriever."""
    pools = [list(question.contexts) for question in questions]
    if retriever is not None:
        results = retriever.search([question.text for question in questions], RELEVANCE_CANDIDATES)
        pools = [pool + found for pool, found in zip(pools, results, strict=True)]
    return [deduplicate_passages(pool) for pool in pools]


def _choose_negatives(
    pool: Sequence[Passage], every_passage: Sequence[Passage], answers: Sequence[str], rng: np.random.Generator
) -> list[Passage]:
    """Choose passages without an answer: from the question's own pool and, if too few, at random from all pools."""
    negatives = [passage for passage in pool if not contains_answer(passage, answers)][:MAX_NEGATIVES]
    n_missing = MAX_NEGATIVES - len(negatives)
    if n_missing > 0:
        indices = rng.integers(0, len(every_passage), 3 * n_missing)
        drawn = deduplicate_passages([every_passage[index] for index in indices.tolist()])
        negatives += [passage for passage in drawn if not contains_answer(passage, answers)][:n_missing]
    return negatives


def contains_answer(passage: Passage, answers: Sequence[str]) -> bool:
    """Return whether a passage contains an answer as whole words.

    Args:
        passage: The passage.
        answers: Answers as words with a space on both sides, as `join_tokens` makes them.
    """
    text = _join_tokens_cached(format_passage(passage))
    return any(answer in text for answer in answers)


def _make_group(question: str, positives: Sequence[Passage], negatives: Sequence[Passage]) -> RankingGroup:
    """Make a training example, with the label 1 for positive passages and 0 for others."""
    passages = tuple(format_passage(passage) for passage in (*positives, *negatives))
    labels = (1.0,) * len(positives) + (0.0,) * len(negatives)
    return RankingGroup(question, passages, labels)


def extract_preference_questions(rows: Iterable[Preference]) -> list[Question]:
    """Return the questions of preference rows with their candidates as contexts."""
    questions = []
    for row in rows:
        if row.error is None:
            contexts = tuple(candidate.passage for candidate in row.candidates)
            questions.append(Question(row.question, row.id, row.answers, contexts=contexts))
    return questions


# --- cross-encoders -------------------------------------------------------------------------------


def open_cross_encoder(spec: str, *, seed: int = 0) -> Any:
    """Open a sentence-transformers CrossEncoder with the paper's input lengths.

    Args:
        spec: "minilm" for the packaged encoder with a new head, a folder, or a hub name (owner/model).
        seed: Seed of the new head.
    """
    if spec == MINILM:
        return _open_minilm(seed)
    if not Path(spec).is_dir() and "/" not in spec:
        raise WeightsError(f"base='{spec}' was not found. Give a folder, a Hugging Face name or '{MINILM}'.")
    return _limit_input(_load_cross_encoder(spec, spec))


def _open_minilm(seed: int) -> Any:
    """Open MiniLM as a cross-encoder with a random output layer. It cannot rank before training."""
    import torch

    source = embedded_weights.fetch_weights(MINILM)
    with tempfile.TemporaryDirectory() as scratch:
        # MiniLM is stored as a sentence embedder. Without the file modules.json, it is loaded as a plain encoder.
        for name in MINILM_FILES:
            link_or_copy(source / name, Path(scratch) / name)
        torch.manual_seed(seed)
        return _limit_input(_load_cross_encoder(scratch, MINILM, num_labels=1, max_length=PASSAGE_TOKENS))


def _load_cross_encoder(path: str, name: str, **options: Any) -> Any:
    """Load a cross-encoder of sentence-transformers that gives one score per pair.

    Args:
        path: Folder or hub name.
        name: What error messages call it.
        **options: Further arguments of `CrossEncoder`.
    """
    with require_extra("a cross-encoder", "train"):
        from sentence_transformers import CrossEncoder

        from knowgate.models.hf.loader import silence_transformers
    is_folder = Path(path).is_dir()
    if is_folder:
        check_reranker_files(path)
    try:
        with silence_transformers():  # a new head would cause a warning
            only_safetensors = {"use_safetensors": True}  # other formats can run code
            model = CrossEncoder(path, local_files_only=is_folder, model_kwargs=only_safetensors, **options)
    except (OSError, ValueError, KeyError) as error:
        raise WeightsError(
            f"the cross-encoder '{name}' cannot be loaded: {error}. Give a folder, a Hugging Face name or '{MINILM}'."
        ) from error
    if model.num_labels != 1:
        raise ModelError(
            f"the cross-encoder '{name}' returns {model.num_labels} scores per passage instead of one. Use another model."
        )
    return model


def _limit_input(model: Any) -> Any:
    """Limit the input to the paper's 128 + 512 tokens, or to the model's maximum."""
    longest = QUERY_TOKENS + PASSAGE_TOKENS + MAX_SPECIAL_TOKENS
    model.max_seq_length = min(model.max_seq_length or longest, longest)
    return model


def save_cross_encoder(model: Any, folder: Path) -> None:
    """Save config, tokenizer and weights. Files of other types are deleted."""
    from knowgate.models.hf.loader import silence_transformers

    with silence_transformers():
        model.save_pretrained(str(folder), create_model_card=False, safe_serialization=True)
    for path in folder.rglob("*"):
        if path.is_file() and path.suffix not in RERANKER_SUFFIXES:
            path.unlink()
