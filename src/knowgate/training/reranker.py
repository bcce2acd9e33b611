"""Fit a reranker: train a cross-encoder on which passages this LLM can use (CBDR, section 3.3)."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from knowgate.core.artifacts import compute_digests
from knowgate.core.display import escape_markdown
from knowgate.core.files import atomic_folder, check_replaceable, sha256_file, write_json, write_text
from knowgate.core.text import join_tokens
from knowgate.data.preferences import RANK_METRIC_NAMES, Preference, compute_rank_metrics, deduplicate_passages
from knowgate.errors import BadInput
from knowgate.labels.grading import list_gold_answers
from knowgate.retrieval.passages import format_passage
from knowgate.retrieval.rerankers.cross_encoder import (
    EMPTY_QUESTION,
    RERANKER_BASE,
    RERANKER_CARD,
    RERANKER_MANIFEST,
    RERANKER_VERSION,
    RERANKER_WEIGHTS,
    CrossEncoderReranker,
)
from knowgate.stats.bootstrap import Estimate, estimate_mean
from knowgate.stats.metrics import FloatArray
from knowgate.training import reranker_trainer
from knowgate.training.model_card import format_facts, join_card
from knowgate.training.reranker_trainer import (
    MINILM,
    PASSAGE_TOKENS,
    QUERY_TOKENS,
    RankingGroup,
    RerankerProgress,
    RerankerTrainingOptions,
    TrainingLog,
    save_cross_encoder,
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
    """A cross-encoder aligned to an LLM: trained to rank passages that help this LLM above the others.

    Attributes:
        model: The trained cross-encoder.
        base: Copy of the model before alignment, if it was trained on relevance first; else None.
        spec: Spec of the model that training started from.
        training: Hyperparameters of the alignment.
        relevance: Log of the relevance training, if there was one.
        alignment: Log of the alignment.
        cut: Number of texts that were truncated.
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
        relevance: Examples of relevance to train on first. Default: none. The packaged base cannot rank yet, so its
            default is the candidates of the rows, which are relevant if they contain a gold answer.
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
    """Train a cross-encoder to rank passages that contain a gold answer above the others."""
    model = reranker_trainer.open_cross_encoder(base, seed=training.seed)
    short, cut = truncate_groups(model, groups)
    log = reranker_trainer.train_groups(model, short, training, lambda progress: watch("relevance", progress))
    return RelevanceReranker(model, base, training, log, cut)


def make_preference_groups(rows: Sequence[Preference]) -> list[RankingGroup]:
    """Make one training example of each row that has both helpful (positive) and harmful (negative) passages."""
    groups = []
    for row in (row for row in rows if row.is_kept):
        positives, negatives = ([row.candidates[i].passage for i in part] for part in (row.positives, row.negatives))
        groups.append(_make_group(row.question, positives, negatives))
    return groups


def truncate_groups(model: Any, groups: Sequence[RankingGroup]) -> tuple[list[RankingGroup], TruncationCounts]:
    """Truncate questions and passages to the paper's limits, and count the distinct texts that were too long."""
    truncate = reranker_trainer.truncate_texts
    questions = list({group.question for group in groups})
    passages = list({text for group in groups for text in group.passages})
    short_questions = dict(zip(questions, truncate(model, questions, QUERY_TOKENS), strict=True))
    short_passages = dict(zip(passages, truncate(model, passages, PASSAGE_TOKENS), strict=True))
    truncated = []
    for group in groups:
        group_passages = tuple(short_passages[text] for text in group.passages)
        truncated.append(RankingGroup(short_questions[group.question], group_passages, group.labels))
    n_questions = sum(short != text for text, short in short_questions.items())
    n_passages = sum(short != text for text, short in short_passages.items())
    return truncated, TruncationCounts(n_questions, n_passages)


def measure_ranking(model: Any, rows: Sequence[Preference], reads_question: bool = True) -> dict[str, FloatArray]:
    """Measure how well a cross-encoder ranks the positive passages of each row above the negative ones.

    Args:
        model: The cross-encoder.
        rows: Questions with positive and negative passages. Other candidates are left out.
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


def make_relevance_groups(
    questions: Sequence[Question], retriever: Retriever | None = None, *, candidates: int = 20, seed: int = 0
) -> list[RankingGroup]:
    """Make training examples for relevance: passages with a gold answer are positive, others negative.

    Questions with too few negatives get passages of other questions as well. No LLM is needed.

    Args:
        questions: Questions with gold answers; their contexts are candidates.
        retriever: Finds further candidates.
        candidates: Number of passages to search for.
        seed: Seed by which passages of other questions are drawn.
    """
    results = retriever.search([q.text for q in questions], candidates) if retriever else [[] for _ in questions]
    pools = [deduplicate_passages([*q.contexts, *hits]) for q, hits in zip(questions, results, strict=True)]
    every_passage = [passage for pool in pools for passage in pool]
    matcher, rng = AnswerMatcher(), np.random.default_rng(seed)
    groups: list[RankingGroup] = []
    for question, pool in zip(questions, pools, strict=True):
        answers = [text for gold in list_gold_answers(question) if (text := join_tokens(gold)).strip()]
        positives = [passage for passage in pool if matcher.contains(passage, answers)]
        if not positives:
            continue
        negatives = [passage for passage in pool if not matcher.contains(passage, answers)][:MAX_NEGATIVES]
        if (missing := MAX_NEGATIVES - len(negatives)) > 0:
            drawn = [every_passage[int(index)] for index in rng.integers(0, len(every_passage), 3 * missing)]
            negatives += [p for p in deduplicate_passages(drawn) if not matcher.contains(p, answers)][:missing]
        if negatives:
            groups.append(_make_group(question.text, positives[:MAX_POSITIVES], negatives))
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


def _make_group(question: str, positives: Sequence[Passage], negatives: Sequence[Passage]) -> RankingGroup:
    passages = tuple(format_passage(passage) for passage in (*positives, *negatives))
    return RankingGroup(question, passages, (1.0,) * len(positives) + (0.0,) * len(negatives))


def extract_preference_questions(rows: Iterable[Preference]) -> list[Question]:
    """Return the questions of preference rows with their candidates as contexts."""
    return [
        Question(row.question, row.id, row.answers, contexts=tuple(each.passage for each in row.candidates))
        for row in rows
        if row.error is None
    ]


RELEVANCE_MANIFEST = "relevance.json"  # of a base that was trained on relevance only
# Settings of the preferences that say what a reranker is aligned to.
ALIGNMENT_SETTINGS = (
    "model",
    "model_fingerprint",
    "prompts_fingerprint",
    "source",
    "probe",
    "retriever",
    "retriever_fingerprint",
)


@dataclass(frozen=True)
class RankingGains:
    """Ranking metrics on the test rows before and after alignment, and the paired difference."""

    before: dict[str, Estimate]
    after: dict[str, Estimate]
    gain: dict[str, Estimate]


def measure_ranking_gains(fitted: AlignedReranker) -> RankingGains:
    """Average the ranking metrics over the test rows, with confidence intervals, before and after alignment."""
    difference = {name: fitted.after[name] - fitted.before[name] for name in fitted.after}
    return RankingGains(_estimate_means(fitted.before), _estimate_means(fitted.after), _estimate_means(difference))


def _estimate_means(values: Mapping[str, FloatArray]) -> dict[str, Estimate]:
    return {name: estimate_mean(numbers) for name, numbers in values.items()}


def save_reranker(
    fitted: AlignedReranker, out: Path, *, settings: Mapping[str, Any], data_hash: str, command: str = ""
) -> dict[str, Any]:
    """Write the folder of a reranker and return its manifest.

    Args:
        fitted: The reranker.
        out: Folder to write; an earlier reranker there is replaced.
        settings: Settings of the preferences, which say what the reranker is aligned to.
        data_hash: Hash of the preferences.
        command: The command line that the card shows.
    """
    manifest = build_reranker_manifest(fitted, settings, data_hash)
    check_replaceable(out, RERANKER_MANIFEST, "a reranker of ours")
    with atomic_folder(out) as folder:
        save_cross_encoder(fitted.model, folder)
        if fitted.base is not None:
            save_cross_encoder(fitted.base, folder / RERANKER_BASE)
        manifest["weights_sha256"] = sha256_file(folder / RERANKER_WEIGHTS)
        write_text(folder / RERANKER_CARD, render_reranker_card(manifest, command))
        manifest["files"] = compute_digests(folder, exclude=[RERANKER_MANIFEST, RERANKER_CARD])
        write_json(folder / RERANKER_MANIFEST, manifest)
    return manifest


def save_relevance(fitted: RelevanceReranker, out: Path, *, data: str, command: str = "") -> dict[str, Any]:
    """Write a plain cross-encoder folder with a manifest, which is returned; an earlier one is replaced."""
    check_replaceable(out, RELEVANCE_MANIFEST, "a reranker trained on relevance")
    manifest = {
        "version": RERANKER_VERSION,
        "base": fitted.spec,
        "data": data,
        "training": asdict(fitted.training),
        "cut": asdict(fitted.cut),
        "losses": _summarize_losses(fitted.log),
        "command": command,
        "created": time.strftime("%Y-%m-%d", time.gmtime()),
    }
    with atomic_folder(out) as folder:
        save_cross_encoder(fitted.model, folder)
        digest = sha256_file(folder / RERANKER_WEIGHTS)
        write_json(folder / RELEVANCE_MANIFEST, {**manifest, "weights_sha256": digest})
    return manifest


def build_reranker_manifest(fitted: AlignedReranker, settings: Mapping[str, Any], data_hash: str) -> dict[str, Any]:
    """Build the manifest: what the reranker was aligned to, how, and its metrics."""
    gains = measure_ranking_gains(fitted)
    logs = {"relevance": fitted.relevance, "alignment": fitted.alignment}
    parts = {"before": gains.before, "after": gains.after, "gain": gains.gain}
    return {
        "version": RERANKER_VERSION,
        "base": fitted.spec,
        "aligned_to": {key: settings[key] for key in ALIGNMENT_SETTINGS if settings.get(key) is not None},
        "reads_question": fitted.reads_question,
        "data": settings.get("data"),
        "data_hash": data_hash,
        "training": asdict(fitted.training),
        "limits": {"question_tokens": QUERY_TOKENS, "passage_tokens": PASSAGE_TOKENS},
        "cut": asdict(fitted.cut),
        "losses": {stage: _summarize_losses(log) for stage, log in logs.items() if log},
        "tested": len(fitted.tested),
        "metrics": {part: {name: asdict(each) for name, each in metrics.items()} for part, metrics in parts.items()},
        "created": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def _summarize_losses(log: TrainingLog) -> dict[str, Any]:
    """Summarize a training by the mean loss of its first and last tenth, because single batches vary."""
    tenth = max(1, len(log.losses) // 10)
    return {
        "groups": log.groups,
        "first": round(sum(log.losses[:tenth]) / tenth, 6) if log.losses else None,
        "last": round(sum(log.losses[-tenth:]) / tenth, 6) if log.losses else None,
        "seconds": round(log.seconds, 1),
    }


def render_reranker_card(manifest: Mapping[str, Any], command: str) -> str:
    """Render the model card of a reranker from its manifest."""
    aligned, training, cut = manifest["aligned_to"], manifest["training"], manifest["cut"]
    losses = [
        (f"{stage} loss", f"{loss['first']} at the start, {loss['last']} at the end, {loss['groups']} groups")
        for stage, loss in manifest["losses"].items()
    ]
    facts = [
        ("aligned to", f"{aligned['model']} ({aligned['model_fingerprint']}), by {aligned['source']}"),
        ("prompts", aligned["prompts_fingerprint"]),
        ("probe", aligned.get("probe", {}).get("name")),
        ("preferences", f"{manifest['data']} (hash {manifest['data_hash']})"),
        ("base", manifest["base"]),
        (
            "loss",
            f"InfoNCE, temperature {training['temperature']}, rate {training['rate']}, weight decay "
            f"{training['weight_decay']}, {training['epochs']} epoch(s), batch {training['batch']}",
        ),
        *losses,
        ("question", None if manifest["reads_question"] else "not read: a control"),
        ("cut to the limit", f"{cut['questions']} questions, {cut['passages']} passages"),
    ]
    parts = [
        f"# Reranker aligned to {escape_markdown(aligned['model'])}",
        f"A cross-encoder that ranks passages this LLM can use first (CBDR). knowgate, {manifest['created']}.",
        "```python\nimport knowgate as kg\n\n"
        'settings = kg.load_settings(rerank="THIS_FOLDER", docs="FOLDER")\n'
        'print(kg.build_pipeline(settings).answer("a question"))\n```',
        format_facts(facts),
        f"## Measured on {manifest['tested']} held-out questions\n\n" + _format_ranking_metrics(manifest["metrics"]),
    ]
    return join_card(parts, command=command)


def _format_ranking_metrics(metrics: Mapping[str, Any]) -> str:
    if not metrics["after"]:
        return "No question was held out: measure with `knowgate eval-rerank`."
    lines = ["| measure | before | after | gain, 95 % interval |", "|---|---|---|---|"]
    for name in RANK_METRIC_NAMES:
        gain = metrics["gain"][name]
        lines.append(
            f"| {name} | {metrics['before'][name]['value']:.3f} | {metrics['after'][name]['value']:.3f} "
            f"| {gain['value']:+.3f} [{gain['low']:+.3f}, {gain['high']:+.3f}] |"
        )
    return "\n".join(lines)
